"""Posteriors of clients and predictions at new rows, as methods of a fit: of those that took part, and of new ones."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.arrays import as_arrays, read_indices, require_not_negative
from fedppl.model.client import ClientModel, dims_and_coords, model_at
from fedppl.model.declaration import FederatedModel
from fedppl.model.enrolment import held_exactly, mismatch
from fedppl.model.interpreted import quiet
from fedppl.model.stack import samples
from fedppl.results import idata
from fedppl.results.at_client import client_posterior, has_rows, inputs
from fedppl.results.forward import containers_of_rows, draw_outcomes, drawn_anew, reads
from fedppl.results.groups import required
from fedppl.results.records import Ended, require_arrived
from fedppl.results.shared import declared, of_formula, require_mean
from fedppl.settings import some_of, text, whole
from fedppl.types import Array, DataError, DeclarationError


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
        New inputs by name, or a data frame with columns of these names. Of a formula one row may be given by scalars,
        ``{"age": 70, "arm": "drug"}``.
    kind
        "response" for draws of outcomes; "mean" for their mean given the parameters, a row and draw: risks, rates, of
        levels the probabilities of each, under the name of the outcome with ``_mean``. Of a binomial formula it is per
        trial. Of times until an event it is their median, ``_median``, or with `at` the probability of no event until
        then, ``_survival``.
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
        If the client is unknown, or no mean is known of a distribution: name it in the builder by
        ``pm.Deterministic("y_mean", ...)``.
    DataError
        If inputs do not fit the model.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> fit = fedppl.fit(model, clients, progressbar=False, random_seed=1)
    >>> own = fit.predict("client 0", {"y": [0.0]}, kind="mean", random_seed=1)["predictions"]["obs_mean"]
    >>> new = fit.predict(None, {"y": [0.0]}, kind="mean", random_seed=1)["predictions"]["obs_mean"]
    >>> bool(new.std() > 2 * own.std())
    True

    Notes
    -----
    *When this fails.* A mean has the uncertainty of the parameters, and not that of one outcome: that one patient's
    blood pressure lies in its interval nobody says. A new client is taken to be one more like those that took part;
    with few of them the sd between clients is uncertain, and risks at a new one with it.
    """
    asked: dict[str, Any] = {"kind": kind, "at": at, "draws": draws, "chains": chains, "random_seed": random_seed}
    if client_id is None:
        return _new_without_rows(fit, inputs(new_data), name="new client", **asked)
    if isinstance(client_id, Mapping | pd.DataFrame):
        raise DeclarationError(
            "client_id= is a table, and wants the id of a client, or None for one without rows. For a new client with "
            "rows: fit.new_client(data, predict=new_data)."
        )
    model = fit.clients.get(str(client_id))
    if model is None:  # says why there is none
        return fit.client(client_id, predict=inputs(new_data), draws=draws, chains=chains, random_seed=random_seed)
    return at_client(fit, model, inputs(new_data), **asked)


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
        one that has none yet, whose variables are drawn from the hierarchy, such as a site's effect in a meta-analysis;
        where they depend on what a client is, `predict` has to say at which rows.
    predict, draws, chains, random_seed
        As in `client`.
    name, kind
        Name in results and errors, and its kind where the declaration has several, by default as that tells kinds.

    Returns
    -------
    arviz.InferenceData or xarray.DataTree
    """
    text("name", name)
    asked: dict[str, Any] = {"draws": draws, "chains": chains, "random_seed": random_seed}
    if data is None:
        return _new_without_rows(fit, predict, name=name, client_kind=kind, **asked)
    model = fit.declaration.enrol({name: data}, kernel=fit.algorithm.needs.kernel, kinds={name: kind})[name]
    if model.layout.fingerprint != fit.layout.fingerprint:
        raise DeclarationError(
            f"{name!r} has shared layout {model.layout.variables}, the fit has {fit.layout.variables}; "
            "give the new client the same columns."
        )
    return at_client(fit, model, predict, **asked)


def at_client(
    fit: Any,
    model: ClientModel,
    predict: Any,
    *,
    draws: int,
    chains: int,
    random_seed: int | None,
    groups: Sequence[str] | str = (),
    kind: str = "response",
    at: Any = None,
) -> Any:
    """The posterior of a client whose data are here, and predictions where there are new inputs."""
    check_draws(draws, chains)
    groups, seed = required(groups), seed_of(fit, random_seed)
    client_id = model.client_id
    rows, how = has_rows(model), {"kind": kind, "times": at}
    if predict is None:
        drawer = None
    elif rows:
        require_mean(kind, at, model.declared.builder)
        given = new_inputs(fit.declaration, model, predict)

        def drawer(posterior: xr.Dataset, coords: Any) -> Any:
            return predictions(model, posterior, given, seed, coords, kind, at)
    else:
        there = rows_at(fit, client_id, predict, None)
        require_mean(kind, at, there.builder)

        def drawer(posterior: xr.Dataset, coords: Any) -> Any:
            require_own(there, model)
            return predicted(there, posterior, _shared(fit), seed, **how)[1:]

    require_arrived(fit, f"the posterior of client {client_id!r}")
    message, personal = fit.algorithm.result.final_message(fit.state, client_id), fit.personal.get(client_id)
    return client_posterior(fit.algorithm, model, personal, message, seed, draws, chains, fit.status, drawer, groups)


def _new_without_rows(
    fit: Any,
    given: Any,
    *,
    name: str,
    draws: int,
    chains: int,
    random_seed: int | None,
    client_kind: str | None = None,
    kind: str = "response",
    at: Any = None,
) -> Any:
    """A client of which nothing is known but that it is one more of them."""
    there = anywhere(fit, name) if given is None else rows_at(fit, name, given, client_kind)
    require_mean(kind, at, there.builder)
    require_arrived(fit, "predictions for a new client")
    held = fit.shared(draws=draws, chains=chains, random_seed=random_seed)
    if "posterior" not in held:
        _ = fit.posterior  # says what there is in its place
    known = idata.as_dataset(held, "posterior")
    marks = {"status": fit.status.value, "converged": int(fit.status.ok)}
    names = ("posterior", "predictions", "predictions_constant_data")
    found = predicted(there, known, _shared(fit), seed_of(fit, random_seed), kind, at)
    return idata.from_groups({k: one.assign_attrs(marks) for k, one in zip(names, found, strict=True)})


def _shared(fit: Ended) -> tuple[str, ...]:
    return tuple(variable.name for variable in fit.layout.variables)


def seed_of(fit: Ended, random_seed: int | None) -> int:
    """The seed that was given, or the fit's."""
    return fit.seed if random_seed is None else whole("random_seed", random_seed, 0)


def check_draws(draws: int, chains: int) -> None:
    """Refuse numbers of draws that are none."""
    whole("draws", draws)
    whole("chains", chains)


# Predictive draws on new inputs, by PyMC: of a client that is here, and of one of which no row is known ---------------

logger = logging.getLogger(__name__)


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
    coords: Mapping[str, Any],
    kind: str = "response",
    at: Any = None,
) -> tuple[xr.Dataset, xr.Dataset]:
    """Draw the observed variables, or their means, at new inputs for every posterior draw: (predictions, inputs).

    Outcomes that `new_data` leaves out are filled with zeros of the new length: nothing reads them. Inputs with a
    row per observation may not be left out.
    """
    model = client.pymc_model()
    containers = {variable.name: variable for variable in model.data_vars}
    if not containers:
        raise DataError(
            f"client {client.client_id!r}: the builder has no pm.Data container, so inputs cannot be exchanged for new "
            "ones. Put the data into pm.Data."
        )
    unknown = sorted(set(new_data) - set(containers))
    if unknown or not new_data:
        raise DataError(
            f"new data {sorted(new_data)} must name containers of the model: {sorted(containers)}. Where it has no "
            "inputs, give the outcomes: their number is that of the predictions, and their values are not read."
        )
    values = {}
    for name, value in new_data.items():
        if np.ma.is_masked(value):
            raise DataError(f"new data {name!r} have masked values; drop or impute them.")
        old, new = client.arrays[name], np.asarray(value)
        if new.ndim != old.ndim or new.shape[1:] != old.shape[1:]:
            raise DataError(
                f"new data {name!r} has shape {new.shape}, but the client's has {old.shape}; give it the same columns."
            )
        if new.dtype.kind not in "biuf":
            raise DataError(
                f"new data {name!r} has dtype {new.dtype}, which is not numeric and real; encode it as numbers."
            )
        if new.size == 0:
            raise DataError(f"new data {name!r} has shape {new.shape}, that is zero rows; give one row or more.")
        if not np.all(np.isfinite(new)):
            raise DataError(f"new data {name!r} holds missing or infinite values; drop or impute them.")
        values[name] = held_exactly(f"new data {name!r}", new, containers[name].type.dtype)
    anew = _fill(model, client, values)
    renewed = {
        dim: np.arange(len(value))
        for name, value in values.items()
        for dim in (model.named_vars_to_dims.get(name) or ())[:1]
        if model.coords.get(dim) is not None and len(model.coords[dim]) != len(value)
    }
    dims = {name: tuple(d) for name, d in model.named_vars_to_dims.items()}
    inputs = {name: values[name] for name in new_data}
    input_dims = {k: dims.get(k) or tuple(f"{k}_dim_{i}" for i in range(v.ndim)) for k, v in inputs.items()}
    told = idata.dataset(inputs, input_dims, {})
    if kind == "mean" and hasattr(client.declared.builder, "expected"):
        return of_formula(client.declared.builder, values, posterior, at, client.client_id), told
    with model, quiet():
        pm.set_data(values, coords=renewed)
        names = declared(model) if kind == "mean" else [variable.name for variable in model.observed_RVs]
        posterior = posterior.drop_vars(names, errors="ignore")
        arrays = _drawn(model, client.client_id, values, inputs, posterior, names, seed, anew, predictions=True)
    drawn = idata.posterior_dataset(arrays, dims, {**coords, **renewed}, {"client": client.client_id})
    levels = getattr(client.declared.builder, "outcome_levels", {})  # of what is more than a function: formulas
    for name in levels.keys() & drawn.data_vars.keys():
        drawn[name].attrs["levels"] = levels[name]
    return drawn, told


def _fill(model: Any, client: ClientModel, values: dict[str, Any]) -> list[str]:
    """Fill in what new data leave out and nothing reads; returns the names of variables that are drawn anew."""
    found, of_rows, given = reads(model), containers_of_rows(model), sorted(values)
    vectors = [name for name in given if np.ndim(values[name])]
    of = [name for name in vectors if name in of_rows] or vectors
    lengths = {(len(client.arrays[name]), len(values[name])) for name in of}
    before, after = lengths.pop() if len(lengths) == 1 else (None, None)
    as_long = [name for name, old in client.arrays.items() if np.ndim(old) and len(old) == before]
    left_out = [name for name in as_long if name in of_rows and name not in values]
    others = [k for k in values if k not in of_rows and not np.array_equal(values[k], client.arrays[k])]
    rows = [*(name for name in given if name in of_rows), *left_out]
    dims = [dim for name in rows for dim in (model.named_vars_to_dims.get(name) or ())[:1]]
    anew, told = drawn_anew(found, [*rows, *dims], others)
    if told:
        logger.warning(
            "client %s: %s are drawn anew, from their prior at the new values of %s: those are of another client",
            *(client.client_id, told, others),
        )
    stay = {rv for rv in model.free_RVs if rv.name not in anew}
    read = {rv: {one.name for one in _graph.values_read([rv], stay)} for rv in model.observed_RVs}
    for name in left_out:
        readers = [repr(rv.name) for rv, names in read.items() if name in names]
        if not readers:
            values[name] = np.zeros((after, *client.arrays[name].shape[1:]), dtype=model[name].type.dtype)
        elif after != before:
            raise DataError(
                f"new data {given} leave out {name!r}, which has a row per observation and which the "
                f"distribution of {', '.join(readers)} reads; give its {after} new rows too."
            )
    return anew


class At(NamedTuple):
    """New rows of a client of which the fit saw none, and the builder that takes them."""

    name: str
    builder: Any
    given: Mapping[str, Any]  # arrays of new inputs
    arrays: Mapping[str, Any]  # with something in the place of outcomes


def rows_at(fit: Ended, name: str, given: Any, kind: str | None) -> At:
    """Read new inputs as those of a client that is not among the others, or of which only a summary is known."""
    kind = _kind_with_rows(fit) if kind is None else fit.declaration.kind_of(name, given, kind)
    builder = fit.declaration.declared_as(kind).builder
    own = getattr(builder, "read_unseen", None)
    if own is not None:
        arrays = dict(own(name, given))
        return At(name, builder, {key: arrays[key] for key in arrays if not key.startswith("outcome")}, arrays)
    read = as_arrays(name, fit.declaration.read(name, given, kind))
    return At(name, builder, read, {**read, **_outcomes(fit, name, read, kind)})


def anywhere(fit: Ended, name: str) -> At:
    """Of no rows at all: variables of a client's own that depend on none, as the model of one that is here has them."""
    one = next(iter(fit.clients.values()), None)
    if one is None:
        raise DeclarationError("no client's model is here; say at which rows it is to be predicted: predict={...}.")
    at = At(name, one.declared.builder, {}, one.arrays)
    model = model_at(at.builder, name, at.arrays)
    if by_rows := [rv.name for rv in model.free_RVs if _reads(model, rv)]:
        raise DeclarationError(
            f"data=None is a client without rows, and its {by_rows} depend on what the client is: say at which rows it "
            "is to be predicted, predict={...}, or fit.predict(None, frame)."
        )
    return at


def _reads(model: Any, variable: Any) -> bool:
    """Whether a variable depends on data, or on what is observed."""
    return bool({*model.data_vars, *model.observed_RVs} & {*ancestors([variable])})


def require_own(at: At, client: ClientModel) -> None:
    """Refuse rows whose model has variables of the client's own that its summary says nothing of."""
    own = {variable.name for variable in client.local}
    lost = [
        v.name for v in model_at(at.builder, at.name, at.arrays).free_RVs if v.name not in own | {*client.layout.slices}
    ]
    if lost:
        raise DeclarationError(
            f"client {at.name!r} brought a summary, whose model has the variables {sorted(own)} and not {lost}, which "
            "rows depend on; declare what is a client's own by one function that all builders call."
        )


def predicted(
    at: At, known: xr.Dataset, shared: tuple[str, ...], seed: int, kind: str, times: Any
) -> tuple[xr.Dataset, xr.Dataset, xr.Dataset]:
    """Draws of all variables, of what is predicted, and the inputs: what `known` has not is drawn given what it has."""
    model = model_at(at.builder, at.name, at.arrays)
    dims, coords = dims_and_coords(model)
    kept = {
        name: np.asarray(known[name].values)
        for name, shape in _shapes(model).items()
        if name in known and known[name].shape[2:] == shape
    }
    if lost := [name for name in shared if name not in kept]:
        raise DataError(f"{at.name!r}: {lost} have another shape here than in the fit; give the same columns.")
    posterior = idata.posterior_dataset(kept, dims, coords)
    formula = kind == "mean" and hasattr(at.builder, "expected")
    with model, quiet():
        outcomes = [] if formula else declared(model) if kind == "mean" else [v.name for v in model.observed_RVs]
        every = [*model.free_RVs, *model.deterministics]
        if not at.given:  # no rows: nothing that depends on any
            outcomes, every = [], [v for v in every if not _reads(model, v)]
        more = [v.name for v in every if v.name not in {*kept, *outcomes}]
        names = [*more, *outcomes]
        drawn = _drawn(model, at.name, at.arrays, at.given, posterior, names, seed) if names else {}
    whole = idata.posterior_dataset({**kept, **{name: drawn[name] for name in more}}, dims, coords, {"client": at.name})
    inputs = idata.posterior_dataset({k: np.asarray(v)[None, None] for k, v in at.given.items()}, dims, coords)
    if formula:
        found = of_formula(at.builder, at.arrays, whole, times, at.name)
    else:
        found = idata.posterior_dataset({n: drawn[n] for n in outcomes}, dims, coords, {"client": at.name})
    return whole, found, inputs.isel(chain=0, draw=0, drop=True, missing_dims="ignore")


def _drawn(
    model: Any,
    client_id: str,
    arrays: Mapping[str, Any],
    given: Mapping[str, Any],
    posterior: xr.Dataset,
    names: list[str],
    seed: int,
    anew: Sequence[str] = (),
    *,
    predictions: bool = False,
) -> dict[str, Array]:
    """Draws by PyMC of these variables given the others; of inputs that do not fit it says which were `given`."""
    try:
        require_not_negative(client_id, read_indices(model), dict(arrays), ())
        group = draw_outcomes(model, posterior, seed % 2**32, anew, names, predictions=predictions)
    except (IndexError, ValueError, AssertionError) as error:
        if isinstance(error, DataError):
            raise
        raise mismatch(client_id, given, error) from error
    return {name: np.asarray(group[name].values) for name in names}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    sizes = pm.draw([rv.shape for rv in model.free_RVs], mode=interpreted.PYTHON_MODE)
    return {rv.name: tuple(int(n) for n in size) for rv, size in zip(model.free_RVs, sizes, strict=True)}


def _kind_with_rows(fit: Ended) -> str:
    """The kind of clients that bring rows, where there is one."""
    kinds = list(fit.declaration.builders)
    if len(kinds) == 1 or hasattr(fit.declaration.builder, "read_unseen"):
        return kinds[0]
    found = list(dict.fromkeys(client.kind for client in samples(fit.clients) if has_rows(client)))
    if len(found) != 1:
        raise DeclarationError(
            f"rows of a client without any are of a kind, and clients with rows are of {found or kinds}; ask a client "
            "that brought rows, or take a fit whose clients with rows are of one kind."
        )
    return str(found[0])


def _outcomes(fit: Ended, name: str, given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Zeros in the place of outcomes that are left out, as another client has them: nothing else may be left out."""
    one = next((client for client in samples(fit.clients) if client.kind == kind), None)
    if one is None:  # the builder says what it lacks
        return {}
    model, lengths = one.pymc_model(), {len(value) for value in given.values() if np.ndim(value)}
    read = {rv: _graph.values_read([rv]) for rv in model.observed_RVs}
    inputs = {variable.name for of in read.values() for variable in of}
    left_out = [key for key in one.arrays if key not in given]
    known = {variable.name for variable in model.data_vars} - inputs
    if wrong := [key for key in left_out if key not in known or not np.ndim(one.arrays[key])]:
        raise DataError(
            f"{name!r}: new data lack {some_of(wrong)}, which the model reads, and of a client without rows nothing is "
            "known; give all but the outcomes."
        )
    if left_out and len(lengths) != 1:
        raise DataError(
            f"{name!r}: the number of outcomes {some_of(left_out)} cannot be told from new data with {sorted(lengths)} "
            "rows; give them too: their values are not read."
        )
    old = {key: np.asarray(one.arrays[key]) for key in left_out}
    return {key: np.zeros((*lengths, *value.shape[1:]), value.dtype) for key, value in old.items()}
