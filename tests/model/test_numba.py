"""Compiled graphs: products of batches, and warning filters that stay the process's own."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from pytensor.scalar.math import Softplus
from pytensor.tensor.elemwise import Elemwise

from fedppl import FederatedModel
from fedppl.local import nuts
from fedppl.model import template
from fedppl.model.compiled import mode, without_notices
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.numerics.pairs import site_outputs
from fedppl.results import idata
from tests.support import problems
from tests.support.markers import slow_but


@pytest.mark.parametrize("side", slow_but(["left", "right"], "right"))
def test_a_batch_of_transposes_is_multiplied_without_a_warning(side: str, rng: np.random.Generator) -> None:
    """Compiled anew, and in single precision: Numba warns once a process of the same types, and never from a cache."""
    x, y = pt.tensor3("x", dtype="float32"), pt.tensor3("y", dtype="float32")
    product = pt.matmul(x.mT, y) if side == "left" else pt.matmul(x, y.mT)
    a, b = (rng.normal(size=(2, 3, 3)).astype("float32") for _ in range(2))
    with pytensor.config.change_flags(numba__cache=False):
        with without_notices():
            pass  # PyTensor's Numba backend is imported, with its own filters
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pytensor.function([x, y], product, mode=mode())(a, b)
    expected = a.transpose(0, 2, 1) @ b if side == "left" else a @ b.transpose(0, 2, 1)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


X, V, N, T, B = pt.matrix("X"), pt.vector("V"), pt.scalar("N"), pt.tensor3("T"), pt.tensor3("B")
COLUMN, LINE = pt.tensor("COLUMN", shape=(None, 1), dtype="float64"), pt.tensor("LINE", shape=(1,), dtype="float64")
VALUES = {
    X: np.arange(9.0).reshape(3, 3) ** 1.5,
    V: np.array([1.0, -2.0, 3.0]),
    N: np.array(0.7),
    T: np.arange(24.0).reshape(2, 3, 4) ** 0.5,
    B: np.eye(3)[:, :, None] * [9.0, 11.0] + np.arange(18.0).reshape(3, 3, 2) / 9.0,
    COLUMN: np.array([[1.0], [2.0], [4.0]]),
    LINE: np.array([5.0]),
}
# What is taken by indexing, one after the other in one process: none may be given the code of another.
GRAPHS = {
    "parts along rows": lambda: pt.split(X, [1, 2], axis=0)[1],
    "parts along columns": lambda: pt.split(X, [1, 2], axis=1)[1],
    "other parts along columns": lambda: pt.split(X, [2, 1], axis=-1)[1],
    "joined along rows": lambda: pt.concatenate([X, X * V], axis=0),
    "joined along columns": lambda: pt.concatenate([X, X * V], axis=1),
    "transposed": lambda: X.T @ V,
    "turned": lambda: T.dimshuffle(2, 0, 1) * 2.0,
    "turned back": lambda: T.dimshuffle(1, 2, 0) * 2.0,
    "turned, with a new axis": lambda: T.dimshuffle(2, "x", 1, 0) * 2.0,
    "a new axis first": lambda: V.dimshuffle("x", 0) + X,
    "a new axis last": lambda: V.dimshuffle(0, "x") + X,
    "without an axis": lambda: COLUMN.dimshuffle(0) * V,
    "without an axis, with new ones": lambda: COLUMN.dimshuffle("x", 0, "x") + V,
    "a number of one": lambda: LINE.dimshuffle() * V,
    "one of a number": lambda: N.dimshuffle("x", "x") * X,
    "one of one": lambda: LINE.dimshuffle("x", 0, "x") * X,
    "full of a number": lambda: pt.full((V.shape[0], 2), N) * 2.0,
    "full of one": lambda: pt.alloc(LINE, 4, 3) * V,
    "full of a column": lambda: pt.alloc(COLUMN, 2, 3, 4) * T,
    "factors of what is turned around": lambda: pt.linalg.cholesky(B.T + B.T.mT),
    "systems that are turned around": lambda: pt.linalg.solve_triangular(B.T, B.T**2, lower=True, b_ndim=2),
    "sums of what is transposed": lambda: X.T.sum(axis=0) + X.T.max(axis=1) + pt.cumsum(X.T, axis=0)[2],
    "what is transposed, in one row": lambda: X.T.reshape((9,)) * pt.concatenate([X.T, X], axis=1)[:, :3].ravel(),
    "rows of what is transposed": lambda: X.T[[0, 2]] * pt.set_subtensor(X.T[1], V)[[1, 1]],
    "a system that is transposed": lambda: pt.linalg.solve(X.T + 20.0 * pt.eye(3), V),
    "zeros": lambda: pt.set_subtensor(pt.zeros((2, V.shape[0]))[0], V),
    "whole numbers": lambda: pt.full((V.shape[0],), 2, dtype="int32") + V,
    "a view that is written to": lambda: pt.set_subtensor(X.T[0], V) + X,
    "a new axis that is written to": lambda: pt.inc_subtensor(V.dimshuffle("x", 0)[0, 1], 1.0) + V,
}


# Some of every kind at each run: all are compiled anew, which takes half a minute.
SOME = [
    "parts along rows",
    "parts along columns",
    "turned",
    "turned back",
    "a number of one",
    "full of a number",
    "full of one",
]


HALVES = [list(GRAPHS)[:15], list(GRAPHS)[15:]]


@pytest.mark.parametrize("names", slow_but([SOME, *HALVES]), ids=["some", "first half", "second half"])
def test_what_is_taken_by_indexing_is_what_it_was(names: list[str]) -> None:
    values = [GRAPHS[name]() for name in names]
    slopes = pt.grad(sum((value**2).sum() for value in values), list(VALUES), disconnected_inputs="ignore")
    with without_notices():  # as the library compiles
        ours, theirs = (
            pytensor.function(list(VALUES), [*values, *slopes], mode=one)(*VALUES.values())
            for one in (mode(), "FAST_COMPILE")
        )
    for name, a, b in zip([*names, *(f"slope in {v}" for v in VALUES)], ours, theirs, strict=True):
        assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=name)


Y = pt.ivector("Y")
OUTCOMES = {
    "odds": (lambda: pm.Bernoulli.dist(logit_p=V), True),
    "rates": (lambda: pm.Poisson.dist(pt.exp(V) * (1.0 + pt.sqr(V))), True),
    "shares": (lambda: pm.Binomial.dist(n=4, logit_p=V), True),
    "a probability that may be any number": (lambda: pm.Bernoulli.dist(p=0.5 + V), False),
    "a rate that may be any number": (lambda: pm.Poisson.dist(1.0 + V), False),
    "a rate less another": (lambda: pm.Poisson.dist(pt.exp(V) - 1.0), False),
    "a square of narrow integers": (lambda: pm.Poisson.dist(pt.sqr(pt.cast(6.5 * V, "int8")) + 1.0), False),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_conditions_that_always_hold_are_not_computed_and_others_are(name: str) -> None:
    """At -2 the parameters of the last four are outside of their domain, and no row may hide it: 13² is -87 there."""
    outcome, always = OUTCOMES[name]
    values, counts = np.array([-2.0, 0.1, 0.3]), np.array([1, 0, 1], dtype="int32")
    density = pm.logp(outcome(), Y)
    with without_notices():
        function = pytensor.function(
            [V, Y], density.sum(), mode=mode().including("local_check_parameter_to_ninf_switch")
        )
    # Of PyTensor 3 the name tells, since it has more than one class of these, and fuses them with what they are of.
    named = [str(node.op) for node in function.maker.fgraph.apply_nodes]
    assert not any("All{" in name or "and@" in name for name in named) == always
    ours = function(values, counts)
    if not always:
        assert ours == -np.inf
        values, counts = values[1:], counts[1:]
        ours = function(values, counts)
    assert_allclose(ours, density.eval({V: values, Y: counts}, mode=PYTHON_MODE).sum(), rtol=1e-12)


def test_a_yes_or_no_takes_one_logarithm() -> None:
    """And the digits of either branch: at odds of e^40 log(1 + e^-40) is e^-40."""
    density = pm.logp(pm.Bernoulli.dist(logit_p=V), Y)
    with without_notices():
        function = pytensor.function([V, Y], density, mode=mode())
    (composite,) = (node for node in function.maker.fgraph.apply_nodes if isinstance(node.op, Elemwise))
    inner = composite.op.scalar_op.fgraph.apply_nodes
    assert sum(isinstance(node.op, Softplus) for node in inner) == 1
    odds = np.array([40.0, -40.0, 40.0, -40.0, 0.0])
    found = function(odds, np.array([1, 0, 0, 1, 1], dtype="int32"))
    assert_allclose(found, [-np.exp(-40.0), -np.exp(-40.0), -40.0, -40.0, -np.log(2.0)], rtol=1e-12)


@pytest.mark.parametrize("sizes", [[1, 1], [4, -1], [2, 2]])
def test_parts_that_are_not_all_of_an_array_are_an_error(sizes: list[int]) -> None:
    function = pytensor.function([V], pt.split(V, sizes, n_splits=2)[0], mode=mode())
    with pytest.raises((AssertionError, ValueError)):
        function(VALUES[V])


def test_two_threads_that_compile_leave_the_warning_filters_as_they_were() -> None:
    """The one that came later leaves later, and must not put back what the first had set."""
    with without_notices():
        pass
    before, second_is_in, first_is_out = list(warnings.filters), threading.Event(), threading.Event()

    def later() -> None:
        with without_notices():
            second_is_in.set()
            first_is_out.wait(10)

    with without_notices():
        thread = threading.Thread(target=later)
        thread.start()
        second_is_in.wait(0.5)
    first_is_out.set()
    thread.join()
    assert list(warnings.filters) == before


def test_sampling_and_diagnostics_touch_no_warning_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in threads, and filters belong to the process."""
    seen: list[Any] = []

    def spy(function: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            seen.append(list(warnings.filters))
            return function(*arguments, **settings)

        return call

    before = list(warnings.filters)
    monkeypatch.setattr(az, "rhat", spy(az.rhat))
    idata.chain_diagnostics(np.zeros((2, 10, 1)))
    nutpie = pytest.importorskip("nutpie")
    monkeypatch.setattr(nutpie, "sample", spy(nutpie.sample))
    nuts.by_nutpie(lambda x: (-0.5 * float(x @ x), -x), np.zeros(2), 20, 20, 1, 0.9, np.random.default_rng(1))
    assert seen == [before, before]


def test_a_process_reads_what_one_before_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    _, clients = problems.noise()
    data = next(iter(clients.values()))
    kernels, values = [], []
    for _ in range(2):
        monkeypatch.setattr(template, "_kernels", [])
        monkeypatch.setattr(template, "_in_use", weakref.WeakKeyDictionary())
        template._made.cache_clear()
        client = FederatedModel(problems.noise_builder, ["mu", "log_tau"]).enrol({"a": data})["a"]
        kernels.append(client.kernel)
        values.append(client.kernel(np.concatenate([np.zeros(client.shared_size), client.initial]), *client.packed))
    first, second = kernels
    assert second is not first and sum(second.stats.cache_hits.values()) == 1 and not second.stats.cache_misses
    assert_allclose(values[0], values[1], rtol=0, atol=0)


def test_a_term_read_twice_and_one_written_twice_are_two_kernels() -> None:
    """They may differ in last digits: what a model gives does not depend on what a process compiled before."""

    def read_twice(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            mu = pm.Normal("mu", 0.0, 1.0)
            rate = pm.math.exp(mu)
            pm.Potential("fit", -((y - rate) ** 2).sum() - rate)
        return model

    def written_twice(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            mu = pm.Normal("mu", 0.0, 1.0)
            pm.Potential("fit", -((y - pm.math.exp(mu)) ** 2).sum() - pm.math.exp(mu))
        return model

    def kernel(builder: Any) -> Any:
        return FederatedModel(builder, ["mu"]).enrol({"a": {"y": np.ones(3)}})["a"].kernel

    first = kernel(read_twice)
    assert kernel(written_twice) is not first
    assert kernel(lambda y: read_twice(y)) is first


@pytest.mark.slow
def test_a_model_may_have_more_variables_than_python_passes_one_by_one(rng: np.random.Generator) -> None:
    """Beyond thirty arguments of the compiled density."""

    def build(**data: Any) -> pm.Model:
        with pm.Model() as model:
            means = [pm.Normal(f"m{k}", 0, 1) for k in range(20)]
            for k, mean in enumerate(means):
                pm.Normal(f"obs{k}", mean, 1, observed=pm.Data(f"y{k}", data[f"y{k}"]))
        return model

    data = {f"y{k}": rng.normal(size=2) for k in range(20)}
    model = FederatedModel(build, [f"m{k}" for k in range(20)]).enrol({"a": data})["a"]
    found = site_outputs(model.kernel, np.zeros((1, 20)), model.packed)[0]
    assert_allclose(found[1:], [data[f"y{k}"].sum() for k in range(20)], rtol=1e-12)
