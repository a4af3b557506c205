"""Many clients of one template, their arrays one after the other: what a model of each would hold, without an object
for each.

Some of the clients are enrolled one by one, with all checks; what these share, and what may differ from client to
client only by rows, holds for the others, whose arrays are checked as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.tensor.shape import Shape_i

from fedppl.data.tables import Table
from fedppl.model import graph as _graph
from fedppl.model.checks import held_exactly
from fedppl.model.client import ClientModel
from fedppl.model.compiled import inlined, mode, vector_kernel, without_notices
from fedppl.model.declaration import FederatedModel
from fedppl.model.same import graph_key
from fedppl.numerics.pairs import Packs
from fedppl.types import Array, DataError, Layout


@dataclass(frozen=True, eq=False)
class Stack:
    """Clients that have one compiled density."""

    table: Table  # their rows
    declaration: FederatedModel  # what was declared
    like: ClientModel  # one of them, enrolled
    packs: Packs  # their arrays as the kernel reads them
    starts: Array  # where searches for modes of θ begin, (K, d)

    @property
    def client_ids(self) -> tuple[str, ...]:
        """Ids in the order of the rows."""
        return self.table.client_ids

    @property
    def layout(self) -> Layout:
        """The shared layout."""
        return self.like.layout

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.table.client_ids)

    def some(self, places: Sequence[int] | NDArray[np.int64]) -> Sequence[ClientModel]:
        """Clients at these places as others know them."""
        return [self.model(int(k)) for k in places]

    def model(self, k: int) -> ClientModel:
        """The client in place k as others know it."""
        return self.declaration.with_data(self.like, self.table.client_ids[k], self.table.rows(k))


# Means and sds (K, r) of what a kernel makes of (φ, θ), over points (S, m) of φ about a center (m,).
MomentsFn = Callable[[Stack, Callable[..., Any], int, Array, Array], tuple[Array, Array]]


class ClientsOf(Mapping[str, ClientModel]):
    """Clients of a stack by id; each is made when it is asked for. `moments` computes those of all at once."""

    def __init__(self, stack: Stack, moments: MomentsFn) -> None:
        self._stack, self._moments = stack, moments
        self._where = {client_id: k for k, client_id in enumerate(stack.table.client_ids)}

    def __getitem__(self, client_id: str) -> ClientModel:
        """Make the client."""
        return self._stack.model(self._where[client_id])

    def __contains__(self, client_id: object) -> bool:
        """Whether there is such a client; none is made."""
        return client_id in self._where

    def __iter__(self) -> Iterator[str]:
        """Ids in their order."""
        return iter(self._stack.table.client_ids)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._where)

    @property
    def like(self) -> ClientModel:
        """One of them, that was enrolled."""
        return self._stack.like

    @property
    def stack(self) -> Stack:
        """All of them, side by side."""
        return self._stack

    def arrays(self) -> dict[str, Any]:
        """All their rows, and where each one's begin."""
        return {**self._stack.table.columns, "": self._stack.table.begins}

    def observed(self) -> dict[str, Any]:
        """Columns that are observed, with a row for each of all clients'."""
        parts, table = self._stack.like.template.parts, self._stack.table
        names = sorted(container.name for container in _graph.observed_through(parts))
        return {"begins": table.begins, **{name: np.asarray(table.columns[name]) for name in names}}

    def moments(self, points: Array, center: Array) -> dict[str, tuple[Array, Array]]:
        """By variable the means and sds (K, ...) at all clients, over points (S, m) of φ with equal weights."""
        counts = self._stack.table.counts
        outputs = _outputs_of(self._stack.some([int(np.argmin(counts)), int(np.argmax(counts))]))
        if not outputs.names:
            return {}
        sizes = [int(np.prod(shape, dtype=int)) for shape in outputs.shapes]
        found = self._moments(self._stack, outputs.kernel, sum(sizes), points, center)
        ends = np.cumsum(sizes)[:-1]
        of = zip(outputs.names, outputs.shapes, *(np.split(one, ends, axis=1) for one in found), strict=True)
        return {name: (mean.reshape(-1, *shape), sd.reshape(-1, *shape)) for name, shape, mean, sd in of}


def samples(clients: Mapping[str, Any]) -> Iterable[Any]:
    """Clients that tell what does not hang on rows: of those that lie side by side one, else all."""
    return (clients.like,) if isinstance(clients, ClientsOf) else clients.values()


def why_not(clients: Sequence[ClientModel]) -> str:
    """What keeps clients like these from being one stack, in the words of a log; nothing where nothing does."""
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
    if len(first.inputs) > len(first.template.parts.data) + free or (
        free and _shapes_follow_values(first.template.parts)
    ):
        return "shapes of variables depend on data, which of clients that are not enrolled nobody computes"
    if any(
        len({len(np.atleast_1d(one)) for one in client.inputs[: len(client.inputs) - free]}) > 1 for client in clients
    ):
        return "data are not one row of each array for every observation"
    return ""


def _shapes_follow_values(parts: _graph.Parts) -> bool:
    """Whether the shape of a local variable may depend on what data hold, or on how many rows, not on columns alone."""
    inputs, wanted = _graph.initial_graphs(parts)
    of_local = [value.shape for value in wanted[len(parts.shared) :] if value.type.ndim]
    waiting, seen = list(rewrite_graph(of_local, include=("ShapeOpt", "canonicalize")) if of_local else ()), set()
    while waiting:
        variable = waiting.pop()
        if variable in inputs:
            return True
        node = variable.owner
        if variable in seen or node is None:
            continue
        if isinstance(node.op, Shape_i) and node.op.i and node.inputs[0] in inputs:
            continue  # all clients of a table have as many columns
        seen.add(variable)
        waiting.extend(node.inputs)
    return False


def stacked(declaration: FederatedModel, table: Table, like: ClientModel) -> Stack:
    """Put clients' arrays one after the other, as the kernel reads them.

    Raises `DataError` where a column holds what its container cannot, naming the client.
    """
    parts = like.template.parts
    observed = _graph.observed_through(parts)
    held = []
    for container in parts.data:
        column = np.asarray(table.columns[container.name])
        if container in observed and not np.all(np.isfinite(column)):
            _refuse(declaration, table, int(np.argwhere(~np.isfinite(column))[0][0]))
        try:
            cast = held_exactly(container.name, column, container.type.dtype)
        except DataError:
            with np.errstate(invalid="ignore"):
                odd = np.argwhere(column.astype(container.type.dtype) != column)
            _refuse(declaration, table, int(odd[0][0]))
            raise
        held.append(np.ascontiguousarray(cast))
    starts = np.tile(like.initial, (len(table.client_ids), 1))
    return Stack(table, declaration, like, _packed(held, table.begins, like.inputs[len(held) :]), starts)


def _refuse(declaration: FederatedModel, table: Table, row: int) -> None:
    """Have the client of a row refused with the words of whoever enrols it alone."""
    k = int(np.searchsorted(table.begins, row, side="right")) - 1
    declaration.enrol({table.client_ids[k]: table.rows(k)})


def _packed(held: Sequence[Array], begins: NDArray[np.int64], shapes: Sequence[Array]) -> Packs:
    """Arrays (N, ...) of all clients as `pack` packs one client's, each followed by shapes that all have alike."""
    count, rows = len(begins) - 1, np.diff(begins)
    kinds = [bool(np.issubdtype(array.dtype, np.floating)) for array in held]
    widths = [int(np.prod(array.shape[1:], dtype=int)) for array in held]
    filled = {True: np.zeros(count, dtype=np.int64), False: np.zeros(count, dtype=np.int64)}
    where, firsts = [], []
    for array, real, width in zip(held, kinds, widths, strict=True):
        firsts.append(filled[real])
        where += [filled[real], filled[real] + rows * width, rows, *(np.full(count, n) for n in array.shape[1:])]
        filled[real] = filled[real] + rows * width
    alike = np.concatenate([np.zeros(0, dtype=np.int64), *shapes])
    begin = filled[False]
    for shape in shapes:
        where += [filled[False], filled[False] + len(shape), np.full(count, len(shape))]
        filled[False] = filled[False] + len(shape)
    at = {real: np.concatenate([[0], np.cumsum(filled[real])]) for real in (True, False)}
    reals, integers = np.zeros(at[True][-1]), np.zeros(at[False][-1], dtype=np.int64)
    for array, real, width, first in zip(held, kinds, widths, firsts, strict=True):
        # A client's rows stay together: where they begin in its buffer, less where they begin in the table.
        moved = np.repeat(at[real][:-1] + first - begins[:-1] * width, rows * width)
        (reals if real else integers)[moved + np.arange(begins[-1] * width)] = array.reshape(-1)
    integers[(at[False][:-1] + begin)[:, None] + np.arange(len(alike))] = alike
    places = np.stack(where, axis=1)
    return Packs(
        reals,
        integers,
        np.ascontiguousarray(places, dtype=np.int64),
        np.ascontiguousarray(np.stack([at[True], at[False]], axis=1)),
    )


class Outputs(NamedTuple):
    """Variables whose shapes are the same at all clients."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kernel: Callable[..., Any]  # of x = (φ, θ) and a client's packed data: all entries, one after the other


def _outputs_of(clients: Sequence[ClientModel]) -> Outputs:
    """Local variables and deterministics of clients like these, but those that have an entry for each row."""
    first = clients[0]
    shapes = [
        {name: value.shape[1:] for name, value in one.constrain(np.zeros((1, one.shared_size)), one.initial).items()}
        for one in clients
    ]
    parts, shared = first.template.parts, first.layout.variables
    x, inputs, names, outputs = _graph.constrained_graph(
        parts, shared, first.local, first.template.public.names, only_shared=False
    )
    told = [name for name in names if all(one[name] == shapes[0][name] for one in shapes)]
    flat = [pt.as_tensor(one).ravel().astype("float64") for n, one in zip(names, outputs, strict=True) if n in told]
    vector = pt.concatenate([pt.zeros(0), *flat])

    def compiled() -> tuple[Callable[..., Any], bool]:
        return inlined(pytensor.function([x, *inputs], [vector], mode=mode(), on_unused_input="ignore").vm.jit_fn)

    types = [(v.type.dtype, v.type.ndim) for v in inputs]
    with without_notices():
        kernel = vector_kernel(compiled, types, graph_key([x, *inputs], [vector]))
    return Outputs(tuple(told), tuple(shapes[0][name] for name in told), kernel)
