"""What an algorithm is: four pure functions, which replies they take, and how to read the server's state; typed.

The state S of a server and the personal state P of a client belong to the algorithm; nobody else looks in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts.client import CheckFn, ClientView, Draws
from fedppl.contracts.printed import facts
from fedppl.contracts.client import Batch, ClientFn, UnreportedFn
from fedppl.gaussian import Gaussian
from fedppl.numerics.reweighting import Reweighted
from fedppl.types import Array, DeclarationError, Layout, Message, Rng, Status

S = TypeVar("S")
P = TypeVar("P")
Details = Mapping[str, tuple[tuple[str, ...], Array]]


def sum_replies(replies: Mapping[str, Message]) -> dict[str, NDArray[np.float64]]:
    """Sum every array over the clients: all that averaging methods read of replies.

    So a secure or a hierarchical sum can stand here. In the order of the ids, so that equal replies give equal digits.

    >>> sum_replies({"b": {"weight": np.array(2.0)}, "a": {"weight": np.array(1.0)}})
    {'weight': array(3.)}
    """
    names = next(iter(replies.values()), {})
    return {name: np.asarray(sum(np.asarray(replies[k][name], dtype=float) for k in sorted(replies))) for name in names}


class OnlySums(Mapping[str, Message]):
    """Stands for single replies where an algorithm said that it needs their sum alone."""

    def _refuse(self) -> NoReturn:
        raise DeclarationError(
            "this algorithm says that sums over clients are all it needs (Replies.summed), and reads single replies; "
            "read received.total or received.sums(), or leave `summed` out."
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
    """What the server has of a round: each client's reply, or where sums do, their sum alone."""

    each: Mapping[str, Message]  # by client id; an error to read where there is only the sum
    total: Message  # every array summed over the clients, in a fixed order; empty where each is given
    clients: int  # how many replied

    def single(self) -> Mapping[str, Message]:
        """Each client's reply where they are given, and none where there is only the sum."""
        return {} if isinstance(self.each, OnlySums) else self.each

    def sums(self) -> Message:
        """Every array summed over the clients, also where each reply is given."""
        return self.total if isinstance(self.each, OnlySums) else sum_replies(self.each)


class Report(NamedTuple):
    """What the server says of a round."""

    info: NamedTuple  # diagnostics; numbers and texts go into the table of rounds
    status: Status = Status.RUNNING
    message: str | None = None  # which setting to change, should the run end here; None leaves what was said before
    mild: bool = False  # whether a message beside "converged" is a remark rather than a caveat


InitFn = Callable[[Layout, tuple[str, ...], Rng], S]  # the server's state before any round
BroadcastFn = Callable[[S, str], Message]  # the message to one client
ServerFn = Callable[[S, Received], tuple[S, Report]]  # the server's, with replies of any subset of the clients
ShapesFn = Callable[[S], Mapping[str, tuple[int, ...]]]  # names and shapes of the arrays expected next in replies
RejectFn = Callable[[S, Message], str | None]  # why a reply of the right shapes cannot be used, or None
# Draws of (φ, θ_k) at a client, old or new, from the final message, with numbers of draws and of chains.
DrawFn = Callable[[ClientView, P | None, Message, int, int, Rng], Draws]
# Log densities (S,) of a client's held-out rows, the second view, at S draws from what the first, with its own, knows.
HeldOutFn = Callable[[ClientView, ClientView, P | None, Message, int, Rng], Array]


def _never(state: Any) -> bool:
    return False


def always(state: Any) -> bool:
    """For `Replies.summed`, of algorithms that need sums over clients and nothing else."""
    return True


def _none(state: Any) -> None:
    return None


class LogEvidence(NamedTuple):
    """Log marginal likelihood of the data, its standard error, and what it is from."""

    value: float
    error: float
    method: str = "correction"  # or "sums"; or "EP": an approximation, whose own error is not in the standard error


class WithoutClient(NamedTuple):
    """The shared posterior as if a client had not been there."""

    gaussian: Gaussian  # improper where the others do not determine it
    corrected: Reweighted | None  # points of it, where single answers are known
    log_predictive: LogEvidence  # log density of the client's data given all others'; NaN where it is not known


def _no_evidence(state: Any, clients: Mapping[str, ClientView]) -> LogEvidence:
    raise DeclarationError("this algorithm gives no evidence; use fedppl.EP().")


def _nothing(state: Any) -> Details:
    return {}


def _as_it_is(state: Any) -> Any:
    return state


def _seen(state: Any, clients: Collection[str]) -> Any:
    return state


def _usable(state: Any, reply: Message) -> None:
    return None


class Replies(NamedTuple, Generic[S]):
    """Which replies the server expects next, and which it takes.

    Attributes
    ----------
    shapes
        Other replies are rejected.
    summed
        Whether this phase uses sums over clients alone, so that a secure sum can stand in the engine.
    """

    shapes: ShapesFn[S]
    reject: RejectFn[S] = _usable
    summed: Callable[[S], bool] = _never


class Posterior(NamedTuple, Generic[S]):
    """q(φ) on the unconstrained space is a Gaussian."""

    gaussian: Callable[[S], Gaussian]
    corrected: Callable[[S], Reweighted | None] = _none  # weighted points of the posterior itself, where there are any
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
        What a client, old or new, needs to know in the end.
    draw
        ``draw(client, personal, message, draws, chains, rng) -> Draws`` at the client, from `final_message`. Where
        estimates are points, all draws are equal.
    shared
        What there is of the parameters that all clients share; None where they share none.
    details
        What else the state knows, ``{name: (dims, array)}``. The dim ``rows`` runs over the coordinates of φ,
        ``columns`` too, ``client`` and ``other_client`` over the clients; dims of the model's own shared variables may
        stand there too.
    preliminary
        Whether the next round belongs to a start that has a budget of its own, and does not count towards ``rounds=``.
        Until then there is no result.
    closing
        Whether the next round belongs to an end that has a budget of its own: there is a result, and it does not count
        towards ``rounds=`` either.
    out_of_rounds
        The state once ``rounds=`` has run out: with `closing` true of it the run goes on to its end, which is then not
        saved, so that the same call with more rounds goes on from before it. By default the one that was given. Sites
        of their own are not asked for such an end.
    tests_convergence
        Whether a fit is meant to end as converged, and warns where it does not. Methods that run a given number of
        rounds of gradient steps are not, even where they stop once nothing moves.
    family
        What the tools of one family of models read beside all this; the core does not.
    resume
        ``resume(first, last) -> state``: the state of `init`, with what the last state of another fit, whose clients
        may be others, knows already. None where nothing can be taken over.
    reads_personal
        Whether `draw` reads what a client keeps, where it keeps something.
    caution
        What the log says where predictions are made from draws at a client.
    held_out
        ``held_out(client, held, personal, message, draws, rng)``: log densities of held-out rows, where the declared
        model at the draws of `draw` would not give what the algorithm predicts.
    """

    final_message: BroadcastFn[S]
    draw: DrawFn[P]
    shared: Posterior[S] | Point[S] | Sampler[S] | None = None
    details: Callable[[S], Details] = _nothing
    preliminary: Callable[[S], bool] = _never
    closing: Callable[[S], bool] = _never
    out_of_rounds: Callable[[S], S] = _as_it_is
    tests_convergence: bool = False
    family: object = None
    resume: Callable[[S, S], S] | None = None
    reads_personal: bool = True
    caution: str = ""
    held_out: HeldOutFn[P] | None = None


def _fits(client: ClientView) -> None:
    return None


def _all_used(client: ClientView) -> tuple[str, ...]:
    return ()


class Needs(NamedTuple):
    """What an algorithm needs of a client's model.

    Attributes
    ----------
    check
        Raises DeclarationError before any round when a client's model does not fit.
    kernel
        Whether it follows the compiled log density; others bring gradients of their own, and nothing is compiled.
    indicators
        Whether it takes shared variables that are 0/1 indicators.
    diagonal_prior
        Whether it takes shared blocks so large that their prior is kept by coordinate, as networks have them.
    unused_priors
        Names of the variables whose declared prior sd changes nothing. Said once at the start.
    """

    check: CheckFn = _fits
    kernel: bool = True
    indicators: bool = False
    diagonal_prior: bool = False
    unused_priors: Callable[[ClientView], tuple[str, ...]] = _all_used


class Asked(NamedTuple):
    """Where a request has a client compute, as a node's policy sees it: all that it says is in the request.

    Attributes
    ----------
    points
        Points φ at which something is computed, (S, m).
    spare
        Points (T, m) that the client can leave out: ``update_client`` finds in the message, under ``inside``, which of
        them it may compute, (T,) bool. An algorithm that has none leaves this empty.
    targets
        Pairs of q and a cavity, from whose tilted distribution moments or draws leave.
    correction
        Whether values of log f_k leave at every one of many points: more than moments tell.
    """

    points: Array
    spare: Array
    targets: tuple[tuple[Gaussian, Gaussian], ...] = ()
    correction: bool = False


AsksFn = Callable[[Layout, Message], Asked]


class Disclosure(NamedTuple):
    """What leaves a client, as its node's owner is told.

    Attributes
    ----------
    asks
        Where a request has a client compute. Without it a node whose policy bounds that does not take part.
    noise_multiplier
        Of algorithms under differential privacy: the noise of every reply over the bound on its norm. None where a
        reply's ε is not known.
    at_sites
        The server's first state where clients are sites of their own, which are asked for less: from the one of `init`.
    unseen
        The first state where rows of the clients that are named are nobody's to look at: those of sites of their own,
        and of clients that gave a summary.
    concludes
        Where the final message has a client draw, points of a corrected posterior aside; it may hold other names than
        requests do. Without it nothing of what a client draws may leave.
    by_row
        ``by_row(client, point) -> (n, p)``: what each row has in what leaves, number by number, of algorithms for
        models whose rows' slopes are not to be had of the declared density. A node looks on how few rows each depends.
    """

    asks: AsksFn | None = None
    noise_multiplier: float | None = None
    at_sites: Callable[[Any], Any] = _as_it_is
    unseen: Callable[[Any, Collection[str]], Any] = _seen
    concludes: AsksFn | None = None
    by_row: Callable[[Any, Array], Array] | None = None


class Algorithm(NamedTuple, Generic[S, P]):
    """A federated algorithm: four pure functions, what replies they need, and how to read the state.

    Attributes
    ----------
    name
        How results and logs call it.
    settings
        The keywords it was built with, each in one line of text.
    init
        ``init(layout, client_ids, rng) -> state``.
    broadcast
        ``broadcast(state, client_id) -> message``.
    update_client
        ``update_client(client, personal, message, rng) -> ClientUpdate``.
    update_server
        ``update_server(state, received) -> (state, Report)``.
    unreported
        What a client does in a round that asks it for no reply, called as `update_client`; nothing, where it is None.
    persistent
        Whether personal state outlives a run, as a privacy budget does: a node then keeps it in its folder, under
        its own name, and does not answer where it cannot be read.
    batch
        How clients with one network or density compute a round together where all are in this process; None where
        each computes alone.
    """

    name: str
    settings: Mapping[str, str]
    init: InitFn[S]
    broadcast: BroadcastFn[S]
    update_client: ClientFn[P]
    update_server: ServerFn[S]
    replies: Replies[S]
    result: Result[S, P]
    needs: Needs = Needs()
    disclosure: Disclosure = Disclosure()
    unreported: UnreportedFn[P] | None = None
    persistent: bool = False
    batch: Batch[P] | None = None

    def __repr__(self) -> str:
        """Name and settings; functions say nothing to a reader."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        return facts(self.name, self.settings)


AnyAlgorithm = Algorithm[Any, Any]  # for those who look into neither state
