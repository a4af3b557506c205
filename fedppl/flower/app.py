"""Flower as the engine: data at sites. Reached as `fedppl.Flower`; needs fedppl[flower].

The algorithms, the loop and the random streams are those of the embedded engine, so equal seeds give equal numbers.
"""

import importlib
from typing import TYPE_CHECKING, Any

import flwr  # noqa: F401  # so that `fedppl.Flower` itself raises where Flower is not installed

if TYPE_CHECKING:
    from fedppl.flower.apps import client_app
    from fedppl.sites.enrolment import agree
    from fedppl.sites.engine import grid, server_app
    from fedppl.flower.warm import warm_app

__all__ = ["agree", "client_app", "grid", "server_app", "warm_app"]

# Loaded on use: a process with `warm_app` has no time for what the others import.
_NAMES = {
    "agree": "fedppl.sites.enrolment",
    "client_app": "fedppl.flower.apps",
    "grid": "fedppl.sites.engine",
    "server_app": "fedppl.sites.engine",
    "warm_app": "fedppl.flower.warm",
}


def __getattr__(name: str) -> Any:
    """Load a name of `_NAMES`."""
    if name not in _NAMES:
        raise AttributeError(f"module 'fedppl.flower.app' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(_NAMES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    """Names that can be loaded here."""
    return sorted({*globals(), *_NAMES})
