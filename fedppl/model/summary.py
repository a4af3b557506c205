"""Likelihoods of what a client tells of its rows in their place, declared in the PyMC model that is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.dist_math import check_parameters
from pytensor.raise_op import Assert

from fedppl.model import _interpolation
from fedppl.types import DataError

_MARK, _GRID = "fedppl_summary", "grid"
_ALIKE = Assert("the estimate and what it is of have different lengths")


def normal(quantity: Any, estimate: Any, covariance: Any, *, name: str = "summary") -> Any:
    r"""Declare that an estimate is normal about a quantity of the open model.

    .. math:: \hat c \mid c \sim \mathrm N(c, V)

    Parameters
    ----------
    quantity
        What is estimated, a scalar or (p,): a variable, a computation, or a list of scalars.
    estimate
        Its estimate, a scalar or (p,), in a ``pm.Data`` container.
    covariance
        Covariance of the estimate, (p, p), or variances of independent ones, (p,) or a scalar, in a container.
    name
        Name of the observed variable.

    Returns
    -------
    TensorVariable
        The observed variable.

    Raises
    ------
    DataError
        If shapes do not fit together.

    Examples
    --------
    >>> import fedppl, pymc as pm
    >>> def site(estimate, variance):
    ...     with pm.Model() as model:
    ...         theta = pm.Normal("theta", pm.Normal("mu", 0, 2), 0.5)
    ...         fedppl.summaries.normal(theta, pm.Data("estimate", estimate), pm.Data("variance", variance))
    ...     return model
    >>> fedppl.FederatedModel(site, shared=["mu"]).enrol({"A": {"estimate": 0.3, "variance": 0.04}})
    {'A': ClientModel('A', data {estimate: (), variance: ()}, 1 shared and 1 local coordinates)}

    Notes
    -----
    *When this fails.* A likelihood that is skewed, as with few events, is no normal one: give it on a grid.
    """
    about, told, spread = _stacked(quantity), pt.as_tensor(estimate), pt.as_tensor(covariance)
    if told.ndim > 1 or about.ndim > 1 or spread.ndim > 2 or (spread.ndim == 2 and told.ndim == 0):
        raise DataError(
            f"an estimate of {told.ndim} dimensions and its covariance of {spread.ndim}, of a quantity of "
            f"{about.ndim}: give numbers, or a vector with its variances or covariance matrix."
        )
    mean = about
    if told.ndim:  # PyTensor would repeat the one entry of a scalar
        whole = pt.atleast_1d(about)
        mean = _ALIKE(whole, pt.eq(whole.shape[0], told.shape[0]))
    elif about.ndim:
        raise DataError("an estimate that is a number is of a quantity that is a vector; give an estimate of each.")
    if spread.ndim < 2:
        return _marked(pm.Normal(name, mean, pt.sqrt(spread), observed=estimate))
    even = pt.all(pt.le(pt.abs(spread - spread.T), 1e-8 * pt.max(pt.abs(spread))))
    matrix = check_parameters(spread, even, msg="a symmetric covariance")
    return _marked(pm.MvNormal(name, mean, matrix, observed=estimate))


def interpolated(quantity: Any, grid: Any, log_likelihood: Any, *, name: str = "summary") -> Any:
    """Declare the likelihood of one quantity of the open model, known on a grid.

    Between the points a smooth interpolation, exact for parabolas, twice differentiable everywhere; beyond the ends it
    goes on with their slope and curvature, and flattens out where it still rises.

    Parameters
    ----------
    quantity
        The quantity, a scalar.
    grid
        Its values in increasing order, (n,), at least five, in a ``pm.Data`` container.
    log_likelihood
        Log-likelihood there, (n,), up to a constant, in a container.
    name
        Name of the observed variable.

    Returns
    -------
    TensorVariable
        The observed variable: `fedppl.Fit.log_evidence` counts the likelihood with the constant that it has.

    Raises
    ------
    DataError
        If shapes do not fit together.

    Examples
    --------
    >>> import fedppl, pymc as pm
    >>> def site(grid, log_likelihood):
    ...     with pm.Model() as model:
    ...         theta = pm.Normal("theta", pm.Normal("mu", 0, 2), 0.5)
    ...         fedppl.summaries.interpolated(theta, pm.Data("grid", grid), pm.Data("log_likelihood", log_likelihood))
    ...     return model

    Notes
    -----
    *When this fails.* A grid that is coarse where the likelihood bends, or that ends before the likelihood has fallen:
    what is beyond it is not known, and goes on as it ends.
    """
    about = _stacked(quantity)
    if about.ndim:
        raise DataError(f"a likelihood on a grid is of one quantity, and this has {about.ndim} dimensions.")
    for what, values in (("the grid", grid), ("the log-likelihood", log_likelihood)):
        if pt.as_tensor(values).ndim != 1:
            raise DataError(f"{what} has {pt.as_tensor(values).ndim} dimensions; give a vector.")
    found = pm.CustomDist(name, about, grid, logp=_on_grid, signature="(),(n)->(n)", observed=log_likelihood)
    return _marked(found, _GRID)


def binomials(effect: Any, events: Any, totals: Any, *, baseline: Any = None, name: str = "summary") -> Any:
    r"""Declare a 2 x 2 table: events in a reference arm and in another one.

    .. math:: e_0 \sim \mathrm{Bin}(n_0, \operatorname{logit}^{-1} a), \qquad
              e_1 \sim \mathrm{Bin}(n_1, \operatorname{logit}^{-1}(a + \theta))

    Parameters
    ----------
    effect
        Log odds ratio θ, a scalar.
    events, totals
        Number of events and of subjects, (2,), the reference arm first, in ``pm.Data`` containers.
    baseline
        Log odds a of the reference arm; by default a new local variable ``baseline`` with the prior N(0, 2.5²).
    name
        Name of the observed variable.

    Returns
    -------
    TensorVariable
        The observed variable. Its density is that of the counts: of rows, it lacks the binomial coefficients.

    Raises
    ------
    DataError
        If `effect` is not a scalar; in a fit, where counts have another shape, or more events than subjects.

    Examples
    --------
    >>> import fedppl, pymc as pm
    >>> def site(events, totals):
    ...     with pm.Model() as model:
    ...         theta = pm.Normal("theta", pm.Normal("mu", 0, 2), 0.5)
    ...         fedppl.summaries.binomials(theta, pm.Data("events", events), pm.Data("totals", totals))
    ...     return model

    Notes
    -----
    *When this fails.* The table adjusts for nothing: where arms differ in age or severity, θ holds that, too. With few
    events the default prior of ``baseline`` has a say: give one that fits rare outcomes. Where one arm has no events or
    nothing but events, θ is bounded by the table on one side alone, and its prior decides the other.
    """
    about = _stacked(effect)
    if about.ndim:
        raise DataError(f"a table has one log odds ratio, and this has {about.ndim} dimensions.")
    start = pm.Normal("baseline", 0.0, 2.5) if baseline is None else baseline
    return _marked(pm.Binomial(name, n=totals, logit_p=pt.stack([start, start + about]), observed=events))


def tells_summary(model: Any) -> bool:
    """Whether all that is observed in a model is a summary of rows."""
    return bool(model.observed_RVs) and all(hasattr(rv.tag, _MARK) for rv in model.observed_RVs)


def tells_grid(model: Any) -> bool:
    """Whether a likelihood on a grid is observed, from which nothing can be drawn."""
    return any(getattr(rv.tag, _MARK, "") == _GRID for rv in model.observed_RVs)


def _marked(rv: Any, kind: str = "drawn") -> Any:
    setattr(rv.tag, _MARK, kind)
    return rv


def _stacked(quantity: Any) -> Any:
    """One tensor of what a user wrote."""
    if isinstance(quantity, Mapping):
        quantity = list(quantity.values())
    return pt.stack(list(quantity)) if isinstance(quantity, list | tuple) else pt.as_tensor(quantity)


def _on_grid(log_likelihood: Any, quantity: Any, grid: Any) -> Any:
    """Log density that PyMC asks for: the interpolated log-likelihood."""
    value = _interpolation.interpolated(quantity, grid, log_likelihood)
    return check_parameters(value, pt.all(pt.gt(grid[1:], grid[:-1])), msg="an increasing grid")
