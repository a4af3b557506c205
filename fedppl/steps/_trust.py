"""How far one client may pull q over a whole run: its site's location is drawn in until leaving it out moves q little.

With site k = (r_k, Q_k), cavity (r_{-k}, Q_{-k}) = q − site k, and means μ and μ_{-k}, what client k pulls is
v_k = μ − μ_{-k} = Q⁻¹ u_k with u_k = r_k − Q_k μ_{-k}. `bound` returns sites of the same precisions with

    |v_k|_i ≤ c sd_{-k,i} for every coordinate i     and     ‖v_k‖_{Q_{-k}} ≤ the χ_m quantile with c's two-sided tail.

In the cavity's units, since the model itself bounds it there: given φ ~ the cavity, the law of total variance gives v_k
the covariance Q_{-k}⁻¹ − Q⁻¹, below Q_{-k}⁻¹ however many rows the client has. In q's units who has nearly all rows
would stand out. Its norm is then about χ_m, so that a plain c would hold back honest clients with many coordinates.

Proof. Others as they are, Q_k and μ_{-k} do not depend on r_k, so that r_k = Q_k μ_{-k} + t u_k pulls t v_k: some t ≤ 1
keeps both bounds. That changes others' cavities: all are evaluated anew until all bounds hold, for `_SWEEPS` changes.
After these, all sites go to Q_k μ_0 + t (r_k − Q_k μ_0) with the prior's mean μ_0. The prior is Q_0 μ_0, so that
μ − μ_0 = t Q⁻¹ Σ (r_j − Q_j μ_0), likewise μ_{-k}: every v_k is linear in t, and some t ≤ 1 keeps all bounds at once.
A client whose cavity is not positive definite cannot be left out, and is not measured.

Variances are not protected, and precisions stay, but for one case: a site that takes more than half of its cavity's
precision in a direction is given none of it there, and has no say on the mean (u_k = 0), or one client's word would
make q improper.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.steps import _sites
from fedppl.steps._sites import Sites
from fedppl.types import Array

__all__ = ["Bounded", "bound", "largest_norm", "pulls", "said", "warn"]

logger = logging.getLogger(__name__)

_SWEEPS = 300
_AIM = 0.999  # a share of the bound: others change a little afterwards
_ROUNDING = 1e-9
_TAKES = 0.5  # of the cavity's precision in a direction
_CANDIDATES = 32


class Bounded(NamedTuple):
    """Sites within the bound, and what they were before."""

    sites: Sites
    pull: Array  # (K, m) before, in sds of the client's cavity; NaN where it is not proper
    held: NDArray[np.bool_]  # (K,) sites that were changed
    takes: NDArray[np.bool_]  # (K,) those that took more precision than may be


class _Pulls(NamedTuple):
    mean: Array  # (K, m) of the cavities
    along: Array  # (K, m) v_k in the cavity's sds
    norm: Array  # (K,) in the cavity's precision


def largest_norm(trust: float, size: int) -> float:
    """The χ_m quantile with the two-sided tail that c has in one dimension.

    Examples
    --------
    >>> round(largest_norm(3.0, 1), 9), round(largest_norm(3.0, 8), 2)
    (3.0, 4.86)
    """
    # Where the tail is below all numbers the norm is not bounded by itself; its coordinates are.
    return float(np.sqrt(special.chdtri(size, special.chdtrc(1, trust**2))))


def pulls(sites: Sites) -> Array:
    """What each client pulls, μ − μ_{-k} in sds of its cavity: (K, m); NaN where that is not proper."""
    return _measured(sites, sites.linear, _sites.dense(sites.precision, sites.structure)).along


def bound(sites: Sites, trust: float) -> Bounded:
    """Draw sites in until no client pulls further than `trust` allows; nothing where there are no others to protect."""
    count, m = sites.linear.shape
    held, takes = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    if count == 1:
        return Bounded(sites, np.full((1, m), np.nan), held, takes)
    linear, precision = sites.linear.copy(), _sites.dense(sites.precision, sites.structure)
    for _ in range(count):
        found = _taking(sites, linear, precision)
        if found is None:
            break
        k, linear[k], precision[k] = found
        takes[k] = True
    norm = largest_norm(trust, m)
    before: Array | None = None
    for _ in range(_SWEEPS):
        found_pulls = _measured(sites, linear, precision)
        before = found_pulls.along if before is None else before
        ratios = _ratios(found_pulls, trust, norm)
        if not np.any(ratios > 1 + _ROUNDING):
            break
        k = _to_draw_in(sites, linear, precision, ratios, trust, norm)
        centre = precision[k] @ found_pulls.mean[k]
        linear[k] = centre + (_AIM / ratios[k] if ratios[k] > 1 else 0.5) * (linear[k] - centre)
        held[k] = True
    else:
        ratio = float(_ratios(_measured(sites, linear, precision), trust, norm).max())
        centres = precision @ gaussian.mean(sites.prior)
        linear = centres + min(1.0, _AIM / ratio) * (linear - centres)
        held[:] = True
    assert before is not None
    if not np.any(held | takes):
        return Bounded(sites, before, held, takes)
    # What nobody touched stays to the last bit.
    packed = np.where(takes[:, None], _sites.in_structure(precision, sites.structure), sites.precision)
    return Bounded(_sites.update(sites, linear, packed), before, held | takes, takes)


def _cavities(sites: Sites, linear: Array, precision: Array) -> tuple[Gaussian, NDArray[np.bool_]]:
    """Summed without each site, not subtracted: one of 10^14 times the others would leave nothing of them."""
    found = Gaussian(sites.prior.linear + _others(linear), sites.prior.precision + _others(precision))
    return found, np.atleast_1d(gaussian.is_proper(found))


def _measured(sites: Sites, linear: Array, precision: Array) -> _Pulls:
    q = Gaussian(sites.prior.linear + linear.sum(axis=0), sites.prior.precision + precision.sum(axis=0))
    cavities, proper = _cavities(sites, linear, precision)
    if not gaussian.is_proper(q):
        proper = np.zeros_like(proper)
    safe = np.where(proper[:, None, None], cavities.precision, np.eye(linear.shape[1]))
    covariance = np.linalg.inv(safe)
    mean = np.linalg.solve(safe, cavities.linear[..., None])[..., 0]
    with np.errstate(invalid="ignore", over="ignore"):
        shift = np.where(proper[:, None], (gaussian.mean(q) if np.any(proper) else 0.0) - mean, np.nan)
        along = shift / np.sqrt(np.einsum("kii->ki", covariance))
        norm = np.sqrt(np.maximum(np.einsum("ki,kij,kj->k", shift, safe, shift), 0.0))
    return _Pulls(np.asarray(mean), np.asarray(along), np.asarray(norm))


def _ratios(found: _Pulls, trust: float, norm: float) -> Array:
    """How many times its bound each client pulls, 0 where that cannot be measured: (K,)."""
    return np.asarray(np.nan_to_num(np.maximum(np.abs(found.along).max(axis=1) / trust, found.norm / norm)))


def _to_draw_in(sites: Sites, linear: Array, precision: Array, ratios: Array, trust: float, norm: float) -> int:
    """The client without whom the others agree best; of several, the one that pulls most.

    Not simply who pulls most: beside a liar an honest client with nearly all rows does, since what it is measured
    against is little else than the liar.
    """
    candidates = np.argsort(-ratios, kind="stable")[:_CANDIDATES]
    left = []
    for k in candidates:
        r, q = linear.copy(), precision.copy()
        r[k], q[k] = 0.0, 0.0
        found = _measured(sites, r, q)
        agree = not np.any(np.isnan(found.norm))
        left.append(float(_ratios(found, trust, norm).max()) if agree else np.inf)
    return int(candidates[int(np.argmin(left))])


def _taking(sites: Sites, linear: Array, precision: Array) -> tuple[int, Array, Array] | None:
    """The site that takes most of its cavity's precision, if more than half, and what is left of it; or None.

    Where a cavity is not proper, as far from the mode, what the others' curvatures are in size stands in for it.
    """
    cavities, proper = _cavities(sites, linear, precision)
    base = cavities.precision
    if not np.all(proper):
        base = np.where(proper[:, None, None], base, sites.prior.precision + _others(_sizes(sites, precision)))
    root = np.linalg.cholesky(base)
    inverse = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(inverse @ precision @ np.swapaxes(inverse, 1, 2))
    k = int(np.argmin(values[:, 0]))
    if values[k, 0] >= -_TAKES:
        return None
    axes = root[k] @ vectors[k]
    lifted = np.where(values[k] < -_TAKES, -values[k], 0.0)
    back = _sites.dense(_sites.in_structure((axes * lifted) @ axes.T, sites.structure), sites.structure)
    centre = np.linalg.solve(base[k], cavities.linear[k])
    kept = precision[k] + back
    return k, kept @ centre, kept


def _sizes(sites: Sites, precision: Array) -> Array:
    """Precisions with the sizes of their eigenvalues, in prior sds: (K, m, m)."""
    root = np.linalg.cholesky(sites.prior.precision)
    inverse = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(inverse @ precision @ inverse.T)
    axes = root @ vectors
    return np.asarray((axes * np.abs(values)[:, None, :]) @ np.swapaxes(axes, 1, 2))


def _others(values: Array) -> Array:
    """Sum over all rows but one, for every row."""
    upto, after = np.cumsum(values, axis=0), np.cumsum(values[::-1], axis=0)[::-1]
    total = np.zeros_like(values)
    total[1:] += upto[:-1]
    total[:-1] += after[1:]
    return total


def _what(pull: Array, labels: Sequence[str]) -> str:
    """Where a client that is held back pulls most; one that takes all precision has no say, and pulls nowhere."""
    if not np.nanmax(np.abs(pull), initial=0.0) >= 1e-6:
        return "takes more precision than the others have"
    i = int(np.argmax(np.abs(pull)))
    return f"pulls {labels[i]} by {pull[i]:+.2g} sds"


def warn(bounded: Bounded, trust: float) -> None:
    """One line in the log for every client that is held back."""
    names, labels = list(bounded.sites.where), bounded.sites.labels
    for k in np.flatnonzero(bounded.held):
        logger.warning(
            "client %s held back: %s (of what the others know), trust=%s",
            names[k],
            _what(bounded.pull[k], labels),
            trust,
            extra={"client": names[k], "status": "held back"},
        )


def said(sites: Sites, held: Array, pull: Array, trust: float | None) -> str:
    """Name the clients that are held back, and where they pull, or say nothing."""
    rows = np.flatnonzero(held)
    if trust is None or not len(rows):
        return ""
    names = list(sites.where)
    shown = [f"{names[k]} ({_what(pull[k], sites.labels)})" for k in rows[:5]]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return (
        f"held back, since what the others know does not allow it: {', '.join(shown)}{more}; look at their data, or "
        f"raise trust={trust:g}"
    )
