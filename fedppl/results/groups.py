"""More groups of a client's posterior, by PyMC, where the data are: pointwise log likelihood, replicates, the prior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr

from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.model.quiet import quiet
from fedppl.results import idata
from fedppl.results.simulate import proper_priors
from fedppl.settings import shown
from fedppl.types import DeclarationError

_PRIOR_DRAWS = 500


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
    """Of every observation at every draw. The graph has the client's own sizes, and is compiled for it alone."""
    del seed
    model = client.pymc_model()
    with model:
        computed = pm.compute_log_likelihood(
            idata.from_groups({"posterior": _free(model, posterior)}),
            extend_inferencedata=False,
            progressbar=False,
            compile_kwargs={"mode": interpreted.PYTHON_MODE},
        )
    return {"log_likelihood": _like(idata.as_dataset(computed, "log_likelihood"), posterior)}


def _posterior_predictive(client: ClientModel, posterior: xr.Dataset, seed: int) -> dict[str, xr.Dataset]:
    """Replicates of the observations, one a draw, for the same inputs and the same local variables."""
    model = client.pymc_model()
    with model, quiet():
        drawn = pm.sample_posterior_predictive(
            idata.from_groups({"posterior": posterior, "constant_data": _constant(model)}),
            var_names=[variable.name for variable in model.observed_RVs],
            random_seed=seed,
            progressbar=False,
            compile_kwargs={"mode": interpreted.PYTHON_MODE},
        )
    return {"posterior_predictive": _like(idata.as_dataset(drawn, "posterior_predictive"), posterior)}


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


def _constant(model: Any) -> xr.Dataset:
    """The model's data as they are: what PyMC finds unchanged it does not draw anew, nor what depends on it."""
    values = {variable.name: np.asarray(variable.get_value()) for variable in model.data_vars}
    dims = {name: tuple(f"{name}_dim_{axis}" for axis in range(value.ndim)) for name, value in values.items()}
    return idata.dataset(values, dims, {})


def _free(model: Any, posterior: xr.Dataset) -> xr.Dataset:
    """The draws of what is no deterministic: nothing else is read."""
    return posterior[[variable.name for variable in model.free_RVs if variable.name in posterior]]


def _like(group: xr.Dataset, posterior: xr.Dataset) -> xr.Dataset:
    """Marked as what it belongs to."""
    marks = {name: posterior.attrs[name] for name in ("client", "status", "converged") if name in posterior.attrs}
    return group.assign_attrs({"inference_library": "fedppl", **marks})
