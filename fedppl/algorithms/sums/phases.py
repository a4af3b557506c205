"""What is known while the posterior is weighed, phase by phase, and how many values each phase asks for."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.algorithms.sums.estimates import Estimate, Unit
from fedppl.gaussian import Gaussian
from fedppl.numerics import surrogate
from fedppl.numerics.proposals import Proposal
from fedppl.numerics.reweighting import Reweighted
from fedppl.numerics.surrogate import Drawn, Places
from fedppl.types import Array

MOST_DRAWS = 8192  # candidates of a scramble, the most that stand for the posterior
_FAR = 20.0  # log units below the highest value, and one for each coordinate, from where a posterior has no mass


class Integrated(NamedTuple):
    """Points at which θ was integrated, and what Laplace's approximation misses there, summed over clients."""

    points: Array  # (T, m)
    residuals: Array  # (T,) log units; NaN where a client has no value
    errors: Array  # (T,) Σ_k errors of the integrals, with their signs
    squares: Array  # (T,) Σ_k squared errors


class Batch(NamedTuple):
    """Points of one exchange."""

    phi: Array  # (S, m)
    u: Array  # (S, m) in the coordinates of the surrogate
    log_density: Array  # (S,) of the candidates
    log_surrogate: Array  # (S,) not normalised; NaN in the pilot
    times: Array  # (S,) how often each was drawn; 0 of probes, which have no weight
    scramble: NDArray[np.intp]


class About(NamedTuple):
    """The fit that the posterior belongs to."""

    q: Gaussian  # about the mode, and in the end with the posterior's moments
    prior: Gaussian  # the Gaussian that stands for the prior at the server
    labels: tuple[str, ...]
    many: bool  # whether clients are so many that their sum hardly departs from a quadratic


class Evaluated(NamedTuple):
    """Log densities of the posterior's kernel at all points so far, (N,); NaN where a client has no value."""

    points: Array  # (N, m)
    laplace: Array  # (N,) by Laplace's approximations of log f_k
    values: Array  # (N,) with what these miss
    integrated: Integrated
    constants: Array  # (2,) errors of log f_k that do not vary with φ: alike, and by chance
    is_proper: bool


class Shape(NamedTuple):
    """Coordinates of surrogates, and moments in these."""

    folded: Places  # coordinates that are scales themselves, not their logarithms
    outer: tuple[Proposal, ...]  # proposals in the tails, where they are heavy
    unit: Unit  # of moments
    estimates: tuple[Estimate, ...]  # of the stages so far


class Draws(NamedTuple):
    """Draws of a surrogate."""

    candidates: Drawn  # from which a batch was chosen
    posterior: Drawn  # more of them, always of one stream: they stand for the posterior


class Rule(enum.IntEnum):
    """Where θ is integrated, since Laplace's approximation is not exact enough."""

    AT_FEW = 0  # of the points; residuals at the others are predicted
    ROUGHLY = 1  # the same, with a cheap rule at all points
    EVERYWHERE = 2


class Weighing(NamedTuple):
    """A batch of points is asked for."""

    about: About
    evaluated: Evaluated
    shape: Shape
    batch: Batch
    draws: Draws | None  # None in a pilot
    stage: int  # 0 is the pilot
    pilots: int  # number of pilots before this one
    rule: int  # a `Rule`


class Weighed(NamedTuple):
    """The end: the posterior, or what is known of it."""

    about: About
    evaluated: Evaluated
    shape: Shape
    posterior: Reweighted | None
    is_normal: bool  # q is the posterior
    trusted: bool
    log_integral_error: float


class Judged(NamedTuple):
    """The outcome of a stage."""

    phase: Weighing | Weighed
    message: str


class Effort(NamedTuple):
    """How many values are asked for and computed."""

    wide: float  # share of a pilot's points that a wide t gives
    integrated: int  # points of an exchange, at least, at which θ is integrated
    integrated_each: int  # the same for each coordinate and three more
    later: tuple[int, int]  # stage from which these are fewer, and by which factor
    rough: float  # log units, median error with which residuals are predicted in a pilot
    predicted: float  # the same in a stage
    within: float  # log units below the highest value, and one for each coordinate, down to which they are predicted
    draws: int  # candidates of a scramble that stand for the posterior
    probes: int  # draws with most of the surrogate's second moments, at which it is checked
    # Residual, log units, of a surrogate that is as good as the posterior: weights have no tail, and smoothing would
    # move moments by more than it gains.
    close: float


FEW = Effort(0.5, 64, 6, (2, 3), 0.02, 0.02, _FAR, 1024, 32, -np.inf)
# The posterior of many clients is narrow, so that points of a stage lie close together. Residuals of Laplace's
# approximation move it by many sds, so that they are predicted at all points. Draws cost little.
MANY = Effort(0.125, 0, 2, (1, 2), 0.2, 0.02, np.inf, MOST_DRAWS, 8, 0.1)


def effort_of(state: Weighing) -> Effort:
    """How many values are asked for of so many clients."""
    return MANY if state.about.many else FEW


def values_of_batch(state: Weighing) -> Array:
    """Log densities, in the coordinates of the surrogate, of the batch that was evaluated last."""
    count = len(state.batch.phi)
    return np.asarray(state.evaluated.values[-count:] + surrogate.log_slope(state.batch.phi, state.shape.folded))
