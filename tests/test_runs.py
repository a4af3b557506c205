"""What runs of every federated algorithm promise through the loop, whatever it computes: a new one is one line.

What algorithms and local inferences promise call by call stands in test_conformance.py.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import Algorithm, FederatedModel, Round, gaussian
from fedppl.engine.inprocess import InProcessEngine
from fedppl.model import compilations
from fedppl.steps._sites import dense
from fedppl.types import Engine, Failure, LocalFailure, Reply, Request
from tests import problems


class Case(NamedTuple):
    """An algorithm, and a problem on which it still moves every site in the last of its rounds."""

    build: Callable[[], Algorithm]
    problem: Callable[[], tuple[FederatedModel, problems.Clients]]


@functools.cache
def noise() -> tuple[FederatedModel, problems.Clients]:
    """Not Gaussian: EP's warm start takes three rounds of five."""
    return problems.noise(3, rows=60)


@functools.cache
def regression() -> tuple[FederatedModel, problems.Clients]:
    """Gaussian, where a hundred draws or thirty steps always make a reply."""
    return problems.regression(3)


def few_draws(sampler: str) -> Algorithm:
    return fedppl.EP(local=fedppl.NUTS(draws=100, tune=80, chains=1, rhat_limit=2.0, nuts_sampler=sampler))


CASES = {
    "EP(NestedLaplace)": Case(fedppl.EP, noise),
    "EP(diagonal)": Case(lambda: fedppl.EP(structure="diagonal"), noise),
    "EP(blocks)": Case(lambda: fedppl.EP(structure=[["mu"], ["log_tau"]]), noise),
    "EP(Laplace)": Case(lambda: fedppl.EP(local=fedppl.Laplace(), tolerance=1e-9), noise),
    "EP(ADVI)": Case(lambda: fedppl.EP(local=fedppl.ADVI(points=32), tolerance=1e-9), noise),
    "EP(MeanField)": Case(lambda: fedppl.EP(local=fedppl.MeanField(points=32), tolerance=1e-9), noise),
    "EP(GradientSteps)": Case(
        lambda: fedppl.EP(local=fedppl.GradientSteps(steps=30, learning_rate=0.005), tolerance=1e-9), regression
    ),
    "EP(NUTS, pymc)": Case(lambda: few_draws("pymc"), regression),
    "EP(NUTS, nutpie)": Case(lambda: few_draws("nutpie"), regression),
}
ROUNDS = 5
SEED = 7


@pytest.fixture(params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    if "nutpie" in request.param and importlib.util.find_spec("nutpie") is None:
        pytest.skip("nutpie is not installed")
    return str(request.param)


def run(name: str, algorithm: Algorithm | None = None, *, limit: int = ROUNDS, **settings: Any) -> list[Round]:
    model, clients = CASES[name].problem()
    settings = {"engine": fedppl.InProcess(workers=1), "random_seed": SEED} | settings
    return list(fedppl.rounds(model, clients, algorithm or CASES[name].build(), rounds=limit, **settings))


@functools.cache
def uninterrupted(name: str) -> list[Round]:
    """The run that the others are held against, once a session."""
    return run(name)


def arrays(value: Any, path: str = "state") -> dict[str, Any]:
    """Every array and number in a state, by where it stands."""
    if isinstance(value, Mapping):
        return {k: v for key, one in value.items() for k, v in arrays(one, f"{path}[{key!r}]").items()}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        return {k: v for key, one in zip(names, value, strict=True) for k, v in arrays(one, f"{path}.{key}").items()}
    if isinstance(value, np.ndarray | np.generic | float | int | bool):
        return {path: np.asarray(value)}
    return {}


def assert_same_state(a: Any, b: Any) -> None:
    """Bit for bit."""
    one, other = arrays(a), arrays(b)
    assert one.keys() == other.keys()
    assert len(one) > 3
    for path in one:
        assert_array_equal(one[path], other[path], err_msg=path)


def assert_ledger_holds(state: Any) -> None:
    """q = prior x Π sites, summed here from the packed rows."""
    sites = state.sites
    precision = sites.prior.precision + sum(dense(row, sites.structure) for row in sites.precision)
    linear = sites.prior.linear + sum(sites.linear)
    assert_allclose(sites.q.precision, precision, rtol=1e-10, atol=1e-10)
    assert_allclose(sites.q.linear, linear, rtol=1e-10, atol=1e-10)


# --- promises ---------------------------------------------------------------------------------------------------------


def test_the_run_does_something(name: str) -> None:
    """Every client answers every round and every site moves, or the promises below would be kept by doing nothing."""
    steps = uninterrupted(name)
    assert len(steps) == ROUNDS
    for before, after in zip(steps, steps[1:], strict=False):
        assert after.failures == {}
        moved = np.any(before.state.sites.linear != after.state.sites.linear, axis=1)
        assert np.all(moved), after.number


def test_equal_seeds_give_equal_numbers(name: str) -> None:
    again = run(name)
    for one, other in zip(uninterrupted(name), again, strict=True):
        assert_same_state(one.state, other.state)
        for client_id, info in one.record.infos.items():
            assert dict(info) == dict(other.record.infos[client_id])


def test_a_second_run_compiles_nothing(name: str) -> None:
    uninterrupted(name)
    before = compilations()
    run(name, limit=1)
    assert compilations() == before


@pytest.mark.parametrize("problem", [noise, regression])
def test_a_declaration_made_anew_compiles_nothing(problem: Callable[[], Any]) -> None:
    model, clients = problem()
    fedppl.fit(model, clients, fedppl.EP(), rounds=1, progressbar=False, random_seed=0)
    before = compilations()
    fresh = FederatedModel(lambda X, y: model.builder(X, y), shared=model.shared)
    fit = fedppl.fit(fresh, clients, fedppl.EP(), rounds=1, progressbar=False, random_seed=0)
    assert len(fit.records) == 1
    assert compilations() == before


def test_threads_give_the_same_numbers(name: str) -> None:
    again = run(name, limit=2, engine=fedppl.InProcess(workers=3))
    assert_same_state(uninterrupted(name)[1].state, again[-1].state)


def test_numbers_do_not_depend_on_the_order_of_clients(name: str) -> None:
    """Streams and points belong to the client's id; sums over clients differ in their last digits only."""
    model, clients = CASES[name].problem()
    backwards = dict(reversed(clients.items()))
    step = next(fedppl.rounds(model, backwards, CASES[name].build(), random_seed=SEED))
    q, again = uninterrupted(name)[0].state.sites.q, step.state.sites.q
    assert_allclose(again.linear, q.linear, rtol=1e-9, atol=1e-9)
    assert_allclose(again.precision, q.precision, rtol=1e-9, atol=1e-9)


class Wire(InProcessEngine):
    """An engine whose every message has been bytes: requests and replies by pickle, their arrays by an npz file."""

    def __init__(self, algorithm: Algorithm, clients: Mapping[str, Any]) -> None:
        super().__init__(algorithm, clients, 1)
        self.replies: list[Reply] = []

    def layout(self) -> Any:
        return pickle.loads(pickle.dumps(super().layout()))

    def exchange(self, requests: Mapping[str, Request], deadline: float | None) -> dict[str, Reply | Failure]:
        sent = {k: r._replace(message=by_file(r.message)) for k, r in pickle.loads(pickle.dumps(requests)).items()}
        answers = super().exchange(sent, deadline)
        self.replies += [reply for reply in answers.values() if isinstance(reply, Reply)]
        received = pickle.loads(pickle.dumps(answers))
        return {k: r._replace(message=by_file(r.message)) if isinstance(r, Reply) else r for k, r in received.items()}


def by_file(message: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    np.savez(file, **message)
    file.seek(0)
    with np.load(file, allow_pickle=False) as loaded:
        return dict(loaded)


def test_messages_are_plain_arrays_that_survive_the_wire(name: str) -> None:
    engines = []

    def over_the_wire(algorithm: Algorithm, clients: Mapping[str, Any]) -> Engine:
        engines.append(Wire(algorithm, clients))
        return engines[-1]

    again = run(name, engine=over_the_wire)
    for one, other in zip(uninterrupted(name), again, strict=True):
        assert other.failures == {}
        assert_same_state(one.state, other.state)
    replies = engines[0].replies
    assert len(replies) == 3 * ROUNDS
    for reply in replies:
        for value in reply.message.values():
            assert type(value) is np.ndarray
            assert value.dtype == np.float64
        assert all(type(value) is float for value in reply.info.values())


def test_clients_that_are_not_asked_keep_their_sites(name: str) -> None:
    before = None
    idle = 0
    for step in run(name, participation=2):
        sites = step.state.sites
        silent = [sites.where[client_id] for client_id in sites.where if client_id not in step.record.asked]
        assert len(silent) == 1
        linear, precision = (before.linear, before.precision) if before else (0 * sites.linear, 0 * sites.precision)
        assert_array_equal(sites.linear[silent], linear[silent])
        assert_array_equal(sites.precision[silent], precision[silent])
        idle += bool(np.any(sites.linear[silent]))
        assert_ledger_holds(step.state)
        before = sites
    assert idle > 0  # at least once it was a site of some value that was kept


def test_a_client_that_fails_is_skipped_and_the_ledger_holds(name: str) -> None:
    """One that always fails, and one that fails once."""
    algorithm = CASES[name].build()
    good, never, once = CASES[name].problem()[1]
    calls = 0

    def update_client(client: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += client.client_id == once
        if client.client_id == never or (client.client_id == once and calls == 2):
            raise LocalFailure("out of paper")
        return algorithm.update_client(client, *arguments)

    steps = run(name, algorithm._replace(update_client=update_client), limit=3)
    assert [set(step.failures) for step in steps] == [{never}, {never, once}, {never}]
    assert all(reason == "out of paper" for step in steps for reason in step.failures.values())
    row = steps[0].state.sites.where
    for step in steps:
        assert_ledger_holds(step.state)
        assert not np.any(step.state.sites.linear[row[never]])
        assert not np.any(step.state.sites.precision[row[never]])
    first, second, third = (step.state.sites for step in steps)
    assert np.any(first.linear[row[once]])
    assert_array_equal(first.linear[row[once]], second.linear[row[once]])
    assert_array_equal(first.precision[row[once]], second.precision[row[once]])
    assert np.any(first.linear[row[good]] != second.linear[row[good]])
    assert np.any(second.linear[row[once]] != third.linear[row[once]])


def test_a_round_without_replies_changes_no_site(name: str) -> None:
    algorithm = CASES[name].build()
    for step in (uninterrupted(name)[1], uninterrupted(name)[-1]):
        after, _ = algorithm.update_server(step.state, {})
        assert_same_state(after.sites, step.state.sites)


def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    # where there is a warm start, three rounds are the whole of it: what it hands over is in the checkpoint
    first = run(name, limit=3, checkpoint=path)
    rest = run(name, limit=ROUNDS, checkpoint=path)
    assert [len(first), len(rest)] == [3, ROUNDS - 3]
    for one, other in zip(uninterrupted(name), first + rest, strict=True):
        assert_same_state(one.state, other.state)
        assert one.status is other.status
        assert one.message == other.message


def test_states_are_finite_and_the_posterior_proper(name: str) -> None:
    """Proper in the end: on the way to the mode, EP's warm start passes where a marginal posterior is not concave."""
    algorithm = CASES[name].build()
    for step in uninterrupted(name):
        assert_ledger_holds(step.state)
        for path, value in arrays(step.state.sites).items():
            assert np.all(np.isfinite(value)), path
        q = algorithm.posterior(step.state)
        assert_array_equal(q.precision, q.precision.T)
    assert gaussian.is_proper(algorithm.posterior(uninterrupted(name)[-1].state))


def test_sites_stay_in_their_family() -> None:
    """Diagonal and blocks: no correlation of the posterior that the family does not have."""
    for name, coupled in (("EP(diagonal)", np.eye(3)), ("EP(blocks)", np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]]))):
        for step in uninterrupted(name):
            assert_array_equal(step.state.sites.q.precision != 0, coupled.astype(bool))
