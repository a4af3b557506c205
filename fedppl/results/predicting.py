"""Posteriors of clients and predictions at new rows, as methods of a fit: of those that took part, and of new ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from pymc.distributions.moments import mean
from pymc.exceptions import UndefinedMomentException
from pytensor.graph.basic import clone_get_equiv
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.shape import Shape, Shape_i

from fedppl.model import checks, interpreted
from fedppl.model import graph as _graph
from fedppl.model.checks import as_arrays, mismatch, naming, read_indices, require_not_negative
from fedppl.model.client import ClientModel, dims_and_coords
from fedppl.model.declaration import FederatedModel
from fedppl.model.interpreted import quiet
from fedppl.model.stack import samples
from fedppl.model.template import built
from fedppl.results import idata
from fedppl.results.at_client import GROUPS, client_posterior, draw_outcomes, has_rows, pymc_groups
from fedppl.results.records import Ended, require_arrived
from fedppl.results.shared import Drawing, drawing_of
from fedppl.settings import chosen, one_of, shown, some_of, text
from fedppl.types import Array, DataError, DeclarationError

logger = logging.getLogger(__name__)


def predict(
    fit: Any,
    client_id: Hashable | None,
    new_data: Any,
    *,
    kind: str = "response",
    at: float | Sequence[float] | None = None,
    draws: int = 1000,
    chains: int = 4,
    random_seed: int | None = None,
) -> Any:
    r"""Predictive draws at new rows of a client, or of one that has none yet: outcomes, or what they are on average.

    .. math:: p(\tilde y \mid \tilde x, y) = \int p(\tilde y \mid \tilde x, \theta_k, \phi)\, p(\theta_k, \phi \mid y)

    Parameters
    ----------
    client_id
        Id of a client; of one that gave an estimate in place of rows its posterior is used. None stands for a client
        that no row is known of: its own variables are drawn from the hierarchy, given draws of what all share.
    new_data
        New inputs by name, or a data frame; of a formula also one row by scalars, ``{"age": 70, "arm": "drug"}``.
    kind
        "response" for draws of outcomes; "mean" for their mean given the parameters, under the name of the outcome with
        ``_mean``: risks (per trial), rates, of levels the probabilities of each. Of times until an event it is their
        median, ``_median``, or with `at` the probability of no event until then, ``_survival``.
    at
        A time, or several.
    draws, chains, random_seed
        As in `client`.

    Returns
    -------
    arviz.InferenceData or xarray.DataTree
        Groups ``predictions`` and ``predictions_constant_data``, beside those of `client`.

    Raises
    ------
    DeclarationError
        If the client is unknown, or a distribution's mean is: declare ``pm.Deterministic("y_mean", ...)``.
    DataError
        If inputs do not fit the model.

    Examples
    --------
    >>> import fedppl
    >>> model, clients = fedppl.testing.normal_means()
    >>> fit = fedppl.fit(model, clients, progressbar=False, random_seed=1)
    >>> own = fit.predict("client 0", {"y": [0.0]}, kind="mean", random_seed=1)["predictions"]["obs_mean"]
    >>> new = fit.predict(None, {"y": [0.0]}, kind="mean", random_seed=1)["predictions"]["obs_mean"]
    >>> bool(new.std() > 2 * own.std())
    True

    Notes
    -----
    *When this fails.* A mean has the uncertainty of the parameters, and not that of one outcome. A new client is taken
    to be one more like those that took part; with few of them the sd between clients is uncertain, and risks with it.
    """
    if isinstance(client_id, Mapping | pd.DataFrame):
        raise DeclarationError("client_id= is a table; pass a client's id or None, or use fit.new_client(data).")
    if new_data is None:
        raise DeclarationError('new_data=None: pass new inputs by name, such as {"X": X_new}, or a data frame.')
    drawing = drawing_of(fit, draws, chains, random_seed)
    if client_id is None:
        return _new_without_rows(fit, rows_at(fit, "new client", new_data, None), drawing, kind, at)
    model = fit.clients.get(str(client_id))
    if model is None:  # raises the error with the reason
        return fit.client(client_id, predict=new_data, draws=draws, chains=chains, random_seed=random_seed)
    return at_client(fit, model, new_data, drawing, kind=kind, at=at)


def new_client(
    fit: Any,
    data: Any,
    *,
    predict: Any = None,
    draws: int = 1000,
    chains: int = 4,
    random_seed: int | None = None,
    name: str = "new client",
    kind: str | None = None,
) -> Any:
    """Posterior of θ at a client that never took part, from q(φ) and its own data alone.

    Parameters
    ----------
    data
        The new client's data, as for `fedppl.fit`: by the builder's argument names, a data frame, or a tuple. None for
        a client without data, whose variables are drawn from the hierarchy, such as a site's effect in a meta-analysis;
        where they depend on predictors of the client, `predict` gives its rows.
    predict, draws, chains, random_seed
        As in `client`.
    name, kind
        Name in results and errors, and its kind where the declaration has several, by default as that assigns kinds.

    Returns
    -------
    arviz.InferenceData or xarray.DataTree
    """
    text("name", name)
    drawing = drawing_of(fit, draws, chains, random_seed)
    if data is None:
        unseen = without_inputs(fit, name) if predict is None else rows_at(fit, name, predict, kind)
        return _new_without_rows(fit, unseen, drawing)
    model = fit.declaration.enrol({name: data}, kernel=fit.algorithm.needs.kernel, kinds={name: kind})[name]
    if model.layout.fingerprint != fit.layout.fingerprint:
        layouts = f"{model.layout.variables}, not {fit.layout.variables}"
        raise DeclarationError(f"{name!r} has shared layout {layouts}; give the same columns.")
    return at_client(fit, model, predict, drawing)


_PREDICTED = ("predictions", "predictions_constant_data")


def at_client(
    fit: Any,
    model: ClientModel,
    predict: Any,
    drawing: Drawing,
    *,
    groups: Sequence[str] | str = (),
    kind: str = "response",
    at: Any = None,
) -> Any:
    """The posterior of a client whose data are here, and predictions where there are new inputs."""
    groups = chosen("groups", groups, GROUPS, "the groups of ArviZ") if groups else ()
    client_id, result, seed = model.client_id, fit.algorithm.result, drawing[-1]
    inputs = unseen = None
    if predict is not None and has_rows(model):
        require_mean(kind, at, model.declared.builder)
        inputs = new_inputs(fit.declaration, model, predict)
    elif predict is not None:
        unseen = rows_at(fit, client_id, predict, None)
        require_mean(kind, at, unseen.builder)
    require_arrived(fit, f"the posterior of client {client_id!r}")
    if result.caution and (predict is not None or {*groups} - {"prior"}):
        logger.warning("client %s: %s", client_id, result.caution)
    message, personal = result.final_message(fit.state, client_id), fit.personal.get(client_id)
    datasets = client_posterior(fit.algorithm, model, personal, message, drawing, fit.status)
    posterior = datasets["posterior"]
    datasets |= pymc_groups(model, posterior, groups, seed)
    if inputs is not None:
        datasets |= zip(_PREDICTED, predictions(model, posterior, inputs, seed, kind, at), strict=True)
    elif unseen is not None:
        require_own(unseen, model)
        drawn = predicted(unseen, posterior, tuple(fit.layout.slices), seed, kind, at)
        datasets |= zip(_PREDICTED, drawn[1:], strict=True)
    return idata.from_groups(datasets)


def _new_without_rows(fit: Any, unseen: Unseen, drawing: Drawing, kind: str = "response", at: Any = None) -> Any:
    require_mean(kind, at, unseen.builder)
    require_arrived(fit, "predictions for a new client")
    draws, chains, seed = drawing
    drawn = fit.shared(draws=draws, chains=chains, random_seed=seed)
    if "posterior" not in drawn:
        _ = fit.posterior  # raises the error with what there is in its place
    shared = idata.as_dataset(drawn, "posterior")
    marks = {"status": fit.status.value, "converged": int(fit.status.ok)}
    datasets = predicted(unseen, shared, tuple(fit.layout.slices), seed, kind, at)
    groups = dict(zip(("posterior", *_PREDICTED), datasets, strict=True))
    return idata.from_groups({name: group.assign_attrs(marks) for name, group in groups.items()})


# Predictive draws at new inputs, by PyMC, for a client whose rows are here --------------------------------------------


def new_inputs(declaration: FederatedModel, client: ClientModel, given: Any) -> Mapping[str, Any]:
    """New inputs by name, as the client's builder takes them."""
    read = declaration.read_new(client.client_id, given, client.arrays, client.kind)
    if not isinstance(read, Mapping):
        raise DeclarationError(f'new data are {type(read).__name__}; pass a mapping from name to array: {{"X": ...}}.')
    return read


def predictions(
    client: ClientModel,
    posterior: xr.Dataset,
    new_data: Mapping[str, Any],
    seed: int,
    kind: str = "response",
    at: Any = None,
) -> tuple[xr.Dataset, xr.Dataset]:
    """Draw the observed variables, or their means, at new inputs for every posterior draw: (predictions, inputs)."""
    model = client.pymc_model()
    dims, coords = dims_and_coords(model)
    containers = {variable.name: variable.type.dtype for variable in model.data_vars}
    if not containers:
        raise DataError(f"client {client.client_id!r}: the builder has no pm.Data container; put the inputs into one.")
    if set(new_data) - set(containers) or not new_data:
        remedy = "Without inputs give as many outcomes as predictions, of any value."
        raise DataError(
            f"new data {sorted(new_data)} must name containers of the model: {sorted(containers)}. {remedy}"
        )
    values = checks.new_inputs(new_data, {name: containers[name] for name in new_data}, client.arrays)
    anew = _fill(model, client, values)
    new_coords = {
        dim: np.arange(len(value))
        for name, value in values.items()
        for dim in (dims.get(name) or ())[:1]
        if dim in coords and len(coords[dim]) != len(value)
    }
    inputs = {name: values[name] for name in new_data}
    constant = idata.dataset(inputs, dims, {})
    if kind == "mean" and hasattr(client.declared.builder, "expected"):
        return _formula_means(client.declared.builder, values, posterior, at, client.client_id), constant
    with model, quiet():
        pm.set_data(values, coords=new_coords)
        names = declare_means(model) if kind == "mean" else [variable.name for variable in model.observed_RVs]
        posterior = posterior.drop_vars(names, errors="ignore")
        with _fitting(model, client.client_id, values, inputs):
            group = draw_outcomes(model, posterior, seed % 2**32, anew, names, predictions=True)
    arrays = {name: np.asarray(group[name].values) for name in names}
    drawn = idata.posterior_dataset(arrays, dims, {**coords, **new_coords}, {"client": client.client_id})
    levels = getattr(client.declared.builder, "outcome_levels", {})  # of a formula
    for name in levels.keys() & drawn.data_vars.keys():
        drawn[name].attrs["levels"] = levels[name]
    return drawn, constant


def _fill(model: Any, client: ClientModel, values: dict[str, Any]) -> list[str]:
    """Fill in outcomes that new data leave out and nothing reads; returns names of variables that are drawn anew."""
    of_rows, given = _containers_of_rows(model), sorted(values)
    vectors = [name for name in given if np.ndim(values[name])]
    by_row = [name for name in vectors if name in of_rows] or vectors
    lengths = {(len(client.arrays[name]), len(values[name])) for name in by_row}
    before, after = lengths.pop() if len(lengths) == 1 else (None, None)
    as_long = [name for name, old in client.arrays.items() if np.ndim(old) and len(old) == before]
    left_out = [name for name in as_long if name in of_rows and name not in values]
    changed = [k for k in values if k not in of_rows and not np.array_equal(values[k], client.arrays[k])]
    rows = [*(of_rows & values.keys()), *left_out]
    dims = [dim for name in rows for dim in (model.named_vars_to_dims.get(name) or ())[:1]]
    anew, of_another = _drawn_anew(model, [*rows, *dims], changed)
    if of_another:
        why = f"are drawn anew, from their prior at the new values of {changed}: those are of another client"
        logger.warning("client %s: %s %s", client.client_id, of_another, why)
    stay = {rv for rv in model.free_RVs if rv.name not in anew}
    read = {rv: {variable.name for variable in _graph.values_read([rv], stay)} for rv in model.observed_RVs}
    for name in left_out:
        readers = [repr(rv.name) for rv, names in read.items() if name in names]
        if not readers:
            values[name] = np.zeros((after, *client.arrays[name].shape[1:]), dtype=model[name].type.dtype)
        elif after != before:
            why = f"which the distribution of {', '.join(readers)} reads"
            raise DataError(f"new data {given} leave out {name!r}, {why}; give its {after} new rows too.")
    return anew


# Variables that new data have drawn anew, from what the model's graph reads -------------------------------------------


def _containers_of_rows(model: Any) -> frozenset[str]:
    """Containers as long as the outcomes by the graph; those of the same length by chance are not among them."""
    names: set[str] = set()
    for rv in model.observed_RVs:
        names |= {variable.name for variable in _graph.values_read([model.rvs_to_values[rv]]) if variable.name}
        for part in (rv, *rv.owner.inputs):
            names |= _lengths(model, part)
    return frozenset(names & {variable.name for variable in model.data_vars})


def _drawn_anew(model: Any, rows: Iterable[str], changed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Variables that new data have drawn anew, and those of them that are of another client now.

    What has an entry for each row, such as a residual, has new entries. A client's own variable stays, also where its
    prior reads rows (a mean of a column), but not where that reads one of `changed`, a predictor of the client.
    """
    free = set(model.free_RVs)  # what a variable reads through another is not its own to read
    read = {rv: _graph.values_read(rv.owner.inputs, free) for rv in model.free_RVs}
    of_rows = {rv for rv in read if _lengths(model, rv) & {*rows, *changed}}
    of_another = {rv for rv in read if read[rv] & {model[name] for name in changed}} - of_rows
    anew = of_rows | of_another
    while more := {rv for rv in read if read[rv] & anew} - anew:
        anew |= more
    return [rv.name for rv in read if rv in anew], [rv.name for rv in read if rv in of_another]


def _lengths(model: Any, variable: Any) -> set[str]:
    """Containers and dims that give a variable's lengths."""
    if not getattr(variable.type, "ndim", 0):
        return set()
    shape = [pt.as_tensor(variable.shape)[axis] for axis in range(variable.type.ndim)]
    # Of a copy: rewriting changes a graph in place, and this one is the model's own.
    copies = clone_get_equiv([], shape, copy_inputs=False, copy_orphans=False)
    shape = [copies[length] for length in shape]
    dims = {copies.get(length, length): dim for dim, length in model.dim_lengths.items()}
    data, names, seen = set(model.data_vars), set(), set()
    waiting: list[Any] = list(rewrite_graph(shape, include=("ShapeOpt", "canonicalize")))
    while waiting:
        part = waiting.pop()
        if part in seen or part in data:  # a length that is computed from values does not change with other lengths
            continue
        seen.add(part)
        if part in dims:
            names.add(dims[part])
        if part.owner is None:
            continue
        if isinstance(part.owner.op, Shape | Shape_i) and part.owner.inputs[0] in data:
            names.add(part.owner.inputs[0].name)
        else:
            waiting.extend(part.owner.inputs)
    return names


# Predictive draws at inputs of a client of which no row is known ------------------------------------------------------


class Unseen(NamedTuple):
    """Inputs of a client of which the fit saw no rows, and the builder that takes them."""

    name: str
    builder: Any
    inputs: Mapping[str, Any]
    arrays: Mapping[str, Any]  # inputs, and values in the place of outcomes


def rows_at(fit: Ended, name: str, given: Any, kind: str | None) -> Unseen:
    """Read new inputs as those of a client that is not among the others, or of which only a summary is known."""
    kind = _kind_with_rows(fit) if kind is None else fit.declaration.kind_of(name, given, kind)
    builder = fit.declaration.declared_as(kind).builder
    read_unseen = getattr(builder, "read_unseen", None)
    if read_unseen is not None:
        arrays = dict(read_unseen(name, given))
        return Unseen(name, builder, {key: arrays[key] for key in arrays if not key.startswith("outcome")}, arrays)
    read = as_arrays(name, fit.declaration.read(name, given, kind))
    for key, value in read.items():
        checks.refuse(np.isinf(value), f"new inputs {key!r}", value, "; drop or impute infinite values")
    return Unseen(name, builder, read, {**read, **_outcomes(fit, name, read, kind)})


def without_inputs(fit: Ended, name: str) -> Unseen:
    """A client without any inputs, whose own variables depend on none; declared as a client that is here."""
    client = next(iter(fit.clients.values()), None)
    if client is None:
        raise DeclarationError("no client's model is here; give rows to predict at, predict={...}.")
    unseen = Unseen(name, client.declared.builder, {}, client.arrays)
    model = built(unseen.builder, name, unseen.arrays)
    if by_rows := [rv.name for rv in model.free_RVs if _depends_on_data(model, rv)]:
        raise DeclarationError(f"data=None: {by_rows} depend on predictors of the client; give rows, predict={{...}}.")
    return unseen


def _depends_on_data(model: Any, variable: Any) -> bool:
    return bool({*model.data_vars, *model.observed_RVs} & {*ancestors([variable])})


def require_own(unseen: Unseen, client: ClientModel) -> None:
    """Refuse rows whose model has variables of the client's own that its summary does not have."""
    known = {*client.layout.slices, *(variable.name for variable in client.local)}
    free = [rv.name for rv in built(unseen.builder, unseen.name, unseen.arrays).free_RVs]
    if lost := [name for name in free if name not in known]:
        remedy = "declare a client's own variables by one function that all builders call."
        raise DeclarationError(
            f"client {unseen.name!r} brought a summary without {lost}, which rows depend on; {remedy}"
        )


def predicted(
    unseen: Unseen, known: xr.Dataset, shared: tuple[str, ...], seed: int, kind: str, times: Any
) -> tuple[xr.Dataset, xr.Dataset, xr.Dataset]:
    """Draws of all variables, predictions, and inputs: variables that `known` lacks are drawn given those it has."""
    name, builder, inputs, arrays = unseen
    model = built(builder, name, arrays)
    dims, coords = dims_and_coords(model)
    sizes = pm.draw([rv.shape for rv in model.free_RVs], mode=interpreted.PYTHON_MODE)
    kept = {
        rv.name: np.asarray(known[rv.name].values)
        for rv, size in zip(model.free_RVs, sizes, strict=True)
        if rv.name in known and known[rv.name].shape[2:] == tuple(size)
    }
    if lost := [variable for variable in shared if variable not in kept]:
        raise DataError(f"{name!r}: {lost} have another shape here than in the fit; give the same columns.")
    posterior = idata.posterior_dataset(kept, dims, coords)
    formula = kind == "mean" and hasattr(builder, "expected")
    with model, quiet():
        outcomes = [] if formula else declare_means(model) if kind == "mean" else [v.name for v in model.observed_RVs]
        every = [*model.free_RVs, *model.deterministics]
        if not inputs:
            outcomes, every = [], [v for v in every if not _depends_on_data(model, v)]
        more = [v.name for v in every if v.name not in {*kept, *outcomes}]
        drawn: dict[str, Array] = {}
        if names := [*more, *outcomes]:
            with _fitting(model, name, arrays, inputs):
                group = draw_outcomes(model, posterior, seed % 2**32, names=names)
            drawn = {key: np.asarray(group[key].values) for key in names}
    whole = idata.posterior_dataset({**kept, **{k: drawn[k] for k in more}}, dims, coords, {"client": name})
    if formula:
        means = _formula_means(builder, arrays, whole, times, name)
    else:
        means = idata.posterior_dataset({k: drawn[k] for k in outcomes}, dims, coords, {"client": name})
    return whole, means, idata.data_dataset(inputs, dims, coords)


@contextlib.contextmanager
def _fitting(model: Any, client_id: str, arrays: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[None]:
    """Refuse arrays that do not fit the model by an error that names those `given`."""
    with naming(client_id):
        try:
            require_not_negative(read_indices(model), dict(arrays), ())
            yield
        except DataError:
            raise
        except (IndexError, ValueError, AssertionError) as error:
            raise mismatch(given, error) from error


def _kind_with_rows(fit: Ended) -> str:
    kinds = list(fit.declaration.builders)
    if len(kinds) == 1 or hasattr(fit.declaration.builder, "read_unseen"):
        return kinds[0]
    with_rows = list(dict.fromkeys(client.kind for client in samples(fit.clients) if has_rows(client)))
    if len(with_rows) != 1:
        raise DeclarationError(f"new rows may be of the kinds {with_rows or kinds}; ask a client that brought rows.")
    return str(with_rows[0])


def _outcomes(fit: Ended, name: str, given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Zeros in the place of outcomes that are left out, shaped as another client's; inputs may not be left out."""
    client = next((client for client in samples(fit.clients) if client.kind == kind), None)
    if client is None:  # the builder's own error names what it lacks
        return {}
    model, lengths = client.pymc_model(), {len(value) for value in given.values() if np.ndim(value)}
    inputs = {variable.name for rv in model.observed_RVs for variable in _graph.values_read([rv])}
    left_out = [key for key in client.arrays if key not in given]
    unread = {variable.name for variable in model.data_vars} - inputs
    if wrong := [key for key in left_out if key not in unread or not np.ndim(client.arrays[key])]:
        raise DataError(f"{name!r}: new data lack {some_of(wrong)}, which the model reads; give all but the outcomes.")
    if left_out and len(lengths) != 1:
        what = f"the number of outcomes {some_of(left_out)} cannot be told from {sorted(lengths)} rows"
        raise DataError(f"{name!r}: {what}; give outcomes of any value.")
    old = {key: np.asarray(client.arrays[key]) for key in left_out}
    return {key: np.zeros((*lengths, *value.shape[1:]), value.dtype) for key, value in old.items()}


# Means of outcomes in the place of draws: risks, rates, probabilities of levels ---------------------------------------


def require_mean(kind: Any, at: Any, builder: Any) -> None:
    """Check the keywords `kind` and `at`."""
    one_of("kind", kind, ("response", "mean"))
    if at is not None and (kind != "mean" or not hasattr(builder, "expected")):
        raise DeclarationError(f'at={shown(at)} is for kind="mean" of a formula of times until an event; leave it out.')


def declare_means(model: Any) -> list[str]:
    """Declare the mean of every outcome in an open model, and return the names; means that the user declared stay."""
    names = []
    for rv in model.observed_RVs:
        names.append(name := f"{rv.name}_mean")
        if name not in model.named_vars:
            value, dims = _mean(rv), tuple(model.named_vars_to_dims.get(rv.name) or ())
            pm.Deterministic(name, value, dims=dims if len(dims) == value.ndim else None)
    return names


def _mean(rv: Any) -> Any:
    if getattr(rv.owner.op, "name", "") == "categorical":
        p = rv.owner.inputs[-1]
        return pt.broadcast_to(p, (*rv.shape, p.shape[-1]))
    try:
        return mean(rv)
    except (NotImplementedError, UndefinedMomentException) as error:
        remedy = f'declare pm.Deterministic("{rv.name}_mean", ...), or use kind="response"'
        raise DeclarationError(f'kind="mean": PyMC knows no mean of {rv.name!r}; {remedy}.') from error


def _formula_means(
    builder: Any, arrays: Mapping[str, Any], posterior: xr.Dataset, at: Any, client_id: str
) -> xr.Dataset:
    sizes = posterior.sizes["chain"], posterior.sizes["draw"]
    draws = {str(name): np.asarray(values.values) for name, values in posterior.data_vars.items()}
    flat = {name: value.reshape(sizes[0] * sizes[1], *value.shape[2:]) for name, value in draws.items()}
    means = builder.expected(arrays, flat, at)
    values = means.draws.reshape(*sizes, *means.draws.shape[1:])
    dims = {means.name: (f"{means.name}_dim_0", *means.coords)}
    return idata.posterior_dataset({means.name: values}, dims, means.coords, {"client": client_id})
