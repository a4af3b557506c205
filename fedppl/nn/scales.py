"""Inputs and outcomes whose size the steps of training are not made for, and inputs that no training can take."""

from __future__ import annotations

import logging

import numpy as np
import torch

from fedppl.model.client import ClientModel
from fedppl.nn.calls import kind_of
from fedppl.nn.unit import NetworkUnit
from fedppl.types import Array, DataError

logger = logging.getLogger(__name__)
_LARGE = 30.0  # root mean square of a column; of unit scale about 1
_ABOUT_OUTPUTS = ("normal", "t", "laplace", "logistic", "cauchy")  # outcomes of the outputs' own size


def require_inputs(client_id: str, X: Array) -> None:
    """Refuse inputs that are infinite in single precision: a layer that saturates has an output, and no slopes."""
    if X.dtype.kind != "f":
        return
    beyond = ~(np.abs(X) <= np.finfo(np.float32).max)
    if np.any(beyond):
        place = tuple(int(i) for i in np.argwhere(beyond)[0])
        raise DataError(
            f"client {client_id!r}: the network's inputs hold {X[place]} in row {place[0]}, at index {place}, and "
            "networks are trained in single precision, whose numbers end at 3.4e38; drop or impute such rows, or "
            "scale the inputs."
        )


def warn_of_scales(client: ClientModel, unit: NetworkUnit) -> bool:
    """Say in the log which of a client's numbers are far from unit scale, and whether any are."""
    far = []
    indices = any(isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) for part in unit.net.modules())
    if not indices and (size := _size(unit.X)) > _LARGE:
        far.append(f"the network's inputs ({size:.3g})")
    model = client.template.parts.model
    observed = model.observed_RVs[0]
    value = model.rvs_to_values[observed]
    if kind_of(observed) in _ABOUT_OUTPUTS and value in client.template.parts.data:
        if (size := _size(np.asarray(client.arrays[value.name]))) > _LARGE:
            far.append(f"the outcomes {value.name!r} ({size:.3g})")
    if far:
        logger.warning(
            "client %s: %s: the root mean square of the largest column is far from 1, for which the steps of networks "
            "are made, and a fit may end before it is anywhere near; bring inputs and outcomes to mean 0 and unit "
            "scale by constants that all clients agree on",
            client.client_id,
            " and ".join(far),
        )
    return bool(far)


def _size(values: Array) -> float:
    """The largest root mean square of a column; 0 where there are none, or where they are not finite."""
    columns = np.abs(np.asarray(values, dtype=float)).reshape(len(values), -1) if np.ndim(values) else np.zeros((0, 0))
    largest = float(np.max(columns, initial=0.0))
    if not np.isfinite(largest) or largest == 0.0:
        return 0.0
    return largest * float(np.sqrt(np.max(np.mean((columns / largest) ** 2, axis=0))))
