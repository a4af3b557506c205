"""What came of a round's requests: each client's reply, or where that is enough, their sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl.contracts import Accept, Exchange, Heard, Reply, Requests, Summed, sum_replies, unheard
from fedppl.settings import one_line
from fedppl.types import Message


class Taken(NamedTuple):
    """Replies that count, by client, and why others do not."""

    messages: Mapping[str, Message]  # of those that were asked for a reply
    infos: Mapping[str, Mapping[str, float]]  # diagnostics, also of those that sent nothing else
    failures: Mapping[str, str]
    reasons: Mapping[str, str]  # of what could not be computed, where the rest is of use all the same


def take(
    exchange: Exchange, requests: Requests, accept: Accept, deadline: float | None, heard: Heard = unheard
) -> Taken:
    """Ask every client, and look at every reply."""
    made = {client_id: requests.make(client_id) for client_id in requests.clients}
    answers = exchange(made, deadline, heard)
    messages: dict[str, Message] = {}
    infos: dict[str, Mapping[str, float]] = {}
    failures: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for client_id, request in made.items():
        reply = answers.get(client_id)
        reason = accept(request, reply)
        if reason is not None or not isinstance(reply, Reply):
            failures[client_id] = str(reason)
            continue
        infos[client_id] = reply.info
        if reply.reason:
            reasons[client_id] = one_line(reply.reason)
        if request.report:
            messages[client_id] = reply.message
    return Taken(messages, infos, failures, reasons)


def take_sum(
    exchange: Exchange, requests: Requests, accept: Accept, deadline: float | None, heard: Heard = unheard
) -> Summed:
    """The sum of replies that an engine brings one by one, for engines that have no sum of their own."""
    found = take(exchange, requests, accept, deadline, heard)
    sizes = {client_id: n_bytes(message) for client_id, message in found.messages.items()}
    total = sum_replies(found.messages)
    return Summed(total, len(sizes), found.failures, found.infos, found.reasons, sizes)


def n_bytes(message: Message) -> int:
    """Size of a message's arrays."""
    return sum(np.asarray(value).nbytes for value in message.values())
