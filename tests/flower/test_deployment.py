"""Apps deployed on loopback with TLS and SuperNode authentication: killed servers, killed sites, sums under masks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose

pytest.importorskip("flwr")

import fedppl
from fedppl import audit
from fedppl.flower.warm import read_door
from fedppl.gaussian import Gaussian
from fedppl.storage import checkpoint as checkpoints
from tests.support import problems

# In one worker: both tests use the same SuperLink, and ports are taken one after the other.
pytestmark = [pytest.mark.flower, pytest.mark.xdist_group("deployment")]

APP = Path(__file__).parents[2] / "examples" / "flower_app"
SITES = ("north", "south", "west")


class Deployment(NamedTuple):
    """A SuperLink and three SuperNodes on loopback."""

    work: Path
    port: int
    environment: dict[str, str]

    def shell(self, command: str, timeout: float = 120.0) -> str:
        """Run a command in the app's folder, with its environment."""
        done = subprocess.run(
            ["bash", "-c", f"source ./environment.sh; {command}"],
            cwd=APP,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, name: str, app: Path = APP, **config: Any) -> Path:
        """Submit a run of an app; its results come to the folder returned."""
        results = self.work / name
        values = {"results": str(results), "wait": 120.0, **config}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        self.shell(f"flwr run {app} loopback --run-config '{text}'")
        return results

    def status(self) -> str:
        """Flower's word for the newest run."""
        listed = json.loads(self.shell("flwr ls loopback --format json"))
        return str(max(listed["runs"], key=lambda run: run["pending-at"])["status"])

    def log(self, name: str) -> str:
        """What a process has written so far."""
        return (self.work / f"{name}.log").read_text(errors="replace")


def wait_for(what: str, ready: Callable[[], Any], deployment: Deployment, seconds: float) -> Any:
    """Look until something is there; if it does not come, say what the logs say."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        if time.monotonic() > end:
            logs = {path.stem: path.read_text(errors="replace")[-3000:] for path in deployment.work.glob("*.log")}
            raise AssertionError(f"{what} did not happen within {seconds} s; {logs}")
        time.sleep(0.5)
    return found


def free_ports(count: int) -> int:
    """The first of some neighbouring ports that nobody uses."""
    for first in range(18_200, 19_000, 10):
        probes = [socket.socket() for _ in range(count)]
        try:
            for i, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + i))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free ports")


def _made(work: Path, **more: str) -> Deployment:
    """A deployment that is not started yet; its sites have warm workers."""
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "WORK": str(work),
        "PORT": str(port := free_ports(6)),
        "WARM": "900",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        **more,
    }
    return Deployment(work, port, environment)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    work = tmp_path_factory.mktemp("deployment")
    deployed = _made(work)
    deployed.shell(f"python make_data.py {work}/data && python make_keys.py {work}/keys")
    deployed.shell(f"python make_policies.py {work}/policies")
    for policy in (work / "policies").iterdir():  # all tests together ask more often than a clinic would stand
        policy.write_text(re.sub("^requests.*", "requests = inf", policy.read_text(), flags=re.MULTILINE))
    deployed.shell("./start.sh")
    yield deployed
    deployed.shell("./stop.sh")


@pytest.fixture(scope="module")
def reference(deployment: Deployment) -> fedppl.Fit:
    return embedded(deployment.work)


def embedded(work: Path) -> fedppl.Fit:
    """The same declaration, data and seed with the embedded engine, whose clients add under masks as sites do."""
    spec = importlib.util.spec_from_file_location("clinics_declaration", APP / "clinics" / "declaration.py")
    assert spec is not None and spec.loader is not None
    declaration = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(declaration)
    data = {name: declaration.load_csv(work / "data" / f"{name}.csv") for name in SITES}
    engine = fedppl.InProcess(secure=True, policy=fedppl.Policy())
    return fedppl.fit(declaration.MODEL, data, declaration.ALGORITHM, engine=engine, random_seed=1, progressbar=False)


def assert_the_same(results: Path, reference: fedppl.Fit) -> dict[str, Any]:
    """The server app wrote what the embedded engine computes, and no round was void; returns what it wrote."""
    found = json.loads((results / "fit.json").read_text())
    assert found["status"] == "converged" and found["rounds"] == len(reference.records)
    assert not any(found["failures"])
    assert_allclose(found["linear"], reference.posterior.linear, rtol=1e-12)
    assert_allclose(found["precision"], reference.posterior.precision, rtol=1e-12, atol=1e-14)
    return dict(found)


def assert_counted_once(deployment: Deployment, site: str, rounds: int) -> None:
    """A site has answered each round of its last run, refused nothing of it, and counted no request twice."""
    lines = list(audit.lines(deployment.work / "sites" / site))
    run = [line["run"] for line in lines if line["event"] == "cohort"][-1]
    lines = [line for line in lines if line.get("run") == run]
    assert not [line for line in lines if line.get("refused")]
    new = [line["round"] for line in lines if line["event"] == "request" and not line.get("repeated")]
    assert new == list(range(1, rounds + 1))


def assert_each_has_its_own(deployment: Deployment) -> None:
    """Each site has drawn its own posterior, at home."""
    for site in SITES:
        assert (deployment.work / "sites" / site / f"{site}.nc").stat().st_size > 10_000


@pytest.mark.slow
def test_a_killed_server_goes_on_in_a_new_run(deployment: Deployment, reference: fedppl.Fit) -> None:
    """Killed after two rounds, resumed from its checkpoint: equal to the embedded engine's uninterrupted run.

    One process a site has answered all messages.
    """
    checkpoint = deployment.work / "run.ckpt"
    deployment.submit("killed", checkpoint=str(checkpoint))
    wait_for("round 2", lambda: _rounds(checkpoint) >= 2, deployment, 400)
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    servers = [line for line in listed if "flwr-serverapp" in line and f"127.0.0.1:{deployment.port} " in line]
    assert len(servers) == 1, [line for line in listed if "flwr" in line]
    server = servers[0]
    os.kill(int(server.split()[0]), signal.SIGKILL)
    before = _rounds(checkpoint)
    results = deployment.submit("resumed", checkpoint=str(checkpoint))
    wait_for("the end of the resumed run", (results / "fit.json").exists, deployment, 600)
    found = assert_the_same(results, reference)
    assert found["rounds"] > before
    wait_for("Flower's word", lambda: deployment.status() == "finished:completed", deployment, 60)
    assert_each_has_its_own(deployment)
    for site in SITES:
        assert_counted_once(deployment, site, len(reference.records))
        folder = deployment.work / "sites" / site / "worker"
        assert (folder / "log").exists() and (folder / "key").exists()  # for the next run
        assert "no warm worker answers" not in deployment.log(site)


def _rounds(checkpoint: Path) -> int:
    assert fedppl.fit and fedppl.EP  # they load the tuples that the checkpoint holds
    return len(checkpoints.load(checkpoint)[0]["records"]) if checkpoint.exists() else 0


def _kill_west_in_mid_round(deployment: Deployment, checkpoint: Path) -> int:
    """Kill one of the sites while it computes; returns the round of its death."""
    seen = deployment.log("west").count("Receiving: train.fedppl")
    wait_for(
        "a request of round 2 or later",
        lambda: deployment.log("west").count("Receiving: train.fedppl") >= seen + 2,
        deployment,
        400,
    )
    os.kill(int((deployment.work / "west.pid").read_text()), signal.SIGKILL)
    if worker := read_door(deployment.work / "sites" / "west" / "worker"):
        os.kill(worker.pid, signal.SIGKILL)
    return _rounds(checkpoint) + 1


def _restart_west(deployment: Deployment, results: Path) -> None:
    """Restart the site blank, and wait for the end of the run."""

    def ended() -> bool:
        # refused as long as the SuperLink believes that the old one lives: a supervisor tries again, too
        if not _lives(int((deployment.work / "west.pid").read_text())):
            deployment.shell("start_site west $((PORT + 3))")
        return (results / "fit.json").exists()

    wait_for("the end of the run", ended, deployment, 500)


def _lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_killed_site_is_missed_and_comes_back(deployment: Deployment) -> None:
    """SIGKILL in mid-round: the others go on; restarted blank, it takes part again; the posterior is exact.

    Single replies, and no worker: Flower's process for a message answers it.
    """
    checkpoint = deployment.work / "means.ckpt"
    app = Path(__file__).parents[1] / "deployed"
    results = deployment.submit("means", app, checkpoint=str(checkpoint), rounds=60, deadline=60.0)
    round_of_death = _kill_west_in_mid_round(deployment, checkpoint)
    wait_for("a round without the site", lambda: _rounds(checkpoint) >= round_of_death, deployment, 120)
    _restart_west(deployment, results)
    found = json.loads((results / "fit.json").read_text())
    q = Gaussian(np.array(found["linear"]), np.array(found["precision"]))
    failures = [sorted(each) for each in found["failures"]]
    assert failures[round_of_death - 1] == ["west"]
    assert failures[-1] == []  # it is back
    assert found["status"] == "converged"
    data = {name: _column(deployment.work / "data" / f"{name}.csv") for name in SITES}
    mean, variance = problems.normal_means_posterior(data)
    assert_allclose(q.linear / q.precision[0], mean, rtol=1e-8)
    assert_allclose(1 / q.precision[0, 0], variance, rtol=1e-8)
    wait_for("Flower's word", lambda: deployment.status() == "finished:completed", deployment, 60)
    assert_each_has_its_own(deployment)


def _column(path: Path) -> dict[str, Any]:
    return {"y": np.loadtxt(path, delimiter=",", skiprows=1, usecols=2) / 8.0}


@pytest.mark.slow
def test_a_killed_site_of_a_cohort_is_waited_for(deployment: Deployment, reference: fedppl.Fit) -> None:
    """The round waits for it: no round is void, nothing is counted twice, and the numbers are as if it had lived."""
    checkpoint = deployment.work / "sites.ckpt"
    results = deployment.submit("sites", checkpoint=str(checkpoint), deadline=25.0, wait=300.0)
    round_of_death = _kill_west_in_mid_round(deployment, checkpoint)
    wait_for("the round to wait", lambda: deployment.log("south").count("Sending: train.fedppl"), deployment, 60)
    assert _rounds(checkpoint) == round_of_death - 1
    _restart_west(deployment, results)
    assert_the_same(results, reference)
    for site in SITES:
        assert_counted_once(deployment, site, len(reference.records))


ROWS = {"east": 40, "north": 200, "south": 200, "upper": 200, "west": 200}


def _outcomes(work: Path) -> dict[str, Any]:
    """Files of a logistic regression's rows for each site."""
    rng, data = np.random.default_rng(5), {}
    (work / "data").mkdir()
    for name, rows in ROWS.items():
        x = rng.normal(size=rows)
        y = rng.random(rows) < 1 / (1 + np.exp(0.5 - 0.8 * x))
        data[name] = np.column_stack([x.round(6), y])
        np.savetxt(work / "data" / f"{name}.csv", data[name], delimiter=",", header="x,y", comments="", fmt="%.6f")
    return data


def _pooled_line(rows: Any) -> tuple[Any, Any]:
    """Mean and sds of the posterior of all rows in one place, by sums over a grid of eight sds about the mode."""
    x, y = rows.T
    design, mode = np.column_stack([np.ones(len(x)), x]), np.zeros(2)
    for _ in range(30):
        chance = 1 / (1 + np.exp(-design @ mode))
        precision = (design.T * (chance * (1 - chance))) @ design + np.eye(2) / 4
        mode = mode + np.linalg.solve(precision, design.T @ (y - chance) - mode / 4)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    a, b = np.meshgrid(*(m + s * np.linspace(-8, 8, 161) for m, s in zip(mode, sd, strict=True)), indexing="ij")
    at = np.stack([a.ravel(), b.ravel()], axis=1)
    log = sum(v * (at @ row) - np.logaddexp(0, at @ row) for row, v in zip(design, y, strict=True))
    weights = np.exp(log - (at**2).sum(axis=1) / 8 - np.max(log))
    mean = weights @ at / weights.sum()
    return mean, np.sqrt(weights @ (at - mean) ** 2 / weights.sum())


@pytest.mark.slow
def test_five_sites_whose_server_gets_sums_alone_have_the_pooled_posterior(tmp_path: Path) -> None:
    """Under the default policy, though one of them has 40 rows: rows are counted over the cohort."""
    deployed = _made(tmp_path, SITES=" ".join(ROWS))
    data = _outcomes(tmp_path)
    deployed.shell(f"python make_keys.py {tmp_path}/keys --sites $SITES")
    deployed.shell("./start.sh")
    try:
        app = Path(__file__).parents[1] / "deployed_sums"
        results = deployed.submit("sums", app, wait=500.0, deadline=300.0)
        wait_for("the end of the run", (results / "fit.json").exists, deployed, 900)
    finally:
        deployed.shell("./stop.sh")
    found = json.loads((results / "fit.json").read_text())
    assert found["status"] == "converged", found
    assert not any(found["failures"])
    mean, sd = _pooled_line(np.concatenate(list(data.values())))
    assert np.max(np.abs(np.array(found["mean"]) - mean) / sd) < 0.02
    assert np.max(np.abs(np.array(found["sd"]) / sd - 1)) < 0.02
    for name in ROWS:
        lines = list(audit.lines(tmp_path / "sites" / name))
        assert not [line for line in lines if line.get("refused")]
        assert [line["members"] for line in lines if line["event"] == "cohort"] == [sorted(ROWS)]
