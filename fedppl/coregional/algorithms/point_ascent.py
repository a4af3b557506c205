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
from fedppl.coregional.unit import POINT, POSTERIOR
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


# Federated coordinate ascent for coregionalised Gaussian processes that select their latent functions (FedLMC-SS) -----


def Ascent(
    *,
    kernel_rate: float = 0.05,
    warmup: int = 10,
    sweeps: int = 3,
    batch_size: int | None = None,
    forgetting: float = 0.6,
    initial_kernel: str = "median",
    tolerance: float = 1e-3,
) -> Algorithm[AscentState, UnitClientState]:
    r"""Coordinate ascent on the bound of FedLMC-SS, with sums of the units' statistics.

    .. math:: Q = I + \sum_m \frac{E[s_m s_m^\top] \otimes B_m^\top B_m}{\sigma_m^2}, \quad
              Q\, m = \sum_m \frac{E[s_m] \otimes B_m^\top y_m}{\sigma_m^2}, \quad
              S_l = Q_{ll}^{-1}, \quad
              \operatorname{logit} \gamma_l = \operatorname{logit} \pi + c_l - \sum_{k \ne l} M_{lk} \gamma_k

    with s = α ∘ w. Given everything else each update is the bound's own maximum: of q(w_m) and σ_m at the unit, which
    keeps them; of q(v), q(α) and σ_w at the server, from sums. Only the kernels' parameters take a gradient step
    (Adam). The result is that of a central fit by the same updates, and with the kernels fixed no round lowers the
    bound.

    Parameters
    ----------
    kernel_rate
        Adam learning rate for the kernels' parameters on the log scale, shorter by 0.7 after every round that lowered
        the bound; 0 fixes them. Once five rounds in a row gained less than 0.02 nats each, quasi-Newton steps take
        over, each judged after all else has settled, and all else is extrapolated (reduced rank extrapolation).
    warmup
        Number of rounds before the selection begins; until then every γ is 1.
    sweeps
        Number of times a round that the server maximises over q(α), q(v) and σ_w in turn.
    batch_size
        Number of rows of a unit's mini-batch, drawn anew each round (stochastic natural gradients); by default all.
    forgetting
        Exponent between 0.5 and 1: where sums are noisy, because some units did not reply or rows are drawn, the t-th
        of such rounds counts by (1 + t)^(-forgetting).
    initial_kernel
        Start of the kernels' parameters. "median": every unit first fits a Gaussian process to its own rows, and the
        server takes the median of their kernel parameters, weighted by rows. "prior": the prior's median.
    tolerance
        Nats of the bound, with the priors of the kernels' parameters, that may be still to come when a fit has
        converged: of the updates by the ratio of successive gains, Σ Δ rᵗ = Δ r / (1 − r), and of the kernels by a
        quadratic; no less than the last third of the end phase gained. As far as these estimates hold, what is shared
        is within √(2 · tolerance) posterior sds of the maximum then. The size of the data and their units do not count.
        With noisy sums nothing is known of it, and no fit converges.

    Returns
    -------
    Algorithm
        Its fit has draws of v, the indicators and the estimates; see `fedppl.curves` for predictions in closed form.

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round for a model that is no linear model of coregionalisation.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.curves.Ascent(warmup=5).settings["warmup"]
    '5'

    Notes
    -----
    *When this fails.* The bound has local maxima: a length-scale that is far too long at the start, say, makes the
    selection drop functions that are needed, and γ = 0 is not left again. A fit may end at a saddle point, where two
    latent functions of nearly the same length-scale are mixed. Compare a few seeds, and read
    ``fit.idata["rounds"]["selected"]``. Intervals of the mean field are too narrow where a unit has no rows;
    `fedppl.curves.predict` adds what it leaves out.

    References
    ----------
    .. [1] Gao and Chung, Federated automatic latent variable selection in multi-output Gaussian processes, section 4,
       eqs. 10 to 16.
    .. [2] Titsias and Lázaro-Gredilla (2011), Spike and slab variational inference, NeurIPS, section 3.
    .. [3] Hoffman et al. (2013), Stochastic variational inference, JMLR 14, eqs. 24 to 26.
    .. [4] Sidi (2017), Vector Extrapolation Methods with Applications, SIAM, section 2.
    """
    settings = _ascent.checked(Settings(kernel_rate, warmup, sweeps, batch_size, forgetting, tolerance, initial_kernel))
    return ascent("curves.Ascent", settings, POSTERIOR, server.maximise, _common.NEEDS)
