"""The server's part of private EP: noised sites taken in, with what their noise does to q kept beside it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl import gaussian, privacy
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._damping import damped_step
from fedppl.algorithms.ep._state import EPInfo, EPState, Taken
from fedppl.algorithms.ep._verdict import shortest_step
from fedppl.algorithms.ep._whitening import frame_of, unwhiten
from fedppl.algorithms.ep.sites import Sites
from fedppl.contracts import Received, Report
from fedppl.gaussian import Gaussian
from fedppl.types import Array, Status


class PrivateEPState(NamedTuple):
    """What the next round needs: EP's state, and what the noise has done to it."""

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
    """So much that a round's noise stays below half of q's precision, but no more than √K.

    The noise of K precisions, a symmetric matrix, has norm of about √(2 m K) times an entry's. A site has about 1 / K
    of q's precision and moves its mean by 1 / √K sds: at √K both have a like share of the norm.
    """
    m, count = sites.structure.size, len(sites.where)
    return float(np.clip(2 * mechanism.sd * np.sqrt(2 * m * count), 1.0, np.sqrt(count)))


def _noise_covariance(g: Gaussian, state: PrivateEPState) -> Array:
    """Covariance of g's mean through the clients' noise."""
    covariance = gaussian.covariance(g)
    return np.asarray(covariance @ state.noise @ covariance)


def noise_sd(state: PrivateEPState) -> Array:
    """Sd of each mean of q through the clients' noise."""
    return np.asarray(np.sqrt(np.diagonal(_noise_covariance(state.sites.q, state))))


def widened(g: Gaussian, state: PrivateEPState) -> Gaussian:
    """Add the variance that the noise gives the mean; one that is improper stays."""
    if not gaussian.is_proper(g):
        return g
    return gaussian.from_moments(gaussian.mean(g), gaussian.covariance(g) + _noise_covariance(g, state))


def private_step(
    state: PrivateEPState, received: Received, *, mechanism: Mechanism, tolerance: float, largest: float
) -> tuple[PrivateEPState, Report]:
    """Replace or average the sites of the clients that replied, and keep count of noise and privacy."""
    replies, sites, rounds, counts = received.each, state.sites, state.rounds + 1, state.replies.copy()
    spent = privacy.epsilon(mechanism.noise_multiplier, min(rounds, mechanism.releases), mechanism.delta)
    if not replies:
        info = PrivateEPInfo("private EP", 0.0, 0.0, state.ep.damping, _relative(state), spent)
        return state._replace(rounds=rounds), Report(info)
    rows, m, weight = _sites.indices(sites, replies), sites.structure.size, precision_weight(sites, mechanism)
    counts[rows] += 1
    fresh = mechanism.sd * float(np.sqrt(len(rows)))  # noise of this round in a mean, in posterior sds
    vectors = np.stack([np.asarray(reply["site"], dtype=float) for reply in replies.values()])
    linear, packed = unwhiten(frame_of(sites.q, sites.structure, weight), vectors)
    damping = _damping(counts, rows, fresh / weight * float(np.sqrt(2 * m)), mechanism.releases, largest)
    # Where what could be taken in is next to nothing, q stays.
    taken = Taken(state.ep, EPInfo("EP", np.inf, np.inf, 0.0, np.nan, mechanism.sd, 0.0))
    if damping >= shortest_step(len(counts)):
        taken = damped_step(
            state.ep._replace(damping=damping),
            rows,
            linear - sites.linear[rows],
            packed - sites.precision[rows],
            mc_errors=np.full(len(rows), mechanism.sd),
            skewness=np.zeros((len(rows), m)),
            tolerance=tolerance,
            largest=largest,
        )
    step = taken.info
    left = 1 - len(rows) / len(counts) * (1 - (1 - step.damping) ** 2)
    noise = left * state.noise + (step.damping * fresh) ** 2 * sites.q.precision
    after = PrivateEPState(taken.state, rounds, counts, noise)
    info = PrivateEPInfo("private EP", step.change_mean, step.change_sd, step.damping, _relative(after), spent)
    arrived = info.change_mean <= max(tolerance, 3 * fresh) and info.change_sd <= max(tolerance, 1.5 * fresh / weight)
    return after, Report(info, *_judge(after, info, arrived, mechanism))


def _damping(counts: Array, rows: list[int], precision_noise: float, releases: int, largest: float) -> float:
    """Replace sites while they grow; average them over the later half of the releases, so that noise averages out.

    Never so far that a round's noise takes more than half of q's precision.
    """
    late = max(float(counts[rows].mean()) - max(releases // 2, 1), 0.0)
    averaging = max(1 / (1 + late), shortest_step(len(counts)))
    return min(largest, averaging, 0.5 / precision_noise)


def _relative(state: PrivateEPState) -> float:
    """Largest sd of a mean through the noise, in posterior sds."""
    return float(np.max(noise_sd(state) / gaussian.standard_deviations(state.sites.q)))


def _judge(state: PrivateEPState, info: PrivateEPInfo, arrived: bool, mechanism: Mechanism) -> tuple[Status, str]:
    """Done when the releases are used up; whether it arrived, as far as the noise lets one see."""
    spent = f"ε = {info.epsilon:.3g} at δ = {mechanism.delta:g} so far for all the data of one client"
    change = max(info.change_mean, info.change_sd)
    if info.damping == 0:
        message = "no damped step keeps q positive definite: too much noise for so few clients; lower clip="
    elif arrived and info.noise > 1:
        message = f"the noise, {info.noise:.2g} posterior sds, hides whether q arrived; enrol more clients"
    elif arrived:
        message = f"to the clients' noise, {info.noise:.2g} posterior sds of a mean"
    else:
        message = f"the last round moved sds or means by {change:.2g} sds; raise rounds= and releases=, or clip="
    if np.any(state.replies < mechanism.releases):
        return Status.RUNNING, f"{message}; {spent}"
    if info.damping > 0 and arrived and info.noise <= 1:
        return Status.CONVERGED, f"{message}; {spent}"
    return Status.STALLED, f"every client has used up releases={mechanism.releases}: {message}; {spent}"
