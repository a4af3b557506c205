"""More groups of a client's posterior, by PyMC, where the data are: pointwise log likelihood, replicates, the prior."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr
from pymc.logprob.utils import ParameterValueError
from pymc.model.transform.conditioning import remove_value_transforms
from pytensor.graph.traversal import ancestors

from fedppl import gaussian
from fedppl.contracts import Posterior, coordinate_names
from fedppl.contracts.algorithm import WithoutClient
from fedppl.model import interpreted
from fedppl.model.client import ClientModel, dims_and_coords
from fedppl.model.interpreted import quiet
from fedppl.model.summaries import tells_grid
from fedppl.numerics.reweighting import is_trusted
from fedppl.results import idata
from fedppl.results.forward import draw_outcomes
from fedppl.results.records import Ended, require_arrived
from fedppl.settings import chosen, shown
from fedppl.types import Array, DeclarationError

_PRIOR_DRAWS = 500
_AT_ONCE = 2**20  # numbers in an array of log densities that is computed at once


def required(groups: Any) -> tuple[str, ...]:
    """Check the keyword `groups`."""
    given = (groups,) if isinstance(groups, str) else tuple(groups) if isinstance(groups, Sequence) else None
    if given is None or (unknown := [name for name in given if not isinstance(name, str) or name not in GROUPS]):
        wrong = shown(groups) if given is None else unknown
        raise DeclarationError(f"groups={wrong} must be some of {sorted(GROUPS)}.")
    return given


def more(client: ClientModel, posterior: xr.Dataset, groups: Sequence[str], seed: int) -> dict[str, xr.Dataset]:
    """These groups of ArviZ, from the draws of a client's posterior."""
    found: dict[str, xr.Dataset] = {}
    if groups and not client.pymc_model().observed_RVs:
        raise DeclarationError(
            f"groups={list(groups)} are about observed variables, and the model has a pm.Potential in their place; "
            "declare the outcomes as an observed variable (pm.CustomDist)."
        )
    for name in groups:
        found |= GROUPS[name](client, posterior, seed % 2**32)
    return found


def _log_likelihood(client: ClientModel, posterior: xr.Dataset, seed: int) -> dict[str, xr.Dataset]:
    """Of every observation at every draw: of many at once, where that is what PyMC has for one."""
    model = client.pymc_model()
    draws = _free(model, posterior)
    with _without_starts(model):
        found = _by_pymc(model, draws.isel(chain=[0, -1], draw=[0, -1]))
        values = _at_once(model, draws, found)
        if values is None:
            found = _by_pymc(model, draws)
    if values is not None:
        coords = {name: coord for name, coord in found.coords.items() if name not in ("chain", "draw")}
        coords |= {name: draws[name] for name in ("chain", "draw")}
        found = xr.Dataset({name: (found[name].dims, value) for name, value in values.items()}, coords, found.attrs)
    return {"log_likelihood": _like(found, posterior)}


@contextlib.contextmanager
def _without_starts(model: Any) -> Iterator[None]:
    """A model without the values where searches begin: PyMC copies none that has them, and no density needs them."""
    starts = dict(model.rvs_to_initial_values)
    model.rvs_to_initial_values.update(dict.fromkeys(starts))
    try:
        yield
    finally:
        model.rvs_to_initial_values.update(starts)


def _by_pymc(model: Any, draws: xr.Dataset) -> xr.Dataset:
    """Draw by draw. The graph has the client's own sizes, and is compiled for it alone."""
    with model:
        computed = pm.compute_log_likelihood(
            idata.from_groups({"posterior": draws}),
            extend_inferencedata=False,
            progressbar=False,
            compile_kwargs={"mode": interpreted.PYTHON_MODE},
        )
    return idata.as_dataset(computed, "log_likelihood")


def _at_once(model: Any, draws: xr.Dataset, corners: xr.Dataset) -> dict[str, Array] | None:
    """The same of all draws (chains, draws, ...), by operations on arrays; None if PyMC has others at the corners."""
    plain = remove_value_transforms(model)
    of = [plain.rvs_to_values[rv] for rv in plain.free_RVs]
    names = [rv.name for rv in plain.observed_RVs]
    shape = draws.sizes["chain"], draws.sizes["draw"]
    given = [np.asarray(draws[rv.name].values) for rv in plain.free_RVs]
    flat = [value.reshape(shape[0] * shape[1], *value.shape[2:]) for value in given]
    at_once = max(1, _AT_ONCE // max(1, sum(corners[name][0, 0].size for name in names)))
    try:
        function = interpreted.over_draws(of, plain.logp(vars=plain.observed_RVs, sum=False))
        parts = [function(*(one[k : k + at_once] for one in flat)) for k in range(0, shape[0] * shape[1], at_once)]
    except (NotImplementedError, ParameterValueError, ValueError, TypeError):
        return None
    whole = [np.concatenate(each) for each in zip(*parts, strict=True)]
    found = {name: value.reshape(*shape, *value.shape[1:]) for name, value in zip(names, whole, strict=True)}
    for name, value in found.items():
        ours, theirs = value[[0, -1]][:, [0, -1]], corners[name].values
        if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=1e-8, atol=1e-8, equal_nan=True):
            return None
    return found


def _posterior_predictive(client: ClientModel, posterior: xr.Dataset, seed: int) -> dict[str, xr.Dataset]:
    """Replicates of the observations, one a draw, for the same inputs and the same local variables."""
    return {"posterior_predictive": _like(draw_outcomes(client.pymc_model(), posterior, seed), posterior)}


def _prior(client: ClientModel, posterior: xr.Dataset, seed: int) -> dict[str, xr.Dataset]:
    """Draws of the declared prior, and of what it predicts."""
    model = client.pymc_model()
    with model, proper_priors(), quiet():
        drawn = pm.sample_prior_predictive(
            _PRIOR_DRAWS, random_seed=seed, compile_kwargs={"mode": interpreted.PYTHON_MODE}
        )
    return {name: _like(idata.as_dataset(drawn, name), posterior) for name in ("prior", "prior_predictive")}


GROUPS: dict[str, Callable[[ClientModel, xr.Dataset, int], dict[str, xr.Dataset]]] = {
    "log_likelihood": _log_likelihood,
    "posterior_predictive": _posterior_predictive,
    "prior": _prior,
}


def _free(model: Any, posterior: xr.Dataset) -> xr.Dataset:
    """The draws of what is no deterministic: nothing else is read."""
    return posterior[[variable.name for variable in model.free_RVs if variable.name in posterior]]


def _like(group: xr.Dataset, posterior: xr.Dataset) -> xr.Dataset:
    """Marked as what it belongs to."""
    marks = {name: posterior.attrs[name] for name in ("client", "status", "converged") if name in posterior.attrs}
    return group.assign_attrs({"inference_library": "fedppl", **marks})


# Data sets from a declared model, by PyMC: shared variables from their prior, all else given those --------------------

NO_DRAWS = "it brought a likelihood on a grid, and outcomes cannot be drawn from that"
_OR = ", or where fedppl.calibrate draws them pass simulate=, a function of (shared, client_id, data, rng)."


class Truths(NamedTuple):
    """Draws of the shared prior."""

    values: Mapping[str, Array]  # (N, *shape) of every shared variable
    phi: Array  # (N, m) the same on the unconstrained space


@contextlib.contextmanager
def proper_priors() -> Iterator[None]:
    """Say what a prior without draws is."""
    try:
        yield
    except NotImplementedError as error:
        raise DeclarationError(
            f"the declared prior cannot be drawn from ({str(error).splitlines()[0]}); give every variable a proper "
            "prior in place of pm.Flat or pm.HalfFlat."
        ) from error


def truths(client: ClientModel, count: int, rng: np.random.Generator) -> Truths:
    """Draw the shared variables from their declared prior."""
    model = client.pymc_model()
    rvs = [model[variable.name] for variable in client.layout.variables]
    transforms = [model.rvs_to_transforms[rv] for rv in rvs]
    free = [rv if t is None else t.forward(rv, *rv.owner.inputs) for rv, t in zip(rvs, transforms, strict=True)]
    seed = int(rng.integers(2**31))
    with proper_priors(), quiet():
        drawn = pm.draw([*rvs, *free], draws=count, random_seed=seed, mode=interpreted.PYTHON_MODE)
    values = {rv.name: np.asarray(value) for rv, value in zip(rvs, drawn, strict=False)}
    phi = np.concatenate([np.reshape(value, (count, -1)) for value in drawn[len(rvs) :]], axis=1)
    return Truths(values, phi)


def outcomes(client: ClientModel, shared: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Draw a client's own variables and outcomes for every row of the shared ones: name of an array to (N, *shape)."""
    model = client.pymc_model()
    if tells_grid(model):
        raise DeclarationError(f"client {client.client_id!r}: {NO_DRAWS}{_OR}")
    arrays = {rv.name: _array_of(client, model, rv) for rv in model.observed_RVs}
    if model.potentials:
        raise DeclarationError(
            "the model has a pm.Potential, from which outcomes cannot be drawn; declare them as observed variables "
            "(pm.CustomDist)" + _OR
        )
    group = idata.posterior_dataset({name: value[None] for name, value in shared.items()}, *dims_and_coords(model))
    with proper_priors():
        found = draw_outcomes(model, group, int(rng.integers(2**31)))
    return {
        array: _as_outcomes(np.asarray(found[name])[0], np.asarray(client.arrays[array]).dtype)
        for name, array in arrays.items()
    }


def _as_outcomes(drawn: Array, dtype: Any) -> Array:
    """Whole numbers as the client has them; measurements that were whole numbers here need not be so again."""
    return drawn if np.issubdtype(drawn.dtype, np.floating) else drawn.astype(dtype)


def _array_of(client: ClientModel, model: Any, rv: Any) -> str:
    """Name of the array that an observed variable was given."""
    read = [variable.name for variable in model.data_vars if variable in set(ancestors([model.rvs_to_values[rv]]))]
    if len(read) == 1 and read[0] in client.arrays:
        return str(read[0])
    raise DeclarationError(
        f"outcomes {rv.name!r} are not a pm.Data container of the model, so that others cannot take their place; pass "
        "them as pm.Data" + _OR
    )


# What each client does to the shared posterior: the posterior without it, beside the one with it ----------------------


def influence(fit: Ended, clients: Sequence[str] | str | None) -> xr.Dataset:
    """See `Fit.influence`."""
    shared = fit.algorithm.result.shared
    if not isinstance(shared, Posterior):
        raise DeclarationError(
            f"{fit.algorithm.name} has no posterior of parameters that all clients share; use fedppl.EP()."
        )
    if shared.without is None:
        raise DeclarationError(
            f"{fit.algorithm.name} cannot tell what each client does to its posterior; use fedppl.EP()."
        )
    require_arrived(fit, "fit.influence()")
    names = chosen("clients", clients, fit.client_ids, "the fit's clients")
    corrected = shared.corrected(fit.state)
    q = shared.gaussian(fit.state)
    each = shared.without(fit.state, names, fit.clients)
    found = [_moments(one, fit.layout.size) for one in each]
    means, sds = np.stack([one[0] for one in found]), np.stack([one[1] for one in found])
    exact = np.array([one[3] for one in found])
    mean, sd = gaussian.mean(q), gaussian.standard_deviations(q)
    if corrected is not None:  # each beside what is of the same kind
        mean = np.where(exact[:, None], corrected.mean, mean)
        sd = np.where(exact[:, None], np.sqrt(np.diag(corrected.covariance)), sd)
    values = {
        "mean": means,
        "sd": sds,
        "shift": (mean - means) / sd,
        "sd_ratio": sd / sds,
        "pareto_k": np.array([one[2] for one in found]),
        "error": np.array([one[4] for one in found]),
        "exact": exact,
        "log_predictive": np.where(exact, [one.log_predictive.value for one in each], np.nan),
        "log_predictive_error": np.where(exact, [one.log_predictive.error for one in each], np.nan),
    }
    dims = {name: ("client", "rows") if values[name].ndim == 2 else ("client",) for name in values}
    coords = {"client": np.array(names), "rows": np.array(coordinate_names(fit.layout, fit.reader))}
    return idata.dataset(values, dims, coords, {"space": "unconstrained", "status": fit.status.value})


def is_exact(without: WithoutClient) -> bool:
    """Whether what is left of the posterior is known by the points of the correction."""
    return without.corrected is not None and is_trusted(without.corrected)


def _moments(without: WithoutClient, size: int) -> tuple[Array, Array, float, bool, float]:
    """Mean, sds and Pareto k of what is left, whether they are of the posterior or of its Gaussian, and the error."""
    known = without.corrected
    k, error = (np.nan, np.nan) if known is None else (known.pareto_k, known.error)
    if known is not None and is_exact(without):
        return known.mean, np.sqrt(np.diag(known.covariance)), k, True, error
    if not gaussian.is_proper(without.gaussian):
        nothing = np.full(size, np.nan)
        return nothing, nothing, k, False, error
    return gaussian.mean(without.gaussian), gaussian.standard_deviations(without.gaussian), k, False, error
