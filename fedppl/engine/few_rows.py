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
from fedppl.engine.bends import share_in_bends
from fedppl.engine.other_rows import share_in_others
from fedppl.engine.policy import Policy, reached
from fedppl.model.baked import UNKNOWN, reading
from fedppl.model.row_scores import row_scores, slopes
from fedppl.numerics.concentration import by_column, concentration
from fedppl.numerics.marginal import mode_path
from fedppl.numerics.newton import OK
from fedppl.types import Array, Layout

_ASIDE = 1e-6  # prior sds: where a coordinate is 0 its slopes may be, and what depends on few rows does not show
_NEAR = 1e-4  # the same where differences are looked at, which lose digits
_STEP = 1e-4  # prior sds, for curvatures along
_ALONG = 6  # directions: slopes of a row cancel along few of them
_KEPT = 64  # points of a client
_MOST = 0.5  # coordinates a row, beyond which each row has a direction of its own
ByRow = Callable[[Any, Array], Array]  # of an algorithm: vectors (n, p) of a client's rows at a point

_shares: weakref.WeakKeyDictionary[Any, dict[Any, float]] = weakref.WeakKeyDictionary()
_of_others: weakref.WeakKeyDictionary[Any, dict[Any, float]] = weakref.WeakKeyDictionary()


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
    if np.isnan(known[key]):
        return f"few_rows: what rows say in terms of others cannot be looked at: {UNKNOWN}"
    return (
        f"few_rows: curvatures, or terms of others, depend by {known[key]:.4g} on {rules.few_rows} rows or fewer; take "
        "quantiles and extremes from constants that all sites agree on, leave those rows out, or allow it in the policy"
    )


def _share_beside(client: Any, point: Array, few: int, enough: float) -> float:
    sd = gaussian.standard_deviations(client.layout.prior)
    aside = _NEAR * sd * np.random.default_rng(0).normal(size=len(point))
    try:
        x, paths = _along_modes(client, point + aside)
        share = share_in_others(client, x, paths, few, enough)
        if share < enough:
            share = float(np.maximum(share, share_in_bends(reading(client).client, x, paths, few, enough)))
        return share
    except Exception:  # which tells of rows too, and is counted as what the rule refuses
        return np.nan


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
        sets = _vectors(reading(client).client, point)
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
    layout: Layout = client.layout
    sd = gaussian.standard_deviations(layout.prior)
    rng = np.random.default_rng(0)
    phi = np.ascontiguousarray(point + _ASIDE * sd * rng.normal(size=layout.size))
    x, paths = _along_modes(client, phi)
    found = slopes(client, x, paths)
    squares, bends = np.zeros(len(found)), np.zeros(len(found))
    for step in rng.normal(size=(_ALONG, layout.size)) * sd * (_STEP / np.sqrt(max(layout.size, 1))):
        here, way = found @ step, step @ paths
        squares += np.square(here)
        bends += np.abs(slopes(client, x + way, way[None])[:, 0] - here)
    with np.errstate(all="ignore"):
        ratio = np.where(squares > 0.0, bends / squares, 0.0)
    return found * np.sqrt(ratio)[:, None], found * np.sqrt(1.0 + ratio)[:, None]


def _along_modes(client: Any, phi: Array) -> tuple[Array, Array]:
    """x = (φ, θ) and directions (m, m + d) of x in which one coordinate of φ moves, and θ with it, at its mode.

    What leaves is of the density without θ: a local effect that explains a column takes it out of what is shared.
    """
    m, d = len(phi), client.local_size
    if not d:
        return phi, np.eye(m)
    status, theta, path = mode_path(client.kernel, phi, np.ascontiguousarray(client.initial), client.packed)
    if status != OK:
        theta, path = client.initial, np.zeros((d, m))
    return np.concatenate([phi, theta]), np.concatenate([np.eye(m), path.T], axis=1)
