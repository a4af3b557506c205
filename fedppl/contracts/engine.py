"""What the loop and an engine are to each other: requests, replies, and what moves them. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedppl.contracts.algorithm import AnyAlgorithm
from fedppl.contracts.client import Summed
from fedppl.types import Array, Layout, Message, Status


class Request(NamedTuple):
    """What the loop sends to one client. A reply counts only if it carries the same nonce."""

    client_id: str
    nonce: int
    round: int
    seed: tuple[int, ...]
    message: Message
    run: str = ""  # names the run: personal state of another one is not used
    report: bool = True  # whether a reply is wanted; otherwise the client updates what it keeps, and says so
    shapes: Mapping[str, tuple[int, ...]] | None = None  # of the reply's arrays; stays at the server


class Reply(NamedTuple):
    """What one client sends back."""

    client_id: str
    nonce: int
    fingerprint: str
    message: Message
    info: Mapping[str, float]
    reason: str = ""  # of what could not be computed, where the rest is of use all the same; travels as a Failure's


class Failure(NamedTuple):
    """A request that brought no usable reply, and why."""

    client_id: str
    nonce: int
    reason: str  # may travel: names no data
    private: str = ""  # for the client's own log: an exception's text may quote its data


class SharedReader(NamedTuple):
    """How to read draws of φ: the way back to the constrained space, with the dims and coords of the model."""

    constrain: Callable[[Array], Mapping[str, Array]]  # (S, m) to arrays (S, ...) by variable
    dims: Mapping[str, tuple[str, ...] | None]
    coords: Mapping[str, Sequence[Any]]


class Requests(NamedTuple):
    """Requests of a round, each made where it is needed: of clients that are laid side by side one does for all."""

    clients: tuple[str, ...]  # who is asked
    make: Callable[[str], Request]
    silent: frozenset[str] = frozenset()  # who of them is asked for no reply


class Heard(Protocol):
    """Called when an answer has come."""

    def __call__(self, client_id: str, /, *, clients: int = 1) -> object:
        """Hear of a client, the last of as many as have answered at once."""


def unheard(client_id: str, /, *, clients: int = 1) -> None:
    """For who does not want to know."""


# Sends each request, and returns what came back until the deadline (seconds).
Exchange = Callable[[Mapping[str, Request], float | None, Heard], Mapping[str, Reply | Failure]]
# Why what came on a request does not count, None where it does.
Accept = Callable[[Request, Reply | Failure | None], str | None]


class Engine(Protocol):
    """Moves messages and knows no statistics; `AddingEngine` can do more."""

    def clients(self) -> tuple[str, ...]:
        """Return the ids of the clients that can be asked."""

    def has_sites(self) -> bool:
        """Return whether clients are sites of their own, which decide what leaves."""

    def layout(self) -> Layout:
        """Return the shared layout that all clients agreed on."""

    def exchange(
        self, requests: Mapping[str, Request], deadline: float | None, heard: Heard = unheard
    ) -> dict[str, Reply | Failure]:
        """Send each request and return what came back until the deadline (seconds).

        `heard` is called with a client's id as soon as its answer is there, for who waits and wants to know how far it
        is; from this thread.
        """

    def reader(self) -> SharedReader:
        """Return how draws of φ are read; where the models are at sites, a site is asked."""

    def conclude(
        self, final_message: Callable[[str], Message], run: str, seed: int, status: Status
    ) -> Mapping[str, Message]:
        """Tell every client what it needs to draw its own posterior: q and its cavity, and how the run ended.

        Returns what sites let out of what they computed then, by client. Clients in this process are asked for theirs
        when somebody wants to see them.
        """

    def personal(self) -> Mapping[str, Any]:
        """Return what clients in this process keep to themselves, by id; nothing where clients are elsewhere."""

    def restore(self, personal: Mapping[str, Any]) -> None:
        """Give clients in this process what they kept in a run that goes on."""

    def close(self) -> None:
        """Let go of whatever the engine started."""


class AddingEngine(Engine, Protocol):
    """An engine that can add replies where they are made, so that nobody sees a single one.

    It is asked for sums in all rounds of which the server reads nothing else. Of other engines replies are added that
    `exchange` brings.
    """

    def exchange_sum(
        self, requests: Requests, accept: Accept, deadline: float | None, heard: Heard = unheard
    ) -> Summed:
        """Return the sum of all replies; `accept` says which count, where single ones are seen."""


class EngineFactory(Protocol):
    """Starts an engine over clients' models; `fedppl.InProcess()` is one.

    Without models (``clients={}``) the engine has to find the clients, as Flower's does.
    """

    def __call__(self, algorithm: AnyAlgorithm, clients: Mapping[str, Any], /) -> Engine:
        """Start the engine."""


def coordinate_names(layout: Layout, reader: SharedReader) -> list[str]:
    """Label every coordinate by its variable's coords: ``tau_log__[dose]``, and ``tau_log__[1]`` where it has none."""
    told, found = iter(layout.labels), []
    for variable in layout.variables:
        labels = [reader.coords.get(dim, ()) for dim in reader.dims.get(variable.name) or ()]
        known = len(labels) > 0 and tuple(len(one) for one in labels) == variable.shape
        for index in np.ndindex(*variable.shape):
            label = next(told)
            where = ", ".join(str(labels[axis][i]) for axis, i in enumerate(index)) if known else ""
            found.append(f"{label.split('[')[0]}[{where}]" if known else label)
    return found
