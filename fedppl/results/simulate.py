"""Data sets from a declared model, by PyMC: shared variables from their prior, all else given those."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
from pytensor.graph.traversal import ancestors

from fedppl.model import interpreted
from fedppl.model.client import ClientModel, dims_and_coords
from fedppl.model.quiet import quiet
from fedppl.model.summary import tells_grid
from fedppl.results import idata
from fedppl.results.forward import draw_outcomes
from fedppl.types import Array, DeclarationError

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
