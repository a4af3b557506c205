"""From a frame to a paper: tables of ratios, forests of totals, the risk of a patient to come, a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl import DeclarationError
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.plots._predictions import kaplan_meier
from fedppl.results import idata
from fedppl.testing import normal_means
from tests.support.tables import FAMILIES, FRAME, RESPONSES, agreed

mpl.use("Agg")
QUIET: Any = {"progressbar": False, "random_seed": 1}


def trial() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    hospital = np.repeat(["Aker", "Bern", "Cork", "Delft"], [40, 60, 80, 100])
    frame = pd.DataFrame({"hospital": hospital, "arm": rng.choice(["control", "drug"], len(hospital))})
    level = frame["hospital"].map({"Aker": -1.0, "Bern": -0.5, "Cork": 0.0, "Delft": 0.3})
    p = 1 / (1 + np.exp(-(level - 0.8 * (frame["arm"] == "drug"))))
    return frame.assign(died=(rng.random(len(frame)) < p).astype(int))


@pytest.fixture(scope="module")
def fit() -> Any:
    model = fedppl.formula("died ~ arm + (1 + arm | hospital)", family="bernoulli")
    return fedppl.fit(model, trial(), fedppl.Sums(), by="hospital", **QUIET)


@pytest.mark.slow
def test_a_table_has_odds_ratios_under_the_names_that_are_printed(fit: Any) -> None:
    table, log, summary = fedppl.table(fit, exponentiate=True), fedppl.table(fit), fit.summary()
    assert list(table.frame.index) == list(summary.index) and not any("partial" in name for name in summary.index)
    assert "hospital_partial" in fit.summary("hospital_partial").index[0]
    ends = ["ci_low", "ci_high"]
    assert_allclose(table.frame.loc["arm[drug]", ends].astype(float), np.exp(summary.loc["arm[drug]", ends]))
    assert_allclose(
        table.frame.loc["hospital_sd[Intercept]", ends].astype(float), summary.loc["hospital_sd[Intercept]", ends]
    )
    assert_allclose(table.frame.loc["arm[drug]", "estimate"], np.exp(summary.loc["arm[drug]", "mean"]), rtol=0.02)
    assert list(table.frame["what"][:2]) == ["odds", "odds ratio"] and list(log.frame["what"][:2]) == [
        "log odds",
        "log odds ratio",
    ]
    assert "95 % interval" in repr(table) and "odds ratio" in table._repr_html_()
    assert repr(fedppl.table(fit, ci_prob=0.9)).splitlines()[0].count("90 %") == 1
    low, mean, high = (fit.idata["posterior"]["arm"].quantile(q).item() for q in (0.025, 0.5, 0.975))
    assert_allclose(
        table.frame.loc["arm[drug]", ["estimate", *ends]].astype(float), np.exp([mean, low, high]), rtol=0.06
    )


def test_entries_are_chosen_under_the_names_that_are_printed(fit: Any) -> None:
    name, spaced = "arm[drug]", "hospital_corr[Intercept,arm[drug]]"
    assert list(fedppl.table(fit, name).frame.index) == [name] == list(fit.summary([name]).index)
    assert list(fedppl.hypotheses(fit, var_names=[name]).index) == [name]
    assert list(fit.summary([spaced, "Intercept"]).index) == ["hospital_corr[Intercept, arm[drug]]", "Intercept"]
    assert fedppl.plots.prior_posterior(fit, name)[0].get_xlabel() == name
    assert len(fedppl.plots.influence(fit, name)) == 2
    axes = fedppl.plots.forest(fit, "hospital_effects[arm[drug]]", draws=50)
    assert [one.get_xlabel() for one in axes] == ["hospital_effects[arm[drug]]"]
    for wrong, why in (("arm[dose]", r"'arm\[dose\]' is none.*arm\[drug\]"), ("leg[drug]", "name some")):
        for call in (fit.summary, lambda names: fedppl.plots.forest(fit, names, draws=10)):
            with pytest.raises(DeclarationError, match=why):
                call(wrong)
    with pytest.raises(DeclarationError, match="twice"):
        fit.summary(["arm", name])


def test_correlations_keep_their_range_in_a_picture(fit: Any) -> None:
    (axes,) = fedppl.plots.prior_posterior(fit, "hospital_corr")
    assert -1 <= min(line.get_xdata().min() for line in axes.lines)
    assert max(line.get_xdata().max() for line in axes.lines) <= 1


def test_a_forest_of_totals_has_each_hospitals_own_ratio_with_its_number(fit: Any) -> None:
    (axes,) = fedppl.plots.forest(fit, "arm", total=True, exponentiate=True, draws=100)
    assert axes.get_xlabel() == "odds ratio, arm[drug]" and axes.get_xscale() == "log"
    own = fit.client("Bern", draws=100)["posterior"]
    total = np.exp(own["arm"][..., 0] + own["hospital_effects"][..., 1])
    low, high = (total.quantile(q).item() for q in (0.025, 0.975))
    assert axes.texts[1].get_text() == f"{total.median().item():.2f} ({low:.2f} to {high:.2f})"
    assert len(fedppl.plots.forest(fit, total=True, draws=20)) == 2  # the level and the arm
    assert not fedppl.plots.forest(fit, "arm", total=True, numbers=False, draws=20)[0].texts
    with pytest.raises(DeclarationError, match=r"alone=.*total=True"):
        fedppl.plots.forest(fit, alone=fit)
    with pytest.raises(DeclarationError, match="pm.Deterministic"):
        fedppl.plots.forest(fedppl.fit(*normal_means(), **QUIET), total=True)


@pytest.mark.slow
def test_alone_hospitals_are_compared_by_totals(fit: Any) -> None:
    """A hospital's level alone is that of its own rows, whatever its fit calls intercept and what effect."""
    frame = trial()
    model = fedppl.formula("died ~ arm + (1 | hospital)", family="bernoulli")
    alone = fedppl.fit(model, frame, fedppl.one_shot.Separate(), by="hospital", **QUIET)
    own = alone.declaration.builder.totals(alone.client("Delft", draws=500)["posterior"])["Intercept"]
    share = frame[(frame["hospital"] == "Delft") & (frame["arm"] == "control")]["died"].mean()
    assert own.mean().item() == pytest.approx(np.log(share / (1 - share)), abs=0.15)
    axes = fedppl.plots.forest(alone, total=True, alone=alone, population=0.0, draws=20)
    assert len(axes) == 1


@pytest.mark.parametrize("family", ["poisson", "categorical", "ordinal"])
def test_totals_add_up_what_is_shared_and_what_is_a_clients_own(family: str) -> None:
    model = agreed(f"{RESPONSES[family]} ~ age + arm + (1 + arm | site)", family)
    spec, rng = model.builder.spec, np.random.default_rng(1)
    built = model.builder(**model.read("s1", FRAME[FRAME["site"] == "s1"]))
    names = [*model.builder.coefficients, "site_effects"]
    shapes = {name: built[name].shape.eval(mode=PYTHON_MODE) for name in names}
    dims = {name: tuple(built.named_vars_to_dims.get(name, ())) for name in names}
    draws = {name: rng.normal(size=(2, 3, *shapes[name])) for name in names}
    group = idata.posterior_dataset(draws, dims, {k: list(v) for k, v in built.coords.items() if v is not None})
    found, own = model.builder.totals(group), draws["site_effects"]
    levels = max(len(spec.levels), 1)
    first = 0 if family == "ordinal" else levels
    assert_allclose(found["age"], group["age"])
    if family != "ordinal":
        assert_allclose(
            found["Intercept"].values.reshape(2, 3, -1), draws["Intercept"].reshape(2, 3, -1) + own[..., :levels]
        )
    arm = own[..., first if family != "ordinal" else 1 :]
    assert_allclose(found["arm"].values.reshape(2, 3, -1), draws["arm"].reshape(2, 3, -1) + arm)
    assert set(model.builder.varying) == {*(["Intercept"] if family != "ordinal" else []), "arm"}


@pytest.mark.parametrize("family", FAMILIES)
def test_ratios_have_the_names_of_papers(family: str) -> None:
    builder, ratio = agreed(f"{RESPONSES[family]} ~ age * arm", family).builder, FAMILIES[family].ratio
    if not ratio:
        assert builder.effect("age", exponentiate=False) == "difference"
        with pytest.raises(DeclarationError, match="differences of means"):
            builder.effect("age", exponentiate=True)
        return
    assert builder.effect("age", exponentiate=True) == builder.effect("arm", exponentiate=True) == ratio
    assert builder.effect("age:arm", exponentiate=True) == f"ratio of {ratio.replace('ratio', 'ratios', 1)}"


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        ("0 + arm", {"arm": "odds"}),
        ("0 + arm + age", {"arm": "odds", "age": "odds ratio"}),
        ("arm/age", {"arm": "odds ratio", "arm:age": "odds ratio"}),
        ("0 + arm + arm:age", {"arm": "odds", "arm:age": "odds ratio"}),
        ("age*arm - age", {"arm": "odds ratio", "age:arm": "odds ratio"}),
        ("0 + arm*age", {"arm": "odds", "arm:age": "ratio of odds ratios"}),
    ],
)
def test_a_factor_with_all_its_levels_is_no_ratio(terms: str, names: dict[str, str]) -> None:
    """Neither odds at each level, nor slopes at each, are compared with those at a reference."""
    builder = agreed(f"{RESPONSES['bernoulli']} ~ {terms}", "bernoulli").builder
    assert {name: builder.effect(name, exponentiate=True) for name in names} == names
    means = agreed(f"{RESPONSES['gaussian']} ~ {terms}", "gaussian").builder
    assert means.effect("arm", exponentiate=False) == ("mean" if names["arm"] == "odds" else "difference")


def test_tables_are_written_for_papers(fit: Any, tmp_path: Path) -> None:
    table = fedppl.table(fit, ["Intercept", "arm[drug]", "hospital_sd"], exponentiate=True, digits=3)
    latex = table.to_latex(tmp_path / "table.tex")
    assert (tmp_path / "table.tex").read_text(encoding="utf-8") == latex
    assert r"hospital\_sd" in latex and "95 \\% interval" in latex and latex.count(r"\\") == 5
    assert (tmp_path / "table.html").exists() is False and table.to_html(tmp_path / "table.html").count("<tr>") == 5
    docx = pytest.importorskip("docx")
    table.to_docx(tmp_path / "table.docx")
    rows = docx.Document(str(tmp_path / "table.docx")).tables[0].rows
    assert [cell.text for cell in rows[2].cells][0] == "arm[drug]" and len(rows) == 5


def test_tables_of_builders_name_what_is_exponentiated() -> None:
    fit = fedppl.fit(*normal_means(), **QUIET)
    with pytest.raises(DeclarationError, match="name them by var_names"):
        fedppl.table(fit, exponentiate=True)
    found = fedppl.table(fit, "mu", exponentiate=True).frame.loc["mu"]
    assert found["what"] == "exp of mu" and found["ci_low"] == pytest.approx(np.exp(fit.summary().loc["mu", "ci_low"]))


def test_a_table_is_of_a_fit() -> None:
    with pytest.raises(DeclarationError, match="fit is str; pass what fedppl.fit returned"):
        fedppl.table("x")


def test_a_table_of_a_fit_that_has_not_converged_says_so() -> None:
    with pytest.warns(fedppl.ConvergenceWarning):
        fit = fedppl.fit(*normal_means(), fedppl.EP(warm_start=False), rounds=1, **QUIET)
    table = fedppl.table(fit)
    assert "Not converged" in repr(table) and "Not converged" in table.to_html() and "Not converged" in table.to_latex()
    assert fit.idata["posterior"].sizes["chain"] == 1  # independent draws of it agree with each other: R̂ would be 1


def test_a_summary_prints_all_its_columns_estimates_first(fit: Any) -> None:
    text = repr(fit.summary())
    assert "..." not in text and all(name in text for name in fit.summary().columns)
    assert text.split()[:4] == ["mean", "sd", "ci_low", "ci_high"]


def test_a_trial_in_ten_lines(fit: Any, tmp_path: Path) -> None:
    """What a statistician writes once the trial is fitted; nothing in the report takes back what its head says."""
    table = fedppl.table(fit, exponentiate=True)
    axes = fedppl.plots.forest(fit, "arm", total=True, exponentiate=True, draws=100)
    patient = {"arm": "drug"}
    risk = fit.predict(None, patient, kind="mean", draws=250)["predictions"]["died_mean"]
    known = fit.predict("Delft", patient, kind="mean", draws=250)["predictions"]["died_mean"]
    page = fit.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert 0.2 < table.frame.loc["arm[drug]", "estimate"] < 1.2 and len(axes[0].texts) == 4
    low, high = risk.quantile([0.025, 0.975]).values
    assert 0 < low < risk.mean() < high < 1 and risk.std() > 1.5 * known.std()
    assert ("as they are" in page) is (not fit.message)


def test_kaplan_meier_of_textbook_rows() -> None:
    """Freireich's 6-MP arm: 21 children, of whom 9 relapsed."""
    time = np.array([6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35], dtype=float)
    event = np.array([1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0], dtype=bool)
    found = kaplan_meier(time, event, np.array([5.9, 6.0, 7.0, 10.0, 13.0, 16.0, 22.0, 40.0]))
    expected = [1.0, 0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448]
    assert_allclose(found, expected, atol=6e-4)


def test_a_check_over_all_clients_shows_a_model_that_does_not_fit(fit: Any) -> None:
    bars, lines = fedppl.plots.check(fit, draws=50, random_seed=1)
    frame = trial()
    assert_allclose([bar.get_height() for bar in bars.patches], [1 - frame["died"].mean(), frame["died"].mean()])
    assert lines.get_xlabel() == "mean of died" and [t.get_text() for t in lines.get_yticklabels()][0] == "Aker (40)"
    crosses = [line.get_xdata()[0] for line in lines.lines if line.get_marker() == "x"]
    assert_allclose(crosses, frame.groupby("hospital")["died"].mean())

    rng = np.random.default_rng(1)
    heavy = {k: {"y": rng.standard_t(1.2, size=40)} for k in "ab"}
    off, _ = fedppl.plots.check(fedppl.fit(normal_means()[0], heavy, **QUIET), draws=50, random_seed=1)
    outside = _share_outside(off)
    good, _ = fedppl.plots.check(fedppl.fit(*normal_means(), **QUIET), draws=50, random_seed=1)
    assert _share_outside(good) < 0.1 < outside


def _share_outside(axes: Any) -> float:
    """How much of the observed curve is outside of the band of what is predicted."""
    (step,) = [line for line in axes.lines if line.get_label() == "observed"]
    band = axes.collections[0].get_paths()[0].vertices
    x = np.linspace(*axes.get_xlim(), 200)[20:-20]
    count = len(band) // 2
    edges = [part[np.argsort(part[:, 0])] for part in (band[1:count], band[count + 1 : -1])]
    at = [np.interp(x, edge[:, 0], edge[:, 1]) for edge in edges]
    y = np.searchsorted(np.sort(step.get_xdata()), x, side="right") / len(step.get_xdata())
    return float(np.mean((y < np.minimum(*at) - 0.02) | (y > np.maximum(*at) + 0.02)))


@pytest.mark.slow
def test_a_check_of_times_is_against_kaplan_meier() -> None:
    model = fedppl.formula("Surv(time, event) ~ age + arm", family="weibull")
    fit = fedppl.fit(model, FRAME, fedppl.EP(), by="site", **QUIET)
    curve, lines = fedppl.plots.check(fit, draws=50, random_seed=1)
    (step,) = [line for line in curve.lines if line.get_label() == "Kaplan-Meier"]
    at, y = step.get_xdata(), step.get_ydata()
    assert_allclose(y, kaplan_meier(FRAME["time"].to_numpy(), FRAME["event"].to_numpy() == 1, at))
    (mean,) = [line for line in curve.lines if line.get_label().startswith("predicted")]
    assert np.max(np.abs(np.interp(at, mean.get_xdata(), mean.get_ydata(), left=1.0) - y)[at < 6]) < 0.1
    assert lines.get_xlabel().startswith("P(no event) of time at")
