"""A client's factor against its site in q, its own variables integrated by Laplace's approximation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Target
from fedppl.local import _from_q, _marginal
from fedppl.numerics.importance import stream_of
from fedppl.types import Array, LocalFailure

_POINTS = 64


def against_site(target: Target, mean: Array, difference: Callable[[Array], Array] | None) -> _from_q.Factor:
    """Log weights under q, from expansions at its mean; `difference` is what of Laplace's approximation is known."""
    client, global_, cavity, share = target
    site = gaussian.quotient(global_, cavity)

    def values(draws: Array) -> Array:
        found = _marginal.values(client, draws, mean, share) - gaussian.log_kernel(site, draws)
        return found if difference is None else found + difference(draws)

    def gradients(draws: Array) -> tuple[Array, Array]:
        log_factor, slopes = _marginal.gradients(client, draws, mean, share)
        return log_factor - gaussian.log_kernel(site, draws), slopes - site.linear + draws @ site.precision

    return _from_q.Factor(client.shared_size, values, gradients)


def departure(target: Target) -> dict[str, float]:
    """How far the factor departs from a Gaussian, for who only draws: draws are too few to tell what clients share."""
    if target.client.kink or not gaussian.is_proper(target.global_):
        return {}
    mean, root = gaussian.affine(target.global_)
    try:
        found = _from_q.moments(
            against_site(target, mean, None), mean, root, _POINTS, stream_of(target.client.client_id)
        )
    except (LocalFailure, ArithmeticError, np.linalg.LinAlgError):
        return {}
    told = np.nan if found is None else found.diagnostics["departure"]
    return {"departure": told} if np.isfinite(told) else {}
