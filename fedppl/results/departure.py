"""How short the sds of a Gaussian posterior may be: what clients' factors have in common that no Gaussian can follow.

A local inference reports how far its factor departs from a Gaussian along the coordinate where it does so most
(diagnostic ``departure``, in sds). Expectation propagation knows of each factor's own departure, and of none of what
they do together: where factors depart alike by d_k, a variance exceeds that of q by about (Σ d_k)² − Σ d_k².

That is the first term of a series, and about right where it is small and little is skewed. Of three to six hospitals
that differ little sds were a fifth too small, or a half, where it said 5 to 10 %, with a skewness of .4 to .7.
"""

from __future__ import annotations

import numpy as np

from fedppl.results.records import Infos
from fedppl.types import Status

_MENTIONED = 0.05
TRUSTED = 0.1  # a share beyond which the estimate is too low by an unknown factor
NOISY = 0.02  # the same where clients draw: noise ends EP early, with an sd in which factors depart less
SKEWED = 0.3  # skewness of a margin beyond which it is, too
CORRECTION = "fedppl.EP(correction=fedppl.Correction()), which sites answer where their policies allow it"
_MOST = 1e3
_UNKNOWN = "sds of shared variables may be far too small, by a half even"


def shortfall(infos: Infos) -> float:
    """The part of its sd by which a shared variable's may be too small, from every client's last diagnostics.

    >>> round(shortfall({"a": {"departure": 0.3}, "b": {"departure": 0.3}}), 3)
    0.079
    """
    told = [info["departure"] for info in infos.values() if "departure" in info]
    # A client's word: none takes from the others' sum, or makes it infinite.
    departures = np.clip(np.nan_to_num(told, nan=0.0), 0.0, _MOST)
    return of_variance(float(np.sum(departures) ** 2 - np.sum(departures**2)))


def of_variance(excess: float) -> float:
    """The part by which an sd is too small whose variance is too small by this share of itself."""
    return 1.0 - 1.0 / float(np.sqrt(1.0 + max(excess, 0.0)))


def sentence(short: float, remedy: str, trusted: float = TRUSTED) -> str:
    """What to say of it in a fit's message; nothing where it is small."""
    if short >= trusted:
        return unknown(remedy)
    if short < _MENTIONED:
        return ""
    return (
        f"sds of shared variables may be about {short:.0%} too small: the posterior has heavier tails than the "
        f"Gaussian of this fit, as means of few clients have. The posterior itself is that of {remedy}"
    )


def unknown(remedy: str) -> str:
    """What to say where more is missing than can be told."""
    return (
        f"{_UNKNOWN}: the posterior has heavier tails than the Gaussian of this fit, as means of few clients have, and "
        f"how much is missing cannot be told from that. Use {remedy}, or declare priors that say more"
    )


def matched(status: Status, message: str) -> bool:
    """Whether a fit has matched moments: it has converged, or is not called so for what its Gaussian lacks alone.

    >>> matched(Status.STALLED, unknown("fedppl.EP()")), matched(Status.STALLED, "no mode was found")
    (True, False)
    """
    return status.ok or message.startswith(_UNKNOWN)
