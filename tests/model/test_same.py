"""Two builds of one model: what PyTensor composes of graphs, and shapes that it infers in another order."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.distributions import transforms
from pytensor.compile.builders import OpFromGraph

from fedppl import FederatedModel
from fedppl.model import graph as _graph
from fedppl.model import same as _same
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.types import DataError, DeclarationError


def process(X: Any, y: Any) -> pm.Model:
    """A Gaussian process: a covariance over the rows."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        length, sigma = pm.InverseGamma("length", 3, 3), pm.HalfNormal("sigma", 1)
        gp = pm.gp.Marginal(cov_func=pm.gp.cov.ExpQuad(1, ls=length))
        gp.marginal_likelihood("obs", X=X, y=y, sigma=sigma)
    return model


def diagonal(X: Any, y: Any) -> pm.Model:
    """`pt.diag` over the rows and over parameters, and `kron`."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        length, sigma = pm.Normal("length"), pm.HalfNormal("sigma", 1)
        theta = pm.MvNormal("theta", pt.zeros(2), cov=pt.diag(pt.stack([1.0 + length**2, 1.0])), shape=2)
        scale = pt.linalg.kron(pt.eye(2), pt.stack([[sigma]]))[0, 0]
        pm.MvNormal("obs", theta[0] + theta[1] * X[:, 0], cov=pt.diag(scale**2 * pt.ones_like(y)), observed=y)
    return model


@pytest.mark.parametrize("builder", [process, diagonal])
@pytest.mark.slow
def test_builds_of_composed_operations_are_one_model(builder: Any, rng: np.random.Generator) -> None:
    data = {f"c{k}": {"X": rng.normal(size=(5 + k, 1)), "y": rng.normal(size=5 + k)} for k in range(4)}
    clients = FederatedModel(builder, ["length", "sigma"]).enrol(data)
    assert len({id(client.template) for client in clients.values()}) == 1
    x = np.full(clients["c0"].shared_size + clients["c0"].local_size, 0.3)
    for client_id, client in clients.items():
        model = builder(**data[client_id])
        point = {v.name: [0.3, 0.3] if v.name == "theta" else 0.3 for v in model.value_vars}
        prior = sum(client.prior.log_density(x[None, : client.shared_size]))
        pooled = float(model.compile_logp(mode=PYTHON_MODE)({**model.initial_point(), **point}))
        assert client.log_density(x[: client.shared_size], x[client.shared_size :]) + prior == pytest.approx(pooled)


@pytest.mark.parametrize("builder", [process, diagonal])
def test_a_builder_that_draws_numbers_is_still_refused(builder: Any, rng: np.random.Generator) -> None:
    def drawn(X: Any, y: Any) -> pm.Model:
        with builder(X, y) as model:
            pm.Potential("drawn", np.random.default_rng().normal() * model["length"])
        return model

    with pytest.raises(DeclarationError, match="called twice on the same data"):
        FederatedModel(drawn, ["length", "sigma"]).enrol({"a": {"X": rng.normal(size=(5, 1)), "y": rng.normal(size=5)}})


def test_values_decide_where_they_can_be_computed() -> None:
    def square(x: Any, y: Any) -> float:
        return float(np.sum(x**2) * y)

    examples = [(2, (1.0,)), (3, (2.0,))]
    assert _same.same_values(square, lambda x, y: float(x @ x * y), examples)
    assert not _same.same_values(square, lambda x, y: float(x @ x * y + (y > 1) * 1e-6), examples)
    assert not _same.same_values(lambda x, y: np.nan, lambda x, y: np.nan, examples)  # equal, and nothing was seen
    with_errors = lambda x, y: square(x, y) if len(x) == 2 else np.linalg.cholesky(np.full((2, 2), -1.0))  # noqa: E731
    assert _same.same_values(with_errors, square, examples)


@pytest.mark.slow
def test_a_number_of_one_client_that_shows_at_another_only_is_found() -> None:
    """A limit baked into the graph matters to clients that reach it, at points that may be far off."""

    def censored(y: Any, limit: Any) -> pm.Model:
        with pm.Model() as model:
            data = pm.Data("y", y)
            pm.Data("limit", limit)
            mu, sigma = pm.Normal("mu"), pm.HalfNormal("sigma", 1)
            latent = pm.Normal.dist(mu * pt.ones_like(data), sigma)
            pm.Censored("obs", latent, lower=None, upper=float(limit[0]), observed=data)
        return model

    data = {"a": ([0.1, 0.2], 5.0), "b": ([0.3, 0.1, 0.4], 6.0), "c": ([0.5, 1.0], 1.0)}
    arrays = {k: {"y": np.array(y), "limit": np.array([limit])} for k, (y, limit) in data.items()}
    with pytest.warns(UserWarning, match="bakes a client's data"):
        clients = FederatedModel(censored, ["mu", "sigma"]).enrol(arrays)
    for client_id, client in clients.items():
        built = censored(**arrays[client_id])
        expected = built.compile_logp(vars=built.observed_RVs, mode=PYTHON_MODE)({"mu": 0.2, "sigma_log__": 0.3})
        assert client.log_density(np.array([0.2, 0.3]), np.zeros(0)) == pytest.approx(float(expected))


@pytest.mark.slow
def test_lengths_that_do_not_fit_name_the_client(rng: np.random.Generator) -> None:
    """PyTensor asserts that a covariance and its outcomes have one length."""
    data = {k: {"X": rng.normal(size=(4, 1)), "y": rng.normal(size=3 if k == "b" else 4)} for k in ("a", "b")}
    with pytest.raises(DataError, match="client 'b'"):
        FederatedModel(process, ["length", "sigma"]).enrol(data)


MUTANTS: dict[str, dict[str, Any]] = {
    "a number of the shared prior": {"sd": 2.0},
    "a number of the likelihood": {"scale": 1.1},
    "a family": {"family": pm.Logistic},
    "a transform's bound": {"upper": 3.0},
    "another transform": {"transform": pm.distributions.transforms.log},
    "a shape": {"locals": 3},
    "a constant of the data": {"shift": np.arange(2.0)},
    "a potential": {"weight": 0.5},
    "a deterministic": {"power": 3},
    "a density of its own": {"own": 2.0},
}


def declared(
    y: Any,
    *,
    sd: float = 1.0,
    scale: float = 1.0,
    family: Any = pm.Normal,
    upper: float = 4.0,
    transform: Any = None,
    locals: int = 2,
    shift: Any = 0.0,
    weight: float = 0.0,
    power: int = 2,
    own: float | None = None,
) -> pm.Model:
    with pm.Model() as model:
        data = pm.Data("y", y)
        mu = pm.Normal("mu", 0, sd)
        bounded = pm.distributions.transforms.Interval(0.0, upper)
        tau = pm.Gamma("tau", 2, 1, default_transform=transform or bounded)
        theta = pm.Normal("theta", mu, tau, shape=locals)
        pm.Deterministic("power", theta**power)
        if weight:
            pm.Potential("potential", -weight * mu**2)
        if own:
            pm.CustomDist("own", mu, logp=lambda value, mu: -own * (value - mu) ** 2)
        family("obs", theta.sum() + pt.sum(shift), scale, observed=data)
    return model


def parts(**changes: Any) -> _graph.Parts:
    return _graph.dissect(declared(np.zeros(3), **changes), ["mu", "tau"])


def test_a_model_built_twice_is_seen_to_be_one() -> None:
    assert _same.surely_same_model(parts(), parts())
    assert _same.surely_same_model(parts(weight=0.5, upper=1.0), parts(weight=0.5, upper=1.0))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_model_with_one_difference_is_not_taken_for_the_same(name: str) -> None:
    assert not _same.surely_same_model(parts(), parts(**MUTANTS[name]))
    assert not _same.surely_same_model(parts(**MUTANTS[name]), parts())


def same_prior(a: _graph.Parts, b: _graph.Parts) -> bool:
    shared, _ = _graph.variables(a, [np.zeros(())] * len((*a.shared, *a.local)))
    found = _same.same_prior(a, b, shared)
    assert found == _same.same_prior(b, a, shared)
    return found


PRIORS = ["a number of the shared prior", "a transform's bound", "another transform", "a potential"]


@pytest.mark.parametrize("name", MUTANTS)
def test_priors_are_told_apart_by_what_is_shared_alone(name: str) -> None:
    assert same_prior(parts(), parts(**MUTANTS[name])) == (name not in PRIORS)


def test_priors_are_told_apart_by_a_number_in_a_potential() -> None:
    assert same_prior(parts(weight=0.5), parts(weight=0.5)) and not same_prior(parts(weight=0.5), parts(weight=0.6))


@pytest.mark.parametrize("as_data", [False, True])
def test_a_shared_prior_that_stands_on_what_is_observed_is_refused(as_data: bool) -> None:
    def declare(z: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            above = pm.Normal("above", 0, 1, observed=pm.Data("z", z) if as_data else float(np.mean(z)))
            pm.Normal("obs", pm.Normal("mu", above, 1), 1, observed=pm.Data("y", y))
        return model

    clients = {name: {"z": np.full(1, z), "y": np.zeros(3)} for name, z in (("a", 5.0), ("b", -7.0))}
    for some in (clients, {"a": clients["a"]}):
        with pytest.raises(DeclarationError, match="'mu' depends on (observed variable 'above'|client data 'z')"):
            FederatedModel(declare, ["mu"]).enrol(some)


def test_densities_of_ones_own_are_left_to_the_slow_comparison() -> None:
    assert not _same.surely_same_model(parts(own=1.0), parts(own=2.0))


def scaled(y: Any) -> pm.Model:
    """A distribution of one's own whose density, and not whose draws, holds a number of the client's."""
    sd = float(np.std(y))
    with pm.Model() as model:
        y = pm.Data("y", y)
        pm.CustomDist(
            "obs",
            pm.Normal("mu", 0, 1),
            dist=lambda mu, size: pm.Normal.dist(mu, 1.0, size=size),
            logp=lambda value, mu: -0.5 * ((value - mu) / sd) ** 2 - np.log(sd),
            observed=y,
        )
    return model


def test_a_density_that_holds_data_is_each_clients_own(rng: np.random.Generator) -> None:
    data = {"a": {"y": rng.normal(size=20)}, "b": {"y": 10 * rng.normal(size=20)}}
    with pytest.warns(UserWarning, match="bakes a client's data"):
        clients = FederatedModel(scaled, ["mu"]).enrol(data)
    for name, client in clients.items():
        y = data[name]["y"]
        expected = np.sum(-0.5 * ((y - 0.3) / y.std()) ** 2 - np.log(y.std()))
        assert client.kernel(np.array([0.3]), *client.packed)[0] == pytest.approx(expected)


# PyTensor 3 calls it otherwise.
OVERRIDE = "pullback" if "pullback" in inspect.signature(OpFromGraph.__init__).parameters else "lop_overrides"


def overridden(slope: float | None) -> Any:
    """tanh, and what says that its gradient is another."""

    def declare(y: Any) -> pm.Model:
        x = pt.vector("x")
        kind = {} if slope is None else {OVERRIDE: lambda ins, outs, given: [0.0 * given[0] + slope]}
        with pm.Model() as model:
            mu = pm.Normal("mu", shape=2)
            pm.Potential("near", (pm.Data("y", y) * OpFromGraph([x], [pt.tanh(x)], **kind)(mu)).sum())
        return model

    return declare


def test_gradients_that_are_declared_are_not_taken_for_others() -> None:
    found = []
    for slope in (None, 7.0, 5.0):
        client = FederatedModel(overridden(slope), ["mu"]).enrol({"a": {"y": np.ones(2)}})["a"]
        found.append(client.kernel(np.zeros(2), *client.packed)[1:].tolist())
    assert found == [[1.0, 1.0], [7.0, 7.0], [5.0, 5.0]]


def nested(slope: float) -> Any:
    """The same inside of another operation that is a graph."""
    x, z = pt.vector("x"), pt.vector("z")
    inner = OpFromGraph([x], [pt.tanh(x)], **{OVERRIDE: lambda ins, outs, given: [0.0 * given[0] + slope]})
    return z, OpFromGraph([x], [2.0 * inner(x)])(z)


def test_nor_are_those_inside_of_others() -> None:
    (a, of_a), (b, of_b) = nested(7.0), nested(5.0)
    assert not _same.same_computations([of_a], [of_b], [a], [b])


def test_bounds_of_a_users_function_are_left_to_the_slow_comparison() -> None:
    def parts(most: float) -> Any:
        with pm.Model() as model:
            mu = pm.Uniform("mu", 0, 9, default_transform=transforms.Interval(bounds_fn=lambda *_: (0.0, most)))
            pm.Normal("obs", mu, 1, observed=pm.Data("y", np.zeros(3)))
        return _graph.dissect(model, ["mu"])

    assert not _same.surely_same_model(parts(2.0), parts(2.0))
    shared, _ = _graph.variables(parts(2.0), [np.zeros(())])
    assert _same.same_prior(parts(2.0), parts(2.0), shared)
    assert not _same.same_prior(parts(2.0), parts(5.0), shared)
