"""Clients without PyMC: a regression with random coefficients, whose log density is one jitted kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numba
import numpy as np

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.model.compiled import pack
from fedppl.numerics.pairs import PACKED
from fedppl.numerics.prior import SharedPrior
from fedppl.types import Array, Layout, Variable, coordinate_labels

__all__ = ["FakeClient", "clients"]

T = TypeVar("T")
SHARED = (Variable("mu", (2,), "", ("predictor",)), Variable("a", (), "", None))
LOCAL = (Variable("beta", (2,), "", ("predictor",)),)
UNIT = Gaussian(np.zeros(3), np.eye(3))


@functools.cache
def kernel() -> Callable[..., Any]:
    """log N(y; a + Xβ, 1) + log N(β; μ, ½²) and its gradient, at x = (μ, a, β)."""

    def density(x, reals, integers, where):  # type: ignore[no-untyped-def]
        X = reals[where[0] : where[1]].reshape((where[2], where[3]))
        y = reals[where[4] : where[5]]
        found = np.zeros(6)
        found[0] = np.log(4.0) - (0.5 * len(y) + 1.0) * np.log(2.0 * np.pi)
        for j in range(2):
            off = x[3 + j] - x[j]
            found[0] -= 2.0 * off**2
            found[1 + j] += 4.0 * off
            found[4 + j] -= 4.0 * off
        for i in range(len(y)):
            rest = y[i] - x[2]
            for j in range(2):
                rest -= X[i, j] * x[3 + j]
            found[0] -= 0.5 * rest**2
            found[3] += rest
            for j in range(2):
                found[4 + j] += rest * X[i, j]
        return found

    compiled: Callable[..., Any] = numba.njit(PACKED, nogil=True, cache=True)(density)
    return compiled


@functools.cache
def value_kernel() -> Callable[..., Any]:
    """The log density alone."""
    both = kernel()

    def density(x, reals, integers, where):  # type: ignore[no-untyped-def]
        return both(x, reals, integers, where)[:1]

    compiled: Callable[..., Any] = numba.njit(PACKED, nogil=True)(density)
    return compiled


def layout_of(prior: Gaussian) -> Layout:
    """φ = (μ, a) with a Gaussian prior."""
    return Layout(SHARED, prior, True, "fake")


def prior_of(prior: Gaussian) -> SharedPrior:
    """The same prior as clients have it."""
    return SharedPrior(
        log_density=lambda phi: gaussian.log_kernel(prior, phi),
        gradients=lambda phi: prior.linear - phi @ prior.precision,
        gaussian=prior,
        is_gaussian=True,
    )


@dataclass(frozen=True, eq=False)
class FakeClient:
    """A `fedppl.contracts.ClientView` of y ~ N(a + Xβ, 1), β ~ N(μ, ½²); the prior of (μ, a) is given."""

    client_id: str
    arrays: Mapping[str, Array]
    layout: Layout = field(default_factory=lambda: layout_of(UNIT))
    local: tuple[Variable, ...] = LOCAL
    kink: str | None = None
    has_proper_prior: bool = True
    prior: SharedPrior = field(default_factory=lambda: prior_of(UNIT))
    _views: dict[Any, Any] = field(default_factory=dict)

    @property
    def local_labels(self) -> tuple[str, ...]:
        return coordinate_labels(self.local)

    @property
    def shared_size(self) -> int:
        return self.layout.size

    @property
    def local_size(self) -> int:
        return 2

    @property
    def initial(self) -> Array:
        return np.zeros(2)

    @property
    def rows(self) -> int:
        return len(self.arrays["y"])

    @property
    def kernel(self) -> Callable[..., Any]:
        return kernel()

    @property
    def value_kernel(self) -> Callable[..., Any]:
        return value_kernel()

    @property
    def packed(self) -> tuple[Any, Any, Any]:
        return self.batch(slice(None))

    def log_site(self, phi: Array, theta: Array) -> tuple[float, Array, Array]:
        found = self.kernel(np.concatenate([phi, theta]), *self.packed)
        return float(found[0]), found[1:4], found[4:]

    def batch(self, rows: Any) -> tuple[Any, Any, Any]:
        return pack([self.arrays["X"][rows], self.arrays["y"][rows]])

    def batches(self, rows: Any) -> tuple[Any, Any, Any]:
        many, size = rows.shape
        reals, integers, _ = self.batch(rows.ravel())
        first, second = 2 * size * np.arange(many), size * np.arange(many) + 2 * rows.size
        each = np.full(many, size)
        where = np.column_stack([first, first + 2 * size, each, np.full(many, 2), second, second + size, each])
        return reals, integers, where

    def constrain(self, phi: Array, theta: Array) -> dict[str, Array]:
        del phi
        return {"beta": np.atleast_2d(theta)}

    def view(self, read: Callable[[Any], T]) -> T:
        if read not in self._views:
            self._views[read] = read(self)
        found: T = self._views[read]
        return found


@functools.cache
def clients(count: int = 4, *, seed: int = 3, prior: str = "declared") -> dict[str, FakeClient]:
    """The clients of `problems.regression`, of 5, 8, 11, ... rows; their prior is the declared one, or N(0, I)."""
    rng, found = np.random.default_rng(seed), {}
    shared = Gaussian(np.zeros(3), np.diag([1 / 9, 1 / 9, 1 / 4])) if prior == "declared" else UNIT
    one = FakeClient("", {}, layout_of(shared), prior=prior_of(shared))
    for k in range(count):
        X = rng.normal(size=(5 + 3 * k, 2))
        beta = np.array([1.0, -2.0]) + 0.5 * rng.normal(size=2)
        arrays = {"X": X, "y": 0.5 + X @ beta + rng.normal(size=len(X))}
        found[f"clinic {k}"] = dataclasses.replace(one, client_id=f"clinic {k}", arrays=arrays, _views={})
    return found
