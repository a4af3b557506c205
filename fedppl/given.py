"""Read users' data as a declaration needs them: arrays by client, or one table of many clients."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from fedppl.data import frames, tables
from fedppl.data import missing as gaps
from fedppl.formulas.agreement import strange_arrays
from fedppl.model.declaration import FederatedModel
from fedppl.model.template import outcomes_of, require_rows_apart
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)


def clients(model: Any, data: Any, by: Any, missing: str, *, one_table: bool = False) -> tuple[Any, Any]:
    """The declaration, and clients' data by id; with `one_table` one table of many clients where that is possible.

    Invalid data are returned as they are, and refused where they are used.
    """
    gaps.required(missing)
    if one_table:
        model, table = _table(model, data, by, missing)
        if table is not None:
            return model, table
    if not isinstance(model, FederatedModel) or data is None:
        return model, data
    from fedppl.formulas.formula import is_formula, ready  # slow to import

    if is_formula(model):
        return ready(model, data, by, missing)
    split = frames.by_client(data, by, model.names)
    if len(model.builders) > 1 and isinstance(split, Mapping):
        frames.common_categories(split, None)  # refuses orders that differ
        model, named = model.by_kind(split, one_table=split is not data)
        if missing == gaps.OUTCOMES:
            raise DeclarationError(
                'missing="drop_outcomes" needs a declaration of one builder; drop the rows before the fit.'
            )
        return model, _logged(gaps.complete(named, None, missing))
    orders = frames.categories(data, model.names) or frames.common_categories(split, model.names)
    if orders and model.reads is None:  # a number means the same category in predictions
        model = model.reading(functools.partial(frames.known, names=model.names, orders=orders))
    with_outcomes = missing == gaps.OUTCOMES
    return model, _logged(_with_outcomes(model, split) if with_outcomes else gaps.complete(split, model.names, missing))


def _table(model: Any, data: Any, by: Any, missing: str) -> tuple[Any, tables.Table | None]:
    """The declaration, and one table of many clients; None where data are read client by client."""
    if not isinstance(model, FederatedModel) or model.reads is not None or data is None:
        return model, None
    from fedppl.formulas.formula import is_formula, one_table  # slow to import

    if is_formula(model):
        return one_table(model, data, by, missing) or (model, None)
    if len(model.builders) > 1 or getattr(model.builder, "read", None) is not None:
        return model, None
    if by is None:
        many = isinstance(data, Mapping) and len(data) >= tables.FEWEST
        return model, _examined(tables.of_clients(data)) if many else None
    table = _examined(tables.of_frame(data, by, model.names, missing, tables.FEWEST))
    if table is not None and (orders := frames.categories(data, model.names)):
        model = model.reading(functools.partial(frames.known, names=model.names, orders=orders))
    return model, table


def _examined(table: tables.Table | None) -> tables.Table | None:
    """Log odd clients of a table, unless there are too many to examine each; return the table."""
    if table is not None and len(table.client_ids) < tables.MANY:
        _logged(table.each())
    return table


def _logged(clients: Any) -> Any:
    """Log odd clients, and return the data."""
    if isinstance(clients, Mapping) and (odd := strange_arrays(clients)):
        more = f", and {len(odd) - 5} more" if len(odd) > 5 else ""
        logger.warning("columns may be swapped, or units differ: %s%s", "; ".join(odd[:5]), more)
    return clients


def _with_outcomes(model: FederatedModel, split: Any) -> Any:
    """Drop rows whose outcome is missing; refuse if the model's rows depend on each other."""
    if not isinstance(split, Mapping):
        return split
    by_client = gaps.read(split, model.names)
    incomplete = [k for k, data in by_client.items() if gaps.gaps(data)]
    if not incomplete:
        return by_client
    whole = next((data for k, data in by_client.items() if k not in incomplete), None)
    first = str(incomplete[0])
    outcomes = outcomes_of(model.declared, first, whole or gaps.dropped(incomplete[0], by_client[incomplete[0]]))
    kept = gaps.without_outcomes({k: by_client[k] for k in incomplete}, outcomes)
    first_kept = next(part for part in kept.values() if part is not None)
    require_rows_apart(model.declared, first, first_kept.filled, first_kept.data, first_kept.rows, first_kept.outcomes)
    return {k: data if (part := kept.get(k)) is None else part.data for k, data in by_client.items()}
