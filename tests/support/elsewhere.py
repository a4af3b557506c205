"""A device of torch that is not the CPU, made of numbers that are: what a GPU refuses is refused, and what it computes
is computed.

Tensors on it say that they are on "meta" and hold their numbers. A tensor of the CPU beside one of them in an operation
is an error, as on a GPU, but for one number and for indices; so is NumPy's view of them. Where tensors come into being
is counted by operation.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map  # noqa: E402

NAME = "meta"
REFUSED: tuple[Any, ...] = ()  # types that the device does not have
_COPIES = ("aten::copy_", "aten::_to_copy")
_INDEXED = ("aten::index.", "aten::index_put", "aten::_index_put", "aten::_unsafe_index")


class Elsewhere(torch.Tensor):  # type: ignore[misc]
    """A tensor on the device; `held` has its numbers."""

    held: Any

    @staticmethod
    def __new__(cls, held: Any) -> Any:
        if held.dtype in REFUSED:
            raise TypeError(f"the device has no {held.dtype}")
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=NAME,
            requires_grad=held.requires_grad,
        )
        found.held = held
        return found

    def __repr__(self, **settings: Any) -> str:
        return f"Elsewhere({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    @property
    def data(self) -> Any:
        """The same without gradients, as torch has it; what it is set to is where its numbers are."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        torch.Tensor.data.__set__(self, value)
        self.held = value.held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _held(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, flat = str(function.name()), tree_flatten((args, kwargs))[0]
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    there = [one for one in tensors if isinstance(one, Elsewhere)]
    device = kwargs.get("device")
    if not name.startswith(_COPIES):
        here = [one for one in tensors if not isinstance(one, Elsewhere) and one.ndim]
        if name.startswith(_INDEXED):
            here = [one for one in here if one.is_floating_point()]
        if there and here:
            raise RuntimeError(f"{name}: tensors on two devices, {[tuple(one.shape) for one in here]} on the CPU")
    found = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    goes = there and device is None or (device is not None and torch.device(device).type == NAME)
    if name.startswith("aten::copy_"):
        return args[0]
    if not goes:
        return found
    if function._schema.name.endswith("_") and isinstance(args[0], Elsewhere):  # in place
        return args[0]
    out = kwargs.get("out")
    return (
        out
        if out is not None
        else tree_map(lambda one: Elsewhere(one) if isinstance(one, torch.Tensor) else one, found)
    )


class device_elsewhere(TorchDispatchMode):  # type: ignore[misc]
    """While it lasts, "meta" is the device. Operations on the CPU are counted by name and by what is around them.

    Attributes
    ----------
    here, there
        How many floating-point results operations had on the CPU, and on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.here: Counter[str] = Counter()
        self.there: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _run(function, args, kwargs or {})
        for one in tree_flatten(found)[0]:
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.ndim:
                (self.there if isinstance(one, Elsewhere) else self.here)[str(function.name())] += 1
        return found
