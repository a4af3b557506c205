"""The Flower engine against a grid in this process: same numbers, enrolment, faults, what leaves a site."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pymc as pm
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord
from flwr.app import Message as FlowerMessage

import fedppl
from fedppl import Algorithm, DeclarationError, FederatedModel, audit, gaussian
from fedppl.engine.policy import NO_RULES
from fedppl.flower.messages import to_content, unread
from fedppl.model.template import compilations
from fedppl.models import fedlmc_ss
from fedppl.sites import ASK, HELLO, parcel_of
from fedppl.sites.engine import SitesEngine
from fedppl.testing import normal_means
from fedppl.types import Status
from tests.support import problems, stored
from tests.support.fake_grid import FakeGrid, Node, arrays_of, engine_of, node, remember
from tests.support.markers import slow_but


def site_app(
    model: FederatedModel, data: Mapping[str, Any], algorithm: Algorithm | None = None, **keywords: Any
) -> Any:
    return fedppl.Flower.client_app(
        model, algorithm or fedppl.EP(), lambda config: data[config["client-id"]], **{"policy": NO_RULES, **keywords}
    )


def nodes_of(model: FederatedModel, data: Mapping[str, Any], **keywords: Any) -> dict[int, Node]:
    """One app, a node a client."""
    remember(model, data)
    app = site_app(model, data, **keywords)
    return {10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(data)}


def fit(
    grid: FakeGrid, model: FederatedModel, clients: Any, algorithm: Algorithm | None = None, **keywords: Any
) -> Any:
    engine = engine_of(grid, model, clients, grace=keywords.pop("grace", 0.01))
    return fedppl.fit(
        model, None, algorithm or fedppl.EP(), engine=engine, **{"progressbar": False, "random_seed": 1, **keywords}
    )


# --- the same numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem", slow_but([normal_means, problems.regression, problems.noise], normal_means, problems.regression)
)
def test_equal_seeds_give_the_embedded_engines_numbers(problem: Callable[[], Any]) -> None:
    model, clients = problem()
    here = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    there = fit(FakeGrid(nodes_of(model, clients)), model, len(clients))
    assert there.status is here.status
    assert there.client_ids == tuple(sorted(clients))
    q, p = here.posterior, there.posterior
    sd = gaussian.standard_deviations(q)
    assert_allclose(gaussian.mean(p), gaussian.mean(q), atol=1e-8 * sd.min())
    assert_allclose(gaussian.standard_deviations(p), sd, rtol=1e-8)
    for name in here.idata["posterior"].data_vars:
        assert_allclose(there.idata["posterior"][name], here.idata["posterior"][name], rtol=1e-6, atol=1e-9)
    assert there.idata["posterior"]["mu" if "mu" in model.shared else model.shared[0]].dims == (
        here.idata["posterior"]["mu" if "mu" in model.shared else model.shared[0]].dims
    )


def test_sites_that_allow_points_add_up_to_what_clients_here_do() -> None:
    model, clients = problems.noise()
    algorithm = fedppl.Sums(starts=1)
    here = fedppl.fit(model, clients, algorithm, progressbar=False, random_seed=1)
    there = fit(FakeGrid(nodes_of(model, clients, algorithm=algorithm)), model, len(clients), algorithm)
    assert there.status is here.status is Status.CONVERGED
    assert there.log_evidence[:2] == pytest.approx(here.log_evidence[:2], rel=1e-8)
    for name in here.idata["posterior"].data_vars:
        assert_allclose(there.idata["posterior"][name], here.idata["posterior"][name], rtol=1e-6, atol=1e-9)


@problems.few_rounds
@pytest.mark.slow
def test_curves_are_shared_by_sites_that_keep_their_coefficients(tmp_path: Path) -> None:
    """With 0/1 indicators among the shared variables, which a site reads back for the server."""
    model, units = fedlmc_ss.two_curves()
    algorithm = fedppl.curves.Ascent(warmup=2)
    here = fedppl.fit(model, units, algorithm, rounds=6, progressbar=False, random_seed=1)
    folder = {"folder": lambda config: tmp_path / config["client-id"], "draws": 50, "chains": 2}
    there = fit(FakeGrid(nodes_of(model, units, algorithm=algorithm, **folder)), model, 2, algorithm, rounds=6)
    assert_allclose(there.state.shared.mean, here.state.shared.mean, rtol=1e-8, atol=1e-10)
    assert_allclose(there.idata["posterior"]["included"], here.idata["posterior"]["included"])
    assert there.layout.binary == ("included",)
    selection = fedppl.curves.selection(there)
    assert_allclose(selection["lengthscale"], fedppl.curves.selection(here)["lengthscale"], rtol=1e-8)
    with pytest.raises(DeclarationError, match="not in this process"):
        fedppl.curves.predict(there, "a", {"X": [0.5]})
    with xr.open_dataset(tmp_path / "a" / "a.nc", group="posterior", engine="h5netcdf") as drawn:
        assert drawn["w"].sizes == {"chain": 2, "draw": 50, "latent": 2}


@pytest.mark.parametrize("problem", slow_but([problems.regression, problems.noise], problems.regression))
def test_a_site_known_by_its_authenticated_name_draws_the_same_points(problem: Callable[[], Any]) -> None:
    """Random streams and Sobol points depend on the client's id, which such a site learns from the server."""
    model, clients = problem()
    app = fedppl.Flower.client_app(model, fedppl.EP(), lambda config: clients[config["secret"]], policy=NO_RULES)
    grid = FakeGrid({i: node(app, i, name, secret=name) for i, name in enumerate(clients)})
    here = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    there = fit(grid, model, list(clients))
    assert_allclose(there.posterior.linear, here.posterior.linear, rtol=1e-8)
    assert_allclose(there.posterior.precision, here.posterior.precision, rtol=1e-8)


@problems.few_rounds
def test_the_same_clients_are_asked_whatever_order_they_enrol_in() -> None:
    model, clients = normal_means(5)
    algorithm = fedppl.EP()
    here = fedppl.fit(model, clients, algorithm, participation=2, rounds=4, progressbar=False, random_seed=1)
    turned = dict(reversed(nodes_of(model, clients).items()))
    there = fit(FakeGrid(turned), model, 5, participation=2, rounds=4)
    assert [set(r.asked) for r in here.records] == [set(r.asked) for r in there.records]


def test_the_app_can_be_copied_to_workers_and_compiles_once_there() -> None:
    model, clients = normal_means(4)
    copied = cloudpickle.loads(cloudpickle.dumps(site_app(model, clients)))
    grid = FakeGrid({i: node(copied, i, **{"client-id": name}) for i, name in enumerate(clients)})
    before = compilations()
    result = fit(grid, model, 4)
    assert result.status is Status.CONVERGED
    assert compilations() <= before + 1


# --- enrolment ------------------------------------------------------------------------------------------------


def test_missing_sites_are_named() -> None:
    model, clients = normal_means(2)
    with pytest.raises(DeclarationError, match="only 2 of 3 sites enrolled within 0.2 s.*raise wait="):
        fit(FakeGrid(nodes_of(model, clients)), model, 3)
    with pytest.raises(DeclarationError, match=r"'client 0'; missing \['elsewhere'\].*look at their logs"):
        fit(FakeGrid(nodes_of(model, clients)), model, ["client 0", "elsewhere"])


def other_prior(y: Any) -> pm.Model:
    with pm.Model() as model:
        values = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 11)
        theta = pm.Normal("theta", mu, 0.5)
        pm.Normal("obs", theta, 1, observed=values)
    return model


def other_shape(y: Any) -> pm.Model:
    with pm.Model() as model:
        values = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 10, shape=2)
        theta = pm.Normal("theta", mu.sum(), 0.5)
        pm.Normal("obs", theta, 1, observed=values)
    return model


def broken(y: Any) -> pm.Model:
    raise RuntimeError(f"patient {y[0]} is missing")


REFUSED: dict[str, tuple[Any, str]] = {
    "settings": (lambda m, d: site_app(m, d, fedppl.EP(damping=0.5)), "damping 0.5 instead of 1.0"),
    "prior": (lambda m, d: site_app(FederatedModel(other_prior, ["mu"]), d), "its shared prior is another"),
    "shape": (lambda m, d: site_app(FederatedModel(other_shape, ["mu"]), d), r"'mu' has shape \[2\], at"),
    "names": (lambda m, d: site_app(FederatedModel(other_prior, ["theta"]), d), "another|shares|DeclarationError"),
    "builder": (lambda m, d: site_app(FederatedModel(broken, ["mu"]), d), "DataError: the reason is in the site's own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_site_that_runs_something_else_is_refused_with_the_difference(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, clients = normal_means(3)
    make, reason = REFUSED[case]
    nodes = nodes_of(model, clients)
    nodes[12] = node(make(model, clients), 12, **{"client-id": "client 2"})
    with caplog.at_level(logging.ERROR), pytest.raises(DeclarationError, match=f"'client 2' was refused: .*{reason}"):
        fit(FakeGrid(nodes), model, 3)
    assert "client client 2 refused" in caplog.text


def test_no_value_of_the_data_leaves_a_site_that_cannot_take_part() -> None:
    model, clients = normal_means(2)
    grid = FakeGrid({1: node(site_app(FederatedModel(broken, ["mu"]), clients), 1, **{"client-id": "client 0"})})
    with pytest.raises(DeclarationError) as caught:
        fit(grid, model, 1)
    told = str(caught.value) + "".join(str(r.content.config_records) for r in grid.replies)
    assert "patient" not in told


def test_a_site_without_an_id_is_refused() -> None:
    model, clients = normal_means(1)
    app = fedppl.Flower.client_app(model, fedppl.EP(), lambda config: clients["client 0"], policy=NO_RULES)
    with pytest.raises(DeclarationError, match='has no id; start it with --node-config "client-id='):
        fit(FakeGrid({1: node(app, 1)}), model, 1)


@problems.few_rounds
def test_the_authenticated_name_is_the_id_and_cannot_be_contradicted() -> None:
    model, clients = normal_means(2)
    app = fedppl.Flower.client_app(model, fedppl.EP(), lambda config: clients["client 0"], policy=NO_RULES)
    result = fit(FakeGrid({1: node(app, 1, "north"), 2: node(app, 2, "south")}), model, ["north", "south"], rounds=1)
    assert result.client_ids == ("north", "south")
    liar = FakeGrid({1: node(app, 1, "north"), 2: node(app, 2, "south", **{"client-id": "north"})})
    with pytest.raises(DeclarationError, match="'north' was refused: its authenticated name is 'south'"):
        fit(liar, model, ["north", "south"])


def test_two_live_sites_with_one_id(caplog: pytest.LogCaptureFixture) -> None:
    """The second is refused while the first lives, and takes over when it has gone."""
    model, clients = normal_means(2)
    grid = FakeGrid(nodes_of(model, clients))
    app = grid.nodes[10].app
    grid.nodes[99] = node(app, 99, **{"client-id": "client 0"})

    def rivals() -> list[int]:  # whoever answers first is enrolled
        found = re.search(r"nodes (\d+) and (\d+) are both live with this id", caplog.text)
        return [int(number) for number in found.groups()] if found else []

    def first_leaves(step: fedppl.Round) -> None:
        if step.number == 2:
            del grid.nodes[rivals()[0]]

    with caplog.at_level(logging.ERROR):
        result = fit(grid, model, ["client 0", "client 1"], callback=first_leaves)
    first, second = rivals()
    assert {first, second} == {10, 99}
    assert result.status is Status.CONVERGED
    assert not any(record.failures for record in result.records)
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == ASK]
    assert asked.count(first) == 2 and asked.count(second) == len(result.records) - 2


def test_a_newcomer_waits_for_the_next_run(caplog: pytest.LogCaptureFixture) -> None:
    model, clients = normal_means(3)
    nodes = nodes_of(model, clients)
    late = nodes.pop(12)
    grid = FakeGrid(nodes)

    def join(step: fedppl.Round) -> None:
        grid.nodes[12] = late

    with caplog.at_level(logging.ERROR):
        result = fit(grid, model, 2, callback=join)
    assert result.client_ids == ("client 0", "client 1")
    assert "it can enrol in the next run" in caplog.text


# --- faults ---------------------------------------------------------------------------------------------------


def only(kind: str, node_id: int, times: int, outcome: Any) -> Callable[[FlowerMessage, int], Any]:
    """Strike the first messages of a kind to one node."""
    left = [times]

    def fault(message: FlowerMessage, to: int) -> Any:
        if message.metadata.message_type != kind or to != node_id or left[0] == 0:
            return None
        left[0] -= 1
        return outcome

    return fault


def with_array(name: str, value: Any) -> Callable[[FlowerMessage], FlowerMessage]:
    def change(reply: FlowerMessage) -> FlowerMessage:
        arrays = {**arrays_of(reply), name: np.asarray(value)}
        reply.content["arrays"] = ArrayRecord({key: Array(array) for key, array in arrays.items()})
        return reply

    return change


def with_text(name: str, value: str) -> Callable[[FlowerMessage], FlowerMessage]:
    def change(reply: FlowerMessage) -> FlowerMessage:
        reply.content.config_records["texts"][name] = value
        return reply

    return change


def without_records(reply: FlowerMessage) -> FlowerMessage:
    for name in list(reply.content):
        del reply.content[name]
    return reply


class Strike(NamedTuple):
    outcome: Any
    reason: str


FAULTS = {
    "lost": Strike("lost", "no reply within the deadline of 0.05 s"),
    "raised": Strike(2, "raised an exception; see the site's log"),
    "gone": Strike(5, "the site is not reachable"),
    "crashed": Strike(8, "the site's app crashed"),
    "NaN": Strike(with_array("gradient", [np.nan]), "'gradient' is not all finite"),
    "shape": Strike(with_array("hessian", np.eye(2)), "'hessian' has shape"),
    "extra": Strike(with_array("rows", np.ones(3)), "it holds"),
    "fingerprint": Strike(with_text("fingerprint", "beef"), "fingerprint beef differs"),
    "nonce": Strike(with_text("nonce", "7"), "reply to request 7, but the latest is"),
    "client": Strike(with_text("client_id", "client 1"), "reply of client 'client 1'"),
    "info": Strike(with_text("info", "{"), "cannot be read"),
    "empty": Strike(without_records, "cannot be read"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_skips_one_client_for_one_round(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, clients = normal_means(3)
    strike = FAULTS[name]
    free = fit(FakeGrid(nodes_of(model, clients)), model, 3)
    grid = FakeGrid(nodes_of(model, clients), only(ASK, 10, 1, strike.outcome))
    with caplog.at_level(logging.WARNING):
        result = fit(grid, model, 3)
    failures = [dict(record.failures) for record in result.records]
    assert list(failures[0]) == ["client 0"]
    assert strike.reason in failures[0]["client 0"]
    assert "secret" not in caplog.text + str(failures)
    assert result.status is Status.CONVERGED
    distance = gaussian.mean(result.posterior) - gaussian.mean(free.posterior)
    assert_allclose(distance / gaussian.standard_deviations(free.posterior), 0, atol=0.02)


def test_the_servers_log_tells_phase_change_and_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Of each round, and of each site whose answer has come."""
    model, clients = normal_means(3)
    heard: list[list[str]] = []
    exchange = SitesEngine.exchange

    def listening(self: Any, requests: Any, deadline: Any, tell: Any) -> Any:
        heard.append([])
        return exchange(self, requests, deadline, lambda name: (heard[-1].append(name), tell(name)))

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, logger="fedppl"):
        patch.setattr(SitesEngine, "exchange", listening)
        result = fit(FakeGrid(nodes_of(model, clients)), model, 3)
    assert [sorted(names) for names in heard] == [sorted(clients)] * len(result.records)
    lines = [one.getMessage() for one in caplog.records if one.name == "fedppl.run.one_round"]
    assert len(lines) == len(result.records) and all("3 of 3 replies in " in line for line in lines)
    assert any("EP, change" in line and "(tolerance 0.01)" in line for line in lines)


def test_a_late_reply_is_dropped_before_its_site_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    model, clients = normal_means(2)
    grid = FakeGrid(nodes_of(model, clients), only(ASK, 10, 1, "late"))

    def arrive(step: fedppl.Round) -> None:
        if step.number == 1:
            threading.Timer(0.1, grid.release).start()

    with caplog.at_level(logging.INFO):
        result = fit(grid, model, 2, callback=arrive, grace=20.0)
    reasons = [record.failures.get("client 0", "") for record in result.records]
    assert "no reply within the deadline" in reasons[0]
    assert not any(reasons[1:])
    assert "client client 0: a late reply was dropped" in caplog.text
    assert result.status is Status.CONVERGED


def test_a_reply_that_comes_after_its_request_expired_counts_for_nothing() -> None:
    model, clients = normal_means(2)
    grid = FakeGrid(nodes_of(model, clients), only(ASK, 10, 1, "late"))
    free = fit(FakeGrid(nodes_of(model, clients)), model, 2)
    result = fit(grid, model, 2, callback=lambda step: grid.release())
    assert [set(record.failures) for record in result.records[:2]] == [{"client 0"}, set()]
    assert_allclose(result.posterior.linear, free.posterior.linear, rtol=1e-6)


def test_a_request_for_another_client_is_not_answered() -> None:
    model, clients = normal_means(2)
    app = site_app(model, clients)
    one = node(app, 1, **{"client-id": "client 0"})
    parcel = (
        {"point": np.zeros(1), "prior_share": np.array(0.0)},
        {"client_id": "client 1", "nonce": "1", "round": "1", "seed": "[1]", "run": "x", "report": "1"},
    )
    message = FlowerMessage(to_content(*parcel), dst_node_id=1, message_type=ASK, ttl=9.0)
    assert parcel_of(unread(app(message, one.context)))[1]["failure"] == (
        "refused by its site; the reason is in the site's own log"
    )


def test_a_restarted_site_comes_back_with_another_node_id() -> None:
    model, clients = normal_means(3)
    grid = FakeGrid(nodes_of(model, clients))

    def restart(step: fedppl.Round) -> None:
        if step.number == 1:
            del grid.nodes[10]
        if step.number == 2:
            grid.nodes[77] = node(site_app(model, clients), 77, **{"client-id": "client 0"})

    free = fit(FakeGrid(nodes_of(model, clients)), model, 3)
    result = fit(grid, model, 3, callback=restart)
    assert result.records[1].failures == {"client 0": "its site is not connected"}
    assert not any(record.failures for record in result.records[3:])
    assert_allclose(result.posterior.linear, free.posterior.linear, rtol=1e-6)


# --- what a site keeps, and what it tells ---------------------------------------------------------------------


def counting() -> Algorithm:
    """EP whose clients count their requests in personal state, and tell the count as a diagnostic."""
    inner = fedppl.EP(tolerance=1e-12)

    def update_client(client: Any, personal: Any, message: Any, rng: Any) -> Any:
        update = inner.update_client(client, None, message, rng)
        count = 1 if personal is None else personal + 1
        return update._replace(personal=count, info={**update.info, "count": float(count)})

    return inner._replace(update_client=update_client)


def counts(result: Any, client_id: str) -> list[float]:
    return [record.infos[client_id]["count"] for record in result.records if client_id in record.infos]


@problems.few_rounds
def test_personal_state_lives_in_the_nodes_context_and_dies_with_it() -> None:
    model, clients = normal_means(2)
    app = site_app(model, clients, counting())
    grid = FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(clients)})

    def restart(step: fedppl.Round) -> None:
        if step.number == 2:
            grid.nodes[10] = node(app, 10, **{"client-id": "client 0"})

    result = fit(grid, model, 2, counting(), rounds=4, callback=restart)
    assert counts(result, "client 0")[:4] == [1, 2, 1, 2]
    assert counts(result, "client 1")[:4] == [1, 2, 3, 4]
    again = fit(grid, model, 2, counting(), rounds=1)  # another run does not find it
    assert counts(again, "client 1")[0] == 1


@problems.few_rounds
def test_a_folder_keeps_personal_state_over_restarts_and_takes_the_sites_posterior(tmp_path: Path) -> None:
    pytest.importorskip("h5netcdf")
    model, clients = normal_means(2)
    app = site_app(
        model, clients, counting(), folder=lambda config: tmp_path / config["client-id"], draws=400, chains=2
    )
    nodes = {10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(clients)}
    grid = FakeGrid(nodes)

    def restart(step: fedppl.Round) -> None:
        grid.nodes[10] = node(app, 10, **{"client-id": "client 0"})

    result = fit(grid, model, 2, counting(), rounds=5, callback=restart)
    assert counts(result, "client 0") == [1, 2, 3, 4, 5][: len(result.records)]
    mean, variance = problems.normal_means_theta(
        clients["client 0"]["y"], *problems.normal_means_posterior({"client 1": clients["client 1"]})
    )
    with xr.open_dataset(tmp_path / "client 0" / "client%200.nc", group="posterior", engine="h5netcdf") as drawn:
        theta = drawn["theta"].values.ravel()
        assert drawn.attrs["status"] == result.status.value
    assert theta.size == 800
    assert abs(theta.mean() - mean) < 5 * np.sqrt(variance / 800)
    assert not list(tmp_path.glob("*/*.partial"))


@problems.few_rounds
def test_a_damaged_personal_file_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, clients = normal_means(1)
    app = site_app(model, clients, counting(), folder=tmp_path)
    grid = FakeGrid({10: node(app, 10, **{"client-id": "client 0"})})

    def damage(step: fedppl.Round) -> None:
        if step.number == 1:
            (name,) = (name for name in stored.names(tmp_path) if name.endswith(".personal"))
            stored.alter(tmp_path, name, lambda raw: raw[:-5])

    with caplog.at_level(logging.WARNING):
        result = fit(grid, model, 1, counting(), rounds=3, callback=damage)
    assert counts(result, "client 0")[:3] == [1, 1, 2]
    assert "starts with blank personal state" in caplog.text


@problems.few_rounds
def test_a_privacy_budget_outlives_runs_and_a_damaged_one_is_not_started_again(tmp_path: Path) -> None:
    model, clients = normal_means(2)
    algorithm = fedppl.PrivateEP(clip=1.0, noise_multiplier=5.0, releases=3)
    with pytest.raises(DeclarationError, match="PrivateEP counts what a site has released.*give client_app a folder="):
        site_app(model, clients, algorithm)
    app = site_app(model, clients, algorithm, folder=lambda config: tmp_path / config["client-id"])
    grid = FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(clients)})
    first = fit(grid, model, 2, algorithm, rounds=2)
    assert not any(record.failures for record in first.records)
    second = fit(grid, model, 2, algorithm, rounds=2)  # another run has one release left
    assert not second.records[0].failures
    assert all("releases=3 of this client are used up" in reason for reason in second.records[1].failures.values())
    assert set(second.records[1].failures) == set(clients)
    stored.alter(tmp_path / "client 0", "client 0.lasting", lambda raw: raw[:-3])
    third = fit(grid, model, 2, algorithm, rounds=1)
    assert third.records[0].failures["client 0"] == "refused by its site; the reason is in the site's own log"


def test_a_site_draws_no_posterior_from_a_q_that_never_arrived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, clients = problems.regression()
    grid = FakeGrid(nodes_of(model, clients, folder=tmp_path))
    with caplog.at_level(logging.WARNING), pytest.warns(fedppl.ConvergenceWarning):
        result = fit(grid, model, len(clients), participation=1, callback=lambda step: True)
    assert not list(tmp_path.glob("*.nc")) and "not asked to draw their posteriors" in caplog.text
    assert "posterior" not in result.idata
    with pytest.raises(fedppl.NotConvergedError, match="not at an end.*unconverged=True"):
        _ = result.posterior


@problems.few_rounds
@pytest.mark.parametrize("kept", ["folder", "context"])
def test_other_data_at_a_site_are_refused_for_the_run_that_had_others(kept: str, tmp_path: Path) -> None:
    """The server dies after a round and goes on from its checkpoint; one site has other rows by then."""
    model, clients = normal_means(2)
    path = tmp_path / "run.ckpt"
    folder = {"folder": lambda config: tmp_path / config["client-id"]} if kept == "folder" else {}
    nodes = nodes_of(model, clients, **folder)
    fit(FakeGrid(nodes), model, 2, callback=lambda step: True, checkpoint=path)
    others = {**clients, "client 1": {"y": clients["client 1"]["y"] + 1.0}}
    app = site_app(model, others, **folder)
    grid = FakeGrid({node_id: one._replace(app=app) for node_id, one in nodes.items()})
    rest = fit(grid, model, 2, callback=lambda step: step.number == 3, checkpoint=path)
    assert [set(record.failures) for record in rest.records] == [set(), {"client 1"}, {"client 1"}]
    assert "refused by its site" in rest.records[1].failures["client 1"]
    again = fit(grid, model, 2, rounds=1)  # another run takes them
    assert not again.records[0].failures
    if kept == "folder":
        assert sum(name.endswith(".data") for name in stored.names(tmp_path / "client 1")) == 2


def test_other_data_at_a_site_draw_no_posterior_of_a_finished_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, clients = normal_means(2)
    path = tmp_path / "run.ckpt"
    folder = {"folder": lambda config: tmp_path / config["client-id"]}
    nodes = nodes_of(model, clients, **folder)
    with pytest.MonkeyPatch.context() as patched:  # the server dies before it has told them that the run is over
        patched.setattr(SitesEngine, "conclude", lambda *arguments: {})
        first = fit(FakeGrid(nodes), model, 2, checkpoint=path)
    app = site_app(model, {**clients, "client 1": {"y": clients["client 1"]["y"] * 10}}, **folder)
    grid = FakeGrid({node_id: one._replace(app=app) for node_id, one in nodes.items()})
    with caplog.at_level(logging.ERROR):  # at the site alone: the server is not told what data do
        again = fit(grid, model, 2, checkpoint=path)
    assert again.status is first.status is Status.CONVERGED
    assert "client 1 drew no posterior" in caplog.text and "client 0 drew" not in caplog.text
    assert len(list(tmp_path.glob("*/*.nc"))) == 1


@problems.few_rounds
def test_rows_local_variables_and_exceptions_texts_never_leave() -> None:
    secret = 31.4159
    model, clients = normal_means(2)
    clients["client 0"]["y"][0] = secret

    def update_client(client: Any, personal: Any, message: Any, rng: Any) -> Any:
        raise ValueError(f"patient with {client.arrays['y'][0]}")

    algorithm = fedppl.EP()._replace(update_client=update_client)
    grid = FakeGrid(nodes_of(model, clients, algorithm=algorithm))
    result = fit(grid, model, 2, algorithm, rounds=1)
    assert result.records[0].failures == {"client 0": "ValueError", "client 1": "ValueError"}
    assert "31.4" not in str(result.records) + "".join(str(r.content.config_records) for r in grid.replies)
    assert result.status is Status.STALLED
    hellos = [r for r in grid.replies if r.metadata.message_type == HELLO]
    assert {name for r in hellos for name in arrays_of(r)} == {"prior_linear", "prior_precision", "prior_density"}
    assert "theta" not in "".join(str(r.content.config_records) for r in hellos)


@problems.few_rounds
def test_local_coords_stay_at_the_site() -> None:
    """Row labels may be patients' names."""

    def build(y: Any) -> pm.Model:
        with pm.Model(coords={"patient": ["Ann", "Bob"], "arm": ["a", "b"]}) as model:
            values = pm.Data("y", y)
            mu = pm.Normal("mu", 0, 10, dims="arm")
            theta = pm.Normal("theta", mu.sum(), 0.5, dims="patient")
            pm.Normal("obs", theta, 1, observed=values)
        return model

    model = FederatedModel(build, ["mu"])
    grid = FakeGrid(nodes_of(model, {"x": {"y": np.zeros(2)}}))
    result = fit(grid, model, 1)
    assert list(result.idata["posterior"].coords["arm"].values) == ["a", "b"]
    assert "Ann" not in "".join(str(r.content.config_records) for r in grid.replies)


def test_a_sites_posterior_is_not_at_the_server() -> None:
    model, clients = normal_means(2)
    result = fit(FakeGrid(nodes_of(model, clients)), model, 2)
    with pytest.raises(DeclarationError, match=r"is a site of its own.*folder= of its client_app"):
        result.client("client 0")
    assert "theta" in result.new_client({"y": np.ones(3)})["posterior"]  # but data that are here can be used


@problems.few_rounds
def test_a_server_app_takes_its_settings_from_the_run_config() -> None:
    model, clients = normal_means(2)
    seen: list[Any] = []
    algorithm = fedppl.EP(warm_start=False)
    app = fedppl.Flower.server_app(
        model,
        algorithm,
        clients=99,
        example_data={"y": [0.0, 1.0]},
        rounds=20,
        on_fit=lambda result, context: seen.append(result),
    )
    context = node(site_app(model, clients), 0).context
    context.run_config = {"clients": 2, "rounds": 1, "random_seed": 5, "checkpoint": "", "wait": 1.0, "other": "x"}
    app(FakeGrid(nodes_of(model, clients, algorithm=algorithm)), context)
    (result,) = seen
    assert len(result.records) == 1 and result.seed == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"algorithm": fedppl.EP},
        {"federated_model": normal_means},
        {"participation": 1.5},
        {"checkpoint": 3},
        {"random_seed": -1},
        {"callback": lambda: None},
        {"on_fit": 3},
        {"on_fit": lambda fit: None},
        {"example_data": None},
    ],
)
def test_a_server_app_is_refused_before_it_runs(wrong: dict[str, Any]) -> None:
    model, example = normal_means(1)[0], {"y": [0.0, 1.0]}
    given = {"federated_model": model, "algorithm": fedppl.EP(), "clients": 1, "example_data": example} | wrong
    with pytest.raises(DeclarationError):
        fedppl.Flower.server_app(**given)


@problems.few_rounds
def test_a_run_resumes_on_the_grid(tmp_path: Path) -> None:
    """The server's process dies after two rounds; another one goes on with restarted sites."""
    model, clients = problems.regression()
    path = tmp_path / "run.ckpt"
    free = fit(FakeGrid(nodes_of(model, clients)), model, len(clients))
    fit(FakeGrid(nodes_of(model, clients)), model, len(clients), rounds=2, checkpoint=path)
    rest = fit(FakeGrid(nodes_of(model, clients)), model, len(clients), checkpoint=path)
    assert_array_equal(rest.posterior.linear, free.posterior.linear)
    assert_array_equal(rest.posterior.precision, free.posterior.precision)


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"clients": 0}, "clients=0 must be"),
        ({"clients": True}, "clients=True must be"),
        ({"clients": "abc"}, "clients='abc' must be"),
        ({"clients": []}, r"clients=\[\] must be"),
        ({"clients": 1, "wait": 0}, "wait=0 must be positive"),
        ({"clients": 1, "deadline": -1}, "deadline=-1 must be positive"),
        ({"clients": 1, "poll": 0}, "poll=0 must be positive"),
    ],
)
def test_settings_of_the_grid(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(DeclarationError, match=reason):
        fedppl.Flower.grid(FakeGrid({}), model=normal_means(1)[0], example_data={"y": [0.0]}, **settings)


def test_data_go_to_the_sites() -> None:
    model, clients = normal_means(2)
    with pytest.raises(DeclarationError, match="data are at the sites: pass clients=None"):
        fedppl.fit(model, clients, fedppl.EP(), engine=engine_of(FakeGrid({}), model, 1))
    with pytest.raises(DeclarationError, match="client_app takes a FederatedModel"):
        fedppl.Flower.client_app(other_prior, fedppl.EP(), lambda config: {})
    with pytest.raises(DeclarationError, match="load_data is dict"):
        fedppl.Flower.client_app(model, fedppl.EP(), clients)


# --- policies -------------------------------------------------------------------------------------------------


def test_an_app_without_a_folder_needs_a_policy_without_rules() -> None:
    model, clients = normal_means(1)
    for policy in (None, fedppl.Policy(sums="optional", rows=1)):
        with pytest.raises(DeclarationError, match="folder=None.*NO_RULES"):
            site_app(model, clients, policy=policy)
    with pytest.raises(DeclarationError, match="policy=3 must be a fedppl.Policy, the path"):
        site_app(model, clients, policy=3)
    nowhere = site_app(model, clients, policy=fedppl.Policy(sums="optional", rows=1), folder=lambda config: None)
    with pytest.raises(DeclarationError, match="'client 0' was refused: LocalFailure: the reason is in the site's own"):
        fit(FakeGrid({1: node(nowhere, 1, **{"client-id": "client 0"})}), model, 1)


@problems.few_rounds
@pytest.mark.parametrize("given", ["policy", "path", "function"])
def test_a_site_keeps_to_its_policy(given: str, tmp_path: Path) -> None:
    """Twenty rows at one client, five at the other, which does not take part; the server is told one thing."""
    path = tmp_path / "policy.toml"
    path.write_text('sums = "optional"\nrows = 10')
    rng = np.random.default_rng(0)
    model, clients = normal_means(1)[0], {"large": {"y": rng.normal(size=20)}, "small": {"y": rng.normal(size=5)}}
    policy = {"policy": fedppl.Policy(sums="optional", rows=10), "path": path, "function": lambda config: path}[given]
    nodes = nodes_of(model, clients, policy=policy, folder=lambda config: tmp_path / config["client-id"])
    with pytest.raises(DeclarationError, match="'small' was refused.*does not take part under the policy of its site"):
        fit(FakeGrid(nodes), model, 2)
    result = fit(FakeGrid(nodes), model, 1)
    assert result.client_ids == ("large",)
    events = [line["event"] for line in audit.lines(tmp_path / "large")]
    assert events.count("request") == events.count("reply") == len(result.records)
    assert {"introduction", "conclusion"} <= set(events)


@problems.few_rounds
def test_a_server_that_was_killed_gets_the_round_again_that_it_lost(tmp_path: Path) -> None:
    """Its checkpoint is a round behind the sites: they give the answers that they gave."""
    model, clients = problems.regression()
    folder = {"folder": lambda config: tmp_path / config["client-id"]}
    free = fit(FakeGrid(nodes_of(model, clients)), model, len(clients))
    path, before = tmp_path / "run.ckpt", tmp_path / "before.ckpt"

    def keep(step: fedppl.Round) -> bool:
        if step.number == 1:
            before.write_bytes(path.read_bytes())
        return step.number == 2

    nodes = nodes_of(model, clients, **folder)
    fit(FakeGrid(nodes), model, len(clients), checkpoint=path, callback=keep)
    path.write_bytes(before.read_bytes())
    rest = fit(FakeGrid(nodes), model, len(clients), checkpoint=path)
    assert not any(record.failures for record in rest.records)
    assert_array_equal(rest.posterior.linear, free.posterior.linear)
