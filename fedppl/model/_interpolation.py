"""A function that is known at points of one variable, as a graph that is twice differentiable everywhere.

Between two points a polynomial of degree five, which has the values, slopes and curvatures at both; slope and
curvature at a point are those of the polynomial of degree four through five points around it. So all parabolas, and
polynomials up to degree four, come back exactly, no system of equations is solved, and what is far away says nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt

from fedppl.types import Array

POINTS = 5  # as many as a grid needs
RISE = 0.1  # the most that a log-likelihood may still rise beyond an end of its grid
_LEAST = 1e-100


def interpolated(at: Any, grid: Any, values: Any) -> Any:
    """Value at a scalar `at` of the function that has `values` (n,) at the increasing points `grid` (n,).

    Beyond the grid it goes on with the value, slope and curvature of its end: as a parabola where it falls and is
    concave, bending into a line where it falls and is convex, and flattening out exponentially where it rises.
    """
    place = pt.clip(pt.sum(pt.ge(at, grid)) - 1, 0, grid.shape[0] - 2)
    ends = _derivatives(pt.stack([place, place + 1]), grid, values)
    left, right = ((value[side], slope[side], curvature[side]) for value, slope, curvature in [ends] for side in (0, 1))
    low, high = grid[place], grid[place + 1]
    inside = _between(pt.clip((at - low) / (high - low), 0.0, 1.0), high - low, left, right)
    first, last, span = grid[0], grid[-1], grid[-1] - grid[0]
    before = _beyond(pt.maximum(first - at, 0.0), left[0], -left[1], left[2], span)
    after = _beyond(pt.maximum(at - last, 0.0), *right, span)
    return pt.switch(pt.lt(at, first), before, pt.switch(pt.gt(at, last), after, inside))


def _derivatives(places: Any, grid: Any, values: Any) -> tuple[Any, Any, Any]:
    """Value, slope and curvature at points of the grid."""
    start = pt.clip(places - POINTS // 2, 0, grid.shape[0] - POINTS)
    away = [grid[start + k] - grid[places] for k in range(POINTS)]
    slope, curvature = divided([values[start + k] for k in range(POINTS)], away)
    return values[places], slope, curvature


def divided(values: Any, away: Any) -> tuple[Any, Any]:
    """Slope and curvature at 0 of the polynomial that has `values` at the points `away`, in Newton's form."""
    parts, slope, curvature = list(values), 0.0, 0.0
    product, first, second = 1.0, 0.0, 0.0  # of the factors so far and its two derivatives, at 0
    for k in range(POINTS):
        if k:
            parts = [(b - a) / (away[j + k] - away[j]) for j, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
            second = 2.0 * first - away[k - 1] * second
            first = product - away[k - 1] * first
            product = -away[k - 1] * product
        slope = slope + parts[0] * first
        curvature = curvature + parts[0] * second
    return slope, curvature


def _between(u: Any, width: Any, left: tuple[Any, Any, Any], right: tuple[Any, Any, Any]) -> Any:
    """Polynomial of degree five in u from 0 to 1."""
    slope, curvature = left[1] * width, left[2] * width**2
    a = right[0] - left[0] - slope - curvature / 2
    b = right[1] * width - slope - curvature
    c = right[2] * width**2 - curvature
    rest = 10 * a - 4 * b + c / 2 + u * (-15 * a + 7 * b - c + u * (6 * a - 3 * b + c / 2))
    return left[0] + u * (slope + u * (curvature / 2 + u * rest))


def _beyond(way: Any, value: Any, slope: Any, curvature: Any, span: Any) -> Any:
    """At a distance of `way` from an end, with the slope outwards."""
    length = pt.clip(0.5 * pt.abs(slope) / pt.maximum(curvature, 1e-300), 1e-9 * span, span)
    line = slope * way + pt.maximum(curvature, 0.0) * length**2 * (pt.expm1(-way / length) + way / length)
    parabola = slope * way + pt.minimum(curvature, 0.0) * way**2 / 2
    rises = pt.gt(slope, _LEAST)
    upwards = pt.switch(rises, slope, 1.0)  # what is not chosen below has to have a gradient all the same
    rate = pt.maximum(-curvature / upwards, 1.0 / span)
    rise = -upwards / rate * pt.expm1(-rate * way)
    return value + pt.switch(rises, rise, pt.switch(pt.gt(curvature, 0.0), line, parabola))


def rises_beyond(grid: Array, values: Array) -> tuple[float, float]:
    """What the function would still rise by beyond the first and the last point; infinite where it bends upwards."""
    found = []
    for way, points in ((-1.0, slice(None, POINTS)), (1.0, slice(-POINTS, None))):
        ends = grid[points] - grid[0 if way < 0 else -1]
        slope, curvature = divided(values[points], ends)
        outwards, span = way * float(slope), float(grid[-1] - grid[0])
        if outwards * span <= 0.01 * RISE:
            found.append(0.0)  # a plateau, and what rounding makes of it
        else:
            found.append(outwards**2 / -float(curvature) if curvature < 0 else np.inf)
    return found[0], found[1]
