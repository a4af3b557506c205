r"""Whether a stage is to be trusted: the surrogate through all values, held against the weights of the last batch.

With g the density of the batch's points, their weights are those of the posterior and of the surrogate,

.. math:: w_i \propto \frac{p(\varphi_i \mid y)}{g(\varphi_i)}, \qquad
          c_i \propto \frac{\hat s(\varphi_i)}{g(\varphi_i)}
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.sums import phases
from fedppl.algorithms.sums.phases import Draws, Estimate, Unit, Weighed, Weighing
from fedppl.numerics import importance
from fedppl.numerics import tolerances as common
from fedppl.numerics.coordinates import log_slope, to_phi
from fedppl.numerics.importance import effective_size, normalise, weighted_moments
from fedppl.numerics.proposals import Reweighted, has_heavy_tails, second_k
from fedppl.numerics.surrogate import Drawn, Surrogate
from fedppl.types import Array, as_declared

_BY_NUTS = "take a Gaussian by fedppl.EP(local=fedppl.local.NUTS(draws=4000))"


class _Weights(NamedTuple):
    """The batch as the posterior."""

    posterior: Array  # (S,) they sum to 1
    control: Array  # (S,) of the surrogate
    effective: float  # share of the points
    pareto_k: float
    logs: Array  # (S,) of the posterior, not normalised
    control_logs: Array  # (S,)
    last: Draws  # of the surrogate that the batch came from


class _Off(NamedTuple):
    """How far moments may be off: the largest of means, in posterior sds, and of log sds."""

    chance: float  # standard error of the estimate
    differ: float  # the draws' moments from it


class _Errors(NamedTuple):
    """How far moments may be off, on all scales."""

    estimate: Estimate
    heavy: bool  # tails
    grown: float  # by the last stage, along a heavy tail
    differ: float  # of coordinates
    error: float
    is_off: bool  # draws, by more than chance
    on_declared: _Off


def judged(
    state: Weighing,
    through: Surrogate,
    posterior: Drawn,
    signed: Array,
    squares: Array,
    stream: int,
    remedy: str,
    *,
    last: bool,
) -> tuple[Weighing | Weighed, str]:
    """Compare draws of a surrogate through all values with what the last surrogate and its weights say.

    Another stage where the errors are not small enough yet, unless this is the last; else the end, with a message that
    says what is not known.
    """
    weights = _weights(state)
    of_stage = _estimate(state, weights)
    state = state._replace(shape=state.shape._replace(estimates=(*state.shape.estimates, of_stage)))
    errors = _errors(state, posterior, weights)
    tail = second_k(weights.posterior, state.batch.u, weights.posterior)
    sure = weights.effective > tol.EVEN or (
        weights.pareto_k <= importance.limit(len(weights.posterior)) and tail <= common.MOST_SECOND_K
    )
    largest, most = max(errors.error, errors.grown), _most_error(state)
    chance = errors.on_declared.chance
    trusted = sure and largest <= most and chance <= common.MOST_ERROR and weights.effective >= tol.LEAST_EFFECTIVE
    noise, moved = float(np.sqrt(weights.posterior @ squares)), _moved(state, weights, signed, squares)
    # With more points at which θ is integrated, the residuals at the others are predicted better.
    is_told = noise <= common.MOST_NOISE and moved <= tol.MOVED
    is_small = largest <= tol.ENOUGH and chance <= tol.ENOUGH_DECLARED and weights.effective >= tol.EFFECTIVE
    enough = trusted and is_told and is_small and not (errors.heavy and not state.shape.outer)
    is_near = (
        largest <= tol.NEARLY * most
        and chance <= tol.NEARLY * common.MOST_ERROR
        and weights.effective >= tol.LEAST_EFFECTIVE
    )
    more_would_do = not trusted and is_told and is_near
    if not enough and not last and state.stage < (tol.MORE_STAGES if more_would_do else tol.STAGES):
        return state, ""
    if trusted:
        posterior, error, by_draws = _put_right(state, through, posterior, errors, stream)
        trusted = max(error, by_draws) <= common.MOST_ERROR
    else:
        error, by_draws = _with_declared(errors.error, errors.on_declared), phases.chance_of_draws(posterior)
    lost = float(np.mean(~np.isfinite(phases.values_of_batch(state))))
    weighted = _reweighted(state, posterior, weights, max(error, by_draws), tail)
    problems = (
        (trusted, _not_known(state, posterior, weights, weighted, errors.grown, remedy)),
        (
            lost <= common.MOST_LOST,
            f"at {lost:.1%} of the points (at most {common.MOST_LOST:.0%}) a client has no log density, so that means "
            f"and sds may be wrong: declare the model so that it has a smooth density everywhere, or {_BY_NUTS}",
        ),
        (
            is_told,
            f"means and sds may be off by up to {moved:.2g} sds, as clients' log densities are uncertain by "
            f"{noise:.2g}: declare their own variables closer to normal, or integrate them out, or {_BY_NUTS}",
        ),
    )
    message = "; ".join(text for is_well, text in problems if not is_well)
    about = state.about
    if trusted or max(error, by_draws) <= tol.WORTH:
        about = about._replace(q=gaussian.from_moments(weighted.mean, weighted.covariance))
    return Weighed(about, state.evaluated, state.shape, weighted, False, not message), message


def _errors(state: Weighing, posterior: Drawn, weights: _Weights) -> _Errors:
    """Errors by the estimates of all stages, and by how the draws differ from these."""
    # Where values were asked for in the tails, a tail that these do not have is the surrogate's own.
    heavy = has_heavy_tails(posterior.u, posterior.weights) and (
        not state.shape.outer or has_heavy_tails(state.batch.u, weights.posterior)
    )
    last, together = state.shape.estimates[-1], phases.pooled(state.shape.estimates)
    # Each stage reaches farther into a heavy tail. The sum of many clients has no tails that the last stage may have
    # missed, and its first surrogates may be so rough that their estimates add nothing.
    estimate = last if heavy or (state.about.many and phases.chance_of(last) < phases.chance_of(together)) else together
    (chance, differ), on_declared = off = _compared(state, posterior, estimate)
    # A surrogate that is off by more than chance is put right by the weights; else it is the better of the two.
    is_off = any(
        one.differ > max(min(tol.BY_CHANCE * one.chance, common.MOST_ERROR), enough)
        for one, enough in zip(off, (tol.ENOUGH, tol.ENOUGH_DECLARED), strict=True)
    )
    may_be_off = max(
        tol.MOST_OFF * max(chance, tol.LEAST_CHANCE * tol.ENOUGH),
        tol.PUT_RIGHT if weights.effective >= tol.EFFECTIVE else 0.0,
    )
    return _Errors(
        estimate,
        heavy,
        _grown(state, posterior, weights.last.posterior, estimate) if heavy else 0.0,
        differ,
        differ if differ > may_be_off else chance,
        is_off,
        on_declared,
    )


def _put_right(
    state: Weighing, through: Surrogate, posterior: Drawn, errors: _Errors, stream: int
) -> tuple[Drawn, float, float]:
    """Draws with the moments of the estimate, their error, and what of it is their number's."""
    by_draws, error, on_declared = phases.chance_of_draws(posterior), errors.error, errors.on_declared
    if by_draws > tol.BY_DRAWS:
        more = phases.draws_of(state, through, posterior.mean, posterior.covariance, tol.MOST_SURROGATE_DRAWS, stream)
        pairs = (posterior, by_draws), (more, phases.chance_of_draws(more))
        posterior, by_draws = min(pairs, key=lambda pair: pair[1])
    if errors.is_off:
        tilt = _tilted(state, posterior, errors.estimate)
        posterior = posterior if tilt is None else tilt
        (_, differ), on_declared = _compared(state, posterior, errors.estimate)
        error = max(errors.differ, errors.on_declared.differ) if tilt is None else max(error, differ)
    return posterior, _with_declared(error, on_declared), by_draws


def _with_declared(error: float, on_declared: _Off) -> float:
    """The larger of an error and that on the scales that variables are declared on."""
    off = on_declared.differ if on_declared.differ > tol.BY_CHANCE * on_declared.chance else 0.0
    return max(error, on_declared.chance, off)


def _tilted(state: Weighing, of: Drawn, estimate: Estimate) -> Drawn | None:
    """Draws with the moments of an estimate on all scales, or else of coordinates alone; None where there are none."""
    x, unit, m = phases.all_scales(state, of.u), state.shape.unit, of.u.shape[1]
    for count in (x.shape[1], m):
        target = np.concatenate([part[:count] for part in np.split(estimate.moments, 2)])
        tilt = phases.tilted(of, x[:, :count], target, Unit(unit.center[:count], unit.length[:count]))
        if tilt is not None:
            return tilt
    return None


def nowhere(state: Weighing) -> tuple[Weighed, str]:
    """The end of a fit whose posterior was not found about the mode."""
    message = (
        "about the mode too few points have a log density at all clients, or tails are too heavy, to tell means and "
        f"sds: declare a smooth density everywhere and priors with lighter tails, or {_BY_NUTS}"
    )
    return Weighed(state.about, state.evaluated, state.shape, None, False, False), message


def _weights(state: Weighing) -> _Weights:
    """Weights of the batch, against the mixture of surrogate and candidates that its points come from."""
    assert state.draws is not None
    batch, values = state.batch, phases.values_of_batch(state)
    mixture = np.logaddexp(
        np.log(1.0 - tol.DEFENCE) + batch.log_drawn - state.draws.log_integral, np.log(tol.DEFENCE) + batch.log_density
    )
    is_drawn = batch.times > 0
    raw = np.where(is_drawn & np.isfinite(values), values - mixture, -np.inf)
    log_times = np.log(np.where(is_drawn, batch.times, 1.0))
    logs, shape = importance.smoothed(raw)
    if _spread(values - batch.log_surrogate, normalise(raw + log_times)) <= phases.effort_of(state).close:
        logs, shape = raw, -np.inf
    logs = np.where(is_drawn, logs + log_times, -np.inf)
    posterior = normalise(logs)
    effective = 1.0 / float(np.sum(posterior[is_drawn] ** 2 / batch.times[is_drawn])) / float(batch.times.sum())
    control_logs = np.where(is_drawn, batch.log_surrogate - mixture + log_times, -np.inf)
    return _Weights(posterior, normalise(control_logs), effective, shape, logs, control_logs, state.draws)


def _spread(residuals: Array, weights: Array) -> float:
    """Standard deviation of a surrogate's residuals (S,) over the posterior."""
    is_some = weights > 0
    residuals, weights = residuals[is_some], weights[is_some]
    return float(np.sqrt(weights @ (residuals - weights @ residuals) ** 2))


def _estimate(state: Weighing, weights: _Weights) -> Estimate:
    r"""Moments of the last surrogate and what the weights add to them; scrambles of both are left out together.

    .. math:: E[h] \approx \sum_i w_i h_i - \beta_h \left(\sum_i c_i h_i - E_{\hat s}[h]\right)

    The surrogate is a control variate: where it is good β is 1, and less where its tails are not the posterior's.
    """
    posterior = weights.last.posterior
    scales = (phases.all_scales(state, u) for u in (posterior.u, state.batch.u))
    of_surrogate, of_batch = (phases.features(x, state.shape.unit) for x in scales)
    coefficients = importance.control_coefficients(of_batch, weights.posterior, weights.control)

    def without(scramble: int) -> Array:
        before, kept = (
            np.where(posterior.scramble != scramble, posterior.weights, 0.0),
            state.batch.scramble != scramble,
        )
        added, control = (np.where(kept, part, 0.0) for part in (weights.posterior, weights.control))
        expected = before / before.sum() @ of_surrogate - control / control.sum() @ of_batch
        return np.asarray(added / added.sum() @ of_batch + coefficients * expected)

    each = np.stack([without(scramble) for scramble in range(common.SCRAMBLES)])
    return Estimate(without(-1), each, weights.effective * float(state.batch.times.sum()))  # without none


def _compared(state: Weighing, posterior: Drawn, estimate: Estimate) -> tuple[_Off, _Off]:
    """Standard errors of an estimate, and what draws differ from it by: of coordinates, and on declared scales."""
    off, m = phases.sizes(estimate.moments, phases.moments_of_draws(state, posterior)), posterior.u.shape[1]
    errors = np.stack([phases.chances(estimate), np.abs(off)]).reshape(2, 2, -1)  # of means and of sds
    own, declared = (np.max(part, axis=(1, 2), initial=0.0) for part in (errors[..., :m], errors[..., m:]))
    return _Off(*map(float, own)), _Off(*map(float, declared))


def _grown(state: Weighing, posterior: Drawn, before: Drawn, last: Estimate) -> float:
    """Growth of a log sd since the stage before, where points reach farther into a tail each time."""
    earlier = [phases.moments_of_draws(state, before), *(one.moments for one in state.shape.estimates[-2:-1])]
    later = [phases.moments_of_draws(state, posterior), last.moments]
    m, count = posterior.u.shape[1], len(state.shape.unit.center)
    return float(max(np.max(np.abs(phases.sizes(new, old)[count : count + m])) for new in later for old in earlier))


def _reweighted(state: Weighing, posterior: Drawn, weights: _Weights, error: float, tail: float) -> Reweighted:
    """The surrogate's draws as the posterior, beside the Gaussian of their moments."""
    posterior = with_weight(posterior, to_phi(posterior.u, state.shape.coordinates))
    phi = to_phi(posterior.u, state.shape.coordinates)
    moments = weighted_moments(phi, posterior.weights)
    q = gaussian.from_moments(moments.mean, moments.covariance)
    # A surrogate has mass where it is made up; the weights' integral has an error by chance alone.
    by_weights, chance = _log_integral(state, weights)
    log_integral = by_weights if abs(by_weights - posterior.log_integral) > chance else posterior.log_integral
    of_q = gaussian.log_density(q, phi) + log_slope(phi, state.shape.coordinates) - posterior.log_proposal
    has_tail = weights.effective <= tol.EVEN
    return Reweighted(
        points=phi,
        weights=posterior.weights,
        of_q=normalise(of_q),
        scramble=posterior.scramble,
        mean=moments.mean,
        covariance=moments.covariance,
        log_ratio=log_integral - gaussian.log_integral(q),
        error=error,
        beside=error,
        log_ratio_error=max(abs(by_weights - log_integral), chance),
        ess=effective_size(posterior.weights),
        pareto_k=weights.pareto_k if has_tail else -np.inf,
        second_k=tail if has_tail else -np.inf,
        told=len(weights.posterior),
    )


def with_weight(of: Drawn, phi: Array) -> Drawn:
    """Draws but those far out without weight, whose scales may be beyond all numbers, and so is nothing times these."""
    some = (of.weights > tol.NO_WEIGHT) | np.all(np.abs(phi) < common.MOST_LOG, axis=1)
    u, log_proposal, log_density, weights, scramble = (part[some] for part in of[:5])
    return Drawn(u, log_proposal, log_density, weights / weights.sum(), scramble, *of[5:])


def _log_integral(state: Weighing, weights: _Weights) -> tuple[float, float]:
    r"""Log of the posterior's integral by the batch, and its standard error, by leaving out one scramble at a time.

    .. math:: Z \approx \bar w - \beta (\bar c - Z_{\hat s})

    The surrogate, whose integral is known, is a control variate.
    """
    times, of = state.batch.times, weights.last
    shift = max(float(np.max(logs)) for logs in (weights.logs, weights.control_logs))
    each = np.stack([np.exp(logs - shift) for logs in (weights.logs, weights.control_logs)]) / np.maximum(times, 1.0)
    w, c = each - (each @ times / times.sum())[:, None]
    beta = float(np.clip(times @ (w * c) / max(times @ c**2, tol.ABOVE_ZERO), 0.0, 1.0))
    known = np.exp(min(of.posterior.log_integral - shift, tol.FAR_OFF))

    def by(kept: Array, beta: float) -> float:
        mean, control = each @ kept / kept.sum()
        return float(mean - beta * (control - known))

    without = [np.where(state.batch.scramble == one, 0.0, times) for one in range(common.SCRAMBLES)]
    beta = beta if min(by(kept, beta) for kept in (times, *without)) > 0.0 else 0.0
    by_chance = float(importance.jackknife(np.log([by(kept, beta) for kept in without])))
    errors = by_chance, beta * of.posterior.log_integral_error, (1.0 - beta) * of.log_integral_error
    return shift + float(np.log(by(times, beta))), float(np.linalg.norm(errors))


def _moved(state: Weighing, weights: _Weights, signed: Array, squares: Array) -> float:
    """Largest shift of a mean or a log sd, in posterior sds, that errors of log f_k may cause.

    Errors that clients have alike add up as they are, others as squares, by the inequality of Cauchy and Schwarz.
    """
    u = state.batch.u
    moments = weighted_moments(u, weights.posterior)
    z = (u - moments.mean) / np.sqrt(np.diag(moments.covariance))
    parts = np.concatenate([z, 0.5 * (z**2 - 1.0)], axis=1)
    apart = parts - weights.posterior @ parts
    alike = signed @ (weights.posterior[:, None] * apart)
    by_chance = np.sqrt((weights.posterior @ squares) * (weights.posterior @ apart**2))
    return float(max(np.max(np.abs(alike)), np.max(by_chance)))


def _most_error(state: Weighing) -> float:
    """Standard error with which moments are trusted; of many coordinates the largest of all errors counts."""
    return common.MOST_ERROR if len(state.about.labels) < common.MANY else tol.MOST_OF_MANY


def _not_known(
    state: Weighing, posterior: Drawn, weights: _Weights, weighted: Reweighted, grown: float, remedy: str
) -> str:
    """Which diagnostics are out of bounds, and of which coordinate above all."""
    moved = np.abs(posterior.mean - weights.last.posterior.mean) / np.sqrt(np.diag(posterior.covariance))
    name, most = as_declared(state.about.labels[int(np.argmax(moved))]), _most_error(state)
    most_k = importance.limit(len(weights.posterior))
    checks = (
        (
            weights.pareto_k <= most_k,
            f"few points decide alone (Pareto k {weights.pareto_k:.2f}, at most {most_k:.2f})",
        ),
        (
            weighted.second_k <= common.MOST_SECOND_K,
            f"tails are not reached (Pareto k {weighted.second_k:.2f}, at most {common.MOST_SECOND_K:g})",
        ),
        (weighted.error <= most, f"an error of {weighted.error:.2g} sds (at most {most:g})"),
        (
            weights.effective >= tol.LEAST_EFFECTIVE,
            f"{weights.effective:.0%} of the points are effective (at least {tol.LEAST_EFFECTIVE:.0%})",
        ),
        (grown <= most, f"an sd that last changed by {np.expm1(grown):.0%}, along a heavy tail"),
    )
    reasons = ", ".join(text for is_well, text in checks if not is_well)
    return (
        f"means and sds are not known well enough, of {name} above all: use {remedy}, declare {name} closer to normal, "
        f"or give it a prior that says more. Of {len(state.evaluated.points)} points: {reasons}"
    )
