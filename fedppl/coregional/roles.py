"""The shared parameters of a linear model of coregionalisation: where each kind lies in φ, and its prior."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedppl.types import Array, DeclarationError, Layout

# Precision of the log of a scale that no data would move by more than some 1e-3 of itself.
_HELD = 1e6
NOT_OF_KERNELS = ("v", "slab_sd", "included")


class LogScale(NamedTuple):
    """Prior N(mean, 1 / precision) of the log of a scale."""

    mean: float
    precision: float

    @property
    def held(self) -> bool:
        """Whether the prior leaves so little open that the scale is a constant, and no update moves it."""
        return self.precision > _HELD

    def log_density(self, log_scale: float) -> float:
        """log p(log σ)."""
        return float(0.5 * np.log(self.precision / (2 * np.pi)) - 0.5 * self.precision * (log_scale - self.mean) ** 2)


class Roles(NamedTuple):
    """Where each kind of shared parameter lies in φ, and its prior."""

    latents: int
    points: int  # Q
    v: Any  # (L Q,) places
    included: Any  # (L,) places, or None: every latent function is used
    slab: int
    kernel: Any  # (p,) places of the kernels' parameters
    is_binary: Any  # (m,)
    log_odds: Array  # (L,) of the prior inclusion; infinite without selection
    kernel_mean: Array  # (p,)
    kernel_precision: Array  # (p, p)
    slab_prior: LogScale


def roles(layout: Layout) -> Roles:
    """Sort the shared parameters by their names; everything that is not v, included or slab_sd is a kernel's."""
    variables, places = {variable.name: variable for variable in layout.variables}, layout.slices
    for name, rule in {"v": "(latent, inducing)", "slab_sd": "()"}.items():
        if name not in variables:
            raise DeclarationError(
                f"the shared variables {list(variables)} have no {name!r} of shape {rule}; a linear model of "
                "coregionalisation shares v, slab_sd, its kernels' parameters and, for the selection, included: for "
                'example shared=["v", "included", "lengthscale", "slab_sd"].'
            )
    v, slab, included = variables["v"], variables["slab_sd"], variables.get("included")
    if len(v.shape) != 2 or slab.shape != () or slab.transform != "log":
        raise DeclarationError(
            f"v has shape {v.shape} and slab_sd shape {slab.shape} and transform {slab.transform!r}; they must be "
            '(latent, inducing), () and "log".'
        )
    if included is not None and (included.shape != v.shape[:1] or not included.binary):
        raise DeclarationError(
            f"included has shape {included.shape}; it must be Bernoulli, one for each of {v.shape[0]}."
        )
    if not layout.prior_is_gaussian:
        raise DeclarationError(
            "the prior of the shared parameters is not Gaussian on the unconstrained space; give v a standard Normal, "
            "and LogNormal priors to slab_sd and to what the kernels need."
        )
    precision, linear = layout.prior.precision, layout.prior.linear
    white = np.zeros_like(precision[places["v"]])
    white[:, places["v"]] = np.eye(v.size)
    if not np.allclose(precision[places["v"]], white, atol=1e-8) or not np.allclose(linear[places["v"]], 0, atol=1e-8):
        raise DeclarationError(
            'the prior of v is not standard Normal; declare v = pm.Normal("v", 0, 1, dims=("latent", "inducing")) and '
            "put scales into the projection and the coefficients."
        )
    taken = np.zeros(layout.size, dtype=bool)
    is_binary = np.zeros(layout.size, dtype=bool)
    for name in NOT_OF_KERNELS:
        if name in places:
            taken[places[name]] = True
    kernel = np.flatnonzero(~taken)
    log_odds = np.full(v.shape[0], np.inf)
    if included is not None:
        is_binary[places["included"]] = True
        chance = linear[places["included"]] / np.diag(precision)[places["included"]]
        log_odds = np.log(chance / (1.0 - chance))
    slab_place = places["slab_sd"].start
    kernel_precision = precision[np.ix_(kernel, kernel)]
    return Roles(
        latents=v.shape[0],
        points=v.shape[1],
        v=np.arange(places["v"].start, places["v"].stop),
        included=None if included is None else np.arange(places["included"].start, places["included"].stop),
        slab=slab_place,
        kernel=kernel,
        is_binary=is_binary,
        log_odds=log_odds,
        kernel_mean=np.asarray(np.linalg.solve(kernel_precision, linear[kernel]), dtype=float),
        kernel_precision=kernel_precision,
        slab_prior=LogScale(
            float(linear[slab_place] / precision[slab_place, slab_place]), float(precision[slab_place, slab_place])
        ),
    )
