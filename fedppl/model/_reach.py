"""Whether a builder lets its data into the density of what is observed at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytensor.graph.basic import equal_computations
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model._public import altered, attempt

Build = Callable[[Mapping[str, Any]], _graph.Parts]

_FAR = 1e9  # past what data are compared with, and within 32 bits


def ignores_data(build: Build, parts: _graph.Parts, arrays: Mapping[str, Any]) -> bool:
    """Whether log p of the observed variables and potentials is the same whatever the data are.

    A container that stands above them is enough. Arrays that went straight into the model show when the builder is
    called with others; where it fails on those nothing is known, and nothing is said.
    """
    ends, above = _ends(parts)
    if not above.isdisjoint(parts.data):
        return False
    logp, inputs = _likelihood(parts, ends, above)
    if not set(ancestors([logp])).isdisjoint(parts.data):
        return False
    for other in _others(arrays):
        built = attempt(build, other)
        if built is None:
            return False
        their_logp, their_inputs = _likelihood(built, *_ends(built))
        if [v.type for v in inputs] != [v.type for v in their_inputs]:
            return False
        if not equal_computations([logp], [their_logp], in_xs=inputs, in_ys=their_inputs):
            return False
    return True


def _others(arrays: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Altered data, all arrays at once, and data far from these."""
    for step in altered(arrays):
        yield {name: one[name] for name, one in zip(arrays, step, strict=True)} if len(step) > 1 else step[0]
    for far in (-_FAR, _FAR):
        yield {name: value if value.dtype.kind != "f" else value + far for name, value in arrays.items()}


def _ends(parts: _graph.Parts) -> tuple[list[Any], set[Any]]:
    """What is observed, and all that stands above it as it was declared."""
    model = parts.model
    ends = [term for term in parts.site_terms if term not in parts.local]
    return ends, set(ancestors([*ends, *(model.rvs_to_values[rv] for rv in model.observed_RVs)]))


def _likelihood(parts: _graph.Parts, ends: list[Any], above: set[Any]) -> tuple[Any, list[Any]]:
    """log p of what is observed with the locals above it, and the variables it is a function of."""
    model = parts.model
    logp = model.logp(vars=[*(rv for rv in parts.local if rv in above), *ends], sum=True)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    return logp, [*values, *parts.data, *model.dim_lengths.values()]
