"""What travels: what is packed comes out again, and of what is malformed nothing but a refusal."""

from __future__ import annotations

import functools
import itertools
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from fedppl import FederatedModel
from fedppl.contracts import Failure, Reply, Request
from fedppl.gaussian import Gaussian
from fedppl.model.checks import fingerprint
from fedppl.run.one_round import why_not
from fedppl.sites import decode as _decode
from fedppl.sites.decode import Malformed
from fedppl.sites.wire import (
    Terms,
    other_model,
    other_terms,
    other_version,
    pack_hello,
    pack_reply,
    pack_request,
    shapes_of_hello,
    unpack_reply,
    unpack_request,
)
from fedppl.types import Layout, Variable
from tests.support import malformed, problems


def wide_builder(y: Any) -> Any:
    """2,100 independent means, beyond what has a matrix."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.5, 2.0, shape=2100)
        pm.Normal("outcome", mu.sum(), 1.0, observed=pm.Data("y", y))
    return model


@functools.cache
def wide() -> tuple[FederatedModel, problems.Clients]:
    return FederatedModel(wide_builder, ["mu"]), {"a": {"y": np.arange(3.0)}}


def alone() -> tuple[FederatedModel, problems.Clients]:
    import fedppl.testing

    model, clients = fedppl.testing.normal_means()
    return model, dict(clients)


@pytest.mark.parametrize("problem", [problems.regression, alone, wide])
def test_a_layout_survives_the_wire(problem: Any) -> None:
    model, clients = problem()
    client = next(iter(model.enrol(clients).values()))
    terms = Terms({"x": "1"}, client.layout, client.reader().coords)
    arrays, texts = through(pack_hello("a", terms))
    assert other_terms(terms, texts) is None and other_model(terms, arrays, texts) is None
    assert {name: value.shape for name, value in arrays.items()} == shapes_of_hello(client.layout)
    assert_array_equal(arrays["prior_linear"], client.layout.prior.linear)


def test_a_large_prior_is_kept_by_coordinate_and_others_are_refused() -> None:
    model, clients = wide()
    prior = next(iter(model.enrol(clients).values())).layout.prior
    np.testing.assert_allclose(prior.precision, 0.25, rtol=1e-9)
    np.testing.assert_allclose(prior.linear, 0.125, rtol=1e-9)

    def chained(y: Any) -> Any:
        with pm.Model() as built:
            mu = pm.GaussianRandomWalk("mu", sigma=1.0, init_dist=pm.Normal.dist(), shape=2100)
            pm.Normal("outcome", mu.sum(), 1.0, observed=pm.Data("y", y))
        return built

    from fedppl import DeclarationError

    with pytest.raises(DeclarationError, match="2100 coordinates, and beyond 2000 .* pm.Normal"):
        FederatedModel(chained, ["mu"]).enrol(clients)


def test_requests_and_replies_survive_the_wire() -> None:
    request = Request("a", 2**63 - 1, 3, (2**200, 3, 4), {"point": np.zeros(2)}, "run", False)
    found = unpack_request(*through(pack_request(request)))
    assert_array_equal(found.message["point"], request.message["point"])
    assert found._replace(message={}) == request._replace(message={})
    told = Reply("a", 5, "print", {"mean": np.arange(3.0)}, {"ess": np.inf, "mass": np.nan}, "a reason\nof two lines")
    reply = unpack_reply(*through(pack_reply(told)))
    assert isinstance(reply, Reply) and reply[:3] == told[:3] and reply.reason == "a reason of two lines"
    assert reply.info["ess"] == np.inf and np.isnan(reply.info["mass"])
    failure = unpack_reply(*through(pack_reply(Failure("a", 5, "why " * 2_000, private="rows"))))
    assert isinstance(failure, Failure) and len(failure.reason) == 2_000 and not failure.private


def through(parcel: Any) -> Any:
    """As arrays come out of their bytes."""
    arrays, texts = malformed.raw(parcel)
    return _decode.arrays(arrays), _decode.texts(texts)


@pytest.mark.parametrize(
    "value", [np.float64(3.0), np.zeros((0, 3)), np.arange(6.0).reshape(2, 3), np.array([True, False]), np.arange(3)]
)
def test_an_array_comes_out_as_it_was_and_can_be_written_to(value: Any) -> None:
    found = _decode.arrays({"x": malformed.npy(value)})["x"]
    assert found.dtype == np.asarray(value).dtype and found.flags.writeable and found.flags.c_contiguous
    assert_array_equal(found, value)


def read_reply(case: malformed.Case) -> str | None:
    """Why a reply of `malformed` is refused."""
    try:
        texts = _decode.texts(case.texts)
        shapes = {} if "failure" in texts else malformed.SHAPES
        reply = unpack_reply(_decode.arrays(case.arrays, shapes), texts)
    except Malformed as error:
        return str(error)
    return why_not(reply, malformed.request(), malformed.layout(), malformed.SHAPES)


def read_hello(case: malformed.Case) -> str | None:
    """Why an introduction of `malformed` is refused."""
    terms = malformed.terms()
    try:
        texts = _decode.texts(case.texts)
        shapes = shapes_of_hello(terms.layout)
        why = other_version(texts) or other_terms(terms, texts)
        return why or other_model(terms, _decode.arrays(case.arrays, shapes), texts)
    except Malformed as error:
        return str(error)


def kinds(cases: Any) -> list[malformed.Case]:
    """Every kind once."""
    first = next(cases)
    return [first, *itertools.takewhile(lambda case: case.name.split(" in ")[0] != first.name.split(" in ")[0], cases)]


@pytest.mark.parametrize(("cases", "read"), [(malformed.introductions, read_hello), (malformed.replies, read_reply)])
def test_of_what_is_malformed_nothing_but_a_refusal_that_names_the_field(
    cases: Any, read: Any, rng: np.random.Generator
) -> None:
    honest = malformed.hello() if cases is malformed.introductions else malformed.reply()
    assert read(malformed.Case("honest", "", *honest)) is None
    every = kinds(cases(rng))
    assert len(every) > 90
    for case in every:
        reason = read(case)
        named = reason is not None and (
            malformed.named_in(reason, case) or "it shares" in reason or "shared v" in reason
        )
        assert named, (case.name, reason)


@pytest.mark.parametrize("field", ["seed", "nonce", "round", "report", "client_id", "run"])
@pytest.mark.parametrize("kind", malformed.JSON)
def test_a_site_refuses_a_malformed_request(field: str, kind: str, rng: np.random.Generator) -> None:
    arrays, texts = pack_request(malformed.request())
    value = malformed.JSON[kind](rng)
    if field in ("client_id", "run") and 0 < len(value) <= 200 and value.isprintable():
        return
    seeds = {"[1]"}
    if field == "seed" and value in seeds:
        return
    with pytest.raises(Malformed, match="texts" if len(value) > 2_500_000 else f"'{field}'"):
        unpack_request(arrays, _decode.texts({**texts, field: value}))


def test_limits_come_before_what_they_limit() -> None:
    """Neither time nor memory goes into what is refused: little more than into one list of 2 MB."""
    rng, honest = np.random.default_rng(0), "[" + "1.5," * 500_000 + "1]"
    every = [*kinds(malformed.introductions(rng)), *kinds(malformed.replies(rng))]
    least = min(_seconds(functools.partial(json.loads, honest)) for _ in range(3))
    for case in every:
        read = read_hello if "variables" in case.texts or "prior_linear" in case.arrays else read_reply
        seconds = min(_seconds(functools.partial(read, case)) for _ in range(2))
        tracemalloc.start()
        read(case)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seconds < 5 * least and peak < 12e6, (case.name, seconds / least, peak)  # a copy of the text is made


def _seconds(call: Callable[[], Any]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["variables", "coords", "settings", "prior_is_gaussian", "fingerprint"]), JSONS)
def test_an_introduction_of_any_json_is_read_or_refused(field: str, value: Any) -> None:
    arrays, texts = malformed.hello()
    texts[field] = json.dumps(value)
    case = malformed.Case("", field, arrays, texts)
    reason = read_hello(case)
    if reason is not None:
        assert field in reason or "prior_" in reason or "fingerprint" in reason or "share" in reason


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(["info", "nonce", "reason", "failure", "client_id", "fingerprint"]), JSONS | st.text())
def test_a_reply_of_any_json_is_read_or_refused(field: str, value: Any) -> None:
    arrays, texts = malformed.reply()
    texts[field] = value if isinstance(value, str) else json.dumps(value)
    read_reply(malformed.Case("", field, {} if field == "failure" else arrays, texts))


@settings(max_examples=600, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 140), st.binary(min_size=1, max_size=4))
def test_any_bytes_are_an_array_or_refused(noise: bytes, place: int, patch: bytes) -> None:
    honest = malformed.npy(np.arange(3.0))
    for data in (noise, honest[:place] + patch + honest[place + len(patch) :], honest[:place] + noise):
        try:
            found = _decode.arrays({"x": data})["x"]
        except Malformed as error:
            assert "'x'" in str(error)
        else:
            assert found.nbytes <= len(data)


class Odd(np.ndarray):
    """An array that says another thing of itself each time."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("never")


class Text(str):
    """A text that equals every other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class Endless(dict[str, Any]):
    def __len__(self) -> int:
        raise RecursionError


@pytest.mark.parametrize(
    "change",
    [
        {"message": {"mean": np.array([None] * 3, dtype=object), "precision": np.zeros(6), "count": np.array(1.0)}},
        {"message": {"mean": np.zeros(3).view(Odd), "precision": np.zeros(6), "count": np.array(1.0)}},
        {"message": {"mean": np.ma.masked_array(np.zeros(3)), "precision": np.zeros(6), "count": np.array(1.0)}},
        {"message": {Text("a"): np.zeros(3)}},
        {"message": Endless()},
        {"client_id": Text("x")},
        {"fingerprint": Text("x")},
        {"nonce": True},
        {"info": {f"d{i}": 1.0 for i in range(65)}},
        {"info": Endless()},
        {"info": {Text("a"): 1.0}},
        {"info": {"round": 1.0}},
        {"info": {"a" * 200: 1.0}},
        {"reason": Text("a")},
    ],
)
def test_an_object_of_another_kind_is_no_reply(change: dict[str, Any]) -> None:
    message = {name: np.zeros(shape) for name, shape in malformed.SHAPES.items()}
    honest = Reply("bad", 7, malformed.layout().fingerprint, message, {"ess": 1.0}, "")
    assert why_not(honest, malformed.request(), malformed.layout(), malformed.SHAPES) is None
    assert why_not(honest._replace(**change), malformed.request(), malformed.layout(), malformed.SHAPES)


def test_an_introduction_of_as_many_coordinates_as_there_may_be_costs_a_few_fingerprints_to_read() -> None:
    """And one that says a matrix where none can be is refused before it is made."""
    size = 10**6
    variables = (Variable("w", (size,), "", None),)
    prior = Gaussian(np.zeros(size), np.full(size, 4.0))
    started = time.process_time()
    told = fingerprint(variables, prior, True, (0.0,) * 6)
    computed = time.process_time() - started
    terms = Terms({}, Layout(variables, prior, True, told, (0.0,) * 6), malformed.reader().coords)
    arrays, texts = pack_hello("a", terms)
    started = time.process_time()
    assert other_terms(terms, texts) is None and other_model(terms, arrays, texts) is None
    assert time.process_time() - started < 20 * computed
    larger = malformed.npy(np.ones(2 * size))
    with pytest.raises(Malformed, match=r"'prior_precision' has shape \(2000000,\), expected \(1000000,\)"):
        _decode.arrays({**malformed.raw((arrays, {}))[0], "prior_precision": larger}, shapes_of_hello(terms.layout))


def test_a_fingerprint_takes_no_notice_of_rounding() -> None:
    """Not beside a power of two either, where the digits of a float begin anew."""
    layout = malformed.layout(sd=2.0)
    other = Gaussian(layout.prior.linear * (1 - 1e-13), layout.prior.precision * (1 + 1e-13))
    assert fingerprint(layout.variables, other, True, layout.density) == layout.fingerprint
    for changed in (malformed.layout(mean=1e-3, sd=2.0), malformed.layout(sd=2.0001)):
        assert fingerprint(layout.variables, changed.prior, True, layout.density) != layout.fingerprint
    assert fingerprint(layout.variables, layout.prior, False, layout.density) != layout.fingerprint
    assert fingerprint(layout.variables, layout.prior, True, (0.0, 0.0, 0.001)) != layout.fingerprint
