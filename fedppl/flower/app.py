"""Flower as the engine: data at sites, simulation on one machine. Reached as `fedppl.Flower`; needs fedppl[flower].

The algorithms, the loop and the random streams are those of the embedded engine, so equal seeds give equal numbers.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedppl.contracts import Algorithm, AnyAlgorithm, Engine, EngineFactory
from fedppl.engine.answer import require_fit
from fedppl.engine.policy import NO_RULES, Policy, read
from fedppl.flower import site as _site
from fedppl.flower.grid import GridEngine, GridSettings, Own
from fedppl.flower.records import ASK, CONCLUDE, CONSTRAIN, HELLO, from_content, to_content
from fedppl.flower.simulation import start
from fedppl.model.declaration import FederatedModel
from fedppl.results.fit import Fit
from fedppl.run import loop
from fedppl.run.participation import Participation
from fedppl.settings import positive, shown, whole
from fedppl.types import DeclarationError

__all__ = ["client_app", "grid", "server_app", "simulation"]


def client_app(
    federated_model: FederatedModel,
    algorithm: AnyAlgorithm,
    load_data: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    client_id: Callable[[Mapping[str, Any]], str] | None = None,
    folder: str | Path | Callable[[Mapping[str, Any]], str | Path] | None = None,
    policy: Policy | str | Path | Callable[[Mapping[str, Any]], Policy | str | Path] | None = None,
    draws: int = 1000,
    chains: int = 4,
) -> ClientApp:
    """Make a site's Flower app: it answers with moments, never with rows.

    Parameters
    ----------
    federated_model
        The declaration, the same at every site and at the server.
    algorithm
        The algorithm, with the same settings at every site and at the server.
    load_data
        Your function from the site's node config to its data, name to array. It runs at the site.
    client_id
        Function from the node config to this client's id; by default its entry ``client-id``, or nothing where
        the server knows the site by its authenticated name.
    folder
        Where this site keeps its audit log and its account of all that it has released (``audit.jsonl``,
        ``ledger.json``), its personal state, a salted digest of its data (other data are refused in a run that has
        begun), its last answer, and, when the run is over, its own posterior (a NetCDF file named after the client); a
        path, or a function from the node config to one. Limits count over all runs in it: deleting the files grants
        them anew. None goes only with ``policy=fedppl.policy.NO_RULES``: nothing is logged or counted then.
    policy
        What this site allows: a `fedppl.Policy`, the path of a TOML file with one, or a function from the node config
        to either. By default ``fedppl.Policy()``.
    draws, chains
        Size of that posterior.

    Returns
    -------
    flwr.clientapp.ClientApp

    Raises
    ------
    DeclarationError
        If the arguments are not what they should be.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> app = fedppl.Flower.client_app(
    ...     model, fedppl.EP(), lambda config: clients[config["client-id"]], folder=lambda config: config["folder"]
    ... )

    Notes
    -----
    *When this fails.* A site whose data do not fit, or that runs other code than the server, is refused when it
    enrols. The text of an exception stays in the site's log, since it may quote data; the server learns its type.
    """
    if not isinstance(federated_model, FederatedModel) or not isinstance(algorithm, Algorithm):
        raise DeclarationError("client_app takes a FederatedModel and an algorithm that is built, like fedppl.EP().")
    if not (client_id is None or callable(client_id)):
        raise DeclarationError(
            f"client_id={shown(client_id)} must be a function from the node config to this client's id."
        )
    if not (folder is None or callable(folder) or (isinstance(folder, str | Path) and str(folder))):
        raise DeclarationError(f"folder={shown(folder)} must be a path, or a function from the node config to one.")
    draws, chains = whole("draws", draws), whole("chains", chains)
    if not callable(load_data):
        raise DeclarationError(f"load_data is {type(load_data).__name__}; pass a function from node config to data.")
    if algorithm.persistent and folder is None:
        raise DeclarationError(
            f"{algorithm.name} counts what a site has released over all runs; give client_app a folder= that lasts."
        )
    if not (policy is None or callable(policy) or isinstance(policy, Policy | str | Path)):
        raise DeclarationError(
            f"policy={shown(policy)} must be a fedppl.Policy, the path of a TOML file with one, or a function from the "
            "node config to either."
        )
    if folder is None and policy != NO_RULES:
        raise DeclarationError(
            "folder=None: a policy counts requests over all runs and keeps an audit log; give client_app a folder= "
            "that lasts, or policy=fedppl.policy.NO_RULES where the data need no protection."
        )
    named = client_id or (lambda config: str(config.get("client-id", "")))
    token = secrets.token_hex(8)

    def site(context: Context) -> _site.Site:
        where = folder(context.node_config) if callable(folder) else folder
        path = None if where is None else Path(where)
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        chosen = policy(context.node_config) if callable(policy) else policy
        rules = chosen if isinstance(chosen, Policy) else Policy() if chosen is None else read(chosen)
        return _site.Site(token, federated_model, algorithm, load_data, named, path, draws, chains, rules)

    # Flower copies the app to its workers: nothing here may hold data, compiled models or locks.
    app = ClientApp()

    @app.query(HELLO.split(".")[1])
    def hello(message: FlowerMessage, context: Context) -> FlowerMessage:
        parcel = _site.introduce(site(context), context.node_config)
        return FlowerMessage(to_content(*parcel), reply_to=message)

    @app.train(ASK.split(".")[1])
    def ask(message: FlowerMessage, context: Context) -> FlowerMessage:
        here = site(context)
        memory = _site.file_memory(here.folder) if here.folder else _context_memory(context)
        parcel = _site.answer_request(here, context.node_config, memory, _read(message))
        return FlowerMessage(to_content(*parcel), reply_to=message)

    @app.query(CONSTRAIN.split(".")[1])
    def constrain(message: FlowerMessage, context: Context) -> FlowerMessage:
        parcel = _site.constrain(site(context), context.node_config, _read(message)[0])
        return FlowerMessage(to_content(*parcel), reply_to=message)

    @app.evaluate(CONCLUDE.split(".")[1])
    def conclude(message: FlowerMessage, context: Context) -> FlowerMessage:
        here = site(context)
        memory = _site.file_memory(here.folder) if here.folder else _context_memory(context)
        parcel = _site.conclude(here, context.node_config, memory, _read(message))
        return FlowerMessage(to_content(*parcel), reply_to=message)

    return app


def _read(message: FlowerMessage) -> tuple[Mapping[str, Any], dict[str, str]]:
    """What came; nothing where it cannot be read, which the site refuses like anything else that is malformed."""
    try:
        return from_content(message.content)
    except Exception:
        return {}, {}


def _context_memory(context: Context) -> _site.Memory:
    """One personal state and one digest in the node's context: a cache, gone when the node restarts."""

    def recall(name: str) -> bytes | None:
        record = context.state.config_records.get("fedppl")
        return None if record is None or name not in record else bytes(record[name])  # type: ignore[arg-type]

    def keep(name: str, raw: bytes) -> None:
        before: Mapping[str, Any] = context.state.config_records.get("fedppl") or {}
        others = {other: value for other, value in before.items() if Path(other).suffix != Path(name).suffix}
        context.state["fedppl"] = ConfigRecord({**others, name: raw})

    return _site.Memory(recall, keep)


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
        What Flower hands to the server app.
    clients
        Number of sites to wait for, or their ids. No other sites take part.
    model, example_data
        The declaration, and made-up data of the form that the clients' have, name to array. From them the server knows
        itself what is shared, with which prior, and how draws of it are read, and refuses a site that says otherwise.
        Without, it believes what more than half of the `clients` say alike, and a single client whatever it says.
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
    expected = _expected(clients)
    for name, value in {"wait": wait, "deadline": deadline, "poll": poll, "grace": grace}.items():
        positive(name, value, "it is in seconds")
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
        return GridEngine(grid, algorithm, GridSettings(expected, wait, deadline, poll, grace), own)

    return factory


def _expected(clients: Any) -> int | tuple[str, ...]:
    """The number of sites to wait for, or their ids."""
    if isinstance(clients, int) and not isinstance(clients, bool):
        return whole("clients", clients)
    names = clients if isinstance(clients, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        raise DeclarationError(
            f"clients={shown(clients)} must be the number of sites to wait for, or a list of their ids, none twice."
        )
    return tuple(names)


def server_app(
    federated_model: FederatedModel,
    algorithm: AnyAlgorithm,
    *,
    clients: int | Sequence[str],
    example_data: Mapping[str, Any] | None = None,
    rounds: int = 20,
    participation: Participation | int | float | None = None,
    checkpoint: str | Path | None = None,
    deadline: float = 120.0,
    wait: float = 600.0,
    random_seed: int | None = None,
    on_fit: Callable[[Fit, Context], None] | None = None,
    callback: Callable[[loop.Round], bool | None] | None = None,
) -> ServerApp:
    """Make the server's Flower app. It never sees data.

    Parameters
    ----------
    federated_model, algorithm
        As at the sites. Without `example_data` the server uses no more of the declaration than the names that are
        shared, and learns shapes and the prior from the sites.
    clients, example_data, wait
        As in `grid`.
    rounds, participation, checkpoint, deadline, random_seed, callback
        As in `fedppl.fit`. Entries of the run config with these names win, so that ``flwr run --run-config`` can
        set them; an empty checkpoint is none.
    on_fit
        Called with the Fit and Flower's context when the run is over.

    Returns
    -------
    flwr.serverapp.ServerApp

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
    _expected(clients)
    for name, value in {"wait": wait, "deadline": deadline}.items():
        positive(name, value, "it is in seconds")
    whole("rounds", rounds)
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
        expected = context.run_config.get("clients", clients)
        engine = grid(
            flower_grid,
            clients=expected,  # type: ignore[arg-type]
            model=None if example_data is None else federated_model,
            example_data=example_data,
            wait=float(context.run_config.get("wait", wait)),
        )
        fit = loop.fit(
            federated_model,
            None,
            algorithm,
            engine=engine,
            callback=callback,
            progressbar=False,
            **{**chosen, "checkpoint": chosen["checkpoint"] or None},
        )
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
    builder has to be picklable by cloudpickle. Personal state is lost when the run is resumed.
    """
    count = whole("workers", workers) if workers is not None else (os.cpu_count() or 1)
    for name, value in {"deadline": deadline, "start_timeout": start_timeout}.items():
        positive(name, value, "it is in seconds")

    def factory(algorithm: AnyAlgorithm, models: Mapping[str, Any]) -> Engine:
        if not models:
            raise DeclarationError("a simulation needs the data of all clients; pass clients={id: data}.")
        return start(algorithm, models, count, deadline, start_timeout)

    return factory
