"""How much one client may do in one round: leave-one-out influence on q, and the scales that bound it.

With changes (dr_k, dQ_k) of the sites and scales s_k in [0, 1], the new q has Q' = Q + Σ s_k dQ_k and likewise r'.
Leaving out client k's change of this round gives Q'_k = Q' − s_k dQ_k and r'_k. `bound` finds scales such that Q' and
every Q'_k are positive definite and, for every k,

    ‖mean' − mean'_k‖_{Q'} ≤ c     and     |log λ| ≤ c for every generalised eigenvalue λ of (Q', Q'_k).

Proof. Both are evaluated for every k at the scales that are returned, and these are returned only if both hold.
Such scales exist: at s = t (1, ..., 1) every Q'_k and mean'_k tends to Q and mean as t falls to 0, and both sizes to
0 < c; the last resort below halves t until they hold, and ends at t = 0, where q does not move, at the latest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.types import Array

__all__ = ["Bounded", "bound", "influences", "often_held", "warn"]

logger = logging.getLogger(__name__)

_SWEEPS = 200
# Aimed at where something is scaled: a share of c below it, or the scales would only converge to where c is kept.
_AIM = 0.98


class Bounded(NamedTuple):
    """Scales of the clients' changes, and what they were found from."""

    scales: Array  # (R,) in [0, 1]
    influence: Array  # (R,) before scaling, in posterior sds and log variances; inf where there would be no posterior
    held: NDArray[np.bool_]  # (R,) scaled below 1


def bound(q: Gaussian, changes: Gaussian, trust: float) -> Bounded:
    """Scale changes (R, m), (R, m, m) of sites so that none does more than `trust` to q, which is proper.

    Whoever does most is scaled first, to the most that it may do beside the others: a change that is out of all
    proportion makes honest ones look influential, and must not take them down with it.
    """
    scales = np.ones(len(changes.linear))
    before: Array | None = None
    with np.errstate(over="ignore"):  # beyond all numbers is beyond c
        taken = _taken(q, changes)
        for _ in range(_SWEEPS):
            found = _leave_one_out(q, _scaled(changes, scales))
            sizes = np.full(len(scales), np.inf) if found is None else found.sizes
            before = sizes if before is None else before
            if np.all(sizes <= trust):
                return Bounded(scales, before, scales < 1)
            if found is None or not np.all(np.isfinite(sizes)):
                scales = _take_less(scales, taken)
            else:
                worst = sizes > max(trust, 0.5 * float(sizes.max()))
                scales[worst] *= _largest_share(found, worst, _AIM * trust)
        for _ in range(_SWEEPS):
            scales = scales / 2
            found = _leave_one_out(q, _scaled(changes, scales))
            if found is not None and np.all(found.sizes <= trust):
                break
        else:
            scales = np.zeros(len(scales))
    assert before is not None
    return Bounded(scales, before, scales < 1)


def influences(q: Gaussian, changes: Gaussian) -> Array:
    """What leaving out each change (R, m), (R, m, m) does to q x all of them: the larger of its two sizes, (R,).

    Inf where no posterior is left.

    Examples
    --------
    >>> one = np.ones((1, 1))
    >>> influences(Gaussian(np.zeros(1), one), Gaussian(0 * one, one[None])).round(3)
    array([0.693])
    """
    found = _leave_one_out(q, changes)
    return np.full(len(changes.linear), np.inf) if found is None else found.sizes


class _LeftOut(NamedTuple):
    """Per change, in coordinates where Q' = I and Q'_k is diagonal."""

    left: Array  # (R, m) precision of a direction without the change
    shift: Array  # (R, m) mean' − mean'_k; without meaning where something is left with no precision
    sizes: Array  # (R,); inf there


def _scaled(changes: Gaussian, scales: Array) -> Gaussian:
    return Gaussian(scales[:, None] * changes.linear, scales[:, None, None] * changes.precision)


def _leave_one_out(q: Gaussian, changes: Gaussian) -> _LeftOut | None:
    """Leave out every change in turn; None where q with all changes is not proper."""
    whole = Gaussian(q.linear + changes.linear.sum(axis=0), q.precision + changes.precision.sum(axis=0))
    if not gaussian.is_proper(whole):
        return None
    mean, root = gaussian.affine(whole)
    # Summed without it, not subtracted: a change of 10^14 times q would leave nothing of the others.
    without = Gaussian(q.linear + _others(changes.linear), q.precision + _others(changes.precision))
    proper = np.atleast_1d(gaussian.is_proper(without))
    precision = np.where(proper[:, None, None], without.precision, whole.precision)
    left, vectors = np.linalg.eigh(root.T @ precision @ root)
    left = np.maximum(left, np.finfo(np.float64).tiny)  # is proper, and smaller than its rounding error
    moved = mean - np.linalg.solve(precision, without.linear[..., None])[..., 0]
    shift = ((moved @ np.linalg.inv(root).T)[:, None, :] @ vectors)[:, 0]
    sizes = np.maximum(np.linalg.norm(shift, axis=1), np.abs(np.log(left)).max(axis=1))
    return _LeftOut(left, shift, np.where(proper, sizes, np.inf))


def _others(values: Array) -> Array:
    """Sum over all rows but one, for every row."""
    upto, after = np.cumsum(values, axis=0), np.cumsum(values[::-1], axis=0)[::-1]
    total = np.zeros_like(values)
    total[1:] += upto[:-1]
    total[:-1] += after[1:]
    return total


def _largest_share(found: _LeftOut, which: NDArray[np.bool_], limit: float) -> Array:
    """The largest share t ≤ 1 of each change that stays within the limit, were all others left as they are.

    With Q'(t) = Q'_k + t dQ_k, a direction's precision is p(t) = p(0) + t (1 − p(0)), and the shift t g / p(t) has
    squared length Σ t² g² / p(t) in Q'(t), which grows with t; log p(t) / p(0) is monotone in t.
    """
    left, shift = found.left[which], found.shift[which]
    gain = 1.0 - left
    with np.errstate(divide="ignore"):
        wide = np.where(gain > 0, np.expm1(limit), -np.expm1(-limit)) * left / np.abs(gain)
    low, high = np.full(len(gain), -100.0), np.minimum(np.log(wide.min(axis=1)), 0.0)
    for _ in range(60):
        middle = 0.5 * (low + high)
        t = np.exp(middle)[:, None]
        inside = np.sum(np.square(t * shift) / (left + t * gain), axis=1) <= limit**2
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return np.asarray(np.exp(low))


def _taken(q: Gaussian, changes: Gaussian) -> Array:
    """The largest share of q's precision in a direction that each change takes away; none is 0."""
    _, root = gaussian.affine(q)
    return np.asarray(np.maximum(-np.linalg.eigvalsh(root.T @ changes.precision @ root)[:, 0], 0.0))


def _take_less(scales: Array, taken: Array) -> Array:
    """Halve what takes most precision away, and leave nobody what would take all: something is not proper."""
    takes = scales * taken
    most = takes >= 0.5 * takes.max()
    with np.errstate(divide="ignore"):
        return np.where(most, np.minimum(scales / 2, 0.5 / taken), scales)


def warn(names: Sequence[str], bounded: Bounded, trust: float | None) -> None:
    """One line in the log for every client that is held back."""
    for name, scale, size, held in zip(names, bounded.scales, bounded.influence, bounded.held, strict=True):
        if held:
            logger.warning(
                "client %s held back: %.2g of its change is used; leaving it out would move q by %.3g, trust=%s",
                name,
                scale,
                size,
                trust,
                extra={"client": name, "status": "held back", "scale": float(scale)},
            )


def often_held(names: Sequence[str], held: Array, answered: Array, trust: float | None) -> str:
    """Name the clients that were held back in more than half of the rounds that they answered, or say nothing."""
    often = [name for name, h, n in zip(names, held, answered, strict=True) if h >= 2 and 2 * h > n]
    if trust is None or not often:
        return ""
    more = f" and {len(often) - 5} more" if len(often) > 5 else ""
    return f"clients {often[:5]}{more} were held back in most rounds: look at their data, or raise trust={trust:g}"
