"""How few rows a number may depend on that leaves a client: a rule on what its rows say at the points asked for.

A reply is made of rows' slopes. Where a direction of the shared coordinates has all of its slopes from a few rows, what
leaves says what these rows are, however the direction is disguised: a span has no columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Asked
from fedppl.engine.bends import ALONG, probes_of, share_in_bends
from fedppl.engine.other_rows import lengths_of_rows, share_in_others
from fedppl.engine.policy import Policy, reached
from fedppl.model.baked import reading
from fedppl.model.row_scores import by_length, row_scores, slopes
from fedppl.model.rows_apart import rows_apart
from fedppl.numerics import pairs
from fedppl.numerics.concentration import by_column, largest_share
from fedppl.types import Array

_FARTHER = 100.0  # times what a point is moved aside for slopes, so 1e-4 prior sds
_KEPT = 128  # shares of a client, at as many points or half of them: more than a round asks at
_EQUAL = 1e-2  # relative, of curvatures by differences
_JUMP = 1e-4  # relative change of slopes over 1e-6 prior sds; more than smooth terms of columns within 100 have
ByRow = Callable[[Any, Array], Array]  # of an algorithm: vectors (n, p) of a client's rows at a point


class Ruling(NamedTuple):
    """What the rule says of a request."""

    rule: str | None
    spare: Array  # which of the points that can be left out may be answered, (T,) bool


def refuse_model(rules: Policy, client: Any, by_row: ByRow | None = None) -> str | None:
    """The rule that a declaration with its data breaks wherever it is asked; None where it keeps all."""
    if rules.epsilon is not None:
        return None
    if not rules.joint and by_row is None and (names := row_scores(client).joint):
        return (
            f"joint: {', '.join(map(repr, names))} may read any of the rows at once, so that nobody knows on how few "
            "they depend; declare outcomes of rows as observed variables, or set joint to true in the policy"
        )
    mean = gaussian.mean(client.layout.prior)
    return _refuse(rules, client, mean, by_row) or _refuse_others(rules, client, mean, by_row)


def _refuse_others(rules: Policy, client: Any, point: Array, by_row: ByRow | None) -> str | None:
    """The same of terms that read rows of others, and of curvatures that only few rows have.

    Not where points can be left out, at which neither slopes nor curvatures leave.
    """
    if not rules.few_rows or by_row is not None:
        return None
    share = _once(_share_beside, rules, client, point)
    if share < rules.few_rows_share:
        return None
    if np.isnan(share):
        return (
            "few_rows: what rows say in terms of others cannot be looked at: the builder fails, or makes another "
            "model, where entries of the data are other ones; hold the data as they are in pm.Data, compute from "
            "these, and let nothing in the builder branch on values"
        )
    return (
        f"few_rows: curvatures, or terms of others, depend by {share:.4g} on {rules.few_rows} rows or fewer; take "
        "quantiles and extremes from constants that all sites agree on, leave those rows out, or allow it in the policy"
    )


def _once(look: Callable[..., float], rules: Policy, client: Any, point: Array, *more: Any) -> float:
    """A share at a point, which several requests may ask for."""
    known: dict[Any, float] = client.view(_shares)
    key = (look, rules.few_rows, rules.few_rows_share, *more, point.tobytes())
    if key not in known:
        if len(known) >= _KEPT:
            known.clear()
        known[key] = look(rules, client, point, *more)
    return known[key]


def _shares(_: Any) -> dict[Any, float]:
    return {}


def _share_beside(rules: Policy, client: Any, point: Array) -> float:
    few, enough = rules.few_rows, rules.few_rows_share
    try:
        share = 0.0
        if not client.view(_rows_apart):
            # Differences lose digits: farther from where slopes may vanish than where slopes themselves are looked at.
            phi = np.ascontiguousarray(point + _FARTHER * client.view(probes_of).aside)
            share = share_in_others(client, *_at_modes(client, phi), few, enough)
        if share < enough:
            bends = share_in_bends(reading(client).client, *_along_modes(client, point), few, enough)
            share = float(np.maximum(share, bends))  # NaN too
        return share
    except Exception:  # which tells of rows too, and is counted as what the rule refuses
        return np.nan


def _rows_apart(client: Any) -> bool:
    """Whether nothing can be in others by the graph alone, wherever it is asked; no builder computed of rows before."""
    read = reading(client)
    if read.inputs is None or read.client is not client:
        return False
    x = np.concatenate([gaussian.mean(client.layout.prior), client.initial])
    by_rows = by_length(row_scores(client).along, x, np.zeros((1, len(x))), client.inputs)
    return rows_apart(client, lengths_of_rows(read, client, by_rows))


def refuse_points(rules: Policy, client: Any, asked: Asked, allowed: Array, by_row: ByRow | None = None) -> Ruling:
    """The rule that a request breaks where it asks, and which spare points may be answered of those `allowed`."""
    if rules.epsilon is not None or not rules.few_rows:
        return Ruling(None, allowed)
    ends = [place for q, cavity in asked.targets for place in (gaussian.mean(q), reached(client.layout, cavity))]
    for point in [*asked.points, *ends]:
        rule = _refuse(rules, client, point, by_row) or _refuse_others(rules, client, point, by_row)
        if rule:
            return Ruling(rule, allowed)
    if not np.any(allowed):
        return Ruling(None, allowed)
    return _spare(rules, client, asked.spare, allowed, by_row)


def _spare(rules: Policy, client: Any, points: Array, allowed: Array, by_row: ByRow | None) -> Ruling:
    """Points as far from the first as the rule is kept, looked at by bisection."""
    sd = gaussian.standard_deviations(client.layout.prior)
    away = np.max(np.abs(points - points[0]) / sd, axis=1, initial=0.0)
    order = np.flatnonzero(allowed)[np.argsort(away[allowed], kind="stable")]
    first = points[order[0]]  # at which more than a value may leave
    if rule := _refuse(rules, client, first, by_row) or _refuse_others(rules, client, first, by_row):
        return Ruling(rule, allowed)
    good, bad = 0, len(order)
    probe = bad - 1
    while bad - good > 1:
        if _refuse(rules, client, points[order[probe]], by_row):
            bad = probe
        else:
            good = probe
        probe = (good + bad) // 2
    kept = np.zeros(len(points), dtype=bool)
    kept[order[: good + 1]] = True
    return Ruling(None, kept)


def _refuse(rules: Policy, client: Any, point: Array, by_row: ByRow | None) -> str | None:
    if not rules.few_rows:
        return None
    share = _once(_share, rules, client, point, by_row)
    if share < rules.few_rows_share:
        return None
    if np.isnan(share):
        return "few_rows: what single rows say cannot be computed there; few_rows = 0 in the policy does not look"
    return (
        f"few_rows: {rules.few_rows} rows or fewer make up {share:.4g} of a direction of what is shared there, "
        f"less than {rules.few_rows_share:g} wanted; merge rare levels, leave those rows out, or allow it in the policy"
    )


def _share(rules: Policy, client: Any, point: Array, by_row: ByRow | None) -> float:
    """The largest share that so few rows have of a direction at a point; NaN where it cannot be told."""
    few, enough = rules.few_rows, rules.few_rows_share
    try:
        if by_row is not None:
            vectors = by_row(client, point)
            return by_column(vectors, few) if np.all(np.isfinite(vectors)) else np.nan
        sets = _vectors(reading(client).client, point)
    except Exception:  # of a model that has no such slopes, or no density at the point
        return np.nan
    share = 0.0
    for vectors in sets:
        if not np.all(np.isfinite(vectors)):
            return np.nan
        share = max(share, largest_share(vectors, few, enough))
    return share


def _vectors(client: Any, point: Array) -> tuple[Array, ...]:
    """Vectors of rows (n, m) whose squares are what a row has in curvatures, and in these and slopes together.

    A row's direction is that of its slopes, which are exact; its length is theirs where outcomes are known, and the
    root of its curvature where they are not: of a rare outcome slopes alone are nearly all of the few that have it.
    """
    x, paths = _along_modes(client, point)
    vectors = slopes(client, x, paths)
    ratio = _curvatures(client, x, paths, vectors)
    both = vectors * np.sqrt(ratio)[:, None], vectors * np.sqrt(1.0 + ratio)[:, None]
    return *both, *_right_there(client, point, vectors)


def _right_there(client: Any, point: Array, beside: Array) -> tuple[Array, ...]:
    """Slopes at the very point, where they are others than beside it: of terms that are there at this point alone."""
    here = slopes(client, *_at_modes(client, np.ascontiguousarray(point)))
    same = np.all(np.abs(here - beside) <= _JUMP * np.max(np.abs(beside), axis=0, initial=0.0))
    return () if same else (here,)


def _curvatures(client: Any, x: Array, paths: Array, vectors: Array) -> Array:
    """Of each row (n,) how large its curvature is in squares of its slopes, along some directions together.

    Where two directions say the same of all rows, as where each has one linear predictor, so do the others.
    """
    squares, bends = np.zeros((2, ALONG, len(vectors)))
    for number, step in enumerate(client.view(probes_of).steps):
        here, way = vectors @ step, step @ paths
        squares[number] = np.square(here)
        bends[number] = np.abs(slopes(client, x + way, way[None])[:, 0] - here)
        if number == 1:
            one, other = bends[0] * squares[1], bends[1] * squares[0]
            if np.all(np.abs(one - other) <= _EQUAL * np.maximum(one, other)):
                break
    total, bent = np.sum(squares, axis=0), np.sum(bends, axis=0)
    with np.errstate(all="ignore"):
        return np.where(total > 0.0, bent / total, 0.0)


def _along_modes(client: Any, point: Array) -> tuple[Array, Array]:
    """x = (φ, θ) beside a point, and directions (m, m + d) of x in which one coordinate of φ moves, and θ at its mode.

    What leaves is of the density without θ: a local effect that explains a column takes it out of what is shared.
    """
    known: dict[bytes, tuple[Array, Array]] = client.view(_last_modes)
    key = point.tobytes()
    found = known.get(key)
    if found is None:
        known.clear()
        found = known[key] = _at_modes(client, np.ascontiguousarray(point + client.view(probes_of).aside))
    return found


def _last_modes(_: Any) -> dict[bytes, tuple[Array, Array]]:
    return {}


def _at_modes(client: Any, phi: Array) -> tuple[Array, Array]:
    m, d = len(phi), client.local_size
    if not d:
        return phi, np.eye(m)
    of, who = pairs.one(client.kernel, m, client.packed), np.zeros(1, dtype=np.int64)
    at = pairs.origins(of, phi, np.asarray(client.initial, dtype=float)[None], who)
    theta, path = at.modes.theta[0], at.slope[0]
    if not at.modes.arrived[0]:
        theta, path = client.initial, np.zeros((d, m))
    return np.concatenate([phi, theta]), np.concatenate([np.eye(m), path.T], axis=1)
