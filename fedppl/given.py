"""Read users' data as a declaration needs them: arrays by client, or one table of many clients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fedppl.data import frames, tables
from fedppl.data import missing as gaps
from fedppl.model.declaration import FederatedModel
from fedppl.model.template import outcomes_of, require_rows_apart
from fedppl.types import DeclarationError


def clients(model: Any, data: Any, by: Any, missing: str, *, one_table: bool = False) -> tuple[Any, Any]:
    """The declaration, and clients' arrays by id; with `one_table` one table of many clients where that is possible.

    Every table is converted here, once. Invalid data are returned as they are, and refused where they are used.
    """
    gaps.required(missing)
    if not isinstance(model, FederatedModel) or data is None:
        return model, data
    from fedppl.formulas.formula import is_formula, ready  # slow to import

    if is_formula(model):
        return ready(model, data, by, missing, one_table=one_table)
    data = frames.opened(data, by)
    split = frames.given(data) if by is None else tables.of_frame(data, by, model.names)
    if not isinstance(split, Mapping):
        return model, split
    orders = frames.categories(data, model.names)  # refuses orders that differ
    if len(model.builders) > 1:
        model, named = model.by_kind(split, one_table=by is not None)
        if missing == gaps.OUTCOMES:
            raise DeclarationError('missing="drop_outcomes" is for declarations of one builder; drop the rows before.')
        for client_id, arrays in named.items():
            frames.require_alignment(arrays, f"client {str(client_id)!r}")
        return model, gaps.complete(named, missing)
    if one_table := one_table and model.reads is None and getattr(model.builder, "read", None) is None:
        split = (by is None and len(split) >= tables.FEWEST and tables.of_clients(split)) or split
    if orders and model.reads is None:  # a number means the same category in predictions
        model = model.reading(functools.partial(frames.known, names=model.names, orders=orders))
    arrays = split if isinstance(split, tables.Table) else frames.by_name(split, model.names)
    if missing == gaps.OUTCOMES:
        return model, _with_outcomes(model, dict(arrays))
    arrays = tables.complete(arrays, missing)
    return model, arrays if one_table and len(arrays) >= tables.FEWEST else dict(arrays)


def _with_outcomes(model: FederatedModel, by_client: dict[Any, Any]) -> dict[Any, Any]:
    """Drop rows whose outcome is missing; refuse if the model's rows depend on each other."""
    incomplete = [k for k, data in by_client.items() if gaps.gaps(data)]
    if not incomplete:
        return by_client
    whole = next((data for k, data in by_client.items() if k not in incomplete), None)
    first = str(incomplete[0])
    outcomes = outcomes_of(model.declared, first, whole or gaps.dropped(incomplete[0], by_client[incomplete[0]])[0])
    kept = gaps.without_outcomes({k: by_client[k] for k in incomplete}, outcomes)
    first_kept = next(part for part in kept.values() if part is not None)
    require_rows_apart(model.declared, first, first_kept.filled, first_kept.data, first_kept.rows, first_kept.outcomes)
    return {k: data if (part := kept.get(k)) is None else part.data for k, data in by_client.items()}
