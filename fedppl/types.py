"""Messages, layouts, statuses and errors.

NumPy only. Nothing here knows PyMC, ArviZ, torch or an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # it takes LAPACK, which a process that only passes messages on does not need
    from fedppl.gaussian import Gaussian

Array = NDArray[np.float64]
Message = Mapping[str, NDArray[Any]]
Rng = np.random.Generator


class DeclarationError(ValueError):
    """The model, the shared names or the settings cannot be used as declared."""


class DataError(ValueError):
    """A client's data cannot be used with the declared model."""


class LocalFailure(RuntimeError):
    """A client could not compute its reply. It keeps its old site, and the loop records why."""


class ConvergenceWarning(UserWarning):
    """A fit by an algorithm that tests for convergence has not converged; the text names the remedy.

    Attributes
    ----------
    fit
        The fit: where warnings are errors, ``except fedppl.ConvergenceWarning as warning`` has it as ``warning.fit``.
    """

    def __init__(self, text: str = "", fit: Any = None) -> None:
        super().__init__(text)
        self.fit = fit


class NotConvergedError(RuntimeError):
    """A fit was interrupted before it had a result; the text names the remedy."""


class Status(StrEnum):
    """The status of a fit. A fit that has not converged warns and is returned all the same."""

    RUNNING = "running"
    CONVERGED = "converged"
    MAX_ROUNDS = "max_rounds"
    STALLED = "stalled"
    INTERRUPTED = "interrupted"

    @property
    def ok(self) -> bool:
        """Whether the fit has converged."""
        return self is Status.CONVERGED


class Variable(NamedTuple):
    """A variable and its place in a flat unconstrained vector."""

    name: str
    shape: tuple[int, ...]
    transform: str
    dims: tuple[str, ...] | None
    binary: bool = False  # a 0/1 indicator, for algorithms with `Needs(indicators=True)`

    @property
    def size(self) -> int:
        """Number of unconstrained coordinates."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """Names, shapes, transforms and prior of the shared parameters: all that a server knows of the model.

    Attributes
    ----------
    variables
        The shared variables in the order of the flat unconstrained vector.
    prior
        Gaussian N_0 on the unconstrained space, exact when `prior_is_gaussian`.
    prior_is_gaussian
        Whether the declared shared prior *is* `prior`. If not, every client's factor carries
        (p(φ) / N_0(φ))^(1/K), so that the product of all factors is unchanged.
    fingerprint
        Digest of all of the above and of `density`. Clients whose fingerprints differ are refused.
    density
        log p(φ) at three points about N_0, and a sum of log |value| there of variables with limits, which tell
        priors with the same N_0 apart.
    """

    variables: tuple[Variable, ...]
    prior: Gaussian
    prior_is_gaussian: bool
    fingerprint: str
    density: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Number of shared unconstrained coordinates, m."""
        return sum(variable.size for variable in self.variables)

    @property
    def binary(self) -> tuple[str, ...]:
        """Names of the shared variables that are 0/1 indicators; `prior` has their means and variances."""
        return tuple(variable.name for variable in self.variables if variable.binary)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each variable lies in the flat vector."""
        slices, start = {}, 0
        for variable in self.variables:
            slices[variable.name] = slice(start, start + variable.size)
            start += variable.size
        return slices

    @property
    def labels(self) -> tuple[str, ...]:
        """One label per coordinate, for example ``mu[0]`` or ``tau_log__[1]``."""
        return coordinate_labels(self.variables)


SDS_AND_PARTIALS = "sds-and-partials"  # transform of a covariance's root to log sds and partial correlations


def as_declared(label: str) -> str:
    """A coordinate's label by the name that its variable was declared with, for messages.

    >>> as_declared("tau_log__[1]"), as_declared("mu[0]")
    ('tau[1]', 'mu[0]')
    """
    name, bracket, place = label.partition("[")
    if name.endswith("__"):
        name = name[:-2].rpartition("_")[0]
    return name + bracket + place


def coordinate_labels(variables: Sequence[Variable]) -> tuple[str, ...]:
    """Label every coordinate of a flat unconstrained vector."""
    labels: list[str] = []
    for variable in variables:
        name = f"{variable.name}_{variable.transform}__" if variable.transform else variable.name
        if variable.transform == SDS_AND_PARTIALS:
            sds = {(k + 1) * (k + 2) // 2 - 1 for k in range(variable.size)}  # on the diagonal of a packed triangle
            labels.extend(f"{variable.name}_{'log' if k in sds else 'partial'}__[{k}]" for k in range(variable.size))
        elif variable.shape == ():
            labels.append(name)
        else:
            labels.extend(f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(*variable.shape))
    return tuple(labels)
