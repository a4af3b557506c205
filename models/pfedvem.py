"""pFedVEM (Zhu, Ma and Blaschko): declarations, and the methods of its Table 1.

`logistic` is a client whose shared block is the latent w: `fedppl.Confidence` gives every client its own copy, w_j ~
N(w, I / τ_j). `hierarchical` says the same with one declared spread for all clients, which `fedppl.EP` fits. `head` is
the last layer of a network on its features, a Bayesian model by itself,

    v_j ~ N(w, ρ_j² I),   logits = V_j z(x; θ) + c_j,   y ~ Categorical(softmax(logits)),

that `fedppl.NetworkConfidence` fits in torch while it averages θ; tests hold the one against the other. `METHODS` is
the comparison of the paper; only settings of FedAvg, FedPer and pFedVEM have been run so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

import fedppl
from models.fedsi import classifier, shared_names

__all__ = ["METHODS", "Method", "classifier", "head", "hierarchical", "logistic", "shared_names"]


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


def head(Z: Any, y: Any, *, outputs: int) -> pm.Model:
    """A network's last layer on features Z (n, h), one vector ``"v"`` (C h + C,) as torch has it; share ``"v"``."""
    width = np.shape(Z)[1]
    with pm.Model() as model:
        features, labels = pm.Data("Z", Z), pm.Data("y", y)
        v = pm.Normal("v", 0.0, 1.0, shape=outputs * (width + 1))
        matrix = pt.reshape(v[: outputs * width], (outputs, width))
        pm.Categorical("label", logit_p=features @ matrix.T + v[outputs * width :], observed=labels)
    return model


class Method(NamedTuple):
    """One row of the comparison: what travels, the algorithm of a head's names, and which models it gives."""

    shares: str  # "all" or "representation"
    algorithm: Callable[[tuple[str, ...]], fedppl.Algorithm]
    personal: bool  # clients' own models are what counts
    shared: bool  # and a global model is there
    alone: bool = False  # every client by itself


_SGD: dict[str, Any] = {"learning_rate": 0.01, "momentum": 0.9, "batch_size": 50}
_TUNED: dict[str, Any] = {"tune": "all", "tune_rate": 0.01, "tune_epochs": 5}


def _averaging(*phases: tuple[str, int], **settings: Any) -> fedppl.Algorithm:
    return fedppl.NetworkAveraging(phases=phases or (("all", 5),), **{**_SGD, **settings})


METHODS = {
    "Local": Method("all", lambda head: _averaging(("all", 20)), True, False, alone=True),
    "FedAvg": Method("all", lambda head: _averaging(), False, True),
    "FedProx": Method("all", lambda head: _averaging(proximal=0.1), False, True),
    "FedPer": Method("representation", lambda head: _averaging(**_TUNED), True, False),
    "FedRep": Method("representation", lambda head: _averaging(("local", 5), ("shared", 5), **_TUNED), True, False),
    "SCAFFOLD": Method("all", lambda head: fedppl.NetworkSCAFFOLD(learning_rate=0.01), False, True),
    "IFCA": Method("all", lambda head: fedppl.IFCA(), True, False),
    "PerFedAvg": Method("all", lambda head: fedppl.PerFedAvg(learning_rate=0.01, inner_rate=0.01), True, False),
    "pFedMe": Method("all", lambda head: fedppl.PFedMe(lam=15.0, learning_rate=0.01, inner_rate=0.01), True, True),
    "pFedBayes": Method("all", lambda head: fedppl.PFedBayes(zeta=1.0, spread=0.01), True, True),
    "pFedVEM": Method("all", lambda head: fedppl.NetworkConfidence(head=head), True, True),
    "uncertainty only": Method(
        "all", lambda head: fedppl.NetworkConfidence(head=head, terms=("uncertainty",)), True, True
    ),
    "deviation only": Method("all", lambda head: fedppl.NetworkConfidence(head=head, terms=("deviation",)), True, True),
    "pFedVEM, ledger": Method("all", lambda head: fedppl.NetworkConfidence(head=head, remember=True), True, True),
    "pFedVEM, steadied": Method(
        "all", lambda head: fedppl.NetworkConfidence(head=head, remember=True, smoothing=0.9), True, True
    ),
}
