"""FedLin's Algorithm 1 as written: HM1 by local gradient steps and a shrinkage step, Ω by a moving average.

Kept for comparison and for models too large for `HM1`: its prior is over-weighted, see the notes of `HM1Gradient`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl import contracts
from fedppl.algorithms.averaging.point import KeptLocal, LocalClientState, draw_point, fitting_local, kept_local
from fedppl.algorithms.averaging.server import not_positive
from fedppl.algorithms.hierarchical._at_mode import frame_of, row_of
from fedppl.contracts import ClientUpdate, ClientView, Draws, Received, Report
from fedppl.local.descent import Descent, Objective, check_batches, checked, descend
from fedppl.local.target import at_points
from fedppl.settings import between, described, one_of, positive
from fedppl.types import Array, DeclarationError, Layout, Message, Rng, Status

_DIVERGED = 1e8  # in declared prior sds: nobody's parameters are there


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

    With a declared noise of 1 and a standard normal prior these are the paper's lines, since
    :math:`\partial \log p = X^\top (y - X\theta)`. Everybody's θ_i in the shrinkage is that of the round's start. A
    declared prior N(μ₀, s² I) shifts θ by μ₀ and lets Ω start at s² I.

    Parameters
    ----------
    learning_rate
        Learning rate η for the *summed* −2 log p with ``prior_step="explicit"``, for the mean over a client's rows with
        "proximal". Local variables of the declaration take the same steps and stay at the client.
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

    Examples
    --------
    >>> import fedppl
    >>> fedppl.HM1Gradient(learning_rate=0.01).name
    'HM1 by gradient steps'

    Notes
    -----
    *When this fails.* Often, with ``prior_step="explicit"``. One shrinkage step stands against T data steps and σ² is
    in neither, so that its fixed point is no posterior mode: it shrinks too much where noise is small. The shrinkage
    is stable only while η is below the smallest eigenvalue of Ω, which goes to zero like (1 − α)^C when K is larger
    than d. `HM1` has none of this. A run that diverges ends as "stalled" and says which setting to change.

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
            lambda state: {"theta": state.center.shape, "step": ()}, lambda state, reply: not_positive(reply, step=0)
        ),
        result=contracts.Result(_final_message, _draw, details=_details),
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
    if not np.allclose(frame.root, frame.root[0, 0] * np.eye(layout.size), rtol=1e-9, atol=1e-12):
        raise DeclarationError(
            "Algorithm 1 has no covariance between coordinates: declare the shared variables with one sd and without "
            "correlation, as pm.Normal(0, 1) has, and scale the predictors instead; or use fedppl.HM1()."
        )
    return frame.center, variance


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> HM1GradientState:
    """Θ = μ₀ and Ω = s² I."""
    del rng
    count = len(clients)
    center, variance = _start(layout)
    where = {client_id: k for k, client_id in enumerate(clients)}
    theta = np.tile(center, (count, 1))
    omega = variance * np.eye(count)
    return HM1GradientState(where, center, theta, omega, np.zeros_like(theta))


def _broadcast(state: HM1GradientState, client_id: str) -> Message:
    """The client's own parameters, and the aggregated vector Σ_i θ_i Ω⁻¹_ik."""
    k = state.where[client_id]
    return {"theta": state.theta[k], "pull": state.pulls[k]}


def _update_client(
    client: ClientView, personal: KeptLocal, message: Message, rng: Rng, *, descent: Descent, explicit: bool
) -> ClientUpdate[LocalClientState]:
    """T data steps, then the shrinkage."""
    theta, pull = (np.asarray(message[name], dtype=float) for name in ("theta", "pull"))
    local, info = kept_local(client, personal and personal.local)
    m, rows = len(theta), client.rows
    share = min(descent.batch_size or rows, rows) / rows  # a batch's gradient comes weighted by its inverse
    scale = 2.0 * share if explicit else 2.0 / rows
    objective = Objective(scale, np.zeros((m, m)), np.zeros(m))
    x = descend(client, np.concatenate([theta, local]), objective, descent, rng)
    moved = x[:m] - 2.0 * descent.learning_rate * pull
    step = descent.learning_rate * descent.steps / rows  # S_kk
    return ClientUpdate(LocalClientState(x[m:]), {"theta": moved, "step": np.array(step)}, info)


def _update_server(
    state: HM1GradientState, received: Received, *, alpha: float, explicit: bool, tolerance: float
) -> tuple[HM1GradientState, Report]:
    """Put the columns in place, shrink them all at once if that is the server's part, and average Ω."""
    if not received.clients:
        return state, Report(HM1GradientInfo(np.nan, np.nan))
    eta, steps = state.theta - state.center, np.zeros(len(state.where))  # no data steps at clients without a reply
    for client_id, reply in received.each.items():
        k = state.where[client_id]
        eta[k], steps[k] = reply["theta"] - state.center, float(reply["step"])
    if not explicit:
        eta = state.omega @ np.linalg.solve(state.omega + 2.0 * np.diag(steps), eta)
    if not np.all(np.isfinite(eta)) or float(np.abs(eta).max()) > _DIVERGED:
        message = "the shrinkage step diverged; lower learning_rate= or alpha=, or use prior_step='proximal', or HM1"
        return state, Report(HM1GradientInfo(np.inf, np.nan), Status.STALLED, message)
    omega = (1.0 - alpha) * state.omega + alpha * eta @ eta.T / eta.shape[1]
    theta = state.center + eta
    pulls = np.linalg.solve(omega, eta) if explicit else np.zeros_like(eta)
    change = float(np.max(np.abs(theta - state.theta)))
    done = change < tolerance
    message = "" if done else f"θ moved by {change:.2g} in the last round; raise rounds="
    status = Status.CONVERGED if done else Status.RUNNING
    info = HM1GradientInfo(change, float(np.linalg.eigvalsh(omega)[0]))
    return state._replace(theta=theta, omega=omega, pulls=pulls), Report(info, status, message)


def _final_message(state: HM1GradientState, client_id: str) -> Message:
    """θ_k."""
    return {"theta": state.theta[row_of(state.where, client_id)]}


def _draw(client: ClientView, personal: KeptLocal, message: Message, draws: int, chains: int, rng: Rng) -> Draws:
    """The client's point."""
    del rng
    theta = np.asarray(message["theta"], dtype=float)
    return draw_point(client, theta, fitting_local(client, personal and personal.local), draws, chains)


def _details(state: HM1GradientState) -> contracts.Details:
    """Θ and Ω."""
    return {"theta": (("client", "rows"), state.theta), "omega": (("client", "other_client"), state.omega)}
