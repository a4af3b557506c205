r"""log f_k of clients side by side, with θ integrated: Laplace's approximation, and its error.

.. math:: \log f_k(\varphi) = \log \int p(y_k, \theta \mid \varphi)\, d\theta

Laplace's values are cheap and computed at many points. Their error is expensive and smooth in φ, and computed at few. A
client alone is a stack of one, so that its numbers are the same wherever they are computed.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.contracts import ClientView, Constant
from fedppl.local import _conditional, log_factors
from fedppl.local import tolerances as tol
from fedppl.local._marginal import no_mode
from fedppl.local.log_factors import near_and_far, several_modes
from fedppl.numerics import pairs
from fedppl.numerics.integral import Rule, by_grid, by_sparse_grid, chunks, some_of
from fedppl.numerics.pairs import Densities, Laplace, Places
from fedppl.numerics.prior import SharedPrior
from fedppl.types import Array

T = TypeVar("T")


class Stacked(NamedTuple):
    """Clients of one compiled density and as many local coordinates, side by side."""

    of: Densities
    starts: Array  # (K, d) modes of θ at the prior's mean, where searches begin
    ids: Sequence[str]
    checksums: NDArray[np.uint32]  # (K,) of ids
    client: Callable[[int], ClientView]  # the client in a place as others know it
    prior: SharedPrior
    exact: bool  # whether Laplace's approximation is exact

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.starts)


class Values(NamedTuple):
    """Sums over clients at points, and clients that failed."""

    values: Array  # (S,) Laplace's log f_k, of clients that have a value
    lost: Array  # (S,) number of clients without a value
    left_out: Array  # (T,) their error, at the known points
    left_out_lost: Array  # (T,)
    errors: Array  # (T,) signed
    squares: Array  # (T,)
    constants: Array  # (2,) alike, and squares of those by chance
    failures: Mapping[str, str]


# Stacks ---------------------------------------------------------------------------------------------------------------


def stacks(clients: Mapping[str, ClientView]) -> list[Stacked]:
    """Clients side by side, those of one density together; in the order of their ids."""
    if hasattr(clients, "packs"):  # rows of one table: no client is an object
        many: Any = clients
        of = Densities(many.like.kernel, many.packs, many.like.shared_size)
        return [_stacked(of, many.starts, tuple(many), many.model, many.like)]
    groups: dict[tuple[int, int, int], list[ClientView]] = {}
    for client_id in sorted(clients):
        client = clients[client_id]
        groups.setdefault((id(client.kernel), client.local_size, len(client.packed[2])), []).append(client)
    return [of_clients(group) for group in groups.values()]


def of_clients(group: Sequence[ClientView]) -> Stacked:
    """A stack of clients that have one density and as many local coordinates."""
    first = group[0]
    of = Densities(first.kernel, pairs.side_by_side([client.packed for client in group]), first.shared_size)
    initial = np.stack([np.asarray(client.initial, dtype=float) for client in group])
    return _stacked(of, initial, [client.client_id for client in group], group.__getitem__, first)


def alone(client: ClientView) -> Stacked:
    """A client as a stack of one."""
    return of_clients([client])


def _stacked(
    of: Densities, initial: Array, ids: Sequence[str], client: Callable[[int], ClientView], like: ClientView
) -> Stacked:
    starts, gaussians = np.array(initial), np.ones(len(initial), dtype=bool)
    middle = gaussian.mean(like.prior.gaussian)
    if initial.shape[1]:

        def begin(some: slice) -> None:
            who = np.arange(len(initial), dtype=np.int64)[some]
            phi = np.broadcast_to(middle, (len(who), len(middle)))
            modes = pairs.modes(of, phi, initial[some], who)
            starts[some] = np.where(modes.arrived[:, None], modes.theta, initial[some])
            gaussians[some] = _looks_gaussian(of, modes, phi, who)

        in_parts(begin, len(initial), _parts_of(initial.shape[1], len(middle), 1), cores())
    d, some = initial.shape[1], some_of(len(initial), tol.CHECKED_ALIKE)
    exact = not d or (bool(np.all(gaussians)) and all(client(int(k)).view(_conditional.is_gaussian) for k in some))
    of = of if exact else of._replace(value=like.value_kernel)
    checksums = np.array([zlib.crc32(client_id.encode()) for client_id in ids], dtype=np.uint32)
    return Stacked(of, starts, ids, checksums, client, like.prior, exact)


def _looks_gaussian(of: Densities, modes: pairs.Modes, phi: Array, who: Places) -> NDArray[np.bool_]:
    """Whether θ is Gaussian about its mode, near and far, for each client: a sample could miss rare ones."""
    d = modes.theta.shape[1]
    z = np.random.default_rng(0).normal(size=(len(tol.DISTANCES), d))
    z *= (np.array(tol.DISTANCES) / np.sqrt(np.sum(z**2, axis=1)))[:, None]
    about = Laplace(pairs.of_modes(modes), modes.theta, modes.root)
    terms = pairs.node_terms(of, about, phi, who, Rule(z, np.zeros(len(z)), np.zeros(len(z))))
    allowed = tol.NORMAL_EQUAL * (1.0 + np.sum(z**2, axis=1)) + tol.DENSITY_ROUNDING * np.abs(modes.value)[:, None]
    with np.errstate(invalid="ignore"):
        return np.asarray(np.all(np.abs(terms - about.values[:, None]) <= allowed, axis=1))


def log_density(stacks: Sequence[Stacked], points: Array) -> Array:
    """Sum of Laplace's log f_k at points (S, m), by way of modes at the first; −inf where a client has no value."""
    nothing, total = np.zeros(0, dtype=np.int64), np.zeros(len(points))
    for stack in stacks:
        own = summed(stack, points, nothing, points[0], 1)
        total = total + np.where((own.lost > 0) | bool(own.failures), -np.inf, own.values)
    return total


def slopes(stacks: Sequence[Stacked], point: Array) -> tuple[Array, Array]:
    """Gradient (m,) and Hessian (m, m) of the sum of Laplace's log f_k; NaN where a client has no mode of θ."""
    gradient, hessian = np.zeros(len(point)), np.zeros((len(point), len(point)))
    for stack in stacks:
        wanted = np.minimum(gaussian.standard_deviations(stack.prior.gaussian), tol.NEAR_SDS)
        own = pairs.expansions(stack.of, point, stack.starts, np.arange(len(stack), dtype=np.int64), wanted)
        gradient, hessian = gradient + own.gradients.sum(axis=0), hessian + own.hessians.sum(axis=0)
    return gradient, hessian


# Sums over a stack ----------------------------------------------------------------------------------------------------


def summed(
    stack: Stacked,
    points: Array,
    known: Places,
    center: Array,
    workers: int,
    *,
    some: float = 1.0,
    look: bool = False,
    roughly: bool = False,
) -> Values:
    """Sums over the clients of a stack at points (S, m), by way of their modes at a center (m,).

    The error of Laplace's approximation is computed at the points in places `known`, (T,). With `roughly` a rough
    estimate of it at all points is part of the values, and the rest is the error. With `some` below 1 only so large a
    part of the clients is asked, chosen by their ids. With `look` other modes of θ are searched for, and a client with
    several fails.
    """
    size = _parts_of(stack.starts.shape[1], points.shape[1], len(points))

    def over(places: Places, way: _Way | None, *, look: bool = False) -> Values:
        part = functools.partial(_part, stack, points, known, center, way=way, look=look, roughly=roughly)
        return _added(in_parts(lambda own: part(places[own]).values, len(places), size, workers), points, known)

    places = asked(stack, some)
    careful = places if len(places) <= tol.MOST_CAREFUL else places[some_of(len(places), tol.SAMPLE)]
    total = over(careful, _careful, look=look)
    rest = np.setdiff1d(places, careful)
    if not len(rest) or total.failures:  # a sum without one of them cannot be used
        return total
    if not len(known) or stack.exact:
        return _added([total, over(rest, None)], points, known)
    cheap = _cheaper(stack, points[known], center, careful, len(rest))
    total = _added([total, over(rest, cheap.way)], points, known)
    scale = len(places) / len(careful)
    return total._replace(
        left_out=total.left_out + cheap.left,
        errors=scale * total.errors,
        squares=total.squares + cheap.chance**2,
        constants=scale * total.constants,
    )


class _Part(NamedTuple):
    values: Values
    each: Array  # (C, T) error of Laplace's approximation, of clients that have a mode


_Way = Callable[[Stacked, Places, Array, Array, Laplace], tuple[Array, Array, list[Constant]]]


def _part(
    stack: Stacked,
    points: Array,
    known: Places,
    center: Array,
    places: Places,
    way: _Way | None,
    *,
    look: bool = False,
    roughly: bool = False,
) -> _Part:
    """Sums over the clients in these places."""
    at = pairs.origins(stack.of, center, stack.starts[places], places)
    usable = at.modes.arrived if stack.starts.shape[1] else np.ones(len(places), dtype=bool)
    failures = {str(stack.ids[k]): no_mode(stack.client(int(k)), center) for k in places[~usable]}
    rows = np.flatnonzero(usable)
    if look and not stack.exact and len(rows):
        own = places[rows]
        clients = [stack.client(int(k)) for k in own]
        several = several_modes(stack.of, own, clients, stack.starts[own], near_and_far(points, center))
        failures |= several
        rows = rows[[str(stack.ids[k]) not in several for k in own]]
    roughly = roughly and not stack.exact
    wanted = np.arange(len(points)) if roughly else known
    values, about = pairs.laplace_at(stack.of, at, rows, places[rows], points, wanted)
    left_out, errors = np.zeros((2, len(rows), len(known)))
    constants: list[Constant] = []
    if roughly:
        rough = _roughly_left_out(stack, places[rows], points, about)
        values, left_out = values + rough, -rough[:, known]
        some = (np.arange(len(rows))[:, None] * len(points) + known).reshape(-1)
        about = Laplace(*(part[some] for part in about))
    if way is not None and len(known) and not stack.exact:
        more, errors, constants = way(stack, places[rows], points[known], center, about)
        left_out = left_out + more
    finite, also = np.isfinite(values), np.isfinite(left_out)
    errors = np.where(also, errors, 0.0)
    alike, chance = (sum(abs(one.alike) for one in constants), sum(one.by_chance**2 for one in constants))
    sums = Values(
        np.where(finite, values, 0.0).sum(axis=0),
        (~finite).sum(axis=0).astype(float),
        np.where(also, left_out, 0.0).sum(axis=0),
        (~also).sum(axis=0).astype(float),
        errors.sum(axis=0),
        np.square(errors).sum(axis=0),
        np.array([alike, chance], dtype=float),
        failures,
    )
    return _Part(sums, left_out)


def _roughly_left_out(stack: Stacked, places: Places, points: Array, about: Laplace) -> Array:
    """A rough estimate of Laplace's error at clients in these places (C,) and points (S, m): (C, S).

    By a grid of few nodes, a sparse one of more than three coordinates; by one line along each axis where coordinates
    are independent or too many. 0 where that has no value.
    """
    of, d = stack.of, about.theta.shape[1]
    phi, who = np.tile(points, (len(places), 1)), np.repeat(places, len(points))
    by_sparse = tol.SPARSE_FEWEST <= d <= tol.SPARSE_MOST
    if by_sparse and not (len(places) and log_factors.is_separable(stack.client(int(places[0])))):
        logs = log_factors.by_signed_rule(of, about, phi, who, by_sparse_grid(d, tol.ROUGH_LEVEL))
    elif d in tol.ROUGH_NODES:
        logs = _integrals(of, about, phi, who, by_grid(d, tol.ROUGH_NODES[d]))
    else:

        def total(terms: Array) -> Array:
            lines, less = pairs.log_lines(terms, d)
            return np.asarray(logsumexp(lines, axis=2).sum(axis=1) - less)[:, None]

        logs = pairs.by_nodes(of, about, phi, who, pairs.along_axes(by_grid(1, tol.ROUGH_ALONG), d), total)[:, 0]
    errors = logs - about.values
    return np.where(np.isfinite(errors), errors, 0.0).reshape(len(places), len(points))


def _integrals(of: Densities, about: Laplace, phi: Array, who: Places, rule: Rule) -> Array:
    """Logarithms of integrals by a rule, pair by pair, (N,)."""
    return pairs.by_nodes(of, about, phi, who, rule, lambda terms: logsumexp(terms, axis=1, keepdims=True))[:, 0]


def _careful(
    stack: Stacked, places: Places, points: Array, center: Array, about: Laplace
) -> tuple[Array, Array, list[Constant]]:
    """By the best rule that each client has: along lines for all at once whose coordinates are independent."""
    count, d = len(points), stack.starts.shape[1]
    pairs_of = np.arange(len(places) * count).reshape(len(places), count)
    values, errors, constants = np.zeros(pairs_of.shape), np.zeros(pairs_of.shape), []
    is_apart = np.array([d == 1 or log_factors.is_separable(stack.client(int(k))) for k in places], dtype=bool)
    apart = Laplace(*(part[pairs_of[is_apart].reshape(-1)] for part in about))
    along = zip(*log_factors.along_each(stack.of, places[is_apart], points, apart), strict=True)
    for row, k in enumerate(places):
        own = Laplace(*(part[pairs_of[row]] for part in about))
        if is_apart[row]:
            factor = log_factors.with_alike(*next(along))
        else:
            factor = log_factors.integrated(stack.client(int(k)), points, center, own)
        values[row], errors[row] = factor.values - own.values, factor.errors
        constants.append(factor.constant)
    return values, errors, constants


def _by_rule(
    stack: Stacked, places: Places, points: Array, center: Array, about: Laplace, *, rule: Rule
) -> tuple[Array, Array, list[Constant]]:
    """By one rule for all."""
    shape = len(places), len(points)
    phi, who = np.tile(points, (len(places), 1)), np.repeat(places, len(points))
    differences = _integrals(stack.of, about, phi, who, rule) - about.values
    return differences.reshape(shape), np.zeros(shape), []


class _Cheap(NamedTuple):
    """A rule in place of the careful one."""

    way: _Way | None
    left: Array  # (T,) its error in the sum over clients
    chance: Array  # (T,) standard error of that


def _cheaper(stack: Stacked, points: Array, center: Array, places: Places, count: int) -> _Cheap:
    """One rule for all clients and points, so that its error is the same in all exchanges.

    The careful values of a sample, the clients in these places, give its error in the sum over so many. They have
    errors of their own, similar at all points of an exchange: differences to the center are taken, and the constant
    from the center alone.
    """
    d = stack.starts.shape[1]
    way = functools.partial(_by_rule, rule=_chosen_rule(stack, center, places, count)) if d in tol.CHEAP_NODES else None

    def differences(at: Array) -> Array:
        known = np.arange(len(at), dtype=np.int64)
        careful, cheap = (_part(stack, at, known, center, places, one).each for one in (_careful, way))
        return careful - cheap

    alone = differences(center[None])
    differ = differences(np.concatenate([points, center[None]]))
    finite = np.all(np.isfinite(differ), axis=1) & np.isfinite(alone[:, 0])
    errors = (differ[:, :-1] - differ[:, -1:])[finite]
    by_chance = count * errors.std(axis=0) / np.sqrt(max(len(errors), 1))
    return _Cheap(way, count * (errors.mean(axis=0) + alone[finite].mean()), by_chance)


def _chosen_rule(stack: Stacked, center: Array, places: Places, count: int) -> Rule:
    """The smallest grid with the integrals of a finer one at a center, for a sample of clients in these places."""
    d = stack.starts.shape[1]
    at, rows = pairs.origins(stack.of, center, stack.starts[places], places), np.arange(len(places))
    phi = np.broadcast_to(center, (len(places), len(center)))
    about = pairs.laplace(stack.of, at, rows, places, phi)

    fine = _integrals(stack.of, about, phi, places, by_grid(d, tol.FINE_NODES[d]))
    for nodes in tol.CHEAP_NODES[d]:
        differences = _integrals(stack.of, about, phi, places, by_grid(d, nodes)) - fine
        if count * np.nanstd(differences) <= tol.CHEAP_ERROR * np.sqrt(len(places)):
            break
    return by_grid(d, nodes)


def asked(stack: Stacked, some: float) -> Places:
    """Places of clients that are asked: all, or those whose ids come first by a checksum."""
    return np.flatnonzero(stack.checksums < some * 2**32) if some < 1.0 else np.arange(len(stack), dtype=np.int64)


def _added(parts: Sequence[Values], points: Array, known: Places) -> Values:
    """The sum of sums, in their order."""
    nothing = [*np.zeros((2, len(points))), *np.zeros((4, len(known))), np.zeros(2)]
    columns = zip(nothing, *(part[:-1] for part in parts), strict=True)
    return Values._make([*map(sum, columns), {k: reason for part in parts for k, reason in part.failures.items()}])


def _parts_of(d: int, m: int, points: int) -> int:
    """Number of clients of a part; sums are in the same order whatever the number of threads."""
    return max(1, min(tol.CLIENTS_AT_ONCE, pairs.at_once(d, m) // max(1, points)))


def in_parts(compute: Callable[[Any], T], count: int, size: int, workers: int) -> list[T]:
    """Results for parts of so many, in their order, by threads."""
    parts = chunks(count, size)
    if len(parts) <= 1 or workers <= 1:
        return [compute(part) for part in parts]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(compute, parts))


def cores() -> int:
    """Default number of threads: one a core."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
