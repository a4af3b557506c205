"""Interpreted graphs call NumPy once an operation, never Python once an element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from pytensor.compile.mode import Mode

from fedppl.model.interpreted import PYTHON_MODE, batched, python_function

X, Y, Z, I = pt.dvector("x"), pt.dvector("y"), pt.dvector("z"), pt.lvector("i")  # noqa: E741
GRAPHS = {
    "product of three": X * Y * Z,
    "sum of four": X + Y + Z + I,
    "softplus": pt.softplus(X),
    "log(1 - exp)": pt.log1mexp(-pt.abs(X) - 1e-3),
    "clip": pt.clip(X, -1.0, 1.0),
    "clip of integers": pt.clip(I, 0, 2),
    "fill": pt.second(X, pt.constant(np.float64(3.0))),
    "cast": pt.cast(I, "float64"),
}


def _called_by_element(node: Any) -> bool:
    numpy = getattr(node.op, "nfunc_spec", None)
    return hasattr(node.op, "scalar_op") and (not numpy or len(node.inputs) != numpy[1])


@pytest.mark.parametrize("name", GRAPHS)
def test_every_operation_is_one_of_numpys(name: str, rng: np.random.Generator) -> None:
    values = [*(10 * rng.normal(size=(3, 40))), np.arange(40) % 4]
    function = pytensor.function([X, Y, Z, I], GRAPHS[name], mode=PYTHON_MODE, on_unused_input="ignore")
    assert not any(map(_called_by_element, function.maker.fgraph.apply_nodes))
    plain = pytensor.function([X, Y, Z, I], GRAPHS[name], mode=Mode("py", None), on_unused_input="ignore")(*values)
    ours = python_function([X, Y, Z, I], GRAPHS[name])(*values)
    assert ours.dtype == plain.dtype
    assert_allclose(ours, plain, rtol=1e-12, atol=1e-300)


def test_variables_may_have_other_lengths_than_where_they_were_declared(rng: np.random.Generator) -> None:
    theta, y = pt.TensorType("float64", shape=(3,))("theta"), pt.dvector("y")
    function = batched({theta: pt.matrix()}, [y], [-0.5 * (y - theta) ** 2])
    draws, data = rng.normal(size=(7, 5)), rng.normal(size=5)
    assert_allclose(function(draws, data)[0], -0.5 * (data - draws) ** 2)
