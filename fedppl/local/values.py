"""log f_k at many points: Laplace's everywhere, and what that leaves out at a few of them."""

from __future__ import annotations

import numpy as np

from fedppl.contracts import ClientView, Constant, Factor
from fedppl.local import _factor, _gaussian_rest, _marginal
from fedppl.local._other_modes import require_one_mode
from fedppl.local._separable import is_separable, one_by_one
from fedppl.types import Array


def approximated(client: ClientView, points: Array, center: Array, prior_share: float) -> Array:
    """Laplace's log f_k, and its share of a prior that is not Gaussian, at points (S, m); NaN where there is none."""
    found = _marginal.values(client, points, center, prior_share)
    return np.where(np.isfinite(found), found, np.nan)


def is_exact(client: ClientView) -> bool:
    """Whether Laplace's is log f_k itself."""
    return not client.local_size or client.view(_gaussian_rest.is_exact)


def left_out(client: ClientView, points: Array, center: Array, laplace: Array) -> Factor:
    """What Laplace's values (S,) leave out of log f_k at points (S, m), by the best rule that there is."""
    require_one_mode(client, points, center)
    if client.view(is_separable):
        better, errors, constant = _factor._with_alike(*one_by_one(client, points, center))
    else:
        better, errors, constant = _factor._integrated(client, points, center)
    return Factor(better - laplace, errors, constant)


NOTHING = Factor(np.zeros(0), np.zeros(0), Constant())
