"""What runs of every algorithm of tests/cases.py promise through the loop, whatever it computes.

What algorithms promise call by call stands in tests/unit/test_contract.py and tests/promises/test_conformance.py.
"""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import fedppl
from fedppl import FederatedModel, Round, gaussian
from fedppl.contracts import AnyAlgorithm, Engine, EngineFactory, Failure, Point, Posterior, Reply, Request
from fedppl.engine.inprocess import InProcessEngine
from fedppl.model import template
from fedppl.model.template import compilations
from fedppl.numerics.streams import stream
from fedppl.types import LocalFailure
from tests.cases import CASES, noise, regression, rows
from tests.support import page, problems
from tests.support.contract import rows_of
from tests.support.promises import Promises
from tests.support.states import arrays, assert_ledger_holds, assert_near, assert_same, assert_same_state, changed, told

SEED = 7
# Not known yet, and no number until it is.
UNKNOWN = {
    "state.change",
    "state.warm_start.trial.change",
    "state.steps.change",
    "state.omega.remainder",
    "state.bound",
}
UNKNOWN |= {f"state.phase.{name}" for name in ("search.change",)}
UNKNOWN |= {f"state.phase.{name}" for name in ("newton.trial.change", "batch.log_surrogate")}
UNKNOWN |= {"state.last_change", "state.steps.last_change", "said.1['last_change']", "said.1['last_change'].1"}
UNKNOWN |= {"said.1['pull']", "said.1['pull'].1"}  # of a client without whom q is not proper
UNKNOWN |= {"state.roles.log_odds"}  # infinite by declaration where no function is left out
every_algorithm = pytest.mark.parametrize("name", rows())


@pytest.fixture(autouse=True, scope="module")
def _enrolled_once() -> Iterator[None]:
    """Clients of a table's problem enrol once a session: their data are the same objects in every run."""
    known: dict[Any, Any] = {}
    enrol = FederatedModel.enrol

    def again(model: FederatedModel, clients: Any, **options: Any) -> Any:
        key = (id(model), *options.items(), *((client_id, id(data)) for client_id, data in sorted(clients.items())))
        if key not in known:
            known[key] = model, clients, enrol(model, clients, **options)
        return {client_id: known[key][2][client_id] for client_id in clients}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedModel, "enrol", again)
        yield


class Run(NamedTuple):
    """Rounds, with what clients kept to themselves after each."""

    steps: list[Round]
    personal: list[dict[str, Any]]
    initial: Any  # the server's state before the first
    algorithm: AnyAlgorithm


def run(
    name: str,
    algorithm: AnyAlgorithm | None = None,
    *,
    limit: int | None = None,
    after: Callable[[int], Any] = lambda number: None,
    **settings: Any,
) -> Run:
    """A run of a row; `after` is called with the number of every round that is done and saved."""
    model, clients = CASES[name].problem()
    algorithm = algorithm or CASES[name].build()
    start: EngineFactory = settings.pop("engine", fedppl.InProcess(workers=1))
    engines: list[Engine] = []

    def engine(algorithm: AnyAlgorithm, clients: Mapping[str, Any]) -> Engine:
        engines.append(start(algorithm, clients))
        return engines[-1]

    settings = {"engine": engine, "random_seed": SEED} | settings
    steps, personal = [], []
    for step in fedppl.rounds(model, clients, algorithm, **settings):
        steps.append(step)
        personal.append(copy.deepcopy(dict(engines[0].personal())))
        after(step.number)
        if step.number == (limit or CASES[name].rounds):  # those of a warm start among them
            break
    initial = algorithm.init(engines[0].layout(), engines[0].clients(), stream((SEED, 0, 0)))
    return Run(steps, personal, initial, algorithm)


def assert_same_runs(a: Run, b: Run) -> None:
    """Bit for bit: states, what clients keep, and what the rounds say of themselves."""
    for one, other, kept, theirs in zip(a.steps, b.steps, a.personal, b.personal, strict=True):
        assert_same_state(one.state, other.state)
        assert_same(kept, theirs)
        assert (one.status, one.message) == (other.status, other.message)
        assert one.failures == other.failures
        for client_id, info in one.record.infos.items():
            again = other.record.infos[client_id]
            assert info.keys() == again.keys()
            assert {k: v for k, v in info.items() if "seconds" not in k} == {
                k: again[k] for k in info if "seconds" not in k
            }


def assert_rows_same(name: str, one: Any, other: Any, client_id: str) -> None:
    """A client's rows of the ledger."""
    ledger = CASES[name].ledger
    assert not changed(rows_of(ledger, one, client_id), rows_of(ledger, other, client_id))


class Wire(InProcessEngine):
    """An engine whose every message has been bytes: requests and replies by pickle, their arrays by an npz file."""

    def __init__(self, algorithm: AnyAlgorithm, clients: Mapping[str, Any]) -> None:
        super().__init__(algorithm, clients, 1)
        self.replies: list[Reply] = []

    def layout(self) -> Any:
        return pickle.loads(pickle.dumps(super().layout()))

    def exchange(
        self, requests: Mapping[str, Request], deadline: float | None, *heard: Any
    ) -> dict[str, Reply | Failure]:
        sent = {k: r._replace(message=by_file(r.message)) for k, r in pickle.loads(pickle.dumps(requests)).items()}
        answers = super().exchange(sent, deadline, *heard)
        self.replies += [reply for reply in answers.values() if isinstance(reply, Reply)]
        received = pickle.loads(pickle.dumps(answers))
        return {k: r._replace(message=by_file(r.message)) if isinstance(r, Reply) else r for k, r in received.items()}


def by_file(message: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    np.savez(file, **message)
    file.seek(0)
    with np.load(file, allow_pickle=False) as loaded:
        return dict(loaded)


def failing(name: str, at: Callable[[str, int], bool]) -> AnyAlgorithm:
    """The algorithm, where clients fail at some of their calls."""
    algorithm, calls = CASES[name].build(), dict.fromkeys(CASES[name].problem()[1], 0)

    def update_client(client: Any, *arguments: Any) -> Any:
        calls[client.client_id] += 1
        if at(client.client_id, calls[client.client_id]):
            raise LocalFailure("out of paper")
        return algorithm.update_client(client, *arguments)

    return algorithm._replace(update_client=update_client)


# --- promises ---------------------------------------------------------------------------------------------------------


@problems.few_rounds
@every_algorithm
def test_a_run_keeps_what_all_promise(name: str, tmp_path: Path) -> None:
    """One run, and those that have to be the same: from the seed, over a wire, in threads, resumed."""
    promises, case = Promises(), CASES[name]
    path, kept = tmp_path / "run.ckpt", tmp_path / "kept"
    # An algorithm that is done in one round takes more where one client is asked at a time.
    asking: dict[str, Any] = {} if case.rounds > 1 else {"participation": 1, "limit": 5}
    # with a deadline clients are asked one by one, also where they could lie side by side
    batch = case.build().batch
    alone: dict[str, Any] = {**asking, "deadline": 3600.0} if batch is not None and batch.stacks is not None else asking
    # where there is a warm start, four rounds are the whole of it: what it hands over is in the checkpoint
    until = min(4, case.rounds - 1) if case.rounds > 1 else 1

    def keep(number: int) -> None:
        if number == until:
            kept.mkdir()
            for file in tmp_path.glob("run.ckpt*"):
                shutil.copy(file, kept)

    whole = run(name, checkpoint=path, after=keep, **alone)
    with promises("it does something"):
        if not asking:
            _does_something(name, whole)
    with promises("states are finite and the posterior is proper"):
        _is_finite(name, whole)
    with promises("equal seeds give equal numbers, over the wire too, whose messages are plain arrays"):
        engines: list[Wire] = []

        def over_the_wire(algorithm: AnyAlgorithm, clients: Mapping[str, Any]) -> Engine:
            engines.append(Wire(algorithm, clients))
            return engines[-1]

        before = compilations()
        assert_same_runs(whole, run(name, engine=over_the_wire, **alone))
        for reply in engines[0].replies:
            assert all(type(value) is np.ndarray and value.dtype == np.float64 for value in reply.message.values())
            assert all(type(value) is float for value in reply.info.values())
        assert len(engines[0].replies) == sum(len(step.record.asked) for step in whole.steps)
        with promises("a second run compiles nothing"):
            assert compilations() == before
    with promises("the page on privacy names each diagnostic that leaves a client"):
        infos = [info for step in whole.steps for info in step.record.infos.values()]
        assert {diagnostic for info in infos for diagnostic in info} <= page.diagnostics()
    with promises("a resumed run, in threads, is the uninterrupted one"):
        assert len(whole.steps) > until
        rest = run(name, checkpoint=kept / "run.ckpt", engine=fedppl.InProcess(workers=3), **alone)
        left = [part[until:] for part in whole[:2]]
        assert_same_runs(Run(*left, whole.initial, whole.algorithm), rest)
    with promises("a fit from the checkpoint of a finished run is that run"):
        model, clients = case.problem()
        keywords: dict[str, Any] = {"rounds": sum(not step.record.preliminary for step in whole.steps)}
        keywords |= {"checkpoint": path, "participation": asking.get("participation"), "progressbar": False}
        fit = fedppl.fit(model, clients, case.build(), **keywords)
        assert_same_state(fit.state, whole.steps[-1].state)
        assert_same(fit.personal, whole.personal[-1])
    with promises("numbers do not depend on the order of clients"):
        # Streams and points belong to the client's id; sums over clients differ in their last digits only.
        model, clients = case.problem()
        start = {"engine": fedppl.InProcess(workers=1), "random_seed": SEED}
        if asking:
            start["participation"] = 1
        back = next(fedppl.rounds(model, dict(reversed(clients.items())), case.build(), **start)).state
        one, other = (arrays(told(whole.algorithm, state, clients)) for state in (whole.steps[0].state, back))
        assert_near(one, other, 1e-9)
    promises.check()


def _does_something(name: str, whole: Run) -> None:
    """Every client answers every round and something moves, or the promises would be kept by doing nothing."""
    assert len(whole.steps) == CASES[name].rounds
    before, kept = arrays(whole.initial), arrays({}, "personal")
    for step, own in zip(whole.steps, whole.personal, strict=True):
        assert step.failures == {}
        assert set(step.record.infos) == set(CASES[name].problem()[1])
        after, now = arrays(step.state), arrays(own, "personal")
        assert before.keys() != after.keys() or changed(list(before.values()), list(after.values())), step.number
        if step.number not in CASES[name].idle:
            # A point's variances are 0 and stay so.
            assert all(np.any(kept[path] != now[path]) for path in kept if np.any(now[path])), step.number
        if CASES[name].algorithm == "EP" and step.number > 1:
            moved = after["state.sites.linear"] != before["state.sites.linear"]
            assert np.all(np.any(moved, axis=1)), step.number
        before, kept = after, now


def _is_finite(name: str, whole: Run) -> None:
    """Proper in the end: on the way to the mode, EP's warm start passes where a marginal posterior is not concave."""
    algorithm, shared = whole.algorithm, whole.algorithm.result.shared
    for step, own in zip(whole.steps, whole.personal, strict=True):
        assert_ledger_holds(step.state)
        said = told(algorithm, step.state, CASES[name].problem()[1]), dict(algorithm.result.details(step.state))
        for path, value in (arrays(step.state) | arrays(own, "personal") | arrays(said, "said")).items():
            assert path in UNKNOWN or np.all(np.isfinite(value)), path
        if isinstance(shared, Posterior):
            q = shared.gaussian(step.state)
            assert_array_equal(q.precision, q.precision.T)
        if isinstance(shared, Point):
            assert np.all(np.isfinite(shared.estimate(step.state)))
    if isinstance(shared, Posterior):
        assert gaussian.is_proper(shared.gaussian(whole.steps[-1].state))


@every_algorithm
def test_a_client_that_fails_is_as_one_that_is_not_asked(name: str) -> None:
    """One that always fails, and one that fails in the second of three rounds; the ledger holds all along."""
    promises, case = Promises(), CASES[name]
    good, never, once = case.problem()[1]
    algorithm = failing(name, lambda client_id, call: client_id == never or (client_id == once and call == 2))
    failed = run(name, algorithm, limit=3)
    rounds = iter(((good, once), (good,), (good, once)))
    unasked = run(name, limit=3, participation=lambda ids, rng: next(rounds))
    first, second, third = (step.state for step in failed.steps)
    with promises("who fails is skipped, and the round says why"):
        assert [set(step.failures) for step in failed.steps] == [{never}, {never, once}, {never}]
        assert all(reason == "out of paper" for step in failed.steps for reason in step.failures.values())
    with promises("a client that fails is as one that is not asked"):
        for one, other in zip(failed.steps, unasked.steps, strict=True):
            assert_same_state(one.state, other.state)
        for kept, again in zip(failed.personal, unasked.personal, strict=True):
            assert_same(kept, again)
    with promises("clients that are not asked keep what they have, to themselves and in the ledger"):
        for step, own in zip(unasked.steps, unasked.personal, strict=True):
            assert_ledger_holds(step.state)
            assert_rows_same(name, step.state, unasked.initial, never)
            assert never not in own
        assert_rows_same(name, first, second, once)
        assert_same(unasked.personal[0].get(once), unasked.personal[1].get(once))
        at_start = rows_of(case.ledger, unasked.initial, once)
        assert not case.ledger or changed(rows_of(case.ledger, first, once), at_start)  # it was something
    with promises("the others go on"):
        # A warm start stays at its point until it has an expansion of every client there.
        if case.algorithm == "EP" and first.warm_start is None:
            assert changed(rows_of(case.ledger, first, good), rows_of(case.ledger, second, good))
            assert changed(rows_of(case.ledger, second, once), rows_of(case.ledger, third, once))
        if case.rounds > 1:
            assert changed(list(arrays(first).values()), list(arrays(second).values()))
    promises.check()


@problems.few_rounds
@pytest.mark.parametrize("problem", [noise, regression])
def test_a_declaration_made_anew_compiles_nothing(problem: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, clients = problem()
    fedppl.fit(model, clients, fedppl.EP(), rounds=1, progressbar=False, random_seed=0)
    before = compilations()
    monkeypatch.setattr(template, "_kernels", [])  # as after many other fits: the model in use counts alone
    fresh = FederatedModel(lambda X, y: model.builder(X, y), shared=model.shared)
    fit = fedppl.fit(fresh, clients, fedppl.EP(), rounds=1, progressbar=False, random_seed=0)
    assert sum(not record.preliminary for record in fit.records) == 1
    assert compilations() == before


@pytest.mark.parametrize(
    ("name", "coupled"), [("EP(diagonal)", np.eye(3)), ("EP(blocks)", np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]]))]
)
def test_sites_stay_in_their_family(name: str, coupled: Any) -> None:
    """Diagonal and blocks: no correlation of the posterior that the family does not have."""
    for step in run(name).steps:
        assert_array_equal(step.state.sites.q.precision != 0, coupled.astype(bool))
