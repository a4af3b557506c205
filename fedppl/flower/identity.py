"""What a warm worker was started with, part by part: a change is seen, and named in the log."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedppl.types import DeclarationError

_SOURCES = {".py", ".toml", ".json", ".yaml", ".md"}  # what Flower packs
_NAMED = 3  # changes


def identity(told: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Digests of interpreter, version, what a worker is told, node config, and source files of the app's top package.

    Raises `DeclarationError` if the package is not found.
    """
    values = {
        "interpreter": sys.executable,
        "version of fedppl": version("fedppl"),
        **{name: told[name] for name in ("app", "folder", "idle", "path")},
        "node config": dict(config),
    }
    found = {name: _digest(json.dumps(each, sort_keys=True, default=str).encode()) for name, each in values.items()}
    return found | {str(file): _digest(file.read_bytes()) for file in _sources(told["app"], Path(told["folder"]))}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What is another, in words."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} changed"


def _sources(app: str, site: Path) -> Iterator[Path]:
    """Files of the package, or beside the module, but for those that the site writes: its account, at each message."""
    top = app.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # of a module without a spec, such as __main__
        spec = None
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        raise DeclarationError(f"app={app!r}: no file or folder of {top!r} is found; name a module that is installed.")
    packages = spec.submodule_search_locations  # several where the parts of a package have no __init__.py
    for where in packages or [str(Path(str(spec.origin)).parent)]:
        folder, own = Path(where), site.resolve()
        if folder.resolve().is_relative_to(own):
            own /= "ledger.json"
        for file in sorted(folder.rglob("*") if packages else folder.glob("*")):
            if file.suffix in _SOURCES and file.is_file() and not file.resolve().is_relative_to(own):
                yield file


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
