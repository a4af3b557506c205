"""Expectation propagation: the server holds the sites, clients answer with tilted moments.

Two phases. Warm start (federated Newton): each client expands log f_k at the current point; the expansions are
the sites. Refinement (EP): each client matches moments of its tilted distribution. Always q = prior x Π sites.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.gaussian import Gaussian, Structure
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.types import Algorithm, Array, DeclarationError, Layout, LocalInference, Message, Status, Target

__all__ = ["EP", "EPInfo", "EPState"]

_WARM, _REFINE = 0, 1


class EPState(NamedTuple):
    """What the next round needs. Invariant: q = prior x Π_k site_k."""

    clients: tuple[str, ...]
    structure: Structure
    prior: Gaussian  # full precision (m, m)
    linear: Array  # (K, m) sites' r_k
    precision: Array  # (K, p) sites' Q_k, packed
    values: Array  # (K,) constants of the sites' expansions, warm start only
    prior_share: float
    phase: int
    point: Array  # (m,) where clients expand next
    anchor: Array  # (m,) where the sites were expanded
    objective: float  # log marginal posterior at the anchor
    radius: float  # trust radius in prior sds
    damping: float
    change: float  # of the last round
    averaging: int  # rounds averaged since the change was down to Monte Carlo error
    heard: Array  # (K,) bool: replied since the last full sweep
    sweep_change: float  # change over the current sweep
    status: str
    message: str


class EPInfo(NamedTuple):
    """This round's diagnostics."""

    phase: str
    change_mean: float  # largest |Δ mean| in posterior sds, before damping
    change_sd: float  # largest |Δ log sd|, before damping
    damping: float
    log_posterior: float  # log marginal posterior at the point, warm start only
    mc_error: float  # Monte Carlo error of the global mean in posterior sds


def EP(
    *,
    local: LocalInference | None = None,
    tolerance: float = 0.01,
    damping: float = 1.0,
    warm_start: bool = True,
    structure: str | Sequence[Sequence[str]] = "full",
) -> Algorithm:
    r"""Federated expectation propagation with server-held sites (FedLin, Algorithms 2 and 3).

    .. math:: q(\phi) = p(\phi) \prod_k q_k(\phi), \qquad
              q_k \leftarrow q_k \left(\frac{\mathrm{proj}[f_k\, q_{-k}]}{q}\right)^{\delta}

    Parameters
    ----------
    local
        How clients compute tilted moments; by default `NestedLaplace`.
    tolerance
        Converged when a sweep over all clients moves no mean by more than `tolerance` posterior sds and no sd
        by more than that fraction, or by more than Monte Carlo error where replies have one.
    damping
        Largest δ that is tried; it is halved until the global precision and every cavity are positive definite.
    warm_start
        Start with federated Newton rounds where the local inference offers expansions.
    structure
        Form of the precision: "full", "diagonal", or a partition of the shared names into blocks.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        For settings out of range or a partition that is none.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.EP(tolerance=0.02).name
    'EP'

    Notes
    -----
    *When this fails.* The Gaussian family cannot follow a skewed posterior: the largest skewness of the tilted
    distributions is reported per client and round; above about 1, distrust sds and tails. Sites of rough local
    moments (few NUTS draws) can oscillate: the status then says so; raise `draws` or lower `damping`.

    References
    ----------
    .. [1] FedLin, section 4.2, eqs. 3 to 8 and Algorithms 2 and 3.
    .. [2] Vehtari et al. (2020), Expectation propagation as a way of life, JMLR 21.
    """
    if not 0 < tolerance < 1:
        raise DeclarationError(f"tolerance={tolerance} must lie between 0 and 1 posterior sd.")
    if not 0 < damping <= 1:
        raise DeclarationError(f"damping={damping} must lie in (0, 1]; 1 is the undamped step.")
    if isinstance(structure, str) and structure not in ("full", "diagonal"):
        raise DeclarationError(f'structure={structure!r} must be "full", "diagonal" or a list of lists of shared names.')
    inference = local if local is not None else NestedLaplace()
    warm = warm_start and inference.expand is not None
    return Algorithm(
        name="EP",
        check=inference.check,
        init_server=functools.partial(_init_server, structure=structure, damping=damping, warm=warm),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, local=inference),
        reply_shapes=_reply_shapes,
        update_server=functools.partial(_update_server, tolerance=tolerance, largest=damping),
        posterior=_posterior,
        cavity=_cavity,
        local=inference,
    )


# --- init ----------------------------------------------------------------------------------------------------


def _structure_of(structure: str | Sequence[Sequence[str]], layout: Layout) -> Structure:
    if structure == "full":
        return gaussian.full(layout.size)
    if structure == "diagonal":
        return gaussian.diagonal(layout.size)
    slices = layout.slices
    blocks = []
    for names in structure:
        for name in names:
            if name not in slices:
                raise DeclarationError(f"structure names {name!r}, but the shared variables are {list(slices)}.")
        blocks.append([i for name in names for i in range(slices[name].start, slices[name].stop)])
    return gaussian.block(layout.size, blocks)


def _init_server(
    layout: Layout,
    clients: tuple[str, ...],
    rng: np.random.Generator,
    *,
    structure: str | Sequence[Sequence[str]],
    damping: float,
    warm: bool,
) -> EPState:
    del rng
    count, form = len(clients), _structure_of(structure, layout)
    mean = gaussian.mean(layout.prior)
    return EPState(
        clients=clients,
        structure=form,
        prior=layout.prior,
        linear=np.zeros((count, layout.size)),
        precision=np.zeros((count, gaussian.packed_size(form))),
        values=np.zeros(count),
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / count,
        phase=_WARM if warm else _REFINE,
        point=mean,
        anchor=mean,
        objective=-np.inf,
        radius=1.5,
        damping=damping,
        change=np.inf,
        averaging=0,
        heard=np.zeros(count, dtype=bool),
        sweep_change=0.0,
        status=Status.RUNNING.value,
        message="",
    )


# --- broadcast -----------------------------------------------------------------------------------------------


def _posterior(state: EPState) -> Gaussian:
    """q = prior x Π sites, always recomputed from the ledger so that nothing drifts."""
    sites = _dense(state.precision.sum(axis=0), state.structure)
    return Gaussian(state.prior.linear + state.linear.sum(axis=0), state.prior.precision + sites)


def _dense(packed: Array, structure: Structure) -> Array:
    precision = gaussian.unpack_precision(packed, structure)
    return np.diag(precision) if structure.blocks is None else precision


def _site(state: EPState, client_id: str) -> Gaussian:
    k = state.clients.index(client_id)
    return Gaussian(state.linear[k], _dense(state.precision[k], state.structure))


def _cavity(state: EPState, client_id: str) -> Gaussian:
    if client_id not in state.clients:
        return _posterior(state)
    return gaussian.quotient(_posterior(state), _site(state, client_id))


def _broadcast(state: EPState, client_id: str) -> Message:
    """The point to expand at, or q and the client's cavity."""
    share = np.array(state.prior_share)
    if state.phase == _WARM:
        return {"point": state.point, "prior_share": share}
    q = _posterior(state)
    cavity = gaussian.quotient(q, _site(state, client_id))
    return {
        "global_linear": q.linear,
        "global_precision": gaussian.pack_triangle(q.precision),
        "cavity_linear": cavity.linear,
        "cavity_precision": gaussian.pack_triangle(cavity.precision),
        "prior_share": share,
    }


# --- client --------------------------------------------------------------------------------------------------


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, local: LocalInference
) -> tuple[Any, Message, Mapping[str, float]]:
    """Expand log f_k at the point, or match moments of the tilted distribution. Clients keep no state."""
    share = float(message["prior_share"])
    if "point" in message:
        assert local.expand is not None
        expansion = local.expand(client, np.asarray(message["point"], dtype=float), share)
        reply = {
            "value": np.array(expansion.value),
            "gradient": expansion.gradient,
            "hessian": gaussian.pack_triangle(expansion.hessian),
        }
        return personal, reply, expansion.diagnostics
    q, cavity = (
        Gaussian(
            np.asarray(message[f"{name}_linear"], dtype=float),
            gaussian.unpack_triangle(np.asarray(message[f"{name}_precision"], dtype=float)),
        )
        for name in ("global", "cavity")
    )
    moments = local.tilted(Target(client, q, cavity, share), rng)
    reply = {
        "mean": moments.mean,
        "precision": gaussian.pack_triangle(moments.precision),
        "mc_error": np.array(moments.diagnostics.get("mc_error", 0.0)),
    }
    return personal, reply, moments.diagnostics


def _reply_shapes(state: EPState) -> dict[str, tuple[int, ...]]:
    m = len(state.point)
    triangle = (m * (m + 1) // 2,)
    if state.phase == _WARM:
        return {"value": (), "gradient": (m,), "hessian": triangle}
    return {"mean": (m,), "precision": triangle, "mc_error": ()}


# --- server --------------------------------------------------------------------------------------------------


def _update_server(
    state: EPState, replies: Mapping[str, Message], *, tolerance: float, largest: float
) -> tuple[EPState, EPInfo]:
    if not replies:
        info = EPInfo("warm start" if state.phase == _WARM else "EP", 0.0, 0.0, state.damping, state.objective, 0.0)
        return state._replace(message="no client sent a usable reply; see the reasons in `rounds`"), info
    if state.phase == _WARM:
        return _newton_step(state, replies)
    return _ep_step(state, replies, tolerance, largest)


def _indices(state: EPState, replies: Mapping[str, Message]) -> list[int]:
    where = {client_id: k for k, client_id in enumerate(state.clients)}
    return [where[client_id] for client_id in replies]


def _newton_step(state: EPState, replies: Mapping[str, Message]) -> tuple[EPState, EPInfo]:
    """Move the point to the maximum of the summed expansions, inside a trust region."""
    index, x = _indices(state, replies), state.point
    value = np.array([float(reply["value"]) for reply in replies.values()])
    gradient = np.stack([reply["gradient"] for reply in replies.values()])
    packed = -np.stack([_as_structure(reply["hessian"], state.structure) for reply in replies.values()])
    linear, precision, values = state.linear.copy(), state.precision.copy(), state.values.copy()
    blocks = np.stack([_dense(row, state.structure) for row in packed])
    precision[index] = packed
    linear[index] = gradient + np.einsum("kij,j->ki", blocks, x)
    values[index] = value - linear[index] @ x + 0.5 * np.einsum("i,kij,j->k", x, blocks, x)
    tried = state._replace(linear=linear, precision=precision, values=values, anchor=x)
    q = _posterior(tried)
    # Clients not heard this round enter by their last expansion.
    objective = float(values.sum() + gaussian.log_kernel(q, x))
    everyone = bool(np.all(state.heard)) or len(replies) == len(state.clients)
    slack = 1e-9 * max(1.0, abs(objective))
    if everyone and np.isfinite(state.objective) and objective < state.objective - slack:
        # worse than where we came from: keep the old expansions and go back part of the way
        point = state.anchor + (x - state.anchor) / 4
        rejected = state._replace(point=point, radius=state.radius / 4, change=np.inf)
        return rejected, EPInfo("warm start", np.inf, np.inf, 0.25, objective, 0.0)
    step, clipped = _trusted_step(q, state.prior, x, state.radius)
    heard = state.heard.copy()
    heard[index] = True
    proper = bool(gaussian.is_proper(q))
    change = float(np.max(np.abs(step) / gaussian.standard_deviations(q))) if proper else np.inf
    arrived = not clipped and proper and change < 0.1 and bool(np.all(heard))
    moved = tried._replace(
        point=x + step,
        objective=objective,
        radius=min(state.radius * 2, 6.0) if clipped else state.radius,
        change=np.inf if arrived else change,
        phase=_REFINE if arrived else _WARM,
        heard=np.zeros_like(heard) if arrived else heard,
        message="" if arrived else "the warm start has not reached the mode; raise rounds=",
    )
    return moved, EPInfo("warm start", change, np.inf, 1.0, objective, 0.0)


def _trusted_step(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool]:
    """Newton step with |eigenvalues| in units of the prior's, no coordinate longer than `radius` prior sds."""
    root = np.linalg.cholesky(prior.precision)
    inverse = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(inverse @ q.precision @ inverse.T)
    gradient = inverse @ (q.linear - q.precision @ x)
    step = vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), 1.0))
    size = float(np.abs(step).max())
    return inverse.T @ (step * min(1.0, radius / max(size, 1e-300))), size > radius or values[0] <= 0


def _as_structure(triangle: Array, structure: Structure) -> Array:
    matrix = gaussian.unpack_triangle(np.asarray(triangle, dtype=float))
    return gaussian.pack_precision(np.diag(matrix) if structure.blocks is None else matrix, structure)


def _ep_step(
    state: EPState, replies: Mapping[str, Message], tolerance: float, largest: float
) -> tuple[EPState, EPInfo]:
    """Damped moment matching, backtracked until q and every cavity are proper."""
    index, q = _indices(state, replies), _posterior(state)
    target_linear, target_packed = _targets(state, replies)
    q_packed = _as_structure(gaussian.pack_triangle(q.precision), state.structure)
    d_linear, d_packed = target_linear - q.linear, target_packed - q_packed
    mc_error = float(np.sqrt(sum(float(reply["mc_error"]) ** 2 for reply in replies.values())))
    improper_before = _improper_cavities(state, q)
    delta = min(state.damping, largest)
    floor = 1.0 / (4 * len(state.clients))
    while True:
        linear, precision = state.linear.copy(), state.precision.copy()
        linear[index] += delta * d_linear
        precision[index] += delta * d_packed
        moved = state._replace(linear=linear, precision=precision)
        new = _posterior(moved)
        if gaussian.is_proper(new) and _improper_cavities(moved, new) <= improper_before:
            break
        delta /= 2
        if delta < floor:  # at most 1 / K is a convex combination and proper; below it, only cavities object
            if gaussian.is_proper(new):
                break
            moved, new = state, q
            break
    sd, new_sd = gaussian.standard_deviations(q), gaussian.standard_deviations(new)
    change_mean = float(np.max(np.abs(gaussian.mean(new) - gaussian.mean(q)) / sd)) / delta
    change_sd = float(np.max(np.abs(np.log(new_sd / sd)))) / delta
    info = EPInfo("EP", change_mean, change_sd, delta, np.nan, mc_error)
    return _judge(state, moved, max(change_mean, change_sd), delta, mc_error, index, tolerance, largest), info


def _targets(state: EPState, replies: Mapping[str, Message]) -> tuple[Array, Array]:
    """Natural parameters of the clients' tilted distributions inside the family."""
    linear, packed = [], []
    for reply in replies.values():
        mean, precision = reply["mean"], gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
        if state.structure.blocks is not None and len(state.structure.blocks) == 1:
            projected = Gaussian(precision @ mean, precision)
        else:
            projected = gaussian.project(mean, np.linalg.inv(precision), state.structure)
        linear.append(projected.linear)
        packed.append(gaussian.pack_precision(projected.precision, state.structure))
    return np.stack(linear), np.stack(packed)


def _improper_cavities(state: EPState, q: Gaussian) -> int:
    cavities = q.precision - np.stack([_dense(row, state.structure) for row in state.precision])
    return int(np.sum(~np.asarray(gaussian.is_proper(Gaussian(q.linear - state.linear, cavities)))))


def _judge(
    before: EPState,
    after: EPState,
    change: float,
    delta: float,
    mc_error: float,
    index: list[int],
    tolerance: float,
    largest: float,
) -> EPState:
    """Set the next damping, and say whether this is converged."""
    noisy = mc_error > 0
    near_noise = noisy and change < 3 * max(mc_error, tolerance)
    averaging = before.averaging + 1 if before.averaging or near_noise else 0
    if averaging:
        damping = max(1.0 / (averaging + 1), 1.0 / len(before.clients), 0.1) * largest
    elif change > before.change:
        damping = max(delta / 2, 1.0 / len(before.clients))
    else:
        damping = min(largest, 1.5 * delta)
    heard = before.heard.copy()
    heard[index] = True
    sweep_change = before.sweep_change + change
    status, message = Status.RUNNING, ""
    limit = max(tolerance, 2 * mc_error)
    if np.all(heard):
        if (sweep_change < tolerance) or (noisy and averaging >= 4 and sweep_change < limit):
            status = Status.CONVERGED
            if sweep_change >= tolerance:
                message = f"to Monte Carlo error ({mc_error:.2g} sd a round, averaged); raise draws= for more"
        heard, sweep_change_next = np.zeros_like(heard), 0.0
    else:
        sweep_change_next = sweep_change
    if status is Status.RUNNING:
        message = f"the last sweep moved q by {sweep_change:.2g} posterior sds (tolerance {tolerance:g}); " + (
            "raise draws= of the local inference or rounds=" if noisy else "raise rounds=, or lower damping="
        )
    return after._replace(
        damping=damping,
        change=change,
        averaging=averaging,
        heard=heard,
        sweep_change=sweep_change_next,
        status=status.value,
        message=message,
    )
