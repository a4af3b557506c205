"""The page on failures: its code ends as the page says."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import fedppl

DOCS = Path(__file__).parents[2] / "docs"


def test_every_piece_of_code_ends_as_the_page_says() -> None:
    """By its kind of exception or its status; what is said beside it may change."""
    spec = importlib.util.spec_from_file_location("outputs", DOCS / "outputs.py")
    assert spec is not None and spec.loader is not None
    outputs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(outputs)
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    found = outputs.outcomes((DOCS / "when_it_fails.md").read_text(encoding="utf-8"))
    said, now = ([outputs.kind(one) for one in pair] for pair in zip(*found, strict=True))
    assert now == said
    errors = {error.__name__ for error in (fedppl.DeclarationError, fedppl.DataError)}
    statuses = {status.value for status in fedppl.Status}
    assert set(now) & errors == errors
    assert set(now) - errors <= statuses and len(set(now) - errors) >= 2


def test_every_status_that_a_fit_may_end_with_has_its_line() -> None:
    page = (DOCS / "when_it_fails.md").read_text(encoding="utf-8")
    for status in set(fedppl.Status) - {fedppl.Status.RUNNING}:
        assert f"| `{status.value}` |" in page
