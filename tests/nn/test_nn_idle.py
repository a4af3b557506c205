"""Layers that stand twice in a network, and layers that it does not use: the numbers are those of the rest."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import nn  # noqa: E402
from fedppl.nn import functional, subnet  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402
from tests.support.markers import slow_but  # noqa: E402

USED = ("first.weight", "first.bias", "last.weight", "last.bias")


def builder(X: Any, y: Any, *, net: Any) -> Any:
    with pm.Model() as model:
        output = nn.module(net, nn.parameters(net), pm.Data("X", X))
        pm.Normal("o", output[:, 0], 0.5, observed=pm.Data("y", y))
    return model


def clients(count: int, rows: int = 20) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    tables = {f"c{k}": rng.normal(size=(rows, 3)) for k in range(count)}
    return {name: {"X": X, "y": np.sin(X[:, 0]) + 0.5 * rng.normal(size=rows)} for name, X in tables.items()}


def declared(net: Any, shared: Any = None) -> Any:
    return fedppl.FederatedModel(
        functools.partial(builder, net=net), shared or [name for name, _ in net.named_parameters()]
    )


class Net(torch.nn.Module):  # type: ignore[misc]
    """tanh between two layers, which may have one beside them that is not used, or used to no end."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last, self.how = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1), how
        if how:
            self.idle = torch.nn.Linear(3, 2)

    def forward(self, X: Any) -> Any:
        if self.how == "called":
            self.idle(X)
        return self.last(torch.tanh(self.first(X)))


class Again(torch.nn.Module):  # type: ignore[misc]
    """`twice`, with one name for the layer."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.one, self.last = net[0], net[3]

    def forward(self, X: Any) -> Any:
        return self.last(self.one(torch.tanh(self.one(X))))


def twice() -> Any:
    torch.manual_seed(1)
    one = torch.nn.Linear(3, 3)
    return torch.nn.Sequential(one, torch.nn.Tanh(), one, torch.nn.Linear(3, 1))


ALGORITHMS = {"FedAvg": lambda: nn.FedAvg(batch_size=8), "FedSI": lambda: nn.FedSI(ratio=1.0, tune=None, batch_size=8)}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_layer_that_stands_twice_is_one_layer(name: str, count: int) -> None:
    """In turn and in a batch. The user's own network is what it was, parameter by parameter."""
    net, held = twice(), [(value, value.detach().clone()) for value in twice().parameters()]
    kept = list(net.named_parameters())
    settings = {"rounds": 2, "progressbar": False, "random_seed": 1}
    fit = fedppl.fit(declared(net), clients(count), ALGORITHMS[name](), **settings)
    other = fedppl.fit(declared(Again(twice())), clients(count), ALGORITHMS[name](), **settings)
    after = list(net.named_parameters())
    assert [key for key, _ in after] == [key for key, _ in kept] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert all(one is two for (_, one), (_, two) in zip(after, kept, strict=True))
    assert net[2].weight is net[0].weight and isinstance(net[0].weight, torch.nn.Parameter)
    for (_, value), (_, wanted) in zip(after, held, strict=True):
        assert_array_equal(value.detach().numpy(), wanted.numpy())
    for one, two in zip(fit.estimate.values(), other.estimate.values(), strict=True):
        assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    X = clients(1)["c0"]["X"][:4]
    assert_allclose(
        nn.predict(fit, "c0", {"X": X})["mean"].values, nn.predict(other, "c0", {"X": X})["mean"].values, atol=1e-5
    )


@pytest.mark.parametrize("make", [twice, lambda: Net("idle"), lambda: Net("called")])
def test_curvature_is_that_of_the_jacobian(make: Any) -> None:
    net, data = make(), clients(1)
    unit = declared(net).enrol(data, kernel=False)["c0"].view(network_of)
    w, every = unit.initial, np.arange(unit.size)
    X = torch.from_numpy(data["c0"]["X"])

    def output(flat: Any) -> Any:
        return functional.call(unit.net, functional.state_of(unit.net, flat), X)[:, 0]

    J = torch.autograd.functional.jacobian(output, torch.from_numpy(w)).numpy()
    differences = [
        (output(torch.from_numpy(w + step)) - output(torch.from_numpy(w - step))).detach().numpy() / 2e-5
        for step in 1e-5 * np.eye(unit.size)
    ]
    assert_allclose(J, np.transpose(differences), atol=1e-8)
    assert_allclose(subnet.curvature(unit, w, every), J.T @ J / 0.25, atol=1e-12)


@pytest.mark.parametrize("count", slow_but([1, 5], 1))
@pytest.mark.parametrize("how", ["idle", "called"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_layers_that_are_not_used_change_nothing(name: str, how: str, count: int) -> None:
    """They stay where they start, and the others train as without them."""
    settings = {"rounds": 2, "progressbar": False, "random_seed": 1}
    net = Net(how)
    fit = fedppl.fit(declared(net), clients(count), ALGORITHMS[name](), **settings)
    without = fedppl.fit(declared(Net()), clients(count), ALGORITHMS[name](), **settings)
    assert fit.status is without.status is fedppl.Status.MAX_ROUNDS
    for key in USED:
        assert_allclose(fit.estimate[key], without.estimate[key], rtol=1e-6, atol=1e-7)
    # A prior's slope at its mean is rounding, of which Adam makes small steps.
    drift = {"FedAvg": 0.0, "FedSI": 0.01}[name]
    assert_allclose(fit.estimate["idle.weight"], net.idle.weight.detach().numpy(), rtol=1e-6, atol=drift)


OTHERS = {
    "PerFedAvg": lambda: nn.PerFedAvg(),
    "PFedMe": lambda: nn.PFedMe(),
    "PFedBayes": lambda: nn.PFedBayes(),
    "SCAFFOLD": lambda: nn.SCAFFOLD(),
    "Confidence": lambda: nn.Confidence(head=USED[2:]),
    "FedPop": lambda: nn.FedPop(head=USED[2:]),
}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", OTHERS)
def test_every_algorithm_takes_a_network_with_a_layer_that_is_not_used(name: str, count: int) -> None:
    fit = fedppl.fit(declared(Net("idle")), clients(count), OTHERS[name](), rounds=1, progressbar=False, random_seed=1)
    assert fit.status is fedppl.Status.MAX_ROUNDS
    assert not fit.records[-1].failures and not np.array_equal(fit.estimate["last.bias"], Net().last.bias.detach())


def test_training_what_is_not_used_moves_nothing() -> None:
    net = Net("idle")
    algorithm = nn.FedAvg(phases=((("idle.weight",), 2),))
    fit = fedppl.fit(declared(net), clients(2), algorithm, rounds=1, progressbar=False, random_seed=1)
    assert fit.status is fedppl.Status.MAX_ROUNDS
    for key, value in net.named_parameters():
        assert_allclose(fit.estimate[key], value.detach().numpy(), rtol=1e-6)
