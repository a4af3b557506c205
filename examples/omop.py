"""Three hospitals with OMOP databases: who comes back within 30 days of a first stay with heart failure.

Cohort and covariates are one query, `examples/omop.sql`, that a committee can read and a site's policy can list by its
digest. The example makes a small synthetic database a hospital, reads each by that query, and fits in this process as
sites would under masks: the server gets sums over the hospitals alone. Needs `fedppl[duckdb]`; no data files.

    python examples/omop.py --figure omop.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedppl

QUERY = Path(__file__).with_name("omop.sql").read_text(encoding="utf-8")
HOSPITALS = {"Aarhus": 420, "Bergen": 260, "Cork": 180}  # persons with heart failure
HEART_FAILURE, DIABETES, PNEUMONIA = 316139, 201820, 255848
INPATIENT, OUTPATIENT, SYSTOLIC, WOMAN, MAN = 9201, 9202, 3004249, 8532, 8507  # concepts of OMOP
TRUTH = {"age": 0.03, "sex[male]": 0.3, "diabetes": 0.8, "systolic": -0.015}  # log odds
LEVEL, SPREAD = -0.9, 0.3  # log odds at 72 years and 130 mmHg, and the sd of hospitals' own levels
FORMULA = "readmitted ~ center(age) + sex + diabetes + center(systolic) + (1 | hospital)"
TABLES = {
    "person": "person_id INTEGER, gender_concept_id INTEGER, year_of_birth INTEGER",
    "visit_occurrence": "visit_occurrence_id INTEGER, person_id INTEGER, visit_concept_id INTEGER, "
    "visit_start_date DATE, visit_end_date DATE",
    "condition_occurrence": "person_id INTEGER, condition_concept_id INTEGER, condition_start_date DATE, "
    "visit_occurrence_id INTEGER",
    "measurement": "measurement_id INTEGER, person_id INTEGER, measurement_concept_id INTEGER, "
    "measurement_date DATE, value_as_number DOUBLE PRECISION",
}


def simulate(rng: np.random.Generator, persons: int) -> dict[str, list[tuple[Any, ...]]]:
    """Rows of a hospital's tables; the cohort is among others: minors, other diagnoses, no blood pressure."""
    tables: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
    own = rng.normal(0, SPREAD)
    for person in range(1, 2 * persons + 1):
        is_case, is_man, has_diabetes = person <= persons, rng.random() < 0.55, rng.random() < 0.35
        age, systolic = (
            int(rng.normal(72, 11)) if is_case else int(rng.uniform(5, 95)),
            float(round(rng.normal(130, 18))),
        )
        begin = pd.Timestamp("2020-01-01") + pd.Timedelta(days=int(rng.integers(0, 1700)))
        end = begin + pd.Timedelta(days=int(rng.integers(2, 15)))
        tables["person"].append((person, MAN if is_man else WOMAN, begin.year - age))
        condition = HEART_FAILURE if is_case else PNEUMONIA
        visits = [(INPATIENT, begin, end, condition), (OUTPATIENT, end, end, PNEUMONIA)]
        chance = own + LEVEL + TRUTH["age"] * (age - 72) + TRUTH["systolic"] * (systolic - 130)
        chance += TRUTH["sex[male]"] * is_man + TRUTH["diabetes"] * has_diabetes
        back = int(rng.integers(1, 31) if rng.random() < 1 / (1 + np.exp(-chance)) else rng.integers(31, 300))
        again = end + pd.Timedelta(days=back)
        visits.append((INPATIENT, again, again + pd.Timedelta(days=3), condition))
        for kind, start, stop, reason in visits:
            visit = len(tables["visit_occurrence"]) + 1
            tables["visit_occurrence"].append((visit, person, kind, start.date(), stop.date()))
            tables["condition_occurrence"].append((person, reason, start.date(), visit))
        if has_diabetes:
            tables["condition_occurrence"].append((person, DIABETES, begin.date(), None))
        for days, value in ((400, 190.0), (20, systolic + 9), (1, systolic)):
            if rng.random() < 0.97:
                row = len(tables["measurement"]) + 1, person, SYSTOLIC, (begin - pd.Timedelta(days=days)).date(), value
                tables["measurement"].append(row)
    return tables


def write(tables: dict[str, list[tuple[Any, ...]]], path: Path) -> None:
    """Make a DuckDB file of a hospital's tables."""
    import duckdb

    with duckdb.connect(str(path)) as connection:
        for name, columns in TABLES.items():
            connection.execute(f"CREATE TABLE {name} ({columns})")
            connection.execute("BEGIN")
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(tables[name][0]))})", tables[name])
            connection.execute("COMMIT")


def main(argv: list[str] | None = None) -> None:
    """Make the databases, read the cohort of each, fit, and print what is known of readmission."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--figure", type=Path, help="draw the effects here")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("duckdb") is None:
        sys.exit("the databases are DuckDB's: pip install 'fedppl[duckdb]'")
    if options.figure and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--figure needs matplotlib: pip install 'fedppl[plots]'")
    for name in ("pymc", "fedppl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pd.set_option("display.width", 160)
    begun, rng = time.perf_counter(), np.random.default_rng(options.seed)

    sources, clients = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, persons in HOSPITALS.items():
            write(simulate(rng, persons), Path(folder) / f"{name}.duckdb")
            sources[name] = fedppl.sources.duckdb(Path(folder) / f"{name}.duckdb", QUERY)
            clients[name] = sources[name]()
    (digest,) = {source.digest for source in sources.values()}
    print(f'The query, as the policy of each hospital lists it: allowed_queries = ["{digest}"]')
    print("\nRows by hospital, which only its own site sees")
    print(pd.DataFrame({name: rows.mean(numeric_only=True) for name, rows in clients.items()}).round(2).to_string())

    model = fedppl.formula(FORMULA, "bernoulli", levels={"sex": ["female", "male"]})
    fit = fedppl.fit(model, clients, engine=fedppl.InProcess(secure=True), random_seed=options.seed)
    print(f"\n{FORMULA}: {fit.status} after {len(fit.records)} rounds, by sums under masks alone")
    summary = fit.summary()
    print(summary.iloc[:, :4].round(3).to_string())
    if options.figure is not None:
        import matplotlib

        matplotlib.use("Agg")
        axes = fedppl.plots.prior_posterior(fit, ["diabetes", "hospital_sd"])
        np.ravel(axes)[0].figure.savefig(options.figure, dpi=100)
        print(f"wrote {options.figure}")
    line = {
        "status": str(fit.status),
        "query": digest,
        "rows": {name: len(rows) for name, rows in clients.items()},
        "log_odds": {name: [round(float(x), 4) for x in row[["mean", "sd"]]] for name, row in summary.iterrows()},
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
