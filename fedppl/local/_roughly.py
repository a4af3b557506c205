"""What Laplace's approximation leaves out by a cheap rule, so that what a dear one adds to that is small and smooth."""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from fedppl.numerics import pairs
from fedppl.numerics.integral import Rule, by_grid
from fedppl.numerics.pairs import Densities, Laplace, Places
from fedppl.types import Array

_GRIDS = {1: 9, 2: 5, 3: 3}  # nodes of each coordinate, by the number of coordinates
_ALONG = 5  # nodes of an axis, beyond
_NUMBERS = 2**22  # numbers in nodes that are held at a time


def left_out(of: Densities, places: Places, points: Array, about: Laplace) -> Array:
    """Of clients in these places (C,) at points (S, m), about their modes there, client by client: (C, S).

    By a grid of few nodes; of more coordinates than three by one line along each axis, as if they were independent.
    0 where that has no value.
    """
    d = about.theta.shape[1]
    rule = by_grid(d, _GRIDS[d]) if d in _GRIDS else _lines(d)
    phi, who = np.tile(points, (len(places), 1)), np.repeat(places, len(points))
    found = np.zeros(len(phi))
    chunk = max(1, _NUMBERS // (len(rule.nodes) * (d + points.shape[1])))
    for first in range(0, len(phi), chunk):
        some = slice(first, first + chunk)
        at = Laplace(*(part[some] for part in about))
        terms = pairs.node_terms(of, at, phi[some], who[some], rule)
        with np.errstate(invalid="ignore"):
            if d in _GRIDS:
                found[some] = logsumexp(terms, axis=1) - at.values
            else:
                lines = (terms - at.values[:, None]).reshape(len(terms), d, _ALONG)
                found[some] = logsumexp(lines, axis=2).sum(axis=1)
    return np.where(np.isfinite(found), found, 0.0).reshape(len(places), len(points))


def _lines(d: int) -> Rule:
    """Nodes along each axis in turn, which is alone in having a weight."""
    one = by_grid(1, _ALONG)
    nodes = np.concatenate([one.nodes * axis for axis in np.eye(d)])
    return Rule(nodes, np.tile(one.log_weights, d), np.zeros(len(nodes)))
