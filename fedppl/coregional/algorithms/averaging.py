"""Averaged Adam for coregionalised Gaussian processes that select their latent functions: the paper's own algorithm."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.algorithms.averaging._point import described, tolerance_rule
from fedppl.contracts import Algorithm
from fedppl.coregional import server
from fedppl.coregional.adam import adam_step, flatten, flatten_unit, fresh, slopes, unflatten, unflatten_unit
from fedppl.coregional.bound import Globals, Roles, UnitState, roles, unit_bound
from fedppl.coregional.result import block_diagonal, draw, outcome, require_unit, sample
from fedppl.coregional.unit import best_unit, own_fit, random_unit
from fedppl.run.replies import sum_replies
from fedppl.settings import one_of, positive, shown, whole
from fedppl.types import Array, DeclarationError, Layout, Message, Status

__all__ = ["LMCAveraging", "LMCAveragingInfo", "LMCAveragingState"]


class LMCAveragingState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    x: Array  # shared parameters on the unconstrained space
    where: Mapping[str, int]  # client id to its row
    rows: Array  # (K,) n_k, 0 for a unit not heard yet
    number: int
    bound: float
    quiet: int  # rounds in a row without a change worth telling
    status: str
    message: str


class LMCAveragingInfo(NamedTuple):
    """Diagnostics of this round."""

    bound: float  # Σ V_m at what the units were sent, before their steps; NaN in the first round
    selected: int  # latent functions with γ > 0.5


class _Settings(NamedTuple):
    learning_rate: tuple[float, ...]
    milestones: tuple[int, ...]
    steps: int
    batch_size: int | None
    tolerance: float
    initial_kernel: str


def LMCAveraging(
    *,
    learning_rate: float | Sequence[float] = (0.02, 0.005, 0.001),
    milestones: Sequence[int] = (100, 200),
    steps: int = 5,
    batch_size: int | None = None,
    initial_kernel: str = "median",
    tolerance: float = 1e-6,
) -> Algorithm:
    r"""Federated optimisation of FedLMC-SS as published: local Adam steps on everything, then an average.

    .. math:: (\theta_m, \psi_m) \leftarrow \text{T Adam steps on } V_m \text{ from } (\theta, \psi_m), \qquad
              \theta \leftarrow \frac{\sum_m n_m \theta_m}{\sum_m n_m}

    θ are q(v), q(α), the kernels' parameters and σ_w on the unconstrained space; ψ_m = (μ_m, τ_m, σ_m) stays at the
    unit. Adam's moments are new in every round.

    Parameters
    ----------
    learning_rate, milestones
        Adam's rate for all parameters: the first until the first milestone, the round from which the second counts, and
        so on. One number counts in all rounds. An average of units' steps settles as far as they are short.
    steps
        T, local steps a round.
    batch_size
        Rows of a mini-batch, drawn anew for every step; by default all.
    initial_kernel
        As in `LMCAscent`.
    tolerance
        Converged when the bound has moved by less than this share of itself, five rounds running.

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
    >>> fedppl.LMCAveraging(steps=5).name
    'LMCAveraging'

    Notes
    -----
    *When this fails.* An average of parameters is no step uphill: units that see different rows pull apart what they
    average, and the fixed point depends on `steps` and `learning_rate`. Use `LMCAscent` unless the paper's algorithm is
    what you are after; this one sends no statistics of a unit's coefficients, but its parameters after local steps.

    References
    ----------
    .. [1] Gao and Chung, section 4.2.2, Algorithm 1.
    """
    settings = checked(learning_rate, milestones, steps, batch_size, initial_kernel, tolerance)
    return Algorithm(
        name="LMCAveraging",
        check=require_unit,
        init_server=functools.partial(_init_server, settings=settings),
        broadcast=lambda state, client_id: asked(state, settings),
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=_reply_shapes,
        refuse=refuse,
        update_server=functools.partial(_update_server, settings=settings),
        outcome=result,
        draw=draw,
        details=lambda state: {"inclusion_probability": (("latent",), unflatten(state.x, state.roles).inclusion)},
        sample=lambda state, count, rng: sample(state.roles, result(state, None), count, rng),
        settings=described(settings),
        binary=True,
    )


def checked(
    learning_rate: float | Sequence[float],
    milestones: Sequence[int],
    steps: int,
    batch_size: int | None,
    initial_kernel: str,
    tolerance: float,
) -> _Settings:
    """Settings in range."""
    rates = _each(positive, "learning_rate", learning_rate, "positive and finite, one or a tuple of them")
    places = _each(whole, "milestones", milestones, "rounds, from 1 on") if len(rates) > 1 else ()
    if len(places) != len(rates) - 1 or any(b <= a for a, b in itertools.pairwise((0, *places))):
        raise DeclarationError(
            f"milestones={places} must be increasing rounds, one less than the {len(rates)} learning rates."
        )
    return _Settings(
        rates,
        places,
        whole("steps", steps),
        None if batch_size is None else whole("batch_size", batch_size, hint="None takes all rows"),
        tolerance_rule(tolerance),
        one_of("initial_kernel", initial_kernel, ("median", "prior")),
    )


def _each(rule: Callable[[str, Any], Any], name: str, value: Any, words: str) -> tuple[Any, ...]:
    """A value, or each of several, by its rule; errors show all."""
    try:
        return tuple(rule(name, one) for one in (value if isinstance(value, tuple | list) and value else (value,)))
    except DeclarationError:
        raise DeclarationError(f"{name}={shown(value)} must be {words}.") from None


def result(state: Any, client_id: str | None) -> Message:
    """What a unit needs to know in the end."""
    shared = unflatten(state.x, state.roles)
    heard = client_id in state.where and bool(state.rows[state.where[client_id]] > 0)
    return outcome(shared, block_diagonal(shared.covariance), heard=heard)


def start(role: Roles) -> Array:
    """The prior, with the chance of each latent function at π: shared parameters before the first round."""
    odds = np.where(np.isfinite(role.log_odds), role.log_odds, 0.0)
    shared = Globals(
        np.zeros((role.latents, role.points)),
        np.broadcast_to(np.eye(role.points), (role.latents, role.points, role.points)),
        1.0 / (1.0 + np.exp(-odds)),
        role.kernel_mean,
        role.slab_prior.mean,
    )
    return flatten(shared)


def _init_server(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: _Settings
) -> LMCAveragingState:
    """Start from the prior; the first round asks for sizes, and for the units' own kernels."""
    del rng
    role = roles(layout)
    where = {client_id: k for k, client_id in enumerate(clients)}
    running = Status.RUNNING.value
    return LMCAveragingState(role, start(role), where, np.zeros(len(clients)), 0, np.nan, 0, running, "no round yet")


def asked(state: Any, settings: _Settings) -> Message:
    """Shared parameters, Σ n_k of the units heard so far, which makes r_m, and the learning rate."""
    rate = settings.learning_rate[sum(state.number + 1 >= place for place in settings.milestones)]
    return {
        "x": state.x,
        "rows": np.array(state.rows.sum()),
        "stage": np.array(float(min(state.number, 2))),
        "rate": np.array(rate),
    }


def begin(view: Any, rng: np.random.Generator, initial_kernel: str) -> tuple[UnitState, Message]:
    """A unit's own Gaussian process, coefficients to start from, and what it tells: its kernel and its size."""
    role: Roles = view.roles
    kernel, log_noise_sd = role.kernel_mean, view.noise.mean
    if initial_kernel == "median":
        own = own_fit(view, (role.kernel_mean, role.kernel_precision), role.slab_prior)
        kernel, log_noise_sd = own.kernel, float(np.median(own.log_noise_sd))
    return random_unit(role.latents, log_noise_sd, rng), {"kernel": kernel, "rows": np.array(float(len(view.response)))}


def unit_state(view: Any, personal: Any, shared: Globals, stage: float, rng: np.random.Generator) -> UnitState:
    """Where a unit goes on from; one without memory from the shared parameters, or from random ones at the start."""
    if personal is not None:
        return UnitState(*personal)
    if stage < 2:
        return random_unit(view.roles.latents, view.noise.mean, rng)
    return best_unit(view.design(shared.kernel), shared, view.noise, view.noise.mean)[0]


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[UnitState, Message, Mapping[str, float]]:
    """T Adam steps on V_m."""
    view, stage = client.coregional, float(message["stage"])
    count = len(view.response)
    info = {"rows": float(count)}
    if stage == 0:
        state, reply = begin(view, rng, settings.initial_kernel)
        return state, reply, info
    x = np.asarray(message["x"], dtype=float)
    shared = unflatten(x, view.roles)
    share = count / max(float(message["rows"]), count, 1.0)
    state = unit_state(view, personal, shared, stage, rng)
    value = unit_bound(view.design(shared.kernel), shared, state, view.noise, view.roles.log_odds, share)
    point = np.concatenate([x, flatten_unit(state)])
    adam = fresh(len(point))
    for _ in range(settings.steps):
        rows = None
        if settings.batch_size is not None and settings.batch_size < count:
            rows = np.sort(rng.choice(count, settings.batch_size, replace=False))
        slope = np.concatenate(slopes(view, point[: len(x)], point[len(x) :], share, rows))
        point, adam = adam_step(point, slope, adam, float(message["rate"]))
    reply = {"x": count * point[: len(x)], "rows": np.array(float(count)), "bound": np.array(value)}
    blank = {"blank": 1.0} if personal is None and stage == 2 else {}
    return unflatten_unit(point[len(x) :]), reply, {**info, **blank}


def _reply_shapes(state: LMCAveragingState) -> Mapping[str, tuple[int, ...]]:
    if state.number == 0:
        return {"kernel": (len(state.roles.kernel),), "rows": ()}
    return {"x": state.x.shape, "rows": (), "bound": ()}


def refuse(state: Any, message: Message) -> str | None:
    """A unit has no negative number of rows."""
    del state
    rows = float(message["rows"])
    return None if rows >= 0 else f"'rows' is {rows:g}, which no data give"


def first_answers(state: Any, replies: Mapping[str, Message]) -> Any:
    """Sizes of the units, and the median of their own kernels for a start."""
    names = sorted(replies)
    sizes = np.array([float(replies[name]["rows"]) for name in names])
    rows = state.rows.copy()
    rows[[state.where[name] for name in names]] = sizes
    shared = unflatten(state.x, state.roles)
    kernel = server.median(np.stack([np.asarray(replies[name]["kernel"], dtype=float) for name in names]), sizes)
    x = flatten(shared._replace(kernel=kernel))
    return state._replace(x=x, rows=rows, number=1, message="kernels have a start; raise rounds=")


def settled(state: Any, bound: float, tolerance: float) -> tuple[int, str, str]:
    """Rounds in a row that the bound has stood still, the status, and what to do about it."""
    still = abs(bound - state.bound) < tolerance * (1.0 + abs(bound))
    quiet = state.quiet + 1 if still else 0
    if quiet >= 5 and np.all(state.rows > 0):
        return quiet, Status.CONVERGED.value, ""
    return quiet, Status.RUNNING.value, f"the bound moves still ({bound:.6g}); raise rounds=, or change learning_rate="


def _update_server(
    state: LMCAveragingState, replies: Mapping[str, Message], *, settings: _Settings
) -> tuple[LMCAveragingState, LMCAveragingInfo]:
    """Average by rows."""
    if not replies:
        return state, LMCAveragingInfo(np.nan, selected(state))
    if state.number == 0:
        state = first_answers(state, replies)
        return state, LMCAveragingInfo(np.nan, selected(state))
    rows = state.rows.copy()
    for client_id, reply in replies.items():
        rows[state.where[client_id]] = float(reply["rows"])
    sums = sum_replies(replies)
    bound = float(sums["bound"] * np.sum(rows > 0) / len(replies))
    quiet, status, message = settled(state._replace(rows=rows), bound, settings.tolerance)
    state = state._replace(
        x=sums["x"] / max(float(sums["rows"]), 1.0),
        rows=rows,
        number=state.number + 1,
        bound=bound,
        quiet=quiet,
        status=status,
        message=message,
    )
    return state, LMCAveragingInfo(bound, selected(state))


def selected(state: Any) -> int:
    """Latent functions with γ > 0.5."""
    return int(np.sum(unflatten(state.x, state.roles).inclusion > 0.5))
