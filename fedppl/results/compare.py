"""Several models of the same clients' data beside each other, by their log evidence."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import pandas as pd

from fedppl.contracts import LogEvidence
from fedppl.model.client import ClientModel
from fedppl.model.stack import ClientsOf
from fedppl.results.at_client import observed_values
from fedppl.results.fit import Fit
from fedppl.settings import shown
from fedppl.types import Array, DataError, DeclarationError, NotConvergedError

logger = logging.getLogger(__name__)


def compare(fits: Mapping[str, Fit]) -> pd.DataFrame:
    r"""Rank models by log evidence, the best first.

    .. math:: p(M_i \mid y) = \frac{p(y \mid M_i)}{\sum_j p(y \mid M_j)}

    Parameters
    ----------
    fits
        Name of a model to its fit by `EP`; all of the same clients, with the same observations.

    Returns
    -------
    pandas.DataFrame
        A row a model: ``rank``, ``log_evidence`` and its standard error ``se``, ``difference`` to the best with the
        standard error ``dse``, ``probability`` where each model was as likely before the data, and the ``method`` of
        `Fit.log_evidence`: "correction", or "EP", an approximation whose own error is in no standard error.

    Raises
    ------
    DeclarationError
        If there are fewer than two fits, or one has no evidence: a potential, an improper prior, sites of their own
        without a correction.
    DataError
        If the fits are of other clients or of other observations.
    NotConvergedError
        Where a correction is not to be trusted.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    >>> fedppl.compare({"one": fit, "the same": fit})["probability"].tolist()
    [0.5, 0.5]

    Notes
    -----
    *When this fails.* The evidence depends on the priors, however many data there are: with priors that are wide for
    want of knowledge it prefers the model that has fewer of them. Compare predictions then. Of clients whose data are
    not here (sites of their own, fits from a file) the ids are compared, and no observations; the log says so. A client
    that adds a constant to its log densities decides which model is preferred, and `trust=` does not protect from it.
    """
    if not isinstance(fits, Mapping) or len(fits) < 2 or not all(isinstance(fit, Fit) for fit in fits.values()):
        raise DeclarationError(f"fits={shown(fits)} must be two or more fits by name: {{'a': fit_a, 'b': fit_b}}.")
    require_names(fits)
    (first, reference), *others = fits.items()
    for name, fit in others:
        require_same_data(str(first), reference, str(name), fit)
    found = {name: _evidence(name, fit) for name, fit in fits.items()}
    absent = sorted({k for fit in fits.values() for k in fit.client_ids if k not in fit.clients})
    if absent:
        logger.warning(
            "the data of %s are not here: that all models are of the same observations there, in the same units, was "
            "not looked at",
            absent[:5],
        )
    values = np.array([one.value for one in found.values()])
    errors = np.array([one.error for one in found.values()])
    best = int(np.argmax(values))
    weights = np.exp(values - values.max())
    table = pd.DataFrame(
        {
            "log_evidence": values,
            "se": errors,
            "difference": values[best] - values,
            "dse": np.where(np.arange(len(values)) == best, 0.0, np.hypot(errors, errors[best])),
            "probability": weights / weights.sum(),
            "method": [one.method for one in found.values()],
        },
        index=list(found),
    ).sort_values("log_evidence", ascending=False, kind="stable")
    table.insert(0, "rank", range(len(table)))
    return table


def _evidence(name: str, fit: Fit) -> LogEvidence:
    try:
        return fit.log_evidence
    except (DeclarationError, NotConvergedError) as error:
        raise type(error)(f"fit {name!r}: {error}") from error


def require_names(fits: Mapping[str, Fit]) -> None:
    """Refuse names that are none: a number and its text would be one row."""
    if odd := [name for name in fits if not isinstance(name, str)]:
        raise DeclarationError(f"fits have the names {odd[:5]}, which are no texts; write {str(odd[0])!r}.")


def require_same_data(first: str, reference: Fit, name: str, fit: Fit, *, in_order: bool = False) -> None:
    """Refuse fits of other clients or of other observations; `in_order` also of the same in another order."""
    if set(reference.client_ids) != set(fit.client_ids):
        odd = sorted(set(reference.client_ids) ^ set(fit.client_ids))
        raise DataError(f"fits {first!r} and {name!r} are not of the same clients: {odd[:5]} took part in one alone.")
    if isinstance(reference.clients, ClientsOf) and isinstance(fit.clients, ClientsOf):
        one, other = reference.clients.observed(), fit.clients.observed()
        same = [np.array_equal(one[name], other[name]) for name in one if name in other]
        if list(reference.clients) == list(fit.clients) and one.keys() == other.keys() and len(one) > 1 and all(same):
            return
    for client_id, ours in reference.clients.items():
        theirs = fit.clients.get(client_id)
        if theirs is None:
            continue
        before, after = _observed(ours), _observed(theirs)
        if len(before) != len(after):
            raise DataError(
                f"client {client_id!r} has {len(before)} observations in fit {first!r}, {len(after)} in fit {name!r}: "
                "models are compared on the same observations only."
            )
        if not np.array_equal(np.sort(before), np.sort(after)):
            raise DataError(
                f"client {client_id!r} has other observations in fit {first!r} than in fit {name!r}: models are "
                "compared on the same outcomes, in the same units."
            )
        if in_order and not np.array_equal(before, after):
            raise DataError(
                f"client {client_id!r} has its rows in another order in fit {first!r} than in fit {name!r}: give both "
                "the same order."
            )


def _observed(client: ClientModel) -> Array:
    """All that is observed, in the model's order."""
    values = [values.ravel() for values in observed_values(client.pymc_model()).values()]
    return np.concatenate(values).astype(float) if values else np.zeros(0)
