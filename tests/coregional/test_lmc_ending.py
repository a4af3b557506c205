"""When a coordinate ascent ends: at the maximum that direct optimisation finds, in any units, and with what is left."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.linalg import block_diag, solve_triangular
from scipy.optimize import minimize
from scipy.stats import norm

import fedppl
from fedppl import curves
from fedppl.coregional.algorithms.ending import Left, Trail, gained_of_late, left_after, log_prior, longer, report
from fedppl.coregional.bound import Globals
from fedppl.coregional.view import unit_of
from fedppl.models import fedlmc_ss
from tests.support import problems
from tests.support.markers import slow_but

LATENTS, POINTS = 2, np.linspace(0, 1, 8)
NEW = np.linspace(0, 1, 9)


class Case(NamedTuple):
    """Units' data, and the unit of their outputs."""

    data: dict[str, dict[str, Any]]
    scale: float = 1.0


def curve(rng: np.random.Generator, rows: int, height: float) -> dict[str, Any]:
    x = np.sort(rng.uniform(0, 1, rows))
    return {"X": x, "y": height * np.sin(6 * x) + 0.1 * rng.normal(size=rows)}


def case(name: str) -> Case:
    rng = np.random.default_rng(3)
    if name == "identical":
        one = curve(rng, 20, 1.0)
        return Case({key: dict(one) for key in "abc"})
    if name == "one":
        return Case({"a": curve(rng, 30, 1.0)})
    if name == "unequal":
        return Case({"a": curve(rng, 30, 1.0), "b": curve(rng, 3, -0.7), "c": curve(rng, 1, 0.5)})
    if name == "creeping":  # two coefficients trade places slowly
        rng, data = np.random.default_rng(21), {}
        for key in "ab":
            x, (one, other) = np.sort(rng.uniform(0, 1, 25)), rng.normal(size=2)
            y = one * np.sin(6 * x) + other * np.cos(9 * x + 1) + 0.1 * rng.normal(size=25)
            data[key] = {"X": x, "y": y}
        return Case(data)
    scale = float(name)
    two = {"a": curve(rng, 30, 1.0), "b": curve(rng, 25, -0.7)}
    return Case({key: {"X": one["X"], "y": scale * one["y"]} for key, one in two.items()}, scale)


@functools.cache
def fitted(name: str) -> fedppl.Fit:
    """With default settings."""
    data, scale = case(name)
    builder = functools.partial(
        fedlmc_ss.unit,
        inducing=POINTS,
        latents=LATENTS,
        lengthscale=0.3,
        inclusion=None,
        slab_sd=scale,
        noise_sd=0.3 * scale,
    )
    model = fedppl.FederatedModel(builder, fedlmc_ss.SHARED_WITHOUT_SELECTION)
    return fedppl.fit(model, data, curves.PointAscent(), rounds=200, progressbar=False, random_seed=1)


def log_joint(x: Any, data: dict[str, dict[str, Any]], scale: float) -> float:
    """log p of length-scales, coefficients and noises, with q(v) at its best for them; the model as it is declared."""
    names = list(data)
    lengthscale, log_sd = np.exp(x[:LATENTS]), x[-len(names) :]
    w = x[LATENTS : -len(names)].reshape(len(names), LATENTS)
    value = norm.logpdf(x[:LATENTS], np.log(0.3), 1.0).sum() + norm.logpdf(w, 0, scale).sum()
    value += norm.logpdf(log_sd, np.log(0.3 * scale), 2.0).sum()
    precision, linear = np.zeros((LATENTS * len(POINTS),) * 2), np.zeros(LATENTS * len(POINTS))
    for one, coefficients, s in zip(data.values(), w, log_sd, strict=True):
        projections, left = [], 0.0
        for length, height in zip(lengthscale, coefficients, strict=True):
            within = np.exp(-0.5 * ((POINTS[:, None] - POINTS) / length) ** 2) + 1e-6 * np.eye(len(POINTS))
            across = np.exp(-0.5 * ((POINTS[:, None] - one["X"]) / length) ** 2)
            white = solve_triangular(np.linalg.cholesky(within), across, lower=True)
            projections.append(height * white.T)
            left += height**2 * np.maximum(1 - np.sum(white**2, axis=0), 1e-10).sum()
        wide, rate = np.hstack(projections), np.exp(-2 * s)
        precision += rate * wide.T @ wide
        linear += rate * wide.T @ one["y"]
        value += norm.logpdf(one["y"], 0, np.exp(s)).sum() - 0.5 * rate * left
    # q(v) = Π N(m_l, S_l): the terms of E log p(y | v) − KL(q ‖ N(0, I)) that have v, at their maximum.
    system = precision + np.eye(len(precision))
    size = len(POINTS)
    blocks = block_diag(*(system[k * size :][:size, k * size :][:, :size] for k in range(LATENTS)))
    return float(value + 0.5 * linear @ np.linalg.solve(system, linear) - 0.5 * np.linalg.slogdet(blocks)[1])


def climbed(name: str) -> tuple[float, float, Any]:
    """Value at the fit's end, the maximum from there by L-BFGS, and where that is."""
    fit, (data, scale) = fitted(name), case(name)
    own = [fit.personal[key] for key in data]
    start = np.concatenate([fit.state.shared.kernel, *[one.mean for one in own], [one.log_noise_sd for one in own]])
    units = np.concatenate([np.ones(LATENTS), np.full(LATENTS * len(data), scale), np.ones(len(data))])
    best = minimize(
        lambda z: -log_joint(z * units, data, scale),
        start / units,
        method="L-BFGS-B",
        options={"maxiter": 1000, "maxfun": 100_000, "ftol": 1e-13, "gtol": 1e-6},
    )
    return log_joint(start, data, scale), -best.fun, best.x * units


_IDENTICAL = pytest.param("identical", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", slow_but([_IDENTICAL, "one", "unequal", "1e3", "1e-3"], _IDENTICAL, "unequal"))
def test_what_has_converged_is_at_the_maximum_of_direct_optimisation(name: str) -> None:
    """It stopped up to 1.7 nats below, with length-scales of .286 where .195 is the maximum."""
    fit = fitted(name)
    assert fit.status is fedppl.Status.CONVERGED, fit.message
    found, best, where = climbed(name)
    assert best - found < 1.5e-3
    assert_allclose(fit.state.shared.kernel, where[:LATENTS], atol=0.05)
    # What is reported is the same value, but for the prior of the kernels, and in it.
    roles = next(iter(fit.clients.values())).view(unit_of).roles
    apart = roles.slab_prior.log_density(roles.slab_prior.mean) - LATENTS * norm.logpdf(0.0)
    reported = fit.records[-1].info["bound"] + log_prior(roles, fit.state.shared.kernel) - apart
    assert_allclose(reported, found, atol=1e-3)


def test_a_unit_of_the_outputs_changes_neither_the_stop_nor_the_numbers() -> None:
    one = fitted("1")
    for name in ("1e3", "1e-3"):
        other, scale = fitted(name), case(name).scale
        assert len(other.records) == len(one.records)
        assert_allclose(other.state.shared.kernel, one.state.shared.kernel, atol=1e-4)
        ours, theirs = (curves.predict(fit, "b", {"X": NEW}) for fit in (one, other))
        for key in ("mean", "function_sd"):
            assert_allclose(theirs[key] / scale, ours[key], atol=1e-4)


def trail_of(values: Any) -> Any:
    trail = Trail()
    for value in values:
        trail = longer(trail, float(value), np.zeros(1))
    return trail


@pytest.mark.parametrize("ratio", [0.3, 0.9, 0.99])
def test_what_is_left_of_a_geometric_series_is_its_remainder(ratio: float) -> None:
    values = 7.0 - 2.0 * ratio ** np.arange(12)
    assert_allclose(left_after(trail_of(values)).nats, 7.0 - values[-1], rtol=1e-3)


def test_a_gain_that_does_not_shrink_is_not_small_because_the_bound_is_large() -> None:
    """A steady .0017 a round passed for rest beside a bound of 27."""
    for level in (27.0, 1e6):
        assert left_after(trail_of(level + 0.0017 * np.arange(20))).nats > 1.0


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_of_a_gain_like_a_power_what_is_left_is_not_hidden(power: float) -> None:
    """By the ratio of the last gains alone a tenth of it would be."""
    values = -(np.arange(1.0, 301.0) ** -power)
    gained = gained_of_late(list(values))
    assert_allclose(gained * 1 / (1.5**power - 1), -values[-1], rtol=0.02)
    assert left_after(trail_of(values)).nats > 0


@problems.few_rounds
def test_noisy_sums_say_nothing_of_what_is_left() -> None:
    model, algorithm = fitted("one").declaration, curves.PointAscent(batch_size=10)
    fit = fedppl.fit(model, case("1").data, algorithm, rounds=4, progressbar=False, random_seed=1)
    assert np.isnan(fit.records[-1].info["remaining"]) and fit.state.phase.path == Trail()
    assert np.isnan(left_after(Trail()).nats)


@problems.few_rounds
def test_an_ascent_that_creeps_has_not_converged_far_from_the_end() -> None:
    """It had, .0057 nats and .11 sds below, since a fast part of the gains was all that their ratio told."""
    fit = fitted("creeping")
    found, best, _ = climbed("creeping")
    assert best - found < (1.5e-3 if fit.status is fedppl.Status.CONVERGED else fit.records[-1].info["remaining"])


@problems.few_rounds
def test_without_enough_rounds_a_fit_says_how_much_is_left() -> None:
    name = "identical"
    fit = fedppl.fit(
        fitted(name).declaration, case(name).data, curves.PointAscent(), rounds=20, progressbar=False, random_seed=1
    )
    assert fit.status is fedppl.Status.MAX_ROUNDS
    assert "nats are left" in fit.message and "raise rounds=" in fit.message
    assert fit.records[-1].info["remaining"] > 0.1


def test_kernels_that_stay_for_some_rounds_are_not_said_to_rest() -> None:
    """A fit whose length-scales were 1.5 sds from the maximum ended with "kernels by 0 a round"."""
    shared = Globals(np.zeros((1, 2)), np.eye(2)[None], np.ones(1), np.zeros(1), 0.0)
    left = Left(0.3, 0.2, 0.9)
    said = {change: report(1.0, shared, change, left, arrived=False, noisy=False).message for change in (0.0, 0.01)}
    assert "0.3 nats" in said[0.0] and "kernels" not in said[0.0]
    assert "0.01" in said[0.01]
    unknown = report(1.0, shared, 0.0, Left(np.nan, np.nan, 1.0), arrived=False, noisy=False).message
    assert "not known" in unknown and "shrink" not in unknown  # where no gain has been seen


@pytest.mark.slow
def test_functions_that_the_data_do_not_decide_on_are_named() -> None:
    """One unit, four functions: three rest at a γ of .02, which is the maximum, and no reason to go on."""
    data = {"a": curve(np.random.default_rng(3), 30, 1.0)}
    builder = functools.partial(fedlmc_ss.unit, inducing=POINTS, latents=4, lengthscale=0.3)
    model = fedppl.FederatedModel(builder, fedlmc_ss.SHARED)
    fit = fedppl.fit(model, data, curves.Ascent(), rounds=300, progressbar=False, random_seed=1)
    gamma = fit.state.shared.inclusion
    undecided = np.flatnonzero((gamma > 0.01) & (gamma < 0.99))
    assert len(undecided) and fit.status is fedppl.Status.CONVERGED
    for place in undecided:
        assert f"{place} (inclusion probability {gamma[place]:.2g})" in fit.message


def test_point_estimates_are_told_apart_from_draws() -> None:
    fit = fitted("one")
    table = fit.summary()
    assert table.attrs["point_estimates"] == ["lengthscale", "slab_sd"]
    rows = [name for name in table.index if name.startswith(("lengthscale", "slab_sd"))]
    assert table.loc[rows].drop(columns="mean").isna().all(axis=None)
    assert table.drop(rows)["sd"].min() > 0
    drawn = fit.client("a", draws=20, chains=1)["posterior"]
    assert drawn.attrs["fedppl_point_estimates"] == "lengthscale, slab_sd, w, noise_sd"
    marked = {name for name in drawn.data_vars if drawn[name].attrs.get("point_estimate")}
    assert marked == {"lengthscale", "slab_sd", "w", "noise_sd"}
    for name in marked:
        assert np.ptp(drawn[name].values, axis=1).max() < 1e-12
    assert fit.clients_summary()["w"].sel(statistic="sd").isnull().all()
