"""Ditto: φ is FedAvg's, v_k lies between the client's own minimiser and φ, and nothing of it travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl.algorithms.averaging.fedavg import DittoClientState
from fedppl.numerics.streams import stream
from fedppl.types import DeclarationError, Status
from tests.algorithms.test_averaging import fitted, path
from tests.support import pooled, problems


@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_shared_parameters_are_those_of_fedavg(batch_size: int | None) -> None:
    """To the last bit, with batches too: the personal steps draw from the stream after the shared ones."""
    model, clients = problems.regression()
    settings = {"learning_rate": 0.05, "steps": 6, "batch_size": batch_size}
    found = path(model, clients, fedppl.averaging.Ditto(lam=0.7, personal_steps=3, **settings), 5)
    for ours, theirs in zip(found, path(model, clients, fedppl.averaging.FedAvg(**settings), 5), strict=True):
        assert_array_equal(ours, theirs)


@pytest.mark.parametrize("lam", [0.0, 0.3, 3.0, 300.0])
def test_personal_parameters_end_at_their_closed_form(lam: float) -> None:
    """v_k = (A_k + λI)⁻¹ (b_k + λφ): the client's own minimiser at λ = 0, φ for λ → ∞."""
    model, clients = pooled.linear()
    algorithm = fedppl.averaging.Ditto(
        learning_rate=0.1, lam=lam, personal_steps=400, personal_rate=0.5 / (4 + lam), tolerance=1e-8
    )
    fit = fitted(model, clients, algorithm)
    assert fit.status is Status.CONVERGED
    phi = fit.state.phi
    for client_id, (A, b, _) in zip(clients, pooled.losses(clients), strict=True):
        kept = fit.personal[client_id]
        v = np.linalg.solve(A + lam * np.eye(2), b + lam * phi)
        assert_allclose(kept.point, v, atol=1e-5)
        drawn = fit.client(client_id, draws=3, chains=2)["posterior"]["mu"].values
        assert_array_equal(drawn, np.broadcast_to(kept.point, (2, 3, 2)))
        if lam == 300.0:
            assert np.max(np.abs(v - phi)) < 0.05
        if lam == 0.0:
            assert np.max(np.abs(v - phi)) > 0.1


def test_a_round_of_personal_steps_follows_its_closed_form() -> None:
    """From φ of the round in which the client was first asked, towards φ of each round since."""
    model, clients = pooled.linear()
    algorithm = fedppl.averaging.Ditto(learning_rate=0.05, lam=0.6, steps=4, personal_steps=3, personal_rate=0.08)
    v: dict[str, Any] = {}
    phi = np.zeros(2)
    run = fedppl.rounds(model, clients, algorithm, rounds=6, random_seed=1)
    models = model.enrol(clients, kernel=False)
    personal: dict[str, Any] = dict.fromkeys(clients)
    for step in run:
        message = {"phi": phi, "prior_share": np.array(0.25)}
        for (client_id, client), (A, b, _) in zip(models.items(), pooled.losses(clients), strict=True):
            start = v.get(client_id, phi)
            v[client_id] = pooled.after_steps(A + 0.6 * np.eye(2), b + 0.6 * phi, start, 0.08, 3)
            update = algorithm.update_client(client, personal[client_id], message, stream((1,)))
            personal[client_id] = update.personal
            assert_allclose(personal[client_id].point, v[client_id], atol=1e-10)
        phi = step.state.phi


def test_only_shared_coordinates_are_pulled() -> None:
    """λ → ∞ holds μ and a; β goes to its mode given them, (XᵀX + 4I)⁻¹ (Xᵀ(y − a) + 4μ)."""
    model, clients = problems.regression()
    algorithm = fedppl.averaging.Ditto(
        learning_rate=0.1, lam=1e3, personal_rate=1e-3, personal_steps=2000, tolerance=1e-5
    )
    fit = fitted(model, clients, algorithm)
    mu, a = fit.state.phi[:2], fit.state.phi[2]
    for client_id, d in clients.items():
        own = fit.personal[client_id].point
        assert_allclose(own[:3], fit.state.phi, atol=0.02)
        beta = np.linalg.solve(d["X"].T @ d["X"] + 4 * np.eye(2), d["X"].T @ (d["y"] - a) + 4 * mu)
        assert_allclose(own[3:], beta, atol=0.03)


# --- what stays at the client ---------------------------------------------------------------------------------


def test_nothing_personal_is_in_a_message() -> None:
    """Whatever v_k is, the reply and its diagnostics are the same, and the same as FedAvg's."""
    model, clients = problems.regression()
    client = model.enrol(clients, kernel=False)["clinic 1"]
    algorithm = fedppl.averaging.Ditto(learning_rate=0.05, lam=0.7)
    message = {"phi": np.array([0.1, 0.2, 0.3]), "prior_share": np.array(0.25)}
    local = np.array([0.5, -0.5])
    answers = [
        algorithm.update_client(client, DittoClientState(local, own), message, stream((1,)))
        for own in (np.zeros(5), np.full(5, 3.0))
    ]
    theirs = fedppl.averaging.FedAvg(learning_rate=0.05).update_client(
        client, DittoClientState(local, np.zeros(5)), message, stream((1,))
    )
    for update in answers:
        assert update.info == theirs.info == {}
        assert update.reply.keys() == theirs.reply.keys()
        for name in update.reply:
            assert_array_equal(update.reply[name], theirs.reply[name])
    kept = [update.personal for update in answers]
    assert np.max(np.abs(kept[0].point - kept[1].point)) > 0.1


def test_a_blank_client_starts_from_phi_and_says_so() -> None:
    """Also where everything is shared, and only in rounds in which there is no v_k."""
    model, clients = pooled.linear()
    client, d = model.enrol(clients, kernel=False)["plot 1"], clients["plot 1"]
    algorithm = fedppl.averaging.Ditto(learning_rate=0.05, lam=0.7, personal_steps=2, personal_rate=0.03)
    message = {"phi": np.array([0.4, -0.3]), "prior_share": np.array(0.25)}
    A, b = (d["X"].T @ d["X"] + 0.25 * pooled.PRIOR) / 10, d["X"].T @ d["y"] / 10
    exact = pooled.after_steps(A + 0.7 * np.eye(2), b + 0.7 * message["phi"], message["phi"], 0.03, 2)
    for nothing in (None, DittoClientState(np.zeros(0), np.zeros(7))):  # of another model, say
        personal, _, info = algorithm.update_client(client, nothing, message, stream((1,)))
        assert info == {"blank": 1.0}
        assert_allclose(personal.point, exact, atol=1e-12)
    assert algorithm.update_client(client, personal, message, stream((2,)))[2] == {}


def test_a_new_client_takes_its_steps_from_phi() -> None:
    """φ, then personal_steps on F + λ/2 ‖v − φ‖² with a share of the prior of one among K."""
    model, clients = pooled.linear()
    algorithm = fedppl.averaging.Ditto(learning_rate=0.1, lam=0.5, personal_steps=11, personal_rate=0.05)
    fit = fitted(model, clients, algorithm)
    rng = np.random.default_rng(8)
    X = rng.normal(size=(9, 2))
    y = X @ [3.0, 1.0] + rng.normal(size=9)
    A, b = (X.T @ X + 0.25 * pooled.PRIOR) / 9 + 0.5 * np.eye(2), X.T @ y / 9 + 0.5 * fit.state.phi
    drawn = fit.new_client({"X": X, "y": y}, draws=2, chains=1)["posterior"]["mu"].values
    assert_allclose(drawn[0, 0], pooled.after_steps(A, b, fit.state.phi, 0.05, 11), atol=1e-10)
    assert_array_equal(drawn[0, 0], drawn[0, 1])


# --- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lam": -1.0}, "lam=-1.0"),
        ({"lam": np.nan}, "lam=nan"),
        ({"lam": np.inf}, "lam=inf"),
        ({"personal_steps": 0}, "personal_steps=0"),
        ({"personal_steps": 2.5}, "personal_steps=2.5"),
        ({"personal_rate": 0.0}, "personal_rate=0.0"),
        ({"personal_rate": -0.1}, "personal_rate=-0.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(DeclarationError, match=match):
        fedppl.averaging.Ditto(**({"learning_rate": 0.1, "lam": 0.5} | settings))


def test_personal_steps_that_diverge_name_their_own_rate() -> None:
    """η_v (λ_max + λ) > 2, while the steps on φ are fine."""
    model, clients = pooled.linear()
    fit = fitted(model, clients, fedppl.averaging.Ditto(learning_rate=0.05, lam=0.5, personal_rate=3.0), rounds=1)
    assert fit.status is Status.STALLED
    assert all("personal_rate=3" in reason for reason in fit.records[0].failures.values())


def test_a_pull_too_strong_for_its_rate_is_refused() -> None:
    """η_v λ >= 2 diverges whatever the data are."""
    with pytest.raises(DeclarationError, match="below 2"):
        fedppl.averaging.Ditto(learning_rate=0.05, lam=5.0, personal_rate=0.4)


def test_personal_settings_default_to_the_shared_ones() -> None:
    settings = fedppl.averaging.Ditto(learning_rate=0.05, lam=5.0, steps=7).settings
    assert (settings["personal_rate"], settings["personal_steps"]) == ("0.05", "7")
