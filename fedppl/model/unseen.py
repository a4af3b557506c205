"""Which containers are outcomes, and whether rows without one may be left out: the model is asked, not the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model._declared import Declared, parts_of
from fedppl.types import Array, DataError


def outcomes_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the containers that a client's model declares as observed, as they are."""
    parts = parts_of(declared, client_id, arrays)
    return tuple(str(variable.name) for variable in _graph.observed_through(parts))


def require_rows_apart(
    declared: Declared,
    client_id: str,
    filled: Mapping[str, Any],
    kept: Mapping[str, Any],
    rows: Array,
    outcomes: Sequence[str],
) -> None:
    """Refuse to leave out rows of a model in which the others would then have another density.

    `filled` are arrays of all rows, and `kept` of those that stay, (n,) bool in `rows`; `outcomes` are observed by row.
    """
    whole, part = (parts_of(declared, client_id, arrays) for arrays in (filled, kept))
    start, other = whole.model.initial_point(), part.model.initial_point()
    by_row = [name for name in start if np.shape(start[name]) != np.shape(other.get(name))]
    if by_row:
        raise _refused(client_id, f"{by_row} have an entry for every row")
    rng = np.random.default_rng(0)
    point = {name: value + 0.1 * rng.normal(size=np.shape(value)) for name, value in start.items()}
    try:
        of_rows, rest = _densities(whole, outcomes, point)
        of_kept, rest_of_kept = _densities(part, outcomes, point)
    except Exception as error:  # of somebody's own model, whose shapes do not go with fewer rows
        raise _refused(client_id, f"there is no density without them ({type(error).__name__})") from error
    for name in outcomes:
        same = of_rows[name].shape[:1] == rows.shape and of_rows[name][rows].shape == of_kept[name].shape
        if not same or not np.allclose(of_rows[name][rows], of_kept[name], rtol=1e-6, atol=1e-9):
            raise _refused(client_id, f"the density of {name!r} in one row depends on other rows")
    if not np.isclose(rest, rest_of_kept, rtol=1e-6, atol=1e-6):
        raise _refused(client_id, "another part of the density depends on the rows")


def _densities(
    parts: _graph.Parts, outcomes: Sequence[str], point: Mapping[str, Any]
) -> tuple[dict[str, Array], float]:
    """Log densities of outcomes by container, and of all else."""
    through = {str(variable.name): rv for variable, rv in _graph.observed_through(parts).items()}
    compiled = parts.model.compile_logp(
        vars=[through[one] for one in outcomes], sum=False, mode=interpreted.PYTHON_MODE
    )
    found = {name: np.asarray(value) for name, value in zip(outcomes, compiled(point), strict=True)}
    total = float(parts.model.compile_logp(mode=interpreted.PYTHON_MODE)(point))
    return found, total - float(sum(np.sum(value) for value in found.values()))


def _refused(client_id: str, why: str) -> DataError:
    return DataError(
        f'client {client_id!r}: missing="drop_outcomes" leaves out rows whose outcome is missing, which is exact where '
        f"rows stand for themselves, and in this model {why}. Impute outcomes before the fit, declare them as "
        'variables of the model, or say missing="drop" where that is meant.'
    )
