"""pFedVEM's benchmark: what is said of fits that were kept by another command."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import pfedvem as benchmark  # noqa: E402
from benchmarks._pfedvem.fit import last_told  # noqa: E402


def kept(*rounds: int) -> dict[str, Any]:
    """A fit whose global model was scored in these rounds, with their numbers."""
    return {"PM": {}, "GM": {str(number): float(number) for number in rounds}, "seconds": 1.0}


def test_the_best_round_is_told_of_fits_that_were_scored_in_all_rounds_that_are_asked_for() -> None:
    """It was that of one round in ten, from a kept fit, beside those of all rounds."""
    every, tenth = benchmark.arguments([]), benchmark.arguments(["--score-every", "10"])
    few = kept(*range(10, 91, 10), *range(91, 101))
    assert "GM best (on test)" not in benchmark.figures(few, every)
    assert benchmark.figures(few, tenth)["GM best (on test)"] == 100.0
    many = kept(*range(1, 101))
    many["GM"]["3"], many["GM"]["100"] = 99.5, 98.0
    assert benchmark.figures(many, every)["GM best (on test)"] == 99.5
    assert benchmark.figures(many, tenth)["GM best (on test)"] == 99.0  # round 3 is not asked for
    assert benchmark.figures(few, every)["GM last 10"] == 95.5


def test_cuts_that_change_nothing_are_refused() -> None:
    with pytest.raises(SystemExit):
        benchmark.arguments(["--dataset", "digit5", "--cuts", "equal"])
    assert benchmark.arguments(["--dataset", "cifar10", "--cuts", "equal"]).cuts == "equal"


def test_what_few_clients_told_is_kept_by_client() -> None:
    """A round's own column of the same name took its place in a short run, which ended in an error."""
    infos = [
        {"a": {"confidence": 1.0, "deviation": float("nan")}},
        {},
        {"b": {"confidence": 2.0}},
        {"a": {"confidence": 3}},
    ]
    fit = SimpleNamespace(client_ids=["a", "b", "c"], records=[SimpleNamespace(infos=one) for one in infos])
    assert last_told(fit, ("confidence", "deviation", "cluster")) == {"confidence": {"a": [3.0], "b": [2.0], "c": []}}
