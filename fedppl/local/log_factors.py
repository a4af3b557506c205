r"""log f_k at points with errors: θ integrated, not only approximated by Laplace; refused where θ has several modes.

.. math:: \log f_k(\varphi) = \log \int p(y_k, \theta \mid \varphi)\, d\theta

Coordinates of θ that are independent given φ are integrated each by a quadrature of its own. Else up to three are by a
grid about the mode of θ, which reaches far out where tails are heavy; more by sparse grids, or importance sampling from
multivariate t's. The same nodes serve all φ, so that their error is smooth in φ and mostly a constant, which changes no
moment but the evidence. The rest of it is estimated from two halves of the nodes, and from the jackknife.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

from fedppl import gaussian
from fedppl.contracts import ClientView, Constant, Factor
from fedppl.local import _conditional, _marginal
from fedppl.local import tolerances as tol
from fedppl.local._conditional import by_two_rules
from fedppl.numerics import importance, pairs
from fedppl.numerics import tolerances as common
from fedppl.numerics.importance import normalise, weighted_moments
from fedppl.numerics.integral import (
    Rule,
    Signed,
    by_sparse_grid,
    log_integrals,
    median_of,
    nearest_of,
    smooth_over,
    some_of,
)
from fedppl.numerics.pairs import Densities, Laplace, Places
from fedppl.numerics.proposals import Proposal, beyond, log_mixture, points_of, scrambles
from fedppl.numerics.streams import stream_of
from fedppl.types import Array, LocalFailure


def _shapes(client: ClientView, center: Array) -> tuple[Proposal, ...]:
    """T's that cover θ at the center, in sds of Laplace's approximation about its mode.

    One about the mode, one with the moments of θ, and others in heavy tails. Fitted a few times, each time with points
    of the t's before: the first points hardly see a shoulder beside the mode.
    """
    d = client.local_size
    _, modes, factors = _marginal.near(client, center[None], center)
    proposals: tuple[Proposal, ...] = (Proposal(np.zeros(d), np.eye(d), tol.SHAPING),)
    for time in range(tol.SHAPINGS):
        # Other points than the nodes: integrals by nodes that shapes are fitted to are too small, at all clients.
        stream = stream_of(client.client_id) + common.STREAMS * (1 + time)
        z = np.concatenate(
            [points_of(one, stream + tol.STREAMS_APART * number) for number, one in enumerate(proposals)]
        )
        theta = modes + np.linalg.solve(factors[0].T, z.T).T
        logs = _marginal.log_densities(client, center, theta) - log_mixture(proposals, z)
        if not np.any(np.isfinite(logs)):
            break
        logs, _ = importance.smoothed(np.nan_to_num(logs, nan=-np.inf, posinf=-np.inf))
        weights = normalise(logs)
        moments = weighted_moments(z, weights)
        share = importance.telling(weights, d)
        covariance = share * moments.covariance + (1.0 - share) * np.eye(d)
        outer = beyond(z, weights, tol.SHAPING) if share == 1.0 else ()
        shaped = Proposal(share * moments.mean, np.asarray(np.linalg.cholesky(covariance)), tol.SHAPING)
        proposals = (proposals[0], shaped, *outer)
    return proposals


def _student_rule(shapes: tuple[Proposal, ...], count: int, stream: int) -> Rule:
    """Nodes with weights for integrals over a standard normal, so many of each scramble, from a mixture of t's."""
    inner, outer = shapes[:2], shapes[2:]
    # Half of the nodes for two inner parts, half for all outer ones.
    each = count // (4 if outer else len(inner))
    parts = [one._replace(per_scramble=each) for one in inner]
    mixture = (*parts, *(one._replace(per_scramble=max(1, count // 2 // len(outer))) for one in outer))
    nodes = np.concatenate([points_of(one, stream + tol.STREAMS_APART * number) for number, one in enumerate(mixture)])
    log_normal = -0.5 * np.sum(nodes**2, axis=1) - 0.5 * nodes.shape[1] * np.log(2 * np.pi)
    log_weights = log_normal - log_mixture(mixture, nodes) - np.log(len(nodes))
    return Rule(nodes, log_weights, scrambles(mixture).astype(float))


def factor(client: ClientView, points: Array, center: Array, prior_share: float) -> Factor:
    """log f_k, and its share of a prior that is not Gaussian, at points (S, m), by way of an expansion at a center.

    Laplace's approximation at all points, and its error at some of these; at all where that is not smooth.
    """
    points = np.ascontiguousarray(points)
    if not len(points):  # a policy may leave none
        return Factor(np.zeros(0), np.zeros(0))
    if client.local_size:
        require_one_mode(client, near_and_far(points, center))
    about = _marginal.near(client, points, center)
    value = Factor(about.values, np.zeros(len(points)))
    if client.local_size and not client.view(_conditional.is_gaussian):
        value = _corrected(client, points, center, about)
    return value._replace(values=value.values + prior_share * client.prior.log_ratio(points)) if prior_share else value


def with_alike(values: Array, errors: Array) -> Factor:
    """Values and errors of a quadrature, with the median of the errors, which other clients' errors share."""
    return Factor(values, errors, Constant(median_of(errors[np.isfinite(values)])))


def _corrected(client: ClientView, points: Array, center: Array, about: Laplace) -> Factor:
    """log f_k from a spline of Laplace's error, known at as few points as predict the others, or at all."""
    known = some_of(len(points), tol.SPLINE_POINTS[1])
    for some in (known[:: tol.SPLINE_POINTS[1] // tol.SPLINE_POINTS[0]], known):
        at = Laplace(*(part[some] for part in about))
        better = integrated(client, points[some], center, at)
        smooth = smooth_over(points, some, better.values - at.values, better.errors)
        if smooth is not None:
            return Factor(about.values + smooth[0], smooth[1] + smooth[2], better.constant)
    return integrated(client, points, center, about)


def integrated(client: ClientView, points: Array, center: Array, about: Laplace) -> Factor:
    """log f_k by lines, by quadratures over few coordinates, or sampled nodes, from modes by way of a center."""
    if is_separable(client):
        one = np.zeros(1, dtype=np.int64)
        (values,), (errors,) = along_each(client.view(_marginal.integrands), one, points, about)
        return with_alike(values, errors)
    which = client.view(_conditional.conditioning)
    if which is None and client.local_size <= tol.MOST_BY_GRID:
        which = np.arange(client.local_size)
    if which is None:
        return _by_sparse_grids(client, points, center) or _sampled(client, points, center)
    return with_alike(*_conditional.integrated(client, points, about, which))


def _by_sparse_grids(client: ClientView, points: Array, center: Array) -> Factor | None:
    """By sparse grids, which do not see tails, compared at some points with sampled nodes, which do."""
    if not tol.SPARSE_FEWEST <= client.local_size <= tol.SPARSE_MOST:
        return None
    by_grids = by_two_levels(client, points, center, tol.AGREE)
    if by_grids is None:
        return None
    values, errors = by_grids
    some = some_of(len(points), tol.SPARSE_CHECKED)
    sampled, sampled_errors, constant = _sampled(client, points[some], center)
    difference = sampled - values[some]
    known = np.isfinite(difference)
    if np.sum(known) < np.sum(np.isfinite(sampled)) or not np.any(known):
        return None
    alike = median_of(difference)
    varies = _sd_of(difference[known] - alike)
    if varies > tol.AGREE + float(np.median(np.abs(sampled_errors[known]))) or abs(alike) > tol.CONSTANT:
        return None
    return Factor(values, errors, Constant(alike, constant.by_chance))


def _sampled(client: ClientView, points: Array, center: Array) -> Factor:
    """By importance sampling; with as many nodes as it takes to know log f_k but for a constant.

    The logarithm of a mean is too low on average, at all clients: the jackknife over scrambles corrects it to the
    second order, and the size of the correction bounds the error. Where few nodes see the tails of θ both are too
    small; so four times as many nodes have to agree.
    """
    shapes = _shapes(client, center)
    values, errors, before = np.zeros(len(points)), np.zeros(len(points)), None
    constant = Constant()
    for count in tol.SAMPLED_NODES:
        nodes = _student_rule(shapes, count, stream_of(client.client_id))
        values, _, _, shares = _marginal.integrals(client, points, center, nodes)
        known = np.isfinite(values)
        if not np.any(known):
            break
        expected = np.log1p(-1.0 / common.SCRAMBLES)
        rest = np.log(np.clip(1.0 - shares, tol.LEAST_REST, 1.0)) - expected  # without each scramble
        bias = -(common.SCRAMBLES - 1.0) * rest.mean(axis=1)
        half = shares[:, : common.SCRAMBLES // 2].sum(axis=1)
        halves = logit(np.clip(half, tol.LEAST_REST, 1.0 - tol.LEAST_REST))
        values = values + bias
        errors = 0.5 * (_varying(halves, known) + _varying(bias, known))
        spread = np.sqrt(common.SCRAMBLES) * np.std(shares[known], axis=1, ddof=1)  # of the mean of all scrambles
        constant = Constant(0.5 * float(np.median(bias[known])), float(np.median(spread)))
        if before is not None:
            change = _varying(values - before, known & np.isfinite(before))
            errors = errors + change  # with rare nodes of large weight the error falls slowly
            if max(_sd_of(one[known]) for one in (errors, change)) < tol.AGREE:
                break
        before = values
    return Factor(values, errors, constant)


def _varying(values: Array, known: NDArray[np.bool_]) -> Array:
    """Values less their median, which changes no moment; 0 where they are not known."""
    return np.where(known, values - median_of(values[known]), 0.0)


def _sd_of(errors: Array) -> float:
    """Standard deviation of normal errors about 0 with this median size: few large ones do not count."""
    return tol.SD_A_MEDIAN * float(np.median(np.abs(errors)))


# Coordinates of θ that are independent given φ and the data: a product of integrals over one each ---------------------

# f_k(φ) = p(y_k, θ* | φ) Π_i ∫ p(y_k, θ*_-i, θ_i | φ) / p(y_k, θ* | φ) dθ_i


def is_separable(client: ClientView) -> bool:
    """Whether coordinates of θ are independent given φ and the data."""
    return client.local_size == 1 or client.view(_is_product)


def _is_product(client: ClientView) -> bool:
    """Whether the log density is a sum of functions of one coordinate, near and far."""
    prior = client.prior.gaussian
    points = gaussian.mean(prior) + np.outer(tol.PROBE_SDS, gaussian.standard_deviations(prior))
    try:
        _, modes, factors = _marginal.near(client, points, gaussian.mean(prior))
    except LocalFailure:
        return False
    d = client.local_size
    scales = np.diagonal(factors, axis1=1, axis2=2)
    if not np.all(np.isfinite(factors)) or not np.all(scales > 0):  # no mode at one of the points
        return False
    if np.abs(factors / scales[:, None, :] - np.eye(d)).max() > tol.DIAGONAL:
        return False
    z = np.random.default_rng(0).normal(size=(len(tol.PRODUCT_SDS), d)) * np.array(tol.PRODUCT_SDS)[:, None]
    for point, mode, scale in zip(points, modes, scales, strict=True):
        moved = z / scale
        alone = (moved[:, :, None] * np.eye(d)).reshape(-1, d)  # one coordinate moved at a time
        theta = mode + np.concatenate([np.zeros((1, d)), moved, alone])
        logs = _marginal.log_densities(client, point, theta)
        logs = np.where(logs < np.inf, logs, -np.inf)
        together, each = logs[1 : 1 + len(z)] - logs[0], (logs[1 + len(z) :] - logs[0]).reshape(len(z), d).sum(axis=1)
        allowed = tol.PRODUCT_EQUAL * max(1.0, float(np.abs(logs[0])))
        if not np.allclose(together, each, rtol=tol.PRODUCT_EQUAL, atol=allowed):
            return False
    return True


def along_each(of: Densities, who: Places, points: Array, about: Laplace) -> tuple[Array, Array]:
    """log f_k of clients in places who (C,) at points (S, m), NaN where there is no mode, and errors; both (C, S).

    They are about modes of θ at all pairs (C S,), client by client.
    """
    clients, count, d = len(who), len(points), about.theta.shape[1]
    pairs_of = np.arange(clients * count).reshape(clients, count)

    def compute(rows: Places, places: Places, rule: Rule) -> tuple[Array, Array]:
        def product(terms: Array) -> Array:
            lines, less = pairs.log_lines(terms, d)
            each = np.stack(log_integrals(lines.reshape(len(terms) * d, lines.shape[2]), rule), axis=1)
            return np.asarray(each.reshape(-1, d, 2).sum(axis=1) - less[:, None] * np.array([1.0, 0.0]))

        some = pairs_of[np.ix_(rows, places)].reshape(-1)
        at = Laplace(about.values[some], about.theta[some], about.root[some] * np.eye(d))
        phi, whose = np.tile(points[places], (len(rows), 1)), np.repeat(who[rows], len(places))
        sums = pairs.by_nodes(of, at, phi, whose, pairs.along_axes(rule, d), product)
        values, errors = sums.T.reshape(2, len(rows), len(places))
        return values, np.nan_to_num(errors)

    return by_two_rules(compute, clients, count)


# Sparse grids about the mode, of four to eight coordinates that depend on each other given φ --------------------------

# ∫ p(y_k, θ | φ) dθ = Σ_l w_l r(z_l), θ = θ* + L⁻ᵀ z. Smolyak's combination of Gauss-Hermite rules has some hundred
# nodes where a product has thousands. It is for integrands near a normal one times a polynomial: two levels have to
# agree.


def by_two_levels(client: ClientView, points: Array, center: Array, enough: float) -> tuple[Array, Array] | None:
    """log f_k at points (S, m), NaN where there is no mode, and its errors; None where two levels differ.

    Levels agree if at half of the points with both they differ by less than `enough`, but for a constant. These
    differences are the errors at the nearest points.
    """
    about, of = _marginal.near(client, points, center), client.view(_marginal.integrands)
    some = some_of(len(points), tol.SPARSE_COMPARED)
    who, d = np.zeros(len(points), dtype=np.int64), client.local_size
    at = Laplace(*(part[some] for part in about))
    low = by_signed_rule(of, at, points[some], who[some], by_sparse_grid(d, tol.SPARSE_LEVELS[0]))
    for level in tol.SPARSE_LEVELS:
        high = by_signed_rule(of, at, points[some], who[some], by_sparse_grid(d, level + 1))
        difference = high - low
        known = np.isfinite(difference)
        if np.sum(known) < tol.SPARSE_COVERED * len(some):
            return None
        varying = _varying(difference, known)
        if _sd_of(varying[known]) < enough:
            values = by_signed_rule(of, about, points, who, by_sparse_grid(d, level))
            return values, np.where(np.isfinite(values), varying[nearest_of(points, some)], 0.0)
        low = high
    return None


def by_signed_rule(of: Densities, about: Laplace, phi: Array, who: NDArray[np.int64], rule: Signed) -> Array:
    """Logarithms of integrals, pair by pair (N,), by a rule with negative weights; NaN where a sum is not positive."""

    def total(terms: Array) -> Array:
        highest = np.max(terms, axis=1, keepdims=True)
        return np.asarray(highest + np.log(np.exp(terms - highest) @ rule.weights[:, None]))

    logs = pairs.by_nodes(of, about, phi, who, rule.nodes, total)[:, 0]
    return np.where(np.isfinite(logs), logs, np.nan)


# Other modes of θ given φ than the one that all integrals are about, searched for from many starts --------------------


def require_one_mode(client: ClientView, points: Array) -> None:
    """Refuse a client whose θ has mass about another mode at one of the points (S, m).

    The `LocalFailure` names variables, and no number of the client's.
    """
    begin, who = client.view(_marginal.start)[None], np.zeros(1, dtype=np.int64)
    for reason in several_modes(client.view(_marginal.densities), who, [client], begin, points).values():
        raise LocalFailure(reason)


def several_modes(
    of: Densities, places: Places, clients: Sequence[ClientView], starts: Array, points: Array
) -> dict[str, str]:
    """Reason by id for clients (C,), in these places of those side by side, whose θ has mass about another mode."""
    count = len(clients)
    # At all points at once: of few clients the number of steps costs, not that of searches.
    first = pairs.modes(of, np.broadcast_to(points[0], (count, points.shape[1])), starts, places)
    begin = np.where(first.arrived[:, None], first.theta, starts)
    where, rows = np.divmod(np.arange(len(points) * count, dtype=np.int64), max(1, count))
    first = pairs.modes(of, points[where], begin[rows], places[rows])
    kept = np.flatnonzero(first.arrived)  # a client without a mode fails when it integrates
    where, rows, modes, roots = where[kept], rows[kept], first.theta[kept], first.root[kept]
    others = [_starts(clients[int(k)], mode, root) for k, mode, root in zip(rows, modes, roots, strict=True)]
    if not others:
        return {}
    whose = np.repeat(np.arange(len(rows)), [len(some) for some in others])

    def is_back(which: Places, theta: Array) -> NDArray[np.bool_]:
        """Whether searches in these places, which have come to θ, are at the first mode."""
        away = np.einsum("nji,nj->ni", roots[whose[which]], theta - modes[whose[which]])
        return np.asarray(np.linalg.norm(away, axis=1) < tol.BACK_SDS)

    starts, who = np.concatenate(others), places[rows[whose]]
    ends = pairs.modes(of, points[where[whose]], starts, who, common.LEFT, stop=is_back)
    away = ends.theta - modes[whose]
    with np.errstate(invalid="ignore"):
        by_first, by_other = (np.einsum("nji,nj->ni", root, away) for root in (roots[whose], ends.root))
        far = np.maximum(np.linalg.norm(by_first, axis=1), np.linalg.norm(by_other, axis=1)) > tol.SEVERAL_SDS
        matters = far & (pairs.of_modes(ends) > pairs.of_modes(first)[kept][whose] + tol.NEGLIGIBLE_MODE)
    reasons: dict[str, str] = {}
    for n in np.flatnonzero(matters):
        client = clients[int(rows[whose[n]])]
        if client.client_id not in reasons:
            reasons[client.client_id] = _several(client, np.abs(by_first[n]), points[where[whose[n]]])
    return reasons


def near_and_far(points: Array, center: Array) -> Array:
    """The center, and the farthest of the half of the points (S, m) that is nearest to it, (2, m)."""
    scale = np.median(np.abs(points - center), axis=0)
    far = np.linalg.norm((points - center) / np.where(scale > 0, scale, 1.0), axis=1)
    return np.stack([center, points[np.argsort(far)[len(far) // 2]]])


def _starts(client: ClientView, mode: Array, factor: Array) -> Array:
    """Modes of likelihoods that do not identify signs or order, and points far off in random directions."""
    d = len(mode)
    starts = [-mode, np.zeros(d), client.initial]
    if d > 1:
        starts += list(np.where(np.eye(d, dtype=bool), -mode, mode)[: tol.FLIPPED])
    variables = [label.partition("[")[0] for label in client.local_labels]
    names = list(dict.fromkeys(variables))[: tol.TURNED]
    for signs in itertools.product((1.0, -1.0), repeat=len(names)):
        sign = dict(zip(names, signs, strict=True))
        starts.append(mode * np.array([sign.get(name, 1.0) for name in variables]))
    alike = [(i, j) for i in range(d) for j in range(i + 1, d) if variables[i] == variables[j]]
    for i, j in alike[: tol.EXCHANGED]:
        exchanged = mode.copy()
        exchanged[[i, j]] = mode[[j, i]]
        starts.append(exchanged)
    z = np.random.default_rng(stream_of(client.client_id)).normal(size=(len(tol.OTHER_MODE_SDS), d))
    z *= np.array(tol.OTHER_MODE_SDS)[:, None] / np.linalg.norm(z, axis=1, keepdims=True)
    moved = np.linalg.solve(factor.T, np.concatenate([z, -z]).T).T
    every = np.stack([mode, *starts, *(mode + moved)])
    _, first = np.unique(every, axis=0, return_index=True)
    return every[np.sort(first[first > 0])]  # without the mode itself


def _several(client: ClientView, away: Array, point: Array) -> str:
    name = client.local_labels[int(np.argmax(away))]
    where = np.array2string(point, precision=3)
    return (
        f"its local variables have more than one mode at φ = {where}, farthest apart in {name}, and only one is "
        "integrated over. Declare them with a sign (pm.HalfNormal), an order, or a prior that leaves one"
    )
