"""The Flower app of `fedppl.Flower.simulation`: virtual clients, and a server app that passes requests on.

Loaded by Flower in processes of its own, which find what to do in the folder that the environment names.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import cloudpickle
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedppl.engine.policy import NO_RULES
from fedppl.flower import client_app as _client_app
from fedppl.flower.grid import GridEngine, GridSettings

_FOLDER = os.environ["FEDPPL_SIMULATION"]


@functools.lru_cache(maxsize=1)
def _payload(folder: str) -> tuple[Any, Any, dict[str, Any]]:
    """Declaration, algorithm and all clients' data; once a process."""
    declaration, algorithm, data = cloudpickle.loads((Path(folder) / "payload").read_bytes())
    return declaration, algorithm, data


def _client_id(config: Mapping[str, Any], folder: str = _FOLDER) -> str:
    return list(_payload(folder)[2])[int(config["partition-id"])]


def _load_data(config: Mapping[str, Any], folder: str = _FOLDER) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = _payload(folder)[2][_client_id(config, folder)]
    return loaded


def _folder(config: Mapping[str, Any], folder: str = _FOLDER) -> str:
    return str(Path(folder) / "sites" / str(config["partition-id"]))


_declaration, _algorithm, _ = _payload(_FOLDER)
client_app = _client_app.client_app(
    _declaration,
    _algorithm,
    _load_data,
    client_id=_client_id,
    folder=_folder if _algorithm.persistent else None,
    policy=NO_RULES,  # they are the user's own data
)
server_app = ServerApp()
# Never closed here: that it breaks tells the other end that this whole process has ended, its workers with it.
_held: list[Connection] = []


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Enrol the virtual clients, then exchange what the process that started the simulation asks for."""
    data = _payload(_FOLDER)[2]
    address, key = (Path(_FOLDER) / "relay").read_bytes().split(b"\n", 1)
    host, port = address.decode().split(":")
    connection = Client((host, int(port)), authkey=key)
    _held.append(connection)
    engine: GridEngine | None = None
    while (asked := _next(connection)) is not None:
        requests, deadline = asked
        engine = engine or GridEngine(grid, _algorithm, GridSettings(tuple(data), 600.0, deadline, 0.02))
        connection.send(engine.exchange(requests, deadline, functools.partial(_heard, connection)))


def _heard(connection: Connection, client_id: str, /, *, clients: int = 1) -> None:
    """Tell who waits that a client has answered."""
    connection.send(client_id)


def _next(connection: Connection) -> Any:
    """What is asked next. Where the process that asks has died, its SuperLink and its files go with it."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        os.kill(int((Path(_FOLDER) / "superlink.pid").read_text()), signal.SIGTERM)
        shutil.rmtree(_FOLDER, ignore_errors=True)
        raise
