"""The coordinate ascent of FedLMC-SS with small messages: statistics for each latent function, none across."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag

from fedppl import gaussian
from fedppl.contracts import Algorithm, Received, Replies, Report
from fedppl.coregional.algorithms import _common
from fedppl.coregional.algorithms._common import (
    Answer,
    Settings,
    Trail,
    info,
    left_after,
    log_prior,
    longer,
    no_trail,
    report,
)
from fedppl.coregional.bound import (
    Curves,
    Design,
    Globals,
    LogScale,
    Roles,
    UnitClientState,
    best_slab,
    bound_from,
    selection,
    size_factor,
    terms_from,
)
from fedppl.coregional.unit import POSTERIOR, draw, scalars
from fedppl.coregional.view import roles
from fedppl.settings import described
from fedppl.types import Array, Layout, Message


class BlockAscentState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    shared: Globals
    search: Search
    where: Mapping[str, int]  # client id to its row
    has_replied: NDArray[np.bool_]  # (K,) whether a unit ever sent statistics
    number: int  # rounds with replies
    settling: int  # further rounds in which units keep their random coefficients, until there are curves
    stochastic: int  # rounds whose sums are noisy: some units, or mini-batches
    adam: Array  # (2, p) running first and second moment of the kernels' gradient
    bound: float
    trail: Trail
    quiet: int  # rounds in a row after which the gain that remained was small


def BlockAscent(
    *,
    kernel_rate: float = 0.05,
    warmup: int = 10,
    batch_size: int | None = None,
    forgetting: float = 0.6,
    initial_kernel: str = "median",
    tolerance: float = 1e-3,
) -> Algorithm[BlockAscentState, UnitClientState]:
    r"""Ascend the bound of `Ascent` with replies of about L Q² / 2 numbers in place of (L Q)² / 2.

    .. math:: S_l = (I + \gamma_l P_{ll})^{-1}, \qquad m \leftarrow m + \frac{d^\top g}{d^\top Q\, d}\, d

    The server cannot solve for all means at once without the products across latent functions. It takes one iteration
    of conjugate gradients a round instead, preconditioned by the blocks and with an exact line search; each unit
    multiplies by its own products. Means and covariances are updated in one round, the selection in the next, so that
    no round lowers the bound with the kernels fixed. It ends where `Ascent` does, in more rounds.

    Parameters
    ----------
    warmup
        Number of rounds in which units keep their random coefficients, until the latent functions have a shape; after
        as many more the selection begins.
    kernel_rate, batch_size, forgetting, initial_kernel, tolerance
        As in `Ascent`, but that Adam steps go on to the end: after five rounds in a row with less than `tolerance`
        left, by the ratio of gains alone, the fit has converged.

    Returns
    -------
    Algorithm

    Notes
    -----
    *When this fails.* As `Ascent`. The server does not learn the covariance of v across latent functions, so that
    intervals where a unit has no rows are narrower than there.

    References
    ----------
    .. [1] Gao and Chung, section 4, eqs. 10 to 16.
    .. [2] Nocedal and Wright (2006), Numerical Optimization, section 5.1.
    """
    settings = _common.checked(Settings(kernel_rate, warmup, 1, batch_size, forgetting, tolerance, initial_kernel))
    return Algorithm[BlockAscentState, UnitClientState](
        name="curves.BlockAscent",
        settings=described(settings),
        init=functools.partial(_init, settings=settings),
        broadcast=functools.partial(_broadcast, settings=settings),
        update_client=functools.partial(
            _common.update_client, batch_size=settings.batch_size, updates=POSTERIOR, statistics=_statistics
        ),
        update_server=functools.partial(_update_server, settings=settings),
        replies=Replies(_shapes, _reject, lambda state: bool(np.all(state.has_replied))),
        result=_common.read(
            lambda state: state.roles,
            lambda state: state.shared,
            lambda state: block_diag(*state.shared.covariance),
            lambda state: (state.where, state.has_replied),
            draw,
            tests_convergence=True,
        ),
        needs=_common.NEEDS,
    )


def _init(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: Settings
) -> BlockAscentState:
    """Start from the prior, with every latent function in use."""
    role = roles(layout)
    shared = _common.prior_globals(role)
    nowhere = np.zeros_like(shared.mean)
    return BlockAscentState(
        roles=role,
        shared=shared,
        search=Search(nowhere, nowhere, nowhere),
        where={client_id: k for k, client_id in enumerate(clients)},
        has_replied=np.zeros(len(clients), dtype=bool),
        number=0 if settings.initial_kernel == "median" else 1,
        settling=settings.warmup + 1,
        stochastic=0,
        adam=np.zeros((2, len(role.kernel))),
        bound=np.nan,
        trail=no_trail(len(role.kernel)),
        quiet=0,
    )


def _broadcast(state: BlockAscentState, client_id: str, *, settings: Settings) -> Message:
    """The shared parameters, and the direction to multiply by."""
    stage = 0.0 if state.number == 0 else 1.0 if state.settling else 2.0
    return {
        **_common.sent(state.shared, stage, _common.noisy_rate(state.stochastic, settings)),
        "direction": state.search.direction,
    }


def _statistics(answer: Answer, message: Message) -> dict[str, Array]:
    """The statistics of each latent function alone, and products with the direction."""
    direction = np.asarray(message["direction"], dtype=float)
    return block_statistics(answer.design, answer.curve, answer.shared, answer.state, direction, answer.noise)


def _update_server(
    state: BlockAscentState, received: Received, *, settings: Settings
) -> tuple[BlockAscentState, Report]:
    """Add up the replies, and raise the bound in the means and covariances or in the selection."""
    if not received.clients:
        return state, Report(info(state.bound, state.shared, np.nan))
    role, shared, number = state.roles, state.shared, state.number + 1
    if state.number == 0:
        shared, started = _common.kernel_start(shared, received, state.bound)
        return state._replace(shared=shared, number=number), started
    has_replied, share, noisy, rate = _common.share_of(
        received, state.where, state.has_replied, state.stochastic, settings
    )
    totals = {name: value / share for name, value in received.sums().items()}
    begun = number - 1 > 2 * settings.warmup
    selecting = begun and bool(np.all(np.isfinite(role.log_odds)))
    log_odds = role.log_odds if selecting else np.full(role.latents, np.inf)
    bound = block_bound(totals, shared, log_odds) + role.slab_prior.log_density(shared.log_slab_sd)
    search = state.search
    if selecting and number % 2:
        gamma = selection(*block_selection_terms(totals, shared), shared.inclusion, log_odds)
        shared = shared._replace(inclusion=shared.inclusion + rate * (gamma - shared.inclusion))
    else:
        mean, covariance, search = conjugate_step(totals, shared, search, rate)
        shared = shared._replace(mean=mean, covariance=covariance)
    slab = best_slab(totals, shared.inclusion, role.slab_prior)
    shared = shared._replace(log_slab_sd=shared.log_slab_sd + rate * (slab - shared.log_slab_sd))
    if not state.settling:  # after σ_w, which is judged by the coefficients as they were
        shared, search = resized(shared, search, size_factor(totals, shared))
    kernel_rate, slope = (0.0 if state.settling else settings.kernel_rate), totals["kernel_gradient"]
    kernel, adam, change = _common.kernel_step(role, shared.kernel, state.adam, slope, kernel_rate, max(number - 1, 1))
    shared, everyone = shared._replace(kernel=kernel), bool(np.all(has_replied))
    trail = longer(state.trail, bound + log_prior(role, state.shared.kernel), kernel, noisy=noisy)
    remaining = left_after(trail)
    quiet = state.quiet + 1 if begun and everyone and remaining.small(settings.tolerance) else 0
    state = state._replace(
        shared=shared,
        search=search,
        has_replied=has_replied,
        number=number,
        settling=max(state.settling - 1, 0),
        stochastic=state.stochastic + noisy,
        adam=adam,
        bound=bound,
        trail=trail,
        quiet=quiet,
    )
    return state, report(bound, shared, change, remaining, arrived=quiet >= 5, noisy=noisy)


def _shapes(state: BlockAscentState) -> Mapping[str, tuple[int, ...]]:
    latents, points = state.roles.latents, state.roles.points
    if state.number == 0:
        return _common.first_shapes(state.roles)
    return {
        "precision": (latents, points * (points + 1) // 2),
        "gram": (latents * (latents + 1) // 2,),
        **dict.fromkeys(("linear", "across", "across_direction"), (latents, points)),
        **dict.fromkeys(("penalty", "second", "log_variance"), (latents,)),
        **dict.fromkeys(("constant", "units"), ()),
        "kernel_gradient": state.roles.kernel.shape,
    }


def _reject(state: BlockAscentState, reply: Message) -> str | None:
    """Why a reply is rejected that no data give, or None."""
    return _common.reject_negative(reply, *(("penalty", "second", "units") if state.number else ("rows",)))


# The coordinate ascent with one block of statistics for each latent function: L Q² numbers in place of (L Q)² ---------


class Search(NamedTuple):
    """The direction of the next step of the means, a conjugate one, and what it is computed from."""

    direction: Array  # (L, Q)
    gradient: Array  # (L, Q)
    preconditioned: Array  # (L, Q)


def block_statistics(
    design: Design, curve: Curves, shared: Globals, unit: UnitClientState, direction: Array, noise: LogScale
) -> dict[str, Array]:
    """A unit's statistics at the means and the direction that it was sent, of which the server needs the sums.

    ``precision`` (L, Q (Q + 1) / 2) has the diagonal blocks, ``across`` and ``across_direction`` (L, Q) the products of
    all others, times γ_k, with the means and the direction, ``gram`` (L, L) the forms m_l' P_lk m_k.
    """
    rate = design.scale * np.exp(-2 * unit.log_noise_sd)
    transposed = np.swapaxes(design.projection, 1, 2)
    blocks = rate * (unit.mean**2 + unit.variance)[:, None, None] * (transposed @ design.projection)

    def products(along: Array) -> Array:
        each = (unit.mean * shared.inclusion)[:, None] * along
        others = each.sum(axis=0) - each
        return np.asarray(rate * unit.mean[:, None] * (transposed @ others[:, :, None])[:, :, 0])

    along = (design.projection @ direction[:, :, None])[:, :, 0]
    scaled = unit.mean[:, None] * curve.mean
    gram = rate * (scaled @ scaled.T) + np.diag(rate * unit.variance * np.sum(curve.mean**2, axis=1))
    return {
        "precision": gaussian.pack_triangle(blocks),
        "linear": rate * unit.mean[:, None] * (transposed @ design.response),
        "across": products(curve.mean),
        "across_direction": products(along),
        "gram": gaussian.pack_triangle(gram),
        **scalars(design, unit, noise),
    }


def block_selection_terms(totals: Mapping[str, Array], shared: Globals) -> tuple[Array, Array]:
    """c (L,) and M (L, L) of the bound in γ, as `selection_terms`, at the means that were sent."""
    gram = gaussian.unpack_triangle(totals["gram"])
    return terms_from(gram, gaussian.unpack_triangle(totals["precision"]), totals, shared)


def block_bound(totals: Mapping[str, Array], shared: Globals, log_odds: Array) -> float:
    """Σ_m V_m at the parameters that were sent, or with another q(α) or σ_w."""
    return bound_from(block_selection_terms(totals, shared), totals, shared, log_odds)


def resized(shared: Globals, search: Search, factor: Array) -> tuple[Globals, Search]:
    """Every latent function times its factor (L,), and the search with it."""
    wide = factor[:, None]
    search = Search(search.direction * wide, search.gradient / wide, search.preconditioned * wide)
    return shared._replace(mean=shared.mean * wide, covariance=shared.covariance * wide[:, :, None] ** 2), search


def conjugate_step(
    totals: Mapping[str, Array], shared: Globals, search: Search, rate: float
) -> tuple[Array, Array, Search]:
    """Means after an exact search along the direction that was sent, covariances, and the next direction.

    The bound is quadratic in the means of v. Its blocks precondition conjugate gradients (Polak and Ribière), with one
    iteration a round, for which units multiply the other blocks by the means and the direction.
    """
    gamma = shared.inclusion[:, None]
    blocks = shared.inclusion[:, None, None] * gaussian.unpack_triangle(totals["precision"])
    system = blocks + np.eye(blocks.shape[1])
    covariance = np.linalg.inv(system)
    covariance = (covariance + np.swapaxes(covariance, 1, 2)) / 2

    def times(matrix: Array, vector: Array) -> Array:
        return np.asarray((matrix @ vector[:, :, None])[:, :, 0])

    gradient = gamma * (totals["linear"] - totals["across"]) - times(system, shared.mean)
    curved = times(system, search.direction) + gamma * totals["across_direction"]
    curvature, slope = float(np.sum(search.direction * curved)), float(np.sum(search.direction * gradient))
    step = rate * slope / curvature if slope > 0 and curvature > 0 else 0.0
    mean = shared.mean + step * search.direction
    after = gradient - step * curved
    preconditioned = times(covariance, after)
    before = float(np.sum(search.preconditioned * search.gradient))
    turn = float(np.sum(preconditioned * (after - search.gradient))) / before if before > 0 else 0.0
    direction = preconditioned + (max(turn, 0.0) if step > 0 else 0.0) * search.direction
    if rate < 1.0:  # noisy sums: on the natural scale, part of the way
        covariance = np.linalg.inv((1 - rate) * np.linalg.inv(shared.covariance) + rate * system)
        covariance = (covariance + np.swapaxes(covariance, 1, 2)) / 2
    return mean, covariance, Search(direction, after, preconditioned)
