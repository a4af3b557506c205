"""No number that leaves a site depends on few rows: the rule, where it looks, and what honest declarations notice."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.scalar.basic import UnaryScalarOp, upgrade_to_float
from pytensor.tensor.elemwise import Elemwise
from scipy import stats
from scipy.special import expit

import fedppl
from benchmarks._attacks import patients
from fedppl import FederatedModel, Policy, gaussian
from fedppl.contracts import Request
from fedppl.engine import few_rows, policy
from fedppl.engine.few_rows import refuse_model
from fedppl.engine.guard import admit, in_memory
from fedppl.model.row_scores import densities, row_scores, rows_apart, slopes
from fedppl.numerics.concentration import by_column, concentration, share_in_pairs, share_of_units
from tests.support.markers import slow_but

RNG = np.random.default_rng(2)
LOOSE = Policy(sums="optional", rows=0, parameters_per_row=math.inf, events=0)


def marks(rows: Any, n: int = 400) -> Any:
    found = np.zeros(n)
    found[rows] = 1.0
    return found


def enrolled(builder: Any, data: Mapping[str, Any], shared: Any = ("beta",), *, kernel: bool = False) -> Any:
    return fedppl.FederatedModel(builder, shared).enrol({"a": data}, kernel=kernel)["a"]


def rule_of(builder: Any, data: Mapping[str, Any], shared: Any = ("beta",), rules: Policy = LOOSE) -> str:
    return str(refuse_model(rules, enrolled(builder, data, shared))).partition(":")[0]


# --- shares ---------------------------------------------------------------------------------------------------


def test_of_equal_rows_so_few_have_their_part() -> None:
    assert concentration(np.ones((200, 1)), 3) == pytest.approx(3 / 200)
    assert by_column(np.ones((200, 2)), 3) == pytest.approx(3 / 200)


@pytest.mark.parametrize("few", [1, 2, 3])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-9])
def test_an_indicator_is_seen_whatever_it_is_hidden_in(few: int, size: float) -> None:
    noise = RNG.normal(size=(400, 3))
    X = np.column_stack([noise, noise @ [1.0, -2.0, 0.5] + size * marks(np.arange(few))])
    assert concentration(X @ RNG.normal(size=(4, 4)), few) > 0.999
    assert concentration(X[:, :3], few) < 0.3


def test_one_row_more_than_few_is_a_share() -> None:
    found = concentration(np.column_stack([np.ones(4000), marks(np.arange(4), 4000)]), 3)
    assert found == pytest.approx(0.75, abs=0.01)


def test_columns_of_zeros_and_sums_of_others_are_no_directions() -> None:
    X = RNG.normal(size=(300, 2))
    assert concentration(np.column_stack([X, X.sum(1), np.zeros(300)]), 3) == pytest.approx(concentration(X, 3))
    assert concentration(np.zeros((9, 2)), 3) == by_column(np.zeros((9, 2)), 3) == 0.0


# --- slopes of rows -------------------------------------------------------------------------------------------


def test_slopes_of_rows_are_those_of_the_closed_form() -> None:
    X, y = RNG.normal(size=(50, 3)), RNG.integers(0, 2, 50)
    beta = np.array([0.5, -1.0, 30.0])
    client = enrolled(patients.logistic, {"X": X, "y": y})
    exact = (y - expit(X @ beta))[:, None] * X
    assert_allclose(slopes(client, beta, np.eye(3)), exact, atol=1e-12)
    assert_allclose(slopes(client, beta, np.ones((1, 3)))[:, 0], exact.sum(1), atol=1e-12)
    assert row_scores(client).joint == ()


def test_outcomes_of_one_length_are_one_row_each_and_others_stand_by_themselves() -> None:
    def build(y: Any, z: Any, t: Any) -> Any:
        with pm.Model() as model:
            y, z, t = (pm.Data(name, value) for name, value in {"y": y, "z": z, "t": t}.items())
            mu = pm.Normal("mu", 0, 1)
            for name, value in {"a": y, "b": z, "c": t}.items():
                pm.Normal(name, mu, 1, observed=value)
        return model

    y, z, t = RNG.normal(size=4), RNG.normal(size=(4, 2)), RNG.normal(size=3)
    found = slopes(enrolled(build, {"y": y, "z": z, "t": t}, ["mu"]), np.array([0.5]), np.eye(1))
    assert_allclose(found[:, 0], [*(y - 0.5 + (z - 0.5).sum(1)), *(t - 0.5)])


# --- declarations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disguise", patients.DISGUISES)
def test_what_few_rows_make_up_is_refused_in_every_disguise(disguise: str) -> None:
    X, y, _ = patients.site(11, patients.DISGUISES[disguise])
    assert rule_of(patients.logistic, {"X": X, "y": y}) == "few_rows"


def test_a_power_of_a_shared_coefficient_is_seen_where_its_slope_is_zero() -> None:
    def build(X: Any, y: Any, mark: Any) -> Any:
        with pm.Model() as model:
            X, y, mark = pm.Data("X", X), pm.Data("y", y), pm.Data("mark", mark)
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Normal("obs", X * beta[0] + mark * beta[1] ** 2, 1, observed=y)
        return model

    x, y = RNG.normal(size=(2, 400))
    assert rule_of(build, {"X": x, "y": y, "mark": marks(7)}) == "few_rows"
    assert rule_of(build, {"X": x, "y": y, "mark": marks(np.arange(200))}) == "None"


@pytest.mark.parametrize("few", [True, False])
def test_what_a_local_effect_takes_out_of_a_column_hides_nothing(few: bool) -> None:
    """Column and noise, of which the local effect has the noise: without it the marked rows are left."""

    def build(noise: Any, column: Any, y: Any) -> Any:
        with pm.Model() as model:
            noise, column, y = (pm.Data(k, v) for k, v in {"noise": noise, "column": column, "y": y}.items())
            beta, own = pm.Normal("beta", 0, 1), pm.Normal("own", 0, 1e6)
            pm.Normal("obs", beta * column + own * noise, 1, observed=y)
        return model

    noise, y = RNG.normal(size=(2, 400))
    column = noise + (marks([3, 4]) if few else RNG.normal(size=400))
    client = enrolled(build, {"noise": noise, "column": column, "y": y}, kernel=True)
    assert (refuse_model(LOOSE, client) is not None) == few


@pytest.mark.slow
def test_wards_of_two_rows_are_no_reason() -> None:
    def build(x: Any, y: Any, ward: Any) -> Any:
        with pm.Model() as model:
            x, y, ward = (pm.Data(k, v) for k, v in {"x": x, "y": y, "ward": ward}.items())
            beta, sd = pm.Normal("beta", 0, 1), pm.HalfNormal("sd", 1)
            effect = pm.Normal("effect", 0, sd, shape=150)
            pm.Bernoulli("obs", logit_p=beta * x + effect[ward], observed=y)
        return model

    data = {"x": RNG.normal(size=300), "y": RNG.integers(0, 2, 300), "ward": np.arange(300) // 2}
    assert refuse_model(LOOSE, enrolled(build, data, ["beta", "sd"], kernel=True)) is None


READ_OF_ALL = {
    "a place": (lambda x: x[7], "few_rows"),
    "several places": (lambda x: x[7] + 2.0 * x[11], "few_rows"),
    "an extreme": (lambda x: x.max(), "few_rows"),
    "a side": (lambda x: pt.switch(pt.gt(x[7], 0.0), 1.0, -1.0), "few_rows"),
    "what a running sum has beside another": (
        lambda x: pt.cumsum(x) - pt.cumsum(x * (np.arange(300) != 7)),
        "few_rows",
    ),
    "a mean": (lambda x: x.mean(), "None"),
}


@pytest.mark.parametrize("read", slow_but(READ_OF_ALL, "a place", "a mean"))
def test_what_all_rows_read_of_a_few_is_refused_and_a_mean_is_not(read: str) -> None:
    of_all, rule = READ_OF_ALL[read]

    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Normal("obs", beta[0] * x + beta[1] * of_all(x), 1, observed=y)
        return model

    for seed in range(4):
        x, y = np.random.default_rng(seed).normal(size=(2, 300))
        assert rule_of(build, {"x": x, "y": y}) == rule


def _in_order_of_z(z: Any, *columns: Any) -> list[Any]:
    return [column[pt.argsort(z)] for column in columns]


MIXED = {
    "mixed by a rotation": lambda x, y, mark, z: [pt.constant(ROTATION) @ column for column in (x, y, mark)],
    "twice, with noise that cancels": lambda x, y, mark, z: [
        pt.concatenate(pair) for pair in ((x, x), (y, y), (mark + z, -z))
    ],
    "of another axis": lambda x, y, mark, z: [pt.ones((20, 1)) * column[None, :] for column in (x, y, mark)],
    "in another order": lambda x, y, mark, z: _in_order_of_z(z, x, y, mark),
}
ROTATION = np.linalg.qr(np.random.default_rng(5).normal(size=(200, 200)))[0]


@pytest.mark.parametrize("how", MIXED)
@pytest.mark.parametrize("few", [True, False])
def test_rows_that_are_mixed_in_the_graph_hide_nothing(how: str, few: bool) -> None:
    def build(x: Any, y: Any, mark: Any, z: Any) -> Any:
        with pm.Model() as model:
            data = (pm.Data(k, v) for k, v in {"x": x, "y": y, "mark": mark, "z": z}.items())
            x, y, mark = MIXED[how](*data)
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Normal("obs", beta[0] * x + beta[1] * mark, 1, observed=y)
        return model

    x, y, z = np.random.default_rng(6).normal(size=(3, 200))
    data = {"x": x, "y": y, "mark": marks(7 if few else np.arange(100), 200), "z": z}
    assert rule_of(build, data) == ("few_rows" if few else "None")


def test_a_median_of_a_column_is_one_row() -> None:
    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Normal("obs", beta[0] * x + beta[1] * pt.sort(x)[150], 1, observed=y)
        return model

    x, y = RNG.normal(size=(2, 300))
    assert rule_of(build, {"x": x, "y": y}) == "few_rows"


@pytest.mark.parametrize("how", slow_but(patients.CONSTANTS, "mixed", "another_product", "in_order"))
def test_what_a_builder_makes_constants_of_is_looked_at_as_what_it_holds_as_data(how: str) -> None:
    x, y, rows = patients.site(0)
    data = {"x": x[:, 1], "y": y, "marked": marks(rows[0], len(y))}
    assert rule_of(patients.CONSTANTS[how], data) == "few_rows"


PREPARED = {
    "standardised": (lambda x: (x - x.mean(0)) / x.std(0), "bernoulli"),
    "centred, with a square": (lambda x: np.column_stack([x - x.mean(0), (x[:, 0] - x[:, 0].mean()) ** 2]), "normal"),
    "in order of a column": (lambda x: x[np.argsort(x[:, 0])], "poisson"),
}


@pytest.mark.parametrize("how", slow_but(PREPARED, "standardised"))
def test_columns_that_a_builder_prepares_by_numpy_are_no_reason(how: str) -> None:
    prepare, family = PREPARED[how]

    def build(x: Any, y: Any) -> Any:
        columns = prepare(x)
        y = y[np.argsort(x[:, 0])] if how == "in order of a column" else y
        with pm.Model() as model:
            eta = 0.5 + pt.constant(columns) @ pm.Normal("beta", 0, 1, shape=columns.shape[1])
            if family == "normal":
                pm.Normal("obs", eta, 1, observed=y)
            elif family == "poisson":
                pm.Poisson("obs", pm.math.exp(eta), observed=y)
            else:
                pm.Bernoulli("obs", logit_p=eta, observed=y)
        return model

    rng = np.random.default_rng(4)
    x = np.column_stack([rng.normal(60, 9, 300), rng.lognormal(0, 1, 300), rng.random(300) < 0.1]) / [60, 1, 1]
    y = {"normal": rng.normal(size=300), "poisson": rng.poisson(1.0, 300), "bernoulli": rng.integers(0, 2, 300)}[family]
    assert rule_of(build, {"x": x, "y": y}) == "None"


def test_a_builder_that_makes_another_model_of_other_data_is_told_what_to_do() -> None:
    x, y, rows = patients.site(0)
    client = enrolled(patients.CONSTANTS["in_loop"], {"x": x[:, 1], "y": y, "marked": marks(rows[0], len(y))})
    assert "pm.Data" in str(refuse_model(LOOSE, client))


class Times(Op):  # type: ignore[misc]
    """A product with a number that no equality tells of."""

    __props__ = ()

    def __init__(self, of: float) -> None:
        self.of = of

    def make_node(self, value: Any) -> Apply:
        return Apply(self, [value], [value.type()])

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        outputs[0][0] = self.of * inputs[0]

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        return [self(cotangents[0])]

    L_op = pullback  # as PyTensor before 3 calls it


class TimesEntry(UnaryScalarOp):  # type: ignore[misc]
    """The same of single entries."""

    def __init__(self, of: float) -> None:
        super().__init__(upgrade_to_float, name="times")
        self.of = of

    def impl(self, value: Any) -> Any:
        return self.of * value

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        return [self(cotangents[0])]

    L_op = pullback


def _in_a_graph(of: float) -> Any:
    value = pt.scalar("value")
    return OpFromGraph([value], [Times(of)(value)])


OPERATIONS = {
    "plain": Times,
    "in a graph": _in_a_graph,
    "of entries": lambda of: Elemwise(TimesEntry(of)),
    "in a density": Times,
}


@pytest.mark.parametrize("how", OPERATIONS)
def test_an_operation_that_is_made_in_the_builder_is_found_wherever_it_stands(how: str) -> None:
    def build(x: Any, y: Any) -> Any:
        times = OPERATIONS[how](float(y[7]))
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            beta = pm.Normal("beta", 0, 1, shape=2)
            if how == "in a density":
                pm.CustomDist("obs", x, beta, logp=lambda v, x, b: -((v - b[0] * x - times(b[1])) ** 2), observed=y)
            else:
                pm.Normal("obs", beta[0] * x + times(beta[1]), 1, observed=y)
        return model

    x, y = np.random.default_rng(6).normal(size=(2, 200))
    assert "pm.Data" in str(refuse_model(LOOSE, enrolled(build, {"x": x, "y": y})))


def test_data_in_containers_are_looked_at_by_one_more_build() -> None:
    built = []

    def build(X: Any, y: Any) -> Any:
        built.append(len(y))
        return patients.logistic(X, y)

    X, y, _ = patients.site(0)
    client = enrolled(build, {"X": X, "y": y})
    known = len(built)
    assert refuse_model(LOOSE, client) is None and len(built) == known + 1


BENDS = {
    "a product": lambda b, x, mark: b[0] + b[1] * x + mark * b[0] * b[1],
    "a square of the predictor": lambda b, x, mark: b[0] + b[1] * x + mark * (b[0] + b[1] * x) ** 2,
}


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("few", [True, False])
def test_an_entry_of_the_hessian_that_few_rows_have_is_refused(bend: str, few: bool) -> None:
    def build(x: Any, y: Any, mark: Any) -> Any:
        with pm.Model() as model:
            x, y, mark = pm.Data("x", x), pm.Data("y", y), pm.Data("mark", mark)
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Normal("obs", BENDS[bend](beta, x, mark), 1, observed=2.0 * y)
        return model

    x, y = np.random.default_rng(8).normal(size=(2, 200))
    data = {"x": x, "y": y, "mark": marks(7 if few else np.arange(60), 200)}
    assert rule_of(build, data) == ("few_rows" if few else "None")


@pytest.mark.parametrize("family", ["t", "negative binomial", "binomial", "ordinal"])
def test_cells_of_two_factors_with_few_rows_are_no_reason(family: str) -> None:
    def build(X: Any, y: Any) -> Any:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            scale = pm.HalfNormal("scale", 2)
            eta = X @ pm.Normal("beta", 0, 1, shape=12)
            if family == "t":
                pm.StudentT("obs", nu=4, mu=eta, sigma=scale, observed=y)
            elif family == "binomial":
                pm.BetaBinomial("obs", n=9, alpha=scale * pm.math.exp(eta), beta=scale, observed=y)
            elif family == "ordinal":
                cuts = pm.math.stack([-scale, scale])
                pm.OrderedLogistic("obs", eta=eta, cutpoints=cuts, observed=y, compute_p=False)
            else:
                pm.NegativeBinomial("obs", mu=pm.math.exp(eta), alpha=scale, observed=y)
        return model

    rng = np.random.default_rng(9)
    arm, stage = rng.integers(0, 8, 250), rng.choice(6, 250, p=[0.06, 0.06, 0.08, 0.1, 0.3, 0.4])
    levels = [arm == level for level in range(1, 8)] + [stage == level for level in range(5)]
    data = {"X": np.stack(levels, 1) * 1.0, "y": rng.poisson(2.0, 250).clip(0, 9)}
    data["y"] = {"t": data["y"] * 1.0, "ordinal": data["y"].clip(0, 2)}.get(family, data["y"])
    assert rule_of(build, data, ["beta", "scale"]) == "None"


def test_censored_outcomes_with_a_scale_are_looked_at_within_seconds() -> None:
    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            beta, sd = pm.Normal("beta", 0, 1, shape=2), pm.HalfNormal("sd", 1)
            outcome = pm.Normal.dist(beta[0] + beta[1] * x, sd)
            pm.Censored("obs", outcome, lower=None, upper=1.0, observed=y)
        return model

    x, y = RNG.normal(size=(2, 300))
    assert rule_of(build, {"x": x, "y": np.minimum(y, 1.0)}, ["beta", "sd"]) == "None"


def test_what_effects_read_of_one_row_is_refused() -> None:
    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            beta = pm.Normal("beta", 0, 1, shape=2)
            effect = pm.Normal("effect", beta[1] * x[7], 1)
            pm.Normal("obs", beta[0] * x + effect, 1, observed=y)
        return model

    x, y = RNG.normal(size=(2, 300))
    client = enrolled(build, {"x": x, "y": y}, kernel=True)
    assert str(refuse_model(LOOSE, client)).startswith("few_rows: terms of others")


@pytest.mark.parametrize("builder", [patients.potential, patients.joint])
def test_terms_that_are_not_of_single_rows_are_refused_unless_the_owner_allows_them(builder: Any) -> None:
    X, y, _ = patients.site(0)
    data = {"X": X[:, 1:], "y": y}
    assert rule_of(builder, data) == "joint"
    assert rule_of(builder, data, rules=Policy(joint=True)) == "None"


def test_without_the_rule_or_under_a_total_epsilon_nothing_is_looked_at() -> None:
    X, y, _ = patients.site(0, patients.DISGUISES["indicators"])
    for rules in (Policy(few_rows=0), Policy(epsilon=1.0), fedppl.policy.NO_RULES):
        assert rule_of(patients.logistic, {"X": X, "y": y}, rules=rules) == "None"


def test_a_formula_with_indicators_takes_no_part() -> None:
    pandas = pytest.importorskip("pandas")
    rows = {name: pandas.DataFrame({"age": RNG.normal(60, 9, 300), "y": RNG.normal(size=300)}) for name in "ab"}
    engine = fedppl.InProcess(policy=Policy(sums="optional"))
    one = f"I(age == {float(rows['a']['age'][4])!r})"
    with pytest.raises(fedppl.DeclarationError, match="'a' does not take part: few_rows"):
        fedppl.fit(fedppl.formula(f"y ~ age + {one}"), rows, engine=engine, progressbar=False)


def test_a_term_that_is_flat_along_a_direction_that_anybody_can_draw_is_seen() -> None:
    flat = np.random.default_rng(2).normal(size=2)

    def build(x: Any, y: Any, mark: Any) -> Any:
        with pm.Model() as model:
            x, y, mark = pm.Data("x", x), pm.Data("y", y), pm.Data("mark", mark)
            beta = pm.Normal("beta", 0, 1, shape=2)
            across = flat[1] * beta[0] - flat[0] * beta[1]
            pm.Normal("obs", beta[0] + beta[1] * x + mark * across**2, 1, observed=2.0 * y)
        return model

    x, y = np.random.default_rng(8).normal(size=(2, 200))
    assert rule_of(build, {"x": x, "y": y, "mark": marks(7, 200)}) == "few_rows"


@pytest.mark.parametrize("size", [1.0, 1e-9])
@pytest.mark.parametrize("few", [True, False])
def test_a_term_that_is_there_at_one_point_alone_is_seen(size: float, few: bool) -> None:
    def build(x: Any, y: Any, mark: Any) -> Any:
        with pm.Model() as model:
            x, y, mark = pm.Data("x", x), pm.Data("y", y), pm.Data("mark", mark)
            beta = pm.Normal("beta", 0, 1, shape=3)
            there = size * pt.exp(-((1e9 * beta[0]) ** 2))
            pm.Normal("obs", beta[0] + beta[1] * x + beta[2] * there * mark, 1, observed=y)
        return model

    x, y = np.random.default_rng(8).normal(size=(2, 200))
    mark = marks(7 if few else np.arange(100), 200)
    assert rule_of(build, {"x": x, "y": y, "mark": mark}) == ("few_rows" if few else "None")


def test_of_arrays_longer_than_outcomes_not_the_longest_alone_has_rows() -> None:
    def build(x: Any, y: Any, doses: Any, visits: Any) -> Any:
        with pm.Model() as model:
            data = {"x": x, "y": y, "doses": doses, "visits": visits}
            x, y, doses, _ = (pm.Data(name, value) for name, value in data.items())
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Normal("obs", beta[0] * x + beta[1] * doses[7], 1, observed=y)
        return model

    x, y = np.random.default_rng(8).normal(size=(2, 200))
    data = {"x": x, "y": y, "doses": np.arange(250.0), "visits": np.arange(300.0)}
    assert rule_of(build, data) == "few_rows"


# --- rows apart -----------------------------------------------------------------------------------------------

OF_ROWS: Mapping[str, tuple[Any, bool]] = {
    "its own": (lambda beta, x: beta[1] * x**2, True),
    "a place": (lambda beta, x: beta[1] * x[7], False),
    "a mean": (lambda beta, x: beta[1] * x.mean(), False),
    "a sum with weights": (lambda beta, x: beta[1] * pt.dot(x, pt.arange(x.shape[0]) / 300.0), False),
    "another order": (lambda beta, x: beta[1] * x[::-1], False),
    "a running sum": (lambda beta, x: beta[1] * pt.cumsum(x), False),
    "a place, far out": (lambda beta, x: pt.switch(beta[0] > 1.0, beta[1] * x[7], 0.0), False),
    "a constant by row": (lambda beta, x: beta[1] * x * pt.constant(np.arange(300.0)), False),
}


def reading(how: str) -> Any:
    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Normal("obs", beta[0] * x + OF_ROWS[how][0](beta, x), 1, observed=y)
        return model

    x, y = np.random.default_rng(4).normal(size=(2, 300))
    return enrolled(build, {"x": x, "y": y})


@pytest.mark.parametrize("how", OF_ROWS)
def test_rows_are_known_to_stand_apart_where_a_term_reads_no_row_but_its_own(how: str) -> None:
    assert rows_apart(reading(how), [300]) == OF_ROWS[how][1]


@pytest.mark.parametrize("move", [0.0, 0.01])
def test_a_place_that_is_read_at_some_points_alone_is_refused_there(move: float) -> None:
    client, guard = reading("a place, far out"), in_memory(LOOSE, "a")
    assert refuse_model(LOOSE, client) is None
    for number, point in enumerate(([0.5, 0.5], [1.5, 0.5]), start=1):
        message = {"point": np.array(point), "move": np.full(2, move), "prior_share": np.array(0.0)}
        admitted = admit(guard, fedppl.EP(), client, Request("a", 7, number, (1,), message, "run"))
        assert (admitted is None) == (number == 2)


def test_effects_of_groups_leave_rows_apart_and_effects_that_read_a_row_do_not() -> None:
    X, y, _ = patients.site(0)
    n, ward = patients.ROWS, np.arange(patients.ROWS) // 2
    data = {"X": X[:, 1:], "y": y, "ward": ward, "marked": marks(7, n // 2)}
    client = enrolled(patients.wards, data, ["beta", "by"])
    assert rows_apart(client, [n])
    assert not rows_apart(client, [n, n // 2])


@pytest.mark.slow
def test_slopes_are_the_same_before_and_after_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedppl.model import row_scores as module

    monkeypatch.setattr(module, "_OFTEN", 1)
    X, y = RNG.normal(size=(40, 2)), RNG.poisson(2.0, 40)
    client, beta = enrolled(patients.counts, {"X": X, "y": y}), np.array([0.3, -0.2])
    exact = (y - np.exp(X @ beta))[:, None] * X
    for _ in range(3):
        assert_allclose(slopes(client, beta, np.eye(2)), exact, atol=1e-12)


@pytest.mark.slow
def test_slopes_of_random_slopes_are_compiled_for_any_number_of_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrites of PyTensor that assume equal shapes of zeros made code that was right for one direction alone."""
    pandas = pytest.importorskip("pandas")
    from fedppl.model import row_scores as module

    adopted: list[bool] = []
    agree = module._agree
    monkeypatch.setattr(module, "_OFTEN", 1)
    monkeypatch.setattr(module, "_agree", lambda *all_: adopted.append(agree(*all_)) or adopted[-1])
    tables = {
        name: pandas.DataFrame(
            {
                "site": name,
                "age": RNG.normal(64, 12, rows),
                "arm": RNG.choice(["control", "drug"], rows),
                "score": RNG.normal(50, 8, rows),
            }
        )
        for name, rows in {"a": 60, "b": 90}.items()
    }
    formula = fedppl.formula("score ~ center(age) + arm + (1 + arm | site)", family="gaussian")
    clients = fedppl.agree(formula, tables).model.enrol(tables, kernel=False)
    first, second = clients["a"], clients["b"]
    x = np.concatenate([fedppl.gaussian.mean(first.layout.prior) + 0.1, first.initial])
    ways = np.eye(len(x))
    slowly = [slopes(client, x, ways[:1]) for client in (first, second)]  # the second call compiles
    assert adopted == [True]
    for client, before in zip((first, second), slowly, strict=True):
        found = slopes(client, x, ways)
        assert found.shape == (len(before), len(x))
        assert_allclose(found[:, :1], before, rtol=1e-9)


def test_code_that_is_wrong_or_fails_for_some_directions_is_not_used() -> None:
    from fedppl.model.row_scores import _compiled_in_time

    def right(x: Any, directions: Any) -> Any:
        return [directions @ x[:, None] * np.ones(4)]

    def broadcast(x: Any, directions: Any) -> Any:  # the values of one direction for all of them
        return [right(x, directions)[0][:1]]

    def failing(x: Any, directions: Any) -> Any:
        if len(directions) > 1:
            raise AssertionError
        return right(x, directions)

    def doubled(x: Any, directions: Any) -> Any:
        return [2.0 * right(x, directions)[0]]

    def later(x: Any, directions: Any) -> Any:  # as for another client's shapes
        if x[0] == 2.0:
            raise AssertionError
        return [right(x, directions)[0] * (1.0 + 1e-12)]

    x, ways = np.ones(3), np.eye(3)
    for wrong in (broadcast, failing, doubled):
        along, _ = _compiled_in_time(right, lambda anew, wrong=wrong: [wrong])  # type: ignore[misc]
        along(x, np.zeros((1, 3)))
        assert_allclose(along(x, ways)[0], right(x, ways)[0], rtol=0.0)
    along, either = _compiled_in_time(right, lambda anew: [later])
    assert along(x, ways)[0][0, 0] == 1.0 + 1e-12  # it is used
    for function in (along, either):
        assert_allclose(function(2.0 * x, ways)[0], right(2.0 * x, ways)[0], rtol=0.0)


# --- single entries of the Hessian ----------------------------------------------------------------------------

TOGETHER = [(i, j) for i in range(6) for j in range(i + 1, 6)]


def entries(value: Any, died: Any) -> Any:
    """One patient for each pair of coefficients, whose value is that entry of the Hessian."""
    n = len(value)
    first, second = np.zeros((2, n, 6))
    first[np.arange(n), np.arange(n) % 6] = 1.0
    for row, (i, j) in enumerate(TOGETHER):
        first[row], second[row] = np.eye(6)[i], np.eye(6)[j]
    with pm.Model() as model:
        b = pm.Normal("b", 0, 2.5, shape=6)
        eta = pt.constant(first) @ b + pm.Data("value", value) * (pt.constant(second) @ b)
        pm.Bernoulli("obs", logit_p=eta, observed=pm.Data("died", died))
    return model


def test_an_entry_of_the_hessian_that_is_one_patients_value_is_refused_and_a_cell_of_two_factors_is_not() -> None:
    died = RNG.integers(0, 2, 400)
    values = RNG.lognormal(size=400)
    assert rule_of(entries, {"value": values, "died": died}, ["b"]) == "few_rows"
    assert rule_of(entries, {"value": 1.0 + 1e-4 * values, "died": died}, ["b"]) == "few_rows"
    assert rule_of(entries, {"value": np.ones(400), "died": died}, ["b"]) == "None"


def bent(outcome: Any, kind: str) -> Any:
    """A product of two coefficients in the mean of one patient, by the patient's value."""
    n = 400
    ways = np.random.default_rng(0).normal(size=(n, 3))
    with pm.Model() as model:
        b = pm.Normal("b", 0, 2.5, shape=3)
        alone = pt.concatenate([b[:1] * b[1:2], pt.zeros(n - 1)])
        mean = pt.constant(ways) @ b + alone
        y = pm.Data("outcome", outcome)
        if kind == "normal":
            pm.Normal("obs", 1.0 + mean, 1, observed=y)
        elif kind == "bernoulli":
            pm.Bernoulli("obs", logit_p=1.0 + mean, observed=y)
        elif kind == "beta":
            pm.Beta("obs", mu=pm.math.invlogit(mean), nu=9.0, observed=y)
        else:
            pm.Normal("obs", 1.0 + mean + 0.0 * y, 1, observed=np.zeros(n))
    return model


@pytest.mark.parametrize("how", ["signs", "products", "scalars"])
@pytest.mark.parametrize("few", [True, False])
def test_entries_that_tell_a_row_together_are_refused(how: str, few: bool) -> None:
    """The squares of columns that differ by signs, and products of coefficients, cancel but for one row."""
    x, y, rows = patients.site(0)
    marked = marks(rows[:1] if few else rows, patients.ROWS)
    names = [f"b{i}" for i in range(5)] if how == "scalars" else ["beta"]
    builder = patients.signs if how == "signs" else functools.partial(patients.products, apart=how == "scalars")
    data = {"x": x[:, 1], "y": y, "marked": marked}
    assert rule_of(builder, data, names) == ("few_rows" if few else "None")


@pytest.mark.parametrize(
    ("kind", "value"), [("normal", 0.0), ("bernoulli", 0), ("bernoulli", 1), ("beta", 0.4), ("in the builder", 0.0)]
)
def test_outcomes_that_are_all_equal_hide_no_curvature(kind: str, value: Any) -> None:
    def builder(outcome: Any) -> Any:
        return bent(outcome, kind)

    assert rule_of(builder, {"outcome": np.full(400, value)}, ["b"]) == "few_rows"


# --- requests -------------------------------------------------------------------------------------------------


def test_points_at_which_few_rows_count_are_refused_and_others_are_not() -> None:
    assert patients.where_few_count()["patients_far_out_met"]


def test_of_points_that_can_be_left_out_those_near_by_stay() -> None:
    X, y, _ = patients.site(3)
    client = enrolled(patients.logistic, {"X": X, "y": y})
    guard, message = in_memory(LOOSE, "a"), {"prior_share": np.array(0.0)}
    row = X[np.argmax(X[:, 1])]
    way = np.array([-20.0, 20.0 / row[1], 0.0])  # at its end the outermost row alone is undecided
    step = {**message, "point": 0.02 * way, "move": 0.02 * way}
    request = admit(guard, fedppl.EP(), client, Request("a", 7, 1, (1,), step, "run"))
    assert request is not None
    assert request.message["inside"][0] and np.all(np.diff(request.message["inside"][-6:].astype(int)) <= 0)


def test_outcomes_of_the_same_rows_count_once() -> None:
    """Two outcomes of a patient jump together: they are one row."""

    def pairs(x: Any, y: Any, z: Any) -> pm.Model:
        with pm.Model() as model:
            x, y, z = pm.Data("x", x), pm.Data("y", y), pm.Data("z", z)
            b = pm.Normal("b", 0, 1)
            pm.Normal("first", b * x, 1, observed=y)
            pm.Normal("second", b * x + 1, 1, observed=z)
        return model

    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=40) for name in ("x", "y", "z")}
    client = enrolled(pairs, arrays, ("b",))
    at = np.array([[0.3], [0.7]])
    expected = sum(stats.norm.logpdf(arrays[name], at * arrays["x"] + k, 1) for k, name in enumerate(("y", "z")))
    assert_allclose(densities(client, at), expected)


@pytest.mark.parametrize("at", [0.3, 0.2 + 0.2 * 0.375, 0.25])  # 0.275 and 0.3: halfway between points of the step
def test_values_beyond_a_jump_of_one_row_are_left_out(at: float) -> None:
    assert patients.along_a_step(at)["patients_jumps_along_a_step_met"]


@pytest.mark.parametrize("family", ["t", "Laplace", "normal", "change for all"])
def test_what_is_not_concave_or_changes_for_all_rows_is_no_jump(family: str) -> None:
    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            x, y = pm.Data("x", x), pm.Data("y", y)
            beta = pm.Normal("beta", 0, 2.5, shape=2)
            mean = beta[0] + beta[1] * x
            if family == "t":
                pm.StudentT("obs", nu=3, mu=mean, sigma=0.3, observed=y)
            elif family == "Laplace":
                pm.Laplace("obs", mean, 1, observed=y)
            elif family == "normal":
                pm.Normal("obs", beta[0] * x, pt.exp(beta[1]), observed=y)
            else:
                pm.Normal("obs", mean + pt.gt(beta[0], 0.3), 1, observed=y)
        return model

    x = RNG.normal(size=400)
    client = enrolled(build, {"x": x, "y": 0.5 * x + RNG.standard_t(3, 400)})
    step = np.array([0.2, 0.3])
    message = {"point": step, "move": step, "prior_share": np.array(0.0)}
    request = admit(in_memory(LOOSE, "a"), fedppl.EP(), client, Request("a", 7, 1, (1,), message, "run"))
    assert request is not None and np.all(request.message["inside"])


def test_weights_that_open_a_unit_for_one_row_are_refused() -> None:
    pytest.importorskip("torch")
    assert patients.trapped()["patients_trap_weights_met"]


@pytest.mark.parametrize("ratios", [(1.0, 1.0, 1.0), (0.5, -2.0, 1e-3)])
def test_units_that_differ_by_few_rows_are_seen_and_others_are_not(ratios: Any) -> None:
    """Where so many rows are open for both that no unit by itself has few."""
    n, (first, second, third) = 400, ratios
    common = RNG.normal(size=n)
    layer = np.stack([(np.arange(n) < k) * common * c for k, c in ((40, first), (43, second), (300, third))], axis=1)
    assert by_column(layer, 3) < 0.7
    assert share_of_units([layer], 3, 0.97) > 0.999
    apart = np.stack([(np.arange(n) < k) * common * c for k, c in ((40, first), (60, second), (300, third))], axis=1)
    assert share_of_units([apart], 3, 0.97) < 0.97
    assert math.isnan(share_of_units([apart, np.full((n, 2), np.inf)], 3, 0.97))


def test_of_wide_layers_some_pairs_may_be_alike_by_chance() -> None:
    def chain(width: int) -> Any:  # units that are open for a row more than their neighbours
        return (np.arange(2000)[:, None] < 40 + 30 * np.arange(width)) * RNG.normal(size=(2000, 1))

    layer = chain(64)
    assert share_in_pairs(layer, 3) < 0.9
    for pairs, share in ((6, 0.9), (7, 0.999)):
        near = layer.copy()
        near[:, 1 : 2 * pairs : 2] = near[:, : 2 * pairs : 2] * (np.arange(2000) != 7)[:, None]
        assert (share_in_pairs(near, 3) >= share) == (pairs == 7)


def test_three_units_that_tell_a_row_together_are_seen_where_rows_are_many() -> None:
    n = 400
    one, other = RNG.normal(size=(2, n))
    layer = np.stack([one, other, one + other + 3.0 * marks(7)], axis=1)
    assert share_in_pairs(layer, 3) < 0.5
    assert share_of_units([layer], 3, 0.97) > 0.999


def weighed(y: Any) -> Any:
    """One number that leaves has the outcomes of twenty rows: 1 + 2⁻ᵏ times each."""
    weights = np.ones(len(y))
    weights[:20] += 0.5 ** np.arange(1, 21)
    with pm.Model() as model:
        b = pm.Normal("b", 0, 2.5)
        pm.Bernoulli("died", logit_p=b * weights, observed=pm.Data("y", y))
    return model


def test_weights_of_rows_are_kept_back_by_a_list_of_declarations_alone() -> None:
    """As docs/privacy.md and docs/security.md say: no rule on how few rows a number depends on can see them."""
    y = (RNG.random(300) < 0.3).astype(int)
    client = enrolled(weighed, {"y": y}, ["b"])
    assert refuse_model(Policy(), client) is None
    total = slopes(client, np.zeros(1), np.eye(1)).sum() + 0.5 * (300 + np.sum(0.5 ** np.arange(1, 21)))
    assert [int(total % 1.0 * 2**k) % 2 for k in range(1, 21)] == list(y[:20])
    listed = Policy(declarations=(digest_of(patients.logistic, 300),))
    assert "declarations" in str(policy.refuse_declaration(listed, lambda: client.declaration))


# --- approved declarations ------------------------------------------------------------------------------------


def digest_of(builder: Any, rows: int, seed: int = 0, columns: int = 3) -> str:
    rng = np.random.default_rng(seed)
    data = {"X": rng.normal(size=(rows, columns)), "y": rng.integers(0, 2, rows)}
    return str(enrolled(builder, data).declaration)


def test_a_declaration_has_one_digest_whatever_its_data_and_another_likelihood_another() -> None:
    def tighter(X: Any, y: Any) -> Any:
        with pm.Model() as model:
            columns = np.shape(X)[1]
            X, y = pm.Data("X", X), pm.Data("y", y)
            pm.Bernoulli("obs", logit_p=1.001 * X @ pm.Normal("beta", 0, 2.5, shape=columns), observed=y)
        return model

    own = digest_of(patients.logistic, 300)
    assert len(own) == 32 and own == digest_of(patients.logistic, 420, seed=1)
    others = [digest_of(tighter, 300), digest_of(patients.counts, 300), digest_of(patients.logistic, 300, columns=4)]
    assert len({own, *others}) == 4


def test_the_digest_of_a_formula_is_of_what_was_written() -> None:
    pandas = pytest.importorskip("pandas")

    def digest(text: str, rows: int, arms: str) -> str:
        frames = {
            name: pandas.DataFrame({"y": RNG.normal(size=rows), "arm": np.resize(list(arms), rows)}) for name in "ab"
        }
        model = fedppl.agree(fedppl.formula(text), frames).model
        return str(model.enrol(frames, kernel=False)["a"].declaration)

    assert digest("y ~ arm", 30, "xy") == digest("y ~ arm", 40, "xyz") != digest("y ~ 0 + arm", 30, "xy")


@pytest.mark.parametrize("outcomes", [np.arange(400) % 3 == 0, np.zeros(400, dtype=bool)])
def test_outcomes_of_true_and_false_are_looked_at(outcomes: Any) -> None:
    """NumPy has no difference of booleans; a share that cannot be computed would refuse honest rows."""

    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            beta = pm.Normal("beta", 0, 1, shape=2)
            pm.Bernoulli("died", logit_p=beta[0] + beta[1] * pm.Data("x", x), observed=pm.Data("y", y))
        return model

    x = np.random.default_rng(0).normal(size=400)
    assert rule_of(build, {"x": x, "y": outcomes}) == "None"
    assert rule_of(build, {"x": marks(7), "y": outcomes}) == "few_rows"


@pytest.mark.parametrize("rows", [60, 200])
def test_rounding_in_small_curvatures_is_no_row(rows: int) -> None:
    """Of 18 curvatures of an honest regression with effects of its own 7 are independent, and some are nearly 0."""

    def builder(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            mu, tau = pm.Normal("mu", 0, 5, shape=3), pm.LogNormal("tau", 0, 0.5, shape=3)
            theta, sigma = pm.Normal("theta", mu, tau, shape=3), pm.HalfNormal("sigma", 10)
            pm.Normal("obs", X @ theta, sigma, observed=y)
        return model

    rng = np.random.default_rng(1)
    X = np.column_stack([np.ones(rows), rng.uniform(-2, 2, rows), rng.normal(size=rows)])
    data = {"X": X, "y": X @ [8.0, 4.0, -1.0] + 8 * rng.normal(size=rows)}
    client = FederatedModel(builder, ["mu", "tau"]).enrol({"a": data})["a"]
    mean = gaussian.mean(client.layout.prior)
    for point in (mean, mean + [3.0, 1.5, -1.0, 0.3, -0.2, 0.1], mean + [7.9, 4.1, -1.2, -0.4, 0.2, -0.3]):
        share = few_rows._share_bent(LOOSE, client, point)
        assert share < LOOSE.few_rows_share


def test_a_small_column_counts_by_a_unit_and_its_rounding_does_not() -> None:
    ones, alone = np.ones((300, 1)), np.zeros((300, 1))
    alone[7] = 1.0
    rounded = np.concatenate([ones, 1e-9 * ones + 1e-13 * alone], axis=1)
    small = np.concatenate([ones, 1e-9 * alone], axis=1)
    assert concentration(rounded, 3) > 0.999
    assert concentration(rounded, 3, faint=1e-8, unit=1e-2) < 0.02
    assert concentration(small, 3, faint=1e-8, unit=1e-2) > 0.999
