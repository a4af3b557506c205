"""HM1: the joint posterior in closed form, what clients and server send, and how it fails."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import DeclarationError, FederatedModel, Status, covariance, gaussian
from fedppl.algorithms.hierarchical import hm1 as _coupled
from fedppl.algorithms.hierarchical.hm1 import _overfitted
from fedppl.algorithms.hierarchical.hm1_gradient import frame_of
from fedppl.models import hm1
from fedppl.numerics.covariance import Covariance
from tests.support import problems
from tests.support.states import received

K, D = 5, 3


@functools.cache
def declared(**options: Any) -> FederatedModel:
    return FederatedModel(functools.partial(hm1.linear_regression, **options), hm1.SHARED)


def clients(count: int = K, *, rows: int = 12, noise: float = 0.7, seed: int = 0) -> tuple[problems.Clients, Any]:
    """Clients whose coefficients share a common part, and those coefficients."""
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=D) + 0.4 * rng.normal(size=(count, D))
    data = {}
    for k in range(count):
        X = rng.normal(size=(rows + k, D))
        data[f"device {k}"] = {"X": X, "y": X @ theta[k] + noise * rng.normal(size=rows + k)}
    return data, theta


def fixed(matrix: Any) -> Covariance:
    """Ω as it is."""
    omega = covariance.Omega(np.asarray(matrix, dtype=float), np.nan, np.zeros((len(matrix), 0)))
    return Covariance("fixed", lambda count: omega, lambda before, mean, moment: omega, True)


def some_omega(count: int = K) -> Any:
    factor = np.random.default_rng(9).normal(size=(count, 2))
    return factor @ factor.T + 0.3 * np.eye(count)


def exact(data: problems.Clients, omega: Any, sd: float, *, mean: Any = 0.0, row: Any = None) -> tuple[Any, Any]:
    """Mean (K, d), covariance (K d, K d) of vec Θ ~ N(1 ⊗ μ₀, Ω ⊗ A) and y_k ~ N(X_k θ_k, sd²): one linear system."""
    row = np.eye(D) if row is None else row
    prior = np.kron(np.linalg.inv(omega), np.linalg.inv(row))
    precision, linear = prior.copy(), prior @ np.tile(np.broadcast_to(mean, D), len(data))
    for k, one in enumerate(data.values()):
        block = slice(k * D, (k + 1) * D)
        precision[block, block] += one["X"].T @ one["X"] / sd**2
        linear[block] += one["X"].T @ one["y"] / sd**2
    covariance_ = np.linalg.inv(precision)
    return (covariance_ @ linear).reshape(-1, D), covariance_


def fit(data: problems.Clients, algorithm: Any, model: FederatedModel | None = None, **keywords: Any) -> Any:
    settings: dict[str, Any] = {"rounds": 30, "progressbar": False, "random_seed": 1, **keywords}
    return fedppl.fit(model or declared(noise_sd=0.7), data, algorithm, **settings)


# --- numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_common_factors_and_the_joint_system_give_one_posterior(rank: int) -> None:
    """Ω = δ I + U Uᵀ through K small systems, and through one of size K d; some clients know nothing."""
    rng = np.random.default_rng(rank)
    X = rng.normal(size=(K, 4, D))
    precision = np.einsum("kni,knj->kij", X, X)
    precision[1] = 0.0
    linear = np.einsum("kij,kj->ki", precision, rng.normal(size=(K, D)))
    factor = rng.normal(size=(K, rank))
    omega = covariance.Omega(0.2 * np.eye(K) + factor @ factor.T, 0.2, factor)
    fast = _coupled.posterior(linear, precision, omega)
    slow = _coupled.posterior(linear, precision, omega._replace(remainder=np.nan))
    for ours, theirs in zip(fast, slow, strict=True):
        assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_moment_counts_the_covariances_between_clients() -> None:
    data, _ = clients()
    mean, joint = exact(data, some_omega(), 0.7)
    state = fit(data, fedppl.HM1(structure=fixed(some_omega()))).state
    traces = np.einsum("kili->kl", joint.reshape(K, D, K, D))
    found = _coupled.posterior(*state.factors, state.omega)
    assert_allclose(found.moment, (traces + mean @ mean.T) / D, rtol=1e-6)


def test_conditional_priors_are_those_of_a_gaussian() -> None:
    """θ_k | rest ~ N(−Σ_{i≠k} θ_i Ω⁻¹_ik / Ω⁻¹_kk, 1 / Ω⁻¹_kk): by conditioning Ω directly."""
    omega = some_omega()
    mean = np.random.default_rng(1).normal(size=(K, D))
    pulls, weights = _coupled.conditional_priors(covariance.Omega(omega, np.nan, np.zeros((K, 0))), mean)
    rest = [0, 1, 3, 4]
    gain = omega[2, rest] @ np.linalg.inv(omega[np.ix_(rest, rest)])
    assert_allclose(pulls[2] / weights[2], gain @ mean[rest])
    assert_allclose(1 / weights[2], omega[2, 2] - gain @ omega[rest, 2])


@pytest.mark.parametrize("structure", [covariance.exchangeable(), covariance.low_rank(1), covariance.low_rank(2)])
def test_em_ends_where_the_marginal_likelihood_is_stationary(structure: Covariance) -> None:
    """EM's fixed point: no small change within the structure gives the data a higher density."""
    data, _ = clients(8, rows=30)
    state = fit(data, fedppl.HM1(structure=structure)).state
    omega, _ = _coupled.estimate(*state.factors, state.omega, structure, tolerance=1e-10, limit=20000)

    def log_density(matrix: Any) -> float:
        """log ∫ N(Θ; 0, Ω ⊗ I) Π exp(r'θ − ½ θ'Hθ) dΘ."""
        prior = np.kron(np.linalg.inv(matrix), np.eye(D))
        joint = prior.copy()
        for k in range(8):
            joint[k * D : (k + 1) * D, k * D : (k + 1) * D] += state.factors.precision[k]
        r = state.factors.linear.ravel()
        return float(
            0.5 * (np.linalg.slogdet(prior)[1] - np.linalg.slogdet(joint)[1]) + 0.5 * r @ np.linalg.solve(joint, r)
        )

    best = log_density(omega.matrix)
    rng = np.random.default_rng(0)
    for _ in range(40):
        if structure.name == "exchangeable":
            a, b = omega.remainder, float(omega.factor[0, 0] ** 2)
            near = a * np.exp(0.02 * rng.normal()) * np.eye(8) + b * np.exp(0.02 * rng.normal())
        else:
            factor = omega.factor + 0.01 * rng.normal(size=omega.factor.shape)
            near = omega.remainder * np.exp(0.02 * rng.normal()) * np.eye(8) + factor @ factor.T
        assert log_density(near) <= best + 1e-6


# --- the algorithm ----------------------------------------------------------------------------------------------------


def test_with_known_omega_and_noise_it_is_the_posterior() -> None:
    """Linear regression: factors are exact after one round; means to 1e-6 sd, standard errors to 1e-6."""
    data, _ = clients()
    mean, joint = exact(data, some_omega(), 0.7)
    found = fit(data, fedppl.HM1(structure=fixed(some_omega())))
    sd = np.sqrt(np.diag(joint)).reshape(K, D)
    assert found.status is Status.CONVERGED
    assert_allclose(found.idata["fit"]["theta"] / sd, mean / sd, atol=1e-6)
    assert_allclose(found.idata["fit"]["theta_sd"], sd, rtol=1e-6)


def test_the_declared_prior_is_mean_and_row_covariance() -> None:
    def builder(X: Any, y: Any) -> Any:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            theta = pm.MvNormal("theta", [1.0, -1.0, 0.5], cov=row)
            pm.Normal("response", X @ theta, 0.7, observed=y)
        return model

    row = np.array([[2.0, 0.6, 0.0], [0.6, 1.0, -0.2], [0.0, -0.2, 0.5]])
    data, _ = clients()
    mean, joint = exact(data, some_omega(), 0.7, mean=np.array([1.0, -1.0, 0.5]), row=row)
    found = fit(data, fedppl.HM1(structure=fixed(some_omega())), FederatedModel(builder, ["theta"]))
    sd = np.sqrt(np.diag(joint)).reshape(K, D)
    assert_allclose(found.idata["fit"]["theta"] / sd, mean / sd, atol=1e-5)
    assert_allclose(found.idata["fit"]["theta_sd"], sd, rtol=1e-5)


def test_with_independent_clients_it_is_each_clients_own_posterior() -> None:
    data, _ = clients()
    found = fit(data, fedppl.HM1(structure=fixed(np.eye(K))))
    for k, one in enumerate(data.values()):
        alone = np.linalg.solve(one["X"].T @ one["X"] / 0.49 + np.eye(D), one["X"].T @ one["y"] / 0.49)
        assert_allclose(found.idata["fit"]["theta"][k], alone, atol=1e-7)


def test_clients_draw_their_margin_of_the_joint_posterior() -> None:
    data, _ = clients()
    mean, joint = exact(data, some_omega(), 0.7)
    found = fit(data, fedppl.HM1(structure=fixed(some_omega())))
    posterior = found.client("device 2", draws=2000)["posterior"]
    block = joint[2 * D : 3 * D, 2 * D : 3 * D]
    draws = posterior["theta"].values.reshape(-1, D)
    error = np.sqrt(np.diag(block) / min(8000.0, posterior.attrs["fedppl_ess"]))
    assert np.all(np.abs(draws.mean(axis=0) - mean[2]) < 4.5 * error)
    assert_allclose(np.cov(draws.T), block, atol=0.08 * block.diagonal().max())


@pytest.mark.slow
def test_the_posterior_given_omega_of_an_unknown_noise_agrees_with_long_nuts() -> None:
    """σ_k unknown, two clients, Ω known: against NUTS on the joint model. Laplace takes the tails of t for Gaussian."""
    data, _ = clients(2, rows=60)
    omega = np.array([[1.0, 0.8], [0.8, 1.0]])
    found = fit(data, fedppl.HM1(structure=fixed(omega)), declared())
    with pm.Model():
        z = pm.Normal("z", shape=(2, D))
        theta = pm.Deterministic("theta", np.linalg.cholesky(omega) @ z)
        for k, one in enumerate(data.values()):
            sigma = pm.math.exp(pm.Normal(f"log_sigma_{k}", 0, 1))
            pm.Normal(f"y_{k}", one["X"] @ theta[k], sigma, observed=one["y"])
        trace = pm.sample(2000, tune=1000, chains=2, cores=1, random_seed=1, progressbar=False)
    draws = trace["posterior"]["theta"]
    mean, sd = draws.mean(("chain", "draw")).values, draws.std(("chain", "draw")).values
    assert np.all(np.abs(found.idata["fit"]["theta"].values - mean) < 0.1 * sd)
    assert_allclose(found.idata["fit"]["theta_sd"], sd, rtol=0.08)


def test_borrowing_helps_where_clients_are_alike() -> None:
    data, theta = clients(20, rows=4, noise=1.0)
    found = fit(data, fedppl.HM1(), declared(noise_sd=1.0))
    alone = fit(data, fedppl.HM1(structure=fixed(np.eye(20))), declared(noise_sd=1.0))
    error, before = (np.linalg.norm(f.idata["fit"]["theta"].values - theta) for f in (found, alone))
    assert error < 0.85 * before
    graph = found.idata["fit"]["correlation"]
    assert graph.dims == ("client", "other_client")
    assert 0.5 < float(graph.sel(client="device 0", other_client="device 7")) < 1.0
    assert_allclose(np.diag(graph), 1.0)


def test_a_likelihood_that_is_not_gaussian() -> None:
    """Logistic regression: the joint mode, found here by Newton steps on all clients at once."""
    rng = np.random.default_rng(2)
    data = {}
    for k in range(3):
        X = rng.normal(size=(60, 2))
        data[f"device {k}"] = {"X": X, "y": (rng.random(60) < 1 / (1 + np.exp(-X @ [1.0, -0.5]))).astype(np.int64)}
    omega = np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.5], [0.2, 0.5, 1.0]])
    prior = np.kron(np.linalg.inv(omega), np.eye(2))
    theta = np.zeros(6)
    for _ in range(50):
        gradient, hessian = -prior @ theta, prior.copy()
        for k, one in enumerate(data.values()):
            block = slice(2 * k, 2 * k + 2)
            p = 1 / (1 + np.exp(-one["X"] @ theta[block]))
            gradient[block] += one["X"].T @ (one["y"] - p)
            hessian[block, block] += (one["X"].T * (p * (1 - p))) @ one["X"]
        theta = theta + np.linalg.solve(hessian, gradient)
    model = FederatedModel(hm1.logistic_regression, hm1.SHARED)
    found = fit(data, fedppl.HM1(structure=fixed(omega), tolerance=1e-6), model)
    assert found.status is Status.CONVERGED
    assert_allclose(found.idata["fit"]["theta"].values.ravel(), theta, atol=1e-5)


@problems.few_rounds
def test_an_unknown_noise_is_estimated_where_it_is() -> None:
    data, _ = clients(rows=200, noise=0.7)
    found = fit(data, fedppl.HM1(report=["sigma"]), declared())
    sigma = found.idata["rounds"]["sigma"].values[-1]
    for k, one in enumerate(data.values()):
        residual = one["y"] - one["X"] @ np.linalg.lstsq(one["X"], one["y"], rcond=None)[0]
        assert sigma[k] == pytest.approx(np.sqrt(np.mean(residual**2)), rel=0.03)
    silent = fit(data, fedppl.HM1(), declared(), rounds=1)
    assert "sigma" not in silent.idata["rounds"]
    assert not np.any(found.idata["rounds"]["raised"].values[-1])


@pytest.mark.slow
def test_strong_signals_under_an_unknown_noise_converge_in_few_rounds() -> None:
    """Parameters of several prior sds and 16 rows for 8 of them: likelihoods with heavy tails, rank 2, K = 60."""
    rng = np.random.default_rng(0)
    omega = (factor := rng.normal(size=(60, 2))) @ factor.T + 0.05 * np.eye(60)
    theta = np.linalg.cholesky(omega) @ rng.normal(size=(60, 8)) * 2
    data = {}
    for k in range(60):
        X = rng.normal(size=(16, 8))
        data[f"device {k}"] = {"X": X, "y": X @ theta[k] + rng.normal(size=16)}
    found = fit(data, fedppl.HM1(structure=covariance.low_rank(2)), declared())
    assert found.status is Status.CONVERGED
    assert len(found.records) <= 10
    alone = np.array([np.linalg.lstsq(one["X"], one["y"], rcond=None)[0] for one in data.values()])
    assert np.linalg.norm(found.idata["fit"]["theta"].values - theta) < 0.9 * np.linalg.norm(alone - theta)


def test_a_silent_client_keeps_its_factor_and_the_others_go_on() -> None:
    data, _ = clients()
    algorithm = fedppl.HM1(structure=fixed(some_omega()))
    steps = list(fedppl.rounds(declared(noise_sd=0.7), data, algorithm, participation=2, rounds=12, random_seed=3))
    for before, after in zip(steps, steps[1:], strict=False):
        silent = [before.state.where[k] for k in data if k not in after.record.asked]
        assert_array_equal(before.state.factors.linear[silent], after.state.factors.linear[silent])
    assert steps[-1].state.has_replied.all()
    mean, joint = exact(data, some_omega(), 0.7)
    assert_allclose(steps[-1].state.mean, mean, atol=1e-6 * np.sqrt(joint.max()))


def test_replies_hold_the_factor_and_requests_one_vector_and_its_weight() -> None:
    data, _ = clients()
    algorithm = fedppl.HM1()
    enrolled = declared(noise_sd=0.7).enrol(data, kernel=False)
    state = algorithm.init(enrolled["device 0"].layout, tuple(data), np.random.default_rng(0))
    message = algorithm.broadcast(state, "device 0")
    assert {name: np.shape(value) for name, value in message.items()} == {"start": (D,), "pull": (D,), "weight": ()}
    reply = algorithm.update_client(enrolled["device 0"], None, message, np.random.default_rng(0)).reply
    X, y = data["device 0"]["X"], data["device 0"]["y"]
    assert_allclose(gaussian.unpack_triangle(reply["precision"]), X.T @ X / 0.49, rtol=1e-6, atol=1e-6)
    assert_allclose(reply["linear"], X.T @ y / 0.49, rtol=1e-6)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def bad(reply: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**reply, name: np.asarray(value, dtype=float)}


def test_factors_that_are_none_are_rejected() -> None:
    data, _ = clients()
    algorithm = fedppl.HM1()
    state = algorithm.init(declared(noise_sd=0.7).enrol(data, kernel=False)["device 0"].layout, tuple(data), None)  # type: ignore[arg-type]
    good = {"linear": np.zeros(D), "precision": gaussian.pack_triangle(np.eye(D))}
    assert algorithm.replies.reject(state, good) is None
    indefinite = algorithm.replies.reject(
        state, bad(good, "precision", gaussian.pack_triangle(np.diag([1.0, 1.0, -1.0])))
    )
    assert "positive semi-definite" in str(indefinite)
    assert "implausibly" in str(algorithm.replies.reject(state, bad(good, "precision", 1e16 * good["precision"])))
    assert "implausibly" in str(algorithm.replies.reject(state, bad(good, "linear", [1e19, 0, 0])))


@problems.few_rounds
def test_a_pull_without_curvature_stalls_the_run_and_leaves_the_state() -> None:
    """exp(r'θ) alone is no density, and with it the factors of Ω grow without end."""
    data, _ = clients()
    algorithm = fedppl.HM1(structure=covariance.low_rank(1))
    state = fit(data, algorithm, rounds=1).state
    pull = {"linear": np.full(D, 9e5), "precision": np.zeros(D * (D + 1) // 2)}
    assert algorithm.replies.reject(state, pull) is None
    for _ in range(40):
        before = state
        state, report = algorithm.update_server(state, received({"device 0": pull}, summed=False))
        if report.status is Status.STALLED:
            break
    assert report.status is Status.STALLED
    assert "grew without bound" in str(report.message)
    for ours, theirs in ((state.mean, before.mean), (state.omega.matrix, before.omega.matrix)):
        assert_array_equal(ours, theirs)
        assert np.all(np.isfinite(ours))


@problems.few_rounds
def test_no_replies_change_nothing() -> None:
    data, _ = clients()
    state = fit(data, fedppl.HM1(), rounds=1).state
    after, _ = fedppl.HM1().update_server(state, received({}, summed=False))
    assert after is state


def test_new_clients_are_refused_with_the_remedy() -> None:
    data, _ = clients()
    found = fit(data, fedppl.HM1())
    with pytest.raises(DeclarationError, match="did not take part"):
        found.new_client(data["device 0"])
    with pytest.raises(DeclarationError, match="no posterior of parameters that all clients share"):
        _ = found.posterior


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"tolerance": 0.0}, "tolerance"),
        ({"structure": "low rank"}, "structure"),
        ({"structure": covariance.exchangeable}, "structure=fedppl.covariance.exchangeable must be one that is built"),
        ({"report": "sigma"}, "list of names"),
        ({"local": fedppl.local.NUTS()}, "expansions"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(DeclarationError, match=word):
        fedppl.HM1(**settings)


def test_what_does_not_fit_the_clients_is_refused_before_the_first_round() -> None:
    data, _ = clients(3)
    with pytest.raises(DeclarationError, match="below the number of clients"):
        fit(data, fedppl.HM1(structure=covariance.low_rank(3)))
    with pytest.raises(DeclarationError, match="scalar local variables are"):
        fit(data, fedppl.HM1(report=["sigmal"]), declared())

    def skewed(X: Any, y: Any) -> Any:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            pm.Normal("response", X @ pm.Gamma("theta", 2, 1, shape=D), 1, observed=y)
        return model

    with pytest.raises(DeclarationError, match="not Gaussian"):
        fit(data, fedppl.HM1(), FederatedModel(skewed, ["theta"]))


def test_the_frame_is_the_declared_prior() -> None:
    data, _ = clients(2)
    frame = frame_of(declared(noise_sd=0.7).enrol(data, kernel=False)["device 0"].layout)
    assert_allclose(frame.center, 0.0)
    assert_allclose(frame.root, np.eye(D))


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def algorithm_1(data: problems.Clients, eta: float, steps: int, alpha: float, rounds: int) -> tuple[Any, Any]:
    """FedLin's lines in plain NumPy."""
    theta, omega = np.zeros((len(data), D)), np.eye(len(data))
    for _ in range(rounds):
        pull = np.linalg.inv(omega) @ theta
        for k, one in enumerate(data.values()):
            for _ in range(steps):
                theta[k] = theta[k] + 2 * eta * one["X"].T @ (one["y"] - one["X"] @ theta[k])
        theta = theta - 2 * eta * pull
        omega = (1 - alpha) * omega + alpha / D * theta @ theta.T
    return theta, omega


def test_algorithm_1_is_the_papers_line_by_line() -> None:
    data, _ = clients()
    theta, omega = algorithm_1(data, 0.002, 7, 0.2, 9)
    algorithm = fedppl.HM1Gradient(learning_rate=0.002, steps=7, alpha=0.2)
    found = fit(data, algorithm, declared(noise_sd=1.0), rounds=9)
    assert_allclose(found.idata["fit"]["theta"], theta, rtol=1e-9)
    assert_allclose(found.idata["fit"]["omega"], omega, rtol=1e-9)
    one = found.client("device 1", draws=1, chains=1)["posterior"]
    assert_allclose(one["theta"].values[0, 0], theta[1])


def test_batches_are_summed_as_the_paper_has_it() -> None:
    """One step with a batch of one row from Θ = 0: 2 η x y of that row, not n times as much."""
    data = {"a": {"X": np.ones((4, D)), "y": np.full(4, 2.0)}, "b": {"X": np.ones((4, D)), "y": np.full(4, 2.0)}}
    algorithm = fedppl.HM1Gradient(learning_rate=0.01, steps=1, batch_size=1)
    found = fit(data, algorithm, declared(noise_sd=1.0), rounds=1)
    assert_allclose(found.idata["fit"]["theta"], 2 * 0.01 * 2.0)


def test_only_those_who_were_asked_move() -> None:
    data, _ = clients()
    algorithm = fedppl.HM1Gradient(learning_rate=0.002, steps=3)
    before = None
    model = declared(noise_sd=1.0)
    for step in fedppl.rounds(model, data, algorithm, participation=2, rounds=6, random_seed=3):
        if before is not None:
            moved = np.any(step.state.theta != before, axis=1)
            asked = [k in step.record.asked for k in data]
            assert_array_equal(moved, asked)
        before = step.state.theta


def test_the_proximal_step_is_the_papers_formula_and_stable_for_a_singular_omega() -> None:
    """Equal n_k: Θ ← ΘΩ(Ω + 2sI)⁻¹ with s = T η / n."""
    data = {k: {"X": one["X"][:12], "y": one["y"][:12]} for k, one in clients()[0].items()}
    algorithm = fedppl.HM1Gradient(learning_rate=0.1, steps=5, prior_step="proximal")
    state = fit(data, algorithm, declared(noise_sd=1.0), rounds=1).state
    factor = np.random.default_rng(0).normal(size=(K, 2))
    state = state._replace(omega=factor @ factor.T)  # of rank 2
    theta = np.random.default_rng(1).normal(size=(K, D))
    replies = {k: {"theta": theta[i], "step": np.array(0.1 * 5 / 12)} for i, k in enumerate(data)}
    after, _ = algorithm.update_server(state, received(replies, summed=False))
    s = 0.1 * 5 / 12
    assert_allclose(after.theta, state.omega @ np.linalg.inv(state.omega + 2 * s * np.eye(K)) @ theta, rtol=1e-9)


def test_the_proximal_form_ends_near_the_posterior_mode() -> None:
    """Ω held at I by a tiny α, one small step a round: each client's own MAP."""
    data, _ = clients()
    algorithm = fedppl.HM1Gradient(learning_rate=0.05, steps=1, alpha=1e-12, prior_step="proximal")
    found = fit(data, algorithm, declared(noise_sd=0.7), rounds=3000)
    assert found.status is Status.CONVERGED
    for k, one in enumerate(data.values()):
        alone = np.linalg.solve(one["X"].T @ one["X"] / 0.49 + np.eye(D), one["X"].T @ one["y"] / 0.49)
        assert_allclose(found.idata["fit"]["theta"][k], alone, atol=2e-4)


def test_a_shrinkage_that_diverges_stalls_and_says_so() -> None:
    """η far above the smallest eigenvalue of Ω, 10⁻⁶ here: each step is some 10⁴ times the parameters."""
    data, _ = clients()
    algorithm = fedppl.HM1Gradient(learning_rate=0.01, steps=5)
    enrolled = declared(noise_sd=1.0).enrol(data, kernel=False)
    state = last = fit(data, algorithm, declared(noise_sd=1.0), rounds=1).state
    for _ in range(4):
        last = state = state._replace(omega=1e-6 * np.eye(K), pulls=1e6 * state.theta)
        replies = {}
        for client_id, client in enrolled.items():
            message = algorithm.broadcast(state, client_id)
            replies[client_id] = algorithm.update_client(client, None, message, np.random.default_rng(0)).reply
        state, report = algorithm.update_server(state, received(replies, summed=False))
        if report.status is Status.STALLED:
            break
    assert report.status is Status.STALLED
    assert "prior_step='proximal'" in str(report.message)
    assert_array_equal(state.theta, last.theta)


def test_the_gradient_form_wants_one_variance() -> None:
    def builder(X: Any, y: Any) -> Any:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            theta = pm.Normal("theta", 0, [1.0, 2.0, 3.0])
            pm.Normal("response", X @ theta, 1, observed=y)
        return model

    data, _ = clients(2)
    with pytest.raises(DeclarationError, match="one sd"):
        fit(data, fedppl.HM1Gradient(learning_rate=0.01), FederatedModel(builder, ["theta"]))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": 0.1, "steps": 0}, "steps"),
        ({"learning_rate": 0.1, "alpha": 1.0}, "alpha"),
        ({"learning_rate": 0.1, "prior_step": "implicit"}, "prior_step"),
        ({"learning_rate": 0.1, "batch_size": 0}, "batch_size"),
    ],
)
def test_bad_settings_of_the_gradient_form_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(DeclarationError, match=word):
        fedppl.HM1Gradient(**settings)


def test_factors_that_take_up_everything_are_told() -> None:
    """Two factors from three coordinates of eight clients: δ collapses, and the fit says so."""
    data, _ = clients(8, rows=15, seed=1)
    found = fit(data, fedppl.HM1(structure=covariance.low_rank(2)), rounds=100)
    assert found.state.omega.remainder < 0.01 * np.trace(found.state.omega.matrix) / 8
    assert "may have fitted noise" in found.message
    assert fit(data, fedppl.HM1()).message == ""


@pytest.mark.parametrize("rank", [1, 2])
def test_a_collapse_is_told_at_any_rank_and_at_any_level(rank: int) -> None:
    """θ = u z + e at six clients, estimated from their likelihoods: with e all but nothing it is told, else not."""
    rng, count, size = np.random.default_rng(4), 6, 4
    structure, precision = covariance.low_rank(rank), np.tile(20.0 * np.eye(size), (count, 1, 1))
    said = []
    for own, level in ((0.0, 0.0), (1.0, 0.0), (0.0, 30.0)):
        theta = level + rng.normal(size=(count, rank)) @ rng.normal(size=(rank, size))
        theta = theta + own * rng.normal(size=(count, size))
        linear = 20.0 * theta  # nothing beside the factors: noise of rows would be taken for e
        omega, _ = _coupled.estimate(linear, precision, structure.start(count), structure, tolerance=1e-9, limit=20_000)
        said.append("standard errors" in _overfitted(omega, precision, structure))
    assert said == [True, False, True]


def test_more_factors_than_coordinates_are_refused() -> None:
    with pytest.raises(DeclarationError, match="smaller rank"):
        fit(clients(8)[0], fedppl.HM1(structure=covariance.low_rank(3)))
