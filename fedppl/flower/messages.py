"""Flower's messages: arrays and texts as records, and `Post`, which pushes and pulls them."""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedppl.sites import KINDS, Absent, Content, Letter, parcel_of
from fedppl.sites import decode as _decode
from fedppl.sites.decode import Parcel
from fedppl.types import Message

if TYPE_CHECKING:
    from flwr.serverapp import Grid


def register(app: ClientApp, reply: Callable[[FlowerMessage, Context], FlowerMessage]) -> None:
    """Register one function for all types of messages."""
    for kind in KINDS:
        category, action = kind.split(".")
        {"query": app.query, "train": app.train, "evaluate": app.evaluate}[category](action)(reply)


def read_message(message: FlowerMessage) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Arrays and texts of a message; empty where it cannot be read, which the site then refuses as malformed."""
    try:
        return parcel_of(unread(message))
    except Exception:
        return {}, {}


def to_content(arrays: Message, texts: Mapping[str, str]) -> RecordDict:
    """Content of a Flower message: a record of arrays and a record of texts."""
    record = ArrayRecord({name: Array(np.asarray(value, order="C")) for name, value in arrays.items()})
    return RecordDict({"arrays": record, "texts": ConfigRecord(dict(texts))})


def unread(message: FlowerMessage) -> Content:
    """What a message holds: bytes of arrays, as Flower itself would believe their declared type and shape."""

    def arrays() -> dict[str, Any]:
        with _decode.reading("'arrays'"):
            record = _record(message.content, "arrays", ArrayRecord)
            return {name: value.data if value.stype == "numpy.ndarray" else None for name, value in record.items()}

    return Content(lambda: _record(message.content, "texts", ConfigRecord), arrays)


def _record(content: RecordDict, name: str, kind: type) -> Mapping[str, Any]:
    """One of the two records of a message."""
    with _decode.reading(f"the message's record {name!r}"):
        record = content.get(name)
        is_one_of_two = type(record) is kind and len(content) == 2
        _decode.require(is_one_of_two, "a message that is not of the records 'arrays' and 'texts'")
        return dict(record or {})


# Messages to and from the nodes of a Flower grid ----------------------------------------------------------------------

# Errors in Flower where a message does not hold what it declares; other errors are the connection's.
_UNREADABLE: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
_UNREADABLE += (ArithmeticError, RecursionError, MemoryError, struct.error, DecodeError)

_PATIENCE = 2.0  # seconds with a call for messages that does not return


class _Pulled(NamedTuple):
    """The ids that one call asked for, and its result."""

    asked: Sequence[str]
    result: Sequence[FlowerMessage] | Exception


class Post:
    """Sends messages to a grid's nodes and polls for replies every `poll` seconds."""

    run = ""

    def __init__(self, grid: Grid, poll: float, grace: float) -> None:
        self._grid = grid
        self.poll = poll
        self.grace = grace
        self._singly = False  # whether messages are pulled one at a time
        self._pulls: dict[str, int | None] = {}  # messages in calls that have not returned; the node of a single one
        self._results: queue.SimpleQueue[_Pulled] = queue.SimpleQueue()

    def nodes(self) -> dict[int, str]:
        """Connected nodes, with their authenticated names."""
        return {int(node.node_id): str(node.name or "") for node in self._grid.get_nodes()}

    def push(self, node_id: int, kind: str, parcel: Parcel, deadline: float) -> str | None:
        """Send a message; its id, or None where it could not be sent."""
        message = FlowerMessage(
            content=to_content(*parcel), dst_node_id=node_id, message_type=kind, ttl=deadline + self.grace
        )
        # One at a time: where a node has just left, some grids leave its id out of the list and shift the others.
        return next(iter(self._grid.push_messages([message])), None) or None

    def pull(self, asked: Mapping[str, int], *, singly: bool = False) -> list[tuple[str, Letter]]:
        """Replies that have arrived to messages (ids, with the nodes that were asked), at most one to each.

        Flower fails as a whole if one of several messages cannot be unpacked, and waits for one that was announced and
        never sent. From then on they are pulled one by one. What a call brings after `_PATIENCE` seconds is for a later
        `pull`.
        """
        free = [message_id for message_id in asked if message_id not in self._pulls]
        for group in [[message_id] for message_id in free] if singly or self._singly else [free] if free else []:
            self._pulls |= dict.fromkeys(group, asked[group[0]] if len(group) == 1 else None)
            threading.Thread(target=self._fetch, args=(group,), daemon=True).start()
        letters: dict[str, Letter] = {}
        end = time.monotonic() + _PATIENCE
        while any(message_id in self._pulls for message_id in free) or not self._results.empty():
            try:
                pulled = self._results.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._singly = True
                break
            for message_id in pulled.asked:
                self._pulls.pop(message_id, None)
            if isinstance(pulled.result, Exception):
                if not isinstance(pulled.result, _UNREADABLE):
                    if set(pulled.asked) & set(free):
                        raise pulled.result
                    continue  # an earlier call, which was given up: the connection may have recovered
                if len(pulled.asked) == 1:
                    letters[pulled.asked[0]] = f"its message cannot be read ({type(pulled.result).__name__})"
                    continue
                self._singly = True
                return [*letters.items(), *self.pull({k: v for k, v in asked.items() if k not in letters})]
            for message in pulled.result:
                message_id, sender = message.metadata.reply_to_message_id, message.metadata.src_node_id
                # Dropped: a reply to another message, one of another node, or a second one.
                if message_id in asked and (message.has_error() or sender == asked[message_id]):
                    letters.setdefault(message_id, _letter(message))
        return list(letters.items())

    def silent(self) -> set[int]:
        """Nodes that have announced a message but not sent it yet."""
        return {node_id for node_id in self._pulls.values() if node_id is not None}

    def _fetch(self, group: Sequence[str]) -> None:
        try:
            self._results.put(_Pulled(group, list(self._grid.pull_messages(group))))
        except Exception as error:  # `pull` decides what it means
            self._results.put(_Pulled(group, error))


_ERRORS = {  # the first two come again
    1: "the site's app could not be loaded",
    2: "the site's app raised an exception; see the site's log",
    3: Absent("the message was not available any more"),
    4: Absent("the reply was not available any more"),
    5: Absent("the site is not reachable"),
    8: Absent("the site's app crashed"),
}


def _letter(message: FlowerMessage) -> Letter:
    """A message's content, or Flower's error without its details, which may quote the site's data."""
    if not message.has_error():
        return unread(message)
    return _ERRORS.get(message.error.code, Absent(f"Flower error {message.error.code}"))
