"""A client's own posterior: θ_k drawn where the data are, with predictions, as an ArviZ object."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from scipy.special import logsumexp

from fedppl.contracts import AnyAlgorithm
from fedppl.model.client import ClientModel, dims_and_coords
from fedppl.model.summaries import tells_summary
from fedppl.numerics.streams import stream
from fedppl.results import idata
from fedppl.results.groups import more
from fedppl.results.shared import draws_of, shape_of
from fedppl.types import Array, DeclarationError, Message, Status

logger = logging.getLogger(__name__)


def inputs(new_data: Any) -> Any:
    """New inputs to predict at, as they are; None is none."""
    if new_data is None:
        raise DeclarationError('new_data=None: pass new inputs by name, such as {"X": X_new}, or a data frame.')
    return new_data


def client_posterior(
    algorithm: AnyAlgorithm,
    model: ClientModel,
    personal: Any,
    message: Message,
    seed: int,
    draws: int,
    chains: int,
    status: Status,
    predict: Callable[[xr.Dataset, Mapping[str, Any]], tuple[xr.Dataset, xr.Dataset]] | None = None,
    groups: Sequence[str] = (),
) -> Any:
    """Draw (φ, θ_k) from what the algorithm tells the client, and predictions for new inputs if there are any."""
    client_id = model.client_id
    drawn = algorithm.result.draw(model, personal, message, draws, chains, stream((seed, 2, *client_id.encode())))
    sample = draws_of(algorithm.name, drawn, (chains, draws), model.shared_size, model.local_size)
    k = sample.diagnostics.get("pareto_k", -np.inf)
    if k > 0.7:
        logger.warning("client %s: Pareto k %.2f of the draws of θ; use local=fedppl.NUTS()", client_id, k)
    if sample.diagnostics.get("from_q"):
        logger.warning(
            "client %s: the others' posterior, corrected, has few points where these data are; its draws are from the "
            "Gaussian q in its place (fit.posterior). Fit again with this client among the others",
            client_id,
        )
    if algorithm.result.caution and (predict is not None or {*groups} - {"prior"}):
        logger.warning("client %s: %s", client_id, algorithm.result.caution)
    theta = sample.local.reshape(chains * draws, -1)
    phi = sample.shared.reshape(chains * draws, -1)
    pymc_model = model.pymc_model()
    dims, coords = dims_and_coords(pymc_model)
    chains, draws = shape_of(algorithm, status, chains, draws)
    everything = {
        name: value.reshape(chains, draws, *value.shape[1:])
        for name, value in (model.constrain(phi, theta) | model.constrain_shared(phi)).items()
    }
    attrs: dict[str, Any] = {f"fedppl_{name}": value for name, value in sample.diagnostics.items()}
    attrs |= {"client": client_id, "status": status.value, "converged": int(status.ok)}
    posterior = idata.mark_estimates(idata.posterior_dataset(everything, dims, coords, attrs), sample.estimates)
    found = {"posterior": posterior, **_data_groups(pymc_model, model, dims, coords)}
    found |= more(model, posterior, groups, seed)
    if predict is not None:
        found["predictions"], found["predictions_constant_data"] = predict(posterior, coords)
    return idata.from_groups(found)


def observed_values(pymc_model: Any) -> dict[str, np.ndarray]:
    """What every observed variable was given."""
    values = {rv.name: pymc_model.rvs_to_values[rv] for rv in pymc_model.observed_RVs}
    return {
        name: np.asarray(value.get_value() if hasattr(value, "get_value") else value.eval())
        for name, value in values.items()
    }


def _data_groups(
    pymc_model: Any, model: ClientModel, dims: Mapping[str, tuple[str, ...] | None], coords: Mapping[str, Any]
) -> dict[str, xr.Dataset]:
    """Observed and constant data, which stay in the client's own result."""
    observed = observed_values(pymc_model)
    held = {v.name for v in map(pymc_model.rvs_to_values.get, pymc_model.observed_RVs)}
    constant = {name: np.asarray(value) for name, value in model.arrays.items() if name not in held}
    return {"observed_data": _plain(observed, dims, coords), "constant_data": _plain(constant, dims, coords)}


def _plain(
    values: Mapping[str, Any], dims: Mapping[str, tuple[str, ...] | None], coords: Mapping[str, Any]
) -> xr.Dataset:
    names = {k: dims.get(k) or tuple(f"{k}_dim_{i}" for i in range(np.ndim(v))) for k, v in values.items()}
    lengths = {dim: np.shape(v)[i] for k, v in values.items() for i, dim in enumerate(names[k])}
    own = {dim: coords[dim] if len(coords.get(dim, ())) == n else np.arange(n) for dim, n in lengths.items()}
    return idata.dataset(values, names, own)


# Rows of one client left out one at a time, and what is told of them: sums --------------------------------------------

SUMS = ("elpd", "p_loo", "rows", "good", "bad", "very_bad", "squares")


@dataclass(frozen=True)
class Rows:
    """What a client knows of its rows, and keeps."""

    elpd: Array
    p_loo: Array
    k: Array
    limit: float


def has_rows(client: ClientModel) -> bool:
    """Whether a client brought rows, and not a summary of them."""
    return not tells_summary(client.pymc_model())


def require_rows(client: ClientModel, what: str) -> None:
    """Refuse what needs rows of a client that brought a summary."""
    if not has_rows(client):
        of = f" of kind {client.kind!r}" if client.kind else ""
        raise DeclarationError(
            f"client {client.client_id!r}{of} brought a summary of its rows, and {what} need a likelihood of rows, "
            "which its model has not. Its posterior is fit.client(...); ask a client that brought rows for the rest."
        )


def rows_of(drawn: Any) -> Rows:
    """Leave each row out, of a client's posterior with the group of log densities."""
    group = idata.as_dataset(drawn["log_likelihood"])
    count = group.sizes["chain"] * group.sizes["draw"]
    parts = [(*idata.leave_one_out(group, str(name)), np.asarray(group[name])) for name in group.data_vars]
    lppd = [logsumexp(values.reshape(count, -1), axis=0) - np.log(count) for *_, values in parts]
    elpd = np.concatenate([one[0] for one in parts])
    k = np.concatenate([one[1] for one in parts])
    return Rows(elpd, np.concatenate(lppd) - elpd, k, parts[0][2])


def sums_of(rows: Rows) -> dict[str, Array]:
    """What a client gives of its rows, by the names in `SUMS`."""
    found = {
        "elpd": rows.elpd.sum(),
        "p_loo": rows.p_loo.sum(),
        "rows": len(rows.elpd),
        "good": np.sum(rows.k <= rows.limit),
        "bad": np.sum((rows.k > rows.limit) & (rows.k <= 1)),
        "very_bad": np.sum(~(rows.k <= 1)),
        "squares": np.sum(rows.elpd**2),
    }
    return {name: np.array(float(found[name])) for name in SUMS}


def implausible(sums: Array) -> str | None:
    """Why sums that a site tells cannot be, or None.

    >>> implausible(np.array([-3.0, 0.5, 2.0, 2.0, 0.0, 0.0, 5.0]))
    >>> implausible(np.array([-3.0, 0.5, 2.0, 1.0, 0.0, 0.0, 5.0]))
    'of 2 rows 1 have a Pareto k'
    """
    told = dict(zip(SUMS, sums.tolist(), strict=True))
    counts = [told[name] for name in ("rows", "good", "bad", "very_bad")]
    if not np.all(np.isfinite(sums)):
        return "sums that are not finite"
    if min(counts) < 0 or told["rows"] < 1 or any(count % 1 for count in counts):
        return "numbers of rows that are none"
    if sum(counts[1:]) != told["rows"]:
        return f"of {told['rows']:.0f} rows {sum(counts[1:]):.0f} have a Pareto k"
    if told["squares"] * told["rows"] < told["elpd"] ** 2 * (1 - 1e-9):
        return "squares that are too small for their sum"
    return None
