"""How a fitted linear model of coregionalisation is read: predictions in closed form, draws, a new unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import ClientView, Draws
from fedppl.coregional.bound import Design, Globals, Unit, UnitClientState, curves
from fedppl.coregional.roles import Roles
from fedppl.coregional.unit import POINT, POSTERIOR, Own, statistics
from fedppl.coregional.view import unit_of
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError, Message

# A function with a probability above this is selected.
SELECTED = 0.5
_NEW_UNIT_SWEEPS = 50


class Fitted(NamedTuple):
    """Shared parameters at the end of a fit, with the covariance of v over all latent functions."""

    shared: Globals
    joint: Array  # (LQ, LQ)
    has_replied: bool = False  # whether the unit's own rows are in these
    own: Own = POSTERIOR  # what units do with their own parameters


class Coefficients(NamedTuple):
    """q(w | α = 1) of one unit, with a covariance of its own."""

    mean: Array  # (L,)
    covariance: Array  # (L, L)
    log_noise_sd: float


def final_message(shared: Globals, joint: Array, *, has_replied: bool, point: bool = False) -> Message:
    """What a unit needs to know in the end; one that has not replied, a new one for example, is fitted anew.

    Where coefficients are point estimates, the message says so.
    """
    return {
        "has_replied": np.array(float(has_replied)),
        "mean": shared.mean,
        "joint": gaussian.pack_triangle(joint),
        "inclusion": shared.inclusion,
        "kernel": shared.kernel,
        "log_slab_sd": np.array(shared.log_slab_sd),
        **({"point": np.array(1.0)} if point else {}),
    }


def unpack(message: Message) -> Fitted:
    """Read `final_message`."""
    mean = np.asarray(message["mean"], dtype=float)
    joint = gaussian.unpack_triangle(np.asarray(message["joint"], dtype=float))
    latents, points = mean.shape
    # The mean field's covariances are inverses of the precision's blocks, and smaller than the blocks of `joint`.
    blocks = np.linalg.inv(np.einsum("lqlp->lqp", np.linalg.inv(joint).reshape(latents, points, latents, points)))
    inclusion, kernel = (np.asarray(message[name], dtype=float) for name in ("inclusion", "kernel"))
    shared = Globals(mean, blocks, inclusion, kernel, float(message["log_slab_sd"]))
    return Fitted(shared, joint, bool(message["has_replied"]), POINT if "point" in message else POSTERIOR)


def selected_only(fitted: Fitted) -> Fitted:
    """The model of a new unit: the selected functions for certain, the others not at all."""
    shared = fitted.shared
    return fitted._replace(shared=shared._replace(inclusion=np.where(shared.inclusion > SELECTED, 1.0, 0.0)))


def only(fitted: Fitted, latents: Iterable[int]) -> Fitted:
    """The model that uses the named latent functions for certain, and no other."""
    given = list(latents) if isinstance(latents, Iterable) else [None]
    if any(np.asarray(one).dtype.kind == "b" for one in given):
        raise DeclarationError(
            f"latents={shown(latents)} is a mask; give the numbers of latent functions, such as np.flatnonzero(mask)."
        )
    if any(np.asarray(one).dtype.kind not in "iuf" or np.ndim(one) for one in given):
        raise DeclarationError(f"latents={shown(latents)} must be a list of numbers of latent functions.")
    shared, chosen = fitted.shared, sorted({float(one) for one in given})
    chosen = [int(one) if one.is_integer() else one for one in chosen]
    count = len(shared.inclusion)
    if not chosen or not set(chosen) <= set(range(count)):
        raise DeclarationError(f"latents={chosen} must be some of 0 to {count - 1}.")
    return fitted._replace(shared=shared._replace(inclusion=np.isin(np.arange(count), chosen).astype(float)))


def settled(
    unit: Unit, fitted: Fitted, log_noise_sd: float | None, *, fixed: bool = False
) -> tuple[Coefficients, Fitted]:
    """A unit's own parameters from its own rows alone, and the shared ones as it uses them."""
    if not fitted.has_replied:
        return settle_new(unit, fitted, fixed=fixed)
    return _settle(unit, fitted, unit.noise.mean if log_noise_sd is None else log_noise_sd), fitted


def _settle(unit: Unit, fitted: Fitted, log_noise_sd: float) -> Coefficients:
    """A unit's own parameters given the shared ones, starting from this noise."""
    shared = fitted.shared
    design = unit.design(shared.kernel)
    state, curve = fitted.own.best(design, shared, unit.noise, log_noise_sd)
    covariance = fitted.own.covariance(design, curve, fitted.joint, shared.log_slab_sd, state.log_noise_sd)
    return Coefficients(state.mean, covariance, state.log_noise_sd)


def settle_new(unit: Unit, fitted: Fitted, *, fixed: bool) -> tuple[Coefficients, Fitted]:
    """Parameters of a unit that took no part, from its own rows and the shared functions (section 4.3).

    `fixed` is equation 17: the shared functions as they are. Otherwise q(v) of the others is the unit's prior of v, and
    the unit's own rows have their say: q(w), q(v) and σ in turn, each at the maximum of the unit's own bound. Nothing
    of it leaves the unit. The coefficients, parameters in equation 17, keep their prior N(0, σ_w²) and a posterior.
    """
    if fixed:
        return _settle(unit, fitted, unit.noise.mean), fitted
    shared, noise = fitted.shared, unit.noise.mean
    latents, points = shared.mean.shape
    design = unit.design(shared.kernel)
    used = np.repeat(shared.inclusion, points)
    prior = np.linalg.inv(fitted.joint)
    linear, precision = prior @ shared.mean.ravel(), prior
    for _ in range(_NEW_UNIT_SWEEPS):
        state, _ = fitted.own.best(design, shared, unit.noise, noise)
        told = statistics(design, state, unit.noise)
        precision = prior + used[:, None] * told["precision"] * used
        solved = np.linalg.solve(precision, linear + used * told["linear"].ravel())
        mean: Array = np.asarray(solved, dtype=float).reshape(latents, points)
        blocks = np.linalg.inv(np.einsum("lqlp->lqp", precision.reshape(latents, points, latents, points)))
        still = np.max(np.abs(mean - shared.mean)) < 1e-6 and abs(state.log_noise_sd - noise) < 1e-6
        shared, noise = shared._replace(mean=mean, covariance=blocks), state.log_noise_sd
        if still:
            break
    joint = np.linalg.inv(precision)
    fitted = fitted._replace(shared=shared, joint=(joint + joint.T) / 2, has_replied=True)
    return _settle(unit, fitted, noise), fitted


def predictive(design: Design, fitted: Fitted, own: Coefficients) -> tuple[Array, Array]:
    """Mean and variance (n,) of f at the design's inputs, by the law of total variance over w, α, v and the residual.

    Covariances of coefficients and of inducing variables across latent functions are counted; the mean field leaves
    them out, and with them most of what is unknown where the unit has no rows.
    """
    shared = fitted.shared
    latents, rows, points = design.projection.shape
    curve = curves(design, shared.mean, shared.covariance)
    gamma = shared.inclusion
    mean = (gamma * own.mean) @ curve.mean
    square = np.outer(own.mean, own.mean) + own.covariance  # E w w' given that both are used
    pair = np.outer(gamma, gamma)
    np.fill_diagonal(pair, gamma)
    product = pair * square  # E s s'
    variance = np.zeros(rows)
    blocks = fitted.joint.reshape(latents, points, latents, points)
    for first in range(latents):
        for second in range(first, latents):
            if product[first, second] == 0.0:
                continue
            seen = design.projection[first] @ blocks[first, :, second, :]
            across = np.sum(seen * design.projection[second], axis=1)
            term = product[first, second] * (across + curve.mean[first] * curve.mean[second])
            variance += term if first == second else 2.0 * term
    variance += np.diag(product) @ design.conditional
    return mean, np.maximum(variance - mean**2, 0.0)


def sample(role: Roles, message: Message, count: int, rng: np.random.Generator) -> Array:
    """Draws (count, m) of what is shared: q(v), q(α), and the estimates of kernels and σ_w, equal in all draws."""
    fitted = unpack(message)
    phi = np.zeros((count, len(role.is_binary)))
    root = np.linalg.cholesky(fitted.joint + 1e-12 * np.eye(len(fitted.joint)))
    phi[:, role.v] = fitted.shared.mean.ravel() + rng.normal(size=(count, len(root))) @ root.T
    if role.included is not None:
        phi[:, role.included] = rng.random((count, role.latents)) < fitted.shared.inclusion
    phi[:, role.kernel] = fitted.shared.kernel
    phi[:, role.slab] = fitted.shared.log_slab_sd
    return phi


def estimated(role: Roles) -> Array:
    """Whether a coordinate of φ is a point estimate (m,): the kernels' parameters and σ_w."""
    found = np.zeros(len(role.is_binary), dtype=bool)
    found[role.kernel] = found[role.slab] = True
    return found


def draw(
    client: ClientView,
    personal: UnitClientState | None,
    message: Message,
    draws: int,
    chains: int,
    rng: np.random.Generator,
) -> Draws:
    """Draws of what is shared and of the unit's own variables from the variational posterior."""
    unit, count = client.view(unit_of), draws * chains
    fitted = unpack(message)
    fitted = fitted if fitted.has_replied else selected_only(fitted)
    own, fitted = settled(unit, fitted, None if personal is None else personal.log_noise_sd)
    shared, role = fitted.shared, unit.roles
    phi = sample(role, final_message(shared, fitted.joint, has_replied=True), count, rng)
    used = np.ones((count, role.latents)) if role.included is None else phi[:, role.included]
    w = np.broadcast_to(own.mean, (count, role.latents))
    if fitted.own is not POINT:
        root = np.linalg.cholesky(own.covariance + 1e-12 * np.eye(role.latents))
        w = w + rng.normal(size=(count, role.latents)) @ root.T
    unused = np.exp(shared.log_slab_sd) * rng.normal(size=w.shape)
    values = {
        "w": np.where(used > 0.5, w, unused),
        "noise_sd": np.full((count, 1), own.log_noise_sd),
        "residual": rng.normal(size=(count, len(unit.response))),
    }
    local = np.concatenate([values[variable.name] for variable in client.local], axis=1)
    known = estimated(role)
    names = [name for name, places in client.layout.slices.items() if known[places].all()]
    names += ["w", "noise_sd"] if fitted.own is POINT else ["noise_sd"]
    return Draws(phi.reshape(chains, draws, -1), local.reshape(chains, draws, -1), {}, tuple(names))
