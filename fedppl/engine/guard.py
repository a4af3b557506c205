"""Checks every request against a client's policy, before anything is computed, and keeps an account over all runs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pytensor.graph.traversal import ancestors

from fedppl import privacy
from fedppl.contracts import AnyAlgorithm, Asked, ClientView, Failure, Reply, Request
from fedppl.engine import few_rows_in_sums as in_sums
from fedppl.engine import policy
from fedppl.engine.few_rows import refuse_model, refuse_points
from fedppl.engine.policy import Holdings, Policy, Release
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.storage import codec as _digest
from fedppl.storage import store as _store
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message

logger = logging.getLogger(__name__)

REFUSED = "refused by its site; the reason is in the site's own log"  # all that a server learns, whatever the rule
_FEW_LEFT_OUT = 0.5  # of the points: a search tries points along a line far beyond the step that it takes
# Lines of what is refused or costs nothing. Beyond this number only those are written whose number is a power of 2: a
# server may ask any number of times.
_ALL_OF = 1000
_OWN = ("inside",)  # arrays that the guard adds to a request
_RUN, _AGREEMENT, _DECLARATION, _MEMBERS = "run", "agreement", "declaration", "members"  # kinds of what is counted


class Run(NamedTuple):
    """A client's answers in one run; its answer to a declaration, an agreement or a set of sites has a digest."""

    round: int = 0  # the last that was admitted
    digest: str = ""  # of that request
    concluded: bool = False
    cohort: str = ""  # digest of the cohort in whose sums answers leave


class Ledger(NamedTuple):
    """A client's answered requests and releases, over all runs."""

    requests: int = 0  # admitted, whether or not a reply left
    unknown: int = 0  # those of them whose ε is not known
    spent: float = 0.0  # Σ 1 / z² over the others
    points: int = 0  # at which log densities left


Runs = Mapping[tuple[str, str], Run]  # by kind and name
NONE: Runs = MappingProxyType({})


class Guard(NamedTuple):
    """A policy and its account; of one client, which answers one request at a time."""

    policy: Policy
    read: Callable[[], Ledger]
    write: Callable[[Ledger, Mapping[str, Any], Runs], None]  # the ledger, a line for the log, and what changed of runs
    known: Callable[[str, str], Run | None]  # what is counted under a kind and a name
    alike: Callable[[str], Sequence[Run]]  # all of a kind
    masked: bool = False  # whether replies leave in sums under masks alone
    cohort: Holdings | None = None  # what the cohort of a request has, where it was counted under masks
    sums: in_sums.Sums | None = None  # of rows' vectors over the cohort, where somebody in it fails `few_rows` alone


def in_memory(rules: Policy, client_id: str, cohort: Holdings | None = None, sums: in_sums.Sums | None = None) -> Guard:
    """A guard whose account ends with the process, of a client in a cohort or alone; refusals go to Python's log."""
    ledger, known = [Ledger()], dict[tuple[str, str], Run]()

    def write(after: Ledger, entry: Mapping[str, Any], runs: Runs = NONE) -> None:
        ledger[0] = after
        known.update(runs)
        if entry.get("refused"):
            extra = _extra({**entry, "client": client_id})
            logger.warning("client %s refuses a request by %s", client_id, entry["refused"], extra=extra)

    def alike(kind: str) -> list[Run]:
        return [run for (one, _), run in known.items() if one == kind]

    masked = cohort is not None
    rules = policy.resolved(rules, masked=masked)
    return Guard(rules, lambda: ledger[0], write, lambda *key: known.get(key), alike, masked, cohort, sums)


def in_store(rules: Policy, store: _store.Store, name: str, *, masked: bool = False) -> Guard:
    """A guard whose account lies in a site's file, under a client's own name."""

    def read() -> Ledger:
        return Ledger(*store.account[0].clients.get(name, ()))

    def write(ledger: Ledger, entry: Mapping[str, Any], runs: Runs = NONE) -> None:
        for (kind, run), answered in runs.items():
            _store.put(store, name, kind, run, answered)
        account, is_free = store.account[0], ledger == read() and _is_free(entry)
        clients = {**account.clients, name: list(ledger)}
        store.account[0] = account = account._replace(clients=clients, idle=account.idle + is_free)
        if not entry or (is_free and account.idle > _ALL_OF and account.idle & (account.idle - 1)):
            return
        line = {"site": name or entry.get("client") or store.folder.name, **entry}
        line |= {"refused_or_free": account.idle} if is_free else {}
        _store.append(store, {**line, "requests": _store.requests(store)})
        if entry.get("refused"):
            words = line["site"], entry["event"], entry["refused"]
            logger.warning("client %s refuses (%s) by %s", *words, extra=_extra({**line, "client": line["site"]}))

    def known(kind: str, run: str) -> Run | None:
        answered = _store.known(store, name, kind, run)
        return None if answered is None else Run(*answered)

    def alike(kind: str) -> list[Run]:
        return [Run(*answered) for answered in _store.alike(store, name, kind)]

    return Guard(policy.resolved(rules, masked=masked), read, write, known, alike, masked)


def _extra(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a refusal's record has for who reads records and not texts."""
    known = {name: entry[name] for name in ("run", "round", "client") if entry.get(name)}
    return {**known, "status": "refused", "reason": entry["refused"]}


def _is_free(entry: Mapping[str, Any]) -> bool:
    """Whether a line is of what a server may ask any number of times; of nothing where there is no line."""
    is_answer = entry.get("event") in ("request", "reply", "conclusion") and not entry.get("repeated")
    return bool(entry) and (not is_answer or bool(entry.get("refused")))


def of_query(guard: Guard, digest: str) -> Guard:
    """The guard of a site that reads rows by a query: all lines of its log have the digest, which is "" without one.

    LocalFailure where the policy does not list the query; no rows are read.
    """

    def write(ledger: Ledger, entry: Mapping[str, Any], runs: Runs) -> None:
        guard.write(ledger, {**entry, "query": digest} if entry and digest else entry, runs)

    asking = guard._replace(write=write)
    if rule := policy.refuse_query(guard.policy, digest):
        note(asking, rule, event="query")
        raise LocalFailure(rule)
    return asking


def note(guard: Guard, rule: str | None, **entry: Any) -> None:
    """Log what costs nothing, and the rule that refuses it, if one does."""
    _written(guard, guard.read(), rule, **entry)


def _written(guard: Guard, ledger: Ledger, rule: str | None, runs: Runs = NONE, **entry: Any) -> bool:
    """Write the ledger, a line for the log, and runs where no rule refuses; whether none does."""
    if rule is None and entry["event"] in ("request", "cohort"):
        with contextlib.suppress(OSError, ValueError):  # of a question that needs no approval
            entry |= {"approved": by} if (by := _approvals(guard.policy).get(entry["run"])) else {}
    guard.write(ledger, {**entry, "refused": rule}, runs if rule is None else NONE)
    return rule is None


def _run_of(guard: Guard, name: str) -> Run:
    """What is known of a run."""
    return guard.known(_RUN, name) or Run()


def digest(request: Request) -> str:
    """A digest of all of a request but its nonce."""
    parts = {**request.message, "\0seed": np.array([str(part) for part in request.seed], dtype="S")}
    parts["\0report"] = np.array(request.report)
    return _digest.seal(parts, bytes(16))[16:].hex()


def admit_algorithm(guard: Guard, algorithm: AnyAlgorithm, client: Any) -> None:
    """Raise DeclarationError where a rule refuses the algorithm or the declaration; the text tells nothing of data."""
    rule = policy.refuse_declaration(guard.policy, lambda: client.declaration)
    public = "declarations: the policy of this site does not list this declaration; its own log has the digest"
    if rule is None and (refused := policy.refuse_algorithm(guard.policy, algorithm)):
        rule = public = refused
    if rule is not None:
        note(guard, rule, **_introduction(guard, algorithm, client))
        raise DeclarationError(public)


def refuse_data(
    guard: Guard, client: Any, algorithm: AnyAlgorithm, changed: Callable[[], str | None] = lambda: None
) -> str | None:
    """The rule that the client's data break, or their changes since answers; its text must not leave the site."""
    rule = _of_data(guard, algorithm, client) or changed()
    if rule is None and guard.sums is not None and guard.cohort is not None:  # in one process it is known beforehand
        nowhere = Asked(np.zeros((0, client.layout.size)), np.zeros((0, client.layout.size)))
        rule, _ = in_sums.refuse_points(guard.policy, client, nowhere, np.zeros(0), guard.cohort, guard.sums)
    note(guard, rule, **_introduction(guard, algorithm, client))
    return rule


def _of_data(guard: Guard, algorithm: AnyAlgorithm, client: Any) -> str | None:
    """The rule that data break: those of the cohort, once it is counted, where replies leave in sums under masks."""
    counted = not guard.masked or guard.policy.epsilon is not None
    held = client.view(holdings) if counted else guard.cohort
    rule = None if held is None else policy.refuse_data(guard.policy, client.layout.size, held)
    by_row = algorithm.disclosure.by_row
    # In sums slopes of rows are looked at once the cohort is known: that one site fails alone is not to leave.
    alone = guard.sums is None and (held is not None or not in_sums.fits(client.layout, by_row))
    return rule or refuse_model(guard.policy, client, by_row, alone=alone)


def _introduction(guard: Guard, algorithm: AnyAlgorithm, client: Any) -> dict[str, Any]:
    """A line of the log that says what is going to answer, and by which rules."""
    known = {"fingerprint": client.layout.fingerprint, "declaration": client.declaration}
    about = {"algorithm": algorithm.name, "fedppl": f"fedppl {version('fedppl')}", "rules": policy.told(guard.policy)}
    return {"event": "introduction", **known, **about}


def replayed(guard: Guard, request: Request) -> bool:
    """Whether this is the last request that was answered in its run, as where a server resumes from a checkpoint."""
    last = _run_of(guard, request.run)
    return (last.round, last.digest) == (request.round, digest(request))


def admit(guard: Guard, algorithm: AnyAlgorithm, client: Any, request: Request) -> Request | None:
    """Count the request and return it as the client may answer it, or None where a rule refuses it.

    Its cost is counted here, before anything is computed: a reply that gets lost was a release.
    """
    ledger = guard.read()
    entry = {**named("request", request), "asked": _sizes(request.message), "report": request.report}
    entry["bytes"] = int(sum(np.asarray(value).nbytes for value in request.message.values()))
    entry["request_digest"] = digest(request)
    # Names of arrays that `checked` adds: a server's own arrays under them are dropped.
    request = request._replace(message={k: v for k, v in request.message.items() if k not in _OWN})
    rule, request, points = checked(guard, ledger, algorithm, client, request)
    if rule is not None:
        _written(guard, _after_refusal(ledger, rule), rule, **entry)
        return None
    after = _charged(ledger, algorithm.disclosure.noise_multiplier)._replace(points=ledger.points + points)
    inside = np.asarray(request.message.get("inside", np.ones(0, dtype=bool)))
    left_out = int(np.sum(~inside))
    run = _run_of(guard, request.run)._replace(round=request.round, digest=entry["request_digest"], concluded=False)
    _written(guard, after, None, {(_RUN, request.run): run}, **entry, left_out=left_out)
    if left_out:
        few = left_out <= _FEW_LEFT_OUT * inside.size
        what = "nothing is to be done" if few else "few remain: look at the columns' scales and at rows far out"
        text = "client %s leaves out %d of %d points that it is asked at, by distance and few_rows; %s"
        level, extra = logging.INFO if few else logging.WARNING, {"run": request.run, "client": request.client_id}
        logger.log(level, text, request.client_id, left_out, inside.size, what, extra=extra)
    return request


def _charged(ledger: Ledger, noise: float | None = None, requests: int = 1) -> Ledger:
    """The ledger with one more request, or -1 of a reply that does not leave; its ε is known where there is noise."""
    return ledger._replace(
        requests=ledger.requests + requests,
        unknown=ledger.unknown + requests * (noise is None),
        spent=max(0.0, ledger.spent + (0.0 if noise is None else requests * noise**-2)),
    )


def _after_refusal(ledger: Ledger, rule: str) -> Ledger:
    """The ledger after a refusal: one by `few_rows` depends on the rows, so that it tells a bit and costs a request."""
    return ledger._replace(requests=ledger.requests + 1) if rule.startswith("few_rows") else ledger


def checked(
    guard: Guard, ledger: Ledger, algorithm: AnyAlgorithm, client: Any, request: Request
) -> tuple[str | None, Request, int]:
    """The first rule that the request breaks, or None; the request with its allowed points; how many are counted."""
    rules = guard.policy
    last = _run_of(guard, request.run)
    if request.round <= last.round:
        return f"round: {request.round} comes after {last.round} of this run", request, 0
    rule = _too_many(rules, ledger) or policy.refuse_algorithm(rules, algorithm)
    rule = rule or policy.refuse_declaration(rules, lambda: client.declaration)
    rule = rule or _of_data(guard, algorithm, client)
    rule = rule or policy.refuse_release(rules, algorithm.disclosure.noise_multiplier, ledger.spent, ledger.unknown)
    rule = rule or not_approved(rules, request)
    rule = rule or _not_a_share(request)
    if rule is not None or (algorithm.disclosure.asks is None and guard.sums is None):
        return rule, request, 0
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused
            asked = where_asked(algorithm, client.layout, request.message)
            rule = policy.refuse_request(rules, client.layout, asked)
            allowed = policy.inside(rules, client.layout, asked.spare)
            if rule is None and guard.sums is not None and guard.cohort is not None:
                rule, allowed = in_sums.refuse_points(rules, client, asked, allowed, guard.cohort, guard.sums)
            elif rule is None:
                rule, allowed = refuse_points(rules, client, asked, allowed, algorithm.disclosure.by_row)
            points = int(np.sum(allowed)) if asked.values else 0
            rule = rule or policy.refuse_values(rules, ledger.points + points if points else 0)
    except Exception as error:  # the request is not one of the algorithm's, or a user's code fails
        return f"numbers: the request cannot be read ({type(error).__name__})", request, 0
    if rule is None and len(asked.spare):
        request = request._replace(message={**request.message, "inside": allowed})
    return rule, request, points


def where_asked(algorithm: AnyAlgorithm, layout: Layout, message: Message) -> Asked:
    """Where a request asks; nowhere, of an algorithm that does not say."""
    asks, nowhere = algorithm.disclosure.asks, np.zeros((0, layout.size))
    return Asked(nowhere, nowhere) if asks is None else asks(layout, message)


def _too_many(rules: Policy, ledger: Ledger) -> str | None:
    most = rules.requests or 0
    rule = f"requests: {ledger.requests} answered, at most {most:g} wanted; raise requests= to allow more"
    return None if ledger.requests < most else rule


def _not_a_share(request: Request) -> str | None:
    """The rule that a client's share of a prior that is not Gaussian breaks: other factors would move its target."""
    share = request.message.get("prior_share", 0.0)
    if np.size(share) == 1 and np.issubdtype(np.asarray(share).dtype, np.number) and 0.0 <= np.max(share) <= 1.0:
        return None
    return "numbers: 'prior_share' is not between 0 and 1"


def not_approved(rules: Policy, request: Request) -> str | None:
    """The rule that a run breaks which the approval file does not name, or None."""
    if rules.approval is None or callable(rules.approval):
        return None
    where = repr(str(rules.approval))
    try:
        runs = _approvals(rules)
    except FileNotFoundError:
        runs, where = {}, f"{where}, which is not there"
    except (OSError, ValueError) as error:  # no text, or a null character in the path
        return f"approval: its file cannot be read ({type(error).__name__})"
    if request.run and request.run in runs:
        return None
    return f"approval: nobody has approved run {request.run!r}; who does adds that name as a line to {where}"


def _approvals(rules: Policy) -> dict[str, str]:
    """Runs that the approval file names, and what stands there after a "#": by whom, and when."""
    if rules.approval is None or callable(rules.approval):
        return {}
    lines = Path(rules.approval).read_text(encoding="utf-8").splitlines()
    return {name.strip(): by.strip() for name, _, by in (line.partition(" #") for line in lines)}


def released(guard: Guard, noise: float | None, request: Request, reply: Reply | Failure) -> bool:
    """Log a reply before it leaves; False where it must not leave. `noise` is the multiplier that it was charged by."""
    entry, ledger = named("reply", request), guard.read()
    if rule := _not_released(guard.policy, request, reply):
        return _written(guard, _charged(ledger, noise, -1), rule, **entry)
    if isinstance(reply, Failure):
        return _written(guard, ledger, None, **entry, failed=reply.reason)
    entry |= {"released": _sizes(reply.message), "diagnostics": sorted(reply.info), "delta": guard.policy.delta}
    entry["epsilon"] = None if ledger.unknown else privacy.epsilon_at(entry["delta"], 2.0 * np.sqrt(ledger.spent))
    return _written(guard, ledger, None, **entry)


def _not_released(rules: Policy, request: Request, reply: Reply | Failure) -> str | None:
    """The rule that a reply, or a failure's reason, breaks without approval, or None."""
    if not callable(rules.approval):
        return None
    message, info = (reply.message, reply.info) if isinstance(reply, Reply) else ({}, {})
    try:
        given = rules.approval(Release(request.run, request.round, request.client_id, message, info, reply.reason))
    except Exception as error:  # a failing user function is no approval
        extra = {"run": request.run, "client": request.client_id}
        logger.exception("client %s: approval= failed", request.client_id, extra=extra)
        return f"approval: {type(error).__name__}"
    return None if given is True else "approval: not given"


def _sizes(message: Message) -> dict[str, int]:
    return {name: int(np.size(value)) for name, value in message.items()}


def named(event: str, request: Request) -> dict[str, Any]:
    """The beginning of an entry of the log on a request."""
    return {"event": event, "run": request.run, "round": request.round, "client": request.client_id}


# The end of a run: a client's posterior is drawn once, and the summaries of it that leave are counted -----------------

_OF_POINTS = ("points", "weights", "joins")  # of a posterior


def concluded(guard: Guard, run: str) -> bool:
    """Log that a run is over; False where it was over already, or the client has answered enough."""
    ledger = guard.read()
    last = _run_of(guard, run)
    is_new = not (last.round or last.concluded)
    rule = _too_many(guard.policy, ledger) if is_new else "conclusion: this run is over" if last.concluded else None
    ledger = ledger if rule else ledger._replace(requests=ledger.requests + is_new)
    after = {(_RUN, run): last._replace(concluded=True)}
    return _written(guard, ledger, rule, after, event="conclusion", run=run)


def tells(guard: Guard, algorithm: AnyAlgorithm, client: ClientView, request: Request) -> tuple[str, ...]:
    """The summaries that may leave at the end of a run, by name; they count as one more request.

    The server chooses q, and so where rows are used: q, cavity and points must be where a request of the run may ask.
    """
    names = guard.policy.conclusions
    if guard.masked and (single := [name for name in names if name not in policy.SUMMED]):
        why = f"conclusion: {single} are a single site's, and answers leave in sums alone; leave them out of the policy"
        note(guard, why, event="conclusion", run=request.run)
        names = tuple(name for name in names if name in policy.SUMMED)
    if not names:
        return ()
    ledger, concludes = guard.read(), algorithm.disclosure.concludes
    last = _run_of(guard, request.run)
    rule = "conclusion: no request of this run was answered" if not last.round else None
    rule = rule or ("conclusion: the algorithm does not say where it draws" if concludes is None else None)
    target = {name: value for name, value in request.message.items() if name not in _OF_POINTS}
    as_asked = request._replace(round=last.round + 1, message=target)
    concluding = algorithm._replace(disclosure=algorithm.disclosure._replace(asks=concludes))
    rule = rule or checked(guard, ledger, concluding, client, as_asked)[0]
    rule = rule or _elsewhere(guard, ledger, client, request)
    ledger = _after_refusal(ledger, rule) if rule else _charged(ledger)
    entry: dict[str, Any] = {"event": "request", "run": request.run, "client": request.client_id, "asked": list(names)}
    return names if _written(guard, ledger, rule, **entry) else ()


def _elsewhere(guard: Guard, ledger: Ledger, client: ClientView, request: Request) -> str | None:
    """The rule that points of a posterior break, or None."""
    # They need not be points that were answered: all weight on one of a server's own tells as much as a narrow q there.
    points = np.asarray(request.message.get("points", np.zeros((0, client.layout.size))), dtype=float)
    if points.size and not ledger.points:
        return "points: of a posterior, and none were answered"
    if points.ndim == 2 and np.all(policy.inside(guard.policy, client.layout, points)):
        return None
    return "distance: of a point of the posterior"


def let_out(guard: Guard, client: ClientView, request: Request, arrays: Message) -> Message:
    """Log the summaries before they leave, and return them; empty without approval."""
    reply = Reply(request.client_id, 0, client.layout.fingerprint, arrays, {})
    return arrays if arrays and released(guard, None, request, reply) else {}


# Before a run: declarations, summaries of columns and agreements are counted and logged like requests -----------------

_ONE_DECLARATION = (
    "epsilon: one declaration, since whether another goes with the rows is not paid for; a builder is another where "
    "its code, what that reads, or the version of Python is: run the first again, or begin a new account"
)
_NO_PART = "no part"  # in place of the digest of an agreement that contradicted the rows
_MOST_NO_PARTS = 2


def admit_declaration(guard: Guard, key: str) -> bool:
    """Count a declaration that is to be built on a client's rows, once each; False where a rule refuses it.

    Whether it can be built may tell a bit of a row: each but the first counts as a request, and a total ε allows none.
    """
    if guard.known(_DECLARATION, key):
        return True
    ledger, after = guard.read(), {(_DECLARATION, key): Run(1, key, concluded=True)}
    if not guard.alike(_DECLARATION):
        guard.write(ledger, {}, after)  # costs nothing, and has no line
        return True
    rule = _ONE_DECLARATION if guard.policy.epsilon is not None else _too_many(guard.policy, ledger)
    run = f"{_DECLARATION} {key}"
    return _written(guard, ledger if rule else _charged(ledger), rule, after, event="request", run=run, asked={})


def refuse_rows(guard: Guard, rows: int | None) -> bool:
    """Whether there are certainly fewer rows than the policy wants, so that nothing may be computed from them."""
    if rows is None or rows >= guard.policy.rows or (guard.masked and guard.policy.epsilon is None):
        return False
    note(guard, f"rows: {rows} at most, at least {guard.policy.rows} wanted", event="introduction")
    return True


def may_tell(guard: Guard, name: str, client_id: str, columns: Mapping[str, int], arrays: Message) -> bool:
    """Count a client's first summary of columns (name to count of numbers), and log it; False where a rule refuses."""
    ledger, request = guard.read(), Request(client_id, 0, 1, (), {}, name)
    rule = _too_many(guard.policy, ledger) or not_approved(guard.policy, request)
    entry: dict[str, Any] = {"event": "request", "run": name, "client": client_id, "asked": dict(columns)}
    admitted = _written(guard, ledger if rule else _charged(ledger), rule, **entry)
    return admitted and released(guard, None, request, Reply(client_id, 0, "", arrays, {}))


def admit_agreement(guard: Guard, digest: str, client_id: str) -> bool:
    """Count an agreement that a client is sent, once each, since each may tell a bit of rows; False where refused."""
    if known := guard.known(_AGREEMENT, digest):
        return known.digest != _NO_PART
    ledger, earlier = guard.read(), guard.alike(_AGREEMENT)
    rule = _too_many(guard.policy, ledger)
    if sum(run.digest == _NO_PART for run in earlier) >= _MOST_NO_PARTS:
        rule = f"agreements: {_MOST_NO_PARTS} did not go with the rows here, and each more could tell of one row"
    if guard.policy.epsilon is not None and earlier:
        rule = "epsilon: one agreement, since whether rows go with another is not paid for"
    if rule is None:
        unknown = ledger.unknown + (guard.policy.epsilon is None)  # under a total nothing is looked at
        ledger = ledger._replace(requests=ledger.requests + 1, unknown=unknown)
    after = {(_AGREEMENT, digest): Run(1, digest, concluded=True)}
    entry: dict[str, Any] = {"event": "request", "run": f"{_AGREEMENT} {digest}", "client": client_id, "asked": {}}
    return _written(guard, ledger, rule, after, **entry)


def refuse_agreement(guard: Guard, digest: str, client_id: str, why: str) -> None:
    """Log that an agreement contradicts the client's rows; this tells of them, so that `admit_agreement` bounds it."""
    entry = {"event": "agreement", "run": f"{_AGREEMENT} {digest}", "client": client_id, "refused": f"agreement: {why}"}
    guard.write(guard.read(), entry, {(_AGREEMENT, digest): Run(1, _NO_PART, concluded=True)})


# Cohorts, in whose sums under masks a client takes part ---------------------------------------------------------------


def admit_cohort(guard: Guard, run: str, names: Sequence[str], digest: str) -> bool:
    """Count the cohort of a run, before counts of rows leave in its sum; False where a rule refuses it.

    A run has one cohort. Sums over two sets of sites that differ by a site tell that site's part, whatever the run and
    the declaration: so different sets are counted over all runs.
    """
    ledger, known = guard.read(), _run_of(guard, run)
    entry: dict[str, Any] = {"event": "cohort", "run": run, "members": list(names)}
    if known.cohort:
        other = "cohort: another one than that with which this run began; begin a new run"
        return known.cohort == digest or _written(guard, ledger, other, **entry)
    members = hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()[:32]
    sets = {one.digest for one in guard.alike(_MEMBERS)} | {members}
    rule = policy.refuse_cohort(guard.policy, len(names), len(sets)) or _too_many(guard.policy, ledger)
    rule = rule or not_approved(guard.policy, Request("", 0, 0, (), {}, run))
    if rule is None:
        private = guard.policy.epsilon is not None  # then no counts leave
        ledger = ledger._replace(requests=ledger.requests + 1) if private else _charged(ledger)
    after = {(_MEMBERS, members): Run(digest=members), (_RUN, run): known._replace(cohort=digest)}
    return _written(guard, ledger, rule, after, **entry)


def admit_gate(
    guard: Guard, algorithm: AnyAlgorithm, client: Any, request: Request, before: int = 0
) -> Sequence[Array] | None:
    """The points at which members of a cohort sum what their rows say, before one of them answers a request there.

    None where a rule but `few_rows`, which is looked at afterwards, refuses that request. The sum is for the members,
    and the request itself costs what it costs. Where the request of the gate `before`, by its round, was not answered,
    that gate counts as one: else a server would have a member beside it read any number of such sums.
    """
    open_guard, ledger = guard._replace(policy=dataclasses.replace(guard.policy, few_rows=0)), guard.read()
    rule = checked(open_guard, ledger, algorithm, client, request)[0]
    entry = {**named("gate", request), "asked": _sizes(request.message), "request_digest": digest(request)}
    if before > _run_of(guard, request.run).round and not rule:
        ledger = ledger._replace(requests=ledger.requests + 1)
    if not _written(guard, ledger, rule, **entry):
        return None
    return in_sums.places(client.layout, where_asked(algorithm, client.layout, request.message))


# The numbers of rows and events of a client's observed variables. A thin edge to PyMC ---------------------------------

_EVER = 2.0**99  # later times stand for events that were never seen
_CATEGORIES = 32  # that are counted each, the last with all beyond it: all clients' counts have one length


class Tally(NamedTuple):
    """Counts of one client; those of several add up."""

    rows: int  # of the observed variable that has the fewest
    kinds: tuple[tuple[str, NDArray[np.int64]], ...]  # of each variable of such outcomes: a rule, and counts


def holdings(client: Any) -> Holdings:
    """Rows and events in the client's own model."""
    return held(tally(client))


def tally(client: Any) -> Tally:
    """Count rows and outcomes in the client's own model; a potential counts as the shortest data that it reads."""
    model = client.pymc_model()
    outcomes = [(rv, _value(model.rvs_to_values[rv])) for rv in model.observed_RVs]
    lengths = [len(value) if value.ndim else 1 for _, value in outcomes]
    kinds = [counts for rv, value in outcomes if (counts := _kinds(rv, value)) is not None]
    data = set(model.data_vars)
    for potential in model.potentials:
        read = [np.shape(variable.get_value()) for variable in ancestors([potential]) if variable in data]
        lengths += [shape[0] for shape in read if shape] or [1] * bool(read)
    return Tally(min(lengths, default=0), tuple(kinds))


def pooled(tallies: Sequence[Tally]) -> Holdings:
    """Rows and events of all clients together, or DeclarationError where they count other outcomes."""
    if len({tuple(rule for rule, _ in counts.kinds) for counts in tallies}) > 1:
        raise DeclarationError(OTHER_COUNTS)
    return summed(tallies[0], np.sum([numbers(counts) for counts in tallies], axis=0), len(tallies))


OTHER_COUNTS = (
    "clients of several kinds have other observed variables, whose outcomes are not counted together under masks; "
    "declare one kind, or allow single replies (sums='optional')."
)


def numbers(counts: Tally) -> Array:
    """Counts as one vector, for a sum over a cohort."""
    return np.concatenate([[counts.rows], *(kinds for _, kinds in counts.kinds)]).astype(float)


def summed(counts: Tally, total: Array, sites: int) -> Holdings:
    """Rows and events of a cohort, of the summed vectors of its sites, of which this client is one."""
    ends = np.cumsum([1, *(len(kinds) for _, kinds in counts.kinds)])
    parts = np.split(np.rint(total).astype(np.int64), ends[:-1])[1:]
    kinds = tuple((rule, part) for (rule, _), part in zip(counts.kinds, parts, strict=True))
    return held(Tally(int(round(float(total[0]))), kinds))._replace(sites=sites)


def held(counts: Tally) -> Holdings:
    """Rows, and the outcomes of the rarest kind."""
    events = [rarest for rule, kinds in counts.kinds if (rarest := _rarest(rule, kinds)) is not None]
    return Holdings(counts.rows, min(events, default=None))


def _rarest(rule: str, counts: NDArray[np.int64]) -> int | None:
    if rule == "binary":  # zeros, ones, and others: of counts that happen to be small outcomes are not of kinds
        return None if counts[2] else int(np.min(counts[:2]))
    if rule == "categories":
        return int(np.min(counts[counts > 0], initial=np.iinfo(np.int64).max))
    return int(np.min(counts))


def _value(variable: Any) -> Any:
    if hasattr(variable, "get_value"):
        return np.asarray(variable.get_value())
    return np.asarray(variable.data if hasattr(variable, "data") else variable.eval(mode=PYTHON_MODE))


def _kinds(rv: Any, value: Any) -> tuple[str, NDArray[np.int64]] | None:
    """Numbers of outcomes of each kind, and the rule by which they are read; None where outcomes are not of kinds."""
    op = rv.owner.op
    name = str(getattr(op, "name", None) or getattr(op, "_print_name", ("",))[0])
    weighted, name = name.startswith("weighted_"), name.removeprefix("weighted_")
    if name == "right_censored":  # a time is an event where it is before its limit
        return "events", np.array([np.sum(value < _value(op.dist_params(rv.owner)[-2 if weighted else -1]))])
    if name == "seen_between":  # an event was where the time is known to be before another
        return "events", np.array([np.sum(_value(op.dist_params(rv.owner)[-2 if weighted else -1]) < _EVER)])
    if value.dtype.kind not in "biu":
        return None
    if name in ("binomial", "beta_binomial"):
        trials = np.broadcast_to(_value(op.dist_params(rv.owner)[0]), value.shape)
        return "events", np.array([np.sum(value), np.sum(trials - value)])
    if name in ("categorical", "ordered_logistic"):
        each = np.clip(value.ravel().astype(np.int64), 0, _CATEGORIES - 1)
        return "categories", np.bincount(each, minlength=_CATEGORIES)
    pair = [np.sum(value == 0), np.sum(value == 1)]
    return "binary", np.array([*pair, value.size - sum(pair)], dtype=np.int64)
