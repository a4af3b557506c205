"""Where tensors live: the device of a client's network, and the way there and back.

Data, weights in messages and random numbers are NumPy's or torch's on the host; what is computed of them is on the
device. A device without float64, such as Apple's "mps", leaves what is computed in float64 to the CPU: declared
densities, checks and predictions. Its training and inference are in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedppl.types import Array, DeclarationError

CPU = torch.device("cpu")
_WITHOUT_FLOAT64 = ("mps",)
_FUSED = ("cpu", "cuda")  # whose optimizers take all steps of a parameter at once in every torch that is supported


def device_for(net: torch.nn.Module, device: Any) -> torch.device:
    """The device that is named, or the one that the network is on, where it can be used.

    Raises `DeclarationError` for what is no device, for one that is not here, and for a network on several.
    """
    if device is None:
        found = list(dict.fromkeys(value.device for value in net.parameters()))
        if len(found) > 1:
            raise DeclarationError(
                f"the network's parameters are on {[str(one) for one in found]}, and a client computes on one; "
                'move it by net.to("cpu"), or say device="cpu".'
            )
        chosen, said = found[0], f"the network is on {str(found[0])!r}, and it"
    else:
        said = f"device={device!r}" if isinstance(device, str) else f"device={str(device)!r}"
        try:
            if isinstance(device, bool) or not isinstance(device, str | torch.device):
                raise TypeError(type(device).__name__)
            chosen = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise DeclarationError(
                f'{said} must be a device of torch, "cpu", "cuda", "cuda:1" or "mps" for example; leave it out for the '
                "one that the network is on."
            ) from error
    if chosen.type == "cpu":
        return CPU
    try:  # that numbers go there and come back shows more than what a build of torch says of itself
        there = torch.ones(1, device=chosen)
        is_here = float((there + 1.0).cpu()) == 2.0
    except Exception as error:  # each device has exceptions of its own
        first = str(error).strip().partition("\n")[0]
        raise DeclarationError(
            f"{said} cannot be used on this machine ({type(error).__name__}: {first}). Devices differ between clients; "
            'take device="cpu" here, or \'"cuda" if torch.cuda.is_available() else "cpu"\', or install a torch that '
            "has it."
        ) from error
    if not is_here:
        raise DeclarationError(f'{said} cannot be used: numbers do not come back from it; take device="cpu".')
    return there.device  # with its number


def placed(device: torch.device, dtype: torch.dtype) -> torch.device:
    """Where numbers of this type are: on the device, or on the CPU where it has none of them."""
    return CPU if dtype == torch.float64 and device.type in _WITHOUT_FLOAT64 else device


def factored_on(device: torch.device) -> torch.device:
    """Where matrices are factored: not every torch factors and inverts them on "mps"."""
    return CPU if device.type in _WITHOUT_FLOAT64 else device


def is_fused(device: torch.device) -> bool:
    """Whether optimizers take fused steps there."""
    return device.type in _FUSED


def cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Real numbers in this type; whole numbers as they are."""
    return value.to(dtype) if value.is_floating_point() else value


def moved(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`cast`, on this device; in an order that asks no device for a type that it does not have."""
    if value.device == device:
        return cast(value, dtype)
    return cast(value.to(device), dtype) if device.type == "cpu" else cast(value, dtype).to(device)


def tensor(X: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers for torch: real ones in this type, whole ones as they are."""
    return moved(torch.from_numpy(np.ascontiguousarray(X)), dtype, device)


def host(value: torch.Tensor) -> Array:
    """Numbers for NumPy, in float64; they may be those of the tensor itself."""
    found: Array = value.detach().cpu().double().numpy()
    return found


def generator_of(rng: np.random.Generator) -> torch.Generator:
    """Torch's draws from a client's stream, on the host: the same whatever the device."""
    return torch.Generator().manual_seed(int(rng.integers(2**62)))


def taken(value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some of the rows, wherever they are."""
    return value[rows.to(value.device)]
