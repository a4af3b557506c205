"""The digest by which sites and server tell whether they declare one model. NumPy only: a server recomputes it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.types import Array, Variable

PROBES = 3  # points at which the density of the shared prior is told


def probes(variables: Sequence[Variable], prior: Gaussian) -> Array:
    """Points (3, m) about N_0 at which two declarations' prior densities are compared."""
    center, sd = gaussian.mean(prior), gaussian.standard_deviations(prior)
    points: Array = center + sd * np.random.default_rng(0).normal(size=(PROBES, len(center)))
    binary = np.repeat([variable.binary for variable in variables], [variable.size for variable in variables])
    points[:, binary] = points[:, binary] > center[binary]
    return points


def fingerprint(variables: Sequence[Variable], prior: Gaussian, is_gaussian: bool, density: Sequence[Any]) -> str:
    """Digest of the shared variables, N_0, whether that is the prior, and log p(φ) at `probes`.

    In units of the prior and rounded, so that two builds of the same model on two machines agree. 128 bits, so that
    nobody can look for another prior that has it.
    """
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(repr(tuple(variable)).encode())
    digest.update(repr(bool(is_gaussian)).encode())
    center, sd = gaussian.mean(prior), gaussian.standard_deviations(prior)
    scaled = sd[:, None] * prior.precision * sd if prior.precision.ndim == 2 else prior.precision * sd**2
    for numbers in (np.ravel(scaled), center / sd, np.asarray(density, dtype=np.float64)):
        with np.errstate(over="ignore", invalid="ignore"):  # of an implausible density
            digest.update((np.round(numbers, 5) + 0.0).astype("<f8").tobytes())
    mantissa, exponent = np.frexp(sd)
    digest.update(np.ldexp(np.round(mantissa, 6), exponent).astype("<f8").tobytes())
    return digest.hexdigest()[:32]
