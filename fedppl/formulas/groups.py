"""Groups within a client, numbered; new rows find those that the client has by their names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedppl.formulas.agreement import as_texts, require_present
from fedppl.formulas.terms import Group
from fedppl.types import Array, DataError


def numbered(
    number: int, group: Group, data: Mapping[str, Any], known: Mapping[str, Any] | None, what: str
) -> dict[str, Array]:
    """The group of each row, and a mark of each group's name; of new rows the place among the groups that are known."""
    absent = [name for name in group.factor[1:] if name not in data]
    if absent:
        raise DataError(f"{what} lacks the columns {absent}, by which effects vary.")
    for name in group.factor[1:]:
        require_present(data[name], f"{what}: column {name!r}")
    texts = [as_texts(np.asarray(data[name])) for name in group.factor[1:]]
    names, rows = np.unique([_joined(row) for row in zip(*texts, strict=True)], return_inverse=True)
    marks = np.array([_mark(name) for name in names.tolist()])
    if known is None:
        return {f"row_{number}": rows, f"of_{number}": marks}
    places = {mark: place for place, mark in enumerate(np.asarray(known[f"of_{number}"], dtype=float).tolist())}
    if strange := [name for name, mark in zip(names.tolist(), marks.tolist(), strict=True) if mark not in places]:
        raise DataError(
            f"{what}: the groups {strange[:4]} of {':'.join(group.factor[1:])} have no rows among its data, and what "
            "is theirs cannot be predicted; leave their rows out."
        )
    return {f"row_{number}": np.array([places[mark] for mark in marks.tolist()])[rows]}


def _joined(levels: Sequence[str]) -> str:
    """A group's name, another one for each group: a colon in a level is not the one between two."""
    return (
        str(levels[0])
        if len(levels) == 1
        else ":".join(one.replace("\\", "\\\\").replace(":", "\\:") for one in levels)
    )


def _mark(name: str) -> float:
    """A whole number that a real holds exactly, by which a name is found again."""
    return float(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little"))
