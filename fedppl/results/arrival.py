"""Whether a fit has something to report yet: a q that the search has not arrived at is no posterior."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedppl import gaussian
from fedppl.types import NotConvergedError

if TYPE_CHECKING:
    from fedppl.results.fit import Fit

__all__ = ["require_arrived", "unarrived"]


def unarrived(fit: Fit) -> str:
    """Why there is nothing to report yet, or an empty text."""
    algorithm = fit.algorithm
    if not any(record.bytes_up for record in fit.records):
        return "no client has replied"
    if algorithm.preliminary is not None and algorithm.preliminary(fit.state):
        return "the search for it has not arrived"
    if algorithm.posterior is not None and not gaussian.is_proper(algorithm.posterior(fit.state)):
        return "q is not positive definite"
    return ""


def require_arrived(fit: Fit, what: str) -> None:
    """Raise NotConvergedError, with the remedy, where there is nothing to report yet."""
    if reason := unarrived(fit):
        raise NotConvergedError(
            f"{what}: this fit has no posterior, since {reason}. It is {fit.status.value}: {fit.message.rstrip('.')}. "
            "What there is so far, fit.shared(unconverged=True) gives."
        )
