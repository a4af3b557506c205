"""What a site answers to each type of message, and what it was declared by: for its app and for its warm worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from flwr.clientapp import ClientApp

from fedppl.flower import node as _node
from fedppl.flower.node import Node
from fedppl.flower.records import AGREE, ASK, CONCLUDE, CONSTRAIN, HELLO
from fedppl.flower.wire import Parcel
from fedppl.storage.signed import Memory


class Site(NamedTuple):
    """What `client_app` was given."""

    node: Callable[[Mapping[str, Any]], Node]  # of a node config; the policy is read anew by each call


# Beside the apps and not in them: what Flower copies of an app is left as it is.
declared: WeakKeyDictionary[ClientApp, Site] = WeakKeyDictionary()


def answer(kind: str, here: Node, config: Mapping[str, Any], memory: Memory, parcel: Parcel) -> Parcel:
    """Answer a message of a type; parcels are arrays and texts."""
    arrays, texts = parcel
    if kind == HELLO:
        return _node.introduce(here, config, memory, texts)
    if kind == AGREE:
        return _node.agree(here, config, memory, texts)
    if kind == ASK:
        return _node.answer_request(here, config, memory, parcel)
    if kind == CONSTRAIN:
        return _node.constrain(here, config, memory, arrays)
    if kind == CONCLUDE:
        return _node.conclude(here, config, memory, parcel)
    raise ValueError(f"{kind!r} is no type of message; a site answers {HELLO}, {AGREE}, {ASK}, {CONSTRAIN}, {CONCLUDE}")
