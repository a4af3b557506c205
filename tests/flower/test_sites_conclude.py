"""What is read of a fit whose clients are sites of their own: from the server's ledger, or refused with the remedy."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

pytest.importorskip("flwr")

import fedppl
from fedppl import DeclarationError, Policy, gaussian
from fedppl.testing import normal_means
from tests.support.fake_grid import FakeGrid, engine_of, node

OPEN = Policy(
    sums="optional",
    rows=0,
    few_rows=0,
    parameters_per_row=math.inf,
    events=0,
    requests=math.inf,
    distance=math.inf,
    points=2**20,
)
PLAIN = fedppl.EP(tolerance=1e-3)


@functools.cache
def declared() -> tuple[fedppl.FederatedModel, dict[str, Any]]:
    return normal_means(3)


def grid_of(folder: Any, algorithm: Any) -> FakeGrid:
    model, clients = declared()
    app = fedppl.Flower.client_app(
        model,
        algorithm,
        lambda config: clients[config["client-id"]],
        folder=lambda config: folder / str(config["client-id"]),
        policy=lambda config: OPEN,
    )
    return FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(clients)})


def engine(grid: FakeGrid, clients: Any = 3) -> Any:
    return engine_of(grid, declared()[0], clients, deadline=60.0)


def at_sites(grid: FakeGrid, algorithm: Any) -> fedppl.Fit:
    model, _ = declared()
    return fedppl.fit(model, None, algorithm, engine=engine(grid), progressbar=False, random_seed=1)


def here(algorithm: Any) -> fedppl.Fit:
    model, clients = declared()
    return fedppl.fit(model, clients, algorithm, progressbar=False, random_seed=1)


def test_influence_is_read_from_the_ledger(tmp_path: Any) -> None:
    there = at_sites(grid_of(tmp_path, PLAIN), PLAIN)
    asked = len(there.records)
    found, expected = there.influence(), here(PLAIN).influence()
    assert len(there.records) == asked and not there.clients
    assert not bool(found["exact"].any()) and not bool(expected["exact"].any())
    for name in ("mean", "sd", "shift", "sd_ratio", "log_predictive"):
        assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-9)


def test_sums_over_sites_tell_nothing_of_a_single_site(tmp_path: Any) -> None:
    """Of its share in them: who wants that asks EP, or leaves the site out."""
    sums = fedppl.Sums(starts=1)
    there = at_sites(grid_of(tmp_path, sums), sums)
    assert there.status is fedppl.Status.CONVERGED and np.isfinite(there.log_evidence.value)
    with pytest.raises(DeclarationError, match=r"client 1.*fedppl.EP\(\)"):
        there.influence("client 1")


def test_without_a_site_is_a_fit_that_never_saw_it(tmp_path: Any) -> None:
    grid = grid_of(tmp_path, PLAIN)
    before = at_sites(grid, PLAIN)
    with pytest.raises(DeclarationError, match=r"fedppl.Flower.grid\(grid, clients=\['client 0', 'client 2'\]"):
        fedppl.without(before, "client 1", progressbar=False)
    with pytest.raises(DeclarationError, match=r"finds \['client 1'\], who leave"):
        fedppl.without(before, "client 1", progressbar=False, engine=engine(grid))
    with pytest.raises(DeclarationError, match="engine="):
        fedppl.without(before, "client 1", progressbar=False, engine="grid")
    found = fedppl.without(before, "client 1", progressbar=False, engine=engine(grid, ["client 0", "client 2"]))
    expected = fedppl.without(here(PLAIN), "client 1", progressbar=False)
    assert found.fit.client_ids == ("client 0", "client 2")
    assert found.fit.status is fedppl.Status.CONVERGED and found.distance < 0.01
    assert_allclose(gaussian.mean(found.fit.posterior), gaussian.mean(expected.fit.posterior), rtol=1e-6)
    assert all(record.info["phase"] == "EP" for record in found.fit.records)  # from the ledger, not from the prior
    alone = fedppl.without(
        before, "client 1", certificate=False, progressbar=False, engine=engine(grid, ["client 0", "client 2"])
    )
    assert np.isnan(alone.distance)


def test_calibration_wants_clients_that_are_made_up(tmp_path: Any) -> None:
    model, clients = declared()
    with pytest.raises(DeclarationError, match="made-up clients"):
        fedppl.calibrate(model, None, PLAIN, data_sets=2, progressbar=False)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="the data are at the sites"):
        fedppl.calibrate(model, clients, PLAIN, data_sets=2, progressbar=False, engine=engine(grid_of(tmp_path, PLAIN)))
