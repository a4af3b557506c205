"""Partitions: every row once, the kinds that were meant, and sizes as the cuts say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fedppl import data
from fedppl.types import DataError, DeclarationError

LABELS = np.repeat(np.arange(10), 200)[np.random.default_rng(0).permutation(2000)]
SUBCLASSES = LABELS * 5 + np.arange(2000) % 5
SOURCES = np.where(np.arange(2000) % 3 == 0, "a", "b")
WAYS: dict[str, Callable[[int], data.Partition]] = {
    "label skew": lambda seed: data.label_skew(LABELS, 20, 5, random_seed=seed),
    "independent cuts": lambda seed: data.label_skew(LABELS, 20, 5, cuts="independent", random_seed=seed),
    "equal cuts": lambda seed: data.label_skew(LABELS, 20, 5, cuts="equal", random_seed=seed),
    "uneven labels": lambda seed: data.label_skew(LABELS, 7, 3, random_seed=seed),
    "concept drift": lambda seed: data.concept_drift(LABELS, SUBCLASSES, 15, random_seed=seed),
    "dirichlet": lambda seed: data.dirichlet(LABELS, 20, 0.3, random_seed=seed),
    "quantity": lambda seed: data.label_skew(np.zeros(2000), 20, 1, random_seed=seed),
    "feature skew": lambda seed: data.feature_skew(np.where(LABELS < 3, "a", "b"), 9, random_seed=seed),
    "feature skew by label": lambda seed: data.feature_skew(SOURCES, 9, labels=LABELS, each=5, random_seed=seed),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_row_is_at_one_client_and_no_client_is_empty(name: str) -> None:
    for seed in range(5):
        parts = WAYS[name](seed)
        assert_array_equal(np.sort(np.concatenate(list(parts.rows.values()))), np.arange(2000))
        assert min(map(len, parts.rows.values())) >= 1
        assert all(np.all(np.diff(rows) > 0) for rows in parts.rows.values())


@pytest.mark.parametrize("name", WAYS)
def test_a_seed_decides(name: str) -> None:
    first, again, other = WAYS[name](3), WAYS[name](3), WAYS[name](4)
    assert all(np.array_equal(first.rows[k], again.rows[k]) for k in first.rows)
    assert any(not np.array_equal(first.rows[k], other.rows[k]) for k in first.rows)


def test_clients_hold_the_labels_that_they_drew_and_all_labels_are_drawn_equally_often() -> None:
    parts = WAYS["label skew"](1)
    drawn = np.concatenate([np.array(kinds) for kinds in parts.kinds.values()])
    assert_array_equal(np.bincount(drawn), np.full(10, 10))
    for name, rows in parts.rows.items():
        assert set(LABELS[rows]) == set(parts.kinds[name])
        assert len(parts.kinds[name]) == 5


def counts(parts: data.Partition) -> Any:
    """Rows of every label (10, clients)."""
    return np.stack([np.bincount(LABELS[rows], minlength=10) for rows in parts.rows.values()], axis=1)


def test_the_same_cuts_make_large_clients_large_in_all_labels() -> None:
    """Within a label, sizes of the slices are the same numbers for all labels; with independent cuts they are not."""

    def sizes(cuts: str) -> list[list[int]]:
        return [
            sorted(column[column > 0]) for column in counts(data.label_skew(LABELS, 20, 5, cuts=cuts, random_seed=2))
        ]

    same, apart = sizes("same"), sizes("independent")
    assert all(one == same[0] for one in same)
    assert any(one != apart[0] for one in apart)


def test_under_concept_drift_every_client_has_one_subclass_of_every_class() -> None:
    parts = WAYS["concept drift"](0)
    for name, rows in parts.rows.items():
        assert len(parts.kinds[name]) == 10
        assert_array_equal(np.unique(LABELS[rows]), np.arange(10))
        assert all(len(np.unique(SUBCLASSES[rows][LABELS[rows] == label])) == 1 for label in range(10))


def test_equal_cuts_make_slices_of_one_size() -> None:
    """Each of 10 labels of 200 rows is at 10 clients of 20."""
    table = counts(WAYS["equal cuts"](2))
    assert_array_equal(table[table > 0], np.full(100, 20))


def test_with_labels_a_client_has_some_of_them_of_one_source() -> None:
    parts = WAYS["feature skew by label"](1)
    for k, (name, rows) in enumerate(parts.rows.items()):
        assert len(parts.kinds[name]) == 5
        assert set(zip(SOURCES[rows], LABELS[rows], strict=True)) == set(parts.kinds[name])
        assert {source for source, _ in parts.kinds[name]} == {"ab"[k % 2]}


def test_sources_take_turns() -> None:
    parts = WAYS["feature skew"](0)
    assert [kinds[0] for kinds in parts.kinds.values()] == list("ababababa")


def test_slices_are_spread_as_the_paper_says() -> None:
    """M − 1 places cut N rows: a slice's size has mean N / M and, as for spacings, an sd near its mean."""
    sizes = [
        len(r) for seed in range(30) for r in data.label_skew(np.zeros(2000), 20, 1, random_seed=seed).rows.values()
    ]
    assert abs(np.mean(sizes) - 100) < 1e-9
    assert 80 < np.std(sizes) < 110  # 600 spacings, sd of their sd about 4


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: data.label_skew(LABELS, 0, 5), DeclarationError, "clients=0 must be a whole number"),
        (lambda: data.label_skew(LABELS, 4, 5, random_seed="a"), DeclarationError, "random_seed='a' must be"),  # type: ignore[arg-type]
        (lambda: data.label_skew(LABELS, 4, 11), DeclarationError, "each=11 labels a client, and there are 10"),
        (lambda: data.label_skew(LABELS, 2, 3), DeclarationError, "2 clients of 3 labels cannot hold all 10"),
        (lambda: data.label_skew(LABELS, 20, 5, cuts="some"), DeclarationError, "cuts='some' must be"),
        (lambda: data.label_skew(np.arange(10), 20, 10), DataError, "1 rows of . for 20 clients; lower clients="),
        (lambda: data.label_skew(np.array([[1]]), 1, 1), DataError, "labels have shape .1, 1."),
        (lambda: data.label_skew(np.array([1.0, np.nan]), 1, 1), DataError, "labels hold missing"),
        (lambda: data.concept_drift(LABELS, SUBCLASSES, 3), DeclarationError, "3 clients cannot hold a class with 5"),
        (lambda: data.concept_drift(LABELS, LABELS[:5], 3), DataError, "2000 classes and 5 subclasses"),
        (lambda: data.concept_drift(LABELS, np.arange(2000) % 3, 9), DataError, "stands under two classes"),
        (lambda: data.feature_skew(LABELS, 4), DeclarationError, "4 clients cannot hold 10 sources"),
        (lambda: data.label_skew([[1], [1, 2]], 2, 1), DataError, "one value for every row"),
        (lambda: data.label_skew([None] * 20, 2, 1), DataError, "labels are of the types"),
        (lambda: data.label_skew(LABELS * 1j, 2, 1), DataError, "labels are of the types"),
        (lambda: data.label_skew(["a", "b", math.nan], 1, 3), DataError, "labels are of the types"),
        (lambda: data.label_skew([1, "a"], 1, 2), DataError, "labels are of the types"),
        (lambda: data.label_skew(np.array([1.0, math.nan], dtype=object), 1, 2), DataError, "labels hold missing"),
        (lambda: data.label_skew(np.ma.array([1, 2], mask=[0, 1]), 1, 2), DataError, "labels hold masked"),
        (
            lambda: data.label_skew(np.array(["2020", "NaT"], "datetime64[D]"), 1, 2),
            DataError,
            "labels are of the types",
        ),
        (lambda: data.label_skew(np.zeros(3, dtype="i4,i4"), 1, 1), DataError, "labels are of the types"),
        (lambda: data.label_skew(LABELS, 20, 5, cuts=np.array(["equal", "same"])), DeclarationError, "cuts="),
        (lambda: data.feature_skew(SOURCES, 9, labels=LABELS), DeclarationError, "each=None and labels="),
        (lambda: data.feature_skew(SOURCES, 4, labels=LABELS, each=4), DeclarationError, "all 10 labels of 'a'"),
        (lambda: data.feature_skew(SOURCES, 9, labels=LABELS[1:], each=4), DataError, "1999 labels for 2000"),
        (lambda: data.feature_skew(["m", None, "u"], 2), DataError, "sources are of the types"),
        (lambda: data.dirichlet(LABELS, 5, 0.0), DeclarationError, "alpha=0.0 must be positive"),
        (lambda: data.dirichlet(LABELS, 50, 0.001, random_seed=0), DeclarationError, "1,000 draws left a client"),
        (lambda: data.label_skew([0] * 3, 5, 1), DataError, "3 rows of 0 for 5 clients"),
    ],
)
def test_what_cannot_be_divided_is_told(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
