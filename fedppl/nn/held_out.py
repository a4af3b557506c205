r"""The density of rows that a client held out, by draws of its linearised network.

.. math:: \log p(y \mid f_s), \qquad f_s(x) = f(x; \hat w) + J_S(x) (w_S^{(s)} - \hat w_S), \qquad w_S^{(s)} \sim q
"""

from __future__ import annotations

import numpy as np
import torch

from fedppl.nn._slopes import chunks, evaluate, rows_of
from fedppl.nn.devices import host
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.types import Array


def log_densities(unit: NetworkUnit, q: Subnetwork, count: int, rng: np.random.Generator) -> Array:
    """Log density of all rows at each of some draws of the outputs, which the rows have in common.

    Parameters
    ----------
    unit
        The network, with the rows that were held out.
    q
        The subnetwork's posterior, from other rows.
    count
        Number of draws.
    rng
        Draws.

    Returns
    -------
    ndarray
        A sum over rows for each draw, (count,).
    """
    deviations, found = q.deviations(count, rng).T, np.zeros(count)  # (s, count)
    at, y, first = evaluate(unit, q.weights, unit.X), outcomes(unit, torch.float64), 0
    for part in chunks(unit, q.weights, q.places, torch.float64, X=unit.X):
        J = host(rows_of(part, len(q.places), flat=False))  # (b, C, s)
        rows = slice(first, first + len(J))
        first += len(J)
        for draw in range(count):
            output = at[rows].reshape(J.shape[:2]) + J @ deviations[:, draw]
            found[draw] += unit.likelihood.log_density(unit.tensor(output, torch.float64), y[rows])
    return found
