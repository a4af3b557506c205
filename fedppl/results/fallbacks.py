"""Which clients fell back to another local inference than the one that was asked for: said in words.

A local inference says so with its diagnostic ``fallback``: 0, or the number of the step that it went to. What else it
knows of that, such as ``fallback_seconds``, is shown beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

logger = logging.getLogger(__name__)

Infos = Mapping[str, Mapping[str, float]]  # diagnostics by name, by client

# What earlier fallbacks took is said from so many seconds on, and from this part of a fit's time.
_NOTABLE_SECONDS, _NOTABLE_PART = 1.0, 0.1

STANDARDISED = (
    "standardised, where it is centred on shared variables: z ~ N(0, 1) and mu + tau * z in place of N(mu, tau), "
    "mu + chol @ z in place of pm.MvNormal(mu, chol=chol)"
)
_STEPS = {1.0: "a fitted t", 2.0: "NUTS"}


def fallen(infos: Infos) -> dict[str, str]:
    """What each client fell back to, for those that did."""
    steps = {client_id: info.get("fallback", 0.0) for client_id, info in infos.items()}
    return {client_id: _STEPS.get(step, f"step {step:g}") for client_id, step in steps.items() if step > 0}


def last_infos(infos: Iterable[Infos]) -> dict[str, Mapping[str, float]]:
    """The last diagnostics of every client, from those of all rounds in order."""
    return {client_id: info for one in infos for client_id, info in one.items()}


def added(last: Infos, infos: Infos, *, closing: bool) -> dict[str, Mapping[str, float]]:
    """The last diagnostics of every client after one more round.

    What a round at the end of a run asks stands beside what clients said of their moments; that the posterior is no
    Gaussian is made up for there, and what Laplace leaves out is looked into: ``departure`` and ``inner_trust`` count
    no more.
    """
    if not closing:
        return {**last, **infos}
    before = {
        k: {name: value for name, value in info.items() if name not in ("departure", "inner_trust")}
        for k, info in last.items()
    }
    return {**last, **{k: {**before.get(k, {}), **info} for k, info in infos.items()}}


def note(infos: Infos) -> str:
    """A few words for a progress bar.

    >>> note({"a": {"fallback": 2.0}, "b": {"fallback": 0.0}})
    '1 on NUTS'
    """
    return ", ".join(f"{len(clients)} on {step}" for step, clients in _by_step(infos).items())


def sentence(infos: Infos, count: int) -> str:
    """Who of `count` clients fell back, for a fit's message; empty where nobody did.

    >>> sentence({"a": {"fallback": 2.0}, "b": {"fallback": 0.0}}, 2).partition(" in place")[0]
    '1 of 2 clients used NUTS'
    """
    parts = [f"{len(clients)} of {count} clients used {step}" for step, clients in _by_step(infos).items()]
    if not parts:
        return ""
    seconds = sum(infos[client_id].get("fallback_seconds", 0.0) for client_id in fallen(infos))
    cost = f", {seconds:.3g} s" if seconds > 0 else ""
    sampled = _STEPS[2.0] in fallen(infos).values()
    slow = f". It is faster with what is local declared {STANDARDISED}" if sampled else ""
    return (
        f"{' and '.join(parts)} in place of the local inference when last asked ({listed(fallen(infos))}{cost}): "
        f"see fit.idata['rounds']['fallback']{slow}"
    )


def earlier(infos: Iterable[Infos], seconds: float) -> str:
    """What fallbacks took before every client's last answer, for a fit's message; empty where that is little.

    `seconds` are those of all rounds.

    >>> earlier([{"a": {"fallback": 2.0, "fallback_seconds": 30.0}}, {"a": {"fallback": 0.0}}], 40.0).partition(":")[0]
    'fallbacks in earlier rounds took 30 s (a)'
    """
    every = list(infos)
    last, spent = last_infos(every), dict[str, float]()
    for one in every:
        for client_id in fallen(one):
            if one[client_id] is not last[client_id]:
                spent[client_id] = spent.get(client_id, 0.0) + one[client_id].get("fallback_seconds", 0.0)
    total = sum(spent.values())
    if total < max(_NOTABLE_SECONDS, _NOTABLE_PART * seconds):
        return ""
    worst = sorted(spent, key=lambda client_id: -spent[client_id])
    return (
        f"fallbacks in earlier rounds took {total:.3g} s ({listed(worst)}): see "
        f"fit.idata['rounds']['fallback_seconds'], and declare what is local {STANDARDISED}"
    )


def unchecked(infos: Infos) -> str:
    """Whose local variables were integrated by Laplace's approximation alone, for a fit's message.

    >>> unchecked({"a": {"inner_trust": 0.0}, "b": {"inner_trust": 1.0}}).partition(":")[0]
    "what Laplace's approximation over local variables leaves out is not known at 1 of 2 clients (a)"
    """
    there = {client_id: "" for client_id, info in infos.items() if info.get("inner_trust", 1.0) < 1.0}
    if not there:
        return ""
    return (
        "what Laplace's approximation over local variables leaves out is not known at "
        f"{len(there)} of {len(infos)} clients ({listed(there)}): it can bias scales where their rows are few and not "
        "normal. Compare with EP(local=fedppl.NUTS())"
    )


def log(number: int, infos: Infos, known: Mapping[str, str]) -> None:
    """One line a round: a warning for clients that are new to NUTS, which takes long, information for others."""
    now = fallen(infos)
    if not now:
        return
    parts = []
    for step, clients in _by_step(infos).items():
        few = [f"{client_id}{_why(infos[client_id])}" for client_id in clients[:5]]
        more = [f"{len(clients) - 5} others"] if len(clients) > 5 else []
        parts.append(f"{step} at {', '.join([*few, *more])}")
    logger.log(
        logging.WARNING
        if any(step not in (_STEPS[1.0], known.get(client_id)) for client_id, step in now.items())
        else logging.INFO,
        "round %d: in place of the local inference, %s",
        number,
        "; ".join(parts),
        extra={"round": number, "status": "fallback", "clients": len(now)},
    )


def listed(names: Iterable[str]) -> str:
    """Names on one line, the first five of many."""
    every = list(names)
    return ", ".join(every[:5]) + (f" and {len(every) - 5} others" if len(every) > 5 else "")


def _by_step(infos: Infos) -> dict[str, list[str]]:
    steps: dict[str, list[str]] = {}
    for client_id, step in fallen(infos).items():
        steps.setdefault(step, []).append(client_id)
    return steps


def _why(info: Mapping[str, float]) -> str:
    """What the client told of its fallback."""
    told = {name.removeprefix("fallback_"): value for name, value in info.items() if name.startswith("fallback_")}
    return f" ({', '.join(f'{name} {value:.3g}' for name, value in told.items())})" if told else ""
