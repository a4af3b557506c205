"""A formula's columns of many clients at once: what all agree on, and rows as the builder takes them, of one table."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from fedppl.data import frames, grouped
from fedppl.data.grouped import MANY, Table
from fedppl.formulas import checks
from fedppl.formulas.agreement import tell
from fedppl.formulas.declare import Formula
from fedppl.formulas.exchange import asked, check_rows, sized
from fedppl.formulas.formula import of_told, with_order
from fedppl.model.declaration import FederatedModel
from fedppl.types import DataError

_ALL = "all rows"


def together(
    model: FederatedModel, data: Any, by: Hashable | Sequence[Hashable] | None, missing: str, fewest: int
) -> tuple[FederatedModel, Table] | None:
    """The declaration that clients agreed on, and the arrays of its builder; None where they are read one by one.

    That is where there are fewer clients than `fewest`, data are no table, or effects vary by groups within a client.
    """
    built = model.builder
    assert isinstance(built, Formula)
    factor = built.terms.client
    by = factor if by is None else by
    if by is None or not frames.is_frame(data) or any(len(group.factor) > 1 for group in built.terms.groups):
        return None
    checks.tables(built, data, by)
    model = with_order(model, data)
    built = model.builder
    assert isinstance(built, Formula)
    table = grouped.of_frame(data, by, built.columns, missing, fewest, texts=True)
    if table is None:
        return None
    try:
        found = _read(model, built, table)
    except DataError:
        return None  # read client by client, errors name the client and its row
    if found is not None:
        checks.say_who_clients_are(built, data, by)
    return found


def _read(model: FederatedModel, built: Formula, table: Table) -> tuple[FederatedModel, Table] | None:
    response = built.terms.response.columns[0]
    check_rows(built, table.columns, _ALL)
    if built.design is None:
        if built.family.name == "ordinal" and response not in built.levels:
            return None  # its order is looked for client by client
        what = asked(built)
        parts = table.each() if len(table.client_ids) < MANY else {_ALL: table.columns}
        told = {name: tell(sized(built, rows), what.names, what.levels, 1) for name, rows in parts.items()}
        model = of_told(model, told, "error").model
        assert isinstance(model.builder, Formula)
        built = model.builder
        checks.say_what_cannot_be_told(built, {_ALL: table.columns}, many=True)
    arrays = built.read(_ALL, table.columns)
    if any(len(array) != table.begins[-1] for array in arrays.values()):
        return None
    return model, replace(table, columns=arrays)
