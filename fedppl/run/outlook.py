"""Where a run stands and what is left of it, in words: change against tolerance, rounds and time.

How many rounds are left can be estimated only while the change shrinks by about the same factor each round; else there
is the most that ``rounds=`` allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.results import fallbacks
from fedppl.results.records import Record
from fedppl.types import Status

_LOOKED_AT = 3  # rounds, of which changes and seconds are taken
_SHRINKING = 0.9  # a factor above which the change does not get anywhere
_ALIKE = 2.0  # how far apart two factors may be of one geometric sequence
_UNITS = {"change_mean": " sd", "change_sd": " sd"}


class Left(NamedTuple):
    """Rounds that are left, and whether that is an estimate or the most there can be."""

    rounds: int
    estimated: bool


def standing(record: Record, infos: Mapping[str, Mapping[str, float]], tolerance: float | None) -> str:
    """What a round did: its phase, the change, who was skipped, and who fell back."""
    notes = [str(record.info["phase"])] if "phase" in record.info else []
    size, unit = change(record.info)
    if np.isfinite(size):
        compared = f" (tolerance {tolerance:g})" if tolerance is not None and not record.preliminary else ""
        notes.append(f"change {size:.2g}{unit}{compared}")
    notes += [f"{len(record.failures)} skipped"] if record.failures else []
    return ", ".join([*notes, *filter(None, [fallbacks.note(infos)])])


def ahead(records: Sequence[Record], limit: int | None, counted: int, tolerance: float | None) -> str:
    """What is left of a run, in words, from all rounds so far; empty where nothing is known of it.

    Of rounds that count it may have `limit` and has had `counted`; it ends where changes are below `tolerance`.
    """
    last = [record for record in records[-_LOOKED_AT:] if not record.preliminary]
    left = rounds_left(records, limit, counted, tolerance)
    if not last or left is None or left.rounds == 0 or records[-1].status is not Status.RUNNING:
        return ""
    seconds = spelled(left.rounds * sum(record.seconds for record in last) / len(last))
    if left.estimated:
        return f"about {left.rounds} round{'' if left.rounds == 1 else 's'} left, {seconds}"
    return f"at most {left.rounds} of rounds={limit} left, {seconds}"


def rounds_left(records: Sequence[Record], limit: int | None, counted: int, tolerance: float | None) -> Left | None:
    """Rounds until the change is below the tolerance, or those that are allowed; None where neither is known.

    Rounds of a start or an end have a budget of their own, of which nothing is known.
    """
    if not records or records[-1].preliminary:
        return None
    most = None if limit is None else max(limit - counted, 0)
    last = list(records[-_LOOKED_AT:])
    sizes = [change(record.info)[0] for record in last]
    alike = len({record.info.get("phase") for record in last}) == 1 and not any(record.preliminary for record in last)
    # Where only some are asked, one round's change is no measure; where Monte Carlo error is larger, it ends otherwise.
    whole = len({(record.together, frozenset(record.asked)) for record in last}) == 1 and not any(
        record.silent for record in last
    )
    noisy = any(_number(record.info.get("mc_error")) > (tolerance or 0.0) for record in last)
    told = all(size > 0 for size in sizes)  # not NaN either, as in a round that moved nothing
    if tolerance and len(last) == _LOOKED_AT and alike and whole and told and not noisy:
        factors = [after / before for before, after in zip(sizes, sizes[1:], strict=False)]
        if max(factors) < _SHRINKING and max(factors) <= _ALIKE * min(factors):
            needed = max(1, math.ceil(math.log(tolerance / sizes[-1]) / math.log(max(factors))))
            if most is None or needed <= most:
                return Left(needed, True)
    return None if most is None else Left(most, False)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def change(info: Mapping[str, Any]) -> tuple[float, str]:
    """The largest change that the server told of a round, with its unit; NaN where it told none."""
    found = {name: info[name] for name in ("change_mean", "change_sd", "change_omega", "change") if name in info}
    numbers = {
        name: float(value) for name, value in found.items() if isinstance(value, int | float) and np.isfinite(value)
    }
    if not numbers:
        return math.nan, ""
    name = max(numbers, key=lambda one: numbers[one])
    return numbers[name], _UNITS.get(name, "")


def tolerance_of(settings: Mapping[str, str]) -> float | None:
    """What an algorithm compares the change with, where it has such a setting.

    >>> tolerance_of({"tolerance": "0.01"}), tolerance_of({"steps": "3"})
    (0.01, None)
    """
    try:
        return float(settings["tolerance"])
    except (KeyError, ValueError):
        return None


def spelled(seconds: float) -> str:
    """Time as one says it.

    >>> spelled(0.34), spelled(8.2), spelled(95), spelled(7300)
    ('0.3 s', '8 s', '1 min 35 s', '2 h 1 min')
    """
    if seconds < 1:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
