"""Families of outcomes by name: their likelihood as PyMC declares it, and the shared parameters beside the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from scipy.special import expit, logit, softmax

from fedppl.formulas.agreement import Agreement, coded, is_text
from fedppl.formulas.family import Drawn, Family, Scales, log_mean, relative_variance
from fedppl.formulas.priors import Prior
from fedppl.formulas.survival import NEVER, SURVIVAL
from fedppl.formulas.terms import Response
from fedppl.settings import shown
from fedppl.types import Array, DataError, DeclarationError

_Parameters = Mapping[str, Any]
_Data = Mapping[str, Any]


def _gaussian(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.Normal, {"mu": eta, "sigma": parameters["sigma"]})


def _student(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.StudentT, {"nu": parameters["nu"], "mu": eta, "sigma": parameters["sigma"]})


def _bernoulli(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.Bernoulli, {"logit_p": eta})


def _binomial(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.Binomial, {"n": data["trials"], "logit_p": eta})


def _poisson(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.Poisson, {"mu": pt.exp(eta)})


def _negative_binomial(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.NegativeBinomial, {"mu": pt.exp(eta), "alpha": parameters["alpha"]})


def _gamma(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.Gamma, {"alpha": parameters["alpha"], "beta": parameters["alpha"] * pt.exp(-eta)})


def _beta(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.Beta, {"mu": pm.math.invlogit(eta), "nu": parameters["kappa"]})


def _ordinal(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    given = {"eta": eta, "threshold": parameters["threshold"]}
    return Drawn(None, given, "(),(k)", _log_level, _draw_level, "ordered_logistic", "int64")


def _log_level(value: Any, eta: Any, cuts: Any) -> Any:
    """log(σ(b − η) − σ(a − η)) = log σ(b − η) + log σ(η − a) + log(1 − exp(a − b)), of a row's own thresholds a < b."""
    cuts = cuts.reshape((cuts.shape[-1],))  # the same of all rows
    last = cuts.shape[0]
    is_first, is_last = pt.eq(value, 0), pt.eq(value, last)
    above = pt.switch(is_last, 0.0, pt.softplus(eta - cuts[pt.minimum(value, last - 1)]))
    below = pt.switch(is_first, 0.0, pt.softplus(cuts[pt.maximum(value - 1, 0)] - eta))
    width = pt.log(-pt.expm1(cuts[:-1] - cuts[1:]))
    return pt.concatenate([pt.zeros(1), width, pt.zeros(1)])[value] - above - below


def _draw_level(eta: Array, cuts: Array, rng: Any = None, size: Any = None) -> Array:
    shape = np.shape(eta) if size is None else size
    latent = np.broadcast_to(eta, shape) + rng.logistic(size=shape)
    return np.asarray(np.sum(latent[..., None] > cuts, axis=-1))


def _categorical(eta: Any, parameters: _Parameters, data: _Data, scales: Scales) -> Drawn:
    return Drawn(pm.Categorical, {"logit_p": pt.concatenate([pt.zeros_like(eta[:, :1]), eta], axis=1)}, "(k)")


def _itself(eta: Array, parameters: Mapping[str, Array], scales: Scales, at: float | None) -> Array:
    return eta


def _inverse_logit(eta: Array, parameters: Mapping[str, Array], scales: Scales, at: float | None) -> Array:
    return np.asarray(expit(eta))


def _exponential(eta: Array, parameters: Mapping[str, Array], scales: Scales, at: float | None) -> Array:
    return np.exp(eta)


def _of_levels(eta: Array, parameters: Mapping[str, Array], scales: Scales, at: float | None) -> Array:
    reached = expit(parameters["threshold"] - eta[..., None])
    ends = [np.zeros((*reached.shape[:-1], 1)), reached, np.ones((*reached.shape[:-1], 1))]
    return np.diff(np.concatenate(ends, axis=-1), axis=-1)


def _softmax(eta: Array, parameters: Mapping[str, Array], scales: Scales, at: float | None) -> Array:
    return np.asarray(softmax(np.concatenate([np.zeros((*eta.shape[:-1], 1)), eta], axis=-1), axis=-1))


def _sigma(scales: Scales) -> Mapping[str, Prior]:
    return {"sigma": Prior("HalfNormal", sigma=2.0 * scales.sd)}


def _sigma_and_nu(scales: Scales) -> Mapping[str, Prior]:
    return {**_sigma(scales), "nu": Prior("Gamma", alpha=2.0, beta=0.1)}


def _precise(name: str, relative: float) -> Mapping[str, Prior]:
    """Of a precision whose inverse is `relative` without predictors, which leave less: a factor of 20 is one sd."""
    return {name: Prior("LogNormal", mu=-float(np.log(relative)), sigma=3.0)}


def _alpha(scales: Scales) -> Mapping[str, Prior]:
    return _precise("alpha", relative_variance(scales))


def _alpha_of_counts(scales: Scales) -> Mapping[str, Prior]:
    # What is beyond Poisson's variance; of sums that are rounded, a quarter may be.
    beyond = 1.0 - scales.mean / scales.sd**2 if scales.mean > 0 else 1.0
    return _precise("alpha", relative_variance(scales) * max(beyond, 0.25))


def _concentration(scales: Scales) -> Mapping[str, Prior]:
    most = scales.mean * (1.0 - scales.mean)  # the variance of shares that are 0 or 1
    return _precise("kappa", 1.0 / max(most / scales.sd**2 - 1.0, 0.01))


def _thresholds(scales: Scales) -> Mapping[str, Prior]:
    count = len(scales.levels) - 1
    start = np.linspace(-1.5, 1.5, count) if count > 1 else np.zeros(count)
    ordered = pm.distributions.transforms.ordered
    return {"threshold": Prior("Normal", mu=0.0, sigma=2.5, shape=count, default_transform=ordered, initval=start)}


def _mean(scales: Scales) -> float:
    return scales.mean


def _sd(scales: Scales) -> float:
    return scales.sd


def _logit_mean(scales: Scales) -> float:
    return float(logit(scales.mean)) if 0.0 < scales.mean < 1.0 else 0.0


FAMILIES: Mapping[str, Family] = {
    one.name: one
    for one in (
        Family("gaussian", _gaussian, _itself, "real", _sigma, _mean, _sd),
        Family("student", _student, _itself, "real", _sigma_and_nu, _mean, _sd),
        Family("bernoulli", _bernoulli, _inverse_logit, "binary", link="logit"),
        Family("binomial", _binomial, _inverse_logit, "count", responses=("proportion",), link="logit"),
        Family("poisson", _poisson, _exponential, "count", center=log_mean, link="log"),
        Family("negativebinomial", _negative_binomial, _exponential, "count", _alpha_of_counts, log_mean, link="log"),
        Family("gamma", _gamma, _exponential, "positive", _alpha, log_mean, link="log"),
        Family("beta", _beta, _inverse_logit, "unit", _concentration, _logit_mean, link="logit"),
        Family("ordinal", _ordinal, _of_levels, "level", _thresholds, link="logit", intercept=False),
        Family("categorical", _categorical, _softmax, "level", link="logit against the reference", several=True),
        *SURVIVAL,
    )
}


# How other packages call them.
_ALIASES = {
    "normal": "gaussian",
    "t": "student",
    "logistic": "bernoulli",
    "logit": "bernoulli",
    "binary": "bernoulli",
    "nbinom": "negativebinomial",
    "negbinomial": "negativebinomial",
    "negative_binomial": "negativebinomial",
    "cumulative": "ordinal",
    "count": "poisson",
}


def family(name: str) -> Family:
    """The family of a name."""
    if not isinstance(name, str) or name not in FAMILIES:
        lower = name.casefold() if isinstance(name, str) else ""
        close = [_ALIASES[lower]] if lower in _ALIASES else get_close_matches(lower, FAMILIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DeclarationError(f"family={shown(name)} is not known; {hint}choose one of {sorted(FAMILIES)}.")
    return FAMILIES[name]


def taking(kind: str) -> list[str]:
    """Names of the families that have a response of this kind."""
    return [one.name for one in FAMILIES.values() if kind in one.responses]


# A client's outcomes in the numbers that a family takes, or what is wrong with them -----------------------------------

_RULES: Mapping[str, tuple[str, Callable[[Array], Any]]] = {
    "real": ("finite numbers", np.isfinite),
    "positive": ("above 0", lambda y: y > 0),
    "unit": ("between 0 and 1, both excluded", lambda y: (y > 0) & (y < 1)),
    "binary": ("0 or 1", lambda y: (y == 0) | (y == 1)),
    "count": ("whole numbers from 0", lambda y: (y >= 0) & (y == np.floor(y))),
}


def outcome(
    family: Family, response: Response, data: Mapping[str, Any], agreement: Agreement, what: str
) -> dict[str, Array]:
    """Outcomes, and numbers of trials where the family has them, as arrays of the builder."""
    absent = [name for name in response.columns if name not in data]
    if absent:
        raise DataError(f"{what} lacks {absent} of the response {list(response.columns)}.")
    if family.outcome == "time":
        return times(response, data, what)
    name = response.columns[0]
    values = np.asarray(data[name])
    if family.outcome == "level":
        column = agreement.columns[name]
        texts = coded(column, values, agreement, f"{what}: column {name!r}")
        places = {level: place for place, level in enumerate(column.levels)}
        return {"outcome": np.array([places[text] for text in texts.tolist()])}
    if family.outcome == "binary" and is_text(values):
        column = agreement.columns[name]
        return {"outcome": (coded(column, values, agreement, what) == column.levels[1]).astype(np.int64)}
    if is_text(values):
        raise DataError(
            f"{what}: {name!r} has texts, and family {family.name!r} wants numbers; make numbers of them, or choose "
            "family 'bernoulli' for two levels, 'ordinal' for more."
        )
    rule, holds = _RULES[family.outcome]
    wrong = ~holds(values.astype(float))
    if np.any(wrong):
        where = int(np.argmax(wrong))
        raise DataError(
            f"{what}: {name!r} is {values[where]} in row {where}, and outcomes of family {family.name!r} are {rule}; "
            "correct such rows, or choose another family."
        )
    found = {"outcome": values.astype(np.int64 if family.outcome in ("binary", "count") else float)}
    if response.kind == "proportion":
        found["trials"] = _trials(found["outcome"], np.asarray(data[response.columns[1]]), response, what)
    return found


def require_two(family: Family, name: str, agreement: Agreement, what: str) -> None:
    """Refuse an outcome of texts that are more than two, or one, where a family has two."""
    levels = agreement.columns[name].levels
    if family.outcome == "binary" and levels and len(levels) != 2:
        raise DataError(
            f"{what}: {name!r} has the levels {list(levels)[:8]}, and family {family.name!r} wants two; recode its "
            "rows to two, or choose family 'ordinal' where they have an order and 'categorical' where they have none."
        )


def new_rows(family: Family, response: Response, data: Mapping[str, Any], rows: int, what: str) -> dict[str, Array]:
    """What the likelihood reads beside the outcome, at rows of which it is predicted."""
    if family.outcome == "time":
        return unlimited(response, rows)
    if response.kind != "proportion":
        return {}
    name = response.columns[1]
    if name not in data:
        raise DataError(f"{what} lacks {name!r}, the numbers of trials, of which successes are predicted; add it.")
    return {"trials": _trials(np.zeros(rows), np.asarray(data[name]), response, what)}


def weights(name: str, data: Mapping[str, Any], what: str) -> Array:
    """Numbers of rows that each row stands for."""
    if name not in data:
        raise DataError(f"{what} lacks the weights {name!r}.")
    found = np.asarray(data[name])
    if is_text(found):
        raise DataError(f"{what}: the weights {name!r} are texts; give numbers above 0.")
    wrong = ~((found > 0) & np.isfinite(found))
    if np.any(wrong):
        where = int(np.argmax(wrong))
        raise DataError(
            f"{what}: the weight {name!r} is {found[where]} in row {where}; weights are finite and above 0: leave out "
            "rows that are to count for nothing."
        )
    return found.astype(float)


def _trials(successes: Array, trials: Array, response: Response, what: str) -> Array:
    if is_text(trials):
        raise DataError(f"{what}: {response.columns[1]!r} has texts, and trials are whole numbers; correct the column.")
    wrong = ~(trials >= np.maximum(successes, 1)) | (trials != np.floor(trials))
    if np.any(wrong):
        where = int(np.argmax(wrong))
        raise DataError(
            f"{what}: {response.columns[0]!r} is {successes[where]} of {response.columns[1]!r} {trials[where]} in row "
            f"{where}; trials are whole numbers, at least 1 and at least the successes."
        )
    return trials.astype(np.int64)


# A client's times until an event in the numbers that survival families take, or what is wrong with them ---------------


def times(response: Response, data: Mapping[str, Any], what: str) -> dict[str, Array]:
    """Times and their limits; or the times between which events are, and where in this each was seen."""
    first, second = (_numbers(name, data[name], what) for name in response.columns)
    return (_between if response.kind == "interval" else _right)(response.columns, first, second, what)


def size_of(response: Response, data: Mapping[str, Any]) -> Array:
    """Times as they are on average, for the scale that clients agree on: of an interval its middle."""
    first, second = (np.asarray(data[name]) for name in response.columns)
    if response.kind != "interval" or is_text(first) or is_text(second):
        return first
    return np.asarray(np.where(np.isfinite(second), (first + second) / 2.0, first))


def unlimited(response: Response, rows: int) -> dict[str, Array]:
    """What stands in the place of limits at new rows, of which the times themselves are predicted."""
    if response.kind == "interval":
        return {"lower": np.ones(rows), "upper": np.ones(rows)}
    return {"limit": np.full(rows, NEVER)}


def _right(names: tuple[str, ...], time: Array, event: Array, what: str) -> dict[str, Array]:
    _refuse(~((time > 0) & (time < NEVER)), names[0], time, what, "times are above 0 and finite")
    _refuse(~np.isin(event, (0, 1)), names[1], event, what, "events are 1, or 0 where there was none until the time")
    return {"outcome": time, "limit": np.where(event == 1, NEVER, time)}


def _between(names: tuple[str, ...], lower: Array, upper: Array, what: str) -> dict[str, Array]:
    _refuse(~((lower >= 0) & (lower < NEVER)), names[0], lower, what, "times are from 0, and finite")
    _refuse(
        ~((upper > 0) & (upper >= lower)), names[1], upper, what, f"it is above 0 and not below {names[0]!r}", lower
    )
    far = (upper >= NEVER) & np.isfinite(upper)
    _refuse(far, names[1], upper, what, f"times are below {NEVER:.2g}, or inf where there was no event", lower)
    nothing = (lower == 0) & ~(upper < NEVER)
    _refuse(nothing, names[1], upper, what, "from 0 to ever tells nothing of a time; leave the row out", lower)
    return {"outcome": lower, "lower": lower, "upper": np.minimum(upper, NEVER)}


def _refuse(wrong: Any, name: str, values: Array, what: str, rule: str, beside: Array | None = None) -> None:
    if np.any(wrong):
        where = int(np.argmax(wrong))
        more = "" if beside is None else f" after {beside[where]:g}"
        raise DataError(f"{what}: {name!r} is {values[where]:g}{more} in row {where}, and {rule}; correct such rows.")


def _numbers(name: str, values: Any, what: str) -> Array:
    if is_text(values):
        raise DataError(f"{what}: {name!r} has texts, and a time or an event is a number; recode its rows.")
    return np.asarray(values, dtype=float)
