"""Priors of a formula's shared variables: those that it has by default, and a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm

from fedppl.types import DeclarationError


@dataclass(frozen=True, eq=False, init=False)
class Prior:
    """A distribution of PyMC by its name and parameters, as Bambi has them.

    Parameters
    ----------
    name
        Name of a distribution of PyMC, such as "Laplace".
    parameters
        Its parameters, numbers or arrays; also what PyMC takes beside them, such as ``default_transform``.

    Raises
    ------
    DeclarationError
        If PyMC has no such distribution.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.Prior("Normal", mu=0, sigma=2.5)
    Normal(mu=0, sigma=2.5)
    """

    name: str
    parameters: Mapping[str, Any]

    def __init__(self, name: str, **parameters: Any) -> None:
        found = getattr(pm, name, None) if isinstance(name, str) else None
        if not (isinstance(found, type) and issubclass(found, pm.Distribution)):
            raise DeclarationError(f"Prior({name!r}): PyMC has no distribution of this name; pass one like 'Normal'.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parameters", dict(parameters))

    def __repr__(self) -> str:
        """The distribution as it would be written in PyMC."""
        return f"{self.name}({', '.join(f'{k}={_shown(v)}' for k, v in self.parameters.items())})"

    def with_(self, **parameters: Any) -> Prior:
        """The same with other parameters."""
        return Prior(self.name, **{**self.parameters, **parameters})

    def declared(self, name: str, **more: Any) -> Any:
        """A variable of this prior in the model that is open."""
        return getattr(pm, self.name)(name, **self.parameters, **more)

    def distribution(self, **more: Any) -> Any:
        """The distribution alone."""
        return getattr(pm, self.name).dist(**self.parameters, **more)


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray | list):
        return "[" + ", ".join(f"{one:.3g}" for one in np.ravel(value)) + "]"
    if isinstance(value, float | np.floating):
        return f"{value:.3g}"
    return repr(value) if isinstance(value, int | str | bool) else type(value).__name__
