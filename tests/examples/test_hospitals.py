"""The example of hospitals, and pFedVEM's benchmark: who holds what, that test rows choose nothing, and short runs."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from examples import hospitals


def test_every_patient_is_in_one_hospital_and_small_ones_come_first() -> None:
    world = hospitals.simulate(hospitals.arguments(["--seed", "3"]))
    sizes = [len(data["y"]) for data in world.clients.values()]
    assert sum(sizes) == 2400 and sizes == sorted(sizes) and list(world.truth) == list(world.clients)


@pytest.mark.parametrize("argv", [["--hospitals", "1"], ["--patients", "10"], ["--strength", "-1"], ["--seed", "-1"]])
def test_arguments_out_of_range_end_with_a_message(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hospitals.arguments(argv)
    assert "at least" in capsys.readouterr().err


# --- the benchmark -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fashion-MNIST's files, with few rows whose label shows in their pixels."""
    rng, where = np.random.default_rng(0), tmp_path / "fashion_mnist"
    where.mkdir()
    for part, rows in (("train", 600), ("t10k", 200)):
        labels = np.resize(np.arange(10), rows).astype(np.uint8)
        pixels = rng.integers(0, 80, size=(rows, 784), dtype=np.uint8)
        pixels[np.arange(rows)[:, None], labels[:, None] * 70 + np.arange(70)] += 120
        with gzip.open(where / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + pixels.tobytes())
        with gzip.open(where / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + labels.tobytes())
    return tmp_path


@pytest.fixture
def benchmark() -> Any:
    pytest.importorskip("torch")
    from benchmarks import pfedvem

    return pfedvem


@pytest.fixture
def fitting() -> Any:
    pytest.importorskip("torch")
    from benchmarks._pfedvem import fit

    return fit


def test_training_rows_are_at_one_client_each_and_test_rows_at_none(benchmark: Any, fitting: Any, folder: Path) -> None:
    options = benchmark.arguments(["--data", str(folder), "--seeds", "1"])
    setting = fitting.prepare("pFedVEM", 0, options)
    assert sum(len(data["y"]) for data in setting.clients.values()) == 600
    assert len(setting.everyone) == 200
    parts = fitting.divide(fitting.load(folder, "fmnist")[0], options, 0)
    assert_array_equal(np.sort(np.concatenate(list(parts.rows.values()))), np.arange(600))
    for name, rows in setting.own.items():
        assert set(setting.scored.labels[rows]) == set(parts.kinds[name])
    everything = np.concatenate([data["X"] for data in setting.clients.values()])
    assert_allclose([everything.mean(), everything.std()], [0.0, 1.0], atol=1e-4)  # test rows have no part in this


def test_settings_are_tried_on_training_rows_that_are_held_out(benchmark: Any, fitting: Any, folder: Path) -> None:
    argv = ["--data", str(folder), "--seeds", "1", "--methods", "FedProx", "--validation", "0.25"]
    whole = fitting.prepare("FedProx", 0, benchmark.arguments([*argv[:-1], "0"]))
    setting = fitting.prepare("FedProx", 0, benchmark.arguments([*argv, "--set", "proximal=0.5", "batch_size=10"]))
    assert len(setting.scored.labels) == 600  # training rows, and no others
    kept = sum(len(data["y"]) for data in setting.clients.values())
    assert kept + len(setting.everyone) == 600 and len(np.unique(setting.everyone)) == len(setting.everyone)
    assert 120 <= len(setting.everyone) <= 180
    for name, rows in setting.own.items():
        assert len(rows) + len(setting.clients[name]["y"]) == len(whole.clients[name]["y"])
    assert setting.algorithm.settings["proximal"] == "0.5" and setting.algorithm.settings["batch_size"] == "10"


def test_personal_accuracies_are_those_of_what_the_library_predicts(benchmark: Any, fitting: Any, folder: Path) -> None:
    setting = fitting.prepare("FedPer", 0, benchmark.arguments(["--data", str(folder), "--seeds", "1"]))
    run: dict[str, Any] = {"rounds": 1, "progressbar": False, "random_seed": 0, "reporting": 0.2}
    fit = fedppl.fit(setting.model, setting.clients, setting.algorithm, **run)
    found = fitting.personal_accuracies(setting, dict.fromkeys(setting.clients, fit))
    for name in list(setting.clients)[:5]:
        rows = setting.own[name]
        said = fedppl.nn.predict(fit, name, {"X": setting.scored.pixels[rows]}, link="map")["logit"].values.argmax(1)
        assert_allclose(found[name], 100 * np.mean(said == setting.scored.labels[rows]))


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--validation", "0.7"], "must lie between 0 and 0.5"),
        (["--set", "proximal"], "must be NAME=VALUE"),
        (["--set", "proximal=x y"], "must be NAME=VALUE"),
        (["--set", "proximal=1.0"], "--set goes with one method"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    argv: list[str], match: str, benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.arguments(argv)
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    "method", ["FedAvg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pFedVEM", "FedPer"))]
)
def test_a_short_run_has_its_figures_and_an_interrupted_one_goes_on(
    method: str, benchmark: Any, fitting: Any, folder: Path, tmp_path: Path
) -> None:
    here = tmp_path / "results"
    here.mkdir()
    argv = ["--data", str(folder), "--seeds", "1", "--rounds", "3", "--methods", method, "--folder", str(here)]
    options = benchmark.arguments([*argv, "--every", "2"])
    found = fitting.one_fit((method, 0), options)
    row = benchmark.figures(found, options)
    assert ("PM" in row) is (method != "FedAvg") and ("GM last" in row) is (method in ("pFedVEM", "FedAvg"))
    assert fitting.one_fit((method, 0), options) == found  # from the file
    assert sorted(path.suffix for path in here.iterdir()) == [".json", ".settings"]
    if method == "pFedVEM":
        assert set(found["PM"]) == {"2", "3"} and set(found["GM"]) == {"1", "2", "3"}


def test_bars_are_judged_by_the_last_ten_rounds_and_not_by_the_best(benchmark: Any) -> None:
    options = benchmark.arguments([])
    found = {
        "method": "pFedVEM",
        "seed": 0,
        "seconds": 1.0,
        "PM": {"100": {"a": 90.0, "b": 94.0, "c": 92.0, "d": 92.0}},
        "GM": {str(k): 50.0 + 0.3 * k for k in range(1, 101)} | {"40": 99.0},
        "sizes": {"a": 10, "b": 100, "c": 50, "d": 60},
    }
    row = benchmark.figures(found, options)
    assert row["PM"] == 92.0 and row["smallest 10 %"] == 90.0
    assert_allclose(row["GM last 10"], 50 + 0.3 * 95.5)
    assert row["GM best (on test)"] == 99.0
    table = pd.DataFrame([row], index=["pFedVEM"])
    judged = dict(benchmark.bars(table, pd.DataFrame(), options))
    assert [met for text, met in judged.items() if text.startswith("GM")] == [True]
    assert [met for text, met in judged.items() if text.startswith("PM")] == [True]
