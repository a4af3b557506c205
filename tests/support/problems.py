"""Federated problems that the tests share, with their closed forms. One builder is compiled once a session."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.distributions.transforms import ordered
from scipy.special import logsumexp

import fedppl
from fedppl import FederatedModel
from fedppl.contracts import LocalInference, Target
from fedppl.gaussian import Gaussian
from fedppl.models import fedlmc_ss, fedsi
from fedppl.types import LocalFailure

Clients = dict[str, dict[str, Any]]

# A test that runs fewer rounds than it takes, or stops a run, on purpose, and is not about what is said of that.
few_rounds = pytest.mark.filterwarnings("ignore::fedppl.ConvergenceWarning")
# A test of EP's Gaussian where it is not the posterior: what is said of that is tested in test_departure.
of_q = few_rounds


def fit_some_rounds(*arguments: Any, **settings: Any) -> fedppl.Fit:
    """`fedppl.fit` for helpers of such tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
        return fedppl.fit(*arguments, **settings)


@functools.cache
def declared(builder: Callable[..., Any], shared: tuple[str, ...]) -> FederatedModel:
    """One declaration a session: it remembers what it compared and compiled."""
    return FederatedModel(builder, shared=shared)


# --- means with a correlated prior ----------------------------------------------------------------------------


def correlated_builder(y: Any) -> Any:
    """y_i ~ N(μ, I) of two outcomes: no diagonal family has the prior, and every one has the likelihood."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.MvNormal("mu", np.zeros(2), np.array([[1.0, 0.9], [0.9, 1.0]]))
        pm.Normal("obs", mu, 1, observed=y)
    return model


# --- random-effects mean, conjugate: fedppl.testing.normal_means ----------------------------------------------


def normal_means_site(y: Any) -> tuple[float, float]:
    """(r, Q) of f(μ) = ∫ Π N(y_i; θ, 1) N(θ; μ, ½²) dθ ∝ N(ȳ; μ, 1/n + ¼)."""
    precision = 1.0 / (1.0 / len(y) + 0.25)
    return precision * float(np.mean(y)), precision


def normal_means_posterior(clients: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """Mean and variance of p(μ | all y) under μ ~ N(0, 10²): precisions add."""
    linear, precision = np.sum([(0.0, 0.01), *(normal_means_site(data["y"]) for data in clients.values())], axis=0)
    return float(linear / precision), float(1.0 / precision)


def normal_means_theta(y: Any, mean: float, variance: float) -> tuple[float, float]:
    """Mean and variance of θ from its data and μ ~ N(mean, variance): θ ~ N(mean, variance + ¼), y ~ N(θ, 1)."""
    precision = len(y) + 1.0 / (variance + 0.25)
    return float((np.sum(y) + mean / (variance + 0.25)) / precision), 1.0 / precision


# --- regression with random coefficients, conjugate, three shared coordinates ---------------------------------


def regression_builder(X: Any, y: Any) -> Any:
    """y ~ N(a + Xβ, 1), β ~ N(μ, ½²), a ~ N(0, 2²), μ ~ N(0, 3²): Gaussian throughout."""
    with pm.Model(coords={"predictor": ["age", "dose"]}) as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu = pm.Normal("mu", 0, 3, dims="predictor")
        a = pm.Normal("a", 0, 2)
        beta = pm.Normal("beta", mu, 0.5, dims="predictor")
        pm.Deterministic("mu_difference", mu[0] - mu[1])
        pm.Deterministic("beta_shift", beta - mu, dims="predictor")
        pm.Normal("obs", a + X @ beta, 1, observed=y)
    return model


REGRESSION_SHARED = ("mu", "a")
REGRESSION_PRIOR = Gaussian(np.zeros(3), np.diag([1 / 9, 1 / 9, 1 / 4]))


def regression(clients: int = 4, *, seed: int = 3) -> tuple[FederatedModel, Clients]:
    """Clients of 5, 8, 11, ... rows."""
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(clients):
        X = rng.normal(size=(5 + 3 * k, 2))
        beta = np.array([1.0, -2.0]) + 0.5 * rng.normal(size=2)
        data[f"clinic {k}"] = {"X": X, "y": 0.5 + X @ beta + rng.normal(size=len(X))}
    return declared(regression_builder, REGRESSION_SHARED), data


def regression_site(data: Mapping[str, Any]) -> Gaussian:
    """f(μ, a) = N(y; Zφ, I + ¼ XXᵀ) with Z = [X, 1]: linear Gaussian, so Q = ZᵀV⁻¹Z and r = ZᵀV⁻¹y."""
    X, y = np.asarray(data["X"]), np.asarray(data["y"])
    Z = np.column_stack([X, np.ones(len(y))])
    inverse = np.linalg.inv(np.eye(len(y)) + 0.25 * X @ X.T)
    return Gaussian(Z.T @ inverse @ y, Z.T @ inverse @ Z)


def regression_log_marginal(data: Mapping[str, Any], phi: Any) -> float:
    """Normalised log N(y; Zφ, I + ¼ XXᵀ)."""
    X, y = np.asarray(data["X"]), np.asarray(data["y"])
    V = np.eye(len(y)) + 0.25 * X @ X.T
    residual = y - X @ phi[:2] - phi[2]
    quadratic = residual @ np.linalg.solve(V, residual)
    return float(-0.5 * (quadratic + np.linalg.slogdet(V)[1] + len(y) * np.log(2 * np.pi)))


def regression_posterior(clients: Mapping[str, Mapping[str, Any]]) -> Gaussian:
    """Exact posterior of (μ, a): natural parameters add."""
    sites = [regression_site(data) for data in clients.values()]
    return Gaussian(
        REGRESSION_PRIOR.linear + sum(site.linear for site in sites),
        REGRESSION_PRIOR.precision + sum(site.precision for site in sites),
    )


def regression_joint(data: Mapping[str, Any], cavity: Gaussian) -> tuple[Any, Any]:
    """Mean and covariance of (μ, a, β): cavity, N(β; μ, ½²) and N(y; a + Xβ, 1) as one 5 x 5 precision."""
    y = np.asarray(data["y"])
    A = np.column_stack([np.zeros((len(y), 2)), np.ones(len(y)), data["X"]])  # y = A (μ, a, β)
    B = np.array([[-1.0, 0, 0, 1, 0], [0, -1.0, 0, 0, 1]])  # β − μ
    precision = A.T @ A + 4 * B.T @ B
    precision[:3, :3] += cavity.precision
    linear = A.T @ y
    linear[:3] += cavity.linear
    covariance = np.linalg.inv(precision)
    return covariance @ linear, covariance


def tilted(site: Gaussian, cavity: Gaussian) -> tuple[Any, Any]:
    """Mean and covariance of site x cavity, both Gaussian."""
    covariance = np.linalg.inv(site.precision + cavity.precision)
    return covariance @ (site.linear + cavity.linear), covariance


# --- hierarchical regression with a local noise sd, as FedLin's Example 4.1 -----------------------------------


def noise_builder(X: Any, y: Any) -> Any:
    """y ~ N(Xθ, σ²), θ ~ N(μ, τ²), log σ local, log τ shared: not Gaussian."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu = pm.Normal("mu", 0, 2, shape=2)
        log_tau = pm.Normal("log_tau", -1, 1)
        theta = pm.Normal("theta", mu, pt.exp(log_tau), shape=2)
        log_sigma = pm.Normal("log_sigma", -0.5, 0.5)
        pm.Normal("obs", X @ theta, pt.exp(log_sigma), observed=y)
    return model


def noise(clients: int = 6, *, rows: int = 25, seed: int = 5) -> tuple[FederatedModel, Clients]:
    """Clients of `rows` + 0, 3, 6, ... rows."""
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(clients):
        X = rng.normal(size=(rows + 3 * k, 2))
        theta = np.array([1.0, -0.5]) + 0.4 * rng.normal(size=2)
        data[f"site {k}"] = {"X": X, "y": X @ theta + 0.6 * rng.normal(size=len(X))}
    return declared(noise_builder, ("mu", "log_tau")), data


def noise_tilted(data: Mapping[str, Any], cavity: Gaussian) -> tuple[Any, Any, Any]:
    """Mean, covariance and skewness of f(μ, log τ) x cavity, by quadrature over (log τ, log σ).

    Given both, y ~ N(Xμ, τ² XXᵀ + σ² I) and the cavity of μ given log τ is normal, so μ is integrated in closed form.
    """
    X, y = np.asarray(data["X"]), np.asarray(data["y"])
    parts = []
    covariance = np.linalg.inv(cavity.precision)
    mean = covariance @ cavity.linear
    sd = np.sqrt(covariance[2, 2])
    inverse = np.linalg.inv(covariance[:2, :2] - np.outer(covariance[:2, 2], covariance[2, :2]) / sd**2)
    values, vectors = np.linalg.eigh(X @ X.T)
    y_, X_ = vectors.T @ y, vectors.T @ X
    for log_tau in np.linspace(mean[2] - 7 * sd, mean[2] + 7 * sd, 141):
        given = mean[:2] + covariance[:2, 2] / sd**2 * (log_tau - mean[2])
        for log_sigma in np.linspace(-2.5, 1.5, 161):
            v = np.exp(2 * log_tau) * values + np.exp(2 * log_sigma)
            Q = inverse + X_.T @ (X_ / v[:, None])
            r = inverse @ given + X_.T @ (y_ / v)
            m = np.linalg.solve(Q, r)
            log_weight = (
                -0.5 * ((log_tau - mean[2]) / sd) ** 2
                - 0.5 * ((log_sigma + 0.5) / 0.5) ** 2
                - 0.5 * (np.log(v).sum() + y_ @ (y_ / v) + given @ inverse @ given - r @ m + np.linalg.slogdet(Q)[1])
            )
            parts.append((log_weight, *m, log_tau, *np.linalg.inv(Q).ravel()))
    table = np.array(parts)
    weights = np.exp(table[:, 0] - logsumexp(table[:, 0]))
    phi = table[:, 1:4]
    center = weights @ phi
    spread = (phi - center).T @ ((phi - center) * weights[:, None])
    spread[:2, :2] += (weights @ table[:, 4:]).reshape(2, 2)
    skewness = np.array([np.nan, np.nan, weights @ ((phi[:, 2] - center[2]) / np.sqrt(spread[2, 2])) ** 3])
    return center, spread, skewness


# --- eight schools: a prior that is not Gaussian and folds into the clients -----------------------------------

SCHOOL_EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
SCHOOL_ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools_builder(effect: Any, error: Any) -> Any:
    """effect ~ N(θ, error²), θ ~ N(μ, τ²), μ ~ N(0, 5²), τ ~ HalfCauchy(5); one effect a school, 0-d data."""
    with pm.Model() as model:
        effect, error = pm.Data("effect", effect), pm.Data("error", error)
        mu = pm.Normal("mu", 0, 5)
        tau = pm.HalfCauchy("tau", 5)
        theta = pm.Normal("theta", mu, tau)
        pm.Normal("obs", theta, error, observed=effect)
    return model


def schools() -> tuple[FederatedModel, Clients]:
    """The eight schools of Rubin (1981), one client each."""
    data = {
        f"school {name}": {"effect": effect, "error": error}
        for name, effect, error in zip("ABCDEFGH", SCHOOL_EFFECTS, SCHOOL_ERRORS, strict=True)
    }
    return declared(schools_builder, ("mu", "tau")), data


def schools_quadrature(effects: Any = SCHOOL_EFFECTS, errors: Any = SCHOOL_ERRORS) -> dict[str, float]:
    """Posterior mean, sd and skewness of μ and log τ by a grid over (μ, log τ).

    f_k = N(effect; μ, τ² + error²); on log τ the half-Cauchy prior has density ∝ τ / (1 + τ²/25).
    """
    mu, log_tau = np.linspace(-40, 50, 901)[:, None], np.linspace(-14, 7, 1401)[None]
    tau = np.exp(log_tau)
    logp = -0.5 * (mu / 5) ** 2 + log_tau - np.log1p((tau / 5) ** 2)
    for effect, error in zip(effects, errors, strict=True):
        variance = tau**2 + error**2
        logp = logp - 0.5 * (np.log(variance) + (effect - mu) ** 2 / variance)
    weights = np.exp(logp - logsumexp(logp))
    out = {}
    for name, x, w in (("mu", mu[:, 0], weights.sum(axis=1)), ("log_tau", log_tau[0], weights.sum(axis=0))):
        mean = w @ x
        sd = np.sqrt(w @ (x - mean) ** 2)
        out |= {f"{name}_mean": float(mean), f"{name}_sd": float(sd), f"{name}_skew": float(w @ ((x - mean) / sd) ** 3)}
    return out


# --- a kink: Bayesian lasso -----------------------------------------------------------------------------------


def lasso_builder(X: Any, y: Any) -> Any:
    """β ~ Laplace(0, e^{-log λ}): |β| stands in the log density."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        log_lambda = pm.Normal("log_lambda", 0, 1)
        beta = pm.Laplace("beta", 0, pt.exp(-log_lambda), shape=2)
        pm.Normal("obs", X @ beta, 1, observed=y)
    return model


def lasso(clients: int = 2, *, seed: int = 7) -> tuple[FederatedModel, Clients]:
    """Two clients of 20 rows."""
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(clients):
        X = rng.normal(size=(20, 2))
        data[f"lab {k}"] = {"X": X, "y": X @ [1.0, 0.0] + rng.normal(size=20)}
    return declared(lasso_builder, ("log_lambda",)), data


# --- logistic regression on an intercept: one θ, not conditionally Gaussian -----------------------------------


def logistic_builder(y: Any) -> Any:
    """y ~ Bernoulli(logit⁻¹ θ), θ ~ N(μ, 0.7²), μ ~ N(0, 1.5²); integers in the container."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 1.5)
        theta = pm.Normal("theta", mu, 0.7)
        pm.Bernoulli("obs", logit_p=theta, observed=y)
    return model


def logistic(clients: int = 3, *, rows: int = 30, seed: int = 9) -> tuple[FederatedModel, Clients]:
    """Clients of `rows` binary outcomes."""
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(clients):
        rate = 1 / (1 + np.exp(-0.5 - 0.7 * rng.normal()))
        data[f"ward {k}"] = {"y": (rng.uniform(size=rows) < rate).astype(int)}
    return declared(logistic_builder, ("mu",)), data


# --- Poisson with one effect a row: local dimension differs between clients -----------------------------------


def counts_builder(y: Any) -> Any:
    """y_i ~ Poisson(exp θ_i), θ_i ~ N(μ, 0.3²): as many local parameters as rows."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 2)
        theta = pm.Normal("theta", mu, 0.3, shape=y.shape[0])
        pm.Poisson("obs", pt.exp(theta), observed=y)
    return model


def counts(*, seed: int = 11) -> tuple[FederatedModel, Clients]:
    """Three clients of 4, 7 and 5 rows."""
    rng = np.random.default_rng(seed)
    data = {f"unit {rows}": {"y": rng.poisson(3.0, size=rows)} for rows in (4, 7, 5)}
    return declared(counts_builder, ("mu",)), data


# --- every kind of transform, shared and local ----------------------------------------------------------------


def transforms_builder(X: Any, y: Any) -> Any:
    """Half-normal, log-normal, Dirichlet and multivariate normal shared; half-normal and ordered normal local."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        tau = pm.HalfNormal("tau", 2)
        scale = pm.LogNormal("scale", 0.3, 0.5)
        p = pm.Dirichlet("p", np.array([2.0, 3.0, 4.0]))
        z = pm.MvNormal("z", np.array([0.0, 1.0]), np.array([[1.0, 0.3], [0.3, 2.0]]))
        sigma = pm.HalfNormal("sigma", scale)
        cuts = pm.Normal("cuts", 0, tau, shape=2, transform=ordered, initval=[-1.0, 1.0])
        pm.Deterministic("p_odds", p[0] / p[1])
        pm.Deterministic("gap", cuts[1] - cuts[0])
        pm.Normal("obs", X @ (z + p[1:]) + cuts.sum(), sigma, observed=y)
    return model


def transforms(*, seed: int = 13) -> tuple[FederatedModel, Clients]:
    """Two clients of 6 and 9 rows."""
    rng = np.random.default_rng(seed)
    data = {}
    for rows in (6, 9):
        X = rng.normal(size=(rows, 2))
        data[f"plant {rows}"] = {"X": X, "y": X @ [0.5, -1.0] + rng.normal(size=rows)}
    return declared(transforms_builder, ("tau", "scale", "p", "z")), data


# --- coregionalised Gaussian processes that select their latent functions ---------------------------------------


class Remembering(FederatedModel):
    """Enrols equal data once: to build and compare PyMC models takes longer than most fits of curves. No kernel."""

    @functools.cached_property
    def _known(self) -> dict[Any, Any]:
        return {}

    def enrol(self, clients: Mapping[str, Mapping[str, Any]], *, kernel: bool = True, **more: Any) -> dict[str, Any]:
        """Return the clients that were enrolled before, where all of these were."""
        try:
            keys = {k: (k, *map(_content, sorted(data.items()))) for k, data in clients.items()}
        except (TypeError, AttributeError):  # what cannot be read is for the declaration to refuse
            return super().enrol(clients, kernel=kernel, **more)
        if not all(key in self._known for key in keys.values()):
            found = super().enrol(clients, kernel=False)
            self._known.update({keys[client_id]: found[client_id] for client_id in keys})
        return {client_id: self._known[key] for client_id, key in keys.items()}


def _content(item: tuple[str, Any]) -> tuple[str, tuple[int, ...], bytes]:
    values = np.asarray(item[1])
    if values.dtype != np.float64:
        raise TypeError("of whole numbers the type depends on what the other clients have")
    return item[0], values.shape, values.tobytes()


# One builder for all tests: what it compiles takes half a minute.
coregional_builder = functools.partial(
    fedlmc_ss.unit, inducing=np.linspace(0, 1, 6), latents=3, lengthscale=0.3, lengthscale_spread=0.5
)


@functools.cache
def _coregional_model() -> FederatedModel:
    return Remembering(coregional_builder, fedlmc_ss.SHARED)


@functools.cache
def coregional_all_model(slab_sd: float = 1.0) -> FederatedModel:
    """The same without a selection."""
    builder = functools.partial(coregional_builder, inclusion=None, slab_sd=slab_sd)
    return Remembering(builder, fedlmc_ss.SHARED_WITHOUT_SELECTION)


def coregional(units: int = 3, *, seed: int = 17) -> tuple[FederatedModel, Clients]:
    """Units of 12, 20, 28, ... rows, each a sum of the same two curves, for a model that has three."""
    rng, data = np.random.default_rng(seed), {}
    for k in range(units):
        x = np.sort(rng.uniform(size=12 + 8 * k))
        heights = rng.normal(size=2)
        y = heights[0] * np.sin(5 * x) + heights[1] * np.cos(8 * x) + 0.1 * rng.normal(size=len(x))
        data[f"unit {k}"] = {"X": x, "y": y}
    return _coregional_model(), data


# --- builders that want care, and clients that fail -----------------------------------------------------------


def polymorphic_builder(X: Any, y: Any) -> Any:
    """The shared vector is as long as X has columns."""
    with pm.Model() as model:
        X_, y_ = pm.Data("X", X), pm.Data("y", y)
        mu = pm.Normal("mu", 0, 3, shape=X.shape[1])
        pm.Normal("obs", X_ @ mu, 1, observed=y_)
    return model


def without_containers(y: Any) -> Any:
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 10)
        theta = pm.Normal("theta", mu, 0.5)
        pm.Normal("obs", theta, 1, observed=np.asarray(y))
    return model


def failing(at: Callable[[str], bool], reason: str = "out of order") -> LocalInference:
    """Nested Laplace that fails at some clients, in both phases."""
    inner = fedppl.local.NestedLaplace()

    def expand(client: Any, point: Any, share: float) -> Any:
        if at(client.client_id):
            raise LocalFailure(reason)
        assert inner.expand is not None
        return inner.expand(client, point, share)

    def tilted(target: Target, rng: np.random.Generator) -> Any:
        if at(target.client.client_id):
            raise LocalFailure(reason)
        return inner.tilted(target, rng)

    def log_factor(client: Any, points: Any, share: float) -> Any:
        if at(client.client_id):
            raise LocalFailure(reason)
        assert inner.log_factor is not None
        return inner.log_factor(client, points, share)

    return inner._replace(expand=expand, tilted=tilted, log_factor=log_factor)


def falling_back(steps: Mapping[str, float], **told: float) -> LocalInference:
    """Nested Laplace that says that some clients fell back, and what it cost."""
    inner = fedppl.local.NestedLaplace()

    def tilted(target: Target, rng: np.random.Generator) -> Any:
        moments = inner.tilted(target, rng)
        step = steps.get(target.client.client_id, 0.0)
        return moments._replace(diagnostics={**moments.diagnostics, "fallback": step, **(told if step else {})})

    return inner._replace(tilted=tilted)


ALL = {
    "regression": regression,
    "noise": noise,
    "schools": schools,
    "lasso": lasso,
    "logistic": logistic,
    "counts": counts,
    "transforms": transforms,
}


@functools.cache
def network(hidden: int = 4, outputs: int = 3, *, inputs: int = 3, seed: int = 21) -> Any:
    """A network with one hidden layer, the same object for the same arguments: what it holds is where clients start."""
    torch = pytest.importorskip("torch")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, outputs)]
        return torch.nn.Sequential(*layers)


@functools.cache
def classification(
    clients: int = 3, *, shared: tuple[str, ...] = ("0.weight", "0.bias")
) -> tuple[FederatedModel, Clients]:
    """Three classes that a small network tells apart, two of them at each client."""
    net = network()
    rng, data = np.random.default_rng(23), {}
    for k in range(clients):
        label = rng.permutation([k % 3, (k + 1) % 3] * 10)
        X = rng.normal(size=(20, 3)) + 3.0 * np.eye(3)[label]
        data[f"device {k}"] = {"X": X, "y": label}
    return FederatedModel(functools.partial(fedsi.classifier, net=net), shared), data


def product(noise_sd: float, clients: str = "a") -> tuple[FederatedModel, Clients]:
    """Outputs u v x of two weights that begin at 1, with four rows of x = y = 1 at each client."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    for layer in net:
        torch.nn.init.constant_(layer.weight, 1.0)
    builder = functools.partial(fedsi.regressor, net=net, noise_sd=noise_sd)
    data = {name: {"X": np.ones((4, 1)), "y": np.ones((4, 1))} for name in clients}
    return FederatedModel(builder, ["0.weight", "1.weight"]), data
