r"""Losses of rows, with their slopes and curvatures: in closed form, or computed from the declared distribution.

.. math:: \ell_n(f_n, e) = -\log p(y_n \mid f_n, e), \qquad
          \Lambda_n = \partial^2 \ell_n / \partial f_n\, \partial f_n^\top

Classes by logits, and normal outcomes of one known sd, are in closed form. For other distributions PyTensor computes
each row as if the client had no other, and then all rows at once. Rows do not depend on each other by construction
(`fedppl.nn.outcome`), and at every client the declared density is compared with their sum. Unknowns e of the
likelihood, such as the sd of a normal outcome, stand beside the outputs of each row.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

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
from fedppl.nn.functional import host, one_call, tensor
from fedppl.types import Array, DataError, LocalFailure


class Likelihood(Protocol):
    """Losses by rows, which may omit constants of a row; `log_density` has them."""

    @property
    def kind(self) -> str:
        """The distribution, as PyTensor names it."""

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Outcomes (n, ...) as the functions below take them, beside outputs of this type on this device."""

    def mean(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean loss of outputs (n, C) at outcomes (n, ...)."""

    def each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Losses (n,)."""

    def each_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Losses (K, n) of outputs (K, C, n), whose rows come last, at outcomes (K, n, ...)."""

    def slopes_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """∂ℓ/∂f of outputs (K, C, n), at outcomes (K, n, ...); it may overwrite its arguments."""

    @property
    def may_bend(self) -> bool:
        """Whether Λ may not be positive semi-definite."""

    def bends(self, output: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether Λ is not so at one of a client's rows, so that its expectation is used at all of them."""

    def root(self, output: torch.Tensor, y: torch.Tensor, *, expected: bool = False) -> torch.Tensor:
        """R (n, C, r) with R Rᵀ = Λ, of outputs (n, C), or of its expectation over outcomes."""

    def log_density(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """log p(y | f) of all rows with its constants."""


@dataclass(frozen=True)
class Categorical:
    """Classes 0 to C − 1, by logits."""

    kind: ClassVar[str] = "categorical"
    may_bend: ClassVar[bool] = False

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Whole numbers."""
        return torch.from_numpy(np.array(y)).long().to(device)

    def mean(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        return torch.nn.functional.cross_entropy(output, y)

    def each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        return torch.nn.functional.cross_entropy(output, y, reduction="none")

    def each_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        return torch.nn.functional.cross_entropy(output, y, reduction="none")

    def slopes_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """p less 1 at the class."""
        slopes = torch.softmax(output, 1)
        classes = y[:, None]
        return slopes.scatter_add_(1, classes, -torch.ones_like(classes, dtype=output.dtype))

    def bends(self, output: torch.Tensor, y: torch.Tensor) -> bool:
        """It is concave in its outputs."""
        return False

    def root(self, output: torch.Tensor, y: torch.Tensor, *, expected: bool = False) -> torch.Tensor:
        """diag(√p) − p √pᵀ."""
        p = torch.softmax(output, dim=1)
        root = p.sqrt()
        return torch.diag_embed(root) - p[:, :, None] * root[:, None, :]

    def log_density(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """See `Likelihood`."""
        return -float(torch.nn.functional.cross_entropy(output, y, reduction="sum"))


@dataclass(frozen=True)
class Normal:
    """Real outcomes (n, C) about the outputs, of one sd."""

    sd: float
    kind: ClassVar[str] = "normal"
    may_bend: ClassVar[bool] = False

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A row (C,) for each row of inputs."""
        return torch.from_numpy(np.array(y)).to(dtype).to(device).reshape(len(y), -1)

    def mean(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        square = (y.view(output.shape) - output) ** 2
        return 0.5 * square.sum() / (len(y) * self.sd**2)

    def each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        square = (y.reshape(output.shape) - output) ** 2
        return square.reshape(len(square), -1).sum(1) * (0.5 / self.sd**2)

    def each_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        square = (y.mT - output) ** 2
        return square.sum(1) * (0.5 / self.sd**2)

    def slopes_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Residuals over the variance."""
        return (output - y.mT) / self.sd**2

    def bends(self, output: torch.Tensor, y: torch.Tensor) -> bool:
        """It is concave in its outputs."""
        return False

    def root(self, output: torch.Tensor, y: torch.Tensor, *, expected: bool = False) -> torch.Tensor:
        """I / σ."""
        eye = torch.eye(output.shape[1], dtype=output.dtype, device=output.device)
        return eye.expand(len(output), -1, -1) / self.sd

    def log_density(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """See `Likelihood`."""
        square = float(((y.view(output.shape) - output) ** 2).sum())
        return -0.5 * square / self.sd**2 - y.numel() * float(np.log(self.sd) + 0.5 * np.log(2 * np.pi))


# Likelihoods that are computed from their declaration -----------------------------------------------------------------

_BENT = 1e-8  # negative eigenvalue, as a share of the largest, that is rounding
_FLAT = 1e-12  # share of the largest curvature below which a row has none
_DRAWS = 128  # of outcomes, for an expectation


class Read(NamedTuple):
    """A variable that the likelihood of a row reads beside the outputs."""

    name: str  # of a container, or of the observed variable where its values are no data
    shape: tuple[int, ...]  # of one row
    dtype: str
    is_outcome: bool  # whether it is the observed outcome, unchanged
    by_row: bool = True  # else one number for all rows of the client

    @property
    def width(self) -> int:
        """Number of numbers in a row."""
        return int(np.prod(self.shape, dtype=int))


@dataclass(frozen=True, eq=False)
class Declared:
    """A likelihood that is computed from its declaration; see `Likelihood`."""

    kind: str  # the distribution, as PyTensor names it
    outputs: int  # number of the network's outputs, C
    read: tuple[Read, ...]  # variables in the columns of `y`
    # outputs with unknowns (n, C + e) and columns (n, q) to losses (n,) and their slopes (n, C + e)
    losses: Callable[[Array, Array], tuple[Array, Array]]
    curvatures: Callable[[Array, Array], Array]  # the same to Λ, (n, C, C)
    drawn: Callable[[], Drawn]  # draws of outcomes, and their means; built at the first call
    may_bend: ClassVar[bool] = True

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Columns (n, q) on the host, in double precision: a count may have more digits than single precision."""
        return torch.from_numpy(np.array(y, dtype=float))

    def mean(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean loss."""
        return self.each(output, y).mean()

    def each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Losses (n,), differentiable by torch in the outputs."""
        losses: torch.Tensor = _Losses.apply(output.reshape(len(output), -1), y, self.losses)  # type: ignore[no-untyped-call]
        return losses

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

        Where Λ is 0 at a row though the loss has a slope there, as beside a kink, its expectation over outcomes
        replaces it; with `expected`, at all rows.

        Raises `LocalFailure` where Λ is not finite, or its expectation cannot be computed.
        """
        outputs, columns = host(output), y.numpy()
        if expected:
            curved = self._expected(outputs, columns)
        else:
            curved = self._finite(self.curvatures(outputs, columns))
            slopes = np.abs(self.losses(outputs, columns)[1][:, : self.outputs]).max(axis=1, initial=0.0)
            most = np.abs(curved).max(axis=(1, 2), initial=0.0)
            flat = (most <= _FLAT * most.max(initial=0.0)) & (slopes > _FLAT * slopes.max(initial=0.0))
            if np.any(flat):
                curved[flat] = self._expected(outputs[flat], columns[flat])
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
        place = next((place for place, variable in enumerate(self.read) if variable.is_outcome), None)
        if place is None:
            raise LocalFailure(
                f"the log density of the outcome ({self.kind}) bends upwards or has a kink in the network's output, "
                "and outcomes that are computed from data cannot be drawn; give data that are observed as they are, or "
                "take an algorithm of points, such as fedppl.nn.FedAvg"
            )
        arrays, names = self.arrays(y), [variable.name for variable in self.read]
        # A row has the same draws in every chunk.
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
        """The variables in the columns, each (n, ...)."""
        ends = np.cumsum([variable.width for variable in self.read])[:-1]
        return [
            (part.reshape(len(y), *variable.shape) if variable.by_row else part[0, 0]).astype(variable.dtype)
            for variable, part in zip(self.read, np.split(y, ends, axis=1), strict=True)
        ]

    def log_density(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """log p(y | f), all of it."""
        return -float(np.sum(self.losses(host(output.reshape(len(output), -1)), y.numpy())[0]))


class _Losses(torch.autograd.Function):
    """Losses (n,) of rows (n, C + e); each depends on its own row alone."""

    @staticmethod
    def forward(context: Any, output: torch.Tensor, y: torch.Tensor, losses: Any) -> torch.Tensor:
        """Compute the losses, and the slopes that `backward` needs."""
        values, slopes = losses(host(output), y.numpy())
        context.save_for_backward(tensor(slopes, output.dtype, output.device))
        return tensor(values, output.dtype, output.device)

    @staticmethod
    def backward(context: Any, upstream: torch.Tensor) -> Any:
        """Slopes of the outputs."""
        (slopes,) = context.saved_tensors
        return slopes * upstream[:, None], None, None


def columns(client_id: str, read: Sequence[Read], arrays: Sequence[Array], rows: int) -> Array:
    """The variables that the likelihood reads of a client's rows, side by side, (n, q).

    Raises `DataError` for an array without one row for each observation, or whose rows differ in shape from the first
    client's.
    """
    for variable, array in zip(read, arrays, strict=True):
        if array.shape != ((rows, *variable.shape) if variable.by_row else ()):
            raise DataError(
                f"client {client_id!r}: {variable.name!r} has shape {array.shape}, and the likelihood of {rows} rows "
                f"reads {(rows, *variable.shape)}: one row for each observation, of the same shape at all clients. "
                "Declare what is the same for all clients as a constant of the builder, and one number of a client as "
                "data without axes."
            )
    return beside(arrays, rows)


def beside(arrays: Sequence[Array], rows: int) -> Array:
    """Arrays (n, ...) as columns, (n, q), and numbers () in every row."""
    parts = [np.broadcast_to(array, (rows, *np.shape(array)[1:])).astype(float).reshape(rows, -1) for array in arrays]
    return np.concatenate([np.zeros((rows, 0)), *parts], axis=1)


# Outcomes of a declared network at given outputs: their draws and their means -----------------------------------------


class Drawn(NamedTuple):
    """Functions of outputs with unknowns (n, C + e), and of the other variables that the likelihood reads, by name."""

    draw: Callable[[Array, Mapping[str, Array], np.random.Generator], Array]  # outcomes (n, ...)
    # Means (n, ...), or probabilities (n, classes) of a categorical outcome; None where PyMC has none.
    mean: Callable[[Array, Mapping[str, Array]], Array] | None
    has_moments: bool  # False of a Cauchy, for example, whose draws have no stable mean and sd


def drawn(
    parts: _graph.Parts,
    row_shape: tuple[int, ...],
    unknowns: Mapping[Any, tuple[int, ...]],
    outcomes: Mapping[Any, tuple[int, ...]],
) -> Drawn:
    """Build the functions, of outputs whose rows have the shape `row_shape`.

    `unknowns` are free variables of the likelihood with the shapes of their values, `outcomes` containers with the
    shape of a row, from which PyMC reads the number of draws.
    """
    model = parts.model
    observed = model.observed_RVs[0]
    extended = pt.matrix("both")
    count = int(np.prod(row_shape, dtype=int))
    containers = {v: pt.TensorType(v.type.dtype, shape=(None,) * v.type.ndim)(v.name) for v in parts.data}
    means, has_moments = _mean(observed)
    targets = [observed, *([] if means is None else [means])]
    output = extended[:, :count].reshape((extended.shape[0], *row_shape))
    replace: dict[Any, Any] = dict.fromkeys(one_call(targets), output)
    for container, shape in outcomes.items():
        if container in containers:
            replace[container] = pt.zeros((extended.shape[0], *shape), dtype=container.type.dtype)
    for name, length in _graph.lengths(model).items():
        is_rows = parts.open.get(name) is not None
        replace[model.dim_lengths[name]] = extended.shape[0] if is_rows else pt.constant(np.asarray(length))
    first = count
    for rv, shape in unknowns.items():
        size = int(np.prod(shape, dtype=int))
        piece = extended[0, first : first + size].reshape(shape)
        (constrained,) = model.replace_rvs_by_values([rv])
        replace[rv] = clone_replace([constrained], {model.rvs_to_values[rv]: piece}, rebuild_strict=False)[0]
        first += size
    # Calls of the network first: other containers above them would make them other calls.
    graphs = clone_replace(clone_replace(targets, replace, rebuild_strict=False), containers, rebuild_strict=False)
    used = [v for v in containers if containers[v] in set(ancestors(graphs))]
    inputs = [extended, *(containers[v] for v in used)]
    names = tuple(v.name for v in used)
    mean = None
    if means is not None:
        compute = interpreted.python_function(inputs, graphs[1])

        def mean(outputs: Array, others: Mapping[str, Array]) -> Array:
            return np.asarray(compute(outputs, *(others[name] for name in names)))

    return Drawn(_draw(inputs, graphs[0], names), mean, has_moments)


def _mean(observed: Any) -> tuple[Any, bool]:
    """The graph of the mean, or of a categorical outcome's probabilities, and whether there is a mean."""
    if getattr(observed.owner.op, "name", None) == "categorical":
        return observed.owner.op.dist_params(observed.owner)[-1], True
    try:
        return mean_of(observed), True
    except UndefinedMomentException:
        return None, False
    except NotImplementedError:
        return None, True


def _draw(inputs: Sequence[Any], outcome: Any, names: tuple[str, ...]) -> Callable[..., Array]:
    """A function that draws with its own generators, not with those of the user's model."""
    generators = [v for v in ancestors([outcome]) if isinstance(v.type, RandomType) and v.owner is None]
    generators_of_draws = [pytensor.shared(np.random.default_rng(0)) for _ in generators]
    (outcome,) = clone_replace([outcome], dict(zip(generators, generators_of_draws, strict=True)), rebuild_strict=False)
    compute, lock = interpreted.python_function(inputs, outcome), threading.Lock()

    def draw(outputs: Array, others: Mapping[str, Array], rng: np.random.Generator) -> Array:
        with lock:
            for generator, child in zip(generators_of_draws, rng.spawn(len(generators_of_draws)), strict=True):
                generator.set_value(child)
            return np.asarray(compute(outputs, *(others[name] for name in names)))

    return draw
