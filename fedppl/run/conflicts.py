"""Conflicts: of a client's data with the others', of all data with a prior, and of the posterior with one mode."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.stats import norm

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, ClientView, Posterior
from fedppl.contracts.algorithm import WithoutClient
from fedppl.local import integrate
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.model.stack import ClientsOf
from fedppl.model.summaries import tells_grid
from fedppl.numerics.prior import SharedPrior
from fedppl.numerics.streams import stream
from fedppl.results import idata
from fedppl.results.at_client import NO_DRAWS, outcomes
from fedppl.results.fit import Fit
from fedppl.results.records import require_arrived, require_single
from fedppl.results.shared import is_exact
from fedppl.run.progress import Run
from fedppl.settings import a_fit, chosen, whole
from fedppl.types import Array, DeclarationError, Layout, LocalFailure

logger = logging.getLogger(__name__)

FEWEST = 199  # replicates at least
_EXPAND = NestedLaplace().expand


def conflict(
    fit: Fit, clients: Sequence[str] | str | None = None, *, replicates: int = 199, random_seed: int | None = None
) -> xr.Dataset:
    r"""Test whether each client's data agree with the others' posterior.

    .. math:: T(y) = g^\top (I + I \Sigma I)^{-1} g, \qquad
              p = \frac{1 + \#\{r : T(y^{(r)}) \ge T(y)\}}{R + 1}

    with the cavity N(μ, Σ), which is q over the client's site, g = ∇ log f_k(μ), and I the mean of −∇² log f_k(μ) over
    replicates y^(r) ~ p(y | φ), φ ~ the others' posterior, for the client's inputs and number of rows. A score test:
    under the model p is uniform, up to its steps of 1 / (R + 1).

    Parameters
    ----------
    fit
        Fit by `EP`, `Sums` or another algorithm with a posterior without each client, with clients in this process; or
        at sites whose policies let p-values out (`conclusions`), which they sent when the run was over.
    clients
        Ids; by default all.
    replicates
        Number R of replicates, at least 199, and 199 at sites.
    random_seed
        Seed; by default the fit's, at sites always.

    Returns
    -------
    xarray.Dataset
        ``p_value``, ``statistic`` and ``exact``, dim client; NaN where the others' Gaussian is no posterior, where more
        than one in twenty replicates have no expansion, and for sites that sent none. φ of the replicates is of the
        others' posterior itself where ``exact`` is True, as in `Fit.influence`, else of its Gaussian.

    Raises
    ------
    DeclarationError
        If data are not here and sites sent nothing, outcomes cannot be drawn, or the algorithm has no such posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(4), fedppl.EP(), progressbar=False, random_seed=1)
    >>> fedppl.conflict(fit)["p_value"].dims
    ('client',)

    Notes
    -----
    *When this fails.* Of many clients some have a small p by chance: adjust for their number. Where others are few, the
    cavity is wide and the test has little power; where ``exact`` is False and their posterior far from Gaussian, p is
    too small, as of two clients with four rows each and an unknown noise sd. NaN under a prior that is not smooth, such
    as Laplace's, and for clients with a likelihood on a grid, which cannot be drawn from (an error where named).
    """
    a_fit(fit)
    replicates = whole("replicates", replicates, FEWEST)
    without = knows_cavities(fit.algorithm)
    if without is None:
        what = "has no posterior of the shared variables without each client"
        raise DeclarationError(f"{fit.algorithm.name} {what}; use fedppl.EP().")
    if not fit.clients:
        return _of_sites(fit, clients, replicates)
    names = chosen("clients", clients, list(fit.clients), "the clients whose data are here")
    if not fit.algorithm.needs.kernel:
        raise DeclarationError(f"{fit.algorithm.name} compiles no log density of a client; use fedppl.EP().")
    require_arrived(fit, "fedppl.conflict")
    seed = fit.seed if random_seed is None else whole("random_seed", random_seed, 0)
    values, exact = np.full((2, len(names)), np.nan), np.zeros(len(names), dtype=bool)
    silent = [name for name in names if clients is None and tells_grid(fit.clients[name].pymc_model())]
    for name in silent:
        logger.warning("client %s has no p-value: %s", name, NO_DRAWS)
    columns = [column for column, name in enumerate(names) if name not in silent]
    each = without(fit.state, [names[column] for column in columns], fit.clients)
    for column, others in zip(columns, each, strict=True):
        name = names[column]
        rng = stream((seed, 4, *name.encode()))
        values[:, column] = tested(fit.declaration, fit.clients[name], others, replicates, rng)
        exact[column] = is_exact(others)
    return _table(names, values, exact, replicates)


def knows_cavities(
    algorithm: AnyAlgorithm,
) -> Callable[[Any, Sequence[str], Mapping[str, ClientView]], list[WithoutClient]] | None:
    """The algorithm's function for its posterior without each of some clients, or None."""
    shared = algorithm.result.shared
    return shared.without if isinstance(shared, Posterior) else None


def _of_sites(fit: Fit, clients: Sequence[str] | str | None, replicates: int) -> xr.Dataset:
    names = chosen("clients", clients, list(fit.client_ids), "the clients that took part")
    require_single(fit, "fedppl.conflict")
    if replicates != FEWEST:
        raise DeclarationError(f"replicates={replicates}: sites have {FEWEST}, drawn when the run was over.")
    if not any("conflict" in fit.told.get(name, {}) for name in names):
        remedy = 'use fedppl.load(..., clients=...), or policies with conclusions=["conflict"]'
        raise DeclarationError(f"no client's data are here, and none sent a p-value; {remedy}.")
    pairs = [fit.told.get(name, {}).get("conflict", np.full(2, np.nan)) for name in names]
    return _table(names, np.transpose(pairs), np.zeros(len(names), dtype=bool), FEWEST)


def _table(names: Sequence[str], values: Array, exact: NDArray[np.bool_], replicates: int) -> xr.Dataset:
    columns = {"p_value": values[0], "statistic": values[1], "exact": exact}
    dims = dict.fromkeys(columns, ("client",))
    return idata.dataset(columns, dims, {"client": np.array(names)}, {"replicates": replicates})


def tested(
    declaration: FederatedModel, client: ClientModel, others: WithoutClient, replicates: int, rng: np.random.Generator
) -> tuple[float, float]:
    """P-value and statistic of one client; NaN where there is none."""
    cavity, points = others.gaussian, others.weighted
    if not gaussian.is_proper(cavity):
        return np.nan, np.nan
    center = gaussian.mean(cavity)
    if points is not None and is_exact(others):
        phi = points.points[rng.choice(len(points.points), size=replicates, p=points.weights)]
    else:
        phi = gaussian.draw(cavity, rng, replicates)
    values = client.constrain_shared(phi)
    drawn = outcomes(client, {name: values[name] for name in client.layout.slices}, rng)
    slopes = []
    for r in range(replicates):
        arrays = {**client.arrays, **{name: value[r] for name, value in drawn.items()}}
        if (slope := _slope(declaration.with_data(client, client.client_id, arrays), center)) is not None:
            slopes.append(slope)
    observed = _slope(client, center)
    if observed is None or len(slopes) < 0.95 * replicates:
        return np.nan, np.nan
    information = _positive(-np.mean([hessian for _, hessian in slopes], axis=0))
    covariance = information + information @ gaussian.covariance(cavity) @ information
    inverse = np.linalg.pinv((covariance + covariance.T) / 2, hermitian=True)
    statistics = np.array([gradient @ inverse @ gradient for gradient, _ in slopes])
    statistic = float(observed[0] @ inverse @ observed[0])
    near = np.isclose(statistics, statistic, rtol=1e-9, atol=0)
    above = np.sum((statistics > statistic) & ~near) + rng.integers(np.sum(near) + 1)  # ties in random order
    return (1.0 + float(above)) / (len(slopes) + 1.0), statistic


def _slope(client: ClientModel, center: Array) -> tuple[Array, Array] | None:
    assert _EXPAND is not None
    try:
        expansion: Any = _EXPAND(client, center, 0.0)
    except LocalFailure:
        return None
    return expansion.gradient, expansion.hessian


def _positive(matrix: Array) -> Array:
    """The nearest matrix that is positive semidefinite."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T)


# The prior of a shared variable and the data of all clients -----------------------------------------------------------

_FAR = 5.0  # sds of the posterior mean before data are seen
_MOST_COMPARED = 300  # clients that are expanded; of more side by side so many, spread over all
_NAMED = 3
_YIELDS = 0.5  # of the curvature in the prior's middle
_LEAST = 0.01  # of the same, in any direction
_GAINED = 1e-9  # of the prior's variance: below, slopes and means are not known well enough
_ROUNDING = 1e-12  # of the largest information of the data, in units of the prior
_TRIED = 5  # coordinates of which densities are compared
_STEPS = 4.0 ** -np.arange(9)  # of the way to the data's value of a coordinate


class Likelihood(NamedTuple):
    """Log density of all clients' data given φ, with their own variables integrated."""

    log_density: Callable[[Array], Array]  # at points (S, m), (S,); −inf where a client has no value
    slopes: Callable[[Array], tuple[Array, Array]]  # gradient (m,) and Hessian (m, m) at a point


class _Slopes(NamedTuple):
    """First and second derivatives of a log density at a point; the second with its sign turned."""

    gradient: Array  # (m,)
    information: Array  # (m, m)


def posterior_of_all(run: Run) -> Posterior[Any] | None:
    """The posterior of an algorithm that approximates the declared model's, as those with an evidence do."""
    shared = run.algorithm.result.shared
    if not isinstance(shared, Posterior) or not run.algorithm.needs.kernel:
        return None
    return None if shared.evidence is Posterior._field_defaults["evidence"] else shared


def prior_conflict(run: Run) -> str:
    """Name the coordinates whose prior the data of a run contradict; empty where there are none, or no test."""
    shared, models = posterior_of_all(run), run.models
    if shared is None or not models:
        return ""
    if len(models) > _MOST_COMPARED and not isinstance(models, ClientsOf):
        return ""
    step = -(-len(models) // _MOST_COMPARED)
    compared = {name: models[name] for name in list(models)[::step]}
    stacks, client = integrate.stacks(compared), next(iter(compared.values()))
    likelihood = Likelihood(
        functools.partial(integrate.log_density, stacks), functools.partial(integrate.slopes, stacks)
    )
    sentence = contradicted(client.prior, likelihood, client.layout.labels, gaussian.mean(shared.gaussian(run.state)))
    if not sentence:
        return ""
    advice = getattr(client.declared.builder, "advice", "") or "look at units, or declare a wider prior"
    logger.warning(sentence := f"{sentence}; {advice}")
    return sentence


def contradicted(prior: SharedPrior, likelihood: Likelihood, labels: Sequence[str], center: Array) -> str:
    r"""Name the coordinates whose prior clients' data contradict, near the posterior mean μ (m,), by a score test.

    .. math:: \mu - \mu_0 \sim N(0, \Sigma_0 - \Sigma), \qquad \Sigma_0 - \Sigma = \Sigma_0 I \Sigma

    for the prior N(μ₀, Σ₀) and a likelihood of information I, before data are seen. Σ₀ is the inverse of the declared
    prior's own curvature at μ. Where this is much less than in its middle, as in the tails of a Cauchy or a scale near
    0, the prior yields, and is left out. So is a variable whose prior depends on other shared variables.
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
    # A hierarchy's sd and its variables may yield together where each alone does not.
    holds &= np.diag(np.linalg.inv(bounded)) < np.diag(np.linalg.inv(scale)) / _YIELDS
    declared = declared._replace(information=bounded)
    sds = np.where(holds, deviations(declared, data), 0.0)
    far = np.flatnonzero(np.abs(sds) > _FAR)
    sds[[i for i in far if not _is_independent(prior, center, int(i))]] = 0.0
    return _sentence(_by_densities(likelihood, center, declared, data, sds), labels, declared, center)


def deviations(prior: _Slopes, data: _Slopes) -> Array:
    """(μ − μ₀)ᵢ in its sds before data are seen, (m,); 0 where the data have no information on the coordinate."""
    spread = np.linalg.inv(prior.information)
    posterior = np.linalg.inv(prior.information + data.information)
    gained = spread @ data.information @ posterior  # Σ₀ − Σ, without a difference of nearly equal numbers
    shift = posterior @ data.gradient - gained @ prior.gradient
    relative = np.diag(data.information) * np.diag(spread)  # information in units of the prior
    informed = (np.diag(gained) > _GAINED * np.diag(spread)) & (relative > _ROUNDING * np.max(relative))
    return np.where(informed, shift / np.sqrt(np.where(informed, np.diag(gained), 1.0)), 0.0)


def _by_densities(likelihood: Likelihood, center: Array, prior: _Slopes, data: _Slopes, sds: Array) -> Array:
    r"""Deviations held to at most √2T sds, with T from densities; 0 for those that are not far.

    Slopes alone exaggerate where a likelihood has little curvature or the other sign, as that of a scale of few rows.
    T is the loss of coordinate i's prior at μ, plus the gain of the posterior without that prior along the line on
    which others follow i; of normal densities √2T is the deviation itself.
    """
    far = [int(i) for i in np.argsort(-np.abs(sds), kind="stable") if abs(sds[i]) > _FAR][:_TRIED]
    bounded = np.zeros_like(sds)
    if not far:
        return bounded
    spread = np.linalg.inv(prior.information)
    posterior = np.linalg.inv(prior.information + data.information)
    gained = np.diag(spread @ data.information @ posterior)
    from_mean = -spread @ prior.gradient
    points, others = [center], [0.0]
    for i in far:
        line = posterior[i] / posterior[i, i]
        for t in sds[i] / np.sqrt(gained[i]) * posterior[i, i] * _STEPS:
            ratio = t * (prior.gradient @ line) - t**2 / 2 * (line @ prior.information @ line)
            points.append(center + t * line)
            others.append(float(ratio + (from_mean[i] + t) ** 2 / (2 * spread[i, i])))
    values = likelihood.log_density(np.array(points))
    if np.isfinite(values[0]):
        lost = (values - values[0] + others)[1:].reshape(len(far), -1).max(axis=1)
        bounded[far] = np.sign(sds[far]) * np.minimum(np.abs(sds[far]), np.sqrt(2 * np.maximum(lost, 0.0)))
    return bounded


def _is_independent(prior: SharedPrior, center: Array, i: int) -> bool:
    """Whether coordinate i's prior is independent of the others, unlike that of a hierarchy."""
    sd, here = gaussian.standard_deviations(prior.gaussian), _gradient(prior, center)[i]
    for sign in (1.0, -1.0):
        moved = center + sign * sd
        moved[i] = center[i]
        if not np.isclose(_gradient(prior, moved)[i], here, rtol=1e-6, atol=1e-6 / sd[i]):
            return False
    return True


def _gradient(prior: SharedPrior, phi: Array) -> Array:
    """Slopes of the declared prior, not of the Gaussian that the server starts from."""
    start = prior.gaussian
    return np.asarray(start.linear - start.precision @ phi + prior.log_ratio_gradient(phi))


def _of_data(likelihood: Likelihood, center: Array) -> _Slopes | None:
    """Slopes of the likelihood; None where a client has no expansion."""
    with np.errstate(invalid="ignore"):
        gradient, hessian = likelihood.slopes(center)
    if not np.all(np.isfinite(hessian)) or not np.all(np.isfinite(gradient)):
        return None
    return _Slopes(gradient, _positive(-hessian))


def _bounded(information: Array, scale: Array) -> Array:
    """Information with a hundredth of `scale` or more in every direction."""
    root = np.linalg.cholesky(scale)
    back = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(back @ information @ back.T)
    half = root @ vectors
    return np.asarray((half * np.maximum(values, _LEAST)) @ half.T)


def _sentence(sds: Array, labels: Sequence[str], prior: _Slopes, center: Array) -> str:
    worst = [int(i) for i in np.argsort(-np.abs(sds), kind="stable") if abs(sds[i]) > _FAR]
    if not worst:
        return ""
    spread = np.linalg.inv(prior.information)
    sd = np.sqrt(np.diag(spread))
    mean = center + spread @ prior.gradient
    mean = np.where(np.abs(mean) < 1e-6 * sd, 0.0, mean)
    named = ", ".join(
        f"{labels[i]} ({sds[i]:+.2g} sds from its prior, about {mean[i]:.2g} ± {sd[i]:.2g})" for i in worst[:_NAMED]
    )
    more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
    return f"data contradict the prior of {named}{more}: where it holds a variable back, others make up for that"


# Another mode: a mirror image of the posterior ------------------------------------------------------------------------

_MOST_DENSITIES = 20_000  # of clients, at mirror images


def mirror_image(run: Run) -> str:
    """Name the coordinates along which there is another mode; empty where there is none, or no check."""
    shared = posterior_of_all(run)
    if shared is None or not 0 < len(run.models) <= _MOST_DENSITIES:
        return ""
    client = next(iter(run.models.values()))
    if client.prior.gaussian.precision.ndim == 1:
        return ""
    exact, q = shared.weighted(run.state), shared.gaussian(run.state)
    if exact is None:
        center, sd, weighted = gaussian.mean(q), gaussian.standard_deviations(q), None
    else:
        center, sd = exact.mean, np.sqrt(np.diag(exact.covariance))
        weighted = exact.points, exact.weights
    patterns = signs(client.layout)[: _MOST_DENSITIES // len(run.models)]
    stacks, prior = integrate.stacks(run.models), client.prior

    def log_posterior(points: Array) -> Array:
        values = np.asarray(prior.log_density(points), dtype=float) + integrate.log_density(stacks, points)
        return np.where(np.isnan(values), -np.inf, values)

    image = unseen_image(log_posterior, center, sd, patterns, weighted)
    if image is None:
        return ""
    labels = [client.layout.labels[k] for k in image[0]]
    return (
        f"the posterior has several modes: with the sign of {' and '.join(labels[:4])} changed the density is about "
        f"{image[1]:.2g} of both, and this fit has none of it. Declare the model so that one is left: positive "
        "(pm.HalfNormal), or by a prior that rules the other out"
    )


# Mirror images of a posterior: its density where signs of coordinates are turned ------------------------------------

_MATTERS = 1e-3  # share of the image in the sum of both densities from which it is reported
_APART = 3.0  # posterior sds between an image and the mode
_KNOWN = 0.1  # part of the image's share that the posterior found has on the image's side, where it is known already
_DIP = 1.0  # nats by which a density falls between two modes
_BETWEEN = np.array([0.25, 0.5, 0.75])  # of the way
_MOST = 60  # images


def signs(layout: Layout) -> Array:
    """Patterns (F, m) of ±1: of each unbounded variable, of each entry of one, and of two variables; at most 60.

    >>> from fedppl import gaussian
    >>> from fedppl.types import Layout, Variable
    >>> variables = Variable("a", (2,), "", None), Variable("sd", (), "log__", None), Variable("c", (), "", None)
    >>> signs(Layout(variables, gaussian.from_moments(np.zeros(4), np.eye(4)), True, "")).astype(int).tolist()
    [[-1, -1, 1, 1], [1, 1, 1, -1], [-1, 1, 1, 1], [1, -1, 1, 1], [-1, -1, 1, -1]]
    """
    places = np.arange(layout.size)
    parts = [places[layout.slices[v.name]] for v in layout.variables if not v.transform and not v.binary]
    pairs = [np.concatenate(pair) for pair in itertools.combinations(parts, 2)]
    entries = [part[k : k + 1] for part in parts if len(part) > 1 for k in range(len(part))]
    changed = [*parts, *entries, *pairs][:_MOST]
    patterns = np.ones((len(changed), layout.size))
    for pattern, part in zip(patterns, changed, strict=True):
        pattern[part] = -1.0
    return patterns


def unseen_image(
    log_density: Callable[[Array], Array],
    center: Array,
    sd: Array,
    patterns: Array,
    known: tuple[Array, Array] | None = None,
) -> tuple[list[int], float] | None:
    r"""Coordinates whose change of sign leads to another mode, and the share of the density there, or None.

    With :math:`\Delta = \log p(x') - \log p(x)` at the image x' of the mean x, the share is
    :math:`1 / (1 + e^{-\Delta})`. An image counts where its share is at least 1e-3, the density falls by a nat in
    between, and the posterior found, with points (S, m) and weights `known` where it is no Gaussian, has less than a
    tenth of the share on the image's side.

    >>> two = lambda x: np.logaddexp(-0.5 * ((x[:, 0] - 3) / 0.2) ** 2, -0.5 * ((x[:, 0] + 3) / 0.2) ** 2)
    >>> unseen_image(two, np.array([3.0]), np.array([0.2]), np.array([[-1.0]]))
    ([0], 0.5)
    """
    patterns = patterns[np.max(np.abs(center - patterns * center) / sd, axis=1, initial=0.0) > _APART]
    if not len(patterns):
        return None
    values = np.asarray(log_density(np.vstack([center, patterns * center])))
    if not np.isfinite(values[0]):
        return None
    above = np.where(np.isfinite(values[1:]), values[1:] - values[0], -np.inf)
    share = 1.0 / (1.0 + np.exp(np.clip(-above, -50.0, 700.0)))
    for k in np.argsort(-share, kind="stable").tolist():
        if share[k] <= _MATTERS:
            return None
        image = patterns[k] * center
        if _mass_beside(image, center, sd, known) >= _KNOWN * share[k]:
            continue
        way = np.asarray(log_density(center + _BETWEEN[:, None] * (image - center)))
        if np.min(way[np.isfinite(way)], initial=np.inf) < min(values[0], values[1 + k]) - _DIP:
            return np.flatnonzero(patterns[k] < 0).tolist(), float(share[k])
    return None


def _mass_beside(image: Array, center: Array, sd: Array, known: tuple[Array, Array] | None) -> float:
    """Mass of the posterior found that is nearer to the image than to the mean, in units of its sds."""
    if known is None:
        return float(norm.sf(np.max(np.abs(image - center) / sd) / 2))
    points, weights = known
    nearer = ((points - (image + center) / 2) / sd) @ ((image - center) / sd) > 0
    return float(np.sum(weights[nearer]))
