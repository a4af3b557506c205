"""Layout and prior of what clients share: the exact Gaussian, or one with its moments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.logprob.utils import ParameterValueError

from fedppl.gaussian import Gaussian
from fedppl.model import graph as _graph
from fedppl.model._template import Template, kernel_of
from fedppl.model.fingerprint import fingerprint, probes
from fedppl.numerics.newton import density_batch
from fedppl.numerics.prior import SharedPrior, gaussian_prior, moment_match
from fedppl.types import Array, DeclarationError, Layout, Variable

_PRIOR_DRAWS = 4000


def shared_layout(
    template: Template, variables: tuple[Variable, ...], initial: list[Array]
) -> tuple[Layout, SharedPrior]:
    """Layout and prior of the shared parameters, once per template."""
    functions = template.functions
    key = ("layout", variables)
    if key in functions:
        layout, prior = functions[key]
        return layout, prior
    parts = template.parts
    _refuse_flat(parts)
    graph = _graph.prior_graph(parts, variables)
    phi, logp = graph.x, graph.logp
    log_density = _graph.batched(phi, [], [logp])
    gradient = _graph.python_function([phi], pt.grad(logp, phi, disconnected_inputs="ignore"))
    origin = np.concatenate([np.ravel(value).astype(float) for value in initial])
    _require_density(parts, variables, origin, log_density)
    sizes = [variable.size for variable in variables]
    binary = np.repeat([variable.binary for variable in variables], sizes)
    owners = np.repeat([variable.name for variable in variables], sizes)
    exact = _gaussian_beside_binary(lambda draws: log_density(draws)[0], gradient, origin, binary, owners)
    n0 = exact if exact is not None else moment_match(_prior_draws(parts))
    kernel = functools.cache(lambda: kernel_of(graph))
    if len(origin) > _INTERPRETED and exact is None:
        values, gradients = _compiled_prior(kernel)
    else:
        values, gradients = _interpreted_prior(phi, logp, log_density)
    prior = SharedPrior(
        log_density=values,
        gradient=gradient,
        gaussian=n0,
        is_gaussian=exact is not None,
        gradients=gradients,
        kernel=kernel,
    )
    density = tuple(float(value) for value in _by_row(log_density, probes(variables, n0), -np.inf, ()))
    told = fingerprint(variables, n0, exact is not None, density)
    layout = Layout(variables, n0, exact is not None, told, density)
    functions[key] = layout, prior
    return layout, prior


def _require_density(
    parts: _graph.Parts, variables: tuple[Variable, ...], origin: Array, log_density: Callable[..., list[Array]]
) -> None:
    """Refuse a prior that has no density where it starts, and name the variables that have none."""
    value = float(_by_row(log_density, origin[None], -np.inf, ())[0])
    if np.isfinite(value):
        return
    odd = []
    for term in parts.prior_terms:
        graph = _graph.prior_graph(parts._replace(prior_terms=(term,)), variables)
        alone = _by_row(_graph.batched(graph.x, [], [graph.logp]), origin[None], -np.inf, ())
        odd += [] if np.isfinite(alone[0]) else [term.name]
    raise DeclarationError(
        f"the shared prior's log density at the starting point is {value}, by {odd or 'all together'}; is a scale not "
        "positive, or the start outside of the support? Correct the prior, or set `initval=` on the variable."
    )


# With more shared coordinates than this, many calls of an interpreted prior take longer than compiling it once.
_INTERPRETED = 30
_AtMany = Callable[[Array], Array]  # (S, m) to (S,) or (S, m)


def _interpreted_prior(phi: Any, logp: Any, log_density: Callable[..., list[Array]]) -> tuple[_AtMany, _AtMany]:
    """log p(φ) and its gradient at many φ, vectorised; nothing is compiled."""
    many = functools.cache(lambda: _graph.batched(phi, [], [pt.grad(logp, phi, disconnected_inputs="ignore")]))
    return (
        lambda draws: _by_row(log_density, draws, -np.inf, ()),
        lambda draws: _by_row(many(), draws, np.nan, draws.shape[1:]),
    )


def _compiled_prior(kernel: Callable[[], Callable[..., Any]]) -> tuple[_AtMany, _AtMany]:
    """The same by a loop that is compiled at its first call."""

    def both(draws: Array) -> Array:
        found: Array = density_batch(kernel(), np.ascontiguousarray(draws, dtype=np.float64))
        return found

    return lambda draws: both(draws)[:, 0], lambda draws: both(draws)[:, 1:]


def _by_row(function: Callable[..., list[Array]], draws: Array, outside: float, shape: tuple[int, ...]) -> Array:
    """Values (S, *shape) at draws (S, m); where one of them has a parameter outside its domain, each by itself."""
    try:
        return np.broadcast_to(function(draws)[0], (len(draws), *shape))
    except ParameterValueError:
        if len(draws) == 1:
            return np.full((1, *shape), outside)
        return np.concatenate([_by_row(function, row[None], outside, shape) for row in draws])


def _refuse_flat(parts: _graph.Parts) -> None:
    flat = [rv for rv in parts.shared if isinstance(rv.owner.op, FlatRV | HalfFlatRV)]
    bounded = any(term not in parts.shared for term in parts.prior_terms)  # a potential may make the prior proper
    if flat and not bounded:
        remedies = {False: "pm.Normal(0, 10)", True: "pm.HalfNormal(1)"}
        told = [f"{rv.name!r} ({remedies[isinstance(rv.owner.op, HalfFlatRV)]} for example)" for rv in flat]
        raise DeclarationError(
            f"the prior of shared {', '.join(told)} is flat, so the shared prior is improper, and the server needs a "
            "proper prior. Give every shared variable one."
        )


def _gaussian_beside_binary(
    log_density: Callable[[Array], Array], gradient: Callable[[Array], Array], origin: Array, binary: Any, owners: Any
) -> Gaussian | None:
    """N_0 if the continuous coordinates have a Gaussian prior: theirs, with mean and variance of each indicator."""

    def filled(continuous: Array) -> Array:
        point = origin.copy()
        point[~binary] = continuous
        return point

    continuous = gaussian_prior(lambda z: gradient(filled(z))[~binary], origin[~binary], owners[~binary])
    if continuous is None or not np.any(binary):
        return continuous
    at = np.repeat(origin[None], 2 * int(binary.sum()), axis=0)
    for k, place in enumerate(np.flatnonzero(binary)):
        at[2 * k : 2 * k + 2, place] = 0, 1
    zero, one = np.broadcast_to(log_density(at), len(at)).reshape(-1, 2).T
    chance = 1.0 / (1.0 + np.exp(zero - one))
    linear, precision = np.zeros(len(origin)), np.zeros((len(origin), len(origin)))
    linear[~binary], precision[np.ix_(~binary, ~binary)] = continuous
    precision[binary, binary] = 1.0 / (chance * (1.0 - chance))
    linear[binary] = 1.0 / (1.0 - chance)
    return Gaussian(linear, precision)


def draw_prior(parts: _graph.Parts, count: int, seed: int) -> Array:
    """Draws (S, m) of the shared prior on the unconstrained space, for who looks at it.

    Of variables that are defined for some of their draws only, as ordered ones are, there are fewer than `count`.
    """
    if any(term not in parts.shared for term in parts.prior_terms):
        raise DeclarationError("the shared prior has a pm.Potential, from which nothing can be drawn.")
    return _prior_draws(parts, count, seed)


def _prior_draws(parts: _graph.Parts, count: int = _PRIOR_DRAWS, seed: int = 0) -> Array:
    """Draws (S, m) of the shared prior on the unconstrained space."""
    model = parts.model
    values = []
    for rv in parts.shared:
        transform = model.rvs_to_transforms[rv]
        values.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
    try:
        draws = pm.draw(values, draws=count, random_seed=seed, mode=_graph.PYTHON_MODE)
    except NotImplementedError as error:  # a flat one that a potential bounds, or one of the user's own
        names = [rv.name for rv in parts.shared]
        raise DeclarationError(
            f"the shared prior of {names} cannot be drawn from ({error}); the server needs a proper prior that can. "
            "Give every shared variable a distribution of PyMC, for example pm.Normal(0, 10) or pm.HalfNormal(1)."
        ) from error
    flat = np.concatenate([np.reshape(value, (count, -1)) for value in draws], axis=1)
    # An ordered vector is drawn without its order: the draws that happen to have it are the prior's.
    inside = flat[np.all(np.isfinite(flat), axis=1)]
    if len(inside) < 10 * (flat.shape[1] + 1):
        names = [rv.name for rv in parts.shared]
        raise DeclarationError(
            f"only {len(inside)} of {count} draws of the shared prior of {names} lie where its transforms are "
            "defined (an ordered vector?). Give its entries ordered means, or share its increments instead."
        )
    return np.asarray(inside)
