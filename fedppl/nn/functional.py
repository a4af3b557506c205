"""Networks as functions of a flat vector of weights, and which modules are such functions."""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytensor.graph.basic import equal_computations
from pytensor.graph.traversal import ancestors

from fedppl.nn.devices import host, moved
from fedppl.types import DeclarationError

Places = NDArray[np.integer[Any]]  # positions in a flat vector of weights
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
# Of inputs, or of the units of the widest layer, that are computed at once. With twice as many, what two convolutions
# make of small images in double precision leaves a cache, and a row takes 2.5 times as long.
_NUMBERS = 2**17


class _Threads(threading.local):
    def __init__(self) -> None:
        self.copies: weakref.WeakKeyDictionary[torch.nn.Module, torch.nn.Module] = weakref.WeakKeyDictionary()


_threads = _Threads()
_declared: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, torch.nn.Module]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def pieces(net: torch.nn.Module, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cut a flat vector into the network's parameters, views of it."""
    shapes = {name: value.shape for name, value in net.named_parameters()}
    cut = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), cut, strict=True)}


def parameter_slices(net: torch.nn.Module) -> dict[str, slice]:
    """Where each parameter lies in the flat vector."""
    found, start = {}, 0
    for name, value in net.named_parameters():
        found[name] = slice(start, start + value.numel())
        start += value.numel()
    return found


def require_module(net: Any) -> None:
    """Refuse what is no network."""
    if not isinstance(net, torch.nn.Module):
        raise DeclarationError(f"the network is {type(net).__name__}; pass a torch.nn.Module.")


def require_pure(net: Any) -> None:
    """Refuse what is no function of weights and inputs alone.

    Raises `DeclarationError` naming the layer and the remedy.
    """
    require_module(net)
    if not size_of(net):
        raise DeclarationError(f"the network {type(net).__name__} has no parameters, so there is nothing to infer.")
    frozen = [name for name, value in net.named_parameters() if not value.requires_grad]
    if frozen:
        raise DeclarationError(
            f"parameters {frozen} are frozen (requires_grad=False), and every parameter is a free variable of the "
            "model. Call requires_grad_(True), or make what is fixed a buffer."
        )
    if unreal := [name for name, value in net.named_parameters() if not value.is_floating_point()]:
        raise DeclarationError(f"parameters {unreal} are no real numbers, and weights of a model are; use real layers.")
    for name, layer in net.named_modules():
        random = isinstance(layer, torch.nn.modules.dropout._DropoutNd) and layer.p > 0
        if layer.training and (random or next(layer.buffers(recurse=False), None) is not None):
            what = "draws at random" if random else "changes its buffers"
            raise DeclarationError(
                f"layer {name or type(layer).__name__!r} ({type(layer).__name__}) {what} in training mode, so that the "
                "output is no function of weights and inputs. Call net.eval() before you declare the model, or use a "
                "layer without state (torch.nn.GroupNorm, torch.nn.LayerNorm)."
            )
        if getattr(layer, "sparse", False) is True and isinstance(layer, _EMBEDDINGS):
            raise DeclarationError(
                f"layer {name or type(layer).__name__!r} ({type(layer).__name__}) has sparse=True, and sparse "
                "gradients fit neither the steps nor the curvatures of this package; make it with sparse=False, which "
                "gives the same output."
            )


def as_it_is(net: torch.nn.Module) -> torch.nn.Module:
    """A copy of a network as it is now, the same one until its layers, attributes or buffers change.

    Whoever owns it may go on with it: what was declared, and fits of it, stay as they are. The values of parameters are
    no part of what is computed, and are those of the first copy.

    Raises `DeclarationError` for a network that cannot be copied.
    """
    with _lock:
        told = _described(net)
        known = _declared.get(net)
        if known is None or known[0] != told:
            known = _declared[net] = told, _copied(net)
        return known[1]


def _copied(net: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(net)
    except Exception as error:  # each attribute has exceptions of its own
        raise DeclarationError(
            f"the network {type(net).__name__} cannot be copied ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}), and each thread computes by its own copy. Keep locks, files "
            "and generators out of its attributes, and compute in forward what follows from parameters; in place of "
            "torch.nn.utils.weight_norm take torch.nn.utils.parametrizations.weight_norm."
        ) from error


def _described(net: torch.nn.Module) -> str:
    """Text that tells two states of one module apart, but for the values of its parameters."""
    digest = hashlib.sha256()
    for name, layer in net.named_modules(remove_duplicate=False):
        # By identity, so that a layer or a weight that stands twice is told from one that is made twice.
        owns = {key: id(value) for key, value in (*layer._parameters.items(), *layer._modules.items())}
        shapes = [None if value is None else (value.shape, value.dtype) for value in layer._parameters.values()]
        held = {key: value for key, value in vars(layer).items() if key not in ("_parameters", "_modules")}
        digest.update(repr((name, type(layer).__qualname__, owns, shapes, _told(held, frozenset()))).encode())
    return digest.hexdigest()


def _told(value: Any, above: frozenset[int]) -> Any:
    """An attribute's value, as far as it can be read; of others, and inside what holds itself, which object it is."""
    which = type(value).__qualname__, id(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _told_array(value, which)
    if isinstance(value, torch.nn.Module | type | ModuleType | FunctionType | MethodType) or id(value) in above:
        return which
    above = above | {id(value)}
    if isinstance(value, Mapping):
        return {repr(key): _told(one, above) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_told(one, above) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_told(one, above)) for one in value)
    return (*which, _told(vars(value), above)) if hasattr(value, "__dict__") else which


def _told_array(value: Any, which: tuple[str, int]) -> Any:
    """Numbers, by what they hash to."""
    try:
        if isinstance(value, torch.Tensor):
            dense = value if value.layout is torch.strided else value.to_dense()
            value = host(torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense)
    except (RuntimeError, NotImplementedError):  # no values, as on "meta", or of a kind that torch cannot read so
        return which
    if value.dtype == object:
        return which
    return value.dtype.str, np.shape(value), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def own_copy(net: torch.nn.Module) -> torch.nn.Module:
    """Copy a network once a thread: torch swaps a module's parameters in place while it evaluates others.

    Buffers are the network's at every call, whatever an earlier one wrote over them.
    """
    if net not in _threads.copies:
        _threads.copies[net] = copy.deepcopy(net)
    kept = _threads.copies[net]
    with torch.no_grad():
        for ours, theirs in zip(kept.buffers(), net.buffers(), strict=True):
            ours.copy_(theirs)
    return kept


def size_of(net: torch.nn.Module) -> int:
    """Number of weights, d."""
    return sum(value.numel() for value in net.parameters())


def state_of(net: torch.nn.Module, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, in the flat vector's type and where it is."""
    return pieces(net, flat) | buffers_of(net, flat.dtype, flat.device)


def buffers_of(net: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Buffers by name, real ones in this type, on this device."""
    return {name: moved(value, dtype, device) for name, value in net.named_buffers()}


def call(net: torch.nn.Module, state: dict[str, torch.Tensor], X: torch.Tensor) -> torch.Tensor:
    """The output for these parameters and buffers, one tensor."""
    # Torch ties weights by all of their names. A layer that stands twice has two for one place, and would come out of
    # the call with plain tensors for parameters: here each layer is given its own once.
    first, given = dict[int, str](), dict(state)
    for prefix, layer in net.named_modules():
        for name, value in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            known = first.setdefault(id(value), full)
            if known in state:
                given[full] = state[known]
    output: torch.Tensor = torch.func.functional_call(net, given, (X,), tie_weights=False)
    return output


def gradients(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], pull: torch.Tensor | None = None, *, keep: bool = False
) -> tuple[torch.Tensor, ...]:
    """Gradients of what was computed of these, times `pull`: zeros for those that it does not depend on.

    `keep` what was computed for another call.
    """
    if not loss.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(loss, leaves, pull, retain_graph=keep, materialize_grads=True)


def parts_of(net: torch.nn.Module, shape: Sequence[int]) -> list[slice]:
    """Rows of inputs of this shape (n, ...) that are computed at once, so that memory does not grow with all rows."""
    rows, *one = shape
    layers = (layer for layer in net.modules() if not isinstance(layer, _EMBEDDINGS))
    values = (value for layer in layers for value in layer.parameters(recurse=False) if value.ndim)
    width = max(1, int(np.prod(one, dtype=int)), *(value.shape[0] for value in values))
    size = max(1, _NUMBERS // width)
    return [slice(start, start + size) for start in range(0, max(rows, 1), size)]


def by_parts(net: torch.nn.Module, compute: Callable[[torch.Tensor], torch.Tensor], X: torch.Tensor) -> torch.Tensor:
    """What a function of rows gives for all of them, computed for some at a time."""
    parts = parts_of(net, X.shape)
    return compute(X) if len(parts) == 1 else torch.cat([compute(X[rows]) for rows in parts])


# What a declared model is made of: calls of a network of torch, and distributions -------------------------------------


def kind_of(rv: Any) -> str:
    """PyTensor's name of a distribution: "normal", "laplace"."""
    return getattr(rv.owner.op, "name", None) or type(rv.owner.op).__name__


def network_nodes(outputs: Sequence[Any]) -> list[Any]:
    """Nodes that evaluate a network of torch, above these outputs."""
    nodes = (variable.owner for variable in ancestors(outputs) if variable.owner is not None)
    return list(dict.fromkeys(node for node in nodes if hasattr(node.op, "net")))


def one_call(outputs: Sequence[Any]) -> list[Any]:
    """The output of the first of them, once for each time that PyMC put one and the same call there."""
    nodes = network_nodes(outputs)
    return [
        node.outputs[0] for node in nodes if node.op == nodes[0].op and equal_computations(node.inputs, nodes[0].inputs)
    ]
