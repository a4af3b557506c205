"""The warm start: steps where no quadratic serves, the look along them, and a budget of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose

import fedppl
from benchmarks.default_settings import columns, exact, regression
from fedppl import gaussian
from fedppl.algorithms.ep.warm_start import newton_step
from fedppl.contracts import Expansion
from fedppl.gaussian import Gaussian
from fedppl.results import diagnostics
from fedppl.testing import normal_means
from fedppl.types import Status
from tests.support import problems
from tests.support.faults import Tampering, with_message
from tests.support.states import assert_same_state


def at(x: np.ndarray, gradient: np.ndarray, hessian: np.ndarray) -> Gaussian:
    return Gaussian(gradient - hessian @ x, -hessian)


def test_a_proper_precision_gives_newtons_step() -> None:
    prior = Gaussian(np.zeros(2), 1e-6 * np.eye(2))
    x, gradient, hessian = np.array([3.0, -1.0]), np.array([1.0, 2.0]), -np.array([[4.0, 1.0], [1.0, 2.0]])
    move, whole, cut = newton_step(at(x, gradient, hessian), prior, x, 1.5)
    assert (whole, cut) == (True, False)
    assert_allclose(move, np.linalg.solve(-hessian, gradient), rtol=1e-12)


def test_a_scale_that_is_far_off_leaves_the_coefficients_their_own_step() -> None:
    # (β, log σ) at β = 0, σ = 1 and residuals that β explains mostly: jointly indefinite, block by block not
    rng = np.random.default_rng(1)
    X = np.column_stack([np.ones(50), rng.normal(100, 15, 50)])
    y = X @ [5.0, 2.0] + rng.normal(0, 3, 50)
    hessian = -np.block([[X.T @ X, 2 * (X.T @ y)[:, None]], [2 * (X.T @ y)[None], np.array([[2 * y @ y]])]])
    gradient = np.concatenate([X.T @ y, [y @ y - 50]])
    x = np.zeros(3)
    prior = Gaussian(np.zeros(3), np.diag([1e-6, 1e-6, 1.0]))
    assert np.linalg.eigvalsh(-hessian)[0] < 0
    move, whole, _ = newton_step(at(x, gradient, hessian), prior, x, 1.5)
    assert not whole
    assert_allclose(move[:2], np.linalg.lstsq(X, y, rcond=None)[0], rtol=1e-6)
    assert_allclose(move[2], 0.5, rtol=0.01)


def test_no_axis_of_a_step_is_longer_than_the_radius() -> None:
    prior = Gaussian(np.zeros(2), np.diag([1.0, 1e-4]))
    x = np.zeros(2)
    move, _, cut = newton_step(at(x, np.array([50.0, 50.0]), -np.eye(2)), prior, x, 1.5)
    assert cut
    assert_allclose(move, [1.5, 50.0], rtol=1e-6)


@pytest.fixture(scope="module")
def model() -> fedppl.FederatedModel:
    return fedppl.FederatedModel(regression, ["intercept", "beta", "sigma"])


def raw(seed: int, rows: int, parts: int, scale: float = 1.0) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    X = columns(rng, rows, 2)
    y = scale * (30 + X @ [0.8, 6.0, -0.4] + rng.normal(0, 7, rows))
    split = np.array_split(rng.permutation(rows), parts)
    return X, y, {f"client {k}": {"X": X[part], "y": y[part]} for k, part in enumerate(split)}


@pytest.mark.parametrize("seed, rows, parts", [(0, 900, 3), (1, 200, 5), (2, 120, 4)])
def test_vague_priors_and_raw_columns_converge_to_the_exact_posterior(
    model: fedppl.FederatedModel, seed: int, rows: int, parts: int
) -> None:
    X, y, clients = raw(seed, rows, parts)
    fit = fedppl.fit(model, clients, fedppl.EP(starts=1), progressbar=False, random_seed=1)
    mean, sd = exact(X, y)
    assert fit.status is Status.CONVERGED
    assert sum(record.preliminary for record in fit.records) <= 12
    assert np.max(np.abs(gaussian.mean(fit.posterior) - mean) / sd) < 0.05
    assert_allclose(gaussian.standard_deviations(fit.posterior) / sd, 1, atol=0.03)


def test_rounds_of_the_warm_start_do_not_count(model: fedppl.FederatedModel) -> None:
    _, _, clients = raw(0, 900, 3)
    algorithm = fedppl.EP(tolerance=1e-12)
    steps = list(fedppl.rounds(model, clients, algorithm, rounds=2, random_seed=1))
    phases = [step.info.phase for step in steps]
    assert phases.count("EP") == 2
    assert phases.count("warm start") > 2
    assert phases == sorted(phases, reverse=True)


@pytest.mark.parametrize("participation", [None, 2, 1])
def test_the_budget_counts_expansions_a_client(participation: int | None) -> None:
    """Clients whose slope turns round from one expansion to the next, in sizes that never cancel: no search arrives."""
    slopes = {f"client {k}": 30.0 * 2**k for k in range(4)}

    def turning(client: Any, point: np.ndarray, share: float) -> Expansion:
        slopes[client.client_id] *= -1
        return Expansion(0.0, np.full(1, slopes[client.client_id]), np.zeros((1, 1)), {})

    local = fedppl.local.NestedLaplace()._replace(
        expand=turning, log_factor=lambda client, points, share: np.zeros(len(points))
    )
    declared, clients = normal_means(4)
    asked = dict.fromkeys(clients, 0)
    for step in fedppl.rounds(
        declared, clients, fedppl.EP(local=local), rounds=1, participation=participation, random_seed=1
    ):
        for client_id in step.record.infos:
            asked[client_id] += 1
        assert step.record.preliminary
    # An answer from a point that has one of this client already counts half.
    most = 25 if participation is None else 50
    assert 25 * len(clients) <= sum(asked.values()) <= most * len(clients)
    assert step.status is Status.STALLED
    assert "has not reached the mode" in step.message


def test_rounds_in_which_nobody_answers_use_the_budget_up() -> None:
    declared, clients = normal_means(2)
    local = problems.failing(lambda _: True, "out of order")
    *_, step = fedppl.rounds(declared, clients, fedppl.EP(local=local), random_seed=1)
    assert (step.number, step.status) == (25, Status.STALLED)


def test_a_search_that_is_interrupted_after_every_round_goes_on_as_if_it_were_not(
    model: fedppl.FederatedModel, tmp_path: Path
) -> None:
    _, _, clients = raw(2, 120, 4)

    def too_long(request: Any, reply: Any) -> Any:
        """In the third round, so that the server goes back along the step."""
        return with_message(reply, value=np.array(-1e30)) if request.round == 3 else reply

    def steps(**settings: Any) -> Iterator[fedppl.Round]:
        return fedppl.rounds(model, clients, fedppl.EP(), engine=Tampering(too_long), random_seed=1, **settings)

    whole = []
    for step in steps():
        whole.append(step)
        if step.info.phase == "EP":
            break
    assert len(whole) > 4 and whole[2].state.warm_start.trial.chosen
    for expected in whole:
        step = next(steps(checkpoint=tmp_path / "run"))
        assert step.number == expected.number
        assert step.record.preliminary == expected.record.preliminary
        assert_same_state(step.state, expected.state)


@pytest.mark.parametrize("scale", [1e9, 1e12, 1e15, 1e20])
def test_an_outcome_on_another_scale_is_told_with_the_coefficient(
    model: fedppl.FederatedModel, caplog: pytest.LogCaptureFixture, scale: float
) -> None:
    _, _, clients = raw(0, 300, 3, scale=scale)
    with caplog.at_level(logging.CRITICAL, logger="fedppl"):
        *_, step = fedppl.rounds(model, clients, fedppl.EP(), random_seed=1)
    assert step.status is Status.STALLED
    said = [step.message, *step.failures.values()]
    assert any("rescale" in text and any(label in text for label in ("beta", "sigma")) for text in said)


def hierarchy(X: Any, y: Any) -> Any:
    with pm.Model() as declared:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu, tau = pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1)
        beta = pm.Normal("beta", mu, tau, shape=12)
        pm.Normal("obs", X @ beta, 1, observed=y)
    return declared


@pytest.mark.slow
@problems.of_q
def test_a_hierarchy_among_shared_variables_does_not_end_at_a_scale_of_zero() -> None:
    rng = np.random.default_rng(4)
    beta = rng.normal(0.5, 0.7, 12)
    clients = {}
    for k in range(4):
        X = rng.normal(size=(60, 12))
        clients[f"client {k}"] = {"X": X, "y": X @ beta + rng.normal(size=60)}
    declared = fedppl.FederatedModel(hierarchy, ["mu", "tau", "beta"])
    fit = fedppl.fit(declared, clients, fedppl.EP(), progressbar=False, random_seed=1)
    assert diagnostics.matched(fit.status, fit.message)
    # given τ all is Gaussian: τ's posterior by quadrature
    X, y = (np.concatenate([data[name] for data in clients.values()]) for name in ("X", "y"))
    least, noise = np.linalg.solve(X.T @ X, X.T @ y), np.linalg.inv(X.T @ X)
    grid = np.linspace(-3, 2, 400)
    log_density = []
    for log_tau in grid:
        covariance = noise + np.exp(2 * log_tau) * np.eye(12) + 1.0
        log_density.append(
            -0.5 * np.linalg.slogdet(covariance)[1]
            - 0.5 * least @ np.linalg.solve(covariance, least)
            - 0.5 * np.exp(2 * log_tau)
            + log_tau
        )
    weights = np.exp(log_density - np.max(log_density))
    weights /= weights.sum()
    mean = weights @ grid
    sd = np.sqrt(weights @ (grid - mean) ** 2)
    place = fit.layout.labels.index("tau_log__")
    assert abs(gaussian.mean(fit.posterior)[place] - mean) < 0.1 * sd
    assert abs(gaussian.standard_deviations(fit.posterior)[place] / sd - 1) < 0.1


@problems.of_q
def test_a_search_that_one_wrong_value_misled_goes_on() -> None:
    """A point said to be far better than any: no step from there gains, however short, and all are asked anew."""
    rounds = []

    def boast(request: Any, reply: Any) -> Any:
        if request.client_id != "site 1" or "point" not in request.message:
            return reply
        rounds.append(request.round)
        return with_message(reply, value=np.array(float(reply.message["value"]) + 1e3)) if len(rounds) == 2 else reply

    model, clients = problems.noise(4)
    honest = fedppl.fit(model, clients, fedppl.EP(tolerance=1e-3), progressbar=False, random_seed=1)
    misled = fedppl.fit(
        model, clients, fedppl.EP(tolerance=1e-3), engine=Tampering(boast), progressbar=False, random_seed=1
    )
    assert diagnostics.matched(misled.status, misled.message) and len(misled.records) > len(honest.records)
    sd = gaussian.standard_deviations(honest.posterior)
    assert np.all(np.abs(gaussian.mean(misled.posterior) - gaussian.mean(honest.posterior)) < 0.01 * sd)
