"""pFedVEM on declared models: closed forms of a linear model, the bound, and what clients keep."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import minimize

import fedppl
from fedppl import Status
from fedppl.algorithms.hierarchical.confidence import confidence_of, terms_rule
from fedppl.contracts import Target
from fedppl.gaussian import Gaussian
from fedppl.models import pfedvem
from fedppl.types import DataError, DeclarationError
from tests.support import problems
from tests.support.markers import slow_but
from tests.support.states import received

NOISE, SIZE = 0.7, 40


def linear(X: Any, y: Any) -> pm.Model:
    """One client's regression; its likelihood is a quadratic in w."""
    with pm.Model() as model:
        inputs, outcomes = pm.Data("X", X), pm.Data("y", y)
        w = pm.Normal("w", 0.0, 10.0, shape=SIZE)
        pm.Normal("outcome", inputs @ w, NOISE, observed=outcomes)
    return model


def clients_of(
    sizes: tuple[int, ...] = (60, 80, 100, 120, 160, 240), seed: int = 3
) -> dict[str, dict[str, np.ndarray]]:
    """Clients of very different sizes, with correlated columns."""
    rng = np.random.default_rng(seed)
    mix = np.eye(SIZE) + np.diag(np.full(SIZE - 1, 0.5), 1)
    found = {}
    for k, n in enumerate(sizes):
        X = rng.normal(size=(n, SIZE)) @ mix
        w = np.linspace(-2, 2, SIZE) + 0.8 * rng.normal(size=SIZE)
        found[f"client {k}"] = {"X": X, "y": X @ w + NOISE * rng.normal(size=n)}
    return found


MODEL = fedppl.FederatedModel(linear, shared=["w"])


def best_q(data: dict[str, np.ndarray], w: np.ndarray, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Closed form of the mean-field optimum: the exact mean, and one over the diagonal of the exact precision."""
    A = data["X"].T @ data["X"] / NOISE**2 + tau * np.eye(SIZE)
    return np.linalg.solve(A, data["X"].T @ data["y"] / NOISE**2 + tau * w), 1.0 / np.diag(A)


def bound(clients: Any, q: Any, w: np.ndarray, tau: Any) -> float:
    """Eq. 5 with exact expectations."""
    total = 0.0
    for name, data in clients.items():
        mean, variance = q[name]
        left = data["y"] - data["X"] @ mean
        square = left @ left + np.sum(data["X"] ** 2 @ variance)
        total += -0.5 * square / NOISE**2 - len(left) * np.log(NOISE * np.sqrt(2 * np.pi))
        apart = np.sum(variance) + np.sum((mean - w) ** 2)
        total -= 0.5 * (tau[name] * apart - SIZE - np.sum(np.log(variance * tau[name])))
    return float(total)


@functools.cache
def whole() -> fedppl.Fit:
    """All clients in every round, to the end."""
    return fitted(tolerance=1e-7)


def fitted(**settings: Any) -> fedppl.Fit:
    options = {"rounds": 200, "progressbar": False, "random_seed": 1, **settings.pop("run", {})}
    algorithm = fedppl.Confidence(**{"tolerance": 1e-6, **settings})
    return fedppl.fit(MODEL, clients_of(), algorithm, **options)


def test_the_e_step_is_the_closed_form_of_a_linear_model() -> None:
    models, w = MODEL.enrol(clients_of()), np.linspace(-2.0, 1.0, SIZE)
    for name, data in clients_of().items():
        for tau in (0.1, 5.0):
            centre = Gaussian(tau * w, tau * np.eye(SIZE))
            moments = fedppl.local.MeanField().tilted(
                Target(models[name], centre, centre, 0.0), np.random.default_rng(0)
            )
            mean, variance = best_q(data, w, tau)
            assert_allclose(moments.mean, mean, rtol=1e-3)
            assert_allclose(np.diag(moments.covariance), variance, rtol=1e-3)


@pytest.mark.slow
def test_w_and_confidences_arrive_at_the_fixed_point_of_equations_8_and_9() -> None:
    fit = whole()
    assert fit.status is Status.CONVERGED
    w, taus, means = fit.state.w, {}, {}
    for name, data in clients_of().items():
        q = fit.personal[name]
        taus[name], means[name] = SIZE / (np.sum(q.variance) + np.sum((q.mean - w) ** 2)), q.mean
        mean, variance = best_q(data, w, taus[name])
        assert_allclose(q.mean, mean, atol=1e-6)
        assert_allclose(q.variance, variance, rtol=1e-4)  # the bar is 1e-3
    total = sum(taus.values())
    assert_allclose(w, sum(taus[k] * means[k] for k in taus) / total, atol=1e-6)
    assert_allclose(fit.state.confidence, total / 6, rtol=1e-6)


@pytest.mark.slow
def test_the_bound_never_falls_over_a_round_with_all_clients() -> None:
    clients, before, algorithm = clients_of(), -np.inf, fedppl.Confidence(tolerance=1e-9)
    models, state = MODEL.enrol(clients), None
    state = algorithm.init(models["client 0"].layout, tuple(clients), np.random.default_rng(0))
    personal: dict[str, Any] = dict.fromkeys(clients)
    for _ in range(15):
        replies, q = {}, {}
        for name in clients:
            message = algorithm.broadcast(state, name)
            update = algorithm.update_client(models[name], personal[name], message, np.random.default_rng(0))
            personal[name], replies[name] = update.personal, update.reply
            q[name] = (personal[name].mean, personal[name].variance)
        state, _ = algorithm.update_server(state, received(replies, summed=algorithm.replies.summed(state)))
        tau = {k: confidence_of(*q[k], state.w) for k in q}
        now = bound(clients, q, state.w, tau)
        assert now >= before - 1e-7  # L-BFGS ends within rounding of the optimum
        before = now


def test_full_covariances_give_a_higher_bound_on_the_evidence() -> None:
    """With Laplace the E-step is exact, so that the mean of w_j is that of the exact posterior under N(w, I / τ)."""
    fit = fitted(local=fedppl.local.Laplace(), run={"rounds": 60})
    for name, data in clients_of().items():
        q = fit.personal[name]
        tau = confidence_of(q.mean, q.variance, fit.state.w)
        A = data["X"].T @ data["X"] / NOISE**2 + tau * np.eye(SIZE)
        assert_allclose(q.variance, np.diag(np.linalg.inv(A)), rtol=1e-3)


@problems.few_rounds
def test_rounds_tell_how_far_clients_are_from_what_was_sent() -> None:
    sent, fit = fitted(run={"rounds": 1}).state.w, fitted(run={"rounds": 2})
    for name, q in fit.personal.items():
        told = fit.idata["rounds"]["deviation"].sel(client=name).values[-1]
        assert_allclose(told, np.mean((q.mean - sent) ** 2), rtol=1e-12)


@problems.few_rounds
def test_one_client_may_get_all_the_confidence_unless_it_is_held() -> None:
    """H δ² < 1 has no fixed point: 1/τ = 1/(τ+H) + (Hδ/(τ+H))² gives τ = H / (H δ² − 1)."""
    clients = clients_of((60, 80, 120, 160))
    clients["client 0"] = {name: value[:3] for name, value in clients["client 0"].items()}
    run: dict[str, Any] = {"rounds": 200, "progressbar": False, "random_seed": 1}
    free = fedppl.fit(MODEL, clients, fedppl.Confidence(local=fedppl.local.Laplace()), **run)
    assert free.status is Status.MAX_ROUNDS
    assert "strength=" in free.message
    taus = free.idata["rounds"]["confidence"].values
    assert taus[-1].max() > 20 * np.median(taus[-1])
    held = fedppl.fit(MODEL, clients, fedppl.Confidence(local=fedppl.local.Laplace(), strength=8.0), **run)
    assert held.status is Status.CONVERGED
    assert np.all(held.idata["rounds"]["confidence"].values[-1] <= (SIZE + 8) / 8)


@pytest.mark.slow
def test_the_default_e_step_settles_where_its_line_search_once_stuck() -> None:
    """L-BFGS ended after two steps, with half the sd: there the bound by Gauss-Hermite points is 1.3 nats too low."""
    rng, clients = np.random.default_rng(3), {}
    for k, rows in enumerate([20, 60]):
        X = np.column_stack([np.ones(rows), rng.normal(size=(rows, 2))])
        b = np.array([-0.5, 1.0, -1.0]) + 0.5 * rng.normal(size=3)
        clients[f"h{k}"] = {"X": X, "y": (rng.uniform(size=rows) < 1 / (1 + np.exp(-X @ b))).astype(int)}
    model = fedppl.FederatedModel(pfedvem.logistic, shared=["w"])
    fit = fedppl.fit(model, clients, fedppl.Confidence(strength=8), rounds=60, progressbar=False, random_seed=1)
    assert fit.status is Status.CONVERGED
    q, w = fit.personal["h0"], fit.state.w
    tau = confidence_of(q.mean, q.variance, w, held=(8.0, 1.0))
    points, weights = np.polynomial.hermite_e.hermegauss(60)

    def bound_of(parameters: np.ndarray) -> float:
        mean, sd = parameters[:3], np.exp(parameters[3:])
        X, y = clients["h0"]["X"], clients["h0"]["y"]
        line = (X @ mean)[:, None] + np.sqrt(X**2 @ sd**2)[:, None] * points
        likelihood = np.sum((y[:, None] * line - np.logaddexp(0, line)) @ weights) / weights.sum()
        return float(0.5 * tau * (sd @ sd + (mean - w) @ (mean - w)) - parameters[3:].sum() - likelihood)

    best = minimize(bound_of, np.concatenate([q.mean, np.log(q.variance) / 2]), method="BFGS").x
    assert_allclose(q.mean, best[:3], atol=0.1)  # fixed points instead of exact expectations
    assert_allclose(np.sqrt(q.variance), np.exp(best[3:]), rtol=0.06)


@pytest.mark.slow
def test_the_client_with_few_rows_is_less_sure_and_is_pulled_more() -> None:
    fit = whole()
    sd = {k: float(np.sqrt(np.mean(q.variance))) for k, q in fit.personal.items()}
    assert sd["client 0"] > sd["client 5"]


@problems.few_rounds
@pytest.mark.parametrize("terms", slow_but([("uncertainty",), "deviation"], "deviation"))
def test_ablations_are_the_same_code_with_one_term(terms: Any) -> None:
    fit = fitted(terms=terms, run={"rounds": 5})
    for name, q in fit.personal.items():
        parts = {"uncertainty": np.sum(q.variance), "deviation": None}
        found = confidence_of(q.mean, q.variance, fit.state.w, terms_rule(terms))
        wanted = parts["uncertainty"] if terms == ("uncertainty",) else np.sum((q.mean - fit.state.w) ** 2)
        assert_allclose(found, SIZE / wanted, err_msg=name)


@problems.few_rounds
def test_the_message_is_one_number_more_than_the_parameters() -> None:
    fit = fitted(run={"rounds": 1})
    assert set(fit.records[0].bytes_up.values()) == {8 * (SIZE + 1)}


def test_a_declared_prior_holds_w() -> None:
    """N(0, 10²) hardly matters; with its precision in the sum, w solves (Λ + Στ) w = Στμ."""
    fit = fitted(prior=True, local=fedppl.local.Laplace())
    taus = {k: confidence_of(q.mean, q.variance, fit.state.w) for k, q in fit.personal.items()}
    weighted = sum(tau * fit.personal[k].mean for k, tau in taus.items())
    assert_allclose(fit.state.w, weighted / (sum(taus.values()) + 0.01), atol=1e-4)


@problems.few_rounds
def test_a_ledger_makes_part_of_the_clients_as_good_as_all() -> None:
    every = fitted(local=fedppl.local.Laplace())
    some = fitted(local=fedppl.local.Laplace(), remember=True, run={"participation": 3, "rounds": 150})
    assert_allclose(some.state.w, every.state.w, atol=1e-4)
    only = fitted(local=fedppl.local.Laplace(), run={"participation": 3, "rounds": 40})
    assert only.status is Status.MAX_ROUNDS
    assert np.max(np.abs(only.state.w - every.state.w)) > 1e-2


@problems.few_rounds
def test_silent_clients_find_their_q_too() -> None:
    found = fitted(run={"rounds": 3, "reporting": lambda clients, rng: clients[:1]})
    assert set(found.personal) == set(clients_of())
    assert "confidence" not in found.records[-1].infos["client 5"]


@pytest.mark.slow
def test_draws_are_those_of_q_and_a_new_client_finds_its_own() -> None:
    fit = whole()
    for name in ("client 0", "client 5"):
        draws = fit.client(name, draws=4000, chains=1)["posterior"]["w"].values.reshape(-1, SIZE)
        q = fit.personal[name]
        error = 5 * np.sqrt(q.variance / 4000)  # five standard errors of the mean
        assert np.all(np.abs(draws.mean(axis=0) - q.mean) < error)
        assert_allclose(draws.var(axis=0), q.variance, rtol=0.15)  # sd of a variance of 4,000 draws: 2.2 %
    new = fit.new_client({"X": clients_of()["client 0"]["X"], "y": clients_of()["client 0"]["y"]}, draws=2000)
    draws = new["posterior"]["w"].values.reshape(-1, SIZE)
    assert_allclose(draws.mean(axis=0), fit.personal["client 0"].mean, atol=0.05)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"terms": ("size",)}, r"terms=\('size',\) must be one or both"),
        ({"terms": [["uncertainty"]]}, r"terms=\[\['uncertainty'\]\] must be one or both"),
        ({"terms": ()}, r"terms=\(\) must be"),
        ({"terms": None}, "terms=None must be"),
        ({"local": fedppl.local.Laplace}, "is no local inference.*call it: fedppl.local.Laplace"),
        ({"prior": "no"}, "prior='no' must be True or False"),
        ({"tolerance": None}, "tolerance=None must lie"),
        ({"spread": 0.0}, r"spread=0.0 must be positive"),
        ({"strength": -1.0}, r"strength=-1.0 must be finite and not negative"),
        ({"spread": np.inf}, r"spread=inf must be positive and finite"),
        ({"tolerance": 0.0}, r"tolerance=0.0 must lie"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(DeclarationError, match=match):
        fedppl.Confidence(**settings)


@problems.few_rounds
def test_a_prior_that_is_not_gaussian_is_refused_where_it_is_asked_for() -> None:
    def model(y: Any) -> pm.Model:
        with pm.Model() as declared:
            rate = pm.HalfNormal("rate", 2.0)
            pm.Poisson("count", rate, observed=pm.Data("y", y))
        return declared

    clients = {"a": {"y": np.array([1, 4, 2])}, "b": {"y": np.array([3, 3])}}
    declared = fedppl.FederatedModel(model, shared=["rate"])
    with pytest.raises(DeclarationError, match="prior=True needs a Gaussian.*pm.Normal"):
        fedppl.fit(declared, clients, fedppl.Confidence(prior=True), progressbar=False)
    fit = fedppl.fit(declared, clients, fedppl.Confidence(), rounds=5, progressbar=False, random_seed=1)
    assert np.all(np.isfinite(fit.estimate["rate"]))


def test_bad_rows_are_named_before_the_first_round() -> None:
    clients = clients_of()
    clients["client 1"]["y"][0] = np.nan
    with pytest.raises(DataError, match="client 1"):
        fedppl.fit(MODEL, clients, fedppl.Confidence(), progressbar=False)
