"""EP under differential privacy: clients clip their sites and add Gaussian noise; the server needs their sum alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from fedppl import contracts, gaussian, privacy, settings, structure
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.ep import ep
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._rounds import shortest_step
from fedppl.contracts import Asked, ClientUpdate, ClientView, Draws, LocalInference, Received, Report, Target
from fedppl.contracts.algorithm import first_ending
from fedppl.gaussian import Gaussian
from fedppl.local.target import q_of
from fedppl.structure import Structure
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, Rng, Status

logger = logging.getLogger(__name__)


class PrivateEPClientState(NamedTuple):
    """A client's personal state: how often it has released something, and what q holds of it in the present run.

    The two rows of `held` and `sent` are natural parameters (n,): of its data without noise, which leave in no form,
    and as the server was told them; zeros where noise is shared, since replies are then no changes.
    """

    releases: int  # over all runs
    run: float = 0.0  # names the run of the rest
    round: int = 0  # of the last release
    counted: int = 0  # round of the last release that is in `held`
    held: Array = np.zeros((2, 0))
    sent: Array = np.zeros((2, 0))  # the new site of the last release, of which the server takes a step


def PrivateEP(
    *,
    clip: float,
    noise_multiplier: float,
    releases: int,
    delta: float = 1e-5,
    shared_by: int = 1,
    local: LocalInference | None = None,
    tolerance: float = 0.01,
    damping: float = 1.0,
    structure: str | Sequence[Sequence[str]] = "full",
    _normals: Callable[[int], Array] = privacy.system_normals,
) -> contracts.Algorithm[PrivateEPState, PrivateEPClientState]:
    r"""Federated EP whose clients release nothing but their sites, clipped and with Gaussian noise.

    .. math:: s_k = \min\!\left(1, \frac{C}{\lVert v_k \rVert}\right) v_k
              + \mathcal N\!\left(0, \tfrac{z^2 C^2}{n} I\right), \qquad
              v_k = \left(L^{-1} (r_k - Q_k \mu),\; w L^{-1} Q_k L^{-\top}\right)

    with q = N(μ, (L Lᵀ)⁻¹), n = `shared_by`, and r_k, Q_k the natural parameters of the client's new site: its tilted
    distribution over its cavity. Off-diagonals count √2-fold, so that the norm is the Frobenius norm. The server takes
    a step towards the sum of the s_k: in the first half of the releases it replaces sites, then it averages them.

    Parameters
    ----------
    clip
        Bound C on the norm of a site, in posterior sds. With K clients and m shared parameters a site ends with a norm
        of about √(2m / K); a few times that is right. Less makes q too wide, more only adds noise: z C √(K / n)
        posterior sds a round.
    noise_multiplier
        Sd z of the noise over C; choose it so that ``fedppl.privacy.epsilon(noise_multiplier, releases, delta)`` is
        what you may spend.
    releases
        Largest number of replies of a client in a run; beyond it refuses. A run wants as many rounds, if all take part.
    delta
        Probability δ of the guarantee.
    shared_by
        The fewest honest sites n among which the noise is shared. Above 1 it is for sums under masks alone
        (``engine=fedppl.InProcess(secure=True)``, ``fedppl.Flower.grid(secure=True)``): who sees sums with fewer honest
        sites in them sees less noise than ε says. At 1 each reply has all of the noise.
    local
        Local inference that gives tilted moments; by default `NestedLaplace`.
    tolerance, damping, structure
        Settings of `EP`. A diagonal or block structure releases fewer numbers, and so adds less noise.

    Returns
    -------
    Algorithm

    Notes
    -----
    The guarantee is for everything that one client holds: whatever a server asks in a run, and even if it lies about q,
    what it sees is (ε, δ)-differentially private under replacing all of the client's data. Where the local computation
    fails, the old site is released with noise, since failing depends on the data too. The noise comes from the
    operating system and not from the request's seed, which the server chose and could use to subtract it: **equal seeds
    do not give equal numbers here**.

    A client's v_k follows from its data and from what it was asked, and noise of its own is not in its cavity. So s_k,
    and the sum of them over honest sites given all sums so far, is a Gaussian mechanism of sensitivity 2 C;
    ``docs/attacks_measured.md`` has the proof. Against the server alone the multiplier is z √(K / n).

    The count of releases is the client's personal state. At a site of Flower's it lies in the site's folder and counts
    over all runs; who deletes it grants the budget anew. In one process it counts one run, and lies in that run's
    checkpoint: an earlier checkpoint that is put back grants again what was released since. A reply that is lost on the
    way was a release. What q holds of a client lies beside the count. A client that has lost it takes no further
    part in the run, since q still holds its old site, which it would count twice; it can in a new run.
    ``fit.idata["rounds"]["epsilon"]`` takes every client to have released once in every round so far, and never more
    than `releases` times; ``"epsilon_alone"`` is the same against a server that no site helps.

    The noise widens the posterior: its variance in the means, ``fit.idata["fit"]["noise_sd"]`` squared, is part of
    q's. What the noise does to q's precision is not, and stays below half of it in a round.

    *When this fails.* With few clients the noise swamps the data: at ε = 3 it takes some 200 to 1,000 that share it for
    sds below twice those without noise, and twelve learn nothing (``docs/privacy.md``). Where ``clip`` binds to the
    end, q is too wide. It begins at the prior without a warm start, and a prior that is very wide costs releases.

    References
    ----------
    .. [1] Dwork, Roth (2014), The algorithmic foundations of differential privacy, appendix A.
    .. [2] Vehtari et al. (2020), Expectation propagation as a way of life, JMLR 21.
    .. [3] Kairouz, Liu, Steinke (2021), The distributed discrete Gaussian mechanism for federated learning with secure
       aggregation, ICML.
    """
    limits = tol.LEAST_SETTING, tol.MOST_SETTING
    clip = settings.between("clip", clip, *limits, "[]", "it is in posterior sds")
    noise_multiplier = settings.between("noise_multiplier", noise_multiplier, *limits, "[]")
    releases = settings.whole("releases", releases)
    delta = settings.between("delta", delta, 0, 1, hint="take it well below 1 / number of clients")
    mechanism = Mechanism(clip, noise_multiplier, releases, delta, settings.whole("shared_by", shared_by))
    least, most = tol.MASKED_SDS
    if mechanism.shared_by > 1 and not least <= min(clip, mechanism.sd) <= max(clip, mechanism.sd) <= most:
        numbers = f"clip={clip:g} with noise of sd {mechanism.sd:.3g}"
        raise DeclarationError(f"{numbers}: under masks both must be between {least:g} and {most:g} posterior sds.")
    matching = ep.checked(local, tolerance, damping, structure)
    inference = matching.local
    return contracts.Algorithm[PrivateEPState, PrivateEPClientState](
        name="PrivateEP",
        settings=settings.described(matching, **mechanism._asdict()),
        init=functools.partial(_init, matching=matching),
        broadcast=functools.partial(_broadcast, mechanism=mechanism),
        update_client=functools.partial(_update_client, matching=matching, mechanism=mechanism, normals=_normals),
        update_server=functools.partial(private_step, mechanism=mechanism, matching=matching),
        replies=contracts.Replies(
            lambda state: {"site": (length(state.problem.structure),)},
            functools.partial(_reject, mechanism=mechanism),
            summed=contracts.always,
        ),
        result=contracts.Result(
            _final_message,
            functools.partial(_draw, matching=matching),
            contracts.Posterior(lambda state: widened(state.q, state.noise)),
            lambda state: {"last_change": (("rows",), state.last_change), "noise_sd": (("rows",), noise_sd(state))},
            tests_convergence=True,
        ),
        needs=contracts.Needs(inference.check),
        disclosure=contracts.Disclosure(_asks, noise_multiplier, concludes=_asks, shared_by=mechanism.shared_by),
        persistent=True,
    )


class Mechanism(NamedTuple):
    """Settings that both sides know."""

    clip: float
    noise_multiplier: float
    releases: int
    delta: float
    shared_by: int = 1

    @property
    def sd(self) -> float:
        """Standard deviation of a client's noise in every number."""
        return self.noise_multiplier * self.clip / float(np.sqrt(self.shared_by))


# The client's part ----------------------------------------------------------------------------------------------------


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
    """Release one noised vector. Whatever is refused here is seen in the message and in earlier ones, not in data."""
    spent = 0 if personal is None else personal.releases
    if spent >= mechanism.releases:
        raise LocalFailure(f"all releases={mechanism.releases} of this client are used up; more would cost privacy")
    q, form = q_of(message), _sites.structure_of(matching.structure, client.layout)
    weight, share = float(message["precision_weight"]), float(message["prior_share"])
    if not (gaussian.is_proper(q) and 0 < weight < np.inf):
        raise LocalFailure("the q that came is not positive definite, or its 'precision_weight' is not positive")
    held = _in_q(personal, message, form)
    frame = frame_of(q, form, weight)
    site = _site(client, q, site_of(held[0], form), share, frame, matching.local, rng)
    bounded = privacy.clipped(site, mechanism.clip)
    noised = bounded + mechanism.sd * normals(len(site))
    told = whiten(frame, *site_of(held[1], form))  # zero where noise is shared, and a reply is no change
    sent = np.concatenate(unwhiten(frame, np.stack([bounded, noised if mechanism.shared_by == 1 else 0 * noised])), 1)
    about = float(message["run"]), int(message["round"]), int(message["counted"])
    return ClientUpdate(PrivateEPClientState(spent + 1, *about, held, sent), {"site": noised - told})


def _in_q(personal: PrivateEPClientState | None, message: Message, form: Structure) -> Array:
    """What q holds of the client, (2, n), after the step that the server took of its last reply that counted."""
    run, number, counted, step = (float(message[name]) for name in ("run", "round", "counted", "step"))
    if not (np.isfinite(run) and 0 <= counted < number < np.inf and 0 <= step <= 1):
        raise LocalFailure(f"round {number:g} after {counted:g}, with step {step:g}, is none: steps are from 0 to 1")
    if counted == 0:
        return np.zeros((2, length(form)))
    if personal is not None and (personal.run, personal.sent.shape) == (run, (2, length(form))):
        if counted == personal.round:
            return np.asarray(personal.held + step * (personal.sent - personal.held))
        if counted == personal.counted:  # the last reply did not count
            return personal.held
    raise LocalFailure("what q holds of this client is not what it has kept of this run; begin a new run")


def _site(
    client: ClientView, q: Gaussian, held: Gaussian, share: float, frame: Frame, local: LocalInference, rng: Rng
) -> Array:
    """The client's new site as a vector; what q holds of its data where the cavity or local inference is of no use."""
    old = whiten(frame, *held)
    try:
        moments = local.tilted(Target(client, q, gaussian.quotient(q, held), share), rng)
        covariance = np.asarray(np.linalg.inv(moments.precision), dtype=np.float64)
        tilted = structure.project(moments.mean, covariance, frame.form)
        return old + whiten(frame, tilted.linear - frame.q.linear, tilted.precision - frame.q.precision)
    except Exception:  # any: failing depends on the data, and a refusal would disclose it
        logger.warning("client %s: local computation failed, its old site is sent with noise", client.client_id)
        logger.debug("client %s failed", client.client_id, exc_info=True)
        return old


def _asks(layout: Layout, message: Message) -> Asked:
    """What a request asks: moments about the mean of q. The cavity is q over a site that the client keeps."""
    none, q = np.zeros((0, layout.size)), q_of(message)
    return Asked(none, none, ((q, q),))


def _draw(
    client: ClientView,
    personal: PrivateEPClientState | None,
    message: Message,
    draws: int,
    chains: int,
    rng: Rng,
    *,
    matching: ep.Matching,
) -> Draws:
    """Draws of (φ, θ_k) from the tilted distribution, as in EP, widened by the noise."""
    q, form, noise = q_of(message), _sites.structure_of(matching.structure, client.layout), message["noise"]
    cavity = gaussian.quotient(q, site_of(_in_q(personal, message, form)[0], form))
    q, cavity = (widened(g, gaussian.unpack_triangle(np.asarray(noise, dtype=float))) for g in (q, cavity))
    return matching.local.draw(Target(client, q, cavity, float(message["prior_share"])), draws, chains, rng)


# The server's part: q moves by the sum of noised sites, with the covariance of their noise in it ----------------------


class Problem(NamedTuple):
    """What stays the same in a run."""

    run: float  # names it
    where: Mapping[str, int]  # client id to its row
    structure: Structure
    prior: Gaussian
    prior_share: float  # 1 / K when the prior is not Gaussian


class Taken(NamedTuple):
    """Of each client's replies, (K,)."""

    replies: Array  # how many arrived
    counted: Array  # round of the last one
    steps: Array  # that q took of that one


class PrivateEPState(NamedTuple):
    """What the next round needs: q, what of each client is in it, and its noise. No client's site is here."""

    problem: Problem
    q: Gaussian
    rounds: int  # each client has released at most once in each
    taken: Taken
    noise: Array  # (m, m) covariance that the clients' noise gives q's linear, about its mean
    last_change: Array  # (m,) of a mean or a log sd in the last round, in posterior sds, before damping


class PrivateEPInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    change_mean: float  # largest |Δ mean| in posterior sds, before damping
    change_sd: float  # largest |Δ log sd|, before damping
    damping: float
    noise: float  # largest sd of a mean through the noise, in units of q's sd
    epsilon: float  # of any one client so far, against the server and all sites but `shared_by`
    epsilon_alone: float  # against the server alone; the same where it may see single replies


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, matching: ep.Matching) -> PrivateEPState:
    _sites.say_if_large(layout, "PrivateEP")
    none = np.zeros(len(clients))
    problem = Problem(
        run=float(rng.integers(2**53)),
        where={client_id: k for k, client_id in enumerate(clients)},
        structure=_sites.structure_of(matching.structure, layout),
        prior=layout.prior,
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / len(clients),
    )
    return PrivateEPState(
        problem,
        q=layout.prior,
        rounds=0,
        taken=Taken(none, none, none),
        noise=np.zeros((layout.size, layout.size)),
        last_change=np.full(layout.size, np.nan),
    )


def _broadcast(state: PrivateEPState, client_id: str, *, mechanism: Mechanism) -> Message:
    """What a client is told in the end, too, and the weight of precisions in the norm that is clipped."""
    return {**_told(state, client_id), "precision_weight": np.array(precision_weight(state, mechanism))}


def _final_message(state: PrivateEPState, client_id: str) -> Message:
    """What a request has, and the covariance of the noise, by which a client widens q and its cavity."""
    return {**_told(state, client_id), "noise": gaussian.pack_triangle(state.noise)}


def _told(state: PrivateEPState, client_id: str) -> Message:
    """q, and what was made of the client's last reply that counted: under masks the same for all."""
    numbers = {"run": state.problem.run, "round": state.rounds + 1, "prior_share": 0.0, "counted": 0.0, "step": 0.0}
    if (k := state.problem.where.get(client_id)) is not None:
        numbers |= {"counted": state.taken.counted[k], "step": state.taken.steps[k]}
        numbers |= {"prior_share": state.problem.prior_share}
    q = {"global_linear": state.q.linear, "global_precision": gaussian.pack_triangle(state.q.precision)}
    return {**q, **{name: np.array(float(value)) for name, value in numbers.items()}}


def _reject(state: PrivateEPState, reply: Message, *, mechanism: Mechanism) -> str | None:
    """A clipped vector with noise has a bounded norm, but for a probability below 10⁻²⁰; so has a change of some."""
    norm = float(np.linalg.norm(reply["site"]))
    bound = mechanism.clip + tol.NOISE_NORM * mechanism.sd * np.sqrt(length(state.problem.structure))
    limit = bound * (tol.MOST_CHANGED if mechanism.shared_by == 1 else 1.0)
    return f"'site' has norm {norm:.3g}, above {limit:.3g}: it was not clipped" if norm > limit else None


def precision_weight(state: PrivateEPState, mechanism: Mechanism) -> float:
    """The weight with which a round's noise stays below half of q's precision, at most √K.

    The noise of K precisions, a symmetric matrix, has a norm of about √(2 m K) times an entry's. A site has about 1 / K
    of q's precision and moves its mean by 1 / √K sds: with weight √K both have equal shares of the norm.
    """
    m, count = state.problem.structure.size, len(state.problem.where)
    return float(np.clip(mechanism.sd / tol.NOISE_OF_PRECISION * np.sqrt(2 * m * count), 1.0, np.sqrt(count)))


def noise_sd(state: PrivateEPState) -> Array:
    """Sd of each mean of q through the clients' noise."""
    covariance = gaussian.covariance(state.q)
    return np.asarray(np.sqrt(np.diagonal(covariance @ state.noise @ covariance)))


def widened(g: Gaussian, noise: Array) -> Gaussian:
    """Add the variance of the mean by the noise (m, m) in the linear; an improper g stays."""
    if not gaussian.is_proper(g):
        return g
    covariance = gaussian.covariance(g)
    return gaussian.from_moments(gaussian.mean(g), covariance + covariance @ noise @ covariance)


def private_step(
    state: PrivateEPState, received: Received, *, mechanism: Mechanism, matching: ep.Matching
) -> tuple[PrivateEPState, Report]:
    """Move q by a step along the summed change, with the noise and ε so far; nothing where nobody replied."""
    state = state._replace(rounds=state.rounds + 1)
    epsilons = _spent(state, mechanism)
    rows = [state.problem.where[client_id] for client_id in received.names]
    if not rows:
        return state, Report(PrivateEPInfo("private EP", 0.0, 0.0, matching.damping, _relative(state), *epsilons))
    q, m, count = state.q, state.problem.structure.size, len(state.problem.where)
    weight = precision_weight(state, mechanism)
    replies, counted, steps = (each.copy() for each in state.taken)
    replies[rows] += 1
    change = _summed_change(state, received.sums()["site"], weight, mechanism)
    # Sites are replaced in the first half of the releases, and averaged with their noise in the second. A round's noise
    # takes at most half of q's precision.
    fresh = mechanism.sd * float(np.sqrt(len(rows)))  # noise of this round in a mean, in posterior sds
    late = max(float(replies[rows].mean()) - max(mechanism.releases // 2, 1), 0.0)
    averaging = max(1 / (1 + late), shortest_step(count))
    longest = min(matching.damping, averaging, tol.NOISE_OF_PRECISION * weight / (fresh * float(np.sqrt(2 * m))))
    step, moved = _longest_proper(q, change, longest, shortest_step(count))
    counted[rows], steps[rows] = state.rounds, step
    remaining = 1 - len(rows) / count * (1 - (1 - step) ** 2)
    after = state._replace(
        q=moved, taken=Taken(replies, counted, steps), noise=remaining * state.noise + (step * fresh) ** 2 * q.precision
    )
    shift, stretch = _moves(q, moved, step)
    if step:
        after = after._replace(last_change=np.maximum(shift, stretch))
    largest = float(np.max(shift)), float(np.max(stretch))
    info = PrivateEPInfo("private EP", *largest, step, _relative(after), *epsilons)
    by_noise = tol.NOISE_SDS * fresh  # of a mean; a log sd changes by half of a precision
    tolerance = matching.tolerance
    arrived = info.change_mean <= max(tolerance, by_noise) and info.change_sd <= max(tolerance, 0.5 * by_noise / weight)
    return after, Report(info, *_judge(after, info, arrived, mechanism))


def _summed_change(state: PrivateEPState, total: Array, weight: float, mechanism: Mechanism) -> Gaussian:
    """The sum of the changes of all sites that replied, as natural parameters with a full precision."""
    linear, packed = unwhiten(frame_of(state.q, state.problem.structure, weight), np.asarray(total, dtype=float)[None])
    change = Gaussian(linear[0], structure.unpack_precision(packed[0], state.problem.structure))
    if mechanism.shared_by == 1:
        return change
    return gaussian.quotient(change, gaussian.quotient(state.q, state.problem.prior))  # replies are sites, of all


def _longest_proper(q: Gaussian, change: Gaussian, longest: float, shortest: float) -> tuple[float, Gaussian]:
    """The step, halved until q is positive definite, and q after it; 0 and q as it is below the shortest."""
    step = longest
    while step >= shortest:
        moved = Gaussian(q.linear + step * change.linear, q.precision + step * change.precision)
        if gaussian.is_proper(moved):
            return step, moved
        step /= 2
    return 0.0, q


def _moves(q: Gaussian, moved: Gaussian, step: float) -> tuple[Array, Array]:
    """Moves of means and log sds (m,), in posterior sds, before damping."""
    sd, new_sd = gaussian.standard_deviations(q), gaussian.standard_deviations(moved)
    undamped = step or 1.0
    return np.abs(gaussian.mean(moved) - gaussian.mean(q)) / sd / undamped, np.abs(np.log(new_sd / sd)) / undamped


def _spent(state: PrivateEPState, mechanism: Mechanism) -> tuple[float, float]:
    """ε of a client so far: against the server and all sites but `shared_by`, and against the server alone."""
    count, z = min(state.rounds, mechanism.releases), mechanism.noise_multiplier
    more = len(state.problem.where) / mechanism.shared_by if mechanism.shared_by > 1 else 1.0
    spent, alone = (privacy.epsilon(one, count, mechanism.delta) for one in (z, z * float(np.sqrt(more))))
    return spent, alone


def _relative(state: PrivateEPState) -> float:
    """Largest sd of a mean through the noise, in posterior sds."""
    return float(np.max(noise_sd(state) / gaussian.standard_deviations(state.q)))


def _judge(state: PrivateEPState, info: PrivateEPInfo, arrived: bool, mechanism: Mechanism) -> tuple[Status, str]:
    """Status and message: done when the releases are used up, converged if q has arrived as far as the noise shows."""
    spent = f"ε = {info.epsilon:.3g} at δ = {mechanism.delta:g} so far for all the data of one client"
    if mechanism.shared_by > 1:
        helpers = len(state.problem.where) - mechanism.shared_by
        spent += f", against the server with {helpers} sites; {info.epsilon_alone:.3g} against the server alone"
    change = max(info.change_mean, info.change_sd)
    few = "no damped step keeps q positive definite, by the noise of so few clients; enrol more, or lower clip="
    hidden = f"the noise, {info.noise:.2g} posterior sds, hides whether q arrived; enrol more clients"
    moved = f"the last round moved sds or means by {change:.2g} sds; raise rounds= and releases=, or clip="
    status, message = first_ending(
        (info.damping == 0, Status.STALLED, few),
        (arrived and info.noise > tol.MOST_PRIVATE_NOISE, Status.STALLED, hidden),
        (arrived, Status.CONVERGED, f"to the clients' noise, {info.noise:.2g} posterior sds of a mean"),
        (True, Status.STALLED, moved),
    )
    status = Status.RUNNING if np.any(state.taken.replies < mechanism.releases) else status
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


def site_of(numbers: Array, form: Structure) -> Gaussian:
    """Natural parameters (m + p,) with a full precision."""
    return Gaussian(numbers[: form.size], structure.unpack_precision(numbers[form.size :], form))
