"""One-shot products of clients' posteriors, of their Gaussians and of their draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import gaussian
from fedppl.algorithms.one_shot.consensus import precision_from_draws
from fedppl.contracts import AnyAlgorithm, Posterior, Received, Target
from fedppl.gaussian import Gaussian
from fedppl.numerics.streams import stream
from fedppl.types import DeclarationError, LocalFailure, Status
from tests.algorithms.test_averaging import fitted
from tests.support import pooled, problems
from tests.support.states import received

ONE_SHOT = {"weighted": fedppl.one_shot.PrecisionWeighted, "consensus": fedppl.one_shot.ConsensusMonteCarlo}


def exact_of(clients: Any, ids: Any) -> Gaussian:
    """The posterior of some clients' data under the whole prior."""
    return problems.regression_posterior({client_id: clients[client_id] for client_id in ids})


def subposterior(d: Any, clients: int) -> Gaussian:
    """f_k(φ) p(φ)^(1/K): natural parameters add."""
    return gaussian.product(problems.regression_site(d), gaussian.power(problems.REGRESSION_PRIOR, 1 / clients))


def each(replies: Any) -> Received:
    """What a server has of a round."""
    return received(replies, summed=False)


def posterior(algorithm: AnyAlgorithm, state: Any) -> Gaussian:
    shared = algorithm.result.shared
    assert isinstance(shared, Posterior)
    return shared.gaussian(state)


# --- PrecisionWeighted ----------------------------------------------------------------------------------------


def test_the_product_of_gaussian_posteriors_is_the_posterior() -> None:
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.one_shot.PrecisionWeighted())
    assert (fit.status, len(fit.records)) == (Status.CONVERGED, 1)
    exact = problems.regression_posterior(clients)
    assert_allclose(fit.posterior.precision, exact.precision, rtol=1e-8, atol=1e-8)
    assert_allclose(fit.posterior.linear, exact.linear, rtol=1e-8, atol=1e-8)


def test_replies_are_posteriors_under_a_part_of_the_prior_and_q_is_their_sum() -> None:
    model, clients = problems.regression()
    models, algorithm = model.enrol(clients, kernel=False), fedppl.one_shot.PrecisionWeighted()
    state = algorithm.init(models["clinic 0"].layout, tuple(models), stream((1,)))
    replies = {}
    for client_id, client in models.items():
        message = algorithm.broadcast(state, client_id)
        reply = replies[client_id] = algorithm.update_client(client, None, message, stream((1,)))[1]
        exact = subposterior(clients[client_id], 4)
        assert_allclose(reply["linear"], exact.linear, rtol=1e-8, atol=1e-8)
        assert_allclose(gaussian.unpack_triangle(reply["precision"]), exact.precision, rtol=1e-8, atol=1e-8)
    q = posterior(algorithm, algorithm.update_server(state, each(replies))[0])
    total = received(replies, summed=True).total
    assert_allclose(q.linear, total["linear"], rtol=1e-12, atol=1e-12)
    assert_allclose(gaussian.pack_triangle(q.precision), total["precision"], rtol=1e-12, atol=1e-12)


def test_clients_count_once_and_q_is_the_posterior_of_the_data_heard() -> None:
    model, clients = problems.regression()
    order = [["clinic 2"], ["clinic 2", "clinic 0"], ["clinic 0"], ["clinic 3"], ["clinic 1"]]
    rounds = iter(order)
    steps = list(
        fedppl.rounds(
            model,
            clients,
            fedppl.one_shot.PrecisionWeighted(),
            rounds=9,
            participation=lambda ids, rng: next(rounds),
            random_seed=1,
        )
    )
    heard: set[str] = set()
    for step, asked in zip(steps, order, strict=True):
        heard |= set(asked)
        exact = exact_of(clients, heard)
        assert_allclose(step.state.sites.q.precision, exact.precision, rtol=1e-8, atol=1e-8)
        assert_allclose(step.state.sites.q.linear, exact.linear, rtol=1e-8, atol=1e-8)
        assert step.info.heard == len(heard)
        assert step.status is (Status.CONVERGED if len(heard) == 4 else Status.RUNNING)
        if len(heard) < 4:
            assert f"{len(heard)} of 4 clients" in step.message


def test_a_second_reply_changes_nothing_even_if_it_differs() -> None:
    model, clients = problems.regression()
    models, algorithm = model.enrol(clients, kernel=False), fedppl.one_shot.PrecisionWeighted()
    state = algorithm.init(models["clinic 0"].layout, tuple(models), stream((1,)))
    reply = {"linear": np.ones(3), "precision": gaussian.pack_triangle(np.eye(3))}
    once, _ = algorithm.update_server(state, each({"clinic 1": reply}))
    twice, _ = algorithm.update_server(once, each({"clinic 1": {**reply, "linear": np.full(3, 9.0)}}))
    assert twice is once
    assert_array_equal(once.sites.q.linear, problems.REGRESSION_PRIOR.linear + np.ones(3))
    # nor beside one that is new
    again = {"clinic 1": {**reply, "linear": np.full(3, 9.0)}, "clinic 2": reply}
    both, _ = algorithm.update_server(once, each(again))
    assert_array_equal(both.sites.q.linear, problems.REGRESSION_PRIOR.linear + 2 * np.ones(3))


@problems.few_rounds
def test_cavity_and_site_of_every_client_make_q() -> None:
    """Also for one that was not heard, whose cavity is q, and one that is new."""
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.one_shot.PrecisionWeighted(), rounds=1, participation=lambda ids, rng: ids[:3])
    for client_id in clients:
        message = fit.algorithm.result.final_message(fit.state, client_id)
        cavity = gaussian.unpack_triangle(message["cavity_precision"])
        exact = exact_of(clients, {"clinic 0", "clinic 1", "clinic 2"} - {client_id})
        assert_allclose(cavity, exact.precision, rtol=1e-8, atol=1e-8)
        assert_allclose(message["cavity_linear"], exact.linear, rtol=1e-8, atol=1e-8)
    mean, covariance = problems.regression_joint(clients["clinic 3"], exact_of(clients, list(clients)[:3]))
    posterior = fit.client("clinic 3")["posterior"]
    for name, place in (("mu", slice(0, 2)), ("beta", slice(3, 5))):
        found = np.asarray(posterior[name]).reshape(-1, 2).mean(axis=0)
        assert np.all(np.abs(found - mean[place]) < 4 * np.sqrt(np.diag(covariance)[place] / 4000))


def test_a_prior_that_is_not_gaussian_is_shared_out() -> None:
    """Moments of f_k(u) p(u)^(1/3) by quadrature at each client; natural parameters add."""
    model, clients = pooled.spread()
    fit = fitted(model, clients, fedppl.one_shot.PrecisionWeighted(local=fedppl.local.NestedLaplace(points=1024)))
    precision, linear = 0.0, 0.0
    for client_id, d in clients.items():
        mean, sd = pooled.spread_moments({client_id: d}, 1 / 3)
        precision, linear = precision + sd**-2, linear + mean * sd**-2
    assert_allclose(fit.posterior.precision, [[precision]], rtol=0.02)  # 66 without a prior, 94 with three of it
    assert_allclose(gaussian.mean(fit.posterior), [linear / precision], atol=0.05 / np.sqrt(precision))


@pytest.mark.parametrize("matrix", [-np.eye(3), np.zeros((3, 3)), np.diag([1.0, 1.0, -1e-3])])
@pytest.mark.parametrize("name", ONE_SHOT)
def test_replies_that_are_no_distribution_are_refused(name: str, matrix: Any) -> None:
    model, clients = problems.regression()
    layout, algorithm = next(iter(model.enrol(clients, kernel=False).values())).layout, ONE_SHOT[name]()
    state = algorithm.init(layout, tuple(clients), stream((1,)))

    def reply(matrix: Any) -> Any:
        packed = gaussian.pack_triangle(matrix)
        if name == "weighted":
            return {"linear": np.ones(3), "precision": packed}
        return {"weighted": np.ones((1000, 3)), "weight": packed, "count": np.array(1.0)}

    assert "not positive definite" in str(algorithm.replies.reject(state, reply(matrix)))
    assert algorithm.replies.reject(state, reply(np.eye(3))) is None


# --- ConsensusMonteCarlo --------------------------------------------------------------------------------------


def test_consensus_of_gaussian_posteriors_is_the_posterior_up_to_monte_carlo_error() -> None:
    """S = 4000 independent combined draws: sd / √S for means, 1 / √(2S) for sds."""
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.one_shot.ConsensusMonteCarlo(draws=4000))
    assert (fit.status, len(fit.records)) == (Status.CONVERGED, 1)
    exact, draws = problems.regression_posterior(clients), fit.state.draws
    mean, sd = gaussian.mean(exact), gaussian.standard_deviations(exact)
    assert draws.shape == (4000, 3)
    for found in (gaussian.mean(fit.posterior), draws.mean(axis=0)):
        assert_allclose((found - mean) / sd, 0, atol=4 / np.sqrt(4000))
    for found in (gaussian.standard_deviations(fit.posterior), draws.std(axis=0)):
        assert_allclose(found, sd, rtol=4 / np.sqrt(8000))
    # the posterior's mean is the draws' to rounding
    assert_allclose(gaussian.mean(fit.posterior), draws.mean(axis=0), rtol=1e-10)
    # √(6 / S) is the sd of a sample's skewness under normality
    assert np.all(np.abs(fit.idata["fit"]["skewness"].values) < 4 * np.sqrt(6 / 4000))


def test_draws_are_averaged_one_by_one_by_the_clients_precisions() -> None:
    """φ_s = (Σ W_k)⁻¹ Σ W_k φ_ks from the clients' own draws, read off their replies."""
    model, clients = problems.regression()
    models, algorithm = model.enrol(clients, kernel=False), fedppl.one_shot.ConsensusMonteCarlo(draws=200)
    state = algorithm.init(models["clinic 0"].layout, tuple(models), stream((1,)))
    replies, top, bottom = {}, np.zeros((200, 3)), np.zeros((3, 3))
    for k, (client_id, client) in enumerate(models.items()):
        _, reply, _ = algorithm.update_client(client, None, algorithm.broadcast(state, client_id), stream((k,)))
        replies[client_id] = reply
        W = gaussian.unpack_triangle(reply["weight"])
        phi = reply["weighted"] @ np.linalg.inv(W)
        exact = subposterior(clients[client_id], 4)
        sd = gaussian.standard_deviations(exact)
        assert_allclose((phi.mean(axis=0) - gaussian.mean(exact)) / sd, 0, atol=4 / np.sqrt(200))
        assert_allclose(W, precision_from_draws(phi), rtol=1e-7)
        top, bottom = top + phi @ W, bottom + W
    after, _ = algorithm.update_server(state, each(replies))
    assert_allclose(after.draws, np.linalg.solve(bottom, top.T).T, rtol=1e-9, atol=1e-9)


def test_a_client_sends_the_same_draws_again_and_they_count_once() -> None:
    model, clients = problems.regression()
    models, algorithm = model.enrol(clients, kernel=False), fedppl.one_shot.ConsensusMonteCarlo(draws=100)
    client = models["clinic 1"]
    state = algorithm.init(client.layout, tuple(models), stream((1,)))
    message = algorithm.broadcast(state, "clinic 1")
    personal, first, _ = algorithm.update_client(client, None, message, stream((1,)))
    _, second, _ = algorithm.update_client(client, personal, message, stream((2,)))
    assert_array_equal(first["weighted"], second["weighted"])
    once, report = algorithm.update_server(state, each({"clinic 1": first}))
    assert algorithm.update_server(once, each({"clinic 1": second}))[0] is once
    assert (once.included, once.replied) == (1.0, ("clinic 1",))
    assert "1 of 4 clients" in report.message
    # one that lost its draws sends others, which come too late
    _, third, _ = algorithm.update_client(client, None, message, stream((2,)))
    assert np.max(np.abs(first["weighted"] - third["weighted"])) > 0
    assert algorithm.update_server(once, each({"clinic 1": third}))[0] is once


def test_replies_that_were_summed_on_the_way_count_as_many() -> None:
    model, clients = problems.regression()
    models, algorithm = model.enrol(clients, kernel=False), fedppl.one_shot.ConsensusMonteCarlo(draws=50)
    state = algorithm.init(models["clinic 0"].layout, tuple(models), stream((1,)))
    replies = {
        client_id: algorithm.update_client(client, None, algorithm.broadcast(state, client_id), stream((k,))).reply
        for k, (client_id, client) in enumerate(models.items())
    }
    one_by_one, _ = algorithm.update_server(state, each(replies))
    first, *others = replies
    total = received({client_id: replies[client_id] for client_id in others}, summed=True).total
    assert algorithm.replies.reject(state, total) is None
    summed, report = algorithm.update_server(state, each({first: replies[first], "relay": total}))
    assert_allclose(summed.draws, one_by_one.draws, rtol=1e-12, atol=1e-12)
    assert (summed.included, report.status) == (4.0, Status.CONVERGED)


def test_before_and_while_clients_are_missing_the_prior_stands_in() -> None:
    model, clients = problems.regression()
    models, algorithm = model.enrol(clients, kernel=False), fedppl.one_shot.ConsensusMonteCarlo(draws=4000)
    state = algorithm.init(models["clinic 0"].layout, tuple(models), stream((1,)))
    assert state.draws.shape == (0, 3)
    assert_array_equal(algorithm.result.details(state)["skewness"][1], np.zeros(3))
    assert_allclose(posterior(algorithm, state).precision, problems.REGRESSION_PRIOR.precision)
    for k, client_id in enumerate(["clinic 3", "clinic 1"]):
        reply = algorithm.update_client(models[client_id], None, algorithm.broadcast(state, client_id), stream((k,)))[1]
        state, _ = algorithm.update_server(state, each({client_id: reply}))
    exact = exact_of(clients, ["clinic 3", "clinic 1"])
    sd, q = gaussian.standard_deviations(exact), posterior(algorithm, state)
    assert_allclose((gaussian.mean(q) - gaussian.mean(exact)) / sd, 0, atol=4 / np.sqrt(4000))
    assert_allclose(gaussian.standard_deviations(q), sd, rtol=4 / np.sqrt(8000))


def test_a_clients_own_posterior_is_that_of_all_data() -> None:
    """From what it knows of its own part, or draws anew where that is lost; q's error of sd / √4000 comes on top."""
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.one_shot.ConsensusMonteCarlo(draws=4000))
    client, others = fit.clients["clinic 2"], exact_of(clients, ["clinic 0", "clinic 1", "clinic 3"])
    mean, covariance = problems.regression_joint(clients["clinic 2"], others)
    sd, message = np.sqrt(np.diag(covariance)), fit.algorithm.result.final_message(fit.state, "clinic 2")
    for personal in (fit.personal["clinic 2"], None):
        drawn = fit.algorithm.result.draw(client, personal, message, 4000, 1, stream((2,)))
        found = np.concatenate([drawn.shared[0], drawn.local[0]], axis=1)
        assert_allclose((found.mean(axis=0) - mean) / sd, 0, atol=4 * np.sqrt(3 / 4000))
        assert_allclose(found.std(axis=0), sd, rtol=4 * np.sqrt(3 / 8000))
    # one that never took part: q stands for everything else
    mean, covariance = problems.regression_joint(clients["clinic 2"], exact_of(clients, clients))
    new = np.asarray(fit.new_client(clients["clinic 2"])["posterior"]["beta"]).reshape(-1, 2)
    assert_allclose((new.mean(axis=0) - mean[3:]) / np.sqrt(np.diag(covariance)[3:]), 0, atol=4 * np.sqrt(2 / 4000))


def test_skewed_posteriors_of_clients_are_averaged_to_something_else() -> None:
    """What the docstring warns of: log σ from 8 to 16 rows; the skewness that is left is reported."""
    model, clients = pooled.spread()
    fit = fitted(model, clients, fedppl.one_shot.ConsensusMonteCarlo(draws=4000))
    mean, sd = pooled.spread_moments(clients)
    off = (gaussian.mean(fit.posterior)[0] - mean) / sd
    assert 4 / np.sqrt(4000) < abs(off) < 0.5
    assert_array_equal(
        np.sign(fit.idata["fit"]["skewness"].values),
        np.sign(np.mean((fit.state.draws - fit.state.draws.mean()) ** 3))[None],
    )


@pytest.mark.parametrize("draws", [0, 3, 2.5, -10])
def test_draws_out_of_range_are_refused(draws: Any) -> None:
    with pytest.raises(DeclarationError, match=f"draws={draws}"):
        fedppl.one_shot.ConsensusMonteCarlo(draws=draws)


def test_too_few_draws_for_the_coordinates_are_refused_before_the_first_round() -> None:
    model, clients = problems.regression()
    with pytest.raises(DeclarationError, match="more than 5"):
        fitted(model, clients, fedppl.one_shot.ConsensusMonteCarlo(draws=5))


@problems.few_rounds
def test_draws_without_a_covariance_are_a_failure() -> None:
    model, clients = problems.regression()
    inner = fedppl.local.NestedLaplace()

    def stuck(target: Target, draws: int, chains: int, rng: np.random.Generator) -> Any:
        found = inner.draw(target, draws, chains, rng)
        return found._replace(shared=np.ones_like(found.shared))

    fit = fitted(model, clients, fedppl.one_shot.ConsensusMonteCarlo(local=inner._replace(draw=stuck)), rounds=1)
    assert fit.status is Status.STALLED
    assert "raise draws=" in fit.message


@problems.few_rounds
@pytest.mark.parametrize("name", ONE_SHOT)
def test_a_client_that_fails_is_left_out_and_named(name: str) -> None:
    model, clients = problems.regression()
    local = problems.failing(lambda client_id: client_id == "clinic 2")

    def draw(target: Target, draws: int, chains: int, rng: np.random.Generator) -> Any:
        if target.client.client_id == "clinic 2":
            raise LocalFailure("out of order")
        return fedppl.local.NestedLaplace().draw(target, draws, chains, rng)

    fit = fitted(model, clients, ONE_SHOT[name](local=local._replace(draw=draw)), rounds=2)
    assert fit.status is Status.MAX_ROUNDS
    assert "clinic 2" in fit.message
    exact = exact_of(clients, ["clinic 0", "clinic 1", "clinic 3"])
    sd = gaussian.standard_deviations(exact)
    assert_allclose((gaussian.mean(fit.posterior) - gaussian.mean(exact)) / sd, 0, atol=4 / np.sqrt(1000))
