"""Formulas: levels and weights, predictions of every family, what a model says of itself, and averages over rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import expit, log_softmax

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel, Prior
from fedppl.engine.guard import holdings
from fedppl.formulas import predictor
from fedppl.formulas.families import FAMILIES, LEVEL, _draw_level, _log_level
from fedppl.formulas.predictor import at_levels, rows_of, slope
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.results import idata
from fedppl.results.predicting import predictions
from tests.support.markers import slow_but
from tests.support.tables import FRAME, RESPONSES, agreed, log_densities, rows

QUIET: Any = {"progressbar": False, "random_seed": 1}

# --- levels and weights -----------------------------------------------------------------------------------------


def test_levels_have_coefficients_by_column_and_level() -> None:
    model = agreed("kind ~ age + arm", "categorical", levels={"kind": ["home", "ward", "death"]})
    data = rows("s2")
    values: Any = {"Intercept": [0.3, -0.2], "age": [0.01, 0.02], "arm": [[0.5, -0.7]]}
    found, slopes = log_densities(model, data, values)
    none = (data["arm"] == "none").to_numpy(float)
    eta = np.asarray(values["Intercept"]) + np.outer(data["age"], values["age"]) + np.outer(none, values["arm"])
    log_p = log_softmax(np.column_stack([np.zeros(len(data)), eta]), axis=1)
    place = data["kind"].map({"home": 0, "ward": 1, "death": 2}).to_numpy()
    assert_allclose(found, log_p[np.arange(len(data)), place], rtol=1e-10)
    assert np.all(np.isfinite(slopes))
    built = model.builder(**model.read("s2", data))
    assert built.named_vars_to_dims["arm"] == ("arm_dim", "kind_level") and built.coords["kind_level"] == (
        "ward",
        "death",
    )


@pytest.mark.parametrize(("text", "family"), [("cases ~ age", "poisson"), ("Surv(time, event) ~ age", "weibull")])
def test_a_weight_counts_rows(text: str, family: str) -> None:
    data, values = rows("s1"), {"Intercept": 0.4, "age": 0.02, "alpha": 1.7}
    once, _ = log_densities(agreed(text, family), data, values)
    model = agreed(text, family, weights="n")
    found, _ = log_densities(model, data, values)
    assert_allclose(found, data["n"] * once, rtol=1e-12)
    drawn = pm.draw(model.builder(**model.read("s1", data)).observed_RVs[0], random_seed=1, mode=PYTHON_MODE)
    assert drawn.shape == (len(data),)
    with pytest.raises(DataError, match="client 's1': 'n' is 0 in row 0, and weights"):
        model.read("s1", data.assign(n=0))


def test_thresholds_are_expected_where_columns_are_at_their_means() -> None:
    here, far = agreed("kind ~ age", "ordinal"), agreed("kind ~ age", "ordinal", FRAME.assign(age=FRAME["age"] + 2000))
    values = {"age": 0.02, "threshold": np.array([0.4, 1.9])}
    shifted = {**values, "threshold": values["threshold"] + 0.02 * 2000}
    found = []
    for model, at in ((here, values), (far, shifted)):
        built = model.builder(**model.read("s1", rows("s1", FRAME)))
        point = {"age": np.array(at["age"])}
        transform = built.rvs_to_transforms[built["threshold"]]
        point[built.rvs_to_values[built["threshold"]].name] = transform.forward(at["threshold"]).eval(mode=PYTHON_MODE)
        found.append(built.compile_logp(vars=[built["threshold"]], mode=PYTHON_MODE)(point))
    assert_allclose(found[0], found[1], rtol=1e-8)


# --- predictions ------------------------------------------------------------------------------------------------


QUICK = ("binomial", "categorical", "weibull")  # with trials, several predictors, limits
PREDICTED = slow_but(FAMILIES, *QUICK)


def test_levels_far_from_their_thresholds_keep_their_log_probability() -> None:
    """log P of each level against differences of logistic tails; 800 logits away, where P itself is 0, too."""
    cuts, eta = np.array([-1.0, 0.5, 2.0]), np.array([-800.0, -3.0, 0.2, 4.0, 800.0])
    value = np.repeat(np.arange(4), len(eta))
    given = np.tile(eta, 4)
    found = _log_level(pt.as_tensor(value), pt.as_tensor(given), pt.as_tensor(cuts)).eval(mode=PYTHON_MODE)
    edges = np.array([-np.inf, *cuts, np.inf])
    low, high = edges[value] - given, edges[value + 1] - given
    flip = low > 0  # differences of the tail that is small
    low, high = np.where(flip, -high, low), np.where(flip, -low, high)
    with np.errstate(divide="ignore"):
        exact = stats.logistic.logcdf(high) + np.log(
            -np.expm1(stats.logistic.logcdf(low) - stats.logistic.logcdf(high))
        )
    assert np.all(np.isfinite(found))
    assert_allclose(found, exact, rtol=1e-9, atol=1e-12)


def test_ordinal_draws_have_their_probabilities_and_count_as_levels(rng: np.random.Generator) -> None:
    cuts, eta = np.array([-1.0, 0.5, 2.0]), np.array([-0.5, 1.5])
    draws = _draw_level(eta, cuts, rng=rng, size=(20_000, 2))
    expected = np.diff(np.concatenate([np.zeros((2, 1)), expit(cuts - eta[:, None]), np.ones((2, 1))], axis=1), axis=1)
    shares = np.stack([np.bincount(draws[:, k], minlength=4) for k in range(2)]) / 20_000
    assert np.all(np.abs(shares - expected) < 4 * np.sqrt(expected * (1 - expected) / 20_000))
    for weights in (None, "w"):  # a policy counts the rarest level
        formula = fedppl.formula("kind ~ age", "ordinal", levels={"kind": ["home", "ward", "death"]}, weights=weights)
        model = fedppl.agree(formula, FRAME.assign(w=2.0), by="site").model
        table = rows("s2").assign(w=2.0)
        client = model.enrol({"s2": model.read("s2", table, None)}, kernel=False)["s2"]
        assert holdings(client).events == table["kind"].value_counts().min()


@pytest.mark.parametrize("family", PREDICTED)
def test_every_family_predicts_at_new_rows(family: str) -> None:
    model = agreed(f"{RESPONSES[family]} ~ age * arm + (1 | site/ward)", family, weights="n")
    client = model.enrol({"s1": rows("s1")}, kernel=False)["s1"]
    with client.pymc_model() as built:
        free = [rv.name for rv in built.free_RVs]
        drawn = pm.draw([built[name] for name in free], 3, random_seed=1, mode=PYTHON_MODE)
        posterior = idata.posterior_dataset({k: v[None] for k, v in zip(free, drawn, strict=True)}, {}, {}, {})
    new = pd.DataFrame({"age": [40.0, 60.0, 50.0], "arm": ["drug", "none", "drug"], "ward": ["v", "v", "u"], "of": 5})
    read = model.read_new("s1", new, client.arrays, client.declared.kind)
    known = np.unique(rows("s1")["ward"], return_inverse=True)
    assert read["row_1"].tolist() == [1, 1, 0] and known[0].tolist() == ["u", "v"]
    found, _ = predictions(client, posterior, read, 1)
    name = model.builder.terms.response.columns[0]
    assert found[name].shape == (1, 3, 3) and np.all(np.isfinite(found[name]))
    several = model.builder.family.outcome is LEVEL
    assert found[name].attrs.get("levels") == (sorted(map(str, set(FRAME[name]))) if several else None)
    with pytest.raises(DataError, match="levels .*'other drug'"):
        model.read_new("s1", new.assign(arm="other drug"), client.arrays, client.declared.kind)
    with pytest.raises(DataError, match=r"groups \['w'\] of ward have no rows"):
        model.read_new("s1", new.assign(ward="w"), client.arrays, client.declared.kind)
    if family == "binomial":
        with pytest.raises(DataError, match=r"lacks the columns \['of'\]"):
            model.read_new("s1", new.drop(columns="of"), client.arrays, client.declared.kind)


def test_columns_may_be_called_what_arrays_are() -> None:
    frame = FRAME.rename(columns={"y": "outcome", "age": "common"})
    model = agreed("outcome ~ common + (1 | site)", "gaussian", frame)
    client = model.enrol({"s1": rows("s1", frame)}, kernel=False)["s1"]
    assert {"outcome_of_rows", "common_of_rows"} <= set(client.arrays)
    assert model.shared[1] == "common" and client.pymc_model().observed_RVs[0].name == "outcome"


# --- words ------------------------------------------------------------------------------------------------------


def test_a_model_says_what_it_shares() -> None:
    model = fedppl.formula(
        "kind ~ age + arm + (1 | site)",
        "categorical",
        levels={"kind": ["home", "ward", "death"]},
        priors={"arm": Prior("Laplace", mu=0, b=1)},
    )
    before = model.describe()
    assert list(before.index) == list(model.shared) and "agree" in before.loc["age", "prior"]
    found = fedppl.agree(model, FRAME, by="site").model.describe()
    assert found.loc["arm", "prior"] == "Laplace(mu=0, b=1)"
    assert found.loc["arm", "entries"] == ("none, ward", "none, death")
    assert found.loc["arm", "reference"] == "drug, kind=home"
    assert found.loc["Intercept", "prior"] == "Normal(mu=0, sigma=2.5) where columns are at their means"
    assert found.loc["age", "prior"] == f"Normal(mu=0, sigma={2.5 / np.std(FRAME['age']):.3g})"
    assert found.loc["site_partial", "prior"].startswith("Beta(") and "LKJ(eta=2)" in found.loc["site_partial", "prior"]
    assert found.loc["site_partial", "entries"] == ("Intercept:ward, Intercept:death",)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_that_is_described_is_one_for_priors(family: str) -> None:
    text = f"{RESPONSES[family]} ~ age + (1 + age | site)"
    built = agreed(text, family).builder
    found = built.describe()
    assert found["prior"].notna().all() and found["meaning"].notna().all()
    for name in found.index:
        own = dataclasses.replace(built, priors={name: Prior("Normal", mu=0.25, sigma=0.5)})
        assert "mu=0.25" in own.describe().loc[name, "prior"]


def test_any_declaration_says_what_it_shares() -> None:
    def builder(y: Any) -> pm.Model:
        with pm.Model(coords={"of": ["a", "b"]}) as model:
            tau = pm.HalfNormal("tau", 1)
            pm.Normal("beta", np.array([0.0, 0.5]), pm.math.sqrt(tau), shape=2)
            mu = pm.Normal("mu", 1, 10, dims="of")
            pm.Normal("y_", mu[0], pm.HalfNormal("s", 2.5), observed=pm.Data("y", y))
        return model

    model = FederatedModel(builder, ["mu", "s", "tau", "beta"])
    found = model.describe({"y": np.ones(3)})
    assert found.loc["beta", "prior"] == "Normal([0. , 0.5], f(tau))"  # numbers beside a variable
    assert found.loc["mu", "entries"] == ("a", "b") and found.loc["mu", "prior"] == "Normal(1, 10)"
    assert found.loc["s", "entries"] is None and "2.5" in found.loc["s", "prior"]
    with pytest.raises(DeclarationError, match="pass one client's data"):
        model.describe()


# --- averages over rows -----------------------------------------------------------------------------------------


def draws_of(built: Any, count: int = 4) -> dict[str, Any]:
    rng, spec = np.random.default_rng(5), built.spec
    model = built(**built.read("s1", rows("s1")))
    names = [*built.shared, *(variable.name for variable in model.deterministics)]
    shapes = {name: model[name].shape.eval(mode=PYTHON_MODE) for name in names}
    del spec
    return {name: 0.3 * rng.normal(size=(count, *shape)) for name, shape in shapes.items()}


def test_averages_are_those_of_the_rows_one_by_one() -> None:
    built = agreed("died ~ age * arm + offset(share) + (1 + arm | site) + (1 | site/ward)", "bernoulli").builder
    data, draws = rows("s1"), draws_of(built)
    found = at_levels(built.spec, rows_of(built.spec, built.read("s1", data)), "arm", draws, None)
    assert list(found) == ["drug", "none", "none - drug"]
    age, ward = data["age"].to_numpy(), np.unique(data["ward"], return_inverse=True)[1]
    for s in range(4):
        site, of_ward = draws["site_effects"][s], draws["site_ward_effects"][s][:, 0]
        base = draws["Intercept"][s] + draws["age"][s] * age + data["share"].to_numpy() + site[0] + of_ward[ward]
        drug = expit(base).mean()
        none = expit(base + draws["arm"][s, 0] + draws["age:arm"][s, 0] * age + site[1]).mean()
        assert_allclose([found["drug"][s], found["none - drug"][s]], [drug, none - drug], rtol=1e-10)


def test_average_slopes_are_derivatives() -> None:
    built = agreed("cases ~ age + np.log(share) + (1 | site)", "poisson", weights="n").builder
    data, draws = rows("s1"), draws_of(built)
    draws["Intercept"] = draws["Intercept"] - draws["age"] * 50
    found = slope(built.spec, rows_of(built.spec, built.read("s1", data)), "share", draws, None)["slope"]
    share, age, n = (data[name].to_numpy() for name in ("share", "age", "n"))
    for s in range(4):
        eta = draws["Intercept"][s] + draws["age"][s] * age + draws["np.log(share)"][s] * np.log(share)
        exact = np.exp(eta + draws["site_effects"][s][0]) * draws["np.log(share)"][s] / share
        assert_allclose(found[s], np.average(exact, weights=n), rtol=1e-4)


def test_levels_have_a_probability_each() -> None:
    for family in ("categorical", "ordinal"):
        built = agreed("kind ~ age + arm + (1 + age | site)", family).builder
        draws = {name: np.sort(value) for name, value in draws_of(built).items()}
        found = at_levels(built.spec, rows_of(built.spec, built.read("s1", rows("s1"))), "arm", draws, None)
        assert found["drug"].shape == (4, 3)
        assert_allclose(found["drug"].sum(axis=1), 1.0, rtol=1e-12)
        assert_allclose(found["none - drug"].sum(axis=1), 0.0, atol=1e-12)


def test_truths_have_a_mean_each_and_a_difference() -> None:
    """On the identity link the difference is the coefficient."""
    frame = FRAME.assign(none=FRAME["arm"] == "none")
    truths = fedppl.fit(fedppl.formula("y ~ age + none"), frame, fedppl.EP(), by="site", **QUIET)
    table, told = fedppl.marginal_effects(truths, "none").loc["all"], truths.summary().loc["none"]
    assert list(table.index) == ["0", "1", "1 - 0"]
    mean, sd = table.loc["1 - 0", ["mean", "sd"]].astype(float)
    assert_allclose(mean, told["mean"], atol=4 * told["sd"] / np.sqrt(1000))  # of a thousand draws
    assert_allclose(sd, told["sd"], rtol=4 / np.sqrt(2 * 1000))
    assert_allclose(table.loc["1", "mean"] - table.loc["0", "mean"], table.loc["1 - 0", "mean"], rtol=1e-9)
    assert len(fedppl.marginal_effects(truths, "age", clients=["s0"]).loc["s0"]) == 1


def centred(age: Any, none: Any, y: Any) -> pm.Model:
    """What `y ~ age + arm + (1 | site)` declares, but for the effect, which is declared by its own distribution."""
    with pm.Model() as model:
        age, none = pm.Data("age", age), pm.Data("none", none)
        b_age, b_arm = pm.Normal("age_", 0, SCALES[0]), pm.Normal("arm_", 0, SCALES[1])
        mean = FRAME["y"].mean() - CENTER[0] * b_age - CENTER[1] * b_arm
        intercept = pm.Normal("intercept", mean, 2.5 * np.std(FRAME["y"]))
        sd, sigma = pm.HalfNormal("sd", np.std(FRAME["y"])), pm.HalfNormal("sigma_", 2 * np.std(FRAME["y"]))
        site = pm.Normal("site", 0, sd)
        mu = intercept + b_age * age + b_arm * none + site
        pm.Normal("y_", mu, sigma, observed=pm.Data("y", y))
    return model


CENTER, SCALES = np.zeros(2), np.ones(2)


@pytest.fixture(scope="module")
def fit() -> Any:
    return fedppl.fit(fedppl.formula("y ~ age + arm + (1 | site)"), FRAME, by="site", **QUIET)


def test_effects_on_a_mean_are_its_coefficients(fit: Any) -> None:
    told, found = fit.summary(), fedppl.marginal_effects(fit, "arm")
    assert found.index.names == ["client", "what"] and len(found) == 5 * 3
    for client in ("s0", "all"):
        row = found.loc[(client, "none - drug")]
        assert_allclose(
            [row["mean"], row["sd"]], told.loc["arm[none]", ["mean", "sd"]].astype(float), rtol=0.1, atol=0.02
        )
    row = fedppl.marginal_effects(fit, "age", clients=["s1", "s2"]).loc[("all", "slope")]
    assert_allclose([row["mean"], row["sd"]], told.loc["age", ["mean", "sd"]].astype(float), rtol=0.1, atol=0.002)
    with pytest.raises(DeclarationError, match="columns of .* are \\['age', 'arm'\\]"):
        fedppl.marginal_effects(fit, "ward")
    with pytest.raises(DeclarationError, match="is a time"):
        fedppl.marginal_effects(fit, "arm", at=3.0)
    alike = FRAME.assign(site=FRAME["site"].replace("s1", "all"))
    other = fedppl.fit(fedppl.formula("y ~ age"), alike, by="site", **QUIET)
    with pytest.raises(DeclarationError, match="named 'all'"):
        fedppl.marginal_effects(other, "age")
    assert set(fedppl.marginal_effects(other, "age", clients=["s0"]).index) == {("s0", "slope"), ("all", "slope")}
    for wrong in (["s9"], ["s1", "s1"], "s1s2", []):
        with pytest.raises(DeclarationError, match="name some of the fit's clients"):
            fedppl.marginal_effects(fit, "arm", clients=wrong)
    shares = FRAME["site"].value_counts(normalize=True)
    means = [found.loc[(site, "drug"), "mean"] * share for site, share in shares.items()]
    assert_allclose(found.loc[("all", "drug"), "mean"], sum(means), rtol=1e-10)


@pytest.mark.slow  # two fits
def test_effects_are_integrated_out_whatever_variable_they_are_declared_by(fit: Any) -> None:
    global CENTER, SCALES
    design = fit.declaration.builder.design
    CENTER, SCALES = design.center, 2.5 * np.std(FRAME["y"]) / design.scale
    clients = {
        site: {"age": one["age"].to_numpy(), "none": (one["arm"] == "none").to_numpy(float), "y": one["y"].to_numpy()}
        for site, one in FRAME.groupby("site")
    }
    other = fedppl.fit(FederatedModel(centred, ["intercept", "age_", "arm_", "sd", "sigma_"]), clients, **QUIET)
    with pytest.raises(DeclarationError, match="fedppl.formula"):
        fedppl.marginal_effects(other, "arm")
    told, theirs = fit.summary(), other.summary()
    assert_allclose((told["mean"].to_numpy() - theirs["mean"].to_numpy()) / told["sd"], 0.0, atol=0.1)
    assert_allclose(told["sd"], theirs["sd"], rtol=0.1)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "family", "keywords", "told"),
    [
        ("Surv(time) ~ age", "weibull", {}, "2 columns"),
        ('Surv(low, high, "left") ~ age', "weibull", {}, '"interval"'),
        ("time ~ age", "weibull", {}, r"Surv\(time, event\) or Surv"),
        ("Surv(time, event) ~ age", "gaussian", {}, "has a column for a response"),
        ("Surv(time, event) ~ age", "piecewise", {}, "increasing times above 0"),
        ("Surv(time, event) ~ age", "piecewise", {"constants": {"cuts": [3, 2]}}, "increasing times above 0"),
        ("Surv(time, event) ~ age", "piecewise", {"constants": {"cuts": 3}}, "increasing times above 0"),
        ("kind ~ age + offset(y)", "categorical", {}, "several"),
        ("y ~ age", "gaussian", {"weights": 3}, "no name of a column"),
        ("y ~ age + y", "gaussian", {}, "both sides"),
        ("y ~ sigma", "gaussian", {}, "rename these columns"),
    ],
)
def test_declarations_that_cannot_be(text: str, family: str, keywords: Any, told: str) -> None:
    with pytest.raises(DeclarationError, match=told):
        fedppl.formula(text, family, **keywords)


def test_priors_of_effects_are_known_before_their_number_is() -> None:
    own = {"site_sd": Prior("Exponential", lam=2.0), "site_partial": Prior("Beta", alpha=3.0, beta=2.0)}
    built = fedppl.agree(fedppl.formula("y ~ age + (0 + arm | site)", priors=own), FRAME, by="site").model.builder
    told = built.describe()["prior"]
    assert (told["site_sd"], told["site_partial"]) == ("Exponential(lam=2)", "Beta(alpha=3, beta=2)")
    alone = fedppl.formula("y ~ age + (1 | site)", priors={"site_sd": own["site_sd"]})
    assert alone.shared == ("Intercept", "age", "site_sd", "sigma")
    with pytest.raises(DeclarationError, match="site_partial"):
        fedppl.formula("y ~ age + (1 | site)", priors=own)


@pytest.mark.parametrize(
    ("right", "name", "prior", "told"),
    [
        ("1 + age", "site_sd", Prior("HalfNormal", sigma=[1, 2, 3]), r"3 values of 'sigma'.*2 entries"),
        ("0 + arm", "site_sd", Prior("HalfNormal", sigma=[1, 2, 3]), r"3 values of 'sigma'.*2 entries"),
        ("1 + age", "site_partial", Prior("Beta", alpha=[2, 2], beta=2), r"2 values of 'alpha'.*1 entries"),
        ("1 + age", "age", Prior("Normal", mu=0, sigma=np.ones((3, 3))), r"shape \(3, 3\).*a list of 1"),
        ("1 + age", "site_partial", Prior("HalfNormal", sigma=1), "beyond 0 and 1.*Beta"),
        ("1 + age", "site_partial", Prior("Normal", mu=0, sigma=1), "beyond 0 and 1.*Beta"),
        ("1 + age", "site_partial", Prior("Uniform", lower=0, upper=2), "beyond 0 and 1.*Beta"),
    ],
)
def test_priors_that_effects_cannot_have_are_refused_before_the_fit(
    right: str, name: str, prior: Any, told: str
) -> None:
    with pytest.raises(DeclarationError, match=told):
        fedppl.agree(fedppl.formula(f"y ~ age + ({right} | site)", priors={name: prior}), FRAME, by="site")


def test_a_list_is_of_coefficients_and_not_of_levels() -> None:
    """PyMC would take it along the last dim, the outcome's levels."""
    own = {"arm": Prior("Normal", mu=[0.0, 5.0], sigma=0.01), "Intercept": Prior("Normal", mu=[1.0, 2.0], sigma=0.01)}
    text, levels = "kind ~ arm + (1 | site)", {"kind": ["home", "ward", "death"]}
    frame = FRAME.assign(arm=np.where(np.arange(len(FRAME)) % 5 == 0, "third", FRAME["arm"]))
    built = fedppl.agree(fedppl.formula(text, "categorical", levels=levels, priors=own), frame, by="site").model.builder
    drawn = pm.draw(
        built(**built.read("s1", frame[frame["site"] == "s1"]))["arm"], 20, random_seed=1, mode=PYTHON_MODE
    ).mean(axis=0)
    assert_allclose(drawn, [[0.0, 0.0], [5.0, 5.0]], atol=0.02)
    wrong = {"arm": Prior("Normal", mu=np.zeros((2, 3)))}
    with pytest.raises(DeclarationError, match=r"shape \(2, 3\).*ward.*death"):
        fedppl.agree(fedppl.formula(text, "categorical", levels=levels, priors=wrong), frame, by="site")


def test_shares_between_bounds_are_priors_of_partial_correlations() -> None:
    for prior in (Prior("Uniform", lower=0.2, upper=0.9), Prior("Uniform"), Prior("Uniform", lower=[0.1], upper=[0.9])):
        assert "site_partial" in fedppl.formula("y ~ age + (1 + age | site)", priors={"site_partial": prior}).shared
    sds = Prior("Uniform", lower=[0, 0], upper=[1, 2])
    assert "site_sd" in fedppl.formula("y ~ age + (1 + age | site)", priors={"site_sd": sds}).shared
    with pytest.raises(DeclarationError, match="site_partial"):
        Prior("LKJCorr", n=2, eta=2)


@pytest.mark.parametrize("taken", ["site_corr", "site_z", "site_effects", "site_partial"])
def test_columns_that_are_called_like_variables_are_to_be_renamed(taken: str) -> None:
    for text in (f"y ~ {taken} + (1 + age | site)", f"{taken} ~ age + (1 + age | site)"):
        with pytest.raises(DeclarationError, match="rename these columns"):
            fedppl.formula(text)
    if taken in ("site_corr", "site_partial"):  # nothing has that name where there is one effect
        assert taken in fedppl.formula(f"y ~ {taken} + (1 | site)").shared
        with pytest.raises(DeclarationError, match="rename these columns"):
            fedppl.formula(f"y ~ {taken} + (0 + arm | site)")


def test_columns_beyond_what_sums_tell_are_refused_with_the_remedy() -> None:
    for change, told in (({"age": FRAME["age"] * 1e200}, "another unit"), ({"age": FRAME["age"] + 1e12}, "subtract")):
        with pytest.raises(DataError, match=told):
            fedppl.agree(fedppl.formula("y ~ age + (1 | site)"), FRAME.assign(**change), by="site")


@pytest.mark.parametrize("count", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_correlations_from_partial_ones_are_lkj(count: int, rng: np.random.Generator) -> None:
    """det(R)^(η − 1), once the change of variables is counted."""
    pairs = np.tril_indices(count, -1)
    a = 2.0 + (count - 2 - pairs[1]) / 2
    x = pt.vector("x", shape=(len(a),))
    root = predictor._correlation_root(x, count)
    correlations = pt.stack([(root[i] * root[j]).sum() for i, j in zip(*pairs, strict=True)])
    jacobian = pt.stack([pytensor.grad(correlations[i], x) for i in range(len(a))])
    found = pytensor.function([x], [root, correlations, jacobian], mode=PYTHON_MODE)
    constants = []
    for partial in rng.uniform(0.05, 0.95, (20, len(a))):
        L, r, slopes = found(partial)
        R = L @ L.T
        assert_allclose(np.diag(R), 1.0, rtol=1e-12)
        assert_allclose(R[pairs], r, rtol=1e-12)
        log_beta = stats.beta(a, a).logpdf(partial).sum()
        constants.append(np.linalg.slogdet(R)[1] - (log_beta - np.linalg.slogdet(slopes)[1]))
    assert_allclose(constants, constants[0], atol=1e-9)
    right = {2: "1 + age", 3: "0 + arm + age", 4: "1 + arm + age + time"}[count]
    spec = agreed(f"y ~ age + ({right} | site)", "gaussian").builder.spec
    assert_allclose(spec.effects[0].partial.parameters["alpha"], a if count > 2 else a[0])
