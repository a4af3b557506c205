"""Promises that every local inference and every algorithm keeps, through one table each.

What a way promises of its own stands in test_local.py, what an algorithm does in its own file. A new one joins by a
row here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import gaussian
from fedppl.algorithms.ep import _sites
from fedppl.contracts import Algorithm, Failure, LocalInference, Reply, Request, Target
from fedppl.engine.answer import answer
from fedppl.gaussian import Gaussian
from fedppl.model._graph import python_function
from fedppl.model.client import ClientModel
from fedppl.numerics.newton import difference_hessian
from fedppl.numerics.prior import SharedPrior
from fedppl.numerics.streams import stream
from fedppl.run.replies import sum_replies
from fedppl.storage import checkpoint
from tests import problems
from tests.test_runs import arrays, assert_same_state, coregional, told, trends

# --- local inferences -----------------------------------------------------------------------------------------

# How much of a Gaussian model's moments each way gets right: all of them to rounding, the mean only, or all of
# them up to Monte Carlo error.
EXACT, MEAN, MONTE_CARLO = "exact", "mean", "Monte Carlo"
WAYS: dict[str, tuple[LocalInference, str]] = {
    "nested Laplace": (fedppl.NestedLaplace(), EXACT),
    "Laplace": (fedppl.Laplace(), EXACT),
    "ADVI": (fedppl.ADVI(), EXACT),
    "gradient steps": (fedppl.GradientSteps(steps=1000, learning_rate=1e-2), EXACT),
    "mean field": (fedppl.MeanField(), MEAN),
    "NUTS of PyMC": (fedppl.NUTS(draws=600, tune=400, chains=2, nuts_sampler="pymc"), MONTE_CARLO),
}
if importlib.util.find_spec("nutpie"):
    WAYS["NUTS of nutpie"] = (fedppl.NUTS(draws=1500, tune=600, chains=2, nuts_sampler="nutpie"), MONTE_CARLO)
every_way = pytest.mark.parametrize("name", WAYS)

CLIENT = "clinic 1"


@functools.cache
def client() -> ClientModel:
    model, clients = problems.regression()
    return model.enrol(clients)[CLIENT]


@functools.cache
def target() -> Target:
    """The exact cavity, and a global q that is off by half an sd and somewhat wide."""
    clients = problems.regression()[1]
    posterior, site = problems.regression_posterior(clients), problems.regression_site(clients[CLIENT])
    shifted = gaussian.mean(posterior) + 0.5 * gaussian.standard_deviations(posterior)
    global_ = Gaussian(0.8 * posterior.precision @ shifted, 0.8 * posterior.precision)
    return Target(client(), global_, gaussian.quotient(posterior, site), 0.0)


def assert_moments(name: str, found: Any, mean: Any, covariance: Any) -> None:
    sd, kind = np.sqrt(np.diag(covariance)), WAYS[name][1]
    if kind == MONTE_CARLO:
        # standard errors of a mean and of an sd; those of the precision's diagonal are of the size of the variance's
        ess = found.diagnostics["ess"]
        assert_allclose((found.mean - mean) / sd, 0, atol=4 / np.sqrt(ess))
        assert_allclose(np.sqrt(np.diag(found.covariance)), sd, rtol=4 / np.sqrt(2 * ess))
        assert_allclose(np.diag(found.precision), np.diag(np.linalg.inv(covariance)), rtol=6 / np.sqrt(ess))
        return
    assert_allclose((found.mean - mean) / sd, 0, atol=1e-6)
    if kind == EXACT:
        assert_allclose(found.covariance / np.outer(sd, sd), covariance / np.outer(sd, sd), atol=1e-6)
        assert_allclose(found.precision * np.outer(sd, sd), np.linalg.inv(covariance) * np.outer(sd, sd), atol=1e-5)


@every_way
def test_a_prior_that_is_not_gaussian_enters_by_its_share(name: str) -> None:
    """p = N(1, 0.5²) handed over as "not Gaussian" beside N_0 = N(0, 3²): p / N_0 is then a Gaussian factor too.

    Closed form: site x cavity x (p / N_0)^(1/2).
    """
    p = Gaussian(np.full(3, 4.0), 4.0 * np.eye(3))
    n0 = Gaussian(np.zeros(3), np.eye(3) / 9)

    def kernel(phi: Any, *nothing: Any) -> Any:
        return np.append(gaussian.log_kernel(p, phi), p.linear - p.precision @ phi)

    prior = SharedPrior(
        log_density=lambda phi: gaussian.log_kernel(p, phi),
        gradient=lambda phi: p.linear - p.precision @ phi,
        gaussian=n0,
        is_gaussian=False,
        gradients=lambda phi: p.linear - phi @ p.precision,
        kernel=lambda: kernel,
    )
    base, way = target(), WAYS[name][0]
    folded = base._replace(client=dataclasses.replace(base.client, prior=prior), prior_share=0.5)
    site = problems.regression_site(problems.regression()[1][CLIENT])
    ratio = Gaussian(0.5 * (p.linear - n0.linear), 0.5 * (p.precision - n0.precision))
    mean, covariance = problems.tilted(site, gaussian.product(base.cavity, ratio))
    without = problems.tilted(site, base.cavity)[0]
    assert np.all(np.abs(mean - without) > 0.05 * np.sqrt(np.diag(covariance)))  # the factor matters
    assert_moments(name, way.tilted(folded, np.random.default_rng(3)), mean, covariance)
    # with no share of it, nothing enters
    unmoved = way.tilted(folded._replace(prior_share=0.0), np.random.default_rng(1))
    assert_array_equal(unmoved.mean, way.tilted(base, np.random.default_rng(1)).mean)


@functools.cache
def noise_case() -> tuple[Target, Any, Any]:
    """A client whose σ is local and whose τ is shared, in the middle of a fit, with its moments by quadrature."""
    model, clients = problems.noise()
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    cavity = _sites.cavity(fit.state.sites, "site 1")
    mean, covariance, _ = problems.noise_tilted(clients["site 1"], cavity)
    return Target(fit.clients["site 1"], fit.posterior, cavity, 0.0), mean, covariance


# In posterior sds (means) and relative (sds). Laplace at the joint mode is biased for log τ, as its docstring says,
# and a Gaussian fit is a little narrow; sampling has an ESS of at least 900.
TOLERANCE = {
    "nested Laplace": (0.02, 0.01),
    "Laplace": (0.2, 0.05),
    "ADVI": (0.03, 0.03),
    "gradient steps": (0.2, 0.05),
    "mean field": (0.05, 0.05),
    "NUTS of PyMC": (4 / np.sqrt(900), 4 / np.sqrt(1800)),
    "NUTS of nutpie": (4 / np.sqrt(900), 4 / np.sqrt(1800)),
}


@every_way
def test_moments_of_a_model_that_is_not_gaussian_are_near_those_of_quadrature(name: str) -> None:
    case, mean, covariance = noise_case()
    way = fedppl.GradientSteps(steps=3000, learning_rate=2e-3) if name == "gradient steps" else WAYS[name][0]
    found, sd = way.tilted(case, np.random.default_rng(4)), np.sqrt(np.diag(covariance))
    of_means, of_sds = TOLERANCE[name]
    if "NUTS" in name:
        assert found.diagnostics["ess"] > 900
    assert_allclose((found.mean - mean) / sd, 0, atol=of_means)
    assert_allclose(np.sqrt(np.diag(found.covariance)), sd, rtol=of_sds)


@every_way
def test_nothing_handed_to_a_local_inference_is_changed(name: str) -> None:
    """Frozen arrays: writing to q or the cavity would raise; the client's data are compared."""
    client_model, q, cavity, share = target()
    frozen = [array.copy() for array in (*q, *cavity)]
    for array in frozen:
        array.flags.writeable = False
    before = [np.array(part) for part in (*client_model.data, client_model.initial)]
    case = Target(client_model, Gaussian(*frozen[:2]), Gaussian(*frozen[2:]), share)
    WAYS[name][0].tilted(case, np.random.default_rng(1))
    WAYS[name][0].draw(case, 20, 1, np.random.default_rng(1))
    for ours, theirs in zip(before, (*client_model.data, client_model.initial), strict=True):
        assert_array_equal(ours, theirs)


@every_way
def test_a_tilted_distribution_that_is_none_becomes_a_failure(name: str) -> None:
    """The cavity takes away more precision than the site gives: nothing can be normalised, and the client says so."""
    site, q = problems.regression_site(problems.regression()[1][CLIENT]), target().global_
    cavity = Gaussian(np.ones(3), -2.0 * site.precision)
    message = {
        "global_linear": q.linear,
        "global_precision": gaussian.pack_triangle(q.precision),
        "cavity_linear": cavity.linear,
        "cavity_precision": gaussian.pack_triangle(cavity.precision),
        "prior_share": np.array(0.0),
    }
    _, reply = answer(fedppl.EP(local=WAYS[name][0]), client(), None, Request(CLIENT, 1, 1, (1, 1, 1), message))
    assert isinstance(reply, Failure), f"a reply with mean {reply.message['mean']}"
    assert reply.reason


@every_way
def test_a_start_of_zero_density_becomes_a_failure(name: str) -> None:
    """q far out at log τ = −1000, where τ is 0 in floating point: one client's trouble must not end the fit."""
    model, clients = problems.schools()
    school = model.enrol(clients)["school A"]
    q = gaussian.from_moments(np.array([0.0, -1000.0]), np.eye(2))
    message = {
        "global_linear": q.linear,
        "global_precision": gaussian.pack_triangle(q.precision),
        "cavity_linear": q.linear,
        "cavity_precision": gaussian.pack_triangle(q.precision),
        "prior_share": np.array(0.0),
    }
    _, reply = answer(fedppl.EP(local=WAYS[name][0]), school, None, Request("school A", 1, 1, (1, 1, 1), message))
    assert isinstance(reply, Failure)
    assert reply.reason


def test_every_way_is_in_the_table() -> None:
    """A local inference that is exported is held to the promises above."""
    exported = {
        build().name
        for build in (getattr(fedppl, name) for name in fedppl.__all__)
        if callable(build) and getattr(build, "__module__", "").startswith("fedppl.local.")
    }
    assert exported == {way.name for way, _ in WAYS.values()}


@pytest.mark.parametrize("name", ["noise", "schools"])
def test_the_hessian_by_differences_is_the_symbolic_one(name: str) -> None:
    """PyTensor's own second derivatives of the same log density, interpreted; differences are right to 1e-6."""
    model, clients = problems.ALL[name]()
    one = next(iter(model.enrol(clients).values()))
    graph = one.template.graph
    x = 0.3 * np.random.default_rng(2).normal(size=one.shared_size + one.local_size)
    gradient = pt.grad(graph.logp, graph.x)
    rows = pt.stack([pt.grad(gradient[i], graph.x) for i in range(len(x))])
    symbolic = python_function([graph.x, *graph.inputs], rows)
    expected = symbolic(x, *one.inputs)
    found = difference_hessian(one.kernel, x, np.full(len(x), 0.1), one.data)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


# --- algorithms -----------------------------------------------------------------------------------------------

# Where a fit of a Gaussian model ends: at its posterior, at the mode of it, with every client's own posterior or mode,
# at the posterior of HM1 given its Ω, or where only the algorithm's own tests say.
POSTERIOR, MODE, OWN_POSTERIOR, OWN_MODE, COUPLED, ELSEWHERE = range(6)


def classification() -> Any:
    """A network of torch; its representation is shared."""
    return problems.classification(4)


def all_shared() -> Any:
    """The same, all of it shared."""
    return problems.classification(4, shared=("0.weight", "0.bias", "2.weight", "2.bias"))


class Row(NamedTuple):
    """An algorithm, where it ends, and whether the server reads sums of replies only."""

    build: Callable[[], Algorithm]
    ends: int = POSTERIOR
    sums: bool = False
    rounds: int = 60
    problem: Callable[[], Any] = problems.regression


one_step = functools.partial(dict, learning_rate=0.2, steps=1, tolerance=1e-8)
ALGORITHMS = {
    "EP": Row(fedppl.EP),
    "EP, cold": Row(lambda: fedppl.EP(warm_start=False, damping=0.3)),
    "EP, diagonal": Row(lambda: fedppl.EP(structure="diagonal")),
    "EP, blocks": Row(lambda: fedppl.EP(structure=[["a"], ["mu"]])),
    "EP with ADVI": Row(lambda: fedppl.EP(local=fedppl.ADVI())),
    "EP with NUTS": Row(lambda: fedppl.EP(local=fedppl.NUTS(draws=150, tune=150, chains=1, nuts_sampler="pymc"))),
    "FedAvg": Row(lambda: fedppl.FedAvg(**one_step()), MODE, sums=True, rounds=3000),
    "FedAvg, many steps": Row(lambda: fedppl.FedAvg(learning_rate=0.05, batch_size=4), ELSEWHERE, sums=True),
    "FedProx": Row(lambda: fedppl.FedProx(**one_step(), mu=0.5), MODE, sums=True, rounds=3000),
    "SCAFFOLD": Row(lambda: fedppl.SCAFFOLD(learning_rate=0.05, steps=5, tolerance=1e-8), MODE, rounds=3000),
    "Ditto": Row(lambda: fedppl.Ditto(**one_step(), lam=0.1), MODE, sums=True, rounds=3000),
    "Separate": Row(fedppl.Separate, OWN_POSTERIOR),
    "SeparateSGD": Row(lambda: fedppl.SeparateSGD(learning_rate=0.1, tolerance=1e-8), OWN_MODE),
    "PrecisionWeighted": Row(fedppl.PrecisionWeighted),
    "ConsensusMonteCarlo": Row(lambda: fedppl.ConsensusMonteCarlo(draws=400), sums=True),
    "HM1": Row(fedppl.HM1, COUPLED),
    "HM1Gradient": Row(lambda: fedppl.HM1Gradient(learning_rate=1e-3, steps=5), ELSEWHERE, problem=trends),
    "LMCAscent": Row(lambda: fedppl.LMCAscent(warmup=1), ELSEWHERE, problem=coregional),
    "LMCAscent, batches": Row(lambda: fedppl.LMCAscent(warmup=1, batch_size=8), ELSEWHERE, problem=coregional),
    "LMCBlockAscent": Row(lambda: fedppl.LMCBlockAscent(warmup=1), ELSEWHERE, problem=coregional),
    "LMCAveraging": Row(lambda: fedppl.LMCAveraging(steps=3), ELSEWHERE, problem=coregional),
    "LMCAveraging, batches": Row(lambda: fedppl.LMCAveraging(steps=3, batch_size=8), ELSEWHERE, problem=coregional),
    "LMCGradient": Row(fedppl.LMCGradient, ELSEWHERE, problem=coregional),
    "NetworkAveraging": Row(
        lambda: fedppl.NetworkAveraging(phases=(("local", 1), ("shared", 1))),
        ELSEWHERE,
        sums=True,
        problem=classification,
    ),
    "Confidence": Row(lambda: fedppl.Confidence(local=fedppl.Laplace()), ELSEWHERE, sums=True),
    "Confidence, remembered": Row(lambda: fedppl.Confidence(strength=2.0, remember=True), ELSEWHERE),
    "NetworkAveraging, proximal": Row(
        lambda: fedppl.NetworkAveraging(phases=(("all", 1),), proximal=1.0, momentum=0.9),
        ELSEWHERE,
        sums=True,
        problem=all_shared,
    ),
    "NetworkSCAFFOLD": Row(lambda: fedppl.NetworkSCAFFOLD(epochs=1), ELSEWHERE, problem=all_shared),
    "IFCA": Row(lambda: fedppl.IFCA(epochs=1), ELSEWHERE, problem=all_shared),
    "PerFedAvg": Row(lambda: fedppl.PerFedAvg(epochs=1), ELSEWHERE, sums=True, problem=all_shared),
    "PFedMe": Row(lambda: fedppl.PFedMe(epochs=1), ELSEWHERE, sums=True, problem=all_shared),
    "PFedBayes": Row(lambda: fedppl.PFedBayes(epochs=1), ELSEWHERE, sums=True, problem=all_shared),
    "BPFed": Row(lambda: fedppl.BPFed(epochs=1), ELSEWHERE, sums=True, problem=classification),
    "FedPop": Row(
        lambda: fedppl.FedPop(head=("2.weight", "2.bias"), epochs=1), ELSEWHERE, sums=True, problem=all_shared
    ),
    "NetworkConfidence": Row(
        lambda: fedppl.NetworkConfidence(head=("2.weight", "2.bias"), epochs=1),
        ELSEWHERE,
        sums=True,
        problem=all_shared,
    ),
    "NetworkConfidence, remembered": Row(
        lambda: fedppl.NetworkConfidence(head=("2.weight", "2.bias"), epochs=1, remember=True),
        ELSEWHERE,
        problem=all_shared,
    ),
    "FedSI": Row(lambda: fedppl.FedSI(ratio=0.3, epochs=1), ELSEWHERE, sums=True, problem=classification),
    "FedSI-Fac": Row(lambda: fedppl.FedSI(diagonal=True, epochs=1), ELSEWHERE, sums=True, problem=classification),
}
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@functools.cache
def enrolled(problem: Callable[[], Any]) -> dict[str, ClientModel]:
    model, clients = problem()
    models: dict[str, ClientModel] = model.enrol(clients)
    return models


class Played(NamedTuple):
    """A run by hand: the state after each round, and what the clients keep and reply in it."""

    states: list[Any]
    personal: list[dict[str, Any]]
    replies: list[dict[str, Any]]


def run(name: str, rounds: int, subset: Callable[[int, tuple[str, ...]], tuple[str, ...]] | None = None) -> Played:
    """Rounds played by hand: broadcast, answer, update; no loop and no engine. The first state is that before any."""
    models, algorithm = enrolled(ALGORITHMS[name].problem), ALGORITHMS[name].build()
    layout, ids = next(iter(models.values())).layout, tuple(models)
    played = Played([algorithm.init_server(layout, ids, stream((1,)))], [{}], [{}])
    for number in range(1, rounds + 1):
        asked = ids if subset is None else subset(number, ids)
        personal, replies = dict(played.personal[-1]), {}
        for client_id in asked:
            message = algorithm.broadcast(played.states[-1], client_id)
            personal[client_id], replies[client_id], _ = algorithm.update_client(
                models[client_id], personal.get(client_id), message, stream((number, ids.index(client_id)))
            )
        played.states.append(algorithm.update_server(played.states[-1], replies)[0])
        played.personal.append(personal)
        played.replies.append(replies)
    return played


def said(name: str, state: Any) -> dict[str, Any]:
    """All that a state says to anybody, by name."""
    algorithm = ALGORITHMS[name].build()
    shared = {
        what: read(state)
        for what, read in (("posterior", algorithm.posterior), ("estimate", algorithm.estimate))
        if read is not None
    }
    clients = told(algorithm, state, enrolled(ALGORITHMS[name].problem))
    return arrays({**shared, **clients, "details": dict(algorithm.details(state))}, "said")


@every_algorithm
def test_messages_are_arrays_and_replies_are_as_announced(name: str) -> None:
    models, algorithm = enrolled(ALGORITHMS[name].problem), ALGORITHMS[name].build()
    for state in run(name, 4).states:
        for client_id in list(models)[:1]:
            message = algorithm.broadcast(state, client_id)
            assert all(isinstance(value, np.ndarray) for value in message.values())
            assert all(isinstance(value, np.ndarray) for value in algorithm.outcome(state, client_id).values())
            reply = answer(algorithm, models[client_id], None, Request(client_id, 1, 1, (1, 2, 3), message))[1]
            assert isinstance(reply, Reply)
            shapes = {key: np.shape(value) for key, value in reply.message.items()}
            assert shapes == dict(algorithm.reply_shapes(state))
            assert all(np.asarray(value).dtype == np.float64 for value in reply.message.values())
            assert algorithm.refuse(state, reply.message) is None


@every_algorithm
def test_states_are_never_changed_in_place(name: str, tmp_path: Path) -> None:
    """Each state is kept on disk as it was, with what the clients keep; after all rounds it still is what it was."""
    models, algorithm = enrolled(ALGORITHMS[name].problem), ALGORITHMS[name].build()
    layout, personal = next(iter(models.values())).layout, dict[str, Any]()
    state, kept = algorithm.init_server(layout, tuple(models), stream((1,))), []
    for number in range(1, 4):
        path = tmp_path / str(number)
        path.write_bytes(checkpoint.pack({"state": state, "personal": personal}))
        kept.append((state, personal, path))
        replies, personal = {}, dict(personal)
        for k, client_id in enumerate(models):
            message = algorithm.broadcast(state, client_id)
            personal[client_id], replies[client_id], _ = algorithm.update_client(
                models[client_id], personal.get(client_id), message, stream((number, k))
            )
        state = algorithm.update_server(state, replies)[0]
    for before, own, path in kept:
        content = checkpoint.unpack(path.read_bytes(), "it")
        assert_same_state((before, own), (content["state"], content["personal"]))


@every_algorithm
def test_no_replies_change_nothing_that_is_said(name: str) -> None:
    algorithm = ALGORITHMS[name].build()
    state = run(name, 3).states[-1]
    after, _ = algorithm.update_server(state, {})
    assert_same_state(said(name, after), said(name, state))


@every_algorithm
def test_any_subset_of_replies_is_taken(name: str) -> None:
    """One client a round, in turn: what is said is finite, a posterior proper, and cavity x site = q for everyone."""
    algorithm = ALGORITHMS[name].build()
    for state in run(name, 8, lambda number, ids: (ids[number % len(ids)],)).states:
        for path, value in said(name, state).items():
            assert "last_change" in path or np.all(np.isfinite(value)), path  # not known before EP's first round
        if algorithm.posterior is None:
            continue
        q = algorithm.posterior(state)
        assert gaussian.is_proper(q)
        if not hasattr(state, "sites"):
            continue
        for client_id in problems.regression()[1]:
            site = gaussian.quotient(q, _sites.cavity(state.sites, client_id))
            assert_allclose(gaussian.product(_sites.cavity(state.sites, client_id), site).precision, q.precision)
        nobody = _sites.cavity(state.sites, "nobody")
        assert_array_equal(nobody.precision, q.precision)


def assert_says_the_same(name: str, there: Any, back: Any, tolerance: float = 1e-12) -> None:
    one, other = said(name, there), said(name, back)
    assert one.keys() == other.keys()
    for path in one:
        assert_allclose(one[path], other[path], rtol=tolerance, atol=tolerance, err_msg=path)


@every_algorithm
def test_replies_in_another_order_give_the_same_state(name: str) -> None:
    algorithm, played = ALGORITHMS[name].build(), run(name, 3)
    replies = played.replies[-1]
    there, back = (
        algorithm.update_server(played.states[-2], dict(order))[0]
        for order in (replies.items(), [*replies.items()][::-1])
    )
    assert_says_the_same(name, there, back)


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.sums])
def test_replies_may_be_summed_on_the_way(name: str) -> None:
    """By a relay or under encryption: the sum of some, or of all, in the place of the replies themselves."""
    algorithm, played = ALGORITHMS[name].build(), run(name, 1)
    replies = played.replies[1]
    first, second, third, fourth = replies
    pair = {first: replies[first], third: replies[third]}
    for grouped in (
        {first: sum_replies(pair), second: replies[second], fourth: replies[fourth]},
        {second: sum_replies({second: replies[second], fourth: replies[fourth]}), third: sum_replies(pair)},
        {fourth: sum_replies(replies)},
    ):
        state = algorithm.update_server(played.states[0], grouped)[0]
        for reply in grouped.values():
            assert algorithm.refuse(played.states[0], reply) is None
        ours, theirs = numbers(algorithm, state), numbers(algorithm, played.states[1])
        assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
        assert state.status == played.states[1].status


def numbers(algorithm: Algorithm, state: Any) -> Any:
    """The shared estimate, or the posterior's parameters, in one vector."""
    if algorithm.posterior is None:
        assert algorithm.estimate is not None
        return algorithm.estimate(state)
    q = algorithm.posterior(state)
    return np.concatenate([q.linear, q.precision.ravel()])


@every_algorithm
def test_the_state_says_how_it_stands(name: str) -> None:
    algorithm, models = ALGORITHMS[name].build(), enrolled(ALGORITHMS[name].problem)
    m = next(iter(models.values())).layout.size if ALGORITHMS[name].problem in (classification, all_shared) else 3
    sizes = {"rows": m, "columns": m, "client": len(models), "other_client": len(models), "latent": 3}
    for state in run(name, 2).states:
        assert fedppl.Status(state.status) in fedppl.Status
        assert isinstance(state.message, str)
        for dims, value in algorithm.details(state).values():
            assert np.shape(value) == tuple(sizes[dim] for dim in dims)
        if algorithm.estimate is not None:
            assert np.shape(algorithm.estimate(state)) == (m,)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in algorithm.settings.items())


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.ends == POSTERIOR])
def test_a_fit_of_a_gaussian_model_ends_at_its_posterior(name: str) -> None:
    """Exact means for every algorithm whose clients are exact; where clients draw, up to Monte Carlo error."""
    clients, fit = problems.regression()[1], fitted(name)
    exact = problems.regression_posterior(clients)
    error = np.abs(gaussian.mean(fit.posterior) - gaussian.mean(exact)) / gaussian.standard_deviations(exact)
    if "NUTS" in name:
        # four clients of about 100 effective draws each: √4 / √100 = 0.2 sd a round, less after averaging
        assert np.all(error < 0.4)
    elif "MonteCarlo" in name:
        # the mean of the S averaged draws, and precisions that are estimated from them
        assert np.all(error < 4 / np.sqrt(400))
        sds = gaussian.standard_deviations(fit.posterior) / gaussian.standard_deviations(exact)
        assert_allclose(sds, 1.0, rtol=4 / np.sqrt(2 * 400))
    elif "diagonal" in name or "blocks" in name:
        # the family lacks the correlations; means of a Gaussian target survive that when EP converges
        assert np.all(error < 0.05)
    else:
        assert np.all(error < 0.01)  # the tolerance of the fit
        assert_allclose(gaussian.standard_deviations(fit.posterior), gaussian.standard_deviations(exact), rtol=0.01)


@functools.cache
def fitted(name: str) -> fedppl.Fit:
    row = ALGORITHMS[name]
    fit = fedppl.fit(*row.problem(), row.build(), rounds=row.rounds, progressbar=False, random_seed=6)
    assert fit.status.ok, fit.message
    return fit


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.ends == MODE])
def test_a_fit_of_a_gaussian_model_ends_at_its_mode(name: str) -> None:
    """Of (φ, β_1, ..., β_K) jointly, which for a Gaussian is the mean: that of φ, and of β_k at the clients."""
    clients, fit = problems.regression()[1], fitted(name)
    exact = problems.regression_posterior(clients)
    found = np.concatenate([fit.estimate["mu"], [fit.estimate["a"]]])
    assert_allclose(found, gaussian.mean(exact), atol=1e-5)
    if name == "Ditto":  # whose clients have parameters of their own
        return
    for client_id, data in clients.items():
        cavity = gaussian.quotient(exact, problems.regression_site(data))
        own = fit.client(client_id, draws=1, chains=1)["posterior"]["beta"].values.ravel()
        assert_allclose(own, problems.regression_joint(data, cavity)[0][3:], atol=1e-5)


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.ends in (OWN_POSTERIOR, OWN_MODE)])
def test_clients_that_are_not_pooled_end_at_their_own_posterior(name: str) -> None:
    """From the declared prior and their own data; of draws, means within 4 and sds within 5 standard errors."""
    fit, point = fitted(name), ALGORITHMS[name].ends == OWN_MODE
    for client_id, data in problems.regression()[1].items():
        mean, covariance = problems.regression_joint(data, problems.REGRESSION_PRIOR)
        posterior = fit.client(client_id, draws=1 if point else 4000, chains=1)["posterior"]
        draws = np.column_stack([posterior["mu"].values[0], posterior["a"].values[0], posterior["beta"].values[0]])
        if point:
            assert_allclose(draws[0], mean, atol=1e-5)
            continue
        error = (draws.mean(axis=0) - mean) / np.sqrt(np.diag(covariance))
        assert_allclose(error, 0, atol=4 / np.sqrt(4000))
        assert_allclose(draws.std(axis=0), np.sqrt(np.diag(covariance)), rtol=5 / np.sqrt(2 * 4000))


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.ends == COUPLED])
def test_coupled_clients_end_at_their_joint_posterior(name: str) -> None:
    """Given Ω: precision Ω⁻¹ ⊗ A⁻¹ + diag(Q_k), with the Q_k and r_k of clients whose local variables are out."""
    fit, sites = fitted(name), [problems.regression_site(data) for data in problems.regression()[1].values()]
    found = {key: value for key, (_, value) in fit.algorithm.details(fit.state).items()}
    precision = np.kron(np.linalg.inv(found["omega"]), problems.REGRESSION_PRIOR.precision)
    for k, site in enumerate(sites):
        precision[3 * k : 3 * k + 3, 3 * k : 3 * k + 3] += site.precision
    covariance = np.linalg.inv(precision)
    assert_allclose(found["theta"].ravel(), covariance @ np.concatenate([site.linear for site in sites]), rtol=1e-6)
    assert_allclose(found["theta_sd"].ravel(), np.sqrt(np.diag(covariance)), rtol=1e-6)
    assert np.abs(found["omega"] - np.eye(len(sites))).max() > 0.05  # it was estimated


def test_what_tests_for_convergence_is_what_does_not_take_a_given_number_of_gradient_rounds() -> None:
    """Those warn at the end of a fit that has not converged; what has a posterior must be among them."""
    built = {name: row.build() for name, row in ALGORITHMS.items()}
    found = {name.partition(",")[0].partition(" with")[0] for name, one in built.items() if one.tests_convergence}
    one_shot = {"Separate", "PrecisionWeighted", "ConsensusMonteCarlo"}
    assert found == {"EP", "HM1", "LMCAscent", "LMCBlockAscent", "Confidence"} | one_shot
    assert all(one.tests_convergence for one in built.values() if one.posterior is not None)


def test_every_algorithm_is_in_the_table() -> None:
    """As in test_runs.py; PrivateEP draws its noise from the system, and is tested in its own file."""
    names = {row.build().name for row in ALGORITHMS.values()}
    exported = {name for name in fedppl.__all__ if ".algorithms." in getattr(getattr(fedppl, name), "__module__", "")}
    assert len(names) == len(exported - {"PrivateEP"})
