"""What outcomes are on average in the place of draws of them: risks, rates, probabilities of levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from pymc.distributions.moments import mean
from pymc.exceptions import UndefinedMomentException

from fedppl.results import idata
from fedppl.settings import one_of, shown
from fedppl.types import DeclarationError

KINDS = ("response", "mean")


def required(kind: Any, at: Any, builder: Any) -> None:
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
