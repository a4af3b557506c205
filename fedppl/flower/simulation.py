"""Flower's simulation runtime as an engine of this process.

Flower has no supported call that starts a simulation and returns its grid. So this module starts a SuperLink, submits a
run by Flower's command line, and talks to the run's server app, `server_app` below, which passes requests on.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedppl.contracts import AnyAlgorithm, Engine, EngineFactory, Failure, Heard, Reply, Request, unheard
from fedppl.engine.inprocess import ModelsHere
from fedppl.engine.policy import NO_RULES
from fedppl.flower import client_app as _site
from fedppl.flower.grid import GridEngine, GridSettings
from fedppl.flower.messages import register
from fedppl.model.declaration import FederatedModel, declaration_of
from fedppl.settings import positive, whole
from fedppl.types import DeclarationError


def simulation(*, workers: int | None = None, deadline: float = 600.0, start_timeout: float = 180.0) -> EngineFactory:
    """Run virtual clients on Flower's simulation runtime, on this machine: ``fedppl.fit(..., engine=...)``.

    It starts a SuperLink for the run, and stops it at the end.

    Parameters
    ----------
    workers
        Number of processes that compute, each with its own compiled models; by default one per core.
    deadline
        Seconds to wait for replies in a round where `fit` sets no deadline.
    start_timeout
        Seconds that Flower may take to start.

    Returns
    -------
    EngineFactory

    Raises
    ------
    DeclarationError
        For settings out of range.
    RuntimeError
        When Flower does not start, with the end of its log.

    Examples
    --------
    >>> import fedppl
    >>> engine = fedppl.Flower.simulation(workers=2)

    Notes
    -----
    *When this fails.* It tests what the wire does to a run, not how fast sites are: `InProcess` is far faster. The
    builder has to be picklable by cloudpickle. Personal state is lost when the run is resumed. While it runs, Flower's
    SuperLink listens on 127.0.0.1 and asks nobody who they are, since Flower's open distribution cannot: another user
    of this machine could submit an app that runs as you. Use it where nobody else has an account, or with made-up data.
    """
    count = whole("workers", workers) if workers is not None else (os.cpu_count() or 1)
    for name, value in {"deadline": deadline, "start_timeout": start_timeout}.items():
        positive(name, value, "it is in seconds")

    def factory(algorithm: AnyAlgorithm, models: Mapping[str, Any]) -> Engine:
        if not models:
            raise DeclarationError("a simulation needs the data of all clients; pass clients={id: data}.")
        if importlib.util.find_spec("ray") is None:
            raise DeclarationError(
                "Flower's simulation runs on ray, which is not here: pip install 'fedppl[simulation]'."
            )
        return start(algorithm, models, count, deadline, start_timeout)

    return factory


# The engine: a SuperLink, and a connection to its server app ----------------------------------------------------------

_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default Ray's workers have the lowest priority: on a busy machine clients would never answer.
    "RAY_worker_niceness": "0",
}
_LOG = "superlink.log"
_VARIABLE = "FEDPPL_SIMULATION"  # of the environment: names the folder
_PYPROJECT = """\
[project]
name = "fedppl-simulation"
version = "0.1.0"
description = "Passes requests of fedppl on to virtual clients"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedppl"

[tool.flwr.app.components]
serverapp = "fedppl.flower.simulation:server_app"
clientapp = "fedppl.flower.simulation:client_app"

[tool.flwr.app.config]
"""


class SimulationEngine(ModelsHere):
    """Clients' models here, for reading results; their computations in Flower's workers."""

    def __init__(self, models: Mapping[str, Any], deadline: float, relay: Connection, log: Path) -> None:
        self._models = dict(models)
        self._deadline = deadline
        self._relay = relay
        self._log = log

    def exchange(
        self, requests: Mapping[str, Request], deadline: float | None, heard: Heard = unheard
    ) -> dict[str, Reply | Failure]:
        """Pass the requests to the simulation's server app and wait for the replies."""
        try:
            self._relay.send((dict(requests), deadline or self._deadline))
            while isinstance(answers := self._relay.recv(), str):
                heard(answers)  # the id of a client that has answered
        except (EOFError, OSError) as error:
            raise RuntimeError(f"Flower's simulation has ended. {_tail(self._log)}") from error
        replies: dict[str, Reply | Failure] = answers
        return replies

    def personal(self) -> Mapping[str, Any]:
        """Return nothing: clients' personal state stays in the simulation."""
        return {}

    def restore(self, personal: Mapping[str, Any]) -> None:
        """Do nothing: clients have their personal state."""

    def close(self) -> None:
        """End the simulation and all processes that were started for it."""
        self.stop()

    stop: Callable[[], Any]


def start(
    algorithm: AnyAlgorithm, models: Mapping[str, Any], workers: int, deadline: float, timeout: float
) -> SimulationEngine:
    """Start a SuperLink and a run of the relay app, and connect to it."""
    folder = Path(tempfile.mkdtemp(prefix="fedppl-simulation-"))
    processes: list[subprocess.Popen[bytes]] = []
    connections: list[Connection] = []
    try:
        relay = _launch(folder, algorithm, models, workers, timeout, processes, connections)
    except BaseException:
        _stop(processes, connections, folder)
        raise
    engine = SimulationEngine(models, deadline, relay, folder / _LOG)
    # Also for an engine that nobody closes, as where a script breaks off or the interpreter ends.
    engine.stop = weakref.finalize(engine, _stop, processes, connections, folder)
    return engine


def _launch(
    folder: Path,
    algorithm: AnyAlgorithm,
    models: Mapping[str, Any],
    workers: int,
    timeout: float,
    processes: list[subprocess.Popen[bytes]],
    connections: list[Connection],
) -> Connection:
    end = time.monotonic() + timeout
    data = {client_id: dict(model.arrays) for client_id, model in models.items()}
    (folder / "payload").write_bytes(cloudpickle.dumps((declaration_of(models), algorithm, data)))
    key = secrets.token_bytes(32)
    listener = Listener(("127.0.0.1", 0), authkey=key)
    (folder / "relay").write_bytes(f"{listener.address[0]}:{listener.address[1]}\n".encode() + key)
    port, log = _free_port(), folder / _LOG
    environment, app = _environment(folder, port)
    superlink = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as file:
        processes.append(
            subprocess.Popen(
                [*superlink, "--disable-runtime-dependency-installation"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
    (folder / "superlink.pid").write_text(str(processes[0].pid))
    while not _listens(port):
        if processes[0].poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"Flower's SuperLink did not start within {timeout:g} s: {_tail(log)}")
        time.sleep(0.1)
    federation = f"num-supernodes={len(models)} client-resources-num-cpus=1 init-args-num-cpus={workers}"
    submitted = subprocess.run(
        ["flwr", "run", str(app), "own", "--federation-config", federation],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if submitted.returncode != 0:
        raise RuntimeError(f"Flower refused the simulation: {(submitted.stdout + submitted.stderr)[-1000:]}")
    waiter = Thread(target=lambda: connections.append(listener.accept()), daemon=True)
    waiter.start()
    while not connections:
        if processes[0].poll() is not None or time.monotonic() > end:
            raise RuntimeError(
                f"Flower's simulation did not begin within {timeout:g} s; raise start_timeout=. {_tail(log)}"
            )
        waiter.join(0.1)
    listener.close()
    return connections[0]


def _environment(folder: Path, port: int) -> tuple[dict[str, str], Path]:
    """Write Flower's configuration and the relay app; return the environment of Flower's processes and the app."""
    app, home = folder / "app", folder / "home"
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(_PYPROJECT)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "own"\n\n[superlink.own]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        **_SETTINGS,
        "FLWR_HOME": str(home),
        _VARIABLE: str(folder),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    }
    return environment, app


def _stop(processes: list[subprocess.Popen[bytes]], connections: list[Connection], folder: Path) -> None:
    """Let the server app return, then end the SuperLink and its processes."""
    for connection in connections:
        try:
            connection.send(None)
            connection.poll(20.0)  # it breaks when the simulation and its workers have ended
        except (EOFError, OSError):
            pass  # it has ended already
        connection.close()
    for process in processes:
        for sign, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(process.pid, sign)
                process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
    shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else "no log"


# Virtual clients, and the server app that passes requests on. Flower loads both in processes of its own, in which the
# environment names the folder with what to do.

client_app = ClientApp()
server_app = ServerApp()
# Never closed here: the other end takes a broken connection as the end of this process and of its workers.
_relays: list[Connection] = []


@functools.cache
def _payload(folder: str) -> tuple[FederatedModel, AnyAlgorithm, dict[str, Any]]:
    """Declaration, algorithm and all clients' data; read once a process."""
    declaration, algorithm, data = cloudpickle.loads(Path(folder, "payload").read_bytes())
    return declaration, algorithm, data


@functools.cache
def _virtual_clients(folder: str) -> ClientApp:
    declaration, algorithm, data = _payload(folder)

    def client_id(config: Mapping[str, Any]) -> str:
        return list(data)[int(config["partition-id"])]

    return _site.client_app(
        declaration,
        algorithm,
        lambda config: data[client_id(config)],
        client_id=client_id,
        folder=(lambda config: Path(folder, "sites", str(config["partition-id"]))) if algorithm.persistent else None,
        policy=NO_RULES,  # they are the user's own data
    )


def _reply(message: FlowerMessage, context: Context) -> FlowerMessage:
    return _virtual_clients(os.environ[_VARIABLE])(message, context)


register(client_app, _reply)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Enrol the virtual clients, then exchange what the process that started the simulation asks for."""
    folder = Path(os.environ[_VARIABLE])
    _, algorithm, data = _payload(str(folder))
    address, key = (folder / "relay").read_bytes().split(b"\n", 1)
    host, port = address.decode().split(":")
    connection = Client((host, int(port)), authkey=key)
    _relays.append(connection)
    engine: GridEngine | None = None
    while (message := _next(connection, folder)) is not None:
        requests, deadline = message
        engine = engine or GridEngine(grid, algorithm, GridSettings(tuple(data), 600.0, deadline, 0.02))
        connection.send(engine.exchange(requests, deadline, functools.partial(_heard, connection)))


def _heard(connection: Connection, client_id: str, /, *, clients: int = 1) -> None:
    """Report that a client has answered."""
    connection.send(client_id)


def _next(connection: Connection, folder: Path) -> Any:
    """The next requests and deadline. If their sender has died, end its SuperLink and delete its files."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        os.kill(int((folder / "superlink.pid").read_text()), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)
        raise
