"""Flower's simulation runtime, started for real: same numbers, nothing left behind, a run that goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("flwr")
pytest.importorskip("ray")

import fedppl
from fedppl import gaussian
from fedppl.testing import normal_means
from fedppl.types import Status
from tests.support import problems

# One worker runs them all, one after the other: they share the machine's processes.
pytestmark = [pytest.mark.flower, pytest.mark.xdist_group("simulation")]


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of the test's own: what it leaves behind is its own, whatever else runs on the machine."""
    with tempfile.TemporaryDirectory(prefix="sim-") as folder:  # short: sockets live below it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def folders() -> list[Path]:
    """What this test's simulations left behind, or use now."""
    return list(Path(tempfile.gettempdir()).glob("fedppl-simulation-*"))


def fit(problem: Any, **keywords: Any) -> fedppl.Fit:
    model, clients = problem
    return fedppl.fit(model, clients, fedppl.EP(), **{"progressbar": False, "random_seed": 1, **keywords})


def test_a_simulation_gives_the_embedded_engines_numbers() -> None:
    """Equal shared posteriors to 1e-8, with partial participation; and no process or file stays."""
    problem = problems.regression()
    here = fit(problem, participation=2, rounds=30)
    there = fit(problem, participation=2, rounds=30, engine=fedppl.Flower.simulation(workers=2))
    assert there.status is here.status is Status.CONVERGED
    assert [record.asked for record in there.records] == [record.asked for record in here.records]
    q, p = here.posterior, there.posterior
    sd = gaussian.standard_deviations(q)
    assert_allclose(gaussian.mean(p) / sd, gaussian.mean(q) / sd, atol=1e-8)
    assert_allclose(gaussian.standard_deviations(p), sd, rtol=1e-8)
    assert "a" in there.client(there.client_ids[0], draws=10)["posterior"]  # drawn here: the data are here
    assert not folders()


def _flower_processes() -> list[str]:
    """Command lines of SuperLinks on this machine that serve a simulation of ours."""
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "flower-superlink" in line and "--simulation" in line]


_KILLED = """
import os, sys
import fedppl
from tests.support import problems

def stop(step):
    if step.number == 3:
        os._exit(9)

if __name__ == "__main__":
    model, clients = problems.noise()
    engine = fedppl.Flower.simulation(workers=1)
    fedppl.fit(model, clients, fedppl.EP(), engine=engine, checkpoint=sys.argv[1], callback=stop, random_seed=1)
"""


@pytest.mark.slow
def test_a_server_that_was_killed_goes_on_in_a_new_flower_run(tmp_path: Path) -> None:
    script, path = tmp_path / "killed.py", tmp_path / "run.ckpt"
    script.write_text(_KILLED)
    killed = subprocess.run(
        [sys.executable, str(script), str(path)],
        cwd=Path(__file__).parents[2],
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert killed.returncode == 9
    problem = problems.noise()
    resumed = fit(problem, checkpoint=path, engine=fedppl.Flower.simulation(workers=1))
    assert len(resumed.records) > 4
    assert not _flower_processes()  # the killed server's simulation has noticed and ended
    free = fit(problem)
    assert_allclose(resumed.posterior.linear, free.posterior.linear, rtol=1e-12)
    assert_allclose(resumed.posterior.precision, free.posterior.precision, rtol=1e-12)


@pytest.mark.slow
def test_rounds_that_are_broken_off_end_the_simulation() -> None:
    model, clients = normal_means(2)
    steps = fedppl.rounds(model, clients, fedppl.EP(), engine=fedppl.Flower.simulation(workers=1), random_seed=1)
    first = next(steps)
    assert folders()  # so that the last line can fail
    steps.close()
    expected = next(fedppl.rounds(model, clients, fedppl.EP(), random_seed=1))
    assert_array_equal(first.state.sites.linear, expected.state.sites.linear)
    assert np.all(np.isfinite(first.state.sites.precision))
    assert not folders()
