"""One damped round of EP: backtracked until everything is proper, then bounded, judged, and told whom it holds back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian, structure
from fedppl.algorithms.ep import _moves, _trust
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._state import EPInfo, EPState, Taken
from fedppl.algorithms.ep._trust import Bounded
from fedppl.algorithms.ep._verdict import LESS_NOISE, Change, judge, shortest_step
from fedppl.algorithms.ep.sites import Sites
from fedppl.types import Array, Message, Status, as_declared

logger = logging.getLogger(__name__)

_LITTLE = 0.05  # of a site: of a pull by 3 sds, that is 0.15


def damped_step(
    state: EPState,
    rows: list[int],
    d_linear: Array,
    d_packed: Array,
    *,
    mc_errors: Array,
    skewness: Array,
    tolerance: float,
    largest: float,
    trust: float | None = None,
) -> Taken:
    """Add δ times the clients' changes (R, m), (R, p) to their sites; δ keeps q and every cavity proper.

    `mc_errors` (R,) are those of the clients' means in posterior sds, `skewness` (R, m) what each says it adds.
    With `trust`, sites are drawn in after that, so that the ledger keeps the bound of `_trust`.
    """
    sites, q = state.sites, state.sites.q
    # Where rounds are averaged since clients draw, it is averaged with them.
    total = state.skewness + (skewness.sum(axis=0) - state.skewness) / (1 + state.averaging)
    by = np.argmax(np.sign(total) * skewness, axis=0)
    skewed = float(np.abs(total).max())
    errors = state.errors.copy()
    errors[rows] = mc_errors
    mc_error, fresh = float(np.linalg.norm(errors)), float(np.linalg.norm(mc_errors))
    improper = _sites.improper_cavities(sites)
    delta = state.damping
    bounded = None
    # At δ = 1/K the new q is a convex combination of proper Gaussians; below it only cavities can object.
    while delta >= min(shortest_step(len(sites.where)), largest):
        linear, precision = sites.linear.copy(), sites.precision.copy()
        linear[rows] += delta * d_linear
        precision[rows] += delta * d_packed
        moved = _sites.update(sites, linear, precision)
        if trust is not None:
            bounded = _trust.bound(moved, trust)
            moved = bounded.sites
        if gaussian.is_proper(moved.q) and _sites.improper_cavities(moved) <= improper:
            break
        delta /= 2
    else:
        taken = Taken(state, EPInfo("EP", np.inf, np.inf, 0.0, np.nan, mc_error, skewed))
        if bounded is not None and trust is not None:
            taken = hold_back(taken, [], bounded, trust, 0.0)
        # Beside one that is held back, what others lack may be its doing.
        least = [] if np.any(taken.state.held) else _least_known(sites, rows, d_packed)
        return named(taken._replace(message=_no_step(least, noisy=mc_error > tolerance)), trust)
    sd, new_sd = gaussian.standard_deviations(q), gaussian.standard_deviations(moved.q)
    heading = np.concatenate([(gaussian.mean(moved.q) - gaussian.mean(q)) / sd, np.log(new_sd / sd)]) / delta
    turned = bool(heading @ state.heading <= 0)
    shift, stretch = np.split(np.abs(heading), 2)
    change_mean, change_sd = float(np.max(shift)), float(np.max(stretch))
    # A site is a weighted mean of its client's replies, each with an error of its own. What a first reply leaves of the
    # site before it counts as if it came from a reply too.
    noise = state.noise.copy()
    averaged = (1 - delta) ** 2 * noise[rows] + (delta * mc_errors) ** 2
    noise[rows] = np.where(noise[rows] > 0, averaged, mc_errors**2)
    moves = state.moves
    if state.averaging:
        now = _moves.of_replies(q, d_linear, _sites.dense(d_packed, sites.structure))
        moves = _moves.follow(moves, rows, now, np.full(len(rows), delta))
    state = state._replace(
        sites=moved,
        damping=delta,
        last_change=np.maximum(shift, stretch),
        skewness=total,
        skewed_by=np.asarray(rows)[by],
        skewness_without=total - np.take_along_axis(skewness, by[None], axis=0)[0],
        errors=errors,
        noise=noise,
        moves=moves,
        heading=heading,
    )
    taken = Taken(state, EPInfo("EP", change_mean, change_sd, delta, np.nan, mc_error, skewed))
    if bounded is not None and trust is not None:
        taken = hold_back(taken, rows, bounded, trust, delta)
    change = Change(max(change_mean, change_sd), turned, mc_error, fresh)
    return named(judge(taken, change, rows, tolerance, largest), trust, bounded)


def hold_back(taken: Taken, rows: list[int], bounded: Bounded, trust: float, step: float) -> Taken:
    """Count, report and log the clients that are held back; `step` is the share of their replies that was taken in.

    Who is within its bound again stays held until what it asked for since then has replaced what was drawn in.
    """
    _warn(bounded, trust)
    state, info = taken.state, taken.info
    left = state.held.copy()
    left[rows] *= 1 - step
    left[left < _LITTLE] = 0.0
    # Whose pull is not known is held for this round alone: nothing was drawn in.
    held = np.maximum(np.where(bounded.held, 1.0, left), np.where(bounded.unknown, _LITTLE, 0.0))
    pull = np.where((held > 0) & ~bounded.held, state.pull.T, _blamed(bounded, trust).T).T
    size = np.nan_to_num(np.abs(bounded.pull).max(axis=1), nan=-1.0)
    most = int(np.argmax(size))
    if size[most] >= 0:
        info = info._replace(pull=float(size[most]), pulled_by=list(state.sites.where)[most])
    return taken._replace(
        state=state._replace(held=held, held_back=state.held_back + bounded.held, pull=pull),
        info=info._replace(held_back=int(bounded.held.sum())),
    )


def named(taken: Taken, trust: float | None, bounded: Bounded | None = None) -> Taken:
    """The message with the names of the clients that are held back or, of a run that goes on, nearly so."""
    if trust is None:
        return taken
    state, rows = taken.state, np.flatnonzero(taken.state.held)
    nearly = bounded is not None and not len(rows) and taken.status is not Status.CONVERGED
    if bounded is not None and nearly:
        rows = np.flatnonzero(bounded.near)
    who = _said(state.sites, rows, state.pull, trust, nearly)
    return taken._replace(message="; ".join(filter(None, (taken.message, who)))) if who else taken


def _blamed(bounded: Bounded, trust: float) -> Array:
    """Pulls (K, m), with 0 for who is held back for its precision and not for how it pulls."""
    pull = np.nan_to_num(bounded.pull)
    within = np.abs(pull).max(axis=1) <= trust
    return np.where(((bounded.takes | bounded.gives) & within)[:, None], 0.0, pull)


def _warn(bounded: Bounded, trust: float) -> None:
    """One line in the log for every client that is held back; far from the mode honest factors may bend outwards."""
    names, labels, pull = list(bounded.sites.where), bounded.sites.labels, _blamed(bounded, trust)
    for k in np.flatnonzero(bounded.held):
        logger.log(
            logging.WARNING if np.any(pull[k]) else logging.INFO,
            "client %s held back: it %s (of what the others know), trust=%s",
            names[k],
            _pulls_where(pull[k], labels),
            trust,
            extra={"client": names[k], "status": "held back"},
        )


def _said(sites: Sites, rows: NDArray[np.intp], pull: Array, trust: float, nearly: bool = False) -> str:
    """Name the clients that are held back, or nearly so, and where they pull, or say nothing."""
    if not len(rows):
        return ""
    names = list(sites.where)
    rows = rows[np.argsort(-np.abs(pull[rows]).max(axis=1), kind="stable")]
    shown = [f"{names[k]} ({_pulls_where(pull[k], sites.labels)})" for k in rows[:5]]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    what = "nearly held back" if nearly else "held back, since what the others know does not allow it"
    return f"{what}: {', '.join(shown)}{more}; look at their data, or raise trust={trust:g}"


def _pulls_where(pull: Array, labels: Sequence[str]) -> str:
    """Where a client that is held back pulls most; if nowhere, it is for its precision."""
    if not np.nanmax(np.abs(pull), initial=0.0) >= 1e-6:
        return "gives or takes more precision than the others allow"
    i = int(np.argmax(np.abs(pull)))
    return f"pulls {as_declared(labels[i])} by {pull[i]:+.2g} sds"


def _least_known(sites: Sites, rows: list[int], d_packed: Array) -> list[str]:
    """Clients that take most precision away."""
    _, root = gaussian.affine(sites.q)
    lost = [float(np.linalg.eigvalsh(root.T @ _sites.dense(packed, sites.structure) @ root)[0]) for packed in d_packed]
    names = list(sites.where)
    return [names[rows[r]] for r in np.argsort(lost, kind="stable") if lost[r] < 0.5 * min(lost)]


def _no_step(least: list[str], noisy: bool) -> str:
    """Say that there is no step, which clients take more precision away than there is, and what helps."""
    who = f"clients {least[:5]} know less than nothing of some direction" if least else "too much precision is taken"
    return (
        f"no step leads on to a posterior with variances: {who}, as where a client's likelihood is flat or nearly so. "
        "Declare priors that hold every scale, shared and local (not Gamma(.001, .001)), or "
        + (LESS_NOISE if noisy else "use local=fedppl.NUTS(draws=4000)")
    )


def targets(sites: Sites, replies: Mapping[str, Message]) -> tuple[Array, Array]:
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
