"""Enrolling a group of clients whose data have the same columns: one build serves all where it can."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from pytensor.graph.basic import equal_computations
from pytensor.graph.traversal import ancestors

from fedppl.model import _public
from fedppl.model import graph as _graph
from fedppl.model import same as _same
from fedppl.model._declared import Declared, lengths_of, opened, parts_of, shapes, template_of
from fedppl.model._public import altered, attempt
from fedppl.model._shared_prior import shared_layout
from fedppl.model._start import require_same_layout, require_start
from fedppl.model._template import Template
from fedppl.model.arrays import fits_integers
from fedppl.model.client import ClientModel, is_written
from fedppl.model.enrolment import (
    containers,
    ignored_data,
    mismatch,
    other_model,
    other_prior,
    private_prior,
    require_same_variables,
)
from fedppl.model.pack import pack
from fedppl.types import DataError, DeclarationError

Clients = Mapping[str, Mapping[str, Any]]


def of_another_type(declared: Declared, given: Clients, typed: Clients) -> str | None:
    """Where one client's fractions made reals of others' integers and the builder takes integers only: whose."""
    for name in next(iter(given.values())):
        odd = [k for k in given if not np.all(fits_integers(given[k][name]))]
        whole = [k for k in given if given[k][name].dtype.kind in "biu" and np.all(fits_integers(given[k][name]))]
        if not whole or not odd:
            continue
        try:
            template_of(declared, whole[0], typed[whole[0]])
            continue  # reals are not what the builder fails on
        except (DataError, DeclarationError):
            pass
        try:
            template_of(declared, whole[0], {**typed[whole[0]], name: given[whole[0]][name]})
        except (DataError, DeclarationError):
            continue
        where = tuple(int(i) for i in np.argwhere(~fits_integers(given[odd[0]][name]))[0])
        return (
            f"client {odd[0]!r}: {name!r} holds {given[odd[0]][name][where]} at index {where}. At client "
            f"{whole[0]!r} it holds integers of at most 32 bits, which the builder needs, as an index for example, "
            f"and a name has one type at all clients. Correct the values of client {odd[0]!r}, or let the builder "
            f"make integers of {name!r}."
        )
    return None


def enrol_group(
    declared: Declared, group: Clients, compared: dict[Any, Template], reference: ClientModel | None, *, kernel: bool
) -> Iterable[ClientModel]:
    """Enrol clients whose data have the same numbers of columns.

    Templates for which two clients' builds were found equal are in `compared`, by columns: none need be built again.
    """
    ids = list(group)
    columns = tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(group[ids[0]].items()))
    seen = compared.get(columns)
    if seen and not _builds(declared, seen, ids[0], group[ids[0]]):  # what it reads beside its arguments has changed
        seen = None
    first = seen or template_of(declared, ids[0], group[ids[0]])
    if not seen and _ignores(declared, first.parts, group):
        raise ignored_data(ids[0], declared.builder, first.parts, group[ids[0]])
    templates = {ids[0]: first}
    own = not first.parts.data
    if not own and not seen and len(ids) > 1 and is_written(declared.builder):
        first.functions["compared"] = True  # ours: with all data in containers, and no length but of these
        compared[columns] = first
    elif not own and not seen and len(ids) > 1:
        first, other, parts = _pair(declared, group, first)
        templates = {ids[0]: first}
        own = not _same.surely_same_model(first.parts, parts)
        if own:
            second = templates[other] = opened(other, group[other], parts, first.parts.open)
            require_same_variables(ids[0], first.variables[0], other, second.variables[0], group[other])
            if not _same.same_prior(first.parts, first.variables[0], second.parts, second.variables[0]):
                raise other_prior(ids[0], other)
            same = first.same_density(second)
            own = not (same and _same.same_outputs(first.parts, first.variables, second.parts, second.variables))
        if not own:
            compared[columns] = first
    if (own or len(ids) == 1) and not seen and not _builds(declared, first, ids[0], group[ids[0]]):
        raise other_model(ids[0])
    if own and len(ids) > 1:
        missing = "has no pm.Data container" if not first.parts.data else "bakes a client's data into its graph"
        warnings.warn(
            f"the builder {missing}, so each of {len(ids)} clients is compiled on its own, which takes seconds "
            "each. Put the data into pm.Data containers named like the builder's arguments.",
            UserWarning,
            stacklevel=4,
        )
    if reference is not None:
        first.functions.setdefault("public", reference.template.public)
    elif "public" not in first.functions:
        _judge(declared, ids[0], group[ids[0]], first, alone=len(ids) == 1)
    for client_id in ids:  # all are checked before anything is compiled for the first
        containers(client_id, first.parts, group[client_id])
    for client_id in ids:
        template = first
        if own:
            template = templates.get(client_id) or template_of(declared, client_id, group[client_id])
            template.functions.update(own=True, public=first.public)
        client = client_of(declared, client_id, template, group[client_id], reference, kernel=kernel)
        require_same_layout(reference, client)
        reference = reference or client
        yield client


def _pair(declared: Declared, group: Clients, first: Template) -> tuple[Template, str, _graph.Parts]:
    """The first client's template, another client and its build; lengths that differ between the two are open."""
    ids = list(group)
    sizes = {client_id: [np.shape(array)[:1] for array in arrays.values()] for client_id, arrays in group.items()}
    # A client with other numbers of rows tells which lengths follow them.
    other = max(ids[1:], key=lambda name: sum(a != b for a, b in zip(sizes[name], sizes[ids[0]], strict=True)))
    parts = parts_of(declared, other, group[other])
    lengths = _graph.open_lengths(first.parts, parts.model)
    if lengths != first.parts.open:
        first = opened(ids[0], group[ids[0]], first.parts, lengths)
    first.functions["compared"] = True
    return first, other, parts


def _builds(declared: Declared, template: Template, client_id: str, arrays: Mapping[str, Any]) -> bool:
    """Whether the builder, called once more, gives the model of the template."""
    parts = parts_of(declared, client_id, arrays)
    if _same.surely_same_model(template.parts, parts):
        return True
    again = opened(client_id, arrays, parts, template.parts.open)
    return (
        template.variables[0] == again.variables[0]
        and template.same_density(again)
        and _same.same_prior(template.parts, template.variables[0], again.parts, again.variables[0])
        and _same.same_outputs(template.parts, template.variables, again.parts, again.variables)
    )


def _ignores(declared: Declared, first: _graph.Parts, group: Clients) -> bool:
    """Whether no client's data change anything of what is observed."""
    parts: _graph.Parts | None = first
    for client_id, arrays in group.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build = functools.partial(parts_of, declared, client_id)
            if not _ignores_data(build, parts or build(arrays), arrays):
                return False
        parts = None
    return True


def _judge(declared: Declared, client_id: str, arrays: Mapping[str, Any], template: Template, *, alone: bool) -> None:
    """Decide what of this model may leave a client, and name what stays."""

    @functools.cache
    def rebuild() -> _public.Built:
        if is_written(declared.builder):  # ours: other data change what is in containers alone
            return (template.parts,)
        return _public.rebuilt(lambda data: parts_of(declared, client_id, data), arrays)

    parts, shared = template.parts, template.variables[0]
    if alone and _public.prior_of_data(parts, shared, rebuild()):  # else two clients' priors are compared
        raise private_prior(client_id)
    public = template.functions["public"] = _public.read_public(parts, shared, rebuild)
    stay = [*map(repr, public.withheld), *(f"labels of {dim!r}" for dim in public.unlabelled)]
    if stay:
        known = "" if rebuild() is not None else " (the builder fails on altered data, so that nothing is known)"
        warnings.warn(
            f"left out of the shared result: {', '.join(stay)}. Constants in them may hold a client's data: "
            f"arrays, or numbers that change with the data{known}. They are in fit.client(...); for the shared "
            "result compute them from fit.idata, and give coords that do not depend on data.",
            UserWarning,
            stacklevel=5,
        )


def client_of(
    declared: Declared,
    client_id: str,
    template: Template,
    arrays: Mapping[str, Any],
    like: ClientModel | None,
    *,
    kernel: bool,
) -> ClientModel:
    """A client of a template, in which its lengths are opened; evaluated once, at the start."""
    template, alone = lengths_of(declared, client_id, template, arrays)
    parts, functions = template.parts, template.functions
    data = (*containers(client_id, parts, arrays), *alone)
    sizes = (*(np.shape(value) for value in data), *map(int, alone))
    starts = functions.setdefault("initial", {})
    if sizes not in starts:  # a starting value may depend on data; for a start, equal shapes are enough
        try:
            starts[sizes] = template.start(*data)
        except (ValueError, TypeError, IndexError, AssertionError) as error:
            raise mismatch(client_id, arrays, error) from error
    initial = starts[sizes]
    shared = _graph.variables(parts, initial, local=False)
    local = _graph.variables(parts, initial, local=True)
    if like is not None:
        require_same_variables(like.client_id, like.layout.variables, client_id, shared, arrays)
    free_shapes = shapes(template.graph, local)
    if like is not None and like.template is template:
        layout, prior = like.layout, like.prior
    else:
        try:
            layout, prior = shared_layout(template, shared, initial[: len(shared)])
        except DeclarationError as error:
            raise DeclarationError(f"client {client_id!r}: {error}") from None
        except (ValueError, TypeError, IndexError, AssertionError) as error:
            raise DeclarationError(
                f"client {client_id!r}: the prior of the shared variables {[v.name for v in shared]} cannot be "
                f"evaluated: {error}. Make their shapes, dims and coords fit together."
            ) from error
    phi, theta = ([np.ravel(v) for v in values] for values in (initial[: len(shared)], initial[len(shared) :]))
    functions["shared start"] = np.concatenate(phi)
    client = ClientModel(
        client_id=client_id,
        layout=layout,
        local=local,
        packed=pack((*data, *free_shapes)),
        inputs=(*data, *free_shapes),
        prior=prior,
        initial=np.concatenate([np.zeros(0), *theta]),
        arrays=dict(arrays),
        declared=declared,
        template=template,
    )
    require_start(client, functions["shared start"], kernel=kernel)
    return client


Build = Callable[[Mapping[str, Any]], _graph.Parts]

_FAR = 1e9  # past what data are compared with, and within 32 bits


def _ignores_data(build: Build, parts: _graph.Parts, arrays: Mapping[str, Any]) -> bool:
    """Whether log p of the observed variables and potentials is the same whatever the data are.

    A container that stands above them is enough. Arrays that went straight into the model show when the builder is
    called with others; where it fails on those nothing is known, and nothing is said.
    """
    ends, above = _ends(parts)
    if not above.isdisjoint(parts.data):
        return False
    logp, inputs = _likelihood(parts, ends, above)
    if not set(ancestors([logp])).isdisjoint(parts.data):
        return False
    for other in _others(arrays):
        built = attempt(build, other)
        if built is None:
            return False
        their_logp, their_inputs = _likelihood(built, *_ends(built))
        if [v.type for v in inputs] != [v.type for v in their_inputs]:
            return False
        if not equal_computations([logp], [their_logp], in_xs=inputs, in_ys=their_inputs):
            return False
    return True


def _others(arrays: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Altered data, all arrays at once, and data far from these."""
    for step in altered(arrays):
        yield {name: one[name] for name, one in zip(arrays, step, strict=True)} if len(step) > 1 else step[0]
    for far in (-_FAR, _FAR):
        yield {name: value if value.dtype.kind != "f" else value + far for name, value in arrays.items()}


def _ends(parts: _graph.Parts) -> tuple[list[Any], set[Any]]:
    """What is observed, and all that stands above it as it was declared."""
    model = parts.model
    ends = [term for term in parts.site_terms if term not in parts.local]
    return ends, set(ancestors([*ends, *(model.rvs_to_values[rv] for rv in model.observed_RVs)]))


def _likelihood(parts: _graph.Parts, ends: list[Any], above: set[Any]) -> tuple[Any, list[Any]]:
    """log p of what is observed with the locals above it, and the variables it is a function of."""
    model = parts.model
    logp = model.logp(vars=[*(rv for rv in parts.local if rv in above), *ends], sum=True)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    return logp, [*values, *parts.data, *model.dim_lengths.values()]
