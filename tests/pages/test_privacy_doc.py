"""The pages on privacy and on attacks: their code runs, and the table has the bytes that runs record."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

import fedppl
from fedppl.contracts import Failure, Reply
from fedppl.engine.inprocess import InProcessEngine
from fedppl.engine.policy import NO_RULES
from fedppl.types import LocalFailure
from tests import cases
from tests.cases import CASES, rows
from tests.support import page, problems

DOCS = page.ROOT / "docs"
PAGE = (DOCS / "privacy.md").read_text(encoding="utf-8")


def formulas() -> dict[str, tuple[str, str]]:
    """Bytes down and up by message, as the table has them, in Python's notation."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[2].startswith(("`8", "`0")):
            found[cells[0]] = tuple(re.sub(r"([\dS])(?=[mtpnLST(])", r"\1 * ", cells[i].strip("`")) for i in (2, 4))
    return found


def bytes_of(message: str, m: int, p: int) -> tuple[int, int]:
    letters = {"m": m, "t": m * (m + 1) // 2, "p": p}
    down, up = formulas()[message]
    return eval(down, letters), eval(up, letters)  # noqa: S307


def messages_of(algorithm: str) -> list[str]:
    """Rows of the table on the page in which an algorithm is named."""
    return [message for message in formulas() if algorithm in re.findall(r"[\w.]+", message)]


def test_the_table_has_a_row_for_every_message() -> None:
    algorithms = {case.algorithm for case in CASES.values()} - {"skeleton.Newton"}
    found = {name: messages_of(name) for name in algorithms | {"PrivateEP"}}
    assert all(len(messages) == (2 if name in ("EP", "Sums") else 1) for name, messages in found.items()), found
    assert {message for messages in found.values() for message in messages} == set(formulas())


# One row for each algorithm; those of EP and PrivateEP follow below.
FIRST = list(
    {
        case.algorithm: name
        for name, case in reversed(CASES.items())
        if case.algorithm not in ("EP", "Sums", "skeleton.Newton")
    }.values()
)


def sizes(fit: fedppl.Fit, settings: Any) -> dict[str, int]:
    """The letters of the table."""
    m = fit.layout.size
    found = {"m": m, "t": m * (m + 1) // 2, "S": settings.get("draws", 0)}
    if hasattr(fit.state, "roles"):
        latents, points = fit.state.roles.latents, fit.state.roles.points
        n = latents * points
        found |= {"n": n, "b": n * (points + 1) // 2, "B": latents * (latents + 1) // 2, "T": n * (n + 1) // 2}
        found |= {"L": latents, "p": latents}
    return found


@problems.few_rounds
@pytest.mark.parametrize("name", rows(FIRST))
def test_bytes_are_those_of_the_ledger(name: str) -> None:
    case = CASES[name]
    model, clients = case.problem()
    engine = fedppl.InProcess(workers=1)
    fit = fedppl.fit(model, clients, case.build(), rounds=2, engine=engine, progressbar=False, random_seed=1)
    rounds, letters, (message,) = fit.idata["rounds"], sizes(fit, case.settings), messages_of(case.algorithm)
    down, up = (eval(formula, letters) for formula in formulas()[message])  # noqa: S307
    assert np.all(rounds["outcome"] == "used")
    assert np.all(rounds["bytes_down"] == down)
    starts_apart = case.problem in (cases.coregional, cases.coregional_all)  # units send their own kernels first
    assert np.all(rounds["bytes_up"][int(starts_apart) :] == up)
    assert not starts_apart or np.all(rounds["bytes_up"][0] == 8 * (letters["p"] + 1))


@pytest.mark.parametrize("problem", [problems.regression, problems.noise])
def test_bytes_of_ep_are_those_of_the_ledger(problem: Any) -> None:
    model, clients = problem()
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    rounds, m = fit.idata["rounds"], fit.layout.size
    seen = set()
    for t, phase in enumerate(rounds["phase"].values):
        message = {"warm start": "EP, warm start", "EP": "EP, refinement"}[phase]
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


@pytest.mark.parametrize(
    ("problem", "settings"),
    [(problems.regression, {"starts": 1}), (problems.noise, {"starts": 1}), (problems.regression, {"exchanges": 4})],
)
def test_bytes_of_sums_are_those_of_the_ledger(problem: Any, settings: dict[str, int]) -> None:
    model, clients = problem()
    engine = fedppl.InProcess(policy=NO_RULES)  # without one clients lie side by side, and no message has bytes
    fit = fedppl.fit(model, clients, fedppl.Sums(**settings), engine=engine, progressbar=False, random_seed=1)
    m = fit.layout.size
    rounds, letters = fit.idata["rounds"], {"m": m, "t": m * (m + 1) // 2}
    for t in range(len(rounds["phase"])):
        released = dict(re.findall(r"(\w+) \((\d+)\)", str(rounds["released"].values[t])))
        letters |= {"S": int(released.get("values", 0)), "T": int(released.get("left_out", 0))}
        message = "Sums in few exchanges, the first" if "alone" in released else "Sums, S points"
        down, up = (eval(formula, letters) for formula in formulas()[message])  # noqa: S307
        assert set(rounds["bytes_down"].values[t]) == {down}
        assert set(rounds["bytes_up"].values[t]) == {up}
    assert {"search", "weighing"} == set(rounds["phase"].values)


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


def in_order(name: str) -> int:
    """Run a page's blocks one after the other, and return how many there are."""
    names: dict[str, Any] = {}
    blocks = page.blocks(DOCS / f"{name}.md")
    for number, block in enumerate(blocks, start=1):
        page.run(block, f"docs/{name}.md, block {number}", names)
    return len(blocks)


@pytest.mark.slow
@problems.few_rounds
def test_the_code_on_the_page_runs() -> None:
    assert in_order("privacy") >= 2


@pytest.mark.slow
@problems.few_rounds
def test_the_code_of_attacks_measured_runs() -> None:
    assert in_order("attacks_measured") >= 8


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
            def exchange(self, requests: Any, deadline: Any, *heard: Any, answers: Any = answers) -> Any:
                found = super().exchange(requests, deadline, *heard)
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
