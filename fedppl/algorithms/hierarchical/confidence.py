"""pFedVEM: variational expectation maximisation with a confidence for every client."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import contracts, gaussian
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.averaging.fedavg import not_positive, report, tolerance_rule, weighted
from fedppl.algorithms.ep.sites import say_if_large
from fedppl.algorithms.one_shot.separate import near_posterior
from fedppl.contracts import ClientUpdate, ClientView, Draws, LocalInference, Moments, Received, Report, Target
from fedppl.gaussian import Gaussian
from fedppl.local.advi import MeanField
from fedppl.local.target import at_points, local_inference
from fedppl.settings import between, described, flag, positive, shown
from fedppl.types import Array, DeclarationError, Layout, Message, Rng

# Confidences τ_j of clients around a latent centre w, and the sums that give w ----------------------------------------

TERMS = ("uncertainty", "deviation")


def terms_rule(terms: Any) -> tuple[str, ...]:
    """Check the keyword `terms`."""
    given = (terms,) if isinstance(terms, str) else tuple(terms) if isinstance(terms, tuple | list) else ()
    if not given or any(term not in TERMS or given.count(term) > 1 for term in given):
        raise DeclarationError(f"terms={shown(terms)} must be one or both of {TERMS}.")
    return given


def confidence_of(
    mean: Array, variance: Array, w: Array, terms: tuple[str, ...] = TERMS, held: tuple[float, float] = (0.0, 1.0)
) -> float:
    """τ_j (eq. 8), or of one of its terms alone; `held` are the strength ν and the spread that it is pulled towards.

    >>> confidence_of(np.array([1.0, 2.0]), np.array([0.5, 0.5]), np.array([0.0, 2.0]))
    1.0
    """
    total = float(np.sum(variance)) if "uncertainty" in terms else 0.0
    if "deviation" in terms:
        total += float(np.sum((mean - w) ** 2))
    strength, spread = held
    return (len(w) + strength) / max(total + strength * spread**2, tol.LEAST_SPREAD)


def ledger_sums(ledger: Array, where: Mapping[str, int], received: Received) -> tuple[Array, Array, float, int]:
    """Ledger, Σ τ μ, Σ τ and the number of clients in them: of the replies, or of the ledger if there is one."""
    if not len(ledger):
        return ledger, received.total["weighted"], float(received.total["weight"]), received.clients
    after = ledger.copy()
    for client_id, reply in received.each.items():
        after[where[client_id]] = [*reply["weighted"], float(reply["weight"])]
    return after, after[:, :-1].sum(axis=0), float(after[:, -1].sum()), int(np.sum(after[:, -1] > 0))


class ConfidenceState(NamedTuple):
    """What the next round needs."""

    w: Array  # (d,)
    prior: Gaussian  # declared, of w
    where: Mapping[str, int]  # client id to its place
    ledger: Array  # (K, d + 1): every client's last τ μ and τ; (0, d + 1) without `remember`
    confidence: float  # mean τ of the clients in the sums


class ConfidenceInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of Δw over the clients' spread, τ^(-1/2)
    confidence: float  # mean τ


class ConfidenceClientState(NamedTuple):
    """What a client keeps to itself: q_j."""

    mean: Array  # μ_j, (d,)
    variance: Array  # diagonal of Σ_j, (d,)


_Kept = ConfidenceClientState | None  # none in its first round, or where it lost it


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
) -> contracts.Algorithm[ConfidenceState, ConfidenceClientState]:
    r"""Personal parameters around a latent centre, each client weighed by its confidence.

    .. math:: w_j \sim N(w, \tau_j^{-1} I), \qquad
              \tau_j = \frac{d}{\mathrm{tr}\,\Sigma_j + \lVert \mu_j - w \rVert^2}, \qquad
              w = \frac{\sum_j \tau_j \mu_j}{\sum_j \tau_j}

    The shared variables are each client's own copy w_j of the latent w. A client finds q_j = N(μ_j, Σ_j), its
    variational posterior under N(w, I / τ_j) and its data, and replies τ_j μ_j and τ_j. With all clients in every round
    this is coordinate ascent on the evidence lower bound (eq. 5).

    Parameters
    ----------
    local
        Local inference of the E-step; by default `MeanField`, the published family. `Laplace`, `ADVI` and `NUTS` keep
        correlations.
    terms
        Terms of τ_j: "uncertainty" (tr Σ_j), "deviation" (‖μ_j − w‖²), or both. One alone is an ablation.
    spread
        Standard deviation ρ_j = τ_j^(-1/2) with which clients start, on the unconstrained space.
    strength
        Strength ν of the pull of τ_j towards spread^-2, counted in coordinates: τ_j = (d + ν) / (tr Σ_j + ‖μ_j − w‖² +
        ν spread²). 0, as published, leaves it free.
    prior
        Whether the declared prior of the shared variables is the prior of w. By default w has a flat one, as published.
    remember
        Whether the server keeps every client's last reply, so that w is the sum over all of them and not only over
        those that replied in the round. It then reads single replies, not only their sums.
    tolerance
        Bound on the change of w in a round, in units of the clients' spread, and on the relative change of the mean
        confidence. A fit has converged when both are met and every client counts in w.

    Returns
    -------
    Algorithm
        ``fit.estimate`` has w, ``fit.client(k)`` draws of w_k, and ``fit.idata["rounds"]`` every τ_j
        as ``confidence`` and ‖μ_j − w‖² / d, at the w that was sent, as ``deviation``.

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

    *When this fails.* A client whose rows agree with w_j = w has no finite τ_j: its confidence grows without end, and w
    ends at the client with the *least* data. The fit then does not converge; give a ``strength`` of some coordinates,
    or use `EP` with a declared prior for the spread. Mean-field variances are too small where coordinates are
    correlated.

    References
    ----------
    .. [1] Zhu, Ma and Blaschko (2023), pFedVEM, Algorithm 1, eqs. 5 to 9.
    """
    settings = _Settings(
        local_inference("local", local, MeanField()),
        terms_rule(terms),
        positive("spread", spread),
        between("strength", strength, 0, np.inf, "[)"),
        flag("prior", prior),
        flag("remember", remember),
        tolerance_rule(tolerance),
    )
    return contracts.Algorithm[ConfidenceState, ConfidenceClientState](
        name="Confidence",
        settings=described(settings),
        init=functools.partial(_init, settings=settings),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, settings=settings),
        update_server=functools.partial(_update_server, settings=settings),
        replies=contracts.Replies(
            lambda state: {"weighted": state.w.shape, "weight": ()},
            lambda state, reply: not_positive(reply, "weight"),
            lambda state: not len(state.ledger),
        ),
        result=contracts.Result(
            _broadcast,
            functools.partial(_draw, settings=settings),
            contracts.Point(lambda state: state.w),
            tests_convergence=True,
        ),
        needs=contracts.Needs(functools.partial(_check, settings=settings)),
        disclosure=contracts.Disclosure(functools.partial(at_points, name="w")),
        unreported=functools.partial(_update_unreported, settings=settings),
    )


def _check(client: ClientView, *, settings: _Settings) -> None:
    settings.local.check(client)
    if settings.prior and not client.layout.prior_is_gaussian:
        remedy = "Declare pm.Normal or pm.MvNormal, or leave w its flat prior by prior=False."
        raise DeclarationError(f"prior=True needs a Gaussian prior of the shared variables. {remedy}")


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, settings: _Settings) -> ConfidenceState:
    say_if_large(layout, "Confidence")
    return ConfidenceState(
        gaussian.mean(layout.prior),
        layout.prior,
        {client_id: k for k, client_id in enumerate(clients)},
        np.zeros((len(clients) if settings.remember else 0, layout.size + 1)),
        settings.spread**-2,
    )


def _broadcast(state: ConfidenceState, client_id: str) -> Message:
    return {"w": state.w}


def _target(client: ClientView, w: Array, confidence: float, last: _Kept, local: LocalInference) -> Target:
    """N(w, I / τ) times the client's likelihood, with the last q_j as proposal if there is one."""
    centre = Gaussian(confidence * w, confidence * np.eye(len(w)))
    if last is None:
        return near_posterior(Target(client, centre, centre, 0.0), local)
    return Target(client, Gaussian(last.mean / last.variance, np.diag(1.0 / last.variance)), centre, 0.0)


def _step(
    client: ClientView, personal: _Kept, w: Array, rng: Rng, settings: _Settings
) -> tuple[ConfidenceClientState, Moments]:
    """The M-step on τ_j at this w, then the E-step."""
    last = _fitting(personal, w)
    confidence = settings.spread**-2 if last is None else _confidence(last, w, settings)
    moments = settings.local.tilted(_target(client, w, confidence, last, settings.local), rng)
    return ConfidenceClientState(moments.mean, np.diag(moments.covariance).copy()), moments


def _fitting(personal: _Kept, w: Array) -> _Kept:
    """q_j, where it fits the model."""
    return personal if personal is not None and len(personal.mean) == len(w) else None


def _confidence(q: ConfidenceClientState, w: Array, settings: _Settings) -> float:
    return confidence_of(q.mean, q.variance, w, settings.terms, (settings.strength, settings.spread))


def _update_client(
    client: ClientView, personal: _Kept, message: Message, rng: Rng, *, settings: _Settings
) -> ClientUpdate[ConfidenceClientState]:
    """Find q_j, and reply τ_j μ_j and τ_j."""
    w = np.asarray(message["w"], dtype=float)
    q, moments = _step(client, personal, w, rng, settings)
    confidence, blank = _confidence(q, w, settings), {"blank": 1.0} if personal is None else {}
    info = {**moments.diagnostics, "confidence": confidence, "deviation": float(np.mean((q.mean - w) ** 2)), **blank}
    return ClientUpdate(q, weighted(q.mean, confidence), info)


def _update_unreported(
    client: ClientView, personal: _Kept, message: Message, rng: Rng, *, settings: _Settings
) -> tuple[ConfidenceClientState, Mapping[str, float]]:
    """Find q_j without a reply."""
    q, moments = _step(client, personal, np.asarray(message["w"], dtype=float), rng, settings)
    return q, moments.diagnostics


def _update_server(
    state: ConfidenceState, received: Received, *, settings: _Settings
) -> tuple[ConfidenceState, Report]:
    """Eq. 9, with the declared prior of w if it is asked for."""
    if not received.clients:
        return state, Report(ConfidenceInfo(np.nan, state.confidence))
    ledger, total, weight, summed = ledger_sums(state.ledger, state.where, received)
    w: Array = np.asarray(total / weight)
    if settings.prior:
        w = np.asarray(np.linalg.solve(state.prior.precision + weight * np.eye(len(w)), state.prior.linear + total))
    mean = weight / summed
    change = float(np.sqrt(np.mean((w - state.w) ** 2) * mean))
    steady = abs(mean - state.confidence) <= settings.tolerance * mean and change <= settings.tolerance
    message = (
        f"w moved by {change:.2g} of the clients' spread in the last round; raise rounds=, or strength= if the "
        "confidence of a client grows without end"
    )
    after = state._replace(w=w, ledger=ledger, confidence=mean)
    return after, report(ConfidenceInfo(change, mean), summed == len(state.where) and steady, message)


def _draw(
    client: ClientView, personal: _Kept, message: Message, draws: int, chains: int, rng: Rng, *, settings: _Settings
) -> Draws:
    """Draws of w_j and θ_j at the final w; a new client steps until its own τ stands still."""
    w = np.asarray(message["w"], dtype=float)
    q = _fitting(personal, w) or _settled(client, w, rng, settings)
    target = _target(client, w, _confidence(q, w, settings), q, settings.local)
    return settings.local.draw(target, draws, chains, rng)


def _settled(client: ClientView, w: Array, rng: Rng, settings: _Settings) -> ConfidenceClientState:
    """q_j of a client that has none, by steps until τ_j stands still."""
    q, _ = _step(client, None, w, rng, settings)
    before, after = settings.spread**-2, _confidence(q, w, settings)
    for _ in range(tol.NEW_CLIENT_STEPS - 1):
        if abs(np.log(after / before)) < settings.tolerance:
            break
        q, _ = _step(client, q, w, rng, settings)
        before, after = after, _confidence(q, w, settings)
    return q
