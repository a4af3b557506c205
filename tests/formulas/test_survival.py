"""Times until an event in formulas: densities of SciPy, right-censored or between two times, and PyMC's own model."""

from __future__ import annotations

import copy
import re
from typing import Any

import cloudpickle
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel
from fedppl.engine.guard import holdings
from fedppl.engine.policy import Holdings
from fedppl.formulas import families
from fedppl.formulas.families import FAMILIES, NEVER, Scales
from fedppl.model.interpreted import PYTHON_MODE
from tests.support.markers import slow_but
from tests.support.tables import AT, CUTS, FRAME, agreed, log_densities, rows

QUIET: Any = {"progressbar": False, "random_seed": 1}


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


@pytest.mark.parametrize("family", slow_but(AT, *(family for family in AT if family != "piecewise")))
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


@pytest.mark.parametrize(("low", "high", "eta", "sigma"), [(0, 1e-12, 0, 0.5), (0, 3, 10, 0.05), (1, 2, 10, 0.05)])
def test_intervals_far_below_the_median_have_their_density(low: float, high: float, eta: float, sigma: float) -> None:
    """There none has had an event, to all digits."""
    place = pt.dscalar()
    seen, until = (pt.constant(float(one)) for one in (low, high))
    value = families._between(families._lognormal_hazard(()), seen, place, pt.constant(sigma), seen, until)
    found, slope = pytensor.function([place], [value, pt.grad(value, place)], mode=PYTHON_MODE)(eta)
    with np.errstate(divide="ignore"):
        z = (np.log([low, high]) - eta) / sigma
    tails = stats.norm.logcdf(z)
    assert_allclose(found, tails[1] + np.log1p(-np.exp(tails[0] - tails[1])), rtol=1e-12)
    step = 1e-5
    ends = [stats.norm.logcdf((np.log(high) - eta - h) / sigma) for h in (step, -step)]
    assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_unit_of_times_moves_the_intercept_alone(scale: float) -> None:
    frame = FRAME.assign(time=FRAME["time"] * scale)
    told = [agreed("Surv(time, event) ~ age", "lognormal", data).describe()["prior"] for data in (FRAME, frame)]
    before, after = (float(re.search(r"mu=([-.\d]+)", one["Intercept"])[1]) for one in told)  # type: ignore[index]
    assert_allclose(after - before, np.log(scale), atol=0.1)  # of three digits


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
    values = {"Intercept": -1.2, "age": 0.02, **AT[family]}
    fixed = pm.do(built, {name: np.asarray(value, dtype=float) for name, value in values.items()})
    drawn = pm.draw(fixed["time"], random_seed=1, mode=PYTHON_MODE)
    held, free = drawn[:1500], drawn[1500:]
    eta = np.full(1500, -1.2 + 0.02 * 50)
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


@pytest.mark.slow  # two fits
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
    assert list(ours.index) == ["Intercept", "age", "arm[none]", "site_sd", "alpha"]
    # The same density, up to how effects within a client are declared: θ is integrated out by quadrature.
    assert_allclose((ours["mean"].to_numpy() - theirs["mean"].to_numpy()) / ours["sd"], 0.0, atol=0.1)
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


@pytest.mark.parametrize(
    ("text", "changes", "told"),
    [
        ("Surv(time, event) ~ age", {"time": 0.0}, "'time' is 0 in row 0, and times are above 0"),
        ("Surv(time, event) ~ age", {"event": 2}, "'event' is 2 in row 0, and events are 1, or 0"),
        ("Surv(time, event) ~ age", {"event": "yes"}, "'event' has texts"),
        ('Surv(low, high, "interval") ~ age', {"low": 9.0, "high": 8.0}, "'high' is 8 in row 0, .* not below 'low'"),
        ('Surv(low, high, "interval") ~ age', {"low": -1.0}, "'low' is -1 in row 0"),
        ('Surv(low, high, "interval") ~ age', {"low": 0.0, "high": np.inf}, "'high' is inf in row 0, .* no info"),
    ],
)
def test_times_that_cannot_be_name_the_row_and_the_client(text: str, changes: Any, told: str) -> None:
    with pytest.raises(DataError, match=f"client 's1': {told}"):
        agreed(text, "weibull").read("s1", rows("s1").assign(**changes))


@pytest.mark.parametrize("weights", [pytest.param(None, marks=pytest.mark.slow), "n"])
def test_the_owner_s_policy_sees_events(weights: str | None) -> None:
    data = rows("s1")
    for text, family, events in (
        ("Surv(time, event) ~ age", "weibull", data["event"].sum()),
        ("prop(healed, of) ~ age", "binomial", min(data["healed"].sum(), (data["of"] - data["healed"]).sum())),
        ("kind ~ age", "categorical", data["kind"].value_counts().min()),
        ("kind ~ age", "ordinal", data["kind"].value_counts().min()),
        ('Surv(low, high, "interval") ~ age', "weibull", np.isfinite(data["high"]).sum()),
    ):
        client = agreed(text, family, weights=weights).enrol({"s1": data}, kernel=False)["s1"]
        assert holdings(client) == Holdings(len(data), events)


def test_no_times_at_all_are_refused() -> None:
    with pytest.raises(DeclarationError, match="at="):
        agreed("Surv(time, event) ~ age", "weibull").builder.expected({}, {}, at=[])


def test_never_is_beyond_all_times() -> None:
    held = agreed("Surv(time, event) ~ age", "weibull").read("s1", rows("s1"))
    assert np.all((held["limit"] == NEVER) == (rows("s1")["event"] == 1)) and np.isfinite(NEVER)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: cloudpickle.loads(cloudpickle.dumps(model))])
def test_a_copied_formula_reads_the_same_arrays(copied: Any) -> None:
    """Kinds of outcomes are compared by identity: a copy has the constants themselves."""
    frame = pd.DataFrame({"site": ["a", "a", "b", "b"], "t": [1.0, 2.0, 3.0, 4.0], "e": [1, 0, 1, 1]})
    model = fedppl.agree(fedppl.formula("Surv(t, e) ~ 1 + (1 | site)", "exponential"), frame, by="site").model
    ours, theirs = (one.read("a", frame.iloc[:2]) for one in (model, copied(model)))
    assert sorted(ours) == sorted(theirs) and "limit" in ours
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value)


def test_times_are_checked_by_their_curve() -> None:
    """A picture of times until an event is of the probability of no event, not of times that censoring cut off."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"site": np.repeat(["a", "b", "c"], 20), "t": rng.exponential(2.0, 60)})
    frame["e"] = rng.random(60) < 0.7
    model = fedppl.formula("Surv(t, e) ~ 1 + (1 | site)", "exponential")
    axes = fedppl.plots.check(fedppl.fit(model, frame, by="site", **QUIET), draws=100, random_seed=1)
    assert axes[1].get_xlabel().startswith("P(no event)")
    plt.close("all")
