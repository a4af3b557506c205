"""Whether what a file holds can be a fit: types and shapes first, then that what reads it gets numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedppl.contracts import Point, Posterior, Sampler
from fedppl.gaussian import Gaussian
from fedppl.numerics.streams import stream
from fedppl.results.arrival import Ended, unarrived
from fedppl.results.records import Record, rounds_dataset
from fedppl.types import DataError, Status, Variable

_CONTENT: dict[str, type | tuple[type, ...]] = {
    "algorithm": str,
    "settings": dict,
    "agreement": object,
    "written": dict,
    "state": object,
    "layout": list,
    "fingerprint": str,
    "density": tuple,
    "clients": tuple,
    "records": list,
    "status": Status,
    "message": str,
    "seed": int,
    "seconds": (float, int),
    "told": dict,
    "points": np.ndarray,
    "values": dict,
    "dims": dict,
    "coords": dict,
    "personal": dict,
    "withheld": tuple,
    "drawn": list,
    "groups": dict,
}


def content_of(content: Any) -> dict[str, Any]:
    """What a file holds, where all of it is there and of its type."""
    _require(type(content) is dict and set(content) == set(_CONTENT), "it holds something else")
    for name, kind in _CONTENT.items():
        _require(isinstance(content[name], kind), f"{name!r} is of type {type(content[name]).__name__}")
    clients, layout = content["clients"], content["layout"]
    _texts("clients", clients)
    _texts("settings", (*content["settings"], *content["settings"].values()))
    _texts("written", (*content["written"], *content["written"].values()))
    _texts("groups", (*content["groups"], *content["groups"].values()))
    _require(len(set(clients)) == len(clients) > 0, "its clients are none, or not distinct")
    for name in ("withheld", "drawn", "personal", "told"):
        _require(set(content[name]) <= set(clients), f"{name!r} names clients that are none")
    _require(0 <= content["seed"], "its seed is negative")
    _require(all(type(one) is Record for one in content["records"]), "its records are none")
    _require(len(layout) == 3 and type(layout[0]) is tuple and type(layout[2]) is bool, "its layout is none")
    size = sum(_size(variable) for variable in layout[0])
    prior, points = layout[1], content["points"]
    _require(type(prior) is Gaussian and _finite(prior, size), f"its prior is none of {size} coordinates")
    _require(points.ndim == 2 and points.shape[1] == size, f"its points have not {size} coordinates")
    for name, values in content["values"].items():
        right = isinstance(values, np.ndarray) and values.ndim >= 1 and len(values) == len(points)
        _require(right, f"the values of {name!r} are none of its points")
    found: dict[str, Any] = content
    return found


def require_sound(fit: Ended) -> None:
    """Refuse a state that is not of the algorithm, or from which no numbers come.

    Raises
    ------
    DataError
        With what is wrong.
    """
    started = fit.algorithm.init(fit.layout, fit.client_ids, stream((fit.seed, 0, 0)))
    if type(started) is not type(fit.state):
        raise DataError(
            f"its state is {type(fit.state).__name__}, and {fit.algorithm.name} has {type(started).__name__}"
        )
    result, size = fit.algorithm.result, fit.layout.size
    try:
        arrived = not unarrived(fit)
        shared = result.shared if arrived or isinstance(result.shared, Posterior) else None
        if isinstance(shared, Posterior):  # one that was broken off has finite numbers too
            _require(_finite(shared.gaussian(fit.state), size), "its posterior has missing or infinite numbers")
        elif isinstance(shared, Point):
            found = np.asarray(shared.estimate(fit.state), dtype=float)
            _require(found.shape == (size,) and np.all(np.isfinite(found)), "its estimate is not all finite")
        elif isinstance(shared, Sampler):
            found = np.asarray(shared.draw(fit.state, 1, stream((fit.seed, 1))), dtype=float)
            _require(found.shape == (1, size) and np.all(np.isfinite(found)), "its draws are not all finite")
        if arrived:
            _ = result.final_message(fit.state, fit.client_ids[0])
        _ = result.details(fit.state), rounds_dataset(fit.records, fit.client_ids)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"its state cannot be read: {type(error).__name__}: {error!s:.200}") from error


def _size(variable: Any) -> int:
    """Number of coordinates of a variable, by whole numbers that cannot overflow."""
    _require(type(variable) is Variable and type(variable.name) is str, "a variable is none")
    shape, dims = variable.shape, variable.dims
    _require(type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape), "the shape of a variable is none")
    _require(dims is None or type(dims) is tuple, "the dims of a variable are none")
    _require(type(variable.transform) is str and type(variable.binary) is bool, "a variable is none")
    return math.prod(shape)


def _finite(found: Gaussian, size: int) -> bool:
    """Whether a Gaussian has finite natural parameters of so many coordinates."""
    linear, precision = (np.asarray(part) for part in found)
    right = linear.shape == (size,) and precision.shape in ((size, size), (size,))
    return bool(right and np.all(np.isfinite(linear)) and np.all(np.isfinite(precision)))


def _texts(name: str, values: Any) -> None:
    _require(all(type(one) is str for one in values), f"{name!r} are no texts")


def _require(holds: Any, rule: str) -> None:
    if not holds:
        raise DataError(rule)
