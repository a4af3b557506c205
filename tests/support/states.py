"""States of servers and clients, whatever they hold: every array in them, and whether two are the same bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from fedppl import structure
from fedppl.contracts import AnyAlgorithm, OnlySums, Point, Posterior, Received, Report, sum_replies


def received(replies: Mapping[str, Any], *, summed: bool) -> Received:
    """The server's input from a round: every reply, or the sum of all."""
    if summed:
        return Received(OnlySums(), sum_replies(replies), len(replies), tuple(replies))
    return Received(dict(replies), {}, len(replies), tuple(replies))


def updated(algorithm: AnyAlgorithm, state: Any, replies: Mapping[str, Any]) -> tuple[Any, Report]:
    """State and report after these replies, of which the server sees sums alone where these do."""
    return algorithm.update_server(state, received(replies, summed=algorithm.replies.summed(state)))


def arrays(value: Any, path: str = "state") -> dict[str, Any]:
    """Every array and number in a state, by where it stands."""
    if isinstance(value, Mapping):
        return {k: v for key, one in value.items() for k, v in arrays(one, f"{path}[{key!r}]").items()}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        return {k: v for key, one in zip(names, value, strict=True) for k, v in arrays(one, f"{path}.{key}").items()}
    if isinstance(value, np.ndarray | np.generic | float | int | bool):
        return {path: np.asarray(value)}
    return {}


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit."""
    one, other = arrays(a), arrays(b)
    assert one.keys() == other.keys()
    for path in one:
        assert_array_equal(one[path], other[path], err_msg=path)


def assert_same_state(a: Any, b: Any) -> None:
    """Bit for bit, and there is something to compare."""
    assert arrays(a)
    assert_same(a, b)


def assert_near(there: Mapping[str, Any], back: Mapping[str, Any], tolerance: float) -> None:
    """The same arrays, to rounding."""
    assert there.keys() == back.keys()
    for path, value in there.items():
        assert_allclose(back[path], value, rtol=tolerance, atol=tolerance, err_msg=path)


def changed(one: list[Any], other: list[Any]) -> bool:
    """Whether any of these arrays differs."""
    return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def told(algorithm: AnyAlgorithm, state: Any, client_ids: Iterable[str]) -> dict[str, Any]:
    """Everything that a state says to its clients, while it runs and in the end."""
    return {
        f"{what} {client_id}": dict(message(state, client_id))
        for client_id in client_ids
        for what, message in (("broadcast", algorithm.broadcast), ("final", algorithm.result.final_message))
    }


def shared_of(algorithm: AnyAlgorithm, state: Any) -> dict[str, Any]:
    """What a state says of the parameters that all clients share, where that is numbers."""
    shared = algorithm.result.shared
    if isinstance(shared, Posterior):
        return {"posterior": shared.gaussian(state)}
    return {"estimate": shared.estimate(state)} if isinstance(shared, Point) else {}


def said(algorithm: AnyAlgorithm, state: Any, client_ids: Iterable[str]) -> dict[str, Any]:
    """Every array that a state says to anybody, by where it stands."""
    details = dict(algorithm.result.details(state))
    return arrays({**shared_of(algorithm, state), **told(algorithm, state, client_ids), "details": details}, "said")


def assert_ledger_holds(state: Any) -> None:
    """q = prior x Π sites, summed here from the packed rows, where there are sites."""
    if not hasattr(state, "sites"):
        return
    sites = state.sites
    precision = sites.prior.precision + sum(structure.unpack_precision(row, sites.structure) for row in sites.precision)
    linear = sites.prior.linear + sum(sites.linear)
    assert_allclose(sites.q.precision, precision, rtol=1e-10, atol=1e-10)
    assert_allclose(sites.q.linear, linear, rtol=1e-10, atol=1e-10)
