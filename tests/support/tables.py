"""One row for each family of outcomes, a frame in which each finds its response, and log densities without a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import expit

import fedppl
from fedppl import FederatedModel
from fedppl.formulas import families
from fedppl.model.interpreted import PYTHON_MODE

CUTS = (1.5, 4.0)
ORDER = ["death", "home", "ward"]


class Precise(NamedTuple):
    """Outcomes that the linear predictor all but determines."""

    draw: Callable[[Any, np.random.Generator], Any]  # (0.3 x, generator)
    truth: list[float]  # the intercept and the slope of x, and the parameter beside them, where it is unbounded


class Example(NamedTuple):
    """What tests know of a family of outcomes."""

    response: str  # in `FRAME`
    beside: Mapping[str, Any] = {}  # values of its parameters beside the mean
    ratio: str = ""  # name in a paper of exp of a coefficient of `arm`
    # by SciPy: (rows, linear predictor, `beside`); of times in test_survival.py
    log_density: Callable[[pd.DataFrame, Any, Mapping[str, Any]], Any] | None = None
    precise: Precise | None = None  # where the prior of a precision depends on the data
    keywords: Mapping[str, Any] = {}  # of `formula`


def _log_level(rows: pd.DataFrame, eta: Any, own: Mapping[str, Any]) -> Any:
    cuts, at = np.concatenate([[-np.inf], own["threshold"], [np.inf]]), rows["kind"].map(ORDER.index).to_numpy()
    return np.log(expit(cuts[at + 1] - eta) - expit(cuts[at] - eta))


def _log_count(rows: pd.DataFrame, eta: Any, own: Mapping[str, Any]) -> Any:
    return stats.nbinom.logpmf(rows["cases"], own["alpha"], own["alpha"] / (own["alpha"] + np.exp(eta)))


def _log_share(rows: pd.DataFrame, eta: Any, own: Mapping[str, Any]) -> Any:
    mean, kappa = expit(eta), own["kappa"]  # PyMC has 1 - mean, too
    return stats.beta.logpdf(rows["share"], mean * kappa, (1 - mean) * kappa)


def _draw_shares(eta: Any, rng: np.random.Generator) -> Any:
    return rng.beta(2500 * expit(3.4 + eta), 2500 * expit(-3.4 - eta))


def _draw_times(eta: Any, rng: np.random.Generator) -> Any:
    """By a hazard of 1 until 1, of e^-7 from then on."""
    total = rng.exponential(size=len(eta)) * np.exp(-eta)
    return np.where(total < 1, total, 1 + (total - 1) * np.exp(7))


TIMES = "Surv(time, event)"
FAMILIES: dict[str, Example] = {
    "gaussian": Example(
        "y", {"sigma": 0.7}, log_density=lambda rows, eta, own: stats.norm.logpdf(rows["y"], eta, own["sigma"])
    ),
    "student": Example(
        "y",
        {"sigma": 0.7, "nu": 5.0},
        log_density=lambda rows, eta, own: stats.t.logpdf(rows["y"], own["nu"], eta, own["sigma"]),
    ),
    "bernoulli": Example(
        "died", {}, "odds ratio", lambda rows, eta, own: stats.bernoulli.logpmf(rows["died"], expit(eta))
    ),
    "binomial": Example(
        "prop(healed, of)",
        {},
        "odds ratio",
        lambda rows, eta, own: stats.binom.logpmf(rows["healed"], rows["of"], expit(eta)),
    ),
    "poisson": Example(
        "cases", {}, "rate ratio", lambda rows, eta, own: stats.poisson.logpmf(rows["cases"], np.exp(eta))
    ),
    "negativebinomial": Example(
        "cases",
        {"alpha": 1.7},
        "rate ratio",
        _log_count,
        Precise(lambda eta, rng: rng.poisson(3e4 * np.exp(eta)), [np.log(3e4), 0.3, np.log(1e7)]),
    ),
    "gamma": Example(
        "cost",
        {"alpha": 1.7},
        "ratio of means",
        lambda rows, eta, own: stats.gamma.logpdf(rows["cost"], own["alpha"], scale=np.exp(eta) / own["alpha"]),
        Precise(lambda eta, rng: 1e-6 * np.exp(eta) * rng.gamma(1e4, 1e-4, len(eta)), [np.log(1e-6), 0.3, np.log(1e4)]),
    ),
    "beta": Example(
        "share",
        {"kappa": 4.0},
        "odds ratio of the mean share",
        _log_share,
        Precise(_draw_shares, [3.4, 0.3, np.log(2500)]),
    ),
    "ordinal": Example(
        "kind",
        {"threshold": np.array([-0.5, 0.8])},
        "odds ratio of a higher level",
        _log_level,
        keywords={"levels": {"kind": ORDER}},
    ),
    "categorical": Example("kind", {}, "odds ratio against death"),
    "exponential": Example(TIMES, {}, "time ratio"),
    "weibull": Example(
        TIMES,
        {"alpha": 1.7},
        "time ratio",
        precise=Precise(lambda eta, rng: 1e6 * np.exp(eta) * rng.weibull(40, len(eta)), [np.log(1e6), 0.3, np.log(40)]),
    ),
    "lognormal": Example(TIMES, {"sigma": 0.8}, "time ratio"),
    "loglogistic": Example(TIMES, {"alpha": 2.3}, "time ratio"),
    "piecewise": Example(
        TIMES,
        {"piece": np.array([0.4, -0.6])},
        "hazard ratio",
        precise=Precise(_draw_times, [0.0, 0.3, -7.0]),
        keywords={"constants": {"cuts": CUTS}},
    ),
}
_UNKNOWN = FAMILIES.keys() ^ families.FAMILIES.keys()
assert not _UNKNOWN, f"{sorted(_UNKNOWN)}: tests/support/tables.py has one row for each family of families.py"
RESPONSES = {name: one.response for name, one in FAMILIES.items()}
AT = {name: one.beside for name, one in FAMILIES.items() if one.response == TIMES}


def table() -> pd.DataFrame:
    """Times, limits and levels at four sites."""
    rng, parts = np.random.default_rng(1), []
    for k in range(4):
        n = 16 + 6 * k
        age, arm = rng.normal(50, 8, size=n), rng.choice(["drug", "none"], size=n)
        time = np.exp(1.6 + 0.3 * rng.normal() + 0.05 * (age - 50) - 0.6 * (arm == "none")) * rng.weibull(1.5, size=n)
        limit = rng.uniform(1, 9, size=n)
        logits = np.stack([np.zeros(n), 0.5 * (arm == "none"), 0.04 * (age - 50)], axis=1)
        kind = (logits + rng.gumbel(size=(n, 3))).argmax(axis=1)
        parts.append(
            pd.DataFrame(
                {
                    "site": f"s{k}",
                    "age": age,
                    "arm": arm,
                    "ward": rng.choice(["u", "v"], size=n),
                    "time": np.minimum(time, limit),
                    "event": (time <= limit).astype(int),
                    "low": np.minimum(np.floor(time), 6.0),
                    "high": np.where(time >= 6.0, np.inf, np.floor(time) + 1),
                    "kind": np.array(["home", "ward", "death"])[kind],
                    "n": rng.integers(1, 4, size=n),
                    "y": 0.1 * age + rng.normal() + rng.normal(size=n),
                    "of": 9,
                }
            )
        )
    frame = pd.concat(parts, ignore_index=True)
    frame["healed"] = np.random.default_rng(2).integers(0, 10, size=len(frame))
    return frame.assign(died=frame["event"], share=expit(frame["y"] - 5), cost=frame["time"], cases=frame["healed"])


FRAME = table()


def agreed(text: str, family: str, frame: pd.DataFrame = FRAME, **keywords: Any) -> FederatedModel:
    declared = fedppl.formula(text, family, **{**FAMILIES[family].keywords, **keywords})
    return fedppl.agree(declared, frame, by="site").model


def rows(site: str, frame: pd.DataFrame = FRAME) -> pd.DataFrame:
    return frame[frame["site"] == site].reset_index(drop=True)


def log_densities(model: FederatedModel, data: Any, values: dict[str, Any]) -> tuple[Any, Any]:
    """Of every row at values of the shared variables, with the gradient of their sum, interpreted."""
    built = model.builder(**model.read("s1", data))
    point = {}
    for value, rv in zip(built.value_vars, built.free_RVs, strict=True):
        transform, given = built.rvs_to_transforms[rv], np.asarray(values[rv.name], dtype=float)
        point[value.name] = (
            given if transform is None else transform.forward(given, *rv.owner.inputs).eval(mode=PYTHON_MODE)
        )
    outcome = built.observed_RVs
    density = built.compile_logp(vars=outcome, sum=False, mode=PYTHON_MODE)(point)[0]
    return density, built.compile_dlogp(mode=PYTHON_MODE)(point)
