"""Agreement on a formula by sums under masks: what comes of it, what the server is sent, and what it is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("flwr")

from flwr.app import Message as FlowerMessage

import fedppl
from fedppl import DataError, DeclarationError, Policy, audit, gaussian, site
from fedppl.engine import secure
from fedppl.engine.guard import REFUSED
from fedppl.flower.messages import to_content, unread
from fedppl.formulas.exchange import flat, in_sum, of_sum, sizes
from fedppl.sites import AGREE, ASK, GREET, HELLO, JOIN, masks, parcel_of, wire
from fedppl.sites.site_agreement import named
from tests.support import stored
from tests.support.fake_grid import FakeGrid, node

NAMES = ("north", "south", "west")
WARDS = ("a", "b", "c")
OPEN = Policy(rows=0, few_rows=0, parameters_per_row=math.inf, events=0, requests=200, distance=math.inf, agreement=5)
MODEL = fedppl.formula("y ~ age + ward + (1 | site)", levels={"ward": WARDS})


def sites() -> dict[str, dict[str, Any]]:
    rng, found = np.random.default_rng(5), {}
    for place, name in enumerate(NAMES):
        rows = 40 + 20 * place
        age, ward = rng.normal(60, 9, rows), np.array(WARDS, dtype=object)[np.arange(rows) % 3]
        found[name] = {"age": age, "ward": ward, "y": 1 + 0.05 * age + (ward == "b") + place + rng.normal(size=rows)}
    return found


DATA = sites()


def identities(folder: Path) -> None:
    """A folder for each site's identity, with all on all rosters; once."""
    if (folder / NAMES[0] / "identity").exists():
        return
    lines = [site.make(folder / name, name) for name in NAMES]
    for name, line in itertools.product(NAMES, lines):
        if not line.startswith(f"{name} "):
            site.add(folder / name, line)


def grid_of(
    folder: Path,
    data: Mapping[str, Any] = DATA,
    model: Any = MODEL,
    policies: Mapping[str, Policy] | None = None,
    fault: Any = None,
) -> FakeGrid:
    identities(folder)
    app = fedppl.Flower.client_app(
        model,
        fedppl.Sums(),
        lambda config: data[config["client-id"]],
        folder=lambda config: folder / f"at {config['client-id']}",
        policy=lambda config: (policies or {}).get(config["client-id"], OPEN),
        secure=lambda config: folder / str(config["client-id"]),
        draws=20,
        chains=1,
    )
    return FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(NAMES)}, fault)


def agree(grid: FakeGrid, model: Any = MODEL, clients: Any = 3, **keywords: Any) -> fedppl.formulas.formula.Agreed:
    settings = {"wait": 2.0, "poll": 0.001, "secure": True, **keywords}
    found: fedppl.formulas.formula.Agreed = fedppl.Flower.agree(grid, model, clients=clients, **settings)
    return found


def words_of(grid: FakeGrid) -> list[np.ndarray]:
    """Words that sites have sent before a run, by the sites' names."""
    contents = [parcel_of(unread(reply)) for reply in grid.replies]
    before = {texts["client_id"]: arrays for arrays, texts in contents if masks.WORDS in arrays and "version" in texts}
    return [np.asarray(arrays[masks.WORDS]).view(np.uint64) for _, arrays in sorted(before.items())]


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(audit.lines(folder / f"at {name}"))


def bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8))


# What comes of it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [3, list(NAMES)])
def test_sums_agree_on_what_all_rows_together_do(clients: Any, tmp_path: Path) -> None:
    here, there = fedppl.agree(MODEL, DATA), agree(grid_of(tmp_path), clients=clients)
    assert there.clients == NAMES and there.strange == here.strange
    assert list(there.columns["levels"]) == list(here.columns["levels"])
    assert_allclose(there.columns[["mean", "sd"]].astype(float), here.columns[["mean", "sd"]].astype(float), rtol=1e-9)
    shares = [found.model.agreement.columns["ward"].shares for found in (here, there)]
    assert_allclose(*shares, rtol=1e-12)


def test_sites_fit_by_sums_alone_what_pooled_data_fit(tmp_path: Path) -> None:
    """By a server app, from the formula to the end: every number that leaves is under masks."""
    here = fedppl.fit(fedppl.agree(MODEL, DATA).model, DATA, fedppl.Sums(), progressbar=False, random_seed=1)
    seen: list[Any] = []
    app = fedppl.Flower.server_app(
        MODEL, fedppl.Sums(), clients=3, secure=True, on_fit=lambda result, context: seen.append(result)
    )
    grid = grid_of(tmp_path)
    context = node(grid.nodes[10].app, 0).context
    context.run_config = {"random_seed": 1, "wait": 60.0, "deadline": 60.0}
    app(grid, context)
    (there,) = seen
    sd = gaussian.standard_deviations(here.posterior)
    assert there.status is here.status is fedppl.Status.CONVERGED
    assert_allclose(gaussian.mean(there.posterior) / sd, gaussian.mean(here.posterior) / sd, rtol=0, atol=1e-6)
    assert_allclose(gaussian.standard_deviations(there.posterior), sd, rtol=1e-6)
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds.count(AGREE) == 6 and kinds.count(ASK) == 3 * len(there.records)
    noise = np.concatenate([bits(words) for words in words_of(grid)])
    assert abs(noise.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(noise))


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9, 1e40])
def test_columns_of_any_size_are_summed(scale: float, tmp_path: Path) -> None:
    data = {name: {**rows, "age": rows["age"] * scale} for name, rows in DATA.items()}
    age = agree(grid_of(tmp_path, data)).columns.loc["age"]
    together = np.concatenate([rows["age"] for rows in data.values()])
    assert_allclose([float(age["mean"]), float(age["sd"])], [together.mean(), together.std()], rtol=1e-9)


def test_a_square_that_overflows_is_named_and_not_a_number(tmp_path: Path) -> None:
    data = {**DATA, "west": {**DATA["west"], "age": DATA["west"]["age"] * 1e160}}
    with pytest.raises(DataError, match="'age'.*another unit"):
        agree(grid_of(tmp_path, data))


@pytest.mark.parametrize("few", [1, 4])
def test_a_level_of_few_rows_of_all_is_withheld(few: int, tmp_path: Path) -> None:
    """Though it is named beforehand; as many as the strictest policy and the server want are enough."""
    model = fedppl.formula("y ~ age + ward + (1 | site)", levels={"ward": ["z", *WARDS, "unused"]})
    ward = np.where(np.arange(60) < few, "z", DATA["south"]["ward"])
    data = {**DATA, "south": {**DATA["south"], "ward": ward}}
    found = agree(grid_of(tmp_path, data, model), model)
    assert found.columns.loc["ward", "levels"] == (*WARDS, "other")
    assert_allclose(found.model.agreement.columns["ward"].shares[-1], few / 180)
    with pytest.raises(DataError, match="'ward'.*too few rows"):
        agree(grid_of(tmp_path, data, model), model, withheld="error")
    loose = dict.fromkeys(NAMES, dataclasses.replace(OPEN, agreement=few))
    found = agree(grid_of(tmp_path, data, model, loose), model)
    assert found.columns.loc["ward", "levels"] == ("z", *WARDS)
    one_strict = {**loose, "north": dataclasses.replace(OPEN, agreement=few + 1)}
    found = agree(grid_of(tmp_path, data, model, one_strict), model)
    assert found.columns.loc["ward", "levels"] == (*WARDS, "other")
    found = agree(grid_of(tmp_path, data, model, loose), model, min_count=few + 1)
    assert found.columns.loc["ward", "levels"] == (*WARDS, "other")


def test_numbers_of_few_rows_are_refused(tmp_path: Path) -> None:
    """The cohort has 180 rows, and four times 45 are needed."""
    enough = dict.fromkeys(NAMES, dataclasses.replace(OPEN, agreement=45))
    agree(grid_of(tmp_path, policies=enough))
    strict = {**enough, "west": dataclasses.replace(OPEN, agreement=46)}
    with pytest.raises(DataError, match="'age'.*min_count"):
        agree(grid_of(tmp_path, policies=strict))


def test_outcomes_keep_their_levels_and_are_all_to_be_named(tmp_path: Path) -> None:
    """A rare outcome is an outcome; and of those whose scale no prior needs no sums leave."""
    died = {name: np.where(np.arange(len(rows["y"])) < 1, "yes", "no") for name, rows in DATA.items()}
    data = {name: {**rows, "died": died[name]} for name, rows in DATA.items()}
    model = fedppl.formula("died ~ age", "bernoulli", levels={"died": ["no", "yes"]})
    found = agree(grid_of(tmp_path, data, model), model)
    assert found.columns.loc["died", "levels"] == ("no", "yes")
    assert_allclose(found.model.agreement.columns["died"].shares, [177 / 180, 3 / 180])
    data["south"]["died"] = np.where(np.arange(60) < 30, "perhaps", "no")
    with pytest.raises(DataError, match="name them too"):
        agree(grid_of(tmp_path, data, model), model)
    ones = {name: {**rows, "died": (np.arange(len(rows["y"])) < 9) * 1.0} for name, rows in DATA.items()}
    numbers = fedppl.formula("died ~ age", "bernoulli")
    assert sizes(numbers.builder) == (1, 2)  # type: ignore[arg-type]
    assert agree(grid_of(tmp_path, ones, numbers), numbers).model.agreement.rows == 180


def test_a_summary_is_what_was_summed() -> None:
    built: Any = MODEL.builder
    parts = [flat(built, in_sum(built, rows)) for rows in DATA.values()]
    counts = np.sum([counts for counts, _ in parts], axis=0).tolist()
    sums = np.sum([sums for _, sums in parts], axis=0).tolist()
    together = {name: np.concatenate([rows[name] for rows in DATA.values()]) for name in ("age", "ward", "y")}
    found = of_sum(built, counts, sums, 1)
    assert found["age"].total == pytest.approx(together["age"].sum()) and not found["age"].withheld
    assert found["y"].squares == pytest.approx(np.sum(together["y"] ** 2))
    assert found["ward"].levels == {ward: np.sum(together["ward"] == ward) for ward in WARDS}
    assert (len(counts), len(sums)) == sizes(built) == (4, 4)


# What the server is sent ----------------------------------------------------------------------------------------------


def test_the_server_is_sent_the_cohort_s_counts_and_no_site_s(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    agree(grid)
    parts = words_of(grid)
    assert len(parts) == 3
    assert_array_equal(secure.added(parts)[:4], [180, 61, 60, 59])
    noise = np.concatenate([bits(words) for words in parts])
    assert abs(noise.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(noise))
    assert all(min(words[:4]) > 2**40 for words in (*parts, secure.added(parts[:2])))
    for reply in grid.replies:
        _, texts = parcel_of(unread(reply))
        assert set(texts) in ({"client_id", "version"}, {"client_id", "version", "fewest", *secure.Greeting._fields})


def test_it_is_answered_alike_whenever_it_is_asked_and_counted_once(tmp_path: Path) -> None:
    """A lost answer, and a site that was killed: nothing but a file is kept, and the words are the same without it."""
    grid = grid_of(tmp_path)
    agree(grid)
    again = grid_of(tmp_path)
    agree(again)
    for name in NAMES:
        stored.execute(tmp_path / f"at {name}", "DELETE FROM state WHERE name = ?", f"{name}.added")
    without = grid_of(tmp_path)
    agree(without)
    assert_array_equal(words_of(again), words_of(grid))
    assert_array_equal(words_of(without), words_of(grid))
    # The cohort, and the summary, which was counted anew without the row.
    assert stored.ledger(tmp_path / "at north", "north").requests == 1 + 2
    events = [line["event"] for line in lines_of(tmp_path, "north")]
    assert events == ["cohort", "request", "reply", "agreement", "request", "reply"]
    assert lines_of(tmp_path, "north")[2]["released"] == {"age": 4, "ward": 4, "y": 4} | {
        f"ward[{w}]": 1 for w in WARDS
    }


def greetings(grid: FakeGrid) -> list[secure.Greeting]:
    texts = (send(grid, place)[1] for place in range(3))
    return [masks.unpack_greeting(one, name) for one, name in zip(texts, NAMES, strict=True)]


def send(grid: FakeGrid, place: int, cohort: list[secure.Greeting] | None = None, model: Any = MODEL) -> Any:
    """What a site answers to a server's question for its greeting, or for its part of a cohort's sum."""
    texts = {"run": named(model)} | ({} if cohort is None else masks.pack_cohort(cohort))
    question = FlowerMessage(content=to_content({}, texts), dst_node_id=1, message_type=AGREE, ttl=60.0)
    question.metadata.__dict__["_message_id"] = "1"
    one = grid.nodes[10 + place]
    return parcel_of(unread(one.app(question, one.context)))


def part(grid: FakeGrid, place: int, cohort: list[secure.Greeting]) -> np.ndarray:
    return np.asarray(send(grid, place, cohort)[0][masks.WORDS]).view(np.uint64)


def refusal(folder: Path, grid: FakeGrid, cohort: list[secure.Greeting]) -> str:
    """The rule by which the first site refuses a cohort."""
    arrays, texts = send(grid, 0, cohort)
    assert not arrays and texts["refused"] == REFUSED
    return str(lines_of(folder, NAMES[0])[-1]["refused"])


def test_a_site_that_was_killed_answers_when_it_is_asked_again(tmp_path: Path) -> None:
    """The cohort and the summary were not counted either, as nothing has left."""
    grid, made = grid_of(tmp_path), list[tuple[str, bytes]]()
    cohort = greetings(grid)
    with stored.killed_while_keeping(".added", made=made, how=SystemExit), pytest.raises(SystemExit):
        send(grid, 0, cohort)
    assert made and stored.ledger(tmp_path / f"at {NAMES[0]}", NAMES[0]).requests == 0
    assert greetings(grid) == cohort
    assert secure.added([part(grid, place, cohort) for place in range(3)])[0] == 180
    assert stored.ledger(tmp_path / f"at {NAMES[0]}", NAMES[0]).requests == 2


def test_changed_rows_are_another_question_under_other_masks(tmp_path: Path) -> None:
    """Otherwise the difference of two answers would be a site's own, also where somebody deletes its files."""
    grid = grid_of(tmp_path)
    cohort = greetings(grid)
    first = [part(grid, place, cohort) for place in range(3)]
    changed = grid_of(tmp_path, {**DATA, "north": {name: values[:-20] for name, values in DATA["north"].items()}})
    others = greetings(changed)
    assert others[0] != cohort[0] and others[1:] == cohort[1:]
    assert refusal(tmp_path, changed, cohort).startswith("sums: ")
    second = [part(changed, place, others) for place in range(3)]
    assert all(np.mean(a == b) < 0.01 for a, b in zip(first, second, strict=True))
    assert secure.added(second)[0] == 160
    one_less = grid_of(tmp_path, {**DATA, "north": {name: values[:-1] for name, values in DATA["north"].items()}})
    assert refusal(tmp_path, one_less, greetings(one_less)).startswith("changed_rows: 1 ")


def test_who_is_sent_another_agreement_than_the_others_has_other_masks(tmp_path: Path) -> None:
    """Otherwise two sums, about the same points, differ by what one site answers under two agreements."""
    grid = grid_of(tmp_path)
    agreement = agree(grid).model.agreement
    age = agreement.columns["age"]
    other = agreement._replace(columns={**agreement.columns, "age": age._replace(sd=1.5 * age.sd)})
    for number, sent in enumerate((agreement, other, agreement)):
        asked = {"agreement": wire.pack_agreement(agreement)}
        for place in range(3):
            texts = {"agreement": wire.pack_agreement(sent)} if place == 0 else asked
            assert "error" not in of_kind(grid, place, HELLO, texts)
        run = f"run {number}"
        keys = [of_kind(grid, place, GREET, masks.ask(name, run)) for place, name in enumerate(NAMES)]
        cohort = [masks.unpack_greeting(key, name) for key, name in zip(keys, NAMES, strict=True)]
        texts = {"run": run, **masks.pack_cohort(cohort)}
        parts = [masks.unpack_part(of_kind(grid, place, JOIN, texts), name) for place, name in enumerate(NAMES)]
        words = secure.added([np.frombuffer(part.words, "<u8").astype(np.uint64) for part in parts])
        total, cut, missing = secure.decoded(words, {"": ((len(words) - 2) // 2,)})
        assert bool(cut == missing == 0 and total[""][0] == 180) is (sent is agreement)


def of_kind(grid: FakeGrid, place: int, kind: str, texts: dict[str, str]) -> dict[str, str]:
    """Texts of a site's answer."""
    question = FlowerMessage(content=to_content({}, texts), dst_node_id=1, message_type=kind, ttl=60.0)
    question.metadata.__dict__["_message_id"] = "1"
    one = grid.nodes[10 + place]
    return dict(parcel_of(unread(one.app(question, one.context)))[1])


# What a site refuses, and what the server does then -------------------------------------------------------------------


def test_a_cohort_is_one_of_the_roster_and_of_the_policy(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    cohort = greetings(grid)
    stranger = secure.greeting(secure.derived_key(secure.Identity.generate(), "west", named(MODEL)))
    for wrong in (cohort[:2], [*cohort[:2], stranger], [*cohort[:2], cohort[1]], cohort[1:]):
        assert refusal(tmp_path, grid, wrong).startswith("sums: ")
    for rules, rule in (
        ({"fewest_sites": 4}, "fewest_sites: "),
        ({"requests": 1}, "requests: "),
        ({"approval": str(tmp_path / "runs.txt")}, "approval: "),
        ({"approval": lambda release: False}, "approval: "),
    ):
        folder = tmp_path / rule.strip(": ") / str(len(rules))
        strict = grid_of(folder, policies={"north": dataclasses.replace(OPEN, **rules)})  # type: ignore[arg-type]
        assert refusal(folder, strict, greetings(strict)).startswith(rule)
    assert secure.added([part(grid, place, cohort) for place in range(3)])[0] == 180  # nothing was fixed by it


def test_columns_whose_levels_are_not_named_are_refused_with_the_remedy(tmp_path: Path) -> None:
    """Those that the declaration calls levels by the server, before any site is asked, and texts by the sites."""
    unnamed = fedppl.formula("y ~ age + C(ward) + (1 | site)")
    grid = grid_of(tmp_path, model=unnamed)
    with pytest.raises(DeclarationError, match="'ward'.*levels="):
        agree(grid, unnamed)
    with pytest.raises(DeclarationError, match="'ward'.*levels="):
        fedppl.Flower.server_app(unnamed, fedppl.Sums(), clients=3, secure=True)
    assert not grid.sent
    texts = fedppl.formula("y ~ age + ward + (1 | site)")
    with pytest.raises(DeclarationError, match="'ward'.*texts.*levels="):
        agree(grid_of(tmp_path, model=texts), texts, wait=0.3)


def test_a_site_with_a_column_of_the_other_kind_takes_no_part_and_logs_why(tmp_path: Path) -> None:
    data = {**DATA, "south": {**DATA["south"], "age": np.full(60, "old", dtype=object)}}
    grid = grid_of(tmp_path, data)
    with pytest.raises(DeclarationError, match=r"only 2 of 3 sites.*'south' was refused"):
        agree(grid, wait=0.3)
    assert lines_of(tmp_path, "south")[-1]["refused"].startswith("sums: ") and not words_of(grid)


@pytest.mark.parametrize("rules", [{"epsilon": 1.0}, {"agreement": math.inf}])
def test_a_policy_that_tells_nothing_ends_the_agreement_in_words(rules: dict[str, Any], tmp_path: Path) -> None:
    grid = grid_of(tmp_path, policies={"west": dataclasses.replace(OPEN, **rules)})
    with pytest.raises(DeclarationError, match=r"'west' was refused.*fedppl.agree"):
        agree(grid, wait=0.3)
    assert not words_of(grid)


def test_another_declaration_is_another_question(tmp_path: Path) -> None:
    other = fedppl.formula("y ~ age + ward + (1 | site)", levels={"ward": ["c", "b", "a"]})
    with pytest.raises(DeclarationError, match="one declaration everywhere"):
        agree(grid_of(tmp_path), other, wait=0.3)


def test_a_site_that_is_absent_is_asked_again(tmp_path: Path) -> None:
    missed = itertools.count()

    def fault(message: FlowerMessage, node_id: int) -> Any:
        return 5 if node_id == 11 and next(missed) in (0, 2) else None  # before its greeting and before its part

    grid = grid_of(tmp_path, fault=fault)
    assert agree(grid, wait=5.0).clients == NAMES
    assert len(grid.sent) == 6 + 2
    gone = grid_of(tmp_path, fault=lambda message, node_id: 5 if node_id == 11 else None)
    with pytest.raises(DeclarationError, match="only 2 of 3.*'south'|only 2 of 3.*not reachable"):
        agree(gone, wait=0.3)


def test_answers_that_are_none_are_refused_and_noise_is_no_sum(tmp_path: Path) -> None:
    changes: list[Any] = [
        lambda words: words[:-1],
        lambda words: words.astype(float),
        lambda words: words + (np.arange(len(words)) == 0),
        lambda words: np.arange(len(words)),
    ]
    errors = ["cannot be read", "cannot be read", "", "cancel|counts of the cohort"]
    for change, error in zip(changes, errors, strict=True):

        def fault(message: FlowerMessage, node_id: int, change: Any = change) -> Any:
            def changed(reply: FlowerMessage) -> FlowerMessage:
                arrays, texts = parcel_of(unread(reply))
                reply.content = to_content({name: change(words) for name, words in arrays.items()}, texts)
                return reply

            return changed if node_id == 11 else None

        grid = grid_of(tmp_path, fault=fault)
        if error:
            with pytest.raises(DeclarationError, match=error):
                agree(grid, wait=0.3)
        else:  # a site that lies by a row is not found out
            agree(grid)


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    with pytest.raises(DeclarationError, match="leave secure= out"):
        agree(grid, clients=2)
    with pytest.raises(DeclarationError, match="True or False"):
        agree(grid, secure="yes")
    assert not grid.sent
    with pytest.raises(DeclarationError, match="only 0 of 3 sites.*refused by its site"):
        agree(grid, secure=False, wait=0.3)
    assert lines_of(tmp_path, "north")[-1]["refused"].startswith("sums: ")
