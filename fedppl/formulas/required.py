"""What a formula, its family and the names in it have to be, before any data are seen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedppl.formulas import families
from fedppl.formulas.declare import Formula
from fedppl.formulas.family import Family
from fedppl.formulas.predictor import spreads, tag
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Terms
from fedppl.settings import shown
from fedppl.types import DeclarationError

_RESPONSES = {
    "plain": "a column",
    "proportion": "prop(successes, trials)",
    "survival": "Surv(time, event)",
    "interval": 'Surv(lower, upper, "interval")',
}


def _require_cuts(cuts: Any) -> None:
    values = np.asarray(cuts if isinstance(cuts, Sequence | np.ndarray) else [], dtype=object).tolist()
    numbers = [float(one) if isinstance(one, int | float | np.integer | np.floating) else np.nan for one in values]
    if not numbers or not np.all(np.diff([0.0, *numbers, np.inf]) > 0):
        raise DeclarationError(
            f"family='piecewise' has a hazard that is constant between cut points, and constants={{'cuts': "
            f"{shown(cuts)}}} are none: give times above 0 that rise, the same for all clients: "
            "constants={'cuts': [30, 90]}."
        )


def require_family(family: Family, terms: Terms, text: str, constants: Mapping[str, Any]) -> None:
    """Refuse a response, cut points or offsets that the family has no use for."""
    if terms.response.kind not in family.responses:
        wanted = " or ".join(_RESPONSES[kind] for kind in family.responses)
        raise DeclarationError(
            f"family={family.name!r} has {wanted} for a response; {text!r} has another, "
            f"which {families.taking(terms.response.kind)[:6]} have."
        )
    if family.name == "piecewise":
        _require_cuts(constants.get("cuts"))
    if family.several and terms.offsets:
        raise DeclarationError(f"offset() is added to one linear predictor, and family={family.name!r} has several.")


def _dims(built: Formula, names: Sequence[str]) -> set[str]:
    """Names that dims of draws and of tables have."""
    groups = {f"{tag(one)}_{what}" for one in built.terms.groups for what in ("effect", "pair")}
    own = {f"{name}_dim{axis}" for name in names for axis in ("", "_0", "_1")}
    levels = {f"{built.terms.response.variable}_level"} if built.family.several else set()
    return {"chain", "draw", "sample", *levels, *groups, *own}


def require_names(built: Formula) -> None:
    """Refuse one name for two things, and priors and levels of what is not there."""
    response = built.terms.response.columns
    right = {*built.terms.columns, *built.terms.common, *(one for group in built.terms.groups for one in group.factor)}
    if both := sorted(set(response) & right):
        raise DeclarationError(f"{both} stand on both sides of {built.text!r}; leave them out of one.")
    of_groups = [f"{tag(one)}_{what}" for one in built.terms.groups for what in ("effects", "z")]
    # One column may be several effects, once its levels are known.
    several = [one for one in built.terms.groups if built.correlated and set(one.expressions) - {"1"}]
    later = {name for one in several for name in spreads(one, 2, correlated=True)}
    of_groups += [f"{tag(one)}_corr" for one in several]
    alone = [one for one in several if len(one.expressions) + built.family.several == 1]  # as far as is known
    of_groups += [f"{tag(one)}_partial" for one in alone]
    names = [*built.shared, built.terms.response.variable, *of_groups]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DeclarationError(
            f"{twice} are names of columns of {built.text!r} and of variables of the model, {sorted(set(names))}; "
            "rename these columns."
        )
    if both := sorted(set(names) & _dims(built, names)):
        raise DeclarationError(
            f"{both} are names of columns of {built.text!r} and of dims of its results; rename these columns."
        )
    for name, prior in built.priors.items():
        if not isinstance(prior, Prior):
            raise DeclarationError(
                f'priors[{name!r}]={shown(prior)} is no fedppl.Prior; pass one: fedppl.Prior("Normal", mu=0, sigma=1).'
            )
    if unknown := sorted(set(built.priors) - set(built.shared) - later):
        raise DeclarationError(f"priors of {unknown}: the shared variables are {list(built.shared)}; name some.")
    if both := sorted(set(built.constants) & set(built.columns)):
        raise DeclarationError(f"constants {both} are columns of {built.text!r} too; rename one of the two.")
    words = {*re.findall(r"[^\W\d]\w*", built.text), *re.findall("`([^`]*)`", built.text)}
    words |= {"cuts"} if built.family.name == "piecewise" else set()
    if unused := sorted(set(built.constants) - words):
        raise DeclarationError(f"constants {unused} are not in {built.text!r}; write them in, or leave them out.")
    if unknown := sorted(set(built.levels) - set(built.columns)):
        raise DeclarationError(f"levels of {unknown}: the formula's columns are {list(built.columns)}; name some.")
