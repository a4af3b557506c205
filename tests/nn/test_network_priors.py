"""Declared priors of network weights: what algorithms do with them, and what they refuse or say they leave."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import norm

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import nn  # noqa: E402
from fedppl.algorithms.averaging.fedavg import LocalClientState  # noqa: E402
from fedppl.model.interpreted import PYTHON_MODE  # noqa: E402
from fedppl.models import fedsi  # noqa: E402
from fedppl.nn.algorithms import _common  # noqa: E402
from fedppl.nn.train import Training  # noqa: E402
from fedppl.nn.unit import log_likelihood, outputs  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402
from fedppl.numerics.streams import stream  # noqa: E402
from fedppl.sites import node as _node  # noqa: E402
from fedppl.storage.signed import Memory  # noqa: E402
from tests.support import problems  # noqa: E402
from tests.support.states import updated  # noqa: E402

ALL = ("0.weight", "0.bias", "2.weight", "2.bias")
BODY, HEAD = ALL[:2], ALL[2:]
PRIORS: dict[str, Callable[..., Any]] = {
    "laplace": lambda name, start: pm.Laplace(name, start, 1.0, shape=start.shape),
    "t": lambda name, start: pm.StudentT(name, nu=4, mu=start, sigma=1.0, shape=start.shape),
    "multivariate_normal": lambda name, start: pm.MvNormal(name, start, 0.5 + 0.5 * np.eye(start.shape[-1])),
}


def personalised(algorithm: fedppl.Algorithm, client: Any, personal: Any, message: Any, rng: Any) -> Any:
    """The client's own network."""
    return algorithm.result.family.personalise(client, personal, message, rng)


def declared(kind: str, net: Any, X: Any, y: Any) -> Any:
    """A classifier whose first layer's biases have a prior of this kind."""
    with pm.Model() as model:
        starts = {name: value.detach().double().numpy() for name, value in net.named_parameters()}
        weights = {
            name: PRIORS[kind](name, start) if name == "0.bias" else pm.Normal(name, start, 1.0, shape=start.shape)
            for name, start in starts.items()
        }
        logits = nn.module(net, weights, pm.Data("X", X))
        pm.Categorical("label", logit_p=logits, observed=pm.Data("y", y))
    return model


def problem(kind: str, shared: tuple[str, ...], hidden: int = 4) -> tuple[fedppl.FederatedModel, problems.Clients]:
    net = problems.network() if hidden == 4 else problems.network(hidden, 3)
    clients = problems.classification()[1]
    return fedppl.FederatedModel(functools.partial(declared, kind, net), shared), clients


@functools.cache
def enrolled(kind: str, shared: tuple[str, ...]) -> Any:
    model, clients = problem(kind, shared)
    return model.enrol(clients, kernel=False)["device 0"]


TUNED: dict[str, Any] = {"tune_rate": 0.05, "tune_epochs": 20}
# Every algorithm for networks: what it shares, and how it is built.
ALGORITHMS: dict[str, tuple[tuple[str, ...], Callable[[], fedppl.Algorithm]]] = {
    "FedSI": (BODY, lambda: nn.FedSI(ratio=0.5, epochs=2, **TUNED)),
    "FedSI, diagonal": (BODY, lambda: nn.FedSI(diagonal=True, epochs=2, **TUNED)),
    "FedSI, half a head": (BODY, lambda: nn.FedSI(ratio=0.5, epochs=2, tune=("2.bias",), **TUNED)),
    "FedSI, no head": (BODY, lambda: nn.FedSI(ratio=0.5, epochs=2, tune=None)),
    "FedSI, all shared": (ALL, lambda: nn.FedSI(ratio=0.5, epochs=2, tune=None)),
    "FedAvg": (ALL, lambda: nn.FedAvg(phases=(("all", 2),))),
    "FedAvg, FedProx": (ALL, lambda: nn.FedAvg(phases=(("all", 2),), proximal=1.0)),
    "FedAvg, FedBABU": (BODY, lambda: nn.FedAvg(phases=(("shared", 2),), tune="local")),
    "FedAvg, FedPer": (BODY, lambda: nn.FedAvg(phases=(("all", 2),))),
    "SCAFFOLD": (ALL, lambda: nn.SCAFFOLD(epochs=2)),
    "IFCA": (ALL, lambda: nn.IFCA(epochs=2)),
    "PerFedAvg": (ALL, lambda: nn.PerFedAvg(epochs=2)),
    "PFedMe": (ALL, lambda: nn.PFedMe(epochs=2)),
    "PFedBayes": (ALL, lambda: nn.PFedBayes(epochs=2)),
    "BPFed": (BODY, lambda: nn.BPFed(epochs=2)),
    "FedPop": (ALL, lambda: nn.FedPop(head=HEAD, epochs=2, draw_epochs=4)),
    "Confidence": (ALL, lambda: nn.Confidence(head=HEAD, epochs=2, head_steps=3)),
}


# --- priors that are not independent normals -------------------------------------------------------------------


@pytest.mark.parametrize("kind", PRIORS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_shared_priors_that_would_be_replaced_are_refused(name: str, kind: str) -> None:
    shared, build = ALGORITHMS[name]
    algorithm = build()
    with pytest.raises(fedppl.DeclarationError) as refusal:
        algorithm.needs.check(enrolled(kind, shared))
    for part in (f"'0.bias' ({kind})", algorithm.name, "pm.Normal with constant parameters"):
        assert part in str(refusal.value)
    assert "0.weight" not in str(refusal.value)


def test_the_refusal_comes_before_any_round() -> None:
    model, clients = problem("laplace", BODY)
    seen: list[Any] = []
    with pytest.raises(fedppl.DeclarationError, match="'0.bias'.*FedSI"):
        fedppl.fit(model, clients, nn.FedSI(), progressbar=False, callback=seen.append)
    assert not seen


def test_correlations_across_variables_are_refused_by_their_names() -> None:
    """A prior that is Gaussian as a whole, with precision between two variables."""
    client = clients_of(BODY, ())["device 0"]
    prior = client.layout.prior
    precision = prior.precision.copy()
    precision[0, 15] = precision[15, 0] = 0.3
    layout = dataclasses.replace(client.layout, prior=prior._replace(precision=precision))
    with pytest.raises(fedppl.DeclarationError, match="'0.weight' .normal., '0.bias' .normal. is not"):
        nn.FedSI().needs.check(dataclasses.replace(client, layout=layout))


def test_cut_points_are_shared_by_their_steps_and_refused_under_an_order() -> None:
    """PyMC's `ordered` makes a normal another distribution. It alone is named, and its remedy is taken."""
    net = torch.nn.Linear(2, 1)

    def build(X: Any, y: Any, *, steps: bool) -> pm.Model:
        with pm.Model() as model:
            f = nn.module(net, nn.parameters(net), pm.Data("X", X))[:, 0]
            if steps:
                first, step = pm.Normal("first", -1.0, 1.0), pm.LogNormal("step", 0.0, 1.0, shape=1)
                cuts = pm.math.concatenate([[first], first + pm.math.cumsum(step)])
            else:
                order = pm.distributions.transforms.ordered
                cuts = pm.Normal("cuts", [-1.0, 1.0], 2.0, shape=2, transform=order, initval=np.array([-1.0, 1.0]))
            pm.OrderedLogistic("grade", eta=f, cutpoints=cuts, observed=pm.Data("y", y))
        return model

    data = {"a": {"X": np.random.default_rng(1).normal(size=(6, 2)), "y": np.arange(6) % 3}}

    def check(steps: bool, names: list[str]) -> None:
        model = fedppl.FederatedModel(functools.partial(build, steps=steps), ["weight", "bias", *names])
        nn.FedAvg().needs.check(model.enrol(data, kernel=False)["a"])

    check(True, ["first", "step"])
    with pytest.raises(fedppl.DeclarationError, match=r"prior of 'cuts' .normal, transformed by Ordered. .*LogNormal"):
        check(False, ["cuts"])


def test_diagonal_covariances_are_independent_normals() -> None:
    """However they are written."""
    diagonal = {"multivariate_normal": lambda name, start: pm.MvNormal(name, start, np.diag([1.0, 2.0, 3.0, 4.0]))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRIORS, "multivariate_normal", diagonal["multivariate_normal"])
        model, clients = problem("multivariate_normal", BODY)
        client = model.enrol(clients, kernel=False)["device 0"]
    nn.FedSI().needs.check(client)
    state = nn.FedSI().init(client.layout, ("device 0",), stream((0,)))
    assert_allclose(state.variance[-4:], [1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("kind", PRIORS)
def test_large_blocks_are_refused_by_name_too(kind: str) -> None:
    """Beyond two thousand coordinates there is no moment match, and enrolment refuses."""
    model, clients = problem(kind, BODY, hidden=600)
    with pytest.raises(fedppl.DeclarationError, match=r"2400 coordinates.* that of \['0.bias'\] is not.* pm.Normal"):
        model.enrol(clients, kernel=False)


@pytest.mark.parametrize("kind", ["noise", "head"])
def test_scales_that_differ_between_clients_are_each_client_s_or_refused(kind: str) -> None:
    """A container's value is the first client's, and would have been taken for all."""
    net = problems.network()

    starts = {name: value.detach().double().numpy() for name, value in net.named_parameters()}

    def build(X: Any, y: Any, scale: Any) -> Any:
        with pm.Model() as model:
            own = pm.Data("scale", scale)
            weights = {
                name: pm.Normal(name, start, own if (kind, name) == ("head", "2.bias") else 1.0, shape=start.shape)
                for name, start in starts.items()
            }
            output = nn.module(net, weights, pm.Data("X", X))
            pm.Normal("outcome", output, own if kind == "noise" else 1.0, observed=pm.Data("y", y))
        return model

    rng = np.random.default_rng(0)
    clients = {
        name: {"X": rng.normal(size=(8, 3)), "y": rng.normal(size=(8, 3)), "scale": np.array(scale)}
        for name, scale in (("a", 0.5), ("b", 5.0))
    }
    model = fedppl.FederatedModel(build, BODY)
    if kind == "head":
        with pytest.raises(fedppl.DeclarationError, match="2.bias' is no constant"):
            fedppl.fit(model, clients, nn.FedSI(tune=None), progressbar=False)
        return
    for name, client in model.enrol(clients, kernel=False).items():
        unit = client.view(network_of)
        assert_allclose(
            log_likelihood(unit, unit.initial),
            norm.logpdf(clients[name]["y"], outputs(unit, unit.initial, unit.X).numpy(), clients[name]["scale"]).sum(),
            rtol=1e-10,
        )


# --- sds that change nothing -----------------------------------------------------------------------------------


@functools.cache
def clients_of(shared: tuple[str, ...], wider: tuple[str, ...]) -> Any:
    """Two clients of the classifier, with ten-fold sds of some variables."""
    sigma = {each: 10.0 if each in wider else 1.0 for each in ALL}
    builder = functools.partial(fedsi.classifier, net=problems.network(), sigma=sigma)
    return fedppl.FederatedModel(builder, shared).enrol(problems.classification(2)[1], kernel=False)


def outcome_of(name: str, wider: tuple[str, ...]) -> np.ndarray:
    """Own weights of every client after two rounds, and their variances."""
    shared, build = ALGORITHMS[name]
    clients, algorithm, kept = clients_of(shared, wider), build(), {}
    state = algorithm.init(next(iter(clients.values())).layout, tuple(clients), stream((0,)))
    for number in range(2):
        replies = {}
        for k, client in clients.items():
            message = algorithm.broadcast(state, k)
            kept[k], replies[k], _ = algorithm.update_client(client, kept.get(k), message, stream((number, len(k))))
        state, _ = updated(algorithm, state, replies)
    found = []
    for k, client in clients.items():
        own = personalised(algorithm, client, kept[k], algorithm.result.final_message(state, k), stream((2,)))
        variance = np.zeros(len(own.weights))
        if own.subnetwork is not None:
            covariance = own.subnetwork.covariance
            variance[own.subnetwork.places] = covariance if covariance.ndim == 1 else np.diag(covariance)
        found.append([own.weights, variance])
    return np.array(found)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_name_the_sds_that_change_nothing(name: str) -> None:
    """Ten-fold sds of the shared weights, and of each local variable: what changes is what the algorithm leaves out."""
    shared, build = ALGORITHMS[name]
    algorithm = build()
    unused = algorithm.needs.unused_priors(clients_of(shared, ())["device 0"])
    plain, changed = outcome_of(name, ()), []
    for wider in (shared, *((each,) for each in ALL if each not in shared)):
        if np.abs(outcome_of(name, wider) - plain).max() > 1e-4:
            changed += wider
    assert sorted([*unused, *changed]) == sorted(ALL)
    used = {"FedSI": ALL, "FedSI, diagonal": ALL, "FedSI, half a head": (*BODY, "2.bias"), "FedSI, no head": BODY}
    assert set(changed) == set(used.get(name, ALL if name.startswith("FedSI") else ()))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "declared prior sds" in record.getMessage()]


@pytest.mark.parametrize("name", ["FedAvg, FedBABU", "FedSI, no head", "FedSI"])
def test_a_fit_says_once_which_sds_it_does_not_use(name: str, caplog: pytest.LogCaptureFixture) -> None:
    shared, build = ALGORITHMS[name]
    model, clients = problems.classification(shared=shared)
    with caplog.at_level("WARNING", logger="fedppl"):
        fit = fedppl.fit(model, clients, build(), rounds=2, progressbar=False, random_seed=1)
    names = {"FedAvg, FedBABU": ALL, "FedSI, no head": HEAD, "FedSI": ()}[name]
    lines = said(caplog)
    assert len(lines) == bool(names)
    for line in lines:
        assert fit.algorithm.name in line and all((f"'{each}'" in line) == (each in names) for each in ALL)


def test_a_site_says_it_once_for_all_that_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    model, clients = problems.classification()
    site = _node.Node(
        token="priors",
        model=model,
        algorithm=nn.FedAvg(),
        load_data=lambda config: clients[str(config["id"])],
        client_id=lambda config: str(config["id"]),
        folder=None,
        draws=10,
        chains=1,
        policy=fedppl.policy.NO_RULES,
    )
    with caplog.at_level("WARNING", logger="fedppl"):
        for name in clients:
            _node.enrolled(site, {"id": name}, Memory(lambda name: None, lambda name, raw: None))
    assert len(said(caplog)) == 1


# --- the head's prior in FedSI ---------------------------------------------------------------------------------


@functools.cache
def alone(sigma: float) -> Any:
    builder = functools.partial(fedsi.classifier, net=problems.network(), sigma=sigma)
    return fedppl.FederatedModel(builder, BODY).enrol(problems.classification(1)[1], kernel=False)["device 0"]


def head_after(client: Any, training: Training, *, head: Any = None, prior: bool = True) -> Any:
    """The head before and after fine-tuning by FedSI's rule, with all weights; without a prior by the loss alone."""
    algorithm, at = nn.FedSI(ratio=0.5), client.view(network_of).local_at
    state = algorithm.init(client.layout, ("device 0",), stream((0,)))
    message = dict(algorithm.result.final_message(state, "device 0"))
    if not prior:
        del message["variance"]
    kept = None if head is None else LocalClientState(head)
    tuning = _common.Tuning("local", training)
    before = client.view(network_of).weights(state.mean, client.initial if head is None else head)
    after = _common.tuned(client, kept, message, stream((1,)), tuning=tuning).weights
    return before, (after - before)[at]


def test_a_step_of_fine_tuning_is_the_gradient_of_the_declared_log_posterior() -> None:
    """One gradient step on all rows, from a head that is not the prior's mean, against PyMC's own gradient."""
    rng, net, client = np.random.default_rng(5), problems.network(), alone(0.3)
    head, one_step = client.initial + 0.5 * rng.normal(size=client.local_size), Training(0.01, 1, 20, 0.0)
    before, moved = head_after(client, one_step, head=head)
    model = fedsi.classifier(**client.arrays, net=net, sigma=0.3)
    point, at = {}, 0
    for name, value in net.named_parameters():
        point[name] = before[at : at + value.numel()].reshape(tuple(value.shape))
        at += value.numel()
    slopes = model.compile_dlogp([model[name] for name in HEAD], mode=PYTHON_MODE)(point)
    assert_allclose(20 * moved / 0.01, slopes, rtol=1e-3, atol=1e-3 * np.abs(slopes).max())
    other = 20 * head_after(client, one_step, head=head, prior=False)[1] / 0.01
    assert np.abs(other - slopes).max() > 1.0  # the gradient of the loss alone is another


def test_a_narrow_prior_holds_the_head_and_a_wide_one_lets_it_go() -> None:
    steps = Training(1e-2, 200, 20)
    held, middle, free = (head_after(alone(sigma), steps)[1] for sigma in (1e-3, 0.3, 1e6))
    sizes = [np.abs(moved).max() for moved in (held, middle, free)]
    assert sizes[0] < 5e-3 and sizes[0] < sizes[1] < sizes[2]
    assert_allclose(free, head_after(alone(0.3), steps, prior=False)[1], atol=1e-6)


def test_the_head_of_a_linear_network_is_the_ridge_regression_around_its_start() -> None:
    """(ZᵀZ / s² + I / σ²)⁻¹ (Zᵀ y / s² + v₀ / σ²) on features Z of the shared layer."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False))
    rng = np.random.default_rng(4)
    X = rng.normal(size=(12, 2))
    data = {"X": X, "y": (X @ [1.0, -2.0] + 0.5 * rng.normal(size=12))[:, None]}
    builder = functools.partial(
        fedsi.regressor, net=net, noise_sd=0.5, sigma={n: 0.2 for n, _ in net.named_parameters()}
    )
    model = fedppl.FederatedModel(builder, ["0.weight", "0.bias"])
    algorithm = nn.FedSI(ratio=1.0, epochs=1, tune_rate=0.01, tune_epochs=1500)
    fit = fedppl.fit(model, {"a": data}, algorithm, rounds=1, progressbar=False, random_seed=0)
    own, unit = nn.personalise(fit, "a"), fit.clients["a"].view(network_of)
    weight, bias = fit.state.mean[:4].reshape(2, 2), fit.state.mean[4:]
    Z, start = X @ weight.T + bias, unit.declared.local_prior.mean
    wanted = np.linalg.solve(Z.T @ Z / 0.25 + np.eye(2) / 0.04, Z.T @ data["y"][:, 0] / 0.25 + start / 0.04)
    assert_allclose(own.weights[unit.local_at], wanted, atol=1e-3)
    ordinary = np.linalg.lstsq(Z, data["y"][:, 0], rcond=None)[0]
    assert np.abs(ordinary - wanted).max() > 0.05


# --- FedSI-Fac -------------------------------------------------------------------------------------------------


def test_the_inference_prior_of_the_diagonal_variant_acts() -> None:
    """1 / (1 / min(g, prior_variance) + curvature), g the average of the rounds; the rounds do not know of it."""
    model, clients = problems.classification()
    fits = {
        width: fedppl.fit(
            model, clients, nn.FedSI(diagonal=True, epochs=2, **width_of(width)), rounds=3, progressbar=False,
            random_seed=1,
        )
        for width in (None, 0.01, 0.5, 100.0)
    }  # fmt: skip
    for fit in fits.values():
        assert_array_equal(fit.state.mean, fits[None].state.mean)
        assert_array_equal(fit.state.variance, fits[None].state.variance)
    found = {width: nn.personalise(fit, "device 0").subnetwork for width, fit in fits.items()}
    g = fits[None].state.variance
    weights = found[0.01].weights
    unit = fits[None].clients["device 0"].view(network_of)
    curvature = nn.subnet.curvature_diagonal(unit, weights, unit.shared_at)
    for width, q in found.items():
        assert_array_equal(q.weights, weights)
        assert_allclose(q.covariance, 1 / (1 / np.minimum(g, 0.03 if width is None else width) + curvature), rtol=1e-4)
    assert found[0.01].covariance.max() < found[None].covariance.max() < found[0.5].covariance.max()


def width_of(width: float | None) -> dict[str, Any]:
    return {} if width is None else {"prior_variance": width}


def test_the_default_of_a_subnetwork_is_the_wide_one() -> None:
    assert nn.FedSI().settings["prior_variance"] == "3.0"
    assert nn.FedSI(diagonal=True).settings["prior_variance"] == "0.03"
