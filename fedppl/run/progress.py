"""What is going on now, where somebody looks: in a bar, and in the log, a line every so often."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from fedppl.run._display import Nowhere, display
from fedppl.run.outlook import spelled

logger = logging.getLogger(__name__)

EVERY = 15.0  # seconds without a line in the log after which there is one, while something goes on


class Progress:
    """How far a run is, and which clients have answered in its round.

    Parameters
    ----------
    total
        Number of rounds, or of whatever is counted.
    show
        Whether to show it where there is a terminal or a notebook; the log, at level INFO, has it in any case.
    what
        Name of what is counted.
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

    def heard(self, client_id: str) -> None:
        """Say that a client has answered, or has failed to."""
        self._answered += 1
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
