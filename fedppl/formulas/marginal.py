"""Marginal effects of a column on the mean outcome, at each client and over all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedppl.contracts import Posterior
from fedppl.contracts.printed import CI_PROB, interval
from fedppl.formulas.checks import require_times
from fedppl.formulas.declare import Formula
from fedppl.formulas.predictor import at_levels, rows_of, slope
from fedppl.results.at_client import has_rows, require_rows
from fedppl.results.fit import Fit
from fedppl.results.records import require_arrived
from fedppl.settings import between, chosen, shown, some_of
from fedppl.types import Array, DeclarationError

logger = logging.getLogger(__name__)

ALL = "all"


def marginal_effects(
    fit: Fit,
    column: str,
    *,
    at: float | None = None,
    clients: Sequence[Any] | None = None,
    ci_prob: float = CI_PROB,
    draws: int = 250,
    chains: int = 4,
    random_seed: int | None = None,
) -> pd.DataFrame:
    r"""Average over rows of the expected outcome at another value of a column (g-computation).

    .. math:: \frac1{n_k}\sum_i \mathrm E[y_{ki} \mid x_{ki}, \text{column} = a], \qquad
              \frac1{n_k}\sum_i \frac{\partial}{\partial x} \mathrm E[y_{ki} \mid x_{ki}]

    Parameters
    ----------
    fit
        A fit of a formula, whose clients are in this process.
    column
        A column of the formula. For one with levels the result has the mean outcome with all rows at each level, and
        differences from the reference; for one of 0 and 1 (truths) at 0, at 1, and the difference; for another numeric
        one the mean derivative, per unit of the column.
    at
        For times until an event, a time: then outcomes are probabilities of no event until it. By default they are
        median times.
    clients
        Ids of clients; by default all.
    ci_prob
        Probability of the equal-tailed interval.
    draws, chains, random_seed
        Posterior draws, as for `Fit.client`.

    Returns
    -------
    pandas.DataFrame
        Rows (client, what), or (client, what, outcome) for probabilities of an outcome's levels; the client "all" is
        the mean over these clients, weighted by their numbers of rows. Columns ``mean``, ``sd``, ``ci_low``,
        ``ci_high``, on the scale of the outcome, per trial for a binomial one.

    Raises
    ------
    DeclarationError
        If the fit has no formula or no posterior, the column is not in the formula or has no slope at a row, or `at`
        does not fit.

    Examples
    --------
    >>> import fedppl, numpy as np, pandas as pd
    >>> rng = np.random.default_rng(1)
    >>> frame = pd.DataFrame({"site": np.repeat([1, 2, 3], 20), "arm": rng.choice(["a", "b"], 60)})
    >>> frame["y"] = (rng.random(60) < 0.3 + 0.4 * (frame["arm"] == "b")).astype(int)
    >>> model = fedppl.formula("y ~ arm", family="bernoulli")
    >>> fit = fedppl.fit(model, frame, by="site", progressbar=False, random_seed=1)
    >>> bool(fedppl.marginal_effects(fit, "arm").loc[("all", "b - a"), "mean"] > 0.1)
    True

    Notes
    -----
    The rows are a client's own, with its effects; the other columns stay as they are. This is the effect of a treatment
    if the formula has all confounders.

    A draw of the mean over clients has one draw of the shared variables. Where clients have effects, their draws come
    with draws of the shared variables that differ between clients: a client's average is moved to the common draw along
    its regression on the shared variables. The mean is that of the clients' means; the sd is exact where averages are
    linear in the shared variables.

    *When this fails.* The average derivative by a column of few whole numbers differs from the steps between them;
    write ``C(column)``. A function without a slope at a row, as ``np.sqrt(x)`` at 0 and ``np.floor(x)`` at whole
    numbers, is refused; where its domain ends, as that of a spline at its bounds, the one-sided slope is used. Median
    times beyond the last observed one follow from the family alone.
    """
    built = _formula_of(fit, column)
    if at is not None:
        require_times(built.family, at)
    at = None if at is None else between("at", at, 0.0, np.inf)
    ci_prob = between("ci_prob", ci_prob, 0, 1)
    ids = _ids(fit, clients)
    if ALL in ids:
        raise DeclarationError(f"a client is named {ALL!r}, as is the mean over clients; leave it out of clients=.")
    keywords: dict[str, Any] = {"draws": draws, "chains": chains, "random_seed": random_seed}
    shared = _stacked(fit.shared(**keywords)["posterior"])
    spec = built.spec
    rows = {client_id: rows_of(spec, built.by_role(fit.clients[client_id].arrays)) for client_id in ids}
    by_level = spec.design.agreement.columns[column].levels or _is_truth(fit, built.containers[f"column_{column}"])
    parts, moved, common = {}, [], _phi(shared, built)
    for client_id, own_rows in rows.items():
        own = _stacked(fit.client(client_id, **keywords)["posterior"]) if spec.terms.groups else shared
        averages = (at_levels if by_level else slope)(spec, own_rows, column, own, at)
        parts[client_id] = averages
        if spec.terms.groups:
            averages = {what: _moved(value, _phi(own, built), common) for what, value in averages.items()}
        moved.append(averages)
    sizes = np.array([one.weights.sum() for one in rows.values()])
    share = sizes / sizes.sum()
    parts[ALL] = {what: np.tensordot(share, np.stack([one[what] for one in moved]), axes=1) for what in moved[0]}
    return _table(parts, spec.scales.levels, ci_prob)


def _is_truth(fit: Fit, name: str) -> bool:
    """Whether an array of numbers is 0 or 1 in all rows that are here, and both occur."""
    arrays = [client.arrays[name] for client in fit.clients.values() if name in client.arrays]
    return {value for array in arrays for value in np.unique(array)[:3].tolist()} == {0.0, 1.0}


def _formula_of(fit: Any, column: Any) -> Formula:
    built = getattr(getattr(fit, "declaration", None), "builder", None)
    if not isinstance(fit, Fit) or not isinstance(built, Formula):
        raise DeclarationError("marginal effects need a fit of fedppl.formula; see fit.client(id, predict=...).")
    if column not in built.terms.columns:
        raise DeclarationError(f"column={shown(column)}: columns of {built.text!r} are {list(built.terms.columns)}.")
    if not isinstance(fit.algorithm.result.shared, Posterior):
        raise DeclarationError(f"{fit.algorithm.name} has no posterior to average over; use fedppl.EP().")
    require_arrived(fit, "fedppl.marginal_effects")
    return built


def _ids(fit: Fit, clients: Any) -> list[str]:
    ids = chosen("clients", clients, fit.client_ids, "the fit's clients")
    if absent := [client_id for client_id in ids if client_id not in fit.clients]:
        remedy = "pass them, fedppl.load(path, model, clients=...), or call it where their data are"
        raise DeclarationError(f"the rows of clients {some_of(absent)} are not here; {remedy}.")
    for client_id in ids if clients is not None else ():
        require_rows(fit.clients[client_id], "marginal effects")
    if left_out := [client_id for client_id in ids if not has_rows(fit.clients[client_id])]:
        logger.info("clients %s brought no rows, and are left out of marginal effects", left_out[:10])
    return [client_id for client_id in ids if client_id not in left_out]


def _stacked(posterior: Any) -> dict[str, Array]:
    """Draws (S, ...) by name."""
    draws = {str(name): np.asarray(posterior[name]) for name in posterior.data_vars}
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in draws.items()}


def _phi(draws: dict[str, Array], built: Formula) -> Array:
    """Draws of the shared variables, side by side, (S, m)."""
    return np.concatenate([draws[name].reshape(len(draws[name]), -1) for name in built.shared], axis=1)


def _moved(value: Array, phi: Array, common_phi: Array) -> Array:
    """A client's averages at the common draws of φ, moved along their regression on φ; residuals stay."""
    if len(phi) < 5 * phi.shape[1]:
        least = f"{5 * phi.shape[1]} or more over all chains"
        raise DeclarationError(f"{len(phi)} draws are too few for {phi.shape[1]} numbers; pass draws= for {least}.")
    centred = phi - phi.mean(axis=0)
    slopes, *_ = np.linalg.lstsq(centred, value - value.mean(axis=0), rcond=None)
    return np.asarray(value + (common_phi - common_phi.mean(axis=0) - centred) @ slopes)


def _table(parts: dict[str, dict[str, Array]], levels: tuple[str, ...], ci_prob: float) -> pd.DataFrame:
    flat: dict[tuple[str, ...], Array] = {}
    for client_id, averages in parts.items():
        for what, value in averages.items():
            if value.ndim == 1:
                flat[client_id, what] = value
            else:
                flat |= {(client_id, what, level): value[:, k] for k, level in enumerate(levels)}
    draws = np.array(list(flat.values()))
    low, high = np.quantile(draws, interval(ci_prob), axis=1)
    columns = {"mean": draws.mean(axis=1), "sd": draws.std(axis=1, ddof=1), "ci_low": low, "ci_high": high}
    names = ["client", "what", "outcome"][: len(next(iter(flat)))]
    return pd.DataFrame(columns, index=pd.MultiIndex.from_tuples(list(flat), names=names))
