"""The rule of the keyword `local`: an algorithm's local inference."""

from __future__ import annotations

from typing import Any

from fedppl.contracts import LocalInference
from fedppl.settings import not_called, shown
from fedppl.types import DeclarationError

_INFERENCES = ("NestedLaplace", "NUTS", "ADVI", "MeanField", "Laplace", "GradientSteps")


def local_inference(name: str, value: Any, default: LocalInference) -> LocalInference:
    """A local inference that is built; None is the default."""
    if value is None:
        return default
    if isinstance(value, LocalInference):
        return value
    spelt = str(value).replace("_", "").replace(" ", "").casefold() if isinstance(value, str) else ""
    meant = next((known for known in _INFERENCES if known.casefold() == spelt), None)
    if meant is not None:
        raise DeclarationError(f"{name}={value!r} is text; pass fedppl.{meant}(), with brackets and its settings.")
    raise DeclarationError(
        f"{name}={shown(value)} is no local inference"
        + (not_called(value) or "; pass one that is built, such as fedppl.NestedLaplace() or fedppl.NUTS().")
    )
