"""Steps towards the mode of q where its precision need not be positive definite."""

from __future__ import annotations

import numpy as np

from fedppl.gaussian import Gaussian
from fedppl.types import Array

_SINGULAR = 1e-13


def bounded_step(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool]:
    """Newton step on |eigenvalues| in prior units, no axis longer than `radius` sds, and whether it was cut.

    For steps that no objective watches: it climbs whatever the curvature.
    """
    inverse = np.linalg.inv(np.linalg.cholesky(prior.precision))
    values, vectors = np.linalg.eigh(inverse @ q.precision @ inverse.T)
    gradient = inverse @ (q.linear - q.precision @ x)
    move = (vectors.T @ gradient) / np.maximum(np.abs(values), 1.0)
    clipped = np.clip(move, -radius, radius)
    return inverse.T @ (vectors @ clipped), bool(np.any(clipped != move)) or bool(values[0] <= 0)


def newton_step(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool, bool]:
    """Newton step from x towards the mode of q; whether q's precision served as it is; whether the step was cut.

    Where the precision is not positive definite, couplings are left out until it is: those of one coordinate, the one
    that leaves the largest gain. A scale that is far off couples with every mean it scales; by itself each knows its
    way. Along no principal axis of the precision is the step longer than `radius` prior sds.
    """
    gradient = q.linear - q.precision @ x
    scale = np.sqrt(np.maximum(np.abs(np.diag(q.precision)), np.diag(prior.precision)))
    white, slope = q.precision / np.outer(scale, scale), gradient / scale
    whole = _smallest(white) > _SINGULAR
    if whole:
        move = np.linalg.solve(white, slope)
    else:
        best: _Option | None = None
        for first in _suspects(white):
            found = _decoupled(white, slope, first, len(white) if best is None else best[0])
            if found is not None and (best is None or found[:2] < best[:2]):
                best = found
        assert best is not None  # the first has no bound
        _, _, move, white = best
    root = np.linalg.inv(np.linalg.cholesky(prior.precision))
    _, axes = np.linalg.eigh(root @ (white * np.outer(scale, scale)) @ root.T)
    axes = axes.T @ np.linalg.inv(root.T)  # rows: principal axes of the precision, in prior sds
    along = axes @ (move / scale)
    kept = np.clip(along, -radius, radius)
    return np.linalg.solve(axes, kept), whole, bool(np.any(kept != along))


def _smallest(matrix: Array) -> float:
    values = np.linalg.eigvalsh(matrix)
    return float(values[0] / max(values[-1], 1e-300))


def _suspects(white: Array, most: int = 20) -> list[int]:
    """Coordinates that the direction of most negative curvature lies in."""
    _, vectors = np.linalg.eigh(white)
    return [int(j) for j in np.argsort(-np.abs(vectors[:, 0]), kind="stable")[:most]]


_Option = tuple[int, float, Array, Array]  # how many, −gain, step, matrix


def _decoupled(white: Array, slope: Array, first: int, most: int) -> _Option | None:
    """Leave out one coordinate's couplings, then others' while need be; None where that takes more than `most`."""
    matrix, left = white.copy(), [first]
    while True:
        j = left[-1]
        own = max(abs(float(white[j, j])), 1e-3)
        matrix[j], matrix[:, j] = 0.0, 0.0
        matrix[j, j] = own
        values, vectors = np.linalg.eigh(matrix)
        if values[0] > _SINGULAR * max(values[-1], 1e-300):
            break
        share = np.abs(vectors[:, 0])
        share[left] = 0.0
        if not np.any(share > 0):
            break
        if len(left) == most:
            return None
        left.append(int(np.argmax(share)))
    move = np.asarray(np.linalg.solve(matrix, slope), dtype=np.float64)
    return len(left), -float(move @ slope), move, matrix
