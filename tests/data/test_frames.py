"""Data as people have them: frames of several libraries, grouping columns, tuples, missing values, ids of any type."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
import xarray as xr
from numpy.testing import assert_array_equal

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel
from fedppl.data import frames, missing, tables

pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")

ROWS = 24


def line(x: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        slope, offset = pm.Normal("slope", 0, 3), pm.Normal("offset", 0, 3)
        pm.Normal("obs", offset + slope * x, 1, observed=y)
    return model


MODEL = FederatedModel(line, ["slope", "offset"])


def table() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=ROWS)
    return {"site": np.repeat([3, 1, 2], [5, 9, 10]), "x": x, "note": ["a"] * ROWS, "y": x + rng.normal(size=ROWS)}


def fit(data: Any, model: Any = MODEL, **keywords: Any) -> Any:
    return fedppl.fit(model, data, **{"progressbar": False, "random_seed": 1, **keywords})


TABLES: dict[str, Any] = {
    "pandas": lambda: pd.DataFrame(table()),
    "polars": lambda: pl.DataFrame(table()),
    "polars, lazy": lambda: pl.DataFrame(table()).lazy(),
    "pyarrow": lambda: pa.table(table()),
    "xarray": lambda: xr.Dataset({name: ("row", values) for name, values in table().items()}),
}


def by_hand() -> dict[str, Any]:
    found = table()
    return {str(site): {name: found[name][found["site"] == site] for name in ("x", "y")} for site in (3, 1, 2)}


@pytest.mark.parametrize("kind", TABLES)
def test_one_table_gives_what_arrays_by_hand_give(kind: str) -> None:
    expected, found = fit(by_hand()), fit(TABLES[kind](), by="site")
    assert found.client_ids == ("3", "1", "2")
    assert_array_equal(found.posterior.linear, expected.posterior.linear)


@pytest.mark.parametrize("kind", ["pandas", "polars", "pyarrow", "xarray"])
def test_a_table_for_each_client_and_a_tuple(kind: str) -> None:
    one = TABLES[kind]()
    arrays = {name: table()[name] for name in ("x", "y")}
    expected = fit({"a": arrays, "b": arrays}).posterior.linear
    assert_array_equal(fit({"a": one, "b": one}).posterior.linear, expected)
    assert_array_equal(fit({"a": (arrays["x"], arrays["y"]), "b": arrays}).posterior.linear, expected)


def test_groups_that_are_made_already() -> None:
    for groups in (pd.DataFrame(table()).groupby("site"), pl.DataFrame(table()).group_by("site", maintain_order=True)):
        found = fit(groups)
        assert set(found.client_ids) == {"1", "2", "3"}
        assert_array_equal(found.clients["3"].arrays["y"], by_hand()["3"]["y"])


def test_several_columns_tell_clients_apart() -> None:
    frame = pd.DataFrame(table()).assign(region=np.tile(["north", "south"], ROWS // 2))
    found = fit(frame, by=["region", "site"])
    assert len(found.client_ids) == 6
    assert found.client(("north", 3))["posterior"].sizes["draw"] == 1000


def test_ids_keep_working_as_they_were_given() -> None:
    found = fit(pd.DataFrame(table()), by="site")
    assert found.client(1, draws=10)["posterior"].attrs["client"] == "1"
    assert found.influence(3)["client"].values.tolist() == ["3"]
    assert found.influence([3, np.int64(1)])["client"].values.tolist() == ["3", "1"]
    assert fedppl.without(found, 2, progressbar=False).fit.client_ids == ("3", "1")
    new = pd.DataFrame({"x": [0.0, 1.0], "note": ["b", "c"]})
    assert found.predict(1, new, draws=10)["predictions"]["obs"].shape == (4, 10, 2)
    assert found.new_client(pd.DataFrame(table()), draws=10)["posterior"].sizes["draw"] == 10
    with pytest.raises(DeclarationError, match="'9' did not take part"):
        found.client(9)


def test_rounds_take_tables_too() -> None:
    step = next(iter(fedppl.rounds(MODEL, pd.DataFrame(table()), by="site", rounds=1, random_seed=1)))
    assert step.number == 1


# --- what a column becomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pd.Series([True, False]), [True, False]),
        (pd.Series([3, 4], dtype="Int64"), [3, 4]),
        (pd.Series([3, None], dtype="Int64"), [3, np.nan]),
        (pd.Categorical(["b", "a"], categories=["b", "a"]), [0, 1]),
        (pd.Categorical(["b", None], categories=["a", "b"]), [1, np.nan]),
        (pd.to_datetime(["1970-01-02 00:00", "1969-12-31 12:00"]), [1.0, -0.5]),
        (pd.to_timedelta(["2 days", "12h"]), [2.0, 0.5]),
        (pl.Series([datetime.date(1970, 1, 11), datetime.date(1970, 1, 1)]), [10.0, 0.0]),
        (pl.Series(["a", "b"], dtype=pl.Enum(["b", "a"])), [1, 0]),
        (pd.Series([1.5, None], dtype=object), [1.5, np.nan]),
        (pd.Series([1.0, np.inf]), [1.0, np.inf]),
    ],
)
def test_a_column_has_one_rule(values: Any, expected: Any) -> None:
    frame = pl.DataFrame({"x": values}) if isinstance(values, pl.Series) else pd.DataFrame({"x": values})
    found = frames.columns(frame, None, "client 'a'")["x"]
    assert_array_equal(np.asarray(found, dtype=float), np.asarray(expected, dtype=float))
    assert found.dtype.kind == np.asarray(expected).dtype.kind


def test_categories_by_name_are_neither_their_values_nor_their_places() -> None:
    """A data frame numbers them; values by name would be another covariate."""
    column = pd.Categorical([3, 7] * 4)
    for values in (column, pd.Series(column)):
        rows = {"x": values, "y": np.arange(8.0)}
        for clients in ({"a": rows}, {str(k): rows for k in range(60)}):
            with pytest.raises(DataError, match="'x' has categories.*pass a frame"):
                fit(clients)
    found = fit({k: pd.DataFrame({"x": column, "y": np.arange(8.0)}) for k in "ab"})
    assert found.clients["a"].arrays["x"].tolist() == [0, 1] * 4
    with pytest.raises(DataError, match="'x' has categories"):
        found.predict("a", {"x": column}, draws=10)


@pytest.mark.parametrize("values", [["a", "b"], [[1, 2], [3, 4]], [datetime.time(3), datetime.time(4)]])
def test_what_has_no_numbers_is_refused(values: Any) -> None:
    with pytest.raises(DataError, match="column 'x' has the type .*(number its values alike|one number a row)"):
        frames.columns(pd.DataFrame({"x": values}), None, "client 'a'")


def test_columns_that_the_builder_does_not_name_are_left_alone() -> None:
    found = fit(pd.DataFrame(table()), by="site")  # with a column of texts
    assert set(found.clients["3"].arrays) == {"x", "y"}


# --- missing values ---------------------------------------------------------------------------------------------


def with_gaps() -> pd.DataFrame:
    frame = pd.DataFrame(table())
    frame.loc[[0, 1], "x"] = np.nan
    frame.loc[[1, 6], "y"] = np.nan
    frame.loc[9, "note"] = None  # which nobody reads
    return frame


def test_missing_values_are_counted_by_column_and_client() -> None:
    with pytest.raises(DataError) as caught:
        fit(with_gaps(), by="site")
    told = str(caught.value)
    for part in ("'x' in 2 rows at client '3'", "'y' in 1 rows at client '3'", "'y' in 1 rows at client '1'"):
        assert part in told
    assert 'missing="drop"' in told


def test_rows_that_are_dropped_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    complete = with_gaps().dropna(subset=["x", "y"])
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        found = fit(with_gaps(), by="site", missing="drop")
    assert "client 3: 2 of 5 rows are left out" in caplog.text and "client 2" not in caplog.text
    assert "missing in 3 rows" in caplog.text
    assert_array_equal(found.posterior.linear, fit(complete, by="site").posterior.linear)


def test_rows_that_are_dropped_are_counted_beyond_the_clients_that_are_named(caplog: pytest.LogCaptureFixture) -> None:
    clients = {k: {"x": np.array([np.nan] * (1 + k % 2) + [1.0])} for k in range(20)}
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        kept = missing.complete(clients, "drop")
    assert all(len(rows["x"]) == 1 for rows in kept.values())
    assert "missing in 30 rows" in caplog.text and "at 12 more" in caplog.text


def test_a_table_can_be_a_key() -> None:
    found = tables.of_frame(frames.opened(pd.DataFrame(table())), "site", ["x"])
    assert {found: 1}[found] == 1


def test_masks_and_arrays_of_other_lengths_are_understood() -> None:
    data = {k: {"x": np.ma.array(v["x"], mask=np.arange(len(v["x"])) == 0), "y": v["y"]} for k, v in by_hand().items()}
    assert len(fit(data, missing="drop").clients["3"].arrays["y"]) == 4
    odd = {"a": {"x": np.array([1.0, np.nan]), "y": np.array([1.0, np.nan, 2.0])}}
    with pytest.raises(DataError, match="arrays of .* rows have missing values.*drop them"):
        fit(odd, missing="drop")


@pytest.mark.parametrize(
    ("data", "keywords", "told"),
    [
        (pd.DataFrame(table()), {}, "say by="),
        (pd.DataFrame(table()), {"by": "hospital"}, r"by=\['hospital'\] is no column.*'site'"),
        (pd.DataFrame(table()).iloc[:0], {"by": "site"}, "no rows"),
        (pd.DataFrame(table()).assign(site=[np.nan, *[1.0] * (ROWS - 1)]), {"by": "site"}, "missing in 1 of 24 rows"),
        (pd.DataFrame(table()).rename(columns={"x": "X", "y": "Y"}), {"by": "site"}, r"none of \['x', 'y'\]"),
        (pd.DataFrame(table()).drop(columns="x"), {"by": "site"}, "needs 'x'"),
        (by_hand(), {"by": "site"}, "leave by= out"),
        ({"a": (np.ones(2), np.ones(2), np.ones(2))}, {}, "tuple of 3, and the builder takes 2"),
        ({1: by_hand()["1"], "1": by_hand()["2"]}, {}, "not distinct"),
        (pd.DataFrame(table()), {"by": "site", "missing": "omit"}, "missing='omit' must be"),
    ],
)
def test_what_cannot_be_meant_names_the_remedy(data: Any, keywords: Any, told: str) -> None:
    with pytest.raises((DataError, DeclarationError), match=told):
        fit(data, **keywords)
