"""Models whose parameters are all shared, so that gradient methods on them have closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
from scipy.special import expit

from fedppl import FederatedModel
from tests.support import problems
from tests.support.problems import Clients

PRIOR = np.eye(2) / 9  # precision of μ ~ N(0, 3²)


def linear(*, seed: int = 17) -> tuple[FederatedModel, Clients]:
    """y ~ N(Xμ, 1) with other coefficients at every client, of 6, 10, 14 and 18 rows: averaging drifts."""
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(4):
        X = rng.normal(size=(6 + 4 * k, 2)) * [1.0 + 0.3 * k, 1.4 - 0.3 * k]
        mu = np.array([1.0, -1.0]) + 2.0 * rng.normal(size=2)
        data[f"plot {k}"] = {"X": X, "y": X @ mu + rng.normal(size=len(X))}
    return problems.declared(problems.polymorphic_builder, ("mu",)), data


def losses(clients: Clients, share: float | None = None) -> list[tuple[Any, Any, int]]:
    """(A_k, b_k, n_k) of F_k = ½ φᵀA_kφ − b_kᵀφ: the mean loss and a share of the prior, 1/K unless told."""
    share = 1 / len(clients) if share is None else share
    return [
        ((d["X"].T @ d["X"] + share * PRIOR) / len(d["y"]), d["X"].T @ d["y"] / len(d["y"]), len(d["y"]))
        for d in clients.values()
    ]


def mode(clients: Clients, weights: str = "rows") -> Any:
    """Minimiser of Σ w_k F_k; with rows as weights the posterior's mode, (Σ XᵀX + I/9)⁻¹ Σ Xᵀy."""
    parts = [(A, b, n if weights == "rows" else 1) for A, b, n in losses(clients)]
    return np.linalg.solve(sum(w * A for A, _, w in parts), sum(w * b for _, b, w in parts))


def after_steps(A: Any, b: Any, start: Any, rate: float, steps: int) -> Any:
    """Where T gradient steps on a quadratic end: x* + (I − ηA)ᵀ (x − x*)."""
    centre = np.linalg.solve(A, b)
    return centre + np.linalg.matrix_power(np.eye(len(b)) - rate * A, steps) @ (start - centre)


def logit_builder(X: Any, y: Any) -> Any:
    """y ~ Bernoulli(logit⁻¹ Xβ), β ~ N(0, 2²)."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, 2, shape=2)
        pm.Bernoulli("obs", logit_p=X @ beta, observed=y)
    return model


def logit(*, seed: int = 19) -> tuple[FederatedModel, Clients]:
    """Three clients of 20, 30 and 40 binary outcomes."""
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(3):
        X = rng.normal(size=(20 + 10 * k, 2))
        y = (rng.uniform(size=len(X)) < expit(X @ [1.0 - k, 0.5 * k])).astype(int)
        data[f"ward {k}"] = {"X": X, "y": y}
    return problems.declared(logit_builder, ("beta",)), data


def logit_gradient(clients: Clients, beta: Any) -> Any:
    """Gradient of −log posterior: Σ Xᵀ(logit⁻¹ Xβ − y) + β / 4."""
    return sum(d["X"].T @ (expit(d["X"] @ beta) - d["y"]) for d in clients.values()) + beta / 4


def spread_builder(y: Any) -> Any:
    """y ~ N(0, σ²), σ ~ HalfNormal(1): a shared prior that is not Gaussian on log σ."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        sigma = pm.HalfNormal("sigma", 1)
        pm.Normal("obs", 0, sigma, observed=y)
    return model


def spread(*, seed: int = 23) -> tuple[FederatedModel, Clients]:
    """Three clients of 8, 12 and 16 rows."""
    rng = np.random.default_rng(seed)
    data = {f"line {k}": {"y": 1.5 * rng.normal(size=8 + 4 * k)} for k in range(3)}
    return problems.declared(spread_builder, ("sigma",)), data


def spread_log_density(clients: Clients, u: Any, share: float = 1.0) -> Any:
    """log [p(y | σ) p(u)^share] at u = log σ, up to a constant: −n u − S e^(−2u) / 2 + share (u − e^(2u) / 2)."""
    rows, squares = (sum(f(d["y"]) for d in clients.values()) for f in (len, lambda y: float(y @ y)))
    return -rows * u - 0.5 * squares * np.exp(-2 * u) + share * (u - np.exp(2 * u) / 2)


def spread_moments(clients: Clients, share: float = 1.0) -> tuple[float, float]:
    """Mean and sd of u = log σ by quadrature."""
    u = np.linspace(-4, 4, 40_001)
    logp = spread_log_density(clients, u, share)
    weights = np.exp(logp - logp.max())
    weights /= weights.sum()
    mean = float(weights @ u)
    return mean, float(np.sqrt(weights @ (u - mean) ** 2))
