"""The rule on few rows in units of a cohort's sum: closed forms, what it lets pass, and what it still refuses."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import fedppl
from benchmarks._attacks import patients
from fedppl import DeclarationError, Policy, gaussian
from fedppl.contracts import Asked
from fedppl.engine import few_rows_in_sums as in_sums
from fedppl.engine.few_rows import refuse_model
from fedppl.engine.policy import Holdings
from fedppl.numerics.concentration import concentration, share_in_sum

SITES, ROWS = 5, 90
RULES = Policy(requests=200)


def marks(rows: Any, n: int = ROWS) -> Any:
    found = np.zeros(n)
    found[rows] = 1.0
    return found


# Shares --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("few", [1, 2, 3])
@pytest.mark.parametrize("others", [0, 2, 9])
def test_the_share_is_the_largest_over_all_sets_of_rows(few: int, others: int) -> None:
    rng = np.random.default_rng(others)
    found = []
    for _ in range(8):
        X = rng.normal(size=(12, 3)) * np.exp(rng.normal(size=(12, 1)))
        beside = rng.normal(size=(others, 3))
        G = X.T @ X + beside.T @ beside
        sets = [list(rows) for rows in itertools.combinations(range(12), few)]
        exact = max(np.linalg.eigvalsh(X[rows] @ np.linalg.solve(G, X[rows].T))[-1] for rows in sets)
        found.append(share_in_sum(X, G, few) / exact)
        if not others:
            assert share_in_sum(X, G, few) == pytest.approx(concentration(X, few), abs=1e-12)
        assert share_in_sum(X, G, few) <= concentration(X, few) + 1e-9
    assert np.max(found) <= 1.0 + 1e-9 and np.min(found) > 0.95  # climbs may end below the maximum
    assert np.median(found) == pytest.approx(1.0, abs=1e-9)


def test_directions_that_nobody_has_are_none_and_one_of_this_client_alone_is_its_own() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 300, 4))
    one[:, 3] = other[:, 3] = 0.0
    assert share_in_sum(one, one.T @ one + other.T @ other, 3) < 0.2
    assert share_in_sum(np.zeros((0, 4)), other.T @ other, 3) == share_in_sum(one[:0], np.zeros((4, 4)), 3) == 0.0
    one[7, 3] = 1e-3
    assert share_in_sum(one, one.T @ one + other.T @ other, 3) > 0.999
    other[:30, 3] = 1e-3
    assert share_in_sum(one, one.T @ one + other.T @ other, 3) == pytest.approx(1 / 31, abs=0.1)


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-9])
@pytest.mark.parametrize("error", [0.0, 1e-12])
def test_what_is_hidden_in_a_noise_column_is_seen_in_the_sum(size: float, error: float) -> None:
    """The other sites have the same columns but for the indicator, and a sum that is known but within an error."""
    rng = np.random.default_rng(1)
    turn = rng.normal(size=(4, 4))
    noise = rng.normal(size=(SITES, 400, 3))
    designs = [np.column_stack([own, own @ [1.0, -2.0, 0.5]]) for own in noise]
    designs[0][7, 3] += size
    turned = [design @ turn for design in designs]
    wrong = error * rng.uniform(-1, 1, size=(4, 4))
    G = np.sum([design.T @ design for design in turned], axis=0) + wrong + wrong.T
    assert share_in_sum(turned[0], G, 3, error=2 * error) > 0.999
    assert share_in_sum(turned[1], G, 3, error=2 * error) < 0.97


def splines(rng: Any) -> Any:
    """An honest logistic design's rows: a cubic B-spline with four knots, and another number."""
    n = int(rng.integers(250, 2001))
    x = rng.normal(size=n)
    knots = np.maximum(x[:, None] - [-0.84, -0.25, 0.25, 0.84], 0.0) ** 3
    X = np.column_stack([np.ones(n), x, x**2, x**3, knots, rng.normal(size=n)])
    mean = 1.0 / (1.0 + np.exp(1.0 - X[:, [1, -1]] @ rng.normal(0, 0.7, size=2)))
    return X * np.sqrt(mean * (1.0 - mean))[:, None]


def test_honest_splines_whose_edges_one_patient_owns_pass_in_sums() -> None:
    rng = np.random.default_rng(2)
    alone, together = [], []
    for _ in range(40):
        designs = [splines(rng) for _ in range(SITES)]
        G = np.sum([X.T @ X for X in designs], axis=0)
        alone += [concentration(X, 3) for X in designs]
        together += [share_in_sum(X, G, 3, error=1e-15) for X in designs]
    refused = np.array(together) >= Policy().few_rows_share
    assert np.mean(np.array(alone) >= Policy().few_rows_share) > 0.01
    assert np.sum(refused) <= 1, np.sort(together)[-5:]


# Fits in one process -------------------------------------------------------------------------------------------------


def cohort(kind: str) -> dict[str, dict[str, Any]]:
    """Five sites, of which the first has a last column of its own."""
    rng = np.random.default_rng(3)
    data = {}
    for site in range(SITES):
        x = rng.normal(size=ROWS)
        level = marks([4] if site == 0 else rng.choice(ROWS, 30, replace=False))
        last = {
            "level": level,
            "indicator": level * (site == 0),
            "hidden in noise": 0.8 * x + 1e-3 * level * (site == 0),
            "honest": rng.normal(size=ROWS),
        }[kind]
        y = (rng.random(ROWS) < 1.0 / (1.0 + np.exp(0.5 - x - 0.5 * level))).astype(int)
        data[f"site {site}"] = {"X": np.column_stack([np.ones(ROWS), x, last]), "y": y}
    return data


# Single entries of the Hessian ---------------------------------------------------------------------------------------


def rule_in_sums(designs: list[Any], rules: Policy = RULES) -> str:
    """The rule by which the first of five sites refuses, at the prior's mean, or "None"."""
    y = np.arange(ROWS) % 2
    data = {f"site {site}": {"X": X, "y": y} for site, X in enumerate(designs)}
    first, *others = model().enrol(data, kernel=False).values()
    holdings = Holdings(ROWS * SITES, None, SITES)
    nowhere = np.zeros((0, first.layout.size))
    assert in_sums.fails_alone(rules, first, None)

    def sums(at: Any) -> Any:
        return np.sum([in_sums.numbers(client, at, holdings) for client in (first, *others)], axis=0)

    rule, _ = in_sums.refuse_points(rules, first, Asked(nowhere, nowhere), np.zeros(0), holdings, sums)
    return "entries" if rule and "entries" in rule else str(rule).partition(":")[0]


ENTRIES = {
    "a level": (lambda rng, level, here: [level], "None"),
    "a cell of two levels": (lambda rng, level, here: [level, marks([4] if here else _elsewhere(level))], "None"),
    "a number that nobody else has in that level": (
        lambda rng, level, here: [level, rng.normal(size=ROWS) * (1.0 if here else 1.0 - level)],
        "entries",
    ),
    "a number that looks like a code here": (
        lambda rng, level, here: [
            level * (2.0 if here else rng.normal(size=ROWS)),
            marks([4] if here else _elsewhere(level)),
        ],
        "entries",
    ),
}


def _elsewhere(level: Any) -> Any:
    return np.flatnonzero(level == 0.0)[:20]


@pytest.mark.parametrize("kind", ENTRIES)
def test_entries_of_one_row_are_refused_in_units_of_the_sum_unless_they_count_a_cell(kind: str) -> None:
    columns, expected = ENTRIES[kind]
    rng = np.random.default_rng(5)
    designs = []
    for site in range(SITES):
        level = marks([4] if site == 0 else rng.choice(ROWS, 30, replace=False))
        designs.append(np.column_stack([np.ones(ROWS), *columns(rng, level, site == 0)]))
    assert rule_in_sums(designs) == expected


def test_numbers_that_one_site_lacks_are_refused_where_they_are_needed() -> None:
    """Slopes that overflow at another site: who passes alone still answers."""
    rng = np.random.default_rng(6)
    designs = [np.column_stack([np.ones(ROWS), marks([4] if site == 0 else np.arange(30))]) for site in range(SITES)]
    assert rule_in_sums(designs) == "None"
    designs[3][:, 0] = 1e200 * rng.normal(size=ROWS)
    assert rule_in_sums(designs) == "few_rows"


@functools.cache
def model() -> fedppl.FederatedModel:
    return fedppl.FederatedModel(patients.logistic, ["beta"])


def fit(data: Any, policy: Policy | None, *, secure: bool = True) -> fedppl.Fit:
    engine = fedppl.InProcess(policy=policy, secure=secure, workers=1)
    return fedppl.fit(model(), data, fedppl.Sums(), engine=engine, progressbar=False, random_seed=1)


def test_a_level_that_one_row_has_here_and_others_elsewhere_is_fitted_in_sums() -> None:
    data = cohort("level")
    clients = model().enrol(data, kernel=False)
    alone = [str(refuse_model(RULES, client)).partition(":")[0] for client in clients.values()]
    assert alone == ["few_rows", *["None"] * (SITES - 1)]
    looked_at, plain = fit(data, RULES), fit(data, None, secure=False)
    assert looked_at.status is plain.status is fedppl.Status.CONVERGED
    sd = gaussian.standard_deviations(plain.posterior)
    assert_allclose(gaussian.mean(looked_at.posterior) / sd, gaussian.mean(plain.posterior) / sd, rtol=0, atol=1e-6)
    assert_allclose(gaussian.standard_deviations(looked_at.posterior), sd, rtol=1e-6)


@pytest.mark.parametrize("kind", ["indicator", "hidden in noise"])
def test_what_one_row_of_one_site_has_alone_is_refused_in_sums_too(kind: str) -> None:
    with pytest.raises(DeclarationError, match="few_rows"):
        fit(cohort(kind), RULES)
