r"""Outcomes of a declared network at outputs that it may have: draws of them, and their means.

.. math:: y_n \sim p(y \mid f_n, e), \qquad E[y_n \mid f_n, e]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.distributions.moments import mean as mean_of
from pymc.exceptions import UndefinedMomentException
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.type import RandomType

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.nn.calls import one_call
from fedppl.types import Array


class Drawn(NamedTuple):
    """Functions of outputs with unknowns (n, C + e), and of what else the likelihood reads, by name."""

    draw: Callable[[Array, Mapping[str, Array], np.random.Generator], Array]  # outcomes (n, ...)
    # Means (n, ...), or probabilities (n, classes) of a categorical one; None where PyMC knows none, or there is none.
    mean: Callable[[Array, Mapping[str, Array]], Array] | None
    has_moments: bool  # a Cauchy's outcomes have no mean and no sd: those of draws are of the draws alone


def drawn(
    parts: _graph.Parts,
    wide: tuple[int, ...],
    unknowns: Mapping[Any, tuple[int, ...]],
    outcomes: Mapping[Any, tuple[int, ...]],
) -> Drawn:
    """Build the functions, of outputs of which a row is so `wide`.

    `unknowns` are free variables of the likelihood with the shapes of their values, `outcomes` containers with the
    shape of a row: PyMC reads off them how many there are to draw.
    """
    model = parts.model
    observed = model.observed_RVs[0]
    both = pt.matrix("both")
    count = int(np.prod(wide, dtype=int))
    given = {v: pt.TensorType(v.type.dtype, shape=(None,) * v.type.ndim)(v.name) for v in parts.data}
    means, has_moments = _mean(observed)
    wanted = [observed, *([] if means is None else [means])]
    output = both[:, :count].reshape((both.shape[0], *wide))
    replace: dict[Any, Any] = dict.fromkeys(one_call(wanted), output)
    for container, shape in outcomes.items():
        if container in given:
            replace[container] = pt.zeros((both.shape[0], *shape), dtype=container.type.dtype)
    for name, length in _graph.lengths(model).items():
        is_rows = parts.open.get(name) is not None
        replace[model.dim_lengths[name]] = both.shape[0] if is_rows else pt.constant(np.asarray(length))
    first = count
    for rv, shape in unknowns.items():
        size = int(np.prod(shape, dtype=int))
        piece = both[0, first : first + size].reshape(shape)
        (constrained,) = model.replace_rvs_by_values([rv])
        replace[rv] = clone_replace([constrained], {model.rvs_to_values[rv]: piece}, rebuild_strict=False)[0]
        first += size
    # Calls of the network first: with other containers above them they would no longer be these calls.
    found = clone_replace(clone_replace(wanted, replace, rebuild_strict=False), given, rebuild_strict=False)
    used = [v for v in given if given[v] in set(ancestors(found))]
    inputs = [both, *(given[v] for v in used)]
    names = tuple(v.name for v in used)
    mean = None
    if means is not None:
        compute = interpreted.python_function(inputs, found[1])

        def mean(outputs: Array, others: Mapping[str, Array]) -> Array:
            return np.asarray(compute(outputs, *(others[name] for name in names)))

    return Drawn(_draw(inputs, found[0], names), mean, has_moments)


def _mean(observed: Any) -> tuple[Any, bool]:
    """A graph of the mean, of a categorical outcome its probabilities; and whether there is a mean."""
    if getattr(observed.owner.op, "name", None) == "categorical":
        return observed.owner.op.dist_params(observed.owner)[-1], True
    try:
        return mean_of(observed), True
    except UndefinedMomentException:
        return None, False
    except NotImplementedError:
        return None, True


def _draw(inputs: Sequence[Any], outcome: Any, names: tuple[str, ...]) -> Callable[..., Array]:
    """A function with generators of its own: those of the user's model are left alone."""
    generators = [v for v in ancestors([outcome]) if isinstance(v.type, RandomType) and v.owner is None]
    own = [pytensor.shared(np.random.default_rng(0)) for _ in generators]
    (outcome,) = clone_replace([outcome], dict(zip(generators, own, strict=True)), rebuild_strict=False)
    compute, lock = interpreted.python_function(inputs, outcome), threading.Lock()

    def draw(outputs: Array, others: Mapping[str, Array], rng: np.random.Generator) -> Array:
        with lock:
            for one, child in zip(own, rng.spawn(len(own)), strict=True):
                one.set_value(child)
            return np.asarray(compute(outputs, *(others[name] for name in names)))

    return draw
