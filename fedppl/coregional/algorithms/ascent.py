"""Federated coordinate ascent for coregionalised Gaussian processes that select their latent functions (FedLMC-SS)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
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
from fedppl.coregional.bound import Globals, Roles, UnitState, roles
from fedppl.coregional.result import draw, outcome, require_unit, sample
from fedppl.coregional.unit import statistics
from fedppl.run.replies import sum_replies
from fedppl.types import Array, Layout, Message, Status

__all__ = ["LMCAscent", "LMCAscentInfo", "LMCAscentState"]


class LMCAscentState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    shared: Globals
    totals: Mapping[str, Array]  # sums of the units' statistics; empty before the first
    where: Mapping[str, int]  # client id to its row
    heard: Array  # (K,) units that ever sent statistics
    collecting: bool  # whether sums are still of the random coefficients that units start from
    number: int  # rounds with replies
    age: int  # of those, rounds since there are curves
    stochastic: int  # of those, rounds whose sums are noisy: some units, or mini-batches
    adam: Array  # (2, p) running first and second moment of the kernels' gradient
    pace: float  # of the kernels' steps: shorter after every round that lowered the bound
    bound: float
    quiet: int  # rounds in a row without a change worth telling
    status: str
    message: str


_SHORTER, _SHORTEST = 0.7, 0.01


class LMCAscentInfo(NamedTuple):
    """Diagnostics of this round."""

    bound: float  # Σ V_m + log p(σ_w), scaled up where not all units replied; NaN in the first round
    selected: int  # latent functions with γ > 0.5
    undecided: int  # with γ between 0.01 and 0.99
    kernel_change: float  # largest change of a kernel parameter on the unconstrained space


def LMCAscent(
    *,
    kernel_rate: float = 0.05,
    warmup: int = 10,
    sweeps: int = 3,
    batch_size: int | None = None,
    forgetting: float = 0.6,
    initial_kernel: str = "median",
    tolerance: float = 1e-4,
) -> Algorithm:
    r"""Coordinate ascent on the bound of FedLMC-SS, with sums of the units' statistics.

    .. math:: Q = I + \sum_m \frac{E[s_m s_m^\top] \otimes B_m^\top B_m}{\sigma_m^2}, \quad
              Q\, m = \sum_m \frac{E[s_m] \otimes B_m^\top y_m}{\sigma_m^2}, \quad
              S_l = Q_{ll}^{-1}, \quad
              \operatorname{logit} \gamma_l = \operatorname{logit} \pi + c_l - \sum_{k \ne l} M_{lk} \gamma_k

    with s = α ∘ w. Given everything else each update is the bound's own maximum: of q(w_m) and σ_m at the unit, which
    keeps them; of q(v), q(α) and σ_w at the server, from sums. Only the kernels' parameters take a gradient step
    (Adam). The result is that of a central fit by the same updates, and with the kernels fixed no round lowers the
    bound.

    Parameters
    ----------
    kernel_rate
        Adam's step for the kernels' parameters on the log scale, shorter by 0.7 after every round that lowered the
        bound; 0 fixes them.
    warmup
        Rounds before the selection begins; until then every γ is 1.
    sweeps
        Times a round that the server maximises over q(α), q(v) and σ_w in turn.
    batch_size
        Rows of a unit's mini-batch, drawn anew each round (stochastic natural gradients); by default all rows.
    forgetting
        Where sums are noisy, because some units did not reply or rows are drawn, the t-th of such rounds counts by
        (1 + t)^(-forgetting); between 0.5 and 1.
    initial_kernel
        "median": every unit first fits a Gaussian process to its own rows, and the server starts from the median of
        their kernel parameters, weighted by rows. "prior": start from the prior's median.
    tolerance
        Converged when the bound per unit has moved by less than this share of itself, five rounds running, with no γ
        undecided and the kernels moving by less than 1e-2.

    Returns
    -------
    Algorithm
        Its fit has draws of v, the indicators and the estimates; see `fedppl.curves` for predictions in closed form.

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round for a model that is no linear model of coregionalisation.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.LMCAscent(warmup=5).settings["warmup"]
    '5'

    Notes
    -----
    *When this fails.* The bound has local maxima: a length-scale that is far too long at the start, say, makes the
    selection drop functions that are needed, and γ = 0 is not left again. Compare a few seeds, and read
    ``fit.idata["rounds"]["selected"]``. Intervals of the mean field are too narrow where a unit has no rows;
    `fedppl.curves.predict` adds what it leaves out.

    References
    ----------
    .. [1] Gao and Chung, Federated automatic latent variable selection in multi-output Gaussian processes, section 4,
       eqs. 10 to 16.
    .. [2] Titsias and Lázaro-Gredilla (2011), Spike and slab variational inference, NeurIPS, section 3.
    .. [3] Hoffman et al. (2013), Stochastic variational inference, JMLR 14, eqs. 24 to 26.
    """
    settings = checked(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel)
    return Algorithm(
        name="LMCAscent",
        check=require_unit,
        init_server=functools.partial(_init_server, settings=settings),
        broadcast=functools.partial(_broadcast, settings=settings),
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=_reply_shapes,
        refuse=_refuse,
        update_server=functools.partial(_update_server, settings=settings),
        outcome=lambda state, client_id: _outcome(state, heard=is_heard(state, client_id)),
        draw=draw,
        details=_details,
        sample=lambda state, count, rng: sample(state.roles, _outcome(state, heard=True), count, rng),
        settings=described(settings),
        binary=True,
        tests_convergence=True,
    )


def _init_server(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: Settings
) -> LMCAscentState:
    """Start from the prior, with every latent function in use."""
    del rng
    role = roles(layout)
    ask = settings.initial_kernel == "median"
    return LMCAscentState(
        roles=role,
        shared=prior_globals(role),
        totals={},
        where={client_id: k for k, client_id in enumerate(clients)},
        heard=np.zeros(len(clients), dtype=bool),
        collecting=True,
        number=0 if ask else 1,
        age=0,
        stochastic=0,
        adam=np.zeros((2, len(role.kernel))),
        pace=1.0,
        bound=np.nan,
        quiet=0,
        status=Status.RUNNING.value,
        message="no round yet",
    )


def _broadcast(state: LMCAscentState, client_id: str, *, settings: Settings) -> Message:
    """The shared parameters."""
    stage = 0.0 if state.number == 0 else 1.0 if state.collecting else 2.0
    return sent(state.shared, stage, noisy_rate(state, settings))


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: Settings
) -> tuple[UnitState, Message, Mapping[str, float]]:
    """Maximise over the unit's own parameters, and tell the statistics that remain."""
    if float(message["stage"]) == 0:
        return own_kernel(client.coregional, rng)
    answer = own_update(client.coregional, personal, message, rng, settings.batch_size)
    reply = statistics(answer.design, answer.state, client.coregional.noise)
    reply["precision"] = gaussian.pack_triangle(reply["precision"])
    return answer.state, {**reply, "kernel_gradient": answer.kernel_gradient}, answer.info


def _reply_shapes(state: LMCAscentState) -> Mapping[str, tuple[int, ...]]:
    latents, points, size = state.roles.latents, state.roles.points, len(state.roles.kernel)
    if state.number == 0:
        return {"kernel": (size,), "rows": ()}
    total = latents * points
    return {
        "precision": (total * (total + 1) // 2,),
        "linear": (latents, points),
        "penalty": (latents,),
        "second": (latents,),
        "log_variance": (latents,),
        "constant": (),
        "units": (),
        "kernel_gradient": (size,),
    }


def _refuse(state: LMCAscentState, message: Message) -> str | None:
    """Sums of squares and counts are never negative, nor is a sum of squared designs."""
    names = ("rows",) if state.number == 0 else ("penalty", "second", "units")
    for name in names:
        if np.any(np.asarray(message[name]) < 0):
            return f"{name!r} holds {np.min(message[name]):.3g}, which no data give"
    if state.number == 0:
        return None
    precision = gaussian.unpack_triangle(np.asarray(message["precision"], dtype=float))
    level = 1e-9 * (1.0 + float(np.max(np.abs(np.diag(precision)))))
    try:
        np.linalg.cholesky(precision + level * np.eye(len(precision)))
    except np.linalg.LinAlgError:
        return "'precision' is not positive semi-definite, which no data give"
    return None


def _update_server(
    state: LMCAscentState, replies: Mapping[str, Message], *, settings: Settings
) -> tuple[LMCAscentState, LMCAscentInfo]:
    """Add up what came, and maximise over what is shared."""
    if not replies:
        return state, _info(state, np.nan)
    state = state._replace(number=state.number + 1)
    if "rows" in next(iter(replies.values())):
        state, change = kernel_start(state, replies)
        return state, _info(state, change)
    if state.collecting:
        return _collect(state, replies, settings)
    heard = state.heard.copy()
    heard[[state.where[client_id] for client_id in replies]] = True
    state, sums = state._replace(heard=heard), _sums(replies)
    share = len(replies) / heard.sum()
    noisy = share < 1 or settings.batch_size is not None
    slope = sums.pop("kernel_gradient") / share
    rate = min(share, noisy_rate(state, settings)) if noisy else 1.0
    totals = {name: (1 - rate) * state.totals[name] + rate * value / share for name, value in sums.items()}
    state = state._replace(stochastic=state.stochastic + noisy)
    return _raise_bound(state, totals, slope, settings)


def _sums(replies: Mapping[str, Message]) -> dict[str, Array]:
    sums = sum_replies(replies)
    return {**sums, "precision": gaussian.unpack_triangle(sums["precision"])}


def _collect(
    state: LMCAscentState, replies: Mapping[str, Message], settings: Settings
) -> tuple[LMCAscentState, LMCAscentInfo]:
    """Add up random starts, one of each unit, until all are in or the warm-up is over.

    From the start of one unit alone all latent functions would take the shape of one curve.
    """
    new = {name: reply for name, reply in replies.items() if not state.heard[state.where[name]]}
    heard = state.heard.copy()
    heard[[state.where[name] for name in new]] = True
    totals = dict(state.totals)
    if new:
        totals = {name: totals.get(name, 0.0) + value for name, value in _sums(new).items()}
    done = bool(np.all(heard)) or state.number - 1 > settings.warmup
    state = state._replace(heard=heard, totals=totals, collecting=not done)
    if not done:
        return state._replace(message="not all units have replied yet; raise rounds="), _info(state, np.nan)
    slope = totals.pop("kernel_gradient")
    return _raise_bound(state, totals, slope, settings)


def _raise_bound(
    state: LMCAscentState, totals: Mapping[str, Array], slope: Array, settings: Settings
) -> tuple[LMCAscentState, LMCAscentInfo]:
    """Maximise over what is shared, and take a step of the kernels."""
    state = state._replace(age=state.age + 1)
    begun = state.age > settings.warmup
    best, shared = _maximise(totals, state.shared, state.roles, sweeps=settings.sweeps, select=begun)
    bound = server.bound(best, shared, state.roles.log_odds if begun else np.full(state.roles.latents, np.inf))
    bound += state.roles.slab_prior.log_density(shared.log_slab_sd)
    # Steps of one length go back and forth across the maximum for ever. Noise, and the selection's start, lower it too.
    fell = bound < state.bound - 1e-9 * (1.0 + abs(bound))
    lowered = fell and state.age > settings.warmup + 1 and not state.stochastic
    state = state._replace(pace=max(state.pace * (_SHORTER if lowered else 1.0), _SHORTEST))
    kernel, adam = kernel_step(state, slope, settings.kernel_rate * state.pace)
    change = float(np.max(np.abs(kernel - shared.kernel), initial=0.0))
    state = state._replace(shared=shared._replace(kernel=kernel), totals=best, adam=adam)
    state = state._replace(**progress(state, bound, change, settings.tolerance, begun=begun))
    return state, _info(state, change)


def _maximise(
    totals: Mapping[str, Array], shared: Globals, role: Roles, *, sweeps: int, select: bool
) -> tuple[Mapping[str, Array], Globals]:
    """Selection, inducing variables, sizes and σ_w in turn, each at the bound's maximum given the others."""
    for _ in range(sweeps):
        if select and np.all(np.isfinite(role.log_odds)):
            gamma = server.selection(*server.selection_terms(totals, shared), shared.inclusion, role.log_odds)
            shared = shared._replace(inclusion=gamma)
        mean, covariance = server.inducing(totals, shared.inclusion)
        totals, shared = server.rescale(totals, shared._replace(mean=mean, covariance=covariance))
        shared = shared._replace(log_slab_sd=server.slab(totals, shared.inclusion, role.slab_prior))
    return totals, shared


def _outcome(state: LMCAscentState, *, heard: bool) -> Message:
    """What a unit needs to know in the end, the covariance of v over all latent functions among it."""
    joint = np.eye(state.roles.latents * state.roles.points)
    if state.totals:
        joint = server.joint_covariance(state.totals, state.shared.inclusion)
    return outcome(state.shared, joint, heard=heard)


def _details(state: LMCAscentState) -> Mapping[str, tuple[tuple[str, ...], Array]]:
    return {"inclusion_probability": (("latent",), state.shared.inclusion)}


def _info(state: LMCAscentState, change: float) -> LMCAscentInfo:
    gamma = state.shared.inclusion
    undecided = int(np.sum(np.abs(gamma - 0.5) < 0.49))
    return LMCAscentInfo(float(state.bound), int(np.sum(gamma > 0.5)), undecided, change)
