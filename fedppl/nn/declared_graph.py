"""Functions of a declared likelihood: its density cut off the network, and computed row by row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.gradient import NullTypeGradError
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.nn.calls import kind_of
from fedppl.nn.declared import Declared, Read
from fedppl.nn.declared_draws import Drawn
from fedppl.types import DeclarationError

T = TypeVar("T")
# Parameters outside their domain are points without density, not exceptions in the middle of a search.
_MODE = Mode(linker="py", optimizer="fast_compile").including("local_check_parameter_to_ninf_switch")


def read_by(parts: _graph.Parts, given: Mapping[Any, Any], density: Any) -> dict[Any, Read]:
    """Variables that the density of the outcome reads beside network and unknowns, with what a row of each is.

    Containers have the values of `given`; an outcome that is no data is read as it stands in the model.
    """
    observed = parts.model.observed_RVs[0]
    value = parts.model.rvs_to_values[observed]
    above = set(ancestors([density]))
    found = {v: np.asarray(one) for v, one in given.items() if v in above}
    if isinstance(value, Constant):
        found[value] = np.asarray(value.data)
    outcomes = {value, *_graph.observed_through(parts)}
    return {
        v: Read(v.name or observed.name, one.shape[1:], str(one.dtype), v in outcomes, one.ndim > 0)
        for v, one in found.items()
    }


def declared(
    parts: _graph.Parts,
    density: Any,
    output: Any,
    wide: tuple[int, ...],
    read: Mapping[Any, Read],
    unknowns: Mapping[Any, tuple[int, ...]],
    draws: Callable[[], Drawn],
    who: str,
) -> Declared:
    """Build the functions of a likelihood.

    Parameters
    ----------
    parts
        The client's model.
    density
        Log density of the outcome, not summed, as a graph of the variables below.
    output
        What stands for the network's output in it.
    wide
        Shape of a row of the output.
    read
        What else it reads, in the order of the columns.
    unknowns
        Value variables of its unknowns, with the shapes that they have.
    draws
        Builds the functions that draw outcomes.
    who
        The client, in an error's words.

    Raises
    ------
    DeclarationError
        Where a row cannot be computed by itself, or has no slopes.
    """
    observed = parts.model.observed_RVs[0]
    f, e, y = pt.vector("f"), pt.vector("e"), pt.vector("y")
    replace: dict[Any, Any] = {output: f.reshape((1, *wide)), **_lengths_of_one(parts)}
    first = 0
    for value, shape in unknowns.items():
        size = int(np.prod(shape, dtype=int))
        replace[value] = e[first : first + size].reshape(shape)
        first += size
    column = 0
    for value, what in read.items():
        piece = y[column : column + what.width].reshape((1, *what.shape)) if what.by_row else y[column]
        replace[value] = pt.cast(piece, value.type.dtype)
        column += what.width
    try:
        (row,) = clone_replace([-density.sum()], replace, rebuild_strict=False)
        both, told = pt.matrix("both"), pt.matrix("told")
        count = int(np.prod(wide, dtype=int))
        (losses,) = vectorize_graph([row], {f: both[:, :count], e: both[:, count:], y: told})
        losses = pt.broadcast_to(losses, (both.shape[0],))
        slopes = pt.grad(losses.sum(), both)
        rows = [pt.grad(slopes[:, c].sum(), both, disconnected_inputs="ignore") for c in range(count)]
        curved = pt.stack([one[:, :count] for one in rows], axis=1)
        first_order = interpreted.python_function([both, told], [losses, slopes], _MODE)
    except (NotImplementedError, NullTypeGradError, ValueError, TypeError, AssertionError) as error:
        raise DeclarationError(
            f"{who}: the likelihood of {observed.name!r} cannot be computed row by row ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}). For other models use fedppl.EP(local=fedppl.NUTS())."
        ) from error
    curvatures = built_once(lambda: interpreted.python_function([both, told], curved, _MODE))
    return Declared(
        kind_of(observed),
        count,
        tuple(read.values()),
        first_order,
        lambda output, y: np.asarray(curvatures()(output, y)),
        built_once(draws),
    )


def built_once(build: Callable[[], T]) -> Callable[[], T]:
    """What is built at the first call, by one thread for all: not every algorithm has a use for it."""
    known: list[T] = []
    lock = threading.Lock()

    def get() -> T:
        with lock:
            if not known:
                known.append(build())
            return known[0]

    return get


def _lengths_of_one(parts: _graph.Parts) -> dict[Any, Any]:
    """Lengths of dims: of those that count rows, one."""
    lengths = _graph.lengths(parts.model)
    rows = {name for name, place in parts.open.items() if place is not None}
    return {
        parts.model.dim_lengths[name]: pt.constant(np.asarray(1 if name in rows else length))
        for name, length in lengths.items()
    }
