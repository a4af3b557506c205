"""Whether a network gives the same output when it is asked again, tried on a few rows of a client."""

from __future__ import annotations

import numpy as np
import torch

from fedppl.nn.devices import host
from fedppl.nn.functional import call
from fedppl.nn.unit import NetworkUnit
from fedppl.types import Array, DeclarationError

_LOOKED_AT = 16  # rows


def require_same_again(unit: NetworkUnit, client_id: str) -> None:
    """Refuse a network that draws at random, remembers earlier calls, or writes over its inputs.

    Raises
    ------
    DeclarationError
        Where a second call on the same rows, with the same weights and buffers, has another output.
    """
    X, w = unit.X[:_LOOKED_AT], unit.held + 0.1 * np.random.default_rng(0).normal(size=unit.size)
    net, state = unit.net, unit.state(w, torch.float64)

    def output(rows: torch.Tensor) -> Array:
        with torch.no_grad():
            return host(call(net, state, rows)).copy()

    def rows() -> torch.Tensor:
        return unit.tensor(X.copy(), torch.float64)

    first = output(rows())
    if not _same(first, output(rows())):
        raise DeclarationError(
            f"client {client_id!r}: the network gives another output when it is asked again, so that it is no function "
            "of weights and inputs: it draws at random, as dropout does within recurrent and attention layers, or "
            "remembers earlier calls. Call net.eval() before you declare the model, and take out what still draws."
        )
    kept = rows()
    if not _same(output(kept), output(kept)):
        raise DeclarationError(
            f"client {client_id!r}: the network writes over its inputs, which are a client's data; give its first "
            "layer inplace=False, or begin its forward with x = x.clone()."
        )


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.allclose(one, other, 1e-8, 1e-8, equal_nan=True)
