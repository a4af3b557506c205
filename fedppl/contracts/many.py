"""What a fit of many like clients at once may ask of them: their data lie one after the other, none is an object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts.algorithm import Report
from fedppl.contracts.client import ClientView
from fedppl.numerics.stacked import Packs
from fedppl.types import Array, Layout, Rng


class ManyClients(Protocol):
    """Clients that have one compiled density; `fedppl.model.stack.Stack` is such."""

    @property
    def client_ids(self) -> tuple[str, ...]:
        """Logical ids, in the order of everything that has a row for each client."""

    @property
    def layout(self) -> Layout:
        """The shared layout."""

    @property
    def like(self) -> ClientView:
        """One of them, for what all have in common."""

    @property
    def packs(self) -> Packs:
        """Their arrays, as the kernel reads them."""

    @property
    def starts(self) -> Array:
        """Where searches for modes of θ begin, (K, d); what is found is written there."""

    def __len__(self) -> int:
        """Return the number of clients."""

    def some(self, places: Sequence[int] | NDArray[np.int64]) -> Sequence[ClientView]:
        """Clients at these places as others know them."""


class Answers(NamedTuple):
    """log f_k of clients at points, summed, with what becomes of each by a linear map."""

    totals: Array  # (S,); NaN where one had no value
    fitted: Array  # (C, q)
    failed: NDArray[np.int64]  # places of clients without a value at one of the points


class Passed(NamedTuple):
    """A pass over clients: how many, what is to be recorded, and once it is over the server's state."""

    clients: int
    report: Report
    state: Any = None
    way: Any = None  # how θ is integrated, for moments of clients


# Passes over more and more clients: all of them, a state for them, that of some whose q is known, how many these are,
# and threads.
TogetherFn = Callable[[ManyClients, Any, Any, int, Rng, int], Iterator[Passed]]
