"""Adam on the whole bound of coregionalised Gaussian processes, from sums of gradients: a central fit, federated."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Draws, Received, Replies
from fedppl.coregional.adam import Adam, adam_step, flatten_unit, fresh, slopes, unflatten_unit
from fedppl.coregional.algorithms import _common, _steps
from fedppl.coregional.algorithms._steps import StepsState
from fedppl.coregional.bound import UnitClientState, unit_bound
from fedppl.coregional.result import draw
from fedppl.coregional.view import unit_of
from fedppl.settings import described
from fedppl.types import Array, Message


class GradientClientState(NamedTuple):
    """ψ_m on the unconstrained space, with Adam's moments, which stay at the unit."""

    own: Array
    adam: Adam


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

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round for a model that is no linear model of coregionalisation.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.curves.Gradient().name
    'curves.Gradient'

    Notes
    -----
    *When this fails.* It needs a thousand rounds or more, and finds worse maxima than `Ascent`.

    References
    ----------
    .. [1] Gao and Chung, section 5, the centralised models LMC and LMC-SS.
    """
    settings = _steps.checked(learning_rate, milestones, 1, batch_size, initial_kernel, tolerance)
    return Algorithm[StepsState, GradientClientState](
        name="curves.Gradient",
        settings=described(settings),
        init=_steps.init,
        broadcast=functools.partial(_steps.asked, settings=settings),
        update_client=functools.partial(_update_client, settings=settings),
        update_server=functools.partial(
            _steps.update_server, settings=settings, move=functools.partial(_step, settings=settings)
        ),
        replies=Replies(functools.partial(_steps.shapes, name="slope"), _steps.reject, _steps.summed),
        result=_steps.read(_draw),
        needs=_common.NEEDS,
    )


def _update_client(
    client: ClientView,
    personal: GradientClientState | None,
    message: Message,
    rng: np.random.Generator,
    *,
    settings: _steps.Settings,
) -> ClientUpdate[GradientClientState]:
    """The gradient at what was sent, and a step of the unit's own parameters."""
    unit, stage = client.view(unit_of), float(message["stage"])
    count = len(unit.response)
    info = {"rows": float(count)}
    if stage == 0:
        first, reply = _common.first_answer(unit, rng, settings.initial_kernel)
        return ClientUpdate(_from(first), reply, info)
    x, shared, share = _steps.task(unit, message)
    if personal is None:
        personal = _from(_steps.unit_state(unit, shared, stage, rng))
        info |= {"blank": 1.0} if stage == 2 else {}
    rows, design = _common.batch(count, settings.batch_size, rng), unit.design(shared.kernel)
    value = unit_bound(design, shared, unflatten_unit(personal.own), unit.noise, unit.roles.log_odds, share)
    slope, own_slope = slopes(unit, x, personal.own, share, rows)
    after = GradientClientState(*adam_step(personal.own, own_slope, personal.adam, float(message["rate"])))
    return ClientUpdate(after, {"slope": slope, "rows": np.array(float(count)), "bound": np.array(value)}, info)


def _from(start: UnitClientState) -> GradientClientState:
    own = flatten_unit(start)
    return GradientClientState(own, fresh(len(own)))


def _step(state: StepsState, received: Received, heard: int, *, settings: _steps.Settings) -> tuple[float, Array, Adam]:
    """One step of Adam along the sum, scaled up where not all units replied."""
    total, share = received.sums(), received.clients / max(heard, 1)
    rate = _steps.learning_rate(state.number, settings)
    adam = fresh(len(state.x)) if state.adam is None else state.adam
    return float(total["bound"] / share), *adam_step(state.x, total["slope"] / share, adam, rate)


def _draw(
    client: ClientView,
    personal: GradientClientState | None,
    message: Message,
    draws: int,
    chains: int,
    rng: np.random.Generator,
) -> Draws:
    """Draws as of the other algorithms for this model."""
    unit = None if personal is None else unflatten_unit(personal.own)
    return draw(client, unit, message, draws, chains, rng)
