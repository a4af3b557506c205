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
from fedppl import gaussian
from fedppl.numerics.prior import SharedPrior
from fedppl.run import conflicts
from fedppl.run.conflicts import Likelihood, _Slopes, deviations
from fedppl.testing import normal_means
from tests.support.markers import slow_but


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


def no_slopes(x: Any) -> Any:
    raise AssertionError("no slopes are needed")


def test_of_normal_densities_what_they_lose_is_the_deviation_itself(rng: np.random.Generator) -> None:
    roots = rng.normal(size=(2, 2, 2))
    prior, data = (np.eye(2) + root @ root.T for root in roots)
    far = np.array([9.0, -14.0])  # where the data's factor has its mode; the prior's is 0
    mode = np.linalg.solve(prior + data, data @ far)
    at = _Slopes(-prior @ mode, prior), _Slopes(data @ (far - mode), data)
    found = deviations(*at)
    assert np.all(np.abs(found) > 5)
    likelihood = Likelihood(lambda x: -np.einsum("si,ij,sj->s", x - far, data, x - far) / 2, no_slopes)
    assert_allclose(conflicts._by_densities(likelihood, mode, *at, found), found, rtol=1e-9)


def test_a_likelihood_that_hardly_bends_is_no_conflict() -> None:
    """A Cauchy's tail has a slope, and almost no curvature beside that of a row that says nothing else."""
    mu, weak = np.zeros(1), 1e-4
    tail = 2 * 4.0 / (1 + 4.0**2)  # d/dx of −log(1 + (4 − x)²) at 0
    likelihood = Likelihood(lambda x: -np.log1p((4 - x[:, 0]) ** 2) - weak * x[:, 0] ** 2 / 2, no_slopes)
    prior, data = _Slopes(np.array([-tail]), np.eye(1)), _Slopes(np.array([tail]), np.array([[weak]]))
    found = deviations(prior, data)
    assert found[0] > 20
    assert abs(conflicts._by_densities(likelihood, mu, prior, data, found)[0]) < 3


def test_a_hierarchy_among_shared_variables_yields() -> None:
    """(log t, b) with b ~ N(0, t²), t ~ LogNormal: a far b is a larger t's, and no conflict at a narrow t's mean."""

    def slopes(x: Any) -> Any:
        return np.array([0.0, 40.0 * (3.0 - x[1])]), np.diag([0.0, -40.0])

    def gradient(x: Any) -> Any:
        ratio = x[1] ** 2 * np.exp(-2 * x[0])
        return np.array([ratio - 1 - x[0], -x[1] * np.exp(-2 * x[0])])

    def log_density(x: Any) -> Any:
        return -(x[:, 1] ** 2) * np.exp(-2 * x[:, 0]) / 2 - x[:, 0] - x[:, 0] ** 2 / 2

    likelihood = Likelihood(lambda x: -20.0 * (x[:, 1] - 3.0) ** 2, slopes)
    start = gaussian.from_moments(np.zeros(2), np.diag([1.0, np.exp(2.0)]))
    prior = SharedPrior(log_density, lambda phi: np.stack([gradient(x) for x in phi]), start, False)
    for log_t in (-0.3, 0.0, 0.3, 0.6, 1.0):
        assert not conflicts.contradicted(prior, likelihood, ("a", "b"), np.array([log_t, 2.9]))


def test_rounding_is_no_conflict() -> None:
    """What is left of another coordinate's information, and of a mean that is known to 1e-5 sds, tells nothing."""
    prior = _Slopes(np.zeros(2), np.eye(2) / 4)
    data = _Slopes(np.array([1e-5, 0.0]), np.diag([1e-13, 1e3]))
    assert_allclose(deviations(prior, data)[0], 0.0)


@pytest.mark.parametrize("slope_sd", slow_but([1e-4, 1e-3, 0.1], 1e-4, 0.1))
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
    algorithm = fedppl.Sums(points=512, pilot=64, starts=1)
    found = fedppl.fit(model, shifted, algorithm, progressbar=False, random_seed=1)
    assert found.records[-1].together == 60
    assert "mu (" in found.message


def far(y: Any, *, sd: float) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu", 0, sd), pm.LogNormal("tau", 0, 0.5))
        pm.Normal("obs", theta, 1.0, observed=y)
    return model
