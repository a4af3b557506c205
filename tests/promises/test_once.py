"""A table is converted once, a formula parsed once, and a builder called no more often than its traces differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas as pd
import polars as pl
import pymc as pm
import pytest

import fedppl
from fedppl import FederatedModel, given
from fedppl.data import frames
from fedppl.formulas import formula as formulas

ROWS = 6


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of what converts a table or one of its columns, and of what parses a formula."""
    seen: Counter[str] = Counter()

    def counted(module: Any, name: str, what: Callable[..., str | None]) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **more: Any) -> Any:
            seen.update(filter(None, [what(*arguments)]))
            return function(*arguments, **more)

        monkeypatch.setattr(module, name, call)

    counted(nw, "from_native", lambda data, *_: "table" if isinstance(data, pd.DataFrame) else None)
    counted(frames, "numeric", lambda column, *_: str(column.name))
    counted(frames, "as_texts", lambda column, *_: str(column.name))
    counted(formulas, "parse", lambda *_: "formula")
    return seen


def table(clients: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = clients * ROWS
    sites = np.repeat(np.arange(clients), ROWS)
    more = {"x": rng.normal(size=rows), "arm": np.tile(["a", "b"], rows // 2)}
    return pd.DataFrame({"site": sites, "y": rng.normal(size=rows), **more})


def read(model: FederatedModel, data: Any, by: str | None) -> None:
    """What `fedppl.fit` does before the first round."""
    model, clients = given.clients(model, data, by, "error", one_table=True)
    model.enrol({k: clients[k] for k in list(clients)[:3]}, kernel=False)


@pytest.mark.parametrize("clients", [3, 60])
def test_a_table_and_each_of_its_columns_are_converted_once(clients: int, counts: Counter[str]) -> None:
    read(FederatedModel(Builder(), ["mu", "tau"]), table(clients), "site")
    assert counts == {"table": 1, "y": 1, "x": 1}


@pytest.mark.parametrize("clients", [3, 12])
def test_a_formula_is_parsed_once_and_its_table_converted_once(clients: int, counts: Counter[str]) -> None:
    read(fedppl.formula("y ~ x + arm + (1 | site)"), table(clients), "site")
    assert counts == {"formula": 1, "table": 1, "y": 1, "x": 1, "arm": 1}


def test_a_table_of_each_client_is_converted_once(counts: Counter[str]) -> None:
    by_client = {k: rows.drop(columns="site") for k, rows in table(3).groupby("site")}
    read(FederatedModel(Builder(), ["mu", "tau"]), by_client, None)
    assert counts == {"table": 3, "y": 3, "x": 3}
    counts.clear()
    read(fedppl.formula("y ~ x + arm + (1 | site)"), by_client, None)
    assert counts == {"formula": 1, "table": 3, "y": 3, "x": 3, "arm": 3}


def test_a_lazy_table_is_collected_once_and_not_to_see_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    collected, collect = [], nw.LazyFrame.collect

    def counted(lazy: Any) -> Any:
        collected.append(lazy)
        return collect(lazy)

    monkeypatch.setattr(nw.LazyFrame, "collect", counted)
    lazy = pl.LazyFrame({"y": [0.5, 1.5], "x": [1.0, 2.0]})
    kinds = FederatedModel({"both": Builder(), "other": lambda z: Builder()(z, z)}, ["mu", "tau"])
    assert frames.is_frame(lazy) and kinds.kind_of("a", lazy) == "both" and not collected
    names = ["y", "x"]
    for read_once in (
        lambda: frames.named(lazy, names, "a"),
        lambda: frames.raw(lazy, names, "a"),
        lambda: frames.known("a", lazy, names=names, orders={}),
    ):
        assert list(read_once()) == names
        assert len(collected) == 1
        collected.clear()


class Builder:
    """A usual builder; `number` stands in its density, and `coords` label a shared variable."""

    def __init__(self, number: Callable[[Any], float] = lambda y: 1.0, labels: Any = None) -> None:
        self.calls, self.number, self.labels = 0, number, labels

    def __call__(self, y: Any, x: Any) -> pm.Model:
        """One client's model."""
        self.calls += 1
        with pm.Model(coords=None if self.labels is None else {"arm": self.labels}) as model:
            data, sd = pm.Data("x", x), self.number(y)
            mu = pm.Normal("mu", 0, 10, dims=None if self.labels is None else "arm")
            theta = pm.Normal("theta", mu.sum(), pm.HalfNormal("tau", 1))
            pm.Normal("obs", theta + data, sd, observed=pm.Data("y", y))
        return model


def enrolled(builder: Builder, clients: int) -> int:
    """Calls of a builder when clients enrol and their results are read."""
    model, data = given.clients(FederatedModel(builder, ["mu", "tau"]), table(clients), "site", "error")
    next(iter(model.enrol(data, kernel=False).values())).reader()
    return builder.calls


def test_clients_of_one_kind_call_their_builder_twice() -> None:
    """Two traces, of two clients, are equal: nothing else is to be found out."""
    assert enrolled(Builder(), 3) == enrolled(Builder(labels=range(2)), 3) == 2


def test_a_client_alone_calls_its_builder_three_times() -> None:
    """Its data, and the same moved down and up: no other client shows what comes from data."""
    assert enrolled(Builder(), 1) == 3


def test_labels_that_may_come_from_data_are_held_against_two_more_traces() -> None:
    assert enrolled(Builder(labels=["control", "drug"]), 3) == 4


@pytest.mark.filterwarnings("ignore:the builder bakes")
def test_a_trace_that_differs_is_made_a_third_time() -> None:
    """Whether numbers come from data or from chance; the third client's own model is the fourth call."""
    assert enrolled(Builder(number=lambda y: float(np.std(y))), 3) == 4


def test_a_second_fit_calls_the_builder_once_a_kind() -> None:
    builder = Builder()
    model = FederatedModel(builder, ["mu", "tau"])
    for _ in range(2):
        data = given.clients(model, table(3), "site", "error")[1]
        model.enrol(data, kernel=False)
    assert builder.calls == 3


def test_tables_tuples_and_arrays_may_stand_side_by_side() -> None:
    """Among as many clients as are one table else."""
    frame = table(60)
    own: list[Any] = [{"y": rows["y"].to_numpy(), "x": rows["x"].to_numpy()} for _, rows in frame.groupby("site")]
    mixed = {**dict(enumerate(own)), 1: pd.DataFrame(own[1]), 2: (own[2]["y"], own[2]["x"])}
    model = FederatedModel(Builder(), ["mu", "tau"])
    read, expected = (
        given.clients(model, data, None, "error", one_table=True)[1] for data in (mixed, dict(enumerate(own)))
    )
    for k, client_id in enumerate(read):
        assert all(np.array_equal(read[client_id][name], expected[str(k)][name]) for name in ("y", "x"))
