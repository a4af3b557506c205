"""How short the sds of a Gaussian posterior may be: what clients' factors have in common that no Gaussian can follow.

A local inference reports how far its factor departs from a Gaussian along the coordinate where it does so most
(diagnostic ``departure``, in sds). Expectation propagation knows of each factor's own departure, and of none of what
they do together: where K factors depart alike by d_k, a variance exceeds that of q by about (Σ d_k)² (1 − 1/K).
"""

from __future__ import annotations

import numpy as np

from fedppl.results.fallbacks import Infos

_MENTIONED = 0.05
_MOST = 1e3
_COUNTED = 0.3  # beyond it the orders that are left out matter as much as the one that is not


def shortfall(infos: Infos) -> float:
    """The part of its sd by which a shared variable's may be too small, from every client's last diagnostics.

    >>> round(shortfall({"a": {"departure": 0.3}, "b": {"departure": 0.3}}), 3)
    0.079
    """
    told = [info["departure"] for info in infos.values() if "departure" in info]
    # A client's word: none takes from the others' sum, or makes it infinite.
    departures = np.clip(np.nan_to_num(told, nan=0.0), 0.0, _MOST)
    if len(departures) < 2:
        return 0.0
    together = float(np.sum(departures)) ** 2 * (1.0 - 1.0 / len(departures))
    return 1.0 - 1.0 / float(np.sqrt(1.0 + together))


def sentence(infos: Infos) -> str:
    """What to say of it in a fit's message; nothing where it is small."""
    short = shortfall(infos)
    if short < _MENTIONED:
        return ""
    how = f"about {100 * short:.0f} %" if short < _COUNTED else "much"
    return (
        f"sds of shared variables may be {how} too small: the posterior has heavier tails than a Gaussian, as means of "
        "few clients have; a first-order estimate, and too low where skewness is large. Widen intervals, or declare "
        "priors that say more"
    )
