r"""Families of times until an event: right-censored, or known to lie between two times.

A row's log density is :math:`\log h(t) - H(t)` of an event at t, :math:`-H(t)` of none until t, and
:math:`\log(S(l) - S(u)) = -H(l) + \log(1 - e^{-(H(u) - H(l))})` of one between l and u, H being the cumulative hazard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from scipy import special

from fedppl.formulas.family import Drawn, Family, Scales, log_mean
from fedppl.formulas.priors import Prior
from fedppl.types import Array

NEVER = 2.0**100  # a time that nothing is beyond: new inputs have to be finite
_NO_TIME = 2.0**-1000  # before anything


class _Hazard(NamedTuple):
    """A distribution of times, of a linear predictor and shapes: in PyTensor, and what is drawn and read in NumPy.

    `log_within` is log(1 − exp(H(a) − H(b))), of an event until b where there was none until a; where H is nothing to
    all digits long before b, a distribution has one of its own.
    """

    log_hazard: Callable[..., Any]  # (t, eta, *shapes)
    cumulative: Callable[..., Any]  # (t, eta, *shapes)
    inverse: Callable[..., Array]  # (cumulative hazard, eta, *shapes), the time when it is reached
    reached: Callable[..., Array]  # (t, eta, *shapes), the same in NumPy
    log_within: Callable[..., Any] | None = None  # (a, b, eta, *shapes) for 0 < a < b


def _exponential(cuts: Sequence[float]) -> _Hazard:
    return _Hazard(
        lambda t, eta: -eta + pt.zeros_like(t),
        lambda t, eta: t * pt.exp(-eta),
        lambda total, eta: total * np.exp(eta),
        lambda t, eta: t * np.exp(-eta),
    )


def _weibull(cuts: Sequence[float]) -> _Hazard:
    return _Hazard(
        lambda t, eta, alpha: pt.log(alpha) + alpha * (pt.log(t) - eta) - pt.log(t),
        lambda t, eta, alpha: pt.exp(alpha * (pt.log(t) - eta)),
        lambda total, eta, alpha: np.exp(eta) * total ** (1 / alpha),
        lambda t, eta, alpha: np.exp(alpha * (np.log(t) - eta)),
    )


def _lognormal(cuts: Sequence[float]) -> _Hazard:
    def log_hazard(t: Any, eta: Any, sigma: Any) -> Any:
        z = (pt.log(t) - eta) / sigma
        return -0.5 * z**2 - 0.5 * np.log(2 * np.pi) - pt.log(sigma * t) + _minus_log_upper(z)

    def log_within(a: Any, b: Any, eta: Any, sigma: Any) -> Any:
        low, high = (pt.log(a) - eta) / sigma, (pt.log(b) - eta) / sigma
        # Below the median by the tail below, which has digits where that above has none.
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
    """−log Φ(−z), by erfcx(a) = exp(a²) erfc(a) of a = |z| / √2: finite with its slope on both sides of 0."""
    above = z > 0
    a = pt.switch(above, z, -z) / np.sqrt(2)
    half = pt.erfcx(a) / 2
    return pt.switch(above, a**2 - pt.log(half), -pt.log1p(-half * pt.exp(-(a**2))))


def _loglogistic(cuts: Sequence[float]) -> _Hazard:
    def log_hazard(t: Any, eta: Any, alpha: Any) -> Any:
        z = alpha * (pt.log(t) - eta)
        return pt.log(alpha) - pt.log(t) - pt.softplus(-z)

    return _Hazard(
        log_hazard,
        lambda t, eta, alpha: pt.softplus(alpha * (pt.log(t) - eta)),
        lambda total, eta, alpha: np.exp(eta + (total + np.log(-np.expm1(-total))) / alpha),
        lambda t, eta, alpha: np.logaddexp(0.0, alpha * (np.log(t) - eta)),
    )


def _piecewise(cuts: Sequence[float]) -> _Hazard:
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


def _family(
    name: str,
    hazard: Callable[[Sequence[float]], _Hazard],
    shapes: Callable[[Scales], Mapping[str, Prior]],
    sign: float,
    link: str,
) -> Family:
    def likelihood(eta: Any, parameters: Mapping[str, Any], data: Mapping[str, Any], scales: Scales) -> Drawn:
        kind = hazard(scales.cuts)
        beside = {"eta": eta, **parameters}
        signature = ",".join(["()", *("(k)" if scales.cuts else "()" for _ in parameters), "()"])
        if "upper" in data:
            edges = {"lower": data["lower"], "upper": data["upper"]}
            return Drawn(None, beside | edges, f"{signature},()", _between(kind), _draw_between(kind), "seen_between")
        return Drawn(
            None, beside | {"limit": data["limit"]}, signature, _right(kind), _draw_right(kind), "right_censored"
        )

    def mean(eta: Array, parameters: Mapping[str, Array], scales: Scales, at: float | None) -> Array:
        kind = hazard(scales.cuts)
        if at is None:
            return kind.inverse(np.full(np.shape(eta), np.log(2.0)), eta, *parameters.values())
        return np.asarray(np.exp(-kind.reached(at, eta, *parameters.values())))

    def center(scales: Scales) -> float:
        return sign * log_mean(scales)

    return Family(name, likelihood, mean, "time", shapes, center, responses=("survival", "interval"), link=link)


def _right(kind: _Hazard) -> Callable[..., Any]:
    """Events before the row's limit, and none before it."""

    def logp(value: Any, eta: Any, *given: Any) -> Any:
        *shapes, limit = given
        event = pt.switch(value < limit, kind.log_hazard(value, eta, *shapes), 0.0)
        return event - kind.cumulative(value, eta, *shapes)

    return logp


def _between(kind: _Hazard) -> Callable[..., Any]:
    """Events that are seen at two times: the value is the last one when there was none yet, or the exact time."""

    def logp(value: Any, eta: Any, *given: Any) -> Any:
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

    return logp


def _times(kind: _Hazard, eta: Any, shapes: Sequence[Any], rng: Any, size: Any, *others: Any) -> Array:
    shape = size if size is not None else np.broadcast_shapes(*(np.shape(x) for x in (eta, *others)))
    return kind.inverse(rng.exponential(size=shape), np.broadcast_to(eta, shape), *shapes)


def _draw_right(kind: _Hazard) -> Callable[..., Array]:
    def random(eta: Any, *given: Any, rng: Any = None, size: Any = None) -> Array:
        *shapes, limit = given
        return np.asarray(np.minimum(_times(kind, eta, shapes, rng, size, limit), limit))

    return random


def _draw_between(kind: _Hazard) -> Callable[..., Array]:
    def random(eta: Any, *given: Any, rng: Any = None, size: Any = None) -> Array:
        *shapes, lower, upper = given
        time = _times(kind, eta, shapes, rng, size, lower)
        seen = np.where(time <= lower, 0.0, np.where(time <= upper, lower, upper))
        return np.where(lower == upper, time, seen)

    return random


def _alpha(scales: Scales) -> Mapping[str, Prior]:
    # 1 / alpha is exponential: times may be as regular as they like. Of censored ones no sd of theirs is known.
    return {"alpha": Prior("InverseGamma", alpha=1.0, beta=1.0)}


def _sigma(scales: Scales) -> Mapping[str, Prior]:
    return {"sigma": Prior("HalfNormal", sigma=2.0)}


def _pieces(scales: Scales) -> Mapping[str, Prior]:
    return {"piece": Prior("Normal", mu=0.0, sigma=2.5, shape=max(len(scales.cuts), 1))}


SURVIVAL = (
    _family("exponential", _exponential, lambda scales: {}, 1.0, "log of the mean time"),
    _family("weibull", _weibull, _alpha, 1.0, "log of the scale"),
    _family("lognormal", _lognormal, _sigma, 1.0, "log of the median time"),
    _family("loglogistic", _loglogistic, _alpha, 1.0, "log of the median time"),
    _family("piecewise", _piecewise, _pieces, -1.0, "log of the hazard"),
)
