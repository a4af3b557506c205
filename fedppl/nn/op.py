"""A `torch.nn.Module` as an operation of a PyTensor graph, and the declaration of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import torch
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from torch import Tensor, nn

from fedppl.nn import functional
from fedppl.settings import positive
from fedppl.types import Array, DeclarationError


def module(
    net: nn.Module, weights: Any, X: Any, *, ndim: int | None = None, device: str | torch.device | None = None
) -> Any:
    r"""Evaluate a network on weights and inputs of a PyMC model, in float64.

    .. math:: f(X; w), \qquad \bar w = \bar f^\top \frac{\partial f}{\partial w}

    The values that `net` itself holds are not used, but those of its buffers are. The network is copied: a later change
    of it does not change the declared model.

    Parameters
    ----------
    net
        Any module that maps one tensor to one tensor.
    weights
        All parameters: a mapping from torch's names to tensors, as `parameters` gives, or one vector (d,) of all,
        raveled and in the order of ``net.named_parameters()``.
    X
        Inputs, a row per observation, (n, ...): a ``pm.Data`` container, another tensor, or an array.
    ndim
        Number of the output's dimensions; by default that at the value of `X`, or 2 where it has none.
    device
        Where torch computes: "cpu", "cuda", "cuda:1", "mps"; by default where `net` is. Each client may have its own.
        On "mps", which has no float64, densities, checks and predictions are computed on the CPU.

    Returns
    -------
    TensorVariable
        The output, (n, ...).

    Raises
    ------
    DeclarationError
        For weights that are not those of `net`, for a module whose output depends on more than weights and inputs, and
        for a device that cannot be used here.

    Examples
    --------
    >>> import numpy as np, pymc as pm, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    >>> with pm.Model() as model:
    ...     logits = module(net, parameters(net, sigma=1.0), pm.Data("X", np.ones((5, 3))))
    ...     label = pm.Categorical("label", logit_p=logits, observed=np.array([0, 1, 1, 0, 1]))
    >>> [rv.name for rv in model.free_RVs]
    ['0.weight', '0.bias', '2.weight', '2.bias']

    Notes
    -----
    *When this fails.* There are no second derivatives: Hessians are differences of gradients. Dropout and batch norm in
    training mode are refused: call ``net.eval()``. A likelihood of a network has many equal modes; NUTS sees some of
    them. A network whose output for a row depends on other rows can be declared, and the algorithms of `fedppl.nn`
    refuse it.
    """
    functional.require_pure(net)
    place = functional.device_for(net, device)
    inputs = pt.as_tensor_variable(X)
    if isinstance(weights, Mapping):
        expected = dict(net.named_parameters())
        if set(weights) != set(expected):
            raise DeclarationError(
                f"weights are named {sorted(weights)}, and the network's parameters {sorted(expected)}."
            )
        flat = pt.concatenate([pt.as_tensor_variable(weights[name]).ravel() for name in expected])
    else:
        flat = pt.as_tensor_variable(weights)
        if flat.type.ndim != 1:
            size = functional.size_of(net)
            raise DeclarationError(f"weights have {flat.type.ndim} dimensions; pass one vector of {size} numbers.")
    if flat.type.shape[0] not in (None, size := functional.size_of(net)):
        raise DeclarationError(f"weights are {flat.type.shape[0]} numbers, and the network has {size}; pass as many.")
    net = functional.copy_of(net)
    value = X.get_value() if hasattr(X, "get_value") else getattr(inputs, "data", None)
    if ndim is None:
        ndim = 2 if value is None else _output_ndim(net, np.asarray(value), place)
    return ModuleOp(net, ndim, place)(pt.cast(flat, "float64"), inputs)


def parameters(net: nn.Module, *, sigma: float | Mapping[str, float] = 1.0) -> dict[str, Any]:
    r"""Declare a Gaussian variable for each parameter of a network, centred at its present value.

    .. math:: w_i \sim N(w_i^{(0)}, \sigma^2)

    A network whose weights all start at 0 does not learn, and clients that start at different values do not average
    well. So every algorithm starts at the present values of `net`, random or learned before. Make `net` once, outside
    the builder, so that it is the same for all clients.

    Parameters
    ----------
    net
        The network.
    sigma
        Prior standard deviation of all weights, or one by each name.

    Returns
    -------
    dict
        From torch's names (``"0.weight"``) to variables of these names, shaped as in torch.

    Raises
    ------
    DeclarationError
        For a `sigma` that is not positive, or that misses a name; outside a model; for an object that is no network.

    Examples
    --------
    >>> import pymc as pm, torch
    >>> with pm.Model() as model:
    ...     weights = parameters(torch.nn.Linear(3, 2), sigma={"weight": 1.0, "bias": 10.0})
    >>> weights["weight"].type.shape
    (2, 3)

    Notes
    -----
    *When this fails.* A `net` that is made inside the builder starts elsewhere at every client, and the priors differ.
    One `sigma` for all layers takes no account of their widths: the outputs' prior sd grows with the square root of a
    layer's inputs. Some algorithms, `FedAvg` for one, make no use of `sigma`, which the log says.
    """
    functional.require_module(net)
    try:
        pm.modelcontext(None)
    except TypeError as error:
        raise DeclarationError("there is no model; call it inside `with pm.Model():`.") from error
    names = [name for name, _ in net.named_parameters()]
    scales = {name: sigma for name in names} if not isinstance(sigma, Mapping) else dict(sigma)
    if set(scales) != set(names):
        raise DeclarationError(
            f"sigma names {sorted(scales)}, the network's parameters are {names}; give one for each."
        )
    scales = {name: positive(f"sigma of {name!r}", value) for name, value in scales.items()}
    try:
        starts = {name: functional.host(value) for name, value in net.named_parameters()}
    except (NotImplementedError, ValueError) as error:  # on "meta", or a layer that waits for its first inputs
        raise DeclarationError(
            'the network\'s parameters hold no values to start at; make it without lazy layers, and not on "meta".'
        ) from error
    return {name: pm.Normal(name, starts[name], scales[name], shape=starts[name].shape) for name in names}


def output_of_two(net: nn.Module, X: Array, device: torch.device) -> Tensor:
    """The output for the first two rows of X, at the values of the network's parameters."""
    place = functional.placed(device, torch.float64)
    flat, rows = (functional.tensor(np.array(v), torch.float64, place) for v in (functional.initial_of(net), X[:2]))
    with torch.no_grad():
        return called(net, flat, rows)


def _output_ndim(net: nn.Module, X: Array, device: torch.device) -> int:
    rows = torch.from_numpy(np.array(X[:2]))
    try:
        output = output_of_two(net, X, device)
    except Exception as error:
        remedy = "" if rows.is_floating_point() else " Where numbers are no codes pass X.astype(float)."
        what = f"inputs of shape {tuple(rows.shape)}, {rows.dtype} ({functional.reason(error)})"
        raise DeclarationError(f"the network fails on {what}.{remedy}") from error
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(rows):
        what = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise DeclarationError(
            f"the network gives {what} for {len(rows)} rows; wrap it in a module that gives a tensor with these rows."
        )
    if output.is_complex() or not bool(torch.all(torch.isfinite(output))):
        raise DeclarationError(
            f"the network's output ({output.dtype}) is not finite or not real; scale inputs, or end it in a real layer."
        )
    return output.ndim


# Operations of PyTensor that evaluate a network of torch, and its vector-Jacobian product, some rows at a time --------


def called(net: nn.Module, flat: Tensor, X: Tensor) -> Tensor:
    """The output, by this thread's copy."""
    net = functional.own_copy(net)
    if len(flat) != (size := functional.size_of(net)):
        raise ValueError(f"weights are {len(flat)} numbers, and the network has {size}")
    return functional.call(net, functional.state_of(net, flat), X)


def _parts(net: nn.Module, flat: Tensor, X: Array, place: torch.device) -> Iterator[Tensor]:
    """Inputs, some rows at a time; all at once where a few of them show that rows depend on each other."""
    parts = functional.parts_of(net, X.shape)
    if len(parts) > 1:
        few = functional.tensor(X[np.linspace(0, len(X) - 1, 4).astype(int)], torch.float64, place)
        with torch.no_grad():
            together = called(net, flat, few)
            alone = torch.cat([called(net, flat, row) for row in torch.split(few, 1)])
        if together.shape != alone.shape or not torch.allclose(together, alone, rtol=1e-9, atol=1e-9):
            parts = [slice(None)]
    for rows in parts:
        yield functional.tensor(np.array(X[rows]), torch.float64, place)


class ModuleOp(Op):  # type: ignore[misc]
    """Weights (d,) and inputs (n, ...) to the network's output; two operations of one network are equal."""

    __props__ = ("net", "ndim", "device")

    def __init__(self, net: nn.Module, ndim: int, device: torch.device) -> None:
        self.net, self.ndim, self.device = net, ndim, device

    def __str__(self) -> str:
        return f"module({type(self.net).__name__})"

    def make_node(self, flat: Any, X: Any) -> Apply:
        """Types of inputs and output."""
        flat, X = pt.as_tensor_variable(flat), pt.as_tensor_variable(X)
        return Apply(self, [flat, X], [pt.tensor(dtype="float64", shape=(None,) * self.ndim)])

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        """Run the network."""
        place = functional.placed(self.device, torch.float64)
        flat, X = functional.tensor(np.array(inputs[0]), torch.float64, place), np.asarray(inputs[1])
        with torch.no_grad():
            parts = [functional.host(called(self.net, flat, rows)) for rows in _parts(self.net, flat, X, place)]
        outputs[0][0] = np.concatenate(parts) if len(parts) > 1 else parts[0]

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        """Gradients with respect to the weights, and to inputs that are real numbers."""
        pulled = ModuleGradientOp(self.net, self.device)(*inputs, *cotangents)
        real = inputs[1].type.dtype.startswith("float")
        return [pulled[0], pulled[1] if real else DisconnectedType()()]

    def L_op(self, inputs: Any, outputs: Any, output_gradients: Any) -> list[Any]:
        """`pullback`, as PyTensor before 3 calls it."""
        return self.pullback(inputs, outputs, output_gradients)

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """No gradient with respect to integer inputs."""
        return [[True], [node.inputs[1].type.dtype.startswith("float")]]


class ModuleGradientOp(Op):  # type: ignore[misc]
    """Weights, inputs and the output's cotangent to the weights' and inputs'; there are no second derivatives."""

    __props__ = ("net", "device")

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        self.net, self.device = net, device

    def make_node(self, flat: Any, X: Any, cotangent: Any) -> Apply:
        """Types of inputs and outputs."""
        flat, X, cotangent = map(pt.as_tensor_variable, (flat, X, cotangent))
        return Apply(self, [flat, X, cotangent], [flat.type(), pt.tensor(dtype="float64", shape=X.type.shape)])

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        """Run the network forwards, and the cotangent backwards."""
        place = functional.placed(self.device, torch.float64)
        flat, X = functional.tensor(np.array(inputs[0]), torch.float64, place), np.asarray(inputs[1])
        real = node.inputs[1].type.dtype.startswith("float")
        flat.requires_grad_()
        by_weights, by_inputs, first = np.zeros(len(flat)), np.zeros(X.shape), 0
        for part in _parts(self.net, flat, X, place):
            rows = slice(first, first + len(part))
            with torch.enable_grad():
                output = called(self.net, flat, part.requires_grad_() if real else part)
                pull = functional.tensor(np.array(inputs[2][rows]), torch.float64, place)
                of_weights, *of_inputs = functional.gradients(output, [flat, part] if real else [flat], pull)
            by_weights += functional.host(of_weights)
            by_inputs[rows] = functional.host(of_inputs[0]) if real else 0.0
            first = rows.stop
        outputs[0][0], outputs[1][0] = by_weights, by_inputs
