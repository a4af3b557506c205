"""The name by which compiled code is found again: one for one computation in all processes, another for any other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.gradient import grad_clip
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

from fedppl import FederatedModel
from fedppl.model.same import graph_key


class Doubled(Op):
    """What a script may change from one run to the next."""

    __props__ = ()

    def make_node(self, x: Any) -> Any:
        return Apply(self, [x], [x.type()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        outputs[0][0] = 2.0 * inputs[0]


def key(of: Callable[..., Any], **types: Any) -> str | None:
    x = pt.tensor("x", **({"dtype": "float64", "shape": (None, None)} | types))
    y = pt.vector("y")
    return graph_key([x, y], [of(x, y)])


COMPUTATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda x, y: x.sum(),
    "over the first axis": lambda x, y: x.sum(axis=0),
    "over the second": lambda x, y: x.sum(axis=1),
    "a product with a number": lambda x, y: 2.0 * x,
    "with another": lambda x, y: 3.0 * x,
    "with one that is close": lambda x, y: (2.0 + 1e-15) * x,
    "with a whole one": lambda x, y: pt.constant(np.array(2, dtype="int64")) * x,
    "a difference": lambda x, y: x - y,
    "the other way round": lambda x, y: y - x,
    "some rows": lambda x, y: x[1:],
    "other rows": lambda x, y: x[2:],
    "every other row": lambda x, y: x[::2],
    "a column": lambda x, y: x[:, 0],
    "rows in an order": lambda x, y: x[[0, 1, 0]],
    "in another": lambda x, y: x[[0, 1, 1]],
    "a vector on the diagonal": lambda x, y: pt.diag(y),
    "above it": lambda x, y: pt.diag(y, k=1),
    "a triangular system": lambda x, y: pt.linalg.solve_triangular(x, y, lower=True),
    "from above": lambda x, y: pt.linalg.solve_triangular(x, y, lower=False),
    "transposed": lambda x, y: pt.linalg.solve_triangular(x, y, lower=True, trans=1),
    "a density": lambda x, y: pm.logp(pm.Normal.dist(0, 1), y).sum(),
    "of another sd": lambda x, y: pm.logp(pm.Normal.dist(0, 2), y).sum(),
    "of another family": lambda x, y: pm.logp(pm.StudentT.dist(nu=4, mu=0, sigma=1), y).sum(),
    "whole numbers": lambda x, y: pt.cast(x, "int32"),
    "single precision": lambda x, y: pt.cast(x, "float32"),
}


def test_each_computation_has_a_name_of_its_own_and_the_same_twice() -> None:
    keys = {name: key(of) for name, of in COMPUTATIONS.items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)
    assert keys == {name: key(of) for name, of in COMPUTATIONS.items()}


class Held(Op):
    __module__ = "pytensor.made_up"

    def __init__(self, how: Any) -> None:
        self.how = how

    make_node, perform = Doubled.make_node, Doubled.perform


@pytest.mark.parametrize(
    "how", ["text".upper, np.exp, object(), lambda x: x], ids=["method", "ufunc", "bare", "lambda"]
)
def test_an_operation_that_holds_what_has_no_words_has_no_name(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytensor.made_up", SimpleNamespace(Held=Held))
    assert key(lambda x, y: Held(how)(x)) is None
    assert key(lambda x, y: Held(2)(x)) not in (None, key(lambda x, y: Held(3)(x)))


class Hidden(Held):
    """What keeps a setting where it is not seen."""

    __module__ = "pytensor.made_up"
    __slots__ = ("over",)

    def __init__(self, over: str) -> None:
        super().__init__(2)
        self.over = over


def test_an_operation_that_hides_what_it_holds_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytensor.made_up", SimpleNamespace(Held=Held, Hidden=Hidden))
    assert key(lambda x, y: Hidden("a")(x)) is None


def test_an_operation_under_anothers_name_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytensor.made_up", SimpleNamespace(Held=Doubled))
    assert key(lambda x, y: Held(2)(x)) is None


def test_matrices_that_are_kept_otherwise_have_no_name() -> None:
    sparse = pytest.importorskip("pytensor.sparse")
    assert key(lambda x, y: sparse.sp_sum(sparse.csr_from_dense(x))) is None


def clipped(most: float) -> Any:
    """A density whose gradient alone says how it was declared."""

    def declare(y: Any) -> pm.Model:
        with pm.Model() as model:
            mu = pm.Normal("mu", 0, 1)
            pm.Potential("near", -0.5 * ((pm.Data("y", y) - grad_clip(mu, -1.0, most)) ** 2).sum())
        return model

    return declare


def test_a_gradient_that_is_another_is_compiled_anew() -> None:
    data = {"y": np.array([3.0, 5.0])}
    found = []
    for most in (1.0, 3.0, 1e9):
        client = FederatedModel(clipped(most), ["mu"]).enrol({"a": data}, kernel=False)["a"]
        found.append(client.kernel(np.zeros(1), *client.packed)[1])
    assert found == [1.0, 3.0, 8.0]


def test_types_count() -> None:
    def total(x: Any, y: Any) -> Any:
        return x.sum()

    types: list[dict[str, Any]] = [{}, {"dtype": "float32"}, {"shape": (3, None)}, {"shape": (1, None)}]
    assert len({key(total, **one) for one in types}) == len(types)


def test_which_input_is_which_counts() -> None:
    a, b = pt.vector("a"), pt.vector("b")
    assert len({graph_key([a, b], [a / b]), graph_key([b, a], [a / b]), graph_key([a, b], [b / a, a])}) == 3
    assert graph_key([a, b], [a / b]) == graph_key([b, a], [b / a])  # names are nothing


@pytest.mark.parametrize(
    "of",
    [lambda x, y: Doubled()(x), lambda x, y: pt.constant(np.zeros(2)) * pt.vector("free"), lambda x, y: loop(y)],
    ids=["an operation of a script", "a variable that nothing gives", "a loop"],
)
def test_what_may_mean_something_else_tomorrow_has_none(of: Callable[[Any, Any], Any]) -> None:
    assert key(of) is None


def loop(y: Any) -> Any:
    from pytensor import scan

    return scan(
        lambda one, before: 0.5 * before + one, sequences=[y], outputs_info=[pt.zeros(())], return_updates=False
    )


@pytest.mark.slow
def test_it_hangs_on_no_seed_of_a_process() -> None:
    script = (
        "from tests.model.test_graph_key import COMPUTATIONS, key; print([key(of) for of in COMPUTATIONS.values()])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "3")
    }
    assert len(told) == 1
