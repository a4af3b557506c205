"""What a declared model says of its shared variables, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pymc.printing import str_for_dist
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors

from fedppl.model.graph import Parts
from fedppl.model.interpreted import PYTHON_MODE


def describe(parts: Parts) -> pd.DataFrame:
    """A row for each shared variable: its prior as declared, and the labels or the shape of its entries."""
    rows = {rv.name: (_prior(rv), _entries(parts.model, rv)) for rv in parts.shared}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["prior", "entries"])


def _prior(rv: Any) -> str:
    text = str(str_for_dist(rv, formatting="plain", include_params=True)).partition("~")[2].strip()
    name, _, inside = text.partition("(")
    told, parameters = _apart(inside.removesuffix(")")), rv.owner.op.dist_params(rv.owner)
    if len(told) != len(parameters):
        return text
    shown = [_numbers(p) if _is_constant(p) else one for one, p in zip(told, parameters, strict=True)]
    return f"{name}({', '.join(shown)})"


def _apart(text: str) -> list[str]:
    """What stands between commas outside of all parentheses."""
    depth, parts = 0, [""]
    for sign in text:
        depth += (sign in "([<") - (sign in ")]>")
        parts = [*parts, ""] if sign == "," and depth == 0 else [*parts[:-1], parts[-1] + sign]
    return [part.strip() for part in parts]


def _is_constant(parameter: Any) -> bool:
    return all(isinstance(one, Constant) for one in ancestors([parameter]) if one.owner is None)


def _numbers(parameter: Any) -> str:
    """One number where all are equal; else all of them, or of many the first and last."""
    array = np.asarray(parameter.eval(mode=PYTHON_MODE))
    first = array.flat[0]
    if np.all(array == first):
        return f"{first:.4g}"
    told = np.array2string(array, precision=4, separator=", ", threshold=8, edgeitems=2)
    return " ".join(told.split())


def _entries(model: Any, rv: Any) -> Any:
    dims = model.named_vars_to_dims.get(rv.name)
    labels = [model.coords.get(dim) for dim in dims or ()]
    if labels and all(one is not None for one in labels):
        grid = np.stack(np.meshgrid(*(np.asarray(one).astype(str) for one in labels), indexing="ij"), axis=-1)
        return tuple(", ".join(row) for row in grid.reshape(-1, len(labels)).tolist())
    shape = tuple(int(n) for n in rv.shape.eval(mode=PYTHON_MODE))
    return shape or None
