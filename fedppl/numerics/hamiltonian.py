"""Hamiltonian trajectories of many points at once, each of a density of its own that is near a standard normal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedppl.types import Array, Rng

_TRAJECTORIES, _STEPS = 8, 15  # long ones: in a funnel short ones go up and down by chance alone
_SHORTEST, _LONGEST = 0.2, 0.6  # steps in one dimension: a whole turn on average


def trajectories(density: Callable[[Array], tuple[Array, Array]], z: Array, rng: Rng) -> Array:
    """Move points z (N, d) so that each is of its density; `density` gives log densities (N,) and slopes (N, d).

    Steps of random length fit places that are narrower than the middle. A point without a density is not gone to.
    """
    d = z.shape[1]
    value, slope = density(z)
    for _ in range(_TRAJECTORIES):
        step = rng.uniform(_SHORTEST, _LONGEST, size=(len(z), 1)) / d**0.25
        momentum = rng.normal(size=z.shape)
        there, there_value, there_slope, speed = z, value, slope, momentum
        with np.errstate(all="ignore"):  # what has no density is refused below
            for _ in range(_STEPS):
                speed = speed + 0.5 * step * there_slope
                there = there + step * speed
                there_value, there_slope = density(there)
                speed = speed + 0.5 * step * there_slope
            gained = there_value - value + 0.5 * np.sum(momentum**2 - speed**2, axis=1)
            is_there = np.isfinite(gained) & np.all(np.isfinite(there_slope), axis=1)
            is_there &= np.log(rng.uniform(size=len(z))) < gained
        value = np.where(is_there, there_value, value)
        z, slope = (np.where(is_there[:, None], *both) for both in ((there, z), (there_slope, slope)))
    return z
