"""Confidences τ_j of clients around a latent centre w: what they are made of, and the sums that give w."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.contracts import Received
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError

TERMS = ("uncertainty", "deviation")


def terms_rule(terms: Any) -> tuple[str, ...]:
    """Check the keyword `terms`."""
    given = (terms,) if isinstance(terms, str) else tuple(terms) if isinstance(terms, tuple | list) else ()
    words = all(isinstance(term, str) for term in given)
    if not given or not words or set(given) - set(TERMS) or len(set(given)) < len(given):
        raise DeclarationError(f"terms={shown(terms)} must be one or both of {TERMS}.")
    return given


def confidence_of(
    mean: Array, variance: Array, w: Array, terms: tuple[str, ...] = TERMS, held: tuple[float, float] = (0.0, 1.0)
) -> float:
    """τ_j (eq. 8), or of one of its terms alone; `held` are strength ν and spread of what it is held near.

    >>> confidence_of(np.array([1.0, 2.0]), np.array([0.5, 0.5]), np.array([0.0, 2.0]))
    1.0
    """
    total = float(np.sum(variance)) if "uncertainty" in terms else 0.0
    if "deviation" in terms:
        total += float(np.sum((mean - w) ** 2))
    strength, spread = held
    return (len(w) + strength) / max(total + strength * spread**2, np.finfo(float).tiny ** 0.5)


def ledger_sums(ledger: Array, where: Mapping[str, int], received: Received) -> tuple[Array, Array, float, int]:
    """Ledger, Σ τ μ, Σ τ and the number of clients in them: of the replies, or of everything that is remembered."""
    if not len(ledger):
        return ledger, received.total["weighted"], float(received.total["weight"]), received.clients
    after = ledger.copy()
    for client_id, reply in received.each.items():
        after[where[client_id]] = [*reply["weighted"], float(reply["weight"])]
    return after, after[:, :-1].sum(axis=0), float(after[:, -1].sum()), int(np.sum(after[:, -1] > 0))
