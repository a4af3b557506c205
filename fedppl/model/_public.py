"""Which deterministics and labels of dims may leave a client, since they contain none of its data.

A site has the build of one client only, so nothing here compares clients. The builder is called again with other data
of the same kind: a number that changes with them came from data. Numbers from elsewhere (a global table, a file) do not
change, so a constant array is trusted only if its pattern determines it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model import same as _same
from fedppl.model.graph import is_mask
from fedppl.types import Variable

Arrays = Mapping[str, Any]
Built = tuple[_graph.Parts, ...] | None  # models on altered data; None where the builder fails on some of them


class Public(NamedTuple):
    """Names of deterministics that may be in the shared result, and of those withheld; dims likewise."""

    names: tuple[str, ...]
    withheld: tuple[str, ...]
    labelled: tuple[str, ...]
    unlabelled: tuple[str, ...]


def _more_rows(value: Any) -> Any:
    return value if np.ndim(value) == 0 else np.concatenate([value, value[: (len(value) + 1) // 2]])


def _moved(value: Any, *, up: bool) -> Any:
    """Reals move apart, and up or down past zero; integers go to their largest or smallest."""
    if not is_whole(value):
        return value + _steps(value) if up else -1.3 * value - _steps(value)
    same = np.full_like(value, np.max(value) if up else np.min(value))
    if not np.array_equal(same, value):
        return same
    return ~value if value.dtype == bool else value + 1


def is_whole(value: Any) -> bool:
    """Whether numbers are whole, in any type."""
    return value.dtype.kind != "f" or bool(np.all(value == np.floor(value)))


def _steps(value: Any) -> Any:
    """Positive numbers of the size of the largest value, no two alike."""
    finite = np.abs(value[np.isfinite(value)])
    size = float(np.max(finite, initial=0.0)) or 1.0
    return size * (0.2 + 0.6 * np.random.default_rng(0).random(np.shape(value))).astype(value.dtype)


def rebuilt(build: Callable[[Arrays], _graph.Parts], arrays: Arrays) -> Built:
    """Models on other data of the same kind: moved down, with more rows, and moved up.

    Arrays change together where the builder allows it, else one at a time. Integers keep their range, since they may be
    indices, and rows are repeated rather than dropped.
    """
    models: list[_graph.Parts] = []
    more = {name: _more_rows(value) for name, value in arrays.items()}
    low, high = ({k: _moved(np.asarray(value), up=up) for k, value in arrays.items()} for up in (False, True))
    each_low, each_high = ([{**arrays, name: value} for name, value in moved.items()] for moved in (low, high))
    low_and_more = {name: _more_rows(value) for name, value in low.items()}
    for ways in (([low_and_more], [more, low], [more, *each_low]), ([high], each_high)):
        for tried in ways:
            built_here = [parts for changed in tried if (parts := attempt(build, changed)) is not None]
            if len(built_here) == len(tried):
                models += built_here
                break
        else:
            return None
    return tuple(models)


def attempt(build: Callable[[Arrays], _graph.Parts], arrays: Arrays) -> _graph.Parts | None:
    """Build a model on a copy of other data, without warnings; None where the builder fails on them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build({name: np.array(value) for name, value in arrays.items()})
    except Exception:  # the builder may refuse made-up data
        return None


def prior_of_data(parts: _graph.Parts, shared: tuple[Variable, ...], built: Built) -> bool:
    """Whether the shared prior changes with altered data."""
    for other in built or ():
        try:
            if not _same.same_prior(parts, other, shared):
                return True
        except (TypeError, ValueError):  # shapes that follow data: layouts of clients are compared elsewhere
            continue
    return False


def read_public(parts: _graph.Parts, shared: tuple[Variable, ...], rebuild: Callable[[], Built]) -> Public:
    """Decide what may leave a client; `rebuild` is called only where needed."""
    model = parts.model
    candidates = {v.name: v for v in _graph.computed_from_shared(parts)}
    plain = [name for name, v in candidates.items() if _holds_no_array(model, v)]
    dims = _dims_of(model, [*(v.name for v in shared), *plain])
    if not plain and all(_counts(model.coords[dim]) for dim in dims):
        return Public((), tuple(candidates), tuple(dims), ())
    built = rebuild()
    outputs = _outputs(parts, shared, plain)
    names = [name for name in plain if outputs and built is not None and _unchanged(name, outputs, built, shared)]
    dims = _dims_of(model, [*(v.name for v in shared), *names])
    labelled = [
        dim
        for dim in dims
        if _counts(model.coords[dim])
        or (built is not None and all(list(model.coords[dim]) == list(o.model.coords.get(dim) or ()) for o in built))
    ]
    return Public(
        tuple(names),
        tuple(name for name in candidates if name not in names),
        tuple(labelled),
        tuple(dim for dim in dims if dim not in labelled),
    )


def _dims_of(model: Any, names: Iterable[str]) -> list[str]:
    dims = {dim: None for name in names for dim in model.named_vars_to_dims.get(name) or ()}
    return [dim for dim in dims if model.coords.get(dim) is not None]


def _counts(labels: Any) -> bool:
    """Whether labels are 0, 1, 2, ..., and disclose only their number."""
    return list(labels) == list(range(len(labels)))


Outputs = tuple[Any, dict[str, Any]]


def _outputs(parts: _graph.Parts, shared: tuple[Variable, ...], names: list[str]) -> Outputs | None:
    try:
        x, _, names_found, outputs = _graph.constrained_graph(parts, shared, names, only_shared=True)
    except (TypeError, ValueError):
        return None
    return x, dict(zip(names_found, outputs, strict=True))


def _unchanged(name: str, outputs: Outputs, built: tuple[_graph.Parts, ...], shared: tuple[Variable, ...]) -> bool:
    for parts in built:
        other = _outputs(parts, shared, [name])
        if other is None or name not in other[1]:
            return False
        if not _same.same_computations([outputs[1][name]], [other[1][name]], [outputs[0]], [other[0]]):
            return False
    return True


def _holds_no_array(model: Any, deterministic: Any) -> bool:
    """Whether a graph contains only φ, numbers, and arrays that are determined by their pattern."""
    (output,) = model.replace_rvs_by_values([deterministic])
    known = {*model.rvs_to_values.values(), *model.dim_lengths.values()}
    return _plain_graph([output], known)


def _plain_graph(outputs: list[Any], known: set[Any]) -> bool:
    for variable in ancestors(outputs):
        node = variable.owner
        if node is None:
            if variable not in known and not (isinstance(variable, Constant) and _is_plain(variable.data)):
                return False
            continue
        if not type(node.op).__module__.startswith(("pytensor.", "pymc.")) or hasattr(node.op, "fn"):
            return False  # an Op of another package may contain data
        inner = getattr(node.op, "fgraph", None)
        if inner is not None and not _plain_graph(list(inner.outputs), {*inner.inputs}):
            return False
    return True


def _is_plain(data: Any) -> bool:
    """Whether a constant is a single number, or an array that its size and two numbers determine."""
    if data is None or isinstance(data, slice | str):
        return True
    array = np.asarray(data)
    if array.dtype.kind not in "biuf":
        return False
    if array.size <= 1 or np.all(array == array.flat[0]) or is_mask(array):
        return True
    if array.ndim != 1 or array.dtype == bool:
        return False
    steps = np.diff(array)
    if len(array) < 4:  # two or three numbers are nearly always a sequence
        return bool(np.all(steps == 1) and array[0] in (0, 1)) or _is_triangular(array)
    return bool(np.allclose(steps, steps[0], rtol=1e-9, atol=0.0)) or _is_triangular(array)


def _is_triangular(array: Any) -> bool:
    """Whether an array has the rows, columns or diagonal of a packed triangle, as PyMC's Cholesky factors do."""
    for n in range(2, len(array) + 1):
        triangles = (*np.tril_indices(n), *np.triu_indices(n), np.arange(1, n + 1).cumsum() - 1)
        if any(np.array_equal(array, indices) for indices in triangles):
            return True
        if n * (n + 1) // 2 > len(array) and n > len(array):
            break
    return False
