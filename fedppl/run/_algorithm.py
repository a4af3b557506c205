"""What is checked of an algorithm before a run begins, and of what its functions return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.contracts import (
    Algorithm,
    Disclosure,
    LocalInference,
    Needs,
    Point,
    Posterior,
    Replies,
    Report,
    Result,
    Sampler,
)
from fedppl.results.records import COLUMNS
from fedppl.settings import not_called, shown, takes
from fedppl.types import DeclarationError, Status

_TUPLES = {"replies": Replies, "result": Result, "needs": Needs, "disclosure": Disclosure}
# Numbers of arguments.
_FUNCTIONS = {
    Algorithm: {"init": 3, "broadcast": 2, "update_client": 4, "update_server": 2},
    Replies: {"shapes": 1, "reject": 2, "summed": 1},
    Result: {"final_message": 2, "draw": 6, "details": 1, "preliminary": 1, "closing": 1, "out_of_rounds": 1},
    Needs: {"check": 1, "unused_priors": 1},
    Disclosure: {"at_sites": 1, "unseen": 2},
    Posterior: {"gaussian": 1, "corrected": 1, "evidence": 2},
    Point: {"estimate": 1},
    Sampler: {"draw": 3},
}
_OPTIONAL = {
    Algorithm: {"unreported": 4},
    Result: {"resume": 2},
    Disclosure: {"asks": 2, "concludes": 2},
    Posterior: {"without": 3},
}


def require_algorithm(algorithm: Any) -> None:
    """Refuse what is no algorithm that is built, and one whose parts cannot be called as they will be."""
    if not isinstance(algorithm, Algorithm):
        remedy = not_called(algorithm) or "; pass one that is built, like fedppl.EP()."
        if isinstance(algorithm, LocalInference):
            remedy = " but how clients compute; pass fedppl.EP(local=...)."
        raise DeclarationError(f"algorithm={shown(algorithm)} is no algorithm{remedy}")
    if not isinstance(algorithm.name, str) or not algorithm.name:
        raise DeclarationError(f"an algorithm's name is {shown(algorithm.name)}; give it a text that is not empty.")
    name, settings = algorithm.name, algorithm.settings
    if not isinstance(settings, Mapping) or not all(
        isinstance(text, str) for pair in settings.items() for text in pair
    ):
        raise DeclarationError(
            f"{name}: settings={shown(settings)} must be texts by name; see fedppl.settings.described."
        )
    for field, kind in _TUPLES.items():
        if not isinstance(value := getattr(algorithm, field), kind):
            raise DeclarationError(f"{name}: {field}={shown(value)} must be a fedppl.contracts.{kind.__name__}.")
    shared = algorithm.result.shared
    if shared is not None and not isinstance(shared, Posterior | Point | Sampler):
        raise DeclarationError(
            f"{name}: result.shared={shown(shared)} must be a Posterior, Point or Sampler of fedppl.contracts, or None."
        )
    for part in (algorithm, *(getattr(algorithm, field) for field in _TUPLES), *([shared] if shared else [])):
        _require_functions(name, part)
    noise = algorithm.disclosure.noise_multiplier
    if noise is not None and not (isinstance(noise, int | float) and 0 < noise < np.inf):
        raise DeclarationError(
            f"{name}: disclosure.noise_multiplier={shown(noise)} must be positive, or None where ε is unknown."
        )


def _require_functions(name: str, part: Any) -> None:
    kind = type(part)
    optional = {field: count for field, count in _OPTIONAL.get(kind, {}).items() if getattr(part, field) is not None}
    for field, count in {**_FUNCTIONS[kind], **optional}.items():
        function = getattr(part, field)
        where = field if kind is Algorithm else f"{kind.__name__}.{field}"
        if not callable(function):
            raise DeclarationError(f"{name}: {where}={shown(function)} must be a function.")
        if not takes(function, count):
            raise DeclarationError(
                f"{name}: {where} is called with {count} arguments and cannot be; see fedppl.contracts.{kind.__name__}."
            )


def require_report(name: str, returned: Any) -> None:
    """Refuse what is not (state, Report), before it is kept in a record that cannot be read in the end."""
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Report):
        raise DeclarationError(f"{name}: update_server returned {shown(returned)}; return (state, Report).")
    report = returned[1]
    if not isinstance(report.info, tuple) or not hasattr(report.info, "_asdict"):
        raise DeclarationError(f"{name}: Report.info is {type(report.info).__name__}; make it a NamedTuple.")
    if not isinstance(report.status, Status):
        raise DeclarationError(f"{name}: Report.status is {shown(report.status)}; make it a fedppl.Status.")
    if report.message is not None and not isinstance(report.message, str):
        raise DeclarationError(f"{name}: Report.message is {shown(report.message)}; make it a text, or None.")
    if taken := COLUMNS & report.info._asdict().keys():
        raise DeclarationError(
            f"{name}: Report.info has {sorted(taken)}, which the table of rounds has of its own; choose other names."
        )


def numbers_and_texts(info: Any) -> dict[str, float | str]:
    """What of a round's diagnostics goes into the table: numbers and texts, NumPy's among them."""
    found = {
        name: value.item() if isinstance(value, np.generic | np.ndarray) and not np.ndim(value) else value
        for name, value in info._asdict().items()
    }
    return {name: value for name, value in found.items() if isinstance(value, int | float | str)}
