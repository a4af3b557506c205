"""What pictures read of a fit. They stand below `fedppl.Fit`, so that its methods can draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import xarray as xr

from fedppl import contracts
from fedppl.contracts import AnyAlgorithm, SharedReader
from fedppl.contracts.entries import entries_of, labels_of, shown_by_default
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError, Layout, NotConvergedError, Status

_NEEDED = ("client", "influence", "summary")


class Fitted(Protocol):
    """A `fedppl.Fit`."""

    @property
    def algorithm(self) -> AnyAlgorithm:
        """The algorithm that ran."""

    @property
    def layout(self) -> Layout:
        """The shared parameters."""

    @property
    def declaration(self) -> Any:
        """The declared model."""

    @property
    def client_ids(self) -> tuple[str, ...]:
        """All clients that could be asked."""

    @property
    def clients(self) -> Mapping[str, Any]:
        """Compiled models of the clients in this process."""

    @property
    def drawn(self) -> Mapping[str, Any] | None:
        """Draws of clients' posteriors that a file had."""

    @property
    def reader(self) -> SharedReader:
        """How draws of φ are read."""

    @property
    def records(self) -> tuple[Any, ...]:
        """One a round."""

    @property
    def status(self) -> Status:
        """Where the fit stands."""

    @property
    def message(self) -> str:
        """What is said of that."""

    @property
    def seed(self) -> int:
        """Seed of the run."""

    @property
    def seconds(self) -> float:
        """Wall time of all rounds."""

    @property
    def estimate(self) -> dict[str, Array]:
        """The shared variables at one point."""

    @property
    def posterior(self) -> Any:
        """The Gaussian of the shared parameters."""

    @property
    def idata(self) -> Any:
        """ArviZ object of all that is shared."""

    def client(self, client_id: Any, *, draws: int = ..., chains: int = ..., random_seed: int | None = ...) -> Any:
        """Posterior of one client."""

    def influence(self, clients: Sequence[str] | str | None = None) -> Any:
        """The posterior without each client."""

    def summary(
        self, var_names: Sequence[str] | str | None = None, *, ci_prob: float = ..., round_to: int | None = None
    ) -> Any:
        """Table of the shared variables."""


class Entry(NamedTuple):
    """One number of a variable."""

    name: str
    place: tuple[int, ...]
    label: str  # name[coordinates]
    flat: int  # the same in the flat array


def require_fit(fit: Any) -> None:
    """Refuse what is no fit."""
    if not all(callable(getattr(type(fit), name, None)) for name in _NEEDED):
        raise DeclarationError(f"fit={shown(fit)} is not what fedppl.fit returned.")


def require_by_client(fit: Fitted) -> Any:
    """The table of rounds, which has to have an entry for each client; of very many it has none."""
    table = fit.idata["rounds"]
    if "outcome" not in table:
        raise DeclarationError(
            f"{len(fit.client_ids)} clients were fitted at once, and rounds have no entry for each; "
            'fit.idata["rounds"] has what there is.'
        )
    return table


def at_hand(fit: Fitted) -> list[str]:
    """Clients whose posteriors can be had: their data are here, or draws of them came with a file."""
    return [*fit.clients, *(name for name in fit.drawn or {} if name not in fit.clients)]


def shared_draws(fit: Fitted) -> Any:
    """Group posterior of the shared variables, or an error that says why there is none."""
    if "posterior" not in fit.idata:
        _ = fit.posterior  # says what there is in its place
        raise NotConvergedError("this fit has no posterior of the shared variables.")
    return fit.idata["posterior"]


def entries(group: Any, places: Mapping[str, Sequence[int]] | Sequence[str]) -> list[Entry]:
    """Numbers of some variables of a group of draws with their labels: all of each, or those at places."""
    found = []
    for name in places:
        values = group[name]
        shape = tuple(values.sizes[dim] for dim in values.dims if dim not in ("chain", "draw"))
        indices, labels = list(np.ndindex(*shape)), labels_of(values)
        wanted = places[name] if isinstance(places, Mapping) else range(len(labels))
        found += [Entry(name, tuple(indices[flat]), labels[flat], flat) for flat in wanted]
    return found


def draws_of(group: Any, entry: Entry) -> Array:
    """All draws of one number, (S,)."""
    values = group[entry.name]
    values = values.transpose("chain", "draw", *[dim for dim in values.dims if dim not in ("chain", "draw")])
    found = np.asarray(values.values, dtype=float)
    return found.reshape(found.shape[0] * found.shape[1], -1)[:, entry.flat]


def coordinate_names(fit: Fitted) -> list[str]:
    """Every coordinate of the flat vector as a reader would call it: "log tau[dose]" for ``tau_log__[dose]``."""
    found = iter(contracts.coordinate_names(fit.layout, fit.reader))
    return [
        f"log {label.replace('_log__', '', 1)}" if variable.transform == "log" else label
        for variable in fit.layout.variables
        for label in (next(found) for _ in range(variable.size))
    ]


def coordinates(fit: Fitted, var_names: Any) -> list[int]:
    """Where some shared variables stand in the flat vector."""
    slices, default = fit.layout.slices, shown_by_default(fit.declaration, fit.layout.slices)
    found: list[int] = []
    group = shared_draws(fit)  # of ArviZ 1 a tree, which gives one variable at a time
    shared = xr.Dataset({name: group[name] for name in slices})
    for name, places in entries_of(shared, var_names, "the shared variables", default).items():
        start, size = slices[name].start, slices[name].stop - slices[name].start
        alike = size == group[name][0, 0].size  # a simplex has fewer coordinates than entries
        found += [start + place for place in (places if alike else range(size))]
    return found
