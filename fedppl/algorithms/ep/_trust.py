"""How far one client pulls q, and the bound on it: sites are drawn in until leaving one out moves q little.

With site k = (r_k, Q_k), cavity (r_{-k}, Q_{-k}) = q − site k, and means μ and μ_{-k}, what client k pulls is
v_k = μ − μ_{-k} = Q⁻¹ u_k with u_k = r_k − Q_k μ_{-k}. `bound` returns sites of the same precisions with

    |v_k|_i ≤ c sd_{-k,i} for every coordinate i     and     ‖v_k‖_{Q_{-k}} ≤ the χ_m quantile with c's two-sided tail.

The units are the cavity's, since the model itself bounds v_k there: given φ ~ the cavity, the law of total variance
gives v_k the covariance Q_{-k}⁻¹ − Q⁻¹, below Q_{-k}⁻¹ however many rows the client has. The norm of v_k is about χ_m,
so that a plain c would hold back honest clients in many coordinates.

1. Others as they are, Q_k and μ_{-k} do not depend on r_k, so that r_k = Q_k μ_{-k} + t u_k pulls t v_k: some t ≤ 1
   keeps both bounds. That changes others' cavities: it is repeated until all bounds hold, `SWEEPS` times at most.
2. Else, as with several clients that lie, clients are left out until the rest agree, and get u_k = 0.
3. Else all sites go to Q_k μ_0 + t (r_k − Q_k μ_0) with the prior's mean μ_0. Then μ − μ_0 = t Q⁻¹ Σ (r_j − Q_j μ_0),
   likewise μ_{-k}, so that every v_k is linear in t, and some t ≤ 1 keeps all bounds at once.

A client whose cavity is not positive definite cannot be left out: its pull is not measured, and nothing is called
converged. Variances are not protected, but for two cases. A site that takes more than half of its cavity's precision in
a direction gets none there, and u_k = 0, or one client could make q improper. One that gives more than `GIVES` times
the cavity's is cut to that, with u_k as it is there: beyond, rounding would leave nothing of the others' sites.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fedppl import gaussian, structure
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep.sites import Sites
from fedppl.gaussian import Gaussian
from fedppl.types import Array


class Bounded(NamedTuple):
    """Sites within the bound, and what they were before."""

    sites: Sites
    pull: Array  # (K, m) before, in sds of the client's cavity; NaN where it is not proper
    held: NDArray[np.bool_]  # (K,) sites that were changed
    takes: NDArray[np.bool_]  # (K,) those that took more precision than may be
    gives: NDArray[np.bool_]  # (K,) those that gave more
    near: NDArray[np.bool_]  # (K,) those that pull about as far as they may, or were changed
    unknown: NDArray[np.bool_]  # (K,) those without which the others' sites are no posterior


class _Precisions(NamedTuple):
    """q's and the cavities' precisions, with inverses, on which pulls depend; an identity where one is not proper."""

    covariance: Array  # (m, m) of q
    precisions: Array  # (K, m, m) of the cavities
    covariances: Array  # (K, m, m)
    sd: Array  # (K, m)
    proper: NDArray[np.bool_]  # (K,) q and the cavity are


class _Pulls(NamedTuple):
    mean: Array  # (K, m) of the cavities
    along: Array  # (K, m) v_k in the cavity's sds
    ratios: Array  # (K,) of v_k to its bound, 0 where it cannot be measured


def largest_norm(trust: float, size: int) -> float:
    """The χ_m quantile with the two-sided tail that c has in one dimension.

    Examples
    --------
    >>> round(largest_norm(3.0, 1), 9), round(largest_norm(3.0, 8), 2)
    (3.0, 4.86)
    """
    # Where the tail underflows, the norm has no bound, but its coordinates have.
    return float(np.sqrt(special.chdtri(size, special.chdtrc(1, trust**2))))


def pulls(sites: Sites) -> Array:
    """Each client's pull, μ − μ_{-k} in sds of its cavity: (K, m); NaN where that is not proper."""
    precision = structure.unpack_precision(sites.precision, sites.structure)
    return _measured(sites, sites.linear, _precisions(sites, precision), (np.inf, np.inf)).along


def bound(sites: Sites, trust: float) -> Bounded:
    """Draw sites in until no client pulls further than `trust` allows; a client alone is not bounded."""
    count, m = sites.linear.shape
    nobody = np.zeros(count, dtype=bool)
    if count == 1:
        return Bounded(sites, np.full((1, m), np.nan), nobody, nobody, nobody, nobody, nobody)
    linear, precision, takes, gives = _of_a_size(sites)
    precisions, limits = _precisions(sites, precision), (trust, largest_norm(trust, m))
    before = _measured(sites, linear, precisions, limits)
    drawn = _drawn_in(sites, linear, precision, precisions, limits)
    if drawn is None:
        drawn = _drawn_in(sites, _left_out(sites, linear, precision, limits), precision, precisions, limits)
    if drawn is None:
        centres = precision @ gaussian.mean(sites.prior)
        drawn = centres + min(1.0, tol.AIM / float(before.ratios.max())) * (linear - centres)
    unknown = ~precisions.proper & np.any(precisions.proper)
    held = np.any(drawn != linear, axis=1) | takes | gives
    if not np.any(held):
        return Bounded(sites, before.along, held, takes, gives, before.ratios > tol.NEAR_BOUND, unknown)
    # Sites that are not changed stay to the last bit.
    packed = np.where((takes | gives)[:, None], _sites.in_structure(precision, sites.structure), sites.precision)
    # Beside a changed site, others are not near the bound: their pulls may be its effect.
    return Bounded(_sites.update(sites, drawn, packed), before.along, held, takes, gives, held, unknown)


def _precisions(sites: Sites, precision: Array) -> _Precisions:
    """Cavities are sums over the others: a difference would lose them beside a site of 10^14 times their precision."""
    q, cavities = sites.prior.precision + precision.sum(axis=0), sites.prior.precision + _others(precision)
    proper = _are_proper(cavities)
    if not _are_proper(q[None])[0]:
        q, proper = np.eye(len(q)), np.zeros_like(proper)
    safe = np.where(proper[:, None, None], cavities, np.eye(len(q)))
    covariances = np.linalg.inv(safe)
    return _Precisions(np.linalg.inv(q), safe, covariances, np.sqrt(np.einsum("kii->ki", covariances)), proper)


def _measured(sites: Sites, linear: Array, of: _Precisions, limits: tuple[float, float]) -> _Pulls:
    """Pulls, against limits of a coordinate in the cavity's sds and of the norm in its precision."""
    cavities = sites.prior.linear + _others(linear)
    mean = (of.covariances @ cavities[..., None])[..., 0]
    with np.errstate(invalid="ignore", over="ignore"):
        q = of.covariance @ (sites.prior.linear + linear.sum(axis=0))
        shift = np.where(of.proper[:, None], q - mean, np.nan)
        square = np.sum(shift * (of.precisions @ shift[..., None])[..., 0], axis=1)
        along, norm = shift / of.sd, np.sqrt(np.maximum(square, 0.0))
        ratios = np.nan_to_num(np.maximum(np.abs(along).max(axis=1) / limits[0], norm / limits[1]))
        return _Pulls(mean, along, ratios)


def _drawn_in(
    sites: Sites, linear: Array, precision: Array, precisions: _Precisions, limits: tuple[float, float]
) -> Array | None:
    """Draw in one site after the other until all bounds hold; None where `SWEEPS` do not suffice."""
    linear, without = linear.copy(), dict[int, _Precisions]()
    for _ in range(tol.SWEEPS):
        mean, _, ratios = _measured(sites, linear, precisions, limits)
        if not np.any(ratios > 1 + tol.BOUND_ROUNDING):
            return linear
        k = _odd_one(sites, linear, precision, ratios, limits, without)
        centre = precision[k] @ mean[k]
        linear[k] = centre + (tol.AIM / ratios[k] if ratios[k] > 1 else tol.HALF_WAY) * (linear[k] - centre)
    return None


def _left_out(sites: Sites, linear: Array, precision: Array, limits: tuple[float, float]) -> Array:
    """Leave out one client after the other (u_k = 0), up to half of them, until the others agree."""
    kept = np.ones((len(linear), 1))
    for _ in range(len(linear) // 2):
        r, q = kept * linear, kept[..., None] * precision
        ratios = _measured(sites, r, _precisions(sites, q), limits).ratios
        if not np.any(ratios > 1 + tol.BOUND_ROUNDING):
            break
        kept[_odd_one(sites, r, q, ratios, limits, {})] = 0.0
    r = sites.prior.linear + (kept * linear).sum(axis=0)
    others = Gaussian(r, sites.prior.precision + (kept[..., None] * precision).sum(axis=0))
    return np.where(kept > 0, linear, precision @ gaussian.mean(others)) if gaussian.is_proper(others) else linear


def _odd_one(
    sites: Sites,
    linear: Array,
    precision: Array,
    ratios: Array,
    limits: tuple[float, float],
    without: dict[int, _Precisions],
) -> int:
    """The client that pulls most; or another, without which the others agree much better, by squared ratios.

    Beside a client that lies, an honest one with nearly all rows may pull most, since the others are little else than
    the one that lies. Fills in `without`, which depends on precisions alone.
    """
    candidates = [int(k) for k in np.argsort(-ratios, kind="stable")[: tol.ODD_CANDIDATES]]
    remaining = []
    for k in candidates:
        rest = np.arange(len(linear)) != k
        if k not in without:
            without[k] = _precisions(sites, precision * rest[:, None, None])
        ratios = _measured(sites, linear * rest[:, None], without[k], limits).ratios
        remaining.append(float(np.square(ratios).sum()) if np.all(without[k].proper) else np.inf)
    # If the others are no posterior without the client that pulls most, whether they agree is not known.
    best = int(np.argmin(remaining))
    return candidates[best if np.isfinite(remaining[0]) and remaining[best] < tol.CLEARLY * remaining[0] else 0]


def _of_a_size(sites: Sites) -> tuple[Array, Array, NDArray[np.bool_], NDArray[np.bool_]]:
    """Natural parameters of sites that neither take nor give too much precision, and which sites took or gave it."""
    linear, precision = sites.linear.copy(), structure.unpack_precision(sites.precision, sites.structure)
    takes, gives = np.zeros((2, len(linear)), dtype=bool)
    for _ in range(tol.SIZE_SWEEPS * len(linear)):
        base, centre = _bases(sites, linear, precision)
        root = np.linalg.cholesky(base)
        inverse = np.linalg.inv(root)
        values, vectors = np.linalg.eigh(inverse @ precision @ np.swapaxes(inverse, 1, 2))
        excess = np.maximum(-values[:, 0] / tol.TAKES, values[:, -1] / tol.GIVES)
        k = int(np.argmax(excess))
        if excess[k] <= 1 + tol.BOUND_ROUNDING:
            break
        axes, taking = root[k] @ vectors[k], bool(values[k, 0] < -tol.TAKES)
        kept = np.where(values[k] < -tol.TAKES, 0.0, np.minimum(values[k], tol.AIM * tol.GIVES))
        back = (axes * (kept - values[k])) @ axes.T
        # u_k stays, as far as precision is left, where precision is cut; it is 0 where the site takes too much.
        u = np.linalg.solve(axes, linear[k] - precision[k] @ centre[k])
        u = axes @ (u * np.where(values[k] > kept, kept / values[k], 1.0)) * (not taking)
        precision[k] += structure.unpack_precision(_sites.in_structure(back, sites.structure), sites.structure)
        linear[k] = precision[k] @ centre[k] + u
        takes[k], gives[k] = takes[k] or taking, gives[k] or not taking
    return linear, precision, takes, gives


def _bases(sites: Sites, linear: Array, precision: Array) -> tuple[Array, Array]:
    """Precisions that those of the sites are compared with, and the means there.

    They are those of the cavities; for one that is not proper, as far from the mode, the sizes of others' curvatures.
    """
    base = sites.prior.precision + _others(precision)
    proper = _are_proper(base)
    if not np.all(proper):
        root = np.linalg.cholesky(sites.prior.precision)
        inverse = np.linalg.inv(root)
        values, vectors = np.linalg.eigh(inverse @ precision @ inverse.T)
        axes = root @ vectors
        sizes = (axes * np.abs(values)[:, None, :]) @ np.swapaxes(axes, 1, 2)
        base = np.where(proper[:, None, None], base, sites.prior.precision + _others(sizes))
    cavities = sites.prior.linear + _others(linear)
    return base, np.asarray(np.linalg.solve(base, cavities[..., None])[..., 0])


def _are_proper(precisions: Array) -> NDArray[np.bool_]:
    """Which precisions (K, m, m) are positive definite."""
    return np.atleast_1d(gaussian.is_proper(Gaussian(np.zeros(precisions.shape[:2]), precisions)))


def _others(values: Array) -> Array:
    """Sum over all rows but one, for every row."""
    upto, after = np.cumsum(values, axis=0), np.cumsum(values[::-1], axis=0)[::-1]
    total = np.zeros_like(values)
    total[1:] += upto[:-1]
    total[:-1] += after[1:]
    return total


# Moves of q by single replies, and their scatter: the clients' noise as the server sees it ---------------------------

# A reply proposes a site; its move is the change of q's means and log sds, in posterior sds, if that site replaced the
# old one. While rounds are averaged, moves of honest clients are Monte Carlo error, and cancel.


class Moves(NamedTuple):
    """Moves of each client since averaging began; coordinates are those of the means, then those of the log sds."""

    replies: Array  # (K,) int
    mean: Array  # (K, 2 m) weighted mean of the client's moves
    share: Array  # (K,) variance of that mean, in variances of one move
    pairs: Array  # (K,) int: replies whose difference from the one before is in the scatter; −1 before the first reply
    remaining: Array  # (K, 2 m) move of its last reply that the step did not take
    scatter: Array  # (K,) variance of its replies, by half the mean square of differences between successive ones


def no_moves(clients: int, size: int) -> Moves:
    """Before any reply."""
    none, nowhere = np.zeros(clients), np.zeros((clients, 2 * size))
    never: Array = np.zeros(clients, dtype=np.int64)
    return Moves(never, nowhere, none, never - 1, nowhere, none)


def averaged_anew(moves: Moves) -> Moves:
    """Average from the next reply on, with the scatter of the replies so far."""
    return moves._replace(replies=np.zeros_like(moves.replies))


def moves_of(q: Gaussian, d_linear: Array, d_precision: Array) -> Array:
    """Moves of q's means and log sds, in sds, to first order, by changes (R, m), (R, m, m) of sites: (R, 2 m)."""
    covariance = gaussian.covariance(q)
    sd = np.sqrt(np.diag(covariance))
    means = (d_linear - d_precision @ gaussian.mean(q)) @ covariance / sd
    log_sds = -0.5 * np.einsum("ij,rjk,ki->ri", covariance, d_precision, covariance, optimize=True) / sd**2
    return np.concatenate([means, log_sds], axis=1)


def followed(moves: Moves, rows: list[int], new: Array, step: float) -> Moves:
    """Add the moves (R, 2 m) of a round's replies, of which the share `step` was taken."""
    replies, mean, share, pairs, remaining, scatter = (part.copy() for part in moves)
    # A reply less the remaining move of the one before is the difference of the two proposals.
    square, known = 0.5 * np.mean(np.square(new - remaining[rows]), axis=1), pairs[rows] >= 0
    pairs[rows] += 1
    weight = np.maximum(1.0 / np.maximum(pairs[rows], 1), tol.LEAST_WEIGHT)
    scatter[rows] += np.where(known, (square - scatter[rows]) * weight, 0.0)
    replies[rows] += 1
    weight = np.maximum(1.0 / replies[rows], tol.LEAST_WEIGHT)
    mean[rows] += weight[:, None] * (new - mean[rows])
    share[rows] = (1 - weight) ** 2 * share[rows] + weight**2  # 1 for the first
    remaining[rows] = (1 - step) * new
    return Moves(replies, mean, share, pairs, remaining, scatter)


def backed_variance(moves: Moves, noise: Array) -> float:
    """Variance of a mean by the clients' own errors (K,), which no client can raise by its report alone.

    The largest counts as far as that client's replies scatter.
    """
    k = int(np.argmax(noise))
    return float(noise.sum() - noise[k] + min(noise[k], moves.share[k] * moves.scatter[k]))
