"""What a declared model says of its shared variables, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pymc.printing import str_for_dist

from fedppl.model.graph import Parts
from fedppl.model.interpreted import PYTHON_MODE


def describe(parts: Parts) -> pd.DataFrame:
    """A row for each shared variable: its prior as declared, and the labels or the shape of its entries."""
    rows = {rv.name: (_prior(rv), _entries(parts.model, rv)) for rv in parts.shared}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["prior", "entries"])


def _prior(rv: Any) -> str:
    return str(str_for_dist(rv, formatting="plain", include_params=True)).partition("~")[2].strip()


def _entries(model: Any, rv: Any) -> Any:
    dims = model.named_vars_to_dims.get(rv.name)
    labels = [model.coords.get(dim) for dim in dims or ()]
    if labels and all(one is not None for one in labels):
        grid = np.stack(np.meshgrid(*(np.asarray(one).astype(str) for one in labels), indexing="ij"), axis=-1)
        return tuple(", ".join(row) for row in grid.reshape(-1, len(labels)).tolist())
    shape = tuple(int(n) for n in rv.shape.eval(mode=PYTHON_MODE))
    return shape or None
