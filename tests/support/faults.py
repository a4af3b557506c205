"""What can go wrong between a server and its clients: altered replies one by one, and an engine that injects faults.

Every fault is drawn from a stream of (seed, round, client), so that a run with faults is as repeatable as one without.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import fedppl
from fedppl import gaussian, structure
from fedppl.contracts import Algorithm, Failure, LocalInference, Reply, Request
from fedppl.engine.answer import answer
from fedppl.engine.inprocess import InProcessEngine

# Fields of a reply by phase.
FIELDS = {"warm start": ("value", "gradient", "hessian", "ray"), "EP": ("mean", "precision", "skewness", "mc_error")}
MATRICES = ("hessian", "precision")
# What is judged alike: after a step of the warm start, an expansion may be as steep and as low as it likes.
KINDS = {"first point": ("warm start", "first point"), "after a step": ("warm start", "after a step"), "EP": ("EP",)}


class Alteration(NamedTuple):
    """One way to spoil a reply, and what the server has to say of it."""

    change: Callable[[Request, Reply], Any]
    phase: str | None  # or a kind of reply; None: a reply of any phase
    reason: str  # regular expression


def with_message(reply: Reply, **arrays: Any) -> Reply:
    return reply._replace(message={**reply.message, **arrays})


def phase_of(request: Request) -> str:
    """Of the warm start, or of EP itself, whose messages have q."""
    return "warm start" if "point" in request.message else "EP"


def kind_of(request: Request) -> str:
    if "point" not in request.message:
        return "EP"
    return "after a step" if np.any(request.message["move"]) else "first point"


def fitting(kind: str) -> list[str]:
    """Names of the alterations that a reply of this kind is refused for."""
    return [name for name, alteration in ALTERED.items() if alteration.phase in (None, *KINDS[kind])]


def _of_field(name: str, change: Callable[[Any], Any]) -> Callable[[Request, Reply], Any]:
    return lambda request, reply: with_message(reply, **{name: change(reply.message[name])})


def _one_entry(value: float) -> Callable[[Any], Any]:
    """Set the last entry only: one bad number among good ones."""

    def change(array: Any) -> Any:
        spoilt = np.array(array)
        spoilt[(-1,) * spoilt.ndim] = value
        return spoilt

    return change


def _without_first(packed: Any) -> Any:
    """A precision that knows nothing of the first coordinate."""
    matrix = gaussian.unpack_triangle(packed)
    matrix[0] = matrix[:, 0] = 0.0
    return gaussian.pack_triangle(matrix)


def _replies() -> dict[str, Alteration]:
    """Of any phase: not the reply that was asked for."""
    nonce = r"reply to request .*but the latest is \d+"
    changes: dict[str, tuple[Callable[[Request, Reply], Any], str]] = {
        "lost": (lambda q, r: None, "no reply"),
        "failure": (lambda q, r: Failure(q.client_id, q.nonce, "battery empty"), "battery empty"),
        "forged log line": (
            lambda q, r: Failure(q.client_id, q.nonce, "x\nround 1: converged"),
            "x round 1: converged",
        ),
        "endless reason": (lambda q, r: Failure(q.client_id, q.nonce, "x" * 10**6), r"x{499}…$"),
        "foreign object": (lambda q, r: object(), "object is no reply"),
        "bare message": (lambda q, r: dict(r.message), "dict is no reply"),
        "tuple": (lambda q, r: tuple(r), "tuple is no reply"),
        "older request": (lambda q, r: r._replace(nonce=q.nonce - 1), nonce),
        "nonce as text": (lambda q, r: r._replace(nonce=str(q.nonce)), nonce),
        "nonce as array": (lambda q, r: r._replace(nonce=np.array([q.nonce, 1])), nonce),
        "other client": (lambda q, r: r._replace(client_id="site 0"), "reply of client 'site 0' to the request"),
        "client as array": (
            lambda q, r: r._replace(client_id=np.array(["a", "b"])),
            "reply of client .* to the request",
        ),
        "fingerprint": (lambda q, r: r._replace(fingerprint="beef"), "fingerprint beef differs.*another model runs"),
        "no fingerprint": (lambda q, r: r._replace(fingerprint=None), "fingerprint None differs"),
        "message is a list": (lambda q, r: r._replace(message=list(r.message)), "message of type list is no mapping"),
        "no message": (lambda q, r: r._replace(message=None), "message of type NoneType is no mapping"),
        "extra name": (lambda q, r: with_message(r, data=np.zeros(3)), "reply holds .*'data'.*, expected"),
        "name that is a number": (lambda q, r: r._replace(message={**r.message, 7: np.zeros(3)}), "reply holds .*'7'"),
        "no names": (lambda q, r: r._replace(message={}), r"reply holds \[\], expected"),
        "info is a list": (lambda q, r: r._replace(info=[1.0]), "'info' is not numbers by name"),
        "info holds data": (lambda q, r: r._replace(info={"y": np.zeros(9)}), "'info' is not numbers by name"),
        "info by number": (lambda q, r: r._replace(info={1: 1.0}), "'info' is not numbers by name"),
    }
    return {name: Alteration(change, None, reason) for name, (change, reason) in changes.items()}


def _fields() -> dict[str, Alteration]:
    """Of every field: no array of finite real numbers in the right shape, or absent."""
    found = {}
    for phase, names in FIELDS.items():
        for name in names:
            finite, shape = f"'{name}' is not all finite real numbers", f"'{name}' has shape .*, expected"
            changes: dict[str, tuple[Callable[[Any], Any], str]] = {
                "NaN": (_one_entry(np.nan), finite),
                "Inf": (_one_entry(np.inf), finite),
                "-Inf": (_one_entry(-np.inf), finite),
                "one more": (lambda a: np.append(a, 0.0), shape),
                "another dimension": (lambda a: np.asarray(a)[None], shape),
                "integers": (lambda a: np.asarray(a).astype(int), finite),
                "complex": (lambda a: np.asarray(a) + 0j, finite),
                "objects": (lambda a: np.asarray(a).astype(object), finite),
                "text": (lambda a: np.asarray(a).astype(str), finite),
                "beyond float64": (lambda a: np.asarray(a, dtype=np.longdouble) * np.longdouble("1e4000"), finite),
                "None": (lambda a: None, f"'{name}' is of type NoneType, expected an array"),
                "ragged list": (lambda a: [[1.0], [1.0, 2.0]], f"'{name}' is of type list, expected an array"),
            }
            for kind, (change, reason) in changes.items():
                found[f"{name}: {kind}"] = Alteration(_of_field(name, change), phase, reason)
            found[f"{name}: missing"] = Alteration(
                lambda q, r, name=name: r._replace(message={k: v for k, v in r.message.items() if k != name}),
                phase,
                r"reply holds \[.*\], expected",
            )
            found[f"{name}: renamed"] = Alteration(
                lambda q, r, name=name: r._replace(
                    message={name.upper() if k == name else k: v for k, v in r.message.items()}
                ),
                phase,
                f"reply holds .*'{name.upper()}'.*, expected",
            )
        matrix = next(name for name in names if name in MATRICES)
        found[f"{matrix}: full and not symmetric"] = Alteration(
            _of_field(matrix, lambda a: np.triu(gaussian.unpack_triangle(a))),
            phase,
            f"'{matrix}' has shape .*, expected",
        )
    return found


def _absurd() -> dict[str, Alteration]:
    """Finite numbers of the right shapes that no honest client has."""
    huge = 1e30
    changes: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
        "hessian: absurdly large": (
            "first point",
            "hessian",
            lambda a: a * huge,
            "times the precision of the prior.* allowed",
        ),
        "hessian: largest number": (
            "first point",
            "hessian",
            _one_entry(1.7e308),
            "'hessian' is .* times the precision of the prior",
        ),
        "hessian: absurdly positive": (
            "first point",
            "hessian",
            lambda a: -a * huge,
            "'hessian' is .* times the precision of the prior",
        ),
        "gradient: absurdly large": ("first point", "gradient", lambda a: a * huge, "'gradient' is .* allowed"),
        "gradient: largest number": ("first point", "gradient", _one_entry(-1.7e308), "'gradient' is .* allowed"),
        "value: absurdly large at first": (
            "first point",
            "value",
            lambda a: np.array(huge),
            r"'value' is 1e\+30, at most",
        ),
        "value: absurdly small": ("first point", "value", lambda a: np.array(-huge), r"'value' is -1e\+30, at most"),
        "value: largest number at first": (
            "first point",
            "value",
            lambda a: np.array(1.7e308),
            r"'value' is 1.7e\+308",
        ),
        "value: absurdly large": (
            "after a step",
            "value",
            lambda a: np.array(huge),
            r"'value' reaches 1e\+30, at most",
        ),
        "value: largest number": ("after a step", "value", lambda a: np.array(1.7e308), r"'value' reaches 1.7e\+308"),
        "ray: absurdly large": ("after a step", "ray", lambda a: a + huge, r"'ray' reaches 1e\+30, at most"),
        "ray: largest number": ("after a step", "ray", _one_entry(1.7e308), r"'ray' reaches 1.7e\+308, at most"),
        "precision: absurdly large": ("EP", "precision", lambda a: a * huge, "'precision' is .* times q's.* allowed"),
        "precision: largest number": (
            "EP",
            "precision",
            lambda a: np.full_like(a, 1.7e308),
            "'precision' is .* times q's",
        ),
        "precision: absurdly small": ("EP", "precision", lambda a: a / huge, "'precision' is .* times q's.* at least"),
        "precision: negative": ("EP", "precision", lambda a: -a, "'precision' is not positive definite"),
        "precision: zero": ("EP", "precision", lambda a: 0 * a, "'precision' is not positive definite"),
        "precision: indefinite": ("EP", "precision", _one_entry(-1.0), "'precision' is not positive definite"),
        "precision: singular": ("EP", "precision", _without_first, "'precision' is not positive definite"),
        "mean: absurdly far": ("EP", "mean", lambda a: a + huge, "'mean' is .* sds from q's"),
        "mean: largest number": ("EP", "mean", _one_entry(-1.7e308), "'mean' is .* sds from q's"),
        "skewness: absurd": ("EP", "skewness", lambda a: a + huge, "'skewness' reaches .* at most"),
        "mc_error: negative": (
            "EP",
            "mc_error",
            lambda a: np.array(-0.1),
            r"'mc_error' is -0.1 .* must lie in \[0, 1\]",
        ),
        "mc_error: absurd": (
            "EP",
            "mc_error",
            lambda a: np.array(huge),
            r"'mc_error' is 1e\+30 .* must lie in \[0, 1\]",
        ),
    }
    return {
        label: Alteration(_of_field(name, change), phase, reason)
        for label, (phase, name, change, reason) in changes.items()
    }


ALTERED = _replies() | _fields() | _absurd()


def alter(request: Request, reply: Reply, rng: np.random.Generator) -> Any:
    """Spoil a reply in one of the ways that fit its phase."""
    names = fitting(kind_of(request))
    return ALTERED[names[int(rng.integers(len(names)))]].change(request, reply)


# --- the engine -----------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """Probability of each fault, per client and round."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    late: float = 0.0  # comes a round late, in place of that round's own reply
    duplicated: float = 0.0  # counts now, and answers the next request too
    altered: float = 0.0
    raises: float = 0.0
    wiped: float = 0.0  # computes, then loses personal state, model and reply


class Faulty(InProcessEngine):
    """An engine factory and its engine: clients answer honestly, and faults come between.

    Attributes
    ----------
    active
        Whether faults are injected; may be switched between rounds.
    injected
        (round, client, fault) of all that went wrong.
    """

    def __init__(self, rates: Rates, seed: int, wrong: float = 0.0) -> None:
        self.rates = rates
        self.seed = seed
        self.wrong = wrong  # probability of a reply that is wrong, and that nothing in it tells
        self.active = True
        self.injected: list[tuple[int, str, str]] = []
        self.old_mail: dict[str, Any] = {}
        self.said: dict[str, Any] = {}  # an earlier message by client

    def __call__(self, algorithm: Algorithm, clients: Mapping[str, Any]) -> Faulty:
        super().__init__(algorithm, clients, 1)
        return self

    @property
    def counts(self) -> Counter[str]:
        return Counter(fault for _, _, fault in self.injected)

    def exchange(self, requests: Mapping[str, Request], deadline: float | None, *heard: Any) -> dict[str, Any]:
        if not self.active:
            return super().exchange(requests, deadline, *heard)
        return {client_id: self._through_faults(request) for client_id, request in requests.items()}

    def _through_faults(self, request: Request) -> Any:
        client_id = request.client_id
        rng = np.random.default_rng([self.seed, request.round, zlib.crc32(client_id.encode())])
        drawn = dict(zip(Rates._fields, rng.random(len(Rates._fields)) < np.array(self.rates), strict=True))
        old = self.old_mail.pop(client_id, None)
        if drawn["request_lost"]:
            self._note(request, "request_lost")
            return old
        if drawn["raises"]:
            self._note(request, "raises")
            broken = self._algorithm._replace(update_client=_raising)
            return answer(broken, self._models[client_id], self._personal.get(client_id), request)[1]
        reply: Any = self._some((request,))[request.client_id]
        if drawn["wiped"]:
            self._note(request, "wiped")
            self._personal.pop(client_id, None)
            self._models[client_id] = dataclasses.replace(self._models[client_id])  # nothing that it kept is left
            return old
        if old is not None:
            self._note(request, "stale")
            return old
        if drawn["reply_lost"]:
            self._note(request, "reply_lost")
            return None
        if drawn["late"]:
            self._note(request, "late")
            self.old_mail[client_id] = reply
            return None
        if drawn["duplicated"]:
            self._note(request, "duplicated")
            self.old_mail[client_id] = reply
        if drawn["altered"] and isinstance(reply, Reply):
            self._note(request, "altered")
            return alter(request, reply, rng)
        if rng.random() < self.wrong and isinstance(reply, Reply) and phase_of(request) == "EP":
            self._note(request, "wrong")
            return self._mistaken(request, reply, rng)
        return reply

    def _mistaken(self, request: Request, reply: Reply, rng: np.random.Generator) -> Reply:
        """Finite and wrong: moments of some rounds ago, or a mean or a precision that is off."""
        old = self.said.get(request.client_id, reply.message)
        if request.client_id not in self.said or rng.random() < 0.3:
            self.said[request.client_id] = reply.message
        kind = int(rng.integers(3))
        if kind == 0:
            return reply._replace(message=old)
        precision = np.asarray(reply.message["precision"])
        if kind == 1:
            sd = 1 / np.sqrt(np.diag(gaussian.unpack_triangle(precision)))
            return with_message(reply, mean=reply.message["mean"] + rng.normal(0, 3, size=len(sd)) * sd)
        return with_message(reply, precision=precision * 10 ** rng.uniform(-0.5, 0.5))

    def _note(self, request: Request, fault: str) -> None:
        self.injected.append((request.round, request.client_id, fault))


def _raising(*arguments: Any) -> Any:
    raise ZeroDivisionError("a client's own arithmetic")


class Tampering(InProcessEngine):
    """An engine that answers honestly and then changes what comes back."""

    def __init__(self, change: Callable[[Request, Reply], Any], known: dict[Any, Reply] | None = None) -> None:
        self.change = change
        self.known = known  # honest replies of an earlier run of the same fit, which is not computed again

    def __call__(self, algorithm: Algorithm, clients: Mapping[str, Any]) -> Tampering:
        super().__init__(algorithm, clients, 1)
        return self

    def exchange(self, requests: Mapping[str, Request], deadline: float | None, *heard: Any) -> dict[str, Any]:
        known = {} if self.known is None else self.known
        new = {name: request for name, request in requests.items() if (request.round, name) not in known}
        known.update({(requests[name].round, name): r for name, r in super().exchange(new, deadline, *heard).items()})
        honest = {name: known[request.round, name]._replace(nonce=request.nonce) for name, request in requests.items()}
        return {client_id: self.change(requests[client_id], reply) for client_id, reply in honest.items()}


# --- the soak -------------------------------------------------------------------------------------------------

SOAK = Rates(request_lost=0.3, reply_lost=0.3, duplicated=0.05, altered=0.05, wiped=0.03)


class Soaked(NamedTuple):
    """What is left of a run under faults."""

    rounds: int
    counts: Counter[str]  # of injected faults
    ledger_gap: float  # largest over all rounds
    mean_gap: float  # against the run without faults, in its sds
    sd_gap: float  # largest |Δ log sd|
    damping: float  # in the last round with faults
    exchanges: int
    used: int
    seconds: float


def ledger_gap(state: Any) -> float:
    """Largest entry of q − prior − Σ sites, summed here from the ledger."""
    sites = state.sites
    linear = sites.q.linear - sites.prior.linear - sites.linear.sum(axis=0)
    precision = sites.q.precision - sites.prior.precision
    for row in sites.precision:
        one = structure.unpack_precision(row, sites.structure)
        precision = precision - (np.diag(one) if one.ndim == 1 else one)
    return float(max(np.abs(linear).max(), np.abs(precision).max()))


def soak(
    problem: Any,
    local: LocalInference,
    rounds: int,
    *,
    seed: int = 1,
    rates: Rates = SOAK,
    wrong: float = 0.0,
    calm: int = 0,
    tolerance: float = 1e-300,
) -> Soaked:
    """Run EP under faults for so many rounds, those of the warm start among them, then some without any.

    Compared with a run without faults until it converges. With a tolerance below rounding no run is ever converged.
    """
    model, clients = problem
    settings: dict[str, Any] = {"rounds": 200, "progressbar": False, "random_seed": seed}
    peace = fedppl.fit(model, clients, fedppl.EP(local=local, tolerance=1e-6), **settings)
    assert peace.status.ok, peace.message
    engine = Faulty(rates, seed, wrong)
    number, gap, used, exchanges, damping, started = 0, 0.0, 0, 0, np.nan, time.perf_counter()
    algorithm = fedppl.EP(local=local, tolerance=tolerance)
    for step in fedppl.rounds(model, clients, algorithm, engine=engine, random_seed=seed):
        number, gap = step.number, max(gap, ledger_gap(step.state))
        used, exchanges = used + len(step.record.infos), exchanges + len(step.record.asked)
        if number == rounds:
            engine.active, damping = False, step.info.damping
        if number == rounds + calm:
            break
    q, sd = step.state.sites.q, gaussian.standard_deviations(peace.posterior)
    return Soaked(
        rounds=number,
        counts=engine.counts,
        ledger_gap=gap,
        mean_gap=float(np.max(np.abs(gaussian.mean(q) - gaussian.mean(peace.posterior)) / sd)),
        sd_gap=float(np.max(np.abs(np.log(gaussian.standard_deviations(q) / sd)))),
        damping=damping,
        exchanges=exchanges,
        used=used,
        seconds=time.perf_counter() - started,
    )
