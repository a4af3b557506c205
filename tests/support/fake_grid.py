"""A Flower grid in this process: nodes run their client apps when their replies are pulled, with faults on request."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

import fedppl

# Nodes have processes of their own. Here they are threads of one, in which PyTensor's settings would be each other's.
_ONE_AT_A_TIME = threading.RLock()
# Messages can only be made inside a task of Flower's; outside, its identity has to be set by hand.
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1


class Node(NamedTuple):
    """A SuperNode: its app, and a context that lives as long as it does."""

    app: ClientApp
    context: Context
    name: str


def node(app: ClientApp, node_id: int, name: str = "", **config: Any) -> Node:
    """A fresh node with an empty context."""
    return Node(app, Context(1, node_id, dict(config), RecordDict(), {}), name)


class FakeGrid(Grid):
    """Nodes by id. `fault(message, node_id)` may return "lost", "late", an error code, or None."""

    def __init__(self, nodes: dict[int, Node], fault: Callable[[FlowerMessage, int], Any] | None = None) -> None:
        self.nodes = dict(nodes)
        self.fault = fault or (lambda message, node_id: None)
        self.sent: list[FlowerMessage] = []
        self.pending: dict[str, FlowerMessage] = {}
        self.late: set[str] = set()
        self.replies: list[FlowerMessage] = []

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **keywords: Any) -> FlowerMessage:
        raise AssertionError("deprecated by Flower")

    def send_and_receive(self, *arguments: Any, **keywords: Any) -> Iterable[FlowerMessage]:
        raise AssertionError("sleeps three seconds between polls")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node_id, name=one.name) for node_id, one in self.nodes.items()]

    def push_messages(self, messages: Iterable[FlowerMessage]) -> Iterable[str]:
        ids = []
        for message in messages:
            assert message.metadata.ttl < 43_200, "the default time to live is half a day"
            message_id = str(uuid.UUID(int=len(self.sent)))
            message.metadata.__dict__["_message_id"] = message_id
            self.sent.append(message)
            if message.metadata.dst_node_id in self.nodes:
                self.pending[message_id] = message
                ids.append(message_id)
        return ids

    def release(self) -> None:
        """Let late replies arrive."""
        self.late.clear()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[FlowerMessage]:
        out = []
        for message_id in message_ids:
            message = self.pending.get(message_id)
            if message is None or message_id in self.late:
                continue
            node_id = message.metadata.dst_node_id
            outcome = self.fault(message, node_id)
            if outcome == "late" and message_id not in self.late:
                self.late.add(message_id)
                continue
            del self.pending[message_id]
            if outcome == "lost":
                continue
            if isinstance(outcome, int):
                out.append(FlowerMessage(Error(outcome, "secret 3.14"), reply_to=message))
                continue
            one = self.nodes.get(node_id)
            if one is None:
                out.append(FlowerMessage(Error(5, "gone"), reply_to=message))
                continue
            try:
                with _ONE_AT_A_TIME:
                    reply = one.app(message, one.context)
            except Exception as error:
                reply = FlowerMessage(Error(2, str(error)), reply_to=message)
            reply = outcome(reply) if callable(outcome) else reply
            self.replies.append(reply)
            out.append(reply)
        return out


def arrays_of(message: FlowerMessage) -> dict[str, np.ndarray]:
    """The arrays a message carries."""
    return {name: array.numpy() for record in message.content.array_records.values() for name, array in record.items()}


_EXAMPLES: list[tuple[Any, Any]] = []  # models, and data of the form that their sites have


def remember(model: Any, data: Any) -> None:
    """Keep data of a client as `engine_of` needs them."""
    _EXAMPLES.append((model, next(iter(data.values()))))


def engine_of(grid: FakeGrid, model: Any, clients: Any, **settings: Any) -> Any:
    """The engine on this grid, of a model that was remembered, or else of one with data ``y``."""
    example = next((data for known, data in _EXAMPLES if known is model), {"y": np.ones(2)})
    usual = {"wait": 0.2, "deadline": 0.05, "poll": 0.001, "grace": 0.01}
    return fedppl.Flower.grid(grid, clients=clients, model=model, example_data=example, **{**usual, **settings})
