"""The parameters that all clients share, as a fit knows them: draws, one point, or weighted points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from pymc.distributions.moments import mean
from pymc.exceptions import UndefinedMomentException

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, Draws, Point, Posterior, Sampler, coordinate_names
from fedppl.gaussian import Gaussian
from fedppl.numerics.importance import resample
from fedppl.numerics.reweighting import Reweighted
from fedppl.numerics.streams import stream
from fedppl.results import idata
from fedppl.results.measure import Estimates, measure
from fedppl.results.measure import estimates as from_measure
from fedppl.results.records import Ended, rounds_dataset, unarrived
from fedppl.settings import one_of, shown
from fedppl.types import Array, DeclarationError, Status

# For who looks at the posterior group with tools that were made for MCMC.
_SAMPLING = (
    "independent draws of the approximation: r_hat and ess describe the draws, not how good it is; see fit.summary()"
)
_CORRECTED = (
    "draws with repetition of weighted points of the posterior: ess is of the weights; r_hat says nothing; see "
    "fit.summary()"
)


def shared_posterior(fit: Ended, seed: int, draws: int, chains: int, *, unconverged: bool) -> Any:
    """See `Fit.shared`."""
    reason = unarrived(fit)
    rounds = rounds_dataset(fit.records, fit.client_ids)
    if reason and not unconverged:
        return idata.from_groups({"rounds": rounds, "fit": _fit_dataset(fit, None)})
    shared = fit.algorithm.result.shared
    q = shared.gaussian(fit.state) if isinstance(shared, Posterior) else None
    if q is not None and not gaussian.is_proper(q):
        q, report = gaussian.repair(q, 1e-6)
        reason += f" and was repaired (smallest eigenvalue {report.smallest_before:.3g})"
    attrs: dict[str, Any] = {
        "status": fit.status.value,
        "message": fit.message,
        "algorithm": fit.algorithm.name,
        "converged": int(fit.status.ok),
        **({"warning": f"not a posterior: {reason}"} if reason else {}),
    }
    rng, phi, groups = stream((seed, 1)), None, {}
    found = None if reason else corrected(fit)
    if isinstance(shared, Sampler):
        drawn = shared.draw(fit.state, draws * chains, rng)
        phi = shaped(fit.algorithm.name, "Sampler.draw", drawn, (draws * chains, fit.layout.size))
    elif found is not None:
        phi = found.points[resample(found.weights, draws * chains, rng)]
        attrs |= {"ess": found.ess, "pareto_k": found.pareto_k, "unique": len(np.unique(phi, axis=0))}
        attrs["sampling"] = _CORRECTED
    elif q is not None:
        phi = gaussian.draw(q, rng, draws * chains)
    if phi is not None:
        chains, draws = shape_of(fit.algorithm, fit.status, chains, draws)
        posterior = _shared_dataset(fit, phi.reshape(chains, draws, -1), attrs)
        groups = {"posterior": idata.mark_estimates(posterior, estimated(fit))}
    elif isinstance(shared, Point):
        groups = {"point_estimate": _point_dataset(fit, shared, attrs)}
    return idata.from_groups({**groups, "rounds": rounds, "fit": _fit_dataset(fit, q)})


def shape_of(algorithm: AnyAlgorithm, status: Status, chains: int, draws: int) -> tuple[int, int]:
    """Chains and draws: one chain where the fit should have converged and has not, so that nobody's R̂ is 1.

    Independent draws agree with each other, however far they are from the posterior.
    """
    return (chains, draws) if status.ok or not algorithm.result.tests_convergence else (1, chains * draws)


def estimated(fit: Ended) -> list[str]:
    """Shared variables that are point estimates, in draws of the others' posterior."""
    shared = fit.algorithm.result.shared
    if not isinstance(shared, Sampler) or shared.estimates is None:
        return []
    known = np.asarray(shared.estimates(fit.state), dtype=bool)
    return [name for name, places in fit.layout.slices.items() if known[places].size and known[places].all()]


def corrected(fit: Ended) -> Reweighted | None:
    """The points of the correction, where there was one that can be trusted."""
    shared = fit.algorithm.result.shared
    return shared.corrected(fit.state) if isinstance(shared, Posterior) else None


def estimates(fit: Ended, probabilities: Array) -> dict[str, Estimates] | None:
    """What is known of every entry of every shared variable, from points with weights; None where there are none."""
    shared = fit.algorithm.result.shared
    measured = measure(shared.gaussian(fit.state), corrected(fit)) if isinstance(shared, Posterior) else None
    if measured is None:
        return None
    values = {name: np.asarray(value, dtype=float) for name, value in fit.reader.constrain(measured.points).items()}
    return {
        name: from_measure(value.reshape(len(value), -1), measured, probabilities) for name, value in values.items()
    }


def at_point(fit: Ended, shared: Point[Any]) -> dict[str, Array]:
    """Every shared variable at the point that was estimated."""
    return {name: value[0] for name, value in fit.reader.constrain(_estimated(fit, shared)[None]).items()}


def at_mean(fit: Ended, posterior: Any) -> dict[str, Array]:
    """Every shared variable at its posterior mean; by draws where there are no points with weights."""
    means = {str(name): values.mean(("chain", "draw")).values for name, values in posterior.data_vars.items()}
    measured = estimates(fit, np.zeros(0))
    return means if measured is None else {k: measured[k].mean.reshape(mean.shape) for k, mean in means.items()}


def _estimated(fit: Ended, shared: Point[Any]) -> Array:
    return shaped(fit.algorithm.name, "Point.estimate", shared.estimate(fit.state), (fit.layout.size,))


def _shared_dataset(fit: Ended, phi: Array, attrs: Mapping[str, Any]) -> xr.Dataset:
    chains, draws = phi.shape[:2]
    values = fit.reader.constrain(phi.reshape(chains * draws, -1))
    by_chain = {name: value.reshape(chains, draws, *value.shape[1:]) for name, value in values.items()}
    return idata.posterior_dataset(by_chain, fit.reader.dims, fit.reader.coords, {"sampling": _SAMPLING, **attrs})


def _point_dataset(fit: Ended, shared: Point[Any], attrs: Mapping[str, Any]) -> xr.Dataset:
    values = at_point(fit, shared)
    dims = {
        name: fit.reader.dims.get(name) or tuple(f"{name}_dim_{axis}" for axis in range(np.ndim(value)))
        for name, value in values.items()
    }
    return idata.dataset(values, dims, fit.reader.coords, attrs)


def _fit_dataset(fit: Ended, q: Gaussian | None) -> xr.Dataset:
    labels, clients = np.array(coordinate_names(fit.layout, fit.reader)), np.array(fit.client_ids)
    result = fit.algorithm.result
    known: dict[str, tuple[tuple[str, ...], Array]] = {}
    if q is not None:
        known["mean_vector"] = ("rows",), gaussian.mean(q)
        known["covariance_matrix"] = ("rows", "columns"), gaussian.covariance(q)
    elif isinstance(result.shared, Point):
        known["mean_vector"] = ("rows",), _estimated(fit, result.shared)
    known.update(result.details(fit.state))
    return idata.dataset(
        {name: values for name, (_, values) in known.items()},
        {name: dims for name, (dims, _) in known.items()},
        {**fit.reader.coords, "rows": labels, "columns": labels, "client": clients, "other_client": clients},
        {"space": "unconstrained", "status": fit.status.value, "message": fit.message},
    )


# What an algorithm's functions returned, as arrays of the shape they promise: what fits by size alone is not taken ----


def shaped(algorithm: str, function: str, value: Any, shape: tuple[int, ...]) -> Array:
    """Numbers of this shape, or an error that names who returned something else.

    >>> shaped("Mine", "Point.estimate", [1.0, 2.0], (2,))
    array([1., 2.])
    """
    try:
        found = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise DeclarationError(
            f"{algorithm}: {function} returned {shown(value)}; return numbers of shape {shape}."
        ) from None
    if found.shape != shape:
        raise DeclarationError(f"{algorithm}: {function} returned shape {found.shape}; return shape {shape}.")
    return found


def draws_of(algorithm: str, value: Any, leading: tuple[int, int], shared: int, local: int) -> Draws:
    """Draws with axes chain, draw, coordinate."""
    if not isinstance(value, Draws):
        raise DeclarationError(f"{algorithm}: Result.draw returned {shown(value)}; return fedppl.contracts.Draws.")
    return value._replace(
        shared=shaped(algorithm, "Result.draw", value.shared, (*leading, shared)),
        local=shaped(algorithm, "Result.draw", value.local, (*leading, local)),
    )


# What outcomes are on average in the place of draws of them: risks, rates, probabilities of levels --------------------

KINDS = ("response", "mean")


def require_mean(kind: Any, at: Any, builder: Any) -> None:
    """Check what is asked for."""
    one_of("kind", kind, KINDS)
    if at is not None and (kind != "mean" or not hasattr(builder, "expected")):
        raise DeclarationError(
            f"at={shown(at)} is a time until which a formula of times until an event tells the probability of none: "
            'write kind="mean", at=... of such a fit.'
        )


def declared(model: Any) -> list[str]:
    """Declare the mean of every outcome in a model that is open, and name them; one that the user declared stays."""
    names = []
    for rv in model.observed_RVs:
        names.append(name := f"{rv.name}_mean")
        if name not in model.named_vars:
            value, dims = _mean(rv), tuple(model.named_vars_to_dims.get(rv.name) or ())
            pm.Deterministic(name, value, dims=dims if len(dims) == value.ndim else None)
    return names


def _mean(rv: Any) -> Any:
    if getattr(rv.owner.op, "name", "") == "categorical":
        p = rv.owner.inputs[-1]
        return pt.broadcast_to(p, (*rv.shape, p.shape[-1]))
    try:
        return mean(rv)
    except (NotImplementedError, UndefinedMomentException) as error:
        raise DeclarationError(
            f'kind="mean": PyMC knows no mean of the distribution of {rv.name!r}; name it in the builder, '
            f'pm.Deterministic("{rv.name}_mean", ...), or write kind="response" for outcomes.'
        ) from error


def of_formula(builder: Any, arrays: Mapping[str, Any], posterior: xr.Dataset, at: Any, client_id: str) -> xr.Dataset:
    """The same of a formula, in closed form."""
    sizes = posterior.sizes["chain"], posterior.sizes["draw"]
    draws = {str(name): np.asarray(values.values) for name, values in posterior.data_vars.items()}
    flat = {name: value.reshape(sizes[0] * sizes[1], *value.shape[2:]) for name, value in draws.items()}
    found = builder.expected(arrays, flat, at)
    values = found.draws.reshape(*sizes, *found.draws.shape[1:])
    dims = {found.name: (f"{found.name}_dim_0", *found.coords)}
    return idata.posterior_dataset({found.name: values}, dims, found.coords, {"client": client_id})
