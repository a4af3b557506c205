"""What a run ends with, and whether that is worth reporting: a q that the search has not arrived at is no posterior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, Posterior, SharedReader
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.results.records import Record
from fedppl.types import DeclarationError, Layout, Message, NotConvergedError, Status


@dataclass(frozen=True, eq=False)
class Ended:
    """What a run ends with; `fedppl.results.fit.Fit` reads it."""

    algorithm: AnyAlgorithm
    state: Any
    layout: Layout
    declaration: FederatedModel
    client_ids: tuple[str, ...]
    clients: Mapping[str, ClientModel]
    reader: SharedReader
    records: tuple[Record, ...]
    status: Status
    message: str
    personal: Mapping[str, Any]
    seed: int
    seconds: float
    told: Mapping[str, Message] = field(default_factory=dict)
    drawn: Mapping[str, Any] | None = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """No array: ArviZ asks for one where it is given a fit, and hears what to be given instead."""
        if dtype != np.dtype(object):
            raise DeclarationError("a Fit is no ArviZ object and no array; pass fit.idata, or fit.client(id).")
        found = np.empty((), dtype=object)  # an entry of a table of fits
        found[()] = self
        return found


def unarrived(fit: Ended) -> str:
    """Why there is nothing to report yet, or an empty text."""
    result = fit.algorithm.result
    if not any(record.used for record in fit.records):
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
