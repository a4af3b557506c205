"""NUTS: the cavity times the site factor, sampled by nutpie where it is installed, else by PyMC's own step method."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.contracts import ClientView, Draws, Factor, LocalInference, Moments, Target
from fedppl.contracts.client import TiltedDrawFn
from fedppl.gaussian import Gaussian
from fedppl.local import _from_q
from fedppl.local.target import log_tilted, start
from fedppl.numerics import importance, region
from fedppl.numerics.importance import effective_size, normalise, quadratic_terms
from fedppl.numerics.integral import smooth_over
from fedppl.numerics.pairs import site_batch
from fedppl.numerics.proposals import Proposal, log_mixture, points_of, propose
from fedppl.numerics.streams import stream_of
from fedppl.results.idata import chain_diagnostics
from fedppl.settings import between, one_of, whole
from fedppl.types import Array, DeclarationError, LocalFailure, Rng

_HAS_NUTPIE = importlib.util.find_spec("nutpie") is not None


class _Settings(NamedTuple):
    sampler: str
    draws: int
    tune: int
    chains: int
    target_accept: float
    rhat_limit: float


def NUTS(
    *,
    draws: int = 1000,
    tune: int = 1000,
    chains: int = 2,
    target_accept: float = 0.9,
    rhat_limit: float = 1.1,
    nuts_sampler: str | None = None,
) -> LocalInference:
    r"""Moments of the tilted distribution by Hamiltonian Monte Carlo.

    .. math:: (\phi, \theta) \sim p(y_k, \theta \mid \phi)\, q_{-k}(\phi), \qquad
              \hat Q = (n_{\mathrm{eff}} - m - 2)\, S^{-1}

    with S the scatter matrix of the draws of φ. For priors that are not smooth (lasso, horseshoe), and to check other
    local inferences.

    Parameters
    ----------
    draws
        Number of draws of a chain.
    tune
        Number of draws of a chain before these, to tune step size and metric.
    chains
        Number of chains, one after the other at a client.
    target_accept
        Acceptance rate that the step size is tuned to.
    rhat_limit
        Largest R̂ of a shared coordinate, above which moments are not sent.
    nuts_sampler
        Name of the sampler, "nutpie" or "pymc"; by default nutpie when it is installed.

    Returns
    -------
    LocalInference

    Raises
    ------
    DeclarationError
        For an unknown sampler, or nutpie asked for and not installed.

    Notes
    -----
    *When this fails.* A reply carries Monte Carlo error of about 1 / sqrt(ESS) posterior sd, and errors of K
    clients add up. EP averages its rounds once the change is down to that error; raise `draws` for less.
    ``EP(local=NUTS(), correction=Correction())`` needs log densities with the local variables integrated. They come
    from twice `draws` of two more chains at every exchange and a Student-t that is regressed on φ; where chains do not
    mix, or few draws have all of the weight, the client fails with the remedy.
    """
    sampler = "nutpie" if _HAS_NUTPIE else "pymc"
    if nuts_sampler is not None:
        sampler = one_of("nuts_sampler", nuts_sampler, ("nutpie", "pymc"))
    if sampler == "nutpie" and not _HAS_NUTPIE:
        raise DeclarationError('nuts_sampler="nutpie" needs nutpie; install fedppl[nutpie] or use "pymc".')
    most = 10**7  # of each; more do not fit into memory
    counts = (whole("draws", draws, most=most), whole("tune", tune, most=most), whole("chains", chains, most=most))
    if counts[0] * counts[2] < 20:
        raise DeclarationError(f"draws={draws} with chains={chains} are too few; use at least 20 in all.")
    settings = _Settings(
        sampler,
        *counts,
        between("target_accept", target_accept, 0, 1, hint="raise it towards 0.99 against divergences"),
        between("rhat_limit", rhat_limit, 1, np.inf, hint="1.01 is strict, 1.1 lenient"),
    )
    drawn = functools.partial(draw, settings=settings)
    return LocalInference(
        name="NUTS",
        check=lambda client: None,
        expand=None,
        tilted=functools.partial(tilted, settings=settings),
        draw=drawn,
        settings=settings._asdict(),
        factor=functools.partial(factor, draw=drawn, draws=settings.draws),
        draw_given=functools.partial(draw_given, draw=drawn, draws=settings.draws),
    )


def tilted(target: Target, rng: Rng, *, settings: _Settings) -> Moments:
    """Moments of f_k(φ) q_{-k}(φ) from NUTS draws."""
    sample, info = _sample(target, rng, settings, settings.draws, settings.chains)
    m = target.client.shared_size
    phi = sample[..., :m]
    rhat, ess = chain_diagnostics(phi)
    if not rhat <= settings.rhat_limit:
        raise LocalFailure(f"R̂ {rhat:.3f} is above {settings.rhat_limit}; raise tune= and draws= of NUTS")
    flat = phi.reshape(-1, m)
    independent = min(ess, float(len(flat)))
    if independent <= m + 3:
        raise LocalFailure(f"only {independent:.0f} effective draws for {m} shared coordinates; raise draws= of NUTS")
    mean = flat.mean(axis=0)
    covariance = np.atleast_2d(np.cov(flat, rowvar=False))
    precision = np.linalg.inv(covariance) * (independent - m - 2) / (independent - 1)
    return Moments(
        mean,
        covariance,
        (precision + precision.T) / 2,
        np.mean((flat - mean) ** 3, axis=0) / np.diag(covariance) ** 1.5,
        {
            "ess": ess,
            "rhat": rhat,
            "mc_error": float(1.0 / np.sqrt(independent)),
            **_from_q.departure_of(target),
            **info,
        },
    )


def draw(target: Target, draws: int, chains: int, rng: Rng, *, settings: _Settings) -> Draws:
    """Draws of (φ, θ) from the tilted distribution, FedLin eq. 8; R̂ is reported, draws are not withheld."""
    sample, info = _sample(target, rng, settings, draws, chains)
    m = target.client.shared_size
    rhat, ess = chain_diagnostics(sample)
    return Draws(sample[..., :m], sample[..., m:], {"ess": ess, "rhat": rhat, **info})


def _sample(target: Target, rng: Rng, settings: _Settings, draws: int, chains: int) -> tuple[Array, dict[str, float]]:
    """Sample x = (φ, θ): draws (chain, draw, m + d_k), and the number of divergences."""
    run = by_nutpie if settings.sampler == "nutpie" else by_pymc
    density, origin = log_tilted(target), start(target)
    try:
        sample, divergences = run(density, origin, draws, settings.tune, chains, settings.target_accept, rng)
    except RuntimeError as error:  # of nutpie and of PyMC where no start has a finite density
        reason = str(error).strip().splitlines()[0]
        raise LocalFailure(
            f"NUTS could not sample: {reason}. Check this client's data and give θ a proper prior"
        ) from error
    if not np.all(np.isfinite(sample)):
        raise LocalFailure("NUTS left the region where the log density is finite; give θ a proper prior")
    return sample, {"divergences": float(divergences)}


# Chains of NUTS over a log density with gradient, from a start: by nutpie, or by PyMC's own step method ---------------

Density = Callable[[Array], tuple[float, Array]]  # log density and gradient
_one_at_a_time = threading.Lock()  # PyMC's step methods keep state that threads would share


def by_nutpie(
    density: Density, origin: Array, draws: int, tune: int, chains: int, target_accept: float, rng: Rng
) -> tuple[Array, int]:
    """Draws (chain, draw, n) and the number of divergences, by nutpie."""
    import nutpie
    from nutpie.compiled_pyfunc import from_pyfunc

    size = len(origin)

    compiled = from_pyfunc(
        size,
        lambda: density,
        lambda *_, **__: lambda x: {"x": x},
        [np.dtype("float64")],
        [(size,)],
        ["x"],
        make_initial_point_fn=lambda seed: origin + 0.1 * np.random.default_rng(seed).normal(size=size),
    )
    trace = nutpie.sample(
        compiled,
        draws=draws,
        tune=tune,
        chains=chains,
        cores=1,
        seed=int(rng.integers(2**31)),
        save_warmup=False,
        progress_bar=False,
        target_accept=target_accept,
    )
    return np.asarray(trace["posterior"]["x"]), int(np.sum(np.asarray(trace["sample_stats"]["diverging"])))


class _LogDensity:
    """The interface of PyMC's integrator to a compiled log density, over a Python function."""

    def __init__(self, density: Density) -> None:
        self._density = density
        self._extra_vars_shared: dict[str, Any] = {}
        self._extra_are_set = True
        self._raveled_inputs = True
        self._pytensor_function = self
        self.dtype = "float64"
        self.trust_input = True

    def __call__(self, x: Array) -> tuple[float, Array]:
        return self._density(x)

    def set_extra_values(self, values: Any) -> None:
        """Nothing besides x varies."""


@functools.cache
def _flat_model(size: int) -> Any:
    with pm.Model() as model:
        pm.Flat("x", shape=size)
    return model


def by_pymc(
    density: Density, origin: Array, draws: int, tune: int, chains: int, target_accept: float, rng: Rng
) -> tuple[Array, int]:
    """The same by PyMC's own step method, one chain after the other."""
    with _one_at_a_time:
        model = _flat_model(len(origin))
    sample = np.empty((chains, draws, len(origin)))
    divergences = 0
    for chain in range(chains):
        step = pm.NUTS(
            vars=model.value_vars,
            model=model,
            logp_dlogp_func=_LogDensity(density),
            initial_point={"x": origin},
            target_accept=target_accept,
            rng=np.random.default_rng(rng.integers(2**63)),
        )
        point = {"x": origin + 0.1 * rng.normal(size=len(origin))}
        step.tune = True
        for i in range(tune + draws):
            if i == tune:
                step.stop_tuning()
            point, stats = step.step(point)
            if i >= tune:
                sample[chain, i - tune] = point["x"]
                divergences += int(stats[0]["diverging"])
    return sample, divergences


# log f_k at points without a mode of θ: by nodes of a t regressed on φ, and draws of NUTS -----------------------------

#     f_k(φ) = ∫ h(φ, ε) dε,   h(φ, ε) = p(y_k, θ = ε + Bφ | φ)
#
# NUTS draws (φ, θ) from p(y_k, θ | φ) r(φ), r being a Gaussian as wide as the points. From half of the draws B is
# estimated, the regression of θ on φ, and a multivariate t of the residuals ε with density g. Nodes of that t and the
# other half of the draws are one sample of a mixture, whose density is known up to one number:
#
#     f̂_k(φ) = Σ_j h(φ, ε_j) / (n_t g(ε_j) + n_d D(ε_j) / Z),   D(ε) = ∫ h(φ, ε) r(φ) dφ,   Z = ∫ D
#
# Z is where both sides agree (bridge sampling). Where the t is good its nodes have most of the weight; elsewhere, as in
# a funnel or along a ridge, the draws have. All φ have the same sample, so that errors are smooth in φ; their size is
# from two halves of the sample.

_NODES = 64  # of a scramble
_ACROSS = 32  # of a scramble, of φ for D
_SOME = (128, 512)  # points at which h is computed first, and more where these do not predict the others
_STEPS = 200  # for Z, which converges linearly
_CHECKED = 32  # points near the middle, whose weights have to be good
_RHAT = 1.05
_LEAST = 20  # effective draws for each coefficient of the regression
_AT_ONCE = 2**22  # numbers in memory at a time
_HELP = (
    "raise draws= and tune= of fedppl.local.NUTS, or declare the client's own variables with less between them: "
    "standardised where data say little of them (z = (θ − μ) / τ), as they are where data say much, scales by their "
    "logarithms"
)


class _Pool(NamedTuple):
    """A sample of ε, with its weights at any φ."""

    slope: Array  # (d, m)
    nodes: Array  # (N, d) ε
    log_weights: Array  # (3, N) minus the mixture's log density: of all of the sample, and of each half


def factor(
    client: ClientView, points: Array, center: Array, prior_share: float, *, draw: TiltedDrawFn, draws: int
) -> Factor:
    """log f_k, and its share of a prior that is not Gaussian, at points (S, m), with errors."""
    points = np.asarray(points, dtype=float)
    if client.local_size:
        values, errors = _marginalised(client, points, center, draw, draws)
    else:
        values, errors = site_batch(client.kernel, points, client.packed), np.zeros(len(points))
    if prior_share:
        values = values + prior_share * client.prior.log_ratio(points)
    return Factor(np.where(np.isfinite(values), values, np.nan), errors)


def _marginalised(
    client: ClientView, points: Array, center: Array, draw: TiltedDrawFn, draws: int
) -> tuple[Array, Array]:
    pool = _pool(client, points, draw, draws)
    _require_good(client, pool, points, center)
    known = np.unique(np.linspace(0, len(points) - 1, _SOME[1]).astype(int))
    for some in (known[:: _SOME[1] // _SOME[0]], known):
        values, errors = _at(client, pool, points[some])
        rough = _quadratic(points, some, values)
        if rough is None:
            continue
        smooth = smooth_over(points, some, values - rough[some], errors)
        if smooth is not None:
            return rough + smooth[0], smooth[1] + smooth[2]
    return _at(client, pool, points)


def _at(client: ClientView, pool: _Pool, points: Array) -> tuple[Array, Array]:
    """log f_k at points (S, m) and its errors, from all of the sample and from its halves."""
    sums = np.zeros((3, len(points)))
    chunk = max(1, _AT_ONCE // (len(pool.nodes) * (client.shared_size + client.local_size)))
    for first in range(0, len(points), chunk):
        terms = _log_joint(client, pool, points[first : first + chunk])
        sums[:, first : first + chunk] = logsumexp(terms[None] + pool.log_weights[:, None], axis=2)
    whole, halves = sums[0], sums[1:]
    bias = whole - halves.mean(axis=0)  # the logarithm of a mean is too low, and of half as many twice as much
    return whole + bias, 0.5 * (halves[0] - halves[1]) + 0.5 * bias


def _quadratic(points: Array, some: Array, values: Array) -> Array | None:
    """A quadratic fitted to values at some of the points, at all of them; None where there are few."""
    z = (points - np.median(points, axis=0)) / np.maximum(np.std(points, axis=0), 1e-300)
    design = quadratic_terms(z)
    finite = np.isfinite(values)
    if np.sum(finite) < 4 * design.shape[1]:
        return None
    coefficients, *_ = np.linalg.lstsq(design[some][finite], values[finite], rcond=None)
    return np.asarray(design @ coefficients)


def draw_given(client: ClientView, phi: Array, center: Array, rng: Rng, *, draw: TiltedDrawFn, draws: int) -> Array:
    """A draw of θ from p(θ | φ, y_k) for each row of phi (N, m): one of the sample, by its weight there."""
    theta = np.zeros((len(phi), client.local_size))
    if not client.local_size or not len(phi):
        return theta
    unique, where = np.unique(phi, axis=0, return_inverse=True)
    pool = _pool(client, unique, draw, draws)
    _require_good(client, pool, unique, center)
    chunk = max(1, _AT_ONCE // (len(pool.nodes) * (client.shared_size + client.local_size)))
    for first in range(0, len(unique), chunk):
        some = unique[first : first + chunk]
        terms = _log_joint(client, pool, some) + pool.log_weights[0]
        for row in np.flatnonzero((where.ravel() >= first) & (where.ravel() < first + len(some))):
            at = where.ravel()[row]
            chosen = int(np.argmax(terms[at - first] + rng.gumbel(size=terms.shape[1])))
            theta[row] = pool.nodes[chosen] + pool.slope @ unique[at]
    return theta


def _pool(client: ClientView, points: Array, draw: TiltedDrawFn, draws: int) -> _Pool:
    stream, m = stream_of(client.client_id), client.shared_size
    reach = _reach(client, points)
    # From the client's own stream, the same in all rounds, so that errors are nearly the same in all exchanges.
    sample = draw(Target(client, reach, reach, 0.0), 2 * draws, 2, np.random.default_rng((stream, 7)))
    _require_mixed(sample)
    phi, theta = _halves(sample.shared), _halves(sample.local)
    flat_phi, flat_theta = phi[0].reshape(-1, m), theta[0].reshape(-1, theta.shape[-1])
    design = np.concatenate([np.ones((len(flat_phi), 1)), flat_phi], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, flat_theta, rcond=None)
    slope, residual = coefficients[1:].T, flat_theta - design @ coefficients
    covariance = np.atleast_2d(np.cov(residual, rowvar=False)) + 1e-12 * np.eye(residual.shape[1])
    student_t = propose(coefficients[0], covariance, _NODES)
    nodes = points_of(student_t, stream)
    others = (theta[1] - phi[1] @ slope.T).reshape(-1, residual.shape[1])
    effective = min(chain_diagnostics(sample.shared)[1], chain_diagnostics(sample.local)[1]) / 2.0
    joined = np.concatenate([nodes, others])
    pool = _Pool(slope, joined, np.zeros((3, len(joined))))
    across = propose(flat_phi.mean(axis=0), np.atleast_2d(np.cov(flat_phi, rowvar=False)), _ACROSS)
    marginal = _log_marginal(client, pool, reach, across, stream)
    log_t = log_mixture((student_t,), joined)
    first = np.concatenate(
        [np.arange(len(nodes)) < len(nodes) // 2, np.arange(len(others)) < len(others) // 2]
    )  # scrambles, and chains
    each = [_log_weights(log_t, marginal, len(nodes), effective, kept) for kept in (np.ones_like(first), first, ~first)]
    return pool._replace(log_weights=np.stack(each))


def _log_weights(log_t: Array, marginal: Array, count: int, effective: float, kept: NDArray[np.bool_]) -> Array:
    """Minus the log density of the mixture at the kept part of the sample, with Z from that part alone.

    Draws are weighted by the effective number.
    """
    is_node = np.arange(len(log_t)) < count
    times = np.where(is_node, 0.0, np.log(effective / max(1, len(log_t) - count)))
    n_t, n_d = np.log(np.sum(kept & is_node)), np.log(effective * np.mean(kept[~is_node]))
    log_z = float(logsumexp((marginal - log_t)[kept & is_node]) - n_t)
    for _ in range(_STEPS):
        weights = np.where(kept, times - np.logaddexp(n_t + log_t, n_d + marginal - log_z), -np.inf)
        before, log_z = log_z, float(logsumexp(weights + marginal))
        if abs(log_z - before) < 1e-10:
            break
    return np.asarray(np.where(kept, times - np.logaddexp(n_t + log_t, n_d + marginal - log_z), -np.inf))


def _log_marginal(client: ClientView, pool: _Pool, reach: Gaussian, across: Proposal, stream: int) -> Array:
    """log D at the sample, (N,)."""
    phi = points_of(across, stream)
    log_r = gaussian.log_density(reach, phi) - log_mixture((across,), phi) - np.log(len(phi))
    logs = np.full(len(pool.nodes), -np.inf)
    chunk = max(1, _AT_ONCE // (len(pool.nodes) * (client.shared_size + client.local_size)))
    for first in range(0, len(phi), chunk):
        terms = _log_joint(client, pool, phi[first : first + chunk]) + log_r[first : first + chunk, None]
        logs = np.logaddexp(logs, logsumexp(terms, axis=0))
    return np.where(np.isfinite(logs), logs, -1e300)


def _log_joint(client: ClientView, pool: _Pool, points: Array) -> Array:
    """log h at points (S, m) and the sample, (S, N); −inf where there is no density."""
    count, size = len(points), len(pool.nodes)
    x = np.empty((count, size, client.shared_size + client.local_size))
    x[..., : client.shared_size] = points[:, None]
    x[..., client.shared_size :] = pool.nodes[None] + (points @ pool.slope.T)[:, None]
    values = site_batch(client.kernel, x.reshape(count * size, -1), client.packed).reshape(count, size)
    return np.where(values < np.inf, values, -np.inf)


def _reach(client: ClientView, points: Array) -> Gaussian:
    """A Gaussian as wide as the points, with a little of the prior's width for one point or few."""
    prior = gaussian.covariance(client.prior.gaussian)
    spread = np.atleast_2d(np.cov(points, rowvar=False, bias=True)) if len(points) > 1 else np.zeros_like(prior)
    return gaussian.from_moments(points.mean(axis=0), spread + 1e-6 * prior)


def _halves(chains: Array) -> Array:
    """First and second half of every chain, (2, chain, draw, n)."""
    half = chains.shape[1] // 2
    return np.stack([chains[:, :half], chains[:, half : 2 * half]])


def _require_mixed(sample: Draws) -> None:
    joined = np.concatenate([sample.shared, sample.local], axis=-1)
    rhat, ess = chain_diagnostics(joined)
    if not rhat <= _RHAT:
        raise LocalFailure(f"R̂ {rhat:.3f} of the draws for log densities is above {_RHAT}; {_HELP}")
    least = _LEAST * (sample.shared.shape[-1] + 1)
    if not ess >= least:
        raise LocalFailure(f"only {ess:.0f} effective draws for log densities, at least {least} wanted; {_HELP}")


def _require_good(client: ClientView, pool: _Pool, points: Array, center: Array) -> None:
    """Refuse a sample of which few have all of the weight near the middle of the points, where the posterior is."""
    sd = np.std(points, axis=0)
    near = np.argsort(np.max(np.abs(points - center) / np.where(sd > 0, sd, 1.0), axis=1), kind="stable")
    some = near[: max(1, len(near) // 2)]
    some = some[np.unique(np.linspace(0, len(some) - 1, _CHECKED).astype(int))]
    terms = _log_joint(client, pool, points[some]) + pool.log_weights[0]
    finite = [row for row in terms if np.any(np.isfinite(row))]
    shapes = [importance.pareto_k(row) for row in finite]
    sizes = [effective_size(normalise(row)) for row in finite]
    if len(finite) < len(some) or not np.median(shapes) <= 0.7 or not np.median(sizes) >= region.SCRAMBLES * 10:
        raise LocalFailure(
            f"log densities from draws are not reliable (Pareto k {np.median(shapes or [np.inf]):.2f}, "
            f"{np.median(sizes or [0.0]):.0f} effective points of the sample); {_HELP}"
        )
