"""What sites let out of their rows when a run is over, and what they do not."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose

pytest.importorskip("flwr")

from flwr.app import Message as FlowerMessage

import fedppl
from fedppl import DeclarationError, FederatedModel, Policy
from fedppl.contracts import Request
from fedppl.engine.guard import Ledger, Run, in_memory, in_store, let_out, tells
from fedppl.gaussian import Gaussian
from fedppl.local.target import pack_target
from fedppl.sites import CONCLUDE, conclusions
from fedppl.sites import node as _node
from fedppl.sites.conclusions import read_told
from fedppl.sites.decode import Malformed
from fedppl.storage import store
from fedppl.testing import normal_means
from tests.support import malformed, stored
from tests.support.fake_grid import FakeGrid, Node, engine_of, node, remember

TELLS = Policy(
    sums="optional",
    rows=0,
    few_rows=0,
    joint=True,
    parameters_per_row=math.inf,
    events=0,
    requests=math.inf,
    conclusions=("loo",),
)
BOTH = dataclasses.replace(TELLS, conclusions=("loo", "conflict"))
EP = fedppl.EP()


def nodes_of(folder: Path, model: Any, clients: Any, rules: Any = TELLS, algorithm: Any = EP) -> dict[int, Node]:
    def policy(config: Any) -> Policy:
        found = rules(config["client-id"]) if callable(rules) else rules
        assert isinstance(found, Policy)
        return found

    remember(model, clients)
    app = fedppl.Flower.client_app(
        model,
        algorithm,
        lambda config: clients[config["client-id"]],
        folder=lambda config: folder / str(config["client-id"]),
        policy=policy,
    )
    return {10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(clients)}


def fit(grid: FakeGrid, model: Any, algorithm: Any = EP) -> Any:
    engine = engine_of(grid, model, len(grid.nodes), deadline=60.0)
    return fedppl.fit(model, None, algorithm, engine=engine, progressbar=False, random_seed=1)


def refusals(folder: Path) -> list[str]:
    lines = stored.lines(folder)
    return [line["refused"] for line in lines if line.get("refused")]


def test_sites_tell_sums_over_rows_and_a_p_value_as_clients_here_do(tmp_path: Path) -> None:
    model, clients = normal_means(2)
    here = fedppl.fit(model, clients, EP, progressbar=False, random_seed=1)
    there = fit(FakeGrid(nodes_of(tmp_path, model, clients, BOTH)), model)
    expected, found = fedppl.loo(here, random_seed=here.seed), fedppl.loo(there)
    assert (found.rows, found.bad) == (expected.rows, expected.bad)
    assert_allclose([found.elpd, found.se, found.p_loo], [expected.elpd, expected.se, expected.p_loo], rtol=1e-6)
    assert_allclose(found.clients["elpd"], expected.clients["elpd"].loc[found.clients.index], rtol=1e-6)
    assert_allclose(fedppl.conflict(there)["p_value"], fedppl.conflict(here)["p_value"], atol=1e-12)
    table = fedppl.loo_compare({"one": there, "another": there})  # rows are not paired
    assert_allclose(table["elpd"], found.elpd)
    assert table["weight"].isna().all() and table["dse"].max() == pytest.approx(2 * found.se)


def test_who_does_not_tell_is_named(tmp_path: Path) -> None:
    model, clients = normal_means(2)
    silent = dataclasses.replace(TELLS, conclusions=("conflict",))
    rules = {"client 0": TELLS, "client 1": silent}
    found = fit(FakeGrid(nodes_of(tmp_path, model, clients, rules.get)), model)
    with pytest.raises(DeclarationError, match=r"\['client 1'\] are not here.*conclusions="):
        fedppl.loo(found)
    assert np.isnan(fedppl.conflict(found)["p_value"]).values.tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"requests": 8}, "requests: 8 answered"),
        ({"approval": lambda release: "values" in release.arrays or release.round > 0}, "approval: not given"),
    ],
)
def test_a_policy_counts_what_is_told_as_a_request(tmp_path: Path, changes: Any, told: str) -> None:
    model, clients = normal_means(2)
    if "requests" in changes:  # as many as the run itself has
        whole = fit(FakeGrid(nodes_of(tmp_path / "before", model, clients)), model)
        changes = {"requests": len(whole.records)}
        told = f"requests: {len(whole.records)} answered"
    found = fit(FakeGrid(nodes_of(tmp_path, model, clients, dataclasses.replace(TELLS, **changes))), model)
    assert found.status.ok
    assert all(refusals(tmp_path / name)[-1].startswith(told) for name in clients)
    assert not any(found.told.values())
    assert all(list((tmp_path / name).glob("*.nc")) for name in clients)  # its own posterior is there all the same


def test_nothing_is_told_of_a_run_that_was_not_answered_or_of_a_q_that_is_far(tmp_path: Path) -> None:
    """Whoever chooses q chooses where rows are looked at."""
    model, clients = normal_means(2)
    fit(FakeGrid(nodes_of(tmp_path, model, clients)), model)
    folder = tmp_path / "client 0"
    site = _node.Node("one", model, EP, lambda c: clients["client 0"], lambda c: "client 0", folder, 100, 4, TELLS)
    run = stored.lines(folder)[1]["run"]
    prior = model.enrol(clients, kernel=False)["client 0"].layout.prior

    def concluded(run: str, mean: float) -> Any:
        q = Gaussian(prior.precision @ np.array([mean]), prior.precision)
        texts = {"client_id": "client 0", "run": run, "seed": "1", "status": "converged"}
        return conclusions.conclude(site, {}, None, (pack_target(q, q, 0.0), texts))[0]

    assert not concluded("another", 0.0)
    assert refusals(folder)[-1].startswith("conclusion: no request of this run")
    assert not concluded(run, 0.0) and refusals(folder)[-1] == "conclusion: this run is over"
    folder = tmp_path / "other"
    folder.mkdir()
    site = site._replace(policy=dataclasses.replace(TELLS, distance=1e-3), folder=folder)
    with store.changing(folder) as here:
        guard = in_store(site.policy, here, "client 0")
        guard.write(Ledger(requests=1), {"event": "request"}, {("run", run): Run(1, "")})
    assert not concluded(run, 100.0) and refusals(folder)[-1].startswith("distance: ")


@pytest.mark.parametrize("beside", [("point", "move"), ("start", "pull", "weight")])
@pytest.mark.parametrize(
    "algorithm",
    [EP, fedppl.HM1(), fedppl.one_shot.Separate(), fedppl.one_shot.PrecisionWeighted()],
    ids=lambda one: str(one.name),
)
def test_what_is_drawn_is_what_the_policy_looked_at(algorithm: Any, beside: tuple[str, ...]) -> None:
    """The final message holds other names than requests do, and those of a request tell nothing of it."""
    model, clients = normal_means(2)
    client = model.enrol(clients, kernel=False)["client 0"]
    guard, prior = in_memory(TELLS, "client 0"), client.layout.prior
    for mean, told in ((0.0, ("loo",)), (1e3, ())):
        guard.write(Ledger(requests=1), {"event": "request"}, {("run", "r"): Run(1, "")})
        q = Gaussian(prior.precision @ np.array([mean]), prior.precision)
        message = {**pack_target(q, q, 0.0), **{name: np.zeros(1) for name in beside}}
        assert tells(guard, algorithm, client, Request("client 0", 0, 0, (1,), message, "r")) == told
    silent = algorithm._replace(disclosure=algorithm.disclosure._replace(concludes=None))
    assert tells(guard, silent, client, Request("client 0", 0, 0, (1,), pack_target(prior, prior, 0.0), "r")) == ()


def test_sites_of_correlated_clients_tell_too(tmp_path: Path) -> None:
    model, clients = normal_means(4)
    found = fit(FakeGrid(nodes_of(tmp_path, model, clients, BOTH, fedppl.HM1())), model, fedppl.HM1())
    assert fedppl.loo(found).rows == sum(len(data["y"]) for data in clients.values())


def test_no_p_values_from_cavities_that_are_not_of_all_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, clients = normal_means(3)
    algorithm = fedppl.one_shot.ConsensusMonteCarlo(draws=200)
    with caplog.at_level(logging.WARNING):
        found = fit(FakeGrid(nodes_of(tmp_path, model, clients, BOTH, algorithm)), model, algorithm)
    assert all(set(told) == {"loo"} for told in found.told.values())
    assert "client 0 has no 'conflict'" in caplog.text
    with pytest.raises(DeclarationError, match="without each client"):
        fedppl.conflict(found)


def test_p_values_that_nobody_gave_are_an_error(tmp_path: Path) -> None:
    model, clients = normal_means(2)
    found = fit(FakeGrid(nodes_of(tmp_path, model, clients)), model)
    with pytest.raises(DeclarationError, match=r'conclusions=\["conflict"\]'):
        fedppl.conflict(found)
    with pytest.raises(DeclarationError, match="sites have 199"):
        fedppl.conflict(found, replicates=500)


def test_what_was_told_is_still_there_when_a_finished_run_is_called_again(tmp_path: Path) -> None:
    """A site says once that a run is over, and nothing the second time; a lie about it ends nothing."""
    model, clients = normal_means(2)
    nodes, path = nodes_of(tmp_path, model, clients), tmp_path / "run.ckpt"

    def again(fault: Any = None) -> Any:
        engine = engine_of(FakeGrid(nodes, fault), model, 2, deadline=60.0)
        return fedppl.fit(model, None, EP, engine=engine, progressbar=False, random_seed=1, checkpoint=path)

    def fault(message: FlowerMessage, to: int) -> Any:
        def change(reply: FlowerMessage) -> FlowerMessage:
            reply.content.config_records["texts"]["refused"] = "x"
            return reply

        return change if message.metadata.message_type == CONCLUDE else None

    first = fedppl.loo(again())
    assert fedppl.loo(again(fault)).elpd == first.elpd == fedppl.loo(again()).elpd


def potential(y: Any) -> pm.Model:
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 3)
        pm.Potential("density", pm.logp(pm.Normal.dist(mu, 1), y).sum())
    return model


def differences(y: Any, base: Any) -> pm.Model:
    with pm.Model() as model:
        y, base, mu = pm.Data("y", y), pm.Data("base", base), pm.Normal("mu", 0, 3)
        pm.Normal("obs", mu, 1, observed=y - base)
    return model


@pytest.mark.parametrize(("builder", "told"), [(potential, set()), (differences, {"loo"})])
def test_what_cannot_be_told_costs_neither_the_rest_nor_the_posterior(
    builder: Any, told: set[str], tmp_path: Path
) -> None:
    rng, names = np.random.default_rng(0), ("y", "base") if builder is differences else ("y",)
    clients = {f"client {k}": {name: rng.normal(size=9) for name in names} for k in range(2)}
    model = FederatedModel(builder, ["mu"])
    found = fit(FakeGrid(nodes_of(tmp_path, model, clients, BOTH)), model)
    assert all(set(found.told.get(name, {})) == told for name in clients)
    assert all(list((tmp_path / name).glob("*.nc")) for name in clients)


def test_a_conclusion_that_is_not_approved_gives_back_what_it_was_counted_as() -> None:
    model, clients = normal_means(2)
    client = model.enrol(clients, kernel=False)["client 0"]
    algorithm = fedppl.PrivateEP(clip=1.0, noise_multiplier=2.0, releases=2)
    guard = in_memory(dataclasses.replace(TELLS, approval=lambda release: False), "client 0")
    before = Ledger(requests=1, spent=0.25)
    guard.write(before, {"event": "request"}, {("run", "r"): Run(1, "")})
    message = pack_target(client.layout.prior, client.layout.prior, 0.0)
    request = Request("client 0", 0, 0, (1,), message, "r")
    assert tells(guard, algorithm, client, request) == ("loo",)
    assert not let_out(guard, client, request, {"loo": np.zeros(7)})
    assert guard.read() == before


def test_points_of_a_posterior_lie_where_points_may_after_some_were_answered(tmp_path: Path) -> None:
    model, clients = normal_means(2)
    client = model.enrol(clients, kernel=False)["client 0"]
    guard = in_memory(TELLS, "client 0")
    for answered, points, told in ((0, [[0.0]], ()), (512, [[0.0]], ("loo",)), (512, [[1e9]], ())):
        guard.write(Ledger(requests=1, points=answered), {"event": "request"}, {("run", "r"): Run(1, "")})
        message = pack_target(client.layout.prior, client.layout.prior, 0.0) | {"points": np.array(points)}
        assert tells(guard, EP, client, Request("client 0", 0, 0, (1,), message, "r")) == told


def test_a_budget_of_epsilon_has_no_conclusions() -> None:
    with pytest.raises(DeclarationError, match="no known ε"):
        Policy(epsilon=1.0, conclusions=("loo",))


def test_a_lie_about_rows_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, clients = normal_means(2)

    def fault(message: FlowerMessage, to: int) -> Any:
        def change(reply: FlowerMessage) -> FlowerMessage:
            reply.content.array_records["arrays"]["loo"].data = malformed.npy([-10.0, 1.0, 20.0, 5.0, 0.0, 0.0, 90.0])
            return reply

        return change if message.metadata.message_type == CONCLUDE and to == 10 else None

    with caplog.at_level(logging.WARNING):
        found = fit(FakeGrid(nodes_of(tmp_path, model, clients), fault), model)
    assert "client 0: what it told of its rows cannot be used: 'loo': of 20 rows 5" in caplog.text
    with pytest.raises(DeclarationError, match=r"\['client 0'\]"):
        fedppl.loo(found)


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        ({"rows": np.zeros(3)}, "'rows', expected one of"),
        ({"conflict": np.zeros(3)}, "'conflict' has shape"),
        ({"conflict": np.array([0.0, 1.0])}, "p-value 0"),
        ({"conflict": np.array([0.5, np.inf])}, "not finite"),
        ({"loo": np.array([-10.0, 1.0, 2.5, 2.5, 0.0, 0.0, 90.0])}, "numbers of rows"),
        ({"loo": np.array([-10.0, 1.0, 2.0, 2.0, 0.0, 0.0, 9.0])}, "squares"),
    ],
)
def test_what_cannot_be_is_refused(told: Any, rule: str) -> None:
    with pytest.raises(Malformed, match=rule):
        read_told(told)
