"""A formula at sites of their own: what each tells under its policy, what it holds against what comes of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

pytest.importorskip("flwr")

import fedppl
from fedppl import DataError, DeclarationError, Policy, audit
from fedppl.engine.guard import REFUSED, in_store
from fedppl.engine.policy import NO_RULES
from fedppl.flower.apps import _context_memory as in_node
from fedppl.formulas.agreement import Agreement, Column, Told, raised, tell
from fedppl.formulas.exchange import asked, contradiction, example
from fedppl.formulas.formula import of_told
from fedppl.results import diagnostics
from fedppl.sites import AGREE, wire
from fedppl.sites.decode import Malformed
from fedppl.sites.site_agreement import accept, declared, named, without_rare
from fedppl.storage import store
from tests.support import problems, stored
from tests.support.fake_grid import FakeGrid, Node, node

RNG = np.random.default_rng(5)
OPEN = Policy(sums="optional", rows=0, few_rows=0, parameters_per_row=math.inf, events=0, requests=200, agreement=5)
MODEL = fedppl.formula("y ~ age + arm + (1 | site)")


def sites(rare: str = "") -> dict[str, dict[str, Any]]:
    found = {}
    for place, name in enumerate(("north", "south", "west")):
        rows = 40 + 20 * place
        age, arm = RNG.normal(60, 9, rows), np.where(np.arange(rows) % 2, "drug", "none").astype(object)
        if rare:
            arm[0] = rare
        y = 1 + 0.05 * age + 0.5 * (arm == "drug") + place + RNG.normal(size=rows)
        found[name] = {"age": age, "arm": arm, "y": y}
    return found


DATA = sites()


def nodes_of(
    data: Mapping[str, Any], folder: Path | None, model: Any = MODEL, policies: Mapping[str, Policy] | None = None
) -> dict[int, Node]:
    """One app, a node a client; sites have folders, and policies of their own."""
    app = fedppl.Flower.client_app(
        model,
        fedppl.EP(),
        lambda config: data[config["client-id"]],
        folder=None if folder is None else lambda config: folder / config["client-id"],
        policy=NO_RULES if folder is None else lambda config: (policies or {}).get(config["client-id"], OPEN),
        draws=20,
        chains=1,
    )
    return {10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(data)}


def agree(grid: FakeGrid, model: Any = MODEL, clients: Any = 3, **keywords: Any) -> fedppl.formulas.formula.Agreed:
    found: fedppl.formulas.formula.Agreed = fedppl.Flower.agree(
        grid, model, clients=clients, **{"wait": 0.3, "poll": 0.001, **keywords}
    )
    return found


def replies(grid: FakeGrid, kind: str = AGREE) -> list[dict[str, str]]:
    """Texts of all replies to messages of a kind."""
    ids = {message.metadata.message_id for message in grid.sent if message.metadata.message_type == kind}
    return [
        {key: str(value) for record in reply.content.config_records.values() for key, value in record.items()}
        for reply in grid.replies
        if reply.metadata.reply_to_message_id in ids
    ]


def told(grid: FakeGrid) -> dict[str, dict[str, list[Any]]]:
    return {one["client_id"]: json.loads(one["told"]) for one in replies(grid) if "told" in one}


# --- the same fit ---------------------------------------------------------------------------------------------


@problems.of_q
def test_sites_fit_what_clients_here_fit(tmp_path: Path) -> None:
    """By a server app; every message comes to sites that have nothing but their folders."""
    here = fedppl.fit(MODEL, DATA, fedppl.EP(), progressbar=False, random_seed=1)
    seen: list[Any] = []
    app = fedppl.Flower.server_app(MODEL, fedppl.EP(), clients=3, on_fit=lambda result, context: seen.append(result))
    nodes = nodes_of(DATA, tmp_path, policies=dict.fromkeys(DATA, dataclasses.replace(OPEN, agreement=1)))
    context = node(nodes[10].app, 0).context
    context.run_config = {"random_seed": 1, "wait": 1.0, "deadline": 0.05}
    app(FakeGrid(nodes), context)
    (there,) = seen
    assert there.status is here.status and diagnostics.matched(there.status, there.message)
    assert_allclose(there.posterior.linear, here.posterior.linear, rtol=1e-6)
    assert_allclose(there.posterior.precision, here.posterior.precision, rtol=1e-6, atol=1e-8)
    assert list(there.summary().index) == list(here.summary().index)
    for name in DATA:
        assert (tmp_path / name / f"{name}.nc").exists()
        assert stored.lines(tmp_path / name)


# --- what leaves ----------------------------------------------------------------------------------------------


def test_nothing_of_fewer_rows_leaves(tmp_path: Path) -> None:
    """All that sites say: a rare level, a rare value and a site of few rows tell nothing of themselves."""
    data = sites(rare="surgery")
    data["tiny"] = {name: values[:4] for name, values in data["west"].items()}
    data["north"]["y"] = np.where(np.arange(40) < 2, 3.5, 0.0)
    grid = FakeGrid(nodes_of(data, tmp_path))
    found = agree(grid, clients=4)
    for one in replies(grid):
        assert set(one) == {"client_id", "version", "told"} and "surgery" not in one["told"]
    all_of = told(grid)
    assert all_of["tiny"] == {
        "age": [0, 0.0, 0.0, {}, False, False],
        "arm": [0, 0.0, 0.0, {}, False, True],
        "y": [0, 0.0, 0.0, {}, False, False],
    }
    assert all_of["north"]["y"] == [40, 0.0, 0.0, {}, False, False]
    assert all_of["north"]["arm"] == [40, 0.0, 0.0, {"drug": 20, "none": 20}, False, True]
    assert found.columns.loc["arm", "levels"] == ("drug", "none", "other")  # of a site that tells nothing
    mean, sd = found.columns.loc["age", ["mean", "sd"]].astype(float)
    others = np.concatenate([data[name]["age"] for name in ("north", "south", "west")])
    assert abs(mean - others.mean()) < 0.4 * others.std() and 0.6 < sd / others.std() < 1.4


@pytest.mark.parametrize("base", [60, 100, 125, 150, 200, 250, 300])
@pytest.mark.parametrize("taken", [True, False])
def test_whether_somebody_has_a_level_is_not_told(base: int, taken: bool) -> None:
    """No such row and some but fewer than min_count are the same, in place of others' rows and beside them."""
    told = []
    for few in range(10):
        arm = np.array(["drug"] * base + ["none"] * base, dtype=object)
        arm[: few * taken] = "hiv"
        arm = np.append(arm, ["hiv"] * (few * (not taken)))
        told.append(tell({"arm": arm}, ["arm"], [], 10)["arm"])
    assert all(one == told[0] for one in told)
    assert not told[0].withheld and set(told[0].levels) == {"drug", "none"}


@pytest.mark.parametrize("place", [0.0, 1.0, 3.0])
def test_a_value_that_few_rows_have_is_as_if_they_had_another(place: float) -> None:
    """At the end of what there is, and alone beside a constant."""
    told = []
    for few in range(10):
        x = np.repeat([1.0, 2.0], [150, 150]) if place in (0.0, 3.0) else np.full(300, 2.0)
        x[np.flatnonzero(x == (2.0 if place else 1.0))[:few]] = place
        told.append(tell({"x": x}, ["x"], [], 10)["x"])
    assert all(one == told[0] for one in told) and not told[0].withheld


def test_how_far_away_a_row_lies_is_not_told() -> None:
    """A row at 3 sds, at 6 or at 6,000 is the same; one that lay elsewhere before moves what is told seldom."""
    moved = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x = rng.normal(rng.normal(0, 50), np.exp(rng.normal()), 400)
        away = [np.append(x[1:], x.mean() + k * x.std()) for k in (3.5, 6.0, 6000.0)]
        told = [tell({"x": one}, ["x"], [], 10)["x"] for one in (x, *away)]
        assert told[1] == told[2] == told[3]
        moved += told[0] != told[1]
    assert moved < 0.05 * 200


def test_sums_do_not_tell_how_many_rows_there_are() -> None:
    """Of a column of zeros and ones, of which an exact mean would."""
    assert len({tell({"x": np.arange(rows) % 2 * 1.0}, ["x"], [], 10)["x"][:3] for rows in range(40, 50)}) == 1
    exact = tell({"x": np.array([1.0, 2.0, 4.0])}, ["x"], [], 1)["x"]
    assert exact == Told(3, 7.0, 21.0, {}, False)


def test_sums_are_near_those_of_the_rows() -> None:
    """Enough to centre and scale by: of counts, of skewed numbers, of rare ones and zeros."""
    rng = np.random.default_rng(7)
    columns = (rng.normal(60, 9, 400), rng.poisson(2.0, 400), rng.exponential(3.0, 400), 1.0 * (rng.random(400) < 0.05))
    for x in columns:
        told = tell({"x": x}, ["x"], [], 10)["x"]
        mean = told.total / told.rows
        assert abs(mean - x.mean()) < 0.5 * x.std()
        assert 0.5 < np.sqrt(told.squares / told.rows - mean**2) / x.std() < 1.5


def test_a_constant_tells_no_number_of_rows() -> None:
    assert len({tell({"x": np.full(n, 0.1)}, ["x"], [], 10)["x"][:3] for n in range(50, 60)}) == 1


def test_what_is_told_again_tells_nothing_new() -> None:
    """It is made of what was told before, and has nothing of fewer rows than are wanted now."""
    rng = np.random.default_rng(2)
    for _ in range(200):
        arm = rng.choice(["a", "b", "c", "d"], rng.integers(1, 80), p=[0.6, 0.3, 0.07, 0.03]).astype(object)
        rows = {"arm": arm, "x": rng.normal(50, 3, len(arm)), "died": 1.0 * (rng.random(len(arm)) < 0.05)}
        first = tell(rows, list(rows), [], 5)
        for one in (*first.values(), *(raised(one, 12) for one in first.values())):
            least = 5 if one in first.values() else 12
            for count in (one.rows, *one.levels.values()):
                assert count == 0 or count >= least
            assert one.text or not (one.withheld and one.total)
            assert sum(one.levels.values()) <= one.rows


def test_a_column_is_told_once(tmp_path: Path) -> None:
    """Whatever the rows are by then, however few rows the server wants, and in another formula too."""
    data = sites()
    first = FakeGrid(nodes_of(data, tmp_path))
    agree(first)
    data["north"] = {name: values[:-1] for name, values in data["north"].items()}
    again = FakeGrid(nodes_of(data, tmp_path))
    agree(again, min_count=2)
    assert told(again) == told(first)
    higher = FakeGrid(nodes_of(data, tmp_path))
    agree(higher, min_count=25)
    assert told(higher)["north"]["arm"] == [25, 0.0, 0.0, {}, True, True]  # of fewer rows than are wanted now
    other = fedppl.formula("y ~ age + (1 | site)")
    narrower = FakeGrid(nodes_of(data, tmp_path, other))
    agree(narrower, other)
    assert told(narrower)["north"] == {name: told(first)["north"][name] for name in ("age", "y")}
    lines = [line for line in audit.lines(tmp_path / "north") if not line["refused"]]
    assert [line["event"] for line in lines] == ["request", "reply", *["agreement"] * 3]
    assert lines[1]["released"] == {"age": 4, "arm": 4, "y": 4, "arm[drug]": 1, "arm[none]": 1}
    ledger = stored.ledger(tmp_path / "north", "north")
    assert (ledger.requests, ledger.unknown) == (1, 1)


def test_the_larger_of_two_rules_holds(tmp_path: Path) -> None:
    data = sites()
    strict = {
        "north": Policy(sums="optional", rows=0, few_rows=0, agreement=45),
        "south": Policy(sums="optional", rows=0, few_rows=0, agreement=math.inf),
        "west": Policy(sums="optional", epsilon=1.0),
    }
    grid = FakeGrid({**nodes_of(data, tmp_path, policies=strict)})
    with pytest.raises(DataError, match="no client can send a summary of column 'age'"):
        agree(grid)
    silent = [0, 0.0, 0.0, {}, False, False]
    assert {name: one["age"] for name, one in told(grid).items()} == dict.fromkeys(data, silent)
    for name, requests in {"north": 1, "south": 0, "west": 0}.items():  # who looks at no row has told nothing
        ledger = stored.ledger(tmp_path / name, name)
        assert (ledger.requests, ledger.unknown) == (requests, requests)


def incomplete() -> dict[str, Any]:
    rows = sites()["north"]
    return {**rows, "age": np.where(np.arange(40) < 1, np.nan, rows["age"])}


def unprintable() -> dict[str, Any]:
    return {**sites()["north"], "arm": np.array(["a\nb", "c"] * 20, dtype=object)}


REFUSING: dict[str, tuple[Any, Policy]] = {
    "asked enough": (lambda: sites()["north"], Policy(sums="optional", rows=0, few_rows=0, requests=1)),
    "not approved": (
        lambda: sites()["north"],
        Policy(sums="optional", rows=0, few_rows=0, approval=lambda release: False),
    ),
    "not in the file": (lambda: sites()["north"], Policy(sums="optional", rows=0, few_rows=0, approval="runs.txt")),
    "values are missing": (incomplete, OPEN),
    "levels that cannot be written": (unprintable, OPEN),
}


@pytest.mark.parametrize("case", REFUSING)
def test_refusals_are_the_same_words(case: str, tmp_path: Path) -> None:
    load, policy = REFUSING[case]
    grid = FakeGrid(nodes_of({"north": load()}, tmp_path, policies={"north": policy}))
    if case == "asked enough":  # for another formula, which has used up the one request
        other = fedppl.formula("arm ~ age", "bernoulli")
        rules = {"north": policy}
        agree(FakeGrid(nodes_of({"north": load()}, tmp_path, other, rules)), other, clients=1)
    with pytest.raises(DeclarationError, match="only 0 of 1 sites told.*north"):
        agree(grid, clients=1)
    assert {one["refused"] for one in replies(grid)} == {REFUSED}
    assert not told(grid)


def test_an_approval_is_shown_what_leaves(tmp_path: Path) -> None:
    shown: list[Any] = []
    rules = Policy(sums="optional", rows=0, few_rows=0, agreement=5, approval=lambda release: not shown.append(release))
    agree(FakeGrid(nodes_of({"north": sites()["north"]}, tmp_path, policies={"north": rules})), clients=1)
    (release,) = shown
    assert release.run == named(MODEL) and set(release.arrays) == {"age", "arm", "y", "arm[drug]", "arm[none]"}


@pytest.mark.parametrize("clients", [2, 3, 5, 6])
def test_a_site_that_claims_more_rows_than_all_others_counts_for_few_and_is_named(clients: int) -> None:
    honest = Told(200, 200 * 60.0, 200 * (60.0**2 + 9.0**2), {}, False)
    lies = Told(10**9, 10**9 * 90.0, 10**9 * (90.0**2 + 9.0**2), {}, False)
    arms = Told(200, 0.0, 0.0, {"drug": 100, "none": 100}, False, True)
    told = {f"site {k}": {"age": honest, "arm": arms, "y": honest} for k in range(clients - 1)}
    told["liar"] = {"age": lies, "arm": Told(10**9, 0.0, 0.0, {"drug": 10**9}, False, True), "y": honest}
    found = of_told(MODEL, told, "other", believed=False)
    mean, sd = found.columns.loc["age", ["mean", "sd"]].astype(float)
    if clients >= 5:
        assert (mean, sd) == pytest.approx((60.0, 9.0))
    else:
        assert mean <= 60 + 30 * 10 / (clients + 9) + 1e-9
    shares = found.model.agreement.columns["arm"].shares
    assert shares[1] >= 0.5 * (clients - 1) / (clients + 9)
    assert any("'liar' tells of 1000000000 rows, the median of the others is 200" in one for one in found.strange)
    here = of_told(MODEL, told, "other")
    assert here.columns.loc["age", "mean"] == pytest.approx(90.0, abs=1e-3)  # all data are the caller's own


def test_sites_of_very_different_sizes_agree_on_what_they_have() -> None:
    rng = np.random.default_rng(3)
    told = {}
    for k, rows in enumerate((250, 300, 400, 900, 2000, 20_000)):
        data = {
            "age": rng.normal(60 + k, 9, rows),
            "arm": rng.choice(["drug", "none"], rows),
            "y": rng.normal(size=rows),
        }
        told[f"site {k}"] = tell(data, ["age", "arm", "y"], [], 10)
    found = of_told(MODEL, told, "other", believed=False)
    mean, sd = found.columns.loc["age", ["mean", "sd"]].astype(float)
    assert 58 < mean < 67 and 6 < sd < 13
    assert all("rows" in one for one in found.strange)


def test_a_column_that_a_site_lacks_is_named(tmp_path: Path) -> None:
    data = {name: {k: v for k, v in rows.items() if (name, k) != ("west", "arm")} for name, rows in sites().items()}
    with pytest.raises(DeclarationError, match=r"'west' was refused: .*lacks the columns \['arm'\]"):
        agree(FakeGrid(nodes_of(data, tmp_path)))


def test_columns_that_are_swapped_at_a_site_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = sites()
    data["west"] |= {"age": data["west"]["y"], "y": data["west"]["age"]}
    found = agree(FakeGrid(nodes_of(data, tmp_path)))
    assert found.strange and all("at client 'west'" in one for one in found.strange)
    assert "may be swapped" in caplog.text


def test_rare_outcomes_are_no_outcome_of_their_own(tmp_path: Path) -> None:
    """A response has no level "other": its levels are those that enough rows have somewhere, or that the user says."""
    rows = {name: {**one, "died": np.where(np.arange(len(one["y"])) < 3, "yes", "no")} for name, one in DATA.items()}
    model = fedppl.formula("died ~ age", "bernoulli")
    with pytest.raises(DataError, match=r"formula\(levels="):
        agree(FakeGrid(nodes_of(rows, tmp_path, model)), model)
    said = fedppl.formula("died ~ age", "bernoulli", levels={"died": ["no", "yes"]})
    found = agree(FakeGrid(nodes_of(rows, tmp_path, said)), said)
    assert found.columns.loc["died", "levels"] == ("no", "yes")
    rows["north"]["died"] = np.where(np.arange(40) < 20, "yes", "no")
    found = agree(FakeGrid(nodes_of(rows, tmp_path / "anew", model)), model)
    assert found.columns.loc["died", "levels"] == ("no", "yes")


def test_a_site_that_will_take_no_part_tells_nothing(tmp_path: Path) -> None:
    """Its rows are fewer than its policy wants: the same bit as its introduction."""
    data = sites()
    grid = FakeGrid(nodes_of(data, tmp_path, policies={"north": Policy(sums="optional", rows=41)}))
    agree(grid)
    assert {name: one["age"][0] > 0 for name, one in told(grid).items()} == {
        "north": False,
        "south": True,
        "west": True,
    }


# --- what a site holds against an agreement -------------------------------------------------------------------


def agreement(**changes: Any) -> Agreement:
    columns = {"age": Column((), (), 60.0, 9.0), "arm": Column(("drug", "none"), (0.5, 0.5), 0.0, 1.0)}
    return Agreement({**columns, "y": Column((), (), 5.0, 1.5), **changes}, 180, False)


APART: dict[str, Agreement] = {
    "a level that is not in it": agreement(arm=Column(("drug", "surgery"), (0.5, 0.5), 0.0, 1.0)),
    "numbers for levels": agreement(arm=Column((), (), 0.5, 0.5)),
    "levels for numbers": agreement(age=Column(("60", "61"), (0.5, 0.5), 0.0, 1.0)),
    "a prior that reaches anywhere": agreement(age=Column((), (), 60.0, 0.1)),
    "a mean that is elsewhere": agreement(age=Column((), (), 1e6, 9.0)),
    "outcomes of another size": agreement(y=Column((), (), 5.0, 1e4)),
}


def taken(folder: Path, found: Agreement | str, rules: Policy = OPEN, rows: Any = None) -> str:
    """The digest that a site keeps."""
    text = found if isinstance(found, str) else wire.pack_agreement(found)
    with store.changing(folder) as here:
        guard = in_store(rules, here, "north")
        accept(MODEL, lambda: rows or DATA["north"], "north", {"agreement": text}, store.memory(here), guard)
        return declared(MODEL, store.memory(here), "north")[1]


def test_a_site_keeps_the_last_agreement_that_goes_with_its_rows(tmp_path: Path) -> None:
    assert taken(tmp_path, agreement()) == wire.digest(agreement())
    other = agreement(age=Column((), (), 61.0, 9.5))
    assert taken(tmp_path, other) == wire.digest(other)
    assert declared(MODEL, stored.memory(tmp_path), "north")[0].agreement == other


def with_surgery(few: int) -> dict[str, Any]:
    rows = DATA["north"]
    return {**rows, "arm": np.where(np.arange(40) < few, "surgery", rows["arm"])}


def test_a_site_shows_by_nothing_that_few_rows_have_a_level_that_nobody_told(tmp_path: Path) -> None:
    """They are left out: of a level of their own they would show in the replies, refused in that it stays away."""
    closed = agreement()
    others = agreement(arm=Column(("drug", "none", "other"), (0.5, 0.4, 0.1), 0.0, 1.0))._replace(others=True)
    for name, one in {"closed": closed, "others": others}.items():
        for few in range(5):
            folder = tmp_path / f"{name} {few}"
            assert taken(folder, one, rows=with_surgery(few)) == wire.digest(one)
            model = declared(MODEL, stored.memory(folder), "north")[0]
            used = model.read("north", without_rare(model, with_surgery(few), OPEN, "north"))
            kept = model.read("north", {key: values[few:] for key, values in DATA["north"].items()})
            assert all(np.array_equal(used[key], kept[key]) for key in kept)
    assert taken(tmp_path / "many", others, rows=with_surgery(5)) == wire.digest(others)
    model = declared(MODEL, stored.memory(tmp_path / "many"), "north")[0]
    assert without_rare(model, with_surgery(5), OPEN, "north")["arm"][0] == "surgery"  # of the level "other"
    with pytest.raises(DeclarationError, match="takes no part"):
        taken(tmp_path / "refused", closed, rows=with_surgery(5))


def test_a_site_without_a_folder_keeps_it_in_its_node() -> None:
    context = node(object(), 0).context  # type: ignore[arg-type]
    accept(
        MODEL, lambda: DATA["north"], "north", {"agreement": wire.pack_agreement(agreement())}, in_node(context), None
    )
    assert declared(MODEL, in_node(context), "north")[1] == wire.digest(agreement())


@pytest.mark.parametrize("case", APART)
def test_a_site_takes_no_part_with_what_is_far_from_its_rows(case: str, tmp_path: Path) -> None:
    with pytest.raises(DeclarationError) as caught:
        taken(tmp_path, APART[case])
    assert "takes no part" in str(caught.value) and declared(MODEL, stored.memory(tmp_path), "north")[1] == ""
    *_, last = audit.lines(tmp_path)
    assert last["refused"].startswith("agreement: ")
    with pytest.raises(DeclarationError, match="takes no part"):  # the same again costs nothing
        taken(tmp_path, APART[case])
    assert stored.ledger(tmp_path, "north").requests == 1


def test_agreements_are_counted_and_refused_in_the_same_words(tmp_path: Path) -> None:
    """Each may tell a bit of the rows: whether they go with it."""
    said = set()
    for place in range(5):
        try:
            taken(tmp_path, agreement(age=Column((), (), 60.0, 0.1 + place)), Policy(sums="optional", requests=3))
        except DeclarationError as error:
            said.add(str(error))
    assert len(said) == 1
    *_, last = audit.lines(tmp_path)
    assert last["refused"].startswith("requests: 3 answered")


def test_few_agreements_that_do_not_go_with_the_rows_are_looked_at(tmp_path: Path) -> None:
    """By an expression such as log(4 - scale(age)) each could tell a bit of one row."""
    for mean in (1e6, 2e6, 3e6):
        with pytest.raises(DeclarationError, match="takes no part"):
            taken(tmp_path, agreement(age=Column((), (), mean, 9.0)))
    *_, last = audit.lines(tmp_path)
    assert "2 did not go with the rows" in last["refused"]
    with pytest.raises(DeclarationError, match="takes no part"):
        taken(tmp_path, agreement())


def test_under_an_epsilon_no_row_decides(tmp_path: Path) -> None:
    rules = Policy(sums="optional", rows=0, few_rows=0, epsilon=1.0)
    others = agreement(arm=Column(("drug", "none", "other"), (0.5, 0.4, 0.1), 0.0, 1.0))._replace(others=True)
    for place, rows in enumerate((DATA["north"], {**DATA["north"], "age": DATA["north"]["age"] + 1e9})):
        folder = tmp_path / str(place)
        assert taken(folder, others, rules, rows) == wire.digest(others)
        with pytest.raises(DeclarationError, match="takes no part"):  # one
            taken(folder, agreement(), rules, rows)
    with pytest.raises(DeclarationError, match="takes no part"):  # whether rows have other levels is not told
        taken(tmp_path / "open", agreement(), rules)


BROKEN = [
    ("{}", "agreement"),
    ("[" * 9, "nested"),
    (json.dumps({"columns": {}, "rows": 1, "others": False}), "columns"),
    (wire.pack_agreement(agreement(age=Column((), (), math.inf, 1.0))), "finite"),
    (wire.pack_agreement(agreement(age=Column((), (), 1e200, 1.0))), "expected a number"),
    (wire.pack_agreement(agreement(age=Column((), (), 0.0, 0.0))), "above 0"),
    (wire.pack_agreement(agreement(arm=Column(("a", "a"), (0.5, 0.5), 0.0, 1.0))), "twice"),
    (wire.pack_agreement(agreement(arm=Column(("a",), (1.0,), 0.0, 1.0))), "1 levels"),
    (wire.pack_agreement(agreement(arm=Column(("a", "b" * 300), (0.5, 0.5), 0.0, 1.0))), "characters"),
    (wire.pack_agreement(agreement(arm=Column(("a", "b"), (0.5, 0.9), 0.0, 1.0))), "parts of 1"),
    (wire.pack_agreement(agreement(arm=Column(tuple(map(str, range(1001))), (1 / 1001,) * 1001, 0.0, 1.0))), "1000 at"),
]


@pytest.mark.parametrize(("text", "told"), BROKEN)
def test_an_agreement_that_is_none_is_malformed(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(Malformed, match=told):
        wire.unpack_agreement({"agreement": text}, asked(MODEL.builder).names)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="takes no part"):
        taken(tmp_path, text)
    assert not stored.lines(tmp_path)  # nothing was looked at


def test_what_is_written_is_read() -> None:
    names = asked(MODEL.builder).names  # type: ignore[arg-type]
    assert wire.unpack_agreement({"agreement": wire.pack_agreement(agreement())}, names) == agreement()
    given = {name: Told(7, 1.0, 1.0, {}, False) for name in names} | {"arm": Told(7, 0.0, 0.0, {"a": 7}, False, True)}
    assert wire.unpack_told({"told": wire.pack_told(given)}, names) == given


IMPOSSIBLE = [
    ([7, 10.0, 1.0, {}, False, False], "sum of squares"),
    ([7, math.nan, 1.0, {}, False, False], "finite"),
    ([-7, 1.0, 1.0, {}, False, False], "expected a count"),
    ([7.5, 1.0, 1.0, {}, False, False], "expected a count"),
    ([True, 1.0, 1.0, {}, False, False], "expected a count"),
    ([0, 1.0, 1.0, {}, False, False], "does not tell"),
    ([7, 1.0, 1.0, {"a": 1}, False, False], "levels too"),
    ([7, 1.0, 1.0, {}, 0, False], "expected a flag"),
    ([7, 0.0, 0.0, {"a": 5, "b": 3}, False, True], "7 rows"),
    ([7, 1.0, 1.0, {"a": 7}, False, True], "sums too"),
    ([7, 0.0, 0.0, {"": 7}, False, True], "characters"),
    ([7, 0.0, 0.0, {"a": "x"}, False, True], "expected a count"),
    ([7, 0.0], "no list"),
    ("7", "no list"),
]


@pytest.mark.parametrize(("given", "said"), IMPOSSIBLE)
def test_what_no_rows_could_have_is_refused(given: Any, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        wire.unpack_told({"told": json.dumps({"age": given})}, ["age"])


RESPONSES = {
    "gaussian": "y",
    "bernoulli": "died",
    "binomial": "prop(died, of)",
    "poisson": "cases",
    "gamma": "cost",
    "beta": "share",
    "ordinal": "pain",
    "categorical": "pain",
    "weibull": "Surv(cost, died)",
    "lognormal": 'Surv(cost, later, "interval")',
}


@pytest.mark.parametrize("family", RESPONSES)
def test_the_server_knows_the_model_from_rows_of_nobody(family: str) -> None:
    """Made up from what was agreed on, they build the model that sites build, and sites find nothing against it."""
    rng = np.random.default_rng(4)
    rows = {
        "age": rng.normal(60, 9, 60),
        "arm": rng.choice(["a", "b"], 60).astype(object),
        "ward": rng.choice(["x", "y"], 60).astype(object),
        "pain": rng.choice(["some", "little", "much"], 60).astype(object),
        "y": rng.normal(size=60),
        "died": rng.integers(0, 2, 60),
        "of": np.full(60, 3),
        "cases": rng.poisson(2.0, 60),
        "cost": rng.exponential(3.0, 60) + 0.1,
        "share": rng.uniform(0.1, 0.9, 60),
    }
    rows["later"] = rows["cost"] + 1.0
    right = "age * arm + (1 + age | site) + (1 | site/ward)"
    levels = {"levels": {"pain": ["little", "some", "much"]}} if "pain" in RESPONSES[family] else {}
    model = fedppl.formula(f"{RESPONSES[family]} ~ {right}", family, weights="of", **levels)
    data = {name: {k: np.roll(v, place) for k, v in rows.items()} for place, name in enumerate("abc")}
    built = fedppl.agree(model, data).model
    there, here = (built.builder(**built.read("a", one)) for one in (example(built.builder), rows))  # type: ignore[arg-type]
    for part in ("free_RVs", "observed_RVs"):
        assert [one.name for one in getattr(there, part)] == [one.name for one in getattr(here, part)]
    assert {name: list(there.coords[name]) for name in there.coords} == {
        name: list(here.coords[name]) for name in here.coords
    }
    assert contradiction(built.builder, rows, built.read("a", rows)) is None  # type: ignore[arg-type]


# --- versions of the data ---


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fit ended:fedppl.ConvergenceWarning")
def test_a_site_that_lacks_one_patient_of_an_earlier_run_takes_no_part(tmp_path: Path) -> None:
    """Nor in another formula; with as many changed rows as its policy wants it does."""
    rng, data = np.random.default_rng(9), sites()

    def fitted(rows: Mapping[str, Any], model: Any) -> str:
        grid = FakeGrid(nodes_of(rows, tmp_path, model))
        try:
            found = agree(grid, model)
            engine = fedppl.Flower.grid(
                grid, clients=3, model=found.model, wait=0.3, deadline=5.0, poll=0.001, grace=0.01
            )
            fedppl.fit(found.model, None, fedppl.EP(), engine=engine, rounds=1, progressbar=False, random_seed=1)
        except DeclarationError as error:
            return str(error)
        return ""

    frames = {name: pd.DataFrame(rows) for name, rows in data.items()}
    assert fitted(frames, MODEL) == ""
    less = {**frames, "west": frames["west"].iloc[1:]}
    assert "'west' does not take part under the policy" in fitted(less, fedppl.formula("y ~ age"))
    *_, last = audit.lines(tmp_path / "west")
    assert last["refused"].startswith("changed_rows: 1 since version 1 of 1")
    more = frames["west"].assign(age=rng.normal(60, 9, 80), y=rng.normal(5, 1, 80))
    assert fitted({**frames, "west": more}, MODEL) == ""


# --- the server -----------------------------------------------------------------------------------------------


def test_sites_that_cannot_be_believed_are_named(tmp_path: Path) -> None:
    def changed(message: Any, node_id: int) -> Any:
        def reply(answer: Any) -> Any:
            record = answer.content.config_records["texts"]
            if node_id == 10:
                record["version"] = "0.0"
            elif node_id == 11:
                record["told"] = "[1"
            return answer

        return reply

    with pytest.raises(DeclarationError) as caught:
        agree(FakeGrid(nodes_of(DATA, tmp_path), changed))
    for part in ("only 1 of 3 sites", "'north' was refused: it runs fedppl 0.0", "'south' was refused: what it tells"):
        assert part in str(caught.value)


def test_a_site_is_not_asked_again_that_has_told(tmp_path: Path) -> None:
    grid = FakeGrid(nodes_of(DATA, tmp_path))
    agree(grid, clients=list(DATA))
    assert len(grid.sent) == 3
    with pytest.raises(DeclarationError, match=r"not among the expected clients \['north'"):
        agree(FakeGrid(nodes_of(DATA, tmp_path)), clients=["north", "east"])


def test_a_formula_has_to_be_agreed_on_before_the_engine_takes_it() -> None:
    with pytest.raises(DeclarationError, match=r"fedppl.Flower.agree\(grid"):
        fedppl.Flower.grid(FakeGrid({}), clients=1, model=MODEL)
    agreed = fedppl.agree(MODEL, DATA).model
    with pytest.raises(DeclarationError, match="no formula to agree on"):
        agree(FakeGrid({}), agreed)
