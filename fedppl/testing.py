"""A small federated problem with a known posterior, for tests, docstrings and first trials."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm

from fedppl.model.declaration import FederatedModel

__all__ = ["normal_means"]


def _unit(y: Any) -> Any:
    """One unit with y_i ~ N(θ, 1), θ ~ N(μ, 0.5²), μ ~ N(0, 10²): Gaussian throughout."""
    with pm.Model() as model:
        values = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 10)
        theta = pm.Normal("theta", mu, 0.5)
        pm.Normal("obs", theta, 1, observed=values)
    return model


def normal_means(
    clients: int = 3, rows: int = 20, *, seed: int = 0
) -> tuple[FederatedModel, dict[str, dict[str, Any]]]:
    """A random-effects mean with known variances: its posterior is Gaussian and has a closed form.

    Parameters
    ----------
    clients, rows
        Number of clients, and of rows at each.
    seed
        Seed of the data.

    Returns
    -------
    tuple
        FederatedModel with shared "mu" and local "theta", and the clients' data.

    Examples
    --------
    >>> model, clients = normal_means(clients=2)
    >>> model.shared, list(clients)
    (('mu',), ['client 0', 'client 1'])
    """
    rng = np.random.default_rng(seed)
    data = {f"client {k}": {"y": 1.0 + 0.5 * rng.normal() + rng.normal(size=rows)} for k in range(clients)}
    return FederatedModel(_unit, shared=["mu"]), data
