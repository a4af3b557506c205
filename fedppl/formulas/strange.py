"""Numeric columns that are other ones at one client than at the others: swapped, or in another unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl.formulas.agreement import Told
from fedppl.types import Array

# Between a client's mean and the others', in sds within clients and between them; and in its own standard errors.
_AWAY = 6.0
_SCALE = 30.0  # between sizes
_SPREAD = 10.0  # between sds within clients
_BEYOND = 3.0  # any of them
_FEW = 8  # clients: of fewer, a median of deviations says nothing


class _Moments(NamedTuple):
    clients: list[str]
    rows: Array
    mean: Array
    sd: Array
    size: Array  # root mean square


def strange(told: Mapping[str, Mapping[str, Told]]) -> list[str]:
    """Numeric columns of a client that are on another scale than at the others, or elsewhere, in words.

    Named is who has a mean farther from the others' median than 6 of the larger of two sds, within clients and between
    the others' means, and than 6 standard errors of its own; who has a sd a tenth or ten times the median of the
    others', beyond what so few rows do by chance, and a third or three times any of them; and whose root mean square is
    a thirtieth or thirty times as large.
    Two clients are too few to tell which of them is odd.
    """
    found = []
    for name in next(iter(told.values()), {}):
        kept = {k: one[name] for k, one in told.items() if not one[name].text}
        kept = {k: one for k, one in kept.items() if one.rows and not one.withheld}
        if len(kept) < 3:
            continue
        rows = np.array([one.rows for one in kept.values()], dtype=float)
        mean = np.array([one.total for one in kept.values()]) / rows
        square = np.array([one.squares for one in kept.values()]) / rows
        variance = np.maximum(square - mean**2, 0.0) * rows / np.maximum(rows - 1, 1)
        # What is left where two large numbers were taken from each other says nothing.
        sd = np.where(variance > 1e-12 * square, np.sqrt(variance), 0.0)
        moments = _Moments(list(kept), rows, mean, sd, np.sqrt(square))
        found += [
            f"{name!r} at client {client_id!r} {why}"
            for place, client_id in enumerate(moments.clients)
            if (why := _odd(moments, place))
        ]
    return found


def _odd(all_of: _Moments, place: int) -> str | None:
    """What is odd about one client's column, or None."""
    others = np.arange(len(all_of.clients)) != place
    size, others_size = all_of.size[place], all_of.size[others]
    middle = float(np.median(others_size[others_size > 0])) if np.any(others_size > 0) else 0.0
    if middle > 0 and size > 0 and not 1 / _SCALE < size / middle < _SCALE:
        return f"is of size {size:.3g}, at most others of {middle:.3g}"
    mean, centre = all_of.mean[place], float(np.median(all_of.mean[others]))
    within = float(np.median(all_of.sd[others]))
    if within == 0:  # a column of clients, not of rows: nothing says how far two may be apart
        return None
    error = all_of.sd[place] / np.sqrt(all_of.rows[place])
    wide = max(within, _between(all_of.mean[others]))
    if abs(mean - centre) > _AWAY * max(wide, error) and all_of.rows[place] > 1:
        return f"has the mean {mean:.3g}, at most others {centre:.3g} with sds of {within:.3g}"
    sd = all_of.sd[place]
    slack = np.exp(4.0 / np.sqrt(max(all_of.rows[place] - 1, 1)))  # log of a sd has this error, four times over
    among = sd / all_of.sd[others][all_of.sd[others] > 0]
    alone = np.all(among > _BEYOND) or np.all(among < 1 / _BEYOND)
    if sd > 0 and alone and not 1 / (_SPREAD * slack) < sd / within < _SPREAD * slack:
        return f"has the sd {sd:.3g}, at most others {within:.3g}"
    return None


def _between(means: Array) -> float:
    """How far means of the others lie apart: robustly where there are enough of them, and more where they are few."""
    if len(means) < _FEW:
        return float(np.std(means, ddof=1)) * (1.0 + 4.0 / (len(means) - 1))
    return float(1.5 * 1.4826 * np.median(np.abs(means - np.median(means))))
