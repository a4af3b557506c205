"""What default settings give: regressions on raw scales, many shared coordinates, priors in NUTS, one client alone.

Four parts, each with its own reference in the same run:

- regressions: coefficients N(0, 1000²), scale HalfCauchy(2.5), raw columns, rows split over 3 to 5 clients. Given log σ
  the coefficients are Gaussian, so that quadrature over log σ is exact. z is (mean − reference) / reference sd, r the
  ratio of sds, largest and smallest over the coordinates of the unconstrained space.
- many: 52 shared coordinates (hierarchical logistic) and 200 (linear, logistic), against nutpie on pooled rows; CPU
  seconds of the fit, and of nutpie's sampling scaled to an ESS of 1,000. Both with compiled models.
- density: one call of NUTS's log density with HalfNormal, HalfCauchy and Gamma shared priors against LogNormal.
- alone: one client of six rows of the quickstart's model.

    python benchmarks/default_settings.py --parts regressions many density alone
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from examples import quickstart
from fedppl import gaussian
from fedppl.contracts import Target
from fedppl.local.target import log_tilted

WARM = 3  # fits of other data before the first one that is timed


def columns(rng: np.random.Generator, rows: int, kind: int) -> np.ndarray:
    """Raw predictors: around 100, 0/1, a year, an interaction, and one on any scale."""
    score, arm = rng.normal(100, 15, rows), (rng.random(rows) < 0.4).astype(float)
    year = rng.integers(1990, 2021, rows).astype(float)
    wide = rng.normal(0, 1, rows) * 10 ** rng.uniform(-2, 3)
    return np.column_stack([score, arm, year, score * arm, wide][: kind + 1])


def regression(X: np.ndarray, y: np.ndarray) -> pm.Model:
    """One client's rows of a plain regression; everything is shared."""
    size = np.shape(X)[1]
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        intercept, beta = pm.Normal("intercept", 0, 1000), pm.Normal("beta", 0, 1000, shape=size)
        sigma = pm.HalfCauchy("sigma", 2.5)
        pm.Normal("obs", intercept + X @ beta, sigma, observed=y)
    return model


def exact(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and sds of (intercept, beta, log σ): the coefficients in closed form given log σ, which is integrated."""
    design = np.column_stack([np.ones(len(y)), X])
    values, axes = np.linalg.eigh(design.T @ design)
    least = np.linalg.lstsq(design, y, rcond=None)[0]
    residual, along = y - design @ least, axes.T @ least
    spread = 1 / np.sqrt(2 * max(len(y) - design.shape[1], 2))
    grid = 0.5 * np.log(residual @ residual / len(y)) + spread * np.linspace(-12, 14, 4001)
    ratio = values * np.exp(-2 * grid)[:, None]
    precision = ratio + 1e-6
    means = ratio * along / precision
    quadratic = residual @ residual * np.exp(-2 * grid) + np.sum(ratio * (along - means) ** 2 + 1e-6 * means**2, axis=1)
    log_density = -len(y) * grid - 0.5 * quadratic - 0.5 * np.log(precision).sum(axis=1)
    log_density += grid - np.log1p(np.exp(2 * grid) / 2.5**2)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    coefficients = means @ axes.T
    mean, log_sigma = weights @ coefficients, weights @ grid
    variance = (axes**2) @ (weights @ (1 / precision)) + weights @ (coefficients - mean) ** 2
    return np.append(mean, log_sigma), np.sqrt(np.append(variance, weights @ (grid - log_sigma) ** 2))


def regressions(count: int, seed: int) -> dict[str, Any]:
    """Fit `count` regressions at default settings and hold them against quadrature."""
    worst: dict[str, float] = {"z": 0.0, "r_low": np.inf, "r_high": 0.0, "cpu_s": 0.0, "not_converged": 0, "rounds": 0}
    model = fedppl.FederatedModel(regression, ["intercept", "beta", "sigma"])
    for case in range(-WARM, count):
        rng = np.random.default_rng([seed, case + WARM])
        rows, kind, parts = int(np.exp(rng.uniform(np.log(40), np.log(1200)))), case % 5, int(rng.integers(3, 6))
        X = columns(rng, rows, kind)
        slopes = rng.normal(0, 1, kind + 1) / X.std(axis=0) * rng.uniform(2, 15)
        y = rng.normal(0, 50) + X @ slopes + rng.normal(0, 10 ** rng.uniform(-0.3, 2.5), rows)
        split = np.array_split(rng.permutation(rows), parts)
        started = time.process_time()
        fit = fedppl.fit(
            model,
            {f"client {k}": {"X": X[rows_k], "y": y[rows_k]} for k, rows_k in enumerate(split)},
            fedppl.EP(),
            progressbar=False,
            random_seed=seed,
        )
        seconds = time.process_time() - started
        if case < 0:
            continue
        mean, sd = exact(X, y)
        z, r = np.nan, np.array([np.nan])
        if fit.status.ok:
            z = np.abs((gaussian.mean(fit.posterior) - mean) / sd).max()
            r = gaussian.standard_deviations(fit.posterior) / sd
            worst["z"], worst["cpu_s"] = max(worst["z"], z), max(worst["cpu_s"], seconds)
            worst["r_low"], worst["r_high"] = min(worst["r_low"], r.min()), max(worst["r_high"], r.max())
        worst["not_converged"] += not fit.status.ok
        worst["rounds"] = max(worst["rounds"], len(fit.records))
        print(
            f"regression {case:2d}: {rows:4d} rows, {parts} clients, {kind + 2} coefficients: {fit.status.value} in "
            f"{len(fit.records)} rounds, |z| {z:.3f}, r {r.min():.3f} to {r.max():.3f}, {seconds:.1f} CPU-s",
            flush=True,
        )
    return {name: round(float(value), 4) for name, value in worst.items()}


def hierarchical_logistic(X: np.ndarray, y: np.ndarray) -> pm.Model:
    """Fifty coefficients, their mean and their sd, all shared."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu, tau = pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1)
        beta = pm.Normal("beta", mu, tau, shape=50)
        pm.Bernoulli("obs", logit_p=X @ beta, observed=y)
    return model


def logistic(X: np.ndarray, y: np.ndarray) -> pm.Model:
    """Two hundred coefficients with standard normal priors."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, 1, shape=200)
        pm.Bernoulli("obs", logit_p=X @ beta, observed=y)
    return model


def linear(X: np.ndarray, y: np.ndarray) -> pm.Model:
    """199 coefficients with standard normal priors, and the noise."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta, sigma = pm.Normal("beta", 0, 1, shape=199), pm.HalfNormal("sigma", 1)
        pm.Normal("obs", X @ beta, sigma, observed=y)
    return model


def many(draws: int, seed: int) -> dict[str, Any]:
    """Fit models with 52 and 200 shared coordinates and hold them against nutpie on pooled rows."""
    import arviz as az
    import nutpie

    results: dict[str, Any] = {}
    cases = {
        "hierarchical logistic, m = 52": (hierarchical_logistic, ["mu", "tau", "beta"], 10, 100, 50),
        "logistic, m = 200": (logistic, ["beta"], 20, 200, 200),
        "linear, m = 200": (linear, ["beta", "sigma"], 20, 200, 199),
    }
    for name, (builder, shared, parts, rows, size) in cases.items():
        rng = np.random.default_rng(seed)
        X, beta = rng.normal(size=(parts, rows, size)), rng.normal(0.1, 0.3, size)
        mean = X @ beta
        y = mean + rng.normal(size=mean.shape)
        if builder is not linear:
            y = (rng.random(mean.shape) < 1 / (1 + np.exp(-mean))).astype(int)
        clients = {f"client {k}": {"X": X[k], "y": y[k]} for k in range(parts)}
        model = fedppl.FederatedModel(builder, shared)
        fedppl.fit(model, clients, fedppl.EP(), rounds=1, progressbar=False, random_seed=seed)  # compiled from here on
        started = time.process_time()
        fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=seed)
        seconds = time.process_time() - started
        compiled = nutpie.compile_pymc_model(builder(X.reshape(-1, size), y.ravel()))
        started = time.process_time()
        trace = nutpie.sample(compiled, draws=draws, tune=500, chains=4, cores=2, seed=seed, progress_bar=False)
        sampling = time.process_time() - started
        ess = min(float(values.min()) for values in az.ess(trace.posterior).data_vars.values())
        z, r = [], []
        mean_q, sd_q = gaussian.mean(fit.posterior), gaussian.standard_deviations(fit.posterior)
        for variable, where in zip(fit.layout.variables, fit.layout.slices.values(), strict=True):
            values = trace.posterior[variable.name].values.reshape(-1, variable.size)
            values = np.log(values) if variable.transform else values
            z.append(np.abs(mean_q[where] - values.mean(axis=0)) / values.std(axis=0))
            r.append(sd_q[where] / values.std(axis=0))
        results[name] = {
            "status": fit.status.value,
            "rounds": len(fit.records),
            "z": round(float(np.concatenate(z).max()), 3),
            "r_low": round(float(np.concatenate(r).min()), 3),
            "r_high": round(float(np.concatenate(r).max()), 3),
            "cpu_s": round(seconds, 1),
            "nutpie_cpu_s_for_ess_1000": round(sampling * 1000 / ess, 1),
            "reference_ess": round(ess),
        }
        print(name, results[name], flush=True)
    return results


def density(calls: int) -> dict[str, float]:
    """CPU time of a call of NUTS's log density by the prior of the shared scale, against LogNormal."""
    priors = {
        "LogNormal": lambda: pm.LogNormal("tau", 0, 1),
        "HalfNormal": lambda: pm.HalfNormal("tau", 1),
        "HalfCauchy": lambda: pm.HalfCauchy("tau", 1),
        "Gamma": lambda: pm.Gamma("tau", 2, 1),
    }
    functions = {}
    rng = np.random.default_rng(1)
    for name, prior in priors.items():

        def builder(X: np.ndarray, y: np.ndarray, prior: Any = prior) -> pm.Model:
            with pm.Model() as model:
                X, y = pm.Data("X", X), pm.Data("y", y)
                mu, tau = pm.Normal("mu", 0, 5, shape=3), prior()
                theta = pm.Normal("theta", mu, tau, shape=3)
                pm.Bernoulli("obs", logit_p=X @ theta, observed=y)
            return model

        data = {"X": rng.normal(size=(30, 3)), "y": rng.integers(0, 2, 30)}
        client = fedppl.FederatedModel(builder, ["mu", "tau"]).enrol({"client": data})["client"]
        q = client.prior.gaussian
        functions[name] = log_tilted(Target(client, q, q, 0.0 if client.prior.is_gaussian else 1.0))
    x = np.full(7, 0.1)
    best = dict.fromkeys(functions, np.inf)
    for _ in range(5):
        for name, function in functions.items():
            started = time.process_time()
            for _ in range(calls):
                function(x)
            best[name] = min(best[name], time.process_time() - started)
    return {name: round(value / best["LogNormal"], 3) for name, value in best.items()}


def alone(seed: int) -> dict[str, Any]:
    """Fit one client of six rows by itself, a second time, and draw its posterior."""
    model = fedppl.FederatedModel(quickstart.hospital, ["mu", "tau"])
    six = quickstart.simulate(np.random.default_rng(seed), 6, quickstart.AVERAGE)
    for _ in range(2):
        started = time.process_time()
        fit = fedppl.fit(model, {"alone": six}, fedppl.EP(), progressbar=False, random_seed=seed)
        fit.client("alone")
        seconds = time.process_time() - started
    return {"status": fit.status.value, "rounds": len(fit.records), "cpu_s": round(seconds, 2)}


def main() -> None:
    """Run the parts and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["regressions", "many", "density", "alone"])
    parser.add_argument("--regressions", type=int, default=20)
    parser.add_argument("--draws", type=int, default=3000, help="draws of each of nutpie's four chains")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    figures: dict[str, Any] = {}
    if "regressions" in options.parts:
        figures["regressions"] = regressions(options.regressions, options.seed)
    if "many" in options.parts:
        figures["many"] = many(options.draws, options.seed)
    if "density" in options.parts:
        figures["density"] = density(options.calls)
    if "alone" in options.parts:
        figures["alone"] = alone(options.seed)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
