"""The server's part before a run by a formula: it asks sites for what they need to agree on, each once."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from flwr.serverapp import Grid

from fedppl.flower.agreed import unpack_told
from fedppl.flower.decode import Malformed, brief, reading
from fedppl.flower.records import AGREE, texts_of
from fedppl.flower.roll import Letter, Post, content_of, expected_clients, identity, trouble
from fedppl.flower.site_agreement import named, waits
from fedppl.formulas.agreement import Told
from fedppl.formulas.exchange import asked
from fedppl.formulas.formula import Agreed, of_told
from fedppl.model.declaration import FederatedModel
from fedppl.settings import one_line, one_of, positive, shown, whole
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

_GRACE = 2.0  # seconds that a question outlives the wait
_LOOKS = 120  # after so many a site that was refused is asked again: it may have been corrected


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
    if not isinstance(model, FederatedModel) or not waits(model):
        raise DeclarationError(
            f"model={shown(model)} is no formula that clients have to agree on; pass fedppl.formula(...)."
        )
    whole("min_count", min_count)
    one_of("withheld", withheld, ("error", "other"))
    positive("wait", wait, "it is in seconds"), positive("poll", poll, "it is in seconds")
    expected = expected_clients(clients)
    logger.info("sites whose policy has a file for approval know this question as the run %r", named(model))
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
