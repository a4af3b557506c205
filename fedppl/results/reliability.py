"""Predicted probabilities of outcomes held against these, from sums by tenths that each client computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytensor.tensor as pt
import xarray as xr

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.results.at_client import observed_values, require_rows, with_rows
from fedppl.results.fit import Fit
from fedppl.results.records import COHORT, require_arrived, told_sums
from fedppl.settings import a_fit
from fedppl.types import Array, DeclarationError

EDGES = np.linspace(0.0, 1.0, 11)  # of bins of predicted probabilities, the same at all clients; one belongs below
_BINS = len(EDGES) - 1
LENGTH = 3 * _BINS + 2
_AT_ONCE = 2**20  # numbers in an array of probabilities that is computed at once
_ROUNDING = 1e-6  # relative, of sums that are added in another order


@dataclass(frozen=True, repr=False)
class Reliability:
    """How well predicted probabilities agree with outcomes, over all rows of all clients.

    Attributes
    ----------
    bins
        A row a tenth of the predicted probability: ``low``, ``high``, ``rows`` (of a binomial outcome trials), and the
        mean probability ``predicted`` and the share of ones ``observed`` of these; NaN in a tenth without rows.
    brier, log_score
        Means over rows: of Σ_c (p_c − [y = c])² over both outcomes, as `fedppl.metrics.brier`, and of log p of the
        outcome that came.
    rows, clients
        Numbers of rows and clients.
    status
        Of the fit: if it has not converged, these figures say little.
    """

    bins: pd.DataFrame
    brier: float
    log_score: float
    rows: float
    clients: int
    status: str

    def __repr__(self) -> str:
        """One line; `bins` has a row for each tenth."""
        of = f"{self.rows:g} rows of {self.clients} clients; {self.status}"
        return f"Reliability(brier {self.brier:.3f}, log_score {self.log_score:.3f}; {of})"


def reliability(fit: Fit, *, draws: int = 1000, chains: int = 4, random_seed: int | None = None) -> Reliability:
    r"""Hold predicted probabilities of outcomes that are 0 or 1 against these, by tenths of the probability.

    .. math:: p_{ki} = \mathrm E[P(y_{ki} = 1 \mid \phi, \theta_k) \mid y], \qquad
              \text{predicted}_b = \frac1{n_b} \sum_{ki \in b} p_{ki}, \quad
              \text{observed}_b = \frac1{n_b} \sum_{ki \in b} y_{ki}

    Parameters
    ----------
    fit
        Fit whose clients are in this process, or are sites whose policies let these sums out (``"calibration"`` in
        `conclusions`); sites sent them when the run was over, from draws of their own.
    draws, chains, random_seed
        Of the clients' posteriors, as in `Fit.client`.

    Returns
    -------
    Reliability
        `fedppl.plots.reliability` draws it.

    Raises
    ------
    DeclarationError
        If sites gave no sums, or outcomes are neither Bernoulli nor binomial.

    Examples
    --------
    >>> import fedppl, numpy as np, pandas as pd
    >>> rng = np.random.default_rng(1)
    >>> frame = pd.DataFrame({"site": np.repeat([1, 2, 3], 20), "x": rng.normal(size=60)})
    >>> frame["y"] = (rng.random(60) < 1 / (1 + np.exp(-frame["x"]))).astype(int)
    >>> model = fedppl.formula("y ~ x", family="bernoulli")
    >>> fit = fedppl.fit(model, frame, by="site", progressbar=False, random_seed=1)
    >>> found = fedppl.reliability(fit)
    >>> found.rows, found.clients, bool(found.brier < 0.5)
    (60.0, 3, True)

    Notes
    -----
    *When this fails.* The rows are those of the fit, so that predictions look better than for new rows, the more so the
    more a model can adapt: hold some clients out, and see `fedppl.metrics`. The share in a tenth with few rows is
    mostly noise. Agreement over all clients may hide that some are predicted too high and others too low.
    """
    a_fit(fit)
    require_arrived(fit, "fedppl.reliability")
    if len(fit.clients) < len(fit.client_ids):
        sums = told_sums(fit, "calibration", "fedppl.reliability")
    else:
        keywords: dict[str, Any] = {"draws": draws, "chains": chains, "random_seed": random_seed}
        names = with_rows(fit, "fedppl.reliability")
        sums = {name: counts_of(fit.clients[name], fit.client(name, **keywords)["posterior"]) for name in names}
    told = _unpacked(np.sum(list(sums.values()), axis=0))
    total = float(told.rows.sum())
    with np.errstate(invalid="ignore"):
        means = {"predicted": told.predicted / told.rows, "observed": told.observed / told.rows}
    bins = pd.DataFrame({"low": EDGES[:-1], "high": EDGES[1:], "rows": told.rows, **means})
    count = len(fit.client_ids) if COHORT in sums else len(sums)
    return Reliability(bins, told.brier / total, told.log_score / total, total, count, fit.status.value)


# Sums over rows of one client, which a site may send ------------------------------------------------------------------


class _Counts(NamedTuple):
    """Sums over rows, by tenths of the probability and over all."""

    rows: Array  # (bins,)
    predicted: Array  # (bins,)
    observed: Array  # (bins,)
    brier: float
    log_score: float


def _unpacked(numbers: Array) -> _Counts:
    return _Counts(*numbers[:-2].reshape(3, _BINS), *map(float, numbers[-2:]))


def counts_of(client: ClientModel, posterior: xr.Dataset) -> Array:
    """Sums over a client's rows, (32,), by the draws of its posterior."""
    require_rows(client, "calibration")
    function = client.template.of_declaration("probabilities", lambda: _compiled(client))
    model, parts = client.pymc_model(), []
    observed = observed_values(model)
    names = [rv.name for rv in model.observed_RVs if _parameters(rv) is not None]
    for name, (p, trials, weights) in zip(names, _means(client, function, posterior), strict=True):
        y = np.ravel(observed[name]).astype(float)
        parts.append(
            _counted(y, *(np.broadcast_to(part, observed[name].shape).ravel() for part in (p, trials, weights)))
        )
    return np.asarray(np.sum(parts, axis=0))


def _counted(y: Array, p: Array, trials: Array, weights: Array) -> Array:
    """Sums of ones y of so many trials, which have the probability p, all (n,)."""
    places = np.clip(np.digitize(p, EDGES, right=True) - 1, 0, _BINS - 1)
    ones, count = weights * y, weights * trials
    by_bin = [np.bincount(places, weights=part, minlength=_BINS) for part in (count, count * p, ones)]
    zeros = count - ones
    with np.errstate(divide="ignore"):
        log_score = np.sum(
            ones * np.log(np.where(ones > 0, p, 1.0)) + zeros * np.log(np.where(zeros > 0, 1.0 - p, 1.0))
        )
    brier = 2.0 * np.sum(ones * (1.0 - p) ** 2 + zeros * p**2)
    return np.concatenate([*by_bin, [brier, log_score]])


def implausible(numbers: Array) -> str | None:
    """Why finite sums of a site or a cohort are impossible, or None.

    >>> implausible(_counted(np.ones(2), np.array([0.31, 0.9]), np.ones(2), np.ones(2)))
    >>> implausible(_counted(np.full(2, 3.0), np.array([0.31, 0.9]), np.ones(2), np.ones(2)))
    'more ones than rows, or fewer than none'
    """
    told = _unpacked(np.asarray(numbers, dtype=float))
    slack = _ROUNDING * (1.0 + told.rows)
    if np.any(told.rows < 0) or told.rows.sum() <= 0:
        return "numbers of rows that are none"
    if np.any(told.observed < -slack) or np.any(told.observed > told.rows + slack):
        return "more ones than rows, or fewer than none"
    if np.any(told.predicted < EDGES[:-1] * told.rows - slack) or np.any(
        told.predicted > EDGES[1:] * told.rows + slack
    ):
        return "probabilities that are not in their tenths"
    if not 0 <= told.brier <= 2 * told.rows.sum() + slack.sum() or told.log_score > slack.sum():
        return "scores that no probabilities have"
    return None


# Predicted probabilities by a declared model. A thin edge to PyMC -----------------------------------------------------


def _parameters(rv: Any) -> tuple[Any, Any, Any] | None:
    """Probability, number of trials and weight of the rows of an observed variable; None for other outcomes."""
    op = rv.owner.op
    name = str(getattr(op, "name", None) or getattr(op, "_print_name", ("",))[0])
    weighted, name = name.startswith("weighted_"), name.removeprefix("weighted_")
    if name not in ("bernoulli", "binomial"):
        return None
    *given, last = op.dist_params(rv.owner)
    if not weighted:  # (p,) or (trials, p)
        return last, given[0] if given else pt.constant(1.0), pt.constant(1.0)
    return pt.sigmoid(given[-1]), given[0] if name == "binomial" else pt.constant(1.0), last  # of a formula


def _compiled(client: ClientModel) -> Callable[..., list[Array]]:
    """Probabilities, trials and weights at draws of all variables."""

    def outputs(model: Any, observed: Sequence[Any]) -> list[Any]:
        found = [parameters for rv in observed if (parameters := _parameters(rv)) is not None]
        if not found:
            raise DeclarationError("outcomes are neither Bernoulli nor binomial, and have no probability of a one.")
        return list(model.replace_rvs_by_values(list(itertools.chain.from_iterable(found))))

    sampled, inputs, values = _graph.observed_given_all(client.template.parts, outputs)
    return interpreted.batched(sampled, inputs, interpreted.stable(values))


def _means(client: ClientModel, function: Callable[..., list[Array]], posterior: Mapping[Any, Any]) -> list[Any]:
    """Means over draws of what the function returns, in threes: of each observed variable."""
    model = client.template.parts.model
    draws = [np.asarray(posterior[rv.name]) for rv in model.free_RVs]
    flat = [array.reshape(-1, *array.shape[2:]) for array in draws]
    inputs = client.inputs[: len(client.inputs) - len(client.template.graph.free_shapes)]
    step, count = max(1, _AT_ONCE // max(1, sum(map(np.size, client.inputs)))), len(flat[0])
    total: Any = 0.0
    for k in range(0, count, step):
        part = [np.sum(value, axis=0) / count for value in function(*(array[k : k + step] for array in flat), *inputs)]
        total = part if k == 0 else [before + more for before, more in zip(total, part, strict=True)]
    return [total[k : k + 3] for k in range(0, len(total), 3)]
