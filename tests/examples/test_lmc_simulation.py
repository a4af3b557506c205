"""The benchmark of FedLMC-SS's simulations: its curves, its oracle, its bars, and a run of a small problem."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy.stats import norm

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import lmc_simulation as simulation

import fedppl


def test_the_covariance_has_six_eigenfunctions() -> None:
    K = simulation.covariance(simulation.X, simulation.X)
    assert np.linalg.matrix_rank(K, hermitian=True) == 6
    assert_allclose(simulation.features(simulation.X) @ simulation.features(simulation.X).T, K, atol=1e-12)
    at = np.exp(-(1 + 0.25) / 10) * (np.cos(0.5) + np.cos(1.0) + np.cos(1.5))
    assert_allclose(simulation.covariance(np.array([1.0]), np.array([0.5])), [[at]])


def test_the_oracle_is_the_regression_on_the_six_functions() -> None:
    problem = simulation.generate(3)
    found = simulation.oracle(problem, 0)
    rows = ~problem.missing[0]
    phi = simulation.features(simulation.X)
    precision = phi[rows].T @ phi[rows] / 0.04 + np.eye(6)
    mean = phi @ np.linalg.solve(precision, phi[rows].T @ problem.noisy[0, rows] / 0.04)
    sd = np.sqrt(np.sum(phi * np.linalg.solve(precision, phi.T).T, axis=1) + 0.04)
    assert_allclose(found["mean"], mean, atol=1e-8)
    assert_allclose(found["ci_high"], mean + norm.ppf(0.95) * sd, atol=1e-8)
    assert_allclose(found["ci_low"], mean - norm.ppf(0.95) * sd, atol=1e-8)


def test_a_run_is_the_papers() -> None:
    problem = simulation.generate(4)
    assert problem.curves.shape == (20, 100)
    assert_allclose(problem.noisy, simulation.generate(4).noisy)
    assert np.std(problem.noisy - problem.curves) == pytest.approx(0.2, rel=0.05)
    assert np.std(problem.fresh - problem.curves) == pytest.approx(0.2, rel=0.05)
    assert (
        abs(np.corrcoef((problem.fresh - problem.curves).ravel(), (problem.noisy - problem.curves).ravel())[0, 1]) < 0.1
    )
    count = problem.missing.sum(axis=1)  # points are 10 / 99 apart
    assert count[0] in (29, 30) and np.all(count[1:10] == 0) and np.all(np.isin(count[10:], (19, 20)))
    assert np.all(np.diff(np.flatnonzero(problem.missing[0])) == 1)
    assert len(simulation.seen(problem, 0)["y"]) == 100 - count[0]


def test_every_reading_of_a_known_error() -> None:
    curves, missing = np.zeros((1, 100)), np.zeros((1, 100), dtype=bool)
    missing[0, :30] = True
    problem = simulation.Problem(curves, curves + 2.0, curves + 4.0, missing)
    mean = np.where(missing[0], 1.0, 0.0)
    found = simulation.figures(problem, 0, {"mean": mean, "ci_low": mean - 3.5, "ci_high": mean + 3.5})
    assert found == {
        "all noisy": pytest.approx(0.3 * 1 + 0.7 * 4),
        "all curve": pytest.approx(0.3),
        "missing noisy": 1.0,
        "missing curve": 1.0,
        "outside": 0.0,
        "inside": 1.0,
        "own": 1.0,
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--runs", "0"], "at least 1"),
        (["--processes", "0"], "at least 1"),
        (["--rounds", "0"], "at least 1"),
        (["--methods", "EP"], "invalid choice"),
        (["--figure", "no/such/folder/a.png"], "no folder"),
    ],
)
def test_bad_options(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        simulation.arguments(given)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_the_papers_figures() -> None:
    assert {name: row[0] for name, row in simulation.PAPER.items()} == {
        "IGP": 0.2265,
        "LMC": 0.0536,
        "LMC-SS": 0.0454,
        "FedLMC-avg": 0.2073,
        "FedLMC-SS-avg": 0.0942,
    }
    assert [row[2] for row in simulation.PAPER.values()] == [None, 9.1, 6.0, 10.0, 6.7]
    assert [row[0] for row in simulation.PAPER_NEW.values()] == [0.3101, 0.8248, 0.1521]
    assert set(simulation.PAPER) <= set(simulation.METHODS)


def made_up(run: int, methods: list[str], rounds: int | None, new: bool) -> list[dict[str, Any]]:
    """Records as of a run: the oracle's MSE is 0.04, FedLMC-SS's 0.045, the others' 0.06."""
    fixed = {**dict.fromkeys((*simulation.READINGS, *simulation.COVERAGE), 0.9), "run": run}
    mse = {"Oracle": 0.04, **dict.fromkeys(methods, 0.06), "FedLMC-SS": 0.045, "FedLMC-SS-selected": 0.045}
    extra = {"selected": 6, "seconds": 5.0}
    return [
        {**fixed, "table": "I", "method": "Oracle", "all noisy": mse["Oracle"]},
        *({**fixed, "table": "I", "method": name, "all noisy": mse[name], **extra} for name in methods),
        *({**fixed, "table": "II", "method": n, "all noisy": mse[n]} for n in ("Oracle", "FedLMC-SS-selected") if new),
    ]


def test_tables_bars_and_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Here(contextlib.nullcontext[None]):
        """The pool, without a process of its own."""

        def __enter__(self) -> Any:
            return self

        def map(self, job: Callable[[int], Any], runs: range) -> Iterator[Any]:
            return map(job, runs)

    monkeypatch.setattr(simulation, "ProcessPoolExecutor", lambda processes, mp_context: Here())
    monkeypatch.setattr(simulation, "one_run", made_up)
    assert simulation.main(["--runs", "2"]) == 0
    said = capsys.readouterr()
    assert "0.2265 ± 0.1486" in said.out and "6.7000 ± 1.6364" in said.out
    assert said.out.count("met: ") == 8 and "nan" not in said.out
    assert "run 1: Oracle 0.0400; IGP 0.0600" in said.err
    line = json.loads(said.out.splitlines()[-1])
    assert line["missed"] == [] and line["units"]["FedLMC-SS"]["all noisy"] == 0.045
    assert simulation.main(["--runs", "1", "--methods", "IGP", "--skip-new"]) == 0
    assert "met: " not in capsys.readouterr().out

    monkeypatch.setattr(simulation, "timing", lambda: ({50: 0.1, 100: 0.3}, 1.58))
    assert simulation.main(["--runs", "1", "--methods", "FedLMC-SS", "--skip-new", "--timing"]) == 1
    assert "MISSED: a round's time grows with the rows to the power 1.58" in capsys.readouterr().out


def test_what_misses_a_bar() -> None:
    columns = ["all noisy", "outside", "seconds"]
    units = pd.DataFrame([[0.08, 0.95, 25.0], [0.07, 0.9, 1.0]], ["FedLMC-SS", "FedLMC"], columns)
    new = pd.DataFrame([[0.06], [0.04]], ["FedLMC-SS-selected", "Oracle"], columns[:1])
    judged = simulation.bars(units, new, pd.Series([6, 6, 6, 7]))
    assert len(judged) == 6 and not any(met for _, met in judged)


@pytest.mark.slow
def test_a_small_problem_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"UNITS": 2, "NEW": 1, "X": np.linspace(-5, 5, 20), "LATENTS": 2, "INDUCING": 6}.items():
        monkeypatch.setattr(simulation, name, value)
    small = {f"FedLMC{name}": simulation.Method(fedppl.curves.Ascent, 5, name == "-SS", 2) for name in ("", "-SS")}
    monkeypatch.setattr(simulation, "METHODS", small)
    records = simulation.one_run(0, list(small), None, True)
    assert [(r["table"], r["method"]) for r in records] == [
        ("I", "Oracle"),
        ("I", "FedLMC"),
        ("I", "FedLMC-SS"),
        ("II", "Oracle"),
        ("II", "FedLMC-all"),
        ("II", "FedLMC-selected"),
        ("II", "FedLMC-SS-selected"),
        ("II", "FedLMC-SS-fixed"),
    ]
    assert all(np.isfinite(r[name]) for r in records for name in (*simulation.READINGS, *simulation.COVERAGE))
    assert records[1]["selected"] == 2 and records[2]["selected"] <= 2
