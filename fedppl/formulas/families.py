"""Families of outcomes: their likelihood as PyMC declares it, and the shared parameters that it has beside the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from fedppl.formulas.priors import Prior
from fedppl.types import DeclarationError

Likelihood = Callable[[str, Any, Mapping[str, Any], Mapping[str, Any]], None]


class Scales(NamedTuple):
    """What is known of the outcome before the fit."""

    mean: float
    sd: float
    levels: tuple[str, ...]


class Family(NamedTuple):
    """A family of outcomes.

    Attributes
    ----------
    name
        How users call it.
    likelihood
        ``likelihood(name, eta, parameters, data)`` declares the outcome in the model that is open.
    parameters
        Priors of its other shared parameters, by name, from `Scales`.
    outcome
        Kind of numbers that outcomes are: "real", "positive", "unit", "binary", "count" or "level".
    center
        Mean of the linear predictor that an intercept is expected near, from `Scales`.
    unit
        Size of the linear predictor's changes that are expected, from `Scales`.
    response
        Kind of response that a formula has to have.
    intercept
        Whether there may be one.
    """

    name: str
    likelihood: Likelihood
    parameters: Callable[[Scales], Mapping[str, Prior]]
    outcome: str
    center: Callable[[Scales], float] = lambda scales: 0.0
    unit: Callable[[Scales], float] = lambda scales: 1.0
    response: str = "plain"
    intercept: bool = True


def _log_mean(scales: Scales) -> float:
    return float(np.log(max(scales.mean, 1e-6)))


def _none(scales: Scales) -> Mapping[str, Prior]:
    return {}


def _gaussian(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    pm.Normal(name, eta, parameters["sigma"], observed=data["outcome"])


def _student(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    pm.StudentT(name, nu=parameters["nu"], mu=eta, sigma=parameters["sigma"], observed=data["outcome"])


def _bernoulli(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    pm.Bernoulli(name, logit_p=eta, observed=data["outcome"])


def _binomial(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    pm.Binomial(name, n=data["trials"], logit_p=eta, observed=data["outcome"])


def _poisson(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    pm.Poisson(name, pt.exp(eta), observed=data["outcome"])


def _negative_binomial(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    pm.NegativeBinomial(name, mu=pt.exp(eta), alpha=parameters["alpha"], observed=data["outcome"])


def _gamma(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    alpha = parameters["alpha"]
    pm.Gamma(name, alpha=alpha, beta=alpha * pt.exp(-eta), observed=data["outcome"])


def _beta(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    pm.Beta(name, mu=pm.math.invlogit(eta), nu=parameters["kappa"], observed=data["outcome"])


def _ordinal(name: str, eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    pm.OrderedLogistic(name, eta=eta, cutpoints=parameters["threshold"], observed=data["outcome"])


def _sigma(scales: Scales) -> Mapping[str, Prior]:
    return {"sigma": Prior("HalfNormal", sigma=2.0 * scales.sd)}


def _sigma_and_nu(scales: Scales) -> Mapping[str, Prior]:
    return {**_sigma(scales), "nu": Prior("Gamma", alpha=2.0, beta=0.1)}


def _shape(scales: Scales) -> Mapping[str, Prior]:
    return {"alpha": Prior("Gamma", alpha=2.0, beta=0.2)}


def _concentration(scales: Scales) -> Mapping[str, Prior]:
    return {"kappa": Prior("Gamma", alpha=2.0, beta=0.1)}


def _thresholds(scales: Scales) -> Mapping[str, Prior]:
    count = len(scales.levels) - 1
    start = np.linspace(-1.5, 1.5, count) if count > 1 else np.zeros(count)
    ordered = pm.distributions.transforms.ordered
    return {"threshold": Prior("Normal", mu=0.0, sigma=2.5, shape=count, default_transform=ordered, initval=start)}


FAMILIES: Mapping[str, Family] = {
    one.name: one
    for one in (
        Family("gaussian", _gaussian, _sigma, "real", lambda s: s.mean, lambda s: s.sd),
        Family("student", _student, _sigma_and_nu, "real", lambda s: s.mean, lambda s: s.sd),
        Family("bernoulli", _bernoulli, _none, "binary"),
        Family("binomial", _binomial, _none, "count", response="proportion"),
        Family("poisson", _poisson, _none, "count", _log_mean),
        Family("negativebinomial", _negative_binomial, _shape, "count", _log_mean),
        Family("gamma", _gamma, _shape, "positive", _log_mean),
        Family("beta", _beta, _concentration, "unit"),
        Family("ordinal", _ordinal, _thresholds, "level", intercept=False),
    )
}


def family(name: str) -> Family:
    """The family of a name."""
    if name not in FAMILIES:
        raise DeclarationError(f"family={name!r} is not known; choose one of {sorted(FAMILIES)}.")
    return FAMILIES[name]
