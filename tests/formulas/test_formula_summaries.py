"""Clients of a formula that give an estimate of its coefficients or a table of events in place of rows."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import expit

import fedppl
from fedppl import DataError
from fedppl.model.summaries import Estimate, Table
from tests.support import problems


def trial() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    site = np.repeat(["s0", "s1", "s2"], [20, 26, 40])
    arm, age = rng.choice(["control", "drug"], 86), rng.normal(50, 9, 86)
    healed = (rng.random(86) < expit(0.03 * (age - 50) + 0.7 * (arm == "drug"))).astype(int)
    return pd.DataFrame({"site": site, "arm": arm, "age": age, "dose": rng.choice(list("abc"), 86), "healed": healed})


FRAME = trial()
PARTS = {str(site): rows for site, rows in FRAME.groupby("site")}
COVARIANCE = np.array([[0.4, 0.05, 0.1], [0.05, 0.3, 0.02], [0.1, 0.02, 0.5]])
TOLD = Estimate(["arm", "Intercept", "dose[c]"], [0.3, -0.4, 0.2], COVARIANCE)


@pytest.mark.slow
def test_an_estimate_is_of_the_coefficients_with_the_clients_own_effects() -> None:
    model = fedppl.formula("healed ~ arm + age + dose + (1 + arm | site)", family="bernoulli")
    model = fedppl.agree(model, {**PARTS, "told": TOLD}).model
    client = model.enrol({"s0": PARTS["s0"], "told": TOLD}, kernel=False)["told"]
    phi, z = np.array([0.2, -0.1, 0.03, 0.3, -0.2, -0.1, 0.4, 0.2]), np.array([0.7, -0.3])
    values = {name: value[0] for name, value in client.constrain_shared(phi[None]).items()}
    sd, r = values["site_sd"], values["site_corr"][0]
    own = sd * np.array([z[0], r * z[0] + np.sqrt(1 - r**2) * z[1]])
    assert_allclose([v[0] for v in client.constrain(phi[None], z[None])["site_effects"].T], own)
    mean = [values["arm"][0] + own[1], values["Intercept"] + own[0], values["dose"][1]]
    expected = stats.multivariate_normal.logpdf(TOLD.estimate, mean, COVARIANCE) + stats.norm.logpdf(z).sum()
    assert_allclose(client.log_density(phi, z), expected, rtol=1e-10)


@pytest.mark.slow
def test_groups_within_a_client_have_no_part_in_its_estimate() -> None:
    rows = {site: rows.assign(ward=np.where(rows["age"] > 50, "x", "y")) for site, rows in PARTS.items()}
    model = fedppl.agree(fedppl.formula("healed ~ arm + (1 | site/ward)", family="bernoulli"), rows).model
    client = model.enrol({"s0": rows["s0"], "told": Estimate("arm", 0.3, 0.04)}, kernel=False)["told"]
    phi, theta = np.array([0.2, -0.1, 0.3, 0.1]), np.array([0.5, 0.9])
    expected = stats.norm.logpdf(0.3, -0.1, 0.2) + stats.norm.logpdf(theta).sum()
    assert_allclose(client.log_density(phi, theta), expected, rtol=1e-10)


@pytest.mark.slow
def test_an_estimate_joins_rows_in_a_fit_and_takes_no_part_in_the_agreement() -> None:
    model = fedppl.formula("healed ~ arm + (1 | site)", family="bernoulli")
    data = {"s0": PARTS["s0"], "told": Estimate("arm", 0.3, 0.05), "s1": PARTS["s1"]}
    fit = fedppl.fit(model, data, progressbar=False, random_seed=1)
    alone = fedppl.fit(model, {k: data[k] for k in ("s0", "s1")}, progressbar=False, random_seed=1)
    assert fit.status.ok and fit.client_ids == ("s0", "told", "s1")
    assert fit.declaration.agreement == alone.declaration.agreement
    before, after = alone.summary(), fit.summary()
    assert before.loc["arm[drug]", "mean"] - 0.2 > after.loc["arm[drug]", "mean"] > 0.3
    assert after.loc["arm[drug]", "sd"] < 0.3 < before.loc["arm[drug]", "sd"]
    assert_allclose(after.loc["Intercept", "sd"], before.loc["Intercept", "sd"], rtol=0.35)  # it says nothing of this
    found = fit.predict("told", {"arm": ["control", "drug"]}, kind="mean", draws=50)  # by its own posterior
    p, own = found["predictions"]["healed_mean"].values, found["posterior"]
    logit = own["Intercept"] + own["site_effects"][..., 0] + own["arm"][..., 0]
    assert_allclose(p[..., 1], 1 / (1 + np.exp(-logit)), rtol=1e-6)
    assert {one for one, *_ in fedppl.marginal_effects(fit, "arm", draws=20).index} == {"s0", "s1", "all"}
    with pytest.raises(fedppl.DeclarationError, match="told.*summary of its rows"):
        fedppl.marginal_effects(fit, "arm", clients=["told"])
    assert "site_effects" in fit.new_client(Estimate("arm", 0.1, 0.1), draws=20)["posterior"]
    pytest.importorskip("matplotlib").use("Agg")  # and in pictures a summary is not said to be a row
    names = [text.get_text() for text in fedppl.plots.forest(fit, draws=20)[0].get_yticklabels()]
    assert names == ["s0 (20)", "told (summary)", "s1 (26)"]


@problems.of_q
def test_a_table_is_as_good_as_its_rows() -> None:
    counts = {site: rows.groupby("arm")["healed"].agg(["sum", "count"]) for site, rows in PARTS.items()}
    table = Table("arm", counts["s1"]["sum"].to_dict(), counts["s1"]["count"].to_dict())
    model = fedppl.formula("healed ~ arm + (1 | site)", family="bernoulli")
    fits = [
        fedppl.fit(model, {**PARTS, "s1": given}, fedppl.EP(), progressbar=False, random_seed=1)
        for given in (table, PARTS["s1"])
    ]
    assert_allclose(fits[0].posterior.linear, fits[1].posterior.linear, rtol=1e-6)  # rows are summed in another order
    assert_allclose(fits[0].posterior.precision, fits[1].posterior.precision, rtol=1e-6)


@pytest.mark.parametrize(
    ("told", "fragments"),
    [
        (Estimate(["weight"], [0.1], [1.0]), ("told", "'weight'", "arm[drug]")),
        (Estimate(["arm", "arm[drug]"], [0.1, 0.1], [1.0, 1.0]), ("told", "twice")),
        (Table("sex", {"f": 1, "m": 2}, {"f": 3, "m": 3}), ("told", "'arm'")),
        (Table("arm", {"control": 1, "placebo": 2}, {"control": 3, "placebo": 3}), ("told", "placebo")),
    ],
)
def test_what_does_not_fit_the_formula_is_refused(told: Any, fragments: tuple[str, ...]) -> None:
    model = fedppl.formula("healed ~ arm + (1 | site)", family="bernoulli")
    if isinstance(told, Table) and told.column == "arm":
        model = fedppl.agree(model, PARTS).model
    with pytest.raises(DataError) as caught:
        fedppl.fit(model, {**PARTS, "told": told}, progressbar=False)
    assert all(fragment in str(caught.value) for fragment in fragments)


def test_tables_and_estimates_that_cannot_be() -> None:
    for build, fragment in [
        (lambda: Estimate(["a", "b"], [0.1, 0.2], [[1.0, 2.0], [2.0, 1.0]]), "not positive definite"),
        (lambda: Estimate(["a"], [0.1, 0.2], [1.0, 1.0]), "1 names"),
        (lambda: Estimate(["a", "a"], [0.1, 0.2], [1.0, 1.0]), "different names"),
        (lambda: Table("arm", {"a": 4}, {"a": 3}), "4 events of 3"),
        (lambda: Table("arm", {"a": 1}, {"b": 3}), "same levels"),
    ]:
        with pytest.raises(DataError, match=fragment):
            build()
    model = fedppl.formula("age ~ arm + (1 | site)")
    with pytest.raises(DataError, match="family"):
        fedppl.fit(model, {"a": Table("arm", {"x": 1}, {"x": 3})}, progressbar=False)
    with pytest.raises(DataError, match="levels and scales need rows"):
        fedppl.fit(model, {"a": Estimate("arm", 1.0, 1.0)}, progressbar=False)


@pytest.mark.parametrize(
    ("names", "estimate", "covariance"),
    [
        ({"a", "b"}, [0.5, 0.1], [0.01, 0.02]),
        (["a", "b"], pd.Series([0.1, 0.5], index=["b", "a"]), [0.01, 0.02]),
        (["a", "b"], [0.5, 0.1], pd.DataFrame(np.diag([0.02, 0.01]), index=["b", "a"], columns=["b", "a"])),
        (["a", "b"], [0.5, 0.1], pd.DataFrame([[0.0, 0.01], [0.01, 0.0]], index=["a", "b"], columns=["b", "a"])),
        (["a", "b"], pd.Series([0.5, 0.1], index=["A", "B"]), pd.Series([0.02, 0.01], index=["B", "A"])),
        (["a", "b"], [0.5, 0.1], np.ma.array([0.01, 0.02], mask=[True, False])),
    ],
)
def test_estimates_in_another_order_than_their_names_are_refused(names: Any, estimate: Any, covariance: Any) -> None:
    with pytest.raises(DataError):
        Estimate(names, estimate, covariance)


def test_labels_of_another_program_are_read_by_position() -> None:
    values = pd.Series([0.5, 0.1], index=["armdrug", "dose"])
    told = Estimate(
        ["arm", "dose"], values, pd.DataFrame(np.diag([0.01, 0.02]), index=values.index, columns=values.index)
    )
    assert_allclose(told.estimate, [0.5, 0.1])
    assert_allclose(np.diag(told.covariance), [0.01, 0.02])


def test_an_estimate_of_a_builder_has_one_order_too() -> None:
    def effect() -> Any:
        return pm.Normal("mu", 0, 1, shape=2)

    model = fedppl.FederatedModel({"told": fedppl.summaries.estimate(effect)}, ["mu"])
    series = pd.Series([0.5, 0.1], index=["a", "b"])
    for labels, refused in ((["a", "b"], False), (["b", "a"], True)):
        data = {"estimate": series, "covariance": pd.DataFrame(np.diag([0.02, 0.01]), index=labels, columns=labels)}
        with pytest.raises(DataError, match="another place") if refused else contextlib.nullcontext():
            model.enrol({"s": data}, kernel=False)
