"""Draws of what clients share from its prior, on the unconstrained space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.custom import CustomDistRV, CustomSymbolicDistRV
from pymc.distributions.shape_utils import change_dist_size
from pymc.distributions.transforms import Ordered
from pytensor.graph.basic import Constant
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.op import RandomVariable

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.quiet import quiet
from fedppl.types import Array, DeclarationError

EACH = 10  # draws for each shared number, and ten more, of which moments can be taken


def draw_prior(parts: _graph.Parts, count: int, seed: int) -> Array:
    """Draws (S, m) of the shared prior on the unconstrained space, for who looks at it.

    Of variables that are defined for some of their draws only, as ordered ones are, there are fewer than `count`.
    """
    if any(term not in parts.shared for term in parts.prior_terms):
        raise DeclarationError("the shared prior has a pm.Potential, from which nothing can be drawn.")
    return unconstrained(parts, count, seed)


def unconstrained(parts: _graph.Parts, count: int, seed: int) -> Array:
    """Draws (S, m) of the shared variables, a pm.Potential among their terms left out."""
    model = parts.model
    values = []
    for rv in parts.shared:
        transform = model.rvs_to_transforms[rv]
        alone = isinstance(transform, Ordered) and not any(rv in ancestors(one.owner.inputs) for one in parts.shared)
        drawn = pt.sort(rv, axis=-1) if alone and _has_like_entries(rv) else rv
        values.append(rv if transform is None else transform.forward(drawn, *rv.owner.inputs))
    try:
        with quiet():
            draws = _at_once(values, parts.shared, count, seed)
            if draws is None:
                draws = pm.draw(values, draws=count, random_seed=seed, mode=interpreted.PYTHON_MODE)
    except NotImplementedError as error:  # a flat one that a potential bounds, or one of the user's own
        names = [rv.name for rv in parts.shared]
        raise DeclarationError(
            f"the shared prior of {names} cannot be drawn from ({error}); the server needs a proper prior that can. "
            "Give every shared variable a distribution of PyMC, for example pm.Normal(0, 10) or pm.HalfNormal(1)."
        ) from error
    flat = np.concatenate([np.reshape(value, (count, -1)) for value in draws], axis=1)
    # An ordered vector whose entries differ, or that others depend on, is drawn without its order: draws that happen
    # to have it are the prior's.
    inside = flat[np.all(np.isfinite(flat), axis=1)]
    if len(inside) < min(count, EACH * (flat.shape[1] + 1)):
        names = [rv.name for rv in parts.shared]
        raise DeclarationError(
            f"only {len(inside)} of {count} draws of the shared prior of {names} lie where its transforms are "
            "defined (an ordered vector?). Give its entries ordered means, or share its increments instead."
        )
    return np.asarray(inside)


def _has_like_entries(rv: Any) -> bool:
    """Whether entries along the last axis are independent and of one distribution: ordered ones are those sorted."""
    op = rv.owner.op
    if not isinstance(op, RandomVariable) or op.ndim_supp or any(op.ndims_params):
        return False
    for one in op.dist_params(rv.owner):
        if (
            one.type.ndim
            and not one.type.broadcastable[-1]
            and not (isinstance(one, Constant) and np.all(one.data == one.data[..., :1]))
        ):
            return False
    return True


def _at_once(values: list[Any], rvs: tuple[Any, ...], count: int, seed: int) -> list[Array] | None:
    """All draws in one call, ten times as fast; None where a distribution is the user's own or cannot be so drawn."""
    if any(isinstance(rv.owner.op, CustomDistRV | CustomSymbolicDistRV) for rv in rvs):
        return None
    many: dict[Any, Any] = {}
    try:
        for rv in rvs:  # one that depends on others is as many as they are
            if {*rvs}.isdisjoint(ancestors(rv.owner.inputs)):
                many[rv] = change_dist_size(rv, (count,), expand=True)
        drawn = pm.draw(vectorize_graph(values, many), random_seed=seed, mode=interpreted.PYTHON_MODE)
    except (NotImplementedError, TypeError, ValueError):
        return None
    shapes = [(np.shape(one)[:1], np.ndim(one) - 1) for one in drawn]
    return drawn if shapes == [((count,), value.type.ndim) for value in values] else None
