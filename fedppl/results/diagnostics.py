"""What clients' diagnostics mean for a fit, in words: fallbacks of local inferences, and sds that are too small."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from fedppl.contracts.printed import FALLBACKS
from fedppl.types import Array, Status, as_declared

logger = logging.getLogger(__name__)

Infos = Mapping[str, Mapping[str, float]]  # diagnostics by name, by client


def listed(names: Iterable[str]) -> str:
    """Names on one line, the first five of many."""
    every = list(names)
    return ", ".join(every[:5]) + (f" and {len(every) - 5} others" if len(every) > 5 else "")


# Clients whose local inference fell back to another: ``fallback`` is 0, or the number of the step ---------------------

STANDARDISED = "standardised: mu + tau * z or mu + chol @ z with z ~ N(0, 1), in place of N(mu, tau) or pm.MvNormal"


def fallbacks(infos: Infos) -> dict[str, str]:
    """The local inference that each client fell back to, for those that did."""
    steps = {client_id: info.get("fallback", 0.0) for client_id, info in infos.items()}
    return {client_id: FALLBACKS.get(step, f"step {step:g}") for client_id, step in steps.items() if step > 0}


def fallback_note(infos: Infos) -> str:
    """A few words for a progress bar."""
    return ", ".join(f"{len(clients)} on {step}" for step, clients in _by_step(infos).items())


def fallback_sentence(infos: Infos, count: int) -> str:
    """Which of `count` clients fell back, for a fit's message; empty where none did.

    >>> fallback_sentence({"a": {"fallback": 2.0}, "b": {"fallback": 0.0}}, 2).partition(" in place")[0]
    '1 of 2 clients used NUTS'
    """
    parts = [f"{len(clients)} of {count} clients used {step}" for step, clients in _by_step(infos).items()]
    if not parts:
        return ""
    clients = fallbacks(infos)
    faster = f". It is faster with what is local declared {STANDARDISED}" if FALLBACKS[2.0] in clients.values() else ""
    used = f"{' and '.join(parts)} in place of the local inference when last asked ({_cost(infos, clients)})"
    return f"{used}: see fit.idata['rounds']['fallback']{faster}"


def unchecked_laplace(infos: Infos) -> str:
    """Clients whose local variables were integrated by Laplace's approximation alone, for a fit's message.

    >>> unchecked_laplace({"a": {"inner_trust": 0.0}, "b": {"inner_trust": 1.0}}).partition(":")[0]
    "the error of Laplace's approximation over local variables is not known at 1 of 2 clients (a)"
    """
    clients = [client_id for client_id, info in infos.items() if info.get("inner_trust", 1.0) < 1.0]
    if not clients:
        return ""
    where = f"not known at {len(clients)} of {len(infos)} clients ({listed(clients)})"
    remedy = "with few rows it can bias scales; compare with EP(local=fedppl.local.NUTS())"
    return f"the error of Laplace's approximation over local variables is {where}: {remedy}"


def log_fallbacks(number: int, infos: Infos, before: Mapping[str, str]) -> None:
    """One line a round: a warning for clients that are new to NUTS, which takes long, information for others."""
    clients = fallbacks(infos)
    if not clients:
        return
    told = "; ".join(f"{step} at {_cost(infos, names)}" for step, names in _by_step(infos).items())
    is_new = any(step not in (FALLBACKS[1.0], before.get(client_id)) for client_id, step in clients.items())
    level, extra = logging.WARNING if is_new else logging.INFO, {"status": "fallback", "clients": len(clients)}
    logger.log(level, "round %d: in place of the local inference, %s", number, told, extra={"round": number, **extra})


def _cost(infos: Infos, clients: Collection[str]) -> str:
    """Names of clients, and the seconds that they took."""
    seconds = sum(infos[client_id].get("fallback_seconds", 0.0) for client_id in clients)
    return listed(clients) + (f", {seconds:.3g} s" if seconds > 0 else "")


def _by_step(infos: Infos) -> dict[str, list[str]]:
    steps: dict[str, list[str]] = {}
    for client_id, step in fallbacks(infos).items():
        steps.setdefault(step, []).append(client_id)
    return steps


# How much too small sds of a Gaussian posterior may be, from what clients' factors have in common --------------------

# A local inference reports how far its factor departs from a Gaussian along the coordinate where it does so most
# (diagnostic ``departure``, in sds). EP accounts for each factor's own departure, and not for their joint effect: where
# factors depart alike by d_k, a variance exceeds that of q by about (Σ d_k)² − Σ d_k². That is the first term of a
# series, about right where it is small and little is skewed. Of three to six hospitals that differ little, sds were a
# fifth to a half too small where it gave 5 to 10 %, with a skewness of .4 to .7.

_MENTIONED = 0.05
TRUSTED = 0.1  # a share beyond which the estimate is too low by an unknown factor
NOISY = 0.02  # the same where clients draw: noise ends EP early, with an sd in which factors depart less
SKEWED = 0.3  # skewness of a margin beyond which the estimate is too low
_LARGEST = 1e3
_UNKNOWN = "sds of shared variables may be far too small, by a half even"
_TAILS = "the posterior has heavier tails than the Gaussian of this fit, as means of few clients have"


def exact(*, at_sites: bool) -> str:
    """The call that has the posterior itself."""
    return "fedppl.Sums()" + (", for which sites' policies have to allow points=" if at_sites else "")


def shortfall(infos: Infos) -> float:
    """The share of its sd by which a shared variable's may be too small, from every client's last diagnostics.

    >>> round(shortfall({"a": {"departure": 0.3}, "b": {"departure": 0.3}}), 3)
    0.079
    """
    reported = [info["departure"] for info in infos.values() if "departure" in info]
    # Clients may report any number: none takes from the others' sum, or makes it infinite.
    departures = np.clip(np.nan_to_num(reported, nan=0.0), 0.0, _LARGEST)
    excess = float(np.sum(departures) ** 2 - np.sum(departures**2))  # of the variance, as a share
    return 1.0 - 1.0 / float(np.sqrt(1.0 + max(excess, 0.0)))


def shortfall_sentence(short: float, remedy: str, trusted: float = TRUSTED) -> str:
    """The sentence on a shortfall in a fit's message; empty where it is small."""
    if short >= trusted:
        return unknown_shortfall(remedy)
    if short < _MENTIONED:
        return ""
    return f"sds of shared variables may be about {short:.0%} too small: {_TAILS}. For the posterior use {remedy}"


def unknown_shortfall(remedy: str) -> str:
    """The sentence on a shortfall that is larger than can be estimated."""
    return f"{_UNKNOWN}: {_TAILS}. Use {remedy}, or declare priors that say more"


def matched(status: Status, message: str) -> bool:
    """Whether a fit has matched moments: it has converged, or stalled for the shortfall of its Gaussian alone.

    >>> matched(Status.STALLED, unknown_shortfall("fedppl.EP()")), matched(Status.STALLED, "no mode was found")
    (True, False)
    """
    return status.ok or message.startswith(_UNKNOWN)


_FLAT = 30.0  # sd of a prior on a log scale, from e^-30 to e^30, from which it is hardly a prior


def hardly_a_prior(labels: Sequence[str], spread: Array) -> str:
    """Priors with these sds (m,) on positive variables that are all but improper; empty where there are none."""
    flat = [j for j, label in enumerate(labels) if "_log__" in label and spread[j] > _FLAT]
    if not flat:
        return ""
    named = ", ".join(f"{as_declared(labels[j])} (sd {spread[j]:.2g} on the log scale)" for j in flat[:3])
    why = "all but improper, and the search begins where it has its mass, far from any data"
    return f"the prior of {named} is {why}: use pm.HalfNormal, pm.Exponential or pm.Gamma(2, ...)"
