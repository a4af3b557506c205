"""Trials with rare events at twelve sites, and what meta-analyses of their log odds ratios say."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import fedppl
from fedppl.types import Array

SITES = 12
FEWEST, MOST = 30, 2000  # patients of a site
RATE = (-4.6, 0.35)  # logit of a trial's rate without the drug: .5 to 2 % in nineteen of twenty
EFFECT = 0.7  # prior sd of the log odds ratio
BETWEEN, VARYING = 0.5, 0.3  # scales of half-normal priors: of sites' levels, and of their effects
Z = 1.6448536269514722  # of a 90 % interval


class Estimate(NamedTuple):
    """Of the log odds ratio, with a 90 % interval."""

    mean: float
    lower: float
    upper: float


class Trial(NamedTuple):
    """Events and patients, (site, arm), and the truth."""

    events: Array
    patients: Array
    effect: float


def simulate(rng: np.random.Generator, varying: bool) -> Trial:
    """A truth from the prior, and a trial from the truth; arms are halves of each site."""
    sizes = rng.permutation(np.round(np.geomspace(FEWEST, MOST, SITES)).astype(int))
    level, effect, between, spread = rng.normal(*RATE), rng.normal(0, EFFECT), abs(rng.normal(0, BETWEEN)), 0.0
    if varying:
        spread = abs(rng.normal(0, VARYING))
    base = level + between * rng.normal(size=SITES)
    own = effect + spread * rng.normal(size=SITES)
    patients = np.stack([sizes - sizes // 2, sizes // 2], axis=1)
    logits = np.stack([base, base + own], axis=1)
    return Trial(rng.binomial(patients, 1 / (1 + np.exp(-logits))), patients, float(effect))


def rows(trial: Trial) -> pd.DataFrame:
    """A row for each arm of each site: the likelihood of patients one by one, up to a constant."""
    return pd.DataFrame(
        {
            "site": np.repeat([f"site {k:02d}" for k in range(SITES)], 2),
            "arm": np.tile(["control", "drug"], SITES),
            "events": trial.events.ravel(),
            "patients": trial.patients.ravel(),
        }
    )


def patients(trial: Trial) -> pd.DataFrame:
    """A row for each patient."""
    table = rows(trial)
    each = table.loc[np.repeat(table.index, table["patients"]), ["site", "arm"]].reset_index(drop=True)
    each["event"] = np.concatenate([np.arange(n) < e for e, n in zip(table["events"], table["patients"], strict=True)])
    return each


def priors(varying: bool) -> dict[str, fedppl.Prior]:
    """Those that truths are drawn from."""
    scale = np.array([BETWEEN, VARYING]) if varying else BETWEEN
    return {
        "Intercept": fedppl.Prior("Normal", mu=RATE[0], sigma=RATE[1]),
        "arm": fedppl.Prior("Normal", mu=0.0, sigma=EFFECT),
        "site_sd": fedppl.Prior("HalfNormal", sigma=scale),
    }


def meta_analysis(trial: Trial, random: bool) -> Estimate | None:
    """Inverse-variance mean of sites' log odds ratios; None where no site has an event.

    One half is added to the four counts of a site where one of them is 0; a site without any event is left out, as is
    usual, for it has no odds ratio. `random` takes DerSimonian and Laird's variance between sites.
    """
    kept = trial.events.sum(axis=1) > 0
    if not kept.any():
        return None
    cells: Array = np.concatenate([trial.events, trial.patients - trial.events], axis=1)[kept].astype(float)
    cells += 0.5 * np.any(cells == 0, axis=1, keepdims=True)
    ratio = np.log(cells[:, 1] * cells[:, 2] / (cells[:, 0] * cells[:, 3]))
    variance = np.sum(1 / cells, axis=1)
    if random and len(ratio) > 1:
        weight = 1 / variance
        apart = np.sum(weight * (ratio - np.average(ratio, weights=weight)) ** 2)
        scale = weight.sum() - np.sum(weight**2) / weight.sum()
        variance = variance + max(0.0, (apart - (len(ratio) - 1)) / scale)
    weight = 1 / variance
    mean, sd = float(np.average(ratio, weights=weight)), float(weight.sum() ** -0.5)
    return Estimate(mean, mean - Z * sd, mean + Z * sd)


def described(trials: list[Trial]) -> dict[str, Any]:
    """How rare events were."""
    events = np.stack([trial.events for trial in trials])
    return {
        "events_of_a_trial": [int(x) for x in np.percentile(events.sum(axis=(1, 2)), [5, 50, 95])],
        "arms_without_an_event": round(float(np.mean(events == 0)), 3),
        "sites_without_an_event": round(float(np.mean(events.sum(axis=2) == 0)), 3),
    }
