"""Code of the pages, run as it stands there, beside the data that each takes for granted.

Other tests run README, docs/callbacks.md, docs/coming_from, docs/privacy.md and docs/when_it_fails.md; what
docs/deployment.md has needs processes of its own (tests/test_deployment.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest

import fedppl
from models import hm1
from tests.support import problems

DOCS = Path(__file__).parents[1] / "docs"
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
    return {"frame": frame}


def of_engines() -> dict[str, Any]:
    return {"engine_trend": hm1.linear_regression, "clients": {name: rows(30, 5) for name in "ABCDEF"}}


PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "algorithms": of_engines,
    "curves": of_curves,
    "ep_in_pictures": dict,
    "fedlmc_ss": dict,
    "fedsi": a_network,
    "hm1": lambda: {"clients": {name: rows(20) for name in "ABCDE"}},
    "hm2": dict,
    "index": of_a_trial,
    "models": of_schools,
    "networks": of_networks,
    "pfedvem": lambda: {"hospitals": {name: binary(60) for name in "ABC"}},
    "plots": of_plots,
    "scale": lambda: {"model": fedppl.formula("y ~ x + (1 | group)"), "frame": grouped(60)},
    "summaries": dict,
}
SLOW = {"models", "summaries"}


@pytest.mark.parametrize("page", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PAGES])
@problems.few_rounds
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(7))
    names: dict[str, Any] = {"np": np, "pm": pm, "pt": pt, "fedppl": fedppl, **PAGES[page]()}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        if "cuda" not in block:  # nothing here has one
            exec(compile(block, f"docs/{page}.md, block {number}", "exec"), names)  # noqa: S102


def test_no_page_with_code_is_left_out() -> None:
    elsewhere = {"callbacks", "deployment", "formulas", "privacy", "when_it_fails"}
    with_code = {page.stem for page in DOCS.glob("*.md") if "```python\n" in page.read_text(encoding="utf-8")}
    assert with_code == {*PAGES, *elsewhere}
