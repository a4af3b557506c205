"""Where draws of θ begin if all but one or two coordinates c are Gaussian given these, as effects are given their sd.

Laplace's approximation may be in the neck of a funnel, where the mode is, and trajectories that begin there stay there.
The density of c is that of the quadrature that `_conditional` has for log f_k, spread out between its nodes.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from fedppl.contracts import ClientView
from fedppl.local._conditional import _about_modes, _centered, _gaps, _inverses, _Quadrature
from fedppl.local._gaussian_rest import Places
from fedppl.numerics.integral import Rule, by_grid, by_trapezoids
from fedppl.numerics.marginal import site_outputs
from fedppl.types import Array, Rng

_AT_ONCE = 2**22  # numbers in the points that are held at a time
_NODES = 11  # of each coordinate where there are two
_NEWTON = 2  # steps: of what is Gaussian one would do, but for rounding


def begun(
    client: ClientView, phi: Array, modes: Array, factors: Array, which: Places, otherwise: Array, rng: Rng
) -> Array:
    """θ (N, d) for rows of φ (N, m): c by its density, the others given c; `otherwise` where that has no value."""
    (m, d), theta = (phi.shape[1], modes.shape[1]), otherwise.copy()
    rest, rule = np.setdiff1d(np.arange(d), which), by_trapezoids() if len(which) == 1 else by_grid(2, _NODES)
    chunk = max(1, _AT_ONCE // (len(rule.nodes) * d * (m + d)))
    for first in range(0, len(phi), chunk):
        some = slice(first, first + chunk)
        about = _about_modes(phi[some], modes[some], factors[some], which, rest)
        terms = _centered(client, about, which, rest, rule)
        told = np.flatnonzero(np.isfinite(terms.max(axis=1)))
        if not len(told):
            continue
        about = _Quadrature(*(values[told] for values in about))
        x = np.concatenate([about.phi, about.modes], axis=1)
        step = about.shift + np.einsum("npq,nq->np", about.spread, _between_nodes(terms[told], rule, rng))
        x[:, m + which] += step
        good: Places = np.arange(len(x))
        if len(rest):
            of_rest = about.curvature[:, rest[:, None], rest]
            follow = np.linalg.solve(of_rest, about.curvature[:, rest[:, None], which])
            x[:, m + rest] -= np.einsum("nrq,nq->nr", follow, step)
            good = _draw_rest(client, x, m + rest, 1.0 / np.sqrt(np.diagonal(of_rest, axis1=1, axis2=2)), rng)
        theta[first + told[good]] = x[good, m:]
    return theta


def _between_nodes(terms: Array, rule: Rule, rng: Rng) -> Array:
    """z (N, q) about nodes that are drawn by what they add to the integral, with the variance that nodes have."""
    chosen = np.argmax(terms + rng.gumbel(size=terms.shape), axis=1)
    gaps = np.stack([_gaps(column) for column in rule.nodes.T], axis=1)
    added = softmax(rule.log_weights) @ gaps**2 / 12.0
    jitter = gaps[chosen] * rng.uniform(-0.5, 0.5, size=(len(terms), gaps.shape[1]))
    return np.asarray(np.sqrt(1.0 - added) * rule.nodes[chosen] + jitter)


def _draw_rest(client: ClientView, x: Array, places: Places, widths: Array, rng: Rng) -> Places:
    """Draw the Gaussian coordinates of x (N, m + d), which is changed, and tell the rows where that was possible."""
    around = np.repeat(x[:, None], 1 + len(places), axis=1)
    around[:, np.arange(1, 1 + len(places)), places] += widths  # slopes are linear in these: any step is exact
    slopes = site_outputs(client.kernel, around.reshape(-1, x.shape[1]), client.packed)[:, 1 + places]
    slopes = slopes.reshape(len(x), 1 + len(places), len(places))
    curved = -(slopes[:, 1:] - slopes[:, :1]) / widths[:, :, None]
    inverse, log_determinant = _inverses(0.5 * (curved + np.swapaxes(curved, 1, 2)))
    slope = slopes[:, 0]
    for _ in range(_NEWTON):
        x[:, places] += np.einsum("nij,nj->ni", inverse, np.nan_to_num(slope))
        slope = site_outputs(client.kernel, np.ascontiguousarray(x), client.packed)[:, 1 + places]
    good = np.flatnonzero(np.isfinite(log_determinant) & np.isfinite(slope).all(axis=1))
    values, vectors = np.linalg.eigh(inverse[good])
    sds = np.sqrt(np.maximum(values, 0.0))  # rounding may leave one that is no variance
    x[np.ix_(good, places)] += np.einsum("nij,nj->ni", vectors, sds * rng.normal(size=sds.shape))
    return good
