"""A case for every family: how outcomes are drawn, and how somebody writes its likelihood in PyMC by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt

from fedppl.types import Array

ROWS = (5, 8, 14, 24, 41, 70, 118, 200)  # of the sites
CUTS = (4.0, 12.0)  # of time
NEVER = 1e9  # a limit of times that is never reached


class Case(NamedTuple):
    """A family's own part."""

    family: str
    right: str  # what the site's effects are: "(1 | site)" or "(1 + x | site)"
    response: str
    draw: Callable[[np.random.Generator, Array], Mapping[str, Array]]  # columns of outcomes at a linear predictor
    beside: Callable[[Any, Any], Mapping[str, Any]]  # declares others, from outcomes' moments and η less level at means
    observe: Callable[[Any, Mapping[str, Any], Any, Any], Any]  # (η, those, y, extra) declares the outcome
    arrays: Callable[[pd.DataFrame], tuple[Array, Array, Array | None]]  # rows' numbers, y and what else is read
    scale: str = "none"  # of the linear predictor before the fit: "none", "outcome", "log", "logit" or "minus log"
    levels: int = 0  # of the outcome that have a linear predictor of their own
    intercept: bool = True
    constants: Mapping[str, Any] = {}  # noqa: RUF012 -- never changed

    @property
    def formula(self) -> str:
        """As users write it."""
        return f"{self.response} ~ x + arm + {self.right}"

    @property
    def slopes(self) -> bool:
        """Whether effects of x vary by site."""
        return "x" in self.right

    @property
    def outcome(self) -> str:
        """The first column of the response."""
        return self.response.partition("(")[2].partition(",")[0] or self.response


def simulate(case: Case, seed: int) -> pd.DataFrame:
    """All sites' rows; the two smallest have not seen the high dose, and one of them no control either."""
    rng, parts = np.random.default_rng(seed), []
    for k, n in enumerate(ROWS):
        x = rng.normal(2.0, 1.3, n)
        arm = rng.choice((["low"], ["control", "low"])[k] if k < 2 else ["control", "high", "low"], n)
        u = rng.multivariate_normal([0, 0], [[0.36, 0.06], [0.06, 0.09]])
        slope = 0.4 + (u[1] if case.slopes else 0.0)
        eta = -0.2 + u[0] + slope * (x - 2.0) + 0.6 * (arm == "high") + 0.3 * (arm == "low")
        parts.append(pd.DataFrame({"site": f"site {k}", "x": x, "arm": arm, **case.draw(rng, eta)}))
    return pd.concat(parts, ignore_index=True)


def _all(frame: pd.DataFrame) -> Array:
    return np.arange(len(frame))


def _plain(frame: pd.DataFrame) -> tuple[Array, Array, Array | None]:
    return _all(frame), frame["y"].to_numpy(), None


def _of_trials(frame: pd.DataFrame) -> tuple[Array, Array, Array | None]:
    return _all(frame), frame["y"].to_numpy(), frame["n"].to_numpy()


def _until_limit(frame: pd.DataFrame) -> tuple[Array, Array, Array | None]:
    return _all(frame), frame["time"].to_numpy(), np.where(frame["event"] == 1, NEVER, frame["time"])


def _logs_until_limit(frame: pd.DataFrame) -> tuple[Array, Array, Array | None]:
    rows, time, limit = _until_limit(frame)
    return rows, np.log(time), np.log(limit)


def _exposures(frame: pd.DataFrame) -> tuple[Array, Array, Array | None]:
    """A row for each piece of time that was lived in: events are Poisson given the time spent there."""
    starts, ends = np.array([0.0, *CUTS]), np.array([*CUTS, np.inf])
    time = frame["time"].to_numpy()[:, None]
    spent = np.clip(time - starts, 0.0, ends - starts)
    events = (frame["event"].to_numpy()[:, None] == 1) & (time > starts) & (time <= ends)
    rows, piece = np.nonzero(spent > 0)
    return rows, events[rows, piece].astype(int), np.stack([spent[rows, piece], piece], axis=1)


def _letters(frame: pd.DataFrame) -> tuple[Array, Array, Array | None]:
    return _all(frame), np.searchsorted(["a", "b", "c"], frame["y"].to_numpy().astype(str)), None


def _nothing(sd: float, at: Any) -> Mapping[str, Any]:
    return {}


def _expit(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _times(draw: Callable[[np.random.Generator, int], Array]) -> Callable[..., Mapping[str, Array]]:
    def drawn(rng: np.random.Generator, eta: Array) -> Mapping[str, Array]:
        time, limit = np.exp(2.0 + eta) * draw(rng, len(eta)), rng.uniform(5, 40, len(eta))
        return {"time": np.minimum(time, limit), "event": (time <= limit).astype(int)}

    return drawn


def _choices(rng: np.random.Generator, eta: Array) -> Mapping[str, Array]:
    worth = np.stack([np.zeros_like(eta), eta, 0.4 - 0.5 * eta], axis=1) + rng.gumbel(size=(len(eta), 3))
    return {"y": np.array(["a", "b", "c"])[np.argmax(worth, axis=1)]}


def _ordinal(rng: np.random.Generator, eta: Array) -> Mapping[str, Array]:
    return {"y": np.searchsorted([-1.2, 0.0, 1.3], eta + rng.logistic(size=len(eta)))}


def _binomial(rng: np.random.Generator, eta: Array) -> Mapping[str, Array]:
    n = rng.integers(1, 9, len(eta))
    return {"y": rng.binomial(n, _expit(eta)), "n": n}


def _thresholds(sd: float, at: Any) -> Mapping[str, Any]:
    """Their prior is of where x and arm are at their means."""
    ordered = pm.distributions.transforms.ordered
    return {"threshold": pm.Normal("threshold", at, 2.5, shape=3, transform=ordered, initval=[-1.5, 0.0, 1.5])}


def _at_most(distribution: Any, y: Any, limit: Any) -> Any:
    return pm.Censored("obs", distribution, lower=None, upper=limit, observed=y)


SITE, SLOPES, SURVIVAL = "(1 | site)", "(1 + x | site)", "Surv(time, event)"


def _precise(name: str, relative: float) -> Any:
    """About the inverse of a relative variance, to a factor of 20."""
    return pm.LogNormal(name, -np.log(relative), 3.0)


CASES = (
    Case(
        "gaussian",
        SLOPES,
        "y",
        lambda rng, eta: {"y": 20 + 4 * eta + 3 * rng.normal(size=len(eta))},
        lambda y, at: {"sigma": pm.HalfNormal("sigma", 2 * y.sd)},
        lambda eta, s, y, _: pm.Normal("obs", eta, s["sigma"], observed=y),
        _plain,
        "outcome",
    ),
    Case(
        "student",
        SITE,
        "y",
        lambda rng, eta: {"y": 20 + 4 * eta + 2 * rng.standard_t(4, size=len(eta))},
        lambda y, at: {"sigma": pm.HalfNormal("sigma", 2 * y.sd), "nu": pm.Gamma("nu", 2, 0.1)},
        lambda eta, s, y, _: pm.StudentT("obs", nu=s["nu"], mu=eta, sigma=s["sigma"], observed=y),
        _plain,
        "outcome",
    ),
    Case(
        "bernoulli",
        SLOPES,
        "y",
        lambda rng, eta: {"y": (rng.random(len(eta)) < _expit(eta)).astype(int)},
        _nothing,
        lambda eta, s, y, _: pm.Bernoulli("obs", logit_p=eta, observed=y),
        _plain,
    ),
    Case(
        "binomial",
        SITE,
        "prop(y, n)",
        _binomial,
        _nothing,
        lambda eta, s, y, n: pm.Binomial("obs", n=n, logit_p=eta, observed=y),
        _of_trials,
    ),
    Case(
        "poisson",
        SLOPES,
        "y",
        lambda rng, eta: {"y": rng.poisson(np.exp(eta))},
        _nothing,
        lambda eta, s, y, _: pm.Poisson("obs", pm.math.exp(eta), observed=y),
        _plain,
        "log",
    ),
    Case(
        "negativebinomial",
        SITE,
        "y",
        lambda rng, eta: {"y": rng.negative_binomial(3, 3 / (3 + np.exp(1 + eta)))},
        lambda y, at: {"alpha": _precise("alpha", max(y.sd**2 - y.mean, y.sd**2 / 4) / y.mean**2)},
        lambda eta, s, y, _: pm.NegativeBinomial("obs", mu=pm.math.exp(eta), alpha=s["alpha"], observed=y),
        _plain,
        "log",
    ),
    Case(
        "gamma",
        SITE,
        "y",
        lambda rng, eta: {"y": rng.gamma(2.0, np.exp(3 + eta) / 2.0)},
        lambda y, at: {"alpha": _precise("alpha", y.sd**2 / y.mean**2)},
        lambda eta, s, y, _: pm.Gamma("obs", alpha=s["alpha"], beta=s["alpha"] / pm.math.exp(eta), observed=y),
        _plain,
        "log",
    ),
    Case(
        "beta",
        SITE,
        "y",
        lambda rng, eta: {"y": np.clip(rng.beta(8 * _expit(eta), 8 * _expit(-eta)), 0.002, 0.998)},
        lambda y, at: {"kappa": _precise("kappa", 1 / (y.mean * (1 - y.mean) / y.sd**2 - 1))},
        lambda eta, s, y, _: pm.Beta(
            "obs", pm.math.invlogit(eta) * s["kappa"], pm.math.invlogit(-eta) * s["kappa"], observed=y
        ),
        _plain,
        "logit",
    ),
    Case(
        "ordinal",
        SITE,
        "y",
        _ordinal,
        _thresholds,
        lambda eta, s, y, _: pm.OrderedLogistic("obs", eta=eta, cutpoints=s["threshold"], observed=y, compute_p=False),
        _plain,
        intercept=False,
    ),
    Case(
        "categorical",
        SITE,
        "y",
        _choices,
        _nothing,
        lambda eta, s, y, _: pm.Categorical(
            "obs", p=pm.math.softmax(pt.concatenate([pt.zeros((eta.shape[0], 1)), eta], axis=1), axis=1), observed=y
        ),
        _letters,
        levels=2,
    ),
    Case(
        "exponential",
        SITE,
        SURVIVAL,
        _times(lambda rng, n: rng.exponential(size=n)),
        _nothing,
        lambda eta, s, y, limit: _at_most(pm.Exponential.dist(pm.math.exp(-eta)), y, limit),
        _until_limit,
        "log",
    ),
    Case(
        "weibull",
        SITE,
        SURVIVAL,
        _times(lambda rng, n: rng.weibull(1.5, size=n)),
        lambda y, at: {"alpha": pm.InverseGamma("alpha", 1, 1)},
        lambda eta, s, y, limit: _at_most(pm.Weibull.dist(s["alpha"], pm.math.exp(eta)), y, limit),
        _until_limit,
        "log",
    ),
    Case(
        "lognormal",
        SITE,
        SURVIVAL,
        _times(lambda rng, n: np.exp(0.8 * rng.normal(size=n))),
        lambda y, at: {"sigma": pm.HalfNormal("sigma", 2)},
        lambda eta, s, y, limit: _at_most(pm.Normal.dist(eta, s["sigma"]), y, limit),
        _logs_until_limit,
        "log",
    ),
    Case(
        "loglogistic",
        SITE,
        SURVIVAL,
        _times(lambda rng, n: np.exp(rng.logistic(size=n) / 2.0)),
        lambda y, at: {"alpha": pm.InverseGamma("alpha", 1, 1)},
        lambda eta, s, y, limit: _at_most(pm.Logistic.dist(eta, 1 / s["alpha"]), y, limit),
        _logs_until_limit,
        "log",
    ),
    Case(
        "piecewise",
        SITE,
        SURVIVAL,
        _times(lambda rng, n: rng.weibull(1.3, size=n)),
        lambda y, at: {"piece": pm.Normal("piece", 0, 2.5, shape=2)},
        lambda eta, s, y, extra: pm.Poisson(
            "obs",
            extra[:, 0] * pm.math.exp(eta + pt.concatenate([pt.zeros(1), s["piece"]])[extra[:, 1].astype("int64")]),
            observed=y,
        ),
        _exposures,
        "minus log",
        constants={"cuts": list(CUTS)},
    ),
)
