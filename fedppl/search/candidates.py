"""Every combination of settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedppl.contracts import AnyAlgorithm, LocalInference
from fedppl.numerics.covariance import Covariance
from fedppl.settings import shown
from fedppl.types import DeclarationError


def grid(build: Callable[..., AnyAlgorithm], **values: Sequence[Any]) -> dict[str, AnyAlgorithm]:
    """Every combination of settings, by name.

    Parameters
    ----------
    build
        Function that builds an algorithm, such as `fedppl.FedAvg` or a ``functools.partial`` of it with what is common.
    **values
        A list of values for each setting that varies.

    Returns
    -------
    dict
        Name to algorithm, the last setting varying fastest.

    Raises
    ------
    DeclarationError
        If a setting has no list of values, or two candidates would have one name.

    Examples
    --------
    >>> import fedppl
    >>> list(fedppl.grid(fedppl.FedAvg, learning_rate=[0.01, 0.1], steps=[20]))
    ['learning_rate=0.01, steps=20', 'learning_rate=0.1, steps=20']

    Notes
    -----
    *When this fails.* Every candidate is a fit: three settings of five values each are 125 of them.
    """
    if not callable(build):
        raise DeclarationError(
            f"build={shown(build)} is no function; pass one that builds, as in grid(fedppl.EP, ...)."
        )
    if not values:
        raise DeclarationError("no settings: name one or more with a list of values each, as in learning_rate=[...].")
    for name, choices in values.items():
        if isinstance(choices, str) or not isinstance(choices, Sequence | np.ndarray) or len(choices) == 0:
            raise DeclarationError(f"{name}={choices!r} is no list of values; pass one or more, as in {name}=[...].")
    candidates: dict[str, AnyAlgorithm] = {}
    for combination in itertools.product(*values.values()):
        settings = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in zip(values, combination, strict=True)
        }
        label = ", ".join(f"{name}={_text(value)}" for name, value in settings.items())
        if label in candidates:
            raise DeclarationError(f"two candidates are called {label!r}; list every value once.")
        candidates[label] = build(**settings)
    return candidates


def _text(value: Any) -> str:
    """A setting in a candidate's name."""
    if isinstance(value, LocalInference | Covariance):
        return value.describe()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
