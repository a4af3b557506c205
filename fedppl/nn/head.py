r"""A network's last layer: its features, its outputs and its slopes.

.. math:: f(x; v, \theta) = V z(x; \theta) + c, \qquad v = (V, c)

The outputs are linear in the head's weights v, so that the features z are computed once for all of its steps.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedppl.nn.functional import Places, by_parts, call, reason
from fedppl.nn.likelihood import Likelihood
from fedppl.nn.unit import NetworkUnit
from fedppl.types import Array, DeclarationError

_LOOKED_AT = 3


class Head(NamedTuple):
    """The last layer: a linear one."""

    layer: str
    places: Places  # of its weights in w, (d,)
    below: Places  # of all other weights
    matrix: slice  # of V, raveled, in these
    offset: slice  # of c in these; empty without one
    outputs: int


def head_of(unit: NetworkUnit, names: tuple[str, ...]) -> Head:
    """The layer that has these parameters, a linear one whose output is the network's; checked once a network."""
    if names in unit.heads:
        return cast(Head, unit.heads[names])
    if unit.declared.unknowns:
        unknown = list(unit.declared.unknowns)
        raise DeclarationError(f"{unknown} of the likelihood are unknown; declare constants, or use fedppl.nn.FedSI.")
    places, owners = unit.places(names), {name.rpartition(".")[0] for name in names}
    layer = next(iter(owners))
    module = unit.net.get_submodule(layer) if len(owners) == 1 else None
    if not isinstance(module, nn.Linear) or len(names) != len(list(module.parameters())):
        raise DeclarationError(
            f"head={names!r} must be all parameters of one torch.nn.Linear; the network has {list(unit.names)}."
        )
    size, w, X = module.weight.numel(), unit.initial, unit.X[:_LOOKED_AT]
    below = np.setdiff1d(np.arange(unit.size), places)
    head = Head(layer, places, below, slice(0, size), slice(size, len(places)), module.out_features)
    v, ours, why = unit.tensor(w[places], torch.float64), None, ""
    with torch.no_grad():
        output = call(unit.net, unit.state(w, torch.float64), unit.tensor(X, torch.float64))
        try:
            z = features(unit, head, w, X=X, dtype=torch.float64)
            ours = logits(head, z[None], v[None, None])[0, 0].mT
        except Exception as error:  # each network has exceptions of its own
            why = f" ({reason(error)})"
    if ours is None or output.shape != ours.shape or not torch.allclose(output, ours, rtol=1e-9, atol=1e-9):
        raise DeclarationError(
            f"head={names!r} is not the network's last layer, or cannot be taken off it{why}. Name the linear layer "
            "that forward calls last, once, on a matrix, and leave a softmax to the likelihood (logit_p=)."
        )
    unit.heads[names] = head
    return head


def without_head(net: nn.Module, head: Head) -> nn.Module:
    """Remove the head from this module, which then gives features (n, h)."""
    if not head.layer:
        return nn.Identity()
    above, _, name = head.layer.rpartition(".")
    setattr(net.get_submodule(above), name, nn.Identity())
    return net


def features(
    unit: NetworkUnit, head: Head, w: Array, *, X: Array | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The head's inputs (n, h) for the client's rows, or for X."""
    body = without_head(copy.deepcopy(unit.net), head)
    own = {name for name, _ in (*body.named_parameters(), *body.named_buffers())}
    state = {name: value for name, value in unit.state(w, dtype).items() if name in own}
    with torch.no_grad():
        return by_parts(body, lambda rows: call(body, state, rows), unit.tensor(unit.X if X is None else X, dtype))


def expected_loss(unit: NetworkUnit, head: Head, z: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Mean negative log likelihood over rows and over the draws v (S, d)."""
    return unit.likelihood.each_last(logits(head, z[None], v[None])[0], y.expand(len(v), *y.shape)).mean()


# Heads of K clients on their features z (K, n, h), at S draws v (K, S, d) of each -------------------------------------


def logits(head: Head, z: Tensor, v: Tensor) -> Tensor:
    """Outputs (K, S, C, n), by one product of matrices a client; rows last, which is fastest."""
    clients, draws = v.shape[:2]
    matrix = v[:, :, head.matrix].reshape(clients, draws * head.outputs, -1)
    output = torch.bmm(matrix, z.mT).view(clients, draws, head.outputs, z.shape[1])
    return output + v[:, :, head.offset, None] if head.offset.stop > head.offset.start else output


def head_slopes(likelihood: Likelihood, head: Head, z: Tensor, y: Tensor, share: Tensor, v: Tensor) -> Tensor:
    """Gradients (K, S, d) of clients' mean losses, the losses' slopes times the features; each row has its `share`."""
    output = logits(head, z, v)
    residuals = likelihood.slopes_last(output.flatten(0, 1), of_draws(y, v.shape[1])).view(output.shape)
    # Rows after a client's last have weight 0, even where the density of their outcome is not finite.
    residuals = torch.where(share[:, None, None] > 0, residuals * share[:, None, None], 0.0)
    slopes = torch.bmm(residuals.view(len(z), -1, z.shape[1]), z).view(len(z), v.shape[1], -1)
    return torch.cat([slopes, residuals.sum(3)], 2) if head.offset.stop > head.offset.start else slopes


def of_draws(y: Tensor, draws: int) -> Tensor:
    """Outcomes (K, n, ...) of each client for each of its draws, (K S, n, ...)."""
    return y[:, None].expand(-1, draws, *y.shape[1:]).flatten(0, 1)
