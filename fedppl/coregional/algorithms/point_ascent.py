"""Coordinate ascent for coregionalised Gaussian processes whose coefficients are point estimates (FedLMC, LMC)."""

from __future__ import annotations

from collections.abc import Mapping

from fedppl.contracts import Algorithm
from fedppl.coregional import server
from fedppl.coregional.algorithms import _ascent, _common
from fedppl.coregional.algorithms._ascent import Settings
from fedppl.coregional.algorithms._rounds import AscentState, ascent
from fedppl.coregional.bound import Globals, UnitClientState
from fedppl.coregional.roles import Roles
from fedppl.coregional.unit import POINT
from fedppl.types import Array


def PointAscent(
    *,
    kernel_rate: float = 0.05,
    warmup: int = 10,
    sweeps: int = 3,
    batch_size: int | None = None,
    forgetting: float = 0.6,
    initial_kernel: str = "median",
    tolerance: float = 1e-3,
) -> Algorithm[AscentState, UnitClientState]:
    r"""Coordinate ascent on the bound of FedLMC, in which coefficients are parameters; for comparison with `Ascent`.

    .. math:: \max_{w, \sigma, q(v)} \sum_m \left( E_{q(v)} \log p(y_m \mid w_m, v) + \log p(w_m \mid \sigma_w) \right)
              - \operatorname{KL}(q(v) \,\|\, p(v))

    The coefficients w_m of a unit and its noise are at the mode, with their declared priors; the latent functions have
    a posterior. A mode in w and σ_w together would be one where both are near 0, so that σ_w stays at its prior's
    median: the larger that is, the nearer w is to maximum likelihood. Updates, messages and kernels' steps are those of
    `Ascent`.

    Parameters
    ----------
    warmup
        Number of rounds that a fit has at least, and in which units are waited for that have not replied yet.
    kernel_rate, sweeps, batch_size, forgetting, initial_kernel, tolerance
        As in `Ascent`.

    Returns
    -------
    Algorithm
        Its fit has draws of v and the estimates; see `fedppl.curves` for predictions in closed form, whose intervals
        take the coefficients for known.

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round for a model that is no linear model of coregionalisation, or
        one with a selection: share no ``included`` and declare ``inclusion=None``.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.curves.PointAscent().name
    'curves.PointAscent'

    Notes
    -----
    *When this fails.* Where a unit has few rows, or a gap, its coefficients are not known, and intervals that take them
    for known are too narrow. Use `Ascent` unless point estimates are what you are after.

    References
    ----------
    .. [1] Gao and Chung, section 5, the models FedLMC and LMC; eq. 17 has coefficients as parameters too.
    """
    settings = _ascent.checked(Settings(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel))
    return ascent("curves.PointAscent", settings, POINT, _maximise, _common.NEEDS_NO_SELECTION)


def _maximise(
    totals: Mapping[str, Array], shared: Globals, role: Roles, *, sweeps: int, select: bool
) -> tuple[Mapping[str, Array], Globals]:
    """Inducing variables and sizes in turn; σ_w stays where it is."""
    for _ in range(sweeps):
        mean, covariance = server.inducing(totals, shared.inclusion)
        totals, shared = server.rescale(totals, shared._replace(mean=mean, covariance=covariance), spread=0.0)
    return totals, shared
