"""A table of times, levels and weights at four sites, and log densities of a formula's model without a fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit

import fedppl
from fedppl import FederatedModel
from fedppl.model.interpreted import PYTHON_MODE

CUTS = (1.5, 4.0)
AT: dict[str, dict[str, Any]] = {
    "exponential": {},
    "weibull": {"alpha": 1.7},
    "lognormal": {"sigma": 0.8},
    "loglogistic": {"alpha": 2.3},
    "piecewise": {"piece": np.array([0.4, -0.6])},
}


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
RESPONSES = {
    "gaussian": "y",
    "student": "y",
    "bernoulli": "died",
    "binomial": "prop(healed, of)",
    "poisson": "cases",
    "negativebinomial": "cases",
    "gamma": "cost",
    "beta": "share",
    "ordinal": "kind",
    "categorical": "kind",
} | dict.fromkeys(AT, "Surv(time, event)")


def agreed(text: str, family: str, frame: pd.DataFrame = FRAME, **keywords: Any) -> FederatedModel:
    if family == "piecewise":
        keywords = {"constants": {"cuts": CUTS}, **keywords}
    if family == "ordinal":
        keywords = {"levels": {"kind": ["death", "home", "ward"]}, **keywords}
    return fedppl.agree(fedppl.formula(text, family, **keywords), frame, by="site").model


def rows(site: str, frame: pd.DataFrame = FRAME) -> pd.DataFrame:
    return frame[frame["site"] == site].reset_index(drop=True)


def log_densities(model: FederatedModel, data: Any, values: dict[str, Any]) -> tuple[Any, Any]:
    """Of every row at values of the shared variables, with the gradient of their sum, interpreted."""
    built = model.builder(**model.read("s1", data))
    point = {}
    for value, rv in zip(built.value_vars, built.free_RVs, strict=True):
        transform, given = built.rvs_to_transforms[rv], np.asarray(values[rv.name], dtype=float)
        point[value.name] = given if transform is None else transform.forward(given, *rv.owner.inputs).eval()
    outcome = built.observed_RVs
    density = built.compile_logp(vars=outcome, sum=False, mode=PYTHON_MODE)(point)[0]
    return density, built.compile_dlogp(mode=PYTHON_MODE)(point)
