"""A fit in a file: the same numbers in a fresh process, nothing of a client's rows, and what is no such file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_array_equal

import fedppl
from fedppl import DataError, DeclarationError
from fedppl.testing import normal_means
from tests.support import problems

QUIET: Any = {"progressbar": False, "random_seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Any:
    model, clients = problems.noise()
    fit = fedppl.fit(model, clients, **QUIET)
    fit.save(folder / "run.nc")
    return model, clients, fit


def test_what_all_share_is_as_it_was(fitted: Any, folder: Path) -> None:
    model, clients, fit = fitted
    found = fedppl.load(folder / "run.nc", model)
    pd.testing.assert_frame_equal(found.summary(), fit.summary())
    assert (found.status, found.message, found.client_ids) == (fit.status, fit.message, fit.client_ids)
    assert_array_equal(found.posterior.linear, fit.posterior.linear)
    assert found.log_evidence == fit.log_evidence
    assert_array_equal(found.influence()["shift"], fit.influence()["shift"])
    for name in fit.idata["posterior"].data_vars:
        assert_array_equal(found.idata["posterior"][name], fit.idata["posterior"][name])
    new = {name: value[:5] for name, value in next(iter(clients.values())).items()}
    assert_array_equal(*(one.new_client(new, draws=20)["posterior"]["theta"] for one in (fit, found)))
    with pytest.raises(DeclarationError, match="site of its own"):
        found.client(fit.client_ids[0])
    with pytest.raises(DataError, match="clients=..."):
        found.shared(random_seed=5)


def test_clients_come_back_with_their_data(fitted: Any, folder: Path) -> None:
    model, clients, fit = fitted
    found = fedppl.load(folder / "run.nc", model, clients=clients)
    name = fit.client_ids[1]
    assert_array_equal(*(one.client(name, draws=50)["posterior"]["theta"] for one in (fit, found)))
    with pytest.raises(DataError, match=r"\['elsewhere'\] did not take part"):
        fedppl.load(folder / "run.nc", model, clients={"elsewhere": clients[name]})


def test_a_fresh_process_predicts_the_same_to_the_bit(folder: Path) -> None:
    program = """
import sys
import numpy as np
import pandas as pd
import fedppl
rng = np.random.default_rng(0)
frame = pd.DataFrame({"site": np.repeat(["a", "b", "c"], 9), "t": rng.normal(size=27)})
frame["arm"] = np.tile(["x", "y", "z"], 9)
frame["y"] = frame["t"] + rng.normal(size=27)
model = fedppl.formula("y ~ t + arm + (1 | site)")
if sys.argv[1] == "write":
    fit = fedppl.fit(model, frame, by="site", random_seed=1, progressbar=False)
    fit.save(sys.argv[2])
else:
    fit = fedppl.load(sys.argv[2], model, clients=frame, by="site")
new = pd.DataFrame({"t": [0.0, 1.0], "arm": ["z", "x"]})
drawn = fit.predict("b", new, draws=20)["predictions"]["y"]
print(np.asarray(drawn).tobytes().hex(), fit.summary().to_json())
"""
    told = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, what, str(folder / "formula.nc")],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
        ).stdout
        for what in ("write", "read")
    ]
    assert told[0] == told[1] and len(told[0]) > 100


@pytest.mark.parametrize(
    "algorithm",
    [fedppl.FedAvg(learning_rate=0.05, steps=2), fedppl.HM1(), fedppl.Separate(), fedppl.PrecisionWeighted()],
    ids=lambda one: str(one.name),
)
def test_every_kind_of_result_can_be_saved(algorithm: Any, tmp_path: Path) -> None:
    model, clients = normal_means(4)
    fit = fedppl.fit(model, clients, algorithm, rounds=5, **QUIET)
    fit.save(tmp_path / "run.nc")
    found = fedppl.load(tmp_path / "run.nc", model, algorithm)
    assert set(found.idata) == set(fit.idata) and found.status is fit.status
    with pytest.raises(DeclarationError, match="pass the one that ran"):
        fedppl.load(tmp_path / "run.nc", model)


def test_nothing_of_a_row_is_in_the_file(folder: Path) -> None:
    model, clients = normal_means(3)
    secret = 31.41592653589793
    clients["client 1"]["y"][3] = secret
    fedppl.fit(model, clients, **QUIET).save(folder / "secret.nc")
    raw = (folder / "secret.nc").read_bytes()
    assert np.float64(secret).tobytes() not in raw and b"31.4159" not in raw
    assert b"theta" not in raw  # the local variable


def test_others_can_read_the_posterior(fitted: Any, folder: Path) -> None:
    _, _, fit = fitted
    with xr.open_dataset(folder / "run.nc", group="posterior", engine="h5netcdf") as group:
        assert_array_equal(group["mu"], fit.idata["posterior"]["mu"])


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", None])
def test_what_is_no_fit_is_said(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "run.nc"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="is no file|no fit that fedppl saved"):
        fedppl.load(path, normal_means()[0])


def test_another_declaration_is_refused(fitted: Any, folder: Path) -> None:
    other, clients = normal_means(2)
    with pytest.raises(DeclarationError, match="this model shares"):
        fedppl.load(folder / "run.nc", other)
    with pytest.raises(DeclarationError, match="the path of a file"):
        fedppl.fit(other, clients, **QUIET).save(3)
