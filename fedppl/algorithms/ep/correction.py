"""The settings of EP's correcting round."""

from __future__ import annotations

from dataclasses import dataclass

from fedppl import settings
from fedppl.numerics.region import SCRAMBLES
from fedppl.types import DeclarationError

_MOST, _MOST_EXCHANGES = 2**20, 8


@dataclass(frozen=True)
class Correction:
    r"""One more exchange after EP, which turns its Gaussian into the posterior.

    .. math:: w_s \propto \frac{p(\varphi_s) \prod_k f_k(\varphi_s)}{g(\varphi_s)}, \qquad
              E[h] = E_q[h] + \sum_s (w_s - u_s)\, h(\varphi_s), \qquad u_s \propto q(\varphi_s) / g(\varphi_s)

    Clients answer log f_k at scrambled Sobol points φ_s of g: a multivariate t that reaches beyond q, and others along
    the longer tails of skewed coordinates. Where the weights say too little, g is fitted to the weighted points, and
    there is another exchange.

    Parameters
    ----------
    points
        Number of points of the first exchange at most, a multiple of 8 and at least 512: fewer do not tell whether they
        are enough. Each further one has twice as many.
    exchanges
        Largest number of exchanges, at most 8.
    radius
        Largest distance of a point from the prior's mean, per coordinate, in prior sds, as `fedppl.Policy` has it under
        `distance`; None asks for all. Where sites allow less, points beyond the least that they allow, which they tell
        with their first answers, are not asked for from then on: the proposal is truncated there.

    Raises
    ------
    DeclarationError
        For numbers out of range.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.EP(correction=fedppl.Correction(points=2048)).name
    'EP'

    Notes
    -----
    *When this fails.* Where q is far from the posterior (many shared coordinates, heavy tails), few points have all the
    weight: the status then says so, with the coordinate. A mode that lies apart from q's has no point near it, and is
    not seen: ``EP(starts=...)`` looks for it. Beyond a radius the posterior is taken to be as q is, and where what lies
    there may move a mean or a log sd by more than 0.05 sds, the status says so, with the site whose policy has it.
    Values of log f_k at so many points tell more of a client's data than
    moments do; sites of their own are not asked for them unless this is in the call and their policy
    allows it.

    References
    ----------
    .. [1] Vehtari et al. (2024), Pareto smoothed importance sampling, JMLR 25.
    .. [2] Owen, Zhou (2000), Safe and effective importance sampling, JASA 95.
    """

    points: int = 1024
    exchanges: int = 5
    radius: float | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        settings.whole("points", self.points, 64 * SCRAMBLES)
        if self.points > _MOST:
            raise DeclarationError(f"points={self.points}: at most {_MOST} fit into memory for every client.")
        if self.points % SCRAMBLES:
            raise DeclarationError(
                f"points={self.points} must be a multiple of {SCRAMBLES}, one part for each scramble; take "
                f"{-(-self.points // SCRAMBLES) * SCRAMBLES}."
            )
        settings.whole("exchanges", self.exchanges)
        if self.exchanges > _MOST_EXCHANGES:
            raise DeclarationError(
                f"exchanges={self.exchanges}: at most {_MOST_EXCHANGES}, since each has twice as many points as the "
                "one before; raise points= in its place."
            )
        if self.radius is not None:
            settings.positive("radius", self.radius, "it is in prior sds, or None for no bound")
