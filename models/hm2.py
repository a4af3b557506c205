r"""HM2, the hierarchical models of FedLin: what a client declares, and which names are shared.

Every function here is a *builder*: it takes one client's rows ``X`` (n, d) and outcomes ``y`` (n,) and returns a
``pm.Model``. Options are keyword-only and are set once for all clients by ``functools.partial``::

    builder = functools.partial(hm2.penalised_regression, prior="ridge", coefficients=names)
    model = fedppl.FederatedModel(builder, hm2.PENALISED_SHARED)

**A hierarchy over regression coefficients** (FedLin, Example 4.1), φ = (μ, τ):

.. math::

    \mu \sim N(0, I), \quad \tau_i \sim \log N(0, 1), \quad
    \theta_k \mid \phi \sim N(\mu, \operatorname{diag}(\tau)), \quad
    y_k \mid \theta_k \sim N(X_k \theta_k, \sigma_k^2 I)

`logistic_regression` and `poisson_regression` keep the first three statements and replace the fourth by
:math:`y \sim \text{Bernoulli}(\operatorname{logit}^{-1} X\theta)` and :math:`y \sim \text{Poisson}(\exp X\theta)`.

**Penalised regression** (FedLin, section 4.3), φ = (log λ, log σ²). Every prior of θ has the scale
:math:`s = \sigma / \lambda`, so that the penalty does not depend on the unit of y; with :math:`z = \theta / s`,

.. math::

    \text{lasso:} \quad & \log p(\theta_i \mid \phi) = -|z_i| - \log 2s \\
    \text{ridge:} \quad & \log p(\theta_i \mid \phi) = -\tfrac12 z_i^2 - \log \sqrt{2\pi} s \\
    \text{elastic net:} \quad & \log p(\theta_i \mid \phi) = -\alpha |z_i| - \tfrac{1 - \alpha}2 z_i^2
        - \log C(\alpha) s \\
    \text{horseshoe:} \quad & \theta_i = s\, \tilde\omega_i z_i, \quad z_i \sim N(0, 1), \quad
        \omega_i \sim C^+(0, 1), \quad \tilde\omega_i^2 = \frac{c^2 \omega_i^2}{c^2 + s^2 \omega_i^2}

and :math:`y \mid \theta \sim N(X\theta, \sigma^2 I)`. The paper writes the ridge prior N(0, σ/λ) without saying
whether σ/λ is a standard deviation or a variance. Here it is the **standard deviation**: then ridge, lasso and
elastic net are one family with one scale.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from scipy import special

__all__ = [
    "HIERARCHICAL_SHARED",
    "PENALISED_SHARED",
    "hierarchical_regression",
    "logistic_regression",
    "penalised_regression",
    "poisson_regression",
]

HIERARCHICAL_SHARED = ("mu", "tau")
PENALISED_SHARED = ("log_lambda", "log_sigma2")

PRIORS = ("lasso", "ridge", "elastic net", "horseshoe")
HYPERS = ("lognormal", "half-Cauchy")


def hierarchical_regression(
    X: Any, y: Any, *, coefficients: Sequence[str] | None = None, noise_sd: float | None = None
) -> pm.Model:
    r"""Linear regression whose coefficients vary over clients (FedLin, Example 4.1).

    Parameters
    ----------
    X
        Predictors (n, d).
    y
        Real outcomes (n,).
    coefficients
        Names of the d predictors, to label results; by default 0 to d - 1.
    noise_sd
        Standard deviation of the noise where it is known. By default each client has its own unknown one,
        :math:`\log \sigma_k \sim N(0, 1)`, a local variable that is never sent.

    Returns
    -------
    pymc.Model
        Shared "mu" and "tau" (variances), local "theta" and "log_sigma".

    Examples
    --------
    >>> import numpy as np
    >>> sorted(rv.name for rv in hierarchical_regression(np.ones((5, 2)), np.zeros(5)).free_RVs)
    ['log_sigma', 'mu', 'tau', 'theta']

    Notes
    -----
    *When this fails.* The prior of μ is standard normal, as in the paper: bring y and X to unit scale first, or
    coefficients of another size are shrunk towards zero.

    References
    ----------
    .. [1] FedLin, Example 4.1 and section 5.2, second example of uncertainty quantification.
    """
    with _rows(X, y, coefficients) as model:
        theta = _hierarchical_coefficients()
        sigma = pt.exp(pm.Normal("log_sigma", 0, 1)) if noise_sd is None else noise_sd
        pm.Normal("response", model["X"] @ theta, sigma, observed=model["y"], dims="row")
    return model


def logistic_regression(X: Any, y: Any, *, coefficients: Sequence[str] | None = None) -> pm.Model:
    """Logistic regression with the hierarchy of `hierarchical_regression`.

    Parameters
    ----------
    X
        Predictors (n, d).
    y
        Outcomes (n,), integers 0 and 1.
    coefficients
        As in `hierarchical_regression`.

    Returns
    -------
    pymc.Model
        Shared "mu" and "tau", local "theta".

    Examples
    --------
    >>> import numpy as np
    >>> logistic_regression(np.ones((5, 2)), np.array([0, 1, 1, 0, 1])).observed_RVs
    [response]

    Notes
    -----
    *When this fails.* With few rows at a client the posterior of θ is skewed and nested Laplace is a little
    biased; compare one client with ``local=fedppl.local.NUTS()``.
    """
    with _rows(X, y, coefficients) as model:
        theta = _hierarchical_coefficients()
        pm.Bernoulli("response", logit_p=model["X"] @ theta, observed=model["y"], dims="row")
    return model


def poisson_regression(X: Any, y: Any, *, coefficients: Sequence[str] | None = None) -> pm.Model:
    """Poisson regression with logarithmic link and the hierarchy of `hierarchical_regression`.

    Parameters
    ----------
    X
        Predictors (n, d).
    y
        Counts (n,), integers.
    coefficients
        As in `hierarchical_regression`.

    Returns
    -------
    pymc.Model
        Shared "mu" and "tau", local "theta".

    Examples
    --------
    >>> import numpy as np
    >>> poisson_regression(np.ones((5, 2)), np.array([0, 3, 1, 0, 2])).observed_RVs
    [response]

    Notes
    -----
    *When this fails.* Counts with more spread than a Poisson's give intervals that are too narrow; declare
    ``pm.NegativeBinomial`` in its place.
    """
    with _rows(X, y, coefficients) as model:
        theta = _hierarchical_coefficients()
        pm.Poisson("response", pt.exp(model["X"] @ theta), observed=model["y"], dims="row")
    return model


def penalised_regression(
    X: Any,
    y: Any,
    *,
    prior: str = "lasso",
    hyper: str = "lognormal",
    coefficients: Sequence[str] | None = None,
    lambda_scale: float = 1.0,
    sigma2_scale: float = 1.0,
    mixing: float = 0.5,
    slab: float | None = 2.0,
) -> pm.Model:
    r"""Linear regression with a Bayesian penalty whose strength all clients learn together (FedLin, section 4.3).

    Parameters
    ----------
    X
        Predictors (n, d).
    y
        Real outcomes (n,).
    prior
        Of θ: "lasso", "ridge", "elastic net" or "horseshoe"; the module's docstring has the densities.
    hyper
        "lognormal": log λ ~ N(0, lambda_scale²) and log σ² ~ N(0, sigma2_scale²). "half-Cauchy":
        λ ~ C⁺(0, lambda_scale) and σ ~ C⁺(0, sigma2_scale^½). Either way log λ and log σ² are what is shared.
    coefficients
        As in `hierarchical_regression`.
    lambda_scale, sigma2_scale
        Scales of the hyper-priors.
    mixing
        α of the elastic net: towards 1 it is the lasso, towards 0 ridge.
    slab
        c of the regularised horseshoe, the largest size of a coefficient that is expected, in units of y; None
        for the plain horseshoe.

    Returns
    -------
    pymc.Model
        Shared "log_lambda" and "log_sigma2", local "theta"; the horseshoe has local "z" and "omega" and a
        deterministic "theta".

    Raises
    ------
    ValueError
        For an unknown prior or hyper-prior, or a setting out of range.

    Examples
    --------
    >>> import numpy as np
    >>> model = penalised_regression(np.ones((5, 2)), np.zeros(5), coefficients=["age", "dose"])
    >>> list(model.coords["predictor"])
    ['age', 'dose']

    Notes
    -----
    *When this fails.* Lasso and elastic net have a kink at θ = 0, where every Laplace approximation is wrong:
    fit them with ``EP(local=fedppl.local.NUTS())``, which fedppl insists on. The horseshoe is smooth in (z, ω) but far
    from Gaussian, and needs NUTS as well, though nothing refuses the default there.

    References
    ----------
    .. [1] FedLin, section 4.3.
    .. [2] Van Erp, Oberski and Mulder (2019), Shrinkage priors for Bayesian penalized regression.
    .. [3] Zou and Hastie (2005), Regularization and variable selection via the elastic net.
    .. [4] Piironen and Vehtari (2017), Sparsity information and regularization in the horseshoe.
    """
    if prior not in PRIORS:
        raise ValueError(f"prior={prior!r} is unknown; choose one of {PRIORS}.")
    if hyper not in HYPERS:
        raise ValueError(f"hyper={hyper!r} is unknown; choose one of {HYPERS}.")
    if not 0 < mixing < 1:
        raise ValueError(f'mixing={mixing} must lie between 0 and 1; the ends are prior="ridge" and prior="lasso".')
    if min(lambda_scale, sigma2_scale, slab if slab is not None else 1.0) <= 0:
        raise ValueError(f"lambda_scale={lambda_scale}, sigma2_scale={sigma2_scale}, slab={slab} must be positive.")
    with _rows(X, y, coefficients) as model:
        log_lambda, log_sigma2 = _penalty(hyper, lambda_scale, sigma2_scale)
        sigma = pt.exp(log_sigma2 / 2)
        scale = pt.exp(log_sigma2 / 2 - log_lambda)
        if prior == "lasso":
            theta = pm.Laplace("theta", 0, scale, dims="predictor")
        elif prior == "ridge":
            theta = pm.Normal("theta", 0, scale, dims="predictor")
        elif prior == "elastic net":
            log_density = functools.partial(_elastic_net_logp, mixing=mixing)
            draws = functools.partial(_elastic_net_draws, mixing=mixing)
            theta = pm.CustomDist("theta", scale, logp=log_density, random=draws, dims="predictor")
        else:
            theta = _horseshoe(scale, slab)
        pm.Normal("response", model["X"] @ theta, sigma, observed=model["y"], dims="row")
    return model


def _rows(X: Any, y: Any, coefficients: Sequence[str] | None) -> pm.Model:
    """Model that holds a client's rows and nothing else yet."""
    names = list(coefficients) if coefficients is not None else [str(i) for i in range(np.shape(X)[1])]
    with pm.Model(coords={"predictor": names}) as model:
        pm.Data("X", X, dims=("row", "predictor"))
        pm.Data("y", y, dims="row")
    return model


def _hierarchical_coefficients() -> Any:
    """θ ~ N(μ, diag τ) with the priors of μ and τ, in the current model."""
    mu = pm.Normal("mu", 0, 1, dims="predictor")
    tau = pm.LogNormal("tau", 0, 1, dims="predictor")
    return pm.Normal("theta", mu, pt.sqrt(tau), dims="predictor")


def _penalty(hyper: str, lambda_scale: float, sigma2_scale: float) -> tuple[Any, Any]:
    """Log λ and log σ² with their priors, under the same two names whatever the priors."""
    if hyper == "lognormal":
        return pm.Normal("log_lambda", 0, lambda_scale), pm.Normal("log_sigma2", 0, sigma2_scale)
    # PyMC derives the densities of the logarithms, Jacobians included.
    log_lambda = pm.CustomDist("log_lambda", lambda_scale, dist=_log_half_cauchy)
    log_sigma2 = pm.CustomDist("log_sigma2", np.sqrt(sigma2_scale), dist=_twice_log_half_cauchy)
    return log_lambda, log_sigma2


def _log_half_cauchy(scale: Any, size: Any) -> Any:
    return pt.log(pm.HalfCauchy.dist(scale, size=size))


def _twice_log_half_cauchy(scale: Any, size: Any) -> Any:
    return 2 * pt.log(pm.HalfCauchy.dist(scale, size=size))


def _elastic_net_logp(value: Any, scale: Any, mixing: float) -> Any:
    # C(α) = ∫ exp(-α|z| - (1 - α) z² / 2) dz, by completing the square on each side of zero. erfcx is
    # exp(x²) erfc(x), which stays finite as α approaches 1 where the two factors do not.
    curvature = 1 - mixing
    log_constant = 0.5 * np.log(2 * np.pi / curvature) + np.log(special.erfcx(mixing / np.sqrt(2 * curvature)))
    z = value / scale
    return -mixing * pt.abs(z) - 0.5 * curvature * z**2 - log_constant - pt.log(scale)


def _elastic_net_draws(scale: Any, mixing: float, rng: np.random.Generator, size: Any = None) -> Any:
    # |z| is a normal around -α / (1 - α) cut off at zero; the sign is fair.
    curvature = 1 - mixing
    cut = mixing / np.sqrt(curvature)
    upper_tail = rng.uniform(size=size) * special.ndtr(-cut)
    magnitude = -(special.ndtri(upper_tail) + cut) / np.sqrt(curvature)
    return scale * magnitude * rng.choice([-1.0, 1.0], size=size)


def _horseshoe(scale: Any, slab: float | None) -> Any:
    """Non-centred, because θ given its own scale is a funnel."""
    z = pm.Normal("z", 0, 1, dims="predictor")
    omega = pm.HalfCauchy("omega", 1, dims="predictor")
    size = scale * omega
    if slab is not None:
        size = slab * size / pt.sqrt(slab**2 + size**2)
    return pm.Deterministic("theta", z * size, dims="predictor")
