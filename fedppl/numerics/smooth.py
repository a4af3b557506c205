"""A function of φ that is known at a few points, at all of them, where it is smooth enough: by a thin-plate spline."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RBFInterpolator
from scipy.spatial import cKDTree

from fedppl.types import Array

_NEAREST = 8  # points that tell how well those near to them are foretold
_PARTS = 4  # of the known points, each foretold from the others
_FORETOLD = 0.002  # median error of foretelling, in log units, with which that is enough


def smooth_over(
    points: Array,
    few: NDArray[np.intp],
    values: Array,
    errors: Array,
    enough: float = _FORETOLD,
    *,
    close: bool = False,
) -> tuple[Array, Array, Array] | None:
    """A function and its errors, known at a few of the points (P,), at all of them (S,), where it is smooth enough.

    A spline of three quarters of the few has to foretell the function at the other quarter, of each quarter in turn,
    with a median error of at most `enough`: a thin-plate one of points that are drawn in, else a cubic one. Where
    points lie so `close` that the function hardly departs from a quadratic, one with a quadratic is tried first. The
    third array is by how much they are missed, at the points that are near to them. Where the nearest of the few is not
    known, the function is NaN.
    """
    known = np.stack([values, errors], axis=1)
    told = np.all(np.isfinite(known), axis=1)
    all_few, few, known = few, few[told], known[told]
    if len(few) < 4 * (points.shape[1] + 2):
        return None
    scale = np.median(np.abs(points - np.median(points, axis=0)), axis=0)
    # far points are drawn in: what varies with the log of a distance is as smooth there as near the center
    straight = (points - np.median(points, axis=0)) / scale
    part = np.arange(len(few)) % _PARTS
    try:
        kinds = [(np.arcsinh(straight), "thin_plate_spline", 1), (straight, "cubic", 1)]
        for white, kernel, degree in [(straight, "cubic", 2), *kinds] if close else kinds:
            fit = functools.partial(RBFInterpolator, kernel=kernel, degree=degree)
            missed = np.zeros(len(few))
            for one in range(_PARTS):
                out = part == one
                missed[out] = fit(white[few[~out]], known[~out, 0])(white[few[out]]) - known[out, 0]
            if np.median(np.abs(missed)) <= enough and np.quantile(np.abs(missed), 0.9) <= 10 * enough:
                break
        else:
            return None
        found = fit(white[few], known)(white)
        nearest = cKDTree(white[few]).query(white, k=min(_NEAREST, len(missed)))[1]
        # Of the sign that they have on average, so that what many clients miss alike adds up, and nothing else does.
        missing = np.copysign(np.sqrt(np.mean(missed[nearest] ** 2, axis=1)), np.mean(missed[nearest], axis=1))
        missing[few] = 0.0
        if not np.all(told):
            found[~told[cKDTree(white[all_few]).query(white)[1]]] = np.nan
        is_known = np.isfinite(found[:, 0])
        return found[:, 0], np.where(is_known, found[:, 1], 0.0), np.where(is_known, missing, 0.0)
    except np.linalg.LinAlgError:  # points that coincide, or lie in a plane
        return None
