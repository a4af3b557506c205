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

from fedppl.data import frames
from fedppl.model import summary
from fedppl.model.enrolment import builder_name
from fedppl.model.summary import binomials, interpolated, normal
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
    if points.ndim != 1 or points.shape != values.shape or len(points) < summary.POINTS:
        raise DataError(
            f"{what}: 'grid' has shape {points.shape} and 'log_likelihood' {values.shape}; give vectors of one length, "
            f"at least {summary.POINTS}."
        )
    if not np.all(falls := np.diff(points) > 0):
        where = int(np.argmin(falls))
        raise DataError(
            f"{what}: 'grid' does not increase: {points[where]:.6g} stands before {points[where + 1]:.6g}, at index "
            f"{where}; sort it, with its log-likelihood, and leave out what is there twice."
        )
    rises = summary.rises_beyond(points, values)
    if max(rises) > summary.RISE:
        end = points[0] if rises[0] > rises[1] else points[-1]
        raise DataError(
            f"{what}: 'grid' does not cover the likelihood, which still rises beyond {end:.6g} (by {max(rises):.3g} or "
            f"more in its logarithm); widen it until that is below {summary.RISE}."
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
