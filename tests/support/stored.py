"""What a site's file holds, and how it is changed by somebody who has no key."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedppl import audit
from fedppl.engine.guard import Ledger, Run, in_store
from fedppl.engine.policy import NO_RULES
from fedppl.storage import store
from fedppl.storage.signed import Memory


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the site's log."""
    return list(audit.lines(folder))


def ledger(folder: Path, name: str) -> Ledger:
    """The account of a client."""
    with store.reading(folder) as here:
        return in_store(NO_RULES, here, name).read()


def run(folder: Path, name: str, run: str) -> Run | None:
    """What is known of a client's run."""
    with store.reading(folder) as here:
        return in_store(NO_RULES, here, name).known("run", run)


def names(folder: Path) -> list[str]:
    """The names under which the site keeps something."""
    return [name for (name,) in execute(folder, "SELECT name FROM state ORDER BY name")]


def memory(folder: Path) -> Memory:
    """What the site keeps, each name read and written by itself."""

    def recall(name: str) -> bytes | None:
        with store.changing(folder) as here:
            return store.memory(here).recall(name)

    def keep(name: str, raw: bytes) -> None:
        with store.changing(folder) as here:
            store.memory(here).keep(name, raw)

    return Memory(recall, keep)


def alter(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change what is kept under a name, without its signature."""
    ((raw,),) = execute(folder, "SELECT content FROM state WHERE name = ?", name)
    execute(folder, "UPDATE state SET content = ? WHERE name = ?", change(raw), name)


def execute(folder: Path, sql: str, *given: Any) -> list[Any]:
    """Run SQL on the site's file."""
    with closing(sqlite3.connect(folder / store.FILE)) as connection, connection:
        return connection.execute(sql, given).fetchall()


@contextmanager
def killed_while_keeping(suffix: str, *, made: list[tuple[str, bytes]], how: type[BaseException]) -> Iterator[None]:
    """Raise `how`, as a process ends that is killed, where a name with this suffix is kept; `made` gets its content."""

    def of(here: store.Store) -> Memory:
        own = memory_of(here)

        def keep(name: str, raw: bytes) -> None:
            if name.endswith(suffix):
                made.append((name, raw))
                raise how("killed")
            own.keep(name, raw)

        return Memory(own.recall, keep)

    memory_of = store.memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "memory", of)
        yield
