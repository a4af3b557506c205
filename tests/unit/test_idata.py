"""The seam to ArviZ: containers, dims, coords, and diagnostics equal on both of its generations."""

from __future__ import annotations

import logging
import warnings

import arviz as az
import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_array_equal

from fedppl.results.idata import chain_diagnostics, dataset, from_groups, posterior_dataset


def test_the_container_is_arviz_own() -> None:
    """InferenceData on ArviZ 0.x, DataTree on 1.x; a group without variables is left out; nothing warns."""
    groups = {"posterior": xr.Dataset({"x": (("chain", "draw"), np.zeros((1, 2)))}), "rounds": xr.Dataset()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        container = from_groups({**groups, "fit": xr.Dataset({"mean": ("rows", [1.0])})})
    expected = xr.DataTree if int(az.__version__.split(".")[0]) >= 1 else az.InferenceData
    assert type(container) is expected
    names = set(container.children) if expected is xr.DataTree else set(container.groups())
    assert names == {"posterior", "fit"}
    assert_array_equal(container["posterior"]["x"].values, np.zeros((1, 2)))


def test_a_dataset_keeps_the_coords_it_uses() -> None:
    found = dataset({"x": [1.0, 2.0]}, {"x": ["row"]}, {"row": ["a", "b"], "column": ["c"]}, {"note": "hi"})
    assert set(found.coords) == {"row"}
    assert_array_equal(found["row"], ["a", "b"])
    assert found.attrs == {"inference_library": "fedppl", "note": "hi"}


def test_posterior_datasets_have_the_models_dims_and_arviz_names_for_the_rest() -> None:
    draws = {"beta": np.zeros((2, 3, 2)), "z": np.zeros((2, 3, 4, 5)), "a": np.zeros((2, 3))}
    found = posterior_dataset(draws, {"beta": ("predictor",)}, {"predictor": ["age", "dose"], "unused": [1]})
    assert found["beta"].dims == ("chain", "draw", "predictor")
    assert found["z"].dims == ("chain", "draw", "z_dim_0", "z_dim_1")
    assert found["a"].dims == ("chain", "draw")
    assert_array_equal(found["predictor"], ["age", "dose"])
    assert_array_equal(found["z_dim_1"], range(5))
    assert_array_equal(found["draw"], range(3))
    assert "unused" not in found.coords


def test_labels_that_do_not_fit_are_replaced_by_numbers() -> None:
    """New rows of a prediction have no labels yet."""
    found = posterior_dataset({"y": np.zeros((1, 2, 3))}, {"y": ("row",)}, {"row": ["a", "b"]})
    assert_array_equal(found["row"], [0, 1, 2])


def autoregressive(rng: np.random.Generator, rho: float, shape: tuple[int, ...]) -> np.ndarray:
    """AR(1) chains of stationary variance 1: ESS per draw is (1 − ρ)/(1 + ρ)."""
    x = rng.normal(size=shape)
    for t in range(1, shape[1]):
        x[:, t] = rho * x[:, t - 1] + np.sqrt(1 - rho**2) * x[:, t]
    return x


def test_diagnostics_of_independent_and_of_slow_chains(rng: np.random.Generator) -> None:
    """ArviZ's ESS of AR(1) chains is right to about 10 %."""
    draws = np.stack([rng.normal(size=(4, 1000)), autoregressive(rng, 0.6, (4, 1000))], axis=-1)
    rhat, ess = chain_diagnostics(draws)
    assert 0.99 < rhat < 1.02
    assert ess == pytest.approx(4000 * 0.4 / 1.6, rel=0.25)
    assert chain_diagnostics(draws[..., :1])[1] == pytest.approx(4000, rel=0.15)


def test_chains_that_disagree_are_seen(rng: np.random.Generator) -> None:
    draws = rng.normal(size=(2, 500, 1)) + np.array([0.0, 3.0])[:, None, None]
    rhat, ess = chain_diagnostics(draws)
    assert rhat > 1.5 and ess < 20


def test_one_chain_is_compared_with_itself(rng: np.random.Generator) -> None:
    """Two halves of one chain: still about 1, and far above where the halves differ."""
    draws = rng.normal(size=(1, 1000, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chain_diagnostics(draws)[0] == pytest.approx(1.0, abs=0.02)
        assert chain_diagnostics(draws + np.linspace(0, 8, 1000)[None, :, None])[0] > 1.5


def test_no_coordinates_are_no_trouble() -> None:
    assert chain_diagnostics(np.zeros((2, 50, 0))) == (1.0, 100.0)


def test_arviz_logger_is_left_as_it_was(rng: np.random.Generator) -> None:
    logger = logging.getLogger("arviz")
    before = logger.level
    try:
        logger.setLevel(logging.INFO)
        chain_diagnostics(rng.normal(size=(1, 50, 1)))
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)
