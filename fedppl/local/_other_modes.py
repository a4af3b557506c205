"""Whether θ has other modes given φ than the one that all integrals go about: searched for from many starts."""

from __future__ import annotations

import itertools

import numpy as np

from fedppl.contracts import ClientView
from fedppl.local import _marginal
from fedppl.numerics.importance import stream_of
from fedppl.numerics.marginal import modes_from
from fedppl.types import Array, LocalFailure

_FAR = (4.0, 12.0, 40.0, 120.0, 400.0, 1200.0)  # sds from the mode, in a direction and against it
_FLIPPED, _EXCHANGED = 16, 12  # coordinates whose sign is turned one at a time, and pairs that are exchanged, at most
_TURNED = 3  # variables whose signs are turned together, in all ways
_REACH = 5.0  # sds, by the curvature at either mode, within which a quadrature about one sees the other
_NEGLIGIBLE = np.log(1e-3)  # of the mass about the first mode


def require_one_mode(client: ClientView, points: Array, center: Array) -> None:
    """Refuse a client whose θ has mass about another mode, at the center or at a point near it.

    Raises
    ------
    LocalFailure
        Where another mode is found. It names variables, and no number of the client's.
    """
    begin = client.view(_marginal._start)[None]
    for point in (center, _another(points, center)):
        (value,), (mode,), (factor,) = _search(client, point, begin)
        if not np.isfinite(value):
            return  # who integrates about a mode says that there is none
        for one in zip(*_search(client, point, _starts(client, mode, factor)), strict=True):
            other_value, other, other_factor = one
            if not other_value > value + _NEGLIGIBLE:
                continue
            away = np.abs(factor.T @ (other - mode))
            if max(np.linalg.norm(away), np.linalg.norm(other_factor.T @ (other - mode))) > _REACH:
                raise LocalFailure(_several(client, away, point))
        begin = mode[None]


def _another(points: Array, center: Array) -> Array:
    """Of the half of the points that is nearest to the center, the farthest."""
    scale = np.median(np.abs(points - center), axis=0)
    far = np.linalg.norm((points - center) / np.where(scale > 0, scale, 1.0), axis=1)
    return np.array(points[np.argsort(far)[len(far) // 2]])


def _search(client: ClientView, point: Array, starts: Array) -> tuple[Array, Array, Array]:
    """Laplace's log f_k about the mode that is found from each start (S, d), these modes, the factors of curvatures."""
    count, d = starts.shape
    values, modes, factors = np.zeros(count), np.zeros((count, d)), np.zeros((count, d, d))
    begins = np.ascontiguousarray(starts)
    modes_from(client.kernel, np.ascontiguousarray(point), begins, client.packed, values, modes, factors)
    return values, modes, factors


def _starts(client: ClientView, mode: Array, factor: Array) -> Array:
    """Where likelihoods that do not tell signs or order have their other modes, and points far off in any direction."""
    d = len(mode)
    starts = [-mode, np.zeros(d), client.initial]
    if d > 1:
        starts += list(np.where(np.eye(d, dtype=bool), -mode, mode)[:_FLIPPED])
    of = [label.partition("[")[0] for label in client.local_labels]
    names = list(dict.fromkeys(of))[:_TURNED]
    for signs in itertools.product((1.0, -1.0), repeat=len(names)):
        sign = dict(zip(names, signs, strict=True))
        starts.append(mode * np.array([sign.get(name, 1.0) for name in of]))
    pairs = [(i, j) for i in range(d) for j in range(i + 1, d) if of[i] == of[j]][:_EXCHANGED]
    for i, j in pairs:
        exchanged = mode.copy()
        exchanged[[i, j]] = mode[[j, i]]
        starts.append(exchanged)
    z = np.random.default_rng(stream_of(client.client_id)).normal(size=(len(_FAR), d))
    z *= np.array(_FAR)[:, None] / np.linalg.norm(z, axis=1, keepdims=True)
    moved = np.linalg.solve(factor.T, np.concatenate([z, -z]).T).T
    found = np.stack([mode, *starts, *(mode + moved)])
    _, first = np.unique(found, axis=0, return_index=True)
    return found[np.sort(first[first > 0])]  # of the mode itself it is known


def _several(client: ClientView, away: Array, point: Array) -> str:
    name = client.local_labels[int(np.argmax(away))]
    where = np.array2string(point, precision=3)
    return (
        f"its local variables have more than one mode at φ = {where}, {name} apart by the most, and only "
        "one is integrated over. Declare them so that one remains: with a sign (pm.HalfNormal) or an "
        "order, where another sign or order gives the same likelihood; or a prior that decides between them"
    )
