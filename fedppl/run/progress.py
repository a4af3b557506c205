"""The progress bar of `fedppl.fit` and of what fits often."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


class Progress:
    """A progress bar with the last change, or nothing."""

    def __init__(self, total: int, *, show: bool, what: str = "Round") -> None:
        self._bar: Any = None
        if show:
            import rich.progress  # a tenth of what importing all of fedppl takes

            self._bar = rich.progress.Progress(
                rich.progress.TextColumn(what),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn("{task.fields[note]}"),
            )
            self._task = self._bar.add_task("", total=total, note="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, note: str) -> None:
        """What is going on now."""
        if self._bar is not None:
            self._bar.update(self._task, note=note)

    def update(self, number: int, status: str, info: Mapping[str, Any], skipped: int, fallen: str = "") -> None:
        """Advance to a round; `info` is the server's diagnostics, `fallen` a note on clients that fell back."""
        if self._bar is not None:
            notes = [str(info["phase"])] if "phase" in info else []
            for name, unit in (("change_mean", " sd"), ("change", "")):
                value = info.get(name, math.nan)
                if np.ndim(value) == 0 and np.isfinite(value):
                    notes.append(f"change {value:.2g}{unit}")
                    break
            notes += [status, *([f"{skipped} skipped"] if skipped else []), *([fallen] if fallen else [])]
            note = ", ".join(notes)
            self._bar.update(self._task, completed=number, note=note)
