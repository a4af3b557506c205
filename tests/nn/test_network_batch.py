"""Clients with one network, trained in a batch: what comes out is what each finds alone, but for rounding."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl.contracts import Failure, Request
from fedppl.engine import inprocess
from fedppl.engine.inprocess import InProcessEngine
from fedppl.models import fedsi
from fedppl.numerics.streams import stream
from tests import cases
from tests.support import problems

torch = pytest.importorskip("torch")

from fedppl import nn  # noqa: E402
from fedppl.nn import batch, personal  # noqa: E402
from fedppl.nn import train as single  # noqa: E402
from fedppl.nn.batch import take_steps, train_together  # noqa: E402
from fedppl.nn.train import Training, train  # noqa: E402
from fedppl.nn.unit import head_of  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402

BODY, HEAD = ("0.weight", "0.bias"), ("2.weight", "2.bias")
ALL = (*BODY, *HEAD)
ROWS = (20, 7, 31, 30, 1, 20, 12)  # batches of 8: different numbers of them, and different last ones
OPEN = fedppl.Policy(sums="optional", rows=0, few_rows=0, parameters_per_row=math.inf, events=0, requests=math.inf)
STEPS = Training(0.01, 3, 8)
WHOLE = (("all", 2),)


def clients_of(rows: tuple[int, ...] = ROWS, *, inputs: int = 3) -> dict[str, dict[str, np.ndarray]]:
    """Three classes at clients with so many rows."""
    rng, data = np.random.default_rng(5), {}
    for k, count in enumerate(rows):
        label = rng.integers(3, size=count)
        data[f"device {k}"] = {"X": rng.normal(size=(count, inputs)) + 2.0 * np.eye(inputs)[label], "y": label}
    return data


def enrolled(
    shared: tuple[str, ...] = ALL, *, net: Any = None, data: Any = None, build: Any = fedsi.classifier
) -> Mapping[str, Any]:
    """Models of clients with one network."""
    declared = fedppl.FederatedModel(functools.partial(build, net=net or problems.network()), shared)
    return declared.enrol(data or clients_of(), kernel=False)


@functools.cache
def usual(shared: tuple[str, ...] = ALL) -> Mapping[str, Any]:
    """Those that most tests ask."""
    return enrolled(shared)


def asked(
    algorithm: fedppl.Algorithm,
    clients: Mapping[str, Any],
    *,
    rounds: int = 2,
    silent: tuple[str, ...] = (),
    workers: int = 1,
    patch: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answers of the last of some rounds, and what clients keep; `patch` changes what single clients are sent."""
    engine = InProcessEngine(algorithm, clients, workers)
    state = algorithm.init(next(iter(clients.values())).layout, tuple(clients), stream((0,)))
    for number in range(1, rounds + 1):
        requests = {
            name: Request(
                name,
                number,
                number,
                (1, number, k),
                {**algorithm.broadcast(state, name), **(patch or {}).get(name, {})},
                report=name not in silent,
            )
            for k, name in enumerate(clients)
        }
        answers = engine.exchange(requests, None)
    engine.close()
    return answers, dict(engine.personal())


def alone(algorithm: fedppl.Algorithm) -> fedppl.Algorithm:
    return algorithm._replace(batch=None)


def require_equal(found: Any, wanted: Any, *, within: float = 2e-4) -> None:
    """Numbers and arrays within a part of the largest, and everything else as it is."""
    if isinstance(wanted, Mapping):
        assert sorted(found) == sorted(wanted)
        for name in wanted:
            require_equal(found[name], wanted[name], within=within)
    elif isinstance(wanted, tuple):
        assert type(found) is type(wanted)
        for one, other in zip(found, wanted, strict=True):
            require_equal(one, other, within=within)
    elif isinstance(wanted, np.ndarray | float):
        assert_allclose(found, wanted, rtol=within, atol=within * float(np.max(np.abs(wanted), initial=0.0)))
    else:
        assert found == wanted


def groups_used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the groups that come to be computed in a batch, as they come."""
    seen: list[int] = []
    inner = inprocess._updates

    def updates(*given: Any) -> Any:
        found = inner(*given)
        seen.append(sum(update is not None for update in found))
        return found

    monkeypatch.setattr(inprocess, "_updates", updates)
    return seen


ALGORITHMS = {
    "phases": (lambda: nn.FedAvg(phases=(("local", 2), ("shared", 1), ("all", 1)), batch_size=8), BODY),
    "proximal": (lambda: nn.FedAvg(phases=WHOLE, proximal=1.0, learning_rate=0.01, batch_size=8), BODY),
    "momentum": (lambda: nn.FedAvg(phases=WHOLE, momentum=0.9, learning_rate=0.05, batch_size=8), ALL),
    "names": (lambda: nn.FedAvg(phases=((("2.bias", "0.weight"), 2),), weights="equal", batch_size=8), ALL),
    "one batch": (lambda: nn.FedAvg(phases=WHOLE, batch_size=100), ALL),
    "confidence": (lambda: nn.Confidence(head=HEAD, epochs=2, batch_size=8), ALL),
    "confidence, SGD": (lambda: nn.Confidence(head=HEAD, epochs=2, head_momentum=0.9, head_rate=1e-3), ALL),
    "confidence, Adam": (lambda: nn.Confidence(head=HEAD, epochs=2, batch_size=8, momentum=None), ALL),
    "FedSI": (lambda: nn.FedSI(ratio=0.3, epochs=2, batch_size=8), BODY),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clients_in_a_batch_find_what_each_finds_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds, of clients with different numbers of rows: replies, diagnostics and what is kept."""
    build, shared = ALGORITHMS[name]
    algorithm, clients = build(), usual(shared)
    wanted = asked(alone(algorithm), clients)
    used = groups_used(monkeypatch)
    require_equal(asked(algorithm, clients), wanted)
    assert used == [len(ROWS)] * 2


def in_groups(case: Any) -> bool:
    """Whether it computes clients in groups; what adds clients side by side is held in test_exchange_sum.py."""
    batch = case.build().batch
    return batch is not None and batch.stacks is None


@pytest.mark.parametrize("name", [name for name, case in cases.runnable().items() if in_groups(case)])
def test_every_algorithm_with_a_batch_is_held_to_its_single_clients(name: str) -> None:
    case = cases.CASES[name]
    shared = tuple(variable.name for variable in enrolled_layout(case))
    clients = enrolled(shared, data=clients_of((20, 20, 20, 20)))
    require_equal(asked(case.build(), clients), asked(alone(case.build()), clients))


def enrolled_layout(case: Any) -> Any:
    """What the problem of a row shares."""
    model, data = case.problem()
    return next(iter(model.enrol(data, kernel=False).values())).layout.variables


@pytest.mark.parametrize("name", ["phases", "confidence"])
def test_clients_that_do_not_report_are_a_batch_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shared = ALGORITHMS[name]
    clients = enrolled(shared, data=clients_of((20, 7, 31, 30, 8, 20, 12, 9, 9)))
    silent = tuple(list(clients)[::2])
    wanted = asked(alone(build()), clients, silent=silent)
    used = groups_used(monkeypatch)
    found = asked(build(), clients, silent=silent)
    require_equal(found, wanted)
    assert used == [4, 5] * 2
    assert found[0][silent[0]].message == {}


def test_a_fit_with_reporting_is_that_of_single_clients() -> None:
    """By the loop: estimates, and what clients keep between rounds."""
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=problems.network()), ALL)
    fits = [
        fedppl.fit(model, clients_of(), algorithm, rounds=3, reporting=0.6, random_seed=4, progressbar=False)
        for algorithm in (ALGORITHMS["confidence"][0](), alone(ALGORITHMS["confidence"][0]()))
    ]
    require_equal(fits[0].state.phi, fits[1].state.phi)
    require_equal(dict(fits[0].personal), dict(fits[1].personal))


def test_local_weights_are_kept_from_round_to_round() -> None:
    algorithm, clients = ALGORITHMS["phases"][0](), usual(BODY)
    (_, one), (_, two) = (asked(algorithm, clients, rounds=rounds) for rounds in (1, 2))
    assert all(np.all(one[name].local != two[name].local) for name in clients)


def test_the_number_of_threads_changes_no_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are cut by memory, so that there are several."""
    monkeypatch.setattr(batch, "_WEIGHTS", 16.0 * 31 * 4.5)
    algorithm, clients = ALGORITHMS["momentum"][0](), enrolled(data=clients_of((20, 7, 31, 30, 8, 20, 12, 9)))
    used = groups_used(monkeypatch)
    one, two = (asked(algorithm, clients, workers=workers) for workers in (1, 2))
    assert used == [4] * 8
    for name in clients:
        assert_array_equal(one[0][name].message["weighted"], two[0][name].message["weighted"])
    assert list(one[0]) == list(two[0]) == list(clients)


@pytest.mark.parametrize(
    ("name", "how"), [("momentum", "diverges"), ("momentum", "is not finite"), ("confidence", "is not finite")]
)
def test_a_client_whose_training_fails_fails_alone(name: str, how: str) -> None:
    """The same words as alone, and the others' numbers to the last digit."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Identity(), torch.nn.Linear(4, 3))
    data = clients_of()
    whole, sent = enrolled(net=net, data=data), {}
    if how == "diverges":  # its inputs are in another unit
        clients = enrolled(net=net, data={**data, "device 2": {**data["device 2"], "X": 100 * data["device 2"]["X"]}})
    else:
        clients, sent = whole, {"device 2": {"mean": np.full(31, np.nan)}}
    algorithm = ALGORITHMS[name][0]()
    found, wanted = (asked(each, clients, rounds=1, patch=sent) for each in (algorithm, alone(algorithm)))
    assert isinstance(found[0]["device 2"], Failure)
    assert found[0]["device 2"] == wanted[0]["device 2"]
    assert "device 2" not in found[1]
    others = asked(algorithm, whole, rounds=1)
    for client in whole.keys() - {"device 2"}:
        require_equal(found[0][client], others[0][client], within=0.0)
        require_equal(found[1][client], others[1][client], within=0.0)


@pytest.mark.parametrize(("name", "rise"), [("momentum", -0.06), ("confidence", -0.01)])
def test_clients_whose_loss_does_not_fall_enough_fail_as_alone(
    name: str, rise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of the loss, moved to where some clients break it."""
    for module in (single, batch):
        monkeypatch.setattr(module, "RISE", rise)
    algorithm, clients = ALGORITHMS[name][0](), usual()
    found, wanted = (asked(each, clients, rounds=1)[0] for each in (algorithm, alone(algorithm)))
    failed = [client for client in clients if isinstance(wanted[client], Failure)]
    assert 0 < len(failed) < len(clients)
    require_equal(found, wanted)


def test_what_raises_in_a_batch_costs_the_batch_and_nothing_else() -> None:
    """A message that one client cannot read: it fails as alone, and the others answer."""
    algorithm, clients = ALGORITHMS["phases"][0](), usual(BODY)
    sent = {"device 3": {"mean": np.zeros(5)}}
    found, wanted = (asked(each, clients, rounds=1, patch=sent) for each in (algorithm, alone(algorithm)))
    assert isinstance(found[0]["device 3"], Failure)
    assert found[0]["device 3"] == wanted[0]["device 3"]
    for client in clients:
        require_equal(found[0][client], wanted[0][client], within=0.0)


def test_only_where_an_algorithm_has_its_own_functions_they_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that somebody wrapped is called as it is."""
    algorithm, clients, called = ALGORITHMS["momentum"][0](), usual(), []

    def counted(client: Any, *given: Any) -> Any:
        called.append(client.client_id)
        return algorithm.update_client(client, *given)

    asked(algorithm._replace(update_client=counted), clients, rounds=1)
    assert sorted(called) == sorted(clients)


@pytest.mark.parametrize("how", ["policy", "deadline", "few"])
def test_where_each_client_counts_for_itself_each_is_asked_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clients_of(ROWS[: batch.FEWEST - 1] if how == "few" else ROWS)
    engine = fedppl.InProcess(workers=1, policy=OPEN if how == "policy" else None)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=problems.network()), ALL)
    used = groups_used(monkeypatch)
    settings = {"deadline": 100.0} if how == "deadline" else {}
    fit = fedppl.fit(
        model, data, ALGORITHMS["momentum"][0](), rounds=1, engine=engine, random_seed=1, progressbar=False, **settings
    )
    assert used == []
    assert fit.state.phi.shape == (31,)


def networks() -> dict[str, Any]:
    """Networks of three inputs and three classes."""

    class Skip(torch.nn.Module):
        """No chain of layers: by `torch.func.vmap`."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)

        def forward(self, X: Any) -> Any:
            return self.two(self.norm(torch.tanh(self.one(X)))) + X

    class Looks(torch.nn.Module):
        """Looks at values, which a batch cannot."""

        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(3, 3)

        def forward(self, X: Any) -> Any:
            return self.one(X) if float(self.one.weight.sum()) > -1e9 else X

    class Image(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Conv1d(1, 2, 2), torch.nn.Linear(4, 3)

        def forward(self, X: Any) -> Any:
            return self.two(torch.relu(self.one(X[:, None])).flatten(1))

    def chain(*layers: Any) -> Any:
        return torch.nn.Sequential(*layers)

    with torch.random.fork_rng():
        torch.manual_seed(2)
        linear = functools.partial(torch.nn.Linear, 3, 3)
        return {
            "nested": chain(chain(linear(bias=False), torch.nn.ReLU(inplace=True)), torch.nn.Flatten(), linear()),
            "linear": linear(),
            "skip": Skip(),
            "groups": chain(linear(), torch.nn.GroupNorm(1, 3), torch.nn.Softplus(), linear()),
            "looks": Looks(),
            "image": Image(),
            "changes its input": chain(torch.nn.ELU(inplace=True), linear()),
        }


@pytest.mark.parametrize(
    ("name", "together"),
    [
        ("nested", True),
        ("linear", True),
        ("skip", True),
        ("groups", True),
        ("looks", False),
        ("image", False),
        ("changes its input", False),
    ],
)
def test_networks_that_a_batch_cannot_compute_go_one_by_one(
    name: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = networks()[name]
    clients = enrolled(tuple(name for name, _ in net.named_parameters()), net=net)
    algorithm = nn.FedAvg(phases=WHOLE, batch_size=8)
    wanted = asked(alone(algorithm), clients)
    used = groups_used(monkeypatch)
    require_equal(asked(algorithm, clients), wanted)
    assert used == ([len(ROWS)] * 2 if together else [])


def test_clients_with_other_networks_or_types_of_rows_are_no_batch() -> None:
    """Two architectures in one call, each often enough for a batch of its own; and one with another type."""
    first, second = usual(), enrolled(net=problems.network(5))
    both = [*list(first.values())[:5], *list(second.values())[:4], *list(first.values())[5:]]
    found = batch.groups(both)
    assert sorted(map(sorted, found)) == [[0, 1, 2, 3, 4, 9, 10], [5, 6, 7, 8]]
    rows = [len(both[place].view(network_of).X) for place in found[0]]
    assert rows == sorted(rows, reverse=True)
    assert batch.groups(both[5:8]) == []


def test_batches_are_cut_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = list(enrolled(data=clients_of((8,) * 11)).values())
    monkeypatch.setattr(batch, "_WEIGHTS", 16.0 * 31 * 6)
    assert sorted(len(group) for group in batch.groups(clients)) == [5, 6]
    monkeypatch.setattr(batch, "_ROWS", 4.0 * 8 * 4 * 4)  # layers have up to four units

    assert sorted(len(group) for group in batch.groups(clients)) == [4, 4]  # the last three are asked alone
    monkeypatch.setattr(batch, "_ROWS", 1.0)
    assert batch.groups(clients) == []


def test_weights_that_are_not_trained_do_not_move() -> None:
    """Two parameters move, with a prior of each client's own: as `train` alone."""
    units = [client.view(network_of) for client in enrolled(data=clients_of((31, 30, 20, 20, 7))).values()]
    free, rng = np.r_[:12, 28:31], np.random.default_rng(0)
    W = units[0].initial + 0.1 * rng.normal(size=(5, 31))
    priors = [(rng.normal(size=15), rng.uniform(1, 50, size=15)) for _ in units]
    stack = batch.stacked(units)
    found, well = train_together(stack, W, free, STEPS, [stream((k,)) for k in range(5)], priors)
    assert well.all()
    for k, unit in enumerate(units):
        wanted = train(unit, W[k], free, STEPS, stream((k,)), prior=priors[k])
        assert_allclose(found[k], wanted, rtol=2e-4, atol=2e-5)
        assert_array_equal(np.delete(found[k], free), np.delete(wanted, free))


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_without_rounding_there_is_no_difference(momentum: float | None) -> None:
    """In float64, after so many steps that Adam's tell the smallest: training, and layers below draws of a head."""
    units = [client.view(network_of) for client in enrolled(data=clients_of((31, 30, 20, 20, 7))).values()]
    head, everything = head_of(units[0], HEAD), np.arange(31)
    settings, W = Training(0.01, 10, 8, momentum), np.tile(units[0].initial, (5, 1))
    stack = batch.stacked(units, torch.float64)
    found, _ = train_together(stack, W, everything, settings, [stream((k,)) for k in range(5)])
    q = W[:, head.places], np.full((5, 15), 0.3)
    lower, _ = batch.train_below_together(stack, head, W, q, settings, 3, [stream((k,)) for k in range(5)])
    for k, unit in enumerate(units):
        wanted = train(unit, W[k], everything, settings, stream((k,)), dtype=torch.float64)
        assert_allclose(found[k], wanted, rtol=1e-9, atol=1e-11)
        own = q[0][k], q[1][k]
        wanted = personal.train_below(unit, head, W[k], own, settings, 3, stream((k,)), dtype=torch.float64)
        assert_allclose(lower[k], wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("outputs", [1, 2])
def test_real_outcomes(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A normal likelihood, averaged and with heads of clients' own."""
    rng = np.random.default_rng(6)
    data = {
        f"device {k}": {"X": rng.normal(size=(count, 3)), "y": rng.normal(size=(count, outputs))}
        for k, count in enumerate(ROWS)
    }
    build = functools.partial(fedsi.regressor, noise_sd=0.5)
    clients = enrolled(net=problems.network(outputs=outputs), data=data, build=build)
    used = groups_used(monkeypatch)
    for algorithm in (nn.FedAvg(phases=WHOLE, batch_size=8), nn.Confidence(head=HEAD, epochs=2, batch_size=8)):
        require_equal(asked(algorithm, clients), asked(alone(algorithm), clients))
    assert used == [len(ROWS)] * 4


@pytest.mark.parametrize("unknown", [False, True])
def test_outcomes_that_are_computed_as_declared(unknown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts with an exposure and heads of clients' own; and an sd of each client's own beside averaged weights."""
    rng = np.random.default_rng(6)
    net = problems.network(outputs=1)

    def build(X: Any, y: Any, z: Any, net: Any) -> pm.Model:
        with pm.Model() as model:
            f = nn.module(net, nn.parameters(net), pm.Data("X", X))[:, 0]
            y, z = pm.Data("y", y), pm.Data("z", z)
            if unknown:
                pm.Normal("outcome", f + z, pm.HalfNormal("sd"), observed=y)
            else:
                pm.Poisson("outcome", z * pm.math.exp(f), observed=y)
        return model

    data = {
        f"device {k}": {
            "X": rng.normal(size=(count, 3)),
            "y": rng.normal(size=count) if unknown else rng.poisson(2, size=count),
            "z": rng.uniform(1, 2, size=count),
        }
        for k, count in enumerate(ROWS)
    }
    clients = enrolled(net=net, data=data, build=build)
    used = groups_used(monkeypatch)
    algorithms = [nn.FedAvg(phases=WHOLE, batch_size=8)]
    if not unknown:
        algorithms.append(nn.Confidence(head=HEAD, epochs=2, batch_size=8))
    for algorithm in algorithms:
        require_equal(asked(algorithm, clients), asked(alone(algorithm), clients))
    assert set(used) == {len(ROWS)}


def test_outcomes_of_one_number_a_row_are_those_of_one_column() -> None:
    """As many clients as rows and draws: nothing may be taken for something else of the same size."""
    rng = np.random.default_rng(6)
    columns = {f"device {k}": {"X": rng.normal(size=(8, 3)), "y": rng.normal(size=(8, 1))} for k in range(8)}
    numbers = {name: {**data, "y": data["y"][:, 0]} for name, data in columns.items()}
    net = problems.network(outputs=1)

    def build(X: Any, y: Any, net: Any) -> pm.Model:
        with pm.Model() as model:
            inputs, outcomes = pm.Data("X", X), pm.Data("y", y)
            pm.Normal("outcome", nn.module(net, nn.parameters(net), inputs)[:, 0], 0.5, observed=outcomes)
        return model

    algorithm = nn.Confidence(head=HEAD, epochs=2, batch_size=8, draws=8)
    clients = enrolled(net=net, data=numbers, build=build)
    wanted = asked(algorithm, enrolled(net=net, data=columns, build=functools.partial(fedsi.regressor, noise_sd=0.5)))
    for one in (algorithm, alone(algorithm)):
        require_equal(asked(one, clients), wanted)


def test_clients_step_as_often_as_alone() -> None:
    """Of the first epoch of Adam each step is of the rate's length where slopes keep their sign: counts by client."""
    seen: list[int] = []
    units = [client.view(network_of) for client in enrolled(data=clients_of((31, 20, 7, 7))).values()]
    stack = batch.stacked(units)

    class Counting:
        def __init__(self, leaf: Any) -> None:
            self.moving, self.masks, self.leaf = {"w": leaf}, {"w": None}, leaf

        def first(self, count: int) -> Any:
            seen.append(count)
            leaf = self.leaf[:count].detach().requires_grad_()
            return [leaf], {"w": leaf}

    leaf = torch.zeros(4, 1)
    take_steps(
        stack, Counting(leaf), Training(0.5, 2, 8), [stream((k,)) for k in range(4)], lambda state, _: state["w"].sum()
    )
    assert seen == [4, 2, 2, 1] * 2
    assert_allclose(leaf.ravel(), [-4.0, -3.0, -1.0, -1.0], rtol=1e-5)
