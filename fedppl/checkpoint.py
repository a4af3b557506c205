"""Write and read a run's state: one file, replaced atomically, checked before it is believed."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

from fedppl.types import DeclarationError

__all__ = ["read", "write"]

_MAGIC = b"fedppl checkpoint 1\n"


class _Unpickler(pickle.Unpickler):
    """Loads arrays and fedppl's own tuples, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        safe_builtin = module == "builtins" and name in {"set", "frozenset", "complex", "slice", "range", "bytearray"}
        inside = module.split(".")[0] in ("fedppl", "numpy") or module == "collections" and name == "OrderedDict"
        if not (safe_builtin or inside):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the content beside the path and move it into place, so that a crash leaves the old file whole."""
    body = pickle.dumps(content, protocol=5)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or say why it cannot be used."""
    raw = path.read_bytes()
    start = len(_MAGIC) + 32
    if not raw.startswith(_MAGIC):
        raise DeclarationError(f"checkpoint {str(path)!r} is not a fedppl checkpoint; choose another path.")
    body = raw[start:]
    if hashlib.sha256(body).digest() != raw[len(_MAGIC) : start]:
        raise DeclarationError(f"checkpoint {str(path)!r} is truncated or damaged; delete it to start again.")
    content: dict[str, Any] = _Unpickler(io.BytesIO(body)).load()
    return content
