"""The page on privacy: its code runs, and its table has the bytes that runs record."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import fedppl
from fedppl.contracts import Failure, Reply
from fedppl.engine.inprocess import InProcessEngine
from fedppl.types import LocalFailure
from models import fedlmc_ss, hm1
from tests import problems

PAGE = (Path(__file__).parents[1] / "docs" / "privacy.md").read_text(encoding="utf-8")


def formulas() -> dict[str, tuple[str, str]]:
    """Bytes down and up by message, as the table has them, in Python's notation."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[2].startswith(("`8", "`0")):
            found[cells[0]] = tuple(re.sub(r"([\dS]) (?=[mtpnL(])", r"\1 * ", cells[i].strip("`")) for i in (2, 4))
    return found


def bytes_of(message: str, m: int, p: int) -> tuple[int, int]:
    sizes = {"m": m, "t": m * (m + 1) // 2, "p": p, "S": DRAWS}
    down, up = formulas()[message]
    return eval(down, sizes), eval(up, sizes)  # noqa: S307


def test_the_table_has_a_row_for_every_message() -> None:
    assert set(formulas()) == {"EP, warm start", "EP, refinement", "PrivateEP", *OTHERS, *CURVES, *NETWORKS, *WHOLE}


DRAWS = 30
OTHERS: dict[str, tuple[fedppl.Algorithm, ...]] = {
    "HM1": (fedppl.HM1(),),
    "HM1Gradient": (fedppl.HM1Gradient(learning_rate=1e-3, steps=2),),
    "FedAvg, FedProx, Ditto": (
        fedppl.FedAvg(learning_rate=0.01, steps=2),
        fedppl.FedProx(learning_rate=0.01, mu=1.0, steps=2),
        fedppl.Ditto(learning_rate=0.01, lam=1.0, steps=2),
    ),
    "SCAFFOLD": (fedppl.SCAFFOLD(learning_rate=0.01, steps=2),),
    "Confidence": (fedppl.Confidence(), fedppl.Confidence(remember=True)),
    "SeparateSGD": (fedppl.SeparateSGD(learning_rate=0.01, steps=2),),
    "Separate": (fedppl.Separate(),),
    "PrecisionWeighted": (fedppl.PrecisionWeighted(),),
    "ConsensusMonteCarlo, S draws": (fedppl.ConsensusMonteCarlo(draws=DRAWS),),
}


@problems.few_rounds
@pytest.mark.parametrize(("message", "algorithm"), [(name, one) for name, group in OTHERS.items() for one in group])
def test_bytes_of_the_others_are_those_of_the_ledger(message: str, algorithm: fedppl.Algorithm) -> None:
    data = {f"device {k}": {"X": np.eye(3)[:, :2] + k, "y": np.arange(3.0)} for k in range(3)}
    model = fedppl.FederatedModel(functools.partial(hm1.linear_regression, noise_sd=1.0), hm1.SHARED)
    fit = fedppl.fit(model, data, algorithm, rounds=1, progressbar=False, random_seed=1)
    rounds, (down, up) = fit.idata["rounds"], bytes_of(message, fit.layout.size, 0)
    assert np.all(rounds["outcome"] == "used")
    assert set(rounds["bytes_down"].values[0]) == {down}
    assert set(rounds["bytes_up"].values[0]) == {up}


NETWORKS = {
    "NetworkAveraging": fedppl.NetworkAveraging(phases=(("all", 1),)),
    "BPFed": fedppl.BPFed(epochs=1),
    "FedSI": fedppl.FedSI(epochs=1),
}
WHOLE = {
    "NetworkConfidence": (fedppl.NetworkConfidence(head=("2.weight", "2.bias"), epochs=1),),
    "NetworkSCAFFOLD": (fedppl.NetworkSCAFFOLD(epochs=1),),
    "IFCA, two clusters": (fedppl.IFCA(clusters=2, epochs=1),),
    "PerFedAvg, PFedMe": (fedppl.PerFedAvg(epochs=1), fedppl.PFedMe(epochs=1)),
    "PFedBayes": (fedppl.PFedBayes(epochs=1),),
    "FedPop": (fedppl.FedPop(head=("2.weight", "2.bias"), epochs=1),),
}


@pytest.mark.parametrize(
    ("name", "algorithm"), [*NETWORKS.items(), *((name, one) for name, group in WHOLE.items() for one in group)]
)
def test_bytes_of_networks_are_those_of_the_ledger(name: str, algorithm: fedppl.Algorithm) -> None:
    shared = ("0.weight", "0.bias", "2.weight", "2.bias")[: 4 if name in WHOLE else 2]
    model, clients = problems.classification(shared=shared)
    fit = fedppl.fit(model, clients, algorithm, rounds=2, progressbar=False, random_seed=1)
    rounds, (down, up) = fit.idata["rounds"], bytes_of(name, fit.layout.size, 0)
    assert np.all(rounds["outcome"] == "used")
    assert np.all(rounds["bytes_down"] == down) and np.all(rounds["bytes_up"] == up)


CURVES = {
    "curves.Ascent": fedppl.curves.Ascent(),
    "curves.BlockAscent": fedppl.curves.BlockAscent(),
    "curves.Averaging": fedppl.curves.Averaging(steps=2),
    "curves.Gradient": fedppl.curves.Gradient(),
}


@problems.few_rounds
@pytest.mark.parametrize("name", CURVES)
def test_bytes_of_curves_are_those_of_the_ledger(name: str) -> None:
    model, units = fedlmc_ss.two_curves()
    fit = fedppl.fit(model, units, CURVES[name], rounds=3, progressbar=False, random_seed=1)
    latents, points = fit.state.roles.latents, fit.state.roles.points
    n = latents * points
    sizes = {"n": n, "b": n * (points + 1) // 2, "B": latents * (latents + 1) // 2, "T": n * (n + 1) // 2}
    down, up = (eval(formula, {**sizes, "L": latents, "p": latents}) for formula in formulas()[name])  # noqa: S307
    rounds = fit.idata["rounds"]
    assert np.all(rounds["outcome"] == "used")
    assert np.all(rounds["bytes_down"] == down)
    assert np.all(rounds["bytes_up"][1:] == up)
    assert np.all(rounds["bytes_up"][0] == 8 * (latents + 1))


@pytest.mark.parametrize("problem", [problems.regression, problems.noise])
def test_bytes_of_ep_are_those_of_the_ledger(problem: Any) -> None:
    model, clients = problem()
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    rounds, m = fit.idata["rounds"], fit.layout.size
    seen = set()
    for t, phase in enumerate(rounds["phase"].values):
        message = "EP, warm start" if phase == "warm start" else "EP, refinement"
        down, up = bytes_of(message, m, 0)
        assert set(rounds["bytes_down"].values[t]) == {down}
        assert set(rounds["bytes_up"].values[t]) == {up}
        names = re.sub(r" \(\d+\)|;.*", "", str(rounds["released"].values[t]))
        assert (
            names
            == {
                "EP, warm start": "value, gradient, hessian, ray",
                "EP, refinement": "mean, precision, skewness, mc_error",
            }[message]
        )
        seen.add(message)
    assert seen == {"EP, warm start", "EP, refinement"}


@problems.few_rounds
@pytest.mark.parametrize(("form", "p"), [("full", 6), ("diagonal", 3), ([["mu"], ["a"]], 4)])
def test_bytes_of_private_ep_are_those_of_the_ledger(form: Any, p: int) -> None:
    model, clients = problems.regression()
    algorithm = fedppl.PrivateEP(clip=1.0, noise_multiplier=0.1, releases=2, structure=form)
    fit = fedppl.fit(model, clients, algorithm, rounds=2, progressbar=False, random_seed=1)
    rounds = fit.idata["rounds"]
    down, up = bytes_of("PrivateEP", 3, p)
    assert np.all(rounds["bytes_down"].values == down)
    assert np.all(rounds["bytes_up"].values == up)
    assert set(rounds["released"].values) == {f"site ({3 + p})"}


@problems.few_rounds
def test_the_code_on_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 10
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"docs/privacy.md, block {number}", "exec"), namespace)  # noqa: S102


def test_of_an_exception_only_the_type_travels() -> None:
    """And the whole of a text of ours: a Failure keeps what may quote data apart."""
    model, clients = problems.regression(1)
    algorithm = fedppl.EP()
    outcomes = {}
    for error in (ValueError("row 3 is 17.3"), LocalFailure("out of paper")):

        def failing(*arguments: Any, error: Exception = error) -> Any:
            raise error

        answers: list[Reply | Failure] = []

        class Listening(InProcessEngine):
            def exchange(self, requests: Any, deadline: Any, answers: Any = answers) -> Any:
                found = super().exchange(requests, deadline)
                answers.extend(found.values())
                return found

        broken = algorithm._replace(update_client=failing)
        list(fedppl.rounds(model, clients, broken, rounds=1, engine=lambda a, c: Listening(a, c, 1), random_seed=1))
        outcomes[type(error)] = answers[0]
    assert isinstance(outcomes[ValueError], Failure)
    assert outcomes[ValueError].reason == "ValueError"
    assert outcomes[ValueError].private == "row 3 is 17.3"
    assert outcomes[LocalFailure].reason == "out of paper"


class Passed(NamedTuple):
    """As much of a Flower message as the mods look at."""

    content: Any

    def has_error(self) -> bool:
        return False


def test_flowers_mods_do_not_fit_replies_with_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """They want one array record each way with equal keys, and answer with an error otherwise."""
    mods = pytest.importorskip("flwr.clientapp.mod")
    app = pytest.importorskip("flwr.app")
    errors: list[str] = []

    def refused(error: Any, *, reply_to: Any) -> Any:
        errors.append(error.reason)

    monkeypatch.setattr("flwr.clientapp.mod.centraldp_mods.Message", refused)

    def message(value: float, *names: str) -> Any:
        arrays = app.ArrayRecord({name: app.Array(np.full(2, value)) for name in names})
        return Passed(app.RecordDict({"arrays": arrays, "config": app.ConfigRecord({"clipping_norm": 0.5})}))

    request = message(1.0, "point", "prior_share")
    context: Any = None
    local = mods.LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    for mod in (local, mods.fixedclipping_mod):
        mod(request, context, lambda asked, _: message(2.0, "value", "gradient", "hessian"))
        assert "match" in errors.pop()
        found = mod(request, context, lambda asked, _: message(2.0, "point", "prior_share"))
        assert errors == []
        assert list(found.content.array_records["arrays"]) == ["point", "prior_share"]
