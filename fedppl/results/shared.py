"""The posterior of the shared parameters: draws, one point, weighted points, and without each client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.stats import qmc

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, Draws, Point, Posterior, Sampler, coordinate_names
from fedppl.contracts.algorithm import WithoutClient
from fedppl.gaussian import Gaussian
from fedppl.numerics.importance import jackknife, resample
from fedppl.numerics.proposals import Reweighted, is_trusted
from fedppl.numerics.streams import standard_normal, stream
from fedppl.numerics.tolerances import MOST_SECOND_K, SCRAMBLES
from fedppl.results import idata
from fedppl.results.records import Ended, require_arrived, require_shared, require_single, rounds_dataset, unarrived
from fedppl.settings import chosen, shown, some_of, whole
from fedppl.types import Array, DeclarationError, Status

logger = logging.getLogger(__name__)

# Attributes of the posterior group, for users of tools that were made for MCMC.
_SAMPLING = "independent draws of the approximation: r_hat and ess do not describe how good it is; see fit.summary()"
_WEIGHTED = "draws with repetition of weighted points of the posterior: ess is of the weights; r_hat says nothing"


Drawing = tuple[int, int, int]  # numbers of draws and of chains, and the seed


def drawing_of(fit: Ended, draws: int, chains: int, random_seed: int | None) -> Drawing:
    """The keywords of draws, checked; the seed is the fit's where none is given."""
    seed = fit.seed if random_seed is None else whole("random_seed", random_seed, 0)
    return whole("draws", draws, most=10**7), whole("chains", chains, most=10**4), seed


def shared(
    fit: Ended, *, unconverged: bool = False, draws: int = 1000, chains: int = 4, random_seed: int | None = None
) -> Any:
    """Posterior of the shared parameters as an ArviZ object.

    Parameters
    ----------
    unconverged
        Whether to draw also where the fit was broken off before it had a posterior: draws can be very far off.
    draws, chains, random_seed
        Independent draws of q(φ), by default by the fit's seed; in one chain (R̂ NaN) if the fit has not converged.

    Returns
    -------
    arviz.InferenceData or xarray.DataTree
        Groups ``posterior`` (constrained space), or ``point_estimate`` where the algorithm ends in one; ``fit``
        (mean_vector and covariance_matrix of q on the unconstrained space, and other diagnostics) and ``rounds``. A
        fit that was broken off before there was a posterior has none, unless `unconverged` is True.
    """
    draws, chains, seed = drawing_of(fit, draws, chains, random_seed)
    reason, rounds = unarrived(fit), rounds_dataset(fit.records, fit.client_ids)
    if reason and not unconverged:
        return idata.from_groups({"rounds": rounds, "fit": _fit_dataset(fit, None)})
    result = fit.algorithm.result.shared
    q = result.gaussian(fit.state) if isinstance(result, Posterior) else None
    if q is not None and not gaussian.is_proper(q):
        q, smallest = gaussian.repair(q, 1e-6)
        reason += f" and was repaired (smallest eigenvalue {smallest:.3g})"
    attrs: dict[str, Any] = {"status": fit.status.value, "message": fit.message}
    attrs |= {"algorithm": fit.algorithm.name, "converged": int(fit.status.ok)}
    attrs |= {"warning": f"not a posterior: {reason}"} if reason else {}
    rng, phi, groups = stream((seed, 1)), None, {}
    weighted = None if reason else weighted_of(fit)
    if isinstance(result, Sampler):
        drawn = result.draw(fit.state, draws * chains, rng)
        phi = shaped(fit.algorithm.name, "Sampler.draw", drawn, (draws * chains, fit.layout.size))
    elif weighted is not None:
        phi = weighted.points[resample(weighted.weights, draws * chains, rng)]
        attrs |= {"ess": weighted.ess, "pareto_k": weighted.pareto_k, "unique": len(np.unique(phi, axis=0))}
        attrs["sampling"] = _WEIGHTED
    elif q is not None:
        phi = gaussian.draw(q, rng, draws * chains)
    if phi is not None:
        chains, draws = shape_of(fit.algorithm, fit.status, chains, draws)
        values = {k: v.reshape(chains, draws, *v.shape[1:]) for k, v in fit.reader.constrain(phi).items()}
        attrs = {"sampling": _SAMPLING} | attrs
        posterior = idata.posterior_dataset(values, fit.reader.dims, fit.reader.coords, attrs)
        groups = {"posterior": idata.mark_estimates(posterior, point_estimates(fit))}
    elif isinstance(result, Point):
        point = idata.dataset(_at_point(fit, result), fit.reader.dims, fit.reader.coords, attrs)
        groups = {"point_estimate": point}
    return idata.from_groups({**groups, "rounds": rounds, "fit": _fit_dataset(fit, q)})


def shape_of(algorithm: AnyAlgorithm, status: Status, chains: int, draws: int) -> tuple[int, int]:
    """Chains and draws: one chain, with R̂ NaN, where the fit has not converged; independent draws would agree."""
    return (chains, draws) if status.ok or not algorithm.result.tests_convergence else (1, chains * draws)


def point_estimates(fit: Ended) -> list[str]:
    """Shared variables that are point estimates where the others have draws."""
    shared = fit.algorithm.result.shared
    if not isinstance(shared, Sampler) or shared.estimates is None:
        return []
    is_point = np.asarray(shared.estimates(fit.state), dtype=bool)
    return [name for name, places in fit.layout.slices.items() if is_point[places].size and is_point[places].all()]


def weighted_of(fit: Ended) -> Reweighted | None:
    """The weighted points of the posterior, where there are any that can be trusted."""
    shared = fit.algorithm.result.shared
    return shared.weighted(fit.state) if isinstance(shared, Posterior) else None


def estimates(fit: Ended, probabilities: Array) -> dict[str, Estimates] | None:
    """Estimates of every entry of every shared variable, from weighted points; None where there are none."""
    if (weighted := weighted_points(fit)) is None:
        return None
    values = {name: np.asarray(value, dtype=float) for name, value in fit.reader.constrain(weighted.points).items()}
    return {name: _estimates(value.reshape(len(value), -1), weighted, probabilities) for name, value in values.items()}


def estimate(fit: Any) -> dict[str, Array]:
    """The shared variables and their deterministics at one point: the estimate, or the posterior mean."""
    result = fit.algorithm.result.shared
    require_shared(fit)
    require_arrived(fit, "fit.estimate")
    if isinstance(result, Point):
        return _at_point(fit, result)
    posterior = fit.idata["posterior"].data_vars.items()
    means = {str(name): values.mean(("chain", "draw")).values for name, values in posterior}
    by_name = estimates(fit, np.zeros(0))  # by draws where there are no weighted points
    return means if by_name is None else {k: by_name[k].mean.reshape(mean.shape) for k, mean in means.items()}


def _at_point(fit: Ended, shared: Point[Any]) -> dict[str, Array]:
    return {name: value[0] for name, value in fit.reader.constrain(_point(fit, shared)[None]).items()}


def _point(fit: Ended, shared: Point[Any]) -> Array:
    return shaped(fit.algorithm.name, "Point.estimate", shared.estimate(fit.state), (fit.layout.size,))


def _fit_dataset(fit: Ended, q: Gaussian | None) -> xr.Dataset:
    labels, clients = np.array(coordinate_names(fit.layout, fit.reader)), np.array(fit.client_ids)
    result = fit.algorithm.result
    variables: dict[str, tuple[tuple[str, ...], Array]] = {}
    if q is not None:
        variables["mean_vector"] = ("rows",), gaussian.mean(q)
        variables["covariance_matrix"] = ("rows", "columns"), gaussian.covariance(q)
    elif isinstance(result.shared, Point):
        variables["mean_vector"] = ("rows",), _point(fit, result.shared)
    variables.update(result.details(fit.state))
    return idata.dataset(
        {name: values for name, (_, values) in variables.items()},
        {name: dims for name, (dims, _) in variables.items()},
        {**fit.reader.coords, "rows": labels, "columns": labels, "client": clients, "other_client": clients},
        {"space": "unconstrained", "status": fit.status.value, "message": fit.message},
    )


# The shared posterior as weighted points, or points of q where there are none -----------------------------------------

_POINTS = 512  # of q, of each scramble


class WeightedPoints(NamedTuple):
    """Points, their weights in the first row, and in row 1 + r the weights without scramble r; each row sums to 1."""

    points: Array  # (N, m)
    weights: Array  # (1 + scrambles, N)
    beside: float = 0.0  # error of a mean or an sd, in sds, that the spread of the points does not show


class Estimates(NamedTuple):
    """Moments and quantiles of n quantities, with standard errors of the moments."""

    mean: Array  # (n,)
    sd: Array  # (n,)
    mean_error: Array  # (n,)
    sd_error: Array  # (n,)
    quantiles: Array  # (P, n)


def weighted_points(fit: Ended) -> WeightedPoints | None:
    """Weighted points of the posterior, or quasi-random ones of q; None without q, or with too many coordinates."""
    shared, exact = fit.algorithm.result.shared, weighted_of(fit)
    if exact is not None:
        return WeightedPoints(exact.points, _leaving_out(exact.weights, exact.scramble), exact.beside)
    if not isinstance(shared, Posterior):
        return None
    center, root = gaussian.affine(shared.gaussian(fit.state))
    if len(center) > qmc.Sobol.MAXDIM:
        return None
    points = center + standard_normal(len(center), _POINTS, 0, SCRAMBLES) @ root.T
    equal = np.full(len(points), 1.0 / len(points))
    return WeightedPoints(points, _leaving_out(equal, np.repeat(np.arange(SCRAMBLES), _POINTS)))


def _estimates(values: Array, weighted: WeightedPoints, probabilities: Array) -> Estimates:
    """Moments and quantiles of quantities at the points, (N, n); errors by leaving out one scramble at a time."""
    used = weighted.weights[0] != 0  # elsewhere values may be infinite
    values, weights = values[used], weighted.weights[:, used]
    center = weights[0] @ values
    with np.errstate(invalid="ignore", over="ignore"):  # of values that have no moments under q
        shifts = weights @ (values - center)
        sds = np.sqrt(np.maximum(weights @ (values - center) ** 2 - shifts**2, 0.0))
        errors = (jackknife(part[1:]) for part in (shifts, sds))
        mean_error, sd_error = (np.hypot(error, weighted.beside * sds[0]) for error in errors)
    return Estimates(center, sds[0], mean_error, sd_error, _quantiles(values, weights[0], probabilities))


def _leaving_out(weights: Array, scramble: NDArray[np.intp]) -> Array:
    """The weights, and those without each scramble, all normalised: (1 + scrambles, N)."""
    rows = np.stack([weights, *(np.where(scramble == one, 0.0, weights) for one in range(SCRAMBLES))])
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def _quantiles(values: Array, weights: Array, probabilities: Array) -> Array:
    """Weighted quantiles of every column of values (N, n), (P, n)."""
    quantiles = np.empty((len(probabilities), values.shape[1]))
    for column, order in enumerate(np.argsort(values, axis=0, kind="stable").T):
        cumulated = np.cumsum(weights[order]) - 0.5 * weights[order]
        quantiles[:, column] = np.interp(probabilities, cumulated, values[order, column])
    return quantiles


# The shared posterior without each client -----------------------------------------------------------------------------


def influence(fit: Ended, clients: Sequence[str] | str | None = None) -> xr.Dataset:
    r"""Influence of each client: the shared posterior without it, beside the one with it.

    .. math:: p(\phi \mid y_{-k}) \propto p(\phi \mid y) / f_k(\phi)

    Parameters
    ----------
    clients
        Ids of clients; by default all.

    Returns
    -------
    xarray.Dataset
        Dims client and rows, the coordinates of φ on the unconstrained space. ``mean`` and ``sd`` are those without
        the client; ``shift`` is the change of the mean by the client, in sds with it, and ``sd_ratio`` the sd with
        it over that without. Where ``exact`` is True they are of the posterior itself, from reweighting its points
        with Pareto k ``pareto_k``: ``error``, of a mean or an sd in sds, is at most .05, 100 points or more are
        effective, and no few points make a second moment; tails without points are not seen. Else they are by such
        points where Pareto k is at most .7 and ``error`` at most .5, and NaN beyond. By `EP`, and of more than 512
        clients, they are of the Gaussian q without the client's site, with an ``error`` of NaN.
        ``log_predictive`` is log p(y_k | y_{-k}) where ``exact``, with its standard error
        ``log_predictive_error``; NaN after EP, and where a prior has no normalising constant that is known.

    Raises
    ------
    DeclarationError
        If the algorithm has no posterior without each client, a client is unknown, or its data are needed and not here.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> fit.influence()["shift"].dims
    ('client', 'rows')

    Notes
    -----
    *When this fails.* By `Sums` each client's log f_k is computed at all points, and its data have to be in this
    process. Of a client that determines much of the posterior, points are moved to where the others' is, up to four
    times; where that is not enough, ``exact`` is False, and `fedppl.without` fits the others anew. The Gaussian by `EP`
    lacks 1/K of a prior that is not Gaussian.
    """
    shared = fit.algorithm.result.shared
    if not isinstance(shared, Posterior) or shared.without is None:
        raise DeclarationError(f"{fit.algorithm.name} has no posterior without each client; use fedppl.EP().")
    require_arrived(fit, "fit.influence()")
    require_single(fit, "fit.influence()")
    names = chosen("clients", clients, fit.client_ids, "the fit's clients")
    points, q = weighted_of(fit), shared.gaussian(fit.state)
    each = shared.without(fit.state, names, fit.clients)
    columns = zip(*(_moments(without, fit.layout.size) for without in each), strict=True)
    means, sds, pareto_k, weighted, errors = (np.array(column) for column in columns)
    exact = np.array([is_exact(without) for without in each])
    if not np.all(exact):
        some = some_of([name for name, known in zip(names, exact, strict=True) if not known])
        logger.warning("the posterior without %s is not exact (see `error`, in sds); use fedppl.without", some)
    mean, sd = gaussian.mean(q), gaussian.standard_deviations(q)
    if points is not None:  # moments by points are compared with such
        mean = np.where(weighted[:, None], points.mean, mean)
        sd = np.where(weighted[:, None], np.sqrt(np.diag(points.covariance)), sd)
    values = {"mean": means, "sd": sds, "shift": (mean - means) / sd, "sd_ratio": sd / sds}
    values |= {"pareto_k": pareto_k, "error": errors, "exact": exact}
    values["log_predictive"] = np.where(exact, [without.log_predictive.value for without in each], np.nan)
    values["log_predictive_error"] = np.where(exact, [without.log_predictive.error for without in each], np.nan)
    dims = {name: ("client", "rows") if values[name].ndim == 2 else ("client",) for name in values}
    coords = {"client": np.array(names), "rows": np.array(coordinate_names(fit.layout, fit.reader))}
    return idata.dataset(values, dims, coords, {"space": "unconstrained", "status": fit.status.value})


_MOST_ERROR = 0.5  # in sds, with which moments by few points are shown in place of a Gaussian's


def is_exact(without: WithoutClient) -> bool:
    """Whether the posterior without the client is known from weighted points."""
    return without.weighted is not None and is_trusted(without.weighted)


def _moments(without: WithoutClient, size: int) -> tuple[Array, Array, float, bool, float]:
    """Mean, sds and Pareto k of the posterior without the client, whether they are by points, and their error."""
    weighted = without.weighted
    k = np.nan if weighted is None else weighted.pareto_k
    is_near = weighted is not None and weighted.pareto_k <= MOST_SECOND_K and weighted.error <= _MOST_ERROR
    if weighted is not None and (is_exact(without) or is_near):
        return weighted.mean, np.sqrt(np.diag(weighted.covariance)), k, True, weighted.error
    if weighted is not None or not gaussian.is_proper(without.gaussian):
        return np.full(size, np.nan), np.full(size, np.nan), k, False, np.nan
    return gaussian.mean(without.gaussian), gaussian.standard_deviations(without.gaussian), k, False, np.nan


# Values that an algorithm's functions return, held to the shapes they promise -----------------------------------------


def shaped(algorithm: str, function: str, value: Any, shape: tuple[int, ...]) -> Array:
    """Numbers of this shape, or an error that names the function that returned something else.

    >>> shaped("Mine", "Point.estimate", [1.0, 2.0], (2,))
    array([1., 2.])
    """
    try:
        numbers = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise DeclarationError(f"{algorithm}: {function} returned {shown(value)}; return numbers.") from None
    if numbers.shape != shape:
        raise DeclarationError(f"{algorithm}: {function} returned shape {numbers.shape}; return shape {shape}.")
    return numbers


def draws_of(algorithm: str, value: Any, leading: tuple[int, int], shared: int, local: int) -> Draws:
    """Draws with axes chain, draw, coordinate."""
    if not isinstance(value, Draws):
        raise DeclarationError(f"{algorithm}: Result.draw returned {shown(value)}; return fedppl.contracts.Draws.")
    return value._replace(
        shared=shaped(algorithm, "Result.draw", value.shared, (*leading, shared)),
        local=shaped(algorithm, "Result.draw", value.local, (*leading, local)),
    )
