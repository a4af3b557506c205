"""pFedVEM's benchmark: what is said of fits that were kept by another command."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedppl

pytest.importorskip("torch")

from benchmarks import fedsi, uncertainty  # noqa: E402
from benchmarks import kept as kept_fits  # noqa: E402
from benchmarks import pfedvem as benchmark  # noqa: E402
from benchmarks._fedsi import fit as of_fedsi_fit  # noqa: E402
from benchmarks._pfedvem.fit import last_told, one_fit  # noqa: E402
from fedppl.models import fedsi as methods  # noqa: E402
from fedppl.models import pfedvem as models  # noqa: E402


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


def of_pfedvem(folder: Path) -> Any:
    return one_fit(("FedAvg", 0), benchmark.arguments(["--folder", str(folder)]))


def of_uncertainty(folder: Path) -> Any:
    options = uncertainty.arguments(["--folder", str(folder)])
    return uncertainty.score(uncertainty.Cell("FedBABU", 5, 0, 1e-3, 0), options)


def of_fedsi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without images, which a fit that was kept has no need of."""
    monkeypatch.setattr(of_fedsi_fit, "find_data", lambda *_: None)
    monkeypatch.setattr(of_fedsi_fit, "load", lambda *_: None)
    monkeypatch.setattr(of_fedsi_fit, "divide", lambda *_: None)
    return of_fedsi_fit.one_seed(
        0, fedsi.arguments(["--folder", str(folder), "--methods", "FedBABU", "--rates", "1e-3"])
    )


@pytest.mark.parametrize("name", ["pfedvem", "uncertainty", "fedsi"])
def test_a_kept_fit_of_other_settings_is_not_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files have what the command line says, and not the defaults of methods, which models/ may change."""
    run, file, found, method, rows = {
        "pfedvem": (of_pfedvem, "fmnist-50-same-100-FedAvg-0", {"method": "FedAvg"}, "FedAvg", models.METHODS),
        "uncertainty": (of_uncertainty, "mnist-30-FedBABU-5-0-0-0.001", {"NLL": 1.0}, "FedBABU", methods.METHODS),
        "fedsi": (
            functools.partial(of_fedsi, monkeypatch=monkeypatch),
            "mnist-small-seed0-FedBABU-0.001-head_sd100-rounds30",
            [{"row": "FedBABU"}],
            "FedBABU",
            methods.METHODS,
        ),
    }[name]
    algorithm = models.METHODS[method].algorithm(()) if name == "pfedvem" else None
    algorithm = algorithm or methods.METHODS[method].algorithm(1e-3, (), methods.EPOCHS)
    (tmp_path / f"{file}.json").write_text(json.dumps(found))
    assert run(tmp_path) == found  # as kept before settings were
    kept_fits.write(tmp_path / f"{file}.json", found, algorithm)
    assert run(tmp_path) == found
    other = rows[method]._replace(algorithm=lambda *_, **__: fedppl.nn.FedAvg(learning_rate=0.5))
    monkeypatch.setitem(rows, method, other)
    with pytest.raises(ValueError, match=r"is of a fit with .*learning_rate 0.*, and now 0.5; .*delete the file"):
        run(tmp_path)
