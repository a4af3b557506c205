"""What every algorithm promises call by call, held on rounds that are played by hand: no loop and no engine."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from fedppl import gaussian
from fedppl.algorithms.ep import sites as _sites
from fedppl.contracts import (
    AnyAlgorithm,
    ClientView,
    OnlySums,
    Point,
    Posterior,
    Received,
    Reply,
    Report,
    Request,
    sum_replies,
)
from fedppl.engine.answer import answer
from fedppl.numerics.streams import stream
from fedppl.storage import codec
from fedppl.types import Status
from tests.support.promises import Promises
from tests.support.states import arrays, assert_near, assert_same_state, changed, received, said, told

NOTHING = Received({}, {}, 0)


class Played(NamedTuple):
    """Rounds by hand: the state after each, what the clients keep and reply in it, and what the server says of it."""

    states: list[Any]
    personal: list[dict[str, Any]]
    replies: list[dict[str, Any]]
    reports: list[Report]
    written: list[bytes]  # each state and what clients keep with it, as it was before the next round


def play(
    algorithm: AnyAlgorithm,
    models: Mapping[str, ClientView],
    rounds: int,
    subset: Callable[[int, tuple[str, ...]], tuple[str, ...]] | None = None,
    *,
    forget: bool = False,
) -> Played:
    """Broadcast, answer, update. The first state is that before any round."""
    layout, ids = next(iter(models.values())).layout, tuple(models)
    played = Played([algorithm.init(layout, ids, stream((1,)))], [{}], [], [], [])
    for number in range(1, rounds + 1):
        state, personal, replies = played.states[-1], dict(played.personal[-1]), {}
        played.written.append(codec.encode({"state": state, "personal": personal}))
        for client_id in ids if subset is None else subset(number, ids):
            message = algorithm.broadcast(state, client_id)
            kept = None if forget else personal.get(client_id)
            seed = stream((number, ids.index(client_id)))
            update = algorithm.update_client(models[client_id], kept, message, seed)
            personal[client_id], replies[client_id] = update.personal, update.reply
        after, report = algorithm.update_server(state, received(replies, summed=algorithm.replies.summed(state)))
        played.states.append(after)
        played.personal.append(personal)
        played.replies.append(replies)
        played.reports.append(report)
    return played


def rows_of(ledger: tuple[str, ...], state: Any, client_id: str) -> list[Any]:
    """A client's rows of the arrays of a state that only its replies change."""
    where = (state.sites if hasattr(state, "sites") else state).where if ledger else {}
    return [np.asarray(operator.attrgetter(path)(state)[where[client_id]]) for path in ledger]


def check(
    algorithm: AnyAlgorithm,
    models: Mapping[str, ClientView],
    *,
    summed: bool | None,
    ledger: tuple[str, ...] = (),
    rounds: int = 3,
) -> None:
    """Hold an algorithm to everything it promises call by call."""
    promises, ids = Promises(), tuple(models)
    played = play(algorithm, models, rounds)
    with promises("a client may be alone in a round, and say what all say"):
        _any_subset(algorithm, models)
    with promises("messages are arrays, and replies are as announced"):
        for state in played.states:
            _as_announced(algorithm, models, state)
    with promises("states and what clients keep are never changed in place"):
        for state, kept, text in zip(played.states, played.personal, played.written, strict=False):
            content = codec.decode(text)
            assert_same_state((state, kept), (content["state"], content["personal"]))
    with promises("a round without replies changes nothing that is told, and no row of a ledger"):
        for state in played.states[-2:]:
            after, _ = algorithm.update_server(state, NOTHING)
            assert_same_state(said(algorithm, after, ids), said(algorithm, state, ids))
            assert not any(changed(rows_of(ledger, after, k), rows_of(ledger, state, k)) for k in ids)
            if hasattr(after, "sites"):
                assert_same_state(after.sites, state.sites)
    with promises("replies in another order give the same state"):
        before, replies = played.states[-2], played.replies[-1]
        backwards = dict(reversed(replies.items()))
        after, _ = algorithm.update_server(before, received(backwards, summed=algorithm.replies.summed(before)))
        assert_near(said(algorithm, after, ids), said(algorithm, played.states[-1], ids), 1e-12)
    with promises("where sums are all that is needed, replies may be summed on the way"):
        phases = [algorithm.replies.summed(state) for state in played.states]
        assert set(phases) == ({True, False} if summed is None else {summed})
        if any(phases[:-1]):
            _sums(algorithm, played, phases.index(True))
    with promises("what a client keeps may be lost, and a new client draws"):
        forgot = play(algorithm, models, 2, forget=True).states[-1]
        for client_id in ids:
            final = algorithm.result.final_message(forgot, client_id)
            draws = algorithm.result.draw(models[client_id], None, final, 3, 2, stream((1,)))
            assert draws.shared.shape == (2, 3, models[client_id].shared_size)
            assert draws.local.shape == (2, 3, models[client_id].local_size)
            assert np.all(np.isfinite(draws.shared)) and np.all(np.isfinite(draws.local))
    with promises("the server says how it stands"):
        _says(algorithm, models, played)
    promises.check()


def _as_announced(algorithm: AnyAlgorithm, models: Mapping[str, ClientView], state: Any) -> None:
    client_id = next(iter(models))
    for message in told(algorithm, state, [client_id]).values():
        assert all(isinstance(value, np.ndarray) for value in message.values())
    request = Request(client_id, 1, 1, (1, 2, 3), algorithm.broadcast(state, client_id))
    reply = answer(algorithm, models[client_id], None, request)[1]
    assert isinstance(reply, Reply), reply
    shapes = {key: np.shape(value) for key, value in reply.message.items()}
    assert shapes == dict(algorithm.replies.shapes(state))
    assert all(np.asarray(value).dtype == np.float64 for value in reply.message.values())
    assert algorithm.replies.reject(state, reply.message) is None


def _any_subset(algorithm: AnyAlgorithm, models: Mapping[str, ClientView]) -> None:
    """One client a round, in turn: what is said is finite, a posterior proper, and cavity x site = q for everyone."""
    for state in play(algorithm, models, 2 * len(models), lambda number, ids: (ids[number % len(ids)],)).states:
        for path, value in said(algorithm, state, models).items():
            assert "last_change" in path or np.all(np.isfinite(value)), path  # not known before EP's first round
        if not isinstance(algorithm.result.shared, Posterior):
            continue
        q = algorithm.result.shared.gaussian(state)
        assert gaussian.is_proper(q)
        if not hasattr(state, "sites"):
            continue
        for client_id in models:
            site = gaussian.quotient(q, _sites.cavity(state.sites, client_id))
            assert_allclose(gaussian.product(_sites.cavity(state.sites, client_id), site).precision, q.precision)
        assert_array_equal(_sites.cavity(state.sites, "nobody").precision, q.precision)


def _sums(algorithm: AnyAlgorithm, played: Played, place: int) -> None:
    """By a relay or under encryption: sums of some first, or of all in another order."""
    before, replies = played.states[place], played.replies[place]
    first, *others = replies
    some = {first: replies[first], "relay": sum_replies({k: replies[k] for k in others})}
    for grouped in (some, {"all": sum_replies(dict(reversed(replies.items())))}):
        for reply in grouped.values():
            assert algorithm.replies.reject(before, reply) is None
        total = Received(OnlySums(), sum_replies(grouped), len(replies))
        state, report = algorithm.update_server(before, total)
        ours, theirs = arrays(state), arrays(played.states[place + 1])
        assert_near(theirs, ours, 1e-11)  # sums in another order, carried through rounds
        assert report.status == played.reports[place].status


def _says(algorithm: AnyAlgorithm, models: Mapping[str, ClientView], played: Played) -> None:
    layout = next(iter(models.values())).layout
    sizes = {"rows": layout.size, "columns": layout.size, "client": len(models), "other_client": len(models)}
    sizes |= {"latent": 3}
    for report in played.reports:
        assert Status(report.status) in Status
        assert report.message is None or isinstance(report.message, str)
        assert isinstance(report.info, tuple)
    for state in played.states:
        for dims, value in algorithm.result.details(state).values():
            assert np.shape(value) == tuple(sizes[dim] for dim in dims)
        if isinstance(algorithm.result.shared, Point):
            assert np.shape(algorithm.result.shared.estimate(state)) == (layout.size,)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in algorithm.settings.items())
