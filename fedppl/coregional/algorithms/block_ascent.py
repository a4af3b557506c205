"""The coordinate ascent of FedLMC-SS with small messages: statistics for each latent function, none across."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.algorithms.averaging._point import described
from fedppl.contracts import Algorithm
from fedppl.coregional import server
from fedppl.coregional.algorithms._ascent import (
    Settings,
    checked,
    is_heard,
    kernel_start,
    kernel_step,
    noisy_rate,
    own_kernel,
    own_update,
    prior_globals,
    progress,
    sent,
)
from fedppl.coregional.blocks import (
    Search,
    block_bound,
    block_selection_terms,
    block_statistics,
    conjugate_step,
    resized,
)
from fedppl.coregional.bound import Globals, Roles, UnitState, roles
from fedppl.coregional.result import block_diagonal, draw, outcome, require_unit, sample
from fedppl.run.replies import sum_replies
from fedppl.types import Layout, Message, Status

__all__ = ["LMCBlockAscent", "LMCBlockAscentInfo", "LMCBlockAscentState"]


class LMCBlockAscentState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    shared: Globals
    search: Search
    where: Mapping[str, int]  # client id to its row
    heard: Any  # (K,) units that ever sent statistics
    number: int  # rounds with replies
    settling: int  # further rounds in which units keep their random coefficients, until there are curves
    stochastic: int  # rounds whose sums are noisy: some units, or mini-batches
    adam: Any  # (2, p) running first and second moment of the kernels' gradient
    bound: float
    quiet: int
    status: str
    message: str


class LMCBlockAscentInfo(NamedTuple):
    """Diagnostics of this round."""

    bound: float  # Σ V_m + log p(σ_w) at what the units were sent; NaN in the first round
    selected: int  # latent functions with γ > 0.5
    undecided: int  # with γ between 0.01 and 0.99
    kernel_change: float


def LMCBlockAscent(
    *,
    kernel_rate: float = 0.05,
    warmup: int = 10,
    batch_size: int | None = None,
    forgetting: float = 0.6,
    initial_kernel: str = "median",
    tolerance: float = 1e-4,
) -> Algorithm:
    r"""Ascend the bound of `LMCAscent` with replies of about L Q² / 2 numbers, where that needs (L Q)² / 2.

    .. math:: S_l = (I + \gamma_l P_{ll})^{-1}, \qquad m \leftarrow m + \frac{d^\top g}{d^\top Q\, d}\, d

    The server cannot solve for all means at once without the products across latent functions. It takes one iteration
    of conjugate gradients a round in its place, preconditioned by the blocks and with an exact line search: each unit
    multiplies by its own products. Means and covariances are updated in one round, the selection in the next, so that
    no round lowers the bound with the kernels fixed. It ends where `LMCAscent` does, in more rounds.

    Parameters
    ----------
    warmup
        Rounds in which units keep their random coefficients, until the latent functions have a shape; after as many
        more the selection begins.
    kernel_rate, batch_size, forgetting, initial_kernel, tolerance
        As in `LMCAscent`.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round for a model that is no linear model of coregionalisation.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.LMCBlockAscent().name
    'LMCBlockAscent'

    Notes
    -----
    *When this fails.* As `LMCAscent`. The server does not learn the covariance of v across latent functions, so that
    intervals where a unit has no rows are narrower than there.

    References
    ----------
    .. [1] Gao and Chung, section 4, eqs. 10 to 16.
    .. [2] Nocedal and Wright (2006), Numerical Optimization, section 5.1.
    """
    settings = checked(kernel_rate, warmup, 1, batch_size, forgetting, tolerance, initial_kernel)
    return Algorithm(
        name="LMCBlockAscent",
        check=require_unit,
        init_server=functools.partial(_init_server, settings=settings),
        broadcast=functools.partial(_broadcast, settings=settings),
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=_reply_shapes,
        refuse=_refuse,
        update_server=functools.partial(_update_server, settings=settings),
        outcome=lambda state, client_id: _outcome(state, heard=is_heard(state, client_id)),
        draw=draw,
        details=lambda state: {"inclusion_probability": (("latent",), state.shared.inclusion)},
        sample=lambda state, count, rng: sample(state.roles, _outcome(state, heard=True), count, rng),
        settings=described(settings),
        binary=True,
        tests_convergence=True,
    )


def _init_server(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: Settings
) -> LMCBlockAscentState:
    """Start from the prior, with every latent function in use."""
    del rng
    role = roles(layout)
    shared = prior_globals(role)
    nowhere = np.zeros_like(shared.mean)
    return LMCBlockAscentState(
        roles=role,
        shared=shared,
        search=Search(nowhere, nowhere, nowhere),
        where={client_id: k for k, client_id in enumerate(clients)},
        heard=np.zeros(len(clients), dtype=bool),
        number=0 if settings.initial_kernel == "median" else 1,
        settling=settings.warmup + 1,
        stochastic=0,
        adam=np.zeros((2, len(role.kernel))),
        bound=np.nan,
        quiet=0,
        status=Status.RUNNING.value,
        message="no round yet",
    )


def _broadcast(state: LMCBlockAscentState, client_id: str, *, settings: Settings) -> Message:
    """The shared parameters, and the direction to multiply by."""
    stage = 0.0 if state.number == 0 else 1.0 if state.settling else 2.0
    return {**sent(state.shared, stage, noisy_rate(state, settings)), "direction": state.search.direction}


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: Settings
) -> tuple[UnitState, Message, Mapping[str, float]]:
    """Maximise over the unit's own parameters, and tell the statistics that remain."""
    view = client.coregional
    if float(message["stage"]) == 0:
        return own_kernel(view, rng)
    answer = own_update(view, personal, message, rng, settings.batch_size)
    direction = np.asarray(message["direction"], dtype=float)
    reply = block_statistics(answer.design, answer.curve, answer.shared, answer.state, direction, view.noise)
    return answer.state, {**reply, "kernel_gradient": answer.kernel_gradient}, answer.info


def _reply_shapes(state: LMCBlockAscentState) -> Mapping[str, tuple[int, ...]]:
    latents, points, size = state.roles.latents, state.roles.points, len(state.roles.kernel)
    if state.number == 0:
        return {"kernel": (size,), "rows": ()}
    return {
        "precision": (latents, points * (points + 1) // 2),
        "gram": (latents * (latents + 1) // 2,),
        **dict.fromkeys(("linear", "across", "across_direction"), (latents, points)),
        **dict.fromkeys(("penalty", "second", "log_variance"), (latents,)),
        **dict.fromkeys(("constant", "units"), ()),
        "kernel_gradient": (size,),
    }


def _refuse(state: LMCBlockAscentState, message: Message) -> str | None:
    """Sums of squares and counts are never negative."""
    names = ("rows",) if state.number == 0 else ("penalty", "second", "units")
    for name in names:
        if np.any(np.asarray(message[name]) < 0):
            return f"{name!r} holds {np.min(message[name]):.3g}, which no data give"
    return None


def _update_server(
    state: LMCBlockAscentState, replies: Mapping[str, Message], *, settings: Settings
) -> tuple[LMCBlockAscentState, LMCBlockAscentInfo]:
    """Add up what came, and raise the bound in the means and covariances or in the selection."""
    if not replies:
        return state, _info(state, np.nan)
    state = state._replace(number=state.number + 1)
    if "rows" in next(iter(replies.values())):
        state, change = kernel_start(state, replies)
        return state, _info(state, change)
    heard = state.heard.copy()
    heard[[state.where[client_id] for client_id in replies]] = True
    state = state._replace(heard=heard)
    share = len(replies) / heard.sum()
    totals = {name: value / share for name, value in sum_replies(replies).items()}
    noisy = share < 1 or settings.batch_size is not None
    rate = min(share, noisy_rate(state, settings)) if noisy else 1.0
    begun = state.number - 1 > 2 * settings.warmup
    selecting = begun and bool(np.all(np.isfinite(state.roles.log_odds)))
    log_odds = state.roles.log_odds if selecting else np.full(state.roles.latents, np.inf)
    bound = block_bound(totals, state.shared, log_odds)
    bound += state.roles.slab_prior.log_density(state.shared.log_slab_sd)
    shared, search = state.shared, state.search
    if selecting and state.number % 2:
        gamma = server.selection(*block_selection_terms(totals, shared), shared.inclusion, log_odds)
        shared = shared._replace(inclusion=shared.inclusion + rate * (gamma - shared.inclusion))
    else:
        mean, covariance, search = conjugate_step(totals, shared, search, rate)
        shared = shared._replace(mean=mean, covariance=covariance)
    slab = server.slab(totals, shared.inclusion, state.roles.slab_prior)
    shared = shared._replace(log_slab_sd=shared.log_slab_sd + rate * (slab - shared.log_slab_sd))
    if not state.settling:  # after σ_w, which is judged by the coefficients as they were
        shared, search = resized(shared, search, server.size_factor(totals, shared))
    kernel_rate = 0.0 if state.settling else settings.kernel_rate
    kernel, adam = kernel_step(state, totals["kernel_gradient"], kernel_rate)
    change = float(np.max(np.abs(kernel - shared.kernel), initial=0.0))
    state = state._replace(
        shared=shared._replace(kernel=kernel),
        search=search,
        settling=max(state.settling - 1, 0),
        stochastic=state.stochastic + noisy,
        adam=adam,
    )
    state = state._replace(**progress(state, bound, change, settings.tolerance, begun=begun))
    return state, _info(state, change)


def _outcome(state: LMCBlockAscentState, *, heard: bool) -> Message:
    """What a unit needs to know in the end."""
    return outcome(state.shared, block_diagonal(state.shared.covariance), heard=heard)


def _info(state: LMCBlockAscentState, change: float) -> LMCBlockAscentInfo:
    gamma = state.shared.inclusion
    undecided = int(np.sum(np.abs(gamma - 0.5) < 0.49))
    return LMCBlockAscentInfo(float(state.bound), int(np.sum(gamma > 0.5)), undecided, change)
