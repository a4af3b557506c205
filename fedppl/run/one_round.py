"""One round: ask, wait, check, update, record; who was skipped is said in the log."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import settings
from fedppl.contracts import Reply, Request, html
from fedppl.numerics.streams import stream
from fedppl.results import fallbacks
from fedppl.results.records import Record
from fedppl.run import outlook
from fedppl.run._algorithm import numbers_and_texts, require_report
from fedppl.run._run import Run, add, save
from fedppl.run.replies import n_bytes, received, released, why_not
from fedppl.settings import one_line
from fedppl.types import DeclarationError, Message, Status

logger = logging.getLogger(__name__)


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
        numbers = {k: v if isinstance(v, str) else html.number(v) for k, v in self.record.info.items()}
        return html.facts(f"Round {self.number}", {k: v for k, v in {**said, **numbers}.items() if v not in ("", "–")})

    def _replies(self) -> str:
        asked = len(self.record.asked) - len(self.record.silent)
        return f"{len(self.record.bytes_up)} of {asked} replies"

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
            "clients_used": float(len(record.bytes_up)),
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


def one_round(run: Run) -> Round:
    """Ask clients, wait, check what comes, update the server, and record it."""
    result = run.algorithm.result
    preliminary, closing = result.preliminary(run.state), result.closing(run.state)
    number = len(run.records) + 1
    # Sorted, so that the same clients are asked whatever order an engine finds them in.
    chosen = set(run.participation(tuple(sorted(run.clients)), stream((run.seed, number, 0))))
    asked = tuple(client_id for client_id in run.clients if client_id in chosen)
    if chosen - set(run.clients) or not asked:
        raise DeclarationError(
            f"participation chose {sorted(chosen)} in round {number}; choose from {list(run.clients)}."
        )
    told = set(run.reporting(tuple(sorted(asked)), stream((run.seed, number, 1))))
    if told - set(asked) or not told:
        raise DeclarationError(f"reporting chose {sorted(told)} in round {number}; choose from {list(asked)}.")
    with _named(run, "Replies.shapes"):
        shapes = run.algorithm.replies.shapes(run.state)
    with _named(run, "broadcast"):
        messages = {client_id: run.algorithm.broadcast(run.state, client_id) for client_id in asked}
    requests = {
        client_id: Request(
            client_id,
            nonce=secrets.randbits(63),
            round=number,
            seed=(run.seed, number, _client_key(client_id)),
            message=message,
            run=run.name,
            report=client_id in told,
            shapes=shapes if client_id in told else {},
        )
        for client_id, message in messages.items()
    }
    started = time.perf_counter()
    run.progress.asked(number, len(requests))
    answers = run.engine.exchange(requests, run.deadline, run.progress.heard)
    seconds = time.perf_counter() - started
    replies: dict[str, Message] = {}
    infos: dict[str, Mapping[str, float]] = {}
    failures: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for client_id, request in requests.items():
        reply = answers.get(client_id)
        reason = why_not(reply, request, run.layout, shapes if request.report else {})
        if reason is None and isinstance(reply, Reply) and request.report:
            with _named(run, "Replies.reject"):
                reason = run.algorithm.replies.reject(run.state, reply.message)
        if reason is None and isinstance(reply, Reply):
            infos[client_id] = reply.info
            if reply.reason:
                reasons[client_id] = one_line(reply.reason)
            if request.report:
                replies[client_id] = reply.message
        else:
            failures[client_id] = str(reason)
    _log(number, failures, run.said)
    fallbacks.log(number, infos, fallbacks.fallen(run.infos))
    together = run.algorithm.replies.summed(run.state)
    if not isinstance(together, bool | np.bool_):
        raise DeclarationError(
            f"{run.algorithm.name}: Replies.summed returned {settings.shown(together)} in round {number}; return True "
            "where sums over clients are all that the server needs, else False."
        )
    with _named(run, "update_server"):
        returned = run.algorithm.update_server(run.state, received(replies, summed=bool(together)))
    require_report(run.algorithm.name, returned)
    state, report = returned
    record = Record(
        number=number,
        asked=tuple(asked),
        failures=failures,
        infos=infos,
        info=numbers_and_texts(report.info),
        bytes_down={client_id: n_bytes(request.message) for client_id, request in requests.items()},
        bytes_up={client_id: n_bytes(message) for client_id, message in replies.items()},
        released=released(replies, infos),
        seconds=seconds,
        status=report.status,
        silent=tuple(client_id for client_id in asked if client_id not in told),
        preliminary=preliminary or closing,
        closing=closing,
        reasons=reasons,
        message=run.message if report.message is None else report.message,
        mild=run.records[-1].mild if report.message is None and run.records else report.mild,
    )
    # Together: a run that Ctrl-C ends has the state that its records tell of, and what clients kept with it.
    run.state, run.personal = state, run.engine.personal()
    add(run, record)
    tolerance = outlook.tolerance_of(run.algorithm.settings)
    stands = outlook.standing(record, run.infos if closing else infos, tolerance)
    ahead = outlook.ahead(run.records, run.limit, run.counted, tolerance)
    shown = record.status.value if record.status is not Status.RUNNING else ""
    run.progress.update(run.counted, "; ".join(filter(None, (stands, shown, ahead))))
    logger.info(
        "round %d: %s, %d of %d replies in %s%s",
        number,
        report.status.value,
        len(replies),
        len(told),
        outlook.spelled(seconds),
        "".join(f"; {one}" for one in (stands, ahead) if one),
        extra={
            "round": number,
            "status": report.status.value,
            "replies": len(replies),
            "asked": len(asked),
            "reporting": len(told),
        },
    )
    save(run)
    return Round(number, run.state, report.info, record.status, record.message, record)


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
