"""Draws of many densities of one variable each, by distribution functions that come from slopes at nodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedppl.types import Array, Rng

_PARTS = 4  # of the space between nodes
_ROUGH = 0.5  # log units that two rules may differ by between nodes
_LEAST = -700.0  # log density, below the middle's, that counts as none

Places = NDArray[np.intp]


def draw_by_slopes(nodes: Array, slopes: Array, extra: Array, rng: Rng) -> Array:
    """Draw u with log density L(u) + extra(u), given equally spaced nodes (n,) and dL/du there (n, ...): (...).

    What has no slope, or lies beyond where there is none, has no density. The middle node has one.
    """
    step, middle = nodes[1] - nodes[0], len(nodes) // 2
    logs = np.zeros_like(slopes)
    with np.errstate(invalid="ignore", over="ignore"):
        grown = _between(slopes, step)
        logs[middle + 1 :] = np.cumsum(grown[middle:], axis=0)
        logs[:middle] = -np.cumsum(grown[:middle][::-1], axis=0)[::-1]
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    logs = np.maximum(logs - logs.max(axis=0), _LEAST)
    places = np.linspace(nodes[0], nodes[-1], _PARTS * (len(nodes) - 1) + 1)
    below = _below(_interpolated(logs, slopes * step) + _column(np.interp(places, nodes, extra), logs.ndim))
    return _drawn(places, below, rng.uniform(size=below.shape[1:]))


def draw_by_values(nodes: Array, logs: Array, which: Places, rng: Rng) -> Array:
    """Draw u of each of the densities `which` (N,), whose logarithms at equally spaced nodes (n,) are logs (n, U).

    Each of these has a largest value; −inf says that there is no density.
    """
    logs = np.maximum(logs - logs.max(axis=0), _LEAST)
    rises = np.gradient(logs, axis=0)
    rises[2:-2] = (8.0 * (logs[3:-1] - logs[1:-3]) - (logs[4:] - logs[:-4])) / 12.0
    places = np.linspace(nodes[0], nodes[-1], _PARTS * (len(nodes) - 1) + 1)
    below = _below(_interpolated(logs, rises))
    return _drawn(places, below[:, which], rng.uniform(size=len(which)))


def _below(logs: Array) -> Array:
    """What of each density (G, ...) lies below each place."""
    density, below = np.exp(logs), np.zeros_like(logs)
    np.cumsum(0.5 * (density[1:] + density[:-1]), axis=0, out=below[1:])
    return below


def _drawn(places: Array, below: Array, uniform: Array) -> Array:
    wanted = uniform * below[-1]
    at = np.clip((below <= wanted).sum(axis=0) - 1, 0, len(places) - 2)[None]
    low, high = np.take_along_axis(below, at, axis=0)[0], np.take_along_axis(below, at + 1, axis=0)[0]
    share = (wanted - low) / np.maximum(high - low, 1e-300)
    return np.asarray(places[at[0]] + share * (places[1] - places[0]))


def _between(slopes: Array, step: float) -> Array:
    """Integrals between nodes, by the cubic through four of them; by two alone where that is far from it."""
    plain = 0.5 * step * (slopes[1:] + slopes[:-1])
    found = plain.copy()
    inner = step / 24.0 * (13.0 * (slopes[1:-2] + slopes[2:-1]) - slopes[:-3] - slopes[3:])
    found[1:-1] = np.where(np.abs(inner - plain[1:-1]) < _ROUGH, inner, plain[1:-1])
    return found


def _interpolated(logs: Array, rises: Array) -> Array:
    """Log densities at nodes and between them by cubics with their slopes, no steeper than goes with a monotone one."""
    change = np.diff(logs, axis=0)
    steepest = 3.0 * np.abs(change) + _ROUGH
    start, end = (np.clip(np.nan_to_num(one), -steepest, steepest) for one in (rises[:-1], rises[1:]))
    found = np.empty((_PARTS * len(change) + 1, *logs.shape[1:]))
    for part in range(_PARTS):
        s = part / _PARTS
        cubic = s * (1 - s) ** 2 * start + s**2 * (s - 1) * end
        found[part:-1:_PARTS] = logs[:-1] + s**2 * (3 - 2 * s) * change + cubic
    found[-1] = logs[-1]
    return found


def _column(values: Array, ndim: int) -> Array:
    return values.reshape(-1, *(1,) * (ndim - 1))
