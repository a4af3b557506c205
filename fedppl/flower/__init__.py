"""Flower as the engine: data at sites. Reached as `fedppl.Flower`; needs fedppl[flower].

The algorithms, the loop and the random streams are those of the embedded engine, so equal seeds give equal numbers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedppl.flower.apps import agree, client_app, grid, server_app
    from fedppl.flower.warm import warm_app

__all__ = ["agree", "client_app", "grid", "server_app", "warm_app"]


def __getattr__(name: str) -> Any:
    """Load a function on use: a process with `warm_app` has no time for what the others import."""
    if name not in __all__:
        raise AttributeError(f"module 'fedppl.flower' has no attribute {name!r}")
    module = importlib.import_module(f"fedppl.flower.{'warm' if name == 'warm_app' else 'apps'}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    """Names that can be loaded here."""
    return sorted({*globals(), *__all__})
