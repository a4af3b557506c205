"""Whether the prior of a shared variable and the data of all clients contradict each other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Posterior
from fedppl.local import integrate
from fedppl.model.stack import ClientsOf
from fedppl.numerics.prior import SharedPrior
from fedppl.run.start import Run
from fedppl.types import Array

logger = logging.getLogger(__name__)

_FAR = 5.0  # sds of what the prior lets the data do
_MOST_CLIENTS = 300  # an expansion of each is taken; of more that lie side by side so many, spread over all
_NAMED = 3
_YIELDS = 0.5  # of the curvature in the prior's middle
_LEAST = 0.01  # of the same, in any direction
_TOLD = 1e-9  # of the prior's variance: of less, slopes and means are not known well enough
_ROUNDING = 1e-12  # of what the data tell of the coordinate that they tell most of
_TRIED = 5  # coordinates that are looked at again
_STEPS = 4.0 ** -np.arange(9)  # of the way to where the data want a coordinate


class Likelihood(NamedTuple):
    """Log density of all clients' data given φ, with their own variables integrated."""

    log_density: Callable[[Array], Array]  # at points (S, m), (S,); −inf where a client has no value
    slopes: Callable[[Array], tuple[Array, Array]]  # gradient (m,) and Hessian (m, m) at a point


class _Slopes(NamedTuple):
    """First and second derivatives of a log density at a point; the second with its sign turned."""

    gradient: Array  # (m,)
    information: Array  # (m, m)


def posterior_of_all(run: Run) -> Posterior[Any] | None:
    """The posterior of an algorithm that has that of the declared model: those give its evidence, others do not."""
    shared = run.algorithm.result.shared
    if not isinstance(shared, Posterior) or not run.algorithm.needs.kernel:
        return None
    return None if shared.evidence is Posterior._field_defaults["evidence"] else shared


def prior_conflict(run: Run) -> str:
    """Name the coordinates whose prior the data of a run contradict; empty where none is, or none can be told."""
    shared, models = posterior_of_all(run), run.models
    if shared is None or not models:
        return ""
    if len(models) > _MOST_CLIENTS and not isinstance(models, ClientsOf):
        return ""
    step = -(-len(models) // _MOST_CLIENTS)
    asked = {name: models[name] for name in list(models)[::step]}
    stacks, one = integrate.stacks(asked), next(iter(asked.values()))
    likelihood = Likelihood(
        functools.partial(integrate.log_density, stacks), functools.partial(integrate.slopes, stacks)
    )
    said = contradicted(one.prior, likelihood, one.layout.labels, gaussian.mean(shared.gaussian(run.state)))
    if not said:
        return ""
    advice = getattr(one.declared.builder, "advice", "") or "look at units, or declare a wider prior"
    logger.warning(said := f"{said}; {advice}")
    return said


def contradicted(prior: SharedPrior, likelihood: Likelihood, labels: Sequence[str], center: Array) -> str:
    r"""Name the coordinates whose prior clients' data contradict, near the posterior mean μ (m,).

    With the prior N(μ₀, Σ₀) and a likelihood of information I, the posterior mean is itself random before data are
    seen, and a score test of the prior needs no more than slopes at μ:

    .. math:: \mu - \mu_0 \sim N(0, \Sigma_0 - \Sigma), \qquad \Sigma_0 - \Sigma = \Sigma_0 I \Sigma

    It does not depend on how far μ moves, so that a prior that is far too narrow stands out, too. Σ₀ is that of the
    declared prior's own curvature at μ; where this is much less than in its middle, as in the tails of a Cauchy or a
    scale near 0, the prior yields, and is left out. So is a variable whose prior depends on other shared variables,
    and so are clients at sites of their own, whose slopes are theirs.
    """
    if prior.gaussian.precision.ndim == 1:  # of too many coordinates for a matrix
        return ""
    declared = _Slopes(_gradient(prior, center), prior.gaussian.precision - prior.log_ratio_hessian(center))
    data = _of_data(likelihood, center)
    if data is None or not np.all(np.isfinite(declared.information)):
        return ""
    scale = prior.gaussian.precision
    bounded = _bounded(declared.information, scale)
    holds = np.diag(declared.information) > _YIELDS * np.diag(scale)
    # A hierarchy's sd and what it is of may yield together where each alone does not.
    holds &= np.diag(np.linalg.inv(bounded)) < np.diag(np.linalg.inv(scale)) / _YIELDS
    declared = declared._replace(information=bounded)
    found = np.where(holds, deviations(declared, data), 0.0)
    far = np.flatnonzero(np.abs(found) > _FAR)
    found[[i for i in far if not _stands_alone(prior, center, int(i))]] = 0.0
    found = _held(likelihood, center, declared, data, found)
    return _said(found, labels, declared, center)


def deviations(prior: _Slopes, data: _Slopes) -> Array:
    """(μ − μ₀)ᵢ in sds of what it is before data are seen, (m,); 0 where the data tell nothing of the coordinate."""
    spread = np.linalg.inv(prior.information)
    posterior = np.linalg.inv(prior.information + data.information)
    gained = spread @ data.information @ posterior  # Σ₀ − Σ, without a difference of nearly equal numbers
    shift = posterior @ data.gradient - gained @ prior.gradient
    told = np.diag(data.information) * np.diag(spread)  # in units of the prior
    known = (np.diag(gained) > _TOLD * np.diag(spread)) & (told > _ROUNDING * np.max(told))
    return np.where(known, shift / np.sqrt(np.where(known, np.diag(gained), 1.0)), 0.0)


def _held(likelihood: Likelihood, center: Array, prior: _Slopes, data: _Slopes, found: Array) -> Array:
    r"""At most √2T sds for those far off, with what densities themselves lose by coordinate i's prior; 0 for others.

    Slopes alone say too much where a likelihood bends little or the other way, as that of a scale of few rows does.
    T is what the prior has lost at μ, and what the posterior without it gains from there on the line along which
    others follow i; of normal densities √2T is the deviation itself.
    """
    far = [int(i) for i in np.argsort(-np.abs(found), kind="stable") if abs(found[i]) > _FAR][:_TRIED]
    kept = np.zeros_like(found)
    if not far:
        return kept
    spread = np.linalg.inv(prior.information)
    posterior = np.linalg.inv(prior.information + data.information)
    gained = np.diag(spread @ data.information @ posterior)
    from_mean = -spread @ prior.gradient
    points, others = [center], [0.0]
    for i in far:
        line = posterior[i] / posterior[i, i]
        for t in found[i] / np.sqrt(gained[i]) * posterior[i, i] * _STEPS:
            ratio = t * (prior.gradient @ line) - t**2 / 2 * (line @ prior.information @ line)
            points.append(center + t * line)
            others.append(float(ratio + (from_mean[i] + t) ** 2 / (2 * spread[i, i])))
    values = likelihood.log_density(np.array(points))
    if np.isfinite(values[0]):
        lost = (values - values[0] + others)[1:].reshape(len(far), -1).max(axis=1)
        kept[far] = np.sign(found[far]) * np.minimum(np.abs(found[far]), np.sqrt(2 * np.maximum(lost, 0.0)))
    return kept


def _stands_alone(prior: SharedPrior, center: Array, i: int) -> bool:
    """Whether coordinate i's prior is the same wherever the others are: that of a hierarchy yields with its sd."""
    sd, here = gaussian.standard_deviations(prior.gaussian), _gradient(prior, center)[i]
    for sign in (1.0, -1.0):
        moved = center + sign * sd
        moved[i] = center[i]
        if not np.isclose(_gradient(prior, moved)[i], here, rtol=1e-6, atol=1e-6 / sd[i]):
            return False
    return True


def _gradient(prior: SharedPrior, phi: Array) -> Array:
    """Slopes of the declared prior, and not of the Gaussian that the server starts from."""
    start = prior.gaussian
    return np.asarray(start.linear - start.precision @ phi + prior.log_ratio_gradient(phi))


def _of_data(likelihood: Likelihood, center: Array) -> _Slopes | None:
    """None where a client has no expansion."""
    with np.errstate(invalid="ignore"):
        gradient, hessian = likelihood.slopes(center)
    if not np.all(np.isfinite(hessian)) or not np.all(np.isfinite(gradient)):
        return None
    values, vectors = np.linalg.eigh(-(hessian + hessian.T) / 2)
    return _Slopes(gradient, (vectors * np.maximum(values, 0.0)) @ vectors.T)


def _bounded(information: Array, scale: Array) -> Array:
    """With no direction in which it is less than a hundredth of `scale`."""
    root = np.linalg.cholesky(scale)
    back = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(back @ information @ back.T)
    half = root @ vectors
    return np.asarray((half * np.maximum(values, _LEAST)) @ half.T)


def _said(found: Array, labels: Sequence[str], prior: _Slopes, center: Array) -> str:
    worst = [int(i) for i in np.argsort(-np.abs(found), kind="stable") if abs(found[i]) > _FAR]
    if not worst:
        return ""
    spread = np.linalg.inv(prior.information)
    sd = np.sqrt(np.diag(spread))
    mean = center + spread @ prior.gradient
    mean = np.where(np.abs(mean) < 1e-6 * sd, 0.0, mean)
    named = ", ".join(
        f"{labels[i]} ({found[i]:+.2g} sds from its prior, about {mean[i]:.2g} ± {sd[i]:.2g})" for i in worst[:_NAMED]
    )
    more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
    return f"data contradict the prior of {named}{more}: where it holds a variable back, others make up for that"
