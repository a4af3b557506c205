"""Requests of a round to clients in this process, in batches where the algorithm has a way to compute many at once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fedppl.contracts import AnyAlgorithm, Batch, ClientUpdate, Failure, Part, Reply, Request
from fedppl.engine.answer import answer, checked, level_of, message_of
from fedppl.numerics.streams import stream

logger = logging.getLogger(__name__)


def grouped(
    algorithm: AnyAlgorithm, clients: Mapping[str, Any], requests: Mapping[str, Request]
) -> list[tuple[Request, ...]]:
    """Requests that are answered together; most stand alone. No request is in two, and all are in one."""
    batch, found = _usable(algorithm), []
    if batch is not None:
        for report in (True, False):
            asked = [request for request in requests.values() if request.report == report]
            if not asked or (not report and batch.unreported_together is None):
                continue
            try:
                groups = batch.groups([clients[request.client_id] for request in asked])
                found += [tuple(asked[place] for place in group) for group in groups]
            except Exception as error:  # each client alone says what is wrong with its model
                logger.log(level_of(error), "%s: no batches in this round", algorithm.name, exc_info=True)
    taken = {request.client_id for group in found for request in group}
    return [*found, *((request,) for client_id, request in requests.items() if client_id not in taken)]


def answers(
    algorithm: AnyAlgorithm, clients: Mapping[str, Any], personal: Mapping[str, Any], requests: Sequence[Request]
) -> dict[str, tuple[Any, Reply | Failure]]:
    """What each of a group keeps and answers, by id. A client that the batch leaves out is asked alone."""
    updates = _updates(algorithm, clients, personal, requests)
    found = {}
    for request, update in zip(requests, updates, strict=True):
        client, before = clients[request.client_id], personal.get(request.client_id)
        if update is None:
            found[request.client_id] = answer(algorithm, client, before, request)
        else:
            found[request.client_id] = checked(algorithm, client, before, request, functools.partial(_given, update))
    return found


def _given(update: ClientUpdate[Any]) -> ClientUpdate[Any]:
    return update


def _usable(algorithm: AnyAlgorithm) -> Batch[Any] | None:
    """The algorithm's batch, where it stands for the functions that the algorithm has."""
    batch = algorithm.batch
    if batch is None or batch.update_client is not algorithm.update_client:
        return None
    return batch if batch.unreported is algorithm.unreported else None


def _updates(
    algorithm: AnyAlgorithm, clients: Mapping[str, Any], personal: Mapping[str, Any], requests: Sequence[Request]
) -> Sequence[ClientUpdate[Any] | None]:
    """Updates in a batch, None for each client that has to be asked alone."""
    alone, batch = [None] * len(requests), _usable(algorithm)
    compute = None if batch is None else batch.together if requests[0].report else batch.unreported_together
    if compute is None or len(requests) == 1:
        return alone
    try:
        parts = [
            Part(clients[request.client_id], personal.get(request.client_id), message_of(request), stream(request.seed))
            for request in requests
        ]
        updates = compute(parts)
        if len(updates) != len(requests):
            raise ValueError(f"{len(updates)} updates for {len(requests)} clients")
    except Exception as error:  # one client's trouble, or one of the batch: each alone says which
        told = "%s: a batch of %d clients failed, and each is asked alone"
        logger.log(level_of(error), told, algorithm.name, len(requests), exc_info=True)
        return alone
    return updates
