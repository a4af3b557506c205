"""Contrasts and tests on draws, against counts by hand and the normal distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose
from scipy.stats import norm

import fedppl
from fedppl import DeclarationError, contrast, hypotheses
from fedppl.results import idata
from fedppl.testing import normal_means
from tests.support import problems


def posterior(**variables: Any) -> Any:
    """ArviZ object of (chain, draw, ...) arrays; a third axis is labelled."""
    dims = {name: ("chain", "draw", "predictor")[: np.ndim(value)] for name, value in variables.items()}
    return idata.from_groups(
        {
            "posterior": xr.Dataset(
                {name: (dims[name], value) for name, value in variables.items()}, coords={"predictor": ["age", "dose"]}
            )
        }
    )


def grid(mean: float, sd: float, draws: int = 4000) -> Any:
    """Quantiles of a normal in two chains: draws without Monte Carlo error."""
    return norm.ppf((np.arange(draws) + 0.5) / draws, mean, sd).reshape(2, -1)


def test_every_column_on_five_draws() -> None:
    """x = −2, −1, 0, 1, 7 by hand: mean 1, sd √12.5, quartiles −1 and 1, P(x > 0) = P(x < 0) = 2/5."""
    row = hypotheses(posterior(x=[[-2.0, -1.0, 0.0, 1.0, 7.0]]), ci_prob=0.5, rope=(-1.5, 0.5)).loc["x"]
    assert row["mean"] == 1.0
    assert row["sd"] == pytest.approx(np.sqrt(12.5))
    assert (row["ci_low"], row["ci_high"]) == (-1.0, 1.0)
    assert not row["excludes_null"]
    assert row["probability_of_direction"] == 0.4
    assert row["in_rope"] == 0.4


def test_against_the_normal_distribution() -> None:
    """N(1, 0.5²): 95 % interval 1 ∓ 0.98, P(x > 0) = Φ(2), P(|x| < 0.2) = Φ(−1.6) − Φ(−2.4)."""
    row = hypotheses(posterior(x=grid(1.0, 0.5)), rope=(-0.2, 0.2)).loc["x"]
    assert_allclose([row["ci_low"], row["ci_high"]], norm.ppf([0.025, 0.975], 1, 0.5), atol=2e-3)
    assert row["excludes_null"]
    assert row["probability_of_direction"] == pytest.approx(norm.cdf(2), abs=1e-3)
    assert row["in_rope"] == pytest.approx(norm.cdf(-1.6) - norm.cdf(-2.4), abs=1e-3)
    below = hypotheses(posterior(x=grid(-1.0, 0.5))).loc["x"]
    assert below["excludes_null"] and below["probability_of_direction"] == pytest.approx(norm.cdf(2), abs=1e-3)
    assert "in_rope" not in below


def test_the_null_may_be_another_value() -> None:
    row = hypotheses(posterior(x=grid(1.0, 0.5)), null=1.0).loc["x"]
    assert not row["excludes_null"]
    assert row["probability_of_direction"] == pytest.approx(0.5, abs=1e-3)


def test_the_probability_of_the_interval_decides() -> None:
    """N(1, 0.5²) excludes 0 at 90 % (1.645 sds) and at 95 %, not at 97 % (2.17 sds)."""
    excluded = [hypotheses(posterior(x=grid(1.0, 0.5)), ci_prob=p)["excludes_null"]["x"] for p in (0.9, 0.95, 0.97)]
    assert excluded == [True, True, False]


def test_a_row_an_entry_with_the_models_labels() -> None:
    beta = np.stack([grid(1, 0.1), grid(-1, 0.1)], axis=-1)
    table = hypotheses(posterior(beta=beta, a=grid(0, 1)))
    assert list(table.index) == ["beta[age]", "beta[dose]", "a"]
    assert_allclose(table["mean"], [1, -1, 0], atol=1e-10)
    assert list(hypotheses(posterior(beta=beta, a=grid(0, 1)), var_names=["a"]).index) == ["a"]


def test_of_a_fit_moments_and_intervals_are_those_of_its_summary() -> None:
    """Draws are rounder than weighted points, so that one entry could exclude 0 in one table and not in the other."""
    fit = fedppl.fit(*normal_means(2), progressbar=False, random_seed=2)
    told = fit.summary(ci_prob=0.9)
    table = hypotheses(fit, ci_prob=0.9, null=float(told["ci_low"].iloc[0]) - 1e-9)
    columns = ["mean", "sd", "ci_low", "ci_high"]
    assert_allclose(table[columns], told[columns], rtol=1e-12)
    assert table["excludes_null"].iloc[0]
    one = told.index[-1]
    assert_allclose(hypotheses(fit, var_names=[one]).loc[one, columns], fit.summary().loc[one, columns])


def test_contrast_is_the_difference_of_draws() -> None:
    a, b = posterior(x=[[1.0, 2.0, 3.0]]), posterior(x=[[5.0, 1.0, 0.0]])
    difference = contrast(a, b, "x")
    assert_allclose(difference.values, [[-4.0, 1.0, 3.0]])
    assert difference.name == "x difference"
    assert list(hypotheses(difference).index) == ["x difference"]


def test_contrast_of_one_labelled_entry() -> None:
    beta = np.stack([grid(1, 0.1), grid(-1, 0.1)], axis=-1)
    difference = contrast(posterior(beta=beta), posterior(beta=beta + 0.5), "beta", coords={"predictor": "dose"})
    assert difference.dims == ("chain", "draw")
    assert_allclose(difference, -0.5)


def test_contrast_between_two_clients_of_a_fit() -> None:
    """Difference of two independent normals, exact in the conjugate model."""
    model, clients = normal_means(2)
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=2)
    difference = contrast(fit.client("client 0"), fit.client("client 1"), "theta")
    mean, variance = 0.0, 0.0
    for sign, k, other in ((1, "client 0", "client 1"), (-1, "client 1", "client 0")):
        m, v = problems.normal_means_theta(clients[k]["y"], *problems.normal_means_posterior({other: clients[other]}))
        mean, variance = mean + sign * m, variance + v
    row = hypotheses(difference).iloc[0]
    assert row["mean"] == pytest.approx(mean, abs=4 * np.sqrt(variance / 4000))
    assert row["sd"] == pytest.approx(np.sqrt(variance), rel=4 / np.sqrt(2 * 4000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gamma", None), r"'gamma' is not in the posterior; variables are \['beta', 'a'\]"),
        (("beta", {"predictor": "weight"}), "'beta' has no entry .*'weight'"),
        (("a", {"predictor": "age"}), "'a' has no entry"),
    ],
)
def test_contrasts_of_what_is_not_there_are_refused(arguments: Any, message: str) -> None:
    name, coords = arguments
    result = posterior(beta=np.ones((1, 3, 2)), a=np.ones((1, 3)))
    with pytest.raises(DeclarationError, match=message):
        contrast(result, result, name, coords=coords)


def test_contrasts_of_different_numbers_of_draws_are_refused() -> None:
    with pytest.raises(DeclarationError, match=r"'x' has shapes \(1, 3\) and \(1, 4\); draw equally many"):
        contrast(posterior(x=np.ones((1, 3))), posterior(x=np.ones((1, 4))), "x")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"ci_prob": 0.0}, "ci_prob=0.0 must lie between 0 and 1"),
        ({"ci_prob": 90}, "ci_prob=90 must lie between 0 and 1"),
        ({"rope": (0.1, -0.1)}, "rope=.* low < high"),
        ({"var_names": ["y"]}, r"\['y'\]; name some of the draws"),
    ],
)
def test_bad_settings_are_refused(keywords: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        hypotheses(posterior(x=np.ones((1, 3))), **keywords)


def test_what_would_be_left_out_without_a_word_is_refused() -> None:
    draws = xr.DataArray(np.random.default_rng(0).normal(size=(2, 50, 2)), dims=("chain", "draw", "arm"), name="effect")
    with pytest.raises(DeclarationError, match=r"two entries .*'effect\[a\]'.*distinct coords"):
        hypotheses(draws.assign_coords(arm=["a", "a"]))
    with pytest.raises(DeclarationError, match=r"'other'.*effect"):
        hypotheses(draws, var_names="other")
    assert len(hypotheses(draws, var_names="effect")) == 2
    draws[0, 0, 1] = np.nan
    with pytest.raises(fedppl.DataError, match=r"'effect\[1\]' hold values that are not finite"):
        hypotheses(draws)
