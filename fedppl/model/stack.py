"""Many clients of one template with concatenated arrays, without an object per client.

Some clients are enrolled one by one with all checks. The others have the same model and differ in their rows alone;
their arrays are checked together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import walk
from pytensor.tensor.shape import Shape_i

from fedppl.data.tables import Table
from fedppl.model import graph as _graph
from fedppl.model.checks import held_exactly, place_of
from fedppl.model.client import ClientModel
from fedppl.model.compiled import inlined, vector_kernel, without_notices
from fedppl.model.declaration import FederatedModel
from fedppl.model.same import graph_key
from fedppl.numerics.pairs import Packs
from fedppl.types import Array


@dataclass(frozen=True, eq=False)
class ClientsOf(Mapping[str, ClientModel]):
    """Clients of one table that have one compiled density, by id; a client's model is made on demand."""

    table: Table  # their rows
    declaration: FederatedModel  # what was declared
    like: ClientModel  # an enrolled client of them
    packs: Packs  # their packed arrays
    starts: Array  # starting values of searches for modes of θ, (K, d)
    moments_of: MomentsFn

    def model(self, k: int) -> ClientModel:
        """Model of the client in place k."""
        return self.declaration.with_data(self.like, self.table.client_ids[k], self.table.rows(k))

    def __getitem__(self, client_id: str) -> ClientModel:
        """Make the client's model."""
        return self.model(self.table.places[client_id])

    def __contains__(self, client_id: object) -> bool:
        """Whether there is such a client; no model is made."""
        return client_id in self.table.places

    def __iter__(self) -> Iterator[str]:
        """Ids in the order of their rows."""
        return iter(self.table)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.table)

    def arrays(self) -> dict[str, Any]:
        """Rows of all clients, and where each client's rows begin."""
        return {**self.table.columns, "": self.table.begins}

    def observed(self) -> dict[str, Any]:
        """Observed columns with the rows of all clients."""
        names = sorted(container.name for container in _graph.observed_through(self.like.template.parts))
        return {"begins": self.table.begins, **{name: np.asarray(self.table.columns[name]) for name in names}}

    def moments(self, points: Array, center: Array) -> dict[str, tuple[Array, Array]]:
        """Means and sds (K, ...) at all clients by variable, over points (S, m) of φ with equal weights."""
        counts = self.table.counts
        shapes = _equal_shapes([self.model(int(np.argmin(counts))), self.model(int(np.argmax(counts)))])
        if not shapes:
            return {}
        sizes = [int(np.prod(shape, dtype=int)) for shape in shapes.values()]
        both = self.moments_of(self, _kernel_of(self.like, shapes), sum(sizes), points, center)
        by_variable = zip(
            shapes.items(), *(np.split(array, np.cumsum(sizes)[:-1], axis=1) for array in both), strict=True
        )
        return {name: (mean.reshape(-1, *shape), sd.reshape(-1, *shape)) for (name, shape), mean, sd in by_variable}


# Means and sds (K, r) of a kernel's outputs at (φ, θ), over points (S, m) of φ about a center (m,).
MomentsFn = Callable[[ClientsOf, Callable[..., Any], int, Array, Array], tuple[Array, Array]]


def samples(clients: Mapping[str, Any]) -> Iterable[Any]:
    """Clients for what does not depend on rows: one of a stack, else all."""
    return (clients.like,) if isinstance(clients, ClientsOf) else clients.values()


def why_not(clients: Sequence[ClientModel]) -> str:
    """Why clients like these cannot be one stack, for a log; empty if they can."""
    first = clients[0]
    if any(client.template is not first.template for client in clients) or not first.template.parts.data:
        return "clients do not share one compiled density"
    if first.template.functions.get("own"):
        return "the builder has no pm.Data containers"
    if any(client.local != first.local or client.local_size != first.local_size for client in clients):
        return "numbers of local variables differ from client to client"
    if _graph.indexes_by_data(first.template.graph):
        return "data are indices, which are checked client by client"
    free = len(first.template.graph.free_shapes)
    has_lengths = len(first.inputs) > len(first.template.parts.data) + free
    if has_lengths or (free and _shapes_follow_values(first.template.parts)):
        return "shapes of variables depend on data, and are computed for enrolled clients alone"
    lengths = [{len(np.atleast_1d(v)) for v in client.inputs[: len(client.inputs) - free]} for client in clients]
    if any(len(of_client) > 1 for of_client in lengths):
        return "data are not one row of each array for every observation"
    return ""


def _shapes_follow_values(parts: _graph.Parts) -> bool:
    """Whether the shape of a local variable may depend on values or numbers of rows of data, not on columns alone."""
    inputs, wanted = _graph.initial_graphs(parts)
    of_local = [value.shape for value in wanted[len(parts.shared) :] if value.type.ndim]

    def read(variable: Any) -> Any:
        node = variable.owner
        if node is None or (isinstance(node.op, Shape_i) and node.op.i and node.inputs[0] in inputs):
            return ()  # all clients of a table have the same columns
        return node.inputs

    shapes = rewrite_graph(of_local, include=("ShapeOpt", "canonicalize")) if of_local else ()
    return not set(walk(list(shapes), read)).isdisjoint(inputs)


def stacked(declaration: FederatedModel, table: Table, like: ClientModel, moments_of: MomentsFn) -> ClientsOf:
    """Pack the arrays of all clients of a table.

    Raises `DataError` where a column holds what its container cannot, naming the client.
    """
    parts = like.template.parts
    observed = _graph.observed_through(parts)
    arrays = []
    for container in parts.data:
        column, dtype = np.asarray(table.columns[container.name]), container.type.dtype
        with np.errstate(invalid="ignore"):
            wrong = column.astype(dtype) != column
        if container in observed:
            wrong |= ~np.isfinite(column)
        if np.any(wrong):  # enrolling the client of this row alone raises the error
            k = int(np.searchsorted(table.begins, place_of(wrong)[0], side="right")) - 1
            declaration.enrol({table.client_ids[k]: table.rows(k)})
        arrays.append(np.ascontiguousarray(held_exactly(container.name, column, dtype)))
    starts = np.tile(like.initial, (len(table.client_ids), 1))
    packs = _packed(arrays, table.begins, like.inputs[len(arrays) :])
    return ClientsOf(table, declaration, like, packs, starts, moments_of)


def _packed(arrays: Sequence[Array], begins: NDArray[np.int64], shapes: Sequence[Array]) -> Packs:
    """Pack arrays (N, ...) of all clients as `pack` does one client's, with shapes that all share at the end."""
    count = len(begins) - 1
    columns = [(array, begins) for array in arrays]
    columns += [(np.tile(shape, count), len(shape) * np.arange(count + 1)) for shape in shapes]
    filled = {real: np.zeros(count, dtype=np.int64) for real in (True, False)}
    where, firsts = [], []
    for array, starts in columns:
        real, rows, width = _is_real(array), np.diff(starts), int(np.prod(array.shape[1:], dtype=int))
        firsts.append(filled[real])
        filled[real] = filled[real] + rows * width
        where += [firsts[-1], filled[real], rows, *(np.full(count, n) for n in array.shape[1:])]
    at = {real: np.concatenate([[0], np.cumsum(sizes)]) for real, sizes in filled.items()}
    buffers: dict[bool, Any] = {True: np.zeros(at[True][-1]), False: np.zeros(at[False][-1], dtype=np.int64)}
    for (array, starts), first in zip(columns, firsts, strict=True):
        real, sizes = _is_real(array), starts * int(np.prod(array.shape[1:], dtype=int))
        # Offset of a client's rows: where they begin in its buffer, less where they begin in the table.
        moved = np.repeat(at[real][:-1] + first - sizes[:-1], np.diff(sizes))
        buffers[real][moved + np.arange(sizes[-1])] = array.reshape(-1)
    places = np.ascontiguousarray(np.stack(where, axis=1), dtype=np.int64)
    return Packs(buffers[True], buffers[False], places, np.ascontiguousarray(np.stack([at[True], at[False]], axis=1)))


def _is_real(array: Array) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))


def _equal_shapes(clients: Sequence[ClientModel]) -> dict[str, tuple[int, ...]]:
    """Shapes of local variables and deterministics that are equal at these clients, which no entry per row has."""
    values = [client.constrain(np.zeros((1, client.shared_size)), client.initial) for client in clients]
    first, *others = ({name: value.shape[1:] for name, value in of_client.items()} for of_client in values)
    return {name: shape for name, shape in first.items() if all(shapes[name] == shape for shapes in others)}


def _kernel_of(client: ClientModel, wanted: Collection[str]) -> Callable[..., Any]:
    """Compiled x = (φ, θ), packed data -> all entries of these variables, concatenated."""
    parts, public = client.template.parts, client.template.public.names
    x, inputs, names, outputs = _graph.constrained_graph(parts, client.layout.variables, public, only_shared=False)
    by_name = zip(names, outputs, strict=True)
    flat = [pt.as_tensor(output).ravel().astype("float64") for name, output in by_name if name in wanted]
    graphs = [x, *inputs], [pt.concatenate([pt.zeros(0), *flat])]
    types = [(v.type.dtype, v.type.ndim) for v in inputs]
    with without_notices():
        return vector_kernel(lambda: inlined(*graphs), types, graph_key(*graphs))
