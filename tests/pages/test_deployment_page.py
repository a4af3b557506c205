"""The code of docs/deployment.md as it stands there: a study, services, commands, on loopback and in temporary folders.

And commands and code for operators of docs/install_at_a_hospital.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import sqlite3
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("flwr")

import fedppl
from tests.flower.test_deployment import free_ports
from tests.support import page

PAGE = page.ROOT / "docs" / "deployment.md"
HOSPITAL = page.ROOT / "docs" / "install_at_a_hospital.md"
# Every block of the page: its language, and what it alone has. All of them are run below.
BLOCKS = {
    "study": ("python", "fedppl.sources.sql("),
    "policy": ("toml", "allowed_queries ="),
    "site": ("bash", "fedppl.site"),
    "environment": ("ini", "FEDPPL_KEY_FILE="),
    "services": ("ini", "ExecStart="),
    "connection": ("toml", "root-certificates"),
    "run": ("bash", "flwr run"),
    "audit": ("bash", "--export"),
}
# Those of the other page that are run here.
OF_HOSPITAL = {"keys": ("bash", "openssl req"), "logs": ("python", "logging.Formatter")}


def block(name: str) -> str:
    where, (language, has) = (PAGE, BLOCKS[name]) if name in BLOCKS else (HOSPITAL, OF_HOSPITAL[name])
    (found,) = [text for text in page.blocks(where, language) if has in text]
    return found


def test_every_block_of_the_page_is_one_of_these() -> None:
    assert sorted(text for _, text in page.fences(PAGE)) == sorted(map(block, BLOCKS))


def test_the_page_is_short_and_so_is_the_way_to_a_first_answer() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 250
    assert len(block("site").splitlines()) <= 8  # commands at a new site


def test_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, logger = io.StringIO(), logging.getLogger("fedppl")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logger, "handlers", [])
    page.run(block("logs"), "docs/install_at_a_hospital.md, logs", {})
    logger.getChild("run").warning("client %s skipped", "B", extra={"client": "B", "round": 3})
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert line["message"] == "client B skipped" and line["client"] == "B" and line["round"] == 3
    assert "reason" not in line and line["level"] == "WARNING"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not at hand")
def test_certificates_name_the_server(tmp_path: Path) -> None:
    """A client that trusts the CA takes the server's certificate under its name, and under no other."""
    subprocess.run(["bash", "-e", "-c", block("keys")], cwd=tmp_path, check=True, capture_output=True)
    assert [(tmp_path / name).stat().st_mode & 0o77 for name in ("ca.key", "server.key")] == [0, 0]
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    here = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    meet(here, there, "server.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(here, there, "other.example")


def meet(here: ssl.SSLContext, there: ssl.SSLContext, name: str) -> None:
    """A handshake in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [here.wrap_bio(down, up, server_hostname=name), there.wrap_bio(up, down, server_side=True)]
    for _ in range(10):
        sides = [side for side in sides if not _done(side)]
    assert not sides


def _done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def test_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(block("policy"))
    said = fedppl.policy.read(path)
    assert (said.sums, said.requests, said.allowed_queries) == ("required", 60, ("DIGEST",))


# --- processes of Flower --------------------------------------------------------------------------------------


PROJECT = """
[project]
name = "study"
version = "0.1.0"
dependencies = []

[tool.flwr.app]
publisher = "fedppl"

[tool.flwr.app.components]
serverapp = "study:server"
clientapp = "warm:app"

[tool.flwr.app.config]
checkpoint = ""
random_seed = 1
rounds = 100
wait = 600.0
deadline = 300.0
"""
ROWS = {"north": 60, "south": 150, "west": 200}


class Machines(NamedTuple):
    """What the page's machines are here: one folder, one port and the next ones."""

    work: Path
    port: int

    def here(self, text: str, site: str = "north") -> str:
        """The page's text with paths, hosts and a site's name that are ours."""
        for there, ours in {
            "/opt/fedppl/.venv/bin": str(Path(sys.executable).parent),
            "/var/lib/fedppl/site": str(self.work / "sites" / site),
            "/var/lib/fedppl": str(self.work / "var"),
            "/etc/fedppl/policy": str(self.work / "etc" / f"{site}-policy"),
            "/etc/fedppl": str(self.work / "etc"),
            "postgresql+psycopg://reader@localhost/clinic": f"sqlite:///{self.work / 'srv' / site}.db",
            "server.example:8000": f"127.0.0.1:{self.port}",
            "--host 0.0.0.0 --port 8000": f"--host 127.0.0.1 --port {self.port}",
        }.items():
            text = text.replace(there, ours)
        return re.sub(r"\bnorth\b", site, text)

    @property
    def environment(self) -> dict[str, str]:
        """The page's variables; what has been compiled on this machine is where it was."""
        lines = [line for line in self.here(block("environment")).splitlines() if not line.startswith("#")]
        given = {name: value for name, _, value in (line.partition("=") for line in lines)}
        del given["PYTENSOR_FLAGS"], given["NUMBA_CACHE_DIR"]
        return {**os.environ, **given, "PYTHONPATH": str(page.ROOT)}

    def shell(self, command: str, folder: str, site: str = "north", seconds: float = 600.0, **names: str) -> str:
        """Run a command of the page in a folder."""
        done = subprocess.run(
            ["bash", "-ec", self.here(command, site)],
            cwd=self.work / folder,
            env={**self.environment, **names},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout

    def logs(self) -> str:
        return "".join(f"\n{log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.work.glob("*.log"))


def services(machines: Machines, site: str = "north") -> dict[str, list[str]]:
    """Commands of the page's services by the program that they start."""
    text = machines.here(block("services"), site).replace("\\\n", " ")
    commands = [shlex.split(command) for command in re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)]
    return {Path(command[0]).name: command for command in commands}


def inline(start: str) -> str:
    """Code that stands in a sentence of the page."""
    found = set(re.findall(rf"`({re.escape(start)} [^`]+)`", PAGE.read_text(encoding="utf-8")))
    assert len(found) == 1, found
    return str(found.pop())


def _table(path: Path, rows: int, seed: int) -> None:
    """A clinic's database."""
    rng = np.random.default_rng(seed)
    age, arm = rng.normal(60, 9, rows).round(1), rng.choice(["control", "drug"], rows)
    died = rng.random(rows) < 1 / (1 + np.exp(0.8 * (arm == "drug") - 0.03 * (age - 60) - 0.2 * seed))
    table = pd.DataFrame({"age": age, "arm": arm, "died": np.where(died, "yes", "no"), "seen": "2024-05-01"})
    connection = sqlite3.connect(path)
    pd.concat([table, table.assign(seen="2025-01-01")]).to_sql("trial", connection, index=False)
    connection.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """The page's server on loopback, with TLS and SuperNode authentication, and three clinics' databases."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    pytest.importorskip("sqlalchemy")
    found = Machines(tmp_path, free_ports(4))
    for folder in ("var/flower", "etc", "srv", "sites", "app"):
        (tmp_path / folder).mkdir(parents=True)
    keys = page.ROOT / "examples" / "flower_app" / "make_keys.py"  # in place of an authority
    subprocess.run(
        [sys.executable, str(keys), str(tmp_path / "etc"), "--sites", "none"], check=True, capture_output=True
    )
    (tmp_path / "etc" / "superexec.secret").write_bytes(os.urandom(32))
    (tmp_path / "var" / "flower" / "config.toml").write_text(found.here(block("connection")))
    (tmp_path / "app" / "study.py").write_text(block("study"))
    (tmp_path / "app" / "warm.py").write_text(f"import fedppl\n\n{inline('app =')}\n")
    (tmp_path / "app" / "pyproject.toml").write_text(PROJECT)
    query = found.shell(f"{sys.executable} -c 'import study; print(study.ROWS.digest)'", "app").strip()
    for seed, (site, rows) in enumerate(ROWS.items()):
        _table(tmp_path / "srv" / f"{site}.db", rows, seed)
        (tmp_path / "etc" / f"{site}-policy.toml").write_text(block("policy").replace("DIGEST", query))
    yield found


@contextlib.contextmanager
def started(machines: Machines) -> Iterator[Callable[[str, list[str]], None]]:
    """Starts services; all are ended."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: list[str]) -> None:
        with (machines.work / f"{name}.log").open("wb") as log:
            where = machines.work / "var"
            processes.append(subprocess.Popen(command, cwd=where, env=machines.environment, stdout=log, stderr=log))

    try:
        yield start
    finally:
        for key in machines.work.glob("sites/*/worker/key"):
            key.unlink()
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)


def _until_it_listens(attempt: Callable[[], str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            attempt()
            return
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(1.0)


@pytest.mark.flower
@pytest.mark.xdist_group("deployment")
def test_from_a_database_to_a_first_approved_answer(machines: Machines) -> None:
    """The page's study on the page's services, by the page's commands: those at a site in their order."""
    install, key, identity, *rosters, start_it, audited = block("site").splitlines()
    assert "pip install" in install and "systemctl start" in start_it  # what stands below is started in its place
    assert set(services(machines)) == {"flower-superlink", "flower-superexec", "flower-supernode"}
    with started(machines) as start:
        for name in ("flower-superlink", "flower-superexec"):
            start(name, services(machines)[name])
        lines = {}
        for site in ROWS:
            machines.shell(key, "etc", site)
            lines[site] = machines.shell(identity, "etc", site).strip()
            _until_it_listens(lambda site=site: machines.shell(inline("flwr supernode register"), "etc", site))
        for port, site in enumerate(ROWS, machines.port + 1):
            others = [line for other, line in lines.items() if other != site]
            told = dict(zip(("LINE_OF_SOUTH", "LINE_OF_WEST"), others, strict=True))
            for roster in rosters:
                machines.shell(roster, "etc", site, **told)
            start(site, [*services(machines, site)["flower-supernode"], "--port", str(port)])
        said = machines.shell(block("run"), "app", seconds=1200.0)
    assert "finished:completed" in said and "converged" in said, said + machines.logs()
    assert (machines.work / "var" / "run.ckpt").exists() and (machines.work / "var" / "key").exists()
    for site in ROWS:
        assert (machines.work / "sites" / site / f"{site}.nc").stat().st_size > 10_000
        for command in (audited, block("audit")):
            told = machines.shell(command, "var", site)
            assert "the chain holds" in told and "refused by: none" in told and f"requests answered of {site}" in told
