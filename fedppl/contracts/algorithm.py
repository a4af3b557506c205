"""Algorithms: four pure functions, the replies they take, and how to read the server's state; and engines. NumPy only.

The state S of a server and the personal state P of a client belong to the algorithm; nothing else reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts.client import Batch, CheckFn, ClientFn, ClientView, Draws, Summed, UnreportedFn
from fedppl.contracts.printed import facts
from fedppl.gaussian import Gaussian
from fedppl.numerics.proposals import Reweighted
from fedppl.types import Array, DeclarationError, Layout, Message, Rng, Status

S = TypeVar("S")
P = TypeVar("P")
M = TypeVar("M", str, str | None)
Details = Mapping[str, tuple[tuple[str, ...], Array]]


def sum_replies(replies: Mapping[str, Message]) -> dict[str, NDArray[np.float64]]:
    """Sum every array over the clients: all that averaging methods read, so that a secure sum can take its place.

    In the order of the ids, so that equal replies give equal digits.

    >>> sum_replies({"b": {"weight": np.array(2.0)}, "a": {"weight": np.array(1.0)}})
    {'weight': array(3.)}
    """
    names = next(iter(replies.values()), {})
    return {name: np.asarray(sum(np.asarray(replies[k][name], dtype=float) for k in sorted(replies))) for name in names}


class OnlySums(Mapping[str, Message]):
    """In the place of single replies where an algorithm needs their sum alone."""

    def _refuse(self) -> NoReturn:
        raise DeclarationError(
            "this algorithm needs sums over clients alone (Replies.summed), and reads single replies; read "
            "received.total or received.sums(), or leave `summed` out."
        )

    def __getitem__(self, key: str) -> Message:
        """Refuse."""
        self._refuse()

    def __iter__(self) -> Iterator[str]:
        """Refuse."""
        self._refuse()

    def __len__(self) -> int:
        """Refuse."""
        self._refuse()


class Received(NamedTuple):
    """The server's input from a round: each client's reply, or their sum alone."""

    each: Mapping[str, Message]  # by client id; an error to read where there is only the sum
    total: Message  # every array summed over the clients, in a fixed order; empty where each is given
    clients: int  # number of replies
    names: Collection[str] = ()  # of the clients that replied; under a secure sum all or none

    def single(self) -> Mapping[str, Message]:
        """Each client's reply where they are given, and none where there is only the sum."""
        return {} if isinstance(self.each, OnlySums) else self.each

    def sums(self) -> Message:
        """Every array summed over the clients, also where each reply is given."""
        return self.total if isinstance(self.each, OnlySums) else sum_replies(self.each)


class Report(NamedTuple):
    """The server's diagnostics and status after a round."""

    info: NamedTuple  # diagnostics; numbers and texts go into the table of rounds
    status: Status = Status.RUNNING
    message: str | None = None  # the setting to change, should the run end here; None leaves the message before
    mild: bool = False  # whether a message beside "converged" is a remark rather than a caveat


def first_ending(*rows: tuple[object, Status, M]) -> tuple[Status, M]:
    """Status and message of the first row, of condition, status and message, whose condition holds."""
    return next((status, message) for holds, status, message in rows if holds)


BroadcastFn = Callable[[S, str], Message]  # the message to one client
# Draws of (φ, θ_k) at a client, old or new, from the final message, with numbers of draws and of chains.
DrawFn = Callable[[ClientView, P | None, Message, int, int, Rng], Draws]
# Log densities (S,) of a client's held-out rows, the second view, at S draws of the first.
HeldOutFn = Callable[[ClientView, ClientView, P | None, Message, int, Rng], Array]


def _never(state: Any) -> bool:
    return False


def always(state: Any) -> bool:
    """For `Replies.summed`, of algorithms that need sums over clients alone."""
    return True


def _none(*arguments: Any) -> None:
    return None


class LogEvidence(NamedTuple):
    """Log marginal likelihood of the data, its standard error, and the method."""

    value: float
    error: float
    method: str = "sums"  # or "EP": an approximation, whose own error is not in the standard error


class WithoutClient(NamedTuple):
    """The shared posterior without a client."""

    gaussian: Gaussian  # improper where the others do not determine it
    weighted: Reweighted | None  # its weighted points, where clients' models are here
    log_predictive: LogEvidence  # log density of the client's data given all others'; NaN where it is not known


def _no_evidence(state: Any, clients: Mapping[str, ClientView]) -> LogEvidence:
    raise DeclarationError("this algorithm gives no evidence; use fedppl.Sums().")


def _nothing(state: Any) -> Details:
    return {}


def _as_it_is(state: Any, *others: Any) -> Any:
    return state


class Replies(NamedTuple, Generic[S]):
    """Which replies the server expects next, and which it takes.

    Attributes
    ----------
    shapes
        Names and shapes of the arrays expected next; other replies are rejected. In a sum an array ``NAME_lost`` counts
        clients that have no value at an entry of ``NAME``: under masks the sum of that entry is noise.
    reject
        Why a reply of the right shapes cannot be used, or None.
    summed
        Whether this phase uses sums over clients alone, so that a secure sum can stand in the engine.
    """

    shapes: Callable[[S], Mapping[str, tuple[int, ...]]]
    reject: Callable[[S, Message], str | None] = _none
    summed: Callable[[S], bool] = _never


class Posterior(NamedTuple, Generic[S]):
    """q(φ) on the unconstrained space is a Gaussian."""

    gaussian: Callable[[S], Gaussian]
    weighted: Callable[[S], Reweighted | None] = _none  # weighted points of the posterior itself, where there are any
    evidence: Callable[[S, Mapping[str, ClientView]], LogEvidence] = _no_evidence  # with the clients in this process
    # It without each of some clients, by what the state has of them, or by models where the state has nothing.
    without: Callable[[S, Sequence[str], Mapping[str, ClientView]], list[WithoutClient]] | None = None


class Point(NamedTuple, Generic[S]):
    """The shared parameters are estimated by one point, (m,)."""

    estimate: Callable[[S], Array]


class Sampler(NamedTuple, Generic[S]):
    """The posterior of φ is no Gaussian, and draws of it are ``draw(state, count, rng) -> (count, m)``."""

    draw: Callable[[S, int, Rng], Array]
    estimates: Callable[[S], Array] | None = None  # (m,) whether a coordinate is a point estimate, equal in all draws


class Result(NamedTuple, Generic[S, P]):
    """How to read a server's state.

    Attributes
    ----------
    final_message
        Message from which a client, old or new, draws its posterior.
    draw
        ``draw(client, personal, message, draws, chains, rng) -> Draws`` at the client, from `final_message`. Where
        estimates are points, all draws are equal.
    shared
        How the parameters that all clients share are known; None where they share none.
    details
        Other results, ``{name: (dims, array)}``. The dims ``rows`` and ``columns`` run over the coordinates of φ,
        ``client`` and ``other_client`` over the clients; others are dims of the model's own shared variables.
    preliminary
        Whether the next round belongs to a start with a budget of its own, which does not count towards ``rounds=``.
        Until its end there is no result.
    tests_convergence
        Whether a fit should end as converged, and warns where it does not. Methods that run a given number of rounds
        of gradient steps should not, even where they stop once nothing changes.
    family
        What the tools of one family of models read beside all this; the core does not.
    resume
        ``resume(first, last) -> state``: the state of `init`, with what can be taken over from the last state of
        another fit, whose clients may be others. None where nothing can.
    reads_personal
        Whether `draw` reads a client's personal state.
    caution
        A warning in the log where predictions are made from draws at a client.
    held_out
        ``held_out(client, held, personal, message, draws, rng)``: log densities of held-out rows, where the algorithm's
        predictions are not those of the declared model at the draws of `draw`.
    """

    final_message: BroadcastFn[S]
    draw: DrawFn[P]
    shared: Posterior[S] | Point[S] | Sampler[S] | None = None
    details: Callable[[S], Details] = _nothing
    preliminary: Callable[[S], bool] = _never
    tests_convergence: bool = False
    family: object = None
    resume: Callable[[S, S], S] | None = None
    reads_personal: bool = True
    caution: str = ""
    held_out: HeldOutFn[P] | None = None


def _all_used(client: ClientView) -> tuple[str, ...]:
    return ()


class Needs(NamedTuple):
    """What an algorithm needs of a client's model.

    Attributes
    ----------
    check
        Raises DeclarationError before any round when a client's model does not fit.
    kernel
        Whether it uses the compiled log density; others have gradients of their own, and nothing is compiled.
    indicators
        Whether it takes shared variables that are 0/1 indicators.
    diagonal_prior
        Whether it takes shared blocks so large that their prior is kept by coordinate, as of networks.
    unused_priors
        Names of the variables whose declared prior sd changes nothing, for the log at the start.
    """

    check: CheckFn = _none
    kernel: bool = True
    indicators: bool = False
    diagonal_prior: bool = False
    unused_priors: Callable[[ClientView], tuple[str, ...]] = _all_used


class Asked(NamedTuple):
    """Points and distributions at which a request has a client compute, for a node's policy; from the request alone.

    Attributes
    ----------
    points
        Points φ at which something is computed, (S, m).
    spare
        Points (T, m) that the client can leave out: the message for ``update_client`` has under ``inside`` which of
        them it may compute, (T,) bool. Empty where an algorithm has none.
    targets
        Pairs of q and a cavity, from whose tilted distribution moments or draws leave.
    values
        Whether values of log f_k leave at every one of many points, which disclose more than moments.
    """

    points: Array
    spare: Array
    targets: tuple[tuple[Gaussian, Gaussian], ...] = ()
    values: bool = False


AsksFn = Callable[[Layout, Message], Asked]


class Disclosure(NamedTuple):
    """What leaves a client, for its node's owner.

    Attributes
    ----------
    asks
        Points and distributions of a request. Without it a node whose policy bounds these does not take part.
    noise_multiplier
        Of algorithms under differential privacy: the noise of every reply over the bound on its norm. None where a
        reply's ε is not known.
    shared_by
        The fewest honest clients among which that noise is shared. Above 1 engines and sites answer under masks alone,
        in a cohort of at least so many.
    at_sites
        The server's first state where clients are sites of their own, which are asked for less: from that of `init`.
    unseen
        The first state where rows of the named clients cannot be read: those of sites of their own, and of clients
        that gave a summary.
    concludes
        Distributions from which the final message has a client draw, without weighted points of the posterior; it may
        have other names than requests. Without it no draws of a client may leave.
    by_row
        ``by_row(client, point) -> [(n, p), ...]``: each row's part of every number that leaves, of algorithms for
        models whose declared density has no slopes by row; numbers of one array may be compared with each other, such
        as units of a layer. A node checks on how few rows each number and each difference depend.
    """

    asks: AsksFn | None = None
    noise_multiplier: float | None = None
    at_sites: Callable[[Any], Any] = _as_it_is
    unseen: Callable[[Any, Collection[str]], Any] = _as_it_is
    concludes: AsksFn | None = None
    by_row: Callable[[Any, Array], Sequence[Array]] | None = None
    shared_by: int = 1


class Algorithm(NamedTuple, Generic[S, P]):
    """A federated algorithm: four pure functions, the replies they need, and how to read the state.

    Attributes
    ----------
    name
        Name in results and logs.
    settings
        Keywords of the builder, each in one line of text.
    init
        ``init(layout, client_ids, rng) -> state``.
    broadcast
        ``broadcast(state, client_id) -> message``.
    update_client
        ``update_client(client, personal, message, rng) -> ClientUpdate``.
    update_server
        ``update_server(state, received) -> (state, Report)``, with replies of any subset of the clients.
    unreported
        A client's part of a round without a reply, called as `update_client`; None where there is none.
    persistent
        Whether personal state outlives a run, as a privacy budget does: a node then keeps it in its folder, and does
        not answer where it cannot be read.
    batch
        How clients with one network or density compute a round together where all are in this process; None where
        each computes alone.
    """

    name: str
    settings: Mapping[str, str]
    init: Callable[[Layout, tuple[str, ...], Rng], S]
    broadcast: BroadcastFn[S]
    update_client: ClientFn[P]
    update_server: Callable[[S, Received], tuple[S, Report]]
    replies: Replies[S]
    result: Result[S, P]
    needs: Needs = Needs()
    disclosure: Disclosure = Disclosure()
    unreported: UnreportedFn[P] | None = None
    persistent: bool = False
    batch: Batch[P] | None = None

    def __repr__(self) -> str:
        """Name and settings."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return facts(self.name, self.settings)


AnyAlgorithm = Algorithm[Any, Any]  # where neither state is read


# Engines: requests, replies, and what moves them ----------------------------------------------------------------------


class Request(NamedTuple):
    """The loop's message to one client. A reply counts only if it carries the same nonce."""

    client_id: str
    nonce: int
    round: int
    seed: tuple[int, ...]
    message: Message
    run: str = ""  # names the run: personal state of another one is not used
    report: bool = True  # whether a reply is wanted; otherwise the client updates its personal state, and confirms that
    shapes: Mapping[str, tuple[int, ...]] | None = None  # of the reply's arrays; stays at the server


class Reply(NamedTuple):
    """One client's reply."""

    client_id: str
    nonce: int
    fingerprint: str
    message: Message
    info: Mapping[str, float]
    reason: str = ""  # why a part could not be computed, where the rest can be used; travels as a Failure's


class Failure(NamedTuple):
    """The reason why a request has no usable reply."""

    client_id: str
    nonce: int
    reason: str  # may travel: names no data
    private: str = ""  # for the client's own log: an exception's text may quote its data


class SharedReader(NamedTuple):
    """How to read draws of φ: the transformation to the constrained space, with the dims and coords of the model."""

    constrain: Callable[[Array], Mapping[str, Array]]  # (S, m) to arrays (S, ...) by variable
    dims: Mapping[str, tuple[str, ...] | None]
    coords: Mapping[str, Sequence[Any]]


class Requests(NamedTuple):
    """Requests of a round, each made where it is needed: clients that are laid side by side need one for all."""

    clients: tuple[str, ...]  # that are asked
    make: Callable[[str], Request]
    silent: frozenset[str] = frozenset()  # those that are asked for no reply


class Heard(Protocol):
    """Called when a client has answered."""

    def __call__(self, client_id: str, /, *, clients: int = 1) -> object:
        """Take the id of a client, the last of as many as have answered at once."""


def unheard(client_id: str, /, *, clients: int = 1) -> None:
    """Do nothing with answers."""


# Sends each request, and returns replies until the deadline (seconds).
Exchange = Callable[[Mapping[str, Request], float | None, Heard], Mapping[str, Reply | Failure]]
# Why a reply to a request does not count, None where it does.
Accept = Callable[[Request, Reply | Failure | None], str | None]


class Engine(Protocol):
    """Moves messages, without any statistics; an `AddingEngine` adds replies, too."""

    def clients(self) -> tuple[str, ...]:
        """Return the ids of the clients that can be asked."""

    def has_sites(self) -> bool:
        """Return whether clients are sites of their own, with policies on what leaves."""

    def layout(self) -> Layout:
        """Return the shared layout that all clients agreed on."""

    def exchange(
        self, requests: Mapping[str, Request], deadline: float | None, heard: Heard = unheard
    ) -> dict[str, Reply | Failure]:
        """Send each request and return replies until the deadline (seconds).

        `heard` is called with a client's id when its answer is there, from this thread, to show progress.
        """

    def reader(self) -> SharedReader:
        """Return the reader of draws of φ."""

    def conclude(
        self, final_message: Callable[[str], Message], run: str, seed: int, status: Status
    ) -> Mapping[str, Message]:
        """Send every client its final message, from which it draws its own posterior, and the status of the run.

        Returns what sites computed then and their policies let out, by client. Clients in this process draw their
        posteriors when these are read.
        """

    def personal(self) -> Mapping[str, Any]:
        """Return personal states of clients in this process, by id; empty where clients are elsewhere."""

    def restore(self, personal: Mapping[str, Any]) -> None:
        """Set personal states of clients in this process, of a run that is resumed."""

    def close(self) -> None:
        """Stop whatever the engine started."""


class AddingEngine(Engine, Protocol):
    """An engine that adds replies where they are made, so that no single reply is seen.

    It is asked for sums in all rounds in which the server reads sums alone. Replies of other engines' `exchange` are
    added afterwards.
    """

    def exchange_sum(
        self, requests: Requests, accept: Accept, deadline: float | None, heard: Heard = unheard
    ) -> Summed:
        """Return the sum of all replies that `accept` lets count, where single ones are seen."""


class EngineFactory(Protocol):
    """Starts an engine over clients' models; `fedppl.InProcess()` is one.

    Without models (``clients={}``) the engine has to find the clients, as Flower's does.
    """

    def __call__(self, algorithm: AnyAlgorithm, clients: Mapping[str, Any], /) -> Engine:
        """Start the engine."""


def coordinate_names(layout: Layout, reader: SharedReader) -> list[str]:
    """Label every coordinate by its variable's coords: ``tau_log__[dose]``, and ``tau_log__[1]`` where it has none."""
    flat, names = iter(layout.labels), []
    for variable in layout.variables:
        labels = [reader.coords.get(dim, ()) for dim in reader.dims.get(variable.name) or ()]
        has_coords = len(labels) > 0 and tuple(len(one) for one in labels) == variable.shape
        for index in np.ndindex(*variable.shape):
            label = next(flat)
            coords = ", ".join(str(labels[axis][i]) for axis, i in enumerate(index)) if has_coords else ""
            names.append(f"{label.split('[')[0]}[{coords}]" if has_coords else label)
    return names
