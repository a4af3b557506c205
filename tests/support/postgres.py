"""A PostgreSQL of this machine, started in a temporary folder for tests of a file."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _binary(name: str) -> str | None:
    places = [os.environ.get("PATH", ""), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    return shutil.which(name, path=os.pathsep.join(places))


def started() -> Iterator[str]:
    """Yield the address of a server on loopback, whose user `reader` has a password; skip the test without one."""
    pytest.importorskip("sqlalchemy")
    psycopg = pytest.importorskip("psycopg")
    initdb, server = _binary("initdb"), _binary("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed here: Debian's package postgresql has it")
    folder = Path(tempfile.mkdtemp())  # not pytest's: others may not enter that
    user: dict[str, Any] = {}
    if sys.platform != "win32" and os.getuid() == 0:  # it refuses to run as root
        user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(folder, "nobody", "nogroup")
    (folder / "password").write_text("Zimt&Zucker")
    (folder / "password").chmod(0o644)
    data = folder / "data"
    made = subprocess.run(
        [initdb, "-D", data, "-U", "reader", "-A", "scram-sha-256", f"--pwfile={folder}/password", "-E", "UTF8"],
        capture_output=True, text=True, cwd=folder, timeout=120, **user,
    )  # fmt: skip
    if made.returncode:
        shutil.rmtree(folder)
        pytest.skip(f"PostgreSQL does not start here: {made.stderr[-200:]}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "-D", data, "-p", str(port), "-k", folder, "-h", "127.0.0.1", "-F"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, **user)
    url, end = f"postgresql://reader:Zimt%26Zucker@127.0.0.1:{port}/postgres", time.monotonic() + 60
    try:
        while True:
            try:
                psycopg.connect(url).close()
                break
            except psycopg.OperationalError:
                assert time.monotonic() < end and process.poll() is None, "PostgreSQL did not come up"
                time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)  # it waits for no connection that a failing test left open
        process.wait(timeout=60)
        shutil.rmtree(folder)
