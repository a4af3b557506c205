"""What sites tell when a run is over, in sums over a cohort that nobody can take apart: loo, and calibration."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import expit

pytest.importorskip("flwr")

from flwr.app import Message as FlowerMessage

import fedppl
from benchmarks._attacks import poisoned
from fedppl import DeclarationError, FederatedModel, Policy
from fedppl.engine import secure
from fedppl.flower.messages import unread
from fedppl.results.records import COHORT
from fedppl.sites import ASK, CONCLUDE, conclusions, masks, parcel_of
from fedppl.sites import node as _node
from fedppl.storage import signed
from fedppl.testing import normal_means
from tests.flower.test_secure_sites import NAMES, OPEN, bits, identities, refused_by
from tests.support import stored
from tests.support.fake_grid import FakeGrid, engine_of, node, remember

BOTH = dataclasses.replace(OPEN, conclusions=("loo", "calibration"))
SETTINGS: dict[str, Any] = {"progressbar": False, "random_seed": 1}


def coins(y: Any, x: Any) -> pm.Model:
    with pm.Model() as model:
        y, x = pm.Data("y", y), pm.Data("x", x)
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2)
        pm.Bernoulli("obs", logit_p=a + b * x, observed=y)
    return model


def counts(y: Any, x: Any, n: Any) -> pm.Model:
    with pm.Model() as model:
        y, x, n = pm.Data("y", y), pm.Data("x", x), pm.Data("n", n)
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2)
        pm.Binomial("obs", n=n, p=pm.math.invlogit(a + b * x), observed=y)
    return model


@functools.cache
def of_coins(rows: int = 40) -> tuple[FederatedModel, dict[str, Any]]:
    rng, clients = np.random.default_rng(3), {}
    for name in NAMES:
        x = rng.normal(size=rows)
        clients[name] = {"y": (rng.random(rows) < expit(-0.5 + 1.5 * x)).astype(int), "x": x}
    model = FederatedModel(coins, ["a", "b"])
    remember(model, clients)
    return model, clients


@functools.cache
def of_counts() -> tuple[FederatedModel, dict[str, Any]]:
    rng, clients = np.random.default_rng(4), {}
    for name in NAMES:
        x, n = rng.normal(size=30), rng.integers(1, 9, size=30)
        clients[name] = {"y": rng.binomial(n, expit(x)), "x": x, "n": n}
    model = FederatedModel(counts, ["a", "b"])
    remember(model, clients)
    return model, clients


def grid_of(base: Path, declared: Any, rules: Any = BOTH, fault: Any = None, **keywords: Any) -> FakeGrid:
    model, clients = declared
    app = fedppl.Flower.client_app(
        model,
        fedppl.Sums(),
        lambda config: clients[config["client-id"]],
        **{
            "folder": lambda config: base / f"at {config['client-id']}",
            "policy": (lambda config: rules[config["client-id"]]) if isinstance(rules, Mapping) else lambda _: rules,
            "secure": lambda config: base / str(config["client-id"]),
            "draws": 100,
            "chains": 2,
            **keywords,
        },
    )
    return FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(NAMES)}, fault)


def fit(grid: FakeGrid, model: FederatedModel, *, secured: bool = True, **keywords: Any) -> fedppl.Fit:
    wait = keywords.pop("wait", 60.0)
    engine = engine_of(grid, model, 3, deadline=60.0, wait=wait, secure=secured)
    return fedppl.fit(model, None, fedppl.Sums(), engine=engine, **{**SETTINGS, **keywords})


def told_by(grid: FakeGrid) -> list[dict[str, np.ndarray]]:
    """Arrays of the answers at the end, one a site."""
    kinds = [message for message in grid.replies if message.metadata.message_type == CONCLUDE]
    return [parcel_of(unread(message))[0] for message in kinds]


# The same figures -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[fedppl.Fit, FakeGrid, fedppl.Fit]:
    """A fit under masks, its grid, and the same fit in one process."""
    base = tmp_path_factory.mktemp("sites")
    identities(base)
    grid = grid_of(base, of_coins())
    model, clients = of_coins()
    engine = fedppl.InProcess(secure=True, workers=1)
    return fit(grid, model), grid, fedppl.fit(model, clients, fedppl.Sums(), engine=engine, **SETTINGS)


def test_loo_of_a_cohort_is_that_of_the_same_fit_in_one_process(three: Any) -> None:
    there, _, here = three
    assert not there.clients and here.clients
    found, expected = fedppl.loo(there), fedppl.loo(here, draws=100, chains=2, random_seed=here.seed)
    assert (found.rows, found.good, found.bad, found.very_bad) == (
        expected.rows,
        expected.good,
        expected.bad,
        expected.very_bad,
    )
    assert found.rows == 120 and found.n_clients == 3
    assert_allclose([found.elpd, found.se, found.p_loo], [expected.elpd, expected.se, expected.p_loo], rtol=1e-6)
    assert "3 clients" in repr(found)
    with pytest.raises(DeclarationError, match="sums alone.*its own posterior"):
        _ = found.clients


def test_reliability_of_a_cohort_is_that_of_the_same_fit_in_one_process(three: Any) -> None:
    there, _, here = three
    found, expected = fedppl.reliability(there), fedppl.reliability(here, draws=100, chains=2, random_seed=here.seed)
    assert_allclose(found.bins, expected.bins, rtol=1e-6)
    assert_allclose([found.brier, found.log_score], [expected.brier, expected.log_score], rtol=1e-6)
    assert found.rows == expected.rows == 120 and found.clients == expected.clients == 3


def test_answers_at_the_end_are_noise_each(three: Any) -> None:
    _, grid, _ = three
    told = told_by(grid)
    assert [set(words) for words in told] == [set(conclusions.SUMS)] * 3
    noise = np.concatenate([bits(part) for words in told for part in words.values()])
    assert abs(noise.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(noise))
    texts = [parcel_of(unread(one))[1] for one in grid.replies if one.metadata.message_type == CONCLUDE]
    assert all(set(each) == {"client_id"} for each in texts)


def test_models_over_sites_are_ranked_by_sums(three: Any, caplog: pytest.LogCaptureFixture) -> None:
    there, _, here = three
    with caplog.at_level(logging.WARNING):
        table = fedppl.loo_compare({"one": there, "the same": there})
    assert "bound" in caplog.text and np.isnan(table["weight"]).all()
    assert_allclose(table["elpd"], fedppl.loo(there).elpd)
    assert table["elpd_diff"].tolist() == [0.0, 0.0] and table["dse"].max() == pytest.approx(2 * table["se"].iloc[0])
    paired = fedppl.loo_compare({"one": here, "the same": here}, draws=100, chains=2)
    assert (table["dse"] >= paired["dse"].values).all()
    with pytest.raises(DeclarationError, match="are here"):
        fedppl.loo_compare({"there": there, "here": here})


@pytest.mark.parametrize("declared", [of_coins, of_counts])
def test_counts_by_tenths_are_those_by_hand(declared: Any) -> None:
    """Means of probabilities over draws, in NumPy."""
    model, clients = declared()
    found = fedppl.fit(model, clients, fedppl.Sums(), **SETTINGS)
    rows, predicted, observed, brier, log_score = np.zeros(10), np.zeros(10), np.zeros(10), 0.0, 0.0
    for name, data in clients.items():
        draws = found.client(name, draws=100, chains=2)["posterior"]
        a, b = (draws[key].values.reshape(-1, 1) for key in ("a", "b"))
        p = expit(a + b * data["x"]).mean(axis=0)
        n = data.get("n", np.ones(len(p)))
        for y_i, p_i, n_i in zip(data["y"], p, n, strict=True):
            k = int(np.ceil(10 * p_i)) - 1
            rows[k], predicted[k], observed[k] = rows[k] + n_i, predicted[k] + n_i * p_i, observed[k] + y_i
            brier += y_i * 2 * (1 - p_i) ** 2 + (n_i - y_i) * 2 * p_i**2
            log_score += y_i * np.log(p_i) + (n_i - y_i) * np.log(1 - p_i)
    told = fedppl.reliability(found, draws=100, chains=2)
    assert told.rows == rows.sum()
    assert_array_equal(told.bins["rows"], rows)
    some = rows > 0
    assert_allclose(told.bins["predicted"][some], predicted[some] / rows[some], rtol=1e-9)
    assert_allclose(told.bins["observed"][some], observed[some] / rows[some], rtol=1e-9)
    assert_allclose([told.brier, told.log_score], [brier / rows.sum(), log_score / rows.sum()], rtol=1e-9)


def test_brier_is_that_of_metrics() -> None:
    model, clients = of_coins()
    found = fedppl.fit(model, clients, fedppl.Sums(), **SETTINGS)
    probabilities, outcomes = [], []
    for name, data in clients.items():
        draws = found.client(name, draws=100, chains=2)["posterior"]
        p = expit(draws["a"].values[..., None] + draws["b"].values[..., None] * data["x"]).mean(axis=(0, 1))
        probabilities.append(np.column_stack([1 - p, p]))
        outcomes.append(data["y"])
    expected = fedppl.metrics.brier(np.concatenate(probabilities), np.concatenate(outcomes))
    assert fedppl.reliability(found, draws=100, chains=2).brier == pytest.approx(expected)


@pytest.mark.parametrize(("family", "weights"), [("bernoulli", None), ("binomial", None), ("binomial", "w")])
def test_formulas_tell_their_probabilities_too(family: str, weights: str | None) -> None:
    """A row of weight 2 counts as two rows."""
    rng = np.random.default_rng(5)
    frame = pd.DataFrame({"site": np.repeat([1, 2, 3], 20), "x": rng.normal(size=60), "n": 5, "w": 2.0})
    trials, times = 1 if family == "bernoulli" else 5, 1 if weights is None else 2
    frame["y"] = rng.binomial(trials, expit(frame["x"]))
    text = "y ~ x" if family == "bernoulli" else "prop(y, n) ~ x"
    model = fedppl.formula(text, family=family, weights=weights)
    told = fedppl.reliability(fedppl.fit(model, frame, fedppl.Sums(), by="site", **SETTINGS), draws=50, chains=2)
    assert told.rows == 60 * trials * times
    ones = np.nansum(told.bins["observed"] * told.bins["rows"])
    assert ones == pytest.approx(frame["y"].sum() * times)
    assert np.nansum(told.bins["predicted"] * told.bins["rows"]) == pytest.approx(ones, rel=0.05)  # the intercept fits


def test_sites_in_the_clear_tell_the_same(tmp_path: Path, three: Any) -> None:
    model, _ = of_coins()
    grid = grid_of(tmp_path, of_coins(), secure=None)
    there, (_, _, here) = fit(grid, model, secured=False), three
    assert set(there.told) == set(NAMES)
    found, expected = fedppl.reliability(there), fedppl.reliability(here, draws=100, chains=2, random_seed=here.seed)
    assert_allclose(found.bins, expected.bins, rtol=1e-4, atol=1e-6)
    assert fedppl.loo(there).clients["rows"].tolist() == [40, 40, 40]


# Who does not tell ----------------------------------------------------------------------------------------------------


def test_one_site_whose_policy_names_less_keeps_the_sum_from_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server hears which conclusion is missing, and no site; the others' sum is not there."""
    identities(tmp_path)
    model, _ = of_coins()
    rules = dict.fromkeys(NAMES, BOTH) | {"client 1": dataclasses.replace(BOTH, conclusions=("calibration",))}
    grid = grid_of(tmp_path, of_coins(), rules)
    with caplog.at_level(logging.INFO, "fedppl.sites.engine"):
        found = fit(grid, model)
    assert found.status.ok and set(found.told[COHORT]) == {"calibration"}
    assert fedppl.reliability(found).rows == 120
    with pytest.raises(DeclarationError, match=r"conclusions=\('loo',\)") as raised:
        fedppl.loo(found)
    assert "client 1" not in str(raised.value)
    assert "'loo'" in caplog.text and "client" not in caplog.text
    told = told_by(grid)
    assert len(told) == 3 and all(set(words) == set(conclusions.SUMS) for words in told)
    for pair in ((0, 1), (0, 2), (1, 2), (0, 1, 2)):  # no sum of any sites is one of rows
        words = secure.added([told[k]["loo"].view(np.uint64) for k in pair])
        total, _, _ = secure.decoded(words, {"": (7,)})
        assert abs(total[""][2]) > 2**20


@pytest.mark.parametrize("fails", ["its model", "its data", "its numbers"])
def test_a_site_that_cannot_compute_answers_by_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    identities(tmp_path)
    model, clients = of_coins()
    mine = dict(clients)
    if fails == "its model":
        real = conclusions.reliability.counts_of

        def failing(client: Any, posterior: Any) -> Any:
            if client.client_id == "client 2":
                raise RuntimeError("patient 7")
            return real(client, posterior)

        monkeypatch.setattr(conclusions.reliability, "counts_of", failing)
    if fails == "its numbers":  # too large for the ring: the others' numbers would be left

        def huge(client: Any, drawn: Any) -> Any:
            told = np.array([-1e15, 1.0, 40, 40, 0, 0, 1e30]) if client.client_id == "client 2" else None
            return conclusions.loo.sums_of(conclusions.loo.Rows(*np.full((3, 40), -0.5), 0.7)) if told is None else told

        monkeypatch.setattr(conclusions, "_loo", huge)

    def fault(message: FlowerMessage, to: int) -> Any:
        if message.metadata.message_type == CONCLUDE and fails == "its data" and to == 12:
            mine["client 2"] = {**clients["client 2"], "x": clients["client 2"]["x"] + 1.0}
        return None

    grid = grid_of(tmp_path, (model, mine), fault=fault)
    with caplog.at_level(logging.INFO):
        found = fit(grid, model)
    missing = {"its model": {"calibration"}, "its data": set(conclusions.SUMS), "its numbers": {"loo"}}[fails]
    assert set(found.told[COHORT]) == set(conclusions.SUMS) - missing
    told = told_by(grid)
    assert len(told) == 3 and all(set(words) == set(conclusions.SUMS) for words in told)
    assert all("patient" not in record.getMessage() for record in caplog.records if record.name.endswith("grid"))


def test_a_p_value_is_of_one_site_and_is_refused(tmp_path: Path) -> None:
    identities(tmp_path)
    model, _ = of_coins()
    rules = dataclasses.replace(BOTH, conclusions=("conflict", "loo"))
    found = fit(grid_of(tmp_path, of_coins(), rules), model)
    assert set(found.told[COHORT]) == {"loo"}
    lines = [line for line in refusals(tmp_path, "client 0") if "conflict" in line]
    assert len(lines) == 1 and "leave them out" in lines[0]
    with pytest.raises(DeclarationError, match="sums alone"):
        fedppl.conflict(found)


def refusals(folder: Path, name: str) -> list[str]:
    lines = fedppl.audit.lines(folder / f"at {name}")
    return [line["refused"] for line in lines if line.get("refused")]


# Once, and the same whenever it is asked ------------------------------------------------------------------------------


def test_a_site_whose_answer_is_lost_is_asked_again_and_says_the_same(tmp_path: Path, three: Any) -> None:
    identities(tmp_path)
    model, _ = of_coins()
    lost, first = {11}, {}

    def fault(message: FlowerMessage, to: int) -> Any:
        def drop(reply: FlowerMessage) -> FlowerMessage:
            from flwr.app import Error

            first[to] = parcel_of(unread(reply))[0]
            return FlowerMessage(Error(5, "gone"), reply_to=message)

        if message.metadata.message_type == CONCLUDE and to in lost:
            lost.remove(to)
            return drop
        return None

    grid = grid_of(tmp_path, of_coins(), fault=fault)
    found = fit(grid, model)
    expected, _, _ = three
    assert set(found.told[COHORT]) == set(conclusions.SUMS)
    assert fedppl.loo(found).elpd == pytest.approx(fedppl.loo(expected).elpd, rel=1e-9)
    kinds = [(m.metadata.message_type, m.metadata.dst_node_id) for m in grid.sent]
    assert kinds.count((CONCLUDE, 11)) == 2 and kinds.count((CONCLUDE, 10)) == 1
    again = next(words for words in told_by_node(grid, 11) if words)
    assert all(np.array_equal(again[name], first[11][name]) for name in conclusions.SUMS)


def told_by_node(grid: FakeGrid, to: int) -> list[dict[str, np.ndarray]]:
    of = [m for m in grid.replies if m.metadata.message_type == CONCLUDE and m.metadata.src_node_id == to]
    return [parcel_of(unread(m))[0] if m.has_content() else {} for m in of]


def test_a_site_that_stays_away_at_the_end_costs_the_sums_and_not_the_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identities(tmp_path)
    model, _ = of_coins()

    def fault(message: FlowerMessage, to: int) -> Any:
        return 5 if message.metadata.message_type == CONCLUDE and to == 12 else None

    with caplog.at_level(logging.WARNING):
        found = fit(grid_of(tmp_path, of_coins(), fault=fault), model, wait=2.0)
    assert found.status.ok and found.told == {COHORT: {}}
    assert "client 2: the site is not reachable" in caplog.text
    with pytest.raises(DeclarationError, match="conclusions="):
        fedppl.loo(found)


def site_of(base: Path, name: str, rules: Policy = BOTH) -> tuple[_node.Node, Any]:
    model, clients = of_coins()
    folder = base / f"at {name}"
    here = _node.Node(
        "of a cohort",
        model,
        fedppl.Sums(),
        lambda _: clients[name],
        lambda _: name,
        folder,
        100,
        2,
        rules,
        None,
        base / name,
    )
    return here


@pytest.fixture
def ended(tmp_path: Path) -> tuple[Path, dict[str, Any], list[Any]]:
    """A run that all sites answered in, and that nobody has been told is over: the final message's arrays and texts."""
    identities(tmp_path)
    model, _ = of_coins()
    kept: list[Any] = []

    def fault(message: FlowerMessage, to: int) -> Any:
        if message.metadata.message_type != CONCLUDE:
            return None
        kept.append(parcel_of(unread(message)))
        return 5

    fit(grid_of(tmp_path, of_coins(), fault=fault), model, wait=0.01)
    arrays, texts = kept[0]
    return tmp_path, {name: arrays for name in NAMES}, [texts]


def asked(base: Path, name: str, arrays: Any, texts: Mapping[str, str]) -> dict[str, Any]:
    told, about = conclusions.conclude(site_of(base, name), {}, None, (arrays, {**texts, "client_id": name}))
    assert about == {"client_id": name}
    return dict(told)


def test_a_site_that_was_killed_before_it_told_says_the_same(ended: Any) -> None:
    base, arrays, (texts,) = ended
    made: list[Any] = []
    with stored.killed_while_keeping(".conclusion", made=made, how=SystemExit), pytest.raises(SystemExit):
        asked(base, "client 0", arrays["client 0"], texts)
    kept = signed.unpack(made[0][1], "it", made[0][0])
    words = asked(base, "client 0", arrays["client 0"], texts)
    assert set(words) == set(conclusions.SUMS)
    for name in words:
        assert_array_equal(words[name], kept[-1][name])
    again = asked(base, "client 0", arrays["client 0"], texts)
    assert all(np.array_equal(again[name], words[name]) for name in words)


def test_no_second_answer_about_another_q_and_no_masks_twice(ended: Any) -> None:
    base, arrays, (texts,) = ended
    words = {name: asked(base, name, arrays[name], texts) for name in NAMES}
    assert masks.sums_at_end(words, conclusions.SUMS)["loo"][2] == 120
    moved = {**arrays["client 0"], "points": arrays["client 0"]["points"] + 0.01}
    assert asked(base, "client 0", moved, texts) == {}
    assert asked(base, "client 0", arrays["client 0"], {**texts, "seed": "7"}) == {}
    assert refused_by(base, "client 0")[-2:] == ["conclusion", "conclusion"]
    parcel = arrays["client 0"], {**texts, "client_id": "client 1"}
    assert conclusions.conclude(site_of(base, "client 0"), {}, None, parcel)[0] == {}
    assert refused_by(base, "client 0")[-1] == "sums"
    assert asked(base, "client 0", arrays["client 0"], {**texts, "run": "another"}) == {}
    assert refused_by(base, "client 0")[-1] == "sums"
    # Each conclusion has masks of its own: the difference of two is none of plain numbers.
    first = {name: part["loo"].view(np.uint64)[:16] for name, part in words.items()}
    other = {name: part["calibration"].view(np.uint64)[:16] for name, part in words.items()}
    for name in NAMES:
        assert np.mean(first[name] - other[name] < 2**50) < 0.2


def test_a_site_that_is_asked_about_another_q_has_other_masks(ended: Any) -> None:
    base, arrays, (texts,) = ended
    moved = {**arrays["client 0"], "points": arrays["client 0"]["points"] + 0.01}
    words = {name: asked(base, name, arrays[name], texts) for name in NAMES[1:]}
    words["client 0"] = asked(base, "client 0", moved, texts)
    assert set(words["client 0"]) == set(conclusions.SUMS)
    assert masks.sums_at_end(words, conclusions.SUMS) == {}


def test_what_a_cohort_told_is_saved_with_the_fit(three: Any, tmp_path: Path) -> None:
    there, _, _ = three
    there.save(tmp_path / "run.nc")
    model, _ = of_coins()
    loaded = fedppl.load(tmp_path / "run.nc", model)
    assert fedppl.loo(loaded).elpd == fedppl.loo(there).elpd
    assert fedppl.reliability(loaded).brier == fedppl.reliability(there).brier


# What one of the sites can do to a sum --------------------------------------------------------------------------------


def test_a_smooth_lie_in_a_sum_moves_the_mean_unseen_and_a_rough_one_ends_the_fit() -> None:
    """docs/security.md says so: nothing bounds what one site adds, as nobody sees its part."""
    honest = poisoned.fitted()
    slope = poisoned.attack(poisoned.SMOOTH["a slope of 10 a sd"], honest)
    assert slope["status"] == "converged" and slope["moved_sd"] == pytest.approx(10.0, rel=1e-3)
    place = poisoned.attack(poisoned.SMOOTH["sure of a place 50 sds away"], honest)
    assert place["status"] == "converged" and place["moved_sd"] > 40
    with pytest.warns(fedppl.ConvergenceWarning):
        point = poisoned.attack(poisoned.ROUGH["50 more at a point"], honest)
    assert point["status"] == "stalled" and point["moved_sd"] is None


def test_a_constant_moves_the_evidence_alone() -> None:
    honest, lied = poisoned.fitted(), poisoned.fitted(poisoned.ROUGH["5 more everywhere"])
    assert_allclose(fedppl.gaussian.mean(lied.posterior), fedppl.gaussian.mean(honest.posterior), rtol=1e-9)
    assert lied.status.ok and lied.log_evidence.value - honest.log_evidence.value == pytest.approx(5.0, abs=1e-6)


def test_a_fit_that_stalls_under_masks_does_not_say_that_nobody_answered() -> None:
    with pytest.warns(fedppl.ConvergenceWarning):
        found = poisoned.fitted(poisoned.ROUGH["50 more at a point"])
    assert found.status is fedppl.Status.STALLED and "ever sent" not in found.message and "search" in found.message


@pytest.mark.parametrize("number", [4.3e12, -1e15])
def test_what_is_too_large_for_the_ring_is_counted_and_what_is_not_is_added(number: float) -> None:
    """An honest site's numbers are below 2^42 / sites in size: more is left out, and the round is void."""
    words = [secure.encoded({"a": np.array([value])}, 3) for value in (1.0, 2.0, number)]
    total = secure.summed({str(k): one for k, one in enumerate(words)}, {"a": (1,)})
    assert not total.clients and all("too large" in reason for reason in total.failures.values())
    bent = [*words[:2], words[2].copy()]
    bent[2][:] = 0
    bent[2][0] = np.uint64(2**61)  # a site with other code adds what it likes, up to 2^43
    assert secure.summed({str(k): one for k, one in enumerate(bent)}, {"a": (1,)}).total["a"] == 3.0 + 2.0**41


# What needs single answers --------------------------------------------------------------------------------------------


SINGLE: dict[str, tuple[Any, str]] = {
    "influence": (lambda fit: fit.influence(), "sums alone"),
    "influence of one": (lambda fit: fit.influence("client 1"), "sums alone"),
    "conflict": (lambda fit: fedppl.conflict(fit), "sums alone"),
    "without": (lambda fit: fedppl.without(fit, "client 1", progressbar=False), "sums alone"),
    "its picture": (lambda fit: fedppl.plots.influence(fit), "sums alone"),
    "a site's posterior": (lambda fit: fit.client("client 1"), "drawn there"),
    "rows": (lambda fit: fedppl.plots.check(fit), "clients="),
}


@pytest.mark.parametrize("what", SINGLE)
def test_what_needs_single_answers_says_that_there_are_sums_alone(three: Any, what: str) -> None:
    there, _, _ = three
    function, keyword = SINGLE[what]
    with pytest.raises(DeclarationError, match=keyword):
        function(there)


def test_rounds_by_client_have_who_answered_and_no_diagnostics(three: Any) -> None:
    there, grid, _ = three
    rounds = there.idata["rounds"]
    by_client = {name for name in rounds.data_vars if "client" in rounds[name].dims}
    assert by_client == {"outcome", "reason", "bytes_down", "bytes_up"}
    assert set(np.unique(rounds["outcome"])) == {"used"} and set(np.unique(rounds["reason"])) == {""}
    asks = [message for message in grid.sent if message.metadata.message_type == ASK]
    assert len(asks) == 3 * rounds.sizes["round"]


def test_bounds_on_single_sites_are_refused_before_anybody_enrols() -> None:
    model, _ = of_coins()
    engine = engine_of(FakeGrid({}), model, 3, secure=True)
    with pytest.raises(DeclarationError, match=r"sums are secure.*fedppl.Sums\(\)"):
        fedppl.fit(model, None, fedppl.EP(trust=3.0), engine=engine, **SETTINGS)


def test_reliability_is_drawn_by_tenths(three: Any) -> None:
    there, _, _ = three
    found = fedppl.reliability(there)
    upper, lower = fedppl.plots.reliability(found)
    (_, curve), bars = upper.get_lines(), lower.patches
    some = found.bins[found.bins["rows"] > 0]
    assert_allclose(curve.get_xydata(), some[["predicted", "observed"]])
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1.0)
    with pytest.raises(DeclarationError, match="outcomes="):
        fedppl.plots.reliability([0.1, 0.2])


def test_outcomes_that_are_not_ones_or_zeros_have_no_reliability() -> None:
    model, clients = normal_means(3)
    found = fedppl.fit(model, clients, fedppl.Sums(), **SETTINGS)
    with pytest.raises(DeclarationError, match="Bernoulli"):
        fedppl.reliability(found)


def test_the_usual_limits_let_a_cohort_tell(tmp_path: Path) -> None:
    """All rules are looked at once more, with the cohort's counts of rows; what is told counts as a request."""
    identities(tmp_path)
    model, _ = of_coins()
    rules = Policy(rows=100, conclusions=("loo", "calibration"))
    found = fit(grid_of(tmp_path, of_coins(), rules), model)
    assert found.status.ok and fedppl.loo(found).rows == fedppl.reliability(found).rows == 120
    lines = list(fedppl.audit.lines(tmp_path / "at client 0"))
    (told,) = [line for line in lines if line["event"] == "reply" and "loo" in line.get("released", {})]
    assert told["released"] == {"loo": 7, "calibration": 32}
    few = Policy(rows=100, conclusions=("loo", "calibration"), requests=1 + len(found.records))
    identities(tmp_path / "few")
    spent = fit(grid_of(tmp_path / "few", of_coins(), few), model)
    assert spent.status.ok and spent.told == {COHORT: {}}
    assert refusals(tmp_path / "few", "client 0")[-1].startswith("requests: ")
