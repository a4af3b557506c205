"""What leaves a client depends on no row of its data, but for the messages of the algorithms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import fedppl
from fedppl import DeclarationError, FederatedModel
from fedppl.contracts import SharedReader
from fedppl.model import _group, _public
from fedppl.model.client import dims_and_coords
from fedppl.model.template import template_of
from fedppl.types import Variable

X, Y = np.array([1.0, 2.5, -3.0, 0.5]), np.array([0.5, -1.0, 2.0, 0.25])
GROUP = np.array([0, 2, 2, 1])
DATA = {"x": X, "y": Y, "group": GROUP}

Told = tuple[tuple[Variable, ...], SharedReader, dict[str, Any], _public.Public]


def told(builder: Callable[..., Any], data: Any, shared: Any = ("beta", "tau")) -> Told:
    """All that a site tells of its model: layout, reader, constrained draws of φ. Nothing is compiled."""
    model = FederatedModel(builder, shared)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="left out of the shared result")
        template = template_of(model.declared, "a", data)
        _group._judge(model.declared, "a", data, template)
    public, variables = template.public, template.variables[0]
    x, inputs, names, outputs = fedppl.model.graph.constrained_graph(
        template.parts, variables, public.names, only_shared=True
    )
    arrays = fedppl.model.checks.containers("a", template.parts, data)
    size = sum(variable.size for variable in variables)
    draws = np.linspace(-1, 1, 3 * size).reshape(3, size)
    values = fedppl.model.interpreted.batched({x: pt.matrix()}, inputs, outputs)(draws, *arrays[: len(inputs)])
    dims, coords = dims_and_coords(template.parts.model)
    kept = {name: dims.get(name) for name in names}
    reader = SharedReader(lambda phi: {}, kept, {dim: coords[dim] for dim in public.labelled})
    return variables, reader, dict(zip(names, values, strict=True)), public


def model_of(
    deterministic: Callable[..., Any], *, contained: Any = ("x", "y", "group"), coords: Any = None, dims: Any = None
) -> Callable[..., Any]:
    """Builder with one deterministic of the shared beta (3,), the raw arrays and the containers."""

    def build(x: Any, y: Any, group: Any) -> Any:
        raw = {"x": x, "y": y, "group": group}
        with pm.Model(coords=coords(**raw) if coords else None) as model:
            held = {name: pm.Data(name, value) if name in contained else value for name, value in raw.items()}
            beta = pm.Normal("beta", 0, 2, shape=3, dims=dims)
            tau = pm.HalfNormal("tau", 1)
            theta = pm.Normal("theta", beta[0], tau)
            pm.Deterministic("d", deterministic(beta, raw, held))
            pm.Normal("obs", theta + beta[held["group"]] * held["x"], 1, observed=held["y"])
        return model

    return build


KEPT = {
    "numbers": lambda beta, raw, held: pm.math.exp(beta) * 2.0 + np.log(3.0),
    "columns of the model": lambda beta, raw, held: beta[1:] / beta[0] + beta[[0, 1]],
    "a grid": lambda beta, raw, held: beta[0] + beta[1] * np.linspace(0, 1, 7),
    "ones and counts": lambda beta, raw, held: beta * np.ones(3) + np.arange(3),
    "no data": lambda beta, raw, held: pt.stack([beta[0], beta[2]]) + len(raw),
}
LEFT_OUT = {
    "rows": lambda beta, raw, held: beta[0] * raw["x"],
    "one row": lambda beta, raw, held: beta[0] * raw["x"][0],
    "a mean": lambda beta, raw, held: beta[0] * float(np.mean(raw["y"])),
    "the largest": lambda beta, raw, held: beta[0] + float(np.max(raw["y"])),
    "a number of rows": lambda beta, raw, held: beta[0] / len(raw["y"]),
    "a number of groups": lambda beta, raw, held: beta[0] / len(np.unique(raw["group"])),
    "groups": lambda beta, raw, held: beta[raw["group"]],
    "a size": lambda beta, raw, held: beta[0] * np.linspace(0, 1, len(raw["y"])),
    "other people's table": lambda beta, raw, held: beta * np.array([1.7, -0.4, 2.9]),
    "a shared variable": lambda beta, raw, held: beta[0] * pm.math.sum(pytensor.shared(np.array([1.7, -0.4, 2.9]))),
    "a container": lambda beta, raw, held: beta[0] * held["x"],
}


@pytest.mark.parametrize("name", KEPT)
def test_deterministics_without_data_stay_in_the_shared_result(name: str) -> None:
    assert told(model_of(KEPT[name]), DATA)[3].names == ("d",)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_deterministics_that_may_hold_data_are_left_out(name: str) -> None:
    assert told(model_of(LEFT_OUT[name]), DATA)[3].names == ()


def test_correlations_of_a_shared_cholesky_factor_stay() -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            y = pm.Data("y", y)
            chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1, shape=2))
            pm.Normal("obs", chol.sum(), 1, observed=y)
        return model

    assert told(build, {"y": Y}, ["chol"])[3].names == ("chol_corr", "chol_stds")


def baked(x: Any, y: Any) -> Any:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2)
        pm.Deterministic("eta", beta * x)  # the array itself, not its container
        pm.Deterministic("odds", pm.math.exp(beta))
        pm.Normal("obs", beta * pm.Data("x", x), 1, observed=pm.Data("y", y))
    return model


@pytest.mark.filterwarnings("ignore:the builder bakes")
def test_rows_stay_at_the_embedded_engine_and_are_named_once() -> None:
    clients = {"a": {"x": X, "y": Y}, "b": {"x": X[:3] + 1, "y": Y[:3]}}
    with pytest.warns(UserWarning, match="left out of the shared result: 'eta'") as caught:
        fit = fedppl.fit(FederatedModel(baked, ["beta"]), clients, fedppl.EP(), progressbar=False, random_seed=1)
    assert sum("left out" in str(warning.message) for warning in caught) == 1
    assert set(fit.idata["posterior"].data_vars) == {"beta", "odds"}
    own = fit.client("b", draws=5)["posterior"]  # where the rows are anyway
    expected = own["beta"].values[..., None] * (X[:3] + 1)
    assert_array_equal(own["eta"].values, expected)


def test_a_builder_that_cannot_be_called_on_other_data_gives_nothing_away() -> None:
    def build(y: Any) -> Any:
        if not np.array_equal(y, Y):
            raise ValueError("these are not my data")
        with pm.Model(coords={"who": ["Ann", "Bob"], "k": [0, 1]}) as model:
            y = pm.Data("y", y)
            beta = pm.Normal("beta", 0, 2, dims="who")
            pm.Normal("gamma", 0, 2, dims="k")
            pm.Deterministic("d", 2.0 * beta)
            pm.Normal("obs", beta[0], 1, observed=y)
        return model

    public = told(build, {"y": Y}, ["beta", "gamma"])[3]
    assert public == _public.Public((), ("d",), ("k",), ("who",))
    with pytest.warns(UserWarning, match="fails on altered data"):
        FederatedModel(build, ["beta", "gamma"]).enrol({"a": {"y": Y}}, kernel=False)


def test_labels_of_shared_dims_stay_unless_they_come_from_data() -> None:
    steady = model_of(KEPT["numbers"], coords=lambda **raw: {"p": ["dose", "age", "sex"]}, dims="p")
    assert told(steady, DATA)[1].coords == {"p": ["dose", "age", "sex"]}
    for labels in (lambda y, **raw: y[:3], lambda y, **raw: [f"patient {value}" for value in y[:3]]):
        public = told(
            model_of(KEPT["numbers"], coords=lambda labels=labels, **raw: {"p": labels(**raw)}, dims="p"), DATA
        )
        assert public[1].coords == {} and public[3].unlabelled == ("p",)


@pytest.mark.parametrize("of", [np.mean, np.max, len, lambda y: y[0]])
def test_a_prior_made_of_the_only_clients_data_is_refused(of: Callable[[Any], Any]) -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            y, center = pm.Data("y", y), float(of(y))
            pm.Normal("obs", pm.Normal("mu", center, 1), 1, observed=y)
        return model

    with pytest.raises(DeclarationError, match="prior changes when this client's data") as caught:
        FederatedModel(build, ["mu"]).enrol({"a": {"y": Y}}, kernel=False)
    assert str(of(Y)) not in str(caught.value)  # at a site this text travels


def test_bounds_made_of_data_are_refused_like_any_prior() -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            y, low, high = pm.Data("y", y), float(np.min(y)), float(np.max(y))
            pm.Normal("obs", pm.Uniform("mu", low, high), 1, observed=y)
        return model

    with pytest.raises(DeclarationError, match="prior changes"):
        FederatedModel(build, ["mu"]).enrol({"a": {"y": Y}}, kernel=False)


# --- random models --------------------------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda v: float(np.mean(v)),
    "largest": lambda v: float(np.max(v)),
    "smallest": lambda v: float(np.min(v)),
    "first": lambda v: float(v[0]),
    "median": lambda v: float(np.median(v)),
    "spread": lambda v: float(np.std(v)),
    "rows": len,
    "whole array": lambda v: v,
    "sorted": lambda v: np.sort(v),
    "two": lambda v: v[:2],
    "literal": lambda v: 2.0,
    "grid": lambda v: np.linspace(0, 1, 5),
    "columns": lambda v: np.ndim(v),
}
SHAPES: list[Callable[[Any, Any, Any], Any]] = [
    lambda beta, tau, c: beta[0] * c,
    lambda beta, tau, c: pt.exp(beta[1]) + c,
    lambda beta, tau, c: tau**2 + pt.sum(beta) * pt.sum(c),
    lambda beta, tau, c: pt.switch(beta[0] > 0, c, tau),
    lambda beta, tau, c: pt.stack([beta[0], beta[2]])[:, None] * c,
]


def random_builder(contained: frozenset[str], terms: Any, labels: str) -> Callable[..., Any]:
    def build(x: Any, y: Any, group: Any) -> Any:
        raw = {"x": x, "y": y, "group": group}
        coords = {"names": list("abc"), "values": list(x[:3]), "texts": [str(v) for v in y[:3]]}[labels]
        with pm.Model(coords={"p": coords, "obs_id": np.arange(len(y))}) as model:
            held = {name: pm.Data(name, value) if name in contained else value for name, value in raw.items()}
            beta, tau = pm.Normal("beta", 0, 2, dims="p"), pm.HalfNormal("tau", 1)
            for number, (shape, of, name) in enumerate(terms):
                pm.Deterministic(f"d{number}", SHAPES[shape](beta, tau, NUMBERS[of](raw[name])))
            pm.Deterministic("fitted", beta[0] * held["x"])
            pm.Normal("obs", beta[held["group"]] * held["x"], tau, observed=held["y"], dims="obs_id")
        return model

    return build


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    contained=st.sampled_from([frozenset(), frozenset({"x", "y", "group"})]),
    terms=st.lists(
        st.tuples(
            st.integers(0, len(SHAPES) - 1), st.sampled_from(sorted(NUMBERS)), st.sampled_from(["x", "y", "group"])
        ),
        min_size=1,
        max_size=3,
    ),
    labels=st.sampled_from(["names", "values", "texts"]),
    change=st.sampled_from(["another value", "another group", "no row", "one more row"]),
    seed=st.integers(0, 99),
)
def test_no_row_changes_what_a_site_tells_of_its_model(
    contained: frozenset[str], terms: Any, labels: str, change: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    data = {"x": rng.normal(size=6), "y": rng.normal(size=6).round(1), "group": rng.integers(0, 3, size=6)}
    other = {name: value.copy() for name, value in data.items()}
    if change == "another value":
        other["x"][2], other["y"][2] = 17.0, -9.0
    elif change == "another group":
        other["group"][1] = (other["group"][1] + 1) % 3
    else:
        rows = np.arange(5) if change == "no row" else np.array([0, 1, 2, 3, 4, 5, 3])
        other = {name: value[rows] for name, value in data.items()}
    builder = random_builder(contained, terms, labels)
    one, two = told(builder, data), told(builder, other)
    assert one[0] == two[0]  # shapes, transforms and dims of the shared variables
    assert one[1].dims == two[1].dims and one[1].coords == two[1].coords
    assert one[2].keys() == two[2].keys()
    for name, value in one[2].items():
        assert_array_equal(value, two[2][name])
