"""A network in a PyMC model: its value and gradients against formulas, and what is no function is refused."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose

torch = pytest.importorskip("torch")

import fedppl  # noqa: E402
from fedppl import gaussian, nn  # noqa: E402
from fedppl.model.interpreted import PYTHON_MODE  # noqa: E402
from fedppl.models import fedsi  # noqa: E402
from fedppl.nn import functional  # noqa: E402
from tests.support import problems  # noqa: E402


def evaluated(w: Any, X: Any) -> Any:
    """tanh(X W₁ᵀ + b₁) W₂ᵀ + b₂ of `problems.network()`."""
    W1, b1, W2, b2 = w[:12].reshape(4, 3), w[12:16], w[16:28].reshape(3, 4), w[28:]
    return np.tanh(X @ W1.T + b1) @ W2.T + b2


def compiled(outputs: Any, mode: Any = PYTHON_MODE) -> Any:
    w, X = pt.dvector("w"), pt.dmatrix("X")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*object mode.*")  # an Op without Numba's own code
        return pytensor.function([w, X], outputs(w, X), mode=mode)


@pytest.mark.parametrize("mode", [PYTHON_MODE, "NUMBA"])
def test_the_value_is_that_of_the_formula(mode: Any, rng: np.random.Generator) -> None:
    w, X = rng.normal(size=31), rng.normal(size=(7, 3))
    found = compiled(lambda w, X: nn.module(problems.network(), w, X), mode)(w, X)
    assert_allclose(found, evaluated(w, X), rtol=1e-12)


@pytest.mark.parametrize("mode", [PYTHON_MODE, "NUMBA"])
def test_gradients_are_those_of_differences(mode: Any, rng: np.random.Generator) -> None:
    """Of Σ A ∘ f, with respect to the weights and to the inputs."""
    w, X, A = rng.normal(size=31), rng.normal(size=(7, 3)), rng.normal(size=(7, 3))
    cost = lambda w, X: pt.sum(A * nn.module(problems.network(), w, X))  # noqa: E731
    by_w, by_X = compiled(lambda w, X: pt.grad(cost(w, X), [w, X]), mode)(w, X)
    step = 1e-6
    for i in range(31):
        apart = step * (np.arange(31) == i)
        wanted = np.sum(A * (evaluated(w + apart, X) - evaluated(w - apart, X))) / (2 * step)
        assert_allclose(by_w[i], wanted, rtol=1e-7, atol=1e-8)
    for place in np.ndindex(X.shape):
        apart = np.zeros_like(X)
        apart[place] = step
        wanted = np.sum(A * (evaluated(w, X + apart) - evaluated(w, X - apart))) / (2 * step)
        assert_allclose(by_X[place], wanted, rtol=1e-7, atol=1e-8)


def test_a_models_log_density_is_the_formulas(rng: np.random.Generator) -> None:
    X, y = rng.normal(size=(6, 3)), np.array([0, 1, 2, 2, 1, 0])
    model = fedsi.classifier(X, y, net=problems.network(), sigma=2.0)
    start = np.concatenate([v.detach().double().numpy().ravel() for v in problems.network().parameters()])
    assert [rv.name for rv in model.free_RVs] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    w = start + 0.3 * rng.normal(size=31)
    point = {rv.name: part for rv, part in zip(model.free_RVs, np.split(w, [12, 16, 28]), strict=True)}
    point = {name: value.reshape(model[name].type.shape) for name, value in point.items()}
    logits = evaluated(w, X)
    likelihood = logits[np.arange(6), y] - np.log(np.exp(logits).sum(axis=1))
    prior = -0.5 * (w - start) ** 2 / 4 - 0.5 * np.log(2 * np.pi * 4)
    # PyMC's own constant log √(2π) is right to ten digits only, and it counts 31 times.
    assert_allclose(model.compile_logp(mode=PYTHON_MODE)(point), likelihood.sum() + prior.sum(), rtol=1e-8)


def test_weights_may_be_one_vector(rng: np.random.Generator) -> None:
    net, X = problems.network(), rng.normal(size=(5, 3))
    with pm.Model() as model:
        w = pm.Normal("w", 0, 1, shape=31)
        pm.Normal("y", nn.module(net, w, pm.Data("X", X)), 0.1, observed=np.zeros((5, 3)))
    value = rng.normal(size=31)
    wanted = -0.5 * np.sum((evaluated(value, X) / 0.1) ** 2) - 15 * np.log(0.1 * np.sqrt(2 * np.pi))
    wanted += -0.5 * np.sum(value**2) - 31 * 0.5 * np.log(2 * np.pi)
    assert_allclose(model.compile_logp(mode=PYTHON_MODE)({"w": value}), wanted, rtol=1e-10)


def test_whole_numbers_are_inputs_without_a_gradient() -> None:
    """An embedding: row i of the table for input i."""
    net = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Flatten())
    w, X = pt.dvector("w"), pt.lmatrix("X")
    output = nn.module(net, w, X)
    function = pytensor.function([w, X], [output, pt.grad(output[:, 0].sum(), w)], mode=PYTHON_MODE)
    table = np.arange(8.0)
    value, slope = function(table, np.array([[2], [0], [2]]))
    assert_allclose(value, [[4, 5], [0, 1], [4, 5]])
    assert_allclose(slope, [1, 0, 0, 0, 2, 0, 0, 0])


@pytest.mark.slow
def test_two_builds_with_one_network_are_the_same_graph() -> None:
    """Or every client would be compiled on its own."""
    model, clients = problems.classification()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enrolled = model.enrol(clients)
    assert len({id(client.template) for client in enrolled.values()}) == 1


LINEAR = torch.nn.Linear(3, 2)


class Odd(torch.nn.Module):  # type: ignore[misc]
    """Without parameters."""

    def forward(self, X: Any) -> Any:
        return X


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (torch.nn.Sequential(LINEAR, torch.nn.BatchNorm1d(2)), "'1' .BatchNorm1d. changes its buffers in"),
        (torch.nn.Sequential(LINEAR, torch.nn.Dropout(0.5)), "'1' .Dropout. draws at random .*net.eval()"),
        (Odd(), "the network Odd has no parameters"),
        (
            torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Flatten()),
            "layer '0' .Embedding. has sparse=True.* make it with sparse=False",
        ),
        (torch.nn.EmbeddingBag(5, 2, sparse=True), "layer 'EmbeddingBag' .EmbeddingBag. has sparse=True"),
        ("net", "the network is str; pass a torch.nn.Module"),
    ],
)
def test_what_is_no_function_of_weights_and_inputs_is_refused(net: Any, message: str) -> None:
    with pytest.raises(fedppl.DeclarationError, match=message):
        nn.module(net, pt.dvector("w"), np.ones((2, 3)))


def test_batch_norm_in_evaluation_uses_its_buffers(rng: np.random.Generator) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).eval()
    net[1].running_mean += 1.5
    w, X = np.concatenate([rng.normal(size=8), [2.0, 3.0], [0.1, 0.2]]), rng.normal(size=(4, 3))
    found = compiled(lambda w, X: nn.module(net, w, X))(w, X)
    linear = X @ w[:6].reshape(2, 3).T + w[6:8]
    assert_allclose(found, (linear - 1.5) / np.sqrt(1 + 1e-5) * w[8:10] + w[10:], rtol=1e-6)
    net[1].running_mean += 1.0  # changed since: the network is looked at as it is
    found = compiled(lambda w, X: nn.module(net, w, X))(w, X)
    assert_allclose(found, (linear - 2.5) / np.sqrt(1 + 1e-5) * w[8:10] + w[10:], rtol=1e-6)


class Settings:
    """An attribute that is an object, which other objects are in, and it itself."""

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {"factor": 1.0, "self": self}
        self.factors = {1.0}


class Sharp(torch.nn.Module):  # type: ignore[misc]
    """A linear layer times an attribute and a buffer, and a module above that another may take the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sharpness, self.way = torch.nn.Linear(3, 2), 1.0, torch.nn.Identity()
        self.settings = Settings()
        self.register_buffer("scale", torch.ones(2, dtype=torch.complex64))

    def forward(self, X: Any) -> Any:
        set_to = self.settings.inner["factor"] * max(self.settings.factors)
        return self.way(self.layer(X) * self.sharpness * self.scale.real * set_to)


def sharper(net: Any) -> None:
    net.sharpness = 3.0


def rescaled(net: Any) -> None:
    net.scale.mul_(3.0)


def of_other_settings(net: Any) -> None:
    net.settings.inner["factor"] = 3.0


def of_more_factors(net: Any) -> None:
    net.settings.factors.add(3.0)


def of_another_way(net: Any) -> None:
    net.way = torch.nn.Threshold(-1e9, 0.0)
    net.way.forward = lambda f: 3.0 * f


@pytest.mark.parametrize("change", [sharper, rescaled, of_other_settings, of_more_factors, of_another_way])
def test_a_network_is_declared_as_it_is_and_stays_so(change: Any, rng: np.random.Generator) -> None:
    """What it was when something was declared before says nothing of it, and what it becomes changes nothing."""
    net, w, X = Sharp().eval(), rng.normal(size=8), rng.normal(size=(4, 3))
    before = compiled(lambda w, X: nn.module(net, w, X))
    plain = X @ w[:6].reshape(2, 3).T + w[6:]
    assert_allclose(before(w, X), plain)
    change(net)
    assert_allclose(compiled(lambda w, X: nn.module(net, w, X))(w, X), 3.0 * plain)
    assert_allclose(before(w, X), plain)


def test_a_network_may_hold_what_holds_itself(rng: np.random.Generator) -> None:
    net, w, X = torch.nn.Linear(3, 2), rng.normal(size=8), rng.normal(size=(4, 3))
    net.settings = {"names": ["a"]}
    net.settings["all"] = [net.settings]
    assert_allclose(compiled(lambda w, X: nn.module(net, w, X))(w, X), X @ w[:6].reshape(2, 3).T + w[6:])


@pytest.mark.parametrize("held", [threading.Lock, lambda: 2.0 * torch.ones(2, requires_grad=True)])
def test_a_network_that_cannot_be_copied_is_refused_where_it_is_declared(held: Any) -> None:
    net = torch.nn.Linear(3, 2)
    net.held = held()
    with pytest.raises(fedppl.DeclarationError, match="Linear cannot be copied"):
        nn.module(net, np.ones(8), np.ones((4, 3)))


def test_a_fit_predicts_by_the_network_that_it_is_of(rng: np.random.Generator) -> None:
    net = Sharp().eval()
    model = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), ["layer.weight", "layer.bias"])
    data = {name: {"X": rng.normal(size=(6, 3)), "y": np.arange(6) % 2} for name in "ab"}
    fit = fedppl.fit(model, data, nn.FedAvg(), rounds=1, progressbar=False, random_seed=1)
    before = nn.predict(fit, "a", {"X": data["b"]["X"]})["probability"]
    sharper(net)
    rescaled(net)
    assert_allclose(nn.predict(fit, "a", {"X": data["b"]["X"]})["probability"], before)
    assert_allclose(nn.network(fit).sharpness, 1.0)


def test_weights_of_other_names_and_priors_without_a_scale_are_refused() -> None:
    net = problems.network()
    with pytest.raises(fedppl.DeclarationError, match=r"weights are named \['a'\], and the network's parameters"):
        nn.module(net, {"a": pt.dvector()}, np.ones((2, 3)))
    with pytest.raises(fedppl.DeclarationError, match="weights have 2 dimensions; pass one vector of 31 numbers"):
        nn.module(net, pt.dmatrix(), np.ones((2, 3)))
    with pm.Model():
        with pytest.raises(fedppl.DeclarationError, match="sigma of '0.weight'=0 must be positive"):
            nn.parameters(net, sigma=0)
        with pytest.raises(fedppl.DeclarationError, match=r"sigma names \['0.weight'\], the network's parameters are"):
            nn.parameters(net, sigma={"0.weight": 1.0})


def test_what_is_no_network_and_no_model_is_refused() -> None:
    with pytest.raises(fedppl.DeclarationError, match="the network is int; pass a torch.nn.Module"):
        nn.parameters(3)  # type: ignore[arg-type]
    with pytest.raises(fedppl.DeclarationError, match="call it inside `with pm.Model"):
        nn.parameters(problems.network())


def test_labels_beyond_the_networks_outputs_are_refused_before_any_round() -> None:
    model, clients = problems.classification()
    clients = {**clients, "odd": {**clients["device 0"], "y": np.full(20, 3)}}
    with pytest.raises(fedppl.DataError, match="client 'odd'.*class"):
        model.enrol(clients, kernel=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.full((20, 3), np.nan)}, "client 'odd': 'X' holds nan"),
        ({"X": np.zeros((0, 3)), "y": np.zeros(0, int)}, "client 'odd': 'X' has shape .0, 3., that is zero rows"),
        ({"X": np.zeros((20, 5))}, "client 'odd'"),
    ],
)
def test_data_that_cannot_be_used_are_refused_at_enrolment(change: dict[str, Any], message: str) -> None:
    model, clients = problems.classification()
    with pytest.raises((fedppl.DataError, fedppl.DeclarationError), match=message):
        model.enrol({**clients, "odd": {**clients["device 0"], **change}}, kernel=False)


# --- local inference of the foundation ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def line() -> tuple[Any, dict[str, Any]]:
    """A network without a hidden layer is a linear regression: X w + b, noise 0.5, w ~ N(start, 1)."""
    torch.manual_seed(4)
    net = torch.nn.Linear(2, 1)
    rng = np.random.default_rng(8)
    X = rng.normal(size=(40, 2))
    return net, {"X": X, "y": (X @ [1.0, -2.0] + 0.5 + 0.5 * rng.normal(size=40))[:, None]}


def exact(net: Any, data: dict[str, Any]) -> tuple[Any, Any]:
    """Posterior mean and covariance of (w, b): the normal equations."""
    start = np.concatenate([v.detach().double().numpy().ravel() for v in net.parameters()])
    D = np.column_stack([data["X"], np.ones(len(data["X"]))])
    covariance = np.linalg.inv(D.T @ D / 0.25 + np.eye(3))
    return covariance @ (D.T @ data["y"][:, 0] / 0.25 + start), covariance


@problems.few_rounds
@pytest.mark.parametrize(
    "local",
    [
        fedppl.local.NestedLaplace(),
        fedppl.local.Laplace(),
        pytest.param(fedppl.local.ADVI(), marks=pytest.mark.slow),
        pytest.param(fedppl.local.NUTS(draws=400, tune=300, chains=2), marks=pytest.mark.slow),
    ],
    ids=["nested Laplace", "Laplace", "ADVI", "NUTS"],
)
def test_local_inferences_of_a_linear_network_are_the_regressions(line: Any, local: Any) -> None:
    """One client: EP's posterior is the exact one; NUTS within its Monte Carlo error, 5 / √800 of a posterior sd."""
    net, data = line
    model = fedppl.FederatedModel(functools.partial(fedsi.regressor, net=net, noise_sd=0.5), ["weight", "bias"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*object mode.*")  # an Op without Numba's own code
        fit = fedppl.fit(model, {"a": data}, fedppl.EP(local=local), rounds=6, progressbar=False, random_seed=2)
    mean, covariance = exact(net, data)
    sd = np.sqrt(np.diag(covariance))
    error = 5 / np.sqrt(800) if local.name == "NUTS" else 1e-3
    assert_allclose(gaussian.mean(fit.posterior), mean, atol=error * sd.max())
    found = np.sqrt(np.diag(gaussian.covariance(fit.posterior)))
    assert_allclose(found, sd, rtol=0.25 if local.name == "NUTS" else 2e-2)


@problems.few_rounds
@pytest.mark.slow
def test_nuts_samples_a_network_with_a_hidden_layer_and_predicts(rng: np.random.Generator) -> None:
    """60 rows of sin, noise 0.3: predictions of the curve are within noise of it, and intervals hold new outcomes."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    X = rng.uniform(-2, 2, size=(60, 1))
    y = np.sin(2 * X) + 0.3 * rng.normal(size=X.shape)
    model = fedppl.FederatedModel(functools.partial(fedsi.regressor, net=net, noise_sd=0.3, sigma=1.0), ["2.bias"])
    local = fedppl.local.NUTS(
        draws=150, tune=200, chains=2, rhat_limit=3.0
    )  # short chains, and hidden units may change places
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*object mode.*")  # an Op without Numba's own code
        data = {"a": {"X": X, "y": y}}
        fit = fedppl.fit(model, data, fedppl.EP(local=local), rounds=1, progressbar=False, random_seed=3)
        new = np.linspace(-1.8, 1.8, 50)[:, None]
        drawn = fit.predict("a", {"X": new}, draws=150, chains=2)["predictions"]["outcome"].values.reshape(300, 50)
    assert np.sqrt(np.mean((drawn.mean(axis=0) - np.sin(2 * new[:, 0])) ** 2)) < 0.25
    low, high = np.quantile(drawn, [0.05, 0.95], axis=0)
    fresh = np.sin(2 * new[:, 0]) + 0.3 * np.random.default_rng(5).normal(size=50)
    assert np.mean((low < fresh) & (fresh < high)) > 0.75  # 0.9 ± 4 · 0.042 of fifty, less a little


def test_some_rows_at_a_time_are_all_rows(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, and gradients with respect to weights and inputs, in chunks that do not divide the rows."""
    net, w, X, A = problems.network(), rng.normal(size=31), rng.normal(size=(23, 3)), rng.normal(size=(23, 3))
    cost = lambda w, X: pt.sum(A * nn.module(net, w, X))  # noqa: E731
    function = compiled(lambda w, X: [nn.module(net, w, X), *pt.grad(cost(w, X), [w, X])])
    wanted = function(w, X)
    monkeypatch.setattr(functional, "_NUMBERS", 20)  # five rows of four hidden units
    assert len(functional.parts_of(net, X.shape)) == 5
    for found, value in zip(function(w, X), wanted, strict=True):
        assert_allclose(found, value, rtol=1e-12)


class Centred(torch.nn.Module):  # type: ignore[misc]
    """Rows that depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, X: Any) -> Any:
        found = self.layer(X)
        return found - found.mean(0)


def test_rows_that_depend_on_each_other_are_computed_at_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, w, X = Centred(), rng.normal(size=8), rng.normal(size=(23, 3))
    monkeypatch.setattr(functional, "_NUMBERS", 15)
    output = X @ w[:6].reshape(2, 3).T + w[6:]
    assert_allclose(compiled(lambda w, X: nn.module(net, w, X))(w, X), output - output.mean(axis=0), atol=1e-12)


@pytest.mark.parametrize("net", [torch.nn.Linear(3, 2, device="meta"), torch.nn.LazyLinear(2)])
def test_a_network_without_values_is_refused(net: Any) -> None:
    with pm.Model(), pytest.raises(fedppl.DeclarationError, match="hold no values"):
        nn.parameters(net)


def test_complex_weights_are_refused() -> None:
    net = torch.nn.Linear(3, 2, dtype=torch.complex64)
    with pytest.raises(fedppl.DeclarationError, match=r"\['weight', 'bias'\] are no real numbers"):
        nn.module(net, np.ones(8), np.ones((4, 3)))


class Waves(torch.nn.Linear):  # type: ignore[misc]
    """Complex outputs of real weights."""

    def forward(self, X: Any) -> Any:
        return torch.exp(1j * super().forward(X))


def test_complex_outputs_are_refused() -> None:
    with pytest.raises(fedppl.DeclarationError, match="torch.complex128.*end it in a real layer"):
        nn.module(Waves(3, 2), np.ones(8), np.ones((4, 3)))


def outcome(X: Any, y: Any, *, outputs: int, declared: Any) -> Any:
    net = problems.network(outputs=outputs)
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        declared(nn.module(net, nn.parameters(net), X), y)
    return model


WIDE = {
    "classes": (lambda f, y: pm.Categorical("o", logit_p=f, observed=y), 10, (12, 3), ["(12, 3)", "(12,)", "(12, 10)"]),
    "wide": (lambda f, y: pm.Normal("o", f, 1, observed=y), 10, (12, 3), ["(12, 3)", "(12, 10)"]),
    "one output": (lambda f, y: pm.Normal("o", f, 1, observed=y), 1, (12, 3), ["(12, 3)", "(12, 1)"]),
    "a column": (lambda f, y: pm.Poisson("o", pm.math.exp(f[:, 0]), observed=y), 1, (12, 3), ["(12, 3)", "(12,)"]),
    "a vector": (lambda f, y: pm.Normal("o", f, 1, observed=y), 1, (12,), ["(12,)", "f[:, 0]", "module(Sequential)"]),
}


@pytest.mark.parametrize("name", WIDE)
def test_outcomes_of_another_shape_than_the_output_are_told_by_both(name: str, rng: np.random.Generator) -> None:
    declared, outputs, shape, words = WIDE[name]
    builder = functools.partial(outcome, outputs=outputs, declared=declared)
    model = fedppl.FederatedModel(builder, ["0.weight", "0.bias", "2.weight", "2.bias"])
    with pytest.raises(fedppl.DataError) as refused:
        model.enrol({"a": {"X": rng.normal(size=(12, 3)), "y": rng.integers(2, size=shape)}}, kernel=False)
    for word in ("'a'", *words):
        assert word in str(refused.value)


@pytest.mark.parametrize("size", [22, 30])
def test_weights_of_another_number_are_refused(size: int) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    with pm.Model(), pytest.raises(fedppl.DeclarationError, match=rf"{size} numbers.*21"):
        fedppl.nn.module(net, pm.Normal("w", shape=size), np.zeros((5, 3)))
