"""What a client tells of its rows in their place, in arrays: checked, and named for formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedppl.model import _interpolation
from fedppl.settings import shown
from fedppl.types import Array, DataError


def numbers(values: Any, name: str, what: str) -> Array:
    """Finite numbers."""
    try:
        found = np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: {name!r} is {shown(values)}; give numbers.") from error
    if not np.all(np.isfinite(found)):
        raise DataError(f"{what}: {name!r} holds {found[~np.isfinite(found)][0]}; give finite numbers.")
    return found


def checked_estimate(data: Mapping[str, Array], what: str) -> dict[str, Array]:
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


def checked_grid(data: Mapping[str, Array], what: str) -> dict[str, Array]:
    """A grid that increases and covers where the likelihood is largest."""
    points, values = data["grid"], data["log_likelihood"]
    if points.ndim != 1 or points.shape != values.shape or len(points) < _interpolation.POINTS:
        raise DataError(
            f"{what}: 'grid' has shape {points.shape} and 'log_likelihood' {values.shape}; give vectors of one length, "
            f"at least {_interpolation.POINTS}."
        )
    if not np.all(falls := np.diff(points) > 0):
        where = int(np.argmin(falls))
        raise DataError(
            f"{what}: 'grid' does not increase: {points[where]:.6g} stands before {points[where + 1]:.6g}, at index "
            f"{where}; sort it, with its log-likelihood, and leave out what is there twice."
        )
    rises = _interpolation.rises_beyond(points, values)
    if max(rises) > _interpolation.RISE:
        end = points[0] if rises[0] > rises[1] else points[-1]
        raise DataError(
            f"{what}: 'grid' does not cover the likelihood, which still rises beyond {end:.6g} (by {max(rises):.3g} or "
            f"more in its logarithm); widen it until that is below {_interpolation.RISE}."
        )
    return {"grid": points, "log_likelihood": values}


def checked_table(data: Mapping[str, Array], what: str) -> dict[str, Array]:
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
        found = checked_estimate({name: numbers(v, name, "an estimate") for name, v in given.items()}, "an estimate")
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
        counts = [numbers(list(one.values()), column, "a table") for one in (events, totals)]
        _require_counts(counts[0], counts[1], "a table")
        object.__setattr__(self, "column", column)
        object.__setattr__(self, "events", {level: int(n) for level, n in zip(events, counts[0], strict=True)})
        object.__setattr__(self, "totals", {level: int(n) for level, n in zip(events, counts[1], strict=True)})

    def rows(self, response: str) -> dict[str, Any]:
        """The rows that the table counts."""
        levels = np.array([level for level, n in self.totals.items() for _ in range(n)])
        happened = [int(i < self.events[level]) for level, n in self.totals.items() for i in range(n)]
        return {self.column: levels, response: np.array(happened)}
