"""EP under differential privacy: each client clips its site and adds Gaussian noise before anything leaves it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from fedppl import contracts, gaussian, privacy, settings, structure
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.ep import ep
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._rounds import EPInfo, EPState, Outcome, damped_step, shortest_step
from fedppl.algorithms.ep.sites import Sites
from fedppl.contracts import ClientUpdate, ClientView, LocalInference, Received, Report, Target
from fedppl.contracts.algorithm import first_ending
from fedppl.gaussian import Gaussian
from fedppl.local.target import at_target, draw_target, pack_target, unpack_target
from fedppl.structure import Structure
from fedppl.types import Array, Layout, LocalFailure, Message, Rng, Status

logger = logging.getLogger(__name__)


class PrivateEPClientState(NamedTuple):
    """A client's personal state: how often it has released something."""

    releases: int


def PrivateEP(
    *,
    clip: float,
    noise_multiplier: float,
    releases: int,
    delta: float = 1e-5,
    local: LocalInference | None = None,
    tolerance: float = 0.01,
    damping: float = 1.0,
    structure: str | Sequence[Sequence[str]] = "full",
    _normals: Callable[[int], Array] = privacy.system_normals,
) -> contracts.Algorithm[PrivateEPState, PrivateEPClientState]:
    r"""Federated EP whose clients release nothing but their sites, clipped and with Gaussian noise.

    .. math:: s_k = \min\!\left(1, \frac{C}{\lVert v_k \rVert}\right) v_k + \mathcal N(0, z^2 C^2 I), \qquad
              v_k = \left(L^{-1} (r_k - Q_k \mu),\; w L^{-1} Q_k L^{-\top}\right)

    with q = N(μ, (L Lᵀ)⁻¹), and r_k, Q_k the natural parameters of the client's new site: its tilted distribution
    over its cavity. Off-diagonals count √2-fold, so that the norm is the Frobenius norm. The server knows q, turns s_k
    back into a site and takes EP's step: in the first half of the releases it replaces sites, then it averages them.

    Parameters
    ----------
    clip
        Bound C on the norm of a site, in posterior sds. With K clients and m shared parameters a site ends with a norm
        of about √(2m / K); a few times that is right. Less makes q too wide, more only adds noise: z C √K posterior
        sds a round.
    noise_multiplier
        Sd z of the noise over C; choose it so that ``fedppl.privacy.epsilon(noise_multiplier, releases, delta)`` is
        what you may spend.
    releases
        Largest number of replies of a client in a run; beyond it refuses. A run wants as many rounds, if all take part.
    delta
        Probability δ of the guarantee.
    local
        Local inference that gives tilted moments; by default `NestedLaplace`.
    tolerance, damping, structure
        Settings of `EP`. A diagonal or block structure releases fewer numbers, and so adds less noise.

    Returns
    -------
    Algorithm

    Notes
    -----
    The guarantee is local and for everything that one client holds: whatever a server asks in a run, and even if it
    lies about q, the replies of a client are (ε, δ)-differentially private under replacing all of its data. Where the
    local computation fails, the old site is released with noise, since failing depends on the data too. The noise comes
    from the operating system and not from the request's seed, which the server chose and could use to subtract it:
    **equal seeds do not give equal numbers here**.

    The count of releases is the client's personal state. At a site of Flower's it lies in the site's folder and counts
    over all runs; who deletes it grants the budget anew. In one process it counts one run, and lies in that run's
    checkpoint: an earlier checkpoint that is put back grants again what was released since. A reply that is lost on the
    way was a release. ``fit.idata["rounds"]["epsilon"]`` takes every client to have released once in every round so
    far, and never more than `releases` times.

    The noise widens the posterior: its variance in the means, ``fit.idata["fit"]["noise_sd"]`` squared, is part of
    q's. What the noise does to q's precision is not, and stays below half of it in a round.

    *When this fails.* With few clients the noise swamps the data. Where ``clip`` binds to the end, q is too wide. It
    begins at the prior without a warm start, and a prior that is very wide costs releases.

    References
    ----------
    .. [1] Dwork, Roth (2014), The algorithmic foundations of differential privacy, appendix A.
    .. [2] Vehtari et al. (2020), Expectation propagation as a way of life, JMLR 21.
    """
    limits = tol.LEAST_SETTING, tol.MOST_SETTING
    clip = settings.between("clip", clip, *limits, "[]", "it is in posterior sds")
    noise_multiplier = settings.between("noise_multiplier", noise_multiplier, *limits, "[]")
    releases = settings.whole("releases", releases)
    delta = settings.between("delta", delta, 0, 1, hint="take it well below 1 / number of clients")
    matching = ep.checked(local, tolerance, damping, structure)
    inference, mechanism = matching.local, Mechanism(clip, noise_multiplier, releases, delta)
    return contracts.Algorithm[PrivateEPState, PrivateEPClientState](
        name="PrivateEP",
        settings=settings.described(matching, **mechanism._asdict()),
        init=functools.partial(_init, matching=matching),
        broadcast=functools.partial(_broadcast, mechanism=mechanism),
        update_client=functools.partial(_update_client, matching=matching, mechanism=mechanism, normals=_normals),
        update_server=functools.partial(private_step, mechanism=mechanism, matching=matching),
        replies=contracts.Replies(
            lambda state: {"site": (length(state.sites.structure),)}, functools.partial(_reject, mechanism=mechanism)
        ),
        result=contracts.Result(
            _final_message,
            functools.partial(draw_target, local=inference),
            contracts.Posterior(lambda state: widened(state.sites.q, state)),
            lambda state: {
                "last_change": (("rows",), state.ep.steps.last_change),
                "noise_sd": (("rows",), noise_sd(state)),
            },
            tests_convergence=True,
            reads_personal=False,  # a count of releases
        ),
        needs=contracts.Needs(inference.check),
        disclosure=contracts.Disclosure(at_target, noise_multiplier, concludes=at_target),
        persistent=True,
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, matching: ep.Matching) -> PrivateEPState:
    start = ep.init(layout, clients, rng, matching=matching, warm=False)
    return PrivateEPState(start, 0, np.zeros(len(clients)), np.zeros((layout.size, layout.size)))


def _broadcast(state: PrivateEPState, client_id: str, *, mechanism: Mechanism) -> Message:
    """EP's message, and the weight of a site's precision against its linear in the norm that is clipped."""
    weight = precision_weight(state.sites, mechanism)
    target = pack_target(state.sites.q, _sites.cavity(state.sites, client_id), state.ep.prior_share)
    return {**target, "precision_weight": np.array(weight)}


def _update_client(
    client: ClientView,
    personal: PrivateEPClientState | None,
    message: Message,
    rng: Rng,
    *,
    matching: ep.Matching,
    mechanism: Mechanism,
    normals: Callable[[int], Array],
) -> ClientUpdate[PrivateEPClientState]:
    """Release one noised vector."""
    spent = 0 if personal is None else personal.releases
    if spent >= mechanism.releases:
        raise LocalFailure(f"all releases={mechanism.releases} of this client are used up; more would cost privacy")
    target = unpack_target(client, message)
    form = _sites.structure_of(matching.structure, client.layout)
    weight = float(message["precision_weight"])
    if not (gaussian.is_proper(target.global_) and 0 < weight < np.inf):  # by the server: this discloses no data
        raise LocalFailure("the q that came is not positive definite, or its 'precision_weight' is not positive")
    site = _site(target, frame_of(target.global_, form, weight), matching.local, rng)
    noised = privacy.clipped(site, mechanism.clip) + mechanism.sd * normals(len(site))
    return ClientUpdate(PrivateEPClientState(spent + 1), {"site": noised})


def _final_message(state: PrivateEPState, client_id: str) -> Message:
    """As in EP, widened by the noise."""
    sites, share = state.sites, state.ep.prior_share
    q, cavity = (widened(g, state) for g in (sites.q, _sites.cavity(sites, client_id)))
    return pack_target(q, cavity, share if client_id in sites.where else 0.0)


def _site(target: Target, frame: Frame, local: LocalInference, rng: Rng) -> Array:
    """The client's new site as a vector; the old one, which the server knows, where local inference fails."""
    old = whiten(frame, *gaussian.quotient(target.global_, target.cavity))
    try:
        moments = local.tilted(target, rng)
        covariance = np.asarray(np.linalg.inv(moments.precision), dtype=np.float64)
        tilted = structure.project(moments.mean, covariance, frame.form)
        return old + whiten(frame, tilted.linear - frame.q.linear, tilted.precision - frame.q.precision)
    except Exception:  # any: failing depends on the data, and a refusal would disclose it
        logger.warning("client %s: local computation failed, its old site is sent with noise", target.client.client_id)
        logger.debug("client %s failed", target.client.client_id, exc_info=True)
        return old


def _reject(state: PrivateEPState, reply: Message, *, mechanism: Mechanism) -> str | None:
    """A clipped vector with noise has a bounded norm, but for a probability below 10⁻²⁰."""
    norm = float(np.linalg.norm(reply["site"]))
    limit = mechanism.clip + tol.NOISE_NORM * mechanism.sd * np.sqrt(length(state.sites.structure))
    was_not = (
        f"'site' has norm {norm:.3g}, above clip + {tol.NOISE_NORM} noise sds √length = {limit:.3g}: it was not clipped"
    )
    return was_not if norm > limit else None


# The server's part of private EP: noised sites, and the covariance of their noise in q --------------------------------


class PrivateEPState(NamedTuple):
    """What the next round needs: EP's state, and its noise."""

    ep: EPState
    rounds: int  # each client has released at most once in each
    replies: Array  # (K,) how many arrived
    noise: Array  # (m, m) covariance that the clients' noise gives q's linear, about its mean

    @property
    def sites(self) -> Sites:
        """The server's ledger."""
        return self.ep.sites


class PrivateEPInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    change_mean: float  # largest |Δ mean| in posterior sds, before damping
    change_sd: float  # largest |Δ log sd|, before damping
    damping: float
    noise: float  # largest sd of a mean through the noise, in units of q's sd
    epsilon: float  # of any one client so far: one release a round, and no more than `releases`


class Mechanism(NamedTuple):
    """Settings that both sides know."""

    clip: float
    noise_multiplier: float
    releases: int
    delta: float

    @property
    def sd(self) -> float:
        """Standard deviation of the noise in every number."""
        return self.noise_multiplier * self.clip


def precision_weight(sites: Sites, mechanism: Mechanism) -> float:
    """The weight with which a round's noise stays below half of q's precision, at most √K.

    The noise of K precisions, a symmetric matrix, has a norm of about √(2 m K) times an entry's. A site has about 1 / K
    of q's precision and moves its mean by 1 / √K sds: with weight √K both have equal shares of the norm.
    """
    m, count = sites.structure.size, len(sites.where)
    return float(np.clip(mechanism.sd / tol.NOISE_OF_PRECISION * np.sqrt(2 * m * count), 1.0, np.sqrt(count)))


def noise_sd(state: PrivateEPState) -> Array:
    """Sd of each mean of q through the clients' noise."""
    covariance = gaussian.covariance(state.sites.q)
    return np.asarray(np.sqrt(np.diagonal(covariance @ state.noise @ covariance)))


def widened(g: Gaussian, state: PrivateEPState) -> Gaussian:
    """Add the variance of the mean by the noise; an improper g stays."""
    if not gaussian.is_proper(g):
        return g
    covariance = gaussian.covariance(g)
    return gaussian.from_moments(gaussian.mean(g), covariance + covariance @ state.noise @ covariance)


def private_step(
    state: PrivateEPState, received: Received, *, mechanism: Mechanism, matching: ep.Matching
) -> tuple[PrivateEPState, Report]:
    """Replace or average the sites of the clients that replied, with the noise and ε so far."""
    tolerance, largest = matching.tolerance, matching.damping
    replies, sites, rounds, counts = received.each, state.sites, state.rounds + 1, state.replies.copy()
    spent = privacy.epsilon(mechanism.noise_multiplier, min(rounds, mechanism.releases), mechanism.delta)
    if not replies:
        info = PrivateEPInfo("private EP", 0.0, 0.0, state.ep.steps.damping, _relative(state), spent)
        return state._replace(rounds=rounds), Report(info)
    rows, m, weight = _sites.indices(sites, replies), sites.structure.size, precision_weight(sites, mechanism)
    counts[rows] += 1
    fresh = mechanism.sd * float(np.sqrt(len(rows)))  # noise of this round in a mean, in posterior sds
    vectors = np.stack([np.asarray(reply["site"], dtype=float) for reply in replies.values()])
    linear, packed = unwhiten(frame_of(sites.q, sites.structure, weight), vectors)
    # Sites are replaced in the first half of the releases, and averaged with their noise in the second. A round's noise
    # takes at most half of q's precision.
    late = max(float(counts[rows].mean()) - max(mechanism.releases // 2, 1), 0.0)
    averaging = max(1 / (1 + late), shortest_step(len(counts)))
    damping = min(largest, averaging, tol.NOISE_OF_PRECISION * weight / (fresh * float(np.sqrt(2 * m))))
    # A step below the shortest leaves q as it is.
    outcome = Outcome(state.ep, EPInfo("EP", damping=0.0))
    if damping >= shortest_step(len(counts)):
        outcome = damped_step(
            state.ep._replace(steps=state.ep.steps._replace(damping=damping)),
            rows,
            linear - sites.linear[rows],
            packed - sites.precision[rows],
            mc_errors=np.full(len(rows), mechanism.sd),
            skewness=np.zeros((len(rows), m)),
            tolerance=tolerance,
            largest=largest,
        )
    step = outcome.info
    remaining = 1 - len(rows) / len(counts) * (1 - (1 - step.damping) ** 2)
    noise = remaining * state.noise + (step.damping * fresh) ** 2 * sites.q.precision
    after = PrivateEPState(outcome.state, rounds, counts, noise)
    info = PrivateEPInfo("private EP", step.change_mean, step.change_sd, step.damping, _relative(after), spent)
    by_noise = tol.NOISE_SDS * fresh  # of a mean; a log sd changes by half of a precision
    arrived = info.change_mean <= max(tolerance, by_noise) and info.change_sd <= max(tolerance, 0.5 * by_noise / weight)
    return after, Report(info, *_judge(after, info, arrived, mechanism))


def _relative(state: PrivateEPState) -> float:
    """Largest sd of a mean through the noise, in posterior sds."""
    return float(np.max(noise_sd(state) / gaussian.standard_deviations(state.sites.q)))


def _judge(state: PrivateEPState, info: PrivateEPInfo, arrived: bool, mechanism: Mechanism) -> tuple[Status, str]:
    """Status and message: done when the releases are used up, converged if q has arrived as far as the noise shows."""
    spent = f"ε = {info.epsilon:.3g} at δ = {mechanism.delta:g} so far for all the data of one client"
    change = max(info.change_mean, info.change_sd)
    few = "no damped step keeps q positive definite: too much noise for so few clients; lower clip="
    hidden = f"the noise, {info.noise:.2g} posterior sds, hides whether q arrived; enrol more clients"
    moved = f"the last round moved sds or means by {change:.2g} sds; raise rounds= and releases=, or clip="
    status, message = first_ending(
        (info.damping == 0, Status.STALLED, few),
        (arrived and info.noise > tol.MOST_PRIVATE_NOISE, Status.STALLED, hidden),
        (arrived, Status.CONVERGED, f"to the clients' noise, {info.noise:.2g} posterior sds of a mean"),
        (True, Status.STALLED, moved),
    )
    status = Status.RUNNING if np.any(state.replies < mechanism.releases) else status
    used_up = f"every client has used up releases={mechanism.releases}: " if status is Status.STALLED else ""
    return status, f"{used_up}{message}; {spent}"


# Changes of natural parameters as vectors, in coordinates in which q is standard normal -------------------------------


class Frame(NamedTuple):
    """Coordinates in which q, projected on the family, is standard normal."""

    form: Structure
    q: Gaussian  # projected on the family, its precision as a matrix
    mean: Array
    factor: Array  # L, lower-triangular with L Lᵀ = Q
    weights: Array  # (p,) for a precision's entries: √2-fold for off-diagonals, so that a vector's norm is the matrix's


def length(form: Structure) -> int:
    """Count the numbers in a vector: m of the linear and p of the packed precision."""
    return form.size + structure.packed_size(form)


def frame_of(q: Gaussian, form: Structure, weight: float = 1.0) -> Frame:
    """Coordinates of a proper q, precisions scaled by `weight`; server and clients find the same ones."""
    mean = gaussian.mean(q)
    inside = structure.project(mean, gaussian.covariance(q), form)
    weights = _sites.in_structure(np.where(np.eye(form.size, dtype=bool), 1.0, np.sqrt(2.0)), form)
    factor = np.asarray(np.linalg.cholesky(inside.precision), dtype=np.float64)
    return Frame(form, inside, mean, factor, weight * weights)


def whiten(frame: Frame, d_linear: Array, d_precision: Array) -> Array:
    """(L⁻¹ (Δr − ΔQ μ), L⁻¹ ΔQ L⁻ᵀ) of one change (m,), (m, m), as a vector (m + p,)."""
    inverse = solve_triangular(frame.factor, np.eye(frame.form.size), lower=True)
    about_mean = inverse @ (d_linear - d_precision @ frame.mean)
    packed = _sites.in_structure(inverse @ d_precision @ inverse.T, frame.form)
    return np.concatenate([about_mean, frame.weights * packed])


def unwhiten(frame: Frame, vectors: Array) -> tuple[Array, Array]:
    """Changes of linear (R, m) and packed precision (R, p) from vectors (R, m + p)."""
    m, factor = frame.form.size, frame.factor
    precision = factor @ structure.unpack_precision(vectors[:, m:] / frame.weights, frame.form) @ factor.T
    linear = vectors[:, :m] @ factor.T + precision @ frame.mean
    return linear, _sites.in_structure(precision, frame.form)
