r"""The posterior by sums over clients: the same message to all of them, and nothing but sums of what they answer.

.. math:: \log p(\varphi \mid y) = \log p(\varphi) + \sum_k \log f_k(\varphi) + \text{const}

Two kinds of exchange. The search maximises the sum by expansions of its terms (federated Newton). Then clients answer
log f_k at points of a proposal about the mode, which is fitted to the weighted points until these are to be trusted.
To the functions of EP all clients together are one, with one site: q is a Gaussian with the posterior's moments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from fedppl import contracts, gaussian, settings
from fedppl.algorithms.ep import _correction, _judged, _starts
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep._correction import Correcting, asked, asked_at, exchange, weighed
from fedppl.algorithms.ep._evidence import of_correction
from fedppl.algorithms.ep._rounds import hardly_a_prior, why_not_arrived
from fedppl.algorithms.ep._starts import Starts
from fedppl.algorithms.ep.sites import NO_VALUE, Sites
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.algorithms.size import say_if_large
from fedppl.algorithms.sums.without import without
from fedppl.contracts import Asked, ClientUpdate, ClientView, Factor, LogEvidence, Received, Report
from fedppl.contracts.algorithm import WithoutClient, always
from fedppl.gaussian import Gaussian
from fedppl.local import marginal_values
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import draw_target, pack_target
from fedppl.numerics import student
from fedppl.numerics.importance import STREAMS, skewness, whitened_points
from fedppl.numerics.reweighting import Reweighted
from fedppl.numerics.smooth import smooth_over
from fedppl.structure import full
from fedppl.types import Array, DeclarationError, Layout, Message, Rng, Status

_ALL = "all clients"
_LOCAL = NestedLaplace()
_BUDGET = 25  # expansions of a search: a dozen do even from a prior a million times too wide
_VOID = 3  # rounds in a row in which a client is missing
_KNOWN, _KNOWN_A_COORDINATE = 64, 6  # points of an exchange at which what Laplace leaves out is asked for
_FORETOLD = 0.02  # log units, median error with which it is foretold from these at all others
_EXCHANGES = 6
_DRAWN = 4096  # points of q for clients' draws, where no weighted ones are


class Known(NamedTuple):
    """What Laplace's approximations of all clients leave out, at the points where it was asked for."""

    points: Array  # (T, m)
    left_out: Array  # (T,) log units; NaN where a client has no value
    errors: Array  # (T,) Σ_k errors, with their signs
    squares: Array  # (T,) Σ_k squared errors


class Searching(NamedTuple):
    """The search for the mode, and those that are still to begin from elsewhere."""

    sites: Sites  # of one client, which is all of them
    search: WarmStart
    starts: Starts | None


class Weighing(NamedTuple):
    """Log densities at points about the mode."""

    sites: Sites
    held: Correcting
    known: Known
    everywhere: bool  # whether θ is integrated at every point, since fewer do not foretell the others


class SumsState(NamedTuple):
    """What the next round needs."""

    clients: tuple[str, ...]
    prior_share: float  # of each client, of a prior that is not Gaussian
    phase: Searching | Weighing
    void: int  # rounds in a row in which a client was missing
    stream: int  # of points


class SumsInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    log_posterior: float  # log marginal posterior at the point of the search
    points: int  # so far
    ess: float  # effective points
    pareto_k: float
    mc_error: float  # largest standard error of a mean or of an sd, in posterior sds


def Sums(*, points: int = 2048, pilot: int = 256, starts: int | str = "auto") -> contracts.Algorithm[SumsState, None]:
    r"""Compute the posterior of the shared variables from sums over clients, by importance sampling about its mode.

    .. math:: w_s \propto \frac{p(\varphi_s) \prod_k f_k(\varphi_s)}{g(\varphi_s)}, \qquad
              f_k(\varphi) = \int p(y_k, \theta \mid \varphi)\, d\theta

    Every client gets the same messages: a point at which it expands log f_k, and then points φ_s of a proposal g at
    which it evaluates it. The server reads nothing but sums of the answers, and clients remember nothing.

    Parameters
    ----------
    points
        Number of points of the first exchange after the pilot, at least 512. Each further one has twice as many, until
        the weights are to be trusted. Points are of eight scrambles: their number is rounded down to a multiple of 8.
    pilot
        Number of points that shape the proposal, at least 64.
    starts
        Number of searches: the first from the prior's mean, the others from images of what it found and from points
        of the prior. Where other modes have more than a thousandth of the mass the fit is not called converged.
        "auto" is 4 where clients are in this process, and 1 where they are sites of their own.

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
    twenty shared coordinates few points have all the weight, and the status says so: use `EP`. Nobody is said to pull
    further than others: that is what `Fit.influence` is for, which, as `conflict`, computes clients' own factors once
    it is called. Of sites of their own it cannot: use `EP`.

    References
    ----------
    .. [1] Vehtari et al. (2024), Pareto smoothed importance sampling, JMLR 25.
    .. [2] Rue, Martino, Chopin (2009), Approximate Bayesian inference for latent Gaussian models, JRSS B 71.
    """
    points, pilot = settings.whole("points", points, 512, most=2**20), settings.whole("pilot", pilot, 64, most=2**20)
    by_number = not isinstance(starts, str)
    if not by_number and starts != "auto":
        raise DeclarationError(f'starts={settings.shown(starts)} must be "auto", or a whole number from 1 to 1000.')
    searches = settings.whole("starts", starts, most=1000) if by_number else 4
    return contracts.Algorithm[SumsState, None](
        name="Sums",
        settings={"points": str(points), "pilot": str(pilot), "starts": repr(starts)},
        init=functools.partial(_init, starts=searches),
        broadcast=_broadcast,
        update_client=_update_client,
        update_server=functools.partial(_update_server, points=points, pilot=pilot),
        replies=contracts.Replies(_shapes, _implausible, summed=always),
        result=contracts.Result(
            _conclusion,
            functools.partial(draw_target, local=_LOCAL),
            contracts.Posterior(lambda state: state.phase.sites.q, _corrected, _evidence, _without),
            _details,
            preliminary=lambda state: isinstance(state.phase, Searching),
            tests_convergence=True,
            resume=_resume,
        ),
        needs=contracts.Needs(_LOCAL.check),
        disclosure=contracts.Disclosure(_asks, at_sites=functools.partial(_at_sites, by_number=by_number)),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, starts: int) -> SumsState:
    stream = int(rng.integers(2**31))
    say_if_large(layout, "Sums")
    phase = Searching(
        _sites.empty(layout, (_ALL,), full(layout.size)),
        _warm_start.start(layout, 1),
        _starts.begin(layout, starts, stream, asked_for=True) if starts > 1 else None,
    )
    return SumsState(clients, 0.0 if layout.prior_is_gaussian else 1.0 / len(clients), phase, 0, stream)


def _at_sites(state: SumsState, *, by_number: bool) -> SumsState:
    """Searches cost a site queries: one, where no number of them was asked for."""
    if by_number or not isinstance(state.phase, Searching):
        return state
    return state._replace(phase=state.phase._replace(starts=None))


def _resume(first: SumsState, last: SumsState) -> SumsState:
    """Begin the search where another fit had its posterior."""
    assert isinstance(first.phase, Searching)
    q = last.phase.sites.q
    if isinstance(last.phase, Searching) or not gaussian.is_proper(q):
        return first
    middle = gaussian.mean(first.phase.sites.prior)
    search = _warm_start.start_at(gaussian.mean(q), middle, 1)
    return first._replace(phase=first.phase._replace(search=search))


# Messages and replies ------------------------------------------------------------------------------------------------


def _broadcast(state: SumsState, client_id: str) -> Message:
    """A point to expand at, or points: the same to all."""
    phase, share = state.phase, np.array(state.prior_share)
    if isinstance(phase, Searching):
        return {"point": phase.search.point, "move": phase.search.move, "prior_share": share}
    points = asked(phase.held)
    known = _known(*points.shape, everywhere=phase.everywhere).astype(float)
    return {"points": points, "known": known, "center": gaussian.mean(phase.sites.q), "prior_share": share}


def _known(count: int, size: int, *, everywhere: bool) -> NDArray[np.intp]:
    """Points at which what Laplace leaves out is asked for, some of each scramble; of `size` coordinates."""
    some = count if everywhere else max(_KNOWN, _KNOWN_A_COORDINATE * (size + 2))
    return np.unique(np.linspace(0, count - 1, some).astype(np.intp))


def _asks(layout: Layout, message: Message) -> Asked:
    """The point of a search, which can be left out where a step led to it, with those along the step; or points."""
    if "points" in message:
        return Asked(np.zeros((0, layout.size)), np.asarray(message["points"], dtype=float), correction=True)
    return _warm_start.asks(layout, message)


def _update_client(client: ClientView, personal: None, message: Message, rng: Rng) -> ClientUpdate[None]:
    """What is added to the sums. Where there is no value there is 0, and a count of one that is lost."""
    share, inside = float(message["prior_share"]), message.get("inside")
    if "point" in message:
        point, move = (np.asarray(message[name], dtype=float) for name in ("point", "move"))
        reply, info = _warm_start.expand_along(client, _LOCAL, point, move, share, inside)
        lost = np.concatenate([[float(reply.pop("value"))], reply.pop("ray")])
        return ClientUpdate(None, {**reply, **_counted("values", lost, lost <= NO_VALUE)}, info)
    points, center = (np.asarray(message[name], dtype=float) for name in ("points", "center"))
    known = np.asarray(message["known"], dtype=np.intp)
    kept = np.ones(len(points), dtype=bool) if inside is None else np.asarray(inside, dtype=bool)
    values, some = np.full(len(points), np.nan), kept[known]
    values[kept] = marginal_values.laplace(client, points[kept], center, share)
    more = Factor(np.full(len(known), np.nan), np.zeros(len(known)))
    found = marginal_values.left_out(client, points[known[some]], center)
    more.values[some], more.errors[some] = found.values, found.errors
    errors = np.where(np.isfinite(more.values), more.errors, 0.0)
    reply = {
        **_counted("values", values, ~np.isfinite(values)),
        **_counted("left_out", more.values, ~np.isfinite(more.values)),
        "errors": errors,
        "squares": errors**2,
        "constants": np.array([abs(found.constant.alike), found.constant.by_chance**2]),
        "improper": np.array(float(not client.has_proper_prior)),
    }
    return ClientUpdate(None, reply, {"values_lost": float(np.mean(~np.isfinite(values)))})


def _counted(name: str, values: Array, lost: NDArray[np.bool_]) -> dict[str, Array]:
    return {name: np.where(lost, 0.0, values), f"{name}_lost": lost.astype(float)}


def _of_sums(sums: Message, name: str, otherwise: float) -> Array:
    """Sums where every client had a value."""
    return np.where(np.asarray(sums[f"{name}_lost"]) > 0.5, otherwise, sums[name])


def _shapes(state: SumsState) -> dict[str, tuple[int, ...]]:
    phase, m = state.phase, state.phase.sites.structure.size
    if isinstance(phase, Searching):
        ray = (1 + len(_warm_start.LENGTHS),)
        return {"gradient": (m,), "hessian": (m * (m + 1) // 2,), "values": ray, "values_lost": ray}
    points = (len(asked(phase.held)),)
    known = (len(_known(*points, m, everywhere=phase.everywhere)),)
    of_known = dict.fromkeys(("left_out", "left_out_lost", "errors", "squares"), known)
    return {"values": points, "values_lost": points, **of_known, "constants": (2,), "improper": ()}


def _implausible(state: SumsState, reply: Message) -> str | None:
    return _sites.implausible_values(reply, ("values",))


# Rounds at the server ------------------------------------------------------------------------------------------------


def _update_server(state: SumsState, received: Received, *, points: int, pilot: int) -> tuple[SumsState, Report]:
    """Take sums in, where they are of all clients: a round without one of them is void."""
    if received.clients < len(state.clients):
        missing = f"sums need all {len(state.clients)} clients, and {received.clients} answered"
        over = state.void + 1 >= _VOID
        remedy = "leave participation= out, or use fedppl.EP(), which keeps the site of who is missing"
        status = Status.STALLED if over else Status.RUNNING
        return state._replace(void=state.void + 1), Report(_info(state.phase), status, f"{missing}: {remedy}")
    state, sums = state._replace(void=0), received.sums()
    if isinstance(state.phase, Searching):
        return _searched(state, state.phase, sums, pilot)
    return _weighed(state, state.phase, sums, points)


def _info(phase: Searching | Weighing) -> SumsInfo:
    if isinstance(phase, Searching):
        return SumsInfo("search", phase.search.objective, 0, np.nan, np.nan, np.nan)
    found, count = phase.held.found, len(phase.held.points)
    known = (np.nan, np.nan, np.nan) if found is None else (found.ess, found.pareto_k, found.error)
    return SumsInfo("weighing", np.nan, count, *known)


def _searched(state: SumsState, phase: Searching, sums: Message, pilot: int) -> tuple[SumsState, Report]:
    """One step of a search; once it is over the next one, or the exchange that shapes the proposal."""
    values = _of_sums(sums, "values", NO_VALUE)
    reply = {"value": values[0], "gradient": sums["gradient"], "hessian": sums["hessian"], "ray": values[1:]}
    sites, search, _ = _warm_start.step(phase.sites, phase.search, {_ALL: reply})
    after, starts = phase._replace(sites=sites, search=search), phase.starts
    info = _info(after)
    if not search.arrived and search.spent < _BUDGET:
        return state._replace(phase=after), Report(info, message=why_not_arrived(sites, search))
    if starts is not None and (search.arrived or starts.modes):
        mode = _starts.arrived_at(sites, search) if search.arrived else None
        starts, sites, following = _starts.next_search(starts, sites, mode)
        if following is not None:
            left = f"{len(starts.left) + 1} searches are left"
            return state._replace(phase=Searching(sites, following, starts)), Report(info, message=left)
    elif not search.arrived:
        return state._replace(phase=after), Report(info, Status.STALLED, why_not_arrived(sites, search))
    if starts is not None and starts.said:
        return state._replace(phase=Searching(sites, search, starts)), Report(info, Status.STALLED, starts.said)
    held = _correction.start(sites, np.zeros(sites.structure.size), pilot, np.inf, state.stream, keep=False)
    nothing = Known(np.zeros((0, sites.structure.size)), *np.zeros((3, 0)))
    return state._replace(phase=Weighing(sites, held, nothing, False)), Report(info, message="nothing is weighed yet")


def _weighed(state: SumsState, phase: Weighing, sums: Message, points: int) -> tuple[SumsState, Report]:
    """Values at the points of an exchange; another one from a proposal fitted to the weighted points, or the end."""
    added = _added(phase, sums, len(state.clients))
    if added is None:  # asked again, with fewer points and all of them integrated
        fewer = tuple(
            one._replace(per_scramble=max(1, one.per_scramble // 4)) for one in _correction.latest(phase.held)
        )
        held = exchange(_correction.without_latest(phase.held), phase.sites, fewer, state.stream)
        after = phase._replace(held=held, everywhere=True)
        return state._replace(phase=after), Report(_info(after), message="integrals over clients' own variables vary")
    phase = added
    if phase.held.exchanges == 1 and (found := weighed(phase.held, phase.sites.q, phase.held.residual)) is not None:
        count = points // student.SCRAMBLES // (4 if phase.everywhere else 1)
        proposals = _judged.refitted(found, count, phase.sites.q)
        phase = phase._replace(held=exchange(phase.held._replace(found=found), phase.sites, proposals, state.stream))
        return state._replace(phase=phase), Report(_info(phase), message="a pilot has shaped the proposal")
    remedy = f"fedppl.Sums(points={4 * points})"
    judged = _judged.judge(phase.held, phase.sites, _EXCHANGES, state.stream, None, remedy)
    after = phase._replace(held=judged.state)
    if not judged.done:
        return state._replace(phase=after), Report(_info(after), message="the weights are not trusted yet")
    if not judged.state.trusted:
        message = "; ".join(filter(None, (judged.message, hardly_a_prior(phase.sites))))
        return state._replace(phase=after), Report(_info(after), Status.STALLED, message)
    after = _centred(after)
    return state._replace(phase=after), Report(_info(after), Status.CONVERGED, "", mild=True)


def _added(phase: Weighing, sums: Message, count: int) -> Weighing | None:
    """The sums of an exchange taken in; None where what Laplace leaves out is not foretold from where it is known."""
    held, sites = phase.held, phase.sites
    at, where = asked(held), asked_at(held)
    places = _known(*at.shape, everywhere=phase.everywhere)
    left_out = _of_sums(sums, "left_out", np.nan)
    now = Known(at[places], left_out, np.asarray(sums["errors"]), np.asarray(sums["squares"]))
    known = Known(*(np.concatenate(pair) for pair in zip(phase.known, now, strict=True)))
    values = _of_sums(sums, "values", np.nan)
    if phase.everywhere:
        values, alike, noise = values + now.left_out, now.errors, now.squares
    elif np.any(now.left_out) or np.any(now.squares):
        joined = np.concatenate([known.points, at])
        smooth = smooth_over(joined, np.arange(len(known.points)), known.left_out, known.errors, _FORETOLD)
        if smooth is None:
            return None
        more, missed = (one[len(known.points) :] for one in smooth)
        nearest = cKDTree(known.points).query(at)[1]
        values, alike, noise = values + more, missed, known.squares[nearest] + missed**2
    else:
        alike, noise = np.zeros((2, len(at)))
    residual, signed, squared = held.residual.copy(), held.alike.copy(), held.noise.copy()
    residual[where] = values - gaussian.log_kernel(_sites.site(sites, 0), at)
    signed[where], squared[where] = np.nan_to_num(alike), np.nan_to_num(noise)
    alike_constant, by_chance = np.asarray(sums["constants"], dtype=float)
    in_common = 1.0 + (count - 1.0) / STREAMS  # of many clients some have their random points in common
    constants = np.array([[float(alike_constant), float(np.sqrt(in_common * by_chance))]])
    after = held._replace(
        residual=residual,
        alike=signed,
        noise=squared,
        constants=np.maximum(held.constants, constants),
        answered=np.ones(1, dtype=bool),
        rounds=held.rounds + 1,
        is_proper=held.is_proper and float(sums["improper"]) < 0.5,
    )
    return phase._replace(held=after, known=known)


def _centred(phase: Weighing) -> Weighing:
    """The same posterior with its own moments as q, which is the control variate of what is read from it."""
    held, found, sites = phase.held, phase.held.found, phase.sites
    assert found is not None
    target = gaussian.from_moments(found.mean, found.covariance)
    linear = (target.linear - sites.prior.linear)[None]
    precision = _sites.in_structure((target.precision - sites.prior.precision)[None], sites.structure)
    moved = _sites.update(sites, linear, precision)
    residual = held.residual + gaussian.log_kernel(sites.q, held.points) - gaussian.log_kernel(moved.q, held.points)
    again = weighed(held._replace(residual=residual), moved.q, residual)
    return phase if again is None else phase._replace(sites=moved, held=held._replace(residual=residual, found=again))


# Results -------------------------------------------------------------------------------------------------------------


def _corrected(state: SumsState) -> Reweighted | None:
    """The weighted points, where they are to be trusted and say more than q does."""
    phase = state.phase
    is_done = isinstance(phase, Weighing) and phase.held.trusted and _judged.says_more(phase.held)
    return phase.held.found if is_done and isinstance(phase, Weighing) else None


def _evidence(state: SumsState, clients: object) -> LogEvidence:
    phase = state.phase
    held = phase.held if isinstance(phase, Weighing) else None
    return of_correction(held, phase.sites, state.prior_share)


def _without(state: SumsState, client_id: str, clients: Mapping[str, ClientView]) -> WithoutClient:
    phase = state.phase
    found = phase.held.found if isinstance(phase, Weighing) and phase.held.trusted else None
    assert _LOCAL.factor is not None
    return without(phase.sites.q, found, client_id, clients, _LOCAL.factor)


def _conclusion(state: SumsState, client_id: str) -> Message:
    """q, and points of the posterior, from which a client draws its own."""
    q, phase = state.phase.sites.q, state.phase
    found = phase.held.found if isinstance(phase, Weighing) else None
    if found is not None and _corrected(state) is not None:
        is_some = found.weights > 0
        points, weights = found.points[is_some], found.weights[is_some]
    else:
        points, weights = _points_of(q), np.full(_DRAWN, 1.0 / _DRAWN)
    joins = np.array(float(client_id not in state.clients))
    return {**pack_target(q, q, 0.0), "points": points, "weights": weights, "joins": joins}


def _points_of(q: Gaussian) -> Array:
    if not gaussian.is_proper(q):
        q, _ = gaussian.repair(q, 1e-6)
    mean, root = gaussian.affine(q)
    return np.asarray(mean + whitened_points(len(mean), _DRAWN, 0)[:_DRAWN] @ root.T)


def _details(state: SumsState) -> contracts.Details:
    phase = state.phase
    if isinstance(phase, Searching) or phase.held.found is None:
        return {}
    found = phase.held.found
    known: dict[str, tuple[tuple[str, ...], Array]] = {"skewness": (("rows",), skewness(found.points, found.weights))}
    if phase.held.trusted:
        known |= {
            "corrected_mean": (("rows",), found.mean),
            "corrected_covariance": (("rows", "columns"), found.covariance),
        }
    return known
