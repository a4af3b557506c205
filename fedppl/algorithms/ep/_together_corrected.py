"""Exchanges of the correction with many clients at once, where the posterior is far from a Gaussian."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.ep import _correction, _judged
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._correction import Correcting
from fedppl.algorithms.ep._state import EPInfo, EPState
from fedppl.algorithms.ep.correction import Correction
from fedppl.contracts import Report
from fedppl.contracts.many import ManyClients, Passed
from fedppl.gaussian import Gaussian
from fedppl.local import many as _many
from fedppl.local.many import Way
from fedppl.types import Status

_MOST = 2 * 10**9  # log densities that an exchange may take: an hour, at a microsecond each on one core
_FIRST = 2  # exchanges after which a posterior that is to be trusted is not made better
_CHEAP = 10**6  # log densities of an exchange that is worth any gain: some seconds


def corrected(many: ManyClients, state: EPState, correction: Correction, way: Way, workers: int) -> Iterator[Passed]:
    """Exchanges at points that reach beyond q, judged as any others are; the last one has the state."""
    sites, count = state.sites, len(many)
    radius = np.inf if correction.radius is None else correction.radius
    held = _correction.start(sites, state.skewness, correction.points, radius, state.stream, keep=False)
    constants = np.tile([way.constant, 0.0], (count, 1))
    held = held._replace(is_proper=many.like.has_proper_prior, constants=constants)
    remedy = f"fedppl.EP(correction=fedppl.Correction(points={4 * correction.points}))"
    while True:
        densities = count * len(_correction.asked(held)) * max(1, len(way.nodes.nodes))
        if densities > _MOST:
            far = "the posterior is far from a Gaussian, and an exchange"
            why = f"{far} with {count} clients would take {densities:.0e} log densities; fit a part of them"
            yield Passed(count, _report(held, Status.STALLED, why))
            return
        held = _answered(many, held, state, way, workers)
        exchanges = correction.exchanges if densities <= _CHEAP else min(_FIRST, correction.exchanges)
        judged = _judged.judge(held, sites, exchanges, state.stream, None, remedy)
        if judged.done and not judged.state.trusted:  # more points than will do are asked for where they will not
            judged = _judged.judge(held, sites, correction.exchanges, state.stream, None, remedy)
        held = judged.state
        if judged.done:
            status = Status.CONVERGED if held.trusted else Status.STALLED
            yield Passed(count, _report(held, status, judged.message), state._replace(correction=held))
            return
        yield Passed(count, _report(held, Status.RUNNING, "the correction of q is not done"))


def _answered(many: ManyClients, held: Correcting, state: EPState, way: Way, workers: int) -> Correcting:
    """All clients' log factors at the points of an exchange, less those of their sites."""
    sites, points = state.sites, _correction.asked(held)
    found, errors = _many.totals(many, points, gaussian.mean(sites.q), nodes=way.nodes, workers=workers)
    dense = _sites.dense(sites.precision.sum(axis=0), sites.structure)
    values = found + many.like.prior.log_ratio(points)
    values = values - gaussian.log_kernel(Gaussian(sites.linear.sum(axis=0), dense), points)
    residual, alike, noise, where = (
        held.residual.copy(),
        held.alike.copy(),
        held.noise.copy(),
        _correction.asked_at(held),
    )
    residual[where] += values
    alike[where] += errors
    noise[where] += errors**2
    return held._replace(residual=residual, alike=alike, noise=noise, answered=np.ones_like(held.answered), rounds=1)


def _report(held: Correcting, status: Status, message: str) -> Report:
    info = EPInfo("correction", np.nan, np.nan, 1.0, np.nan, np.nan, np.nan)
    if held.found is not None:
        info = info._replace(correction_ess=held.found.ess, correction_pareto_k=held.found.pareto_k)
    return Report(info, status, message)
