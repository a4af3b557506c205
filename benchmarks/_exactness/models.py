"""Twelve hierarchical models of different kinds, each declared once: for a client alone, and for all clients' rows.

A problem has a function that declares what is shared, one that declares a client's part given that, and data. So the
reference and the federated fit cannot differ in anything but where the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt


def _same(x: Any) -> Any:
    return x


def _logit(x: Any) -> Any:
    return np.log(x / (1 - x))


def _sds_and_partial(x: Any) -> Any:
    """Log sds and the partial correlation, artanh, of a packed root of two rows: the coordinates of a fit."""
    log_sds = np.log(x[:, 0]), 0.5 * np.log(x[:, 1] ** 2 + x[:, 2] ** 2)
    return np.stack([log_sds[0], np.arcsinh(x[:, 1] / x[:, 2]), log_sds[1]], axis=1)


class Problem(NamedTuple):
    """A declaration in two parts, and data of all clients."""

    name: str
    shared: Callable[[], dict[str, Any]]  # declares the shared variables
    client: Callable[..., None]  # (shared, prefix, **data) declares a client's part
    clients: dict[str, dict[str, Any]]
    local: str  # the local variable that is compared
    ways: Mapping[str, Any]  # shared variable to the way to the unconstrained space, of draws (S, n)

    def shared_names(self) -> list[str]:
        """What clients share."""
        return list(self.ways)

    def unconstrained(self) -> list[tuple[str, Any]]:
        """Shared variables and the way of each to the unconstrained space, in the order of the declaration."""
        return list(self.ways.items())

    def builder(self) -> Callable[..., pm.Model]:
        """One client's model."""
        names = list(next(iter(self.clients.values())))

        def declared(**data: Any) -> pm.Model:
            with pm.Model() as model:
                held = {name: pm.Data(name, value) for name, value in data.items()}
                self.client(self.shared(), "", **held)
            return model

        namespace: dict[str, Any] = {"declared": declared}
        # fedppl reads the names of a builder's arguments.
        exec(f"def builder({', '.join(names)}): return declared({', '.join(f'{n}={n}' for n in names)})", namespace)
        made: Callable[..., pm.Model] = namespace["builder"]
        made.__qualname__ = made.__name__ = self.name
        return made

    def pooled(self) -> pm.Model:
        """All clients' rows in one model."""
        with pm.Model() as model:
            shared = self.shared()
            for client_id, data in self.clients.items():
                self.client(shared, f"{client_id}_", **data)
        return model


def _own(prefix: str, name: str, mean: Any, root: Any) -> Any:
    """A normal variable of a client's own; standardised where all clients are sampled at once.

    The posterior is the same. NUTS diverges in the funnel that the other form has near a scale of zero, and what it
    leaves out there is missing from the sd of the scale's logarithm.
    """
    if not prefix:
        return pm.MvNormal(name, mean, chol=root) if root.ndim == 2 else pm.Normal(name, mean, root)
    z = pm.Normal(f"{prefix}{name}_z", shape=2 if root.ndim else None)
    return pm.Deterministic(f"{prefix}{name}", mean + (root @ z if root.ndim == 2 else root * z))


def _sites(rng: np.random.Generator, count: int, low: int, high: int) -> list[int]:
    sizes = np.round(np.geomspace(low, high, count)).astype(int)
    return [int(n) for n in rng.permutation(sizes)]


def _ids(count: int) -> list[str]:
    return [f"site{k}" for k in range(count)]


def _expit(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def lkj_logistic() -> Problem:
    """Random intercept and slope with an LKJ correlation, sites of 2 to 80 rows."""
    rng = np.random.default_rng(101)

    def shared() -> dict[str, Any]:
        chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0), compute_corr=True)
        return {"mu": pm.Normal("mu", 0, 1.5, shape=2), "chol": chol}

    def client(s: Any, prefix: str, x: Any, y: Any) -> None:
        beta = _own(prefix, "beta", s["mu"], s["chol"])
        pm.Bernoulli(f"{prefix}obs", logit_p=beta[0] + beta[1] * x, observed=y)

    data = {}
    for k, n in zip(_ids(12), _sites(rng, 12, 2, 80), strict=True):
        a, b = rng.multivariate_normal([-0.5, 0.8], [[0.64, 0.2], [0.2, 0.36]])
        x = rng.normal(size=n)
        data[k] = {"x": x, "y": (rng.uniform(size=n) < _expit(a + b * x)).astype(int)}
    return Problem("lkj_logistic", shared, client, data, "beta", {"chol": _sds_and_partial, "mu": _same})


def negative_binomial() -> Problem:
    """Counts with exposure, a shared dispersion and a slope that all share."""
    rng = np.random.default_rng(102)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 0, 2),
            "tau": pm.HalfNormal("tau", 1),
            "slope": pm.Normal("slope", 0, 1),
            "alpha": pm.Gamma("alpha", 2, 0.5),
        }

    def client(s: Any, prefix: str, x: Any, exposure: Any, y: Any) -> None:
        a = pm.Normal(f"{prefix}a", s["mu"], s["tau"])
        rate = exposure * pm.math.exp(a + s["slope"] * x)
        pm.NegativeBinomial(f"{prefix}obs", mu=rate, alpha=s["alpha"], observed=y)

    data = {}
    for k, n in zip(_ids(10), _sites(rng, 10, 3, 60), strict=True):
        a, x, exposure = rng.normal(0.3, 0.6), rng.normal(size=n), rng.uniform(0.5, 4, size=n)
        mean = exposure * np.exp(a + 0.4 * x)
        data[k] = {"x": x, "exposure": exposure, "y": rng.negative_binomial(3, 3 / (3 + mean))}
    return Problem(
        "negative_binomial", shared, client, data, "a", {"mu": _same, "tau": np.log, "slope": _same, "alpha": np.log}
    )


def censored_weibull() -> Problem:
    """Survival with right censoring; the shape is shared, the scale of each site its own."""
    rng = np.random.default_rng(103)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 0, 2),
            "tau": pm.HalfNormal("tau", 1),
            "effect": pm.Normal("effect", 0, 1),
            "shape": pm.Gamma("shape", 4, 3),
        }

    def client(s: Any, prefix: str, arm: Any, time: Any, event: Any) -> None:
        a = pm.Normal(f"{prefix}a", s["mu"], s["tau"])
        scale = pm.math.exp(a + s["effect"] * arm)
        hazard = pm.math.log(s["shape"]) - pm.math.log(scale) + (s["shape"] - 1) * pm.math.log(time / scale)
        survival = pm.math.exp(s["shape"] * pm.math.log(time / scale))
        # a custom density with its rows: the event term for who had one, survival for all
        pm.CustomDist(
            f"{prefix}obs", hazard, survival, event, logp=lambda value, h, c, e: e * h - c + 0 * value, observed=time
        )

    data = {}
    for k, n in zip(_ids(10), _sites(rng, 10, 4, 50), strict=True):
        a, arm = rng.normal(1.0, 0.5), rng.integers(0, 2, size=n).astype(float)
        time = np.exp(a + 0.5 * arm) * rng.weibull(1.4, size=n)
        limit = rng.uniform(1, 8, size=n)
        data[k] = {"arm": arm, "time": np.minimum(time, limit), "event": (time <= limit).astype(float)}
    return Problem(
        "censored_weibull", shared, client, data, "a", {"mu": _same, "tau": np.log, "effect": _same, "shape": np.log}
    )


def beta_binomial() -> Problem:
    """Proportions at sites, in Gelman's parametrisation by mean and size."""
    rng = np.random.default_rng(104)

    def shared() -> dict[str, Any]:
        return {"m": pm.Beta("m", 2, 2), "size": pm.LogNormal("size", 2, 1)}

    def client(s: Any, prefix: str, n: Any, y: Any) -> None:
        p = pm.Beta(f"{prefix}p", s["m"] * s["size"], (1 - s["m"]) * s["size"])
        pm.Binomial(f"{prefix}obs", n=n, p=p, observed=y)

    data = {}
    for k, n in zip(_ids(14), _sites(rng, 14, 3, 120), strict=True):
        p = rng.beta(3, 9)
        data[k] = {"n": np.array([n]), "y": np.array([rng.binomial(n, p)])}
    return Problem("beta_binomial", shared, client, data, "p", {"m": _logit, "size": np.log})


def ordinal() -> Problem:
    """Five ordered answers, shared cutpoints by positive steps, an effect and site intercepts."""
    rng = np.random.default_rng(105)

    def shared() -> dict[str, Any]:
        return {
            "first": pm.Normal("first", -1.5, 1),
            "steps": pm.LogNormal("steps", 0, 0.5, shape=3),
            "tau": pm.HalfNormal("tau", 1),
            "slope": pm.Normal("slope", 0, 1),
        }

    def client(s: Any, prefix: str, x: Any, y: Any) -> None:
        a = pm.Normal(f"{prefix}a", 0, s["tau"])
        cuts = pt.concatenate([s["first"][None], s["first"] + pt.cumsum(s["steps"])])
        pm.OrderedLogistic(f"{prefix}obs", eta=a + s["slope"] * x, cutpoints=cuts, observed=y)

    data = {}
    for k, n in zip(_ids(8), _sites(rng, 8, 5, 60), strict=True):
        a, x = rng.normal(0, 0.7), rng.normal(size=n)
        latent = a + 0.6 * x + rng.logistic(size=n)
        data[k] = {"x": x, "y": np.searchsorted([-1.5, -0.5, 0.7, 1.8], latent)}
    return Problem(
        "ordinal", shared, client, data, "a", {"first": _same, "steps": np.log, "tau": np.log, "slope": _same}
    )


def zero_inflated() -> Problem:
    """Zero-inflated Poisson counts."""
    rng = np.random.default_rng(106)

    def shared() -> dict[str, Any]:
        return {"mu": pm.Normal("mu", 0, 2), "tau": pm.HalfNormal("tau", 1), "psi": pm.Beta("psi", 2, 2)}

    def client(s: Any, prefix: str, y: Any) -> None:
        a = pm.Normal(f"{prefix}a", s["mu"], s["tau"])
        pm.ZeroInflatedPoisson(f"{prefix}obs", psi=s["psi"], mu=pm.math.exp(a), observed=y)

    data = {}
    for k, n in zip(_ids(10), _sites(rng, 10, 4, 50), strict=True):
        rate = np.exp(rng.normal(0.8, 0.5))
        data[k] = {"y": rng.poisson(rate, size=n) * (rng.uniform(size=n) < 0.7)}
    return Problem("zero_inflated", shared, client, data, "a", {"mu": _same, "tau": np.log, "psi": _logit})


def student_t() -> Problem:
    """Robust regression with unknown degrees of freedom and noise that all share."""
    rng = np.random.default_rng(107)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 0, 2, shape=2),
            "tau": pm.HalfNormal("tau", 1, shape=2),
            "sigma": pm.HalfNormal("sigma", 1),
            "nu": pm.Gamma("nu", 2, 0.2),
        }

    def client(s: Any, prefix: str, x: Any, y: Any) -> None:
        beta = _own(prefix, "beta", s["mu"], s["tau"])
        pm.StudentT(f"{prefix}obs", nu=s["nu"], mu=beta[0] + beta[1] * x, sigma=s["sigma"], observed=y)

    data = {}
    for k, n in zip(_ids(8), _sites(rng, 8, 5, 60), strict=True):
        b, x = rng.normal([0.5, 1.0], [0.6, 0.4]), rng.normal(size=n)
        data[k] = {"x": x, "y": b[0] + b[1] * x + 0.5 * rng.standard_t(4, size=n)}
    return Problem(
        "student_t", shared, client, data, "beta", {"mu": _same, "tau": np.log, "sigma": np.log, "nu": np.log}
    )


def overdispersed_poisson() -> Problem:
    """Poisson with an effect of each row: as many local variables as rows."""
    rng = np.random.default_rng(108)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 0, 2),
            "tau": pm.HalfNormal("tau", 1),
            "slope": pm.Normal("slope", 0, 1),
            "over": pm.HalfNormal("over", 1),
        }

    def client(s: Any, prefix: str, x: Any, y: Any) -> None:
        a = pm.Normal(f"{prefix}a", s["mu"], s["tau"])
        row = pm.Normal(f"{prefix}row", a + s["slope"] * x, s["over"], shape=x.shape)
        pm.Poisson(f"{prefix}obs", pm.math.exp(row), observed=y)

    data = {}
    for k, n in zip(_ids(8), _sites(rng, 8, 4, 25), strict=True):
        a, x = rng.normal(1.0, 0.5), rng.normal(size=n)
        data[k] = {"x": x, "y": rng.poisson(np.exp(a + 0.3 * x + 0.5 * rng.normal(size=n)))}
    return Problem(
        "overdispersed_poisson", shared, client, data, "a", {"mu": _same, "tau": np.log, "slope": _same, "over": np.log}
    )


def emax() -> Problem:
    """Dose and response: the largest effect of each site its own, the dose of half of it shared."""
    rng = np.random.default_rng(109)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 2, 2),
            "tau": pm.HalfNormal("tau", 1),
            "ed50": pm.LogNormal("ed50", 0.5, 0.7),
            "sigma": pm.HalfNormal("sigma", 1),
        }

    def client(s: Any, prefix: str, dose: Any, y: Any) -> None:
        top = _own(prefix, "top", s["mu"], s["tau"])
        base = pm.Normal(f"{prefix}base", 0, 1)
        pm.Normal(f"{prefix}obs", base + top * dose / (s["ed50"] + dose), s["sigma"], observed=y)

    data = {}
    for k, n in zip(_ids(8), _sites(rng, 8, 4, 40), strict=True):
        top, dose = rng.normal(2.5, 0.7), rng.choice([0.0, 0.5, 1.0, 2.0, 4.0, 8.0], size=n)
        data[k] = {"dose": dose, "y": rng.normal(0, 0.5) + top * dose / (1.5 + dose) + 0.6 * rng.normal(size=n)}
    return Problem("emax", shared, client, data, "top", {"mu": _same, "tau": np.log, "ed50": np.log, "sigma": np.log})


def horseshoe() -> Problem:
    """Sparse coefficients at each site by a regularised horseshoe, its global scale shared."""
    rng = np.random.default_rng(110)

    def shared() -> dict[str, Any]:
        return {"tau": pm.HalfCauchy("tau", 0.5), "sigma": pm.HalfNormal("sigma", 1)}

    def client(s: Any, prefix: str, X: Any, y: Any) -> None:
        scale = pm.HalfCauchy(f"{prefix}scale", 1, shape=5)
        z = pm.Normal(f"{prefix}z", 0, 1, shape=5)
        beta = pm.Deterministic(f"{prefix}beta", z * s["tau"] * scale)
        pm.Normal(f"{prefix}obs", X @ beta, s["sigma"], observed=y)

    data = {}
    for k, n in zip(_ids(6), _sites(rng, 6, 8, 60), strict=True):
        beta = np.array([1.5, 0, 0, -0.8, 0]) * (rng.uniform(size=5) < 0.7)
        X = rng.normal(size=(n, 5))
        data[k] = {"X": X, "y": X @ beta + 0.7 * rng.normal(size=n)}
    return Problem("horseshoe", shared, client, data, "beta", {"tau": np.log, "sigma": np.log})


def separation() -> Problem:
    """Logistic regression where half of the sites have but one outcome."""
    rng = np.random.default_rng(111)

    def shared() -> dict[str, Any]:
        return {"mu": pm.Normal("mu", 0, 2), "tau": pm.HalfNormal("tau", 2), "slope": pm.Normal("slope", 0, 2)}

    def client(s: Any, prefix: str, x: Any, y: Any) -> None:
        a = _own(prefix, "a", s["mu"], s["tau"])
        pm.Bernoulli(f"{prefix}obs", logit_p=a + s["slope"] * x, observed=y)

    data = {}
    for number, (k, n) in enumerate(zip(_ids(8), _sites(rng, 8, 3, 15), strict=True)):
        x = rng.normal(size=n)
        drawn = (rng.uniform(size=n) < _expit(1.0 + 0.8 * x)).astype(int)
        data[k] = {"x": x, "y": drawn if number % 2 else np.full(n, int(number % 4 == 0))}
    return Problem("separation", shared, client, data, "a", {"mu": _same, "tau": np.log, "slope": _same})


def gaussian_process() -> Problem:
    """Curves at sites by a Gaussian process whose length, height and noise are shared."""
    rng = np.random.default_rng(112)

    def shared() -> dict[str, Any]:
        return {
            "length": pm.LogNormal("length", 0, 0.5),
            "height": pm.HalfNormal("height", 2),
            "sigma": pm.HalfNormal("sigma", 1),
        }

    def client(s: Any, prefix: str, x: Any, y: Any) -> None:
        level = pm.Normal(f"{prefix}level", 0, 2)
        apart = (x[:, None] - x[None, :]) / s["length"]
        covariance = s["height"] ** 2 * pt.exp(-0.5 * apart**2) + s["sigma"] ** 2 * pt.eye(x.shape[0])
        pm.MvNormal(f"{prefix}obs", level * pt.ones_like(x), cov=covariance, observed=y)

    data = {}
    for k, n in zip(_ids(6), _sites(rng, 6, 3, 20), strict=True):
        x = np.sort(rng.uniform(-3, 3, size=n))
        covariance = 1.2**2 * np.exp(-0.5 * (x[:, None] - x) ** 2) + 0.3**2 * np.eye(n)
        data[k] = {"x": x, "y": rng.normal(0, 1) + rng.multivariate_normal(np.zeros(n), covariance)}
    return Problem(
        "gaussian_process", shared, client, data, "level", {"length": np.log, "height": np.log, "sigma": np.log}
    )


PROBLEMS: tuple[Callable[[], Problem], ...] = (
    lkj_logistic,
    negative_binomial,
    censored_weibull,
    beta_binomial,
    ordinal,
    zero_inflated,
    student_t,
    overdispersed_poisson,
    emax,
    horseshoe,
    separation,
    gaussian_process,
)
