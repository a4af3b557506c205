"""Kinks and steps of a log density, which approximations by a Gaussian at a mode cannot see.

|u| is smooth where u keeps its sign, and a switch may join two forms of one smooth function. So the graph says only
where to look: at what absolute values, maxima, comparisons and roundings turn on. Where that crosses zero between two
points that the prior reaches, the density and its gradient are held side by side on both sides of the crossing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pytensor import scalar
from pytensor.graph.traversal import io_toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.math import Argmax
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.sort import ArgSortOp, SortOp

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.types import Array

_PRIOR_DRAWS = 48
_CROSSINGS = 3  # looked at for each place in the graph
_COMPARISONS = (scalar.LT, scalar.LE, scalar.GT, scalar.GE)
_LARGEST = (scalar.ScalarMaximum, scalar.ScalarMinimum)
_ROUNDINGS = (scalar.Floor, scalar.Ceil, scalar.Trunc, scalar.RoundHalfToEven, scalar.RoundHalfAwayFromZero)


class _Turn(NamedTuple):
    """What to call it, the values that it turns on, and whether it turns where their sign changes or where they do."""

    name: str
    values: Any
    by_sign: bool


def find_kink(
    graph: _graph.SiteGraph, inputs: Sequence[Any], density: Callable[[Array], Array], reach: Callable[[], Array]
) -> str | None:
    """Name what makes the log density kink or jump in a parameter, None where nothing was found to.

    The graph is of log p(y, θ | φ) at x = (φ, θ), and `density` gives that and its gradient, (1 + d,). Crossings are
    sought among the points (P, d) of `reach`, nearest to the start first, which is called where there is what to seek.
    """
    turns = _turns(graph)
    if not turns:
        return None
    with np.errstate(all="ignore"):
        at = reach()
        for turn in turns:
            function = interpreted.python_function([graph.x, *graph.inputs], turn.values)
            values = np.stack([np.ravel(function(x, *inputs)) for x in at])
            looked = 0
            for element, before, after in _crossings(values, turn.by_sign):

                def side(x: Array, of: Any = function, element: int = element, turn: _Turn = turn) -> float:
                    value = float(np.ravel(of(x, *inputs))[element])
                    return float(np.sign(value)) if turn.by_sign else value

                found = _breaks(side, density, at[before], at[after])
                if found:
                    return turn.name
                looked += found is not None
                if looked == _CROSSINGS:
                    break
    return None


def points(parts: _graph.Parts, start: Array) -> Array:
    """Points (P, d) around the start, and draws of the prior of all variables on the unconstrained space."""
    spread = np.repeat([0.01, 0.1, 1.0, 3.0], [6, 6, 12, 12])[:, None]
    around = start + spread * np.random.default_rng(0).normal(size=(36, len(start)))
    rvs = (*parts.shared, *parts.local)
    transforms = [parts.model.rvs_to_transforms[rv] for rv in rvs]
    values = [rv if t is None else t.forward(rv, *rv.owner.inputs) for rv, t in zip(rvs, transforms, strict=True)]
    try:
        drawn = pm.draw(values, draws=_PRIOR_DRAWS, random_seed=0, mode=interpreted.PYTHON_MODE)
    except (NotImplementedError, ValueError, ArithmeticError, np.linalg.LinAlgError):
        return around  # a flat prior, or one that fails at its own extremes
    far = np.concatenate([np.reshape(value, (_PRIOR_DRAWS, -1)) for value in drawn], axis=1)
    far = far[np.all(np.isfinite(far), axis=1)]
    # Draws keep inside an edge of a prior that is not transformed; on the other side of the start they pass it.
    free = np.concatenate([np.full(value[0].size, t is None) for value, t in zip(drawn, transforms, strict=True)])
    mirrored = np.where(free, start - 2 * (far - start), far)
    return np.vstack([around[:24], far, mirrored[::2]])


def _turns(graph: _graph.SiteGraph) -> list[_Turn]:
    """Where the graph turns on a parameter. What stands in a check of a parameter's domain is left out."""
    of_x = {graph.x}
    for node in io_toposort([graph.x, *graph.inputs], [graph.logp]):
        if not of_x.isdisjoint(node.inputs):
            of_x.update(node.outputs)
    found: list[_Turn] = []
    seen: set[Any] = set()
    waiting = [graph.logp]
    while waiting:
        variable = waiting.pop()
        node = variable.owner
        if variable in seen or variable not in of_x or node is None or isinstance(node.op, Shape | Shape_i):
            continue
        seen.add(variable)
        found += _turns_of(node)
        waiting.extend(node.inputs[:1] if isinstance(node.op, CheckAndRaise) else node.inputs)
    return found


def _turns_of(node: Any) -> list[_Turn]:
    op, (first, *rest) = node.op, node.inputs
    of = getattr(op, "scalar_op", None)
    if isinstance(op, SortOp):
        return [_Turn("a sort", pt.argsort(first, axis=rest[0] if rest else op.axis), False)]
    if isinstance(op, Argmax | ArgSortOp):
        return [_Turn("the place of an extreme", node.outputs[0], False)]
    if isinstance(of, _LARGEST) and hasattr(op, "axis"):
        sign = 1 if isinstance(of, scalar.ScalarMaximum) else -1
        return [_Turn("a maximum or minimum", pt.argmax(sign * first, axis=op.axis), False)]
    if isinstance(of, scalar.Abs | scalar.Sign):
        return [_Turn("an absolute value or a sign", first, True)]
    if isinstance(of, _LARGEST):
        return [_Turn("a maximum or minimum", first - other, True) for other in rest]
    if isinstance(of, scalar.Clip):
        return [_Turn("a clip", first - bound, True) for bound in rest]
    if isinstance(of, _COMPARISONS):
        return [_Turn("a comparison or switch", first - rest[0], True)]
    if isinstance(of, _ROUNDINGS):
        return [_Turn("a rounding", node.outputs[0], False)]
    if isinstance(of, scalar.IntDiv | scalar.Mod):
        return [_Turn("a remainder", pt.floor(first / rest[0]), False)]
    if isinstance(of, scalar.Cast) and not node.outputs[0].type.dtype.startswith("float"):
        return [_Turn("a rounding", pt.floor(first), False)] if first.type.dtype.startswith("float") else []
    return []


def _crossings(values: Array, by_sign: bool) -> Any:
    """(element, one point, another): elements on two sides of a turn, at the points nearest to the start."""
    sides = np.nan_to_num(np.sign(values) if by_sign else values, nan=0.0, posinf=0.0, neginf=0.0)
    if by_sign:  # zero is no side: a positive number may underflow
        low, high = sides < 0, sides > 0
    else:
        low = sides == sides[0]
        high = ~low
    both = np.flatnonzero(np.any(low, axis=0) & np.any(high, axis=0))
    for element in np.random.default_rng(0).permutation(both)[: 3 * _CROSSINGS]:
        yield int(element), int(np.argmax(low[:, element])), int(np.argmax(high[:, element]))


def _breaks(
    side: Callable[[Array], float], density: Callable[[Array], Array], before: Array, after: Array
) -> bool | None:
    """Whether density or gradient jump where the side changes between two points; None where neither is finite."""
    here, low, high = side(before), 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if side(before + middle * (after - before)) == here else (low, middle)
    step = 1e-7

    def at(steps: float) -> Array:
        return density(before + (low + steps * step) * (after - before))

    left, right = at(-1), at(1)
    if not np.isfinite(left[0]) and not np.isfinite(right[0]):
        return None
    if np.isfinite(left[0]) != np.isfinite(right[0]):  # an edge, unless the density goes to zero there
        inside = -1 if np.isfinite(left[0]) else 1
        return bool(at(inside)[0] > at(inside * 1e4)[0] - 3.0)
    beside = np.maximum(np.abs(left - at(-3)), np.abs(at(3) - right))
    size = np.maximum(np.abs(left), np.abs(right))
    floor = 1e-8 * size + 1e-10 * np.max(size[np.isfinite(size)], initial=0.0)
    return bool(np.any(~(np.abs(right - left) <= 10 * beside + floor) & np.isfinite(beside)))
