"""Checkpoints: what is written is read, what is not ours is refused, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_array_equal

import fedppl
from fedppl import DataError, DeclarationError, _digest, checkpoint
from fedppl.checkpoint import _MAGIC
from fedppl.gaussian import Gaussian
from fedppl.testing import normal_means
from fedppl.types import Status
from tests import problems

CONTENT = {
    "fingerprint": "abc",
    "algorithm": "EP",
    "settings": {"damping": "1.0"},
    "clients": ("a", "b"),
    "data": {"a": b"salt and digest"},
    "seed": 2**63,
    "name": "c0ffee",
    "state": Gaussian(np.arange(2.0), np.eye(2)),
    "records": (Status.RUNNING, {"seconds": np.float64(0.5), "asked": np.array([True, False])}),
    "personal": {},
}


def wrapped(body: bytes) -> bytes:
    """A file that passes the first two checks."""
    return _MAGIC + hashlib.sha256(body).digest() + body


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.write(path, CONTENT)
    found = checkpoint.read(path)
    assert found.keys() == CONTENT.keys()
    for name in ("fingerprint", "algorithm", "clients", "seed"):
        assert found[name] == CONTENT[name]
    assert isinstance(found["state"], Gaussian)
    assert_array_equal(found["state"].precision, np.eye(2))
    assert found["records"][0] is Status.RUNNING
    assert found["records"][1]["seconds"] == 0.5


def test_writing_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    for seed in (1, 2):
        checkpoint.write(path, {**CONTENT, "seed": seed})
    assert checkpoint.read(path)["seed"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.ckpt"]


def test_a_crash_while_writing_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.write(path, CONTENT)

    def crash(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.write(path, {**CONTENT, "seed": 7})
    assert checkpoint.read(path)["seed"] == 2**63


@pytest.mark.parametrize("kept", [0, 5, len(_MAGIC), len(_MAGIC) + 20, len(_MAGIC) + 32, -1])
def test_truncated_files_are_refused(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.write(path, CONTENT)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DeclarationError, match="truncated or damaged; delete|not a fedppl checkpoint") as caught:
        checkpoint.read(path)
    assert repr(str(path)) in str(caught.value)


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.write(path, CONTENT)
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DeclarationError, match="damaged"):
        checkpoint.read(path)


@pytest.mark.parametrize("raw", [b"", b"hello", pickle.dumps(CONTENT)])
def test_foreign_files_are_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(raw)
    with pytest.raises(DeclarationError, match="not a fedppl checkpoint; choose another path"):
        checkpoint.read(path)


def test_a_file_of_an_older_format_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"fedppl checkpoint 2\n" + bytes(40))
    with pytest.raises(DeclarationError, match="has format 2, .*reads format 3; delete it to start again"):
        checkpoint.read(path)


@pytest.mark.parametrize("content", [[1, 2], {"seed": 1}, {**CONTENT, "more": 1}])
def test_other_content_under_our_header_is_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(wrapped(pickle.dumps(content)))
    with pytest.raises(DeclarationError, match="holds something else"):
        checkpoint.read(path)


def call(module: str, name: str, argument: str) -> bytes:
    """Pickle (protocol 4) that calls module.name(argument) when it is loaded."""
    strings = b"".join(b"\x8c" + bytes([len(s)]) + s.encode() for s in (module, name))
    return b"\x80\x04" + strings + b"\x93\x8c" + bytes([len(argument)]) + argument.encode() + b"\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("fedppl.checkpoint", "os.system"),  # a dotted name walks out of the package
        ("fedppl.checkpoint", "Path"),  # imported there, not from there
        ("fedppl.model", "FederatedModel"),  # ours, but neither state nor record
        ("fedppl.loop", "fit"),
        ("numpy", "load"),
        ("numpy", "fromfile"),
        ("numpy.testing._private.utils", "runstring"),
        ("subprocess", "check_output"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused(module: str, name: str, tmp_path: Path) -> None:
    path, trace = tmp_path / "evil", tmp_path / "trace"
    path.write_bytes(wrapped(call(module, name, f"touch {trace}")))
    with pytest.raises(DeclarationError, match=rf"{name} has no place in a checkpoint.*delete it") as caught:
        checkpoint.read(path)
    assert "evil" in str(caught.value)
    assert not trace.exists()


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="cannot be read"):
        checkpoint.read(tmp_path)


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
    with pytest.raises(DeclarationError, match=f"is of another run: its {what} is .*Choose another path") as caught:
        fedppl.fit(model, clients, algorithm, checkpoint=path, progressbar=False, random_seed=seed)
    assert repr(str(path)) in str(caught.value)
    assert path.read_bytes() == before


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
    with pytest.raises(DeclarationError, match=f"another run: its settings is {{'{word}': .*Choose another path"):
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
        with pytest.raises(DeclarationError, match="run.ckpt.partial', cannot be written: .*choose a path"):
            call(*normal_means(), fedppl.EP(), checkpoint=tmp_path / "run.ckpt", participation=asked.append)
    assert not asked and [file.name for file in tmp_path.iterdir()] == ["run.ckpt.partial"]


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
    with pytest.raises(DeclarationError, match="client 'a' has the same data, and the model another.*delete the file"):
        fedppl.fit(fedppl.FederatedModel(of_a_global, ["mu"]), clients, fedppl.EP(), **settings)
    monkeypatch.setitem(_SCALE, "sd", 1.0)
    assert len(fedppl.fit(model, clients, fedppl.EP(), **settings).records) >= len(first.records)
