"""A random intercept against quadrature: binary, counts and Gaussian outcomes, at 3 to 300 groups of 5 to 40 rows.

    eta_gi = mu + slope x_gi + a_g,  a_g ~ N(0, tau²);  mu ~ N(0, 2²),  slope ~ N(0, 1),  tau ~ HalfNormal(1)

and sigma ~ HalfNormal(1) of Gaussian outcomes. Over log tau (and log sigma) goes the trapezium rule. Given these mu and
slope are Gaussian where outcomes are; else an adaptive rule of Gauss and Hermite goes over them, and another over each
a_g.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import expit, gammaln, logsumexp

import fedppl
from fedppl.types import Array

SIZES = (3, 6, 12, 30, 50, 100, 300)
FAMILIES = ("bernoulli", "poisson", "gaussian")
_PRIOR = np.array([1 / 2.0**2, 1 / 1.0**2])  # precisions of mu and slope
_WRONG_Z, _WRONG_R = 0.03, 0.015


class Rows(NamedTuple):
    """All rows, in order of their groups."""

    x: Array
    y: Array
    starts: Array  # (K,), of groups

    def by_group(self, values: Array) -> Array:
        """Sums over the rows of each group, (..., N) to (..., K)."""
        return np.add.reduceat(values, self.starts, axis=-1)

    @property
    def of(self) -> Array:
        """The group of each row."""
        return np.repeat(np.arange(len(self.starts)), np.diff([*self.starts, len(self.y)]))


def group(x: Any, y: Any, family: str) -> pm.Model:
    """One group."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        mu, slope, tau = pm.Normal("mu", 0, 2), pm.Normal("slope", 0, 1), pm.HalfNormal("tau", 1)
        eta = mu + slope * x + pm.Normal("a", 0, tau)
        if family == "bernoulli":
            pm.Bernoulli("obs", logit_p=eta, observed=y)
        elif family == "poisson":
            pm.Poisson("obs", pm.math.exp(eta), observed=y)
        else:
            pm.Normal("obs", eta, pm.HalfNormal("sigma", 1), observed=y)
    return model


def simulate(family: str, count: int, seed: int) -> Rows:
    """Groups whose levels have an sd of .6."""
    rng = np.random.default_rng([seed, count, FAMILIES.index(family)])
    lengths = rng.integers(5, 41, count)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    x = rng.normal(size=lengths.sum())
    eta = 0.4 + 0.5 * x + np.repeat(rng.normal(0, 0.6, count), lengths)
    if family == "bernoulli":
        y = (rng.random(len(x)) < expit(eta)).astype(int)
    else:
        y = rng.poisson(np.exp(eta)) if family == "poisson" else eta + 0.8 * rng.normal(size=len(x))
    return Rows(x, y, starts)


# Quadrature -----------------------------------------------------------------------------------------------------------


class _Integral(NamedTuple):
    """Of a value of the spreads: log density, and mean and second moments of (mu, slope) given it."""

    log_density: float
    mean: Array
    square: Array


def _terms(family: str, y: Array, eta: Array) -> tuple[Array, Array, Array]:
    """Log likelihood of rows, its slope and the negative of its curvature."""
    if family == "bernoulli":
        p = expit(eta)
        return y * eta - np.logaddexp(0, eta), y - p, p * (1 - p)
    rate = np.exp(eta)
    return y * eta - rate - gammaln(y + 1), y - rate, rate


def _marginal(family: str, rows: Rows, at: Array, tau: float, nodes: int = 25) -> Array:
    """Log likelihood of all rows at values of (mu, slope), (S, 2) to (S,), each a_g about its own mode."""
    of, fixed = rows.of, at[:, :1] + at[:, 1:] * rows.x
    a = np.zeros((len(at), len(rows.starts)))
    for _ in range(50):
        _, slope, curvature = _terms(family, rows.y, fixed + a[:, of])
        step = (rows.by_group(slope) - a / tau**2) / (rows.by_group(curvature) + 1 / tau**2)
        a += np.clip(step, -1, 1)
        if np.max(np.abs(step)) < 1e-9:
            break
    curvature = rows.by_group(_terms(family, rows.y, fixed + a[:, of])[2])
    sd = 1 / np.sqrt(curvature + 1 / tau**2)
    points, weights = hermegauss(nodes)
    logs = []
    for point, weight in zip(points, weights, strict=True):
        moved = a + point * sd
        log = rows.by_group(_terms(family, rows.y, fixed + moved[:, of])[0]) - 0.5 * (moved / tau) ** 2
        logs.append(log + np.log(sd / tau * weight / np.sqrt(2 * np.pi)) + 0.5 * point**2)
    return np.asarray(logsumexp(logs, axis=0).sum(axis=1))


def _mode(family: str, rows: Rows, tau: float) -> tuple[Array, Array]:
    """Mode of (mu, slope, a) and the covariance of (mu, slope) by the curvature there."""
    K, of = len(rows.starts), rows.of
    X = np.stack([np.ones_like(rows.x), rows.x], axis=1)
    b, a = np.zeros(2), np.zeros(K)
    for _ in range(100):
        _, slope, w = _terms(family, rows.y, X @ b + a[of])
        cross = rows.by_group((X * w[:, None]).T).T  # (K, 2)
        own = rows.by_group(w) + 1 / tau**2
        of_a = rows.by_group(slope) - a / tau**2
        precision = (X.T * w) @ X + np.diag(_PRIOR) - (cross.T / own) @ cross
        step = np.linalg.solve(precision, X.T @ slope - _PRIOR * b - cross.T @ (of_a / own))
        change = (of_a - cross @ step) / own
        scale = min(1.0, 2.0 / max(np.max(np.abs(step)), np.max(np.abs(change))))
        b, a = b + scale * step, a + scale * change
        if max(np.max(np.abs(step)), np.max(np.abs(change))) < 1e-10:
            break
    return b, np.linalg.inv(precision)


def _over_nodes(family: str, rows: Rows, tau: float) -> _Integral:
    center, covariance = _mode(family, rows, tau)
    points, weights = hermegauss(15 if len(rows.starts) < 20 else 9)
    z = np.stack(np.meshgrid(points, points, indexing="ij"), -1).reshape(-1, 2)
    log_weights = np.log(np.multiply.outer(weights, weights)).ravel() + 0.5 * np.sum(z**2, axis=1)
    root = np.linalg.cholesky(covariance)
    at = center + z @ root.T
    prior = 0.5 * np.sum(np.log(_PRIOR / (2 * np.pi)) - _PRIOR * at**2, axis=1)
    logs = _marginal(family, rows, at, tau) + prior + log_weights + np.log(np.linalg.det(root))
    w = np.exp(logs - logsumexp(logs))
    return _Integral(float(logsumexp(logs)), w @ at, (at.T * w) @ at)


def _gaussian(rows: Rows, tau: float, sigma: float) -> _Integral:
    X = np.stack([np.ones_like(rows.x), rows.x], axis=1)
    n = rows.by_group(np.ones_like(rows.x))
    shrink = tau**2 / (sigma**2 + n * tau**2)  # V⁻¹ = (I - shrink 1 1ᵀ) / sigma²
    sum_x, sum_y = rows.by_group(X.T), rows.by_group(rows.y)
    XX, Xy = X.T @ X - (sum_x * shrink) @ sum_x.T, X.T @ rows.y - sum_x @ (shrink * sum_y)
    yy = rows.y @ rows.y - shrink @ sum_y**2
    precision, pull = XX / sigma**2 + np.diag(_PRIOR), Xy / sigma**2
    mean = np.linalg.solve(precision, pull)
    log_det_V = np.sum(2 * n * np.log(sigma) + np.log1p(n * tau**2 / sigma**2))
    logs = -0.5 * (len(rows.y) * np.log(2 * np.pi) + log_det_V + yy / sigma**2 - pull @ mean)
    logs += 0.5 * np.sum(np.log(_PRIOR)) - 0.5 * np.linalg.slogdet(precision)[1]
    return _Integral(float(logs), mean, np.linalg.inv(precision) + np.multiply.outer(mean, mean))


def quadrature(family: str, rows: Rows) -> tuple[dict[str, tuple[float, float]], float]:
    """Mean and sd of mu, slope, tau, log tau (and sigma), and the log evidence."""
    # Where few rows tell the spread its density falls like tau below; where many do, it is narrow.
    log_tau = np.linspace(-9.0, 2.5, 161)
    if family == "gaussian":
        log_sigma = np.linspace(-1.2, 0.8, 401)
        spreads = np.stack(np.meshgrid(log_tau, log_sigma, indexing="ij"), -1).reshape(-1, 2)
        parts = [_gaussian(rows, *np.exp(at)) for at in spreads]
    else:
        spreads = log_tau[:, None]
        parts = [_over_nodes(family, rows, float(np.exp(at[0]))) for at in spreads]
    # HalfNormal(1) of each, on the log scale
    prior = np.sum(0.5 * np.log(2 / np.pi) - 0.5 * np.exp(2 * spreads) + spreads, axis=1)
    logs = prior + [part.log_density for part in parts]
    step = np.prod([np.diff(np.unique(column))[0] for column in spreads.T])
    w = np.exp(logs - logsumexp(logs))
    mean, square = w @ [part.mean for part in parts], np.tensordot(w, [part.square for part in parts], 1)
    sd = np.sqrt(np.diag(square - np.multiply.outer(mean, mean)))
    columns = {"tau": np.exp(spreads[:, 0]), "log tau": spreads[:, 0]}
    if family == "gaussian":
        columns["sigma"] = np.exp(spreads[:, 1])
    moments = {name: (float(mean[k]), float(sd[k])) for k, name in enumerate(("mu", "slope"))}
    for name, values in columns.items():
        moments[name] = float(w @ values), float(np.sqrt(w @ (values - w @ values) ** 2))
    return moments, float(logsumexp(logs) + np.log(step))


# The comparison -------------------------------------------------------------------------------------------------------


def intercepts(sizes: tuple[int, ...] = SIZES, seeds: tuple[int, ...] = (1,)) -> list[dict[str, Any]]:
    """Every family and number of groups: the largest |z| and the range of r of what is declared, and of log tau."""
    table = []
    for family in FAMILIES:
        names = ["mu", "slope", "tau", *(["sigma"] if family == "gaussian" else [])]
        model = fedppl.FederatedModel(functools.partial(group, family=family), names)
        for count in sizes:
            for seed in seeds:
                rows = simulate(family, count, seed)
                ends = [*rows.starts[1:], len(rows.y)]
                clients = {
                    f"group {k}": {"x": rows.x[i:j], "y": rows.y[i:j]}
                    for k, (i, j) in enumerate(zip(rows.starts, ends, strict=True))
                }
                fedppl.fit(model, clients, progressbar=False, random_seed=seed)  # what it compiles
                started = time.process_time()
                fit = fedppl.fit(model, clients, progressbar=False, random_seed=seed)
                seconds = time.process_time() - started
                exact, evidence = quadrature(family, rows)
                table.append(_row(fit, exact, evidence, names) | {"cpu_seconds": round(seconds, 2)})
                table[-1] = {"family": family, "groups": count, "seed": seed} | table[-1]
                print(f"intercepts: {table[-1]}", flush=True)
    return table


def _row(fit: Any, exact: dict[str, tuple[float, float]], evidence: float, names: list[str]) -> dict[str, Any]:
    summary = fit.summary()
    z = {name: (summary.loc[name, "mean"] - exact[name][0]) / exact[name][1] for name in names}
    r = {name: summary.loc[name, "sd"] / exact[name][1] for name in names}
    at = list(fit.layout.slices).index("tau")  # each is one coordinate
    gaussian = fit.idata["fit"]
    log_sd = float(np.sqrt(gaussian["covariance_matrix"].values[at, at]))
    worst = max(abs(value) for value in z.values())
    return {
        "status": fit.status.value,
        "z": round(float(worst), 4),
        "r": [round(float(min(r.values())), 4), round(float(max(r.values())), 4)],
        "right": bool(worst < _WRONG_Z and all(abs(value - 1) < _WRONG_R for value in r.values())),
        "log_tau": [
            round(float((gaussian["mean_vector"].values[at] - exact["log tau"][0]) / exact["log tau"][1]), 4),
            round(log_sd / exact["log tau"][1], 4),
        ],
        "log_evidence_error": round(float(fit.log_evidence.value - evidence), 5),
        "exchanges": len(fit.records),
    }
