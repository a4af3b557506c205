"""A subnetwork's curvature and posterior against full Jacobians, the declared PyMC model, and exact regression."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl.model.interpreted import PYTHON_MODE  # noqa: E402
from fedppl.models import fedsi  # noqa: E402
from fedppl.nn import subnet  # noqa: E402
from fedppl.nn.functional import pieces  # noqa: E402
from fedppl.nn.likelihood import Normal  # noqa: E402
from fedppl.nn.unit import NetworkUnit  # noqa: E402
from fedppl.nn.view import network_of  # noqa: E402
from fedppl.types import LocalFailure  # noqa: E402
from tests.support import linear_models, problems  # noqa: E402
from tests.support.markers import slow_but  # noqa: E402


class Convolution(torch.nn.Module):  # type: ignore[misc]
    """A convolution before two linear layers: not all weights factor."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = torch.nn.Conv2d(1, 2, 3)
        self.middle = torch.nn.Linear(32, 5)
        self.head = torch.nn.Linear(5, 3)

    def forward(self, X: Any) -> Any:
        found = torch.tanh(self.filters(X[:, None]))
        return self.head(torch.tanh(self.middle(found.flatten(1))))


class Tied(torch.nn.Module):  # type: ignore[misc]
    """One layer that is called twice: its weights' derivatives are sums of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.again = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, X: Any) -> Any:
        return self.head(torch.tanh(self.again(torch.tanh(self.again(X)))))


class Outside(torch.nn.Module):  # type: ignore[misc]
    """A layer whose weight is also used beside its call."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, X: Any) -> Any:
        return self.head(torch.tanh(self.middle(X)) + torch.nn.functional.linear(X, self.middle.weight))


class Recurrent(torch.nn.Module):  # type: ignore[misc]
    """Three steps of one number each; torch cannot batch it over parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.GRU(1, 3, batch_first=True)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, X: Any) -> Any:
        return self.head(self.steps(X[:, :, None])[0][:, -1])


def in_place() -> Any:
    """An activation that overwrites what the layer before it gave."""
    layers = torch.nn
    return layers.Sequential(layers.Linear(3, 4), layers.ReLU(inplace=True), layers.Linear(4, 3))


def normalised() -> Any:
    """Batch norm in evaluation, with running moments that are not 0 and 1."""
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
    ).eval()
    net[1].running_mean += torch.tensor([0.5, -0.2, 0.1, 0.3])
    return net


NETS = {
    "convolution": Convolution,
    "tied": Tied,
    "outside": Outside,
    "recurrent": Recurrent,
    "in place": in_place,
    "batch norm": normalised,
}


@functools.cache
def unit(kind: str) -> NetworkUnit:
    """Twenty rows of a client, and its network."""
    rng = np.random.default_rng(31)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = NETS[kind]() if kind in NETS else problems.network()
    X = rng.normal(size=(20, 6, 6) if kind == "convolution" else (20, 3))
    if kind == "normal":
        builder, y = functools.partial(fedsi.regressor, net=net, noise_sd=0.3), rng.normal(size=(20, 3))
    else:
        builder, y = functools.partial(fedsi.classifier, net=net), rng.integers(0, 3, size=20)
    names = [name for name, _ in net.named_parameters()]
    model = fedppl.FederatedModel(builder, shared=names[:-2])
    return network_of(model.enrol({"a": {"X": X, "y": y}}, kernel=False)["a"])


def jacobian(unit: NetworkUnit, w: Any, X: Any) -> tuple[Any, Any]:
    """∂f / ∂w (n, C, d) and f, by automatic differentiation of all weights at once."""
    X = torch.from_numpy(np.asarray(X, dtype=float))
    buffers = {name: value.double() if value.is_floating_point() else value for name, value in unit.net.named_buffers()}
    one = lambda flat: torch.func.functional_call(unit.net, pieces(unit.net, flat) | buffers, (X,))  # noqa: E731
    flat = torch.from_numpy(w)
    return torch.autograd.functional.jacobian(one, flat).numpy(), one(flat).numpy()


def hessian(unit: NetworkUnit, f: Any) -> Any:
    """Λ (n, C, C)."""
    if isinstance(unit.likelihood, Normal):
        return np.broadcast_to(np.eye(f.shape[1]) / unit.likelihood.sd**2, (*f.shape, f.shape[1]))
    p = np.exp(f) / np.exp(f).sum(axis=1, keepdims=True)
    return p[:, :, None] * np.eye(f.shape[1]) - p[:, :, None] * p[:, None]


KINDS = ("classes", "normal", *NETS)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_curvature_is_that_of_the_whole_jacobian(kind: str, rng: np.random.Generator) -> None:
    own = unit(kind)
    w = rng.normal(size=own.size)
    J, f = jacobian(own, w, own.X)
    assert np.abs(J).max() > 0
    full = np.einsum("nci,ncd,ndj->ij", J, hessian(own, f), J)
    everything = np.arange(own.size)
    assert_allclose(subnet.curvature_diagonal(own, w, everything), np.diag(full), rtol=1e-9, atol=1e-10)
    for chosen in (np.sort(rng.permutation(own.size)[:17]), rng.permutation(own.size)[:17], everything):
        assert_allclose(subnet.curvature(own, w, chosen), full[np.ix_(chosen, chosen)], rtol=1e-8, atol=1e-9)


def test_rows_in_chunks_add_up_to_the_same(
    kind: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = unit(kind)
    w, chosen = rng.normal(size=own.size), np.sort(rng.permutation(own.size)[:11])
    whole = subnet.curvature(own, w, chosen)
    monkeypatch.setattr(subnet, "_NUMBERS", 40)
    assert len(list(subnet.chunks(own, w, chosen, torch.float64))) > 1
    assert_allclose(subnet.curvature(own, w, chosen), whole, rtol=1e-10, atol=1e-12)


def test_single_precision_is_near(kind: str, rng: np.random.Generator) -> None:
    own = unit(kind)
    w, chosen = 0.5 * rng.normal(size=own.size), np.sort(rng.permutation(own.size)[:11])
    found = subnet.curvature(own, w, chosen, dtype=torch.float32)
    assert_allclose(found, subnet.curvature(own, w, chosen), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_outputs_covariance_is_that_of_the_linearised_network(
    kind: str, diagonal: bool, rng: np.random.Generator
) -> None:
    own = unit(kind)
    w, chosen = rng.normal(size=own.size), np.sort(rng.permutation(own.size)[:13])
    q = subnet.infer(own, w, chosen, np.full(13, 0.7), diagonal=diagonal)
    J, _ = jacobian(own, w, own.X[:4])
    J = J[:, :, chosen]
    spread = np.diag(q.covariance) if diagonal else q.covariance
    assert_allclose(
        subnet.output_covariance(own, q, own.X[:4]), J @ spread @ J.transpose(0, 2, 1), rtol=1e-8, atol=1e-10
    )


@pytest.mark.parametrize("kind", slow_but(["classes", "normal", "convolution"], "normal"))
def test_the_posterior_is_laplace_on_the_declared_linear_model(kind: str, rng: np.random.Generator) -> None:
    """The GGN is the Hessian of the generalised linear model in PyMC at its centre, by PyMC's own second derivative."""
    own = unit(kind)
    w, chosen = rng.normal(size=own.size), np.sort(rng.permutation(own.size)[:9])
    variance = rng.uniform(0.5, 2.0, size=9)
    J, f = jacobian(own, w, own.X)
    noise_sd = own.likelihood.sd if kind == "normal" else None
    model = linear_models.linearised(J[:, :, chosen], f, own.y, centre=w[chosen], variance=variance, noise_sd=noise_sd)
    precision = -model.compile_d2logp(negate_output=False, mode=PYTHON_MODE)({"theta": w[chosen]})
    q = subnet.infer(own, w, chosen, variance)
    assert_allclose(q.covariance, np.linalg.inv(precision), rtol=1e-6, atol=1e-9)
    again = subnet.infer(own, w, chosen, variance, diagonal=True)
    assert_allclose(again.covariance, 1.0 / np.diag(precision), rtol=1e-6)


def test_on_a_linear_network_with_a_normal_likelihood_the_posterior_is_exact(rng: np.random.Generator) -> None:
    """(DᵀD / σ² + I / g)⁻¹ of the regression on D = (X, 1), wherever the weights are."""
    net = torch.nn.Linear(2, 1)
    X = rng.normal(size=(30, 2))
    builder = functools.partial(fedsi.regressor, net=net, noise_sd=0.5)
    model = fedppl.FederatedModel(builder, shared=["weight", "bias"])
    own = network_of(model.enrol({"a": {"X": X, "y": rng.normal(size=(30, 1))}}, kernel=False)["a"])
    q = subnet.infer(own, rng.normal(size=3), np.arange(3), np.full(3, 2.0))
    D = np.column_stack([X, np.ones(30)])
    assert_allclose(q.covariance, np.linalg.inv(D.T @ D / 0.25 + np.eye(3) / 2), rtol=1e-9)


def test_live_weights_are_chosen_before_those_that_no_row_touches() -> None:
    """Eq. 14 as it reads takes the dead ones, whose posterior is the prior."""
    curvature = np.array([0.0, 4.0, 0.0, 1.0, 9.0])
    variance = np.array([1.0, 1.0, 3.0, 1.0, 1.0])
    assert_array_equal(subnet.select(variance, curvature, 2), [1, 3])
    assert_array_equal(subnet.select(variance, curvature, 2, rule="variance"), [0, 2])
    assert_array_equal(subnet.select(variance, curvature, 4), [1, 2, 3, 4])
    assert_array_equal(subnet.select(variance, curvature, 5), np.arange(5))


def test_the_literal_rule_minimises_the_wasserstein_distance(rng: np.random.Generator) -> None:
    """Eq. 14: Σ σ² over the weights that are left out, over every choice of two of six."""
    import itertools

    curvature, variance = rng.uniform(0, 5, 6), rng.uniform(0.5, 2, 6)
    marginal = 1 / (1 / variance + curvature)
    best = min(itertools.combinations(range(6), 2), key=lambda S: marginal[[i for i in range(6) if i not in S]].sum())
    assert_array_equal(subnet.select(variance, curvature, 2, rule="variance"), best)


@pytest.mark.parametrize(
    ("count", "rule", "message"),
    [
        (0, "live", "0 weights cannot be chosen from 5"),
        (6, "live", "6 weights cannot be"),
        (2, "best", "rule='best' must"),
    ],
)
def test_what_cannot_be_chosen_is_refused(count: int, rule: str, message: str) -> None:
    with pytest.raises(fedppl.DeclarationError, match=message):
        subnet.select(np.ones(5), np.ones(5), count, rule=rule)


def test_draws_have_the_posteriors_covariance(rng: np.random.Generator) -> None:
    """Of 40,000: an entry within 5 · √(2 / 40,000) of its sds."""
    root = rng.normal(size=(3, 3))
    for covariance in (root @ root.T + np.eye(3), np.array([0.5, 1.0, 2.0])):
        q = subnet.Subnetwork(np.zeros(5), np.array([0, 2, 4]), covariance)
        full = np.diag(covariance) if covariance.ndim == 1 else covariance
        sd = np.sqrt(np.diag(full))
        found = np.cov(q.deviations(40_000, rng), rowvar=False)
        assert np.all(np.abs(found - full) < 5 * np.sqrt(2 / 40_000) * np.outer(sd, sd))


@pytest.mark.parametrize("net", [problems.network(), Convolution()])
def test_the_posterior_of_few_rows_is_that_of_the_whole_matrix(net: Any, rng: np.random.Generator) -> None:
    """By a matrix as large as the outputs of all rows, where they are few beside the weights."""
    X = rng.normal(size=(2, 3)) if not isinstance(net, Convolution) else rng.normal(size=(2, 6, 6))
    builder = functools.partial(fedsi.classifier, net=net)
    names = [name for name, _ in net.named_parameters()]
    client = fedppl.FederatedModel(builder, names).enrol({"a": {"X": X, "y": np.array([0, 2])}}, kernel=False)["a"]
    unit = client.view(network_of)
    index, variance = np.arange(3, 30), rng.uniform(0.5, 4.0, size=27)
    wanted = np.linalg.inv(subnet.curvature(unit, unit.initial, index) + np.diag(1 / variance))
    assert subnet.of_few_rows(unit, unit.initial, index, variance, torch.float64) is not None
    assert_allclose(subnet.infer(unit, unit.initial, index, variance).covariance, wanted, rtol=1e-9, atol=1e-12)
    found = subnet.marginals(unit, unit.initial, index, variance, dtype=torch.float64)
    assert_allclose(found, np.diag(wanted), rtol=1e-9)
    assert subnet.of_few_rows(unit, unit.initial, index, 1e20 * variance, torch.float64) is None


@pytest.mark.parametrize("rows", [2, 20], ids=["fewer rows than weights", "more"])
@pytest.mark.parametrize("diagonal", [False, True], ids=["whole", "diagonal"])
def test_variances_alone_are_those_of_the_posterior(rows: int, diagonal: bool, rng: np.random.Generator) -> None:
    """What a round sends is the diagonal of what the last inference has."""
    net, names = problems.network(), [name for name, _ in problems.network().named_parameters()]
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), names)
    data = {"X": rng.normal(size=(rows, 3)), "y": rng.integers(0, 3, size=rows)}
    unit = model.enrol({"a": data}, kernel=False)["a"].view(network_of)
    variance = rng.uniform(0.5, 4.0, size=len(unit.shared_at))
    settings = {"diagonal": diagonal, "dtype": torch.float64}
    places, g = subnet.chosen(unit, unit.initial, variance, 27, rule="live", **settings)
    found = subnet.marginals(unit, unit.initial, places, g, **settings)
    q = subnet.infer(unit, unit.initial, places, g, **settings)
    assert_allclose(found, q.covariance if diagonal else np.diag(q.covariance), rtol=1e-10)
    with pytest.raises(fedppl.DeclarationError, match="lower learning_rate="):
        subnet.chosen(unit, np.nan * unit.initial, variance, 27, rule="live", **settings)


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_inputs_of_another_scale_do_not_cost_the_posterior_its_digits(
    rows: int, scale: float, rng: np.random.Generator
) -> None:
    """Single precision loses what the prior adds to 1e8 times as much; it is (JᵀJ / σ² + I)⁻¹ all the same."""
    net, X = torch.nn.Linear(40, 3), scale * rng.normal(size=(rows, 40))
    model = fedppl.FederatedModel(functools.partial(fedsi.regressor, net=net, noise_sd=0.3), ["weight", "bias"])
    data = {"X": X, "y": rng.normal(size=(rows, 3))}
    own = network_of(model.enrol({"a": data}, kernel=False)["a"])
    found = subnet.infer(own, own.initial, np.arange(123), np.ones(123), dtype=torch.float32).covariance
    D = np.column_stack([X, np.ones(rows)]) / 0.3
    U, s, V = np.linalg.svd(D, full_matrices=False)
    one = np.eye(41) - (V.T * (s**2 / (1 + s**2))) @ V  # of each output's weights
    for c in range(3):
        places = [*range(40 * c, 40 * c + 40), 120 + c]
        own_block = found[np.ix_(places, places)]
        assert_allclose(own_block, one, rtol=1e-3, atol=1e-5)
        spread = s**2 / (1 + s**2)  # of the rows' outputs, where the posterior is narrowest
        assert_allclose(np.einsum("ni,ij,nj->n", D, own_block, D), U**2 @ spread, rtol=1e-3)


def test_weights_at_zero_do_not_hide_how_far_rows_narrow_the_posterior(rng: np.random.Generator) -> None:
    """All classes are as probable there, so that the rows' roots of Λ sum to nothing."""
    net, X = torch.nn.Linear(40, 4), 1e3 * rng.normal(size=(2, 40))
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["weight", "bias"])
    own = network_of(model.enrol({"a": {"X": X, "y": np.array([0, 2])}}, kernel=False)["a"])
    found = subnet.infer(own, own.initial, np.arange(164), np.ones(164), dtype=torch.float32).covariance
    J, f = jacobian(own, own.initial, X)
    rows = (np.linalg.cholesky(hessian(own, f) + 1e-14 * np.eye(4)).transpose(0, 2, 1) @ J).reshape(8, -1)
    _, s, V = np.linalg.svd(rows, full_matrices=False)
    assert_allclose(found, np.eye(164) - (V.T * (s**2 / (1 + s**2))) @ V, rtol=1e-3, atol=1e-6)


def test_what_double_precision_loses_too_is_refused(rng: np.random.Generator) -> None:
    """Twenty rows of forty columns leave directions to an endless prior; where data tell all weights, it is none."""
    net, rows = torch.nn.Linear(40, 3), 20
    model = fedppl.FederatedModel(functools.partial(fedsi.regressor, net=net, noise_sd=0.3), ["weight", "bias"])
    data = {"X": rng.normal(size=(rows, 40)), "y": rng.normal(size=(rows, 3))}
    own = network_of(model.enrol({"a": data}, kernel=False)["a"])
    with pytest.raises(LocalFailure, match="bring inputs to sd 1"):
        subnet.infer(own, own.initial, np.arange(123), np.full(123, 1e18), dtype=torch.float32)
    told = np.arange(0, 120, 10)
    found = subnet.infer(own, own.initial, told, np.full(12, 1e18), dtype=torch.float32).covariance
    assert_allclose(found, np.linalg.inv(subnet.curvature(own, own.initial, told)), rtol=1e-4, atol=1e-7)


def test_a_square_of_rows_is_added_block_by_block(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subnet, "_BLOCK", 3)
    rows, matrix = torch.from_numpy(rng.normal(size=(5, 11))), torch.ones(11, 11, dtype=torch.float64)
    subnet.add_square(matrix, rows, -1.0)
    assert_allclose(np.triu(matrix.numpy()), np.triu(1.0 - (rows.T @ rows).numpy()), rtol=1e-12)
