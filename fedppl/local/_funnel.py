"""Draws of θ if all but one or two coordinates c are Gaussian given these, as effects are given their sd.

Laplace's approximation may be in the neck of a funnel, where the mode is, and trajectories that begin there stay there.
The density of c is that of the quadrature that `_conditional` has for log f_k: of one coordinate as a curve through its
nodes, and of two spread out between them, from where trajectories move on.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from fedppl.contracts import ClientView
from fedppl.local._conditional import _centered, _gaps, _inverses, _Quadrature, about_modes
from fedppl.local._gaussian_rest import Places
from fedppl.numerics.distribution import draw_by_values
from fedppl.numerics.integral import Rule, by_grid, by_trapezoids
from fedppl.numerics.pairs import site_outputs
from fedppl.types import Array, Rng

_AT_ONCE = 2**22  # numbers in the points that are held at a time
_NODES = 11  # of each coordinate where there are two
_NEWTON = 2  # steps: of what is Gaussian one would do, but for rounding
_FAR = (4, 6)  # arsinh of sds: 27, and where something is left out there 202
_OUTSIDE = np.log(1e-5)  # of the density at its largest, at the outermost nodes


def drawn(
    client: ClientView, phi: Array, where: Places, modes: Array, factors: Array, which: Places, rng: Rng
) -> tuple[Array, Places]:
    """θ (N, d) for rows `where` of φ (U, m), with modes (U, d) and factors (U, d, d) there; and which could be had.

    c by its density, the others given c: exact where c is one coordinate, and else where trajectories may begin.
    """
    (m, d), theta = (phi.shape[1], modes.shape[1]), np.zeros((len(where), modes.shape[1]))
    rest, is_one = np.setdiff1d(np.arange(d), which), len(which) == 1
    about = about_modes(phi, modes, factors, which, rest)
    about, terms, rule = _spread_out(client, about, which, rest) if is_one else _by_grid(client, about, which, rest)
    told = np.isfinite(terms.max(axis=1))
    found: Places = np.flatnonzero(told[where])
    if not len(found):
        return theta, found
    of = where[found]
    if is_one:
        renumbered = np.cumsum(told) - 1
        u = draw_by_values(np.arcsinh(rule.nodes[:, 0]), terms[told].T, renumbered[of], rng)
        z = np.sinh(u)[:, None]
    else:
        z = _between_nodes(terms[of], rule, rng)
    x = np.concatenate([phi[of], about.modes[of]], axis=1)
    step = about.shift[of] + np.einsum("npq,nq->np", about.spread[of], z)
    x[:, m + which] += step
    good: Places = np.arange(len(x))
    if len(rest):
        of_rest = about.curvature[:, rest[:, None], rest]
        follow = np.linalg.solve(of_rest, about.curvature[:, rest[:, None], which])
        x[:, m + rest] -= np.einsum("nrq,nq->nr", follow[of], step)
        widths = 1.0 / np.sqrt(np.diagonal(of_rest, axis1=1, axis2=2))
        good = _draw_rest(client, x, m + rest, widths[of], rng)
    theta[found[good]] = x[good, m:]
    return theta, found[good]


def _spread_out(client: ClientView, about: _Quadrature, which: Places, rest: Places) -> tuple[_Quadrature, Array, Rule]:
    """Logarithms (U, L) of what nodes add to the integral, of nodes that reach as far as there is anything."""
    for far in _FAR:
        rule = by_trapezoids(far)
        held = about._replace(shift=about.shift.copy(), spread=about.spread.copy())
        terms = _in_chunks(client, held, which, rest, rule)
        ends = np.maximum(terms[:, 0], terms[:, -1])
        if not np.any(ends > np.max(terms, axis=1) + _OUTSIDE):
            break
    return held, terms, rule


def _by_grid(client: ClientView, about: _Quadrature, which: Places, rest: Places) -> tuple[_Quadrature, Array, Rule]:
    rule = by_grid(len(which), _NODES)
    return about, _in_chunks(client, about, which, rest, rule), rule


def _in_chunks(client: ClientView, about: _Quadrature, which: Places, rest: Places, rule: Rule) -> Array:
    """As `_centered`, which moves the nodes, with not too much held at a time."""
    count, m = about.phi.shape
    chunk = max(1, _AT_ONCE // (len(rule.nodes) * about.modes.shape[1] * (m + about.modes.shape[1])))
    found = []
    for first in range(0, count, chunk):
        part = _Quadrature(*(values[first : first + chunk] for values in about))
        found.append(_centered(client, part, which, rest, rule))
    return np.concatenate(found)


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
        slope = site_outputs(client.kernel, x, client.packed)[:, 1 + places]
    good = np.flatnonzero(np.isfinite(log_determinant) & np.isfinite(slope).all(axis=1))
    values, vectors = np.linalg.eigh(inverse[good])
    sds = np.sqrt(np.maximum(values, 0.0))  # rounding may leave one that is no variance
    x[np.ix_(good, places)] += np.einsum("nij,nj->ni", vectors, sds * rng.normal(size=sds.shape))
    return good
