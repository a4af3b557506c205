"""Where a clinic has its data, policy and folder: its node config says so, or in Flower's simulation WORK.

Imported anew for every message: nothing that takes long to import may stand here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CLINICS = ("north", "south", "west")


def place(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The node config; of a node of Flower's simulation, which has a number alone, what it would be."""
    if "data" in config or "partition-id" not in config:
        return config
    if not (work := os.environ.get("WORK")):
        raise KeyError("WORK is not set: source ./environment.sh before `flwr run . simulation`")
    name, folder = CLINICS[int(config["partition-id"])], Path(work)
    return {
        "data": str(folder / "data" / f"{name}.csv"),
        "policy": str(folder / "policies" / f"{name}.toml"),
        "folder": str(folder / "simulated" / name),
    }
