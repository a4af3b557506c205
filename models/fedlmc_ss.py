r"""FedLMC-SS: a linear model of coregionalisation that selects its latent functions, as one unit declares it.

`unit` is a *builder* from one unit's inputs ``X`` (n,) or (n, d) and outputs ``y`` (n,) to a ``pm.Model``, with options
that are set once for all units by ``functools.partial``::

    builder = functools.partial(fedlmc_ss.unit, inducing=np.linspace(-5, 5, 20), latents=10)
    model = fedppl.FederatedModel(builder, fedlmc_ss.SHARED)
    fit = fedppl.fit(model, units, fedppl.curves.Ascent(), rounds=200)

**A unit** (section 4.1) is a sum of L latent functions that all units share, with coefficients of its own,

.. math::

    v_l \sim N(0, I), \quad \tilde u_l = \operatorname{chol}(K_{ZZ,l})\, v_l \sim N(0, K_{ZZ,l}), \quad
    \alpha_l \sim \text{Bernoulli}(\pi), \quad w_{ml} \sim N(0, \sigma_w^2)

    f_m(x) \mid \tilde u, w_m, \alpha \sim
    N\Big(\sum_l w_{ml} \alpha_l A_{ml}(x) \tilde u_l,\; \sum_l (w_{ml} \alpha_l)^2 k_{ml}(x)\Big), \quad
    y_m \sim N(f_m, \sigma_m^2)

with :math:`A_{ml}(x) = k_l(x, Z) K_{ZZ,l}^{-1}` and :math:`k_{ml}(x) = k_l(x, x) - A_{ml}(x) k_l(Z, x)`, at each
input on its own: the bound of equation 16 reads no more of the conditional covariance than its diagonal.

What units share is :math:`(v, \alpha)`, the length-scales and :math:`\sigma_w`. They are counted once in the whole
system: a unit's log density alone has all of their prior, so that the system's takes r_m = n_m / Σ n of it from each.

The latent functions are written by white v_l, which changes nothing in the model and much in the numbers: the precision
of v is the identity plus what the data add, however close together the inducing points are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pytensor.graph.replace import vectorize_graph

import fedppl

__all__ = ["SHARED", "SHARED_WITHOUT_SELECTION", "exp_quad", "matern52", "two_curves", "unit"]

SHARED = ("v", "included", "lengthscale", "slab_sd")
SHARED_WITHOUT_SELECTION = ("v", "lengthscale", "slab_sd")

# Below 1e-3 the algorithms take σ_w for a constant.
_HELD_SPREAD = 1e-4
# Kernel matrices of close inducing points have condition numbers of 1e6 and more.
_JITTER = 1e-6
# Medians and spreads of priors, for data at about unit scale: far beyond them squares overflow, or vanish beside 1.
_SCALES = (1e-9, 1e9)


def exp_quad(lengthscale: Any) -> Any:
    """Squared exponential covariance of one-dimensional inputs, the paper's.

    Parameters
    ----------
    lengthscale
        ℓ, in units of x.

    Returns
    -------
    pymc.gp.cov.Covariance

    Examples
    --------
    >>> exp_quad(2.0).full(np.array([[0.0], [2.0]])).eval().round(3)
    array([[1.   , 0.607],
           [0.607, 1.   ]])
    """
    return pm.gp.cov.ExpQuad(1, lengthscale)


def matern52(lengthscale: Any) -> Any:
    """Matérn 5/2 covariance of one-dimensional inputs, for rougher curves.

    Parameters
    ----------
    lengthscale
        ℓ, in units of x.

    Returns
    -------
    pymc.gp.cov.Covariance

    Examples
    --------
    >>> float(matern52(2.0).full(np.array([[0.0], [2.0]])).eval()[0, 1].round(3))
    0.524
    """
    return pm.gp.cov.Matern52(1, lengthscale)


def unit(
    X: Any,
    y: Any,
    *,
    inducing: Any,
    latents: int = 10,
    covariance: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] = exp_quad,
    inclusion: float | None = 0.5,
    lengthscale: float = 1.0,
    lengthscale_spread: float = 1.0,
    noise_sd: float = 0.3,
    noise_spread: float = 2.0,
    slab_sd: float = 1.0,
    slab_spread: float | None = 1.0,
) -> pm.Model:
    r"""Declare one unit of a linear model of coregionalisation with spike-and-slab coefficients.

    Parameters
    ----------
    X, y
        Inputs (n,) or (n, d), and outputs (n,), at unit scale.
    inducing
        Z (Q,) or (Q, d), the same at all units and agreed on beforehand: a grid over the range of the inputs, its
        spacing below the shortest length-scale.
    latents
        L, the largest number of latent functions.
    covariance
        Function from a length-scale to a PyMC covariance with variance 1, or one for each latent function. A stationary
        one: the scale of a latent function is its coefficients'.
    inclusion
        π, the prior probability that a latent function is used; None leaves the selection out (FedLMC, LMC).
    lengthscale, lengthscale_spread
        Median and spread on the log scale of each length-scale's prior, in units of x.
    noise_sd, noise_spread
        Median and spread on the log scale of the prior of the unit's own σ_m, in units of y.
    slab_sd, slab_spread
        Median and spread on the log scale of the prior of σ_w. None for the spread holds σ_w at ``slab_sd``, as the
        paper does: the declared spread is 1e-4 then, and no update moves it.

    Returns
    -------
    pymc.Model
        Shared "v" (latent, inducing), "included" (latent), "lengthscale" (latent) and "slab_sd"; local "w" (latent),
        "noise_sd" and "residual" (row), the standardised distance of f from its conditional mean.

    Raises
    ------
    fedppl.DeclarationError
        If inducing points are fewer than two, not distinct or of another dimension than X, the number of latent
        functions is below one, the inclusion probability is outside (0, 1) or a scale is outside 1e-9 to 1e9.

    Examples
    --------
    >>> import numpy as np
    >>> model = unit(np.linspace(0, 1, 5), np.zeros(5), inducing=np.linspace(0, 1, 4), latents=2)
    >>> [rv.name for rv in model.free_RVs]
    ['v', 'included', 'lengthscale', 'slab_sd', 'w', 'noise_sd', 'residual']

    Notes
    -----
    *When this fails.* Bring y to mean 0 and unit scale with constants that all units agree on. Data outside the range
    of the inducing points are seen by the prior variance alone. A grid coarser than the length-scale cannot hold the
    curves, and the residual takes what is left.

    References
    ----------
    .. [1] Gao and Chung, Federated automatic latent variable selection in multi-output Gaussian processes, eqs. 6 to 9.
    """
    X, y = np.asarray(X, dtype=float), np.asarray(y, dtype=float)  # whole numbers of days, too
    points = _points(inducing, X)
    if not isinstance(latents, int | np.integer) or isinstance(latents, bool) or latents < 1:
        raise fedppl.DeclarationError(f"latents={latents!r} must be a whole number, at least 1.")
    if inclusion is not None and not (isinstance(inclusion, float | np.floating) and 0 < inclusion < 1):
        raise fedppl.DeclarationError(f"inclusion={inclusion} must lie between 0 and 1; None leaves the selection out.")
    slab_spread = _HELD_SPREAD if slab_spread is None else slab_spread
    scales = {"lengthscale": lengthscale, "lengthscale_spread": lengthscale_spread, "noise_sd": noise_sd}
    scales |= {"noise_spread": noise_spread, "slab_sd": slab_sd, "slab_spread": slab_spread}
    for name, value in scales.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < np.inf:
            raise fedppl.DeclarationError(f"{name}={value!r} must be a number, positive and finite.")
        if not _SCALES[0] <= value <= _SCALES[1]:
            raise fedppl.DeclarationError(
                f"{name}={value!r} must lie between {_SCALES[0]:g} and {_SCALES[1]:g}; bring X and y to about unit "
                "scale, and give it in their units."
            )
    if not callable(covariance) and (isinstance(covariance, str) or not isinstance(covariance, Sequence)):
        raise fedppl.DeclarationError(
            f"covariance={covariance!r} must be a function from a length-scale to a PyMC covariance, for example "
            "models.fedlmc_ss.exp_quad, or one for each latent function."
        )
    kernels = [covariance] * latents if callable(covariance) else list(covariance)
    if len(kernels) != latents:
        raise fedppl.DeclarationError(
            f"covariance has {len(kernels)} functions for {latents} latent functions; give one for each."
        )
    for kernel in set(kernels):
        _check_covariance(kernel, float(lengthscale), points.shape[1])
    coords = {"latent": np.arange(latents), "inducing": np.arange(len(points))}
    with pm.Model(coords=coords) as model:
        inputs = pm.Data("X", X)
        outputs = pm.Data("y", y, dims="row")
        v = pm.Normal("v", 0, 1, dims=("latent", "inducing"))
        included = 1.0 if inclusion is None else pm.Bernoulli("included", inclusion, dims="latent")
        scales = pm.LogNormal("lengthscale", np.log(lengthscale), lengthscale_spread, dims="latent")
        sigma_w = pm.LogNormal("slab_sd", np.log(slab_sd), slab_spread)
        w = pm.Normal("w", 0, sigma_w, dims="latent")
        sigma = pm.LogNormal("noise_sd", np.log(noise_sd), noise_spread)
        projection, conditional = _projection(kernels, scales, inputs, points)
        model.add_named_variable(projection)
        model.add_named_variable(conditional)
        weight = w * included
        residual = pm.Normal("residual", 0, 1, shape=outputs.shape, dims="row")
        mean = pt.sum(weight[:, None] * pt.sum(projection * v[:, None, :], axis=2), axis=0)
        variance = pt.sum(weight[:, None] ** 2 * conditional, axis=0)
        # The root of an exact zero has no gradient.
        pm.Normal("output", mean + pt.sqrt(variance + 1e-12) * residual, sigma, observed=outputs, dims="row")
    return model


def two_curves(seed: int = 0) -> tuple[fedppl.FederatedModel, dict[str, dict[str, np.ndarray]]]:
    """Two units whose curves are one function times a number, for trying things out.

    Parameters
    ----------
    seed
        Seed of the noise.

    Returns
    -------
    tuple
        FederatedModel with two latent functions, and the data of units "a" and "b".

    Examples
    --------
    >>> model, units = two_curves()
    >>> model.shared, units["b"]["y"].shape
    (('v', 'included', 'lengthscale', 'slab_sd'), (25,))
    """
    rng = np.random.default_rng(seed)
    units = {}
    for name, height, rows in (("a", 1.0, 30), ("b", -0.7, 25)):
        x = np.sort(rng.uniform(0, 1, rows))
        units[name] = {"X": x, "y": height * np.sin(6 * x) + 0.1 * rng.normal(size=rows)}
    builder = functools.partial(unit, inducing=np.linspace(0, 1, 8), latents=2, lengthscale=0.3)
    return fedppl.FederatedModel(builder, SHARED), units


def _points(inducing: Any, X: Any) -> np.ndarray:
    """Inducing points (Q, d), checked."""
    try:
        points = np.asarray(inducing, dtype=float)
    except (TypeError, ValueError) as error:
        raise fedppl.DeclarationError(
            f"inducing={inducing!r} must be numbers, an array (Q,) or (Q, d) of points in units of X; for example "
            "np.linspace(-5, 5, 20)."
        ) from error
    points = points[:, None] if points.ndim == 1 else points
    width = 1 if np.ndim(X) == 1 else np.shape(X)[1]
    if points.ndim != 2 or points.shape[1] != width or not np.all(np.isfinite(points)):
        raise fedppl.DeclarationError(
            f"inducing has shape {np.shape(inducing)}; pass finite points (Q,) or (Q, {width}), as X has."
        )
    if len(points) < 2 or len(np.unique(points, axis=0)) < len(points):
        raise fedppl.DeclarationError(f"inducing has {len(points)} points; pass at least two, all distinct.")
    return points


def _projection(kernels: list[Any], scales: Any, inputs: Any, points: np.ndarray) -> tuple[Any, Any]:
    """A chol(K_ZZ) (L, n, Q), which takes v to the latent functions at the inputs, and what is left of k(x, x)."""
    rows = inputs[:, None] if inputs.ndim == 1 else inputs
    if all(kernel is kernels[0] for kernel in kernels):
        scale = pt.dscalar("scale")
        one = _matrices(kernels[0](scale), rows, points)
        parts = vectorize_graph(one, {scale: scales})
        # One that does not use its length-scale is the same for all.
        wide = (pt.zeros((len(kernels), *(1,) * ndim)) for ndim in (2, 2, 1))
        within, across, alone = (part + zeros for part, zeros in zip(parts, wide, strict=True))
    else:
        several = [_matrices(kernel(scales[place]), rows, points) for place, kernel in enumerate(kernels)]
        within, across, alone = (pt.stack(parts) for parts in zip(*several, strict=True))
    root = pt.linalg.cholesky(within + _JITTER * np.eye(len(points)))
    white = pt.linalg.solve_triangular(root, across, lower=True, b_ndim=2)
    projection = pt.swapaxes(white, 1, 2)
    conditional = pt.maximum(alone - pt.sum(white**2, axis=1), 1e-10)
    projection.name, conditional.name = "projection", "conditional_variance"
    return projection, conditional


def _matrices(covariance: Any, rows: Any, points: np.ndarray) -> tuple[Any, Any, Any]:
    """K(Z, Z) (Q, Q), K(Z, X) (Q, n) and k(x, x) (n,)."""
    return covariance(points), covariance(points, rows), covariance(rows, diag=True)


@functools.lru_cache(maxsize=64)
def _check_covariance(kernel: Callable[[Any], Any], lengthscale: float, columns: int) -> None:
    """Refuse what is no covariance of variance 1 in all columns; once a function, since models are built often."""
    covariance = kernel(lengthscale)
    if not isinstance(covariance, pm.gp.cov.BaseCovariance):
        raise fedppl.DeclarationError(
            f"covariance gives {type(covariance).__name__} for a length-scale, and must give a PyMC covariance: for "
            "example lambda scale: pm.gp.cov.Matern32(1, scale)."
        )
    if covariance.input_dim != columns:
        raise fedppl.DeclarationError(
            f"covariance is one of {covariance.input_dim} columns and X has {columns}; for all of them pass for "
            f"example covariance=lambda scale: pm.gp.cov.ExpQuad({columns}, scale)."
        )
    places = lengthscale * np.array([[-1.3], [0.4], [2.6]]) * np.ones(columns)
    variance = covariance(places, diag=True).eval(mode="FAST_COMPILE")
    if not np.allclose(variance, 1.0, atol=1e-6):
        raise fedppl.DeclarationError(
            f"covariance has variances {np.round(variance, 4).tolist()} at three inputs, and must have 1 everywhere: "
            "take a stationary one without a factor, for example models.fedlmc_ss.matern52."
        )
