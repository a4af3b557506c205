"""Checkpoints: what is written is read, what is not ours is refused, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_array_equal

import fedppl
from fedppl import DataError, DeclarationError
from fedppl.contracts import Replies, Result
from fedppl.gaussian import Gaussian
from fedppl.storage import checkpoint, signed
from fedppl.storage import codec as _digest
from fedppl.testing import normal_means
from fedppl.types import Status
from tests import skeleton
from tests.support import crafted, problems
from tests.support.crafted import CONTENT


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.write(path, CONTENT)
    found = checkpoint.load(path)[0]
    assert found.keys() == CONTENT.keys() == checkpoint.CONTENT.keys()
    for name in ("fingerprint", "algorithm", "clients", "seed", "data", "records", "personal"):
        assert found[name] == CONTENT[name]
    assert isinstance(found["state"], Gaussian)
    assert_array_equal(found["state"].precision, np.eye(2))
    assert found["records"][0].status is Status.RUNNING
    assert type(found["records"][1].infos["a"]["ess"]) is np.float64


def test_writing_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    for seed in (1, 2):
        checkpoint.write(path, {**CONTENT, "seed": seed})
    assert checkpoint.load(path)[0]["seed"] == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.ckpt", "run.ckpt.records"]


def test_records_are_only_added(tmp_path: Path) -> None:
    """What is written of a round does not grow with the rounds before it."""
    path, records, kept = tmp_path / "run.ckpt", [], None
    grown, states = [], []
    for number in range(1, 40):
        records = [*records, crafted.RECORD._replace(number=number)]
        before = path.with_name("run.ckpt.records").read_bytes() if kept else b""
        kept = checkpoint.write(path, {**CONTENT, "records": records}, kept)
        now = path.with_name("run.ckpt.records").read_bytes()
        assert now.startswith(before) and len(now) == kept.length
        grown.append(len(now) - len(before))
        states.append(path.stat().st_size)
        assert checkpoint.load(path)[1] == kept
    assert len(set(grown[10:])) == 1 and max(states) - min(states) < 10
    assert checkpoint.load(path)[0]["records"] == records


def test_a_crash_while_writing_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ckpt"
    kept = checkpoint.write(path, CONTENT)

    def crash(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    for more in ([], [crafted.RECORD]):
        with pytest.raises(OSError, match="disk full"):
            checkpoint.write(path, {**CONTENT, "seed": 7, "records": [*CONTENT["records"], *more]}, kept)
        found = checkpoint.load(path)[0]
        assert found["seed"] == 2**63 and found["records"] == CONTENT["records"]


def test_two_that_write_to_one_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    kept = checkpoint.write(path, CONTENT)
    more = {**CONTENT, "records": [*CONTENT["records"], crafted.RECORD]}
    checkpoint.write(path, more, kept)
    with pytest.raises(DeclarationError, match="another run writes to it.*Give each run a checkpoint of its own"):
        checkpoint.write(path, more, kept)
    assert len(checkpoint.load(path)[0]["records"]) == 3


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="cannot be read"):
        checkpoint.load(tmp_path)[0]


# --- files that are not ours ----------------------------------------------------------------------------------


def test_no_crafted_file_runs_code_or_changes_a_class(tmp_path: Path) -> None:
    """Pickles, altered files and files with the owner's own signature: each is refused by its name, quickly."""
    path, trace = tmp_path / "evil.ckpt", tmp_path / "trace"
    every, before = crafted.all_of(tmp_path, trace), crafted.classes()
    assert len({one.name for one in every}) == len(every) > 200
    for one in every:
        crafted.put(one, path)
        with pytest.raises(DeclarationError) as caught:
            checkpoint.load(path)[0]
        assert repr(str(path)) in str(caught.value), one.name
        assert any(remedy in str(caught.value) for remedy in ("delete", "choose another path")), one.name
    assert crafted.classes() == before
    assert not trace.exists() and not crafted.imported()
    crafted.put(crafted.honest_files(tmp_path), path)  # the same way, an honest one is read
    assert checkpoint.load(path)[0]["seed"] == CONTENT["seed"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("BUILD on Mechanism, format 3", f"has format 3, .*reads format {signed.FORMAT}; delete it to start again"),
        ("format 2", "has format 2, .*finish it with the version that wrote it"),
        ("format 4", f"has format 4, and this version of fedppl reads format {signed.FORMAT}"),
        ("npz with a pickle", "not a fedppl checkpoint; choose another path"),
        ("cut at 41", "truncated or damaged; restore it"),
        ("a bit of its arrays", "truncated or damaged"),
        ("another's key", "signed with another key than that in .*FEDPPL_KEY_FILE"),
        ("a personal state", "truncated or damaged"),
        ("records missing", "the records of .*evil.ckpt.records', are not there; restore both"),
        ("records cut", "are cut off; restore both from one copy, or delete"),
        ("a bit of the records at 40", "not those it was written with; restore both"),
        ("named: a function", "'os.system' is no named tuple"),
        ("named: a property", "'fedppl.algorithms.ep.private.Mechanism' has other fields"),
        ("member 'ok'", "'fedppl.types.Status.ok' is not known here"),
        ("dtype '|O'", "dtype '|O' has no place"),
        ("shape [10000000000000]", "not as long as their shapes say"),
        ("JSON: 100,000 deep", "nested too deep"),
        ("body: JSON of 2**63 bytes", "declares 9223372036854775808 bytes of JSON"),
        ("body: other names", "holds something else; choose another path"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name: str, told: str, tmp_path: Path) -> None:
    (one,) = (one for one in crafted.all_of(tmp_path, tmp_path / "trace") if one.name == name)
    crafted.put(one, tmp_path / "evil.ckpt")
    with pytest.raises(DeclarationError, match=told):
        checkpoint.load(tmp_path / "evil.ckpt")[0]


def test_the_size_is_looked_at_before_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of more bytes than memory, with a header that fits it."""
    path = tmp_path / "large"
    size = 2**40
    with path.open("wb") as file:
        file.write(crafted.MAGIC + bytes(8) + (size - len(crafted.MAGIC) - 48).to_bytes(8, "little") + bytes(32))
        file.truncate(size)
    with pytest.raises(DeclarationError, match="1099511627776 bytes, more than the 17179869184 that are read"):
        checkpoint.load(path)[0]


def test_a_state_is_read_as_what_it_was_kept_as(tmp_path: Path) -> None:
    raw = signed.pack({"releases": 3}, "lasting-north.personal")
    assert signed.unpack(raw, "it", "lasting-north.personal") == {"releases": 3}
    for other in ("lasting-south.personal", "", "run"):
        with pytest.raises(DeclarationError, match="it is truncated or damaged"):
            signed.unpack(raw, "it", other)


def test_elsewhere_a_run_resumes_with_its_key_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, settings = tmp_path / "run.ckpt", {"random_seed": 1}
    next(fedppl.rounds(*normal_means(), fedppl.EP(), checkpoint=path, **settings))
    key = Path(os.environ["FEDPPL_KEY_FILE"])
    monkeypatch.setenv("FEDPPL_KEY_FILE", str(tmp_path / "elsewhere"))
    with pytest.raises(DeclarationError, match="another key than that in .*elsewhere'.*put the key"):
        fedppl.rounds(*normal_means(), fedppl.EP(), checkpoint=path, **settings)
    shutil.copy(key, tmp_path / "elsewhere")
    assert next(fedppl.rounds(*normal_means(), fedppl.EP(), checkpoint=path, **settings)).number == 2


# --- resuming -------------------------------------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    """All arrays and scalars inside nested tuples and mappings."""
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    return [value]


def assert_same_state(first: Any, second: Any) -> None:
    """Equal to the last bit, NaN included."""
    a, b = leaves(first), leaves(second)
    assert len(a) == len(b) > 10
    for x, y in zip(a, b, strict=True):
        assert_array_equal(x, y)


def after(number: int) -> Any:
    """Stop after so many rounds, those of the warm start among them."""
    return lambda step: step.number == number


@problems.few_rounds
@pytest.mark.parametrize(
    ("problem", "participation", "rounds"),
    [(problems.noise, None, 8), (problems.noise, 3, 7), (problems.schools, 0.5, 7)],
    ids=["all", "three a round", "half, folded prior"],
)
def test_a_resumed_run_is_bit_identical(problem: Any, participation: Any, rounds: int, tmp_path: Path) -> None:
    """Interrupted in the warm start and again in the refinement."""
    model, clients = problem()
    path, settings = tmp_path / "run.ckpt", {"participation": participation, "progressbar": False, "random_seed": 5}
    whole = fedppl.fit(model, clients, fedppl.EP(tolerance=1e-9), callback=after(rounds), **settings)
    for limit in (1, rounds - 2, rounds):
        part = fedppl.fit(model, clients, fedppl.EP(tolerance=1e-9), callback=after(limit), checkpoint=path, **settings)
    assert_same_state(part.state, whole.state)
    assert len(part.records) == len(whole.records) == rounds
    for ours, theirs in zip(part.records, whole.records, strict=True):
        assert ours._replace(seconds=0.0).asked == theirs.asked
        assert_same_state(ours._replace(seconds=0.0), theirs._replace(seconds=0.0))
    assert (part.status, part.message, part.seed) == (whole.status, whole.message, whole.seed)


def snapshots(path: Path, rounds: int, steps: Any) -> Iterator[tuple[bytes, bytes]]:
    """State and records after each round."""
    for step in steps:
        yield path.read_bytes(), path.with_name(path.name + ".records").read_bytes()
        if step.number == rounds:
            return


@problems.few_rounds
def test_a_kill_at_any_moment_of_writing_changes_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    """In the middle of an append, after it, in the middle of the state beside it, or after all: the same last round."""
    model, clients = problems.noise()
    path, last = tmp_path / "run.ckpt", 4

    def run() -> Iterator[Any]:
        return fedppl.rounds(model, clients, fedppl.EP(tolerance=1e-9), checkpoint=path, random_seed=5)

    whole = list(snapshots(path, last, run()))
    for number in range(1, last):
        (state, records), (later_state, later) = whole[number - 1 : number + 1]
        middle = int(rng.integers(len(records) + 1, len(later)))
        for tail, partial in ((records, b""), (later[:middle], b""), (later, b""), (later, later_state[:-9])):
            path.write_bytes(state)
            path.with_name("run.ckpt.records").write_bytes(tail)
            path.with_name("run.ckpt.partial").write_bytes(partial)
            for step in run():
                if step.number == last:
                    break
            content = checkpoint.load(path)[0]
            assert_same_state(content["state"], step.state)
            assert [record.number for record in content["records"]] == list(range(1, last + 1))
            path.write_bytes(whole[-1][0])
            path.with_name("run.ckpt.records").write_bytes(whole[-1][1])
            reference = checkpoint.load(path)[0]
            assert_same_state(content["state"], reference["state"])
            for ours, theirs in zip(content["records"], reference["records"], strict=True):
                assert_same_state(ours._replace(seconds=0.0), theirs._replace(seconds=0.0))


@problems.few_rounds
@pytest.mark.parametrize("left", [b"", b"fedppl rec", b"fedppl records %d\nrest" % signed.FORMAT])
def test_records_of_a_run_that_never_got_a_state_are_written_over(left: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    path.with_name("run.ckpt.records").write_bytes(left)
    fedppl.fit(*normal_means(), fedppl.EP(), checkpoint=path, rounds=1, progressbar=False)
    assert [record.number for record in checkpoint.load(path)[0]["records"]][0] == 1


@problems.few_rounds
def test_a_resumed_run_takes_its_seed_from_the_checkpoint(tmp_path: Path) -> None:
    model, clients = normal_means()
    path = tmp_path / "run.ckpt"
    first = fedppl.fit(model, clients, fedppl.EP(), callback=after(1), checkpoint=path, progressbar=False)
    second = fedppl.fit(model, clients, fedppl.EP(), checkpoint=path, progressbar=False)
    assert second.seed == first.seed and len(second.records) > 1
    assert_array_equal(second.client("client 0", draws=5)["posterior"]["theta"].shape, (4, 5))


def test_a_finished_run_does_no_more_rounds(tmp_path: Path) -> None:
    model, clients = normal_means()
    path = tmp_path / "run.ckpt"
    first, second = (fedppl.fit(model, clients, fedppl.EP(), checkpoint=path, progressbar=False) for _ in range(2))
    assert first.status is second.status is Status.CONVERGED
    assert len(first.records) == len(second.records)
    assert_same_state(first.state, second.state)


def test_rounds_write_and_resume_too(tmp_path: Path) -> None:
    model, clients = problems.noise()
    path = tmp_path / "run.ckpt"
    for step in fedppl.rounds(model, clients, fedppl.EP(), checkpoint=path, random_seed=2):
        if step.number == 2:
            break
    assert next(fedppl.rounds(model, clients, fedppl.EP(), checkpoint=path, random_seed=2)).number == 3


OTHER_RUNS: dict[str, Any] = {
    "fingerprint": lambda: (*problems.regression(), fedppl.EP(), 1),
    "clients": lambda: (*normal_means(4), fedppl.EP(), 1),
    "algorithm": lambda: (*normal_means(), fedppl.EP()._replace(name="other"), 1),
    "settings": lambda: (*normal_means(), fedppl.EP(damping=0.5), 1),
    "seed": lambda: (*normal_means(), fedppl.EP(), 2),
}


@problems.few_rounds
@pytest.mark.parametrize("what", OTHER_RUNS)
def test_the_checkpoint_of_another_run_is_refused_and_kept(what: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    fedppl.fit(*normal_means(), fedppl.EP(), rounds=1, checkpoint=path, progressbar=False, random_seed=1)
    before = path.read_bytes()
    model, clients, algorithm, seed = OTHER_RUNS[what]()
    had = "it has damping=1.0, and this run damping=0.5" if what == "settings" else f"its {what} is"
    with pytest.raises(DeclarationError, match=f"is of another run: {had}.*Choose another path") as caught:
        fedppl.fit(model, clients, algorithm, checkpoint=path, progressbar=False, random_seed=seed)
    assert repr(str(path)) in str(caught.value)
    assert path.read_bytes() == before


@problems.few_rounds
def test_the_checkpoint_of_another_algorithm_of_the_same_name_is_refused(tmp_path: Path) -> None:
    path, first = tmp_path / "run.ckpt", fedppl.EP()
    fedppl.fit(*normal_means(), first, rounds=1, checkpoint=path, progressbar=False, random_seed=1)
    other = skeleton.Newton()._replace(name=first.name, settings=first.settings)
    with pytest.raises(DeclarationError, match="its state is EPState, this run's is NewtonState"):
        fedppl.fit(*normal_means(), other, checkpoint=path, progressbar=False, random_seed=1)


@problems.few_rounds
@pytest.mark.parametrize(
    ("before", "after_"),
    [
        ({"participation": 1}, {}),
        ({}, {"participation": 0.5}),
        ({"participation": 1}, {"participation": 2}),
        ({}, {"reporting": 1}),
        ({}, {"participation": lambda clients, rng: clients}),
    ],
)
def test_a_run_that_asks_others_is_another_run(before: Any, after_: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    settings: dict[str, Any] = {"checkpoint": path, "progressbar": False}
    fedppl.fit(*normal_means(), fedppl.EP(), callback=after(1), **before, **settings)
    (word,) = {**before, **after_}
    with pytest.raises(DeclarationError, match=f"another run: it has .*{word}=.*Choose another path"):
        fedppl.fit(*normal_means(), fedppl.EP(), **after_, **settings)


@problems.few_rounds
@pytest.mark.parametrize("participation", [1, np.int64(1), 0.5, after])
def test_a_run_that_asks_the_same_goes_on_with_another_deadline(participation: Any, tmp_path: Path) -> None:
    if callable(participation):
        participation = lambda clients, rng: clients[:2]  # noqa: E731
    settings: dict[str, Any] = {"checkpoint": tmp_path / "run.ckpt", "participation": participation}
    for number, deadline in ((1, None), (2, 60.0)):
        step = next(fedppl.rounds(*normal_means(), fedppl.EP(), deadline=deadline, **settings))
        assert step.number == number


# --- files that cannot be written -----------------------------------------------------------------------------


def test_where_nothing_can_be_written_the_run_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "run.ckpt.partial").mkdir()
    asked: list[Any] = []
    for call in (fedppl.fit, fedppl.rounds):
        with pytest.raises(DeclarationError, match="run.ckpt.partial' and .*, cannot be written: .*choose a path"):
            call(*normal_means(), fedppl.EP(), checkpoint=tmp_path / "run.ckpt", participation=asked.append)
    assert not asked and [file.name for file in tmp_path.iterdir()] == ["run.ckpt.partial"]


@pytest.mark.parametrize("there", ["a folder", "somebody's notes"])
def test_what_lies_where_the_records_go_is_not_written_over(there: str, tmp_path: Path) -> None:
    records = tmp_path / "run.ckpt.records"
    records.mkdir() if there == "a folder" else records.write_text(there)
    with pytest.raises(DeclarationError, match="keeps its records in '.*run.ckpt.records', where something else is"):
        fedppl.rounds(*normal_means(), fedppl.EP(), checkpoint=tmp_path / "run.ckpt")
    assert records.is_dir() or records.read_text() == there


class OwnState(NamedTuple):
    """Of somebody's own algorithm."""

    inner: Any
    extra: Any


def of_ones_own(extra: Any) -> Any:
    """EP with something more in its state."""
    ep = fedppl.EP(warm_start=False)

    def update(state: Any, received: Any) -> Any:
        inner, report = ep.update_server(state.inner, received)
        return OwnState(inner, state.extra), report

    return ep._replace(
        name="own",
        init=lambda *arguments: OwnState(ep.init(*arguments), extra),
        broadcast=lambda state, client_id: ep.broadcast(state.inner, client_id),
        replies=Replies(
            shapes=lambda state: ep.replies.shapes(state.inner),
            reject=lambda state, reply: ep.replies.reject(state.inner, reply),
        ),
        result=Result(ep.result.final_message, ep.result.draw),
        update_server=update,
    )


def test_a_state_of_ones_own_is_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        steps = fedppl.rounds(*normal_means(), of_ones_own(Status.RUNNING), checkpoint=tmp_path / "run.ckpt")
        step = next(steps)
        assert step.number == number and type(step.state) is OwnState and step.state.extra is Status.RUNNING


def test_a_state_that_cannot_be_kept_is_refused_before_the_first_round(tmp_path: Path) -> None:
    asked: list[Any] = []
    settings: dict[str, Any] = {"checkpoint": tmp_path / "run.ckpt", "participation": asked.append}
    with pytest.raises(DeclarationError, match=r"\['state'\].extra is of type builtins.set.*sorted tuple"):
        fedppl.rounds(*normal_means(), of_ones_own({1, 2}), **settings)
    assert not asked and not (tmp_path / "run.ckpt").exists()


def test_looking_whether_a_file_can_be_written_leaves_none(tmp_path: Path) -> None:
    checkpoint.require_writable(tmp_path / "run.ckpt")
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.ckpt.partial").write_bytes(b"of a crash")
    checkpoint.require_writable(tmp_path / "run.ckpt")
    assert (tmp_path / "run.ckpt.partial").read_bytes() == b"of a crash"


def test_a_disk_that_fills_up_says_where_the_run_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "run.ckpt"
    run = fedppl.rounds(*normal_means(), fedppl.EP(), checkpoint=path, random_seed=1)
    next(run)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="after round 2: No space left on device; it holds round 1.*goes on") as error:
            next(run)
    assert repr(str(path)) in str(error.value)
    assert next(fedppl.rounds(*normal_means(), fedppl.EP(), checkpoint=path, random_seed=1)).number == 2


# --- other data -----------------------------------------------------------------------------------------------


def altered(clients: dict[str, Any], client_id: str, factor: float = 10.0) -> dict[str, Any]:
    return {k: {"y": data["y"] * (factor if k == client_id else 1.0)} for k, data in clients.items()}


@problems.few_rounds
@pytest.mark.parametrize("rounds", [1, 99])
def test_other_data_are_refused_with_the_clients_name(rounds: int, tmp_path: Path) -> None:
    """Of a run in progress and of a finished one."""
    model, clients = normal_means()
    path = tmp_path / "run.ckpt"
    fedppl.fit(model, clients, fedppl.EP(), callback=after(rounds), checkpoint=path, progressbar=False, random_seed=1)
    before = path.read_bytes()
    for call in (fedppl.fit, fedppl.rounds):
        with pytest.raises(DataError, match="data of client 'client 1' are not those.*Give the same data") as caught:
            call(model, altered(clients, "client 1"), fedppl.EP(), checkpoint=path)
        assert repr(str(path)) in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        {"y": np.array([1.0, 2.0, 4.0])},
        {"y": np.array([2.0, 1.0, 3.0])},
        {"y": np.array([1.0, 2.0])},
        {"y": np.array([[1.0, 2.0, 3.0]])},
        {"z": np.array([1.0, 2.0, 3.0])},
        {"y": np.array([1.0, 2.0, 3.0]), "z": np.array([1.0])},
    ],
)
def test_a_seal_sees_names_shapes_and_values(other: dict[str, Any]) -> None:
    assert not _digest.matches(_digest.seal({"y": np.array([1.0, 2.0, 3.0])}), other)


def test_a_seal_sees_neither_order_nor_width() -> None:
    sealed = _digest.seal({"y": np.array([1, 2]), "x": np.array([0.5, 0.25], dtype=np.float32)})
    assert _digest.matches(sealed, {"x": [0.5, 0.25], "y": [1.0, 2.0]})
    assert _digest.matches(sealed, {"x": np.array([0.5, 0.25], dtype=">f8"), "y": np.array([1, 2], dtype=">i4")})
    strided = np.arange(4.0)[::2]
    assert _digest.matches(_digest.seal({"y": strided}), {"y": strided.copy()})


def test_a_seal_tells_integers_apart_that_a_float_does_not() -> None:
    big = 2**60
    assert not _digest.matches(_digest.seal({"id": np.array([big])}), {"id": np.array([big + 1])})
    assert _digest.matches(_digest.seal({"id": np.array([big])}), {"id": np.array([big])})


def test_seals_of_two_runs_cannot_be_compared() -> None:
    data = {"y": np.ones(3)}
    assert len({_digest.seal(data) for _ in range(3)}) == 3
    assert not _digest.matches(_digest.seal(data)[:16] + bytes(32), data)


@problems.few_rounds
def test_lists_in_another_order_are_the_same_data(tmp_path: Path) -> None:
    model, clients = problems.regression()
    path = tmp_path / "run.ckpt"
    fedppl.fit(model, clients, fedppl.EP(), callback=after(1), checkpoint=path, progressbar=False)
    turned = {k: {name: data[name].tolist() for name in reversed(data)} for k, data in clients.items()}
    assert next(fedppl.rounds(model, turned, fedppl.EP(), checkpoint=path)).number == 2


_SCALE = {"sd": 1.0}


def of_a_global(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Normal("mu", 0, 5), _SCALE["sd"], observed=pm.Data("y", y))
    return model


@problems.few_rounds
@pytest.mark.parametrize("rounds", [1, 99])
def test_another_likelihood_under_the_same_layout_is_refused(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run in progress and of a finished one, whose posterior would be the other model's."""
    clients = {name: {"y": np.array([0.5, 1.5, float(size)])} for size, name in enumerate("ab")}
    path = tmp_path / "run.ckpt"
    settings: dict[str, Any] = {"checkpoint": path, "progressbar": False, "random_seed": 1}
    model = fedppl.FederatedModel(of_a_global, ["mu"])
    first = fedppl.fit(model, clients, fedppl.EP(), callback=after(rounds), **settings)
    monkeypatch.setitem(_SCALE, "sd", 3.0)
    with pytest.raises(DeclarationError, match="density of client 'a' has changed.*delete the file"):
        fedppl.fit(fedppl.FederatedModel(of_a_global, ["mu"]), clients, fedppl.EP(), **settings)
    monkeypatch.setitem(_SCALE, "sd", 1.0)
    assert len(fedppl.fit(model, clients, fedppl.EP(), **settings).records) >= len(first.records)


@pytest.mark.skipif(os.name != "posix", reason="links and pipes are POSIX's")
@pytest.mark.parametrize("name", ["run.ckpt.partial", "run.ckpt.records"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_nothing_is_written_through_what_somebody_put_in_place(tmp_path: Path, name: str, kind: str) -> None:
    other, place = tmp_path / "other", tmp_path / name
    if kind == "link":
        other.write_bytes(b"")
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(other)
    model, clients = normal_means(2)
    with pytest.raises(DeclarationError, match=name):
        fedppl.fit(model, clients, fedppl.EP(), checkpoint=tmp_path / "run.ckpt", progressbar=False)
    assert kind != "link" or other.read_bytes() == b""
    assert kind != "dangling link" or not other.exists()


def test_a_parameter_that_leaves_its_domain_beside_the_start_is_no_obstacle(tmp_path: Path) -> None:
    """What tells models apart is computed beside the start, and may be −inf there."""

    def narrow(y: Any) -> Any:
        with pm.Model() as model:
            y = pm.Data("y", y)
            mu = pm.Normal("mu", 0, 1)
            theta = pm.Normal("theta", mu, 1)
            pm.Normal("obs", theta, 0.05 + theta, observed=y)
        return model

    clients = {name: {"y": np.array([0.1, 0.3, 0.2])} for name in ("a", "b")}
    model = fedppl.FederatedModel(narrow, shared=["mu"])
    assert -np.inf in model.enrol(clients)["a"].trace()
    steps = fedppl.rounds(model, clients, fedppl.EP(), rounds=1, checkpoint=tmp_path / "run", random_seed=1)
    assert next(steps).number == 1
