"""A formula's model in words: every shared variable, what its entries belong to, and its prior."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedppl.formulas import predictor
from fedppl.formulas.declare import Formula
from fedppl.formulas.priors import Prior

_MEANINGS = {
    "sigma": "sd of what is left over",
    "nu": "degrees of freedom",
    "kappa": "concentration of shares",
    "alpha": "shape",
    "threshold": "logits between levels, in order",
    "piece": "log hazard after a cut point, against that before the first",
}


def describe(built: Formula) -> pd.DataFrame:
    """A row for each shared variable, under the name that ``priors`` has for it."""
    rows = {name: _row(built, name) for name in built.shared}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["prior", "entries", "reference", "meaning"])


def _row(built: Formula, name: str) -> dict[str, Any]:
    own = built.priors.get(name)
    if built.design is None:
        prior = "by default, on the scales that clients agree on" if own is None else repr(own)
        return {"prior": prior, "entries": None, "reference": None, "meaning": _meaning(built, name)}
    spec = built.spec
    groups = {predictor.spread_of(spec, number): number for number in range(len(built.terms.groups))}
    beside = built.family.parameters(spec.scales)
    reference, entries = None, ()
    if name == "Intercept":
        prior = predictor.intercept(spec)
        text = repr(prior) + (" where columns are at their means" if own is None and built.terms.common else "")
        entries = spec.levels
    elif name in groups:
        prior = predictor.sds(spec, groups[name])
        text = repr(prior)
        if name.endswith("_covariance"):
            text = f"sds {text}, correlations LKJ(eta={predictor.CORRELATION:g})"
        entries = predictor.effect_labels(spec, groups[name])
    elif name in beside:
        text = _shown(built.priors.get(name, beside[name]))
        entries = _beside(built, name)
    else:
        text = repr(predictor.coefficients(spec)[name])
        labels = spec.design.labels[name]
        entries = tuple(predictor.short(name, labels)) if len(labels) > 1 or labels != (name,) else ()
        if spec.levels:
            entries = tuple(f"{one}, {level}" for one in entries or (name,) for level in spec.levels)
        column = spec.design.agreement.columns.get(name)
        reference = column.levels[0] if column is not None and column.levels else None
    if spec.levels and reference is None and name in ("Intercept", *built.terms.common):
        reference = f"{built.terms.response.columns[0]}={spec.scales.levels[0]}"
    return {"prior": text, "entries": entries or None, "reference": reference, "meaning": _meaning(built, name)}


def _beside(built: Formula, name: str) -> tuple[str, ...]:
    if name == "threshold":
        levels = built.spec.scales.levels
        return tuple(f"{a} | {b}" for a, b in zip(levels[:-1], levels[1:], strict=True))
    return tuple(f"after {cut:g}" for cut in built.cuts) if name == "piece" else ()


def _meaning(built: Formula, name: str) -> str:
    if name == "Intercept":
        return f"{built.family.link} where all columns are 0 or at their reference"
    if name in built.terms.common:
        return f"change of the {built.family.link}" if built.family.link != "identity" else "change of the mean"
    if name in _MEANINGS:
        return _MEANINGS[name]
    whose = "clients" if f"{built.terms.client}_" == name[: len(name) - len(name.rpartition("_")[2])] else "groups"
    what = "sds and correlations" if name.endswith("_covariance") else "sd"
    return f"{what} of effects between {whose}"


def _shown(prior: Prior) -> str:
    """Without what is for PyMC alone."""
    kept = {k: v for k, v in prior.parameters.items() if k not in ("initval", "default_transform", "shape")}
    return repr(Prior(prior.name, **{k: np.asarray(v) if np.ndim(v) else v for k, v in kept.items()}))
