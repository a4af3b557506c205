"""Federated averaging: centralised gradient descent first, then closed forms, then what every such algorithm keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize, minimize_scalar

import fedppl
from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm
from fedppl.types import DataError, DeclarationError, Status
from tests.support import pooled, problems


def fitted(model: Any, clients: Any, algorithm: AnyAlgorithm, **settings: Any) -> fedppl.Fit:
    return fedppl.fit(
        model, clients, algorithm, **({"progressbar": False, "random_seed": 1, "rounds": 2000} | settings)
    )


def path(model: Any, clients: Any, algorithm: AnyAlgorithm, rounds: int, **settings: Any) -> list[Any]:
    """φ after every round."""
    steps = fedppl.rounds(model, clients, algorithm, rounds=rounds, random_seed=1, **settings)
    return [np.array(step.state.phi) for step in steps]


# --- centralised gradient descent -----------------------------------------------------------------------------


def test_one_full_step_a_round_is_gradient_descent_on_the_log_posterior() -> None:
    """φ ← φ − η [(Σ XᵀX + I/9) φ − Σ Xᵀy] / N, from the prior's mean 0."""
    model, clients = pooled.linear()
    found = path(model, clients, fedppl.averaging.FedAvg(learning_rate=0.1, steps=1, tolerance=1e-15), 150)
    assert len(found) == 150
    X, y = (np.concatenate([d[name] for d in clients.values()]) for name in ("X", "y"))
    phi = np.zeros(2)
    for ours in found:
        phi = phi - 0.1 * (X.T @ (X @ phi - y) + pooled.PRIOR @ phi) / len(y)
        assert_allclose(ours, phi, rtol=0, atol=1e-10)
    assert np.linalg.norm(found[0] - found[-1]) > 0.1  # it went somewhere


@pytest.mark.slow
def test_the_same_holds_for_a_logistic_regression() -> None:
    """φ ← φ − η [Σ Xᵀ(logit⁻¹ Xβ − y) + β/4] / N."""
    model, clients = pooled.logit()
    found = path(model, clients, fedppl.averaging.FedAvg(learning_rate=1.0, steps=1, tolerance=1e-15), 60)
    beta, rows = np.zeros(2), sum(len(d["y"]) for d in clients.values())
    for ours in found:
        beta = beta - pooled.logit_gradient(clients, beta) / rows
        assert_allclose(ours, beta, rtol=0, atol=1e-10)


# --- closed forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["rows", "equal"])
def test_rounds_of_many_steps_follow_their_closed_form(weights: str) -> None:
    """φ ← Σ w_k [φ_k* + (I − ηA_k)ᵀ (φ − φ_k*)] / Σ w_k."""
    model, clients = pooled.linear()
    found = path(
        model, clients, fedppl.averaging.FedAvg(learning_rate=0.05, steps=7, weights=weights, tolerance=1e-15), 30
    )
    phi = np.zeros(2)
    for ours in found:
        ends = [
            (pooled.after_steps(A, b, phi, 0.05, 7), n if weights == "rows" else 1)
            for A, b, n in pooled.losses(clients)
        ]
        phi = sum(w * end for end, w in ends) / sum(w for _, w in ends)
        assert_allclose(ours, phi, rtol=0, atol=1e-10)


@pytest.mark.parametrize("weights", ["rows", "equal"])
def test_the_fixed_point_of_single_steps_is_the_mode_and_of_many_it_is_not(weights: str) -> None:
    """(Σ w A)⁻¹ Σ w b for T = 1; with T = 40 clients drift to their own modes, as the docstring says."""
    model, clients = pooled.linear()
    exact = pooled.mode(clients, weights)
    single = fitted(
        model, clients, fedppl.averaging.FedAvg(learning_rate=0.2, steps=1, weights=weights, tolerance=1e-10)
    )
    assert single.status is Status.CONVERGED
    assert_allclose(single.estimate["mu"], exact, atol=1e-8)
    many = fitted(
        model, clients, fedppl.averaging.FedAvg(learning_rate=0.2, steps=40, weights=weights, tolerance=1e-10)
    )
    assert many.status is Status.CONVERGED
    assert np.max(np.abs(many.estimate["mu"] - exact)) > 0.05


def test_local_variables_take_their_steps_along() -> None:
    """Gaussian throughout, so φ at the joint mode is the mean of the exact marginal posterior."""
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.averaging.FedAvg(learning_rate=0.2, steps=1, tolerance=1e-9), rounds=5000)
    assert fit.status is Status.CONVERGED
    exact = problems.regression_posterior(clients)
    assert_allclose(fit.state.phi, gaussian.mean(exact), atol=1e-6)
    # β given φ: (XᵀX + 4I)⁻¹ (Xᵀ(y − a) + 4μ)
    mu, a = fit.state.phi[:2], fit.state.phi[2]
    for client_id, d in clients.items():
        beta = np.linalg.solve(d["X"].T @ d["X"] + 4 * np.eye(2), d["X"].T @ (d["y"] - a) + 4 * mu)
        draws = fit.client(client_id, draws=3, chains=1)["posterior"]["beta"].values
        assert_allclose(draws, np.broadcast_to(beta, (1, 3, 2)), atol=1e-5)
    # a client that never took part: θ goes to its mode at φ
    d = clients["clinic 1"]
    beta = np.linalg.solve(d["X"].T @ d["X"] + 4 * np.eye(2), d["X"].T @ (d["y"] - a) + 4 * mu)
    assert_allclose(fit.new_client(d, draws=2, chains=1)["posterior"]["beta"].values[0, 0], beta, atol=1e-6)


def test_a_prior_that_is_not_gaussian_is_shared_out() -> None:
    """Mode of −n u − S e^(−2u)/2 + u − e^(2u)/2 over u = log σ, by a line search."""
    model, clients = pooled.spread()
    fit = fitted(model, clients, fedppl.averaging.FedAvg(learning_rate=0.2, steps=1, tolerance=1e-10))
    assert not fit.layout.prior_is_gaussian
    exact = minimize_scalar(lambda u: -pooled.spread_log_density(clients, u), (0.0, 1.0), options={"xtol": 1e-12}).x
    without = minimize_scalar(lambda u: -pooled.spread_log_density(clients, u, 0.0), (0.0, 1.0)).x
    assert abs(exact - without) > 1e-3  # the prior matters
    assert_allclose(fit.state.phi, [exact], atol=1e-6)
    assert_allclose(fit.estimate["sigma"], np.exp(exact), atol=1e-6)


def test_all_draws_of_a_point_are_equal_and_there_is_no_posterior() -> None:
    model, clients = pooled.linear()
    fit = fitted(model, clients, fedppl.averaging.FedAvg(learning_rate=0.1), rounds=3)
    drawn = fit.client("plot 2", draws=4, chains=2)["posterior"]["mu"].values
    assert_array_equal(drawn, np.broadcast_to(fit.state.phi, (2, 4, 2)))
    assert_array_equal(fit.idata["point_estimate"]["mu"].values, fit.state.phi)
    with pytest.raises(DeclarationError, match="no posterior"):
        _ = fit.posterior


# --- batches --------------------------------------------------------------------------------------------------


def test_batches_as_large_as_the_data_are_all_of_it() -> None:
    model, clients = problems.regression()
    whole = path(model, clients, fedppl.averaging.FedAvg(learning_rate=0.05, steps=5), 3)
    for ours, theirs in zip(
        path(model, clients, fedppl.averaging.FedAvg(learning_rate=0.05, steps=5, batch_size=99), 3), whole, strict=True
    ):
        assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_small_batches_end_near_the_mode_and_do_not_claim_to_have_arrived() -> None:
    """An autoregression with rate ηλ about the mode: its mean has the sd of n ηλ/2 independent rounds."""
    model, clients = pooled.linear()
    exact, sds = pooled.mode(clients), []
    total = sum(n * A for A, _, n in pooled.losses(clients)) / sum(n for *_, n in pooled.losses(clients))
    slowest = np.linalg.eigvalsh(total)[0]
    for rate in (0.1, 0.01):
        found = np.array(path(model, clients, fedppl.averaging.FedAvg(learning_rate=rate, steps=1, batch_size=3), 1000))
        assert len(found) == 1000  # none of the rounds was taken for convergence
        late = found[500:]
        sds.append(late.std(axis=0))
        assert np.all(np.abs(late.mean(axis=0) - exact) < 4 * sds[-1] / np.sqrt(len(late) * rate * slowest / 2))
    assert np.all(sds[1] < 0.6 * sds[0])  # √(1/10), and room for the few independent rounds


def row_effects(y: Any) -> Any:
    return problems.counts_builder(y)


def mean_of_rows(y: Any) -> Any:
    """The prior of θ depends on the rows' mean: no sum over rows."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 1)
        theta = pm.Normal("theta", mu + 0.1 * y.sum(), 1)
        pm.Normal("obs", theta, 1, observed=y)
    return model


def as_long_by_chance(y: Any, w: Any) -> Any:
    """w has an entry per coefficient; with as many rows it cannot be told from a column."""
    with pm.Model() as model:
        y, w = pm.Data("y", y), pm.Data("w", w)
        mu = pm.Normal("mu", 0, 1)
        pm.Normal("obs", mu * w.sum(), 1, observed=y)
    return model


@pytest.mark.parametrize(
    ("builder", "data", "match"),
    [
        (row_effects, {"y": np.array([1, 2, 3])}, "no local variable with an entry per row"),
        (problems.without_containers, {"y": np.array([1.0, 2.0])}, "pm.Data containers"),
        (mean_of_rows, {"y": np.array([1.0, 2.0, 4.0])}, "not a sum over its 3 rows"),
        (as_long_by_chance, {"y": np.array([1.0, 2.0, 4.0]), "w": np.array([1.0, 2.0, 3.0])}, "just as long"),
    ],
)
@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "SCAFFOLD", "Ditto", "SeparateSGD"])
def test_models_without_batches_are_refused_before_the_first_round(
    name: str, builder: Any, data: Any, match: str
) -> None:
    model = problems.declared(builder, ("mu",))
    more = {"FedProx": {"mu": 0.1}, "Ditto": {"lam": 0.1}}.get(name, {})
    build = getattr(fedppl.one_shot if name == "SeparateSGD" else fedppl.averaging, name)
    with pytest.raises(DataError, match=match) as error:
        fitted(model, {"a": data}, build(learning_rate=0.01, batch_size=2, **more))
    assert "batch_size=None" in str(error.value)
    assert fitted(model, {"a": data}, build(learning_rate=0.01, **more), rounds=1).records[0].failures == {}


def test_as_long_by_chance_is_no_trouble_at_another_length() -> None:
    model = problems.declared(as_long_by_chance, ("mu",))
    data = {"y": np.array([1.0, 2.0, 4.0, 3.0]), "w": np.array([1.0, 2.0, 3.0])}
    assert (
        fitted(model, {"a": data}, fedppl.averaging.FedAvg(learning_rate=1e-3, batch_size=2), rounds=1)
        .records[0]
        .failures
        == {}
    )


# --- trouble --------------------------------------------------------------------------------------------------


def test_steps_that_diverge_are_a_failure_that_names_the_learning_rate() -> None:
    model, clients = pooled.linear()
    fit = fitted(model, clients, fedppl.averaging.FedAvg(learning_rate=30.0), rounds=2)
    assert fit.status is Status.STALLED
    assert set(fit.records[0].failures) == set(clients)
    assert all("learning_rate=30" in reason for reason in fit.records[0].failures.values())
    assert_array_equal(fit.state.phi, np.zeros(2))


def test_a_client_that_starts_blank_says_so() -> None:
    model, clients = problems.regression()
    steps = list(fedppl.rounds(model, clients, fedppl.averaging.FedAvg(learning_rate=0.1), rounds=2, random_seed=1))
    assert all(info == {"blank": 1.0} for info in steps[0].record.infos.values())
    assert all(info == {} for info in steps[1].record.infos.values())
    everything_shared, of = pooled.linear()  # nothing to be blank about
    step = next(iter(fedppl.rounds(everything_shared, of, fedppl.averaging.FedAvg(learning_rate=0.1), random_seed=1)))
    assert all(info == {} for info in step.record.infos.values())


def test_replies_that_are_none_are_rejected() -> None:
    algorithm = fedppl.averaging.FedAvg(learning_rate=0.1)
    good = {"weighted": np.zeros(2), "weight": np.array(1.0), "local_change": np.array(0.0)}
    assert algorithm.replies.reject(None, good) is None
    for name, value in (("weight", 0.0), ("weight", -3.0), ("weight", 1e30), ("weight", 0.5), ("local_change", -1.0)):
        assert f"{name!r} is {value:.3g}" in str(algorithm.replies.reject(None, {**good, name: np.array(value)}))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1"),
        ({"learning_rate": np.nan}, "learning_rate=nan"),
        ({"learning_rate": np.inf}, "learning_rate=inf"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -4}, "batch_size=-4"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"weights": "size"}, "weights='size'"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"tolerance": 1.0}, "tolerance=1.0"),
    ],
)
@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "SCAFFOLD", "Ditto", "SeparateSGD"])
def test_settings_out_of_range_are_refused(name: str, settings: Any, match: str) -> None:
    more = {"FedProx": {"mu": 0.1}, "Ditto": {"lam": 0.1}}.get(name, {})
    if name == "SeparateSGD" and "weights" in settings:
        pytest.skip("it averages nothing")
    with pytest.raises(DeclarationError, match=match):
        getattr(fedppl.one_shot if name == "SeparateSGD" else fedppl.averaging, name)(
            **({"learning_rate": 0.1, **more} | settings)
        )


def test_a_mode_by_brute_force() -> None:
    """The joint mode of a model with local variables, all of them in one vector, by BFGS.

    In the first round only the θ_k move, and φ stands still: nothing has converged yet.
    """
    model, clients = problems.logistic()
    models = list(model.enrol(clients).values())

    def loss(x: Any) -> float:
        values = [c.log_site(x[:1], x[1 + k : 2 + k])[0] for k, c in enumerate(models)]
        return float(-sum(values) + 0.5 * (x[0] / 1.5) ** 2)

    exact = minimize(loss, np.zeros(1 + len(models)), options={"gtol": 1e-7}).x
    fit = fitted(model, clients, fedppl.averaging.FedAvg(learning_rate=1.0, steps=1, tolerance=1e-9), rounds=5000)
    assert fit.status is Status.CONVERGED
    assert_allclose(fit.state.phi, exact[:1], atol=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        fedppl.averaging.FedAvg(learning_rate=0.05, batch_size=4),
        fedppl.one_shot.SeparateSGD(learning_rate=0.05, steps=30),
    ],
)
def test_flower_gives_the_embedded_engines_numbers(algorithm: AnyAlgorithm) -> None:
    """Over Flower's records, empty messages among them, by way of the grid in this process."""
    pytest.importorskip("flwr")
    from tests.flower import test_flower
    from tests.support.fake_grid import FakeGrid

    model, clients = problems.regression()
    here = fitted(model, clients, algorithm, rounds=3)
    grid = FakeGrid(test_flower.nodes_of(model, clients, algorithm=algorithm))
    there = test_flower.fit(grid, model, len(clients), algorithm, rounds=3)
    assert there.status is here.status
    np.testing.assert_equal(there.state, here.state)
