"""The record of every round, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedppl.results import idata
from fedppl.types import Array, Status


class Record(NamedTuple):
    """What happened in one round."""

    number: int
    asked: tuple[str, ...]
    failures: Mapping[str, str]
    infos: Mapping[str, Mapping[str, float]]
    info: Mapping[str, float | str]
    bytes_down: Mapping[str, int]
    bytes_up: Mapping[str, int]
    released: str  # names and sizes of what a client's reply held
    seconds: float
    status: Status
    silent: tuple[str, ...] = ()  # asked, but for no reply
    preliminary: bool = False  # of a start or an end with a budget of its own
    closing: bool = False  # of an end
    reasons: Mapping[str, str] = {}  # what clients could not compute whose replies were used
    message: str = ""  # what the algorithm said of how it stands
    mild: bool = False  # whether that was a remark
    together: int = 0  # clients that were asked side by side, of whom nothing is recorded one by one but failures

    @property
    def n_asked(self) -> int:
        """Number of clients that were asked."""
        return self.together or len(self.asked)

    @property
    def used(self) -> int:
        """Number of clients whose replies were used."""
        return self.together - len(self.failures) if self.together else len(self.bytes_up)


_OURS = ("seconds", "released")
_MOST = 10_000  # clients of whom each has an entry where all were asked side by side
# Columns that no algorithm's diagnostics can have.
COLUMNS = frozenset((*_OURS, "outcome", "reason", "bytes_down", "bytes_up", "round", "client"))


def rounds_dataset(records: tuple[Record, ...], clients: tuple[str, ...]) -> xr.Dataset:
    """Diagnostics of every round, dims (round,), and of every client in it, dims (round, client).

    Of very many clients that were asked side by side there is nothing for each.
    """
    per_round = _per_round(records)
    coords = {"round": [record.number for record in records], "client": list(clients)}
    if any(record.together for record in records) and len(clients) > _MOST:
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
    own = {"outcome": outcome, "reason": reason.astype(str), **traffic}
    # What most clients report by the name of a round's own column takes its place, and not what one of them does.
    twice = values.keys() & per_round.keys()
    most = {name for name in twice if sum(_reports(records, one, name) for one in clients) > 0.5 * len(clients)}
    both = own | {k: v for k, v in values.items() if k not in (*own, *_OURS) and (k not in per_round or k in most)}
    per_round = {name: value for name, value in per_round.items() if name not in both}
    return idata.dataset(
        {**per_round, **both},
        {**dict.fromkeys(per_round, ("round",)), **dict.fromkeys(both, ("round", "client"))},
        coords,
    )


def ever_used(records: Sequence[Record], clients: Iterable[str]) -> set[str]:
    """Clients that answered in one of the rounds, or were in a sum."""
    found = {client_id for record in records for client_id in record.infos}
    for record in records:
        if record.together:
            found |= set(clients) - record.failures.keys()
    return found


def _per_round(records: tuple[Record, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seconds": np.array([record.seconds for record in records]),
        "released": np.array([record.released for record in records], dtype=str),
    }
    for name in {name for record in records for name in record.info}:
        column = [record.info.get(name, np.nan) for record in records]
        found[name] = np.array(column, dtype=str if any(isinstance(v, str) for v in column) else float)
    if any(record.together for record in records):
        found["clients"] = np.array([record.n_asked for record in records])
    return found


def _reports(records: tuple[Record, ...], client_id: str, name: str) -> bool:
    return any(name in record.infos.get(client_id, {}) for record in records)
