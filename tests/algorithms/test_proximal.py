"""FedProx: FedAvg at μ = 0, closed forms elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl.types import DeclarationError, Status
from tests.algorithms.test_averaging import fitted, path
from tests.support import pooled, problems


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("problem", [problems.regression, pooled.spread])
def test_without_a_pull_it_is_fedavg_to_the_last_bit(problem: Any, batch_size: int | None) -> None:
    model, clients = problem()
    settings = {"learning_rate": 0.05, "steps": 6, "batch_size": batch_size}
    found = path(model, clients, fedppl.averaging.FedProx(mu=0.0, **settings), 5)
    for ours, theirs in zip(found, path(model, clients, fedppl.averaging.FedAvg(**settings), 5), strict=True):
        assert_array_equal(ours, theirs)


@pytest.mark.parametrize("weights", ["rows", "equal"])
def test_rounds_follow_their_closed_form(weights: str) -> None:
    """T steps on ½ φᵀ(A_k + μI)φ − (b_k + μ φ_server)ᵀφ from φ_server, averaged."""
    model, clients = pooled.linear()
    algorithm = fedppl.averaging.FedProx(learning_rate=0.05, mu=0.8, steps=7, weights=weights, tolerance=1e-15)
    phi = np.zeros(2)
    for ours in path(model, clients, algorithm, 25):
        ends = [
            (pooled.after_steps(A + 0.8 * np.eye(2), b + 0.8 * phi, phi, 0.05, 7), n if weights == "rows" else 1)
            for A, b, n in pooled.losses(clients)
        ]
        phi = sum(w * end for end, w in ends) / sum(w for _, w in ends)
        assert_allclose(ours, phi, rtol=0, atol=1e-10)


def test_many_steps_are_the_proximal_operator() -> None:
    """φ_k = (A_k + μI)⁻¹ (b_k + μφ), exactly minimised."""
    model, clients = pooled.linear()
    (ours,) = path(model, clients, fedppl.averaging.FedProx(learning_rate=0.2, mu=0.5, steps=2000), 1)
    parts = [(np.linalg.solve(A + 0.5 * np.eye(2), b), n) for A, b, n in pooled.losses(clients)]
    assert_allclose(ours, sum(n * end for end, n in parts) / sum(n for _, n in parts), atol=1e-10)


def test_drift_shrinks_with_the_pull_and_does_not_vanish() -> None:
    """Distance of the fixed point from the mode."""
    model, clients = pooled.linear()
    exact, far = pooled.mode(clients), []
    for mu in (0.0, 1.0, 10.0):
        algorithm = fedppl.averaging.FedProx(learning_rate=0.08, mu=mu, steps=40, tolerance=1e-9)
        fit = fitted(model, clients, algorithm)
        assert fit.status is Status.CONVERGED
        far.append(np.linalg.norm(fit.state.phi - exact))
    assert far[0] > 1.3 * far[1]
    assert far[1] > 1.3 * far[2]
    assert far[2] > 1e-3


def test_local_variables_are_not_held() -> None:
    """φ held where it is by a huge μ: in one round of many steps θ still goes to its mode given φ = 0."""
    model, clients = problems.regression()
    algorithm = fedppl.averaging.FedProx(learning_rate=1e-3, mu=1000.0, steps=40_000)
    fit = fitted(model, clients, algorithm, rounds=1)
    assert np.max(np.abs(fit.state.phi)) < 0.02
    for client_id, d in clients.items():  # β | φ = 0: (XᵀX + 4I)⁻¹ Xᵀy
        beta = np.linalg.solve(d["X"].T @ d["X"] + 4 * np.eye(2), d["X"].T @ d["y"])
        assert_allclose(fit.personal[client_id].local, beta, atol=0.02)


@pytest.mark.parametrize("mu", [-0.1, np.nan, np.inf])
def test_a_pull_out_of_range_is_refused(mu: float) -> None:
    with pytest.raises(DeclarationError, match="mu="):
        fedppl.averaging.FedProx(learning_rate=0.1, mu=mu)


def test_a_pull_too_strong_for_the_rate_is_refused() -> None:
    """η μ >= 2 diverges whatever the data are."""
    with pytest.raises(DeclarationError, match="below 2"):
        fedppl.averaging.FedProx(learning_rate=0.1, mu=20.0)
    fedppl.averaging.FedProx(learning_rate=0.1, mu=19.0)


def test_its_settings_tell_it_from_fedavg() -> None:
    settings = fedppl.averaging.FedProx(learning_rate=0.1, mu=0.5).settings
    assert settings["mu"] == "0.5"
    assert settings.keys() - {"mu"} == fedppl.averaging.FedAvg(learning_rate=0.1).settings.keys()
