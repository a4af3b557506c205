"""Who says what the model is: votes, differences by name, readings of draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("flwr")

from fedppl.flower import decode as _decode
from fedppl.flower import wire as _wire
from fedppl.flower.enrolment import agreed, difference, disagreement, majority_dims, reference, why_no_draws
from tests.support import malformed


def hello(client_id: str, labels: tuple[str, ...] = ("dose", "age"), **prior: Any) -> _wire.Hello:
    arrays, texts = malformed.hello(
        client_id, layout=malformed.layout(**prior), reader=malformed.reader(labels), settings={"damping": "1.0"}
    )
    return _wire.unpack_hello(_decode.arrays(arrays), texts)


def test_a_reference_needs_more_than_half_of_the_clients_that_are_expected() -> None:
    a, b, wrong = hello("a"), hello("b"), hello("c", mean=100.0, sd=0.01)
    assert reference([], 1) is None
    assert reference([a], 1) is a and reference([wrong], 1) is wrong  # of one site nothing else is known
    assert reference([a], 2) is None and reference([a, wrong], 2) is None
    assert reference([a], 3) is None and reference([wrong, a], 3) is None
    for told in ([wrong, a, b], [a, wrong, b], [b, a, wrong]):
        assert reference(told, 3) is a
        assert reference(told, 4) is None
    assert reference([hello("a", mean=100.0), wrong, b], 3) is None  # three say three things


def test_a_client_that_says_two_things_counts_for_neither() -> None:
    honest, liars = [hello("a"), hello("b")], [hello("b", mean=9.0), hello("c", mean=9.0)]
    assert reference([*honest, *liars], 3) is None
    assert reference([*honest, *liars, hello("d")], 3) is honest[0]


def test_what_differs_is_named() -> None:
    a = hello("a")
    assert difference(a, hello("b")) is None
    assert "mu[0] has mean 100 and sd 0.01, there 0 and 10" in str(difference(a, hello("b", mean=100.0, sd=0.01)))
    turned = str(difference(a, hello("b", labels=("age", "dose"))))
    assert "its dim 'predictor' has label 'age' in place 0, at 'a' it is 'dose'" in turned
    assert "mu" in str(difference(a, hello("b", dims=False))) and "dims" in str(difference(a, hello("b", dims=False)))
    other = hello("b")._replace(settings={"damping": "0.5"})
    assert difference(a, other) == "its algorithm has damping 0.5 instead of 1.0"
    assert "install one version" in str(difference(a, hello("b")._replace(version="0.0")))
    denser = hello("b")
    moved = denser._replace(layout=type(denser.layout)(*_fields(denser.layout, fingerprint="x")))
    assert "correlations, or in its density" in str(difference(a, moved))


def _fields(layout: Any, **changes: Any) -> list[Any]:
    names = ("variables", "prior", "prior_is_gaussian", "fingerprint", "density")
    return [changes.get(name, getattr(layout, name)) for name in names]


def test_labels_in_another_order_are_another_model() -> None:
    turned = hello("c", labels=("age", "dose"))
    told = [turned, hello("a"), hello("b")]
    assert getattr(reference(told, 3), "client_id", None) == "a"
    assert set(disagreement(told)) == {"c"}
    # Labels that only one side tells are a difference too, where no more is known.
    silent = hello("c")._replace(coords={})
    assert reference([silent, hello("a")], 2) is None
    assert "tells the labels" in disagreement([hello("a"), hello("b"), silent])["c"]


def test_of_two_that_differ_both_are_named_and_neither_is_believed() -> None:
    told = [hello("a"), hello("b", mean=100.0)]
    found = disagreement(told)
    assert set(found) == {"a", "b"}
    assert "at 'b'" in found["a"] and "at 'a'" in found["b"]
    assert disagreement([hello("a"), hello("b")]) == {}


def test_dims_and_labels_are_read_as_most_clients_tell_them() -> None:
    hellos = {name: hello(name) for name in "abc"}
    hellos["c"] = hellos["c"]._replace(
        dims={"mu": None, "tau": ("chain",), "x": ("y",)}, coords={"predictor": ["a"], "y": [1]}
    )
    dims, coords = majority_dims(hellos)
    assert dims == {"mu": ("predictor",)} and coords == {"predictor": ["dose", "age"]}


def draws() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"mu": rng.normal(size=(50, 2)), "tau": rng.normal(size=50) ** 2, "over": rng.normal(size=50) > 0}


def test_draws_are_those_that_a_strict_majority_reads_alike() -> None:
    honest, rounded = (
        draws(),
        {name: value * (1 + 1e-12) if value.dtype == float else value for name, value in draws().items()},
    )
    lie = {name: np.full_like(value, 1e300 if value.dtype == float else True) for name, value in honest.items()}
    for liar in "abc":
        answers = {name: lie if name == liar else honest if name == "b" else rounded for name in "abc"}
        found, others = agreed(answers, 3)
        assert_allclose(found["mu"], honest["mu"], rtol=1e-11)
        assert_array_equal(found["over"], honest["over"])
        assert others == {"mu": [liar], "over": [liar], "tau": [liar]}
    assert agreed({"a": honest, "b": lie}, 2)[0] == {}  # two that differ: nobody is believed
    assert agreed({"a": honest}, 2)[0] == {}  # one of two answered
    assert set(agreed({"a": honest}, 1)[0]) == set(honest)


def test_a_lie_does_not_set_the_scale_by_which_it_is_compared() -> None:
    honest = draws()["mu"]
    lie = honest.copy()
    lie[0, 0] = 1e250
    spoilt = honest.copy()
    spoilt[0, 0] = np.nan
    for other in (lie, spoilt, honest + 0.01):
        assert agreed({"a": {"mu": other}, "b": {"mu": honest}}, 2)[0] == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mu": None}, "lack"),
        ({"mu": np.zeros((49, 2))}, "'mu' have shape"),
        ({"mu": np.zeros(50)}, "dims"),
        ({"mu": np.zeros((50, 3))}, "dim 'predictor' has length 2"),
        ({"mu": np.array(0.0)}, "'mu' have shape"),
        ({"predictor": np.zeros(50)}, "that of a dim"),
        ({"chain": np.zeros(50)}, "that of a dim"),
    ],
)
def test_draws_that_do_not_fit_the_dims_are_not_read(change: dict[str, Any], reason: str) -> None:
    values = {name: value for name, value in {**draws(), **change}.items() if value is not None}
    dims, coords = {"mu": ("predictor",)}, {"predictor": ["dose", "age"]}
    assert why_no_draws(draws(), 50, ["mu", "tau"], dims, coords) is None
    assert reason in str(why_no_draws(values, 50, ["mu", "tau"], dims, coords))
