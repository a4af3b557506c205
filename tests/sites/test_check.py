"""`python -m fedppl.site check`: what is in order, what is wrong and what to do about it, and that nothing stays."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sqlite3
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("cryptography")

import fedppl
from fedppl import Policy, site
from fedppl.sites.node import Node, described
from fedppl.storage import store
from tests.support import page, stored

RULES = Policy(sums="optional", rows=50, approval=None)
APP = """
import fedppl
from pathlib import Path
import pandas as pd

model = fedppl.formula("healed ~ age + arm + (1 | site)", family="bernoulli")
app = fedppl.Site(
    model,
    fedppl.Sums(),
    lambda config: pd.read_csv(config["data"]),
    folder=lambda config: config["folder"],
    policy=lambda config: config["policy"],
    secure=lambda config: config["secure"],
)
"""


def rows() -> pd.DataFrame:
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"age": rng.normal(60, 9, 300).round(2), "arm": rng.choice(["control", "drug"], 300)})
    frame["healed"] = (rng.random(300) < 0.5).astype(int)
    return frame


class Place:
    """A site's files, and its node as they are."""

    def __init__(self, base: Path) -> None:
        self.base, self.policy, self.frame = base, base / "policy.toml", rows()
        self.config = {"data": str(base / "rows.csv"), "policy": str(self.policy), "client-id": "north"}
        self.config |= {name: str(base / name) for name in ("folder", "secure")}
        self.frame.to_csv(base / "rows.csv", index=False)
        self.policy.write_text('fewest_sites = 3\nconclusions = ["loo"]\n')
        lines = {name: site.make(base / name, name) for name in ("secure", "south", "west")}
        shutil.rmtree(base / "secure")
        site.make(base / "secure", "north")
        for name in ("south", "west"):
            site.add(base / "secure", lines[name])

    def node(self) -> Node:
        return described(
            fedppl.Site(
                fedppl.formula("healed ~ age + arm + (1 | site)", family="bernoulli"),
                fedppl.Sums(),
                lambda config: pd.read_csv(config["data"]),
                folder=lambda config: config["folder"],
                policy=lambda config: config["policy"],
                secure=lambda config: config["secure"],
            )
        )(self.config)

    def found(self, node: Node | None = None) -> Mapping[str, site.Finding]:
        return {one.what: one for one in site.check(node or self.node(), self.config)}

    def wrong(self, node: Node | None = None) -> dict[str, str]:
        return {one.what: one.said for one in self.found(node).values() if one.wrong}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_all_is_in_order_and_nothing_is_counted(place: Place) -> None:
    with store.changing(place.base / "folder") as here:
        store.append(here, {"event": "introduction", "site": "north", "requests": 0})
    before = stored.lines(place.base / "folder")
    found = place.found()
    assert not {one.what: one.said for one in found.values() if one.wrong}
    assert stored.lines(place.base / "folder") == before and not stored.names(place.base / "folder")
    data = found["data"].said
    assert "3 columns" in data and "age: 300 rows, 0 missing" in data and "levels control, drug" in data
    assert "1 lines whose chain holds, 0 of 100 requests" in found["account"].said
    assert "'north'" in found["identity"].said and "conclusions = ('loo',)" in found["policy"].said
    told = found["a server would be told"].said
    assert (
        told.startswith("it is north, and before that")
        and "of 10 rows or more" in told
        and "version" in told
        and "fingerprint" in told
        and "site_sd" in told
    )
    assert not any(str(age) in told for age in place.frame["age"])


def changed_mode(place: Place) -> None:
    (place.base / "folder").mkdir(mode=0o700)
    (place.base / "folder" / "north.nc").touch()
    (place.base / "folder" / "north.nc").chmod(0o644)


def forged(place: Place) -> None:
    with store.changing(place.base / "folder") as here:
        store.append(here, {"event": "introduction", "site": "north", "requests": 0})
    with sqlite3.connect(place.base / "folder" / store.FILE) as connection:
        connection.execute("UPDATE account SET signature = x'00'")
    connection.close()


def later(place: Place) -> None:
    (place.base / "folder").mkdir(mode=0o700)
    (place.base / "folder" / "north.nc").touch(mode=0o600)
    ahead = (place.base / "folder" / "north.nc").stat().st_mtime + 86_400
    os.utime(place.base / "folder" / "north.nc", (ahead, ahead))


WRONG: dict[str, tuple[Callable[[Place], Any], str, str]] = {
    "a file of approved runs that is not there": (
        lambda place: place.policy.write_text('approval = "runs.txt"'),
        "policy",
        "make it",
    ),
    "a file that others may read": (changed_mode, "folder", "chmod 600"),
    "an account that is not signed": (forged, "account", "Put back what was there"),
    "a clock that stands still": (later, "clock", "set the machine's clock"),
    "a roster that is too short": (
        lambda place: (place.base / "secure" / "roster").write_text(""),
        "identity",
        "fedppl.site roster",
    ),
    "an identity of another name": (
        lambda place: place.config.update({"client-id": "east"}),
        "identity",
        "correct one",
    ),
    "no data": (lambda place: (place.base / "rows.csv").unlink(), "data", "rows.csv"),
    "no such column": (
        lambda place: place.frame.drop(columns="arm").to_csv(place.base / "rows.csv", index=False),
        "a server would be told",
        "arm",
    ),
    "a declaration that nobody has read": (
        lambda place: place.policy.write_text('declarations = ["0"]'),
        "a server would be told",
        "is not listed",
    ),
    "no room on the disk": (lambda place: None, "folder", "free the disk"),
}


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_its_remedy(place: Place, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, what, remedy = WRONG[case]
    spoil(place)
    if what == "folder" and remedy == "free the disk":
        usage = shutil.disk_usage(place.base)._replace(free=10**6)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert remedy in place.wrong()[what]


def test_a_site_whose_single_replies_may_leave_is_held_to_its_own_rows(place: Place) -> None:
    node = place.node()._replace(secure=None, policy=dataclasses.replace(RULES, rows=301))
    assert "rows: 300 at most, at least 301" in place.wrong(node)["a server would be told"]
    assert not place.wrong(node._replace(policy=RULES))
    assert "policy" in place.wrong(node._replace(policy=Policy()))


def test_the_command_prints_line_by_line_and_says_by_its_status(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.base / "checked_clinic.py").write_text(APP)
    monkeypatch.chdir(place.base)
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = ["check", "--app", "checked_clinic:app", "--config", *(f"{k}={v}" for k, v in place.config.items())]
    assert site.main(given) == 0
    assert "all is in order" in capsys.readouterr().out
    (place.base / "rows.csv").unlink()
    assert site.main(given) == 1
    assert "WRONG data: " in capsys.readouterr().out
    assert site.main([*given[:3], "--config", "data=x"]) == 1 and "--config" in capsys.readouterr().err
    assert site.main(["check", "--app", "checked_clinic:model"]) == 1 and "fedppl.Site" in capsys.readouterr().err


def test_the_command_on_the_page_is_that_command(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = page.blocks(page.ROOT / "docs" / "install_at_a_hospital.md", "bash")
    (command,) = [block for block in blocks if "fedppl.site" in block]
    python, *words = shlex.split(command.replace("\\\n", " "))
    assert (python, words[:2]) == ("python", ["-m", "fedppl.site"])
    asked: list[Any] = []
    monkeypatch.setattr(site, "_check", lambda given: asked.append(given) or 0)
    assert site.main(words[2:]) == 0
    assert asked[0].app == "clinics.site:app" and set(site._config(asked[0].config)) == {"data", "policy", "folder"}


def test_a_flower_app_is_looked_at_as_the_site_that_it_is(place: Place) -> None:
    pytest.importorskip("flwr")
    app = fedppl.Flower.client_app(
        fedppl.formula("healed ~ age", family="bernoulli"),
        fedppl.Sums(),
        lambda config: pd.read_csv(config["data"]),
        folder=lambda config: config["folder"],
        secure=lambda config: config["secure"],
    )
    node = site._node_of(app, "clinics.site:app")(place.config)
    assert node.folder == place.base / "folder"
    warm = fedppl.Flower.warm_app("clinics.site:app", folder="here")
    with pytest.raises(fedppl.DeclarationError, match=r"Flower\.client_app"):
        site._node_of(warm, "clinics.warm:app")
