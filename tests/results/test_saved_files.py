"""Files of fits that are cut off, broken or of another kind: refused with their reason, and nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import fedppl
from fedppl import DataError
from fedppl.testing import normal_means
from tests.support import crafted_fits

MODEL, CLIENTS = normal_means(2)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("honest") / "run.nc"
    fedppl.fit(MODEL, CLIENTS, fedppl.EP(), progressbar=False, random_seed=1).save(path)
    return path


def load(path: Path) -> Any:
    return fedppl.load(path, MODEL, fedppl.EP())


def test_the_honest_file_is_read(honest: Path) -> None:
    assert load(honest).status.ok


@pytest.mark.parametrize("name", crafted_fits.CHANGES)
def test_a_crafted_file_is_refused_by_its_rule(name: str, honest: Path, tmp_path: Path) -> None:
    path = crafted_fits.crafted(honest, name, tmp_path)
    with pytest.raises(DataError, match=crafted_fits.CHANGES[name][1]) as caught:
        load(path)
    assert "crafted.nc" in str(caught.value) and len(str(caught.value)) < 700
    assert not path.with_name("trace").exists()  # what a pickle, or a function that was named, would make


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(part: float, honest: Path) -> None:
    raw = honest.read_bytes()
    path = honest.with_name("cut.nc")
    path.write_bytes(raw[: int(part * len(raw))])
    with pytest.raises(DataError, match=r"cut\.nc.*no fit that fedppl saved, or is damaged"):
        load(path)


def test_other_files_are_refused(honest: Path) -> None:
    other = honest.with_name("other.h5")
    with h5py.File(other, "w") as file:
        file["numbers"] = np.zeros(3)
    fedppl.fit(MODEL, CLIENTS, fedppl.EP(), progressbar=False, random_seed=1).idata.to_netcdf(
        honest.with_name("idata.nc")
    )
    for path in (other, honest.with_name("idata.nc")):
        with pytest.raises(DataError, match="no fit that fedppl saved"):
            load(path)


def test_no_flipped_byte_changes_a_number(honest: Path, rng: np.random.Generator) -> None:
    """Wherever it falls: the file is refused, or says the same."""
    raw, refused = honest.read_bytes(), 0
    expected = load(honest)
    path = honest.with_name("flipped.nc")
    for place in rng.integers(len(raw), size=25):
        changed = bytearray(raw)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(changed))
        try:
            found = load(path)
        except DataError:
            refused += 1
            continue
        np.testing.assert_array_equal(found.posterior.linear, expected.posterior.linear)
        for name in ("posterior", "rounds"):
            for variable in expected.idata[name].data_vars:
                np.testing.assert_array_equal(found.idata[name][variable], expected.idata[name][variable])
    assert refused > 10


def test_what_could_not_be_read_back_is_not_written(honest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit, before = load(honest), honest.read_bytes()
    digests = iter(range(99))
    monkeypatch.setattr("fedppl.results.saved.digest", lambda group: str(next(digests)))
    with pytest.raises(fedppl.DeclarationError, match=r"to_netcdf.*checkpoint="):
        fit.save(honest)
    assert honest.read_bytes() == before
    assert [one.name for one in honest.parent.iterdir() if "partial" in one.name] == []
