r"""log f_k where most of θ is Gaussian given φ and few coordinates c of θ, as coefficients are given a noise sd.

.. math:: \log f_k(\varphi) = \log \int \Big[\int p(y_k, \theta_c, \theta_r \mid \varphi)\, d\theta_r\Big]\, d\theta_c

The inner integral is exact by Newton steps, wherever these begin; the outer one is a quadrature over c, which is
centered anew where most of the integral is not about the mode of θ. For other modes `_other_modes` looks before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from fedppl.contracts import ClientView
from fedppl.local import _marginal
from fedppl.local._gaussian_rest import Places, find, is_exact
from fedppl.local._marginal import LeftOut
from fedppl.local._two_rules import Pair, by_pairs, by_two_rules
from fedppl.numerics import pairs
from fedppl.numerics.importance import has_enough_points, stream_of
from fedppl.numerics.integral import Rule, by_far_grid, by_grid, log_integrals
from fedppl.numerics.pairs import Densities
from fedppl.types import Array

MOST = 3  # coordinates that are integrated by a grid
_NODES = {2: (11, 15), 3: (7, 9)}  # of each coordinate, by their number
_AT_ONCE = 2**22  # numbers in the points that are held at a time
_TIMES = 4  # a quadrature is centered anew
_IN = 3.0  # times half of the width of the middle two thirds, beyond which tails are drawn in
_OFF = 1.0  # sds that the mass may be off the center of its quadrature
_NARROW, _WIDE = 0.5, 2.0  # of those that it was made for, between which the sds of the mass may be
_NEAR, _MISSED, _LOW = 1e3, 1e-6, 30.0  # what a step may gain, what steps may leave, below the largest what counts


class _Quadrature(NamedTuple):
    """Where θ is expanded, and where nodes z are: c = mode_c + shift + spread z."""

    phi: Array  # (S, m)
    modes: Array  # (S, d)
    curvature: Array  # (S, d, d) at the mode
    shift: Array  # (S, q)
    spread: Array  # (S, q, q)


def integrated(client: ClientView, points: Array, center: Array, which: Places) -> tuple[Array, Array]:
    """log f_k at points (S, m), NaN where there is no mode, and what is not known of it."""
    if len(which) == 1:
        return by_two_rules(lambda some, rule: _by_rule(client, some, center, which, rule), points)
    by_rule = functools.partial(_by_rule, client, center=center, which=which)
    # Heavy tails are of priors, and reach out along their coordinates; or along a ridge that data leave.
    ways = [functools.partial(by_rule, rule=by_grid(len(which), count)) for count in _NODES[len(which)]]
    for along in (True, False):
        far = [by_far_grid(len(which), finer=finer) for finer in (False, True)]
        ways += [functools.partial(by_rule, rule=rule, far=True, along_axes=along) for rule in far]
    return by_pairs(ways, points, (Pair(0, 1, 1), Pair(1, 2, 1), Pair(2, 3, 2), Pair(4, 5, 4)))


def _by_rule(
    client: ClientView,
    points: Array,
    center: Array,
    which: Places,
    rule: Rule,
    *,
    far: bool = False,
    along_axes: bool = False,
) -> tuple[Array, Array]:
    q, m = len(which), points.shape[1]
    rest = np.setdiff1d(np.arange(client.local_size), which)
    values, errors = np.full(len(points), np.nan), np.zeros(len(points))
    chunk = max(1, _AT_ONCE // (len(rule.nodes) * (1 + len(rest)) * (m + client.local_size)))
    for first in range(0, len(points), chunk):
        some = points[first : first + chunk]
        found, modes, factors = _marginal.modes(client, some, center)
        told = np.flatnonzero(np.isfinite(found))
        about = about_modes(some[told], modes[told], factors[told], which, rest)
        if along_axes:
            about = about._replace(spread=np.sqrt(np.sum(about.spread**2, axis=2))[:, :, None] * np.eye(q))
        terms = (_terms if far else _centered)(client, about, which, rest, rule)
        values[first + told], errors[first + told] = log_integrals(terms, rule)
    return values, errors


def about_modes(phi: Array, modes: Array, factors: Array, which: Places, rest: Places) -> _Quadrature:
    """Nodes where Laplace's approximation has c."""
    curvature = factors @ np.swapaxes(factors, 1, 2)
    follow = np.linalg.solve(curvature[:, rest[:, None], rest], curvature[:, rest[:, None], which])
    of_c = curvature[:, which[:, None], which] - curvature[:, which[:, None], rest] @ follow
    spread = np.linalg.inv(np.swapaxes(np.linalg.cholesky(of_c), 1, 2))
    return _Quadrature(phi, modes, curvature, np.zeros((len(phi), len(which))), spread)


def _centered(client: ClientView, about: _Quadrature, which: Places, rest: Places, rule: Rule) -> Array:
    """Logarithms of what nodes add to the integral, (S, L), of nodes that lie where the integral is."""
    terms = _terms(client, about, which, rest, rule)
    gaps = np.stack([_gaps(column) for column in rule.nodes.T], axis=1)
    off = np.arange(len(terms))
    for _ in range(_TIMES):
        off = off[np.isfinite(terms[off].max(axis=1))]
        shares = np.exp(terms[off] - logsumexp(terms[off], axis=1, keepdims=True))
        here = gaps[np.argmax(shares, axis=1)]
        held = _drawn_in(shares, rule.nodes, here)
        mean = np.einsum("sl,slp->sp", shares, held)
        held -= mean[:, None]
        least = (0.5 * here[:, None]) ** 2  # what lies at one node is as wide as nodes are apart
        covariance = np.einsum("sl,slp,slq->spq", shares, held, held) + least * np.eye(len(which))
        wide = np.linalg.eigvalsh(covariance)
        away = (np.abs(mean).max(axis=1) > _OFF) | (wide[:, 0] < _NARROW**2) | (wide[:, -1] > _WIDE**2)
        off, mean, covariance = off[away], mean[away], covariance[away]
        if not len(off):
            break
        shift = about.shift[off] + np.einsum("spq,sq->sp", about.spread[off], mean)
        spread = about.spread[off] @ np.linalg.cholesky(covariance)
        about.shift[off], about.spread[off] = shift, spread
        terms[off] = _terms(client, _Quadrature(*(values[off] for values in about)), which, rest, rule)
    return terms


def _gaps(column: Array) -> Array:
    """How far apart nodes are where each is."""
    nodes = np.unique(column)
    return np.asarray(np.gradient(nodes)[np.searchsorted(nodes, column)])


def _drawn_in(shares: Array, nodes: Array, gaps: Array) -> Array:
    """Nodes (S, L, q) with tails drawn in, which say nothing of how wide the middle is: Cauchy's has no sd at all."""
    held = np.empty((*shares.shape, nodes.shape[1]))
    for place, column in enumerate(nodes.T):
        order = np.argsort(column, kind="stable")
        below = np.cumsum(shares[:, order], axis=1)
        low, middle, high = (column[order][np.argmax(below > part, axis=1)] for part in (0.16, 0.5, 0.84))
        width = _IN * np.maximum(0.5 * (high - low), gaps[:, place])
        held[:, :, place] = np.clip(column, (middle - width)[:, None], (middle + width)[:, None])
    return held


class Given(NamedTuple):
    """Nodes of c with the Gaussian that the rest of θ has given each."""

    terms: Array  # (S, L) logarithms of what nodes add to the integral
    theta: Array  # (S, L, d) with the rest at its mean
    precision: Array  # (S, L, r, r)


def _terms(client: ClientView, about: _Quadrature, which: Places, rest: Places, rule: Rule) -> Array:
    """Logarithms of what nodes of c add to the integral, (S, L)."""
    who = np.zeros(len(about.phi), dtype=np.int64)
    return at_nodes(client.view(_marginal.densities), who, about, which, rest, rule).terms


def at_nodes(of: Densities, who: Places, about: _Quadrature, which: Places, rest: Places, rule: Rule) -> Given:
    """Nodes of c at (client, point) pairs, clients being in places who (S,)."""
    (count, m), nodes, r = about.phi.shape, len(rule.nodes), len(rest)
    A_rr = about.curvature[:, rest[:, None], rest]
    follow = np.linalg.solve(A_rr, about.curvature[:, rest[:, None], which])  # (S, r, q): how the rest moves with c
    step = about.shift[:, None] + rule.nodes @ np.swapaxes(about.spread, 1, 2)  # (S, L, q)
    x = np.empty((count, nodes, 1 + r, m + about.modes.shape[1]))
    x[..., :m], x[..., m:] = about.phi[:, None, None], about.modes[:, None, None]
    x[..., m + which] += step[:, :, None]
    x[..., m + rest] -= np.einsum("srq,slq->slr", follow, step)[:, :, None]
    widths = 1.0 / np.sqrt(np.diagonal(A_rr, axis1=1, axis2=2))  # the gradient is linear in the rest: any step is exact
    for i, place in enumerate(m + rest):
        x[:, :, 1 + i, place] += widths[:, None, i]
    flat = x.reshape(count * nodes * (1 + r), x.shape[-1])
    outputs = pairs.outputs_at(of, flat, np.repeat(who, nodes * (1 + r))).reshape(count, nodes, 1 + r, -1)
    slopes = outputs[..., 1 + m + rest]
    slope = slopes[:, :, 0]
    curved = -(slopes[:, :, 1:] - slope[:, :, None]) / widths[:, None, :, None]
    curved = 0.5 * (curved + np.swapaxes(curved, 2, 3))
    inverse, log_determinant = _inverses(curved)
    move = np.einsum("slij,slj->sli", inverse, slope)
    logs, gain, theta = outputs[:, :, 0, 0], 0.5 * np.einsum("sli,sli->sl", slope, move), x[:, :, 0, m:]
    # Where a Newton step gains as much as the density is itself, the rounding of both is of any size: the density is
    # then read where the steps end.
    far = ~(gain < _NEAR)
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
    good = proper & (missed < _MISSED)
    least = np.max(np.where(good, terms, -np.inf), axis=1, keepdims=True) - _LOW
    unknown = np.any(~good & (terms > least), axis=1)  # a node that counts is not known: nor is the integral
    return Given(np.where(good & ~unknown[:, None], terms, -np.inf), theta, curved)


def _inverses(matrices: Array) -> tuple[Array, Array]:
    """Inverses (..., r, r) and log determinants of those that are positive definite; 0 and NaN of others."""
    if matrices.shape[-1] == 1:
        held: Array = np.where(matrices > 0.0, matrices, np.nan)
        return np.asarray(np.nan_to_num(1.0 / held)), np.asarray(np.log(held[..., 0, 0]))
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
        return np.asarray(inverses * proper[..., None]), np.where(
            proper[..., 0] > 0.0, np.log(values).sum(axis=-1), np.nan
        )


def left_out(client: ClientView, mean: Array, root: Array) -> LeftOut:
    """What Laplace over θ leaves out of log f_k about q = N(mean, root rootᵀ)."""
    if not client.local_size or client.view(is_exact):
        return LeftOut(None, 1.0)
    if not has_enough_points(client.shared_size):
        return LeftOut(None, 0.0)
    which = client.view(find)

    def difference(points: Array) -> tuple[Array, float] | None:
        if which is None:
            return _marginal.difference(client, points, mean)
        laplace, _, _ = _marginal.modes(client, points, mean)
        found = integrated(client, points, mean, which)[0] - laplace
        return (found, 1.0) if np.all(np.isfinite(found)) else None

    return _marginal.left_out(difference, mean, root, stream_of(client.client_id))
