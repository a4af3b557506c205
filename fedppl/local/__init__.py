"""Ways of local inference, one per file: what a client makes of its own variables."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedppl.contracts.client import LocalInference
    from fedppl.local.advi import ADVI, MeanField
    from fedppl.local.gradient_steps import GradientSteps
    from fedppl.local.nested_laplace import Laplace, NestedLaplace
    from fedppl.local.nuts import NUTS

__all__ = ["ADVI", "NUTS", "GradientSteps", "Laplace", "LocalInference", "MeanField", "NestedLaplace"]

_MODULES = {
    "ADVI": "local.advi",
    "MeanField": "local.advi",
    "GradientSteps": "local.gradient_steps",
    "Laplace": "local.nested_laplace",
    "NestedLaplace": "local.nested_laplace",
    "LocalInference": "contracts.client",
    "NUTS": "local.nuts",
}


def __getattr__(name: str) -> Any:
    """Load a way on first use: `NUTS` imports PyMC, which algorithms at a server do without."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedppl.local' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"fedppl.{_MODULES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
