"""Calibration against cases worked out by hand, and against a well-kept library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, roc_auc_score

from fedppl import DataError, metrics

# Confidences 0.95, 0.85, 0.65, 0.65; right, wrong, right, wrong.
PROBABILITY = np.array([[0.95, 0.05], [0.15, 0.85], [0.65, 0.35], [0.35, 0.65]])
LABEL = np.array([0, 0, 0, 0])


def test_bins_by_hand() -> None:
    found = metrics.reliability(PROBABILITY, LABEL, bins=10)
    assert_allclose(found.rows, [0, 0, 0, 0, 0, 0, 2, 0, 1, 1])
    assert_allclose(found.confidence[[6, 8, 9]], [0.65, 0.85, 0.95])
    assert_allclose(found.accuracy[[6, 8, 9]], [0.5, 0.0, 1.0])
    assert np.all(np.isnan(found.accuracy[:6]))


def test_errors_by_hand() -> None:
    """ECE = ½ · 0.15 + ¼ · 0.85 + ¼ · 0.05, MCE = 0.85; Brier = mean of 2 (1 − p_y)²."""
    assert metrics.expected_calibration_error(PROBABILITY, LABEL, bins=10) == pytest.approx(0.3)
    assert metrics.maximum_calibration_error(PROBABILITY, LABEL, bins=10) == pytest.approx(0.85)
    assert metrics.brier(PROBABILITY, LABEL) == pytest.approx(np.mean(2 * np.array([0.05, 0.85, 0.35, 0.65]) ** 2))
    assert metrics.accuracy(PROBABILITY, LABEL) == 0.5


def test_an_edge_belongs_to_the_bin_below() -> None:
    found = metrics.reliability(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([0, 0]), bins=2)
    assert_allclose(found.rows, [1, 1])


def test_entropy_by_hand() -> None:
    assert_allclose(metrics.entropy(np.array([[0.5, 0.5], [1.0, 0.0]])), [np.log(2), 0.0])


@pytest.fixture
def drawn(rng: np.random.Generator) -> tuple[Any, Any]:
    logits = rng.normal(size=(500, 2))
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return probability, rng.integers(0, 2, size=500)


def test_the_library_has_the_same_brier_score_of_two_classes(drawn: tuple[Any, Any]) -> None:
    """Which counts one of the two."""
    probability, label = drawn
    assert metrics.brier(probability, label) == pytest.approx(2 * brier_score_loss(label, probability[:, 1]))


def test_the_library_has_the_same_bins(drawn: tuple[Any, Any]) -> None:
    probability, label = drawn
    right, sure = probability.argmax(axis=1) == label, probability.max(axis=1)
    accuracy, confidence = calibration_curve(right, sure, n_bins=10)
    found = metrics.reliability(probability, label, bins=10)
    assert_allclose(found.accuracy[found.rows > 0], accuracy)
    assert_allclose(found.confidence[found.rows > 0], confidence)


def test_the_library_has_the_same_auroc(rng: np.random.Generator) -> None:
    high, low = rng.integers(2, 9, size=60), rng.integers(0, 7, size=80)  # with ties
    wanted = roc_auc_score(np.repeat([1, 0], [60, 80]), np.concatenate([high, low]))
    assert metrics.auroc(high, low) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("probability", "label", "message"),
    [
        (np.zeros((0, 2)), np.zeros(0, int), "with at least one row"),
        (PROBABILITY, LABEL[:2], "do not fit"),
        (2 * PROBABILITY, LABEL, "row 0 of the probabilities adds up to 2"),
        (np.where(PROBABILITY > 0.9, np.nan, PROBABILITY), LABEL, "row 0 of the probabilities adds up to nan"),
        (np.array([[1.5, -0.5]]), np.array([0]), "least entry -0.5"),
        (PROBABILITY, LABEL + 2, "labels must be whole numbers from 0 to 1"),
        (PROBABILITY, LABEL + 0.5, "labels must be whole numbers"),
    ],
)
def test_what_is_no_prediction_is_refused(probability: Any, label: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        metrics.brier(probability, label)


def test_bins_and_scores_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match="bins=0 must be a whole number"):
        metrics.reliability(PROBABILITY, LABEL, bins=0)
    with pytest.raises(DataError, match="0 positive and 2 negative scores"):
        metrics.auroc(np.zeros(0), np.zeros(2))
    with pytest.raises(DataError, match="scores hold NaN"):
        metrics.auroc(np.array([1.0, np.nan]), np.zeros(2))
    for wrong, message in ((np.array([[0.5, 0.6]]), "adds up to 1.1"), (np.array([0.5, 0.5]), "pass .n, C.")):
        with pytest.raises(DataError, match=message):
            metrics.entropy(wrong)


def test_scores_of_two_columns_are_no_scores() -> None:
    with pytest.raises(DataError, match=r"shapes \(4, 2\) and \(3,\); pass one column"):
        metrics.auroc(np.ones((4, 2)), np.ones(3))
    with pytest.raises(DataError, match=r"shape \(2, 0\)"):
        metrics.entropy(np.zeros((2, 0)))


def test_a_data_set_of_predictions_is_refused_by_what_it_holds() -> None:
    predicted = xr.Dataset({"probability": (("row", "class"), PROBABILITY)})
    for compute in (metrics.entropy, lambda p: metrics.accuracy(p, LABEL)):
        with pytest.raises(DataError, match=r"Dataset; pass one of its arrays, \['probability'\]"):
            compute(predicted)
    assert metrics.accuracy(predicted["probability"], LABEL) == metrics.accuracy(PROBABILITY, LABEL)
