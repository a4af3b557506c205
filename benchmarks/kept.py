"""Finished fits that benchmarks keep in files: beside each its algorithm's settings, which its name does not carry.

A default that was changed in `models/` or in an algorithm since would else leave old figures in a new table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fedppl


def _beside(done: Path) -> Path:
    return done.with_name(done.name + ".settings")


def read(done: Path, algorithm: fedppl.Algorithm) -> Any:
    """What was kept of a fit by this algorithm, or None where nothing is there; files without settings are believed.

    Raises
    ------
    ValueError
        Where the settings were others.
    """
    if not done.is_file():
        return None
    if _beside(done).is_file():
        before, now = json.loads(_beside(done).read_text()), _told(algorithm)
        if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
            told = "; ".join(f"{name} {before.get(name)}, and now {now.get(name)}" for name in changed)
            raise ValueError(f"{done} is of a fit with {told}. Take another --folder, or delete the file.")
    return json.loads(done.read_text())


def write(done: Path, found: Any, algorithm: fedppl.Algorithm) -> None:
    """Keep a fit's figures: the settings first, so that no figures are there without them."""
    _beside(done).write_text(json.dumps(_told(algorithm)))
    done.write_text(json.dumps(found))


def _told(algorithm: fedppl.Algorithm) -> dict[str, str]:
    return {"algorithm": algorithm.name, **algorithm.settings}
