"""Clients that give a summary of their rows: builders for them, likelihoods for your own, and summaries for formulas.

A builder here is made of one function of yours, which declares in an open PyMC model what all clients share and what is
this client's own, and returns the quantity that the summary is of. The builder for clients with rows calls it too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.dist_math import check_parameters
from pytensor.raise_op import Assert

from fedppl.data import frames
from fedppl.model.checks import builder_name
from fedppl.settings import shown
from fedppl.types import Array, DataError, DeclarationError

__all__ = ["Estimate", "Table", "binomials", "estimate", "grid", "interpolated", "normal", "two_by_two"]


Effects = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class _Builder:
    """A builder by what it calls its data, how these are checked, and the likelihood of what `effects` returns."""

    kind: str
    effects: Effects
    coords: Mapping[str, Sequence[Any]] | None
    names: tuple[str, ...]
    check: Callable[[Mapping[str, Any], str], dict[str, Array]]
    likelihood: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """How messages call it."""
        return f"summaries.{self.kind}({builder_name(self.effects)})"

    @property
    def __signature__(self) -> Any:
        """The names of its data."""
        return inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in self.names])

    def read(self, client_id: str, data: Any) -> Any:
        """A client's summary, checked; what is none is refused where clients are."""
        what = f"client {client_id!r}"
        named = frames.named(data, self.names, what)
        if not isinstance(named, Mapping) or set(named) != set(self.names):
            return named
        return self.check({name: _numbers(named[name], name, what) for name in self.names}, what)

    def __call__(self, **data: Any) -> pm.Model:
        """One client's model."""
        with pm.Model(coords=None if self.coords is None else dict(self.coords)) as model:
            held = [pm.Data(name, data[name]) for name in self.names]
            self.likelihood(self.effects(), *held)
        return model


def estimate(effects: Effects, *, coords: Mapping[str, Sequence[Any]] | None = None) -> Callable[..., pm.Model]:
    """Builder for clients that give an estimate and its covariance.

    Their data are ``estimate``, a number or (p,), and ``covariance``, a variance, the variances (p,) of independent
    estimates, or (p, p). A standard error is squared before.

    Parameters
    ----------
    effects
        Function without arguments: it declares what all share and a client's own variables in the open model, and
        returns what is estimated, a scalar, (p,), or a list of scalars.
    coords
        Coords of the model.

    Returns
    -------
    Callable
        Builder for `fedppl.FederatedModel`.

    Raises
    ------
    DeclarationError
        For `effects` that are no function.
    DataError
        When clients enrol: covariances that are not symmetric or not positive definite.

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
    *When this fails.* An estimate that was shrunk, by a prior or a penalty, has had that prior already: give maximum
    likelihood estimates, or a posterior's divided by its prior.
    """
    return _Builder("estimate", _function(effects), coords, ("estimate", "covariance"), _checked_estimate, normal)


def grid(effects: Effects, *, coords: Mapping[str, Sequence[Any]] | None = None) -> Callable[..., pm.Model]:
    """Builder for clients that give the log-likelihood of one quantity on a grid.

    Their data are ``grid``, increasing values of the quantity (n,), at least five, and ``log_likelihood``, (n,), up to
    a constant; `interpolated` says what it is between and beyond them. A profile or partial likelihood may stand there.

    Parameters
    ----------
    effects
        As in `estimate`; it returns a scalar.
    coords
        Coords of the model.

    Returns
    -------
    Callable
        Builder for `fedppl.FederatedModel`.

    Raises
    ------
    DeclarationError
        For `effects` that are no function.
    DataError
        When clients enrol: grids that do not increase, or do not cover where the likelihood is largest.

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
    *When this fails.* A client without events has a likelihood that rises to a plateau: its grid covers it where the
    log-likelihood rises by less than 0.1 beyond the end. Other grids that end before the maximum are refused.

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
    likelihood is exact, `binomials`, with a local intercept.

    Parameters
    ----------
    effects
        As in `estimate`; it returns the log odds ratio, a scalar.
    baseline
        Function without arguments that declares the log odds of the reference arm, where the builder for rows gives
        it another prior than N(0, 2.5²), or shares something about it.
    coords
        Coords of the model.

    Returns
    -------
    Callable
        Builder for `fedppl.FederatedModel`.

    Raises
    ------
    DeclarationError
        For `effects` or `baseline` that are no functions.
    DataError
        When clients enrol: counts that are no whole numbers, or more events than subjects.

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
    *When this fails.* A table is not adjusted: where other clients bring rows, and their effect is adjusted for what
    the arms differ in, the two log odds ratios are not the same quantity. With few events the prior of the reference
    arm has a say, N(0, 2.5²) by default. Small counts may tell who is meant: a client's rules on disclosure hold for
    tables, too.
    """
    start = None if baseline is None else _function(baseline)
    arms = functools.partial(_arms, baseline=start)
    return _Builder("two_by_two", _function(effects), coords, ("events", "totals"), _checked_table, arms)


def _arms(effect: Any, events: Any, totals: Any, baseline: Effects | None) -> Any:
    return binomials(effect, events, totals, baseline=None if baseline is None else baseline())


def _function(effects: Any) -> Effects:
    if not callable(effects):
        raise DeclarationError(
            f"{shown(effects)} is no function; pass one without arguments that declares the variables and returns the "
            "quantity that the summary is of."
        )
    found: Effects = effects
    return found


def _numbers(values: Any, name: str, what: str) -> Array:
    """Finite numbers."""
    try:
        found = np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: {name!r} is {shown(values)}; give numbers.") from error
    if not np.all(np.isfinite(found)):
        raise DataError(f"{what}: {name!r} holds {found[~np.isfinite(found)][0]}; give finite numbers.")
    return found


def _checked_estimate(data: Mapping[str, Array], what: str) -> dict[str, Array]:
    """An estimate (p,) and its covariance (p, p)."""
    told, spread = np.atleast_1d(data["estimate"]), data["covariance"]
    if told.ndim > 1 or told.size == 0:
        raise DataError(f"{what}: 'estimate' has shape {told.shape}; give a number, or a vector of them.")
    matrix = np.diag(np.atleast_1d(spread)) if spread.ndim < 2 else spread
    if matrix.shape != (len(told), len(told)):
        raise DataError(
            f"{what}: 'covariance' has shape {spread.shape} and 'estimate' {told.shape}; give a variance for each, or "
            f"a matrix of shape {(len(told), len(told))}."
        )
    if not np.allclose(matrix, matrix.T, rtol=0.0, atol=1e-8 * np.max(np.abs(matrix))):
        raise DataError(f"{what}: 'covariance' is not symmetric.")
    matrix = (matrix + matrix.T) / 2
    scale = np.sqrt(np.abs(np.diag(matrix)))
    smallest = float(np.linalg.eigvalsh(matrix / np.outer(scale, scale))[0]) if np.all(scale > 0) else 0.0
    if not (np.all(np.diag(matrix) > 0) and smallest > 1e-12):
        raise DataError(
            f"{what}: 'covariance' is not positive definite (the smallest variance is {np.min(np.diag(matrix)):.3g}, "
            f"the smallest eigenvalue of its correlations {smallest:.3g}); leave out coefficients that others "
            "determine."
        )
    return {"estimate": told, "covariance": matrix}


def _checked_grid(data: Mapping[str, Array], what: str) -> dict[str, Array]:
    """A grid that increases and covers where the likelihood is largest."""
    points, values = data["grid"], data["log_likelihood"]
    if points.ndim != 1 or points.shape != values.shape or len(points) < POINTS:
        raise DataError(
            f"{what}: 'grid' has shape {points.shape} and 'log_likelihood' {values.shape}; give vectors of one length, "
            f"at least {POINTS}."
        )
    if not np.all(falls := np.diff(points) > 0):
        where = int(np.argmin(falls))
        raise DataError(
            f"{what}: 'grid' does not increase: {points[where]:.6g} stands before {points[where + 1]:.6g}, at index "
            f"{where}; sort it, with its log-likelihood, and leave out what is there twice."
        )
    rises = rises_beyond(points, values)
    if max(rises) > RISE:
        end = points[0] if rises[0] > rises[1] else points[-1]
        raise DataError(
            f"{what}: 'grid' does not cover the likelihood, which still rises beyond {end:.6g} (by {max(rises):.3g} or "
            f"more in its logarithm); widen it until that is below {RISE}."
        )
    return {"grid": points, "log_likelihood": values}


def _checked_table(data: Mapping[str, Array], what: str) -> dict[str, Array]:
    """Events and totals of two arms, as whole numbers."""
    events, totals = data["events"], data["totals"]
    if events.shape != (2,) or totals.shape != (2,):
        raise DataError(
            f"{what}: 'events' has shape {events.shape} and 'totals' {totals.shape}; give two each, the reference arm "
            "first."
        )
    _require_counts(events, totals, what)
    return {"events": events.astype(np.int64), "totals": totals.astype(np.int64)}


def _require_counts(events: Array, totals: Array, what: str) -> None:
    whole = (events == np.floor(events)) & (totals == np.floor(totals))
    wrong = ~(whole & (events >= 0) & (totals >= 1) & (events <= totals))
    if np.any(wrong):
        where = int(np.argmax(wrong))
        raise DataError(
            f"{what}: {events[where]:g} events of {totals[where]:g} in arm {where}; give whole numbers, totals of at "
            "least 1, and no more events than that."
        )


@dataclass(frozen=True, eq=False, init=False)
class Estimate:
    """What a client of a formula gives in place of rows: an estimate of some of its coefficients.

    Parameters
    ----------
    names
        Names of the coefficients, as `fedppl.Fit.summary` lists them: ``"Intercept"``, ``"age"``, ``"dose[low]"``; of a
        term that has one, its name is enough.
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
    *When this fails.* An estimate that was shrunk, by a prior or a penalty, has had that prior already. One that was
    adjusted for other columns than the formula's is of another quantity, though it has the same name. With few events
    the likelihood is skewed, and a normal one with this covariance is not close to it: give a `Table` then.
    """

    names: tuple[str, ...]
    estimate: Array
    covariance: Array

    def __init__(self, names: Sequence[str] | str, estimate: Any, covariance: Any) -> None:
        told = (names,) if isinstance(names, str) else tuple(names)
        if not all(isinstance(name, str) for name in told) or len(set(told)) < len(told):
            raise DataError(f"names={shown(names)} must be different names of coefficients.")
        given = {"estimate": estimate, "covariance": covariance}
        found = _checked_estimate({name: _numbers(v, name, "an estimate") for name, v in given.items()}, "an estimate")
        if len(found["estimate"]) != len(told):
            raise DataError(f"{len(told)} names {list(told)} are given, and {len(found['estimate'])} estimates.")
        object.__setattr__(self, "names", told)
        object.__setattr__(self, "estimate", found["estimate"])
        object.__setattr__(self, "covariance", found["covariance"])

    def __repr__(self) -> str:
        """What it is of."""
        return f"Estimate({list(self.names)})"


@dataclass(frozen=True, eq=False, init=False)
class Table:
    """What a client of a formula gives in place of rows: numbers of events by one column, a 2 x 2 table for example.

    It says all that rows of this column would say, and counts as such rows, also where clients agree on levels.

    Parameters
    ----------
    column
        The column, the only one that the formula has right of ~.
    events, totals
        Level of the column to number of events, and of subjects.

    Raises
    ------
    DataError
        If the levels of both differ, or counts are none.

    Examples
    --------
    >>> import fedppl
    >>> table = fedppl.summaries.Table("arm", {"control": 3, "drug": 5}, {"control": 40, "drug": 38})
    >>> {name: len(values) for name, values in table.rows("healed").items()}
    {'arm': 78, 'healed': 78}

    Notes
    -----
    *When this fails.* A table is of one column, and adjusts for nothing else. Small counts may tell who is meant.
    """

    column: str
    events: Mapping[Any, int]
    totals: Mapping[Any, int]

    def __init__(self, column: str, events: Mapping[Any, int], totals: Mapping[Any, int]) -> None:
        if not (isinstance(events, Mapping) and isinstance(totals, Mapping)) or list(events) != list(totals):
            raise DataError("events and totals of a table are mappings with the same levels in the same order.")
        counts = [_numbers(list(one.values()), column, "a table") for one in (events, totals)]
        _require_counts(counts[0], counts[1], "a table")
        object.__setattr__(self, "column", column)
        object.__setattr__(self, "events", {level: int(n) for level, n in zip(events, counts[0], strict=True)})
        object.__setattr__(self, "totals", {level: int(n) for level, n in zip(events, counts[1], strict=True)})

    def rows(self, response: str) -> dict[str, Any]:
        """The rows that the table counts."""
        levels = np.array([level for level, n in self.totals.items() for _ in range(n)])
        happened = [int(i < self.events[level]) for level, n in self.totals.items() for i in range(n)]
        return {self.column: levels, response: np.array(happened)}


# Likelihoods of what a client tells of its rows in their place, declared in the PyMC model that is open ---------------

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
