"""Write and read a run's state: one file, replaced atomically, checked before it is believed."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

from fedppl.types import DeclarationError

__all__ = ["CONTENT", "pack", "read", "replace", "require_writable", "unpack", "write"]

_FORMAT = 3
_KIND = b"fedppl checkpoint "
_MAGIC = _KIND + b"%d\n" % _FORMAT
CONTENT = frozenset(
    {"fingerprint", "algorithm", "settings", "clients", "data", "seed", "name", "state", "records", "personal"}
)


# What NumPy writes arrays, scalars and dtypes with.
_NUMPY = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("_core", "core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("_core", "core")),
}


class _Unpickler(pickle.Unpickler):
    """Loads arrays, and fedppl's own named tuples and enumerations: nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NUMPY:
            return super().find_class(module, name)
        # No dots: "fedppl.checkpoint", "os.system" would walk out of the package.
        if module.split(".")[0] == "fedppl" and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and issubclass(found, tuple | Enum) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def require_writable(checkpoint: str | os.PathLike[str]) -> None:
    """Refuse a path that cannot be written to, before there is anything to write."""
    path, shown = Path(checkpoint), repr(os.fspath(checkpoint))
    try:
        if not path.parent.is_dir():
            raise DeclarationError(f"checkpoint={shown}: its folder does not exist; create it first.")
        if path.is_dir():
            raise DeclarationError(f"checkpoint={shown} is a folder; name a file in it, such as run.ckpt.")
        if path.exists() and not path.is_file():
            raise DeclarationError(f"checkpoint={shown} is a device or a pipe; name a file, such as run.ckpt.")
        partial = _partial(path)
        before = partial.exists()
        partial.open("ab").close()
        if not before:
            partial.unlink()
    except (OSError, ValueError) as error:  # a null character in a path is a ValueError
        if isinstance(error, DeclarationError):
            raise
        why = getattr(error, "strerror", None) or str(error)
        where = f", written by way of {str(_partial(path))!r}," if os.path.lexists(path.parent) else ""
        raise DeclarationError(
            f"checkpoint={shown}{where} cannot be written: {why}; choose a path where files can be made."
        ) from error


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the content beside the path and move it into place, so that a crash leaves the old file whole."""
    replace(path, pack(content))


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or say why it cannot be used."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DeclarationError(
            f"checkpoint {str(path)!r} cannot be read: {error.strerror}; choose another path."
        ) from error
    content = unpack(raw, f"checkpoint {str(path)!r}")
    if not isinstance(content, dict) or set(content) != CONTENT:
        raise DeclarationError(f"checkpoint {str(path)!r} holds something else; choose another path.")
    return content


def replace(path: Path, raw: bytes) -> None:
    """Put the bytes at the path in one step."""
    partial = _partial(path)
    with partial.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def pack(content: Any) -> bytes:
    """Bytes of a state, with their checksum."""
    body = pickle.dumps(content, protocol=5)
    return _MAGIC + hashlib.sha256(body).digest() + body


def unpack(raw: bytes, name: str) -> Any:
    """Read what `pack` wrote; `name` is what errors call it."""
    start = len(_MAGIC) + 32
    if raw.startswith(_KIND) and not raw.startswith(_MAGIC) and b"\n" in raw[: len(_KIND) + 8]:
        found = raw[len(_KIND) :].split(b"\n", 1)[0].decode(errors="replace")
        raise DeclarationError(
            f"{name} has format {found}, and this version of fedppl reads format {_FORMAT}; delete it to start "
            "again, or finish it with the version that wrote it."
        )
    if not raw.startswith(_MAGIC):
        raise DeclarationError(f"{name} is not a fedppl checkpoint; choose another path.")
    body = raw[start:]
    if hashlib.sha256(body).digest() != raw[len(_MAGIC) : start]:
        raise DeclarationError(f"{name} is truncated or damaged; delete it to start again.")
    try:
        return _Unpickler(io.BytesIO(body)).load()
    except Exception as error:  # whatever a foreign pickle raises, it is not ours
        raise DeclarationError(
            f"{name} was not written by this version of fedppl ({error}); delete it to start again."
        ) from error
