"""Where progress is shown: a bar in a terminal, a line in a notebook that is written over, and elsewhere nothing.

Elsewhere, as in the log of a server, control characters would be garbage: there the log has it.
"""

from __future__ import annotations

import importlib
import time
from typing import Any, Protocol

_WIDTH = 20  # of a notebook's bar, in characters
_PAUSE = 0.2  # seconds between two messages to a notebook


class Display(Protocol):
    """What shows how far something is."""

    def show(self, completed: float, note: str) -> None:
        """Show what is done, of the total, and a note."""

    def stop(self) -> None:
        """Leave the last state there."""


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
            progress.TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
        self._task = self._bar.add_task("", total=total, note="")
        self._bar.start()

    def show(self, completed: float, note: str) -> None:
        """See `Display.show`."""
        self._bar.update(self._task, completed=completed, note=note)

    def stop(self) -> None:
        """See `Display.stop`."""
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
        """See `Display.show`."""
        self._line = self._text(completed, note)
        if time.monotonic() - self._last >= _PAUSE:
            self._write()

    def stop(self) -> None:
        """See `Display.stop`."""
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


def display(total: int, what: str, *, wanted: bool) -> Display:
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
