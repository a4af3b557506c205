"""Which outcome has no density where a client starts, for the message that refuses it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.types import Array

# What outcomes of a distribution are, by the name of PyTensor's random variable, and which values break that: where
# none does, a parameter is at fault, as an exposure of 0 is.
_COUNTS: tuple[str, Callable[[float], bool]] = "counts are not negative", lambda y: y < 0
_POSITIVE: tuple[str, Callable[[float], bool]] = "outcomes are positive", lambda y: y <= 0
_RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "bernoulli": ("outcomes are 0 or 1", lambda y: y not in (0, 1)),
    "beta": ("outcomes lie between 0 and 1", lambda y: not 0 < y < 1),
    "binomial": ("outcomes lie between 0 and n", lambda y: y != 0),
    "categorical": (
        "classes are numbered from 0, and the last has a number one less than there are classes",
        lambda y: y != 0,
    ),
    "exponential": ("outcomes are not negative", lambda y: y < 0),
    "gamma": _POSITIVE,
    "geometric": ("outcomes are 1, 2, ...", lambda y: y < 1),
    "halfnormal": ("outcomes are not negative", lambda y: y < 0),
    "inverse_gamma": _POSITIVE,
    "lognormal": _POSITIVE,
    "negative_binomial": _COUNTS,
    "poisson": _COUNTS,
    "weibull": _POSITIVE,
}


def impossible_outcome(client: ClientModel, phi: Array) -> str:
    """The first outcome whose log density is minus infinity, with its place and the rule; "" where none is found."""
    template, layout = client.template, client.layout
    try:
        x, inputs, outputs = _graph.observed_graph(template.parts, layout.variables, client.local)
        function = interpreted.python_function([x, *inputs], outputs)
        found = function(np.concatenate([phi, client.initial]), *client.inputs)
    except Exception:  # a reason is looked for, of a failure that is told in any case
        return ""
    names = {rv: container.name for container, rv in _graph.observed_through(template.parts).items()}
    for rv, each in zip(template.parts.model.observed_RVs, found, strict=True):
        values = client.arrays.get(names.get(rv, ""))
        if not np.any(np.isneginf(each)) or values is None or np.shape(values) != np.shape(each):
            continue
        place = tuple(int(i) for i in np.argwhere(np.isneginf(each))[0])
        value = np.asarray(values)[place]
        at = f" in row {place[0] if len(place) == 1 else place}" if place else ""
        rule, breaks = _RULES.get(getattr(rv.owner.op, "name", None) or "", ("", lambda y: False))
        return f"{names[rv]!r} is {value}{at}, " + (
            f"and {rule}" if breaks(float(value)) else "which has no density there"
        )
    return ""
