"""The declaration: what is refused and how, and log site factors against PyMC's own log density."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pymc.distributions.transforms import ordered
from scipy.special import gammaln
from scipy.stats import norm, poisson

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel, gaussian
from fedppl.model.checks import one_type
from fedppl.model.client import ClientModel
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.model.template import compilations
from fedppl.testing import normal_means
from tests.support import problems
from tests.support.markers import slow_but

Y = np.array([0.5, -1.0, 2.0])


def refusal(
    kind: type[Exception], model: FederatedModel, clients: Any, folder: Path, *, before_compiling: bool = True
) -> str:
    """Text of the one error that ends the fit, when nothing is left behind: no checkpoint, nothing compiled."""
    compiled, path = compilations(), folder / "run.ckpt"
    with pytest.raises(kind) as caught:
        fedppl.fit(
            model, clients, fedppl.averaging.FedAvg(learning_rate=0.1), checkpoint=path, progressbar=False, rounds=1
        )
    assert not list(folder.iterdir())
    if before_compiling:
        assert compilations() == compiled
    return str(caught.value)


# --- bad declarations -----------------------------------------------------------------------------------------


def declared(body: Callable[[], Any]) -> Callable[..., Any]:
    """Builder of one observed vector y with the given free variables."""

    def build(y: Any) -> Any:
        with pm.Model() as model:
            data = pm.Data("y", y)
            pm.Normal("obs", body(), 1, observed=data)
        return model

    return build


def plain() -> Any:
    return pm.Normal("theta", pm.Normal("mu", 0, 10), 0.5)


def with_deterministic() -> Any:
    mu = pm.Normal("mu", 0, 10)
    return pm.Normal("theta", pm.Deterministic("twice", 2 * mu), 0.5)


def discrete_shared() -> Any:
    return pm.Normal("theta", pm.Poisson("rate", 3), 0.5)


def discrete_local() -> Any:
    return pm.Normal("mu", 0, 10) + pm.Bernoulli("ill", 0.3)


def upside_down() -> Any:
    return pm.Normal("mu", pm.Normal("theta", 0, 10), 0.5)


def flat() -> Any:
    return pm.Normal("theta", pm.Flat("mu"), 0.5)


def half_flat() -> Any:
    return pm.Normal("theta", 0, pm.HalfFlat("mu"))


def flat_hierarchy() -> Any:
    return pm.Normal("theta", pm.Normal("mu", 0, pm.HalfFlat("tau")), 0.5)


def flat_beside() -> Any:
    return pm.Normal("theta", pm.Flat("mu"), pm.HalfCauchy("tau", 1))


def no_data_in_it() -> Any:
    return None


DECLARATIONS = {
    "misspelt": (plain, ["mue"], ["'mue' is not in the model", "Did you mean 'mu'?", "'mu', 'theta'", "Name only"]),
    "observed": (plain, ["obs"], ["'obs' is in the model but is not a free random variable", "'mu', 'theta'"]),
    "container": (plain, ["y"], ["'y' is in the model but is not a free random variable"]),
    "deterministic": (with_deterministic, ["twice"], ["'twice' is in the model but is not a free", "Name only"]),
    "discrete shared": (discrete_shared, ["rate"], ["shared variable 'rate' is discrete (int64)", "Sum it out"]),
    "discrete local": (discrete_local, ["mu"], ["local variable 'ill' is discrete (int64)", "pm.Mixture"]),
    "on a local": (upside_down, ["mu"], ["'mu' depends on local variable 'theta'", "Share 'theta' too, or turn"]),
    "flat": (flat, ["mu"], ["improper", "pm.Normal(0, 10)"]),
    "half flat": (half_flat, ["mu"], ["'mu' (pm.HalfNormal(1) for example)", "improper"]),
    "flat above": (flat_hierarchy, ["mu", "tau"], ["'tau'", "improper", "proper prior"]),
    "flat beside": (flat_beside, ["mu", "tau"], ["'mu' (pm.Normal(0, 10) for example)", "improper", "proper prior"]),
}


@pytest.mark.parametrize("case", DECLARATIONS)
def test_a_bad_declaration_is_refused_with_client_value_and_remedy(case: str, tmp_path: Path) -> None:
    body, shared, fragments = DECLARATIONS[case]
    text = refusal(DeclarationError, FederatedModel(declared(body), shared), {"ward": {"y": Y}}, tmp_path)
    for fragment in ["client 'ward'", *fragments]:
        assert fragment in text


def test_a_shared_prior_that_reads_client_data_is_refused(tmp_path: Path) -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            data = pm.Data("y", y)
            mu = pm.Normal("mu", data.mean(), 1)
            pm.Normal("obs", mu, 1, observed=data)
        return model

    text = refusal(DeclarationError, FederatedModel(build, ["mu"]), {"ward": {"y": Y}}, tmp_path)
    for fragment in ("client 'ward'", "shared variable 'mu' depends on client data 'y'", "same at all clients"):
        assert fragment in text


def test_a_shared_prior_with_a_baked_in_constant_of_the_data_is_refused(tmp_path: Path) -> None:
    """Not in the graph as data, but different between two clients."""

    def build(y: Any) -> Any:
        with pm.Model() as model:
            data = pm.Data("y", y)
            mu = pm.Normal("mu", float(np.mean(y)), 1)
            pm.Normal("obs", mu, 1, observed=data)
        return model

    text = refusal(DeclarationError, FederatedModel(build, ["mu"]), {"a": {"y": Y}, "b": {"y": Y + 1}}, tmp_path)
    for fragment in ("client 'b'", "shared prior differs from the one at client 'a'", "same constants"):
        assert fragment in text


@pytest.mark.parametrize("limits", [lambda y: (0.0, y.max()), lambda y: (y.min(), y.min() + 1.0)])
@pytest.mark.parametrize("in_container", [True, False])
def test_limits_of_a_shared_prior_from_data_are_refused(limits: Any, in_container: bool, tmp_path: Path) -> None:
    """On the unconstrained scale densities between other limits are equal."""

    def build(y: Any) -> Any:
        low, high = limits(y)
        with pm.Model() as model:
            y = pm.Data("y", y) if in_container else y
            pm.Normal("obs", pm.Uniform("mu", low, high), 1, observed=y)
        return model

    clients = {"a": {"y": np.abs(Y)}, "b": {"y": np.abs(Y) + 1}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without containers each client is compiled
        text = refusal(
            DeclarationError, FederatedModel(build, ["mu"]), clients, tmp_path, before_compiling=in_container
        )
    assert "client 'b'" in text and "same constants" in text


def test_limits_that_change_places_are_another_prior() -> None:
    """Densities on the unconstrained scale and products of limits are equal."""

    def declared(first: float, second: float) -> FederatedModel:
        def build(y: Any) -> Any:
            with pm.Model() as model:
                both = pm.Uniform("p", 0, first) + pm.Uniform("q", 0, second)
                pm.Normal("obs", both, 1, observed=pm.Data("y", y))
            return model

        return FederatedModel(build, ["p", "q"])

    one, same, other = (
        declared(*limits).enrol({"a": {"y": Y}})["a"].layout.fingerprint for limits in ((1, 2), (1, 2), (2, 1))
    )
    assert one == same != other


def test_a_builder_is_held_against_the_client_with_the_farthest_values() -> None:
    """A branch on values shows at one of many clients of equal size."""

    def build(y: Any) -> Any:
        scale = 0.01 if y.mean() > 50 else 1.0
        with pm.Model() as model:
            pm.Normal("obs", pm.Normal("mu", 0, 1), scale, observed=pm.Data("y", y))
        return model

    clients = {name: {"y": Y + 100.0 * (name == "c")} for name in "abcd"}
    with pytest.warns(UserWarning, match="on its own"):
        models = FederatedModel(build, ["mu"]).enrol(clients)
    at = np.zeros(0)
    values = [models[name].log_site(np.array([float(np.mean(clients[name]["y"]))]), at)[0] for name in "bc"]
    spread = float(np.sum((Y - Y.mean()) ** 2))
    expected = [-0.5 * spread / scale**2 - len(Y) * np.log(scale * np.sqrt(2 * np.pi)) for scale in (1.0, 0.01)]
    assert_allclose(values, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["chain", "draw"])
def test_names_of_draws_dims_are_refused(name: str, tmp_path: Path) -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            pm.Normal("obs", pm.Normal(name, 0, 1), 1, observed=pm.Data("y", y))
        return model

    text = refusal(DeclarationError, FederatedModel(build, [name]), {"a": {"y": Y}}, tmp_path)
    assert repr(name) in text and "rename" in text


def test_fractions_that_pymc_truncates_are_refused_without_containers(tmp_path: Path) -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            pm.Poisson("obs", pm.math.exp(pm.Normal("mu", 0, 1)), observed=y)
        return model

    clients = {"a": {"y": np.array([1.0, 2.5, 0.0])}}
    text = refusal(DataError, FederatedModel(build, ["mu"]), clients, tmp_path)
    assert "2.5" in text and "round" in text


def test_whole_constants_are_observed_beside_a_column_that_truncates_to_them() -> None:
    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            pm.Poisson("obs", pm.math.exp(pm.Normal("mu", 0, 1) + 0 * x), observed=y)
        return model

    client = {"x": np.array([0.3, -0.9, 0.5]), "y": np.zeros(3, dtype=np.int64)}
    enrolled = FederatedModel(build, ["mu"]).enrol({"a": client})["a"]
    assert_allclose(enrolled.log_site(np.zeros(1), np.zeros(0))[0], -3.0)


def test_a_model_without_likelihood_is_refused(tmp_path: Path) -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            pm.Data("y", y)
            pm.Normal("mu", 0, 1)
        return model

    text = refusal(DeclarationError, FederatedModel(build, ["mu"]), {"ward": {"y": Y}}, tmp_path)
    assert "no observed variable" in text and "observed=" in text


def test_a_builder_that_returns_no_model_is_refused(tmp_path: Path) -> None:
    text = refusal(DeclarationError, FederatedModel(lambda y: None, ["mu"]), {"ward": {"y": Y}}, tmp_path)
    for fragment in ("client 'ward'", "returned NoneType", "return model"):
        assert fragment in text


def test_a_builder_that_raises_names_the_client_the_shapes_and_the_error(tmp_path: Path) -> None:
    def build(y: Any) -> Any:
        if len(y) < 4:
            raise RuntimeError("need four rows")
        return declared(plain)(y)

    clients = {"large": {"y": np.ones(5)}, "small": {"y": Y}}
    text = refusal(DataError, FederatedModel(build, ["mu"]), clients, tmp_path)
    line = build.__code__.co_firstlineno + 2
    of_builder = f"line {line} of test_model.py"
    for fragment in ("client 'small'", "{'y': (3,)}", of_builder, "RuntimeError: need four rows", "client's data"):
        assert fragment in text


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ((None, ["mu"]), ["builder is NoneType", "pass a function"]),
        ((declared(plain), []), ["shared=[]", "at least one"]),
        ((declared(plain), ["mu", "mu"]), ["'mu' is listed 2 times", "once"]),
    ],
)
def test_arguments_of_the_declaration_itself(arguments: Any, fragments: list[str]) -> None:
    with pytest.raises(DeclarationError) as caught:
        FederatedModel(*arguments)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_single_shared_name_may_be_a_string() -> None:
    assert FederatedModel(declared(plain), "mu").shared == ("mu",)


# --- bad data -------------------------------------------------------------------------------------------------


def good_rows(rows: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    return {"X": rng.normal(size=(rows, 2)), "y": rng.normal(size=rows)}


def broken(name: str, value: float) -> dict[str, Any]:
    data = good_rows()
    data[name][1] = value
    return data


BEFORE_COMPILING = {
    "not a mapping": ([1.0, 2.0], ["data are list", "mapping from name to array"]),
    "no arrays": ({}, ["no data", "leave the client out"]),
    "extra key": ({**good_rows(), "w": np.ones(5)}, ["data keys ['X', 'w', 'y']", "['X', 'y']", "rename or complete"]),
    "missing key": ({"y": np.ones(5)}, ["data keys ['y']", "['X', 'y']", "rename or complete"]),
    "NaN in y": (broken("y", np.nan), ["'y' in 1 rows", "drop or impute", "missing="]),
    "infinite y": (broken("y", np.inf), ["'y' holds inf at index (1,)", "'obs'", "must be finite", "drop or"]),
    "zero rows": ({"X": np.zeros((0, 2)), "y": np.zeros(0)}, ["shape (0, 2)", "zero rows", "leave the client out"]),
    "text": ({"X": np.zeros((2, 2)), "y": ["good", "bad"]}, ["'y' has dtype <U4", "not numeric", "encode"]),
    "None": ({"X": np.zeros((2, 2)), "y": [None, 1.0]}, ["'y' in 1 rows", "drop or impute"]),
    "objects": ({"X": np.zeros((2, 2)), "y": [object(), 1.0]}, ["dtype object", "not numeric", "encode"]),
    "ragged": ({"X": [[1.0, 2.0], [3.0]], "y": np.ones(2)}, ["'X' is no array", "one length"]),
    "masked": ({**good_rows(), "y": np.ma.masked_invalid([1.0, np.nan, 1, 1, 1])}, ["'y' in 1 rows", "impute"]),
}


@pytest.mark.parametrize("case", BEFORE_COMPILING)
def test_bad_data_are_refused_before_anything_is_compiled(case: str, tmp_path: Path) -> None:
    data, fragments = BEFORE_COMPILING[case]
    model = FederatedModel(problems.regression_builder, problems.REGRESSION_SHARED)
    clients = {"good": good_rows(), "also good": good_rows(6), "bad": data}
    text = refusal(DataError, model, clients, tmp_path)
    for fragment in ["client 'bad'", *fragments]:
        assert fragment in text


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (broken("y", np.nan), ["'y' holds nan at index (1,)", "drop or impute"]),
        ({**good_rows(), "y": np.ma.masked_invalid([1.0, np.nan, 1, 1, 1])}, ["'y' has masked", "impute"]),
    ],
)
def test_missing_values_are_refused_where_a_site_enrols_alone(data: Any, fragments: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        FederatedModel(problems.regression_builder, problems.REGRESSION_SHARED).enrol({"bad": data})
    for fragment in ["client 'bad'", *fragments]:
        assert fragment in str(caught.value)


MISFITS = {
    "infinite X": (broken("X", -np.inf), ["'X' holds -inf at index (1, 0)", "not finite", "drop or impute"]),
    "rows of X and y": ({"X": np.ones((5, 2)), "y": np.ones(6)}, ["{'X': (5, 2), 'y': (6,)}", "one row of each"]),
    "one row of y": ({"X": np.ones((5, 2)), "y": np.ones(1)}, ["{'X': (5, 2), 'y': (1,)}", "one row of each"]),
    "one row of X": ({"X": np.ones((1, 2)), "y": np.ones(5)}, ["{'X': (1, 2), 'y': (5,)}", "one row of each"]),
    "a column more": ({"X": np.ones((5, 3)), "y": np.ones(5)}, ["{'X': (5, 3), 'y': (5,)}", "same columns"]),
    "a column less": ({"X": np.ones((5, 1)), "y": np.ones(5)}, ["{'X': (5, 1), 'y': (5,)}", "same columns"]),
    "dimensions": ({"X": np.ones((5, 2)), "y": np.ones((5, 1))}, ["'y': (5, 1)", "shape (5, 1)", "shape (5,)"]),
}


@pytest.mark.parametrize("case", MISFITS)
def test_shapes_that_do_not_fit_the_declared_coords_are_refused(case: str, tmp_path: Path) -> None:
    data, fragments = MISFITS[case]
    model, clients = problems.regression(2)
    text = refusal(DataError, model, {**clients, "bad": data}, tmp_path, before_compiling=False)
    for fragment in ["client 'bad'", *fragments]:
        assert fragment in text
    # nothing is left: the same declaration still serves the good clients
    assert set(model.enrol(clients, kernel=False)) == set(clients)


def test_another_column_count_under_a_polymorphic_builder_is_refused(tmp_path: Path) -> None:
    clients = {"usual": good_rows(), "also usual": good_rows(7), "odd": {"X": np.ones((5, 3)), "y": np.ones(5)}}
    model = FederatedModel(problems.polymorphic_builder, ["mu"])
    text = refusal(DataError, model, clients, tmp_path, before_compiling=False)
    for fragment in ("client 'odd'", "'mu' has shape (3,)", "(2,) at client 'usual'", "'X': (5, 3)", "same columns"):
        assert fragment in text


def test_a_shared_vector_as_long_as_the_rows_is_refused(tmp_path: Path) -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            data = pm.Data("y", y)
            mu = pm.Normal("mu", 0, 1, shape=len(y))
            pm.Normal("obs", mu, 1, observed=data)
        return model

    text = refusal(DataError, FederatedModel(build, ["mu"]), {"a": {"y": Y}, "b": {"y": np.ones(4)}}, tmp_path)
    for fragment in ("client 'b'", "'mu' has shape (4,)", "(3,) at client 'a'", "make 'mu' local"):
        assert fragment in text


def test_keys_that_match_no_container_are_refused(tmp_path: Path) -> None:
    def build(y: Any, weight: Any) -> Any:
        return declared(plain)(y)

    text = refusal(DataError, FederatedModel(build, ["mu"]), {"a": {"y": Y, "weight": Y}}, tmp_path)
    for fragment in ("client 'a'", "['weight'] match no container", "Name each container"):
        assert fragment in text


def test_containers_without_data_are_refused(tmp_path: Path) -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            data, weight = pm.Data("y", y), pm.Data("weight", np.ones(3))
            pm.Normal("obs", pm.Normal("mu", 0, 1) * weight, 1, observed=data)
        return model

    text = refusal(DataError, FederatedModel(build, ["mu"]), {"a": {"y": Y}}, tmp_path)
    for fragment in ("client 'a'", "['weight'] have no data", "Name each container"):
        assert fragment in text


def test_a_missing_argument_of_the_builder_is_refused(tmp_path: Path) -> None:
    model, _ = problems.regression(1)
    text = refusal(DataError, model, {"a": {"y": Y}}, tmp_path)
    for fragment in ("client 'a'", "needs 'X'", "add 'X' to the data"):
        assert fragment in text


@pytest.mark.parametrize("clients", [{}, {1: {"y": Y}, "1": {"y": Y}}])
def test_no_clients_and_ids_that_collide_are_refused(clients: Any, tmp_path: Path) -> None:
    text = refusal(DataError, FederatedModel(declared(plain), ["mu"]), clients, tmp_path)
    assert "no clients" in text if not clients else "not distinct" in text


def test_counts_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    """PyMC would cut 2.5 down to 2."""
    model, clients = problems.counts()
    text = refusal(DataError, model, {**clients, "bad": {"y": [1.0, 2.5]}}, tmp_path, before_compiling=False)
    for fragment in ("client 'bad'", "'y' holds 2.5", "'obs'", "whole numbers"):
        assert fragment in text


def test_a_later_client_whose_reals_the_container_cannot_hold_is_refused() -> None:
    model = FederatedModel(indexed_builder, ["mu"])
    client = model.enrol({"a": {"group": [0, 1, 2], "y": Y}}, kernel=False)["a"]
    with pytest.raises(DataError) as caught:
        model.with_data(client, "b", {"group": [0.0, 1.5, 2.0], "y": Y})
    for fragment in ("client 'b'", "'group' holds 1.5 at index (1,)", "int32", "one type at all clients"):
        assert fragment in str(caught.value)


def test_whole_reals_in_a_container_of_integers_are_taken() -> None:
    model, clients = problems.counts()
    taken = model.enrol({**clients, "whole": {"y": [1.0, 2.0]}}, kernel=False)["whole"]
    exact = model.enrol({"whole": {"y": [1, 2]}}, kernel=False)["whole"]
    point = np.zeros(1), np.array([0.2, -0.1])
    assert taken.log_site(*point)[0] == exact.log_site(*point)[0]


def test_data_that_the_likelihood_cannot_produce_are_refused(tmp_path: Path) -> None:
    model, clients = problems.counts()
    text = refusal(DataError, model, {**clients, "bad": {"y": [1, -2, 0]}}, tmp_path, before_compiling=False)
    for fragment in ("client 'bad'", "starting point is -inf", "'y' is -2 in row 1", "not negative", "initval="):
        assert fragment in text


def test_an_outcome_that_its_row_makes_impossible_is_named_without_a_rule_that_it_keeps(tmp_path: Path) -> None:
    def exposed(y: Any, hours: Any) -> Any:
        with pm.Model() as model:
            rate = pm.math.exp(pm.Normal("mu", 0, 1))
            pm.Poisson("obs", rate * pm.Data("hours", hours), observed=pm.Data("y", y))
        return model

    clients = {"a": {"y": np.array([0, 3, 1]), "hours": np.array([1.0, 0.0, 2.0])}}
    text = refusal(DataError, FederatedModel(exposed, ["mu"]), clients, tmp_path, before_compiling=False)
    assert "'y' is 3 in row 1" in text and "exposure" in text and "not negative" not in text


def test_a_start_without_density_that_no_outcome_explains_is_told_apart(tmp_path: Path) -> None:
    """Every outcome is possible under its distribution, and a potential forbids the start."""

    def forbidden(y: Any) -> Any:
        with pm.Model() as model:
            mu = pm.Normal("mu", 0, 1)
            y = pm.Data("y", y)
            pm.Potential("above", pt.switch(mu + y[0] > 1e3, 0.0, -np.inf))
            pm.Normal("obs", mu, 1, observed=y)
        return model

    text = refusal(DataError, FederatedModel(forbidden, ["mu"]), {"a": {"y": Y}}, tmp_path, before_compiling=False)
    assert "impossible under the model" in text and "in row" not in text


def indexed_builder(group: Any, y: Any) -> Any:
    with pm.Model() as model:
        group, y = pm.Data("group", group), pm.Data("y", y)
        effect = pm.Normal("effect", pm.Normal("mu", 0, 1), 0.5, shape=3)
        pm.Normal("obs", effect[group], 1, observed=y)
    return model


@pytest.mark.parametrize("value", [3, 10**6, -4])
def test_an_index_out_of_bounds_is_refused(value: int, tmp_path: Path) -> None:
    """Numba does not check bounds: unchecked, this reads foreign memory."""
    clients = {"good": {"group": [0, 1, 2], "y": Y}, "bad": {"group": [0, 1, value], "y": Y}}
    text = refusal(DataError, FederatedModel(indexed_builder, ["mu"]), clients, tmp_path, before_compiling=False)
    for fragment in ("client 'bad'", f"index {value} is out of bounds", "number groups 0 to n - 1"):
        assert fragment in text


def test_a_refused_fit_does_not_disturb_the_next() -> None:
    """No partial state: a fit after refusals equals one in their absence."""
    model, clients = problems.regression(3)
    before = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    for bad in (broken("y", np.nan), {"X": np.ones((5, 3)), "y": np.ones(5)}):
        with pytest.raises(DataError):
            fedppl.fit(model, {**clients, "bad": bad}, fedppl.EP(), progressbar=False)
    after = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    assert_array_equal(before.posterior.linear, after.posterior.linear)
    assert_array_equal(before.posterior.precision, after.posterior.precision)


# --- builders that compile per client -------------------------------------------------------------------------


def baked_mean(y: Any) -> Any:
    with pm.Model() as model:
        data = pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu", 0, 10), 0.5)
        pm.Normal("obs", theta - float(np.mean(y)), 1, observed=data)
    return model


# PyMC's own constant log √(2π) is right to ten digits only.
CONSTANTS = 1e-9


def log_normals(y: Any, theta: float, mu: float, shift: float) -> float:
    """Σ log N(y_i; θ − shift, 1) + log N(θ; μ, ½²)."""
    return float(norm.logpdf(y, theta - shift, 1).sum() + norm.logpdf(theta, mu, 0.5))


@pytest.mark.parametrize(
    ("builder", "reason", "baked"),
    [
        (problems.without_containers, "has no pm.Data container", 0),
        (baked_mean, "bakes a client's data into its graph", 1),
    ],
)
def test_data_outside_containers_warn_and_are_compiled_per_client(builder: Any, reason: str, baked: int) -> None:
    clients = {"a": {"y": Y}, "b": {"y": np.array([3.0, 4.0])}}
    model, compiled = FederatedModel(builder, ["mu"]), compilations()
    with pytest.warns(UserWarning, match=reason) as caught:
        enrolled = model.enrol(clients)
    assert "Put the data into pm.Data containers" in str(caught[0].message)
    assert compilations() - compiled == 2
    for client_id, data in clients.items():
        value, _, _ = enrolled[client_id].log_site(np.array([0.3]), np.array([0.8]))
        assert value == pytest.approx(log_normals(data["y"], 0.8, 0.3, baked * data["y"].mean()), rel=CONSTANTS)
    point = np.array([0.2]), np.array([-0.4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = model.with_data(enrolled["a"], "copy", clients["b"])
    assert copy.log_site(*point)[0] == enrolled["b"].log_site(*point)[0] != enrolled["a"].log_site(*point)[0]


def test_a_deterministic_with_a_baked_in_constant_is_each_clients_own() -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            data = pm.Data("y", y)
            theta = pm.Normal("theta", pm.Normal("mu", 0, 10), 0.5)
            pm.Deterministic("standardised", theta / float(np.max(y)))
            pm.Normal("obs", theta, 1, observed=data)
        return model

    with pytest.warns(UserWarning, match="bakes"):
        enrolled = FederatedModel(build, ["mu"]).enrol({"a": {"y": Y}, "b": {"y": 4 * Y}}, kernel=False)
    for client_id, largest in (("a", 2.0), ("b", 8.0)):
        values = enrolled[client_id].constrain(np.zeros((1, 1)), np.ones((1, 1)))
        assert values["standardised"] == 1 / largest


# --- log site factors -----------------------------------------------------------------------------------------


def reference_log_site(client: ClientModel, phi: Any, theta: Any) -> tuple[float, Any]:
    """PyMC's own log density and gradient of the client's model, less the shared prior's."""
    model = client.pymc_model()
    shared = [model[name] for name in client.declared.shared]
    ordered_rvs = [*shared, *(rv for rv in model.free_RVs if rv not in shared)]
    values = [model.rvs_to_values[rv] for rv in ordered_rvs]
    point, start = {}, 0
    x = np.concatenate([phi, theta])
    for value, variable in zip(values, (*client.layout.variables, *client.local), strict=True):
        point[value.name] = x[start : start + variable.size].reshape(variable.shape)
        start += variable.size
    total = model.compile_logp(mode=PYTHON_MODE)(point)
    gradient = model.compile_dlogp(vars=ordered_rvs, mode=PYTHON_MODE)(point)
    prior = model.logp(vars=shared)
    shared_values = values[: len(shared)]
    prior_point = {value.name: point[value.name] for value in shared_values}
    total -= model.compile_fn(prior, inputs=shared_values, mode=PYTHON_MODE)(prior_point)
    prior_gradient = [
        model.compile_fn(pt.grad(prior, value), inputs=shared_values, mode=PYTHON_MODE, on_unused_input="ignore")(
            prior_point
        )
        for value in shared_values
    ]
    gradient[: len(phi)] -= np.concatenate([np.ravel(part) for part in prior_gradient])
    # of so many values in order PyMC's density has all orders
    of_orders = [
        gammaln(model[v.name].size.eval(mode=PYTHON_MODE) + 1)
        for v in client.local
        if "Ordered" in _transform(model, v.name)
    ]
    return float(total) + sum(of_orders), gradient


def _transform(model: Any, name: str) -> str:
    return type(model.rvs_to_transforms[model[name]]).__name__


@pytest.mark.parametrize("name", slow_but(problems.ALL, *(set(problems.ALL) - {"transforms"})))
def test_log_site_is_pymcs_log_density_less_the_shared_prior(name: str) -> None:
    model, clients = problems.ALL[name]()
    rng = np.random.default_rng(1)
    for client in list(model.enrol(clients, kernel=False).values())[1:2]:  # not the one the graph was built from
        phi, theta = 0.5 * rng.normal(size=client.shared_size), 0.5 * rng.normal(size=client.local_size)
        value, by_phi, by_theta = client.log_site(phi, theta)
        expected, gradient = reference_log_site(client, phi, theta)
        assert value == pytest.approx(expected, rel=1e-10, abs=1e-10)
        assert by_phi.shape == phi.shape and by_theta.shape == theta.shape
        assert_allclose(np.concatenate([by_phi, by_theta]), gradient, rtol=1e-8, atol=1e-9)


def test_log_site_of_the_regression_in_closed_form() -> None:
    """Σ log N(y; a + Xβ, 1) + Σ log N(β; μ, ½²), independent of PyMC."""
    model, clients = problems.regression()
    phi, theta = np.array([0.3, -0.2, 0.7]), np.array([0.5, 1.5])
    for client_id, client in model.enrol(clients, kernel=False).items():
        X, y = clients[client_id]["X"], clients[client_id]["y"]
        expected = norm.logpdf(y, 0.7 + X @ theta, 1).sum() + norm.logpdf(theta, phi[:2], 0.5).sum()
        assert client.log_site(phi, theta)[0] == pytest.approx(expected, rel=CONSTANTS)


def test_a_point_of_zero_density_is_minus_infinity_not_an_error() -> None:
    model, clients = problems.schools()
    client = model.enrol(clients, kernel=False)["school A"]
    assert not np.isfinite(client.log_site(np.array([0.0, -1e3]), np.array([1.0]))[0])


# --- clients of every size, one compilation -------------------------------------------------------------------


def test_rows_and_local_dimensions_differ_and_share_one_compilation() -> None:
    model, clients = problems.counts()
    model.enrol({"first": {"y": [1, 2]}}, kernel=False)
    compiled = compilations()
    enrolled = model.enrol(clients, kernel=False)
    assert compilations() == compiled
    assert [client.local_size for client in enrolled.values()] == [4, 7, 5]
    assert len({id(client.kernel) for client in enrolled.values()}) == 1
    for client_id, client in enrolled.items():
        y, theta = clients[client_id]["y"], np.linspace(0, 1, client.local_size)
        # Σ log Poisson(y_i; e^θ_i) + log N(θ_i; μ, 0.3²)
        expected = poisson.logpmf(y, np.exp(theta)).sum() + norm.logpdf(theta, 0.4, 0.3).sum()
        assert client.log_site(np.array([0.4]), theta)[0] == pytest.approx(expected, rel=CONSTANTS)


def test_nothing_compiles_at_a_second_enrolment_fit_or_rebuilt_builder() -> None:
    def factory() -> Callable[..., Any]:
        def build(y: Any) -> Any:
            with pm.Model() as model:
                data = pm.Data("y", y)
                pm.Normal("obs", pm.Normal("theta", pm.Normal("mu", 0, 10), 0.5), 1, observed=data)
            return model

        return build

    clients = {"a": {"y": Y}, "b": {"y": np.ones(6)}}
    model = FederatedModel(factory(), ["mu"])
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False)
    compiled = compilations()
    model.enrol(clients)
    fedppl.fit(model, clients, fedppl.EP(), progressbar=False)
    fedppl.fit(FederatedModel(factory(), ["mu"]), clients, fedppl.EP(), progressbar=False)
    fit.client("a", draws=5)
    fit.new_client({"y": np.zeros(3)}, draws=5)
    assert compilations() == compiled
    # and the counter does count: another likelihood is another function
    FederatedModel(declared(lambda: plain() * np.pi), ["mu"]).enrol({"a": {"y": Y}})
    assert compilations() == compiled + 1


def test_builders_with_one_site_factor_keep_their_own_prior_names_and_deterministics() -> None:
    """The compiled site factor is shared between declarations; nothing else may be."""

    def make(name: str, sd: float, factor: float) -> FederatedModel:
        def build(y: Any) -> Any:
            with pm.Model() as model:
                data = pm.Data("y", y)
                mu = pm.Normal(name, 0, sd)
                theta = pm.Normal("theta", mu, 0.5)
                pm.Deterministic("scaled", theta * factor)
                pm.Normal("obs", theta, 1, observed=data)
            return model

        return FederatedModel(build, [name])

    first = make("mu", 10.0, 2.0).enrol({"a": {"y": Y}}, kernel=False)["a"]
    compiled = compilations()
    second = make("nu", 0.5, 3.0).enrol({"a": {"y": Y}}, kernel=False)["a"]
    assert compilations() == compiled
    assert [m.layout.labels for m in (first, second)] == [("mu",), ("nu",)]
    assert [float(m.layout.prior.precision[0, 0]) for m in (first, second)] == pytest.approx([0.01, 4.0])
    for client, factor in ((first, 2.0), (second, 3.0)):
        assert client.constrain(np.zeros((1, 1)), np.ones((1, 1)))["scaled"] == factor


def test_without_the_kernel_nothing_is_compiled_and_the_start_is_checked_all_the_same() -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            theta = pm.Normal("theta", pm.Normal("mu", 0, 10), 0.31)  # no other test's density
            pm.Poisson("obs", pm.math.exp(theta), observed=pm.Data("y", y))
        return model

    model, compiled = FederatedModel(build, ["mu"]), compilations()
    clients = {"a": {"y": [1, 2, 3]}, "b": {"y": [4, 5]}}
    enrolled = model.enrol(clients, kernel=False)
    copy = model.with_data(enrolled["a"], "copy", clients["b"], kernel=False)
    for wrong in ({"a": {"y": [1, -2]}}, {**clients, "c": {"y": [-1]}}):
        with pytest.raises(DataError, match="log density at the starting point is -inf"):
            model.enrol(wrong, kernel=False)
    assert compilations() == compiled
    point = np.array([0.3]), np.array([0.1])
    assert copy.log_site(*point)[0] == pytest.approx(enrolled["b"].log_density(*point), rel=1e-12)
    model.enrol(clients, kernel=False)
    assert compilations() == compiled + 1


def test_with_data_shares_the_compiled_functions_and_nothing_else() -> None:
    model, clients = problems.regression(2)
    first, second = model.enrol(clients).values()
    compiled = compilations()
    copy = model.with_data(first, "copy", clients["clinic 1"])
    assert compilations() == compiled
    assert copy.client_id == "copy" and copy.kernel is first.kernel and copy.layout is first.layout
    point = np.array([0.1, 0.2, 0.3]), np.array([1.0, -1.0])
    assert copy.log_site(*point)[0] == second.log_site(*point)[0]
    assert copy.log_site(*point)[0] != first.log_site(*point)[0]
    for arrays, fragment in (
        ({"X": np.ones((3, 2))}, "data keys ['X']"),
        ({"X": np.ones((3, 2)), "y": [1.0, np.nan, 0.0]}, "'y' holds nan"),
        ({"X": np.ones((3, 3)), "y": np.ones(3)}, "same columns"),
        ({"X": np.ones(3), "y": np.ones(3)}, "'X' has 1 dimensions (3,)"),
    ):
        with pytest.raises(DataError) as caught:
            model.with_data(first, "copy", arrays)
        assert "client 'copy'" in str(caught.value) and fragment in str(caught.value)


def test_changing_the_callers_arrays_does_not_change_the_client() -> None:
    """A frozen client holds its own copy, so that a resumed or repeated round sees the same data."""
    model, clients = problems.regression(1)
    client = model.enrol(clients, kernel=False)["clinic 0"]
    point = np.zeros(3), np.zeros(2)
    before = client.log_site(*point)[0]
    clients["clinic 0"]["y"][:] = 100.0
    assert client.log_site(*point)[0] == before
    assert not np.any(np.asarray(client.pymc_model()["y"].get_value()) == 100.0)


# --- lengths and types that differ between clients ------------------------------------------------------------


def dims_on_the_outcome(y: Any) -> Any:
    with pm.Model(coords={"obs_id": np.arange(len(y))}) as model:
        y = pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu", 0, 10), 0.5)
        pm.Normal("obs", theta, 1, observed=y, dims="obs_id")
    return model


def effect_of_a_row(y: Any) -> Any:
    with pm.Model(coords={"obs_id": np.arange(len(y))}) as model:
        y = pm.Data("y", y, dims="obs_id")
        theta = pm.Normal("theta", pm.Normal("mu", 0, 10), 0.5, dims="obs_id")
        pm.Normal("obs", theta, 1, observed=y, dims="obs_id")
    return model


def effect_of_an_unnamed_row(y: Any) -> Any:
    """Nothing says that obs_id are the rows of y, but that they are as many."""
    with pm.Model(coords={"obs_id": np.arange(len(y))}) as model:
        theta = pm.Normal("theta", pm.Normal("mu", 0, 10), 0.5, dims="obs_id")
        pm.Normal("obs", theta, 1, observed=pm.Data("y", y))
    return model


ROWS = {f"c{n}": {"y": np.linspace(-1, 1, n)} for n in (4, 6, 9, 3, 5)}


@pytest.mark.parametrize("builder", [dims_on_the_outcome, effect_of_a_row, effect_of_an_unnamed_row])
def test_coords_of_a_clients_own_length_are_no_other_graph(builder: Any) -> None:
    model, compiled = FederatedModel(builder, ["mu"]), compilations()
    enrolled = model.enrol(ROWS, kernel=False)
    new = model.with_data(enrolled["c4"], "new", {"y": np.linspace(-1, 1, 7)})
    assert compilations() - compiled <= 1  # a graph that another test compiled is found again
    assert len({id(client.kernel) for client in (*enrolled.values(), new)}) == 1
    for client in (*enrolled.values(), new):
        y, size = client.arrays["y"], client.local_size
        assert size == (1 if builder is dims_on_the_outcome else len(y))
        theta = np.linspace(0, 1, size)
        expected = norm.logpdf(y, theta, 1).sum() + norm.logpdf(theta, 0.3, 0.5).sum()
        assert client.log_site(np.array([0.3]), theta)[0] == pytest.approx(expected, rel=10 * CONSTANTS)


def test_a_clients_own_posterior_has_its_own_coords() -> None:
    def build(y: Any) -> Any:
        with pm.Model(coords={"obs_id": [f"row {i}" for i in range(len(y))]}) as model:
            y = pm.Data("y", y)
            theta = pm.Normal("theta", pm.Normal("mu", 0, 10), 0.5, dims="obs_id")
            pm.Normal("obs", theta, 1, observed=y, dims="obs_id")
        return model

    clients = {name: ROWS[name] for name in ("c4", "c6")}
    fit = fedppl.fit(FederatedModel(build, ["mu"]), clients, fedppl.EP(), progressbar=False, rounds=2, random_seed=1)
    for client_id, data in clients.items():
        own = fit.client(client_id, draws=3)
        assert list(own["posterior"]["obs_id"].values) == [f"row {i}" for i in range(len(data["y"]))]
        assert own["posterior"]["theta"].dims == ("chain", "draw", "obs_id")


def groups_of_its_own(group: Any, y: Any) -> Any:
    with pm.Model(coords={"ward": np.unique(group)}) as model:
        group, y = pm.Data("group", group), pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu", 0, 1), 0.5, dims="ward")
        pm.Normal("obs", theta[group], 1, observed=y)
    return model


def test_a_length_that_no_array_has_is_asked_of_the_builder() -> None:
    groups = {"a": [0, 1, 1, 0], "b": [0, 1, 2, 2, 1], "c": [0, 0, 0], "d": [3, 1, 2, 0]}
    clients = {name: {"group": group, "y": np.linspace(-1, 1, len(group))} for name, group in groups.items()}
    model, compiled = FederatedModel(groups_of_its_own, ["mu"]), compilations()
    enrolled = model.enrol(clients)
    assert compilations() == compiled + 1
    for name, client in enrolled.items():
        theta = np.arange(client.local_size) / 2
        assert client.local_size == len(set(groups[name]))
        y, mean = clients[name]["y"], theta[groups[name]]
        expected = norm.logpdf(y, mean, 1).sum() + norm.logpdf(theta, 0.3, 0.5).sum()
        assert client.log_site(np.array([0.3]), theta)[0] == pytest.approx(expected, rel=10 * CONSTANTS)


def test_a_single_client_says_not_which_lengths_are_its_rows() -> None:
    """Three rows and three predictors: another client tells them apart."""

    def build(X: Any, y: Any) -> Any:
        with pm.Model(coords={"predictor": ["a", "b", "c"], "obs_id": np.arange(len(y))}) as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            beta = pm.Normal("beta", pm.Normal("mu", 0, 1), 0.5, dims="predictor")
            error = pm.Normal("error", 0, 0.1, dims="obs_id")
            pm.Normal("obs", X @ beta + error, 1, observed=y)
        return model

    model = FederatedModel(build, ["mu"])
    alone = model.enrol({"a": {"X": np.eye(3), "y": np.zeros(3)}}, kernel=False)["a"]
    assert [variable.shape for variable in alone.local] == [(3,), (3,)]
    new = model.with_data(alone, "new", {"X": np.ones((5, 3)), "y": np.zeros(5)})
    assert [variable.shape for variable in new.local] == [(3,), (5,)]
    assert new.log_site(np.zeros(1), np.zeros(8))[0] == pytest.approx(
        norm.logpdf(np.zeros(5)).sum() + 3 * norm.logpdf(0, 0, 0.5) + 5 * norm.logpdf(0, 0, 0.1), rel=10 * CONSTANTS
    )


TYPES: dict[str, tuple[list[Any], str]] = {
    "whole reals": ([np.array([1, 2]), np.array([3.0, 4.0])], "int64"),
    "reals": ([np.array([1, 2]), np.array([3.5, 4.0])], "float64"),
    "integers": ([np.array([1, 2], np.int32), np.array([3, 4], np.int64)], "int64"),
    "small integers": ([np.array([1, 2], np.int8), np.array([3, 4], np.int16)], "int16"),
    "unsigned": ([np.array([1, 2], np.uint64), np.array([-3, 4], np.int64)], "int64"),
    "one of two": ([np.array([True, False]), np.array([1, 0])], "int64"),
    "one of two, once missing": ([np.array([True, False]), np.array([1.0, 0.0])], "bool"),
    "precision": ([np.array([1.5], np.float32), np.array([0.1])], "float64"),
    "too large for integers": ([np.array([1, 2]), np.array([1e300, 2.0])], "float64"),
    "bounds": ([np.array([1, 2]), np.array([np.inf, 2.0])], "float64"),
}


@pytest.mark.parametrize("case", TYPES)
def test_a_name_has_one_type_at_all_clients(case: str) -> None:
    arrays, dtype = TYPES[case]
    found = one_type({str(k): {"x": array, "y": Y} for k, array in enumerate(arrays)})
    for k, array in enumerate(arrays):
        assert found[str(k)]["x"].dtype == dtype and found[str(k)]["y"].dtype == Y.dtype
        assert_array_equal(found[str(k)]["x"], array)


def test_integers_and_whole_reals_are_one_compilation_and_still_an_index() -> None:
    clients = {"a": {"group": [0, 1, 2], "y": [1, 2, 3]}, "b": {"group": [0.0, 2.0], "y": Y[:2]}}
    model, compiled = FederatedModel(indexed_builder, ["mu"]), compilations()
    enrolled = model.enrol(clients, kernel=False)
    assert compilations() - compiled <= 1
    assert enrolled["a"].kernel is enrolled["b"].kernel
    theta = np.array([0.1, 0.2, 0.3])
    expected = norm.logpdf(Y[:2], theta[[0, 2]], 1).sum() + norm.logpdf(theta, 0.4, 0.5).sum()
    assert enrolled["b"].log_site(np.array([0.4]), theta)[0] == pytest.approx(expected, rel=10 * CONSTANTS)


# --- infinite bounds, batches ---------------------------------------------------------------------------------


def survival(time: Any, censored_at: Any) -> Any:
    with pm.Model() as model:
        time, limit = pm.Data("time", time), pm.Data("censored_at", censored_at)
        mu = pm.Normal("mu", 0, 1)
        latent = pm.Exponential.dist(scale=pt.exp(mu))
        pm.Censored("obs", latent, lower=None, upper=limit, observed=time)
    return model


def survival_inside(time: Any, event: Any) -> Any:
    """The bound is made in the builder."""
    with pm.Model() as model:
        time, event = pm.Data("time", time), pm.Data("event", event)
        mu = pm.Normal("mu", 0, 1)
        latent = pm.Exponential.dist(scale=pt.exp(mu))
        pm.Censored("obs", latent, lower=None, upper=pt.switch(event, np.inf, time), observed=time)
    return model


@pytest.mark.parametrize("builder", slow_but([survival, survival_inside], survival))
def test_bounds_may_be_infinite(builder: Any) -> None:
    """Exponential times with scale s: Σ_events log(1/s) − Σ t / s, whoever was censored."""
    time, event = np.array([0.5, 1.2, 2.0, 0.7]), np.array([True, False, True, True])
    data = {"time": time, "event": event} if builder is survival_inside else {"time": time}
    if builder is survival:
        data["censored_at"] = np.where(event, np.inf, time)
    client = FederatedModel(builder, ["mu"]).enrol({"a": data}, kernel=False)["a"]
    value, gradient, _ = client.log_site(np.array([0.3]), np.zeros(0))
    assert value == pytest.approx(-3 * 0.3 - time.sum() * np.exp(-0.3), rel=CONSTANTS)
    assert gradient == pytest.approx([-3 + time.sum() * np.exp(-0.3)], rel=CONSTANTS)
    assert client.kink is None


def test_a_local_flat_prior_is_taken_where_the_data_make_it_proper() -> None:
    """y_i ~ N(θ + μ, 1), θ flat: the data say nothing of μ, and its posterior is its prior."""
    model = FederatedModel(declared(lambda: pm.Flat("theta") + pm.Normal("mu", 0, 1)), ["mu"])
    fit = fedppl.fit(model, {"a": {"y": Y}, "b": {"y": Y + 5}}, fedppl.EP(), progressbar=False, random_seed=1)
    assert_allclose(gaussian.mean(fit.posterior), 0.0, atol=1e-5)
    assert_allclose(gaussian.covariance(fit.posterior), 1.0, rtol=1e-4)
    assert fit.client("a", draws=50)["posterior"]["theta"].shape[-1] == 50


@pytest.mark.filterwarnings("ignore:total_size not provided")
def test_batches_that_pymc_draws_are_refused(tmp_path: Path) -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            data = pm.Minibatch(pm.Data("y", y).get_value(), batch_size=2)
            pm.Normal("obs", pm.Normal("mu", 0, 1), 1, observed=data, total_size=len(y))
        return model

    text = refusal(DeclarationError, FederatedModel(build, ["mu"]), {"ward": {"y": Y}}, tmp_path)
    for fragment in ("client 'ward'", "pm.Minibatch", "all rows", "Remove"):
        assert fragment in text


# --- shared priors --------------------------------------------------------------------------------------------


def layout_of(body: Callable[[], Any], shared: list[str]) -> Any:
    """Layout of a model whose likelihood does not use the shared variables: one site factor serves all priors."""

    def apart() -> Any:
        body()
        return pm.Normal("theta", 0, 1)

    return FederatedModel(declared(apart), shared).enrol({"a": {"y": Y}}, kernel=False)["a"].layout


def test_gaussian_priors_are_found_exactly() -> None:
    """Normal and MvNormal as declared; LogNormal(m, s) is N(m, s²) on the log scale."""
    S = np.array([[1.0, 0.3], [0.3, 2.0]])

    def body() -> None:
        pm.Normal("mu", -1, 4)
        pm.LogNormal("scale", 0.3, 0.5)
        pm.MvNormal("z", np.array([0.0, 1.0]), S)

    layout = layout_of(body, ["scale", "z", "mu"])
    assert layout.prior_is_gaussian
    assert layout.labels == ("scale_log__", "z[0]", "z[1]", "mu")
    assert_allclose(gaussian.mean(layout.prior), [0.3, 0.0, 1.0, -1.0], atol=1e-9)
    expected = np.zeros((4, 4))
    expected[0, 0], expected[1:3, 1:3], expected[3, 3] = 0.25, S, 16.0
    assert_allclose(gaussian.covariance(layout.prior), expected, rtol=1e-9, atol=1e-10)


def test_a_linear_hierarchy_of_normals_among_the_shared_is_gaussian() -> None:
    """a ~ N(0, 1), b | a ~ N(a, 2²): jointly Gaussian with var b = 5 and cov 1."""
    layout = layout_of(lambda: pm.Normal("b", pm.Normal("a", 0, 1), 2), ["a", "b"])
    assert layout.prior_is_gaussian
    assert_allclose(gaussian.covariance(layout.prior), [[1, 1], [1, 5]], rtol=1e-9)


@pytest.mark.parametrize(
    ("body", "shared"),
    [
        (lambda: pm.HalfCauchy("tau", 5), ["tau"]),
        (lambda: pm.HalfNormal("tau", 1), ["tau"]),
        (lambda: pm.StudentT("mu", 5, sigma=1), ["mu"]),
        (lambda: pm.StudentT("mu", 5, sigma=1e5), ["mu"]),
        (lambda: pm.StudentT("mu", 5, mu=1e4, sigma=1e-3), ["mu"]),
        (lambda: pm.Laplace("mu", 0, 1), ["mu"]),
        (lambda: pm.Uniform("mu", -1, 1), ["mu"]),
        (lambda: pm.Normal("mu", 0, pm.LogNormal("tau", 0, 0.5)), ["mu", "tau"]),
    ],
    ids=["half Cauchy", "half normal", "Student t", "wide", "far away", "Laplace", "uniform", "hierarchy"],
)
def test_other_priors_are_matched_and_folded_into_the_clients(body: Callable[[], Any], shared: list[str]) -> None:
    layout = layout_of(body, shared)
    assert not layout.prior_is_gaussian
    assert gaussian.is_proper(layout.prior)


def test_narrow_and_wide_normal_priors_are_still_gaussian() -> None:
    def body() -> None:
        pm.Normal("mu", 50, 1e-3)
        pm.Normal("nu", -3e5, 1e6)

    layout = layout_of(body, ["mu", "nu"])
    assert layout.prior_is_gaussian
    assert_allclose(gaussian.mean(layout.prior), [50, -3e5], rtol=1e-8)
    assert_allclose(gaussian.standard_deviations(layout.prior), [1e-3, 1e6], rtol=1e-8)


def test_the_matched_prior_and_its_ratio_make_the_declared_prior() -> None:
    """log N_0 + log(p / N_0) differs from log p by a constant; p is half-Cauchy and Dirichlet with Jacobians."""
    model, clients = problems.schools()
    prior = model.enrol(clients, kernel=False)["school A"].prior
    phi = np.array([[0.0, 0.0], [3.0, 1.5], [-4.0, 0.3]])
    mu, tau = phi[:, 0], np.exp(phi[:, 1])
    expected = -0.5 * (mu / 5) ** 2 - np.log1p((tau / 5) ** 2) + phi[:, 1]
    found = gaussian.log_kernel(prior.gaussian, phi) + prior.log_ratio(phi)
    assert_allclose(np.diff(found), np.diff(expected), rtol=1e-9)
    step = 1e-5 * np.eye(2)
    numeric = [(prior.log_ratio(phi[1:2] + e) - prior.log_ratio(phi[1:2] - e))[0] / 2e-5 for e in step]
    assert_allclose(prior.log_ratio_gradient(phi[1]), numeric, rtol=1e-5)


def test_an_ordered_shared_prior_is_matched_by_its_ordered_draws() -> None:
    """φ₀ = c₀ and φ₁ = log(c₁ − c₀): for two standard normals in order E c₀ = −1/√π and c₁ − c₀ ~ half-normal(√2)."""
    layout = layout_of(lambda: pm.Normal("cuts", 0, 1, shape=2, transform=ordered, initval=[-1.0, 1.0]), ["cuts"])
    assert layout.labels == ("cuts_ordered__[0]", "cuts_ordered__[1]")
    # E log|N(0, 2)| = (log 2 + ψ(½) + log 2) / 2 = −0.2886; sds are below 1.2 and at least 1800 draws are in order
    assert_allclose(gaussian.mean(layout.prior), [-1 / np.sqrt(np.pi), -0.2886], atol=4 * 1.2 / np.sqrt(1800))


# --- fingerprints ---------------------------------------------------------------------------------------------


def test_fingerprints_tell_priors_shapes_names_transforms_and_dims_apart() -> None:
    def variant(name: str = "mu", sd: float = 10.0, shape: Any = None, log: bool = False, dims: Any = None) -> str:
        def build(y: Any) -> Any:
            with pm.Model(coords={"axis": ["x", "y"]}) as model:
                data = pm.Data("y", y)
                kind = pm.LogNormal if log else pm.Normal
                kind(name, 0, sd, dims=dims) if dims else kind(name, 0, sd, shape=shape)
                pm.Normal("obs", pm.Normal("theta", 0, 1), 1, observed=data)
            return model

        return str(FederatedModel(build, [name]).enrol({"a": {"y": Y}}, kernel=False)["a"].layout.fingerprint)

    prints = [variant(), variant("nu"), variant(sd=9.0), variant(shape=2), variant(log=True), variant(dims="axis")]
    assert len(set(prints)) == len(prints)
    assert variant() == prints[0]


def test_fingerprints_do_not_depend_on_the_clients_data() -> None:
    for problem in (problems.noise, problems.schools, problems.transforms):
        model, clients = problem()
        first, second = list(model.enrol(clients, kernel=False).values())[:2]
        alone = model.enrol({"alone": clients[second.client_id]}, kernel=False)["alone"]
        assert first.layout.fingerprint == second.layout.fingerprint == alone.layout.fingerprint


# --- constrained space ----------------------------------------------------------------------------------------


def test_constrained_values_follow_the_transforms() -> None:
    model, clients = problems.transforms()
    client = model.enrol(clients, kernel=False)["plant 6"]
    rng = np.random.default_rng(2)
    phi, theta = rng.normal(size=(9, client.shared_size)), rng.normal(size=(9, client.local_size))
    shared, local = client.constrain_shared(phi), client.constrain(phi, theta)
    assert set(shared) == {"tau", "scale", "p", "z", "p_odds"}
    assert set(local) == {"sigma", "cuts", "gap"}
    assert_allclose(shared["tau"], np.exp(phi[:, 0]))
    assert_allclose(shared["scale"], np.exp(phi[:, 1]))
    # PyMC's simplex transform: the last coordinate makes the logits sum to zero
    logits = np.column_stack([phi[:, 2:4], -phi[:, 2:4].sum(axis=1)])
    assert_allclose(shared["p"], np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
    assert_allclose(shared["z"], phi[:, 4:])
    assert_allclose(shared["p_odds"], shared["p"][:, 0] / shared["p"][:, 1])
    assert_allclose(local["sigma"], np.exp(theta[:, 0]))
    assert_allclose(local["cuts"], np.column_stack([theta[:, 1], theta[:, 1] + np.exp(theta[:, 2])]))
    assert_allclose(local["gap"], np.exp(theta[:, 2]))


def test_deterministics_keep_their_shape_whatever_the_number_of_draws() -> None:
    """As many draws as rows must not turn rows into draws."""

    def build(y: Any) -> Any:
        with pm.Model() as model:
            data = pm.Data("y", y)
            mu = pm.Normal("mu", 0, 10)
            theta = pm.Normal("theta", mu, 0.5)
            pm.Deterministic("doubled_data", 2 * data)
            pm.Deterministic("fitted", theta + 0 * data)
            pm.Deterministic("constant", pt.constant(np.arange(3.0)))
            pm.Normal("obs", theta, 1, observed=data)
        return model

    client = FederatedModel(build, ["mu"]).enrol({"a": {"y": Y}}, kernel=False)["a"]
    for draws in (1, 2, 3):
        theta = np.arange(draws, dtype=float)[:, None]
        local, shared = client.constrain(np.zeros((draws, 1)), theta), client.constrain_shared(np.zeros((draws, 1)))
        assert_array_equal(local["doubled_data"], np.tile(2 * Y, (draws, 1)))
        assert_array_equal(local["fitted"], np.tile(theta, (1, 3)))
        assert_array_equal(shared["constant"], np.tile(np.arange(3.0), (draws, 1)))


# --- kinds of data --------------------------------------------------------------------------------------------


def kinds_builder(count: Any, treated: Any, dose: Any, offset: Any, day: Any, table: Any) -> Any:
    with pm.Model() as model:
        count, treated, dose = pm.Data("count", count), pm.Data("treated", treated), pm.Data("dose", dose)
        offset, day, table = pm.Data("offset", offset), pm.Data("day", day), pm.Data("table", table)
        mu = pm.Normal("mu", 0, 1)
        theta = pm.Normal("theta", mu, 1)
        rate = pt.exp(pt.switch(treated, theta, 0.0) + 0.1 * dose + offset + 0.01 * day + 0.1 * table.sum(axis=(1, 2)))
        pm.Poisson("obs", rate, observed=count)
    return model


KINDS = {
    "count": np.array([1, 0, 3], dtype=np.int64),
    "treated": np.array([True, False, True]),
    "dose": np.array([0.5, 1.0, 2.0], dtype=np.float32),
    "offset": 0.25,
    "day": 7,
    "table": np.arange(12, dtype=np.int32).reshape(3, 2, 2),
}


def test_integers_booleans_scalars_and_three_axes_reach_the_model_unchanged() -> None:
    other = {name: np.asarray(value)[:2] if np.ndim(value) else value for name, value in KINDS.items()}
    model = FederatedModel(kinds_builder, ["mu"])
    enrolled = model.enrol({"a": KINDS, "b": other, "c": {**KINDS, "offset": -1.0, "day": np.int64(3)}}, kernel=False)
    for client in enrolled.values():
        d = client.arrays
        for theta in (0.3, -1.0):
            rate = np.exp(
                np.where(d["treated"], theta, 0.0)
                + 0.1 * d["dose"]
                + d["offset"]
                + 0.01 * d["day"]
                + 0.1 * d["table"].sum(axis=(1, 2))
            )
            expected = poisson.logpmf(d["count"], rate).sum() + norm.logpdf(theta, 0.2, 1)
            assert client.log_site(np.array([0.2]), np.array([theta]))[0] == pytest.approx(expected, rel=1e-7)


def test_pandas_and_lists_are_data_too() -> None:
    import pandas as pd

    model, clients = problems.regression(1)
    X, y = clients["clinic 0"]["X"], clients["clinic 0"]["y"]
    enrolled = model.enrol(
        {
            "arrays": {"X": X, "y": y},
            "pandas": {"X": pd.DataFrame(X), "y": pd.Series(y)},
            "lists": {"X": X.tolist(), "y": y.tolist()},
        }
    )
    point = np.array([0.1, 0.2, 0.3]), np.array([1.0, -1.0])
    assert len({client.log_site(*point)[0] for client in enrolled.values()}) == 1


def test_a_potential_enters_the_site_when_it_sees_data_and_the_prior_when_not() -> None:
    """Potential −(μ − 1)²/2 turns the prior N(0, 1) into N(½, ½); −Σ(y − θ)² /2 is a likelihood."""

    def build(y: Any) -> Any:
        with pm.Model() as model:
            data = pm.Data("y", y)
            mu = pm.Normal("mu", 0, 1)
            theta = pm.Normal("theta", mu, 1)
            pm.Potential("tilt", -0.5 * (mu - 1) ** 2)
            pm.Potential("fit", -0.5 * ((data - theta) ** 2).sum())
        return model

    client = FederatedModel(build, ["mu"]).enrol({"a": {"y": Y}}, kernel=False)["a"]
    assert client.layout.prior_is_gaussian
    assert_allclose([client.layout.prior.linear[0], client.layout.prior.precision[0, 0]], [1.0, 2.0])
    expected = -0.5 * ((Y - 0.4) ** 2).sum() + norm.logpdf(0.4, 0.1, 1)
    assert client.log_site(np.array([0.1]), np.array([0.4]))[0] == pytest.approx(expected, rel=CONSTANTS)


def test_shared_only_models_have_no_local_part() -> None:
    """Pooling: y ~ N(Xμ, 1) with everything shared."""
    client = FederatedModel(problems.polymorphic_builder, ["mu"]).enrol({"a": good_rows()}, kernel=False)["a"]
    assert client.local_size == 0 and client.local_labels == ()
    data, phi = good_rows(), np.array([0.3, -0.4])
    value, gradient, empty = client.log_site(phi, np.zeros(0))
    assert value == pytest.approx(norm.logpdf(data["y"], data["X"] @ phi, 1).sum(), rel=CONSTANTS)
    assert_allclose(gradient, data["X"].T @ (data["y"] - data["X"] @ phi), rtol=1e-10)
    assert empty.shape == (0,)


def test_kinks_are_seen_and_smooth_models_are_not_accused() -> None:
    for name in sorted({*problems.ALL} - {"transforms"}):  # that takes a quarter of a minute to compile
        model, clients = problems.ALL[name]()
        client = next(iter(model.enrol(clients, kernel=False).values()))
        assert (client.kink is not None) == (name == "lasso"), name


def test_a_declaration_and_a_clients_model_are_shown_in_a_line_without_data() -> None:
    model, clients = normal_means(1)
    assert repr(model) == "FederatedModel(_unit, shared=['mu'])"
    text = repr(model.enrol(clients, kernel=False)["client 0"])
    assert "y: (20,)" in text and len(text) < 200
