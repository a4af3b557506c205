"""One round: choose clients, ask, wait, check replies, update, record."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.stats import binom

from fedppl.contracts import AddingEngine, Failure, OnlySums, Received, Reply, Report, Request, Requests, Summed
from fedppl.contracts.printed import facts, number, tolerance_of
from fedppl.engine.answer import n_bytes, take, take_sum, with_total
from fedppl.numerics.streams import client_seed, nonce_of, stream
from fedppl.results import diagnostics
from fedppl.results.records import COLUMNS, Record
from fedppl.run.progress import Participation, Run, add, save, standing
from fedppl.settings import between, one_line, shown, some_of, whole
from fedppl.types import DeclarationError, Layout, Message, Status

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


class Round(NamedTuple):
    """One round: its number, the server's state and diagnostics, and the record of clients."""

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
        rows = {"status": self.status.value, "message": self.message, "replies": self._replies()}
        rows |= {k: v if isinstance(v, str) else number(v) for k, v in self.record.info.items()}
        return facts(f"Round {self.number}", {k: v for k, v in rows.items() if v not in ("", "–")})

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
        numbers = {name: float(value) for name, value in record.info.items() if not isinstance(value, str)}
        numbers |= {
            "seconds": float(record.seconds),
            "clients_used": float(record.used),
            "clients_skipped": float(len(record.failures)),
            "bytes_down": float(sum(record.bytes_down.values())),
            "bytes_up": float(sum(record.bytes_up.values())),
        }
        return {name: value for name, value in numbers.items() if np.isfinite(value)}


@contextlib.contextmanager
def _named(run: Run, function: str) -> Iterator[None]:
    """Name the algorithm's function in errors that it raises."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by {function} of {run.algorithm.name} in round {len(run.records) + 1}")
        raise


def _chosen(run: Run, number: int) -> tuple[tuple[str, ...], frozenset[str]]:
    """Clients that are asked, and those of them that are asked for no reply."""
    asked = run.clients
    if run.participation is not all_clients:
        # Sorted, so that the choice does not depend on the order in which an engine finds them.
        chosen = set(run.participation(tuple(sorted(run.clients)), stream((run.seed, number, 0))))
        asked = tuple(client_id for client_id in run.clients if client_id in chosen)
        if chosen - set(run.clients) or not asked:
            which = f"{sorted(chosen)} in round {number}"
            raise DeclarationError(f"participation chose {which}; choose from {list(run.clients)}.")
    if run.reporting is all_clients:
        return asked, frozenset()
    reporting = set(run.reporting(tuple(sorted(asked)), stream((run.seed, number, 1))))
    if reporting - set(asked) or not reporting:
        raise DeclarationError(f"reporting chose {sorted(reporting)} in round {number}; choose from {list(asked)}.")
    return asked, frozenset(asked) - reporting


def _exchanged(run: Run, requests: Requests, shapes: Shapes) -> tuple[Received, Summed]:
    """What the server gets, single replies where it reads them, else their sum; and what is recorded of all."""

    def accept(request: Request, reply: Reply | Failure | None) -> str | None:
        reason = why_not(reply, request, run.layout, shapes if request.report else {})
        if reason is None and isinstance(reply, Reply) and request.report:
            with _named(run, "Replies.reject"):
                reason = run.algorithm.replies.reject(run.state, reply.message)
        return reason

    if not run.algorithm.replies.summed(run.state):
        taken = take(run.engine.exchange, requests, accept, run.deadline, run.progress.heard)
        replies = with_total(taken, next(iter(taken.messages.values()), {}))
        return Received(taken.messages, {}, replies.clients, tuple(taken.messages)), replies
    # Of the class: a wrapper that passes on attributes of its engine has to see single replies.
    if hasattr(type(run.engine), "exchange_sum"):
        adding = cast(AddingEngine, run.engine)
        added = adding.exchange_sum(requests, accept, run.deadline, run.progress.heard)
    else:
        added = take_sum(run.engine.exchange, requests, accept, run.deadline, run.progress.heard)
    if added.clients and (reason := why_no_sum(added.total, shapes)):
        added = Summed({}, 0, dict.fromkeys(requests.clients, reason), sizes={})
    return Received(OnlySums(), added.total, added.clients, _counted(requests, added)), added


def _counted(requests: Requests, added: Summed) -> tuple[str, ...]:
    """The clients whose replies are in a sum."""
    if not added.clients:  # of a void sum only those that are why are failures
        return ()
    if not (added.failures or requests.silent):
        return requests.clients
    return tuple(name for name in requests.clients if name not in added.failures and name not in requests.silent)


def _requests(run: Run, number: int, shapes: Shapes) -> Requests:
    """Requests of a round, each made when it is first read."""
    asked, silent = _chosen(run, number)

    @functools.cache
    def make(client_id: str) -> Request:
        report = client_id not in silent
        with _named(run, "broadcast"):
            message = run.algorithm.broadcast(run.state, client_id)
        return Request(
            client_id,
            nonce=nonce_of(run.name, number, client_id),
            round=number,
            seed=(run.seed, number, client_seed(client_id)),
            message=message,
            run=run.name,
            report=report,
            shapes=shapes if report else {},
        )

    return Requests(asked, make, silent)


def one_round(run: Run) -> Round:
    """Ask clients, wait, check replies, update the server, and record the round."""
    number = len(run.records) + 1
    with _named(run, "Replies.shapes"):
        shapes = run.algorithm.replies.shapes(run.state)
    requests = _requests(run, number, shapes)
    started = time.perf_counter()
    run.progress.asked(number, len(requests.clients))
    received, replies = _exchanged(run, requests, shapes)
    seconds = time.perf_counter() - started
    _log_failures(run.name, number, replies.failures, run.logged)
    diagnostics.log_fallbacks(number, replies.infos, diagnostics.fallbacks(run.infos))
    with _named(run, "update_server"):
        state, report = run.algorithm.update_server(run.state, received)
        record = _record(run, requests, replies, report, seconds)
    # Together: after Ctrl-C the state, clients' own states and the records are of the same round.
    run.state, run.personal = state, run.engine.personal()
    add(run, record)
    _log_round(run, record, replies.clients, len(requests.clients))
    save(run)
    return Round(number, run.state, report.info, record.status, record.message, record)


def _record(run: Run, requests: Requests, replies: Summed, report: Report, seconds: float) -> Record:
    """The record of a round; of clients side by side only their number, and failures."""
    result, at_once = run.algorithm.result, replies.sizes is None
    sent = {} if at_once else {name: n_bytes(requests.make(name).message) for name in requests.clients}
    silent = () if at_once else tuple(name for name in requests.clients if name in requests.silent)
    return Record(
        number=len(run.records) + 1,
        asked=() if at_once else requests.clients,
        failures=replies.failures,
        infos=replies.infos,
        info=_numbers_and_texts(report.info),
        bytes_down=sent,
        bytes_up=replies.sizes or {},
        released=released(replies.total, replies.infos),
        seconds=seconds,
        status=report.status,
        silent=silent,
        preliminary=result.preliminary(run.state),
        reasons=replies.reasons,
        message=run.message if report.message is None else report.message,
        mild=run.records[-1].mild if report.message is None and run.records else report.mild,
        together=replies.clients + len(replies.failures) if at_once else 0,
    )


def _log_round(run: Run, record: Record, used: int, asked: int) -> None:
    tolerance = tolerance_of(run.algorithm.settings)
    summary = standing(record, record.infos, tolerance)
    ended = record.status.value if record.status is not Status.RUNNING else ""
    run.progress.update(run.counted, "; ".join(filter(None, (summary, ended))))
    reporting = asked - len(record.silent)
    text = f"; {summary}" if summary else ""
    extra = {"run": run.name, "round": record.number, "status": record.status.value, "replies": used, "asked": asked}
    numbers = record.number, record.status.value, used, reporting, record.seconds
    extra["reporting"] = reporting
    logger.info("round %d: %s, %d of %d replies in %.1f s%s", *numbers, text, extra=extra)


_EACH = 5  # clients with the same reason, each of which has a record of its own


def _log_failures(run: str, number: int, failures: Mapping[str, str], logged: set[tuple[str, str]]) -> None:
    """Log which clients were skipped and why, by reason; one known from an earlier round is no warning any more."""
    by_reason: dict[str, list[str]] = {}
    for client_id, reason in failures.items():
        by_reason.setdefault(reason, []).append(client_id)
    for reason, together in by_reason.items():
        keys = {(client_id, without_numbers(reason)) for client_id in together}
        level = logging.DEBUG if keys <= logged else logging.WARNING
        for names in together if len(together) <= _EACH else [diagnostics.listed(together)]:
            extra = {"run": run, "round": number, "client": names, "status": "skipped", "reason": reason}
            logger.log(level, "round %d, client %s skipped: %s", number, names, reason, extra=extra)
        logged |= keys


def without_numbers(reason: str) -> str:
    """A reason without its numbers, to compare it with others."""
    return re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", reason)


# Replies that count ---------------------------------------------------------------------------------------------------

MOST_INFOS = 64  # diagnostics of one reply, and of one client over a run: each is a column of the table of rounds
_LONGEST_NAME = 100


def why_not(reply: Any, request: Request, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a reply does not count, on one line; None if it does."""
    try:
        reason = _why_not(reply, request, layout, shapes)
    except Exception as error:  # of an object whose own methods raise
        reason = f"its reply cannot be read ({type(error).__name__})"
    return None if reason is None else one_line(reason)


def _why_not(reply: Any, request: Request, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    if reply is None:
        return "no reply"
    if isinstance(reply, Failure):
        return f"{reply.reason}: {reply.private}" if reply.private else str(reply.reason)
    if not isinstance(reply, Reply):
        return f"{type(reply).__name__} is no reply"
    # Types first: an array, for example, defines equality in its own way.
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
        return f"reply holds {some_of(sorted(one_line(name, 30) for name in message))}, expected {sorted(shapes)}"
    for name, shape in shapes.items():
        value = message[name]
        kind = type(value)  # NumPy's own: a subclass may override methods
        if kind not in (np.ndarray, float) and not (issubclass(kind, np.generic) and np.dtype(kind).type is kind):
            return f"{name!r} is of type {type(value).__name__}, expected an array"
        if np.shape(value) != shape:
            return f"{name!r} has shape {np.shape(value)}, expected {shape}"
        # Wider floats have numbers that float64 has not.
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
        if not (name.isprintable() and 0 < len(name) <= _LONGEST_NAME) or "/" in name or name in COLUMNS:
            return f"'info' has the name {name[:_LONGEST_NAME]!r}: taken, too long, or not printable"
    return None


def why_no_sum(total: Message, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a sum of replies cannot be used, or None if it can."""
    if set(total) != set(shapes):
        return f"the sum of replies holds {sorted(total)}, expected {sorted(shapes)}"
    for name, shape in shapes.items():
        if np.shape(total[name]) != shape:
            return f"the sum of {name!r} has shape {np.shape(total[name])}, expected {shape}"
        if not np.all(np.isfinite(total[name])):
            return f"the sum of {name!r} is not all finite"
    return None


def released(message: Message, infos: Mapping[str, Mapping[str, float]]) -> str:
    """The content of replies like this one: names of arrays with sizes, and of diagnostics."""
    arrays = ", ".join(f"{name} ({np.size(value)})" for name, value in message.items())
    names = sorted({name for info in infos.values() for name in info})
    return "; ".join(part for part in (arrays, f"diagnostics {', '.join(names)}" if names else "") if part)


# Reports of a server's update ----------------------------------------------------------------------------------------


def _numbers_and_texts(info: Any) -> dict[str, float | str]:
    """Diagnostics of a round for the table: numbers and texts, NumPy's among them."""
    if taken := COLUMNS & set(info._fields):
        raise DeclarationError(f"Report.info has {sorted(taken)}, columns of the table of rounds; choose other names.")
    values = {
        name: value.item() if isinstance(value, np.generic | np.ndarray) and not np.ndim(value) else value
        for name, value in info._asdict().items()
    }
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


# Clients that are asked in a round: all, a fixed number, or each with a probability; at least one ---------------------


def all_clients(clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    """Every client."""
    return tuple(clients)


def _fixed_size(size: int, clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    chosen = set(rng.choice(len(clients), size=min(size, len(clients)), replace=False).tolist())
    return tuple(client for i, client in enumerate(clients) if i in chosen)


def _bernoulli(probability: float, clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    """Each client with a probability, given that one at least is asked."""
    # From the binomial without its zero by inversion: rejection would take long where the probability is small.
    count = len(clients)
    none = float(binom.pmf(0, count, probability))
    number = int(binom.ppf(none + (1.0 - none) * rng.uniform(), count, probability))
    return _fixed_size(min(max(number, 1), count), clients, rng)


def _by_function(choose: Participation, word: str, clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    try:
        chosen: Any = choose(clients, rng)
        # Letters of a text may be names of clients.
        asked = None if isinstance(chosen, str | bytes) else tuple(chosen)
    except TypeError as error:
        remedy = "pass one of (clients, rng) that returns clients"
        raise DeclarationError(f"{word}= is a function that cannot be used ({error}); {remedy}.") from error
    if asked is None or not all(isinstance(client, str) for client in asked):
        raise DeclarationError(f"{word}= is a function that returned {shown(chosen)}; return a list of clients' ids.")
    return asked


def as_participation(
    value: Participation | int | float | None, word: str = "participation", clients: int | None = None
) -> Participation:
    """Read the keyword: None for all, an int for a fixed size, a float for a probability, or a function."""
    if value is None:
        return all_clients
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        size = whole(word, value, hint="it is a number of clients a round")
        if clients is not None and size > clients:
            raise DeclarationError(f"{word}={size} is more than there are clients, {clients}; pass at most {clients}.")
        return functools.partial(_fixed_size, size)
    if isinstance(value, float | np.floating):
        hint = "a float is a probability, an int a number of clients"
        return functools.partial(_bernoulli, between(word, value, 0, 1, "(]", hint))
    if callable(value):
        return functools.partial(_by_function, value, word)
    raise DeclarationError(f"{word}={shown(value)} must be a number of clients, a probability, a function or None.")
