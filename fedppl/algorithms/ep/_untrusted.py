"""Why a correction is not to be trusted, and what to do."""

from __future__ import annotations

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.ep.sites import Sites
from fedppl.numerics import pareto
from fedppl.numerics.region import Beyond
from fedppl.numerics.reweighting import FEWEST, MOST_ERROR, MOST_SECOND_K, Reweighted


def without(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"clients {names[:5]} did not answer at the points of the correction, and their Gaussian sites stand for them; "
        "the reasons are in fit.idata['rounds']. Correct what they name: without a correction nothing would show it, "
        "and q may be wrong"
    )


def nowhere(names: list[str], radius: float | None, by: str) -> str:
    """No point has a value at all clients: within a radius that holds none, or since some answer none."""
    far = f" (asked within {radius:g} prior sds, as site {by!r} answers)" if radius is not None and by else ""
    if radius is not None:
        remedy = f"no point lies within {radius:g} prior sds: allow a larger distance, or raise radius="
    elif names:
        remedy = f"clients {names[:5]} have none at all; use local=fedppl.NUTS(), or look at their data"
    else:
        remedy = "use local=fedppl.NUTS()"
    return f"no point of the correction has a value at every client{far}: {remedy}"


def lost(share: float, most: float, hidden: float, names: list[str]) -> str:
    """Too many points are without a value, or those that are would move the posterior by `hidden`."""
    effect = "" if share > most else f", and they may move a mean or a log sd by {hidden:.2g} sds"
    where = f", at clients {names[:5]} above all" if names else ""
    return (
        f"{share:.1%} of the points of the correction are without a value (at most {most:.0%}){effect}{where}: log f_k "
        "is no number there, or its integral over local variables was not found. Declare the model so that it has a "
        "smooth density everywhere, with no bound of an outcome's support among the shared variables; or use "
        "local=fedppl.NUTS()"
    )


def misleading(names: list[str], trust: float | None) -> str:
    if not names:
        return ""
    return (
        f"clients {names[:5]} move the posterior by more than trust={trust:g} sds by what they answer at the points of "
        "the correction, and their Gaussian sites stand for them: look at their data, and at those of the clients that "
        "they are held against, since of clients that disagree the one that says more moves it more"
    )


def beyond_q(found: Reweighted, sites: Sites, grown: float) -> str:
    """What q could not follow, and where; `grown` is what a log sd grew by from one exchange to the next."""
    sd = gaussian.standard_deviations(sites.q)
    shift = (found.mean - gaussian.mean(sites.q)) / sd
    wider = np.sqrt(np.diag(found.covariance)) / sd
    worst = int(np.argmax(np.maximum(np.abs(shift), np.abs(np.log(wider)))))
    most_k = pareto.limit(found.told)
    short = [
        f"Pareto k {found.pareto_k:.2f} (at most {most_k:.2f})" if not found.pareto_k <= most_k else "",
        f"Pareto k {found.second_k:.2f} of squares (at most {MOST_SECOND_K:g})"
        if not found.second_k <= MOST_SECOND_K
        else "",
        f"{found.ess:.0f} effective points (at least {FEWEST})" if not found.ess >= FEWEST else "",
        f"an error of {found.error:.2g} sds (at most {MOST_ERROR:g})" if not found.error <= MOST_ERROR else "",
        f"an sd that grew by {np.expm1(grown):.0%} from one exchange to the next" if grown > MOST_ERROR else "",
    ]
    return (
        f"{len(found.points)} points of the correction do not tell the posterior: {', '.join(filter(None, short))}. "
        f"Along {sites.labels[worst]} its mean is {shift[worst]:+.2g} sds of q away, and its sd {wider[worst]:.2g} "
        "times q's. Raise points= of fedppl.Correction, declare that variable on a scale where it is closer to normal, "
        "or give it a prior that says more"
    )


def uncertain(noise: float, moved: float) -> str:
    return (
        f"clients' log densities are uncertain by {noise:.2g} in all over the posterior, which moves a mean by up to "
        f"{moved:.2g} sds: their local variables are too far from normal given the shared ones. Declare them on a "
        "scale where they are closer to normal, and standardised, z = (θ − μ) / τ, where data say little and they have "
        "a location μ and a scale τ; integrate them out where that is known, as pm.BetaBinomial does with a pm.Beta; "
        "or use local=fedppl.NUTS(), with more draws= where it is used already"
    )


def beyond_radius(cut: Beyond, radius: float, by: str, sites: Sites) -> str:
    """How much lies where no point is answered, along what, and by whose rule."""
    worst = int(np.argmax(cut.effect.sum(axis=1)))
    side = "below" if cut.effect[worst, 0] > cut.effect[worst, 1] else "above"
    whose = (
        f"site {by!r} answers, by distance={radius:g} of its policy," if by else f"Correction(radius={radius:g}) asks"
    )
    return (
        f"{whose} within {radius:g} prior sds of the prior's mean alone, and up to {cut.mass[worst].max():.2g} of the "
        f"posterior or of q may lie beyond, {side} along {sites.labels[worst]}: allow a larger distance, or declare a "
        "prior that is wider, or centered where the data are"
    )
