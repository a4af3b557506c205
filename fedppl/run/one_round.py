"""One round: ask, wait, check, update, record; who was skipped is said in the log."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from fedppl import settings
from fedppl.contracts import (
    AddingEngine,
    Failure,
    OnlySums,
    Received,
    Reply,
    Report,
    Request,
    Requests,
    Summed,
    sum_replies,
)
from fedppl.contracts.client import facts, number
from fedppl.engine.answer import n_bytes, take, take_sum
from fedppl.numerics.streams import stream
from fedppl.results import diagnostics
from fedppl.results.records import Record
from fedppl.run import progress
from fedppl.run.participation import all_clients
from fedppl.run.start import Run, add, numbers_and_texts, require_report, save
from fedppl.settings import one_line
from fedppl.types import DeclarationError, Layout, Message, Status

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


class Round(NamedTuple):
    """One round: its number, the server's state and diagnostics, and what each asked client did."""

    number: int
    state: Any
    info: Any
    status: Status
    message: str
    record: Record

    def __repr__(self) -> str:
        """One line; states fill pages."""
        return f"Round({self.number}, {self.status.value}, {self._replies()})"

    def _repr_html_(self) -> str:
        """Its diagnostics as a table, for notebooks."""
        said = {"status": self.status.value, "message": self.message, "replies": self._replies()}
        numbers = {k: v if isinstance(v, str) else number(v) for k, v in self.record.info.items()}
        return facts(f"Round {self.number}", {k: v for k, v in {**said, **numbers}.items() if v not in ("", "–")})

    def _replies(self) -> str:
        return f"{self.record.used} of {self.record.n_asked - len(self.record.silent)} replies"

    @property
    def failures(self) -> dict[str, str]:
        """Reason by client id for every client whose old site was kept."""
        return dict(self.record.failures)

    @property
    def numbers(self) -> dict[str, float]:
        """Finite numbers by name, for trackers of experiments: the server's diagnostics, seconds, clients and bytes."""
        record = self.record
        known = {name: float(value) for name, value in record.info.items() if not isinstance(value, str)}
        known |= {
            "seconds": float(record.seconds),
            "clients_used": float(record.used),
            "clients_skipped": float(len(record.failures)),
            "bytes_down": float(sum(record.bytes_down.values())),
            "bytes_up": float(sum(record.bytes_up.values())),
        }
        return {name: value for name, value in known.items() if np.isfinite(value)}


def _client_key(client_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(client_id.encode(), digest_size=8).digest(), "little")


@contextlib.contextmanager
def _named(run: Run, function: str) -> Iterator[None]:
    """Add to what one of the algorithm's own functions raises whose it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {function} of {run.algorithm.name} in round {len(run.records) + 1}")
        raise


class _Came(NamedTuple):
    """What a round brought."""

    received: Received
    infos: Mapping[str, Mapping[str, float]]
    failures: Mapping[str, str]
    reasons: Mapping[str, str]
    sizes: Mapping[str, int] | None  # bytes by client, None where clients were laid side by side
    sample: Message  # arrays of the names and sizes that each reply has


def _chosen(run: Run, number: int) -> tuple[tuple[str, ...], frozenset[str]]:
    """Who is asked, and who of them for no reply."""
    asked = run.clients
    if run.participation is not all_clients:
        # Sorted, so that the same clients are asked whatever order an engine finds them in.
        chosen = set(run.participation(tuple(sorted(run.clients)), stream((run.seed, number, 0))))
        asked = tuple(client_id for client_id in run.clients if client_id in chosen)
        if chosen - set(run.clients) or not asked:
            raise DeclarationError(
                f"participation chose {sorted(chosen)} in round {number}; choose from {list(run.clients)}."
            )
    if run.reporting is all_clients:
        return asked, frozenset()
    told = set(run.reporting(tuple(sorted(asked)), stream((run.seed, number, 1))))
    if told - set(asked) or not told:
        raise DeclarationError(f"reporting chose {sorted(told)} in round {number}; choose from {list(asked)}.")
    return asked, frozenset(asked) - told


def _exchanged(run: Run, number: int, requests: Requests, shapes: Shapes) -> _Came:
    """Ask; single replies where the server reads them, else their sum."""

    def accept(request: Request, reply: Reply | Failure | None) -> str | None:
        reason = why_not(reply, request, run.layout, shapes if request.report else {})
        if reason is None and isinstance(reply, Reply) and request.report:
            with _named(run, "Replies.reject"):
                reason = run.algorithm.replies.reject(run.state, reply.message)
        return reason

    is_enough = run.algorithm.replies.summed(run.state)
    if not isinstance(is_enough, bool | np.bool_):
        raise DeclarationError(
            f"{run.algorithm.name}: Replies.summed returned {settings.shown(is_enough)} in round {number}; return True "
            "where sums over clients are all that the server needs, else False."
        )
    if not is_enough:
        found = take(run.engine.exchange, requests, accept, run.deadline, run.progress.heard)
        sizes = {client_id: n_bytes(message) for client_id, message in found.messages.items()}
        sample = next(iter(found.messages.values()), {})
        return _Came(received(found.messages, summed=False), *found[1:], sizes, sample)
    # Of the class: what wraps an engine and hands on the rest of it changes single replies, and they are to be seen.
    if hasattr(type(run.engine), "exchange_sum"):
        adding = cast(AddingEngine, run.engine)
        added = adding.exchange_sum(requests, accept, run.deadline, run.progress.heard)
    else:
        added = take_sum(run.engine.exchange, requests, accept, run.deadline, run.progress.heard)
    if added.clients and (reason := why_no_sum(added.total, shapes)):
        added = Summed({}, 0, dict.fromkeys(requests.clients, reason), sizes={})
    received_sum = Received(OnlySums(), added.total, added.clients)
    return _Came(received_sum, added.infos, added.failures, added.reasons, added.sizes, added.total)


def _requests(run: Run, number: int, shapes: Shapes) -> Requests:
    """Requests of a round, each made when it is first looked at."""
    asked, silent = _chosen(run, number)

    @functools.cache
    def make(client_id: str) -> Request:
        report = client_id not in silent
        with _named(run, "broadcast"):
            message = run.algorithm.broadcast(run.state, client_id)
        return Request(
            client_id,
            nonce=secrets.randbits(63),
            round=number,
            seed=(run.seed, number, _client_key(client_id)),
            message=message,
            run=run.name,
            report=report,
            shapes=shapes if report else {},
        )

    return Requests(asked, make, silent)


def one_round(run: Run) -> Round:
    """Ask clients, wait, check what comes, update the server, and record it."""
    number = len(run.records) + 1
    with _named(run, "Replies.shapes"):
        shapes = run.algorithm.replies.shapes(run.state)
    requests = _requests(run, number, shapes)
    started = time.perf_counter()
    run.progress.asked(number, len(requests.clients))
    came = _exchanged(run, number, requests, shapes)
    seconds = time.perf_counter() - started
    _log(number, came.failures, run.said)
    diagnostics.log_fallbacks(number, came.infos, diagnostics.fallbacks(run.infos))
    with _named(run, "update_server"):
        returned = run.algorithm.update_server(run.state, came.received)
    require_report(run.algorithm.name, returned)
    state, report = returned
    record = _record(run, requests, came, report, seconds)
    # Together: a run that Ctrl-C ends has the state that its records tell of, and what clients kept with it.
    run.state, run.personal = state, run.engine.personal()
    add(run, record)
    _say(run, record, came, len(requests.clients))
    save(run)
    return Round(number, run.state, report.info, record.status, record.message, record)


def _record(run: Run, requests: Requests, came: _Came, report: Report, seconds: float) -> Record:
    """What is kept of a round; of clients that were laid side by side how many they are, and who failed."""
    result, at_once = run.algorithm.result, came.sizes is None
    sent = {} if at_once else {name: n_bytes(requests.make(name).message) for name in requests.clients}
    silent = () if at_once else tuple(name for name in requests.clients if name in requests.silent)
    return Record(
        number=len(run.records) + 1,
        asked=() if at_once else requests.clients,
        failures=came.failures,
        infos=came.infos,
        info=numbers_and_texts(report.info),
        bytes_down=sent,
        bytes_up=came.sizes or {},
        released=released(came.sample, came.infos),
        seconds=seconds,
        status=report.status,
        silent=silent,
        preliminary=result.preliminary(run.state) or result.closing(run.state),
        closing=result.closing(run.state),
        reasons=came.reasons,
        message=run.message if report.message is None else report.message,
        mild=run.records[-1].mild if report.message is None and run.records else report.mild,
        together=came.received.clients + len(came.failures) if at_once else 0,
    )


def _say(run: Run, record: Record, came: _Came, asked: int) -> None:
    """Say in the log, and where progress is shown, how a round went."""
    tolerance = progress.tolerance_of(run.algorithm.settings)
    stands = progress.standing(record, run.infos if record.closing else came.infos, tolerance)
    shown = record.status.value if record.status is not Status.RUNNING else ""
    run.progress.update(run.counted, "; ".join(filter(None, (stands, shown))))
    told = asked - len(record.silent)
    logger.info(
        "round %d: %s, %d of %d replies in %s%s",
        record.number,
        record.status.value,
        came.received.clients,
        told,
        progress.spelled(record.seconds),
        f"; {stands}" if stands else "",
        extra={
            "round": record.number,
            "status": record.status.value,
            "replies": came.received.clients,
            "asked": asked,
            "reporting": told,
        },
    )


def _log(number: int, failures: Mapping[str, str], said: set[tuple[str, str]]) -> None:
    """Say who was skipped and why; clients that share a reason share a line where they are many.

    What was said of a client in an earlier round, numbers aside, is no warning any more.
    """
    by_reason: dict[str, list[str]] = {}
    for client_id, reason in failures.items():
        by_reason.setdefault(reason, []).append(client_id)
    for reason, together in by_reason.items():
        few = len(together) <= 5
        for clients in [[client_id] for client_id in together] if few else [together]:
            names = clients[0] if few else f"{', '.join(clients[:3])} and {len(clients) - 3} others"
            keys = {(client_id, without_numbers(reason)) for client_id in clients}
            logger.log(
                logging.DEBUG if keys <= said else logging.WARNING,
                "round %d, client %s skipped: %s",
                number,
                names,
                reason,
                extra={"round": number, "client": names, "status": "skipped", "reason": reason},
            )
            said |= keys


def without_numbers(reason: str) -> str:
    """A reason with its numbers left out, so that reasons that differ in them alone are one."""
    return re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", reason)


# What counts as a reply -----------------------------------------------------------------------------------------------

# Diagnostics of one reply, and of one client over a run; the table of rounds has a column for each.
MOST_INFOS = 64
_LONGEST_NAME = 100
# What that table has beside diagnostics.
_TAKEN = frozenset({"round", "client", "outcome", "reason", "bytes_down", "bytes_up", "seconds", "released"})


def why_not(reply: Any, request: Request, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a reply does not count, or None if it does; one line, whatever was sent."""
    try:
        reason = _why_not(reply, request, layout, shapes)
    except Exception as error:  # of an object whose own methods raise
        reason = f"its reply cannot be read ({type(error).__name__})"
    if reason is None:
        return None
    return one_line(reason)


def _why_not(reply: Any, request: Request, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    if reply is None:
        return "no reply"
    if isinstance(reply, Failure):
        return f"{reply.reason}: {reply.private}" if reply.private else str(reply.reason)
    if not isinstance(reply, Reply):
        return f"{type(reply).__name__} is no reply"
    # Types first: what compares in a way of its own, an array say, must not be asked whether it is equal.
    if type(reply.client_id) is not str or reply.client_id != request.client_id:
        return f"reply of client {reply.client_id!r} to the request of client {request.client_id!r}"
    if type(reply.nonce) is not int or reply.nonce != request.nonce:
        return f"reply to request {reply.nonce!r}, but the latest is {request.nonce}"
    if type(reply.fingerprint) is not str or reply.fingerprint != layout.fingerprint:
        return f"layout fingerprint {reply.fingerprint} differs from {layout.fingerprint}: another model runs there"
    message: Any = reply.message
    if not isinstance(message, Mapping):
        return f"message of type {type(message).__name__} is no mapping of arrays"
    if len(message) > 2 * len(shapes) + 8 or set(message) != set(shapes):
        some = sorted(one_line(str(name))[:30] for name in list(message)[:12])
        more = f" and {len(message) - 12} others" if len(message) > 12 else ""
        return f"reply holds {some}{more}, expected {sorted(shapes)}"
    for name, shape in shapes.items():
        value = message[name]
        kind = type(value)  # NumPy's own: a subclass may say of itself what it likes
        if kind not in (np.ndarray, float) and not (issubclass(kind, np.generic) and np.dtype(kind).type is kind):
            return f"{name!r} is of type {type(value).__name__}, expected an array"
        if np.shape(value) != shape:
            return f"{name!r} has shape {np.shape(value)}, expected {shape}"
        # Wider floats than float64 hold numbers that it does not.
        dtype = np.asarray(value).dtype
        if dtype.kind != "f" or dtype.itemsize > 8 or not np.all(np.isfinite(value)):
            return f"{name!r} is not all finite real numbers (of type {dtype})"
    if type(reply.reason) is not str:
        return f"'reason' is of type {type(reply.reason).__name__}, expected a text"
    return why_no_info(reply.info)


def why_no_info(info: Any) -> str | None:
    """Why diagnostics do not count, or None if they do."""
    if not isinstance(info, Mapping):
        return "'info' is not numbers by name"
    if len(info) > MOST_INFOS:
        return f"'info' has {len(info)} diagnostics, expected {MOST_INFOS} at most"
    for name, value in info.items():
        if type(name) is not str or type(value) not in (float, np.float64):
            return "'info' is not numbers by name"
        if not (name.isprintable() and 0 < len(name) <= _LONGEST_NAME) or "/" in name or name in _TAKEN:
            return f"'info' has the name {name[:_LONGEST_NAME]!r}: taken, too long, or not printable"
    return None


def why_no_sum(total: Message, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a sum of replies is of no use, or None if it is."""
    if set(total) != set(shapes):
        return f"the sum of replies holds {sorted(total)}, expected {sorted(shapes)}"
    for name, shape in shapes.items():
        if np.shape(total[name]) != shape:
            return f"the sum of {name!r} has shape {np.shape(total[name])}, expected {shape}"
        if not np.all(np.isfinite(total[name])):
            return f"the sum of {name!r} is not all finite"
    return None


def released(message: Message, infos: Mapping[str, Mapping[str, float]]) -> str:
    """What each client's reply held, like this one: array names with sizes, and the names of its diagnostics."""
    arrays = ", ".join(f"{name} ({np.size(value)})" for name, value in message.items())
    names = sorted({name for info in infos.values() for name in info})
    diagnostics = f"diagnostics {', '.join(names)}" if names else ""
    return "; ".join(part for part in (arrays, diagnostics) if part)


def received(replies: Mapping[str, Message], *, summed: bool) -> Received:
    """What the server is given of a round: every reply, or the sum of all.

    >>> received({"a": {"weight": np.array(2.0)}}, summed=True).sums()
    {'weight': array(2.)}
    """
    if summed:
        return Received(OnlySums(), sum_replies(replies), len(replies))
    return Received(dict(replies), {}, len(replies))
