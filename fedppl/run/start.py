"""What is checked before a run begins, and a run that is ready to begin or to go on."""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import settings
from fedppl.contracts import (
    Algorithm,
    AnyAlgorithm,
    Disclosure,
    Engine,
    EngineFactory,
    LocalInference,
    Needs,
    Point,
    Posterior,
    Replies,
    Report,
    Result,
    Sampler,
)
from fedppl.data.tables import Table
from fedppl.engine.answer import require_fit, say_unused
from fedppl.engine.inprocess import InProcess, Threads
from fedppl.local.integrate import cores
from fedppl.local.many import moments, nodes_for, without_density
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.model.stack import ClientsOf, samples, stacked, why_not
from fedppl.model.summaries import tells_summary
from fedppl.numerics.streams import stream
from fedppl.results import diagnostics
from fedppl.results.fit import Fit
from fedppl.results.records import COLUMNS, Record
from fedppl.run.participation import Participation, as_participation
from fedppl.run.progress import Progress
from fedppl.settings import not_called, shown, takes
from fedppl.storage import checkpoint as checkpoints
from fedppl.storage import codec as _digest
from fedppl.storage.signed import pack
from fedppl.types import Array, DataError, DeclarationError, Layout, Message, Status

# Data by client, rows of one table, or none where an engine finds clients elsewhere.
Clients = Mapping[str, Mapping[str, Any]] | Table | None


def start(model: FederatedModel, clients: Clients, algorithm: AnyAlgorithm | Choice, options: Options) -> Run:
    """Check everything that can be checked before work begins, and resume if there is something to resume."""
    limit, engine, participation, reporting, checkpoint, deadline, random_seed, begin = options
    if isinstance(algorithm, Choice) and algorithm.why_not:
        algorithm = decided(algorithm, {})
    first = algorithm.first if isinstance(algorithm, Choice) else algorithm
    require_declared(model, first)
    count = len(clients.client_ids) if isinstance(clients, Table) else None
    count = len(clients) if isinstance(clients, Mapping) else count
    require_settings(limit, participation, reporting, checkpoint, deadline, count)
    if begin is not None:
        _require_start(begin, first)
    if engine is not None and (not callable(engine) or settings.not_called(engine)):
        raise DeclarationError(
            f"engine={settings.shown(engine)} is no engine"
            + (settings.not_called(engine) or "; pass one that is built, like fedppl.InProcess().")
        )
    if checkpoint is not None:
        checkpoints.require_writable(checkpoint)
    seed = seed_of(random_seed)
    models: Mapping[str, ClientModel] = {}
    if isinstance(clients, Table):
        models = enrolled(model, clients, np.random.default_rng((seed, 0)))
    elif clients is not None:
        models = model.enrol(clients, kernel=first.needs.kernel)
    if isinstance(algorithm, Choice):
        algorithm = decided(algorithm, models)
        if algorithm is not first:
            models = dict(models)  # those that are asked one by one are made once
    for client in samples(models):
        require_fit(algorithm, client)
    if models:
        say_unused(algorithm, next(iter(samples(models))))
    moving = (engine or InProcess())(algorithm, models)
    if not callable(getattr(moving, "exchange", None)):
        raise DeclarationError(
            f"engine={settings.shown(engine)} gave {settings.shown(moving)}, which cannot exchange messages; pass one "
            "that is built, like fedppl.InProcess()."
        )
    try:
        run = Run(algorithm, moving, models, seed)
        if (found := tuple(variable.name for variable in run.layout.variables)) != model.shared:
            raise DeclarationError(
                f"the sites share {list(found)}, this model shares {list(model.shared)}; run the same declaration at "
                "the sites and at the server."
            )
        if begin is not None:
            _take_over(run, begin)
        run.limit, run.deadline = limit, deadline
        run.participation = as_participation(participation, clients=len(run.clients))
        run.reporting = as_participation(reporting, "reporting", len(run.clients))
        asking = {"participation": participation, "reporting": reporting}
        run.settings |= {name: settings.named(value) for name, value in asking.items()}
        if checkpoint is not None:
            keep_at(run, Path(checkpoint), seed_given=random_seed is not None)
    except BaseException:
        moving.close()
        raise
    return run


def _require_start(begin: Any, algorithm: AnyAlgorithm) -> None:
    """Refuse to begin from what is no fit, from a fit by another algorithm, and where nothing can be taken over."""
    if not isinstance(begin, Fit):
        raise DeclarationError(f"start={settings.shown(begin)} must be a fit, or None.")
    if algorithm.result.resume is None:
        raise DeclarationError(
            f"{algorithm.name} begins anew each time; leave start= out. For more rounds on the same data, pass "
            "checkpoint= from the first call on."
        )
    if begin.algorithm.name != algorithm.name:
        raise DeclarationError(f"start= is a fit by {begin.algorithm.name}, and this one is by {algorithm.name}.")


def _take_over(run: Run, begin: Fit) -> None:
    """Begin with what another fit of the same declaration knows."""
    assert run.algorithm.result.resume is not None
    if run.layout.fingerprint != begin.layout.fingerprint:
        raise DeclarationError(
            f"start= is a fit that shares {[v.name for v in begin.layout.variables]}, and this one "
            f"{[v.name for v in run.layout.variables]}, or the same with another prior or shape; start from a fit of "
            "the same declaration."
        )
    run.state = run.algorithm.result.resume(run.state, begin.state)


def require_declared(model: Any, algorithm: Any) -> None:
    """Refuse what is no declaration, and what is no algorithm that is built."""
    if not isinstance(model, FederatedModel):
        remedy = "wrap the builder: FederatedModel(builder, shared=[...])"
        if isinstance(getattr(model, "model", None), FederatedModel):
            remedy = "pass its .model"
        elif isinstance(model, str) and "~" in model:
            remedy = f"declare it: fedppl.formula({model!r})"
        elif isinstance(model, Mapping):
            remedy = "the model comes first, then the data: fedppl.fit(model, data)"
        raise DeclarationError(f"model is {type(model).__name__}; {remedy}.")
    require_algorithm(algorithm)


def require_settings(
    limit: Any, participation: Any, reporting: Any, checkpoint: Any, deadline: Any, count: int | None = None
) -> None:
    """Refuse settings of a run that cannot be meant, for so many clients where that is known; no file is touched."""
    if limit is not None:
        settings.whole("rounds", limit)
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise DeclarationError(f"checkpoint={settings.shown(checkpoint)} must be the path of a file.")
    as_participation(participation, clients=count), as_participation(reporting, "reporting", count)
    if deadline is not None:
        settings.positive("deadline", deadline, "it is in seconds; None waits for ever")


def require_callback(callback: Any) -> None:
    """Refuse a callback that is no function of one round."""
    if callback is not None and not (callable(callback) and settings.takes(callback, 1)):
        raise DeclarationError(f"callback={settings.shown(callback)} is not a function of one Round; pass one that is.")


def seed_of(random_seed: int | np.random.Generator | None) -> int:
    """The number that all random streams of a run begin with."""
    if random_seed is None:
        return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    if isinstance(random_seed, np.random.Generator):
        return int(random_seed.integers(2**63))
    if isinstance(random_seed, int | np.integer) and not isinstance(random_seed, bool) and random_seed >= 0:
        return int(random_seed)
    raise DeclarationError(f"random_seed={random_seed!r} must be a non-negative int, a Generator or None.")


# What is checked of an algorithm before a run begins, and of what its functions return --------------------------------

_TUPLES = {"replies": Replies, "result": Result, "needs": Needs, "disclosure": Disclosure}
# Numbers of arguments.
_FUNCTIONS = {
    Algorithm: {"init": 3, "broadcast": 2, "update_client": 4, "update_server": 2},
    Replies: {"shapes": 1, "reject": 2, "summed": 1},
    Result: {"final_message": 2, "draw": 6, "details": 1, "preliminary": 1, "closing": 1, "out_of_rounds": 1},
    Needs: {"check": 1, "unused_priors": 1},
    Disclosure: {"at_sites": 1, "unseen": 2},
    Posterior: {"gaussian": 1, "corrected": 1, "evidence": 2},
    Point: {"estimate": 1},
    Sampler: {"draw": 3},
}
_OPTIONAL = {
    Algorithm: {"unreported": 4},
    Result: {"resume": 2},
    Disclosure: {"asks": 2, "concludes": 2},
    Posterior: {"without": 3},
}


def require_algorithm(algorithm: Any) -> None:
    """Refuse what is no algorithm that is built, and one whose parts cannot be called as they will be."""
    if not isinstance(algorithm, Algorithm):
        remedy = not_called(algorithm) or "; pass one that is built, like fedppl.EP()."
        if isinstance(algorithm, LocalInference):
            remedy = " but how clients compute; pass fedppl.EP(local=...)."
        raise DeclarationError(f"algorithm={shown(algorithm)} is no algorithm{remedy}")
    if not isinstance(algorithm.name, str) or not algorithm.name:
        raise DeclarationError(f"an algorithm's name is {shown(algorithm.name)}; give it a text that is not empty.")
    name, settings = algorithm.name, algorithm.settings
    if not isinstance(settings, Mapping) or not all(
        isinstance(text, str) for pair in settings.items() for text in pair
    ):
        raise DeclarationError(
            f"{name}: settings={shown(settings)} must be texts by name; see fedppl.settings.described."
        )
    for field, kind in _TUPLES.items():
        if not isinstance(value := getattr(algorithm, field), kind):
            raise DeclarationError(f"{name}: {field}={shown(value)} must be a fedppl.contracts.{kind.__name__}.")
    shared = algorithm.result.shared
    if shared is not None and not isinstance(shared, Posterior | Point | Sampler):
        raise DeclarationError(
            f"{name}: result.shared={shown(shared)} must be a Posterior, Point or Sampler of fedppl.contracts, or None."
        )
    for part in (algorithm, *(getattr(algorithm, field) for field in _TUPLES), *([shared] if shared else [])):
        _require_functions(name, part)
    noise = algorithm.disclosure.noise_multiplier
    if noise is not None and not (isinstance(noise, int | float) and 0 < noise < np.inf):
        raise DeclarationError(
            f"{name}: disclosure.noise_multiplier={shown(noise)} must be positive, or None where ε is unknown."
        )


def _require_functions(name: str, part: Any) -> None:
    kind = type(part)
    optional = {field: count for field, count in _OPTIONAL.get(kind, {}).items() if getattr(part, field) is not None}
    for field, count in {**_FUNCTIONS[kind], **optional}.items():
        function = getattr(part, field)
        where = field if kind is Algorithm else f"{kind.__name__}.{field}"
        if not callable(function):
            raise DeclarationError(f"{name}: {where}={shown(function)} must be a function.")
        if not takes(function, count):
            raise DeclarationError(
                f"{name}: {where} is called with {count} arguments and cannot be; see fedppl.contracts.{kind.__name__}."
            )


def require_report(name: str, returned: Any) -> None:
    """Refuse what is not (state, Report), before it is kept in a record that cannot be read in the end."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Report):
        raise DeclarationError(f"{name}: update_server returned {shown(returned)}; return (state, Report).")
    report = returned[1]
    if not isinstance(report.info, tuple) or not hasattr(report.info, "_asdict"):
        raise DeclarationError(f"{name}: Report.info is {type(report.info).__name__}; make it a NamedTuple.")
    if not isinstance(report.status, Status):
        raise DeclarationError(f"{name}: Report.status is {shown(report.status)}; make it a fedppl.Status.")
    if report.message is not None and not isinstance(report.message, str):
        raise DeclarationError(f"{name}: Report.message is {shown(report.message)}; make it a text, or None.")
    if taken := COLUMNS & report.info._asdict().keys():
        raise DeclarationError(
            f"{name}: Report.info has {sorted(taken)}, which the table of rounds has of its own; choose other names."
        )


def numbers_and_texts(info: Any) -> dict[str, float | str]:
    """What of a round's diagnostics goes into the table: numbers and texts, NumPy's among them."""
    found = {
        name: value.item() if isinstance(value, np.generic | np.ndarray) and not np.ndim(value) else value
        for name, value in info._asdict().items()
    }
    return {name: value for name, value in found.items() if isinstance(value, int | float | str)}


# A run in progress: what it holds, how it is saved after a round, and how it goes on from what was saved --------------

logger = logging.getLogger(__name__)


class Run:
    """A run in progress; the only mutable thing in a fit."""

    @property
    def message(self) -> str:
        """What the algorithm said last of how it stands."""
        return self.records[-1].message if self.records else ""

    def __init__(self, algorithm: AnyAlgorithm, engine: Engine, models: Mapping[str, ClientModel], seed: int) -> None:
        self.algorithm = algorithm
        self.engine = engine
        self.models = models
        self.seed = seed
        self.layout: Layout = engine.layout()
        self.clients = engine.clients()
        self.state = algorithm.init(self.layout, self.clients, stream((seed, 0, 0)))
        if engine.has_sites():
            self.state = algorithm.disclosure.at_sites(self.state)
        summaries = [one.client_id for one in samples(models) if tells_summary(one.template.parts.model)]
        if unseen := self.clients if engine.has_sites() else summaries:
            self.state = algorithm.disclosure.unseen(self.state, unseen)
        self.name = secrets.token_hex(8)
        self.records: list[Record] = []
        self.counted = 0  # records that count towards ``rounds=``
        self.infos: dict[str, Mapping[str, float]] = {}  # the last of every client
        self.personal: Mapping[str, Any] = {}  # what clients in this process kept after the last round
        self.progress = Progress()
        self.saves = True  # until rounds have run out
        self.resumed = 0  # rounds that were done before
        self.limit: int | None = None
        self.participation: Participation = as_participation(None)
        self.reporting: Participation = as_participation(None)
        self.checkpoint: Path | None = None
        self.kept: checkpoints.Kept | None = None  # records that the checkpoint has
        self.settings: dict[str, str] = dict(algorithm.settings)
        self.seals: dict[str, bytes] = {}  # of the data of clients in this process, where there is a checkpoint
        self.deadline: float | None = None
        self.told: Mapping[str, Message] = {}  # what sites let out of their rows when it was over
        self.said: set[tuple[str, str]] = set()  # clients and reasons that are in the log already


def add(run: Run, done: Record) -> None:
    """Add a round; what the next one asks of all before it is kept up to date, not looked up."""
    run.records.append(done)
    run.counted += not done.preliminary
    run.infos = diagnostics.updated(run.infos, done.infos, closing=done.closing)


def keep_at(run: Run, checkpoint: Path, *, seed_given: bool) -> None:
    """Save the run there from now on, and go on from what is there."""
    run.checkpoint = checkpoint
    run.seals = {
        k: _digest.seal(one.arrays) + _digest.seal({"": one.client.trace()}) for k, one in _parts(run.models).items()
    }
    if checkpoint.exists():
        _resume(run, checkpoint, seed_given)
    pack({**_content(run), "records": []})  # what cannot be written is refused before the first round


class _Part(NamedTuple):
    """Data that are sealed as one, and a client of them."""

    arrays: Mapping[str, Any]
    client: ClientModel


def _parts(models: Mapping[str, ClientModel]) -> dict[str, _Part]:
    """Data of each client, or under no name rows of all, where they lie side by side."""
    if isinstance(models, ClientsOf):
        return {"": _Part(models.arrays(), models.like)}
    return {client_id: _Part(client.arrays, client) for client_id, client in models.items()}


def save(run: Run) -> None:
    """Write the run as it is after a round, if it is to be saved."""
    if run.checkpoint is None or not run.saves:
        return
    done = len(run.records)
    try:
        run.kept = checkpoints.write(run.checkpoint, _content(run), run.kept, resumed=run.resumed == done - 1)
    except OSError as error:
        kept = f"it holds round {done - 1}, and the same call goes on from there. " if done > 1 else ""
        raise OSError(
            f"checkpoint {str(run.checkpoint)!r} cannot be written after round {done}: {error.strerror or error}; "
            f"{kept}Make room, or choose another path."
        ) from error


def _content(run: Run) -> dict[str, Any]:
    return {
        "fingerprint": run.layout.fingerprint,
        "algorithm": run.algorithm.name,
        "settings": run.settings,
        "clients": run.clients,
        "data": run.seals,
        "seed": run.seed,
        "name": run.name,
        "state": run.state,
        "records": run.records,
        "personal": run.personal,
        "told": run.told,
    }


def _differing(name: str, its: Any, ours: Any) -> str:
    """What another run has otherwise: of settings those that differ, as they are written in a call."""
    if not isinstance(its, dict) or not isinstance(ours, dict):
        return f"its {name} is {its}, this run's is {ours}"
    names = [key for key in {**its, **ours} if its.get(key) != ours.get(key)]
    said = [", ".join(f"{key}={of[key]}" for key in names if key in of) or "none of these" for of in (its, ours)]
    return f"it has {said[0]}, and this run {said[1]}"


def _resume(run: Run, checkpoint: Path, seed_given: bool) -> None:
    content, kept = checkpoints.load(checkpoint)
    if not all(isinstance(done, Record) for done in content["records"]):
        raise DeclarationError(f"checkpoint {str(checkpoint)!r} holds something else; choose another path.")
    expected: dict[str, Any] = {
        "fingerprint": run.layout.fingerprint,
        "algorithm": run.algorithm.name,
        "settings": run.settings,
        "clients": run.clients,
    }
    if seed_given:
        expected["seed"] = run.seed
    for name, value in expected.items():
        if content[name] != value:
            raise DeclarationError(
                f"checkpoint {str(checkpoint)!r} is of another run: {_differing(name, content[name], value)}. Choose "
                "another path, or delete the file to start again."
            )
    if type(content["state"]) is not type(run.state):
        raise DeclarationError(
            f"checkpoint {str(checkpoint)!r} is of another algorithm of the name {run.algorithm.name!r}: its state is "
            f"{type(content['state']).__name__}, this run's is {type(run.state).__name__}. Choose another path."
        )
    sealed: dict[str, bytes] = content["data"]
    known = {client_id: part for client_id, part in _parts(run.models).items() if client_id in sealed}
    others = [k for k, part in known.items() if not _digest.matches(sealed[k][: _digest.LENGTH], part.arrays)]
    if others:
        whose = "some clients" if others == [""] else f"clients {diagnostics.listed(map(repr, others))}"
        whose = f"client {others[0]!r}" if len(others) == 1 and others[0] else whose
        raise DataError(
            f"the data of {whose} are not "
            f"those that checkpoint {str(checkpoint)!r} was written with. Give the same data, or choose another "
            "path, or delete the file to start again."
        )
    for name, (_, client) in known.items():
        if not _digest.matches(sealed[name][_digest.LENGTH :], {"": client.trace()}):
            raise DeclarationError(
                f"checkpoint {str(checkpoint)!r} is of another run: client {client.client_id!r} has the same data, and "
                "the model another density of them: the builder, or what it reads, has changed. Choose another path or "
                "delete the file to start again."
            )
    run.seals = {**run.seals, **sealed}
    run.seed, run.name = content["seed"], content["name"]
    run.state, run.kept, run.told = content["state"], kept, content["told"]
    for done in content["records"]:
        add(run, done)
    run.resumed = len(run.records)
    run.engine.restore(content["personal"])
    run.personal = run.engine.personal()
    logger.info("resumed after round %d from %s", len(run.records), checkpoint)


# Clients of one table as one stack: few of them are enrolled, with every check and refusal, and serve all -------------

_ENROLLED = 128  # clients, chosen at random: what one in fifty differs by is seen in .92 of all runs
_JUDGED_BY = 4  # clients that tell whether there is a way to integrate what is their own
_MANY = 20_000  # clients that take hours where each is enrolled


def enrolled(model: FederatedModel, table: Table, rng: np.random.Generator) -> Mapping[str, ClientModel]:
    """Clients by id; where they can be no stack, which the log tells, each is enrolled.

    Raises
    ------
    DeclarationError, DataError
        As for clients that are enrolled one by one.
    """
    counts = table.counts
    chosen = rng.choice(len(counts), min(_ENROLLED, len(counts)), replace=False)
    # Numbers of rows tell which lengths follow them.
    places = np.unique([*chosen, np.argmin(counts), np.argmax(counts)])
    clients = list(model.enrol(_data(table, places)).values())
    reason = why_not(clients)
    if not reason and nodes_for(clients[:_JUDGED_BY]) is None:
        reason = "several local variables depend on each other"
    if reason:
        level = logging.WARNING if len(counts) > _MANY else logging.INFO
        logger.log(level, "%d clients are enrolled one by one: %s", len(counts), reason)
        return model.enrol(table.each())
    stack = stacked(model, table, clients[0])
    phi = np.ascontiguousarray(clients[0].template.functions["shared start"])
    for k in without_density(stack, phi, cores())[:1]:
        model.enrol(_data(table, np.array([k])))  # who enrols it alone says what is wrong with it
    return ClientsOf(stack, functools.partial(moments, workers=cores()))


def _data(table: Table, places: NDArray[np.int64]) -> dict[str, dict[str, Array]]:
    return {table.client_ids[k]: table.rows(int(k)) for k in places}


# Which algorithm a fit has that names none: the call and the declaration decide, once, before the first round ---------

MOST_SHARED = 20  # coordinates: of more, few points of a proposal have all the weight


class Options(NamedTuple):
    """Settings of a run, as `fedppl.fit` has them."""

    rounds: int | None = 20
    engine: EngineFactory | None = None
    participation: Participation | int | float | None = None
    reporting: Participation | int | float | None = None
    checkpoint: str | Path | None = None
    deadline: float | None = None
    random_seed: int | np.random.Generator | None = None
    start: Fit | None = None


class Choice(NamedTuple):
    """Two algorithms of which clients' models decide, unless the call has said already why not the first."""

    first: AnyAlgorithm
    other: AnyAlgorithm
    why_not: str


def by_call(first: AnyAlgorithm, other: AnyAlgorithm, data: Any, options: Options) -> Choice:
    """What is known before clients are: `first` needs all of them, here, and nothing that single replies tell."""
    given = [name for name in ("participation", "reporting", "deadline") if getattr(options, name) is not None]
    reason, begin = "", options.start
    if data is None or not is_here(options.engine):
        reason = "clients are not in this process, or have a policy"
    elif given:
        reason = f"with {' and '.join(f'{name}=' for name in given)} not all clients may answer in a round"
    elif begin is not None and not (isinstance(begin, Fit) and begin.algorithm.name == first.name):
        reason = "start= is not a fit by it"
    return Choice(first, other, reason)


def is_here(engine: Any) -> bool:
    """Whether clients are in this process, with nothing to refuse."""
    return engine is None or (isinstance(engine, Threads) and engine.policy is None)


def lies_side_by_side(algorithm: Any, engine: Any) -> bool:
    """Whether an algorithm can lay clients side by side where they are."""
    batch = getattr(algorithm, "batch", None)
    return is_here(engine) and batch is not None and batch.stacks is not None


def decided(choice: Choice, models: Mapping[str, ClientModel]) -> AnyAlgorithm:
    """The algorithm, with the reason in the log."""
    reason = choice.why_not or _why_not(choice.first, models)
    if reason:
        logger.info("the fit is by %s, not by %s: %s", choice.other.name, choice.first.name, reason)
        return choice.other
    logger.info("the fit is by %s: few coordinates are shared, and densities are smooth", choice.first.name)
    return choice.first


def _why_not(algorithm: AnyAlgorithm, models: Mapping[str, ClientModel]) -> str:
    local = NestedLaplace()
    for client in samples(models):
        if client.layout.size > MOST_SHARED:
            return f"{client.layout.size} coordinates are shared, and it is for {MOST_SHARED} at most"
        try:
            require_fit(algorithm, client)
            local.check(client)
        except DeclarationError as error:
            return str(error)
    return ""
