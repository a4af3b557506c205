"""The attacks of `benchmarks/attacks.py`, cut short: every bar that is met there is met here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import attacks
from tests.support import problems

LONG = {"trust", "state", "policy", "patients", "told"}
PARTS = [pytest.param(part, marks=pytest.mark.slow if part in LONG else ()) for part in attacks.PARTS]


@problems.few_rounds
@pytest.mark.parametrize("part", PARTS)
def test_every_attack_is_held(part: str) -> None:
    found: dict[str, Any] = attacks.rounded(attacks.run(part, quick=True))
    bars = {name: value for name, value in found.items() if name.endswith("_met")}
    assert bars and all(bars.values()), found
    assert json.loads(json.dumps(found)) == found  # fits on one line of JSON
