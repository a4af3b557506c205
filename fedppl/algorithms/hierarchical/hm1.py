"""HM1: clients' parameters under a matrix normal prior whose covariance over clients is estimated (FedLin, section 3).

The server holds one quadratic factor per client, the joint posterior they give, and Ω; a client solves exactly for its
own parameters, given one aggregated vector. `HM1Gradient` is the paper's Algorithm 1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedppl import contracts, gaussian, settings
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.hierarchical.hm1_gradient import Frame, frame_of, mode_given, reported, row_of
from fedppl.contracts import Asked, ClientUpdate, ClientView, LocalInference, Received, Report
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, draw_target, local_inference, pack_target
from fedppl.numerics.covariance import Covariance, Omega, exchangeable
from fedppl.types import Array, DeclarationError, Layout, Message, Rng, Status


class HM1State(NamedTuple):
    """What the next round needs. Parameters are whitened: θ = μ₀ + L η under the declared prior N(μ₀, L Lᵀ)."""

    where: Mapping[str, int]  # client id to its row
    frame: Frame  # μ₀, L
    factors: Gaussian  # r_k (K, m) and H_k (K, m, m)
    has_replied: Array  # (K,) bool
    omega: Omega
    mean: Array  # (K, m)
    covariance: Array  # (K, m, m)
    given: Given


class Given(NamedTuple):
    """η_k given the others at their means."""

    pulls: Array  # (K, m) aggregated vectors −Σ_{i≠k} η_i Ω⁻¹_ik
    weights: Array  # (K,) Ω⁻¹_kk


class HM1Info(NamedTuple):
    """Diagnostics of this round."""

    change_mean: float  # largest |Δ θ| in posterior sds
    change_omega: float  # ‖Δ Ω‖ / ‖Ω‖


def HM1(
    *,
    structure: Covariance | None = None,
    local: LocalInference | None = None,
    tolerance: float = 0.01,
    report: Sequence[str] = (),
) -> contracts.Algorithm[HM1State, None]:
    r"""Borrow strength between clients whose parameters are correlated (FedLin, HM1), by exact solves.

    .. math:: \Theta = (\theta_1, \ldots, \theta_K) \sim \mathcal{MN}(\mu_0 1^\top, A, \Omega), \qquad
              y_k \sim p(y \mid \theta_k)

    The shared variables of the declaration are θ_k here: every client has its own, and what is shared is their
    distribution. Their declared prior N(μ₀, A) is that of one client; Ω (K, K), the covariance over clients, is
    estimated. With Ω = I clients are independent, which is `Separate`. The paper has μ₀ = 0 and A = I.

    A round: the server sends client k the aggregated vector :math:`-\sum_{i \neq k} \theta_i \Omega^{-1}_{ik}`; the
    client finds the mode of θ_k given it, by Newton steps on its likelihood, local variables integrated out, and
    replies with the quadratic expansion there. The server solves for all clients at once and takes EM steps for Ω,
    with the moment E[ΘᵀΘ] / d that counts posterior covariances.

    Parameters
    ----------
    structure
        Form of Ω, from `fedppl.covariance`: by default `exchangeable`, which is never much worse than independent
        clients; `low_rank`, `ledoit_wolf`, `trace_constrained`, or the paper's `moving_average`. Choose by
        `validation_loss`.
    local
        A local inference that offers expansions; by default `NestedLaplace`.
    tolerance
        Bound on the change of a mean in a round, in posterior sds, and on the relative change of Ω, below which a fit
        has converged.
    report
        Names of scalar local variables or deterministics, ``["sigma"]`` for example, that clients send along: their
        values at the mode, as columns of ``fit.idata["rounds"]``. By default none leaves a client.

    Returns
    -------
    Algorithm
        Its fit has ``fit.idata["fit"]`` with ``theta`` and ``theta_sd`` (client, rows), and ``omega`` and
        ``correlation`` (client, other_client): the device graph. All on the unconstrained space.

    Raises
    ------
    DeclarationError
        In a fit, if the prior of the shared variables is not Gaussian, or `local` offers no expansions.

    Notes
    -----
    The server's part costs of the order of (K d)³ operations, or K d³ + (q d)³ where Ω has q factors.

    Standard errors take Ω as known, and a client's likelihood for Gaussian, which draws of `Fit.client` do not: with 15
    rows for 3 coefficients and an unknown noise they were a sixth too small. There a client's likelihood of θ bends
    outwards far from its own estimate, and a fifth of the curvature at a fixed noise is used; diagnostic `raised`
    counts such directions. At the end there should be none.

    *When this fails.* A parameter that a client's data alone hardly identify, a variance of its effects for example,
    has a likelihood that is far from quadratic: clients then fail, or Ω grows; leave such parameters local or share
    them by `EP`. The prior is not invariant to the basis: choose the basis, or the declared A, with care. Clients that
    did not take part have no posterior: use `EP`.

    References
    ----------
    .. [1] FedLin, section 3, eq. 2.
    """
    tolerance = settings.between("tolerance", tolerance, 0, 1, hint="it is in posterior sds")
    is_list = isinstance(report, Sequence) and not isinstance(report, str)
    if not is_list or not all(isinstance(name, str) for name in report):
        raise DeclarationError(f'report={settings.shown(report)} must be a list of names, such as ["sigma"].')
    chosen = exchangeable() if structure is None else structure
    if not isinstance(chosen, Covariance):
        raise DeclarationError(
            f"structure={settings.shown(chosen)} must be one that is built, like fedppl.covariance.exchangeable()."
        )
    inference = local_inference("local", local, NestedLaplace())
    if inference.expand is None:
        raise DeclarationError(
            f"HM1 needs a local inference with expansions, as NestedLaplace(); {inference.name} has none."
        )
    return contracts.Algorithm[HM1State, None](
        name="HM1",
        settings=settings.described(
            {"structure": chosen, "local": inference, "tolerance": tolerance, "report": tuple(report)}
        ),
        init=functools.partial(_init, structure=chosen),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, local=inference, report=tuple(report)),
        update_server=functools.partial(_update_server, structure=chosen, tolerance=tolerance),
        replies=contracts.Replies(_shapes, _reject),
        result=contracts.Result(
            _final_message, functools.partial(draw_target, local=inference), details=_details, tests_convergence=True
        ),
        needs=contracts.Needs(functools.partial(_check, local=inference, report=tuple(report))),
        disclosure=contracts.Disclosure(_asks, concludes=at_target),
    )


def _check(client: ClientView, *, local: LocalInference, report: tuple[str, ...]) -> None:
    local.check(client)
    frame_of(client.layout)
    if report:
        reported(client, report, client.layout.prior.linear * 0.0, client.initial)


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, structure: Covariance) -> HM1State:
    count, m = len(clients), layout.size
    omega = structure.start(count)
    if (rank := int(structure.settings.get("rank", 0))) >= m:
        needs = f"{structure.describe()} needs more than {rank} coordinates of θ, and there are {m}"
        raise DeclarationError(f"{needs}; use a smaller rank, or fedppl.covariance.exchangeable().")
    return HM1State(
        where={client_id: k for k, client_id in enumerate(clients)},
        frame=frame_of(layout),
        factors=Gaussian(np.zeros((count, m)), np.zeros((count, m, m))),
        has_replied=np.zeros(count, dtype=bool),
        omega=omega,
        mean=np.zeros((count, m)),
        covariance=np.broadcast_to(np.eye(m), (count, m, m)).copy(),
        # A factor describes a likelihood best near the client's own estimate, and Ω is first estimated from such ones.
        given=Given(np.zeros((count, m)), np.full(count, tol.FIRST_WEIGHT)),
    )


def _broadcast(state: HM1State, client_id: str) -> Message:
    """Where to start, the aggregated vector, and the weight of the prior: θ_k given the others."""
    k = state.where[client_id]
    return {"start": state.mean[k], "pull": state.given.pulls[k], "weight": np.array(state.given.weights[k])}


def _asks(layout: Layout, message: Message) -> Asked:
    """Where Newton's steps begin, and the mean given the other clients: it draws the mode that is expanded at."""
    frame = frame_of(layout)
    start, pull = (np.asarray(message[name], dtype=float) for name in ("start", "pull"))
    given = pull / float(message["weight"])
    return Asked(frame.center + np.stack([start, given]) @ frame.root.T, np.zeros((0, layout.size)))


def _update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, local: LocalInference, report: tuple[str, ...]
) -> ClientUpdate[None]:
    """Solve for θ_k given the others, and reply the likelihood's expansion there. Clients keep no state."""
    start, pull = (np.asarray(message[name], dtype=float) for name in ("start", "pull"))
    linear, precision, phi, info = mode_given(client, local, start, pull, float(message["weight"]))
    if report:
        info |= reported(client, report, phi, None)
    return ClientUpdate(None, {"linear": linear, "precision": gaussian.pack_triangle(precision)}, info)


def _shapes(state: HM1State) -> Mapping[str, tuple[int, ...]]:
    m = state.mean.shape[1]
    return {"linear": (m,), "precision": (m * (m + 1) // 2,)}


def _reject(state: HM1State, reply: Message) -> str | None:
    """A factor must be integrable against the prior, and not put its client implausibly far from it."""
    precision = gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
    values, axes = np.linalg.eigh(precision)
    if values[0] < -tol.INDEFINITE * max(1.0, abs(float(values[-1]))):
        return f"'precision' has eigenvalue {values[0]:.3g}, and must be positive semi-definite"
    if values[-1] > tol.MOST_OF_FACTOR:
        return f"'precision' is implausibly large ({values[-1]:.3g} prior precisions): scale this client's data"
    alone = float(np.abs(axes @ ((axes.T @ reply["linear"]) / (np.maximum(values, 0.0) + 1.0))).max())
    if alone > tol.FARTHEST:
        return f"'linear' puts θ {alone:.3g} prior sds away, implausibly far: scale this client's data"
    return None


def _update_server(
    state: HM1State, received: Received, *, structure: Covariance, tolerance: float
) -> tuple[HM1State, Report]:
    """Replace the factors of the replies, estimate Ω, solve for all clients."""
    if not received.clients:
        return state, Report(HM1Info(np.nan, np.nan))
    linear, precision, has_replied = (part.copy() for part in (*state.factors, state.has_replied))
    for client_id, reply in received.each.items():
        k = state.where[client_id]
        linear[k], has_replied[k] = reply["linear"], True
        precision[k] = gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            omega, coupled = estimate(linear, precision, state.omega, structure, tolerance=tol.EM_SHARE * tolerance)
        is_finite = all(np.all(np.isfinite(value)) for value in (*coupled, omega.matrix))
    except np.linalg.LinAlgError:
        is_finite = False
    if not is_finite:
        return state, _STALLED
    sd = np.sqrt(np.diagonal(coupled.covariance, axis1=1, axis2=2))
    change = float(np.max(np.abs(coupled.mean - state.mean) / sd))
    change_omega = float(np.linalg.norm(omega.matrix - state.omega.matrix) / np.linalg.norm(omega.matrix))
    done = bool(has_replied.all()) and change < tolerance and change_omega < tolerance
    message = _overfitted(omega, precision, structure)
    if not done:
        message = f"θ moved by {change:.2g} sd and Ω by {change_omega:.2g} in the last round; raise rounds="
    factors, given = Gaussian(linear, precision), conditional_priors(omega, coupled.mean)
    after = HM1State(state.where, state.frame, factors, has_replied, omega, coupled.mean, coupled.covariance, given)
    return after, Report(HM1Info(change, change_omega), Status.CONVERGED if done else Status.RUNNING, message)


def _overfitted(omega: Omega, precision: Array, structure: Covariance) -> str:
    """A warning where δ is all but zero next to the mean variance, or that of θ given a client's rows."""
    if "rank" not in structure.settings:  # an exchangeable Ω has one direction, which no data choose
        return ""
    mean = float(np.trace(omega.matrix)) / len(omega.matrix)
    given_rows = 1.0 / max(float(np.median(np.trace(precision, axis1=1, axis2=2))) / precision.shape[1], tol.ABOVE_ZERO)
    if omega.remainder > tol.LITTLE_VARIANCE * mean and omega.remainder > tol.UNRESOLVED * given_rows:
        return ""
    return (
        f"standard errors may be far too small: {structure.describe()} leaves clients {omega.remainder / mean:.1g} of "
        "the mean variance, and may have fitted noise. Use HM1(structure=fedppl.covariance.exchangeable())"
    )


_STALLED = Report(
    HM1Info(np.inf, np.inf),
    Status.STALLED,
    "Ω grew without bound; scale the data so that parameters are of the size of their prior, or choose "
    "structure=fedppl.covariance.exchangeable()",
)


def _final_message(state: HM1State, client_id: str) -> Message:
    """θ_k's posterior, and its cavity without the client's own factor."""
    k = row_of(state.where, client_id)
    marginal = gaussian.from_moments(state.mean[k], state.covariance[k])
    cavity = gaussian.quotient(marginal, Gaussian(*(part[k] for part in state.factors)))
    if not gaussian.is_proper(cavity):  # rounding, where the data outweigh the prior by far
        cavity, _ = gaussian.repair(cavity, tol.REPAIRED)
    return pack_target(state.frame.colour(marginal), state.frame.colour(cavity), 0.0)


def _details(state: HM1State) -> contracts.Details:
    root = state.frame.root
    sd = np.sqrt(np.diagonal(state.omega.matrix))
    spread = np.einsum("ij,kjl,il->ki", root, state.covariance, root)
    return {
        "theta": (("client", "rows"), state.frame.center + state.mean @ root.T),
        "theta_sd": (("client", "rows"), np.sqrt(spread)),
        "omega": (("client", "other_client"), state.omega.matrix),
        "correlation": (("client", "other_client"), state.omega.matrix / np.outer(sd, sd)),
    }


# Posterior of all clients' parameters under a matrix normal prior, from the clients' quadratic factors. NumPy only ----

# p(Θ) ∝ N(vec Θ; 0, Ω ⊗ I) Π_k exp(r_kᵀ θ_k − ½ θ_kᵀ H_k θ_k), exactly, for positive semi-definite H_k. Parameters
# are whitened by the declared prior before they come here.


class Coupled(NamedTuple):
    """Moments of the posterior of Θ."""

    mean: Array  # (K, d)
    covariance: Array  # (K, d, d) of each client
    moment: Array  # (K, K), E[ΘᵀΘ] / d


def posterior(linear: Array, precision: Array, omega: Omega) -> Coupled:
    """Posterior given Ω, from factors r (K, d) and H (K, d, d)."""
    if np.isnan(omega.remainder):
        return _dense(linear, precision, omega.matrix)
    return _low_rank(linear, precision, omega)


def _dense(linear: Array, precision: Array, omega: Array) -> Coupled:
    """By the K d x K d precision: K² d² numbers, of the order of (K d)³ operations."""
    count, size = linear.shape
    joint = np.einsum("kl,ij->kilj", np.linalg.inv(omega), np.eye(size))
    joint[np.arange(count), :, np.arange(count), :] += precision
    covariance = np.linalg.inv(joint.reshape(count * size, -1)).reshape(count, size, count, size)
    mean = np.einsum("kilj,lj->ki", covariance, linear)
    of_clients = covariance[np.arange(count), :, np.arange(count), :]
    return Coupled(mean, _symmetric(of_clients), (np.einsum("kili->kl", covariance) + mean @ mean.T) / size)


def _low_rank(linear: Array, precision: Array, omega: Omega) -> Coupled:
    """By common factors: θ_k = Z u_k + e_k, Z (d, q) standard normal, e_k ~ N(0, δ I); independent given Z."""
    count, size = linear.shape
    delta, U = omega.remainder, omega.factor
    given = np.linalg.inv(precision + np.eye(size) / delta)  # covariances of θ_k given Z
    free = np.einsum("kij,kj->ki", given, linear)
    pull = given / delta  # d E[θ_k | Z] / d (Z u_k)
    rank = U.shape[1]
    # Precision of vec Z: I + Σ_k (u_k u_kᵀ) ⊗ (I − pull_k) / δ, where I − pull_k = given_k H_k
    shares = np.einsum("kij,kjl->kil", given, precision) / delta
    core = np.einsum("ka,kb,kij->aibj", U, U, _symmetric(shares)).reshape(rank * size, rank * size)
    root = np.linalg.inv(np.linalg.cholesky(core + np.eye(rank * size))) if rank else np.zeros((0, 0))
    center = root.T @ (root @ np.einsum("ka,ki->ai", U, free / delta).ravel())
    loading = np.einsum("ka,kij->kiaj", U, pull).reshape(count, size, rank * size)  # of θ_k on vec Z
    mean = free + loading @ center
    half = loading @ root.T  # its outer product is the covariance by Z
    covariance = given + half @ np.swapaxes(half, 1, 2)
    flat = half.reshape(count, -1)
    traces = flat @ flat.T + np.diag(np.trace(given, axis1=1, axis2=2))
    return Coupled(mean, _symmetric(covariance), (traces + mean @ mean.T) / size)


def _symmetric(matrices: Array) -> Array:
    return np.asarray((matrices + np.swapaxes(matrices, -1, -2)) / 2)


def estimate(
    linear: Array,
    precision: Array,
    omega: Omega,
    structure: Covariance,
    *,
    tolerance: float = tol.EM_TOLERANCE,
    limit: int = tol.EM_STEPS,
) -> tuple[Omega, Coupled]:
    """Ω by expectation maximisation, with fixed factors and so without communication."""
    coupled = posterior(linear, precision, omega)
    dense = np.isnan(structure.update(omega, coupled.mean, coupled.moment).remainder)
    repeats = 1 if not structure.to_the_end else (tol.DENSE_EM_STEPS if dense else limit)
    for _ in range(repeats):
        before = omega.matrix
        omega = structure.update(omega, coupled.mean, coupled.moment)
        coupled = posterior(linear, precision, omega)
        if np.linalg.norm(omega.matrix - before) < tolerance * np.linalg.norm(before):
            break
    return omega, coupled


def conditional_priors(omega: Omega, mean: Array) -> Given:
    """θ_k given the others at their means (K, d)."""
    inverse = np.linalg.inv(omega.matrix)
    weights = np.diag(inverse).copy()
    return Given(-(inverse @ mean - weights[:, None] * mean), weights)
