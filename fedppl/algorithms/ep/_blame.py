"""Who is held back by `_trust`, and for what, in words."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedppl.algorithms.ep._sites import Sites
from fedppl.algorithms.ep._trust import Bounded
from fedppl.types import Array

logger = logging.getLogger(__name__)


def blamed(bounded: Bounded, trust: float) -> Array:
    """Pulls (K, m), with 0 for who is held back for its precision and not for how it pulls."""
    pull = np.nan_to_num(bounded.pull)
    within = np.abs(pull).max(axis=1) <= trust
    return np.where(((bounded.takes | bounded.gives) & within)[:, None], 0.0, pull)


def warn(bounded: Bounded, trust: float) -> None:
    """One line in the log for every client that is held back; far from the mode honest factors may bend outwards."""
    names, labels, pull = list(bounded.sites.where), bounded.sites.labels, blamed(bounded, trust)
    for k in np.flatnonzero(bounded.held):
        logger.log(
            logging.WARNING if np.any(pull[k]) else logging.INFO,
            "client %s held back: it %s (of what the others know), trust=%s",
            names[k],
            _what(pull[k], labels),
            trust,
            extra={"client": names[k], "status": "held back"},
        )


def said(sites: Sites, rows: NDArray[np.intp], pull: Array, trust: float, nearly: bool = False) -> str:
    """Name the clients that are held back, or nearly so, and where they pull, or say nothing."""
    if not len(rows):
        return ""
    names = list(sites.where)
    rows = rows[np.argsort(-np.abs(pull[rows]).max(axis=1), kind="stable")]
    shown = [f"{names[k]} ({_what(pull[k], sites.labels)})" for k in rows[:5]]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    what = "nearly held back" if nearly else "held back, since what the others know does not allow it"
    return f"{what}: {', '.join(shown)}{more}; look at their data, or raise trust={trust:g}"


def _what(pull: Array, labels: Sequence[str]) -> str:
    """Where a client that is held back pulls most; if nowhere, it is for its precision."""
    if not np.nanmax(np.abs(pull), initial=0.0) >= 1e-6:
        return "gives or takes more precision than the others allow"
    i = int(np.argmax(np.abs(pull)))
    return f"pulls {labels[i]} by {pull[i]:+.2g} sds"
