"""Draws of θ given φ and a client's rows.

Where Laplace's approximation is nearly exact, the draw is one of four candidates from it, chosen by weights.
Elsewhere coordinates that are independent given φ are drawn each by its distribution function; so is one given which
the others are Gaussian. All else is drawn by Hamiltonian trajectories from a candidate, or, where the others are
Gaussian given two, from a draw by quadrature.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import softmax

from fedppl import gaussian
from fedppl.contracts import ClientView, Draws
from fedppl.local import _conditional, _marginal
from fedppl.local import tolerances as tol
from fedppl.local._conditional import Places, Quadrature, about_modes, at_nodes, centered, gaps_of
from fedppl.local.log_factors import factor, is_separable
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import unpack_target
from fedppl.numerics import importance, pairs
from fedppl.numerics import tolerances as common
from fedppl.numerics.importance import effective_size, normalise, resample
from fedppl.numerics.integral import Rule, by_grid, by_trapezoids, chunks
from fedppl.numerics.pairs import joined, site_outputs
from fedppl.numerics.proposals import log_density_of_t
from fedppl.types import Array, Message, Rng


def draw_given(client: ClientView, phi: Array, center: Array, rng: Rng) -> Array:
    """A draw of θ from p(θ | φ, y_k) for each row of phi (N, m): (N, d)."""
    d = client.local_size
    numbers = max(d * d, len(tol.DRAW_NODES) * (client.shared_size + d))
    order = np.lexsort(phi.T)  # equal rows together, for one search
    theta = np.zeros((len(phi), d))
    for chunk in chunks(len(phi) if d else 0, common.NUMBERS_AT_ONCE // numbers):
        some = order[chunk]
        theta[some] = _drawn(client, phi[some], center, rng)
    return theta


def _drawn(client: ClientView, phi: Array, center: Array, rng: Rng) -> Array:
    count, d = len(phi), client.local_size
    unique, where = np.unique(phi, axis=0, return_inverse=True)
    where = where.ravel()
    _, modes_there, factors_there = _marginal.near(client, unique, center)
    modes, factors = modes_there[where], factors_there[where]
    upper = np.swapaxes(factors, 1, 2)
    if client.view(_conditional.is_gaussian):
        return np.asarray(modes + np.linalg.solve(upper, rng.normal(size=(count, d, 1)))[..., 0])
    kept, kept_weight = np.zeros((count, d)), np.full(count, -np.inf)
    for _ in range(tol.CANDIDATE_ROUNDS):
        z, log_normal, log_mixture = _candidates(rng, count, d)
        theta = modes + np.linalg.solve(upper[None], z[..., None])[..., 0]
        values = _values(client, phi, theta)
        if _differs_by(values, log_normal, log_mixture) <= tol.RATIO_VARIANCE:
            return _one_of(theta[::2], values[::2] - log_normal[::2], rng)[0]
        if is_separable(client):
            return _one_by_one(client, phi, modes, np.diagonal(factors, axis1=1, axis2=2), rng)
        theta = np.concatenate([kept[None], theta])
        kept, kept_weight = _one_of(theta, np.concatenate([kept_weight[None], values - log_mixture]), rng)
    which = client.view(_conditional.conditioning)
    moved = np.ones(count, dtype=bool)
    if which is not None:
        by_quadrature, places = drawn(client, unique, where, modes_there, factors_there, which, rng)
        kept[places] = by_quadrature[places]
        moved[places] = len(which) > 1  # a draw by one coordinate's own density is exact
    if np.any(moved):
        kept[moved] = _moved_on(client, phi[moved], kept[moved], factors[moved], rng)
    return kept


def _one_of(theta: Array, log_weights: Array, rng: Rng) -> tuple[Array, Array]:
    """A candidate (C, N, d) for each draw by its weights (C, N), and its log weight: (N, d), (N,)."""
    chosen = np.argmax(log_weights + rng.gumbel(size=log_weights.shape), axis=0), np.arange(theta.shape[1])
    return theta[chosen], log_weights[chosen]


def _one_by_one(client: ClientView, phi: Array, modes: Array, scales: Array, rng: Rng) -> Array:
    """Draw each coordinate by itself: of a sum of functions of one each, one gradient has all slopes."""
    theta = modes + np.sinh(tol.DRAW_NODES)[:, None, None] / scales
    with np.errstate(all="ignore"):  # far out a slope may be NaN
        slopes = _outputs(client, phi, theta)[1] / scales * np.cosh(tol.DRAW_NODES)[:, None, None]
    drawn = draw_by_slopes(tol.DRAW_NODES, slopes, np.log(np.cosh(tol.DRAW_NODES)), rng)
    return np.asarray(modes + np.sinh(drawn) / scales)


def _moved_on(client: ClientView, phi: Array, theta: Array, factors: Array, rng: Rng) -> Array:
    """Hamiltonian trajectories from θ, in sds of Laplace's approximation."""
    upper = np.swapaxes(factors, 1, 2)

    def density(z: Array) -> tuple[Array, Array]:
        values, slopes = _outputs(client, phi, (theta + np.linalg.solve(upper, z[..., None])[..., 0])[None])
        return values[0], np.linalg.solve(factors, slopes[0][..., None])[..., 0]

    z = trajectories(density, np.zeros_like(theta), rng)
    return np.asarray(theta + np.linalg.solve(upper, z[..., None])[..., 0])


def _candidates(rng: Rng, count: int, d: int) -> tuple[Array, Array, Array]:
    """(candidates, N, d) in sds of Laplace's approximation, normal and every other of a t; and log densities (C, N).

    These are of a normal, and twice that of the mixture with the t.
    """
    z = rng.normal(size=(tol.CANDIDATES, count, d))
    reach = z[1::2]
    reach *= np.sqrt(common.DEGREES / rng.chisquare(common.DEGREES, size=(*reach.shape[:2], 1)))
    white = z.reshape(-1, d)
    log_normal = -0.5 * np.sum(white**2, axis=1) - 0.5 * d * np.log(2 * np.pi)
    log_mixture = np.logaddexp(log_normal, log_density_of_t(white, np.eye(d)))
    return z, log_normal.reshape(z.shape[:2]), np.asarray(log_mixture).reshape(z.shape[:2])


def _differs_by(values: Array, log_normal: Array, log_mixture: Array) -> float:
    """Variance over θ of the density's ratio to Laplace's, normalised at each φ, by candidates (C, N).

    It is that of a normal ratio with the same distance in total variation between the candidates' probabilities, which
    few candidates estimate well, also with one far out.
    """
    ours, normal = softmax(values - log_mixture, axis=0), softmax(log_normal - log_mixture, axis=0)
    return float(0.5 * np.pi * np.mean(np.abs(ours - normal).sum(axis=0) ** 2))


def _values(client: ClientView, phi: Array, theta: Array) -> Array:
    """log p(y, θ | φ) of candidates (C, N, d): (C, N)."""
    x = joined(phi, theta).reshape(-1, phi.shape[1] + theta.shape[2])
    values = pairs.values_at(client.view(_marginal.integrands), x, np.zeros(len(x), dtype=np.int64))
    return np.where(np.isfinite(values), values, -tol.NO_VALUE).reshape(theta.shape[:2])


def _outputs(client: ClientView, phi: Array, theta: Array) -> tuple[Array, Array]:
    """log p(y, θ | φ) of candidates (C, N, d), (C, N), and its slopes along θ, (C, N, d)."""
    x = joined(phi, theta)
    outputs = site_outputs(client.kernel, x.reshape(-1, x.shape[2]), client.packed).reshape(*theta.shape[:2], -1)
    return np.where(np.isfinite(outputs[..., 0]), outputs[..., 0], -tol.NO_VALUE), outputs[..., 1 + phi.shape[1] :]


# Draws of θ where all but one or two coordinates c are Gaussian given these, as effects are given their sd ------------

# Laplace's approximation may be in the neck of a funnel, where the mode is, and trajectories from there would stay. The
# density of c is that of the quadrature of `_conditional`: of one coordinate interpolated between its nodes, and of two
# spread between them, as a start for trajectories.


def drawn(
    client: ClientView, phi: Array, where: Places, modes: Array, factors: Array, which: Places, rng: Rng
) -> tuple[Array, Places]:
    """θ (N, d) for rows `where` of φ (U, m), with modes (U, d) and factors (U, d, d); and the rows with a draw.

    c by its density, the others given c: exact where c is one coordinate, else a start for trajectories.
    """
    d, theta = modes.shape[1], np.zeros((len(where), modes.shape[1]))
    rest, is_one = np.setdiff1d(np.arange(d), which), len(which) == 1
    about = about_modes(phi, modes, factors, which, rest)
    if is_one:
        about, terms, rule = _spread_out(client, about, which, rest)
    else:
        rule = by_grid(len(which), tol.FUNNEL_NODES)
        terms = _in_chunks(client, about, which, rest, rule)
    known = np.isfinite(terms.max(axis=1))
    rows: Places = np.flatnonzero(known[where])
    if not len(rows):
        return theta, rows
    whose = where[rows]
    if is_one:
        renumbered = np.cumsum(known) - 1
        u = draw_by_values(np.arcsinh(rule.nodes[:, 0]), terms[known].T, renumbered[whose], rng)
        z = np.sinh(u)[:, None]
    else:
        z = _between_nodes(terms[whose], rule, rng)
    at = Quadrature(*(part[whose] for part in about))
    at = at._replace(shift=at.shift + np.einsum("npq,nq->np", at.spread, z))
    middle = Rule(np.zeros((1, len(which))), np.zeros(1), np.zeros(1))  # one node, at the draw of c
    given = at_nodes(client.view(_marginal.densities), np.zeros(len(whose), dtype=np.int64), at, which, rest, middle)
    root, proper = pairs.cholesky(given.precision[:, 0])
    good = np.flatnonzero(np.isfinite(given.terms[:, 0]) & proper)
    theta[rows[good]] = given.theta[good, 0]
    away = pairs.solve_upper(root[good], rng.normal(size=(len(good), len(rest))))
    theta[np.ix_(rows[good], rest)] += away
    return theta, rows[good]


def _spread_out(client: ClientView, about: Quadrature, which: Places, rest: Places) -> tuple[Quadrature, Array, Rule]:
    """Log terms (U, L) of the integral at nodes that reach as far as there is mass."""
    for far in tol.REACHES:
        rule = by_trapezoids(far)
        moved = about._replace(shift=about.shift.copy(), spread=about.spread.copy())
        terms = _in_chunks(client, moved, which, rest, rule)
        ends = np.maximum(terms[:, 0], terms[:, -1])
        if not np.any(ends > np.max(terms, axis=1) + tol.OUTSIDE):
            break
    return moved, terms, rule


def _in_chunks(client: ClientView, about: Quadrature, which: Places, rest: Places, rule: Rule) -> Array:
    """As `centered`, which moves the nodes, in parts that fit in memory."""
    (count, m), d = about.phi.shape, about.modes.shape[1]
    some = chunks(count, common.NUMBERS_AT_ONCE // (len(rule.nodes) * d * (m + d)))
    parts = [Quadrature(*(values[chunk] for values in about)) for chunk in some]
    return np.concatenate([centered(client, part, which, rest, rule) for part in parts])


def _between_nodes(terms: Array, rule: Rule, rng: Rng) -> Array:
    """z (N, q) about nodes that are drawn by their terms of the integral, with the nodes' variance."""
    chosen = np.argmax(terms + rng.gumbel(size=terms.shape), axis=1)
    gaps = np.stack([gaps_of(column) for column in rule.nodes.T], axis=1)
    added = softmax(rule.log_weights) @ gaps**2 / 12.0
    jitter = gaps[chosen] * rng.uniform(-0.5, 0.5, size=(len(terms), gaps.shape[1]))
    return np.asarray(np.sqrt(1.0 - added) * rule.nodes[chosen] + jitter)


# Hamiltonian trajectories of many points at once, each of its own density near a standard normal ----------------------


def trajectories(density: Callable[[Array], tuple[Array, Array]], z: Array, rng: Rng) -> Array:
    """Move points z (N, d) so that each is a draw of its density: log densities (N,) and slopes (N, d).

    Steps have random lengths, for regions that are narrower than the middle. Points without a density are rejected.
    """
    d = z.shape[1]
    value, slope = density(z)
    for _ in range(tol.TRAJECTORIES):
        step = rng.uniform(tol.SHORTEST, tol.LONGEST, size=(len(z), 1)) / d**0.25
        momentum = rng.normal(size=z.shape)
        there, there_value, there_slope, speed = z, value, slope, momentum
        with np.errstate(all="ignore"):  # of points that are rejected below
            for _ in range(tol.TRAJECTORY_STEPS):
                speed = speed + 0.5 * step * there_slope
                there = there + step * speed
                there_value, there_slope = density(there)
                speed = speed + 0.5 * step * there_slope
            gained = there_value - value + 0.5 * np.sum(momentum**2 - speed**2, axis=1)
            accepted = np.isfinite(gained) & np.all(np.isfinite(there_slope), axis=1)
            accepted &= np.log(rng.uniform(size=len(z))) < gained
        value = np.where(accepted, there_value, value)
        z, slope = (np.where(accepted[:, None], *both) for both in ((there, z), (there_slope, slope)))
    return z


# Draws of many densities of one variable each, by distribution functions from slopes or values at nodes ---------------


def draw_by_slopes(nodes: Array, slopes: Array, extra: Array, rng: Rng) -> Array:
    """Draw u with log density L(u) + extra(u), given equally spaced nodes (n,) and dL/du there (n, ...): (...).

    There is no density at and beyond nodes without a slope. The middle node has one.
    """
    step, middle = nodes[1] - nodes[0], len(nodes) // 2
    logs = np.zeros_like(slopes)
    with np.errstate(invalid="ignore", over="ignore"):
        grown = _between(slopes, step)
        logs[middle + 1 :] = np.cumsum(grown[middle:], axis=0)
        logs[:middle] = -np.cumsum(grown[:middle][::-1], axis=0)[::-1]
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    logs = np.maximum(logs - logs.max(axis=0), tol.LEAST_LOG)
    places = np.linspace(nodes[0], nodes[-1], tol.PARTS * (len(nodes) - 1) + 1)
    added = np.interp(places, nodes, extra).reshape(-1, *(1,) * (logs.ndim - 1))
    below = _below(_interpolated(logs, slopes * step) + added)
    return _drawn_from(places, below, rng.uniform(size=below.shape[1:]))


def draw_by_values(nodes: Array, logs: Array, which: Places, rng: Rng) -> Array:
    """Draw u of each of the densities `which` (N,), whose logarithms at equally spaced nodes (n,) are logs (n, U).

    Each of these has a largest value; −inf is no density.
    """
    logs = np.maximum(logs - logs.max(axis=0), tol.LEAST_LOG)
    rises = np.gradient(logs, axis=0)
    rises[2:-2] = (8.0 * (logs[3:-1] - logs[1:-3]) - (logs[4:] - logs[:-4])) / 12.0
    places = np.linspace(nodes[0], nodes[-1], tol.PARTS * (len(nodes) - 1) + 1)
    below = _below(_interpolated(logs, rises))
    return _drawn_from(places, below[:, which], rng.uniform(size=len(which)))


def _below(logs: Array) -> Array:
    """Mass of each density (G, ...) below each place."""
    density, below = np.exp(logs), np.zeros_like(logs)
    np.cumsum(0.5 * (density[1:] + density[:-1]), axis=0, out=below[1:])
    return below


def _drawn_from(places: Array, below: Array, uniform: Array) -> Array:
    wanted = uniform * below[-1]
    at = np.clip((below <= wanted).sum(axis=0) - 1, 0, len(places) - 2)[None]
    low, high = np.take_along_axis(below, at, axis=0)[0], np.take_along_axis(below, at + 1, axis=0)[0]
    share = (wanted - low) / np.maximum(high - low, common.TINY)
    return np.asarray(places[at[0]] + share * (places[1] - places[0]))


def _between(slopes: Array, step: float) -> Array:
    """Integrals between nodes, by the cubic through four of them; by trapezoids where that is far from these."""
    trapezoids = 0.5 * step * (slopes[1:] + slopes[:-1])
    integrals = trapezoids.copy()
    inner = step / 24.0 * (13.0 * (slopes[1:-2] + slopes[2:-1]) - slopes[:-3] - slopes[3:])
    integrals[1:-1] = np.where(np.abs(inner - trapezoids[1:-1]) < tol.ROUGH, inner, trapezoids[1:-1])
    return integrals


def _interpolated(logs: Array, rises: Array) -> Array:
    """Log densities at nodes and between them by cubics with their slopes, clipped so that these are monotone."""
    change = np.diff(logs, axis=0)
    steepest = 3.0 * np.abs(change) + tol.ROUGH  # three times the change: Fritsch and Carlson (1980)
    start, end = (np.clip(np.nan_to_num(one), -steepest, steepest) for one in (rises[:-1], rises[1:]))
    values = np.empty((tol.PARTS * len(change) + 1, *logs.shape[1:]))
    for part in range(tol.PARTS):
        s = part / tol.PARTS
        cubic = s * (1 - s) ** 2 * start + s**2 * (s - 1) * end
        values[part : -1 : tol.PARTS] = logs[:-1] + s**2 * (3 - 2 * s) * change + cubic
    values[-1] = logs[-1]
    return values


# Draws at a client from points of the posterior ----------------------------------------------------------------------


def draw_weighted(client: ClientView, personal: object, message: Message, draws: int, chains: int, rng: Rng) -> Draws:
    """Draws of (φ, θ_k) from weighted points of φ; with few points where a newcomer's data are, from q."""
    points, weights = (np.asarray(message[name], dtype=float) for name in ("points", "weights"))
    target, diagnostics = unpack_target(client, message), {}
    center = gaussian.mean(target.global_)
    if float(message["joins"]):  # a client whose data are not in the weights
        values = factor(client, points, center, 0.0).values
        log_weights = np.where(np.isfinite(values), np.log(weights) + values, -np.inf)
        diagnostics = {"pareto_k": importance.pareto_k(log_weights)}
        weights = normalise(log_weights) if np.any(np.isfinite(log_weights)) else np.zeros(0)
        if not len(weights) or effective_size(weights) < common.FEWEST:  # few points where its data are
            from_q = NestedLaplace().draw(target, draws, chains, rng)
            return from_q._replace(diagnostics={**from_q.diagnostics, "from_q": 1.0})
    phi = points[resample(weights, draws * chains, rng)]
    theta = draw_given(client, phi, center, rng)
    diagnostics |= {"ess": effective_size(weights), "unique": float(len(np.unique(phi, axis=0)))}
    return Draws(phi.reshape(chains, draws, -1), theta.reshape(chains, draws, -1), diagnostics)
