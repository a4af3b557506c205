"""The owner's key: made once, of 32 bytes, for the owner alone; what others could have read or written is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fedppl.storage import checkpoint
from fedppl.storage import signed as _key
from fedppl.types import DeclarationError

posix = pytest.mark.skipif(os.name != "posix", reason="modes and owners are POSIX's")


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPPL_KEY_FILE", str(tmp_path / "key"))
    return tmp_path / "key"


@posix
def test_the_first_use_makes_a_key_for_the_owner_alone(key_file: Path) -> None:
    key = _key.owner_key(make=True)
    assert len(key) == 32 and len(set(key)) > 10
    assert key_file.read_bytes() == key
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert _key.owner_key(make=True) == _key.owner_key(make=False) == key
    assert list(key_file.parent.iterdir()) == [key_file]


@posix
@pytest.mark.parametrize("named", [None, "relative/folder"])
def test_without_a_variable_it_is_in_the_users_folder(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDPPL_KEY_FILE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", named or str(tmp_path / "configuration"))
    folder = tmp_path / (".config" if named else "configuration") / "fedppl"
    assert _key.key_path() == folder / "key"
    key = _key.owner_key(make=True)
    assert (folder / "key").read_bytes() == key and folder.stat().st_mode & 0o777 == 0o700


def test_reading_makes_no_key(key_file: Path) -> None:
    with pytest.raises(DeclarationError, match="does not exist.*FEDPPL_KEY_FILE") as caught:
        _key.owner_key(make=False)
    assert repr(str(key_file)) in str(caught.value) and not key_file.exists()


def fill(size: int, mode: int = 0o600) -> Any:
    def make(path: Path) -> None:
        path.write_bytes(os.urandom(size))
        path.chmod(mode)

    return make


WRONG: dict[str, tuple[Any, str]] = {
    "for the group": (fill(32, 0o640), "open to others .mode 640.*chmod 600"),
    "for all": (fill(32, 0o604), "open to others"),
    "writable by all": (fill(32, 0o602), "open to others"),
    "short": (fill(31), "has 31 bytes; a key has 32.*Restore it"),
    "empty": (fill(0), "has 0 bytes"),
    "long": (fill(5000), "has more than 4096 bytes"),
    "a folder": (lambda path: path.mkdir(), "(no plain file|Is a directory); set FEDPPL_KEY_FILE"),
    "a pipe": (lambda path: os.mkfifo(path, 0o600), "is no plain file"),
    "a link to nothing": (lambda path: path.symlink_to(path.with_name("nothing")), "FEDPPL_KEY_FILE"),
    "a link to itself": (lambda path: path.symlink_to(path), "cannot be used.*FEDPPL_KEY_FILE"),
}


@posix
@pytest.mark.parametrize("name", WRONG)
def test_a_key_that_is_none_is_refused_before_the_run(name: str, key_file: Path, tmp_path: Path) -> None:
    make, told = WRONG[name]
    make(key_file)
    with pytest.raises(DeclarationError, match=told) as caught:
        checkpoint.require_writable(tmp_path / "run.ckpt")
    assert repr(str(key_file)) in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/folder/key", "a\0b", "k" * 300])
def test_a_path_that_can_hold_none_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the environment cannot hold a null character
    monkeypatch.setattr(_key, "key_path", lambda: Path(path))
    with pytest.raises(DeclarationError, match="FEDPPL_KEY_FILE"):
        checkpoint.require_writable(tmp_path / "run.ckpt")


@posix
def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FEDPPL_KEY_FILE")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(DeclarationError, match="no home folder.*set FEDPPL_KEY_FILE"):
        _key.key_path()


def test_many_that_are_first_have_one_key(key_file: Path) -> None:
    start, keys = threading.Barrier(16), list[bytes]()

    def first() -> None:
        start.wait()
        keys.append(_key.owner_key(make=True))

    threads = [threading.Thread(target=first) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 16 and set(keys) == {key_file.read_bytes()}
    assert list(key_file.parent.iterdir()) == [key_file]


def test_processes_that_are_first_have_one_key(key_file: Path) -> None:
    command = [sys.executable, "-c", "from fedppl.storage import signed; print(signed.owner_key(make=True).hex())"]
    here = Path(__file__).parents[2]
    started = [subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate()[0].strip() for process in started} == {key_file.read_bytes().hex()}
