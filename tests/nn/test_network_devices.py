"""Networks on another device than the CPU: the same numbers, nothing left behind, and what is not here is refused.

There is no GPU where tests run. A device of `tests.support.elsewhere` refuses what a GPU refuses: tensors of two
devices in one operation, and NumPy's view of its own.
"""

from __future__ import annotations

import functools
from concurrent import futures
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import nn  # noqa: E402
from fedppl.engine import inprocess  # noqa: E402
from fedppl.nn import functional, subnet  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402
from tests.support import elsewhere, problems  # noqa: E402
from tests.support.markers import slow_but  # noqa: E402

BODY, HEAD = ("0.weight", "0.bias"), ("2.weight", "2.bias")
ALL = (*BODY, *HEAD)
TUNED = {"phases": (("local", 1), ("shared", 2)), "tune": "local"}
ALGORITHMS = {
    "FedSI": (nn.FedSI(epochs=2, ratio=0.5, batch_size=8), BODY),
    "FedSI-Fac": (nn.FedSI(epochs=2, diagonal=True, batch_size=8), BODY),
    "FedAvg": (nn.FedAvg(momentum=0.9, learning_rate=0.01), ALL),
    "FedProx": (nn.FedAvg(proximal=0.1), ALL),
    "FedPer": (nn.FedAvg(**TUNED), BODY),
    "names": (nn.FedAvg(phases=((("0.bias",), 2),), tune=("2.bias",)), ALL),
    "SCAFFOLD": (nn.SCAFFOLD(batch_size=8), ALL),
    "IFCA": (nn.IFCA(), ALL),
    "Per-FedAvg": (nn.PerFedAvg(), ALL),
    "pFedMe": (nn.PFedMe(), ALL),
    "pFedBayes": (nn.PFedBayes(), ALL),
    "BPFed": (nn.BPFed(), BODY),
    "FedPop": (nn.FedPop(head=HEAD, draw_epochs=4), ALL),
    "pFedVEM": (nn.Confidence(head=HEAD, epochs=2), ALL),
}


def counted(X: Any, y: Any, *, net: Any, device: Any = None) -> Any:
    """Counts whose likelihood PyTensor computes, on the host, with an unknown of its own."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        level = pm.Normal("level", 0, 1)
        pm.Poisson("count", pm.math.exp(nn.module(net, nn.parameters(net), X, device=device)[:, 0] + level), observed=y)
    return model


def classes(X: Any, y: Any, *, net: Any, device: Any = None) -> Any:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        pm.Categorical("label", logit_p=nn.module(net, nn.parameters(net), X, device=device), observed=y)
    return model


class Inline(futures.Executor):
    """Work in this thread: what watches torch's operations watches one thread."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        pass

    def submit(self, function: Any, /, *arguments: Any, **settings: Any) -> Any:
        found: futures.Future[Any] = futures.Future()
        found.set_running_or_notify_cancel()
        found.set_result(function(*arguments, **settings))
        return found


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "ThreadPoolExecutor", Inline)


def values_of(algorithm: Any, shared: Any, data: Any, device: Any, builder: Any = classes, net: Any = None) -> Any:
    """What a fit estimates, what clients have of their own, and what is predicted, old client and new."""
    declared = functools.partial(builder, net=net or problems.network(), device=device)
    names = (*shared, "level") if builder is counted else shared
    model = fedppl.FederatedModel(declared, names)
    engine = fedppl.InProcess(workers=1)
    fit = problems.fit_some_rounds(model, data, algorithm, engine=engine, rounds=2, random_seed=3, progressbar=False)
    assert not any(record.failures for record in fit.records), fit.records[-1].failures
    first = next(iter(data))
    own = nn.personalise(fit, first)
    found = {"own": own.weights}
    if algorithm.result.shared is not None:
        found["shared"] = algorithm.result.shared.estimate(fit.state)
    if own.subnetwork is not None:
        found["covariance"] = own.subnetwork.covariance
    for name, client in {"old": own, "new": data[first]}.items():
        made = nn.predict(fit, client, {"X": data[first]["X"]})
        found |= {f"{name} {key}": value.to_numpy() for key, value in made.data_vars.items()}
    return found


def require_same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_allclose(found[name], value, rtol=1e-3, atol=1e-4 * float(np.max(np.abs(value))), err_msg=name)


def data_of(clients: int = 5) -> Any:
    return problems.classification(clients)[1]


@pytest.mark.parametrize("name", slow_but(ALGORITHMS, "FedSI", "FedPer", "pFedVEM"))
def test_every_algorithm_has_the_same_numbers_there(name: str) -> None:
    """In a batch of clients where there is one, at one client by itself, personalised and predicted."""
    algorithm, shared = ALGORITHMS[name]
    wanted = values_of(algorithm, shared, data_of(), "cpu")
    with elsewhere.device_elsewhere() as mode:
        found = values_of(algorithm, shared, data_of(), elsewhere.NAME)
    require_same(found, wanted)
    products = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
    assert sum(mode.there[f"{one}"] for one in mode.there if one.startswith(products)) > 0
    assert not {one: n for one, n in mode.here.items() if one.startswith(products)}


@pytest.mark.slow
def test_likelihoods_of_pytensor_stay_on_the_host() -> None:
    """Their unknowns are trained on the device with all other weights."""
    rng, net = np.random.default_rng(8), problems.network(outputs=1)
    data = {f"site {k}": {"X": rng.normal(size=(12, 3)), "y": rng.poisson(2.0, size=12)} for k in range(5)}
    for algorithm, shared in ((nn.FedAvg(batch_size=5), ALL), (nn.FedSI(epochs=1, ratio=0.5), BODY)):
        wanted = values_of(algorithm, shared, data, "cpu", counted, net)
        with elsewhere.device_elsewhere():
            found = values_of(algorithm, shared, data, elsewhere.NAME, counted, net)
        require_same(found, wanted)


def images(device: Any = None) -> Any:
    rng = np.random.default_rng(9)
    data = {"a": {"X": rng.normal(size=(9, 1, 6, 6)), "y": np.arange(9) % 3}}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        layers = (torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.Flatten())
        net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 3)).eval()
    return functools.partial(classes, net=net, device=device), data


def inferred(builder: Any, data: Any, rule: str = "live") -> Any:
    shared = ["0.weight", "0.bias", "1.weight", "1.bias"]
    client = fedppl.FederatedModel(builder, shared).enrol(data, kernel=False)["a"]
    unit = client.view(network_of)
    places, g = subnet.chosen(unit, unit.initial, np.full(len(unit.shared_at), 2.0), 15, rule=rule, diagonal=False)
    q = subnet.infer(unit, unit.initial, places, g, dtype=torch.float32)
    return unit, q, subnet.output_covariance(unit, q, unit.X)


def test_layers_that_do_not_factor_and_buffers_go_along() -> None:
    builder, data = images()
    _, wanted, spread = inferred(builder, data)
    with elsewhere.device_elsewhere() as mode:
        unit, found, there = inferred(images(elsewhere.NAME)[0], data)
    assert unit.declared.device.type == elsewhere.NAME and mode.there["aten::convolution"]
    assert not mode.here["aten::convolution"]
    assert_allclose(found.covariance, wanted.covariance, rtol=1e-4, atol=1e-5)
    assert_allclose(there, spread, rtol=1e-4, atol=1e-5)


def test_a_network_that_was_moved_is_computed_where_it_is() -> None:
    with elsewhere.device_elsewhere():
        builder, data = images()
        builder.keywords["net"].to(elsewhere.NAME)
        unit = inferred(builder, data)[0]
        assert unit.declared.device.type == elsewhere.NAME
        assert unit.tensor(unit.X, torch.float32).device.type == elsewhere.NAME
        builder.keywords["device"] = "cpu"  # what is said counts
        unit = inferred(builder, data)[0]
        assert unit.declared.device == functional.CPU and unit.tensor(unit.X, torch.float32).device == functional.CPU


def test_clients_have_devices_of_their_own() -> None:
    """One is on the device and one on the CPU: their replies are those of two on the CPU."""

    def mixed(X: Any, y: Any, *, net: Any, device: Any) -> Any:
        return classes(X, y, net=net, device=device if len(X) == 20 else "cpu")

    data = data_of(2)
    data = {"device 0": data["device 0"], "device 1": {name: one[:14] for name, one in data["device 1"].items()}}
    wanted = values_of(nn.FedAvg(), ALL, data, "cpu", mixed)
    with elsewhere.device_elsewhere() as mode:
        found = values_of(nn.FedAvg(), ALL, data, elsewhere.NAME, mixed)
    require_same(found, wanted)
    assert mode.there["aten::addmm"] and mode.here["aten::addmm"]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu", ["device='gpu'", "must be a device of torch", '"cuda"']),
        (0, ["device='0'", "must be a device of torch"]),
        (True, ["device='True'", "must be a device of torch"]),
        pytest.param(
            "cuda",
            ["device='cuda'", "cannot be used on this machine", 'device="cpu"'],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here"),
        ),
        (torch.device("cuda", 99), ["device='cuda:99'", "cannot be used on this machine", 'device="cpu"']),
        ("meta", ["device='meta'", "cannot be used on this machine"]),
    ],
)
def test_a_device_that_is_not_here_is_refused_at_the_declaration(device: Any, words: list[str]) -> None:
    with pm.Model(), pytest.raises(fedppl.DeclarationError) as refused:
        net = problems.network()
        nn.module(net, nn.parameters(net), np.ones((2, 3)), device=device)
    for word in words:
        assert word in str(refused.value)


def test_a_device_from_which_other_numbers_come_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere.device_elsewhere():
        assert functional.device_for(problems.network(), elsewhere.NAME).type == elsewhere.NAME
        monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.zeros(1))
        with pytest.raises(fedppl.DeclarationError, match="cannot be used.*comes back as 0.*is_available"):
            functional.device_for(problems.network(), elsewhere.NAME)


def test_a_network_in_two_places_is_refused_but_where_the_device_is_said() -> None:
    with elsewhere.device_elsewhere(), pm.Model():
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).to(elsewhere.NAME))
        with pytest.raises(fedppl.DeclarationError, match=r"\['cpu', 'meta'\].*device=\"cpu\""):
            nn.module(net, nn.parameters(net), np.ones((2, 3)))
        assert nn.module(net, np.ones(14), np.ones((2, 3)), device="cpu").type.ndim == 2


def test_double_precision_is_left_to_the_cpu_where_there_is_none() -> None:
    mps = torch.device("mps")
    assert functional.placed(mps, torch.float32) == mps and functional.placed(mps, torch.float64) == functional.CPU
    assert functional.placed(torch.device("cuda", 1), torch.float64) == torch.device("cuda", 1)


@pytest.mark.slow
def test_a_device_without_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device refuses float64 as "mps" does: training is there in float32, and the rest on the CPU."""
    monkeypatch.setattr(functional, "_WITHOUT_FLOAT64", (elsewhere.NAME,))
    monkeypatch.setattr(elsewhere, "REFUSED", (torch.float64,))
    for name in ("FedSI", "FedPer", "pFedVEM", "pFedBayes", "FedPop"):
        algorithm, shared = ALGORITHMS[name]
        wanted = values_of(algorithm, shared, data_of(), "cpu")
        with elsewhere.device_elsewhere() as mode:
            found = values_of(algorithm, shared, data_of(), elsewhere.NAME)
        require_same(found, wanted)
        assert mode.there["aten::addmm"] or mode.there["aten::baddbmm"]
