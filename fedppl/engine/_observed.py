"""What a client's observed variables hold: rows, and outcomes of each kind. A thin edge to PyMC."""

from __future__ import annotations

from typing import Any

import numpy as np
from pytensor.graph.traversal import ancestors

from fedppl.engine.policy import Holdings
from fedppl.model.interpreted import PYTHON_MODE


def holdings(client: Any) -> Holdings:
    """Count rows and events in the client's own model, once.

    Every observed variable is read as the model has it, whatever it was computed from. A potential that reads data
    counts as the shortest array that it reads: what of it is observed cannot be told.
    """
    found: Holdings = client.view(_count)
    return found


def _count(client: Any) -> Holdings:
    model = client.pymc_model()
    lengths, events = [], []
    for rv in model.observed_RVs:
        value = _value(model.rvs_to_values[rv])
        lengths.append(len(value) if value.ndim else 1)
        found = _events(rv, value)
        if found is not None:
            events.append(found)
    data = set(model.data_vars)
    for potential in model.potentials:
        read = [np.shape(variable.get_value()) for variable in ancestors([potential]) if variable in data]
        lengths += [shape[0] for shape in read if shape] or [1] * bool(read)
    return Holdings(min(lengths, default=0), min(events) if events else None)


_EVER = 2.0**99  # times beyond are of what was never seen


def _value(variable: Any) -> Any:
    if hasattr(variable, "get_value"):
        return np.asarray(variable.get_value())
    return np.asarray(variable.data if hasattr(variable, "data") else variable.eval(mode=PYTHON_MODE))


def _events(rv: Any, value: Any) -> int | None:
    """Outcomes of the rarer kind; None where outcomes are of no kinds."""
    op = rv.owner.op
    name = str(getattr(op, "name", None) or getattr(op, "_print_name", ("",))[0])
    weighted, name = name.startswith("weighted_"), name.removeprefix("weighted_")
    if name == "right_censored":  # a time is an event where it is before its limit
        return int(np.sum(value < _value(op.dist_params(rv.owner)[-2 if weighted else -1])))
    if name == "seen_between":  # an event was where the time is known to be before another
        return int(np.sum(_value(op.dist_params(rv.owner)[-2 if weighted else -1]) < _EVER))
    if value.dtype.kind not in "biu":
        return None
    if name in ("binomial", "beta_binomial"):
        trials = np.broadcast_to(_value(op.dist_params(rv.owner)[0]), value.shape)
        return int(min(np.sum(value), np.sum(trials - value)))
    if np.all((value == 0) | (value == 1)):
        return int(min(np.sum(value), value.size - np.sum(value)))
    return int(np.unique(value, return_counts=True)[1].min()) if name in ("categorical", "ordered_logistic") else None
