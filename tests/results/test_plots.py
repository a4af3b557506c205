"""Pictures hold the fit's numbers, labels stay apart, and a page about a fit has neither markup of others nor rows."""

from __future__ import annotations

import base64
import dataclasses
import re
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

import fedppl
from fedppl import DataError, DeclarationError, plots
from fedppl.contracts.printed import QUALITY
from fedppl.plots._clients import _effective
from fedppl.plots._posteriors import _effects, density
from fedppl.results import idata
from fedppl.testing import normal_means
from tests.support import problems

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

EVIL = "<script>alert('x')</script>"
LONG = "St. Elsewhere university hospital at $x_$, <b>department"
SENTINEL = 4.123456789  # a row's value, which stands nowhere else
MU, TAU, THETA = "mu<script>alert(1)<b>", "tau", "theta"  # PyMC takes no slash


def builder(X: Any, y: Any) -> Any:
    with pm.Model(coords={"predictor": ["<i>age</i>", "$dose$"]}) as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu = pm.Normal(MU, 0, 3, dims="predictor")
        tau = pm.HalfNormal(TAU, 1)
        theta = pm.Normal(THETA, mu, tau, dims="predictor")
        pm.Normal("noise", 0, 1)
        pm.Normal("obs", X @ theta, 1, observed=y)
    return model


MODEL = fedppl.FederatedModel(builder, [MU, TAU])


def data(clients: int = 3) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(5)
    found = {}
    for k in range(clients):
        X = rng.normal(size=(12 + k, 2))
        y = X @ (np.array([1.0, -2.0]) + 0.5 * rng.normal(size=2)) + rng.normal(size=len(X))
        y[0] = SENTINEL
        found[f"{EVIL} & {k}"] = {"X": X, "y": y}
    return found


@pytest.fixture(scope="module")
def fit() -> fedppl.Fit:
    return fedppl.fit(MODEL, data(), fedppl.Sums(), progressbar=False, random_seed=1)


@pytest.fixture(scope="module")
def by_ep() -> fedppl.Fit:
    """The same rows, of which EP's rounds tell more of every client."""
    return problems.fit_some_rounds(MODEL, data(), fedppl.EP(), progressbar=False, random_seed=1)


@pytest.fixture(scope="module")
def many() -> fedppl.Fit:
    model, clients = normal_means(40, 5)
    named = {f"{LONG} {k:02d}</b>": one for k, one in enumerate(clients.values())}
    return fedppl.fit(model, named, fedppl.EP(), progressbar=False, random_seed=1)


@pytest.fixture(scope="module")
def coupled() -> fedppl.Fit:
    return fedppl.fit(*problems.regression(3), fedppl.HM1(), progressbar=False, random_seed=1)


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    plt.close("all")


def segments(axes: Any, which: int) -> Any:
    """Ends of the horizontal lines of one collection, (K, 2)."""
    kinds = [one for one in axes.collections if type(one).__name__ == "LineCollection"]
    return np.array([[segment[0, 0], segment[-1, 0]] for segment in kinds[which].get_segments()])


def dots(axes: Any, which: int = 0) -> Any:
    """Horizontal places of the markers of one line."""
    marked = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    return np.asarray(marked[which].get_xdata(), dtype=float)


def texts(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def apart(axes: Any) -> bool:
    """Whether no two names of clients overlap, nor two numbers below."""
    axes.figure.canvas.draw()
    left = [one.get_window_extent() for one in axes.get_yticklabels() if one.get_text() and one.get_visible()]
    low, high = sorted(axes.get_xlim())
    below = [
        one.label1.get_window_extent()
        for one in axes.xaxis.get_major_ticks()
        if one.label1.get_text() and one.label1.get_visible() and low <= one.get_loc() <= high
    ]
    vertical = sorted((box.y0, box.y1) for box in left)
    across = sorted((box.x0, box.x1) for box in below)
    return all(a[1] <= b[0] + 1 for each in (vertical, across) for a, b in zip(each, each[1:], strict=False))


# --- clients beside each other ------------------------------------------------------------------------------------


def test_a_forest_has_each_clients_own_posterior_beside_the_population(fit: fedppl.Fit) -> None:
    axes = plots.forest(fit, THETA, population=MU, ci_prob=0.8)
    assert axes.shape == (2,)
    own = np.stack([fit.client(name, draws=250)["posterior"][THETA].values.reshape(-1, 2) for name in fit.client_ids])
    shared = fit.idata["posterior"][MU].values.reshape(-1, 2)
    for k, panel in enumerate(axes):
        assert_allclose(dots(panel), own[:, :, k].mean(axis=1))
        assert_allclose(segments(panel, 0), np.quantile(own[:, :, k], [0.1, 0.9], axis=1).T)
        assert_allclose(segments(panel, 1), np.quantile(own[:, :, k], [0.25, 0.75], axis=1).T)
        assert_allclose(panel.lines[0].get_xdata(), shared[:, k].mean())
    assert [panel.get_xlabel() for panel in axes] == ["theta[<i>age</i>]", r"theta[\$dose\$]"]
    assert [text[-4:] for text in texts(axes[0].yaxis)] == ["(12)", "(13)", "(14)"]  # numbers of rows
    axes[0].figure.canvas.draw()  # names are no formulas


def test_a_forest_shows_how_far_clients_moved_from_what_they_say_alone(fit: fedppl.Fit) -> None:
    alone = fedppl.fit(fit.declaration, data(), fedppl.one_shot.Separate(), progressbar=False, random_seed=1)
    names = list(fit.client_ids)
    (panel,) = plots.forest(fit, THETA, coords={"predictor": "$dose$"}, alone=alone, clients=names[:2])
    expected = [float(alone.client(name, draws=250)["posterior"][THETA][..., 1].mean()) for name in names[:2]]
    assert_allclose(dots(panel, 1), expected)
    mine = dots(panel)
    assert_allclose(panel.lines[0].get_xdata(), mine.mean())  # no population: the mean of the clients' means
    moves = [line.get_xdata() for line in panel.lines if line.get_linestyle() == ":"]
    assert_allclose(moves, np.stack([expected, mine], axis=1))


def test_a_forest_shows_local_variables_by_default_and_takes_axes(fit: fedppl.Fit) -> None:
    figure, given = plt.subplots(1, 3)
    axes = plots.forest(fit, ax=given, draws=20)
    assert [panel.get_xlabel() for panel in axes] == ["theta[<i>age</i>]", r"theta[\$dose\$]", "noise"]
    assert all(a is b for a, b in zip(axes, given, strict=True)) and axes[0].figure is figure
    figure.canvas.draw()
    assert axes[0].get_legend().get_window_extent().y0 >= axes[0].get_window_extent().y1  # over no data
    (only,) = plots.forest(fit, "noise", population=0.0, draws=20, figsize=(3, 2))
    assert_array_equal(only.lines[0].get_xdata(), [0, 0])
    assert only.figure.get_size_inches().tolist() == [3, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"var_names": "gamma"}, "gamma"),
        ({"var_names": [THETA], "coords": {"place": "a"}}, "place"),
        ({"var_names": [THETA], "coords": {"predictor": "weight"}}, "choose 1 to 12"),
        ({"var_names": [THETA], "population": "delta"}, "delta"),
        ({"var_names": ["noise"], "population": MU}, "has no entry"),
        ({"var_names": ["noise"], "population": {THETA: 0.0}}, "not among the variables shown"),
        ({"clients": ["nobody"]}, "nobody"),
        ({"ci_prob": 1.5}, "ci_prob=1.5"),
        ({"var_names": [THETA], "ax": 3}, "2 here"),
        ({"alone": 3}, "fit is int"),
    ],
)
def test_what_a_forest_cannot_show_is_refused(fit: fedppl.Fit, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        plots.forest(fit, **{"draws": 5, **settings})
    with pytest.raises(DeclarationError, match=r"fedppl.load\(path, model, clients=...\).*sites draw"):
        plots.forest(dataclasses.replace(fit, clients={}))


# --- rounds and quality -------------------------------------------------------------------------------------------


def test_rounds_are_those_of_the_record(by_ep: fedppl.Fit) -> None:
    above, below = plots.rounds(by_ep)
    told = np.array([record.info["change_mean"] for record in by_ep.records])
    (line,) = [one for one in above.lines if "mean" in one.get_label()]
    assert_allclose(line.get_ydata(), np.where(np.isfinite(told) & (told > 0), told, np.nan))
    assert above.get_yscale() == "log"
    (bound,) = [one for one in above.lines if "tolerance" in one.get_label()]
    assert_array_equal(bound.get_ydata(), [0.01, 0.01])
    named = {label for label in above.get_legend_handles_labels()[1] if "phase" in label}
    assert named == {"phase: warm start", "phase: EP"}
    assert_array_equal(below.collections[0].get_array(), np.zeros((3, len(by_ep.records))))
    assert (above.get_xlabel(), below.get_xlabel()) == ("", "round")
    for axes in plots.rounds(by_ep, ax=plt.subplots(1, 2)[1]):
        assert axes.get_xlabel() == "round" and axes.get_xlim() == (0.5, len(by_ep.records) + 0.5)


def test_who_did_not_answer_is_seen() -> None:
    model, clients = problems.regression(3)
    failing = fedppl.EP(local=problems.failing(lambda name: name == "clinic 1", "out"), warm_start=False)
    found = problems.fit_some_rounds(model, clients, failing, rounds=2, reporting=1, progressbar=False, random_seed=1)
    outcome = found.idata["rounds"]["outcome"].transpose("client", "round").values
    table = plots.rounds(found)[1].collections[0].get_array()
    assert_array_equal(np.array(["used", "silent", "skipped", "not asked"])[np.asarray(table, dtype=int)], outcome)
    bars = plots.quality(found)[-1].containers
    for one in bars:
        assert_array_equal([bar.get_width() for bar in one], (outcome == one.get_label()).sum(axis=1))
    assert {one.get_label() for one in bars} >= {"silent"}


def test_quality_is_what_clients_said(by_ep: fedppl.Fit) -> None:
    axes = plots.quality(by_ep)
    assert [panel.get_xlabel() for panel in axes] == [QUALITY["ess"].label, QUALITY["pareto_k"].label, "rounds"]
    for panel, name in zip(axes, ("ess", "pareto_k"), strict=False):
        told = by_ep.idata["rounds"][name].transpose("client", "round").values
        assert_allclose(dots(panel), [row[np.isfinite(row)][-1] for row in told])
        assert_allclose(segments(panel, 0), [[np.nanmin(row), np.nanmax(row)] for row in told])


def test_numbers_of_effective_draws_stay_apart_on_a_log_axis() -> None:
    for low, high in ((150.0, 5000.0), (63.0, 9000.0), (3.0, 90_000.0)):
        axes = plt.subplots(figsize=(2.9, 2))[1]
        axes.plot([low, high], [0, 1])
        _effective(axes, np.array([low, high]))
        assert apart(axes) and not any(text for text in (one.get_text() for one in axes.get_xticklabels(minor=True)))
        assert sum(low <= place <= high for place in axes.get_xticks()) >= 2


def test_fallbacks_are_counted_apart() -> None:
    falling = fedppl.EP(local=problems.falling_back({"clinic 0": 2.0}), warm_start=False)
    found = problems.fit_some_rounds(*problems.regression(2), falling, rounds=1, progressbar=False, random_seed=1)
    ticks = plots.rounds(found)[1].get_xticks()
    assert_array_equal(ticks, np.round(ticks))  # no halves of a round
    counted = {one.get_label(): [bar.get_width() for bar in one] for one in plots.quality(found)[-1].containers}
    assert counted["used, by NUTS"] == [len(found.records), 0] and counted["used"][0] == 0


# --- influence, device graph, prior and posterior -----------------------------------------------------------------


def test_influence_is_that_of_the_fit(fit: fedppl.Fit) -> None:
    found = fit.influence()
    conflict = xr.Dataset({"p_value": ("client", [0.5, np.nan, 0.01])}, coords={"client": list(fit.client_ids)})
    axes = plots.influence(fit, conflict=conflict)
    for panel, name in zip(axes, ("shift", "sd_ratio"), strict=False):
        drawn = [line.get_xdata() for line in panel.lines if line.get_marker() == "o" and len(line.get_xdata()) == 3]
        known = [np.nanmax([a, b], axis=0) for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
        assert_allclose(known, found[name].transpose("rows", "client").values)
        for solid, hollow in zip(drawn[::2], drawn[1::2], strict=True):
            assert_array_equal(np.isfinite(solid), found["exact"].values)
            assert_array_equal(np.isnan(hollow), found["exact"].values)
    assert_array_equal(dots(axes[2]), [0.5, np.nan, 0.01])
    assert axes[2].get_xscale() == "log"
    labels = [text.get_text() for text in axes[0].figure.legends[0].get_texts()]
    assert labels[2] == "log tau" and labels[1].endswith(r"[\$dose\$]")
    one = plots.influence(fit, TAU, clients=fit.client_ids[0])
    assert_allclose(np.nanmax([dots(one[0]), dots(one[0], 1)]), found["shift"].values[0, 2])
    with pytest.raises(DeclarationError, match="conflict=3"):
        plots.influence(fit, conflict=3)


@problems.few_rounds
def test_confidence_is_drawn_as_the_shares_and_distances_of_last_replies(fit: fedppl.Fit) -> None:
    """Three of five clients reply in a round; everyone's last reply counts."""
    model, clients = normal_means(5)
    found = fedppl.fit(model, clients, fedppl.Confidence(), rounds=4, reporting=3, random_seed=2, progressbar=False)
    table = found.idata["rounds"]
    taus, distances = [], []
    for name in found.client_ids:
        tau = table["confidence"].sel(client=name).values
        replied = np.flatnonzero(np.isfinite(tau))
        if len(replied):
            taus.append(tau[replied[-1]])
            distances.append(table["deviation"].sel(client=name).values[replied[-1]])
    shares, apart = plots.confidence(found)
    assert_allclose(shares.lines[1].get_xdata(), np.sort(taus) / np.sum(taus))
    assert_allclose(apart.lines[1].get_xdata(), np.sort(distances))
    assert shares.lines[1].get_ydata()[-1] == 1
    with pytest.raises(DeclarationError, match="Confidence"):
        plots.confidence(fit)


def test_confidence_of_clients_that_are_all_alike_is_drawn() -> None:
    """One client's own mean is what is shared: its distance is 0, which has no place on a log axis."""
    found = with_told(confidence=[2.0, 6.0], deviation=[0.0, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shares, apart = plots.confidence(found)
        apart.figure.canvas.draw()
    assert_array_equal(apart.lines[1].get_xdata(), [0, 0])
    low, high = apart.get_xlim()
    assert apart.get_xscale() == "linear" and low < 0 < high
    assert shares.get_xscale() == "log"
    assert_allclose(shares.lines[1].get_xdata(), [0.25, 0.75])


@pytest.mark.parametrize("name", ["confidence", "deviation"])
def test_confidence_without_numbers_is_refused(name: str) -> None:
    told = {"confidence": [2.0, 6.0], "deviation": [0.1, 0.2], name: [np.nan, np.nan]}
    with pytest.raises(DeclarationError, match="replied with finite numbers"):
        plots.confidence(with_told(**told))


def with_told(**values: list[float]) -> fedppl.Fit:
    """A fit of two clients that told these in its only round."""
    found = problems.fit_some_rounds(*normal_means(2), fedppl.Confidence(), rounds=1, random_seed=2, progressbar=False)
    given = {name: (("round", "client"), np.array([told])) for name, told in values.items()}
    again = dataclasses.replace(found)
    # A node of ArviZ 1.x takes no dims with values: its Dataset does.
    again.__dict__["idata"] = {"rounds": idata.as_dataset(found.idata, "rounds").assign(given)}
    return again


def test_a_device_graph_is_the_correlation(coupled: fedppl.Fit, fit: fedppl.Fit) -> None:
    axes = plots.device_graph(coupled)
    assert_allclose(axes.images[0].get_array(), coupled.idata["fit"]["correlation"].values)
    assert texts(axes.xaxis) == texts(axes.yaxis) == list(coupled.client_ids)
    assert len(axes.texts) == 9
    with pytest.raises(DeclarationError, match="HM1"):
        plots.device_graph(fit)
    assert "change_omega" in coupled.records[0].info
    assert len(plots.rounds(coupled)[0].lines) == 3


def test_prior_and_posterior_are_densities_of_what_was_declared_and_found(fit: fedppl.Fit) -> None:
    axes = plots.prior_posterior(fit)
    assert len(axes) == 3 and axes[2].get_xlabel() == "tau"
    for k, panel in enumerate(axes):
        before, after = (line for line in panel.lines)
        x, y = (np.asarray(values) for values in after.get_data())
        draws = fit.idata["posterior"][TAU if k == 2 else MU].values.reshape(4000, -1)[:, k % 2]
        assert np.trapezoid(y, x) == pytest.approx(1, abs=0.02)
        assert np.trapezoid(x * y, x) == pytest.approx(draws.mean(), abs=0.05 * draws.std())
        true = stats.halfnorm(0, 1) if k == 2 else stats.norm(0, 3)
        # 4000 draws and a bandwidth of 0.19 sds: an error of a few hundredths of the peak.
        grid, found = (np.asarray(values) for values in before.get_data())
        inner = grid > 0.1 if k == 2 else np.isfinite(grid)
        assert_allclose(found[inner], true.pdf(grid)[inner], atol=0.08 * true.pdf(0))
    with pytest.raises(DeclarationError, match="not Gaussian"):
        plots.prior_posterior(dataclasses.replace(fit, clients={}))
    with pytest.raises(DeclarationError, match="gamma"):
        plots.prior_posterior(fit, "gamma")


def test_a_gaussian_prior_needs_no_client(many: fedppl.Fit) -> None:
    (panel,) = plots.prior_posterior(dataclasses.replace(many, clients={}))
    x, y = panel.lines[0].get_data()
    assert_allclose(y, stats.norm(0, 10).pdf(x), rtol=0.15)


@pytest.mark.parametrize(("low", "high", "true"), [(0.0, 1.0, stats.uniform()), (0.0, np.inf, stats.expon())])
def test_densities_keep_their_mass_inside_bounds(low: float, high: float, true: Any) -> None:
    draws = true.rvs(20_000, random_state=np.random.default_rng(2))
    x = np.linspace(0.02, 0.98, 50)
    assert_allclose(density(draws, x, low, high), true.pdf(x), rtol=0.1)
    assert_array_equal(density(draws, np.array([-0.5]), low, high), [0.0])
    near = np.linspace(0.005, 0.3, 50)  # where logs are far apart: no jagged line there
    assert_allclose(density(stats.halfnorm.rvs(size=4000, random_state=3), near, positive=True), 0.79, atol=0.15)
    if high > 1:
        assert_allclose(density(draws, x, positive=True)[10:], true.pdf(x)[10:], rtol=0.1)
    assert_array_equal(density(np.ones(5), x), np.zeros(50))


# --- pictures of values -------------------------------------------------------------------------------------------


def test_curves_are_drawn_in_the_order_of_their_inputs() -> None:
    x = np.array([2.0, 0.0, 1.0])
    values = {"mean": x**2, "ci_low": x**2 - 1, "ci_high": x**2 + 1}
    predicted = xr.Dataset({k: ("row", v) for k, v in values.items()}, attrs={"client": "a", "probability": 0.9})
    axes = plots.curves(predicted, {"hours": x}, observed=([0.5], [0.25]))
    assert_array_equal(axes.lines[0].get_data(), [[0, 1, 2], [0, 1, 4]])
    assert_array_equal(axes.lines[1].get_data(), [[0.5], [0.25]])
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == -1 and band[:, 1].max() == 5
    assert axes.get_xlabel() == "hours" and "a" in axes.get_ylabel()
    with pytest.raises(DeclarationError, match="predicted=3"):
        plots.curves(3, x)
    for wrong in (x[:2], np.zeros((3, 2)), {"a": x, "b": x}):
        with pytest.raises(DataError):
            plots.curves(predicted, wrong)
    with pytest.raises(DataError, match="2 inputs and 1 outputs"):
        plots.curves(predicted, x, observed=([1, 2], [1]))


def test_reliability_takes_one_probability_of_two_classes() -> None:
    p, right = np.array([0.9, 0.2, 0.6, 0.7]), np.array([True, False, False, True])
    one = plots.reliability(p, right, bins=5)
    two = plots.reliability(np.column_stack([1 - p, p]), right.astype(int), bins=5)
    for a, b in zip(one, two, strict=True):
        assert_array_equal([bar.get_height() for bar in a.patches], [bar.get_height() for bar in b.patches])
    expected = fedppl.metrics.reliability(np.column_stack([1 - p, p]), right.astype(int), bins=5)
    assert_allclose([bar.get_height() for bar in one[0].patches], np.nan_to_num(expected.accuracy))
    with pytest.raises(DataError):
        plots.reliability(p, right[:2])
    assert len(plt.get_fignums()) == 2  # none for what was refused


def test_calibration_is_drawn_with_names() -> None:
    found = xr.Dataset(
        {"pit": (("data_set", "rows"), np.linspace(0, 1, 10).reshape(5, 2))}, coords={"rows": ["a", "b"]}
    )
    axes = plots.calibration(found)
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    assert plots.calibration(found, ax=axes) is axes
    pit = np.tile(np.linspace(0.01, 0.99, 50)[:, None], 12)
    pit[:, 3] /= 2  # leaves the band: of many it alone has a name
    rows = xr.Dataset({"pit": (("data_set", "rows"), pit)}, coords={"rows": [f"mu[{k}]" for k in range(12)]})
    named = [text.get_text() for text in plots.calibration(rows).get_legend().get_texts()]
    assert named == ["mu[3]", "95 % band", "11 others"]


# --- many clients, one client, no matplotlib ----------------------------------------------------------------------


def test_names_of_many_clients_stay_apart(many: fedppl.Fit) -> None:
    drawn = [plots.forest(many, population="mu", draws=20), plots.rounds(many), plots.quality(many)]
    drawn += [plots.influence(many)]
    for axes in drawn:
        assert all(apart(panel) for panel in axes)
        named = next(panel for panel in axes if texts(panel.yaxis) and "…" in texts(panel.yaxis)[0])
        assert len(set(texts(named.yaxis))) == 40  # cut in the middle, not where they differ
    figure, axes = plt.subplots(1, 2, figsize=(6, 2))  # no room for 40
    plots.influence(many, ax=axes)
    assert apart(axes[0]) and len(texts(axes[0].yaxis)) < 40 and "1 in" in axes[0].get_ylabel()


def test_one_client_is_enough() -> None:
    found = fedppl.fit(*normal_means(1), fedppl.EP(), progressbar=False, random_seed=1)
    for axes in (plots.forest(found), plots.rounds(found), plots.quality(found), plots.influence(found)):
        assert all(apart(panel) for panel in axes)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, fit: fedppl.Fit) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedppl\[plots\]'"):
        plots.rounds(fit)


@pytest.mark.parametrize(
    "draw", [plots.forest, plots.rounds, plots.quality, plots.influence, plots.device_graph, plots.prior_posterior]
)
def test_what_is_no_fit_is_refused(draw: Any) -> None:
    with pytest.raises(DeclarationError, match="fit is int; pass what fedppl.fit returned"):
        draw(3)


# --- a page about a fit -------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def has(self, text: str) -> bool:
        return any(text in one for one in self.texts)


SAFE = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "strong", "br", "div", "small"}
SAFE |= {"table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "img"}


@pytest.fixture(scope="module")
def page(fit: fedppl.Fit, tmp_path_factory: pytest.TempPathFactory) -> str:
    before = plt.get_fignums()
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert fit.report(path, population={THETA: MU}, title=f"Trial {EVIL}") == path
    assert plt.get_fignums() == before and not path.with_name("report.html.partial").exists()
    return path.read_text(encoding="utf-8")


def test_a_page_has_no_markup_but_ours_and_loads_nothing(page: str) -> None:
    read = Page(page)
    assert set(read.tags) <= SAFE
    assert ("meta", "content", "width=device-width, initial-scale=1") in read.attributes  # small screens
    assert read.tags.count("table") == page.count('<div class="wide"><table') + page.count(
        '<div class="wide text"><table'
    )
    assert {(tag, name) for tag, name, _ in read.attributes if name.startswith("on") or name == "href"} == set()
    assert all(value.startswith("data:image/png;base64,") for _, name, value in read.attributes if name == "src")
    assert "http" not in re.sub(r'src="[^"]*"', "", page).replace("http-equiv", "")
    assert read.has(f"{EVIL} & 0") and read.has(f"Trial {EVIL}")


def test_a_page_says_first_how_the_fit_ended(page: str, fit: fedppl.Fit) -> None:
    body = page.partition("<body>")[2]
    assert body.index("converged") < body.index("<table>")
    assert body.index("converged") < body.index("<img")


def test_a_page_has_the_fits_numbers_pictures_and_settings(page: str, fit: fedppl.Fit) -> None:
    read = Page(page)
    for value in fit.summary()["mean"]:
        assert f"<td>{value:.4g}</td>" in page
    for text in (*fit.algorithm.settings.values(), fedppl.__version__, pm.__version__, "12", "13", "14"):
        assert read.has(text)
    assert "<tr><th>seed</th><td>1</td></tr>" in page
    assert re.search("<td>log</td><td>HalfNormal.{0,20}1", page)
    pictures = [value for _, name, value in read.attributes if name == "src"]
    assert len(pictures) == 5  # all but the device graph
    for one in pictures:
        assert base64.b64decode(one.partition("base64,")[2]).startswith(b"\x89PNG")


def test_a_page_has_nothing_of_clients_rows(page: str) -> None:
    text = re.sub(r'src="[^"]*"', "", page)
    rows = [float(value) for one in data().values() for array in one.values() for value in np.ravel(array)]
    for value in {SENTINEL, *rows}:
        assert f"{value:.5f}" not in text and f"{value:.6g}" not in text


def test_a_page_of_what_was_broken_off_says_so(tmp_path: Path) -> None:
    with pytest.warns(fedppl.ConvergenceWarning):
        model, clients = problems.regression(3)
        broken = fedppl.fit(model, clients, fedppl.EP(), callback=lambda step: True, progressbar=False, random_seed=1)
    text = broken.report(tmp_path / "broken.html").read_text(encoding="utf-8")
    assert "has no posterior" in text and "The fit did not converge" in text
    assert text.count("<img") == 2  # rounds and quality


def test_a_page_of_a_fit_that_was_loaded_without_data_has_what_all_share(by_ep: fedppl.Fit, tmp_path: Path) -> None:
    by_ep.save(tmp_path / "run.nc")
    again = fedppl.load(tmp_path / "run.nc", by_ep.declaration, by_ep.algorithm)
    text = again.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("<img") == 3 and "Not drawn: " in text and "with data elsewhere" in text
    by_ep.save(tmp_path / "more.nc", include="clients")
    more = fedppl.load(tmp_path / "more.nc", by_ep.declaration, by_ep.algorithm)
    own = [by_ep.client(name)["posterior"]["noise"].values.mean() for name in by_ep.client_ids]
    assert_allclose(dots(plots.forest(more, "noise")[0]), own)
    assert len(plots.forest(more)) == 3
    for value in by_ep.summary()["mean"]:
        assert f"<td>{value:.4g}</td>" in text


def test_newer_containers_of_arviz_are_drawn_alike(fit: fedppl.Fit) -> None:
    tree = dataclasses.replace(fit)
    groups = {name: fit.idata[name] for name in ("posterior", "fit", "rounds")}
    tree.__dict__["idata"] = xr.DataTree.from_dict(groups)
    for draw in (plots.rounds, plots.quality, plots.prior_posterior):
        for one, two in zip(draw(fit), draw(tree), strict=True):
            for a, b in zip(one.lines, two.lines, strict=True):
                assert_array_equal(a.get_xydata(), b.get_xydata())


def test_pages_of_other_algorithms_have_what_applies(coupled: fedppl.Fit, tmp_path: Path) -> None:
    text = coupled.report(tmp_path / "coupled.html", var_names="beta").read_text(encoding="utf-8")
    assert "How alike clients are" in text and "share no parameters" in text
    with pytest.raises(DeclarationError, match="gamma"):
        coupled.report(tmp_path / "coupled.html", var_names="gamma")
    with pytest.raises(DeclarationError, match="conflict=3|no posterior"):
        coupled.report(tmp_path / "coupled.html", conflict=3)
    for wrong in (3, tmp_path / "nowhere" / "report.html"):
        with pytest.raises(DeclarationError, match="path="):
            coupled.report(wrong)  # type: ignore[arg-type]


# --- notebooks ----------------------------------------------------------------------------------------------------


def test_what_is_shown_in_a_notebook_is_short_and_escaped(fit: fedppl.Fit) -> None:
    step = next(iter(fedppl.rounds(fit.declaration, data(), fedppl.EP(), rounds=1)))
    for one in (fit, fit.declaration, fit.algorithm, step):
        assert len(repr(one)) < 300 and "\n" not in repr(one)
        shown = one._repr_html_()
        assert set(Page(shown).tags) <= {
            "div",
            "strong",
            "span",
            "p",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "code",
        }
    assert repr(step) == "Round(1, running, 3 of 3 replies)"
    shown = Page(fit._repr_html_())
    assert shown.has("converged") and shown.has(MU) and shown.has(f"{fit.summary()['mean'].iloc[0]:.4g}")
    assert Page(fit.algorithm._repr_html_()).has(fit.algorithm.settings["points"])
    assert Page(fit.declaration._repr_html_()).has("builder")


def test_a_fit_without_a_posterior_is_shown_too(coupled: fedppl.Fit) -> None:
    assert "HM1" in coupled._repr_html_() and "<table>" not in coupled._repr_html_()


def test_a_formulas_effects_stand_for_what_they_are_before_they_are_scaled() -> None:
    group = xr.Dataset({name: (("chain", "draw"), np.zeros((1, 2))) for name in ("site_z", "site_effects", "z", "a_z")})
    assert [_effects(group, name) for name in ("site_z", "z", "a_z")] == ["site_effects", "z", "a_z"]
