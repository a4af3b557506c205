"""Whether a fit has something to report yet: a q that the search has not arrived at is no posterior."""

from __future__ import annotations

from typing import Any, Protocol

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, Posterior, SharedReader
from fedppl.results.records import Record
from fedppl.types import Layout, NotConvergedError, Status


class Ended(Protocol):
    """What is read of a fit here; `fedppl.results.fit.Fit` is one."""

    @property
    def algorithm(self) -> AnyAlgorithm:
        """The algorithm that ran."""

    @property
    def state(self) -> Any:
        """The server's last state."""

    @property
    def records(self) -> tuple[Record, ...]:
        """One Record a round."""

    @property
    def client_ids(self) -> tuple[str, ...]:
        """All clients that could be asked."""

    @property
    def layout(self) -> Layout:
        """The shared parameters."""

    @property
    def reader(self) -> SharedReader:
        """How draws of φ are read."""

    @property
    def status(self) -> Status:
        """Whether it converged."""

    @property
    def message(self) -> str:
        """Which setting to change."""

    @property
    def idata(self) -> Any:
        """The ArviZ object."""


def unarrived(fit: Ended) -> str:
    """Why there is nothing to report yet, or an empty text."""
    result = fit.algorithm.result
    if not any(record.bytes_up for record in fit.records):
        return "no client has replied"
    if result.preliminary(fit.state):
        return "the search for it has not arrived"
    if isinstance(result.shared, Posterior) and not gaussian.is_proper(result.shared.gaussian(fit.state)):
        return "q is not positive definite"
    return ""


def require_arrived(fit: Ended, what: str) -> None:
    """Raise NotConvergedError, with the remedy, where there is nothing to report yet."""
    if reason := unarrived(fit):
        raise NotConvergedError(
            f"{what}: this fit has no posterior, since {reason}. It is {fit.status.value}: {fit.message.rstrip('.')}. "
            "What there is so far, fit.shared(unconverged=True) gives."
        )
