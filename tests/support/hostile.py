"""Sites on the fake grid that answer what they like. Needs Flower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage

import fedppl
from fedppl.flower.messages import Post
from fedppl.sites import HELLO
from fedppl.sites.engine import SitesEngine, SitesSettings
from tests.support import malformed
from tests.support.fake_grid import FakeGrid, Node, node


def content(raw: malformed.Raw) -> RecordDict:
    """A parcel in Flower's records, whatever its bytes are."""
    arrays = {}
    for name, data in raw[0].items():
        known = type(data) is bytes
        arrays[name] = Array("float64", (), "numpy.ndarray" if known else "torch", data if known else b"")
    return RecordDict({"arrays": ArrayRecord(arrays), "texts": ConfigRecord(raw[1])})


def site(node_id: int, answer: Callable[[FlowerMessage], malformed.Raw | FlowerMessage], name: str = "") -> Node:
    """A node that answers by a function."""

    def app(message: FlowerMessage, context: Any) -> FlowerMessage:
        found = answer(message)
        return found if isinstance(found, FlowerMessage) else FlowerMessage(content(found), reply_to=message)

    return node(app, node_id, name)  # type: ignore[arg-type]


def plain(client_id: str, **changes: Any) -> Callable[[FlowerMessage], malformed.Raw]:
    """An honest site of the layout of `malformed`."""

    def answer(message: FlowerMessage) -> malformed.Raw:
        if message.metadata.message_type == HELLO:
            return malformed.hello(client_id, SETTINGS, **changes)
        nonce = message.content.config_records["texts"]["nonce"]
        return malformed.reply(client_id, int(str(nonce)))

    return answer


ALGORITHM = fedppl.EP()
SETTINGS: Mapping[str, str] = ALGORITHM.settings


def engine(nodes: Mapping[int, Node], clients: Any, *, wait: float = 0.3, grid: FakeGrid | None = None) -> SitesEngine:
    """The engine alone; no model is compiled."""
    settings = SitesSettings(clients, wait, 0.2)
    post = Post(grid or FakeGrid(dict(nodes)), 0.001, 0.01)
    return SitesEngine(post, ALGORITHM, settings, malformed.layout(), malformed.reader())
