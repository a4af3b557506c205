"""What travels before a run by a formula: what a site tells of its columns, and what all agreed on. As JSON.

What is read raises `Malformed` and nothing else, whatever was sent; its text names the field and the rule.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedppl.flower.decode import LABELS_LENGTH, NAME_LENGTH, Malformed, brief, parsed, require
from fedppl.flower.decode import name as checked_name
from fedppl.formulas.agreement import Agreement, Column, Told

_LEVELS = 1_000  # of one column
_COLUMNS = 1_000
_IMPLAUSIBLE = 1e100  # of sums and constants: nobody has others, and their squares overflow
_ROUNDING = 1e-9  # of sums, which are added in another order
_ROWS = 2**53


def pack_told(told: Mapping[str, Told]) -> str:
    """Write what a site tells."""
    for name, one in told.items():
        _require_levels(list(one.levels), f"column {name!r}")
    return json.dumps({name: list(one) for name, one in told.items()})


def unpack_told(texts: Mapping[str, str], names: Sequence[str]) -> dict[str, Told]:
    """Read what a site tells of these columns; what no rows could have is refused."""
    found = parsed(texts, "told", LABELS_LENGTH)
    _require_names(found, names, "told")
    return {name: _told(found[name], f"column {name!r}") for name in names}


def _told(given: Any, field: str) -> Told:
    require(type(given) is list and len(given) == len(Told._fields), f"{field} is no list of {len(Told._fields)}")
    rows, total, squares, levels, withheld, text = given
    kinds = type(levels) is dict and type(withheld) is bool and type(text) is bool
    require(kinds, f"{field} has no levels, or no kind")
    for what, count in {"rows": rows, **{brief(level): n for level, n in levels.items()}}.items():
        require(type(count) is int and 0 <= count < _ROWS, f"{field} has {brief(count)} for {what!r}, no count")
    for what, number in {"total": total, "squares": squares}.items():
        _require_number(number, f"{field}, {what!r}")
    _require_levels(list(levels), field)
    if text:
        require(sum(levels.values()) <= rows, f"{field} has levels of {sum(levels.values())} rows, and {rows} rows")
        require(not total and not squares, f"{field} has levels, and sums too")
    else:
        require(not levels, f"{field} has numbers, and levels too")
        idle = not rows or withheld
        require(not idle or (not total and not squares), f"{field} has sums of rows that it does not tell")
        possible = idle or total**2 / rows <= squares * (1 + _ROUNDING)
        require(bool(possible), f"{field} has a sum of squares that is less than its sum allows")
    return Told(rows, float(total), float(squares), dict(levels), withheld, text)


def pack_agreement(agreement: Agreement) -> str:
    """Write what clients agreed on."""
    columns = {name: [list(one.levels), list(one.shares), one.mean, one.sd] for name, one in agreement.columns.items()}
    return json.dumps({"columns": columns, "rows": agreement.rows, "others": agreement.others})


def unpack_agreement(texts: Mapping[str, str], names: Sequence[str]) -> Agreement:
    """Read what clients agreed on of these columns."""
    found = parsed(texts, "agreement", LABELS_LENGTH)
    _require_names(found, ("columns", "rows", "others"), "agreement")
    rows, others, columns = found["rows"], found["others"], found["columns"]
    require(type(rows) is int and 0 <= rows < _ROWS, f"'rows' is {brief(rows)}, no count")
    require(type(others) is bool, "'others' is neither true nor false")
    _require_names(columns, names, "columns")
    return Agreement({name: _column(columns[name], f"column {name!r}") for name in names}, rows, others)


def _column(given: Any, field: str) -> Column:
    require(type(given) is list and len(given) == len(Column._fields), f"{field} is no list of {len(Column._fields)}")
    levels, shares, mean, sd = given
    require(type(levels) is list and type(shares) is list, f"{field} has no levels, or no shares")
    _require_levels(levels, field)
    require(len(levels) != 1 and len(shares) == len(levels), f"{field} has {len(levels)} levels, {len(shares)} shares")
    for number in (*shares, mean, sd):
        _require_number(number, field)
    require(sd > 0 and sd**2 > 0, f"{field} has the sd {brief(sd)}, expected one above 0")
    parts = all(0 <= share <= 1 for share in shares) and (not shares or math.isclose(sum(shares), 1, abs_tol=1e-6))
    require(parts, f"{field} has shares that are no parts of 1")
    return Column(tuple(levels), tuple(map(float, shares)), float(mean), float(sd))


def digest(agreement: Agreement) -> str:
    """What tells one agreement from another."""
    return hashlib.sha256(pack_agreement(agreement).encode()).hexdigest()[:32]


def _require_names(found: Any, names: Sequence[str], field: str) -> None:
    require(type(found) is dict and len(found) <= _COLUMNS, f"{field!r} is no mapping of {_COLUMNS} names at most")
    if set(found) != set(names):
        shown = [brief(name) for name in sorted(found)[:8]]
        raise Malformed(f"{field!r} is of {shown}, expected {sorted(names)[:8]}")


def _require_levels(levels: Sequence[Any], field: str) -> None:
    require(len(levels) <= _LEVELS, f"{field} has {len(levels)} levels, expected {_LEVELS} at most")
    for level in levels:
        checked_name(level, f"a level of {field}", NAME_LENGTH)
    require(len(set(levels)) == len(levels), f"{field} has one level twice")


def _require_number(number: Any, field: str) -> None:
    sober = type(number) in (int, float) and abs(number) < _IMPLAUSIBLE
    require(sober, f"{field} has {brief(number)}, expected a number below {_IMPLAUSIBLE:g}")
