"""Divide rows among clients: by label, by subclass, by quantity, by Dirichlet shares, by source. Every row once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.settings import shown, whole
from fedppl.types import DataError, DeclarationError

Rows = NDArray[np.int64]


class Partition(NamedTuple):
    """Who holds which rows, and what kinds of rows a client was meant to hold."""

    rows: Mapping[str, Rows]  # client id to positions, in rising order
    kinds: Mapping[str, tuple[Any, ...]]  # labels, subclasses or sources of each client


def label_skew(
    labels: Any, clients: int, each: int, *, cuts: str = "same", random_seed: int | np.random.Generator | None = None
) -> Partition:
    """Give every client some of the labels, and slices of very different sizes.

    Labels are drawn from a pile that is refilled when it is empty, so that all are held about equally often. The rows
    of a label, shuffled, are cut at random places into one slice for each client that holds it: a few are large, most
    are small.

    Parameters
    ----------
    labels
        Label of every row, (n,).
    clients, each
        Number of clients, and of labels that each holds.
    cuts
        Rule by which labels are cut. "same": all at the same fractions, so that a client with a large slice of one
        label tends to have large slices of all. "independent": each label by itself.
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
    *When this fails.* A label of which no client draws is nobody's: where ``clients * each`` is less than the number
    of labels this is an error, since rows would be left over.

    References
    ----------
    .. [1] Zhu, Ma and Blaschko (2023), pFedVEM, appendix A.
    """
    y, rng = require_column("labels", labels), _rng(random_seed)
    known = np.unique(y)
    _whole(clients=clients, each=each)
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
    *When this fails.* A class that has one subclass is the same at all clients. The subclass of each class is drawn by
    itself, so that few clients have few of the combinations. Clients differ in their number of rows as well, and what
    is due to that is not told apart from the drift.

    References
    ----------
    .. [1] Zhu, Ma and Blaschko (2023), pFedVEM, section 5.1 and appendix A.
    """
    upper, lower = require_column("classes", classes), require_column("subclasses", subclasses)
    rng = _rng(random_seed)
    _whole(clients=clients)
    if len(upper) != len(lower):
        raise DataError(f"{len(upper)} classes and {len(lower)} subclasses; pass one of each for every row.")
    under = {kind: np.unique(lower[upper == kind]).tolist() for kind in np.unique(upper).tolist()}
    if sum(map(len, under.values())) > len(np.unique(lower)):
        raise DataError("a subclass stands under two classes; give subclasses names of their own.")
    most = max(map(len, under.values()))
    if clients < most:
        raise DeclarationError(f"{clients} clients cannot hold a class with {most} subclasses; raise clients=.")
    return _sliced([_kinds_of(below, clients, 1, rng) for below in under.values()], [lower] * len(under), cuts, rng)


def quantity(rows: int, clients: int, *, random_seed: int | np.random.Generator | None = None) -> Partition:
    """Cut shuffled rows at random places: clients that differ in nothing but their number of rows.

    Parameters
    ----------
    rows
        Number of rows to divide.
    clients
        Number of clients, each of which has at least one row.
    random_seed
        Seed.

    Returns
    -------
    Partition
        Its ``kinds`` are "all" for every client.

    Raises
    ------
    DataError
        If there are fewer rows than clients.
    DeclarationError
        For numbers that are not whole or below 1, or a seed that is none.

    Examples
    --------
    >>> parts = quantity(100, 4, random_seed=0)
    >>> sum(len(rows) for rows in parts.rows.values())
    100

    Notes
    -----
    *When this fails.* Labels are not looked at: a client with few rows lacks some of them by chance. Cuts are uniform,
    so that some client may have a single row, which a model with several parameters for each client cannot use.
    """
    _whole(rows=rows, clients=clients)
    everyone = [("all",)] * clients
    return _sliced([everyone], [np.full(rows, "all")], "same", _rng(random_seed))


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
    DataError
        For labels that are none: not one for every row, of several types, or numbers that are missing or infinite.
    DeclarationError
        For numbers out of range, or where 1,000 draws leave some client with too few rows.

    Examples
    --------
    >>> parts = dirichlet(np.repeat([0, 1, 2], 40), clients=4, alpha=0.5, random_seed=1)
    >>> sum(len(rows) for rows in parts.rows.values())
    120

    Notes
    -----
    *When this fails.* Draws that leave a client with too few rows are thrown away: with a small `alpha`, many clients
    or a large `least`, those that are kept are more equal than the Dirichlet distribution, or there are none. Shares
    are rounded to rows, and of a label with fewer rows than clients some clients have none whatever `alpha` is.
    """
    y, rng = require_column("labels", labels), _rng(random_seed)
    _whole(clients=clients, least=least)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 < alpha < np.inf:
        raise DeclarationError(f"alpha={alpha!r} must be positive and finite.")
    for _ in range(1000):
        owner = np.empty(len(y), dtype=np.int64)
        for label in np.unique(y):
            places = rng.permutation(np.flatnonzero(y == label))
            ends = np.round(np.cumsum(rng.dirichlet(np.full(clients, float(alpha)))) * len(places)).astype(np.int64)
            owner[places] = np.searchsorted(ends, np.arange(len(places)), side="right").clip(max=clients - 1)
        if np.bincount(owner, minlength=clients).min() >= least:
            held = {name: np.flatnonzero(owner == k) for k, name in enumerate(_names(clients))}
            return Partition(held, {name: tuple(np.unique(y[at]).tolist()) for name, at in held.items()})
    raise DeclarationError(
        f"1,000 draws left a client with fewer than least={least} rows; raise alpha={alpha} or lower clients={clients}."
    )


def feature_skew(sources: Any, clients: int, *, random_seed: int | np.random.Generator | None = None) -> Partition:
    """Give every client rows of one source, one of several data sets with the same labels.

    Sources take turns, so that each has about equally many clients; its rows are cut at random places.

    Parameters
    ----------
    sources
        Source of every row, (n,).
    clients
        Number of clients, at least as many as there are sources.
    random_seed
        Seed.

    Returns
    -------
    Partition
        Its ``kinds`` are the source of every client.

    Raises
    ------
    DataError
        If a source has fewer rows than clients, or sources are none: not one for every row, of several types, or
        numbers that are missing or infinite.
    DeclarationError
        If there are fewer clients than sources, or for a seed that is none.

    Examples
    --------
    >>> parts = feature_skew(["mnist"] * 60 + ["usps"] * 40, clients=4, random_seed=1)
    >>> [kinds for kinds in parts.kinds.values()]
    [('mnist',), ('usps',), ('mnist',), ('usps',)]

    Notes
    -----
    *When this fails.* Sources often differ in the shares of their labels too; `table` shows it. Then clients differ in
    more than their inputs, and what is due to which is not told apart.
    """
    where = require_column("sources", sources)
    known = np.unique(where).tolist()
    _whole(clients=clients)
    if clients < len(known):
        raise DeclarationError(f"{clients} clients cannot hold {len(known)} sources; raise clients=.")
    kinds = [(known[k % len(known)],) for k in range(clients)]
    return _sliced([kinds], [where], "independent", _rng(random_seed))


def _rng(random_seed: Any) -> np.random.Generator:
    try:
        return np.random.default_rng(random_seed)
    except (TypeError, ValueError) as error:
        raise DeclarationError(
            f"random_seed={shown(random_seed)} must be a non-negative int, a Generator or None."
        ) from error


def require_column(name: str, values: Any) -> NDArray[Any]:
    """One value for every row, all of one type, and numbers finite."""
    found = np.asarray(values)
    if found.ndim != 1 or not len(found):
        raise DataError(f"{name} have shape {found.shape}; pass one for every row.")
    if found.dtype.kind == "O" and len({type(value) for value in found.tolist()}) > 1:
        raise DataError(f"{name} are of several types, {found.tolist()[:3]} ...; pass numbers, or strings.")
    if found.dtype.kind == "f" and not np.all(np.isfinite(found)):
        raise DataError(f"{name} hold missing or infinite values; drop these rows.")
    return found


def _whole(**numbers: Any) -> None:
    for name, value in numbers.items():
        whole(name, value)


def _names(clients: int) -> list[str]:
    return [f"client {k}" for k in range(clients)]


def _kinds_of(known: Sequence[Any], clients: int, each: int, rng: np.random.Generator) -> list[tuple[Any, ...]]:
    """Draw kinds for every client from a pile that is refilled, none twice."""
    pile: list[Any] = []
    found = []
    for _ in range(clients):
        own: list[Any] = []
        while len(own) < each:
            if not any(kind not in own for kind in pile):
                pile = pile + [known[i] for i in rng.permutation(len(known))]
            own.append(pile.pop(next(i for i, kind in enumerate(pile) if kind not in own)))
        found.append(tuple(own))
    return found


def _sliced(
    drawn: Sequence[Sequence[tuple[Any, ...]]], columns: Sequence[NDArray[Any]], cuts: str, rng: np.random.Generator
) -> Partition:
    """Slice the rows of every kind among the clients that drew it."""
    if cuts not in ("same", "independent"):
        raise DeclarationError(f'cuts={cuts!r} must be "same" or "independent".')
    names = _names(len(drawn[0]))
    held: dict[str, list[Rows]] = {name: [] for name in names}
    known_cuts: dict[int, NDArray[np.float64]] = {}
    for kinds, column in zip(drawn, columns, strict=True):
        for kind in dict.fromkeys(kind for own in kinds for kind in own):
            owners = [name for name, own in zip(names, kinds, strict=True) if kind in own]
            places = rng.permutation(np.flatnonzero(column == kind))
            if len(places) < len(owners):
                raise DataError(f"{len(places)} rows of {kind!r} for {len(owners)} clients; lower clients=.")
            parts = len(owners)
            if cuts == "independent" or parts not in known_cuts:
                # M − 1 of N − 1 places, without replacement, as fractions of N.
                chosen = np.sort(rng.choice(len(places) - 1, parts - 1, replace=False)) + 1
                known_cuts[parts] = chosen / len(places)
            ends = _places_of(known_cuts[parts], len(places))
            for owner, part in zip(owners, np.split(places, ends), strict=True):
                held[owner].append(part)
    rows = {name: np.sort(np.concatenate(parts)).astype(np.int64) for name, parts in held.items()}
    return Partition(rows, {name: tuple(kind for own in drawn for kind in own[k]) for k, name in enumerate(names)})


def _places_of(fractions: NDArray[np.float64], rows: int) -> Rows:
    """Cut points of N rows at these fractions, none of them equal, so that no slice is empty."""
    ends = np.round(fractions * rows).astype(np.int64)
    for k in range(len(ends)):  # push up what collides, then down what ran over
        ends[k] = max(ends[k], 1 if k == 0 else ends[k - 1] + 1)
    for k in reversed(range(len(ends))):
        ends[k] = min(ends[k], rows - (len(ends) - k))
    return ends
