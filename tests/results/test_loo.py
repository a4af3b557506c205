"""Leave one row out: against ArviZ on pooled rows, against a closed form, and what is refused."""

from __future__ import annotations

from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel, NotConvergedError
from fedppl.model import graph
from fedppl.results import at_client, idata
from fedppl.testing import normal_means
from tests.support import problems


def fit(model: FederatedModel, clients: Any, algorithm: Any = None, **settings: Any) -> fedppl.Fit:
    return fedppl.fit(model, clients, algorithm or fedppl.Sums(), progressbar=False, **{"random_seed": 1, **settings})


def pooled(found: fedppl.Fit) -> Any:
    """ArviZ's own estimate over the rows of all clients."""
    drawn = [idata.as_dataset(found.client(k, groups="log_likelihood")["log_likelihood"]) for k in found.client_ids]
    values = np.concatenate([np.asarray(one["obs"]) for one in drawn], axis=2)
    group = idata.dataset({"obs": values}, {"obs": ("chain", "draw", "row")}, {"chain": range(4), "draw": range(1000)})
    return az.loo(idata.from_groups({"posterior": group, "log_likelihood": group}), pointwise=True, reff=1.0)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter:UserWarning")
def test_sums_of_clients_are_those_of_pooled_rows() -> None:
    found = fit(*problems.regression())
    ours, theirs = fedppl.loo(found), pooled(found)
    elpd, p_loo = (theirs.elpd, theirs.p) if hasattr(theirs, "elpd") else (theirs.elpd_loo, theirs.p_loo)
    assert ours.elpd == pytest.approx(float(elpd), abs=1e-8)
    assert ours.se == pytest.approx(float(theirs.se), abs=1e-8)
    assert ours.p_loo == pytest.approx(float(p_loo), abs=1e-8)
    k = np.ravel(theirs.pareto_k)
    assert (ours.good, ours.bad, ours.very_bad) == (
        (k <= theirs.good_k).sum(),
        ((k > theirs.good_k) & (k <= 1)).sum(),
        (k > 1).sum(),
    )
    assert ours.clients["elpd"].sum() == pytest.approx(ours.elpd)
    assert ours.rows == len(k) == ours.clients["rows"].sum()


def covariance_of(clients: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the rows of `normal_means`: outcomes, who has them, and their covariance."""
    y = np.concatenate([data["y"] for data in clients.values()])
    same = np.concatenate([np.full(len(data["y"]), k) for k, data in enumerate(clients.values())])
    return y, same, np.eye(len(y)) + 0.25 * (same[:, None] == same) + 100.0


def log_density_without(y: np.ndarray, covariance: np.ndarray, left: np.ndarray) -> float:
    """Log p(y_left | the rest)."""
    all_ = stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y)
    rest = stats.multivariate_normal(np.zeros((~left).sum()), covariance[np.ix_(~left, ~left)]).logpdf(y[~left])
    return float(all_ - rest)


def test_rows_of_a_gaussian_model_are_those_of_the_closed_form() -> None:
    model, clients = normal_means(5)
    y, _, covariance = covariance_of(clients)
    exact = [log_density_without(y, covariance, np.arange(len(y)) == i) for i in range(len(y))]
    found = fedppl.loo(fit(model, clients))
    assert found.elpd == pytest.approx(sum(exact), abs=4 * np.sqrt(len(y) / 4000))
    assert found.very_bad == 0


def test_a_clients_rows_given_all_others_are_those_of_the_closed_form() -> None:
    model, clients = normal_means(5)
    y, same, covariance = covariance_of(clients)
    found = fit(model, clients).influence()
    exact = [log_density_without(y, covariance, same == k) for k in range(5)]
    assert_allclose(found["log_predictive"], exact, atol=1e-6)


def shifted(y: Any) -> pm.Model:
    """A model of the same rows that is wrong about where they are."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        pm.Normal("obs", pm.Normal("mu", 50, 0.1), 1, observed=y)
    return model


def test_models_are_ranked_and_stacked() -> None:
    model, clients = normal_means(5)
    good, poor = fit(model, clients), fit(FederatedModel(shifted, ["mu"]), clients)
    table = fedppl.loo_compare({"poor": poor, "good": good})
    assert list(table.index) == ["good", "poor"]
    assert table.loc["good", "weight"] > 0.99
    assert table["weight"].sum() == pytest.approx(1)
    assert table.loc["poor", "elpd_diff"] > 10 * table.loc["poor", "dse"] > 0
    alike = fedppl.loo_compare({"a": good, "b": good})
    assert_allclose(alike["weight"], 0.5)


def potential_alone(y: Any) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        pm.Potential("likelihood", pm.logp(pm.Normal.dist(pm.Normal("mu", 0, 5), 1), y).sum())
    return model


@pytest.mark.filterwarnings("ignore::fedppl.ConvergenceWarning")
def test_what_has_no_rows_here_or_no_posterior_is_refused() -> None:
    model, clients = normal_means(3)
    found = fit(model, clients)
    with pytest.raises(DeclarationError, match="estimates points"):
        fedppl.loo(fit(model, clients, fedppl.averaging.FedAvg(learning_rate=0.01), rounds=2))
    with pytest.raises(DeclarationError, match="two or more fits"):
        fedppl.loo_compare({"a": found})
    with pytest.raises(DataError, match="not of the same clients"):
        fedppl.loo_compare({"a": found, "b": fit(*normal_means(4))})
    with pytest.raises(DeclarationError, match="pass what fedppl.fit returned"):
        fedppl.loo(3)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="use at least 100 in all"):
        fedppl.loo(found, draws=10, chains=2)
    by_potential = fit(FederatedModel(potential_alone, ["mu"]), clients)
    with pytest.raises(DeclarationError, match="pm.Potential.*no rows.*observed"):
        fedppl.loo(by_potential)
    with pytest.raises(DeclarationError, match="has a pm.Potential in their place"):
        by_potential.client("client 0", groups="log_likelihood")
    early = fit(model, clients, fedppl.EP(warm_start=False), rounds=1)
    assert fedppl.loo(early).status == "max_rounds"
    with pytest.raises(NotConvergedError, match="q that has converged"):
        _ = early.log_evidence
    with pytest.raises(DeclarationError, match=r"groups=\['loo'\].*log_likelihood"):
        found.client("client 0", groups=["loo"])


def test_a_shared_point_keeps_what_a_row_has_told_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, clients = normal_means(3)
    with pytest.warns(fedppl.ConvergenceWarning, match="2 of 2 rounds"):
        point = fit(model, clients, fedppl.Confidence(strength=8), rounds=2)
    posterior = fit(model, clients)
    caplog.clear()
    fedppl.loo(posterior)
    fedppl.loo(point)
    fedppl.loo_compare({"one": posterior, "two": point})
    told = [record.getMessage() for record in caplog.records if record.name == "fedppl.results.loo"]
    assert [text.split(": the shared variables are a point of")[0] for text in told] == [
        "fedppl.loo",
        "fedppl.loo_compare: two",
    ]


def test_groups_of_a_client_are_those_that_arviz_reads() -> None:
    model, clients = problems.regression()
    name = next(iter(clients))
    drawn = fit(model, clients).client(
        name, groups=["log_likelihood", "posterior_predictive", "prior"], draws=100, chains=2
    )
    rows = len(clients[name]["y"])
    for group in ("log_likelihood", "posterior_predictive"):
        found = idata.as_dataset(drawn, group)
        assert found["obs"].shape == (2, 100, rows)
        assert found.attrs["client"] == name
    values = idata.as_dataset(drawn, "posterior")
    assert set(idata.as_dataset(drawn, "prior")) >= {str(v) for v in values if v in ("mu", "a", "beta")}
    assert "obs" in idata.as_dataset(drawn, "prior_predictive")


def by_inputs(y: Any, w: Any) -> pm.Model:
    """Local variables whose prior reads data."""
    with pm.Model() as model:
        y, w = pm.Data("y", y), pm.Data("w", w)
        pm.Normal("obs", pm.Normal("theta", pm.Normal("mu", 0, 1) + w, 1.0), 0.1, observed=y)
    return model


def test_replicates_are_of_the_local_variables_that_were_drawn() -> None:
    rng = np.random.default_rng(0)
    clients = {}
    for k in range(3):
        w = rng.normal(size=15)
        clients[str(k)] = {"y": 0.3 + w + rng.normal(size=15) + 0.1 * rng.normal(size=15), "w": w}
    drawn = fit(FederatedModel(by_inputs, ["mu"]), clients).client("0", groups="posterior_predictive")
    replicates = idata.as_dataset(drawn, "posterior_predictive")["obs"].values.reshape(-1, 15)
    assert_allclose(replicates.std(axis=0), 0.1 * np.sqrt(2), rtol=0.1)
    assert np.abs(replicates.mean(axis=0) - clients["0"]["y"]).max() < 0.02


def many_kinds(y: Any, z: Any) -> pm.Model:
    with pm.Model(coords={"part": ["a", "b"]}) as model:
        y, z = pm.Data("y", y), pm.Data("z", z)
        mu, sigma = pm.Normal("mu"), pm.HalfNormal("sigma")
        share = pm.Dirichlet("share", np.ones(2), dims="part")
        pm.MvNormal("together", mu * np.ones(2), sigma**2 * np.eye(2) + 0.1, observed=np.array([0.3, -0.2]))
        pm.Censored("cut", pm.Normal.dist(mu, sigma), lower=None, upper=1.0, observed=y)
        kinds = [pm.Normal.dist(mu, 1), pm.Normal.dist(mu + 2, sigma)]
        pm.Mixture("mixed", w=share, comp_dists=kinds, observed=z)
        pm.Multinomial("counted", 5, share, observed=np.array([2, 3]))
        pm.Normal("alone", 0, 1, observed=np.array([0.5]))
    return model


def few_kinds(y: Any, z: Any) -> pm.Model:
    with pm.Model() as model:
        y, z = pm.Data("y", y), pm.Data("z", z)
        mu = pm.Normal("mu")
        pm.Poisson("counted", pm.math.exp(mu), observed=pt.cast(pt.ceil(pt.abs(y)), "int64"))
        pm.Normal("mixed", pm.Normal("theta", mu, 1, shape=2)[:, None], 1, observed=z[None, :] + np.zeros((2, 1)))
        pm.Normal("alone", 0, 1, observed=np.array([0.5]))
    return model


@pytest.mark.parametrize("builder", [few_kinds, pytest.param(many_kinds, marks=pytest.mark.slow)])
def test_log_likelihoods_of_all_draws_at_once_are_those_of_pymc(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FederatedModel(builder, ["mu"])
    found = fedppl.fit(
        model,
        {k: {"y": np.array([0.9, -0.5, 1.0]), "z": np.array([0.3, 1.4])} for k in "ab"},
        fedppl.EP(),
        progressbar=False,
        random_seed=1,
    )
    drawn = found.client("b", draws=20, chains=2, groups=("log_likelihood",))
    posterior = idata.as_dataset(drawn["posterior"])
    client = found.clients["b"]
    model = client.pymc_model()
    draws = posterior[[rv.name for rv in model.free_RVs]]
    theirs = at_client._by_pymc(model, draws)
    assert at_client._compared(client, model, draws) is not None
    monkeypatch.setattr(at_client, "_by_pymc", lambda model, draws: theirs + 0.1)
    assert at_client._compared(client, model, draws) is None
    ours = idata.as_dataset(drawn["log_likelihood"])
    assert set(ours.data_vars) == set(theirs.data_vars) and ours["mixed"].dims == theirs["mixed"].dims
    for name in theirs.data_vars:
        assert_allclose(ours[name].values, theirs[name].values, rtol=1e-9, atol=1e-9)


def test_log_likelihoods_of_all_clients_are_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients of different lengths, one row among them, and of another fit of the same declaration."""
    model, clients = normal_means(4)
    clients = {name: {"y": data["y"][: 4 - k]} for k, (name, data) in enumerate(clients.items())}
    built, made = [], graph.observed_given_all
    monkeypatch.setattr(graph, "observed_given_all", lambda parts: built.append(parts) or made(parts))
    for seed in (1, 2):
        found = fit(model, clients, random_seed=seed)
        for name in clients:
            drawn = found.client(name, groups="log_likelihood", draws=20, chains=2)
            free = found.clients[name].pymc_model()
            draws = idata.as_dataset(drawn["posterior"])[[rv.name for rv in free.free_RVs]]
            ours, theirs = idata.as_dataset(drawn["log_likelihood"]), at_client._by_pymc(free, draws)
            for outcome in theirs.data_vars:
                assert_allclose(ours[outcome].values, theirs[outcome].values, rtol=1e-9, atol=1e-9)
    assert len(built) <= 1  # none where an earlier test built it


def test_starting_values_change_no_log_likelihood() -> None:
    """PyMC copies no model that has them."""

    def started(y: Any) -> pm.Model:
        with pm.Model() as model:
            theta = pm.Normal("theta", pm.Normal("mu", 0, 5, initval=1.0), 1)
            pm.Normal("obs", theta, 1, observed=pm.Data("y", y))
        return model

    clients = {f"c{k}": {"y": np.arange(3.0) + k} for k in range(3)}
    found = fit(FederatedModel(started, ["mu"]), clients)
    drawn = found.client("c1", groups="log_likelihood", draws=50, chains=2)
    theta = idata.as_dataset(drawn, "posterior")["theta"].values[..., None]
    expected = stats.norm.logpdf(clients["c1"]["y"], theta)
    assert_allclose(idata.as_dataset(drawn, "log_likelihood")["obs"].values, expected)


def test_outcomes_that_are_badly_predicted_have_their_log_density(rng: np.random.Generator) -> None:
    """As it is written, log(1 - p) is -inf where the logit is 40, and of few digits from 30 on."""

    def slope(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            pm.Bernoulli("o", logit_p=pm.Normal("mu", 0, 2) * x, observed=y)
        return model

    x = rng.normal(size=(2, 200))
    y = (rng.random(x.shape) < 1 / (1 + np.exp(-2 * x))).astype(int)
    x[0, 0], y[0, 0] = 25.0, 0
    clients = {name: {"x": x[k], "y": y[k]} for k, name in enumerate("ab")}
    drawn = fit(fedppl.FederatedModel(slope, shared=["mu"]), clients, random_seed=1).client(
        "a", groups="log_likelihood"
    )
    mu = idata.as_dataset(drawn["posterior"])["mu"].values
    ours = idata.as_dataset(drawn["log_likelihood"])["o"].values[..., 0]
    assert_allclose(ours, -np.logaddexp(0.0, 25.0 * mu), rtol=1e-12)
