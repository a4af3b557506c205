"""What coefficients of a formula are called in a paper, and what they come to at one client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from fedppl.formulas.predictor import Spec, effect_labels, has_intercept, tag
from fedppl.formulas.terms import variable
from fedppl.types import DeclarationError

# What exp of a coefficient is, and exp of the intercept, by the link and the kind of outcomes.
_RATIOS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("logit", "binary"): ("odds ratio", "odds"),
    ("logit", "count"): ("odds ratio", "odds"),
    ("logit", "unit"): ("odds ratio of the mean share", "odds of the mean share"),
    ("logit", "level"): ("odds ratio of a higher level", "odds"),
    ("logit against the reference", "level"): ("odds ratio against {}", "odds against {}"),
    ("log", "count"): ("rate ratio", "rate"),
    ("log", "positive"): ("ratio of means", "mean"),
    ("log of the mean time", "time"): ("time ratio", "mean time"),
    ("log of the scale", "time"): ("time ratio", "scale of time"),
    ("log of the median time", "time"): ("time ratio", "median time"),
    ("log of the hazard", "time"): ("hazard ratio", "hazard"),
}


def effect(spec: Spec, name: str) -> str:
    """What a coefficient is of the outcome.

    Of an interaction on a scale of ratios it is a ratio of ratios.
    """
    family = spec.family
    if family.link == "identity":
        return "mean" if name == "Intercept" else "difference"
    return f"log {ratio(spec, name)}"


def ratio(spec: Spec, name: str) -> str:
    """What exp of a coefficient is of the outcome."""
    family = spec.family
    if (family.link, family.outcome) not in _RATIOS:
        raise DeclarationError(
            f"exponentiate=True: coefficients of family {family.name!r} are differences of means, and exp of them is "
            "nothing; leave it out."
        )
    of_slope, of_intercept = _RATIOS[family.link, family.outcome]
    several = f"ratio of {of_slope.replace('ratio', 'ratios', 1)}"
    products = {variable(":".join(term)) for term in spec.terms.sums[0].terms if len(term) > 1}
    found = of_intercept if name == "Intercept" else several if name in products else of_slope
    return found.format(spec.scales.levels[0] if spec.scales.levels else "")


def coefficients(spec: Spec) -> list[str]:
    """Names of the variables that are coefficients."""
    return [*(["Intercept"] if has_intercept(spec.terms, spec.family) else []), *spec.terms.common]


def varying(spec: Spec) -> list[str]:
    """Names of the coefficients that a client's own effects are added to."""
    own = {label for labels in _of_clients(spec).values() for label in labels}
    return [name for name in coefficients(spec) if own & {*_labels(spec, name)}]


def totals(spec: Spec, group: Any) -> xr.Dataset:
    """A client's own coefficients, common ones and its effects together, from draws of its posterior."""
    found = {}
    for name in coefficients(spec):
        total, labels = group[name], _labels(spec, name)
        flat = np.array(total.transpose("chain", "draw", ...).values, dtype=float)
        shape = flat.shape
        flat = flat.reshape(*shape[:2], -1)
        for effects, known in _of_clients(spec).items():
            own = group[effects].transpose("chain", "draw", ...).values
            for place, label in enumerate(labels):
                if label in known:
                    flat[..., place] += own[..., known.index(label)]
        found[name] = total.transpose("chain", "draw", ...).copy(data=flat.reshape(shape))
    return xr.Dataset(found, attrs=dict(group.attrs))


def _of_clients(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Labels of effects that vary by client, by name of the variable."""
    return {
        f"{tag(one)}_effects": effect_labels(spec, number)
        for number, one in enumerate(spec.terms.groups)
        if len(one.factor) == 1
    }


def _labels(spec: Spec, name: str) -> list[str]:
    """Entries of a coefficient by the names that effects have, in the order of the flat array."""
    labels = ["Intercept"] if name == "Intercept" else list(spec.design.labels[name])
    return [f"{label}:{level}" for label in labels for level in spec.levels] if spec.levels else labels
