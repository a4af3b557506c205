"""The example policies: each is read, says every rule that it changes in words, and lets a small fit through or not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("cryptography")

import fedppl
from fedppl import ConvergenceWarning, DeclarationError, Policy, policy

FOLDER = Path(__file__).parents[2] / "examples" / "policies"
NAMES = ("open_research", "hospital", "strict")
MODEL = fedppl.formula("healed ~ age + (1 | site)", family="bernoulli")


def rows(sites: int, each: int) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"site": np.repeat([f"site {k}" for k in range(sites)], each)})
    frame["age"] = rng.normal(60, 9, len(frame))
    frame["healed"] = rng.random(len(frame)) < 1 / (1 + np.exp(-0.05 * (frame["age"] - 60)))
    return frame


def fitted(rules: Policy, sites: int, each: int) -> fedppl.Fit:
    engine = fedppl.InProcess(policy=rules, secure=True)
    frame = rows(sites, each)
    return fedppl.fit(MODEL, frame, by="site", engine=engine, random_seed=1, progressbar=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_each_rule_with_a_comment_in_words(name: str) -> None:
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"\w+ = [^#]+ # .{8,}", line) for line in rules)
    given = {line.partition(" ")[0] for line in rules}
    defaults, read = Policy(), policy.read(FOLDER / f"{name}.toml")
    left = {field.name for field in dataclasses.fields(Policy)} - given
    assert all(getattr(read, field) == getattr(defaults, field) for field in left)
    if name != "open_research":  # what no line says follows from no default that matters
        assert left <= {"declarations", "allowed_queries", "epsilon", "delta"}


def test_the_files_go_from_lenient_to_strict() -> None:
    lenient, middle, strict = (policy.read(FOLDER / f"{name}.toml") for name in NAMES)
    for field in ("rows", "events", "fewest_sites", "few_rows", "agreement", "changed_rows"):
        assert getattr(lenient, field) <= getattr(middle, field) <= getattr(strict, field)
    for field in ("requests", "cohorts", "distance", "parameters_per_row", "points", "few_rows_share"):
        assert getattr(lenient, field) >= getattr(middle, field) >= getattr(strict, field)
    assert dataclasses.replace(middle, approval=None) == policy.resolved(
        Policy(), masked=True
    )  # as its first line says


def test_open_research_lets_a_small_fit_through() -> None:
    assert fitted(policy.read(FOLDER / "open_research.toml"), 3, 90).status is fedppl.Status.CONVERGED


def test_a_hospital_answers_no_run_that_nobody_has_approved(caplog: pytest.LogCaptureFixture) -> None:
    rules = policy.read(FOLDER / "hospital.toml")
    with pytest.warns(ConvergenceWarning, match="refused by its site"):
        assert fitted(rules, 3, 90).status is fedppl.Status.STALLED
    assert "approval: nobody has approved run" in caplog.text and "approved_runs.txt" in caplog.text
    rules = dataclasses.replace(rules, approval=None)
    assert fitted(rules, 3, 90).status is fedppl.Status.CONVERGED
    with pytest.raises(DeclarationError, match="rows: 120 at 3 sites, at least 250"):
        fitted(rules, 3, 40)


def test_strict_answers_about_the_models_that_its_file_names(caplog: pytest.LogCaptureFixture) -> None:
    rules = dataclasses.replace(policy.read(FOLDER / "strict.toml"), approval=None, allowed_queries=None)
    with pytest.raises(DeclarationError, match="declarations"):
        fitted(rules, 5, 210)
    (digest,) = set(re.findall(r"declarations: (\w+) is not listed", caplog.text))
    assert fitted(dataclasses.replace(rules, declarations=[digest]), 5, 210).status is fedppl.Status.CONVERGED
