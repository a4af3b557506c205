"""A batch whose stacks are asked client by client, where one may fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedppl.contracts import AnyAlgorithm, Batch, Summed, sum_replies
from fedppl.numerics.streams import stream
from fedppl.types import LocalFailure


def with_stacks(algorithm: AnyAlgorithm, fails: str = "", broken: int = -1) -> AnyAlgorithm:
    """The algorithm with stacks of two; one client may fail, and the call with number `broken` raises."""
    calls = [0]

    def stacks(clients: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        ids = list(clients)
        return [{name: clients[name] for name in ids[first : first + 2]} for first in range(0, len(ids), 2)]

    def summed(stack: Mapping[str, Any], message: Mapping[str, Any], workers: int) -> Summed:
        del workers
        calls[0] += 1
        if calls[0] == broken:
            raise ArithmeticError("out of numbers")
        replies, failures = {}, {}
        for client_id, client in stack.items():
            try:
                if client_id == fails:
                    raise LocalFailure("out of paper")
                replies[client_id] = algorithm.update_client(client, None, message, stream((1,))).reply
            except LocalFailure as failure:
                failures[client_id] = str(failure)
        return Summed(sum_replies(replies), len(replies), failures)

    batch = Batch(algorithm.update_client, None, lambda clients: (), lambda parts: [], stacks=stacks, summed=summed)
    return algorithm._replace(batch=batch)
