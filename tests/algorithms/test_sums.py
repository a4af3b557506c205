"""The posterior by sums over clients, against closed forms and quadrature; what it refuses, and what it cannot know."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import expit, logsumexp

import fedppl
from fedppl import ConvergenceWarning, DeclarationError
from fedppl.algorithms.sums import phases
from fedppl.algorithms.tolerances import VOID_ROUNDS
from fedppl.contracts import Request
from fedppl.engine import guard, policy
from fedppl.testing import normal_means
from fedppl.types import Array
from tests.support import problems

fit = functools.partial(fedppl.fit, progressbar=False, random_seed=1)


def wards(y: Any) -> pm.Model:
    """Rates of a ward about a common one, with an sd that is shared."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu, log_tau = pm.Normal("mu", 0, 2), pm.Normal("log_tau", -0.5, 0.7)
        level = pm.Normal("level", mu, pm.math.exp(log_tau))
        pm.Bernoulli("obs", logit_p=level, observed=y)
    return model


@functools.cache
def hospitals(count: int) -> dict[str, dict[str, Array]]:
    rng = np.random.default_rng(count)
    rows = rng.integers(5, 41, count)
    return {
        f"ward {k}": {"y": (rng.random(n) < expit(0.4 + 0.6 * rng.normal())).astype(int)} for k, n in enumerate(rows)
    }


WARDS = fedppl.FederatedModel(wards, ["mu", "log_tau"])


def by_quadrature(clients: dict[str, dict[str, Array]]) -> tuple[Array, Array, float]:
    """Mean, sd and log evidence over a grid of both shared variables, levels by 60 nodes of Gauss and Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    mu, log_tau = np.linspace(-4, 5, 181), np.linspace(-5, 3, 161)
    at = np.stack(np.meshgrid(mu, log_tau, indexing="ij"), -1).reshape(-1, 2)
    level = at[:, :1] + np.exp(at[:, 1:]) * nodes
    logs = -0.5 * (at[:, 0] / 2) ** 2 - 0.5 * ((at[:, 1] + 0.5) / 0.7) ** 2 - np.log(2 * 0.7 * 2 * np.pi)
    for data in clients.values():
        wins, n = data["y"].sum(), len(data["y"])
        term = -wins * np.logaddexp(0, -level) - (n - wins) * np.logaddexp(0, level)
        logs = logs + logsumexp(term + np.log(weights / weights.sum()), axis=1)
    evidence = logsumexp(logs) + np.log((mu[1] - mu[0]) * (log_tau[1] - log_tau[0]))
    w = np.exp(logs - logsumexp(logs))
    mean = w @ at
    return mean, np.sqrt(w @ (at - mean) ** 2), float(evidence)


def rates(y: Any) -> pm.Model:
    with pm.Model() as model:
        rate = pm.Gamma("rate", 2.0, 1.0, shape=10)
        pm.Poisson("obs", rate, observed=pm.Data("y", y))
    return model


def test_ten_skewed_coordinates_have_their_closed_form(rng: np.random.Generator) -> None:
    """Gamma posteriors of few counts: beyond eight coordinates the surrogate has a polynomial of the fourth degree."""
    clients = {f"site {k}": {"y": rng.poisson(np.linspace(0.3, 3.0, 10), (2 + k, 10))} for k in range(3)}
    found = fit(fedppl.FederatedModel(rates, ["rate"]), clients)
    # Of surrogates that are off draws are put right: else EP would go on.
    assert found.status.value == "converged" and found.algorithm.name == "Sums"
    shape, rate = 2.0 + sum(data["y"].sum(axis=0) for data in clients.values()), 1.0 + 2 + 3 + 4
    table = found.summary("rate")
    sd = np.sqrt(shape) / rate
    assert_allclose((table["mean"] - shape / rate) / sd, 0.0, atol=0.03)
    assert_allclose(table["sd"] / sd, 1.0, atol=0.03)


@pytest.mark.parametrize("problem", [normal_means, problems.regression])
def test_a_gaussian_posterior_is_exact(problem: Any) -> None:
    model, clients = problem()
    found, expected = fit(model, clients, fedppl.Sums()), fit(model, clients, fedppl.EP())
    assert found.status.value == "converged"
    for name in ("precision", "linear"):
        assert_allclose(getattr(found.posterior, name), getattr(expected.posterior, name), rtol=1e-6, atol=1e-6)
    assert found.log_evidence.value == pytest.approx(expected.log_evidence.value, abs=1e-8)


@pytest.mark.parametrize("count", [3, 12, pytest.param(60, marks=pytest.mark.slow)])
def test_a_random_intercept_is_that_of_quadrature(count: int) -> None:
    clients = hospitals(count)
    mean, sd, evidence = by_quadrature(clients)
    found = fit(WARDS, clients, fedppl.Sums())
    assert found.status.value == "converged"
    table = found.summary()
    for place, name in enumerate(("mu", "log_tau")):
        row = table.loc[name]
        # Monte Carlo errors are stated; 4 of them, and what is left of the integrals
        assert abs(row["mean"] - mean[place]) < 4 * row["mcse_mean"] + 0.005 * sd[place]
        assert abs(row["sd"] / sd[place] - 1) < 4 * row["mcse_sd"] / sd[place] + 0.005
        assert row["mcse_mean"] < 0.03 * sd[place]
    assert found.log_evidence.method == "sums"
    assert abs(found.log_evidence.value - evidence) < 4 * found.log_evidence.error + 0.005


def test_clients_own_variables_are_those_of_another_algorithm() -> None:
    clients = hospitals(6)
    found, other = fit(WARDS, clients, fedppl.Sums()), fit(WARDS, clients, fedppl.EP())
    for name in clients:
        one, two = (f.client(name, draws=4000)["posterior"]["level"].values.ravel() for f in (found, other))
        assert abs(one.mean() - two.mean()) < 5 * one.std() * np.sqrt(2 / 4000)
        assert abs(one.std() / two.std() - 1) < 5 * np.sqrt(1 / 4000)
    data = {"y": np.array([1, 1, 1, 0, 1])}
    one, two = (f.new_client(data, draws=4000)["posterior"]["level"].values.ravel() for f in (found, other))
    assert abs(one.mean() - two.mean()) < 5 * one.std() * np.sqrt(2 / 4000)


def test_integrals_at_every_point_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few points do not predict the residuals of Laplace's approximation at the others."""
    clients = hospitals(12)
    few = fit(WARDS, clients, fedppl.Sums(starts=1))
    monkeypatch.setattr(phases, "FEW", phases.FEW._replace(rough=0.0, predicted=0.0))
    every = fit(WARDS, clients, fedppl.Sums(starts=1))
    exact, predicted = every.state.phase.evaluated, few.state.phase.evaluated
    assert len(exact.points) == len(exact.integrated.points)
    assert len(predicted.points) > len(predicted.integrated.points)
    one, two = few.summary(), every.summary()
    error = np.hypot(one["mcse_mean"], two["mcse_mean"])
    assert np.all(np.abs(one["mean"] - two["mean"]) < 4 * error + 0.01 * one["sd"])


def test_all_clients_get_the_same_message_and_keep_nothing() -> None:
    algorithm, model = fedppl.Sums(starts=1), WARDS.enrol(hospitals(3))
    state = algorithm.init(next(iter(model.values())).layout, tuple(model), np.random.default_rng(1))
    messages = [algorithm.broadcast(state, name) for name in model]
    for message in messages[1:]:
        for name in messages[0]:
            assert_allclose(message[name], messages[0][name], rtol=0, atol=0)
    update = algorithm.update_client(model["ward 0"], None, messages[0], np.random.default_rng(1))
    assert update.personal is None


def test_rounds_without_a_client_are_void_and_then_the_end() -> None:
    with pytest.warns(ConvergenceWarning, match="participation="):
        found = fit(WARDS, hospitals(6), fedppl.Sums(), participation=4)
    assert found.status.value == "stalled"
    assert len(found.records) == VOID_ROUNDS


class _Changed:
    """An engine that changes what one client answers."""

    def __init__(self, inner: Any, change: Any) -> None:
        self._inner, self._change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exchange(self, *asked: Any) -> Any:
        found = dict(self._inner.exchange(*asked))
        reply = found["ward 1"]
        found["ward 1"] = reply._replace(message={**reply.message, **self._change(reply.message)})
        return found


def _with_one_changed(change: Any) -> Any:
    def engine(algorithm: Any, models: Any) -> Any:
        return _Changed(fedppl.InProcess()(algorithm, models), change)

    return fit(WARDS, hospitals(3), fedppl.Sums(starts=1), engine=engine)


def test_who_keeps_sums_from_being_of_all_is_named_with_the_reason() -> None:
    def no_errors(message: Any) -> Any:
        return {"errors": np.nan * message["errors"]} if len(message["errors"]) else {}

    with pytest.warns(ConvergenceWarning, match=r"sums need all 3 clients.*\['ward 1'\].*'errors' is not all finite"):
        assert _with_one_changed(no_errors).status.value == "stalled"


@pytest.mark.parametrize("name", ["values_lost", "squares", "constants", "answered"])
def test_counts_and_squares_below_zero_are_refused(name: str) -> None:
    with pytest.warns(ConvergenceWarning, match=f"'{name}' is below 0"):
        _with_one_changed(lambda message: {name: np.asarray(message[name] * 0.0 - 1.0)})


def in_weighing(change: Any) -> Any:
    """Changes answers at many points, which are none of a search."""
    return lambda message: change(message) if len(message["values"]) > 100 else {}


def lost(every: int) -> Any:
    """The client has no value at a share of the points."""
    places = lambda message: np.arange(len(message["values"])) % every == 7  # noqa: E731
    return in_weighing(lambda message: {"values_lost": message["values_lost"] + places(message)})


def test_few_points_without_a_value_do_no_harm_and_many_are_said() -> None:
    mean, sd, _ = by_quadrature(hospitals(3))
    few = _with_one_changed(lost(200))
    assert few.status.value == "converged"
    table = few.summary()
    for place, name in enumerate(("mu", "log_tau")):
        assert abs(table.loc[name, "mean"] - mean[place]) < 4 * table.loc[name, "mcse_mean"] + 0.01 * sd[place]
    with pytest.warns(ConvergenceWarning, match="no log density"):
        assert _with_one_changed(lost(20)).status.value == "stalled"


def test_values_that_are_not_known_well_enough_are_not_called_converged() -> None:
    def unsure(size: float) -> Any:
        return in_weighing(lambda message: {"squares": message["squares"] + size**2})

    assert _with_one_changed(unsure(1e-4)).status.value == "converged"
    with pytest.warns(ConvergenceWarning, match="uncertain"):
        assert _with_one_changed(unsure(0.3)).status.value == "stalled"


# Sites of their own, as their policies have it.
OPEN: dict[str, Any] = {
    "sums": "optional",
    "rows": 0,
    "few_rows": 0,
    "parameters_per_row": np.inf,
    "events": 0,
    "cavity": np.inf,
    "requests": np.inf,
}


def at_sites(**rules: Any) -> fedppl.Fit:
    model, clients = problems.schools()
    engine = fedppl.InProcess(policy=fedppl.Policy(**OPEN, **rules))
    return fit(model, clients, fedppl.Sums(), engine=engine)


def test_what_lies_beyond_the_distance_of_sites_is_not_missed_without_a_word() -> None:
    exact, found = problems.schools_quadrature(), at_sites(distance=6.0, points=2**20)
    moments, at = found.idata["fit"], found.layout.labels.index("tau_log__")
    assert found.status.value == "converged"
    assert abs(float(moments["mean_vector"][at]) - exact["log_tau_mean"]) < 0.05 * exact["log_tau_sd"]
    assert float(moments["covariance_matrix"][at, at]) ** 0.5 / exact["log_tau_sd"] == pytest.approx(1, abs=0.05)
    with pytest.warns(ConvergenceWarning, match="distance="):
        assert at_sites(distance=2.0, points=2**20).status.value == "stalled"


def test_sites_answer_no_values_unless_their_policy_allows_them() -> None:
    with pytest.warns(ConvergenceWarning, match="refused by its site"):
        assert at_sites(points=0).status.value == "stalled"


def test_a_site_counts_the_points_that_it_answers() -> None:
    algorithm, model = fedppl.Sums(starts=1), WARDS.enrol(hospitals(3))
    client = model["ward 0"]
    message = algorithm.broadcast(algorithm.init(client.layout, tuple(model), np.random.default_rng(1)), "ward 0")
    points = np.linspace(-9, 9, 61)[:, None] * np.ones(2)
    message = {**message, "points": points, "known": np.zeros(0), "inside": np.ones(61, dtype=bool)}  # its own word
    rules = fedppl.Policy(**OPEN, distance=2.0, points=61)
    near = policy.inside(rules, client.layout, points)
    assert 0 < near.sum() < 61
    site = guard.in_memory(dataclasses.replace(rules, points=int(near.sum())), "ward 0")
    admitted = guard.admit(site, algorithm, client, Request("ward 0", 1, 1, (1,), message, "run"))
    assert admitted is not None and site.read().points == near.sum()
    reply = algorithm.update_client(client, None, admitted.message, np.random.default_rng(0)).reply
    assert_array_equal(np.asarray(reply["values_lost"]) == 0, near)
    again = Request("ward 0", 1, 2, (1,), message, "run")
    assert guard.admit(site, algorithm, client, again) is None  # none is left


def test_a_message_names_the_setting_where_rounds_ran_out_and_no_client_that_is_none() -> None:
    with pytest.warns(ConvergenceWarning, match="raise rounds="):
        fit(WARDS, hospitals(3), fedppl.Sums(starts=1), rounds=1)

    def gone(message: Any) -> Any:
        return {"values": np.random.default_rng(1).normal(0, 1e6, np.shape(message["values"]))}

    with pytest.warns(ConvergenceWarning, match="the search has not reached the mode") as told:
        _with_one_changed(gone)
    assert "['all clients']" not in str(told[0].message) and "warm start" not in str(told[0].message).split(":")[1]


def test_a_bent_ridge_is_no_saddle() -> None:
    """A product is known well and its factors are not: along the ridge the density falls slowly, to both sides."""

    def product(y: Any) -> pm.Model:
        with pm.Model() as model:
            a, b = pm.HalfNormal("a", 3), pm.HalfNormal("b", 3)
            pm.Normal("obs", a * b, 0.1, observed=pm.Data("y", y))
        return model

    clients = {"a": {"y": np.array([1.0, 1.1])}, "b": {"y": np.array([0.9])}}
    found = fit(fedppl.FederatedModel(product, ["a", "b"]), clients, fedppl.Sums())
    assert found.status.value == "converged"
    log_a, log_b = np.meshgrid(np.linspace(-8, 4, 1001), np.linspace(-8, 4, 1001), indexing="ij")
    off = sum(((y - np.exp(log_a + log_b)) / 0.1) ** 2 for data in clients.values() for y in data["y"])
    w = np.exp(log_a + log_b - (np.exp(2 * log_a) + np.exp(2 * log_b)) / 18 - off / 2)
    mean = np.sum(w * np.exp(log_a)) / w.sum()
    sd = np.sqrt(np.sum(w * (np.exp(log_a) - mean) ** 2) / w.sum())
    row = found.summary().loc["a"]
    assert abs(row["mean"] - mean) < 4 * row["mcse_mean"] and abs(row["sd"] - sd) < 4 * row["mcse_sd"]


def test_other_modes_are_named() -> None:
    def sign(y: Any) -> pm.Model:
        with pm.Model() as model:
            y, a = pm.Data("y", y), pm.Normal("a", 0, 3)
            pm.Normal("obs", a**2, 0.3, observed=y)
        return model

    clients = {name: {"y": 4 + 0.3 * np.random.default_rng(k).normal(size=8)} for k, name in enumerate("abc")}
    with pytest.warns(ConvergenceWarning, match="several modes"):
        assert fit(fedppl.FederatedModel(sign, ["a"]), clients, fedppl.Sums()).status.value == "stalled"


def test_a_prior_that_the_data_contradict_is_named() -> None:
    def narrow(y: Any) -> pm.Model:
        with pm.Model() as model:
            pm.Normal("obs", pm.Normal("mu", 0, 0.01), 1, observed=pm.Data("y", y))
        return model

    clients = {name: {"y": 3 + np.random.default_rng(k).normal(size=40)} for k, name in enumerate("abc")}
    assert "mu" in fit(fedppl.FederatedModel(narrow, ["mu"]), clients, fedppl.Sums()).message


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"points": 63}, "points"), ({"pilot": 8}, "pilot"), ({"starts": 0}, "starts"), ({"starts": "some"}, "starts")],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(DeclarationError, match=named):
        fedppl.Sums(**settings)


def test_a_fit_goes_on_from_another() -> None:
    clients = hospitals(12)
    first = fit(WARDS, {k: clients[k] for k in list(clients)[:11]}, fedppl.Sums(starts=1))
    again = fit(WARDS, clients, fedppl.Sums(starts=1), start=first)
    alone = fit(WARDS, clients, fedppl.Sums(starts=1))
    assert len(again.records) <= len(alone.records)
    assert_allclose(again.summary()["mean"], alone.summary()["mean"], atol=0.1 * alone.summary()["sd"].max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fit ended:fedppl.ConvergenceWarning")
def test_moments_of_a_fit_that_stalls_are_none_that_the_prior_rules_out() -> None:
    """One event in a hundred rows under a half-Cauchy spread: the last stage had an sd of 5,285 for a ~ N(0, 10)."""

    def rare(x: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            a, b, tau = pm.Normal("a", 0, 10), pm.Normal("b", 0, 5), pm.HalfCauchy("tau", 1)
            pm.Bernoulli("o", logit_p=a + b * x + tau * pm.Normal("z", 0, 1), observed=y)
        return model

    rng = np.random.default_rng(77)
    ends = np.cumsum([20, 15, 30, 25])
    x, y = np.split(rng.normal(size=100), ends), np.split(np.arange(100) == 3, ends)
    clients = {f"s{k}": {"x": x[k], "y": y[k].astype(int)} for k in range(5)}
    stalled = fit(fedppl.FederatedModel(rare, ["a", "b", "tau"]), clients)
    sds = stalled.summary()["sd"]
    assert stalled.status is fedppl.Status.CONVERGED or (sds["a"] < 10 and sds["b"] < 5)


def test_a_fit_ends_by_points_that_can_be_drawn() -> None:
    """Points of no weight may be far out, where a policy refuses the whole message."""
    fit = fedppl.fit(WARDS, hospitals(3), fedppl.Sums(), progressbar=False, random_seed=1)
    result = fedppl.Sums().result
    weights, weighted = result.final_message(fit.state, "ward 0")["weights"], result.shared.weighted(fit.state)
    assert np.min(weights) > 1e-13 and len(weights) < np.sum(weighted.weights > 0)
    assert abs(np.sum(weights) - 1.0) < 1e-9
