"""A site's own program: its identity, its roster of others, and its answers to bundles that come as files.

``python -m fedppl.site identity FOLDER`` makes the identity, once, and prints its public line, which goes to the other
sites by a way that is not the server. ``roster FOLDER LINE`` adds another site's line, and ``server FOLDER LINE`` that
of the server whose bundles it answers: ``answer BUNDLE --app clinics.site:app`` one of them, and ``watch FOLDER --app
clinics.site:app`` all that come into a folder, until it is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedppl.engine.secure import IDENTITY, ROSTER, SERVER, set_server
from fedppl.engine.secure import add_to_roster as add
from fedppl.engine.secure import make_identity as make
from fedppl.engine.secure import read_keys as read
from fedppl.settings import shown
from fedppl.storage.signed import reason
from fedppl.types import DeclarationError

if TYPE_CHECKING:
    from fedppl.sites.node import Site

__all__ = ["ROSTER", "add", "main", "make", "read"]


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 where it is done, 1 where a rule refuses it."""
    given = _arguments(argv)
    try:
        if given.command == IDENTITY:
            print(make(given.folder, given.name or given.folder.resolve().name))
        elif given.command == ROSTER:
            print(f"{add(given.folder, given.line)!r} is on the roster {str(given.folder / ROSTER)!r}")
        elif given.command == SERVER:
            print(f"{set_server(given.folder, given.line)!r} is the server whose bundles this site answers")
        else:
            _answer(given)
    except DeclarationError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        where = getattr(error, "filename", None) or getattr(given, "folder", "")
        remedy = "give a folder in which this user may write"
        print(f"{str(where)!r} cannot be used ({reason(error)}); {remedy}.", file=sys.stderr)
        return 1
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fedppl.site", description="A site's identity, roster and answers.")
    commands = parser.add_subparsers(dest="command", required=True)
    identity = commands.add_parser(IDENTITY, help="make the identity, and print its public line")
    identity.add_argument("folder", type=Path)
    identity.add_argument("--name", help="the site's client-id; by default the name of the folder")
    for command, whose in ((ROSTER, "another site's public line"), (SERVER, "the public line of the server")):
        added = commands.add_parser(command, help=f"add {whose}")
        added.add_argument("folder", type=Path)
        added.add_argument("line", help="as it was printed there, in quotes")
    answer = commands.add_parser("answer", help="answer a bundle, and write the answer beside it")
    answer.add_argument("path", type=Path, metavar="BUNDLE")
    watch = commands.add_parser("watch", help="answer the bundles that come into a folder, until interrupted")
    watch.add_argument("path", type=Path, metavar="FOLDER")
    watch.add_argument("--poll", type=float, default=5.0, help="seconds between two looks, 5 by default")
    for one in (answer, watch):
        one.add_argument("--app", required=True, help="module and name of a fedppl.Site, as clinics.site:app")
        one.add_argument("--config", nargs="*", default=[], metavar="KEY=VALUE", help="its node config")
        where = "folder with identity and the server's line, by default what the site has as secure="
        one.add_argument("--identity", type=Path, help=where)
    return parser.parse_args(argv)


def _answer(given: argparse.Namespace) -> None:
    from fedppl.sites.files import answering, watch  # slow to import

    answer = answering(_named(given.app), _config(given.config), given.identity)
    if given.command == "answer":
        print(answer(given.path))
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        watch(given.path, answer, given.poll)


def _named(app: str) -> Site:
    """The declaration of a site by module and name; modules beside where the command runs are found too."""
    module, _, name = app.partition(":")
    if not module or not name:
        raise DeclarationError(f"--app {shown(app)} is no module and a name in it; give one like clinics.site:app.")
    sys.path.insert(0, "")
    try:
        found: Site = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        remedy = "install its package, or run this where it lies"
        raise DeclarationError(f"--app {shown(app)} cannot be loaded ({error}); {remedy}.") from error
    return found


def _config(pairs: list[str]) -> Mapping[str, str]:
    """A node config from KEY=VALUE."""
    for pair in pairs:
        if not pair.partition("=")[0] or "=" not in pair:
            raise DeclarationError(f"--config {shown(pair)} is no KEY=VALUE; give pairs as data=/srv/clinic/rows.csv.")
    return dict(pair.split("=", 1) for pair in pairs)


if __name__ == "__main__":
    sys.exit(main())
