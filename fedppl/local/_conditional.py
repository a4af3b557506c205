r"""log f_k where most of θ is Gaussian given φ and few coordinates c of θ, as coefficients are given a noise sd.

.. math:: \log f_k(\varphi) = \log \int \Big[\int p(y_k, \theta_c, \theta_r \mid \varphi)\, d\theta_r\Big]\, d\theta_c

The inner integral is exact by Newton steps from any start. The outer one is a quadrature over c, which is centered anew
where most of the integral is not about the mode of θ, and compared with another one; `log_factors` looks for
other modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.contracts import ClientView
from fedppl.local import _marginal
from fedppl.local import tolerances as tol
from fedppl.local._marginal import LeftOut
from fedppl.numerics import integral, pairs
from fedppl.numerics import tolerances as common
from fedppl.numerics.importance import has_enough_points
from fedppl.numerics.integral import Rule, median_of, some_of
from fedppl.numerics.pairs import Densities, Laplace, joined, site_outputs
from fedppl.numerics.streams import stream_of
from fedppl.types import Array, LocalFailure

# Coordinates c of θ given which the others are Gaussian ---------------------------------------------------------------


Places = NDArray[np.intp]


class _Probes(NamedTuple):
    """Points of the prior of φ, with the modes of θ there, and its sds, each given the others."""

    phi: Array  # (P, m)
    modes: Array  # (P, d)
    sds: Array  # (P, d)


def _probes(client: ClientView) -> _Probes | None:
    """Probes near and far, by model and data alone; None where θ has no mode at one of them."""
    center = gaussian.mean(client.prior.gaussian)
    sds = gaussian.standard_deviations(client.prior.gaussian)
    near, far = np.minimum(sds, tol.NEAR_SDS), np.minimum(sds, tol.FAR_SDS)
    points = center + np.concatenate([np.outer(tol.PROBE_SDS, near), [-far, far]])
    try:
        _, modes, factors = _marginal.near(client, points, center)
    except LocalFailure:
        return None
    if not np.all(np.isfinite(factors)) or not np.all(np.diagonal(factors, axis1=1, axis2=2) > 0):
        return None
    return _Probes(points, modes, 1.0 / np.sqrt(np.sum(factors**2, axis=2)))


def is_gaussian(client: ClientView) -> bool:
    """Whether θ is Gaussian given φ, checked at points of the prior, near and far: by model and data alone."""
    probes = client.view(_probes)
    return probes is not None and _is_gaussian_in(client, probes, np.zeros(0, dtype=np.intp))


def conditioning(client: ClientView) -> Places | None:
    """The fewest coordinates c of θ given which the others are Gaussian; None where these are too many."""
    d, probes = client.local_size, client.view(_probes)
    if probes is None or not 1 < d <= tol.MOST_LOCAL:
        return None
    curved = _curvatures(client, probes) * (probes.sds[:, None, :, None] * probes.sds[:, None, None, :])
    if not np.all(np.isfinite(curved)):
        return None
    largest = np.abs(curved).max(axis=(1, 2, 3))[:, None, None, None]
    turns = np.any(np.abs(curved[:, 1:] - curved[:, :1]) > tol.CURVATURE_CHANGE * largest, axis=0)
    chosen = _cover(turns, ())
    if not chosen:
        return None
    which = np.array(sorted(chosen), dtype=np.intp)
    return which if _is_gaussian_in(client, probes, which) else None


def _cover(turns: NDArray[np.bool_], chosen: tuple[int, ...]) -> tuple[int, ...] | None:
    """The fewest coordinates given which no curvature of the others changes with one of them; None of too many."""
    rest = np.setdiff1d(np.arange(len(turns)), chosen)
    left = np.argwhere(turns[np.ix_(rest, rest, rest)])
    if not len(left):
        return chosen
    if len(chosen) == tol.MOST_CONDITIONING:
        return None
    covers = [_cover(turns, (*chosen, int(k))) for k in np.unique(rest[left[0]])]  # one of these is in every cover
    return min((cover for cover in covers if cover is not None), key=len, default=None)


def _curvatures(client: ClientView, probes: _Probes) -> Array:
    """−∂²ℓ/∂θ² by central differences, (P, 1 + d, d, d): at each mode, and an sd from it along each coordinate."""
    matrices = []
    for phi, mode, sd in zip(*probes, strict=True):  # one after the other, to save memory
        d, along = len(mode), np.diag(sd)
        around = mode + np.concatenate([np.zeros((1, d)), along])
        ends = around[:, None] + tol.CURVATURE_LENGTH * np.concatenate([along, -along])  # (1 + d, 2d, d)
        slopes = _outputs(client, phi[None], ends[None])[0, ..., 1 + len(phi) :]
        matrices.append(-(slopes[:, :d] - slopes[:, d:]) / (2.0 * tol.CURVATURE_LENGTH * sd[:, None]))
    stacked = np.stack(matrices)
    return np.asarray(0.5 * (stacked + np.swapaxes(stacked, -1, -2)))


def _outputs(client: ClientView, phi: Array, theta: Array) -> Array:
    """The log density and its gradient (P, ..., 1 + m + d) at points φ (P, m) with θ (P, ..., d) for each."""
    x = joined(phi.reshape(len(phi), *(1,) * (theta.ndim - 2), -1), theta)
    outputs = site_outputs(client.kernel, x.reshape(-1, x.shape[-1]), client.packed)
    return np.asarray(outputs.reshape(*x.shape[:-1], outputs.shape[1]))


def _is_gaussian_in(client: ClientView, probes: _Probes, which: Places) -> bool:
    """Whether the density itself is Gaussian in the rest of θ, near and far, at all values of c.

    Checked in random directions at all probes, and at the first one along each coordinate at every sd, since a second
    hump of a prior can lie between a few points.
    """
    if not _is_along(client, probes, which):
        return False
    m, rest = probes.phi.shape[1], np.setdiff1d(np.arange(client.local_size), which)
    r, rng = len(rest), np.random.default_rng(0)
    places = np.array(tol.GIVEN_SDS if len(which) else (0.0,))  # of c, in sds
    z = rng.normal(size=(len(places), len(tol.RANDOM_SDS), r)) * np.array(tol.RANDOM_SDS)[:, None]
    z = np.concatenate([z, -z], axis=1)
    near = np.broadcast_to(np.concatenate([np.zeros((1, r)), np.eye(r)]), (len(places), 1 + r, r))
    moved = np.concatenate([near, z], axis=1)  # (F, 1 + r + N, r)
    theta = np.repeat(np.repeat(probes.modes[:, None, None], len(places), axis=1), moved.shape[1], axis=2)
    theta[..., which] += places[:, None, None] * probes.sds[:, None, None, which]
    theta[..., rest] += moved * probes.sds[:, None, None, rest]
    outputs = _outputs(client, probes.phi, theta)
    logs, slopes = outputs[..., 0], outputs[..., 1 + m + rest] * probes.sds[:, None, None, rest]
    curved = -(slopes[:, :, 1 : 1 + r] - slopes[:, :, :1])
    expected = np.einsum("fnr,pfr->pfn", z, slopes[:, :, 0]) - 0.5 * np.einsum("fnr,pfrs,fns->pfn", z, curved, z)
    return _agree(expected, logs[..., 1 + r :] - logs[..., :1], logs[..., :1])


def _is_along(client: ClientView, probes: _Probes, which: Places) -> bool:
    """The same along each coordinate of the rest, at the first probe and its c."""
    m, rest = probes.phi.shape[1], np.setdiff1d(np.arange(client.local_size), which)
    phi, mode, sd = (part[:1] for part in probes)
    steps = np.concatenate([[0.0, 1.0], tol.ALONG_SDS, -tol.ALONG_SDS])
    theta = np.repeat(np.repeat(mode[:, None, None], len(rest), axis=1), len(steps), axis=2)
    for place, i in enumerate(rest):
        theta[:, place, :, i] += steps * sd[:, i]
    outputs = _outputs(client, phi, theta)[0]
    logs = outputs[..., 0]
    slopes = outputs[np.arange(len(rest))[:, None], np.arange(2), 1 + m + rest[:, None]] * sd[0, rest, None]  # (r, 2)
    expected = slopes[:, :1] * steps + 0.5 * (slopes[:, 1:] - slopes[:, :1]) * steps**2
    return _agree(expected, logs - logs[:, :1], logs[:, :1])


def _agree(expected: Array, differences: Array, logs: Array) -> bool:
    """Whether differences of the density are as expected, up to the rounding of the density of many rows."""
    allowed = tol.GAUSSIAN_EQUAL + tol.DENSITY_ROUNDING * np.abs(logs) + tol.GAUSSIAN_EQUAL * np.abs(differences)
    return bool(np.all(np.isfinite(differences)) and np.all(np.abs(expected - differences) <= allowed))


# Quadratures compared with others: trapezoids with those between them, grids with finer ones --------------------------


def by_two_rules(
    compute: Callable[[Places, Places, Rule], tuple[Array, Array]], clients: int, count: int
) -> tuple[Array, Array]:
    """Logarithms of integrals of clients at so many points, and their errors, both (C, S).

    `compute` has those of some clients at points in some places. One rule's own estimate of its error holds for smooth
    functions. Where both rules differ at some of a client's points, as about a kink, a spike, or along a tail that
    falls as exp(−|θ|), they are averaged, with half of their difference as an error.
    """
    everywhere, some = np.arange(count), some_of(count, tol.COMPARED)
    values, errors = np.empty((2, clients, count))
    left = np.arange(clients)
    for far in tol.REACHES:
        if not len(left):
            break
        values[left], errors[left] = compute(left, everywhere, integral.by_trapezoids(far))
        is_near = np.full(len(left), far == tol.REACHES[-1])  # else heavy tails may be the reason
        is_near |= ~(np.median(np.abs(errors[left]), axis=1) > tol.ALIKE) if count else True
        near, left = left[is_near], left[~is_near]
        if not len(near):
            continue
        differences = compute(near, some, integral.between_trapezoids(far))[0] - values[np.ix_(near, some)]
        are_alike = [_range(each) < tol.ALIKE_ON_A_LINE and abs(median_of(each)) < tol.ALIKE for each in differences]
        rows = near[~np.array(are_alike)]
        if not len(rows):
            continue
        halves = 0.5 * (compute(rows, everywhere, integral.between_trapezoids(far))[0] - values[rows])
        for row, half in zip(rows, halves, strict=True):
            # The place of a kink between nodes changes from point to point, and both errors may cancel at one.
            error = np.copysign(np.maximum(np.abs(half), median_of(np.abs(half))), half)
            values[row], errors[row] = values[row] + half, np.where(np.isfinite(half), errors[row] + error, 0.0)
    return values, errors


class Pair(NamedTuple):
    """Places of two quadratures that are compared, and of the one that is taken if they differ."""

    first: int
    second: int
    better: int
    few: bool = False  # whether the first has few nodes: they have to agree better, and others follow


def by_pairs(
    quadratures: Sequence[Callable[[Places], tuple[Array, Array]]], points: Array, pairs: Sequence[Pair]
) -> tuple[Array, Array]:
    """Logarithms of integrals at points (S, m) by the first quadrature that agrees with its other, and their errors.

    Quadratures are computed at points in some places. Of two that agree the second's own errors are taken. Where no two
    agree, the better of those is taken that differ little, else of those that differ least. Their difference, or twice
    that, is then an error of the points that are near to those at which both were computed.
    """
    some = some_of(len(points), tol.COMPARED)
    rest = np.setdiff1d(np.arange(len(points)), some)
    at_some = functools.cache(lambda place: quadratures[place](some))

    def everywhere(place: int) -> Array:
        both = np.empty((2, len(points)))
        both[:, some], both[:, rest] = at_some(place), quadratures[place](rest)
        return both

    smallest, better, largest = np.zeros(len(some)), pairs[0].first, np.inf
    for pair in pairs:
        (first, _), (second, finer) = at_some(pair.first), at_some(pair.second)
        raw = second - first
        finite = np.isfinite(raw)
        if np.sum(finite) < tol.COVERED * np.sum(np.isfinite(first)):  # at some points there is no comparison
            continue
        difference, constant = np.where(finite, raw, 0.0), median_of(raw)
        if _range(raw) < (tol.ALIKE_OF_FEW if pair.few else tol.ALIKE) and abs(constant) < tol.CONSTANT:
            values, errors = everywhere(pair.first)
            places = integral.nearest_of(points, some)
            own = np.where(np.isfinite(second[places]), finer[places], errors)  # the finer one sees more of the tails
            return values + constant, own + 0.5 * constant
        if float(np.max(np.abs(difference))) < largest:
            smallest, better, largest = difference, pair.better, float(np.max(np.abs(difference)))
        if not pair.few and largest < tol.AGREE:
            break
    values, errors = everywhere(better)
    near = smallest[integral.nearest_of(points, some)]
    times = 1.0 if largest < tol.AGREE else 2.0
    return values, errors + times * np.copysign(np.maximum(np.abs(near), np.median(np.abs(smallest))), near)


def _range(differences: Array) -> float:
    """Largest distance from the median."""
    finite = differences[np.isfinite(differences)]
    return float(np.max(np.abs(finite - median_of(finite)), initial=0.0))


# Quadratures over c ---------------------------------------------------------------------------------------------------


class Quadrature(NamedTuple):
    """The expansion of θ, and the center and scale of nodes z: c = mode_c + shift + spread z."""

    phi: Array  # (S, m)
    modes: Array  # (S, d)
    curvature: Array  # (S, d, d) at the mode
    shift: Array  # (S, q)
    spread: Array  # (S, q, q)


def integrated(client: ClientView, points: Array, about: Laplace, which: Places) -> tuple[Array, Array]:
    """log f_k at points (S, m), NaN where there is no mode, and its errors; about modes of θ there."""
    q, m = len(which), points.shape[1]
    rest = np.setdiff1d(np.arange(client.local_size), which)

    def by_rule(places: Places, rule: Rule, *, far: bool = False, along_axes: bool = False) -> tuple[Array, Array]:
        values, errors = np.full(len(places), np.nan), np.zeros(len(places))
        numbers = len(rule.nodes) * (1 + len(rest)) * (m + client.local_size)
        known = np.flatnonzero(np.isfinite(about.values[places]))
        for to in (known[chunk] for chunk in integral.chunks(len(known), common.NUMBERS_AT_ONCE // numbers)):
            some = places[to]
            at = about_modes(points[some], about.theta[some], about.root[some], which, rest)
            if along_axes:
                at = at._replace(spread=np.sqrt(np.sum(at.spread**2, axis=2))[:, :, None] * np.eye(q))
            terms = (_terms if far else centered)(client, at, which, rest, rule)
            values[to], errors[to] = integral.log_integrals(terms, rule)
        return values, errors

    if q == 1:

        def of_one_client(_: Places, some: Places, rule: Rule) -> tuple[Array, Array]:
            values, errors = by_rule(some, rule)
            return values[None], errors[None]

        (values,), (errors,) = by_two_rules(of_one_client, 1, len(points))
        return values, errors
    # Heavy tails are along coordinates, from priors, or along a ridge of the likelihood.
    quadratures = [functools.partial(by_rule, rule=integral.by_grid(q, count)) for count in tol.GRIDS[q]]
    far = [integral.by_far_grid(q, finer=finer) for finer in (False, True)]
    for along in (True, False):
        quadratures += [functools.partial(by_rule, rule=rule, far=True, along_axes=along) for rule in far]
    grids = Pair(0, 1, 1, few=True), Pair(1, 2, 2)
    return by_pairs(quadratures, points, (*grids, Pair(2, 3, 2), Pair(3, 4, 3), Pair(5, 6, 5)))


def about_modes(phi: Array, modes: Array, factors: Array, which: Places, rest: Places) -> Quadrature:
    """A quadrature over c by Laplace's approximation."""
    curvature = factors @ np.swapaxes(factors, 1, 2)
    follow = np.linalg.solve(curvature[:, rest[:, None], rest], curvature[:, rest[:, None], which])
    of_c = curvature[:, which[:, None], which] - curvature[:, which[:, None], rest] @ follow
    spread = np.linalg.inv(np.swapaxes(np.linalg.cholesky(of_c), 1, 2))
    return Quadrature(phi, modes, curvature, np.zeros((len(phi), len(which))), spread)


def centered(client: ClientView, about: Quadrature, which: Places, rest: Places, rule: Rule) -> Array:
    """Log terms of the integral at nodes, (S, L), which are moved to where its mass is."""
    terms = _terms(client, about, which, rest, rule)
    gaps = np.stack([gaps_of(column) for column in rule.nodes.T], axis=1)
    off = np.arange(len(terms))
    for _ in range(tol.CENTERINGS):
        off = off[np.isfinite(terms[off].max(axis=1))]
        shares = np.exp(terms[off] - logsumexp(terms[off], axis=1, keepdims=True))
        here = gaps[np.argmax(shares, axis=1)]
        nodes = _clipped(shares, rule.nodes, here)
        mean = np.einsum("sl,slp->sp", shares, nodes)
        nodes -= mean[:, None]
        least = (tol.NODE_WIDTH * here[:, None]) ** 2  # mass at one node is as wide as nodes are apart
        covariance = np.einsum("sl,slp,slq->spq", shares, nodes, nodes) + least * np.eye(len(which))
        variances = np.linalg.eigvalsh(covariance)
        away = (variances[:, 0] < tol.NARROW**2) | (variances[:, -1] > tol.WIDE**2)
        away |= np.abs(mean).max(axis=1) > tol.OFF_CENTER
        off, mean, covariance = off[away], mean[away], covariance[away]
        if not len(off):
            break
        shift = about.shift[off] + np.einsum("spq,sq->sp", about.spread[off], mean)
        spread = about.spread[off] @ np.linalg.cholesky(covariance)
        about.shift[off], about.spread[off] = shift, spread
        terms[off] = _terms(client, Quadrature(*(values[off] for values in about)), which, rest, rule)
    return terms


def gaps_of(column: Array) -> Array:
    """Distance between nodes at each of them."""
    nodes = np.unique(column)
    return np.asarray(np.gradient(nodes)[np.searchsorted(nodes, column)])


def _clipped(shares: Array, nodes: Array, gaps: Array) -> Array:
    """Nodes (S, L, q) with clipped tails, so that heavy ones do not widen the middle: Cauchy's has no sd at all."""
    clipped = np.empty((*shares.shape, nodes.shape[1]))
    for place, column in enumerate(nodes.T):
        order = np.argsort(column, kind="stable")
        below = np.cumsum(shares[:, order], axis=1)
        low, middle, high = (column[order][np.argmax(below > part, axis=1)] for part in tol.MIDDLE)
        width = tol.CLIPPED * np.maximum(0.5 * (high - low), gaps[:, place])
        clipped[:, :, place] = np.clip(column, (middle - width)[:, None], (middle + width)[:, None])
    return clipped


class Given(NamedTuple):
    """Nodes of c with the Gaussian of the rest of θ given each."""

    terms: Array  # (S, L) log terms of the integral
    theta: Array  # (S, L, d) with the rest at its mean
    precision: Array  # (S, L, r, r)


def _terms(client: ClientView, about: Quadrature, which: Places, rest: Places, rule: Rule) -> Array:
    """Log terms of the integral at nodes of c, (S, L)."""
    who = np.zeros(len(about.phi), dtype=np.int64)
    return at_nodes(client.view(_marginal.integrands), who, about, which, rest, rule).terms


def at_nodes(of: Densities, who: Places, about: Quadrature, which: Places, rest: Places, rule: Rule) -> Given:
    """Nodes of c at (client, point) pairs, clients being in places who (S,)."""
    (count, m), nodes, r = about.phi.shape, len(rule.nodes), len(rest)
    A_rr = about.curvature[:, rest[:, None], rest]
    follow = np.linalg.solve(A_rr, about.curvature[:, rest[:, None], which])  # (S, r, q): regression of the rest on c
    step = about.shift[:, None] + rule.nodes @ np.swapaxes(about.spread, 1, 2)  # (S, L, q)
    x = np.empty((count, nodes, 1 + r, m + about.modes.shape[1]))
    x[..., :m], x[..., m:] = about.phi[:, None, None], about.modes[:, None, None]
    x[..., m + which] += step[:, :, None]
    x[..., m + rest] -= np.einsum("srq,slq->slr", follow, step)[:, :, None]
    widths = 1.0 / np.sqrt(np.diagonal(A_rr, axis1=1, axis2=2))  # the gradient is linear in the rest: any step is exact
    for i, place in enumerate(m + rest):
        x[:, :, 1 + i, place] += widths[:, None, i]
    flat = x.reshape(count * nodes * (1 + r), x.shape[-1])
    at_all = pairs.outputs_at if r else pairs.values_at
    outputs = at_all(of, flat, np.repeat(who, nodes * (1 + r))).reshape(count, nodes, 1 + r, -1)
    slopes = outputs[..., 1 + m + rest]
    slope = slopes[:, :, 0]
    with np.errstate(over="ignore", invalid="ignore"):  # where slopes are infinite: no term of the integral is known
        curved = -(slopes[:, :, 1:] - slope[:, :, None]) / widths[:, None, :, None]
        curved = 0.5 * (curved + np.swapaxes(curved, 2, 3))
    inverse, log_determinant = _inverses(curved)
    move = np.einsum("slij,slj->sli", inverse, slope)
    logs, gain, theta = outputs[:, :, 0, 0], 0.5 * np.einsum("sli,sli->sl", slope, move), x[:, :, 0, m:]
    # Where a Newton step gains as much as the density is itself, rounding errors of both are large: the density is then
    # evaluated where the steps end.
    far = ~(gain < tol.LARGE_GAIN)
    theta[..., rest] += np.where(far[..., None], 0.0, move)
    x, whose = x[:, :, 0][far], np.repeat(who, nodes)[far.reshape(-1)]
    slope, inverse = slope[far], inverse[far]
    for _ in range(2 if len(x) else 0):
        x[:, m + rest] += np.einsum("nij,nj->ni", inverse, np.nan_to_num(slope))
        there = pairs.outputs_at(of, x, whose)
        slope = there[:, 1 + m + rest]
        logs[far], gain[far] = there[:, 0], 0.5 * np.einsum("ni,nij,nj->n", slope, inverse, slope)
    theta[far] = x[:, m:]
    missed = np.where(far, gain, 0.0)
    logs = logs + np.where(far, 0.0, gain)
    proper = np.isfinite(log_determinant)
    constant = 0.5 * about.modes.shape[1] * np.log(2.0 * np.pi) + np.linalg.slogdet(about.spread)[1][:, None]
    weight = 0.5 * np.sum(rule.nodes**2, axis=1) + rule.log_weights
    terms = logs - 0.5 * np.where(proper, log_determinant, 0.0) + constant + weight
    terms = np.where(np.isfinite(terms), terms, -np.inf)
    good = proper & (missed < tol.RESIDUAL_GAIN)
    least = np.max(np.where(good, terms, -np.inf), axis=1, keepdims=True) - common.LOW
    unknown = np.any(~good & (terms > least), axis=1)  # the integral is not known if a term that counts is not
    return Given(np.where(good & ~unknown[:, None], terms, -np.inf), theta, curved)


def _inverses(matrices: Array) -> tuple[Array, Array]:
    """Inverses (..., r, r) and log determinants of those that are positive definite; 0 and NaN of others."""
    if matrices.shape[-1] == 1:
        positive: Array = np.where(matrices > 0.0, matrices, np.nan)
        return np.asarray(np.nan_to_num(1.0 / positive)), np.asarray(np.log(positive[..., 0, 0]))
    try:
        roots = np.linalg.cholesky(matrices)
        logs: Array = 2.0 * np.log(np.diagonal(roots, axis1=-2, axis2=-1)).sum(axis=-1)
        return np.asarray(np.linalg.inv(matrices)), logs
    except np.linalg.LinAlgError:  # one of them at least is not
        whole: Array = np.where(np.isfinite(matrices).all(axis=(-2, -1), keepdims=True), matrices, 0.0)
        values, vectors = np.linalg.eigh(whole)
        proper: Array = np.where(values[..., :1] > 0.0, 1.0, 0.0)
        values = np.where(proper > 0.0, values, 1.0)
        inverses = (vectors / values[..., None, :]) @ np.swapaxes(vectors, -2, -1)
        logs = np.where(proper[..., 0] > 0.0, np.log(values).sum(axis=-1), np.nan)
        return np.asarray(inverses * proper[..., None]), logs


def left_out(client: ClientView, mean: Array, root: Array) -> LeftOut:
    """The error of Laplace over θ in log f_k about q = N(mean, root rootᵀ)."""
    if not client.local_size or client.view(is_gaussian):
        return LeftOut(None, 1.0)
    if not has_enough_points(client.shared_size):
        return LeftOut(None, 0.0)
    which = client.view(conditioning)

    def difference(points: Array) -> tuple[Array, float] | None:
        if which is None:
            return _marginal.difference(client, points, mean)
        about = _marginal.near(client, points, mean)
        errors = integrated(client, points, about, which)[0] - about.values
        return (errors, 1.0) if np.all(np.isfinite(errors)) else None

    return _marginal.left_out(difference, mean, root, stream_of(client.client_id))
