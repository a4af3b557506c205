"""Coordinate ascent for coregionalised Gaussian processes whose coefficients are point estimates (FedLMC, LMC)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import Algorithm, Needs, Received, Replies, Report, sum_replies
from fedppl.coregional.algorithms import _common
from fedppl.coregional.bound import (
    Globals,
    Roles,
    UnitClientState,
    bound_of_sums,
    flatten,
    inducing,
    joint_covariance,
    maximise,
    rescale,
    unflatten,
)
from fedppl.coregional.unit import POINT, POSTERIOR, UnitUpdates, draw
from fedppl.coregional.view import roles
from fedppl.settings import described
from fedppl.types import Array, Layout, Message


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
    settings = _common.checked(
        _common.Settings(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel)
    )
    return ascent("curves.PointAscent", settings, POINT, _maximise, _common.NEEDS_NO_SELECTION)


def _maximise(
    totals: Mapping[str, Array], shared: Globals, role: Roles, *, sweeps: int, select: bool
) -> tuple[Mapping[str, Array], Globals]:
    """Inducing variables and sizes in turn; σ_w stays where it is."""
    for _ in range(sweeps):
        mean, covariance = inducing(totals, shared.inclusion)
        totals, shared = rescale(totals, shared._replace(mean=mean, covariance=covariance), spread=0.0)
    return totals, shared


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
    settings = _common.checked(
        _common.Settings(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel)
    )
    return ascent("curves.Ascent", settings, POSTERIOR, maximise, _common.NEEDS)


# Rounds of the coordinate ascents that send all products of their latent functions: state, sums, the server's part ----

_SHORTER, _SHORTEST_STEP = 0.7, 0.01


class AscentState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    shared: Globals
    totals: Mapping[str, Array]  # sums of the units' statistics; empty before the first
    where: Mapping[str, int]  # client id to its row
    has_replied: NDArray[np.bool_]  # (K,) whether a unit ever sent statistics
    collecting: bool  # whether sums are still of the random coefficients at the start
    number: int  # rounds with replies
    age: int  # of those, rounds since there are curves
    stochastic: int  # of those, rounds whose sums are noisy: some units, or mini-batches
    adam: Array  # (2, p) running first and second moment of the kernels' gradient
    pace: float  # of the kernels' steps: shorter after every round that lowered the bound
    bound: float
    trail: _common.Trail
    rest: Rest | None  # once the bound and the kernels are nearly at rest


# Selection, inducing variables, sizes and σ_w at their best, from the sums; `select`: whether γ moves.
Maximise = Callable[..., tuple[Mapping[str, Array], Globals]]


def ascent(
    name: str, settings: _common.Settings, updates: UnitUpdates, maximise: Maximise, needs: Needs
) -> Algorithm[AscentState, UnitClientState]:
    """An algorithm from the units' updates of their own parameters and the server's of the shared ones."""
    return Algorithm[AscentState, UnitClientState](
        name=name,
        settings=described(settings),
        init=functools.partial(_init, settings=settings),
        broadcast=functools.partial(_broadcast, settings=settings),
        update_client=functools.partial(_common.update_client, batch_size=settings.batch_size, updates=updates),
        update_server=functools.partial(_update_server, settings=settings, maximise=maximise),
        replies=Replies(_shapes, _reject, lambda state: bool(np.all(state.has_replied))),
        result=_common.read(
            lambda state: state.roles,
            lambda state: state.shared,
            _joint,
            lambda state: (state.where, state.has_replied),
            draw,
            tests_convergence=True,
            point=updates is POINT,
        ),
        needs=needs,
    )


def _init(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: _common.Settings
) -> AscentState:
    """Start from the prior, with every latent function in use."""
    role = roles(layout)
    return AscentState(
        roles=role,
        shared=_common.prior_globals(role),
        totals={},
        where={client_id: k for k, client_id in enumerate(clients)},
        has_replied=np.zeros(len(clients), dtype=bool),
        collecting=True,
        number=0 if settings.initial_kernel == "median" else 1,
        age=0,
        stochastic=0,
        adam=np.zeros((2, len(role.kernel))),
        pace=1.0,
        bound=np.nan,
        trail=_common.no_trail(len(role.kernel)),
        rest=None,
    )


def _broadcast(state: AscentState, client_id: str, *, settings: _common.Settings) -> Message:
    """The shared parameters, or a proposal."""
    stage = 0.0 if state.number == 0 else 1.0 if state.collecting else 2.0
    return _common.sent(_sent(state), stage, _common.noisy_rate(state.stochastic, settings))


def _sent(state: AscentState) -> Globals:
    """Shared parameters that units are sent: the present ones, or a proposal."""
    return state.shared if state.rest is None or state.rest.trial is None else state.rest.trial


def _update_server(
    state: AscentState, received: Received, *, settings: _common.Settings, maximise: Maximise
) -> tuple[AscentState, Report]:
    """Add up the replies, and maximise over the shared parameters."""
    if not received.clients:
        return state, Report(_common.info(state.bound, state.shared, np.nan))
    first, state = state.number == 0, state._replace(number=state.number + 1)
    if first:
        shared, started = _common.kernel_start(state.shared, received, state.bound)
        return state._replace(shared=shared), started
    if state.collecting:
        return _collect(state, received, settings, maximise)
    has_replied, share, noisy, rate = _common.share_of(
        received, state.where, state.has_replied, state.stochastic, settings
    )
    sums = _unpacked(received.sums())
    slope = sums.pop("kernel_gradient") / share
    totals = {name: (1 - rate) * state.totals[name] + rate * value / share for name, value in sums.items()}
    state = state._replace(has_replied=has_replied, stochastic=state.stochastic + noisy)
    return _raise_bound(state, totals, slope, settings, maximise, noisy=noisy)


def _unpacked(sums: Message) -> dict[str, Array]:
    return {**sums, "precision": gaussian.unpack_triangle(sums["precision"])}


def _collect(
    state: AscentState, received: Received, settings: _common.Settings, maximise: Maximise
) -> tuple[AscentState, Report]:
    """Add up random starts, one of each unit, until all are in or the warm-up is over.

    From the start of one unit alone all latent functions would take the shape of one curve.
    """
    new = {name: reply for name, reply in received.each.items() if not state.has_replied[state.where[name]]}
    has_replied = state.has_replied.copy()
    has_replied[[state.where[name] for name in new]] = True
    totals = dict(state.totals)
    if new:
        sums = _unpacked(sum_replies(new))
        totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
    done = bool(np.all(has_replied)) or state.number - 1 > settings.warmup
    state = state._replace(has_replied=has_replied, totals=totals, collecting=not done)
    if not done:
        message = "not all units have replied yet; raise rounds="
        return state, Report(_common.info(state.bound, state.shared, np.nan), message=message)
    slope = totals.pop("kernel_gradient")
    return _raise_bound(state, totals, slope, settings, maximise, noisy=True)


def _raise_bound(
    state: AscentState,
    totals: Mapping[str, Array],
    slope: Array,
    settings: _common.Settings,
    maximise: Maximise,
    *,
    noisy: bool,
) -> tuple[AscentState, Report]:
    """Maximise over the shared parameters, and take a step of the kernels."""
    role, before, age, sent = state.roles, state.bound, state.age + 1, _sent(state)
    if noisy and state.rest is not None:  # gains are too uncertain for the end's steps
        trying, remaining = state.rest.trial is not None, state.rest.left
        state = state._replace(rest=None, trail=_common.no_trail(len(role.kernel)))
        if trying:
            return state._replace(age=age), _common.report(
                state.bound, state.shared, 0.0, remaining, arrived=False, noisy=True
            )
    begun = age > settings.warmup
    best, shared = maximise(totals, sent, role, sweeps=settings.sweeps, select=begun)
    bound = bound_of_sums(best, shared, role.log_odds if begun else np.full(role.latents, np.inf))
    bound += role.slab_prior.log_density(shared.log_slab_sd)
    value = bound + _common.log_prior(role, sent.kernel)
    if state.rest is not None:
        slope = slope - role.kernel_precision @ (sent.kernel - role.kernel_mean)
        result, fixed = Round(sent, shared, value, slope), settings.kernel_rate == 0
        rest, reached = polished(state.rest, role, result, settings.tolerance, fixed=fixed)
        change = 0.0
        if reached is not None:
            change = float(np.max(np.abs(reached.kernel - state.shared.kernel), initial=0.0))
            state = state._replace(shared=reached, totals=best, bound=bound)
        state = state._replace(age=age, rest=rest)
        return state, _common.report(state.bound, state.shared, change, rest.left, arrived=rest.arrived, noisy=False)
    # Steps of one length would oscillate around the maximum. Noise and the selection's start lower the bound too.
    fell = bound < before - 1e-9 * (1.0 + abs(bound))
    lowered = fell and age > settings.warmup + 1 and not state.stochastic
    pace = max(state.pace * (_SHORTER if lowered else 1.0), _SHORTEST_STEP)
    rate, number = settings.kernel_rate * pace, max(state.number - 1, 1)
    kernel, adam, change = _common.kernel_step(role, shared.kernel, state.adam, slope, rate, number)
    shared = shared._replace(kernel=kernel)
    trail = _common.longer(state.trail, value, kernel, noisy=noisy)
    turned = float(np.max(np.abs(shared.inclusion - sent.inclusion), initial=0.0))
    calm = begun and bool(np.all(state.has_replied)) and change < 1e-2 and turned < 1e-2 and _common.nearly_still(trail)
    state = state._replace(shared=shared, totals=best, age=age, adam=adam, pace=pace, bound=bound, trail=trail)
    state = state._replace(rest=at_rest(shared) if calm else None)
    return state, _common.report(bound, shared, change, _common.left_after(trail), arrived=False, noisy=noisy)


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


def _joint(state: AscentState) -> Array:
    """Covariance of v over all latent functions."""
    if not state.totals:
        return np.eye(state.roles.latents * state.roles.points)
    return joint_covariance(state.totals, state.shared.inclusion)


# The end of a coordinate ascent, once the bound hardly moves: quasi-Newton steps of the kernels, extrapolation --------

# The inducing variables depend on the kernel, so that a step of the kernel given them is short, and alternating steps
# are slow. Here the kernels stay for some rounds until all else has converged. Then their slope is that of the bound
# maximised over all else, and a step along it may be long (BFGS). Where all else converges slowly, its limit has a
# closed form from the steps of some rounds in a row: near the end a round is nearly linear, and errors shrink by its
# eigenvalues (reduced rank extrapolation, Sidi 2017, section 2). The server computes all of it from the same sums.

_SETTLED, _CYCLE = 3, 8  # rounds before a step of the kernels is judged, and before all else is extrapolated
_SEEN = 3  # last cycles, of whose ratios of gains the largest counts
_FIRST, _FAR = 0.05, 0.3  # largest change of a kernel's log parameter, in the first step and in any
_SHORTEST_POLISHED = 1e-4
_ROUNDING = 1e-9  # of the value: a smaller fall is rounding
_WILD = 1e3  # prior sds or logs: a longer step is refused


class Round(NamedTuple):
    """The result of a round."""

    sent: Globals
    best: Globals  # given the sums, at the kernels that were sent
    value: float  # at the best
    slope: Array  # of the value in the kernels' parameters


class Stand(NamedTuple):
    """The result before a step of the kernels, by which the step is judged."""

    shared: Globals
    value: float
    slope: Array


class Rest(NamedTuple):
    """The state of an ascent that hardly moves."""

    path: tuple[Globals, ...]  # shared parameters of successive rounds with the same kernels
    trail: _common.Trail  # their values
    slope: Array | None  # in the last of them
    trial: Globals | None  # a proposal that units are sent in place of the shared parameters
    stand: Stand | None  # before the last step of the kernels
    judging: bool  # whether the proposal is that step
    curvature: Array | None  # (p, p) of minus the value in the kernels' parameters
    radius: float  # of a step of the kernels
    ratios: tuple[float, ...]  # of gains at the ends of the last cycles
    reached: float  # value at the end of the last cycle, if only an extrapolation followed
    values: tuple[float, ...]  # of all accepted rounds so far
    refused: bool  # whether the last extrapolation was
    left: _common.Left
    arrived: bool


def at_rest(shared: Globals) -> Rest:
    """The first state of the end phase."""
    return Rest(
        path=(shared,),
        trail=_common.no_trail(len(shared.kernel)),
        slope=None,
        trial=None,
        stand=None,
        judging=False,
        curvature=None,
        radius=_FIRST,
        ratios=(),
        reached=np.nan,
        values=(),
        refused=False,
        left=_common.Left(np.nan, np.nan, 1.0),
        arrived=False,
    )


def polished(rest: Rest, role: Roles, result: Round, tolerance: float, *, fixed: bool) -> tuple[Rest, Globals | None]:
    """The state after one more round, and the new shared parameters; None where the old ones stay."""
    if rest.trial is not None and not rest.judging:  # an extrapolation
        last = rest.trail.values[-1]
        if not result.value >= last - _ROUNDING * (1.0 + abs(last)):
            return _from(rest, rest.path[-1])._replace(refused=True), None
        rest = _from(rest, result.sent)._replace(refused=False)
    trail = _common.longer(rest.trail, result.value, result.best.kernel, noisy=False)
    before, rest = rest.slope, rest._replace(path=(*rest.path, result.best), trail=trail, slope=result.slope)
    if rest.judging:
        rest = _judged_step(rest, result)
        if rest.trial is not None or len(rest.trail.values) == 0:
            return rest, None
    step, rest = _newton(rest, role, result, fixed=fixed)
    creeping = _common.left_after(rest.trail, rest.ratios)
    # Twice the gain of a quadratic, since the curvature is an estimate.
    gain = float(result.slope @ step)
    rest = rest._replace(values=(*rest.values, result.value))
    # Both estimates miss slow parts beside fast ones, and a curvature that is too large.
    nats = max(creeping.nats + gain, _common.gained_of_late(rest.values))
    left = _common.Left(nats, float(np.max(np.abs(step), initial=0.0)), creeping.ratio)
    small, count = left.small(tolerance), len(trail.values)
    if count > 4:  # before, there is no ratio of gains
        rest = rest._replace(left=left)
    steady = before is not None and np.max(np.abs(result.slope - before)) <= 0.1 * np.max(np.abs(result.slope))
    if count >= _SETTLED and steady and not small and (gain > creeping.nats or rest.refused):
        return _stepped(rest, result, step), result.best
    if count <= _CYCLE:
        return rest, result.best
    arrived = small and result.value - rest.reached < tolerance
    ratios, trial = (*rest.ratios, left.ratio)[-_SEEN:], extrapolated(rest.path, role)
    rest = rest._replace(reached=result.value, ratios=ratios, arrived=arrived)
    return (rest._replace(trial=trial) if trial is not None else _from(rest, result.best)), result.best


def _from(rest: Rest, shared: Globals) -> Rest:
    """New rounds from these shared parameters, without a proposal."""
    return rest._replace(
        path=(shared,), trail=_common.no_trail(len(shared.kernel)), slope=None, trial=None, judging=False
    )


def _newton(rest: Rest, role: Roles, result: Round, *, fixed: bool) -> tuple[Array, Rest]:
    """The kernels' step to the maximum by the present estimate of the curvature, which starts from the slope."""
    if fixed:
        return np.zeros_like(result.slope), rest
    curvature = rest.curvature
    if curvature is None:
        curvature = np.diag(np.maximum(np.abs(result.slope) / _FIRST, np.diag(role.kernel_precision)))
        rest = rest._replace(curvature=curvature if len(rest.trail.values) >= _SETTLED else None)
    elif rest.stand is not None:
        curvature = _learnt(curvature, result.best.kernel - rest.stand.shared.kernel, rest.stand.slope - result.slope)
    return np.asarray(np.linalg.solve(curvature, result.slope), dtype=float), rest


def _stepped(rest: Rest, result: Round, step: Array) -> Rest:
    """Propose a step of the kernels once all else has converged, and update the curvature by the last step."""
    if rest.stand is not None and rest.curvature is not None:
        moved, turned = result.best.kernel - rest.stand.shared.kernel, rest.stand.slope - result.slope
        rest = rest._replace(curvature=_learnt(rest.curvature, moved, turned))
    length = max(float(np.max(np.abs(step))), 1e-300)
    trial = result.best._replace(kernel=result.best.kernel + min(1.0, rest.radius / length) * step)
    stand = Stand(result.best, result.value, result.slope)
    return _from(rest, trial)._replace(trial=trial, stand=stand, judging=True, reached=np.nan, refused=False)


def _judged_step(rest: Rest, result: Round) -> Rest:
    """Accept a step of the kernels if it raised the value once all else has converged; else go back with a shorter."""
    stand, values = rest.stand, rest.trail.values
    assert stand is not None
    step = result.best.kernel - stand.shared.kernel
    length, expected = float(np.max(np.abs(step))), float(step @ stand.slope)
    if len(values) < _SETTLED:
        return rest._replace(trial=result.best)
    if result.value >= stand.value + 1e-4 * expected:
        radius = min(2.0 * rest.radius, _FAR) if length > 0.9 * rest.radius else rest.radius
        return rest._replace(trial=None, judging=False, radius=radius)
    if len(values) <= _CYCLE and result.value + _CYCLE * (values[-1] - values[-2]) > stand.value:
        return rest._replace(trial=result.best)  # all else still converges
    return _from(rest, stand.shared)._replace(stand=None, radius=max(0.3 * length, _SHORTEST_POLISHED))


def _learnt(curvature: Array, step: Array, turn: Array) -> Array:
    """BFGS, damped where the slope did not fall along the step (Nocedal and Wright 2006, procedure 18.2)."""
    along = curvature @ step
    expected, observed = float(step @ along), float(step @ turn)
    if observed < 0.2 * expected:
        share = 0.8 * expected / (expected - observed)
        turn = share * turn + (1.0 - share) * along
    return np.asarray(curvature - np.outer(along, along) / expected + np.outer(turn, turn) / float(step @ turn))


def extrapolated(path: Sequence[Globals], role: Roles) -> Globals | None:
    """The limit of a path of successive shared parameters, as if rounds were linear; None where there is none.

    Steps are measured in posterior sds of means and in logs of variances. The kernels are the same throughout, and the
    selection stays, since it follows from the rest.
    """
    x, scaled = np.stack([flatten(shared) for shared in path]), _scaled_path(path)
    turns = np.diff(scaled, n=2, axis=0)
    weight, *_ = np.linalg.lstsq(turns.T, np.diff(scaled, axis=0)[-1], rcond=1e-8)
    step = -np.diff(x, axis=0)[1:].T @ weight
    if not np.all(np.isfinite(step)) or np.max(np.abs(step)) > _WILD:
        return None
    return unflatten(x[-1] + step, role)._replace(inclusion=path[-1].inclusion, kernel=path[-1].kernel)


def _scaled_path(path: Sequence[Globals]) -> Array:
    """Coordinates (n, d) in which steps are measured."""
    root = np.linalg.cholesky(path[-1].covariance)

    def scaled(shared: Globals) -> Array:
        white = np.linalg.solve(root, shared.mean[:, :, None]).ravel()
        sizes = 0.5 * np.log(np.einsum("lqq->lq", shared.covariance)).ravel()
        return np.concatenate([white, sizes, [shared.log_slab_sd]])

    return np.stack([scaled(shared) for shared in path])
