"""Numbers far from unit scale are told of in the log, once, and others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytest

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import nn  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402

RNG = np.random.default_rng(3)
X = RNG.normal(size=(12, 3))
Y = X[:, 0] + RNG.normal(size=12)


def declared(outcome: Callable[[Any, Any], Any], net: Any) -> Callable[..., pm.Model]:
    def builder(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            outcome(nn.module(net, nn.parameters(net), X)[:, 0], y)
        return model

    return builder


def told(caplog: pytest.LogCaptureFixture, outcome: Callable[[Any, Any], Any], net: Any, *data: Any) -> list[str]:
    """Of which clients the log speaks."""
    names = [name for name, _ in net.named_parameters()]
    model = fedppl.FederatedModel(declared(outcome, net), names)
    clients = {f"c{k}": dict(zip("Xy", one, strict=True)) for k, one in enumerate(data)}
    for client in model.enrol(clients, kernel=False).values():
        client.view(network_of)
    return [record.args[0] for record in caplog.records if record.name == "fedppl.nn.view"]


def normal(f: Any, y: Any) -> Any:
    return pm.Normal("out", f, 1, observed=y)


def robust(f: Any, y: Any) -> Any:
    return pm.StudentT("out", 4, mu=f, sigma=1, observed=y)


def scaled(f: Any, y: Any) -> Any:
    return pm.Normal("out", f, 1, observed=(y - 5000) / 1000)


def counts(f: Any, y: Any) -> Any:
    return pm.Poisson("out", pm.math.exp(f), observed=y)


@pytest.mark.parametrize(
    ("outcome", "data", "expected"),
    [
        (normal, [(X, Y)], []),
        (normal, [(X, Y), (1000 * X, Y), (1000 * X, Y)], ["c1"]),
        (normal, [(X + [0, 0, 1900], Y)], ["c0"]),
        (normal, [(X, 1000 * Y + 5000)], ["c0"]),
        (robust, [(X, 1000 * Y)], ["c0"]),
        (scaled, [(X, 1000 * Y + 5000)], []),
        (counts, [(X, np.full(12, 5000))], []),
    ],
)
def test_what_is_far_from_unit_scale_is_told_of_once(
    outcome: Any, data: Any, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert told(caplog, outcome, torch.nn.Linear(3, 1), *data) == expected


def test_indices_of_an_embedding_have_no_scale(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(500, 2), torch.nn.Flatten(), torch.nn.Linear(2, 1))
    assert not told(caplog, normal, net, (RNG.integers(0, 500, size=(12, 1)), Y))
