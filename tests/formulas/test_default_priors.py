"""Default priors of a formula are on the data's scale, and no data of a family contradict them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy.special import logit

import fedppl
from fedppl import Prior
from fedppl.local import integrate
from fedppl.run.conflicts import Likelihood, contradicted
from tests.support.markers import slow_but
from tests.support.tables import FAMILIES, TIMES

_RNG = np.random.default_rng(12)
_N = 90
_FRAME = pd.DataFrame({"site": np.repeat(list("abc"), _N // 3), "x": _RNG.normal(size=_N)})
_ETA = 0.3 * _FRAME["x"].to_numpy()


def _agreed(family: str, y: Any, **more: Any) -> Any:
    frame = _FRAME.assign(y=y, event=1)
    constants = {"constants": {"cuts": [1.0]}} if family == "piecewise" else {}
    response = "Surv(y, event)" if FAMILIES[family].response == TIMES else "y"
    model = fedppl.formula(f"{response} ~ x", family, **constants, **more)
    return fedppl.agree(model, frame, by="site").model, frame


def _prior(family: str, y: Any, name: str) -> Any:
    spec = _agreed(family, y)[0].builder.spec
    return spec.family.priors(spec.scales)[name]


def test_precisions_are_about_what_mean_and_sd_say() -> None:
    """Medians: m²/s² of a gamma outcome; m²/(s² - m) of counts, at most 4 m²/s²; m(1 - m)/s² - 1 of shares."""
    positive = 1e-6 * _RNG.gamma(40.0, 1.0, _N)
    counts = _RNG.poisson(20.0 * _RNG.gamma(2.0, 0.5, _N))
    poisson = np.resize([99, 100, 101], _N)  # less than Poisson's variance
    shares = _RNG.beta(30.0, 3.0, _N)
    found = [_prior("gamma", positive, "alpha"), _prior("negativebinomial", counts, "alpha")]
    found += [_prior("negativebinomial", poisson, "alpha"), _prior("beta", shares, "kappa")]
    expected = [
        (positive.mean() / positive.std()) ** 2,
        counts.mean() ** 2 / (counts.var() - counts.mean()),
        4 * 100**2 / poisson.var(),
        shares.mean() * (1 - shares.mean()) / shares.var() - 1,
    ]
    assert all(one.name == "LogNormal" and one.parameters["sigma"] == 3.0 for one in found)
    assert_allclose([np.exp(one.parameters["mu"]) for one in found], expected)


def test_shares_have_an_intercept_about_the_logit_of_their_mean() -> None:
    shares = _RNG.beta(9990.0, 10.0, _N)
    table = _agreed("beta", shares)[0].describe()
    assert f"mu={logit(shares.mean()):.3g}" in table.loc["Intercept", "prior"]
    assert "mean of y" in table.loc["Intercept", "from"] and "sd of y" in table.loc["kappa", "from"]


def test_a_description_says_what_a_prior_comes_from() -> None:
    y = 5 + 2 * _RNG.normal(size=_N)
    frame = _FRAME.assign(y=y, arm=np.resize(["a", "b"], _N))
    model = fedppl.formula("y ~ x * arm + (1 + x | site)", priors={"x": Prior("Normal", mu=0, sigma=1)})
    told = fedppl.agree(model, frame, by="site").model.describe()["from"]
    sd = f"{y.std():.3g}"
    assert told["x"] == "priors=" and told["sigma"] == f"2 times sd of y ({sd})"
    assert told["arm"].startswith(f"2.5 times sd of y ({sd})") and "shares of levels" in told["arm"]
    assert "root mean square" in told["site_sd"] and "same for all" in told["site_partial"]
    assert f"mean of y ({y.mean():.3g})" in told["Intercept"]
    assert "same for all" in _agreed("weibull", np.exp(y))[0].describe().loc["alpha", "from"]


def said_of(clients: Mapping[str, Any], truth: list[float]) -> str:
    stacks, one = integrate.stacks(clients), next(iter(clients.values()))
    likelihood = Likelihood(
        functools.partial(integrate.log_density, stacks), functools.partial(integrate.slopes, stacks)
    )
    return contradicted(one.prior, likelihood, one.layout.labels, np.array(truth))


@pytest.mark.parametrize("family", slow_but((name for name, one in FAMILIES.items() if one.precise), "weibull"))
def test_no_data_contradict_what_was_chosen_for_them(family: str) -> None:
    """By the test of a fit, near the posterior mean."""
    precise = FAMILIES[family].precise
    assert precise is not None
    model, frame = _agreed(family, precise.draw(_ETA, np.random.default_rng(2)))
    clients = model.enrol({name: one.drop(columns="site") for name, one in frame.groupby("site")})
    assert said_of(clients, precise.truth) == ""


def test_a_prior_that_one_brings_oneself_is_contradicted_as_before() -> None:
    precise = FAMILIES["gamma"].precise
    assert precise is not None
    own = {"alpha": Prior("Gamma", alpha=2.0, beta=0.2)}
    model, frame = _agreed("gamma", precise.draw(_ETA, np.random.default_rng(2)), priors=own)
    clients = model.enrol({name: one.drop(columns="site") for name, one in frame.groupby("site")})
    assert "alpha" in said_of(clients, precise.truth)


def test_intervals_of_precise_outcomes_are_as_narrow_as_they_are() -> None:
    """Gamma outcomes with a coefficient of variation of 1 %: log y is all but normal, and least squares has the sd."""
    rng = np.random.default_rng(3)
    y = np.exp(4 + 0.01 * _FRAME["x"] + 0.01 * rng.normal(size=_N))
    model = fedppl.formula("y ~ x", "gamma")
    fit = fedppl.fit(model, _FRAME.assign(y=y), by="site", progressbar=False, random_seed=1)
    x = np.stack([np.ones(_N), _FRAME["x"]], axis=1)
    coefficients, squares, *_ = np.linalg.lstsq(x, np.log(y), rcond=None)
    sd = np.sqrt(squares[0] / (_N - 2) * np.linalg.inv(x.T @ x)[1, 1])
    found = fit.summary().loc["x", ["mean", "sd"]].astype(float)
    assert fit.status.ok and abs(found["mean"] - coefficients[1]) < 0.1 * sd
    assert found["sd"] == pytest.approx(sd, rel=0.06)
    assert "contradict" not in fit.message
