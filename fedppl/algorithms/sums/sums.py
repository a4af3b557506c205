r"""The posterior by sums over clients: the same message to all of them, and nothing but sums of what they answer.

.. math:: \log p(\varphi \mid y) = \log p(\varphi) + \sum_k \log f_k(\varphi) + \text{const}

Clients answer log f_k at points. The search maximises the sum, by values at a stencil; then values about the mode are
weighed until the posterior is known. With few exchanges clients' own posteriors, summed, stand in for the search.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import contracts, gaussian, settings
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep.ep import require_known
from fedppl.algorithms.ep.sites import implausible_values, say_if_large
from fedppl.algorithms.sums import search as _search
from fedppl.algorithms.sums import weigh as _weigh
from fedppl.algorithms.sums.phases import About, Alone, Integrated, Rule, Weighed, Weighing, gaussian_of
from fedppl.algorithms.sums.search import Search
from fedppl.contracts import Asked, Batch, ClientUpdate, ClientView, Factor, LogEvidence, Received, Report, Summed
from fedppl.contracts.algorithm import WithoutClient, always, first_ending
from fedppl.gaussian import Gaussian
from fedppl.local import integrate
from fedppl.local import tolerances as of_local
from fedppl.local.conditional_draws import draw_weighted
from fedppl.local.integrate import Stacked
from fedppl.local.log_factors import factor
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, pack_target
from fedppl.numerics import tolerances as common
from fedppl.numerics.coordinates import of_phi, to_phi
from fedppl.numerics.importance import effective_size, jackknife, normalise, quadratic_terms, skewness, weighted_moments
from fedppl.numerics.proposals import Reweighted, has_heavy_tails, is_trusted, second_k, weigh, weigh_points, whitened
from fedppl.numerics.streams import whitened_points
from fedppl.results.diagnostics import hardly_a_prior
from fedppl.settings import some_of
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, NotConvergedError, Rng, Status

_LOCAL = NestedLaplace()
_COUNTS = ("values_lost", "left_out_lost", "squares", "constants", "improper", "answered")


class SumsState(NamedTuple):
    """What the next round needs."""

    clients: tuple[str, ...]
    prior_share: float  # of each client, of a prior that is not Gaussian
    prior: Gaussian
    phase: Search | Alone | Weighing | Weighed
    void: int  # rounds in a row in which a client was missing
    stream: int  # of points
    looked: bool  # whether other modes of clients' own variables were looked for
    left: int | None  # exchanges that are left, void ones not counted; None of as many as it takes


class SumsInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    log_posterior: float  # log marginal posterior at the point of the search
    points: int  # so far
    ess: float = np.nan  # effective points
    pareto_k: float = np.nan
    mc_error: float = np.nan  # largest standard error of a mean or of an sd, in posterior sds


def Sums(
    *, points: int = 512, pilot: int = 256, starts: int | str = "auto", exchanges: int | None = None
) -> contracts.Algorithm[SumsState, None]:
    r"""Compute the posterior of the shared variables from sums over clients, by importance sampling about its mode.

    .. math:: w_s \propto \frac{p(\varphi_s) \prod_k f_k(\varphi_s)}{g(\varphi_s)}, \qquad
              f_k(\varphi) = \int p(y_k, \theta \mid \varphi)\, d\theta

    Every client gets the same messages, points φ_s at which it evaluates log f_k: about a point of the search for the
    mode, and then of a proposal g, which is a smooth surrogate of the sum so far. The server reads nothing but sums of
    the answers, and clients remember nothing.

    Parameters
    ----------
    points
        Number of points of the first stage after the pilot, at least 64. There are stages until the weights are to be
        trusted, from the third on with twice as many points each.
    pilot
        Number of points that tell the sum roughly, at least 64.
    starts
        Number of searches: the first from the prior's mean, the others from images of what it found and from points
        of the prior. Where other modes have more than a thousandth of the mass the fit is not called converged.
        "auto" is 4 where clients are in this process, and 1 where they are sites of their own.
    exchanges
        Most exchanges with clients, from 3 to 9, as for sites whose messages travel as files by hand: in the first each
        client answers a Gaussian of its own posterior in place of a search, and from then on values at four times as
        many points. A fit that is not to be trusted after the last is stalled. None for as many as it takes.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        For settings out of range.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(4), fedppl.Sums(), progressbar=False, random_seed=1)
    >>> fit.status.value
    'converged'

    Notes
    -----
    *When this fails.* A client that is missing makes a round void, and the third one in a row is the end. Beyond some
    twenty shared coordinates few points have all the weight, and the status says so: use `EP`. Who pulls further than
    others `Fit.influence` tells, from clients' own factors; of sites of their own it cannot: use `EP`.

    References
    ----------
    .. [1] Vehtari et al. (2024), Pareto smoothed importance sampling, JMLR 25.
    .. [2] Rue, Martino, Chopin (2009), Approximate Bayesian inference for latent Gaussian models, JRSS B 71.
    """
    points, pilot = _number("points", points), _number("pilot", pilot)
    by_number = not isinstance(starts, str)
    searches = _warm_start.number_of(starts, tol.AUTO_STARTS)
    if exchanges is not None:
        settings.whole("exchanges", exchanges, tol.FEWEST_EXCHANGES, "or None", tol.MOST_EXCHANGES)
        if by_number:
            raise DeclarationError(f"starts={starts} are of a search, for which exchanges= has no room: leave one out.")
    return contracts.Algorithm[SumsState, None](
        name="Sums",
        settings={"points": str(points), "pilot": str(pilot), "starts": repr(starts), "exchanges": str(exchanges)},
        init=functools.partial(_init, starts=searches, exchanges=exchanges),
        broadcast=_broadcast,
        update_client=_update_client,
        update_server=functools.partial(_update_server, points=points, pilot=pilot, exchanges=exchanges),
        replies=contracts.Replies(_shapes, _implausible, summed=always),
        result=contracts.Result(
            _conclusion,
            draw_weighted,
            contracts.Posterior(_q, _weighted_points, _evidence, _without),
            _details,
            preliminary=lambda state: isinstance(state.phase, Search | Alone),
            tests_convergence=True,
            resume=functools.partial(_resume, pilot=pilot),
        ),
        needs=contracts.Needs(_LOCAL.check),
        disclosure=contracts.Disclosure(
            _asks, at_sites=functools.partial(_at_sites, by_number=by_number), concludes=at_target
        ),
        batch=Batch(
            _update_client, None, lambda clients: (), lambda parts: (), stacks=integrate.stacks, summed=_of_stack
        ),
    )


def _number(name: str, points: int) -> int:
    """Check a number of points."""
    return settings.whole(name, points, tol.FEWEST_POINTS, most=of_local.MOST_POINTS)


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, starts: int, exchanges: int | None) -> SumsState:
    stream = int(rng.integers(2**31))
    say_if_large(layout, "Sums")
    share = 0.0 if layout.prior_is_gaussian else 1.0 / len(clients)
    phase: Search | Alone = _search.begin(layout, len(clients), starts, stream)
    if exchanges is not None:
        many = len(clients) > tol.MANY_CLIENTS
        phase = Alone(About(layout.prior, layout.prior, layout.labels, many, hurried=not many))
    return SumsState(clients, share, layout.prior, phase, 0, stream % tol.FIT_STREAMS, False, exchanges)


def _at_sites(state: SumsState, *, by_number: bool) -> SumsState:
    """Searches cost a site queries: one, where no number of them was asked for; and no part of the sites is chosen."""
    if not isinstance(state.phase, Search):
        return state
    search = state.phase._replace(some=1.0)
    return state._replace(phase=search if by_number else search._replace(starts=None, scan=None))


def _resume(first: SumsState, last: SumsState, *, pilot: int) -> SumsState:
    """Begin the search, or the pilot, where another fit had its posterior."""
    if isinstance(last.phase, Search | Alone) or not gaussian.is_proper(q := last.phase.about.q):
        return first
    if isinstance(first.phase, Alone):  # own posteriors would say less
        return _begun(first, first.phase.about._replace(q=q), pilot, None)[0]
    assert isinstance(first.phase, Search)
    return first._replace(phase=_search.begin_at(first.phase, gaussian.mean(q)))


# Messages and replies ------------------------------------------------------------------------------------------------


def _broadcast(state: SumsState, client_id: str) -> Message:
    """Points, the same to all clients, and the places of those at which θ is integrated."""
    phase = state.phase
    points, places = _points(phase)
    return {
        "points": points,
        "known": places,
        "center": phase.newton.trial.point if isinstance(phase, Search) else gaussian.mean(phase.about.q),
        "prior_share": np.array(state.prior_share),
        "alone": np.array(float(isinstance(phase, Alone))),
        "some": np.array(phase.some if isinstance(phase, Search) else 1.0),
        "look": np.array(float(isinstance(phase, Weighing) and not state.looked)),
        "roughly": np.array(float(isinstance(phase, Weighing) and phase.rule == Rule.ROUGHLY)),
    }


def _points(phase: Search | Alone | Weighing | Weighed) -> tuple[Array, Array]:
    """Points, and places of those at which θ is integrated; none before the first, or once the posterior is weighed."""
    if isinstance(phase, Search):
        return _search.points(phase), _search.integrated(phase).astype(float)
    if isinstance(phase, Alone | Weighed):
        return np.zeros((0, len(phase.about.labels))), np.zeros(0)
    return phase.batch.phi, _weigh.places_integrated(phase).astype(float)


def _asks(layout: Layout, message: Message) -> Asked:
    """Points, any of which can be left out; or moments of each client's own posterior, under the prior."""
    if float(message["alone"]) > 0:
        nowhere = np.zeros((0, layout.size))
        return Asked(nowhere, nowhere, ((layout.prior, layout.prior),))
    return Asked(np.zeros((0, layout.size)), np.asarray(message["points"], dtype=float), values=True)


def _update_client(client: ClientView, personal: None, message: Message, rng: Rng) -> ClientUpdate[None]:
    """What this client adds to the sums: 0 where it has no value, and a count of 1 that is lost."""
    # A part of the clients is chosen by their names: under masks a server could choose one, and read it in the sum.
    everybody = {**message, "some": np.array(1.0)}
    summed = _of_stack(client.view(integrate.alone), everybody, 1, message.get("inside"))
    for reason in summed.failures.values():
        raise LocalFailure(reason)
    lost, kept = np.asarray(summed.total.get("values_lost", ())), np.asarray(message.get("inside", True), dtype=bool)
    info: dict[str, float | str] = {"values_lost": float(np.mean(lost > 0)) if len(lost) else 0.0}
    if count := int(np.sum(~kept)):
        info["reason"] = f"{count} of {len(kept)} points are farther from the prior's mean than its policy's distance="
    return ClientUpdate(None, summed.total, info)


def _of_stack(stack: Stacked, message: Message, workers: int, inside: Array | None = None) -> Summed:
    """The sum of what the clients of a stack answer."""
    if float(message["alone"]) > 0:
        share = float(message["prior_share"])
        own = integrate.in_parts(lambda k: _search.alone(stack.client(k.start), share), len(stack), 1, workers)
        return Summed({"alone": np.sum(own, axis=0), "answered": np.array(float(len(own)))}, len(own), {})
    points, center = (np.asarray(message[name], dtype=float) for name in ("points", "center"))
    places, some = np.asarray(message["known"], dtype=np.int64), float(message["some"])
    kept = np.ones(len(points), dtype=bool) if inside is None else np.asarray(inside, dtype=bool)
    at = np.cumsum(kept)[places[kept[places]]] - 1  # among the points that are kept
    look, roughly = (float(message[name]) > 0 for name in ("look", "roughly"))
    sums = integrate.summed(stack, points[kept], at, center, workers, some=some, look=look, roughly=roughly)
    answered = float(len(integrate.asked(stack, some)) - len(sums.failures))
    values, lost = _placed(sums.values, kept), _placed(sums.lost, kept, answered)
    share = float(message["prior_share"])
    if share and not stack.prior.is_gaussian:
        ratio = stack.prior.log_ratio(points)
        has_prior = np.isfinite(ratio)
        values, lost = values + np.where(has_prior, share * answered * ratio, 0.0), np.where(has_prior, lost, answered)
    is_known = kept[places]
    total = {
        "values": values,
        "values_lost": lost,
        "left_out": _placed(sums.left_out, is_known),
        "errors": _placed(sums.errors, is_known),
        "squares": _placed(sums.squares, is_known),
        "left_out_lost": _placed(sums.left_out_lost, is_known, answered),
        "constants": sums.constants,
        "improper": np.array(answered if not stack.client(0).has_proper_prior else 0.0),
        "answered": np.array(answered),
    }
    return Summed(total, len(stack) - len(sums.failures), sums.failures)


def _placed(sums: Array, kept: Array, elsewhere: float = 0.0) -> Array:
    """Sums at the points that are kept, among all of them: a site's policy may keep some back."""
    whole = np.full(len(kept), elsewhere)
    whole[kept] = sums
    return whole


def _shapes(state: SumsState) -> dict[str, tuple[int, ...]]:
    if isinstance(state.phase, Alone):
        m = len(state.phase.about.labels)
        return {"alone": (m + m * (m + 1) // 2,), "answered": ()}
    count, integrated = (len(values) for values in _points(state.phase))
    at_few = dict.fromkeys(("left_out", "left_out_lost", "errors", "squares"), (integrated,))
    at_all = {"values": (count,), "values_lost": (count,)}
    return {**at_all, **at_few, "constants": (2,), "improper": (), "answered": ()}


def _implausible(state: SumsState, reply: Message) -> str | None:
    if isinstance(state.phase, Alone):
        most = float(np.max(np.abs(reply["alone"])))
        beyond = f"'alone' reaches {most:.2g} in the prior's units, beyond {tol.AGAINST_Q:g}: rescale the outcome"
        return None if most <= tol.AGAINST_Q else beyond
    for name in _COUNTS:
        if np.min(reply[name], initial=0.0) < 0.0:
            return f"{name!r} is below 0, and counts and squares are not; look at this client's versions"
    return implausible_values(reply, ("values", "left_out"))


# Rounds at the server ------------------------------------------------------------------------------------------------


def _update_server(
    state: SumsState, received: Received, *, points: int, pilot: int, exchanges: int | None
) -> tuple[SumsState, Report]:
    """Take sums in, where they are of all clients: a round without one of them is void.

    In a search a client without a mode at its point may be why: then the point is given up.
    """
    phase, count = state.phase, len(state.clients)
    if received.clients < count:
        void = state.void + 1
        if void < tol.VOID_ROUNDS and isinstance(phase, Search) and np.any(phase.newton.trial.move):
            nothing = np.full(len(_search.points(phase)), np.nan)
            return _searched(state._replace(void=void), phase, nothing, pilot, None)
        message = (
            f"sums need all {count} clients, and {received.clients} answered: mend what fit.records[-1].failures says, "
            "ask all (no participation=, reporting=, short deadline=), or use fedppl.EP() where single replies leave"
        )
        return _reported(state._replace(void=void), _info(phase), message)
    sums = received.sums()
    state = state._replace(void=0, left=None if state.left is None else state.left - 1)
    if isinstance(phase, Alone):
        about = phase.about._replace(q=_search.together(phase.about.prior, np.asarray(sums["alone"], dtype=float)))
        return _begun(state, about, pilot, None)
    if isinstance(phase, Search):
        scale = count / max(float(sums["answered"]), 1.0) if phase.some < 1.0 else 1.0
        places, laplace = _search.integrated(phase), _of_sums(sums, "values")
        integrated = _integrated(sums, _search.points(phase)[places])
        stencil = (integrated, laplace[places]) if phase.some == 1.0 else None
        values = laplace.copy()
        values[places] += integrated.residuals
        return _searched(state, phase, scale * values, pilot, stencil)
    if isinstance(phase, Weighed):  # nothing was asked for
        return _reported(state, _info(phase), None)
    after, report = _weighed(state, phase, sums, points, exchanges)
    if after.left != 0 or (isinstance(after.phase, Weighed) and after.phase.trusted):
        return after, report
    if isinstance(after.phase, Weighing):
        after = after._replace(phase=Weighed(*after.phase[:3], None, False, False))
    assert isinstance(report.info, SumsInfo)
    message = f"exchanges={exchanges} are over: raise exchanges=, or leave it out"
    return _reported(after, report.info, "; ".join(filter(None, (message, report.message))))


def _of_sums(sums: Message, name: str) -> Array:
    """Sums where every client had a value, else NaN."""
    return np.where(np.asarray(sums[f"{name}_lost"]) > tol.NO_CLIENT, np.nan, sums[name])


def _integrated(sums: Message, points: Array) -> Integrated:
    """What an exchange says of the points at which θ was integrated."""
    errors, squares = (np.asarray(sums[name], dtype=float) for name in ("errors", "squares"))
    return Integrated(points, _of_sums(sums, "left_out"), errors, squares)


def _info(phase: Search | Alone | Weighing | Weighed) -> SumsInfo:
    if isinstance(phase, Search | Alone):
        return SumsInfo("search", phase.newton.objective if isinstance(phase, Search) else np.nan, 0)
    points, posterior = len(phase.evaluated.points), phase.posterior if isinstance(phase, Weighed) else None
    if posterior is None:
        return SumsInfo("weighing", np.nan, points)
    return SumsInfo("weighing", np.nan, points, posterior.ess, posterior.pareto_k, posterior.error)


def _searched(
    state: SumsState, phase: Search, values: Array, pilot: int, stencil: tuple[Integrated, Array] | None
) -> tuple[SumsState, Report]:
    """One step of a search; once it is over the next search, or the pilot, which begins with the stencil's values."""
    searched = _search.step(phase, values, len(state.clients))
    if searched.stuck or not searched.arrived:
        state = state._replace(phase=searched.search)
        return _reported(state, _info(state.phase), searched.message, searched.stuck)
    sites = searched.search.sites
    about = About(sites.q, sites.prior, sites.labels, len(state.clients) > tol.MANY_CLIENTS)
    return _begun(state._replace(phase=searched.search), about, pilot, stencil)


def _begun(
    state: SumsState, about: About, pilot: int, stencil: tuple[Integrated, Array] | None
) -> tuple[SumsState, Report]:
    """The pilot about a Gaussian."""
    info, count = _info(state.phase), _points_of(about, len(state.clients), pilot)
    weighing = _weigh.begin(about, count, state.stream, stencil)
    return _reported(state._replace(phase=weighing), info, "nothing is weighed yet: raise rounds=")


def _reported(state: SumsState, info: SumsInfo, message: str | None, stuck: str = "") -> tuple[SumsState, Report]:
    """The state and the report of a round, with the status that it has by how far the phases are."""
    phase = state.phase
    ending = first_ending(
        (stuck, Status.STALLED, stuck),  # no search arrives, or they find several modes
        (state.void >= tol.VOID_ROUNDS, Status.STALLED, message),
        (state.void or not isinstance(phase, Weighed), Status.RUNNING, message),
        (isinstance(phase, Weighed) and phase.trusted, Status.CONVERGED, message),
        (True, Status.STALLED, message),  # more points would not do
    )
    return state, Report(info, *ending)


def _points_of(about: About, clients: int, points: int) -> int:
    """So many, or fewer where clients are many; more where exchanges are few."""
    points *= tol.HURRIED_POINTS if about.hurried else 1
    few = int(np.clip(tol.VALUES_OF_MANY / clients, tol.FEWEST_OF_MANY, tol.POINTS_OF_MANY))
    return points if clients <= tol.MANY_CLIENTS else min(points, few)


def _weighed(
    state: SumsState, phase: Weighing, sums: Message, points: int, exchanges: int | None
) -> tuple[SumsState, Report]:
    """Values at the points of a batch; another one, or the end."""
    count, more = len(state.clients), "raise rounds="
    state = state._replace(looked=True)
    alike, by_chance = np.asarray(sums["constants"], dtype=float)
    in_common = 1.0 + (count - 1.0) / common.STREAMS  # of many clients some have their random points in common
    integrated = _integrated(sums, phase.batch.phi[_weigh.places_integrated(phase)])
    constants = np.array([alike, np.sqrt(in_common * by_chance)])
    taken = _weigh.taken_in(
        phase, _of_sums(sums, "values"), integrated, constants, float(sums["improper"]) < tol.NO_CLIENT
    )
    if taken is None:
        again, message = _weigh.with_more_integrated(phase), f"integrals over clients' own variables vary: {more}"
        return _reported(state._replace(phase=again), _info(again), message)
    few = _points_of(phase.about, count, points)
    each = max(tol.FEWEST_POINTS, few // tol.EVERYWHERE) if phase.rule == Rule.EVERYWHERE else few
    more_points = f"points={tol.MORE_POINTS * points}"
    remedy = f"fedppl.Sums({more_points if exchanges is None else f'exchanges={exchanges}, {more_points}'})"
    following, problems = _weigh.next_stage(*taken, each, state.stream, remedy, last=state.left == 0)
    if isinstance(following, Weighing):
        problems = f"the weights are not trusted yet: {more}"
    elif not following.trusted:
        cause = hardly_a_prior(phase.about.labels, gaussian.standard_deviations(state.prior))
        problems = "; ".join(filter(None, (problems, cause)))
    return _reported(state._replace(phase=following), _info(following), problems)


# Results -------------------------------------------------------------------------------------------------------------


def _q(state: SumsState) -> Gaussian:
    phase = state.phase
    return phase.sites.q if isinstance(phase, Search) else phase.about.q


def _weighted_points(state: SumsState) -> Reweighted | None:
    """The weighted points, where they are to be trusted and say more than q does."""
    phase = state.phase
    return phase.posterior if isinstance(phase, Weighed) and phase.trusted and not phase.is_normal else None


def _evidence(state: SumsState, clients: Mapping[str, ClientView]) -> LogEvidence:
    phase = state.phase
    if not isinstance(phase, Weighed) or phase.posterior is None or not phase.trusted:
        raise NotConvergedError("the posterior is not to be trusted, so that there is no evidence: see fit.message.")
    off = float(np.hypot(*phase.evaluated.constants))
    require_known(phase.evaluated.is_proper, off)
    # Of a prior that is not Gaussian the clients' shares make up, its constant included.
    of_prior = 0.0 if state.prior_share else gaussian.log_integral(phase.about.prior)
    value = gaussian.log_integral(phase.about.q) - of_prior + phase.posterior.log_ratio
    return LogEvidence(value, float(np.hypot(phase.posterior.log_ratio_error, off)), "sums")


def _without(state: SumsState, client_ids: Sequence[str], clients: Mapping[str, ClientView]) -> list[WithoutClient]:
    """By values of all clients at points of the posterior, where these are not too many; else by its Gaussian."""
    if absent := sorted(set(client_ids) - set(clients)):
        remedy = "give them to fedppl.load(path, model, clients=...), or, of sites of their own, use fedppl.EP()"
        raise DeclarationError(f"the posterior without clients {some_of(absent)} needs their data, not here: {remedy}.")
    phase, q = state.phase, _q(state)
    center = gaussian.mean(q)
    whole = phase if isinstance(phase, Weighed) and phase.trusted and set(state.clients) <= set(clients) else None
    if whole is None or whole.is_normal or len(state.clients) > tol.SINGLE_CLIENTS:
        posterior = whole.posterior if whole is not None and whole.is_normal else None
        points = _of_gaussian(q) if posterior is None else posterior.points
        alone = [(clients[name], _factor(clients[name], points, center)) for name in client_ids]
        return [_without_one(*one, q, posterior, points, points) for one in alone]
    coordinates, prior = whole.shape.coordinates, whole.about.prior
    assert whole.posterior is not None
    u = of_phi(whole.posterior.points, coordinates)
    points, scramble, log_proposal = _weigh.candidates_about(whole, u, whole.posterior.weights, tol.SINGLE_POINTS)
    factors = {name: factor(clients[name], points, center, state.prior_share) for name in state.clients}
    total = np.sum([one.values for one in factors.values()], axis=0) + gaussian.log_kernel(prior, points)
    posterior = weigh_points(q, points, scramble, total - gaussian.log_kernel(q, points), log_proposal)
    scaled = of_phi(points, coordinates)
    ratio = state.prior_share * next(iter(clients.values())).prior.log_ratio(points)
    has_prior = np.isfinite(ratio)  # elsewhere others have no density either
    ratio = np.where(has_prior, ratio, np.inf)
    each = []
    for name in client_ids:
        values = factors[name]._replace(values=factors[name].values - ratio)
        one = _without_one(clients[name], values, q, posterior, points, scaled)
        if posterior is not None and not (one.weighted is not None and is_trusted(one.weighted)):
            log_weights = _log(posterior.weights) - np.where(np.isfinite(values.values), values.values, np.inf)
            others = [clients[other] for other in state.clients if other != name]
            one = _moved(state.prior_share, whole, clients[name], others, one, scaled, log_weights)
        each.append(one)
    return each


def _moved(
    prior_share: float,
    whole: Weighed,
    client: ClientView,
    others: Sequence[ClientView],
    before: WithoutClient,
    u: Array,
    log_weights: Array,
) -> WithoutClient:
    """The posterior without a client by points of its own, where too few of all clients' points have its weight.

    Points move to where the others' posterior is, by importance weights that are flattened until enough are effective.
    """
    coordinates, prior, size = whole.shape.coordinates, whole.about.prior, u.shape[1]
    for _ in range(tol.SINGLE_MOVES if others else 0):
        flatter = (normalise(power * log_weights) for power in 0.5 ** np.arange(tol.SINGLE_HALVINGS))
        weights = next((one for one in flatter if effective_size(one) >= common.EACH_TELLS * size), None)
        if weights is None:
            return before
        points, scramble, log_proposal = _weigh.candidates_about(whole, u, weights, tol.SINGLE_MOVED)
        center = weights @ to_phi(u, coordinates)
        try:
            factors = [factor(other, points, center, prior_share) for other in others]
            own = factor(client, points, center, 0.0)
        except LocalFailure as error:
            logger.warning("the posterior without client %s is not exact: %s", client.client_id, error)
            return before
        log_density = np.sum([one.values for one in factors], axis=0) + gaussian.log_kernel(prior, points)
        if prior_share:  # the client's own share of the prior
            log_density = log_density + prior_share * client.prior.log_ratio(points)
        u, log_weights = of_phi(points, coordinates), np.nan_to_num(log_density - log_proposal, nan=-np.inf)
        moments = weighted_moments(points, normalise(log_weights))
        if not np.linalg.eigvalsh(moments.covariance)[0] > 0:
            continue
        about = gaussian.from_moments(moments.mean, moments.covariance)
        left = weigh_points(about, points, scramble, log_density - gaussian.log_kernel(about, points), log_proposal)
        if left is None:
            return before
        left = left._replace(second_k=second_k(left.weights, u, left.weights))
        noise = left.weights @ np.sqrt(np.sum([one.errors**2 for one in factors], axis=0))
        if noise > common.MOST_NOISE or np.mean(np.isnan(log_density)) > common.MOST_LOST:
            left = left._replace(error=np.inf)  # of what clients do not know, or have no value at
        before = before._replace(weighted=left)
        if is_trusted(left):
            cavity = gaussian.from_moments(left.mean, left.covariance)
            return WithoutClient(cavity, left, _predicted(client, own, left))
    return before


def _predicted(client: ClientView, own: Factor, others: Reweighted) -> LogEvidence:
    """log E[f_k(φ) | y_-k], where points of the others' posterior tell it."""
    logs = _log(others.weights) + np.where(np.isfinite(own.values), own.values, -np.inf)
    weights = normalise(logs)
    if not client.has_proper_prior or effective_size(weights) < common.FEWEST:
        return _UNKNOWN
    kept = [np.where(others.scramble != one, 1.0, 0.0) for one in range(common.SCRAMBLES)]
    by_chance = jackknife(np.array([logsumexp(logs, b=one) - np.log(others.weights @ one) for one in kept]))
    unknown = (weights @ own.errors) ** 2 + own.constant.alike**2 + own.constant.by_chance**2
    return LogEvidence(float(logsumexp(logs)), float(np.sqrt(by_chance**2 + unknown)))


def _conclusion(state: SumsState, client_id: str) -> Message:
    """q, and points of the posterior, from which a client draws its own."""
    q, posterior = _q(state), _weighted_points(state)
    if posterior is None:
        points, weights = _of_gaussian(q), np.full(tol.GAUSSIAN_DRAWS, 1.0 / tol.GAUSSIAN_DRAWS)
    else:
        # A site refuses all of them where one is far out, as points of no weight may be.
        is_some = posterior.weights > tol.NEVER_DRAWN
        points, weights = posterior.points[is_some], posterior.weights[is_some]
    joins = np.array(float(client_id not in state.clients))
    return {**pack_target(q, q, 0.0), "points": points, "weights": weights, "joins": joins}


def _of_gaussian(q: Gaussian) -> Array:
    mean, root = gaussian.affine(q if gaussian.is_proper(q) else gaussian.repair(q, tol.REPAIRED)[0])
    return np.asarray(mean + whitened_points(len(mean), tol.GAUSSIAN_DRAWS, 0)[: tol.GAUSSIAN_DRAWS] @ root.T)


def _details(state: SumsState) -> contracts.Details:
    posterior = state.phase.posterior if isinstance(state.phase, Weighed) else None
    if posterior is None:
        return {}
    return {"skewness": (("rows",), skewness(posterior.points, posterior.weights, tol.MADE_UP))}


# The posterior without one client, from weighted points of the whole posterior and the client's log f_k there ---

# p(φ | y_-k) ∝ p(φ | y) / f_k(φ), and p(y_k | y_-k) = 1 / E[1 / f_k(φ) | y].
# f_k is without a share of the prior, whatever the prior is: that belongs to the posterior of the others, all of it.

logger = logging.getLogger(__name__)

_UNKNOWN = LogEvidence(np.nan, np.nan)


def _without_one(
    client: ClientView, values: Factor, q: Gaussian, posterior: Reweighted | None, points: Array, scaled: Array
) -> WithoutClient:
    """The posterior without a client, of which log f_k is known at points (S, m) of q, or of the weighted posterior.

    Weights of weighted points are those of all clients' values, exact in the tails too. `scaled` are the points with
    scales in place of their logarithms where these have long left tails.
    """
    weights = np.full(len(points), 1.0 / len(points)) if posterior is None else posterior.weights
    has_value = np.isfinite(values.values)
    if not gaussian.is_proper(q) or weights @ has_value < 1.0 - common.MOST_LOST:
        return WithoutClient(gaussian.quotient(q, q), None, _UNKNOWN)
    cavity = gaussian.quotient(q, _site(q, points[has_value], weights[has_value], values.values[has_value]))
    if posterior is None:
        return WithoutClient(cavity, None, _UNKNOWN)
    base = cavity if gaussian.is_proper(cavity) else q
    log_weights = _log(weights) - np.where(has_value, values.values, np.inf)  # no weight where there is no value
    of_base = _log(posterior.of_q) + gaussian.log_density(base, points) - gaussian.log_density(q, points)
    of_base = np.where(has_value, of_base, -np.inf)
    left = weigh(base, points, posterior.scramble, log_weights, of_base, int(has_value.sum()))
    if left is not None and left.second_k > -np.inf:
        # moments are reported of scales, not of tails of their logarithms
        left = left._replace(second_k=second_k(left.weights, scaled, left.weights))
    # Where the posterior of all clients has no heavy tail, no point lies in one.
    if left is None or (has_heavy_tails(points, left.weights) and not has_heavy_tails(points, weights)):
        return WithoutClient(cavity, None, _UNKNOWN)
    if not gaussian.is_proper(cavity) and is_trusted(left):
        cavity = gaussian.from_moments(left.mean, left.covariance)
    if not client.has_proper_prior:
        return WithoutClient(cavity, left, _UNKNOWN)
    # Densities integrate to one, and so do the weights of q and of its quotient, but for an error of the same points.
    ratios = (log_weights, of_base, _log(weights), _log(posterior.of_q))
    by_chance = _spread(ratios, posterior.scramble)
    errors = np.where(has_value, values.errors, 0.0)
    unknown = (left.weights @ errors) ** 2 + left.weights @ errors**2
    unknown += values.constant.alike**2 + values.constant.by_chance**2
    return WithoutClient(cavity, left, LogEvidence(-left.log_ratio, float(np.sqrt(by_chance**2 + unknown))))


def _factor(client: ClientView, points: Array, center: Array) -> Factor:
    try:
        return factor(client, points, center, 0.0)
    except LocalFailure as error:
        logger.warning("nothing is known of the posterior without client %s: %s", client.client_id, error)
        return Factor(np.full(len(points), np.nan), np.zeros(len(points)))


def _site(q: Gaussian, points: Array, weights: Array, values: Array) -> Gaussian:
    """The quadratic in φ that is nearest to log f_k under the weights, as EP's site is nearly."""
    center, root = gaussian.affine(q)
    design = quadratic_terms(whitened(points, center, root))
    flat = (normalise(power * _log(weights)) for power in tol.FLATTENED)
    counted = next(
        (power for power in flat if effective_size(power) >= common.QUADRATIC_POINTS * design.shape[1]), weights
    )
    scale = np.sqrt(counted)
    coefficients = np.linalg.lstsq(design * scale[:, None], (values - counted @ values) * scale)[0]
    return gaussian_of(np.asarray(coefficients, dtype=float), center, root)


def _spread(logs: tuple[Array, Array, Array, Array], scramble: NDArray[np.intp]) -> float:
    """Standard error of the log of the first two sums' ratio over that of the last two, by leaving scrambles out."""
    ratios = []
    for left_out in range(common.SCRAMBLES):
        above, beside, below, control = (np.logaddexp.reduce(part[scramble != left_out]) for part in logs)
        ratios.append(above - beside - (below - control))
    return float(jackknife(np.array(ratios)))


def _log(weights: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(weights))
