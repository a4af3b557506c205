"""The record of every round, and its table."""

from __future__ import annotations

import logging
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


# Which clients fell back to another local inference than the one that was asked for: said in words --------------------

# A local inference says so with its diagnostic ``fallback``: 0, or the number of the step that it went to. What else it
# knows of that, such as ``fallback_seconds``, is shown beside it.

logger = logging.getLogger(__name__)

Infos = Mapping[str, Mapping[str, float]]  # diagnostics by name, by client

# What earlier fallbacks took is said from so many seconds on, and from this part of a fit's time.
_NOTABLE_SECONDS, _NOTABLE_PART = 1.0, 0.1

STANDARDISED = (
    "standardised, where it is centred on shared variables: z ~ N(0, 1) and mu + tau * z in place of N(mu, tau), "
    "mu + chol @ z in place of pm.MvNormal(mu, chol=chol)"
)
_STEPS = {1.0: "a fitted t", 2.0: "NUTS"}


def fallen(infos: Infos) -> dict[str, str]:
    """What each client fell back to, for those that did."""
    steps = {client_id: info.get("fallback", 0.0) for client_id, info in infos.items()}
    return {client_id: _STEPS.get(step, f"step {step:g}") for client_id, step in steps.items() if step > 0}


def last_infos(infos: Iterable[Infos]) -> dict[str, Mapping[str, float]]:
    """The last diagnostics of every client, from those of all rounds in order."""
    return {client_id: info for one in infos for client_id, info in one.items()}


def added(last: Infos, infos: Infos, *, closing: bool) -> dict[str, Mapping[str, float]]:
    """The last diagnostics of every client after one more round.

    What a round at the end of a run asks stands beside what clients said of their moments; that the posterior is no
    Gaussian is made up for there, and what Laplace leaves out is looked into: ``departure`` and ``inner_trust`` count
    no more.
    """
    if not closing:
        return {**last, **infos}
    before = {
        k: {name: value for name, value in info.items() if name not in ("departure", "inner_trust")}
        for k, info in last.items()
    }
    return {**last, **{k: {**before.get(k, {}), **info} for k, info in infos.items()}}


def note(infos: Infos) -> str:
    """A few words for a progress bar.

    >>> note({"a": {"fallback": 2.0}, "b": {"fallback": 0.0}})
    '1 on NUTS'
    """
    return ", ".join(f"{len(clients)} on {step}" for step, clients in _by_step(infos).items())


def sentence(infos: Infos, count: int) -> str:
    """Who of `count` clients fell back, for a fit's message; empty where nobody did.

    >>> sentence({"a": {"fallback": 2.0}, "b": {"fallback": 0.0}}, 2).partition(" in place")[0]
    '1 of 2 clients used NUTS'
    """
    parts = [f"{len(clients)} of {count} clients used {step}" for step, clients in _by_step(infos).items()]
    if not parts:
        return ""
    seconds = sum(infos[client_id].get("fallback_seconds", 0.0) for client_id in fallen(infos))
    cost = f", {seconds:.3g} s" if seconds > 0 else ""
    sampled = _STEPS[2.0] in fallen(infos).values()
    slow = f". It is faster with what is local declared {STANDARDISED}" if sampled else ""
    return (
        f"{' and '.join(parts)} in place of the local inference when last asked ({listed(fallen(infos))}{cost}): "
        f"see fit.idata['rounds']['fallback']{slow}"
    )


def earlier(infos: Iterable[Infos], seconds: float) -> str:
    """What fallbacks took before every client's last answer, for a fit's message; empty where that is little.

    `seconds` are those of all rounds.

    >>> earlier([{"a": {"fallback": 2.0, "fallback_seconds": 30.0}}, {"a": {"fallback": 0.0}}], 40.0).partition(":")[0]
    'fallbacks in earlier rounds took 30 s (a)'
    """
    every = list(infos)
    last, spent = last_infos(every), dict[str, float]()
    for one in every:
        for client_id in fallen(one):
            if one[client_id] is not last[client_id]:
                spent[client_id] = spent.get(client_id, 0.0) + one[client_id].get("fallback_seconds", 0.0)
    total = sum(spent.values())
    if total < max(_NOTABLE_SECONDS, _NOTABLE_PART * seconds):
        return ""
    worst = sorted(spent, key=lambda client_id: -spent[client_id])
    return (
        f"fallbacks in earlier rounds took {total:.3g} s ({listed(worst)}): see "
        f"fit.idata['rounds']['fallback_seconds'], and declare what is local {STANDARDISED}"
    )


def unchecked(infos: Infos) -> str:
    """Whose local variables were integrated by Laplace's approximation alone, for a fit's message.

    >>> unchecked({"a": {"inner_trust": 0.0}, "b": {"inner_trust": 1.0}}).partition(":")[0]
    "what Laplace's approximation over local variables leaves out is not known at 1 of 2 clients (a)"
    """
    there = {client_id: "" for client_id, info in infos.items() if info.get("inner_trust", 1.0) < 1.0}
    if not there:
        return ""
    return (
        "what Laplace's approximation over local variables leaves out is not known at "
        f"{len(there)} of {len(infos)} clients ({listed(there)}): it can bias scales where their rows are few and not "
        "normal. Compare with EP(local=fedppl.NUTS())"
    )


def log(number: int, infos: Infos, known: Mapping[str, str]) -> None:
    """One line a round: a warning for clients that are new to NUTS, which takes long, information for others."""
    now = fallen(infos)
    if not now:
        return
    parts = []
    for step, clients in _by_step(infos).items():
        few = [f"{client_id}{_why(infos[client_id])}" for client_id in clients[:5]]
        more = [f"{len(clients) - 5} others"] if len(clients) > 5 else []
        parts.append(f"{step} at {', '.join([*few, *more])}")
    logger.log(
        logging.WARNING
        if any(step not in (_STEPS[1.0], known.get(client_id)) for client_id, step in now.items())
        else logging.INFO,
        "round %d: in place of the local inference, %s",
        number,
        "; ".join(parts),
        extra={"round": number, "status": "fallback", "clients": len(now)},
    )


def listed(names: Iterable[str]) -> str:
    """Names on one line, the first five of many."""
    every = list(names)
    return ", ".join(every[:5]) + (f" and {len(every) - 5} others" if len(every) > 5 else "")


def _by_step(infos: Infos) -> dict[str, list[str]]:
    steps: dict[str, list[str]] = {}
    for client_id, step in fallen(infos).items():
        steps.setdefault(step, []).append(client_id)
    return steps


def _why(info: Mapping[str, float]) -> str:
    """What the client told of its fallback."""
    told = {name.removeprefix("fallback_"): value for name, value in info.items() if name.startswith("fallback_")}
    return f" ({', '.join(f'{name} {value:.3g}' for name, value in told.items())})" if told else ""


# What a run ends with, and whether that is worth reporting: a q that the search has not arrived at is no posterior ----


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
