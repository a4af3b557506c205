"""A client's exact solve: the mode of its parameters given a Gaussian prior, and its likelihood's expansion there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import ClientView, Expansion, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.numerics.pairs import difference_hessian, inner_mode_at
from fedppl.types import Array, DeclarationError, Layout, LocalFailure

_LEAST = 0.2  # at modes this is met: a factor's curvature there is near that with the local variables held


class Frame(NamedTuple):
    """The declared prior N(μ₀, L Lᵀ), in whose units η = L⁻¹(θ − μ₀) all is computed."""

    center: Array  # μ₀, (m,)
    root: Array  # L, (m, m)

    def colour(self, g: Gaussian) -> Gaussian:
        """Take a Gaussian of η to that of θ."""
        inverse = np.linalg.inv(self.root)
        precision = inverse.T @ g.precision @ inverse
        return Gaussian(inverse.T @ g.linear + precision @ self.center, (precision + precision.T) / 2)


def frame_of(layout: Layout) -> Frame:
    """Read the frame off the declared prior, which must be Gaussian."""
    if not layout.prior_is_gaussian:
        raise DeclarationError(
            f"the prior of {[v.name for v in layout.variables]} is not Gaussian on the unconstrained space, and HM1 "
            "couples clients by a matrix normal prior. Declare pm.Normal, pm.MvNormal or pm.LogNormal."
        )
    root = np.linalg.cholesky(gaussian.covariance(layout.prior)).astype(np.float64)
    return Frame(gaussian.mean(layout.prior), root)


def row_of(where: Mapping[str, int], client_id: str) -> int:
    """The place of a client that took part; no other one has parameters."""
    if client_id not in where:
        raise DeclarationError(
            f"client {client_id!r} did not take part, and HM1 says nothing of such clients (FedLin, section 4); fit "
            "again with it, or use fedppl.EP() with a hierarchical prior."
        )
    return where[client_id]


def mode_given(
    client: ClientView, local: LocalInference, start: Array, pull: Array, weight: float, *, limit: int = 50
) -> tuple[Array, Array, Array, dict[str, float]]:
    """Mode of log f_k(μ₀ + L η) + pullᵀη − ½ weight ‖η‖² by damped Newton.

    Returns the expansion of log f_k there as a factor of η, (m,) and (m, m), φ at the mode, and diagnostics.
    """
    assert local.expand is not None
    frame = frame_of(client.layout)
    eta = start
    expansion = local.expand(client, frame.center + frame.root @ eta, 0.0)
    for taken in itertools.count():
        gradient = frame.root.T @ expansion.gradient
        curvature = -frame.root.T @ expansion.hessian @ frame.root
        slope = gradient + pull - weight * eta
        values, vectors = np.linalg.eigh(curvature + weight * np.eye(len(eta)))
        floor = 1e-10 * max(1.0, float(np.abs(values).max()))
        step = vectors @ ((vectors.T @ slope) / np.maximum(np.abs(values), floor))
        decrement = float(slope @ step)
        if decrement < 1e-12:
            break
        if taken == limit:
            raise LocalFailure(f"{limit} Newton steps did not reach the mode; are the data enough for the model?")
        here = expansion.value + float(pull @ eta) - 0.5 * weight * float(eta @ eta)
        length = 1.0
        while length > 1e-8:
            trial = eta + length * step
            there = _attempt(client, local, frame.center + frame.root @ trial)
            if there is not None:
                gain = there.value + float(pull @ trial) - 0.5 * weight * float(trial @ trial) - here
                if gain >= 1e-4 * length * decrement - 1e-10 * (1.0 + abs(here)):
                    break
            length /= 2
        else:
            if decrement < 1e-6:
                break
            raise LocalFailure(f"no step improves the client's posterior (Newton decrement {decrement:.3g})")
        assert there is not None
        eta, expansion = trial, there
    phi = frame.center + frame.root @ eta
    given_local = frame.root.T @ _curvature_given_local(client, phi) @ frame.root
    precision, raised = _no_less_than(curvature, given_local)
    info = {"newton_steps": float(taken), "raised": float(raised)}
    return gradient + precision @ eta, precision, phi, info


def _curvature_given_local(client: ClientView, phi: Array) -> Array:
    """−∂² log p(y, θ | φ) / ∂φ² at φ and the mode of the local variables θ there, which stay where they are."""
    x = np.concatenate([phi, _local_mode(client, phi)])
    m = len(phi)
    return np.asarray(-difference_hessian(client.kernel, x, np.full(len(x), 0.1), client.packed)[:m, :m])


def _no_less_than(curvature: Array, reference: Array) -> tuple[Array, int]:
    """Raise curvature to at least `_LEAST` of the reference in every direction; how many were raised.

    An unknown noise makes tails like those of Student's t: away from the client's own estimate they bend outwards. As a
    factor that has no curvature, or none that is positive, they would pull without end.
    """
    values, axes = np.linalg.eigh(reference)
    scale = float(np.abs(values).max())
    seen = np.abs(values) > 1e-10 * scale  # elsewhere the data say nothing
    root = axes[:, seen] * np.sqrt(np.abs(values[seen]))
    back = axes[:, seen] / np.sqrt(np.abs(values[seen]))
    relative, directions = np.linalg.eigh(back.T @ curvature @ back)
    root = root @ directions
    precision = (root * np.maximum(relative, _LEAST)) @ root.T
    return (precision + precision.T) / 2, int(np.sum(relative < _LEAST))


def _local_mode(client: ClientView, phi: Array) -> Array:
    """Mode of p(θ | y, φ)."""
    arrived, theta = inner_mode_at(client.kernel, np.ascontiguousarray(phi), client.initial.copy(), client.packed)
    if not arrived:
        raise LocalFailure("no mode of the local variables was found")
    return theta


def _attempt(client: ClientView, local: LocalInference, phi: Array) -> Expansion | None:
    """The expansion, or None where there is none: a shorter step is tried then."""
    assert local.expand is not None
    try:
        expansion = local.expand(client, phi, 0.0)
    except LocalFailure:
        return None
    return expansion if np.isfinite(expansion.value) and np.all(np.isfinite(expansion.hessian)) else None


def reported(client: ClientView, names: tuple[str, ...], phi: Array, theta: Array | None) -> dict[str, float]:
    """Scalar local variables and deterministics by name, at φ and at the mode of θ there."""
    at = _local_mode(client, phi) if theta is None else theta
    values = client.constrain(phi[None], at[None])
    for name in names:
        if name not in values or np.size(values[name]) != 1:
            scalars = [known for known, value in values.items() if np.size(value) == 1]
            raise DeclarationError(f"report names {name!r}, but scalar local variables are {scalars}.")
    return {name: float(np.ravel(values[name])[0]) for name in names}
