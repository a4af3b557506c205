"""Numbers of variables by the names under which they are printed: ``arm[drug]``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedppl.settings import chosen, shown, some_of
from fedppl.types import DeclarationError

CI_PROB = 0.95  # of intervals, everywhere


def interval(ci_prob: float) -> tuple[float, float]:
    """Tails of the equal-tailed interval.

    >>> interval(0.5)
    (0.25, 0.75)
    """
    return (1 - ci_prob) / 2, (1 + ci_prob) / 2


def labels_of(values: Any) -> list[str]:
    """Every number of an array of draws, or of estimates, as it is printed: name[coordinates]."""
    dims = [dim for dim in values.dims if dim not in ("chain", "draw")]
    labels = [[str(label) for label in values[dim].values] for dim in dims]
    return [
        f"{values.name}[{', '.join(labels[axis][i] for axis, i in enumerate(place))}]" if place else str(values.name)
        for place in np.ndindex(*(values.sizes[dim] for dim in dims))
    ]


def variable_of(entry: str, known: Collection[str]) -> str:
    """The variable that an entry is of, whose own name may have brackets; what stands before the first, of none.

    >>> variable_of("dose [mg][2]", ["dose [mg]"]), variable_of("arm[drug]", ["dose [mg]"])
    ('dose [mg]', 'arm')
    """
    fitting = [name for name in known if entry == name or entry.startswith(f"{name}[")]
    return max(fitting, key=len) if fitting else entry.partition("[")[0]


def entries_of(group: Any, var_names: Any, what: str, default: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Places in the flat array of what was asked for, by variable: all of one, or those that are named as printed.

    Without names it is all of the variables in `default`, or of all.
    """
    known = [str(name) for name in group.data_vars]
    if var_names is None:
        return {name: list(range(len(labels_of(group[name])))) for name in (known if default is None else default)}
    given = [var_names] if isinstance(var_names, str) else var_names
    listed = list(given) if isinstance(given, Sequence) and all(isinstance(one, str) for one in given) else None
    if listed is None or not any("[" in one for one in listed if one not in known):
        return {name: list(range(len(labels_of(group[name])))) for name in chosen("var_names", var_names, known, what)}
    found: dict[str, list[int]] = {}
    for one in listed:
        name = variable_of(one, known)
        if name not in known:
            chosen("var_names", one, known, what)
        labels = {_spaceless(label): place for place, label in enumerate(labels_of(group[name]))}
        places = list(labels.values()) if one == name else [labels[key] for key in [_spaceless(one)] if key in labels]
        if not places:
            raise DeclarationError(
                f"var_names={shown(var_names)}: {one!r} is none of {what}; those of {name!r} are "
                f"{some_of(labels_of(group[name]))}."
            )
        if set(places) & set(found.get(name, [])):
            raise DeclarationError(f"var_names={shown(var_names)} has {one!r} twice; name each once.")
        found.setdefault(name, []).extend(places)
    return found


def behind_of(declaration: Any) -> frozenset[str]:
    """Variables that others show in a form that can be read, and that are shown where they are asked for alone."""
    return frozenset(getattr(declaration.builder, "behind", ()))


def shown_by_default(declaration: Any, group: Mapping[Any, Any]) -> list[str]:
    """Names of variables, without those behind others."""
    return [str(name) for name in group if str(name) not in behind_of(declaration)]


def _spaceless(label: str) -> str:
    return "".join(label.split())
