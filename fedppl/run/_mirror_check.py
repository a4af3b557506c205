"""Whether a posterior has another mode where signs of shared coordinates change, which no search came to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Posterior
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.model.client import ClientModel
from fedppl.numerics import mirrors
from fedppl.run._run import Run
from fedppl.types import Array, LocalFailure

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
    q, patterns = shared.gaussian(run.state), mirrors.signs(models[0].layout)
    try:
        found = mirrors.unseen(
            lambda points: _log_posterior(models, points),
            gaussian.mean(q),
            gaussian.standard_deviations(q),
            patterns[: _MOST // len(models)],
        )
    except LocalFailure:
        return ""
    return told(models[0].layout.labels, found) if found is not None else ""


def told(labels: Sequence[str], found: tuple[int, float]) -> str:
    """What is said of another mode."""
    label, share = labels[found[0]], found[1]
    return (
        f"the posterior has several modes: with the sign of {label} changed the density is about {share:.2g} of both, "
        "and q is of the first alone. Declare the model so that one is left: positive (pm.HalfNormal), or by a prior "
        "that rules the other out"
    )


def _log_posterior(models: Sequence[ClientModel], points: Array) -> Array:
    """log p(φ) Π_k p(y_k | φ) at points (T, m), up to a constant."""
    assert _LOCAL.log_factor is not None
    values = np.asarray(models[0].prior.log_density(points), dtype=float)
    for model in models:
        values = values + _LOCAL.log_factor(model, points, 0.0)
    return np.where(np.isnan(values), -np.inf, values)
