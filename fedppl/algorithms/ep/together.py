"""EP where all clients are in this process, of one density, and many: one search, with few of them first.

What is found is a state of EP as any other: sites of all clients, q, and a correction that is to be trusted, so that
results are read from it in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.algorithms.ep import _correction
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import starts as _starts
from fedppl.algorithms.ep._correction import Correcting
from fedppl.algorithms.ep._search import Ask, Fitted, Found, Search, begin, one_pass
from fedppl.algorithms.ep._state import EPInfo, EPState
from fedppl.algorithms.ep._together_corrected import corrected
from fedppl.algorithms.ep._verdict import far_off
from fedppl.algorithms.ep.correction import Correction
from fedppl.contracts import Report
from fedppl.contracts.many import ManyClients, Passed
from fedppl.local import many as _many
from fedppl.local.many import Way
from fedppl.numerics import mirrors
from fedppl.numerics.importance import normalise
from fedppl.numerics.reweighting import MOST_ERROR, Reweighted
from fedppl.types import Array, LocalFailure, Rng, Status

_GROWTH = 64  # times as many clients are asked next
_PASSES = 20  # over the same clients
_NAMED = 100_000  # clients of whom it is said who pulls further than chance would: each takes a cavity
_BEYOND = 3.0  # log units that an image of the mode has above q's own tail
_NEAR = 4.0  # log units for each coordinate that a mode of few clients may lie below that of as many more
_TAILS = 0.25  # log units of a posterior's integral that may be missing, by its skewness

Places = NDArray[np.int64]


def together(
    many: ManyClients, state: EPState, few: EPState, asked: int, rng: Rng, workers: int, *, correction: Correction
) -> Iterator[Passed]:
    """Passes over more and more clients, the last over all, from a q of some of them.

    `state` is what `init` gives for all; `few` has a q of clients that were `asked`, chosen at random, with the modes
    that they found. The `correction` is of the exchanges that follow where the posterior is far from q's form.
    """
    order = rng.permutation(len(many)).astype(np.int64)
    q, count = few.sites.q, asked
    way: Way | None = None
    some = _many.looked_at(many, order)
    found = _many.ways_for(many, some)
    while True:
        # What the integrals leave depends on where q is, and on how narrow.
        try:
            now = _many.chosen(many, found, order, q, count, workers)
            is_last = way is not None and count == len(many)
            if is_last or (way is None and count < len(many)):  # before long passes, and where q has arrived
                _many.require_one_mode_each(some, q)
        except LocalFailure as failure:
            yield Passed(count, _report(begin(q), Status.STALLED, str(failure)))
            return
        if way is not None and count == len(many) and _better(way, now) is way:
            break
        way = _better(way, now)
        count = min(_GROWTH * count, len(many))
        count = len(many) if 4 * count > len(many) else count
        places = np.sort(order[:count])
        ask = functools.partial(_many.factors, many, places, nodes=way.nodes, workers=workers)
        for at in _passes(many, begin(q), ask):
            if at.why:
                yield Passed(count, _report(at.search, Status.STALLED, at.why))
                return
            waiting = "the search has not arrived" if at.search.found is None else "what it found is not judged yet"
            yield Passed(count, _report(at.search, Status.RUNNING, waiting))
        assert at.search.found is not None
        # All clients' q is narrower; the moments of some are where it is looked for.
        try:
            q = gaussian.from_moments(at.search.found.mean, at.search.found.covariance)
        except ValueError:  # few of the points have all the weight
            yield Passed(count, _report(at.search, Status.STALLED, "points of q tell no moments of the posterior"))
            return
    way = way._replace(error=now.error, constant=now.constant)
    if way.error > MOST_ERROR:
        yield Passed(count, _report(at.search, Status.STALLED, _said(way)))
        return
    if several := _several(many, at.search, few, asked, way, workers):
        yield Passed(count, _report(at.search, Status.STALLED, several))
        return
    ended = _ended(state, at.search, at.sites(), many.like.has_proper_prior, way)
    if few.starts is not None:  # where the first clients' searches arrived: a fit that goes on from this one asks
        ended = ended._replace(starts=few.starts._replace(said=""))
    who = far_off(ended) if count <= _NAMED else ""
    if at.search.done:
        said = "; ".join(filter(None, (_said(way), who)))
        yield Passed(count, _report(at.search, Status.CONVERGED, said), ended, way.nodes)
        return
    for passed in corrected(many, ended, correction, way, workers):
        report = passed.report
        if passed.state is not None:
            report = report._replace(message="; ".join(filter(None, (report.message, who))))
        yield passed._replace(report=report, way=way.nodes)


def _several(many: ManyClients, search: Search, few: EPState, asked: int, way: Way, workers: int) -> str:
    """Say along which coordinate there may be another mode: at an image of this one, or at one of few clients."""
    found = search.found
    assert found is not None
    q, known_points = gaussian.from_moments(found.mean, found.covariance), (found.points, normalise(found.log_weights))
    prior, center, sd = many.like.prior, gaussian.mean(q), gaussian.standard_deviations(q)
    images = _starts.images(center, sd, gaussian.mean(prior.gaussian), _starts.turned(many.like.layout))
    known = [mode.point for mode in few.starts.modes] if few.starts is not None else []
    known = [point for point in known if _starts.far_apart(point, center, sd)]
    places = np.arange(len(many), dtype=np.int64)

    def log_density(points: Array) -> Array:
        none = np.zeros((0, len(points)))
        asked_for = _many.factors(many, places, points, center, none, nodes=way.nodes, workers=workers)
        return np.asarray(asked_for.totals + gaussian.log_kernel(prior.gaussian, points) + prior.log_ratio(points))

    if mirror := mirrors.unseen(log_density, center, sd, mirrors.signs(many.like.layout), known_points):
        labels = [many.like.layout.labels[k] for k in mirror[0]]
        return f"the posterior may have several modes: with the sign of {' and '.join(labels[:4])} changed"
    if not images and not known:
        return ""
    points = np.array([center, *images, *known])
    values = log_density(points)
    above, expected = values - values[0], gaussian.log_kernel(q, points)
    # The mode of all lies within some sds of that of few, which are wider.
    slack = np.repeat([0.0, _NEAR * len(center) * len(many) / asked], [1 + len(images), len(known)])
    beyond = (above + slack > np.log(_starts.MATTERS)) & (above > expected - expected[0] + _BEYOND)
    if not np.any(beyond):
        return ""
    worst = int(np.argmax(np.abs(points[int(np.argmax(beyond))] - center) / sd))
    return f"the posterior may have several modes along {many.like.layout.labels[worst]}"


def _better(one: Way | None, other: Way) -> Way:
    """The way with more nodes."""
    return other if one is None or len(other.nodes.nodes) > len(one.nodes.nodes) else one


class _At(NamedTuple):
    """Where a search is after a pass, sites there, and what ended it without a result."""

    search: Search
    sites: Callable[[], Fitted]
    why: str


def _passes(many: ManyClients, search: Search, ask: Ask) -> Iterator[_At]:
    """Passes until q has arrived, or is as near as a Gaussian comes: then there are moments."""
    prior = many.like.prior
    for number in range(_PASSES):
        search, sites, answers = one_pass(search, prior.gaussian, prior.log_ratio, ask)
        why = search.stuck
        if len(answers.failed):
            why = _many.of_failed(many, answers.failed, gaussian.mean(search.q))
        elif number == _PASSES - 1 and search.found is None:
            why = f"the search still moved by {search.change:.2g} posterior sds after {_PASSES} passes"
        yield _At(search, sites, why)
        if why or search.found is not None:
            return


def _said(way: Way) -> str:
    if way.error <= _many.BIASED:
        return ""
    return (
        f"integrals over clients' own variables may be off by as much as moves a mean or a log sd by {way.error:.2g} "
        "posterior sds"
    )


def _report(search: Search, status: Status, message: str) -> Report:
    found = search.found
    info = EPInfo("all clients at once", search.change, search.change_sd, 1.0, np.nan, np.nan, np.nan)
    if found is not None:
        info = info._replace(
            mc_error=found.error,
            skewness=float(np.abs(found.skewness).max()),
            correction_ess=found.ess,
            correction_pareto_k=found.pareto_k,
        )
    return Report(info, status, message)


def _ended(state: EPState, search: Search, fitted: Fitted, is_proper: bool, way: Way) -> EPState:
    """EP's state with these sites, moved alike so that q has the posterior's moments, and a correction that is done."""
    found = search.found
    assert found is not None
    sites = state.sites
    target = gaussian.from_moments(found.mean, found.covariance)
    linear, precision = fitted
    count = len(linear)
    linear = linear + (target.linear - sites.prior.linear - linear.sum(axis=0)) / count
    packed = _sites.in_structure(precision, sites.structure)
    whole = _sites.in_structure(target.precision - sites.prior.precision, sites.structure)
    packed = packed + (whole - packed.sum(axis=0)) / count
    sites = _sites.update(sites, linear, packed)
    return state._replace(
        sites=sites,
        warm_start=None,
        change=search.change,
        last_change=np.full_like(state.last_change, search.change),
        skewness=found.skewness,
        has_replied=np.ones_like(state.has_replied),
        correction=_done(search, found, sites, is_proper, way.constant),
    )


def _done(search: Search, found: Found, sites: _sites.Sites, is_proper: bool, unknown: float) -> Correcting:
    """A correction whose points are those that were found."""
    of_q = gaussian.log_kernel(sites.q, found.points) - gaussian.log_kernel(search.q, found.points)
    points, residual = found.points, found.log_weights - of_q
    posterior = Reweighted(
        points=points,
        weights=normalise(found.log_weights),
        of_q=normalise(of_q),
        scramble=found.scramble,
        mean=found.mean,
        covariance=found.covariance,
        log_ratio=gaussian.log_integral(search.q) + found.log_ratio - gaussian.log_integral(sites.q),
        error=found.error,
        # A polynomial tells little of a tail: of a skewed one some of the mass may be missing.
        log_ratio_error=max(found.remainder, _TAILS * float(np.abs(found.skewness).max())),
        ess=found.ess,
        pareto_k=found.pareto_k,
        second_k=-np.inf,
        told=len(points),
    )
    nothing = np.zeros(len(points))
    count = len(sites.where)
    return _correction.blank(count, len(found.mean), 0)._replace(
        exchanges=1,
        points=points,
        within=np.ones(len(points), dtype=bool),
        residual=residual,
        each=np.zeros((0, len(points))),
        alike=nothing,
        noise=nothing,
        errors=np.zeros((0, len(points))),
        constants=np.tile([unknown, 0.0], (count, 1)),
        answered=np.ones(count, dtype=bool),
        rounds=1,
        is_proper=is_proper,
        found=posterior,
        trusted=True,
    )
