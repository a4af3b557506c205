"""The embedded engine: all clients in this process, a thread each where cores allow.

Compiled log densities release Python's lock, so threads run in parallel without copying data or compiling twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from fedppl.engine.answer import answer
from fedppl.settings import whole
from fedppl.types import (
    Algorithm,
    DeclarationError,
    EngineFactory,
    Failure,
    Layout,
    Message,
    Reply,
    Request,
    SharedReader,
    Status,
)

__all__ = ["InProcess", "InProcessEngine"]


class InProcessEngine:
    """Clients' models and personal states by id; see `InProcess`."""

    def __init__(self, algorithm: Algorithm, models: Mapping[str, Any], workers: int) -> None:
        if not models:
            raise DeclarationError(
                "clients=None needs an engine that finds the clients, like fedppl.Flower.grid(grid); "
                "pass the clients' data to run them in this process."
            )
        self._algorithm = algorithm
        self._models = dict(models)
        self._workers = workers
        self.personal: dict[str, Any] = {}

    def clients(self) -> tuple[str, ...]:
        """Return the ids of all clients."""
        return tuple(self._models)

    def layout(self) -> Layout:
        """Return the shared layout that enrolment found equal at all clients."""
        layout: Layout = next(iter(self._models.values())).layout
        return layout

    def exchange(self, requests: Mapping[str, Request], deadline: float | None) -> dict[str, Reply | Failure]:
        """Answer every request; those not done at the deadline (seconds) are failures."""
        if self._workers == 1 and deadline is None:
            return {client_id: self._one(request) for client_id, request in requests.items()}
        pool = ThreadPoolExecutor(self._workers)
        futures: dict[str, Future[Reply | Failure]] = {
            client_id: pool.submit(self._one, request) for client_id, request in requests.items()
        }
        wait(futures.values(), timeout=deadline)
        pool.shutdown(wait=deadline is None, cancel_futures=True)
        return {
            client_id: future.result()
            if future.done() and not future.cancelled()
            else Failure(client_id, requests[client_id].nonce, f"no reply within the deadline of {deadline} s")
            for client_id, future in futures.items()
        }

    def reader(self) -> SharedReader:
        """Return how draws of φ are read."""
        reader: SharedReader = next(iter(self._models.values())).reader()
        return reader

    def conclude(self, outcome: Callable[[str], Message], run: str, seed: int, status: Status) -> dict[str, str]:
        """Nothing to tell: `Fit.client` draws here when it is asked."""
        return {}

    def close(self) -> None:
        """Nothing was started."""

    def _one(self, request: Request) -> Reply | Failure:
        client_id = request.client_id
        personal, reply = answer(self._algorithm, self._models[client_id], self.personal.get(client_id), request)
        if personal is not None:
            self.personal[client_id] = personal
        return reply


def InProcess(*, workers: int | None = None) -> EngineFactory:
    """Run all clients in this process.

    Parameters
    ----------
    workers
        Number of threads; by default one per core.

    Returns
    -------
    EngineFactory

    Raises
    ------
    DeclarationError
        If `workers` is below one.

    Examples
    --------
    >>> import fedppl
    >>> engine = fedppl.InProcess(workers=1)
    """
    count = whole("workers", workers) if workers is not None else (os.cpu_count() or 1)
    return lambda algorithm, clients: InProcessEngine(algorithm, clients, count)
