"""A fixed number of gradient steps at a client: on the tilted log density, and as averaging methods take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientView, Draws, LocalInference, Moments, Target
from fedppl.local import tolerances as tol
from fedppl.local.target import gaussian_draws, gaussian_moments, inference, log_tilted, negative_hessian, start
from fedppl.numerics import tolerances as common
from fedppl.numerics.pairs import DATA, INTEGERS, KERNEL, MATRIX, VECTOR, entry
from fedppl.settings import positive, whole
from fedppl.types import Array, DataError, LocalFailure, Rng


class _Settings(NamedTuple):
    steps: int
    learning_rate: float


def GradientSteps(*, steps: int = 100, learning_rate: float = 1e-3) -> LocalInference:
    r"""Plain gradient ascent on the tilted log density, then its curvature at the end.

    .. math:: x \leftarrow x + \eta\, \partial_x \log \tilde p(x), \quad \text{T times}; \qquad
              \hat Q = (A^{-1})_{\phi\phi}^{-1}

    Parameters
    ----------
    steps
        Number of steps T.
    learning_rate
        Step size η for the *summed* log density.

    Returns
    -------
    LocalInference

    Raises
    ------
    DeclarationError
        For steps or a learning rate that are not positive.

    Notes
    -----
    *When this fails.* η above 2 / λ_max of the curvature diverges, and the client fails; with a small one the steps end
    before the mode, which diagnostic `decrement` (in units of the log density) shows.
    """
    settings = _Settings(whole("steps", steps), positive("learning_rate", learning_rate))
    return inference("gradient steps", tilted, draw, settings)


def climb(target: Target, settings: _Settings) -> tuple[Array, Array, float]:
    """Return (x after the steps, negative Hessian A there, Newton decrement there)."""
    density = log_tilted(target)
    x = start(target)
    first, _ = density(x)
    for _ in range(settings.steps):
        value, gradient = density(x)
        if not np.isfinite(value):
            break
        x = x + settings.learning_rate * gradient
    value, gradient = density(x)
    if not value >= first:
        change = f"log density {first:.4g} before, {value:.4g} after"
        raise LocalFailure(f"gradient steps diverged ({change}); lower learning_rate={settings.learning_rate}")
    A = negative_hessian(target, x, np.full(len(x), common.START_LENGTH))
    eigenvalues, vectors = np.linalg.eigh(A)
    if not eigenvalues[0] > 0:
        raise LocalFailure(
            f"no positive curvature where {settings.steps} gradient steps ended (smallest eigenvalue "
            f"{eigenvalues[0]:.3g}); raise steps=, or change learning_rate={settings.learning_rate}"
        )
    return x, A, float(np.sum((vectors.T @ gradient) ** 2 / eigenvalues))


def tilted(target: Target, rng: Rng, *, settings: _Settings) -> Moments:
    """Moments of φ where the steps ended."""
    x, A, decrement = climb(target, settings)
    return gaussian_moments(x, A, target.client.shared_size, {"ess": np.inf, "decrement": decrement})


def draw(target: Target, draws: int, chains: int, rng: Rng, *, settings: _Settings) -> Draws:
    """Draws of (φ, θ) from the Gaussian where the steps ended."""
    x, A, decrement = climb(target, settings)
    return gaussian_draws(x, A, target.client.shared_size, draws, chains, rng, {"decrement": decrement})


# Gradient steps of averaging methods: on the mean loss, plus a quadratic in φ -----------------------------------------

#     F_k(φ, θ) = −s log p(y_k, θ | φ) + φᵀAφ / 2 − bᵀφ
#
# The scale s (1 / n_k for a mean loss), A (m, m) and b (m,) are the algorithm's: a share of a Gaussian prior, a
# proximal term, a control variate. A batch of n_b rows weighs its terms by n_k / n_b, so that its gradient is unbiased.

PLACES = types.int64[:, ::1]


class Descent(NamedTuple):
    """Settings of a client's gradient steps."""

    learning_rate: float  # η, per unit of the scaled loss
    steps: int  # T
    batch_size: int | None  # rows a step; None for all


class Objective(NamedTuple):
    """The scale s of a client's loss, and the added quadratic ½ φᵀAφ − bᵀφ."""

    scale: float
    quadratic: Array  # A, (m, m)
    linear: Array  # b, (m,)
    prior_share: float = 0.0  # of log p − log N_0 of a prior that is not Gaussian, in units of s


def checked(learning_rate: float, steps: int, batch_size: int | None) -> Descent:
    """Settings in range, or an error."""
    rows = None if batch_size is None else whole("batch_size", batch_size, hint="None takes all rows")
    return Descent(positive("learning_rate", learning_rate), whole("steps", steps), rows)


def check_batches(client: ClientView, batch_size: int | None) -> None:
    """Refuse batches where the log density is no sum over rows: gradients of batches would be biased.

    Raises `DataError` where rows cannot be taken, or the densities of two halves of the data do not add up to the
    whole.
    """
    if batch_size is None:
        return
    half = np.arange(client.rows) < (client.rows + 1) // 2
    parts = [client.batch(np.flatnonzero(chosen)) for chosen in (half, ~half)]
    none = client.batch(np.arange(0))
    prior = client.layout.prior
    sd = np.minimum(gaussian.standard_deviations(prior), tol.NEAR_SDS)
    rng = np.random.default_rng(0)  # a random point: at a special one a difference may be zero by coincidence
    x = np.concatenate([gaussian.mean(prior), client.initial])
    x += tol.BATCH_PROBE * rng.normal(size=len(x)) * np.concatenate([sd, np.ones(client.local_size)])
    whole, first, second, nothing = (client.kernel(x, *data) for data in (client.packed, *parts, none))
    if not np.all(np.isfinite(whole)):
        return
    scale = np.abs(whole) + np.abs(first) + np.abs(second) + np.abs(nothing)
    if not np.all(np.abs(whole + nothing - first - second) <= tol.BATCH_ROUNDING * (1.0 + scale)):
        raise DataError(
            f"client {client.client_id!r}: the log density is not a sum over its {client.rows} rows, or an array of "
            "something else is just as long, so gradients of batches would be wrong. Use batch_size=None."
        )


@entry(KERNEL, VECTOR, VECTOR, INTEGERS, PLACES, DATA, VECTOR, MATRIX, VECTOR)
def _steps(
    kernel: Any, x: Any, reals: Any, integers: Any, places: Any, none: Any, settings: Any, quadratic: Any, linear: Any
) -> Any:
    """Take settings = (steps, rate, scale, weight of a batch) steps from x with every batch in turn.

    Each batch is one place in the packed data; the data `none` have no rows.
    """
    m = linear.shape[0]
    n = x.shape[0]
    x = x.copy()
    rate, scale, weight = settings[1], settings[2], settings[3]
    slope = np.zeros(n)
    for t in range(places.shape[0]):
        for _ in range(int(settings[0])):
            output = kernel(x, reals, integers, places[t])
            for i in range(n):
                slope[i] = scale * output[1 + i]
            if weight != 1.0:  # the prior of θ counts once, whatever the batch
                without = kernel(x, *none)
                for i in range(n):
                    slope[i] = scale * (weight * (output[1 + i] - without[1 + i]) + without[1 + i])
            for i in range(m):
                for j in range(m):
                    slope[i] -= quadratic[i, j] * x[j]
                slope[i] += linear[i]
            for i in range(n):
                x[i] += rate * slope[i]
    return x


def descend(client: ClientView, x: Array, objective: Objective, descent: Descent, rng: Rng) -> Array:
    """Return x = (φ, θ) after T steps of the client's objective.

    Raises `LocalFailure` if the steps diverged; it names the learning rate.
    """
    scale, share = objective.scale, objective.prior_share
    # Copies: compiled code takes no read-only arrays, and messages and restored states may be read-only.
    A, b, x = (np.array(value, dtype=float, order="C") for value in (objective.quadratic, objective.linear, x))
    m, rows, size = len(b), client.rows, descent.batch_size
    whole = size is None or size >= rows
    settings = np.array([1.0, descent.learning_rate, scale, 1.0 if whole else rows / (size or rows)])
    with np.errstate(over="ignore", invalid="ignore"):
        before = _loss(client, objective, x) if whole else np.inf
        if whole and not share:
            settings[0] = descent.steps
            x = _steps(client.kernel, x, *_alone(client.packed), client.packed, settings, A, b)
        elif not share:
            none, chosen = client.batch(np.arange(0)), np.array(list(_batches(rows, descent, rng)))
            many = max(1, tol.ROWS_AT_ONCE // chosen.shape[1])
            for start in range(0, len(chosen), many):
                batches = client.batches(chosen[start : start + many])
                x = _steps(client.kernel, x, *batches, none, settings, A, b)
        else:
            none = client.packed if whole else client.batch(np.arange(0))
            for batch in _batches(rows, descent, rng):
                pull = b + scale * share * client.prior.log_ratio_gradient(x[:m])
                rows_of_batch = _alone(client.packed if whole else client.batch(batch))
                x = _steps(client.kernel, x, *rows_of_batch, none, settings, A, pull)
        after = _loss(client, objective, x) if whole and np.all(np.isfinite(x)) else 0.0
    if not np.all(np.isfinite(x)) or not after <= before + tol.RISE * scale * rows:
        raise LocalFailure(f"gradient steps diverged; lower learning_rate={descent.learning_rate:g}")
    return np.asarray(x)


def _alone(packed: Any) -> tuple[Any, Any, Any]:
    """A batch as the only one."""
    return packed[0], packed[1], packed[2][None]


def _batches(rows: int, descent: Descent, rng: Rng) -> Iterator[NDArray[np.int64]]:
    """Rows of T batches of one size: shuffled data from the front, shuffled anew when too few are left."""
    size = min(descent.batch_size or rows, rows)
    order, used = rng.permutation(rows), 0
    for _ in range(descent.steps):
        if used + size > rows:
            order, used = rng.permutation(rows), 0
        yield order[used : used + size]
        used += size


def _loss(client: ClientView, objective: Objective, x: Array) -> float:
    """The client's objective at x = (φ, θ)."""
    phi = x[: len(objective.linear)]
    value = -objective.scale * float(client.kernel(np.ascontiguousarray(x), *client.packed)[0])
    if objective.prior_share:
        value -= objective.scale * objective.prior_share * float(client.prior.log_ratio(phi[None])[0])
    return value + float(phi @ (0.5 * objective.quadratic @ phi - objective.linear))
