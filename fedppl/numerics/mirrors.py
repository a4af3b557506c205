"""Mirror images of a mode: where signs of some coordinates change, and a density may be as large."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from scipy.stats import norm

from fedppl.types import Array, Layout

_MATTERS = 1e-3  # share of the image in the sum of both densities from which it is reported
_APART = 3.0  # posterior sds between an image and the mode
_KNOWN = 0.1  # part of the image's share that the posterior found has on the image's side, where it is known already
_DIP = 1.0  # nats by which a density falls between two modes
_BETWEEN = np.array([0.25, 0.5, 0.75])  # of the way
_MOST = 60  # images


def signs(layout: Layout) -> Array:
    """Patterns (F, m) of ±1: of each unbounded variable, of each entry of one, and of two variables; at most 60.

    Examples
    --------
    >>> from fedppl import gaussian
    >>> from fedppl.types import Layout, Variable
    >>> variables = Variable("a", (2,), "", None), Variable("sd", (), "log__", None), Variable("c", (), "", None)
    >>> signs(Layout(variables, gaussian.from_moments(np.zeros(4), np.eye(4)), True, "")).astype(int).tolist()
    [[-1, -1, 1, 1], [1, 1, 1, -1], [-1, 1, 1, 1], [1, -1, 1, 1], [-1, -1, 1, -1]]
    """
    places = np.arange(layout.size)
    parts = [places[layout.slices[v.name]] for v in layout.variables if not v.transform and not v.binary]
    pairs = [np.concatenate(pair) for pair in itertools.combinations(parts, 2)]
    entries = [part[k : k + 1] for part in parts if len(part) > 1 for k in range(len(part))]
    changed = [*parts, *entries, *pairs][:_MOST]
    patterns = np.ones((len(changed), layout.size))
    for pattern, part in zip(patterns, changed, strict=True):
        pattern[part] = -1.0
    return patterns


def unseen(
    log_density: Callable[[Array], Array],
    center: Array,
    sd: Array,
    patterns: Array,
    known: tuple[Array, Array] | None = None,
) -> tuple[list[int], float] | None:
    r"""Coordinates whose change of sign leads to another mode, and the share of the density there, or None.

    With :math:`\Delta = \log p(x') - \log p(x)` at the image x' of the mean x, the share is
    :math:`1 / (1 + e^{-\Delta})`. An image counts where its share is at least 1e-3, the density falls by a nat in
    between, and the posterior found has less than a tenth of the share on the image's side.

    The log density takes points (T, m) and is known up to a constant. Mean and sds are those of the posterior found,
    `patterns` (F, m) come from `signs`, and `known` are its points (S, m) with weights that sum to 1, where it is no
    Gaussian. None also where the density at the mean is not known.

    Examples
    --------
    >>> two = lambda x: np.logaddexp(-0.5 * ((x[:, 0] - 3) / 0.2) ** 2, -0.5 * ((x[:, 0] + 3) / 0.2) ** 2)
    >>> unseen(two, np.array([3.0]), np.array([0.2]), np.array([[-1.0]]))
    ([0], 0.5)
    """
    patterns = patterns[np.max(np.abs(center - patterns * center) / sd, axis=1, initial=0.0) > _APART]
    if not len(patterns):
        return None
    values = np.asarray(log_density(np.vstack([center, patterns * center])))
    if not np.isfinite(values[0]):
        return None
    above = np.where(np.isfinite(values[1:]), values[1:] - values[0], -np.inf)
    share = 1.0 / (1.0 + np.exp(np.clip(-above, -50.0, 700.0)))
    for k in np.argsort(-share, kind="stable").tolist():
        if share[k] <= _MATTERS:
            return None
        image = patterns[k] * center
        if _mass_beside(image, center, sd, known) >= _KNOWN * share[k]:
            continue
        way = np.asarray(log_density(center + _BETWEEN[:, None] * (image - center)))
        if np.min(way[np.isfinite(way)], initial=np.inf) < min(values[0], values[1 + k]) - _DIP:
            return np.flatnonzero(patterns[k] < 0).tolist(), float(share[k])
    return None


def _mass_beside(image: Array, center: Array, sd: Array, known: tuple[Array, Array] | None) -> float:
    """Mass of the posterior found that is nearer to the image than to the mean, in units of its sds."""
    if known is None:
        return float(norm.sf(np.max(np.abs(image - center) / sd) / 2))
    points, weights = known
    nearer = ((points - (image + center) / 2) / sd) @ ((image - center) / sd) > 0
    return float(np.sum(weights[nearer]))
