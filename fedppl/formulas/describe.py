"""A formula's model in words: every shared variable, what its entries belong to, and its prior."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from fedppl.formulas import predictor
from fedppl.formulas.family import Family, Scales
from fedppl.formulas.predictor import Spec
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Terms, variable

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
        read = [column for column in spec.terms.columns if re.search(rf"(?<!\w){re.escape(column)}(?!\w)", name)]
        shares = any(spec.design.agreement.columns[column].levels for column in read)
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
