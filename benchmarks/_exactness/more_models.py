"""Ten more hierarchical models of different kinds, as statisticians in various fields would fit them.

They were written, with their data, by someone who had not read the package, before it was run on any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from benchmarks._exactness.models import Problem, _expit, _ids, _logit, _own, _same, _sites

# Colditz et al. 1994: vaccinated with and without tuberculosis, controls with and without, absolute latitude.
BCG = (
    (4, 119, 11, 128, 44),
    (6, 300, 29, 274, 55),
    (3, 228, 11, 209, 42),
    (62, 13536, 248, 12619, 52),
    (33, 5036, 47, 5761, 13),
    (180, 1361, 372, 1079, 44),
    (8, 2537, 10, 619, 19),
    (505, 87886, 499, 87892, 13),
    (29, 7470, 45, 7232, 27),
    (17, 1699, 65, 1600, 42),
    (186, 50448, 141, 27197, 18),
    (5, 2493, 3, 2338, 33),
    (27, 16886, 29, 17825, 33),
)


def bcg_meta() -> Problem:
    """Meta-regression of log odds ratios on raw latitude with binomial arms; real data of 13 BCG trials."""

    def shared() -> dict[str, Any]:
        return {"mu": pm.Normal("mu", 0, 2), "slope": pm.Normal("slope", 0, 0.1), "tau": pm.HalfCauchy("tau", 0.5)}

    def client(s: Any, prefix: str, arm: Any, latitude: Any, n: Any, y: Any) -> None:
        base = pm.Normal(f"{prefix}base", -3, 2)
        effect = _own(prefix, "effect", s["mu"] + s["slope"] * latitude[0], s["tau"])
        pm.Binomial(f"{prefix}obs", n=n, logit_p=base + effect * arm, observed=y)

    data = {}
    for k, (a, b, c, d, latitude) in zip(_ids(len(BCG)), BCG, strict=True):
        data[k] = {
            "arm": np.array([1.0, 0.0]),
            "latitude": np.array([float(latitude)] * 2),
            "n": np.array([a + b, c + d]),
            "y": np.array([a, c]),
        }
    return Problem("bcg_meta", shared, client, data, "effect", {"mu": _same, "slope": _same, "tau": np.log})


def income() -> Problem:
    """Yearly income around 50000 on raw years of schooling; regions differ in their level and in their residual sd."""
    rng = np.random.default_rng(202)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 20000, 20000),
            "tau": pm.HalfNormal("tau", 10000),
            "slope": pm.Normal("slope", 0, 5000),
            "noise": pm.Normal("noise", 9, 1),
            "spread": pm.HalfNormal("spread", 0.5),
        }

    def client(s: Any, prefix: str, schooling: Any, y: Any) -> None:
        level = _own(prefix, "level", s["mu"], s["tau"])
        log_sd = _own(prefix, "log_sd", s["noise"], s["spread"])
        pm.Normal(f"{prefix}obs", level + s["slope"] * schooling, pm.math.exp(log_sd), observed=y)

    data = {}
    for k, n in zip(_ids(10), _sites(rng, 10, 6, 60), strict=True):
        level, sd = rng.normal(15000, 6000), np.exp(rng.normal(np.log(11000), 0.35))
        schooling = rng.choice([8.0, 10.0, 12.0, 13.0, 14.0, 16.0, 18.0], size=n)
        data[k] = {"schooling": schooling, "y": np.round(level + 2600 * schooling + sd * rng.normal(size=n))}
    ways = {"mu": _same, "tau": np.log, "slope": _same, "noise": _same, "spread": np.log}
    return Problem("income", shared, client, data, "level", ways)


def gamma_costs() -> Problem:
    """Costs of hospital episodes: gamma regression with a log link, emergency and age in raw years."""
    rng = np.random.default_rng(203)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 8, 2),
            "tau": pm.Gamma("tau", 2, 4),
            "slope": pm.Normal("slope", 0, [1.0, 0.05], shape=2),
            "shape": pm.LogNormal("shape", 0.5, 0.75),
        }

    def client(s: Any, prefix: str, emergency: Any, age: Any, y: Any) -> None:
        a = _own(prefix, "a", s["mu"], s["tau"])
        mean = pm.math.exp(a + s["slope"][0] * emergency + s["slope"][1] * age)
        pm.Gamma(f"{prefix}obs", alpha=s["shape"], beta=s["shape"] / mean, observed=y)

    data = {}
    for k, n in zip(_ids(12), _sites(rng, 12, 5, 60), strict=True):
        a, emergency = rng.normal(7.6, 0.35), (rng.uniform(size=n) < 0.4).astype(float)
        age = np.round(np.clip(rng.normal(62, 15, size=n), 18, 95))
        mean = np.exp(a + 0.45 * emergency + 0.012 * age)
        data[k] = {"emergency": emergency, "age": age, "y": np.round(rng.gamma(1.8, mean / 1.8), 2)}
    ways = {"mu": _same, "tau": np.log, "slope": _same, "shape": np.log}
    return Problem("gamma_costs", shared, client, data, "a", ways)


def pharmacokinetics() -> Problem:
    """One oral dose, one compartment: clearance of each patient his own. Five patients of 4 to 8 samples."""
    rng = np.random.default_rng(204)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 1, 1),
            "omega": pm.LogNormal("omega", np.log(0.3), 0.6),
            "volume": pm.LogNormal("volume", np.log(35), 0.4),
            "ka": pm.LogNormal("ka", np.log(1.5), 0.5),
            "sigma": pm.HalfNormal("sigma", 0.5),
        }

    def client(s: Any, prefix: str, dose: Any, hours: Any, y: Any) -> None:
        log_cl = _own(prefix, "log_cl", s["mu"], s["omega"])
        ke = pm.math.exp(log_cl) / s["volume"]
        mean = (
            dose * s["ka"] / (s["volume"] * (s["ka"] - ke)) * (pm.math.exp(-ke * hours) - pm.math.exp(-s["ka"] * hours))
        )
        pm.LogNormal(f"{prefix}obs", pm.math.log(mean), s["sigma"], observed=y)

    data = {}
    times = np.array([0.5, 1.0, 2.0, 3.5, 5.0, 7.0, 9.0, 12.0, 24.0])
    for k, n in zip(_ids(5), _sites(rng, 5, 4, 8), strict=True):
        ke = np.exp(rng.normal(np.log(2.8), 0.3)) / 32
        hours, dose = np.sort(rng.choice(times, size=n, replace=False)), rng.choice([250.0, 320.0, 400.0])
        mean = dose * 1.6 / (32 * (1.6 - ke)) * (np.exp(-ke * hours) - np.exp(-1.6 * hours))
        data[k] = {"dose": np.full(n, dose), "hours": hours, "y": mean * np.exp(0.15 * rng.normal(size=n))}
    ways = {"mu": _same, "omega": np.log, "volume": np.log, "ka": np.log, "sigma": np.log}
    return Problem("pharmacokinetics", shared, client, data, "log_cl", ways)


def occupancy() -> Problem:
    """Site occupancy with imperfect detection, summed over whether a species is there; forest cover by plot."""
    rng = np.random.default_rng(205)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 0, 1.5),
            "tau": pm.HalfNormal("tau", 1),
            "slope": pm.Normal("slope", 0, 1),
            "seen": pm.Beta("seen", 1, 1),
        }

    def client(s: Any, prefix: str, forest: Any, visits: Any, y: Any) -> None:
        a = _own(prefix, "a", s["mu"], s["tau"])
        there = pm.math.invlogit(a + s["slope"] * forest)
        pm.ZeroInflatedBinomial(f"{prefix}obs", psi=there, n=visits, p=s["seen"], observed=y)

    data = {}
    for k, n in zip(_ids(12), _sites(rng, 12, 5, 40), strict=True):
        a, forest, visits = rng.normal(0.2, 0.9), rng.normal(size=n), rng.integers(2, 6, size=n)
        there = rng.uniform(size=n) < _expit(a + 0.7 * forest)
        data[k] = {"forest": forest, "visits": visits, "y": rng.binomial(visits, 0.4) * there}
    return Problem("occupancy", shared, client, data, "a", {"mu": _same, "tau": np.log, "slope": _same, "seen": _logit})


def beta_adherence() -> Problem:
    """Beta regression of the share of pills taken on an arm. Six practices of 3 to 10 patients."""
    rng = np.random.default_rng(206)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 0, 1.5),
            "tau": pm.Exponential("tau", 1),
            "effect": pm.Normal("effect", 0, 1),
            "phi": pm.Gamma("phi", 2, 0.1),
        }

    def client(s: Any, prefix: str, arm: Any, y: Any) -> None:
        a = _own(prefix, "a", s["mu"], s["tau"])
        m = pm.math.invlogit(a + s["effect"] * arm)
        pm.Beta(f"{prefix}obs", alpha=m * s["phi"], beta=(1 - m) * s["phi"], observed=y)

    data = {}
    for k, n in zip(_ids(6), _sites(rng, 6, 3, 10), strict=True):
        a, arm = rng.normal(0.9, 0.5), (np.arange(n) % 2).astype(float)
        m = _expit(a + 0.5 * arm)
        data[k] = {"arm": arm, "y": np.clip(np.round(rng.beta(9 * m, 9 * (1 - m)), 3), 0.005, 0.995)}
    return Problem(
        "beta_adherence", shared, client, data, "a", {"mu": _same, "tau": np.log, "effect": _same, "phi": np.log}
    )


def gamma_frailty() -> Problem:
    """Days to relapse: exponential with an end of follow-up, and a gamma frailty of each hospital."""
    rng = np.random.default_rng(207)

    def shared() -> dict[str, Any]:
        return {
            "log_rate": pm.Normal("log_rate", -6, 2),
            "effect": pm.Normal("effect", 0, 1),
            "k": pm.Gamma("k", 2, 0.5),
        }

    def client(s: Any, prefix: str, arm: Any, end: Any, days: Any) -> None:
        frailty = pm.Gamma(f"{prefix}frailty", alpha=s["k"], beta=s["k"])
        rate = frailty * pm.math.exp(s["log_rate"] + s["effect"] * arm)
        pm.Censored(f"{prefix}obs", pm.Exponential.dist(rate), lower=None, upper=end, observed=days)

    data = {}
    for k, n in zip(_ids(15), _sites(rng, 15, 5, 45), strict=True):
        frailty, arm = rng.gamma(3, 1 / 3), rng.integers(0, 2, size=n).astype(float)
        days = rng.exponential(1 / (frailty * np.exp(-5.9 - 0.4 * arm)))
        end = np.round(rng.uniform(180, 730, size=n))
        data[k] = {"arm": arm, "end": end, "days": np.minimum(days, end)}
    return Problem("gamma_frailty", shared, client, data, "frailty", {"log_rate": _same, "effect": _same, "k": np.log})


def probit_audit() -> Problem:
    """One-parameter probit item response: wards' checks of five items, each passed or failed."""
    rng = np.random.default_rng(208)

    def shared() -> dict[str, Any]:
        return {"difficulty": pm.Normal("difficulty", 0, 1.5, shape=5), "tau": pm.HalfNormal("tau", 1)}

    def client(s: Any, prefix: str, item: Any, y: Any) -> None:
        ability = _own(prefix, "ability", 0, s["tau"])
        pm.Bernoulli(f"{prefix}obs", p=pm.math.invprobit(ability - s["difficulty"][item]), observed=y)

    data = {}
    difficulty = np.array([-1.3, -0.7, -0.2, 0.3, 1.0])
    for k, n in zip(_ids(16), _sites(rng, 16, 5, 50), strict=True):
        ability, item = rng.normal(0, 0.6), np.arange(n) % 5
        data[k] = {"item": item, "y": (rng.normal(size=n) < ability - difficulty[item]).astype(int)}
    return Problem("probit_audit", shared, client, data, "ability", {"difficulty": _same, "tau": np.log})


def brand_choice() -> Problem:
    """Multinomial logit of three brands at raw prices; stores differ in what they like of two brands."""
    rng = np.random.default_rng(209)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 0, 1.5, shape=2),
            "tau": pm.HalfNormal("tau", 1, shape=2),
            "price_effect": pm.Normal("price_effect", -1, 1),
        }

    def client(s: Any, prefix: str, price: Any, y: Any) -> None:
        beta = _own(prefix, "beta", s["mu"], s["tau"])
        liked = pt.concatenate([beta, pt.zeros(1)])
        pm.Categorical(f"{prefix}obs", logit_p=liked[None, :] + s["price_effect"] * price, observed=y)

    data = {}
    for k, n in zip(_ids(9), _sites(rng, 9, 8, 60), strict=True):
        beta = np.append(rng.normal([0.8, 0.3], [0.6, 0.4]), 0.0)
        price = np.round(rng.normal([3.5, 3.0, 2.7], 0.4, size=(n, 3)), 2)
        data[k] = {"price": price, "y": np.argmax(beta - 1.4 * price + rng.gumbel(size=(n, 3)), axis=1)}
    return Problem("brand_choice", shared, client, data, "beta", {"mu": _same, "tau": np.log, "price_effect": _same})


def seasonal_admissions() -> Problem:
    """Monthly asthma admissions: a season that all share and towns' rates; an inverse gamma variance, few towns."""
    rng = np.random.default_rng(210)

    def shared() -> dict[str, Any]:
        return {
            "mu": pm.Normal("mu", 0, 2),
            "variance": pm.InverseGamma("variance", 2, 0.3),
            "season": pm.Normal("season", 0, 0.5, shape=2),
        }

    def client(s: Any, prefix: str, month: Any, people: Any, y: Any) -> None:
        a = _own(prefix, "a", s["mu"], pm.math.sqrt(s["variance"]))
        turn = 2 * np.pi * month / 12
        wave = s["season"][0] * pm.math.sin(turn) + s["season"][1] * pm.math.cos(turn)
        pm.Poisson(f"{prefix}obs", people / 10000 * pm.math.exp(a + wave), observed=y)

    data = {}
    for k, n in zip(_ids(7), _sites(rng, 7, 6, 48), strict=True):
        a, month = rng.normal(0.4, 0.4), (rng.integers(0, 12) + np.arange(n)).astype(float)
        people, turn = np.full(n, np.round(rng.uniform(15000, 90000), -2)), 2 * np.pi * month / 12
        rate = people / 10000 * np.exp(a + 0.15 * np.sin(turn) + 0.3 * np.cos(turn))
        data[k] = {"month": month, "people": people, "y": rng.poisson(rate)}
    return Problem("seasonal_admissions", shared, client, data, "a", {"mu": _same, "variance": np.log, "season": _same})


PROBLEMS: tuple[Callable[[], Problem], ...] = (
    bcg_meta,
    income,
    gamma_costs,
    pharmacokinetics,
    occupancy,
    beta_adherence,
    gamma_frailty,
    probit_audit,
    brand_choice,
    seasonal_admissions,
)
