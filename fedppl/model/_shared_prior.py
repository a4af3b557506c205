"""Layout and prior of what clients share: the exact Gaussian, or one with its moments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.logprob.utils import ParameterValueError

from fedppl.gaussian import Gaussian
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model._prior_draws import EACH, unconstrained
from fedppl.model._template import Template, kernel_of
from fedppl.model.fingerprint import fingerprint, probes
from fedppl.numerics.kernels import NO_DATA
from fedppl.numerics.pairs import site_outputs
from fedppl.numerics.prior import SharedPrior, gaussian_prior, moment_match
from fedppl.settings import some_of
from fedppl.types import Array, DeclarationError, Layout, Variable

_PRIOR_DRAWS = 4000


def shared_layout(
    template: Template, variables: tuple[Variable, ...], initial: list[Array]
) -> tuple[Layout, SharedPrior]:
    """Layout and prior of the shared parameters, once per declaration."""
    origin = np.concatenate([np.ravel(value).astype(float) for value in initial])
    key = ("layout", variables, origin.tobytes())
    return template.of_declaration(key, lambda: _layout(template.parts, variables, origin))


def _layout(parts: _graph.Parts, variables: tuple[Variable, ...], origin: Array) -> tuple[Layout, SharedPrior]:
    _refuse_flat(parts)
    graph = _graph.prior_graph(parts, variables)
    phi, logp = graph.x, graph.logp
    of_points, slopes = _interpreted(phi, logp)

    def gradient(point: Array) -> Array:
        return np.asarray(slopes(point[None])[0])

    _require_density(parts, variables, origin, of_points)
    sizes = [variable.size for variable in variables]
    binary = np.repeat([variable.binary for variable in variables], sizes)
    owners = np.repeat([variable.name for variable in variables], sizes)
    exact = _gaussian_beside_binary(of_points, gradient, origin, binary, owners)
    n0 = exact if exact is not None else moment_match(_draws(parts, len(origin)))
    kernel = functools.cache(lambda: kernel_of(graph))
    many_calls = len(origin) > _INTERPRETED and exact is None
    log_density, gradients = _compiled(kernel) if many_calls else (of_points, slopes)
    prior = SharedPrior(
        log_density=log_density,
        gradient=gradient,
        gaussian=n0,
        is_gaussian=exact is not None,
        gradients=gradients,
        kernel=kernel,
    )
    density = tuple(float(value) for value in of_points(probes(variables, n0)))
    told = fingerprint(variables, n0, exact is not None, density)
    return Layout(variables, n0, exact is not None, told, density), prior


def _draws(parts: _graph.Parts, size: int) -> Array:
    """Draws that are enough for moments of `size` shared numbers."""
    if _PRIOR_DRAWS < EACH * (size + 1):
        names = [rv.name for rv in parts.shared if getattr(rv.owner.op, "name", None) not in ("normal", "lognormal")]
        raise DeclarationError(
            f"{size} numbers are shared, and the prior of {some_of(names or [rv.name for rv in parts.shared])} is not "
            f"normal: then moments of {_PRIOR_DRAWS} draws stand in for the prior of all, which do for "
            f"{_PRIOR_DRAWS // EACH - 1} numbers. Declare what is shared by pm.Normal, and scales by pm.LogNormal, or "
            "share less."
        )
    return unconstrained(parts, _PRIOR_DRAWS, 0)


def _require_density(parts: _graph.Parts, variables: tuple[Variable, ...], origin: Array, log_density: _AtMany) -> None:
    """Refuse a prior that has no density where it starts, and name the variables that have none."""
    value = float(log_density(origin[None])[0])
    if np.isfinite(value):
        return
    odd = []
    for term in parts.prior_terms:
        graph = _graph.prior_graph(parts._replace(prior_terms=(term,)), variables)
        alone = _interpreted(graph.x, graph.logp)[0](origin[None])
        odd += [] if np.isfinite(alone[0]) else [term.name]
    raise DeclarationError(
        f"the shared prior's log density at the starting point is {value}, by {odd or 'all together'}; is a scale not "
        "positive, the start outside of the support, or a limit a whole number that overflows (write -100.0 for -100)? "
        "Correct the prior, or set `initval=` on the variable."
    )


# With more shared coordinates than this, many calls of an interpreted prior take longer than compiling it once.
_INTERPRETED = 30
_FEW = 32  # points, for which a gradient that nobody asks for costs less than a function without it
_AtMany = Callable[[Array], Array]  # (S, m) to (S,) or (S, m)


def _interpreted(phi: Any, logp: Any) -> tuple[_AtMany, _AtMany]:
    """log p(φ) and its gradient at many φ, of one vectorised function; nothing is compiled."""
    slopes = pt.grad(logp, phi, disconnected_inputs="ignore")
    both = interpreted.batched(phi, [], [logp, slopes], interpreted.AS_WRITTEN)
    alone = functools.cache(lambda: interpreted.batched(phi, [], [logp]))  # a gradient takes PyTensor a loop over rows
    return (
        lambda draws: _by_row(both if len(draws) <= _FEW else alone(), 0, draws, -np.inf),
        lambda draws: _by_row(both, 1, draws, np.nan),
    )


def _compiled(kernel: Callable[[], Callable[..., Any]]) -> tuple[_AtMany, _AtMany]:
    """The same by a loop that is compiled at its first call."""

    def both(draws: Array) -> Array:
        return site_outputs(kernel(), np.asarray(draws, dtype=np.float64), NO_DATA)

    return lambda draws: both(draws)[:, 0], lambda draws: both(draws)[:, 1:]


def _by_row(function: Callable[..., list[Array]], which: int, draws: Array, outside: float) -> Array:
    """One of both at draws (S, m); where one of these has a parameter outside its domain, each by itself."""
    try:
        return function(draws)[which]
    except ParameterValueError:
        if len(draws) == 1:
            return np.full(draws.shape if which else 1, outside)
        return np.concatenate([_by_row(function, which, row[None], outside) for row in draws])


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
