"""pFedVEM: variational expectation maximisation with a confidence for every client."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.averaging._point import tolerance_rule
from fedppl.algorithms.one_shot.separate import near_posterior
from fedppl.contracts import Algorithm, Draws, LocalInference, Moments, Target
from fedppl.gaussian import Gaussian
from fedppl.local.advi import MeanField
from fedppl.local.target import at_points
from fedppl.run.replies import sum_replies
from fedppl.settings import between, flag, inference, positive
from fedppl.types import Array, DeclarationError, Layout, Message, Status

__all__ = ["TERMS", "Confidence", "ConfidenceInfo", "ConfidenceState", "Personal", "confidence_of", "ledger_sums"]

TERMS = ("uncertainty", "deviation")
_NEW_CLIENT_STEPS = 100


class ConfidenceState(NamedTuple):
    """What the next round needs."""

    w: Array  # (d,)
    prior: Gaussian  # declared, of w
    where: Mapping[str, int]  # client id to its place
    ledger: Array  # (K, d + 1): every client's last τ μ and τ; (0, d + 1) where nothing is remembered
    confidence: float  # mean τ of the clients that are summed
    status: str
    message: str


class ConfidenceInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of Δw over the clients' spread, τ^(-1/2)
    confidence: float  # mean τ


class Personal(NamedTuple):
    """What a client keeps to itself: q_j."""

    mean: Array  # μ_j, (d,)
    variance: Array  # diagonal of Σ_j, (d,)


class _Settings(NamedTuple):
    local: LocalInference
    terms: tuple[str, ...]
    spread: float
    strength: float
    prior: bool
    remember: bool
    tolerance: float


def Confidence(
    *,
    local: LocalInference | None = None,
    terms: tuple[str, ...] = TERMS,
    spread: float = 1.0,
    strength: float = 0.0,
    prior: bool = False,
    remember: bool = False,
    tolerance: float = 1e-5,
) -> Algorithm:
    r"""Personal parameters around a latent centre, each client weighed by its confidence.

    .. math:: w_j \sim N(w, \tau_j^{-1} I), \qquad
              \tau_j = \frac{d}{\mathrm{tr}\,\Sigma_j + \lVert \mu_j - w \rVert^2}, \qquad
              w = \frac{\sum_j \tau_j \mu_j}{\sum_j \tau_j}

    The shared variables of the declared model are each client's own copy w_j of the latent w. A client finds
    q_j = N(μ_j, Σ_j), its variational posterior under N(w, I / τ_j) and its data, and replies τ_j μ_j and τ_j. With all
    clients in every round this is coordinate ascent on the evidence lower bound (eq. 5).

    Parameters
    ----------
    local
        The E-step; by default `MeanField`, the published family. `Laplace`, `ADVI` and `NUTS` keep correlations.
    terms
        What makes up τ_j: "uncertainty" (tr Σ_j), "deviation" (‖μ_j − w‖²), or both. One alone is an ablation.
    spread
        ρ_j = τ_j^(-1/2) where clients start, on the unconstrained space.
    strength
        ν, which holds τ_j near spread^-2 as much as ν coordinates would: τ_j = (d + ν) / (tr Σ_j + ‖μ_j − w‖² +
        ν spread²), the mode under an inverse-gamma prior of ρ_j². 0, as published, leaves it free.
    prior
        Whether the declared prior of the shared variables is the prior of w. By default w has a flat one, as published.
    remember
        Keep every client's last reply at the server, so that w is the sum over all of them and not only over those
        that replied in the round. The server then reads single replies, not only their sums.
    tolerance
        Converged when w moves by less than this times the clients' spread and the mean confidence by less than this
        part of itself, with every client heard.

    Returns
    -------
    Algorithm
        ``fit.estimate`` has w, ``fit.client(k)`` draws of w_k, and ``fit.idata["rounds"]["confidence"]`` every τ_j.

    Raises
    ------
    DeclarationError
        For settings out of range; in a fit, where `local` is wrong for the model, or where `prior` is asked for and the
        declared one is not Gaussian.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> fit = fedppl.fit(model, clients, fedppl.Confidence(strength=4), rounds=99, progressbar=False)
    >>> fit.status
    <Status.CONVERGED: 'converged'>

    Notes
    -----
    One ρ_j holds for all coordinates: declare shared variables on comparable scales. A client that has no q_j, in its
    first round or because it lost it, starts from `spread` and reports ``blank``; a new client finds its own τ when its
    posterior is asked for.

    *When this fails.* A client whose rows do not speak against w_j = w has no finite τ_j: its confidence grows without
    end, and w comes to rest on the client that has the *least* data. The fit then does not converge, and says so; give
    a ``strength`` of some coordinates, or use `EP` with a declared prior for the spread. With few coordinates τ_j is a
    variance estimated from few numbers. Mean-field variances are too small where coordinates are correlated.

    References
    ----------
    .. [1] Zhu, Ma and Blaschko (2023), pFedVEM, Algorithm 1, eqs. 5 to 9.
    """
    settings = _Settings(
        inference("local", local, MeanField()),
        terms_rule(terms),
        spread_rule(spread),
        strength_rule(strength),
        flag("prior", prior),
        flag("remember", remember),
        tolerance_rule(tolerance),
    )
    return Algorithm(
        name="Confidence",
        check=functools.partial(_check, settings=settings),
        init_server=functools.partial(_init_server, settings=settings),
        broadcast=lambda state, client_id: {"w": state.w},
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=lambda state: {"weighted": state.w.shape, "weight": ()},
        refuse=refuse_weight,
        update_server=functools.partial(_update_server, settings=settings),
        outcome=lambda state, client_id: {"w": state.w},
        draw=functools.partial(_draw, settings=settings),
        details=lambda state: {},
        estimate=lambda state: state.w,
        stay=functools.partial(_stay, settings=settings),
        settings={
            name: value.describe() if isinstance(value, LocalInference) else repr(value)
            for name, value in settings._asdict().items()
        },
        tests_convergence=True,
        asks=functools.partial(at_points, name="w"),
    )


def terms_rule(terms: Any) -> tuple[str, ...]:
    """Check the keyword `terms`."""
    given = (terms,) if isinstance(terms, str) else tuple(terms) if isinstance(terms, tuple | list) else ()
    if not given or set(given) - set(TERMS) or len(set(given)) < len(given):
        raise DeclarationError(f"terms={terms!r} must be one or both of {TERMS}.")
    return given


def spread_rule(spread: Any) -> float:
    """Check the keyword `spread`."""
    return positive("spread", spread)


def strength_rule(strength: Any) -> float:
    """Check the keyword `strength`."""
    return between("strength", strength, 0, np.inf, "[)")


def _check(client: Any, *, settings: _Settings) -> None:
    settings.local.check(client)
    if settings.prior and not client.layout.prior_is_gaussian:
        raise DeclarationError(
            "prior=True, and the declared prior of the shared variables is not Gaussian. Declare pm.Normal or "
            "pm.MvNormal, or leave w its flat prior by prior=False."
        )


def confidence_of(
    mean: Array, variance: Array, w: Array, terms: tuple[str, ...] = TERMS, held: tuple[float, float] = (0.0, 1.0)
) -> float:
    """τ_j (eq. 8), or of one of its terms alone; `held` are strength ν and spread of what it is held near.

    >>> confidence_of(np.array([1.0, 2.0]), np.array([0.5, 0.5]), np.array([0.0, 2.0]))
    1.0
    """
    total = float(np.sum(variance)) if "uncertainty" in terms else 0.0
    if "deviation" in terms:
        total += float(np.sum((mean - w) ** 2))
    strength, spread = held
    return (len(w) + strength) / max(total + strength * spread**2, np.finfo(float).tiny ** 0.5)


def _init_server(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: _Settings
) -> ConfidenceState:
    """Start at the declared prior's mean."""
    del rng
    return ConfidenceState(
        gaussian.mean(layout.prior),
        layout.prior,
        {client_id: k for k, client_id in enumerate(clients)},
        np.zeros((len(clients) if settings.remember else 0, layout.size + 1)),
        settings.spread**-2,
        Status.RUNNING.value,
        "raise rounds=",
    )


def _rule(settings: _Settings) -> tuple[tuple[str, ...], tuple[float, float]]:
    return settings.terms, (settings.strength, settings.spread)


def _target(client: Any, w: Array, confidence: float, known: Any, local: LocalInference) -> Target:
    """N(w, I / τ) times the client's likelihood, near which q_j already is where it is known."""
    centre = Gaussian(confidence * w, confidence * np.eye(len(w)))
    if known is None:
        return near_posterior(Target(client, centre, centre, 0.0), local)
    return Target(client, Gaussian(known.mean / known.variance, np.diag(1.0 / known.variance)), centre, 0.0)


def _step(
    client: Any, personal: Any, w: Array, rng: np.random.Generator, settings: _Settings
) -> tuple[Personal, Moments]:
    """The M-step on τ_j at this w, then the E-step."""
    known = personal is not None and len(personal.mean) == len(w)
    confidence = confidence_of(personal.mean, personal.variance, w, *_rule(settings)) if known else settings.spread**-2
    moments = settings.local.tilted(_target(client, w, confidence, personal if known else None, settings.local), rng)
    return Personal(moments.mean, np.diag(moments.covariance).copy()), moments


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Personal, Message, Mapping[str, float]]:
    """Find q_j, and say how sure it is."""
    w = np.asarray(message["w"], dtype=float)
    q, moments = _step(client, personal, w, rng, settings)
    confidence = confidence_of(q.mean, q.variance, w, *_rule(settings))
    info = {**moments.diagnostics, "confidence": confidence}
    if personal is None:
        info["blank"] = 1.0
    return q, {"weighted": confidence * q.mean, "weight": np.array(confidence)}, info


def _stay(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Personal, Mapping[str, float]]:
    """Find q_j, and tell nobody."""
    q, moments = _step(client, personal, np.asarray(message["w"], dtype=float), rng, settings)
    return q, moments.diagnostics


def refuse_weight(state: Any, reply: Message) -> str | None:
    """A confidence is positive."""
    del state
    weight = float(reply["weight"])
    return None if weight > 0 else f"'weight' is {weight:.3g}, and must be positive"


def ledger_sums(
    ledger: Array, where: Mapping[str, int], replies: Mapping[str, Message]
) -> tuple[Array, Array, float, int]:
    """Ledger, Σ τ μ, Σ τ and the number of clients in them: of the replies, or of everything that is remembered."""
    if not len(ledger):
        total = sum_replies(replies)
        return ledger, total["weighted"], float(total["weight"]), len(replies)
    after = ledger.copy()
    for client_id, reply in replies.items():
        after[where[client_id]] = [*reply["weighted"], float(reply["weight"])]
    return after, after[:, :-1].sum(axis=0), float(after[:, -1].sum()), int(np.sum(after[:, -1] > 0))


def _update_server(
    state: ConfidenceState, replies: Mapping[str, Message], *, settings: _Settings
) -> tuple[ConfidenceState, ConfidenceInfo]:
    """Eq. 9, with the declared prior of w if it is asked for."""
    if not replies:
        return state, ConfidenceInfo(np.nan, state.confidence)
    ledger, weighted, weight, heard = ledger_sums(state.ledger, state.where, replies)
    w: Array = np.asarray(weighted / weight)
    if settings.prior:
        w = np.asarray(np.linalg.solve(state.prior.precision + weight * np.eye(len(w)), state.prior.linear + weighted))
    mean = weight / heard
    change = float(np.sqrt(np.mean((w - state.w) ** 2) * mean))
    steady = abs(mean - state.confidence) <= settings.tolerance * mean and change <= settings.tolerance
    done = heard == len(state.where) and steady
    message = (
        ""
        if done
        else (
            f"w moved by {change:.2g} of the clients' spread in the last round; raise rounds=, or strength= if the "
            f"confidence of a client grows without end"
        )
    )
    status = Status.CONVERGED if done else Status.RUNNING
    after = state._replace(w=w, ledger=ledger, confidence=mean, status=status.value, message=message)
    return after, ConfidenceInfo(change, mean)


def _draw(
    client: Any,
    personal: Any,
    message: Message,
    draws: int,
    chains: int,
    rng: np.random.Generator,
    *,
    settings: _Settings,
) -> Draws:
    """Draws of w_j and θ_j at the final w; a new client goes on until its own τ is still."""
    w = np.asarray(message["w"], dtype=float)
    if personal is None or len(personal.mean) != len(w):
        before = settings.spread**-2
        for _ in range(_NEW_CLIENT_STEPS):
            personal, _ = _step(client, personal, w, rng, settings)
            now = confidence_of(personal.mean, personal.variance, w, *_rule(settings))
            if abs(np.log(now / before)) < settings.tolerance:
                break
            before = now
    confidence = confidence_of(personal.mean, personal.variance, w, *_rule(settings))
    target = _target(client, w, confidence, personal, settings.local)
    return settings.local.draw(target, draws, chains, rng)
