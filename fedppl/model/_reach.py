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
    logp, inputs, read = _likelihood(parts)
    if not read.isdisjoint(parts.data):
        return False
    for other in _others(arrays):
        built = attempt(build, other)
        if built is None:
            return False
        their_logp, their_inputs, _ = _likelihood(built)
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


def _likelihood(parts: _graph.Parts) -> tuple[Any, list[Any], set[Any]]:
    """log p of what is observed with the locals above it, the variables it is a function of, and all it reads."""
    model = parts.model
    ends = [term for term in parts.site_terms if term not in parts.local]
    above = set(ancestors([*ends, *(model.rvs_to_values[rv] for rv in model.observed_RVs)]))
    logp = model.logp(vars=[*(rv for rv in parts.local if rv in above), *ends], sum=True)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    return logp, [*values, *parts.data, *model.dim_lengths.values()], above | set(ancestors([logp]))
