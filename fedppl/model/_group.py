"""Enrol a group of clients whose data have the same columns: one build serves all where possible."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pytensor.graph.basic import equal_computations
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.gaussian import Gaussian
from fedppl.model import _public, interpreted
from fedppl.model import graph as _graph
from fedppl.model import same as _same
from fedppl.model.checks import (
    UNFIT,
    containers,
    fingerprint,
    fits_integers,
    mismatch,
    naming,
    place_of,
    probes,
    quoted,
    refuse,
    require_not_negative,
    require_same_variables,
)
from fedppl.model.client import EACH, ClientModel, is_written, unconstrained
from fedppl.model.compiled import pack
from fedppl.model.template import (
    BY_SCALE,
    AtMany,
    Declared,
    Template,
    compiled_at_many,
    differences,
    interpreted_at_many,
    kernel_of,
    lengths_of,
    opened,
    parts_of,
    shapes,
    template_of,
)
from fedppl.numerics.prior import SharedPrior, gaussian_prior, moment_match
from fedppl.settings import some_of
from fedppl.types import Array, DataError, DeclarationError, Layout, Variable

Clients = Mapping[str, Mapping[str, Any]]


def of_another_type(declared: Declared, given: Clients, typed: Clients) -> str | None:
    """Name the client whose fractions turn integers of others into reals, where the builder needs integers."""
    for name in next(iter(given.values())):
        odd = [k for k in given if not np.all(fits_integers(given[k][name]))]
        whole = [k for k in given if given[k][name].dtype.kind in "biu" and np.all(fits_integers(given[k][name]))]
        if not whole or not odd or _accepts(declared, whole[0], typed[whole[0]]):
            continue
        if _accepts(declared, whole[0], {**typed[whole[0]], name: given[whole[0]][name]}):
            what, where = f"client {odd[0]!r}: {name!r}", place_of(~fits_integers(given[odd[0]][name]))
            value = given[odd[0]][name][where]
            return (
                f"{what} holds {value} at index {where}, and the builder needs integers of at most 32 bits. Correct it."
            )
    return None


def _accepts(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> bool:
    try:
        template_of(declared, client_id, arrays)
    except (DataError, DeclarationError):
        return False
    return True


def enrol_group(
    declared: Declared, group: Clients, compared: dict[Any, Template], reference: ClientModel | None, *, kernel: bool
) -> Iterable[ClientModel]:
    """Enrol clients whose data have the same numbers of columns.

    `compared` has templates by columns for which two clients' builds were equal, so that no further one is built.
    """
    ids = list(group)
    columns = tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(group[ids[0]].items()))
    first, separate = compared.get(columns), False
    builds: dict[str, _graph.Parts] = {}
    if first is None or not _repeats(declared, first, ids[0], group[ids[0]]):  # the builder reads state that changed
        first, separate, builds = _traced(declared, group, alone=len(ids) == 1 and reference is None)
        if len(ids) > 1 and not separate:
            compared[columns] = first
    if separate and len(ids) > 1:
        why = "has no pm.Data container" if not first.parts.data else "bakes a client's data into its graph"
        text = f"the builder {why}: each of {len(ids)} clients is compiled on its own"
        warnings.warn(f"{text}. Put the data into pm.Data containers.", UserWarning, stacklevel=4)
    if reference is not None:
        first.functions.setdefault("public", reference.template.public)
    elif "public" not in first.functions:
        _judge(declared, ids[0], group[ids[0]], first)
    for client_id in ids:  # all are checked before anything is compiled for the first
        containers(client_id, first.parts, group[client_id])
    for client_id in ids:
        template = first
        if client_id in builds:
            template = opened(client_id, group[client_id], builds[client_id], first.parts.open)
        elif separate and client_id != ids[0]:
            template = template_of(declared, client_id, group[client_id])
        if separate:
            template.functions.update(own=True, public=first.public)
        client = client_of(declared, client_id, template, group[client_id], reference, kernel=kernel)
        require_same_layout(reference, client)
        reference = reference or client
        yield client


def _traced(declared: Declared, group: Clients, *, alone: bool) -> tuple[Template, bool, dict[str, _graph.Parts]]:
    """The first client's template, whether each client needs one of its own, and builds of others that have one.

    What a builder may do wrong shows where two of its builds differ: those of two clients, of a client `alone` and of
    altered data, or of the same data.
    """
    client_id, *others = group
    arrays = group[client_id]
    first = template_of(declared, client_id, arrays)
    if is_written(declared.builder):  # a formula has all data and lengths in containers
        if others:
            first.functions["compared"] = True
        return first, False, {}
    if all(_ignores_data(declared, k, group[k], first.parts if k == client_id else None) for k in group):
        raise _ignored(client_id, first.parts, arrays)
    steady, altered = False, None
    builds: dict[str, _graph.Parts] = {}
    if others and first.parts.data:
        other = _most_different(group, client_id)
        parts = parts_of(declared, other, group[other])
        lengths = _graph.open_lengths(first.parts, parts.model)
        if lengths != first.parts.open:
            first = opened(client_id, arrays, first.parts, lengths)
        first.functions["compared"] = True
        differ = differences(first, other, group[other], parts)
        with naming(other):
            if "variables" in differ:
                second = opened(other, group[other], parts, lengths)
                require_same_variables(client_id, first.variables[0], second.variables[0], group[other])
            if "prior" in differ:
                raise _other_prior(client_id)
        steady = not differ
        builds = {other: parts} if differ else {}
    elif alone:
        altered = _altered(declared, client_id, arrays, first)
        steady = altered is not None and all(_same.surely_same_model(first.parts, parts) for parts in altered)
    with naming(client_id):
        if not steady and not _repeats(declared, first, client_id, arrays):
            raise DeclarationError(
                "the builder, called twice on the same data, gives two models; it draws random numbers or has state: "
                "give it all that it needs."
            )
        if alone and not steady and _public.prior_of_data(first.parts, first.variables[0], altered):
            # The text travels, so it has no data.
            raise DeclarationError("the shared prior changes when this client's data do; declare it by constants.")
    return first, not first.parts.data or (bool(others) and not steady), builds


def _ignored(client_id: str, parts: _graph.Parts, names: Iterable[str]) -> DeclarationError:
    """Error of a model whose observed variables do not depend on the data."""
    free = [rv.name for rv in parts.local if not set(ancestors([rv])).isdisjoint(parts.data)]
    hint = f" {quoted(free)} has no observed=." if free else ""
    reached = quoted(rv.name for rv in parts.model.observed_RVs)
    what = f"makes no use of its data: none of {quoted(names)} reaches {reached}.{hint}"
    return DeclarationError(f"client {client_id!r}: the builder {what} Pass observed=y, for example.")


def _other_prior(reference_id: str) -> DeclarationError:
    return DeclarationError(
        f"shared prior differs from the one at client {reference_id!r}; use the same constants, without data "
        "or random numbers."
    )


_COMPARED = 1000  # clients of which the most different is taken


def _most_different(group: Clients, client_id: str) -> str:
    """The client to compare the first one's build with: with other numbers of rows, then with the farthest means.

    Other numbers of rows show which lengths depend on them, and far means a builder's branches on values.
    """
    first = group[client_id]
    moments = {name: _mean_and_sd(array) for name, array in first.items()}

    def apart(other: str) -> tuple[int, float]:
        lengths = sum(np.shape(array)[:1] != np.shape(group[other][name])[:1] for name, array in first.items())
        distances = (abs(_mean_and_sd(group[other][name])[0] - mean) / sd for name, (mean, sd) in moments.items())
        return lengths, float(np.max(np.nan_to_num([0.0, *distances])))

    return max((k for k in itertools.islice(group, _COMPARED) if k != client_id), key=apart)


def _mean_and_sd(values: Array) -> tuple[float, float]:
    """Of numbers; NaN where there are none."""
    if not values.size or values.dtype.kind not in "biuf":
        return np.nan, np.nan
    with np.errstate(all="ignore"):
        return float(np.mean(values)), float(np.std(values)) + 1e-9


def _repeats(declared: Declared, template: Template, client_id: str, arrays: Mapping[str, Any]) -> bool:
    """Whether the builder, called once more, gives the model of the template."""
    return not differences(template, client_id, arrays, parts_of(declared, client_id, arrays))


def _altered(declared: Declared, client_id: str, arrays: Mapping[str, Any], template: Template) -> _public.Built:
    """Builds on altered data, made once; None where the builder fails on some."""
    if is_written(declared.builder):
        return (template.parts,)
    return template.once("altered", lambda: _public.rebuilt(functools.partial(parts_of, declared, client_id), arrays))


def _judge(declared: Declared, client_id: str, arrays: Mapping[str, Any], template: Template) -> None:
    """Decide what may leave a client, and warn of what is withheld."""
    rebuild = functools.partial(_altered, declared, client_id, arrays, template)
    public = template.functions["public"] = _public.read_public(template.parts, template.variables[0], rebuild)
    stay = [*map(repr, public.withheld), *(f"labels of {dim!r}" for dim in public.unlabelled)]
    if stay:
        known = "" if rebuild() is not None else " (the builder fails on altered data)"
        why = f"left out of the shared result: {', '.join(stay)}, since constants in them may hold data{known}"
        warnings.warn(f"{why}; see fit.client(...), or compute them from fit.idata.", UserWarning, stacklevel=5)
    template.functions.pop("altered", None)


def client_of(
    declared: Declared,
    client_id: str,
    template: Template,
    arrays: Mapping[str, Any],
    like: ClientModel | None,
    *,
    kernel: bool,
) -> ClientModel:
    """A client of a template, whose lengths are opened as needed; its density is checked at the start."""
    template, alone = lengths_of(declared, client_id, template, arrays)
    parts, functions = template.parts, template.functions
    data = (*containers(client_id, parts, arrays), *alone)
    sizes = (*(np.shape(value) for value in data), *map(int, alone))
    with naming(client_id):
        try:  # clients with equal shapes share starting values, though these may depend on data
            initial = template.once(("initial", sizes), lambda: template.start(*data))
        except UNFIT as error:
            raise mismatch(arrays, error) from error
        shared, local = _graph.variables(parts, initial)
        of_both = initial[: len(shared)], initial[len(shared) :]
        phi, theta = (np.concatenate([np.zeros(0), *map(np.ravel, values)]) for values in of_both)
        if like is not None:
            require_same_variables(like.client_id, like.layout.variables, shared, arrays)
        if like is not None and like.template is template:
            layout, prior = like.layout, like.prior
        else:
            layout, prior = _shared_layout(template, shared, phi)
        inputs = (*data, *shapes(template.graph, local))
        functions["shared start"] = phi
        client = ClientModel(
            client_id=client_id,
            layout=layout,
            local=local,
            packed=pack(inputs),
            inputs=inputs,
            prior=prior,
            initial=theta,
            arrays=dict(arrays),
            declared=declared,
            template=template,
        )
        require_start(client, phi, kernel=kernel)
    return client


_FAR = 1e9  # beyond the thresholds of models, and within 32 bits


def _ignores_data(declared: Declared, client_id: str, arrays: Mapping[str, Any], parts: _graph.Parts | None) -> bool:
    """Whether log p of the observed variables and potentials is the same graph on altered data, and on data far away.

    False where a container is above them, and where the builder fails on other data.
    """
    build = functools.partial(parts_of, declared, client_id)
    parts = parts or _public.attempt(build, arrays)
    if parts is None or not (ends := _ends(parts))[1].isdisjoint(parts.data):
        return False
    logp, inputs = _likelihood(parts, *ends)
    if not set(ancestors([logp])).isdisjoint(parts.data):
        return False
    far = ({k: v if v.dtype.kind != "f" else v + by for k, v in arrays.items()} for by in (-_FAR, _FAR))
    rebuilt = _public.rebuilt(build, arrays) or (None,)
    for other in itertools.chain(rebuilt, (_public.attempt(build, one) for one in far)):
        if other is None:
            return False
        other_logp, other_inputs = _likelihood(other, *_ends(other))
        if [v.type for v in inputs] != [v.type for v in other_inputs]:
            return False
        if not equal_computations([logp], [other_logp], in_xs=inputs, in_ys=other_inputs):
            return False
    return True


def _ends(parts: _graph.Parts) -> tuple[list[Any], set[Any]]:
    """Observed variables and potentials, and all their ancestors as declared."""
    model = parts.model
    ends = [term for term in parts.site_terms if term not in parts.local]
    return ends, set(ancestors([*ends, *(model.rvs_to_values[rv] for rv in model.observed_RVs)]))


def _likelihood(parts: _graph.Parts, ends: list[Any], above: set[Any]) -> tuple[Any, list[Any]]:
    """log p of observed variables, with the local variables above them, and its inputs."""
    model = parts.model
    logp = model.logp(vars=[*(rv for rv in parts.local if rv in above), *ends], sum=True)
    values = [model.rvs_to_values[rv] for rv in model.free_RVs]
    return logp, [*values, *parts.data, *model.dim_lengths.values()]


# Checks of a client's model at its start, and against the other clients -----------------------------------------------


def require_start(client: ClientModel, phi: Array, *, kernel: bool) -> None:
    """Evaluate the log density once, so that unfit shapes and impossible data are refused before the first round.

    With `kernel` the compiled gradient is evaluated too; without, nothing is compiled.
    """
    _require_whole(client)
    infinite, density = _infinite(client.arrays), functools.cache(lambda: client.log_density(phi, client.initial))
    try:
        if client.template.indexes_by_data:  # compiled code would read foreign memory out of bounds
            density()
        require_not_negative(client.template.indices, client.arrays, client.inputs)
        with np.errstate(invalid="ignore"):
            possible = not infinite or np.isfinite(density())
        if not possible:
            raise DataError(infinite)
        large = client.layout.prior.precision.ndim == 1  # of a network, whose algorithms have gradients of their own
        if kernel and not client.layout.binary and not large:
            value, gradient, _ = client.log_site(phi, client.initial)
        else:
            value, gradient = density(), np.zeros(0)
    except (DataError, DeclarationError):
        raise
    except UNFIT as error:
        if infinite:
            raise DataError(infinite) from error
        raise mismatch(client.arrays, error, _apart(client.template.parts, client.arrays)) from error
    if np.isfinite(value) and np.all(np.isfinite(gradient)):
        return
    why = "its gradient is not finite"
    if not np.isfinite(value):
        why = _impossible_outcome(client, phi) or "the data or the start are impossible under the model"
    remedy = "Correct data (an exposure or a covariate, too), their scale, or the distribution, or set `initval=`."
    raise DataError(f"the log density at the starting point is {value}: {why}. {remedy}")


def _require_whole(client: ClientModel) -> None:
    """Refuse fractions where a discrete distribution is observed, since PyMC would truncate them."""
    model = client.template.parts.model
    for rv in model.observed_RVs:
        name = _observed_array(client.arrays, model.rvs_to_values[rv])
        if name is not None and rv.type.dtype.startswith(("int", "uint", "bool")):
            values = np.asarray(client.arrays[name])
            rule = f", and {rv.name!r} is of whole numbers; round the data, or declare a continuous distribution"
            refuse(values != np.round(values), repr(name), values, rule)


def _observed_array(arrays: Mapping[str, Any], value: Any) -> str | None:
    """Name of the array that is observed: in a container, cast or not, or a constant that PyMC has truncated."""
    if value.owner is not None:
        name = value.owner.inputs[0].name if len(value.owner.inputs) == 1 else None
        return name if name in arrays else None
    constant = getattr(value, "data", None)
    if constant is None or any(np.array_equal(array, constant) for array in arrays.values()):  # as it was given
        return None
    reals = {name: array for name, array in arrays.items() if array.dtype.kind == "f" and np.ndim(array)}
    with np.errstate(invalid="ignore"):
        same = [name for name, array in reals.items() if np.array_equal(array.astype(constant.dtype), constant)]
    return same[0] if same else None


def _infinite(arrays: Mapping[str, Any]) -> str:
    """Text that names the first infinite value where the density is not finite; "" if there is none."""
    for name, value in arrays.items():
        if np.any(infinite := np.isinf(value)):
            where = place_of(infinite)
            return f"{name!r} holds {value[where]} at index {where}, and the density is not finite; drop or impute it."
    return ""


def require_same_layout(reference: ClientModel | None, client: ClientModel) -> None:
    """Refuse a client whose shared block differs, naming the difference."""
    if reference is None or reference.layout.fingerprint == client.layout.fingerprint:
        return
    with naming(client.client_id):
        ours, theirs = reference.layout.variables, client.layout.variables
        require_same_variables(reference.client_id, ours, theirs, client.arrays)
        raise _other_prior(reference.client_id)


# Supports of distributions, by the names of PyTensor's random variables, and which values are outside. Else a parameter
# is at fault, such as an exposure of 0.
_RULES: list[tuple[set[str], str, Callable[[float], bool]]] = [
    ({"bernoulli"}, "0 or 1", lambda y: y not in (0, 1)),
    ({"beta"}, "in (0, 1)", lambda y: not 0 < y < 1),
    ({"binomial"}, "0 to n", lambda y: y != 0),
    ({"categorical"}, "classes numbered from 0 to their number less 1", lambda y: y != 0),
    ({"exponential", "halfnormal", "negative_binomial", "poisson"}, "not negative", lambda y: y < 0),
    ({"gamma", "inverse_gamma", "lognormal", "weibull"}, "positive", lambda y: y <= 0),
    ({"geometric"}, "1, 2, ...", lambda y: y < 1),
]


def _impossible_outcome(client: ClientModel, phi: Array) -> str:
    """The first outcome whose log density is minus infinity, with its place and the rule; "" if none."""
    template, layout = client.template, client.layout
    try:
        x, inputs, outputs = _graph.observed_graph(template.parts, layout.variables)
        function = interpreted.python_function([x, *inputs], outputs)
        densities = function(np.concatenate([phi, client.initial]), *client.inputs)
    except Exception:  # the failure is raised in any case
        return ""
    names = {rv: container.name for container, rv in _graph.observed_through(template.parts).items()}
    for rv, density in zip(template.parts.model.observed_RVs, densities, strict=True):
        values = client.arrays.get(names.get(rv, ""))
        if not np.any(np.isneginf(density)) or values is None or np.shape(values) != np.shape(density):
            continue
        place = place_of(np.isneginf(density))
        value, family = np.asarray(values)[place], getattr(rv.owner.op, "name", None)
        at = f" in row {place[0] if len(place) == 1 else place}" if place else ""
        broken = [rule for families, rule, breaks in _RULES if family in families and breaks(float(value))]
        return f"{names[rv]!r} is {value}{at}, {f'and outcomes are {broken[0]}' if broken else 'without a density'}"
    return ""


def _apart(parts: _graph.Parts, arrays: Mapping[str, Any]) -> str:
    """Describe an observed variable whose values have another shape than its distribution; "" if none."""
    replace, inputs = _graph.inputs_for(parts)
    if len(inputs) != len(parts.data):
        return ""
    given = [np.asarray(arrays[v.name]).astype(v.type.dtype) for v in parts.data]
    for rv in parts.model.observed_RVs:
        if rv.owner is None or getattr(rv.owner.op, "ndim_supp", None) != 0:
            continue
        graphs = [v.shape for v in (parts.model.rvs_to_values[rv], *rv.owner.op.dist_params(rv.owner))]
        try:
            function = interpreted.python_function(inputs, clone_replace(graphs, replace, rebuild_strict=False))
            observed, *sizes = (tuple(int(n) for n in shape) for shape in function(*given))
            batches = [size[: len(size) - ndim] for size, ndim in zip(sizes, rv.owner.op.ndims_params, strict=True)]
            expected = np.broadcast_shapes(*batches)
        except Exception:  # this only describes another error
            continue
        while observed[:1] != (1,) and all(size[:1] == (1,) for size in (expected, *sizes)):  # axes that PyMC adds
            expected, sizes = expected[1:], [size[1:] for size in sizes]
        if expected != observed:
            widest = max(sizes, key=len)
            of = "" if widest == expected else f" (of a parameter of shape {widest})"
            return f"{rv.name!r} is observed with shape {observed}, and its distribution is of shape {expected}{of}"
    return ""


# Layout and prior of the shared parameters: the exact Gaussian, or one with the same moments --------------------------

_PRIOR_DRAWS = 4000


# With more shared coordinates, many calls of an interpreted prior take longer than compiling it once.
_INTERPRETED = 30


def _shared_layout(template: Template, variables: tuple[Variable, ...], origin: Array) -> tuple[Layout, SharedPrior]:
    """Layout and prior of the shared parameters, once per declaration."""
    key = ("layout", variables, origin.tobytes())
    try:
        return template.of_declaration(key, lambda: _layout(template.parts, variables, origin))
    except DeclarationError:
        raise
    except UNFIT as error:
        names = [variable.name for variable in variables]
        raise DeclarationError(f"prior of {names}: {error}. Make shapes, dims and coords fit together.") from error


def _layout(parts: _graph.Parts, variables: tuple[Variable, ...], origin: Array) -> tuple[Layout, SharedPrior]:
    _refuse_flat(parts)
    graph = _graph.prior_graph(parts, variables)
    of_points, slopes = interpreted_at_many(graph)

    def gradient(point: Array) -> Array:
        return np.asarray(slopes(point[None])[0])

    gradient(origin)  # refuses a prior without one
    _require_density(parts, variables, origin, of_points)
    sizes = [variable.size for variable in variables]
    binary = np.repeat([variable.binary for variable in variables], sizes)
    owners = np.repeat([variable.name for variable in variables], sizes)
    exact = _gaussian_beside_binary(of_points, gradient, origin, binary, owners)
    n0 = exact if exact is not None else moment_match(_draws(parts, len(origin)))
    kernel = functools.cache(lambda: kernel_of(graph))
    many_calls = len(origin) > _INTERPRETED and exact is None
    log_density, gradients = compiled_at_many(kernel) if many_calls else (of_points, slopes)
    prior = SharedPrior(
        log_density=log_density, gradients=gradients, gaussian=n0, is_gaussian=exact is not None, kernel=kernel
    )
    at = probes(variables, n0)
    density = (*(float(value) for value in of_points(at)), *_on_declared_scales(parts, variables, at))
    digest = fingerprint(variables, n0, exact is not None, density)
    return Layout(variables, n0, exact is not None, digest, density), prior


def _on_declared_scales(parts: _graph.Parts, variables: tuple[Variable, ...], at: Array) -> tuple[float, ...]:
    """A weighted sum of log |value| of shared variables with limits, at each point; 0 where there are none.

    Limits are parameters of a transform: an interval's density by its unconstrained coordinate does not show them.
    """
    limited = [place for place, variable in enumerate(variables) if variable.transform not in BY_SCALE]
    if not limited:
        return (0.0,) * len(at)
    phi, _, _, outputs = _graph.constrained_graph(parts, variables, (), only_shared=True)
    values = pt.concatenate([outputs[place].flatten() for place in limited])
    # Unequal weights: limits that change places would leave a plain sum as it is.
    weights = 1.0 + pt.arange(values.shape[0]) / values.shape[0]
    function = interpreted.python_function([phi], [pt.sum(weights * pt.log(pt.abs(values) + 1e-300))])
    return tuple(float(np.round(function(point)[0], 6)) for point in at)


def _draws(parts: _graph.Parts, size: int) -> Array:
    """Draws for the moments of `size` shared numbers."""
    if _PRIOR_DRAWS < EACH * (size + 1):
        names = [rv.name for rv in parts.shared if getattr(rv.owner.op, "name", None) not in ("normal", "lognormal")]
        which, most = some_of(names or [rv.name for rv in parts.shared]), _PRIOR_DRAWS // EACH - 1
        what = f"{size} numbers are shared, over {most}, and the prior of {which} is not normal"
        raise DeclarationError(f"{what}; declare pm.Normal, pm.LogNormal.")
    return unconstrained(parts, _PRIOR_DRAWS, 0)


def _require_density(parts: _graph.Parts, variables: tuple[Variable, ...], origin: Array, log_density: AtMany) -> None:
    """Refuse a prior whose density is not finite at the start, and name the variables at fault."""
    value = float(log_density(origin[None])[0])
    if np.isfinite(value):
        return
    odd = []
    for term in parts.prior_terms:
        alone = interpreted_at_many(_graph.prior_graph(parts._replace(prior_terms=(term,)), variables))[0](origin[None])
        odd += [] if np.isfinite(alone[0]) else [term.name]
    what = f"the shared prior's log density at the start is {value}, by {odd or 'all'}"
    raise DeclarationError(f"{what}. Correct the prior, or set `initval=`.")


def _refuse_flat(parts: _graph.Parts) -> None:
    flat = [rv for rv in parts.shared if isinstance(rv.owner.op, FlatRV | HalfFlatRV)]
    bounded = any(term not in parts.shared for term in parts.prior_terms)  # a potential may make the prior proper
    if flat and not bounded:
        remedies = {False: "pm.Normal(0, 10)", True: "pm.HalfNormal(1)"}
        examples = [f"{rv.name!r} ({remedies[isinstance(rv.owner.op, HalfFlatRV)]} for example)" for rv in flat]
        raise DeclarationError(f"flat shared priors are improper. Give each a proper prior: {', '.join(examples)}.")


def _gaussian_beside_binary(
    log_density: Callable[[Array], Array], gradient: Callable[[Array], Array], origin: Array, binary: Any, owners: Any
) -> Gaussian | None:
    """N_0 if the continuous coordinates have a Gaussian prior; with mean and variance of each indicator."""

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
