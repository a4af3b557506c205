"""Averaged Adam for coregionalised Gaussian processes that select their latent functions: the paper's own algorithm."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Received, Replies
from fedppl.coregional.adam import adam_step, flatten_unit, fresh, slopes, unflatten_unit
from fedppl.coregional.algorithms import _common, gradient
from fedppl.coregional.algorithms.gradient import StepsState
from fedppl.coregional.bound import UnitClientState, unit_bound
from fedppl.coregional.result import draw
from fedppl.coregional.view import unit_of
from fedppl.settings import described
from fedppl.types import Array, Message

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
        counts in all rounds, and takes no milestones. An average of units' steps settles as far as they are short.
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
    *When this fails.* An average of parameters is no step uphill: units that see different rows pull apart what they
    average, and the fixed point depends on `steps` and `learning_rate`. Use `Ascent` unless the paper's algorithm is
    what you are after; this one sends no statistics of a unit's coefficients, but its parameters after local steps.

    References
    ----------
    .. [1] Gao and Chung, section 4.2.2, Algorithm 1.
    """
    settings = gradient.checked(learning_rate, milestones, steps, batch_size, initial_kernel, tolerance, _MILESTONES)
    return Algorithm[StepsState, UnitClientState](
        name="curves.Averaging",
        settings=described(settings),
        init=gradient.init,
        broadcast=functools.partial(gradient.asked, settings=settings),
        update_client=functools.partial(_update_client, settings=settings),
        update_server=functools.partial(gradient.update_server, settings=settings, move=_average),
        replies=Replies(functools.partial(gradient.shapes, name="x"), gradient.reject, gradient.summed),
        result=gradient.read(draw),
        needs=_common.NEEDS,
    )


def _update_client(
    client: ClientView,
    personal: UnitClientState | None,
    message: Message,
    rng: np.random.Generator,
    *,
    settings: gradient.Settings,
) -> ClientUpdate[UnitClientState]:
    """T Adam steps on V_m."""
    unit, stage = client.view(unit_of), float(message["stage"])
    count = len(unit.response)
    info = {"rows": float(count)}
    if stage == 0:
        return ClientUpdate(*_common.first_answer(unit, rng, settings.initial_kernel), info)
    x, shared, share = gradient.task(unit, message)
    if personal is None:
        personal = gradient.unit_state(unit, shared, stage, rng)
        info |= {"blank": 1.0} if stage == 2 else {}
    value = unit_bound(unit.design(shared.kernel), shared, personal, unit.noise, unit.roles.log_odds, share)
    point = np.concatenate([x, flatten_unit(personal)])
    adam = fresh(len(point))
    for _ in range(settings.steps):
        rows = _common.batch(count, settings.batch_size, rng)
        slope = np.concatenate(slopes(unit, point[: len(x)], point[len(x) :], share, rows))
        point, adam = adam_step(point, slope, adam, float(message["rate"]))
    reply = {"x": count * point[: len(x)], "rows": np.array(float(count)), "bound": np.array(value)}
    return ClientUpdate(unflatten_unit(point[len(x) :]), reply, info)


def _average(state: StepsState, received: Received, heard: int) -> tuple[float, Array, None]:
    """Average by rows."""
    total = received.sums()
    return float(total["bound"] * heard / received.clients), total["x"] / max(float(total["rows"]), 1.0), None
