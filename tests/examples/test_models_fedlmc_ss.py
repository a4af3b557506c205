"""The declared linear model of coregionalisation: matrices, log density, what it refuses and what is refused for it."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from scipy.stats import norm

import fedppl
from fedppl.contracts import Algorithm
from fedppl.coregional.view import roles
from fedppl.engine.answer import require_fit
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.models import fedlmc_ss
from fedppl.types import DeclarationError, Layout
from tests.support import problems

GRID = np.linspace(0, 2, 5)
X = np.array([-0.4, 0.1, 0.5, 0.9, 1.6, 2.7])
Y = np.array([0.3, -0.2, 0.8, 1.0, -0.5, 0.1])
JITTER = 1e-6


def exp_quad(distance: Any) -> Any:
    return np.exp(-0.5 * distance**2)


def matern52(distance: Any) -> Any:
    return (1 + np.sqrt(5) * distance + 5 / 3 * distance**2) * np.exp(-np.sqrt(5) * distance)


def distances(one: Any, other: Any) -> Any:
    one, other = (np.reshape(points, (len(points), -1)) for points in (one, other))
    return np.sqrt(np.sum((one[:, None] - other[None]) ** 2, axis=2))


def matrices(model: pm.Model, scales: Any) -> tuple[Any, Any]:
    """The model's projection (L, n, Q) and conditional variance (L, n) at given length-scales."""
    tensors = model.replace_rvs_by_values([model["projection"], model["conditional_variance"]])
    scale = model.rvs_to_values[model["lengthscale"]]
    function = pytensor.function([scale], tensors, mode=PYTHON_MODE, on_unused_input="ignore")
    found = function(np.log(scales))
    return found[0], found[1]


def expected(kernel: Any, scale: float, inputs: Any = X, points: Any = GRID) -> tuple[Any, Any, Any]:
    """A chol(K_ZZ) and k(x, x) − A k(Z, x), with A by a solve; and K_ZZ."""
    K = kernel(distances(points, points) / scale)
    across = kernel(distances(inputs, points) / scale)
    A = np.linalg.solve(K + JITTER * np.eye(len(K)), across.T).T
    return A @ np.linalg.cholesky(K + JITTER * np.eye(len(K))), 1.0 - np.sum(A * across, axis=1), K


def build(inputs: Any = X, **settings: Any) -> pm.Model:
    return fedlmc_ss.unit(inputs, np.zeros(len(inputs)), **{"inducing": GRID, "latents": 2} | settings)


# --- matrices -------------------------------------------------------------------------------------------------


def test_white_variables_give_the_inducing_ones_their_covariance() -> None:
    """B v at the inducing points themselves: B Bᵀ = K_ZZ and nothing is left over, up to the jitter."""
    projection, conditional = matrices(build(GRID), [0.5, 1.3])
    for found, rest, scale in zip(projection, conditional, (0.5, 1.3), strict=True):
        K = exp_quad(distances(GRID, GRID) / scale)
        assert_allclose(found @ found.T, K, atol=2 * JITTER)
        assert np.abs(K - np.eye(len(K))).max() > 0.1
        assert np.all((rest > 0) & (rest < 2 * JITTER))


def test_matrices_are_those_of_the_conditional_gaussian_process() -> None:
    projection, conditional = matrices(build(), [0.5, 1.3])
    for found, rest, scale in zip(projection, conditional, (0.5, 1.3), strict=True):
        B, k, _ = expected(exp_quad, scale)
        assert_allclose(found, B, atol=1e-9)
        assert_allclose(rest, k, atol=1e-9)
        assert_allclose(np.sum(found**2, axis=1) + rest, 1.0, atol=1e-12)  # every curve has variance 1


def test_far_from_the_inducing_points_all_variance_is_left() -> None:
    projection, conditional = matrices(build(np.array([40.0, 1.0])), [0.5, 0.5])
    assert_allclose(projection[:, 0], 0.0, atol=1e-12)
    assert_allclose(conditional[:, 0], 1.0, atol=1e-12)


def test_matern_covariances_and_one_for_each_latent_function() -> None:
    alone = matrices(build(covariance=fedlmc_ss.matern52), [0.7, 0.7])
    mixed = matrices(build(covariance=[fedlmc_ss.exp_quad, fedlmc_ss.matern52]), [0.7, 0.7])
    smooth, rough = expected(exp_quad, 0.7), expected(matern52, 0.7)
    for found, wanted in ((alone, (rough, rough)), (mixed, (smooth, rough))):
        for place, (B, k, _) in enumerate(wanted):
            assert_allclose(found[0][place], B, atol=1e-9)
            assert_allclose(found[1][place], k, atol=1e-9)
    assert np.abs(smooth[1] - rough[1]).max() > 1e-3


def test_a_covariance_may_leave_the_length_scale_out() -> None:
    """A fixed kernel, the same for all latent functions: there is one matrix for each of them all the same."""
    projection, conditional = matrices(build(covariance=lambda scale: pm.gp.cov.ExpQuad(1, 0.5)), [0.7, 0.9])
    B, k, _ = expected(exp_quad, 0.5)
    assert projection.shape == (2, *B.shape) and conditional.shape == (2, *k.shape)
    assert_allclose(projection, [B, B], atol=1e-9)


def test_inputs_may_have_two_dimensions() -> None:
    rng = np.random.default_rng(2)
    inputs, points = rng.uniform(size=(6, 2)), rng.uniform(size=(5, 2))
    model = build(inputs, inducing=points, covariance=lambda scale: pm.gp.cov.ExpQuad(2, scale))
    projection, conditional = matrices(model, [0.4, 0.9])
    for found, rest, scale in zip(projection, conditional, (0.4, 0.9), strict=True):
        B, k, _ = expected(exp_quad, scale, inputs, points)
        assert_allclose(found, B, atol=1e-9)
        assert_allclose(rest, k, atol=1e-9)


def test_a_column_of_inputs_is_a_vector_of_them() -> None:
    for one, other in zip(matrices(build(), [0.5, 1.3]), matrices(build(X[:, None]), [0.5, 1.3]), strict=True):
        assert_allclose(one, other, rtol=1e-12)


def test_close_inducing_points_do_not_break_the_root() -> None:
    projection, conditional = matrices(build(inducing=np.linspace(0, 0.01, 30)), [5.0, 5.0])
    assert np.all(np.isfinite(projection))
    assert np.all(conditional > 0)


# --- log density ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inclusion", [None, 0.2])
def test_the_log_density_is_the_formulas(inclusion: float | None) -> None:
    """Every term by hand, the scales' on the log scale; v and included once, as in any one unit's model."""
    rng, latents = np.random.default_rng(4), 2
    settings = {"lengthscale": 0.8, "lengthscale_spread": 0.7, "noise_sd": 0.2, "noise_spread": 1.5}
    model = fedlmc_ss.unit(X, Y, inducing=GRID, latents=latents, inclusion=inclusion, slab_spread=0.6, **settings)
    v, w, residual = rng.normal(size=(latents, 5)), rng.normal(size=latents), rng.normal(size=len(X))
    log_scales, log_noise, log_slab = np.log([0.6, 1.1]), np.log(0.4), 0.3
    alpha = np.array([1, 0])
    point = {"v": v, "w": w, "residual": residual}
    point |= {"lengthscale_log__": log_scales, "noise_sd_log__": log_noise, "slab_sd_log__": log_slab}
    used = np.ones(latents)
    total = norm.logpdf(v).sum() + norm.logpdf(w, 0, np.exp(log_slab)).sum() + norm.logpdf(residual).sum()
    total += norm.logpdf(log_scales, np.log(0.8), 0.7).sum() + norm.logpdf(log_slab, 0, 0.6)
    total += norm.logpdf(log_noise, np.log(0.2), 1.5)
    if inclusion is not None:
        point["included"], used = alpha, alpha
        total += np.sum(np.log(np.where(alpha == 1, inclusion, 1 - inclusion)))
    mean, variance = np.zeros(len(X)), np.zeros(len(X))
    for weight, curve, scale in zip(w * used, v, np.exp(log_scales), strict=True):
        B, k, _ = expected(exp_quad, scale)
        mean, variance = mean + weight * B @ curve, variance + weight**2 * k
    total += norm.logpdf(Y, mean + np.sqrt(variance) * residual, 0.4).sum()
    assert_allclose(model.compile_logp(mode=PYTHON_MODE)(point), total, rtol=1e-8)


def test_names_dims_and_roles_are_those_of_the_readme() -> None:
    model = build(latents=3)
    assert [rv.name for rv in model.free_RVs if rv.name in fedlmc_ss.SHARED] == list(fedlmc_ss.SHARED)
    dims = {name: model.named_vars_to_dims[name] for name in ("v", "included", "lengthscale", "w", "residual")}
    assert dims == {
        "v": ("latent", "inducing"),
        "included": ("latent",),
        "lengthscale": ("latent",),
        "w": ("latent",),
        "residual": ("row",),
    }
    assert [len(model.coords[dim]) for dim in ("latent", "inducing")] == [3, 5]
    without = build(inclusion=None)
    assert "included" not in without.named_vars
    assert {rv.name for rv in without.free_RVs} >= set(fedlmc_ss.SHARED_WITHOUT_SELECTION)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inducing": [0.0]}, "1 points; pass at least two"),
        ({"inducing": [0.0, 1.0, 1.0]}, "3 points; pass at least two, all distinct"),
        ({"inducing": [0.0, np.nan]}, "inducing has shape (2,); pass finite points"),
        ({"inducing": [0.0, np.inf]}, "inducing has shape (2,); pass finite points"),
        ({"inducing": np.zeros((4, 2))}, "inducing has shape (4, 2); pass finite points (Q,) or (Q, 1)"),
        ({"inducing": np.zeros((2, 2, 1))}, "inducing has shape (2, 2, 1)"),
        ({"inducing": "ab"}, "inducing='ab' must be numbers, an array (Q,)"),
        ({"inducing": [[0.0, 1.0], [2.0]]}, "inducing=[[0.0, 1.0], [2.0]] must be numbers"),
        ({"latents": 0}, "latents=0 must be a whole number"),
        ({"latents": 2.5}, "latents=2.5 must be a whole number"),
        ({"inclusion": 0.0}, "inclusion=0.0 must lie between 0 and 1; None leaves"),
        ({"inclusion": 1.0}, "inclusion=1.0 must lie"),
        ({"inclusion": np.nan}, "inclusion=nan must lie"),
        ({"lengthscale": 0.0}, "lengthscale=0.0"),
        ({"lengthscale_spread": -1.0}, "lengthscale_spread=-1.0"),
        ({"noise_sd": -0.1}, "noise_sd=-0.1"),
        ({"noise_spread": 0.0}, "noise_spread=0.0"),
        ({"slab_spread": 0.0}, "slab_spread=0.0"),
        ({"lengthscale": np.nan}, "lengthscale=nan"),
        ({"noise_sd": np.nan}, "noise_sd=nan"),
        ({"lengthscale": 1e-300}, "lengthscale=1e-300 must lie between 1e-09 and 1e+09; bring X"),
        ({"slab_sd": 1e300}, "slab_sd=1e+300 must lie between"),
        ({"covariance": [fedlmc_ss.exp_quad]}, "covariance has 1 functions for 2 latent functions"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(**settings)


def test_inducing_points_have_the_dimension_of_the_inputs() -> None:
    with pytest.raises(ValueError, match=re.escape("pass finite points (Q,) or (Q, 2)")):
        build(np.zeros((6, 2)))


# --- what the algorithms for it refuse ---------------------------------------------------------------------------


def toy(
    X: Any, y: Any, *, v_sd: float = 1.0, noise: Any = None, likelihood: Any = pm.Normal, w_sd: float | None = None
) -> pm.Model:
    """A model of coregionalisation without Gaussian processes, which may have one thing wrong with it."""
    with pm.Model() as model:
        x, outputs = pm.Data("X", X), pm.Data("y", y)
        v = pm.Normal("v", 0, v_sd, shape=(2, 3))
        included = pm.Bernoulli("included", 0.5, shape=2)
        scale, slab = pm.LogNormal("lengthscale", 0, 1, shape=2), pm.LogNormal("slab_sd", 0, 1)
        w = pm.Normal("w", 0, slab if w_sd is None else w_sd, shape=2)
        sigma = (noise or (lambda: pm.LogNormal("noise_sd", -1, 1)))()
        residual = pm.Normal("residual", 0, 1, shape=outputs.shape)
        projection = pt.exp(-((x[None, :, None] - np.arange(3.0)) ** 2) / scale[:, None, None])
        conditional = 0.5 * pt.exp(-(x[None] ** 2) / scale[:, None])
        for name, tensor in (("projection", projection), ("conditional_variance", conditional)):
            tensor.name = name
            model.add_named_variable(tensor)
        weight = (w * included)[:, None]
        mean = pt.sum(weight * pt.sum(projection * v[:, None, :], axis=2), axis=0)
        f = mean + pt.sqrt(pt.sum(weight**2 * conditional, axis=0) + 1e-12) * residual
        extra = {"nu": 4} if likelihood is pm.StudentT else {}
        likelihood("output", mu=f, sigma=sigma, observed=outputs, **extra)
    return model


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, None),
        ({"likelihood": pm.StudentT}, "client 'a': the declared log density is .* with y ~ Normal"),
        ({"noise": lambda: pm.HalfNormal("noise_sd", 1)}, "client 'a': the prior of 'noise_sd' is not LogNormal"),
        ({"v_sd": 2.0}, "standard Normal"),
        pytest.param({"w_sd": 1.0}, "the declared log density is .* use fedppl.EP", marks=pytest.mark.slow),
        pytest.param(
            {"noise": lambda: pm.LogNormal("noise_sd", -1, 1, shape=1)},
            "'noise_sd' must be a local scalar on the log scale",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_models_that_are_not_of_coregionalisation_are_refused(wrong: dict[str, Any], message: str | None) -> None:
    def build(X: Any, y: Any) -> pm.Model:
        return toy(X, y, **wrong)

    clients = {"a": {"X": np.linspace(0, 2, 5), "y": np.linspace(-1, 1, 5)}}
    client = fedppl.FederatedModel(build, fedlmc_ss.SHARED).enrol(clients, kernel=False)["a"]
    if message is None:
        require_fit(fedppl.curves.Ascent(), client)
        return
    with pytest.raises(DeclarationError, match=message):
        require_fit(fedppl.curves.Ascent(), client)


@pytest.mark.parametrize("algorithm", [fedppl.curves.Ascent, fedppl.curves.Averaging, fedppl.curves.Gradient])
def test_a_model_without_latent_functions_is_refused_with_what_is_missing(algorithm: Any) -> None:
    model, clients = problems.regression(3)
    with pytest.raises(DeclarationError, match="the model has no 'projection'; a model of coregionalisation declares"):
        fedppl.fit(model, clients, algorithm(), progressbar=False)


def test_shared_variables_are_known_by_their_names_shapes_and_priors() -> None:
    model, clients = problems.coregional()
    layout = next(iter(model.enrol(clients).values())).layout

    def without(name: str, **changes: Any) -> Layout:
        kept = [v._replace(**changes) if v.name == name else v for v in layout.variables]
        if not changes:
            kept = [v for v in layout.variables if v.name != name]
        return Layout(tuple(kept), layout.prior, layout.prior_is_gaussian, layout.fingerprint)

    for name in ("v", "slab_sd"):
        with pytest.raises(DeclarationError, match="are not v of shape .*for example shared="):
            roles(without(name))
    for name, changes in (("v", {"shape": (18,)}), ("slab_sd", {"transform": ""}), ("included", {"binary": False})):
        with pytest.raises(DeclarationError, match=f"{name}"):
            roles(without(name, **changes))
    with pytest.raises(DeclarationError, match="not Gaussian on the unconstrained space; give v a standard Normal"):
        roles(Layout(layout.variables, layout.prior, False, layout.fingerprint))


@pytest.mark.parametrize(
    "algorithm",
    [fedppl.EP(), fedppl.averaging.FedAvg(learning_rate=0.1), fedppl.HM1(), fedppl.one_shot.ConsensusMonteCarlo()],
)
def test_algorithms_for_continuous_parameters_refuse_indicators(algorithm: Algorithm) -> None:
    model, clients = problems.coregional()
    with pytest.raises(
        DeclarationError, match=r"\['included'\] are discrete, .* or use an algorithm for models with indicators"
    ):
        fedppl.fit(model, clients, algorithm, progressbar=False)


def test_a_shared_count_is_refused_at_enrolment() -> None:
    def build(y: Any) -> pm.Model:
        with pm.Model() as model:
            outputs = pm.Data("y", y)
            rate = pm.Poisson("rate", 3)
            pm.Normal("output", rate, 1, observed=outputs)
        return model

    with pytest.raises(DeclarationError, match="client 'a': shared variable 'rate' is discrete"):
        fedppl.FederatedModel(build, ["rate"]).enrol({"a": {"y": np.zeros(3)}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"covariance": "rbf"}, "covariance='rbf' must be a function from a length-scale"),
        ({"covariance": lambda scale: None}, "covariance gives NoneType for a length-scale"),
        ({"covariance": lambda scale: 4 * pm.gp.cov.ExpQuad(1, scale)}, "must have 1 everywhere"),
        ({"covariance": lambda scale: pm.gp.cov.Linear(1, scale)}, "must have 1 everywhere"),
        ({"covariance": lambda scale: pm.gp.cov.ExpQuad(2, scale)}, "covariance is one of 2 columns and X has 1"),
        ({"lengthscale": "a"}, "lengthscale='a' must be a number"),
        ({"noise_spread": -1.0}, "noise_spread=-1.0 must be a number, positive and finite"),
    ],
)
def test_settings_out_of_range_are_refused_and_named_alone(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fedppl.DeclarationError, match=re.escape(message)):
        build(**settings)


def test_a_builder_says_what_is_wrong_with_its_settings_and_not_with_the_data() -> None:
    model = fedppl.FederatedModel(functools.partial(fedlmc_ss.unit, inducing=GRID, latents=0), fedlmc_ss.SHARED)
    with pytest.raises(fedppl.DeclarationError, match="^client 'a': latents=0 must be a whole number, at least 1.$"):
        model.enrol({"a": {"X": X, "y": np.zeros(len(X))}})


def test_a_selection_that_is_not_shared_is_told_which_list_to_pass() -> None:
    model = fedppl.FederatedModel(functools.partial(fedlmc_ss.unit, inducing=GRID), ["v", "lengthscale", "slab_sd"])
    with pytest.raises(fedppl.DeclarationError, match="'included' is not in shared=.*Add 'included' to shared="):
        model.enrol({"a": {"X": X, "y": np.zeros(len(X))}})


@problems.few_rounds
@pytest.mark.slow
def test_whole_numbers_are_inputs_and_outputs_like_others() -> None:
    """Days and counts: integers at one unit or at all, and real numbers to predict at."""
    days, level = np.arange(12), np.array([1, 2, 2, 3, 2, 2, 1, 0, -1, -2, -2, -1])
    model = fedppl.FederatedModel(
        functools.partial(fedlmc_ss.unit, inducing=np.linspace(0, 11, 6), latents=2, lengthscale=3.0), fedlmc_ss.SHARED
    )
    real = {"X": days.astype(float), "y": level.astype(float)}
    found = []
    for units in ({"a": {"X": days, "y": level}, "b": real}, {"a": real, "b": real}):
        fit = fedppl.fit(model, units, fedppl.curves.Ascent(warmup=2), rounds=5, progressbar=False, random_seed=0)
        found.append(fedppl.curves.predict(fit, "a", {"X": [0.5, 3]})["mean"].values)
    assert_allclose(found[0], found[1])
