"""Write the inventories by which Sphinx links to other packages: ``python docs/inventories.py``.

The site is built without a network. So what a link needs stands in ``docs/inventories``: ``names.txt`` has each name
with its address, and an inventory of Sphinx (version 2) is made of it for each package.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "inventories"
ROLES = {"class": "class", "function": "func"}


class Package(NamedTuple):
    """Names of one package: (name, role, address below the package's)."""

    name: str
    address: str
    entries: tuple[tuple[str, str, str], ...]


def read(text: str) -> list[Package]:
    """Packages of a list of names: of a line in brackets, and of those below it."""
    found: list[Package] = []
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.strip("[]").split()
        if not parts or line.startswith("#"):
            continue
        if line.startswith("[") and len(parts) == 2:
            found.append(Package(parts[0], parts[1], ()))
        elif len(parts) == 3 and found:
            found[-1] = found[-1]._replace(entries=(*found[-1].entries, (parts[0], parts[1], parts[2])))
        else:
            raise ValueError(f"line {number}, {line!r}, is neither '[package address]' nor 'name role address'.")
    return found


def inventory(package: Package) -> bytes:
    """Inventory of Sphinx, version 2: four lines, and one for each name, compressed."""
    head = f"# Sphinx inventory version 2\n# Project: {package.name}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    lines = [
        f"{name} py:{role} 1 {address.replace('$', name) if '#' in address else address.replace('$', name) + '#$'} -\n"
        for name, role, address in sorted(package.entries)
    ]
    return head.encode() + zlib.compress("".join(lines).encode(), 9)


def packages() -> list[Package]:
    """Packages of the list that stands here."""
    return read((FOLDER / "names.txt").read_text(encoding="utf-8"))


def mapping() -> dict[str, tuple[str, str]]:
    """Address and inventory of each package, as ``intersphinx_mapping`` takes them."""
    return {one.name: (one.address, str(FOLDER / f"{one.name}.inv")) for one in packages()}


def aliases() -> dict[str, str]:
    """Names that become links where they stand as types, as ``numpydoc_xref_aliases`` takes them."""
    return {name: f":{ROLES[role]}:`{name}`" for one in packages() for name, role, _ in one.entries}


if __name__ == "__main__":
    for one in packages():
        (FOLDER / f"{one.name}.inv").write_bytes(inventory(one))
