"""Likelihoods of what a client tells of its rows in their place, declared in the PyMC model that is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.dist_math import check_parameters
from pytensor.raise_op import Assert

from fedppl.types import Array, DataError

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
    value = interpolated_logs(quantity, grid, log_likelihood)
    return check_parameters(value, pt.all(pt.gt(grid[1:], grid[:-1])), msg="an increasing grid")


# A function that is known at points of one variable, as a graph that is twice differentiable everywhere ---------------

# Between two points a polynomial of degree five, which has the values, slopes and curvatures at both; slope and
# curvature at a point are those of the polynomial of degree four through five points around it. So all parabolas, and
# polynomials up to degree four, come back exactly, no system of equations is solved, and what is far away says nothing.

POINTS = 5  # as many as a grid needs
RISE = 0.1  # the most that a log-likelihood may still rise beyond an end of its grid
_LEAST = 1e-100


def interpolated_logs(at: Any, grid: Any, values: Any) -> Any:
    """Value at a scalar `at` of the function that has `values` (n,) at the increasing points `grid` (n,).

    Beyond the grid it goes on with the value, slope and curvature of its end: as a parabola where it falls and is
    concave, bending into a line where it falls and is convex, and flattening out exponentially where it rises.
    """
    place = pt.clip(pt.sum(pt.ge(at, grid)) - 1, 0, grid.shape[0] - 2)
    ends = _derivatives(pt.stack([place, place + 1]), grid, values)
    left, right = ((value[side], slope[side], curvature[side]) for value, slope, curvature in [ends] for side in (0, 1))
    low, high = grid[place], grid[place + 1]
    inside = _between(pt.clip((at - low) / (high - low), 0.0, 1.0), high - low, left, right)
    first, last, span = grid[0], grid[-1], grid[-1] - grid[0]
    before = _beyond(pt.maximum(first - at, 0.0), left[0], -left[1], left[2], span)
    after = _beyond(pt.maximum(at - last, 0.0), *right, span)
    return pt.switch(pt.lt(at, first), before, pt.switch(pt.gt(at, last), after, inside))


def _derivatives(places: Any, grid: Any, values: Any) -> tuple[Any, Any, Any]:
    """Value, slope and curvature at points of the grid."""
    start = pt.clip(places - POINTS // 2, 0, grid.shape[0] - POINTS)
    away = [grid[start + k] - grid[places] for k in range(POINTS)]
    slope, curvature = divided([values[start + k] for k in range(POINTS)], away)
    return values[places], slope, curvature


def divided(values: Any, away: Any) -> tuple[Any, Any]:
    """Slope and curvature at 0 of the polynomial that has `values` at the points `away`, in Newton's form."""
    parts, slope, curvature = list(values), 0.0, 0.0
    product, first, second = 1.0, 0.0, 0.0  # of the factors so far and its two derivatives, at 0
    for k in range(POINTS):
        if k:
            parts = [(b - a) / (away[j + k] - away[j]) for j, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
            second = 2.0 * first - away[k - 1] * second
            first = product - away[k - 1] * first
            product = -away[k - 1] * product
        slope = slope + parts[0] * first
        curvature = curvature + parts[0] * second
    return slope, curvature


def _between(u: Any, width: Any, left: tuple[Any, Any, Any], right: tuple[Any, Any, Any]) -> Any:
    """Polynomial of degree five in u from 0 to 1."""
    slope, curvature = left[1] * width, left[2] * width**2
    a = right[0] - left[0] - slope - curvature / 2
    b = right[1] * width - slope - curvature
    c = right[2] * width**2 - curvature
    rest = 10 * a - 4 * b + c / 2 + u * (-15 * a + 7 * b - c + u * (6 * a - 3 * b + c / 2))
    return left[0] + u * (slope + u * (curvature / 2 + u * rest))


def _beyond(way: Any, value: Any, slope: Any, curvature: Any, span: Any) -> Any:
    """At a distance of `way` from an end, with the slope outwards."""
    length = pt.clip(0.5 * pt.abs(slope) / pt.maximum(curvature, 1e-300), 1e-9 * span, span)
    line = slope * way + pt.maximum(curvature, 0.0) * length**2 * (pt.expm1(-way / length) + way / length)
    parabola = slope * way + pt.minimum(curvature, 0.0) * way**2 / 2
    rises = pt.gt(slope, _LEAST)
    upwards = pt.switch(rises, slope, 1.0)  # what is not chosen below has to have a gradient all the same
    rate = pt.maximum(-curvature / upwards, 1.0 / span)
    rise = -upwards / rate * pt.expm1(-rate * way)
    return value + pt.switch(rises, rise, pt.switch(pt.gt(curvature, 0.0), line, parabola))


def rises_beyond(grid: Array, values: Array) -> tuple[float, float]:
    """What the function would still rise by beyond the first and the last point; infinite where it bends upwards."""
    found = []
    for way, points in ((-1.0, slice(None, POINTS)), (1.0, slice(-POINTS, None))):
        ends = grid[points] - grid[0 if way < 0 else -1]
        slope, curvature = divided(values[points], ends)
        outwards, span = way * float(slope), float(grid[-1] - grid[0])
        if outwards * span <= 0.01 * RISE:
            found.append(0.0)  # a plateau, and what rounding makes of it
        else:
            found.append(outwards**2 / -float(curvature) if curvature < 0 else np.inf)
    return found[0], found[1]
