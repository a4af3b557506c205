"""A run in progress: what it holds, how it is saved after a round, and how it goes on from what was saved."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedppl.contracts import AnyAlgorithm, Engine
from fedppl.model.client import ClientModel
from fedppl.model.stack import ClientsOf, samples
from fedppl.model.summary import tells_summary
from fedppl.numerics.streams import stream
from fedppl.results import fallbacks
from fedppl.results.records import Record
from fedppl.run.participation import Participation, as_participation
from fedppl.run.progress import Progress
from fedppl.storage import checkpoint as checkpoints
from fedppl.storage import digest as _digest
from fedppl.storage.signed import pack
from fedppl.types import DataError, DeclarationError, Layout, Message

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
    run.infos = fallbacks.added(run.infos, done.infos, closing=done.closing)


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
        whose = "some clients" if others == [""] else f"clients {fallbacks.listed(map(repr, others))}"
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
