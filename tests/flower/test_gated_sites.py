"""Sites of which one fails the rule on few rows alone: what they sum for each other before they answer a request."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("flwr")

from flwr.app import Message as FlowerMessage

import fedppl
from benchmarks._attacks import patients
from fedppl import Policy, audit, gaussian
from fedppl.contracts import Failure, Request
from fedppl.engine import secure
from fedppl.engine.guard import REFUSED
from fedppl.flower.messages import to_content, unread
from fedppl.numerics.streams import client_seed
from fedppl.sites import ASK, CONCLUDE, GATE, GREET, JOIN, masks, parcel_of, wire
from fedppl.storage import signed, store
from fedppl.types import ConvergenceWarning
from tests.engine.test_few_rows_in_sums import RULES, cohort
from tests.flower.test_secure_sites import bits, identities
from tests.support import stored
from tests.support.fake_grid import FakeGrid, engine_of, node, remember

NAMES = tuple(f"site {site}" for site in range(5))


@functools.cache
def declared() -> fedppl.FederatedModel:
    model = fedppl.FederatedModel(patients.logistic, ["beta"])
    remember(model, {"a": {"X": np.ones((2, 3)), "y": np.array([0, 1])}})
    return model


def grid_of(base: Path, kind: str, policy: Policy = RULES) -> FakeGrid:
    identities(base, NAMES)
    data = cohort(kind)
    app = fedppl.Flower.client_app(
        declared(),
        fedppl.Sums(),
        lambda config: data[config["client-id"]],
        folder=lambda config: base / f"at {config['client-id']}",
        policy=lambda config: policy,
        secure=lambda config: base / str(config["client-id"]),
        draws=50,
        chains=2,
    )
    return FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(NAMES)})


def fit(grid: FakeGrid, **keywords: Any) -> fedppl.Fit:
    engine = engine_of(grid, declared(), len(NAMES), deadline=60.0, wait=60.0, secure=True)
    return fedppl.fit(declared(), None, fedppl.Sums(), engine=engine, progressbar=False, random_seed=1, **keywords)


def kinds(grid: FakeGrid) -> list[str]:
    return [message.metadata.message_type for message in grid.sent]


def lines(base: Path, name: str, event: str) -> list[Mapping[str, Any]]:
    return [line for line in audit.lines(base / f"at {name}") if line["event"] == event]


def test_a_level_of_one_row_at_one_site_is_fitted_and_every_request_has_a_gate(tmp_path: Path) -> None:
    grid, open_grid = grid_of(tmp_path / "gated", "level"), grid_of(tmp_path / "open", "level", NO_FEW_ROWS)
    gated, plain = fit(grid), fit(open_grid)
    assert gated.status is plain.status is fedppl.Status.CONVERGED
    # The same words but for which points are left out by few_rows: here none.
    assert_array_equal(gaussian.mean(gated.posterior), gaussian.mean(plain.posterior))
    assert gated.log_evidence == plain.log_evidence
    assert kinds(grid).count(GATE) == kinds(grid).count(ASK) == len(NAMES) * len(gated.records)
    assert GATE not in kinds(open_grid)
    for name in NAMES:
        gates, requests = (lines(tmp_path / "gated", name, event) for event in ("gate", "request"))
        assert [line["request_digest"] for line in gates] == [line["request_digest"] for line in requests]
        assert not any(line["refused"] for line in [*gates, *requests])
    words = [parcel_of(unread(reply))[0][masks.WORDS] for reply in grid.replies if reply.metadata.message_type == GATE]
    each = [bits(np.asarray(one)) for one in words]
    assert abs(np.concatenate(each).mean() - 0.5) < 5 * 0.5 / np.sqrt(sum(map(len, each)))
    total = secure.added([np.asarray(one).view(np.uint64) for one in words[: len(NAMES)]])
    assert abs(bits(total).mean() - 0.5) < 5 * 0.5 / np.sqrt(64 * len(total))  # nor does the server have their sum


NO_FEW_ROWS = Policy(requests=200, few_rows=0)


@pytest.mark.parametrize("kind", ["indicator", "hidden in noise"])
def test_what_one_row_of_one_site_has_alone_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.warns(ConvergenceWarning, match="refused"):
        fit(grid_of(tmp_path, kind), rounds=1)
    refused = {
        name: [line["refused"] for line in lines(tmp_path, name, "request") if line["refused"]] for name in NAMES
    }
    rule, *_ = refused.pop("site 0")
    assert rule.startswith("few_rows") and "sum" in rule and not any(refused.values())


# A server that wants more --------------------------------------------------------------------------------------------


class Server:
    """Sends sites what it likes."""

    def __init__(self, base: Path, kind: str = "level") -> None:
        self.folder, self._grid = base, grid_of(base, kind)
        layout = declared().enrol(cohort(kind))[NAMES[0]].layout
        state = fedppl.Sums().init(layout, NAMES, np.random.default_rng(1))
        self.message = fedppl.Sums().broadcast(state, NAMES[0])
        self.shapes = fedppl.Sums().replies.shapes(state)
        greetings = [
            masks.unpack_greeting(self.send(GREET, name, ({}, masks.ask(name, "run")))[1], name) for name in NAMES
        ]
        self.texts = texts = [masks.ask(name, "run") | masks.pack_cohort(greetings) for name in NAMES]
        parts = [self.send(JOIN, name, ({}, text))[1] for name, text in zip(NAMES, texts, strict=True)]
        self.counts = [masks.unpack_part(part, name) for name, part in zip(NAMES, parts, strict=True)]

    def send(self, kind: str, name: str, parcel: Any) -> Any:
        one = self._grid.nodes[10 + NAMES.index(name)]
        message = FlowerMessage(content=to_content(*parcel), dst_node_id=1, message_type=kind, ttl=60.0)
        message.metadata.__dict__["_message_id"] = "1"
        return parcel_of(unread(one.app(message, one.context)))

    def parcel(self, name: str, round: int = 1, **more: Any) -> Any:
        request = Request(name, 7, round, (1, round, client_seed(name)), self.message, "run")._replace(**more)
        arrays, texts = wire.pack_request(request)
        return arrays, texts | masks.pack_parts(self.counts)

    def gate(self, name: str, round: int = 1, **more: Any) -> secure.Part | str:
        """A site's sealed part, or the rule by which it has none."""
        arrays, texts = self.send(GATE, name, self.parcel(name, round, **more))
        if "refused" not in texts:
            return masks.unpack_sealed(arrays, texts, name)
        assert texts == {"client_id": name, "refused": REFUSED} and not arrays
        return self.rule(name)

    def gates(self, round: int = 1, **more: Any) -> list[secure.Part]:
        parts = [self.gate(name, round, **more) for name in NAMES]
        assert all(isinstance(part, secure.Part) for part in parts), parts
        return parts  # type: ignore[return-value]

    def ask(self, name: str, parts: list[secure.Part], round: int = 1, **more: Any) -> np.ndarray | str:
        """The words that a site answers a request with, or the rule by which it does not."""
        (arrays, texts), (with_arrays, with_texts) = self.parcel(name, round, **more), masks.pack_gate(parts)
        reply = wire.unpack_reply(*self.send(ASK, name, ({**arrays, **with_arrays}, {**texts, **with_texts})))
        if isinstance(reply, Failure):
            assert reply.reason == REFUSED
            return self.rule(name)
        return np.asarray(reply.message[masks.WORDS]).view(np.uint64)

    def rule(self, name: str) -> str:
        found = [line["refused"] for line in audit.lines(self.folder / f"at {name}")]
        return str([rule for rule in found if rule][-1]).partition(":")[0]

    def moved(self) -> dict[str, Any]:
        return {**self.message, "points": self.message["points"] + 0.1}


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_an_honest_gate_opens_a_round_of_its_own_request_alone(server: Server) -> None:
    assert masks.is_gated(server.counts)
    parts = server.gates()
    assert server.gates() == parts  # the same, however often
    assert server.ask("site 0", [], message=server.moved()) == "sums"
    assert server.ask("site 0", parts, message=server.moved()) == "sums"
    assert server.ask("site 0", parts, round=2) == "sums"
    words = {name: np.asarray(server.ask(name, parts)) for name in NAMES}
    assert secure.summed(words, server.shapes).clients == len(NAMES)
    assert_array_equal(server.ask("site 0", []), words["site 0"])  # an answer is repeated without
    for name in NAMES:
        assert len([line for line in lines(server.folder, name, "gate") if not line.get("repeated")]) == 1


def test_parts_that_members_have_not_signed_for_it_are_refused(server: Server) -> None:
    parts = server.gates()
    larger = np.frombuffer(parts[1].words, "<u8").copy()
    larger[0] += np.uint64(2**20)
    forged = [
        [parts[0], parts[1]._replace(words=larger.tobytes()), *parts[2:]],
        [parts[0], parts[2]._replace(name="site 1"), *parts[2:]],
        [*parts[:4], parts[3]],
        parts[:4],
    ]
    for wrong in forged:
        assert server.ask("site 0", wrong) == "sums"
    assert isinstance(server.ask("site 0", parts), np.ndarray)
    requests = [line for line in lines(server.folder, "site 0", "request") if not line["refused"]]
    assert len(requests) == 1


def test_a_round_has_one_gate(server: Server) -> None:
    server.gates()
    assert server.gate("site 0", message=server.moved()) == "round"
    assert isinstance(server.gate("site 0", 2, message=server.moved()), secure.Part)
    assert server.gate("site 0") == "round"
    far = {**server.message, "points": server.message["points"] + 1e3}
    assert server.gate("site 0", 3, message=far) == "distance"


def test_gates_whose_requests_nobody_is_asked_count_as_requests(server: Server) -> None:
    """A member beside the server reads their sums: they are bounded as the requests are."""

    def requests() -> int:
        return stored.ledger(server.folder / "at site 0", "site 0").requests

    before = requests()
    parts = server.gates()
    assert requests() == before and isinstance(server.ask("site 0", parts), np.ndarray)
    for number in (2, 3, 4):
        assert isinstance(server.gate("site 0", number), secure.Part)
        assert requests() == before + number - 1  # the request, and all gates but the last


def test_numbers_that_a_member_does_not_have_are_noise_to_the_others(tmp_path: Path) -> None:
    """Otherwise the sum of the others, and of all at a place near by, would tell them what that member has there."""
    identities(tmp_path, NAMES)
    files = {name: tmp_path / name for name in NAMES}
    greetings = [
        masks._unpacked_greeting(list(masks.greet(files[k], tmp_path, {"run": "run"}).values())) for k in NAMES
    ]
    request = Request(NAMES[0], 7, 1, (1, client_seed(NAMES[0])), {"points": np.zeros((1, 1))}, "run")
    at = {name: masks.place(files[name], tmp_path, "run", greetings) for name in NAMES}
    parts = []
    for place, name in enumerate(NAMES):
        numbers = np.array([1.0, np.nan, np.nan, 3.0]) if place == 0 else np.arange(4.0)
        arrays, texts = masks.sealed_part(files[name], at[name], request, numbers)
        parts.append(masks.unpack_sealed(arrays, texts, name))
    for name in NAMES:
        total = masks.sum_of_sealed(files[name], at[name]._replace(gate=parts), request)
        assert total[0] == 1 and total[3] == 15 and np.all(np.abs(total[1:3]) > 2**10)


def test_sites_that_pass_alone_need_no_gate_and_answer_one(tmp_path: Path) -> None:
    server = Server(tmp_path, "honest")
    assert not masks.is_gated(server.counts)
    assert isinstance(server.ask("site 0", []), np.ndarray)
    assert isinstance(server.gate("site 0", 2), secure.Part)


def falls(days: Any, dose: Any, fallen: Any) -> Any:
    """Counts with exposure; away from the prior's mean a row with a large dose has almost all of the slope."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 1.5, shape=2)
        rate = pm.math.exp(-3.5 + beta[0] + beta[1] * pm.Data("dose", dose)) * pm.Data("days", days)
        pm.Poisson("falls", rate, observed=pm.Data("fallen", fallen))
    return model


def test_a_site_that_fails_alone_away_from_the_prior_s_mean_is_looked_at_in_sums_from_then_on(tmp_path: Path) -> None:
    """A site of ten rows beside larger ones: one round is void, and the posterior is the one without a policy."""
    rng, sizes = np.random.default_rng(2), dict(zip(NAMES, (150, 110, 80, 60, 10), strict=True))
    data = {}
    for name, rows in sizes.items():
        days, dose = rng.uniform(10, 200, rows).round(), rng.normal(0, 1.0, rows)
        data[name] = {"days": days, "dose": dose, "fallen": rng.poisson(days * np.exp(-3.5 - 0.4 * dose))}
    model = fedppl.FederatedModel(falls, ["beta"])
    remember(model, {"a": {name: np.ones(2, dtype=np.asarray(v).dtype) for name, v in data["site 0"].items()}})
    identities(tmp_path, NAMES)
    app = fedppl.Flower.client_app(
        model,
        fedppl.Sums(),
        lambda config: data[config["client-id"]],
        folder=lambda config: tmp_path / f"at {config['client-id']}",
        secure=lambda config: tmp_path / str(config["client-id"]),
        draws=50,
        chains=2,
    )
    grid = FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(NAMES)})
    engine = engine_of(grid, model, len(NAMES), deadline=60.0, wait=60.0, secure=True)
    found = fedppl.fit(model, None, engine=engine, progressbar=False, random_seed=1)
    here = fedppl.fit(model, data, fedppl.Sums(starts=1), progressbar=False, random_seed=1)
    assert found.status is here.status is fedppl.Status.CONVERGED
    assert [list(record.failures) for record in found.records if record.failures] == [["site 4"]]
    assert 0 < kinds(grid).count(GATE) < kinds(grid).count(ASK)
    sd = gaussian.standard_deviations(here.posterior)
    assert_allclose(gaussian.mean(found.posterior) / sd, gaussian.mean(here.posterior) / sd, rtol=0, atol=1e-6)


def test_a_site_that_was_killed_before_it_answered_a_gate_has_the_same_part(server: Server) -> None:
    made: list[Any] = []
    with stored.killed_while_keeping(".gate", made=made, how=SystemExit), pytest.raises(SystemExit):
        server.gate("site 0")
    part = server.gate("site 0")
    assert isinstance(part, secure.Part)
    kept = signed.unpack(made[0][1], "it", "run.gate")
    assert_array_equal(np.frombuffer(part.words, "<i8"), kept["arrays"][masks.WORDS])


def test_nothing_leaves_that_the_site_could_not_keep(server: Server) -> None:
    """Neither what is new nor what was told before, where the end of the transaction fails."""
    parts = server.gates()
    (arrays, texts), (with_arrays, with_texts) = server.parcel("site 0"), masks.pack_gate(parts)
    over = {"client_id": "site 0", "run": "run", "seed": "1", "status": "converged"}
    sent = {
        GATE: server.parcel("site 0", 2),
        ASK: ({**arrays, **with_arrays}, {**texts, **with_texts}),
        CONCLUDE: (server.message, over),
        JOIN: ({}, server.texts[0]),
    }
    before = lines(server.folder, "site 0", "cohort"), lines(server.folder, "site 0", "request")

    def full(_: store.Store) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_write", full)
        for kind, parcel in sent.items():
            told = server.send(kind, "site 0", parcel)
            assert not told[0] and (kind == CONCLUDE or REFUSED in told[1].values()), (kind, told)
    assert (lines(server.folder, "site 0", "cohort"), lines(server.folder, "site 0", "request")) == before
    assert isinstance(server.ask("site 0", parts), np.ndarray)
    assert masks.unpack_part(server.send(JOIN, "site 0", sent[JOIN])[1], "site 0") == server.counts[0]
