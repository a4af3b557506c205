"""A client's factor f_k(φ), with θ marginalised by Laplace's approximation: values, expansions, moments under q."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.contracts import ClientView, Expansion, Moments, Target
from fedppl.local import tolerances as tol
from fedppl.local.target import local_mode
from fedppl.numerics import importance, pairs
from fedppl.numerics.integral import Rule, by_grid, by_points, chunks
from fedppl.numerics.pairs import Densities, Laplace, Origins, joined, site_outputs
from fedppl.numerics.streams import stream_of, whitened_points
from fedppl.types import Array, LocalFailure


def densities(client: ClientView) -> Densities:
    """The client's density, as a stack of one."""
    return pairs.one(client.kernel, client.shared_size, client.packed)


def integrands(client: ClientView) -> Densities:
    """The same, for integrals: with the kernel that computes no gradient."""
    return client.view(densities)._replace(value=client.value_kernel)


def log_densities(client: ClientView, phi: Array, theta: Array) -> Array:
    """log p(y_k, θ | φ) at rows of θ (S, d), with one φ (m,) for all or one for each, (S, m): (S,)."""
    return site_outputs(client.kernel, joined(phi, theta), client.packed)[:, 0]


def start(client: ClientView) -> Array:
    """Start of inner searches: the mode of θ at the prior mean of φ.

    It depends on the client's model and data alone, not on earlier rounds, so that clients stay stateless.
    """
    arrived, mode = local_mode(client, gaussian.mean(client.prior.gaussian))
    return mode if arrived else np.asarray(client.initial, dtype=float)


def near(client: ClientView, points: Array, center: Array) -> Laplace:
    """Laplace's log f_k at points (S, m), NaN where there is no mode, by way of the mode at a center (m,).

    Raises `LocalFailure` where there is no mode at the center.
    """
    origin, one = _origin(client, center), np.zeros(1, dtype=np.int64)
    points = np.ascontiguousarray(points)
    return pairs.laplace_at(client.view(densities), origin, one, one, points, np.arange(len(points)))[1]


def _origin(client: ClientView, center: Array) -> Origins:
    one = np.zeros(1, dtype=np.int64)
    at = pairs.origins(client.view(densities), center, client.view(start)[None], one)
    if client.local_size and not at.modes.arrived[0]:
        raise LocalFailure(no_mode(client, center))
    return at


def values(client: ClientView, points: Array, center: Array, prior_share: float) -> Array:
    """log f_k (and its share of a non-Gaussian prior) at points (S, m), (S,); −inf where there is no mode."""
    logs = near(client, points, center).values
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    if not prior_share:
        return logs
    with np.errstate(invalid="ignore"):  # where the prior has no density
        return np.asarray(logs + prior_share * client.prior.log_ratio(points))


def log_factor(client: ClientView, points: Array, prior_share: float) -> Array:
    """The same by way of the first point; −inf everywhere where there is no mode."""
    try:
        return values(client, points, points[0], prior_share)
    except LocalFailure:
        return np.full(len(points), -np.inf)


def gradients(client: ClientView, points: Array, center: Array, prior_share: float) -> tuple[Array, Array]:
    """log f_k (and its share of a non-Gaussian prior) and its gradients at points (S, m), (S,) and (S, m)."""
    of, origin = client.view(densities), _origin(client, center)
    logs, slopes = np.zeros(len(points)), np.zeros_like(points)
    for some in chunks(len(points), pairs.at_once(client.local_size, client.shared_size)):
        at, who = points[some], np.zeros(len(points[some]), dtype=np.int64)
        about = pairs.laplace(of, origin, who, who, at)
        logs[some], slopes[some] = about.values, pairs.gradients(of, at, about.theta, who, origin.modes.scale[who])
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    if prior_share:
        logs = logs + prior_share * client.prior.log_ratio(points)
        slopes = slopes + prior_share * client.prior.log_ratio_gradients(points)
    return logs, slopes


def expand(client: ClientView, point: Array, prior_share: float) -> Expansion:
    """Quadratic expansion of log f_k (and of its share of a non-Gaussian prior) at a point."""
    one, begin = np.zeros(1, dtype=np.int64), client.view(start)[None]
    widths = np.minimum(gaussian.standard_deviations(client.prior.gaussian), tol.NEAR_SDS)
    stack = pairs.expansions(client.view(densities), point, begin, one, widths)
    value, gradient, hessian = float(stack.values[0]), stack.gradients[0], stack.hessians[0]
    if not (np.isfinite(value) and np.all(np.isfinite(hessian))):
        raise LocalFailure(no_mode(client, point))
    if prior_share and not client.prior.is_gaussian:
        value += prior_share * float(client.prior.log_ratio(point[None])[0])
        gradient = gradient + prior_share * client.prior.log_ratio_gradient(point)
        hessian = hessian + prior_share * client.prior.log_ratio_hessian(point)
    return Expansion(value, gradient, hessian, {})


class Integrals(NamedTuple):
    """Integrals over θ by nodes about its mode, at points; NaN where there is no mode."""

    values: Array  # (S,) log f_k
    laplace: Array  # (S,) by Laplace's approximation
    relative: Array  # (S,) effective share of the nodes
    shares: Array  # (S, G) of the integral, of each group of nodes


def integrals(client: ClientView, points: Array, center: Array, rule: Rule) -> Integrals:
    """log f_k by a rule, at points (S, m), by way of the mode at a center (m,)."""
    about = near(client, points, center)
    of_group = (rule.group[:, None] == np.arange(int(rule.group.max()) + 1)).astype(float)

    def shared(terms: Array) -> Array:
        total = logsumexp(terms, axis=1, keepdims=True)
        parts = np.exp(terms - total)
        effective = 1.0 / np.sum(parts**2, axis=1, keepdims=True)
        return np.concatenate([total, effective / len(rule.nodes), parts @ of_group], axis=1)

    who = np.zeros(len(points), dtype=np.int64)
    columns = pairs.by_nodes(client.view(integrands), about, points, who, rule, shared)
    known = np.isfinite(columns[:, :1])
    values, relative, shares = np.where(known, columns[:, 0:1], np.nan), columns[:, 1], columns[:, 2:]
    return Integrals(values[:, 0], about.values, np.where(known[:, 0], relative, 0.0), np.where(known, shares, 0.0))


def difference(client: ClientView, points: Array, center: Array) -> tuple[Array, float] | None:
    """The error of Laplace over θ in log f_k at points (S, m), and trust in it; None where it is unknown."""
    size = client.local_size
    if size in tol.SIZES:
        rule = by_grid(size, tol.SIZES[size])
    else:
        rule = by_points(size, tol.NODES_BEYOND_GRIDS, stream_of(client.client_id))
    try:
        values, laplace, relative, shares = integrals(client, points, center, rule)
    except LocalFailure:
        return None
    return trusted(values - laplace, relative, shares, size)


def trusted(delta: Array, relative: Array, shares: Array, size: int) -> tuple[Array, float] | None:
    """Δ at points (S,) by a rule's integrals, and trust in it, without jumps; None where a value is unknown."""
    if not np.all(np.isfinite(delta)):
        return None
    if size in tol.SIZES:  # beyond the outermost nodes there may be as much as at them
        return delta, float(np.interp(shares[:, 1].max(), [tol.LITTLE_OUTSIDE, tol.MOST_OUTSIDE], [1.0, 0.0]))
    least = relative.min()
    return None if least < tol.NOTHING else (delta, float(np.interp(least, [tol.NOTHING, tol.ALL], [0.0, 1.0])))


# The error Δ of Laplace's approximation over θ in log f_k, as a quadratic in φ ----------------------------------------

# Δ(φ) = log ∫ p(y_k, θ | φ) dθ − log f_k by Laplace. The integral is adaptive: Gauss-Hermite nodes around the mode of
# θ, in units of the curvature there, up to three coordinates, and quasi-random points with importance weights beyond.
# The same nodes serve all φ, so that their error is smooth in φ and mostly a constant, which changes no moment. Random
# points are mostly of a client's own, so that errors of clients do not add up.


class LeftOut(NamedTuple):
    """Δ about q, weighted by the trust in it."""

    difference: Callable[[Array], Array] | None  # a quadratic, in points (S, m); None where Δ is zero, or unknown
    trust: float  # from 0, unknown, to 1


def left_out(
    difference: Callable[[Array], tuple[Array, float] | None], mean: Array, root: Array, stream: int
) -> LeftOut:
    """Δ about q = N(mean, root rootᵀ), up to a constant, from its values at points (S, m) and the trust in them."""
    m = len(mean)
    z = whitened_points(m, 2 * (m + 1), stream)
    known = difference(mean + z @ root.T)
    if known is None:
        return LeftOut(None, 0.0)
    delta, trust = known
    linear, curved = delta @ z / len(z), np.zeros((m, m))  # of antithetic points: even terms cancel
    half = len(z) // 2
    even = float(np.std((delta[:half] + delta[half:]) / 2))
    if max(float(np.linalg.norm(linear)), even) < tol.NO_ERROR:
        return LeftOut(None, 1.0)
    if m <= tol.QUADRATIC and max(float(np.linalg.norm(linear)), even) > tol.CURVED:
        z = whitened_points(m, (m + 1) * (m + 2), stream)
        again = difference(mean + z @ root.T)
        if again is not None:
            terms = importance.quadratic_terms(z)
            coefficients = np.asarray(np.linalg.lstsq(terms, again[0], rcond=None)[0], dtype=float)
            linear, curved[np.triu_indices(m)] = coefficients[1 : 1 + m], coefficients[1 + m :]
            trust = min(trust, again[1])
    inverse = np.linalg.inv(root)

    def quadratic(phi: Array) -> Array:
        white = (phi - mean) @ inverse.T
        return np.asarray(trust * (white @ linear + np.sum((white @ curved) * white, axis=1)))

    return LeftOut(quadratic, trust)


# Moments of the tilted distribution by importance sampling from the global q, or one near it -------------------------

# Where q and the client's site are right already, the log weights are constant and the moments of q have no error.


class Factor(NamedTuple):
    """Log weights of a client's factor against its site in q, at points (S, m)."""

    values: Callable[[Array], Array]  # (S,)
    gradients: Callable[[Array], tuple[Array, Array]]  # (S,) and (S, m)


def moments(factor: Factor, mean: Array, root: Array, points: int, stream: int) -> Moments | None:
    """Moments under q = N(mean, root rootᵀ) times the weights; None where no weight is finite."""
    if importance.has_enough_points(len(mean)):
        return _from_values(factor, mean, root, points, stream)
    return _from_gradients(factor, mean, root, points, stream)


def has_trusted_weights(moments: Moments, limit: float) -> bool:
    """Whether weights have enough effective points, and a small Pareto k unless they hardly vary."""
    relative = moments.diagnostics["relative_ess"]
    return relative > tol.LEAST_RELATIVE and (moments.diagnostics["pareto_k"] <= limit or relative > tol.FULL_RELATIVE)


def _from_values(factor: Factor, mean: Array, root: Array, points: int, stream: int) -> Moments | None:
    for multiple, largest in tol.REMAINDERS:
        key = (len(mean), multiple * importance.enough_points(len(mean), points), stream)
        z = whitened_points(*key)
        log_weights = factor.values(mean + z @ root.T)
        if not np.any(np.isfinite(log_weights)):
            return None
        weights = importance.normalise(log_weights)
        white, remainder, error = importance.controlled_moments(z, log_weights, weights, key)
        if remainder <= largest:
            break
    quality = {
        "ess": importance.effective_size(weights),
        "relative_ess": importance.effective_size(weights) / len(z),
        "pareto_k": importance.pareto_k(log_weights),
        "remainder": remainder,
        "mc_error": error,
        "departure": importance.departure(z, log_weights, key, root),
        "mode_failures": float(np.sum(~np.isfinite(log_weights))),
    }
    return _coloured(white.mean, white.covariance, mean, root, importance.skewness(mean + z @ root.T, weights), quality)


def _from_gradients(factor: Factor, mean: Array, root: Array, points: int, stream: int) -> Moments | None:
    fitted = None
    for multiple, largest in tol.GRADIENT_REMAINDERS:
        z = whitened_points(len(mean), multiple * importance.enough_gradients(len(mean), points), stream)
        log_weights, gradients = factor.gradients(mean + z @ root.T)
        if not np.all(np.isfinite(log_weights)) or not np.all(np.isfinite(gradients)):
            return None
        fitted = importance.stein_moments(z, log_weights, gradients @ root)
        if fitted is None or fitted.remainder <= largest:
            break
    if fitted is None:
        return None
    relative = float(np.exp(-(fitted.remainder**2)))  # of log-normal weights
    quality = {
        "ess": relative * len(z),
        "relative_ess": relative,
        "pareto_k": fitted.pareto_k,
        "remainder": fitted.remainder,
        "mc_error": fitted.error,
        "departure": importance.departure_by_gradients(fitted.off, root),
        "mode_failures": 0.0,
    }
    skewed = importance.skewness_by_gradients(z, fitted.off, root)
    return _coloured(fitted.moments.mean, fitted.moments.covariance, mean, root, skewed, quality)


def _coloured(
    mean: Array, covariance: Array, center: Array, root: Array, skewed: Array, quality: dict[str, float]
) -> Moments:
    """Moments of z as those of center + root z."""
    inverse = np.linalg.inv(root)
    try:
        precision = inverse.T @ np.linalg.inv(covariance) @ inverse
    except np.linalg.LinAlgError:  # one point has all the weight, and `relative_ess` is too small
        precision = np.zeros_like(root)
    coloured = root @ covariance @ root.T
    return Moments(center + root @ mean, (coloured + coloured.T) / 2, (precision + precision.T) / 2, skewed, quality)


def against_site(target: Target, mean: Array, difference: Callable[[Array], Array] | None) -> Factor:
    """Log weights under q, from expansions at its mean; `difference` is the known error of Laplace's approximation."""
    client, global_, cavity, share = target
    site = gaussian.quotient(global_, cavity)

    def log_weights(draws: Array) -> Array:
        logs = values(client, draws, mean, share) - gaussian.log_kernel(site, draws)
        return logs if difference is None else logs + difference(draws)

    def with_slopes(draws: Array) -> tuple[Array, Array]:
        logs, slopes = gradients(client, draws, mean, share)
        return logs - gaussian.log_kernel(site, draws), slopes - site.linear + draws @ site.precision

    return Factor(log_weights, with_slopes)


def departure_of(target: Target) -> dict[str, float]:
    """How far the factor departs from a Gaussian, for inferences that draw: their draws are too few to estimate it."""
    if target.client.kink or not gaussian.is_proper(target.global_):
        return {}
    mean, root = gaussian.affine(target.global_)
    try:
        stream = stream_of(target.client.client_id)
        weighted = moments(against_site(target, mean, None), mean, root, tol.DEPARTURE_POINTS, stream)
    except (LocalFailure, ArithmeticError, np.linalg.LinAlgError):
        return {}
    value = np.nan if weighted is None else weighted.diagnostics["departure"]
    return {"departure": value} if np.isfinite(value) else {}


# The reason why a client's local variables have no mode, from the end of the search for it ---------------------------


def no_mode(client: ClientView, phi: Array) -> str:
    """Why the inner search found no mode at φ (m,), with a remedy; names variables and no numbers of the client's."""
    _, theta = local_mode(client, phi)
    value = log_densities(client, phi, theta[None])[0]
    moved = np.where(["_log__" in label for label in client.local_labels], theta - client.initial, 0.0)
    if not np.isfinite(value):
        why = "the log density there is not a number. Look for outcomes and parameters outside of their domain"
    elif not value > -tol.TOO_LARGE:
        why = "the log density there is implausibly large. Rescale the outcome, or widen the priors"
    elif np.min(moved, initial=0.0) < tol.SHRUNK:
        name = client.local_labels[int(np.argmin(moved))].replace("_log__", "")
        why = (
            f"{name} goes to 0, as where outcomes are constant or fit exactly, or where a scale has a single value. "
            f"Check this client's outcomes, or declare a prior that keeps {name} from 0, such as pm.InverseGamma"
        )
    else:
        why = (
            "the local posterior may be flat there, or have its peak at a kink, as pm.Laplace has one. Give θ a proper "
            "prior and a smooth density, or use EP(local=fedppl.local.NUTS())"
        )
    return f"the inner search found no mode of θ at φ = {np.array2string(phi, precision=3)}: {why}"
