"""The code of docs/deployment.md as it stands there: apps, services, commands, on loopback and in temporary folders."""

from __future__ import annotations

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
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("flwr")

import fedppl
from fedppl import site as fedppl_site
from fedppl.testing import normal_means
from tests.flower.test_deployment import free_ports
from tests.support import page
from tests.support.fake_grid import FakeGrid, node

PAGE = page.ROOT / "docs" / "deployment.md"
# Every block of the page: its language, and what it alone has. All of them are run below.
BLOCKS = {
    "keys": ("bash", "openssl req"),
    "app": ("python", "fedppl.local.NUTS()"),
    "formula": ("python", "fedppl.formula("),
    "rows": ("python", "fedppl.sources.sql("),
    "logs": ("python", "logging.Formatter"),
    "environment": ("ini", "FEDPPL_KEY_FILE="),
    "services": ("ini", "ExecStart="),
    "connection": ("toml", "root-certificates"),
    "policy": ("toml", "approval ="),
    "run": ("bash", "flwr run"),
    "identities": ("bash", "$LINE_OF_WEST"),
    "secure": ("python", "secure=True,\n    on_fit"),
    "files": ("python", "fedppl.Files("),
    "bundles": ("bash", "$BUNDLE"),
    "audit": ("bash", "fedppl.audit"),
}


def block(name: str) -> str:
    language, has = BLOCKS[name]
    (found,) = [text for text in page.blocks(PAGE, language) if has in text]
    return found


def run(name: str, **names: Any) -> dict[str, Any]:
    return page.run(block(name), f"docs/deployment.md, {name}", {"fedppl": fedppl, "pd": pd, **names})


def test_every_block_of_the_page_is_one_of_these() -> None:
    assert sorted(text for _, text in page.fences(PAGE)) == sorted(map(block, BLOCKS))


# --- Python, with sites in this process -----------------------------------------------------------------------


def serve(names: dict[str, Any], places: dict[str, dict[str, str]]) -> None:
    """Run a server app over sites that have nothing but their node configs."""
    site = names["site"]
    nodes = {10 + i: node(site, 10 + i, name, **config) for i, (name, config) in enumerate(places.items())}
    context = node(site, 0).context
    context.run_config = {"random_seed": 1, "wait": 20.0, "deadline": 20.0}
    names["server"](FakeGrid(nodes), context)


def place(folder: Path, name: str) -> dict[str, str]:
    """A site's node config, and its policy."""
    (folder / f"{name}.toml").write_text('sums = "optional"\nrequests = 60\n')
    places = {"data": f"{name}.csv", "policy": f"{name}.toml", "folder": name}
    return {key: str(folder / path) for key, path in places.items()}


@pytest.mark.slow
def test_an_app_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    places = {name: place(tmp_path, name) for name in ("GP", "MS")}
    for config in places.values():
        np.savetxt(config["data"], rng.normal(2.0, 1.0, 300))
    names = run("app", model=normal_means(1)[0], read_rows=lambda path: {"y": np.loadtxt(path)})
    serve(names, places)
    said = capsys.readouterr().out  # the page's on_fit prints the status and draws
    assert "converged" in said.lower() and "posterior" in said
    for name, config in places.items():
        assert (Path(config["folder"]) / f"{name}.nc").exists()


def test_an_app_whose_sums_are_secure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, names = np.random.default_rng(1), ("north", "south", "west")
    places = {name: {**place(tmp_path, name), "secure": str(tmp_path / f"{name} secure")} for name in names}
    commands = [shlex.split(line, comments=True) for line in block("identities").splitlines()]
    identity, *rosters = [words[3:] for words in commands if words]
    lines = {}
    for name, config in places.items():
        (tmp_path / f"{name}.toml").write_text("requests = 60\n")
        np.savetxt(config["data"], rng.normal(2.0, 1.0, 300))
        at = {"/var/lib/fedppl/secure": config["secure"], "north": name}
        assert fedppl_site.main([at.get(word, word) for word in identity]) == 0
        lines[name] = capsys.readouterr().out.strip()
    for name, config in places.items():
        others = [line for other, line in lines.items() if other != name]
        at = {"/var/lib/fedppl/secure": config["secure"], "$LINE_OF_SOUTH": others[0], "$LINE_OF_WEST": others[1]}
        assert [fedppl_site.main([at.get(word, word) for word in roster]) for roster in rosters] == [0, 0]
    serve(run("secure", model=normal_means(1)[0], read_rows=lambda path: {"y": np.loadtxt(path)}), places)
    assert "converged" in capsys.readouterr().out.lower()


def test_sites_that_answer_bundles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's block as often as it waits, and the site's command for each bundle that it names."""
    rng, names = np.random.default_rng(1), ("north", "south", "west")
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line, comments=True)[3:] for line in block("bundles").splitlines()]
    identity, roster, server, answer, watch = [words for words in commands if words]

    def at(words: list[str], **known: str) -> list[str]:
        return [known.get(word, word).replace("/var/lib/fedppl/", f"{tmp_path}/") for word in words]

    def said(arguments: list[str]) -> str:
        assert fedppl_site.main(arguments) == 0
        return capsys.readouterr().out.strip()

    line = said(at(identity))
    lines = {name: said(["identity", f"{tmp_path}/secure {name}", "--name", name]) for name in names}
    for name in names:
        np.savetxt(f"{name}.csv", rng.normal(2.0, 1.0, 300))
        Path(f"{name}.toml").write_text("requests = 60\n")
        said(at(roster, **{"$LINE_OF_NORTH": lines[name]}))
        for known in [[*server[:-1], line], *(["roster", server[1], lines[other]] for other in names if other != name)]:
            said([word.replace(server[1], f"{tmp_path}/secure {name}") for word in known])
    read = {"model": normal_means(1)[0], "read_rows": lambda path: {"y": np.loadtxt(path)}}
    code = block("files").replace("/var/lib/fedppl/", f"{tmp_path}/")
    for _ in range(60):
        found = page.run(code, "docs/deployment.md, files", {"fedppl": fedppl, **read})
        text = capsys.readouterr().out
        monkeypatch.setitem(sys.modules, "clinics.site", types.SimpleNamespace(site=found["site"]))
        bundles = [path for path in Path("run/sites").rglob("*.ask") if not path.with_suffix(".answer").exists()]
        if "converged" in text.lower():
            break
        for path in bundles:
            name = path.parent.name
            its = {"data=rows.csv": f"data={name}.csv", "policy=policy.toml": f"policy={name}.toml"}
            its |= {"folder=site": f"folder=site {name}", "$BUNDLE": str(path), answer[-1]: f"secure=secure {name}"}
            assert said(at(answer, **its)) == str(path.with_suffix(".answer"))
    assert "converged" in text.lower() and watch[2:-1] == answer[2:-1]


@pytest.mark.slow
def test_an_app_of_a_formula(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    places = {name: place(tmp_path, name) for name in ("north", "south", "west")}
    for config in places.values():
        age, arm = rng.normal(60, 9, 300), rng.choice(["drug", "none"], 300)
        died = np.where(rng.random(300) < 0.5 - 0.2 * (arm == "drug"), "yes", "no")
        pd.DataFrame({"age": age, "arm": arm, "died": died}).to_csv(config["data"], index=False)
    # Of three sites a Gaussian alone does not tell how small their sd may be, and is not called converged.
    with pytest.warns(fedppl.ConvergenceWarning, match="Sums"):
        serve(run("formula"), places)
    for name, config in places.items():
        # Sites tell what they agree on before they know the name that their key has.
        assert {"site.told", "site.agreement", f"{name}.nc"} <= {path.name for path in Path(config["folder"]).iterdir()}


def test_rows_of_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sqlalchemy")
    connection = sqlite3.connect(tmp_path / "clinic.db")
    rows = pd.DataFrame(
        {"died": ["no", "yes"], "age": [71, 80], "arm": ["drug", None], "seen": ["2024-05-01", "2025-01-01"]}
    )
    rows.to_sql("trial", connection, index=False)
    connection.close()
    monkeypatch.setenv("CLINIC", f"sqlite:///{tmp_path / 'clinic.db'}")
    names = run("rows", os=os, MODEL=fedppl.formula("died ~ age * arm + (1 | site)", family="bernoulli"))
    assert names["COHORT"]().to_dict("list") == {"died": ["no"], "age": [71], "arm": ["drug"]}
    assert names["COHORT"].digest in capsys.readouterr().out


def test_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, logger = io.StringIO(), logging.getLogger("fedppl")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logger, "handlers", [])
    run("logs")
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
    assert (said.rows, said.requests, said.agreement) == (400, 200, 20)
    assert said.approval == str(tmp_path / "approved.txt")


# --- processes of Flower --------------------------------------------------------------------------------------


APP = """
import fedppl
import numpy as np
from fedppl.testing import normal_means

model = normal_means(1)[0]


def read_rows(path):
    return {"y": np.loadtxt(path)}


"""
PROJECT = """
[project]
name = "schools"
version = "0.1.0"
dependencies = []

[tool.flwr.app]
publisher = "fedppl"

[tool.flwr.app.components]
serverapp = "schools:server"
clientapp = "schools:site"

[tool.flwr.app.config]
checkpoint = ""
"""


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
            "/srv/clinic/patients": str(self.work / "srv" / site),
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

    def shell(self, command: str, folder: str, site: str = "north", timeout: float = 600.0) -> str:
        """Run a command of the page in a folder."""
        done = subprocess.run(
            ["bash", "-ec", self.here(command, site)],
            cwd=self.work / folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
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
    """A command that stands in a sentence of the page."""
    found = set(re.findall(rf"`({re.escape(start)} [^`]+)`", PAGE.read_text(encoding="utf-8")))
    assert len(found) == 1, found
    return str(found.pop())


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """The page's server and two sites of it on loopback, with TLS and SuperNode authentication."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    found = Machines(tmp_path, free_ports(4))
    for folder in ("var/flower", "etc", "srv", "sites", "app"):
        (tmp_path / folder).mkdir(parents=True)
    keys = page.ROOT / "examples" / "flower_app" / "make_keys.py"  # in place of an authority
    subprocess.run([sys.executable, str(keys), str(tmp_path / "etc")], check=True, capture_output=True)
    (tmp_path / "etc" / "superexec.secret").write_bytes(os.urandom(32))
    (tmp_path / "var" / "flower" / "config.toml").write_text(found.here(block("connection")))
    (tmp_path / "app" / "schools.py").write_text(APP + block("app"))
    (tmp_path / "app" / "pyproject.toml").write_text(PROJECT)
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: list[str]) -> None:
        with (tmp_path / f"{name}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(command, cwd=tmp_path / "var", env=found.environment, stdout=log, stderr=log)
            )

    try:
        for name in ("flower-superlink", "flower-superexec"):
            start(name, services(found)[name])
        rng = np.random.default_rng(1)
        for place, site in enumerate(("GP", "MS"), 1):
            found.shell(inline("ssh-keygen"), "etc", site)
            _until_it_listens(lambda site=site: found.shell(inline("flwr supernode register"), "etc", site))
            np.savetxt(tmp_path / "srv" / f"{site}.csv", rng.normal(2.0, 1.0, 300))
            (tmp_path / "etc" / f"{site}-policy.toml").write_text('sums = "optional"\nrequests = 60\n')
            start(site, [*services(found, site)["flower-supernode"], "--port", str(found.port + place)])
        yield found
    finally:
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
def test_services_and_commands(machines: Machines) -> None:
    """The page's app on the page's services, by the page's commands."""
    assert set(services(machines)) == {"flower-superlink", "flower-superexec", "flower-supernode"}
    said = machines.shell(block("run"), "app")
    assert "finished:completed" in said, said + machines.logs()
    assert "converged" in said.lower(), said + machines.logs()
    assert (machines.work / "var" / "run.ckpt").exists() and (machines.work / "var" / "key").exists()
    for site in ("GP", "MS"):
        assert (machines.work / "sites" / site / f"{site}.nc").stat().st_size > 10_000
        assert "the chain holds" in machines.shell(block("audit"), "var", site)
