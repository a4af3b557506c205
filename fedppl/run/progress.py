"""A run in progress: its display in a bar and in the log, and its state, which is saved after each round."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedppl.contracts import AnyAlgorithm, Engine
from fedppl.contracts.printed import DIAGNOSTICS
from fedppl.model.client import ClientModel
from fedppl.model.stack import ClientsOf, samples
from fedppl.model.summaries import tells_summary
from fedppl.numerics.streams import stream
from fedppl.results import diagnostics
from fedppl.results.records import Record
from fedppl.storage import checkpoint as checkpoints
from fedppl.storage import codec
from fedppl.storage.signed import pack
from fedppl.types import DataError, DeclarationError, Layout, Message

logger = logging.getLogger(__name__)

EVERY = 15.0  # seconds after which the log has another line, during a round


class Progress:
    """Progress of a run, and of the clients in its round: a bar by rich, and the log at level INFO."""

    def __init__(self, total: int | None = None, *, show: bool = False, what: str = "Round") -> None:
        self._total, self._show, self._what = total or 0, show, what
        self._bar: Any = None  # where there is a terminal or a notebook
        self._note, self._activity = "", ""  # of the last round, and now
        self._since = self._last_line = time.monotonic()
        self._number, self._asked, self._answered = 0, 0, 0
        self._over = threading.Event()

    def __enter__(self) -> Progress:
        if self._show:
            self._start()
        if logger.isEnabledFor(logging.INFO):
            threading.Thread(target=self._pulse, daemon=True, name="fedppl progress").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()

    def say(self, activity: str) -> None:
        """Show an activity before or after the rounds."""
        logger.info("%s", activity)
        self._begin(activity)
        self._draw(note=activity)

    def asked(self, number: int, clients: int) -> None:
        """Begin a round in which so many clients are asked."""
        self._number, self._asked, self._answered = number, clients, 0
        self._begin(f"round {number}: 0 of {clients} clients have answered")
        self._draw_round("")

    def heard(self, client_id: str, /, *, clients: int = 1) -> None:
        """Count a client that has answered or failed, the last of so many at once."""
        self._answered += clients
        answered = f"{self._answered} of {self._asked} clients"
        self._activity = f"round {self._number}: {answered} have answered, last {client_id}"
        self._draw_round(f" (last {client_id})")

    def update(self, completed: int, note: str) -> None:
        """End a round; `completed` is the number of rounds that count."""
        self._note = note
        self._begin("")
        self._draw(completed=completed, note=note)

    def _start(self) -> None:
        import rich  # a tenth of what importing all of fedppl takes
        from rich import progress

        console = rich.get_console()
        if not (console.is_interactive or console.is_jupyter):
            return
        columns = (progress.BarColumn(), progress.MofNCompleteColumn())
        times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
        note = progress.TextColumn("{task.fields[note]}", markup=False)
        self._bar = progress.Progress(progress.TextColumn(self._what), *columns, *times, note, console=console)
        self._bar.add_task("", total=self._total, note="")
        self._bar.start()

    def _draw(self, **fields: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], **fields)

    def _draw_round(self, last: str) -> None:
        before = f"{self._note}; " if self._note else ""
        self._draw(note=f"{before}{self._answered} of {self._asked} clients{last}")

    def _begin(self, activity: str) -> None:
        self._activity = activity
        self._since = self._last_line = time.monotonic()

    def _pulse(self) -> None:
        """Log a line at times during a round, also while no client answers."""
        while not self._over.wait(EVERY / 3):
            now = time.monotonic()
            if self._activity and now - self._last_line >= EVERY:
                self._last_line = now
                extra = {"round": self._number, "answered": self._answered, "asked": self._asked}
                logger.info("%s, %.1f s", self._activity, now - self._since, extra=extra)


def standing(record: Record, infos: Mapping[str, Mapping[str, float]], tolerance: float | None) -> str:
    """A round in words: phase, largest change, and the numbers of clients that were skipped and that fell back."""
    notes = [str(record.info["phase"])] if "phase" in record.info else []
    units = {name: one.unit for name, one in DIAGNOSTICS.items() if one.unit is not None}
    changes = {name: value for name in units if isinstance(value := record.info.get(name), int | float)}
    if finite := {name: value for name, value in changes.items() if np.isfinite(value)}:
        largest = max(finite, key=lambda name: finite[name])
        bound = f" (tolerance {tolerance:g})" if tolerance is not None and not record.preliminary else ""
        notes.append(f"change {finite[largest]:.2g}{units[largest]}{bound}")
    notes += [f"{len(record.failures)} skipped"] if record.failures else []
    return ", ".join([*notes, *filter(None, [diagnostics.fallback_note(infos)])])


# A run: its state, saved after each round, and resumed ----------------------------------------------------------------

Participation = Callable[[Sequence[str], np.random.Generator], tuple[str, ...]]


class Run:
    """A run in progress; the only mutable part of a fit."""

    def __init__(
        self, algorithm: AnyAlgorithm, engine: Engine, models: Mapping[str, ClientModel], seed: int, name: str = ""
    ) -> None:
        self.algorithm = algorithm
        self.engine = engine
        self.models = models
        self.seed = seed
        self.layout: Layout = engine.layout()
        self.clients = engine.clients()
        self.state = algorithm.init(self.layout, self.clients, stream((seed, 0, 0)))
        if engine.has_sites():
            self.state = algorithm.disclosure.at_sites(self.state)
        summaries = [client.client_id for client in samples(models) if tells_summary(client.template.parts.model)]
        if unseen := self.clients if engine.has_sites() else summaries:
            self.state = algorithm.disclosure.unseen(self.state, unseen)
        self.name = name or secrets.token_hex(8)
        self.records: list[Record] = []
        self.counted = 0  # records that count towards ``rounds=``
        self.infos: dict[str, Mapping[str, float]] = {}  # each client's last diagnostics
        self.personal: Mapping[str, Any] = {}  # states of clients in this process after the last round
        self.progress = Progress()
        self.resumed = 0  # rounds from the checkpoint
        self.limit: int | None = None
        self.participation: Participation  # both are set before the first round
        self.reporting: Participation
        self.checkpoint: Path | None = None
        self.kept: checkpoints.Kept | None = None  # records that the checkpoint has
        self.settings: dict[str, str] = dict(algorithm.settings)
        self.seals: dict[str, bytes] = {}  # of the data of clients in this process, where there is a checkpoint
        self.deadline: float | None = None
        self.told: Mapping[str, Message] = {}  # what sites sent at the end
        self.logged: set[tuple[str, str]] = set()  # clients and reasons that are in the log

    @property
    def message(self) -> str:
        """The algorithm's last message on its progress."""
        return self.records[-1].message if self.records else ""


def add(run: Run, done: Record) -> None:
    """Add a round, and update what the next one needs of all rounds."""
    run.records.append(done)
    run.counted += not done.preliminary
    run.infos = {**run.infos, **done.infos}


def keep_at(run: Run, checkpoint: Path, *, seed_given: bool) -> None:
    """Resume the run from a checkpoint that exists, and save it there from now on."""
    run.checkpoint = checkpoint
    for name, (arrays, client) in _parts(run.models).items():
        run.seals[name] = codec.seal(arrays) + codec.seal({"": client.trace()})
    if checkpoint.exists():
        _resume(run, checkpoint, seed_given)
    pack({**_content(run), "records": []})  # a state that cannot be written is refused before the first round


def _parts(models: Mapping[str, ClientModel]) -> dict[str, tuple[Mapping[str, Any], ClientModel]]:
    """Data with one seal each, and a client of them; under an empty name all rows, where clients are side by side."""
    if isinstance(models, ClientsOf):
        return {"": (models.arrays(), models.like)}
    return {client_id: (client.arrays, client) for client_id, client in models.items()}


def save(run: Run) -> None:
    """Write the run after a round, if it has a checkpoint."""
    if run.checkpoint is None:
        return
    done = len(run.records)
    try:
        run.kept = checkpoints.write(run.checkpoint, _content(run), run.kept, resumed=run.resumed == done - 1)
    except OSError as error:
        kept = f"it holds round {done - 1}, and the same call goes on from there. " if done > 1 else ""
        what = f"{str(run.checkpoint)!r} cannot be written after round {done}: {error.strerror or error}"
        raise OSError(f"checkpoint {what}; {kept}Make room, or choose another path.") from error


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
    """The difference to another run: of settings those that differ, as in a call."""
    if not isinstance(its, dict) or not isinstance(ours, dict):
        return f"its {name} is {its}, this run's is {ours}"
    names = [key for key in {**its, **ours} if its.get(key) != ours.get(key)]
    texts = [", ".join(f"{key}={of[key]}" for key in names if key in of) or "none of these" for of in (its, ours)]
    return f"it has {texts[0]}, and this run {texts[1]}"


def _of_another_run(checkpoint: Path, difference: str) -> DeclarationError:
    remedy = "Choose another path, or delete the file to start again."
    return DeclarationError(f"checkpoint {str(checkpoint)!r} is of another run: {difference}. {remedy}")


def _resume(run: Run, checkpoint: Path, seed_given: bool) -> None:
    content, kept = checkpoints.load(checkpoint)
    if not all(isinstance(done, Record) for done in content["records"]):
        raise DeclarationError(f"checkpoint {str(checkpoint)!r} holds something else; choose another path.")
    ours = _content(run)
    for name in ("fingerprint", "algorithm", "settings", "clients", *(["seed"] if seed_given else [])):
        if content[name] != ours[name]:
            raise _of_another_run(checkpoint, _differing(name, content[name], ours[name]))
    if (its := type(content["state"])) is not type(run.state):
        raise _of_another_run(checkpoint, _differing("state", its.__name__, type(run.state).__name__))
    _require_same_data(run, checkpoint, content["data"])
    run.seals = {**run.seals, **content["data"]}
    run.seed, run.name = content["seed"], content["name"]
    run.state, run.kept, run.told = content["state"], kept, content["told"]
    for done in content["records"]:
        add(run, done)
    run.resumed = len(run.records)
    run.engine.restore(content["personal"])
    run.personal = run.engine.personal()
    logger.info("resumed after round %d from %s", len(run.records), checkpoint)


def _require_same_data(run: Run, checkpoint: Path, seals: Mapping[str, bytes]) -> None:
    """Refuse clients whose data or densities are not those of the checkpoint."""
    sealed = {client_id: part for client_id, part in _parts(run.models).items() if client_id in seals}
    others = [k for k, (arrays, _) in sealed.items() if not codec.matches(seals[k][: codec.LENGTH], arrays)]
    if others:
        whose = "some clients" if others == [""] else f"clients {diagnostics.listed(map(repr, others))}"
        whose = f"client {others[0]!r}" if len(others) == 1 and others[0] else whose
        remedy = "Give the same data, or choose another path."
        what = f"those that checkpoint {str(checkpoint)!r} was written with"
        raise DataError(f"the data of {whose} are not {what}. {remedy}")
    for name, (_, client) in sealed.items():
        if not codec.matches(seals[name][codec.LENGTH :], {"": client.trace()}):
            reason = f"the density of client {client.client_id!r} has changed for the same data"
            raise _of_another_run(checkpoint, f"{reason}, by the builder or what it reads")
