"""Clients: what algorithms may read of one, what a local inference is, and a client's part of a round. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fedppl.gaussian import Gaussian
from fedppl.numerics.prior import SharedPrior
from fedppl.types import Array, Layout, Message, Rng, Variable

T = TypeVar("T")
P = TypeVar("P")


class ClientView(Protocol):
    """What algorithms and local inferences may read of a client; `fedppl.model.client.ClientModel` is one.

    Its log site factor is log p(y_k, θ | φ), with x = (φ, θ) flat and unconstrained.
    """

    @property
    def client_id(self) -> str:
        """The client's logical id."""

    @property
    def layout(self) -> Layout:
        """The shared layout."""

    @property
    def local(self) -> tuple[Variable, ...]:
        """Local variables θ_k, in the order of the flat vector."""

    @property
    def local_labels(self) -> tuple[str, ...]:
        """One label per local coordinate."""

    @property
    def shared_size(self) -> int:
        """Number of shared coordinates, m."""

    @property
    def local_size(self) -> int:
        """Number of local coordinates, d_k."""

    @property
    def initial(self) -> Array:
        """Starting value of θ, (d_k,)."""

    @property
    def rows(self) -> int:
        """Number of observations, n_k."""

    @property
    def prior(self) -> SharedPrior:
        """The shared prior, which is not part of the site factor."""

    @property
    def kernel(self) -> Callable[..., Any]:
        """Jitted function ``kernel(x, *data) -> [log density, gradient]``."""

    @property
    def value_kernel(self) -> Callable[..., Any]:
        """The same without the gradient: its first entry is the log density."""

    @property
    def packed(self) -> tuple[Any, Any, Any]:
        """The client's arrays, packed for the kernel."""

    @property
    def kink(self) -> str | None:
        """What makes the log density kink or jump, or None."""

    @property
    def has_proper_prior(self) -> bool:
        """Whether the declared priors integrate to one, so that there is an evidence."""

    def log_site(self, phi: Array, theta: Array) -> tuple[float, Array, Array]:
        """The log site factor and its gradients with respect to φ, (m,), and θ, (d_k,)."""

    def batch(self, rows: Any) -> tuple[Any, Any, Any]:
        """Packed data of some of the observations."""

    def batches(self, rows: Any) -> tuple[Any, Any, Any]:
        """Packed data of many batches of observations, rows (T, b)."""

    def constrain(self, phi: Array, theta: Array) -> dict[str, Array]:
        """Local variables on the constrained space from draws (S, m), (S, d_k)."""

    def view(self, read: Callable[[Any], T]) -> T:
        """A family's view of this client's model, from its reader, which is called once."""


class Moments(NamedTuple):
    """Mean and covariance of a client's tilted distribution over φ, with diagnostics."""

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
    estimates: tuple[str, ...] = ()  # variables that are point estimates, equal in all draws


class Constant(NamedTuple):
    """Error of a factor's constant, which changes the evidence and no moment."""

    alike: float = 0.0  # of the same sign at all clients: these add up
    by_chance: float = 0.0  # a standard error of its own


class Factor(NamedTuple):
    """log f_k at points, integrated, with its errors."""

    values: Array  # (S,); NaN where it could not be computed
    errors: Array  # (S,) signed; what all have in common changes no moment, and may be in the constant too
    constant: Constant = Constant()


class Target(NamedTuple):
    """One client's tilted distribution f_k(φ) q_{-k}(φ) [p(φ) / N_0(φ)]^share, with the global q."""

    client: ClientView
    global_: Gaussian
    cavity: Gaussian
    prior_share: float


CheckFn = Callable[[ClientView], None]  # raises DeclarationError where a client's model cannot be used


class LocalInference(NamedTuple):
    """One way for a client to turn its data and a cavity into moments.

    All functions are pure: they take the client's view of its model, and a generator where they draw.

    Attributes
    ----------
    name
        Name in results and errors.
    expand
        ``expand(client, point, prior_share)``, or None where there is no expansion (then EP has no warm start).
    log_factor
        ``log_factor(client, points, prior_share)``, log f_k at points (S, m), −inf where there is none; with `expand`
        or not at all.
    tilted, draw
        ``tilted(target, rng)`` and ``draw(target, draws, chains, rng)``: moments of φ, and draws of (φ, θ_k), under
        the tilted distribution (FedLin, eq. 8).
    look
        ``look(client, points)`` raises `LocalFailure` where θ has mass about another mode than that which moments are
        about, at points (S, m); None where nobody looks.
    settings
        Keywords of the builder: a run is resumed, and a node enrolled, only with equal settings.
    """

    name: str
    check: CheckFn
    expand: Callable[[ClientView, Array, float], Expansion] | None
    tilted: Callable[[Target, Rng], Moments]
    draw: Callable[[Target, int, int, Rng], Draws]
    settings: Mapping[str, Any] = {}
    log_factor: Callable[[ClientView, Array, float], Array] | None = None
    look: Callable[[ClientView, Array], None] | None = None

    def __repr__(self) -> str:
        """Name and settings."""
        return self.describe()

    def describe(self) -> str:
        """Name and settings on one line."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


# A client's part of a round, alone or with others in a batch ----------------------------------------------------------


class ClientUpdate(NamedTuple, Generic[P]):
    """A client's personal state, reply and diagnostics after a round; `personal` None leaves the state as it was.

    `info` is numbers by name, and may have a text under ``reason`` where something could not be computed and the reply
    can be used all the same.
    """

    personal: P | None
    reply: Message
    info: Mapping[str, float | str] = {}


ClientFn = Callable[[ClientView, P | None, Message, Rng], ClientUpdate[P]]  # a client's part of a round
# A client's part of a round without a reply: its personal state, and diagnostics.
UnreportedFn = Callable[[ClientView, P | None, Message, Rng], tuple[P | None, Mapping[str, float]]]


class Part(NamedTuple, Generic[P]):
    """Arguments of a `ClientFn`."""

    client: ClientView
    personal: P | None
    message: Message
    rng: Rng


class Summed(NamedTuple):
    """The sum of clients' replies, added where they were made."""

    total: Message  # every array summed over the clients, in a fixed order
    clients: int  # number of replies in it
    failures: Mapping[str, str] = {}  # reason by client that is not in it
    infos: Mapping[str, Mapping[str, float]] = {}  # diagnostics by client, where there are any
    reasons: Mapping[str, str] = {}  # by client that is in it, although something could not be computed
    sizes: Mapping[str, int] | None = None  # bytes that each sent; None where clients were computed together


# Updates of clients in one group. None for a client that has to be asked alone, as where numbers are not finite: its
# failure then has the reason.
BatchFn = Callable[[Sequence[Part[P]]], Sequence[ClientUpdate[P] | None]]


class Batch(NamedTuple, Generic[P]):
    """How clients in one process are computed together, with the results of one after another up to rounding.

    Attributes
    ----------
    update_client, unreported
        The algorithm's own functions, which the batch replaces. An algorithm with other functions, as one that is
        wrapped, does not use the batch.
    groups
        ``groups(clients)``: places of clients that go together, as many as memory allows, no client in two groups. A
        client in none is asked alone. Groups depend on models alone, and not on the number of threads.
    together, unreported_together
        ``together(parts)``, for a group of which each client replies, or none does, with an empty `reply`. After an
        exception each client is asked alone.
    stacks, summed
        Of algorithms that send all clients one message and read sums alone: ``stacks(clients)`` lays all of them side
        by side, once for an engine, and ``summed(stack, message, workers)`` is the sum of a stack's replies, in
        threads; replies that cannot be used are failures with a reason.
    """

    update_client: ClientFn[P]
    unreported: UnreportedFn[P] | None
    groups: Callable[[Sequence[ClientView]], Sequence[Sequence[int]]]
    together: BatchFn[P]
    unreported_together: BatchFn[P] | None = None
    stacks: Callable[[Mapping[str, ClientView]], Sequence[Any]] | None = None
    summed: Callable[[Any, Message, int], Summed] | None = None
