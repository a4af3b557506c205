"""Whether a network's output for a row depends on the rows beside it, tried on a few rows of a client."""

from __future__ import annotations

import numpy as np
import torch

from fedppl.nn.devices import CPU, host
from fedppl.nn.functional import call, parts_of
from fedppl.nn.unit import NetworkUnit
from fedppl.types import Array, DeclarationError

_LOOKED_AT = 100  # rows that are read
_MOST = 16  # of them, all different, that the network is tried on
_FEWEST = 3  # where rows are wide
_NEAR = 1e-3  # size of the steps away from the one row that a client has
_FAR = 10.0  # factor that takes rows out of what the client has


def require_rows_alone(unit: NetworkUnit, client_id: str) -> bool:
    """Refuse a network that has another output for a row where other rows stand beside it.

    Up to 16 different rows, spread over all that the client has, the farthest from 0 among them, are computed together
    and one by one. On the CPU real inputs are tried ten times as large too, and where all rows are equal a few others
    close by: numbers that a client does not have could end the process of another device.

    Not seen is what shows at none of these: a dependence on more rows than those, on rows of another size or type than
    the client's, on pairs of rows that are not among them, or at weights far from the network's own.

    Returns
    -------
    bool
        Whether rows of the client's own were compared; where it has no two different ones, another client may.

    Raises
    ------
    DeclarationError
        Where outputs differ.
    """
    X = _spread(unit)
    w = unit.held + 0.1 * np.random.default_rng(0).normal(size=unit.size)
    can_make_up = len(X) > 0 and X.dtype.kind == "f" and unit.place(torch.float64) == CPU
    if len(X) > 1:
        is_same = _agree(unit, w, X) and not (can_make_up and _differ(unit, w, _FAR * X))
    else:
        is_same = not (can_make_up and _differ(unit, w, _near(X[0])))
    if not is_same:
        raise DeclarationError(
            f"client {client_id!r}: the network's output for a row depends on the other rows, and batches, "
            "curvatures and predictions take rows one by one. Use layers that normalise or attend within a row "
            "(torch.nn.LayerNorm, torch.nn.GroupNorm, batch norm with running moments after net.eval())."
        )
    return len(X) > 1


def _spread(unit: NetworkUnit) -> Array:
    """Different rows from all parts of X, the one farthest from 0 first."""
    X = unit.X
    if not len(X):
        return X
    flat = X.reshape(len(X), -1)
    ends = [part(axis=1, initial=0).astype(float) for part in (flat.max, flat.min)]
    far = int(np.argmax(np.maximum(ends[0], -ends[1])))
    some: Array = X[[far, *np.linspace(0, len(X) - 1, min(len(X), _LOOKED_AT)).astype(int)]]
    unlike = np.sort(np.unique(some, axis=0, return_index=True)[1])
    most = max(_FEWEST, min(_MOST, parts_of(unit.net, X.shape)[0].stop))
    found: Array = some[unlike[np.linspace(0, len(unlike) - 1, min(len(unlike), most)).astype(int)]]
    return found


def _near(row: Array) -> Array:
    """A row, and others that are a little larger."""
    steps = np.random.default_rng(0).uniform(size=(_MOST, *row.shape))
    steps[0] = 0.0
    return np.asarray(row + _NEAR * (1.0 + np.abs(row)) * steps, dtype=row.dtype)


def _output(unit: NetworkUnit, w: Array, X: Array) -> Array:
    """What the network gives for these rows in one call, however wide they are."""
    with torch.no_grad():
        return host(call(unit.net, unit.state(w, torch.float64), unit.tensor(X, torch.float64)))


def _agree(unit: NetworkUnit, w: Array, X: Array) -> bool:
    """Whether rows together have the outputs that they have alone."""
    together = _output(unit, w, X)
    return _same(unit, w, X, together, 1e-8)


def _differ(unit: NetworkUnit, w: Array, X: Array) -> bool:
    """The contrary for rows that are made up: the network need not take them, nor need its outputs be finite."""
    try:
        together = _output(unit, w, X)
    except Exception:  # as codes that an embedding does not have
        return False
    if not np.all(np.isfinite(together)):
        return False
    return not _same(unit, w, X, together, 1e-8 * max(1.0, float(np.max(np.abs(together), initial=0.0))))


def _same(unit: NetworkUnit, w: Array, X: Array, together: Array, rounding: float) -> bool:
    try:
        alone = np.concatenate([_output(unit, w, row[None]) for row in X])
    except Exception:  # as batch norm without running moments on one row
        return False
    return together.shape == alone.shape and np.allclose(together, alone, 1e-8, rounding, equal_nan=True)
