"""Averages of networks: each method of the table by a property that pins it down."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose, assert_array_equal

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import nn  # noqa: E402
from fedppl.models import fedsi  # noqa: E402
from fedppl.nn.personal import loss_at  # noqa: E402
from fedppl.nn.predict import probabilities  # noqa: E402
from fedppl.nn.train import Training, train  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402
from fedppl.numerics.streams import stream  # noqa: E402
from fedppl.types import LocalFailure  # noqa: E402
from tests.support import problems  # noqa: E402
from tests.support.markers import slow_but  # noqa: E402
from tests.support.states import updated  # noqa: E402

ALL = ("0.weight", "0.bias", "2.weight", "2.bias")
BODY, HEAD = ALL[:2], ALL[2:]
BABU = (("shared", 3),)
REP = (("local", 3), ("shared", 2))


def fitted(shared: tuple[str, ...], algorithm: fedppl.Algorithm, rounds: int = 2, **settings: Any) -> fedppl.Fit:
    model, clients = problems.classification(shared=shared)
    return fedppl.fit(model, clients, algorithm, rounds=rounds, progressbar=False, random_seed=1, **settings)


def one_round(shared: tuple[str, ...], algorithm: fedppl.Algorithm, personal: Any = None) -> tuple[Any, Any, Any]:
    model, clients = problems.classification(shared=shared)
    client = model.enrol(clients, kernel=False)["device 0"]
    state = algorithm.init(client.layout, tuple(clients), stream((0,)))
    kept, reply, _ = algorithm.update_client(client, personal, algorithm.broadcast(state, "device 0"), stream((1,)))
    return state, kept, reply


def test_clients_take_the_steps_that_torch_takes() -> None:
    """Adam in float32 on a module of its own, with full batches, from the same start: the same weights."""
    _, clients = problems.classification(shared=ALL)
    data, net = clients["device 0"], problems.network()
    own = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    own.load_state_dict(net.state_dict())
    X, y = torch.from_numpy(data["X"]).float(), torch.from_numpy(data["y"]).long()
    adam = torch.optim.Adam(own.parameters(), lr=0.01)
    for _ in range(5):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(own(X), y).backward()
        adam.step()
    wanted = np.concatenate([value.detach().numpy().ravel() for value in own.parameters()])
    algorithm = nn.FedAvg(learning_rate=0.01, phases=(("all", 5),), batch_size=20)
    _, _, reply = one_round(ALL, algorithm)
    assert_allclose(reply["weighted"] / 20, wanted, rtol=1e-4, atol=1e-5)


def test_fedavg_weighs_by_rows_or_not() -> None:
    algorithm = nn.FedAvg()
    model, clients = problems.classification(shared=ALL)
    state = algorithm.init(model.enrol(clients, kernel=False)["device 0"].layout, tuple(clients), stream((0,)))
    replies = {
        "device 0": {"weighted": 3.0 * np.ones(31), "weight": np.array(3.0)},
        "device 1": {"weighted": np.full(31, 5.0), "weight": np.array(1.0)},
    }
    after, report = updated(algorithm, state, replies)
    assert_allclose(after.phi, 2.0)
    assert report.info.change > 0
    assert updated(algorithm, state, {})[0] == state
    _, _, reply = one_round(ALL, nn.FedAvg(weights="equal"))
    assert float(reply["weight"]) == 1.0


def test_averages_over_rounds_are_the_estimate_and_nothing_else() -> None:
    """With weights of rounds that sum to one, the start's none."""
    model, clients = problems.classification(shared=ALL)
    fits = [
        problems.fit_some_rounds(
            model,
            clients,
            nn.FedAvg(smoothing=smoothing, phases=(("all", 1),)),
            rounds=4,
            progressbar=False,
            random_seed=2,
        )
        for smoothing in (0.0, 0.5)
    ]
    plain, smooth = fits
    assert_array_equal(plain.state.phi, smooth.state.phi)
    seen = [
        step.state.phi
        for step in fedppl.rounds(model, clients, nn.FedAvg(phases=(("all", 1),)), rounds=4, random_seed=2)
    ]
    wanted = np.average(seen, axis=0, weights=0.5 ** np.arange(4)[::-1])
    estimate = np.concatenate([np.ravel(smooth.estimate[name]) for name in ALL])
    assert_allclose(estimate, wanted, rtol=1e-12)
    held = torch.cat([value.ravel() for value in nn.network(smooth).parameters()]).detach().numpy()
    assert_allclose(held, wanted, rtol=1e-6, atol=1e-7)


def test_fedbabu_leaves_the_head_until_the_end() -> None:
    fit = fitted(BODY, nn.FedAvg(phases=BABU, tune="local"))
    for name, client in fit.clients.items():
        assert_array_equal(fit.personal[name].local, client.initial)
        own = nn.personalise(fit, name)
        assert_array_equal(own.weights[client.view(network_of).shared_at], fit.state.phi)
        assert np.all(own.weights[client.view(network_of).local_at] != client.initial)


def test_fedper_trains_both_and_keeps_the_head() -> None:
    fit = fitted(BODY, nn.FedAvg(phases=(("all", 3),)))
    heads = [fit.personal[name].local for name in fit.clients]
    assert not np.allclose(heads[0], heads[1])
    for name, client in fit.clients.items():
        own = nn.personalise(fit, name)
        assert_array_equal(own.weights[client.view(network_of).local_at], fit.personal[name].local)


def test_fedrep_trains_the_head_first_and_the_rest_given_that() -> None:
    """With the head's phase alone, what is shared does not move; then it moves from where that phase left the head."""
    state, kept, reply = one_round(BODY, nn.FedAvg(phases=REP[:1]))
    assert_allclose(reply["weighted"] / reply["weight"], state.phi, rtol=1e-12)
    _, both, moved = one_round(BODY, nn.FedAvg(phases=REP))
    assert_array_equal(both.local, kept.local)
    assert np.all(moved["weighted"] / moved["weight"] != state.phi)


def test_lg_fedavg_shares_the_head() -> None:
    fit = fitted(HEAD, nn.FedAvg())
    assert [variable.name for variable in fit.layout.variables] == list(HEAD)
    bodies = [fit.personal[name].local for name in fit.clients]
    assert not np.allclose(bodies[0], bodies[1])


def test_fedavg_ft_tunes_the_head_by_name() -> None:
    fit = fitted(ALL, nn.FedAvg(tune=HEAD))
    own = nn.personalise(fit, "device 0")
    assert_array_equal(own.weights[:16], fit.state.phi[:16])
    assert np.all(own.weights[16:] != fit.state.phi[16:])


def test_personal_weights_are_a_cache() -> None:
    """A client that lost its head starts it anew and says so."""
    model, clients = problems.classification()
    client = model.enrol(clients, kernel=False)["device 0"]
    algorithm = nn.FedAvg()
    state = algorithm.init(client.layout, tuple(clients), stream((0,)))
    kept, _, blank = algorithm.update_client(client, None, algorithm.broadcast(state, "device 0"), stream((1,)))
    _, _, info = algorithm.update_client(client, kept, algorithm.broadcast(state, "device 0"), stream((1,)))
    assert blank == {"blank": 1.0} and info == {}


def test_random_subsets_of_clients_take_part() -> None:
    fit = fitted(BODY, nn.FedAvg(), rounds=4, participation=2)
    assert {len(record.asked) for record in fit.records} == {2}
    assert fit.status is fedppl.Status.MAX_ROUNDS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phases": ()}, r"phases=\(\) must be pairs"),
        ({"phases": ((0, 1),)}, r"phases=.* must be pairs of weights"),
        ({"phases": ((None, 1),)}, r"phases=.* must be pairs of weights"),
        ({"phases": (((), 1),)}, r"phases=.* must be pairs of weights"),
        ({"phases": ((("0.bias", "0.bias"), 1),)}, r"phases=.* torch's names, each once"),
        ({"phases": "all"}, "phases='all' must be pairs"),
        ({"phases": (("all", 0),)}, "epochs=0 must be a whole number"),
        ({"learning_rate": -1}, "learning_rate=-1 must be positive"),
        ({"weights": "size"}, "weights='size' must be"),
        ({"tune": ()}, "tune=.. must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fedppl.DeclarationError, match=message):
        nn.FedAvg(**settings)


@pytest.mark.parametrize(
    ("shared", "settings", "message"),
    [
        (ALL, {"phases": (("head", 1),)}, '\'head\' must be "shared", "local", "all" or a tuple'),
        (ALL, {"tune": "local"}, "'local' names no weights: .* or pass tune=None"),
        (BODY, {"phases": ((("4.weight",), 1),)}, r"\['4.weight'\] are no parameters of the network"),
    ],
)
def test_weights_that_are_not_there_are_refused_before_any_round(
    shared: tuple[str, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(fedppl.DeclarationError, match=message):
        fitted(shared, nn.FedAvg(**settings))


# --- predictions -----------------------------------------------------------------------------------------------------


def test_monte_carlo_probabilities_are_those_of_quadrature(rng: np.random.Generator) -> None:
    """Two classes: the mean of a logistic over f_1 − f_0 ~ N(m, v), by Gauss-Hermite; 5 sds of 4,000 draws."""
    logits, root = rng.normal(size=(3, 2)), rng.normal(size=(3, 2, 2))
    covariance = root @ root.transpose(0, 2, 1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    m = logits[:, 1] - logits[:, 0]
    v = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    values = 1 / (1 + np.exp(-(m[:, None] + np.sqrt(v)[:, None] * nodes)))
    wanted = (values * weights).sum(axis=1) / weights.sum()
    sd = np.sqrt((values**2 * weights).sum(axis=1) / weights.sum() - wanted**2)
    found = probabilities(logits, covariance, link="monte carlo", draws=4000, rng=rng)
    assert np.all(np.abs(found[:, 1] - wanted) < 5 * sd / np.sqrt(4000))
    assert_allclose(found.sum(axis=1), 1.0)


def test_links_by_hand() -> None:
    from scipy.stats import norm

    logits, covariance = np.array([[1.0, -1.0]]), np.diag([8 / np.pi * 3, 0.0])[None]
    by_class = np.exp([0.5, -1.0])  # κ = 1 / √(1 + 3), 1
    assert_allclose(probabilities(logits, covariance, link="by class")[0], by_class / by_class.sum())
    # MacKay (1992): the logit f_1 − f_2 = 2 with variance 8/π · 3 has κ = 1/2.
    scaled = probabilities(logits, covariance, link="scaled")[0]
    assert_allclose(scaled[0], 1 / (1 + np.exp(-0.5 * 2)))
    together = probabilities(logits, covariance + 5.0, link="scaled")[0]  # all outputs moving together is no doubt
    assert_allclose(together, scaled, rtol=1e-12)
    probit = norm.cdf([0.5, -1.0])
    assert_allclose(probabilities(logits, covariance, link="probit")[0], probit / probit.sum())
    point = np.exp([1.0, -1.0])
    assert_allclose(probabilities(logits, 0 * covariance, link="map")[0], point / point.sum())


def test_a_normal_likelihood_gives_intervals(rng: np.random.Generator) -> None:
    net = problems.network()
    model = fedppl.FederatedModel(functools.partial(fedsi.regressor, net=net, noise_sd=0.5), list(BODY))
    X = rng.normal(size=(30, 3))
    data = {"a": {"X": X, "y": np.tanh(X) + 0.5 * rng.normal(size=(30, 3))}}
    fit = fedppl.fit(model, data, nn.FedSI(ratio=1.0), rounds=3, progressbar=False, random_seed=0)
    found = nn.predict(fit, "a", {"X": X}, ci_prob=0.9)
    assert np.all(found["sd"] > 0.5)  # of a new outcome: noise, and what is not known of the weights
    assert_allclose(found["ci_high"] - found["mean"], 1.6448536 * found["sd"], rtol=1e-6)
    point = nn.predict(fit, "a", {"X": X}, link="map")
    assert_allclose(point["sd"], 0.5)


@pytest.mark.parametrize(
    ("client", "inputs", "settings", "message"),
    [
        ("device 9", {}, {}, "client 'device 9' is not here"),
        ("device 0", {"x": np.ones((2, 3))}, {}, r"new inputs \['x'\] must be \['X'\]"),
        ("device 0", {"X": np.ones((2, 4))}, {}, "'X' has shape .2, 4., the client's"),
        ("device 0", {"X": np.full((2, 3), np.nan)}, {}, "holds nan at index .0, 0.; drop or impute"),
        ("device 0", {"X": np.ones((0, 3))}, {}, "give a row or more"),
        ("device 0", {"X": [["a", "b", "c"]]}, {}, "dtype <U1 .a list., which is not numeric"),
        ("device 0", {"X": np.ones((2, 3)) * 1j}, {}, "dtype complex128 .a ndarray., which is not numeric and real"),
        ("device 0", {"X": np.ma.array(np.ones((2, 3)), mask=[[True, False, False]] * 2)}, {}, "'X' has masked values"),
        ("device 0", np.ones((2, 3)), {}, "new inputs are ndarray; pass a mapping"),
        ("device 0", {"X": np.ones((2, 3))}, {"random_seed": "a"}, "random_seed='a' must be a whole number"),
        ("device 0", {"X": np.ones((2, 3))}, {"random_seed": -1}, "random_seed=-1 must be"),
        ("device 0", {"X": np.ones((2, 3))}, {"random_seed": 1.5}, "random_seed=1.5 must be"),
        ("device 0", {"X": np.ones((2, 3))}, {"ci_prob": "a"}, "ci_prob='a' must lie"),
        ("device 0", {"X": np.ones((2, 3))}, {"link": "logit"}, "link='logit' must be"),
        ("device 0", {"X": np.ones((2, 3))}, {"draws": 0}, "draws=0 must be"),
        ("device 0", {"X": np.ones((2, 3))}, {"ci_prob": 1}, "ci_prob=1 must lie"),
    ],
)
def test_predictions_that_cannot_be_made_are_refused(
    client: str, inputs: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((fedppl.DeclarationError, fedppl.DataError), match=message):
        nn.predict(fitted_once(), client, inputs, **settings)


def test_new_inputs_come_in_a_frame_as_well() -> None:
    net = torch.nn.Linear(2, 1)

    def builder(dose: Any, age: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            columns = [pm.Data("dose", dose), pm.Data("age", age)]
            f = nn.module(net, nn.parameters(net), pt.stack(columns, axis=1))
            pm.Normal("out", f[:, 0], 1, observed=pm.Data("y", y))
        return model

    model = fedppl.FederatedModel(builder, ["weight", "bias"])
    rows = np.random.default_rng(3).normal(size=(2, 12, 3))
    clients = {name: pd.DataFrame(own, columns=["dose", "age", "y"]) for name, own in zip("ab", rows, strict=True)}
    fit = fedppl.fit(model, clients, nn.FedAvg(), rounds=1, progressbar=False, random_seed=1)
    new = clients["b"][["age", "dose"]]
    by_name = {name: new[name].to_numpy() for name in new}
    assert_allclose(nn.predict(fit, "a", new)["mean"], nn.predict(fit, "a", by_name)["mean"])
    with pytest.raises(fedppl.DataError, match="dose"):
        nn.predict(fit, "a", new[["age"]])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.arange(7) % 3, r"different numbers of rows, {'X': 8, 'y': 7}"),
        (np.arange(8) % 4, r"'y' is 3 in row 3, and outcomes are classes numbered from 0"),
    ],
)
def test_labels_that_do_not_fit_are_named(y: np.ndarray, message: str) -> None:
    model, clients = problems.classification(2)
    bad = {"X": np.ones((8, 3)), "y": y}
    with pytest.raises(fedppl.DataError, match=message):
        fedppl.fit(model, {**clients, "new": bad}, nn.FedAvg(), progressbar=False)


class Pictures(torch.nn.Module):
    """A convolution, on pictures with their channels first or last, and rows that are flattened or viewed."""

    def __init__(self, last: bool, view: bool) -> None:
        super().__init__()
        self.filters, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4 * 9, 3)
        self.last, self.view = last, view

    def forward(self, X: Any) -> Any:
        maps = torch.relu(self.filters(X.permute(0, 3, 1, 2) if self.last else X))
        return self.head(maps.view(len(X), -1) if self.view else maps.flatten(1))


@pytest.mark.parametrize("momentum", [0.9, None])
@pytest.mark.parametrize(("last", "view"), [(True, False), (False, False), (False, True)])
def test_layouts_in_memory_do_not_change_the_numbers(last: bool, view: bool, momentum: float | None) -> None:
    """Against torch's own loop without fused steps: gradients of a convolution may lie in memory otherwise."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 3, 5, 5)).astype(np.float32), np.arange(12) % 3
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = Pictures(last, view)
    names = [name for name, _ in net.named_parameters()]
    rows = {"X": np.moveaxis(X, 1, 3) if last else X, "y": y}
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), names)
    unit = model.enrol({"a": rows}, kernel=False)["a"].view(network_of)
    found = train(unit, unit.initial, np.arange(unit.size), Training(0.05, 6, 12, momentum), rng)
    steps = {"lr": 0.05, "fused": False, "foreach": False}
    parameters = list(net.parameters())
    plain = (
        torch.optim.Adam(parameters, **steps)
        if momentum is None
        else torch.optim.SGD(parameters, momentum=0.9, **steps)
    )
    for _ in range(6):
        plain.zero_grad()
        torch.nn.functional.cross_entropy(net(torch.from_numpy(rows["X"])), torch.from_numpy(y)).backward()
        plain.step()
    wanted = torch.nn.utils.parameters_to_vector(parameters).detach().numpy()
    assert_allclose(found, wanted, atol=2e-5)


class Behind(torch.nn.Module):
    """Layers that cannot be told apart from outside."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, X: Any) -> Any:
        return self.layers(X)


@pytest.mark.parametrize(("maps", "counted"), [(2, 4), (8, 12)], ids=["computed once", "too large to keep"])
def test_layers_below_those_that_move_are_computed_once(maps: int, counted: int) -> None:
    """The same numbers as where every step goes through them, with far fewer passes."""
    rng = np.random.default_rng(0)
    data = {"X": rng.normal(size=(12, 3, 5, 5)).astype(np.float32), "y": np.arange(12) % 3}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = (torch.nn.Conv2d(3, maps, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(maps * 16, 3))
    found, passes = [], []
    layers[0].register_forward_hook(lambda *_: passes.append(1) if counting else None)
    for net in (torch.nn.Sequential(*layers), Behind(torch.nn.Sequential(*layers))):
        names, counting = [name for name, _ in net.named_parameters()], False
        model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), names)
        unit = model.enrol({"a": data}, kernel=False)["a"].view(network_of)
        head, counting = unit.places((names[-2], names[-1])), True
        passes.clear()
        found.append(train(unit, unit.initial, head, Training(0.05, 4, 6, 0.9), np.random.default_rng(3)))
        assert len(passes) == (11 if isinstance(net, Behind) else counted)
    assert_allclose(found[0], found[1], atol=1e-6)
    assert np.all(found[0][head] != unit.initial[head])


class Last(torch.nn.Module):
    """Classes by what a recurrent layer says in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 3)

    def forward(self, given: Any) -> Any:
        return self.out((given[0] if isinstance(given, tuple) else given.transpose(0, 1))[:, -1])


class Turned(torch.nn.Module):
    """Times in the place of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(6, 4)

    def forward(self, X: Any) -> Any:
        return self.wide(X).transpose(0, 1)


@pytest.mark.parametrize("rows", slow_but([1, 2, 9], 2))
@pytest.mark.parametrize("below", [lambda: torch.nn.LSTM(6, 4, batch_first=True), Turned], ids=["tuple", "turned"])
def test_layers_that_do_not_say_a_row_for_a_row_are_computed_in_every_step(below: Any, rows: int) -> None:
    rng, found = np.random.default_rng(0), []
    data = {"X": rng.normal(size=(rows, 2, 6)).astype(np.float32), "y": np.arange(rows) % 3}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = (below(), Last())
    for net in (torch.nn.Sequential(*layers), Behind(torch.nn.Sequential(*layers))):
        names = [name for name, _ in net.named_parameters()]
        model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), names)
        unit = model.enrol({"a": data}, kernel=False)["a"].view(network_of)
        head = unit.places((names[-2], names[-1]))
        found.append(train(unit, unit.initial, head, Training(0.05, 4, 6), np.random.default_rng(3)))
    assert_allclose(found[0], found[1], atol=1e-6)


def test_layers_in_place_above_what_is_computed_once_change_nothing_of_it() -> None:
    rng, found = np.random.default_rng(0), []
    data = {"X": rng.normal(size=(9, 4)), "y": np.arange(9) % 3}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        below, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
    for in_place in (True, False):
        head = torch.nn.Sequential(torch.nn.LeakyReLU(0.3, inplace=in_place), last)
        net = torch.nn.Sequential(below, head)
        names = [name for name, _ in net.named_parameters()]
        model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), names)
        unit = model.enrol({"a": data}, kernel=False)["a"].view(network_of)
        free, steps = unit.places(("1.1.weight", "1.1.bias")), Training(0.05, 4, 6)
        found.append(train(unit, unit.initial, free, steps, np.random.default_rng(3)))
    assert_allclose(found[0], found[1], atol=1e-6)


def test_a_client_that_does_not_report_trains_nothing_that_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedRep's head is that of a client that reports, to the last digit, and the layers below are left out."""
    model, clients = problems.classification(shared=BODY)
    client = model.enrol(clients, kernel=False)["device 0"]
    trained: list[int] = []

    def counted(unit: Any, w: Any, free: Any, *others: Any, **settings: Any) -> Any:
        trained.append(len(free))
        return train(unit, w, free, *others, **settings)

    monkeypatch.setattr("fedppl.nn.batch.train", counted)
    for phases, kept_of in ((REP, 1), ((("shared", 1), *REP), 2), ((("all", 2),), 1), ((("shared", 2),), 0)):
        algorithm = nn.FedAvg(phases=phases)
        state = algorithm.init(client.layout, tuple(clients), stream((0,)))
        message = algorithm.broadcast(state, "device 0")
        told, _, _ = algorithm.update_client(client, None, message, stream((1,)))
        trained.clear()
        silent, _ = algorithm.unreported(client, None, message, stream((1,)))
        assert len(trained) == kept_of
        assert_array_equal(silent.local, told.local)


def test_a_prior_may_be_worth_a_higher_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towards a prior that the rows speak against; without it the same end is a failure."""
    model, clients = problems.classification(shared=ALL)
    unit = model.enrol(clients, kernel=False)["device 0"].view(network_of)
    everything = np.arange(unit.size)
    good = train(unit, unit.initial, everything, Training(0.05, 60, 50), np.random.default_rng(0))
    head = np.concatenate([unit.places((name,)) for name in HEAD])
    far, steps = good.copy(), Training(0.05, 200, 50)
    far[head] *= -2.0
    prior = far[head], np.full(len(head), 1e6)
    found = train(unit, good, head, steps, np.random.default_rng(1), prior=prior)
    assert loss_at(unit, found) > loss_at(unit, good) + 2.0
    assert np.abs(found - far).max() < 0.1
    monkeypatch.setattr("fedppl.nn.train.RISE", -10.0)  # any end is too high, but for one that a prior asks for
    weak = prior[0], np.full(len(head), 1e-6)
    for asked in (None, weak):
        with pytest.raises(LocalFailure, match="raised the loss"):
            train(unit, good, head, steps, np.random.default_rng(1), prior=asked)
    train(unit, good, head, steps, np.random.default_rng(1), prior=prior)


@pytest.mark.parametrize("algorithm", [nn.FedSI, functools.partial(nn.FedAvg, phases=(("shared", 2),), tune="local")])
def test_fine_tuning_that_has_not_arrived_is_told(algorithm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A few short steps from a random head, and enough of them."""
    for settings, told in (
        ({"tune_rate": 1e-2, "tune_epochs": 20}, True),
        ({"tune_rate": 0.1, "tune_epochs": 200}, False),
    ):
        fit = fitted(BODY, algorithm(**settings))
        caplog.clear()
        with caplog.at_level("WARNING", logger="fedppl"):
            nn.predict(fit, "device 0", {"X": np.ones((2, 3))})
        assert ("'device 0': fine-tuning has not converged" in caplog.text) == told
        assert ("tune_epochs=" in caplog.text) == told


@functools.cache
def fitted_once() -> fedppl.Fit:
    return fitted(BODY, nn.FedAvg())


@problems.few_rounds
def test_a_fit_of_another_kind_has_no_network() -> None:
    model, clients = problems.regression(2)
    fit = fedppl.fit(model, clients, fedppl.EP(), rounds=1, progressbar=False, random_seed=0)
    with pytest.raises(fedppl.DeclarationError, match="the fit is of EP, which fits no networks"):
        nn.predict(fit, fit.client_ids[0], {"X": np.ones((1, 2))})


@pytest.mark.parametrize("rows", [4096, 1])
def test_outputs_that_are_not_finite_are_no_prediction(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that only a network without a saturating layer sees as they are; in one block and in blocks of a row."""
    monkeypatch.setattr(importlib.import_module("fedppl.nn.predict"), "_ROWS", rows)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3))
    torch.nn.init.constant_(net[0].weight, 10.0)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["0.weight"])
    _, clients = problems.classification()
    fit = fedppl.fit(model, clients, nn.FedAvg(), rounds=1, progressbar=False, random_seed=0)
    with pytest.raises(fedppl.DataError, match="the network's output is not finite at row 1 of the new inputs"):
        nn.predict(fit, "device 0", {"X": np.array([[1.0, 2, 3], [1.7e308, 0, 0]])})


def test_whole_numbers_are_new_inputs_too() -> None:
    """Of an embedding: the container holds 32 bits whatever the client's array has, and no fractions."""
    net = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Flatten(), torch.nn.Linear(3, 2))
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["0.weight"])
    clients = {name: {"X": np.array([[0], [3], [1]]), "y": np.array([0, 1, 1])} for name in ("a", "b")}
    fit = fedppl.fit(model, clients, nn.FedAvg(), rounds=1, progressbar=False, random_seed=0)
    chances = nn.predict(fit, "a", {"X": np.array([[3], [3], [0]])})["probability"].values
    assert_allclose(chances[0], chances[1])
    with pytest.raises(fedppl.DataError, match=r"'X' holds 0.5 at index \(1, 0\)"):
        nn.predict(fit, "a", {"X": np.array([[1.0], [0.5]])})


def test_a_new_client_without_a_head_of_its_own_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """FedPer and LG-FedAvg train local weights in the rounds alone."""
    _, clients = problems.classification()
    with caplog.at_level("WARNING", logger="fedppl"):
        nn.predict(fitted_once(), dict(clients["device 0"]), {"X": np.ones((2, 3))})
    assert "client new client has no local weights of its own" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", logger="fedppl"):
        nn.predict(fitted_once(), "device 0", {"X": np.ones((2, 3))})
    assert not caplog.text


def test_training_that_raises_the_loss_is_a_failure_that_names_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than a nat a row; here any change counts."""
    monkeypatch.setattr("fedppl.nn.train.RISE", -10.0)
    fit = fitted(BODY, nn.FedAvg(), rounds=1)
    assert fit.status is fedppl.Status.STALLED
    assert "training raised the loss" in fit.message and "lower learning_rate=" in fit.message


@pytest.mark.parametrize(
    ("algorithm", "setting"), [(nn.FedAvg(tune="all"), "tune_rate"), (nn.PerFedAvg(), "inner_rate")]
)
def test_fine_tuning_that_raises_the_loss_names_the_client_and_its_own_setting(
    monkeypatch: pytest.MonkeyPatch, algorithm: Any, setting: str
) -> None:
    fit = fitted(ALL, algorithm, rounds=1)
    monkeypatch.setattr("fedppl.nn.train.RISE", -10.0)
    with pytest.raises(LocalFailure, match=f"'device 0'.* lower {setting}="):
        nn.predict(fit, "device 0", {"X": np.ones((2, 3))})


@pytest.mark.parametrize(
    ("body", "large"), [(torch.nn.Tanh(), np.inf), (torch.nn.ReLU(), np.inf), (torch.nn.Tanh(), 1e39)]
)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_inputs_that_are_infinite_in_training_are_named(body: Any, large: float, sign: float) -> None:
    """Behind a layer that saturates the density is finite, as behind ReLUs that are off; behind others it is not."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), body, torch.nn.Linear(4, 3))
    with torch.no_grad():
        net[0].weight[:, 1] = 0.01 * sign
    _, clients = problems.classification()
    wrong = {**clients["device 0"], "X": clients["device 0"]["X"].copy()}
    wrong["X"][3, 1] = large
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), shared=list(ALL))
    with pytest.raises(fedppl.DataError, match=r"'device 0'.*hold.* (inf|1e\+39) .*\(3, 1\)"):
        fedppl.fit(model, {**clients, "device 0": wrong}, nn.FedAvg(), rounds=1, progressbar=False)


@pytest.mark.parametrize(
    ("algorithm", "said", "without"),
    [
        (nn.FedSI(ratio=0.1, tune=None), "infers 3 of 31 shared weights", nn.FedSI(ratio=1.0, tune=None)),
        (nn.BPFed(), "about spread=0.05, where they began", nn.BPFed(learning_rate=0.05, zeta=1e-3, epochs=30)),
        (nn.PFedBayes(), "about spread=0.01, where they began", nn.PFedBayes(learning_rate=0.05)),
    ],
)
def test_posteriors_that_know_little_say_so(algorithm: fedppl.Algorithm, said: str, without: fedppl.Algorithm) -> None:
    assert said in fitted(ALL, algorithm, rounds=1).message
    assert said not in fitted(ALL, without, rounds=5).message


def test_nobody_is_no_client() -> None:
    with pytest.raises(fedppl.DeclarationError, match=r"nn.network\(fit\)"):
        nn.predict(fitted_once(), None, {"X": np.ones((1, 3))})  # type: ignore[arg-type]


def test_classes_with_something_after_the_point_are_refused() -> None:
    model, clients = problems.classification()
    wrong = {name: {**data, "y": data["y"] + 0.5} for name, data in clients.items()}
    with pytest.raises(fedppl.DataError, match="'y' holds [0-9.]*5 .* whole numbers"):
        fedppl.fit(model, wrong, nn.FedAvg(), progressbar=False)


@pytest.mark.parametrize("link", ["scaled", "map", "probit"])
def test_predictions_block_by_block_are_those_at_once(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same rows; draws go on from block to block."""
    fit, rows = fitted_once(), np.random.default_rng(4).normal(size=(23, 3))
    wanted = nn.predict(fit, "device 0", {"X": rows}, link=link)
    monkeypatch.setattr(importlib.import_module("fedppl.nn.predict"), "_ROWS", 5)
    found = nn.predict(fit, "device 0", {"X": rows}, link=link)
    assert found.sizes == wanted.sizes and found.attrs == wanted.attrs
    for name in wanted:
        assert_allclose(found[name], wanted[name], rtol=1e-10, atol=1e-12)
    drawn = nn.predict(fit, "device 0", {"X": rows}, link="monte carlo", draws=30)["probability"]
    assert_allclose(drawn.sum("output"), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [BODY, HEAD, ALL])
def test_the_loss_on_rows_held_out_is_that_of_what_is_predicted(shared: tuple[str, ...]) -> None:
    """Points: a client's loss is that of the probabilities that it predicts, wherever its own weights are."""
    model, clients = problems.classification(shared=shared)
    training, validation = fedppl.search.holdout(clients, 0.3, random_seed=2)
    fit = fedppl.fit(model, training, nn.FedAvg(learning_rate=0.01), rounds=2, progressbar=False, random_seed=1)
    losses = [
        -np.log(nn.predict(fit, name, {"X": data["X"]})["probability"].values[np.arange(len(data["y"])), data["y"]])
        for name, data in validation.items()
    ]
    assert_allclose(fedppl.search.validation_loss(fit, validation).mean, np.concatenate(losses).mean(), rtol=1e-6)


def test_a_category_that_the_embedding_does_not_have_is_named() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Flatten(), torch.nn.Linear(2, 1))

    def builder(ward: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            f = nn.module(net, nn.parameters(net), pm.Data("ward", ward))
            pm.Normal("out", f[:, 0], 1.0, observed=pm.Data("y", y))
        return model

    model = fedppl.FederatedModel(builder, ["0.weight", "2.weight", "2.bias"])
    clients = {name: {"ward": np.arange(6)[:, None] % 3, "y": np.arange(6.0) / 3} for name in "ab"}
    fit = fedppl.fit(model, clients, nn.FedAvg(), rounds=1, progressbar=False, random_seed=1)
    assert nn.predict(fit, "a", {"ward": np.array([[0], [2]])})["mean"].shape == (2, 1)
    with pytest.raises(fedppl.DataError, match=r"\(2, 1\) \(IndexError: .*Embedding"):
        nn.predict(fit, "a", {"ward": np.array([[0], [3]])})
