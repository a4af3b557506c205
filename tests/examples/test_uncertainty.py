"""The peers of `benchmarks/uncertainty.py`: a last layer's Laplace approximation by brute force, and means of seeds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import softmax

torch = pytest.importorskip("torch")

from benchmarks import uncertainty  # noqa: E402
from tests.support import problems  # noqa: E402


def test_the_last_layers_posterior_is_that_of_all_its_derivatives() -> None:
    """Derivatives of the outputs in every weight of the last layer, one at a time."""
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)).double()
    X, new, precision = rng.normal(size=(12, 3)), rng.normal(size=(5, 3)), 0.7
    own = SimpleNamespace(client=SimpleNamespace(view=lambda _: SimpleNamespace(loaded=lambda _: net)), weights=None)
    found = uncertainty.last_layer(own, {"X": X}, precision)(new)

    def outputs(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return net(torch.as_tensor(x)).numpy()

    def derivatives(x: np.ndarray) -> np.ndarray:
        """(n, C, weights)."""
        columns = []
        for value in (net[2].weight, net[2].bias):
            for place in np.ndindex(tuple(value.shape)):
                ends = []
                for step in (1e-4, -2e-4):
                    with torch.no_grad():
                        value[place] += step
                    ends.append(outputs(x))
                with torch.no_grad():
                    value[place] += 1e-4
                columns.append((ends[0] - ends[1]) / 2e-4)
        return np.stack(columns, axis=2)

    J, chance = derivatives(X), softmax(outputs(X), axis=1)
    H = precision * np.eye(J.shape[2])
    for row, p in zip(J, chance, strict=True):
        H += row.T @ (np.diag(p) - np.outer(p, p)) @ row
    J = derivatives(new)
    spread = J @ np.linalg.inv(H) @ np.swapaxes(J, 1, 2)
    apart = [np.mean([s[a, a] + s[b, b] - 2 * s[a, b] for a, b in ((0, 1), (0, 2), (1, 2))]) for s in spread]
    kappa = 1 / np.sqrt(1 + np.pi / 8 * np.array(apart))
    assert_allclose(found, softmax(kappa[:, None] * outputs(new), axis=1), atol=1e-7)


def test_a_method_that_failed_at_a_seed_has_no_mean() -> None:
    records = [{"method": "a", "NLL": 1.0}, {"method": "a", "NLL": 3.0}, {"method": "b", "NLL": 0.1}, {"method": "b"}]
    means = uncertainty.averages(records)["NLL"]
    assert means["a"] == 2.0
    assert np.isnan(means["b"])


@pytest.mark.parametrize(
    "method", ["FedBABU", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pFedVEM", "Ensemble", "Laplace"))]
)
@problems.few_rounds
def test_a_cell_is_fitted_and_scored(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to figures, on pixels that tell labels, with few images of each."""
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(10), 150)
    pixels = np.zeros((len(labels), 784), dtype=np.float32)
    pixels[np.arange(len(labels)), labels] = 1.0
    found = uncertainty.images.Images(pixels + 0.01 * rng.normal(size=pixels.shape).astype(np.float32), labels)
    monkeypatch.setitem(uncertainty.images.ROWS, "small", (10, 10))
    monkeypatch.setattr(uncertainty.images, "find_data", lambda *_: None)
    monkeypatch.setattr(uncertainty, "_loaded", lambda _: found)
    monkeypatch.setattr(uncertainty, "MEMBERS", 2)
    options = uncertainty.arguments(["--rows", "5", "--rounds", "3", "--seeds", "1"])
    precision = 10.0 if method == "Laplace" else None
    for validation in (0, 1):
        row = uncertainty.score(uncertainty.Cell(method, 5, 0, 1e-3, validation, precision), options)
        assert row["accuracy"] > 50 and 0 <= row["ECE"] < 1 and row["NLL"] > 0 and 0 <= row["AUROC unseen"] <= 1
