"""On how few rows' outcomes curvatures depend beyond what linear predictors have: a rule beside that on slopes.

A term like `b[0] * b[1]` in the mean of one row alone has a slope among those of all rows, and an entry of the Hessian
to itself, which is that row's outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.model.graph import values_read
from fedppl.model.row_scores import by_length, row_scores
from fedppl.numerics.concentration import by_column, largest_share
from fedppl.types import Array

_ASIDE = 1e-6  # prior sds: where a coordinate is 0 its slopes may be, and what depends on few rows does not show
ALONG = 6  # directions: slopes of a row cancel along few of them
_SHORT = 1e-4  # prior sds, for curvatures along these
_STEP = 1e-3  # prior sds
_NOTHING = 1e-6  # of the largest slope: differences have no more digits
_NO_BEND = 1e-8  # the same along one direction, of which a larger entry may have little
_MOST_DIRECTIONS = 30


class Probes(NamedTuple):
    """Where a client probes slopes, from a point that it is asked at."""

    sd: Array  # of the prior, (m,)
    aside: Array  # from the point, (m,)
    steps: Array  # from there, (ALONG, m)
    pair: Array  # directions in sds, (2, m)
    seed: int


def probes_of(client: Any) -> Probes:
    """Random directions that are the same at each point, and that nobody knows who has not the client's data.

    Who knew along which directions a rule looks could declare terms that do not bend along these.
    """
    raw = b"".join(np.asarray(value).tobytes() for value in client.inputs)
    seed = int.from_bytes(hashlib.sha256(raw).digest(), "big")
    sd = gaussian.standard_deviations(client.layout.prior)
    rows = np.random.default_rng(seed).normal(size=(1 + ALONG + 2, len(sd)))
    steps = sd * rows[1:-2] * (_SHORT / np.sqrt(max(len(sd), 1)))
    return Probes(sd, _ASIDE * sd * rows[0], steps, rows[-2:], seed)


def share_in_bends(client: Any, x: Array, paths: Array, few: int, enough: float) -> float:
    """The largest share that so few rows have of what outcomes change in curvatures, at x and along paths (m, m + d).

    What all outcomes at their largest change against all at their smallest. A linear predictor's curvature is a
    multiple of the square of its slopes, and is set apart; of that its size alone is looked at.
    """
    ends = _ends(client)
    if ends is None:
        return 0.0
    probes = client.view(probes_of)
    sd, m = probes.sd, len(probes.sd)

    def change(at: Array, along: Array) -> dict[int, Array]:
        low, high = (by_length(row_scores(client).along, at, along, inputs) for inputs in ends)
        changes = {length: high[length] - low[length] for length in low}
        # An outcome that another row cannot have, as more successes than trials, says nothing there.
        return {length: np.where(np.isfinite(found), found, 0.0) for length, found in changes.items()}

    def bend(slopes: dict[int, Array], along: Array, direction: Array) -> dict[int, Array]:
        # Of a linear predictor a difference to one side alone is a multiple of the slopes too.
        beside = change(x + (_STEP * direction * sd) @ paths, along)
        return {length: (beside[length] - found) / _STEP for length, found in slopes.items()}

    scaled = paths * sd[:, None]
    along = probes.pair[:1] @ scaled
    slopes = change(x, along)
    first = bend(slopes, along, probes.pair[1])
    if all(np.max(np.abs(first[n]), initial=0.0) <= _NO_BEND * np.max(np.abs(slopes[n]), initial=0.0) for n in slopes):
        return 0.0  # as where outcomes enter by products with linear predictors alone
    slopes = change(x, scaled)
    directions = np.eye(m)
    if m > _MOST_DIRECTIONS:
        directions = np.random.default_rng(probes.seed).normal(size=(_MOST_DIRECTIONS, m)) / np.sqrt(m)
    by_direction = [bend(slopes, scaled, direction) for direction in directions]
    share = 0.0
    for length, own in slopes.items():
        size = _NOTHING * np.max(np.abs(own), initial=0.0)
        bends = np.stack([changes[length].T for changes in by_direction])  # (directions, m, n)
        for columns, by_size in _columns(client, own.T, bends):
            columns *= np.abs(columns) > size
            share = max(share, by_column(columns, few) if by_size else largest_share(columns, few, enough))
    return share


def _columns(client: Any, slopes: Array, bends: Array) -> Iterator[tuple[Array, bool]]:
    """For each shared variable (n, columns) of what is left, and sizes of what is set apart."""
    place = 0
    for variable in client.layout.variables:
        here = slice(place, place + int(np.prod(variable.shape, dtype=int)))
        place = here.stop
        own, found = slopes[here], bends[:, here]
        if len(own) == 1:
            yield found[:, 0].T.copy(), False
            continue
        squares = np.maximum(np.sum(np.square(own), axis=0), 1e-300)
        times = np.einsum("kan,an->kn", found, own) / squares
        rest = found - times[:, None] * own
        yield rest.reshape(-1, rest.shape[-1]).T, False
        yield np.sqrt(np.abs(times) * np.sqrt(squares)).T, True


def _ends(client: Any) -> tuple[list[Any], list[Any]] | None:
    """A client's inputs with all outcomes at their smallest, and at their largest; None where none has a container."""
    template, values = client.template, client.template.parts.model.rvs_to_values
    rvs = template.parts.model.observed_RVs
    read = template.once("outcomes", lambda: values_read(values[rv] for rv in rvs))
    low, high = list(client.inputs), list(client.inputs)
    pairs = enumerate(zip(template.parts.data, client.inputs, strict=False))  # after the data come shapes
    outcomes = [(place, value) for place, (v, value) in pairs if v in read and np.ndim(value) and len(value)]
    for place, value in outcomes:
        low[place], high[place] = (np.zeros_like(value) + end(value, axis=0) for end in (np.min, np.max))
    return (low, high) if outcomes else None
