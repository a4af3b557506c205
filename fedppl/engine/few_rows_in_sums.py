r"""The policy's rule `few_rows` where replies leave in sums alone: shares of a direction's weight in the cohort's sum.

.. math:: \max_{|S| = k} \lambda_\mathrm{max}(X_S G^{-1} X_S^\top), \qquad G = \sum_j X_j^\top X_j

X has this client's rows' vectors and G those of all clients: a level that one row has here and thirty elsewhere is no
reason to refuse. As G is no less than a client's own Gram matrix, who passes alone passes here, so that nobody has to
know G where all pass alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Asked
from fedppl.engine.few_rows import (
    MANY_SPARE,
    ByRow,
    Entries,
    before_jumps,
    entries_at,
    is_one_combined,
    pairs_of,
    probes_of,
    refuse_beside,
    refuse_slopes,
    too_large,
    vectors_of,
)
from fedppl.engine.policy import Holdings, Policy, reached
from fedppl.model.baked import reading
from fedppl.numerics.concentration import largest_share, share_in_sum
from fedppl.types import Array, DeclarationError, Layout

MOST = 200  # coordinates: a part has 4 MB for each request; of more each client has to pass alone
KINDS = 3  # of rows' vectors
# Sums under masks hold numbers up to 2^42, known to 2^-60 for each client. So squares of slopes along a prior's sd, in
# the mean over a cohort's rows, may reach 2^46, and have the digits of a float where they are 1.
_SMALLER, _LARGEST, _STEP = 2.0**-6, 2.0**40, 2.0**-60
_CODED = 1e-9  # relative lack of (Σ √s)² to n Σ s where all s are equal: a hundredth in one of 10,000 rows has 2.5e-9
_WHAT = "what is shared there, in the cohort's sum"
Sums = Callable[[Sequence[Array]], Array]  # of a request's places: `numbers` of all clients, summed


def fits(layout: Layout, by_row: ByRow | None) -> bool:
    """Whether rows of such a declaration can be looked at in units of a sum; networks' units are looked at alone."""
    return by_row is None and layout.size <= MOST


def fails_alone(rules: Policy, client: Any, by_row: ByRow | None) -> bool:
    """Whether the rule fails by a client's own rows at the prior's mean, so that its cohort has to know G."""
    if rules.epsilon is not None or not rules.few_rows or not fits(client.layout, by_row):
        return False
    return refuse_slopes(rules, client, gaussian.mean(client.layout.prior)) is not None


def places(layout: Layout, asked: Asked) -> list[Array]:
    """Points at which a request is looked at, the same for all clients: the prior's mean, and those asked for.

    Of spare points the first, that of median distance from it, and the farthest.
    """
    ends = [place for q, cavity in asked.targets for place in (gaussian.mean(q), reached(layout, cavity))]
    return [gaussian.mean(layout.prior), *asked.points, *ends, *asked.spare[_chosen(layout, asked.spare)[0]]]


def _chosen(layout: Layout, spare: Array) -> tuple[list[int], Array]:
    """Which three spare points are looked at, and how far all are from the first, (T,)."""
    if not len(spare):
        return [], np.zeros(0)
    away = np.max(np.abs(spare - spare[0]) / gaussian.standard_deviations(layout.prior), axis=1, initial=0.0)
    order = np.argsort(away, kind="stable")
    return [0, int(order[len(order) // 2]), int(order[-1])], away


# A client's part -----------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Sums of sizes of rows' terms in the Hessian's entries at the prior's mean, in units of prior sds."""

    entries: Array  # (m, m), below the diagonal
    rows: Array  # of how many rows a diagonal entry is, (m,)
    sizes: Array  # of these, (m,)
    roots: Array  # of their square roots, (m,)


class _AtMean(NamedTuple):
    """A client's own entries there."""

    sums: _Sizes
    top: Array  # the largest size of each below the diagonal, (m, m)
    entries: Entries


def numbers(client: Any, at: Sequence[Array], cohort: Holdings) -> Array:
    """What a client adds to the sum: for each place Gram matrices, after a count of 1 where there are none but NaN."""
    m, most = client.layout.size, _LARGEST / cohort.sites
    grams = [_finite(functools.partial(_grams, client, point, cohort), _width(m), most) for point in at]

    def at_mean() -> Array:
        sums, times = client.view(_at_mean).sums, _SMALLER / max(cohort.rows, 1)
        parts = sums.entries * times, sums.rows, sums.sizes * times, sums.roots * np.sqrt(times)
        return np.concatenate([np.ravel(part) for part in parts])

    return np.concatenate([*grams, _finite(at_mean, _width_at_mean(m), most)])


def _width(m: int) -> int:
    return KINDS * m * (m + 1) // 2


def _width_at_mean(m: int) -> int:
    return m * (m + 3)


def _finite(compute: Callable[[], Array], size: int, most: float) -> Array:
    try:
        found = compute()
        if np.all(np.abs(found) <= most):  # not of NaN
            return np.concatenate([[0.0], found])
    except Exception:  # no slopes there, or no density: whoever has none refuses, and the sum is known to lack it
        pass
    return np.concatenate([[1.0], np.full(size, np.nan)])


def _units(client: Any, cohort: Holdings) -> Array:
    """By which slopes are multiplied, (m,): prior sds, for the mean of the cohort's rows."""
    return np.asarray(client.view(probes_of).sd * np.sqrt(_SMALLER / max(cohort.rows, 1)))


def _grams(client: Any, point: Array, cohort: Holdings) -> Array:
    kinds, _ = vectors_of(reading(client).client, point)
    below, units = np.tril_indices(client.layout.size), _units(client, cohort)
    return np.concatenate([(part.T @ part)[below] for part in (vectors * units for vectors in kinds)])


def _at_mean(client: Any) -> _AtMean:
    entries = entries_at(reading(client).client, gaussian.mean(client.layout.prior))
    sd = client.view(probes_of).sd
    total, top = np.zeros((2, len(sd), len(sd)))
    for i, before, terms in pairs_of(entries, lambda _: True):
        total[i, before], top[i, before] = np.sum(terms, axis=0), np.max(terms, axis=0, initial=0.0)
    sizes = entries.sizes * sd
    rows, roots = np.sum(sizes > 0.0, axis=0).astype(float), np.sum(np.sqrt(sizes), axis=0)
    return _AtMean(_Sizes(total * sd, rows, np.sum(sizes, axis=0), roots), top * sd, entries)


# The rule ------------------------------------------------------------------------------------------------------------


def refuse_points(
    rules: Policy, client: Any, asked: Asked, allowed: Array, cohort: Holdings, sums: Sums
) -> tuple[str | None, Array]:
    """The rule that a request breaks by rows in units of the cohort's sum, and which spare points may be answered.

    These are the allowed ones that are no farther from the first than the farthest of three that passes.
    """
    if rules.epsilon is not None or not rules.few_rows:
        return None, allowed
    at, width = places(client.layout, asked), 1 + _width(client.layout.size)
    chosen, away = _chosen(client.layout, asked.spare)
    try:
        total = sums(at)
    except DeclarationError as error:
        return f"sums: {error}", allowed
    if len(total) != len(at) * width + 1 + _width_at_mean(client.layout.size):
        return "few_rows: the cohort's sum is of another request", allowed
    of_places = total[: len(at) * width].reshape(len(at), width)
    rules_there = [_refuse_at(rules, client, point, part, cohort) for point, part in zip(at, of_places, strict=True)]
    first = len(at) - len(chosen)  # of the spare ones
    rule = next((one for one in rules_there[: first + 1] if one), None)
    rule = rule or _refuse_at_mean(rules, client, total[len(at) * width :], cohort)
    rule = rule or next((one for point in at[1 : first + 1] if (one := refuse_beside(rules, client, point))), None)
    if rule or not chosen or not np.any(allowed):
        return rule, allowed
    reach = max(away[place] for place, one in zip(chosen, rules_there[first:], strict=True) if not one)
    kept = allowed & (away <= reach)
    if 1 < np.sum(kept) <= MANY_SPARE:
        kept &= before_jumps(client, asked.spare, kept, int(np.argmin(np.where(kept, away, np.inf))), rules.few_rows)
    return None, kept


def _refuse_at(rules: Policy, client: Any, point: Array, total: Array, cohort: Holdings) -> str | None:
    """The rule that rows break at a point, whose sum over the cohort is given; who passes alone passes."""
    if refuse_slopes(rules, client, point) is None:
        return None
    if round(total[0]):
        return "few_rows: what single rows say cannot be computed there, here or elsewhere; leave such rows out"
    kinds, same = vectors_of(reading(client).client, point)
    m, few, enough = client.layout.size, rules.few_rows, rules.few_rows_share
    units, error, share = _units(client, cohort), cohort.sites * _STEP, 0.0
    for vectors, part in zip(kinds[: KINDS - same], np.split(total[1:], KINDS), strict=False):
        if largest_share(vectors, few, enough) >= enough:
            share = max(share, share_in_sum(vectors * units, _symmetric(part, m), few, enough, error))
    return too_large(rules, share, _WHAT) if share >= enough else None


def _symmetric(part: Array, m: int) -> Array:
    gram = np.zeros((m, m))
    gram[np.tril_indices(m)] = part
    return gram + np.tril(gram, -1).T


def _refuse_at_mean(rules: Policy, client: Any, total: Array, cohort: Holdings) -> str | None:
    """The rule that a row breaks in single entries of the cohort's Hessian, or in a combination of its own entries."""
    if refuse_slopes(rules, client, gaussian.mean(client.layout.prior)) is None:
        return None
    if round(total[0]):
        return "few_rows: entries of the Hessian cannot be computed, here or elsewhere; leave such rows out"
    m, own = client.layout.size, client.view(_at_mean)
    entries, rows, sizes, roots = np.split(total[1:], [m * m, m * (m + 1), m * (m + 2)])
    top = own.top * (_SMALLER / max(cohort.rows, 1))
    lack = rows * sizes - np.square(roots)  # none where a column has one value beside 0: codes of levels
    coded = (lack <= _CODED * np.square(roots)) | own.entries.by_outcomes
    below = np.tril(~np.logical_and.outer(coded, coded), -1)
    whole = np.maximum(entries.reshape(m, m), np.maximum(top, np.finfo(float).tiny))
    share = float(np.max(np.where(below, top / whole, 0.0), initial=0.0))
    if share < rules.few_rows_share and is_one_combined(own.entries, coded):
        share = 1.0
    return too_large(rules, share, "the entries of the cohort's Hessian") if share >= rules.few_rows_share else None
