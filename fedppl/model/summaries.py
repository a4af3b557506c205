"""Clients that give a summary of their rows: builders, likelihoods for your own builders, and summaries for formulas.

A builder here is made from one function of yours. It declares shared and local variables in the open PyMC model, and
returns the quantity that the summary estimates. The builder for clients with rows calls it too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.dist_math import check_parameters
from pytensor.raise_op import Assert

from fedppl.data import frames
from fedppl.model.checks import builder_name, naming
from fedppl.settings import shown
from fedppl.types import Array, DataError, DeclarationError

__all__ = ["Estimate", "Table", "binomials", "estimate", "grid", "interpolated", "normal", "two_by_two"]


Effects = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class _Builder:
    """A builder: names and checks of its data, and the likelihood of what `effects` returns."""

    kind: str
    effects: Effects
    coords: Mapping[str, Sequence[Any]] | None
    names: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], dict[str, Array]]
    likelihood: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """Name in messages."""
        return f"summaries.{self.kind}({builder_name(self.effects)})"

    @property
    def __signature__(self) -> Any:
        """Arguments: the names of its data."""
        return inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in self.names])

    def read(self, client_id: str, data: Any) -> Any:
        """A client's summary, checked; other data are refused when clients enrol."""
        named = frames.named(data, self.names, f"client {client_id!r}")
        if not isinstance(named, Mapping) or set(named) != set(self.names):
            return named
        if self.check is _checked_estimate:
            frames.require_order((), named["estimate"], named["covariance"])
        with naming(client_id):
            return self.check({name: _numbers(named[name], name) for name in self.names})

    def __call__(self, **data: Any) -> pm.Model:
        """One client's model."""
        with pm.Model(coords=None if self.coords is None else dict(self.coords)) as model:
            containers = [pm.Data(name, data[name]) for name in self.names]
            self.likelihood(self.effects(), *containers)
        return model


def estimate(effects: Effects, *, coords: Mapping[str, Sequence[Any]] | None = None) -> Callable[..., pm.Model]:
    """Builder for clients that give an estimate and its covariance.

    Their data are ``estimate``, a number or (p,), and ``covariance``: a variance, the variances (p,) of independent
    estimates, or (p, p).

    Parameters
    ----------
    effects
        Function without arguments that declares shared and local variables in the open model, and returns what is
        estimated: a scalar, (p,), or a list of scalars.
    coords
        Coords of the model.

    Returns
    -------
    Callable
        Builder for `fedppl.FederatedModel`.

    Raises
    ------
    DeclarationError, DataError
        For `effects` that are no function; when clients enrol, for covariances that are not positive definite.

    Examples
    --------
    >>> import fedppl, pymc as pm
    >>> def effect():
    ...     return pm.Normal("theta", pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 1))
    >>> def trial(y):
    ...     with pm.Model() as model:
    ...         pm.Normal("obs", effect(), 1, observed=pm.Data("y", y))
    ...     return model
    >>> builders = {"rows": trial, "estimate": fedppl.summaries.estimate(effect)}
    >>> fedppl.FederatedModel(builders, shared=["mu", "tau"])
    FederatedModel({'rows': trial, 'estimate': summaries.estimate(effect)}, shared=['mu', 'tau'])

    Notes
    -----
    *When this fails.* An estimate that a prior or a penalty has shrunk counts that prior twice: give maximum likelihood
    estimates, or divide a posterior by its prior.
    """
    return _Builder("estimate", _function(effects), coords, ("estimate", "covariance"), _checked_estimate, normal)


def grid(effects: Effects, *, coords: Mapping[str, Sequence[Any]] | None = None) -> Callable[..., pm.Model]:
    """Builder for clients that give the log-likelihood of one quantity on a grid.

    Their data are ``grid``, increasing values of the quantity (n,), at least five, and ``log_likelihood``, (n,), up to
    a constant; `interpolated` describes it between and beyond them. A profile or partial likelihood is allowed.
    See `estimate` for parameters; here the effects return a scalar. Grids are refused, when clients enrol, that do not
    increase, or beyond whose ends the log-likelihood still rises by 0.1 or more.

    Examples
    --------
    >>> import fedppl, numpy as np, pymc as pm
    >>> def effect():
    ...     return pm.Normal("theta", pm.Normal("mu", 0, 2), 0.5)
    >>> model = fedppl.FederatedModel(fedppl.summaries.grid(effect), shared=["mu"])
    >>> theta = np.linspace(-3, 3, 50)
    >>> log_likelihood = 2 * theta - 9 * np.exp(theta)  # two events where nine were expected
    >>> clients = {"A": {"grid": theta, "log_likelihood": log_likelihood}}
    >>> fit = fedppl.fit(model, clients, progressbar=False, random_seed=1)

    Notes
    -----
    *When this fails.* The likelihood of a client without events rises to a plateau, which its grid has to reach.

    References
    ----------
    .. [1] Schuemie et al. (2022), Combining Cox regressions across a heterogeneous distributed research network facing
       small and zero counts, Statistical Methods in Medical Research 31.
    """
    return _Builder("grid", _function(effects), coords, ("grid", "log_likelihood"), _checked_grid, interpolated)


def two_by_two(
    effects: Effects, *, baseline: Effects | None = None, coords: Mapping[str, Sequence[Any]] | None = None
) -> Callable[..., pm.Model]:
    """Builder for clients that give a 2 x 2 table.

    Their data are ``events`` and ``totals``, (2,): numbers of events and of subjects, the reference arm first. The
    likelihood is exact, `binomials`, with a local intercept. See `estimate` for parameters; here the effects return the
    log odds ratio, a scalar. `baseline`, a function without arguments, declares the log odds of the reference arm where
    the builder for rows has another prior than N(0, 2.5²), or shared parameters of it.

    Examples
    --------
    >>> import fedppl, pymc as pm
    >>> def effect():
    ...     return pm.Normal("theta", pm.Normal("mu", 0, 2), 0.5)
    >>> model = fedppl.FederatedModel(fedppl.summaries.two_by_two(effect), shared=["mu"])
    >>> clients = {"A": {"events": [4, 9], "totals": [40, 41]}, "B": {"events": [0, 3], "totals": [12, 13]}}
    >>> fedppl.fit(model, clients, progressbar=False, random_seed=1).client_ids
    ('A', 'B')

    Notes
    -----
    *When this fails.* A table is not adjusted: the log odds ratio of clients with rows that adjust for differences
    between the arms is another quantity. With few events the prior of the reference arm matters. Small counts may
    identify persons: a client's rules on disclosure hold for tables, too.
    """
    arms = functools.partial(_arms, baseline=None if baseline is None else _function(baseline))
    return _Builder("two_by_two", _function(effects), coords, ("events", "totals"), _checked_table, arms)


def _arms(effect: Any, events: Any, totals: Any, baseline: Effects | None) -> Any:
    return binomials(effect, events, totals, baseline=None if baseline is None else baseline())


def _function(effects: Any) -> Effects:
    if not callable(effects):
        raise DeclarationError(f"{shown(effects)} is no function; pass one that returns the quantity of the summary.")
    function: Effects = effects
    return function


def _numbers(values: Any, name: str) -> Array:
    """Check that values are finite numbers."""
    try:
        masked = np.ma.isMaskedArray(values)
        array = np.asarray(np.ma.filled(values.astype(float), np.nan) if masked else values, dtype=float)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name!r} is {shown(values)}; give numbers.") from error
    if not np.all(np.isfinite(array)):
        raise DataError(f"{name!r} holds {array[~np.isfinite(array)][0]}; give finite numbers.")
    return array


def _checked_estimate(data: Mapping[str, Array]) -> dict[str, Array]:
    """Check an estimate (p,) and its covariance, and return the covariance as (p, p)."""
    vector, given = np.atleast_1d(data["estimate"]), data["covariance"]
    if vector.ndim > 1 or vector.size == 0:
        raise DataError(f"'estimate' has shape {vector.shape}; give a number, or a vector of them.")
    matrix, shape = np.diag(np.atleast_1d(given)) if given.ndim < 2 else given, (len(vector), len(vector))
    if matrix.shape != shape:
        what = f"'covariance' has shape {given.shape} and 'estimate' {vector.shape}"
        raise DataError(f"{what}; give variances, or {shape}.")
    if not np.allclose(matrix, matrix.T, rtol=0.0, atol=1e-8 * np.max(np.abs(matrix))):
        raise DataError("'covariance' is not symmetric.")
    matrix = (matrix + matrix.T) / 2
    variances = np.diag(matrix)
    scale = np.sqrt(np.abs(variances))
    smallest = float(np.linalg.eigvalsh(matrix / np.outer(scale, scale))[0]) if np.all(scale > 0) else 0.0
    if not (np.all(variances > 0) and smallest > 1e-12):
        why = f"variances from {np.min(variances):.3g}, eigenvalues of correlations from {smallest:.3g}"
        raise DataError(f"'covariance' is not positive definite ({why}); drop redundant coefficients.")
    return {"estimate": vector, "covariance": matrix}


def _checked_grid(data: Mapping[str, Array]) -> dict[str, Array]:
    """Check that a grid increases and covers the maximum of the likelihood."""
    points, values = data["grid"], data["log_likelihood"]
    if points.ndim != 1 or points.shape != values.shape or len(points) < POINTS:
        shapes = f"'grid' has shape {points.shape} and 'log_likelihood' {values.shape}"
        raise DataError(f"{shapes}; give vectors of one length, at least {POINTS}.")
    if not np.all(rising := np.diff(points) > 0):
        place = int(np.argmin(rising))
        pair = f"{points[place]:.6g}, {points[place + 1]:.6g}"
        raise DataError(f"'grid' does not increase at index {place}, {pair}; sort both, and drop duplicates.")
    rises = rises_beyond(points, values)
    if max(rises) > RISE:
        end = points[0] if rises[0] > rises[1] else points[-1]
        what = f"'grid' does not cover the likelihood, whose log rises by {max(rises):.3g} beyond {end:.6g}"
        raise DataError(f"{what}; widen it until that is below {RISE}.")
    return {"grid": points, "log_likelihood": values}


def _checked_table(data: Mapping[str, Array]) -> dict[str, Array]:
    """Check events and totals of two arms, as whole numbers."""
    shapes = data["events"].shape, data["totals"].shape
    if shapes != ((2,), (2,)):
        raise DataError(f"'events' has shape {shapes[0]} and 'totals' {shapes[1]}; give two each, the reference first.")
    _require_counts(data["events"], data["totals"])
    return {name: values.astype(np.int64) for name, values in data.items()}


def _require_counts(events: Array, totals: Array) -> None:
    whole = (events == np.floor(events)) & (totals == np.floor(totals))
    wrong = ~(whole & (events >= 0) & (totals >= 1) & (events <= totals))
    if np.any(wrong):
        arm = int(np.argmax(wrong))
        what = f"{events[arm]:g} events of {totals[arm]:g} in arm {arm}"
        raise DataError(f"{what}; give whole numbers, 1 or more subjects, and no more events than these.")


@dataclass(frozen=True, eq=False, init=False)
class Estimate:
    """An estimate of coefficients that a client of a formula gives in place of rows.

    Parameters
    ----------
    names
        Names of the coefficients, as `fedppl.Fit.summary` lists them: ``"Intercept"``, ``"age"``, ``"dose[low]"``; the
        name of a term is enough if it has one coefficient.
    estimate
        Their estimates, (p,).
    covariance
        Covariance of these, (p, p), or the variances of independent ones, (p,).

    Raises
    ------
    DataError
        If shapes do not fit together, or the covariance is not positive definite.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.summaries.Estimate(["arm"], [0.4], [0.09])
    Estimate(['arm'])

    Notes
    -----
    *When this fails.* An estimate that a prior or a penalty has shrunk counts that prior twice. One that is adjusted
    for other columns is another quantity. With few events the likelihood is not normal: give a `Table`.
    """

    names: tuple[str, ...]
    estimate: Array
    covariance: Array

    def __init__(self, names: Sequence[str] | str, estimate: Any, covariance: Any) -> None:
        labels = (names,) if isinstance(names, str) else tuple(names)
        if isinstance(names, Set) or not all(isinstance(name, str) for name in labels) or len({*labels}) < len(labels):
            raise DataError(f"names={shown(names)} must be a list of different names of coefficients.")
        frames.require_order(labels, estimate, covariance)
        given = {"estimate": estimate, "covariance": covariance}
        valid = _checked_estimate({name: _numbers(values, name) for name, values in given.items()})
        if len(valid["estimate"]) != len(labels):
            raise DataError(f"{len(labels)} names {list(labels)} are given, and {len(valid['estimate'])} estimates.")
        for field, value in {"names": labels, **valid}.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        """List the names of the coefficients."""
        return f"Estimate({list(self.names)})"


@dataclass(frozen=True, eq=False, init=False)
class Table:
    """Numbers of events by one column that a client of a formula gives in place of rows, such as a 2 x 2 table.

    It is equivalent to rows with this column, also where clients agree on levels.

    Parameters
    ----------
    column
        The column, the only one right of ~ in the formula.
    events, totals
        Numbers of events, and of subjects, by level of the column.

    Raises
    ------
    DataError
        If the levels of both differ, or values are no counts.

    Examples
    --------
    >>> import fedppl
    >>> table = fedppl.summaries.Table("arm", {"control": 3, "drug": 5}, {"control": 40, "drug": 38})
    >>> {name: len(values) for name, values in table.rows("healed").items()}
    {'arm': 78, 'healed': 78}

    Notes
    -----
    *When this fails.* A table has one column, and adjusts for nothing else. Small counts may identify persons.
    """

    column: str
    events: Mapping[Any, int]
    totals: Mapping[Any, int]

    def __init__(self, column: str, events: Mapping[Any, int], totals: Mapping[Any, int]) -> None:
        if not (isinstance(events, Mapping) and isinstance(totals, Mapping)) or list(events) != list(totals):
            raise DataError("events and totals of a table must be mappings with the same levels in the same order.")
        counts = [_numbers(list(numbers.values()), column) for numbers in (events, totals)]
        _require_counts(*counts)
        object.__setattr__(self, "column", column)
        for field, numbers in zip(("events", "totals"), counts, strict=True):
            object.__setattr__(self, field, dict(zip(events, numbers.astype(int).tolist(), strict=True)))

    def rows(self, response: str) -> dict[str, Any]:
        """The rows that the table counts."""
        levels = np.array([level for level, n in self.totals.items() for _ in range(n)])
        happened = [int(i < self.events[level]) for level, n in self.totals.items() for i in range(n)]
        return {self.column: levels, response: np.array(happened)}


# Likelihoods of summaries, declared in the open PyMC model ------------------------------------------------------------

_MARK, _GRID = "fedppl_summary", "grid"
_SAME_LENGTH = Assert("the estimate and its quantity have different lengths")


def normal(quantity: Any, estimate: Any, covariance: Any, *, name: str = "summary") -> Any:
    r"""Declare a normal likelihood of an estimate of a quantity of the open model.

    .. math:: \hat c \mid c \sim \mathrm N(c, V)

    Parameters
    ----------
    quantity
        The estimated quantity, a scalar or (p,): a variable, a computation, or a list of scalars.
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
    *When this fails.* A skewed likelihood, as with few events, is not normal: give it on a grid.
    """
    about, center, spread = _stacked(quantity), pt.as_tensor(estimate), pt.as_tensor(covariance)
    if center.ndim > 1 or about.ndim > 1 or spread.ndim > 2 or (spread.ndim == 2 and center.ndim == 0):
        axes = f"an estimate has {center.ndim} dimensions, its covariance {spread.ndim}, its quantity {about.ndim}"
        raise DataError(f"{axes}; give numbers, or a vector with its variances or covariance.")
    mean = about
    if center.ndim:  # PyTensor would broadcast a scalar
        whole = pt.atleast_1d(about)
        mean = _SAME_LENGTH(whole, pt.eq(whole.shape[0], center.shape[0]))
    elif about.ndim:
        raise DataError("the estimate is a number and its quantity a vector; give an estimate of each entry.")
    if spread.ndim < 2:
        return _marked(pm.Normal(name, mean, pt.sqrt(spread), observed=estimate))
    even = pt.all(pt.le(pt.abs(spread - spread.T), 1e-8 * pt.max(pt.abs(spread))))
    matrix = check_parameters(spread, even, msg="a symmetric covariance")
    return _marked(pm.MvNormal(name, mean, matrix, observed=estimate))


def interpolated(quantity: Any, grid: Any, log_likelihood: Any, *, name: str = "summary") -> Any:
    """Declare the likelihood of one quantity of the open model, given on a grid.

    Between the points the log-likelihood is interpolated, exactly for parabolas and twice differentiable everywhere.
    Beyond the ends it continues with their slope and curvature, and flattens out where it still rises.

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
        The observed variable; `fedppl.Fit.log_evidence` includes the constant of the log-likelihood.

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
    beyond its ends the likelihood is extrapolated.
    """
    about = _scalar(quantity, "a likelihood on a grid is of one quantity")
    for what, values in (("the grid", grid), ("the log-likelihood", log_likelihood)):
        if pt.as_tensor(values).ndim != 1:
            raise DataError(f"{what} has {pt.as_tensor(values).ndim} dimensions; give a vector.")
    rv = pm.CustomDist(name, about, grid, logp=_on_grid, signature="(),(n)->(n)", observed=log_likelihood)
    return _marked(rv, _GRID)


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
        The observed variable, with the density of the counts; that of rows has no binomial coefficients.

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
    *When this fails.* The table adjusts for nothing: differences of the arms in age or severity are part of θ. With few
    events the default prior of ``baseline`` matters: give one for rare outcomes. Where one arm has no events, or only
    events, the table bounds θ on one side alone, and its prior on the other.
    """
    about = _scalar(effect, "a table has one log odds ratio")
    start = pm.Normal("baseline", 0.0, 2.5) if baseline is None else baseline
    return _marked(pm.Binomial(name, n=totals, logit_p=pt.stack([start, start + about]), observed=events))


def tells_summary(model: Any) -> bool:
    """Whether all observed variables of a model are summaries of rows."""
    return bool(model.observed_RVs) and all(hasattr(rv.tag, _MARK) for rv in model.observed_RVs)


def tells_grid(model: Any) -> bool:
    """Whether a model has a likelihood on a grid, from which nothing can be drawn."""
    return any(getattr(rv.tag, _MARK, "") == _GRID for rv in model.observed_RVs)


def _marked(rv: Any, kind: str = "drawn") -> Any:
    setattr(rv.tag, _MARK, kind)
    return rv


def _stacked(quantity: Any) -> Any:
    """A quantity as one tensor."""
    if isinstance(quantity, Mapping):
        quantity = list(quantity.values())
    return pt.stack(list(quantity)) if isinstance(quantity, list | tuple) else pt.as_tensor(quantity)


def _scalar(quantity: Any, rule: str) -> Any:
    about = _stacked(quantity)
    if about.ndim:
        raise DataError(f"{rule}, and this has {about.ndim} dimensions.")
    return about


def _on_grid(log_likelihood: Any, quantity: Any, grid: Any) -> Any:
    """Log density for PyMC: the interpolated log-likelihood."""
    value = interpolated_logs(quantity, grid, log_likelihood)
    return check_parameters(value, pt.all(pt.gt(grid[1:], grid[:-1])), msg="an increasing grid")


# Interpolation of a function of one variable, as a graph that is twice differentiable everywhere ----------------------

# Between two points: the polynomial of degree five with the values, slopes and curvatures at both. Slope and curvature
# at a point are those of the polynomial of degree four through five points around it. So polynomials up to degree four
# are reproduced exactly, no system of equations is solved, and distant points have no influence.

POINTS = 5  # that a grid needs at least
RISE = 0.1  # the most that a log-likelihood may still rise beyond an end of its grid
_LEAST = 1e-100


def interpolated_logs(at: Any, grid: Any, values: Any) -> Any:
    """Value at a scalar `at` of the function that has `values` (n,) at the increasing points `grid` (n,).

    Beyond the grid it continues with the value, slope and curvature of the end: as a parabola where it falls and is
    concave, bending into a line where it falls and is convex, flattening out exponentially where it rises.
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
    upwards = pt.switch(rises, slope, 1.0)  # keeps the gradient of the other branch finite
    rate = pt.maximum(-curvature / upwards, 1.0 / span)
    rise = -upwards / rate * pt.expm1(-rate * way)
    return value + pt.switch(rises, rise, pt.switch(pt.gt(curvature, 0.0), line, parabola))


def rises_beyond(grid: Array, values: Array) -> tuple[float, float]:
    """Rise of the function beyond the first and the last point; infinite where it bends upwards."""
    rises = []
    for way, points in ((-1.0, slice(None, POINTS)), (1.0, slice(-POINTS, None))):
        ends = grid[points] - grid[0 if way < 0 else -1]
        slope, curvature = divided(values[points], ends)
        outwards, span = way * float(slope), float(grid[-1] - grid[0])
        if outwards * span <= 0.01 * RISE:
            rises.append(0.0)  # a plateau up to rounding
        else:
            rises.append(outwards**2 / -float(curvature) if curvature < 0 else np.inf)
    return rises[0], rises[1]
