"""Adam on the whole bound of coregionalised Gaussian processes: by sums of gradients, or at units, then averaged."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag
from scipy.special import expit

from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Draws, Received, Replies, Report
from fedppl.coregional import bound
from fedppl.coregional.algorithms import _common
from fedppl.coregional.bound import Globals, Roles, UnitClientState
from fedppl.coregional.unit import best_unit, draw, random_unit, slopes
from fedppl.coregional.view import roles, unit_of
from fedppl.settings import between, described, positive, shown, whole
from fedppl.types import Array, DeclarationError, Layout, Message, Rng, Status

_SlopesFn = Callable[[Array, Array], tuple[Array, Array]]  # gradient of V_m in the shared and the unit's own vector


class GradientClientState(NamedTuple):
    """ψ_m on the unconstrained space, with Adam's moments, which stay at the unit."""

    own: Array
    adam: _common.Adam


def Gradient(
    *,
    learning_rate: float | Sequence[float] = 0.05,
    milestones: Sequence[int] = (),
    batch_size: int | None = None,
    initial_kernel: str = "median",
    tolerance: float = 1e-6,
) -> Algorithm[StepsState, GradientClientState]:
    r"""Adam on the bound of FedLMC-SS, one step a round, its gradient summed over units; for comparison.

    .. math:: \theta \leftarrow \theta + \text{Adam}\Big(\sum_m \nabla_\theta V_m\Big), \qquad
              \psi_m \leftarrow \psi_m + \text{Adam}(\nabla_{\psi_m} V_m)

    Adam works coordinate by coordinate, so with all units and all rows in every round this *is* Adam on the whole bound
    in one place: what the paper calls LMC-SS, or LMC without selection, at the price of a round for every step.

    Parameters
    ----------
    learning_rate, milestones, batch_size, initial_kernel, tolerance
        As in `Averaging`.

    Returns
    -------
    Algorithm

    Notes
    -----
    *When this fails.* It needs a thousand rounds or more, and finds worse maxima than `Ascent`.

    References
    ----------
    .. [1] Gao and Chung, section 5, the centralised models LMC and LMC-SS.
    """
    settings = checked(learning_rate, milestones, 1, batch_size, initial_kernel, tolerance)
    step = functools.partial(_step, settings=settings)
    part = _Unit(_from, lambda personal: bound.unflatten_unit(personal.own), _one_step, "slope")
    return _algorithm("curves.Gradient", settings, part, step)


def _one_step(
    slopes_at: _SlopesFn, x: Array, personal: GradientClientState, rate: float, count: int
) -> tuple[GradientClientState, Array]:
    slope, unit_slope = slopes_at(x, personal.own)
    return GradientClientState(*_common.adam_step(personal.own, unit_slope, personal.adam, rate)), slope


def _from(start: UnitClientState) -> GradientClientState:
    x = bound.flatten_unit(start)
    return GradientClientState(x, _common.fresh(len(x)))


def _step(
    state: StepsState, received: Received, known: int, *, settings: Settings
) -> tuple[float, Array, _common.Adam]:
    """One step of Adam along the sum, scaled up where not all units replied."""
    total, share = received.sums(), received.clients / max(known, 1)
    rate = settings.rate(state.number)
    adam = _common.fresh(len(state.x)) if state.adam is None else state.adam
    return float(total["bound"] / share), *_common.adam_step(state.x, total["slope"] / share, adam, rate)


# Averaged Adam: the paper's own algorithm -----------------------------------------------------------------------------

_MILESTONES = (100, 200)


def Averaging(
    *,
    learning_rate: float | Sequence[float] = (0.02, 0.005, 0.001),
    milestones: Sequence[int] = _MILESTONES,
    steps: int = 5,
    batch_size: int | None = None,
    initial_kernel: str = "median",
    tolerance: float = 1e-6,
) -> Algorithm[StepsState, UnitClientState]:
    r"""Federated optimisation of FedLMC-SS as published: local Adam steps on everything, then an average.

    .. math:: (\theta_m, \psi_m) \leftarrow \text{T Adam steps on } V_m \text{ from } (\theta, \psi_m), \qquad
              \theta \leftarrow \frac{\sum_m n_m \theta_m}{\sum_m n_m}

    θ are q(v), q(α), the kernels' parameters and σ_w on the unconstrained space; ψ_m = (μ_m, τ_m, σ_m) stays at the
    unit. Adam's moments are new in every round.

    Parameters
    ----------
    learning_rate, milestones
        Adam learning rates for all parameters, and the rounds from which the second and later ones count. One number
        counts in all rounds, and takes no milestones. The shorter the steps, the closer their average settles.
    steps
        T, number of local steps a round.
    batch_size
        Number of rows of a mini-batch, drawn anew for every step; by default all.
    initial_kernel
        As in `Ascent`.
    tolerance
        Share of itself by which the bound may move in a round that counts as converged; five such rounds in a row end
        the fit.

    Returns
    -------
    Algorithm

    Notes
    -----
    *When this fails.* An average of parameters is no ascent step: units with different rows move in different
    directions, and the fixed point depends on `steps` and `learning_rate`. Use `Ascent` unless you want the paper's
    algorithm, which sends no statistics of a unit's coefficients, but its parameters after local steps.

    References
    ----------
    .. [1] Gao and Chung, section 4.2.2, Algorithm 1.
    """
    settings = checked(learning_rate, milestones, steps, batch_size, initial_kernel, tolerance, _MILESTONES)
    steps_of = functools.partial(_several_steps, steps=settings.steps)
    part = _Unit(lambda state: state, lambda state: state, steps_of, "x")
    return _algorithm("curves.Averaging", settings, part, _average)


def _several_steps(
    slopes_at: _SlopesFn, x: Array, personal: UnitClientState, rate: float, count: int, *, steps: int
) -> tuple[UnitClientState, Array]:
    """T Adam steps on V_m; the shared parameters after them, times the number of rows."""
    point = np.concatenate([x, bound.flatten_unit(personal)])
    adam = _common.fresh(len(point))
    for _ in range(steps):
        slope = np.concatenate(slopes_at(point[: len(x)], point[len(x) :]))
        point, adam = _common.adam_step(point, slope, adam, rate)
    return bound.unflatten_unit(point[len(x) :]), count * point[: len(x)]


def _average(state: StepsState, received: Received, known: int) -> tuple[float, Array, None]:
    total = received.sums()
    return float(total["bound"] * known / received.clients), total["x"] / max(float(total["rows"]), 1.0), None


# What both share: settings, where they start, when they stop ----------------------------------------------------------

P = TypeVar("P")
_MoveFn = Callable[["StepsState", Received, int], tuple[float, Array, _common.Adam | None]]


class StepsInfo(NamedTuple):
    """Diagnostics of a round of steps."""

    bound: float  # Σ V_m at the parameters that units were sent, before their steps; NaN in the first round
    selected: int  # latent functions with γ > 0.5


class Settings(NamedTuple):
    """Settings of the algorithm."""

    learning_rate: tuple[float, ...]
    milestones: tuple[int, ...]
    steps: int
    batch_size: int | None
    tolerance: float
    initial_kernel: str

    def rate(self, number: int) -> float:
        """The learning rate of the round after this many."""
        return self.learning_rate[sum(number + 1 >= place for place in self.milestones)]


class StepsState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    x: Array  # shared parameters on the unconstrained space
    adam: _common.Adam | None  # moments, once the server has taken a step; None for good where units take them
    where: Mapping[str, int]  # client id to its row
    rows: Array  # (K,) n_k, 0 for a unit that has not replied yet
    number: int
    bound: float
    quiet: int  # rounds in a row with little change

    @property
    def shared(self) -> Globals:
        """The shared parameters."""
        return bound.unflatten(self.x, self.roles)

    @property
    def joint(self) -> Array:
        """cov(v) (LQ, LQ); latent functions are independent."""
        return np.asarray(block_diag(*self.shared.covariance))

    @property
    def has_replied(self) -> NDArray[np.bool_]:
        """Whether a unit ever replied (K,)."""
        return self.rows > 0


def checked(
    rate: float | Sequence[float],
    milestones: Sequence[int],
    steps: int,
    batch_size: int | None,
    initial_kernel: str,
    tolerance: float,
    usual: tuple[int, ...] = (),
) -> Settings:
    """Settings in range; `usual` are the default milestones, which do not count where there is one learning rate."""
    rates, places = (tuple(x) if isinstance(x, tuple | list) else (x,) for x in (rate, milestones))
    try:
        rates, places = tuple(positive("rate", x) for x in rates), tuple(whole("round", x) for x in places)
    except DeclarationError:
        rates = ()
    if not rates:
        of = f"learning_rate={shown(rate)} must be positive and finite, one or a tuple of them"
        raise DeclarationError(f"{of}, and milestones={shown(milestones)} whole numbers, at least 1.")
    if len(rates) == 1 and places == usual:
        places = ()
    if len(places) != len(rates) - 1 or any(b <= a for a, b in itertools.pairwise(places)):
        rule = f"must be one less than the rates, learning_rate={shown(rate)}, and increase"
        raise DeclarationError(f"milestones={places} {rule}.")
    return Settings(
        rates,
        places,
        whole("steps", steps),
        _common.batch_size_rule(batch_size),
        between("tolerance", tolerance, 0, 1),
        _common.initial_kernel_rule(initial_kernel),
    )


class _Unit(NamedTuple):
    """A unit's part: its personal state from ψ_m, ψ_m from that, its steps, and the name of what these reply."""

    start: Callable[[UnitClientState], Any]
    own: Callable[[Any], UnitClientState]
    steps: Callable[..., tuple[Any, Array]]
    reply: str


def _algorithm(name: str, settings: Settings, part: _Unit, move: _MoveFn) -> Algorithm[StepsState, P]:
    def drawn(client: ClientView, personal: P | None, *others: Any) -> Draws:
        return draw(client, None if personal is None else part.own(personal), *others)

    return Algorithm[StepsState, P](
        name=name,
        settings=described(settings),
        init=_init,
        broadcast=functools.partial(_broadcast, settings=settings),
        update_client=functools.partial(_update_client, settings=settings, part=part),
        update_server=functools.partial(_update_server, settings=settings, move=move),
        replies=Replies(
            functools.partial(_shapes, name=part.reply),
            lambda state, reply: _common.reject_negative(reply, "rows"),
            lambda state: bool(np.all(state.has_replied)),  # once the size of every unit is known
        ),
        result=_common.read(drawn),
        needs=_common.NEEDS,
    )


def _update_client(
    client: ClientView, personal: P | None, message: Message, rng: Rng, *, settings: Settings, part: _Unit
) -> ClientUpdate[P]:
    """The bound at the parameters that the unit was sent, and its steps."""
    unit, stage = client.view(unit_of), float(message["stage"])
    count = len(unit.response)
    info = {"rows": float(count)}
    if stage == 0:
        first, reply = _common.first_answer(unit, rng, settings.initial_kernel)
        return ClientUpdate(part.start(first), reply, info)
    x = np.asarray(message["x"], dtype=float)
    shared, share = bound.unflatten(x, unit.roles), count / max(float(message["rows"]), count, 1.0)
    design = unit.design(shared.kernel)
    if personal is None and stage < 2:
        personal = part.start(random_unit(unit.roles.latents, unit.noise.mean, rng))
    elif personal is None:
        info["blank"] = 1.0
        personal = part.start(best_unit(design, shared, unit.noise, unit.noise.mean)[0])
    value = bound.unit_bound(design, shared, part.own(personal), unit.noise, unit.roles.log_odds, share)

    def slopes_at(x: Array, own: Array) -> tuple[Array, Array]:
        return slopes(unit, x, own, share, _common.batch(count, settings.batch_size, rng))

    personal, sent = part.steps(slopes_at, x, personal, float(message["rate"]), count)
    return ClientUpdate(personal, {part.reply: sent, "rows": np.array(float(count)), "bound": np.array(value)}, info)


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> StepsState:
    """Start from the prior, with γ at π; the first round asks for sizes, and for the units' own kernels."""
    role = roles(layout)
    gamma = expit(np.where(np.isfinite(role.log_odds), role.log_odds, 0.0))
    shared = _common.prior_globals(role)._replace(inclusion=gamma)
    where = {client_id: k for k, client_id in enumerate(clients)}
    return StepsState(role, bound.flatten(shared), None, where, np.zeros(len(clients)), 0, np.nan, 0)


def _broadcast(state: StepsState, client_id: str, *, settings: Settings) -> Message:
    """Shared parameters, Σ n_k of the units that ever replied, which gives r_m, and the learning rate."""
    stage, rate = float(min(state.number, 2)), settings.rate(state.number)
    return {"x": state.x, "rows": np.array(state.rows.sum()), "stage": np.array(stage), "rate": np.array(rate)}


def _update_server(
    state: StepsState, received: Received, *, settings: Settings, move: _MoveFn
) -> tuple[StepsState, Report]:
    """Note the units' sizes, start the kernels at the median of their own, and then in every round `move`.

    `move` gives the bound, the next x and Adam's moments from the sums and the number of units that ever replied.
    """
    if not received.clients:
        return state, Report(_info(np.nan, state))
    rows = state.rows.copy()
    for client_id, reply in received.single().items():  # a round brings sums alone only once all are known
        rows[state.where[client_id]] = float(reply["rows"])
    if state.number == 0:
        x = bound.flatten(state.shared._replace(kernel=_common.median_kernel(received.each)))
        state = state._replace(x=x, rows=rows, number=1)
        return state, Report(_info(np.nan, state), message=_common.STARTED)
    value, x, adam = move(state, received, int(np.sum(rows > 0)))
    quiet = state.quiet + 1 if abs(value - state.bound) < settings.tolerance * (1.0 + abs(value)) else 0
    state = state._replace(x=x, adam=adam, rows=rows, number=state.number + 1, bound=value, quiet=quiet)
    if quiet >= 5 and np.all(rows > 0):
        return state, Report(_info(value, state), Status.CONVERGED, "")
    message = f"the bound moves still ({value:.6g}); raise rounds=, or change learning_rate="
    return state, Report(_info(value, state), message=message)


def _shapes(state: StepsState, name: str) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the replies; after the first, `name` is an array of the shared parameters' shape."""
    return {name: state.x.shape, "rows": (), "bound": ()} if state.number else _common.first_shapes(state.roles)


def _info(value: float, state: StepsState) -> StepsInfo:
    return StepsInfo(value, int(np.sum(state.shared.inclusion > 0.5)))
