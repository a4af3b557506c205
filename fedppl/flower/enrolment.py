"""Before a run: which node is which client, whether all run the same, and what they agree on for a formula."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

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
from fedppl.settings import one_line, one_of, positive, shown, whole
from fedppl.types import DeclarationError, Layout, Message

logger = logging.getLogger(__name__)

# Calls to new sites that may wait for an answer: Flower's simulation looks through all messages for every node.
_CALLS_AT_ONCE = 64
# A site that was refused is called again after so many looks: it may have been corrected.
_LOOKS = 120


class Own(NamedTuple):
    """What the server itself knows of the model, from its own declaration."""

    layout: Layout
    reader: SharedReader


def expected_clients(clients: Any) -> int | tuple[str, ...]:
    """The number of sites to wait for, or their ids, as a user says it."""
    if isinstance(clients, int) and not isinstance(clients, bool):
        return whole("clients", clients)
    names = clients if isinstance(clients, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        raise DeclarationError(
            f"clients={shown(clients)} must be the number of sites to wait for, or a list of their ids, none twice."
        )
    return tuple(names)


def identity(node_id: int, authenticated: str, texts: Mapping[str, str]) -> tuple[str, str | None]:
    """What a node that has spoken is called, and why it is not believed to be that; or `Malformed`."""
    told = texts.get("client_id", "")
    told = told and checked_name(told, "'client_id'")
    if not authenticated and not told:
        return f"node {node_id}", 'it has no id; start it with --node-config "client-id=..."'
    if authenticated and told and told != authenticated:
        return told, f"its authenticated name is {authenticated!r}; drop or correct its client-id"
    return authenticated or told, None


class Roll:
    """Enrolled clients by logical id, and their nodes."""

    def __init__(
        self,
        post: Post,
        algorithm: AnyAlgorithm,
        expected: int | tuple[str, ...],
        wait: float,
        own: Own | None,
        greeting: Mapping[str, str] | None = None,
    ) -> None:
        self._post = post
        self._expected = expected
        self._wait = wait
        self._words = dict(greeting or {})  # to every site that is called
        self._server = Terms(SERVER, version("fedppl"), algorithm.settings, None)
        # What every site is held against: the server's declaration, or what a majority says.
        self._reference: Hello | None = None
        if own is not None:
            told = labels(own.reader.coords)
            self._reference = Hello(*self._server[:3], own.layout, own.reader.dims, told)
        self.hellos: dict[str, Hello] = {}  # enrolled clients
        self.nodes: dict[str, int] = {}  # client id to node id
        self._pending: dict[int, Hello] = {}  # nodes that wait for a reference
        self._greeting: dict[str, int] = {}  # message id of a call not answered yet, to its node
        self._known: set[int] = set()  # nodes that were called
        self._again: dict[int, float] = {}  # refused nodes, and when to call them again
        self._rivals: dict[int, Hello] = {}  # live nodes that claim the id of another live node
        self._refused: dict[str, str] = {}
        self._listed: tuple[float, dict[int, str]] | None = None  # when, and node ids with their names

    def enrol(self) -> None:
        """Call every node until the clients that are expected have answered."""
        end = time.monotonic() + self._wait
        while not self._complete():
            self.welcome(max_age=1.0)
            if self._complete():
                break
            if time.monotonic() > end:
                raise DeclarationError(self._missing())
            time.sleep(self._post.poll)
        logger.info("%d clients enrolled: %s", len(self.hellos), sorted(self.hellos)[:20])

    def welcome(self, max_age: float = 0.0) -> set[int]:
        """Call nodes that are new, take in what they say, and return the nodes that are connected.

        The list of nodes is asked for anew when it is older than `max_age` seconds.
        """
        if self._listed is None or time.monotonic() - self._listed[0] > max_age:
            self._listed = (time.monotonic(), self._post.nodes())
        names = self._listed[1]
        alive = set(names)
        for node_id in self._rivals.keys() - alive:
            del self._rivals[node_id]
        for node_id in self._pending.keys() - alive:
            del self._pending[node_id]
        now, called = time.monotonic(), set(self._greeting.values())
        again = {node_id for node_id, due in self._again.items() if due <= now and node_id not in called}
        for node_id in sorted(alive - (self._known - again))[: max(0, _CALLS_AT_ONCE - len(self._greeting))]:
            if message_id := self._post.push(node_id, HELLO, ({}, self._words), self._wait):
                self._greeting[message_id] = node_id
                self._known.add(node_id)
                self._again.pop(node_id, None)
        self._known &= alive
        for message_id in [message_id for message_id, node_id in self._greeting.items() if node_id not in alive]:
            del self._greeting[message_id]
        for message_id, message in self._post.pull(self._greeting, singly=True):
            node_id = self._greeting.pop(message_id)
            self._meet(node_id, names.get(node_id, ""), message, alive)
        for node_id, hello in list(self._rivals.items()):
            if self.nodes[hello.client_id] not in alive:
                del self._rivals[node_id]
                self._bind(node_id, hello)
        return alive

    def _meet(self, node_id: int, told_name: str, message: Letter, alive: set[int]) -> None:
        """Take in what a node says of itself, or refuse it and say why."""
        whose = one_line(told_name, 200) or f"node {node_id}"
        self._pending.pop(node_id, None)
        self._again[node_id] = time.monotonic() + _LOOKS * self._post.poll
        if told := trouble(message):
            return self._refuse(whose, told)
        try:
            with reading("it"):
                texts = texts_of(content_of(message))
                whose, why = identity(node_id, told_name, texts)
                if why:
                    return self._refuse(whose, why)
                if "error" in texts:
                    return self._refuse(whose, one_line(texts["error"]))
                if isinstance(self._expected, tuple) and whose not in self._expected:
                    del self._again[node_id]
                    return self._refuse(whose, f"it is not among the expected clients {list(self._expected)}")
                if reason := self._other_terms(texts):
                    return self._refuse(whose, reason)
                arrays, _ = from_content(content_of(message), self._shapes_of_hello(), "it")
                hello = unpack_hello(arrays, {**texts, "client_id": whose})
        except Malformed as error:
            return self._refuse(whose, f"its introduction cannot be read: {one_line(error)}")
        self._pending[node_id] = hello
        if self._reference is None:
            number = self._expected if isinstance(self._expected, int) else len(self._expected)
            self._reference = reference(list(self._pending.values()), number)
        if self._reference is not None:
            for waiting, one in list(self._pending.items()):
                del self._pending[waiting]
                self._admit(waiting, one, alive)
            return None
        del self._again[node_id]
        apart = disagreement(list(self._pending.values()))
        for waiting, one in self._pending.items():
            if why := apart.get(one.client_id):
                self._again.setdefault(waiting, time.monotonic() + _LOOKS * self._post.poll)
                self._refuse(one.client_id, f"{why}; no majority of the clients says either yet")
        return None

    def _other_terms(self, texts: Mapping[str, str]) -> str | None:
        """What a site does not run as the server does; the version first, which decides how the rest is written."""
        ours = self._reference.terms if self._reference else self._server
        bare = ours._replace(version=one_text(texts, "version", 200), variables=None)
        return other_terms(ours, bare) or other_terms(ours, unpack_terms(texts))

    def _shapes_of_hello(self) -> Mapping[str, tuple[int, ...]] | None:
        """Sizes of an introduction's arrays, where the server knows what to expect."""
        if self._reference is None:
            return None
        size, layout = self._reference.layout.size, self._reference.layout
        precision = size * (size + 1) // 2 if layout.prior.precision.ndim == 2 else size
        return {"prior_linear": (size,), "prior_precision": (precision,), "prior_density": (len(layout.density),)}

    def _admit(self, node_id: int, hello: Hello, alive: set[int]) -> None:
        """Enrol a node that says what the reference says, or refuse it."""
        assert self._reference is not None
        client_id = hello.client_id
        if reason := difference(self._reference, hello):
            return self._refuse(client_id, reason)
        self._again.pop(node_id, None)
        known = client_id in self.hellos
        if not known and self._complete():
            return self._refuse(client_id, "the run has begun with other clients; it can enrol in the next run")
        if known and self.nodes[client_id] in alive and self.nodes[client_id] != node_id:
            self._rivals[node_id] = hello
            return self._refuse(
                client_id, f"nodes {self.nodes[client_id]} and {node_id} are both live with this id; stop one of them"
            )
        return self._bind(node_id, hello)

    def _bind(self, node_id: int, hello: Hello) -> None:
        back = hello.client_id in self.nodes
        self.nodes[hello.client_id] = node_id
        self.hellos.setdefault(hello.client_id, hello)
        self._refused.pop(hello.client_id, None)
        logger.info(
            "client %s %s as node %d",
            hello.client_id,
            "is back" if back else "enrolled",
            node_id,
            extra={"client": hello.client_id, "status": "enrolled"},
        )

    def _refuse(self, client_id: str, reason: str) -> None:
        if self._refused.get(client_id) == reason:  # said already
            return
        self._refused[client_id] = reason
        logger.error("client %s refused: %s", client_id, reason, extra={"client": client_id, "status": "refused"})

    def _complete(self) -> bool:
        expected = self._expected
        if isinstance(expected, int):
            return len(self.hellos) >= expected
        return set(expected) <= set(self.hellos)

    def _missing(self) -> str:
        """Who is not there, who was refused and why, and who says what where there is no majority."""
        number = self._expected if isinstance(self._expected, int) else len(self._expected)
        told = list(self._pending.values())
        apart = disagreement(told)
        there = {*self.hellos, *(() if apart else (hello.client_id for hello in told))}
        found = ", ".join(map(repr, sorted(there))) or "none"
        if isinstance(self._expected, tuple):
            found += f"; missing {sorted(set(self._expected) - there - {hello.client_id for hello in told})}"
        reasons = {client_id: why for client_id, why in self._refused.items() if client_id not in apart}
        refused = "".join(f"; {client_id!r} was refused: {why}" for client_id, why in reasons.items())
        if apart:
            refused += (
                "; the sites differ, and no more than half of the clients that are expected say the same: "
                + "; ".join(f"{client_id!r}: {why}" for client_id, why in sorted(apart.items()))
                + ". Correct who is wrong, or give the server example_data=, and it knows by itself"
            )
        return (
            f"only {len(there)} of {number} sites enrolled within {self._wait:g} s ({found}){refused}. Start the "
            "missing sites and look at their logs, or raise wait=."
        )


# Whether sites say the same of the model, and what a strict majority of them says -------------------------------------

SERVER = "the server"

# Sites compute with libraries of their own, and sums are rounded in another order.
_ROUNDING = 1e-6


def other_terms(ours: Terms, theirs: Terms) -> str | None:
    """What two sides do not run alike, or None."""
    at = _at(ours.client_id)
    if theirs.version != ours.version:
        return f"it runs fedppl {brief(theirs.version)}, {at} runs {ours.version}; install one version everywhere"
    if other := _changed(ours.settings, theirs.settings):
        return f"its algorithm has {other}"
    if ours.variables is None or theirs.variables is None:
        return None
    names, others = ([v.name for v in one.variables or ()] for one in (ours, theirs))
    if names != others:
        return f"it shares {_few(others)}, {at} shares {_few(names)}"
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        for field in a._fields:
            mine, other_value = getattr(a, field), getattr(b, field)
            if mine != other_value:
                return f"its shared variable {b.name!r} has {field} {other_value}, at {at} it has {mine}"
    return None


def difference(ours: Hello, theirs: Hello) -> str | None:
    """What two sides do not agree on, or None."""
    at = _at(ours.client_id)
    if found := other_terms(ours.terms, theirs.terms):
        return found
    if ours.layout.fingerprint != theirs.layout.fingerprint:
        return (
            f"its shared prior is another than at {at} ({_other_prior(ours.layout, theirs.layout)}): constants of the "
            "prior must be the same everywhere, and not depend on data"
        )
    return _other_labels(ours, theirs, at)


def _at(client_id: str) -> str:
    return client_id if client_id == SERVER else repr(client_id)


def _changed(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    told = [f"{brief(name)} {brief(theirs.get(name))} instead of {brief(ours.get(name))}" for name in names[:5]]
    return "; ".join(told)


def _few(values: Sequence[Any]) -> str:
    return f"{list(values[:8])}" + (f" and {len(values) - 8} others" if len(values) > 8 else "")


def _other_prior(ours: Layout, theirs: Layout) -> str:
    """The coordinate in which two priors of one shape differ most."""
    if ours.prior_is_gaussian != theirs.prior_is_gaussian:
        return "one of them is Gaussian"
    (mean, sd), (others, other_sd) = (
        (gaussian.mean(one.prior), gaussian.standard_deviations(one.prior)) for one in (ours, theirs)
    )
    apart = np.abs(others - mean) / sd + np.abs(np.log(other_sd / sd))
    if not apart.max() > 1e-6:
        return "in correlations, or in its density about one mean and covariance"
    k = int(np.argmax(apart))
    return f"{ours.labels[k]} has mean {others[k]:.4g} and sd {other_sd[k]:.4g}, there {mean[k]:.4g} and {sd[k]:.4g}"


def _shared_dims(layout: Layout) -> list[str]:
    return sorted({dim for variable in layout.variables for dim in variable.dims or () if dim})


def _other_labels(ours: Hello, theirs: Hello, at: str) -> str | None:
    """Where the columns of a shared variable have other labels, or another order; what is left out says nothing."""
    for dim in _shared_dims(ours.layout):
        if dim not in ours.coords or dim not in theirs.coords:
            continue
        mine, other = list(ours.coords[dim]), list(theirs.coords[dim])
        if mine != other:
            shorter = min(len(mine), len(other))
            k = next((i for i in range(shorter) if mine[i] != other[i]), shorter)
            found, there = (repr(brief(values[k])) if k < len(values) else "none" for values in (other, mine))
            return (
                f"its dim {dim!r} has label {found} in place {k}, at {at} it is {there} ({len(other)} labels, there "
                f"{len(mine)}): give the columns of the data one order, and coords one order, everywhere"
            )
    return None


def _said(hello: Hello) -> tuple[str, str]:
    """What has to be equal: the model, and which coordinate of it is which."""
    dims = _shared_dims(hello.layout)
    return hello.layout.fingerprint, json.dumps([hello.coords.get(dim) for dim in dims])


def reference(told: Sequence[Hello], expected: int) -> Hello | None:
    """One of those that say what a strict majority of the `expected` clients says, or None.

    A client that says two things, by two nodes that claim its id, counts for neither.
    """
    by_client: dict[str, set[tuple[str, str]]] = {}
    for hello in told:
        by_client.setdefault(hello.client_id, set()).add(_said(hello))
    votes = Counter(next(iter(said)) for said in by_client.values() if len(said) == 1)
    for said, count in votes.most_common(1):
        if 2 * count > expected:
            return min((hello for hello in told if _said(hello) == said), key=lambda hello: hello.client_id)
    return None


def disagreement(told: Sequence[Hello]) -> dict[str, str]:
    """What each site says otherwise than the most of them, or than the first where two say two things; by client."""
    if not told:
        return {}
    votes = Counter(_said(hello) for hello in told)
    ranked = sorted(told, key=lambda hello: (-votes[_said(hello)], hello.client_id))
    first = ranked[0]
    # Where all say another thing, the first stands for nothing more than the others.
    tied = [hello for hello in ranked if _said(hello) != _said(first)]
    found = {hello.client_id: difference(first, hello) or _unlabelled(first) for hello in tied}
    if tied and votes[_said(tied[0])] == votes[_said(first)]:
        found |= {
            hello.client_id: difference(tied[0], hello) or _unlabelled(tied[0])
            for hello in ranked
            if _said(hello) == _said(first)
        }
    return found


def _unlabelled(hello: Hello) -> str:
    return (
        f"only one of it and {hello.client_id!r} tells the labels of its shared dims; give coords that do not depend "
        "on data"
    )


def told_coords(hellos: Mapping[str, Hello]) -> tuple[dict[str, tuple[str, ...] | None], dict[str, list[Any]]]:
    """Dims of variables and labels of dims, those that a strict majority of the clients tells."""
    dims = _majority([hello.dims for hello in hellos.values()])
    coords = _majority([hello.coords for hello in hellos.values()])
    whole = {name: of for name, of in dims.items() if of is None or None not in of}
    return whole, {dim: list(values) for dim, values in coords.items()}


def _majority(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    votes: Counter[tuple[str, str]] = Counter()
    values: dict[tuple[str, str], Any] = {}
    for one in told:
        for name, value in one.items():
            key = name, json.dumps(value)
            votes[key] += 1
            values[key] = value
    return {name: values[name, said] for (name, said), count in votes.items() if 2 * count > len(told)}


def why_no_draws(
    values: Message,
    count: int,
    shared: Iterable[str],
    dims: Mapping[str, tuple[str, ...] | None],
    coords: Mapping[str, Sequence[Any]],
) -> str | None:
    """Why a site's reading of `count` draws cannot be used, or None if it can."""
    missing = [name for name in shared if name not in values]
    if missing:
        return f"its draws lack {missing[:5]}"
    lengths = {dim: len(labels) for dim, labels in coords.items()}
    taken = {"chain", "draw", *lengths, *(dim for along in dims.values() for dim in along or ())}
    for name, value in values.items():
        if name in taken:
            return f"its draws have the name {name!r}, which is that of a dim"
        if value.shape[:1] != (count,):
            return f"its draws of {name!r} have shape {value.shape}, expected ({count}, ...)"
        along = dims.get(name)
        if along is not None and len(along) != value.ndim - 1:
            return f"its draws of {name!r} have shape {value.shape}, and dims {along}"
        for dim, length in zip(along or (), value.shape[1:], strict=False):
            if lengths.setdefault(dim, length) != length:
                return f"its draws of {name!r} have shape {value.shape}, but dim {dim!r} has length {lengths[dim]}"
    return None


def agreed(answers: Mapping[str, Message], asked: int) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Draws that a strict majority of the `asked` sites read alike, to rounding, and who read which otherwise."""
    found: dict[str, Any] = {}
    others: dict[str, list[str]] = {}
    for name in sorted({name for values in answers.values() for name in values}):
        there = {client_id: values[name] for client_id, values in answers.items() if name in values}
        for value in there.values():
            alike = [client_id for client_id, other in there.items() if _close(value, other)]
            if 2 * len(alike) > asked:
                found[name] = value
                break
        else:
            alike = []
        if differ := sorted(set(there) - set(alike)):
            others[name] = differ
    return found, others


def _close(a: Any, b: Any) -> bool:
    """Equal to rounding. Symmetric: an implausible value must not set the scale by which it is compared."""
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return False
    if a.dtype.kind != "f":
        return bool(np.array_equal(a, b))
    with np.errstate(all="ignore"):
        scale = np.nan_to_num(np.minimum(np.std(a), np.std(b)), nan=0.0, posinf=0.0) if a.size else 0.0
        apart = np.abs(a - b) <= _ROUNDING * (np.minimum(np.abs(a), np.abs(b)) + scale)
        return bool(np.all(apart | (a == b) | (np.isnan(a) & np.isnan(b))))


# Before a run by a formula: sites are asked, each once, for what they need to agree on --------------------------------

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

    Each site tells, once, what its policy lets it: of every column of the formula the number of rows; of numbers their
    sum and sum of squares, roughly; of texts how many rows have each level. Nothing of fewer rows than the larger of
    `min_count` and the policy's `agreement` (10 by default) leaves, nor whether there are such rows. What comes of it
    goes to all sites when they enrol, which look whether it goes with their rows, and leave out rows of levels that are
    not in it where those are so few.

    Parameters
    ----------
    grid
        Flower's grid, as its server app gets it.
    model
        What `fedppl.formula` returned, the same as at the sites.
    clients
        Number of sites to wait for, or their ids.
    min_count
        Rows that a client needs of a level, and in all, to tell of them.
    withheld
        What becomes of rows of levels that were not told, where a site has more than so few of them: "other" for a
        level of that name, or "error".
    wait
        Seconds to wait for their answers.
    poll
        Seconds between two looks.

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
    *When this fails.* One of a few sites that lies moves scales, and so the width of priors: it counts for at most ten
    times as many rows as the median of the others. From five sites on means and sds are medians over sites, and none
    counts for more than the median of the others. It is named where it is out of all proportion (`Agreed.strange`),
    and sites with whose rows the result does not go take no part.
    A site whose rows have changed tells what it told before, until ``<client>.told`` in its folder is deleted
    (``site.told`` where its node config has no ``client-id``).
    """
    if not isinstance(model, FederatedModel) or not _site.waits(model):
        raise DeclarationError(
            f"model={shown(model)} is no formula that clients have to agree on; pass fedppl.formula(...)."
        )
    whole("min_count", min_count)
    one_of("withheld", withheld, ("error", "other"))
    positive("wait", wait, "it is in seconds"), positive("poll", poll, "it is in seconds")
    expected = expected_clients(clients)
    logger.info("sites whose policy has a file for approval know this question as the run %r", _site.named(model))
    asking = _Asking(Post(grid, poll, _GRACE), expected, asked(model.builder).names, min_count, wait)  # type: ignore[arg-type]
    return of_told(model, asking.told(), withheld, believed=False)


class _Asking:
    """Sites that have told, by client id, and those that still have to."""

    def __init__(
        self, post: Post, expected: int | tuple[str, ...], names: Sequence[str], min_count: int, wait: float
    ) -> None:
        self._post = post
        self._expected = expected
        self._names = names
        self._question = {"min_count": str(min_count)}
        self._wait = wait
        self._told: dict[str, dict[str, Told]] = {}
        self._refused: dict[str, str] = {}
        self._asked: dict[str, int] = {}  # message ids that are not answered yet, to their nodes
        self._later: dict[int, float] = {}  # nodes that have answered, and when to ask them again

    def told(self) -> dict[str, dict[str, Told]]:
        """Ask until all have told that are expected."""
        end = time.monotonic() + self._wait
        while not self._complete():
            nodes = self._post.nodes()
            self._asked = {k: node for k, node in self._asked.items() if node in nodes}
            for node_id in sorted(nodes.keys() - set(self._asked.values())):
                if self._later.get(node_id, 0.0) > time.monotonic():
                    continue
                if message_id := self._post.push(node_id, AGREE, ({}, self._question), self._wait):
                    self._asked[message_id] = node_id
            for message_id, letter in self._post.pull(self._asked, singly=True):
                node_id = self._asked.pop(message_id)
                if not self._complete():
                    self._hear(node_id, nodes.get(node_id, ""), letter)
            if self._complete():
                break
            if time.monotonic() > end:
                raise DeclarationError(self._missing())
            time.sleep(self._post.poll)
        return {client_id: self._told[client_id] for client_id in sorted(self._told)}

    def _hear(self, node_id: int, authenticated: str, letter: Letter) -> None:
        """Take in what a node tells, or say why not."""
        self._later[node_id] = time.monotonic() + _LOOKS * self._post.poll
        whose, why = one_line(authenticated, 200) or f"node {node_id}", trouble(letter)
        try:
            if not why:
                with reading("it"):
                    texts = texts_of(content_of(letter))
                    whose, why = identity(node_id, authenticated, texts)
                    why = why or self._why_not(whose, texts)
                    if not why:
                        self._told[whose] = unpack_told(texts, self._names)
        except Malformed as error:
            why = f"what it tells cannot be read: {one_line(error)}"
        if not why:
            self._later[node_id] = float("inf")
            self._refused.pop(whose, None)
        elif self._refused.get(whose) != why:
            self._refused[whose] = why
            logger.error("client %s does not agree: %s", whose, why, extra={"client": whose, "status": "refused"})

    def _why_not(self, whose: str, texts: Mapping[str, str]) -> str | None:
        """Why what a site tells is not looked at, or None."""
        if texts.get("version", "") != version("fedppl"):
            return f"it runs fedppl {brief(texts.get('version', ''))}, the server {version('fedppl')}"
        if "refused" in texts:
            return one_line(texts["refused"])
        if isinstance(self._expected, tuple) and whose not in self._expected:
            return f"it is not among the expected clients {list(self._expected)}"
        return "another site has told under this id" if whose in self._told else None

    def _complete(self) -> bool:
        if isinstance(self._expected, int):
            return len(self._told) >= self._expected
        return set(self._expected) <= set(self._told)

    def _missing(self) -> str:
        number = self._expected if isinstance(self._expected, int) else len(self._expected)
        refused = "".join(f"; {client_id!r}: {why}" for client_id, why in self._refused.items())
        return (
            f"only {len(self._told)} of {number} sites told within {self._wait:g} s what clients have to agree on "
            f"({', '.join(map(repr, sorted(self._told))) or 'none'}){refused}. Start the missing sites and look at "
            "their logs, or raise wait=."
        )
