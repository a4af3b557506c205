"""Federated averaging: centralised gradient descent first, then closed forms, then what every such algorithm keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize, minimize_scalar

import fedppl
from fedppl import gaussian
from fedppl.contracts import Algorithm, Failure, Request
from fedppl.engine.answer import answer
from fedppl.numerics.streams import stream
from fedppl.run.replies import sum_replies
from fedppl.storage import checkpoint
from fedppl.types import DataError, DeclarationError, Status
from tests import pooled, problems


def fitted(model: Any, clients: Any, algorithm: Algorithm, **settings: Any) -> fedppl.Fit:
    return fedppl.fit(
        model, clients, algorithm, **({"progressbar": False, "random_seed": 1, "rounds": 2000} | settings)
    )


def path(model: Any, clients: Any, algorithm: Algorithm, rounds: int, **settings: Any) -> list[Any]:
    """φ after every round."""
    steps = fedppl.rounds(model, clients, algorithm, rounds=rounds, random_seed=1, **settings)
    return [np.array(step.state.phi) for step in steps]


# --- centralised gradient descent -----------------------------------------------------------------------------


def test_one_full_step_a_round_is_gradient_descent_on_the_log_posterior() -> None:
    """φ ← φ − η [(Σ XᵀX + I/9) φ − Σ Xᵀy] / N, from the prior's mean 0."""
    model, clients = pooled.linear()
    found = path(model, clients, fedppl.FedAvg(learning_rate=0.1, steps=1, tolerance=1e-15), 150)
    assert len(found) == 150
    X, y = (np.concatenate([d[name] for d in clients.values()]) for name in ("X", "y"))
    phi = np.zeros(2)
    for ours in found:
        phi = phi - 0.1 * (X.T @ (X @ phi - y) + pooled.PRIOR @ phi) / len(y)
        assert_allclose(ours, phi, rtol=0, atol=1e-10)
    assert np.linalg.norm(found[0] - found[-1]) > 0.1  # it went somewhere


def test_the_same_holds_for_a_logistic_regression() -> None:
    """φ ← φ − η [Σ Xᵀ(logit⁻¹ Xβ − y) + β/4] / N."""
    model, clients = pooled.logit()
    found = path(model, clients, fedppl.FedAvg(learning_rate=1.0, steps=1, tolerance=1e-15), 60)
    beta, rows = np.zeros(2), sum(len(d["y"]) for d in clients.values())
    for ours in found:
        beta = beta - pooled.logit_gradient(clients, beta) / rows
        assert_allclose(ours, beta, rtol=0, atol=1e-10)


# --- closed forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["rows", "equal"])
def test_rounds_of_many_steps_follow_their_closed_form(weights: str) -> None:
    """φ ← Σ w_k [φ_k* + (I − ηA_k)ᵀ (φ − φ_k*)] / Σ w_k."""
    model, clients = pooled.linear()
    found = path(model, clients, fedppl.FedAvg(learning_rate=0.05, steps=7, weights=weights, tolerance=1e-15), 30)
    phi = np.zeros(2)
    for ours in found:
        ends = [
            (pooled.after_steps(A, b, phi, 0.05, 7), n if weights == "rows" else 1)
            for A, b, n in pooled.losses(clients)
        ]
        phi = sum(w * end for end, w in ends) / sum(w for _, w in ends)
        assert_allclose(ours, phi, rtol=0, atol=1e-10)


@pytest.mark.parametrize("weights", ["rows", "equal"])
def test_the_fixed_point_of_single_steps_is_the_mode_and_of_many_it_is_not(weights: str) -> None:
    """(Σ w A)⁻¹ Σ w b for T = 1; with T = 40 clients drift to their own modes, as the docstring says."""
    model, clients = pooled.linear()
    exact = pooled.mode(clients, weights)
    single = fitted(model, clients, fedppl.FedAvg(learning_rate=0.2, steps=1, weights=weights, tolerance=1e-10))
    assert single.status is Status.CONVERGED
    assert_allclose(single.estimate["mu"], exact, atol=1e-8)
    many = fitted(model, clients, fedppl.FedAvg(learning_rate=0.2, steps=40, weights=weights, tolerance=1e-10))
    assert many.status is Status.CONVERGED
    assert np.max(np.abs(many.estimate["mu"] - exact)) > 0.05


def test_local_variables_take_their_steps_along() -> None:
    """Gaussian throughout, so φ at the joint mode is the mean of the exact marginal posterior."""
    model, clients = problems.regression()
    fit = fitted(model, clients, fedppl.FedAvg(learning_rate=0.2, steps=1, tolerance=1e-9), rounds=5000)
    assert fit.status is Status.CONVERGED
    exact = problems.regression_posterior(clients)
    assert_allclose(fit.state.phi, gaussian.mean(exact), atol=1e-6)
    # β given φ: (XᵀX + 4I)⁻¹ (Xᵀ(y − a) + 4μ)
    mu, a = fit.state.phi[:2], fit.state.phi[2]
    for client_id, d in clients.items():
        beta = np.linalg.solve(d["X"].T @ d["X"] + 4 * np.eye(2), d["X"].T @ (d["y"] - a) + 4 * mu)
        draws = fit.client(client_id, draws=3, chains=1)["posterior"]["beta"].values
        assert_allclose(draws, np.broadcast_to(beta, (1, 3, 2)), atol=1e-5)
    # a client that never took part: θ goes to its mode at φ
    d = clients["clinic 1"]
    beta = np.linalg.solve(d["X"].T @ d["X"] + 4 * np.eye(2), d["X"].T @ (d["y"] - a) + 4 * mu)
    assert_allclose(fit.new_client(d, draws=2, chains=1)["posterior"]["beta"].values[0, 0], beta, atol=1e-6)


def test_a_prior_that_is_not_gaussian_is_shared_out() -> None:
    """Mode of −n u − S e^(−2u)/2 + u − e^(2u)/2 over u = log σ, by a line search."""
    model, clients = pooled.spread()
    fit = fitted(model, clients, fedppl.FedAvg(learning_rate=0.2, steps=1, tolerance=1e-10))
    assert not fit.layout.prior_is_gaussian
    exact = minimize_scalar(lambda u: -pooled.spread_log_density(clients, u), (0.0, 1.0), options={"xtol": 1e-12}).x
    without = minimize_scalar(lambda u: -pooled.spread_log_density(clients, u, 0.0), (0.0, 1.0)).x
    assert abs(exact - without) > 1e-3  # the prior matters
    assert_allclose(fit.state.phi, [exact], atol=1e-6)
    assert_allclose(fit.estimate["sigma"], np.exp(exact), atol=1e-6)


def test_all_draws_of_a_point_are_equal_and_there_is_no_posterior() -> None:
    model, clients = pooled.linear()
    fit = fitted(model, clients, fedppl.FedAvg(learning_rate=0.1), rounds=3)
    drawn = fit.client("plot 2", draws=4, chains=2)["posterior"]["mu"].values
    assert_array_equal(drawn, np.broadcast_to(fit.state.phi, (2, 4, 2)))
    assert_array_equal(fit.idata["point_estimate"]["mu"].values, fit.state.phi)
    with pytest.raises(DeclarationError, match="no posterior"):
        _ = fit.posterior


# --- batches --------------------------------------------------------------------------------------------------


def test_batches_as_large_as_the_data_are_all_of_it() -> None:
    model, clients = problems.regression()
    whole = path(model, clients, fedppl.FedAvg(learning_rate=0.05, steps=5), 3)
    for ours, theirs in zip(
        path(model, clients, fedppl.FedAvg(learning_rate=0.05, steps=5, batch_size=99), 3), whole, strict=True
    ):
        assert_array_equal(ours, theirs)


def test_small_batches_end_near_the_mode_and_do_not_claim_to_have_arrived() -> None:
    """An autoregression with rate ηλ about the mode: its mean has the sd of n ηλ/2 independent rounds."""
    model, clients = pooled.linear()
    exact, sds = pooled.mode(clients), []
    total = sum(n * A for A, _, n in pooled.losses(clients)) / sum(n for *_, n in pooled.losses(clients))
    slowest = np.linalg.eigvalsh(total)[0]
    for rate in (0.1, 0.01):
        found = np.array(path(model, clients, fedppl.FedAvg(learning_rate=rate, steps=1, batch_size=3), 1000))
        assert len(found) == 1000  # none of the rounds was taken for convergence
        late = found[500:]
        sds.append(late.std(axis=0))
        assert np.all(np.abs(late.mean(axis=0) - exact) < 4 * sds[-1] / np.sqrt(len(late) * rate * slowest / 2))
    assert np.all(sds[1] < 0.6 * sds[0])  # √(1/10), and room for the few independent rounds


def row_effects(y: Any) -> Any:
    return problems.counts_builder(y)


def mean_of_rows(y: Any) -> Any:
    """The prior of θ hangs on the rows' mean: no sum over rows."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 1)
        theta = pm.Normal("theta", mu + 0.1 * y.sum(), 1)
        pm.Normal("obs", theta, 1, observed=y)
    return model


def as_long_by_chance(y: Any, w: Any) -> Any:
    """w has an entry per coefficient; with as many rows it cannot be told from a column."""
    with pm.Model() as model:
        y, w = pm.Data("y", y), pm.Data("w", w)
        mu = pm.Normal("mu", 0, 1)
        pm.Normal("obs", mu * w.sum(), 1, observed=y)
    return model


@pytest.mark.parametrize(
    ("builder", "data", "match"),
    [
        (row_effects, {"y": np.array([1, 2, 3])}, "no local variable with an entry per row"),
        (problems.without_containers, {"y": np.array([1.0, 2.0])}, "pm.Data containers"),
        (mean_of_rows, {"y": np.array([1.0, 2.0, 4.0])}, "not a sum over its 3 rows"),
        (as_long_by_chance, {"y": np.array([1.0, 2.0, 4.0]), "w": np.array([1.0, 2.0, 3.0])}, "just as long"),
    ],
)
@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "SCAFFOLD", "Ditto", "SeparateSGD"])
def test_models_without_batches_are_refused_before_the_first_round(
    name: str, builder: Any, data: Any, match: str
) -> None:
    model = problems.declared(builder, ("mu",))
    more = {"FedProx": {"mu": 0.1}, "Ditto": {"lam": 0.1}}.get(name, {})
    build = getattr(fedppl, name)
    with pytest.raises(DataError, match=match) as error:
        fitted(model, {"a": data}, build(learning_rate=0.01, batch_size=2, **more))
    assert "batch_size=None" in str(error.value)
    assert fitted(model, {"a": data}, build(learning_rate=0.01, **more), rounds=1).records[0].failures == {}


def test_as_long_by_chance_is_no_trouble_at_another_length() -> None:
    model = problems.declared(as_long_by_chance, ("mu",))
    data = {"y": np.array([1.0, 2.0, 4.0, 3.0]), "w": np.array([1.0, 2.0, 3.0])}
    assert (
        fitted(model, {"a": data}, fedppl.FedAvg(learning_rate=1e-3, batch_size=2), rounds=1).records[0].failures == {}
    )


# --- trouble --------------------------------------------------------------------------------------------------


def test_steps_that_diverge_are_a_failure_that_names_the_learning_rate() -> None:
    model, clients = pooled.linear()
    fit = fitted(model, clients, fedppl.FedAvg(learning_rate=30.0), rounds=2)
    assert fit.status is Status.STALLED
    assert set(fit.records[0].failures) == set(clients)
    assert all("learning_rate=30" in reason for reason in fit.records[0].failures.values())
    assert_array_equal(fit.state.phi, np.zeros(2))


def test_a_client_that_starts_blank_says_so() -> None:
    model, clients = problems.regression()
    steps = list(fedppl.rounds(model, clients, fedppl.FedAvg(learning_rate=0.1), rounds=2, random_seed=1))
    assert all(info == {"blank": 1.0} for info in steps[0].record.infos.values())
    assert all(info == {} for info in steps[1].record.infos.values())
    everything_shared, of = pooled.linear()  # nothing to be blank about
    step = next(iter(fedppl.rounds(everything_shared, of, fedppl.FedAvg(learning_rate=0.1), random_seed=1)))
    assert all(info == {} for info in step.record.infos.values())


def test_replies_that_are_none_are_refused() -> None:
    algorithm = fedppl.FedAvg(learning_rate=0.1)
    good = {"weighted": np.zeros(2), "weight": np.array(1.0), "local_change": np.array(0.0)}
    assert algorithm.refuse(None, good) is None
    for name, value in (("weight", 0.0), ("weight", -3.0), ("local_change", -1.0)):
        assert f"{name!r} is {value:.3g}" in str(algorithm.refuse(None, {**good, name: np.array(value)}))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1"),
        ({"learning_rate": np.nan}, "learning_rate=nan"),
        ({"learning_rate": np.inf}, "learning_rate=inf"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -4}, "batch_size=-4"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"weights": "size"}, "weights='size'"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"tolerance": 1.0}, "tolerance=1.0"),
    ],
)
@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "SCAFFOLD", "Ditto", "SeparateSGD"])
def test_settings_out_of_range_are_refused(name: str, settings: Any, match: str) -> None:
    more = {"FedProx": {"mu": 0.1}, "Ditto": {"lam": 0.1}}.get(name, {})
    if name == "SeparateSGD" and "weights" in settings:
        pytest.skip("it averages nothing")
    with pytest.raises(DeclarationError, match=match):
        getattr(fedppl, name)(**({"learning_rate": 0.1, **more} | settings))


# --- promises of all of them ----------------------------------------------------------------------------------

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": lambda: fedppl.FedAvg(learning_rate=0.05, batch_size=4),
    "FedProx": lambda: fedppl.FedProx(learning_rate=0.05, mu=0.3, batch_size=4),
    "SCAFFOLD": lambda: fedppl.SCAFFOLD(learning_rate=0.05, batch_size=4),
    "Ditto": lambda: fedppl.Ditto(learning_rate=0.05, lam=0.3, batch_size=4),
    "Separate": fedppl.Separate,
    "SeparateSGD": lambda: fedppl.SeparateSGD(learning_rate=0.05, steps=30, batch_size=4),
    "PrecisionWeighted": fedppl.PrecisionWeighted,
    "ConsensusMonteCarlo": lambda: fedppl.ConsensusMonteCarlo(draws=50),
}
every = pytest.mark.parametrize("name", ALGORITHMS)
SUMS = ["FedAvg", "FedProx", "Ditto", "ConsensusMonteCarlo"]


def frozen(value: Any) -> Any:
    """The same, with arrays that cannot be written to."""
    if isinstance(value, dict):
        return {name: frozen(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
        return value
    if hasattr(value, "_replace"):
        return value._replace(**{name: frozen(part) for name, part in value._asdict().items()})
    return value


def play(name: str, rounds: int, *, ids: Any = None, reverse: bool = False) -> tuple[list[Any], list[Any], Any]:
    """States, replies and personal states of rounds played by hand, on arrays that cannot be written to."""
    model, clients = problems.regression()
    models, algorithm = model.enrol(clients), ALGORITHMS[name]()
    everyone = tuple(models)
    states = [frozen(algorithm.init_server(models[everyone[0]].layout, everyone, stream((1,))))]
    personal: dict[str, Any] = dict.fromkeys(models)
    sent = []
    for number in range(rounds):
        replies = {}
        for client_id in everyone if ids is None else ids(number, everyone):
            message = frozen(dict(algorithm.broadcast(states[-1], client_id)))
            personal[client_id], reply, _ = algorithm.update_client(
                models[client_id], personal[client_id], message, stream((number, everyone.index(client_id)))
            )
            assert {k: np.shape(v) for k, v in reply.items()} == dict(algorithm.reply_shapes(states[-1]))
            assert algorithm.refuse(states[-1], reply) is None
            personal[client_id], replies[client_id] = frozen(personal[client_id]), frozen(dict(reply))
        ordered = dict(reversed(replies.items())) if reverse else replies
        states.append(frozen(algorithm.update_server(states[-1], ordered)[0]))
        sent.append(replies)
    return states, sent, personal


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, tuple):
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    elif isinstance(ours, np.ndarray | float):
        assert_array_equal(ours, theirs)
    elif not hasattr(ours, "blocks"):  # a structure is an array's shape
        assert ours == theirs


@every
def test_equal_seeds_give_equal_numbers_and_nothing_is_changed_in_place(name: str) -> None:
    first, second = play(name, 3), play(name, 3)
    for ours, theirs in zip(first, second, strict=True):
        assert_same(
            tuple(ours) if isinstance(ours, list) else ours, tuple(theirs) if isinstance(theirs, list) else theirs
        )


@every
def test_the_order_of_replies_changes_nothing(name: str) -> None:
    assert_same(play(name, 3)[0][-1], play(name, 3, reverse=True)[0][-1])


@every
def test_no_reply_changes_nothing_and_any_subset_will_do(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    states, _, _ = play(name, 6, ids=lambda number, everyone: everyone[number % 4 : number % 4 + 2])
    for state in states[1:]:
        after = algorithm.update_server(state, {})[0]
        assert_same(after._replace(message="", status=""), state._replace(message="", status=""))
        assert Status(state.status) in (Status.RUNNING, Status.CONVERGED)
        assert (state.message == "") == (state.status == Status.CONVERGED.value)


@every
def test_states_and_personal_states_have_their_place_in_a_checkpoint(name: str) -> None:
    states, _, personal = play(name, 2)
    content = {"state": states[-1], "personal": personal}
    back = checkpoint.unpack(checkpoint.pack(content), "it")
    assert_same(back["state"], states[-1])
    for client_id, kept in personal.items():
        assert_same(back["personal"][client_id], kept)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_replies_is_as_good_as_the_replies(name: str) -> None:
    """What a secure or a hierarchical sum would deliver."""
    algorithm = ALGORITHMS[name]()
    states, sent, _ = play(name, 2)
    state, replies = (states[0], sent[0]) if name == "ConsensusMonteCarlo" else (states[1], sent[1])
    apart = algorithm.update_server(state, replies)[0]
    first, rest = dict(list(replies.items())[:3]), dict(list(replies.items())[3:])
    for grouped in ({"group": sum_replies(replies)}, {"group": sum_replies(first), **rest}):
        together = algorithm.update_server(state, grouped)[0]
        assert together.status == apart.status
        numbers = ("weighted", "weight", "included") if name == "ConsensusMonteCarlo" else ("phi",)
        for number in numbers:
            assert_allclose(getattr(together, number), getattr(apart, number), rtol=1e-12, atol=1e-12)


@every
def test_what_a_client_keeps_is_a_cache(name: str) -> None:
    """Wiped between rounds, it answers all the same, and draws can be had."""
    model, clients = problems.regression()
    algorithm = ALGORITHMS[name]()
    client = model.enrol(clients)["clinic 1"]
    state = algorithm.init_server(client.layout, tuple(clients), stream((1,)))
    for number in range(2):
        request = Request("clinic 1", 1, number, (1, number), algorithm.broadcast(state, "clinic 1"))
        _, reply = answer(algorithm, client, None, request)
        assert not isinstance(reply, Failure)
        state, _ = algorithm.update_server(state, {"clinic 1": reply.message})
    for client_id in ("clinic 1", "clinic 2", "somebody else"):
        draws = algorithm.draw(client, None, algorithm.outcome(state, client_id), 20, 2, stream((3,)))
        assert draws.shared.shape == (2, 20, 3)
        assert draws.local.shape == (2, 20, 2)
        assert np.all(np.isfinite(draws.shared)) and np.all(np.isfinite(draws.local))


@every
def test_a_resumed_run_gives_the_numbers_of_one_that_was_not_interrupted(name: str, tmp_path: Any) -> None:
    model, clients = problems.regression()
    settings: dict[str, Any] = {"participation": 2, "random_seed": 4, "progressbar": False}
    whole = fedppl.fit(model, clients, ALGORITHMS[name](), rounds=6, **settings)
    for rounds in (3, 6):
        fit = fedppl.fit(model, clients, ALGORITHMS[name](), rounds=rounds, checkpoint=tmp_path / "run", **settings)
    assert_same(fit.state, whole.state)
    for client_id, kept in whole.personal.items():
        assert_same(fit.personal[client_id], kept)


def test_a_mode_by_brute_force() -> None:
    """The joint mode of a model with local variables, all of them in one vector, by BFGS.

    In the first round only the θ_k move, and φ stands still: nothing has converged yet.
    """
    model, clients = problems.logistic()
    models = list(model.enrol(clients).values())

    def loss(x: Any) -> float:
        values = [c.log_site(x[:1], x[1 + k : 2 + k])[0] for k, c in enumerate(models)]
        return float(-sum(values) + 0.5 * (x[0] / 1.5) ** 2)

    exact = minimize(loss, np.zeros(1 + len(models)), options={"gtol": 1e-7}).x
    fit = fitted(model, clients, fedppl.FedAvg(learning_rate=1.0, steps=1, tolerance=1e-9), rounds=5000)
    assert fit.status is Status.CONVERGED
    assert_allclose(fit.state.phi, exact[:1], atol=1e-5)


@every
def test_flower_gives_the_embedded_engines_numbers(name: str) -> None:
    """Over Flower's records, empty messages among them, by way of the grid in this process."""
    pytest.importorskip("flwr")
    from tests import test_flower
    from tests.fake_grid import FakeGrid

    model, clients = problems.regression()
    here = fitted(model, clients, ALGORITHMS[name](), rounds=3)
    grid = FakeGrid(test_flower.nodes_of(model, clients, algorithm=ALGORITHMS[name]()))
    there = test_flower.fit(grid, model, len(clients), ALGORITHMS[name](), rounds=3)
    assert there.status is here.status
    assert_same(there.state, here.state)
