"""What partitions have in common: labels drawn from a pile, and rows cut into slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.settings import one_of, shown, whole
from fedppl.types import DataError, DeclarationError

Rows = NDArray[np.int64]


class Partition(NamedTuple):
    """Who holds which rows, and what kinds of rows a client was meant to hold."""

    rows: Mapping[str, Rows]  # client id to positions, in rising order
    kinds: Mapping[str, tuple[Any, ...]]  # labels, subclasses or sources of each client


def generator(random_seed: Any) -> np.random.Generator:
    """A generator, or an error that names the seed."""
    try:
        return np.random.default_rng(random_seed)
    except (TypeError, ValueError) as error:
        raise DeclarationError(
            f"random_seed={shown(random_seed)} must be a non-negative int, a Generator or None."
        ) from error


def require_column(name: str, values: Any) -> NDArray[Any]:
    """One value for every row, numbers or strings, all of one type, and none of them missing."""
    if np.ma.is_masked(values):
        raise DataError(f"{name} hold masked values; drop these rows.")
    try:
        found = np.asarray(values)
    except ValueError as error:  # rows of several lengths
        raise DataError(f"{name} are no column; pass one value for every row.") from error
    if found.ndim != 1 or not len(found):
        raise DataError(f"{name} have shape {found.shape}; pass one for every row.")
    # NumPy makes strings of all values of a list that has one, of NaN too.
    given = list(values) if found.dtype.kind in "US" and isinstance(values, list | tuple) else found.tolist()
    if found.dtype.kind in "OUS" and len({_kind(value) for value in given}) > 1:
        raise DataError(f"{name} are of several types, {shown(given[:3])} ...; pass numbers, or strings.")
    if found.dtype.kind not in "OUSbiuf" or not isinstance(given[0], str | bytes | int | float):
        raise DataError(f"{name} are of type {type(found[0]).__name__}; pass numbers, or strings.")
    numbers = found.astype(float) if found.dtype.kind == "O" and isinstance(given[0], float) else found
    if numbers.dtype.kind == "f" and not np.all(np.isfinite(numbers)):
        raise DataError(f"{name} hold missing or infinite values; drop these rows.")
    return found


def _kind(value: Any) -> type:
    """The type of a value; strings of NumPy are strings."""
    return next((kind for kind in (str, bytes) if isinstance(value, kind)), type(value))


def require_whole(**numbers: Any) -> None:
    """Whole numbers, each by its name."""
    for name, value in numbers.items():
        whole(name, value)


def names_of(clients: int) -> list[str]:
    """Ids of so many clients."""
    return [f"client {k}" for k in range(clients)]


def kinds_of(known: Sequence[Any], clients: int, each: int, rng: np.random.Generator) -> list[tuple[Any, ...]]:
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


def sliced(
    drawn: Sequence[Sequence[tuple[Any, ...]]], columns: Sequence[NDArray[Any]], cuts: str, rng: np.random.Generator
) -> Partition:
    """Slice the rows of every kind among the clients that drew it."""
    one_of("cuts", cuts, ("same", "independent", "equal"))
    names = names_of(len(drawn[0]))
    held: dict[str, list[Rows]] = {name: [] for name in names}
    known_cuts: dict[int, NDArray[np.float64]] = {}
    for kinds, column in zip(drawn, columns, strict=True):
        for kind in dict.fromkeys(kind for own in kinds for kind in own):
            owners = [name for name, own in zip(names, kinds, strict=True) if kind in own]
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
