"""What a site lets out of its rows when a run is over: for `fedppl.loo` and `fedppl.conflict`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedppl.contracts import AnyAlgorithm, LogEvidence
from fedppl.contracts.algorithm import WithoutClient
from fedppl.flower.decode import require
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.numerics.streams import stream
from fedppl.results import idata
from fedppl.results.groups import more
from fedppl.results.rows import SUMS, implausible, require_rows, rows_of, sums_of
from fedppl.run.conflict import FEWEST, knows_cavities, tested
from fedppl.types import Array, Message

logger = logging.getLogger(__name__)

_LENGTHS = {"loo": len(SUMS), "conflict": 2}
MOST_BYTES = 4096  # of all that a site tells


def tell(
    names: Sequence[str],
    algorithm: AnyAlgorithm,
    declaration: FederatedModel,
    client: ClientModel,
    message: Message,
    drawn: Any,
    seed: int,
) -> Message:
    """Compute what the policy names; what cannot be had is left out, and the site's log says why."""
    found: dict[str, Array] = {}
    computed: dict[str, Callable[[], Array]] = {
        "loo": functools.partial(_loo, client, drawn),
        "conflict": functools.partial(_conflict, algorithm, declaration, client, message, seed),
    }
    for name in names:
        try:
            value = computed[name]()
            if not np.all(np.isfinite(value)):
                raise ValueError("it is not finite")
        except Exception:  # of somebody's own model, in any of its parts: the others are told all the same
            logger.warning("client %s has no %r to tell", client.client_id, name, exc_info=True)
        else:
            found[name] = value
    return found


def _loo(client: ClientModel, drawn: Any) -> Array:
    """Sums over rows left out."""
    require_rows(client, "leaving rows out")
    if drawn["posterior"].attrs.get("fedppl_point_estimate") or client.pymc_model().potentials:
        raise ValueError("no rows are left out of point estimates or potentials")
    densities = more(client, idata.as_dataset(drawn["posterior"]), ("log_likelihood",), 0)
    return np.array(list(sums_of(rows_of(densities)).values()))


def _conflict(
    algorithm: AnyAlgorithm, declaration: FederatedModel, client: ClientModel, message: Message, seed: int
) -> Array:
    """P-value and statistic, where the final message has q without the client."""
    concludes = algorithm.disclosure.concludes
    if concludes is None or knows_cavities(algorithm) is None:
        raise ValueError(f"{algorithm.name} has no posterior of the shared variables without each client")
    ((_, cavity),) = concludes(client.layout, message).targets
    rng = stream((seed, 4, *client.client_id.encode()))
    others = WithoutClient(cavity, None, LogEvidence(np.nan, np.nan))
    return np.array(tested(declaration, client, others, FEWEST, rng))


def read_told(arrays: Message) -> Message:
    """What a site told, or `Malformed`."""
    for name, value in arrays.items():
        require(name in _LENGTHS, f"{name!r}, expected one of {sorted(_LENGTHS)}")
        require(value.shape == (_LENGTHS[name],), f"{name!r} has shape {value.shape}, expected {(_LENGTHS[name],)}")
        require(bool(np.all(np.isfinite(value))), f"{name!r} is not finite")
    if "loo" in arrays:
        reason = implausible(np.asarray(arrays["loo"], dtype=float))
        require(reason is None, f"'loo': {reason}")
    if "conflict" in arrays:
        require(0 < arrays["conflict"][0] <= 1, f"'conflict' has the p-value {arrays['conflict'][0]}")
    return {name: np.asarray(value, dtype=float) for name, value in arrays.items()}
