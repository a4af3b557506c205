"""What counts as a reply, and how large a message is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedppl.types import Failure, Layout, Message, Reply, Request

__all__ = ["n_bytes", "why_not"]


def why_not(
    reply: Reply | Failure | None, request: Request, layout: Layout, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Why a reply does not count, or None if it does."""
    if reply is None:
        return "no reply"
    if isinstance(reply, Failure):
        return reply.reason
    if reply.client_id != request.client_id:
        return f"reply of client {reply.client_id!r} to the request of client {request.client_id!r}"
    if reply.nonce != request.nonce:
        return f"reply to request {reply.nonce}, but the latest is {request.nonce}"
    if reply.fingerprint != layout.fingerprint:
        return f"layout fingerprint {reply.fingerprint} differs from {layout.fingerprint}: another model runs there"
    if set(reply.message) != set(shapes):
        return f"reply holds {sorted(reply.message)}, expected {sorted(shapes)}"
    for name, shape in shapes.items():
        value = np.asarray(reply.message[name])
        if value.shape != shape:
            return f"{name!r} has shape {value.shape}, expected {shape}"
        if not np.issubdtype(value.dtype, np.floating) or not np.all(np.isfinite(value)):
            return f"{name!r} is not all finite real numbers"
    return None


def n_bytes(message: Message) -> int:
    """Size of a message's arrays."""
    return sum(np.asarray(value).nbytes for value in message.values())
