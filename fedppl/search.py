"""Choosing settings on validation data that the clients hold: rows never travel, sums of validation losses do."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import logsumexp

from fedppl.contracts import AnyAlgorithm, EngineFactory, LocalInference
from fedppl.model._data import as_arrays
from fedppl.model._pack import pack
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.numerics.covariance import Covariance
from fedppl.numerics.streams import stream
from fedppl.results.arrival import require_arrived
from fedppl.results.fit import Fit
from fedppl.run.loop import _seed, fit
from fedppl.run.participation import Participation
from fedppl.run.replies import sum_replies
from fedppl.settings import between, shown, whole
from fedppl.types import (
    ConvergenceWarning,
    DataError,
    DeclarationError,
    LocalFailure,
    Message,
    NotConvergedError,
    Status,
)

__all__ = ["Search", "ValidationLoss", "grid", "grid_search", "holdout", "validation_loss"]

logger = logging.getLogger(__name__)

Clients = Mapping[str, Mapping[str, Any]]
Loss = Callable[[Any, Mapping[str, Any]], float]


class ValidationLoss(NamedTuple):
    """Sum of the clients' validation losses, and over how many rows."""

    total: float
    rows: int

    @property
    def mean(self) -> float:
        """Loss per row."""
        return self.total / self.rows


@dataclass(frozen=True, eq=False)
class Search:
    """Result of `fedppl.grid_search`.

    Attributes
    ----------
    table
        A row per candidate: validation ``loss`` per row (inf where it is of no use), ``status``, ``rounds``,
        ``seconds`` and ``message``.
    best
        Name of the candidate with the smallest loss.
    fit
        Its fit, on the training rows.
    algorithm
        The candidate itself, to fit again with.
    """

    table: pd.DataFrame
    best: str
    fit: Fit
    algorithm: AnyAlgorithm


def holdout(
    clients: Clients, fraction: float = 0.2, *, rows: Sequence[str] | None = None, random_seed: int
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Split every client's rows into a training and a validation part; each client splits its own.

    Parameters
    ----------
    clients
        Client id to that client's data, name to array.
    fraction
        Of a client's rows to hold out, rounded to whole rows: at least one, and never all.
    rows
        Names of the arrays that have a row per observation. By default the arrays of the leading length that most
        of a client's arrays have. All others, scalars too, go to both parts unchanged.
    random_seed
        Which rows are held out depends on it and on the client's id, not on the other clients.

    Returns
    -------
    training, validation
        Client id to data, each with rows in the order they had.

    Raises
    ------
    DataError
        If a client has a single row, or it is not clear which of its arrays have a row per observation.
    DeclarationError
        If the fraction is out of range.

    Examples
    --------
    >>> import numpy as np, fedppl
    >>> training, validation = fedppl.holdout({"a": {"X": np.ones((10, 2)), "y": np.arange(10)}}, random_seed=1)
    >>> training["a"]["X"].shape, len(validation["a"]["y"])
    ((8, 2), 2)

    Notes
    -----
    *When this fails.* Rows that belong together, such as visits of one patient, should not be torn apart: split those
    by hand. An array that has as many rows as there are observations by chance is split too; name those to split in
    `rows`.
    """
    if isinstance(rows, str):
        raise DeclarationError(f"rows={rows!r} must be a list of names: [{rows!r}].")
    fraction = between("fraction", fraction, 0, 1)
    if not isinstance(clients, Mapping):
        raise DataError(f"clients are {type(clients).__name__}; pass a mapping from client id to its data.")
    seed = _seed(random_seed)
    checked = {str(client_id): as_arrays(str(client_id), data) for client_id, data in clients.items()}
    by_client = {client_id: _split_names(client_id, arrays, rows) for client_id, arrays in checked.items()}
    usual = next(iter(by_client.values()), set())
    training: dict[str, dict[str, Any]] = {}
    validation: dict[str, dict[str, Any]] = {}
    for client_id, arrays in checked.items():
        split = by_client[client_id]
        if split != usual:
            raise DataError(
                f"client {client_id!r}: {sorted(split)} have one length, at other clients {sorted(usual)} do; "
                "name the arrays that have a row per observation in rows=[...]."
            )
        count = len(arrays[next(iter(split))])
        if count < 2:
            raise DataError(
                f"client {client_id!r} has {count} row, which cannot be split in two; leave the client out, or give it "
                "validation data of its own."
            )
        size = min(max(round(fraction * count), 1), count - 1)
        order = stream((seed, 3, *client_id.encode())).permutation(count)
        for part, chosen in ((training, np.sort(order[size:])), (validation, np.sort(order[:size]))):
            part[client_id] = {name: array[chosen] if name in split else array for name, array in arrays.items()}
    return training, validation


def grid(build: Callable[..., AnyAlgorithm], **values: Sequence[Any]) -> dict[str, AnyAlgorithm]:
    """Every combination of settings, by name.

    Parameters
    ----------
    build
        What builds an algorithm, such as `fedppl.FedAvg`, or a ``functools.partial`` of it with what all share.
    **values
        A list of values for each setting that varies.

    Returns
    -------
    dict
        Name to algorithm, the last setting varying fastest.

    Raises
    ------
    DeclarationError
        If a setting has no list of values, or two candidates would have one name.

    Examples
    --------
    >>> import fedppl
    >>> list(fedppl.grid(fedppl.FedAvg, learning_rate=[0.01, 0.1], steps=[20]))
    ['learning_rate=0.01, steps=20', 'learning_rate=0.1, steps=20']

    Notes
    -----
    *When this fails.* Every candidate is a fit: three settings of five values each are 125 of them.
    """
    if not callable(build):
        raise DeclarationError(
            f"build={shown(build)} is no function; pass one that builds, as in grid(fedppl.EP, ...)."
        )
    if not values:
        raise DeclarationError("no settings: name one or more with a list of values each, as in learning_rate=[...].")
    for name, choices in values.items():
        if isinstance(choices, str) or not isinstance(choices, Sequence | np.ndarray) or len(choices) == 0:
            raise DeclarationError(f"{name}={choices!r} is no list of values; pass one or more, as in {name}=[...].")
    candidates: dict[str, AnyAlgorithm] = {}
    for combination in itertools.product(*values.values()):
        settings = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in zip(values, combination, strict=True)
        }
        label = ", ".join(f"{name}={_text(value)}" for name, value in settings.items())
        if label in candidates:
            raise DeclarationError(f"two candidates are called {label!r}; list every value once.")
        candidates[label] = build(**settings)
    return candidates


def validation_loss(fit: Fit, validation: Clients, *, loss: Loss | None = None, draws: int = 200) -> ValidationLoss:
    r"""Loss of a fit on rows that the clients held out, summed over clients.

    .. math:: -\sum_k \log \frac1S \sum_{s=1}^S p(y_k^\text{val} \mid \theta_k^{(s)}, \phi^{(s)})

    with draws of (φ, θ_k) made at client k from its training rows, as `Fit.client` makes them. Where the algorithm
    estimates points there is one. Each client computes its own term; only the sum over clients is seen outside.

    Parameters
    ----------
    fit
        Of clients in this process.
    validation
        Client id to held-out data, with the keys of the training data; some or all of the fit's clients.
    loss
        Another loss: ``loss(posterior, data)`` gets ``fit.client(id)["posterior"]`` and the client's held-out arrays,
        and returns a *sum* over their rows.
    draws
        S.

    Returns
    -------
    ValidationLoss
        Total and number of rows.

    Raises
    ------
    DeclarationError, DataError
        If the clients are sites of their own, ids or keys are not the fit's, or the density of held-out rows cannot be
        told from that of the local variables.
    NotConvergedError
        Where the fit was broken off before there was a posterior.
    LocalFailure
        If a client cannot draw.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> training, validation = fedppl.holdout(clients, random_seed=1)
    >>> fit = fedppl.fit(model, training, fedppl.EP(), progressbar=False, random_seed=1)
    >>> found = fedppl.validation_loss(fit, validation)
    >>> found.rows, 1.0 < found.mean < 2.0
    (12, True)

    Notes
    -----
    *When this fails.* With many held-out rows at a client the average is one over few of the draws, and too large a
    loss: raise `draws`. A loss of one client's rows is not private; only among the sum of many is it hidden. Clients
    that an engine ran elsewhere keep their personal states there, and here their draws do without.
    """
    if not validation or not isinstance(validation, Mapping):
        raise DataError("no validation data: pass a mapping from client id to that client's held-out data.")
    draws = whole("draws", draws)
    if not fit.clients:
        raise DeclarationError(
            "the fit's clients are sites of their own and their data are not here, so nor is their validation loss; "
            "search on clients in this process, or compare what the sites report of their own held-out rows."
        )
    require_arrived(fit, "fedppl.validation_loss")
    losses: dict[str, Message] = {}
    for client_id, data in ((str(k), v) for k, v in validation.items()):
        if client_id not in fit.clients:
            raise DeclarationError(
                f"validation has client {client_id!r}, which did not take part; clients are "
                f"{list(fit.client_ids)[:10]}."
            )
        value, rows = _client_loss(fit, fit.clients[client_id], data, loss, draws)
        losses[client_id] = {"total": np.array(value), "rows": np.array(float(rows))}
    total = sum_replies(losses)
    return ValidationLoss(float(total["total"]), int(total["rows"]))


def grid_search(
    model: FederatedModel,
    clients: Clients,
    algorithms: Mapping[str, AnyAlgorithm],
    validation: Clients,
    *,
    loss: Loss | None = None,
    rounds: int = 20,
    engine: EngineFactory | None = None,
    participation: Participation | int | float | None = None,
    progressbar: bool = True,
    random_seed: int | np.random.Generator | None = None,
) -> Search:
    """Fit every candidate on training rows and choose the one with the smallest loss on held-out rows.

    Parameters
    ----------
    model
        The declaration.
    clients
        Training data by client id, for example the first part of `fedppl.holdout`.
    algorithms
        Candidates by name, for example of `fedppl.grid`.
    validation
        Held-out data of the same clients, with the same keys. Test data have no place here.
    loss
        As in `fedppl.validation_loss`.
    rounds, engine, participation, progressbar
        As in `fedppl.fit`.
    random_seed
        Seed of every fit: candidates differ by their settings and not by chance.

    Returns
    -------
    Search
        Table of all candidates, the best one and its fit.

    Raises
    ------
    DeclarationError
        If no candidate is of use (it says why), or clients and validation data do not belong together.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> training, validation = fedppl.holdout(clients, random_seed=1)
    >>> candidates = fedppl.grid(fedppl.FedAvg, learning_rate=[1e-6, 0.1])
    >>> found = fedppl.grid_search(model, training, candidates, validation, progressbar=False, random_seed=1)
    >>> found.best
    'learning_rate=0.1'

    Notes
    -----
    A candidate has the loss inf, and is never chosen, when a client that was asked never sent a usable reply, no client
    did in the last round (steps that diverge end so), the fit is stalled or has no posterior yet, or its loss is not
    finite. Of equal losses
    the first in the order given wins. Afterwards ``fedppl.fit(model, all_rows, found.algorithm)`` uses the
    held-out rows too.

    *When this fails.* The winner's validation loss is the smallest of several and so too good: judge the chosen fit on
    test rows that no candidate saw. A winner at the end of its list asks for a longer list. Fits that ran out of rounds
    are compared as they are: with more `rounds` another may win.
    """
    if not algorithms or not isinstance(algorithms, Mapping):
        raise DeclarationError("no candidates: pass a mapping from name to algorithm, such as fedppl.grid(...).")
    if loss is not None and not callable(loss):
        raise DeclarationError(f"loss={loss!r} is not a function; pass one of (posterior, data) that sums over rows.")
    for what, data in (("clients", clients), ("validation", validation)):
        if not isinstance(data, Mapping):
            raise DeclarationError(f"{what} is {type(data).__name__}; pass a mapping from client id to its data.")
    taking_part, holding = set(map(str, clients)), set(map(str, validation))
    if taking_part != holding:
        alone, without = sorted(holding - taking_part), sorted(taking_part - holding)
        raise DeclarationError(
            f"clients and validation data do not belong together: {alone[:5]} have validation data and take no part, "
            f"{without[:5]} take part and have none. Split with fedppl.holdout."
        )
    seed, table = _seed(random_seed), {}
    best: tuple[float, str, Fit] | None = None
    for name, algorithm in algorithms.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", ConvergenceWarning
                )  # the table has every status; the best one's is said
                fitted = fit(
                    model,
                    clients,
                    algorithm,
                    rounds=rounds,
                    engine=engine,
                    participation=participation,
                    progressbar=progressbar,
                    random_seed=seed,
                )
        except DeclarationError as error:
            raise DeclarationError(f"candidate {name!r}: {error}") from error
        found, message = _judged(fitted, validation, loss)
        logger.info("candidate %s: validation loss %.6g", name, found, extra={"candidate": name, "loss": found})
        table[name] = (found, fitted.status.value, len(fitted.records), fitted.seconds, message)
        if found < (best[0] if best else np.inf):
            best = found, name, fitted
    if best is None:
        reasons = "; ".join(f"{name}: {row[-1]}" for name, row in table.items())
        raise DeclarationError(f"no candidate is of use: {reasons}. Widen the grid.")
    if best[2].algorithm.result.tests_convergence and not best[2].status.ok:
        told = f"the best candidate, {best[1]!r}, ended with status {best[2].status.value}: {best[2].message}"
        warnings.warn(ConvergenceWarning(told, best[2]), stacklevel=2)
    frame = pd.DataFrame.from_dict(table, orient="index", columns=["loss", "status", "rounds", "seconds", "message"])
    return Search(frame.rename_axis("candidate"), best[1], best[2], algorithms[best[1]])


def _judged(fitted: Fit, validation: Clients, loss: Loss | None) -> tuple[float, str]:
    """Loss per row of a candidate and its fit's message, or inf and why it is of no use."""
    answered = {client_id for record in fitted.records for client_id in record.infos}
    for record in fitted.records:
        for client_id, reason in record.failures.items():
            if client_id not in answered:
                return np.inf, f"client {client_id!r} never sent a usable reply: {reason}"
    last = fitted.records[-1]
    if not last.infos:
        return np.inf, f"no client sent a usable reply in the last round: {next(iter(last.failures.values()))}"
    if fitted.status is Status.STALLED:
        return np.inf, fitted.message
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            found = validation_loss(fitted, validation, loss=loss).mean
    except (LocalFailure, NotConvergedError, ArithmeticError, np.linalg.LinAlgError) as error:
        return np.inf, f"no validation loss: {error}"
    return (found, fitted.message) if np.isfinite(found) else (np.inf, f"the validation loss is {found}")


def _client_loss(
    fit: Fit, client: ClientModel, data: Mapping[str, Any], loss: Loss | None, draws: int
) -> tuple[float, int]:
    """One client's sum of losses over its held-out rows, and their number: what the client would send."""
    client_id = client.client_id
    held_out = as_arrays(client_id, data)
    if set(held_out) != set(client.arrays):
        raise DataError(
            f"client {client_id!r}: validation data have keys {sorted(held_out)}, training data "
            f"{sorted(client.arrays)}; hold out rows of all that have rows, and repeat the rest."
        )
    held = fit.declaration.with_data(client, client_id, held_out, kernel=fit.algorithm.needs.kernel)
    if loss is not None:
        value: Any = loss(fit.client(client_id, draws=draws, chains=1)["posterior"], held_out)
        if np.ndim(value) != 0:
            raise DeclarationError(f"loss returned an array of shape {np.shape(value)}; return the sum over rows.")
        return float(value), held.rows
    none = _without_rows(client, held)
    rng = stream((fit.seed, 2, *client_id.encode()))
    message = fit.algorithm.result.final_message(fit.state, client_id)
    sample = fit.algorithm.result.draw(client, fit.personal.get(client_id), message, draws, 1, rng)
    points = np.concatenate([sample.shared[0], sample.local[0]], axis=1)
    if sample.diagnostics.get("point_estimate"):
        points = points[:1]
    log_density = [float(held.kernel(x, *held.data)[0]) - float(held.kernel(x, *none)[0]) for x in points]
    return float(np.log(len(log_density)) - logsumexp(log_density)), held.rows


def _without_rows(client: ClientModel, held: ClientModel) -> tuple[Any, Any, Any]:
    """The held-out data without their rows, at which the log density is that of the local variables alone."""
    parts = held.template.parts
    # Two parts of a client have different numbers of rows, and tell better than one which arrays have them.
    by_row = {
        name
        for name, array in held.arrays.items()
        if (np.shape(array)[:1], np.shape(client.arrays[name])[:1]) == ((held.rows,), (client.rows,))
    }
    observed = {parts.model.rvs_to_values[rv].name for rv in parts.model.observed_RVs} & set(held.arrays)
    free = held.inputs[len(parts.data) :]
    grows = held.local != client.local or (held.rows == client.rows and any(held.rows in shape for shape in free))
    if grows or not by_row or not observed <= by_row or not parts.data:
        raise DeclarationError(
            f"client {client.client_id!r}: the density of held-out rows cannot be told from that of its local "
            "variables; that needs pm.Data containers, observed arrays of one length, and no local variable with an "
            "entry per row. Pass a loss=."
        )
    values = zip(parts.data, held.inputs, strict=False)
    packed: tuple[Any, Any, Any] = pack((*(v[:0] if data.name in by_row else v for data, v in values), *free))
    return packed


def _split_names(client_id: str, arrays: Mapping[str, Any], rows: Sequence[str] | None) -> set[str]:
    """Names of a client's arrays that have a row per observation."""
    lengths = {name: len(array) for name, array in arrays.items() if np.ndim(array)}
    if rows is not None:
        named = {rows} if isinstance(rows, str) else set(rows)
        found = {lengths.get(name) for name in named}
        if len(found) != 1 or None in found:
            shapes = {name: np.shape(arrays[name]) if name in arrays else "absent" for name in sorted(named)}
            raise DataError(f"client {client_id!r}: rows={sorted(named)} must name arrays of one length, not {shapes}.")
        return named
    by_length = {n: {name for name in lengths if lengths[name] == n} for n in lengths.values()}
    common = sorted(by_length.values(), key=len, reverse=True)
    if not common or (len(common) > 1 and len(common[0]) == len(common[1])):
        shapes = {name: np.shape(array) for name, array in arrays.items()}
        raise DataError(
            f"client {client_id!r}: arrays of shapes {shapes} do not tell which have a row per observation; "
            "name those in rows=[...]."
        )
    return common[0]


def _text(value: Any) -> str:
    """A setting in a candidate's name."""
    if isinstance(value, LocalInference | Covariance):
        return value.describe()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
