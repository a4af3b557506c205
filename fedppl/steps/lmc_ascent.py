"""Federated coordinate ascent for coregionalised Gaussian processes that select their latent functions (FedLMC-SS)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl._lmc import server
from fedppl._lmc.bound import Globals, Roles, UnitState, curves, gradient, roles
from fedppl._lmc.result import draw, outcome, require_unit, sample
from fedppl._lmc.unit import best_unit, own_fit, random_unit, statistics
from fedppl.replies import sum_replies
from fedppl.steps._point import described
from fedppl.types import Algorithm, Array, DeclarationError, Layout, Message, Status

__all__ = ["LMCAscent", "LMCAscentInfo", "LMCAscentState"]


class LMCAscentState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    shared: Globals
    totals: Mapping[str, Array]  # sums of the units' statistics; empty before the first
    where: Mapping[str, int]  # client id to its row
    heard: Array  # (K,) units that ever replied
    number: int  # rounds with replies
    stochastic: int  # of those, rounds whose sums are noisy: some units, or mini-batches
    adam: Array  # (2, p) running first and second moment of the kernels' gradient
    bound: float
    quiet: int  # rounds in a row without a change worth telling
    status: str
    message: str


class LMCAscentInfo(NamedTuple):
    """Diagnostics of this round."""

    bound: float  # Σ V_m over the units, scaled up where not all replied; NaN in the first round
    selected: int  # latent functions with γ > 0.5
    undecided: int  # with γ between 0.01 and 0.99
    kernel_change: float  # largest change of a kernel parameter on the unconstrained space


class _Settings(NamedTuple):
    kernel_rate: float
    warmup: int
    sweeps: int
    batch_size: int | None
    forgetting: float
    tolerance: float
    initial_kernel: str


def LMCAscent(
    *,
    kernel_rate: float = 0.05,
    warmup: int = 10,
    sweeps: int = 3,
    batch_size: int | None = None,
    forgetting: float = 0.6,
    initial_kernel: str = "median",
    tolerance: float = 1e-6,
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
        Adam's step for the kernels' parameters on the log scale; 0 fixes them.
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
    settings = _checked(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel)
    return Algorithm(
        name="LMCAscent",
        check=require_unit,
        init_server=functools.partial(_init_server, settings=settings),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=_reply_shapes,
        refuse=_refuse,
        update_server=functools.partial(_update_server, settings=settings),
        outcome=lambda state, client_id: outcome(state.shared, _joint(state)),
        draw=draw,
        details=_details,
        sample=lambda state, count, rng: sample(state.roles, outcome(state.shared, _joint(state)), count, rng),
        settings=described(settings),
        binary=True,
    )


def _checked(
    kernel_rate: float,
    warmup: int,
    sweeps: int,
    batch_size: int | None,
    forgetting: float,
    tolerance: float,
    initial_kernel: str,
) -> _Settings:
    if not 0 <= kernel_rate < 1:
        raise DeclarationError(f"kernel_rate={kernel_rate} must lie between 0 and 1; 0 fixes the kernels.")
    for name, value, least in (("warmup", warmup, 0), ("sweeps", sweeps, 1)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise DeclarationError(f"{name}={value!r} must be a whole number, at least {least}.")
    if batch_size is not None and (not isinstance(batch_size, int | np.integer) or batch_size < 1):
        raise DeclarationError(f"batch_size={batch_size!r} must be a whole number, at least 1; None takes all rows.")
    if not 0.5 < forgetting <= 1:
        raise DeclarationError(f"forgetting={forgetting} must lie above 0.5 and not above 1, for the sums to settle.")
    if not 0 < tolerance < 1:
        raise DeclarationError(f"tolerance={tolerance} must lie between 0 and 1.")
    if initial_kernel not in ("median", "prior"):
        raise DeclarationError(f'initial_kernel={initial_kernel!r} must be "median" or "prior".')
    return _Settings(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel)


def _init_server(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: _Settings
) -> LMCAscentState:
    """Start from the prior, with every latent function in use."""
    del rng
    role = roles(layout)
    latents, points = role.latents, role.points
    ask = settings.initial_kernel == "median"
    return LMCAscentState(
        roles=role,
        shared=Globals(
            mean=np.zeros((latents, points)),
            covariance=np.broadcast_to(np.eye(points), (latents, points, points)).copy(),
            inclusion=np.ones(latents),
            kernel=role.kernel_mean,
            log_slab_sd=role.slab_prior.mean,
        ),
        totals={},
        where={client_id: k for k, client_id in enumerate(clients)},
        heard=np.zeros(len(clients), dtype=bool),
        number=0 if ask else 1,
        stochastic=0,
        adam=np.zeros((2, len(role.kernel))),
        bound=np.nan,
        quiet=0,
        status=Status.RUNNING.value,
        message="no round yet",
    )


def _broadcast(state: LMCAscentState, client_id: str) -> Message:
    """The shared parameters, and what is asked: a kernel of the unit's own (0), a first answer (1), statistics (2)."""
    stage = 0.0 if state.number == 0 else 1.0 if not state.totals else 2.0
    return {
        "mean": state.shared.mean,
        "covariance": state.shared.covariance,
        "inclusion": state.shared.inclusion,
        "kernel": state.shared.kernel,
        "log_slab_sd": np.array(state.shared.log_slab_sd),
        "stage": np.array(stage),
    }


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[UnitState, Message, Mapping[str, float]]:
    """Maximise over the unit's own parameters, and tell the statistics that remain."""
    unit, role = client.coregional, client.coregional.roles
    shared = read_globals(message)
    stage = int(message["stage"])
    if stage == 0:
        own = own_fit(unit, (role.kernel_mean, role.kernel_precision), role.slab_prior)
        fresh = random_unit(role.latents, float(np.median(own.log_noise_sd)), rng)
        rows = float(len(unit.response))
        return fresh, {"kernel": own.kernel, "rows": np.array(rows)}, {"rows": rows}
    rows_taken = None
    if settings.batch_size is not None and settings.batch_size < len(unit.response):
        rows_taken = np.sort(rng.choice(len(unit.response), settings.batch_size, replace=False))
    design = unit.design(shared.kernel, rows_taken)
    info = {"rows": float(len(unit.response))}
    if stage == 1:
        state = personal if personal is not None else random_unit(role.latents, unit.noise.mean, rng)
        curve = curves(design, shared.mean, shared.covariance)
    else:
        if personal is None:
            info["blank"] = 1.0
        start = unit.noise.mean if personal is None else personal.log_noise_sd
        state, curve = best_unit(design, shared, unit.noise, start)
    reply = statistics(design, curve, shared, state, unit.noise)
    pull = functools.partial(unit.kernel_gradient, shared.kernel, rows=rows_taken)
    slope = gradient(design, shared, state, unit.noise, role.log_odds, 0.0, pull)
    reply["precision"] = gaussian.pack_triangle(reply["precision"])
    reply["kernel_gradient"] = slope.kernel
    return state, reply, {**info, "noise_sd": float(np.exp(state.log_noise_sd))}


def read_globals(message: Message) -> Globals:
    """The shared parameters that a message carries."""
    mean, covariance, inclusion, kernel = (
        np.asarray(message[name], dtype=float) for name in ("mean", "covariance", "inclusion", "kernel")
    )
    return Globals(mean, covariance, inclusion, kernel, float(message["log_slab_sd"]))


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
    """Sums of squares and counts are never negative."""
    names = ("rows",) if state.number == 0 else ("penalty", "second", "units")
    for name in names:
        if np.any(np.asarray(message[name]) < 0):
            return f"{name!r} holds {np.min(message[name]):.3g}, which no data give"
    return None


def _update_server(
    state: LMCAscentState, replies: Mapping[str, Message], *, settings: _Settings
) -> tuple[LMCAscentState, LMCAscentInfo]:
    """Add up what came, and maximise over what is shared."""
    if not replies:
        return state, _info(state, np.nan)
    heard = state.heard.copy()
    heard[[state.where[client_id] for client_id in replies]] = True
    state = state._replace(heard=heard, number=state.number + 1)
    if "rows" in next(iter(replies.values())):
        return _start(state, replies)
    sums = sum_replies(replies)
    share = len(replies) / heard.sum()
    noisy = share < 1 or settings.batch_size is not None
    slope = sums.pop("kernel_gradient") / share
    sums["precision"] = gaussian.unpack_triangle(sums["precision"])
    sums = {name: value / share for name, value in sums.items()}
    rate = min(share, (1.0 + state.stochastic) ** -settings.forgetting) if noisy else 1.0
    rate = 1.0 if not state.totals else rate
    totals = {name: (1 - rate) * state.totals.get(name, 0.0) + rate * value for name, value in sums.items()}
    begun = state.number - 1 > settings.warmup
    shared = _maximise(totals, state.shared, state.roles, sweeps=settings.sweeps, select=begun)
    bound = server.bound(totals, shared, state.roles.log_odds if begun else np.full(state.roles.latents, np.inf))
    kernel, adam = _kernel_step(state, slope, settings.kernel_rate)
    change = float(np.max(np.abs(kernel - shared.kernel), initial=0.0))
    decided = bool(np.all(np.abs(shared.inclusion - 0.5) > 0.49))
    still = abs(bound - state.bound) < settings.tolerance * (1.0 + abs(bound)) and change < 1e-2
    state = state._replace(
        shared=shared._replace(kernel=kernel),
        totals=totals,
        stochastic=state.stochastic + noisy,
        adam=adam,
        bound=bound,
        quiet=state.quiet + 1 if still and decided and begun else 0,
    )
    done = state.quiet >= 5 and bool(np.all(state.heard))
    message = "" if done else f"the bound moves still ({bound:.6g}, kernels by {change:.2g} a round); raise rounds="
    status = (Status.CONVERGED if done else Status.RUNNING).value
    state = state._replace(status=status, message=message)
    return state, _info(state, change)


def _start(state: LMCAscentState, replies: Mapping[str, Message]) -> tuple[LMCAscentState, LMCAscentInfo]:
    """The median of the units' own kernels is where the kernels start."""
    names = sorted(replies)
    own = np.stack([np.asarray(replies[name]["kernel"], dtype=float) for name in names])
    rows = np.array([float(replies[name]["rows"]) for name in names])
    kernel = server.median(own, rows)
    change = float(np.max(np.abs(kernel - state.shared.kernel), initial=0.0))
    state = state._replace(shared=state.shared._replace(kernel=kernel), message="kernels have a start; raise rounds=")
    return state, _info(state, change)


def _maximise(totals: Mapping[str, Array], shared: Globals, role: Roles, *, sweeps: int, select: bool) -> Globals:
    """Selection, inducing variables and σ_w in turn, each at the bound's maximum given the others."""
    for _ in range(sweeps):
        if select and np.all(np.isfinite(role.log_odds)):
            gamma = server.selection(*server.selection_terms(totals, shared), shared.inclusion, role.log_odds)
            shared = shared._replace(inclusion=gamma)
        mean, covariance = server.inducing(totals, shared.inclusion)
        shared = shared._replace(mean=mean, covariance=covariance)
        shared = shared._replace(log_slab_sd=server.slab(totals, shared.inclusion, role.slab_prior))
    return shared


def _kernel_step(state: LMCAscentState, slope: Array, rate: float) -> tuple[Array, Array]:
    """One Adam step uphill, with the prior of the kernels' parameters."""
    role, kernel = state.roles, state.shared.kernel
    slope = slope - role.kernel_precision @ (kernel - role.kernel_mean)
    first, second = 0.9 * state.adam[0] + 0.1 * slope, 0.999 * state.adam[1] + 0.001 * slope**2
    count = max(state.number - 1, 1)
    step = (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
    return kernel + rate * step, np.stack([first, second])


def _joint(state: LMCAscentState) -> Array:
    """Covariance of v over all latent functions at once."""
    if not state.totals:
        return np.eye(state.roles.latents * state.roles.points)
    return server.joint_covariance(state.totals, state.shared.inclusion)


def _details(state: LMCAscentState) -> Mapping[str, tuple[tuple[str, ...], Array]]:
    return {"inclusion_probability": (("latent",), state.shared.inclusion)}


def _info(state: LMCAscentState, change: float) -> LMCAscentInfo:
    gamma = state.shared.inclusion
    undecided = int(np.sum(np.abs(gamma - 0.5) < 0.49))
    return LMCAscentInfo(float(state.bound), int(np.sum(gamma > 0.5)), undecided, change)
