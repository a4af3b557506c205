"""The end of a run at a client: its posterior is drawn once, and what its policy lets out of it is counted."""

from __future__ import annotations

import numpy as np

from fedppl.contracts import AnyAlgorithm, ClientView, Reply, Request
from fedppl.engine import policy
from fedppl.engine.guard import Guard, Ledger, Run, checked, counted, released
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
