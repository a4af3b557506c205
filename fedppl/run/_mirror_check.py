"""Whether a posterior has another mode where signs of shared coordinates change, which no search came to.

A point where a client's own variables cannot be integrated counts as one without density.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Posterior
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.model.client import ClientModel
from fedppl.numerics import mirrors
from fedppl.run._run import Run
from fedppl.types import Array

_MOST_CLIENTS = 300
_MOST = 1500  # densities of clients, at images
_LOCAL = NestedLaplace()


def mirror_image(run: Run) -> str:
    """Say along which coordinate there is another mode; empty where none is, or none can be told."""
    shared, models = run.algorithm.result.shared, list(run.models.values())
    if not isinstance(shared, Posterior) or shared.without is None or not run.algorithm.needs.kernel:
        return ""
    if not 0 < len(models) <= _MOST_CLIENTS or models[0].prior.gaussian.precision.ndim == 1:
        return ""
    corrected, q = shared.corrected(run.state), shared.gaussian(run.state)
    if corrected is None:
        center, sd, known = gaussian.mean(q), gaussian.standard_deviations(q), None
    else:
        center, sd = corrected.mean, np.sqrt(np.diag(corrected.covariance))
        known = corrected.points, corrected.weights
    patterns = mirrors.signs(models[0].layout)[: _MOST // len(models)]
    found = mirrors.unseen(lambda points: _log_posterior(models, points), center, sd, patterns, known)
    if found is None:
        return ""
    labels = [models[0].layout.labels[k] for k in found[0]]
    return (
        f"the posterior has several modes: with the sign of {' and '.join(labels[:4])} changed the density is about "
        f"{found[1]:.2g} of both, and what was found has none of it. Declare the model so that one is left: positive "
        "(pm.HalfNormal), or by a prior that rules the other out"
    )


def _log_posterior(models: Sequence[ClientModel], points: Array) -> Array:
    """log p(φ) Π_k p(y_k | φ) at points (T, m), up to a constant."""
    assert _LOCAL.log_factor is not None
    values = np.asarray(models[0].prior.log_density(points), dtype=float)
    for model in models:
        values = values + _LOCAL.log_factor(model, points, 0.0)
    return np.where(np.isnan(values), -np.inf, values)
