"""The server's ledger of sites. Invariant: q = prior x Π_k site_k, recomputed from the ledger at every change."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedppl import gaussian, structure
from fedppl.algorithms import tolerances as tol
from fedppl.gaussian import Gaussian
from fedppl.local.target import pack_target
from fedppl.structure import Structure
from fedppl.types import Array, DeclarationError, Layout, Message

WITHOUT_CURVATURE = "compute without curvature: EP(local=fedppl.local.NUTS(), warm_start=False)"
SHOOTS_UP = (
    "shoots up, as where a local scale has a single value and may go to 0: declare a prior that keeps it from 0 "
    f"(pm.InverseGamma), or share it, or {WITHOUT_CURVATURE}"
)
_LOOK = "look at this client's data and versions"

logger = logging.getLogger(__name__)


class Sites(NamedTuple):
    """Sites of all clients in one family of Gaussians, and the global q they give."""

    where: Mapping[str, int]  # client id to its row
    structure: Structure
    prior: Gaussian  # full precision (m, m)
    linear: Array  # (K, m) r_k
    precision: Array  # (K, p) Q_k, packed
    q: Gaussian  # full precision (m, m)
    labels: tuple[str, ...]  # (m,) of the shared coordinates


def structure_of(form: str | Sequence[Sequence[str]], layout: Layout) -> Structure:
    """Read the keyword `structure`: "full", "diagonal", or a partition of the shared names."""
    if form == "full":
        return structure.full(layout.size)
    if form == "diagonal":
        return structure.block(layout.size, [[i] for i in range(layout.size)])
    places = {name: range(part.start, part.stop) for name, part in layout.slices.items()}
    if sorted(name for names in form for name in names) != sorted(places) or not all(form):
        raise DeclarationError(
            f"structure={form!r} must have each of {list(places)} once, in blocks that are not empty."
        )
    return structure.block(layout.size, [[i for name in names for i in places[name]] for names in form])


def is_full(form: Structure) -> bool:
    """Whether precisions have all entries."""
    return structure.packed_size(form) == form.size * (form.size + 1) // 2


def empty(layout: Layout, clients: tuple[str, ...], form: Structure) -> Sites:
    """Flat sites, so that q is the prior."""
    count = len(clients)
    return Sites(
        where={client_id: k for k, client_id in enumerate(clients)},
        structure=form,
        prior=layout.prior,
        linear=np.zeros((count, layout.size)),
        precision=np.zeros((count, structure.packed_size(form))),
        q=layout.prior,
        labels=layout.labels,
    )


def say_if_large(layout: Layout, algorithm: str) -> None:
    """Warn in the log, before the first round, of more shared variables than an algorithm is made for."""
    if layout.size >= tol.LARGE_LAYOUT:
        logger.warning(
            "%s is made for tens of shared numbers, and a round may take minutes with all %d: share fewer, or, of a "
            "network's weights, pass one of the algorithms of fedppl.nn",
            algorithm,
            layout.size,
        )


def indices(sites: Sites, clients: Iterable[str]) -> list[int]:
    """Rows of some clients."""
    return [sites.where[client_id] for client_id in clients]


def update(sites: Sites, linear: Array, precision: Array) -> Sites:
    """Replace the ledger and q, summed anew each time, so that rounding does not add up."""
    summed = structure.unpack_precision(precision.sum(axis=0), sites.structure)
    q = Gaussian(sites.prior.linear + linear.sum(axis=0), sites.prior.precision + summed)
    return sites._replace(linear=linear, precision=precision, q=q)


def in_structure(matrices: Array, form: Structure) -> Array:
    """Symmetric matrices (..., m, m) packed, without entries outside the family: (..., p)."""
    is_inside = structure.unpack_precision(np.ones(structure.packed_size(form)), form) > 0
    return structure.pack_precision(np.where(is_inside, matrices, 0.0), form)


def site(sites: Sites, k: int) -> Gaussian:
    """The site of the client in row k, with a full precision."""
    return Gaussian(sites.linear[k], structure.unpack_precision(sites.precision[k], sites.structure))


def cavity(sites: Sites, client_id: str) -> Gaussian:
    """q without one client's site; q itself for a client that has none."""
    if client_id not in sites.where:
        return sites.q
    return gaussian.quotient(sites.q, site(sites, sites.where[client_id]))


def conclusion(sites: Sites, client_id: str, prior_share: float) -> Message:
    """q and the client's cavity; q twice for a client that did not take part."""
    return pack_target(sites.q, cavity(sites, client_id), prior_share if client_id in sites.where else 0.0)


def improper_cavities(sites: Sites) -> int:
    """How many clients' cavities are not positive definite."""
    cavities = sites.q.precision - structure.unpack_precision(sites.precision, sites.structure)
    return int(np.sum(~np.asarray(gaussian.is_proper(Gaussian(sites.q.linear - sites.linear, cavities)))))


def implausible_moments(sites: Sites, reply: Message) -> str | None:
    """Why the ledger cannot hold tilted moments that are finite and of the right shapes, or None."""
    m_q, root = gaussian.affine(sites.q)
    mean, skewness = (np.asarray(reply[name], dtype=float) for name in ("mean", "skewness"))
    precision = gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
    ratios = _ratios(precision, root)
    if ratios[-1] > tol.AGAINST_Q:
        return _beyond(f"'precision' is {ratios[-1]:.2g} times q's in a direction", tol.AGAINST_Q)
    if ratios[0] <= 0 or not gaussian.is_proper(Gaussian(mean, precision)):
        return indefinite("precision", precision)
    if ratios[0] < 1 / tol.AGAINST_Q:
        return f"'precision' is {ratios[0]:.2g} times q's in a direction, at least {1 / tol.AGAINST_Q:.0e}; {_LOOK}"
    with np.errstate(all="ignore"):
        distance = float(np.linalg.norm(np.linalg.solve(root, mean - m_q)))
    if not distance <= np.sqrt(tol.AGAINST_Q):
        return _beyond(f"'mean' is {distance:.2g} sds from q's", np.sqrt(tol.AGAINST_Q))
    if (largest := float(np.abs(skewness).max())) > tol.MOST_SKEWNESS:
        return _beyond(f"'skewness' reaches {largest:.2g}", tol.MOST_SKEWNESS)
    error = float(reply["mc_error"])
    if not 0 <= error <= 1:
        return f"'mc_error' is {error:.2g} posterior sds and must lie in [0, 1]: raise draws= of the local inference"
    return None


def implausible_expansion(sites: Sites, reply: Message) -> str | None:
    """Why the ledger cannot hold a finite expansion, or None; curvature of either sign may be right."""
    _, root = gaussian.affine(sites.prior)
    spread = np.sqrt(np.diag(gaussian.covariance(sites.prior)))
    hessian = gaussian.unpack_triangle(np.asarray(reply["hessian"], dtype=float))
    gradient, value = np.asarray(reply["gradient"], dtype=float), float(reply["value"])
    largest, steepest = float(np.abs(_ratios(hessian, root)).max()), tol.AGAINST_PRIOR * tol.WRONG_PRIOR_SDS
    with np.errstate(all="ignore"):
        curved = np.diag(hessian) * spread**2
        slope = float(np.linalg.norm(root.T @ gradient))
        along = sites.labels[int(np.nanargmax(np.abs(gradient) * spread))]
    worst = int(np.nanargmax(np.abs(curved)))
    if largest > tol.AGAINST_PRIOR:
        along, what = sites.labels[worst], f"'hessian' is {largest:.2g} times the precision of the prior in a direction"
        # A log density that curves upward without bound is that of a scale that goes to zero, and of no data.
        if curved[worst] > 0:
            return _beyond(what, tol.AGAINST_PRIOR, f"along {along} the density {SHOOTS_UP}")
        beyond = _beyond(what, tol.AGAINST_PRIOR)
    elif not slope <= steepest:
        beyond = _beyond(f"'gradient' is {slope:.2g} per prior sd", steepest)
    elif abs(value) > tol.LARGEST_VALUE:
        beyond = _beyond(f"'value' is {value:.2g}", tol.LARGEST_VALUE)
    else:
        return None
    scales = "data and prior are on different scales: rescale the outcome or that column, or widen the prior"
    return f"{beyond}. Along {along} {scales}"


def indefinite(name: str, matrix: Array) -> str:
    """Why a matrix that is not positive definite is no precision."""
    return f"{name!r} is not positive definite (smallest eigenvalue {np.linalg.eigvalsh(matrix)[0]:.3g})"


def implausible_values(reply: Message, names: Sequence[str] = ("value", "ray")) -> str | None:
    """Why values of log f_k cannot be, or None: they may be small, but not larger than any density."""
    for name in names:
        if (largest := float(np.max(reply[name], initial=-np.inf))) > tol.LARGEST_VALUE:
            return _beyond(f"{name!r} reaches {largest:.2g}", tol.LARGEST_VALUE)
    return None


def _ratios(matrix: Array, root: Array) -> Array:
    """Eigenvalues of a symmetric matrix in the precision whose inverse is root rootᵀ; infinite where they overflow."""
    with np.errstate(all="ignore"):
        white = root.T @ matrix @ root
        white = 0.5 * (white + white.T)
    return np.asarray(np.linalg.eigvalsh(white)) if np.all(np.isfinite(white)) else np.full(len(white), np.inf)


def _beyond(what: str, limit: float, remedy: str = _LOOK) -> str:
    return f"{what}, at most {limit:.0e} allowed; {remedy}"
