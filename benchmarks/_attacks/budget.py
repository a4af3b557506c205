"""A server that tells two data sets of one client apart by what `PrivateEP` releases."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.stats import beta

import fedppl
from fedppl import privacy
from fedppl.contracts import LocalInference, Moments
from fedppl.gaussian import Gaussian
from fedppl.types import Array, Layout, Variable

SHARED_BY = 5  # clients in the sum that is attacked
_LAYOUT = Layout((Variable("mu", (1,), "", None),), Gaussian(np.zeros(1), np.eye(1)), True, "")


def releases_of(far: float, noise_multiplier: float, normals: Callable[[int], Array], shared_by: int = 1) -> Array:
    """Releases of a client whose site lies far off, so that the clip decides alone; by the client's own code.

    The first number is the one that the two worst neighbours, far off on either side, differ in. With noise `shared_by`
    several clients it is that of the sum over so many, of which the others' data are known.
    """
    quiet, loud = (
        [_released(place, noise_multiplier, one, shared_by) for place in (far, *[0.0] * (shared_by - 1))]
        for one in (np.zeros, np.ones)
    )
    noise = sum(((big - small)[:1] * normals(1) for small, big in zip(quiet, loud, strict=True)), np.zeros(1))
    return np.asarray(sum(quiet)[0] + noise[..., 0])


def _released(far: float, noise_multiplier: float, normals: Callable[[int], Array], shared_by: int) -> Array:
    """One reply of a client."""

    def tilted(target: Any, rng: np.random.Generator) -> Moments:
        return Moments(np.array([far]), np.eye(1), np.eye(1), np.zeros(1), {})

    algorithm = fedppl.PrivateEP(
        clip=1.0,
        noise_multiplier=noise_multiplier,
        releases=1,
        shared_by=shared_by,
        local=LocalInference("fixed", lambda client: None, None, tilted, lambda *_: None),  # type: ignore[arg-type]
        _normals=normals,
    )
    client: Any = SimpleNamespace(client_id="one", layout=_LAYOUT)
    state = algorithm.init(_LAYOUT, ("one",), np.random.default_rng(0))
    message = algorithm.broadcast(state, "one")
    _, reply, _ = algorithm.update_client(client, None, message, np.random.default_rng(0))
    return np.asarray(reply["site"])


def lower_bound(one: Array, other: Array, delta: float, miss: float = 0.0005) -> float:
    """ε at least, but with probability 2 `miss`, that explains how well a threshold tells two samples apart.

    The threshold is chosen on one half; errors are counted on the other (Clopper and Pearson).
    """

    def bound(threshold: float, half: slice) -> float:
        hits, misses, n = int((one[half] > threshold).sum()), int((other[half] > threshold).sum()), len(one[half])
        low, high = beta.ppf(miss, hits, n - hits + 1), beta.ppf(1 - miss, misses + 1, n - misses)
        return math.log(max(low - delta, 1e-12) / high)

    thresholds = np.quantile(other, 1 - np.geomspace(0.5, 1e-4, 80))
    first, second = slice(len(one) // 2), slice(len(one) // 2, None)
    return bound(max(thresholds, key=lambda t: bound(t, first)), second)


def run(quick: bool = False) -> dict[str, Any]:
    """What an attacker finds of a claimed ε of about 1, with the noise as claimed and with half of it.

    Of a reply that is seen, and of the sum over five that share its noise.
    """
    delta, noise_multiplier = (0.01, 3.8) if quick else (1e-5, 7.5)
    count = 50_000 if quick else 1_000_000

    def found(share: float, shared_by: int) -> float:
        def normals(size: int) -> Array:
            return share * privacy.system_normals(count * size).reshape(count, size)

        samples = (releases_of(far, noise_multiplier, normals, shared_by) for far in (1e6, -1e6))
        return lower_bound(*samples, delta)

    claimed, honest, halved = privacy.epsilon(noise_multiplier, 1, delta), found(1.0, 1), found(0.5, 1)
    summed, summed_halved = found(1.0, SHARED_BY), found(0.5, SHARED_BY)
    return {
        "epsilon_claimed": claimed,
        "epsilon_delta": delta,
        "epsilon_found": honest,
        "epsilon_found_half_noise": halved,
        "epsilon_found_of_sum": summed,
        "epsilon_found_of_sum_half_noise": summed_halved,
        "epsilon_met": max(honest, summed) <= claimed < min(halved, summed_halved),
    }
