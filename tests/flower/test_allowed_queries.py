"""Sites whose rows come by a query: the policy lists its digest, the log has it, and a changed query is not asked."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("flwr")
pytest.importorskip("sqlalchemy")

import fedppl
from fedppl import DeclarationError, Policy, sources
from fedppl.flower import apps
from fedppl.sites import AGREE, ASK, GATE, HELLO, JOIN, conclusions
from tests.support import stored
from tests.support.fake_grid import FakeGrid, node

NAMES = ("north", "south", "west")
MODEL = fedppl.formula("y ~ age + (1 | site)")
QUERY = "SELECT y, age FROM stays"
OPEN = Policy(sums="optional", rows=0, few_rows=0, parameters_per_row=math.inf, requests=200, agreement=5)
LISTED = dataclasses.replace(OPEN, allowed_queries=(sources.sql("sqlite://", QUERY).digest,))


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file a site."""
    folder, rng = tmp_path_factory.mktemp("databases"), np.random.default_rng(3)
    for place, name in enumerate(NAMES):
        age = rng.normal(60, 9, 60)
        frame = pd.DataFrame({"y": 1 + 0.05 * age + place + rng.normal(size=60), "age": age})
        connection = sqlite3.connect(folder / f"{name}.db")
        frame.to_sql("stays", connection, index=False)
        connection.close()
    return folder


def run(databases: Path, folder: Path, query: str, rules: Mapping[str, Policy]) -> tuple[FakeGrid, list[Any]]:
    """A run of three sites; the grid, and the fit if there was one."""
    seen: list[Any] = []
    site = fedppl.Flower.client_app(
        MODEL,
        fedppl.EP(),
        sources.sql(lambda config: f"sqlite:///{databases / config['client-id']}.db", query),
        folder=lambda config: folder / config["client-id"],
        policy=lambda config: rules[config["client-id"]],
        draws=20,
        chains=1,
    )
    server = fedppl.Flower.server_app(MODEL, fedppl.EP(), clients=3, on_fit=lambda fit, context: seen.append(fit))
    nodes = {10 + i: node(site, 10 + i, **{"client-id": name}) for i, name in enumerate(NAMES)}
    context = node(site, 0).context
    context.run_config = {"random_seed": 1, "wait": 1.0, "deadline": 0.05}
    grid = FakeGrid(nodes)
    server(grid, context)
    return grid, seen


@pytest.mark.filterwarnings("ignore::fedppl.ConvergenceWarning")
def test_a_listed_query_is_answered_and_stands_in_the_log_with_its_run(databases: Path, tmp_path: Path) -> None:
    _, (fit,) = run(databases, tmp_path, QUERY, dict.fromkeys(NAMES, LISTED))
    for name in NAMES:
        lines = stored.lines(tmp_path / name)
        assert {line["query"] for line in lines} == set(LISTED.allowed_queries or ())
        rounds = {line.get("round") for line in lines if line["event"] == "request" and line["refused"] is None}
        assert {record.number for record in fit.records} <= rounds


def test_a_changed_query_is_refused_before_it_is_asked(databases: Path, tmp_path: Path) -> None:
    """By one site of three: no row of it is read."""
    changed = f"{QUERY} WHERE y < 9"
    rules = {"north": LISTED, "south": OPEN, "west": OPEN}
    with pytest.raises(DeclarationError, match="2 of 3"):
        run(databases, tmp_path, changed, rules)
    lines = stored.lines(tmp_path / "north")
    digest = sources.sql("sqlite://", changed).digest
    assert lines and all(line["event"] == "query" and line["query"] == digest for line in lines)
    assert all(f"{digest} is not listed" in line["refused"] and "add" in line["refused"] for line in lines)


def asked_of(folder: Path, load: Any, kind: str) -> Any:
    app = fedppl.Flower.client_app(MODEL, fedppl.EP(), load, folder=folder, policy=LISTED)
    here = apps.declared[app]({"client-id": "north"})
    texts = {"client_id": "north", "min_count": "5", "nonce": "1"}
    return conclusions.answer(kind, here, {"client-id": "north"}, None, ({}, texts))


@pytest.mark.parametrize("kind", [HELLO, AGREE, ASK, JOIN, GATE])
def test_no_message_makes_a_site_read_rows_by_another_query(tmp_path: Path, kind: str) -> None:
    """Nor by a function, of which nobody knows what it reads."""
    read: list[Any] = []
    for place, load in enumerate((sources.sql(read.append, f"{QUERY} LIMIT 9"), read.append)):  # type: ignore[arg-type]
        folder = tmp_path / str(place)
        arrays, texts = asked_of(folder, load, kind)
        assert not arrays and "log" in str(texts) and not read
        rules = [line["refused"] for line in stored.lines(folder)]
        assert rules and all(rule.startswith("allowed_queries: ") for rule in rules)
        assert any("fedppl.sources" in rule for rule in rules) is bool(place)
