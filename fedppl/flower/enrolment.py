"""Enrolment: which node is which client, whether a site runs the server's model, and agreement on a formula."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from flwr.serverapp import Grid

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, SharedReader
from fedppl.flower import site_agreement as _site
from fedppl.flower.decode import Malformed, brief, checked_name, one_text, reading
from fedppl.flower.messages import AGREE, HELLO, Letter, Post, content_of, from_content, texts_of, trouble
from fedppl.flower.wire import Hello, Terms, labels, unpack_hello, unpack_terms, unpack_told
from fedppl.formulas.agreement import Told
from fedppl.formulas.exchange import asked
from fedppl.formulas.formula import Agreed, of_told
from fedppl.model.declaration import FederatedModel
from fedppl.settings import one_line, one_of, positive, shown, some_of, whole
from fedppl.types import DeclarationError, Layout

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CALLS_AT_ONCE = 64  # that wait for an answer: Flower's simulation looks through all messages for every node
_POLLS_TO_RETRY = 120  # after which a site that was refused is called again: it may have been corrected


class ServerModel(NamedTuple):
    """The model by the server's own declaration."""

    layout: Layout
    reader: SharedReader


def expected_clients(clients: Any) -> int | tuple[str, ...]:
    """Check `clients`, the number of sites to wait for or their ids."""
    if isinstance(clients, int) and not isinstance(clients, bool):
        return whole("clients", clients)
    names = clients if isinstance(clients, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        raise DeclarationError(f"clients={shown(clients)} must be a number of sites, or a list of different ids.")
    return tuple(names)


def identity(node_id: int, authenticated: str, texts: Mapping[str, str]) -> tuple[str, str | None]:
    """A node's client id, and why it is not accepted as that client; or `Malformed`."""
    client_id = texts.get("client_id", "")
    client_id = client_id and checked_name(client_id, "'client_id'")
    if not authenticated and not client_id:
        return f"node {node_id}", 'it has no id; start it with --node-config "client-id=..."'
    if authenticated and client_id and client_id != authenticated:
        return client_id, f"its authenticated name is {authenticated!r}; drop or correct its client-id"
    return authenticated or client_id, None


class _Awaited(Generic[T]):
    """Clients that a server waits for, and why it refuses some."""

    doing, verdict = "", ""  # what they have to do, and what happened to those that may not, in words

    def __init__(self, post: Post, expected: int | tuple[str, ...], wait: float) -> None:
        self._post = post
        self._expected = expected
        self._wait = wait
        self.answers: dict[str, T] = {}  # by client
        self._calls: dict[str, int] = {}  # message id of a call not answered yet, to its node
        self._retries: dict[int, float] = {}  # nodes that have answered, and when to call them again
        self._refused: dict[str, str] = {}

    def _until_complete(self, step: Callable[[], object]) -> None:
        """Repeat a step until the expected clients have answered."""
        end = time.monotonic() + self._wait
        while not self._complete():
            step()
            if not self._complete():
                if time.monotonic() > end:
                    raise DeclarationError(self._missing())
                time.sleep(self._post.poll)

    def _complete(self) -> bool:
        if isinstance(self._expected, int):
            return len(self.answers) >= self._expected
        return set(self._expected) <= set(self.answers)

    def _unexpected(self, client_id: str) -> str | None:
        if isinstance(self._expected, int) or client_id in self._expected:
            return None
        return f"it is not among the expected clients {list(self._expected)}"

    def _missing(self) -> str:
        """An error text: missing and refused sites."""
        clients, count = ", ".join(map(repr, sorted(self.answers))) or "none", self._expected
        if isinstance(count, tuple):
            clients += f"; missing {sorted(set(count) - set(self.answers))}"
            count = len(count)
        refused = "".join(f"; {client_id!r}{self.verdict}: {why}" for client_id, why in self._refused.items())
        return (
            f"only {len(self.answers)} of {count} sites {self.doing} within {self._wait:g} s ({clients}){refused}. "
            "Start the missing sites and look at their logs, or raise wait=."
        )

    def _refuse(self, client_id: str, reason: str) -> None:
        if self._refused.get(client_id) != reason:  # not logged yet
            self._refused[client_id] = reason
            extra = {"client": client_id, "status": "refused"}
            logger.error("client %s refused: %s", client_id, reason, extra=extra)


class Roll(_Awaited[Hello]):
    """Enrolled clients, their introductions and their nodes."""

    doing, verdict = "enrolled", " was refused"

    def __init__(
        self,
        post: Post,
        algorithm: AnyAlgorithm,
        expected: int | tuple[str, ...],
        wait: float,
        server: ServerModel,
        greeting: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(post, expected, wait)
        self._texts = dict(greeting or {})  # to every site that is called
        coords = labels(server.reader.coords)
        self._server = Hello(SERVER, version("fedppl"), algorithm.settings, server.layout, coords)
        self.nodes: dict[str, int] = {}  # client id to node id
        self._known: set[int] = set()  # nodes that were called
        self._rivals: dict[int, Hello] = {}  # live nodes that claim the id of another live node
        self._listed: tuple[float, dict[int, str]] | None = None  # when, and node ids with their names

    def enrol(self) -> None:
        """Call every node until the expected clients are enrolled."""
        self._until_complete(lambda: self.welcome(max_age=1.0))
        logger.info("%d clients enrolled: %s", len(self.answers), sorted(self.answers)[:20])

    def welcome(self, max_age: float = 0.0) -> set[int]:
        """Call new nodes, enrol those that have answered, and return all connected nodes.

        The list of nodes is fetched anew when it is older than `max_age` seconds.
        """
        if self._listed is None or time.monotonic() - self._listed[0] > max_age:
            self._listed = (time.monotonic(), self._post.nodes())
        names = self._listed[1]
        alive = set(names)
        for node_id in self._rivals.keys() - alive:
            del self._rivals[node_id]
        now, called = time.monotonic(), set(self._calls.values())
        due_again = {node_id for node_id, due in self._retries.items() if due <= now and node_id not in called}
        for node_id in sorted(alive - (self._known - due_again))[: max(0, _CALLS_AT_ONCE - len(self._calls))]:
            if message_id := self._post.push(node_id, HELLO, ({}, self._texts), self._wait):
                self._calls[message_id] = node_id
                self._known.add(node_id)
                self._retries.pop(node_id, None)
        self._known &= alive
        self._calls = {message_id: node_id for message_id, node_id in self._calls.items() if node_id in alive}
        for message_id, message in self._post.pull(self._calls, singly=True):
            node_id = self._calls.pop(message_id)
            self._meet(node_id, names.get(node_id, ""), message, alive)
        for node_id, hello in list(self._rivals.items()):
            if self.nodes[hello.client_id] not in alive:
                del self._rivals[node_id]
                self._bind(node_id, hello)
        return alive

    def _meet(self, node_id: int, authenticated: str, message: Letter, alive: set[int]) -> None:
        """Read a node's introduction and enrol it, or refuse it and log why."""
        client_id = one_line(authenticated, 200) or f"node {node_id}"
        self._retries[node_id] = time.monotonic() + _POLLS_TO_RETRY * self._post.poll
        if why := trouble(message):
            return self._refuse(client_id, why)
        try:
            with reading("it"):
                texts = texts_of(content_of(message))
                client_id, why = identity(node_id, authenticated, texts)
                if why:
                    return self._refuse(client_id, why)
                if "error" in texts:
                    return self._refuse(client_id, one_line(texts["error"]))
                if reason := self._unexpected(client_id):
                    del self._retries[node_id]
                    return self._refuse(client_id, reason)
                if reason := self._other_terms(texts):
                    return self._refuse(client_id, reason)
                arrays, _ = from_content(content_of(message), self._shapes_of_hello(), "it")
                hello = unpack_hello(arrays, {**texts, "client_id": client_id})
        except Malformed as error:
            return self._refuse(client_id, f"its introduction cannot be read: {one_line(error)}")
        return self._admit(node_id, hello, alive)

    def _other_terms(self, texts: Mapping[str, str]) -> str | None:
        """Where a site's terms differ; its version is compared first, since it decides how the rest is written."""
        ours, theirs = self._server.version, one_text(texts, "version", 200)
        if theirs != ours:
            return f"it runs fedppl {brief(theirs)}, {SERVER} runs {ours}; install one version everywhere"
        return other_terms(self._server.terms, unpack_terms(texts))

    def _shapes_of_hello(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of an introduction's arrays."""
        layout = self._server.layout
        size = layout.size
        precision = size * (size + 1) // 2 if layout.prior.precision.ndim == 2 else size
        return {"prior_linear": (size,), "prior_precision": (precision,), "prior_density": (len(layout.density),)}

    def _admit(self, node_id: int, hello: Hello, alive: set[int]) -> None:
        """Enrol a node that agrees with the server, or refuse it."""
        client_id = hello.client_id
        if reason := difference(self._server, hello):
            return self._refuse(client_id, reason)
        self._retries.pop(node_id, None)
        known = client_id in self.answers
        if not known and self._complete():
            return self._refuse(client_id, "the run has begun with other clients; it can enrol in the next run")
        if known and self.nodes[client_id] in alive and self.nodes[client_id] != node_id:
            self._rivals[node_id] = hello
            both = f"nodes {self.nodes[client_id]} and {node_id}"
            return self._refuse(client_id, f"{both} are both live with this id; stop one of them")
        return self._bind(node_id, hello)

    def _bind(self, node_id: int, hello: Hello) -> None:
        client_id = hello.client_id
        what, extra = "is back" if client_id in self.nodes else "enrolled", {"client": client_id, "status": "enrolled"}
        self.nodes[client_id] = node_id
        self.answers.setdefault(client_id, hello)
        self._refused.pop(client_id, None)
        logger.info("client %s %s as node %d", client_id, what, node_id, extra=extra)


# Comparison of sites' declarations with the server's ------------------------------------------------------------------

SERVER = "the server"


def other_terms(ours: Terms, theirs: Terms) -> str | None:
    """The first difference between the server's terms and a site's, or None."""
    if other := _changed(ours.settings, theirs.settings):
        return f"its algorithm has {other}"
    names, others = ([v.name for v in terms.variables] for terms in (ours, theirs))
    if names != others:
        return f"it shares {some_of(others)}, {SERVER} shares {some_of(names)}"
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        for field in a._fields:
            mine, other_value = getattr(a, field), getattr(b, field)
            if mine != other_value:
                return f"its shared variable {b.name!r} has {field} {other_value}, at {SERVER} it has {mine}"
    return None


def difference(ours: Hello, theirs: Hello) -> str | None:
    """The first difference between the server's introduction and a site's, or None."""
    if reason := other_terms(ours.terms, theirs.terms):
        return reason
    if ours.layout.fingerprint != theirs.layout.fingerprint:
        return (
            f"its shared prior is another than at {SERVER} ({_other_prior(ours.layout, theirs.layout)}): constants of "
            "the prior must be the same everywhere, and not depend on data"
        )
    return _other_labels(ours, theirs)


def _changed(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    changes = [f"{brief(name)} {brief(theirs.get(name))} instead of {brief(ours.get(name))}" for name in names[:5]]
    return "; ".join(changes)


def _other_prior(ours: Layout, theirs: Layout) -> str:
    """Where two priors of one shape differ most, in words."""
    if ours.prior_is_gaussian != theirs.prior_is_gaussian:
        return "one of them is Gaussian"
    (mean, sd), (others, other_sd) = (
        (gaussian.mean(layout.prior), gaussian.standard_deviations(layout.prior)) for layout in (ours, theirs)
    )
    apart = np.abs(others - mean) / sd + np.abs(np.log(other_sd / sd))
    if not apart.max() > 1e-6:
        return "in correlations, or in its density about one mean and covariance"
    k = int(np.argmax(apart))
    return f"{ours.labels[k]} has mean {others[k]:.4g} and sd {other_sd[k]:.4g}, there {mean[k]:.4g} and {sd[k]:.4g}"


def _other_labels(ours: Hello, theirs: Hello) -> str | None:
    """The first shared dim whose labels differ, in words; dims without labels are not compared."""
    for dim in sorted({dim for variable in ours.layout.variables for dim in variable.dims or () if dim}):
        if dim not in ours.coords or dim not in theirs.coords:
            continue
        mine, other = list(ours.coords[dim]), list(theirs.coords[dim])
        if mine != other:
            shorter = min(len(mine), len(other))
            k = next((i for i in range(shorter) if mine[i] != other[i]), shorter)
            theirs_at, ours_at = (repr(brief(values[k])) if k < len(values) else "none" for values in (other, mine))
            return (
                f"its dim {dim!r} has label {theirs_at} in place {k}, at {SERVER} it is {ours_at} ({len(other)} "
                f"labels, there {len(mine)}): give the columns of the data one order, and coords one order, everywhere"
            )
    return None


# Before a run by a formula: the server asks every site, once, for a summary of its columns ----------------------------

_GRACE = 2.0  # seconds that a question outlives the wait


def agree(
    grid: Grid,
    model: FederatedModel,
    *,
    clients: int | Sequence[str],
    min_count: int = 1,
    withheld: str = "other",
    wait: float = 600.0,
    poll: float = 0.25,
) -> Agreed:
    """Have sites agree on levels and scales of a formula, inside a ServerApp, as `fedppl.agree` does for data here.

    Each site summarises the formula's columns once, as far as its policy allows: the number of rows; of numbers the
    rounded sum and sum of squares; of texts the number of rows at each level. Nothing of fewer rows than the larger of
    `min_count` and the policy's `agreement` (10 by default) leaves, nor whether there are such rows. The agreement goes
    to all sites when they enrol. Each checks it against its rows, and leaves out rows of levels that are not in it
    where they are that few.

    Parameters
    ----------
    grid
        Flower's grid, as its server app gets it.
    model
        What `fedppl.formula` returned, the same as at the sites.
    clients
        Number of sites to wait for, or their ids.
    min_count
        Fewest rows of a level, and in all, that a client tells of.
    withheld
        What a site does with rows of levels that nobody told, where it has more than that few: "other" for a level of
        that name, or "error".
    wait
        Seconds to wait for their answers.
    poll
        Seconds between two polls.

    Returns
    -------
    Agreed
        Pass its ``model`` to `fedppl.fit` and to `grid`.

    Raises
    ------
    DataError
        If columns do not fit together.
    DeclarationError
        If sites are missing or refuse.

    Examples
    --------
    >>> import fedppl
    >>> def main(grid, context):
    ...     model = fedppl.formula("y ~ age + (1 | site)", family="bernoulli")
    ...     found = fedppl.Flower.agree(grid, model, clients=3)
    ...     engine = fedppl.Flower.grid(grid, clients=found.clients, model=found.model)
    ...     fit = fedppl.fit(found.model, None, engine=engine)

    Notes
    -----
    *When this fails.* A site that lies moves scales, and so the width of priors. With fewer than five sites it counts
    for at most ten times as many rows as the median of the others; with more, means and sds are medians over sites, and
    none counts for more than the median of the others. `Agreed.strange` names a site whose figures are out of all
    proportion. Sites whose rows contradict the agreement take no part.
    A site whose rows have changed sends its first summary again, until ``<client>.told`` in its folder is deleted
    (``site.told`` where its node config has no ``client-id``).
    """
    if not isinstance(model, FederatedModel) or not _site.waits(model):
        raise DeclarationError(f"model={shown(model)} is no formula to agree on; pass fedppl.formula(...).")
    whole("min_count", min_count)
    one_of("withheld", withheld, ("error", "other"))
    positive("wait", wait, "it is in seconds"), positive("poll", poll, "it is in seconds")
    expected = expected_clients(clients)
    logger.info("sites whose policy has a file for approval know this question as the run %r", _site.named(model))
    asking = _Asking(Post(grid, poll, _GRACE), expected, wait)
    return of_told(model, asking.summaries(asked(model.builder).names, min_count), withheld, believed=False)  # type: ignore[arg-type]


class _Asking(_Awaited[dict[str, Told]]):
    """Summaries of columns by client id, and the sites that still owe theirs."""

    doing = "told what clients have to agree on"

    def summaries(self, names: Sequence[str], min_count: int) -> dict[str, dict[str, Told]]:
        """Ask until all expected clients have answered."""
        self._until_complete(lambda: self._ask(names, {"min_count": str(min_count)}))
        return {client_id: self.answers[client_id] for client_id in sorted(self.answers)}

    def _ask(self, names: Sequence[str], question: dict[str, str]) -> None:
        """Ask every node that has not answered, and read what has arrived."""
        nodes = self._post.nodes()
        self._calls = {k: node for k, node in self._calls.items() if node in nodes}
        for node_id in sorted(nodes.keys() - set(self._calls.values())):
            if self._retries.get(node_id, 0.0) > time.monotonic():
                continue
            if message_id := self._post.push(node_id, AGREE, ({}, question), self._wait):
                self._calls[message_id] = node_id
        for message_id, letter in self._post.pull(self._calls, singly=True):
            node_id = self._calls.pop(message_id)
            if not self._complete():
                self._receive(node_id, nodes.get(node_id, ""), letter, names)

    def _receive(self, node_id: int, authenticated: str, letter: Letter, names: Sequence[str]) -> None:
        """Read a node's summary, or log why it is refused."""
        self._retries[node_id] = time.monotonic() + _POLLS_TO_RETRY * self._post.poll
        client_id, why = one_line(authenticated, 200) or f"node {node_id}", trouble(letter)
        try:
            if not why:
                with reading("it"):
                    texts = texts_of(content_of(letter))
                    client_id, why = identity(node_id, authenticated, texts)
                    why = why or self._why_not(client_id, texts)
                    if not why:
                        self.answers[client_id] = unpack_told(texts, names)
        except Malformed as error:
            why = f"what it tells cannot be read: {one_line(error)}"
        if why:
            return self._refuse(client_id, why)
        self._retries[node_id] = float("inf")
        self._refused.pop(client_id, None)
        return None

    def _why_not(self, client_id: str, texts: Mapping[str, str]) -> str | None:
        """Why a site's summary is not read, or None."""
        if texts.get("version", "") != version("fedppl"):
            return f"it runs fedppl {brief(texts.get('version', ''))}, the server {version('fedppl')}"
        if "refused" in texts:
            return one_line(texts["refused"])
        known = "another site has told under this id" if client_id in self.answers else None
        return self._unexpected(client_id) or known
