"""log f_k at many points: Laplace's approximation over θ everywhere, and what that leaves out at a few of them."""

from __future__ import annotations

import numpy as np

from fedppl.contracts import ClientView, Factor
from fedppl.local import _factor, _gaussian_rest, _marginal
from fedppl.local._other_modes import require_one_mode
from fedppl.types import Array


def laplace(client: ClientView, points: Array, center: Array, prior_share: float) -> Array:
    """log f_k, and its share of a prior that is not Gaussian, at points (S, m): (S,), NaN where there is no mode."""
    if not len(points):
        return np.zeros(0)
    found = _marginal.values(client, points, center, prior_share)
    return np.where(np.isfinite(found), found, np.nan)


def left_out(client: ClientView, points: Array, center: Array) -> Factor:
    """What Laplace's log f_k leaves out at points (S, m), by the best rule that the client's model has.

    Raises
    ------
    LocalFailure
        Where θ has mass about another mode, which no rule about one sees.
    """
    if not len(points) or not client.local_size or client.view(_gaussian_rest.is_exact):
        return Factor(np.zeros(len(points)), np.zeros(len(points)))
    require_one_mode(client, points, center)
    values, errors, constant = _factor.integrated(client, points, center)
    return Factor(values - laplace(client, points, center, 0.0), errors, constant)
