"""Small federated problems: with known posteriors, for tests, docstrings and first trials, and to compile ahead."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pymc as pm

from fedppl.algorithms.ep.ep import EP
from fedppl.model.declaration import FederatedModel
from fedppl.run.loop import Options, fit

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


_CLIENTS, _ROWS = 4, 6


def warm_up() -> float:
    """Compile what fits by EP need, so that the first one on this machine does not wait for it.

    Loops over clients, points and nodes are compiled once and kept in Numba's cache (``NUMBA_CACHE_DIR``), PyTensor's
    functions in its own (``PYTENSOR_FLAGS=base_compiledir=...``). Run this when an image is built or a server starts; a
    fit then compiles its model's density alone. Calls after the first take a few seconds.

    Returns
    -------
    float
        Seconds that it took.

    Raises
    ------
    OSError
        Where the directory of PyTensor's cache cannot be made or written.
    NotConvergedError
        Where the fits of a few rows find no posterior, as where installed packages do not work together.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.warm_up() > 0
    True

    Notes
    -----
    *When this fails.* In a container whose file system is not kept, and for another user or kind of machine than those
    of the caches, everything is compiled again. A ``NUMBA_CACHE_DIR`` that cannot be written gives no error: look
    whether it holds files afterwards.
    """
    started = time.perf_counter()
    rng = np.random.default_rng(0)
    clients = {f"{k}": {"x": rng.normal(size=_ROWS), "y": rng.normal(size=_ROWS)} for k in range(_CLIENTS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few rows tell nothing
        for builder in (_line, _logistic):
            model = FederatedModel(builder, ["mu", "tau"])
            fit(model, clients, EP(), Options(random_seed=0), progressbar=False).client("0", draws=10)
    return time.perf_counter() - started


def _line(x: Any, y: Any) -> pm.Model:
    """A coefficient and a noise sd of the client's own."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        slope = pm.Normal("slope", pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1), shape=2)
        pm.Normal("obs", slope[0] + slope[1] * x, pm.HalfNormal("sigma", 1), observed=y)
    return model


def _logistic(x: Any, y: Any) -> pm.Model:
    """A coefficient of the client's own, and outcomes that are not Gaussian."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        slope = pm.Normal("slope", pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1))
        pm.Bernoulli("obs", logit_p=slope * x, observed=y > 0)
    return model
