"""What is kept of a declaration is found by what it declares, and by no less than all of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from scipy import special, stats

import fedppl
from fedppl import FederatedModel
from fedppl.model import graph as graphs
from fedppl.model import interpreted
from fedppl.model.template import Declared, compilations, content_of, made_of, parts_of
from tests.support.markers import slow_but

Y = np.array([0.3, -0.2, 1.1, 0.4])
READ: dict[str, Any] = {"sd": 2.0, "list": [1.0, 2.0]}


def builder(**changed: Any) -> Callable[..., Any]:
    """A model of one local and two shared variables, of which any part can be another."""
    of = {
        "mean": 0.0,
        "sd": 2.0,
        "scale": lambda: pm.HalfNormal("tau", 1.0),
        "initval": None,
        "transform": pm.distributions.transforms.Interval(0.0, 9.0),
        "labels": ["a", "b"],
        "dim": "arm",
        "local": "theta",
        "noise": 1.0,
        "twice": lambda theta: 2.0 * theta,
        "outcome": pm.Normal,
        "more": lambda: None,
    } | changed

    def build(y: Any) -> Any:
        with pm.Model(coords={of["dim"]: of["labels"]}) as model:
            data = pm.Data("y", y)
            mu = pm.Normal("mu", of["mean"], of["sd"], initval=of["initval"], dims=of["dim"])
            tau = of["scale"]()
            bounded = pm.TruncatedNormal("bounded", 1.0, 1.0, lower=0.0, upper=9.0, default_transform=of["transform"])
            theta = pm.Normal(of["local"], mu.sum() + bounded, tau)
            pm.Deterministic("twice", of["twice"](theta))
            of["more"]()
            of["outcome"]("obs", theta, of["noise"], observed=data)
        return model

    return build


def content(build: Callable[..., Any], y: Any = Y) -> tuple[Any, ...] | None:
    return content_of(parts_of(Declared(build, ("mu",)), "a", {"y": np.asarray(y)}))


def test_equal_declarations_on_other_rows_are_one() -> None:
    assert content(builder()) == content(builder()) == content(builder(), Y[:2] + 1.0) is not None
    assert made_of(content(builder())) is made_of(content(builder(), Y[1:]))


@pytest.mark.parametrize(
    "changed",
    [
        {"mean": 1e-16},
        {"mean": -0.0},
        {"mean": 0},
        {"sd": 2.0 + 4e-16},
        {"mean": np.zeros(2)},
        {"scale": lambda: pm.HalfNormal("tau", 2.0)},
        {"scale": lambda: pm.HalfCauchy("tau", 1.0)},
        {"scale": lambda: pm.HalfNormal("tau", 1.0, default_transform=None)},
        {"scale": lambda: pt.constant(1.0)},
        {"initval": np.array([0.1, 0.2])},
        {"transform": pm.distributions.transforms.Interval(0.0, 10.0)},
        {"transform": pm.distributions.transforms.log},
        {"labels": ["a", "b", "c"]},
        {"dim": "limb"},
        {"local": "level"},
        {"noise": 1.5},
        {"noise": float(Y.mean())},
        {"twice": lambda theta: 3.0 * theta},
        {"twice": lambda theta: theta},
        {"outcome": pm.Laplace},
        {"more": lambda: pm.Potential("soft", pt.constant(0.1) * pm.modelcontext(None)["mu"].sum())},
        {"more": lambda: setattr(pm.modelcontext(None), "check_bounds", False)},
    ],
)
def test_what_differs_in_anything_the_model_sees_is_another(changed: dict[str, Any]) -> None:
    other = content(builder(**changed))
    assert other is not None and other != content(builder())


def test_what_a_builder_reads_elsewhere_is_seen_where_it_changes() -> None:
    def reads(y: Any) -> Any:
        return builder(sd=READ["sd"], mean=np.array(READ["list"]))(y)

    held = [1.0]
    closed = lambda y: builder(noise=held[0])(y)  # noqa: E731
    before = content(reads), content(closed)
    READ["list"][0], held[0] = 1.5, 2.0
    listed = content(reads)
    READ["sd"] = 3.0
    assert len({*before, listed, content(reads), content(closed)}) == 5


def test_other_shared_names_and_types_of_data_are_others() -> None:
    parts = [
        parts_of(Declared(builder(), shared), "a", {"y": y})
        for shared, y in ((("mu",), Y), (("mu", "tau"), Y), (("tau", "mu"), Y), (("mu",), np.array([1, 2])))
    ]
    assert len({content_of(one) for one in parts} - {None}) == 4


class Plus(pytensor.graph.op.Op):  # type: ignore[misc]
    """Adds what no equality tells."""

    __props__ = ()
    itypes, otypes = [pt.dscalar], [pt.dscalar]  # noqa: RUF012

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        outputs[0][0] = inputs[0] + READ["sd"]


class Shifted(type(pm.distributions.transforms.log)):  # type: ignore[misc]
    """A transform of the user's own."""


@pytest.mark.parametrize(
    "changed",
    [
        {"twice": Plus()},
        {"transform": Shifted()},
        {"transform": pm.distributions.transforms.Interval(bounds_fn=lambda *_: (0.0, READ["sd"] + 9.0))},
        {"more": lambda: pm.CustomDist("own", 0.0, logp=lambda x, mu: -((x - mu) ** 2))},
        {"twice": lambda theta: pytensor.gradient.grad_clip(theta, -1.0, 1.0)},
        {"initval": "prior", "more": lambda: pm.Normal("n", 0, 1, initval=pt.constant(1.0) * 2)},
        {"outcome": lambda name, mu, sd, observed: pm.Normal(name, mu, sd, observed=Y)},
    ],
)
def test_of_what_cannot_be_told_nothing_is_kept(changed: dict[str, Any]) -> None:
    parts = parts_of(Declared(builder(**changed), ("mu",)), "a", {"y": Y})
    assert content_of(parts) is None
    assert made_of(content_of(parts)) is not made_of(content_of(parts))


def trial(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    site, x = np.repeat(np.arange(4), 30), rng.normal(size=120)
    y = rng.random(120) < 1 / (1 + np.exp(-x - rng.normal(size=4)[site]))
    return pd.DataFrame({"site": site, "x": x, "healed": y.astype(int)})


def fitted(frame: pd.DataFrame, sd: float = 2.0, seed: int = 1) -> fedppl.Fit:
    model = fedppl.formula(
        "healed ~ x + (1 | site)", family="bernoulli", priors={"x": fedppl.Prior("Normal", mu=0, sigma=sd)}
    )
    return fedppl.fit(model, frame, by="site", progressbar=False, random_seed=seed)


@pytest.mark.parametrize("family", slow_but(["gaussian", "bernoulli"], "gaussian"))
def test_the_density_without_its_gradient_is_compiled_where_own_variables_are_integrated(family: str) -> None:
    """Those of a Gaussian outcome are Gaussian, and Laplace's approximation is exact."""
    model = fedppl.formula(
        "healed ~ x + (1 | site)", family=family, priors={"x": fedppl.Prior("Normal", mu=0, sigma=2.5)}
    )
    fit = fedppl.fit(model, trial(0), by="site", progressbar=False, random_seed=1)
    client, before = fit.clients["0"], compilations()
    assert callable(client.value_kernel) and compilations() - before == (1 if family == "gaussian" else 0)
    x = np.random.default_rng(0).normal(size=client.shared_size + client.local_size)
    both, alone = client.kernel(x, *client.packed), client.value_kernel(x, *client.packed)
    assert len(both) == 1 + len(x) and len(alone) == 1
    np.testing.assert_allclose(alone[0], both[0], rtol=1e-13)


def test_a_second_fit_makes_no_graph_and_its_numbers_are_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = trial(0)
    first = fitted(frame).summary()
    compiled = compilations()
    made: list[str] = []

    def counted(module: Any, name: str) -> None:
        make = getattr(module, name)

        def count(*arguments: Any, **named: Any) -> Any:
            made.append(name)
            return make(*arguments, **named)

        monkeypatch.setattr(module, name, count)

    for name in ("site_graph", "prior_graph", "initial_graphs", "constrained_graph"):
        counted(graphs, name)
    counted(pytensor, "function")
    pd.testing.assert_frame_equal(fitted(frame).summary(), first, check_exact=True)
    assert not fitted(frame, seed=2).summary().equals(first)
    assert not made and compilations() == compiled
    other = fitted(frame, sd=0.1).summary()  # of another prior the graph alone is made anew
    assert "prior_graph" in made and compilations() == compiled
    assert other.loc["x", "mean"] < first.loc["x", "mean"]


def test_other_rows_start_and_are_checked_on_their_own() -> None:
    def build(y: Any) -> Any:
        with pm.Model() as model:
            theta = pm.Normal("theta", pm.Normal("mu", 0, 10), 1, initval=float(np.mean(y)))
            pm.Poisson("obs", pm.math.exp(theta), observed=pm.Data("y", y))
        return model

    one, other = ({"a": {"y": np.array([1, n])}} for n in (1, 5))
    enrolled = [FederatedModel(build, ["mu"]).enrol(data, kernel=False)["a"] for data in (one, other)]
    assert [float(client.initial[0]) for client in enrolled] == [1.0, 3.0]
    with pytest.raises(fedppl.DataError, match="starting point"):
        FederatedModel(build, ["mu"]).enrol({"a": {"y": np.array([1, -1])}}, kernel=False)


def test_priors_that_differ_in_their_numbers_alone_have_the_same_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With those numbers as arguments: densities and gradients are those of SciPy."""
    built: list[Any] = []
    batched = interpreted.batched
    monkeypatch.setattr(interpreted, "batched", lambda *all_: built.append(all_) or batched(*all_))

    def prior(sd: float, scale: float) -> Any:
        def build(y: Any) -> pm.Model:
            with pm.Model() as model:
                y = pm.Data("y", y)
                mean, spread = pm.Normal("mean", 0.5, sd, shape=2), pm.HalfNormal("spread", scale)
                pm.Normal("obs", mean.sum(), spread, observed=y)
            return model

        client = FederatedModel(build, ["mean", "spread"]).enrol({"a": {"y": np.arange(3.0)}}, kernel=False)["a"]
        return client.prior

    phi = np.random.default_rng(0).normal(size=(40, 3))
    for sd, scale in [(1.5, 2.0), (0.3, 7.0)]:
        before = len(built)
        own = prior(sd, scale)
        exact = stats.norm.logpdf(phi[:, :2], 0.5, sd).sum(axis=1) + phi[:, 2]
        exact += stats.halfnorm.logpdf(np.exp(phi[:, 2]), scale=scale)
        np.testing.assert_allclose(own.log_density(phi), exact, rtol=1e-12)
        slopes = np.column_stack([(0.5 - phi[:, :2]) / sd**2, 1.0 - np.exp(2.0 * phi[:, 2]) / scale**2])
        np.testing.assert_allclose(own.gradients(phi), slopes, rtol=1e-10)
    assert len(built) == before


# Of the value of a variable in its own coordinate x: log p(x) by SciPy, with the Jacobian of its transform
_FAR: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], list[float]]] = {
    "beta": (
        lambda: pm.Beta("a", 0.1, 0.1),
        lambda x: -0.1 * (np.logaddexp(0, -x) + np.logaddexp(0, x)) - special.betaln(0.1, 0.1),
        [-45.0, 1.0, 45.0],
    ),
    "two modes": (
        lambda: pm.NormalMixture("a", [0.5, 0.5], mu=[-1, 1], sigma=[0.1, 0.1]),
        lambda x: np.logaddexp(*(stats.norm.logpdf(x, mean, 0.1) for mean in (-1, 1))) - np.log(2),
        [-8.0, 0.0, 8.0],
    ),
}


@pytest.mark.parametrize("name", _FAR)
def test_priors_have_their_density_and_gradient_far_out(name: str) -> None:
    """Where they are computed as they are written, the one is -inf and the other NaN."""
    declare, truth, at = _FAR[name]

    def build(y: Any) -> pm.Model:
        with pm.Model() as model:
            pm.Normal("o", declare(), 1, observed=pm.Data("y", y))
        return model

    prior = FederatedModel(build, ["a"]).enrol({"a": {"y": np.arange(3.0)}}, kernel=False)["a"].prior
    phi = np.array(at)[:, None]
    for some in (phi, np.tile(phi, (20, 1))):  # of few points and of many
        x = some[:, 0]
        assert_allclose(prior.log_density(some), truth(x), rtol=1e-6)
        slope = (truth(x + 1e-5) - truth(x - 1e-5)) / 2e-5
        assert_allclose(prior.gradients(some)[:, 0], slope, rtol=1e-4, atol=1e-4)


def test_a_prior_without_a_gradient_is_refused() -> None:
    def build(y: Any) -> pm.Model:
        with pm.Model() as model:
            pm.Normal("o", 0, pm.PolyaGamma("a", 1, 0), observed=pm.Data("y", y))
        return model

    with pytest.raises(fedppl.DeclarationError, match="gradient"):
        FederatedModel(build, ["a"]).enrol({"a": {"y": np.arange(3.0)}}, kernel=False)


@pytest.mark.parametrize("shared", ["half normal", "bounded"])
def test_a_client_s_density_is_kept_where_numbers_of_the_shared_prior_change(shared: str) -> None:
    """Unless it reads them: a bound is a number of the prior and of the transform by which the density is computed."""

    def client(scale: float) -> Any:
        def build(y: Any) -> pm.Model:
            with pm.Model() as model:
                sd = pm.HalfNormal("sd", scale) if shared == "half normal" else pm.Uniform("sd", 0, scale)
                pm.Normal("obs", pm.Normal("mu", 0, scale), sd, observed=pm.Data("y", y))
            return model

        return FederatedModel(build, ["sd", "mu"]).enrol({"a": {"y": Y}}, kernel=False)["a"]

    one, other = client(2.0), client(5.0)
    assert (one.template.graph is other.template.graph) == (shared == "half normal")
    for of, scale in ((one, 2.0), (other, 5.0)):
        sd = np.exp(0.3) if shared == "half normal" else scale * special.expit(0.3)
        density = of.log_density(np.array([0.3, 0.7]), np.zeros(0))
        assert density == pytest.approx(stats.norm.logpdf(Y, 0.7, sd).sum(), rel=1e-12)


def test_a_warm_up_fits_with_and_without_a_scale_of_rows_by_both_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[frozenset[str], str]] = []

    def fit(model: Any, clients: Any, algorithm: Any, **settings: Any) -> Any:
        client = next(iter(model.enrol(clients, kernel=False).values()))
        asked.append((frozenset(variable.name for variable in client.local), algorithm.name))
        return SimpleNamespace(client=lambda name, draws: None)

    monkeypatch.setattr("fedppl.front.fit", fit)
    assert fedppl.warm_up() > 0
    assert set(asked) == {
        (frozenset(local), name) for local in ({"slope", "sigma"}, {"slope"}) for name in ("Sums", "EP")
    }


@pytest.mark.slow
def test_a_warm_up_ends() -> None:
    assert fedppl.warm_up() > 0
