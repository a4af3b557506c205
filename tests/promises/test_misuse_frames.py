"""Data frames, and clients' ids, that people pass by mistake: nothing is compiled for any of them."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pymc as pm
import pytest
import xarray as xr

import fedppl
from fedppl import FederatedModel, given
from tests.support.mistakes import Mistake, refused, row

Y = np.array([0.5, 1.5, 1.0])
FRAME = pd.DataFrame({"site": list("aabb"), "X": [1.0, 2.0, 3.0, 4.0], "y": [1.0, 2.0, 3.0, 4.0]})
POLARS = pl.DataFrame(FRAME.to_dict("list"))
GAP = ["a", None, "b", "b"]


TURNED = {"X": pd.Series(Y, index=[2, 1, 0]), "y": pd.Series(Y)}


def line(X: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        pm.Normal("obs", X * pm.Normal("mu"), 1, observed=y)
    return model


MODEL = FederatedModel(line, ["mu"])
OF_KINDS = FederatedModel({"line": line, "other": lambda X, z: line(X, z)}, ["mu"])


def start(data: Any, **more: Any) -> Callable[[], Any]:
    return lambda: fedppl.rounds(MODEL, data, **more)


def table(**columns: Any) -> Callable[[], Any]:
    return lambda: fedppl.rounds(MODEL, FRAME.assign(**columns), by="site")


def arrays(a: Any) -> Callable[[], Any]:
    return start({"a": a, "b": {"X": Y, "y": Y}})


def named(*ids: Any) -> Callable[[], Any]:
    return start({one: {"X": Y, "y": Y} for one in ids})


def dataset(**more: Any) -> xr.Dataset:
    return xr.Dataset({"y": ("row", np.ones(4)), "X": ("row", np.ones(4)), "site": ("row", list("aabb")), **more})


def of_categories(second: list[str]) -> Callable[[], Any]:
    first = pd.DataFrame({"X": pd.Categorical(["lo", "hi"], ["lo", "hi"]), "y": [1.0, 2.0]})
    other = pd.DataFrame({"X": pd.Categorical(second[:1], second), "y": [1.0]})
    return start({"a": first, "b": other})


ROWS: dict[str, Mistake] = {
    # --- what is no clients' data
    "a path": row(start("data.csv"), "'data.csv'", "pandas.read_csv", "by="),
    "a number": row(start(3), "are int", "mapping", "by="),
    "an array": row(start(np.ones((3, 2))), "are ndarray", "mapping"),
    "a list of frames": row(start([FRAME, FRAME]), "are list", "mapping"),
    "a Series": row(start(FRAME["y"]), "are Series", "mapping"),
    "a generator": row(start(one for one in ["a"]), "are generator", "mapping"),
    "a window": row(start(FRAME[["y"]].rolling(2)), "are Rolling", "mapping"),
    "nothing": row(start({}), "no clients", "mapping"),
    "one client's arrays": row(start({"X": Y, "y": Y}), "['X', 'y']", '{"some client": data}'),
    "a table without by": row(start(FRAME), "by=", "{id: table}"),
    "means of groups": row(start(FRAME.groupby("site").mean()), "by="),
    "groups that are not collected": row(start(POLARS.lazy().group_by("site")), "LazyGroupBy", "collect()"),
    "rows in no group": row(start(FRAME.assign(site=GAP).groupby("site")), "1 of 4 rows", "drop"),
    "a group of NaN": row(start(FRAME.assign(site=GAP).groupby("site", dropna=False)), "id is nan", "drop its rows"),
    "a group of null": row(start(POLARS.with_columns(site=pl.Series(GAP)).group_by("site")), "id is None", "drop"),
    "one column of groups": row(start(FRAME.groupby("site")["y"]), "'a'", "Series", "mapping"),
    "an empty group": row(
        start(FRAME.assign(site=pd.Categorical(FRAME["site"], ["a", "b", "c"])).groupby("site", observed=False)),
        "'c'", "zero rows", "leave the client out",
    ),
    # --- by=
    "another case": row(start(FRAME, by="Site"), "by=['Site']", "such as 'site'"),
    "a Series for by": row(start(FRAME, by=FRAME["site"]), "Series", "pass its name"),
    "an array for by": row(start(FRAME, by=np.zeros(4)), "ndarray", "pass its name"),
    "an expression for by": row(start(POLARS, by=pl.col("site")), "Expr", "pass its name"),
    "values for by": row(start(FRAME, by=["a", "a", "b", "b"]), "no column of the table", "name one of them"),
    "no column for by": row(start(FRAME, by=[]), "by=[]", "name the column"),
    "a column twice": row(start(FRAME, by=["site", "site"]), "twice", "name each once"),
    "the index": row(start(FRAME.set_index("site"), by="site"), "['site']", "reset_index()"),
    "two levels of names": row(start(pd.concat({"k": FRAME}, axis=1), by=("k", "site")), "('k', 'y')", "rename"),
    "reals": row(start(FRAME.assign(site=[0.5, 0.5, 1.5, 1.5]), by="site"), "by=['site']", "0.5", "whole numbers"),
    "a gap in by": row(start(FRAME.assign(site=GAP), by="site"), "1 of 4 rows", "drop them"),
    "by of arrays": row(start({"site": GAP, "y": Y}, by="site"), "dict", "leave by= out", "pandas.DataFrame(data)"),
    "by of groups": row(start(FRAME.groupby("site"), by="site"), "grouped", "leave by= out"),
    # --- ids
    "an id of None": row(named(None, "b"), "id is None", "name the client"),
    "an id of NaN": row(named(np.nan, "b"), "id is nan", "name the client"),
    "an id of NaT": row(named(pd.NaT, "b"), "id is NaT", "name the client"),
    "an empty id": row(named("", "b"), "id is ''", "name the client"),
    "bytes": row(named(b"a", "b"), "b'a'", "by a text"),
    "an end of a text": row(named("a\0", "a"), "'a\\x00'", "without control characters"),
    "half a sign": row(named("\ud800", "a"), "ud800", "without control characters"),
    "a set": row(named(frozenset("ab"), "b"), "frozenset", "or a tuple"),
    "a number and its text": row(named(1, "1"), "1 and '1'", "rename"),
    "blanks": row(named("a", "a "), "'a' and 'a '", "blanks"),
    "an id of a tuple with None": row(named(("a", None), "b"), "('a', None)", "name the client"),
    # --- columns
    "two columns of one name": row(start(pd.concat([FRAME, FRAME[["y"]]], axis=1), by="site"), "'y'", "rename or drop"),
    "two columns of pyarrow": row(
        start(pa.table([pa.array(["a"]), pa.array([1.0]), pa.array([1.0])], names=["site", "y", "y"]), by="site"),
        "'y'", "rename or drop",
    ),
    "texts": row(table(y=list("abcd")), "column 'y'", "String", "fedppl.formula"),
    "numbers as texts": row(table(y=["1", "2", "3", "4"]), "column 'y'", "astype(float)"),
    "numbers and texts": row(table(y=pd.Series([1, "n/a", 2.0, 3], dtype=object)), "'n/a'", "pandas.to_numeric"),
    "lists": row(table(y=pd.Series([[1], [1, 2], [1], [1]])), "column 'y'", "one number a row"),
    "structures": row(start(POLARS.with_columns(y=pl.Series([{"a": 1}] * 4)), by="site"), "Struct", "one number a row"),
    "dates as objects": row(table(y=pd.Series([datetime.date(2020, 1, 1)] * 4)), "column 'y'", "pandas.to_datetime"),
    "two time zones": row(
        table(y=pd.Series([pd.Timestamp("2020", tz=zone) for zone in ("UTC", "Asia/Tokyo")] * 2, dtype=object)),
        "column 'y'", "utc=True",
    ),
    "periods": row(table(y=pd.period_range("2020", periods=4, freq="M")), "column 'y'", "to_timestamp()"),
    "complex": row(table(y=[1j, 1, 1, 1]), "'y'", "complex128", "real"),
    "no value at all": row(table(y=[None] * 4), "'y' in 2 rows at client 'a'", 'missing="drop"'),
    "a client without values": row(
        start(FRAME.assign(y=[np.nan, np.nan, 1.0, 2.0]), by="site", missing="drop"),
        "'a'", "each of its 2 rows", "leave it out",
    ),
    "no row": row(start(FRAME.iloc[:0], by="site"), "no rows"),
    "a client without rows": row(start({"a": FRAME.iloc[:0], "b": FRAME}), "'a'", "zero rows", "leave the client out"),
    "missing as a flag": row(start(FRAME, by="site", missing=True), "missing=True", '"drop"'),
    "other categories": row(of_categories(["hi", "mid"]), "'X'", "['hi', 'mid'] at client 'b'", "set_categories"),
    "categories in another order": row(of_categories(["hi", "lo"]), "'X'", "set_categories"),
    # --- arrays
    "Series in another order": row(
        arrays(TURNED), "'X' and 'y'", "pandas.DataFrame", ".to_numpy()",
    ),
    "Series in another order for one of two builders": row(
        lambda: fedppl.rounds(OF_KINDS, {"a": {"X": Y, "z": Y}, "b": TURNED}), "'b'", "'X' and 'y'", ".to_numpy()"
    ),
    "Series in another order at one of many": row(
        start({k: TURNED if k == 7 else {"X": Y, "y": Y} for k in range(60)}), "'7'", "'X' and 'y'", ".to_numpy()"
    ),
    "a ragged list": row(arrays({"X": [[1], [1, 2], [3]], "y": Y}), "'X' is no array", "rows of one length"),
    "an array for a client": row(arrays(Y), "'a'", "ndarray", "mapping"),
    "a file for a client": row(arrays("a.csv"), "'a'", "str", "mapping"),
    "a DataArray for a client": row(arrays(xr.DataArray(Y)), "'a'", "DataArray", "mapping"),
    "too long a tuple": row(arrays((Y, Y, Y)), "tuple of 3", "['X', 'y']", "mapping"),
    "a mask": row(arrays({"X": Y, "y": np.ma.array(Y, mask=[0, 1, 0])}), "'y' in 1 rows", 'missing="drop"'),
    "a mask at one of many": row(
        start({k: {"X": Y, "y": np.ma.array(Y, mask=[0, k == 7, 0])} for k in range(60)}),
        "'y' in 1 rows at client '7'", 'missing="drop"',
    ),
    "a name of bytes": row(start({"a": {b"X": Y, b"y": Y}}), "b'X'", "not a text"),
    # --- Datasets
    "an array without rows of clients": row(
        start(dataset(X=("time", [1.0, 2.0])), by="site"), "'X'", "('time',)", "{id: {name: array}}"
    ),
    "by of two dims": row(start(dataset(site=(("row", "t"), np.ones((4, 2)))), by="site"), "dims", "it has one"),
    "by without a dim": row(start(dataset(site=((), "a")), by="site"), "dims", "it has one"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_data_that_are_not_meant_are_refused_in_words(name: str) -> None:
    refused(ROWS[name])


def test_a_gap_in_categories_is_no_category(caplog: pytest.LogCaptureFixture) -> None:
    frame = FRAME.assign(X=pd.Categorical([None, "lo", "hi", "lo"], ["lo", "hi"]))
    refused(row(start(frame, by="site"), "'X' in 1 rows at client 'a'"))
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        fedppl.rounds(MODEL, frame, by="site", missing="drop")
    assert any("1 of 2 rows" in record.getMessage() for record in caplog.records)


def test_a_masked_row_of_one_of_many_clients_is_dropped() -> None:
    many = {k: {"X": Y, "y": np.ma.array([0.5, 999.0, 1.0], mask=[0, k == 7, 0])} for k in range(60)}
    found = given.clients(MODEL, many, None, "drop", one_table=True)[1]
    np.testing.assert_array_equal(found[7]["y"], [0.5, 1.0])


# --- what is read as it is meant -------------------------------------------------------------------------------


def read(data: Any, **more: Any) -> dict[str, Any]:
    """What comes of clients' data."""
    return dict(given.clients(MODEL, data, more.get("by"), "error")[1])


def test_ids_that_were_made_reals_by_a_gap_are_whole_again() -> None:
    assert list(read(FRAME.assign(site=[1.0, 1.0, 2.0, 2.0]), by="site")) == ["1", "2"]
    two = read(FRAME.assign(year=[2020.0] * 4), by=["site", "year"])
    assert list(two) == ["('a', 2020)", "('b', 2020)"]


def test_decimals_of_a_data_base_are_numbers() -> None:
    import decimal

    half = [decimal.Decimal("0.5")] * 4
    for frame in (FRAME.assign(y=half), POLARS.with_columns(y=pl.Series(half))):
        np.testing.assert_array_equal(read(frame, by="site")["a"]["y"], [0.5, 0.5])


def test_sparse_columns_are_read() -> None:
    found = read(FRAME.assign(y=pd.arrays.SparseArray([0.0, 0.0, 1.0, 2.0])), by="site")
    np.testing.assert_array_equal(found["b"]["y"], [1.0, 2.0])


def test_a_dataset_is_divided_by_rows_whatever_the_order_of_its_dims() -> None:
    """The dims have equal lengths: the wrong one would be divided without a word."""
    values = np.arange(16.0).reshape(4, 4)
    rows_second = dataset(X=(("time", "row"), values))
    np.testing.assert_array_equal(read(rows_second, by="site")["b"]["X"], values.T[2:])


def test_series_of_one_index_or_of_other_labels_go_by_position() -> None:
    for index in ([0, 1, 2], [5, 6, 7]):
        found = read({"a": {"X": pd.Series(Y, index=index), "y": pd.Series(Y)}})
        np.testing.assert_array_equal(found["a"]["X"], Y)


@pytest.mark.compiled
def test_a_category_means_the_same_number_in_predictions_as_in_the_fit() -> None:
    """A frame with fewer categories numbers them anew, and the prediction would be for another one."""
    frame = FRAME.assign(X=pd.Categorical(["lo", "hi", "lo", "hi"], ["lo", "hi"]))
    fit = fedppl.fit(MODEL, frame, by="site", progressbar=False, random_seed=1)
    for new in (pd.Categorical(["hi"]), ["hi"], [1]):
        found = fit.predict("a", pd.DataFrame({"X": new}), draws=5, chains=1)
        np.testing.assert_array_equal(found["predictions_constant_data"]["X"], [1])
    refused(row(lambda: fit.predict("a", pd.DataFrame({"X": ["mid"]})), "'mid'", "['lo', 'hi']", "fit again"))
