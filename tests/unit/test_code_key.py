"""A builder's name by its code: other where what it does is another, and the same in every process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import fedppl
from fedppl.model.same import code_key

LIMIT = 3.0


def above(limit: Any) -> Any:
    return lambda y: np.minimum(y, limit)


def helped(y: Any) -> Any:
    return doubled(y) if y in {"a", "b", "c"} else LIMIT


def doubled(y: Any) -> Any:
    return 2 * y


def tripled(y: Any) -> Any:
    return 3 * y


def itself(y: Any) -> Any:
    return itself(y - 1) if y else 0


def test_what_a_closure_holds_is_part_of_it() -> None:
    assert code_key(above(3.0)) == code_key(above(3.0)) != code_key(above(3.5))
    assert code_key(above(np.arange(3.0))) != code_key(above(np.arange(4.0)))


@pytest.mark.parametrize(("name", "value"), [("LIMIT", 4.0), ("doubled", tripled)])
def test_what_it_reads_of_its_module_is_part_of_it(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_key(helped)
    monkeypatch.setitem(globals(), name, value)
    assert code_key(helped) != before


PLACE, AT, BY = 0, [0], {"row": {0}}
ROWS = [np.arange(2), np.arange(3)]
FIRST = ROWS[0]
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


def by_containers(y: Any) -> Any:
    return y[AT[0]], BY, ITSELF


def by_inner(y: Any) -> Any:
    return (lambda: y[PLACE])()


def by_one_of_several(y: Any) -> Any:
    return ROWS, y[FIRST]


def by_module(y: Any) -> Any:
    return y[here.PLACE]


@functools.cache
def place() -> int:
    return PLACE


def by_cached(y: Any) -> Any:
    return y[place()]


here = sys.modules[__name__]


@pytest.mark.parametrize(
    ("builder", "name", "value"),
    [
        (by_containers, "AT", [1]),
        (by_containers, "BY", {"row": {1}}),
        (by_inner, "PLACE", 1),
        (by_one_of_several, "FIRST", ROWS[1]),
        (by_module, "PLACE", 1),
        (by_cached, "PLACE", 1),
    ],
)
def test_what_it_reads_through_a_container_a_function_or_a_module_is_part_of_it(
    builder: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_key(builder)
    assert code_key(builder) == before
    monkeypatch.setitem(globals(), name, value)
    assert code_key(builder) != before


minimum = 1


def by_a_class(y: Any) -> Any:
    class Read:
        place = PLACE

    return y[Read.place]


def test_a_global_with_the_name_of_an_attribute_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    builders = (above(3.0), by_a_class)
    before, by_class = map(code_key, builders)
    monkeypatch.setitem(globals(), "minimum", 2)
    assert [code_key(one) for one in builders] == [before, by_class]
    monkeypatch.setitem(globals(), "PLACE", 1)
    assert code_key(by_a_class) != by_class


def test_formulas_are_told_apart_by_their_constants() -> None:
    """And one that calls itself has an end."""
    models = [fedppl.formula("y ~ np.log(c - x)", constants={"c": c}) for c in (1.0, 1.0, 2.0)]
    first, same, other = (code_key(model.builder) for model in models)
    assert first == same != other
    assert code_key(itself) != code_key(doubled)


@pytest.mark.slow
def test_it_is_the_same_in_another_process() -> None:
    """Whatever the seed of Python's hashes, on which the order of a set depends."""
    code = "from tests.unit.test_code_key import code_key, helped, by_containers; "
    code += "print(code_key(helped), code_key(by_containers))"
    found = {
        subprocess.run(  # noqa: S603
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert len(found) == 1
