"""Whether θ has other modes given φ than the one that all integrals go about: searched for from many starts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from fedppl.contracts import ClientView
from fedppl.local import _marginal
from fedppl.numerics import pairs
from fedppl.numerics.importance import stream_of
from fedppl.numerics.pairs import Densities, Places
from fedppl.types import Array, LocalFailure

_FAR = (4.0, 12.0, 40.0, 120.0, 400.0, 1200.0)  # sds from the mode, in a direction and against it
_FLIPPED, _EXCHANGED = 16, 12  # coordinates whose sign is turned one at a time, and pairs that are exchanged, at most
_TURNED = 3  # variables whose signs are turned together, in all ways
_REACH = 5.0  # sds, by the curvature at either mode, within which a quadrature about one sees the other
_ROUGH = 1e-6  # Newton decrement, log units, at which searches for other modes end
_NEGLIGIBLE = np.log(1e-3)  # of the mass about the first mode


def require_one_mode(client: ClientView, points: Array, center: Array) -> None:
    """Refuse a client whose θ has mass about another mode, at the center or at a point near it.

    Raises `LocalFailure` where another mode is found. It names variables, and no number of the client's.
    """
    begin, who = client.view(_marginal.start)[None], np.zeros(1, dtype=np.int64)
    for reason in several_modes(client.view(_marginal.densities), who, [client], begin, points, center).values():
        raise LocalFailure(reason)


def several_modes(
    of: Densities, places: Places, clients: Sequence[ClientView], starts: Array, points: Array, center: Array
) -> dict[str, str]:
    """Clients (C,), in these places of those side by side, whose θ has mass about another mode, and what to say."""
    told: dict[str, str] = {}
    rows, begin = np.arange(len(clients), dtype=np.int64), starts.copy()
    for point in (center, _another(points, center)):
        first = pairs.modes(of, np.broadcast_to(point, (len(rows), len(point))), begin[rows], places[rows])
        # Of who has no mode, whoever integrates about it says so.
        values, kept = pairs.of_modes(first), np.flatnonzero(first.arrived)
        rows, values, modes, roots = rows[kept], values[kept], first.theta[kept], first.root[kept]
        begin[rows] = modes
        others = [_starts(clients[int(k)], mode, root) for k, mode, root in zip(rows, modes, roots, strict=True)]
        if not others:
            break
        whose = np.repeat(np.arange(len(rows)), [len(one) for one in others])
        at = np.broadcast_to(point, (len(whose), len(point)))
        found = pairs.modes(of, at, np.concatenate(others), places[rows[whose]], _ROUGH)
        away = found.theta - modes[whose]
        with np.errstate(invalid="ignore"):
            by_first, by_other = (np.einsum("nji,nj->ni", root, away) for root in (roots[whose], found.root))
            far = np.maximum(np.linalg.norm(by_first, axis=1), np.linalg.norm(by_other, axis=1)) > _REACH
            matters = far & (pairs.of_modes(found) > values[whose] + _NEGLIGIBLE)
        for n in np.flatnonzero(matters)[::-1]:
            client = clients[int(rows[whose[n]])]
            told[client.client_id] = _several(client, np.abs(by_first[n]), point)
        rows = np.array([k for k in rows if clients[int(k)].client_id not in told], dtype=np.int64)
    return told


def _another(points: Array, center: Array) -> Array:
    """Of the half of the points that is nearest to the center, the farthest."""
    scale = np.median(np.abs(points - center), axis=0)
    far = np.linalg.norm((points - center) / np.where(scale > 0, scale, 1.0), axis=1)
    return np.array(points[np.argsort(far)[len(far) // 2]])


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
