"""The examples and the selection benchmark, run as a user runs them; their last line is JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

import fedppl
from examples import air_temperature, battery, omop, student_performance, trial, turbofan

ROOT = Path(__file__).parents[2]


def run(script: str, *options: str, codes: tuple[int, ...] = (0,)) -> tuple[str, dict[str, Any]]:
    """Run a script; return what it printed, and its last line."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in codes, done.stderr[-2000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert sum(line.startswith("{") for line in done.stdout.splitlines()) == 1
    return done.stdout, last


# --- every example, in a small run ---------------------------------------------------------------------------------


def of_quickstart(printed: str, last: dict[str, Any]) -> None:
    assert last["status"] == "converged" and {"rounds", "seconds"} <= set(last)
    assert last["rmse_federated"] < last["rmse_alone"]
    assert 0.8 < last["new_hospital_coverage"] <= 1
    assert "tau[dose]" in printed and "probability of direction" in printed
    assert 0 < last["probability_with_age"] < 1 and "log_evidence" in printed


def of_hospitals(printed: str, last: dict[str, Any]) -> None:
    errors = {name: score["RMSE, smallest third"] for name, score in last["scores"].items()}
    assert max(errors["pFedVEM"], errors["EP"]) < 0.8 * errors["alone"]


def of_digits(printed: str, last: dict[str, Any]) -> None:
    row = last["rows"]["FedSI, rate 0.01"]
    assert row["accuracy"] > 0.9 > 0.25 > row["ECE"]


def of_students(printed: str, last: dict[str, Any]) -> None:
    assert {"splits", "pupils", "lasso", "ridge", "OLS", "max_abs_difference", "max_excess_over_single"} <= set(last)
    # The bar is 0.005 with enough draws; a quick run has 200.
    assert last["max_abs_difference"] < 0.01
    assert 0.6 < last["lasso"]["federated"] < 1.1
    assert "lasso, central" in printed


def of_batteries(printed: str, last: dict[str, Any]) -> None:
    assert {"repeats", "seed", "quick", "target", "new", "below_igp", "seconds"} <= set(last)
    errors = last["target"]["mse"]
    assert {"IGP", battery.MAIN, "FedLMC, ascent", "FedLMC-SS, averaging", "LMC-SS, central"} <= set(errors)
    assert errors[battery.MAIN] < errors["IGP"] / 10
    assert last["new"]["functions"][battery.MAIN_NEW] == last["target"]["functions"][battery.MAIN]


def of_stations(printed: str, last: dict[str, Any]) -> None:
    assert {"days", "seeds", "quick", "stations", "seconds"} <= set(last)
    table = last["stations"]["Cambermet"]
    assert {"IGP", "FedLMC-SS", "FedLMC-selected", "FedLMC-all", "FedLMC-SS, averaging"} <= set(table)
    assert all(np.isfinite(list(row.values())).all() for row in table.values())
    assert table["FedLMC-SS"]["mse"] < 5 and table["FedLMC-selected"]["functions"] == table["FedLMC-SS"]["functions"]


def of_engines(printed: str, last: dict[str, Any]) -> None:
    assert {"scale", "seed", "quick", "sensors", "engines", "seconds"} <= set(last)
    assert (last["engines"], list(last["sensors"])) == (10, ["2"])
    figures = last["sensors"]["2"]
    assert {turbofan.MAIN, "EP-HM2", *turbofan.BASELINES} <= set(figures["a_rmse"])
    # Cubic least squares extrapolates badly, with ten engines as with a hundred; HM1 does not.
    assert figures["a_rmse"][turbofan.MAIN] < figures["a_rmse"]["Separate, degree 3"]
    assert all(0.3 < share < 1 for share in figures["coverage"].values())
    assert "Table 4" in printed


def of_trial(printed: str, last: dict[str, Any]) -> None:
    assert last["status"] == ["converged", "converged"] and last["kept"]
    for figures, truth in ((last["log_odds"], trial.HEALED["arm"]), (last["log_time"], trial.LIVED["arm"])):
        assert abs(figures[0] - truth) < 3 * figures[1]
    assert f"'weight' at client '{trial.POUNDS}'" in printed and "in kg, odd: 0" in printed


def of_omop(printed: str, last: dict[str, Any]) -> None:
    assert last["status"] == "converged" and f'allowed_queries = ["{last["query"]}"]' in printed
    assert 0.95 < sum(last["rows"].values()) / sum(omop.HOSPITALS.values()) <= 1
    for name, truth in omop.TRUTH.items():
        mean, sd = last["log_odds"][name if name in last["log_odds"] else f"center({name})"]
        assert abs(mean - truth) < 3 * sd


class Example(NamedTuple):
    """A script, options that make it small, what it has to say in the end, and what it needs."""

    script: str
    options: tuple[str, ...]
    holds: Callable[[str, dict[str, Any]], None]
    data: str = ""  # folder of its data set, where it has one
    package: str = ""  # that it needs beside the others


EXAMPLES = {
    "quickstart": Example("quickstart", (), of_quickstart),
    "trial": Example("trial", (), of_trial),
    "omop": Example("omop", (), of_omop, package="duckdb"),
    "hospitals": Example(
        "hospitals", ("--hospitals", "4", "--patients", "240", "--rounds", "30", "--seed", "1"), of_hospitals
    ),
    "digits": Example("digits", ("--rounds", "3"), of_digits, package="torch"),
    "student performance": Example("student_performance", ("--quick",), of_students, "student_performance"),
    "battery": Example("battery", ("--quick", "--central"), of_batteries, "sanyo48_battery"),
    "air temperature": Example("air_temperature", ("--quick", "--averaging", "3"), of_stations, "south_coast_air_temp"),
    "turbofan": Example("turbofan", ("--quick", "--scale", "zscore"), of_engines, "cmapss_fd001"),
    "turbofan, other scale": Example("turbofan", ("--quick", "--scale", "minmax"), of_engines, "cmapss_fd001"),
}


def test_every_example_is_in_the_list() -> None:
    assert {example.script for example in EXAMPLES.values()} == {path.stem for path in ROOT.glob("examples/*.py")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES])
def test_an_example_runs_and_holds_what_it_shows(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    example, options = EXAMPLES[name], list(EXAMPLES[name].options)
    if example.package:
        pytest.importorskip(example.package)
    if example.data:
        folder: Path = request.getfixturevalue("data_dir")
        if not (folder / example.data).is_dir():
            pytest.skip(f"{example.data} not found in the folder of the data sets")
        options += ["--data", str(folder)]
    figure = tmp_path / "figure.png"
    example.holds(*run(f"examples/{example.script}.py", *options, "--figure", str(figure)))
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize("example", [student_performance, battery, air_temperature, turbofan])
def test_absent_data_end_in_a_message_that_names_the_remedy(example: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--data or FEDPPL_DATA") as ending:
        example.find_data(tmp_path)
    assert isinstance(ending.value.code, str)  # Python prints it and exits with code 1


# --- students: training rows alone --------------------------------------------------------------------------------


def pupils(rows: int = 60) -> pd.DataFrame:
    """Two schools with one numeric predictor and one nominal one."""
    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "school": np.repeat(["GP", "MS"], [rows // 3, rows - rows // 3]),
            "age": rng.integers(15, 20, rows),
            "sex": rng.choice(["F", "M"], rows),
            "G3": rng.integers(0, 20, rows),
        }
    )


def schools_of(table: pd.DataFrame) -> dict[str, student_performance.School]:
    schools = {}
    for name, part in table.groupby("school"):
        X = pd.DataFrame({"age": part["age"].astype(float), "sex_M": (part["sex"] == "M").astype(float)})
        train = np.arange(len(part)) % 5 < 3
        schools[str(name)] = student_performance.School(X, part["G3"].astype(float), train)
    return schools


def test_standardising_from_sums_is_standardising_the_pooled_training_rows() -> None:
    table = pupils()
    schools = schools_of(table)
    splits = student_performance.standardise(schools, ["age"])
    training = np.concatenate([split.X[:, 0] for split in splits.values()])
    grades = np.concatenate([split.y for split in splits.values()])
    np.testing.assert_allclose([training.mean(), grades.mean()], 0, atol=1e-12)
    np.testing.assert_allclose([training.std(), grades.std()], 1, rtol=1e-12)
    np.testing.assert_array_equal(splits["MS"].X[:, 1], schools["MS"].X["sex_M"][schools["MS"].train])


def test_test_rows_do_not_touch_the_training_rows() -> None:
    table = pupils()
    schools = schools_of(table)
    changed = {}
    for name, school in schools.items():
        X, y = school.X.copy(), school.y.copy()
        X.loc[~school.train], y.loc[~school.train] = 100.0, -50.0
        changed[name] = school._replace(X=X, y=y)
    before, after = (student_performance.standardise(s, ["age"]) for s in (schools, changed))
    for name in schools:
        np.testing.assert_array_equal(before[name].X, after[name].X)
        np.testing.assert_array_equal(before[name].y, after[name].y)
        assert not np.allclose(before[name].y_test, after[name].y_test)


def test_the_real_table_gives_38_predictors_and_60_percent_of_either_school(data_dir: Path) -> None:
    table = student_performance.load(student_performance.find_data(data_dir), drop_zero_grades=False)
    schools, numeric = student_performance.divide(table, seed=0)
    assert len(numeric) == 13
    assert {name: school.X.shape for name, school in schools.items()} == {"GP": (423, 38), "MS": (226, 38)}
    assert {name: int(school.train.sum()) for name, school in schools.items()} == {"GP": 254, "MS": 136}
    again, _ = student_performance.divide(table, seed=0)
    other, _ = student_performance.divide(table, seed=1)
    np.testing.assert_array_equal(schools["MS"].train, again["MS"].train)
    assert np.any(schools["MS"].train != other["MS"].train)


@pytest.mark.slow
def test_variable_selection_finds_the_predictors() -> None:
    settings = ("--rounds", "2", "--draws", "200", "--final-draws", "200", "--processes", "1")
    _, last = run("benchmarks/variable_selection.py", "--runs", "1", "--cases", "I", *settings)
    assert set(last) == {"runs", "I", "seconds"}
    assert set(last["I"]) == {"correct", "false", "a_rmse_noisy", "a_rmse_noise_free", "skipped"}
    assert last["I"]["skipped"] <= 2  # of 20 replies
    assert last["I"]["correct"] == 1.0
    assert last["I"]["a_rmse_noise_free"] < 0.03


def test_the_flower_apps_local_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deployable app's declaration with the embedded engine, on simulated clinics."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "flower_app"))
    importlib.import_module("make_data").main([str(tmp_path)])
    importlib.import_module("local").main([str(tmp_path)])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["status"] == "converged"
    assert len(figures["linear"]) == 6  # mu and tau of three predictors


def test_the_policies_of_the_clinics_let_them_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "flower_app"))
    importlib.import_module("make_policies").main([str(tmp_path)])
    found = {path.stem: fedppl.policy.read(path) for path in tmp_path.iterdir()}
    assert set(found) == {"north", "south", "west"}
    patients = sum(importlib.import_module("make_data").CLINICS.values())
    assert fedppl.policy.refuse_data(found["north"], 6, fedppl.policy.Holdings(patients, None, sites=3)) is None
