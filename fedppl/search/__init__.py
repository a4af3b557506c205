"""Settings chosen by rows that clients hold out: sums of validation losses travel, rows never do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from fedppl.data.frames import require_clients
from fedppl.model.checks import as_arrays
from fedppl.model.client import ClientModel
from fedppl.model.compiled import pack
from fedppl.numerics.streams import stream
from fedppl.results.at_client import require_rows
from fedppl.results.fit import Fit
from fedppl.results.records import require_arrived
from fedppl.run.loop import seed_of
from fedppl.settings import a_fit, between, shown, some_of, takes, whole
from fedppl.types import DataError, DeclarationError

__all__ = ["ValidationLoss", "holdout", "validation_loss"]

Clients = Mapping[str, Mapping[str, Any]]
Loss = Callable[[Any, Mapping[str, Any]], float]


class ValidationLoss(NamedTuple):
    """Sum of the clients' validation losses, and the number of their rows."""

    total: float
    rows: int

    @property
    def mean(self) -> float:
        """Loss per row."""
        return self.total / self.rows


def validation_loss(fit: Fit, validation: Clients, *, loss: Loss | None = None, draws: int = 200) -> ValidationLoss:
    r"""Loss of a fit on rows that the clients held out, summed over clients.

    .. math:: -\sum_k \log \frac1S \sum_{s=1}^S p(y_k^\text{val} \mid \theta_k^{(s)}, \phi^{(s)})

    with draws of (φ, θ_k) made at client k from its training rows, as `Fit.client` makes them. Of point
    estimates there is one. For a posterior of a linearised model they are of that model, like the predictions of its
    algorithm. Each client computes its own term; only the sum over clients leaves them.

    Parameters
    ----------
    fit
        A fit of clients in this process.
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
        separated from that of the local variables.
    NotConvergedError
        Where the fit ended before there was a posterior.
    LocalFailure
        If a client cannot draw.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> training, validation = fedppl.search.holdout(clients, random_seed=1)
    >>> fit = fedppl.fit(model, training, fedppl.EP(), progressbar=False, random_seed=1)
    >>> found = fedppl.search.validation_loss(fit, validation)
    >>> found.rows, 1.0 < found.mean < 2.0
    (12, True)

    Notes
    -----
    *When this fails.* With many held-out rows at a client the average is one over few of the draws, and too large a
    loss: raise `draws`. The loss of one client's rows is not private; only a sum over many clients hides it.
    Clients that an engine ran elsewhere keep their personal states there, and draws here are made without these.
    """
    a_fit(fit)
    if loss is not None and not (callable(loss) and takes(loss, 2)):
        raise DeclarationError(f"loss={shown(loss)} is not a function of (posterior, data); pass one that is.")
    if not isinstance(validation, Mapping) or not validation:
        raise DataError("no validation data: pass a mapping from client id to that client's held-out data.")
    draws = whole("draws", draws)
    if not fit.clients:
        raise DeclarationError("the fit's clients are sites of their own; search on clients in this process.")
    require_arrived(fit, "fedppl.search.validation_loss")
    losses: dict[str, tuple[float, int]] = {}
    for client_id, data in ((str(k), v) for k, v in validation.items()):
        if client_id not in fit.clients:
            known = some_of(fit.client_ids)
            raise DeclarationError(f"validation has client {client_id!r}, which did not take part, but {known} did.")
        losses[client_id] = _client_loss(fit, fit.clients[client_id], data, loss, draws)
    totals, rows = zip(*(losses[client_id] for client_id in sorted(losses)), strict=True)
    return ValidationLoss(sum(totals), sum(rows))


def _client_loss(
    fit: Fit, client: ClientModel, data: Mapping[str, Any], loss: Loss | None, draws: int
) -> tuple[float, int]:
    """The sum of losses over one client's held-out rows, and their number, which alone leave it."""
    client_id = client.client_id
    require_rows(client, "held-out data")
    arrays = as_arrays(client_id, data)
    if set(arrays) != set(client.arrays):
        keys = f"validation data have keys {sorted(arrays)}, training data {sorted(client.arrays)}"
        raise DataError(f"client {client_id!r}: {keys}; hold out rows of all that have rows, and repeat the rest.")
    held_out = fit.declaration.with_data(client, client_id, arrays, kernel=fit.algorithm.needs.kernel)
    if loss is not None:
        value: Any = loss(fit.client(client_id, draws=draws, chains=1)["posterior"], arrays)
        if np.ndim(value) != 0:
            raise DeclarationError(f"loss returned an array of shape {np.shape(value)}; return the sum over rows.")
        return float(value), held_out.rows
    none, result, personal = _without_rows(client, held_out), fit.algorithm.result, fit.personal.get(client_id)
    rng, message = stream((fit.seed, 2, *client_id.encode())), result.final_message(fit.state, client_id)
    if result.held_out is not None:
        return _mean_loss(result.held_out(client, held_out, personal, message, draws, rng)), held_out.rows
    sample = result.draw(client, personal, message, draws, 1, rng)
    # In C's order: a point's draws repeat one row, which NumPy would concatenate in Fortran's.
    points = np.ascontiguousarray(np.concatenate([sample.shared[0], sample.local[0]], axis=1))
    if sample.diagnostics.get("point_estimate"):
        points = points[:1]
    # The fit has compiled the one with a gradient, or none.
    kernel, packed = held_out.kernel if fit.algorithm.needs.kernel else held_out.value_kernel, held_out.packed
    log_density = [float(kernel(x, *packed)[0]) - float(kernel(x, *none)[0]) for x in points]
    return _mean_loss(log_density), held_out.rows


def _mean_loss(log_density: Any) -> float:
    """Minus the log of the mean density over draws."""
    return float(np.log(len(log_density)) - logsumexp(log_density))


def _without_rows(client: ClientModel, held_out: ClientModel) -> tuple[Any, Any, Any]:
    """The held-out data without rows, for which the log density is that of the local variables alone."""
    parts, rows = held_out.template.parts, held_out.rows
    # Training and held-out data differ in their number of rows as a rule, which shows which arrays have rows.
    by_row = {
        name
        for name, array in held_out.arrays.items()
        if (np.shape(array)[:1], np.shape(client.arrays[name])[:1]) == ((rows,), (client.rows,))
    }
    observed = {parts.model.rvs_to_values[rv].name for rv in parts.model.observed_RVs} & set(held_out.arrays)
    free = held_out.inputs[len(parts.data) :]
    grows = held_out.local != client.local or (rows == client.rows and any(rows in shape for shape in free))
    if grows or not by_row or not observed <= by_row or not parts.data:
        rule = "the density of held-out rows cannot be separated from that of its local variables"
        remedy = "pass a loss=, or use pm.Data, observed arrays of one length and no local variable per row"
        raise DeclarationError(f"client {client.client_id!r}: {rule}; {remedy}.")
    values = zip(parts.data, held_out.inputs, strict=False)
    packed: tuple[Any, Any, Any] = pack((*(v[:0] if data.name in by_row else v for data, v in values), *free))
    return packed


def holdout(
    clients: Clients, fraction: float = 0.2, *, rows: Sequence[str] | None = None, random_seed: int
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Split every client's rows into a training and a validation part; each client splits its own.

    Parameters
    ----------
    clients
        Client id to that client's data, name to array.
    fraction
        Part of a client's rows to hold out, rounded to whole rows: at least one, and never all.
    rows
        Names of the arrays that have a row per observation. By default the arrays of the leading length that most
        of a client's arrays have. All others, scalars too, go to both parts unchanged.
    random_seed
        Seed of the choice of rows, which depends on it and on the client's id, not on other clients.

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
    >>> training, validation = fedppl.search.holdout({"a": {"X": np.ones((10, 2)), "y": np.arange(10)}}, random_seed=1)
    >>> training["a"]["X"].shape, len(validation["a"]["y"])
    ((8, 2), 2)

    Notes
    -----
    *When this fails.* Rows that belong together, such as visits of one patient, should not be separated: split those
    by hand. An array that has as many rows as there are observations by chance is split too; name those to split in
    `rows`.
    """
    if isinstance(rows, str):
        raise DeclarationError(f"rows={rows!r} must be a list of names: [{rows!r}].")
    fraction = between("fraction", fraction, 0, 1)
    require_clients(clients, 'of a frame {site: dict(rows[["X", "y"]]) for site, rows in frame.groupby("site")}')
    if random_seed is None:
        raise DeclarationError("random_seed=None would hold out other rows in every call; pass a non-negative int.")
    seed = seed_of(random_seed)
    checked = {str(client_id): as_arrays(str(client_id), data) for client_id, data in clients.items()}
    by_client = {client_id: _split_names(client_id, arrays, rows) for client_id, arrays in checked.items()}
    usual = next(iter(by_client.values()), set())
    training: dict[str, dict[str, Any]] = {}
    validation: dict[str, dict[str, Any]] = {}
    for client_id, arrays in checked.items():
        if (split := by_client[client_id]) != usual:
            names = f"{sorted(split)} have one length, at others {sorted(usual)}"
            raise DataError(f"client {client_id!r}: {names}; name some in rows=.")
        count = len(arrays[next(iter(split))])
        if count < 2:
            raise DataError(f"client {client_id!r} has {count} row, which cannot be split; leave the client out.")
        size = min(max(round(fraction * count), 1), count - 1)
        order = stream((seed, 3, *client_id.encode())).permutation(count)
        for part, chosen in ((training, np.sort(order[size:])), (validation, np.sort(order[:size]))):
            part[client_id] = {name: array[chosen] if name in split else array for name, array in arrays.items()}
    return training, validation


def _split_names(client_id: str, arrays: Mapping[str, Any], rows: Sequence[str] | None) -> set[str]:
    """Names of a client's arrays that have a row per observation: `rows`, or those of the most frequent length."""
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    lengths = {name: shape[0] for name, shape in shapes.items() if shape}
    if rows is not None:
        named = {name: shapes.get(name, "absent") for name in sorted(set(rows))}
        if len({lengths.get(name) for name in rows}) != 1 or not set(rows) <= set(lengths):
            raise DataError(f"client {client_id!r}: rows={list(named)} must name arrays of one length, not {named}.")
        return set(rows)
    by_length = {n: {name for name in lengths if lengths[name] == n} for n in lengths.values()}
    by_size = sorted(by_length.values(), key=len, reverse=True)
    if not by_size or (len(by_size) > 1 and len(by_size[0]) == len(by_size[1])):
        rule = f"arrays of shapes {shapes} do not show which have a row per observation"
        raise DataError(f"client {client_id!r}: {rule}; name those in rows=[...].")
    return by_size[0]
