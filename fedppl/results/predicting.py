"""Posteriors of clients and predictions at new rows, as methods of a fit: of those that took part, and of new ones."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
import xarray as xr

from fedppl.model.client import ClientModel
from fedppl.results import idata, means
from fedppl.results.arrival import Ended, require_arrived
from fedppl.results.at_client import client_posterior, inputs
from fedppl.results.groups import required
from fedppl.results.predict import anywhere, new_inputs, predicted, predictions, require_own, rows_at
from fedppl.results.rows import has_rows
from fedppl.settings import text, whole
from fedppl.types import DeclarationError


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
        means.required(kind, at, model.declared.builder)
        given = new_inputs(fit.declaration, model, predict)

        def drawer(posterior: xr.Dataset, coords: Any) -> Any:
            return predictions(model, posterior, given, seed, coords, kind, at)
    else:
        there = rows_at(fit, client_id, predict, None)
        means.required(kind, at, there.builder)

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
    means.required(kind, at, there.builder)
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
