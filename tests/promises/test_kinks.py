"""Kinks and jumps of log densities: models whose answer is known, without compiling any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest

import fedppl
from fedppl import FederatedModel
from fedppl.model import checks as _checks
from fedppl.model import interpreted
from fedppl.model.client import find_kink, points
from fedppl.model.template import Declared, template_of
from tests.support.markers import slow_but

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 30))
POSITIVE, COUNTS, BINARY = np.abs(Y) + 0.1, RNG.poisson(3, size=30), RNG.integers(0, 2, size=30)
PAIRS = RNG.normal(size=(30, 2))

Body = Callable[[Any, Any, Any], Any]


def theta(mu: Any) -> Any:
    return pm.Normal("theta", mu, 1)


def scale() -> Any:
    return pm.HalfNormal("scale", 1)


def lkj(mu: Any, x: Any, y: Any) -> None:
    chol, _, _ = pm.LKJCholeskyCov("chol", n=2, eta=2, sd_dist=pm.HalfNormal.dist(1, shape=2))
    pm.MvNormal("o", mu=pt.stack([mu, theta(mu)]), chol=chol, observed=y)


def mixture(mu: Any, x: Any, y: Any) -> None:
    pm.NormalMixture("o", w=pm.Dirichlet("w", np.ones(2)), mu=pt.stack([mu, theta(mu)]), sigma=1, observed=y)


def huber(mu: Any, x: Any, y: Any) -> None:
    """Its gradient is continuous."""
    away = pt.abs(y - mu)
    pm.Potential("o", -pt.sum(pt.switch(away < 1, 0.5 * away**2, away - 0.5)))


def far_change(mu: Any, x: Any, y: Any) -> None:
    """A change point on a raw scale: from its start, 50, no step of a unit passes a row."""
    pm.Normal("o", mu + pt.maximum(10 * np.arange(0, 30, 2) - pm.Normal("change", 55, 20), 0).sum(), 1, observed=y)


SMOOTH: dict[str, tuple[Body, Any]] = {
    "normal": (lambda mu, x, y: pm.Normal("o", theta(mu), scale(), observed=y), Y),
    "Student": (lambda mu, x, y: pm.StudentT("o", 4, mu=theta(mu), sigma=scale(), observed=y), Y),
    "Student, ν": (lambda mu, x, y: pm.StudentT("o", pm.Gamma("nu", 2, 0.1), mu=mu, lam=scale(), observed=y), Y),
    "τ": (lambda mu, x, y: pm.Normal("o", theta(mu), tau=pm.Gamma("tau", 2, 1), observed=y), Y),
    "Poisson": (lambda mu, x, y: pm.Poisson("o", pt.exp(theta(mu) + x * mu), observed=y), COUNTS),
    "counts": (lambda mu, x, y: pm.NegativeBinomial("o", mu=pt.exp(mu), alpha=scale(), observed=y), COUNTS),
    "zeros": (
        lambda mu, x, y: pm.ZeroInflatedPoisson("o", psi=pm.Beta("psi", 1, 1), mu=pt.exp(mu), observed=y),
        COUNTS,
    ),
    "logistic": (lambda mu, x, y: pm.Bernoulli("o", logit_p=theta(mu) * x, observed=y), BINARY),
    "ordered": (lambda mu, x, y: pm.OrderedLogistic("o", eta=mu * x, cutpoints=[-1.0, 1.0], observed=y), BINARY),
    "Weibull": (lambda mu, x, y: pm.Weibull("o", scale(), pt.exp(theta(mu)), observed=y), POSITIVE),
    "gamma": (lambda mu, x, y: pm.Gamma("o", mu=pt.exp(theta(mu)), sigma=scale(), observed=y), POSITIVE),
    "uniform prior": (lambda mu, x, y: pm.Normal("o", pm.Uniform("u", -3, 3) + mu, 1, observed=y), Y),
    "truncated prior": (lambda mu, x, y: pm.Normal("o", pm.TruncatedNormal("u", 0, 1, lower=0) + mu, 1, observed=y), Y),
    "mixture": (mixture, Y),
    "LKJ": (lkj, PAIRS),
    "censored": (
        lambda mu, x, y: pm.Censored("o", pm.Normal.dist(mu, scale()), lower=-1.0, upper=1.0, observed=y),
        np.clip(Y, -1, 1),
    ),
    "censored by data": (
        lambda mu, x, y: pm.Censored("o", pm.Exponential.dist(pt.exp(mu)), lower=None, upper=pt.abs(y), observed=y),
        POSITIVE,
    ),
    "truncated": (lambda mu, x, y: pm.Truncated("o", pm.Normal.dist(mu, scale()), lower=-5, upper=5, observed=y), Y),
    "skew": (lambda mu, x, y: pm.SkewNormal("o", mu=mu, sigma=scale(), alpha=theta(mu), observed=y), Y),
    "horseshoe": (lambda mu, x, y: pm.Normal("o", x * theta(mu) * pm.HalfCauchy("l", 1), 1, observed=y), Y),
    "random walk": (
        lambda mu, x, y: pm.Normal(
            "o", pm.GaussianRandomWalk("g", mu=mu, sigma=1, init_dist=pm.Normal.dist(), shape=30), 1, observed=y
        ),
        Y,
    ),
    "size of a positive": (lambda mu, x, y: pm.Normal("o", mu, pt.abs(pt.softplus(theta(mu)) * 2.0), observed=y), Y),
    "switch on data": (lambda mu, x, y: pm.Normal("o", pt.switch(x > 0, theta(mu), mu), 1, observed=y), Y),
    "flat and local": (lambda mu, x, y: pm.Normal("o", pm.Flat("flat") + mu, scale(), observed=y), Y),
    "Huber": (huber, Y),
}
KINKED: dict[str, tuple[Body, Any]] = {
    "lasso": (lambda mu, x, y: pm.Normal("o", pm.Laplace("beta", mu, 1), 1, observed=y), Y),
    "Laplace": (lambda mu, x, y: pm.Laplace("o", theta(mu), scale(), observed=y), Y),
    "asymmetric": (lambda mu, x, y: pm.AsymmetricLaplace("o", q=0.3, b=scale(), mu=mu * x, observed=y), Y),
    "triangular": (lambda mu, x, y: pm.Triangular("o", lower=-10, c=theta(mu), upper=10, observed=y), Y),
    "triangular prior": (
        lambda mu, x, y: pm.Normal("o", mu + pm.Triangular("t", lower=0, c=0.3, upper=1), 1, observed=y),
        Y,
    ),
    "uniform": (lambda mu, x, y: pm.Uniform("o", lower=-5, upper=pt.exp(mu), observed=y), Y / 5),
    "bent line": (lambda mu, x, y: pm.Normal("o", pt.maximum(x - theta(mu), 0), 1, observed=y), Y),
    "far change": (far_change, Y),
    "change point": (lambda mu, x, y: pm.Normal("o", pt.switch(x < theta(mu), mu, 0.0), 1, observed=y), Y),
    "step": (lambda mu, x, y: pm.Normal("o", mu * (theta(mu) > 0), 1, observed=y), Y),
    "clip": (lambda mu, x, y: pm.Normal("o", pt.clip(theta(mu), -1, 1), 1, observed=y), Y),
    "by hand": (lambda mu, x, y: pm.Potential("o", -pt.sum(pt.abs(y - theta(mu)))), Y),
    "check loss": (lambda mu, x, y: pm.Potential("o", -pt.sum(pt.maximum(0.3 * (y - mu), 0.7 * (mu - y)))), Y),
    "largest": (lambda mu, x, y: pm.Normal("o", pt.max(pm.Normal("v", mu, 1, shape=3)), 1, observed=y), Y),
    "sorted": (lambda mu, x, y: pm.Normal("o", pt.sort(pm.Normal("v", mu, 1, shape=3))[0], 1, observed=y), Y),
    "floor": (lambda mu, x, y: pm.Normal("o", pt.floor(theta(mu)), 1, observed=y), Y),
    "sign": (lambda mu, x, y: pm.Normal("o", pt.sign(theta(mu)), 1, observed=y), Y),
    "edge": (lambda mu, x, y: pm.Normal("o", mu + pm.HalfNormal("h", 1, default_transform=None), 1, observed=y), Y),
}


def kink_of(body: Body, y: Any) -> str | None:
    def build(x: Any, y: Any) -> Any:
        with pm.Model() as model:
            body(pm.Normal("mu", 0, 2), pm.Data("x", x), pm.Data("y", y))
        return model

    data = {"x": X, "y": y}
    template = template_of(Declared(build, ("mu",)), "a", data)
    graph = template.graph
    arrays = _checks.containers("a", template.parts, data)
    initial = template.start(*arrays)
    shapes = (np.asarray(np.shape(initial[1 + place])) for place in graph.free_shapes)
    inputs = (*arrays, *shapes)
    kept: list[Any] = []

    def density(x: Any) -> Any:
        if not kept:
            gradient = pt.grad(graph.logp, graph.x, disconnected_inputs="ignore")
            output = pt.join(0, graph.logp[None], gradient)
            kept.append(interpreted.python_function([graph.x, *graph.inputs], output))
        return kept[0](x, *inputs)

    start = np.concatenate([np.ravel(value).astype(float) for value in initial])
    return find_kink(graph, inputs, density, lambda: points(template.parts, start))


@pytest.mark.parametrize("name", slow_but(SMOOTH, *(name for name in SMOOTH if name != "LKJ")))
def test_smooth_models_are_not_accused(name: str) -> None:
    assert kink_of(*SMOOTH[name]) is None


@pytest.mark.parametrize("name", KINKED)
def test_kinks_and_jumps_are_found(name: str) -> None:
    assert kink_of(*KINKED[name]) is not None


def test_a_fit_by_laplace_approximations_is_refused_and_says_what_kinks() -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            y = pm.Data("y", y)
            pm.Normal("o", pt.clip(pm.Normal("mu", 0, 1), -1, 1), 1, observed=y)
        return model

    model, clients = FederatedModel(build, ["mu"]), {"a": {"y": Y}}
    for local in (fedppl.local.NestedLaplace(), fedppl.local.Laplace()):
        with pytest.raises(fedppl.DeclarationError, match=r"a clip.*NUTS\(\)"):
            fedppl.fit(model, clients, fedppl.EP(local=local), progressbar=False)
