"""What networks' algorithms compute is what is declared: changes of a declaration change a fit, or are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from pymc.distributions.transforms import ordered
from scipy.special import expit
from scipy.stats import norm

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import nn  # noqa: E402
from fedppl.model.interpreted import PYTHON_MODE  # noqa: E402
from fedppl.models import fedsi  # noqa: E402
from fedppl.nn import subnet, view  # noqa: E402
from fedppl.nn.functional import call, state_of  # noqa: E402
from fedppl.nn.likelihood import Declared  # noqa: E402
from fedppl.nn.unit import outcomes, outputs  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402
from tests.support import problems  # noqa: E402
from tests.support.markers import slow_but  # noqa: E402

BODY = ("0.weight", "0.bias")
ROWS = 12


class Change(NamedTuple):
    """A declaration of a client: weights of the network, its inputs, and the outcome of its output."""

    outcome: Callable[[Any, Any], Any]  # of the output and the data by name
    values: Callable[[np.random.Generator], dict[str, Any]]  # data beside X, y among them
    outputs: int = 1
    weights: Callable[[Any], Any] = nn.parameters
    inputs: Callable[[Any], Any] = lambda X: X
    shared: tuple[str, ...] = BODY
    refused: str = ""  # in the words of the refusal


def real(rng: np.random.Generator) -> dict[str, Any]:
    return {"y": rng.normal(size=ROWS)}


def counts(rng: np.random.Generator) -> dict[str, Any]:
    return {"y": rng.poisson(2.0, size=ROWS)}


def binary(rng: np.random.Generator) -> dict[str, Any]:
    return {"y": rng.integers(0, 2, size=ROWS)}


def classes(rng: np.random.Generator) -> dict[str, Any]:
    return {"y": np.arange(ROWS) % 3}


def with_column(make: Any, name: str, low: float, high: float) -> Any:
    return lambda rng: {**make(rng), name: rng.uniform(low, high, size=ROWS)}


def normal(mean: Any, sd: Any, data: Any) -> Any:
    return pm.Normal("o", mean, sd, observed=data["y"])


def priors(change: Callable[[str, np.ndarray], Any]) -> Callable[[Any], Any]:
    """Weights of which `change` declares those that it returns, by name and start."""

    def declare(net: Any) -> Any:
        starts = {name: value.detach().double().numpy() for name, value in net.named_parameters()}
        changed = {name: change(name, start) for name, start in starts.items()}
        return {
            name: pm.Normal(name, start, 1.0, shape=start.shape) if changed[name] is None else changed[name]
            for name, start in starts.items()
        }

    return declare


def of(changed: str, build: Callable[[str, np.ndarray], Any]) -> Callable[[Any], Any]:
    return priors(lambda name, start: build(name, start) if name == changed else None)


def hierarchical(net: Any) -> Any:
    scale = pm.HalfNormal("scale")
    return of("2.weight", lambda name, start: pm.Normal(name, start, scale, shape=start.shape))(net)


def penalised(net: Any) -> Any:
    weights = nn.parameters(net)
    pm.Potential("ridge", -(weights["2.weight"] ** 2).sum())
    return weights


def bounded(net: Any) -> Any:
    weights = nn.parameters(net)
    pm.Potential("bound", pm.math.switch(abs(weights["2.weight"]).max() > 3.0, -np.inf, 0.0))
    return weights


def shifted(net: Any) -> Any:
    shift = pm.modelcontext(None)["shift"]
    return {name: value * (1.0 + shift) for name, value in nn.parameters(net).items()}


def doubled(net: Any) -> Any:
    return {name: 2.0 * value for name, value in nn.parameters(net).items()}


def tied(net: Any) -> Any:
    weights = nn.parameters(net)
    return {**weights, "0.bias": weights["0.weight"][:, 0]}


def beside(f: Any, data: Any) -> Any:
    weights = pm.modelcontext(None)
    return pm.Normal("o", f[:, 0] + weights["2.bias"].sum(), 1.0, observed=data["y"])


def twice(f: Any, data: Any) -> Any:
    node = f.owner
    again = node.op(node.inputs[0], -node.inputs[1])
    return pm.Normal("o", f[:, 0] - again[:, 0], 1.0, observed=data["y"])


def two_outcomes(f: Any, data: Any) -> Any:
    pm.Normal("also", f[:, 0], 1.0, observed=1.0 * data["y"])
    return normal(f[:, 0], 1.0, data)


def with_potential(f: Any, data: Any) -> Any:
    pm.Potential("extra", -((data["y"] - f[:, 0]) ** 4).sum())
    return normal(f[:, 0], 1.0, data)


BASE = {
    "real": Change(lambda f, d: normal(f[:, 0], 0.5, d), real),
    "classes": Change(lambda f, d: pm.Categorical("o", logit_p=f, observed=d["y"]), classes, outputs=3),
}
CHANGES = {
    # Outcomes
    "another sd": BASE["real"]._replace(outcome=lambda f, d: normal(f[:, 0], 1.0, d)),
    "an sd by row": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0], d["s"], d), values=with_column(real, "s", 0.5, 2.0)
    ),
    "an sd of the client": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0], d["s"], d),
        values=lambda rng: {**real(rng), "s": np.array(rng.uniform(0.5, 2))},
    ),
    "an unknown sd of the client": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0], pm.HalfNormal("sd"), d),
        refused=r"\['sd'\] of the likelihood are unknown and local",
    ),
    "an unknown sd with a prior on the log scale": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0], pm.LogNormal("sd", -1.0, 1.0), d), shared=(*BODY, "sd")
    ),
    "an unknown sd with another prior": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0], pm.HalfNormal("sd"), d),
        shared=(*BODY, "sd"),
        refused="pm.LogNormal for a scale",
    ),
    "an unknown sd that is shared": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0], pm.math.exp(pm.Normal("log_sd")), d), shared=(*BODY, "log_sd")
    ),
    "an sd that the network gives": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0], pm.math.exp(f[:, 1]), d), outputs=2
    ),
    "heavy tails": BASE["real"]._replace(
        outcome=lambda f, d: pm.StudentT("o", nu=3, mu=f[:, 0], sigma=0.5, observed=d["y"])
    ),
    "a kink": BASE["real"]._replace(outcome=lambda f, d: pm.Laplace("o", f[:, 0], 0.5, observed=d["y"])),
    "a clipped mean": BASE["real"]._replace(outcome=lambda f, d: normal(pm.math.clip(f[:, 0], -0.2, 0.2), 0.5, d)),
    "a scaled mean": BASE["real"]._replace(outcome=lambda f, d: normal(3.0 * f[:, 0], 0.5, d)),
    "an offset": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0] + d["z"], 0.5, d), values=with_column(real, "z", -1.0, 1.0)
    ),
    "a transformed outcome": BASE["real"]._replace(
        outcome=lambda f, d: pm.Normal("o", f[:, 0], 0.5, observed=2.0 * d["y"])
    ),
    "censoring": BASE["real"]._replace(
        outcome=lambda f, d: pm.Censored("o", pm.Normal.dist(f[:, 0], 0.5), None, 0.5, observed=d["y"]),
        values=lambda rng: {"y": np.minimum(rng.normal(size=ROWS), 0.5)},
    ),
    "truncation": BASE["real"]._replace(
        outcome=lambda f, d: pm.Truncated("o", pm.Normal.dist(f[:, 0], 0.5), upper=3.0, observed=d["y"])
    ),
    "a mixture": BASE["real"]._replace(
        outcome=lambda f, d: pm.NormalMixture("o", w=[0.7, 0.3], mu=f, sigma=0.5, observed=d["y"]), outputs=2
    ),
    "counts": Change(lambda f, d: pm.Poisson("o", pm.math.exp(f[:, 0]), observed=d["y"]), counts),
    "counts with an exposure": Change(
        lambda f, d: pm.Poisson("o", d["e"] * pm.math.exp(f[:, 0]), observed=d["y"]), with_column(counts, "e", 0.5, 3.0)
    ),
    "overdispersed counts": Change(
        lambda f, d: pm.NegativeBinomial("o", mu=pm.math.exp(f[:, 0]), alpha=2.0, observed=d["y"]), counts
    ),
    "binary": Change(lambda f, d: pm.Bernoulli("o", logit_p=f[:, 0], observed=d["y"]), binary),
    "binary, probit": Change(lambda f, d: pm.Bernoulli("o", p=pm.math.invprobit(f[:, 0]), observed=d["y"]), binary),
    "ordered": Change(
        lambda f, d: pm.OrderedLogistic("o", eta=f[:, 0], cutpoints=[-1.0, 1.0], observed=d["y"]), classes
    ),
    "a temperature": BASE["classes"]._replace(
        outcome=lambda f, d: pm.Categorical("o", logit_p=f / 2.0, observed=d["y"])
    ),
    "other logits": BASE["classes"]._replace(
        outcome=lambda f, d: pm.Categorical("o", logit_p=f + np.array([0.0, 1.0, -1.0]), observed=d["y"])
    ),
    "some of the outputs": BASE["classes"]._replace(
        outcome=lambda f, d: pm.Categorical("o", logit_p=f[:, :3], observed=d["y"]), outputs=4
    ),
    "smoothed labels": BASE["classes"]._replace(
        outcome=lambda f, d: pm.Categorical("o", p=0.8 * pm.math.softmax(f, axis=-1) + 0.2 / 3, observed=d["y"])
    ),
    # Inputs and priors
    "scaled inputs": BASE["real"]._replace(inputs=lambda X: X / 3.0),
    "a narrow prior of the head": BASE["real"]._replace(
        weights=lambda net: nn.parameters(net, sigma={"0.weight": 1.0, "0.bias": 1.0, "2.weight": 0.1, "2.bias": 0.1})
    ),
    "a narrow prior of what is shared": BASE["real"]._replace(
        weights=lambda net: nn.parameters(net, sigma={"0.weight": 0.1, "0.bias": 0.1, "2.weight": 1.0, "2.bias": 1.0})
    ),
    "another mean of the head": BASE["real"]._replace(
        weights=of("2.weight", lambda name, start: pm.Normal(name, start + 1.0, 1.0, shape=start.shape))
    ),
    "another mean of what is shared": BASE["real"]._replace(
        weights=of("0.weight", lambda name, start: pm.Normal(name, start + 1.0, 1.0, shape=start.shape))
    ),
    "a prior of the head with a kink": BASE["real"]._replace(
        weights=of("2.weight", lambda name, start: pm.Laplace(name, start, 0.1, shape=start.shape))
    ),
    "a prior of the head with heavy tails": BASE["real"]._replace(
        weights=of("2.weight", lambda name, start: pm.StudentT(name, nu=2, mu=start, sigma=0.1, shape=start.shape))
    ),
    "a prior of what is shared with a kink": BASE["real"]._replace(
        weights=of("0.weight", lambda name, start: pm.Laplace(name, start, 1.0, shape=start.shape)),
        refused="'0.weight' .laplace. is not one of independent normals",
    ),
    "a scale of a prior": BASE["real"]._replace(
        weights=hierarchical, refused=r"\['scale'\] are neither weights of the network nor part of the likelihood"
    ),
    "a penalty": BASE["real"]._replace(weights=penalised, refused=r"\['ridge'\] are pm.Potential.*pm.CustomDist"),
    "twice the weights": BASE["real"]._replace(weights=doubled, refused="the declared log density.*parametrize"),
    "tied weights": BASE["real"]._replace(weights=tied, refused="the declared log density.*parametrize"),
    "weights beside the network": BASE["real"]._replace(
        outcome=beside, refused=r"reads the weights \['2.bias'\] beside"
    ),
    "the network twice": BASE["real"]._replace(outcome=twice, refused="stands more than once"),
    "no network above the outcome": BASE["real"]._replace(
        outcome=lambda f, d: normal(pm.modelcontext(None)["2.bias"].sum(), 1.0, d), refused="no network stands above"
    ),
    "another variable": BASE["real"]._replace(
        weights=lambda net: (pm.Normal("other"), nn.parameters(net))[1],
        refused=r"\['other'\] are neither weights of the network nor part of the likelihood",
    ),
    "two outcomes": BASE["real"]._replace(outcome=two_outcomes, refused="2 observed variables"),
    "a potential of rows": BASE["real"]._replace(outcome=with_potential, refused=r"\['extra'\] are pm.Potential"),
    "a bound far from the start": BASE["real"]._replace(weights=bounded, refused=r"\['bound'\] are pm.Potential"),
    "an outcome among its own parameters": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0] + 0.5 * d["y"], 0.5, d), refused=r"\['y'\] are observed"
    ),
    "rows that depend on each other": BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:, 0] - f[:, 0].mean(), 0.5, d), refused="the declared log density is"
    ),
}
FOLLOWED = [name for name, change in CHANGES.items() if not change.refused]


@functools.cache
def network(outputs: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, outputs))


def declared(change: Change) -> tuple[fedppl.FederatedModel, dict[str, dict[str, Any]]]:
    names = tuple(change.values(np.random.default_rng(0)))

    def build(**data: Any) -> Any:
        with pm.Model() as model:
            held = {name: pm.Data(name, value) for name, value in data.items()}
            net = network(change.outputs)
            f = nn.module(net, change.weights(net), change.inputs(held.pop("X")))
            change.outcome(f, held)
        return model

    arguments = ", ".join(("X", *names))
    scope: dict[str, Any] = {"build": build}
    exec(f"def builder({arguments}): return build({', '.join(f'{n}={n}' for n in ('X', *names))})", scope)
    rng = np.random.default_rng(1)
    clients = {
        k: {"X": rng.normal(size=(ROWS, 2)), **change.values(np.random.default_rng(seed))}
        for k, seed in (("a", 7), ("b", 8))
    }
    return fedppl.FederatedModel(scope["builder"], shared=change.shared), clients


@functools.cache
def known(name: str) -> tuple[fedppl.FederatedModel, dict[str, dict[str, Any]]]:
    """A declaration and data that no test changes, read once."""
    return declared(CHANGES[name] if name in CHANGES else BASE[name])


@functools.cache
def fitted(name: str) -> np.ndarray:
    """A client's own weights after a round, their variances, and predictions."""
    model, clients = known(name)
    algorithm = nn.FedSI(ratio=0.5, epochs=3, learning_rate=0.05, batch_size=6, tune_epochs=3, tune_rate=0.05)
    fit = problems.fit_some_rounds(model, clients, algorithm, rounds=1, progressbar=False, random_seed=1)
    own = nn.personalise(fit, "a")
    new = {k: v for k, v in clients["a"].items() if k != "y" and np.ndim(v)}
    predicted = nn.predict(fit, own, new)
    first = next(iter(predicted.data_vars))
    slices = [own.weights[:9], np.sort(np.diag(own.subnetwork.covariance)), predicted[first].values.ravel()[:ROWS]]
    return np.concatenate(slices)


@pytest.mark.parametrize("name", slow_but(FOLLOWED, *FOLLOWED[::5]))
def test_a_changed_declaration_changes_the_fit(name: str) -> None:
    change = CHANGES[name]
    base = "classes" if change.values is classes and change.outputs > 1 else "real"
    found, before = fitted(name), fitted(base)
    assert np.all(np.isfinite(found))
    assert found.shape != before.shape or np.max(np.abs(found - before)) > 1e-3


@pytest.mark.parametrize("name", sorted(set(CHANGES) - set(FOLLOWED)))
def test_what_cannot_be_followed_is_refused_before_any_round(name: str) -> None:
    model, clients = declared(CHANGES[name])
    seen: list[Any] = []
    with pytest.raises(fedppl.DeclarationError, match=CHANGES[name].refused):
        fedppl.fit(model, clients, nn.FedSI(), progressbar=False, callback=seen.append)
    assert not seen


@pytest.mark.parametrize("name", ["a penalty", "twice the weights", "a potential of rows", "rows backwards"])
def test_large_outcomes_hide_nothing_of_a_declaration(name: str) -> None:
    """Their part of the density is a constant far above what weights change."""
    backwards = BASE["real"]._replace(outcome=lambda f, d: normal(f[::-1, 0], 0.5, d), refused="density rises by")
    change = CHANGES.get(name, backwards)
    model, clients = declared(change._replace(values=lambda rng: {"y": 1e7 * rng.normal(size=ROWS)}))
    with pytest.raises(fedppl.DeclarationError, match=change.refused):
        model.enrol(clients, kernel=False)["a"].view(network_of)


@pytest.mark.parametrize("weights", [shifted, bounded])
def test_what_the_first_client_does_not_show_is_refused_there(weights: Any) -> None:
    """Of a closed form no other client's density is compared, and none far from the start."""
    values = with_column(classes, "shift", 0.0, 1.0)
    model, clients = declared(BASE["classes"]._replace(values=values, weights=weights))
    clients["a"]["shift"], clients["b"]["shift"] = np.array(0.0), np.array(50.0)
    refused = r"weights are computed from the data \['shift'\].*parametrize" if weights is shifted else "pm.Potential"
    with pytest.raises(fedppl.DeclarationError, match=refused):
        model.enrol(clients, kernel=False)["a"].view(network_of)


def test_losses_of_long_odds_keep_their_digits() -> None:
    """Losses of a 0 or 1 by a logit f are log(1 + exp(±f)), with the slope expit(±f)."""
    model, clients = known("binary")
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    f = torch.tensor([[50.0], [-50.0], [35.0], [-35.0]], dtype=torch.float64).repeat(len(unit.X) // 4 + 1, 1)[
        : len(unit.X)
    ]
    f.requires_grad_()
    y = outcomes(unit, torch.float64)
    signed = f.detach().numpy()[:, 0] * (1 - 2 * np.asarray(clients["a"]["y"]))
    losses = unit.likelihood.each(f, y)
    assert_allclose(losses.detach().numpy(), np.logaddexp(0.0, signed), rtol=1e-10)
    slopes = torch.autograd.grad(unit.likelihood.mean(f, y), f)[0].numpy()[:, 0] * len(unit.X)
    assert_allclose(np.abs(slopes), 1 / (1 + np.exp(-signed)), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", FOLLOWED)
def test_losses_and_slopes_are_those_of_pymc(name: str) -> None:
    """Of weights and unknowns, at two points away from the start; curvatures by differences of slopes."""
    model, clients = known(name)
    client = model.enrol(clients, kernel=False)["b"]
    unit = client.view(network_of)
    pymc_model = client.pymc_model()
    observed = pymc_model.observed_RVs[0]
    density = pymc_model.compile_logp(vars=[observed], mode=PYTHON_MODE)
    rng = np.random.default_rng(3)
    y = outcomes(unit, torch.float64)
    for _ in range(2):
        w = torch.from_numpy(unit.initial + 0.3 * rng.normal(size=unit.size)).requires_grad_()
        phi, theta = w.detach().numpy()[unit.shared_at], w.detach().numpy()[unit.local_at]
        point = {}
        for variables, values in ((client.layout.variables, phi), (client.local, theta)):
            first = 0
            for variable in variables:
                rv = pymc_model[variable.name]
                point[pymc_model.rvs_to_values[rv].name] = values[first : first + variable.size].reshape(variable.shape)
                first += variable.size
        with torch.enable_grad():
            output = call(unit.net, state_of(unit.net, w), torch.from_numpy(unit.X))
            loss = unit.likelihood.mean(output, y) * len(unit.X)
            found = torch.autograd.grad(loss, w)[0].numpy()
        assert_allclose(unit.likelihood.log_density(output.detach(), y), density(point), rtol=1e-8)
        each = unit.likelihood.each(output.detach(), y)
        assert_allclose(float(each.sum()), float(loss.detach()), rtol=1e-9)
        step = 1e-5
        curved = None
        if not isinstance(unit.likelihood, Declared) or not unit.likelihood.bends(output.detach(), y):
            root = unit.likelihood.root(output.detach(), y)
            curved = (root @ root.mT).numpy()
        for c in range(output.shape[1] if curved is not None and name != "a kink" else 0):
            apart = np.zeros(output.shape[1])
            apart[c] = step
            both = [output.detach() + sign * torch.from_numpy(apart) for sign in (1, -1)]
            ends = [unit.likelihood.slopes_last(one.mT[None].clone(), y[None])[0].mT.numpy() for one in both]
            count = unit.likelihood.outputs if isinstance(unit.likelihood, Declared) else curved.shape[1]
            if c < count:
                differences = ((ends[0] - ends[1]) / (2 * step))[:, :count]
                assert_allclose(curved[:, :count, c], differences, rtol=1e-4, atol=1e-6)
        for i in rng.choice(unit.size, 3, replace=False):
            apart = np.zeros(unit.size)
            apart[i] = step
            values = []
            for sign in (1, -1):
                moved = torch.from_numpy(w.detach().numpy() + sign * apart)
                with torch.no_grad():
                    there = call(unit.net, state_of(unit.net, moved), torch.from_numpy(unit.X))
                    values.append(unit.likelihood.log_density(there, y))
            assert_allclose(found[i], -(values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-6)


def test_unknowns_are_told_apart_from_weights() -> None:
    model, clients = declared(CHANGES["an unknown sd that is shared"])
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    assert unit.declared.unknowns == ("log_sd",)
    assert len(unit.inferable_at) == len(unit.shared_at) - 1
    assert isinstance(unit.likelihood, Declared)
    assert [name for name, _ in unit.loaded(unit.initial).named_parameters()] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_unknowns_beside_one_linear_layer_are_no_biases_of_it(bias: bool) -> None:
    """Outputs X W + c with e beside them: their covariance has a variance of each, and nothing between them."""
    net, rng = torch.nn.Linear(2, 1, bias=bias), np.random.default_rng(4)

    def build(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            f = nn.module(net, nn.parameters(net), pm.Data("X", X))
            cuts = pm.Normal("cuts", [-1.0, 1.0], 1.0, shape=2)
            pm.OrderedLogistic("grade", eta=f[:, 0], cutpoints=cuts, observed=pm.Data("y", y))
        return model

    names = [*(name for name, _ in net.named_parameters()), "cuts"]
    data = {"a": {"X": rng.normal(size=(5, 2)), "y": np.arange(5) % 3}}
    unit = fedppl.FederatedModel(build, names).enrol(data, kernel=False)["a"].view(network_of)
    variance = rng.uniform(0.1, 2.0, unit.size)
    places = np.arange(unit.size)
    X = np.column_stack([unit.X, np.ones((5, int(bias)))])
    wanted = [np.diag([x**2 @ variance[:-2], *variance[-2:]]) for x in X]
    for covariance in (variance, np.diag(variance)):
        q = subnet.Subnetwork(unit.initial, places, covariance)
        assert_allclose(subnet.output_covariance(unit, q, unit.X), wanted, atol=1e-12)


def test_an_unknown_sd_of_all_clients_is_found() -> None:
    """Of 2 x 400 rows whose noise has sd 0.5: the root mean square of what is left, within its own error of 2.5 %."""
    rng = np.random.default_rng(5)
    change = CHANGES["an unknown sd that is shared"]
    model, _ = declared(change)
    clients = {}
    for k in ("a", "b"):
        X = rng.normal(size=(400, 2))
        clients[k] = {"X": X, "y": np.tanh(X[:, 0]) + 0.5 * rng.normal(size=400)}
    algorithm = nn.FedAvg(phases=(("all", 5),), learning_rate=0.02)
    fit = problems.fit_some_rounds(model, clients, algorithm, rounds=15, progressbar=False, random_seed=1)
    assert_allclose(np.exp(float(fit.estimate["log_sd"])), 0.5, atol=0.05)


def test_a_linear_network_of_counts_has_the_laplace_approximation_of_poisson_regression() -> None:
    """All weights shared, one client: the covariance at the mode is (XᵀWX + I)⁻¹ with W the means."""
    rng = np.random.default_rng(2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = torch.nn.Linear(2, 1)
    X = rng.normal(size=(60, 2))
    exposure = rng.uniform(1, 3, size=60)
    y = rng.poisson(exposure * np.exp(0.5 + X @ [0.3, -0.4]))

    def builder(X: Any, y: Any, exposure: Any) -> Any:
        with pm.Model() as model:
            f = nn.module(net, nn.parameters(net), pm.Data("X", X))
            pm.Poisson("o", pm.Data("exposure", exposure) * pm.math.exp(f[:, 0]), observed=pm.Data("y", y))
        return model

    model = fedppl.FederatedModel(builder, shared=("weight", "bias"))
    clients = {"a": {"X": X, "y": y, "exposure": exposure}}
    algorithm = nn.FedSI(ratio=1.0, epochs=200, learning_rate=0.05, batch_size=60, tune=None)
    fit = problems.fit_some_rounds(model, clients, algorithm, rounds=1, progressbar=False, random_seed=1)
    own = nn.personalise(fit, "a")
    Z = np.column_stack([X, np.ones(60)])
    means = exposure * np.exp(Z @ own.weights)
    # One more inference, whose prior is the variance that the first one left.
    variance = np.diag(np.linalg.inv(Z.T @ (means[:, None] * Z) + np.eye(3)))
    expected = np.linalg.inv(Z.T @ (means[:, None] * Z) + np.diag(1.0 / variance))
    assert_allclose(own.subnetwork.covariance, expected, rtol=2e-3)
    mode = Z.T @ (y - means) - (
        own.weights - np.concatenate([net.weight.detach().numpy()[0], net.bias.detach().numpy()])
    )
    assert np.max(np.abs(mode)) < 2.0  # against sds of sums of 60 counts, some 12
    predicted = nn.predict(fit, own, {"X": X[:5], "exposure": exposure[:5]}, link="map")
    assert_allclose(predicted["mean"], means[:5], rtol=1e-5)
    drawn = nn.predict(fit, own, {"X": X[:5], "exposure": exposure[:5]}, draws=400)
    spread = np.einsum("ni,ij,nj->n", Z[:5], own.subnetwork.covariance, Z[:5])
    total = means[:5] * np.exp(spread / 2)
    assert_allclose(drawn["mean"], total, rtol=5 * np.sqrt(spread.max() / 400))
    sd = np.sqrt(total + total**2 * np.expm1(spread))
    assert_allclose(drawn["sd"], sd, rtol=5 / np.sqrt(2 * 4000) + 0.03)


@pytest.mark.parametrize("name", ["heavy tails", "a kink"])
def test_where_a_density_bends_upwards_its_expected_curvature_stands_in(name: str) -> None:
    """(ν + 1) / (ν + 3) / σ² of Student's t, 1 / b² of Laplace; of 128 draws, within five of their errors."""
    model, clients = declared(CHANGES[name])
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    output, y = torch.full((ROWS, 1), 40.0, dtype=torch.float64), outcomes(unit, torch.float64)  # all are far away
    assert unit.likelihood.bends(output, y) == (name == "heavy tails")
    root = unit.likelihood.root(output, y, expected=name == "heavy tails").numpy()
    expected = 4.0 / 6.0 / 0.25 if name == "heavy tails" else 4.0
    found = (root**2).sum(axis=(1, 2))
    assert_allclose(found.mean(), expected, rtol=5 / np.sqrt(128 * ROWS) * 1.5)


@pytest.mark.parametrize("name", ["temperature", "exposure", "kink"])
def test_a_row_without_curvature_changes_no_other(name: str) -> None:
    """A saturated row, one that was exposed to nothing, and a kink at which all rows are flat."""
    change = CHANGES[{"temperature": "a temperature", "exposure": "counts with an exposure", "kink": "a kink"}[name]]
    model, clients = declared(change)
    if name == "exposure":
        clients["a"]["y"][0], clients["a"]["e"][0] = 0, 0.0
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    y = outcomes(unit, torch.float64)
    output = torch.from_numpy(np.random.default_rng(1).normal(size=(ROWS, change.outputs)))
    if name == "temperature":
        output[0] = torch.tensor([0.0, 400.0, 0.0])
    found, alone = (unit.likelihood.root(output[at], y[at]) for at in (slice(None), slice(1, None)))
    if name == "kink":
        assert_allclose((found**2).sum((1, 2)), 4.0, rtol=1e-9)  # (1 / b)², whatever is drawn
        return
    assert_allclose((found @ found.mT)[1:], alone @ alone.mT, rtol=1e-12)
    assert_allclose(found[0], 0.0, atol=1e-6)


def test_expected_curvatures_hang_on_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """One far outcome of Student's t: with all rows in one chunk, or a few in each."""
    model, clients = declared(CHANGES["heavy tails"])
    clients["a"]["y"][0] = 30.0
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    places = np.arange(unit.size)
    whole = subnet.curvature(unit, unit.initial, places)
    monkeypatch.setattr(subnet, "_NUMBERS", 5)
    parts = subnet.curvature(unit, unit.initial, places)
    assert not np.array_equal(whole, parts)
    scale = np.sqrt(np.outer(np.diag(whole), np.diag(whole)) + 1e-12)
    assert np.max(np.abs(parts - whole) / scale) < 6 / np.sqrt(128 * ROWS)


@pytest.mark.parametrize("first", ["a", "b"])
def test_rows_that_depend_on_each_other_are_seen_at_whichever_client_shows_it(first: str) -> None:
    """Exposures divided by their mean: a client whose exposures are equal does not show that."""
    change = CHANGES["counts with an exposure"]._replace(
        outcome=lambda f, d: pm.Poisson("o", d["e"] / d["e"].mean() * pm.math.exp(f[:, 0]), observed=d["y"])
    )
    model, clients = declared(change)
    clients["a"]["e"] = np.ones(ROWS)
    ordered_clients = {first: clients[first], **clients}
    with pytest.raises(fedppl.DeclarationError, match="client 'b': the declared log density is"):
        fedppl.fit(model, ordered_clients, nn.FedAvg(phases=(("all", 1),)), progressbar=False)


MOVED = {
    "one of two outputs": (2, lambda f: f[:, 0], True),
    "outputs backwards": (2, lambda f: f[:, ::-1].sum(axis=1), True),
    "rows backwards": (1, lambda f: f[::-1, 0], False),
    "all but one row": (1, lambda f: pm.math.concatenate([f[:-1, 0], f[:1, 0]]), False),
    "squeezed": (1, lambda f: f.squeeze(axis=1), True),
    "in one axis": (1, lambda f: f.reshape((-1,)), True),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved_outputs_are_followed_or_refused(name: str) -> None:
    outputs, move, is_followed = MOVED[name]
    change = BASE["real"]._replace(outcome=lambda f, d: normal(move(f), 0.5, d), outputs=outputs)
    model, clients = declared(change)
    if not is_followed:
        with pytest.raises(fedppl.DeclarationError, match="the declared log density is"):
            model.enrol(clients, kernel=False)["a"].view(network_of)
        return
    for client in model.enrol(clients, kernel=False).values():
        unit = client.view(network_of)
        with torch.no_grad():
            output = call(unit.net, state_of(unit.net, torch.from_numpy(unit.initial)), torch.from_numpy(unit.X))
        mean = output.sum(dim=1) if name == "outputs backwards" else output[:, 0]
        wanted = norm.logpdf(client.arrays["y"], mean.numpy(), 0.5).sum()
        assert_allclose(unit.likelihood.log_density(output, outcomes(unit, torch.float64)), wanted, rtol=1e-8)


ALL = (*BODY, "2.weight", "2.bias")
SHARES = {"a": (0.2, 0.3, 0.5), "b": (0.5, 0.3, 0.2)}
WHOLE: dict[str, Callable[[], fedppl.Algorithm]] = {
    "FedAvg": lambda: nn.FedAvg(phases=(("all", 5),), learning_rate=0.02),
    "SCAFFOLD": lambda: nn.SCAFFOLD(epochs=5, learning_rate=0.05),
    "IFCA": lambda: nn.IFCA(epochs=5, learning_rate=0.02),
    "PerFedAvg": lambda: nn.PerFedAvg(epochs=5, learning_rate=0.02, inner_rate=0.01),
    "PFedMe": lambda: nn.PFedMe(epochs=5),
    "PFedBayes": lambda: nn.PFedBayes(epochs=5, learning_rate=0.02, spread=0.1),
    "FedSI": lambda: nn.FedSI(ratio=0.5, epochs=5, learning_rate=0.02, tune=None),
    "BPFed": lambda: nn.BPFed(epochs=5, learning_rate=0.02),
}


@pytest.mark.slow
def test_cut_points_of_each_client_are_found_beside_averaged_weights() -> None:
    """Of 300 rows whose outcome depends on nothing: logits of the shares below each, within five of their errors."""
    model, _ = declared(
        Change(
            lambda f, d: pm.OrderedLogistic(
                "o",
                eta=0.0 * f[:, 0],
                cutpoints=pm.Normal("cuts", [-1.0, 1.0], 3.0, shape=2, transform=ordered),
                observed=d["y"],
            ),
            classes,
        )
    )
    rng = np.random.default_rng(4)
    clients = {k: {"X": rng.normal(size=(300, 2)), "y": rng.choice(3, 300, p=p)} for k, p in SHARES.items()}
    algorithm = nn.FedAvg(phases=(("local", 20),), learning_rate=0.05)
    fit = problems.fit_some_rounds(model, clients, algorithm, rounds=3, progressbar=False, random_seed=1)
    for k, data in clients.items():
        below = np.array([np.mean(data["y"] <= c) for c in (0, 1)])
        found = fit.client(k, draws=1, chains=1)["posterior"]["cuts"].values.ravel()
        assert_allclose(found, np.log(below / (1 - below)), atol=5 / np.sqrt(300 * 0.2 * 0.8) / 5)


@pytest.mark.parametrize("name", slow_but(WHOLE, "FedAvg"))
def test_every_algorithm_moves_an_unknown_that_is_shared(name: str) -> None:
    """From an sd of 1 towards 0.1, which it predicts with."""
    change = CHANGES["an unknown sd that is shared"]._replace(shared=(*ALL, "log_sd"))
    if name == "BPFed":
        change = change._replace(shared=(*BODY, "log_sd"))
    model, _ = declared(change)
    rng = np.random.default_rng(5)
    clients = {}
    for k in ("a", "b"):
        X = rng.normal(size=(40, 2))
        clients[k] = {"X": X, "y": 0.1 * rng.normal(size=40)}
    fit = problems.fit_some_rounds(model, clients, WHOLE[name](), rounds=4, progressbar=False, random_seed=1)
    predicted = nn.predict(fit, "a", {"X": clients["a"]["X"][:5]})
    assert np.all(np.isfinite(predicted["sd"]))
    assert float(predicted["sd"].mean()) < 0.99


def started(change: Change) -> tuple[Any, np.ndarray, np.ndarray]:
    """A fit after one round, new inputs, and the outputs of a client's own network there."""
    model, clients = declared(change)
    algorithm = nn.FedAvg(phases=(("all", 1),))
    fit = problems.fit_some_rounds(model, clients, algorithm, rounds=1, progressbar=False, random_seed=1)
    X = np.random.default_rng(6).normal(size=(5, 2))
    unit = fit.clients["a"].view(network_of)
    return fit, X, outputs(unit, nn.personalise(fit, "a").weights, X).numpy()


def test_binary_outcomes_have_the_probabilities_of_two_classes() -> None:
    fit, X, f = started(CHANGES["binary"])
    found = nn.predict(fit, "a", {"X": X})
    assert found["probability"].dims == ("row", "class")
    assert_allclose(found["probability"], np.column_stack([expit(-f[:, 0]), expit(f[:, 0])]), rtol=1e-9)
    assert_allclose(found["mean"], expit(f[:, 0]), rtol=1e-9)
    assert_allclose(found["sd"] ** 2, expit(f[:, 0]) * expit(-f[:, 0]), rtol=1e-9)
    several = Change(
        lambda f, d: pm.Bernoulli("o", logit_p=f, observed=d["y"]),
        lambda rng: {"y": rng.integers(0, 2, size=(ROWS, 3))},
        outputs=3,
    )
    fit, X, f = started(several)
    found = nn.predict(fit, "a", {"X": X})["probability"]
    assert found.dims == ("row", "outcome_1", "class")
    assert_allclose(found, np.stack([expit(-f), expit(f)], axis=-1), rtol=1e-9)


def test_outcomes_without_moments_have_an_interval_alone() -> None:
    """A Cauchy's quartiles are its location less and plus its scale; its density there is 1 / (2 π scale)."""
    fit, X, f = started(BASE["real"]._replace(outcome=lambda f, d: pm.Cauchy("o", f[:, 0], 0.5, observed=d["y"])))
    found = nn.predict(fit, "a", {"X": X}, ci_prob=0.5, draws=400)
    assert set(found.data_vars) == {"ci_low", "ci_high", "output_mean", "output_variance"}
    error = np.sqrt(0.25 * 0.75 / 4000) * 2 * np.pi * 0.5  # ten draws of outcomes for each of 400
    assert_allclose(found["ci_low"], f[:, 0] - 0.5, atol=5 * error)
    assert_allclose(found["ci_high"], f[:, 0] + 0.5, atol=5 * error)


@pytest.mark.parametrize("name", ["SCAFFOLD", "IFCA", "PerFedAvg", "PFedMe", "PFedBayes"])
def test_unknowns_that_would_be_forgotten_are_refused(name: str) -> None:
    model, clients = declared(CHANGES["an unknown sd of the client"]._replace(shared=ALL))
    with pytest.raises(fedppl.DeclarationError, match=r"\['sd'\] are local, .* name weights and unknowns"):
        fedppl.fit(model, clients, WHOLE[name](), progressbar=False)


def test_phases_without_an_unknown_are_refused() -> None:
    model, clients = declared(CHANGES["an unknown sd of the client"])
    with pytest.raises(fedppl.DeclarationError, match=r"\['sd'\] .*phases="):
        fedppl.fit(model, clients, nn.FedAvg(phases=(("shared", 1),), tune="local"), progressbar=False)


@pytest.mark.parametrize("likelihood", ["poisson", "normal"])
def test_data_outside_of_containers_are_told(likelihood: str) -> None:
    net = network(1)

    def build(X: Any, y: Any) -> Any:
        with pm.Model() as model:
            f = nn.module(net, nn.parameters(net), X)
            if likelihood == "poisson":
                pm.Poisson("o", pm.math.exp(f[:, 0]), observed=y)
            else:
                pm.Normal("o", f[:, 0], 0.5, observed=y)
        return model

    rng = np.random.default_rng(1)
    clients = {k: {"X": rng.normal(size=(ROWS, 2)), "y": rng.poisson(2.0, size=ROWS)} for k in ("a", "b")}
    model, algorithm = fedppl.FederatedModel(build, shared=BODY), nn.FedAvg(phases=(("all", 1),))
    with pytest.warns(UserWarning, match="pm.Data"), pytest.raises(fedppl.DeclarationError, match="pm.Data"):
        fit = problems.fit_some_rounds(model, clients, algorithm, rounds=1, progressbar=False)
        nn.predict(fit, "a", {"X": clients["a"]["X"]})


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_whole_numbers_for_a_network_of_reals_are_told(dtype: str) -> None:
    model, clients = declared(BASE["real"])
    for data in clients.values():
        data["X"] = np.ones((ROWS, 2), dtype=dtype)
    with pytest.raises(fedppl.DeclarationError, match=r"client 'a'.*astype\(float\)"):
        model.enrol(clients, kernel=False)


def test_what_is_built_later_is_built_once() -> None:
    model, clients = declared(CHANGES["counts"])
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: unit.likelihood.drawn(), range(4)))
    assert all(one is found[0] for one in found)


def test_outcomes_that_cannot_be_drawn_are_told() -> None:
    change = BASE["real"]._replace(
        outcome=lambda f, d: pm.CustomDist(
            "o", f[:, 0], logp=lambda value, mean: -pm.math.log(1.0 + (value - mean) ** 2), observed=d["y"]
        )
    )
    model, clients = declared(change)
    clients["a"]["y"][0] = 30.0
    algorithm = nn.FedAvg(phases=(("all", 1),))
    fit = problems.fit_some_rounds(model, clients, algorithm, rounds=1, progressbar=False, random_seed=1)
    with pytest.raises(fedppl.DataError, match="cannot be drawn at the new inputs.*random="):
        nn.predict(fit, "a", {"X": clients["a"]["X"]})
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    with pytest.raises(fedppl.types.LocalFailure, match="cannot be drawn.*random="):
        subnet.curvature_diagonal(unit, unit.initial, np.arange(3))


@pytest.mark.parametrize(("values", "size"), [([[3.0, 0.0], [4.0, 0.0]], 12.5**0.5), ([1.0, np.inf], 0.0), (3.0, 0.0)])
def test_scales_of_infinite_values_are_none(values: Any, size: float) -> None:
    """They are refused elsewhere; no warning calls their scale inf."""
    assert view._size(np.array(values)) == pytest.approx(size)


def test_an_index_of_the_client_s_is_no_part_of_a_closed_form() -> None:
    """Rows forwards at one client and backwards at another: the second is refused."""
    change = BASE["real"]._replace(
        outcome=lambda f, d: normal(f[:: d["step"], 0], 0.5, d), values=lambda rng: {**real(rng), "step": np.array(1)}
    )
    model, clients = declared(change)
    clients["b"]["step"] = np.array(-1)
    enrolled = model.enrol(clients, kernel=False)
    assert isinstance(enrolled["a"].view(network_of).likelihood, Declared)
    with pytest.raises(fedppl.DeclarationError, match="client 'b'"):
        enrolled["b"].view(network_of)


def test_a_kink_whose_outcomes_cannot_be_drawn_is_told() -> None:
    """Without curvature the posterior would be the prior."""
    change = BASE["real"]._replace(outcome=lambda f, d: pm.Laplace("o", f[:, 0], 0.5, observed=2.0 * d["y"]))
    model, clients = declared(change)
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    with pytest.raises(fedppl.types.LocalFailure, match="kink.*computed from data"):
        subnet.curvature_diagonal(unit, unit.initial, np.arange(3))


def test_columns_for_classes_are_refused_where_there_are_as_many_rows_as_classes() -> None:
    """PyMC pairs every row of the one with every row of the other then."""
    with torch.random.fork_rng():
        net = torch.nn.Linear(2, 3)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["weight", "bias"])
    X = np.random.default_rng(0).normal(size=(3, 2))
    with pytest.raises(fedppl.DeclarationError, match=r"'a'.*'label' has 2 dimensions.*argmax"):
        model.enrol({"a": {"X": X, "y": np.eye(3, dtype=int)}}, kernel=False)["a"].view(network_of)
    assert model.enrol({"a": {"X": X, "y": np.arange(3)}}, kernel=False)["a"].view(network_of).size == 9


def test_rows_of_another_shape_are_refused_by_the_client_s_name() -> None:
    model, clients = declared(CHANGES["an offset"])
    clients["b"]["z"] = np.ones((ROWS, 1))
    with pytest.raises(fedppl.DataError, match="'b'"):
        fedppl.fit(model, clients, nn.FedSI(), progressbar=False)


def test_outcomes_of_single_precision_are_exact() -> None:
    """Counts beyond 2²⁴ stay what they are."""
    model, clients = declared(CHANGES["counts"])
    clients["a"]["y"] = np.array([2**24 + 1] + [1] * (ROWS - 1))
    unit = model.enrol(clients, kernel=False)["a"].view(network_of)
    assert float(outcomes(unit, torch.float32)[0, 0]) == 2**24 + 1
