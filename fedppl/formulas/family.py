"""What a family of outcomes is, and how its likelihood stands in a PyMC model, with weights or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm

from fedppl.formulas.priors import Prior
from fedppl.types import Array


class Scales(NamedTuple):
    """What is known of the outcome before the fit."""

    mean: float
    sd: float
    levels: tuple[str, ...]
    cuts: tuple[float, ...] = ()  # of time, where all clients know some


def log_mean(scales: Scales) -> float:
    """Log of the outcome's mean, however small; that of sites that round it may be 0."""
    return float(np.log(scales.mean if scales.mean > 0 else 1e-6))


def relative_variance(scales: Scales) -> float:
    """Variance of the outcome in squares of its mean."""
    return (scales.sd / scales.mean) ** 2 if scales.mean > 0 else 1.0


class Drawn(NamedTuple):
    """A distribution of PyMC, or one of our own where it has a `logp`."""

    distribution: Any
    parameters: Mapping[str, Any]
    signature: str = ""  # of the parameters, where some are no scalars: "(k),()"
    logp: Callable[..., Any] | None = None
    random: Callable[..., Any] | None = None
    name: str = ""  # of one of our own, by which what is observed is told apart
    dtype: str = "floatX"  # of one of our own


Likelihood = Callable[[Any, Mapping[str, Any], Mapping[str, Any], Scales], Drawn]


class Family(NamedTuple):
    """A family of outcomes."""

    name: str  # how users call it
    likelihood: Likelihood  # ``likelihood(eta, parameters, data, scales)``: how outcomes are distributed
    # ``mean(eta, parameters, scales, at)`` in NumPy: what outcomes are on average, (..., levels of an outcome); of
    # times their median, or the probability that they are beyond `at`
    mean: Callable[[Array, Mapping[str, Array], Scales, float | None], Array]
    outcome: str  # kind of numbers that outcomes are: "real", "positive", "unit", "binary", "count", "level" or "time"
    # priors of its other shared parameters, by name, from `Scales`
    parameters: Callable[[Scales], Mapping[str, Prior]] = lambda scales: {}
    # mean of the linear predictor that an intercept is expected near, from `Scales`
    center: Callable[[Scales], float] = lambda scales: 0.0
    # size of the linear predictor's changes that are expected, from `Scales`
    unit: Callable[[Scales], float] = lambda scales: 1.0
    responses: tuple[str, ...] = ("plain",)  # kinds of response that a formula may have
    link: str = "identity"  # name of the function that the linear predictor is of the mean, or of what stands for it
    intercept: bool = True  # whether there may be one
    several: bool = False  # whether every level of the outcome but the first has a linear predictor of its own


def declare(name: str, drawn: Drawn, observed: Any, weights: Any = None) -> None:
    """The outcome, in the model that is open; a row of weight w counts as w such rows."""
    values, plain = tuple(drawn.parameters.values()), drawn.logp
    if plain is None and weights is None:
        drawn.distribution(name, **drawn.parameters, observed=observed)
        return
    names, count = tuple(drawn.parameters), len(values)
    signature = drawn.signature or ",".join(["()"] * count)

    def logp(value: Any, *given: Any) -> Any:
        of_row = (
            pm.logp(drawn.distribution.dist(**dict(zip(names, given, strict=False))), value)
            if plain is None
            else plain(value, *given[:count])
        )
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
