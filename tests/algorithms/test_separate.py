"""Clients by themselves: closed forms and quadrature; modes for SGD; and nothing that travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize_scalar

import fedppl
from fedppl import gaussian
from fedppl.algorithms.one_shot.separate import near_posterior
from fedppl.contracts import Target
from fedppl.gaussian import Gaussian
from fedppl.testing import normal_means
from fedppl.types import DeclarationError, LocalFailure, Status
from tests.algorithms.test_averaging import fitted
from tests.support import pooled, problems

DRAWS = 4000


def moments(posterior: Any, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Mean and covariance of some variables' draws."""
    drawn = np.concatenate([np.asarray(posterior[name]).reshape(DRAWS, -1) for name in names], axis=1)
    return drawn.mean(axis=0), np.cov(drawn, rowvar=False)


# --- Separate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [fedppl.local.NestedLaplace(), fedppl.local.Laplace()])
def test_each_client_has_the_posterior_of_its_own_data(local: Any) -> None:
    """Conjugate: prior x f_k over (μ, a), and the joint with β. Monte Carlo error of a mean is sd / √4000."""
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.one_shot.Separate(local=local))
    assert fit.status is Status.CONVERGED
    assert len(fit.records) == 1
    for client_id, d in list(clients.items())[:2]:
        mean, covariance = problems.regression_joint(d, problems.REGRESSION_PRIOR)
        found, spread = moments(fit.client(client_id)["posterior"], ("mu", "a", "beta"))
        sd = np.sqrt(np.diag(covariance))
        assert_allclose((found - mean) / sd, 0, atol=4 / np.sqrt(DRAWS))
        assert_allclose(np.sqrt(np.diag(spread)), sd, rtol=6 / np.sqrt(2 * DRAWS))
    # φ alone, by its other closed form
    alone = problems.tilted(problems.regression_site(d), problems.REGRESSION_PRIOR)
    assert_allclose(alone[0], mean[:3], atol=1e-10)


def test_a_new_client_is_served_as_any() -> None:
    model, clients = problems.regression()
    fit = fitted(model, {"clinic 0": clients["clinic 0"]}, fedppl.one_shot.Separate())
    mean, covariance = problems.regression_joint(clients["clinic 3"], problems.REGRESSION_PRIOR)
    found, _ = moments(fit.new_client(clients["clinic 3"])["posterior"], ("mu", "a", "beta"))
    assert_allclose((found - mean) / np.sqrt(np.diag(covariance)), 0, atol=4 / np.sqrt(DRAWS))


def test_a_prior_that_is_not_gaussian_is_had_in_full() -> None:
    """−n u − S e^(−2u)/2 + u − e^(2u)/2 over u = log σ, by quadrature, at each client."""
    model, clients = pooled.spread()
    fit = fitted(model, clients, fedppl.one_shot.Separate())
    for client_id, d in clients.items():
        posterior = fit.client(client_id)["posterior"]
        assert posterior.attrs["fedppl_fallback"] == 0.0
        u = np.log(np.asarray(posterior["sigma"]).ravel())
        mean, sd = pooled.spread_moments({client_id: d})
        third = pooled.spread_moments({client_id: d}, 1 / 3)[0]
        assert abs(u.mean() - mean) < 5 * sd / np.sqrt(DRAWS)
        assert abs(u.std() / sd - 1) < 6 / np.sqrt(2 * DRAWS)
        if client_id == "line 0":  # a share of the prior would be seen
            assert abs(third - mean) > 5 * sd / np.sqrt(DRAWS)


def test_strong_data_under_a_wide_prior_need_no_fallback() -> None:
    """μ ~ N(0, 10²) and posterior sds of about a half: from the prior hardly a point would hit."""
    model, clients = normal_means(rows=200)
    fit = fitted(model, clients, fedppl.one_shot.Separate())
    for client_id, d in clients.items():
        info = fit.records[0].infos[client_id]
        assert info["fallback"] == 0.0
        assert info["relative_ess"] > 0.9
        site = problems.normal_means_site(d["y"])
        precision = site[1] + 0.01
        posterior = fit.client(client_id)["posterior"]
        assert posterior.attrs["fedppl_ess"] > 0.9 * 2 * DRAWS
        drawn = np.asarray(posterior["mu"]).ravel()
        assert abs(drawn.mean() - site[0] / precision) < 5 / np.sqrt(precision * DRAWS)


def test_the_proposal_of_a_gaussian_client_is_its_posterior() -> None:
    model, clients = problems.regression()
    client = model.enrol(clients)["clinic 1"]
    prior = client.layout.prior
    target = Target(client, prior, prior, 0.0)
    exact = gaussian.product(problems.regression_site(clients["clinic 1"]), prior)
    near = near_posterior(target, fedppl.local.NestedLaplace())
    assert_allclose(near.global_.precision, exact.precision, rtol=1e-6, atol=1e-6)
    assert_allclose(near.global_.linear, exact.linear, rtol=1e-6, atol=1e-6)
    assert_array_equal(near.cavity.precision, prior.precision)
    # none without expansions, nor where they fail
    assert near_posterior(target, fedppl.local.Laplace()) is target

    def fails(client: Any, point: Any, share: float) -> Any:
        raise LocalFailure("no mode")

    assert near_posterior(target, fedppl.local.NestedLaplace()._replace(expand=fails)) is target


@problems.few_rounds
def test_nothing_but_diagnostics_travels() -> None:
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.one_shot.Separate(), rounds=3, participation=lambda ids, rng: ids[:1])
    assert fit.status is Status.MAX_ROUNDS
    assert "1 of 4 clients have answered" in fit.message
    assert all(size == 0 for record in fit.records for size in record.bytes_up.values())
    assert set(fit.idata["rounds"].data_vars) >= {"bytes_up", "ess", "pareto_k"}
    with pytest.raises(DeclarationError, match="no posterior of parameters that all clients share"):
        _ = fit.posterior
    with pytest.raises(DeclarationError, match="no parameters that all clients share"):
        _ = fit.estimate


@problems.few_rounds
def test_a_client_that_fails_is_asked_again() -> None:
    model, clients = problems.regression()
    fit = fitted(
        model,
        clients,
        fedppl.one_shot.Separate(local=problems.failing(lambda client_id: client_id == "clinic 2")),
        rounds=2,
    )
    assert fit.status is Status.MAX_ROUNDS
    assert [list(record.failures) for record in fit.records] == [["clinic 2"]] * 2
    assert "clinic 2" in fit.message
    assert_array_equal(fit.state.has_replied, [True, True, False, True])


def test_a_kink_is_refused() -> None:
    model, clients = problems.lasso()
    with pytest.raises(DeclarationError, match="kink"):
        fitted(model, clients, fedppl.one_shot.Separate())


# --- SeparateSGD ----------------------------------------------------------------------------------------------


def test_each_client_ends_at_the_mode_of_its_own_posterior() -> None:
    """(XᵀX + I/9)⁻¹ Xᵀy: the whole prior, not a share of it."""
    model, clients = pooled.linear()
    fit = fitted(model, clients, fedppl.one_shot.SeparateSGD(learning_rate=0.1, tolerance=1e-9))
    assert fit.status is Status.CONVERGED
    for client_id, d in clients.items():
        exact = np.linalg.solve(d["X"].T @ d["X"] + pooled.PRIOR, d["X"].T @ d["y"])
        assert_allclose(fit.personal[client_id].point, exact, atol=1e-7)
        drawn = fit.client(client_id, draws=2, chains=3)["posterior"]["mu"].values
        assert_array_equal(drawn, np.broadcast_to(fit.personal[client_id].point, (3, 2, 2)))
        fresh = fit.new_client(d, draws=1, chains=1)["posterior"]["mu"].values[0, 0]
        assert_allclose(fresh, exact, atol=1e-7)


def test_local_variables_end_at_the_joint_mode() -> None:
    """Gaussian throughout: the mean of (μ, a, β) under prior x likelihood."""
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.one_shot.SeparateSGD(learning_rate=0.1, tolerance=1e-8))
    assert fit.status is Status.CONVERGED
    for client_id, d in clients.items():
        exact, _ = problems.regression_joint(d, problems.REGRESSION_PRIOR)
        assert_allclose(fit.personal[client_id].point, exact, atol=1e-5)


def test_sgd_has_a_prior_that_is_not_gaussian_in_full() -> None:
    model, clients = pooled.spread()
    fit = fitted(model, clients, fedppl.one_shot.SeparateSGD(learning_rate=0.1, tolerance=1e-9))
    for client_id, d in clients.items():
        alone = {client_id: d}
        exact = minimize_scalar(
            lambda u, of=alone: -pooled.spread_log_density(of, u), (0, 1), options={"xtol": 1e-12}
        ).x
        assert_allclose(fit.personal[client_id].point, [exact], atol=1e-6)


def test_steps_go_on_from_round_to_round() -> None:
    """Three rounds of 5 steps are 15 steps; a new client takes as many."""
    model, clients = pooled.linear()
    fit = fitted(model, clients, fedppl.one_shot.SeparateSGD(learning_rate=0.05, steps=5), rounds=3)
    assert [set(record.infos["plot 0"]) for record in fit.records] == [{"blank"}, set(), set()]
    for client_id, (A, b, _) in zip(clients, pooled.losses(clients, share=1.0), strict=True):
        exact = pooled.after_steps(A, b, np.zeros(2), 0.05, 15)
        assert_allclose(fit.personal[client_id].point, exact, atol=1e-11)
        fresh = fit.new_client(clients[client_id], draws=1, chains=1)["posterior"]["mu"].values[0, 0]
        assert_allclose(fresh, exact, atol=1e-11)
    assert fit.status is Status.MAX_ROUNDS
    assert fit.records[-1].released == "change (1)"


def test_all_clients_have_to_stand_still() -> None:
    model, clients = pooled.linear()
    algorithm = fedppl.one_shot.SeparateSGD(learning_rate=0.1)
    steps = list(
        fedppl.rounds(model, clients, algorithm, rounds=10, participation=lambda ids, rng: ids[:2], random_seed=1)
    )
    assert steps[-1].info.change < 1e-6
    assert steps[-1].status is Status.RUNNING
    assert "not replied yet" in steps[-1].message
    assert algorithm.replies.reject(steps[-1].state, {"change": np.array(-1.0)}) is not None
    assert algorithm.replies.reject(steps[-1].state, {"change": np.array(0.0)}) is None


def test_sgd_draws_are_one_point() -> None:
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.one_shot.SeparateSGD(learning_rate=0.1), rounds=1)
    assert fit.client("clinic 1", draws=2, chains=1)["posterior"].attrs["fedppl_point_estimate"] == 1.0
    with pytest.raises(DeclarationError, match="no posterior"):
        _ = fit.posterior
    assert isinstance(fit.layout.prior, Gaussian)
