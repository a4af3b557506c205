"""A prior that the data contradict is named, however little it lets them move; one that yields, or agrees, is not."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl.run._prior_check import _Slopes, deviations
from fedppl.testing import normal_means


def line(X: Any, y: Any, *, slope_sd: float = 2.0, noise: Any = None) -> pm.Model:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        slope = pm.Normal("slope", 0, slope_sd)
        sd = (noise or functools.partial(pm.HalfNormal, sigma=2.0))("sd")
        pm.Normal("obs", slope * X, sd, observed=y)
    return model


def clinics(count: int = 4, *, rows: int = 30, slope: float = 2.0, sd: float = 1.0) -> dict[str, dict[str, Any]]:
    rng, found = np.random.default_rng(count), {}
    for k in range(count):
        X = rng.normal(size=rows)
        found[f"clinic {k}"] = {"X": X, "y": slope * X + sd * rng.normal(size=rows)}
    return found


def fitted(clients: Any, **declared: Any) -> fedppl.Fit:
    model = fedppl.FederatedModel(functools.partial(line, **declared), ["slope", "sd"])
    return fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)


def test_deviations_are_those_of_the_means_distribution_before_data(rng: np.random.Generator) -> None:
    """Means of n values under a narrow prior N(0, s²): μ has the sd s √(s² / (s² + 1 / n)), by the closed form."""
    n, s = 50, 0.01
    for mean in (0.0, 0.03, 2.0):
        posterior = mean * s**2 / (s**2 + 1 / n)
        prior = _Slopes(np.array([-posterior / s**2]), np.array([[1 / s**2]]))
        data = _Slopes(np.array([n * (mean - posterior)]), np.array([[float(n)]]))
        wanted = posterior / (s * np.sqrt(s**2 / (s**2 + 1 / n)))
        assert_allclose(deviations(prior, data), [wanted], rtol=1e-10)
        assert_allclose(wanted, mean / np.sqrt(s**2 + 1 / n), rtol=1e-12)


def test_what_the_data_do_not_speak_of_is_in_no_conflict() -> None:
    prior = _Slopes(np.zeros(2), np.eye(2))
    assert_allclose(deviations(prior, _Slopes(np.array([3.0, 0.0]), np.diag([1.0, 0.0])))[1], 0.0)


@pytest.mark.parametrize("slope_sd", [1e-4, 1e-3, 0.1])
def test_a_prior_that_is_far_too_narrow_is_named(slope_sd: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedppl"):
        found = fitted(clinics(), slope_sd=slope_sd)
    assert found.status is fedppl.Status.CONVERGED
    assert "slope" in found.message
    assert "contradict" in found.message
    assert any("contradict" in record.message for record in caplog.records)


def test_a_scale_far_above_its_prior_is_named() -> None:
    assert "sd_log__" in fitted(clinics(), noise=functools.partial(pm.HalfNormal, sigma=0.01)).message


@pytest.mark.parametrize(
    ("noise", "sd"),
    [
        (functools.partial(pm.HalfNormal, sigma=2.0), 1e-3),
        (functools.partial(pm.HalfCauchy, beta=0.01), 1.0),
        (functools.partial(pm.Exponential, lam=1.0), 1.0),
    ],
    ids=["a scale near 0", "heavy tails", "in the middle"],
)
def test_a_prior_that_yields_is_not(noise: Any, sd: float) -> None:
    assert "contradict" not in fitted(clinics(sd=sd), noise=noise).message


def test_data_of_the_model_seldom_contradict_it() -> None:
    """Parameters are drawn from their priors: beyond five sds there is one in a million."""
    rng = np.random.default_rng(3)
    for _ in range(8):
        slope, sd = 2.0 * rng.normal(), abs(2.0 * rng.normal())
        assert "contradict" not in fitted(clinics(slope=slope, sd=sd)).message


def test_many_clients_at_once_are_told_too() -> None:
    _, clients = normal_means(60)
    model = fedppl.FederatedModel(functools.partial(far, sd=0.001), ["mu", "tau"])
    shifted = {name: {"y": data["y"] + 4.0} for name, data in clients.items()}
    found = fedppl.fit(model, shifted, fedppl.EP(), progressbar=False, random_seed=1)
    assert found.records[-1].together == 60
    assert "mu (" in found.message


def far(y: Any, *, sd: float) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu", 0, sd), pm.LogNormal("tau", 0, 0.5))
        pm.Normal("obs", theta, 1.0, observed=y)
    return model
