"""Means and sds of all clients' own variables, as one dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from fedppl import gaussian
from fedppl.contracts import Posterior
from fedppl.gaussian import Gaussian
from fedppl.model.client import ClientModel, dims_and_coords
from fedppl.model.stack import ClientsOf
from fedppl.numerics.importance import resample, skewness
from fedppl.numerics.reweighting import Reweighted
from fedppl.numerics.streams import stream
from fedppl.results.arrival import Ended, require_arrived
from fedppl.settings import chosen as among
from fedppl.types import Array, DeclarationError

_SHOWS, _DRAWN = 0.01, 256  # sds that q's moments may be off, beyond which so many points are drawn
_SKEWED = 0.1  # of a coordinate: of more, a few points of q tell no client's spread


def clients_summary(fit: Any, var_names: Sequence[str] | str | None = None) -> xr.Dataset:
    """Posterior means and sds of all clients' own variables.

    Where clients lie side by side, as many do, all at once; else from draws of each, as `client` gives them.

    Parameters
    ----------
    var_names
        Local variables and deterministics; by default all. Those with an entry for each row of a client are not
        among them.

    Returns
    -------
    xarray.Dataset
        Dims ``statistic`` ("mean", "sd"), ``client``, and those of the variable. A point estimate has no sd.

    Raises
    ------
    DeclarationError
        If clients are sites of their own, or a name is unknown.
    NotConvergedError
        Where the fit was broken off before there was a posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> fit.clients_summary()["theta"].sel(statistic="mean").dims
    ('client',)

    Notes
    -----
    *When this fails.* Of many local variables that depend on each other, and are transformed, sds are those of an
    approximation with one node on each side of an axis.
    """
    require_arrived(fit, "fit.clients_summary()")
    if isinstance(fit.clients, ClientsOf) and isinstance(fit.algorithm.result.shared, Posterior):
        found = _at_once(fit, fit.clients)
        one = fit.clients[fit.client_ids[0]]
    else:
        if not fit.clients:
            raise DeclarationError(
                "no client's data are here, so that its own variables cannot be told; of a fit that was loaded give "
                "them, fedppl.load(..., clients=). Sites have their own posteriors."
            )
        one = next(iter(fit.clients.values()))
        found = _one_by_one(fit)
    if not found:
        raise DeclarationError("clients have no variables of their own that all have alike: there is nothing to tell.")
    kept = {name: found[name] for name in among("var_names", var_names, list(found), "clients' variables")}
    return _dataset(fit, one, kept)


def _at_once(fit: Ended, clients: ClientsOf) -> dict[str, tuple[Array, Array]]:
    """Over points that have the moments of the posterior, or where q is another, over weighted points of that."""
    shared = fit.algorithm.result.shared
    assert isinstance(shared, Posterior)
    q, found = shared.gaussian(fit.state), shared.corrected(fit.state)
    mean, root = gaussian.affine(q)
    if found is not None and _differs(q, found):
        chosen = resample(found.weights, _DRAWN, stream((fit.seed, 3)))
        return clients.moments(found.points[chosen], mean)
    # On both sides of each axis: they have q's mean, variances and third moments.
    axes = np.sqrt(len(mean)) * np.eye(len(mean))
    return clients.moments(mean + np.concatenate([axes, -axes]) @ root.T, mean)


def _differs(q: Gaussian, found: Reweighted) -> bool:
    """Whether weighted points have other moments than q, or are skewed, to what shows in a client's own."""
    if np.abs(skewness(found.points, found.weights)).max() > _SKEWED:
        return True
    sd = gaussian.standard_deviations(q)
    means = np.abs(found.mean - gaussian.mean(q)) / sd
    return bool(max(np.max(means), np.max(np.abs(np.log(np.sqrt(np.diag(found.covariance)) / sd)))) > _SHOWS)


def _one_by_one(fit: Any) -> dict[str, tuple[Array, Array]]:
    """From draws of each client's posterior; of variables that have one shape at all."""
    each: list[dict[str, tuple[Array, Array]]] = []
    shared = {variable.name for variable in fit.layout.variables}
    for client_id in fit.clients:
        drawn = fit.client(client_id)["posterior"]
        each.append(
            {
                str(name): (values.mean(("chain", "draw")).values, _sd(values))
                for name, values in drawn.data_vars.items()
                if str(name) not in shared
            }
        )
    names = [name for name in each[0] if len({one[name][0].shape if name in one else None for one in each}) == 1]
    return {
        name: (np.stack([one[name][0] for one in each]), np.stack([one[name][1] for one in each])) for name in names
    }


def _sd(values: xr.DataArray) -> Array:
    """Standard deviation of draws; of a point estimate nothing is known."""
    found: Array = np.asarray(values.std(("chain", "draw")).values, dtype=float)
    return np.full_like(found, np.nan) if values.attrs.get("point_estimate") else found


def _dataset(fit: Ended, one: ClientModel, found: dict[str, tuple[Array, Array]]) -> xr.Dataset:
    dims, coords = dims_and_coords(one.pymc_model())
    variables: dict[str, tuple[tuple[str, ...], Array]] = {}
    used: dict[str, Any] = {}
    for name, (mean, sd) in found.items():
        of = dims.get(name) or tuple(f"{name}_dim_{axis}" for axis in range(mean.ndim - 1))
        variables[name] = ("statistic", "client", *of), np.stack([mean, sd])
        used |= {dim: coords[dim] for axis, dim in enumerate(of) if len(coords.get(dim, ())) == mean.shape[1 + axis]}
    places = {"statistic": ["mean", "sd"], "client": np.array(list(fit.clients)), **used}
    return xr.Dataset(variables, places, {"status": fit.status.value, "algorithm": fit.algorithm.name})
