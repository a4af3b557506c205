r"""Losses of a network's outcomes as they are declared, whatever the distribution, with slopes and curvatures.

.. math:: \ell_n(f_n, e) = -\log p(y_n \mid f_n, e), \qquad
          \Lambda_n = \partial^2 \ell_n / \partial f_n\, \partial f_n^\top

PyTensor computes a row by itself, as if the client had no other, and then all rows at once; that rows do not depend on
each other is so by construction (`fedppl.nn.outcome`), and that the declared density is their sum is checked at
every client.
Unknowns e of the likelihood, the sd of a normal outcome for example, stand beside the outputs of each row.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import torch
from pymc.distributions.moments import mean as mean_of
from pymc.exceptions import UndefinedMomentException
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.type import RandomType

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.nn.devices import host, tensor
from fedppl.nn.functional import one_call
from fedppl.types import Array, DataError, LocalFailure

_BENT = 1e-8  # share of the largest eigenvalue below 0 that is rounding
_FLAT = 1e-12  # share of other rows' curvature that is none
_DRAWS = 128  # of outcomes, for an expectation


class Read(NamedTuple):
    """What the likelihood of a row is computed from, beside the outputs: by name, with its shape and type."""

    name: str  # of a container; of the observed variable where its values are no data
    shape: tuple[int, ...]  # of one row
    dtype: str
    is_outcome: bool  # what is observed, as it is
    by_row: bool = True  # or one number for all rows of the client

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return int(np.prod(self.shape, dtype=int))


@dataclass(frozen=True, eq=False)
class Declared:
    """A likelihood that is computed from its declaration; see `fedppl.nn.likelihood.Likelihood`."""

    kind: str  # the distribution, as PyTensor names it
    outputs: int  # how many outputs the network has, C
    read: tuple[Read, ...]  # what stands in the columns of `y`
    # outputs with unknowns (n, C + e) and columns (n, q) to losses (n,) and their slopes (n, C + e)
    losses: Callable[[Array, Array], tuple[Array, Array]]
    curvatures: Callable[[Array, Array], Array]  # the same to Λ, (n, C, C)
    drawn: Callable[[], Drawn]  # draws of outcomes, and their means; built at the first call
    may_bend: ClassVar[bool] = True

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Columns (n, q), as exact as they are: a count may be larger than single precision tells apart.

        They stay with PyTensor, on the host.
        """
        return torch.from_numpy(np.array(y, dtype=float))

    def mean(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean loss."""
        return self.each(output, y).mean()

    def each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Losses (n,), which torch can follow to the outputs."""
        found: torch.Tensor = _Losses.apply(output.reshape(len(output), -1), y, self.losses)  # type: ignore[no-untyped-call]
        return found

    def each_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Losses (K, n) of outputs (K, C, n)."""
        return self.each(output.mT.flatten(0, 1), y.flatten(0, 1)).view(len(output), -1)

    def slopes_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """∂ℓ/∂f of outputs (K, C, n)."""
        rows = output.mT.flatten(0, 1)
        _, slopes = self.losses(host(rows), y.flatten(0, 1).numpy())
        return tensor(slopes, output.dtype, output.device).view(len(output), -1, output.shape[1]).mT.contiguous()

    def bends(self, output: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether Λ is not positive semi-definite at some row of the client."""
        values = np.linalg.eigvalsh(self._finite(self.curvatures(host(output), y.numpy())))
        return bool(np.any(values[:, 0] < -_BENT * np.maximum(values[:, -1], 0.0)))

    def root(self, output: torch.Tensor, y: torch.Tensor, *, expected: bool = False) -> torch.Tensor:
        """R (n, C + e, C) with R Rᵀ = Λ; unknowns are points, and have no rows in it.

        Where Λ is nothing at a row though the loss has a slope there, as beside a kink, its expectation over outcomes
        stands in for it; where it is `expected`, at all rows.

        Raises `LocalFailure` where it is not finite, or has no expectation that can be computed.
        """
        outputs, told = host(output), y.numpy()
        if expected:
            curved = self._expected(outputs, told)
        else:
            curved = self._finite(self.curvatures(outputs, told))
            slopes = np.abs(self.losses(outputs, told)[1][:, : self.outputs]).max(axis=1, initial=0.0)
            most = np.abs(curved).max(axis=(1, 2), initial=0.0)
            flat = (most <= _FLAT * most.max(initial=0.0)) & (slopes > _FLAT * slopes.max(initial=0.0))
            if np.any(flat):
                curved[flat] = self._expected(outputs[flat], told[flat])
        values, vectors = np.linalg.eigh(curved)
        root = np.zeros((*output.shape, values.shape[1]))
        root[:, : self.outputs] = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
        return tensor(root, output.dtype, output.device)

    def _finite(self, curved: Array) -> Array:
        if not np.all(np.isfinite(curved)):
            raise LocalFailure(f"the curvature of the outcome's density ({self.kind}) is not finite at the weights")
        return curved

    def _expected(self, outputs: Array, y: Array) -> Array:
        """E[g gᵀ] over outcomes at these outputs, which is E[Λ]; g is the slope of the loss."""
        place = next((place for place, what in enumerate(self.read) if what.is_outcome), None)
        if place is None:
            raise LocalFailure(
                f"the log density of the outcome ({self.kind}) bends upwards or has a kink in the network's output, "
                "and outcomes that are computed from data cannot be drawn; give data that are observed as they are, or "
                "take an algorithm of points, such as fedppl.nn.FedAvg"
            )
        arrays, names = self.arrays(y), [what.name for what in self.read]
        # Other rows have other draws, and the same ones the same, whatever chunk they are in.
        rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(outputs).tobytes()))
        total = np.zeros((len(outputs), self.outputs, self.outputs))
        for _ in range(_DRAWS):
            try:
                arrays[place] = self.drawn().draw(outputs, dict(zip(names, arrays, strict=True)), rng)
            except Exception as error:
                raise LocalFailure(
                    f"the log density of the outcome ({self.kind}) bends upwards or has a kink in the network's "
                    f"output, and outcomes of it cannot be drawn ({type(error).__name__}); declare a distribution that "
                    "can be drawn from (random= of pm.CustomDist), or take an algorithm of points, such as "
                    "fedppl.nn.FedAvg"
                ) from error
            slopes = self.losses(outputs, beside(arrays, len(y)))[1][:, : self.outputs]
            total += slopes[:, :, None] * slopes[:, None, :]
        return self._finite(total / _DRAWS)

    def arrays(self, y: Array) -> list[Array]:
        """What stands in the columns, each by itself, (n, ...)."""
        ends = np.cumsum([what.width for what in self.read])[:-1]
        return [
            (part.reshape(len(y), *what.shape) if what.by_row else part[0, 0]).astype(what.dtype)
            for what, part in zip(self.read, np.split(y, ends, axis=1), strict=True)
        ]

    def log_density(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """log p(y | f), all of it."""
        return -float(np.sum(self.losses(host(output.reshape(len(output), -1)), y.numpy())[0]))


class _Losses(torch.autograd.Function):
    """Losses (n,) of rows (n, C + e); each depends on its own row alone."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, y: torch.Tensor, losses: Any) -> torch.Tensor:
        """Compute the losses, and the slopes that `backward` needs."""
        found, slopes = losses(host(output), y.numpy())
        context.save_for_backward(tensor(slopes, output.dtype, output.device))
        return tensor(found, output.dtype, output.device)

    @staticmethod
    def backward(context: Any, upstream: torch.Tensor) -> Any:
        """Slopes of the outputs."""
        (slopes,) = context.saved_tensors
        return slopes * upstream[:, None], None, None


def columns(client_id: str, read: Sequence[Read], arrays: Sequence[Array], rows: int) -> Array:
    """What the likelihood reads of a client's rows, side by side, (n, q).

    Raises `DataError` where an array has not a row for each observation, or rows of another shape than the first
    client's.
    """
    for what, array in zip(read, arrays, strict=True):
        if array.shape != ((rows, *what.shape) if what.by_row else ()):
            raise DataError(
                f"client {client_id!r}: {what.name!r} has shape {array.shape}, and the likelihood of {rows} rows reads "
                f"{(rows, *what.shape)}: one row for each observation, of the same shape at all clients. What is the "
                "same for all clients is a constant of the builder; one number of a client's own is data without axes."
            )
    return beside(arrays, rows)


def beside(arrays: Sequence[Array], rows: int) -> Array:
    """Arrays (n, ...) as columns, (n, q), and numbers () in every row."""
    parts = [np.broadcast_to(one, (rows, *np.shape(one)[1:])).astype(float).reshape(rows, -1) for one in arrays]
    return np.concatenate([np.zeros((rows, 0)), *parts], axis=1)


# Outcomes of a declared network at outputs that it may have: draws of them, and their means ---------------------------


class Drawn(NamedTuple):
    """Functions of outputs with unknowns (n, C + e), and of what else the likelihood reads, by name."""

    draw: Callable[[Array, Mapping[str, Array], np.random.Generator], Array]  # outcomes (n, ...)
    # Means (n, ...), or probabilities (n, classes) of a categorical one; None where PyMC knows none, or there is none.
    mean: Callable[[Array, Mapping[str, Array]], Array] | None
    has_moments: bool  # a Cauchy's outcomes have no mean and no sd: those of draws are of the draws alone


def drawn(
    parts: _graph.Parts,
    wide: tuple[int, ...],
    unknowns: Mapping[Any, tuple[int, ...]],
    outcomes: Mapping[Any, tuple[int, ...]],
) -> Drawn:
    """Build the functions, of outputs of which a row is so `wide`.

    `unknowns` are free variables of the likelihood with the shapes of their values, `outcomes` containers with the
    shape of a row: PyMC reads off them how many there are to draw.
    """
    model = parts.model
    observed = model.observed_RVs[0]
    both = pt.matrix("both")
    count = int(np.prod(wide, dtype=int))
    given = {v: pt.TensorType(v.type.dtype, shape=(None,) * v.type.ndim)(v.name) for v in parts.data}
    means, has_moments = _mean(observed)
    wanted = [observed, *([] if means is None else [means])]
    output = both[:, :count].reshape((both.shape[0], *wide))
    replace: dict[Any, Any] = dict.fromkeys(one_call(wanted), output)
    for container, shape in outcomes.items():
        if container in given:
            replace[container] = pt.zeros((both.shape[0], *shape), dtype=container.type.dtype)
    for name, length in _graph.lengths(model).items():
        is_rows = parts.open.get(name) is not None
        replace[model.dim_lengths[name]] = both.shape[0] if is_rows else pt.constant(np.asarray(length))
    first = count
    for rv, shape in unknowns.items():
        size = int(np.prod(shape, dtype=int))
        piece = both[0, first : first + size].reshape(shape)
        (constrained,) = model.replace_rvs_by_values([rv])
        replace[rv] = clone_replace([constrained], {model.rvs_to_values[rv]: piece}, rebuild_strict=False)[0]
        first += size
    # Calls of the network first: with other containers above them they would no longer be these calls.
    found = clone_replace(clone_replace(wanted, replace, rebuild_strict=False), given, rebuild_strict=False)
    used = [v for v in given if given[v] in set(ancestors(found))]
    inputs = [both, *(given[v] for v in used)]
    names = tuple(v.name for v in used)
    mean = None
    if means is not None:
        compute = interpreted.python_function(inputs, found[1])

        def mean(outputs: Array, others: Mapping[str, Array]) -> Array:
            return np.asarray(compute(outputs, *(others[name] for name in names)))

    return Drawn(_draw(inputs, found[0], names), mean, has_moments)


def _mean(observed: Any) -> tuple[Any, bool]:
    """A graph of the mean, of a categorical outcome its probabilities; and whether there is a mean."""
    if getattr(observed.owner.op, "name", None) == "categorical":
        return observed.owner.op.dist_params(observed.owner)[-1], True
    try:
        return mean_of(observed), True
    except UndefinedMomentException:
        return None, False
    except NotImplementedError:
        return None, True


def _draw(inputs: Sequence[Any], outcome: Any, names: tuple[str, ...]) -> Callable[..., Array]:
    """A function with generators of its own: those of the user's model are left alone."""
    generators = [v for v in ancestors([outcome]) if isinstance(v.type, RandomType) and v.owner is None]
    own = [pytensor.shared(np.random.default_rng(0)) for _ in generators]
    (outcome,) = clone_replace([outcome], dict(zip(generators, own, strict=True)), rebuild_strict=False)
    compute, lock = interpreted.python_function(inputs, outcome), threading.Lock()

    def draw(outputs: Array, others: Mapping[str, Array], rng: np.random.Generator) -> Array:
        with lock:
            for one, child in zip(own, rng.spawn(len(own)), strict=True):
                one.set_value(child)
            return np.asarray(compute(outputs, *(others[name] for name in names)))

    return draw
