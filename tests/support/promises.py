"""Many promises on one played run: a failure names the promise that was broken, and the others are looked at too."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import pytest


class Promises:
    """``with promises("equal seeds give equal numbers"): ...`` for each, and in the end `check`."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    @contextlib.contextmanager
    def __call__(self, promise: str) -> Iterator[None]:
        """What fails inside breaks this promise."""
        try:
            yield
        except Exception:
            self.broken.append(f"BROKEN: {promise}\n{traceback.format_exc()}")

    def check(self) -> None:
        """Fail where one was broken."""
        if self.broken:
            pytest.fail("\n".join(self.broken), pytrace=False)
