"""NUTS: the cavity times the site factor, sampled by nutpie where it is installed, else by PyMC's own step method."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pymc as pm

from fedppl.contracts import Draws, LocalInference, Moments, Target
from fedppl.local import _marginal
from fedppl.local import tolerances as tol
from fedppl.local.target import inference, log_tilted, start
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
    """
    sampler = "nutpie" if _HAS_NUTPIE else "pymc"
    if nuts_sampler is not None:
        sampler = one_of("nuts_sampler", nuts_sampler, ("nutpie", "pymc"))
    if sampler == "nutpie" and not _HAS_NUTPIE:
        raise DeclarationError('nuts_sampler="nutpie" needs nutpie; install fedppl[nutpie] or use "pymc".')
    each = {"draws": draws, "tune": tune, "chains": chains}
    draws, tune, chains = (whole(name, value, most=tol.MOST_DRAWS) for name, value in each.items())
    if draws * chains < (least := tol.FEWEST_DRAWS):
        raise DeclarationError(f"draws={draws} with chains={chains} are too few; use at least {least} in all.")
    settings = _Settings(
        sampler,
        draws,
        tune,
        chains,
        between("target_accept", target_accept, 0, 1, hint="raise it towards 0.99 against divergences"),
        between("rhat_limit", rhat_limit, 1, np.inf, hint="1.01 is strict, 1.1 lenient"),
    )
    return inference("NUTS", tilted, draw, settings)


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
    if independent <= m + 3:  # as many as a precision without bias needs, and one
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
            **_marginal.departure_of(target),
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
        why = f"NUTS could not sample: {reason}. Check this client's data and give θ a proper prior"
        raise LocalFailure(why) from error
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
        make_initial_point_fn=lambda seed: origin + tol.JITTER * np.random.default_rng(seed).normal(size=size),
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
        point = {"x": origin + tol.JITTER * rng.normal(size=len(origin))}
        step.tune = True
        for i in range(tune + draws):
            if i == tune:
                step.stop_tuning()
            point, stats = step.step(point)
            if i >= tune:
                sample[chain, i - tune] = point["x"]
                divergences += int(stats[0]["diverging"])
    return sample, divergences
