r"""log f_k of many clients of one template at once, in threads, with θ integrated by the rule that some ask for.

.. math:: \sum_k \log f_k(\varphi_s), \qquad \log f_k(\varphi) = \log \int p(y_k, \theta \mid \varphi)\, d\theta

Errors of clients' integrals are alike and add up as K, against sds that shrink as 1/√K: with many clients Laplace's
approximation, whose error no single client shows, moves a scale by several sds. So a rule is chosen by what all
clients' errors would come to.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientView
from fedppl.contracts.many import Answers, ManyClients
from fedppl.data.grouped import MANY
from fedppl.gaussian import Gaussian
from fedppl.local import _gaussian_rest
from fedppl.local._no_mode import no_mode
from fedppl.local._other_modes import require_one_mode
from fedppl.numerics.importance import enough_points, quadratic_terms, whitened_points
from fedppl.numerics.integral import by_far_grid, by_grid, by_trapezoids
from fedppl.numerics.smooth import smooth_over
from fedppl.numerics.stacked import densities_of_many, factors_of_many
from fedppl.numerics.stacked_moments import moments_of_many
from fedppl.types import Array, LocalFailure

_AT_ONCE = 64  # clients of a part: whoever computes it, sums are over the same ones in the same order
_LOOKED_AT = 24  # clients whose kind is looked at, and whose θ is searched for other modes, where clients are many
_END = np.sqrt(3.0)  # sds from the mean
_SAMPLES = {1: 1024, 2: 128, 3: 32}  # clients by whom ways are held against the last, by its coordinates
_FIRST_SAMPLE = 128  # of those by whom ways are held against the last, where they tell enough
_SOME, _FORETOLD = (128, 512), 0.01  # points that foretell others; median error of a sum, in log units
BIASED = 0.02  # posterior sds that errors of clients' integrals may move a mean or a log sd by
_FEW = 9  # nodes that may do for a client's own moments, where they tell the same as many
_FEWER = (5,)  # where each has to be paid for with a curvature of all others
_GRIDS = {1: (9, 15, 25, 41), 2: (9, 13, 19), 3: (7, 9, 13)}  # nodes of each coordinate, by the number of coordinates

Places = NDArray[np.int64]


class Nodes(NamedTuple):
    """How θ is integrated: by nodes about its mode, or where there are none by Laplace's approximation."""

    nodes: Array  # (L, q)
    log_weights: Array  # (L,)
    which: Places  # (q,) coordinates that they are of; the others are Gaussian given these


class Way(NamedTuple):
    """How θ is integrated, and what is left of it over all clients."""

    nodes: Nodes
    error: float  # most that a mean or a log sd is moved by, in posterior sds
    constant: float  # of each client's log f_k, which adds up in the evidence


def ways(clients: Sequence[ClientView]) -> tuple[Nodes, ...]:
    """Ways to integrate θ at clients like these, each better than the one before; none where there is no such way.

    The last reaches far out into tails: others are held against it.
    """
    d = clients[0].local_size
    laplace = Nodes(np.zeros((0, d)), np.zeros(0), np.arange(d))
    if not d:
        return (laplace,)
    found = [client.view(_gaussian_rest.find) for client in clients] if d > 1 else []
    of_rest = [one for one in found if one is not None]
    which = np.arange(d)
    if found and len(of_rest) == len(found) and all(np.array_equal(one, of_rest[0]) for one in of_rest):
        which = np.asarray(of_rest[0], dtype=np.int64)
    q = len(which)
    if q not in _GRIDS:
        return (laplace,) if _are_exact(clients) else ()
    counts = (*_FEWER, *_GRIDS[q]) if q < d else _GRIDS[q]
    far = (by_trapezoids(4), by_trapezoids(6)) if q == 1 else (by_far_grid(q),)
    rules = (*(by_grid(q, count) for count in counts), *far)
    return (laplace, *(Nodes(rule.nodes, rule.log_weights, which) for rule in rules))


def ways_for(many: ManyClients, some: Sequence[ClientView]) -> tuple[Nodes, ...]:
    """The same for all, by some of them. Where these are not all, others may need nodes though these do not."""
    found = ways(some)
    return found[:1] if len(some) == len(many) and _are_exact(some) else found


def _are_exact(clients: Sequence[ClientView]) -> bool:
    return all(client.view(_gaussian_rest.is_exact) for client in clients)


def factors(
    many: ManyClients, places: Places, points: Array, center: Array, project: Array, *, nodes: Nodes, workers: int
) -> Answers:
    """log f_k of clients at these places at points (S, m), by way of a center (m,): sums, and a map (q, S) of each."""
    points, project = np.ascontiguousarray(points), np.ascontiguousarray(project)
    fitted, failed = np.zeros((len(places), len(project))), np.zeros(len(places), np.uint8)
    common = many.like.kernel, points, np.ascontiguousarray(center), many.starts, tuple(many.packs)

    def part(own: slice) -> Array:
        totals = np.zeros(len(points))
        factors_of_many(*common, places[own], *nodes, project, totals, fitted[own], failed[own])
        return totals

    totals = np.sum(in_parts(part, len(places), workers), axis=0)
    return Answers(totals, fitted, places[failed > 0])


def totals(many: ManyClients, points: Array, center: Array, *, nodes: Nodes, workers: int) -> tuple[Array, Array]:
    """Σ_k log f_k over all clients at points (S, m), and errors that it has.

    What Laplace's approximation leaves out is known at as few points as foretell it at the others: a quadratic, and a
    spline of what that leaves. At all points where that is not so smooth.
    """
    places, none = np.arange(len(many), dtype=np.int64), np.zeros((0, len(points)))

    def ask(some: Array, by: Nodes) -> Array:
        return factors(many, places, some, center, none[:, : len(some)], nodes=by, workers=workers).totals

    if not len(nodes.nodes):
        return ask(points, nodes), np.zeros(len(points))
    d = many.starts.shape[1]
    laplace = ask(points, Nodes(np.zeros((0, d)), np.zeros(0), np.arange(d)))
    design = quadratic_terms(np.arcsinh((points - center) / np.std(points, axis=0)))
    for count in (one for one in _SOME if 2 * one <= len(points)):
        known = np.unique(np.linspace(0, len(points) - 1, count).astype(int))
        left_out = ask(points[known], nodes) - laplace[known]
        told = np.isfinite(left_out)
        if np.sum(told) < 2 * design.shape[1]:
            continue
        curve = design @ np.linalg.lstsq(design[known[told]], left_out[told], rcond=None)[0]
        found = smooth_over(points, known, left_out - curve[known], np.zeros(len(known)), _FORETOLD)
        if found is not None:
            return laplace + curve + found[0], found[1]
    return ask(points, nodes), np.zeros(len(points))


def of_failed(many: ManyClients, failed: Places, at: Array) -> str:
    """Whose log densities could not be had, and why the first one's could not."""
    names = ", ".join(repr(many.client_ids[k]) for k in failed[:5])
    more = f" and {len(failed) - 5} others" if len(failed) > 5 else ""
    return f"clients {names}{more} have no answer: {no_mode(many.some(failed[:1])[0], at)}"


def looked_at(many: ManyClients, order: Places) -> Sequence[ClientView]:
    """The first clients in `order`, by whom all are judged where each takes long: all, unless they are very many."""
    return many.some(np.sort(order[: _looked_at(many)]))


def _looked_at(many: ManyClients) -> int:
    return len(many) if len(many) < MANY else _LOOKED_AT


def require_one_mode_each(clients: Sequence[ClientView], q: Gaussian) -> None:
    """Refuse clients whose θ has several modes at points of q.

    Raises
    ------
    LocalFailure
        Naming one.
    """
    mean, root = gaussian.affine(q)
    points = mean + whitened_points(len(mean), enough_points(len(mean), 16), 0) @ root.T
    for client in clients:
        if client.local_size:
            require_one_mode(client, points, mean)


def chosen(many: ManyClients, found: Sequence[Nodes], order: Places, q: Gaussian, asked: int, workers: int) -> Way:
    """The cheapest way to integrate θ whose errors, over all clients, move nothing; by those that are first in `order`.

    Out of those that were `found`; q is that of as many clients as were `asked`.

    Raises
    ------
    LocalFailure
        Where some of them have no mode there, or there is no way.
    """
    if not found:
        raise LocalFailure("several local variables depend on each other, and each client is to be integrated alone")
    mean, root = gaussian.affine(q)
    m = len(mean)
    if len(found) == 1:
        return Way(found[0], 0.0, 0.0)
    # What is asked are slopes and curvatures along the axes: two points of each, where a Gauss rule of three has them.
    ends = _END * np.concatenate([np.zeros((1, m)), np.eye(m), -np.eye(m)])
    points, project = mean + ends @ root.T, _along_axes(m)
    most = min(_SAMPLES[len(found[-1].which)], len(order))

    @functools.cache
    def fitted(way: int, size: int) -> Array:
        answers = factors(many, np.sort(order[:size]), points, mean, project, nodes=found[way], workers=workers)
        if len(answers.failed):
            raise LocalFailure(of_failed(many, answers.failed, mean))
        return answers.fitted

    def held(way: int, against: int, size: int) -> Way:
        known = np.sqrt(1.0 - size / len(many)) / np.sqrt(size)  # of a part nothing is left out
        differ = fitted(way, size) - fitted(against, size)
        off = np.abs(differ.mean(axis=0)) + known * differ.std(axis=0)
        # Slopes add up as K, against sds that are those of q times the root of its share of the clients.
        slopes = float(np.max(off[1 : 1 + m])) * np.sqrt(len(many) * asked)
        curved = float(np.max(off[1 + m :])) * asked
        return Way(found[way], max(slopes, curved), float(off[0]))

    last = len(found) - 1
    few = min(_FIRST_SAMPLE, most)
    for way in range(last) if few < most else ():
        # What reaches far is dear, so few clients are asked for it, and all of the sample for the next way alone: that
        # rare clients are hard to integrate shows by that too.
        if (by_few := held(way, last, few)).error <= BIASED:
            by_all = held(way, way + 1, most)
            if by_all.error <= BIASED:
                return Way(found[way], *(max(pair) for pair in zip(by_few[1:], by_all[1:], strict=True)))
            break
    for way in range(last):
        if (by_all := held(way, last, most)).error <= BIASED:
            return by_all
    return by_all._replace(nodes=found[-1])


def _along_axes(m: int) -> Array:
    """What makes a constant, and coefficients of z and z² along each axis, of values at 0, the ends and those below."""
    each, zero = np.eye(m), np.zeros((m, 1))
    slopes = np.concatenate([zero, each, -each], axis=1) / (2.0 * _END)
    curved = np.concatenate([zero - 2.0, each, each], axis=1) / (2.0 * _END**2)
    return np.concatenate([np.eye(1, 1 + 2 * m), slopes, curved])


def moments(
    many: ManyClients,
    tell: Callable[..., Any],
    entries: int,
    points: Array,
    center: Array,
    *,
    nodes: Nodes,
    workers: int,
) -> tuple[Array, Array]:
    """Means and sds (K, r) of what `tell` makes of (φ, θ), over points (S, m) of φ; NaN where θ has no mode."""
    means, sds = np.zeros((len(many), entries)), np.zeros((len(many), entries))
    common = many.like.kernel, tell, np.ascontiguousarray(points), np.ascontiguousarray(center)
    places = np.arange(len(many), dtype=np.int64)
    rule = _for_moments(many.some(range(_looked_at(many))), nodes)
    few = by_grid(1, _FEW) if len(rule.which) == 1 and len(rule.nodes) > _FEW else None
    fewer = (rule.nodes[:0], rule.log_weights[:0]) if few is None else (few.nodes, few.log_weights)

    def part(own: slice) -> None:
        stacked = many.starts, tuple(many.packs), places[own]
        moments_of_many(*common, *stacked, *fewer, *rule, means[own], sds[own])

    in_parts(part, len(many), workers)
    return means, sds


def _for_moments(clients: Sequence[ClientView], nodes: Nodes) -> Nodes:
    """Nodes for moments of θ: Laplace's approximation may move nothing that is shared, and be far off there."""
    d = clients[0].local_size
    if not d or _are_exact(clients):
        return _about(d)
    found = ways(clients)
    if len(found[-1].which) == 1:
        return found[-1]
    return nodes if len(nodes.nodes) else found[-2]


def _about(d: int) -> Nodes:
    """Nodes about the mode of a Gaussian: a grid of few coordinates, of many one on each side of each axis."""
    if d in _GRIDS:
        return Nodes(by_grid(d, _GRIDS[d][0]).nodes, by_grid(d, _GRIDS[d][0]).log_weights, np.arange(d))
    axes = np.sqrt(d) * np.concatenate([np.eye(d), -np.eye(d)])
    return Nodes(axes if d else np.zeros((1, 0)), np.full(max(2 * d, 1), -np.log(max(2 * d, 1))), np.arange(d))


def without_density(many: ManyClients, phi: Array, workers: int) -> Places:
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
