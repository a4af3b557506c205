"""Covariances Ω of one parameter over clients, and how each is estimated from E[ΘᵀΘ] / d. NumPy only.

A matrix of K clients has K (K + 1) / 2 entries and only d coordinates to learn them from, so it needs a structure. The
best one depends on the clients, and evidence does not find it: compare them by
`fedppl.search.validation_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.numerics import tolerances as tol
from fedppl.settings import between, positive, whole
from fedppl.types import Array, DeclarationError

__all__ = ["Covariance", "Omega", "exchangeable", "ledoit_wolf", "low_rank", "moving_average", "trace_constrained"]


class Omega(NamedTuple):
    """Ω of K clients; where it is δ I + U Uᵀ with few columns of U, much is cheaper."""

    matrix: Array  # (K, K), positive definite
    remainder: float  # δ; NaN where Ω has no such form
    factor: Array  # U, (K, q)


class Covariance(NamedTuple):
    """One way to estimate Ω.

    Attributes
    ----------
    name
        How results call it.
    start
        ``start(K) -> Omega``, before anything is known.
    update
        ``update(omega, mean, moment) -> Omega`` with the clients' whitened parameters (K, d), the posterior means,
        and the moment E[ΘᵀΘ] / d (K, K), which counts their covariances.
    to_the_end
        Whether updates may be repeated until Ω stands still, or belong to rounds.
    settings
        What it was built with.
    """

    name: str
    start: Callable[[int], Omega]
    update: Callable[[Omega, Array, Array], Omega]
    to_the_end: bool
    settings: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        """Name and settings; functions say nothing to a reader."""
        return self.describe()

    def describe(self) -> str:
        """Name and settings on one line."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def moving_average(alpha: float = 0.1) -> Covariance:
    r"""FedLin's own estimate: a moving average that starts at the identity.

    .. math:: \Omega \leftarrow (1 - \alpha)\, \Omega + \alpha\, E[\Theta^\top \Theta] / d

    Parameters
    ----------
    alpha
        Weight of a round's moment. What is left of the identity after C rounds, :math:`(1 - \alpha)^C`, is all that
        keeps Ω away from singularity.

    Returns
    -------
    Covariance

    Raises
    ------
    DeclarationError
        For `alpha` outside (0, 1).

    Examples
    --------
    >>> moving_average(0.2).describe()
    'moving average(alpha=0.2)'

    Notes
    -----
    *When this fails.* With many rounds or a large α the identity is forgotten, Ω comes close to rank d, and the
    estimates fit noise: stop after about 30 rounds of α = 0.1.

    References
    ----------
    .. [1] FedLin, Algorithm 1.
    """
    alpha = between("alpha", alpha, 0, 1, hint="the paper's default is 0.1")

    def update(omega: Omega, mean: Array, moment: Array) -> Omega:
        return _dense((1 - alpha) * omega.matrix + alpha * moment)

    return Covariance("moving average", lambda count: _dense(np.eye(count)), update, False, {"alpha": alpha})


def trace_constrained(trace: float | None = None, floor: float = tol.TRACE_FLOOR) -> Covariance:
    r"""Square root of the moment, scaled to a fixed trace (Zhang and Yeung).

    .. math:: \Omega = t\, \frac{M^{1/2}}{\operatorname{tr} M^{1/2}} + f\, \frac{t}{K} I, \qquad
              M = E[\Theta^\top \Theta] / d

    Parameters
    ----------
    trace
        Trace t of Ω. None keeps the scale of the parameters, t = tr M; the paper writes 1, which shrinks K clients of
        unit variance K-fold.
    floor
        Least eigenvalue f, in units of the mean variance.

    Returns
    -------
    Covariance

    Raises
    ------
    DeclarationError
        For a `trace` or a `floor` that is not positive and finite.

    Examples
    --------
    >>> trace_constrained(trace=1.0).name
    'trace-constrained'

    Notes
    -----
    *When this fails.* It is not the maximum of a likelihood: a trace that is too small shrinks all clients to zero.

    References
    ----------
    .. [1] Zhang and Yeung (2010), A convex formulation for learning task relationships; FedLin, section 3.
    """
    trace = None if trace is None else positive("trace", trace, "None keeps the scale of the parameters")
    floor = positive("floor", floor, "without it Ω is singular")

    def update(omega: Omega, mean: Array, moment: Array) -> Omega:
        values, vectors = np.linalg.eigh(moment)
        roots = np.sqrt(np.maximum(values, 0.0))
        scale = float(np.trace(moment)) if trace is None else trace
        share = roots / max(roots.sum(), tol.TINY)
        return _dense((vectors * (scale * share + floor * scale / len(moment))) @ vectors.T)

    return Covariance(
        "trace-constrained", lambda count: _dense(np.eye(count)), update, True, {"trace": trace, "floor": floor}
    )


def exchangeable() -> Covariance:
    r"""One variance and one correlation for all clients: :math:`\Omega = a I + b\, 1 1^\top`, two parameters.

    Returns
    -------
    Covariance

    Raises
    ------
    DeclarationError
        In `fedppl.HM1`, where the function itself is passed and not what it builds.

    Examples
    --------
    >>> omega = exchangeable().update(exchangeable().start(2), np.ones((2, 1)), np.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> np.round(omega.matrix, 6)
    array([[2., 1.],
           [1., 2.]])

    Notes
    -----
    The maximum of the EM objective in closed form: the moment's mean along 1 and its mean across it. Where b would be
    negative it is 0, and a the mean of all, tr M / K.

    *When this fails.* Clients that come in groups, or oppose each other: see `low_rank`.
    """

    def update(omega: Omega, mean: Array, moment: Array) -> Omega:
        count = len(moment)
        along = float(moment.sum()) / count
        across = (float(np.trace(moment)) - along) / max(count - 1, 1) if count > 1 else along
        if along < across:  # the best b would be negative, and given b = 0 the best a is the mean of all
            along = across = float(np.trace(moment)) / count
        across = max(across, tol.LEAST_VARIANCE * float(np.trace(moment)) / count)
        return _structured(across, np.full((count, 1), np.sqrt(max(along - across, 0.0) / count)))

    return Covariance("exchangeable", _identity, update, True)


def low_rank(rank: int) -> Covariance:
    r"""A few common factors and an equal remainder: :math:`\Omega = U U^\top + \delta I`, U of size K × q.

    Parameters
    ----------
    rank
        Number q of factors, below the number of clients and below the number of coordinates d.

    Returns
    -------
    Covariance

    Raises
    ------
    DeclarationError
        For a rank that is not a positive whole number, or, when clients enrol, not below their number.

    Examples
    --------
    >>> low_rank(2).describe()
    'low rank(rank=2)'

    Notes
    -----
    The maximum of the EM objective in closed form, as in probabilistic principal components: δ is the mean of the
    moment's K − q smallest eigenvalues.

    *When this fails.* The evidence always prefers a larger rank; choose it by validation loss, `exchangeable` among the
    candidates. With few coordinates, say d ≤ q + 1, or clients with few rows, the factors fit noise, δ comes close to
    zero and standard errors are far too small (in a simulation with K = 8, d = 3, q = 2 half of what they should
    be, and for logistic regression with six rows estimates ran away); so does one factor of six clients in some data
    sets. A fit of any rank says so where δ is below 1 % of the mean, or a tenth of what clients' rows leave unknown.

    References
    ----------
    .. [1] Tipping and Bishop (1999), Probabilistic principal component analysis.
    """
    rank = whole("rank", rank)

    def start(count: int) -> Omega:
        if rank >= count:
            raise DeclarationError(f"rank={rank} must be below the number of clients, {count}.")
        return _identity(count)

    def update(omega: Omega, mean: Array, moment: Array) -> Omega:
        values, vectors = np.linalg.eigh(moment)
        least = tol.LEAST_VARIANCE * float(np.trace(moment)) / len(moment)
        remainder = max(float(values[:-rank].mean()), least)
        lengths = np.sqrt(np.maximum(values[-rank:] - remainder, 0.0))
        return _structured(remainder, vectors[:, -rank:] * lengths)

    return Covariance("low rank", start, update, True, {"rank": int(rank)})


def ledoit_wolf() -> Covariance:
    r"""The moment, shrunk towards an equal variance by Ledoit and Wolf's intensity.

    .. math:: \Omega = (1 - \rho) M + \rho\, \frac{\operatorname{tr} M}{K} I

    Returns
    -------
    Covariance

    Raises
    ------
    DeclarationError
        In `fedppl.HM1`, where the function itself is passed and not what it builds.

    Examples
    --------
    >>> ledoit_wolf().name
    'Ledoit-Wolf'

    Notes
    -----
    The d coordinates of Θ are taken as independent draws with mean zero.

    *When this fails.* With d far below K the intensity is itself an estimate from d draws.

    References
    ----------
    .. [1] Ledoit and Wolf (2004), A well-conditioned estimator for large-dimensional covariance matrices.
    """

    def update(omega: Omega, mean: Array, moment: Array) -> Omega:
        rho = max(ledoit_wolf_intensity(mean.T), tol.LEAST_SHRINKAGE)
        equal = float(np.trace(moment)) / len(moment)
        return _dense((1 - rho) * moment + rho * equal * np.eye(len(moment)))

    return Covariance("Ledoit-Wolf", lambda count: _dense(np.eye(count)), update, True)


def ledoit_wolf_intensity(draws: Array) -> float:
    """Weight of the equal variance for draws (d, K) with mean zero."""
    count, size = draws.shape
    sample = draws.T @ draws / count
    equal = float(np.trace(sample)) / size
    distance = float(np.sum((sample - equal * np.eye(size)) ** 2))
    noise = float(np.sum(np.sum(draws**2, axis=1) ** 2) / count - np.sum(sample**2)) / count
    return float(np.clip(noise / distance, 0.0, 1.0)) if distance > 0 else 1.0


def _dense(matrix: Array) -> Omega:
    symmetric = (matrix + matrix.T) / 2
    return Omega(symmetric, np.nan, np.zeros((len(matrix), 0)))


def _identity(count: int) -> Omega:
    return _structured(1.0, np.zeros((count, 0)))


def _structured(remainder: float, factor: Array) -> Omega:
    return Omega(remainder * np.eye(len(factor)) + factor @ factor.T, float(remainder), factor)
