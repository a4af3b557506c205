"""The cohort of the OMOP example: its query against the same in pandas, on DuckDB and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("duckdb")

from examples import omop
from fedppl import sources
from tests.support.postgres import started


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """Address of a PostgreSQL of this machine."""
    yield from started()


@pytest.fixture(scope="module")
def tables() -> dict[str, list[tuple[object, ...]]]:
    """Of one small hospital, with persons whom the cohort leaves out."""
    made = omop.simulate(np.random.default_rng(1), 60)
    made["person"][0] = (1, omop.MAN, 2019)  # a child
    made["person"][1] = (2, 0, 1950)  # neither sex
    made["measurement"] = [row for row in made["measurement"] if row[1] != 3]
    return made


def read_by_duckdb(tables: dict[str, list[tuple[object, ...]]], folder: Path) -> pd.DataFrame:
    omop.write(tables, folder / "clinic.duckdb")
    return sources.duckdb(folder / "clinic.duckdb", omop.QUERY)()


def test_the_query_finds_the_cohort(tables: dict[str, list[tuple[object, ...]]], tmp_path: Path) -> None:
    found = read_by_duckdb(tables, tmp_path)
    names = {name: [column.split()[0] for column in columns.split(", ")] for name, columns in omop.TABLES.items()}
    frames = {name: pd.DataFrame(rows, columns=names[name]) for name, rows in tables.items()}
    reasons = frames["condition_occurrence"].merge(frames["visit_occurrence"], on=["visit_occurrence_id", "person_id"])
    cases = reasons[reasons["condition_concept_id"] == omop.HEART_FAILURE].groupby("person_id")
    first = cases["visit_start_date"].min().rename("begin").to_frame().join(cases["visit_end_date"].min().rename("end"))
    first["back"] = cases["visit_start_date"].max()
    rows = frames["person"].set_index("person_id").join(first, how="inner")
    pressures = frames["measurement"].merge(first.reset_index(), on="person_id")
    recent = pressures[(pressures["end"] - pressures["measurement_date"]).map(lambda gap: gap.days) <= 365]
    rows = rows.join(recent.sort_values("measurement_date").groupby("person_id")["value_as_number"].last(), how="inner")
    rows["age"] = rows["begin"].map(lambda day: day.year) - rows["year_of_birth"]
    rows = rows[(rows["age"] >= 18) & (rows["gender_concept_id"] != 0)]
    sick = frames["condition_occurrence"].query(f"condition_concept_id == {omop.DIABETES}")["person_id"]
    expected = pd.DataFrame(
        {
            "readmitted": (rows["back"] - rows["end"]).map(lambda gap: int(0 < gap.days <= 30)),
            "age": rows["age"],
            "sex": rows["gender_concept_id"].map({omop.WOMAN: "female", omop.MAN: "male"}).astype(object),
            "diabetes": rows.index.isin(sick).astype(int),
            "systolic": rows["value_as_number"].astype(int),
        }
    )
    assert 50 < len(expected) < 58
    pd.testing.assert_frame_equal(
        found, expected.sort_values(list(expected), ignore_index=True), check_dtype=False, check_exact=True
    )


def test_postgresql_has_the_same_rows(
    tables: dict[str, list[tuple[object, ...]]], tmp_path: Path, postgres: str
) -> None:
    import psycopg

    with psycopg.connect(postgres) as connection:
        for name, columns in omop.TABLES.items():
            connection.execute(f"CREATE TABLE {name} ({columns})")
            places = ", ".join(["%s"] * len(tables[name][0]))
            connection.cursor().executemany(f"INSERT INTO {name} VALUES ({places})", tables[name])
    found = sources.sql(lambda config: postgres, omop.QUERY)()
    pd.testing.assert_frame_equal(found, read_by_duckdb(tables, tmp_path), check_exact=True)
