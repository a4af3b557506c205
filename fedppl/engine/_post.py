"""Letters to and from the nodes of a Flower grid: what is pushed and pulled, whatever comes back."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping

from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedppl.engine import _wire
from fedppl.engine._decode import require
from fedppl.engine._records import to_content

__all__ = ["Letter", "Post", "content_of", "trouble"]

# What goes wrong in Flower where a message is not what it says; other errors are the connection's.
_UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    struct.error,
    DecodeError,
)

Letter = FlowerMessage | str  # or why it could not be unpacked


class Post:
    """A grid, and how often to look into it (seconds)."""

    def __init__(self, grid: Grid, poll: float, grace: float) -> None:
        self._grid = grid
        self.poll = poll
        self.grace = grace
        self._singly = False  # whether messages are pulled one at a time

    def nodes(self) -> dict[int, str]:
        """Nodes that are connected, with their authenticated names."""
        return {int(node.node_id): str(node.name or "") for node in self._grid.get_nodes()}

    def push(self, node_id: int, kind: str, parcel: _wire.Parcel, deadline: float) -> str | None:
        message = FlowerMessage(
            content=to_content(*parcel), dst_node_id=node_id, message_type=kind, ttl=deadline + self.grace
        )
        # One at a time: where a node has just left, some grids leave its id out of the list and shift the others.
        return next(iter(self._grid.push_messages([message])), None) or None

    def pull(self, asked: Mapping[str, int]) -> list[tuple[str, Letter]]:
        """Replies that are there, one at most to each of the messages (ids, with the nodes that were asked).

        Flower unpacks a message before it hands it over. One that it cannot unpack ends its call, and takes along what
        came with it: from then on they are pulled one by one, so that nobody's reply is lost with another's.
        """
        if not asked:
            return []
        groups = [[message_id] for message_id in asked] if self._singly else [list(asked)]
        found: dict[str, Letter] = {}
        for group in groups:
            try:
                messages = list(self._grid.pull_messages(group))
            except _UNREADABLE as error:
                if len(group) > 1:
                    self._singly = True
                    return self.pull(asked)
                found[group[0]] = f"its message cannot be read ({type(error).__name__})"
                continue
            for message in messages:
                message_id, sender = message.metadata.reply_to_message_id, message.metadata.src_node_id
                # What answers nothing that was asked, or another's question, or a second time, is no reply.
                if message_id in asked and (message.has_error() or sender == asked[message_id]):
                    found.setdefault(message_id, message)
        return list(found.items())

    def replies(self, asked: Mapping[str, int], deadline: float) -> Iterable[tuple[str, Letter]]:
        """Yield replies as they come, until all are there or the deadline (seconds) has passed."""
        waiting, end = dict(asked), time.monotonic() + deadline
        while waiting:
            looked = time.monotonic()
            for message_id, message in self.pull(waiting):
                del waiting[message_id]
                yield message_id, message
            if not waiting or time.monotonic() > end:
                return
            # A look that takes long (many messages) is not repeated at once: it holds up what it waits for.
            pause = max(self.poll, time.monotonic() - looked)
            time.sleep(min(pause, max(0.0, end - time.monotonic())))


def content_of(message: Letter) -> RecordDict:
    """What a letter holds."""
    require(not isinstance(message, str), "no message")
    return message.content  # type: ignore[union-attr]


def trouble(message: Letter) -> str | None:
    """Why a letter holds no answer, in one line, or None.

    Details of Flower's may quote the site's data and stay out of our results.
    """
    if isinstance(message, str):
        return message
    if not message.has_error():
        return None
    meanings = {
        1: "the site's app could not be loaded",
        2: "the site's app raised an exception; see the site's log",
        3: "the message was not available any more",
        4: "the reply was not available any more",
        5: "the site is not reachable",
        8: "the site's app crashed",
    }
    return meanings.get(message.error.code, f"Flower error {message.error.code}")
