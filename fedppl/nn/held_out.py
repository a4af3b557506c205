r"""The density of rows that a client held out, by draws of its linearised network.

.. math:: \log p(y \mid f_s), \qquad f_s(x) = f(x; \hat w) + J_S(x) (w_S^{(s)} - \hat w_S), \qquad w_S^{(s)} \sim q
"""

from __future__ import annotations

import numpy as np
import torch

from fedppl.nn._slopes import along, chunks, evaluate
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.types import Array


def log_densities(unit: NetworkUnit, q: Subnetwork, count: int, rng: np.random.Generator) -> Array:
    """Log density of all rows, which were held out, at each of so many draws of the outputs, (count,).

    Draws are from the subnetwork's posterior q by other rows, and are the same for all rows.
    """
    deviations, found = unit.tensor(q.deviations(count, rng), torch.float64), np.zeros(count)  # (count, s)
    at, y, first = evaluate(unit, q.weights, unit.X), outcomes(unit, torch.float64), 0
    for part in chunks(unit, q.weights, q.places, torch.float64, X=unit.X):
        wide = (part.slope if part.rest is None else part.rest).shape[:2]
        rows = slice(first, first + wide[0])
        first += wide[0]
        middle = unit.tensor(at[rows].reshape(wide), torch.float64)
        move = along(part, len(q.places))
        for draw in range(count):
            found[draw] += unit.likelihood.log_density(middle + move(deviations[draw]), y[rows])
    return found
