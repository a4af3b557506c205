"""What a client does with a request, wherever it runs. Every engine calls this; `batches` does for many at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedppl.contracts import AnyAlgorithm, ClientUpdate, ClientView, Failure, Reply, Request
from fedppl.engine.guard import REFUSED, Guard, admit, released
from fedppl.numerics.streams import stream
from fedppl.types import DeclarationError, LocalFailure

logger = logging.getLogger(__name__)


def require_fit(algorithm: AnyAlgorithm, client: ClientView) -> None:
    """Raise DeclarationError before any round when the algorithm cannot use the client's model."""
    if client.layout.binary and not algorithm.needs.indicators:
        raise DeclarationError(
            f"shared variables {list(client.layout.binary)} are discrete, and {algorithm.name} needs continuous "
            "parameters. Sum them out of the likelihood (for example with pm.Mixture), or use an algorithm for "
            "models with indicators that select."
        )
    if client.layout.prior.precision.ndim == 1 and not algorithm.needs.diagonal_prior:
        raise DeclarationError(
            f"the model shares {client.layout.size} coordinates, and {algorithm.name} keeps matrices of them. Share "
            "fewer, or use an algorithm that keeps their prior by coordinate."
        )
    algorithm.needs.check(client)


def say_unused(algorithm: AnyAlgorithm, client: ClientView) -> None:
    """Log the names of variables whose declared prior sd changes nothing."""
    names = algorithm.needs.unused_priors(client)
    if names:
        more = f" and {len(names) - 6} others" if len(names) > 6 else ""
        logger.warning(
            "%s makes no use of the declared prior sds of %s%s: they change nothing",
            algorithm.name,
            ", ".join(map(repr, names[:6])),
            more,
        )


def answer(
    algorithm: AnyAlgorithm, client: ClientView, personal: Any, request: Request, guard: Guard | None = None
) -> tuple[Any, Reply | Failure]:
    """Run the client's part of the algorithm; what goes wrong becomes a Failure with its reason.

    Personal state is replaced only by a request that succeeded. With a guard nothing is computed that its policy
    refuses, and nothing leaves that could not be written down.
    """
    if guard is None:
        return _answered(algorithm, client, personal, request)
    admitted = admit(guard, algorithm, client, request)
    if admitted is None:
        return personal, Failure(request.client_id, request.nonce, REFUSED)
    after, reply = _answered(algorithm, client, personal, admitted)
    if not released(guard, algorithm, request, reply):
        return after, Failure(request.client_id, request.nonce, REFUSED)
    return after, reply


def _answered(
    algorithm: AnyAlgorithm, client: ClientView, personal: Any, request: Request
) -> tuple[Any, Reply | Failure]:
    return checked(algorithm, client, personal, request, lambda: _alone(algorithm, client, personal, request))


def message_of(request: Request) -> dict[str, Any]:
    """A copy: in one process the arrays are the server's own, and what a client writes into them is not."""
    return {name: np.array(value) for name, value in request.message.items()}


def _alone(algorithm: AnyAlgorithm, client: ClientView, personal: Any, request: Request) -> ClientUpdate[Any]:
    message = message_of(request)
    if request.report:
        return algorithm.update_client(client, personal, message, stream(request.seed))
    if algorithm.unreported is None:
        return ClientUpdate(personal, {})
    after, told = algorithm.unreported(client, personal, message, stream(request.seed))
    return ClientUpdate(after, {}, told)


def checked(
    algorithm: AnyAlgorithm,
    client: ClientView,
    personal: Any,
    request: Request,
    compute: Callable[[], ClientUpdate[Any]],
) -> tuple[Any, Reply | Failure]:
    """What a client keeps and answers, from how its update is computed; what goes wrong there becomes a Failure."""
    try:
        update = compute()
        if not isinstance(update, ClientUpdate) or not isinstance(update.info, Mapping):
            raise LocalFailure(f"{algorithm.name}: the client's part returned {_kind(update)}, expected a ClientUpdate")
        numbers = {key: float(value) for key, value in update.info.items() if key != "reason"}
        reason = str(update.info.get("reason", ""))
    except LocalFailure as failure:
        return personal, Failure(request.client_id, request.nonce, str(failure))
    except Exception as error:  # one client's trouble, whatever it is, must not end the others' run
        extra = {"client": request.client_id}
        logger.log(level_of(error), "client %s failed", request.client_id, exc_info=True, extra=extra)
        return personal, Failure(request.client_id, request.nonce, type(error).__name__, private=str(error))
    reply = Reply(request.client_id, request.nonce, client.layout.fingerprint, update.reply, numbers, reason)
    return update.personal, reply


def level_of(error: Exception) -> int:
    """How loudly a log tells of an error: what is not numerical is a mistake in somebody's code."""
    numerical = isinstance(error, ArithmeticError | np.linalg.LinAlgError | ValueError | LocalFailure)
    return logging.DEBUG if numerical else logging.ERROR


def _kind(update: Any) -> str:
    """What came in the place of a ClientUpdate."""
    if isinstance(update, ClientUpdate):
        return f"a ClientUpdate whose info is of type {type(update.info).__name__}"
    return f"an object of type {type(update).__name__}"
