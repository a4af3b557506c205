"""Methods that pFedVEM is compared to: each against a property that pins it down."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pymc as pm
import pytest
import scipy.optimize
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl.models import fedsi
from fedppl.numerics.streams import stream
from fedppl.types import DeclarationError, LocalFailure
from tests.support import problems
from tests.support.states import updated

torch = pytest.importorskip("torch")

from fedppl import nn  # noqa: E402
from fedppl.nn.algorithms.heads import langevin_steps  # noqa: E402
from fedppl.nn.functional import pieces  # noqa: E402
from fedppl.nn.personal import bayes_steps, further_gain, loss_at, meta_steps, moreau_steps  # noqa: E402
from fedppl.nn.train import Training  # noqa: E402
from fedppl.nn.unit import head_of  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402

ALL = ("0.weight", "0.bias", "2.weight", "2.bias")
NOISE = 0.5


@functools.cache
def line() -> tuple[fedppl.FederatedModel, problems.Clients]:
    """A linear network with a normal likelihood: a client's mean loss is ½ wᵀ A w − bᵀ w, see `quadratic`."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = torch.nn.Linear(2, 1)
    rng, data = np.random.default_rng(4), {}
    for k, rows in enumerate((12, 30, 24)):
        X = rng.normal(size=(rows, 2))
        data[f"site {k}"] = {"X": X, "y": X @ rng.normal(size=(2, 1)) + 0.3 * k + NOISE * rng.normal(size=(rows, 1))}
    builder = functools.partial(fedsi.regressor, net=net, noise_sd=NOISE)
    return fedppl.FederatedModel(builder, ["weight", "bias"]), data


def quadratic(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """A and b of a client's mean loss."""
    D = np.column_stack([data["X"], np.ones(len(data["X"]))])
    return D.T @ D / len(D) / NOISE**2, D.T @ data["y"][:, 0] / len(D) / NOISE**2


def pooled() -> tuple[np.ndarray, np.ndarray]:
    """A and b of the mean loss over all rows."""
    clients = line()[1]
    rows = np.array([len(data["X"]) for data in clients.values()], dtype=float)
    parts = [quadratic(data) for data in clients.values()]
    return tuple(np.tensordot(rows / rows.sum(), np.array([part[i] for part in parts]), 1) for i in (0, 1))


def fit(algorithm: fedppl.Algorithm, rounds: int, problem: Any = None, **settings: Any) -> fedppl.Fit:
    model, clients = problem or line()
    return fedppl.fit(model, clients, algorithm, rounds=rounds, progressbar=False, random_seed=1, **settings)


def networks(clients: int = 3) -> Any:
    return problems.classification(clients, shared=ALL)


# --- FedProx ---------------------------------------------------------------------------------------------------


def test_without_a_proximal_term_fedprox_is_fedavg_and_with_a_large_one_nothing_moves() -> None:
    settings: dict[str, Any] = {"learning_rate": 0.01, "momentum": 0.9}
    plain = fit(nn.FedAvg(**settings), 3, networks())
    none = fit(nn.FedAvg(**settings, proximal=0.0), 3, networks())
    assert_array_equal(plain.state.phi, none.state.phi)
    moved = [
        np.abs(fit(nn.FedAvg(**settings, proximal=mu), 1, networks()).state.phi - held).max()
        for mu, held in ((0.0, networks_start()), (10.0, networks_start()))
    ]
    assert moved[1] < 0.5 * moved[0]


def networks_start() -> np.ndarray:
    return np.concatenate([value.detach().double().numpy().ravel() for value in problems.network().parameters()])


def test_the_fixed_point_of_one_client_with_a_proximal_term_is_in_closed_form() -> None:
    """(A + μ I) w = b + μ φ after steps to convergence from φ."""
    model, clients = line()
    client = model.enrol({"site 1": clients["site 1"]}, kernel=False)["site 1"]
    algorithm = nn.FedAvg(learning_rate=0.05, momentum=0.0, phases=(("all", 4000),), proximal=2.0)
    state = algorithm.init(client.layout, ("site 1",), stream((0,)))
    _, reply, _ = algorithm.update_client(client, None, algorithm.broadcast(state, "site 1"), stream((1,)))
    A, b = quadratic(clients["site 1"])
    wanted = np.linalg.solve(A + 2.0 * np.eye(3), b + 2.0 * state.phi)
    assert_allclose(reply["weighted"] / reply["weight"], wanted, atol=1e-4)


# --- SCAFFOLD --------------------------------------------------------------------------------------------------


def test_control_variates_sum_to_nothing_and_are_mean_gradients() -> None:
    found = fit(nn.SCAFFOLD(learning_rate=0.02, epochs=2, batch_size=10), 6, participation=2)
    ledger = found.state.controls
    assert_allclose(ledger.mean, ledger.weights @ ledger.each / ledger.weights.sum(), rtol=1e-12)
    assert_allclose(ledger.weights @ (ledger.mean - ledger.each), 0.0, atol=1e-8)
    # One step on all rows in the first round: c_k is the gradient at φ.
    model, clients = line()
    algorithm = nn.SCAFFOLD(learning_rate=0.02, epochs=1, batch_size=100)
    models = model.enrol(clients, kernel=False)
    before = algorithm.init(models["site 0"].layout, tuple(clients), stream((0,)))
    replies = {
        k: algorithm.update_client(c, None, algorithm.broadcast(before, k), stream((1,)))[1] for k, c in models.items()
    }
    after, _ = updated(algorithm, before, replies)
    for k, (name, data) in enumerate(clients.items()):
        A, b = quadratic(data)
        assert_allclose(after.controls.each[k], A @ before.phi - b, rtol=1e-3, atol=1e-4, err_msg=name)


def test_scaffold_ends_at_the_optimum_where_averaging_does_not() -> None:
    A, b = pooled()
    best = np.linalg.solve(A, b)
    steps: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 100}
    ours = fit(nn.SCAFFOLD(epochs=10, **steps), 150).state.phi
    theirs = fit(nn.FedAvg(momentum=0.0, phases=(("all", 10),), **steps), 150).state.phi
    assert_allclose(ours, best, atol=2e-4)
    assert np.abs(theirs - best).max() > 5e-3


# --- IFCA ------------------------------------------------------------------------------------------------------


def test_one_cluster_is_federated_averaging() -> None:
    steps: dict[str, Any] = {"learning_rate": 0.05, "momentum": 0.9}
    one = fit(nn.IFCA(clusters=1, epochs=2, **steps), 4, networks())
    plain = fit(nn.FedAvg(phases=(("all", 2),), **steps), 4, networks())
    assert_allclose(one.state.phi[0], plain.state.phi, rtol=1e-12)


def test_clients_that_disagree_about_labels_part() -> None:
    """Half of the clients call every class by the next one's name: one network cannot serve both."""
    model, clients = networks(6)
    mixed = {
        k: {**data, "y": data["y"] if i % 2 else (data["y"] + 1) % 3} for i, (k, data) in enumerate(clients.items())
    }
    two = fit(nn.IFCA(spread=1.0, learning_rate=0.1), 25, (model, mixed))
    chosen = two.idata["rounds"]["cluster"].values[-1]
    assert set(chosen[::2]).isdisjoint(chosen[1::2])
    right = [
        np.mean(nn.predict(two, k, {"X": d["X"]})["probability"].values.argmax(1) == d["y"]) for k, d in mixed.items()
    ]
    one = fit(nn.IFCA(clusters=1, learning_rate=0.1), 25, (model, mixed))
    wrong = [
        np.mean(nn.predict(one, k, {"X": d["X"]})["probability"].values.argmax(1) == d["y"]) for k, d in mixed.items()
    ]
    assert np.mean(right) > 0.9 > np.mean(wrong)


def test_a_cluster_without_a_loss_is_chosen_by_nobody() -> None:
    """Outputs that overflow in single precision have the loss NaN, which comes before all numbers in NumPy's argmin."""
    model, clients = networks()
    unit = model.enrol(clients, kernel=False)["device 0"].view(network_of)
    algorithm = nn.IFCA(clusters=2, spread=1e39, epochs=1)
    found = fit(algorithm, 1, (model, clients))
    assert np.isnan(loss_at(unit, unit.weights(found.state.phi[1])))
    assert not found.records[0].failures
    assert {info["cluster"] for info in found.records[0].infos.values()} == {0.0}


def test_a_cluster_that_nobody_chooses_stays() -> None:
    algorithm = nn.IFCA(clusters=2)
    model, clients = networks()
    state = algorithm.init(model.enrol(clients, kernel=False)["device 0"].layout, tuple(clients), stream((0,)))
    reply = {"phi": np.ones(31), "weight": np.array([3.0, 0.0])}
    after, report = updated(algorithm, state, {"device 0": reply})
    assert_array_equal(after.phi[1], state.phi[1])
    assert_array_equal(after.phi[0], np.ones(31))
    assert report.info.used == 1
    assert algorithm.replies.reject(state, {**reply, "weight": np.array([1.0, 1.0])}) is not None


# --- Per-FedAvg ------------------------------------------------------------------------------------------------


def test_without_a_step_inside_per_fedavg_is_gradient_descent() -> None:
    steps: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 100}
    meta = fit(nn.PerFedAvg(inner_rate=1e-9, epochs=3, **steps), 2).state.phi
    plain = fit(nn.FedAvg(momentum=0.0, phases=(("all", 3),), **steps), 2).state.phi
    assert_allclose(meta, plain, atol=1e-5)


def test_a_step_of_per_fedavg_is_that_of_the_meta_loss() -> None:
    """∇F = (I − α A) ∇f(w − α ∇f(w)) on a quadratic, whose Hessian differences give exactly."""
    model, clients = line()
    unit = model.enrol(clients, kernel=False)["site 2"].view(network_of)
    w, alpha, beta = unit.initial, 0.1, 0.05
    A, b = quadratic(clients["site 2"])
    inside = w - alpha * (A @ w - b)
    wanted = w - beta * (np.eye(3) - alpha * A) @ (A @ inside - b)
    found = meta_steps(unit, w, Training(beta, 1, 100), alpha, stream((0,)), dtype=torch.float64)
    assert_allclose(found, wanted, rtol=1e-9)


def count(X: Any, y: Any, *, net: Any) -> pm.Model:
    """Counts of mean exp(w x)."""
    with pm.Model() as model:
        outputs = nn.module(net, nn.parameters(net, sigma=10.0), pm.Data("X", X))
        pm.Poisson("count", pm.math.exp(outputs[:, 0]), observed=pm.Data("y", y))
    return model


def test_per_fedavg_is_judged_by_the_loss_after_a_clients_step() -> None:
    """Of counts of 1, f(w) = exp(w) - w, and F is least also where a step of .2 leads to w = 0: f is 11.6 there."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(net.weight, 1.9)
    model = fedppl.FederatedModel(functools.partial(count, net=net), ["weight"])
    clients = {"a": {"X": np.ones((4, 1)), "y": np.ones(4, dtype=int)}}
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    far = scipy.optimize.brentq(lambda w: w - 0.2 * np.expm1(w), 1.0, 4.0)
    found = meta_steps(unit, unit.initial, Training(0.05, 300, 4), 0.2, stream((0,)), dtype=torch.float64)
    assert_allclose(found, [far], atol=1e-3)
    assert loss_at(unit, found) > loss_at(unit, unit.initial) + 6.0
    with pytest.raises(LocalFailure, match="inner_rate="):
        meta_steps(unit, unit.initial, Training(20.0, 1, 4), 0.2, stream((0,)), dtype=torch.float64)
    with pytest.raises(LocalFailure, match="inner_rate="):
        meta_steps(unit, unit.initial, Training(1e300, 1, 4), 0.2, stream((0,)), dtype=torch.float64)


def test_what_going_as_far_again_would_gain_is_in_closed_form() -> None:
    """Of ½ wᵀ A w − bᵀ w with a prior, which counts once for all rows."""
    model, clients = line()
    unit = model.enrol(clients, kernel=False)["site 1"].view(network_of)
    (A, b), rng, free = quadratic(clients["site 1"]), np.random.default_rng(0), np.array([0, 2])
    start, end, m, p = rng.normal(size=3), rng.normal(size=3), rng.normal(size=2), np.array([3.0, 5.0])
    slope = (A @ end - b)[free]
    assert_allclose(further_gain(unit, start, end, None, free), -slope @ (end - start)[free], rtol=1e-4)
    pulled = slope + p * (end[free] - m) / len(clients["site 1"]["X"])
    assert_allclose(further_gain(unit, start, end, (m, p), free), -pulled @ (end - start)[free], rtol=1e-4)


# --- pFedMe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [1.0, 1e6])
def test_a_step_of_pfedme_is_that_of_the_envelope(lam: float) -> None:
    """∇ = λ (w − θ(w)) with θ(w) = (A + λ I)⁻¹ (b + λ w); with λ → ∞ that is the loss's own, so that φ is FedAvg's."""
    model, clients = line()
    unit = model.enrol(clients, kernel=False)["site 1"].view(network_of)
    w, (A, b) = unit.initial, quadratic(clients["site 1"])
    theta = np.linalg.solve(A + lam * np.eye(3), b + lam * w)
    steps, rate = Training(0.1 / lam, 1, 100), 0.05
    found, own = moreau_steps(unit, w, steps, lam, (rate, 2000), stream((0,)), dtype=torch.float64)
    assert_allclose(own, theta, atol=1e-8)
    assert_allclose((w - found) / 0.1, w - theta, rtol=1e-4)
    if lam > 1e3:
        assert_allclose(lam * (w - found) / 0.1, A @ w - b, rtol=1e-3)


def test_a_personal_network_is_judged_by_the_batch_that_it_is_found_on() -> None:
    """The last batch is one row, for which θ leaves the others; w goes a little of the way."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    model = fedppl.FederatedModel(functools.partial(fedsi.regressor, net=net, noise_sd=0.2), ["weight"])
    y = np.array([1.0, -1.0, 1.0, -1.0, 1.0])[:, None]
    unit = model.enrol({"a": {"X": np.ones((5, 1)), "y": y}}, kernel=False)["a"].view(network_of)
    w, theta = moreau_steps(unit, unit.initial, Training(0.01, 1, 4), 1.0, (0.01, 200), stream((0,)))
    assert_allclose(np.abs(theta), 25 / 26, rtol=0.01)
    assert loss_at(unit, theta) > loss_at(unit, unit.initial) + 5.0
    assert np.abs(w) < 0.02
    with pytest.raises(LocalFailure, match="lower inner_rate="):
        moreau_steps(unit, unit.initial, Training(0.01, 1, 4), 1.0, (0.1, 200), stream((0,)))


def test_pfedme_predicts_by_the_personal_network() -> None:
    model, clients = networks()
    algorithm = nn.PFedMe(lam=1.0, learning_rate=0.2, inner_rate=0.1)
    found = fit(algorithm, 15, (model, clients))
    for name, data in clients.items():
        own = nn.personalise(found, name)
        assert np.abs(own.weights - found.state.phi).max() > 1e-3
        assert np.mean(nn.predict(found, own, {"X": data["X"]})["probability"].values.argmax(1) == data["y"]) >= 0.85


# --- pFedBayes -------------------------------------------------------------------------------------------------


def test_the_global_part_moves_to_where_the_clients_posterior_is() -> None:
    model, clients = networks()
    client = model.enrol(clients, kernel=False)["device 0"]
    algorithm = nn.PFedBayes(zeta=1.0, spread=0.1, learning_rate=5e-3, epochs=20)
    state = algorithm.init(client.layout, ("device 0",), stream((0,)))
    q, reply, info = algorithm.update_client(client, None, algorithm.broadcast(state, "device 0"), stream((1,)))
    mean, sd = reply["mean"] / reply["weight"], reply["sd"] / reply["weight"]
    assert np.linalg.norm(q.mean - mean) < 0.2 * np.linalg.norm(q.mean - state.mean)
    assert np.linalg.norm(np.log(q.sd / sd)) < np.linalg.norm(np.log(q.sd / state.sd))
    assert info == {"blank": 1.0}


@pytest.mark.parametrize("follow", [True, False], ids=["p follows", "p stays"])
def test_steps_of_posteriors_are_those_of_the_objective(follow: bool) -> None:
    """Three steps of Adam by closed-form slopes of the KL, against automatic ones of torch's own divergence."""
    model, clients = problems.classification(3)
    unit = model.enrol(clients, kernel=False)["device 0"].view(network_of)
    rng, size, zeta, draws = np.random.default_rng(5), sum(value.numel() for value in unit.net.parameters()), 0.7, 2
    mean, sd = 0.3 * rng.normal(size=size), rng.uniform(0.02, 2.0, size)
    start = 0.3 * rng.normal(size=size), rng.uniform(0.02, 2.0, size)
    steps = Training(learning_rate=1e-2, momentum=None, batch_size=10**6, epochs=3)
    found = bayes_steps(
        unit, mean, sd, steps, zeta, draws, np.random.default_rng(1), start=start, follow=follow, dtype=torch.float64
    )
    rng = np.random.default_rng(1)
    source = torch.Generator().manual_seed(int(rng.integers(2**62)))
    q, p = ([torch.tensor(m), torch.tensor(s).expm1().log()] for m, s in (start, (mean, sd)))
    both = [[value.requires_grad_() for value in pair] for pair in (q, p)]
    optimizers = [torch.optim.Adam(pair, lr=1e-2) for pair in both]
    normal = lambda pair: torch.distributions.Normal(pair[0], torch.nn.functional.softplus(pair[1]))  # noqa: E731
    divergence = lambda: torch.distributions.kl_divergence(normal(both[0]), normal(both[1])).sum()  # noqa: E731
    X, y = (torch.tensor(np.asarray(values, dtype=float)) for values in (unit.X, unit.y))
    for _ in range(3):
        order = torch.from_numpy(rng.permutation(len(X)))
        loss = zeta / len(X) * divergence()
        for _ in range(draws):
            w = normal(both[0]).mean + normal(both[0]).stddev * torch.randn(size, generator=source, dtype=torch.float64)
            out = torch.func.functional_call(unit.net, pieces(unit.net, w), X[order])
            loss = loss + torch.nn.functional.cross_entropy(out, y[order].long()) / draws
        for pair, optimizer, way in zip(both, optimizers, (loss, None), strict=True):
            if way is None and not follow:
                break
            optimizer.zero_grad()
            (zeta / len(X) * divergence() if way is None else way).backward(inputs=pair)
            optimizer.step()
    for (middle, width), pair in zip(found, both, strict=True):
        assert_allclose(middle, normal(pair).mean.detach(), rtol=1e-9, atol=1e-12)
        assert_allclose(width, normal(pair).stddev.detach(), rtol=1e-9)


def test_a_client_that_is_better_than_the_global_network_is_not_taken_to_have_failed() -> None:
    """The global p's loss is far above that of its own q, and stays so after a few steps."""
    model, clients = networks()
    client = model.enrol(clients, kernel=False)["device 0"]
    algorithm = nn.PFedBayes(zeta=0.01, spread=0.05, learning_rate=0.02, epochs=30)
    state = algorithm.init(client.layout, ("device 0",), stream((0,)))
    good, _, _ = algorithm.update_client(client, None, algorithm.broadcast(state, "device 0"), stream((1,)))
    turned = good.mean.copy()
    turned[client.layout.slices["2.weight"]] *= -5.0
    bad = state._replace(mean=turned)
    gentle = nn.PFedBayes(zeta=0.01, spread=0.05, learning_rate=1e-3, epochs=1)
    unit = client.view(network_of)
    assert loss_at(unit, bad.mean) > loss_at(unit, good.mean) + 2.0
    after, _, _ = gentle.update_client(client, good, gentle.broadcast(bad, "device 0"), stream((2,)))
    assert loss_at(unit, after.mean) < loss_at(unit, good.mean) + 0.5


def test_the_global_part_follows_where_the_loss_is_high() -> None:
    """q begins far from the rows' labels, and p goes towards it from a good start: p descends its divergence alone."""
    model, clients = networks()
    client = model.enrol(clients, kernel=False)["device 0"]
    algorithm = nn.PFedBayes(zeta=0.01, spread=0.05, learning_rate=0.02, epochs=30)
    state = algorithm.init(client.layout, ("device 0",), stream((0,)))
    good, _, _ = algorithm.update_client(client, None, algorithm.broadcast(state, "device 0"), stream((1,)))
    far = good.mean + 3.0 * np.random.default_rng(37).normal(size=len(good.mean))
    unit, steps = client.view(network_of), Training(0.03, 60, 50)
    q, p = bayes_steps(unit, good.mean, good.sd, steps, 1.0, 1, stream((2,)), start=(far, good.sd))
    assert loss_at(unit, p[0]) > loss_at(unit, good.mean) + 2.0
    assert loss_at(unit, q[0]) < loss_at(unit, far)
    assert np.linalg.norm(q[0] - p[0]) < 0.6 * np.linalg.norm(far - good.mean)


def test_posteriors_are_judged_by_their_bound() -> None:
    """Of f = u v and y = 1, with sds s, E (1 - f)^2 = (1 - u v)^2 + s^2 (u^2 + v^2) + s^4: least below u v = 1."""
    model, clients = problems.product(0.1)
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)

    def expected(q: Any) -> float:
        (u, v), (s, t) = q
        return float(((1 - u * v) ** 2 + s**2 * v**2 + t**2 * u**2 + s**2 * t**2) / (2 * 0.1**2))

    start, steps = (np.ones(2), np.full(2, 0.5)), Training(0.02, 10, 4)
    q, _ = bayes_steps(unit, *start, steps, 1e-3, 100, stream((0,)), follow=False)
    assert loss_at(unit, q[0]) > loss_at(unit, start[0]) + 2.0
    assert expected(q) < expected(start) - 5.0
    with pytest.raises(LocalFailure, match="lower learning_rate="):
        bayes_steps(unit, *start, steps._replace(learning_rate=1.0), 1e-3, 100, stream((0,)), follow=False)


def test_pfedbayes_learns_and_says_how_sure_it_is() -> None:
    model, clients = networks()
    found = fit(nn.PFedBayes(zeta=0.1, spread=0.05, learning_rate=0.02), 15, (model, clients))
    for name, data in clients.items():
        predicted = nn.predict(found, name, {"X": data["X"]})
        assert np.mean(predicted["probability"].values.argmax(1) == data["y"]) >= 0.85
        assert np.all(predicted["logit_variance"] > 0)
    assert found.idata["fit"]["sd"].shape == (31,)


# --- BPFed -----------------------------------------------------------------------------------------------------


def test_an_overwhelming_prior_holds_the_posterior_and_shared_means_are_averaged_by_rows() -> None:
    """With ζ → ∞ the KL term is all there is, and q_k stays p_k; the server's average is by hand."""
    model, clients = problems.classification(3)
    algorithm = nn.BPFed(zeta=1e9, learning_rate=1e-5)
    client = model.enrol(clients, kernel=False)["device 0"]
    state = algorithm.init(client.layout, tuple(clients), stream((0,)))
    kept, reply, _ = algorithm.update_client(client, None, algorithm.broadcast(state, "device 0"), stream((1,)))
    # Adam's steps are about as long as its rate whatever the slope: it wanders no farther than some of them.
    assert_allclose(reply["mean"] / reply["weight"], state.mean, atol=2e-4)
    assert_allclose(kept.sd, 0.05, rtol=5e-3)
    other = {"mean": 3.0 * np.ones_like(state.mean), "sd": 3.0 * np.full_like(state.mean, 0.2), "weight": np.array(3.0)}
    after, _ = updated(algorithm, state, {"device 0": reply, "device 1": other})
    total = float(reply["weight"]) + 3.0
    assert_allclose(after.mean, (reply["mean"] + 3.0) / total, rtol=1e-12)
    assert_allclose(after.sd, (reply["sd"] + 0.6) / total, rtol=1e-12)


def test_the_last_posterior_is_the_next_prior_of_local_weights() -> None:
    """A client that comes back with a far tighter q_k of its head keeps near it; a new one starts from the spread."""
    model, clients = problems.classification(3)
    client = model.enrol(clients, kernel=False)["device 1"]
    algorithm = nn.BPFed(zeta=1.0, spread=0.1, learning_rate=1e-2, epochs=10)
    message = algorithm.broadcast(algorithm.init(client.layout, ("device 1",), stream((0,))), "device 1")
    first, _, info = algorithm.update_client(client, None, message, stream((1,)))
    assert info == {"blank": 1.0}
    tight = first._replace(sd=np.full_like(first.sd, 1e-3))
    second, _, info = algorithm.update_client(client, tight, message, stream((2,)))
    loose, _, _ = algorithm.update_client(client, first._replace(sd=np.full_like(first.sd, 0.5)), message, stream((2,)))
    assert info == {}
    assert np.abs(second.mean - tight.mean).max() < 0.2 * np.abs(loose.mean - first.mean).max()


def test_bpfed_learns_and_sds_fall_with_rounds() -> None:
    model, clients = problems.classification(3)
    found = fit(nn.BPFed(zeta=0.1, learning_rate=0.02), 15, (model, clients))
    for name, data in clients.items():
        predicted = nn.predict(found, name, {"X": data["X"]})
        assert np.mean(predicted["probability"].values.argmax(1) == data["y"]) >= 0.85
        assert np.all(predicted["logit_variance"] > 0)
        assert np.median(found.personal[name].sd) < 0.05
    assert found.idata["fit"]["sd"].shape == (len(found.state.mean),)


# --- FedPop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "spread"), [(0.05, 0.7), pytest.param(0.2, 0.02, marks=pytest.mark.slow)])
def test_the_chain_has_the_moments_of_its_steps(rate: float, spread: float) -> None:
    """On a linear model, with ρ = exp(−γ / (n s²)) and A's axes: mean and variance as in `langevin_steps`.

    The second case has a step of 17 times the prior's stability limit for plain Langevin steps.
    """
    model, clients = line()
    client, data = model.enrol(clients, kernel=False)["site 1"], clients["site 1"]
    (A, b), n = quadratic(data), len(data["X"])
    beta, unit = np.array([0.3, -0.2, 0.1]), client.view(network_of)
    head = head_of(unit, ("weight", "bias"))
    _, chain = langevin_steps(
        unit, head, unit.initial, beta, (beta, spread), Training(0.1, 8_000, n), rate, stream((0,)), below=False,
        dtype=torch.float64,
    )  # fmt: skip
    values, vectors = np.linalg.eigh(A)
    kept = np.exp(-rate / (n * spread**2))
    factor = kept * (1 - rate * values)
    mean = beta + vectors @ (kept * rate * (vectors.T @ (b - A @ beta)) / (1 - factor))
    variance = (vectors * (spread**2 * (1 - kept**2) / (1 - factor**2))) @ vectors.T
    # A chain with correlation ρ between draws leaves (1 − ρ) / (1 + ρ) of them free.
    free = 4_000 * np.min((1 - np.abs(factor)) / (1 + np.abs(factor)))
    assert_allclose(chain.mean, mean, atol=4 * np.sqrt(np.diag(variance).max() / free))
    assert_allclose(chain.sd, np.sqrt(np.diag(variance)), rtol=4 / np.sqrt(2 * free))
    if rate == 0.05:  # short steps: the posterior itself, to the bias of their length
        precision = n * A + np.eye(3) / spread**2
        exact = np.linalg.solve(precision, n * b + beta / spread**2)
        assert np.abs(mean - exact).max() < 0.02
        assert np.abs(np.diag(variance) / np.diag(np.linalg.inv(precision)) - 1).max() < 0.15


def test_a_head_that_its_population_draws_away_has_not_failed() -> None:
    """A narrow population around 0 holds v there; without its part the loss, (1 - v)^2 / 2 sd^2, rises by 2."""
    model, clients = problems.product(0.5)
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    head, w = head_of(unit, ("1.weight",)), unit.initial
    steps, prior = Training(1e-3, 200, 4), (np.zeros(1), 0.01)
    found, chain = langevin_steps(unit, head, w, np.ones(1), prior, steps, 1e-3, stream((0,)), below=True)
    assert_allclose(chain.mean, 0.0, atol=0.03)
    assert loss_at(unit, found) > loss_at(unit, w) + 1.5


def test_the_population_is_the_mean_of_its_heads_and_layers_below_go_by_rows() -> None:
    model, clients = networks()
    algorithm = nn.FedPop(head=ALL[2:])
    models = model.enrol(clients, kernel=False)
    state = algorithm.init(models["device 0"].layout, tuple(clients), stream((0,)))
    replies = {
        k: algorithm.update_client(c, None, algorithm.broadcast(state, k), stream((1,)))[1] for k, c in models.items()
    }
    after, _ = updated(algorithm, state, replies)
    assert_allclose(after.phi[state.head], np.mean([r["heads"] for r in replies.values()], axis=0), rtol=1e-12)
    rows = sum(float(r["rows"]) for r in replies.values())
    below = np.setdiff1d(np.arange(len(after.phi)), state.head)
    assert_allclose(after.phi[below], sum(r["below"] for r in replies.values()) / rows, rtol=1e-12)


def test_fedpop_learns_and_heads_move_without_reporting() -> None:
    model, clients = networks()
    algorithm = nn.FedPop(head=ALL[2:], learning_rate=0.05, head_rate=0.05)
    found = fit(algorithm, 15, (model, clients), reporting=0.4)
    assert set(found.personal) == set(clients)
    for name, data in clients.items():
        predicted = nn.predict(found, name, {"X": data["X"]})
        assert np.mean(predicted["probability"].values.argmax(1) == data["y"]) >= 0.85
        assert np.all(predicted["logit_variance"] > 0)


# --- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: nn.FedAvg(proximal=-1.0), "proximal=-1.0 must be"),
        (lambda: nn.FedAvg(momentum=2.0), "momentum=2.0 must be"),
        (lambda: nn.FedAvg(phases=1), "phases=1 must be pairs"),
        (lambda: nn.FedAvg(tune=True), "tune=True must be"),
        (lambda: nn.FedSI(diagonal=np.array([1.0, 2.0])), "diagonal=array of shape .2,. must be True or False"),
        (lambda: nn.FedPop(head=("2.bias", "2.bias")), "head=.* each once"),
        (lambda: nn.FedSI(diagonal="x"), "diagonal='x' must be True or False"),
        (lambda: nn.FedSI(prior_variance=np.inf), "prior_variance=inf must be positive and finite"),
        (lambda: nn.SCAFFOLD(learning_rate=0.0), "learning_rate=0.0 must be"),
        (lambda: nn.IFCA(clusters=0), "clusters=0 must be"),
        (lambda: nn.IFCA(spread=0.0), "spread=0.0 must be"),
        (lambda: nn.PerFedAvg(inner_rate=-1.0), "inner_rate=-1.0 must be"),
        (lambda: nn.PFedMe(lam=0.0), "lam=0.0 must be"),
        (lambda: nn.PFedMe(lam=10.0, learning_rate=0.2), "must be at most 1"),
        (lambda: nn.PFedMe(inner_steps=0), "inner_steps=0 must be"),
        (lambda: nn.PFedBayes(zeta=0.0), "zeta=0.0 must be"),
        (lambda: nn.PFedBayes(draws=0), "draws=0 must be"),
        (lambda: nn.BPFed(zeta=np.nan), "zeta=nan must be"),
        (lambda: nn.BPFed(spread=0.0), "spread=0.0 must be"),
        (lambda: nn.PFedBayes(spread=1e-30), "spread=1e-30 must be at least"),
        (lambda: nn.FedPop(head="2.weight"), "head='2.weight' must be a tuple"),
        (lambda: nn.FedPop(head=ALL[2:], head_rate=0.0), "head_rate=0.0 must be"),
        (lambda: nn.FedPop(head=ALL[2:], draw_epochs=0), "draw_epochs=0 must be"),
    ],
)
def test_settings_out_of_range_are_named(build: Any, match: str) -> None:
    with pytest.raises(DeclarationError, match=match):
        build()


def test_frozen_layers_are_refused_and_a_softmax_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Softmax(1))
    data = problems.classification()[1]
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["0.weight", "0.bias"])
    with caplog.at_level("WARNING", logger="fedppl"):
        fedppl.fit(model, data, nn.FedAvg(), rounds=1, progressbar=False)
    assert "leave the softmax out" in caplog.text
    frozen = torch.nn.Linear(3, 3)
    frozen.bias.requires_grad_(False)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=frozen), ["weight"])
    with pytest.raises(DeclarationError, match=r"parameters \['bias'\] are frozen"):
        fedppl.fit(model, data, nn.FedAvg(), progressbar=False)


def test_a_fit_without_one_network_says_so() -> None:
    with pytest.raises(DeclarationError, match="the fit is of nn.IFCA, which has no one network"):
        nn.network(fit(nn.IFCA(epochs=1), 1, networks()))


WHOLE = {
    "SCAFFOLD": nn.SCAFFOLD,
    "IFCA": nn.IFCA,
    "PerFedAvg": nn.PerFedAvg,
    "PFedMe": nn.PFedMe,
    "PFedBayes": nn.PFedBayes,
    "FedPop": functools.partial(nn.FedPop, head=("weight", "bias")),
}


@pytest.mark.parametrize("name", WHOLE)
def test_networks_that_are_shared_in_part_are_refused(name: str) -> None:
    with pytest.raises(DeclarationError, match="this algorithm shares whole networks"):
        fit(WHOLE[name](), 1, problems.classification(2))


@pytest.mark.parametrize("name", WHOLE)
def test_steps_that_run_away_say_what_to_lower(name: str) -> None:
    model, clients = line()
    client = model.enrol(clients, kernel=False)["site 0"]
    several = {"PFedMe": {"inner_rate": 1e8, "lam": 1e-6}, "FedPop": {"head_rate": 1e8, "spread": 1e8}}
    settings = several.get(name, {"learning_rate": 1e8})
    algorithm = WHOLE[name](**settings)
    state = algorithm.init(client.layout, ("site 0",), stream((0,)))
    if name == "SCAFFOLD":
        settings = {"learning_rate": 1e30}
        algorithm = WHOLE[name](**settings)
    with pytest.raises(LocalFailure, match="lower (learning_rate|inner_rate|head_rate)="):
        algorithm.update_client(client, None, algorithm.broadcast(state, "site 0"), stream((1,)))
