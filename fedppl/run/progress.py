"""What is going on now, where somebody looks: in a bar, and in the log, a line every so often."""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.results import diagnostics
from fedppl.results.records import Record

logger = logging.getLogger(__name__)

EVERY = 15.0  # seconds without a line in the log after which there is one, while something goes on


class Progress:
    """How far a run is, and which clients have answered in its round.

    Of a total of rounds, or of what is counted by this name. Where there is a terminal or a notebook it can be shown;
    the log, at level INFO, has it in any case.
    """

    def __init__(self, total: int | None = None, *, show: bool = False, what: str = "Round") -> None:
        self._total, self._show, self._what = total or 0, show, what
        self._display: Any = Nowhere()
        self._completed, self._note = 0.0, ""
        self._now = ""  # what lasts
        self._since = self._last_line = time.monotonic()
        self._number, self._asked, self._answered = 0, 0, 0
        self._over = threading.Event()

    def __enter__(self) -> Progress:
        self._display = display(self._total, self._what, wanted=self._show)
        if logger.isEnabledFor(logging.INFO):
            threading.Thread(target=self._pulse, daemon=True, name="fedppl progress").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._display.stop()

    def say(self, what: str) -> None:
        """Say what is going on now, before or after the rounds."""
        logger.info("%s", what)
        self._begin(what)
        self._display.show(self._completed, what)

    def asked(self, number: int, clients: int) -> None:
        """Say that a round has begun, in which so many clients are asked."""
        self._number, self._asked, self._answered = number, clients, 0
        self._begin(f"round {number}: 0 of {clients} clients have answered")
        self._show_round("")

    def heard(self, client_id: str, /, *, clients: int = 1) -> None:
        """Say that a client has answered, or has failed to, the last of so many at once."""
        self._answered += clients
        self._now = f"round {self._number}: {self._answered} of {self._asked} clients have answered, last {client_id}"
        self._show_round(f" (last {client_id})")
        self._log_at_times()

    def update(self, completed: int, note: str) -> None:
        """Say that a round is done; `completed` are those that count."""
        self._completed, self._note = completed, note
        self._begin("")
        self._display.show(completed, note)

    def _show_round(self, last: str) -> None:
        note = f"{self._note}; " if self._note else ""
        self._display.show(self._completed, f"{note}{self._answered} of {self._asked} clients{last}")

    def _begin(self, what: str) -> None:
        self._now = what
        self._since = self._last_line = time.monotonic()

    def _log_at_times(self) -> None:
        now = time.monotonic()
        if self._now and now - self._last_line >= EVERY:
            self._last_line = now
            extra = {"round": self._number, "answered": self._answered, "asked": self._asked}
            logger.info("%s, %s", self._now, spelled(now - self._since), extra=extra)

    def _pulse(self) -> None:
        """Also where no client answers for a long time."""
        while not self._over.wait(EVERY / 3):
            self._log_at_times()


_WIDTH = 20  # of a notebook's bar, in characters
_PAUSE = 0.2  # seconds between two messages to a notebook


class Nowhere:
    """No terminal and no notebook, or nothing wanted."""

    def show(self, completed: float, note: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class Bar:
    """A bar of rich's in a terminal."""

    def __init__(self, console: Any, total: int, what: str) -> None:
        from rich import progress  # a tenth of what importing all of fedppl takes

        self._bar = progress.Progress(
            progress.TextColumn(what),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self._task = self._bar.add_task("", total=total, note="")
        self._bar.start()

    def show(self, completed: float, note: str) -> None:
        """Show what is done, of the total, and a note."""
        self._bar.update(self._task, completed=completed, note=note)

    def stop(self) -> None:
        """Leave the last state there."""
        self._bar.stop()


class Cell:
    """A line of text below a notebook's cell; it needs no widgets."""

    def __init__(self, total: int, what: str) -> None:
        self._display: Any = importlib.import_module("IPython.display").display
        self._total, self._what = total, what
        self._started = self._last = time.monotonic()
        self._line = self._text(0.0, "")
        self._handle = self._display({"text/plain": self._line}, raw=True, display_id=True)

    def show(self, completed: float, note: str) -> None:
        """Show what is done, of the total, and a note."""
        self._line = self._text(completed, note)
        if time.monotonic() - self._last >= _PAUSE:
            self._write()

    def stop(self) -> None:
        """Leave the last state there."""
        self._write()

    def _text(self, completed: float, note: str) -> str:
        filled = min(_WIDTH, round(_WIDTH * completed / max(self._total, 1)))
        seconds = round(time.monotonic() - self._started)
        bar = "█" * filled + "░" * (_WIDTH - filled)
        return f"{self._what} {bar} {int(completed)}/{self._total} {seconds // 60}:{seconds % 60:02d} {note}".rstrip()

    def _write(self) -> None:
        self._last = time.monotonic()
        if self._handle is not None:  # a frontend may have none
            self._handle.update({"text/plain": self._line}, raw=True)


def display(total: int, what: str, *, wanted: bool) -> Nowhere | Bar | Cell:
    """Where progress can be shown here."""
    if not wanted:
        return Nowhere()
    console = _console()
    if console.is_jupyter:
        return Cell(total, what)
    if console.is_terminal and not console.is_dumb_terminal:
        return Bar(console, total, what)
    return Nowhere()


def _console() -> Any:
    """Rich's own console, which knows where output goes."""
    import rich

    return rich.get_console()


# Where a run stands, in words: change against tolerance, and time ----------------------------------------------------

_UNITS = {"change_mean": " sd", "change_sd": " sd"}


def standing(record: Record, infos: Mapping[str, Mapping[str, float]], tolerance: float | None) -> str:
    """What a round did: its phase, the change, who was skipped, and who fell back."""
    notes = [str(record.info["phase"])] if "phase" in record.info else []
    size, unit = change(record.info)
    if np.isfinite(size):
        compared = f" (tolerance {tolerance:g})" if tolerance is not None and not record.preliminary else ""
        notes.append(f"change {size:.2g}{unit}{compared}")
    notes += [f"{len(record.failures)} skipped"] if record.failures else []
    return ", ".join([*notes, *filter(None, [diagnostics.fallback_note(infos)])])


def change(info: Mapping[str, Any]) -> tuple[float, str]:
    """The largest change that the server told of a round, with its unit; NaN where it told none."""
    found = {name: info[name] for name in ("change_mean", "change_sd", "change_omega", "change") if name in info}
    numbers = {
        name: float(value) for name, value in found.items() if isinstance(value, int | float) and np.isfinite(value)
    }
    if not numbers:
        return math.nan, ""
    name = max(numbers, key=lambda one: numbers[one])
    return numbers[name], _UNITS.get(name, "")


def tolerance_of(settings: Mapping[str, str]) -> float | None:
    """What an algorithm compares the change with, where it has such a setting.

    >>> tolerance_of({"tolerance": "0.01"}), tolerance_of({"steps": "3"})
    (0.01, None)
    """
    try:
        return float(settings["tolerance"])
    except (KeyError, ValueError):
        return None


def spelled(seconds: float) -> str:
    """Time as one says it.

    >>> spelled(0.34), spelled(8.2), spelled(95), spelled(7300)
    ('0.3 s', '8 s', '1 min 35 s', '2 h 1 min')
    """
    if seconds < 1:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
