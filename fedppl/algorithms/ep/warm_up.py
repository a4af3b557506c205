"""Compile, ahead of the first fit, what fits by EP use."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pymc as pm

from fedppl.algorithms.ep.ep import EP
from fedppl.model.declaration import FederatedModel
from fedppl.run.loop import Options, fit

_CLIENTS, _ROWS = 4, 6


def warm_up() -> float:
    """Compile what fits by EP need, so that the first one on this machine does not wait for it.

    Loops over clients, points and nodes are compiled once and kept in Numba's cache (``NUMBA_CACHE_DIR``), what
    PyTensor compiles in its own (``PYTENSOR_FLAGS=base_compiledir=...``). Run this when an image is built or a server
    starts; a fit compiles its model's density alone then. Calls after the first take a few seconds.

    Returns
    -------
    float
        Seconds that it took.

    Raises
    ------
    OSError
        Where the directory of PyTensor's cache cannot be made or written.
    NotConvergedError
        Where the fits of a few rows find no posterior, which says that what is installed does not work together.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.warm_up() > 0
    True

    Notes
    -----
    *When this fails.* In a container whose file system is not kept, and for a user or a machine of another kind than
    those of the caches, nothing is found again. Where ``NUMBA_CACHE_DIR`` cannot be written, nothing is said:
    look whether it holds files afterwards.
    """
    started = time.perf_counter()
    rng = np.random.default_rng(0)
    clients = {f"{k}": {"x": rng.normal(size=_ROWS), "y": rng.normal(size=_ROWS)} for k in range(_CLIENTS)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether so few rows tell anything is nobody's concern
        for builder in (_line, _logistic):
            model = FederatedModel(builder, ["mu", "tau"])
            found = fit(model, clients, EP(), Options(random_seed=0), progressbar=False)
            found.client("0", draws=10)
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
