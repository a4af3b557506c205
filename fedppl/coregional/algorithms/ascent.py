"""Coordinate ascent for coregionalised Gaussian processes, by sums of the units' statistics (FedLMC-SS, FedLMC)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Needs, Received, Replies, Report, sum_replies
from fedppl.coregional.algorithms import _common, ending
from fedppl.coregional.bound import (
    Globals,
    Roles,
    UnitClientState,
    bound_of_sums,
    curves,
    design_slopes,
    joint_covariance,
    maximise,
)
from fedppl.coregional.unit import best_unit, draw, message_of, random_unit, shared_in, statistics, towards
from fedppl.coregional.view import roles, unit_of
from fedppl.settings import between, described, whole
from fedppl.types import Array, Layout, Message, Rng


class Settings(NamedTuple):
    """Settings of the ascents."""

    kernel_rate: float
    warmup: int
    sweeps: int
    batch_size: int | None
    forgetting: float
    tolerance: float
    initial_kernel: str


def PointAscent(
    *,
    kernel_rate: float = 0.05,
    warmup: int = 10,
    sweeps: int = 3,
    batch_size: int | None = None,
    forgetting: float = 0.6,
    initial_kernel: str = "median",
    tolerance: float = 1e-3,
) -> Algorithm[AscentState, UnitClientState]:
    r"""Coordinate ascent on the bound of FedLMC, in which coefficients are parameters; for comparison with `Ascent`.

    .. math:: \max_{w, \sigma, q(v)} \sum_m \left( E_{q(v)} \log p(y_m \mid w_m, v) + \log p(w_m \mid \sigma_w) \right)
              - \operatorname{KL}(q(v) \,\|\, p(v))

    The coefficients w_m of a unit and its noise are at the mode, with their declared priors; the latent functions have
    a posterior. A mode in w and σ_w together would be one where both are near 0, so that σ_w stays at its prior's
    median: the larger that is, the nearer w is to maximum likelihood. Declare ``inclusion=None``, and share no
    ``included``.

    Parameters
    ----------
    kernel_rate, warmup, sweeps, batch_size, forgetting, initial_kernel, tolerance
        As in `Ascent`; without a selection `warmup` is the least number of rounds, in which a fit waits for units.

    Returns
    -------
    Algorithm
        Its fit has draws of v and the estimates; see `fedppl.curves` for predictions in closed form.

    Notes
    -----
    *When this fails.* Where a unit has few rows, or a gap, its coefficients are not known, and intervals that take them
    for known are too narrow. Use `Ascent` unless you want point estimates.

    References
    ----------
    .. [1] Gao and Chung, section 5, the models FedLMC and LMC; eq. 17 has coefficients as parameters too.
    """
    settings = Settings(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel)
    return _ascent("curves.PointAscent", settings, _common.NEEDS_NO_SELECTION, spread=0.0)


# Federated coordinate ascent for coregionalised Gaussian processes that select their latent functions (FedLMC-SS) -----


def Ascent(
    *,
    kernel_rate: float = 0.05,
    warmup: int = 10,
    sweeps: int = 3,
    batch_size: int | None = None,
    forgetting: float = 0.6,
    initial_kernel: str = "median",
    tolerance: float = 1e-3,
) -> Algorithm[AscentState, UnitClientState]:
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
        Adam learning rate for the kernels' parameters on the log scale, shorter by 0.7 after every round that lowered
        the bound; 0 fixes them. In the end phase quasi-Newton steps take over (docs/fedlmc_ss.md, "When it ends").
    warmup
        Number of rounds before the selection begins; until then every γ is 1.
    sweeps
        Number of times a round that the server maximises over q(α), q(v) and σ_w in turn.
    batch_size
        Number of rows of a unit's mini-batch, drawn anew each round (stochastic natural gradients); by default all.
    forgetting
        Exponent between 0.5 and 1: where sums are noisy, because some units did not reply or rows are drawn, the t-th
        of such rounds counts by (1 + t)^(-forgetting).
    initial_kernel
        Start of the kernels' parameters. "median": every unit first fits a Gaussian process to its own rows, and the
        server takes the median of their kernel parameters, weighted by rows. "prior": the prior's median.
    tolerance
        Gain in nats of the bound, with the priors of the kernels' parameters, that by an estimate remains when a fit
        has converged: shared parameters are then within √(2 · tolerance) posterior sds of the maximum, whatever the
        size and units of the data. With noisy sums there is no estimate, and no fit converges.

    Returns
    -------
    Algorithm
        Its fit has draws of v, the indicators and the estimates; see `fedppl.curves` for predictions in closed form.

    Notes
    -----
    *When this fails.* The bound has local maxima: a length-scale that is far too long at the start, say, makes the
    selection drop functions that are needed, and γ then stays 0. A fit may end at a saddle point, where two
    latent functions of nearly the same length-scale are mixed. Compare a few seeds, and read
    ``fit.idata["rounds"]["selected"]``. Intervals of the mean field are too narrow where a unit has no rows;
    `fedppl.curves.predict` adds what it leaves out.

    References
    ----------
    .. [1] Gao and Chung, Federated automatic latent variable selection in multi-output Gaussian processes, section 4,
       eqs. 10 to 16.
    .. [2] Titsias and Lázaro-Gredilla (2011), Spike and slab variational inference, NeurIPS, section 3.
    .. [3] Hoffman et al. (2013), Stochastic variational inference, JMLR 14, eqs. 24 to 26.
    .. [4] Sidi (2017), Vector Extrapolation Methods with Applications, SIAM, section 2.
    """
    settings = Settings(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel)
    return _ascent("curves.Ascent", settings, _common.NEEDS, spread=1.0)


# Rounds of the coordinate ascents that send all products of their latent functions: state, sums, the server's part ----

_SHORTER, _SHORTEST_STEP = 0.7, 0.01


class Collecting(NamedTuple):
    """Random coefficients of the units are added up, until there are curves."""

    totals: Mapping[str, Array] = {}  # sums of the units' statistics; empty before the first


class Climbing(NamedTuple):
    """The bound is raised."""

    totals: Mapping[str, Array]
    adam: Array  # (2, p) running first and second moment of the kernels' gradient
    age: int = 0  # rounds with replies since there are curves
    stochastic: int = 0  # of those rounds, how many whose sums are noisy: some units, or mini-batches
    pace: float = 1.0  # of the kernels' steps: shorter after every round that lowered the bound
    bound: float = np.nan
    path: ending.Trail | ending.Rest = ending.Trail()  # at rest once the bound and the kernels hardly move


class AscentState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    shared: Globals
    where: Mapping[str, int]  # client id to its row
    has_replied: NDArray[np.bool_]  # (K,) whether a unit ever sent statistics
    number: int  # rounds with replies
    phase: Collecting | Climbing = Collecting()

    @property
    def sent(self) -> Globals:
        """Shared parameters that units are sent: the present ones, or a proposal."""
        if isinstance(self.phase, Climbing) and isinstance(self.phase.path, ending.Rest):
            return self.phase.path.cycle.trial or self.shared
        return self.shared

    @property
    def joint(self) -> Array:
        """cov(v) (LQ, LQ)."""
        if not self.phase.totals:
            return np.eye(self.roles.latents * self.roles.points)
        return joint_covariance(self.phase.totals, self.shared.inclusion)

    @property
    def bound(self) -> float:
        """The bound after the last round; NaN before there are curves."""
        return self.phase.bound if isinstance(self.phase, Climbing) else np.nan


def _ascent(name: str, settings: Settings, needs: Needs, *, spread: float) -> Algorithm[AscentState, UnitClientState]:
    """An ascent whose coefficients have a posterior, with a `spread` of 1, or are point estimates, with one of 0."""
    settings = Settings(
        between("kernel_rate", settings.kernel_rate, 0, 1, "[)", "0 fixes the kernels"),
        whole("warmup", settings.warmup, 0),
        whole("sweeps", settings.sweeps),
        _common.batch_size_rule(settings.batch_size),
        between("forgetting", settings.forgetting, 0.5, 1, "(]", "or the sums do not settle"),
        between("tolerance", settings.tolerance, 0, 1),
        _common.initial_kernel_rule(settings.initial_kernel),
    )
    return Algorithm[AscentState, UnitClientState](
        name=name,
        settings=described(settings),
        init=functools.partial(_init, settings=settings),
        broadcast=functools.partial(_broadcast, settings=settings),
        update_client=functools.partial(_update_client, batch_size=settings.batch_size, spread=spread),
        update_server=functools.partial(_update_server, settings=settings, spread=spread),
        replies=Replies(_shapes, _reject, lambda state: bool(np.all(state.has_replied))),
        result=_common.read(draw, tests_convergence=True, point=spread == 0),
        needs=needs,
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, settings: Settings) -> AscentState:
    role = roles(layout)
    return AscentState(
        roles=role,
        shared=_common.prior_globals(role),
        where={client_id: k for k, client_id in enumerate(clients)},
        has_replied=np.zeros(len(clients), dtype=bool),
        number=0 if settings.initial_kernel == "median" else 1,
    )


def _broadcast(state: AscentState, client_id: str, *, settings: Settings) -> Message:
    """The shared parameters, or a proposal; its stage asks for kernels (0), a start (1) or statistics (2)."""
    stage = 0.0 if state.number == 0 else 1.0 if isinstance(state.phase, Collecting) else 2.0
    packed = gaussian.pack_triangle(state.sent.covariance)
    return message_of(state.sent, covariance=packed, stage=stage, rate=_noisy_rate(state, settings))


def _noisy_rate(state: AscentState, settings: Settings) -> float:
    """The weight of a noisy estimate in this round."""
    noisy = state.phase.stochastic if isinstance(state.phase, Climbing) else 0
    return float((1.0 + noisy) ** -settings.forgetting)


def _update_server(
    state: AscentState, received: Received, *, settings: Settings, spread: float
) -> tuple[AscentState, Report]:
    """Add up the replies, and maximise over the shared parameters."""
    if not received.clients:
        return state, Report(ending.info(state.bound, state.shared, np.nan))
    first, state = state.number == 0, state._replace(number=state.number + 1)
    if first:
        kernel = _common.median_kernel(received.each)
        report = Report(
            ending.info(state.bound, state.shared, ending.largest(kernel - state.shared.kernel)),
            message=_common.STARTED,
        )
        return state._replace(shared=state.shared._replace(kernel=kernel)), report
    climb = state.phase
    if isinstance(climb, Collecting):
        return _collect(state, climb, received, settings, spread)
    has_replied = state.has_replied.copy()  # a round brings sums alone only once every unit has replied
    has_replied[[state.where[client_id] for client_id in received.single()]] = True
    share = received.clients / has_replied.sum()
    noisy = bool(share < 1) or settings.batch_size is not None
    rate = min(share, _noisy_rate(state, settings)) if noisy else 1.0
    sums = _unpacked(received.sums())
    slope = sums.pop("kernel_gradient") / share
    totals = {name: (1 - rate) * climb.totals[name] + rate * value / share for name, value in sums.items()}
    state = state._replace(has_replied=has_replied, phase=climb._replace(stochastic=climb.stochastic + noisy))
    return _raise_bound(state, totals, slope, settings, spread, noisy=noisy)


def _unpacked(sums: Message) -> dict[str, Array]:
    return {**sums, "precision": gaussian.unpack_triangle(sums["precision"])}


def _collect(
    state: AscentState, before: Collecting, received: Received, settings: Settings, spread: float
) -> tuple[AscentState, Report]:
    """Add up random starts, one of each unit, until all are in or the warm-up is over.

    From the start of one unit alone all latent functions would take the shape of one curve.
    """
    new = {name: reply for name, reply in received.each.items() if not state.has_replied[state.where[name]]}
    has_replied, totals = state.has_replied.copy(), dict(before.totals)
    has_replied[[state.where[name] for name in new]] = True
    if new:
        totals = {name: totals.get(name, 0.0) + value for name, value in _unpacked(sum_replies(new)).items()}
    state = state._replace(has_replied=has_replied, phase=Collecting(totals))
    if not np.all(has_replied) and state.number - 1 <= settings.warmup:
        message = "not all units have replied yet; raise rounds="
        return state, Report(ending.info(state.bound, state.shared, np.nan), message=message)
    slope = totals.pop("kernel_gradient")
    state = state._replace(phase=Climbing(totals, np.zeros((2, len(state.roles.kernel)))))
    return _raise_bound(state, totals, slope, settings, spread, noisy=True)


def _raise_bound(
    state: AscentState, totals: Mapping[str, Array], slope: Array, settings: Settings, spread: float, *, noisy: bool
) -> tuple[AscentState, Report]:
    assert isinstance(state.phase, Climbing)
    climb = state.phase._replace(age=state.phase.age + 1)
    role, before, sent, path = state.roles, climb.bound, state.sent, climb.path
    if noisy and isinstance(path, ending.Rest):  # gains are too uncertain for the end's steps
        rest, path = path, ending.Trail()
        if rest.cycle.trial is not None:
            report = ending.report(before, state.shared, 0.0, rest.left, arrived=False, noisy=True)
            return state._replace(phase=climb._replace(path=path)), report
    begun = climb.age > settings.warmup
    totals, shared = maximise(totals, sent, role, sweeps=settings.sweeps, select=begun, spread=spread)
    bound = bound_of_sums(totals, shared, role.log_odds if begun else np.full(role.latents, np.inf))
    bound += role.slab_prior.log_density(shared.log_slab_sd)
    value = bound + ending.log_prior(role, sent.kernel)
    slope = slope - role.kernel_precision @ (sent.kernel - role.kernel_mean)
    if isinstance(path, ending.Rest):
        result, fixed = ending.Round(sent, shared, value, slope), settings.kernel_rate == 0
        rest, reached = ending.polished(path, role, result, settings.tolerance, fixed=fixed)
        climb, change = climb._replace(path=rest), 0.0
        if reached is not None:
            change = ending.largest(reached.kernel - state.shared.kernel)
            state, climb = state._replace(shared=reached), climb._replace(totals=totals, bound=bound)
        report = ending.report(climb.bound, state.shared, change, rest.left, arrived=rest.arrived, noisy=False)
        return state._replace(phase=climb), report
    # Steps of one length would oscillate around the maximum. Noise and the selection's start lower the bound too.
    fell = bound < before - 1e-9 * (1.0 + abs(bound))
    lowered = fell and climb.age > settings.warmup + 1 and not climb.stochastic
    pace = max(climb.pace * (_SHORTER if lowered else 1.0), _SHORTEST_STEP)
    steps = state.number - 2.0  # rounds in which sums waited for units count too
    moments = _common.Adam(climb.adam[0], climb.adam[1], steps)
    kernel, moments = _common.adam_step(sent.kernel, slope, moments, settings.kernel_rate * pace)
    change, turned = ending.largest(kernel - sent.kernel), ending.largest(shared.inclusion - sent.inclusion)
    shared = shared._replace(kernel=kernel)
    trail = ending.Trail() if noisy else ending.longer(path, value, kernel)  # noisy sums are of other data
    calm = begun and bool(np.all(state.has_replied)) and change < 1e-2 and turned < 1e-2 and ending.nearly_still(trail)
    after = ending.Rest(ending.Cycle((shared,))) if calm else trail
    climb = Climbing(totals, np.stack(moments[:2]), climb.age, climb.stochastic, pace, bound, after)
    state = state._replace(shared=shared, phase=climb)
    return state, ending.report(bound, shared, change, ending.left_after(trail), arrived=False, noisy=noisy)


def _shapes(state: AscentState) -> Mapping[str, tuple[int, ...]]:
    latents, points = state.roles.latents, state.roles.points
    if state.number == 0:
        return _common.first_shapes(state.roles)
    size = latents * points
    return {
        "precision": (size * (size + 1) // 2,),
        "linear": (latents, points),
        **dict.fromkeys(("penalty", "second", "log_variance"), (latents,)),
        **dict.fromkeys(("constant", "units"), ()),
        "kernel_gradient": state.roles.kernel.shape,
    }


def _reject(state: AscentState, reply: Message) -> str | None:
    """Why a reply is rejected that no data give, or None."""
    reason = _common.reject_negative(reply, *(("penalty", "second", "units") if state.number else ("rows",)))
    if reason or state.number == 0:
        return reason
    precision = gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
    level = 1e-9 * (1.0 + float(np.max(np.abs(np.diag(precision)))))
    try:
        np.linalg.cholesky(precision + level * np.eye(len(precision)))
    except np.linalg.LinAlgError:
        return "'precision' is not positive semi-definite, which no data give"
    return None


def _update_client(
    client: ClientView,
    personal: UnitClientState | None,
    message: Message,
    rng: Rng,
    *,
    batch_size: int | None,
    spread: float,
) -> ClientUpdate[UnitClientState]:
    """ψ_m at its maximum given the message, or random coefficients before there are curves, and its statistics."""
    unit = client.view(unit_of)
    count, size = len(unit.response), unit.roles.slab_prior.mean
    info = {"rows": float(count)}
    if float(message["stage"]) == 0:
        return ClientUpdate(*_common.first_answer(unit, rng, log_sd=size, spread=spread), info)
    shared = shared_in(message, gaussian.unpack_triangle(message["covariance"]))
    rows = _common.batch(count, batch_size, rng)
    design = unit.design(shared.kernel, rows)
    if float(message["stage"]) == 1:
        state = personal or random_unit(unit.roles.latents, unit.noise.mean, rng, log_sd=size, spread=spread)
    else:
        if personal is None:
            info["blank"] = 1.0
        start = unit.noise.mean if personal is None else personal.log_noise_sd
        state, _ = best_unit(design, shared, unit.noise, start, spread=spread)
        if rows is not None and personal is not None:
            state = towards(personal, state, float(message["rate"]))
    slope = design_slopes(design, shared, state, curves(design, shared))
    reply = statistics(design, state, unit.noise)
    reply["precision"] = gaussian.pack_triangle(reply["precision"])
    reply["kernel_gradient"] = unit.kernel_gradient(shared.kernel, slope.projection, slope.variance, rows)
    info["noise_sd"] = float(np.exp(state.log_noise_sd))
    return ClientUpdate(state, reply, info)
