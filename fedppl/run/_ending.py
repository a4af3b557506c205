"""How a run ended: its status, with the setting to change, who never replied, and who fell back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Posterior
from fedppl.engine.guard import REFUSED
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.model.client import ClientModel
from fedppl.numerics import mirrors
from fedppl.results import departure, fallbacks
from fedppl.results.records import Record
from fedppl.run._prior_check import prior_conflict
from fedppl.run._run import Run
from fedppl.run.one_round import without_numbers
from fedppl.settings import some_of
from fedppl.types import Array, Status

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
    short, can = departure.shortfall(run.infos), shared.without is not None
    noise = run.records[-1].info.get("mc_error", 0.0)
    trusted = departure.NOISY if isinstance(noise, float) and noise > _NOISE else departure.TRUSTED
    return departure.sentence(short, departure.CORRECTION if can else "fedppl.EP()", trusted), can and short >= trusted


def ending(run: Run, limit: int, *, stopped: str = "") -> tuple[Status, str]:
    """Say how the run ended, or what stopped it, with the setting to change; who never replied, and who fell back."""
    status, message = run.records[-1].status if run.records else Status.RUNNING, run.message
    infos = run.infos
    fallen = "; ".join(
        filter(
            None,
            (
                fallbacks.sentence(infos, len(run.clients)),
                fallbacks.earlier((r.infos for r in run.records if not r.closing), sum(r.seconds for r in run.records)),
            ),
        )
    )
    if status is Status.CONVERGED:
        another, (short, unknown) = _mirror_image(run), _too_short(run)
        told = (another, short, message, prior_conflict(run), fallbacks.unchecked(infos), fallen)
        return Status.STALLED if another or unknown else status, "; ".join(filter(None, told))
    silent = set(run.clients) - {client_id for record in run.records for client_id in record.infos}
    if len(silent) == len(run.clients):
        reasons = _distinct(reason for record in run.records for reason in record.failures.values())
        return Status.STALLED, f"no client ever sent a usable reply: {reasons}"
    last = run.records[-1]
    lost = ""
    # What the algorithm was not told; where rounds ran out, failing clients may be why.
    if last.failures and (status is Status.RUNNING or not message or not last.bytes_up):
        who = some_of(last.failures)
        lost = f"{len(last.failures)} of {len(last.asked)} clients, {who}, sent no usable reply in the last round"
        lost = f"{lost}: {_distinct(last.failures.values())}"
    never = silent - {client_id for record in run.records for client_id in record.asked}
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
        asked = "" if run.counted > limit else f" of {limit}"  # a checkpoint may have had more
        message = f"stopped{by} after {run.counted}{asked} rounds: {message or 'raise rounds='}"
    return status, "; ".join(filter(None, (message, fallen)))


_MOST_CLIENTS = 300
_MOST = 1500  # densities of clients, at images
_LOCAL = NestedLaplace()


def _mirror_image(run: Run) -> str:
    """Say along which coordinate there is another mode; empty where none is, or none can be told."""
    shared, models = run.algorithm.result.shared, list(run.models.values())
    if not isinstance(shared, Posterior) or shared.without is None or not run.algorithm.needs.kernel:
        return ""
    if not 0 < len(models) <= _MOST_CLIENTS or models[0].prior.gaussian.precision.ndim == 1:
        return ""
    corrected, q = shared.corrected(run.state), shared.gaussian(run.state)
    if corrected is None:
        center, sd, known = gaussian.mean(q), gaussian.standard_deviations(q), None
    else:
        center, sd = corrected.mean, np.sqrt(np.diag(corrected.covariance))
        known = corrected.points, corrected.weights
    patterns = mirrors.signs(models[0].layout)[: _MOST // len(models)]
    found = mirrors.unseen(lambda points: _log_posterior(models, points), center, sd, patterns, known)
    if found is None:
        return ""
    labels = [models[0].layout.labels[k] for k in found[0]]
    return (
        f"the posterior has several modes: with the sign of {' and '.join(labels[:4])} changed the density is about "
        f"{found[1]:.2g} of both, and what was found has none of it. Declare the model so that one is left: positive "
        "(pm.HalfNormal), or by a prior that rules the other out"
    )


def _log_posterior(models: Sequence[ClientModel], points: Array) -> Array:
    """log p(φ) Π_k p(y_k | φ) at points (T, m), up to a constant."""
    assert _LOCAL.log_factor is not None
    values = np.asarray(models[0].prior.log_density(points), dtype=float)
    for model in models:
        values = values + _LOCAL.log_factor(model, points, 0.0)
    return np.where(np.isnan(values), -np.inf, values)
