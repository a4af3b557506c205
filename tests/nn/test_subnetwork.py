"""FedSI: what a client sends, what the server makes of it, and what a client makes of the outcome."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import nn  # noqa: E402
from fedppl.models import fedsi  # noqa: E402
from fedppl.nn import subnet  # noqa: E402
from fedppl.nn.subnet import curvature_diagonal, select  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402
from fedppl.numerics.streams import stream  # noqa: E402
from tests.support import problems  # noqa: E402
from tests.support.states import updated  # noqa: E402


def fitted(algorithm: fedppl.Algorithm, rounds: int = 3, **settings: Any) -> fedppl.Fit:
    model, clients = problems.classification()
    return fedppl.fit(model, clients, algorithm, rounds=rounds, progressbar=False, random_seed=1, **settings)


@functools.cache
def common() -> fedppl.Fit:
    return fitted(nn.FedSI(ratio=0.5, learning_rate=0.05, tune_rate=0.05, tune_epochs=30), rounds=4)


@functools.cache
def line() -> tuple[Any, dict[str, Any]]:
    """A linear network with a normal likelihood: y = X w + b + 0.5 ε, w and b ~ N(start, 2²)."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    rng = np.random.default_rng(4)
    X = rng.normal(size=(50, 2))
    return net, {"X": X, "y": (X @ [1.0, -2.0] + 0.3 + 0.5 * rng.normal(size=50))[:, None]}


def test_one_client_with_all_weights_of_a_linear_network_sends_the_exact_posterior() -> None:
    """The mode is (DᵀD / σ² + I / 4)⁻¹ (Dᵀy / σ² + start / 4), up to Adam's last step; the variances need no mode."""
    net, data = line()
    builder = functools.partial(fedsi.regressor, net=net, noise_sd=0.5, sigma=2.0)
    model = fedppl.FederatedModel(builder, shared=["0.weight", "0.bias"])
    algorithm = nn.FedSI(ratio=1.0, learning_rate=0.02, epochs=800, batch_size=50, tune=None)
    client = model.enrol({"a": data}, kernel=False)["a"]
    state = algorithm.init(client.layout, ("a",), stream((0,)))
    _, reply, info = algorithm.update_client(client, None, algorithm.broadcast(state, "a"), stream((1,)))
    D = np.column_stack([data["X"], np.ones(50)])
    precision = D.T @ D / 0.25 + np.eye(3) / 4
    mode = np.linalg.solve(precision, D.T @ data["y"][:, 0] / 0.25 + state.mean / 4)
    assert_allclose(reply["mean"], mode, atol=1e-3)
    assert_allclose(reply["spread"], np.diag(np.linalg.inv(precision)), rtol=1e-4)
    assert_allclose(info["variance_ratio"], np.mean(reply["spread"] / 4), rtol=1e-6)


def test_weights_outside_the_subnetwork_are_degenerate() -> None:
    model, clients = problems.classification()
    client = model.enrol(clients, kernel=False)["device 0"]
    algorithm = nn.FedSI(ratio=0.25, epochs=2)
    state = algorithm.init(client.layout, tuple(clients), stream((0,)))
    _, reply, _ = algorithm.update_client(client, None, algorithm.broadcast(state, "device 0"), stream((1,)))
    assert np.sum(reply["spread"] > 0) == 4 and len(reply["spread"]) == 16
    unit = client.view(network_of)
    w = unit.weights(reply["mean"], client.initial)
    chosen = select(np.ones(16), curvature_diagonal(unit, w, unit.shared_at), 4)
    assert_array_equal(np.flatnonzero(reply["spread"]), chosen)
    assert np.all(reply["spread"] < 1.0)  # the data narrow the prior


def test_heads_stay_where_all_clients_start_until_the_rounds_are_over() -> None:
    fit = common()
    start = fit.clients["device 0"].initial
    for client in fit.clients.values():
        assert_array_equal(client.initial, start)
        assert client.client_id not in fit.personal  # nothing is kept
        own = nn.personalise(fit, client.client_id)
        assert_array_equal(own.weights[client.view(network_of).shared_at], fit.state.mean)
        assert np.all(own.weights[client.view(network_of).local_at] != start)


@pytest.mark.parametrize("average", ["variance", "sd"])
def test_the_server_averages_and_gives_alpha_to_what_nobody_inferred(average: str) -> None:
    model, clients = problems.classification()
    algorithm = nn.FedSI(alpha=0.3, average=average)
    layout = model.enrol(clients, kernel=False)["device 0"].layout
    state = algorithm.init(layout, tuple(clients), stream((0,)))
    rng = np.random.default_rng(2)
    means, spreads = rng.normal(size=(2, 16)), rng.uniform(0.1, 1, size=(2, 16))
    spreads[:, :5], spreads[0, 5:8] = 0, 0
    sent = spreads if average == "variance" else np.sqrt(spreads)
    replies = {
        name: {"mean": mean, "spread": spread, "clients": np.array(1.0)}
        for name, mean, spread in zip(clients, means, sent, strict=False)
    }
    after, report = updated(algorithm, state, replies)
    assert_allclose(after.mean, means.mean(axis=0))
    wanted = spreads.mean(axis=0) if average == "variance" else np.sqrt(spreads).mean(axis=0) ** 2
    assert_allclose(after.variance[5:], wanted[5:])
    assert_array_equal(after.variance[:5], 0.3)
    assert report.info.stochastic == 11 / 16
    assert updated(algorithm, state, {})[0] == state


def test_the_factorised_variant_has_variances_of_all_weights() -> None:
    fit = fitted(nn.FedSI(diagonal=True, epochs=2), rounds=1)
    assert fit.records[-1].info["stochastic"] == 1.0
    own = nn.personalise(fit, "device 0")
    assert own.subnetwork.covariance.shape == (16,)


def test_fits_learn_and_tell_what_they_know() -> None:
    fit = common()
    assert fit.status is fedppl.Status.MAX_ROUNDS and "weights moved by" in fit.message
    known = fit.idata["fit"]
    assert known["variance"].dims == ("rows",) and str(known["rows"].values[0]) == "0.weight[0,0]"
    assert set(np.unique(known["stochastic"])) <= {0.0, 1.0}
    assert fit.estimate["0.weight"].shape == (4, 3)
    for name, client in fit.clients.items():
        found = nn.predict(fit, name, {"X": client.arrays["X"]})
        assert found["probability"].dims == ("row", "output")
        assert fedppl.metrics.accuracy(found["probability"].values, client.arrays["y"]) > 0.8


def test_draws_at_a_client_are_of_the_subnetworks_posterior() -> None:
    fit = common()
    posterior = fit.client("device 1", draws=2000, chains=2)["posterior"]
    own = nn.personalise(fit, "device 1")
    unit = fit.clients["device 1"].view(network_of)
    flat = np.concatenate(
        [posterior[name].values.reshape(4000, -1) for name in ("0.weight", "0.bias", "2.weight", "2.bias")], axis=1
    )
    assert_allclose(flat.mean(axis=0)[unit.local_at], own.weights[unit.local_at])
    sd = np.zeros(unit.size)
    sd[own.subnetwork.places] = np.sqrt(np.diag(own.subnetwork.covariance))
    assert_allclose(flat.std(axis=0), sd, rtol=5 / np.sqrt(2 * 4000), atol=1e-12)
    assert np.all(np.abs(flat.mean(axis=0) - own.weights) <= 5 * sd / np.sqrt(4000) + 1e-12)


def test_a_novel_client_is_one_of_the_clients_with_its_data() -> None:
    """Whoever brings device 2's rows gets device 2's predictions, but for the order in which rows are shuffled."""
    fit = common()
    data = fit.clients["device 2"].arrays
    known = nn.predict(fit, "device 2", {"X": data["X"]})["probability"].values
    novel = nn.predict(fit, dict(data), {"X": data["X"]})["probability"].values
    assert_allclose(novel, known, atol=0.05)
    assert fit.new_client(dict(data), draws=5, chains=1)["posterior"]["0.weight"].shape == (1, 5, 4, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0.0}, "ratio=0.0 must be above 0 and at most 1"),
        ({"ratio": 1.5}, "ratio=1.5 must be above 0 and at most 1"),
        ({"alpha": -1.0}, "alpha=-1.0 must be positive"),
        ({"alpha": np.inf}, "alpha=inf must be positive and finite"),
        ({"alpha": "1"}, "alpha='1' must be positive"),
        ({"rule": "best"}, "rule='best' must be"),
        ({"average": "median"}, "average='median' must be"),
        ({"learning_rate": 0}, "learning_rate=0 must be positive and finite"),
        ({"epochs": 0}, "epochs=0 must be a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number"),
        ({"tune_rate": np.nan}, "tune_rate=nan must be positive and finite"),
        ({"tune_epochs": -1}, "tune_epochs=-1 must be a whole number"),
        ({"tune": "head"}, 'tune=\'head\' must be "local", "all", a tuple'),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fedppl.DeclarationError, match=message):
        nn.FedSI(**settings)


def test_names_that_the_network_does_not_have_are_refused_before_any_round() -> None:
    with pytest.raises(fedppl.DeclarationError, match=r"\['3.weight'\] are no parameters of the network; it has"):
        fitted(nn.FedSI(tune=("3.weight",)))


def test_models_without_a_network_are_refused_before_any_round() -> None:
    model, clients = problems.regression(2)
    with pytest.raises(fedppl.DeclarationError, match="no network stands above .* a network's client declares weights"):
        fedppl.fit(model, clients, nn.FedSI(), progressbar=False)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"spread": -np.ones(16)}, "'spread' is -1"),
        ({"spread": np.full(16, 1e-300)}, "'spread' is 1e-300"),
        ({"spread": np.full(16, 1e30)}, r"'spread' is 1e\+30"),
        ({"clients": np.array(0.0)}, "'clients' is 0"),
        ({"clients": np.array(1e30)}, r"'clients' is 1e\+30"),
        ({"mean": np.full(16, -1e30)}, r"'mean' has weights up to 1e\+30"),
    ],
)
def test_replies_that_no_client_computes_are_refused(reply: dict[str, Any], message: str) -> None:
    good = {"mean": np.zeros(16), "spread": np.ones(16), "clients": np.array(1.0)}
    algorithm, (model, clients) = nn.FedSI(), problems.classification()
    state = algorithm.init(model.enrol(clients, kernel=False)["device 0"].layout, tuple(clients), stream((0,)))
    assert algorithm.replies.reject(state, good) is None
    assert re.search(message, str(algorithm.replies.reject(state, {**good, **reply})))


def test_a_learning_rate_that_diverges_skips_the_client_and_says_so() -> None:
    fit = fitted(nn.FedSI(learning_rate=1e30, epochs=3), rounds=1)
    assert fit.status is fedppl.Status.STALLED
    assert "lower learning_rate=" in fit.message


def test_too_many_draws_of_a_large_network_are_refused_before_they_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fedppl.nn.algorithms import _common

    monkeypatch.setattr(_common, "_MOST", 1000)
    with pytest.raises(fedppl.DeclarationError, match="4000 draws of 31 weights are 0.0 GB. Pass draws="):
        common().client("device 0")


def test_algorithms_with_matrices_refuse_shared_blocks_beyond_two_thousand() -> None:
    net = problems.network(500, 3)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["0.weight", "0.bias", "2.weight"])
    _, clients = problems.classification()
    client = model.enrol(clients, kernel=False)["device 0"]
    assert client.layout.size == 3500 and client.layout.prior.precision.shape == (3500,)
    assert_allclose(client.layout.prior.precision, 1.0, rtol=1e-6)
    for algorithm in (fedppl.EP(), fedppl.averaging.FedAvg(learning_rate=0.1)):
        with pytest.raises(fedppl.DeclarationError, match="the model shares 3500 coordinates, and .* keeps matrices"):
            fedppl.fit(model, clients, algorithm, progressbar=False)
    fit = fedppl.fit(model, clients, nn.FedSI(epochs=1), rounds=1, progressbar=False, random_seed=0)
    assert fit.idata["fit"]["variance"].shape == (3500,)


def test_predictions_by_pymc_say_that_the_posterior_is_of_the_linearised_network(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit = common()
    name, new = fit.client_ids[0], {"X": next(iter(problems.classification()[1].values()))["X"][:3]}
    told = []
    for asked in ({}, {"groups": "prior"}, {"groups": "log_likelihood"}, {"predict": new}):
        caplog.clear()
        fit.client(name, draws=20, chains=1, **asked)
        told.append(sum("linearised" in record.getMessage() for record in caplog.records))
    caplog.clear()
    nn.predict(fit, name, new)
    assert told == [0, 0, 1, 1] and not caplog.records


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_loss_on_rows_held_out_is_that_of_the_linearised_network(diagonal: bool) -> None:
    """y ~ N(f + J (w − ŵ), 0.5²) is normal, N(f, J Σ Jᵀ + 0.25 I); the tolerance is 4 standard errors."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    rng, names, draws = np.random.default_rng(4), [name for name, _ in net.named_parameters()], 2000
    clients = {}
    for name in "ab":
        X = rng.normal(size=(25, 2))
        clients[name] = {"X": X, "y": np.tanh(X[:, :1]) - X[:, 1:] + 0.5 * rng.normal(size=(25, 1))}
    model = fedppl.FederatedModel(functools.partial(fedsi.regressor, net=net, noise_sd=0.5), names)
    training, validation = fedppl.search.holdout(clients, 0.2, random_seed=1)
    algorithm = nn.FedSI(ratio=1.0, learning_rate=0.05, tune=None, diagonal=diagonal)
    fit = problems.fit_some_rounds(model, training, algorithm, rounds=3, progressbar=False, random_seed=1)
    wanted, error = 0.0, 0.0
    for name, data in validation.items():
        q, X = nn.personalise(fit, name).subnetwork, torch.from_numpy(data["X"])
        assert q is not None

        def outputs(w: Any, X: Any = X) -> Any:
            parts = torch.split(w, [value.numel() for value in net.parameters()])
            shaped = {n: part.view(v.shape) for part, (n, v) in zip(parts, net.named_parameters(), strict=True)}
            return torch.func.functional_call(net, shaped, X).ravel()

        w = torch.from_numpy(q.weights)
        J, f = torch.func.jacrev(outputs)(w).detach().numpy()[:, q.places], outputs(w).detach().numpy()
        covariance = J @ (np.diag(q.covariance) if diagonal else q.covariance) @ J.T
        exact = stats.multivariate_normal(f, covariance + 0.25 * np.eye(len(f)))
        wanted -= exact.logpdf(data["y"].ravel())
        root = np.linalg.cholesky(covariance + 1e-12 * np.eye(len(f)))
        at = f + rng.normal(size=(draws, len(f))) @ root.T
        density = np.exp(stats.norm(at, 0.5).logpdf(data["y"].ravel()).sum(1))
        error += (density.std() / density.mean()) ** 2 / draws
    found = fedppl.search.validation_loss(fit, validation, draws=draws)
    assert abs(found.total - wanted) < 4 * np.sqrt(error)
    assert 4 * np.sqrt(error) < 0.2


class Largest(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Numbers in the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numbers = max(self.numbers, found.untyped_storage().nbytes() // 8)
        return found


@pytest.mark.parametrize("convolution", [False, True])
def test_rows_held_out_take_no_matrix_of_all_their_slopes(convolution: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 rows, 5 outputs and 7,825 weights; a way that has the matrix finds the same."""
    rng, first = np.random.default_rng(5), [torch.nn.Conv1d(1, 1, 1)] if convolution else []
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [torch.nn.Linear(40, 170), torch.nn.Tanh(), torch.nn.Linear(170, 5)]
        net = torch.nn.Sequential(*first, *([torch.nn.Flatten()] if convolution else []), *layers)
    shape = (1, 40) if convolution else (40,)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), [n for n, _ in net.named_parameters()])
    few, many = ({"X": rng.normal(size=(n, *shape)), "y": np.arange(n) % 5} for n in (20, 300))
    algorithm = nn.FedSI(diagonal=True, epochs=1, tune=None)
    fit = problems.fit_some_rounds(model, {"a": few}, algorithm, rounds=1, progressbar=False, random_seed=1)
    with Largest() as largest:
        found = fedppl.search.validation_loss(fit, {"a": many}, draws=3).total
    assert largest.numbers < 300 * 5 * 1000
    monkeypatch.setattr(subnet, "_NUMBERS", 2**28)
    assert_allclose(fedppl.search.validation_loss(fit, {"a": many}, draws=3).total, found, rtol=1e-10)


@pytest.mark.parametrize("average", ["sd", "variance"])
def test_weights_that_few_clients_infer_do_not_stop_the_fit(average: str) -> None:
    """Each round divides their spreads by the number of clients; single precision has no inverse below 1e-38."""
    model, clients = problems.classification()
    enrolled = model.enrol(clients, kernel=False)
    client_id, client = next(iter(enrolled.items()))
    algorithm = nn.FedSI(ratio=1.0, epochs=1, tune=None, average=average)
    state = algorithm.init(client.layout, tuple(clients), stream((0,)))
    narrow = {"mean": state.mean, "spread": np.full(16, 1e-40), "clients": np.array(1.0)}
    state, _ = updated(algorithm, state, {client_id: narrow})
    reply = algorithm.update_client(client, None, algorithm.broadcast(state, client_id), stream((1,))).reply
    assert algorithm.replies.reject(state, reply) is None
    assert np.max(reply["spread"]) < 1e-9
