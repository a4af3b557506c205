"""Shapes of outcomes and of their distributions, for errors: which of them do not go together at a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pytensor.graph.replace import clone_replace

from fedppl.model import graph as _graph
from fedppl.model import interpreted


def apart(parts: _graph.Parts, arrays: Mapping[str, Any]) -> str:
    """Name an observed variable whose values have another shape than its distribution has; "" where none shows.

    Parameters
    ----------
    parts
        The model; lengths of dims are those that it was built with.
    arrays
        The client's data.
    """
    for rv in parts.model.observed_RVs:
        if rv.owner is None or getattr(rv.owner.op, "ndim_supp", None) != 0:
            continue
        parameters = rv.owner.op.dist_params(rv.owner)
        behind = rv.owner.op.ndims_params
        try:
            replace, inputs = _graph._inputs_for(parts)
            if len(inputs) != len(parts.data):
                continue
            shown = [parts.model.rvs_to_values[rv].shape, *(one.shape for one in parameters)]
            function = interpreted.python_function(inputs, clone_replace(shown, replace, rebuild_strict=False))
            given = (np.asarray(arrays[v.name]).astype(v.type.dtype) for v in parts.data)
            value, *found = (tuple(int(n) for n in one) for one in function(*given))
            batches = [one[: len(one) - inner] for one, inner in zip(found, behind, strict=True)]
            wanted = np.broadcast_shapes(*batches)
        except Exception:  # what says more about an error is no error itself
            continue
        while wanted[:1] == (1,) and value[:1] != (1,) and all(one[:1] == (1,) for one in found):  # axes that PyMC adds
            wanted, found = wanted[1:], [one[1:] for one in found]
        if wanted != value:
            widest = max(found, key=len)
            has = f"{wanted}" if widest == wanted else f"{wanted} (of a parameter of shape {widest})"
            return f"{rv.name!r} is observed with shape {value}, and its distribution has outcomes of shape {has}"
    return ""
