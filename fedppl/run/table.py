"""Clients of one table as one stack: few of them are enrolled, with every check and refusal, and serve all."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedppl.data.grouped import Table
from fedppl.local.integrate import cores
from fedppl.local.many import moments, nodes_for, without_density
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.model.stack import ClientsOf, stacked, why_not
from fedppl.types import Array

logger = logging.getLogger(__name__)

_ENROLLED = 128  # clients, chosen at random: what one in fifty differs by is seen in .92 of all runs
_JUDGED_BY = 4  # clients that tell whether there is a way to integrate what is their own
_MANY = 20_000  # clients that take hours where each is enrolled


def enrolled(model: FederatedModel, table: Table, rng: np.random.Generator) -> Mapping[str, ClientModel]:
    """Clients by id; where they can be no stack, which the log tells, each is enrolled.

    Raises
    ------
    DeclarationError, DataError
        As for clients that are enrolled one by one.
    """
    counts = table.counts
    chosen = rng.choice(len(counts), min(_ENROLLED, len(counts)), replace=False)
    # Numbers of rows tell which lengths follow them.
    places = np.unique([*chosen, np.argmin(counts), np.argmax(counts)])
    clients = list(model.enrol(_data(table, places)).values())
    reason = why_not(clients)
    if not reason and nodes_for(clients[:_JUDGED_BY]) is None:
        reason = "several local variables depend on each other"
    if reason:
        level = logging.WARNING if len(counts) > _MANY else logging.INFO
        logger.log(level, "%d clients are enrolled one by one: %s", len(counts), reason)
        return model.enrol(table.each())
    stack = stacked(model, table, clients[0])
    phi = np.ascontiguousarray(clients[0].template.functions["shared start"])
    for k in without_density(stack, phi, cores())[:1]:
        model.enrol(_data(table, np.array([k])))  # who enrols it alone says what is wrong with it
    return ClientsOf(stack, functools.partial(moments, workers=cores()))


def _data(table: Table, places: NDArray[np.int64]) -> dict[str, dict[str, Array]]:
    return {table.client_ids[k]: table.rows(int(k)) for k in places}
