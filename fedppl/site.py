"""A site's own program: its identity, its roster of others, and its answers to bundles that come as files.

``python -m fedppl.site identity FOLDER`` makes the identity, once, and prints its public line, which goes to the other
sites by a way that is not the server. ``roster FOLDER LINE`` adds another site's line, and ``server FOLDER LINE`` that
of the server whose bundles it answers: ``answer BUNDLE --app clinics.site:app`` one of them, and ``watch FOLDER --app
clinics.site:app`` all that come into a folder, until it is interrupted. ``check --app clinics.site:app`` looks before a
first run whether all is there and in order, and says what a server would be told; nothing of it is counted or sent.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import logging
import logging.handlers
import os
import platform
import shutil
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedppl.engine import policy
from fedppl.engine.secure import IDENTITY, ROSTER, SERVER, read_server, set_server
from fedppl.engine.secure import add_to_roster as add
from fedppl.engine.secure import make_identity as make
from fedppl.engine.secure import read_keys as read
from fedppl.settings import one_line, shown, some_of
from fedppl.storage import store as _store
from fedppl.storage.signed import Memory, key_path, owner_key, reason
from fedppl.types import DataError, DeclarationError

if TYPE_CHECKING:
    from fedppl.sites.node import Node

__all__ = ["ROSTER", "add", "check", "main", "make", "read"]

_LEAST_FREE = (
    2**30
)  # bytes of the folder's disk: a run keeps some tens of MB, and a site with a full disk answers nothing
_AHEAD = 300.0  # seconds by which a time may lie in the future, as the clocks of file servers do
_MOST_LEVELS = 12  # of a column that are shown
_LONGEST = 2000  # characters of a text that a server would be told, as far as they are shown


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
        elif given.command == "check":
            return _check(given)
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
    check = commands.add_parser("check", help="look before a first run whether all is in order; nothing is sent")
    for one in (answer, watch, check):
        what = "a fedppl.Site" if one is not check else "a fedppl.Site, or of what Flower.client_app returned"
        one.add_argument("--app", required=True, help=f"module and name of {what}, as clinics.site:app")
        one.add_argument("--config", nargs="*", default=[], metavar="KEY=VALUE", help="its node config")
    for one in (answer, watch):
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


def _named(app: str) -> Any:
    """The declaration of a site by module and name; modules beside where the command runs are found too."""
    module, _, name = app.partition(":")
    if not module or not name:
        raise DeclarationError(f"--app {shown(app)} is no module and a name in it; give one like clinics.site:app.")
    sys.path.append("")  # last: whoever carries bundles may write where this runs
    try:
        found = getattr(importlib.import_module(module), name)
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


# Before a first run: whether all is there and in order, at the site's own screen -------------------------------------


class Finding(NamedTuple):
    """What was looked at, what was found, and whether something is to be done about it."""

    what: str
    said: str
    wrong: bool = False


def _check(given: argparse.Namespace) -> int:
    """Print line by line what is in order and what is not; 1 where anything is not."""
    config, any_wrong = _config(given.config), False
    node_of = _node_of(_named(given.app), given.app)
    try:
        node = node_of(config)
    except KeyError as error:
        raise DeclarationError(f"the node config lacks {error}, which the app reads; give it by --config.") from error
    for what, said, wrong in check(node, config):
        print(f"{'WRONG' if wrong else 'ok':6}{what}: {said}")
        any_wrong |= wrong
    print("something is to be done, see WRONG" if any_wrong else "all is in order; nothing was counted or sent")
    return int(any_wrong)


def _node_of(app: Any, name: str) -> Callable[[Mapping[str, Any]], Node]:
    """The function from a node config to its node, of a site's declaration or of its Flower app."""
    from fedppl.sites.node import Site, described

    if isinstance(app, Site):
        return described(app)
    if type(app).__name__ == "ClientApp":
        from fedppl.flower.apps import declared

        if app in declared:
            return declared[app]
    raise DeclarationError(f"--app {name} is {shown(app)}; name a fedppl.Site, or what Flower.client_app returned.")


def check(node: Node, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Look at all that a site needs to answer. What it finds of rows is for the site's own screen."""
    for what, look in _LOOKS.items():
        try:
            if said := look(node, config):
                yield Finding(what, said)
        except Exception as error:  # a user's function may raise anything, and it is to be told, not to end the others
            kind = "" if isinstance(error, DeclarationError | DataError) else f"{type(error).__name__}: "
            yield Finding(what, f"{kind}{error}", wrong=True)


def _versions(node: Node, config: Mapping[str, Any]) -> str:
    packages = [f"{name} {version(name)}" for name in ("fedppl", "pymc", "pytensor", "numpy")]
    return ", ".join([*packages, f"Python {platform.python_version()}"]) + "; fedppl's is the same at all sites"


def _policy(node: Node, config: Mapping[str, Any]) -> str:
    from fedppl.sites.node import require_masks

    require_masks(node.secure, node.policy)
    said, approval = policy.told(node.policy), node.policy.approval
    if isinstance(approval, str | os.PathLike):
        if not (path := Path(approval)).is_file():
            raise DeclarationError(
                f"{said}. The file {str(path)!r} of approved runs is not there; make it, it may be empty."
            )
        said += (
            f"; {len([line for line in path.read_text(encoding='utf-8').splitlines() if line.strip()])} runs approved"
        )
    return said


def _key(node: Node, config: Mapping[str, Any]) -> str:
    if not os.path.lexists(path := key_path()):
        return f"none yet at {str(path)!r}; it is made when it is needed"
    owner_key(make=False)
    return repr(str(path))


def _folders(node: Node, config: Mapping[str, Any]) -> str:
    """The site's folder and that of its identity: modes, and room on the disk."""
    said = []
    for folder in (node.folder, node.secure):
        if folder is None:
            continue
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise DeclarationError(f"{str(folder)!r} is no folder in which this user may write; make it, chmod 700.")
        for path in (folder, *folder.iterdir()):
            mode, wanted = stat.S_IMODE(path.lstat().st_mode), "700" if path.is_dir() else "600"
            private = 0o022 if path.name in (ROSTER, SERVER) else 0o077  # those two anybody may read
            if os.name == "posix" and mode & private:
                raise DeclarationError(f"{str(path)!r} is open to others (mode {mode:o}); chmod {wanted}.")
        if (free := shutil.disk_usage(folder).free) < _LEAST_FREE:
            rule = f"has {free / 2**20:.0f} MiB left on its disk, at least {_LEAST_FREE / 2**20:.0f} wanted"
            raise DeclarationError(f"{str(folder)!r} {rule}; free the disk.")
        said.append(f"{str(folder)!r}, {free / 2**30:.0f} GiB left")
    return "; ".join(said)


def _account(node: Node, config: Mapping[str, Any]) -> str:
    """The signed account, the chain of the log to its last line, and what is left of the requests."""
    if node.folder is None or not (node.folder / _store.FILE).exists():
        return "none yet; it is made with the first message"
    with _store.reading(node.folder) as store:
        lines = sum(1 for _ in _store.followed(_store.records(store), store.account[0].base, store.shown))
        answered = store.account[0].clients.get(node.client_id(config), (0,))[0]
    most = policy.resolved(node.policy, masked=node.secure is not None).requests
    return f"signed, {lines} lines whose chain holds, {answered} of {most:g} requests answered"


def _clock(node: Node, config: Mapping[str, Any]) -> str:
    """Now, which is after all times that this machine has written."""
    now, times = (
        time.time(),
        {str(path): path.stat().st_mtime for path in (Path(__file__), *(node.folder or Path()).glob("*"))},
    )
    name, last = max(times.items(), key=lambda one: one[1])
    shown_now = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat(timespec="seconds")
    if last > now + _AHEAD:
        raise DeclarationError(
            f"{shown_now} is {last - now:.0f} s before {name!r} was written; set the machine's clock."
        )
    return shown_now


def _identity(node: Node, config: Mapping[str, Any]) -> str:
    if node.secure is None:
        return "none, by the policy single replies may leave"
    keys, name = read(node.secure), node.client_id(config)
    if name not in ("", keys.name):
        raise DeclarationError(f"client id {name!r}, and identity {keys.name!r}; correct one of them.")
    others, fewest = sorted(set(keys.roster) - {keys.name}), node.policy.fewest_sites
    if len(others) + 1 < fewest:
        remedy = f"add them by python -m fedppl.site roster {node.secure} LINE"
        raise DeclarationError(f"{keys.name!r}, and {others} on its roster; a sum needs {fewest} sites, {remedy}.")
    server = read_server(node.secure)[0] if (node.secure / SERVER).exists() else ""
    return f"{keys.name!r}, with {some_of(others)} on its roster" + f"; bundles come from {server!r}" * bool(server)


def _data(node: Node, config: Mapping[str, Any]) -> str:
    """Rows, and of each column what is missing and its levels."""
    import numpy as np
    import pandas as pd

    from fedppl.data import frames

    loaded: Any = node.load_data(config)
    table = frames.raw(loaded, None, "the site") if frames.is_frame(loaded) else loaded
    if not isinstance(table, Mapping):
        return f"{type(loaded).__name__}, an estimate and no rows"
    said = []
    for name, values in table.items():
        array = np.ma.filled(np.ma.asarray(values, dtype=object), np.nan) if np.ma.isMaskedArray(values) else values
        cells = np.atleast_1d(np.asarray(array))
        for k, part in enumerate(columns := cells.reshape(len(cells), -1).T):
            known = (column := pd.Series(part)).dropna()
            levels = sorted(known.astype(str).unique()) if known.nunique() <= _MOST_LEVELS else []
            what = f"levels {', '.join(levels)}" if levels else f"{known.nunique()} values"
            place = f"{name}[{k}]" if len(columns) > 1 else name
            said.append(f"\n        {place}: {len(column)} rows, {len(column) - len(known)} missing, {what}")
    query = f"query {node.query}; " * bool(node.query)
    return f"{query}{len(table)} columns{''.join(said)}"


def _told(node: Node, config: Mapping[str, Any]) -> str:
    """What a server would be told when the site introduces itself, by what tells it, on a copied account."""
    from fedppl.formulas.formula import agree
    from fedppl.sites.node import introduce
    from fedppl.sites.site_agreement import waits

    model, loaded, heard = node.model, node.load_data(config), logging.handlers.BufferingHandler(1000)
    before = ""
    if waits(model):  # of other sites' rows nothing is known here
        fewest = policy.fewest(node.policy, 1)
        before = (
            f", and before that summaries of columns, of {fewest:g} rows or more, by which sites agree on a formula"
        )
        model = agree(model, {node.client_id(config) or "site": loaded}).model
    logger = logging.getLogger("fedppl")
    passes_on, logger.propagate = logger.propagate, False
    logger.addHandler(heard)
    try:
        with tempfile.TemporaryDirectory() as copy:
            folder = None if node.folder is None else _copied(node.folder, Path(copy))
            alone = node._replace(model=model, folder=folder, load_data=lambda config: loaded)
            arrays, texts = introduce(alone, config, Memory(lambda name: None, lambda name, raw: None), {})
    finally:
        logger.removeHandler(heard)
        logger.propagate = passes_on
    if "error" in texts:
        causes = [str(record.exc_info[1]) if record.exc_info else record.getMessage() for record in heard.buffer]
        raise DataError(f"{texts['error']}. At the site alone: {'; '.join(dict.fromkeys(causes))}")
    numbers = [f"\n        {name}: {array.size} numbers, of the declaration" for name, array in arrays.items()]
    words = [f"\n        {name}: {one_line(text, _LONGEST)}" for name, text in texts.items() if name != "client_id"]
    return f"it is {texts['client_id'] or 'without a name'}{before}{''.join([*words, *numbers])}"


def _copied(folder: Path, copy: Path) -> Path:
    """A copy of the account in a folder of this user's, so that nothing is counted."""
    if (folder / _store.FILE).exists():
        (copy / _store.FILE).touch(mode=0o600)
        with _store.reading(folder) as store, contextlib.closing(sqlite3.connect(copy / _store.FILE)) as target:
            store.connection.backup(target)
    return copy


_LOOKS: Mapping[str, Callable[[Node, Mapping[str, Any]], str]] = {
    "versions": _versions,
    "policy": _policy,
    "key": _key,
    "folder": _folders,
    "account": _account,
    "clock": _clock,
    "identity": _identity,
    "data": _data,
    "a server would be told": _told,
}


if __name__ == "__main__":
    sys.exit(main())
