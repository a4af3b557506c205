"""What differs between a site's declaration and the server's, by name."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr")

from fedppl.flower import decode as _decode
from fedppl.flower import wire as _wire
from fedppl.flower.enrolment import difference
from tests.support import malformed


def hello(client_id: str, labels: tuple[str, ...] = ("dose", "age"), **prior: Any) -> _wire.Hello:
    arrays, texts = malformed.hello(
        client_id, layout=malformed.layout(**prior), reader=malformed.reader(labels), settings={"damping": "1.0"}
    )
    return _wire.unpack_hello(_decode.arrays(arrays), texts)


def test_what_differs_is_named() -> None:
    a = hello("a")
    assert difference(a, hello("b")) is None
    assert "mu[0] has mean 100 and sd 0.01, there 0 and 10" in str(difference(a, hello("b", mean=100.0, sd=0.01)))
    turned = str(difference(a, hello("b", labels=("age", "dose"))))
    assert "its dim 'predictor' has label 'age' in place 0, at the server it is 'dose'" in turned
    assert "mu" in str(difference(a, hello("b", dims=False))) and "dims" in str(difference(a, hello("b", dims=False)))
    other = hello("b")._replace(settings={"damping": "0.5"})
    assert difference(a, other) == "its algorithm has damping 0.5 instead of 1.0"
    denser = hello("b")
    moved = denser._replace(layout=type(denser.layout)(*_fields(denser.layout, fingerprint="x")))
    assert "correlations, or in its density" in str(difference(a, moved))


def _fields(layout: Any, **changes: Any) -> list[Any]:
    names = ("variables", "prior", "prior_is_gaussian", "fingerprint", "density")
    return [changes.get(name, getattr(layout, name)) for name in names]
