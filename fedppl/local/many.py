"""Moments of the own variables of many clients of one template at once, in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts import ClientView
from fedppl.data.grouped import MANY
from fedppl.local import _gaussian_rest
from fedppl.model.stack import Stack
from fedppl.numerics.integral import by_grid, by_trapezoids
from fedppl.numerics.stacked import densities_of_many
from fedppl.numerics.stacked_moments import moments_of_many
from fedppl.types import Array

_AT_ONCE = 64  # clients of a part
_LOOKED_AT = 24  # clients whose kind is looked at, where clients are many
_FEW = 9  # nodes that may do for a client's own moments, where they tell the same as many
_GRIDS = {2: 19, 3: 13}  # nodes of each coordinate, by the number of coordinates
_OF_GAUSSIAN = {1: 9, 2: 9, 3: 7}  # the same where θ is Gaussian given φ

Places = NDArray[np.int64]


class Nodes(NamedTuple):
    """How θ is integrated: by nodes about its mode, or where there are none by Laplace's approximation."""

    nodes: Array  # (L, q)
    log_weights: Array  # (L,)
    which: Places  # (q,) coordinates that they are of; the others are Gaussian given these


def nodes_for(clients: Sequence[ClientView]) -> Nodes | None:
    """How θ is integrated for moments at clients like these; None where there is no such way.

    Of one coordinate by nodes that reach far out into tails.
    """
    d = clients[0].local_size
    if not d or _are_exact(clients):
        return _about(d)
    found = [client.view(_gaussian_rest.find) for client in clients] if d > 1 else []
    of_rest = [one for one in found if one is not None]
    which = np.arange(d)
    if found and len(of_rest) == len(found) and all(np.array_equal(one, of_rest[0]) for one in of_rest):
        which = np.asarray(of_rest[0], dtype=np.int64)
    q = len(which)
    if q != 1 and q not in _GRIDS:
        return None
    rule = by_trapezoids(6) if q == 1 else by_grid(q, _GRIDS[q])
    return Nodes(rule.nodes, rule.log_weights, which)


def _are_exact(clients: Sequence[ClientView]) -> bool:
    return all(client.view(_gaussian_rest.is_exact) for client in clients)


def moments(
    many: Stack, tell: Callable[..., Any], entries: int, points: Array, center: Array, *, workers: int
) -> tuple[Array, Array]:
    """Means and sds (K, r) of what `tell` makes of (φ, θ), over points (S, m) of φ; NaN where θ has no mode."""
    means, sds = np.zeros((len(many), entries)), np.zeros((len(many), entries))
    common = many.like.kernel, tell, np.ascontiguousarray(points), np.ascontiguousarray(center)
    places = np.arange(len(many), dtype=np.int64)
    rule = nodes_for(many.some(range(len(many) if len(many) < MANY else _LOOKED_AT))) or _about(many.starts.shape[1])
    few = by_grid(1, _FEW) if len(rule.which) == 1 and len(rule.nodes) > _FEW else None
    fewer = (rule.nodes[:0], rule.log_weights[:0]) if few is None else (few.nodes, few.log_weights)

    def part(own: slice) -> None:
        stacked = many.starts, tuple(many.packs), places[own]
        moments_of_many(*common, *stacked, *fewer, *rule, means[own], sds[own])

    in_parts(part, len(many), workers)
    return means, sds


def _about(d: int) -> Nodes:
    """Nodes about the mode of a Gaussian: a grid of few coordinates, of many one on each side of each axis."""
    if d in _OF_GAUSSIAN:
        rule = by_grid(d, _OF_GAUSSIAN[d])
        return Nodes(rule.nodes, rule.log_weights, np.arange(d))
    axes = np.sqrt(d) * np.concatenate([np.eye(d), -np.eye(d)])
    return Nodes(axes if d else np.zeros((1, 0)), np.full(max(2 * d, 1), -np.log(max(2 * d, 1))), np.arange(d))


def without_density(many: Stack, phi: Array, workers: int) -> Places:
    """Places of clients whose log density or gradient is not finite where searches begin."""
    places = np.arange(len(many), dtype=np.int64)
    failed = np.zeros(len(many), np.uint8)

    def part(own: slice) -> None:
        densities_of_many(many.like.kernel, phi, many.starts, tuple(many.packs), places[own], failed[own])

    in_parts(part, len(many), workers)
    return places[failed > 0]


def in_parts(compute: Callable[[slice], Any], count: int, workers: int) -> list[Any]:
    """What is computed for clients of each part, in the order of the parts, in threads."""
    parts = [slice(first, min(first + _AT_ONCE, count)) for first in range(0, count, _AT_ONCE)]
    if len(parts) <= 1 or workers <= 1:
        return [compute(part) for part in parts]
    compute(slice(0, 0))  # compiles, in one thread
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(compute, parts))


def cores() -> int:
    """Threads by default: one a core."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
