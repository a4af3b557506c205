"""The end of a run at a client: its posterior is drawn once, and what its policy lets out of it is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.contracts import AnyAlgorithm, ClientView, Reply, Request
from fedppl.engine import policy
from fedppl.engine.guard import Guard, Ledger, Run, checked, counted, not_approved, released
from fedppl.types import Message

_OF_POINTS = ("points", "weights", "joins")  # of a corrected posterior


def concluded(guard: Guard, run: str) -> bool:
    """Note that a run is over; False where that has been said before, or where the client has answered enough."""
    entry = {"event": "conclusion", "run": run}
    with guard.held():
        ledger = guard.read()
        last = ledger.runs.get(run)
        rule = None
        if last is None and ledger.requests >= guard.policy.requests:
            rule = f"requests: {ledger.requests} answered, at most {guard.policy.requests:g} wanted"
        if last is not None and last.concluded:
            rule = "conclusion: this run is over"
        if rule is None:
            count = ledger.requests + (last is None)
            ledger = ledger._replace(
                requests=count, runs={**ledger.runs, run: (last or Run())._replace(concluded=True)}
            )
        guard.write(ledger, {**entry, "refused": rule})
        return rule is None


def tells(guard: Guard, algorithm: AnyAlgorithm, client: ClientView, request: Request) -> tuple[str, ...]:
    """What of the end of a run may leave: what the policy names, counted as one more request, which it is.

    Whoever chooses q chooses where the rows are looked at. So the run has to be one that the client answered in, and q
    and the cavity have to be where a request may ask, points of the posterior included.
    """
    names = guard.policy.conclusions
    if not names:
        return ()
    with guard.held():
        ledger = guard.read()
        last = ledger.runs.get(request.run, Run())
        concludes = algorithm.disclosure.concludes
        rule = "conclusion: no request of this run was answered" if not last.round else None
        rule = rule or ("conclusion: the algorithm does not say where it draws" if concludes is None else None)
        target = {name: value for name, value in request.message.items() if name not in _OF_POINTS}
        as_asked = request._replace(round=last.round + 1, message=target)
        concluding = algorithm._replace(disclosure=algorithm.disclosure._replace(asks=concludes))
        rule = rule or checked(guard.policy, ledger, concluding, client, as_asked)[0]
        rule = rule or _elsewhere(guard, ledger, client, request)
        ledger = counted(ledger, rule)
        if rule is None:
            ledger = ledger._replace(requests=ledger.requests + 1, unknown=ledger.unknown + 1)
        entry = {"event": "request", "run": request.run, "client": request.client_id, "asked": list(names)}
        guard.write(ledger, {**entry, "refused": rule})
        return () if rule else names


def _elsewhere(guard: Guard, ledger: Ledger, client: ClientView, request: Request) -> str | None:
    """The rule that points of a corrected posterior break, or None.

    Whether they are those that were answered is not known here: a server may put all weight on one of its own, which
    tells what a narrow q there would.
    """
    points = np.asarray(request.message.get("points", np.zeros((0, client.layout.size))), dtype=float)
    if points.size and not ledger.points:
        return "correction: points of a posterior, and none were answered"
    if points.ndim == 2 and np.all(policy.inside(guard.policy, client.layout, points)):
        return None
    return "distance: of a point of the posterior"


def let_out(guard: Guard, algorithm: AnyAlgorithm, client: ClientView, request: Request, told: Message) -> Message:
    """What leaves in the end, noted before it does; nothing where nobody approves."""
    reply = Reply(request.client_id, 0, client.layout.fingerprint, told, {})
    counted = algorithm._replace(disclosure=algorithm.disclosure._replace(noise_multiplier=None))  # as `tells` did
    return told if told and released(guard, counted, request, reply) else {}


# What a client tells before a run, and what it is told of that: counted and logged like requests ----------------------

_AGREEMENT = "agreement "  # begins the names of agreements in a ledger
_DECLARATION = "declaration "  # begins those of declarations
_NO_PART = "no part"  # in the place of the digest of one that did not go with the rows
_MOST_NO_PARTS = 2


def admit_declaration(guard: Guard, key: str) -> bool:
    """Count a declaration that is to be built on a client's rows, once each, all but the first; False after enough.

    Whether it can be built on them may tell a bit of a row. The policy's `requests` bound how often.
    """
    name = f"{_DECLARATION}{key}"
    with guard.held():
        ledger = guard.read()
        if name in ledger.runs:
            return True
        runs = {**ledger.runs, name: Run(1, key, concluded=True)}
        if not any(known.startswith(_DECLARATION) for known in ledger.runs):
            guard.write(ledger._replace(runs=runs), {})  # costs nothing, and has no line
            return True
        rule = _refused(guard, ledger.requests)
        unknown = ledger.unknown + (guard.policy.epsilon is None)  # of what the server has no ε for anyway
        after = ledger if rule else ledger._replace(requests=ledger.requests + 1, unknown=unknown, runs=runs)
        guard.write(after, {"event": "request", "run": name, "asked": {}, "refused": rule})
        return rule is None


def refuse_rows(guard: Guard, rows: int | None) -> bool:
    """Whether fewer rows than the policy wants are there at most: then nothing is computed from them."""
    if rows is None or rows >= guard.policy.rows:
        return False
    with guard.held():
        rule = f"rows: {rows} at most, at least {guard.policy.rows} wanted"
        guard.write(guard.read(), {"event": "introduction", "refused": rule})
    return True


def admit_telling(guard: Guard, name: str, client_id: str, columns: Mapping[str, int]) -> bool:
    """Count that a client tells of columns (name to numbers) for the first time; False where a rule refuses it."""
    entry = {"event": "request", "run": name, "client": client_id, "asked": dict(columns)}
    with guard.held():
        ledger = guard.read()
        rule = _refused(guard, ledger.requests) or not_approved(guard.policy, Request(client_id, 0, 1, (), {}, name))
        counted = ledger._replace(requests=ledger.requests + 1, unknown=ledger.unknown + 1)
        guard.write(ledger if rule else counted, {**entry, "refused": rule})
        return rule is None


def let_tell(guard: Guard, algorithm: AnyAlgorithm, name: str, client_id: str, told: Message) -> bool:
    """Note what leaves for the first time, before it does; False where nobody approves."""
    counted = algorithm._replace(disclosure=algorithm.disclosure._replace(noise_multiplier=None))  # as above
    return released(guard, counted, Request(client_id, 0, 1, (), {}, name), Reply(client_id, 0, "", told, {}))


def note(guard: Guard, name: str, client_id: str, **more: Any) -> None:
    """Note what tells nothing that was not told before, or is refused for what it is."""
    with guard.held():
        guard.write(guard.read(), {"event": "agreement", "run": name, "client": client_id, "refused": None, **more})


def admit_agreement(guard: Guard, digest: str, client_id: str) -> bool:
    """Count an agreement that the client is sent, once each; False where it was sent enough.

    Whether it takes part with one depends on its rows, so that each may tell one bit of them.
    """
    name = f"{_AGREEMENT}{digest}"
    with guard.held():
        ledger = guard.read()
        if name in ledger.runs:
            return ledger.runs[name].digest != _NO_PART
        rule = _refused(guard, ledger.requests)
        earlier = [run for known, run in ledger.runs.items() if known.startswith(_AGREEMENT)]
        if sum(run.digest == _NO_PART for run in earlier) >= _MOST_NO_PARTS:
            rule = f"agreements: {_MOST_NO_PARTS} did not go with the rows here, and each more could tell of one row"
        if guard.policy.epsilon is not None and earlier:
            rule = "epsilon: one agreement, since whether rows go with another is not paid for"
        after = ledger
        if rule is None:
            unknown = ledger.unknown + (guard.policy.epsilon is None)  # under a total nothing is looked at
            runs = {**ledger.runs, name: Run(1, digest, concluded=True)}
            after = ledger._replace(requests=ledger.requests + 1, unknown=unknown, runs=runs)
        guard.write(after, {"event": "request", "run": name, "client": client_id, "asked": {}, "refused": rule})
        return rule is None


def refuse_agreement(guard: Guard, digest: str, client_id: str, why: str) -> None:
    """Note that an agreement does not go with the client's rows, which tells of them: only few such are borne."""
    name = f"{_AGREEMENT}{digest}"
    with guard.held():
        ledger = guard.read()
        after = ledger._replace(runs={**ledger.runs, name: Run(1, _NO_PART, concluded=True)})
        guard.write(after, {"event": "agreement", "run": name, "client": client_id, "refused": f"agreement: {why}"})


def _refused(guard: Guard, requests: int) -> str | None:
    if requests < guard.policy.requests:
        return None
    return f"requests: {requests} answered, at most {guard.policy.requests:g} wanted"
