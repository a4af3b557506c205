"""What was made of a declaration, kept for other builds of the same: by what they declare, not by who declares it.

A builder is called in every fit, since no look at code tells what it reads: what it gives is looked up, and only the
graphs and functions that follow from that alone are not made again. They hold no client's data, which are inputs, but
for what a builder makes constants of beside its containers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import pymc as pm
from pymc.logprob.abstract import _logprob
from pymc.logprob.transforms import Transform
from pytensor.graph.basic import Constant

from fedppl.model import graph as _graph
from fedppl.model import same as _same
from fedppl.model.graph_key import Untold, graph_key, named, told

_KEPT = 32  # declarations, of 1.6 MB each for two priors and a likelihood; a study compares few dozen models


def made_of(parts: _graph.Parts) -> dict[Any, Any]:
    """What was made of this content before, to which more may be added; of what cannot be told, nothing."""
    content = content_of(parts)
    return {} if content is None else _made(content)


@functools.lru_cache(maxsize=_KEPT)  # it lets threads take turns
def _made(content: tuple[Any, ...]) -> dict[Any, Any]:
    return {}


def content_of(parts: _graph.Parts) -> tuple[Any, ...] | None:
    """All that a build declares but for the values in its containers; None where something cannot be told.

    Not told are data that are constants of their own in the graph, code of the user's (operations, transforms, log
    densities), and starting values that are computed.
    """
    model = parts.model
    outputs = _same.declared_outputs(model)
    if not parts.data or any(_same.has_own_gradient(op) for op in _same.operations(outputs)):
        return None
    lengths = _graph.lengths(model)
    inputs = [*parts.data, *_same.streams(outputs), *(model.dim_lengths[dim] for dim in lengths)]
    values = [model.rvs_to_values[rv].type for rv in model.basic_RVs]
    try:
        held = (
            graph_key(inputs, outputs),
            told([[value.dtype, list(value.shape)] for value in values]),
            tuple(_transform(model.rvs_to_transforms[rv]) for rv in model.basic_RVs),
            told([model.rvs_to_initial_values[rv] for rv in model.free_RVs]),
        )
    except Untold:
        return None
    if held[0] is None:
        return None
    fixed = {dim: length for dim, length in lengths.items() if dim not in parts.open}
    beside = [_same.names(parts), dict(model.named_vars_to_dims), list(lengths), fixed, dict(parts.open)]
    # A class of the user's may have given one of PyMC's distributions another density.
    densities = tuple(_logprob.dispatch(type(rv.owner.op)) for rv in model.basic_RVs)
    return (*held, densities, repr([*beside, [v.name for v in parts.prior_terms], bool(model.check_bounds)]))


def _transform(value: Any) -> Any:
    """A transform, or what it holds, as something that is equal where it computes the same."""
    if isinstance(value, list | tuple):
        return tuple(map(_transform, value))
    if isinstance(value, Transform):
        return named(type(value)), tuple((name, _transform(one)) for name, one in sorted(vars(value).items()))
    if isinstance(value, Constant):
        return told([value.type, value.data])
    if isinstance(value, Mapping):
        return tuple((name, _transform(one)) for name, one in value.items())
    if isinstance(
        value, FunctionType
    ):  # bounds of an interval, written inside of PyMC: its code, and what it closes over
        module = sys.modules.get(value.__module__)
        if not f"{value.__module__}.".startswith(f"{pm.__name__}.") or value.__globals__ is not vars(module):
            raise Untold
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, _transform([*cells, value.__defaults__, value.__kwdefaults__])
    return told(value)
