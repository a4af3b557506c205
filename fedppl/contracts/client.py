"""What algorithms may ask of a client, and what a local inference is: a tuple of pure functions, typed."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from fedppl.gaussian import Gaussian
from fedppl.numerics.prior import SharedPrior
from fedppl.types import Array, Layout, Rng, Variable

T = TypeVar("T")


class ClientView(Protocol):
    """What algorithms and local inferences may ask of a client; `fedppl.ClientModel` is one.

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
    def packed(self) -> tuple[Any, Any, Any]:
        """The client's arrays, packed for the kernel."""

    @property
    def kink(self) -> str | None:
        """What makes the log density kink or jump, or None."""

    @property
    def has_proper_prior(self) -> bool:
        """Whether the declared priors are densities that integrate to one: then there is an evidence."""

    def log_site(self, phi: Array, theta: Array) -> tuple[float, Array, Array]:
        """The log site factor and its gradients with respect to φ, (m,), and θ, (d_k,)."""

    def batch(self, rows: Any) -> tuple[Any, Any, Any]:
        """Packed data of some of the observations."""

    def batches(self, rows: Any) -> tuple[Any, Any, Any]:
        """Packed data of many batches of observations, rows (T, b)."""

    def constrain(self, phi: Array, theta: Array) -> dict[str, Array]:
        """Local variables on the constrained space from draws (S, m), (S, d_k)."""

    def view(self, read: Callable[[Any], T]) -> T:
        """What a family's reader makes of this client's model: read once, and kept."""


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
    estimates: tuple[str, ...] = ()  # variables that are point estimates, equal in all draws


class Constant(NamedTuple):
    """What is not known of a constant that all values of a factor are off by: it moves no moment, but the evidence."""

    alike: float = 0.0  # as other clients' are off too: these add up
    by_chance: float = 0.0  # a standard error of its own


class Factor(NamedTuple):
    """log f_k at points as well as it can be had, with what is not known of it."""

    values: Array  # (S,); NaN where it could not be computed
    errors: Array  # (S,) signed; what they have alike moves no moment, and may be in the constant too
    constant: Constant = Constant()


class Target(NamedTuple):
    """One client's tilted distribution f_k(φ) q_{-k}(φ) [p(φ) / N_0(φ)]^share, and the global q beside it."""

    client: ClientView
    global_: Gaussian
    cavity: Gaussian
    prior_share: float


CheckFn = Callable[[ClientView], None]  # raises DeclarationError where a client's model cannot be used
# The quadratic expansion of log f_k at a point (m,).
ExpandFn = Callable[[ClientView, Array, float], Expansion]
# log f_k at points (S, m): (S,), −inf where there is none.
LogFactorFn = Callable[[ClientView, Array, float], Array]
# The same with errors, and θ integrated rather than approximated, by way of a center (m,).
FactorFn = Callable[[ClientView, Array, Array, float], Factor]
# A draw of θ from p(θ | φ, y_k) for each row of φ (N, m), by way of a center (m,): (N, d_k).
GivenFn = Callable[[ClientView, Array, Array, Rng], Array]
TiltedFn = Callable[[Target, Rng], Moments]  # moments of φ under the tilted distribution
# Draws of (φ, θ_k) under the tilted distribution, eq. 8 of FedLin, with numbers of draws and of chains.
TiltedDrawFn = Callable[[Target, int, int, Rng], Draws]


class LocalInference(NamedTuple):
    """One way for a client to turn its data and a cavity into moments.

    All functions are pure: they take the client's view of its model, and a generator where they draw.

    Attributes
    ----------
    name
        How results and errors call it.
    expand
        ``expand(client, point, prior_share)``, or None where there is no expansion (then EP has no warm start).
    log_factor
        ``log_factor(client, points, prior_share)``, with `expand` or not at all.
    draw
        ``draw(target, draws, chains, rng)``.
    factor, draw_given
        ``factor(client, points, center, prior_share)`` and ``draw_given(client, phi, center, rng)``, both or neither:
        what EP's correction needs.
    settings
        The keywords it was built with: a run is resumed, and a node enrolled, only with equal settings.
    """

    name: str
    check: CheckFn
    expand: ExpandFn | None
    tilted: TiltedFn
    draw: TiltedDrawFn
    settings: Mapping[str, Any] = {}
    log_factor: LogFactorFn | None = None
    factor: FactorFn | None = None
    draw_given: GivenFn | None = None

    def __repr__(self) -> str:
        """Name and settings; functions say nothing to a reader."""
        return self.describe()

    def describe(self) -> str:
        """Name and settings on one line."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


# Short HTML for notebooks and reports: every text is escaped, whoever it comes from -----------------------------------

_LONGEST = 200  # characters of one cell


def escaped(value: Any, longest: int = _LONGEST) -> str:
    """A value as text that no browser takes for markup, on one line, cut where it is long.

    >>> escaped("<b>a</b>")
    '&lt;b&gt;a&lt;/b&gt;'
    """
    text = " ".join(str(value).split())
    text = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)  # turns no direction
    return html.escape(text if len(text) <= longest else f"{text[: longest - 1]}…", quote=True)


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a head; the first cell of a row is its name.

    >>> table(["", "mean"], [["mu", 1.5]])
    '<table><thead><tr><th></th><th>mean</th></tr></thead><tbody><tr><th>mu</th><td>1.5</td></tr></tbody></table>'
    """
    top = f"<thead><tr>{''.join(f'<th>{escaped(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(
        f"<tr><th>{escaped(first)}</th>{''.join(f'<td>{escaped(cell)}</td>' for cell in others)}</tr>"
        for first, *others in rows
    )
    return f"<table>{top}<tbody>{body}</tbody></table>"


def facts(title: str, rows: Mapping[str, Any]) -> str:
    """A titled table of names and values.

    >>> facts("EP", {"trust": None})
    '<div><strong>EP</strong><table><tbody><tr><th>trust</th><td>None</td></tr></tbody></table></div>'
    """
    return f"<div><strong>{escaped(title)}</strong>{table((), rows.items())}</div>"


def number(value: Any) -> str:
    """A number to four digits; nothing where it is none.

    >>> number(0.123456), number(float("nan")), number(12)
    ('0.1235', '–', '12')
    """
    if isinstance(value, int):
        return str(value)
    value = float(value)
    return "–" if value != value else f"{value:.4g}"
