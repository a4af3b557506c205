"""The server's ledger of sites. Invariant: q = prior x Π_k site_k, recomputed from the ledger at every change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedppl import gaussian, structure
from fedppl.gaussian import Gaussian
from fedppl.structure import Structure
from fedppl.types import Array, DeclarationError, Layout

__all__ = ["Sites", "cavity", "empty", "improper_cavities", "in_structure", "indices", "structure_of", "update"]


class Sites(NamedTuple):
    """Sites of all clients in one family of Gaussians, and the global q they give."""

    where: Mapping[str, int]  # client id to its row
    structure: Structure
    prior: Gaussian  # full precision (m, m)
    linear: Array  # (K, m) r_k
    precision: Array  # (K, p) Q_k, packed
    q: Gaussian  # full precision (m, m)


def structure_of(form: str | Sequence[Sequence[str]], layout: Layout) -> Structure:
    """Read the keyword `structure`: "full", "diagonal", or a partition of the shared names."""
    if form == "full":
        return structure.full(layout.size)
    if form == "diagonal":
        return structure.diagonal(layout.size)
    slices = layout.slices
    blocks = []
    for names in form:
        for name in names:
            if name not in slices:
                raise DeclarationError(f"structure names {name!r}, but the shared variables are {list(slices)}.")
        blocks.append([i for name in names for i in range(slices[name].start, slices[name].stop)])
    return structure.block(layout.size, blocks)


def empty(layout: Layout, clients: tuple[str, ...], form: Structure) -> Sites:
    """Sites that say nothing, so that q is the prior."""
    count = len(clients)
    return Sites(
        where={client_id: k for k, client_id in enumerate(clients)},
        structure=form,
        prior=layout.prior,
        linear=np.zeros((count, layout.size)),
        precision=np.zeros((count, structure.packed_size(form))),
        q=layout.prior,
    )


def indices(sites: Sites, clients: Iterable[str]) -> list[int]:
    """Rows of some clients."""
    return [sites.where[client_id] for client_id in clients]


def update(sites: Sites, linear: Array, precision: Array) -> Sites:
    """Replace the ledger, and q with it: summed anew each time, so that nothing drifts."""
    summed = dense(precision.sum(axis=0), sites.structure)
    q = Gaussian(sites.prior.linear + linear.sum(axis=0), sites.prior.precision + summed)
    return sites._replace(linear=linear, precision=precision, q=q)


def dense(packed: Array, form: Structure) -> Array:
    """Packed precisions (..., p) as matrices (..., m, m)."""
    precision = structure.unpack_precision(packed, form)
    if form.blocks is not None:
        return precision
    matrices = np.zeros((*precision.shape, form.size))
    diagonal = np.arange(form.size)
    matrices[..., diagonal, diagonal] = precision
    return matrices


def in_structure(matrices: Array, form: Structure) -> Array:
    """Symmetric matrices (..., m, m) packed, what the family cannot hold left out: (..., p)."""
    if form.blocks is None:
        return np.asarray(np.einsum("...ii->...i", matrices)).copy()
    if len(form.blocks) > 1:
        kept = np.zeros(matrices.shape[-2:], dtype=bool)
        for block in form.blocks:
            kept[np.ix_(block, block)] = True
        matrices = np.where(kept, matrices, 0.0)
    return structure.pack_precision(matrices, form)


def cavity(sites: Sites, client_id: str) -> Gaussian:
    """q without one client's site; q itself for a client that has none."""
    if client_id not in sites.where:
        return sites.q
    k = sites.where[client_id]
    site = Gaussian(sites.linear[k], dense(sites.precision[k], sites.structure))
    return gaussian.quotient(sites.q, site)


def improper_cavities(sites: Sites) -> int:
    """How many clients' cavities are not positive definite."""
    cavities = sites.q.precision - dense(sites.precision, sites.structure)
    return int(np.sum(~np.asarray(gaussian.is_proper(Gaussian(sites.q.linear - sites.linear, cavities)))))
