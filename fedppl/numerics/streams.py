"""Random streams that depend on names and numbers alone, and not on who asks first."""

from __future__ import annotations

import numpy as np


def stream(seed: tuple[int, ...]) -> np.random.Generator:
    """Random stream of a (seed, round, client) triple."""
    return np.random.default_rng(np.random.SeedSequence(seed))
