"""Federated Newton: the smallest algorithm that keeps every promise. Copy it to begin a new one."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from fedppl import contracts, gaussian, settings
from fedppl.contracts import ClientUpdate, ClientView, LocalInference, Received, Report
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_points, draw_target, pack_target
from fedppl.types import Layout, Message, Rng, Status


class NewtonState(NamedTuple):  # all that the next round needs; never changed in place
    prior: Gaussian
    quadratics: dict[str, Gaussian]  # of each client, the quadratic that it sent last; nothing until then
    prior_share: float  # of p / N_0 in each client's factor, where the prior is not Gaussian


class NewtonInfo(NamedTuple):  # diagnostics of this round, for the table of rounds
    change: float  # largest move of a mean, in posterior sds


def Newton(*, tolerance: float = 1e-8) -> contracts.Algorithm[NewtonState, None]:
    """q = N_0 x Π exp(quadratic of log f_k at the mean of q), until its mean moves by less than `tolerance` sds."""
    tolerance, local = settings.between("tolerance", tolerance, 0, 1), NestedLaplace()
    draw = functools.partial(draw_target, local=local)
    return contracts.Algorithm[NewtonState, None](
        name="Newton",
        settings={"tolerance": repr(tolerance)},
        init=_init,
        broadcast=lambda state, _: {"point": gaussian.mean(_q(state)), "prior_share": np.array(state.prior_share)},
        update_client=functools.partial(_update_client, local=local),
        update_server=functools.partial(_update_server, tolerance=tolerance),
        replies=contracts.Replies(lambda s: {k: v.shape for k, v in s.prior._asdict().items()}, _reject),
        result=contracts.Result(_final_message, draw, contracts.Posterior(_q), tests_convergence=True),
        needs=contracts.Needs(local.check),
        disclosure=contracts.Disclosure(functools.partial(at_points, name="point")),
    )


def _init(layout: Layout, ids: tuple[str, ...], rng: Rng) -> NewtonState:
    nothing = Gaussian(np.zeros(layout.size), np.zeros((layout.size, layout.size)))
    return NewtonState(layout.prior, dict.fromkeys(ids, nothing), 0.0 if layout.prior_is_gaussian else 1.0 / len(ids))


def _q(state: NewtonState) -> Gaussian:
    return functools.reduce(gaussian.product, state.quadratics.values(), state.prior)


def _update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, local: LocalInference
) -> ClientUpdate[None]:
    point = np.asarray(message["point"], dtype=float)
    found = local.expand(client, point, float(message["prior_share"]))
    return ClientUpdate(None, {"linear": found.gradient - found.hessian @ point, "precision": -found.hessian})


def _update_server(state: NewtonState, received: Received, *, tolerance: float) -> tuple[NewtonState, Report]:
    found = {**state.quadratics, **{k: Gaussian(r["linear"], r["precision"]) for k, r in received.each.items()}}
    q, after = _q(state), state._replace(quadratics=found)
    change = float(np.max(np.abs(gaussian.mean(_q(after)) - gaussian.mean(q)) / gaussian.standard_deviations(q)))
    done = change < tolerance and received.clients == len(found)
    message = "" if done else f"q moved by {change:.2g} sds; raise rounds="
    return after, Report(NewtonInfo(change), Status.CONVERGED if done else Status.RUNNING, message)


def _reject(state: NewtonState, reply: Message) -> str | None:
    after = state.prior.precision + reply["precision"]
    return None if np.all(np.linalg.eigvalsh(after + after.T) > 0) else "'precision' leaves no posterior"


def _final_message(state: NewtonState, client_id: str) -> Message:
    q = _q(state)
    cavity = gaussian.quotient(q, state.quadratics[client_id]) if client_id in state.quadratics else q
    return pack_target(q, cavity, state.prior_share)
