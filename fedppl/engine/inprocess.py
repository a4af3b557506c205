"""The embedded engine: all clients in this process, in threads.

Compiled log densities release Python's lock, so that threads run in parallel without copies of data or of models.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import (
    Accept,
    AnyAlgorithm,
    Batch,
    ClientUpdate,
    EngineFactory,
    Failure,
    Heard,
    Part,
    Reply,
    Request,
    Requests,
    SharedReader,
    Summed,
    unheard,
)
from fedppl.engine import few_rows_in_sums as in_sums
from fedppl.engine.answer import answer, checked, level_of, message_of, take, take_sum
from fedppl.engine.guard import admit_algorithm, in_memory, pooled, refuse_data, tally, where_asked
from fedppl.engine.policy import Holdings, Policy, refuse_cohort, refuse_sharing
from fedppl.model.client import reader_of
from fedppl.model.interpreted import set_back, settings
from fedppl.model.stack import ClientsOf, samples
from fedppl.numerics.streams import stream
from fedppl.settings import flag, shown, whole
from fedppl.types import DeclarationError, Layout, Message, Status


class InProcessEngine:
    """Clients' models and personal states; see `InProcess`."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        models: Mapping[str, Any],
        workers: int,
        policy: Policy | None = None,
        *,
        secure: bool = False,
    ) -> None:
        if not models:
            raise DeclarationError("data are None, and no engine such as fedppl.Flower.grid finds clients; pass data.")
        self._algorithm = algorithm
        self._models = models if isinstance(models, ClientsOf) else dict(models)
        self._workers = workers
        self._pool: ThreadPoolExecutor | None = None  # kept from round to round
        self._late: dict[str, Future[dict[str, Reply | Failure]]] = {}  # clients past a deadline that still compute
        self._settings = settings()  # of PyTensor, while no thread was at work
        self._stacks: Sequence[Any] | None = None  # clients laid side by side, once a sum was asked for
        self._personal: dict[str, Any] = {}
        self._secure: Any = None
        if secure:
            from fedppl.engine import secure as masks  # needs cryptography

            masks.require_enough(len(models))
            self._secure = masks
        if why := refuse_sharing(algorithm, len(models) if secure else None):
            raise DeclarationError(f"{why}; pass engine=fedppl.InProcess(secure=True), and so many clients.")
        self._cohorts: dict[str, Mapping[str, Any]] = {}  # by run, where sums are secure
        self._cohort = None if policy is None else _cohort_of(models, policy, secure=secure)
        self._sums: dict[bytes, Any] = {}  # of rows' vectors over all clients, at a request's points
        self._is_gated = False
        if policy is not None and self._cohort is not None:
            by_row = algorithm.disclosure.by_row
            self._is_gated = any(in_sums.fails_alone(policy, models[name], by_row) for name in models)
        sums = self._sum_at if self._is_gated else None
        if self._is_gated:
            self._sum_rows([gaussian.mean(self.layout().prior)])
        self._guards = {} if policy is None else {name: in_memory(policy, name, self._cohort, sums) for name in models}
        for client_id, guard in self._guards.items():
            try:
                admit_algorithm(guard, algorithm, models[client_id])
                rule: Any = refuse_data(guard, models[client_id], algorithm)
            except DeclarationError as error:
                rule = error
            if rule is not None:
                raise DeclarationError(f"client {client_id!r} does not take part: {rule}")

    def clients(self) -> tuple[str, ...]:
        """Return the ids of all clients."""
        return tuple(self._models)

    def layout(self) -> Layout:
        """Return the shared layout, which enrolment has found equal at all clients."""
        layout: Layout = next(iter(samples(self._models))).layout
        return layout

    def reader(self) -> SharedReader:
        """Return the reader of draws of φ."""
        return reader_of(samples(self._models))

    def conclude(
        self, final_message: Callable[[str], Message], run: str, seed: int, status: Status
    ) -> Mapping[str, Message]:
        """Return nothing: `Fit.client` draws in this process when it is called."""
        return {}

    def has_sites(self) -> bool:
        """Return whether clients have a policy, as at sites of their own."""
        return bool(self._guards)

    def exchange(
        self, requests: Mapping[str, Request], deadline: float | None, heard: Heard = unheard
    ) -> dict[str, Reply | Failure]:
        """Answer every request; those not done at the deadline (seconds) are failures. There are none of secure sums.

        A late client is not asked again before it is done. Clients never compute in the calling thread, in which Ctrl-C
        ends the wait at once, while a sampler would catch it and return the draws it has.
        """
        if self._secure is not None:
            raise self._secure.single(self._algorithm.name)
        return self._asked(requests, deadline, heard)

    def _asked(
        self, requests: Mapping[str, Request], deadline: float | None, heard: Heard
    ) -> dict[str, Reply | Failure]:
        """Answers to every request."""
        self._late = {client_id: future for client_id, future in self._late.items() if not future.done()}
        if not self._late:
            self._settings = settings()
        pool = self._pool = self._pool or ThreadPoolExecutor(self._workers)
        idle = {client_id: request for client_id, request in requests.items() if client_id not in self._late}
        names = {pool.submit(self._some, group): group for group in self._groups(idle, deadline)}
        futures = {request.client_id: future for future, group in names.items() for request in group}
        with contextlib.suppress(TimeoutError):
            for done in as_completed(names, timeout=deadline):
                for request in names[done]:
                    heard(request.client_id)
        late = {client_id: future for client_id, future in futures.items() if not future.done() and not future.cancel()}
        if late:  # their threads stay busy, so that the other clients get a new pool
            self._late |= late
            pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        replies: dict[str, Reply | Failure] = {}
        for client_id, request in requests.items():
            future = futures.get(client_id)
            if future is None:
                reason = "it is still busy with an earlier request"
            elif future.cancelled():
                reason = f"not asked within the deadline of {deadline} s, since others took all workers={self._workers}"
            elif client_id in late:
                reason = f"no reply within the deadline of {deadline} s"
            else:
                replies[client_id] = future.result()[client_id]
                continue
            replies[client_id] = Failure(client_id, request.nonce, reason)
        return replies

    def exchange_sum(
        self, requests: Requests, accept: Accept, deadline: float | None, heard: Heard = unheard
    ) -> Summed:
        """The sum of replies: under masks, at once where clients are laid side by side, or reply by reply."""
        if self._secure is not None:
            return self._under_masks(requests, accept, deadline, heard)
        is_all = not requests.silent and deadline is None and requests.clients == self.clients()
        if is_all and not self._guards and (stacks := self._side_by_side()):
            try:
                return self._added(stacks, requests.make(requests.clients[0]), heard)
            except Exception as error:
                self._say_alone(error, "the sum over clients side by side failed, and each is asked alone")
        return take_sum(self.exchange, requests, accept, deadline, heard)

    def _under_masks(self, requests: Requests, accept: Accept, deadline: float | None, heard: Heard) -> Summed:
        """The sum over all clients under masks; nothing where one has no answer, or a number that is none."""
        masks = self._secure
        masks.require_all(requests, self.clients())
        first = requests.make(requests.clients[0])
        if self._is_gated:
            asked = where_asked(self._algorithm, self.layout(), first.message)
            self._sum_rows(in_sums.places(self.layout(), asked))
        taken = take(self._asked, requests, accept, deadline, heard)
        if taken.failures:
            void: Summed = masks.void(taken.failures)
            return void
        if first.run not in self._cohorts:
            self._cohorts[first.run] = masks.cohort_of(self.clients(), first.run)
        cohort = self._cohorts[first.run]
        parts = {name: masks.encoded(taken.messages[name], len(cohort)) for name in cohort}
        hidden = {name: masks.masked(cohort[name], words, first.round) for name, words in parts.items()}
        total: Summed = masks.summed(hidden, first.shapes or {})
        return total

    def _sum_rows(self, at: Sequence[Any]) -> None:
        """Sum what all clients' rows say at a request's points, which they have to know (`few_rows_in_sums`)."""
        assert (cohort := self._cohort) is not None
        pool = self._pool = self._pool or ThreadPoolExecutor(self._workers)
        parts = [pool.submit(in_sums.numbers, model, at, cohort) for model in self._models.values()]
        try:
            self._sums = {np.stack(at).tobytes(): np.sum([part.result() for part in parts], axis=0)}
        finally:
            set_back(self._settings)

    def _sum_at(self, at: Sequence[Any]) -> Any:
        """The sum at a request's points."""
        if (total := self._sums.get(np.stack(at).tobytes())) is None:
            raise DeclarationError("no sum of rows' vectors at these points")
        return total

    def _side_by_side(self) -> Sequence[Any]:
        """All clients, laid side by side once; empty where the algorithm or the clients' models do not allow it."""
        batch = _usable(self._algorithm)
        if batch is None or batch.stacks is None or batch.summed is None:
            return ()
        if self._stacks is None:
            try:
                self._stacks = batch.stacks(self._models)
            except Exception as error:
                self._say_alone(error, "clients cannot be laid side by side")
                self._stacks = ()
        return self._stacks

    def _say_alone(self, error: Exception, what: str) -> None:
        """Log why clients are not computed together; each alone says what is wrong with it."""
        logger.log(level_of(error), "%s: %s", self._algorithm.name, what, exc_info=True)

    def _added(self, stacks: Sequence[Any], request: Request, heard: Heard) -> Summed:
        """The sum over stacks, in their order, of all clients' replies; in another thread, as in `exchange`."""
        assert (batch := self._algorithm.batch) is not None and batch.summed is not None
        self._settings = settings()
        pool = self._pool = self._pool or ThreadPoolExecutor(self._workers)
        total: dict[str, Any] = {}
        clients, failures, infos, reasons = 0, dict[str, str](), dict[str, Mapping[str, float]](), dict[str, str]()
        for stack in stacks:
            try:
                stack_sum = pool.submit(batch.summed, stack, message_of(request), self._workers).result()
            finally:
                set_back(self._settings)
            if stack_sum.clients:
                total = {name: total.get(name, 0.0) + value for name, value in stack_sum.total.items()}
            clients += stack_sum.clients
            failures |= stack_sum.failures
            infos |= stack_sum.infos
            reasons |= stack_sum.reasons
            heard(request.client_id, clients=stack_sum.clients + len(stack_sum.failures))
        return Summed(total, clients, failures, infos, reasons)

    def personal(self) -> Mapping[str, Any]:
        """Return the clients' personal states."""
        return dict(self._personal)

    def restore(self, personal: Mapping[str, Any]) -> None:
        """Set the clients' personal states."""
        self._personal.update(personal)

    def close(self) -> None:
        """Release the threads, without waiting for one that hangs."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _groups(self, requests: Mapping[str, Request], deadline: float | None) -> list[tuple[Request, ...]]:
        """Requests that are answered together; each alone where there is a policy or a deadline."""
        batch, grouped = _usable(self._algorithm), list[tuple[Request, ...]]()
        if batch is None or self._guards or deadline is not None:
            return [(request,) for request in requests.values()]
        for report in (True, False):
            reported = [request for request in requests.values() if request.report == report]
            if reported and (report or batch.unreported_together is not None):
                try:
                    groups = batch.groups([self._models[request.client_id] for request in reported])
                    grouped += [tuple(reported[place] for place in group) for group in groups]
                except Exception as error:
                    self._say_alone(error, "no batches in this round")
        taken = {request.client_id for group in grouped for request in group}
        return [*grouped, *((request,) for client_id, request in requests.items() if client_id not in taken)]

    def _some(self, requests: tuple[Request, ...]) -> dict[str, Reply | Failure]:
        """Answer a group of requests, and keep the clients' personal states."""
        replies: dict[str, Reply | Failure] = {}
        try:
            together = len(requests) > 1
            updates = _updates(self._algorithm, self._models, self._personal, requests) if together else [None]
            for request, update in zip(requests, updates, strict=True):
                client_id = request.client_id
                client, before = self._models[client_id], self._personal.get(client_id)
                if update is None:  # alone, or the batch leaves it out
                    guard = self._guards.get(client_id)
                    personal, replies[client_id] = answer(self._algorithm, client, before, request, guard)
                else:
                    given = functools.partial(_given, update)
                    personal, replies[client_id] = checked(self._algorithm, client, before, request, given)
                if personal is not None:
                    self._personal[client_id] = personal
        finally:  # also in a thread that is late, or was left behind by an interrupt
            set_back(self._settings)
        return replies


def _cohort_of(models: Mapping[str, Any], rules: Policy, *, secure: bool) -> Holdings | None:
    """Counts over all clients, where a policy holds and replies are summed under masks; or DeclarationError."""
    if not secure:
        if rules.sums == "required":
            remedy = "pass secure=True, or a policy with sums='optional'"
            raise DeclarationError(f"policy= has sums='required', and single replies would leave; {remedy}.")
        return None
    if rule := refuse_cohort(rules, len(models), 1):
        raise DeclarationError(f"clients do not take part: {rule}.")
    return pooled([tally(model) for model in models.values()])


def InProcess(*, workers: int | None = None, policy: Policy | None = None, secure: bool = False) -> EngineFactory:
    """Run all clients in this process.

    Parameters
    ----------
    workers
        Number of threads, at least 1; by default one per core.
    policy
        A `fedppl.Policy` for every client, to try it out; its limits count in one run. By default there is none: the
        data are yours.
    secure
        Whether the server gets nothing but sums over all clients, added under masks that pairs of clients share, as a
        rehearsal of sites that want it. It needs at least three clients and an algorithm whose server reads sums
        alone, such as `fedppl.Sums`; all clients are asked in every round, each alone. The data are here all the
        same: what is computed from them after the fit (`Fit.influence`, `conflict`) does not fail, as it would there.

    Returns
    -------
    EngineFactory

    Raises
    ------
    DeclarationError
        If `workers` is below one, `policy` is no policy or `secure` no truth value; in a fit, with fewer than three
        clients or another algorithm where `secure` is true, with an algorithm that wants it where it is not, where
        there are no clients' data, or the policy refuses the algorithm or a client's data.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> engine = fedppl.InProcess(workers=1, secure=True)
    >>> fit = fedppl.fit(*normal_means(4), fedppl.Sums(), engine=engine, progressbar=False, random_seed=1)
    >>> fit.status.value
    'converged'

    Notes
    -----
    *When this fails.* All data are in one process, so that a policy here protects nobody. A client that misses the
    ``deadline=`` of a fit is not stopped: its thread goes on and takes time from the others, and the client is not
    asked again before it is done. Code that holds Python's lock, such as a custom distribution written in Python, gains
    little from more threads.
    """
    count = whole("workers", workers) if workers is not None else (os.cpu_count() or 1)
    if policy is not None and not isinstance(policy, Policy):
        raise DeclarationError(f"policy={shown(policy)} must be a fedppl.Policy, such as fedppl.policy.read(path).")
    if policy is not None and policy.allowed_queries is not None:
        raise DeclarationError("policy= has allowed_queries, and in one process rows are given; leave them out of it.")
    return Threads(count, policy, flag("secure", secure))


class Threads(NamedTuple):
    """What `InProcess` returns."""

    workers: int
    policy: Policy | None
    secure: bool = False

    def __call__(self, algorithm: AnyAlgorithm, clients: Mapping[str, Any], /) -> InProcessEngine:
        """Start the engine."""
        return InProcessEngine(algorithm, clients, self.workers, self.policy, secure=self.secure)


logger = logging.getLogger(__name__)


def _given(update: ClientUpdate[Any]) -> ClientUpdate[Any]:
    return update


def _usable(algorithm: AnyAlgorithm) -> Batch[Any] | None:
    """The algorithm's batch, if it belongs to the algorithm's present functions."""
    batch = algorithm.batch
    if batch is None or batch.update_client is not algorithm.update_client:
        return None
    return batch if batch.unreported is algorithm.unreported else None


def _updates(
    algorithm: AnyAlgorithm, clients: Mapping[str, Any], personal: Mapping[str, Any], requests: Sequence[Request]
) -> Sequence[ClientUpdate[Any] | None]:
    """Updates in a batch, None for each client that has to be asked alone."""
    assert (batch := algorithm.batch) is not None
    compute = batch.together if requests[0].report else batch.unreported_together
    try:
        assert compute is not None
        parts = [
            Part(clients[request.client_id], personal.get(request.client_id), message_of(request), stream(request.seed))
            for request in requests
        ]
        updates = compute(parts)
        if len(updates) != len(requests):
            raise ValueError(f"{len(updates)} updates for {len(requests)} clients")
    except Exception as error:  # of one client, or of the batch: each client alone says which
        text = "%s: a batch of %d clients failed, and each is asked alone"
        logger.log(level_of(error), text, algorithm.name, len(requests), exc_info=True)
        return [None] * len(requests)
    return updates
