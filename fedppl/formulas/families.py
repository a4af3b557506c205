"""Families of outcomes by name: their likelihood as PyMC declares it, and the shared parameters beside the mean."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from scipy.special import expit, logit, softmax

from fedppl.formulas.family import Drawn, Family, Scales, log_mean, relative_variance
from fedppl.formulas.priors import Prior
from fedppl.formulas.survival import SURVIVAL
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError

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
