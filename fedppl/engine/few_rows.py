"""The policy's rule `few_rows`: how few rows a number may depend on that leaves a client.

A reply is computed from slopes (gradients) of single rows. Where a direction of the shared coordinates has almost all
of them from a few rows, it reveals these rows. The rule looks at all directions that slopes span.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Asked
from fedppl.engine.policy import Policy, reached
from fedppl.model.baked import Alteration, Reading, all_other, alterations, altered_at, reading
from fedppl.model.compiled import pack
from fedppl.model.graph import observed_through, values_read
from fedppl.model.row_scores import by_length, densities, row_scores, rows_apart, slopes
from fedppl.numerics import pairs
from fedppl.numerics.concentration import (
    are_jumps,
    are_multiples,
    by_column,
    concentration,
    largest_share,
    share_of_units,
)
from fedppl.numerics.tolerances import LINEAR
from fedppl.types import Array

_FARTHER = 100.0  # times the distance of probes, so 1e-4 prior sds
_KEPT = 128  # cached shares of a client: one or two for each point of a round
_EQUAL = 1e-2  # relative tolerance of curvatures by differences
_JUMP = 1e-4  # relative change of slopes over 1e-6 prior sds; smooth terms of columns within 100 change less
ByRow = Callable[[Any, Array], Sequence[Array]]  # of an algorithm: vectors (n, p) of a client's rows at a point


def refuse_model(rules: Policy, client: Any, by_row: ByRow | None = None, *, alone: bool = True) -> str | None:
    """The rule that a declaration with its data breaks at the prior's mean, or None.

    Without `alone` slopes of rows are not looked at: they count in units of a cohort's sum (`few_rows_in_sums`).
    """
    if rules.epsilon is not None:
        return None
    if not rules.joint and by_row is None and (names := row_scores(client).joint):
        return (
            f"joint: {', '.join(map(repr, names))} may read any of the rows at once, so that nobody knows on how few "
            "they depend; declare outcomes of rows as observed variables, or set joint to true in the policy"
        )
    look = _refuse_at if alone else refuse_beside
    return look(rules, client, gaussian.mean(client.layout.prior), by_row)


def _refuse_at(rules: Policy, client: Any, point: Array, by_row: ByRow | None) -> str | None:
    """The rule that rows break at a point at which more than values may leave."""
    return refuse_slopes(rules, client, point, by_row) or refuse_beside(rules, client, point, by_row)


def refuse_beside(rules: Policy, client: Any, point: Array, by_row: ByRow | None = None) -> str | None:
    """The rule that rows break there by terms of others, or by outcomes in curvatures."""
    if not rules.few_rows or by_row is not None:
        return None
    for look, what in ((_share_beside, "terms of others"), (_share_bent, "curvatures")):
        share = _once(look, rules, client, point)
        if np.isnan(share):
            remedy = "hold the data as they are in pm.Data, and let nothing in the builder branch on values"
            return f"few_rows: what rows say in {what} cannot be looked at; {remedy}"
        if share >= rules.few_rows_share:
            remedy = "take quantiles from constants that all sites agree on, leave rows out, or allow it"
            return f"few_rows: {what} depend by {share:.4g} on {rules.few_rows} rows or fewer; {remedy}"
    return None


def _once(look: Callable[..., float], rules: Policy, client: Any, point: Array, *more: Any) -> float:
    """A share at a point, cached for requests at the same point; NaN where it cannot be computed."""
    known = client.view(_shares)
    key = (look, rules.few_rows, rules.few_rows_share, *more, point.tobytes())
    if key not in known:
        if len(known) >= _KEPT:
            known.clear()
        try:
            known[key] = look(rules, client, point, *more)
        except Exception:  # no slopes there, or no density: it depends on rows too, and counts as a refusal
            known[key] = np.nan
    return float(known[key])


def _shares(_: Any) -> dict[Any, float]:
    return {}


def _share_beside(rules: Policy, client: Any, point: Array) -> float:
    """The largest share that few rows have in terms that read several rows, or that the builder computed from rows."""
    if client.view(_rows_apart):
        return 0.0
    # Differences lose digits, so that this point is farther from where slopes may vanish.
    phi = np.ascontiguousarray(point + _FARTHER * client.view(probes_of).aside)
    return share_in_others(client, *_at_modes(client, phi), rules.few_rows, rules.few_rows_share)


def _share_bent(rules: Policy, client: Any, point: Array) -> float:
    """The largest share of a curvature by outcomes that few rows have."""
    along, model = _along_modes(client, point), reading(client).client
    return max(_share_between(model, ends, *along, rules.few_rows, rules.few_rows_share) for ends in _ends(model))


def _rows_apart(client: Any) -> bool:
    """Whether, by the graph alone, no term reads several rows, and the builder computed nothing from rows."""
    read = reading(client)
    if read.inputs is None or read.client is not client:
        return False
    x = np.concatenate([gaussian.mean(client.layout.prior), client.initial])
    by_rows = by_length(row_scores(client).along, x, np.zeros((1, len(x))), client.inputs)
    return rows_apart(client, lengths_of_rows(read, client, by_rows))


def refuse_points(
    rules: Policy, client: Any, asked: Asked, allowed: Array, by_row: ByRow | None
) -> tuple[str | None, Array]:
    """The rule that a request breaks at its points, and which spare ones of those `allowed` may be answered, (T,)."""
    if rules.epsilon is not None or not rules.few_rows:
        return None, allowed
    ends = [place for q, cavity in asked.targets for place in (gaussian.mean(q), reached(client.layout, cavity))]
    for point in [*asked.points, *ends]:
        if rule := _refuse_at(rules, client, point, by_row):
            return rule, allowed
    return _spare(rules, client, asked.spare, allowed, by_row) if np.any(allowed) else (None, allowed)


def _spare(rules: Policy, client: Any, points: Array, allowed: Array, by_row: ByRow | None) -> tuple[str | None, Array]:
    """The spare points up to the distance from the first at which the rule breaks, found by bisection."""
    sd = gaussian.standard_deviations(client.layout.prior)
    away = np.max(np.abs(points - points[0]) / sd, axis=1, initial=0.0)
    order = np.flatnonzero(allowed)[np.argsort(away[allowed], kind="stable")]
    if rule := _refuse_at(rules, client, points[order[0]], by_row):
        return rule, allowed
    good, bad = 0, len(order)
    probe = bad - 1
    while bad - good > 1:
        if refuse_slopes(rules, client, points[order[probe]], by_row):
            bad = probe
        else:
            good = probe
        probe = (good + bad) // 2
    kept = np.zeros(len(points), dtype=bool)
    kept[order[: good + 1]] = True
    if by_row is None and 0 < good < MANY_SPARE:
        kept &= before_jumps(client, points, kept, int(order[0]), rules.few_rows)
    return None, kept


_AT_ONCE = 2**21  # values of the data for which rows' densities are computed together
MANY_SPARE = 64  # more points are for values, each of which is an equation in the rows anyway


def before_jumps(client: Any, points: Array, kept: Array, first: int, few: int) -> Array:
    """Which of the kept points no jump of few rows' densities, which no slope shows, divides from the first, (T,)."""
    client = reading(client).client
    away = points - points[first]
    along = away @ away[np.argmax(np.einsum("ij,ij->i", away, away))]
    order = np.flatnonzero(kept)[np.argsort(along[kept], kind="stable")]
    theta = _at_modes(client, np.ascontiguousarray(points[first]))[0][len(points[first]) :]
    x = np.concatenate([points[order], np.tile(theta, (len(order), 1))], axis=1)
    seed = client.view(probes_of).seed  # nobody can foresee it
    each = max(1, _AT_ONCE // max(1, sum(np.size(values) for values in client.inputs)))
    jumps = np.concatenate(
        [
            are_jumps(lambda at: densities(client, at), x[:-1][k : k + each], x[1:][k : k + each], few, seed)
            for k in range(0, len(x) - 1, each)
        ]
    )
    here = int(np.flatnonzero(order == first)[0])
    before, after = jumps[:here], jumps[here:]
    low = int(np.max(np.flatnonzero(before), initial=-1)) + 1
    high = here + (int(np.argmax(after)) if np.any(after) else len(after))
    found = np.zeros(len(points), dtype=bool)
    found[order[low : high + 1]] = True
    return found


def refuse_slopes(rules: Policy, client: Any, point: Array, by_row: ByRow | None = None) -> str | None:
    """The rule that slopes and curvatures of rows break there."""
    if not rules.few_rows:
        return None
    share = _once(_share, rules, client, point, by_row)
    if share < rules.few_rows_share:
        return None
    if np.isnan(share):
        return "few_rows: what single rows say cannot be computed there; few_rows = 0 in the policy does not look"
    return too_large(rules, share, "what is shared there")


def too_large(rules: Policy, share: float, what: str) -> str:
    """The rule that such a share breaks."""
    return (
        f"few_rows: {rules.few_rows} rows or fewer have {share:.4g} of a direction of {what}, less than "
        f"{rules.few_rows_share:g} wanted; merge rare levels, take fewer or nearer knots, leave rows out, or allow it"
    )


def _share(rules: Policy, client: Any, point: Array, by_row: ByRow | None) -> float:
    """The largest share of a direction that `few_rows` rows have at a point; NaN where it cannot be computed."""
    few, enough = rules.few_rows, rules.few_rows_share
    if by_row is not None:
        return share_of_units(by_row(client, point), few, enough)
    model, share = reading(client).client, 0.0
    for vectors in _vectors(model, point):
        if not np.all(np.isfinite(vectors)):
            return np.nan
        share = max(share, largest_share(vectors, few, enough))
    if share < enough and np.array_equal(point, gaussian.mean(client.layout.prior)):
        # Here codes of levels show as such; which columns rows have together depends on the point in few models.
        share = max(share, share_in_entries(model, point, enough))
    return share


def _vectors(client: Any, point: Array) -> tuple[Array, ...]:
    """Vectors of rows (n, m) whose squares are a row's part of what leaves: the first two kinds, or all."""
    kinds, same = vectors_of(client, point)
    return kinds[:2] if same else kinds  # a term may exist at this very point alone


def vectors_of(client: Any, point: Array) -> tuple[tuple[Array, Array, Array], bool]:
    """Vectors (n, m) by curvatures, by these and squared slopes, and by slopes at the point itself.

    And whether the last are those beside it, so that they tell nothing more.
    """
    x, paths = _along_modes(client, point)
    vectors = slopes(client, x, paths)
    # Directions are those of slopes, which are exact; by their lengths alone rows with a rare outcome would dominate.
    ratio = _curvatures(client, x, paths, vectors)
    both = vectors * np.sqrt(ratio)[:, None], vectors * np.sqrt(1.0 + ratio)[:, None]
    here = slopes(client, *_at_modes(client, np.ascontiguousarray(point)))
    same = np.all(np.abs(here - vectors) <= _JUMP * np.max(np.abs(vectors), axis=0, initial=0.0))
    return (*both, here), bool(same)


def _curvatures(client: Any, x: Array, paths: Array, vectors: Array) -> Array:
    """Ratio (n,) of each row's curvature to its squared slope, summed over some directions."""
    squares, bends = np.zeros((2, ALONG, len(vectors)))
    for number, step in enumerate(client.view(probes_of).steps):
        here, way = vectors @ step, step @ paths
        squares[number] = np.square(here)
        bends[number] = np.abs(slopes(client, x + way, way[None])[:, 0] - here)
        if number == 1:
            first, second = bends[0] * squares[1], bends[1] * squares[0]
            if np.all(np.abs(first - second) <= _EQUAL * np.maximum(first, second)):
                break  # each row has one linear predictor
    total, bent = np.sum(squares, axis=0), np.sum(bends, axis=0)
    with np.errstate(all="ignore"):
        return np.where(total > 0.0, bent / total, 0.0)


def _along_modes(client: Any, point: Array) -> tuple[Array, Array]:
    """x = (φ, θ) beside a point, and directions (m, m + d) of x along which φ moves and θ stays at its mode.

    Replies are of the density with θ integrated out: a local effect may explain a column, which then has no slope.
    """
    known: dict[bytes, tuple[Array, Array]] = client.view(_last_modes)
    key = point.tobytes()
    if key not in known:
        known.clear()
        known[key] = _at_modes(client, np.ascontiguousarray(point + client.view(probes_of).aside))
    return known[key]


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


# Single entries of the Hessian: columns that few rows have together ---------------------------------------------------

_CODED = 1e-6  # relative difference of squares of a column's values that are one
_STEP_OF_ENTRIES = 1e-4  # prior sds
# Of a level and a spline's tail two or three rows are common in honest designs: by three 2.5 % of 200 are refused.
_FEW_IN_ENTRIES = 1
_BY_OUTCOMES = 1e-6  # relative change of a curvature with outcomes that is none
_NOTHING_THERE = 1e-9  # of the largest term: a smaller one is rounding
# Entries combined: honest rows far out have most of a combination, but not all of it but a millionth.
_ALL_OF_IT, _FAINT_ENTRIES, _ENTRIES_A_ROW, _MOST_ENTRIES = 1.0 - 1e-6, 1e-6, 0.25, 500


class Entries(NamedTuple):
    """Rows' terms of the Hessian's entries at a point, in units of the prior's sd of the entry's first coordinate."""

    terms_of: Callable[[int, Array], Array]  # (n, k) of a coordinate, along directions (k, d)
    paths: Array  # a direction for each coordinate, (m, d)
    sizes: Array  # of the diagonal's terms that are more than rounding, (n, m)
    by_outcomes: Any  # coordinates whose curvatures outcomes are in, (m,) bool


def entries_at(client: Any, point: Array) -> Entries:
    """The entries at a point, by differences of slopes."""
    x, paths = _at_modes(client, np.ascontiguousarray(point))
    steps = _STEP_OF_ENTRIES * client.view(probes_of).sd[:, None] * paths

    def terms_of(i: int, directions: Array) -> Array:
        change = slopes(client, x + steps[i], directions) - slopes(client, x - steps[i], directions)
        return np.asarray(np.nan_to_num(change, posinf=0.0, neginf=0.0)) / (2.0 * _STEP_OF_ENTRIES)

    m = len(paths)
    diagonal = np.abs(np.stack([terms_of(i, paths[i : i + 1])[:, 0] for i in range(m)], axis=1))
    sizes = np.where(diagonal > _NOTHING_THERE * np.max(diagonal, axis=0, initial=0.0), diagonal, 0.0)
    return Entries(terms_of, paths, sizes, _by_outcomes(client, x, paths, steps))


def pairs_of(entries: Entries, wanted: Callable[[int], Any]) -> Iterator[tuple[int, Any, Array]]:
    """For each coordinate others (k,) before it that are wanted, and the sizes of rows' terms with these, (n, k)."""
    largest = np.max(entries.sizes, axis=0, initial=0.0)
    for i in range(1, len(entries.paths)):
        others = np.flatnonzero(np.broadcast_to(wanted(i), len(entries.paths))[:i])
        if len(others):
            terms = np.abs(entries.terms_of(i, entries.paths[others]))
            terms[terms <= _NOTHING_THERE * max(largest[i], np.max(terms, initial=0.0))] = 0.0
            yield i, others, terms


def share_in_entries(client: Any, point: Array, enough: float) -> float:
    """The largest share of a row in an entry of the Hessian of all rows that tells more than a count.

    Where both columns are codes of levels the entry counts a cell of two factors, which is allowed. Or one, if a row
    has a combination of entries to itself, as where two columns differ by signs but for one row.
    """
    entries = entries_at(client, point)
    one = np.max(entries.sizes, axis=0, initial=0.0)
    codes = np.all((entries.sizes == 0.0) | (np.abs(entries.sizes - one) <= _CODED * one), axis=0)  # one value beside 0
    # Where outcomes are in the curvature sizes do not show codes: such entries are not looked at.
    coded = codes | entries.by_outcomes
    share = 0.0
    for _, _, terms in pairs_of(entries, lambda i: ~(coded & coded[i])):
        share = max(share, by_column(np.sqrt(terms), _FEW_IN_ENTRIES))
        if share >= enough:
            return share
    return 1.0 if is_one_combined(entries, coded) else share


def is_one_combined(entries: Entries, coded: Any) -> bool:
    """Whether a row has a combination of the entries of columns that are no codes to itself, where these are few."""
    numbers = np.flatnonzero(~coded)
    entries_in_all = len(numbers) * (len(numbers) + 1) / 2
    if not 0 < entries_in_all <= min(_ENTRIES_A_ROW * len(entries.sizes), _MOST_ENTRIES):
        return False
    each = [entries.terms_of(int(i), entries.paths[numbers[: place + 1]]) for place, i in enumerate(numbers)]
    return concentration(np.concatenate(each, axis=1), _FEW_IN_ENTRIES, _ALL_OF_IT, _FAINT_ENTRIES) >= _ALL_OF_IT


def _by_outcomes(client: Any, x: Array, paths: Array, steps: Array) -> Any:
    """Of which coordinates the curvature of a row depends on its outcome, (m,) bool."""

    def diagonal(inputs: Any) -> Array:
        def along(at: Array, path: Array) -> Array:
            rows = by_length(row_scores(client).along, at, path[None], inputs).values()
            return np.concatenate([np.zeros(0), *(part[:, 0] for part in rows)])

        return np.stack(
            [along(x + step, path) - along(x - step, path) for step, path in zip(steps, paths, strict=True)]
        )

    high, *low = (diagonal(inputs) for inputs in _ends(client)[0])
    if not low:
        return np.zeros(len(paths), dtype=bool)
    change = np.nan_to_num(np.abs(high - low[0]), posinf=0.0)
    size = np.nanmax(np.where(np.isfinite(high), np.abs(high), 0.0), axis=1, initial=0.0)
    return np.max(change, axis=1, initial=0.0) > _BY_OUTCOMES * size


# Curvatures by outcomes: the rule on entries of the Hessian that depend on few rows' outcomes -------------------------

# A term like `b[0] * b[1]` in the mean of a single row hides among the slopes of all rows, but has an entry of the
# Hessian to itself, which is that row's outcome.

_ASIDE = 1e-6  # prior sds, from a point: where a coordinate is 0 slopes may vanish and hide a term of few rows
ALONG = 6  # directions: a row's slopes cancel along few of them
_SHORT = 1e-4  # prior sds, length of the steps along them
_STEP = 1e-3  # prior sds, of differences
_NOTHING = (
    1e-9  # of the largest slope: differences over steps of 1e-3 have 1e-12; − rounding is a row's, + terms missed
)
_SMALL = 1e-3  # of slopes' norm: curvatures below are in units of it, so that rounding in them, 1e-12, stays below ...
_FAINT = 1e-8  # ... this share of the largest direction; − rounding is a direction, + faint terms are missed
_NO_BEND = 1e-8  # the same along one direction, to which a large entry may contribute little
_MOST_DIRECTIONS = 30
_SAME_OUTCOMES = 1e-6  # relative: what differs less is taken for equal


class Probes(NamedTuple):
    """Where slopes are probed, relative to a point of a request."""

    sd: Array  # of the prior, (m,)
    aside: Array  # from the point, (m,)
    steps: Array  # from there, (ALONG, m)
    pair: Array  # directions in sds, (2, m)
    seed: int


def probes_of(client: Any) -> Probes:
    """Random directions, the same at each point, by a seed from the data: no server can make terms that they miss."""
    raw = b"".join(np.asarray(value).tobytes() for value in client.inputs)
    seed = int.from_bytes(hashlib.sha256(raw).digest(), "big")
    sd = gaussian.standard_deviations(client.layout.prior)
    rows = np.random.default_rng(seed).normal(size=(1 + ALONG + 2, len(sd)))
    steps = sd * rows[1:-2] * (_SHORT / np.sqrt(max(len(sd), 1)))
    return Probes(sd, _ASIDE * sd * rows[0], steps, rows[-2:], seed)


def _share_between(client: Any, ends: Sequence[Any], x: Array, paths: Array, few: int, enough: float) -> float:
    """The largest share that `few` rows have of the change of curvatures between two forms of inputs, or in one form.

    The curvature of a linear predictor is a multiple of its squared slopes: of that part the size alone is used.
    """
    probes = client.view(probes_of)
    sd, m = probes.sd, len(probes.sd)

    def change(at: Array, along: Array) -> dict[int, Array]:
        (high, *low) = (by_length(row_scores(client).along, at, along, inputs) for inputs in ends)
        changes = {length: high[length] - low[0][length] if low else high[length] for length in high}
        # A row cannot have every outcome, as more successes than trials; then it has no difference.
        return {length: np.where(np.isfinite(difference), difference, 0.0) for length, difference in changes.items()}

    def bend(slopes: dict[int, Array], along: Array, direction: Array) -> dict[int, Array]:
        # For a linear predictor a one-sided difference is a multiple of the slopes, too.
        beside = change(x + (_STEP * direction * sd) @ paths, along)
        return {length: (beside[length] - difference) / _STEP for length, difference in slopes.items()}

    scaled = paths * sd[:, None]
    along = probes.pair[:1] @ scaled
    slopes = change(x, along)
    first = bend(slopes, along, probes.pair[1])
    if all(np.max(np.abs(first[n]), initial=0.0) <= _NO_BEND * np.max(np.abs(slopes[n]), initial=0.0) for n in slopes):
        return 0.0  # outcomes enter only by products with linear predictors
    slopes = change(x, scaled)
    directions = np.eye(m)
    if m > _MOST_DIRECTIONS:
        directions = np.random.default_rng(probes.seed).normal(size=(_MOST_DIRECTIONS, m)) / np.sqrt(m)
    by_direction = [bend(slopes, scaled, direction) for direction in directions]
    share = 0.0
    for length, row_slopes in slopes.items():
        size = np.sqrt(np.max(np.sum(np.square(row_slopes), axis=0), initial=0.0))
        bends = np.stack([changes[length].T for changes in by_direction])  # (directions, m, n)
        for columns, by_size in _columns(client, row_slopes.T, bends):
            if by_size:
                columns *= np.abs(columns) > _NOTHING * np.max(np.abs(row_slopes), initial=0.0)
                share = max(share, by_column(columns, few))
            else:
                share = max(share, largest_share(columns, few, enough, _FAINT, _SMALL * size))
    return share


def _columns(client: Any, slopes: Array, bends: Array) -> Iterator[tuple[Array, bool]]:
    """For each shared variable the remaining curvatures (n, columns), and the sizes of the parts split off."""
    for here in client.layout.slices.values():
        row_slopes, changes = slopes[here], bends[:, here]
        if len(row_slopes) == 1:
            yield changes[:, 0].T.copy(), False
            continue
        squares = np.maximum(np.sum(np.square(row_slopes), axis=0), 1e-300)
        times = np.einsum("kan,an->kn", changes, row_slopes) / squares
        rest = changes - times[:, None] * row_slopes
        if np.max(np.abs(rest), initial=0.0) > LINEAR * np.max(np.abs(changes), initial=0.0):
            # Without a linear predictor entries combine as they are: the split hides what all but few rows cancel.
            yield changes.reshape(-1, changes.shape[-1]).T.copy(), False
        yield rest.reshape(-1, rest.shape[-1]).T, False
        yield np.sqrt(np.abs(times) * np.sqrt(squares)).T, True
    if len(bends) == len(slopes):
        yield _of_scalars(client, slopes, bends), False


def _of_scalars(client: Any, slopes: Array, bends: Array) -> Array:
    """Curvatures (n, columns) between scalar variables that are not of one linear predictor."""
    scalars = [here.start for here in client.layout.slices.values() if here.stop - here.start == 1]
    columns = [
        bends[i, j] for i in scalars for j in scalars if j < i and not are_multiples(slopes[[i, j]], bends, (i, j))
    ]
    return np.stack(columns, axis=1) if columns else np.zeros((slopes.shape[1], 0))


def _ends(client: Any) -> list[list[Any]]:
    """A client's inputs with all outcomes at their largest, and at their smallest; as they are if none is in pm.Data.

    Outcomes that are all equal are moved: which way stays in their support is not known, so that several are tried.
    """
    template, values = client.template, client.template.parts.model.rvs_to_values
    rvs = template.parts.model.observed_RVs
    read = template.once("outcomes", lambda: values_read(values[rv] for rv in rvs))
    pairs = enumerate(zip(template.parts.data, client.inputs, strict=False))  # after the data come shapes
    outcomes = [(place, value) for place, (v, value) in pairs if v in read and np.ndim(value) and len(value)]
    if not outcomes:
        return [[client.inputs]]
    found = []
    for times, plus in ((1.0, 1.0), (1.0, -1.0), (0.5, 0.0)):
        low, high, equal = list(client.inputs), list(client.inputs), False
        for place, value in outcomes:
            least, most = (np.asarray(end(value, axis=0), dtype=float) for end in (np.min, np.max))
            same = np.abs(most - least) <= _SAME_OUTCOMES * np.abs(most)
            equal = equal or bool(np.any(same))
            ends = least, np.where(same, times * most + plus, most)
            low[place], high[place] = (np.broadcast_to(one, value.shape).astype(value.dtype) for one in ends)
        found.append([high, low])
        if not equal:
            break
    return found


# Terms that read several rows: the rule where a graph, or its builder, mixes rows -------------------------------------

_ROUNDING = 1e-12  # of the sum of sizes: a smaller change is rounding
_BLOCKS, _BLOCKS_A_COLUMN = 48, 6  # of rows changed together: by chance no three of them have .95 of a direction


class _Slopes(NamedTuple):
    """Slopes along the shared coordinates: of single rows, by the number of rows, and the sum of all other terms."""

    rows: dict[int, Array]
    rest: Array


def share_in_others(client: Any, x: Array, paths: Array, few: int, enough: float) -> float:
    """The largest share that `few` rows have in terms that are not only theirs, at x and along paths (m, m + d).

    Zero if all terms are of single rows; NaN where it cannot be computed. Rows are altered by blocks, in pm.Data and
    through the builder: an effect of few rows shows in as few blocks, one of all rows, such as a mean, in all. Changes
    are measured of other rows' terms, and whole, since terms may cancel but for a few rows.
    """
    read = reading(client)
    if read.inputs is None:
        return np.nan
    at = _slopes_at(read, client, x, paths)
    before = at(client.arrays)
    if before is None:
        return np.nan
    share = 0.0
    for length in lengths_of_rows(read, client, before.rows):
        names = [name for name, value in client.arrays.items() if np.ndim(value) and len(value) == length]
        other = all_other({name: client.arrays[name] for name in names})
        together = [Alteration(name, np.asarray(client.arrays[name]), other[name], True, 0.0) for name in names]
        if _of_themselves(at, before, client.arrays, together, length):
            continue
        for alteration in (a for name in names for a in alterations(name, np.asarray(client.arrays[name]))):
            share = float(np.maximum(share, _share_of(at, client.arrays, alteration, few, enough)))
            if not share < enough:  # NaN too
                return share
    return share


def _slopes_at(read: Reading, client: Any, x: Array, paths: Array) -> Callable[[Mapping[str, Any]], _Slopes | None]:
    def at(arrays: Mapping[str, Any]) -> _Slopes | None:
        inputs = read.inputs and read.inputs(arrays)
        if inputs is None:
            return None
        rows, rest = by_length(row_scores(read.client).elsewhere, x, paths, inputs), np.zeros(len(paths))
        if client.local_size:
            whole = paths @ read.client.kernel(x, *pack(inputs))[1:]
            rest = whole - sum(np.sum(part, axis=0) for part in rows.values())
        return _Slopes(rows, rest)

    return at


def _blocks(length: int, count: int) -> Iterator[Any]:
    """Rows of each block, (length,) bool, in random order."""
    order = np.random.default_rng(length).permutation(length)
    for place in range(count):
        rows = np.zeros(length, dtype=bool)
        rows[order[place::count]] = True
        yield rows


def _of_themselves(at: Any, before: _Slopes, arrays: Any, changed: Sequence[Alteration], length: int) -> bool:
    """Whether rows' terms do not change with other rows: those of each half, when the other half is altered."""
    for half in _blocks(length, 2):
        after = at({**arrays, **{alteration.name: altered_at(alteration, half) for alteration in changed}})
        if after is None:
            return False
        beside, size = _beside(before, after, length, half)
        if not np.all(np.abs(beside) <= size):
            return False
    return True


def _beside(before: _Slopes, after: _Slopes, length: int, changed: Any) -> tuple[Array, Array]:
    """Changes of terms of rows that were not altered, (rows + 1, m), and the size below which a change is rounding."""
    terms = [
        (after.rows[n] - rows)[~changed] if n == length else after.rows[n] - rows for n, rows in before.rows.items()
    ]
    size = sum(np.sum(np.abs(part), axis=0) for slopes in (before, after) for part in slopes.rows.values())
    size = np.nan_to_num(size + np.abs(before.rest) + np.abs(after.rest), posinf=0.0, neginf=0.0)
    return np.concatenate([*terms, (after.rest - before.rest)[None]]), _ROUNDING * size


def _share_of(at: Any, arrays: Mapping[str, Any], alteration: Alteration, few: int, enough: float) -> float:
    """The largest share that `few` blocks have in the changes of other rows' terms, and in the whole changes."""
    length = len(alteration.before)
    before = at({**arrays, alteration.name: alteration.before})
    if before is None:
        return np.nan
    if _of_themselves(at, before, arrays, [alteration], length):
        return 0.0
    m = len(before.rest)
    terms, total, sizes = [], [], np.zeros(m)
    for rows in _blocks(length, min(length, max(_BLOCKS, _BLOCKS_A_COLUMN * m))):
        after = at({**arrays, alteration.name: altered_at(alteration, rows)})
        if after is None:
            return np.nan
        beside, size = _beside(before, after, length, rows)
        terms.append(np.sum(beside, axis=0))
        own_terms = (after.rows[length] - before.rows[length])[rows] if length in before.rows else np.zeros((0, m))
        total.append(terms[-1] + np.sum(own_terms, axis=0))
        sizes = np.maximum(sizes, size)
    share = 0.0
    # A far alteration is dominated by a row's own terms, so that only small ones are used whole.
    for changes in (np.stack(terms),) if alteration.far else (np.stack(terms), np.stack(total)):
        if not np.all(np.isfinite(changes)):
            return np.nan
        changes[:, np.max(np.abs(changes), axis=0) <= sizes] = 0.0
        share = max(share, largest_share(changes, few, enough, alteration.faint))
    return share


def lengths_of_rows(read: Reading, client: Any, by_rows: Mapping[int, Array]) -> list[int]:
    """Lengths of arrays whose entries are rows: those of outcomes, and all that are no shorter."""
    lengths = {name: len(value) for name, value in client.arrays.items() if np.ndim(value)}
    observed = {variable.name for variable in observed_through(read.client.template.parts)}
    wanted = {length for name, length in lengths.items() if length in by_rows or name in observed}
    longest = max(lengths.values(), default=0)
    return sorted(wanted | {length for length in lengths.values() if length >= max(wanted, default=longest)})
