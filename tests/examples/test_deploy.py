"""The image, the compose file and the units of `examples/deploy`: what they name is there and takes its options."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

import fedppl
from fedppl import site

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
UNITS = sorted(FOLDER.glob("*.service"))
SITES = ("north", "south", "west")


def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    read: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    return read


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path, encoding="utf-8")
    return parser


def commands() -> Iterator[list[str]]:
    """Each command of a unit, of the compose file, and of its comment."""
    for path in UNITS:
        service = unit(path)["Service"]
        yield from (shlex.split(service[name]) for name in ("ExecStartPre", "ExecStart") if name in service)
    yield from (service["command"] for service in compose()["services"].values())
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    for line in re.findall(r"^#   docker compose run --rm \w+ (.*)$", text, re.MULTILINE):
        yield shlex.split(line)


def test_each_command_takes_its_options() -> None:
    pytest.importorskip("flwr")
    seen = set()
    for program, *words in commands():
        name = Path(program).name
        if name == "python":
            assert words[:2] == ["-m", "fedppl.site"]
            given = site._arguments(words[2:])
            assert set(site._config(given.config)) == {"data", "policy", "folder"}
            assert given.app == "clinics.site:app"
            seen.add(given.command)
            continue
        found = Path(sys.executable).with_name(name)
        path = str(found) if found.exists() else shutil.which(name)
        assert path, name
        told = subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout  # noqa: S603
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= set(re.findall(r"--[a-z-]+", told))
        seen.add(name)
    assert seen == {"check", "watch", "flower-supernode", "flower-superlink"}


def test_sites_reach_the_server_alone_and_write_nowhere_but_in_their_volume() -> None:
    read = compose()
    assert set(read["services"]) == {"server", *SITES} == set(read["volumes"])
    assert read["networks"]["sites"]["internal"] is True
    for name in SITES:
        service = read["services"][name]
        assert service["networks"] == ["sites"] and "ports" not in service and service["read_only"] is True
        (state, *others) = service["volumes"]
        assert state == f"{name}:/var/lib/fedppl" and all(each.endswith(":ro") for each in others)
        assert not [each for each in others for other in SITES if other != name and other in each]
    assert (ROOT / read["x-fedppl"]["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")


def test_the_image_holds_what_is_in_the_repository() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert "dist/fedppl-*.whl" in copied and all((ROOT / name).exists() for name in copied if "*" not in name)
    extras = set(re.search(r"\$1\[([\w,]+)\]", text)[1].split(","))  # type: ignore[index]
    assert extras <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert "fedppl.warm_up()" in text and callable(fedppl.warm_up)
    assert text.index("\nUSER fedppl") < text.index("fedppl.warm_up()")  # as who will run it


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_runs_as_a_user_of_its_own_that_writes_where_it_must(path: Path) -> None:
    service = unit(path)["Service"]
    assert (service["User"], service["UMask"], service["ProtectSystem"]) == ("fedppl", "0077", "strict")
    written = service["ReadWritePaths"].split()
    assert "/var/lib/fedppl" in written and not [where for where in written if where.startswith("/etc")]
