"""The log evidence: EP's own approximation, and which priors have one at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats
from scipy.special import logsumexp

import fedppl
from fedppl import DeclarationError, FederatedModel, NotConvergedError, gaussian
from fedppl.algorithms.ep import ep
from fedppl.contracts.client import Factor
from fedppl.numerics.pairs import site_outputs
from fedppl.testing import normal_means
from tests.algorithms.test_posterior import fixed_tau, flat_local
from tests.support import problems


def fit(model: FederatedModel, clients: Any, algorithm: Any = None, **keywords: Any) -> Any:
    return fedppl.fit(model, clients, algorithm or fedppl.EP(), progressbar=False, random_seed=1, **keywords)


def test_where_factors_are_gaussian_it_is_exact() -> None:
    _, clients = problems.schools()
    found = fit(FederatedModel(fixed_tau, ["mu"]), clients).log_evidence
    y, s = (np.array([float(np.ravel(data[name])[0]) for data in clients.values()]) for name in ("effect", "error"))
    exact = stats.multivariate_normal(np.zeros(8), np.diag(s**2 + 0.01) + 25.0).logpdf(y)
    assert found.value == pytest.approx(exact, abs=1e-6)
    assert found.method == "EP" and found.error < 1e-6


CASES = [
    (problems.regression, "full"),
    (problems.regression, "diagonal"),
    pytest.param(problems.noise, "full", marks=pytest.mark.slow),  # a diagonal q is not called converged there
]


@pytest.mark.parametrize(("problem", "structure"), CASES)
def test_it_is_near_that_by_sums(problem: Any, structure: str) -> None:
    model, clients = problem()
    exact = fit(model, clients, fedppl.Sums()).log_evidence
    found = fit(model, clients, fedppl.EP(structure=structure)).log_evidence
    assert (exact.method, found.method) == ("sums", "EP")
    # a diagonal q leaves out what the coordinates' dependence is worth
    assert abs(found.value - exact.value) < (0.1 if structure == "full" else 0.2)


def many_coefficients(X: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, 1, shape=24)
        pm.Bernoulli("obs", logit_p=X @ beta, observed=y)
    return model


def many_rows(clients: int, rows: int) -> dict[str, Any]:
    X = np.random.default_rng(3).normal(size=(clients, rows, 24))
    p = 1 / (1 + np.exp(-X @ np.full(24, 0.2)))
    return {str(k): {"X": X[k], "y": np.random.default_rng(k).binomial(1, p[k])} for k in range(clients)}


@pytest.mark.slow
def test_it_holds_beyond_twenty_shared_coordinates() -> None:
    """Beside weighted draws of q: there is no variable of a client's own, so that the density is known."""
    clients = many_rows(4, 200)
    fitted = fit(FederatedModel(many_coefficients, ["beta"]), clients)
    beta = gaussian.draw(fitted.posterior, np.random.default_rng(1), 20_000)
    logs = stats.norm.logpdf(beta).sum(axis=1) - gaussian.log_density(fitted.posterior, beta)
    for data in clients.values():
        eta = beta @ data["X"].T
        logs += eta @ data["y"] - np.logaddexp(0.0, eta).sum(axis=1)
    exact = logsumexp(logs) - np.log(len(logs))
    error = np.std(np.exp(logs - exact)) / np.sqrt(len(logs))
    found = fitted.log_evidence
    assert found.method == "EP" and error < 0.05
    assert abs(found.value - exact) < 0.05 + 3 * np.hypot(found.error, error)


def test_its_error_is_that_of_its_points() -> None:
    """Beside plain draws of q: points with too even distances from its middle are off by five times their error."""
    rng = np.random.default_rng(3)
    found = fit(FederatedModel(many_coefficients, ["beta"]), many_rows(3, 60))
    q, sites = found.posterior, found.state.sites
    phi = gaussian.draw(q, rng, 20_000)
    value = float(gaussian.log_integral(q) - gaussian.log_integral(sites.prior))
    squares = found.log_evidence.error**2
    for name, client in found.clients.items():
        k = sites.where[name]
        site = gaussian.Gaussian(sites.linear[k], gaussian.unpack_triangle(sites.precision[k]))
        logs = site_outputs(client.kernel, phi, client.packed)[:, 0] - gaussian.log_kernel(site, phi)
        ratios = np.exp(logs - logs.max())
        value += float(np.log(ratios.mean()) + logs.max())
        squares += float(np.var(ratios) / ratios.mean() ** 2 / len(ratios))
    assert abs(found.log_evidence.value - value) < 4 * np.sqrt(squares)
    assert found.log_evidence.error < 0.05


def test_what_is_not_known_of_log_densities_is_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit(*normal_means(4))
    exact, factor = found.log_evidence, ep.factor

    def uncertain(by: float) -> Any:
        def factored(*arguments: Any) -> Factor:
            known = factor(*arguments)
            return Factor(known.values, np.where(np.arange(len(known.values)) % 2, by, -by))

        return factored

    monkeypatch.setattr(ep, "factor", uncertain(0.1))
    assert dataclasses.replace(found).log_evidence.error == pytest.approx(np.hypot(exact.error, 0.2), rel=1e-3)
    monkeypatch.setattr(ep, "factor", uncertain(0.2))
    with pytest.raises(NotConvergedError, match=r"uncertain by 0\.4 in sum"):
        _ = dataclasses.replace(found).log_evidence


@pytest.mark.slow
def test_a_local_inference_without_factors_has_it_too() -> None:
    model, clients = normal_means()
    exact = fit(model, clients).log_evidence
    nuts = fedppl.EP(local=fedppl.local.NUTS(draws=500, tune=300, chains=2), tolerance=0.1)
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
        early = fit(model, clients, fedppl.EP(warm_start=False), rounds=1)
    with pytest.raises(NotConvergedError):
        _ = early.log_evidence


def test_comparisons_say_what_they_are_from() -> None:
    model, clients = normal_means()
    table = fedppl.compare({"one": fit(model, clients, fedppl.Sums()), "other": fit(model, clients)})
    assert table.loc["one", "method"] == "sums" and table.loc["other", "method"] == "EP"


def test_evidence_by_ep_needs_all_clients(tmp_path: Any) -> None:
    model, clients = normal_means(4)
    whole = fit(model, clients)
    whole.save(tmp_path / "run.nc")
    part = fedppl.load(tmp_path / "run.nc", model, fedppl.EP(), clients={"client 0": clients["client 0"]})
    with pytest.raises(DeclarationError, match=r"client 1.*clients="):
        _ = part.log_evidence
    again = fedppl.load(tmp_path / "run.nc", model, fedppl.EP(), clients=clients)
    assert again.log_evidence.value == pytest.approx(whole.log_evidence.value, abs=1e-9)
    with pytest.raises(DeclarationError, match=r"fit 'part'"):
        fedppl.compare({"whole": whole, "part": part})


def in_order(y: Any) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        transform = pm.distributions.transforms.ordered
        level = pm.Normal("level", 0, 1.5, shape=2, default_transform=transform, initval=[-1.0, 1.0])
        theta = pm.Normal("theta", level[0], 0.5)
        pm.Normal("obs", theta + 0.5 * level[1], 1, observed=y)
    return model


@pytest.mark.slow
def test_values_in_order_have_the_density_of_ordered_values() -> None:
    """PyMC's has all orders, of which one is left: evidence was too small by log 2."""
    clients = {"a": {"y": np.array([0.3, -0.2])}, "b": {"y": np.array([0.9])}}
    found = fit(FederatedModel(in_order, ["level"]), clients, fedppl.Sums()).log_evidence
    grid = np.linspace(-8, 8, 401)
    first, second = np.meshgrid(grid, grid, indexing="ij")
    logp = stats.norm.logpdf(first, 0, 1.5) + stats.norm.logpdf(second, 0, 1.5) + np.log(2)
    for data in clients.values():
        y, rows = data["y"], len(data["y"])
        covariance = np.eye(rows) + 0.25
        center = (first + 0.5 * second)[..., None] * np.ones(rows)
        logp = logp + stats.multivariate_normal(np.zeros(rows), covariance).logpdf(y - center).reshape(logp.shape)
    exact = logsumexp(np.where(first <= second, logp, -np.inf)) + 2 * np.log(grid[1] - grid[0])
    assert abs(found.value - exact) < 0.01 + 4 * found.error < 0.1


_W = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
_LOGP = {"logp": lambda value, mu: -0.5 * (value - mu) ** 2}
_DIST = {"dist": lambda mu, size: pm.Normal.dist(mu, 1, size=size)}
_T = pm.distributions.transforms
PRIORS: dict[str, tuple[bool, Any]] = {
    "normal": (True, lambda mu: pm.Normal("t", mu, 1, shape=3)),
    "CAR": (False, lambda mu: pm.CAR("t", mu=np.zeros(3), W=_W, alpha=0.5, tau=1.0)),
    "ICAR": (False, lambda mu: pm.ICAR("t", W=_W)),
    "walk": (True, lambda mu: pm.GaussianRandomWalk("t", sigma=1.0, init_dist=pm.Normal.dist(), steps=2)),
    "walk from nowhere": (False, lambda mu: pm.GaussianRandomWalk("t", sigma=1.0, init_dist=pm.Flat.dist(), steps=2)),
    "custom density": (False, lambda mu: pm.CustomDist("t", mu, **_LOGP, shape=3)),
    "custom draws": (True, lambda mu: pm.CustomDist("t", mu, **_DIST, shape=3)),
    "custom both": (False, lambda mu: pm.CustomDist("t", mu, **_DIST, **_LOGP, shape=3)),
    "cut": (False, lambda mu: pm.Normal("t", mu, 1, shape=3, default_transform=_T.log, initval=np.ones(3))),
    "ordered": (True, lambda mu: pm.Normal("t", mu, 1, shape=3, default_transform=_T.ordered, initval=np.arange(3))),
    "ordered, apart": (
        False,
        lambda mu: pm.Normal("t", np.arange(3), 1, shape=3, default_transform=_T.ordered, initval=np.arange(3)),
    ),
    "truncated": (True, lambda mu: pm.Truncated("t", pm.Normal.dist(mu, 1), lower=0, shape=3)),
    "zero sum": (True, lambda mu: pm.ZeroSumNormal("t", shape=3)),
    "simplex": (True, lambda mu: pm.Dirichlet("t", np.ones(3))),
    "half-Cauchy": (True, lambda mu: pm.HalfCauchy("t", 1, shape=3)),
    "bounds of one's own": (
        False,
        lambda mu: pm.Uniform("t", -1, 1, shape=3, default_transform=_T.Interval(-0.5, 0.5), initval=np.zeros(3)),
    ),
    "uniform": (True, lambda mu: pm.Uniform("t", -1, 1, shape=3)),
}


@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_that_is_no_density_has_no_evidence(name: str) -> None:
    is_density, prior = PRIORS[name]

    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            mu = pm.Normal("mu")
            pm.Normal("obs", prior(mu).sum() + mu, 1, observed=y)
        return model

    (client,) = FederatedModel(builder, ["mu"]).enrol({"a": {"y": np.array([0.3, 0.5])}}, kernel=False).values()
    assert client.has_proper_prior == is_density


def test_a_prior_that_has_no_point_to_start_from_is_named() -> None:
    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            steps = pm.AR("steps", rho=[0.5], sigma=1, init_dist=pm.Flat.dist(), steps=2)
            pm.Normal("obs", pm.Normal("mu") + steps.sum(), 1, observed=y)
        return model

    with pytest.raises(DeclarationError, match=r"client 'a'.*init_dist="):
        FederatedModel(builder, ["mu"]).enrol({"a": {"y": np.array([0.3])}})
