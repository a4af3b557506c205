"""Predictions, selection, coefficients and latent curves of a fitted model, against draws and brute force."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import arviz as az
import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import norm

import fedppl
from fedppl import curves
from fedppl.coregional.bound import Globals, unit_bound
from fedppl.coregional.bound import curves as moments
from fedppl.coregional.unit import Coefficients, Fitted, best_unit, coefficient_covariance, predictive, settled, unpack
from fedppl.coregional.view import unit_of
from fedppl.models import fedlmc_ss
from fedppl.types import DataError, DeclarationError
from tests.coregional.test_lmc_bound import LATENTS, POINTS, dense_matrices, difference, units
from tests.support import problems

NEW = np.array([-0.2, 0.05, 0.4, 0.77, 1.3])


@functools.cache
def fitted(rounds: int = 8, algorithm: str = "Ascent") -> fedppl.Fit:
    """Undecided on purpose: a few rounds of selection."""
    settings: dict[str, Any] = {"warmup": 4} if algorithm == "Ascent" else {}
    build = getattr(curves, algorithm)(**settings)
    return problems.fit_some_rounds(*problems.coregional(), build, rounds=rounds, progressbar=False, random_seed=2)


@functools.cache
def newcomer() -> dict[str, Any]:
    x = np.linspace(0, 0.6, 9)
    return {"X": x, "y": 0.8 * np.sin(5 * x) - 0.4 * np.cos(8 * x) + 0.1 * np.random.default_rng(6).normal(size=9)}


def assert_moments(draws: Any, mean: Any, sd: Any) -> None:
    """Means within 4 standard errors, variances within 5 of theirs, which follow from the draws' own fourth moment."""
    count, variance = len(draws), draws.var(axis=0)
    assert_allclose((draws.mean(axis=0) - mean) / np.sqrt(variance / count), 0, atol=4)
    fourth = np.mean((draws - draws.mean(axis=0)) ** 4, axis=0)
    assert_allclose((variance - sd**2) / np.sqrt((fourth - variance**2) / count), 0, atol=5)


# --- moments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [[0.5, 0.3, 0.9], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
def test_the_law_of_total_variance_is_that_of_draws(gamma: list[float]) -> None:
    """Indicators, coefficients that are correlated, inducing variables that are, and what those leave open."""
    rng, count = np.random.default_rng(3), 60_000
    root, root_w = (rng.normal(size=(n, n)) / np.sqrt(n) for n in (LATENTS * POINTS, LATENTS))
    joint = 0.5 * root @ root.T + 0.1 * np.eye(len(root))
    blocks = np.einsum("lqlp->lqp", joint.reshape(LATENTS, POINTS, LATENTS, POINTS))
    mean_v = rng.normal(size=(LATENTS, POINTS))
    shared = Globals(mean_v, blocks, np.array(gamma), np.log([0.2, 0.3, 0.5]), 0.1)
    own = Coefficients(rng.normal(size=LATENTS), 0.5 * root_w @ root_w.T + 0.1 * np.eye(LATENTS), -1.0)
    design = units()["8 rows"].view(unit_of).at(shared.kernel, {"X": NEW})
    mean, variance = predictive(design, Fitted(shared, joint), own)

    v = rng.multivariate_normal(mean_v.ravel(), joint, size=count).reshape(count, LATENTS, POINTS)
    w = rng.multivariate_normal(own.mean, own.covariance, size=count) * (rng.random((count, LATENTS)) < gamma)
    f = np.einsum("sl,lnq,slq->sn", w, design.projection, v, optimize=True)
    f += np.sqrt(w**2 @ design.conditional) * rng.normal(size=f.shape)
    assert_moments(f, mean, np.sqrt(variance))


def test_the_covariance_of_coefficients_is_that_of_a_regression_on_curves_that_are_not_known() -> None:
    """(Σ_n E[h h'] / σ² + I / σ_w²)⁻¹, with E[h h'] from draws of the latent functions h at the unit's rows."""
    rng, count = np.random.default_rng(4), 40_000
    root = rng.normal(size=(LATENTS * POINTS,) * 2) / np.sqrt(LATENTS * POINTS)
    joint, mean = 0.5 * root @ root.T, rng.normal(size=(LATENTS, POINTS))
    design = units()["8 rows"].view(unit_of).design(np.log([0.2, 0.3, 0.5]))
    blocks = np.einsum("lqlp->lqp", joint.reshape(LATENTS, POINTS, LATENTS, POINTS))
    shared = Globals(mean, blocks, np.ones(LATENTS), np.log([0.2, 0.3, 0.5]), 0.3)
    found = coefficient_covariance(design, moments(design, shared), joint, 0.3, -0.7)
    v = rng.multivariate_normal(mean.ravel(), joint, size=count).reshape(count, LATENTS, POINTS)
    h = np.einsum("lnq,slq->sln", design.projection, v)
    h += np.sqrt(design.conditional) * rng.normal(size=h.shape)
    second = np.einsum("sln,skn->lk", h, h, optimize=True) / count
    precision = second * np.exp(1.4) + np.exp(-0.6) * np.eye(LATENTS)
    assert_allclose(found @ precision, np.eye(LATENTS), atol=6 / np.sqrt(count) * np.linalg.cond(precision) ** 0.5)


def function_draws(posterior: Any, inputs: Any, rng: np.random.Generator) -> Any:
    """f at new inputs, (draw, row), from draws of v, the indicators and w, with matrices written out in the tests."""
    values = {name: posterior[name].values.reshape(-1, *posterior[name].shape[2:]) for name in posterior.data_vars}
    projection, conditional = dense_matrices(inputs, np.linspace(0, 1, POINTS), np.log(values["lengthscale"][0]))
    weight = values["w"] * values["included"]
    f = np.einsum("sl,lnq,slq->sn", weight, projection, values["v"], optimize=True)
    return f + np.sqrt(weight**2 @ conditional) * rng.normal(size=f.shape)


@pytest.mark.parametrize("algorithm", ["Ascent", "Averaging", "Gradient"])
def test_predictions_are_the_moments_of_a_clients_draws(algorithm: str) -> None:
    fit = fitted(algorithm=algorithm)
    drawn = fit.client("unit 1", draws=5000, chains=2, random_seed=4)["posterior"]
    found = curves.predict(fit, "unit 1", {"X": NEW})
    f = function_draws(drawn, NEW, np.random.default_rng(5))
    assert_moments(f, found["mean"].values, found["function_sd"].values)
    noise = drawn["noise_sd"].values.ravel()
    assert_allclose(noise, noise[0])
    assert_allclose(found["sd"] ** 2, found["function_sd"] ** 2 + noise[0] ** 2, rtol=1e-6)


def test_predictions_of_a_new_unit_are_the_moments_of_its_draws() -> None:
    """With the selected functions for certain and no other, and its own rows heard."""
    fit = fitted()
    drawn = fit.new_client(newcomer(), draws=5000, chains=2, random_seed=4)["posterior"]
    chosen = curves.selection(fit)["selected"].values
    assert_array_equal(np.unique(drawn["included"].values.reshape(-1, LATENTS), axis=0), [chosen])
    found = curves.predict(fit, newcomer(), {"X": NEW})
    f = function_draws(drawn, NEW, np.random.default_rng(5))
    assert_moments(f, found["mean"].values, found["function_sd"].values)
    assert found.attrs["client"] == "new unit"


@problems.few_rounds
def test_a_client_that_was_never_heard_is_read_as_a_new_unit() -> None:
    """Nothing of its rows is in what is shared, so it does not matter that it is enrolled."""
    model, clients = problems.coregional()
    fit = fedppl.fit(
        model,
        clients,
        fedppl.curves.Ascent(warmup=4),
        rounds=8,
        participation=lambda ids, rng: tuple(k for k in ids if k != "unit 1"),
        progressbar=False,
        random_seed=2,
    )
    found = curves.predict(fit, "unit 1", {"X": NEW})
    drawn = fit.client("unit 1", draws=5000, chains=2, random_seed=4)["posterior"]
    f = function_draws(drawn, NEW, np.random.default_rng(5))
    assert_moments(f, found["mean"].values, found["function_sd"].values)
    new = curves.predict(fit, clients["unit 1"], {"X": NEW})
    assert_allclose(found["mean"], new["mean"], rtol=1e-6)


def test_fixed_functions_are_those_of_the_fit() -> None:
    """Equation 17: one latent function alone gives a curve of its shape; otherwise the rows change it."""
    fit = fitted()
    shape = curves.latent_curves(fit, {"X": NEW})["mean"].sel(latent=0).values
    fixed, own = (
        curves.predict(fit, newcomer(), {"X": NEW}, latents=[0], fixed=fixed)["mean"].values / shape
        for fixed in (True, False)
    )
    assert_allclose(fixed, fixed[0], rtol=1e-9)
    assert np.ptp(own) > 1e-4 * np.abs(own).max()


def test_a_new_units_own_rows_have_their_say_as_data_beside_a_prior() -> None:
    """q(v) of the others is the prior: the mean it ends at is highest for the unit's likelihood with that prior."""
    message = fitted().algorithm.result.final_message(fitted().state, "new unit")
    before = unpack(message)
    view = problems.coregional()[0].enrol({"new unit": newcomer()})["new unit"].view(unit_of)
    own, after = settled(view, before, None)
    design, precision = view.design(before.shared.kernel), np.linalg.inv(before.joint)
    state, _ = best_unit(design, after.shared, view.noise, own.log_noise_sd, 500)

    def value(mean: Any) -> float:
        shared = after.shared._replace(mean=mean.reshape(LATENTS, POINTS))
        away = mean - before.shared.mean.ravel()
        return float(
            unit_bound(design, shared, state, view.noise, np.zeros(LATENTS), 0.0) - 0.5 * away @ precision @ away
        )

    slope, start = (difference(value, at.mean.ravel()) for at in (after.shared, before.shared))
    assert np.max(np.abs(slope)) < 1e-3 * np.max(np.abs(start))
    assert value(after.shared.mean.ravel()) > value(before.shared.mean.ravel())
    # more is known of the functions than before
    assert np.all(np.diag(after.joint) < np.diag(before.joint) + 1e-12)


def test_predictions_are_those_that_pymc_draws() -> None:
    """From the declared model at new inputs, noise included."""
    fit = fitted()
    drawn = fit.client("unit 2", predict={"X": NEW}, draws=600, chains=1, random_seed=4)["predictions"]["output"]
    found = curves.predict(fit, "unit 2", {"X": NEW})
    assert_moments(drawn.values[0], found["mean"].values, found["sd"].values)


def test_a_fit_predicts_what_it_has_seen_and_what_it_has_not() -> None:
    """The unit's own curve between its rows; a new unit's where it has none, better than its own mean does."""
    fit, x = fitted(40), np.linspace(0.05, 0.95, 30)
    for name, data in problems.coregional()[1].items():
        basis = np.column_stack([np.sin(5 * data["X"]), np.cos(8 * data["X"])])
        heights = np.linalg.lstsq(basis, data["y"], rcond=None)[0]
        truth = np.column_stack([np.sin(5 * x), np.cos(8 * x)]) @ heights
        inside = (x > data["X"].min()) & (x < data["X"].max())
        found = curves.predict(fit, name, {"X": x})["mean"].values
        assert np.sqrt(np.mean((found - truth)[inside] ** 2)) < 0.15
    unseen = np.linspace(0.65, 0.95, 10)
    truth = 0.8 * np.sin(5 * unseen) - 0.4 * np.cos(8 * unseen)
    found = curves.predict(fit, newcomer(), {"X": unseen})
    assert np.sqrt(np.mean((found["mean"].values - truth) ** 2)) < 0.3 * np.sqrt(np.mean(truth**2))
    # less is known where the unit has no rows
    seen = curves.predict(fit, newcomer(), {"X": newcomer()["X"]})
    assert found["function_sd"].values.max() > 1.5 * seen["function_sd"].values.mean()


# --- what is returned ---------------------------------------------------------------------------------------------


def test_intervals_are_as_wide_as_their_probability_says() -> None:
    fit = fitted()
    narrow, wide = (curves.predict(fit, "unit 0", {"X": NEW}, ci_prob=p) for p in (0.5, 0.95))
    for found, probability in ((narrow, 0.5), (wide, 0.95)):
        z = norm.ppf(0.5 + probability / 2)
        assert_allclose(found["ci_high"] - found["mean"], z * found["sd"], rtol=1e-12)
        assert_allclose(found["mean"] - found["ci_low"], z * found["sd"], rtol=1e-12)
        assert found.attrs == {"client": "unit 0", "ci_prob": probability}
    assert_array_equal(narrow["mean"], wide["mean"])
    assert narrow["mean"].dims == ("row",) and narrow.sizes["row"] == len(NEW)


def test_only_the_latent_functions_asked_for_are_used() -> None:
    """One alone: the unit's curve is that latent function times a number. In any order, and twice is once."""
    fit = fitted()
    alone = curves.predict(fit, "unit 0", {"X": NEW}, latents=[1])["mean"].values
    ratio = alone / curves.latent_curves(fit, {"X": NEW})["mean"].sel(latent=1).values
    assert_allclose(ratio, ratio[0], rtol=1e-9)
    some = [curves.predict(fit, "unit 0", {"X": NEW}, latents=chosen) for chosen in ([0, 2], [2, 0, 2])]
    xr.testing.assert_identical(*some)
    assert np.max(np.abs(some[0]["mean"].values - alone)) > 0.01


def test_selection_names_what_is_used_and_what_the_kernels_share() -> None:
    fit = fitted()
    found = curves.selection(fit)
    assert_array_equal(found["latent"], np.arange(LATENTS))
    gamma = found["inclusion_probability"].values
    assert_array_equal(found["selected"], gamma > 0.5)
    assert_array_equal(gamma, fit.idata["fit"]["inclusion_probability"])
    assert_array_equal(found["lengthscale"], np.exp(fit.state.shared.kernel))
    assert found["lengthscale"].dims == ("latent",) and found["slab_sd"].dims == ()
    # of the 4000 draws of each indicator
    drawn = fit.idata["posterior"]["included"].mean(("chain", "draw"))
    assert_allclose(drawn, gamma, atol=4 * np.sqrt(0.25 / 4000))


def test_coefficients_are_those_of_the_clients_here() -> None:
    fit = fitted()
    found = curves.coefficients(fit)
    assert found["mean"].dims == found["sd"].dims == found["expected"].dims == ("client", "latent")
    assert list(found["client"].values) == list(fit.clients)
    gamma = curves.selection(fit)["inclusion_probability"].values
    assert_allclose(found["expected"], gamma * found["mean"], rtol=1e-12)
    drawn = fit.client("unit 1", draws=4000, chains=1)["posterior"]
    used = np.argmax(gamma)
    w = drawn["w"].values[0][drawn["included"].values[0][:, used] == 1, used]
    row = found.sel(client="unit 1", latent=used)
    assert_moments(w[:, None], row["mean"].values, row["sd"].values)
    assert_allclose(drawn["noise_sd"].values.mean(), row["noise_sd"], rtol=1e-6)
    one = curves.coefficients(fit, ["unit 2"])
    xr.testing.assert_identical(one, found.sel(client=["unit 2"]))
    with pytest.raises(DeclarationError, match=r"\['unit 2'\] for one"):
        curves.coefficients(fit, "unit 2")


def test_latent_curves_are_those_of_the_draws() -> None:
    fit = fitted()
    found = curves.latent_curves(fit, {"X": NEW})
    assert found["mean"].dims == found["sd"].dims == ("latent", "row")
    draws = fit.shared(draws=4000, chains=1)["posterior"]
    projection, conditional = dense_matrices(NEW, np.linspace(0, 1, POINTS), fit.state.shared.kernel)
    rng = np.random.default_rng(7)
    h = np.einsum("lnq,slq->sln", projection, draws["v"].values[0])
    h += np.sqrt(conditional) * rng.normal(size=h.shape)
    # The draws of v are correlated across latent functions; the margins are wider for it, never narrower.
    assert_allclose((h.mean(axis=0) - found["mean"]) / (h.std(axis=0) / np.sqrt(4000)), 0, atol=4.5)
    assert np.all(h.std(axis=0) > found["sd"].values * (1 - 5 / np.sqrt(8000)))


def test_arviz_summarises_what_is_shared_and_what_is_a_clients() -> None:
    fit = fitted()
    assert f"v[{LATENTS - 1}, {POINTS - 1}]" in az.summary(fit.idata, var_names=["v"], kind="stats").index
    assert len(az.summary(fit.idata, kind="stats")) == LATENTS * (POINTS + 2) + 1
    assert len(az.summary(fit.client("unit 0", draws=50), var_names=["w", "noise_sd"], kind="stats")) == LATENTS + 1


# --- without selection, and refusals ------------------------------------------------------------------------------


@problems.few_rounds
@pytest.mark.slow
def test_everything_works_without_selection() -> None:
    """FedLMC: no indicator is declared, every γ is 1."""
    builder = functools.partial(fedlmc_ss.unit, inducing=np.linspace(0, 1, 6), latents=2, inclusion=None)
    model = fedppl.FederatedModel(builder, fedlmc_ss.SHARED_WITHOUT_SELECTION)
    clients = problems.coregional()[1]
    for algorithm in (fedppl.curves.Ascent(), fedppl.curves.Averaging(), fedppl.curves.Gradient()):
        fit = fedppl.fit(model, clients, algorithm, rounds=6, progressbar=False, random_seed=2)
        assert_array_equal(curves.selection(fit)["inclusion_probability"], 1.0)
        found = curves.predict(fit, "unit 1", {"X": NEW})
        drawn = fit.client("unit 1", draws=4000, chains=1)["posterior"].assign(included=lambda d: 1.0 + 0.0 * d["w"])
        f = function_draws(drawn, NEW, np.random.default_rng(5))
        assert_moments(f, found["mean"].values, found["function_sd"].values)
        assert np.all(np.isfinite(curves.predict(fit, newcomer(), {"X": NEW})["sd"]))
        assert curves.coefficients(fit)["mean"].shape == (3, 2)
        assert len(az.summary(fit.idata, kind="stats")) == 2 * (6 + 1) + 1


@pytest.mark.parametrize(
    ("unit", "inputs", "settings", "error", "message"),
    [
        ("unit 0", {"X": NEW}, {"ci_prob": 1.0}, DeclarationError, "ci_prob=1.0"),
        ("unit 0", {"X": NEW}, {"latents": [3]}, DeclarationError, "latents=[3] must be some of the numbers 0 to 2"),
        ("unit 0", {"X": NEW}, {"latents": []}, DeclarationError, "latents=[]"),
        ("nobody", {"X": NEW}, {}, DeclarationError, "client 'nobody' is not in this process"),
        (3, {"X": NEW}, {}, DeclarationError, "unit is int"),
        ("unit 0", {"x": NEW}, {}, DataError, "new inputs ['x'] must be ['X']"),
        ("unit 0", {}, {}, DataError, "new inputs [] must be ['X']"),
        ("unit 0", {"X": NEW[:, None]}, {}, DataError, "'X' has shape (5, 1)"),
        ("unit 0", {"X": [0.0, np.nan]}, {}, DataError, "holds nan at index (1,); drop or impute"),
        ("unit 0", {"X": ["p"]}, {}, DataError, "has dtype <U1 (a list), which is not numeric"),
        ("unit 0", {"X": NEW + 1j}, {}, DataError, "has dtype complex128 (a ndarray), which is not numeric and real"),
        ("unit 0", {"X": np.ma.array(NEW, mask=NEW > 1)}, {}, DataError, "'X' has masked values"),
        ("unit 0", {"X": []}, {}, DataError, "'X' has shape (0,), the client's"),
        ("unit 0", {"X": [[0.0], [1.0, 2.0]]}, {}, DataError, "'X' is no array"),
        ("unit 0", {"X": NEW}, {"latents": [True, False]}, DeclarationError, "latents=[True, False] must be some of"),
        ("unit 0", {"X": NEW}, {"latents": ["0"]}, DeclarationError, "latents=['0'] must be some of"),
        ("unit 0", {"X": NEW}, {"latents": [[0]]}, DeclarationError, "latents=[[0]] must be some of"),
        ("unit 0", {"X": NEW}, {"latents": [0.5]}, DeclarationError, "latents=[0.5] must be some of"),
        ("unit 0", {"X": NEW}, {"fixed": "yes"}, DeclarationError, "fixed='yes' must be True or False"),
        ("unit 0", np.zeros(3), {}, DataError, "new inputs are ndarray; pass a mapping"),
        ("unit 0", {"X": [0.0]}, {"latents": 0}, DeclarationError, "latents=0 must be some of"),
        ("unit 0", {"X": [0.0]}, {"ci_prob": "a"}, DeclarationError, "ci_prob='a' must lie"),
        ({"X": NEW}, {"X": NEW}, {}, DataError, "'new unit'"),
        ({"X": [0.0, np.nan], "y": [0.0, 1.0]}, {"X": NEW}, {}, DataError, "holds nan"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    unit: Any, inputs: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        curves.predict(fitted(), unit, inputs, **settings)


def test_a_fit_of_another_kind_has_no_curves() -> None:
    """Such as one whose clients are told a point, in the end."""
    fit = fitted()
    result = fit.algorithm.result._replace(final_message=lambda state, client_id: {"phi": np.zeros(3)})
    fit = dataclasses.replace(fit, algorithm=fit.algorithm._replace(name="FedAvg", result=result))
    for read in (
        lambda: curves.predict(fit, "unit 0", {"X": NEW}),
        lambda: curves.selection(fit),
        lambda: curves.coefficients(fit),
        lambda: curves.latent_curves(fit, {"X": NEW}),
    ):
        with pytest.raises(
            DeclarationError, match="FedAvg does not fit a linear model of coregionalisation; use fedppl"
        ):
            read()


def test_coefficients_of_nobody_are_refused() -> None:
    with pytest.raises(DeclarationError, match="no client in this process"):
        curves.coefficients(fitted(), [])


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ("ab", "clients='ab' must be a list of ids"),
        (3, "clients=3 must be a list of ids"),
        ([3], "clients=[3] must be a list of ids"),
    ],
)
def test_clients_are_a_list_of_ids(clients: Any, message: str) -> None:
    """Letters of a text may be clients too."""
    with pytest.raises(DeclarationError, match=re.escape(message)):
        curves.coefficients(fitted(), clients)


def test_what_is_no_fit_has_no_curves() -> None:
    for read in (
        lambda: curves.predict(None, "unit 0", {"X": NEW}),  # type: ignore[arg-type]
        lambda: curves.selection(None),  # type: ignore[arg-type]
        lambda: curves.coefficients(None),  # type: ignore[arg-type]
        lambda: curves.latent_curves(None, {"X": NEW}),  # type: ignore[arg-type]
    ):
        with pytest.raises(DeclarationError, match="fit is NoneType; pass what fedppl.fit returned"):
            read()


def test_a_curve_is_drawn_with_its_interval_and_its_rows() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    fit, x = fitted(), np.linspace(-0.5, 1.5, 21)
    name = fit.client_ids[0]
    figure, axes = plt.subplots()
    assert curves.plot(fit, name, {"X": x}, ci_prob=0.5, ax=axes) is axes
    found = curves.predict(fit, name, {"X": x}, ci_prob=0.5)
    assert_array_equal(axes.lines[0].get_ydata(), found["mean"])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert_allclose([band.min(), band.max()], [found["ci_low"].min(), found["ci_high"].max()])
    own = fit.clients[name].arrays
    assert_array_equal(axes.lines[1].get_data(), [np.ravel(own["X"]), own["y"]])
    assert_array_equal(curves.plot(fit, newcomer(), {"X": x}, ax=axes).lines[-1].get_ydata(), newcomer()["y"])
    plt.close(figure)
