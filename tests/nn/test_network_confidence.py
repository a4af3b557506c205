"""pFedVEM for networks: the head against its declaration, and what travels, stays and is averaged."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl.algorithms.hierarchical.confidence import confidence_of
from fedppl.contracts import Target
from fedppl.gaussian import Gaussian
from fedppl.models import fedsi
from fedppl.numerics.streams import stream
from fedppl.types import DeclarationError, LocalFailure
from tests.support import linear_models, problems
from tests.support.states import updated

torch = pytest.importorskip("torch")

from fedppl import nn  # noqa: E402
from fedppl.nn.functional import generator_of  # noqa: E402
from fedppl.nn.personal import HeadSteps, head_posteriors, train_below  # noqa: E402
from fedppl.nn.train import Training, outcomes, train  # noqa: E402
from fedppl.nn.unit import (  # noqa: E402
    expected_loss,
    features,
    head_of,
    head_slopes,
    log_likelihood,  # noqa: E402
)
from fedppl.nn.view import network_of  # noqa: E402

BODY, HEAD = ("0.weight", "0.bias"), ("2.weight", "2.bias")


def problem(*, shared: tuple[str, ...] = (*BODY, *HEAD), clients: int = 3) -> Any:
    """Three classes at devices with two each, all weights shared."""
    return problems.classification(clients, shared=shared)


def fitted(**settings: Any) -> fedppl.Fit:
    model, clients = problem()
    run = {"rounds": 5, "progressbar": False, "random_seed": 2, **settings.pop("run", {})}
    return fedppl.fit(model, clients, nn.Confidence(head=HEAD, **settings), **run)


def posterior_of_head(
    unit: Any, head: Any, z: Any, start: Any, centre: Any, tau: float, steps: HeadSteps, rng: Any
) -> tuple[Any, Any]:
    """By `head_posteriors`, of one client."""
    rows, starts = (z[None], outcomes(unit, z.dtype)[None], np.array([len(z)])), (start[0][None], start[1][None])
    mean, sd, _ = head_posteriors(unit.likelihood, head, rows, starts, centre[None], np.array([tau]), steps, [rng])
    return mean[0], sd[0]


@pytest.mark.slow
def test_the_e_step_is_the_mean_field_posterior_of_the_declared_head() -> None:
    """Against `MeanField` on the declared head. Adam with K draws wanders by about its rate, here 0.002."""
    model, clients = problem()
    unit = model.enrol(clients, kernel=False)["device 0"].view(network_of)
    head, w = head_of(unit, HEAD), unit.initial
    z, centre, tau = features(unit, head, w), np.full(15, 0.1), 4.0
    start = (centre, np.full(15, 0.3))
    q, rng = start, np.random.default_rng(0)
    for rate, steps in ((0.05, 300), (0.01, 400), (0.002, 600)):
        q = posterior_of_head(unit, head, z, q, centre, tau, HeadSteps(rate, steps, 20), rng)
    rows = {"Z": z.double().numpy(), "y": clients["device 0"]["y"]}
    declared = fedppl.FederatedModel(functools.partial(linear_models.head, outputs=3), ["v"])
    prior = Gaussian(tau * centre, tau * np.eye(15))
    target = Target(declared.enrol({"a": rows}, kernel=False)["a"], prior, prior, 0.0)
    moments = fedppl.local.MeanField(points=256).tilted(target, rng)
    assert_allclose(q[0], moments.mean, atol=0.03)
    assert_allclose(q[1], np.sqrt(np.diag(moments.covariance)), rtol=0.08)


def test_gradient_steps_of_a_head_descend_the_summed_bound() -> None:
    """Two steps with momentum, against automatic differentiation of log-likelihood and divergence at the same draws."""
    model, clients = problem()
    unit = model.enrol(clients, kernel=False)["device 1"].view(network_of)
    head, w, tau = head_of(unit, HEAD), unit.initial, 4.0
    z, centre = features(unit, head, w, dtype=torch.float64), torch.full((15,), 0.1, dtype=torch.float64)
    start, steps = (np.full(15, 0.2), np.full(15, 0.3)), HeadSteps(0.01, 2, 3, momentum=0.9)
    found = posterior_of_head(unit, head, z, start, centre.numpy(), tau, steps, np.random.default_rng(5))
    mean = torch.full((15,), 0.2, dtype=torch.float64, requires_grad=True)
    raw = torch.full((15,), np.log(np.expm1(0.3)), dtype=torch.float64, requires_grad=True)
    optimizer, source = torch.optim.SGD([mean, raw], lr=0.01, momentum=0.9), generator_of(np.random.default_rng(5))
    normal, prior = torch.distributions.Normal, torch.distributions.Normal(centre, tau**-0.5)
    y = outcomes(unit, torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        spread = torch.nn.functional.softplus(raw)
        v = mean + spread * torch.randn(3, 15, generator=source, dtype=torch.float64)
        divergence = torch.distributions.kl_divergence(normal(mean, spread), prior).sum()
        (len(z) * expected_loss(unit, head, z, y, v) + divergence).backward()
        optimizer.step()
    assert_allclose(found[0], mean.detach(), rtol=1e-9)
    assert_allclose(found[1], torch.nn.functional.softplus(raw).detach(), rtol=1e-9)


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_slopes_of_the_head_are_those_of_its_loss(normal: bool, bias: bool) -> None:
    """The closed form against automatic differentiation, which is also by the other road."""
    generator = np.random.default_rng(3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2, bias=bias))
    names = [name for name, _ in net.named_parameters()]
    rows = {"X": generator.normal(size=(9, 3)), "y": generator.normal(size=(9, 2)) if normal else np.arange(9) % 2}
    build = functools.partial(fedsi.regressor, noise_sd=0.3) if normal else fedsi.classifier
    unit = (
        fedppl.FederatedModel(functools.partial(build, net=net), names)
        .enrol({"a": rows}, kernel=False)["a"]
        .view(network_of)
    )
    head = head_of(unit, tuple(names[2:]))
    z = features(unit, head, unit.initial, dtype=torch.float64)
    v = torch.from_numpy(generator.normal(size=(6, len(head.places)))).requires_grad_()
    y = outcomes(unit, torch.float64)
    wanted = torch.autograd.grad(expected_loss(unit, head, z, y, v), v)[0]
    share = torch.full((1, 9), 1 / 9, dtype=torch.float64)
    (found,) = head_slopes(unit.likelihood, head, z[None], y[None], share, v.detach()[None])
    assert_allclose(found / 6, wanted, rtol=1e-10, atol=1e-14)
    # The loss is what PyMC declares, at each draw of the head.
    w = unit.initial.copy()
    losses = []
    for draw in v.detach().numpy():
        w[head.places] = draw
        losses.append(-log_likelihood(unit, w) / 9)
    constant = 2 * np.log(0.3 * np.sqrt(2 * np.pi)) if normal else 0.0
    assert_allclose(float(expected_loss(unit, head, z, y, v).detach()), np.mean(losses) - constant, rtol=1e-10)


def test_a_head_whose_weights_are_used_elsewhere_is_refused() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, X: Any) -> Any:
            return self.head(self.body(X) + 0 * self.head.weight.sum())

    names = ("body.weight", "body.bias", "head.weight", "head.bias")
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=Tied()), names)
    with pytest.raises(DeclarationError, match="cannot be taken off it .*Name the linear layer"):
        fedppl.fit(model, problem()[1], nn.Confidence(head=names[2:]), progressbar=False)


def test_layers_below_are_trained_and_the_head_is_not() -> None:
    model, clients = problem()
    unit = model.enrol(clients, kernel=False)["device 1"].view(network_of)
    head, w = head_of(unit, HEAD), unit.initial
    below = np.setdiff1d(np.arange(len(w)), head.places)
    q = (w[head.places], np.zeros(15))
    after = train_below(unit, head, w, q, Training(0.1, 20, 10, 0.9), 1, np.random.default_rng(0))
    assert_allclose(after[head.places], w[head.places])
    assert np.all(after[below] != w[below])
    # A head without doubt is a head: the same steps by the code that trains networks.
    other = train(unit, w, below, Training(0.1, 20, 10, 0.9), np.random.default_rng(0))
    X = torch.from_numpy(clients["device 1"]["X"]).float()
    before, ours, theirs = (unit.loaded(x)(X) for x in (w, after, other))
    y = torch.from_numpy(clients["device 1"]["y"])
    loss = torch.nn.functional.cross_entropy
    assert loss(ours, y) < loss(before, y)
    assert_allclose(float(loss(ours, y).detach()), float(loss(theirs, y).detach()), atol=0.05)


@pytest.mark.parametrize("shared", [(*BODY, *HEAD), ("2.bias", "0.weight", "2.weight", "0.bias")])
def test_heads_go_by_confidence_and_the_rest_by_rows_whatever_the_order(shared: tuple[str, ...]) -> None:
    model, clients = problem(shared=shared)
    algorithm = nn.Confidence(head=HEAD)
    models = model.enrol(clients, kernel=False)
    state = algorithm.init(models["device 0"].layout, tuple(clients), stream((0,)))
    replies, kept = {}, {}
    for name, client in models.items():
        kept[name], replies[name], info = algorithm.update_client(
            client, None, algorithm.broadcast(state, name), stream((1,))
        )
        unit = client.view(network_of)
        centre = unit.weights(state.phi)[head_of(unit, HEAD).places]
        assert_allclose(float(replies[name]["weight"]), confidence_of(kept[name].mean, kept[name].sd ** 2, centre))
        assert info["blank"] == 1.0
    after, _ = updated(algorithm, state, replies)
    unit = models["device 0"].view(network_of)
    head = head_of(unit, HEAD)
    w = unit.weights(after.phi, np.zeros(0))
    taus = np.array([float(replies[name]["weight"]) for name in clients])
    wanted = taus @ np.array([kept[name].mean for name in clients]) / taus.sum()
    assert_allclose(w[head.places], wanted)
    assert sum(np.asarray(reply["below"]).size for reply in replies.values()) == 3 * 16


def test_a_message_is_one_number_longer_than_in_averaging() -> None:
    model, clients = problem()
    plain = fedppl.fit(model, clients, nn.FedAvg(), rounds=1, progressbar=False)
    ours = fitted(run={"rounds": 1})
    assert {b + 8 for b in plain.records[0].bytes_up.values()} == set(ours.records[0].bytes_up.values())
    assert plain.records[0].bytes_down == ours.records[0].bytes_down


def test_clients_that_do_not_report_move_their_heads_and_nothing_else() -> None:
    quiet = fitted(run={"rounds": 2, "reporting": lambda ids, rng: ids[:1]})
    assert set(quiet.personal) == {"device 0", "device 1", "device 2"}
    alone = fitted(run={"rounds": 2, "participation": lambda ids, rng: ids[:1]})
    assert_allclose(quiet.state.phi, alone.state.phi)


def test_a_client_predicts_by_its_own_head_and_the_global_model_is_a_module() -> None:
    fit = fitted(spread=1.0, learning_rate=0.05, head_rate=0.1, run={"rounds": 30})
    clients = problem()[1]
    for name, data in clients.items():
        own = nn.personalise(fit, name)
        assert_allclose(own.weights[own.subnetwork.places], own.subnetwork.weights[own.subnetwork.places])
        found = nn.predict(fit, own, {"X": data["X"]})
        point = nn.predict(fit, own, {"X": data["X"]}, link="map")
        right = np.mean(found["probability"].values.argmax(axis=1) == data["y"])
        assert right >= 0.85
        assert np.all(found["logit_variance"] > 0) and np.all(point["logit_variance"] == 0)
    net = nn.network(fit)
    held = torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
    assert_allclose(held, fit.state.phi, rtol=1e-5, atol=1e-6)
    assert nn.predict(fit, clients["device 0"], {"X": clients["device 0"]["X"]})["probability"].shape == (20, 3)


def test_the_head_of_a_draw_is_uncertain_and_the_rest_is_a_point() -> None:
    draws = fitted().client("device 0", draws=50, chains=1)["posterior"]
    assert np.all(draws["2.weight"].std("draw") > 0)
    assert_allclose(draws["0.weight"].std("draw"), 0, atol=1e-12)


def test_layers_below_are_judged_by_the_loss_under_draws_of_the_head() -> None:
    """Of f = u v, y = 1 and v ~ N(1, s^2), E (1 - f)^2 is least at u = 1 / (1 + s^2), where f at v's mean is not 1."""
    model, clients = problems.product(0.1, "abc")
    settings = {"head_steps": 1, "head_rate": 1e-6, "spread": 0.5, "momentum": 0.0, "epochs": 400, "draws": 100}
    algorithm = nn.Confidence(head=("1.weight",), learning_rate=1e-4, **settings)
    fit = fedppl.fit(model, clients, algorithm, rounds=1, progressbar=False, random_seed=1)
    assert not fit.records[0].failures
    assert_allclose(fit.state.phi, [1 / 1.25, 1.0], atol=0.02)
    algorithm = nn.Confidence(head=("1.weight",), learning_rate=1.0, **settings)
    with pytest.raises(LocalFailure, match="lower learning_rate="):
        algorithm.update_client(fit.clients["a"], None, algorithm.broadcast(fit.state, "a"), stream((1,)))


def test_averages_over_rounds_are_the_estimate_and_nothing_else() -> None:
    plain, smooth = fitted(), fitted(smoothing=0.5)
    assert_allclose(plain.state.phi, smooth.state.phi)
    found = [step.state.phi for step in fedppl.rounds(*problem(), nn.Confidence(head=HEAD), rounds=5, random_seed=2)]
    assert_allclose(smooth.state.smooth.phi, np.average(found, axis=0, weights=0.5 ** np.arange(4, -1, -1)))
    assert_allclose(fitted(smoothing=0.9, run={"rounds": 1}).state.smooth.phi, found[0])


def test_a_ledger_remembers_the_heads_of_clients_that_did_not_report() -> None:
    fit = fitted(remember=True, run={"rounds": 3, "reporting": 1})
    told = {client for record in fit.records for client in record.bytes_up}
    assert np.sum(fit.state.ledger[:, -1] > 0) == len(told)
    total = fit.state.ledger.sum(axis=0)
    assert_allclose(fit.state.phi[fit.state.head], total[:-1] / total[-1])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"head": "2.weight"}, "must be a tuple of torch's names"),
        ({"head": ("2.bias", "2.bias")}, "must be a tuple of torch's names, each once"),
        ({"head": HEAD, "terms": [["uncertainty"]]}, "terms=.* must be one or both"),
        ({"head": ()}, "must be a tuple of torch's names"),
        ({"head": HEAD, "smoothing": 1.0}, "smoothing=1.0 must be"),
        ({"head": HEAD, "spread": -1}, "spread=-1 must be"),
        ({"head": HEAD, "head_steps": 0}, "head_steps=0 must be"),
        ({"head": HEAD, "draws": True}, "draws=True must be"),
        ({"head": HEAD, "momentum": 1.0}, "momentum=1.0 must be"),
        ({"head": HEAD, "head_rate": 0.0}, "head_rate=0.0 must be"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(DeclarationError, match=match):
        nn.Confidence(**settings)


@pytest.mark.parametrize(
    ("head", "shared", "match"),
    [
        (("3.weight",), (*BODY, *HEAD), "are no parameters of the network"),
        (("2.weight",), (*BODY, *HEAD), "must be all parameters of one torch.nn.Linear"),
        (("0.weight", "0.bias"), (*BODY, *HEAD), "is not the network's last layer"),
        (HEAD, HEAD, "are local, and this algorithm shares whole networks"),
    ],
)
def test_a_head_must_be_the_last_layer_and_everything_shared(head: Any, shared: Any, match: str) -> None:
    model, clients = problem(shared=shared)
    with pytest.raises(DeclarationError, match=match):
        fedppl.fit(model, clients, nn.Confidence(head=head), progressbar=False)


@pytest.mark.parametrize("setting", ["learning_rate", "head_rate"])
def test_steps_that_run_away_fail_and_say_what_to_lower(setting: str, rng: np.random.Generator) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model = fedppl.FederatedModel(functools.partial(fedsi.regressor, net=net, noise_sd=0.1), [*BODY, *HEAD])
    X = rng.normal(size=(30, 3))
    client = model.enrol({"a": {"X": X, "y": X[:, :1]}}, kernel=False)["a"]
    algorithm = nn.Confidence(head=HEAD, **{setting: 1e20})
    state = algorithm.init(client.layout, ("a",), stream((0,)))
    with pytest.raises(LocalFailure, match=f"lower {setting}="):
        algorithm.update_client(client, None, algorithm.broadcast(state, "a"), stream((1,)))


def test_a_linear_head_alone_is_a_network_too() -> None:
    """Nothing below the head: only the head's part is left."""
    net = torch.nn.Linear(3, 3)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["weight", "bias"])
    algorithm = nn.Confidence(head=("weight", "bias"))
    fit = fedppl.fit(model, problem()[1], algorithm, rounds=2, progressbar=False, random_seed=0)
    assert fit.records[-1].bytes_up["device 0"] == 8 * (12 + 2)
