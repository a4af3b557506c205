"""A formula's model in words: every variable with its prior, and what coefficients are called in a paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedppl.formulas import expressions, predictor
from fedppl.formulas.family import Family, Scales
from fedppl.formulas.predictor import Spec, effect_labels, has_intercept, tag
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Terms, variable
from fedppl.types import DeclarationError

_COLUMNS = ["prior", "entries", "reference", "meaning", "from"]
_MEANINGS = {
    "sigma": "sd of what is left over",
    "nu": "degrees of freedom",
    "kappa": "concentration of shares",
    "alpha": "shape",
    "threshold": "logits between levels, in order",
    "piece": "log hazard after a cut point, against that before the first",
}


def before(terms: Terms, family: Family, shared: Sequence[str], priors: Mapping[str, Prior]) -> pd.DataFrame:
    """What is known before clients agree."""
    default = "by default wide, on the scales that clients agree on"
    rows = {
        name: (repr(priors[name]) if name in priors else default, None, None, _meaning(terms, family, name), None)
        for name in shared
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=_COLUMNS, dtype=object)


def after(spec: Spec, shared: Sequence[str]) -> pd.DataFrame:
    """A row for each shared variable, under the name that ``priors`` has for it."""
    rows = {name: (*_told(spec, name), _meaning(spec.terms, spec.family, name), _from(spec, name)) for name in shared}
    return pd.DataFrame.from_dict(rows, orient="index", columns=_COLUMNS, dtype=object)


def _told(spec: Spec, name: str) -> tuple[str, Any, Any]:
    """Prior, entries and reference."""
    groups = {name: n for n in range(len(spec.terms.groups)) for name in predictor.spreads_of(spec, n)}
    beside = spec.family.parameters(spec.scales)
    if name in groups:
        number = groups[name]
        if name == predictor.spreads_of(spec, number)[0]:
            return repr(predictor.sds(spec, number)), predictor.effect_labels(spec, number), None
        text = repr(predictor.partials(spec, number))
        text = text if name in spec.priors else f"{text}: correlations are LKJ(eta={predictor.CORRELATION:g})"
        return text, tuple(predictor.coords(spec)[f"{predictor.tag(spec.terms.groups[number])}_pair"]), None
    if name in beside:
        where = predictor.at_means(spec) if name == "threshold" and name not in spec.priors else ""
        return _shown(spec.priors.get(name, beside[name])) + where, _beside(spec, name) or None, None
    reference = f"{spec.terms.response.columns[0]}={spec.scales.levels[0]}" if spec.levels else None
    if name == "Intercept":
        where = predictor.at_means(spec) if name not in spec.priors else ""
        return repr(predictor.intercept(spec)) + where, spec.levels or None, reference
    labels = spec.design.labels[name]
    entries = spec.design.entries[name] if predictor.is_labelled(name, labels) else ()
    if spec.levels:
        entries = tuple(f"{one}, {level}" for one in entries or (name,) for level in spec.levels)
    column = next((one for key, one in spec.design.agreement.columns.items() if variable(key) == name), None)
    if column is not None and column.levels:
        reference = column.levels[0] if reference is None else f"{column.levels[0]}, {reference}"
    return repr(predictor.coefficients(spec)[name]), entries or None, reference


def _from(spec: Spec, name: str) -> str:
    """What of the agreement a prior comes from."""
    if name in spec.priors:
        return "priors="
    outcome, family, scales = spec.terms.response.columns[0], spec.family, spec.scales
    mean, sd = f"mean of {outcome} ({scales.mean:.3g})", f"sd of {outcome} ({scales.sd:.3g})"
    unit = sd if family.unit(scales) == scales.sd and family.link == "identity" else "1"
    if name == "Intercept":
        return f"{mean}, 2.5 times {unit}" if _depends(family.center, scales) else f"2.5 times {unit}"
    if name in spec.terms.common:
        trees, known = spec.terms.trees, spec.design.agreement.columns
        read = [column for one in spec.terms.factors[name] for column in expressions.columns(trees[one], ())]
        shares = any(known[column].levels for column in read if column in known)
        return f"2.5 times {unit} / sd of the column over all rows{', by shares of levels' if shares else ''}"
    if name in (beside := family.parameters(scales)):
        depends = _depends(lambda other: repr(family.parameters(other)[name]), scales)
        if beside[name].name == "HalfNormal" and depends:
            return f"2 times {sd}"
        return f"{mean} and {sd}" if depends else "the same for all data"
    if name.endswith("_sd"):
        return f"{unit} / root mean square of the effect's column over all rows"
    return "the same for all data"


def _depends(of: Callable[[Scales], Any], scales: Scales) -> bool:
    """Whether something is another one where outcomes are."""
    other = scales._replace(mean=0.5 * scales.mean + 0.1, sd=0.7 * scales.sd)
    return bool(of(scales) != of(other))


def _beside(spec: Spec, name: str) -> tuple[str, ...]:
    if name == "threshold":
        levels = spec.scales.levels
        return tuple(f"{a} | {b}" for a, b in zip(levels[:-1], levels[1:], strict=True))
    return tuple(f"after {cut:g}" for cut in spec.scales.cuts) if name == "piece" else ()


def _meaning(terms: Terms, family: Family, name: str) -> str:
    if name == "Intercept":
        return f"{_predicted(family)} where columns are 0 or at their reference"
    if name in terms.common:
        return f"change of the {_predicted(family)}"
    if name in _MEANINGS:
        return _MEANINGS[name]
    factor = next(group.factor for group in terms.groups if name in (f"{predictor.tag(group)}_{x}" for x in _SPREADS))
    return f"{_SPREADS[name.rpartition('_')[2]]} of effects by {':'.join(factor)}"


_SPREADS = {"sd": "sd", "partial": "(1 + r) / 2 of partial correlations r"}


def _predicted(family: Family) -> str:
    return {"identity": "mean", "logit": "logit", "log": "log of the mean"}.get(family.link, family.link)


def _shown(prior: Prior) -> str:
    """Without what is for PyMC alone."""
    hidden = ("initval", "default_transform", "shape")
    return repr(Prior(prior.name, **{key: value for key, value in prior.parameters.items() if key not in hidden}))


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
