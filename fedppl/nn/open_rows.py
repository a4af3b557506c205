"""For which rows a network's units are open: what a site looks at before it answers with weights or their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedppl.nn.devices import host
from fedppl.nn.functional import call, parts_of
from fedppl.nn.unit import NetworkUnit
from fedppl.nn.view import network_of
from fedppl.types import Array


def open_rows(client: Any, phi: Array) -> Array:
    """Slopes (n, units) of a network's outputs, with random signs, in what its layers with weights compute, at φ.

    A unit whose slope is 0 in a row is closed there, and none of its weights moves for that row. Weights can be chosen
    so that a unit is open for one row, and what is trained then holds this row. Beside them stands what linear layers
    are given: weights of an input that is 0 in a row do not move for it either.
    """
    network = client.view(network_of)
    unit, w = network.unit, network.at(phi)
    rng = torch.Generator().manual_seed(0)
    return np.concatenate([_of_part(unit, w, unit.X[rows], rng) for rows in parts_of(unit.net, unit.X.shape)])


def _of_part(unit: NetworkUnit, w: Array, X: Array, rng: torch.Generator) -> Array:
    seen: list[tuple[torch.nn.Module, torch.Tensor]] = []

    inputs: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append((module, output))
        if isinstance(module, torch.nn.Linear):
            inputs.append(given[0].detach())
        return output.clone()  # what comes next may change it in place

    net, state = unit.net, unit.state(w, torch.float64)
    layers = [module for module in net.modules() if any(True for _ in module.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with torch.enable_grad():
            live = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in state.items()}
            output = call(net, live, unit.tensor(X, torch.float64)).reshape(len(X), -1)
            signs = torch.randint(0, 2, output.shape, generator=rng).to(output) * 2.0 - 1.0
            given = [output for _, output in seen]
            slopes = torch.autograd.grad((signs * output).sum(), given, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    found = [
        _by_unit(module, torch.zeros_like(value) if slope is None else slope)
        for (module, value), slope in zip(seen, slopes, strict=True)
    ]
    size = torch.cat(found, dim=1).square().sum(1, keepdim=True).sqrt()
    found += [size * part.reshape(len(part), -1, part.shape[-1]).square().sum(1).sqrt() for part in inputs]
    return np.concatenate([np.asarray(host(part)) for part in found], axis=1)


def _by_unit(module: torch.nn.Module, slope: torch.Tensor) -> torch.Tensor:
    """Size of the slopes of a layer's units in each row, (n, units), over places in an image or a sequence."""
    if slope.ndim > 2 and not isinstance(module, torch.nn.Linear):
        slope = slope.movedim(1, -1)
    return slope.reshape(len(slope), -1, slope.shape[-1]).square().sum(1).sqrt()
