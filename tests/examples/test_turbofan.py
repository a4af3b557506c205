"""The turbofan example's own functions, and a quick run of it on the real engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedppl
from examples import turbofan
from examples.turbofan import Engine, Result, Row, Split
from tests.support import problems

ROOT = Path(__file__).parents[2]


def table(lives: tuple[int, ...] = (20, 31, 43)) -> pd.DataFrame:
    """Engines whose sensors drift, in the columns of C-MAPSS."""
    rng = np.random.default_rng(4)
    blocks = []
    for unit, life in enumerate(lives, start=1):
        cycles = np.arange(1, life + 1)
        settings, sensors = np.zeros((life, 3)), 600 + 0.1 * cycles[:, None] + rng.normal(size=(life, 21))
        blocks.append(np.column_stack([np.full(life, unit), cycles, settings, sensors]))
    return pd.DataFrame(np.concatenate(blocks)).astype({0: int, 1: int})


def with_other_tests(engines: dict[str, Engine]) -> dict[str, Engine]:
    """The same training rows, and nonsense in the test rows."""
    changed = {}
    for name, engine in engines.items():
        values = engine.values.copy()
        values[engine.train :] = 1e4
        changed[name] = engine._replace(values=values)
    return changed


def test_the_first_60_percent_of_an_engines_cycles_are_for_training() -> None:
    engines = turbofan.divide(table(), sensor=7)
    assert {name: engine.train for name, engine in engines.items()} == {"engine 1": 12, "engine 2": 19, "engine 3": 26}
    rows = table()
    np.testing.assert_array_equal(engines["engine 2"].values, rows[rows[0] == 2][11])  # sensor 1 is column 5
    for name, split in turbofan.scaled(engines, "zscore").items():
        np.testing.assert_array_equal(np.concatenate([split.cycles, split.cycles_test]), engines[name].cycles)
        assert len(split.y) == engines[name].train == split.cycles.max() < split.cycles_test.min()


def test_z_scores_from_sums_are_those_of_the_pooled_training_rows() -> None:
    splits = turbofan.scaled(turbofan.divide(table(), sensor=2), "zscore")
    pooled = np.concatenate([split.y for split in splits.values()])
    np.testing.assert_allclose([pooled.mean(), pooled.std()], [0, 1], atol=1e-6)  # 600² cancels in the variance


def test_the_other_scale_is_each_engines_own_training_range() -> None:
    for split in turbofan.scaled(turbofan.divide(table(), sensor=2), "minmax").values():
        np.testing.assert_allclose([split.y.min(), split.y.max()], [0, 1], atol=1e-12)
        assert split.y_test.max() > 1  # the drift goes on: the test range is not used


@pytest.mark.parametrize("scale", ["zscore", "minmax"])
def test_test_rows_change_nothing_in_training(scale: str) -> None:
    engines = turbofan.divide(table(), sensor=3)
    before, after = (turbofan.scaled(e, scale) for e in (engines, with_other_tests(engines)))
    for name in engines:
        np.testing.assert_array_equal(before[name].y, after[name].y)
        assert not np.allclose(before[name].y_test, after[name].y_test)


@problems.few_rounds
@pytest.mark.slow
def test_test_rows_change_nothing_in_a_fit_or_a_choice() -> None:
    engines = turbofan.divide(table(), sensor=3)
    fits, choices = [], []
    for rows in (engines, with_other_tests(engines)):
        task = turbofan.Task(3, turbofan.scaled(rows, "zscore"), seed=1, quick=True, bands=False)
        average = fedppl.HM1(structure=fedppl.covariance.moving_average(0.1))
        fits.append(turbofan.columns(turbofan.run(task, "regression", average, rounds=3)))
        candidates = turbofan.grid(fedppl.averaging.FedAvg, {"learning_rate": [0.01, 0.1]})
        choices.append(list(turbofan.search(task, "squared error", candidates, rounds=3).values()))
        choices.append(turbofan.least_squares(task)["Separate, tuned"].setting)
    for name in engines:
        np.testing.assert_array_equal(fits[0][name], fits[1][name])
    assert choices[:2] == choices[2:]


def test_a_sensor_that_does_not_vary_is_refused() -> None:
    constant = table()
    constant[5] = 518.67
    for scale in ("zscore", "minmax"):
        with pytest.raises(SystemExit, match="does not vary"):
            turbofan.scaled(turbofan.divide(constant, sensor=1), scale)


def test_a_rmse_is_the_mean_over_engines_of_each_ones_root_mean_square() -> None:
    none = np.zeros(0)
    splits = {
        "a": Split(none, none, np.array([300.0, 600.0]), np.array([6.0, 5.0])),  # x = 1 and 2
        "b": Split(none, none, np.array([150.0]), np.array([0.0])),
    }
    coefficients = {"a": np.array([1.0, 2.0]), "b": np.array([1.0, 2.0, 4.0])}  # forecasts 3, 5 and 3
    found = turbofan.rmse(splits, coefficients)
    np.testing.assert_allclose(found, [np.sqrt(9 / 2), 3.0], rtol=1e-12)


def test_intervals_hold_what_they_promise_when_the_model_is_right(rng: np.random.Generator) -> None:
    """Noise of sd 0.5 around a known line, so that 90 % of the test cycles lie within."""
    cycles = np.arange(1.0, 1001.0)
    y = 1 + cycles / 300 + 0.5 * rng.normal(size=1000)
    draws = turbofan.Draws(np.tile([1.0, 1.0], (1000, 1)), np.full(1000, 0.5))
    found = turbofan.covered({"a": Split(cycles[:0], y[:0], cycles, y)}, {"a": draws}, seed=1)
    assert abs(found - 0.9) < 4 * np.sqrt(0.9 * 0.1 / 1000)  # four standard errors of a binomial share


def test_differences_are_paired_over_engines_and_the_best_baseline_has_the_smallest_mean() -> None:
    rows = {
        turbofan.MAIN: Row(np.array([1.0, 3.0]), ""),
        "Separate, tuned": Row(np.array([2.0, 3.0]), ""),
        "Separate, degree 2": Row(np.array([2.0, 2.4]), ""),
    }
    rows |= {name: Row(np.array([4.0, 5.0]), "") for name in turbofan.BASELINES if name not in rows}
    np.testing.assert_allclose(turbofan.difference(rows, "Separate, tuned"), (-0.5, 0.5))
    assert turbofan.best_of(rows, ["Separate, tuned"]) == ("Separate, tuned", pytest.approx(0.2))
    assert turbofan.best_of(rows, turbofan.in_hindsight(rows))[0] == "Separate, degree 2"
    met = turbofan.expectations({99: Result(rows, {}, 0.0)})
    assert list(met.values()) == [True, True]  # 20 and 9 % below them
    close = rows | {"Separate, degree 2": Row(np.array([1.0, 3.1]), "")}
    assert list(turbofan.expectations({99: Result(close, {}, 0.0)}).values()) == [True, False]


def test_the_figure_shows_engines_from_the_shortest_life_to_the_longest() -> None:
    splits = turbofan.scaled(turbofan.divide(table((40, 20, 30, 25, 35)), sensor=2), "zscore")
    assert turbofan.shown(splits)[0] == "engine 2" and turbofan.shown(splits)[-1] == "engine 1"
    assert len(set(turbofan.shown(splits))) == 4


@pytest.fixture
def turbofan_data(data_dir: Path) -> Path:
    if not (data_dir / "cmapss_fd001").is_dir():
        pytest.skip("C-MAPSS not found: put train_FD001.txt into cmapss_fd001 in the folder that FEDPPL_DATA names")
    return data_dir


def test_the_real_file_has_100_engines(turbofan_data: Path) -> None:
    engines = turbofan.divide(turbofan.load(turbofan.find_data(turbofan_data)), sensor=2)
    lives = [len(engine.values) for engine in engines.values()]
    assert (len(lives), min(lives), max(lives), sum(lives)) == (100, 128, 362, 20631)
    assert all(np.array_equal(engine.cycles, np.arange(1, len(engine.values) + 1)) for engine in engines.values())
