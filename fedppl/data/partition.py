"""Divide rows among clients by label, subclass, Dirichlet shares or source; each row goes to one client.

Clients that differ in their numbers of rows alone: `label_skew` with one label for all rows, and ``each=1``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.settings import one_of, shown, whole
from fedppl.types import DataError, DeclarationError


def label_skew(
    labels: Any, clients: int, each: int, *, cuts: str = "same", random_seed: int | np.random.Generator | None = None
) -> Partition:
    """Give every client some of the labels, and slices of very different sizes.

    Labels are drawn from a pile that is refilled when it is empty, so that all are held about equally often. Rows of a
    label, shuffled, are cut at random places into a slice for each client that holds it: a few are large, most small.

    Parameters
    ----------
    labels
        Label of every row, (n,).
    clients, each
        Number of clients, and of labels that each holds.
    cuts
        Where labels are cut. "same": all at the same fractions, so that a client with a large slice of one label tends
        to have large slices of all. "independent": each label by itself. "equal": into slices of one size.
    random_seed
        Seed.

    Returns
    -------
    Partition

    Raises
    ------
    DataError, DeclarationError
        Where there are fewer rows of a label than clients that hold it, or numbers are out of range.

    Examples
    --------
    >>> parts = label_skew(np.repeat([0, 1, 2], 40), clients=6, each=2, random_seed=1)
    >>> sum(len(rows) for rows in parts.rows.values())
    120

    Notes
    -----
    *When this fails.* Where ``clients * each`` is less than the number of labels, since rows would be left over.

    References
    ----------
    .. [1] Zhu, Ma and Blaschko (2023), pFedVEM, appendix A.
    """
    y, rng = _require_column("labels", labels), _generator(random_seed)
    known = np.unique(y)
    whole("clients", clients)
    whole("each", each)
    if each > len(known):
        raise DeclarationError(f"each={each} labels a client, and there are {len(known)}.")
    if clients * each < len(known):
        raise DeclarationError(f"{clients} clients of {each} labels cannot hold all {len(known)}; raise one of them.")
    return _sliced([_kinds_of(known.tolist(), clients, each, rng)], [y], cuts, rng)


def concept_drift(
    classes: Any,
    subclasses: Any,
    clients: int,
    *,
    cuts: str = "same",
    random_seed: int | np.random.Generator | None = None,
) -> Partition:
    """Give every client all classes, each as one of its subclasses: the same labels with other inputs.

    Parameters
    ----------
    classes, subclasses
        Class and subclass of every row, (n,); a subclass belongs to one class.
    clients
        Number of clients, at least as many as the class with the most subclasses has.
    cuts, random_seed
        As in `label_skew`.

    Returns
    -------
    Partition

    Raises
    ------
    DataError, DeclarationError
        As in `label_skew`, and for a subclass of two classes.

    Examples
    --------
    >>> parts = concept_drift(np.repeat([0, 1], 40), np.arange(80) // 10, clients=5, random_seed=1)
    >>> sorted(len(kinds) for kinds in parts.kinds.values())
    [2, 2, 2, 2, 2]

    Notes
    -----
    *When this fails.* A class that has one subclass is the same at all clients. Clients differ in their number of rows
    as well, and what is due to that is not told apart from the drift.

    References
    ----------
    .. [1] Zhu, Ma and Blaschko (2023), pFedVEM, section 5.1 and appendix A.
    """
    upper, lower = _require_column("classes", classes), _require_column("subclasses", subclasses)
    rng = _generator(random_seed)
    whole("clients", clients)
    if len(upper) != len(lower):
        raise DataError(f"{len(upper)} classes and {len(lower)} subclasses; pass one of each for every row.")
    under = {kind: np.unique(lower[upper == kind]).tolist() for kind in np.unique(upper).tolist()}
    if sum(map(len, under.values())) > len(np.unique(lower)):
        raise DataError("a subclass stands under two classes; give subclasses names of their own.")
    most = max(map(len, under.values()))
    if clients < most:
        raise DeclarationError(f"{clients} clients cannot hold a class with {most} subclasses; raise clients=.")
    return _sliced([_kinds_of(below, clients, 1, rng) for below in under.values()], [lower] * len(under), cuts, rng)


def dirichlet(
    labels: Any, clients: int, alpha: float, *, least: int = 1, random_seed: int | np.random.Generator | None = None
) -> Partition:
    r"""Divide every label by shares from a symmetric Dirichlet distribution.

    .. math:: (s_{c1}, \ldots, s_{cK}) \sim \mathrm{Dirichlet}(\alpha, \ldots, \alpha)

    for each label c; client k has the share s_ck of its rows.

    Parameters
    ----------
    labels
        Label of every row, (n,).
    clients
        Number of clients.
    alpha
        Concentration: small for clients with few labels each, large for equal ones.
    least
        Rows that every client must have; shares are drawn anew until it holds.
    random_seed
        Seed.

    Returns
    -------
    Partition

    Raises
    ------
    DataError, DeclarationError
        For labels that are missing or of several types, numbers out of range, or 1,000 draws that leave some client
        with too few rows.

    Examples
    --------
    >>> parts = dirichlet(np.repeat([0, 1, 2], 40), clients=4, alpha=0.5, random_seed=1)
    >>> sum(len(rows) for rows in parts.rows.values())
    120

    Notes
    -----
    *When this fails.* Draws that leave a client with too few rows are thrown away: with a small `alpha`, many clients
    or a large `least`, those that are kept are more equal than the Dirichlet distribution, or there are none. Of a
    label with fewer rows than clients some clients have none whatever `alpha` is.
    """
    y, rng = _require_column("labels", labels), _generator(random_seed)
    whole("clients", clients)
    whole("least", least)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 < alpha < np.inf:
        raise DeclarationError(f"alpha={alpha!r} must be positive and finite.")
    for _ in range(1000):
        owner = np.empty(len(y), dtype=np.int64)
        for label in np.unique(y):
            places = rng.permutation(np.flatnonzero(y == label))
            ends = np.round(np.cumsum(rng.dirichlet(np.full(clients, float(alpha)))) * len(places)).astype(np.int64)
            owner[places] = np.searchsorted(ends, np.arange(len(places)), side="right").clip(max=clients - 1)
        if np.bincount(owner, minlength=clients).min() >= least:
            rows = {f"client {k}": np.flatnonzero(owner == k) for k in range(clients)}
            return Partition(rows, {name: tuple(np.unique(y[at]).tolist()) for name, at in rows.items()})
    rule = f"fewer than least={least} rows"
    raise DeclarationError(f"1,000 draws left a client with {rule}; raise alpha={alpha} or lower clients={clients}.")


def feature_skew(
    sources: Any,
    clients: int,
    *,
    labels: Any = None,
    each: int | None = None,
    random_seed: int | np.random.Generator | None = None,
) -> Partition:
    """Give every client rows of one source, one of several data sets with the same labels.

    Sources take turns, so that each has about equally many clients; its rows are cut at random places. With labels,
    a client holds only some of them, drawn from a pile for each source as in `label_skew`.

    Parameters
    ----------
    sources
        Source of every row, (n,).
    clients
        Number of clients, at least as many as there are sources.
    labels
        Label of every row, (n,); None gives a client rows of all labels.
    each
        Number of labels that a client holds.
    random_seed
        Seed.

    Returns
    -------
    Partition
        Its ``kinds`` are the source of every client; with labels, pairs of its source and a label.

    Raises
    ------
    DataError, DeclarationError
        As in `label_skew`, and if there are fewer clients than sources, or too few to hold all labels of a source.

    Examples
    --------
    >>> parts = feature_skew(["mnist"] * 60 + ["usps"] * 40, clients=4, random_seed=1)
    >>> [kinds for kinds in parts.kinds.values()]
    [('mnist',), ('usps',), ('mnist',), ('usps',)]
    >>> digits = [0, 1] * 50
    >>> parts = feature_skew(["mnist"] * 60 + ["usps"] * 40, clients=4, labels=digits, each=1, random_seed=1)
    >>> parts.kinds["client 0"]
    (('mnist', 0),)

    Notes
    -----
    *When this fails.* Where sources differ in the shares of their labels too, clients differ in more than their inputs.
    """
    where, rng = _require_column("sources", sources), _generator(random_seed)
    known = np.unique(where).tolist()
    whole("clients", clients)
    if clients < len(known):
        raise DeclarationError(f"{clients} clients cannot hold {len(known)} sources; raise clients=.")
    if (labels is None) != (each is None):
        raise DeclarationError(f"each={each!r} and labels= go together; pass both or none.")
    if labels is None or each is None:
        return _sliced([[(known[k % len(known)],) for k in range(clients)]], [where], "independent", rng)
    y = _require_column("labels", labels)
    if len(y) != len(where):
        raise DataError(f"{len(y)} labels for {len(where)} sources; pass one of each for every row.")
    whole("each", each)
    drawn: list[tuple[int, ...]] = [()] * clients  # numbers of pairs
    pairs: list[tuple[Any, Any]] = []
    numbers = np.empty(len(y), dtype=np.int64)
    for i, source in enumerate(known):
        classes, members = np.unique(y[where == source]).tolist(), range(i, clients, len(known))
        if not each <= len(classes) <= each * len(members):
            what = f"{len(members)} clients with each={each} cannot hold all {len(classes)} labels of {source!r}"
            raise DeclarationError(f"{what}, none of them twice; change clients= or each=.")
        for number, label in enumerate(classes, len(pairs)):
            numbers[(where == source) & (y == label)] = number
        kinds_here = _kinds_of(range(len(pairs), len(pairs) + len(classes)), len(members), each, rng)
        drawn = [kinds_here[k // len(known)] if k in members else kinds for k, kinds in enumerate(drawn)]
        pairs += [(source, label) for label in classes]
    rows, kinds_of = _sliced([drawn], [numbers], "independent", rng)
    return Partition(rows, {name: tuple(pairs[number] for number in kinds) for name, kinds in kinds_of.items()})


# What all partitions share: labels drawn from a pile, and rows cut into slices ----------------------------------------

Rows = NDArray[np.int64]


class Partition(NamedTuple):
    """Rows of each client, and the kinds of rows that were drawn for it."""

    rows: Mapping[str, Rows]  # client id to positions, in rising order
    kinds: Mapping[str, tuple[Any, ...]]  # labels, subclasses or sources of each client


def _generator(random_seed: Any) -> np.random.Generator:
    """A generator of this seed."""
    try:
        return np.random.default_rng(random_seed)
    except (TypeError, ValueError) as error:
        seed = shown(random_seed)
        raise DeclarationError(f"random_seed={seed} must be a non-negative int, a Generator or None.") from error


def _require_column(name: str, values: Any) -> NDArray[Any]:
    """Check a column: one value for each row, numbers or strings of one type, none missing."""
    if np.ma.is_masked(values):
        raise DataError(f"{name} hold masked values; drop these rows.")
    try:
        column = np.asarray(values)
    except ValueError:  # rows of several lengths
        column = np.asarray(None)
    if column.ndim != 1 or not len(column):
        raise DataError(f"{name} have shape {column.shape}; pass one value for every row.")
    # NumPy makes strings of all values, NaN too, where one is a string.
    given = list(values) if column.dtype.kind in "US" and isinstance(values, list | tuple) else column.tolist()
    types = {str if isinstance(value, str) else type(value) for value in given}  # strings of NumPy are strings
    if column.dtype.kind not in "OUSbiuf" or len(types) > 1 or not isinstance(given[0], str | bytes | int | float):
        listed = sorted(one.__name__ for one in types)
        raise DataError(f"{name} are of the types {listed}; pass numbers, or strings.")
    numbers = column.astype(float) if column.dtype.kind == "O" and types == {float} else column
    if numbers.dtype.kind == "f" and not np.all(np.isfinite(numbers)):
        raise DataError(f"{name} hold missing or infinite values; drop these rows.")
    return column


def _kinds_of(known: Sequence[Any], clients: int, each: int, rng: np.random.Generator) -> list[tuple[Any, ...]]:
    """Draw different kinds for each client from a pile that is refilled."""
    pile: list[Any] = []
    drawn: list[tuple[Any, ...]] = [()] * clients
    for client in range(clients):
        while len(drawn[client]) < each:
            if set(pile) <= set(drawn[client]):
                pile += [known[i] for i in rng.permutation(len(known))]
            kind = next(kind for kind in pile if kind not in drawn[client])
            pile.remove(kind)
            drawn[client] += (kind,)
    return drawn


def _sliced(
    drawn: Sequence[Sequence[tuple[Any, ...]]], columns: Sequence[NDArray[Any]], cuts: str, rng: np.random.Generator
) -> Partition:
    """Slice the rows of every kind among the clients that drew it."""
    one_of("cuts", cuts, ("same", "independent", "equal"))
    names = [f"client {k}" for k in range(len(drawn[0]))]
    slices: dict[str, list[Rows]] = {name: [] for name in names}
    known_cuts: dict[int, NDArray[np.float64]] = {}
    for kinds, column in zip(drawn, columns, strict=True):
        for kind in dict.fromkeys(kind for kinds_held in kinds for kind in kinds_held):
            owners = [name for name, kinds_held in zip(names, kinds, strict=True) if kind in kinds_held]
            places = rng.permutation(np.flatnonzero(column == kind))
            if len(places) < len(owners):
                raise DataError(f"{len(places)} rows of {kind!r} for {len(owners)} clients; lower clients=.")
            parts = len(owners)
            if cuts == "equal":
                known_cuts[parts] = np.arange(1, parts) / parts
            elif cuts == "independent" or parts not in known_cuts:
                # M − 1 of N − 1 places, without replacement, as fractions of N.
                chosen = np.sort(rng.choice(len(places) - 1, parts - 1, replace=False)) + 1
                known_cuts[parts] = chosen / len(places)
            ends = _places_of(known_cuts[parts], len(places))
            for owner, part in zip(owners, np.split(places, ends), strict=True):
                slices[owner].append(part)
    rows = {name: np.sort(np.concatenate(parts)).astype(np.int64) for name, parts in slices.items()}
    kinds_of = {name: tuple(itertools.chain(*(held[k] for held in drawn))) for k, name in enumerate(names)}
    return Partition(rows, kinds_of)


def _places_of(fractions: NDArray[np.float64], rows: int) -> Rows:
    """Different cut points of N rows at these fractions, so that no slice is empty."""
    places = np.arange(len(fractions))
    ends = np.round(fractions * rows).astype(np.int64)
    ends = np.maximum.accumulate(np.maximum(ends, 1) - places) + places  # equal cut points are pushed up
    return np.minimum(ends, rows - len(ends) + places)  # and those past the end down
