r"""Losses of rows, with their slopes and curvatures: in closed form, or computed from the declared distribution.

.. math:: \ell_n(f_n, e) = -\log p(y_n \mid f_n, e), \qquad
          \Lambda_n = \partial^2 \ell_n / \partial f_n\, \partial f_n^\top

Classes by logits, and normal outcomes of one known sd, are in closed form. For other distributions PyTensor computes
each row as if the client had no other, and then all rows at once. Rows do not depend on each other by construction
(`outcome_of`), and at every client the declared density is compared with their sum. Unknowns e of the
likelihood, such as the sd of a normal outcome, stand beside the outputs of each row.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import pytensor
import pytensor.tensor as pt
import torch
from pymc.distributions.moments import mean as mean_of
from pymc.exceptions import UndefinedMomentException
from pytensor.compile.mode import Mode
from pytensor.gradient import NullTypeGradError
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.special import Softmax
from pytensor.tensor.subtensor import Subtensor
from torch import Tensor, nn

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.nn.functional import Computed, cut, host, kind_of, network_nodes, one_call, parameter_slices, reason, tensor
from fedppl.nn.op import output_of_two
from fedppl.types import Array, DataError, DeclarationError, LocalFailure, Rng, Variable

CONTRACT = (
    "a network's client declares weights = fedppl.nn.parameters(net), output = fedppl.nn.module(net, weights, X), "
    "and one outcome of that output, such as pm.Categorical(logit_p=output) or pm.Normal(output, constant)"
)
_MOVED = (DimShuffle, Reshape, SpecifyShape, Subtensor)  # operations that only rearrange numbers
T = TypeVar("T")


@dataclass(frozen=True)
class Categorical:
    """Classes 0 to C − 1, by logits; losses by rows may omit constants of a row, which `log_density` has."""

    kind: ClassVar[str] = "categorical"

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Outcomes (n, ...) as the functions below take them, beside outputs of this type on this device."""
        return torch.from_numpy(np.array(y)).long().to(device)

    def mean(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean loss of outputs (n, C) at outcomes (n, ...)."""
        return nn.functional.cross_entropy(output, y)

    def each(self, output: Tensor, y: Tensor) -> Tensor:
        """Losses (n,)."""
        return nn.functional.cross_entropy(output, y, reduction="none")

    # Losses (K, n) of outputs (K, C, n), whose rows come last, at outcomes (K, n, ...).
    each_last = each

    def slopes_last(self, output: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂f of outputs (K, C, n), at outcomes (K, n, ...), p less 1 at the class; arguments may be overwritten."""
        slopes = torch.softmax(output, 1)
        classes = y[:, None]
        return slopes.scatter_add_(1, classes, -torch.ones_like(classes, dtype=output.dtype))

    def root(self, output: Tensor, y: Tensor, *, expected: bool = False) -> Tensor:
        """R (n, C, r) with R Rᵀ = Λ, of outputs (n, C), or of its expectation over outcomes: diag(√p) − p √pᵀ."""
        p = torch.softmax(output, dim=1)
        root = p.sqrt()
        return torch.diag_embed(root) - p[:, :, None] * root[:, None, :]

    def log_density(self, output: Tensor, y: Tensor) -> float:
        """log p(y | f) of all rows with its constants."""
        return -float(self.each(output, y).sum())


@dataclass(frozen=True)
class Normal:
    """Real outcomes (n, C) about the outputs, of one sd."""

    sd: float
    kind: ClassVar[str] = "normal"

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A row (C,) for each row of inputs."""
        return torch.from_numpy(np.array(y)).to(dtype).to(device).reshape(len(y), -1)

    def mean(self, output: Tensor, y: Tensor) -> Tensor:
        """See `Categorical`."""
        square = (y.view(output.shape) - output) ** 2
        return 0.5 * square.sum() / (len(y) * self.sd**2)

    def each(self, output: Tensor, y: Tensor) -> Tensor:
        """See `Categorical`."""
        square = (y.reshape(output.shape) - output) ** 2
        return square.reshape(len(square), -1).sum(1) * (0.5 / self.sd**2)

    def each_last(self, output: Tensor, y: Tensor) -> Tensor:
        """See `Categorical`."""
        square = (y.mT - output) ** 2
        return square.sum(1) * (0.5 / self.sd**2)

    def slopes_last(self, output: Tensor, y: Tensor) -> Tensor:
        """Residuals over the variance."""
        return (output - y.mT) / self.sd**2

    def root(self, output: Tensor, y: Tensor, *, expected: bool = False) -> Tensor:
        """I / σ."""
        eye = torch.eye(output.shape[1], dtype=output.dtype, device=output.device)
        return eye.expand(len(output), -1, -1) / self.sd

    def log_density(self, output: Tensor, y: Tensor) -> float:
        """See `Categorical`."""
        return -float(self.each(output, y).sum()) - y.numel() * float(np.log(self.sd) + 0.5 * np.log(2 * np.pi))


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
    """A likelihood that is computed from its declaration; see `Categorical`."""

    kind: str  # the distribution, as PyTensor names it
    outputs: int  # number of the network's outputs, C
    read: tuple[Read, ...]  # variables in the columns of `y`
    # outputs with unknowns (n, C + e) and columns (n, q) to losses (n,) and their slopes (n, C + e)
    losses: Callable[[Array, Array], tuple[Array, Array]]
    curvatures: Callable[[Array, Array], Array]  # the same to Λ, (n, C, C)
    drawn: Callable[[], Drawn]  # draws of outcomes, and their means; built at the first call

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Columns (n, q) on the host, in double precision: a count may have more digits than single precision."""
        return torch.from_numpy(np.array(y, dtype=float))

    def mean(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean loss."""
        return self.each(output, y).mean()

    def each(self, output: Tensor, y: Tensor) -> Tensor:
        """Losses (n,), differentiable by torch in the outputs."""
        rows, columns = output.reshape(len(output), -1), y.numpy()
        losses: Tensor = Computed.apply(rows, lambda at: self.losses(at, columns))  # type: ignore[no-untyped-call]
        return losses

    def each_last(self, output: Tensor, y: Tensor) -> Tensor:
        """Losses (K, n) of outputs (K, C, n)."""
        return self.each(output.mT.flatten(0, 1), y.flatten(0, 1)).view(len(output), -1)

    def slopes_last(self, output: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂f of outputs (K, C, n)."""
        rows = output.mT.flatten(0, 1)
        _, slopes = self.losses(host(rows), y.flatten(0, 1).numpy())
        return tensor(slopes, output.dtype, output.device).view(len(output), -1, output.shape[1]).mT.contiguous()

    def bends(self, output: Tensor, y: Tensor) -> bool:
        """Whether Λ is not positive semi-definite at some row of the client, so that its expectation is used at all."""
        values = np.linalg.eigvalsh(self._finite(self.curvatures(host(output), y.numpy())))
        return bool(np.any(values[:, 0] < -_BENT * np.maximum(values[:, -1], 0.0)))

    def root(self, output: Tensor, y: Tensor, *, expected: bool = False) -> Tensor:
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
        bent = f"the log density of the outcome ({self.kind}) bends upwards or has a kink in the network's output"
        place = next((place for place, variable in enumerate(self.read) if variable.is_outcome), None)
        if place is None:
            raise LocalFailure(f"{bent}; observe data, and not what is computed from data, or take fedppl.nn.FedAvg")
        arrays, names = self.arrays(y), [variable.name for variable in self.read]
        # A row has the same draws in every chunk.
        rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(outputs).tobytes()))
        total = np.zeros((len(outputs), self.outputs, self.outputs))
        for _ in range(_DRAWS):
            try:
                arrays[place] = self.drawn().draw(outputs, dict(zip(names, arrays, strict=True)), rng)
            except Exception as error:
                why = f"{bent}, and outcomes cannot be drawn ({type(error).__name__})"
                raise LocalFailure(f"{why}; give pm.CustomDist a random=, or take fedppl.nn.FedAvg") from error
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

    def log_density(self, output: Tensor, y: Tensor) -> float:
        """log p(y | f), all of it."""
        return -float(self.each(output, y).sum())


Likelihood = Categorical | Normal | Declared


def columns(who: str, read: Sequence[Read], arrays: Sequence[Array], rows: int) -> Array:
    """The variables that the likelihood reads of a client's rows, side by side, (n, q).

    Raises `DataError` for an array without one row for each observation, or whose rows differ in shape from the first
    client's.
    """
    for variable, array in zip(read, arrays, strict=True):
        if array.shape != (expected := (rows, *variable.shape) if variable.by_row else ()):
            what = f"{who}: {variable.name!r} has shape {array.shape}, not {expected}"
            raise DataError(f"{what}; declare what is the same for all clients as a constant.")
    return beside(arrays, rows)


def beside(arrays: Sequence[Array], rows: int) -> Array:
    """Arrays (n, ...) as columns, (n, q), and numbers () in every row."""
    parts = [np.broadcast_to(array, (rows, *np.shape(array)[1:])).astype(float).reshape(rows, -1) for array in arrays]
    return np.concatenate([np.zeros((rows, 0)), *parts], axis=1)


# Outcomes of a declared network at given outputs: their draws and their means -----------------------------------------


class Drawn(NamedTuple):
    """Functions of outputs with unknowns (n, C + e), and of the other variables that the likelihood reads, by name."""

    draw: Callable[[Array, Mapping[str, Array], Rng], Array]  # outcomes (n, ...)
    # Means (n, ...), or probabilities (n, classes) of a categorical outcome; None where PyMC has none.
    mean: Callable[[Array, Mapping[str, Array]], Array] | None
    has_moments: bool  # False of a Cauchy, for example, whose draws have no stable mean and sd


def drawn(
    parts: _graph.Parts,
    row_shape: tuple[int, ...],
    unknowns: Mapping[Any, tuple[int, ...]],
    outcomes: Mapping[Any, tuple[int, ...]],
) -> Drawn:
    """Build the functions, of values of `unknowns`, and `outcomes`, from which PyMC reads the number of draws."""
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
    replace |= _lengths_with(parts, extended.shape[0])
    for value, piece in cut(extended[0, count:], unknowns).items():
        rv = model.values_to_rvs[value]
        (constrained,) = model.replace_rvs_by_values([rv])
        replace[rv] = clone_replace([constrained], {value: piece}, rebuild_strict=False)[0]
    # Calls of the network first: other containers above them would make them other calls.
    graphs = clone_replace(clone_replace(targets, replace, rebuild_strict=False), containers, rebuild_strict=False)
    above = set(ancestors(graphs))
    inputs = [extended, *(container for container in containers.values() if container in above)]
    mean = None if means is None else _function_of(inputs, graphs[1])
    return Drawn(_draw(inputs, graphs[0]), mean, has_moments)


def _function_of(inputs: Sequence[Any], graph: Any) -> Callable[[Array, Mapping[str, Array]], Array]:
    """A function of the first input, and of the others by name."""
    compute = interpreted.python_function(inputs, graph)
    return lambda outputs, others: np.asarray(compute(outputs, *(others[v.name] for v in inputs[1:])))


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


def _draw(inputs: Sequence[Any], outcome: Any) -> Callable[..., Array]:
    """A function that draws with its own generators, not with those of the user's model."""
    generators = [v for v in ancestors([outcome]) if isinstance(v.type, RandomType) and v.owner is None]
    generators_of_draws = [pytensor.shared(np.random.default_rng(0)) for _ in generators]
    (outcome,) = clone_replace([outcome], dict(zip(generators, generators_of_draws, strict=True)), rebuild_strict=False)
    compute, lock = _function_of(inputs, outcome), threading.Lock()

    def draw(outputs: Array, others: Mapping[str, Array], rng: Rng) -> Array:
        with lock:
            for generator, child in zip(generators_of_draws, rng.spawn(len(generators_of_draws)), strict=True):
                generator.set_value(child)
            return compute(outputs, others)

    return draw


# The likelihood of a declared network's outcome, read from its model, and the data that it depends on -----------------


def outcome_of(
    client: ClientModel, node: Any, X: Array, who: str
) -> tuple[Likelihood, tuple[Variable, ...], tuple[Variable, ...]]:
    """The likelihood, its unknown variables, and the outcomes and other data that it reads.

    The call of the network is `node`, on X. Raises `DeclarationError` where outcomes do not depend on its output row by
    row.
    """
    parts = client.template.parts
    observed = parts.model.observed_RVs[0]
    slices = parameter_slices(node.op.net)
    unknowns = tuple(v for v in (*client.layout.variables, *client.local) if v.name not in slices)
    row_shape = tuple(output_of_two(node.op.net, X, node.op.device).shape[1:])
    if kind_of(observed) == "categorical":
        p = observed.owner.op.dist_params(observed.owner)[-1].owner
        # Classes of more dimensions than their probabilities would broadcast where rows are as many.
        if p is not None and isinstance(p.op, DimShuffle) and "x" in p.op.new_order[:-1]:
            raise DeclarationError(
                f"{who}: {observed.name!r} has {observed.type.ndim} dimensions, for classes; pass y.argmax(axis=1)."
            )
    closed = None if unknowns else _closed(observed, node, row_shape)
    if closed is not None:
        return closed, (), (parts.model.rvs_to_values[observed],)
    if not parts.data:
        raise DeclarationError(f'{who}: the model holds its data as constants; put them into pm.Data("y", y).')
    density, output = _without_network(parts, observed, who)
    values = {rv.name: parts.model.rvs_to_values[rv] for rv in (*parts.shared, *parts.local)}
    above = set(ancestors([density]))
    if idle := [v.name for v in unknowns if values[v.name] not in above]:
        raise DeclarationError(
            f"{who}: free variables {idle} are neither weights of the network nor part of the likelihood; {CONTRACT}."
        )
    if used := [name for name in slices if values[name] in above]:
        raise DeclarationError(
            f"{who}: the likelihood reads the weights {used} beside the network's output; {CONTRACT}."
        )
    read = _read_by(client, density)
    starts = {values[v.name]: v.shape for v in unknowns}
    outcomes = {v: variable.shape for v, variable in read.items() if variable.is_outcome}
    if twice := [v.name for v in outcomes if v in _graph.values_read(observed.owner.inputs)]:
        raise DeclarationError(
            f"{who}: {twice} are observed, and are parameters of {observed.name!r} too; declare another container."
        )
    draws = functools.partial(drawn, parts, row_shape, starts, outcomes)
    likelihood = _declared(parts, density, output, row_shape, read, starts, draws, who)
    return likelihood, unknowns, tuple(read)


def _without_network(parts: _graph.Parts, observed: Any, who: str) -> tuple[Any, Any]:
    """The outcome's log density as a graph of a variable in place of the network's output."""
    (density,) = parts.model.logp(vars=[observed], sum=False)
    calls = one_call([density])
    if not calls:
        raise DeclarationError(f"{who}: no network stands above {observed.name!r}; {CONTRACT}.")
    output = pt.tensor(dtype=calls[0].type.dtype, shape=calls[0].type.shape)
    (density,) = clone_replace([density], dict.fromkeys(calls, output))
    if network_nodes([density]):
        raise DeclarationError(f"{who}: the network stands more than once above {observed.name!r}; use one module.")
    return density, output


def _closed(observed: Any, node: Any, row_shape: tuple[int, ...]) -> Likelihood | None:
    """The likelihoods in closed form, where the distribution's parameter is the output and nothing else."""
    kind, parameters, output = kind_of(observed), observed.owner.op.dist_params(observed.owner), node.outputs[0]
    if kind == "categorical":
        p = parameters[-1].owner
        is_softmax = p is not None and isinstance(p.op, Softmax) and p.inputs[0] is output and len(row_shape) == 1
        # A number, or from PyTensor 3 on a tuple of them.
        return Categorical() if is_softmax and p.op.axis in (-1, 1, (-1,), (1,)) else None
    if kind == "normal" and (parameters[0] is output or (row_shape == (1,) and _is_column(parameters[0], output))):
        sds = (
            np.unique(parameters[1].eval(mode=interpreted.PYTHON_MODE)) if _is_constant(parameters[1]) else np.zeros(0)
        )
        return Normal(float(sds[0])) if len(sds) == 1 else None  # one number at all clients
    return None


def _is_column(variable: Any, output: Any) -> bool:
    """Whether a variable is the only column of the output, ``f[:, 0]`` or ``f.squeeze()``."""
    node = variable
    while node is not output:
        if node.owner is None or not isinstance(node.owner.op, _MOVED):
            return False
        node = node.owner.inputs[0]
    for rows in (1, 3):
        values = np.arange(1.0, rows + 1.0)[:, None]
        (moved,) = clone_replace([variable], {output: pt.constant(values)}, rebuild_strict=False)
        if not _is_constant(moved):  # an index may be a client's own
            return False
        column = np.asarray(moved.eval(mode=interpreted.PYTHON_MODE))
        if column.shape != (rows,) or not np.array_equal(column, values[:, 0]):
            return False
    return True


def _is_constant(value: Any) -> bool:
    return all(v.owner is not None or isinstance(v, Constant) for v in ancestors([value]))


# Parameters outside their domain have density 0, and raise no exception within a search.
_MODE = Mode(linker="py", optimizer="fast_compile").including("local_check_parameter_to_ninf_switch")


def _read_by(client: ClientModel, density: Any) -> dict[Any, Read]:
    """Variables that the outcome's density reads beside network and unknowns, with a description of each."""
    parts = client.template.parts
    observed = parts.model.observed_RVs[0]
    value = parts.model.rvs_to_values[observed]
    above = set(ancestors([density]))
    values = {v: np.asarray(array) for v, array in zip(parts.data, client.inputs, strict=False) if v in above}
    if isinstance(value, Constant):  # an outcome that is no data
        values[value] = np.asarray(value.data)
    outcomes = {value, *_graph.observed_through(parts)}
    return {
        v: Read(v.name or observed.name, array.shape[1:], str(array.dtype), v in outcomes, array.ndim > 0)
        for v, array in values.items()
    }


def _declared(
    parts: _graph.Parts,
    density: Any,
    output: Any,
    row_shape: tuple[int, ...],
    read: Mapping[Any, Read],
    unknowns: Mapping[Any, tuple[int, ...]],
    draws: Callable[[], Drawn],
    who: str,
) -> Declared:
    """Build the functions of a likelihood from the `density` of the outcome, not summed.

    The density is a graph of the network's `output`, of the variables in `read`, in the order of the columns, and of
    value variables of its `unknowns`. Raises `DeclarationError` where a row cannot be computed by itself, or has no
    slopes.
    """
    observed = parts.model.observed_RVs[0]
    f, e, y, one = pt.vector("f"), pt.vector("e"), pt.vector("y"), pt.constant(np.asarray(1))
    replace: dict[Any, Any] = {output: f.reshape((1, *row_shape)), **_lengths_with(parts, one), **cut(e, unknowns)}
    column = 0
    for value, variable in read.items():
        piece = y[column : column + variable.width].reshape((1, *variable.shape)) if variable.by_row else y[column]
        replace[value] = pt.cast(piece, value.type.dtype)
        column += variable.width
    try:
        (row,) = interpreted.stable(clone_replace([-density.sum()], replace, rebuild_strict=False))
        extended, columns = pt.matrix("both"), pt.matrix("columns")
        count = int(np.prod(row_shape, dtype=int))
        (losses,) = vectorize_graph([row], {f: extended[:, :count], e: extended[:, count:], y: columns})
        losses = pt.broadcast_to(losses, (extended.shape[0],))
        slopes = pt.grad(losses.sum(), extended)
        rows = [pt.grad(slopes[:, c].sum(), extended, disconnected_inputs="ignore") for c in range(count)]
        curved = pt.stack([slope[:, :count] for slope in rows], axis=1)
        first_order = interpreted.python_function([extended, columns], [losses, slopes], _MODE)
    except (NotImplementedError, NullTypeGradError, ValueError, TypeError, AssertionError) as error:
        raise DeclarationError(
            f"{who}: the likelihood cannot be computed row by row ({reason(error)}); use fedppl.EP()."
        ) from error
    curvatures = _built_once(lambda: interpreted.python_function([extended, columns], curved, _MODE))
    return Declared(
        kind_of(observed),
        count,
        tuple(read.values()),
        first_order,
        lambda output, y: np.asarray(curvatures()(output, y)),
        _built_once(draws),
    )


def _built_once(build: Callable[[], T]) -> Callable[[], T]:
    """A function that builds its value at the first call, once for all threads: not every algorithm needs it."""
    cache: list[T] = []
    lock = threading.Lock()

    def get() -> T:
        with lock:
            if not cache:
                cache.append(build())
            return cache[0]

    return get


def _lengths_with(parts: _graph.Parts, rows: Any) -> dict[Any, Any]:
    """Lengths of dims, with this number of rows for those that count rows."""
    lengths = _graph.lengths(parts.model)
    return {
        parts.model.dim_lengths[name]: pt.constant(np.asarray(length)) if parts.open.get(name) is None else rows
        for name, length in lengths.items()
    }
