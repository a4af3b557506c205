"""Coordinates c of θ given which the rest of θ is Gaussian, as coefficients are given a noise sd."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientView
from fedppl.local import _marginal
from fedppl.numerics.marginal import site_outputs
from fedppl.types import Array, LocalFailure

MOST = 2  # coordinates that may be integrated by quadrature
_MOST_LOCAL = 50  # coordinates of θ, so that finding c costs little
_STEP, _CHANGED = 1e-2, 1e-6  # sds; change of a curvature, in its own units, that is none of rounding
_FAR = (0.5, 1.0, 3.0, 10.0, 30.0, 100.0)  # sds
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
        z = rng.normal(size=(len(_FAR), len(rest))) * np.array(_FAR)[:, None]
        z = np.concatenate([z, -z])
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
