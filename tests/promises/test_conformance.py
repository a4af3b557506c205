"""Promises that every local inference keeps, and every algorithm call by call or at the end of a fit: tests/cases.py.

What a way promises of its own stands in test_local.py, what an algorithm does in its own file. Algorithms for any
declared model are held call by call in tests/unit/test_contract.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import gaussian
from fedppl.algorithms.ep import sites as _sites
from fedppl.contracts import Failure, Posterior, Request, Target
from fedppl.engine.answer import answer
from fedppl.gaussian import Gaussian
from fedppl.model.client import ClientModel
from fedppl.model.interpreted import python_function
from fedppl.numerics.pairs import difference_hessian
from fedppl.numerics.prior import SharedPrior
from tests import cases
from tests.cases import CASES, EXACT, MONTE_CARLO, WAYS, Ends, ending_in
from tests.support import contract, problems

# --- local inferences -----------------------------------------------------------------------------------------

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
    sd, kind = np.sqrt(np.diag(covariance)), WAYS[name].right
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
        gradients=lambda phi: p.linear - phi @ p.precision,
        gaussian=n0,
        is_gaussian=False,
        kernel=lambda: kernel,
    )
    base, way = target(), WAYS[name].local
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


@every_way
def test_moments_of_a_model_that_is_not_gaussian_are_near_those_of_quadrature(name: str) -> None:
    case, mean, covariance = noise_case()
    way = WAYS[name]
    found, sd = (way.fast or way.local).tilted(case, np.random.default_rng(4)), np.sqrt(np.diag(covariance))
    if "NUTS" in name:
        assert found.diagnostics["ess"] > 900
    assert_allclose((found.mean - mean) / sd, 0, atol=way.means)
    assert_allclose(np.sqrt(np.diag(found.covariance)), sd, rtol=way.sds)


@every_way
def test_nothing_handed_to_a_local_inference_is_changed(name: str) -> None:
    """Frozen arrays: writing to q or the cavity would raise; the client's data are compared."""
    client_model, q, cavity, share = target()
    frozen = [array.copy() for array in (*q, *cavity)]
    for array in frozen:
        array.flags.writeable = False
    before = [np.array(part) for part in (*client_model.packed, client_model.initial)]
    case = Target(client_model, Gaussian(*frozen[:2]), Gaussian(*frozen[2:]), share)
    WAYS[name].local.tilted(case, np.random.default_rng(1))
    WAYS[name].local.draw(case, 20, 1, np.random.default_rng(1))
    for ours, theirs in zip(before, (*client_model.packed, client_model.initial), strict=True):
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
    _, reply = answer(fedppl.EP(local=WAYS[name].local), client(), None, Request(CLIENT, 1, 1, (1, 1, 1), message))
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
    _, reply = answer(fedppl.EP(local=WAYS[name].local), school, None, Request("school A", 1, 1, (1, 1, 1), message))
    assert isinstance(reply, Failure)
    assert reply.reason


def test_every_way_is_in_the_table() -> None:
    """A local inference that is exported is held to the promises above."""
    exported = {
        build().name
        for build in (getattr(fedppl.local, name) for name in fedppl.local.__all__)
        if callable(build) and getattr(build, "__module__", "").startswith("fedppl.local.")
    }
    assert exported == {way.local.name for way in WAYS.values()}


@pytest.mark.parametrize("name", ["schools", pytest.param("noise", marks=pytest.mark.slow)])
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
    found = difference_hessian(one.kernel, x, np.full(len(x), 0.1), one.packed)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


# --- algorithms -----------------------------------------------------------------------------------------------

# Families of models, and what samples the client's own PyMC model; the others are held in tests/unit/test_contract.py.
HERE = [name for name, case in CASES.items() if case.problem not in cases.ANY_MODEL or name == "EP(NUTS, pymc)"]


@functools.cache
def enrolled(problem: cases.Problem, kernel: bool) -> dict[str, ClientModel]:
    model, clients = problem()
    models: dict[str, ClientModel] = model.enrol(clients, kernel=kernel)
    return models


@pytest.mark.parametrize("name", cases.rows(HERE))
def test_an_algorithm_keeps_what_all_promise_call_by_call(name: str) -> None:
    case = CASES[name]
    algorithm = case.build()
    clients = enrolled(case.problem, algorithm.needs.kernel)
    contract.check(algorithm, clients, summed=case.summed, ledger=case.ledger)


@functools.cache
def fitted(name: str) -> fedppl.Fit:
    case = CASES[name]
    assert case.ending is not None
    model, clients = problems.regression()
    settings: dict[str, Any] = {"rounds": case.ending.rounds, "progressbar": False, "random_seed": 6}
    fit = fedppl.fit(model, clients, case.build_ending(), engine=fedppl.InProcess(workers=1), **settings)
    assert fit.status.ok, fit.message
    return fit


@pytest.mark.parametrize("name", ending_in(Ends.POSTERIOR))
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


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.summed and case.ends_with_posterior()])
def test_clients_of_one_table_keep_the_promises_of_those_asked_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a Gaussian model, and clients' own posteriors, where clients are rows of one table."""
    monkeypatch.setattr("fedppl.data.tables.FEWEST", 1)
    model, clients = problems.regression()
    algorithm = CASES[name].build_ending()
    before = {client_id: {key: value.copy() for key, value in data.items()} for client_id, data in clients.items()}
    fit = fedppl.fit(model, clients, algorithm, progressbar=False, random_seed=6)
    again = fedppl.fit(model, clients, algorithm, progressbar=False, random_seed=6)
    assert fit.status.ok, fit.message
    assert [record.together for record in fit.records][-1] == len(clients)  # not one by one
    assert_array_equal(again.posterior.linear, fit.posterior.linear)
    for client_id, data in clients.items():
        for key, value in data.items():
            assert_array_equal(value, before[client_id][key])
    exact = problems.regression_posterior(clients)
    sd = gaussian.standard_deviations(exact)
    assert_allclose((gaussian.mean(fit.posterior) - gaussian.mean(exact)) / sd, 0, atol=0.01)
    assert_allclose(gaussian.standard_deviations(fit.posterior), sd, rtol=0.01)
    for client_id, data in clients.items():
        cavity = gaussian.quotient(exact, problems.regression_site(data))
        mean, covariance = problems.regression_joint(data, cavity)
        own = fit.client(client_id, draws=2000, chains=1, random_seed=2)["posterior"]["beta"].values[0]
        error = (own.mean(axis=0) - mean[3:]) / np.sqrt(np.diag(covariance)[3:])
        assert_allclose(error, 0, atol=4 / np.sqrt(2000) + 0.01)
        assert_allclose(own.std(axis=0), np.sqrt(np.diag(covariance)[3:]), rtol=4 / np.sqrt(4000) + 0.01)


@pytest.mark.parametrize("name", ending_in(Ends.MODE))
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


@pytest.mark.parametrize("name", ending_in(Ends.OWN_POSTERIOR, Ends.OWN_MODE))
def test_clients_that_are_not_pooled_end_at_their_own_posterior(name: str) -> None:
    """From the declared prior and their own data; of draws, means within 4 and sds within 5 standard errors."""
    fit, point = fitted(name), name in ending_in(Ends.OWN_MODE)
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


@pytest.mark.parametrize("name", ending_in(Ends.COUPLED))
def test_coupled_clients_end_at_their_joint_posterior(name: str) -> None:
    """Given Ω: precision Ω⁻¹ ⊗ A⁻¹ + diag(Q_k), with the Q_k and r_k of clients whose local variables are out."""
    fit, sites = fitted(name), [problems.regression_site(data) for data in problems.regression()[1].values()]
    found = {key: value for key, (_, value) in fit.algorithm.result.details(fit.state).items()}
    precision = np.kron(np.linalg.inv(found["omega"]), problems.REGRESSION_PRIOR.precision)
    for k, site in enumerate(sites):
        precision[3 * k : 3 * k + 3, 3 * k : 3 * k + 3] += site.precision
    covariance = np.linalg.inv(precision)
    assert_allclose(found["theta"].ravel(), covariance @ np.concatenate([site.linear for site in sites]), rtol=1e-6)
    assert_allclose(found["theta_sd"].ravel(), np.sqrt(np.diag(covariance)), rtol=1e-6)
    assert np.abs(found["omega"] - np.eye(len(sites))).max() > 0.05  # it was estimated


def test_what_tests_for_convergence_is_what_does_not_take_a_given_number_of_gradient_rounds() -> None:
    """Those warn at the end of a fit that has not converged; what has a posterior must be among them."""
    built = [(case.algorithm, case.build().result) for case in cases.runnable().values()]
    found = {name for name, result in built if result.tests_convergence}
    one_shot = {"one_shot.Separate", "one_shot.PrecisionWeighted", "one_shot.ConsensusMonteCarlo"}
    assert {"EP", "HM1", "curves.Ascent", "Confidence"} | one_shot <= found
    points = {"averaging.FedAvg", "averaging.FedProx", "averaging.SCAFFOLD", "averaging.Ditto", "one_shot.SeparateSGD"}
    assert points <= {case.algorithm for case in cases.runnable().values()}
    assert found.isdisjoint(points | {"HM1Gradient", "nn.FedAvg"})
    assert all(result.tests_convergence for _, result in built if isinstance(result.shared, Posterior))


def test_every_algorithm_is_in_the_table() -> None:
    """One that is exported is held to these promises; PrivateEP, whose noise no seed repeats, in its own file."""
    listed = {case.algorithm for case in cases.runnable().values()}
    assert listed - {"skeleton.Newton"} == cases.exported() - {"PrivateEP"}


@pytest.mark.parametrize("name", cases.rows({case.algorithm: key for key, case in reversed(CASES.items())}.values()))
def test_settings_tell_two_builds_apart_by_any_keyword(name: str) -> None:
    """A run is resumed, and a node enrolled, only with equal settings."""
    case = CASES[name]
    build = functools.partial(cases.build, case.algorithm)
    for keyword in inspect.signature(cases.find(case.algorithm)).parameters.values():
        value = case.settings.get(keyword.name, keyword.default)
        if isinstance(value, bool | int | float) and keyword.name != "remember":
            other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 0.9 * value
            one, another = build(case.settings).settings, build({**case.settings, keyword.name: other}).settings
            assert one != another or value == other, keyword.name
