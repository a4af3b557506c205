"""What a site lets out of its rows when a run is over: for `fedppl.loo` and `fedppl.conflict`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedppl.contracts import AnyAlgorithm
from fedppl.flower.decode import require
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.numerics.streams import stream
from fedppl.results.rows import SUMS, implausible, rows_of, sums_of
from fedppl.run.conflict import FEWEST, tested
from fedppl.types import Message

logger = logging.getLogger(__name__)

_LENGTHS = {"loo": len(SUMS), "conflict": 2}


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
    found = {}
    if "loo" in names:
        if drawn["posterior"].attrs.get("fedppl_point_estimate") or client.pymc_model().potentials:
            logger.warning("client %s: no rows are left out of point estimates or potentials", client.client_id)
        else:
            found["loo"] = np.array(list(sums_of(rows_of(drawn)).values()))
    if "conflict" in names and algorithm.disclosure.asks is not None:
        target = {name: value for name, value in message.items() if name != "points"}
        for _, cavity in algorithm.disclosure.asks(client.layout, target).targets:
            rng = stream((seed, 4, *client.client_id.encode()))
            found["conflict"] = np.array(tested(declaration, client, cavity, FEWEST, rng))
    return {name: value for name, value in found.items() if np.all(np.isfinite(value))}


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
