"""A client's own posterior, drawn where its data are, as an ArviZ object; other groups and outcomes come from PyMC."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr
from pymc.logprob.utils import ParameterValueError
from pytensor.graph.traversal import ancestors

from fedppl.contracts import AnyAlgorithm
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel, dims_and_coords
from fedppl.model.interpreted import quiet
from fedppl.model.summaries import tells_grid, tells_summary
from fedppl.numerics.streams import stream
from fedppl.results import idata
from fedppl.results.diagnostics import listed
from fedppl.results.records import Ended
from fedppl.results.shared import Drawing, draws_of, shape_of
from fedppl.types import Array, DeclarationError, Message, Status

logger = logging.getLogger(__name__)


def has_rows(client: ClientModel) -> bool:
    """Whether a client brought rows, and not a summary of them."""
    return not tells_summary(client.template.parts.model)


def with_rows(fit: Ended, what: str) -> list[str]:
    """Clients of a fit that brought rows; the others are named in the log. DeclarationError where all are others."""
    names = [name for name in fit.client_ids if has_rows(fit.clients[name])]
    if not names:
        raise DeclarationError(f"{what}: all clients brought summaries of their rows; it needs clients with rows.")
    if others := [repr(name) for name in fit.client_ids if name not in names]:
        logger.warning("not in %s, since they brought summaries: %s", what, listed(others))
    return names


def require_rows(client: ClientModel, what: str) -> None:
    """Refuse what needs rows of a client that brought a summary."""
    if not has_rows(client):
        kind = f" of kind {client.kind!r}" if client.kind else ""
        raise DeclarationError(f"client {client.client_id!r}{kind} brought a summary: ask one with rows for {what}.")


def client_posterior(
    algorithm: AnyAlgorithm, model: ClientModel, personal: Any, message: Message, drawing: Drawing, status: Status
) -> dict[str, xr.Dataset]:
    """Draw (φ, θ_k) given the algorithm's final message; the posterior and the client's data as groups of ArviZ."""
    client_id, (draws, chains, seed) = model.client_id, drawing
    drawn = algorithm.result.draw(model, personal, message, draws, chains, stream((seed, 2, *client_id.encode())))
    sample = draws_of(algorithm.name, drawn, (chains, draws), model.shared_size, model.local_size)
    if (k := sample.diagnostics.get("pareto_k", -np.inf)) > 0.7:
        logger.warning("client %s: Pareto k %.2f of the draws of θ; use local=fedppl.local.NUTS()", client_id, k)
    if sample.diagnostics.get("from_q"):
        remedy = "its data are far from the others' posterior; fit again with this client"
        logger.warning("client %s: draws are from the Gaussian q, as %s", client_id, remedy)
    theta = sample.local.reshape(chains * draws, -1)
    phi = sample.shared.reshape(chains * draws, -1)
    flat = model.constrain(phi, theta) | model.constrain_shared(phi)
    pymc_model = model.pymc_model()
    dims, coords = dims_and_coords(pymc_model)
    shape = shape_of(algorithm, status, chains, draws)
    everything = {name: value.reshape(*shape, *value.shape[1:]) for name, value in flat.items()}
    attrs: dict[str, Any] = {f"fedppl_{name}": value for name, value in sample.diagnostics.items()}
    attrs |= {"client": client_id, "status": status.value, "converged": int(status.ok)}
    posterior = idata.mark_estimates(idata.posterior_dataset(everything, dims, coords, attrs), sample.estimates)
    observed = observed_values(pymc_model)
    outcomes = {pymc_model.rvs_to_values[rv].name for rv in pymc_model.observed_RVs}
    constant = {name: value for name, value in model.arrays.items() if name not in outcomes}
    return {
        "posterior": posterior,
        "observed_data": idata.data_dataset(observed, dims, coords),
        "constant_data": idata.data_dataset(constant, dims, coords),
    }


def observed_values(pymc_model: Any) -> dict[str, np.ndarray]:
    """The values of every observed variable."""
    values = {rv.name: pymc_model.rvs_to_values[rv] for rv in pymc_model.observed_RVs}
    return {
        name: np.asarray(value.get_value() if hasattr(value, "get_value") else value.eval(mode=interpreted.PYTHON_MODE))
        for name, value in values.items()
    }


# Groups of a client's posterior that PyMC computes: pointwise log likelihood, replicates, the prior ------------------

GROUPS = ("log_likelihood", "posterior_predictive", "prior")
_PRIOR_DRAWS = 500
_AT_ONCE = 2**20  # numbers in an array of log densities that is computed at once
_UNKNOWN = (NotImplementedError, ParameterValueError, ValueError, TypeError)  # of densities that are not known to us


def pymc_groups(client: ClientModel, posterior: xr.Dataset, groups: Sequence[str], seed: int) -> dict[str, xr.Dataset]:
    """These groups of ArviZ, from the draws of a client's posterior and its PyMC model."""
    if not groups:
        return {}
    model = client.pymc_model()
    if not model.observed_RVs:
        what = "observed variables, and the model has a pm.Potential in their place"
        raise DeclarationError(f"groups={list(groups)} are about {what}; declare outcomes as observed (pm.CustomDist).")
    marks = {name: posterior.attrs[name] for name in ("client", "status", "converged") if name in posterior.attrs}
    datasets: dict[str, xr.Dataset] = {}
    if "log_likelihood" in groups:
        datasets["log_likelihood"] = _log_likelihood(client, model, posterior)
    if "posterior_predictive" in groups:
        datasets["posterior_predictive"] = draw_outcomes(model, posterior, seed % 2**32)
    if "prior" in groups:
        compiled = {"mode": interpreted.PYTHON_MODE}
        with model, proper_priors(), quiet():
            drawn = pm.sample_prior_predictive(_PRIOR_DRAWS, random_seed=seed % 2**32, compile_kwargs=compiled)
        datasets |= {name: idata.as_dataset(drawn, name) for name in ("prior", "prior_predictive")}
    return {name: group.assign_attrs(inference_library="fedppl", **marks) for name, group in datasets.items()}


def _log_likelihood(client: ClientModel, model: Any, posterior: xr.Dataset) -> xr.Dataset:
    """Of every observation at every draw: of all draws at once where that agrees with PyMC at four of them."""
    draws = posterior[[variable.name for variable in model.free_RVs if variable.name in posterior]]
    function = client.template.of_declaration("log likelihood", lambda: _compared(client, model, draws))
    values = _at_once(client, function, draws) if function else None
    if values is None:
        return _by_pymc(model, draws)
    dims, coords = dims_and_coords(model)
    # A multivariate outcome has fewer densities than numbers.
    dims = {name: (dims.get(name) or ())[: value.ndim - 2] for name, value in values.items()}
    own = {**coords, "chain": draws["chain"], "draw": draws["draw"]}
    return idata.posterior_dataset(values, dims, own)


def _by_pymc(model: Any, draws: xr.Dataset) -> xr.Dataset:
    """Draw by draw. The graph has the client's own sizes, and is compiled for it alone."""
    groups, compiled = idata.from_groups({"posterior": draws}), {"mode": interpreted.STABLE_MODE}
    starts = dict(model.rvs_to_initial_values)
    model.rvs_to_initial_values.update(dict.fromkeys(starts))  # PyMC copies no model that has them
    try:
        with model:
            computed = pm.compute_log_likelihood(
                groups, extend_inferencedata=False, progressbar=False, compile_kwargs=compiled
            )
    finally:
        model.rvs_to_initial_values.update(starts)
    return idata.as_dataset(computed, "log_likelihood")


def _compared(client: ClientModel, model: Any, draws: xr.Dataset) -> Callable[..., list[Array]] | None:
    """Log densities by operations on arrays; None where PyMC's differ at four of a client's draws."""
    few = draws.isel(chain=[0, -1], draw=[0, -1])
    theirs = _by_pymc(model, few)
    try:
        sampled, inputs, outputs = _graph.observed_given_all(client.template.parts)
        function: Callable[..., list[Array]] = interpreted.batched(sampled, inputs, interpreted.stable(outputs))
    except _UNKNOWN:
        return None
    ours = _at_once(client, function, few)
    if ours is None or any(value.shape != theirs[name].shape for name, value in ours.items()):
        return None
    close = [np.allclose(value, theirs[name], rtol=1e-8, atol=1e-8, equal_nan=True) for name, value in ours.items()]
    return function if all(close) else None


def _at_once(client: ClientModel, function: Callable[..., list[Array]], draws: xr.Dataset) -> dict[str, Array] | None:
    """Log densities (chains, draws, ...) of each observed variable; None where they cannot be computed."""
    shape = draws.sizes["chain"], draws.sizes["draw"]
    count, model = shape[0] * shape[1], client.template.parts.model
    arrays = [draws[rv.name].values for rv in model.free_RVs]
    flat = [array.reshape(count, *array.shape[2:]) for array in arrays]
    inputs = client.inputs[: len(client.inputs) - len(client.template.graph.free_shapes)]
    many = max(1, _AT_ONCE // max(1, sum(map(np.size, client.inputs))))
    try:
        computed = [function(*(array[k : k + many] for array in flat), *inputs) for k in range(0, count, many)]
    except _UNKNOWN:
        return None
    values = [np.concatenate(chunks) for chunks in zip(*computed, strict=True)]
    names = [rv.name for rv in model.observed_RVs]
    return {name: value.reshape(*shape, *value.shape[1:]) for name, value in zip(names, values, strict=True)}


# Outcomes from a declared model: at draws of its variables, and whole data sets from its prior ------------------------

NO_DRAWS = "it brought a likelihood on a grid, and outcomes cannot be drawn from that"
_OR = ", or pass simulate= to fedppl.calibrate, a function of (shared, client_id, data, rng)."


def draw_outcomes(
    model: Any,
    posterior: xr.Dataset,
    seed: int,
    anew: Iterable[str] = (),
    names: Iterable[str] | None = None,
    *,
    predictions: bool = False,
) -> xr.Dataset:
    """Draws of the observed variables, or of the variables `names`, one a draw of the posterior.

    Variables of the posterior stay as they are but those in `anew`, which are drawn given the others. By itself PyMC
    draws every variable anew that reads data or dims, unless these are given as ``constant_data``.
    """
    stays = [rv.name for rv in model.free_RVs if rv.name in posterior and rv.name not in set(anew)]
    draws = posterior[stays]
    draws = draws.drop_vars(set(draws.coords) - {"chain", "draw"})  # the model has its own labels
    values = {variable.name: np.asarray(variable.get_value()) for variable in model.data_vars}
    coords = {dim: np.asarray(labels) for dim, labels in model.coords.items() if labels is not None}
    groups = {"posterior": draws, "constant_data": idata.dataset(values, {}, {}).assign_coords(coords)}
    keywords = inspect.signature(pm.sample_posterior_predictive).parameters
    with model, quiet():
        drawn = pm.sample_posterior_predictive(
            idata.from_groups(groups),
            var_names=[rv.name for rv in model.observed_RVs] if names is None else list(names),
            random_seed=seed,
            progressbar=False,
            compile_kwargs={"mode": interpreted.PYTHON_MODE},
            predictions=predictions,
            **({"freeze_vars": stays} if stays and "freeze_vars" in keywords else {}),
        )
    return idata.as_dataset(drawn, "predictions" if predictions else "posterior_predictive")


class Truths(NamedTuple):
    """Draws of the shared prior."""

    values: Mapping[str, Array]  # (N, *shape) of every shared variable
    phi: Array  # (N, m) the same on the unconstrained space


@contextlib.contextmanager
def proper_priors() -> Iterator[None]:
    """Name a prior that cannot be drawn from."""
    try:
        yield
    except NotImplementedError as error:
        why = str(error).splitlines()[0]
        remedy = "give every variable a proper prior in place of pm.Flat or pm.HalfFlat."
        raise DeclarationError(f"the declared prior cannot be drawn from ({why}); {remedy}") from error


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
    """Draw a client's own variables and outcomes for N draws of the shared ones: name of an array to (N, *shape)."""
    model = client.pymc_model()
    if tells_grid(model):
        raise DeclarationError(f"client {client.client_id!r}: {NO_DRAWS}{_OR}")
    arrays: dict[str, str] = {}
    for rv in model.observed_RVs:
        above = set(ancestors([model.rvs_to_values[rv]]))
        read = [variable.name for variable in model.data_vars if variable in above]
        if len(read) != 1 or read[0] not in client.arrays:
            raise DeclarationError(f"outcomes {rv.name!r} are no pm.Data container of the model; make them one{_OR}")
        arrays[rv.name] = read[0]
    if model.potentials:
        raise DeclarationError(f"the model has a pm.Potential, which draws no outcomes; use a pm.CustomDist{_OR}")
    group = idata.posterior_dataset({name: value[None] for name, value in shared.items()}, *dims_and_coords(model))
    with proper_priors():
        drawn = draw_outcomes(model, group, int(rng.integers(2**31)))
    values = {array: np.asarray(drawn[name])[0] for name, array in arrays.items()}
    # Counts in the client's type; measurements stay real where the client's own happened to be whole numbers.
    return {
        name: value if np.issubdtype(value.dtype, np.floating) else value.astype(np.asarray(client.arrays[name]).dtype)
        for name, value in values.items()
    }
