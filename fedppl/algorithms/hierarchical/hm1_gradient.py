"""FedLin's Algorithm 1 as written: HM1 by local gradient steps and a shrinkage step, Ω by a moving average.

It is for comparison and for models too large for `HM1`: its prior is over-weighted, see the notes of `HM1Gradient`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl import contracts, gaussian
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.averaging.fedavg import (
    KeptLocal,
    LocalClientState,
    descended,
    draw,
    local_mode_at,
    not_positive,
    report,
)
from fedppl.contracts import ClientUpdate, ClientView, Expansion, LocalInference, Received, Report
from fedppl.gaussian import Gaussian
from fedppl.local.gradient_steps import Descent, Objective, check_batches, checked
from fedppl.local.target import at_points
from fedppl.numerics import tolerances as common
from fedppl.numerics.pairs import difference_hessian
from fedppl.settings import between, described, one_of, positive
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, Rng, Status


class HM1GradientState(NamedTuple):
    """What the next round needs."""

    where: Mapping[str, int]  # client id to its row
    center: Array  # μ₀ of the declared prior N(μ₀, s² I), (m,)
    theta: Array  # (K, m)
    omega: Array  # (K, K)
    pulls: Array  # (K, m) aggregated vectors Σ_i (θ_i − μ₀) Ω⁻¹_ik of the explicit step


class HM1GradientInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # largest |Δ θ|
    smallest: float  # eigenvalue of Ω; the explicit step needs learning_rate below it


def HM1Gradient(
    *,
    learning_rate: float,
    steps: int = 20,
    batch_size: int | None = None,
    alpha: float = 0.1,
    prior_step: str = "explicit",
    tolerance: float = 1e-6,
) -> contracts.Algorithm[HM1GradientState, LocalClientState]:
    r"""HM1 by gradient steps (FedLin, Algorithm 1).

    .. math:: \theta_k &\leftarrow \theta_k + 2\eta\, \partial \log p(y_k^b \mid \theta_k), \quad T \text{ times} \\
              \theta_k &\leftarrow \theta_k - 2\eta \sum_i \theta_i \Omega^{-1}_{ik} \\
              \Omega &\leftarrow (1 - \alpha)\, \Omega + \alpha\, \Theta^\top \Theta / d

    With a declared noise of 1 and a standard normal prior these are the paper's lines. A declared prior N(μ₀, s² I)
    shifts θ by μ₀ and lets Ω start at s² I.

    Parameters
    ----------
    learning_rate
        Learning rate η for the *summed* −2 log p with ``prior_step="explicit"``, for the mean over a client's rows with
        "proximal". Local variables take the same steps and stay at the client.
    steps
        Number T of local gradient steps a round.
    batch_size
        Number of rows a step, their gradients summed as the paper has it; None for all of them.
    alpha
        Weight of the newest moment in Ω; the paper's default is 0.1.
    prior_step
        Form of the shrinkage step: "explicit", as written, or "proximal": the server takes
        :math:`\Theta \leftarrow \Theta\, (\Omega + 2S)^{-1} \Omega` after the data steps, with S diagonal,
        :math:`S_{kk} = T \eta / n_k`. It is stable for any Ω, also a singular one, and weighs the prior once per data
        step and row.
    tolerance
        Bound on the change of a parameter in a round, below which a fit has converged.

    Returns
    -------
    Algorithm
        Its fit has ``theta`` and ``omega`` in ``fit.idata["fit"]``, points without standard errors.

    Raises
    ------
    DeclarationError
        For settings out of range; in a fit, if the prior of the shared variables is not N(μ₀, s² I).

    Notes
    -----
    *When this fails.* Often, with ``prior_step="explicit"``. There is one shrinkage step for T data steps, so that the
    fixed point shrinks too much where noise is small. The shrinkage is stable only while η is below the smallest
    eigenvalue of Ω, which goes to zero when K is larger than d. `HM1` has neither problem.

    References
    ----------
    .. [1] FedLin, section 3, Algorithm 1.
    """
    descent = checked(learning_rate, steps, batch_size)
    alpha = between("alpha", alpha, 0, 1, hint="the paper's default is 0.1")
    prior_step = one_of("prior_step", prior_step, ("explicit", "proximal"), "explicit is the paper's")
    tolerance = positive("tolerance", tolerance)
    explicit = prior_step == "explicit"
    return contracts.Algorithm[HM1GradientState, LocalClientState](
        name="HM1 by gradient steps",
        settings=described(descent, alpha=alpha, prior_step=prior_step, tolerance=tolerance),
        init=_init,
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, descent=descent, explicit=explicit),
        update_server=functools.partial(_update_server, alpha=alpha, explicit=explicit, tolerance=tolerance),
        replies=contracts.Replies(
            lambda state: {"theta": state.center.shape, "step": ()}, lambda state, reply: not_positive(reply, "step")
        ),
        result=contracts.Result(_final_message, functools.partial(draw, name="theta"), details=_details),
        needs=contracts.Needs(functools.partial(_check, descent=descent)),
        disclosure=contracts.Disclosure(functools.partial(at_points, name="theta")),
    )


def _check(client: ClientView, *, descent: Descent) -> None:
    _start(client.layout)
    check_batches(client, descent.batch_size)


def _start(layout: Layout) -> tuple[Array, float]:
    """Read μ₀ and s² off the declared prior N(μ₀, s² I), or reject another one."""
    frame = frame_of(layout)
    variance = float(frame.root[0, 0] ** 2)
    if not np.allclose(frame.root, frame.root[0, 0] * np.eye(layout.size), rtol=tol.ISOTROPIC, atol=tol.ISOTROPIC_ZERO):
        needs = "Algorithm 1 needs shared variables with one sd and without correlation"
        raise DeclarationError(f"{needs}: declare pm.Normal(0, 1) and scale predictors, or use fedppl.HM1().")
    return frame.center, variance


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> HM1GradientState:
    center, variance = _start(layout)
    where = {client_id: k for k, client_id in enumerate(clients)}
    theta = np.tile(center, (len(clients), 1))
    return HM1GradientState(where, center, theta, variance * np.eye(len(clients)), np.zeros_like(theta))


def _broadcast(state: HM1GradientState, client_id: str) -> Message:
    """The client's own parameters, and the aggregated vector Σ_i θ_i Ω⁻¹_ik."""
    k = state.where[client_id]
    return {"theta": state.theta[k], "pull": state.pulls[k]}


def _update_client(
    client: ClientView, personal: KeptLocal, message: Message, rng: Rng, *, descent: Descent, explicit: bool
) -> ClientUpdate[LocalClientState]:
    """T data steps, then the shrinkage."""
    theta, pull = (np.asarray(message[name], dtype=float) for name in ("theta", "pull"))
    m, rows = len(theta), client.rows
    share = min(descent.batch_size or rows, rows) / rows  # a batch's gradient comes weighted by its inverse
    objective = Objective(2.0 * share if explicit else 2.0 / rows, np.zeros((m, m)), np.zeros(m))
    after, kept, _, info = descended(client, personal and personal.local, theta, objective, descent, rng)
    step = descent.learning_rate * descent.steps / rows  # S_kk
    reply = {"theta": after - 2.0 * descent.learning_rate * pull, "step": np.array(step)}
    return ClientUpdate(kept, reply, info)


def _update_server(
    state: HM1GradientState, received: Received, *, alpha: float, explicit: bool, tolerance: float
) -> tuple[HM1GradientState, Report]:
    """Put the columns in place, shrink them all at once with the proximal step, and average Ω."""
    if not received.clients:
        return state, Report(HM1GradientInfo(np.nan, np.nan))
    eta, steps = state.theta - state.center, np.zeros(len(state.where))  # no data steps at clients without a reply
    for client_id, reply in received.each.items():
        k = state.where[client_id]
        eta[k], steps[k] = reply["theta"] - state.center, float(reply["step"])
    if not explicit:
        eta = state.omega @ np.linalg.solve(state.omega + 2.0 * np.diag(steps), eta)
    if not np.all(np.isfinite(eta)) or float(np.abs(eta).max()) > tol.DIVERGED:
        message = "the shrinkage step diverged; lower learning_rate= or alpha=, or use prior_step='proximal', or HM1"
        return state, Report(HM1GradientInfo(np.inf, np.nan), Status.STALLED, message)
    omega = (1.0 - alpha) * state.omega + alpha * eta @ eta.T / eta.shape[1]
    theta = state.center + eta
    pulls = np.linalg.solve(omega, eta) if explicit else np.zeros_like(eta)
    change = float(np.max(np.abs(theta - state.theta)))
    message = f"θ moved by {change:.2g} in the last round; raise rounds="
    info = HM1GradientInfo(change, float(np.linalg.eigvalsh(omega)[0]))
    return state._replace(theta=theta, omega=omega, pulls=pulls), report(info, change < tolerance, message)


def _final_message(state: HM1GradientState, client_id: str) -> Message:
    return {"theta": state.theta[row_of(state.where, client_id)]}


def _details(state: HM1GradientState) -> contracts.Details:
    return {"theta": (("client", "rows"), state.theta), "omega": (("client", "other_client"), state.omega)}


# A client's exact solve: the mode of its parameters given a Gaussian prior, and its likelihood's expansion there ------


class Frame(NamedTuple):
    """The declared prior N(μ₀, L Lᵀ), which whitens θ: η = L⁻¹(θ − μ₀)."""

    center: Array  # μ₀, (m,)
    root: Array  # L, (m, m)

    def colour(self, g: Gaussian) -> Gaussian:
        """The Gaussian of θ by that of η."""
        inverse = np.linalg.inv(self.root)
        precision = inverse.T @ g.precision @ inverse
        return Gaussian(inverse.T @ g.linear + precision @ self.center, (precision + precision.T) / 2)


def frame_of(layout: Layout) -> Frame:
    """Read the frame off the declared prior, which must be Gaussian."""
    if not layout.prior_is_gaussian:
        names = [variable.name for variable in layout.variables]
        raise DeclarationError(f"the prior of {names} is not Gaussian on the unconstrained space: declare pm.Normal.")
    root = np.linalg.cholesky(gaussian.covariance(layout.prior)).astype(np.float64)
    return Frame(gaussian.mean(layout.prior), root)


def row_of(where: Mapping[str, int], client_id: str) -> int:
    """The place of a client that took part; others have no parameters."""
    if client_id not in where:
        raise DeclarationError(f"client {client_id!r} did not take part; fit HM1 again with it, or use fedppl.EP().")
    return where[client_id]


def mode_given(
    client: ClientView, local: LocalInference, start: Array, pull: Array, weight: float
) -> tuple[Array, Array, Array, dict[str, float]]:
    """Mode of log f_k(μ₀ + L η) + pullᵀη − ½ weight ‖η‖² by damped Newton.

    Returns the expansion of log f_k there as a factor of η, (m,) and (m, m), φ at the mode, and diagnostics.
    """
    assert local.expand is not None
    frame = frame_of(client.layout)

    def height(expansion: Expansion, eta: Array) -> float:
        return expansion.value + float(pull @ eta) - 0.5 * weight * float(eta @ eta)

    eta, expansion = start, local.expand(client, frame.center + frame.root @ start, 0.0)
    for taken in itertools.count():
        gradient = frame.root.T @ expansion.gradient
        curvature = -frame.root.T @ expansion.hessian @ frame.root
        slope = gradient + pull - weight * eta
        values, vectors = np.linalg.eigh(curvature + weight * np.eye(len(eta)))
        floor = tol.MODE_FLOOR * max(1.0, float(np.abs(values).max()))
        step = vectors @ ((vectors.T @ slope) / np.maximum(np.abs(values), floor))
        decrement = float(slope @ step)
        if decrement < tol.MODE_ARRIVED:
            break
        if taken == tol.ALONE_STEPS:
            raise LocalFailure(
                f"{tol.ALONE_STEPS} Newton steps did not reach the mode; are the data enough for the model?"
            )
        here, length = height(expansion, eta), 1.0
        while length > tol.MODE_STEP:
            trial = eta + length * step
            there = _attempt(client, local, frame.center + frame.root @ trial)
            slack = common.ARMIJO * length * decrement - tol.MODE_ROUNDING * (1.0 + abs(here))
            if there is not None and height(there, trial) - here >= slack:
                eta, expansion = trial, there
                break
            length /= 2
        else:
            if decrement < common.LEFT:
                break
            raise LocalFailure(f"no step improves the client's posterior (Newton decrement {decrement:.3g})")
    phi = frame.center + frame.root @ eta
    # Curvature at local variables that are fixed at their mode.
    x, m = np.concatenate([phi, local_mode_at(client, phi)]), len(phi)
    fixed = -difference_hessian(client.kernel, x, np.full(len(x), common.START_LENGTH), client.packed)[:m, :m]
    given_local = frame.root.T @ fixed @ frame.root
    precision, raised = _no_less_than(curvature, given_local)
    info = {"newton_steps": float(taken), "raised": float(raised)}
    return gradient + precision @ eta, precision, phi, info


def _no_less_than(curvature: Array, reference: Array) -> tuple[Array, int]:
    """Raise curvature to at least `LEAST_OF_FIXED` of the reference in every direction, and count the raised ones.

    An unknown noise gives a likelihood that bends outwards, and a factor without positive curvature pulls without end.
    """
    values, axes = np.linalg.eigh(reference)
    scale = float(np.abs(values).max())
    informed = np.abs(values) > tol.MODE_FLOOR * scale  # the data have no information in the other directions
    root = axes[:, informed] * np.sqrt(np.abs(values[informed]))
    back = axes[:, informed] / np.sqrt(np.abs(values[informed]))
    relative, directions = np.linalg.eigh(back.T @ curvature @ back)
    root = root @ directions
    precision = (root * np.maximum(relative, tol.LEAST_OF_FIXED)) @ root.T
    return (precision + precision.T) / 2, int(np.sum(relative < tol.LEAST_OF_FIXED))


def _attempt(client: ClientView, local: LocalInference, phi: Array) -> Expansion | None:
    """The expansion, or None where there is none, so that a shorter step is tried."""
    assert local.expand is not None
    try:
        expansion = local.expand(client, phi, 0.0)
    except LocalFailure:
        return None
    return expansion if np.isfinite(expansion.value) and np.all(np.isfinite(expansion.hessian)) else None


def reported(client: ClientView, names: tuple[str, ...], phi: Array, theta: Array | None) -> dict[str, float]:
    """Scalar local variables and deterministics by name, at φ and at the mode of θ there."""
    at = local_mode_at(client, phi) if theta is None else theta
    values = client.constrain(phi[None], at[None])
    for name in names:
        if name not in values or np.size(values[name]) != 1:
            scalars = [scalar for scalar, value in values.items() if np.size(value) == 1]
            raise DeclarationError(f"report names {name!r}, but scalar local variables are {scalars}.")
    return {name: float(np.ravel(values[name])[0]) for name in names}
