"""Declared models that what torch computes belongs to: a network about a point, and its last layer by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt


def linearised(
    J: np.ndarray,
    f: np.ndarray,
    y: np.ndarray,
    *,
    centre: np.ndarray,
    variance: np.ndarray,
    noise_sd: float | None = None,
) -> pm.Model:
    """The generalised linear model in a subnetwork's weights around h.

    Parameters
    ----------
    J
        ∂f / ∂θ_S at h, (n, C, s).
    f
        Outputs at h, (n, C).
    y
        Classes (n,); or outcomes (n, C), with a noise_sd.
    centre, variance
        h_S and g_S, (s,).
    noise_sd
        Of a normal likelihood; None for classes.

    Returns
    -------
    pm.Model
        With one free variable, ``theta`` (s,).
    """
    with pm.Model() as model:
        theta = pm.Normal("theta", centre, np.sqrt(variance), shape=len(centre))
        linear = f + pt.tensordot(J, theta - centre, axes=[[2], [0]])
        if noise_sd is None:
            pm.Categorical("label", logit_p=linear, observed=y)
        else:
            pm.Normal("outcome", linear, noise_sd, observed=y)
    return model


def head(Z: Any, y: Any, *, outputs: int) -> pm.Model:
    """A network's last layer on features Z (n, h), one vector ``"v"`` (C h + C,) as torch has it; share ``"v"``.

    No algorithm calls it. It is the declaration of what `fedppl.nn.Confidence` fits in torch: tests hold the one
    against `fedppl.local.MeanField` on the other.
    """
    width = np.shape(Z)[1]
    with pm.Model() as model:
        features, labels = pm.Data("Z", Z), pm.Data("y", y)
        v = pm.Normal("v", 0.0, 1.0, shape=outputs * (width + 1))
        matrix = pt.reshape(v[: outputs * width], (outputs, width))
        pm.Categorical("label", logit_p=features @ matrix.T + v[outputs * width :], observed=labels)
    return model
