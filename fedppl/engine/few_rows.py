"""How few rows a number may depend on that leaves a client: a rule on what its rows say at the points asked for.

A reply is made of rows' slopes. Where a direction of the shared coordinates has all of its slopes from a few rows, what
leaves says what these rows are, however the direction is disguised: a span has no columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Asked
from fedppl.engine.bends import ALONG, looks_of, share_in_bends
from fedppl.engine.policy import Policy, reached
from fedppl.model.graph import observed_through
from fedppl.model.pack import pack
from fedppl.model.row_scores import by_length, row_scores, slopes
from fedppl.model.rows_apart import rows_apart
from fedppl.numerics.concentration import by_column, concentration
from fedppl.numerics.marginal import mode_path
from fedppl.numerics.newton import OK
from fedppl.types import Array, Layout

_NEAR = 1e-4  # the same where differences are looked at, which lose digits
_KEPT = 64  # points of a client
_EQUAL = 1e-2  # relative, of curvatures by differences
_GROUPS, _ROUNDING = 16, 1e-9
_LITTLE = 1e-3  # sds of a column by which a value is moved
_MOST = 0.5  # coordinates a row, beyond which each row has a direction of its own
ByRow = Callable[[Any, Array], Array]  # of an algorithm: vectors (n, p) of a client's rows at a point


_shares: weakref.WeakKeyDictionary[Any, dict[Any, float]] = weakref.WeakKeyDictionary()
_of_others: weakref.WeakKeyDictionary[Any, dict[Any, float]] = weakref.WeakKeyDictionary()
_apart: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_last: weakref.WeakKeyDictionary[Any, tuple[bytes, tuple[Array, Array]]] = weakref.WeakKeyDictionary()


class Found(NamedTuple):
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
    known = _of_others.setdefault(client, {})
    key = (rules.few_rows, rules.few_rows_share, point.tobytes())
    if key not in known:
        if len(known) >= _KEPT:
            known.clear()
        known[key] = _share_beside(client, point, rules.few_rows, rules.few_rows_share)
    if known[key] < rules.few_rows_share:
        return None
    return f"few_rows: curvatures, or terms of others, depend by {known[key]:.4g} on {rules.few_rows} rows or fewer"


def _share_beside(client: Any, point: Array, few: int, enough: float) -> float:
    try:
        in_others = 0.0 if _rows_apart(client) else share_in_others(client, point, few, enough)
        return max(in_others, share_in_bends(client, *_along_modes(client, point), few, enough))
    except Exception:  # which tells of rows too, and is counted as what the rule refuses
        return np.nan


def _rows_apart(client: Any) -> bool:
    """Whether nothing can be in others by the graph alone, wherever it is asked."""
    if client not in _apart:
        x = np.concatenate([gaussian.mean(client.layout.prior), client.initial])
        by_rows = by_length(client, x, np.zeros((1, len(x))))
        _apart[client] = rows_apart(client, _lengths_of_rows(client, by_rows))
    return _apart[client]


def refuse_points(rules: Policy, client: Any, asked: Asked, allowed: Array, by_row: ByRow | None = None) -> Found:
    """The rule that a request breaks where it asks, and which spare points may be answered of those `allowed`."""
    if rules.epsilon is not None or not rules.few_rows:
        return Found(None, allowed)
    ends = [place for q, cavity in asked.targets for place in (gaussian.mean(q), reached(client.layout, cavity))]
    for point in [*asked.points, *ends]:
        rule = _refuse(rules, client, point, by_row) or _refuse_others(rules, client, point, by_row)
        if rule:
            return Found(rule, allowed)
    if not np.any(allowed):
        return Found(None, allowed)
    return _spare(rules, client, asked.spare, allowed, by_row)


def _spare(rules: Policy, client: Any, points: Array, allowed: Array, by_row: ByRow | None) -> Found:
    """Points as far from the first as the rule is kept, looked at by bisection."""
    sd = gaussian.standard_deviations(client.layout.prior)
    away = np.max(np.abs(points - points[0]) / sd, axis=1, initial=0.0)
    order = np.flatnonzero(allowed)[np.argsort(away[allowed], kind="stable")]
    if rule := _refuse(rules, client, points[order[0]], by_row):
        return Found(rule, allowed)
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
    return Found(None, kept)


def _refuse(rules: Policy, client: Any, point: Array, by_row: ByRow | None) -> str | None:
    if not rules.few_rows:
        return None
    known = _shares.setdefault(client, {})
    key = (rules.few_rows, rules.few_rows_share, by_row, point.tobytes())
    if key not in known:
        if len(known) >= _KEPT:
            known.clear()
        known[key] = _share(rules, client, point, by_row)
    share = known[key]
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
            found = by_row(client, point)
            return by_column(found, few) if np.all(np.isfinite(found)) else np.nan
        sets = _vectors(client, point)
    except Exception:  # of a model that has no such slopes, or no density at the point
        return np.nan
    share = 0.0
    for vectors in sets:
        if not np.all(np.isfinite(vectors)):
            return np.nan
        wide = vectors.shape[1] > _MOST * len(vectors)
        share = max(share, by_column(vectors, few) if wide else concentration(vectors, few, enough))
    return share


def _vectors(client: Any, point: Array) -> tuple[Array, ...]:
    """Vectors of rows (n, m) whose squares are what a row has in curvatures, and in these and slopes together.

    A row's direction is that of its slopes, which are exact; its length is theirs where outcomes are known, and the
    root of its curvature where they are not: of a rare outcome slopes alone are nearly all of the few that have it.
    """
    x, paths = _along_modes(client, point)
    found = slopes(client, x, paths)
    ratio = _curvatures(client, x, paths, found)
    return found * np.sqrt(ratio)[:, None], found * np.sqrt(1.0 + ratio)[:, None]


def _curvatures(client: Any, x: Array, paths: Array, found: Array) -> Array:
    """Of each row (n,) how large its curvature is in squares of its slopes, along some directions together.

    Where two directions say the same of all rows, as where each has one linear predictor, so do the others.
    """
    squares, bends = np.zeros((2, ALONG, len(found)))
    for number, step in enumerate(looks_of(client).steps):
        here, way = found @ step, step @ paths
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
    key, (before, found) = point.tobytes(), _last.get(client, (None, None))
    if found is None or before != key:
        found = _at_modes(client, np.ascontiguousarray(point + looks_of(client).aside))
        _last[client] = key, found
    return found


def _at_modes(client: Any, phi: Array) -> tuple[Array, Array]:
    m, d = len(phi), client.local_size
    if not d:
        return phi, np.eye(m)
    status, theta, path = mode_path(client.kernel, phi, np.ascontiguousarray(client.initial), client.packed)
    if status != OK:
        theta, path = client.initial, np.zeros((d, m))
    return np.concatenate([phi, theta]), np.concatenate([np.eye(m), path.T], axis=1)


def share_in_others(client: Any, point: Array, few: int, enough: float) -> float:
    """The largest share that so few rows have in terms which are not their own, as where all read one by its place.

    Zero where all terms are of single rows. A row's data are put in the place of another's, and reals are moved by a
    little, which tells of order statistics. Where rows stand for themselves the slopes of all together change by the
    difference of these two rows' own, which is tried for sixteen groups of rows at once. Where they do not, as with a
    mean of all rows, or with outcomes that are mixed, repeated or in another order, it is looked at for each row, and
    the change itself too: terms that no single row has may cancel but for a few rows.
    """
    layout: Layout = client.layout
    m, held = layout.size, len(client.template.parts.data)
    rng = np.random.default_rng(1)
    aside = gaussian.standard_deviations(layout.prior) * _NEAR * rng.normal(size=m)
    x = np.concatenate([point + aside, client.initial])
    directions = np.eye(m, len(x))

    def total(inputs: Any) -> Array:
        if client.local_size:
            return np.asarray(client.kernel(x, *pack(inputs))[1 : 1 + m])
        parts = by_length(client, x, directions, inputs).values()
        return np.asarray(np.sum([np.sum(part, axis=0) for part in parts], axis=0))

    def with_changed(length: int, change: Callable[[Any], Any]) -> list[Any]:
        arrays = (
            change(np.array(value)) if np.ndim(value) and len(value) == length else value
            for value in client.inputs[:held]
        )
        return [*arrays, *client.inputs[held:]]

    share, before, by_rows = 0.0, total(client.inputs), by_length(client, x, directions)
    for length in _lengths_of_rows(client, by_rows):
        own = by_rows.get(length, np.zeros((length, m)))
        order = rng.permutation(length)
        partner = np.empty(length, dtype=int)
        partner[order] = np.roll(order, 1)
        rounding = _ROUNDING * (sum(np.sum(np.abs(part), axis=0) for part in by_rows.values()) + np.abs(before))

        def put(rows: Any, partner: Any = partner, length: int = length) -> Array:
            return total(with_changed(length, lambda value: _with(value, rows, value[partner[rows]]))) - before

        def moved(row: int, length: int = length, own: Array = own) -> Array:
            inputs = with_changed(length, lambda value: _moved(value, row))
            parts = by_length(client, x, directions, inputs)
            return total(inputs) - before - (parts[length][row] - own[row] if length in parts else 0.0)

        def own_part(rows: Any, own: Array = own, partner: Any = partner) -> Array:
            return np.asarray(np.sum(own[partner[rows]] - own[rows], axis=0))

        groups = [order[place::_GROUPS] for place in range(_GROUPS)]  # no row beside the one that takes its place
        if all(np.all(np.abs(put(rows) - own_part(rows)) <= rounding) for rows in groups):
            continue
        each = np.stack([put(np.array([row])) for row in range(length)])
        foreign = each - np.stack([own_part(np.array([row])) for row in range(length)])
        little = np.stack([moved(row) for row in range(length)])
        # A row's data are put in its own place no more, and in that of another: two changes.
        for changes, rows in ((foreign, few), (each, 2 * few), (little, few)):
            changes[:, np.max(np.abs(changes), axis=0) <= rounding] = 0.0
            wide = m > _MOST * length
            share = max(share, by_column(changes, rows) if wide else concentration(changes, rows, enough))
    return share


def _with(value: Array, rows: Any, given: Array) -> Array:
    value[rows] = given
    return value


def _moved(value: Array, row: int) -> Array:
    if value.dtype.kind == "f":
        value[row] += _LITTLE * np.std(value)
    return value


def _lengths_of_rows(client: Any, by_rows: Any) -> list[int]:
    """Lengths of containers whose entries are rows: as many as an outcome has, or no fewer than the longest has.

    Those of groups are shorter. Of none but constants nothing can be put in another's place.
    """
    held = len(client.template.parts.data)
    lengths = {len(value) for value in client.inputs[:held] if np.ndim(value)}
    observed = observed_through(client.template.parts)
    read = {
        len(value)
        for variable, value in zip(client.template.parts.data, client.inputs[:held], strict=True)
        if np.ndim(value) and variable in observed
    }
    return sorted(length for length in lengths if length in by_rows or length in read or length == max(lengths))
