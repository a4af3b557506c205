"""Families of outcomes by name: their likelihoods in PyMC, and their shared parameters beside the mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from scipy import special
from scipy.special import expit, logit, softmax

from fedppl.formulas.priors import Prior
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError


class Scales(NamedTuple):
    """Agreed moments and levels of the outcome."""

    mean: float
    sd: float
    levels: tuple[str, ...]
    cuts: tuple[float, ...] = ()  # of times, of a piecewise hazard


class Outcome(NamedTuple):
    """A kind of outcomes; copies and pickles are the constant of that name, which code compares by identity."""

    name: str  # of the constant
    rule: str = ""  # for values that are allowed
    holds: Callable[[Array], Any] = np.isfinite
    # made-up values from numbers of rows, mean and sd
    example: Callable[[Any, float, float], Any] = lambda k, mean, sd: k % 2 + 0.0
    whole: bool = False  # whether values are whole numbers
    scaled: bool = True  # whether priors depend on the mean and sd

    def __reduce__(self) -> str:
        """The constant's name."""
        return self.name


REAL = Outcome("REAL", "finite numbers", example=lambda k, mean, sd: mean + sd * (k % 3 - 1.0))
POSITIVE = Outcome("POSITIVE", "above 0", lambda y: y > 0, lambda k, mean, sd: k % 2 + 1.0)
UNIT = Outcome(
    "UNIT", "between 0 and 1, both excluded", lambda y: (y > 0) & (y < 1), lambda k, mean, sd: 0.25 + 0.25 * (k % 3)
)
BINARY = Outcome("BINARY", "0 or 1", lambda y: (y == 0) | (y == 1), whole=True, scaled=False)
COUNT = Outcome("COUNT", "whole numbers from 0", lambda y: (y >= 0) & (y == np.floor(y)), whole=True)
LEVEL = Outcome("LEVEL", whole=True, scaled=False)  # places of levels
TIME = Outcome("TIME", example=lambda k, mean, sd: mean * (1.0 + k % 2))  # until an event


class Link(NamedTuple):
    """The scale of the linear predictor."""

    predicted: str  # what the linear predictor is, "log of the mean"
    ratio: str = ""  # names of exp of a coefficient and of the intercept; {} is the first level
    base: str = ""


class Drawn(NamedTuple):
    """A distribution of PyMC, or one of fedppl with a `logp`."""

    distribution: Any
    parameters: Mapping[str, Any]
    signature: str = ""  # of the parameters, if some are not scalars: "(k),()"
    logp: Callable[..., Any] | None = None
    random: Callable[..., Any] | None = None
    name: str = ""  # of a distribution of fedppl
    dtype: str = "floatX"  # of a distribution of fedppl


Likelihood = Callable[[Any, Mapping[str, Any], Mapping[str, Any], Scales], Drawn]
Mean = Callable[[Array, Mapping[str, Array], Scales, float | None], Array]


class Parameter(NamedTuple):
    """A shared parameter beside the mean."""

    prior: Prior
    meaning: str  # in the table of `describe`


Parameters = Callable[[Scales], Mapping[str, Parameter]]


class Family(NamedTuple):
    """A family of outcomes."""

    name: str  # how users call it
    likelihood: Likelihood  # ``likelihood(eta, parameters, data, scales)``: how outcomes are distributed
    # ``mean(eta, parameters, scales, at)`` in NumPy: mean of outcomes, (..., levels of an outcome); for times their
    # median, or the probability that they exceed `at`
    mean: Mean
    outcome: Outcome
    link: Link
    parameters: Parameters = lambda scales: {}  # its other shared parameters, by name
    center: Callable[[Scales], float] = lambda scales: 0.0  # prior mean of the linear predictor
    unit: Callable[[Scales], float] = lambda scales: 1.0  # expected size of its changes
    responses: tuple[str, ...] = ("plain",)  # kinds of response that a formula may have
    intercept: bool = True  # whether there may be one
    several: bool = False  # whether each level of the outcome except the first has its own linear predictor
    ordered: bool = False  # whether levels of the outcome have an order
    has_cuts: bool = False  # whether constants have times between which its hazard is constant

    def priors(self, scales: Scales) -> dict[str, Prior]:
        """Priors of its other shared parameters, by name."""
        return {name: one.prior for name, one in self.parameters(scales).items()}


def declare(name: str, drawn: Drawn, observed: Any, weights: Any = None) -> None:
    """Declare the outcome in the open model; a row of weight w counts as w such rows."""
    values, plain = tuple(drawn.parameters.values()), drawn.logp
    if plain is None and weights is None:
        drawn.distribution(name, **drawn.parameters, observed=observed)
        return
    names, count = tuple(drawn.parameters), len(values)
    signature = drawn.signature or ",".join(["()"] * count)

    def logp(value: Any, *given: Any) -> Any:
        own = dict(zip(names, given, strict=False))
        of_row = pm.logp(drawn.distribution.dist(**own), value) if plain is None else plain(value, *own.values())
        return of_row if weights is None else given[count] * of_row

    given = values if weights is None else (*values, weights)
    signature = f"{signature}{'' if weights is None else ',()'}->()"
    known = drawn.name or drawn.distribution.rv_op.name
    kind = {"class_name": known if weights is None else f"weighted_{known}", "signature": signature}
    random = drawn.random
    if random is None:  # draws have no weight

        def dist(*given: Any) -> Any:
            return drawn.distribution.dist(**dict(zip(names, given[:count], strict=True)), size=given[-1])

        pm.CustomDist(name, *given, dist=dist, logp=logp, observed=observed, **kind)
    else:

        def draw(*given: Any, rng: Any = None, size: Any = None) -> Any:
            return random(*given[:count], rng=rng, size=size)

        pm.CustomDist(name, *given, logp=logp, random=draw, dtype=drawn.dtype, observed=observed, **kind)


# How outcomes are distributed, from the linear predictor, the family's own parameters and the client's arrays.
_DRAWN: Mapping[str, Likelihood] = {
    "gaussian": lambda eta, own, data, scales: Drawn(pm.Normal, {"mu": eta, "sigma": own["sigma"]}),
    "student": lambda eta, own, data, scales: Drawn(pm.StudentT, {"nu": own["nu"], "mu": eta, "sigma": own["sigma"]}),
    "bernoulli": lambda eta, own, data, scales: Drawn(pm.Bernoulli, {"logit_p": eta}),
    "binomial": lambda eta, own, data, scales: Drawn(pm.Binomial, {"n": data["trials"], "logit_p": eta}),
    "poisson": lambda eta, own, data, scales: Drawn(pm.Poisson, {"mu": pt.exp(eta)}),
    "negative": lambda eta, own, data, scales: Drawn(pm.NegativeBinomial, {"mu": pt.exp(eta), "alpha": own["alpha"]}),
    "gamma": lambda eta, own, data, scales: Drawn(
        pm.Gamma, {"alpha": own["alpha"], "beta": own["alpha"] * pt.exp(-eta)}
    ),
    "beta": lambda eta, own, data, scales: Drawn(pm.Beta, {"mu": pm.math.invlogit(eta), "nu": own["kappa"]}),
}


def _ordinal(eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any], scales: Scales) -> Drawn:
    given = {"eta": eta, "threshold": parameters["threshold"]}
    return Drawn(None, given, "(),(k)", _log_level, _draw_level, "ordered_logistic", "int64")


def _log_level(value: Any, eta: Any, cuts: Any) -> Any:
    """log(σ(b − η) − σ(a − η)) = log σ(b − η) + log σ(η − a) + log(1 − exp(a − b)), of a row's own thresholds a < b."""
    cuts = cuts.reshape((cuts.shape[-1],))  # equal for all rows
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


def _categorical(eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any], scales: Scales) -> Drawn:
    return Drawn(pm.Categorical, {"logit_p": pt.concatenate([pt.zeros_like(eta[:, :1]), eta], axis=1)}, "(k)")


def _linked(inverse: Callable[[Array], Any]) -> Mean:
    """The mean as a function of the linear predictor alone."""
    return lambda eta, parameters, scales, at: np.asarray(inverse(eta))


def _of_levels(eta: Array, parameters: Mapping[str, Array], scales: Scales, at: float | None) -> Array:
    reached = expit(parameters["threshold"] - eta[..., None])
    ends = [np.zeros((*reached.shape[:-1], 1)), reached, np.ones((*reached.shape[:-1], 1))]
    return np.diff(np.concatenate(ends, axis=-1), axis=-1)


def _softmax(eta: Array) -> Array:
    return np.asarray(softmax(np.concatenate([np.zeros((*eta.shape[:-1], 1)), eta], axis=-1), axis=-1))


_REST = "sd of what is left over"


def _sigma(scales: Scales) -> Mapping[str, Parameter]:
    return {"sigma": Parameter(Prior("HalfNormal", sigma=2.0 * scales.sd), _REST)}


def _sigma_and_nu(scales: Scales) -> Mapping[str, Parameter]:
    return {**_sigma(scales), "nu": Parameter(Prior("Gamma", alpha=2.0, beta=0.1), "degrees of freedom")}


def _precise(relative: float) -> Prior:
    """Prior of a precision: median 1 / `relative`, where predictors are ignored; one sd is a factor of 20."""
    return Prior("LogNormal", mu=-float(np.log(relative)), sigma=3.0)


def _alpha(scales: Scales, share: float = 1.0) -> Mapping[str, Parameter]:
    """1 / relative variance, of which a share is not Poisson's."""
    relative = (scales.sd / scales.mean) ** 2 if scales.mean > 0 else 1.0
    return {"alpha": Parameter(_precise(share * relative), "shape")}


def _alpha_of_counts(scales: Scales) -> Mapping[str, Parameter]:
    # Share of the variance beyond Poisson's; at least a quarter, since moments may be rounded.
    beyond = 1.0 - scales.mean / scales.sd**2 if scales.mean > 0 else 1.0
    return _alpha(scales, max(beyond, 0.25))


def _concentration(scales: Scales) -> Mapping[str, Parameter]:
    most = scales.mean * (1.0 - scales.mean)  # the variance of shares that are 0 or 1
    prior = _precise(1.0 / max(most / scales.sd**2 - 1.0, 0.01))
    return {"kappa": Parameter(prior, "concentration of shares")}


def _thresholds(scales: Scales) -> Mapping[str, Parameter]:
    count = len(scales.levels) - 1
    start = np.linspace(-1.5, 1.5, count) if count > 1 else np.zeros(count)
    ordered = pm.distributions.transforms.ordered
    prior = Prior("Normal", mu=0.0, sigma=2.5, shape=count, default_transform=ordered, initval=start)
    return {"threshold": Parameter(prior, "logits between levels, in order")}


# Of outcomes on the scale of the linear predictor.
_MOMENTS: tuple[Callable[[Scales], float], Callable[[Scales], float]] = (lambda own: own.mean, lambda own: own.sd)


def log_mean(scales: Scales) -> float:
    """Log of the outcome's mean, which may be 0 after rounding by sites."""
    return float(np.log(scales.mean if scales.mean > 0 else 1e-6))


def _logit_mean(scales: Scales) -> float:
    return float(logit(scales.mean)) if 0.0 < scales.mean < 1.0 else 0.0


# Times until an event: right-censored, or between two times -----------------------------------------------------------

# With the cumulative hazard H, a row's log density is log h(t) - H(t) for an event at t, -H(t) for none until t, and
# log(S(l) - S(u)) = -H(l) + log(1 - exp(-(H(u) - H(l)))) for one between l and u.

NEVER = 2.0**100  # stands for infinity, since inputs have to be finite
_NO_TIME = 2.0**-1000  # stands for 0


class _Hazard(NamedTuple):
    """A distribution of times with a linear predictor and shapes: densities in PyTensor, quantiles in NumPy.

    `log_within` is log(1 − exp(H(a) − H(b))) for an event until b without one until a; a distribution has its own where
    H underflows long before b.
    """

    log_hazard: Callable[..., Any]  # (t, eta, *shapes)
    cumulative: Callable[..., Any]  # (t, eta, *shapes)
    inverse: Callable[..., Array]  # (cumulative hazard, eta, *shapes): the time when it is reached
    reached: Callable[..., Array]  # (t, eta, *shapes): `cumulative` in NumPy
    log_within: Callable[..., Any] | None = None  # (a, b, eta, *shapes) for 0 < a < b


def _exponential_hazard(cuts: Sequence[float]) -> _Hazard:
    return _Hazard(
        lambda t, eta: -eta + pt.zeros_like(t),
        lambda t, eta: t * pt.exp(-eta),
        lambda total, eta: total * np.exp(eta),
        lambda t, eta: t * np.exp(-eta),
    )


def _weibull_hazard(cuts: Sequence[float]) -> _Hazard:
    return _Hazard(
        lambda t, eta, alpha: pt.log(alpha) + alpha * (pt.log(t) - eta) - pt.log(t),
        lambda t, eta, alpha: pt.exp(alpha * (pt.log(t) - eta)),
        lambda total, eta, alpha: np.exp(eta) * total ** (1 / alpha),
        lambda t, eta, alpha: np.exp(alpha * (np.log(t) - eta)),
    )


def _lognormal_hazard(cuts: Sequence[float]) -> _Hazard:
    def log_hazard(t: Any, eta: Any, sigma: Any) -> Any:
        z = (pt.log(t) - eta) / sigma
        return -0.5 * z**2 - 0.5 * np.log(2 * np.pi) - pt.log(sigma * t) + _minus_log_upper(z)

    def log_within(a: Any, b: Any, eta: Any, sigma: Any) -> Any:
        low, high = (pt.log(a) - eta) / sigma, (pt.log(b) - eta) / sigma
        # Below the median use the lower tail, which keeps its digits there.
        near, far = pt.switch(high < 0, -high, low), pt.switch(high < 0, -low, high)
        tail = _minus_log_upper(near)
        return pt.log(-pt.expm1(tail - _minus_log_upper(far))) - tail + _minus_log_upper(low)

    return _Hazard(
        log_hazard,
        lambda t, eta, sigma: _minus_log_upper((pt.log(t) - eta) / sigma),
        lambda total, eta, sigma: np.exp(eta - sigma * special.ndtri_exp(-total)),
        lambda t, eta, sigma: -special.log_ndtr(-(np.log(t) - eta) / sigma),
        log_within,
    )


def _minus_log_upper(z: Any) -> Any:
    """−log Φ(−z) by erfcx(a) = exp(a²) erfc(a) with a = |z| / √2, finite with its slope on both sides of 0."""
    above = z > 0
    a = pt.switch(above, z, -z) / np.sqrt(2)
    half = pt.erfcx(a) / 2
    return pt.switch(above, a**2 - pt.log(half), -pt.log1p(-half * pt.exp(-(a**2))))


def _loglogistic_hazard(cuts: Sequence[float]) -> _Hazard:
    def log_hazard(t: Any, eta: Any, alpha: Any) -> Any:
        z = alpha * (pt.log(t) - eta)
        return pt.log(alpha) - pt.log(t) - pt.softplus(-z)

    return _Hazard(
        log_hazard,
        lambda t, eta, alpha: pt.softplus(alpha * (pt.log(t) - eta)),
        lambda total, eta, alpha: np.exp(eta + (total + np.log(-np.expm1(-total))) / alpha),
        lambda t, eta, alpha: np.logaddexp(0.0, alpha * (np.log(t) - eta)),
    )


def _piecewise_hazard(cuts: Sequence[float]) -> _Hazard:
    starts, ends = np.array([0.0, *cuts]), np.array([*cuts, np.inf])

    def log_hazard(t: Any, eta: Any, piece: Any) -> Any:
        within = (t[..., None] > starts[1:]) & (t[..., None] <= ends[1:])
        return eta + (within * piece).sum(axis=-1)

    def cumulative(t: Any, eta: Any, piece: Any) -> Any:
        spent = pt.clip(t[..., None] - starts, 0.0, ends - starts)
        return pt.exp(eta) * (spent[..., 0] + (spent[..., 1:] * pt.exp(piece)).sum(axis=-1))

    def rates(eta: Array, piece: Array) -> Array:
        first = np.zeros((*np.shape(piece)[:-1], 1))
        return np.asarray(np.exp(np.asarray(eta)[..., None] + np.concatenate([first, piece], axis=-1)))

    def reached(t: Any, eta: Array, piece: Array) -> Array:
        spent = np.clip(np.asarray(t)[..., None] - starts, 0.0, ends - starts)
        return np.asarray(np.sum(rates(eta, piece) * spent, axis=-1))

    def inverse(total: Array, eta: Array, piece: Array) -> Array:
        rate = rates(eta, piece)
        at_starts = reached(starts, eta[..., None], piece[..., None, :])
        place = np.sum(total[..., None] > at_starts, axis=-1, keepdims=True).clip(1) - 1
        passed, rate = (np.take_along_axis(values, place, axis=-1)[..., 0] for values in (at_starts, rate))
        return np.asarray(starts[place[..., 0]] + (total - passed) / rate)

    return _Hazard(log_hazard, cumulative, inverse, reached)


def _of_times(name: str, hazard: Callable[[Sequence[float]], _Hazard], shapes: Parameters, link: Link) -> Family:
    def likelihood(eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any], scales: Scales) -> Drawn:
        kind, beside = hazard(scales.cuts), {"eta": eta, **parameters}
        signature = ",".join(["()", *("(k)" if scales.cuts else "()" for _ in parameters), "()"])
        if "upper" in data:
            beside |= {"lower": data["lower"], "upper": data["upper"]}
            logp, draw = functools.partial(_between, kind), functools.partial(_draw_between, kind)
            return Drawn(None, beside, f"{signature},()", logp, draw, "seen_between")
        logp, draw = functools.partial(_right, kind), functools.partial(_draw_right, kind)
        return Drawn(None, beside | {"limit": data["limit"]}, signature, logp, draw, "right_censored")

    def mean(eta: Array, parameters: Mapping[str, Array], scales: Scales, at: float | None) -> Array:
        kind = hazard(scales.cuts)
        if at is None:
            return kind.inverse(np.full(np.shape(eta), np.log(2.0)), eta, *parameters.values())
        return np.asarray(np.exp(-kind.reached(at, eta, *parameters.values())))

    return Family(name, likelihood, mean, TIME, link, shapes, log_mean, responses=("survival", "interval"))


def _right(kind: _Hazard, value: Any, eta: Any, *given: Any) -> Any:
    """Log density of an event before the row's limit, or of none until it."""
    *shapes, limit = given
    event = pt.switch(value < limit, kind.log_hazard(value, eta, *shapes), 0.0)
    return event - kind.cumulative(value, eta, *shapes)


def _between(kind: _Hazard, value: Any, eta: Any, *given: Any) -> Any:
    """Log density of an event between two times: the value is the last time without an event, or the exact time."""
    *shapes, lower, upper = given
    exact = pt.eq(lower, upper)
    end = pt.switch(value < lower, lower, pt.switch(value < upper, upper, NEVER))
    ends, starts = (end < NEVER) & ~exact, value > 0
    before = pt.switch(starts, kind.cumulative(pt.switch(starts, value, 1.0), eta, *shapes), 0.0)
    event = pt.switch(exact, kind.log_hazard(pt.switch(exact, value, 1.0), eta, *shapes), 0.0)
    if kind.log_within is not None:
        begin = pt.switch(starts, value, _NO_TIME)
        within = kind.log_within(begin, pt.switch(ends, end, 2.0 * begin), eta, *shapes)
    else:
        width = pt.switch(ends, kind.cumulative(pt.switch(ends, end, 1.0), eta, *shapes) - before, 1.0)
        within = pt.log(-pt.expm1(-width))
    return event + pt.switch(ends, within, 0.0) - before


def _times(kind: _Hazard, eta: Any, shapes: Sequence[Any], rng: Any, size: Any, *others: Any) -> Array:
    shape = size if size is not None else np.broadcast_shapes(*(np.shape(x) for x in (eta, *others)))
    return kind.inverse(rng.exponential(size=shape), np.broadcast_to(eta, shape), *shapes)


def _draw_right(kind: _Hazard, eta: Any, *given: Any, rng: Any = None, size: Any = None) -> Array:
    *shapes, limit = given
    return np.asarray(np.minimum(_times(kind, eta, shapes, rng, size, limit), limit))


def _draw_between(kind: _Hazard, eta: Any, *given: Any, rng: Any = None, size: Any = None) -> Array:
    *shapes, lower, upper = given
    time = _times(kind, eta, shapes, rng, size, lower)
    seen = np.where(time <= lower, 0.0, np.where(time <= upper, lower, upper))
    return np.where(lower == upper, time, seen)


def _shape_of_times(scales: Scales) -> Mapping[str, Parameter]:
    # 1 / alpha is exponential, so that times may be arbitrarily regular: the sd of censored times is unknown.
    return {"alpha": Parameter(Prior("InverseGamma", alpha=1.0, beta=1.0), "shape")}


def _sigma_of_times(scales: Scales) -> Mapping[str, Parameter]:
    return {"sigma": Parameter(Prior("HalfNormal", sigma=2.0), _REST)}


def _pieces(scales: Scales) -> Mapping[str, Parameter]:
    prior = Prior("Normal", mu=0.0, sigma=2.5, shape=max(len(scales.cuts), 1))
    return {"piece": Parameter(prior, "log hazard after a cut point, against that before the first")}


# All families ---------------------------------------------------------------------------------------------------------

_MEAN, _LOGIT, _RATE = Link("mean"), Link("logit", "odds ratio", "odds"), Link("log of the mean", "rate ratio", "rate")
_SIZE = Link("log of the mean", "ratio of means", "mean")
_SHARE = Link("logit", "odds ratio of the mean share", "odds of the mean share")
_ORDER = Link("logit", "odds ratio of a higher level", "odds")
_AGAINST = Link("logit against the reference", "odds ratio against {}", "odds against {}")
_MEAN_TIME = Link("log of the mean time", "time ratio", "mean time")
_MEDIAN_TIME = Link("log of the median time", "time ratio", "median time")
_SCALE = Link("log of the scale", "time ratio", "scale of time")
_HAZARD = Link("log of the hazard", "hazard ratio", "hazard")
FAMILIES: Mapping[str, Family] = {
    one.name: one
    for one in (
        Family("gaussian", _DRAWN["gaussian"], _linked(np.asarray), REAL, _MEAN, _sigma, *_MOMENTS),
        Family("student", _DRAWN["student"], _linked(np.asarray), REAL, _MEAN, _sigma_and_nu, *_MOMENTS),
        Family("bernoulli", _DRAWN["bernoulli"], _linked(expit), BINARY, _LOGIT),
        Family("binomial", _DRAWN["binomial"], _linked(expit), COUNT, _LOGIT, responses=("proportion",)),
        Family("poisson", _DRAWN["poisson"], _linked(np.exp), COUNT, _RATE, center=log_mean),
        Family("negativebinomial", _DRAWN["negative"], _linked(np.exp), COUNT, _RATE, _alpha_of_counts, log_mean),
        Family("gamma", _DRAWN["gamma"], _linked(np.exp), POSITIVE, _SIZE, _alpha, log_mean),
        Family("beta", _DRAWN["beta"], _linked(expit), UNIT, _SHARE, _concentration, _logit_mean),
        Family("ordinal", _ordinal, _of_levels, LEVEL, _ORDER, _thresholds, intercept=False, ordered=True),
        Family("categorical", _categorical, _linked(_softmax), LEVEL, _AGAINST, several=True),
        _of_times("exponential", _exponential_hazard, lambda scales: {}, _MEAN_TIME),
        _of_times("weibull", _weibull_hazard, _shape_of_times, _SCALE),
        _of_times("lognormal", _lognormal_hazard, _sigma_of_times, _MEDIAN_TIME),
        _of_times("loglogistic", _loglogistic_hazard, _shape_of_times, _MEDIAN_TIME),
        _of_times("piecewise", _piecewise_hazard, _pieces, _HAZARD)._replace(
            center=lambda scales: -log_mean(scales), has_cuts=True
        ),
    )
}


# Names in other packages.
_ALIASES = {"normal": "gaussian", "t": "student", "cumulative": "ordinal", "count": "poisson"}
_ALIASES |= dict.fromkeys(("logistic", "logit", "binary"), "bernoulli")
_ALIASES |= dict.fromkeys(("nbinom", "negbinomial", "negative_binomial"), "negativebinomial")


def family(name: str) -> Family:
    """The family with a name."""
    if not isinstance(name, str) or name not in FAMILIES:
        lower = name.casefold() if isinstance(name, str) else ""
        close = [_ALIASES[lower]] if lower in _ALIASES else get_close_matches(lower, FAMILIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DeclarationError(f"family={shown(name)} is not known; {hint}choose one of {sorted(FAMILIES)}.")
    return FAMILIES[name]
