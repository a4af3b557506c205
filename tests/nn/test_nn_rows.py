"""Networks whose output for a row depends on the rows beside it are refused, others are not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy.special import log_softmax

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import nn  # noqa: E402
from fedppl.models import fedsi  # noqa: E402
from fedppl.nn import functional, train, view  # noqa: E402
from fedppl.nn import unit as _unit  # noqa: E402
from fedppl.nn.personal import loss_at  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402
from tests.support import problems  # noqa: E402


class Seen(torch.nn.Module):  # type: ignore[misc]
    """A linear layer on what is made of the rows."""

    def __init__(self, made: Callable[[Any], Any], inputs: int = 3) -> None:
        super().__init__()
        self.made, self.last = made, torch.nn.Linear(inputs, 2)

    def forward(self, X: Any) -> Any:
        return self.last(self.made(X))


def centred(X: Any) -> Any:
    return X - X.mean(0)


def bounded(X: Any) -> Any:
    return X / X.abs().max().clamp(min=5.0)


def capacity(X: Any) -> Any:
    """No more than eight rows are let through."""
    return X * (torch.arange(len(X)) < 8).to(X)[:, None]


def normed(**settings: Any) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, **settings)).eval()


def enrolled(net: Any, *tables: np.ndarray) -> list[Any]:
    """Clients with these rows and two classes."""
    model = fedppl.FederatedModel(
        functools.partial(fedsi.classifier, net=net), [name for name, _ in net.named_parameters()]
    )
    data = {f"c{k}": {"X": X, "y": np.arange(len(X)) % 2} for k, X in enumerate(tables)}
    return list(model.enrol(data, kernel=False).values())


def late(rng: np.random.Generator, rows: int = 150) -> np.ndarray:
    """Rows of which the first hundred are equal, as where they are sorted or padded."""
    X = np.ones((rows, 3))
    X[100:] = rng.normal(size=(rows - 100, 3))
    return X


def far(rng: np.random.Generator) -> np.ndarray:
    """One row of two hundred, none of those that are looked at by their places, is large."""
    X = rng.uniform(-1, 1, size=(200, 3))
    X[77] = [0.0, -40.0, 0.0]
    assert 77 not in np.linspace(0, 199, 100).astype(int)
    return X


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[np.random.Generator], np.ndarray]]] = {
    "means": (lambda: Seen(centred), lambda rng: rng.normal(size=(9, 3))),
    "equal rows first": (lambda: Seen(centred), late),
    "more than eight rows": (lambda: Seen(capacity), lambda rng: rng.normal(size=(40, 3))),
    "one large row": (lambda: Seen(bounded), far),
    "no running moments": (lambda: normed(track_running_stats=False), lambda rng: rng.normal(size=(9, 3))),
    "whole numbers": (lambda: Seen(centred), lambda rng: rng.integers(5, size=(9, 3)).astype(float)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_depend_on_each_other_are_refused(name: str, rng: np.random.Generator) -> None:
    make, rows = REFUSED[name]
    (client,) = enrolled(make(), rows(rng))
    with pytest.raises(fedppl.DeclarationError, match="client 'c0': the network's output for a row depends on"):
        client.view(network_of)


class Cut(torch.nn.Module):  # type: ignore[misc]
    """A linear layer whose output passes no slopes on."""

    def __init__(self, cut: Callable[[Any], Any]) -> None:
        super().__init__()
        self.cut, self.last = cut, torch.nn.Linear(3, 2, bias=False)

    def forward(self, X: Any) -> Any:
        return self.cut(self.last(X))


@pytest.mark.parametrize("cut", [torch.Tensor.detach, torch.sign, torch.round])
def test_networks_without_slopes_are_refused(cut: Callable[[Any], Any], rng: np.random.Generator) -> None:
    (client,) = enrolled(Cut(cut), rng.normal(size=(9, 3)))
    with pytest.raises(fedppl.DeclarationError, match="'c0': the network's output has no slope"):
        client.view(network_of)


def test_an_unknown_sd_is_no_slope_of_the_network(rng: np.random.Generator) -> None:
    net = Cut(torch.Tensor.detach)

    def builder(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            f = nn.module(net, nn.parameters(net), pm.Data("X", X))
            pm.Normal("out", f[:, 0], pm.LogNormal("sd", 0, 1), observed=pm.Data("y", y))
        return model

    model = fedppl.FederatedModel(builder, ["last.weight", "sd"])
    data = {"c0": {"X": rng.normal(size=(9, 3)), "y": rng.normal(size=9)}}
    with pytest.raises(fedppl.DeclarationError, match="'c0': the network's output has no slope"):
        model.enrol(data, kernel=False)["c0"].view(network_of)


def test_rows_of_zeros_say_nothing_of_slopes() -> None:
    (client,) = enrolled(Cut(torch.relu), np.zeros((9, 3)))
    client.view(network_of)


class Counting(torch.nn.Module):  # type: ignore[misc]
    """A buffer that every call changes, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, X: Any) -> Any:
        self.calls += 1.0
        return self.last(X) * (1.0 + 1e-3 * self.calls)


AGAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "a function that draws": (lambda: Seen(torch.nn.functional.dropout), "when it is asked again"),
    "a layer that draws": (lambda: Seen(torch.nn.RReLU()), "when it is asked again"),
    "a buffer that counts": (lambda: Counting().eval(), "when it is asked again"),
    "written over": (lambda: Seen(lambda X: X.sub_(1.0)), "writes over its inputs"),
    "written over by a layer": (lambda: Seen(torch.nn.ELU(inplace=True)), "writes over its inputs"),
}


@pytest.mark.parametrize("name", AGAIN)
def test_networks_that_are_no_functions_are_refused(name: str, rng: np.random.Generator) -> None:
    make, said = AGAIN[name]
    (client,) = enrolled(make(), rng.normal(size=(9, 3)))
    with pytest.raises(fedppl.DeclarationError, match=f"client 'c0': the network .*{said}"):
        client.view(network_of)


@pytest.mark.slow
def test_rows_are_looked_at_together_however_wide_they_are(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed a row at a time hides that rows depend on each other."""
    monkeypatch.setattr(functional, "_NUMBERS", 3)
    (client,) = enrolled(Seen(bounded), far(rng))
    with pytest.raises(fedppl.DeclarationError, match="depends on the other rows"):
        client.view(network_of)


class Coded(torch.nn.Module):  # type: ignore[misc]
    """An embedding of codes that come as real numbers: others than 0 to 4 are an error."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2)

    def forward(self, X: Any) -> Any:
        return self.last(self.table(X[:, 0].long()))


ACCEPTED: dict[str, tuple[Callable[[], Any], Callable[[np.random.Generator], np.ndarray]]] = {
    "running moments": (normed, lambda rng: rng.normal(size=(9, 3))),
    "within rows": (lambda: torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)), late),
    "codes": (Coded, lambda rng: rng.integers(5, size=(40, 1)).astype(float)),
    "a window": (lambda: Seen(lambda X: torch.softmax(X[:, :, None] * X[:, None], 2).sum(1)), far),
    "one row": (lambda: Seen(torch.tanh), lambda rng: rng.normal(size=(1, 3))),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_rows_that_do_not_are_accepted(name: str, rng: np.random.Generator) -> None:
    make, rows = ACCEPTED[name]
    net = make()
    (client,) = enrolled(net, rows(rng))
    assert client.view(network_of).size == functional.size_of(net)


def test_a_client_that_cannot_show_it_leaves_it_to_the_next(rng: np.random.Generator) -> None:
    """One whose rows are equal shows nothing."""
    X = rng.integers(5, size=(9, 3))
    first, second = enrolled(
        torch.nn.Sequential(torch.nn.Embedding(5, 1), torch.nn.Flatten(), Seen(centred)), X[[0, 0, 0]], X
    )
    first.view(network_of)
    with pytest.raises(fedppl.DeclarationError, match="client 'c1'"):
        second.view(network_of)


def test_rows_that_are_tried_are_different_and_from_everywhere(rng: np.random.Generator) -> None:
    X = far(rng)
    X[:100:2] = X[0]
    (client,) = enrolled(Seen(torch.tanh), X)
    found = view._spread(client.view(network_of))
    assert len(found) == len(np.unique(found, axis=0)) == 16
    assert_allclose(found[0], X[77])
    places = [int(np.flatnonzero((X == row).all(axis=1))[0]) for row in found]
    assert max(places) == 199 and sum(place >= 100 for place in places) >= 5


def test_predictions_of_rows_together_are_those_of_rows_alone(rng: np.random.Generator) -> None:
    """What the refusal promises, of a network that passes it."""
    net, X = Seen(torch.tanh), late(rng)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["last.weight", "last.bias"])
    data = {"a": {"X": X, "y": np.arange(len(X)) % 2}}
    fit = fedppl.fit(model, data, nn.FedAvg(), rounds=1, progressbar=False, random_seed=1)
    together = nn.predict(fit, "a", {"X": X[100:104]})["probability"].values
    alone = [nn.predict(fit, "a", {"X": row[None]})["probability"].values for row in X[100:104]]
    assert_allclose(together, np.concatenate(alone), rtol=1e-12)


def test_losses_and_features_take_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all of a client's rows, by formula, in chunks that bound the memory."""
    model, clients = problems.classification(shared=("0.weight", "0.bias", "2.weight", "2.bias"))
    unit = model.enrol(clients, kernel=False)["device 0"].view(network_of)
    X, y = clients["device 0"]["X"], clients["device 0"]["y"]
    W1, b1, W2, b2 = (value.detach().double().numpy() for value in unit.loaded(unit.initial).parameters())
    last, sizes = _unit.head_of(unit, ("2.weight", "2.bias")), []
    monkeypatch.setattr(functional, "_NUMBERS", 28)  # seven rows of four hidden units
    for module in (train, _unit):

        def counted(net: Any, state: Any, rows: Any, own: Any = module.call) -> Any:
            sizes.append(len(rows))
            return own(net, state, rows)

        monkeypatch.setattr(module, "call", counted)
    z = np.tanh(X @ W1.T + b1)
    loss = -log_softmax(z @ W2.T + b2, axis=1)[np.arange(len(y)), y].mean()
    assert_allclose(loss_at(unit, unit.initial, dtype=torch.float64), loss, rtol=1e-12)
    found = _unit.features(unit, last, unit.initial, dtype=torch.float64)
    assert_allclose(found.numpy(), z, rtol=1e-12)
    assert sizes == [7, 7, 6] * 2
