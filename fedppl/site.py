"""A site's identity and its roster of others, by which sums over sites are added under masks.

``python -m fedppl.site identity FOLDER`` makes the identity, once, and prints its public line, which goes to the other
sites by a way that is not the server. ``python -m fedppl.site roster FOLDER LINE`` adds another's line to the roster.
"""

from __future__ import annotations

import argparse
import base64
import functools
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedppl.settings import one_line, shown
from fedppl.storage.signed import open_to_write, reason, replace, write_through
from fedppl.types import DeclarationError

if TYPE_CHECKING:
    from fedppl.engine.secure import Identity

IDENTITY, ROSTER = "identity", "roster"  # files in the folder
_LENGTH = 32  # bytes of a key
_LONGEST = 200  # characters of a name, as of a client's id
_MOST = 2**20  # bytes of a file


class Site(NamedTuple):
    """What a site's folder holds."""

    name: str
    identity: Identity
    roster: Mapping[str, bytes]  # public identities by name, its own among them


def make(folder: Path, name: str) -> str:
    """Make an identity in a folder and return its public line; one that is there stays."""
    from fedppl.engine.secure import Identity

    path = folder / IDENTITY
    _require_name(name, f"name {shown(name)}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Identity.generate()
    try:
        file = open_to_write(path, os.O_EXCL)
    except FileExistsError as error:
        there = read(folder)
        line = _line(there.name, there.identity.public_key().public_bytes_raw())
        rule = f"is there, and is made once: its public line is {line!r}"
        raise DeclarationError(f"{str(path)!r} {rule}; move it away to make a new one.") from error
    with file:
        write_through(file, f"{_line(name, made.private_bytes_raw())}\n".encode())
    return _line(name, made.public_key().public_bytes_raw())


def add(folder: Path, line: str) -> str:
    """Add a site's public line to the roster in a folder, and return the site's name."""
    path, where = folder / ROSTER, f"line {one_line(line, 60)!r}"
    if not folder.is_dir():
        remedy = f"make the site's identity first, python -m fedppl.site identity {folder}"
        raise DeclarationError(f"folder {str(folder)!r} is none; {remedy}.")
    known = _roster(path)
    name, key = _parsed(line, where)
    _require_new(name, key, known, where)
    lines = path.read_bytes().splitlines() if path.exists() else []
    replace(path, b"\n".join([*lines, f"{_line(name, key)}\n".encode()]))
    return name


def read(folder: Path) -> Site:
    """Read identity and roster.

    Raises
    ------
    DeclarationError
        Where a file is missing, the identity is open to others, or a line is none.
    """
    from fedppl.engine.secure import Identity

    path = folder / IDENTITY
    name, secret = _parsed(_private(path), f"identity {str(path)!r}")
    identity = Identity.from_private_bytes(secret)
    public, roster = identity.public_key().public_bytes_raw(), _roster(folder / ROSTER)
    if roster.get(name, public) == public:
        roster.pop(name, None)
    _require_new(name, public, roster, f"this site, in {str(folder / ROSTER)!r},")
    return Site(name, identity, {**roster, name: public})


def _private(path: Path) -> str:
    """Content of a file that only its owner may read."""
    what = f"identity {str(path)!r}"
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        remedy = f"make one by python -m fedppl.site identity {path.parent}"
        raise DeclarationError(f"{what} cannot be read ({reason(error)}); {remedy}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (os.name == "posix" and status.st_mode & 0o077):
            rule = f"open to others (mode {stat.S_IMODE(status.st_mode):o}), who could take this site's masks off"
            raise DeclarationError(f"{what} is {rule}; chmod 600 if nobody has read it, else make and send another.")
        return file.read(_MOST).decode(errors="replace")


def _roster(path: Path) -> dict[str, bytes]:
    """Public identities by name; lines that are empty or begin with # are none."""
    written = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return dict(_members(written, str(path)))


@functools.lru_cache(maxsize=8)
def _members(written: str, path: str) -> tuple[tuple[str, bytes], ...]:
    """Names and identities of a roster, once in a process: a site reads its own at each request."""
    roster: dict[str, bytes] = {}
    for number, line in enumerate(written.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            where = f"line {number} of {path!r}"
            name, key = _parsed(line, where)
            _require_new(name, key, roster, where)
            roster[name] = key
    return tuple(roster.items())


def _parsed(line: str, where: str) -> tuple[str, bytes]:
    name, _, text = line.strip().rpartition(" ")
    name = name.strip()
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != _LENGTH:
        rule = f"is not a name, a space and {_LENGTH} bytes in base64"
        raise DeclarationError(f"{where} {rule}; copy the whole line that the site printed.")
    _require_name(name, where)
    return name, key


def _require_name(name: str, where: str) -> None:
    if not (0 < len(name) <= _LONGEST and name.isprintable() and name == name.strip() and not name.startswith("#")):
        rule = f"1 to {_LONGEST} printable characters, no space at an end and no # in front"
        raise DeclarationError(f"{where} has a name that is not {rule}; give the site's client-id.")


def _require_new(name: str, key: bytes, known: Mapping[str, bytes], where: str) -> None:
    other = name if name in known else next((one for one, its in known.items() if its == key), None)
    if other is not None:
        what = "name" if other == name else "key"
        raise DeclarationError(
            f"{where} is a duplicate, with the {what} of {other!r}; take out the line that is wrong."
        )


def _line(name: str, key: bytes) -> str:
    return f"{name} {base64.b64encode(key).decode()}"


def main(argv: list[str] | None = None) -> int:
    """Make an identity or add to a roster; 0 where it is done, 1 where a rule refuses it."""
    parser = argparse.ArgumentParser(prog="python -m fedppl.site", description="A site's identity and roster.")
    commands = parser.add_subparsers(dest="command", required=True)
    identity = commands.add_parser(IDENTITY, help="make the identity, and print its public line")
    identity.add_argument("folder", type=Path)
    identity.add_argument("--name", help="the site's client-id; by default the name of the folder")
    roster = commands.add_parser(ROSTER, help="add another site's public line")
    roster.add_argument("folder", type=Path)
    roster.add_argument("line", help="as that site has printed it, in quotes")
    given = parser.parse_args(argv)
    try:
        if given.command == IDENTITY:
            print(make(given.folder, given.name or given.folder.resolve().name))
        else:
            print(f"{add(given.folder, given.line)!r} is on the roster {str(given.folder / ROSTER)!r}")
    except DeclarationError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        remedy = "give a folder in which this user may write"
        print(f"folder {str(given.folder)!r} cannot be used ({reason(error)}); {remedy}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
