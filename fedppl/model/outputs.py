"""What a client's θ stands for, as one vector that loops can compute: local variables and deterministics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt

from fedppl.model import graph as _graph
from fedppl.model.client import ClientModel
from fedppl.model.graph_key import graph_key
from fedppl.model.numba_mode import inlined, mode, without_notices
from fedppl.model.pack import vector_kernel


class Outputs(NamedTuple):
    """Variables whose shapes are the same at all clients."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kernel: Callable[..., Any]  # of x = (φ, θ) and a client's packed data: all entries, one after the other


def outputs_of(clients: Sequence[ClientModel]) -> Outputs:
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
