"""Rows of one client left out one at a time, and what is told of them: sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import logsumexp

from fedppl.model.client import ClientModel
from fedppl.model.summary import tells_summary
from fedppl.results import idata
from fedppl.types import Array, DeclarationError

SUMS = ("elpd", "p_loo", "rows", "good", "bad", "very_bad", "squares")


@dataclass(frozen=True)
class Rows:
    """What a client knows of its rows, and keeps."""

    elpd: Array
    p_loo: Array
    k: Array
    limit: float


def has_rows(client: ClientModel) -> bool:
    """Whether a client brought rows, and not a summary of them."""
    return not tells_summary(client.pymc_model())


def require_rows(client: ClientModel, what: str) -> None:
    """Refuse what needs rows of a client that brought a summary."""
    if not has_rows(client):
        of = f" of kind {client.kind!r}" if client.kind else ""
        raise DeclarationError(
            f"client {client.client_id!r}{of} brought a summary of its rows, and {what} need a likelihood of rows, "
            "which its model has not. Its posterior is fit.client(...); ask a client that brought rows for the rest."
        )


def rows_of(drawn: Any) -> Rows:
    """Leave each row out, of a client's posterior with the group of log densities."""
    group = idata.as_dataset(drawn["log_likelihood"])
    count = group.sizes["chain"] * group.sizes["draw"]
    parts = [(*idata.leave_one_out(group, str(name)), np.asarray(group[name])) for name in group.data_vars]
    lppd = [logsumexp(values.reshape(count, -1), axis=0) - np.log(count) for *_, values in parts]
    elpd = np.concatenate([one[0] for one in parts])
    k = np.concatenate([one[1] for one in parts])
    return Rows(elpd, np.concatenate(lppd) - elpd, k, parts[0][2])


def sums_of(rows: Rows) -> dict[str, Array]:
    """What a client gives of its rows, by the names in `SUMS`."""
    found = {
        "elpd": rows.elpd.sum(),
        "p_loo": rows.p_loo.sum(),
        "rows": len(rows.elpd),
        "good": np.sum(rows.k <= rows.limit),
        "bad": np.sum((rows.k > rows.limit) & (rows.k <= 1)),
        "very_bad": np.sum(~(rows.k <= 1)),
        "squares": np.sum(rows.elpd**2),
    }
    return {name: np.array(float(found[name])) for name in SUMS}


def implausible(sums: Array) -> str | None:
    """Why sums that a site tells cannot be, or None.

    >>> implausible(np.array([-3.0, 0.5, 2.0, 2.0, 0.0, 0.0, 5.0]))
    >>> implausible(np.array([-3.0, 0.5, 2.0, 1.0, 0.0, 0.0, 5.0]))
    'of 2 rows 1 have a Pareto k'
    """
    told = dict(zip(SUMS, sums.tolist(), strict=True))
    counts = [told[name] for name in ("rows", "good", "bad", "very_bad")]
    if not np.all(np.isfinite(sums)):
        return "sums that are not finite"
    if min(counts) < 0 or told["rows"] < 1 or any(count % 1 for count in counts):
        return "numbers of rows that are none"
    if sum(counts[1:]) != told["rows"]:
        return f"of {told['rows']:.0f} rows {sum(counts[1:]):.0f} have a Pareto k"
    if told["squares"] * told["rows"] < told["elpd"] ** 2 * (1 - 1e-9):
        return "squares that are too small for their sum"
    return None
