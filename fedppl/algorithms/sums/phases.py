"""What is known while the posterior is weighed, phase by phase, and how much is asked for."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.algorithms.sums.stages import Estimate, Unit
from fedppl.gaussian import Gaussian
from fedppl.numerics.proposals import Proposal
from fedppl.numerics.reweighting import Reweighted
from fedppl.numerics.surrogate import Drawn, Places
from fedppl.types import Array

MOST_SHOWN = 8192  # candidates of a scramble, the most that stand for all
_FAR = 20.0  # log units below the highest value, and one for each coordinate, from where a posterior has nothing


class Known(NamedTuple):
    """What Laplace's approximations of all clients leave out, at the points where it was asked for."""

    points: Array  # (T, m)
    left_out: Array  # (T,) log units; NaN where a client has no value
    errors: Array  # (T,) Σ_k errors, with their signs
    squares: Array  # (T,) Σ_k squared errors


class Batch(NamedTuple):
    """Points that are asked for."""

    phi: Array  # (S, m)
    u: Array  # (S, m) in the coordinates of the surrogate
    log_density: Array  # (S,) of the candidates
    log_surrogate: Array  # (S,) not normalised; NaN in the pilot
    times: Array  # (S,) how often each was drawn; 0 of those that have no weight
    scramble: NDArray[np.intp]


class About(NamedTuple):
    """What the posterior is about."""

    q: Gaussian  # of the mode, and in the end of the posterior's moments
    prior: Gaussian  # the Gaussian that stands for the prior at the server
    labels: tuple[str, ...]
    many: bool  # whether clients are so many that their sum hardly departs from a quadratic


class Told(NamedTuple):
    """Log densities at points so far, (N,); NaN where a client has no value."""

    points: Array  # (N, m)
    laplace: Array  # (N,) log of the posterior's kernel by Laplace's approximations
    values: Array  # (N,) the same with what these leave out
    known: Known
    constants: Array  # (2,)
    is_proper: bool


class Shape(NamedTuple):
    """Coordinates of surrogates, and moments in these."""

    folded: Places  # coordinates that are taken as scales
    outer: tuple[Proposal, ...]  # in the tails, where they are heavy
    unit: Unit  # of moments
    estimates: tuple[Estimate, ...]  # of the stages so far


class Sampled(NamedTuple):
    """Draws of a surrogate."""

    drawn: Drawn  # those that a batch was chosen from
    shown: Drawn  # more of them, always of one stream: they stand for all


class Rule(enum.IntEnum):
    """Where θ is integrated, since Laplace's approximation does not do."""

    AT_FEW = 0  # of the points; the others are foretold
    ROUGHLY = 1  # the same, with a cheap rule at all of them
    EVERYWHERE = 2


class Weighing(NamedTuple):
    """A batch of points is asked for."""

    about: About
    told: Told
    shape: Shape
    batch: Batch
    sampled: Sampled | None  # None in a pilot
    stage: int  # 0 is the pilot
    pilots: int  # how many more there were
    rule: int  # a `Rule`


class Weighed(NamedTuple):
    """The posterior, or what is known of it."""

    about: About
    told: Told
    shape: Shape
    found: Reweighted | None
    is_normal: bool  # q is the posterior
    trusted: bool
    log_integral_error: float


class Care(NamedTuple):
    """How much is asked for and computed."""

    wide: float  # part of a pilot that is of a wide t
    known: int  # points of an exchange, at least, at which what Laplace leaves out is asked for
    known_each: int  # the same for each coordinate and three more
    later: tuple[int, int]  # stage from which these are fewer, and how many times
    rough: float  # log units, median error with which it is foretold in a pilot at all others
    foretold: float  # the same in a stage
    within: float  # log units below the highest value, and one for each coordinate, from where it is foretold
    shown: int  # candidates of a scramble that stand for all
    probes: int  # draws of a surrogate, with most of its second moments, at which it is looked at
    # Residual, log units, of a surrogate that is as good as the posterior: weights have no tail, and to smooth it would
    # add more to moments than it takes.
    close: float


FEW = Care(0.5, 64, 6, (2, 3), 0.02, 0.02, _FAR, 1024, 32, -np.inf)
# Of many clients points lie close together, but in a pilot; what Laplace leaves out moves their posterior by many sds,
# so that it is foretold wherever it is; and next to values draws cost nothing.
MANY = Care(0.125, 0, 2, (1, 2), 0.2, 0.02, np.inf, MOST_SHOWN, 8, 0.1)


def care_of(state: Weighing) -> Care:
    """How much is asked for of so many clients."""
    return MANY if state.about.many else FEW
