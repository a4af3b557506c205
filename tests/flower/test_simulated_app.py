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

import pytest

pytest.importorskip("flwr")

from tests.flower.test_deployment import APP, SITES, Deployment, assert_the_same, embedded, free_ports

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("deployment")]

FEDERATION = "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Deployment]:
    """A SuperLink in simulation mode, and the clinics' data."""
    root = str(Path(__file__).parents[2])
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
    with (tmp_path / "start.log").open("w") as log:
        subprocess.run(["bash", "-c", start], cwd=APP, env=environment, check=True, timeout=120, stdout=log, stderr=log)
    yield deployed
    deployed.shell("./stop.sh")


def test_the_app_runs_on_the_simulation_runtime(simulated: Deployment) -> None:
    """The posterior of the embedded engine; the server's log says each round and its phase."""
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
    found = assert_the_same(results, embedded(simulated.work))
    assert sorted(found["clients"]) == sorted(SITES)
    for site in SITES:
        assert (simulated.work / "simulated" / site / f"{site}.nc").stat().st_size > 10_000
    rounds = re.findall(r"round (\d+): (\w+), 3 of 3 replies in ([^;\n]+)(.*)", said)
    assert [int(one[0]) for one in rounds] == list(range(1, found["rounds"] + 1))
    assert {phase for *_, phase in rounds} == {"; search", "; weighing"}
