"""The posterior by sums: a search for its mode by summed expansions, then summed log densities at points about it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from fedppl import contracts, gaussian, settings
from fedppl.algorithms.ep import _correction, _judged, _starts
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep._correction import Correcting, asked, asked_at, exchange, latest, weighed
from fedppl.algorithms.ep._rounds import newton_round, of_one_mode
from fedppl.algorithms.ep._state import EPInfo, EPState, Taken, reported
from fedppl.algorithms.ep.ep import Matching, _asks, _conclusion, _corrected, _details, checked, init
from fedppl.algorithms.ep._evidence import evidence
from fedppl.algorithms.ep.sites import NO_VALUE
from fedppl.contracts import ClientUpdate, ClientView, Received, Report
from fedppl.contracts.algorithm import always
from fedppl.local import values as _values
from fedppl.local._smooth import smooth_over
from fedppl.local.target import at_target, draw_target
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.numerics import student
from fedppl.numerics.importance import skewness
from fedppl.types import Array, Message, Rng, Status

ALL = "all clients"
_KNOWN = 128  # points of an exchange at which what Laplace leaves out is known
_ENOUGH = 0.02  # log units: median error of foretelling it elsewhere


def Sums(*, points: int = 2048, pilot: int = 256, exchanges: int = 5, starts: int = 4) -> contracts.Algorithm[Any, None]:
    local = NestedLaplace()
    matching = checked(local, 0.01, 1.0, "full")
    return contracts.Algorithm(
        name="Sums",
        settings=settings.described(None, points=points, pilot=pilot, exchanges=exchanges, starts=starts)
        if False
        else {"points": str(points), "pilot": str(pilot), "exchanges": str(exchanges), "starts": str(starts)},
        init=functools.partial(_init, matching=matching, starts=starts),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, local=local),
        update_server=functools.partial(_update_server, points=points, pilot=pilot, exchanges=exchanges),
        replies=contracts.Replies(_shapes, summed=always),
        result=contracts.Result(
            lambda state, client_id: _conclusion(state.inner, client_id),
            functools.partial(draw_target, local=local),
            contracts.Posterior(
                lambda state: state.inner.sites.q,
                lambda state: _corrected(state.inner),
                lambda state, clients: evidence(state.inner, clients),
            ),
            _own_details,
            preliminary=lambda state: state.inner.warm_start is not None,
            closing=lambda state: state.inner.correction is not None and not state.inner.correction.trusted,
            tests_convergence=True,
        ),
        needs=contracts.Needs(local.check),
        disclosure=contracts.Disclosure(functools.partial(_asks, local=local), concludes=at_target),
    )


class State(NamedTuple):
    inner: EPState
    clients: int


def _init(layout: Any, clients: tuple[str, ...], rng: Rng, *, matching: Matching, starts: int) -> State:
    from fedppl.algorithms.ep.ep import Closing
    from fedppl.algorithms.ep.correction import Correction

    closing = Closing(Correction(), 10**9)
    inner = init(layout, (ALL,), rng, matching=matching, warm=True, closing=closing, starts=starts, asked_for=True)
    share = 0.0 if layout.prior_is_gaussian else 1.0 / len(clients)
    return State(inner._replace(prior_share=share), len(clients))


def _broadcast(state: State, client_id: str) -> Message:
    inner = state.inner
    if inner.warm_start is not None:
        search = inner.warm_start
        return {"point": search.point, "move": search.move, "prior_share": np.array(inner.prior_share)}
    assert inner.correction is not None
    points = asked(inner.correction)
    return {
        "points": points,
        "known": _known(len(points)).astype(float),
        "center": _center(inner.correction, inner),
        "prior_share": np.array(inner.prior_share),
    }


def _center(held: Correcting, inner: EPState) -> Array:
    return gaussian.mean(inner.sites.q) if held.found is None else held.found.mean


def _known(count: int) -> Any:
    return np.unique(np.linspace(0, count - 1, _KNOWN).astype(int))


def _update_client(client: ClientView, personal: None, message: Message, rng: Rng, *, local: Any) -> ClientUpdate[None]:
    share = float(message["prior_share"])
    if "point" in message:
        reply, info = _warm_start.expand_along(client, local, message["point"], message["move"], share)
        lost = reply["ray"] <= NO_VALUE
        gone = float(reply["value"]) <= NO_VALUE
        return ClientUpdate(
            None,
            {
                "value": np.array(0.0 if gone else float(reply["value"])),
                "gradient": reply["gradient"],
                "hessian": reply["hessian"],
                "ray": np.where(lost, 0.0, reply["ray"]),
                "lost": np.concatenate([[float(gone)], lost.astype(float)]),
            },
            info,
        )
    points, known, center = message["points"], np.asarray(message["known"]).astype(int), message["center"]
    laplace = _values.approximated(client, points, center, share)
    left = np.zeros(len(known))
    errors, constant = np.zeros(len(known)), (0.0, 0.0)
    if not _values.is_exact(client):
        more = _values.left_out(client, points[known], center, _values.approximated(client, points[known], center, 0.0))
        left, errors, constant = more.values, more.errors, more.constant
    lost, unknown = ~np.isfinite(laplace), ~np.isfinite(left)
    return ClientUpdate(
        None,
        {
            "values": np.where(lost, 0.0, laplace),
            "lost": lost.astype(float),
            "left": np.where(unknown, 0.0, left),
            "unknown": unknown.astype(float),
            "errors": np.where(unknown, 0.0, errors),
            "squares": np.where(unknown, 0.0, errors**2),
            "constant": np.array([abs(constant[0]), constant[1] ** 2]),
            "improper": np.array(float(not client.has_proper_prior)),
            "inexact": np.array(float(not _values.is_exact(client))),
        },
        {},
    )


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    m = state.inner.sites.structure.size
    if state.inner.warm_start is not None:
        t = len(_warm_start.LENGTHS)
        return {"value": (), "gradient": (m,), "hessian": (m * (m + 1) // 2,), "ray": (t,), "lost": (1 + t,)}
    count = len(asked(state.inner.correction))
    known = len(_known(count))
    return {
        "values": (count,), "lost": (count,), "left": (known,), "unknown": (known,), "errors": (known,),
        "squares": (known,), "constant": (2,), "improper": (), "inexact": (),
    }  # fmt: skip


def _update_server(
    state: State, received: Received, *, points: int, pilot: int, exchanges: int
) -> tuple[State, Report]:
    inner = state.inner
    if received.clients < state.clients:
        return state, Report(EPInfo("void", np.nan, np.nan, 1.0, np.nan, np.nan, np.nan), Status.RUNNING, "not all")
    sums = received.sums()
    if inner.warm_start is not None:
        lost = sums["lost"] > 0.5
        reply = {
            "value": np.array(NO_VALUE if lost[0] else float(sums["value"])),
            "gradient": sums["gradient"],
            "hessian": sums["hessian"],
            "ray": np.where(lost[1:], NO_VALUE, sums["ray"]),
        }
        taken = newton_round(inner, inner.warm_start, {ALL: reply}, None)
        after = taken.state
        if after.warm_start is None and taken.status is Status.RUNNING:
            several = of_one_mode(taken._replace(status=Status.CONVERGED))
            if several.status is Status.STALLED:
                inner, report = reported(several)
                return state._replace(inner=inner), report
            begun = _correction.start(after.sites, np.zeros(after.sites.structure.size), pilot, np.inf, after.stream, keep=False)
            after = after._replace(correction=begun)
        inner, report = reported(taken._replace(state=after))
        return state._replace(inner=inner), report
    taken = _values_round(inner, inner.correction, sums, points, exchanges)
    inner, report = reported(taken)
    return state._replace(inner=inner), report


def _values_round(inner: EPState, held: Correcting, sums: Any, points: int, exchanges: int) -> Taken:
    where, at = asked_at(held), asked(held)
    values = np.where(sums["lost"] > 0.5, np.nan, sums["values"])
    alike, noise = np.zeros(len(at)), np.zeros(len(at))
    if sums["inexact"] > 0.5:
        left = np.where(sums["unknown"] > 0.5, np.nan, sums["left"])
        known = _known(len(at))
        smooth = smooth_over(at, known, left, sums["errors"], _ENOUGH)
        if smooth is None:
            print("NOT SMOOTH", len(at), np.nanstd(left))
            values = values + np.nanmedian(left)
        else:
            values = values + smooth[0]
            alike = smooth[1]
            noise = alike**2
    residual, a, n = held.residual.copy(), held.alike.copy(), held.noise.copy()
    residual[where] = values - gaussian.log_kernel(_sites.site(inner.sites, 0), at)
    a[where], n[where] = alike, noise
    after = held._replace(
        residual=residual, alike=a, noise=n, errors=np.zeros((0, len(a))), each=np.zeros((0, len(a))),
        constants=np.maximum(held.constants, [[float(sums["constant"][0]), float(np.sqrt(sums["constant"][1]))]]),
        answered=np.ones(1, dtype=bool), is_proper=held.is_proper and float(sums["improper"]) < 0.5,
        rounds=held.rounds + 1,
    )  # fmt: skip
    info = EPInfo("values", np.nan, np.nan, 1.0, np.nan, np.nan, np.nan)
    if after.exchanges == 1:
        found = weighed(after, inner.sites.q, after.residual)
        if found is not None:
            after = after._replace(found=found)
            begun = exchange(after, inner.sites, _judged._refitted(found, points // student.SCRAMBLES, inner.sites.q), inner.stream)
            info = info._replace(correction_ess=found.ess, correction_pareto_k=found.pareto_k)
            return Taken(inner._replace(correction=begun), info, Status.RUNNING, "the correction is not done")
    judged = _judged.judge(after, inner.sites, exchanges, inner.stream, None)
    found = judged.state.found
    if found is not None:
        info = info._replace(correction_ess=found.ess, correction_pareto_k=found.pareto_k)
    status = Status.RUNNING
    if judged.done:
        status = Status.CONVERGED if judged.state.trusted else Status.STALLED
    return Taken(inner._replace(correction=judged.state), info, status, judged.message)


def _own_details(state: State) -> Any:
    held = state.inner.correction
    if held is None or not held.trusted or held.found is None:
        return {}
    return {
        "corrected_mean": (("rows",), held.found.mean),
        "corrected_covariance": (("rows", "columns"), held.found.covariance),
    }
