"""What the server itself sees of the clients' noise: how far each reply moves q, and how much of that cancels.

A reply proposes a site; its move is what q's means and log sds would do if that site replaced the old one, in
posterior sds. While rounds are averaged, moves of honest clients cancel, since only Monte Carlo error is left in them.
Moves that do not cancel are those of a client that goes on and on, whatever error it says it has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.types import Array

LEAST = 0.1  # weight of a reply, as of a step: Monte Carlo error falls no further


class Moves(NamedTuple):
    """Per client since averaging began. Coordinates are those of the means, then those of the log sds."""

    replies: Array  # (K,) int
    mean: Array  # (K, 2 m) weighted mean of the client's moves
    share: Array  # (K,) what the variance of one move is to be multiplied with for that of the mean
    spoke: Array  # (K,) bool: has replied, so that the next two are known
    pairs: Array  # (K,) int: replies whose difference from the one before is in the scatter
    left: Array  # (K, 2 m) what its last reply would still have moved after the step that was taken
    scatter: Array  # (K,) mean square of what its replies differ by from one to the next, halved: their variance


def start(clients: int, size: int) -> Moves:
    """Nothing is known."""
    none, nowhere = np.zeros(clients), np.zeros((clients, 2 * size))
    nothing: Array = np.zeros(clients, dtype=np.int64)
    return Moves(nothing, nowhere, none, np.zeros(clients, dtype=bool), nothing, nowhere, none)


def begin(moves: Moves) -> Moves:
    """Forget what there was: averaging begins anew."""
    clients, double = moves.mean.shape
    return start(clients, double // 2)


def anew(moves: Moves) -> Moves:
    """Average from the next reply on, and remember what is known of their scatter."""
    return moves._replace(replies=np.zeros_like(moves.replies))


def of_replies(q: Gaussian, d_linear: Array, d_precision: Array) -> Array:
    """To first order, what changes (R, m), (R, m, m) of sites do to q's means and log sds, in sds: (R, 2 m)."""
    covariance = gaussian.covariance(q)
    sd = np.sqrt(np.diag(covariance))
    means = (d_linear - d_precision @ gaussian.mean(q)) @ covariance / sd
    log_sds = -0.5 * np.einsum("ij,rjk,ki->ri", covariance, d_precision, covariance, optimize=True) / sd**2
    return np.concatenate([means, log_sds], axis=1)


def follow(moves: Moves, rows: list[int], now: Array, step: Array) -> Moves:
    """Take in the moves (R, 2 m) of a round's replies, of which the shares `step` (R,) were taken."""
    replies, mean, share = moves.replies.copy(), moves.mean.copy(), moves.share.copy()
    left, scatter = moves.left.copy(), moves.scatter.copy()
    # A reply minus what the one before had left to do is the difference of the two proposals.
    differ = now - left[rows]
    known, spoke = moves.spoke[rows], moves.spoke.copy()
    spoke[rows] = True
    square = 0.5 * np.mean(np.square(differ), axis=1)
    pairs = moves.pairs.copy()
    pairs[rows] += known
    weight = np.maximum(1.0 / np.maximum(pairs[rows], 1), LEAST)
    scatter[rows] += np.where(known, (square - scatter[rows]) * weight, 0.0)
    replies[rows] += 1
    weight = np.maximum(1.0 / replies[rows], LEAST)
    mean[rows] += weight[:, None] * (now - mean[rows])
    share[rows] = (1 - weight) ** 2 * share[rows] + weight**2  # 1 for the first
    left[rows] = (1 - step)[:, None] * now
    return Moves(replies, mean, share, spoke, pairs, left, scatter)


def backed(moves: Moves, noise: Array) -> float:
    """Variance of a mean that the clients' own errors (K,), averaged, can explain and nobody's word alone can raise.

    The largest counts as far as that client's replies do scatter.
    """
    k = int(np.argmax(noise))
    return float(noise.sum() - noise[k] + min(noise[k], moves.share[k] * moves.scatter[k]))
