r"""log f_k of many clients of one template at once, in threads, with θ integrated by the rule that some ask for.

.. math:: \sum_k \log f_k(\varphi_s), \qquad \log f_k(\varphi) = \log \int p(y_k, \theta \mid \varphi)\, d\theta

Errors of clients' integrals are alike and add up as K, against sds that shrink as 1/√K: with many clients Laplace's
approximation, whose error no single client shows, moves a scale by several sds. So a rule is chosen by what all
clients' errors would come to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientView
from fedppl.contracts.many import Answers, ManyClients
from fedppl.gaussian import Gaussian
from fedppl.local import _gaussian_rest
from fedppl.local._no_mode import no_mode
from fedppl.local._other_modes import require_one_mode
from fedppl.numerics.importance import whitened_points
from fedppl.numerics.integral import by_grid
from fedppl.numerics.stacked import densities_of_many, factors_of_many, moments_of_many
from fedppl.types import Array, LocalFailure

_AT_ONCE = 1024  # clients of a part: whoever computes it, sums are over the same ones in the same order
_LOOKED_AT = 24  # clients whose θ is searched for other modes
BIASED = 0.02  # posterior sds that errors of clients' integrals may move a mean or a log sd by
_FEWER = (5,)  # where each has to be paid for with a curvature of all others
_GRIDS = {1: (9, 15, 25, 41), 2: (9, 13, 19), 3: (7, 9, 13)}  # nodes of each coordinate, by the number of coordinates

Places = NDArray[np.int64]


class Nodes(NamedTuple):
    """How θ is integrated: by nodes about its mode, or where there are none by Laplace's approximation."""

    nodes: Array  # (L, q)
    log_weights: Array  # (L,)
    which: Places  # (q,) coordinates that they are of; the others are Gaussian given these


class Way(NamedTuple):
    """How θ is integrated, and what is left of it, in sds of a posterior over all clients."""

    nodes: Nodes
    error: float


def ways(clients: Sequence[ClientView]) -> tuple[Nodes, ...]:
    """Ways to integrate θ at clients like these, each better than the one before; none where there is no such way."""
    d = clients[0].local_size
    if not d or all(client.view(_gaussian_rest.is_exact) for client in clients):
        return (Nodes(np.zeros((0, d)), np.zeros(0), np.arange(d)),)
    found = [client.view(_gaussian_rest.find) for client in clients] if d > 1 else []
    of_rest = [one for one in found if one is not None]
    which = np.arange(d)
    if found and len(of_rest) == len(found) and all(np.array_equal(one, of_rest[0]) for one in of_rest):
        which = np.asarray(of_rest[0], dtype=np.int64)
    counts = _GRIDS.get(len(which), ())
    rules = (by_grid(len(which), count) for count in ((*_FEWER, *counts) if len(which) < d else counts))
    return tuple(Nodes(rule.nodes, rule.log_weights, which) for rule in rules)


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


def of_failed(many: ManyClients, failed: Places, at: Array) -> str:
    """Whose log densities could not be had, and why the first one's could not."""
    names = ", ".join(repr(many.client_ids[k]) for k in failed[:5])
    more = f" and {len(failed) - 5} others" if len(failed) > 5 else ""
    return f"clients {names}{more} have no answer: {no_mode(many.some(failed[:1])[0], at)}"


def chosen(many: ManyClients, sample: Places, q: Gaussian, asked: int, workers: int) -> Way:
    """The cheapest way to integrate θ whose errors, over all clients, move nothing; by those of a sample.

    q is that of as many clients as were `asked`.

    Raises
    ------
    LocalFailure
        Where some of the sample have no mode there, or several.
    """
    mean, root = gaussian.affine(q)
    z = whitened_points(len(mean), 4 * (len(mean) + 1), 0)
    points = mean + z @ root.T
    for client in many.some(sample[:_LOOKED_AT]) if many.starts.shape[1] else ():
        require_one_mode(client, points, mean)
    found = ways(many.some(sample[:_LOOKED_AT]))
    if not found:
        raise LocalFailure("several local variables depend on each other, and each client is to be integrated alone")
    if len(found) == 1:
        return Way(found[0], 0.0)
    values = []
    for nodes in found:
        answers = factors(many, sample, points, mean, np.eye(len(points)), nodes=nodes, workers=workers)
        if len(answers.failed):
            raise LocalFailure(of_failed(many, answers.failed, mean))
        values.append(answers.fitted)
        if len(values) < 2:
            continue
        # What the better one adds, along each axis of q and to its curvature there, in sds of all clients' posterior.
        differ = (values[-1] - values[-2]).mean(axis=0)
        shift = float(np.max(np.abs(differ @ z))) / len(z) * np.sqrt(len(many) * asked)
        if shift <= BIASED:
            return Way(found[len(values) - 2], shift)
    return Way(found[-1], shift)


def moments(
    many: ManyClients, tell: Callable[..., Any], entries: int, points: Array, center: Array, workers: int
) -> tuple[Array, Array]:
    """Means and sds (K, r) of what `tell` makes of (φ, θ), over points (S, m) of φ; NaN where θ has no mode."""
    means, sds = np.zeros((len(many), entries)), np.zeros((len(many), entries))
    common = many.like.kernel, tell, np.ascontiguousarray(points), np.ascontiguousarray(center)
    places, nodes = np.arange(len(many), dtype=np.int64), _about(many.starts.shape[1])

    def part(own: slice) -> None:
        stacked = many.starts, tuple(many.packs), places[own]
        moments_of_many(*common, *stacked, *nodes[:2], means[own], sds[own])

    in_parts(part, len(many), workers)
    return means, sds


def _about(d: int) -> Nodes:
    """Nodes about a mode that tell first and second moments: a grid of few coordinates, of many one on each axis."""
    if d in _GRIDS:
        return Nodes(by_grid(d, _GRIDS[d][0]).nodes, by_grid(d, _GRIDS[d][0]).log_weights, np.arange(d))
    axes = np.sqrt(d) * np.concatenate([np.eye(d), -np.eye(d)])
    return Nodes(axes if d else np.zeros((1, 0)), np.full(max(2 * d, 1), -np.log(max(2 * d, 1))), np.arange(d))


def without_density(many: ManyClients, phi: Array, workers: int) -> Places:
    """Places of clients whose log density or gradient is not finite where searches begin."""
    places = np.arange(len(many), dtype=np.int64)
    values, failed = np.zeros(len(many)), np.zeros(len(many), np.uint8)

    def part(own: slice) -> None:
        stacked = many.starts, tuple(many.packs), places[own]
        densities_of_many(many.like.kernel, phi, *stacked, values[own], failed[own])

    in_parts(part, len(many), workers)
    return places[failed > 0]


def in_parts(compute: Callable[[slice], Any], count: int, workers: int) -> list[Any]:
    """What is computed for clients of each part, in the order of the parts, in threads."""
    parts = [slice(first, min(first + _AT_ONCE, count)) for first in range(0, count, _AT_ONCE)]
    if len(parts) <= 1 or workers <= 1:
        return [compute(part) for part in parts]
    compute_first = compute(parts[0])  # compiles, in one thread
    with ThreadPoolExecutor(workers) as pool:
        return [compute_first, *pool.map(compute, parts[1:])]


def cores() -> int:
    """Threads by default: one a core."""
    return os.cpu_count() or 1
