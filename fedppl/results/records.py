"""The record of every round with its table, and the results of a run that `fedppl.results.fit.Fit` reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, Posterior, SharedReader
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.results import idata
from fedppl.settings import some_of
from fedppl.types import Array, DeclarationError, Layout, Message, NotConvergedError, Status


class Record(NamedTuple):
    """What happened in one round."""

    number: int
    asked: tuple[str, ...]
    failures: Mapping[str, str]
    infos: Mapping[str, Mapping[str, float]]
    info: Mapping[str, float | str]
    bytes_down: Mapping[str, int]
    bytes_up: Mapping[str, int]
    released: str  # names and sizes of the arrays in a client's reply
    seconds: float
    status: Status
    silent: tuple[str, ...] = ()  # asked, with no reply wanted
    preliminary: bool = False  # a round of a start with a budget of its own
    reasons: Mapping[str, str] = {}  # what clients whose replies were used could not compute
    message: str = ""  # the algorithm's, on its progress
    mild: bool = False  # whether the message is a remark only
    together: int = 0  # clients that were asked side by side: of these only failures are recorded one by one

    @property
    def n_asked(self) -> int:
        """Number of clients that were asked."""
        return self.together or len(self.asked)

    @property
    def used(self) -> int:
        """Number of clients whose replies were used."""
        return self.together - len(self.failures) if self.together else len(self.bytes_up)


_OWN = ("seconds", "released")
_MOST_CLIENTS = 10_000  # with an entry each, where all were asked side by side
# Columns that no algorithm's diagnostics can have.
COLUMNS = frozenset((*_OWN, "outcome", "reason", "bytes_down", "bytes_up", "round", "client"))


def rounds_dataset(records: tuple[Record, ...], clients: tuple[str, ...]) -> xr.Dataset:
    """Diagnostics of every round, dims (round,), and of every client in it, dims (round, client).

    Very many clients that were asked side by side have no entries of their own.
    """
    per_round = _per_round(records)
    coords = {"round": [record.number for record in records], "client": list(clients)}
    if any(record.together for record in records) and len(clients) > _MOST_CLIENTS:
        return idata.dataset(per_round, dict.fromkeys(per_round, ("round",)), coords)
    where = {client_id: k for k, client_id in enumerate(clients)}
    shape = (len(records), len(clients))
    outcome = np.full(shape, "not asked", dtype="U9")
    reason = np.full(shape, "", dtype=object)
    traffic = {name: np.zeros(shape, dtype=np.int64) for name in ("bytes_down", "bytes_up")}
    values: dict[str, Array] = {}
    for t, record in enumerate(records):
        if record.together == len(clients):
            outcome[t] = "used"
        silent = frozenset(record.silent)
        for client_id in record.asked or (*record.infos, *record.failures, *record.reasons):
            k = where[client_id]
            outcome[t, k] = "skipped" if client_id in record.failures else "silent" if client_id in silent else "used"
            reason[t, k] = record.failures.get(client_id, record.reasons.get(client_id, ""))
            traffic["bytes_down"][t, k] = record.bytes_down.get(client_id, 0)
            traffic["bytes_up"][t, k] = record.bytes_up.get(client_id, 0)
            for name, value in record.infos.get(client_id, {}).items():
                values.setdefault(name, np.full(shape, np.nan))[t, k] = value
    by_client: dict[str, Any] = {"outcome": outcome, "reason": reason.astype(str), **traffic}
    for name, column in values.items():
        # A diagnostic of most clients takes the place of a round's own of that name; a diagnostic of few does not.
        reporting = {client_id for record in records for client_id, info in record.infos.items() if name in info}
        of_clients = name not in per_round or len(reporting) > 0.5 * len(clients)
        if of_clients and name not in (*by_client, *_OWN):
            by_client[name] = column
    per_round = {name: column for name, column in per_round.items() if name not in by_client}
    dims = dict.fromkeys(per_round, ("round",)) | dict.fromkeys(by_client, ("round", "client"))
    return idata.dataset(per_round | by_client, dims, coords)


def ever_used(records: Sequence[Record], clients: Iterable[str]) -> set[str]:
    """Clients that answered in one of the rounds, or were in a sum."""
    of_sums = [set(clients) - record.failures.keys() for record in records if record.together]
    return set().union(*of_sums, *(part for record in records for part in (record.infos, record.bytes_up)))


def _per_round(records: tuple[Record, ...]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "seconds": np.array([record.seconds for record in records]),
        "released": np.array([record.released for record in records], dtype=str),
    }
    for name in dict.fromkeys(name for record in records for name in record.info):
        values = [record.info.get(name, np.nan) for record in records]
        columns[name] = np.array(values, dtype=str if any(isinstance(v, str) for v in values) else float)
    if any(record.together for record in records):
        columns["clients"] = np.array([record.n_asked for record in records])
    return columns


# The results of a run, and whether there is a posterior to report: none before the search has arrived at it -----------


@dataclass(frozen=True, eq=False)
class Ended:
    """The results of a run; `fedppl.results.fit.Fit` adds the methods."""

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
        """Refuse to be an array: ArviZ asks for one where it is given a fit."""
        if dtype != np.dtype(object):
            raise DeclarationError("a Fit is no ArviZ object and no array; pass fit.idata, or fit.client(id).")
        entry = np.empty((), dtype=object)  # of a table of fits
        entry[()] = self
        return entry


def unarrived(fit: Ended) -> str:
    """Why there is nothing to report yet, or an empty text."""
    result = fit.algorithm.result
    if not any(record.used for record in fit.records):
        return "no client has replied"
    if result.preliminary(fit.state):
        return "its search is not at an end"
    if isinstance(result.shared, Posterior) and not gaussian.is_proper(result.shared.gaussian(fit.state)):
        return "q is not positive definite"
    return ""


COHORT = ""  # in place of a client's id in `Fit.told`: sums over all clients, which nobody can take apart


def told_sums(fit: Ended, name: str, what: str) -> dict[str, Any]:
    """Sums over rows that sites told at the end, by client, or by `COHORT` the one sum of all; DeclarationError."""
    require_arrived(fit, what)
    cohort = fit.told.get(COHORT, {})
    if name in cohort:
        return {COHORT: cohort[name]}
    rule = f"conclusions=({name!r},)"
    if COHORT in fit.told:
        why = "under masks there is one where the policies of all sites name it and all can compute it"
        raise DeclarationError(
            f"{what}: the cohort told no sum {name!r}; {why}: set {rule} in each, and see their logs."
        )
    if silent := [k for k in fit.client_ids if name not in fit.told.get(k, {})]:
        absent = some_of([k for k in silent if k not in fit.clients])
        remedy = f"use fedppl.load(path, model, clients=...) with all, or policies of sites with {rule}."
        raise DeclarationError(f"rows of {absent} are not here, and they sent no sums; {remedy}")
    return {k: fit.told[k][name] for k in fit.client_ids}


def require_single(fit: Ended, what: str) -> None:
    """Refuse what needs the answers of single clients, of a fit by sums over sites under masks."""
    if COHORT in fit.told and not fit.clients:
        remedy = "each site can look at its own posterior, in its client_app's folder, beside fit.idata, which you have"
        raise DeclarationError(
            f"{what} needs single sites' answers, and the server had sums alone, under masks: {remedy}."
        )


def require_shared(fit: Ended) -> None:
    """Refuse a fit whose clients share no parameters."""
    if fit.algorithm.result.shared is None:
        raise DeclarationError(f"{fit.algorithm.name} has no parameters that all clients share; see fit.client(...).")


def require_arrived(fit: Ended, what: str) -> None:
    """Raise NotConvergedError, with the remedy, where there is nothing to report yet."""
    if reason := unarrived(fit):
        ended = f"It is {fit.status.value}: {fit.message.rstrip('.')}."
        remedy = "Use fit.shared(unconverged=True) for what there is so far."
        raise NotConvergedError(f"{what}: this fit has no posterior, since {reason}. {ended} {remedy}")
