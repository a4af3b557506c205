"""The coordinate ascent with one block of statistics for each latent function: L Q² numbers in place of (L Q)²."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.coregional.bound import Curves, Design, Globals, UnitClientState
from fedppl.coregional.roles import LogScale
from fedppl.coregional.server import bound_from, terms_from
from fedppl.coregional.unit import scalars
from fedppl.types import Array


class Search(NamedTuple):
    """Where the next step of the means goes: a conjugate direction, and what it was made from."""

    direction: Array  # (L, Q)
    gradient: Array  # (L, Q)
    preconditioned: Array  # (L, Q)


def block_statistics(
    design: Design, curve: Curves, shared: Globals, unit: UnitClientState, direction: Array, noise: LogScale
) -> dict[str, Array]:
    """What the server needs of a unit at the means and the direction it sent; sums over units are enough.

    ``precision`` (L, Q (Q + 1) / 2) has the diagonal blocks, ``across`` and ``across_direction`` (L, Q) the products of
    all others, times γ_k, with the means and the direction, ``gram`` (L, L) the forms m_l' P_lk m_k.
    """
    rate = design.scale * np.exp(-2 * unit.log_noise_sd)
    transposed = np.swapaxes(design.projection, 1, 2)
    blocks = rate * (unit.mean**2 + unit.variance)[:, None, None] * (transposed @ design.projection)

    def products(along: Array) -> Array:
        each = (unit.mean * shared.inclusion)[:, None] * along
        others = each.sum(axis=0) - each
        return np.asarray(rate * unit.mean[:, None] * (transposed @ others[:, :, None])[:, :, 0])

    along = (design.projection @ direction[:, :, None])[:, :, 0]
    scaled = unit.mean[:, None] * curve.mean
    gram = rate * (scaled @ scaled.T) + np.diag(rate * unit.variance * np.sum(curve.mean**2, axis=1))
    return {
        "precision": gaussian.pack_triangle(blocks),
        "linear": rate * unit.mean[:, None] * (transposed @ design.response),
        "across": products(curve.mean),
        "across_direction": products(along),
        "gram": gaussian.pack_triangle(gram),
        **scalars(design, unit, noise),
    }


def block_selection_terms(totals: Mapping[str, Array], shared: Globals) -> tuple[Array, Array]:
    """c (L,) and M (L, L) of the bound in γ, as `selection_terms`, at the means that were sent."""
    gram = gaussian.unpack_triangle(totals["gram"])
    return terms_from(gram, gaussian.unpack_triangle(totals["precision"]), totals, shared)


def block_bound(totals: Mapping[str, Array], shared: Globals, log_odds: Array) -> float:
    """Σ_m V_m at what was sent, or with another q(α) or σ_w."""
    return bound_from(block_selection_terms(totals, shared), totals, shared, log_odds)


def resized(shared: Globals, search: Search, factor: Array) -> tuple[Globals, Search]:
    """Every latent function times its factor (L,), and the search with it."""
    wide = factor[:, None]
    search = Search(search.direction * wide, search.gradient / wide, search.preconditioned * wide)
    return shared._replace(mean=shared.mean * wide, covariance=shared.covariance * wide[:, :, None] ** 2), search


def conjugate_step(
    totals: Mapping[str, Array], shared: Globals, search: Search, rate: float
) -> tuple[Array, Array, Search]:
    """Means after an exact search along the direction that was sent, covariances, and the next direction.

    The bound is quadratic in the means of v. Its blocks precondition conjugate gradients (Polak and Ribière), one
    iteration a round: the products of the other blocks come for the means and the direction that the units were sent.
    """
    gamma = shared.inclusion[:, None]
    own = shared.inclusion[:, None, None] * gaussian.unpack_triangle(totals["precision"])
    system = own + np.eye(own.shape[1])
    covariance = np.linalg.inv(system)
    covariance = (covariance + np.swapaxes(covariance, 1, 2)) / 2

    def times(matrix: Array, vector: Array) -> Array:
        return np.asarray((matrix @ vector[:, :, None])[:, :, 0])

    gradient = gamma * (totals["linear"] - totals["across"]) - times(system, shared.mean)
    bent = times(system, search.direction) + gamma * totals["across_direction"]
    curvature, slope = float(np.sum(search.direction * bent)), float(np.sum(search.direction * gradient))
    step = rate * slope / curvature if slope > 0 and curvature > 0 else 0.0
    mean = shared.mean + step * search.direction
    after = gradient - step * bent
    preconditioned = times(covariance, after)
    before = float(np.sum(search.preconditioned * search.gradient))
    turn = float(np.sum(preconditioned * (after - search.gradient))) / before if before > 0 else 0.0
    direction = preconditioned + (max(turn, 0.0) if step > 0 else 0.0) * search.direction
    if rate < 1.0:  # noisy sums: on the natural scale, part of the way
        covariance = np.linalg.inv((1 - rate) * np.linalg.inv(shared.covariance) + rate * system)
        covariance = (covariance + np.swapaxes(covariance, 1, 2)) / 2
    return mean, covariance, Search(direction, after, preconditioned)
