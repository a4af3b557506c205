"""The search for the mode by sums of log f_k: derivatives are differences of values at a stencil about a point.

So there is one kind of exchange. Steps are those of EP's warm start, of which all clients together are one client.
Where exchanges are few, clients' own posteriors take the place of a search: one exchange of Gaussians.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep.sites import Sites
from fedppl.algorithms.ep.warm_start import ALL, Mode, Starts, WarmStart, why_not_arrived
from fedppl.contracts import ClientView, Expansion
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import own_posterior
from fedppl.numerics.streams import whitened_points
from fedppl.structure import full
from fedppl.types import Array, Layout, Message


class Search(NamedTuple):
    """Where the search is, and those that are still to begin from elsewhere."""

    sites: Sites  # of one client, which is all of them
    newton: WarmStart
    starts: Starts | None
    scan: Scan | None  # until the first of several searches has arrived
    some: float  # part of the clients that is asked
    narrowed: float = 1.0  # of the stencil's width, where values were missing
    grown: bool = False  # whether fewer clients have arrived before
    exact: bool = False  # whether θ is integrated


class Scan(NamedTuple):
    """Points of the prior that are looked at first, for where searches begin."""

    points: Array  # (N, m)
    heights: Array | None = None  # (N,) log posterior there; None before


class Searched(NamedTuple):
    """The outcome of an exchange of a search."""

    search: Search
    message: str = ""
    arrived: bool = False
    stuck: str = ""


def begin(layout: Layout, clients: int, starts: int, stream: int) -> Search:
    """From the prior's mean; with very many clients some of them are asked first."""
    some = 1.0 if clients <= tol.ALL_AT_FIRST * tol.FIRST_CLIENTS else tol.FIRST_CLIENTS / clients
    sites = _sites.empty(layout, (ALL,), full(layout.size))
    others, scan = None, None
    if starts > 1:
        others = _warm_start.begin_several(layout, starts, stream, asked_for=True)
        # A part of them is further out: where other modes are, the posterior is high in their basins.
        z = whitened_points(layout.size, tol.SCANNED, stream)[: tol.SCANNED]
        reach = tol.SCANNED_REACH[np.arange(len(z)) % len(tol.SCANNED_REACH)]
        scan = Scan(gaussian.mean(layout.prior) + z * reach[:, None] * gaussian.standard_deviations(layout.prior))
    return Search(sites, _warm_start.start(layout, 1), others, scan, some)


def begin_at(search: Search, point: Array) -> Search:
    """From a point, with all clients and without others to begin from."""
    newton = _warm_start.start_at(point, gaussian.mean(search.sites.prior), 1)
    return search._replace(newton=newton, starts=None, scan=None, some=1.0)


def steps(search: Search) -> Array:
    """Steps, columns (m, m), along which values are differenced: principal axes of the curvature so far.

    Along coordinates differences are off by what a third derivative adds across a ridge, which is more than the
    curvature along it.
    """
    root = np.linalg.inv(np.linalg.cholesky(search.sites.prior.precision))
    values, vectors = np.linalg.eigh(root @ search.sites.q.precision @ root.T)
    width = tol.STENCIL_OF_MANY if search.exact else tol.STENCIL_WIDTH
    lengths = search.narrowed * np.minimum(tol.STENCIL_WIDTH, width / np.sqrt(np.maximum(np.abs(values), 1.0)))
    return np.asarray(root.T @ vectors * lengths)


def stencil(size: int) -> Array:
    """Points, in steps, that determine a quadratic: (1 + 2 m + m (m − 1) / 2, m)."""
    unit = np.eye(size)
    both = [unit[i] + unit[j] for i, j in itertools.combinations(range(size), 2)]
    return np.concatenate([np.zeros((1, size)), unit, -unit, np.reshape(both, (-1, size))])


def points(search: Search) -> Array:
    """The stencil about the point, and points along the step that led there; before all, those that are scanned."""
    if search.scan is not None and search.scan.heights is None:
        return search.scan.points
    at, move = search.newton.trial.point, search.newton.trial.move
    about = at + stencil(len(at)) @ steps(search).T
    return np.concatenate([about, _warm_start.along(at, move)[_looked_at(search)]]) if np.any(move) else about


def integrated(search: Search) -> NDArray[np.intp]:
    """Places of points at which θ is integrated: of many clients residuals of Laplace's approximation move the mode."""
    return np.arange(len(points(search)) if search.exact else 0)


def _looked_at(search: Search) -> Array:
    """Which lengths of the last step are."""
    return np.asarray(tol.LENGTHS <= _warm_start.reach(search.sites.prior, search.newton))


def step(search: Search, values: Array, clients: float) -> Searched:
    """Take in values (S,) of Σ_k log f_k at the points, NaN where a client has none: the next point, or the end.

    They are of so many clients, by what a part of them says.
    """
    scan, trial = search.scan, search.newton.trial
    if scan is not None and scan.heights is None:
        heights = np.nan_to_num(values + gaussian.log_kernel(search.sites.prior, scan.points), nan=-np.inf)
        return Searched(search._replace(scan=Scan(scan.points, heights)), "the prior was looked through")
    count = len(stencil(len(trial.point)))
    about, ray = values[:count], np.full(len(tol.LENGTHS), tol.NO_VALUE)
    if np.any(trial.move):
        ray[_looked_at(search)] = np.where(np.isfinite(values[count:]), values[count:], tol.NO_VALUE)
    if np.isfinite(about[0]) and not np.all(np.isfinite(about)) and search.narrowed > tol.NARROWER**tol.NARROWINGS:
        return Searched(search._replace(narrowed=tol.NARROWER * search.narrowed), "values are missing nearby")
    reply = _reply(about, steps(search), ray)
    sites, newton, _ = _warm_start.step(search.sites, search.newton, {ALL: reply})
    # Of many clients third derivatives weigh little next to second ones: from the mode of fewer so long a step is right
    # to less than an sd, and need not be looked along.
    if search.grown:
        arrived = newton.arrived or (newton.trial.whole and newton.trial.change < clients**0.25)
        newton = _stayed(newton)._replace(arrived=arrived)
    after = search._replace(sites=sites, newton=newton, narrowed=1.0)
    if not newton.arrived and newton.heard.spent < tol.SEARCH_BUDGET and not _is_known(after):
        return Searched(after, why_not_arrived(sites, newton, "the search"))
    return _ended(after)


def _ended(search: Search) -> Searched:
    """The next search, or the same with more clients, or the best mode of all."""
    sites, newton, starts = search.sites, search.newton, search.starts
    if starts is not None and (newton.arrived or starts.modes):
        mode = _warm_start.arrived_at(sites, newton) if newton.arrived else None
        if mode is not None and search.scan is not None:
            starts = starts._replace(left=_highest(search.scan, sites.prior, mode, len(starts.left)))
        starts, sites, following = _warm_start.next_search(starts, sites, mode)
        if following is not None:
            left = f"{len(starts.left) + 1} searches are left"
            return Searched(search._replace(sites=sites, newton=following, starts=starts, scan=None), left)
        if starts.said:
            return Searched(search._replace(sites=sites, starts=starts), stuck=starts.said)
    elif not newton.arrived:
        return Searched(search, stuck=why_not_arrived(sites, newton, "the search"))
    after = search._replace(sites=sites, starts=None, scan=None)
    if search.some < 1.0 and not search.exact:  # once more, with what Laplace leaves out
        return Searched(_from_here(after)._replace(exact=True), "θ is integrated")
    if search.some < 1.0:
        some = min(1.0, tol.CLIENT_GROWTH * search.some)
        again = _from_here(after)._replace(some=1.0 if some > tol.ALL_NEXT else some, grown=True)
        return Searched(again, "more clients are asked")
    return Searched(after, arrived=True)


def _from_here(search: Search) -> Search:
    """A search from the mode, with nothing said of the way there."""
    return search._replace(newton=_stayed(begin_at(search, gaussian.mean(search.sites.q)).newton))


def _stayed(newton: WarmStart) -> WarmStart:
    """The same point, without the step that led there."""
    trial = newton.trial
    return newton._replace(trial=trial._replace(move=np.zeros_like(trial.move)), anchor=trial.point)


def _highest(scan: Scan, prior: Gaussian, mode: Mode, count: int) -> Array:
    """The highest of the points that were scanned, apart from a mode and from each other."""
    assert scan.heights is not None
    away = tol.BASIN * gaussian.standard_deviations(prior)
    chosen: list[Array] = []
    for point in scan.points[np.argsort(-scan.heights, kind="stable")]:
        near = any(np.all(np.abs(point - other) < away) for other in chosen)
        if not near and _warm_start.far_apart(point, mode.point, mode.sd):
            chosen.append(point)
        if len(chosen) == count:
            break
    return np.reshape(chosen, (-1, len(away)))


def _is_known(search: Search) -> bool:
    """Whether a search walks into the way of one that arrived: it is within an sd of its mode."""
    modes = () if search.starts is None else search.starts.modes
    near = any(not _warm_start.far_apart(search.newton.anchor, mode.point, mode.sd / tol.WITHIN) for mode in modes)
    return near and bool(np.isfinite(search.newton.objective))


def _reply(about: Array, along: Array, ray: Array) -> Message:
    """Value, gradient and Hessian from values at the stencil of these steps (m, m)."""
    m = len(along)
    if not np.all(np.isfinite(about)):
        return _warm_start.reply_of(_warm_start.no_expansion(m), ray)
    middle, high, low = about[0], about[1 : 1 + m], about[1 + m : 1 + 2 * m]
    hessian = np.diag(high - 2.0 * middle + low)
    for n, (i, j) in enumerate(itertools.combinations(range(m), 2)):
        hessian[i, j] = hessian[j, i] = about[1 + 2 * m + n] - high[i] - high[j] + middle
    inverse = np.linalg.inv(along)
    whole = inverse.T @ hessian @ inverse
    slopes = inverse.T @ (0.5 * (high - low))
    return _warm_start.reply_of(Expansion(middle, slopes, 0.5 * (whole + whole.T), {}), ray)


# In place of a search: what each client's rows say alone, as a Gaussian divided by the prior -------------------------


def alone(client: ClientView, prior_share: float) -> Array:
    """Linear part and packed precision of a client's own posterior divided by the prior, in prior sds; 0 without one.

    It lies about the client's own mode: an expansion at a common point would say little of other places. By moments,
    since at modes each client would say that a spread between clients is all but 0.
    """
    prior, m = client.prior.gaussian, client.shared_size
    own = own_posterior(client, prior_share)
    if own is None:
        return np.zeros(m + m * (m + 1) // 2)
    mean, root = gaussian.affine(prior)
    precision = root.T @ np.linalg.inv(own[1]) @ root
    return np.concatenate(
        [precision @ np.linalg.solve(root, own[0] - mean), gaussian.pack_triangle(precision - np.eye(m))]
    )


def together(prior: Gaussian, total: Array) -> Gaussian:
    """The prior times what all clients' rows say alone, from the sum of `alone`."""
    m = len(prior.linear)
    mean, root = gaussian.affine(prior)
    values, axes = np.linalg.eigh(np.eye(m) + gaussian.unpack_triangle(total[m:]))
    values = np.maximum(values, tol.LEAST_OF_SUM)
    inverse = np.linalg.inv(root)
    precision = inverse.T @ (axes * values) @ axes.T @ inverse
    return Gaussian(inverse.T @ total[:m] + precision @ mean, 0.5 * (precision + precision.T))
