r"""The posterior without one client, from weighted points of that of all and the client's own log f_k there.

.. math:: p(\varphi \mid y_{-k}) \propto \frac{p(\varphi \mid y)}{f_k(\varphi)}, \qquad
          p(y_k \mid y_{-k}) = 1 \Big/ \mathrm E\left[\frac{1}{f_k(\varphi)} \Bigm| y\right]

f_k is without a share of the prior, whatever the prior is: that belongs to the posterior of the others, all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientView, Factor, LogEvidence
from fedppl.contracts.algorithm import WithoutClient
from fedppl.contracts.client import FactorFn
from fedppl.gaussian import Gaussian
from fedppl.numerics import student
from fedppl.numerics.importance import effective_size, normalise, quadratic_terms
from fedppl.numerics.proposals import has_heavy_tails, whitened
from fedppl.numerics.reweighting import Reweighted, is_trusted, second_k, weigh
from fedppl.types import Array, DeclarationError, LocalFailure

logger = logging.getLogger(__name__)

_LOST = 0.01  # share of the posterior of all that may lie where the client has no value
_FLATTENED = (1.0, 0.5, 0.25)  # powers of the weights with which a site is fitted, until enough points count
_UNKNOWN = LogEvidence(np.nan, np.nan)


class Of(NamedTuple):
    """What is known of a posterior of all: weighted points where there are any, and its Gaussian."""

    q: Gaussian
    found: Reweighted | None
    points: Array  # (S, m) at which clients are asked
    scaled: Array  # (S, m) the same, where a logarithm has a long left tail in what it is the logarithm of


def without(
    of: Of, client_ids: Sequence[str], clients: Mapping[str, ClientView], factor: FactorFn
) -> list[WithoutClient]:
    """The posterior without each of some clients, of whose models in this process `factor` makes log f_k at points.

    Where there are weighted points, their weights are those of all clients' values, exact in the tails too.
    """
    if absent := sorted(set(client_ids) - set(clients)):
        raise DeclarationError(
            f"the posterior without clients {absent[:5]} is computed from their data, since sums keep nothing of "
            "single clients, and these are not here. Of a fit from a file, give them: fedppl.load(path, model, "
            "clients=...). Where clients are sites of their own, use fedppl.EP(), which keeps a site of each."
        )
    center = gaussian.mean(of.q)
    return [_without_one(of, clients[name], _factor(clients[name], of.points, center, factor)) for name in client_ids]


def _without_one(of: Of, client: ClientView, values: Factor) -> WithoutClient:
    q, found, points, scaled = of
    nothing = WithoutClient(gaussian.quotient(q, q), None, _UNKNOWN)
    if not gaussian.is_proper(q):
        return nothing
    weights = np.full(len(points), 1.0 / len(points)) if found is None else found.weights
    told = np.isfinite(values.values)
    if weights @ told < 1.0 - _LOST:
        return nothing
    cavity = gaussian.quotient(q, _site(q, points[told], weights[told], values.values[told]))
    if found is None:
        return WithoutClient(cavity, None, _UNKNOWN)
    base = cavity if gaussian.is_proper(cavity) else q
    log_weights = _log(weights) - np.where(told, values.values, np.inf)  # no weight where there is no value
    of_base = _log(found.of_q) + gaussian.log_density(base, points) - gaussian.log_density(q, points)
    of_base = np.where(told, of_base, -np.inf)
    left = weigh(base, points, found.scramble, log_weights, of_base, int(told.sum()))
    if left is not None and left.second_k > -np.inf:
        # moments have to be known of scales that are shown, not of tails of their logarithms
        left = left._replace(second_k=second_k(left.weights, scaled, left.weights))
    # Where that of all has no heavy tail, no points were asked for in one.
    if left is None or (has_heavy_tails(points, left.weights) and not has_heavy_tails(points, weights)):
        return WithoutClient(cavity, None, _UNKNOWN)
    if not gaussian.is_proper(cavity) and is_trusted(left):
        cavity = gaussian.from_moments(left.mean, left.covariance)
    if not client.has_proper_prior:
        return WithoutClient(cavity, left, _UNKNOWN)
    # Densities integrate to one, and so do the weights of q and of its quotient, but for an error of the same points.
    ratios = (log_weights, of_base, _log(weights), _log(found.of_q))
    by_chance = _spread(ratios, found.scramble)
    errors = np.where(told, values.errors, 0.0)
    unknown = (left.weights @ errors) ** 2 + left.weights @ errors**2
    unknown += values.constant.alike**2 + values.constant.by_chance**2
    return WithoutClient(cavity, left, LogEvidence(-left.log_ratio, float(np.sqrt(by_chance**2 + unknown))))


def _factor(client: ClientView, points: Array, center: Array, factor: FactorFn) -> Factor:
    try:
        return factor(client, points, center, 0.0)
    except LocalFailure as error:
        logger.warning("nothing is known of the posterior without client %s: %s", client.client_id, error)
        return Factor(np.full(len(points), np.nan), np.zeros(len(points)))


def _site(q: Gaussian, points: Array, weights: Array, values: Array) -> Gaussian:
    """The quadratic in φ that is nearest to log f_k under the weights, as EP's site is nearly."""
    center, root = gaussian.affine(q)
    m = len(center)
    z = whitened(points, center, root)
    design = quadratic_terms(z)
    flat = (normalise(power * _log(weights)) for power in _FLATTENED)
    counted = next((one for one in flat if effective_size(one) >= 2 * design.shape[1]), weights)
    scale = np.sqrt(counted)
    terms = np.linalg.lstsq(design * scale[:, None], (values - counted @ values) * scale)[0]
    curved = np.zeros((m, m))
    curved[np.triu_indices(m)] = terms[1 + m :]
    inverse = np.linalg.inv(root)
    precision = -inverse.T @ (curved + curved.T) @ inverse
    return Gaussian(inverse.T @ terms[1 : 1 + m] + precision @ center, precision)


def _spread(logs: tuple[Array, Array, Array, Array], scramble: NDArray[np.intp]) -> float:
    """Standard error of the log of the first two sums' ratio over that of the last two, by leaving scrambles out."""
    found = []
    for left_out in range(student.SCRAMBLES):
        above, beside, below, control = (np.logaddexp.reduce(one[scramble != left_out]) for one in logs)
        found.append(above - beside - (below - control))
    return float(np.sqrt(student.SCRAMBLES - 1.0) * np.std(found))


def _log(weights: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(weights))
