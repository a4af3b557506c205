"""Where draws of θ begin if all but one coordinate c are Gaussian given it, as effects are given their sd.

Laplace's approximation may be in the neck of a funnel, where the mode is, and trajectories that begin there stay there.
The density of c is that of the quadrature that `_conditional` has for log f_k, linear between its nodes.
"""

from __future__ import annotations

import numpy as np

from fedppl.contracts import ClientView
from fedppl.local._conditional import _about_modes, _centered, _inverses
from fedppl.local._gaussian_rest import Places
from fedppl.numerics.integral import by_trapezoids
from fedppl.numerics.marginal import site_outputs
from fedppl.types import Array, Rng

_AT_ONCE = 2**22  # numbers in the points that are held at a time
_NEWTON = 2  # steps: of what is Gaussian one would do, but for rounding


def begun(
    client: ClientView, phi: Array, modes: Array, factors: Array, which: Places, otherwise: Array, rng: Rng
) -> Array:
    """θ (N, d) for rows of φ (N, m): c by its density, the others given c; `otherwise` where that has no value."""
    m, rest, rule = phi.shape[1], np.setdiff1d(np.arange(modes.shape[1]), which), by_trapezoids()
    most = max(1, _AT_ONCE // (len(rule.nodes) * modes.shape[1] * (m + modes.shape[1])))
    if len(phi) > most:
        parts = [slice(first, first + most) for first in range(0, len(phi), most)]
        return np.concatenate([begun(client, phi[i], modes[i], factors[i], which, otherwise[i], rng) for i in parts])
    about, theta = _about_modes(phi, modes, factors, which, rest), otherwise.copy()
    terms = _centered(client, about, which, rest, rule)
    told = np.flatnonzero(np.isfinite(terms.max(axis=1)))
    u = np.arcsinh(rule.nodes[:, 0])
    chosen = np.argmax(terms[told] + rng.gumbel(size=(len(told), len(u))), axis=1)
    between = rng.uniform(-0.5, 0.5, size=(2, len(told))).sum(axis=0) * (u[1] - u[0])
    step = about.shift[told, 0] + about.spread[told, 0, 0] * np.sinh(u[chosen] + between)

    of_rest = about.curvature[told][:, rest[:, None], rest]
    follow = np.linalg.solve(of_rest, about.curvature[told][:, rest[:, None], which])[..., 0]
    x = np.concatenate([phi[told], modes[told]], axis=1)
    x[:, m + which[0]] += step
    x[:, m + rest] -= follow * step[:, None]
    widths = 1.0 / np.sqrt(np.diagonal(of_rest, axis1=1, axis2=2))
    around = np.repeat(x[:, None], 1 + len(rest), axis=1)
    around[:, np.arange(1, 1 + len(rest)), m + rest] += widths
    slopes = site_outputs(client.kernel, around.reshape(-1, x.shape[1]), client.packed)[:, 1 + m + rest]
    slopes = slopes.reshape(len(x), 1 + len(rest), -1)
    curved = -(slopes[:, 1:] - slopes[:, :1]) / widths[:, :, None]
    inverse, log_determinant = _inverses(0.5 * (curved + np.swapaxes(curved, 1, 2)))
    slope = slopes[:, 0]
    for _ in range(_NEWTON):
        x[:, m + rest] += np.einsum("nij,nj->ni", inverse, np.nan_to_num(slope))
        slope = site_outputs(client.kernel, np.ascontiguousarray(x), client.packed)[:, 1 + m + rest]
    good = np.flatnonzero(np.isfinite(log_determinant) & np.isfinite(slope).all(axis=1))
    root = np.linalg.cholesky(inverse[good])
    x[np.ix_(good, m + rest)] += np.einsum("nij,nj->ni", root, rng.normal(size=(len(good), len(rest))))
    theta[told[good]] = x[good, m:]
    return theta
