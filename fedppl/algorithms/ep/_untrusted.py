"""Why a correction is not to be trusted, and what to do."""

from __future__ import annotations

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.ep.sites import Sites
from fedppl.numerics import pareto
from fedppl.numerics.region import Beyond
from fedppl.numerics.reweighting import FEWEST, MOST_ERROR, MOST_SECOND_K, Reweighted
from fedppl.types import as_declared

# As a call that helps whoever has NUTS already, too.
_BY_NUTS = "local=fedppl.NUTS(draws=4000)"


def without(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"the posterior may be wrong where clients {names[:5]} matter: they did not answer what the correction asks, "
        "and a Gaussian stands for each of them. The reasons are in fit.idata['rounds']: correct what they name, and "
        "fit again"
    )


def nowhere(names: list[str], radius: float | None, by: str) -> str:
    """No point has a value at all clients: within a radius that holds none, or since some answer none."""
    far = f" (site {by!r} answers within {radius:g} prior sds alone)" if radius is not None and by else ""
    if radius is not None:
        remedy = f"nothing lies within {radius:g} prior sds: allow a larger distance, or raise radius="
    elif names:
        remedy = f"clients {names[:5]} have no log density anywhere: look at their data, or use {_BY_NUTS}"
    else:
        remedy = f"use {_BY_NUTS}"
    return f"sds and tails are not known, since nothing could be corrected{far}: {remedy}"


def lost(share: float, most: float, hidden: float, names: list[str]) -> str:
    """Too many points are without a value, or those that are would move the posterior by `hidden`."""
    effect = "may be wrong" if share > most else f"may be off by {hidden:.2g} sds"
    where = f", at clients {names[:5]} above all" if names else ""
    return (
        f"means and sds {effect}: {share:.1%} of the places that the correction asks at (at most {most:.0%}) have no "
        f"log density{where}, or its integral over a client's own variables was not found. Declare the model so that "
        "it has a smooth density everywhere, with no bound of an outcome's support among the shared variables; or use "
        f"{_BY_NUTS}"
    )


def misleading(names: list[str], trust: float | None) -> str:
    if not names:
        return ""
    return (
        f"clients {names[:5]} disagree with the others: they would move the posterior by more than trust={trust:g} "
        "sds, and a Gaussian stands for each of them. Look at their data, and at those of the clients that they are "
        "held against, since of clients that disagree the one that says more moves it more"
    )


def beyond_q(found: Reweighted, sites: Sites, grown: float, points: int) -> str:
    """What q could not follow, and where; `grown` is what a log sd grew by from one exchange to the next.

    The first exchange had so many `points`.
    """
    sd = gaussian.standard_deviations(sites.q)
    shift = (found.mean - gaussian.mean(sites.q)) / sd
    wider = np.sqrt(np.diag(found.covariance)) / sd
    worst = int(np.argmax(np.maximum(np.abs(shift), np.abs(np.log(wider)))))
    name, most_k = as_declared(sites.labels[worst]), pareto.limit(found.told)
    short = [
        f"few points decide alone (Pareto k {found.pareto_k:.2f}, at most {most_k:.2f})"
        if not found.pareto_k <= most_k
        else "",
        f"tails are not reached (Pareto k {found.second_k:.2f}, at most {MOST_SECOND_K:g})"
        if not found.second_k <= MOST_SECOND_K
        else "",
        f"{found.ess:.0f} effective points (at least {FEWEST})" if not found.ess >= FEWEST else "",
        f"an error of {found.error:.2g} sds (at most {MOST_ERROR:g})" if not found.error <= MOST_ERROR else "",
        f"an sd that last grew by {np.expm1(grown):.0%}" if grown > MOST_ERROR else "",
    ]
    return (
        f"sds and tails are not known well enough, of {name} above all: its mean is {shift[worst]:+.2g} sds from EP's "
        f"Gaussian, and its sd {wider[worst]:.2g} times as large. Use "
        f"fedppl.EP(correction=fedppl.Correction(points={4 * points})), declare {name} on a scale where it is closer "
        f"to normal, or give it a prior that says more. Of {len(found.points)} points: "
        + ", ".join(filter(None, short))
    )


def uncertain(noise: float, moved: float) -> str:
    return (
        f"means and sds may be off by up to {moved:.2g} sds: clients' log densities are uncertain by {noise:.2g} in "
        "all, since their own variables are too far from normal given the shared ones. Declare them on a scale where "
        "they are closer to normal, and standardised, z = (θ − μ) / τ, where data say little and they have a location "
        "μ and a scale τ; integrate them out where that is known, as pm.BetaBinomial does with a pm.Beta; or use "
        f"{_BY_NUTS}"
    )


def beyond_radius(cut: Beyond, radius: float, by: str, sites: Sites) -> str:
    """How much lies where no point is answered, along what, and by whose rule."""
    worst = int(np.argmax(cut.effect.sum(axis=1)))
    side = "below" if cut.effect[worst, 0] > cut.effect[worst, 1] else "above"
    whose = (
        f"site {by!r} answers, by distance={radius:g} of its policy," if by else f"Correction(radius={radius:g}) asks"
    )
    return (
        f"up to {cut.mass[worst].max():.2g} of the posterior may lie where nobody was asked, {side} along "
        f"{as_declared(sites.labels[worst])}: {whose} within {radius:g} prior sds of the prior's mean alone. Allow a "
        "larger distance, or declare a prior that is wider, or centered where the data are"
    )
