"""The code and the commands of docs/bundles.md: a server and three sites without a network."""

from __future__ import annotations

import shlex
import sys
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

import fedppl
from fedppl import site as fedppl_site
from fedppl.testing import normal_means
from tests.support import page


def block(language: str) -> str:
    (found,) = page.blocks(page.ROOT / "docs" / "bundles.md", language)
    return found


def test_sites_that_answer_bundles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's block as often as it waits, and the site's command for each bundle that it names."""
    rng, names = np.random.default_rng(1), ("north", "south", "west")
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line, comments=True)[3:] for line in block("bash").splitlines()]
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
    code = block("python").replace("/var/lib/fedppl/", f"{tmp_path}/")
    for _ in range(60):
        found = page.run(code, "docs/bundles.md", {"fedppl": fedppl, **read})
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
