"""Copies of a fit: what it found is copied, what was compiled is shared; to another process it goes by a file."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, TypeVar

F = TypeVar("F")

# The declaration, compiled models and pure functions are the same for all copies.
_SHARED = ("algorithm", "declaration", "clients", "reader")


def shallow(fit: F) -> F:
    """Another fit of the same parts."""
    made = object.__new__(type(fit))
    made.__dict__.update(fit.__dict__)
    return made


def deep(fit: F, memo: dict[int, Any]) -> F:
    """Another fit whose state, records and draws are its own."""
    made = memo[id(fit)] = shallow(fit)
    made.__dict__.update({name: copy.deepcopy(v, memo) for name, v in vars(fit).items() if name not in _SHARED})
    return made


def refuse(fit: Any) -> NoReturn:
    """Say how a fit gets to another process."""
    raise TypeError(
        "a Fit holds compiled functions and cannot be pickled: write it by fit.save('run.nc'), and read it in another "
        "process by fedppl.load('run.nc', model)"
    )
