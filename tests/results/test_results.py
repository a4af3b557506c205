"""What a fit returns: ArviZ groups, dims and coords, and posteriors against closed forms of conjugate models."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel, gaussian
from fedppl.contracts import LogEvidence, Posterior
from fedppl.contracts.algorithm import WithoutClient
from fedppl.numerics.proposals import Reweighted
from fedppl.results import shared
from fedppl.results.records import rounds_dataset
from fedppl.testing import normal_means
from fedppl.types import LocalFailure, Status
from tests.support import problems


def groups(result: Any) -> set[str]:
    """Names of the groups, on either ArviZ."""
    return set(result.children) if hasattr(result, "children") else set(result.groups())


def dataset(result: Any, group: str) -> xr.Dataset:
    found = result[group]
    return found if isinstance(found, xr.Dataset) else found.to_dataset()


@functools.cache
def means_fit() -> fedppl.Fit:
    model, clients = normal_means(4)
    return fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=3)


@functools.cache
def regression_fit() -> fedppl.Fit:
    model, clients = problems.regression()
    return fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=3)


@functools.cache
def schools_fit() -> fedppl.Fit:
    model, clients = problems.schools()
    return problems.fit_some_rounds(model, clients, fedppl.EP(), progressbar=False, random_seed=3)


def assert_normal(draws: Any, mean: Any, sd: Any, ess: float) -> None:
    """Mean and sd of draws within 4 standard errors, sd/√n and sd/√(2n), of a normal's."""
    x = np.asarray(draws).reshape(-1, *np.shape(mean))
    assert_allclose(x.mean(axis=0), mean, atol=float(4 * np.max(sd) / np.sqrt(ess)))
    assert_allclose(x.std(axis=0), sd, rtol=4 / np.sqrt(2 * ess))


# --- shared posterior -----------------------------------------------------------------------------------------


def test_groups_and_dims_of_the_shared_posterior() -> None:
    fit = regression_fit()
    idata = fit.idata
    assert groups(idata) == {"posterior", "fit", "rounds"}
    posterior = dataset(idata, "posterior")
    assert set(posterior.data_vars) == {"mu", "a", "mu_difference"}
    assert posterior["mu"].dims == ("chain", "draw", "predictor")
    assert posterior["a"].dims == ("chain", "draw")
    assert posterior["mu"].shape == (4, 1000, 2)
    assert_array_equal(posterior["predictor"], ["age", "dose"])
    assert posterior.attrs["inference_library"] == "fedppl"
    assert (posterior.attrs["status"], posterior.attrs["algorithm"]) == ("converged", "EP")
    assert fit.idata is idata


def test_draws_of_the_shared_posterior_are_draws_of_q() -> None:
    """Exact posterior of the conjugate regression; the deterministic follows its parts."""
    exact = problems.regression_posterior(problems.regression()[1])
    posterior = dataset(regression_fit().idata, "posterior")
    mean, sd = gaussian.mean(exact), gaussian.standard_deviations(exact)
    assert_normal(posterior["mu"], mean[:2], sd[:2], 4000)
    assert_normal(posterior["a"], mean[2], sd[2], 4000)
    x = np.column_stack([posterior["mu"].values.reshape(-1, 2), posterior["a"].values.ravel()])
    expected = gaussian.covariance(exact)
    # standard error of a correlation near 0 is 1/√n
    assert_allclose(np.corrcoef(x.T), expected / np.outer(sd, sd), atol=4 / np.sqrt(4000))
    assert_allclose(posterior["mu_difference"], posterior["mu"][..., 0] - posterior["mu"][..., 1])


def test_the_fit_group_holds_q_with_labelled_rows() -> None:
    fit = regression_fit()
    group = dataset(fit.idata, "fit")
    labels = fit.idata["posterior"]["mu"]["predictor"].values
    assert_array_equal(group["rows"], [*(f"mu[{label}]" for label in labels), "a"])
    assert group["mean_vector"].dims == ("rows",)
    assert group["covariance_matrix"].dims == ("rows", "columns")
    assert_array_equal(group["mean_vector"], gaussian.mean(fit.posterior))
    assert_array_equal(group["covariance_matrix"], gaussian.covariance(fit.posterior))
    assert float(group["mean_vector"].sel(rows="a")) == gaussian.mean(fit.posterior)[2]
    assert group.attrs["space"] == "unconstrained"
    assert_array_equal(dataset(schools_fit().idata, "fit")["rows"], ["mu", "tau_log__"])


def test_constrained_variables_are_reported_on_their_own_scale() -> None:
    """log τ is normal under q, so the median of τ is exp of its mean: standard error of a median 1.2533 sd/√n."""
    fit = schools_fit()
    tau = dataset(fit.idata, "posterior")["tau"].values
    mean, sd = gaussian.mean(fit.posterior)[1], gaussian.standard_deviations(fit.posterior)[1]
    assert np.all(tau > 0)
    assert np.median(np.log(tau)) == pytest.approx(mean, abs=4 * 1.2533 * sd / np.sqrt(4000))


def test_seeds_of_draws() -> None:
    fit = means_fit()
    first, again, other = (dataset(fit.shared(draws=5, random_seed=s), "posterior")["mu"] for s in (None, fit.seed, 9))
    assert_array_equal(first, again)
    assert not np.any(first.values == other.values)
    assert first.shape == (4, 5)


# --- rounds ---------------------------------------------------------------------------------------------------


@problems.few_rounds
def test_rounds_have_a_row_a_round_and_a_column_a_client() -> None:
    model, clients = problems.noise()
    fit = fedppl.fit(model, clients, fedppl.EP(), participation=3, progressbar=False, random_seed=1)
    rounds = dataset(fit.idata, "rounds")
    assert_array_equal(rounds["round"], [record.number for record in fit.records])
    assert_array_equal(rounds["client"], list(clients))
    for name in ("phase", "change_mean", "change_sd", "damping", "skewness", "seconds"):
        assert rounds[name].dims == ("round",)
    for name in ("outcome", "reason", "bytes_down", "bytes_up", "ess", "pareto_k", "fallback"):
        assert rounds[name].dims == ("round", "client")
    for t, record in enumerate(fit.records):
        for k, client_id in enumerate(clients):
            one = rounds.isel(round=t, client=k)
            asked = client_id in record.asked
            assert one["outcome"].item() == ("used" if asked else "not asked")
            assert one["bytes_up"].item() == record.bytes_up.get(client_id, 0)
            assert one["ess"].item() == record.infos.get(client_id, {}).get("ess", np.nan) or np.isnan(one["ess"])
            assert np.isnan(one["ess"]) == (not asked or record.info["phase"] != "EP")
    assert_array_equal(rounds["change_mean"], [record.info["change_mean"] for record in fit.records])


@problems.few_rounds
def test_skipped_clients_stand_in_rounds_with_their_reason() -> None:
    model, clients = normal_means(2)
    local = problems.failing(lambda client_id: client_id == "client 1", "no mode")
    fit = fedppl.fit(model, clients, fedppl.EP(local=local), callback=lambda step: step.number == 2, progressbar=False)
    rounds = dataset(fit.idata, "rounds")
    assert_array_equal(rounds["outcome"], [["used", "skipped"]] * 2)
    assert_array_equal(rounds["reason"], [["", "no mode"]] * 2)
    assert np.all(rounds["bytes_down"].values > 0)
    assert_array_equal(rounds["bytes_up"].values[:, 1] == 0, [True, True])


@problems.of_q
def test_a_clients_diagnostic_takes_no_column_of_ours() -> None:
    model, clients = problems.noise(3)
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    ours = fit.idata["rounds"]
    loud = {name: 1e9 for name in ("outcome", "reason", "bytes_up", "seconds", "damping", "mine")}
    liar = next(iter(clients))
    infos = {**fit.records[0].infos, liar: {**fit.records[0].infos[liar], **loud}}
    found = rounds_dataset((fit.records[0]._replace(infos=infos), *fit.records[1:]), tuple(clients))
    for name in ("outcome", "reason", "bytes_up", "seconds", "damping"):
        assert_array_equal(found[name], ours[name])
    assert found["mine"].values[0, 0] == 1e9


# --- a client's posterior -------------------------------------------------------------------------------------


def test_groups_and_dims_of_a_clients_posterior() -> None:
    clients = problems.regression()[1]
    result = regression_fit().client("clinic 2")
    assert groups(result) == {"posterior", "observed_data", "constant_data"}
    posterior = dataset(result, "posterior")
    assert set(posterior.data_vars) == {"mu", "a", "mu_difference", "beta", "beta_shift"}
    assert posterior["beta"].dims == ("chain", "draw", "predictor")
    assert_array_equal(posterior["predictor"], ["age", "dose"])
    assert_allclose(posterior["beta_shift"], posterior["beta"] - posterior["mu"])
    assert posterior.attrs["client"] == "clinic 2"
    assert posterior.attrs["fedppl_pareto_k"] < 0.7
    assert_array_equal(dataset(result, "observed_data")["obs"], clients["clinic 2"]["y"])
    assert_array_equal(dataset(result, "constant_data")["X"], clients["clinic 2"]["X"])


def test_a_clients_theta_has_its_exact_posterior() -> None:
    """Eq. 8: μ from the other clients' data, then θ from its own: both normal."""
    fit, (_, clients) = means_fit(), normal_means(4)
    for client_id, data in clients.items():
        others = {k: v for k, v in clients.items() if k != client_id}
        mean, variance = problems.normal_means_theta(data["y"], *problems.normal_means_posterior(others))
        posterior = dataset(fit.client(client_id), "posterior")
        ess = min(4000.0, posterior.attrs["fedppl_ess"])
        assert ess > 1000
        assert_normal(posterior["theta"], mean, np.sqrt(variance), ess)
        mean, variance = problems.normal_means_posterior(clients)
        assert_normal(posterior["mu"], mean, np.sqrt(variance), ess)


def test_shared_and_local_draws_of_a_client_belong_together() -> None:
    """Joint Gaussian of (φ, β) in closed form."""
    fit, (_, clients) = regression_fit(), problems.regression()
    cavity = problems.regression_posterior({k: v for k, v in clients.items() if k != "clinic 1"})
    mean, covariance = problems.regression_joint(clients["clinic 1"], cavity)
    sd = np.sqrt(np.diag(covariance))
    posterior = dataset(fit.client("clinic 1", draws=2000), "posterior")
    x = np.concatenate([posterior["mu"], posterior["a"].values[..., None], posterior["beta"]], axis=-1).reshape(-1, 5)
    ess = min(8000.0, posterior.attrs["fedppl_ess"])
    assert_normal(x, mean, sd, ess)
    assert_allclose(np.corrcoef(x.T), covariance / np.outer(sd, sd), atol=4 / np.sqrt(ess))


@pytest.mark.parametrize("name", ["NUTS", "Laplace", "ADVI"])
def test_other_local_inferences_draw_the_same_posterior(name: str) -> None:
    local = {
        "NUTS": fedppl.local.NUTS(nuts_sampler="pymc"),
        "Laplace": fedppl.local.Laplace(),
        "ADVI": fedppl.local.ADVI(),
    }[name]
    fit, (_, clients) = means_fit(), normal_means(4)
    posterior = dataset(
        dataclasses.replace(fit, algorithm=fit.algorithm._replace(result=fedppl.EP(local=local).result)).client(
            "client 0"
        ),
        "posterior",
    )
    others = {k: v for k, v in clients.items() if k != "client 0"}
    mean, variance = problems.normal_means_theta(clients["client 0"]["y"], *problems.normal_means_posterior(others))
    assert_normal(posterior["theta"], mean, np.sqrt(variance), min(4000.0, posterior.attrs["fedppl_ess"]))


def test_a_new_client_is_fitted_from_q_and_its_own_data() -> None:
    """θ from N(E μ, var μ + ¼) and its rows."""
    fit, clients = means_fit(), normal_means(4)[1]
    y = np.array([3.0, 2.5, 4.0])
    result = fit.new_client({"y": y}, name="newcomer")
    mean, variance = problems.normal_means_theta(y, *problems.normal_means_posterior(clients))
    posterior = dataset(result, "posterior")
    ess = min(4000.0, posterior.attrs["fedppl_ess"])
    assert ess > 400
    assert_normal(posterior["theta"], mean, np.sqrt(variance), ess)
    assert posterior.attrs["client"] == "newcomer"
    assert_array_equal(dataset(result, "observed_data")["obs"], y)
    assert "newcomer" not in fit.clients


def test_a_new_client_may_be_of_any_size() -> None:
    model, clients = problems.counts()
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    result = fit.new_client({"y": [2, 0, 5, 1, 1, 3, 2, 2, 9]}, draws=50)
    assert dataset(result, "posterior")["theta"].shape == (4, 50, 9)


def test_a_folded_prior_reaches_the_clients_posterior() -> None:
    """School A: θ against quadrature over (μ, log τ) with everyone's data; NUTS would be the other reference."""
    fit = schools_fit()
    posterior = dataset(fit.client("school A"), "posterior")
    mu, log_tau = np.linspace(-25, 35, 241)[:, None], np.linspace(-9, 5, 281)[None]
    tau = np.exp(log_tau)
    logp = -0.5 * (mu / 5) ** 2 + log_tau - np.log1p((tau / 5) ** 2)
    for effect, error in zip(problems.SCHOOL_EFFECTS, problems.SCHOOL_ERRORS, strict=True):
        v = tau**2 + error**2
        logp = logp - 0.5 * (np.log(v) + (effect - mu) ** 2 / v)
    weights = np.exp(logp - logp.max())
    weights /= weights.sum()
    shrink = tau**2 / (tau**2 + 15.0**2)
    expected = float(np.sum(weights * (mu + shrink * (28.0 - mu))))
    # EP's q is Gaussian in a skewed log τ (see test_ep): 0.15 of its sd moves E θ_A by less than 0.6
    assert float(posterior["theta"].mean()) == pytest.approx(expected, abs=0.6)


# --- predictions ----------------------------------------------------------------------------------------------


def test_predictions_have_the_exact_mean_and_sd() -> None:
    """ỹ = a + x β + ε: mean from the joint posterior of (a, β), variance its own plus 1."""
    fit, (_, clients) = regression_fit(), problems.regression()
    X_new = np.array([[1.0, 0.0], [0.5, -2.0], [0.0, 0.0]])
    result = fit.client("clinic 1", predict={"X": X_new})
    predicted = dataset(result, "predictions")["obs"]
    assert predicted.shape == (4, 1000, 3) and predicted.dims[:2] == ("chain", "draw")
    assert_array_equal(dataset(result, "predictions_constant_data")["X"], X_new)
    posterior = dataset(result, "posterior")
    cavity = problems.regression_posterior({k: v for k, v in clients.items() if k != "clinic 1"})
    mean, covariance = problems.regression_joint(clients["clinic 1"], cavity)
    rows = np.column_stack([np.zeros((3, 2)), np.ones(3), X_new])
    mean = rows @ mean
    sd = np.sqrt(np.einsum("ij,jk,ik->i", rows, covariance, rows) + 1)
    assert_normal(predicted, mean, sd, min(4000.0, posterior.attrs["fedppl_ess"]))


def test_predict_is_client_with_new_inputs_and_repeats() -> None:
    fit = regression_fit()
    X_new = np.ones((2, 2))
    one, two = fit.predict("clinic 0", {"X": X_new}, draws=20), fit.client("clinic 0", predict={"X": X_new}, draws=20)
    assert_array_equal(dataset(one, "predictions")["obs"], dataset(two, "predictions")["obs"])
    other = fit.predict("clinic 0", {"X": X_new}, draws=20, random_seed=77)
    assert not np.any(dataset(one, "predictions")["obs"].values == dataset(other, "predictions")["obs"].values)


def test_predicting_leaves_the_clients_own_data_alone() -> None:
    fit, clients = regression_fit(), problems.regression()[1]
    result = fit.predict("clinic 0", {"X": np.ones((2, 2))}, draws=10)
    assert_array_equal(dataset(result, "observed_data")["obs"], clients["clinic 0"]["y"])
    assert_array_equal(fit.clients["clinic 0"].arrays["X"], clients["clinic 0"]["X"])


def test_a_new_client_predicts_too() -> None:
    """Rows of 0 predict the intercept: mean E a, variance var a + 1, whatever the new client's two rows say of β."""
    fit = regression_fit()
    result = fit.new_client({"X": np.zeros((1, 2)), "y": [0.5]}, predict={"X": np.zeros((1, 2))})
    q = fit.posterior
    mean, variance = gaussian.mean(q)[2], gaussian.covariance(q)[2, 2]
    precision = 1 / variance + 1
    expected, spread = (mean / variance + 0.5) / precision, np.sqrt(1 / precision + 1)
    ess = min(4000.0, dataset(result, "posterior").attrs["fedppl_ess"])
    assert_normal(dataset(result, "predictions")["obs"], [expected], [spread], ess)


def grouped_builder(X: Any, group: Any, y: Any) -> Any:
    """Dims with labels, and dims as long as the data."""
    with pm.Model(coords={"stratum": ["low", "high"]}) as model:
        X, y, group = (pm.Data(name, value, dims="row") for name, value in (("X", X), ("y", y), ("group", group)))
        effect = pm.Normal("effect", pm.Normal("mu", 0, 2), 1, dims="stratum")
        fitted = pm.Deterministic("fitted", effect[group] * X, dims="row")
        pm.Normal("obs", fitted, 0.5, observed=y, dims="row")
    return model


@functools.cache
def grouped_fit() -> fedppl.Fit:
    rng = np.random.default_rng(4)
    clients = {
        f"town {n}": {"X": rng.normal(size=n), "group": rng.integers(2, size=n), "y": rng.normal(size=n)}
        for n in (6, 8)
    }
    return fedppl.fit(FederatedModel(grouped_builder, ["mu"]), clients, fedppl.EP(), progressbar=False, random_seed=1)


def test_dims_without_labels_take_the_length_of_the_data() -> None:
    fit = grouped_fit()
    for n in (6, 8):
        result = fit.client(f"town {n}", draws=10)
        posterior = dataset(result, "posterior")
        assert posterior["effect"].dims == ("chain", "draw", "stratum")
        assert posterior["fitted"].dims == ("chain", "draw", "row") and posterior.sizes["row"] == n
        assert_array_equal(posterior["stratum"], ["low", "high"])
        assert dataset(result, "observed_data")["obs"].dims == ("row",)
    predictions = dataset(fit.predict("town 6", {"X": np.ones(3), "group": [0, 1, 1]}, draws=10), "predictions")
    assert predictions["obs"].dims == ("chain", "draw", "row") and predictions.sizes["row"] == 3


def test_predictions_use_the_new_rows_groups() -> None:
    """ỹ = effect[group] x + ε with x = 100: what group a new row is in shows beyond doubt."""
    result = grouped_fit().predict("town 8", {"X": np.array([100.0, 100.0]), "group": np.array([1, 0])})
    effect = dataset(result, "posterior")["effect"].values.reshape(-1, 2)
    predicted = dataset(result, "predictions")["obs"].values.reshape(-1, 2)
    assert_allclose(predicted, 100 * effect[:, ::-1], atol=5 * 0.5)


@pytest.mark.parametrize("through", ["the container", "the variable"])
def test_what_is_computed_from_outcomes_needs_none_of_them_to_predict(through: str) -> None:
    """Residuals are not predicted: new rows need no outcomes for them."""

    def line(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            fitted = X * pm.Normal("b", 0, 5)
            obs = pm.Normal("obs", fitted, 0.5, observed=y)
            pm.Deterministic("residual", (y if through == "the container" else obs) - fitted)
        return model

    X = np.arange(4.0)
    clients = {name: {"X": X, "y": 2.0 * X} for name in ("a", "b")}
    fit = fedppl.fit(fedppl.FederatedModel(line, ["b"]), clients, fedppl.EP(), progressbar=False, random_seed=1)
    result = fit.predict("a", {"X": np.array([100.0, 0.0, 1.0, 2.0, 3.0])}, draws=50)
    slope = dataset(result, "posterior")["b"].values
    assert_allclose(dataset(result, "predictions")["obs"].values[..., 0], 100 * slope, atol=5 * 0.5)


def test_new_rows_without_their_group_are_refused() -> None:
    """Only outcomes may be left out; a missing input would be predicted as if it were zero."""
    with pytest.raises(DataError, match=r"\['X'\] leave out 'group'.* of 'obs' reads; give its 3 new rows"):
        grouped_fit().predict("town 6", {"X": np.ones(3)})


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({}, r"must name containers of the model: \['X', 'y'\]"),
        ({"Z": np.ones((2, 2))}, r"new data \['Z'\] must name containers"),
        ({"X": np.ones((2, 3))}, r"'X' has shape \(2, 3\).*same columns"),
        ({"X": np.ones(2)}, r"'X' has shape \(2,\)"),
        ({"X": np.array([[np.nan, 1.0]])}, "'X' holds nan.*drop or impute"),
        ({"X": [["a", "b"]]}, "'X' .*numeric and real"),
    ],
)
def test_new_data_that_do_not_fit_are_refused(new: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        regression_fit().predict("clinic 0", new)


def test_a_builder_without_containers_cannot_predict() -> None:
    with pytest.warns(UserWarning, match="no pm.Data container"):
        fit = fedppl.fit(
            FederatedModel(problems.without_containers, ["mu"]),
            {"a": {"y": np.array([0.5, -1.0, 2.0])}, "b": {"y": np.array([3.0, 4.0])}},
            fedppl.EP(),
            progressbar=False,
        )
    assert groups(fit.client("a", draws=5)) >= {"posterior", "observed_data"}
    with pytest.raises(DataError, match="client 'a': the builder has no pm.Data container; put the inputs into one"):
        fit.predict("a", {"y": np.ones(2)})


# --- errors ---------------------------------------------------------------------------------------------------


def test_an_unknown_client_is_an_error_that_points_to_new_client() -> None:
    with pytest.raises(DeclarationError, match=r"client 'nobody' did not take part; clients are .*fit.new_client"):
        means_fit().client("nobody")


@pytest.mark.parametrize("keywords", [{"draws": 0}, {"chains": 0}])
@pytest.mark.parametrize("method", ["client", "shared"])
def test_no_draws_are_refused(method: str, keywords: Any) -> None:
    arguments = ("client 0",) if method == "client" else ()
    with pytest.raises(DeclarationError, match="from 1"):
        getattr(means_fit(), method)(*arguments, **keywords)


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        ({"X": np.ones((3, 3)), "y": np.ones(3)}, "same columns"),
        ({"X": np.ones((3, 2)), "y": [1.0, np.nan, 0.0]}, "'y' holds nan"),
        ({"X": np.ones((3, 2))}, "'y'"),
    ],
)
def test_bad_data_of_a_new_client_are_refused(data: Any, fragment: str) -> None:
    with pytest.raises(DataError) as caught:
        regression_fit().new_client(data, name="newcomer")
    assert "client 'newcomer'" in str(caught.value) and fragment in str(caught.value)


def test_a_new_client_of_another_layout_is_refused() -> None:
    rng = np.random.default_rng(0)
    clients = {k: {"X": rng.normal(size=(6, 2)), "y": rng.normal(size=6)} for k in "ab"}
    fit = fedppl.fit(FederatedModel(problems.polymorphic_builder, ["mu"]), clients, fedppl.EP(), progressbar=False)
    with pytest.raises(DeclarationError, match="'newcomer' has shared layout .*same columns"):
        fit.new_client({"X": np.ones((4, 3)), "y": np.ones(4)}, name="newcomer")


# --- broken off -----------------------------------------------------------------------------------------------


def broken_off(algorithm: fedppl.Algorithm, **keywords: Any) -> fedppl.Fit:
    """Stopped after one client's first reply: no warm start is over by then."""
    settings: dict[str, Any] = {"participation": 1, "callback": lambda step: True, **keywords}
    with pytest.warns(fedppl.ConvergenceWarning):
        return fedppl.fit(*problems.regression(), algorithm, progressbar=False, random_seed=3, **settings)


UNARRIVED: dict[str, Any] = {
    "warm start": lambda: broken_off(fedppl.EP()),
    "no replies": lambda: broken_off(
        fedppl.EP(local=problems.failing(lambda _: True, "raise points="), warm_start=False), participation=None
    ),
    "improper": lambda: dataclasses.replace(
        regression_fit(),
        status=Status.MAX_ROUNDS,
        message="raise rounds=",
        algorithm=regression_fit().algorithm._replace(
            result=regression_fit().algorithm.result._replace(
                shared=Posterior(lambda state: gaussian.Gaussian(np.ones(3), -np.eye(3)))
            )
        ),
    ),
}
ASKED: dict[str, Any] = {
    "posterior": lambda fit: fit.posterior,
    "estimate": lambda fit: fit.estimate,
    "summary": lambda fit: fit.summary(),
    "client": lambda fit: fit.client("clinic 0", draws=5),
    "predict": lambda fit: fit.predict("clinic 0", {"X": np.ones((2, 2))}, draws=5),
    "new client": lambda fit: fit.new_client({"X": np.ones((2, 2)), "y": np.ones(2)}, draws=5),
    "validation loss": lambda fit: fedppl.search.validation_loss(fit, problems.regression()[1]),
}


@pytest.mark.parametrize("case", UNARRIVED)
def test_a_q_that_never_arrived_is_no_posterior(case: str) -> None:
    fit = UNARRIVED[case]()
    assert "posterior" not in groups(fit.idata) and "rounds" in groups(fit.idata)
    if "fit" in groups(fit.idata):
        assert not {"mean_vector", "covariance_matrix"} & set(dataset(fit.idata, "fit").data_vars)
    for ask in ASKED.values():
        with pytest.raises(fedppl.NotConvergedError, match=r"shared\(unconverged=True\)") as caught:
            ask(fit)
        assert fit.message.rstrip(".") in str(caught.value)


@pytest.mark.parametrize("case", UNARRIVED)
def test_draws_of_what_never_arrived_are_labelled(case: str) -> None:
    fit = UNARRIVED[case]()
    posterior = dataset(fit.shared(unconverged=True, draws=5), "posterior")
    assert posterior["mu"].shape == (1, 20, 2) and np.all(np.isfinite(posterior["mu"]))
    assert posterior.attrs["converged"] == 0 and posterior.attrs["status"] == fit.status.value
    assert "not a posterior" in posterior.attrs["warning"]
    assert posterior.attrs["message"] == fit.message


def test_a_point_that_nobody_replied_to_is_no_estimate() -> None:
    algorithm = fedppl.averaging.FedAvg(learning_rate=0.1)
    algorithm = algorithm._replace(replies=algorithm.replies._replace(reject=lambda state, reply: "no"))
    fit = fedppl.fit(*problems.regression(), algorithm, rounds=2, progressbar=False)
    assert fit.status is Status.STALLED and "point_estimate" not in groups(fit.idata)
    with pytest.raises(fedppl.NotConvergedError, match="no client has replied"):
        _ = fit.estimate


def test_a_refinement_that_ran_out_of_rounds_has_a_posterior_that_says_so() -> None:
    model, clients = problems.noise()
    with pytest.warns(fedppl.ConvergenceWarning, match="tolerance 1e-09.*raise rounds="):
        fit = fedppl.fit(
            model,
            clients,
            fedppl.EP(tolerance=1e-9),
            callback=lambda step: step.info.phase == "EP",
            progressbar=False,
            random_seed=1,
        )
    attrs = dataset(fit.idata, "posterior").attrs
    assert (attrs["status"], attrs["converged"], attrs["message"]) == ("max_rounds", 0, fit.message)
    assert "warning" not in attrs
    assert fit.summary().attrs["status"] == "max_rounds"
    drawn = dataset(fit.client(next(iter(clients)), draws=5), "posterior").attrs
    assert (drawn["status"], drawn["converged"]) == ("max_rounds", 0)


# --- the table ------------------------------------------------------------------------------------------------


def test_the_summary_has_a_row_an_entry_and_eps_own_diagnostics() -> None:
    fit = regression_fit()
    table, posterior = fit.summary(), dataset(fit.idata, "posterior")
    assert set(table.index) == {"mu[age]", "mu[dose]", "a", "mu_difference"}
    assert list(table.columns) == ["mean", "sd", "ci_low", "ci_high", "mcse_mean", "mcse_sd", "last_change", "skewness"]
    for row, draws in {"mu[dose]": posterior["mu"][..., 1], "mu_difference": posterior["mu_difference"]}.items():
        x = draws.values.ravel()
        expected = [x.mean(), x.std(ddof=1), *np.quantile(x, [0.025, 0.975])]
        known = table.loc[row, ["mean", "sd", "ci_low", "ci_high"]].astype(float)
        assert_allclose(
            known, expected, atol=4 * 2.0 * x.std() / np.sqrt(len(x))
        )  # of draws; the table is of many points
        assert 0 <= table.loc[row, "mcse_mean"] < 1e-3 * x.std()
    # φ is (mu[0], mu[1], a); a deterministic has no coordinate of its own
    rows = ["mu[age]", "mu[dose]", "a"]
    assert_array_equal(table.loc[rows, "skewness"], fit.state.skewed.total)
    assert_array_equal(table.loc[rows, "last_change"], fit.state.steps.last_change)
    assert table.loc["mu_difference", ["last_change", "skewness"]].isna().all()
    last = [record.info for record in fit.records if record.info["phase"] == "EP"][-1]
    assert np.max(fit.state.steps.last_change) == max(float(last["change_mean"]), float(last["change_sd"])) < 0.01
    assert table.attrs["status"] == "converged" and table.attrs["message"] == fit.message
    assert table.attrs["answered"] == 1.0 and table.attrs["fallbacks"] == {}


def test_the_summary_of_some_variables_with_another_interval() -> None:
    fit = regression_fit()
    table = fit.summary("a", ci_prob=0.5, round_to=1)
    assert list(table.index) == ["a"] and table.attrs["ci_prob"] == 0.5
    assert table.loc["a", "mean"] == round(table.loc["a", "mean"], 1)
    assert table.attrs["status"] == "converged"
    with pytest.raises(DeclarationError, match=r"\['b'\].*'mu'"):
        fit.summary(["a", "b"])
    with pytest.raises(DeclarationError, match="ci_prob=94"):
        fit.summary(ci_prob=94)


def test_the_summary_names_who_did_not_answer_and_who_fell_back() -> None:
    """The last request counts: client 2 answers in the warm start alone."""
    local = problems.falling_back({"client 1": 2.0})
    inner = local.tilted

    def tilted(target: Any, rng: Any) -> Any:
        if target.client.client_id == "client 2":
            raise LocalFailure("out of order")
        return inner(target, rng)

    with pytest.warns(fedppl.ConvergenceWarning):
        fit = fedppl.fit(
            *normal_means(4), fedppl.EP(local=local._replace(tilted=tilted)), progressbar=False, random_seed=1
        )
    attrs = fit.summary().attrs
    assert attrs["answered"] == 0.75
    assert attrs["fallbacks"] == {"client 1": "NUTS"}


def test_the_summary_of_a_point_and_of_nothing() -> None:
    model, clients = problems.regression()
    point = fedppl.fit(model, clients, fedppl.averaging.FedAvg(learning_rate=1e-3), rounds=2, progressbar=False)
    table = point.summary(["mu"])
    assert list(table.columns) == ["mean"]
    assert_allclose(table["mean"], point.estimate["mu"])
    assert table.attrs["status"] == "max_rounds"
    alone = fedppl.fit(model, clients, fedppl.one_shot.Separate(), progressbar=False)
    with pytest.raises(DeclarationError, match=r"Separate has no parameters.*fit.client"):
        alone.summary()


@pytest.mark.slow
def test_the_summary_of_a_simplex_has_more_entries_than_coordinates() -> None:
    """An entry of a simplex depends on all of its coordinates: the largest of them stands there."""

    def build(y: Any) -> Any:
        with pm.Model() as model:
            share = pm.Dirichlet("share", np.ones(3))
            pm.Multinomial("counts", n=9, p=share, observed=pm.Data("y", y))
        return model

    clients = {"a": {"y": np.array([[3, 4, 2]])}, "b": {"y": np.array([[5, 2, 2]])}}
    fit = fedppl.fit(FederatedModel(build, ["share"]), clients, fedppl.EP(), progressbar=False, random_seed=1)
    table = fit.summary()
    assert list(table.index) == ["share[0]", "share[1]", "share[2]"]
    assert table["mean"].sum() == pytest.approx(1.0)
    assert set(table["last_change"]) == {np.max(fit.state.steps.last_change)}


def test_the_posterior_group_says_what_its_ess_is_of() -> None:
    sampling = dataset(means_fit().idata, "posterior").attrs["sampling"]
    assert "independent draws" in sampling and "fit.summary()" in sampling
    assert dataset(means_fit().idata, "posterior").attrs["converged"] == 1


# --- ArviZ at work --------------------------------------------------------------------------------------------


RESULTS: dict[str, Any] = {
    "shared": lambda: regression_fit().idata,
    "client": lambda: regression_fit().client("clinic 0", draws=50),
    "predictions": lambda: grouped_fit().predict("town 6", {"X": np.ones(3), "group": [0, 1, 1]}, draws=50),
    "running": lambda: fedppl.fit(*problems.noise(), fedppl.EP(), rounds=1, progressbar=False, random_seed=1).idata,
}


@problems.few_rounds
@pytest.mark.parametrize("name", RESULTS)
def test_netcdf_round_trip(name: str, tmp_path: Path) -> None:
    result, path = RESULTS[name](), tmp_path / "result.nc"
    result.to_netcdf(str(path), engine="h5netcdf")
    back = az.from_netcdf(str(path), engine="h5netcdf")
    assert groups(back) == groups(result)
    for group in groups(result):
        ours, theirs = dataset(result, group), dataset(back, group).load()
        assert set(ours.variables) == set(theirs.variables)
        for variable in ours.variables:
            assert ours[variable].dims == theirs[variable].dims
            assert_array_equal(ours[variable].values, theirs[variable].values)
        assert {k: v for k, v in theirs.attrs.items() if k in ours.attrs}.keys() == ours.attrs.keys()
    back.close()


def test_summary_of_shared_and_client_posteriors() -> None:
    fit = regression_fit()
    mean = gaussian.mean(fit.posterior)
    summary = az.summary(fit.idata, var_names=["mu", "a"])
    assert list(summary.index) == ["mu[age]", "mu[dose]", "a"]
    # az.summary rounds to a few digits
    assert_allclose(summary["mean"].astype(float), mean, atol=0.02)
    assert list(az.summary(fit.client("clinic 0"), var_names=["beta"]).index) == ["beta[age]", "beta[dose]"]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")
def test_forest_plots_draw() -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    both = {client_id: regression_fit().client(client_id, draws=50) for client_id in ("clinic 0", "clinic 1")}
    if int(az.__version__.split(".")[0]) >= 1:
        figure = az.plot_forest(both, var_names=["beta"]).viz["figure"].item()
    else:
        axes = az.plot_forest(list(both.values()), model_names=list(both), var_names=["beta"], combined=True)
        figure = np.ravel(axes)[0].figure
    figure.canvas.draw()
    texts = " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))
    assert "age" in texts and "dose" in texts
    plt.close("all")


def test_the_record_of_a_fit_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    fit = regression_fit()
    fit.client("clinic 0", draws=5)
    fit.predict("clinic 0", {"X": np.ones((2, 2))}, draws=5)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""


def test_predicting_for_a_group_that_is_not_there_says_so() -> None:
    with pytest.raises(DataError, match="'town 6'.*points outside an array of the model: number groups 0 to n - 1"):
        grouped_fit().predict("town 6", {"X": np.ones(2), "group": np.array([0, 7])})


# --- the posterior without a client ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "pareto_k", "by_points", "exact"),
    [(0.02, 0.3, True, True), (0.06, 0.3, True, False), (0.06, 0.9, False, False)],
)
def test_moments_without_a_client_stand_beside_their_own_error(
    error: float, pareto_k: float, by_points: bool, exact: bool
) -> None:
    """Moments by points with a large error are told with it, and none where these are too few."""
    points, equal = np.zeros((400, 1)), np.full(400, 1 / 400)
    weighted = Reweighted(
        points,
        equal,
        equal,
        np.arange(400),
        np.ones(1),
        np.full((1, 1), 4.0),
        0.0,
        error,
        0.0,
        400.0,
        pareto_k,
        0.1,
        400,
    )
    others = WithoutClient(
        gaussian.from_moments(np.full(1, 7.0), np.full((1, 1), 9.0)), weighted, LogEvidence(0.0, 0.0)
    )
    mean, sd, _, used, shown = shared._moments(others, 1)
    assert (used, shared.is_exact(others)) == (by_points, exact)
    assert_allclose([*mean, *sd], [1.0, 2.0] if by_points else [np.nan, np.nan])
    assert_allclose(shown, error if by_points else np.nan)
