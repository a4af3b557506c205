"""Divide rows among clients: by label, by subclass, by quantity, by Dirichlet shares, by source. Every row once."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.data.tables import Partition, generator, kinds_of, names_of, require_column, require_whole, sliced
from fedppl.types import DataError, DeclarationError


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
        label tends to have large slices of all. "independent": each label by itself. "equal": into slices of one size.
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
    y, rng = require_column("labels", labels), generator(random_seed)
    known = np.unique(y)
    require_whole(clients=clients, each=each)
    if each > len(known):
        raise DeclarationError(f"each={each} labels a client, and there are {len(known)}.")
    if clients * each < len(known):
        raise DeclarationError(f"{clients} clients of {each} labels cannot hold all {len(known)}; raise one of them.")
    return sliced([kinds_of(known.tolist(), clients, each, rng)], [y], cuts, rng)


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
    rng = generator(random_seed)
    require_whole(clients=clients)
    if len(upper) != len(lower):
        raise DataError(f"{len(upper)} classes and {len(lower)} subclasses; pass one of each for every row.")
    under = {kind: np.unique(lower[upper == kind]).tolist() for kind in np.unique(upper).tolist()}
    if sum(map(len, under.values())) > len(np.unique(lower)):
        raise DataError("a subclass stands under two classes; give subclasses names of their own.")
    most = max(map(len, under.values()))
    if clients < most:
        raise DeclarationError(f"{clients} clients cannot hold a class with {most} subclasses; raise clients=.")
    return sliced([kinds_of(below, clients, 1, rng) for below in under.values()], [lower] * len(under), cuts, rng)


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
    require_whole(rows=rows, clients=clients)
    everyone = [("all",)] * clients
    return sliced([everyone], [np.full(rows, "all")], "same", generator(random_seed))


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
    y, rng = require_column("labels", labels), generator(random_seed)
    require_whole(clients=clients, least=least)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 < alpha < np.inf:
        raise DeclarationError(f"alpha={alpha!r} must be positive and finite.")
    for _ in range(1000):
        owner = np.empty(len(y), dtype=np.int64)
        for label in np.unique(y):
            places = rng.permutation(np.flatnonzero(y == label))
            ends = np.round(np.cumsum(rng.dirichlet(np.full(clients, float(alpha)))) * len(places)).astype(np.int64)
            owner[places] = np.searchsorted(ends, np.arange(len(places)), side="right").clip(max=clients - 1)
        if np.bincount(owner, minlength=clients).min() >= least:
            held = {name: np.flatnonzero(owner == k) for k, name in enumerate(names_of(clients))}
            return Partition(held, {name: tuple(np.unique(y[at]).tolist()) for name, at in held.items()})
    raise DeclarationError(
        f"1,000 draws left a client with fewer than least={least} rows; raise alpha={alpha} or lower clients={clients}."
    )


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
    DataError
        If a source, or a label of it, has fewer rows than clients, or sources and labels are none: not one for every
        row, of several types, or numbers that are missing or infinite.
    DeclarationError
        If there are fewer clients than sources, too few to hold all labels of a source, or for a seed that is none.

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
    *When this fails.* Sources often differ in the shares of their labels too; `table` shows it. Then clients differ in
    more than their inputs, and what is due to which is not told apart.
    """
    where, rng = require_column("sources", sources), generator(random_seed)
    known = np.unique(where).tolist()
    require_whole(clients=clients)
    if clients < len(known):
        raise DeclarationError(f"{clients} clients cannot hold {len(known)} sources; raise clients=.")
    if (labels is None) != (each is None):
        raise DeclarationError(f"each={each!r} and labels= go together; pass both or none.")
    if labels is None or each is None:
        return sliced([[(known[k % len(known)],) for k in range(clients)]], [where], "independent", rng)
    y = require_column("labels", labels)
    if len(y) != len(where):
        raise DataError(f"{len(y)} labels for {len(where)} sources; pass one of each for every row.")
    require_whole(each=each)
    drawn: list[tuple[int, ...]] = [()] * clients  # numbers of pairs
    pairs: list[tuple[Any, Any]] = []
    numbers = np.empty(len(y), dtype=np.int64)
    for i, source in enumerate(known):
        own, members = np.unique(y[where == source]).tolist(), range(i, clients, len(known))
        if not each <= len(own) <= each * len(members):
            raise DeclarationError(
                f"{len(members)} clients with each={each} cannot hold all {len(own)} labels of {source!r}, none twice; "
                "change clients= or each=."
            )
        for number, label in enumerate(own, len(pairs)):
            numbers[(where == source) & (y == label)] = number
        held = kinds_of(range(len(pairs), len(pairs) + len(own)), len(members), each, rng)
        drawn = [held[k // len(known)] if k in members else kinds for k, kinds in enumerate(drawn)]
        pairs += [(source, label) for label in own]
    parts = sliced([drawn], [numbers], "independent", rng)
    return Partition(
        parts.rows, {name: tuple(pairs[number] for number in kinds) for name, kinds in parts.kinds.items()}
    )
