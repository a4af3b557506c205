"""What counts as a reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.contracts import Failure, OnlySums, Received, Reply, Request, sum_replies
from fedppl.settings import one_line
from fedppl.types import Layout, Message

# Diagnostics of one reply, and of one client over a run; the table of rounds has a column for each.
MOST_INFOS = 64
_LONGEST_NAME = 100
# What that table has beside diagnostics.
_TAKEN = frozenset({"round", "client", "outcome", "reason", "bytes_down", "bytes_up", "seconds", "released"})


def why_not(reply: Any, request: Request, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a reply does not count, or None if it does; one line, whatever was sent."""
    try:
        reason = _why_not(reply, request, layout, shapes)
    except Exception as error:  # of an object whose own methods raise
        reason = f"its reply cannot be read ({type(error).__name__})"
    if reason is None:
        return None
    return one_line(reason)


def _why_not(reply: Any, request: Request, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    if reply is None:
        return "no reply"
    if isinstance(reply, Failure):
        return f"{reply.reason}: {reply.private}" if reply.private else str(reply.reason)
    if not isinstance(reply, Reply):
        return f"{type(reply).__name__} is no reply"
    # Types first: what compares in a way of its own, an array say, must not be asked whether it is equal.
    if type(reply.client_id) is not str or reply.client_id != request.client_id:
        return f"reply of client {reply.client_id!r} to the request of client {request.client_id!r}"
    if type(reply.nonce) is not int or reply.nonce != request.nonce:
        return f"reply to request {reply.nonce!r}, but the latest is {request.nonce}"
    if type(reply.fingerprint) is not str or reply.fingerprint != layout.fingerprint:
        return f"layout fingerprint {reply.fingerprint} differs from {layout.fingerprint}: another model runs there"
    message: Any = reply.message
    if not isinstance(message, Mapping):
        return f"message of type {type(message).__name__} is no mapping of arrays"
    if len(message) > 2 * len(shapes) + 8 or set(message) != set(shapes):
        some = sorted(one_line(str(name))[:30] for name in list(message)[:12])
        more = f" and {len(message) - 12} others" if len(message) > 12 else ""
        return f"reply holds {some}{more}, expected {sorted(shapes)}"
    for name, shape in shapes.items():
        value = message[name]
        kind = type(value)  # NumPy's own: a subclass may say of itself what it likes
        if kind not in (np.ndarray, float) and not (issubclass(kind, np.generic) and np.dtype(kind).type is kind):
            return f"{name!r} is of type {type(value).__name__}, expected an array"
        if np.shape(value) != shape:
            return f"{name!r} has shape {np.shape(value)}, expected {shape}"
        # Wider floats than float64 hold numbers that it does not.
        dtype = np.asarray(value).dtype
        if dtype.kind != "f" or dtype.itemsize > 8 or not np.all(np.isfinite(value)):
            return f"{name!r} is not all finite real numbers (of type {dtype})"
    if type(reply.reason) is not str:
        return f"'reason' is of type {type(reply.reason).__name__}, expected a text"
    return why_no_info(reply.info)


def why_no_info(info: Any) -> str | None:
    """Why diagnostics do not count, or None if they do."""
    if not isinstance(info, Mapping):
        return "'info' is not numbers by name"
    if len(info) > MOST_INFOS:
        return f"'info' has {len(info)} diagnostics, expected {MOST_INFOS} at most"
    for name, value in info.items():
        if type(name) is not str or type(value) not in (float, np.float64):
            return "'info' is not numbers by name"
        if not (name.isprintable() and 0 < len(name) <= _LONGEST_NAME) or "/" in name or name in _TAKEN:
            return f"'info' has the name {name[:_LONGEST_NAME]!r}: taken, too long, or not printable"
    return None


def why_no_sum(total: Message, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a sum of replies is of no use, or None if it is."""
    if set(total) != set(shapes):
        return f"the sum of replies holds {sorted(total)}, expected {sorted(shapes)}"
    for name, shape in shapes.items():
        if np.shape(total[name]) != shape:
            return f"the sum of {name!r} has shape {np.shape(total[name])}, expected {shape}"
        if not np.all(np.isfinite(total[name])):
            return f"the sum of {name!r} is not all finite"
    return None


def released(message: Message, infos: Mapping[str, Mapping[str, float]]) -> str:
    """What each client's reply held, like this one: array names with sizes, and the names of its diagnostics."""
    arrays = ", ".join(f"{name} ({np.size(value)})" for name, value in message.items())
    names = sorted({name for info in infos.values() for name in info})
    diagnostics = f"diagnostics {', '.join(names)}" if names else ""
    return "; ".join(part for part in (arrays, diagnostics) if part)


def received(replies: Mapping[str, Message], *, summed: bool) -> Received:
    """What the server is given of a round: every reply, or the sum of all.

    >>> received({"a": {"weight": np.array(2.0)}}, summed=True).sums()
    {'weight': array(2.)}
    """
    if summed:
        return Received(OnlySums(), sum_replies(replies), len(replies))
    return Received(dict(replies), {}, len(replies))
