"""Adam on the whole bound of coregionalised Gaussian processes, from sums of gradients: a central fit, federated."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.algorithms.averaging._point import described
from fedppl.contracts import Algorithm
from fedppl.coregional.adam import Adam, adam_step, flatten_unit, fresh, slopes, unflatten, unflatten_unit
from fedppl.coregional.algorithms.averaging import (
    asked,
    begin,
    checked,
    first_answers,
    refuse,
    result,
    selected,
    settled,
    start,
    unit_state,
)
from fedppl.coregional.bound import Roles, roles, unit_bound
from fedppl.coregional.result import draw, require_unit, sample
from fedppl.run.replies import sum_replies
from fedppl.types import Array, Layout, Message, Status

__all__ = ["LMCGradient", "LMCGradientInfo", "LMCGradientState"]


class LMCGradientState(NamedTuple):
    """What the next round needs."""

    roles: Roles
    x: Array  # shared parameters on the unconstrained space
    adam: Adam
    where: Mapping[str, int]  # client id to its row
    rows: Array  # (K,) n_k, 0 for a unit not heard yet
    number: int
    bound: float
    quiet: int  # rounds in a row without a change worth telling
    status: str
    message: str


class LMCGradientInfo(NamedTuple):
    """Diagnostics of this round."""

    bound: float  # Σ V_m at what the units were sent; NaN in the first round
    selected: int  # latent functions with γ > 0.5


class GradientUnit(NamedTuple):
    """ψ_m on the unconstrained space, with Adam's moments, which stay at the unit."""

    own: Array
    adam: Adam


def LMCGradient(
    *,
    learning_rate: float | Sequence[float] = 0.05,
    milestones: Sequence[int] = (),
    batch_size: int | None = None,
    initial_kernel: str = "median",
    tolerance: float = 1e-6,
) -> Algorithm:
    r"""Adam on the bound of FedLMC-SS, one step a round, its gradient summed over units.

    .. math:: \theta \leftarrow \theta + \text{Adam}\Big(\sum_m \nabla_\theta V_m\Big), \qquad
              \psi_m \leftarrow \psi_m + \text{Adam}(\nabla_{\psi_m} V_m)

    Adam works coordinate by coordinate, so with all units and all rows in every round this *is* Adam on the whole bound
    in one place: what the paper calls LMC-SS, or LMC without selection, at the price of a round for every step.

    Parameters
    ----------
    learning_rate, milestones, batch_size, initial_kernel, tolerance
        As in `LMCAveraging`.

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
    >>> fedppl.LMCGradient().name
    'LMCGradient'

    Notes
    -----
    *When this fails.* It needs a thousand rounds or more, and finds worse maxima than `LMCAscent`.
    It is here to compare.

    References
    ----------
    .. [1] Gao and Chung, section 5, the centralised models LMC and LMC-SS.
    """
    settings = checked(learning_rate, milestones, 1, batch_size, initial_kernel, tolerance)
    return Algorithm(
        name="LMCGradient",
        check=require_unit,
        init_server=_init_server,
        broadcast=lambda state, client_id: asked(state, settings),
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=_reply_shapes,
        refuse=refuse,
        update_server=functools.partial(_update_server, settings=settings),
        outcome=result,
        draw=_draw,
        details=lambda state: {"inclusion_probability": (("latent",), unflatten(state.x, state.roles).inclusion)},
        sample=lambda state, count, rng: sample(state.roles, result(state, None), count, rng),
        settings=described(settings),
        binary=True,
    )


def _init_server(layout: Layout, clients: tuple[str, ...], rng: np.random.Generator) -> LMCGradientState:
    """Start from the prior; the first round asks for sizes, and for the units' own kernels."""
    del rng
    role = roles(layout)
    x = start(role)
    return LMCGradientState(
        role,
        x,
        fresh(len(x)),
        {client_id: k for k, client_id in enumerate(clients)},
        np.zeros(len(clients)),
        0,
        np.nan,
        0,
        Status.RUNNING.value,
        "no round yet",
    )


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: Any
) -> tuple[GradientUnit, Message, Mapping[str, float]]:
    """The gradient at what was sent, and a step of the unit's own parameters."""
    view, stage = client.coregional, float(message["stage"])
    count = len(view.response)
    info = {"rows": float(count)}
    if stage == 0:
        first, reply = begin(view, rng, settings.initial_kernel)
        own = flatten_unit(first)
        return GradientUnit(own, fresh(len(own))), reply, info
    x = np.asarray(message["x"], dtype=float)
    shared = unflatten(x, view.roles)
    if personal is None:
        own = flatten_unit(unit_state(view, None, shared, stage, rng))
        personal, info = GradientUnit(own, fresh(len(own))), {**info, **({"blank": 1.0} if stage == 2 else {})}
    share = count / max(float(message["rows"]), count, 1.0)
    rows = None
    if settings.batch_size is not None and settings.batch_size < count:
        rows = np.sort(rng.choice(count, settings.batch_size, replace=False))
    unit = unflatten_unit(personal.own)
    value = unit_bound(view.design(shared.kernel), shared, unit, view.noise, view.roles.log_odds, share)
    slope, own_slope = slopes(view, x, personal.own, share, rows)
    after = GradientUnit(*adam_step(personal.own, own_slope, Adam(*personal.adam), float(message["rate"])))
    return after, {"slope": slope, "rows": np.array(float(count)), "bound": np.array(value)}, info


def _reply_shapes(state: LMCGradientState) -> Mapping[str, tuple[int, ...]]:
    if state.number == 0:
        return {"kernel": (len(state.roles.kernel),), "rows": ()}
    return {"slope": state.x.shape, "rows": (), "bound": ()}


def _update_server(
    state: LMCGradientState, replies: Mapping[str, Message], *, settings: Any
) -> tuple[LMCGradientState, LMCGradientInfo]:
    """One step of Adam along the sum, scaled up where not all units replied."""
    if not replies:
        return state, LMCGradientInfo(np.nan, selected(state))
    if state.number == 0:
        state = first_answers(state, replies)
        return state, LMCGradientInfo(np.nan, selected(state))
    rows = state.rows.copy()
    for client_id, reply in replies.items():
        rows[state.where[client_id]] = float(reply["rows"])
    sums, share = sum_replies(replies), len(replies) / max(int(np.sum(rows > 0)), 1)
    bound = float(sums["bound"] / share)
    quiet, status, message = settled(state._replace(rows=rows), bound, settings.tolerance)
    rate = float(asked(state, settings)["rate"])
    x, adam = adam_step(state.x, sums["slope"] / share, state.adam, rate)
    state = state._replace(
        x=x,
        adam=adam,
        rows=rows,
        number=state.number + 1,
        bound=bound,
        quiet=quiet,
        status=status,
        message=message,
    )
    return state, LMCGradientInfo(bound, selected(state))


def _draw(client: Any, personal: Any, message: Message, draws: int, chains: int, rng: np.random.Generator) -> Any:
    """Draws as of the other algorithms for this model."""
    unit = None if personal is None else unflatten_unit(np.asarray(personal.own))
    return draw(client, unit, message, draws, chains, rng)
