"""Who is asked: everyone, a fixed number, each with a probability; never no one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, chisquare

from fedppl import DeclarationError
from fedppl.run.one_round import as_participation

CLIENTS = ("a", "b", "c", "d")


def test_everyone_is_asked(rng: np.random.Generator) -> None:
    assert as_participation(None)(CLIENTS, rng) == CLIENTS


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_fixed_number_of_different_clients_in_their_order(size: int, rng: np.random.Generator) -> None:
    for _ in range(20):
        asked = as_participation(size)(CLIENTS, rng)
        assert len(set(asked)) == size
        assert list(asked) == sorted(asked)


def test_a_fixed_number_above_all_is_all(rng: np.random.Generator) -> None:
    assert as_participation(9)(CLIENTS, rng) == CLIENTS


def test_a_fixed_number_is_uniform_over_subsets(rng: np.random.Generator) -> None:
    """Six pairs of four clients, equally likely; p below 1e-3 would be a fault, not chance."""
    count = Counter(as_participation(2)(CLIENTS, rng) for _ in range(1200))
    assert len(count) == 6
    assert chisquare(list(count.values())).pvalue > 1e-3


def test_bernoulli_is_the_binomial_without_its_zero(rng: np.random.Generator) -> None:
    """P(n asked) = Binom(n; 4, 0.3) / (1 − 0.7⁴), and all clients are alike."""
    rounds = [as_participation(0.3)(CLIENTS, rng) for _ in range(2000)]
    numbers = Counter(len(asked) for asked in rounds)
    expected = binom.pmf(np.arange(1, 5), 4, 0.3) / (1 - 0.7**4)
    assert chisquare([numbers[n] for n in range(1, 5)], 2000 * expected).pvalue > 1e-3
    each = Counter(client for asked in rounds for client in asked)
    assert chisquare([each[client] for client in CLIENTS]).pvalue > 1e-3


@pytest.mark.parametrize("probability", [1e-12, 1e-300])
def test_a_tiny_probability_asks_one_client_without_waiting(probability: float, rng: np.random.Generator) -> None:
    assert len(as_participation(probability)(CLIENTS, rng)) == 1


def test_equal_seeds_choose_equal_clients() -> None:
    for choose in (as_participation(2), as_participation(0.4)):
        first, second = ([choose(CLIENTS, np.random.default_rng(s)) for s in range(10)] for _ in range(2))
        assert first == second
        assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("value", "count"), [(None, 4), (2, 2), (np.int64(3), 3), (1.0, 4), (np.float32(1.0), 4), (lambda c, r: ("a",), 1)]
)
def test_the_keyword_is_read_by_its_type(value: Any, count: int, rng: np.random.Generator) -> None:
    assert len(as_participation(value)(CLIENTS, rng)) == count


@pytest.mark.parametrize("value", [0, -1, 0.0, -0.5, 1.5, float("nan"), True, "all", ["a"]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(DeclarationError, match="participation="):
        as_participation(value)


@pytest.mark.parametrize("chosen", ["ab", b"ab", [["a"]], ["a", 1], 3, None])
def test_functions_that_return_no_list_of_clients_are_refused(chosen: Any, rng: np.random.Generator) -> None:
    with pytest.raises(DeclarationError, match="participation= is a function that"):
        as_participation(lambda clients, rng: chosen)(CLIENTS, rng)


@pytest.mark.parametrize("chosen", [["a"], {"a"}, np.array(["a"]), iter(("a",))])
def test_functions_may_return_any_collection_of_clients(chosen: Any, rng: np.random.Generator) -> None:
    assert as_participation(lambda clients, rng: chosen)(CLIENTS, rng) == ("a",)
