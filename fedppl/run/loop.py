"""The round loop: a round at a time, or a whole fit; `front` is how users call it.

Engines move messages and algorithms compute; everything in between is in this folder, once.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian, settings
from fedppl.contracts import AnyAlgorithm, Posterior
from fedppl.engine.guard import REFUSED
from fedppl.local import integrate
from fedppl.model.declaration import FederatedModel
from fedppl.model.stack import ClientsOf, samples
from fedppl.numerics import mirrors
from fedppl.numerics.prior import SharedPrior
from fedppl.results import diagnostics
from fedppl.results.fit import Fit
from fedppl.results.records import Record, ever_used, unarrived
from fedppl.run.one_round import Round, one_round, without_numbers
from fedppl.run.progress import Progress
from fedppl.run.start import Choice, Clients, Options, Run, require_callback, save
from fedppl.run.start import start as begin
from fedppl.settings import some_of
from fedppl.types import Array, ConvergenceWarning, DeclarationError, Status

logger = logging.getLogger(__name__)


def rounds(
    model: FederatedModel, clients: Clients, algorithm: AnyAlgorithm | Choice, options: Options
) -> Iterator[Round]:
    """See `fedppl.rounds`."""
    return _all(begin(model, clients, algorithm, options))


def fit(
    model: FederatedModel,
    clients: Clients,
    algorithm: AnyAlgorithm | Choice,
    options: Options,
    *,
    callback: Callable[[Round], bool | None] | None = None,
    progressbar: bool = True,
    stacklevel: int = 3,
) -> Fit:
    """See `fedppl.fit`; `stacklevel` is that of who called it, for warnings."""
    require_callback(callback)
    choice = algorithm if isinstance(algorithm, Choice) else None
    with Progress(options.rounds, show=progressbar) as progress:
        progress.say("checking and compiling")
        run = begin(model, clients, algorithm, options)
        algorithm = run.algorithm
        run.progress = progress
        progress.say(f"{len(run.clients)} clients are ready")
        started = time.perf_counter()
        try:
            stopped = _followed(run, callback)
        except BaseException:
            run.engine.close()
            raise
    try:
        status, message = _ending(run, stopped=stopped)
        if status in (Status.STALLED, Status.MAX_ROUNDS):
            message = "; ".join(filter(None, (model.advice, message)))
        told = f"fit ended with status {status.value}" + (f": {message}" if message else "")
        # What is said as a warning below, or was said in its round, is not said twice.
        caveat = bool(run.message) and not run.records[-1].mild
        loud = caveat if status.ok else not algorithm.result.tests_convergence
        logger.log(logging.WARNING if loud else logging.INFO, told, extra={"status": status.value})
        result = Fit(
            algorithm=algorithm,
            state=run.state,
            layout=run.layout,
            declaration=model.knowing({client.client_id: client.kind for client in samples(run.models)}),
            client_ids=run.clients,
            clients=run.models,
            reader=run.engine.reader(),
            records=tuple(run.records),
            status=status,
            message=message,
            personal={one: run.personal[one] for one in run.clients if one in run.personal} if run.personal else {},
            seed=run.seed,
            seconds=time.perf_counter() - started,
        )
        if status is Status.INTERRUPTED and not run.models:
            logger.warning("sites are not told that the run is over: with a checkpoint the same call goes on")
        elif not (reason := unarrived(result)):
            final = functools.partial(algorithm.result.final_message, run.state)
            said = run.engine.conclude(final, run.name, run.seed, status)
            if any(said.values()):  # once: a site that is told again that the run is over says nothing
                run.told = {**run.told, **{client_id: words for client_id, words in said.items() if words}}
                save(run)
            result = dataclasses.replace(result, told=run.told)
        elif not run.models:
            logger.warning("sites are not asked to draw their posteriors: %s", reason, extra={"status": status.value})
        if not run.models:
            try:
                _ = result.idata  # while a site can still be asked for the way back to the constrained space
            except RuntimeError as error:  # a site that lies about that does not cost the fit
                logger.error("fit.idata is not there: %s", error, extra={"status": status.value})
    finally:
        run.engine.close()
    if choice is not None and options.checkpoint is None and _goes_on(choice, run, status, stopped):
        logger.info("%s did not do, and the fit goes on by %s: %s", choice.first.name, choice.other.name, message)
        again = Options(options.rounds, options.engine, random_seed=run.seed)
        shown: dict[str, Any] = {"callback": callback, "progressbar": progressbar, "stacklevel": stacklevel + 1}
        return fit(model, clients, choice.other, again, **shown)
    if algorithm.result.tests_convergence and not status.ok:
        warnings.warn(ConvergenceWarning(told, result), stacklevel=stacklevel)
    return result


_MOST_AGAIN = 2000  # clients of whom single ones can be asked, one after the other


def _goes_on(choice: Choice, run: Run, status: Status, stopped: str) -> bool:
    """Whether the other algorithm of a choice may do where the first, which nobody asked for, did not.

    Where it is known where the posterior lies, and not what it is like there. A search that found several modes, or
    none, has said what there is to say.
    """
    return (
        status is Status.STALLED
        and not stopped
        and run.algorithm is choice.first
        and choice.first is not choice.other
        and not choice.first.result.preliminary(run.state)
        and len(run.clients) <= _MOST_AGAIN
    )


def _followed(run: Run, callback: Callable[[Round], bool | None] | None) -> str:
    """Run to the end; what stopped it before, if something did: "the callback", or "Ctrl-C"."""
    try:
        for step in _run(run):
            if callback is not None and says_stop(callback(step), step.number):
                return "the callback"
    except KeyboardInterrupt:
        if not run.records:  # there is nothing to give
            raise
        return "Ctrl-C"
    return ""


def says_stop(answer: Any, number: int) -> bool:
    """What a callback's value means."""
    if answer is not None and not isinstance(answer, bool | np.bool_):
        raise DeclarationError(
            f"the callback returned {settings.shown(answer)} in round {number}; return True to stop, False or None to "
            "go on, such as bool(np.all(...)) for an array."
        )
    return bool(answer)


def _all(run: Run) -> Iterator[Round]:
    """The rounds of a run; the engine is closed when the last is done or the caller stops."""
    try:
        yield from _run(run)
    finally:
        run.engine.close()


def _run(run: Run) -> Iterator[Round]:
    """Ask, wait, check, update, record; until converged or out of rounds."""
    result = run.algorithm.result
    while not run.records or run.records[-1].status is Status.RUNNING:
        if run.limit is not None and run.counted >= run.limit and not result.closing(run.state):
            # Sites keep account of a run's rounds, and what is not saved could not be asked of them again.
            if not run.engine.has_sites():
                run.state, run.saves = result.out_of_rounds(run.state), False
            if not result.closing(run.state):
                return
        yield one_round(run)


_NOISE = 0.05  # of a mean, in sds, above which clients draw


def _distinct(reasons: Iterable[str]) -> str:
    """At most three reasons that differ in more than their numbers."""
    return "; ".join(list({without_numbers(reason): reason for reason in sorted(reasons)}.values())[:3])


def _last_reasons(records: Sequence[Record], clients: Iterable[str]) -> list[str]:
    """The last reason of each of these clients for not having sent what was asked for."""
    last = {client_id: reason for record in records for client_id, reason in record.failures.items()}
    return [last[client_id] for client_id in clients if client_id in last]


def _too_short(run: Run) -> tuple[str, bool]:
    """Say that sds of a Gaussian may be too small, and whether by more than is known of one that could be corrected."""
    shared = run.algorithm.result.shared
    if not isinstance(shared, Posterior):
        return "", False
    short, can = diagnostics.shortfall(run.infos), shared.without is not None
    noise = run.records[-1].info.get("mc_error", 0.0)
    trusted = diagnostics.NOISY if isinstance(noise, float) and noise > _NOISE else diagnostics.TRUSTED
    return diagnostics.shortfall_sentence(
        short, diagnostics.CORRECTION if can else "fedppl.EP()", trusted
    ), can and short >= trusted


def _ending(run: Run, *, stopped: str = "") -> tuple[Status, str]:
    """Say how the run ended, or what stopped it, with the setting to change; who never replied, and who fell back."""
    status, message = run.records[-1].status if run.records else Status.RUNNING, run.message
    infos = run.infos
    searched, seconds = (r.infos for r in run.records if not r.closing), sum(r.seconds for r in run.records)
    sentences = diagnostics.fallback_sentence(infos, len(run.clients)), diagnostics.earlier_fallbacks(searched, seconds)
    fallen = "; ".join(filter(None, sentences))
    if status is Status.CONVERGED:
        another, (short, unknown) = _mirror_image(run), _too_short(run)
        told = (another, short, message, prior_conflict(run), diagnostics.unchecked_laplace(infos), fallen)
        return Status.STALLED if another or unknown else status, "; ".join(filter(None, told))
    silent = set(run.clients) - ever_used(run.records, run.clients)
    if len(silent) == len(run.clients):
        reasons = _distinct(reason for record in run.records for reason in record.failures.values())
        return Status.STALLED, f"no client ever sent a usable reply: {reasons}"
    last = run.records[-1]
    lost = ""
    # What the algorithm was not told, as of sums; where rounds ran out, failing clients may be why.
    unnamed = bool(set(last.failures) - silent) and bool(run.algorithm.replies.summed(run.state))
    if last.failures and (status is Status.RUNNING or not message or not last.used or unnamed):
        who = some_of(last.failures)
        lost = f"{len(last.failures)} of {last.n_asked} clients, {who}, sent no usable reply in the last round"
        lost = f"{lost}: {_distinct(last.failures.values())}"
    never = silent - {client_id for record in run.records for client_id in (*record.asked, *record.failures)}
    if never:
        message = f"clients {sorted(never)[:5]} were never asked, see participation=; {message}"
    if silent - never:
        why = _distinct(_last_reasons(run.records, silent - never))
        message = f"clients {sorted(silent - never)[:5]} never sent a usable reply: {why}; {message}"
    searching = run.algorithm.result.preliminary(run.state)
    if searching and (missing := {k: why for record in run.records for k, why in record.reasons.items()}):
        missed = f"at points of the search clients {sorted(missing)[:5]} had no answer: {_distinct(missing.values())}"
        lost = "; ".join(filter(None, (lost, missed)))
    # What a site does not allow no setting mends that the algorithm could name.
    refused = REFUSED in last.failures.values()
    message = "; ".join(filter(None, (lost, message) if refused else (message, lost)))
    if stopped and searching and status is Status.RUNNING:
        early = "the start, whose rounds do not count, was not at its end: let it go on"
        message = "; ".join(filter(None, (early, lost)))
    if status is Status.RUNNING:
        by = f" by {stopped}" if stopped else ""
        status = Status.INTERRUPTED if stopped == "Ctrl-C" else Status.MAX_ROUNDS
        asked = f" of {run.limit}" if run.counted <= (run.limit or 0) else ""  # a checkpoint may have had more
        message = f"stopped{by} after {run.counted}{asked} rounds: {message or 'raise rounds='}"
    return status, "; ".join(filter(None, (message, fallen)))


_MOST = 20_000  # densities of clients, at images


def _mirror_image(run: Run) -> str:
    """Say along which coordinate there is another mode; empty where none is, or none can be told."""
    shared = posterior_of_all(run)
    if shared is None or not 0 < len(run.models) <= _MOST:
        return ""
    one = next(iter(run.models.values()))
    if one.prior.gaussian.precision.ndim == 1:
        return ""
    corrected, q = shared.corrected(run.state), shared.gaussian(run.state)
    if corrected is None:
        center, sd, known = gaussian.mean(q), gaussian.standard_deviations(q), None
    else:
        center, sd = corrected.mean, np.sqrt(np.diag(corrected.covariance))
        known = corrected.points, corrected.weights
    patterns = mirrors.signs(one.layout)[: _MOST // len(run.models)]
    stacks, prior = integrate.stacks(run.models), one.prior

    def log_posterior(points: Array) -> Array:
        values = np.asarray(prior.log_density(points), dtype=float) + integrate.log_density(stacks, points)
        return np.where(np.isnan(values), -np.inf, values)

    found = mirrors.unseen(log_posterior, center, sd, patterns, known)
    if found is None:
        return ""
    labels = [one.layout.labels[k] for k in found[0]]
    return (
        f"the posterior has several modes: with the sign of {' and '.join(labels[:4])} changed the density is about "
        f"{found[1]:.2g} of both, and what was found has none of it. Declare the model so that one is left: positive "
        "(pm.HalfNormal), or by a prior that rules the other out"
    )


# Whether the prior of a shared variable and the data of all clients contradict each other -----------------------------

_FAR = 5.0  # sds of what the prior lets the data do
_MOST_COMPARED = 300  # an expansion of each is taken; of more that lie side by side so many, spread over all
_NAMED = 3
_YIELDS = 0.5  # of the curvature in the prior's middle
_LEAST = 0.01  # of the same, in any direction
_TOLD = 1e-9  # of the prior's variance: of less, slopes and means are not known well enough
_ROUNDING = 1e-12  # of what the data tell of the coordinate that they tell most of
_TRIED = 5  # coordinates that are looked at again
_STEPS = 4.0 ** -np.arange(9)  # of the way to where the data want a coordinate


class Likelihood(NamedTuple):
    """Log density of all clients' data given φ, with their own variables integrated."""

    log_density: Callable[[Array], Array]  # at points (S, m), (S,); −inf where a client has no value
    slopes: Callable[[Array], tuple[Array, Array]]  # gradient (m,) and Hessian (m, m) at a point


class _Slopes(NamedTuple):
    """First and second derivatives of a log density at a point; the second with its sign turned."""

    gradient: Array  # (m,)
    information: Array  # (m, m)


def posterior_of_all(run: Run) -> Posterior[Any] | None:
    """The posterior of an algorithm that has that of the declared model: those give its evidence, others do not."""
    shared = run.algorithm.result.shared
    if not isinstance(shared, Posterior) or not run.algorithm.needs.kernel:
        return None
    return None if shared.evidence is Posterior._field_defaults["evidence"] else shared


def prior_conflict(run: Run) -> str:
    """Name the coordinates whose prior the data of a run contradict; empty where none is, or none can be told."""
    shared, models = posterior_of_all(run), run.models
    if shared is None or not models:
        return ""
    if len(models) > _MOST_COMPARED and not isinstance(models, ClientsOf):
        return ""
    step = -(-len(models) // _MOST_COMPARED)
    asked = {name: models[name] for name in list(models)[::step]}
    stacks, one = integrate.stacks(asked), next(iter(asked.values()))
    likelihood = Likelihood(
        functools.partial(integrate.log_density, stacks), functools.partial(integrate.slopes, stacks)
    )
    said = contradicted(one.prior, likelihood, one.layout.labels, gaussian.mean(shared.gaussian(run.state)))
    if not said:
        return ""
    advice = getattr(one.declared.builder, "advice", "") or "look at units, or declare a wider prior"
    logger.warning(said := f"{said}; {advice}")
    return said


def contradicted(prior: SharedPrior, likelihood: Likelihood, labels: Sequence[str], center: Array) -> str:
    r"""Name the coordinates whose prior clients' data contradict, near the posterior mean μ (m,).

    With the prior N(μ₀, Σ₀) and a likelihood of information I, the posterior mean is itself random before data are
    seen, and a score test of the prior needs no more than slopes at μ:

    .. math:: \mu - \mu_0 \sim N(0, \Sigma_0 - \Sigma), \qquad \Sigma_0 - \Sigma = \Sigma_0 I \Sigma

    It does not depend on how far μ moves, so that a prior that is far too narrow stands out, too. Σ₀ is that of the
    declared prior's own curvature at μ; where this is much less than in its middle, as in the tails of a Cauchy or a
    scale near 0, the prior yields, and is left out. So is a variable whose prior depends on other shared variables,
    and so are clients at sites of their own, whose slopes are theirs.
    """
    if prior.gaussian.precision.ndim == 1:  # of too many coordinates for a matrix
        return ""
    declared = _Slopes(_gradient(prior, center), prior.gaussian.precision - prior.log_ratio_hessian(center))
    data = _of_data(likelihood, center)
    if data is None or not np.all(np.isfinite(declared.information)):
        return ""
    scale = prior.gaussian.precision
    bounded = _bounded(declared.information, scale)
    holds = np.diag(declared.information) > _YIELDS * np.diag(scale)
    # A hierarchy's sd and what it is of may yield together where each alone does not.
    holds &= np.diag(np.linalg.inv(bounded)) < np.diag(np.linalg.inv(scale)) / _YIELDS
    declared = declared._replace(information=bounded)
    found = np.where(holds, deviations(declared, data), 0.0)
    far = np.flatnonzero(np.abs(found) > _FAR)
    found[[i for i in far if not _stands_alone(prior, center, int(i))]] = 0.0
    found = _held(likelihood, center, declared, data, found)
    return _said(found, labels, declared, center)


def deviations(prior: _Slopes, data: _Slopes) -> Array:
    """(μ − μ₀)ᵢ in sds of what it is before data are seen, (m,); 0 where the data tell nothing of the coordinate."""
    spread = np.linalg.inv(prior.information)
    posterior = np.linalg.inv(prior.information + data.information)
    gained = spread @ data.information @ posterior  # Σ₀ − Σ, without a difference of nearly equal numbers
    shift = posterior @ data.gradient - gained @ prior.gradient
    told = np.diag(data.information) * np.diag(spread)  # in units of the prior
    known = (np.diag(gained) > _TOLD * np.diag(spread)) & (told > _ROUNDING * np.max(told))
    return np.where(known, shift / np.sqrt(np.where(known, np.diag(gained), 1.0)), 0.0)


def _held(likelihood: Likelihood, center: Array, prior: _Slopes, data: _Slopes, found: Array) -> Array:
    r"""At most √2T sds for those far off, with what densities themselves lose by coordinate i's prior; 0 for others.

    Slopes alone say too much where a likelihood bends little or the other way, as that of a scale of few rows does.
    T is what the prior has lost at μ, and what the posterior without it gains from there on the line along which
    others follow i; of normal densities √2T is the deviation itself.
    """
    far = [int(i) for i in np.argsort(-np.abs(found), kind="stable") if abs(found[i]) > _FAR][:_TRIED]
    kept = np.zeros_like(found)
    if not far:
        return kept
    spread = np.linalg.inv(prior.information)
    posterior = np.linalg.inv(prior.information + data.information)
    gained = np.diag(spread @ data.information @ posterior)
    from_mean = -spread @ prior.gradient
    points, others = [center], [0.0]
    for i in far:
        line = posterior[i] / posterior[i, i]
        for t in found[i] / np.sqrt(gained[i]) * posterior[i, i] * _STEPS:
            ratio = t * (prior.gradient @ line) - t**2 / 2 * (line @ prior.information @ line)
            points.append(center + t * line)
            others.append(float(ratio + (from_mean[i] + t) ** 2 / (2 * spread[i, i])))
    values = likelihood.log_density(np.array(points))
    if np.isfinite(values[0]):
        lost = (values - values[0] + others)[1:].reshape(len(far), -1).max(axis=1)
        kept[far] = np.sign(found[far]) * np.minimum(np.abs(found[far]), np.sqrt(2 * np.maximum(lost, 0.0)))
    return kept


def _stands_alone(prior: SharedPrior, center: Array, i: int) -> bool:
    """Whether coordinate i's prior is the same wherever the others are: that of a hierarchy yields with its sd."""
    sd, here = gaussian.standard_deviations(prior.gaussian), _gradient(prior, center)[i]
    for sign in (1.0, -1.0):
        moved = center + sign * sd
        moved[i] = center[i]
        if not np.isclose(_gradient(prior, moved)[i], here, rtol=1e-6, atol=1e-6 / sd[i]):
            return False
    return True


def _gradient(prior: SharedPrior, phi: Array) -> Array:
    """Slopes of the declared prior, and not of the Gaussian that the server starts from."""
    start = prior.gaussian
    return np.asarray(start.linear - start.precision @ phi + prior.log_ratio_gradient(phi))


def _of_data(likelihood: Likelihood, center: Array) -> _Slopes | None:
    """None where a client has no expansion."""
    with np.errstate(invalid="ignore"):
        gradient, hessian = likelihood.slopes(center)
    if not np.all(np.isfinite(hessian)) or not np.all(np.isfinite(gradient)):
        return None
    values, vectors = np.linalg.eigh(-(hessian + hessian.T) / 2)
    return _Slopes(gradient, (vectors * np.maximum(values, 0.0)) @ vectors.T)


def _bounded(information: Array, scale: Array) -> Array:
    """With no direction in which it is less than a hundredth of `scale`."""
    root = np.linalg.cholesky(scale)
    back = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(back @ information @ back.T)
    half = root @ vectors
    return np.asarray((half * np.maximum(values, _LEAST)) @ half.T)


def _said(found: Array, labels: Sequence[str], prior: _Slopes, center: Array) -> str:
    worst = [int(i) for i in np.argsort(-np.abs(found), kind="stable") if abs(found[i]) > _FAR]
    if not worst:
        return ""
    spread = np.linalg.inv(prior.information)
    sd = np.sqrt(np.diag(spread))
    mean = center + spread @ prior.gradient
    mean = np.where(np.abs(mean) < 1e-6 * sd, 0.0, mean)
    named = ", ".join(
        f"{labels[i]} ({found[i]:+.2g} sds from its prior, about {mean[i]:.2g} ± {sd[i]:.2g})" for i in worst[:_NAMED]
    )
    more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
    return f"data contradict the prior of {named}{more}: where it holds a variable back, others make up for that"
