"""What EP knows between rounds, and what it says of one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl.algorithms.ep._correction import Correcting
from fedppl.algorithms.ep._moves import Moves
from fedppl.algorithms.ep.sites import Sites
from fedppl.algorithms.ep.starts import Starts
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.contracts import Report
from fedppl.types import Array, Status

_VERY_SKEWED = 1.0  # a warning; below it, a word for those who look


class EPState(NamedTuple):
    """What the next round needs. Invariant: sites.q = prior x Π_k site_k."""

    sites: Sites
    warm_start: WarmStart | None  # None once refinement has begun
    starts: Starts | None  # where several searches were asked for
    prior_share: float  # 1 / K when the prior is not Gaussian: each factor's share of p / N_0
    damping: float
    change: float  # of the last round
    averaging: int  # rounds averaged since the change came down to Monte Carlo error
    has_replied: Array  # (K,) bool: in the current sweep
    sweep_change: float  # of the current sweep over all clients
    last_change: Array  # (m,) of the last round, in posterior sds: what a mean or a log sd moved by, before damping
    skewness: Array  # (m,) that the factors give the posterior's margins, and q cannot have
    skewed_by: Array  # (m,) row of the client without whom it is least
    skewness_without: Array  # (m,) what it is without that client
    held: Array  # (K,) share of its site that is not what it asked for, since trust binds
    held_back: Array  # (K,) rounds in which its site was drawn in
    pull: Array  # (K, m) where trust is set: what it would have pulled means by, in sds of its cavity; 0 where unknown
    errors: Array  # (K,) Monte Carlo error of the client's last reply, in posterior sds
    noise: Array  # (K,) variance that the errors of all its replies have left in its site, in the same unit
    moves: Moves  # what the server sees itself, since averaging began
    heading: Array  # (2 m,) where the last round moved means and log sds, in posterior sds before damping
    unseen: Array  # (K,) bool: nobody here can look at its rows
    corrects: bool  # whether q is put right once moments are matched
    stream: int  # of the points of the correction
    correction: Correcting | None  # once moments are matched, where one was asked for
    falls: int  # rounds in which the change fell since the damping was last lowered


class EPInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    change_mean: float  # largest |Δ mean| in posterior sds, before damping
    change_sd: float  # largest |Δ log sd|, before damping
    damping: float
    log_posterior: float  # log marginal posterior at the point, warm start only
    mc_error: float  # Monte Carlo error of the global mean in posterior sds
    skewness: float  # largest |skewness| that the factors give a margin of the posterior
    held_back: int = 0  # clients whose sites were drawn in, where trust is set
    pull: float = np.nan  # most that one client would have pulled a mean by, in sds of its cavity
    pulled_by: str = ""  # that client
    correction_ess: float = np.nan  # of the points of the correction, once an exchange is over
    correction_pareto_k: float = np.nan


class Taken(NamedTuple):
    """A round that the server has taken in: the state after it, and how that stands."""

    state: EPState
    info: EPInfo
    status: Status = Status.RUNNING
    message: str | None = None
    skewed: str = ""  # what of it a correction makes up for


def reported(taken: Taken) -> tuple[EPState, Report]:
    """The state and the report; what is said of a converged fit is mild where little is skewed and nobody held back."""
    state = taken.state
    corrected = state.correction is not None and state.correction.trusted
    mild = bool((corrected or np.abs(state.skewness).max() < _VERY_SKEWED) and not np.any(state.held))
    message = "; ".join(filter(None, (taken.message, taken.skewed))) if taken.skewed else taken.message
    return state, Report(taken.info, taken.status, message, mild)
