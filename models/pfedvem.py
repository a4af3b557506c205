"""pFedVEM (Zhu, Ma and Blaschko): declarations, and the methods of its Table 1.

`logistic` is a client whose shared block is the latent w: `fedppl.Confidence` gives every client its own copy, w_j ~
N(w, I / τ_j). `hierarchical` says the same with one declared spread for all clients, which `fedppl.EP` fits.
`METHODS` is the comparison of the paper; docs/pfedvem.md says how their settings were chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pymc as pm

import fedppl
from fedppl.models.fedsi import classifier, shared_names

__all__ = ["METHODS", "Method", "classifier", "hierarchical", "logistic", "shared_names"]


def logistic(X: Any, y: Any, *, scale: float = 2.5) -> pm.Model:
    """One client's logistic regression: y ~ Bernoulli(logit⁻¹(X w)), w ~ N(0, scale²); share ``"w"``.

    Parameters
    ----------
    X
        Inputs (n, d) on comparable scales, with a column of ones for the intercept.
    y
        0 or 1, (n,).
    scale
        Prior sd, where an algorithm uses the prior of the shared block.

    Returns
    -------
    pm.Model
    """
    with pm.Model() as model:
        inputs, outcomes = pm.Data("X", X), pm.Data("y", y)
        w = pm.Normal("w", 0.0, scale, shape=np.shape(X)[1])
        pm.Bernoulli("outcome", logit_p=inputs @ w, observed=outcomes)
    return model


def hierarchical(X: Any, y: Any, *, scale: float = 2.5, spread: float = 1.0) -> pm.Model:
    """The same with one spread for all clients, w_j ~ N(μ, τ²), τ ~ HalfNormal(spread); share ``"mu"``, ``"tau"``."""
    columns = np.shape(X)[1]
    with pm.Model() as model:
        inputs, outcomes = pm.Data("X", X), pm.Data("y", y)
        mu = pm.Normal("mu", 0.0, scale, shape=columns)
        tau = pm.HalfNormal("tau", spread)
        w = pm.Normal("w", mu, tau, shape=columns)
        pm.Bernoulli("outcome", logit_p=inputs @ w, observed=outcomes)
    return model


class Method(NamedTuple):
    """One row of the comparison: what travels, the algorithm of a head's names, and which models it gives."""

    shares: str  # "all" or "representation"
    algorithm: Callable[..., fedppl.Algorithm]  # of the head's names, and settings in the place of those here
    personal: bool  # clients' own models are what counts
    shared: bool  # and a global model is there
    alone: bool = False  # every client by itself


_SGD: dict[str, Any] = {"learning_rate": 0.01, "momentum": 0.9, "batch_size": 50}
_TUNED: dict[str, Any] = {**_SGD, "tune": "all", "tune_rate": 0.01, "tune_epochs": 5}
# The authors' code on CIFAR-10, with a head that starts at draws from N(0, 1); the other rows have ours, from 0.
_AUTHORS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "batch_size": 10,
    "head_rate": 1e-3,
    "head_momentum": 0.9,
    "spread": 1.0,
}
_ALL, _HEAD_FIRST = (("all", 5),), (("local", 5), ("shared", 5))


def _with(name: str, **settings: Any) -> Callable[..., fedppl.Algorithm]:
    """An algorithm of `fedppl.nn` that has no use for the head's names; torch is loaded when it is called."""
    return lambda head, **others: getattr(fedppl.nn, name)(**{**settings, **others})


def _headed(**settings: Any) -> Callable[..., fedppl.Algorithm]:
    """The one that takes them."""
    return lambda head, **others: fedppl.nn.Confidence(head=head, **{**settings, **others})


METHODS = {
    "Local": Method("all", _with("FedAvg", phases=(("all", 100),), **_SGD), True, False, alone=True),
    "FedAvg": Method("all", _with("FedAvg", phases=_ALL, **_SGD), False, True),
    "FedProx": Method("all", _with("FedAvg", phases=_ALL, proximal=1.0, **_SGD), False, True),
    "SCAFFOLD": Method("all", _with("SCAFFOLD", learning_rate=0.01), False, True),
    "FedPer": Method("representation", _with("FedAvg", phases=_ALL, **_TUNED), True, False),
    "FedRep": Method("representation", _with("FedAvg", phases=_HEAD_FIRST, **_TUNED), True, False),
    "IFCA": Method("all", _with("IFCA", spread=0.1), True, False),
    "PerFedAvg": Method("all", _with("PerFedAvg", learning_rate=0.01, inner_rate=0.01), True, False),
    "pFedMe": Method("all", _with("PFedMe", lam=1.0, learning_rate=0.5, inner_rate=0.01), True, True),
    "pFedBayes": Method("all", _with("PFedBayes", zeta=1.0, spread=0.01), True, True),
    "pFedVEM": Method("all", _headed(), True, True),
    "pFedVEM, authors": Method("all", _headed(**_AUTHORS), True, True),
    "uncertainty only": Method("all", _headed(terms=("uncertainty",)), True, True),
    "deviation only": Method("all", _headed(terms=("deviation",)), True, True),
    "pFedVEM, ledger": Method("all", _headed(remember=True), True, True),
    "pFedVEM, steadied": Method("all", _headed(remember=True, smoothing=0.9), True, True),
}
