"""Rows from databases and files: equal arrays whatever holds them, and digests of what is asked."""

from __future__ import annotations

import datetime
import decimal
import sqlite3
import sys
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedppl
from fedppl import DataError, DeclarationError, Policy, sources
from fedppl.data.sources import _table
from tests.support.postgres import started

ROWS = [  # id, a decimal, four bytes, a text, a truth, whole where nobody is missing, a date, a time with a zone
    (3, 1.25, 0.1, None, True, 2.0, "2023-05-01", "2023-05-01 10:00:00+02:00"),
    (1, 40.1, 7.3, "ä b", True, 5.0, "2024-01-03", "2024-01-03 23:30:00.125+00:00"),
    (2, None, None, "B", None, -1.0, None, None),
    (4, -7.75, -0.2, "", False, 0.0, "0001-01-01", "9999-12-31 00:00:00+00:00"),
    (4, -7.75, -0.2, "100 %", False, 0.0, "0001-01-01", "9999-12-31 00:00:00+00:00"),
]
COLUMNS = "id, dose, short, ward, died, beds, day, seen"
NAMES = tuple(COLUMNS.split(", "))
QUERY = f"SELECT {COLUMNS} FROM stays WHERE ward LIKE '%' OR ward IS NULL"  # % and : have no other meaning
EXPECTED = pd.DataFrame(
    {
        "id": np.array([1, 2, 3, 4, 4], dtype=np.int64),
        "dose": [40.1, np.nan, 1.25, -7.75, -7.75],
        "short": [7.3, np.nan, 0.1, -0.2, -0.2],
        "ward": pd.Series(["ä b", "B", None, "", "100 %"], dtype=object),
        "died": [1.0, np.nan, 1.0, 0.0, 0.0],
        "beds": np.array([5, -1, 2, 0, 0], dtype=np.int64),
        "day": np.array(["2024-01-03", "NaT", "2023-05-01", *2 * ["0001-01-01"]], dtype="datetime64[us]"),
        "seen": np.array(["2024-01-03T23:30:00.125", "NaT", "2023-05-01T08:00", *2 * ["9999-12-31"]], "M8[us]"),
    }
)
TYPES = (
    "id INTEGER, dose DECIMAL(8, 2), short REAL, ward VARCHAR(20), died BOOLEAN, beds DOUBLE PRECISION, day DATE, "
    "seen TIMESTAMP WITH TIME ZONE"
)


def same(frame: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(frame, EXPECTED, check_exact=True)


def of_sqlite(folder: Path) -> sources.Source:
    pytest.importorskip("sqlalchemy")
    connection = sqlite3.connect(folder / "clinic.db")
    connection.execute(f"CREATE TABLE stays ({COLUMNS.replace('day', 'day TEXT').replace('seen', 'seen TEXT')})")
    connection.executemany(f"INSERT INTO stays VALUES ({', '.join('?' * len(NAMES))})", ROWS)
    connection.commit()
    connection.close()
    return sources.sql(f"sqlite:///{folder / 'clinic.db'}", QUERY, dates=["day", "seen"])


def of_duckdb(folder: Path) -> sources.Source:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect(str(folder / "clinic.duckdb")) as connection:
        connection.execute(f"CREATE TABLE stays ({TYPES})")
        connection.executemany(f"INSERT INTO stays VALUES ({', '.join('?' * len(NAMES))})", ROWS)
        for number, rule in enumerate(["id < 3", "id >= 3"]):
            connection.execute(f"COPY (FROM stays WHERE {rule}) TO '{folder}/it is part {number}.parquet'")
    return sources.duckdb(lambda config: folder / config["file"], QUERY)


def of_parquet(folder: Path) -> sources.Source:
    of_duckdb(folder)
    return sources.parquet(folder / "it is part *.parquet", columns=NAMES)


@pytest.mark.parametrize("made", [of_sqlite, of_duckdb, of_parquet])
def test_the_same_rows_are_the_same_arrays(tmp_path: Path, made: Any) -> None:
    same(made(tmp_path)({"file": "clinic.duckdb"}))


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """Address of a PostgreSQL of this machine."""
    yield from started()


def test_rows_of_a_real_postgresql_are_those_of_a_file(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg

    monkeypatch.setenv("PGTZ", "Asia/Tokyo")  # of the session: times come in another zone
    with psycopg.connect(postgres) as connection:
        connection.execute(f"CREATE TABLE stays ({TYPES})")
        connection.cursor().executemany(f"INSERT INTO stays VALUES ({', '.join(['%s'] * len(NAMES))})", ROWS)
    same(sources.sql(lambda config: postgres, QUERY)())
    asked = sources.sql(lambda config: postgres, "SELECT count(*) AS n, sum(id) AS ids, '10:30'::text AS at FROM stays")
    assert asked().to_dict("list") == {"n": [5], "ids": [14], "at": ["10:30"]}
    with pytest.raises(DataError, match="cannot be read"):
        sources.sql(lambda config: postgres, "DELETE FROM stays")()
    same(sources.sql(lambda config: postgres, QUERY)())  # what a query changes is rolled back


def test_no_password_is_shown(postgres: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not where it is wrong, nor where a sign of it cuts the address in a wrong place."""
    host = postgres.rpartition("@")[2]
    urls = [f"postgresql://reader:{word}@{host}" for word in ("wr0ng", "wr0ng@wr0ng", "wr0ng/wr0ng", "wr%30ng#wr0ng")]
    urls += [f"postgresql://reader@{host}?password=wr0ng", f"postgres://x:wr0ng@{host}", f"reader:wr0ng@{host}"]
    for url in urls:
        with pytest.raises(DeclarationError, match="password|url=") as refused:
            sources.sql(url, "SELECT 1")
        source = sources.sql(lambda config, url=url: url, "SELECT 1")
        with pytest.raises(DataError, match="cannot be read") as failed:
            source()
        for error in (refused, failed):
            assert "wr0ng" not in "".join(traceback.format_exception(error.value)) + caplog.text + repr(source)
    with pytest.raises(DataError, match="authentication failed"):  # the reason stays
        sources.sql(lambda config: urls[0], "SELECT 1")()


def test_a_fit_by_a_query_is_the_fit_by_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"y": rng.normal(size=60), "site": np.repeat(["a", "b", "c"], 20)})
    connection = sqlite3.connect(tmp_path / "y.db")
    frame.sample(frac=1, random_state=1).to_sql("t", connection, index=False)
    connection.close()
    read = sources.sql(f"sqlite:///{tmp_path / 'y.db'}", "SELECT y, site FROM t ORDER BY random()")()
    model = fedppl.formula("y ~ 1 + (1 | site)")
    here, there = (
        fedppl.fit(model, rows, random_seed=1, progressbar=False)
        for rows in (frame.sort_values(["y", "site"], ignore_index=True), read)
    )
    np.testing.assert_array_equal(here.posterior.linear, there.posterior.linear)


def test_digests_are_of_what_is_asked() -> None:
    one = sources.sql("sqlite://", "SELECT 1 AS y,\n2 AS x")
    assert one.digest == sources.sql(lambda config: "postgresql://db/x", " SELECT 1 AS y,\r\n2 AS x ").digest
    others = [
        sources.sql("sqlite://", "SELECT 1 AS y, 2 AS x"),
        sources.sql("sqlite://", "SELECT 1 AS y,\n2 AS x", dates=["y"]),
        sources.duckdb("x.duckdb", "SELECT 1 AS y,\n2 AS x"),
        sources.parquet("a.parquet"),
        sources.parquet("b.parquet"),
        sources.parquet("a.parquet", columns=["y"]),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 7


MADE = datetime.date(2024, 1, 3)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([2**53 - 1, -3], np.array([-3, 2**53 - 1])),
        ([True, 2, decimal.Decimal("3.00"), 4.0], np.array([1, 2, 3, 4])),
        ([decimal.Decimal("0.1"), 1e300, None, float("nan"), decimal.Decimal("NaN")], [0.1, 1e300, *3 * [np.nan]]),
        ([None, None], [np.nan, np.nan]),
        ([float("inf"), 1], [1.0, np.inf]),
        (["b", "B", None, uuid.UUID(int=1)], ["00000000-0000-0000-0000-000000000001", "B", "b", None]),
        ([MADE, None, datetime.datetime(2024, 1, 2, 5)], np.array(["2024-01-02T05", "2024-01-03", "NaT"], "M8[us]")),
    ],
)
def test_one_rule_for_the_values_of_a_column(cells: list[Any], expected: Any) -> None:
    found = _table(["y"], [(cell,) for cell in cells], ())["y"]
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found.to_numpy(), expected)
        assert found.dtype == expected.dtype
    else:
        assert found.dtype in (float, object)
        assert [None if cell is None or cell != cell else cell for cell in found] == [
            None if cell is None or cell != cell else cell for cell in expected
        ]


@pytest.mark.parametrize(
    ("query", "dates", "match"),
    [
        ("SELECT 1 AS y, 2 AS y", (), "rename"),
        ("SELECT 1 AS y UNION ALL SELECT 'a'", (), "numbers and texts; cast"),
        ("SELECT x'00' AS y", (), "bytes; cast"),
        ("SELECT 9007199254740993 AS y", (), "cast it to text"),
        ("SELECT 'tomorrow' AS y", ["y"], "ISO 8601; cast"),
        ("SELECT 20240103 AS y", ["y"], "cast it to dates"),
        ("SELECT 1 AS y", ["z"], "no columns"),
        ("SELECT 1 AS y WHERE 1 = 0", (), "no rows"),
        ("SELECT", (), "cannot be read"),
        ("CREATE TABLE t (y)", (), "cannot be read"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(query: str, dates: Any, match: str) -> None:
    pytest.importorskip("sqlalchemy")
    with pytest.raises(DataError, match=match):
        sources.sql("sqlite://", query, dates=dates)()


def test_a_column_of_nulls_is_one_of_dates_where_it_is_named() -> None:
    assert _table(["y"], [(None,), (None,)], ["y"])["y"].dtype == "datetime64[us]"


def test_settings_that_are_none_are_refused() -> None:
    for arguments, dates, match in (
        (("", "SELECT 1"), (), "url"),
        (("clinic.db", "SELECT 1"), (), "url"),
        (("sqlite://", ""), (), "query"),
        (("sqlite://", "SELECT 1"), "day", "dates"),
    ):
        with pytest.raises(DeclarationError, match=match):
            sources.sql(*arguments, dates=dates)
    for made, match in (
        (lambda: sources.parquet("a.parquet", columns="age"), "columns"),  # type: ignore[arg-type]
        (lambda: sources.parquet(""), "pattern"),
        (lambda: sources.duckdb("", "SELECT 1"), "path"),
        (lambda: sources.duckdb("md:clinic?motherduck_token=x", "SELECT 1"), "environment"),
        (lambda: Policy(allowed_queries="b07a"), "allowed_queries"),  # type: ignore[arg-type]
        (lambda: fedppl.InProcess(policy=Policy(allowed_queries=("b07a",))), "leave them out"),
    ):
        with pytest.raises(DeclarationError, match=match):
            made()
    with pytest.raises(DataError, match="not empty"):
        sources.duckdb(lambda config: config.get("file"), "SELECT 1")()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in (
        ("duckdb", sources.parquet("a.parquet")),
        ("sqlalchemy", sources.sql("sqlite://", "SELECT 1")),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedppl\[(duckdb|sql)\]'"):
            source()
