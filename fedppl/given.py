"""Data as users have them, as a declaration reads them: clients' arrays by id, or of many clients rows of one table."""

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
    """The declaration, and clients' data by id; what is no data is refused where it is used.

    With `one_table` rows of many clients as one table, where they can be one.
    """
    gaps.required(missing)
    if one_table:
        model, table = _table(model, data, by, missing)
        if table is not None:
            return model, table
    if not isinstance(model, FederatedModel) or data is None:
        return model, data
    from fedppl.formulas.formula import is_formula, ready  # at its first use: it takes a while

    if is_formula(model):
        return ready(model, data, by, missing)
    split = frames.by_client(data, by, model.names)
    if len(model.builders) > 1 and isinstance(split, Mapping):
        frames.common_categories(split, None)  # refuses orders that differ
        model, named = model.by_kind(split, one_table=split is not data)
        if missing == gaps.OUTCOMES:
            raise DeclarationError(
                'missing="drop_outcomes" is of one builder, and this declaration has several; leave rows out before.'
            )
        return model, _said(gaps.complete(named, None, missing))
    orders = frames.categories(data, model.names) or frames.common_categories(split, model.names)
    if orders and model.reads is None:  # so that a number means the same category in what comes after the fit
        model = model.reading(functools.partial(frames.known, names=model.names, orders=orders))
    if missing == gaps.OUTCOMES:
        found = _with_outcomes(model, split)
    else:
        found = gaps.complete(split, model.names, missing)
    return model, _said(found)


def _table(model: Any, data: Any, by: Any, missing: str) -> tuple[Any, tables.Table | None]:
    """Rows of many clients as one table, with the declaration that reads them; None where they are read one by one."""
    if not isinstance(model, FederatedModel) or model.reads is not None or data is None:
        return model, None
    from fedppl.formulas.formula import is_formula  # at its first use: it takes a while

    if is_formula(model):
        from fedppl.formulas.formula import one_table

        return one_table(model, data, by, missing) or (model, None)
    if len(model.builders) > 1:
        return model, None
    if getattr(model.builder, "read", None) is not None:  # of what is more than a function
        return model, None
    if by is None:
        many = isinstance(data, Mapping) and len(data) >= tables.FEWEST
        return model, _looked_at(tables.of_clients(data)) if many else None
    found = _looked_at(tables.of_frame(data, by, model.names, missing, tables.FEWEST))
    if found is not None and (orders := frames.categories(data, model.names)):
        model = model.reading(functools.partial(frames.known, names=model.names, orders=orders))
    return model, found


def _looked_at(found: tables.Table | None) -> tables.Table | None:
    """A table, after what is odd about one client was named, unless clients are too many to be looked at one by one."""
    if found is not None and len(found.client_ids) < tables.MANY:
        _said(found.each())
    return found


def _said(clients: Any) -> Any:
    """Clients' data, after what is odd among them was named in the log."""
    if isinstance(clients, Mapping) and (odd := strange_arrays(clients)):
        more = f", and {len(odd) - 5} more" if len(odd) > 5 else ""
        logger.warning("columns may be swapped, or units differ: %s%s", "; ".join(odd[:5]), more)
    return clients


def _with_outcomes(model: FederatedModel, split: Any) -> Any:
    """Clients' data without rows whose outcome is missing; the model says what that is, and whether rows depend."""
    if not isinstance(split, Mapping):
        return split
    found = gaps.read(split, model.names)
    incomplete = [k for k, data in found.items() if gaps.gaps(data)]
    if not incomplete:
        return found
    whole = next((data for k, data in found.items() if k not in incomplete), None)
    first = str(incomplete[0])
    outcomes = outcomes_of(model.declared, first, whole or gaps.dropped(incomplete[0], found[incomplete[0]]))
    kept = gaps.without_outcomes({k: found[k] for k in incomplete}, outcomes)
    one = next(part for part in kept.values() if part is not None)
    require_rows_apart(model.declared, first, one.filled, one.data, one.rows, one.outcomes)
    return {k: data if (part := kept.get(k)) is None else part.data for k, data in found.items()}
