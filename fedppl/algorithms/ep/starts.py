"""Warm starts from several points, one after the other: the mode with the most mass, and the others by name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep.sites import Sites
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.numerics.streams import whitened_points
from fedppl.types import Array, Layout

Indices = NDArray[np.int64]
_APART = 3.0  # posterior sds between modes that are not one
_ALIKE = 0.1  # sds of the prior by which moments of equal priors may differ
MATTERS = 1e-3  # share of the mass of a mode that is worth a word


class Mode(NamedTuple):
    """Where a search arrived."""

    point: Array  # (m,)
    sd: Array  # (m,) of the Gaussian there
    log_mass: float  # log of that Gaussian's integral
    linear: Array  # (K, m) of the sites
    precision: Array  # (K, p)


class Starts(NamedTuple):
    """Points where searches are still to begin, and what those before them found."""

    left: Array  # (J, m)
    turned: Indices  # (m,) coordinates in an order in which exchangeable ones have changed places
    modes: tuple[Mode, ...]
    said: str  # of several modes, once all searches are over
    asked_for: bool  # by a number; else they end where rounds are of some clients alone


def begin(layout: Layout, starts: int, stream: int, asked_for: bool) -> Starts:
    """The first search begins at the prior mean, the others at quasi-random points of the prior, some further out.

    A prior with heavy tails has little of them in its Gaussian, and modes far from its middle. Images of the first
    mode take the places of the last of these points; a better one that is found later has images beside them.
    """
    prior = layout.prior
    sd = gaussian.standard_deviations(prior)
    z = whitened_points(len(sd), 2 * (starts + len(sd)), stream)[: starts - 1]
    reach = 2.0 ** (np.arange(len(z)) % 3)
    return Starts(gaussian.mean(prior) + z * reach[:, None] * sd, turned(layout), (), "", asked_for)


def turned(layout: Layout) -> Indices:
    """Coordinates with variables of one prior in reversed order; the elements of a variable that has a prior alone.

    Moments of a prior that is not Gaussian are of draws, so that equal priors differ a little.
    """
    mean, sd = gaussian.mean(layout.prior), gaussian.standard_deviations(layout.prior)
    groups: list[list[slice]] = []
    for part in layout.slices.values():
        for group in groups:
            first = group[0]
            if len(mean[first]) == len(mean[part]) and np.allclose(sd[first], sd[part], rtol=_ALIKE, atol=0.0):
                if np.all(np.abs(mean[first] - mean[part]) < _ALIKE * sd[part]):
                    group.append(part)
                    break
        else:
            groups.append([part])
    order = np.arange(layout.size, dtype=np.int64)
    for group in groups:
        for part, other in zip(group, reversed(group), strict=True):
            taken = np.arange(other.start, other.stop)
            order[part] = taken if len(group) > 1 else taken[::-1]
    return order


def images(point: Array, sd: Array, middle: Array, turned: Indices) -> list[Array]:
    """Where exchangeable labels, and signs that the data do not tell, have their other mode: none where it is this."""
    found = [2.0 * middle - point, point[turned]]
    return [image for image in found if far_apart(image, point, sd)]


def arrived_at(sites: Sites, search: WarmStart) -> Mode:
    """The mode near the point at which the sites were expanded."""
    x = search.anchor
    mass = search.objective - float(gaussian.log_kernel(sites.q, x)) + gaussian.log_integral(sites.q)
    return Mode(
        gaussian.mean(sites.q), gaussian.standard_deviations(sites.q), float(mass), sites.linear, sites.precision
    )


def next_search(starts: Starts, sites: Sites, found: Mode | None) -> tuple[Starts, Sites, WarmStart | None]:
    """Begin the next search, or where none is left take the mode with the most mass; None: there is one, and no search.

    Where no search arrived, the last is handed back as it is.
    """
    modes = starts.modes if found is None else (*starts.modes, found)
    left, middle = starts.left, gaussian.mean(sites.prior)
    if found is not None and all(found.log_mass > mode.log_mass + 1.0 for mode in starts.modes):
        beside = images(found.point, found.sd, middle, starts.turned)  # the searches that are left where it came late
        least = len(beside) if starts.modes else 0
        left = np.array([*beside, *left]).reshape(-1, len(middle))[: max(len(left), least)]
    if len(left):
        search = _warm_start.start_at(left[0], middle, len(sites.where))
        empty = _sites.update(sites, np.zeros_like(sites.linear), np.zeros_like(sites.precision))
        return starts._replace(left=left[1:], modes=modes), empty, search
    if not modes:
        return starts, sites, None
    most = max(modes, key=lambda mode: mode.log_mass)
    best = next(mode for mode in modes if not _are_apart(mode, most))  # the first that came there
    others = _distinct(best, modes)
    said = _told(best, others, sites.labels) if others else ""
    return (
        starts._replace(left=left, modes=tuple(map(_without_sites, modes)), said=said),
        _sites.update(sites, best.linear, best.precision),
        None,
    )


def are_several(modes: tuple[Mode, ...]) -> bool:
    """Whether searches arrived at other places than the first did, whatever mass they have."""
    return any(_are_apart(modes[0], mode) for mode in modes[1:])


def _without_sites(mode: Mode) -> Mode:
    """What is of use when all searches are over."""
    return mode._replace(linear=mode.linear[:0], precision=mode.precision[:0])


def _distinct(best: Mode, modes: tuple[Mode, ...]) -> list[Mode]:
    """Modes other than the best, each once, that have a share of the mass that matters."""
    found: list[Mode] = []
    for mode in sorted(modes, key=lambda one: -one.log_mass):
        if all(_are_apart(mode, one) for one in (best, *found)):
            found.append(mode)
    total = logsumexp([best.log_mass, *(mode.log_mass for mode in found)])
    return [mode for mode in found if mode.log_mass - total > np.log(MATTERS)]


def far_apart(one: Array, other: Array, sd: Array) -> bool:
    """Whether two points are none of one mode with these sds."""
    return float(np.max(np.abs(one - other) / sd)) > _APART


def _are_apart(one: Mode, other: Mode) -> bool:
    return far_apart(one.point, other.point, np.maximum(one.sd, other.sd))


def _told(best: Mode, others: list[Mode], labels: tuple[str, ...]) -> str:
    """Where the modes are, and about how much of the posterior each has."""
    total = logsumexp([mode.log_mass for mode in (best, *others)])
    worst = int(np.argmax(np.max([np.abs(mode.point - best.point) / best.sd for mode in others], axis=0)))
    shares = [np.exp(mode.log_mass - total) for mode in (best, *others[:3])]
    told = [f"{share:.0%}" if 0.01 <= share <= 0.99 else f"{share:.2%}" for share in shares]
    places = [f"{s} at {mode.point[worst]:.3g}" for s, mode in zip(told, (best, *others[:3]), strict=True)]
    return (
        f"the posterior has several modes: along {labels[worst]}, of those found about {', '.join(places)}; q is of "
        "the first alone. Declare the model so that one is left: positive (pm.HalfNormal), ordered "
        "(pm.distributions.transforms.ordered), or by a prior that rules the others out"
    )
