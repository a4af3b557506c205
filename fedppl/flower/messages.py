"""Flower's messages: arrays and texts as their records, and letters to and from the nodes of a grid."""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedppl.flower import decode as _decode
from fedppl.flower.decode import Parcel, require
from fedppl.types import Message

if TYPE_CHECKING:
    from flwr.serverapp import Grid

# Message types: category and action.
HELLO, ASK, CONSTRAIN, CONCLUDE = "query.fedppl_hello", "train.fedppl", "query.fedppl_constrain", "evaluate.fedppl"
AGREE = "query.fedppl_agree"


def register(app: ClientApp, reply: Callable[[FlowerMessage, Context], FlowerMessage]) -> None:
    """Have a site's app answer all types of messages by one function."""
    for kind in (HELLO, ASK, CONSTRAIN, CONCLUDE, AGREE):
        category, action = kind.split(".")
        {"query": app.query, "train": app.train, "evaluate": app.evaluate}[category](action)(reply)


def read_message(message: FlowerMessage) -> tuple[Mapping[str, Any], dict[str, str]]:
    """What came; nothing where it cannot be read, which the site refuses like anything else that is malformed."""
    try:
        return from_content(message.content)
    except Exception:
        return {}, {}


def to_content(arrays: Message, texts: Mapping[str, str]) -> RecordDict:
    """Content of a Flower message: one record of arrays and one of texts."""
    record = ArrayRecord({name: Array(np.asarray(value, order="C")) for name, value in arrays.items()})
    return RecordDict({"arrays": record, "texts": ConfigRecord(dict(texts))})


def texts_of(content: RecordDict) -> dict[str, str]:
    """Texts of a Flower message, or `Malformed`."""
    return _decode.texts(_record(content, "texts", ConfigRecord))


def from_content(
    content: RecordDict,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    what: str = "message",
    most: int = _decode.ARRAYS_BYTES,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arrays and texts of a Flower message, or `Malformed`; with `shapes`, arrays of these names and shapes alone,
    else of `most` bytes in all.

    The bytes are read here and not by Flower, which believes what an array declares of itself.
    """
    texts = texts_of(content)
    with _decode.reading("'arrays'"):
        record = _record(content, "arrays", ArrayRecord)
        plain = {name: value.data if value.stype == "numpy.ndarray" else None for name, value in record.items()}
    return _decode.arrays(plain, shapes, what, most), texts


def _record(content: RecordDict, name: str, kind: type) -> Mapping[str, Any]:
    """One of the two records that a message has."""
    with _decode.reading(f"the message's record {name!r}"):
        _decode.require(len(content) == 2, f"a message of {len(content)} records, expected 'arrays' and 'texts'")
        record = content.get(name)
        _decode.require(type(record) is kind, f"the message has no record {name!r}")
        return dict(record or {})


# Letters to and from the nodes of a Flower grid: what is pushed and pulled, whatever comes back -----------------------

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

_PATIENCE = 2.0  # seconds with a call for messages that does not return

Letter = FlowerMessage | str  # or why it could not be unpacked


class _Pulled(NamedTuple):
    """Messages that were asked for in one call, and what it brought."""

    asked: Sequence[str]
    found: Sequence[FlowerMessage] | Exception


class Post:
    """A grid, and how often to look into it (seconds)."""

    def __init__(self, grid: Grid, poll: float, grace: float) -> None:
        self._grid = grid
        self.poll = poll
        self.grace = grace
        self._singly = False  # whether messages are pulled one at a time
        self._pulls: dict[str, int | None] = {}  # messages in calls that have not returned; the node of a single one
        self._came: queue.SimpleQueue[_Pulled] = queue.SimpleQueue()

    def nodes(self) -> dict[int, str]:
        """Nodes that are connected, with their authenticated names."""
        return {int(node.node_id): str(node.name or "") for node in self._grid.get_nodes()}

    def push(self, node_id: int, kind: str, parcel: Parcel, deadline: float) -> str | None:
        """Send a message; its id, or None where it could not be sent."""
        message = FlowerMessage(
            content=to_content(*parcel), dst_node_id=node_id, message_type=kind, ttl=deadline + self.grace
        )
        # One at a time: where a node has just left, some grids leave its id out of the list and shift the others.
        return next(iter(self._grid.push_messages([message])), None) or None

    def pull(self, asked: Mapping[str, int], *, singly: bool = False) -> list[tuple[str, Letter]]:
        """Replies that are there, one at most to each of the messages (ids, with the nodes that were asked).

        Flower unpacks a message before it hands it over, and waits for one that was announced and never sent. Either
        takes along what came with it: from then on messages are pulled one by one, so that nobody's reply is lost with
        another's. No call is waited for longer than a moment; what it brings later is handed over later.
        """
        free = [message_id for message_id in asked if message_id not in self._pulls]
        for group in [[one] for one in free] if singly or self._singly else [free] if free else []:
            self._pulls |= dict.fromkeys(group, asked[group[0]] if len(group) == 1 else None)
            threading.Thread(target=self._fetch, args=(group,), daemon=True).start()
        found: dict[str, Letter] = {}
        end = time.monotonic() + _PATIENCE
        while any(message_id in self._pulls for message_id in free) or not self._came.empty():
            try:
                pulled = self._came.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._singly = True
                break
            for message_id in pulled.asked:
                self._pulls.pop(message_id, None)
            if isinstance(pulled.found, Exception):
                if not isinstance(pulled.found, _UNREADABLE):
                    if set(pulled.asked) & set(free):
                        raise pulled.found
                    continue  # of a call that was given up: what it says of the connection is not of now
                if len(pulled.asked) == 1:
                    found[pulled.asked[0]] = f"its message cannot be read ({type(pulled.found).__name__})"
                    continue
                self._singly = True
                return [*found.items(), *self.pull({k: v for k, v in asked.items() if k not in found})]
            for message in pulled.found:
                message_id, sender = message.metadata.reply_to_message_id, message.metadata.src_node_id
                # What answers nothing that was asked, or another's question, or a second time, is no reply.
                if message_id in asked and (message.has_error() or sender == asked[message_id]):
                    found.setdefault(message_id, message)
        return list(found.items())

    def silent(self) -> set[int]:
        """Nodes that have announced a message and not sent it yet."""
        return {node_id for node_id in self._pulls.values() if node_id is not None}

    def _fetch(self, group: Sequence[str]) -> None:
        try:
            self._came.put(_Pulled(group, list(self._grid.pull_messages(group))))
        except Exception as error:  # the caller's, who knows what to do with it
            self._came.put(_Pulled(group, error))

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
