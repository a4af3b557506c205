"""Clients that leave, join or bring other rows: from the ledger of a fit, against a fit from the prior."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl import DeclarationError, gaussian
from fedppl.results import diagnostics
from fedppl.testing import normal_means
from tests.support import problems

EXACT = fedppl.EP(tolerance=1e-3)


def fit(model: Any, clients: Any, algorithm: Any = EXACT, **settings: Any) -> fedppl.Fit:
    return fedppl.fit(model, clients, algorithm, progressbar=False, **{"random_seed": 1, **settings})


def apart(one: fedppl.Fit, other: fedppl.Fit) -> float:
    sd = gaussian.standard_deviations(other.posterior)
    shift = np.abs(gaussian.mean(one.posterior) - gaussian.mean(other.posterior)) / sd
    return float(max(shift.max(), np.abs(np.log(gaussian.standard_deviations(one.posterior) / sd)).max()))


@problems.of_q
@pytest.mark.parametrize("problem", [normal_means, problems.regression, problems.schools])
def test_without_a_client_is_a_fit_that_never_saw_it(problem: Any) -> None:
    model, clients = problem()
    name = list(clients)[1]
    before = fit(model, clients)
    found = fedppl.without(before, name, progressbar=False)
    never = fit(model, {k: data for k, data in clients.items() if k != name})
    assert diagnostics.matched(found.fit.status, found.fit.message) and found.left == (name,)
    assert found.distance == pytest.approx(apart(found.fit, never))
    assert found.distance < 0.01 < apart(before, never)
    assert all(record.info["phase"] == "EP" for record in found.fit.records)  # no search from the prior
    assert any("checkpoints" in held for held in found.still_held)


def test_the_fit_that_never_saw_a_client_is_another_one_with_a_checkpoint_too(tmp_path: Any) -> None:
    before = fit(*problems.regression())
    name = before.client_ids[1]
    plain = fedppl.without(before, name, progressbar=False)
    kept = fedppl.without(before, name, progressbar=False, checkpoint=tmp_path / "run")
    assert kept.distance == pytest.approx(plain.distance) and kept.distance > 0


def test_clients_join_and_bring_other_rows() -> None:
    model, clients = problems.regression()
    first, *others = clients
    before = fit(model, {k: clients[k] for k in others})
    after = fit(model, clients, start=before)
    assert apart(after, fit(model, clients)) < 0.01
    fewer = {**clients, first: {k: v[:-1] for k, v in clients[first].items()}}
    assert apart(fit(model, fewer, start=after), fit(model, fewer)) < 0.01


def test_a_fit_that_begins_at_its_own_end_stays_there() -> None:
    model, clients = problems.regression()
    before = fit(model, clients)
    again = fit(model, clients, start=before)
    assert len(again.records) < len(before.records)
    assert_allclose(gaussian.mean(again.posterior), gaussian.mean(before.posterior), rtol=1e-2, atol=1e-3)


def test_what_cannot_be_taken_over_is_refused() -> None:
    model, clients = normal_means(3)
    before = fit(model, clients)
    for settings, message in (
        ({"start": 3}, "start=3 must be a fit"),
        ({"algorithm": fedppl.averaging.FedAvg(learning_rate=0.01), "start": before}, "begins anew each time"),
        (
            {"algorithm": fedppl.EP(structure="diagonal"), "start": fit(*problems.regression())},
            "another prior or shape",
        ),
    ):
        with pytest.raises(DeclarationError, match=message):
            fit(model, clients, **settings)
    for gone, message in (("client 9", "client 9"), (list(clients), "nobody is left"), ([], "none"), (0, "clients=0")):
        with pytest.raises(DeclarationError, match=message):
            fedppl.without(before, gone)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="fit is NoneType"):
        fedppl.without(None, "client 0")  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="are those of the fit"):
        fedppl.without(before, "client 0", start=before)
    with pytest.raises(DeclarationError, match="keeps no ledger"):
        fedppl.without(fit(model, clients, fedppl.averaging.FedAvg(learning_rate=0.01), rounds=2), "client 0")


def test_another_structure_is_refused() -> None:
    model, clients = problems.regression()
    with pytest.raises(DeclarationError, match="another structure="):
        fit(model, clients, fedppl.EP(structure="diagonal"), start=fit(model, clients))
