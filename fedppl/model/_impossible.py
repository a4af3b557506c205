"""Which outcome has no density where a client starts, for the message that refuses it."""

from __future__ import annotations

import numpy as np

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.types import Array

# What outcomes of a distribution are, by the name of PyTensor's random variable.
_RULES = {
    "bernoulli": "outcomes are 0 or 1",
    "beta": "outcomes lie between 0 and 1",
    "binomial": "outcomes lie between 0 and n",
    "categorical": "classes are numbered from 0, and the last has a number one less than there are classes",
    "exponential": "outcomes are not negative",
    "gamma": "outcomes are positive",
    "geometric": "outcomes are 1, 2, ...",
    "halfnormal": "outcomes are not negative",
    "inverse_gamma": "outcomes are positive",
    "lognormal": "outcomes are positive",
    "negative_binomial": "counts are not negative",
    "poisson": "counts are not negative",
    "weibull": "outcomes are positive",
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
        rule = _RULES.get(getattr(rv.owner.op, "name", None) or "", "")
        at = place[0] if len(place) == 1 else place
        return f"{names[rv]!r} is {np.asarray(values)[place]} in row {at}" + (f", and {rule}" if rule else "")
    return ""
