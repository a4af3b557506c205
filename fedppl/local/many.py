r"""Means and sds of the own variables of many clients of one template.

.. math:: E[t(\varphi, \theta)] = E_q\Big[\int t(\varphi, \theta)\, p(\theta \mid y_k, \varphi)\, d\theta\Big]

The inner integral is by nodes about θ's mode: by few where these agree with many, which is checked for each client,
since a rule for most of them has a large error where one has a tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import ClientView
from fedppl.data.tables import MANY
from fedppl.local import _conditional
from fedppl.local import tolerances as tol
from fedppl.local._conditional import about_modes, at_nodes
from fedppl.local.integrate import in_parts
from fedppl.model.stack import ClientsOf
from fedppl.numerics import pairs
from fedppl.numerics.integral import Rule, by_grid, by_trapezoids, chunks
from fedppl.numerics.pairs import Densities, Flags, Origins, Places
from fedppl.types import Array


class Nodes(NamedTuple):
    """Nodes of some coordinates of θ, given which the others are Gaussian."""

    rule: Rule
    which: Places  # (q,)


class _Functions(NamedTuple):
    """Functions of (φ, θ) whose moments are wanted."""

    of: Densities
    kernel: Callable[..., Any]
    middle: Array  # (C, r) values near the means, so that squares lose no digits


def nodes_for(clients: Sequence[ClientView]) -> Nodes | None:
    """Nodes for moments at clients like these, far out into tails for one coordinate; None where there are none."""
    d = clients[0].local_size
    if not d or all(client.view(_conditional.is_gaussian) for client in clients):
        return _about(d)
    each = [client.view(_conditional.conditioning) for client in clients] if d > 1 else []
    known = [places for places in each if places is not None]
    which = np.arange(d)
    if each and len(known) == len(each) and all(np.array_equal(places, known[0]) for places in known):
        which = np.asarray(known[0], dtype=np.int64)
    q = len(which)
    if q != 1 and q not in tol.MANY_NODES:
        return None
    return Nodes(by_trapezoids(tol.REACHES[-1]) if q == 1 else by_grid(q, tol.MANY_NODES[q]), which)


def _about(d: int) -> Nodes:
    """Nodes of a Gaussian: a grid for few coordinates, for many one on each side of each axis."""
    if d in tol.GAUSSIAN_NODES:
        return Nodes(by_grid(d, tol.GAUSSIAN_NODES[d]), np.arange(d))
    axes = np.sqrt(d) * np.concatenate([np.eye(d), -np.eye(d)]) if d else np.zeros((1, 0))
    return Nodes(Rule(axes, np.full(len(axes), -np.log(len(axes))), np.zeros(len(axes))), np.arange(d))


def moments(
    many: ClientsOf, tell: Callable[..., Any], entries: int, points: Array, center: Array, *, workers: int
) -> tuple[Array, Array]:
    """Means and sds (K, r) of the functions `tell` of (φ, θ), over points (S, m) of φ; NaN where θ has no mode.

    By way of each client's mode at the center.
    """
    d = many.starts.shape[1]
    deciding = len(many) if len(many) < MANY else tol.CHECKED_FOR_NODES
    nodes = nodes_for([many.model(k) for k in range(deciding)]) or _about(d)
    each = (2 * (points.shape[1] + d) + entries) * (1 + d - len(nodes.which)) * len(nodes.rule.nodes)
    size = int(np.clip(tol.NUMBERS_IN_A_THREAD // each, 1, tol.CLIENTS_AT_ONCE))
    of = Densities(many.like.kernel, many.packs, len(center))

    def part(own: slice) -> tuple[Array, Array]:
        """The same of some clients."""
        places = np.arange(own.start, own.stop, dtype=np.int64)
        at = pairs.origins(of, center, many.starts[places], places)
        middle = pairs.entries_at(tell, many.packs, pairs.joined(center, at.modes.theta), places, entries)
        functions = _Functions(of, tell, middle)
        one, two = np.full((2, len(places), entries), np.nan)
        usable = at.modes.arrived if d else np.ones(len(places), dtype=bool)
        few = _few_agree(functions, at, nodes, center, places) & usable
        for rows, own_nodes in ((np.flatnonzero(few), _few(nodes)), (np.flatnonzero(usable & ~few), nodes)):
            if not len(rows):
                continue
            one[rows], two[rows] = 0.0, 0.0
            for some in (points[chunk] for chunk in chunks(len(points), tol.NUMBERS_IN_A_THREAD // (each * size))):
                phi, row = np.tile(some, (len(rows), 1)), np.repeat(rows, len(some))
                for total, values in zip((one, two), _given(functions, at, own_nodes, phi, row, places), strict=True):
                    total[rows] += values.reshape(len(rows), len(some), entries).sum(axis=1) / len(points)
        return functions.middle + one, np.sqrt(np.maximum(two - one**2, 0.0))

    means, sds = (np.concatenate(one) for one in zip(*in_parts(part, len(many), size, workers), strict=True))
    return means, sds


def _few(nodes: Nodes) -> Nodes:
    return nodes._replace(rule=by_grid(1, tol.FEW_NODES))


def _few_agree(functions: _Functions, at: Origins, nodes: Nodes, center: Array, places: Places) -> Flags:
    """Clients at which few nodes have the means and variances of all nodes at the center, up to tolerances."""
    if len(nodes.which) != 1 or len(nodes.rule.nodes) <= tol.FEW_NODES:
        return np.zeros(len(places), dtype=bool)
    rows, phi = np.arange(len(places)), np.broadcast_to(center, (len(places), len(center)))
    one, two = _given(functions, at, nodes, phi, rows, places)
    other, other_two = _given(functions, at, _few(nodes), phi, rows, places)
    variance = two - one**2
    near = np.abs(other - one) <= tol.MEAN_TOLERANCE * np.sqrt(np.maximum(variance, 0.0))  # false for NaN
    near &= np.abs(other_two - other**2 - variance) <= tol.VARIANCE_TOLERANCE * variance
    return np.asarray(near.all(axis=1))


def _given(
    functions: _Functions, at: Origins, nodes: Nodes, phi: Array, row: Places, places: Places
) -> tuple[Array, Array]:
    """Means of functions less their middle, and of squares, at pairs of φ (N, m) and rows of clients; NaN of none.

    The rest of θ, which is Gaussian given `which`, is at two points of each axis.
    """
    of, m, d = functions.of, phi.shape[1], at.modes.theta.shape[1]
    rest, entries = np.setdiff1d(np.arange(d), nodes.which), functions.middle.shape[1]
    one, two = np.full((2, len(phi), entries), np.nan)
    laplace = pairs.laplace(of, at, row, places[row], phi)
    known = np.flatnonzero(np.isfinite(laplace.values))
    about = about_modes(phi[known], laplace.theta[known], laplace.root[known], nodes.which, rest)
    given = at_nodes(of, places[row[known]], about, nodes.which, rest, nodes.rule)
    finite = np.isfinite(given.terms.max(axis=1))
    known, terms = known[finite], given.terms[finite]
    weights = np.exp(terms - terms.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    pair, node = np.nonzero(weights > tol.NEGLIGIBLE_NODE)
    theta = _around(given.theta[finite][pair, node], given.precision[finite][pair, node], rest)  # (P, E, d)
    x = pairs.joined(phi[known[pair], None], theta)
    ends, whose = theta.shape[1], row[known[pair]]
    values = pairs.entries_at(functions.kernel, of.packs, x.reshape(-1, m + d), np.repeat(places[whose], ends), entries)
    values = values.reshape(-1, ends, entries) - functions.middle[whose, None]
    begin = np.searchsorted(pair, np.arange(len(known)))
    for out, part in ((one, values.mean(axis=1)), (two, np.square(values).mean(axis=1))):
        out[known] = np.add.reduceat(weights[pair, node, None] * part, begin, axis=0) if len(known) else 0.0
    return one, two


def _around(theta: Array, precision: Array, rest: Places) -> Array:
    """Points (P, E, d) with the mean and the covariance of the rest: ± √r L⁻ᵀ e of each axis, or one without rest."""
    r = len(rest)
    if not r:
        return theta[:, None]
    points = np.repeat(theta[:, None], 2 * r, axis=1)
    root, _ = pairs.cholesky(precision)
    for i, axis in enumerate(np.sqrt(r) * np.eye(r)):
        away = pairs.solve_upper(root, np.broadcast_to(axis, (len(theta), r)))
        points[:, 2 * i, rest] += away
        points[:, 2 * i + 1, rest] -= away
    return points


def without_density(many: ClientsOf, phi: Array, workers: int) -> Places:
    """Places of clients whose log density or gradient is not finite where searches begin."""
    of, places = Densities(many.like.kernel, many.packs, len(phi)), np.arange(len(many), dtype=np.int64)

    def part(own: slice) -> Flags:
        at = np.broadcast_to(phi, (len(places[own]), len(phi)))
        return np.asarray(~np.isfinite(pairs.outputs(of, at, many.starts[own], places[own])).all(axis=1))

    return np.flatnonzero(np.concatenate(in_parts(part, len(many), tol.CLIENTS_AT_ONCE, workers)))
