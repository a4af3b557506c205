"""Priors of a formula's shared variables."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
from pymc.distributions.continuous import PositiveContinuous, UnitContinuous
from pymc.distributions.distribution import Discrete

from fedppl.settings import shown
from fedppl.types import DeclarationError

# Parameters that are positive in all of PyMC's continuous distributions.
_POSITIVE = ("sigma", "tau", "nu", "lam", "b", "beta", "kappa", "s")
_SHAPES = ("shape", "size")
_BESIDE = ("default_transform", "transform", "initval", "dims", "observed", "total_size")  # of a variable


@dataclass(frozen=True, eq=False, init=False)
class Prior:
    """A distribution of PyMC by its name and parameters, as Bambi has them.

    Parameters
    ----------
    name
        Name of a distribution of PyMC, such as "Laplace".
    parameters
        Its parameters, numbers or arrays; also other arguments of PyMC, such as ``default_transform``.

    Raises
    ------
    DeclarationError
        If PyMC has no such distribution, or it has no such parameters.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.Prior("Normal", mu=0, sigma=2.5)
    Normal(mu=0, sigma=2.5)
    """

    name: str
    parameters: Mapping[str, Any]

    def __init__(self, name: str, *values: Any, **parameters: Any) -> None:
        distribution = getattr(pm, name, None) if isinstance(name, str) else None
        if name in ("LKJCholeskyCov", "LKJCorr"):
            raise DeclarationError(
                f"Prior({name!r}): sds and correlations have separate priors; pass "
                '{"site_sd": fedppl.Prior("HalfNormal", sigma=1), "site_partial": fedppl.Prior("Beta", alpha=2, beta=2)'
                "}, the second of (1 + r) / 2 of partial correlations r: for two effects Beta(eta, eta) is LKJ(eta)."
            )
        if not (isinstance(distribution, type) and issubclass(distribution, pm.Distribution)):
            given = getattr(name, "__name__", name)
            raise DeclarationError(f"Prior({given!r}): PyMC has no such distribution; pass a name like 'Normal'.")
        if values:
            example = 'fedppl.Prior("Normal", mu=0, sigma=1)'
            raise DeclarationError(f"Prior({name!r}, ...) takes {list(values)} by name, such as {example}.")
        _require_parameters(name, parameters)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parameters", dict(parameters))

    def __repr__(self) -> str:
        """The distribution as it would be written in PyMC."""
        return f"{self.name}({', '.join(f'{k}={_shown(v)}' for k, v in self.parameters.items())})"

    def with_(self, **parameters: Any) -> Prior:
        """Replace some parameters."""
        return Prior(self.name, **{**self.parameters, **parameters})

    def by_rows(self) -> Prior:
        """Put lists along the first of two dimensions; PyMC broadcasts them along the last."""
        lists = {k: np.asarray(v) for k, v in self.parameters.items() if isinstance(v, list | tuple | np.ndarray)}
        return self.with_(**{k: v[:, None] for k, v in lists.items() if v.ndim == 1})

    @property
    def is_discrete(self) -> bool:
        """Whether its values are whole numbers."""
        return issubclass(getattr(pm, self.name), Discrete)

    @property
    def has_negative(self) -> bool:
        """Whether it may have negative values, by its class and a lower bound."""
        if self.name == "Pareto" or issubclass(getattr(pm, self.name), PositiveContinuous | UnitContinuous):
            return False
        return not np.all(self._bound("lower") >= 0)

    @property
    def is_of_shares(self) -> bool:
        """Whether all its values are between 0 and 1, by its class and its bounds."""
        if issubclass(getattr(pm, self.name), UnitContinuous):
            return True
        low, high = self._bound("lower"), self._bound("upper")
        return bool(np.all(low >= 0) and np.all(high <= 1))

    def _bound(self, name: str) -> Any:
        """A bound, given or PyMC's default; NaN if it is not a number."""
        default = inspect.signature(getattr(pm, self.name).dist).parameters.get(name)
        given = self.parameters.get(name, None if default is None else default.default)
        return np.asarray(given) if _are_numbers(given) and np.asarray(given).dtype.kind in "biuf" else np.nan

    def declared(self, name: str, **more: Any) -> Any:
        """Declare a variable with this prior in the open model."""
        return getattr(pm, self.name)(name, **self.parameters, **more)


def _require_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that are unknown, not numbers, or negative where they must be positive."""
    for key, value in parameters.items():
        numbers = np.asarray(value) if _are_numbers(value) else np.zeros(0)  # PyMC judges other objects
        is_wrong = isinstance(value, str) or numbers.dtype.kind not in "biuf" or bool(np.any(np.isnan(numbers)))
        if is_wrong or (key in _POSITIVE and not np.all(numbers > 0)):
            rule = "positive numbers" if key in _POSITIVE else "numbers"
            raise DeclarationError(
                f"Prior({name!r}, {key}={shown(value)}): {key!r} takes {rule}; give one, or an array."
            )
    low, high = parameters.get("lower"), parameters.get("upper")
    if _are_numbers(low) and _are_numbers(high) and not np.all(np.asarray(low) < np.asarray(high)):
        raise DeclarationError(f"Prior({name!r}, lower={_shown(low)}, upper={_shown(high)}): lower is not below upper.")
    dist = getattr(pm, name).dist
    known = (*inspect.signature(dist).parameters, *_BESIDE, *_SHAPES)  # PyMC before 6 refuses others itself
    if unknown := [key for key in parameters if key not in known]:
        raise DeclarationError(f"Prior({name!r}, ...) has no parameter {unknown[0]!r}; see those of pm.{name}.")
    try:
        dist(**{key: value for key, value in parameters.items() if key not in _BESIDE})
    except Exception as error:  # PyMC and PyTensor raise errors of many kinds
        what = f"Prior({name!r}, {', '.join(parameters)}) cannot be made"
        raise DeclarationError(f"{what}: {error}; see the parameters of pm.{name}.") from error


def _are_numbers(value: Any) -> bool:
    return isinstance(value, int | float | list | tuple | np.ndarray | np.number)


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray | list):
        return "[" + ", ".join(f"{number:.3g}" for number in np.ravel(value)) + "]"
    if isinstance(value, float | np.floating):
        return f"{value:.3g}"
    return repr(value) if isinstance(value, int | str | bool) else type(value).__name__
