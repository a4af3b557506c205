"""Many clients of one table: the numbers of clients that are asked one by one, and closed forms."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

import fedppl
from fedppl import gaussian, given
from fedppl.contracts import Summed
from fedppl.data import frames, tables
from fedppl.engine.policy import NO_RULES
from fedppl.local.many import moments
from fedppl.model.stack import ClientsOf, stacked, why_not
from fedppl.types import DataError, Status

AT_ONCE = fedppl.Sums(points=512, pilot=64, starts=1)


def wards(x: Any, y: Any) -> pm.Model:
    """A logistic regression whose intercept varies from ward to ward."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        intercept, slope = pm.Normal("intercept", 0, 2), pm.Normal("slope", 0, 2)
        a = pm.Normal("a", 0, pm.HalfNormal("tau", 1))
        pm.Deterministic("odds", pm.math.exp(a))
        pm.Bernoulli("obs", logit_p=intercept + slope * x + a, observed=y)
    return model


COUNT = 60  # clients, enough for one table
WARDS = fedppl.FederatedModel(wards, ["intercept", "slope", "tau"])


def rows_of_wards(count: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    ward = np.repeat(np.arange(count), rng.integers(3, 9, count))
    x, a = rng.normal(size=len(ward)), rng.normal(0, 0.8, count)
    y = rng.uniform(size=len(ward)) < 1 / (1 + np.exp(0.5 - 0.7 * x - a[ward]))
    return pd.DataFrame({"ward": ward, "x": x, "y": y.astype(int)}).sample(frac=1.0, random_state=1)


def stack_of(frame: pd.DataFrame) -> ClientsOf:
    table = tables.of_frame(frames.opened(frame), "ward", WARDS.names)
    assert table is not None
    few = WARDS.enrol({table.client_ids[k]: table.rows(k) for k in range(5)})
    assert why_not(list(few.values())) == ""
    return stacked(WARDS, table, next(iter(few.values())), functools.partial(moments, workers=1))


@pytest.fixture(scope="module")
def stack() -> ClientsOf:
    return stack_of(rows_of_wards(40))


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return rows_of_wards(COUNT)


@pytest.fixture(scope="module")
def fit(frame: pd.DataFrame) -> fedppl.Fit:
    return fedppl.fit(WARDS, frame, AT_ONCE, by="ward", progressbar=False, random_seed=1)


def test_arrays_are_packed_as_each_client_packs_its_own(stack: ClientsOf) -> None:
    reals, integers, where, at = stack.packs
    for k in range(len(stack)):
        own = reals[at[k, 0] : at[k + 1, 0]], integers[at[k, 1] : at[k + 1, 1]], where[k]
        for ours, theirs in zip(own, stack.model(k).packed, strict=True):
            assert_array_equal(ours, theirs)


def test_a_fit_is_that_of_clients_asked_one_by_one(fit: fedppl.Fit, frame: pd.DataFrame) -> None:
    """The posterior, its evidence, and what is known of clients; of fewer clients, which both ways can do."""
    by_id = {
        str(k): {name: own[name].to_numpy() for name in ("x", "y")} for k, own in frame.groupby("ward", sort=False)
    }
    expected = fedppl.fit(WARDS, by_id, AT_ONCE._replace(batch=None), progressbar=False, random_seed=1)
    assert fit.records[-1].together == COUNT and not expected.records[-1].together
    sd = gaussian.standard_deviations(expected.posterior)  # the unit in which rounding of sums is small
    # A spline through values magnifies their rounding: one in 10^8 of an sd was seen, on one of two kinds of processor.
    assert_allclose(gaussian.mean(fit.posterior) / sd, gaussian.mean(expected.posterior) / sd, rtol=0, atol=1e-7)
    assert_allclose(gaussian.standard_deviations(fit.posterior), sd, rtol=1e-7)
    assert abs(fit.log_evidence.value - expected.log_evidence.value) < 1e-8
    assert fit.client_ids == expected.client_ids


def test_clients_have_their_posteriors(fit: fedppl.Fit, frame: pd.DataFrame) -> None:
    """Against quadrature over θ at draws of what is shared, a deterministic among what is told."""
    told = fit.clients_summary()
    assert told["a"].dims == ("statistic", "client") and set(told.data_vars) == {"a", "odds"}
    drawn = fit.idata["posterior"]
    shared = {name: np.ravel(drawn[name].values) for name in ("intercept", "slope", "tau")}
    grid = np.linspace(-5, 5, 801)
    for client_id in fit.client_ids[:3]:
        rows = frame[frame["ward"] == int(client_id)]
        logits = shared["intercept"][:, None] + shared["slope"][:, None] * rows["x"].to_numpy()
        logs = stats.norm.logpdf(grid, 0, shared["tau"][:, None])
        logs = logs + sum(
            -np.logaddexp(0, (1 - 2 * y) * (one[:, None] + grid)) for y, one in zip(rows["y"], logits.T, strict=True)
        )
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        by_draw = weights / weights.sum(axis=1, keepdims=True)
        weights = by_draw.mean(axis=0)
        for name, values in (("odds", np.exp(grid)), ("a", grid)):
            mean = weights @ values
            sd = np.sqrt(weights @ (values - mean) ** 2)
            ours = told[name].sel(client=client_id).values
            error = np.std(by_draw @ values) / np.sqrt(256)  # of points of what is shared, drawn
            assert abs(ours[0] - mean) < 4 * error
            assert_allclose(ours[1], sd, rtol=0.05)
        drawn = fit.client(client_id)["posterior"]["a"]
        error = np.hypot(error, drawn.std() / np.sqrt(drawn.size))
        assert_allclose(drawn.mean(), told["a"].sel(client=client_id, statistic="mean"), atol=4 * float(error))


def test_what_a_fit_offers_is_there(fit: fedppl.Fit, frame: pd.DataFrame, tmp_path: Any) -> None:
    assert fit.status.ok and isinstance(fit.clients, ClientsOf) and len(fit.clients) == COUNT
    assert fit.summary().attrs["answered"] == 1.0
    assert list(fit.idata["rounds"]["clients"].values)[-1] == COUNT
    assert fit.new_client({"x": np.zeros(3), "y": np.ones(3, dtype=int)})["posterior"]["a"].mean() > 0
    assert "obs" in fit.predict(3, {"x": np.zeros(2)})["predictions"]
    assert "absent" not in fit.clients
    fit.save(tmp_path / "run.nc")
    again = fedppl.load(tmp_path / "run.nc", WARDS, AT_ONCE, clients=frame[frame["ward"] < 3], by="ward")
    assert_array_equal(again.posterior.linear, fit.posterior.linear)
    assert_array_equal(*(one.client(2, draws=50)["posterior"]["a"] for one in (fit, again)))


def test_a_page_of_many_clients_has_their_number(
    fit: fedppl.Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its pictures, of which that of clients' influence takes longest."""
    monkeypatch.setattr("fedppl.plots._report._pictures", lambda *given: [])
    fit.report(tmp_path / "report.html")
    assert f"{COUNT} clients" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(np.unique(fit.idata["rounds"]["outcome"].isel(round=-1))) == {"used"}


@pytest.mark.slow
def test_pages_and_comparisons_of_many_clients(fit: fedppl.Fit, frame: pd.DataFrame, tmp_path: Any) -> None:
    fit.report(tmp_path / "report.html")
    assert f"{COUNT} clients" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(np.unique(fit.idata["rounds"]["outcome"].isel(round=-1))) == {"used"}
    other = fedppl.fit(WARDS, frame, AT_ONCE, by="ward", progressbar=False, random_seed=2)
    assert fedppl.compare({"one": fit, "other": other})["log_evidence"].diff().abs().max() < 0.1


def nothing_of_its_own(y: Any) -> pm.Model:
    """No local variable at all."""
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 2)
        pm.Normal("obs", mu, 1.0, observed=y)
    return model


def test_clients_without_variables_of_their_own() -> None:
    clients = normal_rows(COUNT)
    fit = fedppl.fit(
        fedppl.FederatedModel(nothing_of_its_own, ["mu"]), clients, AT_ONCE, progressbar=False, random_seed=1
    )
    y = np.concatenate([one["y"] for one in clients.values()])
    precision = 0.25 + len(y)
    assert_allclose(gaussian.mean(fit.posterior), [y.sum() / precision], atol=1e-8)
    assert_allclose(gaussian.covariance(fit.posterior), [[1 / precision]], rtol=1e-6)
    with pytest.raises(fedppl.DeclarationError, match="no variables of their own"):
        fit.clients_summary()


def normal_rows(count: int) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(3)
    return {f"g{k}": {"y": rng.normal(rng.normal(1.0, 0.5), 1.0, size=rng.integers(2, 6))} for k in range(count)}


def means(y: Any) -> pm.Model:
    """Normal means under a normal prior: the posterior of mu is known."""
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 2)
        pm.Normal("obs", pm.Normal("theta", mu, 0.5), 1.0, observed=y)
    return model


def test_gaussians_are_exact() -> None:
    clients = normal_rows(COUNT)
    fit = fedppl.fit(fedppl.FederatedModel(means, ["mu"]), clients, AT_ONCE, progressbar=False, random_seed=1)
    assert fit.records[-1].together == COUNT
    variance = np.array([0.25 + 1 / len(one["y"]) for one in clients.values()])
    precision = 0.25 + np.sum(1 / variance)
    average = np.array([one["y"].mean() for one in clients.values()])
    mean = np.sum(average / variance) / precision
    assert_allclose(gaussian.mean(fit.posterior), [mean], atol=1e-6)
    assert_allclose(gaussian.covariance(fit.posterior), [[1 / precision]], rtol=1e-6)
    rows = np.concatenate([one["y"] for one in clients.values()])
    ends = np.cumsum([len(one["y"]) for one in clients.values()])
    evidence = 0.5 * np.log(0.25 / precision) + 0.5 * mean**2 * precision - 0.5 * np.sum(average**2 / variance)
    for own, total in zip(np.split(rows, ends[:-1]), variance, strict=True):
        n = len(own)
        evidence -= 0.5 * (n * np.log(2 * np.pi) + np.log(n * total) + np.sum((own - own.mean()) ** 2))
    assert_allclose(fit.log_evidence.value, evidence, atol=1e-4)
    told = fit.clients_summary("theta")["theta"].values
    share = 0.25 / variance
    assert_allclose(told[0], share * average + (1 - share) * mean, atol=1e-5)
    assert_allclose(told[1] ** 2, 0.25 * (1 - share) + (1 - share) ** 2 / precision, rtol=1e-4)


def scales(y: Any) -> pm.Model:
    """Normal means whose spread is not known, and may be nothing."""
    with pm.Model() as model:
        y, mu, tau = pm.Data("y", y), pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 1)
        pm.Normal("obs", pm.Normal("theta", mu, tau), 1.0, observed=y)
    return model


def test_a_posterior_that_is_far_from_a_gaussian() -> None:
    """A spread that may be nothing has a log with a long tail; against a grid over both shared variables."""
    y = np.random.default_rng(7).normal(0.5, 0.9, size=60)
    clients = {f"g{k}": {"y": y[k : k + 1]} for k in range(60)}
    fit = fedppl.fit(fedppl.FederatedModel(scales, ["mu", "tau"]), clients, AT_ONCE, progressbar=False, random_seed=1)
    assert fit.status.ok and fit.records[-1].together == 60
    mu, log_tau = np.meshgrid(np.linspace(-1, 2, 301), np.linspace(-14, 2, 1601), indexing="ij")
    tau, variance = np.exp(log_tau), 1 + np.exp(2 * log_tau)
    logs = stats.norm.logpdf(mu, 0, 2) + stats.halfnorm.logpdf(tau) + log_tau - 30 * np.log(2 * np.pi * variance)
    logs -= 0.5 * (np.sum((y - y.mean()) ** 2) + 60 * (y.mean() - mu) ** 2) / variance
    weights = np.exp(logs - logs.max())
    evidence = np.log(weights.sum() * 0.01 * 0.01) + logs.max()
    weights /= weights.sum()
    table = fit.summary()
    for name, values in (("mu", mu), ("tau", tau)):
        mean = np.sum(weights * values)
        sd = np.sqrt(np.sum(weights * (values - mean) ** 2))
        assert_allclose(table.loc[name, "mean"], mean, atol=0.05 * sd)
        assert_allclose(table.loc[name, "sd"], sd, rtol=0.05)
    assert abs(fit.log_evidence.value - evidence) < 4 * fit.log_evidence.error + 0.005
    told = fit.clients_summary("theta")["theta"]
    share = tau**2 / variance  # of a client's own row in its mean
    for k in (0, 1, 2):
        center, spread = share * y[k] + (1 - share) * mu, share
        mean = np.sum(weights * center)
        sd = np.sqrt(np.sum(weights * (spread + center**2)) - mean**2)
        ours = told.sel(client=f"g{k}").values
        assert_allclose(ours[0], mean, atol=0.1 * sd)  # 256 points of what is shared, drawn
        assert_allclose(ours[1], sd, rtol=0.1)


def counts(y: Any) -> pm.Model:
    """Counts of a gamma rate: a negative binomial distribution, once the rate is integrated out."""
    with pm.Model() as model:
        shape, mean = pm.Normal("log_shape", 0, 1), pm.Normal("log_mean", 0, 1)
        rate = pm.Gamma("rate", alpha=pm.math.exp(shape), beta=pm.math.exp(shape - mean))
        pm.Poisson("obs", rate, observed=pm.Data("y", y))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "rows", "of_rates"),
    # with a shape of 0.4 and zeros in most rows the log of a rate has a long tail, for which 15 nodes do not do
    [(600, 4, (2.0, 1.5)), pytest.param(3000, 2, (0.4, 0.5), marks=pytest.mark.slow)],
)
def test_hundreds_of_clients_have_the_posterior_of_a_quadrature(
    count: int, rows: int, of_rates: tuple[float, float]
) -> None:
    """So many that few points are asked for, and that one rule integrates for most of them."""
    rng = np.random.default_rng(3)
    rate = rng.gamma(of_rates[0], of_rates[1] / of_rates[0], count)
    frame = pd.DataFrame({"client": np.repeat(np.arange(count), rows), "y": rng.poisson(np.repeat(rate, rows))})
    model = fedppl.FederatedModel(counts, ["log_shape", "log_mean"])
    fit = fedppl.fit(model, frame, by="client", progressbar=False, random_seed=1)
    assert fit.status is Status.CONVERGED and fit.algorithm.name == "Sums"
    mean, sd = gaussian.mean(fit.posterior), gaussian.standard_deviations(fit.posterior)
    axes = np.linspace(-8, 8, 121)
    shape, log_mean = np.meshgrid(mean[0] + axes * sd[0], mean[1] + axes * sd[1], indexing="ij")
    logs = stats.norm.logpdf(shape) + stats.norm.logpdf(log_mean)
    success = 1 / (1 + rows * np.exp(log_mean - shape))
    for total, number in zip(*np.unique(frame.groupby("client")["y"].sum(), return_counts=True), strict=True):
        logs = logs + number * stats.nbinom.logpmf(total, np.exp(shape), success)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    true = np.array([np.sum(weights * shape), np.sum(weights * log_mean)])
    true_sd = np.sqrt([np.sum(weights * (shape - true[0]) ** 2), np.sum(weights * (log_mean - true[1]) ** 2)])
    assert_allclose(mean, true, atol=0.03 * true_sd.min())
    assert_allclose(sd, true_sd, rtol=0.015)


def test_a_callback_sees_rounds_and_may_stop_them(frame: pd.DataFrame) -> None:
    seen = []

    def stop(step: fedppl.Round) -> bool:
        seen.append(step)
        return True

    with pytest.warns(fedppl.ConvergenceWarning, match="by the callback"):
        fit = fedppl.fit(WARDS, frame, AT_ONCE, by="ward", callback=stop, progressbar=False)
    assert len(seen) == 1 and seen[0].record.together == COUNT and not fit.status.ok
    with pytest.raises(fedppl.NotConvergedError):
        fit.summary()


def test_ctrl_c_after_a_round_gives_its_record(frame: pd.DataFrame) -> None:
    def interrupted(step: Any) -> None:
        if step.number == 2:
            raise KeyboardInterrupt

    with pytest.warns(fedppl.ConvergenceWarning, match="interrupted"):
        fit = fedppl.fit(WARDS, frame, AT_ONCE, by="ward", callback=interrupted, progressbar=False, random_seed=1)
    assert fit.status is Status.INTERRUPTED and len(fit.records) == 2
    with pytest.raises(fedppl.NotConvergedError):
        fit.summary()


def heavy(y: Any) -> pm.Model:
    """Effects with heavy tails, so narrow that few clients tell: quadratures about a mode do not see them."""
    with pm.Model() as model:
        y, mu, tau = pm.Data("y", y), pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 1)
        pm.Normal("obs", mu + tau * pm.StudentT("u", 3), 1.0, observed=y)
    return model


@pytest.mark.slow
def test_integrals_over_heavy_tails_are_right_at_many_clients() -> None:
    """Against the sum over clients of a quadrature that is dense and wide, at a grid of what is shared."""
    rng = np.random.default_rng(9)
    y = 1.0 + 0.3 * rng.standard_t(3, size=tables.MANY) + rng.normal(size=tables.MANY)
    clients = {f"g{k}": {"y": y[k : k + 1]} for k in range(len(y))}
    fit = fedppl.fit(fedppl.FederatedModel(heavy, ["mu", "tau"]), clients, AT_ONCE, progressbar=False, random_seed=1)
    assert fit.status.ok and fit.records[-1].together == len(y)
    u = np.sinh(np.linspace(-6, 6, 301))
    prior = stats.t.pdf(u, 3) * np.gradient(u)
    mus, taus = np.linspace(0.85, 1.15, 16), np.exp(np.linspace(-3, 0, 37))
    logs = np.zeros((len(mus), len(taus)))
    for j, tau in enumerate(taus):
        for i, mu in enumerate(mus):
            total = np.exp(-0.5 * (y[:, None] - mu - tau * u) ** 2) @ prior
            logs[i, j] = np.log(total).sum()
    logs += stats.norm.logpdf(mus, 0, 2)[:, None] + stats.halfnorm.logpdf(taus) + np.log(taus)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = weights.sum(axis=0) @ taus
    sd = np.sqrt(weights.sum(axis=0) @ (taus - mean) ** 2)
    assert_allclose(fit.summary().loc["tau", ["mean", "sd"]].astype(float), [mean, sd], rtol=0, atol=0.08 * sd)


def noises(X: Any, y: Any) -> pm.Model:
    """A noise sd of each client's own whose prior nothing shared is in: what integrals miss of it moves no other."""
    with pm.Model() as model:
        X, y, mu = pm.Data("X", X), pm.Data("y", y), pm.Normal("mu", 0, 1)
        theta = pm.Normal("theta", mu, 0.5, shape=2)
        pm.Normal("obs", X @ theta, pm.math.exp(pm.Normal("log_sigma", 0, 1)), observed=y)
    return model


@pytest.mark.slow
def test_moments_of_clients_are_those_of_their_own_posterior() -> None:
    """Skewed log sds of few rows, against quadrature given what is shared, whose posterior is narrow."""
    rng = np.random.default_rng(6)
    clients = {}
    for k in range(100):
        X = rng.normal(size=(6, 2))
        clients[f"g{k}"] = {"X": X, "y": X @ rng.normal(0.5, 0.5, 2) + 0.3 * rng.normal(size=6)}
    fit = fedppl.fit(fedppl.FederatedModel(noises, ["mu"]), clients, AT_ONCE, progressbar=False, random_seed=1)
    assert fit.status.ok and fit.records[-1].together == 100
    told, grid = fit.clients_summary("log_sigma")["log_sigma"], np.linspace(-5, 4, 2001)
    mus = float(gaussian.mean(fit.posterior)[0]) + float(gaussian.standard_deviations(fit.posterior)[0]) * np.array(
        [-np.sqrt(3), 0.0, np.sqrt(3)]
    )
    for name in fit.client_ids[:20]:
        X, y = clients[name]["X"], clients[name]["y"]
        values, vectors = np.linalg.eigh(0.25 * X @ X.T)
        variance = values + np.exp(2 * grid)[:, None]
        density: Any = 0.0
        for mu, weight in zip(mus, (1 / 6, 2 / 3, 1 / 6), strict=True):
            off = vectors.T @ (y - X @ np.full(2, mu))
            logs = stats.norm.logpdf(grid) - 0.5 * np.sum(np.log(variance) + off**2 / variance, axis=1)
            one = np.exp(logs - logs.max())
            density = density + weight * one / one.sum()
        mean = density @ grid
        sd = np.sqrt(density @ (grid - mean) ** 2)
        ours = told.sel(client=name).values
        assert_allclose(ours[0], mean, atol=0.05 * sd)
        assert_allclose(ours[1], sd, rtol=0.05)


def predictors(X: Any, y: Any) -> pm.Model:
    """The same with as many coefficients as the data have columns."""
    with pm.Model(coords={"predictor": list("abc")}) as model:
        X, y = pm.Data("X", X, dims=("row", "predictor")), pm.Data("y", y, dims="row")
        theta = pm.Normal("theta", pm.Normal("mu", 0, 1), pm.LogNormal("tau", 0, 1), dims="predictor")
        u = pm.Normal("u", 0, 1, shape=X.shape[1])
        pm.Normal("obs", X @ (theta + 0.1 * u), 0.5, observed=y)
    return model


@pytest.mark.slow
def test_shapes_that_hang_on_the_number_of_columns_are_those_of_all() -> None:
    rng = np.random.default_rng(8)
    clients = {f"g{k}": {"X": rng.normal(size=(3 + k, 3)), "y": rng.normal(size=3 + k)} for k in range(5)}
    model = fedppl.FederatedModel(predictors, ["mu", "tau"])
    models, table = list(model.enrol(clients).values()), tables.of_clients(clients)
    assert table is not None and models[0].template.graph.free_shapes and why_not(models) == ""
    stack = stacked(model, table, models[0], functools.partial(moments, workers=1))
    reals, integers, where, at = stack.packs
    for k, client in enumerate(models):
        own = reals[at[k, 0] : at[k + 1, 0]], integers[at[k, 1] : at[k + 1, 1]], where[k]
        for ours, theirs in zip(own, client.packed, strict=True):
            assert_array_equal(ours, theirs)


def labels(group: Any, y: Any) -> pm.Model:
    """As many local variables as labels say."""
    with pm.Model() as model:
        group, y, mu = pm.Data("group", group), pm.Data("y", y), pm.Normal("mu", 0, 2)
        theta = pm.Normal("theta", mu, 0.5, shape=group.max() + 1)
        pm.Normal("obs", theta.sum() + 0 * group, 1.0, observed=y)
    return model


def positive(group: Any, y: Any) -> pm.Model:
    """As many as there are labels above 0."""
    with pm.Model() as model:
        group, y, mu = pm.Data("group", group), pm.Data("y", y), pm.Normal("mu", 0, 2)
        theta = pm.Normal("theta", mu, 0.5, shape=group[group > 0].shape[0])
        pm.Normal("obs", theta.sum() + 0 * group, 1.0, observed=y)
    return model


def every_other(group: Any, y: Any) -> pm.Model:
    """Two where the number of rows is odd, else one: what the fewest and the most rows have, others need not have."""
    with pm.Model() as model:
        group, y, mu = pm.Data("group", group), pm.Data("y", y), pm.Normal("mu", 0, 2)
        theta = pm.Normal("theta", mu, 0.5, shape=1 + group.shape[0] % 2)
        pm.Normal("obs", theta.sum() + 0 * group, 1.0, observed=y)
    return model


@pytest.mark.parametrize("builder", [labels, positive, every_other])
def test_shapes_that_hang_on_what_data_hold_keep_clients_apart(builder: Any) -> None:
    clients = {f"g{k}": {"group": np.array([0, 1, 1]), "y": np.zeros(3) + k} for k in range(3)}
    models = list(fedppl.FederatedModel(builder, ["mu"]).enrol(clients).values())
    assert "shapes of variables depend on data" in why_not(models)


def row_effects(y: Any) -> pm.Model:
    """As many local variables as rows."""
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 2)
        theta = pm.Normal("theta", mu, 0.5, shape=y.shape[0])
        pm.Normal("obs", theta, 1.0, observed=y)
    return model


def test_clients_that_differ_in_more_than_rows_are_enrolled_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedppl")
    model = fedppl.FederatedModel(row_effects, ["mu"])
    fit = fedppl.fit(model, normal_rows(COUNT), AT_ONCE, progressbar=False, random_seed=1)
    assert fit.status.ok and not isinstance(fit.clients, ClientsOf)
    assert "numbers of local variables differ" in caplog.text


def knots(x: Any, y: Any) -> pm.Model:
    """Four local variables that are not Gaussian given any of them."""
    with pm.Model() as model:
        x, y, mu = pm.Data("x", x), pm.Data("y", y), pm.Normal("mu", 0, 2)
        theta = pm.Normal("theta", mu, 0.5, shape=4)
        rate = theta[0] + theta[1] * x + theta[2] * pm.math.sin(theta[3] * x)
        pm.Poisson("obs", pm.math.exp(rate), observed=y)
    return model


@pytest.mark.slow
def test_clients_whose_integrals_have_no_rule_are_enrolled_one_by_one(
    caplog: pytest.LogCaptureFixture, rng: np.random.Generator
) -> None:
    caplog.set_level(logging.INFO, "fedppl")
    clients = {f"g{k}": {"x": rng.normal(size=9), "y": rng.poisson(2, size=9)} for k in range(COUNT)}
    next(fedppl.rounds(fedppl.FederatedModel(knots, ["mu"]), clients, AT_ONCE, rounds=1, random_seed=1))
    assert "several local variables depend on each other" in caplog.text


def test_odd_columns_of_clients_that_are_asked_at_once_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Of ward 7 in another unit: 60 clients are looked at one by one, as fewer are."""
    frame = rows_of_wards(60).sort_values("ward", ignore_index=True)
    frame.loc[frame["ward"] == 7, "x"] *= 1000.0
    model = fedppl.formula("y ~ x + (1 | ward)", "bernoulli")
    assert isinstance(given.clients(model, frame, "ward", "error", one_table=True)[1], tables.Table)
    assert "'x' at client '7' is of size" in caplog.text


def test_columns_are_checked_as_clients_are(frame: pd.DataFrame) -> None:
    wrong = frame.astype({"y": float})
    wrong.loc[wrong["ward"] == 41, "y"] = np.inf
    with pytest.raises(DataError, match="client '41': 'y' holds inf at index"):
        fedppl.fit(WARDS, wrong, AT_ONCE, by="ward", progressbar=False)
    with pytest.raises(DataError, match="client '41': 'y' is inf in row 0"):
        fedppl.fit(fedppl.formula("y ~ x + (1 | ward)"), wrong, AT_ONCE, progressbar=False)


def test_missing_rows_are_refused_or_dropped(frame: pd.DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    gone = frame.copy()
    first = gone.index[gone["ward"].duplicated()][:2]
    gone.loc[first, "x"] = np.nan
    with pytest.raises(DataError, match="values are missing"):
        fedppl.fit(WARDS, gone, AT_ONCE, by="ward", progressbar=False)
    found, kept = (
        given.clients(WARDS, one, "ward", "drop", one_table=True)[1] for one in (gone, gone.drop(index=first))
    )
    assert sorted(found.client_ids) == sorted(kept.client_ids)
    assert len(found.columns["x"]) == len(gone) - 2
    assert f"client {gone.loc[first[0], 'ward']}: " in caplog.text and "rows are left out" in caplog.text


@pytest.mark.slow
def test_a_formula_is_read_from_one_table() -> None:
    rng = np.random.default_rng(2)
    site = np.repeat(np.arange(60), 6)
    arm, age = rng.choice(["drug", "placebo"], 360), rng.normal(50, 10, 360)
    y = 2.0 + 0.03 * (age - 50) - 0.4 * (arm == "placebo") + rng.normal(0, 0.5, 60)[site] + rng.normal(size=360)
    table = pd.DataFrame({"site": site, "arm": arm, "age": age, "y": y})
    formula = fedppl.formula("y ~ age + arm + (1 | site)")
    found = fedppl.fit(formula, table, AT_ONCE, progressbar=False, random_seed=1)
    expected = fedppl.fit(formula, table, AT_ONCE._replace(batch=None), progressbar=False, random_seed=1)
    assert found.records[-1].together == 60
    ours, theirs = found.summary(), expected.summary()
    assert list(ours.index) == list(theirs.index)
    assert_allclose((ours["mean"] - theirs["mean"]) / theirs["sd"], 0, atol=1e-6)
    assert_allclose(ours["sd"], theirs["sd"], rtol=1e-6)
    new = pd.DataFrame({"age": [40.0], "arm": ["drug"]})
    ours, theirs = (one.predict(7, new, random_seed=1)["predictions"]["y"].mean() for one in (found, expected))
    assert_allclose(ours, theirs, rtol=1e-6)


def test_a_run_goes_on_from_its_checkpoint_with_the_same_rows_alone(frame: pd.DataFrame, tmp_path: Path) -> None:
    path, keywords = tmp_path / "run", dict[str, Any](by="ward", progressbar=False, random_seed=1)
    with pytest.warns(fedppl.ConvergenceWarning):
        fedppl.fit(WARDS, frame, AT_ONCE, checkpoint=path, callback=lambda step: step.number == 2, **keywords)
    other = frame.assign(x=frame["x"].where(frame["ward"] != 3, 0.5))
    with pytest.raises(DataError, match="not those that checkpoint"):
        fedppl.fit(WARDS, other, AT_ONCE, checkpoint=path, **keywords)
    resumed = fedppl.fit(WARDS, frame, AT_ONCE, checkpoint=path, **keywords)
    assert [record.together for record in resumed.records] == [COUNT] * len(resumed.records)
    assert_array_equal(resumed.posterior.linear, fedppl.fit(WARDS, frame, AT_ONCE, **keywords).posterior.linear)


def test_no_client_is_made_that_nobody_asks_for(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fit does beside the batch knows of all clients by one."""
    made: list[str] = []
    plain = ClientsOf.model

    def model(stack: ClientsOf, k: int) -> Any:
        made.append(stack.table.client_ids[k])
        return plain(stack, k)

    assert AT_ONCE.batch is not None
    algorithm = AT_ONCE._replace(batch=AT_ONCE.batch._replace(stacks=lambda clients: [{}], summed=_nothing))
    monkeypatch.setattr(ClientsOf, "model", model)
    step = next(fedppl.rounds(WARDS, frame, algorithm, by="ward", random_seed=1))
    assert step.record.together == COUNT and not made


def _nothing(stack: Any, message: Any, workers: int) -> Summed:
    return Summed({}, 0, {str(k): "nobody is here" for k in range(COUNT)})


def test_groups_are_those_of_the_frame() -> None:
    frame = pd.DataFrame({"a": ["x", "y", "x", "z", "y"], "b": [1, 2, 1, 1, 2], "v": np.arange(5.0)})
    table = tables.of_frame(frames.opened(frame), ["a", "b"], ["v"])
    assert table.client_ids == ("('x', 1)", "('y', 2)", "('z', 1)")
    assert [table.rows(k)["v"].tolist() for k in range(3)] == [[0.0, 2.0], [1.0, 4.0], [3.0]]


def of_two_kinds(y: Any, yes: Any) -> pm.Model:
    """Rows are normal, or tell whether they are above a cut; the second kind alone tells the cut."""
    with pm.Model() as model:
        y, yes = pm.Data("y", y), pm.Data("yes", yes)
        mu, cut, tau = pm.Normal("mu", 0, 2), pm.Normal("cut", 0, 3), pm.HalfNormal("tau", 2)
        theta = mu + tau * pm.Normal("a", 0, 1)
        logs = pm.math.log(pm.math.sigmoid(3 * (2 * y - 1) * (theta - cut))), pm.logp(pm.Normal.dist(theta, 1.0), y)
        pm.Potential("obs", pm.math.sum(pm.math.where(yes > 0.5, *logs)))
    return model


@pytest.mark.slow
def test_clients_of_a_rare_kind_are_integrated_as_they_need(rng: np.random.Generator) -> None:
    """Laplace's approximation is exact at 57 clients, and moves the cut by .2 sd at the others."""
    odd, clients = (3, 40, 57), {}
    for k in range(60):
        y = np.full(2, float(k != 40)) if k in odd else rng.normal(0, 2.5) + rng.normal(size=2)
        clients[str(k)] = {"y": y, "yes": np.full(2, float(k in odd))}
    model = fedppl.FederatedModel(of_two_kinds, ["mu", "cut", "tau"])
    found = fedppl.fit(model, clients, AT_ONCE, progressbar=False, random_seed=1)
    one_by_one = fedppl.InProcess(policy=NO_RULES)
    expected = fedppl.fit(model, clients, AT_ONCE, engine=one_by_one, progressbar=False, random_seed=2)
    assert found.status.ok and found.records[-1].together == 60 and not expected.records[-1].together
    ours, theirs = found.summary(), expected.summary()
    assert_allclose((ours["mean"] - theirs["mean"]) / theirs["sd"], 0, atol=0.05)
    assert_allclose(ours["sd"], theirs["sd"], rtol=0.05)


def robust(y: Any) -> pm.Model:
    with pm.Model() as model:
        y, mu, tau = pm.Data("y", y), pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 1.5)
        pm.StudentT("obs", nu=3, mu=pm.Normal("a", mu, tau), sigma=pm.HalfNormal("sigma", 1), observed=y)
    return model


@pytest.mark.slow
def test_a_rare_client_with_two_modes_is_seen() -> None:
    rng, odd, clients = np.random.default_rng(5), (3, 40), {}
    for k in range(60):
        y = 1 + 0.8 * rng.normal() + 0.3 * rng.standard_t(3, 4)
        clients[str(k)] = {"y": np.array([-1.5, -1.4, -1.45, 4.2, 4.25, 4.3]) if k in odd else y}
    model = fedppl.FederatedModel(robust, ["mu", "tau", "sigma"])
    with pytest.warns(fedppl.ConvergenceWarning):
        fit = fedppl.fit(model, clients, AT_ONCE, progressbar=False, random_seed=1)
    assert not fit.status.ok


@pytest.mark.slow
def test_exchangeable_labels_are_several_modes_of_many_clients() -> None:
    """Priors are a little apart, so that the modes are no exact images."""

    def mixture(y: Any) -> pm.Model:
        with pm.Model() as model:
            y, centers = pm.Data("y", y), [pm.Normal(f"m{i}", sign * 0.3, 5) for i, sign in ((1, 1), (2, -1))]
            shift = 0.3 * pm.Normal("theta", 0, 1)
            pm.NormalMixture("obs", [0.5, 0.5], pm.math.stack([one + shift for one in centers]), 0.8, observed=y)
        return model

    rng = np.random.default_rng(1)
    clients = {f"c{k}": {"y": np.where(rng.random(8) < 0.5, 2.0, 6.0) + 0.8 * rng.normal(size=8)} for k in range(60)}
    model = fedppl.FederatedModel(mixture, ["m1", "m2"])
    several = fedppl.Sums(points=512, pilot=64, starts=4)
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):
        found = fedppl.fit(model, clients, several, progressbar=False, random_seed=1)
    assert found.status is Status.STALLED


@pytest.mark.slow
def test_a_mode_that_had_no_mass_is_searched_for_anew_where_a_client_leaves() -> None:
    """Rows of a t on either side: 26 clients against 25 leave 6e-8 to the other mode, 25 against 25 give it 0.68."""

    def sides(y: Any) -> pm.Model:
        with pm.Model() as model:
            y, mu = pm.Data("y", y), pm.Normal("mu", 0, 10)
            pm.StudentT("obs", nu=2, mu=mu, sigma=0.5, observed=y)
        return model

    rng = np.random.default_rng(41)
    clients = {f"c{k}": {"y": (0.0 if k < 26 else 15.0) + 0.5 * rng.normal(size=2)} for k in range(51)}
    model = fedppl.FederatedModel(sides, ["mu"])
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    assert fit.status is Status.CONVERGED
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):
        found = fedppl.without(fit, "c0", certificate=False, progressbar=False)
    assert found.fit.status is Status.STALLED
