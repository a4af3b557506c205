r"""HM1, the models of FedLin whose clients' own coefficients are correlated: what a client declares.

As in `models.hm2`, every model here is a *builder* from one client's rows ``X`` (n, d) and outcomes ``y`` (n,) to a
``pm.Model``, with options that are set once for all clients by ``functools.partial``::

    builder = functools.partial(hm1.linear_regression, coefficients=names)
    model = fedppl.FederatedModel(builder, hm1.SHARED)
    fit = fedppl.fit(model, clients, fedppl.HM1())

**A client** (FedLin, section 3) has its own coefficients θ_k and noise,

.. math::

    \theta_k \sim N(0, I), \quad \log \sigma_k \sim N(m, s^2), \quad
    y_k \mid \theta_k, \sigma_k \sim N(X_k \theta_k, \sigma_k^2 I)

`logistic_regression` replaces the last two by :math:`y \sim \text{Bernoulli}(\operatorname{logit}^{-1} X\theta)`.

**What is shared** depends on the algorithm. `fedppl.HM1` and `fedppl.HM1Gradient` give every client its own θ_k and put
in the place of the declared priors one matrix normal,

.. math:: (\theta_1, \ldots, \theta_K) \sim \mathcal{MN}(\mu_0 1^\top, A, \Omega)

The declared :math:`N(\mu_0, A)`, here N(0, I), gives its mean and the covariance of the rows; Ω (K, K), the covariance
over clients, is estimated. With Ω = I the clients are independent and have the declared prior, which is
`fedppl.one_shot.Separate`. Every other algorithm, `fedppl.averaging.FedAvg` or `fedppl.EP` for example,
reads the same declaration as one θ for all clients. σ_k is local under all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

__all__ = ["SHARED", "linear_regression", "logistic_regression", "polynomial"]

SHARED = ("theta",)


def linear_regression(
    X: Any,
    y: Any,
    *,
    coefficients: Sequence[str] | None = None,
    noise_sd: float | None = None,
    log_sigma_mean: float = 0.0,
    log_sigma_sd: float = 1.0,
) -> pm.Model:
    r"""Linear regression of one client (FedLin, section 3).

    Parameters
    ----------
    X
        Predictors (n, d), with a column of ones for an intercept; `polynomial` makes one of cycles.
    y
        Real outcomes (n,).
    coefficients
        Names of the d columns, to label results; by default 0 to d - 1.
    noise_sd
        Standard deviation of the noise where it is known. By default each client has its own unknown one.
    log_sigma_mean, log_sigma_sd
        m and s in :math:`\log \sigma_k \sim N(m, s^2)`, in units of y; for example the log of a known resolution.

    Returns
    -------
    pymc.Model
        Shared "theta"; local "log_sigma" and a deterministic "sigma", unless the noise is known.

    Raises
    ------
    ValueError
        If a scale is not positive.

    Examples
    --------
    >>> import numpy as np
    >>> model = linear_regression(np.ones((5, 2)), np.zeros(5), coefficients=["level", "slope"])
    >>> [rv.name for rv in model.free_RVs], list(model.coords["coefficient"])
    (['theta', 'log_sigma'], ['level', 'slope'])

    Notes
    -----
    *When this fails.* The prior of θ is standard normal: bring y and the columns of X to unit scale first, or
    coefficients of another size are shrunk towards zero. Two or three rows at a client leave σ_k to its prior: state
    `log_sigma_mean` and `log_sigma_sd` with care then.

    References
    ----------
    .. [1] FedLin, section 3, eq. 2.
    """
    if min(1.0 if noise_sd is None else noise_sd, log_sigma_sd) <= 0:
        raise ValueError(f"noise_sd={noise_sd}, log_sigma_sd={log_sigma_sd} must be positive.")
    with _rows(X, y, coefficients) as model:
        theta = pm.Normal("theta", 0, 1, dims="coefficient")
        sigma: Any = noise_sd
        if noise_sd is None:
            sigma = pm.Deterministic("sigma", pt.exp(pm.Normal("log_sigma", log_sigma_mean, log_sigma_sd)))
        pm.Normal("response", model["X"] @ theta, sigma, observed=model["y"], dims="row")
    return model


def logistic_regression(X: Any, y: Any, *, coefficients: Sequence[str] | None = None) -> pm.Model:
    """Logistic regression of one client, for example of failures within a horizon.

    Parameters
    ----------
    X
        Predictors (n, d), with a column of ones for an intercept.
    y
        Outcomes (n,), integers 0 and 1.
    coefficients
        As in `linear_regression`.

    Returns
    -------
    pymc.Model
        Shared "theta", and nothing local.

    Examples
    --------
    >>> import numpy as np
    >>> logistic_regression(np.ones((5, 2)), np.array([0, 1, 1, 0, 1])).observed_RVs
    [response]

    Notes
    -----
    *When this fails.* With few rows at a client the posterior of its θ is skewed, and a Gaussian around its mode is a
    little off; where classes are separated the prior alone holds θ back.
    """
    with _rows(X, y, coefficients) as model:
        theta = pm.Normal("theta", 0, 1, dims="coefficient")
        pm.Bernoulli("response", logit_p=model["X"] @ theta, observed=model["y"], dims="row")
    return model


def polynomial(cycles: Any, degree: int, scale: float) -> np.ndarray:
    r"""Design of a polynomial trend: powers of cycle / scale, the intercept first.

    .. math:: X_{ij} = (c_i / s)^j, \qquad j = 0, \ldots, p

    Parameters
    ----------
    cycles
        Times c (n,), in cycles.
    degree
        p.
    scale
        s, the same at all clients: about the longest life makes every power of order one. It has to be agreed on
        beforehand, not computed from one client's rows.

    Returns
    -------
    numpy.ndarray
        (n, p + 1).

    Raises
    ------
    ValueError
        If the degree is not a whole number of at least 0, the scale is not positive or there is no vector of cycles.

    Examples
    --------
    >>> polynomial([0, 50, 100], degree=2, scale=100)
    array([[1.  , 0.  , 0.  ],
           [1.  , 0.5 , 0.25],
           [1.  , 1.  , 1.  ]])

    Notes
    -----
    *When this fails.* Raw powers are nearly collinear, so that coefficients are correlated and hard to read one by one;
    predictions are not affected. A prior of independent coefficients is a different one for another `scale`.
    """
    times = np.asarray(cycles, dtype=float)
    if not isinstance(degree, int | np.integer) or degree < 0:
        raise ValueError(f"degree={degree!r} must be a whole number, at least 0.")
    if not 0 < scale < np.inf:
        raise ValueError(f"scale={scale} must be positive and finite, such as the longest life in cycles.")
    if times.ndim != 1:
        raise ValueError(f"cycles has shape {times.shape}; pass a vector.")
    return np.vander(times / scale, degree + 1, increasing=True)


def _rows(X: Any, y: Any, coefficients: Sequence[str] | None) -> pm.Model:
    """Model that holds a client's rows and nothing else yet."""
    names = list(coefficients) if coefficients is not None else [str(i) for i in range(np.shape(X)[1])]
    with pm.Model(coords={"coefficient": names}) as model:
        pm.Data("X", X, dims=("row", "coefficient"))
        pm.Data("y", y, dims="row")
    return model
