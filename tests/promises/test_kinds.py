"""Clients of several kinds: one layout, several builders; summaries against rows that they are sufficient for."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel, summaries
from fedppl.given import clients as given_clients

RNG = np.random.default_rng(5)
ROWS = {f"site {k}": 0.8 + 0.5 * RNG.normal() + RNG.normal(size=4 + 3 * k) for k in range(4)}


def effect() -> Any:
    """What all clients share, and a client's own mean."""
    mu = pm.Normal("mu", 0, 2)
    pm.Deterministic("twice", 2 * mu)
    return pm.Normal("theta", mu, 0.5)


def full(y: Any) -> Any:
    with pm.Model() as model:
        pm.Normal("obs", effect(), 1, observed=pm.Data("y", y))
    return model


def estimate_of(y: Any) -> dict[str, Any]:
    """The mean of rows with variance 1, which is sufficient."""
    return {"estimate": np.mean(y), "covariance": 1 / len(y)}


def grid_of(y: Any) -> dict[str, Any]:
    grid = np.linspace(np.mean(y) - 2.0, np.mean(y) + 2.5, 40)
    return {"grid": grid, "log_likelihood": -0.5 * len(y) * (np.mean(y) - grid) ** 2}


BUILDERS = {"full": full, "estimate": summaries.estimate(effect), "grid": summaries.grid(effect)}
MODEL = FederatedModel(BUILDERS, shared=["mu"])
MIXED = {
    "site 0": estimate_of(ROWS["site 0"]),
    "site 1": {"y": ROWS["site 1"]},
    "site 2": grid_of(ROWS["site 2"]),
    "site 3": {"y": ROWS["site 3"]},
}


def fit(model: Any, clients: Any, algorithm: Any = None, **keywords: Any) -> Any:
    return fedppl.fit(model, clients, algorithm, **{"progressbar": False, "random_seed": 1, **keywords})


@pytest.fixture(scope="module")
def with_rows() -> Any:
    return fit(FederatedModel(full, ["mu"]), {k: {"y": y} for k, y in ROWS.items()})


@pytest.fixture(scope="module")
def mixed() -> Any:
    return fit(MODEL, MIXED)


@pytest.mark.slow
def test_sufficient_summaries_are_as_good_as_rows(with_rows: Any, mixed: Any) -> None:
    assert_allclose(mixed.posterior.linear, with_rows.posterior.linear, rtol=1e-8)
    assert_allclose(mixed.posterior.precision, with_rows.posterior.precision, rtol=1e-8)
    variance = np.array([0.25 + 1 / len(y) for y in ROWS.values()])
    precision = 0.25 + np.sum(1 / variance)
    assert_allclose(mixed.posterior.precision, [[precision]], rtol=1e-8)
    assert_allclose(mixed.posterior.linear, [np.sum([np.mean(y) for y in ROWS.values()] / variance)], rtol=1e-8)
    assert set(mixed.idata["posterior"].data_vars) == {"mu", "twice"}


def test_a_summary_client_has_its_own_posterior_and_is_predicted_from_it(mixed: Any, with_rows: Any) -> None:
    for k, y in ROWS.items():
        ours, theirs = (one.client(k, draws=100)["posterior"]["theta"] for one in (mixed, with_rows))
        assert_allclose(ours.mean(), theirs.mean(), atol=4 * 0.5 / np.sqrt(400 * min(1, len(y))))
    found = mixed.predict("site 0", {"y": [1.0]}, kind="mean", draws=10)
    assert_allclose(found["predictions"]["obs_mean"][..., 0], found["posterior"]["theta"])
    assert "obs" in mixed.predict("site 1", {"y": [1.0]}, draws=10)["predictions"]


def test_a_new_client_may_be_of_any_kind(mixed: Any, with_rows: Any) -> None:
    y = np.array([2.0, 1.5, 2.5])
    expected = with_rows.new_client({"y": y}, draws=500)["posterior"]["theta"]
    for given, kind in ((estimate_of(y), None), (estimate_of(y), "estimate"), ({"y": y}, "full")):
        found = mixed.new_client(given, kind=kind, draws=500)["posterior"]["theta"]
        assert_allclose(found.mean(), expected.mean(), atol=0.08)  # 2000 draws of sd 0.4: 5 standard errors
    with pytest.raises(DeclarationError, match=r"kind is 'none'.*'full', 'estimate', 'grid'"):
        mixed.new_client({"y": y}, kind="none")


def test_evidence_is_of_what_each_client_brought(mixed: Any) -> None:
    only = {k: estimate_of(y) for k, y in ROWS.items() if k != "site 2"}
    sizes = np.array([len(ROWS[k]) for k in only])
    means = np.array([one["estimate"] for one in only.values()])
    covariance = np.diag(0.25 + 1 / sizes) + 4.0
    fitted = fit(MODEL, only)
    assert_allclose(fitted.log_evidence.value, stats.multivariate_normal.logpdf(means, np.zeros(3), covariance), 1e-5)


@pytest.mark.slow
def test_a_fit_is_kept_and_goes_on(mixed: Any, tmp_path: Path) -> None:
    mixed.save(tmp_path / "run.nc")
    again = fedppl.load(tmp_path / "run.nc", MODEL, clients=MIXED)
    assert again.summary().equals(mixed.summary())
    one, two = (f.client("site 0", draws=20)["posterior"]["theta"] for f in (again, mixed))
    assert_allclose(one, two)
    keep = {"checkpoint": tmp_path / "run.ckpt"}
    first = fit(MODEL, MIXED, **keep)
    assert len(fit(MODEL, MIXED, **keep).records) == len(first.records)
    with pytest.raises((DataError, DeclarationError), match="site 1"):
        fit(MODEL, {**MIXED, "site 1": estimate_of(ROWS["site 1"])}, **keep)


@pytest.mark.slow
def test_clients_leave_and_are_tested_and_have_rows_left_out(mixed: Any, caplog: pytest.LogCaptureFixture) -> None:
    left = fedppl.without(mixed, "site 3", certificate=False, progressbar=False).fit
    expected = [0.25 + 1 / len(ROWS[k]) for k in list(ROWS)[:3]]
    assert_allclose(left.posterior.precision, [[0.25 + np.sum(1 / np.array(expected))]], rtol=1e-4)
    found = fedppl.conflict(mixed)["p_value"]
    assert np.isnan(found.sel(client="site 2")) and "site 2" in caplog.text
    assert np.all(found.drop_sel(client="site 2") > 0)
    with pytest.raises(DeclarationError, match="'site 2'.*grid"):
        fedppl.conflict(mixed, "site 2")
    caplog.clear()
    loo = fedppl.loo(mixed, draws=200)
    assert list(loo.clients.index) == ["site 1", "site 3"] and "'site 0', 'site 2'" in caplog.text
    with pytest.raises(DeclarationError, match="'site 0'.*held-out"):
        fedppl.search.validation_loss(mixed, {"site 0": estimate_of(ROWS["site 0"])})


def test_the_kind_is_told_by_id_by_a_function_or_by_names() -> None:
    by_id = FederatedModel(BUILDERS, ["mu"], kind={"a": "full", 2: "grid"})
    assert by_id.kind_of("a", {}) == "full" and by_id.kind_of("2", {}) == "grid"
    assert by_id.kind_of("b", {"estimate": 1, "covariance": 1}) == "estimate"
    by_rule = FederatedModel(BUILDERS, ["mu"], kind=_rule)
    assert by_rule.kind_of("x", {}) == "grid" and by_rule.kind_of("b", {"y": [1]}) == "full"
    for model in (by_id, by_rule):
        again = pickle.loads(pickle.dumps(model))
        assert again.kind_of("b", {"y": 1}) == "full" and list(again.builders) == list(BUILDERS)
    known = by_rule.knowing({"b": "estimate"})
    assert known.kind_of("b", {"y": [1]}) == "estimate" and known.kind_of("x", {}) == "grid"
    frame = pd.DataFrame({"y": [1.0], "sex": [0]})
    assert MODEL.kind_of("a", frame) == "full"  # a frame may have more columns


def _rule(client_id: str, data: Any) -> str | None:
    return "grid" if client_id == "x" else None


def test_one_table_may_hold_clients_of_all_kinds() -> None:
    nan = np.nan
    table = pd.DataFrame(
        {"site": ["a", "a", "b"], "y": [1.0, 0.5, nan], "estimate": [nan, nan, 0.7], "covariance": [nan, nan, 0.2]}
    )
    model, given = given_clients(MODEL, table, "site", "error")
    assert {k: sorted(data) for k, data in given.items()} == {"a": ["y"], "b": ["covariance", "estimate"]}
    enrolled = model.enrol(given, kernel=False)
    assert [client.kind for client in enrolled.values()] == ["full", "estimate"]


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        ({"X": 1.0}, ("'a'", "no builder", "'full' takes ['y']", "kind=")),
        ({"y": 1.0, "estimate": 1.0, "covariance": 1.0}, ("'a'", "no builder")),
        (3.0, ("'a'", "float")),
        ({"estimate": [0.1, 0.2], "covariance": [[1.0, 2.0], [2.0, 1.0]]}, ("'a'", "not positive definite")),
        ({"estimate": [0.1, 0.2], "covariance": [[1.0, 0.5], [0.1, 1.0]]}, ("'a'", "not symmetric")),
        ({"estimate": [0.1, 0.2], "covariance": [[1.0]]}, ("'a'", "(1, 1)", "(2, 2)")),
        ({"estimate": 0.1, "covariance": -0.2}, ("'a'", "not positive definite")),
        ({"estimate": [0.1, 0.2], "covariance": [1.0, 1.0]}, ("'a'", "different lengths")),
        ({"estimate": np.nan, "covariance": 0.1}, ("'a'", "'estimate' holds nan")),
        ({"grid": [0, 1, 2, 2, 3], "log_likelihood": [-4, -1, 0, -1, -4]}, ("'a'", "does not increase", "index 2")),
        ({"grid": [0, 1, 2, 3], "log_likelihood": [-1, 0, -1, -4]}, ("'a'", "at least 5")),
        ({"grid": [0, 1, 2, 3, 4], "log_likelihood": [-25, -16, -9, -4, -1]}, ("'a'", "does not cover", "beyond 4")),
        ({"grid": [0, 1, 2, 3, 4], "log_likelihood": [0, -1, -4, -9, -np.inf]}, ("'a'", "-inf")),
        ({"events": [1, 5], "totals": [3, 4]}, ("'a'", "5 events of 4", "arm 1")),
        ({"events": [1, 0.5], "totals": [3, 4]}, ("'a'", "0.5 events")),
        ({"events": [1, 2, 3], "totals": [3, 4, 4]}, ("'a'", "two each")),
    ],
)
def test_what_is_no_summary_is_refused(data: Any, fragments: tuple[str, ...]) -> None:
    model = FederatedModel({**BUILDERS, "table": summaries.two_by_two(effect)}, ["mu"])
    with pytest.raises(DataError) as caught:
        model.enrol({"a": data, "b": {"y": np.ones(2)}}, kernel=False)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def _wider() -> Any:
    return pm.Normal("theta", pm.Normal("mu", 0, 3), 0.5)


def _longer() -> Any:
    return pm.Normal("theta", pm.Normal("mu", 0, 2, shape=2).sum(), 0.5)


def _other() -> Any:
    return pm.Normal("theta", pm.Normal("nu", 0, 2), 0.5)


@pytest.mark.parametrize(
    ("other", "fragments"),
    [
        (_wider, ("'full' and 'estimate'", "mu has mean 0 and sd 2", "0 and 3 in the second")),
        (_longer, ("'full' and 'estimate'", "'mu' has shape ()", "(2,)")),
        (_other, ("kind 'estimate'", "'mu' is not in the model")),
    ],
)
def test_kinds_that_share_something_else_are_named(other: Any, fragments: tuple[str, ...]) -> None:
    model = FederatedModel({"full": full, "estimate": summaries.estimate(other)}, ["mu"])
    with pytest.raises(DeclarationError) as caught:
        model.enrol({"a": {"y": np.ones(2)}, "b": estimate_of(np.ones(2))}, kernel=False)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


@pytest.mark.parametrize(
    ("builders", "kind", "fragment"),
    [
        (BUILDERS, {"a": "ful"}, "kind of client 'a' is 'ful'"),
        (BUILDERS, "full", "neither kinds by client id nor a function"),
        (full, {"a": "full"}, "several builders"),
        ({"full": full, "estimate": 3}, None, "of kind 'estimate' is int"),
        ({}, None, "functions by kind"),
    ],
)
def test_kinds_that_cannot_be_meant_are_refused(builders: Any, kind: Any, fragment: str) -> None:
    with pytest.raises(DeclarationError, match=fragment):
        FederatedModel(builders, ["mu"], kind=kind)


def ratio() -> Any:
    """A log odds ratio that varies over sites."""
    return pm.Normal("theta", pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 0.5))


def patients(drug: Any, died: Any) -> Any:
    with pm.Model() as model:
        theta, baseline = ratio(), pm.Normal("baseline", 0, 2.5)
        pm.Bernoulli("obs", logit_p=baseline + theta * pm.Data("drug", drug), observed=pm.Data("died", died))
    return model


@pytest.mark.slow
def test_a_table_is_as_good_as_its_rows() -> None:
    events, totals = np.array([[3, 7], [0, 2], [5, 4]]), np.array([[20, 22], [9, 11], [13, 12]])
    tables, rows = {}, {}
    for k in range(3):
        tables[f"s{k}"] = {"events": events[k], "totals": totals[k]}
        died = [np.arange(totals[k, arm]) < events[k, arm] for arm in (0, 1)]
        rows[f"s{k}"] = {"drug": np.repeat([0, 1], totals[k]), "died": np.concatenate(died).astype(int)}
    model = FederatedModel({"rows": patients, "table": summaries.two_by_two(ratio)}, ["mu", "tau"])
    mixed, full_rows = fit(model, {**tables, "s1": rows["s1"]}), fit(model, rows)
    assert mixed.status.ok
    assert_allclose(mixed.posterior.linear, full_rows.posterior.linear, rtol=1e-7)
    assert_allclose(mixed.posterior.precision, full_rows.posterior.precision, rtol=1e-7)
    assert np.all(fedppl.conflict(mixed, "s0", replicates=199)["p_value"] > 0)


def test_sites_declare_what_they_bring_and_agree_on_what_is_shared(with_rows: Any) -> None:
    pytest.importorskip("flwr")
    from fedppl.engine.policy import NO_RULES
    from tests.support.fake_grid import FakeGrid, engine_of, node

    sites = {
        "site 0": (FederatedModel(summaries.estimate(effect), ["mu"]), None),
        "site 1": (FederatedModel(full, ["mu"]), None),
        "site 2": (MODEL, "estimate"),
        "site 3": (MODEL, None),
    }
    given = {**MIXED, "site 2": estimate_of(ROWS["site 2"])}

    def app(model: Any, kind: Any) -> Any:
        load = lambda config: given[config["client-id"]]  # noqa: E731
        return fedppl.Flower.client_app(model, fedppl.EP(), load, kind=kind, policy=NO_RULES)

    nodes = {10 + i: node(app(*of), 10 + i, **{"client-id": name}) for i, (name, of) in enumerate(sites.items())}
    declared = FederatedModel(full, ["mu"])
    found = fit(declared, None, engine=engine_of(FakeGrid(nodes), declared, 4))
    assert_allclose(found.posterior.precision, with_rows.posterior.precision, rtol=1e-6)
    with pytest.raises(DeclarationError, match="'no such kind'.*'full'"):
        app(MODEL, "no such kind")


@pytest.mark.slow
def test_correlated_clients_of_several_kinds_are_as_those_with_rows() -> None:
    def own() -> Any:
        return pm.Normal("slope", 0, 2)

    def rows(y: Any) -> Any:
        with pm.Model() as model:
            pm.Normal("obs", own(), 1, observed=pm.Data("y", y))
        return model

    model = FederatedModel({"rows": rows, "estimate": summaries.estimate(own)}, ["slope"])
    given = {k: {"y": y} for k, y in ROWS.items()}
    fits = [fit(model, one, fedppl.HM1()) for one in (given, {**given, "site 0": estimate_of(ROWS["site 0"])})]
    for name in ("theta", "correlation"):
        assert_allclose(fits[0].idata["fit"][name], fits[1].idata["fit"][name], rtol=1e-6)


@pytest.mark.slow
def test_the_code_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "summaries.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"docs/summaries.md, block {number}", "exec"), namespace)  # noqa: S102
    assert len(blocks) == 3 and "arm[drug]" in capsys.readouterr().out


def test_kinds_whose_outcomes_are_counted_apart_are_refused_under_masks() -> None:
    """Outcomes of one kind are 0 and 1, which are counted, and those of the other are numbers."""

    def coins(tossed: Any) -> Any:
        with pm.Model() as model:
            pm.Bernoulli("seen", logit_p=effect(), observed=pm.Data("tossed", tossed))
        return model

    both = FederatedModel({"full": full, "coins": coins}, shared=["mu"])
    clients = {"site 0": {"y": ROWS["site 0"]}, "site 1": {"y": ROWS["site 1"]}, "site 2": {"tossed": np.array([0, 1])}}
    policy = fedppl.Policy(rows=0, few_rows=0, parameters_per_row=np.inf, events=0)
    with pytest.raises(DeclarationError, match="one kind"):
        fit(both, clients, fedppl.Sums(), engine=fedppl.InProcess(policy=policy, secure=True))
