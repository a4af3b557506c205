"""The table of algorithms for any declared model, call by call, on clients that need no PyMC."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedppl.contracts import ClientView
from fedppl.gaussian import Gaussian
from tests import cases, skeleton
from tests.support import contract, fake_client
from tests.support.fake_client import FakeClient

# Sampling compiles the client's own PyMC model.
NAMES = [name for name, case in cases.CASES.items() if case.problem in cases.ANY_MODEL and "NUTS" not in name]


def test_a_fake_client_is_all_that_algorithms_may_ask_for() -> None:
    (client,) = fake_client.clients(1).values()
    asked = [name for name in vars(ClientView) if not name.startswith("_")]
    assert issubclass(ClientView, Protocol) and len(asked) > 10  # type: ignore[arg-type]
    assert all(hasattr(client, name) for name in asked)


def test_a_fake_clients_gradient_is_that_of_its_log_density(rng: np.random.Generator) -> None:
    client = fake_client.clients()["clinic 2"]
    X, y = client.arrays["X"], client.arrays["y"]
    x = rng.normal(size=5)

    def log_density(x: Any) -> float:
        rest, off = y - x[2] - X @ x[3:], x[3:] - x[:2]
        return float(-0.5 * rest @ rest - 2 * off @ off + np.log(4) - (0.5 * len(y) + 1) * np.log(2 * np.pi))

    value, by_phi, by_theta = client.log_site(x[:3], x[3:])
    assert_allclose(value, log_density(x), rtol=1e-12)
    slopes = [(log_density(x + step) - log_density(x - step)) / 2e-4 for step in 1e-4 * np.eye(5)]
    assert_allclose(np.concatenate([by_phi, by_theta]), slopes, rtol=1e-7, atol=1e-7)


def test_a_fake_clients_batches_are_its_batches_one_by_one(rng: np.random.Generator) -> None:
    client = fake_client.clients()["clinic 2"]
    rows = rng.integers(client.rows, size=(3, 4))
    reals, integers, where = client.batches(rows)
    for t in range(3):
        x = rng.normal(size=5)
        found = client.kernel(x, reals, integers, where[t])
        assert_allclose(found, client.kernel(x, *client.batch(rows[t])), rtol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_keeps_what_all_promise(name: str) -> None:
    case = cases.CASES[name]
    prior = "unit" if case.problem is cases.trends else "declared"
    models: dict[str, FakeClient] = fake_client.clients(3, prior=prior)
    # Blocks are told by the names of variables; those of the ending are this problem's.
    algorithm = case.build_ending() if isinstance(case.settings.get("structure"), list) else case.build()
    for model in models.values():
        algorithm.needs.check(model)
    contract.check(algorithm, models, summed=case.summed, ledger=case.ledger)


@pytest.mark.parametrize("name", ["EP(NestedLaplace)", "EP(cold)", "PrecisionWeighted"])
def test_rounds_by_hand_end_at_the_posterior(name: str) -> None:
    """Natural parameters add: prior and sites of closed form."""
    models, case = fake_client.clients(3), cases.CASES[name]
    algorithm = (
        case.build_ending()
        if name == "PrecisionWeighted"
        else cases.fedppl.EP(warm_start=name != "EP(cold)", tolerance=1e-9)
    )
    played = contract.play(algorithm, models, 50)
    exact = next(iter(models.values())).prior.gaussian
    for client in models.values():
        X, y = client.arrays["X"], client.arrays["y"]
        Z, inverse = np.column_stack([X, np.ones(len(y))]), np.linalg.inv(np.eye(len(y)) + 0.25 * X @ X.T)
        exact = Gaussian(exact.linear + Z.T @ inverse @ y, exact.precision + Z.T @ inverse @ Z)
    found = algorithm.result.shared.gaussian(played.states[-1])  # type: ignore[union-attr]
    assert_allclose(found.precision, exact.precision, rtol=1e-5, atol=1e-5)
    assert_allclose(found.linear, exact.linear, rtol=1e-5, atol=1e-5)


def test_the_skeleton_of_an_algorithm_is_short() -> None:
    """What it takes to join the table; its row is held to all that the others are."""
    assert len(Path(skeleton.__file__).read_text(encoding="utf-8").splitlines()) <= 80
    assert "skeleton" in NAMES
