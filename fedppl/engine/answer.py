"""What a client does with a request, wherever it runs. Every engine calls this and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.engine._guard import REFUSED, Guard, admit, released
from fedppl.types import Algorithm, DeclarationError, Failure, LocalFailure, Message, Reply, Request

__all__ = ["REFUSED", "answer", "require_fit", "say_unused", "stream"]

logger = logging.getLogger(__name__)


def require_fit(algorithm: Algorithm, client: Any) -> None:
    """Raise DeclarationError before any round when the algorithm cannot use the client's model."""
    if client.layout.binary and not algorithm.binary:
        raise DeclarationError(
            f"shared variables {list(client.layout.binary)} are discrete, and {algorithm.name} needs continuous "
            "parameters. Sum them out of the likelihood (for example with pm.Mixture), or use fedppl.LMCAscent() if "
            "the model is one of coregionalisation."
        )
    if client.layout.prior.precision.ndim == 1 and not algorithm.large:
        raise DeclarationError(
            f"the model shares {client.layout.size} coordinates, and {algorithm.name} keeps matrices of them. Share "
            "fewer, or use fedppl.FedSI() or fedppl.NetworkAveraging() if they are the weights of a network."
        )
    algorithm.check(client)


def say_unused(algorithm: Algorithm, client: Any) -> None:
    """Log the names of variables whose declared prior sd changes nothing."""
    names = algorithm.unused(client) if algorithm.unused is not None else ()
    if names:
        more = f" and {len(names) - 6} others" if len(names) > 6 else ""
        logger.warning(
            "%s makes no use of the declared prior sds of %s%s: they change nothing",
            algorithm.name,
            ", ".join(map(repr, names[:6])),
            more,
        )


def stream(seed: tuple[int, ...]) -> np.random.Generator:
    """Random stream of a (seed, round, client) triple."""
    return np.random.default_rng(np.random.SeedSequence(seed))


def answer(
    algorithm: Algorithm, client: Any, personal: Any, request: Request, guard: Guard | None = None
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


def _answered(algorithm: Algorithm, client: Any, personal: Any, request: Request) -> tuple[Any, Reply | Failure]:
    message: Message = {}
    info: Mapping[str, float | str]
    try:
        if request.report:
            after, message, info = algorithm.update_client(client, personal, request.message, stream(request.seed))
        elif algorithm.stay is not None:
            after, info = algorithm.stay(client, personal, request.message, stream(request.seed))
        else:
            after, info = personal, {}
    except LocalFailure as failure:
        return personal, Failure(request.client_id, request.nonce, str(failure))
    except Exception as error:  # one client's trouble, whatever it is, must not end the others' run
        numerical = isinstance(error, ArithmeticError | np.linalg.LinAlgError | ValueError)
        level = logging.DEBUG if numerical else logging.ERROR  # the rest is a mistake in somebody's code
        logger.log(level, "client %s failed", request.client_id, exc_info=True, extra={"client": request.client_id})
        return personal, Failure(request.client_id, request.nonce, type(error).__name__, private=str(error))
    kept = {key: float(value) for key, value in info.items() if key != "reason"}
    reason = str(info.get("reason", ""))
    return after, Reply(request.client_id, request.nonce, client.layout.fingerprint, message, kept, reason)
