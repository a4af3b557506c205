"""Seconds of a round of idle sites that are deployed on loopback: a warm worker each, beside an empty Flower app.

Run it by ``python benchmarks/deployed_rounds.py --sites 3``. A site's model is a mean of 20 rows, so that what takes
time is Flower's: starting a process for each message, and looking for messages. The empty app answers with nothing and
imports nothing but Flower; its server looks for replies as often as fedppl's. Prints one line of JSON, with the load of
the machine: where other work runs beside it, the seconds compare nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POLL = 0.25  # seconds, as in fedppl.Flower.grid
_APP = """
[project]
name = "{name}"
version = "0.1.0"
description = "To be timed"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedppl"
[tool.flwr.app.components]
serverapp = "{server}"
clientapp = "{client}"
[tool.flwr.app.config]
results = ""
rounds = 0
sites = 0
"""
_SITE = """
import json, time
from pathlib import Path
import numpy as np
import fedppl
from fedppl.testing import normal_means
algorithm = fedppl.EP(damping=0.3, warm_start=False, tolerance=1e-9)  # so that it does not converge
model, ends = normal_means(1)[0], []
rules = fedppl.Policy(sums="optional", rows=10, few_rows=0, requests=10_000)
site = fedppl.Flower.client_app(
    model, algorithm, lambda config: {"y": np.arange(20.0) / 10}, folder=lambda config: config["folder"], policy=rules
)
def each(step):
    ends.append(time.monotonic())
def report(fit, context):
    seconds = [late - early for early, late in zip(ends, ends[1:])]
    told = {"seconds": seconds, "failures": sum(bool(record.failures) for record in fit.records)}
    Path(context.run_config["results"]).write_text(json.dumps(told))
server = fedppl.Flower.server_app(
    model, algorithm, clients=SITES, example_data={"y": [0.0, 1.0]}, random_seed=1, on_fit=report, callback=each
)
"""
_WARM = """
import fedppl
app = fedppl.Flower.warm_app("timed:site", folder=lambda config: config["folder"])
"""
_EMPTY = """
import json, time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < context.run_config["sites"]:
        time.sleep(POLL)
    seconds = []
    for _ in range(context.run_config["rounds"] + 1):
        began = time.monotonic()
        asked = [Message(RecordDict(), dst_node_id=node, message_type="train", ttl=300.0) for node in nodes]
        waiting = set(grid.push_messages(asked))
        while waiting:
            waiting -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(waiting)}
            time.sleep(POLL if waiting else 0)
        seconds.append(time.monotonic() - began)
    Path(context.run_config["results"]).write_text(json.dumps({"seconds": seconds[1:], "failures": 0}))
"""
_EMPTY_SITE = """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train()
def train(message, context):
    return Message(RecordDict(), reply_to=message)
"""


def write_apps(root: Path, sites: int) -> None:
    """Write both apps' folders."""
    apps = {
        "warm": ("timed:server", "warm:app", {"timed": _SITE.replace("SITES", str(sites)), "warm": _WARM}),
        "empty": ("server:app", "site_app:app", {"server": _EMPTY.replace("POLL", str(POLL)), "site_app": _EMPTY_SITE}),
    }
    for name, (server, client, modules) in apps.items():
        (root / name).mkdir()
        (root / name / "pyproject.toml").write_text(_APP.format(name=name, server=server, client=client))
        for module, text in modules.items():
            (root / name / f"{module}.py").write_text(text)


@contextlib.contextmanager
def deployed(root: Path, sites: int) -> Iterator[dict[str, str]]:
    """Run a SuperLink and its SuperNodes; yields the environment of Flower's commands."""
    with contextlib.ExitStack() as probes:  # ports that nobody uses
        sockets = [probes.enter_context(socket.socket()) for _ in range(sites + 1)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        main, *own = (str(each.getsockname()[1]) for each in sockets)
    environment = {
        **os.environ,
        "FLWR_HOME": str(root / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds, as in the example
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    (root / "flower").mkdir()
    connection = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{main}"\ninsecure = true\n'
    (root / "flower" / "config.toml").write_text(connection)
    commands = {"superlink": ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", main]}
    for k, port in enumerate(own):
        told = f'folder="{root / f"site {k}"}" client-id="site {k}"'
        link = ["--superlink", f"127.0.0.1:{main}", "--port", port, "--node-config", told]
        commands[f"site {k}"] = ["flower-supernode", "--insecure", *link]
    processes = []
    try:
        for name, command in commands.items():
            with (root / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            while name == "superlink" and not _listens(int(main)):
                time.sleep(0.2)
        yield environment
    finally:
        for key in root.glob("*/worker/key"):
            key.unlink()  # ends a worker
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def timed(root: Path, app: str, environment: dict[str, str], sites: int, rounds: int, limit: float) -> dict[str, Any]:
    """Seconds of the rounds of an app after the first."""
    results = root / f"{app}.json"
    config = f'results="{results}" rounds={rounds} sites={sites}'
    command = ["flwr", "run", str(root / app), "here", "--run-config", config]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    end = time.monotonic() + limit
    while not results.exists():
        if time.monotonic() > end:
            said = {log.stem: log.read_text(errors="replace")[-3000:] for log in root.glob("*.log")}
            raise RuntimeError(f"{app}: no end within {limit} s; {said}")
        time.sleep(0.5)
    told: dict[str, Any] = json.loads(results.read_text())
    seconds = told["seconds"]
    return {
        "median_s": round(statistics.median(seconds), 2),
        "least_s": round(min(seconds), 2),
        "most_s": round(max(seconds), 2),
        "rounds": len(seconds),
        "rounds_with_failures": told["failures"],
    }


def main(argv: list[str] | None = None) -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that an app may take")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rounds-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        write_apps(root, options.sites)
        with deployed(root, options.sites) as environment:
            found = {
                app: timed(root, app, environment, options.sites, options.rounds, options.limit)
                for app in ("empty", "warm")
            }
    above = round(found["warm"]["median_s"] - found["empty"]["median_s"], 2)
    load = [round(each, 1) for each in os.getloadavg()]  # over 1, 5 and 15 minutes, that of this run among it
    bars = {"load": load, "above_met": above <= 1.5, "round_met": found["warm"]["median_s"] <= 4.0}
    print(json.dumps({"benchmark": "deployed_rounds", "sites": options.sites, **found, "above_s": above, **bars}))


if __name__ == "__main__":
    main()
