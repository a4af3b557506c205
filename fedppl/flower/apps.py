"""The functions for Flower: a site's app, the server's app, and inside it an engine and an agreement on a formula."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import ConfigRecord, Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedppl.contracts import AnyAlgorithm, EngineFactory
from fedppl.engine.policy import FEWEST_SITES, Policy
from fedppl.flower.messages import Post, read_message, register, to_content
from fedppl.formulas.exchange import listed
from fedppl.formulas.formula import Agreed
from fedppl.model.declaration import FederatedModel
from fedppl.results.fit import Fit
from fedppl.run import loop
from fedppl.run.loop import Options, require_callback, require_declared, require_settings, seed_of
from fedppl.run.one_round import Round
from fedppl.run.progress import Participation
from fedppl.settings import one_of, positive, shown, takes, whole
from fedppl.sites import enrolment
from fedppl.sites import node as _node
from fedppl.sites.conclusions import answer
from fedppl.sites.engine import LostSites, Sites, SitesSettings, checked
from fedppl.sites.node import Node
from fedppl.sites.site_agreement import waits
from fedppl.storage.signed import Memory
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

_GRACE = 2.0  # seconds that a question of an agreement outlives the wait

# The node of a node config, with the policy read anew. Kept beside the apps and not in them, since Flower copies apps.
declared: WeakKeyDictionary[ClientApp, Callable[[Mapping[str, Any]], Node]] = WeakKeyDictionary()


def client_app(
    federated_model: FederatedModel,
    algorithm: AnyAlgorithm,
    load_data: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    client_id: Callable[[Mapping[str, Any]], str] | None = None,
    kind: str | Callable[[Mapping[str, Any]], str | None] | None = None,
    folder: str | Path | Callable[[Mapping[str, Any]], str | Path] | None = None,
    policy: Policy | str | Path | Callable[[Mapping[str, Any]], Policy | str | Path] | None = None,
    secure: str | Path | Callable[[Mapping[str, Any]], str | Path] | None = None,
    draws: int = 1000,
    chains: int = 4,
) -> ClientApp:
    """Make a site's Flower app: it answers with moments, never with rows.

    Parameters
    ----------
    federated_model, algorithm, load_data, client_id, kind, folder, policy, secure, draws, chains
        As in `fedppl.Site`. The server knows a site without an id by its authenticated name.

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
    ...     model,
    ...     fedppl.Sums(),
    ...     lambda config: clients[config["client-id"]],
    ...     folder=lambda config: config["folder"],
    ...     secure=lambda config: config["secure"],
    ... )

    Notes
    -----
    *When this fails.* A site whose data do not fit, or that runs other code than the server, is refused when it
    enrols. The text of an exception stays in the site's log, since it may quote data; the server learns its type.
    """
    options = client_id, kind, folder, policy, secure, draws, chains
    node = _node.described(_node.Site(federated_model, algorithm, load_data, *options))

    # Flower copies the app to its workers: no closure here may hold data, compiled models or locks.
    app = ClientApp()

    def reply(message: FlowerMessage, context: Context) -> FlowerMessage:
        here = node(context.node_config)
        memory = None if here.folder else _context_memory(context)
        parcel = answer(message.metadata.message_type, here, context.node_config, memory, read_message(message))
        return FlowerMessage(to_content(*parcel), reply_to=message)

    register(app, reply)
    declared[app] = node
    return app


def _context_memory(context: Context) -> Memory:
    """A memory in the node's context, of one state and one digest; it is a cache, lost when the node restarts."""

    def recall(name: str) -> bytes | None:
        record = context.state.config_records.get("fedppl")
        return None if record is None or name not in record else bytes(record[name])  # type: ignore[arg-type]

    def keep(name: str, raw: bytes) -> None:
        before: Mapping[str, Any] = context.state.config_records.get("fedppl") or {}
        others = {other: value for other, value in before.items() if Path(other).suffix != Path(name).suffix}
        context.state["fedppl"] = ConfigRecord({**others, name: raw})

    return Memory(recall, keep)


# The server ----------------------------------------------------------------------------------------------------------


def agree(
    grid: Grid,
    model: FederatedModel,
    *,
    clients: int | Sequence[str],
    min_count: int = 1,
    withheld: str = "other",
    wait: float = 600.0,
    poll: float = 0.25,
    secure: bool = False,
) -> Agreed:
    """Have sites agree on levels and scales of a formula, inside a ServerApp, as `fedppl.agree` does for data here.

    Each site summarises the formula's columns once, as far as its policy allows: the number of rows; of numbers the
    rounded sum and sum of squares; of texts the number of rows at each level. Nothing of fewer rows than the larger of
    `min_count` and the policy's `agreement` (10 by default) leaves, nor whether there are such rows. The agreement goes
    to all sites when they enrol. Each checks it against its rows, and leaves out rows of levels that are not in it
    where they are that few.

    Parameters
    ----------
    grid
        Flower's grid, as its server app gets it.
    model
        What `fedppl.formula` returned, the same as at the sites.
    clients
        Number of sites to wait for, or their ids.
    min_count
        Fewest rows of a level, and in all, that a client tells of.
    withheld
        What a site does with rows of levels that nobody told, where it has more than that few: "other" for a level of
        that name, or "error".
    wait
        Seconds to wait for their answers.
    poll
        Seconds between two polls.
    secure
        Whether the server gets sums over all sites alone, which these add under masks (`client_app(secure=...)`): exact
        numbers of rows, in all and at each level that ``formula(levels=...)`` names, and sums and sums of squares of
        numbers. Then the largest `agreement` of the sites' policies is of the rows of all: levels of fewer are withheld
        from the agreement, and columns of numbers need four times as many.

    Returns
    -------
    Agreed
        Pass its ``model`` to `fedppl.fit` and to `grid`.

    Raises
    ------
    DataError
        If columns do not fit together.
    DeclarationError
        If sites are missing or refuse; where `secure`, for levels that are not named.

    Examples
    --------
    >>> import fedppl
    >>> def main(grid, context):
    ...     model = fedppl.formula("y ~ age + (1 | site)", family="bernoulli")
    ...     found = fedppl.Flower.agree(grid, model, clients=3)
    ...     engine = fedppl.Flower.grid(grid, clients=found.clients, model=found.model)
    ...     fit = fedppl.fit(found.model, None, engine=engine)

    Notes
    -----
    *When this fails.* A site that lies moves scales, and so the width of priors. With fewer than five sites it counts
    for at most ten times as many rows as the median of the others; with more, means and sds are medians over sites, and
    none counts for more than the median of the others. `Agreed.strange` names a site whose figures are out of all
    proportion. Sites whose rows contradict the agreement take no part.
    A site whose rows have changed sends its first summary again, until ``<client>.told`` in its folder is deleted
    (``site.told`` where its node config has no ``client-id``). Secure sums do not bound what a site that lies adds, and
    rows that have changed are summed anew, as another question.
    """
    positive("wait", wait, "it is in seconds")
    post = Post(grid, positive("poll", poll, "it is in seconds"), _GRACE)
    return enrolment.agree(post, model, clients, min_count, withheld, wait, secure)


def grid(
    grid: Grid,
    *,
    clients: int | Sequence[str],
    model: FederatedModel,
    example_data: Mapping[str, Any] | None = None,
    wait: float = 600.0,
    deadline: float = 120.0,
    poll: float = 0.25,
    grace: float = 2.0,
    secure: bool = False,
) -> EngineFactory:
    """Run on the sites of a Flower grid, inside a ServerApp: ``fedppl.fit(model, None, ..., engine=...)``.

    Parameters
    ----------
    grid
        Flower's grid, as its server app gets it.
    clients
        Number of sites to wait for, or their ids. No other sites take part.
    model, example_data
        The declaration, and made-up data with the names and shapes of clients' data. From them the server computes
        layout, prior and reader of draws, and refuses a site that differs. A formula that clients agreed on (`agree`)
        needs no data; its agreement is sent to the sites.
    wait
        Seconds to wait for them to enrol.
    deadline
        Seconds to wait for replies in a round where `fit` sets no deadline.
    poll
        Seconds between two polls.
    grace
        Seconds that a request outlives the deadline. A client that missed it is not asked again before that.
    secure
        Whether the server gets nothing but sums over all sites, which these add under masks (`client_app(secure=...)`).
        It needs at least three sites, all of them in every round, and an algorithm whose server reads sums alone,
        such as `fedppl.Sums`.

    Returns
    -------
    EngineFactory

    Raises
    ------
    DeclarationError
        For settings out of range, or made-up data that are missing; at the start of a run, when sites are missing.

    Examples
    --------
    >>> import fedppl
    >>> def main(grid, context):
    ...     engine = fedppl.Flower.grid(grid, clients=3, model=model, example_data={"y": [0.0, 1.0]})
    ...     fit = fedppl.fit(model, None, fedppl.EP(), engine=engine)

    Notes
    -----
    *When this fails.* A site that is silent, late, down or restarted is skipped, and the round's record says so. Two
    live sites with one id: the second is refused until the first has gone. Where sums are secure, a round in which a
    site is missing, or refuses, has no sum, and the next asks all again.
    """
    expected = checked(model, example_data, clients, secure, wait=wait, deadline=deadline, poll=poll, grace=grace)
    if waits(model):
        raise DeclarationError("clients have not agreed on model=: pass that of fedppl.Flower.agree(grid, ...).")
    settings = SitesSettings(expected, wait, deadline, secure)
    return Sites(functools.partial(Post, grid, poll, grace), model, example_data, settings)


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
    secure: bool = False,
    on_dropout: str = "stop",
    random_seed: int | None = None,
    on_fit: Callable[[Fit, Context], None] | None = None,
    callback: Callable[[Round], bool | None] | None = None,
) -> ServerApp:
    """Make the server's Flower app. It never sees data.

    Parameters
    ----------
    federated_model, algorithm
        As at the sites.
    clients, example_data, wait, secure
        As in `grid`.
    min_count, withheld
        As in `agree`, which is asked first where the declaration is a formula that clients have not agreed on.
    on_dropout
        What happens where sums are secure and a site of the cohort is absent for `wait` seconds: "stop" ends the run,
        which goes on from `checkpoint` once the site is back; "new cohort" fits anew with the others, if they are at
        least three and their policies allow one more set of sites (``cohorts``, 1 by default).
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
    >>> model, example = normal_means()[0], {"y": [0.0, 1.0]}
    >>> app = fedppl.Flower.server_app(model, fedppl.EP(), clients=3, example_data=example, random_seed=1)

    Notes
    -----
    *When this fails.* An exception ends the Flower run as failed, which ``flwr ls`` shows (``flwr run`` exits with 0
    all the same). A server that was killed goes on from `checkpoint` in a new run.
    """
    require_declared(federated_model, algorithm)
    checked(federated_model, example_data, clients, secure, wait=wait, deadline=deadline)
    if secure and waits(federated_model):
        listed(federated_model.builder)  # type: ignore[arg-type]
    whole("min_count", min_count), one_of("withheld", withheld, ("error", "other"))
    one_of("on_dropout", on_dropout, ("stop", "new cohort"))
    require_settings(Options(rounds, None, participation, None, checkpoint or None, deadline))
    seed_of(random_seed)
    require_callback(callback)
    if on_fit is not None and not (callable(on_fit) and takes(on_fit, 2)):
        raise DeclarationError(f"on_fit={shown(on_fit)} is not a function of the fit and Flower's context.")
    app = ServerApp()

    @app.main()
    def main(flower_grid: Grid, context: Context) -> None:
        chosen: dict[str, Any] = {"rounds": rounds, "participation": participation, "checkpoint": checkpoint}
        chosen |= {"deadline": deadline, "random_seed": random_seed, "clients": clients, "wait": wait}
        chosen = {name: context.run_config.get(name, value) for name, value in chosen.items()}
        expected, patience, model = chosen.pop("clients"), float(chosen.pop("wait")), federated_model
        if waits(model):
            rules: dict[str, Any] = {"min_count": min_count, "withheld": withheld, "secure": secure}
            found = agree(flower_grid, model, clients=expected, wait=patience, **rules)
            expected, model = found.clients, found.model
        chosen["checkpoint"] = chosen["checkpoint"] or None
        while True:
            engine = grid(
                flower_grid, clients=expected, model=model, example_data=example_data, wait=patience, secure=secure
            )
            options = Options(engine=engine, **chosen)
            try:
                fit = loop.fit(model, None, algorithm, options, callback=callback, progressbar=False)
                break
            except LostSites as lost:
                if on_dropout == "stop" or len(lost.others) < FEWEST_SITES:
                    raise
                logger.warning("%s A new cohort begins: %s", lost, list(lost.others))
                # A checkpoint is of the sums over the first cohort.
                expected, chosen["checkpoint"] = lost.others, None
        if on_fit is not None:
            on_fit(fit, context)

    return app
