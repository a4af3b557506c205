"""What a client does in a round: one client, or many at once in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from fedppl.contracts.client import ClientView
from fedppl.types import Message, Rng

P = TypeVar("P")


class ClientUpdate(NamedTuple, Generic[P]):
    """What a client keeps, sends and says after a round; `personal` None leaves what it kept.

    `info` is numbers by name, and may have a text under ``reason``, where something could not be computed and the reply
    is of use all the same.
    """

    personal: P | None
    reply: Message
    info: Mapping[str, float | str] = {}


ClientFn = Callable[[ClientView, P | None, Message, Rng], ClientUpdate[P]]  # a client's part of a round
# A client's part of a round that asks it for no reply: what is kept, and diagnostics.
UnreportedFn = Callable[[ClientView, P | None, Message, Rng], tuple[P | None, Mapping[str, float]]]


class Part(NamedTuple, Generic[P]):
    """One client's part of a round: what a `ClientFn` is called with."""

    client: ClientView
    personal: P | None
    message: Message
    rng: Rng


class Summed(NamedTuple):
    """Replies of clients, added where they were made."""

    total: Message  # every array summed over the clients, in a fixed order
    clients: int  # how many are in it
    failures: Mapping[str, str] = {}  # who is not, and why
    infos: Mapping[str, Mapping[str, float]] = {}  # diagnostics by client, where there are any
    reasons: Mapping[str, str] = {}  # what clients could not compute that are in it all the same
    sizes: Mapping[str, int] | None = None  # bytes that each sent; None where clients were not looked at one by one


# Updates of clients that `Batch.groups` put together. None where a client has to be asked alone, as one whose numbers
# are not finite: asked alone, it says why it fails.
BatchFn = Callable[[Sequence[Part[P]]], Sequence[ClientUpdate[P] | None]]


class Batch(NamedTuple, Generic[P]):
    """How clients in one process are computed together: results are those of one after another, up to rounding.

    Attributes
    ----------
    update_client, unreported
        The algorithm's own functions that this stands for. Where an algorithm has others in their place, as one that is
        wrapped, the batch is not used.
    groups
        ``groups(clients)``: places of clients that go together, as many as memory allows; no client in two of them. One
        that is in none is asked alone. It looks at models alone, so that groups do not depend on the number of threads.
    together, unreported_together
        ``together(parts)``, for a group of which each client replies, or none does. Of the latter `reply` is empty.
        What is raised costs the batch and no more: each client is then asked alone.
    stacks, summed
        Of algorithms that send all clients one message and read sums alone: ``stacks(clients)`` lays all of them side
        by side, once for an engine, and ``summed(stack, message, workers)`` is the sum of a stack's replies, in
        threads; a reply that is not to be used is a failure, with its reason.
    """

    update_client: ClientFn[P]
    unreported: UnreportedFn[P] | None
    groups: Callable[[Sequence[ClientView]], Sequence[Sequence[int]]]
    together: BatchFn[P]
    unreported_together: BatchFn[P] | None = None
    stacks: Callable[[Mapping[str, ClientView]], Sequence[Any]] | None = None
    summed: Callable[[Any, Message, int], Summed] | None = None
