"""A site's policy: its file, its rules, its account over runs, and what a server is told."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest

import fedppl
from fedppl import DeclarationError, FederatedModel, Policy, audit, gaussian, policy, privacy
from fedppl.contracts import Asked, Disclosure, Failure, Reply, Request
from fedppl.engine.guard import (
    REFUSED,
    Guard,
    admit,
    holdings,
    in_memory,
    in_store,
    numbers,
    refuse_data,
    released,
    summed,
    tally,
)
from fedppl.engine.policy import NO_RULES, Holdings, changed_rows, version_of
from fedppl.gaussian import Gaussian
from fedppl.sites import conclusions as _conclusions
from fedppl.sites import node as _node
from fedppl.sites import wire as _wire
from fedppl.sites.node import Node
from fedppl.storage import store
from fedppl.types import DataError, LocalFailure
from tests.support import problems, stored
from tests.support.markers import slow_but

OPEN = Policy(sums="optional", rows=0, few_rows=0, parameters_per_row=math.inf, events=0, requests=math.inf)
SINGLE = Policy(sums="optional")


def opened(**limits: Any) -> Policy:
    """Without rules but those that are given."""
    return dataclasses.replace(OPEN, **limits)


# --- the file -------------------------------------------------------------------------------------------------


def test_a_file_says_what_the_keywords_say(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        'rows = 50\nrequests = inf\ndistance = 4\nepsilon = 1.5\ndeclarations = ["ab"]\napproval = "runs.txt"'
    )
    found = policy.read(path)
    assert found == Policy(
        rows=50, requests=math.inf, distance=4, epsilon=1.5, declarations=("ab",), approval=str(tmp_path / "runs.txt")
    )
    path.write_text("")
    assert policy.read(path) == Policy()
    path.write_text("rows = 7\n", encoding="utf-8-sig")  # as some editors save it
    assert policy.read(path).rows == 7


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sums = 'x'", "sums='x' must be .*optional"),
        ("sums = true", "sums=True must be .*optional"),
        ("fewest_sites = 2", "fewest_sites=2 .*at least 3.*two sites"),
        ("cohorts = 0", "cohorts=0 .*inf allows any"),
        ("points = -1", "points=-1 .*at least 0"),
        ("rows = -1", "rows=-1 must be a whole number, at least 0"),
        ("rows = 2.5", "rows=2.5"),
        ("rows = true", "rows=True"),
        ("events = '5'", "events='5'"),
        ("requests = 0", "requests=0 .*inf allows any"),
        ("distance = 0", "distance=0 must be positive"),
        ("distance = nan", "distance=nan"),
        ("cavity = 'far'", "cavity='far'.*inf switches"),
        ("epsilon = 0", "epsilon=0 must be positive"),
        ("delta = 1", "delta=1 must lie between 0 and 1"),
        ("declarations = 'ab'", "declarations='ab' must be a list"),
        ("declarations = [1]", r"declarations=\[1\]"),
        ("approval = 3", "approval=3 must be"),
        ("row = 3", "key 'row'; a policy has .*rows,"),
        ("rows = ", "no TOML"),
        ("joint = 1", "joint=1 must be true or false, as TOML has them"),
        ("joint = True", "TOML has true, false"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(DeclarationError, match=f"policy.toml.*{told}"):
        policy.read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match=r"none\.toml' cannot be read"):
        policy.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (None, "path=None must be"),
        (3, "path=3 must be"),
        (b"p", "path=b'p' must be"),
        ("a\0b", "cannot be read: .*null"),
    ],
)
def test_what_is_no_path_is_refused(path: Any, told: str) -> None:
    with pytest.raises(DeclarationError, match=told):
        policy.read(path)


# --- rules on data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "shared", "held", "told"),
    [
        (Policy(), 12, Holdings(250, 5), None),
        (Policy(), 12, Holdings(249, 5), "rows: 249"),
        (Policy(), 13, Holdings(250, 5), "parameters_per_row: 13"),
        (Policy(), 12, Holdings(250, 4), "events: 4"),
        (Policy(), 12, Holdings(250, None), None),
        (NO_RULES, 500, Holdings(1, 0), None),
    ],
)
def test_rules_on_data(rules: Policy, shared: int, held: Holdings, told: str | None) -> None:
    found = policy.refuse_data(rules, shared, held)
    assert found is None if told is None else found is not None and found.startswith(told)


def client_of(observe: Any, **data: Any) -> Any:
    def build(**arrays: Any) -> pm.Model:
        with pm.Model() as model:
            held = {name: pm.Data(name, value) for name, value in arrays.items()}
            observe(pm.Normal("mu", 0, 1), **held)
        return model

    # A builder's arguments are its containers.
    names = ", ".join(data)
    scope: dict[str, Any] = {"build": build}
    exec(f"def builder({names}): return build({', '.join(f'{n}={n}' for n in data)})", scope)  # noqa: S102
    return FederatedModel(scope["builder"], ["mu"]).enrol({"a": data}, kernel=False)["a"]


BITS = np.array([0, 1, 0, 0, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("observe", "data", "expected"),
    [
        (lambda mu, y: pm.Normal("o", mu, 1, observed=y), {"y": np.arange(7.0)}, Holdings(7, None)),
        (lambda mu, y: pm.Normal("o", mu, 1, observed=y), {"y": np.float64(3.0)}, Holdings(1, None)),
        (lambda mu, y: pm.Normal("o", mu, 1, observed=pm.math.log(y)), {"y": np.arange(1.0, 8)}, Holdings(7, None)),
        (lambda mu, y: pm.Bernoulli("o", logit_p=mu, observed=y), {"y": BITS}, Holdings(9, 2)),
        (lambda mu, y: pm.Poisson("o", pm.math.exp(mu), observed=y), {"y": np.arange(6)}, Holdings(6, None)),
        (
            lambda mu, y, n: pm.Binomial("o", n, pm.math.sigmoid(mu), observed=y),
            {"y": np.array([3, 0, 2]), "n": np.array([4, 5, 2])},
            Holdings(3, 5),
        ),
        (
            lambda mu, y: pm.Categorical("o", pm.math.softmax(pm.math.stack([mu, 0.0, 1.0, 2.0])), observed=y),
            {"y": np.array([0, 0, 2, 2, 2, 3])},
            Holdings(6, 1),
        ),
        (
            lambda mu, y, z: (pm.Normal("o", mu, 1, observed=y), pm.Bernoulli("d", logit_p=mu, observed=z)),
            {"y": np.arange(30.0), "z": BITS},
            Holdings(9, 2),
        ),
        (
            lambda mu, y, x: pm.Potential("o", pm.math.sum(-((y - mu) ** 2)) + pm.math.sum(x)),
            {"y": np.arange(9.0), "x": np.arange(4.0)},
            Holdings(4, None),
        ),
    ],
    ids=["normal", "one number", "computed", "bernoulli", "counts", "binomial", "categorical", "two", "potential"],
)
def test_rows_and_events_are_read_off_the_model(observe: Any, data: Any, expected: Holdings) -> None:
    assert holdings(client_of(observe, **data)) == expected


COUNTED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int | None]] = {
    "binary": (lambda mu, y: pm.Bernoulli("o", logit_p=mu, observed=y), {"y": BITS}, {"y": 1 - BITS[:4]}, 5),
    "binary, one kind at a client": (
        lambda mu, y: pm.Bernoulli("o", logit_p=mu, observed=y),
        {"y": np.zeros(9, dtype=int)},
        {"y": np.ones(6, dtype=int)},
        6,
    ),
    "binomial": (
        lambda mu, y, n: pm.Binomial("o", n, pm.math.sigmoid(mu), observed=y),
        {"y": np.array([3, 0, 2]), "n": np.array([4, 5, 2])},
        {"y": np.array([1, 1]), "n": np.array([9, 1])},
        7,
    ),
    "categorical": (  # the last category at the second client alone
        lambda mu, y: pm.Categorical("o", pm.math.softmax(pm.math.stack([mu, 0.0, 1.0, 2.0])), observed=y),
        {"y": np.array([0, 0, 2, 2, 2])},
        {"y": np.array([0, 2, 3, 3])},
        2,
    ),
    "counts that are 0 or 1 at one client": (
        lambda mu, y: pm.Poisson("o", pm.math.exp(mu), observed=y),
        {"y": BITS},
        {"y": np.array([4, 0, 1])},
        None,
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_counts_of_two_clients_add_up_to_those_of_all_rows(case: str) -> None:
    observe, one, other, events = COUNTED[case]
    pooled = {name: np.concatenate([one[name], other[name]]) for name in one}
    ours, theirs = (tally(client_of(observe, **data)) for data in (one, other))
    rows = len(one["y"]) + len(other["y"])
    for own in (ours, theirs):  # by whichever client adds
        found = summed(own, numbers(ours) + numbers(theirs), 2)
        assert found == holdings(client_of(observe, **pooled))._replace(sites=2) == Holdings(rows, events, 2)


def test_counts_of_censored_times_add_up() -> None:
    event = np.array([1, 1, 0, 1, 0, 0, 0, 0])
    frame = pd.DataFrame({"site": ["a"] * 4 + ["b"] * 4, "time": np.arange(1.0, 9), "event": event})
    model = fedppl.agree(fedppl.formula("Surv(time, event) ~ 1", "weibull"), frame, by="site").model
    tables = {name: frame[frame["site"] == name] for name in "ab"} | {"pooled": frame}
    one, other, pooled = (model.enrol({name: rows}, kernel=False)[name] for name, rows in tables.items())
    found = summed(tally(one), numbers(tally(one)) + numbers(tally(other)), 2)
    assert found == holdings(pooled)._replace(sites=2) == Holdings(8, 3, 2)


# --- sums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "sites", "sets", "told"),
    [
        (Policy(), 3, 1, None),
        (Policy(cohorts=2), 3, 2, None),
        (Policy(), 2, 1, "fewest_sites: 2"),
        (Policy(), 3, 2, "cohorts: 2"),
        (Policy(fewest_sites=5), 4, 1, "fewest_sites: 4"),
        (Policy(fewest_sites=5, cohorts=1), 5, 2, "cohorts: 2"),
        (Policy(cohorts=math.inf), 3, 10**6, None),
    ],
)
def test_rules_on_cohorts(rules: Policy, sites: int, sets: int, told: str | None) -> None:
    found = policy.refuse_cohort(rules, sites, sets)
    assert found is None if told is None else found is not None and found.startswith(told)


def test_numbers_that_a_policy_does_not_name_are_smaller_singly_than_in_sums() -> None:
    """A number that it names holds both ways, zero too."""
    usual = {False: (0, policy.REQUESTS), True: (policy.POINTS_OF_SUMS, policy.REQUESTS_OF_SUMS)}
    for masked, (points, requests) in usual.items():
        assert policy.resolved(Policy(), masked=masked) == Policy(points=points, requests=requests)
        for given in (Policy(points=0, requests=20), Policy(points=7, requests=1), NO_RULES):
            assert policy.resolved(given, masked=masked) == given


IN_THE_CLEAR = "sums.*secure=.*optional"


def app_of(folder: Path, **given: Any) -> Any:
    return fedppl.Flower.client_app(
        MODEL, fedppl.EP(), lambda config: CLIENTS["clinic 3"], folder=lambda config: folder, **given
    )


def test_no_single_reply_leaves_unless_the_policy_says_so(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    for given in ({}, {"policy": None}, {"policy": Policy()}, {"policy": opened(sums="required")}):
        with pytest.raises(DeclarationError, match=IN_THE_CLEAR):
            app_of(tmp_path, **given)
    app_of(tmp_path, policy=SINGLE)


def test_no_single_reply_leaves_a_process_unless_the_policy_says_so() -> None:
    with pytest.raises(DeclarationError, match="sums.*secure=True.*optional"):
        fedppl.fit(MODEL, CLIENTS, fedppl.EP(), engine=fedppl.InProcess(policy=Policy()), progressbar=False)


@pytest.mark.parametrize("given", ["function", "function to none", "file", "function to a file"])
def test_a_policy_that_is_read_later_is_held_to_as_well(tmp_path: Path, given: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("requests = 60\n")
    chosen: Any = {
        "function": lambda config: Policy(),
        "function to none": lambda config: None,
        "file": path,
        "function to a file": lambda config: path,
    }[given]
    pytest.importorskip("flwr")
    from tests.support.fake_grid import FakeGrid, engine_of, node, remember

    remember(MODEL, CLIENTS)
    grid = FakeGrid({1: node(app_of(tmp_path / "site", policy=chosen), 1, **{"client-id": "clinic 3"})})
    with pytest.raises(DeclarationError, match=IN_THE_CLEAR):
        fedppl.fit(MODEL, None, fedppl.EP(), engine=engine_of(grid, MODEL, 1), progressbar=False)


def test_under_the_default_a_site_without_masks_answers_no_message(tmp_path: Path) -> None:
    site = site_of(tmp_path, opened(sums="required"))
    assert refused(sent(site, ask(1)))
    assert _node.agree(site, {}, None, {})[1]["refused"] == REFUSED
    parcel = fedppl.local.target.pack_target(LAYOUT.prior, LAYOUT.prior, 0.0), CONCLUDING
    assert _conclusions.conclude(site, {}, None, parcel) == ({}, {"client_id": "clinic 3"})
    assert "error" in _node.introduce(site, {}, None, {})[1]
    assert not list(tmp_path.glob("*.nc"))


# --- rules on requests ----------------------------------------------------------------------------------------

MODEL, CLIENTS = problems.regression()
CLIENT = MODEL.enrol(CLIENTS)["clinic 3"]
LAYOUT = CLIENT.layout
SD = np.array([3.0, 3.0, 2.0])  # of the prior, whose mean is 0
NONE = np.zeros((0, 3))


def at(point: Any) -> Asked:
    return Asked(np.asarray(point, dtype=float)[None] * SD, NONE)


def target(q: Gaussian, cavity: Gaussian) -> Asked:
    return Asked(NONE, NONE, ((q, cavity),))


def normal(mean: Any, precision: float) -> Gaussian:
    """Around a mean in prior sds, so many times as sharp as the prior."""
    matrix = precision * np.diag(SD**-2)
    return Gaussian(matrix @ (np.asarray(mean, dtype=float) * SD), matrix)


FAR = [11.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (at([0, 0, -9.9]), None),
        (at([0, 0, -10.1]), "distance"),
        (at([0, np.nan, 0]), "numbers"),
        (Asked(np.zeros((1, 2)), NONE), "numbers"),
        (target(normal([5, 0, 0], 100), normal([5, 0, 0], 90)), None),
        (target(normal(FAR, 100), normal([0, 0, 0], 90)), "distance"),
        (target(normal([0, 0, 0], 100), normal(FAR, 90)), "distance"),
        (target(normal([0, 0, 0], 1), normal([1e6, 0, 0], 1e-4)), "distance"),  # vague, and leads far all the same
        (target(normal([0, 0, 0], 100), normal([0, 0, 0], 201)), "cavity"),
        (target(normal([0, 0, 0], 100), normal([0, 0, 0], -0.5)), None),  # improper: others' sites may bend outwards
        (target(normal([0, 0, 0], -1), normal([0, 0, 0], 1)), "numbers"),
        (Asked(NONE, np.array([FAR, [0, 0, 0]]) * SD), None),  # one of them is left out
        (Asked(NONE, np.array([FAR, FAR]) * SD), "distance"),
    ],
)
def test_rules_on_where_a_request_asks(asked: Asked, told: str | None) -> None:
    rules = Policy()
    with np.errstate(all="ignore"):
        try:
            found = policy.refuse_request(rules, LAYOUT, asked)
        except ValueError:  # the guard takes it for the same
            found = "numbers: shapes"
    assert found is None if told is None else found is not None and found.startswith(told)


def test_the_ledger_is_the_accountants_composition() -> None:
    """Of mixed settings: let through while δ(ε) at 2 sqrt(Σ 1 / z²) is below, refused when it is above."""
    rules = Policy(epsilon=2.0, delta=1e-5)
    rng = np.random.default_rng(0)
    spent, through, stopped = 0.0, 0, 0
    for z in rng.choice([3.0, 8.0, 20.0], size=400):
        rule = policy.refuse_release(rules, z, spent, 0)
        mu = privacy.gaussian_mu([1.0], [1]) * math.sqrt(spent + z**-2)
        assert (rule is None) == (privacy.delta_at(2.0, mu) <= 1e-5) == (privacy.epsilon_at(1e-5, mu) <= 2.0)
        if rule is None:
            spent, through = spent + z**-2, through + 1
        stopped += rule is not None
    assert through > 5 and stopped > 5
    assert privacy.epsilon_at(1e-5, 2 * math.sqrt(spent)) <= 2.0


def test_what_has_no_known_epsilon_spends_all_of_it() -> None:
    assert "no ε is known" in str(policy.refuse_release(Policy(epsilon=5.0), 20.0, 0.0, 1))
    assert policy.refuse_release(Policy(), None, 0.0, 3) is None


# --- the guard ------------------------------------------------------------------------------------------------


def ask(number: int = 1, run: str = "r", point: Any = (0.0, 0.0, 0.0), **keywords: Any) -> Request:
    message = {
        "point": np.asarray(point, dtype=float) * SD,
        "move": np.zeros(3),
        "prior_share": np.array(0.0),
        **keywords,
    }
    return Request("clinic 3", 7, number, (1, number, 5), message, run)


def admitted(guard: Guard, request: Request, algorithm: Any = None) -> bool:
    return admit(guard, algorithm or fedppl.EP(), CLIENT, request) is not None


def test_one_answer_a_round_and_rounds_increase_in_each_run() -> None:
    guard = in_memory(OPEN, "a")
    assert admitted(guard, ask(2))
    assert not admitted(guard, ask(2)) and not admitted(guard, ask(1))
    assert admitted(guard, ask(3)) and admitted(guard, ask(1, "other"))
    assert guard.read().requests == 3


def test_requests_count_over_runs() -> None:
    guard = in_memory(opened(requests=4), "a")
    assert [admitted(guard, ask(1, f"run {i}")) for i in range(6)] == [True] * 4 + [False] * 2


def of_sums(run: str, far: int = 0) -> Request:
    """The first request of `fedppl.Sums`, with some points far from the prior's mean."""
    algorithm = fedppl.Sums(starts=1)
    message = algorithm.broadcast(algorithm.init(LAYOUT, ("clinic 3",), np.random.default_rng(0)), "clinic 3")
    points = np.array(message["points"])
    points[:far] = np.array(FAR) * SD
    return ask(1, run)._replace(message={**message, "points": points})


def test_points_with_values_count_over_runs_and_by_default_none_is_allowed() -> None:
    sums, count = fedppl.Sums(starts=1), len(of_sums("a").message["points"])
    assert count > 2
    assert not admitted(in_memory(OPEN, "a"), of_sums("a"), sums)
    guard = in_memory(opened(points=2 * count), "a")
    assert [admitted(guard, of_sums(run), sums) for run in "abc"] == [True, True, False]
    assert guard.read().points == 2 * count
    guard = in_memory(opened(points=count - 1), "a")
    assert not admitted(guard, of_sums("a"), sums) and admitted(guard, of_sums("b", far=1), sums)
    assert guard.read().points == count - 1  # the one that is left out is not counted


def test_points_that_are_too_far_have_no_value_in_the_sum() -> None:
    sums, guard = fedppl.Sums(starts=1), in_memory(opened(points=10**6), "a")
    found = admit(guard, sums, CLIENT, of_sums("a", far=2))
    assert found is not None
    lost = sums.update_client(CLIENT, None, found.message, np.random.default_rng(0)).reply["values_lost"]
    np.testing.assert_array_equal(lost, ~found.message["inside"])
    np.testing.assert_array_equal(np.flatnonzero(lost), [0, 1])


def test_points_on_the_way_are_left_out_where_they_are_too_far() -> None:
    move = np.array([20.0, 0.0, 0.0])
    found = admit(in_memory(OPEN, "a"), fedppl.EP(), CLIENT, ask(point=[1, 0, 0], move=move))
    assert found is not None
    inside = found.message["inside"]
    assert inside[0] and 0 < np.sum(inside) < len(inside)
    _, reply, _ = fedppl.EP().update_client(CLIENT, None, found.message, np.random.default_rng(0))
    np.testing.assert_array_equal(reply["ray"] > -1e299, inside[1:])
    _, whole, _ = fedppl.EP().update_client(CLIENT, None, ask(point=[1, 0, 0], move=move).message, None)
    np.testing.assert_allclose(reply["ray"][inside[1:]], whole["ray"][inside[1:]], rtol=1e-9)


def test_a_server_cannot_say_for_itself_which_points_are_inside() -> None:
    request = ask(point=[12, 0, 0], move=np.array([30.0, 0, 0]), inside=np.ones(17, dtype=bool))
    found = admit(in_memory(OPEN, "a"), fedppl.EP(), CLIENT, request)
    assert found is not None and not found.message["inside"][0]
    nowhere_else = ask(point=[1, 0, 0], move=np.zeros(3), inside=np.full(17, 0.5))
    found = admit(in_memory(OPEN, "a"), fedppl.EP(), CLIENT, nowhere_else)
    assert found is not None and "inside" not in found.message


@pytest.mark.parametrize(
    "algorithm",
    [
        fedppl.EP(local=fedppl.local.Laplace()),
        fedppl.EP(local=fedppl.local.NestedLaplace(points=16)),
        fedppl.EP(local=fedppl.local.NUTS(draws=200, tune=200, chains=1)),
        fedppl.PrivateEP(clip=1.0, noise_multiplier=2.0, releases=2),
    ],
    ids=lambda algorithm: f"{algorithm.name}, {algorithm.settings['local'].split('(')[0]}",
)
def test_what_is_computed_is_what_the_policy_looked_at(algorithm: Any) -> None:
    """A message that holds both a point and a target is looked at where it is computed."""
    pair = target(normal([0.0] * 3, 1e4), normal([0.0] * 3, 0.9e4)).targets[0]
    packed = fedppl.local.target.pack_target(*pair, 0.0)
    begun = algorithm.broadcast(algorithm.init(LAYOUT, ("clinic 3",), np.random.default_rng(0)), "clinic 3")
    message = {**begun, **ask(1, **packed).message}
    seen = algorithm.disclosure.asks(LAYOUT, message)
    _, reply, _ = algorithm.update_client(CLIENT, None, message, np.random.default_rng(0))
    assert ("gradient" in reply) == bool(len(seen.points) + len(seen.spare))
    assert ("mean" in reply or "site" in reply) == bool(seen.targets)
    assert len(seen.points) + len(seen.spare) + len(seen.targets) > 0


@pytest.mark.parametrize(
    "algorithm",
    [
        fedppl.averaging.FedAvg(learning_rate=0.1),
        fedppl.averaging.SCAFFOLD(learning_rate=0.1),
        fedppl.averaging.FedProx(learning_rate=0.1, mu=0.1),
    ],
)
def test_a_point_with_coordinates_to_spare_is_none(algorithm: Any) -> None:
    """What is beyond φ would be taken for local variables, and where they end would leave."""
    state = algorithm.init(LAYOUT, ("clinic 3",), np.random.default_rng(0))
    message = algorithm.broadcast(state, "clinic 3")
    assert admitted(in_memory(OPEN, "a"), ask()._replace(message=message), algorithm)
    doubled = {**message, "phi": np.concatenate([message["phi"], message["phi"]])}
    assert not admitted(in_memory(OPEN, "a"), ask()._replace(message=doubled), algorithm)


@pytest.mark.parametrize("share", [-1e7, 1.0001, np.nan, [0.1, 2.0], "a"])
def test_a_share_of_the_prior_is_one(share: Any) -> None:
    request = ask()
    message = {**request.message, "prior_share": np.array(share)}
    assert not admitted(in_memory(OPEN, "a"), request._replace(message=message))


def test_an_algorithm_that_does_not_say_where_it_asks_needs_a_policy_that_does_not_look() -> None:
    silent = fedppl.EP()._replace(disclosure=Disclosure())
    assert not admitted(in_memory(OPEN, "a"), ask(), silent)
    open_ended = opened(distance=math.inf, cavity=math.inf)
    assert admitted(in_memory(open_ended, "a"), ask(), silent)


@pytest.mark.parametrize("kind", ["EP", "PrivateEP"])
def test_with_a_total_epsilon_only_known_costs_are_answered(kind: str) -> None:
    private = fedppl.PrivateEP(clip=1.0, noise_multiplier=5.0, releases=99)
    algorithm = private if kind == "PrivateEP" else fedppl.EP()
    guard = in_memory(opened(epsilon=3.0), "a")
    state = algorithm.init(LAYOUT, ("clinic 3",), np.random.default_rng(0))
    message = algorithm.broadcast(state, "clinic 3")
    count = sum(admitted(guard, ask()._replace(run=str(i), message=message), algorithm) for i in range(40))
    allowed = max(t for t in range(1, 40) if privacy.epsilon(5.0, t, 1e-5) <= 3.0) if kind == "PrivateEP" else 0
    assert count == allowed


def test_a_declaration_that_is_not_listed_is_refused_by_name() -> None:
    rules = opened(declarations=("beef",))
    assert CLIENT.declaration in str(policy.refuse_declaration(rules, lambda: CLIENT.declaration))
    assert not admitted(in_memory(rules, "a"), ask())
    listed = opened(declarations=(CLIENT.declaration,))
    assert admitted(in_memory(listed, "a"), ask())


def test_a_person_approves_runs_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.txt"
    guard = in_memory(opened(approval=path), "a")
    assert not admitted(guard, ask())
    path.write_text("other\nr\n")
    assert admitted(guard, ask())
    assert not admitted(guard, ask(run="third"))
    assert guard.read().requests == 1


def test_the_log_says_who_approved_a_run_and_by_which_rules_it_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "runs.txt"
    path.write_text("# read on Mondays\nr # A. Meyer, 1 December\n")
    rules = opened(approval=path)
    assert not refused(sent(site_of(tmp_path / "site", rules), ask(1)))
    (request,) = [line for line in log_of(tmp_path / "site") if line["event"] == "request"]
    assert request["approved"] == "A. Meyer, 1 December"
    with store.changing(tmp_path / "site") as here:
        refuse_data(in_store(rules, here, "clinic 3"), CLIENT, fedppl.EP())
    told = log_of(tmp_path / "site")[-1]
    assert (told["event"], told["algorithm"]) == ("introduction", fedppl.EP().name)
    assert f"approval = {path}" in told["rules"] and "distance = " not in policy.told(Policy(distance=10.0))


def test_a_function_sees_a_release_before_it_leaves() -> None:
    seen: list[policy.Release] = []

    def approve(release: policy.Release) -> bool:
        seen.append(release)
        return release.round == 1

    guard = in_memory(opened(approval=approve), "a")
    reply = Reply("clinic 3", 7, LAYOUT.fingerprint, {"mean": np.ones(2)}, {"ess": 3.0})
    assert released(guard, None, ask(1), reply)
    assert not released(guard, None, ask(2), reply)
    assert [set(one.arrays) for one in seen] == [{"mean"}] * 2
    failure = Failure("clinic 3", 7, "no mode within 20 steps")
    assert released(guard, None, ask(1), failure) and not released(guard, None, ask(2), failure)
    assert seen[-1].reason == "no mode within 20 steps" and not seen[-1].arrays


def test_an_approval_that_fails_is_none(tmp_path: Path) -> None:
    def approve(release: policy.Release) -> bool:
        raise ZeroDivisionError

    guard = in_memory(opened(approval=approve), "a")
    reply = Reply("clinic 3", 7, LAYOUT.fingerprint, {"mean": np.ones(2)}, {"ess": 3.0})
    assert not released(guard, None, ask(1), reply)
    guard = in_memory(opened(approval=tmp_path), "a")  # a folder
    assert not admitted(guard, ask())


HONEST = {
    "regression": problems.regression,
    "noise": problems.noise,
    "schools": problems.schools,
    "logistic": problems.logistic,
    "counts": problems.counts,
    "two clients": lambda: problems.noise(2),
}


@pytest.mark.filterwarnings("ignore:.*:fedppl.ConvergenceWarning")
@pytest.mark.parametrize("name", slow_but(HONEST, "schools"))
def test_honest_runs_meet_no_limit_on_where_they_ask(name: str) -> None:
    model, clients = HONEST[name]()
    free = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    engine = fedppl.InProcess(policy=OPEN)
    kept = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1, engine=engine)
    assert not any(record.failures for record in kept.records)
    np.testing.assert_allclose(kept.posterior.linear, free.posterior.linear, rtol=1e-6, atol=1e-8)


def test_an_honest_run_fits_into_the_default() -> None:
    """As many rows as it wants, and no more requests than it allows."""
    model, clients = problems.logistic(rows=Policy().rows)
    engine = fedppl.InProcess(policy=SINGLE)
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1, engine=engine)
    assert fit.status.ok and len(fit.records) <= policy.REQUESTS
    assert not any(record.failures for record in fit.records)


@problems.few_rounds
def test_a_fit_by_sums_goes_as_far_as_the_points_that_its_sites_allow(caplog: pytest.LogCaptureFixture) -> None:
    """Weights are of points that all answered; who allows none is refused by its own log."""
    model, clients = problems.regression()
    fits = {}
    for points in (0, 10**6):
        engine = fedppl.InProcess(policy=opened(points=points))
        fits[points] = fedppl.fit(model, clients, fedppl.Sums(), engine=engine, progressbar=False, random_seed=1)
    refused, allowed = fits.values()
    assert not refused.status.ok and all(set(record.failures) == set(clients) for record in refused.records)
    assert any("points:" in record.getMessage() for record in caplog.records)
    exact = problems.regression_posterior(clients)
    assert allowed.status.ok and not any(record.failures for record in allowed.records)
    np.testing.assert_allclose(gaussian.mean(allowed.posterior), gaussian.mean(exact), atol=1e-4)


def test_a_prior_that_is_off_by_several_sds_is_left() -> None:
    model, clients = problems.regression()
    shifted = {name: {"X": data["X"], "y": data["y"] + 14.0} for name, data in clients.items()}  # 7 prior sds
    fit = fedppl.fit(
        model, shifted, fedppl.EP(), engine=fedppl.InProcess(policy=OPEN), progressbar=False, random_seed=1
    )
    exact = problems.regression_posterior(shifted)
    assert fit.status.ok and gaussian.mean(exact)[2] > 6.5 * SD[2]
    np.testing.assert_allclose(gaussian.mean(fit.posterior), gaussian.mean(exact), atol=1e-4)


def test_in_one_process_a_client_below_the_rules_ends_the_fit_before_it_begins(caplog: Any) -> None:
    with pytest.raises(DeclarationError, match="'clinic 0' does not take part"):
        fedppl.fit(MODEL, CLIENTS, fedppl.EP(), engine=fedppl.InProcess(policy=SINGLE), progressbar=False)
    assert "rows: 5, at least 250 wanted" in caplog.text
    with pytest.raises(DeclarationError, match="policy='strict' must be"):
        fedppl.InProcess(policy="strict")


# --- a site ---------------------------------------------------------------------------------------------------


def site_of(folder: Path, rules: Policy = OPEN, algorithm: Any = None, model: Any = MODEL, data: Any = None) -> Node:
    held = CLIENTS["clinic 3"] if data is None else data
    return Node(
        f"token {folder} {id(held)}",
        model,
        algorithm or fedppl.EP(),
        lambda config: held,
        lambda config: "clinic 3",
        folder,
        20,
        2,
        rules,
    )


def sent(site: Node, request: Request) -> Any:
    parcel = _node.answer_request(site, {}, None, _wire.pack_request(request))
    return _wire.unpack_reply(*parcel)


def refused(reply: Any) -> bool:
    return getattr(reply, "reason", "") == REFUSED and not isinstance(reply, Reply)


def log_of(folder: Path) -> list[dict[str, Any]]:
    return stored.lines(folder)


def test_every_request_stands_in_the_log_and_refusals_sound_alike(tmp_path: Path) -> None:
    site = site_of(tmp_path, opened(requests=2))
    assert not refused(sent(site, ask(1)))
    told = {sent(site, request).reason for request in (ask(1, point=[1, 0, 0]), ask(2, point=FAR))}
    assert not refused(sent(site, ask(3)))
    told.add(sent(site, ask(4)).reason)
    assert told == {REFUSED}
    lines = log_of(tmp_path)
    assert [line["event"] for line in lines] == [
        "request",
        "reply",
        "request",
        "request",
        "request",
        "reply",
        "request",
    ]
    assert [str(line["refused"]).partition(":")[0] for line in lines if line["refused"]] == [
        "round",
        "distance",
        "requests",
    ]
    assert lines[1]["released"] == {"value": 1, "gradient": 3, "hessian": 6, "ray": 16}
    assert lines[0]["asked"] == {"point": 3, "move": 3, "prior_share": 1} and lines[0]["bytes"] == 56


def test_limits_outlive_the_process_and_other_names_of_the_client(tmp_path: Path) -> None:
    rules = opened(requests=3)
    for i in range(3):
        assert not refused(sent(site_of(tmp_path, rules)._replace(token=f"process {i}"), ask(1, f"run {i}")))
    assert refused(sent(site_of(tmp_path, rules)._replace(token="last"), ask(1, "run 3")))
    renamed = ask(1, "run 4")._replace(client_id="somebody else")
    assert refused(sent(site_of(tmp_path, rules)._replace(token="renamed"), renamed))


def test_the_same_request_again_gets_the_same_answer_and_costs_nothing(tmp_path: Path) -> None:
    """A server that was killed after a round asks for it again: under noise, the same noised vector comes."""
    algorithm = fedppl.PrivateEP(clip=1.0, noise_multiplier=2.0, releases=5)
    site = site_of(tmp_path, algorithm=algorithm)
    state = algorithm.init(LAYOUT, ("clinic 3",), np.random.default_rng(0))
    request = ask()._replace(message=algorithm.broadcast(state, "clinic 3"))
    first, again = sent(site, request), sent(site, request._replace(nonce=8))
    assert (first.nonce, again.nonce) == (7, 8)
    np.testing.assert_array_equal(first.message["site"], again.message["site"])
    ledger = stored.ledger(tmp_path, "clinic 3")
    assert ledger.requests == 1 and ledger.spent == 0.25
    assert refused(sent(site, request._replace(seed=(2, 1, 5))))
    assert [line.get("repeated") for line in log_of(tmp_path)] == [None, None, True, None]


def test_a_server_that_asks_without_end_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedppl.engine.guard._ALL_OF", 4)
    site = site_of(tmp_path, opened(requests=1))
    assert not refused(sent(site, ask(1)))
    kept, runs = stored.names(tmp_path), stored.execute(tmp_path, "SELECT * FROM runs")
    assert all(refused(sent(site, ask(1, f"made up {i}"))) for i in range(20))
    assert stored.names(tmp_path) == kept and stored.execute(tmp_path, "SELECT * FROM runs") == runs
    lines = log_of(tmp_path)
    assert [line.get("refused_or_free") for line in lines] == [None, None, 1, 2, 3, 4, 8, 16]
    assert {line["requests"] for line in lines} == {1}
    # What is cut off is seen even so.
    stored.execute(tmp_path, "DELETE FROM chain WHERE line = ?", len(lines))
    assert refused(sent(site, ask(1, "after")))
    assert stored.execute(tmp_path, "SELECT count(*) FROM chain") == [(len(lines) - 1,)]


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_what_a_site_keeps_is_its_owners(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        sent(site_of(tmp_path, OPEN), ask(1))
        with store.reading(tmp_path):
            files = list(tmp_path.iterdir())
            assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        parcel = fedppl.local.target.pack_target(LAYOUT.prior, LAYOUT.prior, 0.0), CONCLUDING
        _conclusions.conclude(site_of(tmp_path), {}, None, parcel)
    finally:
        os.umask(before)
    files += list(tmp_path.iterdir())
    names = {"clinic%203.nc", *(f"site.sqlite{end}" for end in ("", "-wal", "-shm"))}
    assert {path.name for path in files} == names
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_an_account_is_counted_again_from_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site, file = site_of(tmp_path, OPEN), tmp_path / store.FILE
    for number in (1, 2, 3):
        assert not refused(sent(site, ask(number)))
    assert audit.main([str(tmp_path)]) == 0 and "requests answered of clinic 3: 3" in capsys.readouterr().out
    whole = file.read_bytes()
    with store.changing(tmp_path) as here:  # by who has the key
        clients = {"clinic 3": [0, *here.account[0].clients["clinic 3"][1:]]}
        here.account[0] = here.account[0]._replace(clients=clients)
    assert audit.main([str(tmp_path)]) == 1 and "counts 0 requests, its log 3" in capsys.readouterr().err
    file.write_bytes(whole)
    stored.execute(tmp_path, "DELETE FROM runs")
    assert audit.main([str(tmp_path)]) == 1 and "rows on runs" in capsys.readouterr().err
    file.write_bytes(whole)
    stored.execute(tmp_path, "UPDATE chain SET record = replace(record, 'request', 'nothing') WHERE line = 1")
    assert audit.main([str(tmp_path)]) == 1 and "broken at line 1" in capsys.readouterr().err
    assert not refused(sent(site, ask(4)))  # which goes by the last line
    file.write_bytes(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPPL_KEY_FILE", str(tmp_path / "another"))
        assert audit.main([str(tmp_path)]) == 1 and "not checked: key file" in capsys.readouterr().err


def test_a_log_is_written_out_and_moved_away_and_its_chain_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, first, second = tmp_path / "site", tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    site = site_of(folder, OPEN)
    assert not refused(sent(site, ask(1)))
    before = log_of(folder)
    assert audit.main([str(folder), "--export", str(first)]) == 0 and list(audit.lines(first)) == before
    assert audit.main([str(folder), "--rotate", str(first)]) == 1 and "not done" in capsys.readouterr().err
    first.unlink()
    assert audit.main([str(folder), "--rotate", str(first)]) == 0 and list(audit.lines(first)) == before
    assert log_of(folder) == [] and audit.main([str(folder)]) == 0
    assert before[-1]["digest"] in capsys.readouterr().out
    assert not refused(sent(site, ask(2))) and refused(sent(site, ask(1)))
    after = log_of(folder)
    assert [line["line"] for line in after] == [3, 4, 5] and after[0]["before"] == before[-1]["digest"]
    assert stored.ledger(folder, "clinic 3").requests == 2
    assert audit.main([str(folder), "--export", str(second)]) == 0
    capsys.readouterr()
    assert audit.main([str(second)]) == 0 and "line 3 follows" in capsys.readouterr().out
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(first.read_bytes() + second.read_bytes())
    assert audit.main([str(whole)]) == 0 and "5 lines, the chain holds" in capsys.readouterr().out
    if os.name == "posix":
        assert {path.stat().st_mode & 0o777 for path in (first, second)} == {0o600}
    stored.execute(folder, "DELETE FROM chain")
    assert refused(sent(site, ask(3)))


def test_a_refusal_is_said_in_pythons_log_and_names_its_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = site_of(tmp_path, opened(few_rows=3, approval=tmp_path / "runs"))
    unnamed = site._replace(client_id=lambda config: "")
    assert refused(sent(unnamed, ask(1)))
    assert "approval: nobody has approved run 'r'" in caplog.text
    (said,) = [record for record in caplog.records if record.name == "fedppl.engine.guard"]
    assert (said.run, said.round, said.client, said.status) == ("r", 1, "clinic 3", "refused")  # type: ignore[attr-defined]
    assert [line["site"] for line in log_of(tmp_path)] == ["clinic 3"]


CONCLUDING = {"client_id": "clinic 3", "run": "r", "seed": "1", "status": "converged"}


def dies(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_site_that_died_over_a_request_answers_it_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(tmp_path, OPEN)
    assert not refused(sent(site, ask(1)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fedppl.engine.answer.released", dies)
        sent(site, ask(2, point=[1, 0, 0]))
    assert stored.ledger(tmp_path, "clinic 3").requests == 1 and len(log_of(tmp_path)) == 2
    first = sent(site, ask(2, point=[1, 0, 0]))
    assert not refused(first) and sent(site, ask(2, point=[1, 0, 0])).message["value"] == first.message["value"]
    assert not refused(sent(site, ask(3, point=[1, 0, 0])))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_site_that_dies_while_it_keeps_an_answer_releases_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """No answer leaves whose count is not kept: `releases` bounds distinct vectors."""
    algorithm = fedppl.PrivateEP(clip=1.0, noise_multiplier=2.0, releases=2)
    site = site_of(tmp_path, algorithm=algorithm)
    state = algorithm.init(LAYOUT, ("clinic 3",), np.random.default_rng(0))
    message, write, found = algorithm.broadcast(state, "clinic 3"), store._write, set()

    def torn(here: store.Store) -> None:
        if when == "after":
            write(here)
        dies()

    for number in range(1, 6):
        request = ask(number)._replace(message=message, seed=(number, 1, 1))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(store, "_write", torn)
            sent(site, request)
        reply = sent(site, request)
        found |= {reply.message["site"].tobytes()} if isinstance(reply, Reply) else set()
    assert len(found) == 2
    assert stored.ledger(tmp_path, "clinic 3").requests == 5
    assert audit.main([str(tmp_path)]) == 0


def test_a_full_disk_answers_nothing_and_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(tmp_path, OPEN)
    assert not refused(sent(site, ask(1)))
    connect = store.sqlite3.connect

    def small(*given: Any, **named: Any) -> Any:
        connection = connect(*given, **named)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(store.sqlite3, "connect", small)
    answered = [not refused(sent(site, ask(1, f"run {i}"))) for i in range(200)]
    monkeypatch.setattr(store.sqlite3, "connect", connect)
    assert not all(answered) and stored.ledger(tmp_path, "clinic 3").requests == 1 + sum(answered)
    assert audit.main([str(tmp_path)]) == 0


def test_a_request_costs_the_same_after_a_million_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own instructions, which do not depend on the machine; neither chain nor account is read as a whole."""
    connect, steps = store.sqlite3.connect, [0]

    def counting(*given: Any, **named: Any) -> Any:
        connection = connect(*given, **named)
        connection.set_progress_handler(lambda: steps.append(steps.pop() + 1), 1)
        return connection

    def cost(number: int) -> int:
        steps[0] = 0
        assert not refused(sent(site, ask(number)))
        return steps[0]

    site = site_of(tmp_path, OPEN)
    assert not refused(sent(site, ask(1)))
    monkeypatch.setattr(store.sqlite3, "connect", counting)
    before = cost(2)
    monkeypatch.setattr(store.sqlite3, "connect", connect)
    with store.changing(tmp_path) as here:
        first = here.account[0].head.length + 1
        numbers = "WITH RECURSIVE n(i) AS (SELECT ? UNION ALL SELECT i + 1 FROM n WHERE i < 1000000)"
        here.connection.execute(f"{numbers} INSERT INTO chain SELECT i, 'x' FROM n", (first,))  # noqa: S608
        here.account[0] = here.account[0]._replace(head=store.Head(10**6, "0" * 64))
        store.append(here, {"event": "introduction"})
    monkeypatch.setattr(store.sqlite3, "connect", counting)
    assert 0 < cost(3) < 1.1 * before


def test_another_process_that_holds_the_file_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PATIENCE", 0.01)
    with store.changing(tmp_path):
        with store.reading(tmp_path):
            pass  # who only reads does not wait
        with pytest.raises(DataError, match="held by another process"), store.changing(tmp_path):
            pass


def test_parallel_requests_are_let_through_one_by_one(tmp_path: Path) -> None:
    algorithm = fedppl.PrivateEP(clip=1.0, noise_multiplier=2.0, releases=3)
    site = site_of(tmp_path, algorithm=algorithm)
    state = algorithm.init(LAYOUT, ("clinic 3",), np.random.default_rng(0))
    message = algorithm.broadcast(state, "clinic 3")
    _node.introduce(site, {}, None, {})
    answers: list[Any] = [None] * 12

    def one(i: int) -> None:
        answers[i] = sent(site, ask(1, f"run {i}")._replace(message=message))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(reply, Reply) for reply in answers) == 3
    assert stored.ledger(tmp_path, "clinic 3").requests == 12
    assert audit.main([str(tmp_path)]) == 0


def test_the_budget_counts_epsilon_over_settings(tmp_path: Path) -> None:
    """Three releases with little noise, and an app with much noise gets nothing more."""
    total = (privacy.epsilon(1.5, 2) + privacy.epsilon(1.5, 3)) / 2
    rules = opened(epsilon=total)
    loud, quiet = (fedppl.PrivateEP(clip=1.0, noise_multiplier=z, releases=500) for z in (1.5, 8.0))
    message = loud.broadcast(loud.init(LAYOUT, ("clinic 3",), np.random.default_rng(0)), "clinic 3")
    first = [sent(site_of(tmp_path, rules, loud), ask(1, f"a{i}")._replace(message=message)) for i in range(3)]
    assert [refused(reply) for reply in first] == [False, False, True]
    room = 0
    while privacy.epsilon([1.5, 8.0], [2, room + 1]) <= total:
        room += 1
    site = site_of(tmp_path, rules, quiet)._replace(token="quiet")
    later = [sent(site, ask(1, f"b{i}")._replace(message=message)) for i in range(room + 1)]
    assert [refused(reply) for reply in later] == [False] * room + [True]
    told = [line["epsilon"] for line in log_of(tmp_path) if line["event"] == "reply" and "epsilon" in line]
    assert told[1] == pytest.approx(privacy.epsilon(1.5, 2))


def _set(sql: str) -> Callable[[Path], None]:
    return lambda folder: stored.execute(folder, sql) and None


def _older(folder: Path) -> None:
    """Row on the run of the file as it was a request before, with all else as it is."""
    ((before,),) = stored.execute(folder, 'SELECT content FROM runs WHERE key LIKE \'%"run", "r"]\'')
    assert not refused(sent(site_of(folder), ask(2)))
    stored.execute(folder, 'UPDATE runs SET content = ? WHERE key LIKE \'%"run", "r"]\'', before)


SPOILT: dict[str, Callable[[Path], Any]] = {
    "no account": _set("DELETE FROM account"),
    "two accounts": _set("INSERT INTO account SELECT * FROM account"),
    "file damaged": lambda folder: (folder / store.FILE).write_bytes(b"{" * 4096),
    "no number": _set("UPDATE account SET content = replace(content, '[1, ', '[NaN, ')"),
    "count edited": _set("UPDATE account SET content = replace(content, '[1, ', '[0, ')"),
    "not signed": _set("UPDATE account SET signature = x''"),
    "a number as the signature": _set("UPDATE account SET signature = 1099511627776"),
    "bytes as the account": _set("UPDATE account SET content = CAST(content AS BLOB)"),
    "bytes as a run": _set("UPDATE runs SET content = CAST(content AS BLOB)"),
    "no UTF-8": _set("UPDATE runs SET content = CAST(x'ff' AS TEXT)"),
    "row of a run deleted": _set("DELETE FROM runs"),
    "row of a run edited": _set("UPDATE runs SET content = replace(content, '[1, ', '[0, ')"),
    "older row of a run": _older,
    "log cut": _set("DELETE FROM chain WHERE line = (SELECT max(line) FROM chain)"),
    "no log": _set("DELETE FROM chain"),
    "a line more": _set(
        "INSERT INTO chain SELECT line + 1, record FROM chain WHERE line = (SELECT max(line) FROM chain)"
    ),
    "last line edited": _set("UPDATE chain SET record = replace(record, 'reply', 'nothing')"),
    "last line of no number": _set("UPDATE chain SET record = '[' WHERE line = (SELECT max(line) FROM chain)"),
    "a trigger": _set("CREATE TRIGGER gone AFTER INSERT ON state BEGIN DELETE FROM state; END"),
    "others may read": lambda folder: (folder / store.FILE).chmod(0o640),
    "a link": lambda folder: (folder / store.FILE).rename(folder / "b") and (folder / store.FILE).symlink_to("b"),
    "an earlier version's": lambda folder: (folder / "ledger.json").write_text("{}"),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_without_its_account_a_site_answers_nothing(tmp_path: Path, spoil: Any) -> None:
    site = site_of(tmp_path)
    assert not refused(sent(site, ask(1)))
    spoil(tmp_path)
    assert refused(sent(site, ask(3)))
    with pytest.raises(DataError, match="put back|[Ff]inish|Put back"), store.changing(tmp_path) as here:
        in_store(OPEN, here, "clinic 3").known("run", "r")


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {"client_id": "clinic 3", "nonce": "x", "round": "1", "seed": "[1]", "run": "r"},
        {"client_id": "clinic 3", "nonce": "1", "round": "1", "seed": "[" * 100_000, "run": "r"},
        {"client_id": "clinic 3", "nonce": "9" * 5000, "round": "1", "seed": "[1]", "run": "r"},
    ],
)
def test_what_cannot_be_read_is_refused_and_logged(tmp_path: Path, texts: dict[str, str]) -> None:
    arrays, told = _node.answer_request(site_of(tmp_path), {}, None, ({}, texts))
    assert not arrays and told["failure"] == REFUSED
    assert [line["refused"].partition(":")[0] for line in log_of(tmp_path)] == ["malformed"]


@pytest.mark.parametrize("message", [{}, {"point": np.zeros(2)}, {"point": np.array(["a"] * 3), "move": np.zeros(3)}])
def test_a_message_that_is_none_is_refused(tmp_path: Path, message: Any) -> None:
    assert refused(sent(site_of(tmp_path), ask()._replace(message=message)))


def test_an_introduction_tells_one_bit_of_the_data(tmp_path: Path) -> None:
    told = set()
    for i, rules in enumerate((SINGLE, opened(parameters_per_row=1e-3), opened(rows=15))):
        folder = tmp_path / str(i)
        folder.mkdir()
        told.add(_node.introduce(site_of(folder, rules), {}, None, {})[1]["error"])
        assert log_of(folder)[0]["refused"].startswith(("rows: 14", "parameters_per_row: 3"))
        assert refused(sent(site_of(folder, rules), ask()))  # whoever does not ask first is not answered either
    assert len(told) == 1 and "14" not in told.pop()


# --- introductions ---


def clipped_at(limit: float) -> FederatedModel:
    """Whether it can be built tells whether a value exceeds the limit."""

    def builder(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            eta = pm.Normal("mu", 0, 1) + pm.Data("X", X)[:, 0]
            pm.Normal("obs", eta, 1, observed=pm.Data("y", np.minimum(y, limit)))
        return model

    return FederatedModel(builder, ["mu"])


def quoting(X: Any, y: Any) -> pm.Model:
    raise DeclarationError(f"the rows are {list(y)}")


def named_by_a_row(X: Any, y: Any) -> pm.Model:
    raise type(f"Row{y[0]:.6f}", (Exception,), {})


def labelled(X: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Poisson(f"age {y[0]:.6f}", 3)
    return model


@pytest.mark.parametrize("builder", [quoting, named_by_a_row, labelled])
def test_no_word_of_a_builder_leaves_a_site(tmp_path: Path, builder: Any) -> None:
    told = []
    for rules in (OPEN, Policy(sums="optional", rows=15)):
        folder = tmp_path / str(rules.rows)
        folder.mkdir()
        model = FederatedModel(builder, ["mu"])
        told.append(_node.introduce(site_of(folder, rules, model=model), {}, None, {})[1]["error"])
    assert told[0] == "DataError: the reason is in the site's own log"
    assert "policy of its site" in told[1]  # with too few rows it is not called at all
    calls = [line["refused"] for line in log_of(tmp_path / "15")]
    assert calls == ["rows: 14 at most, at least 15 wanted"]


def test_introductions_are_counted(tmp_path: Path) -> None:
    """By what is declared, before it is built; the first costs nothing, and the same again neither."""
    rules = opened(few_rows=3, requests=3)
    limits = (1.0, 1.0, 2.0, 3.0, 2.0, 50.0, 60.0)
    told, counts = [], []
    for number, limit in enumerate(limits):
        site = site_of(tmp_path, rules, model=clipped_at(limit))._replace(token=f"counted {number}")
        told.append(_node.introduce(site, {}, None, {})[1].get("error", "takes part"))
        counts.append(stored.ledger(tmp_path, "clinic 3").requests)
    assert counts == [0, 0, 1, 2, 2, 3, 3], told
    assert len(set(told[:5])) == 1 and told[5] == "takes part" and "policy of its site" in told[6]
    assert refused(sent(site_of(tmp_path, rules, model=clipped_at(70.0))._replace(token="asked"), ask(1)))
    assert audit.main([str(tmp_path)]) == 0


def test_under_a_total_epsilon_there_is_one_declaration(tmp_path: Path) -> None:
    """Whether a second can be built is a bit that no noise hides, so that it is not tried, whatever the rows."""
    rules = opened(epsilon=3.0)
    algorithm = fedppl.PrivateEP(clip=1.0, noise_multiplier=5.0, releases=3)
    told = []
    for number, limit in enumerate((50.0, 1.0, 60.0, 50.0)):  # the second cannot be built on these rows
        site = site_of(tmp_path, rules, algorithm=algorithm, model=clipped_at(limit))._replace(token=f"one {number}")
        told.append(_node.introduce(site, {}, None, {})[1].get("error", "takes part"))
    assert told[0] == told[3] == "takes part" and told[1] == told[2]
    account = stored.ledger(tmp_path, "clinic 3")
    assert (account.requests, account.unknown) == (0, 0)
    refusals = [line["refused"] for line in log_of(tmp_path) if line.get("refused")]
    assert len(refusals) == 2 and all(one.startswith("epsilon: ") and "new account" in one for one in refusals)


# --- versions of the data ---


def wards(rows: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"X": rng.normal(size=(rows, 2)), "y": rng.normal(size=rows)}


def less(data: dict[str, Any], rows: int) -> dict[str, Any]:
    return {name: value[rows:] for name, value in data.items()}


def edited(data: dict[str, Any], rows: int) -> dict[str, Any]:
    return {**data, "y": np.where(np.arange(len(data["y"])) < rows, 9.0, data["y"])}


def standardised(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "X": (data["X"] - data["X"].mean(axis=0)) / data["X"].std(axis=0)}


BEFORE = wards(60)
VERSIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "the same": (BEFORE, True),
    "in another order": ({name: value[::-1] for name, value in BEFORE.items()}, True),
    **{f"{k} gone": (less(BEFORE, k), k >= 10) for k in (1, 2, 5, 9, 10)},
    **{f"{k} edited": (edited(BEFORE, k), k >= 10) for k in (1, 9, 10)},
    "another cohort": (wards(60, 1), True),
    "one gone, standardised anew": (standardised(less(BEFORE, 1)), False),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_data_that_differ_by_few_rows_are_not_answered_about(tmp_path: Path, case: str) -> None:
    """A server that has both answers has the row."""
    data, allowed = VERSIONS[case]
    first = standardised(BEFORE) if "standardised" in case else BEFORE
    assert not refused(sent(site_of(tmp_path, OPEN, data=first), ask(1, "first")))
    site = site_of(tmp_path, OPEN, data=data)
    assert ("error" in _node.introduce(site, {}, None, {})[1]) is not allowed
    assert refused(sent(site, ask(1, "second"))) is not allowed
    rules = {str(line["refused"]).partition(":")[0] for line in log_of(tmp_path) if line.get("refused")}
    assert rules == (set() if allowed else {"changed_rows"})
    open_to_all = site_of(tmp_path, opened(changed_rows=1), data=data)
    assert not refused(sent(open_to_all, ask(1, "third")))


def test_data_are_held_against_every_version_that_was_answered_about(tmp_path: Path) -> None:
    """Not against the last alone, nor against one that was looked at and not answered about."""
    second = wards(80, 1)
    looked_at = site_of(tmp_path, OPEN, data=less(second, 3))
    assert "error" not in _node.introduce(looked_at, {}, None, {})[1]
    for number, data in enumerate((BEFORE, second)):
        assert not refused(sent(site_of(tmp_path, OPEN, data=data), ask(1, f"run {number}")))
    assert refused(sent(site_of(tmp_path, OPEN, data=less(BEFORE, 1)), ask(1, "run 3")))
    assert "version 1 of 2" in log_of(tmp_path)[-1]["refused"]
    assert not refused(sent(site_of(tmp_path, OPEN, data=BEFORE), ask(1, "run 4")))


def test_digests_of_rows_are_of_no_use_without_the_key() -> None:
    rows = {"arm": np.array(["drug", "none", "drug"]), "age": np.array([61, 60, 61])}
    own, other = (version_of(rows, key) for key in (b"a" * 32, b"b" * 32))
    assert own["arm"][0] == own["arm"][2] != own["arm"][1]
    assert not set(own["arm"]) & set(other["arm"])
    wide = {"arm": np.array(["drug", "none", "drug", "surgery"]), "age": np.array([61.0, 60, 61, 8])}
    assert changed_rows(own, version_of(wide, b"a" * 32), 10) == 1  # whatever the width of texts, and the dtype


# --- the end of a run -----------------------------------------------------------------------------------------


def uniform_builder(y: Any) -> Any:
    """y ~ U(0, width): whether a width is possible tells the largest value."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        width = pm.LogNormal("width", 1, 1)
        pm.Uniform("obs", 0, width, observed=y)
    return model


def conclusion(site: Node, run: str, mean: float, cavity: float = 400.0) -> Any:
    assert site.folder is not None
    q = Gaussian(np.array([cavity * mean]), np.array([[cavity]]))
    arrays = fedppl.local.target.pack_target(q, q, 0.0)
    texts = {"client_id": "clinic 3", "run": run, "seed": "1", "status": "converged"}
    return _conclusions.conclude(site, {}, None, (arrays, texts))


@pytest.mark.parametrize(
    "changes", [{"run": "r" * 10**6}, {"client_id": ""}, {"status": "done"}, {"seed": "-1"}, {"run": "a\nb"}]
)
def test_a_conclusion_that_cannot_be_read_is_logged_in_a_line(tmp_path: Path, changes: dict[str, str]) -> None:
    texts = {"client_id": "clinic 3", "run": "r", "seed": "1", "status": "converged", **changes}
    arrays, told = _conclusions.conclude(site_of(tmp_path), {}, None, ({}, texts))
    assert not arrays and set(told) == {"client_id"}
    assert [line["refused"].partition(":")[0] for line in log_of(tmp_path)] == ["malformed"]
    ((size,),) = stored.execute(tmp_path, "SELECT sum(length(record)) FROM chain")
    assert size < 10_000


@pytest.mark.parametrize("asked", ["one run", "many runs"])
def test_conclusions_tell_nothing_of_a_uniform_likelihood(tmp_path: Path, asked: str) -> None:
    """Asked with narrow q at widths above and below the largest value, a site says the same, a hundred times."""
    data = {"y": np.linspace(0.1, 3.7, 30)}
    model = FederatedModel(uniform_builder, ["width"])
    algorithm = fedppl.EP(local=fedppl.local.NUTS(draws=20, tune=20, chains=1), warm_start=False)
    failed = 0

    def draw(client: Any, personal: Any, message: Any, *rest: Any) -> Any:
        nonlocal failed
        mean = float(message["global_linear"][0] / message["global_precision"][0])
        if client.log_site(np.array([mean]), np.zeros(0))[0] == -math.inf:
            failed += 1
            raise LocalFailure("no width of this size is possible")
        raise ValueError("nor is this of use")

    site = site_of(
        tmp_path,
        Policy(sums="optional", rows=20),
        algorithm._replace(result=algorithm.result._replace(draw=draw)),
        model,
        data,
    )
    widths = np.log(np.linspace(2.0, 6.0, 100))
    runs = ["r"] * 100 if asked == "one run" else [f"run {i}" for i in range(100)]
    told = [conclusion(site, run, mean) for run, mean in zip(runs, widths, strict=True)]
    assert all(one == ({}, {"client_id": "clinic 3"}) for one in told)
    drawn = [line for line in log_of(tmp_path) if line["event"] == "conclusion" and not line["refused"]]
    assert len(drawn) == (1 if asked == "one run" else policy.REQUESTS)
    assert failed >= 1
    assert not list(tmp_path.glob("*.nc"))


def test_a_conclusion_says_nothing_of_data_that_changed(tmp_path: Path) -> None:
    site = site_of(tmp_path)
    assert not refused(sent(site, ask(1)))
    other = {name: value + 1.0 for name, value in CLIENTS["clinic 3"].items()}
    changed = site_of(tmp_path, data=other)
    q = LAYOUT.prior
    parcel = (
        fedppl.local.target.pack_target(q, q, 0.0),
        {"client_id": "clinic 3", "run": "r", "seed": "1", "status": "converged"},
    )
    assert _conclusions.conclude(changed, {}, None, parcel) == ({}, {"client_id": "clinic 3"})
    assert not list(tmp_path.glob("*.nc"))
    assert refused(sent(changed, ask(2)))
    assert "its data are not those" in log_of(tmp_path)[-1]["refused"]


def test_a_run_that_goes_on_is_concluded_again_once(tmp_path: Path) -> None:
    """As by a raised number of rounds: drawn once for each end, repeated, and not drawn again for an earlier one."""
    site = site_of(tmp_path)
    parcels = [
        (
            fedppl.local.target.pack_target(LAYOUT.prior, LAYOUT.prior, 0.0),
            {"client_id": "clinic 3", "run": "r", "seed": seed, "status": "converged"},
        )
        for seed in "12"
    ]
    for number, parcel in enumerate(parcels, start=1):
        assert not refused(sent(site, ask(number)))
        for _ in range(2):
            _conclusions.conclude(site, {}, None, parcel)
    assert (tmp_path / "clinic%203.nc").exists()
    assert not refused(sent(site, ask(3)))
    _conclusions.conclude(site, {}, None, parcels[0])
    lines = [line for line in log_of(tmp_path) if line["event"] == "conclusion"]
    assert [bool(line.get("repeated")) for line in lines] == [False, True, False, True, False]
    assert [line["refused"] is None for line in lines] == [True] * 4 + [False]
