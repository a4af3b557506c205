"""A client's answer to a request, which every engine calls, and the sum of a round's replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import (
    Accept,
    AnyAlgorithm,
    ClientUpdate,
    ClientView,
    Exchange,
    Failure,
    Heard,
    Reply,
    Request,
    Requests,
    Summed,
    sum_replies,
    unheard,
)
from fedppl.engine.guard import REFUSED, Guard, admit, released
from fedppl.numerics.streams import stream
from fedppl.settings import one_line, some_of
from fedppl.types import DeclarationError, LocalFailure, Message

logger = logging.getLogger(__name__)


def require_fit(algorithm: AnyAlgorithm, client: ClientView) -> None:
    """Raise DeclarationError before any round when the algorithm cannot use the client's model."""
    layout = client.layout
    if layout.binary and not algorithm.needs.indicators:
        remedy = "Sum them out (pm.Mixture), or use an algorithm for models with indicators that select"
        why = f"shared variables {list(layout.binary)} are discrete, and {algorithm.name} needs continuous parameters"
        raise DeclarationError(f"{why}. {remedy}.")
    if layout.prior.precision.ndim == 1 and not algorithm.needs.diagonal_prior:
        remedy = "Share fewer, or use an algorithm that keeps their prior by coordinate"
        why = f"the model shares {layout.size} coordinates, and {algorithm.name} keeps matrices of them"
        raise DeclarationError(f"{why}. {remedy}.")
    algorithm.needs.check(client)


def say_unused(algorithm: AnyAlgorithm, client: ClientView) -> None:
    """Log the names of variables whose declared prior sds the algorithm does not use."""
    if names := algorithm.needs.unused_priors(client):
        text = "%s makes no use of the declared prior sds of %s: they change nothing"
        logger.warning(text, algorithm.name, some_of(names))


def answer(
    algorithm: AnyAlgorithm, client: ClientView, personal: Any, request: Request, guard: Guard | None = None
) -> tuple[Any, Reply | Failure]:
    """Run the client's part of the algorithm, if its policy allows; an error is a Failure, and keeps personal state."""
    admitted = request if guard is None else admit(guard, algorithm, client, request)
    if admitted is None:
        return personal, Failure(request.client_id, request.nonce, REFUSED)
    after, reply = checked(algorithm, client, personal, admitted, lambda: _alone(algorithm, client, personal, admitted))
    if guard is not None and not released(guard, algorithm.disclosure.noise_multiplier, request, reply):
        return after, Failure(request.client_id, request.nonce, REFUSED)
    return after, reply


def message_of(request: Request) -> dict[str, Any]:
    """A copy of the message: in one process its arrays are the server's, and a client may write into them."""
    return {name: np.array(value) for name, value in request.message.items()}


def _alone(algorithm: AnyAlgorithm, client: ClientView, personal: Any, request: Request) -> ClientUpdate[Any]:
    message = message_of(request)
    if request.report:
        return algorithm.update_client(client, personal, message, stream(request.seed))
    if algorithm.unreported is None:
        return ClientUpdate(personal, {})
    after, info = algorithm.unreported(client, personal, message, stream(request.seed))
    return ClientUpdate(after, {}, info)


def checked(
    algorithm: AnyAlgorithm,
    client: ClientView,
    personal: Any,
    request: Request,
    compute: Callable[[], ClientUpdate[Any]],
) -> tuple[Any, Reply | Failure]:
    """Compute a client's update; return its personal state and reply, or a Failure if that goes wrong."""
    try:
        update: Any = compute()
        if not isinstance(update, ClientUpdate) or not isinstance(update.info, Mapping):
            kind = f"an object of type {type(update).__name__}"
            if isinstance(update, ClientUpdate):
                kind = f"a ClientUpdate whose info is of type {type(update.info).__name__}"
            raise LocalFailure(f"{algorithm.name}: the client's part returned {kind}, expected a ClientUpdate")
        numbers = {key: float(value) for key, value in update.info.items() if key != "reason"}
        reason = str(update.info.get("reason", ""))
    except LocalFailure as failure:
        return personal, Failure(request.client_id, request.nonce, str(failure))
    except Exception as error:  # no error of one client may end the others' run
        extra = {"run": request.run, "round": request.round, "client": request.client_id}
        logger.log(level_of(error), "client %s failed", request.client_id, exc_info=True, extra=extra)
        return personal, Failure(request.client_id, request.nonce, type(error).__name__, private=str(error))
    reply = Reply(request.client_id, request.nonce, client.layout.fingerprint, update.reply, numbers, reason)
    return update.personal, reply


def level_of(error: Exception) -> int:
    """Level to log an error at: one that is not numerical is a mistake in a user's code."""
    numerical = isinstance(error, ArithmeticError | np.linalg.LinAlgError | ValueError | LocalFailure)
    return logging.DEBUG if numerical else logging.ERROR


# The result of a round's requests: each client's reply, or their sum where that is enough -----------------------------


class Taken(NamedTuple):
    """Accepted replies by client, and the reasons against the others."""

    messages: dict[str, Message]  # of clients that were asked for a reply
    infos: dict[str, Mapping[str, float]]  # diagnostics, also of clients that sent nothing else
    failures: dict[str, str]
    reasons: dict[str, str]  # why a part of a reply could not be computed


def take(
    exchange: Exchange, requests: Requests, accept: Accept, deadline: float | None, heard: Heard = unheard
) -> Taken:
    """Ask every client, and check every reply."""
    made = {client_id: requests.make(client_id) for client_id in requests.clients}
    answers = exchange(made, deadline, heard)
    taken = Taken({}, {}, {}, {})
    for client_id, request in made.items():
        reply = answers.get(client_id)
        reason = accept(request, reply)
        if reason is not None or not isinstance(reply, Reply):
            taken.failures[client_id] = str(reason)
            continue
        taken.infos[client_id] = reply.info
        if reply.reason:
            taken.reasons[client_id] = one_line(reply.reason)
        if request.report:
            taken.messages[client_id] = reply.message
    return taken


def take_sum(
    exchange: Exchange, requests: Requests, accept: Accept, deadline: float | None, heard: Heard = unheard
) -> Summed:
    """The sum of replies, for engines that have no sum of their own."""
    taken = take(exchange, requests, accept, deadline, heard)
    return with_total(taken, sum_replies(taken.messages))


def with_total(taken: Taken, total: Message) -> Summed:
    """Replies as they are recorded, with their sum, or one of them where they are not summed."""
    sizes = {client_id: n_bytes(message) for client_id, message in taken.messages.items()}
    return Summed(total, len(sizes), taken.failures, taken.infos, taken.reasons, sizes)


def n_bytes(message: Message) -> int:
    """Size of a message's arrays."""
    return sum(np.asarray(value).nbytes for value in message.values())
