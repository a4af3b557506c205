"""The example app on Flower's own simulation runtime, by its configuration alone: `flwr run . simulation`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

pytest.importorskip("flwr")

from tests.test_deployment import APP, SITES, Deployment, free_ports, posterior

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("deployment")]

FEDERATION = "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"
LOCAL = "python local.py {work}/data"


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Deployment]:
    """A SuperLink in simulation mode, and the clinics' data."""
    root = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "WORK": str(tmp_path),
        "PORT": str(port := free_ports(5)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    deployed = Deployment(tmp_path, port, environment)
    deployed.shell(f"python make_data.py {tmp_path}/data && python make_policies.py {tmp_path}/policies")
    # What outlives the call may not hold its pipes.
    start = "source ./environment.sh; start_simulation"
    log = (tmp_path / "start.log").open("w")
    subprocess.run(
        ["bash", "-c", start], cwd=APP, env=environment, check=True, timeout=120, stdout=log, stderr=log, text=True
    )
    yield deployed
    deployed.shell("./stop.sh")


def test_the_app_runs_on_the_simulation_runtime(simulated: Deployment) -> None:
    """The posterior of the embedded engine; the server's log says phase, change and what is left, round by round."""
    results = simulated.work / "results"
    config = f'results="{results}" wait=240.0'
    simulated.shell(f"flwr run . simulation --federation-config '{FEDERATION}' --run-config '{config}'")
    end = time.monotonic() + 500
    status = ""
    while not status.startswith("finished"):
        assert time.monotonic() < end, simulated.log("simulation")[-3000:]
        time.sleep(2.0)
        (run,) = json.loads(simulated.shell("flwr ls simulation --format json"))["runs"]
        status = str(run["status"])
    said = simulated.shell(f"flwr log {run['run-id']} simulation --show")
    assert status == "finished:completed", said[-3000:]
    found, q = posterior(results)
    assert found["status"] == "converged" and sorted(found["clients"]) == sorted(SITES)
    assert not any(found["failures"])
    alone = json.loads(simulated.shell(LOCAL.format(work=simulated.work), timeout=300).strip().splitlines()[-1])
    # The embedded engine has the correction too, which begins from the same q.
    assert_allclose(q.linear, np.array(alone["linear"]), rtol=1e-6)
    assert_allclose(q.precision, np.array(alone["precision"]), rtol=1e-6, atol=1e-8)
    for site in SITES:
        assert (simulated.work / "simulated" / site / f"{site}.nc").stat().st_size > 10_000
    rounds = re.findall(r"round (\d+): (\w+), 3 of 3 replies in ([^;\n]+)(.*)", said)
    assert [int(one[0]) for one in rounds] == list(range(1, found["rounds"] + 1))
    assert any("start" in one[3] for one in rounds) and any("posterior sds" in one[3] for one in rounds)
