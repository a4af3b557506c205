"""Coordinates c of θ given which the rest of θ is Gaussian, as coefficients are given a noise sd."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientView
from fedppl.local import _marginal
from fedppl.numerics.pairs import site_outputs
from fedppl.types import Array, LocalFailure

MOST = 2  # coordinates that may be integrated by quadrature
_MOST_LOCAL = 50  # coordinates of θ, so that finding c costs little
_STEP, _CHANGED = 1e-2, 1e-6  # sds; change of a curvature, in its own units, that is none of rounding
_FAR = (0.5, 1.0, 3.0, 10.0, 30.0, 100.0)  # sds
_ALONG = np.arange(1.0, 16.0)  # sds along a coordinate
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
        _, modes, factors = _marginal.modes(client, points, center)
    except LocalFailure:
        return None
    if not np.all(np.isfinite(factors)) or not np.all(np.diagonal(factors, axis1=1, axis2=2) > 0):
        return None
    return _Probes(points, modes, 1.0 / np.sqrt(np.sum(factors**2, axis=2)))


def is_exact(client: ClientView) -> bool:
    """Whether θ is Gaussian given φ, as far as points of the prior tell, near and far: from model and data alone."""
    probes = client.view(_probes)
    return probes is not None and _is_gaussian(client, probes, np.zeros(0, dtype=np.intp))


def find(client: ClientView) -> Places | None:
    """Coordinates c of θ, as few as will do, given which the others are Gaussian; None where these are too many."""
    d, probes = client.local_size, client.view(_probes)
    if probes is None or not 1 < d <= _MOST_LOCAL:
        return None
    curved = _curvatures(client, probes) * (probes.sds[:, None, :, None] * probes.sds[:, None, None, :])
    if not np.all(np.isfinite(curved)):
        return None
    largest = np.abs(curved).max(axis=(1, 2, 3))[:, None, None, None]
    turns = np.any(np.abs(curved[:, 1:] - curved[:, :1]) > _CHANGED * largest, axis=0)
    chosen = _cover(turns, ())
    if not chosen:
        return None
    which = np.array(sorted(chosen), dtype=np.intp)
    return which if _is_gaussian(client, probes, which) else None


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


def _curvatures(client: ClientView, probes: _Probes) -> Array:
    """−∂²ℓ/∂θ² by central differences, (P, 1 + d, d, d): at each mode, and an sd from it along each coordinate."""
    found = []
    for phi, mode, sd in zip(*probes, strict=True):  # one after the other: of many coordinates points take memory
        d, along = len(mode), np.diag(sd)
        around = mode + np.concatenate([np.zeros((1, d)), along])
        ends = around[:, None] + _STEP * np.concatenate([along, -along])  # (1 + d, 2d, d)
        slopes = _outputs(client, phi[None], ends[None])[0, ..., 1 + len(phi) :]
        found.append(-(slopes[:, :d] - slopes[:, d:]) / (2.0 * _STEP * sd[:, None]))
    stacked = np.stack(found)
    return np.asarray(0.5 * (stacked + np.swapaxes(stacked, -1, -2)))


def _outputs(client: ClientView, phi: Array, theta: Array) -> Array:
    """The log density and its gradient (P, ..., 1 + m + d) at points φ (P, m) with θ (P, ..., d) for each."""
    shape = theta.shape[:-1]
    beside = np.broadcast_to(phi.reshape(len(phi), *(1,) * (theta.ndim - 2), -1), (*shape, phi.shape[1]))
    x = np.concatenate([beside, theta], axis=-1)
    found = site_outputs(client.kernel, x.reshape(-1, x.shape[-1]), client.packed)
    return np.asarray(found.reshape(*shape, found.shape[1]))  # which may be of no points


def _is_gaussian(client: ClientView, probes: _Probes, which: Places) -> bool:
    """Whether the density itself is a Gaussian's in the rest of θ, near and far, wherever c is.

    In random directions at all probes, and at the first one along each coordinate at every sd: a second hump of a
    prior's own stands between a few points.
    """
    if not _is_along(client, probes, which):
        return False
    m, rest = probes.phi.shape[1], np.setdiff1d(np.arange(client.local_size), which)
    r, rng = len(rest), np.random.default_rng(0)
    places = np.array((0.5, -1.0, 2.0) if len(which) else (0.0,))  # of c, in sds
    z = rng.normal(size=(len(places), len(_FAR), r)) * np.array(_FAR)[:, None]
    z = np.concatenate([z, -z], axis=1)
    near = np.broadcast_to(np.concatenate([np.zeros((1, r)), np.eye(r)]), (len(places), 1 + r, r))
    moved = np.concatenate([near, z], axis=1)  # (F, 1 + r + N, r)
    theta = np.repeat(np.repeat(probes.modes[:, None, None], len(places), axis=1), moved.shape[1], axis=2)
    theta[..., which] += places[:, None, None] * probes.sds[:, None, None, which]
    theta[..., rest] += moved * probes.sds[:, None, None, rest]
    found = _outputs(client, probes.phi, theta)
    logs, slopes = found[..., 0], found[..., 1 + m + rest] * probes.sds[:, None, None, rest]
    curved = -(slopes[:, :, 1 : 1 + r] - slopes[:, :, :1])
    told = np.einsum("fnr,pfr->pfn", z, slopes[:, :, 0]) - 0.5 * np.einsum("fnr,pfrs,fns->pfn", z, curved, z)
    differ = logs[..., 1 + r :] - logs[..., :1]
    return _agree(told, differ, logs[..., :1])


def _is_along(client: ClientView, probes: _Probes, which: Places) -> bool:
    """The same along each coordinate of the rest, at one probe and where c is there."""
    m, rest = probes.phi.shape[1], np.setdiff1d(np.arange(client.local_size), which)
    phi, mode, sd = (part[:1] for part in probes)
    steps = np.concatenate([[0.0, 1.0], _ALONG, -_ALONG])
    theta = np.repeat(np.repeat(mode[:, None, None], len(rest), axis=1), len(steps), axis=2)
    for place, i in enumerate(rest):
        theta[:, place, :, i] += steps * sd[:, i]
    found = _outputs(client, phi, theta)[0]
    logs = found[..., 0]
    slopes = found[np.arange(len(rest))[:, None], np.arange(2), 1 + m + rest[:, None]] * sd[0, rest, None]  # (r, 2)
    told = slopes[:, :1] * steps + 0.5 * (slopes[:, 1:] - slopes[:, :1]) * steps**2
    differ = logs - logs[:, :1]
    return _agree(told, differ, logs[:, :1])


def _agree(told: Array, differ: Array, logs: Array) -> bool:
    """Whether differences of the density are as told; many rows have a large one, whose rounding hides nothing."""
    allowed = _EQUAL + _ROUNDING * np.abs(logs) + _EQUAL * np.abs(differ)
    return bool(np.all(np.isfinite(differ)) and np.all(np.abs(told - differ) <= allowed))
