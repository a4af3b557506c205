"""What is declared, from the user's builder to templates: models of clients, built and taken apart."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
from pymc.logprob.abstract import _logprob
from pymc.logprob.transforms import Transform
from pytensor.graph.basic import Constant

from fedppl.model import graph as _graph
from fedppl.model import same as _same
from fedppl.model._covariance_root import SdsAndPartials, with_sds
from fedppl.model._template import Template, make_once
from fedppl.model.enrolment import containers, mismatch, require_arguments
from fedppl.model.graph_key import Untold, graph_key, named, told
from fedppl.types import Array, DataError, DeclarationError, Variable


class Declared(NamedTuple):
    """The user's builder, the names of the free variables that all clients share, and the kind of clients it is of."""

    builder: Callable[..., Any]
    shared: tuple[str, ...]
    kind: str = ""


def built(builder: Callable[..., Any], client_id: str, arrays: Mapping[str, Any]) -> Any:
    """Call the builder on one client's data; its errors name the client."""
    require_arguments(client_id, builder, arrays)
    try:
        model = builder(**arrays)
        if isinstance(model, pm.Model):
            with_sds(model)
        return model
    except DeclarationError as error:  # the builder's own word on its settings
        raise DeclarationError(f"client {client_id!r}: {error}") from error
    except Exception as error:
        shapes = {name: np.shape(value) for name, value in arrays.items()}
        remedy = "Check this client's data against the builder's arguments."
        reals = [name for name, value in arrays.items() if np.asarray(value).dtype.kind == "f"]
        if isinstance(error, TypeError) and "integers" in str(error) and reals:
            remedy = f"Of reals there are {', '.join(map(repr, reals))}: give as integers what is an index."
        if "Size length is incompatible" in str(error):
            remedy = (
                "Outcomes have fewer axes than a parameter of their distribution: give outcomes with as many, (n, 1) "
                "beside an output (n, 1), or take a column of it, f[:, 0]."
            )
        if twice := [name for name in arrays if f"Variable name {name} already exists" in str(error)]:
            remedy = f"pm.Data({twice[0]!r}) has that name, as the data do: call the other variable something else."
        raise DataError(
            f"client {client_id!r}: the builder failed on data of shapes {shapes}: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. {remedy}"
        ) from error


def parts_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> _graph.Parts:
    """Build a client's model and sort it; its containers have to be named like the data."""
    model = built(declared.builder, client_id, arrays)
    try:
        parts = _graph.dissect(model, declared.shared)
    except DeclarationError as error:
        raise DeclarationError(f"client {client_id!r}: {error}") from None
    names = {variable.name for variable in parts.data}
    if names and names != set(arrays):
        extra, absent = sorted(set(arrays) - names), sorted(names - set(arrays))
        raise DataError(
            f"client {client_id!r}: data keys {sorted(arrays)} do not match the model's pm.Data containers "
            f"{sorted(names)}"
            + (f"; {extra} match no container" if extra else "")
            + (f"; {absent} have no data" if absent else "")
            + ". Name each container like the builder's argument it holds."
        )
    for container in parts.data:
        _require_as_given(client_id, container, np.asarray(arrays[container.name]))
    return parts


def _require_as_given(client_id: str, container: Any, given: Array) -> None:
    """A client's data are put into the containers, whatever the builder put there: it may not be something else."""
    held = np.asarray(container.get_value())
    if held.shape == given.shape and np.allclose(held, given, rtol=1e-6, atol=0.0):
        return
    name = container.name
    raise DataError(
        f"client {client_id!r}: the builder puts other values into pm.Data({name!r}) than the data {name!r} have, and "
        f"those would be lost. Hold the data as they are, {name} = pm.Data({name!r}, {name}), and compute from that, "
        "or change the data before the fit."
    )


def template_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> Template:
    """Build a client's model alone."""
    parts = parts_of(declared, client_id, arrays)
    return opened(client_id, arrays, parts, _graph.open_lengths(parts))


def opened(
    client_id: str, arrays: Mapping[str, Any], parts: _graph.Parts, lengths: Mapping[str, int | None]
) -> Template:
    """Template of a model in which these lengths are a client's own."""
    parts = parts._replace(open=lengths)
    made = made_of(parts)
    start = make_once(made, "start", lambda: _graph.initial_values(parts))
    held = containers(client_id, parts, arrays)
    try:
        initial = start(*held, *_graph.alone(parts))
    except NotImplementedError as error:  # of an initial value that would be a draw
        why = str(error).strip().partition("\n")[0]
        raise DeclarationError(
            f"client {client_id!r}: a variable has no starting point ({why}). Declare a prior that can be drawn from, "
            "in init_dist= for example, or give initval=."
        ) from error
    except (ValueError, TypeError, IndexError, AssertionError) as error:
        raise mismatch(client_id, arrays, error) from error
    shared, local = (_graph.variables(parts, initial, local=which) for which in (False, True))
    try:
        graph = make_once(made, ("graph", shared), lambda: _graph.site_graph(parts, shared, local))
    except NotImplementedError as error:
        why = str(error).strip().partition("\n")[0]
        raise DeclarationError(
            f"client {client_id!r}: PyMC has no log density of the model: {why} Give it one, such as "
            "pm.CustomDist(..., logp=function)."
        ) from error
    except ValueError as error:
        once = " Give each observed variable data of its own." if "More than one logprob" in str(error) else ""
        raise DeclarationError(
            f"client {client_id!r}: PyMC cannot put the model's log density together: {error}.{once}"
        ) from error
    return Template(parts, (shared, local), graph, start, (*held, *_graph.alone(parts), *shapes(graph, local)), made)


def lengths_of(
    declared: Declared, client_id: str, template: Template, arrays: Mapping[str, Any]
) -> tuple[Template, tuple[Any, ...]]:
    """The template in which this client's lengths are open, and those lengths that no container has."""
    if template.may_hold_rows(arrays):
        model = parts_of(declared, client_id, arrays).model
        lengths = _graph.open_lengths(template.parts, model)
        if lengths != template.parts.open:
            known = template.functions.setdefault("opened", {})
            key = tuple(lengths.items())
            if key not in known:
                built_on = {v.name: v.get_value() for v in template.parts.data}
                known[key] = opened(client_id, built_on, template.parts, lengths)
                known[key].functions["public"] = template.public
            template = known[key]
        return template, _graph.alone(template.parts, model)
    if None not in template.parts.open.values():
        return template, ()
    return template, _graph.alone(template.parts, parts_of(declared, client_id, arrays).model)


def shapes(graph: _graph.SiteGraph, local: tuple[Variable, ...]) -> tuple[Array, ...]:
    """Shapes of the local variables that the graph takes for inputs."""
    return tuple(np.asarray(local[i].shape, dtype=np.int64) for i in graph.free_shapes)


# What was made of a declaration, kept for other builds of the same: by what they declare, not by who declares it ------

# A builder is called in every fit, since no look at code tells what it reads: what it gives is looked up, and only the
# graphs and functions that follow from that alone are not made again. They hold no client's data, which are inputs, but
# for what a builder makes constants of beside its containers.

_KEPT = 32  # declarations, of 1.6 MB each for two priors and a likelihood; a study compares few dozen models


def made_of(parts: _graph.Parts) -> dict[Any, Any]:
    """What was made of this content before, to which more may be added; of what cannot be told, nothing."""
    content = content_of(parts)
    return {} if content is None else _made(content)


@functools.lru_cache(maxsize=_KEPT)  # it lets threads take turns
def _made(content: tuple[Any, ...]) -> dict[Any, Any]:
    return {}


def content_of(parts: _graph.Parts) -> tuple[Any, ...] | None:
    """All that a build declares but for the values in its containers; None where something cannot be told.

    Not told are data that are constants of their own in the graph, code of the user's (operations, transforms, log
    densities), and starting values that are computed.
    """
    model = parts.model
    outputs = _same.declared_outputs(model)
    if not parts.data or any(_same.has_own_gradient(op) for op in _same.operations(outputs)):
        return None
    lengths = _graph.lengths(model)
    inputs = [*parts.data, *_same.streams(outputs), *(model.dim_lengths[dim] for dim in lengths)]
    values = [model.rvs_to_values[rv].type for rv in model.basic_RVs]
    try:
        held = (
            graph_key(inputs, outputs),
            told([[value.dtype, list(value.shape)] for value in values]),
            tuple(_transform(model.rvs_to_transforms[rv]) for rv in model.basic_RVs),
            told([model.rvs_to_initial_values[rv] for rv in model.free_RVs]),
        )
    except Untold:
        return None
    if held[0] is None:
        return None
    fixed = {dim: length for dim, length in lengths.items() if dim not in parts.open}
    beside = [_same.names(parts), dict(model.named_vars_to_dims), list(lengths), fixed, dict(parts.open)]
    # A class of the user's may have given one of PyMC's distributions another density.
    densities = tuple(_logprob.dispatch(type(rv.owner.op)) for rv in model.basic_RVs)
    return (*held, densities, repr([*beside, [v.name for v in parts.prior_terms], bool(model.check_bounds)]))


def _transform(value: Any) -> Any:
    """A transform, or what it holds, as something that is equal where it computes the same."""
    if isinstance(value, list | tuple):
        return tuple(map(_transform, value))
    if isinstance(value, SdsAndPartials):
        return value.name, len(value.own_sd)
    if isinstance(value, Transform):
        return named(type(value)), tuple((name, _transform(one)) for name, one in sorted(vars(value).items()))
    if isinstance(value, Constant):
        return told([value.type, value.data])
    if isinstance(value, Mapping):
        return tuple((name, _transform(one)) for name, one in value.items())
    if isinstance(
        value, FunctionType
    ):  # bounds of an interval, written inside of PyMC: its code, and what it closes over
        module = sys.modules.get(value.__module__)
        if not f"{value.__module__}.".startswith(f"{pm.__name__}.") or value.__globals__ is not vars(module):
            raise Untold
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, _transform([*cells, value.__defaults__, value.__kwdefaults__])
    return told(value)
