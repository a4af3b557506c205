"""What a site tells of its rows when a run is over, by its policy: for `loo`, `reliability` and `conflict`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedppl.contracts import AnyAlgorithm, LogEvidence
from fedppl.contracts.algorithm import WithoutClient
from fedppl.flower.decode import require
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.numerics.streams import stream
from fedppl.results import idata, loo, reliability
from fedppl.results.at_client import pymc_groups, require_rows
from fedppl.run.conflicts import FEWEST, knows_cavities, tested
from fedppl.types import Array, Message

logger = logging.getLogger(__name__)

SUMS = {"loo": len(loo.SUMS), "calibration": reliability.LENGTH}  # lengths of those that are sums over rows
_LENGTHS = {**SUMS, "conflict": 2}
MOST_BYTES = 4096  # of all summaries of a site


def tell(
    names: Sequence[str],
    algorithm: AnyAlgorithm,
    declaration: FederatedModel,
    client: ClientModel,
    message: Message,
    drawn: Any,
    seed: int,
) -> Message:
    """Compute the summaries that the policy names; one that fails is left out, and the site's log says why."""
    results: dict[str, Array] = {}
    computed: dict[str, Callable[[], Array]] = {
        "loo": lambda: _loo(client, drawn),
        "calibration": lambda: _calibration(client, drawn),
        "conflict": lambda: _conflict(algorithm, declaration, client, message, seed),
    }
    for name in names:
        try:
            value = computed[name]()
            if not np.all(np.isfinite(value)):
                raise ValueError("it is not finite")
            results[name] = value
        except Exception:  # any part of a user's model may fail; the other summaries are sent all the same
            logger.warning("client %s has no %r to tell", client.client_id, name, exc_info=True)
    return results


def _loo(client: ClientModel, drawn: Any) -> Array:
    """Sums of leave-one-out log densities over rows."""
    require_rows(client, "leaving rows out")
    if drawn["posterior"].attrs.get("fedppl_point_estimate") or client.pymc_model().potentials:
        raise ValueError("no rows are left out of point estimates or potentials")
    densities = pymc_groups(client, idata.as_dataset(drawn["posterior"]), ("log_likelihood",), 0)
    return np.array(loo.sums_of(loo.rows_of(densities)))


def _calibration(client: ClientModel, drawn: Any) -> Array:
    """Rows, predicted probabilities and outcomes by tenths."""
    return reliability.counts_of(client, idata.as_dataset(drawn["posterior"]))


def _conflict(
    algorithm: AnyAlgorithm, declaration: FederatedModel, client: ClientModel, message: Message, seed: int
) -> Array:
    """P-value and statistic, of q without the client, which the final message must hold."""
    concludes = algorithm.disclosure.concludes
    if concludes is None or knows_cavities(algorithm) is None:
        raise ValueError(f"{algorithm.name} has no posterior of the shared variables without each client")
    ((q, cavity),) = concludes(client.layout, message).targets
    if all(np.array_equal(*parts) for parts in zip(q, cavity, strict=True)):
        raise ValueError(f"the final message of {algorithm.name} has no posterior without this client")
    rng = stream((seed, 4, *client.client_id.encode()))
    others = WithoutClient(cavity, None, LogEvidence(np.nan, np.nan))
    return np.array(tested(declaration, client, others, FEWEST, rng))


def read_told(arrays: Message) -> Message:
    """Check the summaries of a site, or sums of them over a cohort, or raise `Malformed`."""
    for name, value in arrays.items():
        require(name in _LENGTHS, f"{name!r}, expected one of {sorted(_LENGTHS)}")
        require(value.shape == (_LENGTHS[name],), f"{name!r} has shape {value.shape}, expected {(_LENGTHS[name],)}")
        require(bool(np.all(np.isfinite(value))), f"{name!r} is not finite")
    checks: Mapping[str, Callable[[Array], str | None]] = {
        "loo": loo.implausible,
        "calibration": reliability.implausible,
        "conflict": lambda pair: None if 0 < pair[0] <= 1 else f"has the p-value {pair[0]}",
    }
    for name, value in arrays.items():
        reason = checks[name](np.asarray(value, dtype=float))
        require(reason is None, f"{name!r}: {reason}")
    return {name: np.asarray(value, dtype=float) for name, value in arrays.items()}
