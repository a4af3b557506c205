"""Unknowns of a network's likelihood, an sd or cut points: parameters of the module, and outputs beside its own.

An unknown takes part in training as a weight does, whatever the algorithm: it is an output of every row that depends on
no input.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedppl.types import Array, DeclarationError

_NAMES = "fedppl_unknowns"


def with_unknowns(net: torch.nn.Module, starts: Mapping[str, Array], who: str) -> torch.nn.Module:
    """Copy a network whose output has columns for these unknowns, (n, C + e), and that has them as parameters.

    Raises
    ------
    DeclarationError
        For a name that the module cannot have for a parameter.
    """
    if not starts:
        return net
    found = copy.deepcopy(net)
    for name, start in starts.items():
        if "." in name or hasattr(found, name):
            raise DeclarationError(f"{who}: {name!r} is a name of the network's own; call the variable something else.")
        value = torch.from_numpy(np.array(start, dtype=float)).to(torch.get_default_dtype())
        found.register_parameter(name, torch.nn.Parameter(value))
    setattr(found, _NAMES, tuple(starts))
    found.register_forward_hook(_beside)
    return found


def _beside(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    """Outputs of each row, and the unknowns after them."""
    rows = output.reshape(len(output), -1)
    values = torch.cat([getattr(module, name).reshape(-1) for name in getattr(module, _NAMES)])
    return torch.cat([rows, values.to(rows.dtype).expand(len(rows), -1)], dim=1)
