r"""log f_k at points as well as it can be had, with errors: θ integrated, not only approximated by Laplace.

.. math:: \log f_k(\varphi) = \log \int p(y_k, \theta \mid \varphi)\, d\theta

Where coordinates of θ are independent given φ, each by a quadrature of its own. Else by a grid about the mode of θ for
up to three coordinates, which reaches far out where tails are heavy; beyond, sparse grids, or importance sampling from
multivariate t's there. The same nodes serve all φ, so that their error is smooth in φ and mostly a constant, which
moves no moment, but the evidence; what of it is not constant shows in two halves of the nodes, and in what the
jackknife adds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientView, Constant, Factor
from fedppl.local import _conditional, _gaussian_rest, _marginal, _sparse
from fedppl.local._other_modes import require_one_mode
from fedppl.local._two_rules import by_two_rules
from fedppl.numerics import importance, pairs, region
from fedppl.numerics.importance import STREAMS, effective_size, normalise, stream_of, weighted_moments
from fedppl.numerics.integral import Rule, log_integrals
from fedppl.numerics.pairs import Laplace, Places, site_batch
from fedppl.numerics.proposals import Proposal, beyond, log_mixture, points_of, scrambles
from fedppl.numerics.smooth import smooth_over
from fedppl.types import Array, LocalFailure

_SHAPING, _FITS = 64, 3  # points of a scramble that tell where θ lies at the center, and how often it is fitted
_APART = 2**16  # between the streams of parts of a mixture
_NODES = (32, 128, 512)  # of a scramble; more where they do not tell how log f_k varies
_AGREE = 0.003  # sd over points of the errors, in log units, with which more nodes are not needed
_HELD_AGAINST = 4  # points at which sparse grids are held against sampled nodes
_ALIKE = 0.02  # log units, the most that they may differ by alike at all points
_SOME = (128, 512)  # points at which θ is integrated first, and where they do not foretell the others


def _shapes(client: ClientView, center: Array) -> tuple[Proposal, ...]:
    """T's that θ lies under at the center, in sds of Laplace's approximation about its mode.

    One about the mode, one of the moments that θ has, and where its tails are heavy others out there. Fitted a few
    times, each with points of those before: of a shoulder beside the mode the first points see little.
    """
    d = client.local_size
    _, modes, factors = _marginal.modes(client, center[None], center)
    found: tuple[Proposal, ...] = (Proposal(np.zeros(d), np.eye(d), _SHAPING),)
    for time in range(_FITS):
        # Others than the nodes: what is fitted to nodes and integrated by them is too small, alike at all clients.
        stream = stream_of(client.client_id) + STREAMS * (1 + time)
        z = np.concatenate([points_of(one, stream + _APART * number) for number, one in enumerate(found)])
        theta = modes + np.linalg.solve(factors[0].T, z.T).T
        x = np.concatenate([np.broadcast_to(center, (len(z), len(center))), theta], axis=1)
        logs = site_batch(client.kernel, x, client.packed) - log_mixture(found, z)
        if not np.any(np.isfinite(logs)):
            break
        logs, _ = importance.smoothed(np.nan_to_num(logs, nan=-np.inf, posinf=-np.inf))
        weights = normalise(logs)
        moments = weighted_moments(z, weights)
        kept = min(1.0, effective_size(weights) / (10.0 * d))  # few points do not tell a covariance
        covariance = kept * moments.covariance + (1.0 - kept) * np.eye(d)
        outer = beyond(z, weights, _SHAPING) if kept == 1.0 else ()
        shaped = Proposal(kept * moments.mean, np.asarray(np.linalg.cholesky(covariance)), _SHAPING)
        found = (found[0], shaped, *outer)
    return found


def _student_rule(shapes: tuple[Proposal, ...], count: int, stream: int) -> Rule:
    """Nodes with weights for integrals over a standard normal, as many of each scramble: a mixture of these t's."""
    inner, outer = shapes[:2], shapes[2:]
    each = count // (4 if outer else len(inner))
    parts = [one._replace(per_scramble=each) for one in inner]
    mixture = (*parts, *(one._replace(per_scramble=max(1, count // 2 // len(outer))) for one in outer))
    nodes = np.concatenate([points_of(one, stream + _APART * number) for number, one in enumerate(mixture)])
    log_normal = -0.5 * np.sum(nodes**2, axis=1) - 0.5 * nodes.shape[1] * np.log(2 * np.pi)
    log_weights = log_normal - log_mixture(mixture, nodes) - np.log(len(nodes))
    return Rule(nodes, log_weights, scrambles(mixture).astype(float))


def factor(client: ClientView, points: Array, center: Array, prior_share: float) -> Factor:
    """log f_k, and its share of a prior that is not Gaussian, at points (S, m), by way of an expansion at a center.

    Laplace's approximation everywhere, and what it leaves out at some of the points; at all where that is not smooth.
    """
    points = np.ascontiguousarray(points)
    if not len(points):  # a policy may leave none
        return Factor(np.zeros(0), np.zeros(0))
    if client.local_size:
        require_one_mode(client, points, center)
    about = _marginal.near(client, points, center)
    found = Factor(about.values, np.zeros(len(points)))
    if client.local_size and not client.view(_gaussian_rest.is_exact):
        found = (integrated if is_separable(client) else _corrected)(client, points, center, about)
    return found._replace(values=found.values + prior_share * client.prior.log_ratio(points)) if prior_share else found


def _with_alike(values: Array, errors: Array) -> Factor:
    """Values and errors of a quadrature, and what these have in common, which other clients' have too."""
    told = np.isfinite(values)
    return Factor(values, errors, Constant(float(np.median(errors[told])) if np.any(told) else 0.0))


def _corrected(client: ClientView, points: Array, center: Array, about: Laplace) -> Factor:
    """log f_k from a spline of what Laplace's leaves out, known at as few points as foretell the others, or at all."""
    known = np.unique(np.linspace(0, len(points) - 1, _SOME[1]).astype(int))
    for some in (known[:: _SOME[1] // _SOME[0]], known):
        at = Laplace(*(part[some] for part in about))
        better = integrated(client, points[some], center, at)
        smooth = smooth_over(points, some, better.values - at.values, better.errors)
        if smooth is not None:
            return Factor(about.values + smooth[0], smooth[1] + smooth[2], better.constant)
    return integrated(client, points, center, about)


def integrated(client: ClientView, points: Array, center: Array, about: Laplace) -> Factor:
    """log f_k by lines, by quadratures over few coordinates, or sampled nodes; of what is about modes by a center's."""
    if is_separable(client):
        return _with_alike(*_one_by_one(client, points, about))
    which = client.view(_gaussian_rest.find)
    if which is None and client.local_size <= _conditional.MOST:
        which = np.arange(client.local_size)
    if which is None:
        return _by_sparse_grids(client, points, center) or _sampled(client, points, center)
    return _with_alike(*_conditional.integrated(client, points, center, which))


def _by_sparse_grids(client: ClientView, points: Array, center: Array) -> Factor | None:
    """By sparse grids, which see no tails: held against sampled nodes, which do, at some points."""
    if not _sparse.FEWEST <= client.local_size <= _sparse.MOST:
        return None
    found = _sparse.by_two_levels(client, points, center, _AGREE)
    if found is None:
        return None
    values, errors = found
    some = np.unique(np.linspace(0, len(points) - 1, _HELD_AGAINST).astype(int))
    sampled, unsure, constant = _sampled(client, points[some], center)
    apart = sampled - values[some]
    told = np.isfinite(apart)
    if np.sum(told) < np.sum(np.isfinite(sampled)) or not np.any(told):
        return None
    alike = float(np.median(apart[told]))
    varies = 1.48 * float(np.median(np.abs(apart[told] - alike)))
    if varies > _AGREE + float(np.median(np.abs(unsure[told]))) or abs(alike) > _ALIKE:
        return None
    return Factor(values, errors, Constant(alike, constant.by_chance))


def _sampled(client: ClientView, points: Array, center: Array) -> Factor:
    """By importance sampling; as many nodes as it takes to know how log f_k varies.

    The logarithm of a mean is too low on average, and alike at all clients: by the jackknife over scrambles it is right
    to the second order, and what that adds says how far it may still be off. Where few nodes see the tails of θ both
    are too small; so four times as many nodes have to say the same.
    """
    shapes = _shapes(client, center)
    values, errors, before = np.zeros(len(points)), np.zeros(len(points)), None
    constant = Constant()
    for count in _NODES:
        nodes = _student_rule(shapes, count, stream_of(client.client_id))
        values, _, _, shares = _marginal.integrals(client, points, center, nodes)
        told = np.isfinite(values)
        if not np.any(told):
            break
        rest = np.log(np.clip(1.0 - shares, 1e-8, 1.0)) - np.log1p(-1.0 / region.SCRAMBLES)  # without each scramble
        bias = -(region.SCRAMBLES - 1.0) * rest.mean(axis=1)
        half = shares[:, : region.SCRAMBLES // 2].sum(axis=1)
        with np.errstate(divide="ignore"):
            apart = np.clip(np.log(half) - np.log1p(-half), -20.0, 20.0)
        values = values + bias
        errors = 0.5 * (_varying(apart, told) + _varying(bias, told))
        spread = np.sqrt(region.SCRAMBLES) * np.std(shares[told], axis=1, ddof=1)  # of the mean of all scrambles
        constant = Constant(0.5 * float(np.median(bias[told])), float(np.median(spread)))
        if before is not None:
            moved = _varying(values - before, told & np.isfinite(before))
            errors = errors + moved  # rare nodes of large weight: what is left falls slowly with their number
            if 1.48 * max(float(np.median(np.abs(one[told]))) for one in (errors, moved)) < _AGREE:
                break
        before = values
    return Factor(values, errors, constant)


def _varying(values: Array, told: NDArray[np.bool_]) -> Array:
    """Values less their median, which moves nothing; 0 where they are not told."""
    return np.where(told, values - (np.median(values[told]) if np.any(told) else 0.0), 0.0)


# log f_k where coordinates of θ are independent given φ and the data: a product of integrals over one coordinate ------

# f_k(φ) = p(y_k, θ* | φ) Π_i ∫ p(y_k, θ*_-i, θ_i | φ) / p(y_k, θ* | φ) dθ_i

_DIAGONAL = 1e-5  # of a curvature that differences tell, before the density itself is looked at
_EQUAL = 1e-8


def is_separable(client: ClientView) -> bool:
    """Whether coordinates of θ are independent given φ and the data."""
    return client.local_size == 1 or client.view(_is_product)


def _is_product(client: ClientView) -> bool:
    """By the density alone, near and far."""
    prior = client.prior.gaussian
    points = gaussian.mean(prior) + np.array([[-1.0], [0.3], [1.0]]) * gaussian.standard_deviations(prior)
    try:
        _, modes, factors = _marginal.modes(client, points, gaussian.mean(prior))
    except LocalFailure:
        return False
    d = client.local_size
    scales = np.diagonal(factors, axis1=1, axis2=2)
    if not np.all(np.isfinite(factors)) or not np.all(scales > 0):  # no mode at one of the points
        return False
    if np.abs(factors / scales[:, None, :] - np.eye(d)).max() > _DIAGONAL:
        return False
    z = np.random.default_rng(0).normal(size=(4, d)) * np.array([[0.5], [1.0], [2.0], [3.0]])
    for point, mode, scale in zip(points, modes, scales, strict=True):
        moved = z / scale
        alone = (moved[:, :, None] * np.eye(d)).reshape(-1, d)  # one coordinate moved at a time
        theta = mode + np.concatenate([np.zeros((1, d)), moved, alone])
        x = np.concatenate([np.broadcast_to(point, (len(theta), len(point))), theta], axis=1)
        logs = site_batch(client.kernel, x, client.packed)
        logs = np.where(logs < np.inf, logs, -np.inf)
        together, each = logs[1 : 1 + len(z)] - logs[0], (logs[1 + len(z) :] - logs[0]).reshape(len(z), d).sum(axis=1)
        if not np.allclose(together, each, rtol=_EQUAL, atol=_EQUAL * max(1.0, float(np.abs(logs[0])))):
            return False
    return True


def _one_by_one(client: ClientView, points: Array, about: Laplace) -> tuple[Array, Array]:
    """log f_k at points (S, m), NaN where there is no mode, and what is not known of it."""
    of, d = client.view(_marginal.densities), client.local_size
    about = about._replace(root=about.root * np.eye(d))

    def compute(some: Places, rule: Rule) -> tuple[Array, Array]:
        def summed(terms: Array) -> Array:
            lines, less = pairs.log_lines(terms, d)
            each = np.stack(log_integrals(lines.reshape(len(terms) * d, -1), rule), axis=1)
            return np.asarray(each.reshape(-1, d, 2).sum(axis=1) - less[:, None] * np.array([1.0, 0.0]))

        at, who = Laplace(*(part[some] for part in about)), np.zeros(len(some), dtype=np.int64)
        found = pairs.by_nodes(of, at, points[some], who, pairs.along_axes(rule, d), summed)
        return found[:, 0], np.nan_to_num(found[:, 1])

    return by_two_rules(compute, np.arange(len(points), dtype=np.int64))
