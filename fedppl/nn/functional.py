"""Networks as functions of a flat vector of weights, which modules are such functions, and where tensors live.

Data, weights in messages and random numbers are NumPy's or torch's on the host. Results are computed on the device of a
client's network. A device without float64, such as Apple's "mps", trains and infers in float32, and the CPU computes
declared densities, checks and predictions in float64.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytensor.graph.basic import equal_computations
from pytensor.graph.traversal import ancestors
from torch import Tensor, nn

from fedppl.types import Array, DeclarationError, Rng

Places = NDArray[np.integer[Any]]  # positions in a flat vector of weights
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Inputs, or units of the widest layer, that are computed at once. With twice as many, the outputs of two convolutions
# on small images in double precision exceed the cache, and a row takes 2.5 times as long.
_NUMBERS = 2**17


_thread = threading.local()
_copies: weakref.WeakKeyDictionary[nn.Module, tuple[str, nn.Module]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def cut(flat: Any, shapes: Mapping[Any, tuple[int, ...]]) -> dict[Any, Any]:
    """Pieces of a flat vector, one after the other, in these shapes."""
    ends = [0, *accumulate(math.prod(shape) for shape in shapes.values())]
    return {key: flat[ends[i] : ends[i + 1]].reshape(shape) for i, (key, shape) in enumerate(shapes.items())}


def pieces(net: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Cut a flat vector into the network's parameters, views of it."""
    return cut(flat, {name: value.shape for name, value in net.named_parameters()})


def parameter_slices(net: nn.Module) -> dict[str, slice]:
    """Where each parameter lies in the flat vector."""
    slices, start = {}, 0
    for name, value in net.named_parameters():
        slices[name] = slice(start, start + value.numel())
        start += value.numel()
    return slices


def positions(net: nn.Module, names: Iterable[str]) -> Places:
    """Where the parameters of these names, in their order, lie in the flat vector."""
    slices = parameter_slices(net)
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.r_[slices[name]] for name in names)])


def reason(error: Exception) -> str:
    """An exception's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def initial_of(net: nn.Module) -> Array:
    """The values of a network's parameters, (d,)."""
    return np.concatenate([host(value).ravel() for value in net.parameters()])


def require_module(net: Any) -> None:
    """Refuse an object that is no network."""
    if not isinstance(net, nn.Module):
        raise DeclarationError(f"the network is {type(net).__name__}; pass a torch.nn.Module.")


def require_pure(net: Any) -> None:
    """Refuse a network whose output is no function of weights and inputs alone."""
    require_module(net)
    if not size_of(net):
        raise DeclarationError(f"the network {type(net).__name__} has no parameters.")
    if frozen := [name for name, value in net.named_parameters() if not value.requires_grad]:
        raise DeclarationError(f"parameters {frozen} are frozen; call requires_grad_(True), or make them buffers.")
    if unreal := [name for name, value in net.named_parameters() if not value.is_floating_point()]:
        raise DeclarationError(f"parameters {unreal} are no real numbers; use real layers.")
    for name, layer in net.named_modules():
        kind = type(layer).__name__
        random = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        if layer.training and (random or next(layer.buffers(recurse=False), None) is not None):
            what = "draws at random" if random else "changes its buffers"
            raise DeclarationError(f"layer {name or kind!r} ({kind}) {what} in training mode; call net.eval() first.")
        if getattr(layer, "sparse", False) is True and isinstance(layer, _EMBEDDINGS):
            raise DeclarationError(f"layer {name or kind!r} ({kind}) has sparse=True; make it with sparse=False.")


def copy_of(net: nn.Module) -> nn.Module:
    """A copy of a network, which its owner may change: the same until its layers, attributes or buffers do.

    The values of parameters do not enter what is computed, and are those of the first copy.
    """
    with _lock:
        digest = _digest_of(net)
        cached = _copies.get(net)
        if cached is None or cached[0] != digest:
            try:
                cached = _copies[net] = digest, copy.deepcopy(net)
            except Exception as error:  # each attribute has exceptions of its own
                raise DeclarationError(
                    f"the network {type(net).__name__} cannot be copied ({reason(error)}). Keep locks, files, "
                    "generators and what parameters give (torch.nn.utils.parametrizations) out of its attributes."
                ) from error
        return cached[1]


def _digest_of(net: nn.Module) -> str:
    """A digest of a module's state without the values of its parameters."""
    digest = hashlib.sha256()
    for name, layer in net.named_modules(remove_duplicate=False):
        # By identity, so that one layer used twice differs from two equal layers.
        owned = {key: id(value) for key, value in (*layer._parameters.items(), *layer._modules.items())}
        shapes = [None if value is None else (value.shape, value.dtype) for value in layer._parameters.values()]
        attributes = {key: value for key, value in vars(layer).items() if key not in ("_parameters", "_modules")}
        digest.update(repr((name, type(layer).__qualname__, owned, shapes, _key(attributes, frozenset()))).encode())
    return digest.hexdigest()


def _key(value: Any, above: frozenset[int]) -> Any:
    """A key of an attribute's value; the identity of an object that cannot be read, or that contains itself."""
    identity = type(value).__qualname__, id(value)
    if isinstance(value, int | float | complex | str | bytes | None):
        return repr(value)
    if isinstance(value, nn.Module | type | ModuleType | FunctionType | MethodType) or id(value) in above:
        return identity
    if isinstance(value, Tensor):
        try:
            dense = value if value.layout is torch.strided else value.to_dense()
            value = host(torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense)
        except (RuntimeError, NotImplementedError):  # no values, as on "meta", or a kind that torch cannot read
            return identity
    if isinstance(value, np.ndarray | np.generic):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return identity if value.dtype == object else (value.dtype.str, np.shape(value), digest)
    above = above | {id(value)}
    if isinstance(value, Mapping):
        return {repr(key): _key(item, above) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_key(item, above) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_key(item, above)) for item in value)
    return (*identity, _key(vars(value), above)) if hasattr(value, "__dict__") else identity


def own_copy(net: nn.Module) -> nn.Module:
    """A copy for this thread, with the network's buffers: torch swaps parameters in place while it evaluates others."""
    copies: weakref.WeakKeyDictionary[nn.Module, nn.Module]
    copies = vars(_thread).setdefault("copies", weakref.WeakKeyDictionary())
    if (copied := copies.get(net)) is None:
        copied = copies[net] = copy.deepcopy(net)
    with torch.no_grad():
        for ours, theirs in zip(copied.buffers(), net.buffers(), strict=True):
            ours.copy_(theirs)
    return copied


def size_of(net: nn.Module) -> int:
    """Number of weights, d."""
    return sum(value.numel() for value in net.parameters())


def state_of(net: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the flat vector's type and where it is."""
    return pieces(net, flat) | buffers_of(net, flat.dtype, flat.device)


def buffers_of(net: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Buffers by name, real ones in this type, on this device."""
    return {name: moved(value, dtype, device) for name, value in net.named_buffers()}


def call(net: nn.Module, state: dict[str, Tensor], X: Tensor) -> Tensor:
    """The output for these parameters and buffers, one tensor."""
    # Torch ties weights by all of their names. A layer that is used twice has two names, and after the call it would
    # hold plain tensors as parameters: here each layer gets its own once.
    first, complete = dict[int, str](), dict(state)
    for prefix, layer in net.named_modules():
        for name, value in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            name_in_state = first.setdefault(id(value), full)
            if name_in_state in state:
                complete[full] = state[name_in_state]
    output: Tensor = torch.func.functional_call(net, complete, (X,), tie_weights=False)
    return output


def gradients(
    loss: Tensor, leaves: Sequence[Tensor], pull: Tensor | None = None, *, keep: bool = False
) -> tuple[Tensor, ...]:
    """Gradients in the leaves, times `pull`, 0 where the loss has none; `keep` retains the graph for another call."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(loss, leaves, pull, retain_graph=keep, materialize_grads=True)


def parts_of(net: nn.Module, shape: Sequence[int]) -> list[slice]:
    """Rows of inputs of this shape (n, ...) that are computed at once, so that memory does not grow with all rows."""
    rows, *row = shape
    layers = (layer for layer in net.modules() if not isinstance(layer, _EMBEDDINGS))
    values = (value for layer in layers for value in layer.parameters(recurse=False) if value.ndim)
    width = max(1, math.prod(row), *(value.shape[0] for value in values))
    size = max(1, _NUMBERS // width)
    return [slice(start, start + size) for start in range(0, max(rows, 1), size)]


def by_parts(net: nn.Module, compute: Callable[[Any], Tensor], X: Any) -> Tensor:
    """A function of rows at all of them, computed for some at a time."""
    parts = parts_of(net, X.shape)
    return compute(X) if len(parts) == 1 else torch.cat([compute(X[rows]) for rows in parts])


@contextlib.contextmanager
def hooked(layers: Mapping[str, nn.Module], keep: Callable[[str, Any, Tensor], Any]) -> Iterator[None]:
    """Call `keep` with name, inputs and output of each of these layers; what it returns replaces the output."""
    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            hook = layer.register_forward_hook(lambda _, given, output, name=name: keep(name, given, output))
            hooks.callback(hook.remove)
        yield


# Parts of a declared model: calls of a network of torch, and distributions --------------------------------------------


def kind_of(rv: Any) -> str:
    """PyTensor's name of a distribution: "normal", "laplace"."""
    return getattr(rv.owner.op, "name", None) or type(rv.owner.op).__name__


def network_nodes(outputs: Sequence[Any]) -> list[Any]:
    """Nodes that evaluate a network of torch, above these outputs."""
    nodes = (variable.owner for variable in ancestors(outputs) if variable.owner is not None)
    return list(dict.fromkeys(node for node in nodes if hasattr(node.op, "net")))


def one_call(outputs: Sequence[Any]) -> list[Any]:
    """Outputs of all calls that equal the first: PyMC may have put one call there several times."""
    nodes = network_nodes(outputs)
    return [
        node.outputs[0] for node in nodes if node.op == nodes[0].op and equal_computations(node.inputs, nodes[0].inputs)
    ]


# The device of a client's network, and the way there and back ---------------------------------------------------------

CPU = torch.device("cpu")
_WITHOUT_FLOAT64 = ("mps",)


def device_for(net: nn.Module, device: Any) -> torch.device:
    """The given device, or else the network's; refused are others, missing ones, and a network on several."""
    subject = f"device={str(device)!r}"
    if device is None:
        devices = list(dict.fromkeys(value.device for value in net.parameters()))
        if len(devices) > 1:
            places = [str(place) for place in devices]
            raise DeclarationError(f'the network is on {places}; move it by net.to("cpu"), or say device="cpu".')
        device, subject = devices[0], f"the network is on {str(devices[0])!r}, and it"
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError(type(device).__name__)
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeclarationError(f'{subject} must be a device of torch, such as "cpu", "cuda" or "mps".') from error
    if chosen.type == "cpu":
        return CPU
    try:  # a transfer there and back proves more than torch's own list of devices
        probe = torch.ones(1, device=chosen)
        if (back := float((probe + 1.0).cpu())) != 2.0:
            raise ArithmeticError(f"1 + 1 comes back as {back:g}")
    except Exception as error:  # each device has exceptions of its own
        raise DeclarationError(
            f'{subject} cannot be used on this machine ({reason(error)}); take device="cpu" here, '
            'or \'"cuda" if torch.cuda.is_available() else "cpu"\'.'
        ) from error
    return probe.device  # with its number


def placed(device: torch.device, dtype: torch.dtype) -> torch.device:
    """The place of numbers of this type: the device, or the CPU where the device lacks the type."""
    return CPU if dtype == torch.float64 and device.type in _WITHOUT_FLOAT64 else device


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Real numbers in this type; whole numbers as they are."""
    return value.to(dtype) if value.is_floating_point() else value


def moved(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`cast`, on this device, in an order that needs no type that a device lacks."""
    return cast(value.to(device), dtype) if device.type == "cpu" else cast(value, dtype).to(device)


def tensor(X: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers for torch: real ones in this type, whole ones as they are."""
    return moved(torch.from_numpy(np.ascontiguousarray(X)), dtype, device)


def host(value: Tensor) -> Array:
    """Numbers for NumPy, in float64; they may be those of the tensor itself."""
    array: Array = value.detach().cpu().double().numpy()
    return array


def generator_of(rng: Rng) -> torch.Generator:
    """Torch's draws from a client's stream, on the host: the same whatever the device."""
    return torch.Generator().manual_seed(int(rng.integers(2**62)))


def taken(value: Tensor, rows: Tensor) -> Tensor:
    """Some of the rows, on any device."""
    return value[rows.to(value.device)]


class Computed(torch.autograd.Function):
    """Values (...) of what NumPy computes from x (..., d), with slopes (..., d)."""

    @staticmethod
    def forward(context: Any, x: Tensor, compute: Any) -> Tensor:
        """Compute the values, and the slopes that `backward` needs."""
        values, slopes = compute(host(x))
        context.save_for_backward(tensor(np.asarray(slopes), x.dtype, x.device))
        return tensor(np.asarray(values), x.dtype, x.device).reshape(np.shape(values))

    @staticmethod
    def backward(context: Any, upstream: Tensor) -> Any:
        """Slopes of x."""
        (slopes,) = context.saved_tensors
        return slopes * upstream[..., None], None
