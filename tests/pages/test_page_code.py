"""Code of the pages, run as it stands there, beside the data that each takes for granted.

And a look over all pages: what has code is run here or by a test that is named, or has a reason why not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest

import fedppl
from fedppl.models import hm1
from tests.support import page as pages
from tests.support import problems
from tests.support.markers import slow_but

ROOT = pages.ROOT
DOCS = ROOT / "docs"
RNG = np.random.default_rng(7)


def rows(count: int, columns: int = 2) -> dict[str, Any]:
    """Rows of a regression with a constant."""
    X = np.column_stack([np.ones(count), RNG.normal(size=(count, columns - 1))])
    return {"X": X, "y": X @ RNG.normal([1.0, 2.0, *[0.0] * (columns - 2)], 0.3) + RNG.normal(size=count)}


def binary(count: int) -> dict[str, Any]:
    data = rows(count, 3)
    return {"X": data["X"], "y": (data["y"] > 1).astype(int)}


def grouped(count: int) -> pd.DataFrame:
    group = np.repeat(np.arange(count), 6)
    x = RNG.normal(size=len(group))
    return pd.DataFrame({"group": group, "x": x, "y": x + RNG.normal(size=count)[group] + RNG.normal(size=len(group))})


def curve(count: int, height: float) -> tuple[Any, Any]:
    x = np.sort(RNG.uniform(-5, 5, count))
    return x, height * np.sin(x) + 0.1 * RNG.normal(size=count)


def of_curves() -> dict[str, Any]:
    (x_a, y_a), (x_b, y_b), (x_c, y_c) = curve(40, 1.0), curve(40, -0.7), curve(40, 0.5)
    return {"x_a": x_a, "y_a": y_a, "x_b": x_b, "y_b": y_b, "x_c": x_c, "y_c": y_c, "x_new": np.linspace(-5, 5, 9)}


def of_networks() -> dict[str, Any]:
    pytest.importorskip("torch")
    found: dict[str, Any] = {"X_new": RNG.normal(size=(3, 64))}
    for name in "abc":
        found |= {f"X_{name}": RNG.normal(size=(30, 64)), f"y_{name}": RNG.integers(0, 10, size=30)}
    found["wards"] = {name: {"X": found[f"X_{name}"], "y": RNG.integers(0, 2, size=30)} for name in "ab"}
    return found


def a_network() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {"net": torch.nn.Linear(3, 2)}


def of_schools() -> dict[str, Any]:
    first, second, third = rows(25), rows(15), rows(8)
    found = {f"{name}{k}": data[name] for k, data in enumerate((first, second, third), 1) for name in "Xy"}
    return {**found, "X_new": first["X"][:3], "names": ["constant", "study"]}


def of_plots() -> dict[str, Any]:
    pytest.importorskip("matplotlib").use("Agg")

    def builder(X: Any, y: Any) -> Any:
        with pm.Model(coords={"predictor": ["constant", "dose"]}) as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            mu = pm.Normal("mu", 0, 3, dims="predictor")
            theta = pm.Normal("theta", mu, pm.HalfNormal("tau", 1), dims="predictor")
            pm.Normal("obs", X @ theta, 1, observed=y)
        return model

    clients = {name: rows(12) for name in "ABC"}
    return {"model": fedppl.FederatedModel(builder, shared=["mu", "tau"]), "clients": clients}


def of_a_trial() -> dict[str, Any]:
    site, arm = np.repeat(["A", "B", "C"], 30), RNG.choice(["control", "drug"], 90)
    frame = pd.DataFrame({"site": site, "arm": arm, "age": RNG.normal(size=90), "healed": RNG.integers(0, 2, 90)})
    pytest.importorskip("matplotlib").use("Agg")
    return {"frame": frame}


def of_engines() -> dict[str, Any]:
    return {"engine_trend": hm1.linear_regression, "clients": {name: rows(30, 5) for name in "ABCDEF"}}


def of_hospitals_with_torch() -> dict[str, Any]:
    pytest.importorskip("torch")
    return {"hospitals": {name: binary(60) for name in "ABC"}}


PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "algorithms": of_engines,
    "curves": of_curves,
    "ep_in_pictures": dict,
    "fedlmc_ss": dict,
    "fedsi": a_network,
    "formulas": dict,
    "hm1": lambda: {"clients": {name: rows(20) for name in "ABCDE"}},
    "hm2": dict,
    "index": of_a_trial,
    "models": of_schools,
    "networks": of_networks,
    "pfedvem": of_hospitals_with_torch,
    "plots": of_plots,
    "scale": lambda: {"model": fedppl.formula("y ~ x + (1 | group)"), "frame": grouped(60)},
    "summaries": dict,
    "trial_protocol": of_a_trial,
}
# Pages whose code takes more than eight CPU seconds, most of them to compile.
SLOW = {"curves", "fedlmc_ss", "formulas", "models", "networks", "plots", "summaries", "trial_protocol"}
# Pages that tests of their own run, block by block or whole. Folders stand for all pages in them.
ELSEWHERE = {
    "README.md": "formulas/test_formulas.py::test_the_readme_s_code_runs_as_pasted",
    "docs/attacks_measured.md": "pages/test_privacy_doc.py::test_the_code_of_attacks_measured_runs",
    "docs/bundles.md": "pages/test_bundles_page.py::test_sites_that_answer_bundles",
    "docs/callbacks.md": "run/test_callbacks.py::test_every_recipe_of_the_page_is_run",
    "docs/coming_from": "pages/test_coming_from.py::test_a_page_s_code_runs_as_pasted",
    "docs/deployment.md": "pages/test_deployment_page.py::test_every_block_of_the_page_is_one_of_these",
    "docs/install_at_a_hospital.md": "pages/test_deployment_page.py::test_lines_of_json",
    "docs/privacy.md": "pages/test_privacy_doc.py::test_the_code_on_the_page_runs",
    "docs/when_it_fails.md": "pages/test_when_it_fails.py::test_every_piece_of_code_ends_as_the_page_says",
}
# Blocks of commands by page, and what runs them, or why nothing does.
COMMANDS = {
    "README.md": ("set up: .ci/run has both, since a test cannot make what it runs in",) * 2,
    "docs/coming_from/r.md": ("pages/test_coming_from.py",),
    "docs/deployment.md": ("pages/test_deployment_page.py",) * 3,
    "docs/install_at_a_hospital.md": ("pages/test_deployment_page.py", "sites/test_check.py"),
    "docs/bundles.md": ("pages/test_bundles_page.py",),
    "docs/index.md": ("set up: as in README, with other extras",),
    "docs/security.md": ("takes minutes; test_attacks.py has its short form",),
}
# Blocks that are marked "py" are of other packages: why no test runs them.
OF_OTHERS = {
    "docs/coming_from/flower.md": "it needs processes of Flower, and is there to compare with; its first line says so",
    "docs/coming_from/laplace.md": "laplace-torch is not installed; benchmarks/coming_from.py runs it where it is",
    "docs/coming_from/mixed_models.md": "bambi is not installed; benchmarks/coming_from.py runs it where it is",
}


def has_cuda() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.cuda.is_available())


@pytest.mark.parametrize("page", slow_but(PAGES, *(PAGES.keys() - SLOW)))
@problems.few_rounds
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(7))
    monkeypatch.setattr(logging.getLogger("fedppl"), "handlers", [])  # a page may add one
    names: dict[str, Any] = {"np": np, "pm": pm, "pt": pt, "fedppl": fedppl, **PAGES[page]()}
    found = pages.blocks(DOCS / f"{page}.md")
    assert found
    for number, block in enumerate(found):
        if "cuda" not in block or has_cuda():
            pages.run(block, f"docs/{page}.md, block {number}", names)


def with_blocks(*languages: str) -> dict[str, list[str]]:
    """Pages that have blocks in these languages, and the blocks."""
    found = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *DOCS.rglob("*.md")]}
    each = {name: [text for kind, text in pages.fences(path) if kind in languages] for name, path in found.items()}
    return {name: texts for name, texts in each.items() if texts}


def test_no_page_with_code_is_left_out() -> None:
    here = {f"docs/{name}.md" for name in PAGES}
    folders = tuple(f"{name}/" for name in ELSEWHERE if not name.endswith(".md"))
    found = {name for name in with_blocks("python") if not name.startswith(folders)}
    assert found == here | {name for name in ELSEWHERE if name.endswith(".md")}


def test_the_tests_that_run_other_pages_are_there() -> None:
    for page, test in ELSEWHERE.items():
        file, _, function = test.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text and Path(page).stem in text, test


def test_python_by_another_name_is_of_other_packages() -> None:
    assert with_blocks("py").keys() == OF_OTHERS.keys()
    assert not any("import fedppl" in text for texts in with_blocks("py").values() for text in texts)
    assert not with_blocks("", "python3", "Python", "pycon", "ipython", "{code-block} python")


def test_no_command_is_left_out() -> None:
    found = with_blocks("bash", "sh", "shell", "console")
    assert {name: len(texts) for name, texts in found.items()} == {name: len(how) for name, how in COMMANDS.items()}
    for how in {one for each in COMMANDS.values() for one in each if one.endswith(".py")}:
        assert (ROOT / "tests" / how).is_file()
