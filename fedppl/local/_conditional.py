r"""log f_k where most of θ is Gaussian given φ and few coordinates c of θ, as coefficients are given a noise sd.

.. math:: \log f_k(\varphi) = \log \int \Big[\int p(y_k, \theta_c, \theta_r \mid \varphi)\, d\theta_r\Big]\, d\theta_c

The inner integral is exact by one Newton step, wherever that begins; the outer one is a quadrature over c.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.contracts import ClientView
from fedppl.local import _inner, _marginal
from fedppl.local._inner import LeftOut
from fedppl.numerics.importance import has_enough_points, stream_of
from fedppl.numerics.integral import Rule, by_grid, by_trapezoids
from fedppl.numerics.marginal import site_outputs
from fedppl.types import Array, LocalFailure

MOST = 2  # coordinates that may be integrated by quadrature
_MOST_LOCAL = 50  # coordinates of θ, so that finding c costs little
_NODES = 11  # of each coordinate where there are two
_AT_ONCE = 2**22  # numbers in the points that are held at a time
_STEP, _CHANGED = 1e-2, 1e-6  # sds; change of a curvature, in its own units, that is none of rounding
_EQUAL, _ROUNDING = 1e-7, 1e-10  # of what the density changes by, and of the density

Places = NDArray[np.intp]


class _Probes(NamedTuple):
    """Points of the prior of φ, with the modes of θ there, and its sds, each given the others."""

    phi: Array  # (P, m)
    modes: Array  # (P, d)
    sds: Array  # (P, d)


def _probes(client: ClientView) -> _Probes | None:
    """Near and far, of model and data alone; None where θ has no mode at one of them."""
    center = gaussian.mean(client.prior.gaussian)
    near, far = (_marginal.prior_sds(client, most) for most in (1.0, 10.0))
    points = center + np.stack([-near, 0.3 * near, near, -far, far])
    try:
        _, modes, factors = _marginal.modes(client, points, center, factors=True)
    except LocalFailure:
        return None
    if not np.all(np.isfinite(factors)) or not np.all(np.diagonal(factors, axis1=1, axis2=2) > 0):
        return None
    return _Probes(points, modes, 1.0 / np.sqrt(np.sum(factors**2, axis=2)))


def is_exact(client: ClientView) -> bool:
    """Whether θ is Gaussian given φ, as far as points of the prior tell, near and far: from model and data alone."""
    probes = client.view(_probes)
    nothing = np.zeros(0, dtype=np.intp)
    return probes is not None and all(_is_gaussian(client, *one, nothing) for one in zip(*probes, strict=True))


def find(client: ClientView) -> Places | None:
    """Coordinates c of θ, as few as will do, given which the others are Gaussian; None where these are too many."""
    d, probes = client.local_size, client.view(_probes)
    if probes is None or not 1 < d <= _MOST_LOCAL:
        return None
    turns = np.zeros((d, d, d), dtype=bool)
    for point, mode, sd in zip(*probes, strict=True):
        around = mode + np.concatenate([np.zeros((1, d)), np.diag(sd)])
        curved = np.array([_curvature(client, point, theta, sd) for theta in around]) * np.outer(sd, sd)
        if not np.all(np.isfinite(curved)):
            return None
        turns |= np.abs(curved[1:] - curved[0]) > _CHANGED * np.abs(curved).max()
    chosen = _cover(turns, ())
    if not chosen:
        return None
    which = np.array(sorted(chosen), dtype=np.intp)
    held = all(_is_gaussian(client, *one, which) for one in zip(*probes, strict=True))
    return which if held else None


def _cover(turns: NDArray[np.bool_], chosen: tuple[int, ...]) -> tuple[int, ...] | None:
    """The fewest coordinates without which no curvature of the others turns with one of them; None beyond MOST."""
    rest = np.setdiff1d(np.arange(len(turns)), chosen)
    left = np.argwhere(turns[np.ix_(rest, rest, rest)])
    if not len(left):
        return chosen
    if len(chosen) == MOST:
        return None
    covers = [_cover(turns, (*chosen, int(one))) for one in np.unique(rest[left[0]])]  # one of these it must be
    return min((one for one in covers if one is not None), key=len, default=None)


def _curvature(client: ClientView, point: Array, theta: Array, sd: Array) -> Array:
    """−∂²ℓ/∂θ² by central differences."""
    d, m = len(theta), len(point)
    x = np.concatenate([np.broadcast_to(point, (2 * d, m)), theta + _STEP * np.vstack([np.diag(sd), -np.diag(sd)])], 1)
    slopes = site_outputs(client.kernel, np.ascontiguousarray(x), client.packed)[:, 1 + m :]
    found = -(slopes[:d] - slopes[d:]) / (2.0 * _STEP * sd[:, None])
    return np.asarray(0.5 * (found + found.T))


def _is_gaussian(client: ClientView, point: Array, mode: Array, sd: Array, which: Places) -> bool:
    """Whether the density itself is a Gaussian's in the rest of θ, near and far, wherever c is."""
    rest = np.setdiff1d(np.arange(len(mode)), which)
    rng = np.random.default_rng(0)
    for far in (0.5, -1.0, 2.0) if len(which) else (0.0,):
        center = mode.copy()
        center[which] += far * sd[which]
        z = rng.normal(size=(4, len(rest))) * np.array([[0.5], [1.0], [3.0], [10.0]])
        ends = np.repeat(center[None], 1 + len(rest) + len(z), axis=0)
        ends[1 : 1 + len(rest), rest] += np.diag(sd[rest])
        ends[1 + len(rest) :, rest] += z * sd[rest]
        x = np.concatenate([np.broadcast_to(point, (len(ends), len(point))), ends], axis=1)
        found = site_outputs(client.kernel, np.ascontiguousarray(x), client.packed)
        logs, slopes = found[:, 0], found[:, 1 + len(point) + rest] * sd[rest]
        curved = -(slopes[1 : 1 + len(rest)] - slopes[0])
        told = z @ slopes[0] - 0.5 * np.sum((z @ curved) * z, axis=1)
        rounding = _ROUNDING * float(np.abs(logs[0]))  # many rows have a large density, and may hide nothing behind it
        if not np.allclose(told, logs[1 + len(rest) :] - logs[0], rtol=_EQUAL, atol=_EQUAL + rounding):
            return False
    return True


def integrated(client: ClientView, points: Array, center: Array, which: Places) -> tuple[Array, Array]:
    """log f_k at points (S, m), NaN where there is no mode, and what is not known of how it varies."""
    q, m = len(which), points.shape[1]
    rule = by_trapezoids() if q == 1 else by_grid(q, _NODES)
    rest = np.setdiff1d(np.arange(client.local_size), which)
    values, shares = np.full(len(points), np.nan), np.zeros(len(points))
    chunk = max(1, _AT_ONCE // (len(rule.nodes) * (1 + len(rest)) * (m + client.local_size)))
    for first in range(0, len(points), chunk):
        some = points[first : first + chunk]
        found, modes, factors = _marginal.modes(client, some, center, factors=True)
        told = np.flatnonzero(np.isfinite(found))
        terms = _terms(client, some[told], modes[told], factors[told], which, rest, rule)
        total = logsumexp(terms, axis=1)
        values[first + told] = np.where(np.isfinite(total), total, np.nan)
        with np.errstate(invalid="ignore"):
            shares[first + told] = np.exp(terms[:, rule.group == 1] - total[:, None]).sum(axis=1)
    known = np.isfinite(values)
    if q == 1:  # the rule of every second node is wrong by about the root of what the whole one is wrong by
        half = np.log(2.0 * np.clip(shares, 1e-12, 1.0))
        shares = np.sign(half) * half**2
    middle = np.median(shares[known]) if np.any(known) else 0.0
    return values, np.where(known, shares - middle, 0.0)


def _terms(
    client: ClientView, phi: Array, modes: Array, factors: Array, which: Places, rest: Places, rule: Rule
) -> Array:
    """Logarithms of what the nodes of c add to the integral, (S, L)."""
    (count, m), nodes, r = phi.shape, len(rule.nodes), len(rest)
    A = factors @ np.swapaxes(factors, 1, 2)
    A_rr, A_rc = A[:, rest[:, None], rest], A[:, rest[:, None], which]
    follow = np.linalg.solve(A_rr, A_rc)  # (S, r, q): how the mode of the rest moves with c
    root = np.linalg.cholesky(A[:, which[:, None], which] - np.swapaxes(A_rc, 1, 2) @ follow)
    step = np.linalg.solve(np.swapaxes(root, 1, 2), rule.nodes.T).swapaxes(1, 2)  # (S, L, q)
    x = np.empty((count, nodes, 1 + r, m + modes.shape[1]))
    x[..., :m], x[..., m:] = phi[:, None, None], modes[:, None, None]
    x[..., m + which] += step[:, :, None]
    x[..., m + rest] -= np.einsum("srq,slq->slr", follow, step)[:, :, None]
    widths = 1.0 / np.sqrt(np.diagonal(A_rr, axis1=1, axis2=2))  # the gradient is linear in the rest: any step is exact
    for i, place in enumerate(m + rest):
        x[:, :, 1 + i, place] += widths[:, None, i]
    outputs = site_outputs(client.kernel, x.reshape(-1, x.shape[-1]), client.packed).reshape(count, nodes, 1 + r, -1)
    slopes = outputs[..., 1 + m + rest]
    slope = slopes[:, :, 0]
    curved = -(slopes[:, :, 1:] - slope[:, :, None]) / widths[:, None, :, None]
    curved = 0.5 * (curved + np.swapaxes(curved, 2, 3))
    sign, log_determinant = np.linalg.slogdet(curved)
    good = (sign > 0) & np.isfinite(log_determinant) & np.isfinite(outputs[:, :, 0, 0]) & np.isfinite(slope).all(2)
    curved[~good] = np.eye(r)
    gain = 0.5 * np.sum(slope * np.linalg.solve(curved, slope[..., None])[..., 0], axis=2)
    log_root = np.log(np.diagonal(root, axis1=1, axis2=2)).sum(axis=1)
    constant = 0.5 * modes.shape[1] * np.log(2.0 * np.pi) - log_root[:, None]
    weight = 0.5 * np.sum(rule.nodes**2, axis=1) + rule.log_weights
    terms = outputs[:, :, 0, 0] + gain - 0.5 * log_determinant + constant + weight
    return np.asarray(np.where(good, terms, -np.inf))


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
        laplace, _, _ = _marginal.modes(client, points, mean, factors=False)
        found = integrated(client, points, mean, which)[0] - laplace
        return (found, 1.0) if np.all(np.isfinite(found)) else None

    return _inner.left_out(difference, mean, root, stream_of(client.client_id))
