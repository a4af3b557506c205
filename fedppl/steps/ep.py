"""Expectation propagation: the server holds the sites, clients answer with tilted moments.

Two phases. Warm start (federated Newton): each client expands log f_k at the current point; the expansions are
the sites. Refinement (EP): each client matches moments of its tilted distribution. Always q = prior x Π sites.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian, structure
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.steps import _sites, _warm_start
from fedppl.steps._sites import Sites
from fedppl.steps._warm_start import WarmStart
from fedppl.types import Algorithm, Array, DeclarationError, Layout, LocalInference, Message, Status, Target

__all__ = ["EP", "EPInfo", "EPState"]


# With this skewness, quantiles of a margin in the tails are off by a few tenths of an sd under a Gaussian.
_SKEWED = 0.5


class EPState(NamedTuple):
    """What the next round needs. Invariant: sites.q = prior x Π_k site_k."""

    sites: Sites
    warm_start: WarmStart | None  # None once refinement has begun
    prior_share: float  # 1 / K when the prior is not Gaussian: each factor's share of p / N_0
    damping: float
    change: float  # of the last round
    averaging: int  # rounds averaged since the change came down to Monte Carlo error
    heard: Array  # (K,) bool: replied in the current sweep
    sweep_change: float  # of the current sweep over all clients
    skewness: Array  # (m,) that the factors give the posterior's margins, and q cannot have
    status: str
    message: str


class EPInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    change_mean: float  # largest |Δ mean| in posterior sds, before damping
    change_sd: float  # largest |Δ log sd|, before damping
    damping: float
    log_posterior: float  # log marginal posterior at the point, warm start only
    mc_error: float  # Monte Carlo error of the global mean in posterior sds
    skewness: float  # largest |skewness| that the factors give a margin of the posterior


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
        by more than that fraction. Where replies have Monte Carlo error, four rounds are averaged first, and up to
        three times that error is allowed.
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
    *When this fails.* The Gaussian family cannot follow a skewed posterior. The skewness that the clients' factors
    add up to is reported (``fit.idata["fit"]["skewness"]``); above about 1, distrust sd and tails of that margin.
    Sites of rough local moments (few NUTS draws) can oscillate: the status then says so; raise `draws` or lower
    `damping`.

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
        raise DeclarationError(
            f'structure={structure!r} must be "full", "diagonal" or a list of lists of shared names.'
        )
    inference = local if local is not None else NestedLaplace()
    warm = warm_start and inference.expand is not None
    return Algorithm(
        name="EP",
        check=inference.check,
        init_server=functools.partial(_init_server, form=structure, damping=damping, warm=warm),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, local=inference),
        reply_shapes=_reply_shapes,
        refuse=_refuse,
        update_server=functools.partial(_update_server, tolerance=tolerance, largest=damping),
        posterior=lambda state: state.sites.q,
        details=lambda state: {"skewness": state.skewness},
        cavity=lambda state, client_id: _sites.cavity(state.sites, client_id),
        local=inference,
    )


def _init_server(
    layout: Layout,
    clients: tuple[str, ...],
    rng: np.random.Generator,
    *,
    form: str | Sequence[Sequence[str]],
    damping: float,
    warm: bool,
) -> EPState:
    del rng
    return EPState(
        sites=_sites.empty(layout, clients, _sites.structure_of(form, layout)),
        warm_start=_warm_start.start(layout, len(clients)) if warm else None,
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / len(clients),
        damping=damping,
        change=np.inf,
        averaging=0,
        heard=np.zeros(len(clients), dtype=bool),
        sweep_change=0.0,
        skewness=np.zeros(layout.size),
        status=Status.RUNNING.value,
        message="",
    )


def _broadcast(state: EPState, client_id: str) -> Message:
    """The point to expand at, or q and the client's cavity."""
    share = np.array(state.prior_share)
    if state.warm_start is not None:
        return {"point": state.warm_start.point, "prior_share": share}
    q, cavity = state.sites.q, _sites.cavity(state.sites, client_id)
    return {
        "global_linear": q.linear,
        "global_precision": gaussian.pack_triangle(q.precision),
        "cavity_linear": cavity.linear,
        "cavity_precision": gaussian.pack_triangle(cavity.precision),
        "prior_share": share,
    }


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, local: LocalInference
) -> tuple[Any, Message, Mapping[str, float]]:
    """Expand log f_k at the point, or match moments of the tilted distribution. Clients keep no state."""
    share = float(message["prior_share"])
    if "point" in message and local.expand is not None:
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
        "skewness": moments.skewness,
        "mc_error": np.array(moments.diagnostics.get("mc_error", 0.0)),
    }
    return personal, reply, moments.diagnostics


def _reply_shapes(state: EPState) -> dict[str, tuple[int, ...]]:
    m = state.sites.structure.size
    triangle = (m * (m + 1) // 2,)
    if state.warm_start is not None:
        return {"value": (), "gradient": (m,), "hessian": triangle}
    return {"mean": (m,), "precision": triangle, "skewness": (m,), "mc_error": ()}


def _refuse(state: EPState, reply: Message) -> str | None:
    """Moments must be those of a distribution; an expansion may have any curvature."""
    if state.warm_start is None:
        precision = gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
        if not gaussian.is_proper(Gaussian(np.asarray(reply["mean"], dtype=float), precision)):
            return f"'precision' is not positive definite (smallest eigenvalue {np.linalg.eigvalsh(precision)[0]:.3g})"
    return None


def _update_server(
    state: EPState, replies: Mapping[str, Message], *, tolerance: float, largest: float
) -> tuple[EPState, EPInfo]:
    if state.warm_start is not None:
        return _newton_round(state, state.warm_start, replies)
    return _ep_round(state, replies, tolerance, largest)


def _newton_round(state: EPState, before: WarmStart, replies: Mapping[str, Message]) -> tuple[EPState, EPInfo]:
    """One round of the warm start; on arrival, sites and q stay and refinement begins."""
    sites, after = _warm_start.step(state.sites, before, replies) if replies else (state.sites, before)
    info = EPInfo("warm start", after.change, np.inf, 1.0, after.objective, 0.0, np.nan)
    if after.arrived:
        return state._replace(sites=sites, warm_start=None, message=""), info
    message = "the warm start has not reached the mode of the marginal posterior; raise rounds="
    return state._replace(sites=sites, warm_start=after, message=message), info


def _ep_round(
    state: EPState, replies: Mapping[str, Message], tolerance: float, largest: float
) -> tuple[EPState, EPInfo]:
    """Damped moment matching, backtracked until q and every cavity are proper."""
    if not replies:
        return state, EPInfo("EP", 0.0, 0.0, state.damping, np.nan, 0.0, np.nan)
    sites, q = state.sites, state.sites.q
    rows = _sites.indices(sites, replies)
    target_linear, target_packed = _targets(sites, replies)
    d_linear = target_linear - q.linear
    d_packed = target_packed - _sites.in_structure(q.precision, sites.structure)
    mc_error = float(np.sqrt(sum(float(reply["mc_error"]) ** 2 for reply in replies.values())))
    # Cumulants of log factors add, so the small skewnesses of K tilted distributions make the posterior's.
    skewness = np.sum([reply["skewness"] for reply in replies.values()], axis=0) * len(sites.where) / len(replies)
    skewed = float(np.abs(skewness).max())
    improper = _sites.improper_cavities(sites)
    delta = state.damping
    # At δ = 1/K the new q is a convex combination of proper Gaussians; below it only cavities can object.
    while delta >= 0.25 / len(sites.where):
        linear, precision = sites.linear.copy(), sites.precision.copy()
        linear[rows] += delta * d_linear
        precision[rows] += delta * d_packed
        moved = _sites.update(sites, linear, precision)
        if gaussian.is_proper(moved.q) and _sites.improper_cavities(moved) <= improper:
            break
        delta /= 2
    else:
        message = (
            "no damped step keeps q and all cavities positive definite; raise draws= or points= of the local inference"
        )
        return state._replace(message=message), EPInfo("EP", np.inf, np.inf, 0.0, np.nan, mc_error, skewed)
    sd, new_sd = gaussian.standard_deviations(q), gaussian.standard_deviations(moved.q)
    change_mean = float(np.max(np.abs(gaussian.mean(moved.q) - gaussian.mean(q)) / sd)) / delta
    change_sd = float(np.max(np.abs(np.log(new_sd / sd)))) / delta
    after = _judge(
        state._replace(sites=moved, damping=delta, skewness=skewness),
        max(change_mean, change_sd),
        mc_error,
        rows,
        tolerance,
        largest,
    )
    return after, EPInfo("EP", change_mean, change_sd, delta, np.nan, mc_error, skewed)


def _targets(sites: Sites, replies: Mapping[str, Message]) -> tuple[Array, Array]:
    """Natural parameters of the clients' tilted distributions inside the family, packed."""
    means = np.stack([reply["mean"] for reply in replies.values()])
    precisions = gaussian.unpack_triangle(np.stack([reply["precision"] for reply in replies.values()]))
    form = sites.structure
    if form.blocks is not None and len(form.blocks) == 1:
        return np.einsum("kij,kj->ki", precisions, means), structure.pack_precision(precisions, form)
    projected = [
        structure.project(mean, np.linalg.inv(precision), form)
        for mean, precision in zip(means, precisions, strict=True)
    ]
    packed = [structure.pack_precision(g.precision, form) for g in projected]
    return np.stack([g.linear for g in projected]), np.stack(packed)


def _judge(
    state: EPState, change: float, mc_error: float, rows: list[int], tolerance: float, largest: float
) -> EPState:
    """Set the next damping, and say whether this is converged."""
    count = len(state.sites.where)
    noisy = mc_error > 0
    averaging = state.averaging
    if averaging or (noisy and change < 3 * max(mc_error, tolerance)):
        # down to noise: average the rounds, so that Monte Carlo error falls with their number
        averaging += 1
        damping = max(1.0 / (averaging + 1), 0.1) * largest
    elif change > state.change:
        damping = max(state.damping / 2, 1.0 / count)
    else:
        damping = min(largest, 1.5 * state.damping)
    heard, sweep_change = state.heard.copy(), state.sweep_change + change
    heard[rows] = True
    swept = bool(np.all(heard))
    # One small change of a noisy sweep may be luck: with Monte Carlo error, rounds are averaged before it counts.
    quiet = swept and not noisy and sweep_change < tolerance
    averaged = swept and noisy and averaging >= 4 and sweep_change < max(tolerance, 3 * mc_error)
    if quiet or averaged:
        message = (
            "" if quiet else f"to Monte Carlo error, {mc_error:.2g} sd a round before averaging; raise draws= for less"
        )
        skewed = float(np.abs(state.skewness).max())
        if skewed > max(_SKEWED, 3 * np.sqrt(6.0) * mc_error):
            message += "; " if message else ""
            message += (
                f"a margin has skewness of about {skewed:.1f} that q cannot have: see fit.idata['fit']['skewness']"
            )
    else:
        knob = "raise rounds=, or draws= of the local inference" if noisy else "raise rounds=, or lower damping="
        message = f"the last sweep moved q by {sweep_change:.2g} posterior sds (tolerance {tolerance:g}); {knob}"
    return state._replace(
        damping=damping,
        change=change,
        averaging=averaging,
        heard=np.zeros_like(heard) if swept else heard,
        sweep_change=0.0 if swept else sweep_change,
        status=(Status.CONVERGED if quiet or averaged else Status.RUNNING).value,
        message=message,
    )
