"""What each client does to the shared posterior: the posterior without it, beside the one with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from fedppl import gaussian
from fedppl.contracts import Posterior, coordinate_names
from fedppl.contracts.algorithm import WithoutClient
from fedppl.numerics.reweighting import is_trusted
from fedppl.results import idata
from fedppl.results.arrival import Ended, require_arrived
from fedppl.settings import chosen
from fedppl.types import Array, DeclarationError


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
