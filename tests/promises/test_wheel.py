"""What is published: built here, without the network, and looked into."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
_LARGEST = 300_000  # bytes of a file


def built(builder: type, folder: Path) -> Path:
    (found,) = builder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(found)


def test_the_wheel_holds_the_package_its_types_and_its_licence(tmp_path: Path) -> None:
    with zipfile.ZipFile(built(WheelBuilder, tmp_path)) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("METADATA"))
    ours = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("fedppl/**/*.py")} | {"fedppl/py.typed"}
    ours |= {f"fedppl/models/{path.name}" for path in ROOT.glob("models/*.py")}
    held = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert held == ours
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "\nName: fedppl\n" in metadata and "\nRequires-Python: >=3.11\n" in metadata


ANYWHERE = """
import sys
sys.path.insert(0, {first!r})
from pathlib import Path
import fedppl
from fedppl.models import fedlmc_ss, fedsi, hm1, hm2, pfedvem
assert Path(fedppl.__file__).is_relative_to({first!r})
assert Path(hm1.__file__).is_relative_to({first!r}) and hm1.__name__ == "fedppl.models.hm1"
assert pfedvem.classifier is fedsi.classifier
"""


@pytest.mark.parametrize("installed", ["wheel", "editable"])
def test_the_papers_models_can_be_imported_from_what_is_installed(tmp_path: Path, installed: str) -> None:
    """From the wheel's files, and from the folder that an editable installation puts on the path."""
    if installed == "wheel":
        with zipfile.ZipFile(built(WheelBuilder, tmp_path)) as wheel:
            wheel.extractall(tmp_path / "site")
        first = tmp_path / "site"
    else:
        (found,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
        with zipfile.ZipFile(found) as wheel:
            (path,) = (wheel.read(name).decode().strip() for name in wheel.namelist() if name.endswith(".pth"))
            assert not [name for name in wheel.namelist() if name.endswith(".py")]  # no copies that grow old
        first = Path(path)
    program = ANYWHERE.format(first=str(first))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_the_source_archive_holds_tests_and_pages_and_nothing_large(tmp_path: Path) -> None:
    with tarfile.open(built(SdistBuilder, tmp_path)) as archive:
        sizes = {member.name.partition("/")[2]: member.size for member in archive.getmembers() if member.isfile()}
    wanted = {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "constraints.txt",
        "tests/promises/test_wheel.py",
    }
    assert wanted | {"docs/index.md", "docs/conf.py", "examples/quickstart.py"} <= set(sizes)
    assert max(sizes.values()) < _LARGEST
    assert not [name for name in sizes if name.startswith(("build/", "dist/", ".venv")) or "__pycache__" in name]
