"""A client's tilted distribution as a message: q, its cavity, its share of a prior that is not Gaussian."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Asked, ClientView, Draws, LocalInference, Moments, Target
from fedppl.gaussian import Gaussian
from fedppl.local import tolerances as tol
from fedppl.numerics import pairs
from fedppl.numerics import tolerances as common
from fedppl.numerics.pairs import NO_DATA, difference_hessian
from fedppl.settings import not_called, shown
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, Rng


def pack_target(q: Gaussian, cavity: Gaussian, prior_share: float) -> Message:
    """Natural parameters of q and of the cavity, precisions as packed triangles."""
    return {
        "global_linear": q.linear,
        "global_precision": gaussian.pack_triangle(q.precision),
        "cavity_linear": cavity.linear,
        "cavity_precision": gaussian.pack_triangle(cavity.precision),
        "prior_share": np.array(prior_share),
    }


def unpack_target(client: ClientView, message: Message) -> Target:
    """The client's tilted distribution from a message."""
    return Target(client, q_of(message), _gaussian(message, "cavity"), float(message["prior_share"]))


def q_of(message: Message) -> Gaussian:
    """The global q of a message."""
    return _gaussian(message, "global")


def _gaussian(message: Message, name: str) -> Gaussian:
    linear, packed = (np.asarray(message[f"{name}_{part}"], dtype=float) for part in ("linear", "precision"))
    return Gaussian(linear, gaussian.unpack_triangle(packed))


def at_target(layout: Layout, message: Message) -> Asked:
    """What a request with a target asks: moments around the mean of q, given the cavity."""
    pair = q_of(message), _gaussian(message, "cavity")
    return Asked(np.zeros((0, layout.size)), np.zeros((0, layout.size)), (pair,))


def at_points(layout: Layout, message: Message, name: str, *, several: bool = False) -> Asked:
    """What a request asks with a point (m,), or `several` (S, m), under this name."""
    points = np.asarray(message[name], dtype=float)
    if points.shape != (*points.shape[:several], layout.size):
        raise ValueError(f"{name!r} has shape {points.shape}")
    return Asked(np.atleast_2d(points), np.zeros((0, layout.size)))


def draw_target(
    client: ClientView, personal: object, message: Message, draws: int, chains: int, rng: Rng, *, local: LocalInference
) -> Draws:
    """Draws of (φ, θ_k) from the tilted distribution of a message (FedLin, eq. 8)."""
    return local.draw(unpack_target(client, message), draws, chains, rng)


# The tilted distribution over (φ, θ) as one log density with gradient -------------------------------------------------


def require_smooth(client: ClientView, why: str) -> None:
    """Raise DeclarationError where the log density has a kink; `why` is the consequence."""
    if client.kink:
        raise DeclarationError(
            f"the log density has a kink or a jump in a parameter ({client.kink}), as a Laplace (lasso) prior has; it "
            f"{why}. Use EP(local=fedppl.local.NUTS()) for this model."
        )


def log_tilted(target: Target) -> Callable[[Array], tuple[float, Array]]:
    """log [p(y, θ | φ) q_{-k}(φ) (p / N_0)(φ)^share] and its gradient, as a function of x = (φ, θ)."""
    client, prior = target.client, target.client.prior
    kernel, data = client.kernel, client.packed
    m = client.shared_size
    linear, precision = target.cavity
    share = 0.0 if prior.is_gaussian else float(target.prior_share)
    prior_kernel = None
    if share:
        assert prior.kernel is not None  # of every prior that is not Gaussian
        prior_kernel = prior.kernel()
        linear, precision = linear - share * prior.gaussian.linear, precision - share * prior.gaussian.precision

    def value_and_gradient(x: Array) -> tuple[float, Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # infinite far out
            output = kernel(np.ascontiguousarray(x), *data)
            phi = x[:m]
            pull = precision @ phi
            output[0] += phi @ (linear - 0.5 * pull)
            output[1 : 1 + m] += linear - pull
            if prior_kernel is not None:
                output[: 1 + m] += share * prior_kernel(np.ascontiguousarray(phi), *NO_DATA)
        return float(output[0]), output[1:]

    return value_and_gradient


def start(target: Target) -> Array:
    """Starting point (m + d_k,): the mean of the global q, and the declared initial θ."""
    return np.concatenate([np.linalg.solve(target.global_.precision, target.global_.linear), target.client.initial])


def negative_hessian(target: Target, x: Array, scale: Array) -> Array:
    """A = −∂² log tilted / ∂x² at x = (φ, θ), by differences of the gradient over lengths in proportion to scale."""
    client, m = target.client, target.client.shared_size
    A: Array = -difference_hessian(client.kernel, x, scale, client.packed)
    A[:m, :m] += target.cavity.precision
    if target.prior_share and not client.prior.is_gaussian:
        A[:m, :m] -= target.prior_share * client.prior.log_ratio_hessian(x[:m])
    return A


def joint_mode(target: Target) -> tuple[Array, Array]:
    """Mode (m + d_k,) of the tilted distribution over (φ, θ) and its negative Hessian A, by damped Newton.

    Raises `LocalFailure` where none is found.
    """
    density = log_tilted(target)
    x = start(target)
    scale = np.full(len(x), common.START_LENGTH)
    value, gradient = density(x)
    for _ in range(common.SEARCH_STEPS):
        A = negative_hessian(target, x, scale)
        eigenvalues, vectors = np.linalg.eigh(A)
        floor = common.FLAT_CURVATURE * max(1.0, float(eigenvalues[-1]))
        step = vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(eigenvalues), floor))
        decrement = float(gradient @ step)
        if eigenvalues[0] > floor and decrement < tol.JOINT_ARRIVED:
            return x, A
        scale = 1.0 / np.sqrt(np.maximum(np.abs(np.diag(A)), 1.0))
        length = 1.0
        while length > tol.LEAST_STEP:
            trial = density(x + length * step)
            if trial[0] >= value + common.ARMIJO * length * decrement - common.GAIN_ROUNDING * abs(value):
                break
            length /= 2
        else:
            if eigenvalues[0] > floor and decrement < common.LEFT:
                return x, A
            break
        x = x + length * step
        value, gradient = trial
    raise LocalFailure(
        "no joint mode of (φ, θ) was found, as where a scale goes to zero. Use "
        "local=fedppl.local.NestedLaplace() or fedppl.local.NUTS()"
    )


def moments_of(mean: Array, covariance: Array, skewness: Array, diagnostics: Mapping[str, float]) -> Moments:
    """Moments whose precision is the inverse of the covariance."""
    precision = np.linalg.inv(covariance)
    return Moments(mean, (covariance + covariance.T) / 2, (precision + precision.T) / 2, skewness, diagnostics)


def gaussian_moments(x: Array, A: Array, m: int, diagnostics: Mapping[str, float]) -> Moments:
    """Moments of the first m coordinates of N(x, A⁻¹)."""
    covariance = np.asarray(np.linalg.inv(A), dtype=np.float64)
    return moments_of(x[:m], covariance[:m, :m], np.zeros(m), diagnostics)


def gaussian_draws(
    x: Array, A: Array, m: int, draws: int, chains: int, rng: Rng, diagnostics: Mapping[str, float]
) -> Draws:
    """Draws of N(x, A⁻¹), split into φ and θ."""
    z = rng.normal(size=(chains, draws, len(x)))
    sample = x + z @ np.linalg.inv(np.linalg.cholesky(A))
    return Draws(sample[..., :m], sample[..., m:], {"ess": float(chains * draws), **diagnostics})


def local_mode(client: ClientView, phi: Array) -> tuple[bool, Array]:
    """Whether a search from the declared start arrives at a mode of θ at φ (m,), and where it ended."""
    of, one = pairs.one(client.kernel, len(phi), client.packed), np.zeros(1, dtype=np.int64)
    ends = pairs.modes(of, phi[None], client.initial[None], one)
    return bool(ends.arrived[0]), ends.theta[0]


def inference(
    name: str, tilted: Callable[..., Moments], draw: Callable[..., Draws], settings: NamedTuple, **more: Any
) -> LocalInference:
    """A local inference whose functions take its settings."""
    more = {"check": lambda client: None, "expand": None, "settings": settings._asdict(), **more}
    tilted, draw = functools.partial(tilted, settings=settings), functools.partial(draw, settings=settings)
    return LocalInference(name, tilted=tilted, draw=draw, **more)


# The rule of the keyword `local`: an algorithm's local inference ------------------------------------------------------

_INFERENCES = ("NestedLaplace", "NUTS", "ADVI", "MeanField", "Laplace", "GradientSteps")


def local_inference(name: str, value: Any, default: LocalInference) -> LocalInference:
    """A local inference; None is the default."""
    if value is None:
        return default
    if isinstance(value, LocalInference):
        return value
    word = value.replace("_", "").replace(" ", "").casefold() if isinstance(value, str) else ""
    builder = next((one for one in _INFERENCES if one.casefold() == word), None)
    if builder is not None:
        raise DeclarationError(f"{name}={value!r} is text; pass fedppl.local.{builder}(), with its settings.")
    remedy = not_called(value) or "; pass one, such as fedppl.local.NestedLaplace() or fedppl.local.NUTS()."
    raise DeclarationError(f"{name}={shown(value)} is no local inference{remedy}")
