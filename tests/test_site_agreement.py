"""A formula at sites of their own: what each tells under its policy, what it holds against what comes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

pytest.importorskip("flwr")

import fedppl
from fedppl import Policy, audit
from fedppl.engine.policy import NO_RULES
from fedppl.flower.records import AGREE
from tests.support.fake_grid import FakeGrid, Node, node

RNG = np.random.default_rng(5)
OPEN = Policy(rows=0, parameters_per_row=math.inf, events=0, requests=200, agreement=5)
MODEL = fedppl.formula("y ~ age + arm + (1 | site)")


def sites(rare: str = "") -> dict[str, dict[str, Any]]:
    found = {}
    for place, name in enumerate(("north", "south", "west")):
        rows = 40 + 20 * place
        age, arm = RNG.normal(60, 9, rows), np.where(np.arange(rows) % 2, "drug", "none").astype(object)
        if rare:
            arm[0] = rare
        y = 1 + 0.05 * age + 0.5 * (arm == "drug") + place + RNG.normal(size=rows)
        found[name] = {"age": age, "arm": arm, "y": y}
    return found


DATA = sites()


def nodes_of(
    data: Mapping[str, Any], folder: Path | None, model: Any = MODEL, policies: Mapping[str, Policy] | None = None
) -> dict[int, Node]:
    """One app, a node a client; sites have folders, and policies of their own."""
    app = fedppl.Flower.client_app(
        model,
        fedppl.EP(),
        lambda config: data[config["client-id"]],
        folder=None if folder is None else lambda config: folder / config["client-id"],
        policy=NO_RULES if folder is None else lambda config: (policies or {}).get(config["client-id"], OPEN),
        draws=20,
        chains=1,
    )
    return {10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(data)}


def agree(grid: FakeGrid, model: Any = MODEL, clients: Any = 3, **keywords: Any) -> fedppl.Agreed:
    found: fedppl.Agreed = fedppl.Flower.agree(grid, model, clients=clients, **{"wait": 0.3, "poll": 0.001, **keywords})
    return found


def fit(grid: FakeGrid, found: fedppl.Agreed, clients: Any = 3) -> Any:
    times = {"wait": 0.3, "deadline": 0.05, "poll": 0.001, "grace": 0.01}
    engine = fedppl.Flower.grid(grid, clients=clients, model=found.model, **times)
    return fedppl.fit(found.model, None, engine=engine, progressbar=False, random_seed=1)


def replies(grid: FakeGrid, kind: str = AGREE) -> list[dict[str, str]]:
    """Texts of all replies to messages of a kind."""
    ids = {message.metadata.message_id for message in grid.sent if message.metadata.message_type == kind}
    return [
        {key: str(value) for record in reply.content.config_records.values() for key, value in record.items()}
        for reply in grid.replies
        if reply.metadata.reply_to_message_id in ids
    ]


def told(grid: FakeGrid) -> dict[str, dict[str, list[Any]]]:
    return {one["client_id"]: json.loads(one["told"]) for one in replies(grid) if "told" in one}


# --- the same fit ---------------------------------------------------------------------------------------------


def test_sites_fit_what_clients_here_fit(tmp_path: Path) -> None:
    here = fedppl.fit(MODEL, DATA, fedppl.EP(correction=None), progressbar=False, random_seed=1)
    grid = FakeGrid(nodes_of(DATA, tmp_path))
    found = agree(grid)
    assert found.clients == ("north", "south", "west") and found.columns.loc["arm", "levels"] == ("drug", "none")
    there = fit(grid, found)
    assert there.status.ok and here.status is there.status
    assert_allclose(there.posterior.linear, here.posterior.linear, rtol=1e-6)
    assert_allclose(there.posterior.precision, here.posterior.precision, rtol=1e-6, atol=1e-8)
    assert list(there.summary().index) == list(here.summary().index)
    for name in DATA:
        assert (tmp_path / name / f"{name}.nc").exists()
        audit.head(tmp_path / name / "audit.jsonl")
