"""The words everything else is written in: messages, layouts, results of a call, and two protocols.

NumPy only. Nothing here knows PyMC, ArviZ, torch or an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedppl.gaussian import Gaussian

__all__ = [
    "Algorithm",
    "Array",
    "Asked",
    "ClientView",
    "ConvergenceWarning",
    "DataError",
    "DeclarationError",
    "Draws",
    "Engine",
    "EngineFactory",
    "Expansion",
    "Failure",
    "Layout",
    "LocalFailure",
    "LocalInference",
    "Message",
    "Moments",
    "NotConvergedError",
    "Reply",
    "Request",
    "SharedReader",
    "Status",
    "Target",
    "Variable",
]

Array = NDArray[np.float64]
Message = Mapping[str, NDArray[Any]]


class DeclarationError(ValueError):
    """The model, the shared names or the settings cannot be used as declared."""


class DataError(ValueError):
    """A client's data cannot be used with the declared model."""


class LocalFailure(RuntimeError):
    """A client could not compute its reply. It keeps its old site, and the loop records why."""


class ConvergenceWarning(UserWarning):
    """A fit ended without having converged, by an algorithm that tests for it; the text names the remedy.

    Attributes
    ----------
    fit
        The fit that ended so: where warnings are errors, ``except fedppl.ConvergenceWarning as warning`` has it as
        ``warning.fit``. From `grid_search`, the best candidate's.
    """

    def __init__(self, text: str = "", fit: Any = None) -> None:
        super().__init__(text)
        self.fit = fit


class NotConvergedError(RuntimeError):
    """A fit was broken off before there was anything to report; the text names the remedy."""


class Status(StrEnum):
    """Where a fit stands. Not converging is a status and a warning; `fedppl.fit` returns all the same."""

    RUNNING = "running"
    CONVERGED = "converged"
    MAX_ROUNDS = "max_rounds"
    STALLED = "stalled"

    @property
    def ok(self) -> bool:
        """Whether the result is ready to be used without a caveat."""
        return self is Status.CONVERGED


class Variable(NamedTuple):
    """One variable's place in a flat unconstrained vector."""

    name: str
    shape: tuple[int, ...]
    transform: str
    dims: tuple[str, ...] | None
    binary: bool = False  # a 0/1 indicator, which only algorithms that say so can handle

    @property
    def size(self) -> int:
        """Number of unconstrained coordinates."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """Names, shapes, transforms and prior of the shared parameters: all that a server may know.

    Attributes
    ----------
    variables
        The shared variables in the order of the flat unconstrained vector.
    prior
        Gaussian N_0 on the unconstrained space, exact when `prior_is_gaussian`.
    prior_is_gaussian
        Whether the declared shared prior *is* `prior`. If not, every client's factor carries
        (p(φ) / N_0(φ))^(1/K), so that the product of all factors is unchanged.
    fingerprint
        Digest of all of the above and of `density`. Clients whose fingerprints differ are refused.
    density
        log p(φ) at three points about N_0, so that priors with one N_0 are told apart.
    """

    variables: tuple[Variable, ...]
    prior: Gaussian
    prior_is_gaussian: bool
    fingerprint: str
    density: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Number of shared unconstrained coordinates, m."""
        return sum(variable.size for variable in self.variables)

    @property
    def binary(self) -> tuple[str, ...]:
        """Names of the shared variables that are 0/1 indicators; `prior` has their means and variances."""
        return tuple(variable.name for variable in self.variables if variable.binary)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each variable lies in the flat vector."""
        slices, start = {}, 0
        for variable in self.variables:
            slices[variable.name] = slice(start, start + variable.size)
            start += variable.size
        return slices

    @property
    def labels(self) -> tuple[str, ...]:
        """One label per coordinate, for example ``mu[0]`` or ``tau_log__[1]``."""
        return coordinate_labels(self.variables)


def coordinate_labels(variables: Sequence[Variable]) -> tuple[str, ...]:
    """Label every coordinate of a flat unconstrained vector."""
    labels: list[str] = []
    for variable in variables:
        name = f"{variable.name}_{variable.transform}__" if variable.transform else variable.name
        if variable.shape == ():
            labels.append(name)
        else:
            labels.extend(f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(*variable.shape))
    return tuple(labels)


class Moments(NamedTuple):
    """Mean and covariance of a client's tilted distribution over φ, with what is known of their quality."""

    mean: Array  # (m,)
    covariance: Array  # (m, m)
    precision: Array  # (m, m), not always the inverse of `covariance`: from draws, that would be too large
    skewness: Array  # (m,) of each coordinate's margin
    diagnostics: Mapping[str, float]


class Expansion(NamedTuple):
    """Quadratic expansion of log f_k at a point: value, gradient and Hessian."""

    value: float
    gradient: Array  # (m,)
    hessian: Array  # (m, m)
    diagnostics: Mapping[str, float]


class Draws(NamedTuple):
    """Draws of one client's tilted distribution on the unconstrained space."""

    shared: Array  # (chain, draw, m)
    local: Array  # (chain, draw, d_k)
    diagnostics: Mapping[str, float]


class Target(NamedTuple):
    """One client's tilted distribution f_k(φ) q_{-k}(φ) [p(φ) / N_0(φ)]^share, and the global q beside it."""

    client: Any
    global_: Gaussian
    cavity: Gaussian
    prior_share: float


class Asked(NamedTuple):
    """Where a request has a client compute, as a site's policy sees it: all that it says is in the request.

    Attributes
    ----------
    points
        Points φ at which something is computed, (S, m).
    spare
        Points (T, m) that the client can leave out: ``update_client`` finds in the message, under ``inside``, which of
        them it may compute, (T,) bool. An algorithm that has none leaves this empty.
    targets
        Pairs of q and a cavity, from whose tilted distribution moments or draws leave.
    """

    points: Array
    spare: Array
    targets: tuple[tuple[Gaussian, Gaussian], ...] = ()


class LocalInference(NamedTuple):
    """One way for a client to turn its data and a cavity into moments.

    All functions are pure: they take the client's view of its model, and a generator where they draw.

    Attributes
    ----------
    name
        How results and errors call it.
    check
        ``check(client)`` raises DeclarationError when this way is wrong for the declared model.
    expand
        ``expand(client, point, prior_share)`` gives the quadratic expansion of log f_k at a point, or the
        field is None when the way offers none (then EP has no warm start).
    log_factor
        ``log_factor(client, points, prior_share)`` gives log f_k at points (S, m), (S,), −inf where there is none; with
        `expand` or not at all.
    tilted
        ``tilted(target, rng)`` gives moments of φ.
    draw
        ``draw(target, draws, chains, rng)`` gives draws of (φ, θ_k), eq. 8 of FedLin.
    settings
        What it was built with, by keyword: a run is resumed, and a site enrolled, only with equal settings.
    """

    name: str
    check: Callable[[Any], None]
    expand: Callable[[Any, Array, float], Expansion] | None
    tilted: Callable[[Target, np.random.Generator], Moments]
    draw: Callable[[Target, int, int, np.random.Generator], Draws]
    settings: Mapping[str, Any] = {}
    log_factor: Callable[[Any, Array, float], Array] | None = None

    def __repr__(self) -> str:
        """Name and settings; functions say nothing to a reader."""
        return self.describe()

    def describe(self) -> str:
        """Name and settings on one line."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


class ClientView(Protocol):
    """What an algorithm may ask of a client's compiled model; `fedppl.model.declaration.ClientModel` is one."""

    @property
    def client_id(self) -> str:
        """The client's logical id."""

    @property
    def layout(self) -> Layout:
        """The shared layout."""


class Algorithm(NamedTuple):
    """A federated algorithm: four pure functions, and how to read its state.

    Attributes
    ----------
    name
        How results and logs call it.
    check
        ``check(client)`` raises DeclarationError before any round when a client's model does not fit.
    init_server
        ``init_server(layout, client_ids, rng) -> state``.
    broadcast
        ``broadcast(state, client_id) -> message``.
    update_client
        ``update_client(client, personal, message, rng) -> (personal, reply, info)``; info is numbers by name, and may
        have a text under ``reason``, where something could not be computed and the reply is of use all the same.
    reply_shapes
        ``reply_shapes(state) -> {name: shape}`` of the replies expected next; others are refused.
    refuse
        ``refuse(state, message)`` says why a reply of the right shapes cannot be used, or gives None.
    update_server
        ``update_server(state, replies) -> (state, info)`` with replies of any subset of the clients.
    outcome
        ``outcome(state, client_id) -> message``: what a client, old or new, needs to know in the end.
    draw
        ``draw(client, personal, message, draws, chains, rng) -> Draws`` of (φ, θ_k), at the client, from what
        `outcome` says. Where estimates are points, all draws are equal.
    details
        ``details(state) -> {name: (dims, array)}``: what else the state knows. The dim ``rows`` runs over the
        coordinates of φ, ``columns`` too, and ``client`` and ``other_client`` over the clients; dims of the model's
        own shared variables may stand there too.
    posterior
        ``posterior(state) -> Gaussian`` over φ on the unconstrained space; None where there is no such thing.
    estimate
        ``estimate(state) -> (m,)``: the one φ of all clients, where it is a point.
    sample
        ``sample(state, count, rng) -> (count, m)``: draws of φ where its posterior is no Gaussian.
    personalise
        ``personalise(client, personal, message, rng)``: what a client makes of the outcome for itself, where that is
        more than draws, as a fine-tuned network is.
    settings
        What it was built with, each in one line of text.
    binary
        Whether it takes shared variables that are 0/1 indicators.
    large
        Whether it takes shared blocks so large that their prior is kept by coordinate, as networks have them.
    stay
        ``stay(client, personal, message, rng) -> (personal, info)``: what a client does in a round that asks it for
        no reply; nothing, where it is None.
    preliminary
        ``preliminary(state)``: whether the next round belongs to a start that has a budget of its own, and does not
        count towards ``rounds=``; none does, where it is None. What `posterior` gives until then is none.
    unused
        ``unused(client)``: names of the variables whose declared prior sd changes nothing. Said once at the start.
    lasting
        Whether personal state outlives a run, as a privacy budget does: a site then keeps it in its folder, under
        its own name, and does not answer where it cannot be read.
    tests_convergence
        Whether a fit is meant to end as converged, and warns where it does not. Methods that run a given number of
        rounds of gradient steps are not, even where they stop once nothing moves.
    asks
        ``asks(layout, message) -> Asked``: where a request has a client compute. Without it a site whose policy bounds
        that does not take part.
    noise_multiplier
        Of algorithms under differential privacy: the noise of every reply over the bound on its norm. None where a
        reply's ε is not known.
    """

    name: str
    check: Callable[[Any], None]
    init_server: Callable[[Layout, tuple[str, ...], np.random.Generator], Any]
    broadcast: Callable[[Any, str], Message]
    update_client: Callable[[Any, Any, Message, np.random.Generator], tuple[Any, Message, Mapping[str, float | str]]]
    reply_shapes: Callable[[Any], Mapping[str, tuple[int, ...]]]
    refuse: Callable[[Any, Message], str | None]
    update_server: Callable[[Any, Mapping[str, Message]], tuple[Any, Any]]
    outcome: Callable[[Any, str], Message]
    draw: Callable[[Any, Any, Message, int, int, np.random.Generator], Draws]
    details: Callable[[Any], Mapping[str, tuple[tuple[str, ...], Array]]]
    posterior: Callable[[Any], Gaussian] | None = None
    estimate: Callable[[Any], Array] | None = None
    sample: Callable[[Any, int, np.random.Generator], Array] | None = None
    personalise: Callable[[Any, Any, Message, np.random.Generator], Any] | None = None
    stay: Callable[[Any, Any, Message, np.random.Generator], tuple[Any, Mapping[str, float]]] | None = None
    settings: Mapping[str, str] = {}
    binary: bool = False
    large: bool = False
    unused: Callable[[Any], tuple[str, ...]] | None = None
    lasting: bool = False
    preliminary: Callable[[Any], bool] | None = None
    tests_convergence: bool = False
    asks: Callable[[Layout, Message], Asked] | None = None
    noise_multiplier: float | None = None

    def __repr__(self) -> str:
        """Name and settings; functions say nothing to a reader."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"


class Request(NamedTuple):
    """What the loop sends to one client. A reply counts only if it carries the same nonce."""

    client_id: str
    nonce: int
    round: int
    seed: tuple[int, ...]
    message: Message
    run: str = ""  # names the run: personal state of another one is not used
    report: bool = True  # whether a reply is wanted; otherwise the client updates what it keeps, and says so
    shapes: Mapping[str, tuple[int, ...]] | None = None  # of the reply's arrays; stays at the server


class Reply(NamedTuple):
    """What one client sends back."""

    client_id: str
    nonce: int
    fingerprint: str
    message: Message
    info: Mapping[str, float]
    reason: str = (
        ""  # of what could not be computed, where the rest is of use all the same; travels as a Failure's does
    )


class Failure(NamedTuple):
    """A request that brought no usable reply, and why."""

    client_id: str
    nonce: int
    reason: str  # may travel: names no data
    private: str = ""  # for the client's own log: an exception's text may quote its data


class SharedReader(NamedTuple):
    """How to read draws of φ: the way back to the constrained space, with the dims and coords of the model."""

    constrain: Callable[[Array], Mapping[str, Array]]  # (S, m) to arrays (S, ...) by variable
    dims: Mapping[str, tuple[str, ...] | None]
    coords: Mapping[str, Sequence[Any]]


class Engine(Protocol):
    """Moves messages and knows no statistics."""

    def clients(self) -> tuple[str, ...]:
        """Return the ids of the clients that can be asked."""

    def layout(self) -> Layout:
        """Return the shared layout that all clients agreed on."""

    def exchange(self, requests: Mapping[str, Request], deadline: float | None) -> dict[str, Reply | Failure]:
        """Send each request and return what came back until the deadline (seconds)."""

    def reader(self) -> SharedReader:
        """Return how draws of φ are read; where the models are at sites, a site is asked."""

    def conclude(self, outcome: Callable[[str], Message], run: str, seed: int, status: Status) -> dict[str, str]:
        """Tell every client what it needs to draw its own posterior: q and its cavity, and how the run ended.

        Returns who refused, and why. Clients in this process are asked for theirs when somebody wants to see them.
        """

    def close(self) -> None:
        """Let go of whatever the engine started."""


class EngineFactory(Protocol):
    """Starts an engine over clients' models; `fedppl.InProcess()` is one.

    Without models (``clients={}``) the engine has to find the clients, as Flower's does.
    """

    def __call__(self, algorithm: Algorithm, clients: Mapping[str, Any], /) -> Engine:
        """Start the engine."""
