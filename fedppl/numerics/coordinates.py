r"""Coordinates in which a posterior is closer to normal than in those that are sampled.

A scale s whose logarithm has a long left tail becomes arsinh(s / s_0): the scale itself near 0, where the density is
smooth and ends, so that it may be folded there; its logarithm where it is large. The sds and partial correlations of a
covariance Σ become the matrix logarithm about a Σ_0 in its middle,

.. math:: A = \log\left(C^{-1} \Sigma\, C^{-T}\right), \qquad C C^T = \Sigma_0, \qquad
          \left|\frac{\partial \Sigma}{\partial A}\right|
          = |C|^{n+1} \prod_i e^{w_i} \prod_{i<j} \frac{e^{w_i} - e^{w_j}}{w_i - w_j}

with A's eigenvalues w: no order of the effects matters in it, and no unit. Of a location μ that few groups tell the
spread grows with the scales of their effects, so that its margin has heavy tails, and given the scales has none. Along
each direction of the locations,

.. math:: u = c + \frac{\mu - c}{\sqrt{1 + \sum_i b_i s_i^2}}
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import linalg
from scipy.special import expit, softmax

from fedppl.numerics import tolerances as tol
from fedppl.types import Array

Places = NDArray[np.intp]


class Block(NamedTuple):
    """A covariance."""

    places: Places  # of the lower triangle of n rows: log sds on the diagonal, else partial correlations as arctanh
    root: Array  # (n, n) C


class Stretch(NamedTuple):
    """Directions of locations that spread more where scales are large."""

    places: Places  # (L,) of locations
    center: Array  # (L,) c
    basis: Array  # (L, L) its rows are the directions
    scales: Places  # (n,) of their logarithms
    log_units: Array  # (n,)
    powers: Array  # (n,) 2 of an sd's, −1 of a precision's
    growth: Array  # (L, n) b, of variances with these powers of scales in their units


class Coordinates(NamedTuple):
    """What stands in the place of which φ."""

    folded: Places  # logarithms of scales, of which arsinh is taken
    log_units: Array  # log s_0 of these
    blocks: tuple[Block, ...]  # matrix logarithms
    stretch: Stretch


def covariances(labels: tuple[str, ...]) -> list[Places]:
    """Places of the covariances among coordinates, by their labels."""
    names = [label.partition("_partial__[")[0] for label in labels if "_partial__[" in label]
    starts = [(f"{name}_log__[", f"{name}_partial__[") for name in dict.fromkeys(names)]
    return [np.flatnonzero([label.startswith(own) for label in labels]) for own in starts]


def plain() -> Coordinates:
    """φ itself."""
    return Coordinates(np.zeros(0, dtype=np.intp), np.zeros(0), (), _none())


def _none() -> Stretch:
    nowhere = np.zeros(0, dtype=np.intp)
    return Stretch(nowhere, np.zeros(0), np.zeros((0, 0)), nowhere, np.zeros(0), np.zeros(0), np.zeros((0, 0)))


def coordinates_of(
    labels: tuple[str, ...], folded: Places, center: Array, stretch: Stretch | None = None
) -> Coordinates:
    """Coordinates about φ (m,) with these scales folded, and logarithms of covariances that have none of these."""
    whole = [places for places in covariances(labels) if not np.isin(places, folded).any()]
    blocks = tuple(Block(places, _roots(center[None, places])[0]) for places in whole)
    return Coordinates(folded, center[folded], blocks, _none() if stretch is None else stretch)


def stretch_of(labels: tuple[str, ...], phi: Array, weights: Array) -> Stretch:
    """Which directions of locations spread with which scales, by weighted points (S, m).

    Of a location by itself, or along those directions that spread the most from low to high values of a scale: effects
    of a slope within each arm move the slopes of all arms together. What is most alike to a normal is taken.
    """
    names = [label.partition("[")[0] for label in labels]
    places = np.array([i for i, name in enumerate(names) if not name.endswith("__")], dtype=np.intp)
    scales = np.array([i for i, name in enumerate(names) if name.endswith(("_log__", "_interval__"))], dtype=np.intp)
    if not len(places) or not len(scales):
        return _none()
    powers, scales = np.repeat([2.0, -1.0], len(scales)), np.tile(scales, 2)
    effective, shares = 1.0 / float(np.sum(weights**2)), np.cumsum(weights)
    count = min(tol.GROWTH_POINTS, len(phi))
    drawn = np.searchsorted(shares / shares[-1], (np.arange(count) + 0.5) / count)  # systematic resampling
    phi, weights = phi[np.minimum(drawn, len(phi) - 1)], np.full(count, 1.0 / count)
    center = weights @ phi
    x = phi[:, places] - center[places]
    logs = powers * (phi[:, scales] - center[scales])
    least = tol.SPREAD + tol.SPREAD_BY_CHANCE / np.sqrt(effective)
    squares, others = ((one - one.mean(axis=0)) / np.maximum(one.std(axis=0), tol.TINY) for one in (x**2, logs))
    correlations = squares.T @ others / len(x)
    spread = np.abs(correlations).max(axis=0, initial=0.0) > least
    if not np.any(spread):
        return _none()
    scales, powers, logs = scales[spread], powers[spread], logs[:, spread]
    variances = np.exp(np.minimum(logs, tol.MOST_LOG))
    bases = [np.eye(len(places))]
    if effective > tol.POINTS_A_LOCATION * len(places):
        bases += [_spreading(x, phi[:, i], weights) for i in np.unique(scales)]
    gain = tol.GAIN + tol.GAIN_BY_CHANCE / effective

    def stretched(basis: Array) -> Stretch:
        growth = np.stack([_growth(along**2, variances, weights, gain) for along in (x @ basis.T).T])
        return Stretch(places, center[places], basis, scales, center[scales], powers, growth)

    best = min(map(stretched, bases), key=lambda one: misfit(phi, weights, one, places))
    return best if np.any(best.growth) else _none()


def _spreading(x: Array, log_scale: Array, weights: Array) -> Array:
    """Directions (L, L) in which x (S, L) has other variances where a scale is high than where it is low."""
    order = np.argsort(log_scale, kind="stable")
    shares = np.cumsum(weights[order])
    low, high = (
        (x[some] * weights[some, None]).T @ x[some] / weights[some].sum()
        for some in (order[shares <= tol.LOW_SHARE], order[shares >= 1.0 - tol.LOW_SHARE])
    )
    try:
        return np.asarray(linalg.eigh(high, low)[1].T)
    except linalg.LinAlgError:  # points in a plane
        return np.eye(x.shape[1])


def _growth(squared: Array, scales: Array, weights: Array, gain: float) -> Array:
    """Growth (n,) of a variance with those of scales (S, n), by squared distances (S,).

    Scale by scale, the best of a grid given the others; growth that gains too little is 0.
    """
    growth = np.zeros(scales.shape[1])
    for i in [*range(len(growth))] * tol.GROWTH_PASSES:
        variances = 1.0 + (scales @ growth - scales[:, i] * growth[i])[:, None] + scales[:, i : i + 1] * tol.GROWTHS
        misfits = 0.5 * np.log(weights @ (squared[:, None] / variances)) + 0.5 * (weights @ np.log(variances))
        growth[i] = tol.GROWTHS[np.argmin(misfits)] if misfits[0] - np.min(misfits) > gain else 0.0
    return growth


def misfit(phi: Array, weights: Array, stretch: Stretch, places: Places) -> float:
    """Mean negative log density, but for a constant, of φ at these places as a normal in stretched coordinates."""
    u, variances = phi.copy(), np.ones((len(phi), 0))
    if len(stretch.places):
        variances = _variances(phi, stretch)
        u[:, stretch.places] = _stretched(phi, stretch, variances)
    u = u[:, places] - weights @ u[:, places]
    covariance = (u * weights[:, None]).T @ u
    return float(0.5 * np.linalg.slogdet(covariance)[1] + 0.5 * weights @ np.log(variances).sum(axis=1))


def _variances(phi: Array, stretch: Stretch) -> Array:
    """Variances (S, L) along the directions, in those where scales are 0."""
    logs = stretch.powers * (phi[:, stretch.scales] - stretch.log_units)
    return np.asarray(1.0 + np.exp(np.minimum(logs, tol.MOST_LOG)) @ stretch.growth.T)


def _stretched(phi: Array, stretch: Stretch, variances: Array) -> Array:
    """Locations (S, L) about their center, in units that grow with the scales."""
    along = (phi[:, stretch.places] - stretch.center) @ stretch.basis.T / np.sqrt(variances)
    return np.asarray(np.linalg.solve(stretch.basis, along.T).T)


def of_phi(phi: Array, coordinates: Coordinates) -> Array:
    """Coordinates u (S, m) of φ (S, m)."""
    u = phi.copy()
    u[:, coordinates.folded] = np.arcsinh(np.exp(phi[:, coordinates.folded] - coordinates.log_units))
    for block in coordinates.blocks:
        roots = _roots(phi[:, block.places])
        vectors, values, _ = np.linalg.svd(np.linalg.solve(block.root, roots))
        logs = 2.0 * np.log(np.maximum(values, tol.TINY))
        u[:, block.places] = _lower((vectors * logs[:, None, :]) @ vectors.transpose(0, 2, 1))
    stretch = coordinates.stretch
    if len(stretch.places):
        u[:, stretch.places] = stretch.center + _stretched(phi, stretch, _variances(phi, stretch))
    return u


def to_phi(u: Array, coordinates: Coordinates) -> Array:
    """φ (S, m) of coordinates u (S, m)."""
    phi = u.copy()
    scaled = u[:, coordinates.folded]
    phi[:, coordinates.folded] = scaled + np.log(-np.expm1(-2.0 * scaled)) - np.log(2.0) + coordinates.log_units
    for block in coordinates.blocks:
        values, vectors = np.linalg.eigh(_symmetric(u[:, block.places]))
        halves = np.exp(0.5 * np.clip(values, -tol.MOST_EIGENVALUE, tol.MOST_EIGENVALUE))
        upper = np.asarray(np.linalg.qr((block.root @ (vectors * halves[:, None, :])).transpose(0, 2, 1), mode="r"))
        phi[:, block.places] = _sds_and_partials(upper.transpose(0, 2, 1))
    stretch = coordinates.stretch
    if len(stretch.places):
        along = (u[:, stretch.places] - stretch.center) @ stretch.basis.T * np.sqrt(_variances(phi, stretch))
        phi[:, stretch.places] = stretch.center + np.linalg.solve(stretch.basis, along.T).T
    return phi


def log_slope(phi: Array, coordinates: Coordinates) -> Array:
    """log |dφ / du|, (S,): what is added to a log density in φ for one in u."""
    logs = phi[:, coordinates.folded] - coordinates.log_units
    slope = np.sum(0.5 * np.logaddexp(2.0 * logs, 0.0) - logs, axis=1)
    slope += 0.5 * np.sum(np.log(_variances(phi, coordinates.stretch)), axis=1)
    for block in coordinates.blocks:
        slope += _log_slope(phi[:, block.places], block.root)
    return np.asarray(slope)


def _size(entries: int) -> int:
    """Rows of a triangle with so many entries."""
    return int(np.sqrt(2 * entries))


def _lower(matrices: Array) -> Array:
    rows, columns = np.tril_indices(matrices.shape[1])
    return matrices[:, rows, columns]


def _symmetric(entries: Array) -> Array:
    n = _size(entries.shape[1])
    rows, columns = np.tril_indices(n)
    matrices = np.zeros((len(entries), n, n))
    matrices[:, rows, columns] = matrices[:, columns, rows] = entries
    return matrices


def _parts(phi: Array) -> tuple[Array, Array, Array]:
    """Log sds (S, n), arctanh of partial correlations (S, n, n), and log of their cosh; 0 on and above diagonals."""
    n = _size(phi.shape[1])
    matrices = np.tril(_symmetric(phi), -1)
    logs = np.logaddexp(2.0 * matrices, 0.0) - matrices - np.log(2.0)
    return phi[:, [(k + 1) * (k + 2) // 2 - 1 for k in range(n)]], matrices, np.tril(logs, -1)


def _roots(phi: Array) -> Array:
    """Lower roots (S, n, n) of covariances."""
    log_sds, partials, log_cosh = _parts(phi)
    n = log_sds.shape[1]
    before = np.cumsum(log_cosh, axis=2) - log_cosh  # of the columns to the left
    return np.tril(np.exp(log_sds[:, :, None] - before)) * (np.tanh(partials) + np.eye(n))


def _sds_and_partials(roots: Array) -> Array:
    """φ of lower roots, whose columns may have any sign."""
    roots = roots * np.sign(np.diagonal(roots, axis1=1, axis2=2))[:, None, :]
    squares = np.cumsum(roots[:, :, ::-1] ** 2, axis=2)[:, :, ::-1]  # with those of the columns to the right
    n = roots.shape[1]
    phi, behind = np.zeros_like(roots), np.sqrt(np.roll(squares, -1, axis=2))
    rows, columns = np.tril_indices(n, -1)
    phi[:, rows, columns] = np.arcsinh(roots[:, rows, columns] / behind[:, rows, columns])
    phi[:, range(n), range(n)] = 0.5 * np.log(squares[:, :, 0])
    return _lower(phi)


def _log_slope(phi: Array, root: Array) -> Array:
    """log |dφ / dA|: of sds and partial correlations by the root, of the root by Σ, and of Σ by A."""
    log_sds, _, log_cosh = _parts(phi)
    n = log_sds.shape[1]
    rows = np.arange(n)
    by_root = np.sum((rows[:, None] - rows) * log_cosh, axis=(1, 2)) - log_sds @ (rows + 1.0)
    diagonal = log_sds - log_cosh.sum(axis=2)  # log L_kk
    by_covariance = -n * np.log(2.0) - diagonal @ (n - rows)
    scales = np.linalg.svd(np.linalg.solve(root, _roots(phi)), compute_uv=False)
    w = 2.0 * np.log(np.maximum(scales, tol.TINY))
    first, second = np.triu_indices(n, 1)
    apart = np.maximum(w[:, first] - w[:, second], tol.TINY)  # in descending order
    by_logarithm = np.sum(w, axis=1) + np.sum(w[:, second] + np.log(np.expm1(apart) / apart), axis=1)
    return np.asarray(by_root + by_covariance + by_logarithm + (n + 1) * np.linalg.slogdet(root)[1])


def declared(labels: tuple[str, ...], phi: Array) -> Array:
    """φ (S, m) on the scales that their variables are declared on, (S, L), where these are others.

    Scales and rates, probabilities, compositions. A moment of these may be wrong where
    that of the logarithm is right: sds above all, along the tail to the right.
    """
    by_name: dict[str, list[int]] = {}
    for i, label in enumerate(labels):
        by_name.setdefault(label.partition("[")[0], []).append(i)
    columns = [np.zeros((len(phi), 0))]
    for name, places in by_name.items():
        if name.endswith("_log__"):
            columns.append(np.exp(np.minimum(phi[:, places], tol.MOST_LOG)))
        elif name.endswith(("_logodds__", "_interval__")):
            columns.append(expit(phi[:, places]))
        elif name.endswith("_simplex__"):
            last = -phi[:, places].sum(axis=1, keepdims=True)
            columns.append(softmax(np.concatenate([phi[:, places], last], axis=1), axis=1))
    return np.concatenate(columns, axis=1)
