"""SCAFFOLD: the exact minimiser where FedAvg drifts, and a ledger that nothing can put out of balance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import root

import fedppl
from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import FedAvg
from fedppl.algorithms.averaging.scaffold import Controls, correction, ends_of, entered
from fedppl.numerics.streams import stream
from fedppl.types import DeclarationError, Status
from tests.algorithms.test_averaging import fitted, path
from tests.support import pooled, problems
from tests.support.states import received


def assert_balanced(state: Any) -> None:
    """Σ w_k (c − c_k) = 0 over the clients that replied, and nothing is held for the others."""
    each, weights, mean = state.controls
    assert_allclose(weights @ (mean - each), 0, atol=1e-12)
    assert_array_equal(each[weights == 0], 0)


# --- the minimiser --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [None, 2, 1])
@pytest.mark.parametrize("weights", ["rows", "equal"])
def test_the_fixed_point_is_the_minimiser_though_clients_differ(weights: str, participation: int | None) -> None:
    """(Σ w_k A_k)⁻¹ Σ w_k b_k with T = 20; with rows as weights the posterior's mode. FedAvg ends elsewhere."""
    model, clients = pooled.linear()
    exact = pooled.mode(clients, weights)
    # c is stale where few clients are asked: smaller steps of the server
    rate = 1.0 if participation is None else 0.3
    algorithm = fedppl.averaging.SCAFFOLD(learning_rate=0.05, weights=weights, tolerance=1e-9, server_rate=rate)
    fit = fitted(model, clients, algorithm, participation=participation)
    assert fit.status is Status.CONVERGED, fit.message
    assert_allclose(fit.estimate["mu"], exact, atol=1e-7)
    assert_balanced(fit.state)
    drifted = fitted(model, clients, FedAvg(learning_rate=0.05, weights=weights, tolerance=1e-9))
    assert np.max(np.abs(drifted.estimate["mu"] - exact)) > 0.05
    # c_k is the client's gradient there, A_k φ − b_k
    for k, (A, b, _) in enumerate(pooled.losses(clients)):
        assert_allclose(fit.state.controls.each[k], A @ exact - b, atol=1e-5)


def test_a_logistic_regression_ends_at_its_mode() -> None:
    """Root of Σ Xᵀ(logit⁻¹ Xβ − y) + β/4."""
    model, clients = pooled.logit()
    exact = root(lambda beta: pooled.logit_gradient(clients, beta), np.zeros(2), tol=1e-12).x
    fit = fitted(model, clients, fedppl.averaging.SCAFFOLD(learning_rate=0.5, tolerance=1e-9))
    assert fit.status is Status.CONVERGED
    assert_allclose(fit.state.phi, exact, atol=1e-7)


def test_a_model_with_local_variables_ends_at_its_joint_mode() -> None:
    """Gaussian throughout: φ there is the mean of the exact marginal posterior."""
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.averaging.SCAFFOLD(learning_rate=0.1, tolerance=1e-9))
    assert fit.status is Status.CONVERGED
    assert_allclose(fit.state.phi, gaussian.mean(problems.regression_posterior(clients)), atol=1e-6)


def test_clients_that_are_at_their_start_with_phi_have_not_converged() -> None:
    """θ = φ = 0 at first, so with T = 1 only the θ_k move in the first round."""
    model, clients = problems.logistic()
    step = next(
        iter(fedppl.rounds(model, clients, fedppl.averaging.SCAFFOLD(learning_rate=0.1, steps=1), random_seed=1))
    )
    assert_array_equal(step.state.phi, [0.0])
    assert step.status is Status.RUNNING


def test_the_first_round_is_that_of_fedavg() -> None:
    """Nothing is known of the clients' gradients yet."""
    model, clients = pooled.linear()
    ours = path(model, clients, fedppl.averaging.SCAFFOLD(learning_rate=0.05, steps=7), 1)[0]
    theirs = path(model, clients, FedAvg(learning_rate=0.05, steps=7), 1)[0]
    assert_allclose(ours, theirs, rtol=1e-12)


def test_rounds_follow_the_papers_algorithm() -> None:
    """Algorithm 1 with option II and full gradients, written out; c starts at zero and all clients are asked."""
    model, clients = pooled.linear()
    algorithm = fedppl.averaging.SCAFFOLD(
        learning_rate=0.03, steps=5, server_rate=0.7, weights="equal", tolerance=1e-15
    )
    losses = pooled.losses(clients)
    x, c, controls = np.zeros(2), np.zeros(2), np.zeros((4, 2))
    for ours in path(model, clients, algorithm, 30):
        ends, after = [], []
        for (A, b, _), c_k in zip(losses, controls, strict=True):
            y = x
            for _ in range(5):
                y = y - 0.03 * (A @ y - b + c - c_k)
            ends.append(y)
            after.append(c_k - c + (x - y) / (5 * 0.03))
        x = x + 0.7 * (np.mean(ends, axis=0) - x)
        c = c + np.mean(np.array(after) - controls, axis=0)
        controls = np.array(after)
        assert_allclose(ours, x, atol=1e-10)


# --- the ledger -----------------------------------------------------------------------------------------------


def test_a_ledger_entry_is_the_formula_and_a_correction_costs_one_row() -> None:
    """c_k ← c_k − c + (φ − y_k) / (T η) for those who replied, with their own T or one for all; c is the mean."""
    rng, K, m = np.random.default_rng(2), 5, 3
    each, weights = rng.normal(size=(K, m)), np.array([1.0, 2.0, 0.0, 3.0, 0.0])
    each[weights == 0] = 0.0
    before = Controls(each, weights, weights @ each / 6.0)
    where = {name: k for k, name in enumerate("abcde")}
    phi, new = rng.normal(size=m), {name: rng.normal(size=m) for name in "ace"}
    replies = {name: {"phi": end, "weight": np.array(4.0)} for name, end in new.items()}
    ends = ends_of(received(dict(reversed(replies.items())), summed=False), where)
    for length in (0.5, np.array([0.5, 0.5, 0.5])):
        after = entered(before, ends, phi, length)
        for k, name in enumerate("abcde"):
            held = each[k] - before.mean if weights[k] else 0.0
            expected = (phi - new[name]) / 0.5 + held if name in new else each[k]
            assert_allclose(after.each[k], expected, rtol=1e-12, atol=1e-12)
        assert_array_equal(after.weights, [4, 2, 4, 3, 4])
        assert_allclose(after.mean, after.weights @ after.each / 17, rtol=1e-12)
    for k in range(K):
        assert_array_equal(correction(before, k), before.mean - each[k] if weights[k] else np.zeros(m))


def test_the_ledger_is_in_balance_in_every_round_of_some_clients() -> None:
    model, clients = pooled.linear()
    algorithm = fedppl.averaging.SCAFFOLD(learning_rate=0.05, batch_size=3)
    seen = set()
    for step in fedppl.rounds(model, clients, algorithm, rounds=15, participation=0.4, random_seed=3):
        assert_balanced(step.state)
        seen.add(int(np.sum(step.state.controls.weights > 0)))
    assert len(seen) > 1
    # rows, once they replied
    assert_array_equal(step.state.controls.weights, [len(d["y"]) for d in clients.values()])


def test_controls_are_mean_gradients_along_the_path() -> None:
    model, clients = pooled.linear()
    models, algorithm = model.enrol(clients, kernel=False), fedppl.averaging.SCAFFOLD(learning_rate=0.05, steps=4)
    state = algorithm.init(models["plot 0"].layout, tuple(models), stream((1,)))
    for number in range(3):
        messages = {client_id: algorithm.broadcast(state, client_id) for client_id in models}
        replies = {k: algorithm.update_client(models[k], None, messages[k], stream((number,))).reply for k in models}
        after, _ = algorithm.update_server(state, received(replies, summed=False))
        for (k, message), (A, b, _) in zip(messages.items(), pooled.losses(clients), strict=True):
            y, gradients = state.phi, []
            for _ in range(4):
                gradients.append(A @ y - b)
                y = y - 0.05 * (gradients[-1] + message["correction"])
            assert_allclose(after.controls.each[after.where[k]], np.mean(gradients, axis=0), atol=1e-12)
        state = after
    assert np.max(np.abs(state.controls.each)) > 0.1


def test_lost_replies_and_wiped_clients_change_nothing_but_the_path() -> None:
    """A reply that never arrived leaves no trace: the client holds nothing that the server does not know."""
    model, clients = pooled.linear()
    models, algorithm = (
        model.enrol(clients, kernel=False),
        fedppl.averaging.SCAFFOLD(learning_rate=0.05, tolerance=1e-9),
    )
    lost_on_the_way = np.random.default_rng(5)
    state = algorithm.init(models["plot 0"].layout, tuple(models), stream((1,)))
    personal: dict[str, Any] = dict.fromkeys(models)
    for number in range(1500):
        replies = {}
        for client_id, client in models.items():
            message = algorithm.broadcast(state, client_id)
            personal[client_id], reply, _ = algorithm.update_client(
                client, personal[client_id], message, stream((number,))
            )
            if lost_on_the_way.uniform() < 0.3:
                continue
            if lost_on_the_way.uniform() < 0.3:
                personal[client_id] = None
            replies[client_id] = reply
        state, report = algorithm.update_server(state, received(replies, summed=False))
        assert_balanced(state)
        if report.status is Status.CONVERGED:
            break
    assert report.status is Status.CONVERGED
    assert_allclose(state.phi, pooled.mode(clients), atol=1e-7)


def test_a_client_asked_for_the_first_time_takes_plain_steps() -> None:
    model, clients = pooled.linear()
    models, algorithm = model.enrol(clients, kernel=False), fedppl.averaging.SCAFFOLD(learning_rate=0.05)
    state = algorithm.init(models["plot 0"].layout, tuple(models), stream((1,)))
    for number, client_id in enumerate(("plot 0", "plot 1")):
        reply = algorithm.update_client(
            models[client_id], None, algorithm.broadcast(state, client_id), stream((number,))
        ).reply
        state, _ = algorithm.update_server(state, received({client_id: reply}, summed=False))
    assert np.max(np.abs(state.controls.mean)) > 0.1
    assert_array_equal(algorithm.broadcast(state, "plot 2")["correction"], np.zeros(2))
    assert np.max(np.abs(algorithm.broadcast(state, "plot 1")["correction"])) > 0.01


def test_it_has_not_converged_before_everyone_was_asked() -> None:
    """One client's own mode is a fixed point for it alone."""
    model, clients = pooled.linear()
    algorithm = fedppl.averaging.SCAFFOLD(learning_rate=0.1)
    steps = list(
        fedppl.rounds(model, clients, algorithm, rounds=200, participation=lambda ids, rng: ["plot 1"], random_seed=1)
    )
    assert steps[-1].info.drift < 1e-6
    assert steps[-1].status is Status.RUNNING
    assert "not replied yet" in steps[-1].message


@pytest.mark.parametrize("rate", [0.0, -1.0, np.nan, np.inf])
def test_a_server_rate_out_of_range_is_refused(rate: float) -> None:
    with pytest.raises(DeclarationError, match="server_rate="):
        fedppl.averaging.SCAFFOLD(learning_rate=0.1, server_rate=rate)
