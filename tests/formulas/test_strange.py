"""Columns that are other ones at one client: swapped or in another unit are named, honest ones are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedppl.formulas.agreement import Told, strange, strange_levels, tell

Draw = Callable[[np.random.Generator, int], Any]


def told(*columns: Any) -> dict[str, dict[str, Told]]:
    return {str(k): tell({"x": np.asarray(x)}, ["x"], [], 1) for k, x in enumerate(columns)}


HONEST: dict[str, Draw] = {
    "normal": lambda rng, n: rng.normal(60, 9, n),
    "means as far apart as rows": lambda rng, n: rng.normal(60, 9) + rng.normal(0, 9, n),
    "log-normal": lambda rng, n: np.exp(rng.normal(size=n)),
    "t with 3 df": lambda rng, n: rng.standard_t(3, size=n),
    "counts": lambda rng, n: rng.poisson(0.5, n),
    "zeros and ones": lambda rng, n: rng.random(n) < 0.3,
    "sds that differ": lambda rng, n: np.exp(0.5 * rng.normal()) * rng.normal(size=n),
}


@pytest.mark.parametrize("case", HONEST)
def test_honest_clients_of_five_rows_raise_no_alarm(case: str) -> None:
    """At most one data set of a thousand; 300 of each kind have none, or one by chance (P(2 or more) = 0.04)."""
    rng = np.random.default_rng(1)
    alarms = sum(bool(strange(told(*(HONEST[case](rng, 5) for _ in range(clients))))) for clients in [3, 6, 12] * 100)
    assert alarms <= 1


def by_slope(kind: str, spread: float, slopes: float) -> Draw:
    """Outcomes with a logarithm for a link, whose intercept and slope vary by client."""

    def draw(rng: np.random.Generator, n: int) -> Any:
        eta = 1 + spread * rng.normal() + (0.5 + slopes * rng.normal()) * rng.normal(size=n)
        mean = np.exp(eta)
        kinds = {
            "poisson": lambda: rng.poisson(mean),
            "gamma": lambda: mean * rng.gamma(2, 0.5, n),
            "lognormal": lambda: np.exp(eta + 0.5 * rng.normal(size=n)),
        }
        return kinds[kind]()

    return draw


@pytest.mark.parametrize("kind", ["poisson", "gamma", "lognormal"])
@pytest.mark.parametrize(("spread", "slopes"), [(0.5, 0.3), (0.8, 0.4)])
def test_outcomes_that_differ_by_multiples_raise_no_alarm(kind: str, spread: float, slopes: float) -> None:
    """Sites a few times as large as others, with slopes of their own; at most two data sets of a hundred."""
    draw, rng, alarms = by_slope(kind, spread, slopes), np.random.default_rng(5), 0
    for clients in [3, 6, 12, 40] * 25:
        alarms += bool(strange(told(*(draw(rng, 30) for _ in range(clients)))))
    assert alarms <= 2


@pytest.mark.parametrize("kind", ["poisson", "gamma", "lognormal"])
def test_another_unit_is_found_among_outcomes_that_differ_by_multiples(kind: str) -> None:
    draw, rng, found = by_slope(kind, 0.5, 0.3), np.random.default_rng(4), 0
    for clients in [4, 6, 12, 40] * 10:
        named = strange(told(1e6 * draw(rng, 30), *(draw(rng, 30) for _ in range(clients - 1))))
        found += any("at client '0'" in one for one in named)
    assert found >= 38


def height(rng: np.random.Generator) -> Any:
    return rng.normal(170 + 2 * rng.normal(), 10, 20)


def age(rng: np.random.Generator) -> Any:
    return rng.normal(60 + 2 * rng.normal(), 9, 20)


ODD: dict[str, tuple[Any, Any, str]] = {
    "heights for ages": (age, height, "mean"),
    "ages for heights": (height, age, "mean"),
    "metres": (height, lambda rng: height(rng) / 100, "size"),
    "Fahrenheit": (lambda rng: rng.normal(37, 0.5, 20), lambda rng: 32 + 1.8 * rng.normal(37, 0.5, 20), "mean"),
    "thousands": (lambda rng: rng.exponential(5, 20), lambda rng: 1000 * rng.exponential(5, 20), "size"),
    "a sd that is 25 times as large": (lambda rng: rng.normal(0, 1, 100), lambda rng: rng.normal(0, 28, 100), "sd"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_another_column_is_named(case: str) -> None:
    usual, odd, what = ODD[case]
    rng = np.random.default_rng(2)
    for clients in (5, 12, 40):  # of so many, one is held against all
        found = strange(told(odd(rng), *(usual(rng) for _ in range(clients - 1))))
        assert len(found) == 1 and "'x' at client '0'" in found[0] and what in found[0]


def test_of_many_clients_what_is_usual_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort of all clients' moments for each of them would be quadratic."""
    calls, sort, rng = [], np.sort, np.random.default_rng(3)
    monkeypatch.setattr(np, "sort", lambda values: calls.append(len(values)) or sort(values))
    counts = []
    for clients in (50, 500):
        summaries = told(*rng.normal(size=(clients, 4)))
        calls.clear()
        strange(summaries)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_where_nothing_can_be_said_nothing_is() -> None:
    assert strange(told([1.0, 2.0], [1000.0, 2000.0])) == []  # one of two: which?
    beds = [[40.0] * 5, [700.0] * 5, [90.0] * 5, [120.0] * 5]  # a column of clients
    assert strange(told(*beds)) == []
    assert strange({"a": {"x": Told(0, 0.0, 0.0, {}, False)}} | told(*beds[:2])) == []


@pytest.mark.parametrize(
    ("levels", "odd"),
    [
        (["FM", "FM", "F", "12"], [3]),
        (["FM", "FM", "12", "F1"], []),  # they have one in common
        (["ab", "cd", "ef", "gh"], []),  # each has its own, as wards have
        (["FM", "12"], []),  # one of two: which?
    ],
)
def test_a_client_that_codes_levels_otherwise_is_named(levels: list[str], odd: list[int]) -> None:
    told = {f"s{k}": {"sex": Told(9, 0.0, 0.0, dict.fromkeys(one, 4), False, True)} for k, one in enumerate(levels)}
    found = strange_levels(told)
    assert len(found) == len(odd) and all(f"at client 's{k}'" in one for k, one in zip(odd, found, strict=True))
