"""Models compared: by leave-one-out predictive density, from sums that each client computes, and by log evidence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import logsumexp

from fedppl.contracts import LogEvidence, Point
from fedppl.model.client import ClientModel
from fedppl.model.stack import ClientsOf, samples
from fedppl.results import idata
from fedppl.results.at_client import observed_values, with_rows
from fedppl.results.fit import Fit
from fedppl.results.records import COHORT, require_arrived, told_sums
from fedppl.settings import a_fit, shown, some_of, whole
from fedppl.types import Array, DataError, DeclarationError, NotConvergedError

logger = logging.getLogger(__name__)

_FEWEST_DRAWS = 100  # in all


@dataclass(frozen=True, repr=False)
class Loo:
    """Expected log predictive density of rows, each given all others.

    Attributes
    ----------
    elpd, se
        Sum over all rows, and its standard error from the variance over rows.
    p_loo
        Effective number of parameters.
    rows
        Number of rows.
    good, bad, very_bad
        How many rows have a Pareto k up to the limit, up to 1, and above: of bad rows elpd is not known well.
    n_clients
        Number of clients.
    status
        Of the fit: if it has not converged, these figures say little.
    """

    elpd: float
    se: float
    p_loo: float
    rows: int
    good: int
    bad: int
    very_bad: int
    n_clients: int
    status: str
    _by_client: pd.DataFrame | None

    @property
    def clients(self) -> pd.DataFrame:
        """A row a client with the same figures.

        Raises
        ------
        DeclarationError
            Of sites whose server had sums over all of them alone.
        """
        if self._by_client is None:
            raise DeclarationError(
                "loo has no table by client: sites' answers were under masks, so that the server had their sums alone; "
                "a site can look at its own posterior, the file in its folder."
            )
        return self._by_client

    def __repr__(self) -> str:
        """One line; `clients` has a row for each."""
        known = "all well known" if self.good == self.rows else f"{self.bad + self.very_bad} not well known"
        rows = f"{self.rows} rows, {known}, of {self.n_clients} clients; {self.status}"
        return f"Loo(elpd {self.elpd:.1f}, se {self.se:.1f}, p_loo {self.p_loo:.1f}; {rows})"


def loo(fit: Fit, *, draws: int = 1000, chains: int = 4, random_seed: int | None = None) -> Loo:
    r"""Leave one row out at a time, by Pareto smoothed importance sampling at every client.

    .. math:: \mathrm{elpd} = \sum_k \sum_i \log p(y_{ki} \mid y_{-ki})

    Each client draws its posterior, computes the log density of its rows by ``az.loo`` and gives sums over its rows.
    Clients that brought a summary of their rows (`fedppl.summaries`) are not included, and the log names them.

    Parameters
    ----------
    fit
        Fit whose clients are in this process, or are sites whose policies let these sums out (`conclusions`); sites
        sent them when the run was over, from draws of their own.
    draws, chains, random_seed
        Of the clients' posteriors, as in `Fit.client`.

    Returns
    -------
    Loo

    Raises
    ------
    DeclarationError
        If a site gave no sums, or the algorithm estimates points.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> found = fedppl.loo(fit)
    >>> found.rows, found.bad
    (60, 0)

    Notes
    -----
    *When this fails.* Rows are what PyMC gives a log density each: one of a multivariate distribution is a row. A row
    that alone determines a local variable has a large Pareto k: leave out clients then, by ``log_predictive`` of
    `Fit.influence`. Where an algorithm's shared variables are a point, as a network's, that point still depends on the
    row that is left out: elpd is too high, however small Pareto k, and the log says so.

    References
    ----------
    .. [1] Vehtari, Gelman, Gabry (2017), Practical Bayesian model evaluation using leave-one-out cross-validation and
       WAIC, Statistics and Computing 27.
    """
    a_fit(fit)
    if _is_elsewhere(fit):
        told = told_sums(fit, "loo", "fedppl.loo")
        sums = {client_id: RowSums(*map(float, numbers)) for client_id, numbers in told.items()}
    else:
        sums = {name: sums_of(rows) for name, rows in _by_row(fit, draws, chains, random_seed).items()}
    return _added(fit, sums, "fedppl.loo")


def _added(fit: Fit, sums: Mapping[str, RowSums], what: str) -> Loo:
    """The sum over clients, with a table by client where there are sums of each."""
    counts = ["rows", "good", "bad", "very_bad"]
    table = pd.DataFrame(sums.values(), index=pd.Index(list(sums), name="client"))
    total = table.sum()
    table.insert(1, "se", _se(table["elpd"], table["squares"], table["rows"]))
    _warn(what, fit, int(total["bad"] + total["very_bad"]), int(total["rows"]))
    in_one = COHORT in sums
    return Loo(
        elpd=float(total["elpd"]),
        se=float(_se(total["elpd"], total["squares"], total["rows"])),
        p_loo=float(total["p_loo"]),
        n_clients=len(fit.client_ids) if in_one else len(table),
        status=fit.status.value,
        _by_client=None if in_one else table.drop(columns="squares").astype(dict.fromkeys(counts, int)),
        **{name: int(total[name]) for name in counts},
    )


def _is_elsewhere(fit: Fit) -> bool:
    """Whether rows of clients are not in this process."""
    return len(fit.clients) < len(fit.client_ids)


def loo_compare(
    fits: Mapping[str, Fit], *, draws: int = 1000, chains: int = 4, random_seed: int | None = None
) -> pd.DataFrame:
    r"""Rank models by leave-one-out predictive density, the best first, with weights of their stacked predictions.

    .. math:: \max_{w \in \Delta} \sum_k \sum_i \log \sum_m w_m\, p_m(y_{ki} \mid y_{-ki})

    Parameters
    ----------
    fits
        Name of a model to its fit; all of the same clients with the same rows, in this process; or at sites whose
        policies let sums out, as for `loo`.
    draws, chains, random_seed
        Of the clients' posteriors, as in `Fit.client`, at least 100 draws in all.

    Returns
    -------
    pandas.DataFrame
        A row a model: ``rank``, ``elpd``, its standard error ``se``, ``p_loo``, ``elpd_diff``, by how much the best has
        more, with the standard error ``dse`` of paired rows, the stacking ``weight``, and how many rows have a
        Pareto k above the limit, ``bad``; the ``status`` of the fit. Of sums that sites told rows are not paired: then
        ``dse`` is a bound, the sum of both standard errors, and ``weight`` is NaN.

    Raises
    ------
    DeclarationError
        If there are fewer than two fits, data of clients are not here and sites sent no sums, a model has a potential,
        one has no posterior of its clients, draws are too few, or all clients brought summaries.
    DataError
        If the fits are of other clients, or of other observations or the same in another order.

    Examples
    --------
    >>> import fedppl
    >>> model, clients = fedppl.testing.normal_means()
    >>> fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    >>> list(fedppl.loo_compare({"one": fit, "the same": fit})["elpd_diff"])
    [0.0, 0.0]

    Notes
    -----
    *When this fails.* A difference of about two ``dse`` or less says little, and ``dse`` is too small for fewer than
    some 100 rows or for models that predict alike. Rows count as independent: where clients differ, a new client may
    prefer another model. Of ``bad`` rows elpd is not known well. The weights are no probabilities: of two models that
    predict alike, either may have most of the weight.

    References
    ----------
    .. [1] Yao et al. (2018), Using stacking to average Bayesian predictive distributions, Bayesian Analysis 13.
    """
    _require_comparable(fits, in_order=True)
    if any(map(_is_elsewhere, fits.values())):
        return _compared(fits, _from_sums(fits), None)
    models = {name: _by_row(fit, draws, chains, random_seed) for name, fit in fits.items()}
    order = sorted(next(iter(models.values())))
    elpd = np.stack([np.concatenate([rows[client].elpd for client in order]) for rows in models.values()])
    sums = {name: {client: sums_of(rows) for client, rows in of_model.items()} for name, of_model in models.items()}
    found = {name: _added(fit, sums[name], f"fedppl.loo_compare: {name}") for name, fit in fits.items()}
    return _compared(fits, found, elpd)


def _compared(fits: Mapping[str, Fit], found: Mapping[str, Loo], elpd: Array | None) -> pd.DataFrame:
    """Models ranked, by log densities of rows in one order (models, rows); without, `dse` is a bound."""
    totals, se = (np.array([getattr(one, field) for one in found.values()]) for field in ("elpd", "se"))
    best = int(np.argmax(totals))
    if elpd is None:
        dse, weight = np.where(np.arange(len(se)) == best, 0.0, se + se[best]), np.full(len(se), np.nan)
        logger.warning(
            "fedppl.loo_compare: of sums alone dse is a bound, se + se of the best, and there are no weights"
        )
    else:
        dse = np.array([_se(row.sum(), (row**2).sum(), len(row)) for row in elpd[best] - elpd])
        weight = _stacked(elpd)
    columns = {
        "elpd": totals,
        "se": se,
        "p_loo": [one.p_loo for one in found.values()],
        "elpd_diff": totals[best] - totals,
        "dse": dse,
        "weight": weight,
        "bad": [one.bad + one.very_bad for one in found.values()],
        "status": [one.status for one in found.values()],
    }
    return _ranked(columns, fits, "elpd")


def _from_sums(fits: Mapping[str, Fit]) -> dict[str, Loo]:
    """What sites told of each model, of as many rows."""
    if here := [name for name, fit in fits.items() if not _is_elsewhere(fit)]:
        remedy = "use fedppl.load(..., clients=) for the others, or compare fits over sites"
        raise DeclarationError(f"rows of {some_of(here)} are here, and those of the other fits are not; {remedy}.")
    found = {name: loo(fit) for name, fit in fits.items()}
    rows = {name: one.rows for name, one in found.items()}
    if len({*rows.values()}) > 1:
        raise DataError(f"fits are of {rows} rows; compare fits of the same outcomes.")
    return found


def _warn(what: str, fit: Fit, bad: int, rows: int) -> None:
    """Warn of rows whose elpd is not known well, and of a point, which depends on the rows that are left out."""
    if bad:
        why = "have a Pareto k above the limit, and elpd is not known well; see fit.influence()"
        logger.warning("%s: %d of %d rows %s", what, bad, rows, why)
    if isinstance(fit.algorithm.result.shared, Point):
        why = f"are a point of {fit.algorithm.name}, which rows that are left out still inform: elpd is too high"
        logger.warning("%s: the shared variables %s; see fedppl.search.holdout", what, why)


def _by_row(fit: Any, draws: int, chains: int, random_seed: int | None) -> dict[str, Rows]:
    require_arrived(fit, "fedppl.loo")
    if whole("draws", draws) * whole("chains", chains) < _FEWEST_DRAWS:
        raise DeclarationError(f"draws={draws} with chains={chains} are too few; use at least {_FEWEST_DRAWS} in all.")
    kinds = {client.kind: client for client in samples(fit.clients)}
    if any(client.pymc_model().potentials for client in kinds.values()):
        raise DeclarationError("a pm.Potential has no rows to leave out; declare outcomes as observed (pm.CustomDist).")
    left_out = {}
    for client_id in with_rows(fit, "fedppl.loo"):
        drawn = fit.client(client_id, groups="log_likelihood", draws=draws, chains=chains, random_seed=random_seed)
        if drawn["posterior"].attrs.get("fedppl_point_estimate"):
            raise DeclarationError(
                f"{fit.algorithm.name} estimates points, and loo needs a posterior; use fedppl.EP()."
            )
        left_out[client_id] = rows_of(drawn)
    return left_out


# Rows of one client left out one at a time, and their sums, which a site may send -------------------------------------


@dataclass(frozen=True)
class Rows:
    """Each row of a client left out; it stays at the client."""

    elpd: Array
    p_loo: Array
    k: Array
    limit: float  # of good k


class RowSums(NamedTuple):
    """Sums over a client's rows, which a site may send in this order."""

    elpd: float
    p_loo: float
    rows: float
    good: float
    bad: float
    very_bad: float
    squares: float


SUMS = RowSums._fields


def rows_of(drawn: Any) -> Rows:
    """Leave each row out, of a client's posterior with the group of log densities."""
    group = idata.as_dataset(drawn["log_likelihood"])
    count = group.sizes["chain"] * group.sizes["draw"]
    elpd, k, limits = zip(*(idata.leave_one_out(group, str(name)) for name in group.data_vars), strict=True)
    densities = np.concatenate([values.values.reshape(count, -1) for values in group.data_vars.values()], axis=1)
    p_loo = logsumexp(densities, axis=0) - np.log(count) - np.concatenate(elpd)
    return Rows(np.concatenate(elpd), p_loo, np.concatenate(k), limits[0])


def sums_of(rows: Rows) -> RowSums:
    """Sums over a client's rows."""
    good, very_bad = rows.k <= rows.limit, ~(rows.k <= 1)  # unknown ones count as very bad
    counts = len(good), good.sum(), np.sum(~good & ~very_bad), very_bad.sum()
    return RowSums(*map(float, (rows.elpd.sum(), rows.p_loo.sum(), *counts, np.sum(rows.elpd**2))))


def implausible(sums: Array) -> str | None:
    """Why finite sums of a site are impossible, or None.

    >>> implausible(np.array([-3.0, 0.5, 2.0, 2.0, 0.0, 0.0, 5.0]))
    >>> implausible(np.array([-3.0, 0.5, 2.0, 1.0, 0.0, 0.0, 5.0]))
    'of 2 rows 1 have a Pareto k'
    """
    told = RowSums(*sums.tolist())
    counts = (told.good, told.bad, told.very_bad)
    if min(counts) < 0 or told.rows < 1 or any(count % 1 for count in (told.rows, *counts)):
        return "numbers of rows that are none"
    if sum(counts) != told.rows:
        return f"of {told.rows:.0f} rows {sum(counts):.0f} have a Pareto k"
    if told.squares * told.rows < told.elpd**2 * (1 - 1e-9):
        return "squares that are too small for their sum"
    return None


def _se(total: Any, squares: Any, rows: Any) -> Any:
    """Standard error of a sum over rows, from the sum of their squares."""
    unbiased = rows / np.maximum(rows - idata.LOO_DDOF, 1)
    return np.sqrt(np.maximum(squares - total**2 / rows, 0.0) * unbiased)


def _stacked(elpd: Array) -> Array:
    """Weights on the simplex with the largest log score of the mixture, from log densities (models, rows)."""
    shifted = np.exp(elpd - elpd.max(axis=0))

    def loss(logits: Array) -> tuple[float, Array]:
        weights = np.exp(logits - logsumexp(logits))
        mixture = weights @ shifted
        gradient = weights * ((shifted / mixture).sum(axis=1) - shifted.shape[1])
        return -float(np.log(mixture).sum()), -gradient

    bounds = [(-30.0, 30.0)] * len(elpd)
    logits = minimize(loss, np.zeros(len(elpd)), jac=True, method="L-BFGS-B", bounds=bounds).x
    return np.asarray(np.exp(logits - logsumexp(logits)))


# Models of the same clients' data compared by log evidence ------------------------------------------------------------


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
        `Fit.log_evidence`: "sums", or "EP", an approximation whose own error is in no standard error.

    Raises
    ------
    DeclarationError
        If there are fewer than two fits, or one has no evidence: see `Fit.log_evidence`.
    DataError
        If the fits are of other clients or of other observations.
    NotConvergedError
        Where weights are not to be trusted.

    Examples
    --------
    >>> import fedppl
    >>> model, clients = fedppl.testing.normal_means()
    >>> fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    >>> fedppl.compare({"one": fit, "the same": fit})["probability"].tolist()
    [0.5, 0.5]

    Notes
    -----
    *When this fails.* The evidence depends on the priors, however many data there are: with priors that are wide for
    want of knowledge it prefers the model that has fewer of them. Compare predictions then. Of clients whose data are
    not here (sites of their own, fits from a file) only the ids are compared; the log says so. A client
    that adds a constant to its log densities decides which model is preferred, and `trust=` does not protect from it.
    """
    _require_comparable(fits)
    evidence = [_evidence(name, fit) for name, fit in fits.items()]
    if absent := sorted({k for fit in fits.values() for k in fit.client_ids if k not in fit.clients}):
        what = "are not here: whether they are the same in all fits is not known"
        logger.warning("the data of %s %s", some_of(absent), what)
    values = np.array([one.value for one in evidence])
    errors = np.array([one.error for one in evidence])
    best = int(np.argmax(values))
    weights = np.exp(values - values.max())
    columns = {
        "log_evidence": values,
        "se": errors,
        "difference": values[best] - values,
        "dse": np.where(np.arange(len(values)) == best, 0.0, np.hypot(errors, errors[best])),
        "probability": weights / weights.sum(),
        "method": [one.method for one in evidence],
    }
    return _ranked(columns, fits, "log_evidence")


def _ranked(columns: Mapping[str, Any], fits: Mapping[str, Fit], by: str) -> pd.DataFrame:
    table = pd.DataFrame(columns, index=list(fits)).sort_values(by, ascending=False, kind="stable")
    table.insert(0, "rank", range(len(table)))
    return table


def _evidence(name: str, fit: Fit) -> LogEvidence:
    try:
        return fit.log_evidence
    except (DeclarationError, NotConvergedError) as error:
        raise type(error)(f"fit {name!r}: {error}") from error


def _require_comparable(fits: Any, *, in_order: bool = False) -> None:
    """Refuse what is not two or more fits by name, of the same clients and observations, `in_order` if it counts."""
    if not isinstance(fits, Mapping) or len(fits) < 2 or not all(isinstance(fit, Fit) for fit in fits.values()):
        raise DeclarationError(f"fits={shown(fits)} must be two or more fits by name: {{'a': fit_a, 'b': fit_b}}.")
    if odd := [name for name in fits if not isinstance(name, str)]:
        raise DeclarationError(f"fits have the names {odd[:5]}, which are no texts; write {str(odd[0])!r}.")
    (first, reference), *others = fits.items()
    for name, fit in others:
        _require_same_data(first, reference, name, fit, in_order=in_order)


def _require_same_data(first: str, reference: Fit, name: str, fit: Fit, *, in_order: bool) -> None:
    if set(reference.client_ids) != set(fit.client_ids):
        odd = sorted(set(reference.client_ids) ^ set(fit.client_ids))
        raise DataError(f"fits {first!r} and {name!r} are not of the same clients: {odd[:5]} took part in one alone.")
    if isinstance(reference.clients, ClientsOf) and isinstance(fit.clients, ClientsOf):
        one, other = reference.clients.observed(), fit.clients.observed()
        same = [np.array_equal(one[name], other[name]) for name in one if name in other]
        if list(reference.clients) == list(fit.clients) and one.keys() == other.keys() and len(one) > 1 and all(same):
            return
    for client_id, ours in reference.clients.items():
        if client_id not in fit.clients:
            continue
        before, after = _observed(ours), _observed(fit.clients[client_id])
        if not np.array_equal(*((before, after) if in_order else (np.sort(before), np.sort(after)))):
            counts = f"{len(before)} observations in fit {first!r} and {len(after)} others in fit {name!r}"
            remedy = f"compare fits of the same outcomes, in the same units{', in this order' * in_order}."
            raise DataError(f"client {client_id!r} has {counts}; {remedy}")


def _observed(client: ClientModel) -> Array:
    values = [values.ravel() for values in observed_values(client.pymc_model()).values()]
    return np.concatenate(values).astype(float) if values else np.zeros(0)
