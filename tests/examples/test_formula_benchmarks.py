"""What the benchmarks of formulas compare with: meta-analyses by hand, pieces of time, and both in a small run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import fedppl
from benchmarks._families import by_hand, cases
from benchmarks._rare import trials
from benchmarks.rare_events import results
from tests.examples.test_examples import run


def trial(events: Any, patients: Any) -> trials.Trial:
    return trials.Trial(np.array(events), np.array(patients), 0.0)


def test_a_fixed_meta_analysis_is_woolfs_mean_of_log_odds_ratios() -> None:
    """Two sites, no zero: weights 1 / Σ 1/cell."""
    found = trials.meta_analysis(trial([[4, 8], [3, 2]], [[50, 52], [40, 41]]), random=False)
    ratio = np.array([np.log(8 * 46 / (4 * 44)), np.log(2 * 37 / (3 * 39))])
    weight = 1 / np.array([1 / 4 + 1 / 8 + 1 / 46 + 1 / 44, 1 / 3 + 1 / 2 + 1 / 37 + 1 / 39])
    mean, half = weight @ ratio / weight.sum(), 1.6448536 / np.sqrt(weight.sum())
    assert found is not None
    assert_allclose(found, [mean, mean - half, mean + half], rtol=1e-7)


def test_a_zero_gets_one_half_and_a_site_without_events_is_left_out() -> None:
    found = trials.meta_analysis(trial([[0, 3], [0, 0]], [[30, 30], [20, 20]]), random=False)
    assert found is not None
    assert_allclose(found.mean, np.log(3.5 * 30.5 / (0.5 * 27.5)))
    assert_allclose(found.upper - found.mean, 1.6448536 * np.sqrt(1 / 0.5 + 1 / 3.5 + 1 / 30.5 + 1 / 27.5), rtol=1e-7)
    assert trials.meta_analysis(trial([[0, 0]], [[20, 20]]), random=True) is None


def test_variance_between_sites_is_that_of_moments() -> None:
    """With equal variances v, DerSimonian and Laird's is the sample variance of the ratios less v."""
    found = trials.meta_analysis(trial([[10, 30], [30, 10]], [[40, 40], [40, 40]]), random=True)
    ratio, v = np.log(9) * np.array([1, -1]), 2 * (1 / 10 + 1 / 30)
    assert found is not None
    assert_allclose(found.mean, 0.0, atol=1e-12)
    between = max(0.0, np.var(ratio, ddof=1) - v)
    assert_allclose(found.upper, 1.6448536 * np.sqrt((v + between) / 2), rtol=1e-7)


def test_a_row_for_each_patient_has_the_events_of_its_arm() -> None:
    made = trials.simulate(np.random.default_rng(0), varying=True)
    each = trials.patients(made).groupby(["site", "arm"])["event"].agg(["sum", "count"])
    assert_allclose(each.to_numpy(), trials.rows(made).set_index(["site", "arm"])[["events", "patients"]].to_numpy())


def test_figures_are_of_errors_and_of_intervals_that_hold_the_truth() -> None:
    rows = [
        {
            "truth": truth,
            "fedppl": [truth + 0.1, truth - 1, truth + 1],
            "pooled": [truth + 0.2, truth - 1, truth + (1 if k else -0.5)],
            "fixed": None if k == 1 else [truth - 0.3, truth, truth + 1],
            "random": [0.0, -1.0, 1.0],
            "holds": {"fedppl": 0.8 + 0.1 * k, "pooled": 0.9, "fixed": 0.9, "random": 0.9},
            "sd": [0.5, 0.4],
            "status": "converged",
        }
        for k, truth in enumerate([0.5, -0.5, 2.0, 3.0])
    ]
    found = results(rows)
    assert found["fedppl"]["bias"] == [0.1, 0.0] and found["fedppl"]["rmse"] == [0.1, 0.0]
    assert found["fedppl_against_pooled"]["rmse_ratio"] == [0.5, 0.0]
    assert (found["fedppl"]["coverage"][0], found["pooled"]["coverage"][0]) == (1.0, 0.75)
    assert found["fixed"]["trials"] == 3 and found["random"]["coverage"][0] == 0.5
    assert found["fedppl_against_pooled"]["mean_apart_in_sd"] == [0.25, 0.25]
    # over the pooled posterior N(pooled, 0.4²): 0.1² for the mean that is off, beside 0.4²
    expected = found["expected"]["fedppl"]
    assert_allclose(expected["rmse_over_pooled"], [np.sqrt(1 + 1 / 16), 0.0], atol=1e-4)
    assert_allclose(expected["bias"], [-0.1, 0.0], atol=1e-4)
    assert_allclose(expected["coverage"][0], 0.95)
    assert found["bars"] == {"coverage": False, "rmse": False}


def test_pieces_of_time_have_the_likelihood_of_a_hazard_that_is_constant_in_each() -> None:
    """Σ of Poisson log densities, less what no rate moves, is log h(t) of events less the cumulative hazard."""
    frame = pd.DataFrame({"time": [2.0, 4.0, 7.0, 20.0], "event": [1, 0, 1, 1]})
    case = next(one for one in cases.CASES if one.family == "piecewise")
    rows, y, extra = case.arrays(frame)
    assert extra is not None
    rate = np.array([0.2, 0.1, 0.3])
    each = np.where(y == 1, np.log(rate[extra[:, 1].astype(int)]), 0.0) - rate[extra[:, 1].astype(int)] * extra[:, 0]
    cumulative = np.array([0.4, 0.8, 0.8 + 0.3, 0.8 + 0.8 + 8 * 0.3])
    exact = np.array([np.log(0.2), 0.0, np.log(0.1), np.log(0.3)]) - cumulative
    assert_allclose(np.bincount(rows, each), exact)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.family)
def test_a_model_by_hand_is_what_the_formula_declares(case: cases.Case) -> None:
    """Log densities of a site's model differ by a constant, whatever the variables are."""
    frame = cases.simulate(case, 1)
    declared = fedppl.formula(case.formula, case.family, constants=dict(case.constants))
    formula = fedppl.agree(declared, frame, by="site").model.builder
    hand, clients = by_hand.federated(case, frame)
    models = formula(**formula.read("site 4", frame[frame["site"] == "site 4"])), hand.builder(**clients["site 4"])
    start, rng, apart = models[1].initial_point(), np.random.default_rng(0), []
    densities = [one.compile_logp(mode="FAST_COMPILE") for one in models]
    for _ in range(4):
        at = {name: value + 0.3 * rng.normal(size=np.shape(value)) for name, value in start.items()}
        as_formula = {("site_z" if name == "z" else name): value for name, value in at.items()}
        packed = as_formula.pop("site_covariance_cholesky-cov-packed__", None)
        change = 0.0
        if packed is not None:  # of two effects: a root's entries by hand, sds and a correlation in the formula
            first, below, last = np.exp(packed[0]), packed[1], np.exp(packed[2])
            second = np.hypot(below, last)
            as_formula["site_sd_log__"] = np.log([first, second])
            as_formula["site_partial_logodds__"] = np.array([2.0 * np.arcsinh(below / last)])
            change = np.log(2.0 / second)  # |d (log sds, log odds) / d packed|
        apart.append(float(densities[0](as_formula)) + change - float(densities[1](at)))
    assert_allclose(apart, apart[0], atol=1e-3)  # shares of levels are those of 256 rows that stand for all


@pytest.mark.slow
def test_rare_events_are_kept_and_gone_on_with(tmp_path: Path) -> None:
    options = ("--draws", "200", "--file", str(tmp_path / "rare.jsonl"))
    _, first = run("benchmarks/rare_events.py", "--repetitions", "1", *options)
    _, last = run("benchmarks/rare_events.py", "--repetitions", "2", *options)
    assert (first["repetitions"], last["repetitions"]) == (1, 2)
    assert last["fedppl_against_pooled"]["mean_apart_in_sd"][1] < 0.3 and last["by_patients_apart"] < 0.01
    assert {"fedppl", "pooled", "fixed", "random", "expected", "bars"} <= set(last)


@pytest.mark.slow
def test_a_family_is_the_model_written_by_hand() -> None:
    printed, last = run("benchmarks/families.py", "--families", "binomial", "--draws", "1000")
    (row,) = last["families"]
    assert row["bars"]["status"] and row["z_common"] < 0.2 and row["builder_apart"] < 0.05
    assert set(row["variables"]) == {"Intercept", "x", "arm", "site_sd"}
    assert "skipped" in last["reml"] or last["reml"]["bars"] == {"status": True, "z": True}
