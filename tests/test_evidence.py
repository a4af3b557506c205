"""EP's own approximation of the log evidence, where there was no correction."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats

import fedppl
from fedppl import DeclarationError, FederatedModel, NotConvergedError, gaussian
from fedppl.algorithms.ep import _evidence
from fedppl.contracts.client import Factor
from fedppl.numerics.marginal import site_batch
from fedppl.testing import normal_means
from tests.support import problems
from tests.test_correction import fixed_tau, flat_local

ALONE = fedppl.EP(correction=None)


def fit(model: FederatedModel, clients: Any, algorithm: Any = ALONE, **keywords: Any) -> Any:
    return fedppl.fit(model, clients, algorithm, **{"progressbar": False, "random_seed": 1, **keywords})


def test_where_factors_are_gaussian_it_is_exact() -> None:
    _, clients = problems.schools()
    found = fit(FederatedModel(fixed_tau, ["mu"]), clients).log_evidence
    y, s = (np.array([float(np.ravel(data[name])[0]) for data in clients.values()]) for name in ("effect", "error"))
    exact = stats.multivariate_normal(np.zeros(8), np.diag(s**2 + 0.01) + 25.0).logpdf(y)
    assert found.value == pytest.approx(exact, abs=1e-6)
    assert found.method == "EP" and found.error < 1e-6


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("problem", [problems.regression, problems.noise])
def test_it_is_near_what_the_correction_finds(problem: Any, structure: str) -> None:
    model, clients = problem()
    exact = fit(model, clients, fedppl.EP(correction=fedppl.Correction())).log_evidence
    found = fit(model, clients, fedppl.EP(correction=None, structure=structure)).log_evidence
    assert (exact.method, found.method) == ("correction", "EP")
    # a diagonal q leaves out what the coordinates' dependence is worth
    assert abs(found.value - exact.value) < (0.1 if structure == "full" else 0.2)


def many_coefficients(X: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, 1, shape=24)
        pm.Bernoulli("obs", logit_p=X @ beta, observed=y)
    return model


def test_it_holds_beyond_twenty_shared_coordinates_where_none_is_corrected_by_itself() -> None:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(4, 200, 24))
    clients = {str(k): {"X": X[k], "y": rng.binomial(1, 1 / (1 + np.exp(-X[k] @ np.full(24, 0.2))))} for k in range(4)}
    model = FederatedModel(many_coefficients, ["beta"])
    exact = fit(model, clients, fedppl.EP(correction=fedppl.Correction())).log_evidence
    found = fit(model, clients, fedppl.EP()).log_evidence
    assert found.method == "EP"
    assert abs(found.value - exact.value) < 0.05 + 3 * np.hypot(found.error, exact.error)


def test_its_error_is_that_of_its_points() -> None:
    """Beside plain draws of q: points with too even distances from its middle are off by five times their error."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(3, 60, 24))
    clients = {str(k): {"X": X[k], "y": rng.binomial(1, 1 / (1 + np.exp(-X[k] @ np.full(24, 0.2))))} for k in range(3)}
    found = fit(FederatedModel(many_coefficients, ["beta"]), clients)
    q, sites = found.posterior, found.state.sites
    phi = gaussian.draw(q, rng, 20_000)
    value = float(gaussian.log_integral(q) - gaussian.log_integral(sites.prior))
    squares = found.log_evidence.error**2
    for name, client in found.clients.items():
        k = sites.where[name]
        site = gaussian.Gaussian(sites.linear[k], gaussian.unpack_triangle(sites.precision[k]))
        logs = site_batch(client.kernel, phi, client.packed) - gaussian.log_kernel(site, phi)
        ratios = np.exp(logs - logs.max())
        value += float(np.log(ratios.mean()) + logs.max())
        squares += float(np.var(ratios) / ratios.mean() ** 2 / len(ratios))
    assert abs(found.log_evidence.value - value) < 4 * np.sqrt(squares)
    assert found.log_evidence.error < 0.05


def test_what_is_not_known_of_log_densities_is_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit(*normal_means(4))
    exact, factor = found.log_evidence, _evidence._FACTOR
    assert factor is not None

    def uncertain(by: float) -> Any:
        def factored(*arguments: Any) -> Factor:
            known = factor(*arguments)
            return Factor(known.values, np.where(np.arange(len(known.values)) % 2, by, -by))

        return factored

    monkeypatch.setattr(_evidence, "_FACTOR", uncertain(0.1))
    assert dataclasses.replace(found).log_evidence.error == pytest.approx(np.hypot(exact.error, 0.2), rel=1e-3)
    monkeypatch.setattr(_evidence, "_FACTOR", uncertain(0.2))
    with pytest.raises(NotConvergedError, match=r"uncertain by 0\.4 in sum"):
        _ = dataclasses.replace(found).log_evidence


def test_a_local_inference_without_factors_has_it_too() -> None:
    model, clients = normal_means()
    exact = fit(model, clients, fedppl.EP()).log_evidence
    nuts = fedppl.EP(local=fedppl.NUTS(draws=500, tune=300, chains=2), tolerance=0.1)
    found = fit(model, clients, nuts).log_evidence
    assert found.method == "EP"
    assert found.value == pytest.approx(exact.value, abs=0.02 + 3 * found.error)


def test_it_is_refused_where_it_means_nothing() -> None:
    rng = np.random.default_rng(1)
    flat = fit(FederatedModel(flat_local, ["mu"]), {k: {"y": rng.normal(size=(9, 2))} for k in "abc"})
    with pytest.raises(DeclarationError, match="normalising constant"):
        _ = flat.log_evidence
    model, clients = problems.noise()
    with pytest.warns(fedppl.ConvergenceWarning):
        early = fit(model, clients, fedppl.EP(correction=None, warm_start=False), rounds=1)
    with pytest.raises(NotConvergedError):
        _ = early.log_evidence


def test_comparisons_say_what_they_are_from() -> None:
    model, clients = normal_means()
    table = fedppl.compare({"corrected": fit(model, clients, fedppl.EP()), "not": fit(model, clients)})
    assert table.loc["corrected", "method"] == "correction" and table.loc["not", "method"] == "EP"
