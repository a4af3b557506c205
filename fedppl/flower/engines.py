"""Engines by way of Flower, and the server's Flower app, which runs one."""

from __future__ import annotations

import importlib.util
import logging
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedppl.contracts import AnyAlgorithm, Engine, EngineFactory, Failure, Heard, Reply, Request, unheard
from fedppl.engine.answer import require_fit
from fedppl.engine.inprocess import ModelsHere
from fedppl.flower.agreed import pack_agreement
from fedppl.flower.agreeing import agree
from fedppl.flower.grid import GridEngine, GridSettings
from fedppl.flower.roll import Own, expected_clients
from fedppl.flower.site_agreement import waits
from fedppl.formulas.exchange import example
from fedppl.formulas.formula import is_formula
from fedppl.model.declaration import FederatedModel, declaration_of
from fedppl.results.fit import Fit
from fedppl.run import loop
from fedppl.run.one_round import Round
from fedppl.run.participation import Participation
from fedppl.run.start import Options, require_callback, require_declared, require_settings, seed_of
from fedppl.settings import one_of, positive, shown, takes, whole
from fedppl.types import DeclarationError


def grid(
    grid: Grid,
    *,
    clients: int | Sequence[str],
    model: FederatedModel | None = None,
    example_data: Mapping[str, Any] | None = None,
    wait: float = 600.0,
    deadline: float = 120.0,
    poll: float = 0.25,
    grace: float = 2.0,
) -> EngineFactory:
    """Run on the sites of a Flower grid, inside a ServerApp: ``fedppl.fit(model, None, ..., engine=...)``.

    Parameters
    ----------
    grid
        Flower's grid, as its server app gets it.
    clients
        Number of sites to wait for, or their ids. No other sites take part.
    model, example_data
        The declaration, and made-up data of the form that the clients' have, name to array. From them the server knows
        itself what is shared, with which prior, and how draws of it are read, and refuses a site that says otherwise.
        Without, it believes what more than half of the `clients` say alike, and a single client whatever it says.
        A formula that clients agreed on (`agree`) needs no data beside it, and goes to the sites.
    wait
        Seconds to wait for them to enrol.
    deadline
        Seconds to wait for replies in a round where `fit` sets no deadline.
    poll
        Seconds between two looks.
    grace
        Seconds that a request outlives the deadline. A client that missed it is not asked again before that.

    Returns
    -------
    EngineFactory

    Raises
    ------
    DeclarationError
        For settings out of range; at the start of a run, when sites are missing or do not agree.

    Examples
    --------
    >>> import fedppl
    >>> def main(grid, context):
    ...     fit = fedppl.fit(model, None, fedppl.EP(), engine=fedppl.Flower.grid(grid, clients=3))

    Notes
    -----
    *When this fails.* A site that is silent, late, down or restarted is skipped, and the round's record says so. Two
    live sites with one id: the second is refused until the first has gone.
    """
    expected = expected_clients(clients)
    for name, value in {"wait": wait, "deadline": deadline, "poll": poll, "grace": grace}.items():
        positive(name, value, "it is in seconds")
    greeting: dict[str, str] = {}
    if is_formula(model):
        assert model is not None
        if waits(model):
            raise DeclarationError(
                "model= is a formula that clients have not agreed on: pass the model of fedppl.Flower.agree(grid, ...)."
            )
        built: Any = model.builder
        example_data = example(built) if example_data is None else example_data
        greeting = {"agreement": pack_agreement(built.design.agreement)}
    if (model is None) != (example_data is None):
        raise DeclarationError("model= and example_data= belong together: pass both, or neither.")
    if model is not None and not (isinstance(model, FederatedModel) and isinstance(example_data, Mapping)):
        raise DeclarationError(
            f"model is {type(model).__name__} and example_data is {type(example_data).__name__}; pass a FederatedModel "
            "and a mapping from its builder's names to arrays."
        )

    def factory(algorithm: AnyAlgorithm, models: Mapping[str, Any]) -> Engine:
        if models:
            raise DeclarationError("the data are at the sites: pass clients=None, and the sites' load_data finds them.")
        own = None
        if model is not None:
            client = model.enrol({"example_data": example_data or {}}, kernel=algorithm.needs.kernel)["example_data"]
            require_fit(algorithm, client)
            own = Own(client.layout, client.reader())
        return GridEngine(grid, algorithm, GridSettings(expected, wait, deadline, poll, grace), own, greeting)

    return factory


def server_app(
    federated_model: FederatedModel,
    algorithm: AnyAlgorithm,
    *,
    clients: int | Sequence[str],
    example_data: Mapping[str, Any] | None = None,
    min_count: int = 1,
    withheld: str = "other",
    rounds: int = 20,
    participation: Participation | int | float | None = None,
    checkpoint: str | Path | None = None,
    deadline: float = 120.0,
    wait: float = 600.0,
    random_seed: int | None = None,
    on_fit: Callable[[Fit, Context], None] | None = None,
    callback: Callable[[Round], bool | None] | None = None,
) -> ServerApp:
    """Make the server's Flower app. It never sees data.

    Parameters
    ----------
    federated_model, algorithm
        As at the sites. Of what is no formula the server without `example_data` uses no more than the names that are
        shared, and learns shapes and the prior from the sites.
    clients, example_data, wait
        As in `grid`.
    min_count, withheld
        As in `agree`, which is asked first where the declaration is a formula that clients have not agreed on.
    rounds, participation, checkpoint, deadline, random_seed, callback
        As in `fedppl.fit`. Entries of the run config with these names win, so that ``flwr run --run-config`` can
        set them; an empty checkpoint is none.
    on_fit
        Function of the Fit and Flower's context, called when the run is over.

    Returns
    -------
    flwr.serverapp.ServerApp

    Raises
    ------
    DeclarationError
        For a setting out of range, where `on_fit` is no function of two arguments, and for a model or an algorithm that
        is none.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> app = fedppl.Flower.server_app(normal_means()[0], fedppl.EP(), clients=3, random_seed=1)

    Notes
    -----
    *When this fails.* An exception ends the Flower run as failed, which ``flwr ls`` shows (``flwr run`` exits with 0
    all the same). A server that was killed goes on from `checkpoint` in a new run.
    """
    expected_clients(clients)
    for name, value in {"wait": wait, "deadline": deadline}.items():
        positive(name, value, "it is in seconds")
    require_declared(federated_model, algorithm)
    whole("min_count", min_count), one_of("withheld", withheld, ("error", "other"))
    require_settings(rounds, participation, None, checkpoint or None, deadline)
    seed_of(random_seed)
    require_callback(callback)
    if on_fit is not None and not (callable(on_fit) and takes(on_fit, 2)):
        raise DeclarationError(f"on_fit={shown(on_fit)} is not a function of the fit and Flower's context.")
    app = ServerApp()

    @app.main()
    def main(flower_grid: Grid, context: Context) -> None:
        chosen: dict[str, Any] = {
            "rounds": rounds,
            "participation": participation,
            "checkpoint": checkpoint,
            "deadline": deadline,
            "random_seed": random_seed,
        }
        chosen |= {name: context.run_config[name] for name in chosen if name in context.run_config}
        expected: Any = context.run_config.get("clients", clients)
        patience, model = float(context.run_config.get("wait", wait)), federated_model
        if waits(model):
            found = agree(flower_grid, model, clients=expected, min_count=min_count, withheld=withheld, wait=patience)
            expected, model = found.clients, found.model
        engine = grid(
            flower_grid,
            clients=expected,
            model=None if example_data is None and not is_formula(model) else model,
            example_data=example_data,
            wait=patience,
        )
        options = Options(engine=engine, **{**chosen, "checkpoint": chosen["checkpoint"] or None})
        fit = loop.fit(model, None, algorithm, options, callback=callback, progressbar=False)
        if on_fit is not None:
            on_fit(fit, context)

    return app


def simulation(*, workers: int | None = None, deadline: float = 600.0, start_timeout: float = 180.0) -> EngineFactory:
    """Run virtual clients on Flower's simulation runtime, on this machine: ``fedppl.fit(..., engine=...)``.

    A SuperLink of its own is started for the run, asked through Flower's command line, and stopped at the end.

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


# Flower's simulation runtime as an engine of this process: a SuperLink of our own, and a relay to its server app ------

# Flower offers no supported call that starts a simulation and hands back its grid, so the run is started by Flower's
# command line, and its server app (`_virtual`) does nothing but pass requests on.

logger = logging.getLogger(__name__)

_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers step back behind everything else on a machine by default: on a busy one clients never answer.
    "RAY_worker_niceness": "0",
}
_LOG = "superlink.log"
_PYPROJECT = """\
[project]
name = "fedppl-simulation"
version = "0.1.0"
description = "Passes requests of fedppl on to virtual clients"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedppl"

[tool.flwr.app.components]
serverapp = "fedppl.flower.virtual:server_app"
clientapp = "fedppl.flower.virtual:client_app"

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
        """Pass the requests to the server app of the simulation and wait for what it brings back."""
        try:
            self._relay.send((dict(requests), deadline or self._deadline))
            while isinstance(answers := self._relay.recv(), str):
                heard(answers)  # the id of a client that has answered
        except (EOFError, OSError) as error:
            raise RuntimeError(f"Flower's simulation has ended. {_tail(self._log)}") from error
        found: dict[str, Reply | Failure] = answers
        return found

    def personal(self) -> Mapping[str, Any]:
        """Return nothing: what clients keep stays where they are."""
        return {}

    def restore(self, personal: Mapping[str, Any]) -> None:
        """Do nothing: clients have what they kept."""

    def close(self) -> None:
        """End the simulation and everything that was started for it."""
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
    # Also where nobody closes the engine: a script that breaks off its rounds, or the end of the interpreter.
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
    declaration = declaration_of(models)
    data = {client_id: dict(model.arrays) for client_id, model in models.items()}
    (folder / "payload").write_bytes(cloudpickle.dumps((declaration, algorithm, data)))
    key = secrets.token_bytes(32)
    listener = Listener(("127.0.0.1", 0), authkey=key)
    address = f"{listener.address[0]}:{listener.address[1]}"
    (folder / "relay").write_bytes(address.encode() + b"\n" + key)
    port = _free_port()
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
        "FEDPPL_SIMULATION": str(folder),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    }
    log = folder / _LOG
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
    told = subprocess.run(
        ["flwr", "run", str(app), "own", "--federation-config", federation],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if told.returncode != 0:
        raise RuntimeError(f"Flower refused the simulation: {(told.stdout + told.stderr)[-1000:]}")
    accepted: list[Connection] = []
    waiter = Thread(target=lambda: accepted.append(listener.accept()), daemon=True)
    waiter.start()
    while not accepted:
        if processes[0].poll() is not None or time.monotonic() > end:
            raise RuntimeError(
                f"Flower's simulation did not begin within {timeout:g} s; raise start_timeout=. {_tail(log)}"
            )
        waiter.join(0.1)
    connections.append(accepted[0])
    listener.close()
    return accepted[0]


def _stop(processes: list[subprocess.Popen[bytes]], connections: list[Connection], folder: Path) -> None:
    """Let the server app return, then end the SuperLink and whatever is left of its processes."""
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
