"""Whether a network is a function of its weights and inputs that training can follow, tried on a few rows."""

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


def require_slopes(unit: NetworkUnit, client_id: str) -> None:
    """Refuse a network of which no weight changes the output by a slope: no step would move any.

    Raises
    ------
    DeclarationError
        Where slopes of the outputs are all 0 or missing, at two points.
    """
    # An unknown sd has a slope whatever becomes of the weights.
    rng, parameters = np.random.default_rng(0), set(unit.names) - set(unit.declared.unknowns)
    if not np.any(unit.X[:_LOOKED_AT]):  # a layer without a constant has no slope there
        return
    X = unit.tensor(unit.X[:_LOOKED_AT].copy(), torch.float64)
    for size in (0.1, 1.0):
        state = unit.state(unit.held + size * rng.normal(size=unit.size), torch.float64)
        leaves = {name: state[name].detach().requires_grad_() for name in parameters & state.keys()}
        with torch.enable_grad():
            output = call(unit.net, state | leaves, X)
        if output.requires_grad:
            weights = unit.tensor(rng.normal(size=tuple(output.shape)), torch.float64)
            slopes = torch.autograd.grad(output, list(leaves.values()), weights.to(output.dtype), allow_unused=True)
            if any(slope is not None and bool(torch.any(slope != 0)) for slope in slopes):
                return
    raise DeclarationError(
        f"client {client_id!r}: the network's output has no slope in any of its weights, so that training would leave "
        "them where they start; take out what cuts slopes off: .detach(), torch.no_grad(), sign, round or argmax."
    )


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.allclose(one, other, 1e-8, 1e-8, equal_nan=True)
