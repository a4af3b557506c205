"""One damped round of EP on the server's ledger: backtracked until everything is proper, then judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl import gaussian, structure
from fedppl.gaussian import Gaussian
from fedppl.steps import _sites, _trust
from fedppl.steps._sites import Sites
from fedppl.steps._warm_start import WarmStart
from fedppl.types import Array, Message, Status

__all__ = ["EPInfo", "EPState", "damped_step", "hold_back", "named", "targets"]

# Monte Carlo error of the shared means, in posterior sds after averaging, beyond which nothing is called converged.
_MOST_ERROR = 0.2
_LESS_NOISE = "raise draws= or points= of the local inference for less"
# With this skewness, quantiles of a margin in the tails are off by a few tenths of an sd under a Gaussian.
_SKEWED = 0.5
_VERY_SKEWED = 1.0  # a warning; below it, a word for those who look


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
    last_change: Array  # (m,) of the last round, in posterior sds: what a mean or a log sd moved by, before damping
    skewness: Array  # (m,) that the factors give the posterior's margins, and q cannot have
    answered: Array  # (K,) rounds that a client's reply was used in; counted where trust is set
    held_back: Array  # (K,) rounds of those that its change was scaled down in
    errors: Array  # (K,) Monte Carlo error of the client's last reply, in posterior sds
    noise: Array  # (K,) variance that the errors of all its replies have left in its site, in the same unit
    status: str
    message: str

    @property
    def mild(self) -> bool:
        """Whether what the message of a converged fit says is for information, and no warning."""
        return bool(np.abs(self.skewness).max() < _VERY_SKEWED and not np.any(self.held_back))


class EPInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    change_mean: float  # largest |Δ mean| in posterior sds, before damping
    change_sd: float  # largest |Δ log sd|, before damping
    damping: float
    log_posterior: float  # log marginal posterior at the point, warm start only
    mc_error: float  # Monte Carlo error of the global mean in posterior sds
    skewness: float  # largest |skewness| that the factors give a margin of the posterior
    held_back: int = 0  # clients whose change was scaled down, where trust is set
    influence: float = np.nan  # largest that leaving out one client would have done to q, before that


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
) -> tuple[EPState, EPInfo]:
    """Add δ times the clients' changes (R, m), (R, p) to their sites; δ keeps q and every cavity proper.

    `mc_errors` (R,) are those of the clients' means in posterior sds.
    With `trust`, every client's change is scaled besides, so that the step that is taken keeps the bound of `_trust`.
    """
    sites, q = state.sites, state.sites.q
    skewed = float(np.abs(skewness).max())
    errors = state.errors.copy()
    errors[rows] = mc_errors
    mc_error, fresh = float(np.linalg.norm(errors)), float(np.linalg.norm(mc_errors))
    improper = _sites.improper_cavities(sites)
    delta = state.damping
    bounded = None
    # At δ = 1/K the new q is a convex combination of proper Gaussians; below it only cavities can object.
    while delta >= 0.25 / len(sites.where):
        step: float | Array = delta
        if trust is not None:
            changes = Gaussian(delta * d_linear, delta * _sites.dense(d_packed, sites.structure))
            bounded = _trust.bound(q, changes, trust)
            step = delta * bounded.scales[:, None]
        linear, precision = sites.linear.copy(), sites.precision.copy()
        linear[rows] += step * d_linear
        precision[rows] += step * d_packed
        moved = _sites.update(sites, linear, precision)
        if gaussian.is_proper(moved.q) and _sites.improper_cavities(moved) <= improper:
            break
        delta /= 2
    else:
        message = _no_step(sites, rows, d_packed, noisy=mc_error > tolerance)
        return state._replace(message=message), EPInfo("EP", np.inf, np.inf, 0.0, np.nan, mc_error, skewed)
    sd, new_sd = gaussian.standard_deviations(q), gaussian.standard_deviations(moved.q)
    shift, stretch = np.abs(gaussian.mean(moved.q) - gaussian.mean(q)) / sd / delta, np.abs(np.log(new_sd / sd)) / delta
    change_mean, change_sd = float(np.max(shift)), float(np.max(stretch))
    # A site is a weighted mean of its client's replies, each with an error of its own. What a first reply leaves of the
    # site before it counts as if it came from a reply too.
    noise, part = state.noise.copy(), np.ravel(step)
    averaged = (1 - part) ** 2 * noise[rows] + (part * mc_errors) ** 2
    noise[rows] = np.where(noise[rows] > 0, averaged, mc_errors**2)
    last_change = np.maximum(shift, stretch)
    state = state._replace(
        sites=moved, damping=delta, last_change=last_change, skewness=skewness, errors=errors, noise=noise
    )
    info = EPInfo("EP", change_mean, change_sd, delta, np.nan, mc_error, skewed)
    change, wanted = max(change_mean, change_sd), 0.0
    if bounded is not None:
        state, info = hold_back(state, info, rows, bounded, trust)
        # What a client wanted and did not get counts as a move: held back is not converged.
        wanted = info.influence if info.held_back else 0.0
    after = _judge(state, change, wanted, mc_error, fresh, rows, tolerance, largest)
    return named(after, trust), info


def hold_back(
    state: EPState, info: EPInfo, rows: list[int], bounded: _trust.Bounded, trust: float | None
) -> tuple[EPState, EPInfo]:
    """Count, report and log the clients that were held back."""
    answered, held_back = state.answered.copy(), state.held_back.copy()
    answered[rows] += 1
    held_back[rows] += bounded.held
    names = list(state.sites.where)
    _trust.warn([names[k] for k in rows], bounded, trust)
    return (
        state._replace(answered=answered, held_back=held_back),
        info._replace(held_back=int(bounded.held.sum()), influence=float(bounded.influence.max())),
    )


def named(state: EPState, trust: float | None) -> EPState:
    """The message with the names of the clients that were held back in most rounds."""
    often = _trust.often_held(list(state.sites.where), state.held_back, state.answered, trust)
    return state._replace(message="; ".join(filter(None, (state.message, often)))) if often else state


def _no_step(sites: Sites, rows: list[int], d_packed: Array, noisy: bool) -> str:
    """Say which clients take more precision away than there is, and what helps."""
    _, root = gaussian.affine(sites.q)
    lost = [float(np.linalg.eigvalsh(root.T @ _sites.dense(packed, sites.structure) @ root)[0]) for packed in d_packed]
    names = list(sites.where)
    worst = [names[rows[r]] for r in np.argsort(lost, kind="stable") if lost[r] < 0.5 * min(lost)]
    return (
        f"no damped step keeps q and all cavities positive definite: clients {worst[:5]} know less than nothing of "
        "some direction, as where a factor is improper or nearly so. Declare priors that hold every scale, "
        "shared and local (not Gamma(.001, .001)), "
        + (f"or {_LESS_NOISE.removesuffix(' for less')}" if noisy else "or use local=fedppl.NUTS()")
    )


def _judge(
    state: EPState,
    change: float,
    wanted: float,
    mc_error: float,
    fresh: float,
    rows: list[int],
    tolerance: float,
    largest: float,
) -> EPState:
    """Set the next damping, and say whether this is converged; `fresh` is this round's own Monte Carlo error."""
    count = len(state.sites.where)
    noisy = mc_error > tolerance
    averaging = state.averaging
    if averaging or (noisy and change < 3 * max(fresh, tolerance)):
        # down to noise: average the rounds, so that Monte Carlo error falls with their number
        averaging += 1
        damping = max(1.0 / (averaging + 1), 0.1) * largest
    elif change > state.change:
        damping = max(state.damping / 2, 1.0 / count)
    else:
        damping = min(largest, 1.5 * state.damping)
    heard, sweep_change = state.heard.copy(), state.sweep_change + max(change, wanted)
    heard[rows] = True
    swept = bool(np.all(heard))
    # One small change of a noisy sweep may be luck: with Monte Carlo error, rounds are averaged before it counts.
    quiet = swept and not noisy and sweep_change < tolerance
    averaged = swept and noisy and averaging >= 4 and sweep_change < max(tolerance, 3 * mc_error)
    averaged = averaged and float(np.sqrt(state.noise.sum())) <= _MOST_ERROR
    if quiet or averaged:
        message = "" if quiet else f"to Monte Carlo error, {mc_error:.2g} sd a round before averaging; {_LESS_NOISE}"
        skewed = _skewed(state, max(_SKEWED, 3 * np.sqrt(6.0) * mc_error))
        message = "; ".join(filter(None, (message, skewed)))
    else:
        knob = f"raise rounds=, or {_LESS_NOISE}" if noisy else "raise rounds="
        sweep = "the last sweep" if swept else f"a sweep of which {int(heard.sum())} of {count} clients are done"
        message = f"{sweep} moved q by {sweep_change:.2g} posterior sds (tolerance {tolerance:g}); {knob}"
    return state._replace(
        damping=damping,
        change=change,
        averaging=averaging,
        heard=np.zeros_like(heard) if swept else heard,
        sweep_change=0.0 if swept else sweep_change,
        status=(Status.CONVERGED if quiet or averaged else Status.RUNNING).value,
        message=message,
    )


def _skewed(state: EPState, limit: float) -> str:
    """The coordinates whose margins are too skewed for a Gaussian, and what to do; empty where there are none."""
    size = np.abs(state.skewness)
    worst = [int(i) for i in np.argsort(-size, kind="stable") if size[i] > limit]
    if not worst:
        return ""
    named = ", ".join(f"{state.sites.labels[i]} {state.skewness[i]:.1f}" for i in worst[:3])
    more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
    return (
        f"skewness of about {named}{more}, which a Gaussian cannot have: rely on means more than on tails there, or "
        "declare the variable on a scale where it is closer to normal; see fit.idata['fit']['skewness']"
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
