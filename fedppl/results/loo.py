"""Leave-one-out predictive density over all clients, from sums that each computes where its rows are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import logsumexp

from fedppl.contracts import LogEvidence, Point, sum_replies
from fedppl.model.client import ClientModel
from fedppl.model.stack import ClientsOf, samples
from fedppl.results import idata
from fedppl.results.at_client import SUMS, Rows, has_rows, observed_values, rows_of, sums_of
from fedppl.results.fit import Fit
from fedppl.results.records import listed, require_arrived
from fedppl.settings import shown, whole
from fedppl.types import Array, DataError, DeclarationError, NotConvergedError

logger = logging.getLogger(__name__)

_LEAST = 100  # draws in all


@dataclass(frozen=True, repr=False)
class Loo:
    """Expected log predictive density of a row, given all others.

    Attributes
    ----------
    elpd, se
        Sum over all rows, and its standard error from how they differ.
    p_loo
        Effective number of parameters.
    rows
        Number of rows.
    good, bad, very_bad
        How many rows have a Pareto k up to the limit, up to 1, and above: of bad rows elpd is not known well.
    clients
        A row a client with the same figures.
    status
        Of the fit: of one that has not converged, these figures say little.
    """

    elpd: float
    se: float
    p_loo: float
    rows: int
    good: int
    bad: int
    very_bad: int
    clients: pd.DataFrame
    status: str

    def __repr__(self) -> str:
        """One line; `clients` has a row for each."""
        known = "all well known" if self.good == self.rows else f"{self.bad + self.very_bad} not well known"
        return (
            f"Loo(elpd {self.elpd:.1f}, se {self.se:.1f}, p_loo {self.p_loo:.1f}; {self.rows} rows, {known}, of "
            f"{len(self.clients)} clients; {self.status})"
        )


def loo(fit: Fit, *, draws: int = 1000, chains: int = 4, random_seed: int | None = None) -> Loo:
    r"""Leave one row out at a time, by Pareto smoothed importance sampling at every client.

    .. math:: \mathrm{elpd} = \sum_k \sum_i \log p(y_{ki} \mid y_{-ki})

    Each client draws its posterior, computes the log density of its rows by ``az.loo`` and gives sums over its rows.
    Clients that brought a summary of their rows (`fedppl.summaries`) have none to leave out: they are left out
    themselves, and the log names them.

    Parameters
    ----------
    fit
        Fit whose clients are in this process, or sites whose policies let these sums out (`conclusions`): they gave
        them when the run was over, from draws of their own.
    draws, chains, random_seed
        Of the clients' posteriors, as in `Fit.client`.

    Returns
    -------
    Loo

    Raises
    ------
    DeclarationError
        If a site gave no sums, or the algorithm estimates points.
    NotConvergedError
        Where the fit was broken off before there was a posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> found = fedppl.loo(fit)
    >>> found.rows, found.bad
    (60, 0)

    Notes
    -----
    *When this fails.* Rows are what PyMC gives a log density each: one of a multivariate distribution is a row. A row
    that alone determines a local variable (one row a client, or an effect of each row) has a
    large Pareto k: leave out clients then, with `Fit.influence`, whose ``log_predictive`` is of all rows of a client.
    Where an algorithm's shared variables are a point, networks' for example, that point keeps what a row has told: elpd
    is too high, however small Pareto k, and the log says so.

    References
    ----------
    .. [1] Vehtari, Gelman, Gabry (2017), Practical Bayesian model evaluation using leave-one-out cross-validation and
       WAIC, Statistics and Computing 27.
    """
    if isinstance(fit, Fit) and len(fit.clients) < len(fit.client_ids):
        sums = _told(fit)
    else:
        sums = {name: sums_of(one) for name, one in _by_row(fit, draws, chains, random_seed).items()}
    total = sum_replies(sums)
    columns = {name: [float(one[name]) for one in sums.values()] for name in total}
    table = pd.DataFrame(columns, index=pd.Index(list(sums), name="client"))
    table.insert(1, "se", _se(table["elpd"], table["squares"], table["rows"]))
    whole_numbers = ["rows", "good", "bad", "very_bad"]
    table = table.drop(columns="squares").astype(dict.fromkeys(whole_numbers, int))
    _name_bad("fedppl.loo", int(table["bad"].sum() + table["very_bad"].sum()), int(table["rows"].sum()))
    _name_point("fedppl.loo", fit)
    return Loo(
        elpd=float(total["elpd"]),
        se=float(_se(total["elpd"], total["squares"], total["rows"])),
        p_loo=float(total["p_loo"]),
        clients=table,
        status=fit.status.value,
        **{name: int(total[name]) for name in whole_numbers},
    )


def loo_compare(
    fits: Mapping[str, Fit], *, draws: int = 1000, chains: int = 4, random_seed: int | None = None
) -> pd.DataFrame:
    r"""Rank models by leave-one-out predictive density, the best first, with weights of their stacked predictions.

    .. math:: \max_{w \in \Delta} \sum_k \sum_i \log \sum_m w_m\, p_m(y_{ki} \mid y_{-ki})

    Parameters
    ----------
    fits
        Name of a model to its fit; all of the same clients with the same rows, in this process.
    draws, chains
        Numbers of draws and of chains of each client's posterior, at least 100 draws in all.
    random_seed
        Seed of these draws; by default each fit's.

    Returns
    -------
    pandas.DataFrame
        A row a model: ``rank``, ``elpd``, its standard error ``se``, ``p_loo``, the difference to the best
        ``elpd_diff`` with the standard error ``dse`` of paired rows, the stacking ``weight``, and how many rows have a
        Pareto k above the limit, ``bad``; the ``status`` of the fit.

    Raises
    ------
    DeclarationError
        If there are fewer than two fits, data of clients are not here, a model has a potential, one has no posterior of
        its clients, draws are too few, or all clients brought summaries.
    DataError
        If the fits are of other clients, or of other observations or the same in another order.
    NotConvergedError
        Where a fit was broken off before there was a posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    >>> list(fedppl.loo_compare({"one": fit, "the same": fit})["elpd_diff"])
    [0.0, 0.0]

    Notes
    -----
    *When this fails.* A difference of about two ``dse`` or less says little, and ``dse`` is too small for fewer than
    some 100 rows or for models that predict alike. It is of rows, as if these were independent: where clients differ,
    a new client may prefer another model. Of rows counted in ``bad`` elpd is not known well, and the log says so.
    The weights do not tell how probable a model is: of two models that predict alike, either may have most of it.

    References
    ----------
    .. [1] Yao et al. (2018), Using stacking to average Bayesian predictive distributions, Bayesian Analysis 13.
    """
    if not isinstance(fits, Mapping) or len(fits) < 2 or not all(isinstance(fit, Fit) for fit in fits.values()):
        raise DeclarationError(f"fits={shown(fits)} must be two or more fits by name: {{'a': fit_a, 'b': fit_b}}.")
    require_names(fits)
    names = [str(name) for name in fits]
    (first, reference), *others = fits.items()
    for name, fit in others:
        require_same_data(str(first), reference, str(name), fit, in_order=True)
    rows = [_by_row(fit, draws, chains, random_seed) for fit in fits.values()]
    order = sorted(rows[0])
    elpd = np.stack([np.concatenate([one[client].elpd for client in order]) for one in rows])  # (models, rows)
    totals = elpd.sum(axis=1)
    best = int(np.argmax(totals))
    table = pd.DataFrame(
        {
            "elpd": totals,
            "se": [_se(row.sum(), (row**2).sum(), len(row)) for row in elpd],
            "p_loo": [sum(float(one.p_loo.sum()) for one in model.values()) for model in rows],
            "elpd_diff": totals[best] - totals,
            "dse": [_se(row.sum(), (row**2).sum(), len(row)) for row in elpd[best] - elpd],
            "weight": _stacked(elpd),
            "bad": [sum(int((~(one.k <= one.limit)).sum()) for one in model.values()) for model in rows],
            "status": [fit.status.value for fit in fits.values()],
        },
        index=names,
    ).sort_values("elpd", ascending=False, kind="stable")
    table.insert(0, "rank", range(len(table)))
    for name, bad in table["bad"].items():
        _name_bad(f"fedppl.loo_compare: {name}", int(bad), elpd.shape[1])
        _name_point(f"fedppl.loo_compare: {name}", fits[name])
    return table


def _name_bad(what: str, bad: int, rows: int) -> None:
    if bad:
        logger.warning(
            "%s: %d of %d rows have a Pareto k above the limit, and elpd is not known well; where rows alone determine "
            "a local variable, compare by clients: fit.influence(), fedppl.compare",
            what,
            bad,
            rows,
        )


def _name_point(what: str, fit: Fit) -> None:
    """Say of shared variables that are a point that rows which have shaped it are not left out of it."""
    if isinstance(fit.algorithm.result.shared, Point):
        logger.warning(
            "%s: the shared variables are a point of %s, which keeps what a row has told when that row is left out, so "
            "that elpd is too high; score rows that were held out, see fedppl.holdout",
            what,
            fit.algorithm.name,
        )


def _told(fit: Fit) -> dict[str, dict[str, Array]]:
    """What sites told of their rows when the run was over."""
    require_arrived(fit, "fedppl.loo")
    silent = [k for k in fit.client_ids if "loo" not in fit.told.get(k, {})]
    if silent:
        absent = [k for k in silent if k not in fit.clients]
        raise DeclarationError(
            f"rows of {absent[:5]} are not here, and these told nothing of them when the run was over. Of a fit from a "
            "file, give the data of all: fedppl.load(path, model, clients=...). Sites of their own tell, where their "
            'policy has conclusions=("loo",); their logs say why they refuse.'
        )
    return {k: dict(zip(SUMS, fit.told[k]["loo"], strict=True)) for k in fit.client_ids}


def _by_row(fit: Any, draws: int, chains: int, random_seed: int | None) -> dict[str, Rows]:
    """Of every client in this process."""
    if not isinstance(fit, Fit):
        raise DeclarationError(f"fit is {type(fit).__name__}; pass what fedppl.fit returned.")
    if len(fit.clients) < len(fit.client_ids):
        raise DeclarationError(
            "rows of all clients are not here, so that models cannot be compared by row. Of a fit from a file, give "
            "the data of all: fedppl.load(path, model, clients=...). Of sites of their own, fedppl.compare compares "
            "models by their evidence."
        )
    require_arrived(fit, "fedppl.loo")
    if whole("draws", draws) * whole("chains", chains) < _LEAST:
        raise DeclarationError(f"draws={draws} with chains={chains} are too few; use at least {_LEAST} in all.")
    kinds = {client.kind: client for client in samples(fit.clients)}
    if any(client.pymc_model().potentials for client in kinds.values()):
        raise DeclarationError(
            "a pm.Potential is part of the model, and has no rows that could be left out; declare the outcomes as an "
            "observed variable (pm.CustomDist)."
        )
    found = {}
    for client_id in with_rows(fit):
        drawn = fit.client(client_id, groups="log_likelihood", draws=draws, chains=chains, random_seed=random_seed)
        if drawn["posterior"].attrs.get("fedppl_point_estimate"):
            raise DeclarationError(
                f"{fit.algorithm.name} estimates points, and leaving rows out needs a posterior; use fedppl.EP()."
            )
        found[client_id] = rows_of(drawn)
    return found


def with_rows(fit: Fit) -> list[str]:
    """Clients that brought rows; the others are named in the log."""
    found = [client_id for client_id in fit.client_ids if has_rows(fit.clients[client_id])]
    if not found:
        raise DeclarationError("all clients brought summaries of their rows, and no row can be left out.")
    if others := [client_id for client_id in fit.client_ids if client_id not in found]:
        logger.warning("not in fedppl.loo, since they brought summaries of their rows: %s", listed(map(repr, others)))
    return found


def _se(total: Any, squares: Any, rows: Any) -> Any:
    """Standard error of a sum over rows, from the sum of their squares."""
    unbiased = rows / np.maximum(rows - idata.LOO_DDOF, 1)
    return np.sqrt(np.maximum(squares - total**2 / rows, 0.0) * unbiased)


def _stacked(elpd: Array) -> Array:
    """Weights on the simplex with the largest log score of the mixture, over log densities (models, rows)."""
    shifted = np.exp(elpd - elpd.max(axis=0))

    def loss(logits: Array) -> tuple[float, Array]:
        weights = np.exp(logits - logsumexp(logits))
        mixture = weights @ shifted
        pull = weights * ((shifted / mixture).sum(axis=1) - shifted.shape[1])
        return -float(np.log(mixture).sum()), -pull

    start = np.zeros(len(elpd))
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(-30.0, 30.0)] * len(elpd))
    weights = np.exp(found.x - logsumexp(found.x))
    return np.asarray(weights)


# Several models of the same clients' data beside each other, by their log evidence ------------------------------------


def compare(fits: Mapping[str, Fit]) -> pd.DataFrame:
    r"""Rank models by log evidence, the best first.

    .. math:: p(M_i \mid y) = \frac{p(y \mid M_i)}{\sum_j p(y \mid M_j)}

    Parameters
    ----------
    fits
        Name of a model to its fit by `Sums` or `EP`; all of the same clients, with the same observations.

    Returns
    -------
    pandas.DataFrame
        A row a model: ``rank``, ``log_evidence`` and its standard error ``se``, ``difference`` to the best with the
        standard error ``dse``, ``probability`` where each model was as likely before the data, and the ``method`` of
        `Fit.log_evidence`: "sums", "correction", or "EP", an approximation whose own error is in no standard error.

    Raises
    ------
    DeclarationError
        If there are fewer than two fits, or one has no evidence: a potential, an improper prior, sites of their own
        without a correction.
    DataError
        If the fits are of other clients or of other observations.
    NotConvergedError
        Where weights or a correction are not to be trusted.

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
