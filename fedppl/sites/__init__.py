"""The protocol of sites: types of messages, and what carries them (`Transport`). Nothing here knows what does.

Flower's transport is `fedppl.flower.messages.Post`, that of files is in `fedppl.sites.files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from fedppl.settings import one_line
from fedppl.sites import decode as _decode
from fedppl.sites.decode import Malformed, Parcel

T = TypeVar("T")

# Message types: category and action.
HELLO, AGREE, ASK, CONCLUDE = "query.fedppl_hello", "query.fedppl_agree", "train.fedppl", "evaluate.fedppl"
GREET, JOIN, GATE = "query.fedppl_greet", "query.fedppl_join", "query.fedppl_gate"  # of sites whose sums are secure
KINDS = HELLO, AGREE, GREET, JOIN, GATE, ASK, CONCLUDE


class Absent(str):
    """Why nothing has come from a site: it may be asked the same again."""

    __slots__ = ()


class Content(NamedTuple):
    """What a message holds, not read yet: texts, and arrays' bytes in NumPy's format, by name; both of any type."""

    texts: Callable[[], Mapping[Any, Any]]
    arrays: Callable[[], Mapping[Any, Any]]


Letter = Content | str  # or the reason why there is none, `Absent` where it may come


class Transport(Protocol):
    """Carries messages to nodes, of which each is a site's, and what these answer."""

    poll: float  # seconds between two looks for replies
    grace: float  # seconds that a message outlives its deadline, so that a reply at the last moment arrives
    run: str  # hexadecimal name of a run that is kept, which a later call goes on with; "" where none is

    def nodes(self) -> dict[int, str]:
        """Connected nodes, with their authenticated names, "" without one."""

    def push(self, node_id: int, kind: str, parcel: Parcel, deadline: float) -> str | None:
        """Send a message; its id, or None where it could not be sent."""

    def pull(self, asked: Mapping[str, int], *, singly: bool = False) -> list[tuple[str, Letter]]:
        """At most one reply to each message (ids, with the nodes asked); `singly` where none may hold up others."""

    def silent(self) -> set[int]:
        """Nodes that have announced a message but not sent it yet."""


def texts_of(content: Content) -> dict[str, str]:
    """Texts of a message, or `Malformed`."""
    return _decode.texts(content.texts())


def parcel_of(
    content: Content, shapes: Mapping[str, tuple[int, ...]] | None = None, most: int = _decode.ARRAYS_BYTES
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arrays and texts of a message, or `Malformed`; `shapes` and `most` as in `decode.arrays`."""
    texts = texts_of(content)
    return _decode.arrays(content.arrays(), shapes, most), texts


def read_letter(letter: Letter, read: Callable[[Content], T], cannot: str) -> T | str:
    """What `read` makes of a content, or why it is no answer: by `cannot` and a rule where it is malformed."""
    if isinstance(letter, str):
        return letter
    try:
        with _decode.reading("it"):
            return read(letter)
    except Malformed as error:
        return f"{cannot}: {one_line(error)}"
