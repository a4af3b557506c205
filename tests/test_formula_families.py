"""Families of formulas beyond one column of numbers: times, levels, weights; predictions, words, and averages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import expit, log_softmax

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel, Prior
from fedppl.formulas.families import FAMILIES
from fedppl.formulas.family import Scales
from fedppl.formulas.survival import NEVER
from fedppl.model._graph import PYTHON_MODE
from fedppl.results import idata
from fedppl.results.predict import predictions

QUIET: Any = {"progressbar": False, "random_seed": 1}
CUTS = (1.5, 4.0)
AT: dict[str, dict[str, Any]] = {
    "exponential": {},
    "weibull": {"alpha": 1.7},
    "lognormal": {"sigma": 0.8},
    "loglogistic": {"alpha": 2.3},
    "piecewise": {"piece": np.array([0.4, -0.6])},
}


def table() -> pd.DataFrame:
    """Times, limits and levels at four sites."""
    rng, parts = np.random.default_rng(1), []
    for k in range(4):
        n = 16 + 6 * k
        age, arm = rng.normal(50, 8, size=n), rng.choice(["drug", "none"], size=n)
        time = np.exp(1 + 0.3 * rng.normal() + 0.05 * (age - 50) - 0.6 * (arm == "none")) * rng.weibull(1.5, size=n)
        limit = rng.uniform(1, 12, size=n)
        logits = np.stack([np.zeros(n), 0.5 * (arm == "none"), 0.04 * (age - 50)], axis=1)
        kind = (logits + rng.gumbel(size=(n, 3))).argmax(axis=1)
        parts.append(
            pd.DataFrame(
                {
                    "site": f"s{k}",
                    "age": age,
                    "arm": arm,
                    "ward": rng.choice(["u", "v"], size=n),
                    "time": np.minimum(time, limit),
                    "event": (time <= limit).astype(int),
                    "low": np.minimum(np.floor(time), 8.0),
                    "high": np.where(time >= 8.0, np.inf, np.floor(time) + 1),
                    "kind": np.array(["home", "ward", "death"])[kind],
                    "n": rng.integers(1, 4, size=n),
                    "y": 0.1 * age + rng.normal() + rng.normal(size=n),
                    "of": 9,
                }
            )
        )
    frame = pd.concat(parts, ignore_index=True)
    frame["healed"] = np.random.default_rng(2).integers(0, 10, size=len(frame))
    return frame.assign(died=frame["event"], share=expit(frame["y"] - 5), cost=frame["time"], cases=frame["healed"])


FRAME = table()
RESPONSES = {
    "gaussian": "y",
    "student": "y",
    "bernoulli": "died",
    "binomial": "prop(healed, of)",
    "poisson": "cases",
    "negativebinomial": "cases",
    "gamma": "cost",
    "beta": "share",
    "ordinal": "kind",
    "categorical": "kind",
} | dict.fromkeys(AT, "Surv(time, event)")


def agreed(text: str, family: str, frame: pd.DataFrame = FRAME, **keywords: Any) -> FederatedModel:
    if family == "piecewise":
        keywords = {"constants": {"cuts": CUTS}, **keywords}
    return fedppl.agree(fedppl.formula(text, family, **keywords), frame, by="site").model


def rows(site: str, frame: pd.DataFrame = FRAME) -> pd.DataFrame:
    return frame[frame["site"] == site].reset_index(drop=True)


def log_densities(model: FederatedModel, data: Any, values: dict[str, Any]) -> tuple[Any, Any]:
    """Of every row at values of the shared variables, with the gradient of their sum, interpreted."""
    built = model.builder(**model.read("s1", data))
    point = {}
    for value, rv in zip(built.value_vars, built.free_RVs, strict=True):
        transform, given = built.rvs_to_transforms[rv], np.asarray(values[rv.name], dtype=float)
        point[value.name] = given if transform is None else transform.forward(given, *rv.owner.inputs).eval()
    outcome = built.observed_RVs
    density = built.compile_logp(vars=outcome, sum=False, mode=PYTHON_MODE)(point)[0]
    return density, built.compile_dlogp(mode=PYTHON_MODE)(point)


# --- times ------------------------------------------------------------------------------------------------------


def survivors(family: str, t: Any, eta: Any) -> tuple[Any, Any]:
    """Log survival function and log density by SciPy; of a hazard in pieces by sums."""
    scale = np.exp(eta)
    if family == "piecewise":
        rates = np.exp(np.array([0.0, 0.4, -0.6])) * np.exp(eta)[:, None]
        starts, ends = np.array([0.0, *CUTS]), np.array([*CUTS, np.inf])
        reached = sum(rates[:, j] * np.clip(t - starts[j], 0, ends[j] - starts[j]) for j in range(3))
        place = np.searchsorted(CUTS, np.broadcast_to(t, eta.shape))
        return -reached, np.log(rates[np.arange(len(eta)), place]) - reached
    found = {
        "exponential": lambda: stats.expon(scale=scale),
        "weibull": lambda: stats.weibull_min(1.7, scale=scale),
        "lognormal": lambda: stats.lognorm(0.8, scale=scale),
        "loglogistic": lambda: stats.fisk(2.3, scale=scale),
    }[family]()
    return found.logsf(t), found.logpdf(t)


@pytest.mark.parametrize("family", AT)
def test_times_have_the_density_that_scipy_has(family: str) -> None:
    data = rows("s1")
    values = {"Intercept": 0.4, "age": 0.02, **AT[family]}
    eta = 0.4 + 0.02 * data["age"].to_numpy()
    found, slopes = log_densities(agreed("Surv(time, event) ~ age", family), data, values)
    upper, density = survivors(family, data["time"].to_numpy(), eta)
    assert 0 < data["event"].sum() < len(data)
    assert_allclose(found, np.where(data["event"] == 1, density, upper), rtol=1e-10)
    assert np.all(np.isfinite(slopes))


@pytest.mark.parametrize("family", AT)
def test_times_between_two_are_differences_of_survival(family: str) -> None:
    data = rows("s1")
    data.loc[3, ["low", "high"]] = [2.5, 2.5]  # known to the day
    low, high = data["low"].to_numpy(), data["high"].to_numpy()
    assert np.any(low == 0) and np.any(np.isinf(high))
    frame = pd.concat([FRAME[FRAME["site"] != "s1"], data])
    values = {"Intercept": 0.4, "age": 0.02, **AT[family]}
    eta = 0.4 + 0.02 * data["age"].to_numpy()
    found, slopes = log_densities(agreed('Surv(low, high, "interval") ~ age', family, frame), data, values)
    ends = np.where(np.isinf(high), 1.0, high)
    alive = np.exp(survivors(family, low, eta)[0]) - np.where(
        np.isinf(high), 0, np.exp(survivors(family, ends, eta)[0])
    )
    exact = survivors(family, np.full(len(data), 2.5), eta)[1]
    assert_allclose(found, np.where(low == high, exact, np.log(np.where(low == high, 1.0, alive))), rtol=1e-9)
    assert np.all(np.isfinite(slopes))


def test_narrow_and_far_intervals_keep_their_digits() -> None:
    data = rows("s1").assign(low=10.0, high=10.0 + 1e-9)
    data.loc[0, ["low", "high"]] = [400.0, 401.0]  # S is far below the smallest number there
    found, slopes = log_densities(
        agreed('Surv(low, high, "interval") ~ 1', "weibull", FRAME), data, {"Intercept": 1.0, "alpha": 1.7}
    )
    one = stats.weibull_min(1.7, scale=np.e)
    assert_allclose(found[1:], one.logpdf(10.0) + np.log(1e-9), rtol=1e-7)
    assert_allclose(found[0], one.logsf(400.0) + np.log1p(-np.exp(one.logsf(401.0) - one.logsf(400.0))), rtol=1e-12)
    assert np.all(np.isfinite(slopes))


@pytest.mark.parametrize("family", AT)
def test_medians_and_survival_are_those_of_the_density(family: str) -> None:
    eta, scales = np.array([-0.5, 0.2, 1.1]), Scales(1.0, 1.0, (), CUTS if family == "piecewise" else ())
    parameters = {name: np.asarray(value)[None, None] for name, value in AT[family].items()}
    parameters = {name: value if value.ndim == 3 else value.reshape(1, 1) for name, value in parameters.items()}
    median = FAMILIES[family].mean(eta[None], parameters, scales, None)[0]
    assert_allclose(survivors(family, median, eta)[0], np.log(0.5), rtol=1e-10)
    beyond = FAMILIES[family].mean(eta[None], parameters, scales, 2.0)[0]
    assert_allclose(np.log(beyond), survivors(family, 2.0, eta)[0], rtol=1e-10)


@pytest.mark.parametrize("family", AT)
def test_draws_are_of_the_density_and_end_at_limits(family: str) -> None:
    data = pd.DataFrame({"age": 50.0, "time": np.repeat([2.0, 3.0], 1500), "event": np.repeat([0, 1], 1500)})
    model = agreed("Surv(time, event) ~ age", family)
    built = model.builder(**model.read("s1", data))
    values = {"Intercept": 0.4, "age": 0.02, **AT[family]}
    fixed = pm.do(built, {name: np.asarray(value, dtype=float) for name, value in values.items()})
    drawn = pm.draw(fixed["time"], random_seed=1, mode=PYTHON_MODE)
    held, free = drawn[:1500], drawn[1500:]
    eta = np.full(1500, 0.4 + 0.02 * 50)
    assert np.max(held) == 2.0 and np.mean(held == 2.0) == pytest.approx(
        np.exp(survivors(family, 2.0, eta)[0][0]), abs=4 * 0.5 / np.sqrt(1500)
    )
    uniform = np.exp(survivors(family, np.sort(free), eta)[0])
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3


def test_draws_between_times_are_where_they_would_be_seen() -> None:
    data = pd.DataFrame({"low": [0.0, 1.0, 3.0], "high": [2.0, 2.5, np.inf]}).loc[np.repeat([0, 1, 2], 1000)]
    model = agreed('Surv(low, high, "interval") ~ 1', "exponential")
    built = pm.do(model.builder(**model.read("s1", data)), {"Intercept": np.array(0.5)})
    drawn = pm.draw(built["low"], random_seed=1, mode=PYTHON_MODE).reshape(3, 1000)
    beyond = np.exp(-np.array([2.0, 1.0, 2.5, 3.0]) * np.exp(-0.5))
    shares = [
        np.mean(drawn[0] == 2.0),
        1 - np.mean(drawn[1] == 0.0),
        np.mean(drawn[1] == 2.5),
        np.mean(drawn[2] == 3.0),
    ]
    assert_allclose(shares, beyond, atol=4 * 0.5 / np.sqrt(1000))
    assert set(drawn[2]) == {0.0, 3.0}


def by_hand(age: Any, none: Any, time: Any, limit: Any) -> pm.Model:
    """What `Surv(time, event) ~ age + arm + (1 | site)` declares, by PyMC's own Weibull and its censoring."""
    with pm.Model() as model:
        age, none = pm.Data("age", age), pm.Data("none", none)
        b_age, b_arm = pm.Normal("age_", 0, SCALES[0]), pm.Normal("arm_", 0, SCALES[1])
        intercept = pm.Normal("intercept", np.log(FRAME["time"].mean()) - CENTER[0] * b_age - CENTER[1] * b_arm, 2.5)
        sd, alpha = pm.HalfNormal("sd", 1.0), pm.Gamma("alpha", 2.0, 1.0)
        site = pm.Normal("site", 0, sd)
        scale = pt.exp(intercept + b_age * age + b_arm * none + site)
        held = pm.Data("limit", limit)
        pm.Censored("t", pm.Weibull.dist(alpha, scale), None, held, observed=pm.Data("time", time))
    return model


CENTER, SCALES = np.zeros(2), np.ones(2)


@pytest.fixture(scope="module")
def weibull() -> Any:
    model = fedppl.formula("Surv(time, event) ~ age + arm + (1 | site)", "weibull")
    return fedppl.fit(model, FRAME, by="site", **QUIET)


def test_a_fit_of_times_is_that_of_the_model_by_hand(weibull: Any) -> None:
    global CENTER, SCALES
    design = weibull.declaration.builder.design
    CENTER, SCALES = design.center, 2.5 / design.scale
    clients = {
        site: {
            "age": one["age"].to_numpy(),
            "none": (one["arm"] == "none").to_numpy(float),
            "time": one["time"].to_numpy(),
            "limit": np.where(one["event"] == 1, np.inf, one["time"]),
        }
        for site, one in FRAME.groupby("site")
    }
    hand = fedppl.fit(FederatedModel(by_hand, ["intercept", "age_", "arm_", "sd", "alpha"]), clients, **QUIET)
    ours, theirs = weibull.summary(), hand.summary()
    assert list(ours.index) == ["Intercept", "age", "arm", "site_sd", "alpha"]
    # The same density, up to how effects within a client are declared: θ is integrated out by quadrature.
    assert_allclose(ours["mean"], theirs["mean"], atol=0.05 * ours["sd"].to_numpy().max())
    assert_allclose(ours["sd"], theirs["sd"], rtol=0.1)


def test_a_fit_of_times_has_evidence_rows_and_predictions(weibull: Any) -> None:
    assert weibull.log_evidence.error < 0.1
    new = rows("s1")[["age", "arm"]]
    found = weibull.predict("s1", new, draws=50)["predictions"]["time"]
    assert found.shape == (4, 50, len(new)) and float(found.max()) > rows("s1")["time"].max()
    # Of rows with their outcomes too the time is predicted, not when it would be seen.
    again = weibull.predict("s1", rows("s1"), draws=50)["predictions"]["time"]
    np.testing.assert_array_equal(found, again)
    drawn = weibull.client("s1", groups=["log_likelihood"], draws=50)
    assert drawn["log_likelihood"]["time"].shape == (4, 50, len(new))


# --- levels and weights -----------------------------------------------------------------------------------------


def test_levels_have_coefficients_by_column_and_level() -> None:
    model = agreed("kind ~ age + arm", "categorical", levels={"kind": ["home", "ward", "death"]})
    data = rows("s2")
    values = {"Intercept": [0.3, -0.2], "age": [0.01, 0.02], "arm": [0.5, -0.7]}
    found, slopes = log_densities(model, data, values)
    none = (data["arm"] == "none").to_numpy(float)
    eta = [np.asarray(values["Intercept"]) + np.outer(data["age"], values["age"]) + np.outer(none, values["arm"])][0]
    log_p = log_softmax(np.column_stack([np.zeros(len(data)), eta]), axis=1)
    place = data["kind"].map({"home": 0, "ward": 1, "death": 2}).to_numpy()
    assert_allclose(found, log_p[np.arange(len(data)), place], rtol=1e-10)
    assert np.all(np.isfinite(slopes))
    built = model.builder(**model.read("s2", data))
    assert built.named_vars_to_dims["age"] == ("kind_level",) and built.coords["kind_level"] == ("ward", "death")


@pytest.mark.parametrize(("text", "family"), [("cases ~ age", "poisson"), ("Surv(time, event) ~ age", "weibull")])
def test_a_weight_counts_rows(text: str, family: str) -> None:
    data, values = rows("s1"), {"Intercept": 0.4, "age": 0.02, "alpha": 1.7}
    once, _ = log_densities(agreed(text, family), data, values)
    model = agreed(text, family, weights="n")
    found, _ = log_densities(model, data, values)
    assert_allclose(found, data["n"] * once, rtol=1e-12)
    drawn = pm.draw(model.builder(**model.read("s1", data)).observed_RVs[0], random_seed=1, mode=PYTHON_MODE)
    assert drawn.shape == (len(data),)
    with pytest.raises(DataError, match="client 's1': the weight 'n' is 0 in row 0"):
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
        point[built.rvs_to_values[built["threshold"]].name] = transform.forward(at["threshold"]).eval()
        found.append(built.compile_logp(vars=[built["threshold"]], mode=PYTHON_MODE)(point))
    assert_allclose(found[0], found[1], rtol=1e-8)


# --- predictions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_predicts_at_new_rows(family: str) -> None:
    model = agreed(f"{RESPONSES[family]} ~ age * arm + (1 + age | site) + (1 | site/ward)", family, weights="n")
    client = model.enrol({"s1": rows("s1")}, kernel=False)["s1"]
    with client.pymc_model() as built:
        free = [rv.name for rv in built.free_RVs]
        drawn = pm.draw([built[name] for name in free], 3, random_seed=1, mode=PYTHON_MODE)
        posterior = idata.posterior_dataset({k: v[None] for k, v in zip(free, drawn, strict=True)}, {}, {}, {})
    new = pd.DataFrame({"age": [40.0, 60.0, 50.0], "arm": ["drug", "none", "drug"], "ward": ["v", "v", "u"], "of": 5})
    read = model.read_new("s1", new, client.arrays)
    known = np.unique(rows("s1")["ward"], return_inverse=True)
    assert read["row_1"].tolist() == [1, 1, 0] and known[0].tolist() == ["u", "v"]
    found, _ = predictions(client, posterior, read, 1, {})
    name = model.builder.terms.response.columns[0]
    assert found[name].shape == (1, 3, 3) and np.all(np.isfinite(found[name]))
    with pytest.raises(DataError, match="levels .*'other drug'"):
        model.read_new("s1", new.assign(arm="other drug"), client.arrays)
    with pytest.raises(DataError, match=r"groups \['w'\] of ward have no rows"):
        model.read_new("s1", new.assign(ward="w"), client.arrays)
    if family == "binomial":
        with pytest.raises(DataError, match="'of', the numbers of trials"):
            model.read_new("s1", new.drop(columns="of"), client.arrays)


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
    assert "LKJ(eta=2)" in found.loc["site_covariance", "prior"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_that_is_described_is_one_for_priors(family: str) -> None:
    text = f"{RESPONSES[family]} ~ age + (1 + age | site)"
    found = agreed(text, family).describe()
    assert found["prior"].notna().all() and found["meaning"].notna().all()
    for name in found.index:
        model = agreed(text, family, priors={name: Prior("Normal", mu=0.25, sigma=0.5)})
        assert "mu=0.25" in model.describe().loc[name, "prior"]


def test_any_declaration_says_what_it_shares() -> None:
    def builder(y: Any) -> pm.Model:
        with pm.Model(coords={"of": ["a", "b"]}) as model:
            mu = pm.Normal("mu", 1, 10, dims="of")
            pm.Normal("y_", mu[0], pm.HalfNormal("s", 2.5), observed=pm.Data("y", y))
        return model

    model = FederatedModel(builder, ["mu", "s"])
    found = model.describe({"y": np.ones(3)})
    assert found.loc["mu", "entries"] == ("a", "b") and found.loc["mu", "prior"] == "Normal(1, 10)"
    assert found.loc["s", "entries"] is None and "2.5" in found.loc["s", "prior"]
    with pytest.raises(DeclarationError, match="pass one client's data"):
        model.describe()


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "family", "keywords", "told"),
    [
        ("Surv(time) ~ age", "weibull", {}, "2 columns"),
        ('Surv(low, high, "left") ~ age', "weibull", {}, '"interval"'),
        ("time ~ age", "weibull", {}, r"Surv\(time, event\) or Surv"),
        ("Surv(time, event) ~ age", "gaussian", {}, "has a column for a response"),
        ("Surv(time, event) ~ age", "piecewise", {}, "constant between cut points"),
        ("Surv(time, event) ~ age", "piecewise", {"constants": {"cuts": [3, 2]}}, "times above 0 that rise"),
        ("Surv(time, event) ~ age", "piecewise", {"constants": {"cuts": 3}}, "times above 0 that rise"),
        ("kind ~ age + offset(y)", "categorical", {}, "several"),
        ("y ~ age", "gaussian", {"weights": 3}, "no name of a column"),
        ("y ~ age + y", "gaussian", {}, "both sides"),
        ("y ~ sigma", "gaussian", {}, "rename these columns"),
    ],
)
def test_declarations_that_cannot_be(text: str, family: str, keywords: Any, told: str) -> None:
    with pytest.raises(DeclarationError, match=told):
        fedppl.formula(text, family, **keywords)


@pytest.mark.parametrize(
    ("text", "changes", "told"),
    [
        ("Surv(time, event) ~ age", {"time": 0.0}, "'time' is 0 in row 0, and times are above 0"),
        ("Surv(time, event) ~ age", {"event": 2}, "'event' is 2 in row 0, and events are 1, or 0"),
        ("Surv(time, event) ~ age", {"event": "yes"}, "'event' has texts"),
        ('Surv(low, high, "interval") ~ age', {"low": 9.0, "high": 8.0}, "'high' is 8 after 9 in row 0"),
        ('Surv(low, high, "interval") ~ age', {"low": -1.0}, "'low' is -1 in row 0"),
        ('Surv(low, high, "interval") ~ age', {"low": 0.0, "high": np.inf}, "tells nothing"),
    ],
)
def test_times_that_cannot_be_name_the_row_and_the_client(text: str, changes: Any, told: str) -> None:
    with pytest.raises(DataError, match=f"client 's1': {told}"):
        agreed(text, "weibull").read("s1", rows("s1").assign(**changes))


def test_priors_of_names_that_levels_change_are_refused() -> None:
    model = fedppl.formula("y ~ age + (0 + arm | site)", priors={"site_sd": Prior("HalfNormal", sigma=1)})
    with pytest.raises(DeclarationError, match="site_covariance"):
        fedppl.agree(model, FRAME, by="site")


def test_never_is_beyond_all_times() -> None:
    held = agreed("Surv(time, event) ~ age", "weibull").read("s1", rows("s1"))
    assert np.all((held["limit"] == NEVER) == (rows("s1")["event"] == 1)) and np.isfinite(NEVER)
