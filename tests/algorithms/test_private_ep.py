"""Private EP: the mechanism at the client, what it costs, and what the server makes of noised sites."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import chi2, kstest, norm

import fedppl
from benchmarks._attacks import budget
from fedppl import gaussian, privacy, structure
from fedppl.algorithms.ep.private import frame_of, length, unwhiten, whiten
from fedppl.contracts import AnyAlgorithm, LocalInference, Moments, Received, Request
from fedppl.gaussian import Gaussian
from fedppl.testing import normal_means
from fedppl.types import DeclarationError, Layout, LocalFailure, Status, Variable
from tests.support import problems
from tests.support.states import received

FORMS = {
    "full": structure.full(3),
    "diagonal": structure.block(3, [[0], [1], [2]]),
    "blocks": structure.block(3, [(0, 2), (1,)]),
}


def private(**settings: Any) -> AnyAlgorithm:
    """PrivateEP with settings of small tests."""
    return fedppl.PrivateEP(**({"clip": 0.5, "noise_multiplier": 1.0, "releases": 4} | settings))


def silent(count: int) -> Any:
    """In place of the noise, to see what it covers."""
    return np.zeros(count)


def inference(tilted: Any) -> LocalInference:
    def no_draws(*arguments: Any) -> Any:
        raise NotImplementedError

    return LocalInference("test", lambda client: None, None, tilted, no_draws)


def exact() -> LocalInference:
    """For clients that are Gaussian factors: f_k x cavity in closed form."""

    def tilted(target: Any, rng: Any) -> Moments:
        g = gaussian.product(target.client.factor, target.cavity)
        return Moments(gaussian.mean(g), gaussian.covariance(g), g.precision, np.zeros(len(g.linear)), {})

    return inference(tilted)


def layout(m: int, prior_precision: float = 0.1) -> Layout:
    prior = Gaussian(np.zeros(m), prior_precision * np.eye(m))
    return Layout((Variable("mu", (m,), "", None),), prior, True, "print")


def factors(count: int, m: int, rng: np.random.Generator) -> dict[str, SimpleNamespace]:
    """Clients y_k ~ N(φ, Λ_k⁻¹) with φ = (1, ..., 1)."""
    clients = {}
    for k in range(count):
        root = rng.normal(size=(m, m))
        precision = root @ root.T / m + 0.5 * np.eye(m)
        y = gaussian.draw(Gaussian(precision @ np.ones(m), precision), rng, 1)[0]
        name = f"client {k}"
        clients[name] = SimpleNamespace(client_id=name, layout=layout(m), factor=Gaussian(precision @ y, precision))
    return clients


def posterior(clients: dict[str, SimpleNamespace]) -> Gaussian:
    return gaussian.product(
        next(iter(clients.values())).layout.prior,
        Gaussian(*(sum(values) for values in zip(*(client.factor for client in clients.values()), strict=True))),
    )


def drive(algorithm: AnyAlgorithm, clients: dict[str, SimpleNamespace], rounds: int, **settings: float) -> Any:
    """State and report after some rounds."""
    return driven(algorithm, clients, rounds, **settings)[:2]


def driven(
    algorithm: AnyAlgorithm, clients: dict[str, SimpleNamespace], rounds: int, share: float = 1.0, lost: float = 0.0
) -> Any:
    """The loop without a loop: below a share of 1 some clients are not asked, and some replies may be lost."""
    state = algorithm.init(next(iter(clients.values())).layout, tuple(clients), np.random.default_rng(0))
    personal: dict[str, Any] = {}
    chance = np.random.default_rng(17)
    for _ in range(rounds):
        replies = {}
        for name, client in clients.items():
            if chance.uniform() < share:
                message = algorithm.broadcast(state, name)
                rng = np.random.default_rng(3)
                personal[name], reply, _ = algorithm.update_client(client, personal.get(name), message, rng)
                if not lost or chance.uniform() >= lost:
                    replies[name] = reply
        state, report = algorithm.update_server(state, received(replies, summed=True))
    return state, report, personal


def asked(algorithm: AnyAlgorithm, client: Any, personal: Any = None, seed: int = 0) -> Any:
    """One request of the first round."""
    state = algorithm.init(client.layout, (client.client_id,), np.random.default_rng(0))
    message = algorithm.broadcast(state, client.client_id)
    return algorithm.update_client(client, personal, message, np.random.default_rng(seed))


def one(m: int = 2) -> SimpleNamespace:
    return factors(1, m, np.random.default_rng(1))["client 0"]


# --- ε --------------------------------------------------------------------------------------------------------


def exact_delta(epsilon: float, multiplier: float) -> float:
    """δ(ε) of a Gaussian mechanism of sensitivity 1 (Balle and Wang 2018, Theorem 8)."""
    a, b = 1 / (2 * multiplier), epsilon * multiplier
    return float(norm.cdf(a - b) - math.exp(epsilon + norm.logcdf(-a - b)))


@pytest.mark.parametrize(("z", "releases"), [(0.05, 3), (2.0, 1), (10.0, 5), (40.0, 20), (15.0, 300), (300.0, 20)])
def test_epsilon_is_that_of_one_gaussian_mechanism(z: float, releases: int) -> None:
    """T releases with noise z / 2 per sensitivity are one with z / (2 √T); the root by another search."""
    multiplier = z / 2 / math.sqrt(releases)
    sharp = brentq(lambda e: exact_delta(e, multiplier) - 1e-5, 1e-6, 1e5, xtol=1e-10)
    assert sharp <= privacy.epsilon(z, releases, 1e-5) <= sharp * (1 + 1e-7)


MIXED = ([9.0, 20.0, 3.0], [7, 100, 1])


def test_mixed_settings_compose_as_an_accountant_says() -> None:
    """By privacy loss distributions, on a grid that is rounded up, and below what Rényi's accountant allows."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    found = privacy.epsilon(*MIXED, 1e-6)
    fine, renyi = pld.PLDAccountant(value_discretization_interval=1e-4), accounting.rdp.RdpAccountant()
    for z, count in zip(*MIXED, strict=True):
        for accountant in (fine, renyi):
            accountant.compose(accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(z / 2), count))
    assert found <= fine.get_epsilon(1e-6) <= found * 1.02
    assert found < renyi.get_epsilon(1e-6)


def test_mixed_settings_add_their_squares() -> None:
    mu = 2 * math.sqrt(sum(count / z**2 for z, count in zip(*MIXED, strict=True)))
    assert privacy.gaussian_mu(*MIXED) == pytest.approx(mu, rel=1e-12)
    assert exact_delta(privacy.epsilon(*MIXED, 1e-6), 1 / mu) == pytest.approx(1e-6, rel=1e-5)
    assert privacy.epsilon([9.0, 9.0], [3, 4]) == privacy.epsilon(9.0, 7)
    with pytest.raises(DeclarationError, match="2 settings and releases= has 1; give one count for each"):
        privacy.epsilon([9.0, 2.0], 3)


def test_epsilon_scales_and_grows_as_it_must() -> None:
    assert privacy.epsilon(12.0, 9) == pytest.approx(privacy.epsilon(4.0, 1), rel=1e-9)
    by_noise = [privacy.epsilon(z, 10) for z in (1.0, 3.0, 10.0, 30.0, 100.0)]
    by_releases = [privacy.epsilon(10.0, count) for count in (1, 2, 5, 20, 100)]
    by_delta = [privacy.epsilon(10.0, 10, delta) for delta in (1e-2, 1e-4, 1e-6, 1e-9)]
    assert np.all(np.diff(by_noise) < 0)
    assert np.all(np.diff(by_releases) > 0)
    assert np.all(np.diff(by_delta) > 0)
    assert privacy.epsilon(1e9, 1) == 0.0  # less than δ without any ε
    assert privacy.epsilon(1e-200, 1) == math.inf  # a square beyond all numbers


@pytest.mark.parametrize("shared_by", [1, 5], ids=["one reply", "a sum"])
@pytest.mark.parametrize(("noise", "above"), [(1.0, False), (0.5, True)], ids=["as claimed", "half the noise"])
def test_what_an_attacker_finds_stays_below_the_claimed_epsilon(noise: float, above: bool, shared_by: int) -> None:
    """Of data that differ as much as the clip lets them; with half of the noise it finds more than is claimed."""
    delta, z, rng = 0.01, 3.8, np.random.default_rng(1)
    claimed = privacy.epsilon(z, 1, delta)
    assert 0.9 < claimed < 1.1
    samples = (
        budget.releases_of(far, z, lambda m: noise * rng.normal(size=(50_000, m)), shared_by) for far in (1e6, -1e6)
    )
    found = budget.lower_bound(*samples, delta)
    assert (found > claimed) == above
    assert found > 0.5  # the attack is a good one


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"clip": math.inf},
        {"clip": math.nan},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"releases": 0},
        {"releases": 2.0},
        {"releases": True},
        {"delta": 0.0},
        {"delta": 1.0},
        {"tolerance": 0.0},
        {"damping": 1.5},
        {"structure": "banded"},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=next(iter(wrong))):
        private(**wrong)


# --- clipping and noise ---------------------------------------------------------------------------------------


def test_clipping_bounds_the_norm_whatever_the_vector(rng: np.random.Generator) -> None:
    for scale in (1e-320, 1e-200, 1e-3, 1.0, 1e10, 1e200, 1e308):
        for _ in range(20):
            direction = rng.normal(size=7)
            direction /= np.abs(direction).max()
            for clip in (1e-3, 0.7, 1e3):
                short = privacy.clipped(scale * direction, clip)
                assert math.fsum((short / clip) ** 2) <= 1.0
                if scale > clip:
                    expected = direction / np.linalg.norm(direction)
                    np.testing.assert_allclose(short / clip, expected, rtol=1e-8)
    for vector in rng.normal(size=(1000, 7)):  # right at the limit, where rounding decides
        clip = float(np.linalg.norm(vector))
        assert math.fsum((privacy.clipped(vector, clip) / clip) ** 2) <= 1.0
    small = np.array([0.3, -0.4])
    assert np.array_equal(privacy.clipped(small, 0.6), small)
    for broken in ([np.nan, 1.0], [np.inf, 1.0], [-np.inf, np.nan], [0.0, 0.0]):
        assert np.array_equal(privacy.clipped(np.array(broken), 0.6), np.zeros(2))


def test_noise_of_the_system_is_standard_normal_and_never_the_same() -> None:
    """No seed: the limits are passed once in 10⁹ runs."""
    first, second = privacy.system_normals(20_000), privacy.system_normals(20_000)
    assert kstest(np.concatenate([first, second]), "norm").pvalue > 1e-9
    assert len(np.unique(np.concatenate([first, second]))) == 40_000
    assert abs(np.corrcoef(first, second)[0, 1]) < 6.2 / np.sqrt(20_000)


# --- coordinates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(FORMS))
def test_whitening_can_be_undone(name: str, rng: np.random.Generator) -> None:
    form = FORMS[name]
    root = rng.normal(size=(3, 3))
    q = Gaussian(rng.normal(size=3), root @ root.T + np.eye(3))
    packed, linear = rng.normal(size=(5, structure.packed_size(form))), rng.normal(size=(5, 3))
    frame = frame_of(q, form, 2.5)
    vectors = np.stack(
        [whiten(frame, r, Q) for r, Q in zip(linear, structure.unpack_precision(packed, form), strict=True)]
    )
    assert vectors.shape == (5, length(form))
    back_linear, back_packed = unwhiten(frame, vectors)
    np.testing.assert_allclose(back_linear, linear, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(back_packed, packed, rtol=1e-10, atol=1e-10)


def test_the_norm_is_that_of_the_whitened_mean_and_matrix(rng: np.random.Generator) -> None:
    """‖v‖² = (Δr − ΔQ μ)ᵀ Σ (Δr − ΔQ μ) + w² tr(Σ ΔQ Σ ΔQ), which needs no factor of Σ."""
    root = rng.normal(size=(3, 3))
    q = Gaussian(rng.normal(size=3), root @ root.T + np.eye(3))
    change = root + root.T
    linear, covariance = rng.normal(size=3), np.linalg.inv(q.precision)
    about = linear - change @ covariance @ q.linear
    expected = about @ covariance @ about + 2.5**2 * np.trace(covariance @ change @ covariance @ change)
    vector = whiten(frame_of(q, FORMS["full"], 2.5), linear, change)
    assert vector @ vector == pytest.approx(expected, rel=1e-12)


# --- what leaves a client -------------------------------------------------------------------------------------


def raises(error: type[BaseException]) -> LocalInference:
    def tilted(target: Any, rng: Any) -> Moments:
        raise error("a row of the data is 17.3")

    return inference(tilted)


def returns(mean: Any, precision: Any) -> LocalInference:
    m = np.asarray(mean, dtype=float)
    P = np.asarray(precision, dtype=float)
    return inference(lambda target, rng: Moments(m, P, P, np.zeros(2), {"ess": 17.3, "mc_error": 1.0}))


EYE = np.eye(2)
FAILING = {
    "LocalFailure": raises(LocalFailure),
    "ValueError": raises(ValueError),
    "KeyError": raises(KeyError),
    "MemoryError": raises(MemoryError),
    "not finite": returns([np.nan, 0.0], EYE),
    "singular": returns([0.0, 0.0], [[1.0, 1.0], [1.0, 1.0]]),
    "indefinite": returns([0.0, 0.0], [[1.0, 0.0], [0.0, -1.0]]),
    "wrong shape": returns([0.0, 0.0, 0.0], EYE),
}


@pytest.mark.parametrize("name", list(FAILING))
def test_a_failure_is_released_as_the_old_site_with_noise(name: str) -> None:
    """In the first round there is none, so that noise alone is released; later the server knows it without asking."""
    healthy = asked(private(local=exact()), one())
    personal, reply, info = asked(private(local=FAILING[name]), one())
    assert personal.releases == healthy[0].releases == 1
    assert set(reply) == set(healthy[1]) == {"site"}
    assert reply["site"].shape == healthy[1]["site"].shape == (5,)
    assert reply["site"].dtype == healthy[1]["site"].dtype == np.float64
    assert info == healthy[2] == {}
    _, reply, _ = asked(private(local=FAILING[name], _normals=silent), one())
    assert np.array_equal(reply["site"], np.zeros(5))
    client, much = one(), {"clip": 1e3, "noise_multiplier": 1e-9}
    state, _, kept = driven(private(local=exact(), **much), {"client 0": client}, 1)
    failing = private(local=FAILING[name], **much)
    personal, _, _ = failing.update_client(
        client, kept["client 0"], failing.broadcast(state, "client 0"), np.random.default_rng(0)
    )
    np.testing.assert_allclose(personal.sent[0], personal.held[0], rtol=1e-9)
    assert np.all(personal.held[0] != 0) and np.all(personal.sent[1] != personal.sent[0])


def test_only_the_vector_leaves_a_healthy_client() -> None:
    """No Monte Carlo error, no skewness, no diagnostics: those depend on the data and have no noise."""
    _, reply, info = asked(private(local=returns([0.1, 0.2], 3 * EYE)), one())
    assert set(reply) == {"site"}
    assert info == {}


@pytest.mark.parametrize("form", ["full", "diagonal"])
def test_no_data_make_the_norm_larger_than_clip(form: str, rng: np.random.Generator) -> None:
    longest = 0.0
    for scale in (1e-12, 1e-3, 1.0, 1e3, 1e12, 1e150):
        for _ in range(10):
            root = rng.normal(size=(2, 2))
            extreme = returns(scale * rng.normal(size=2), root @ root.T * rng.choice([1 / scale, scale]))
            _, reply, _ = asked(private(local=extreme, clip=0.3, structure=form, _normals=silent), one())
            longest = max(longest, math.sqrt(math.fsum(reply["site"] ** 2)))
    assert 0.3 * (1 - 1e-8) < longest <= 0.3


def test_the_released_site_is_the_whitened_factor() -> None:
    """From the prior, N(0, 10 I) here, the site is the factor: (√10 r, 10 w Q) with w = 1 at one client."""
    client = one()
    r, Q = client.factor
    _, reply, _ = asked(private(local=exact(), clip=1e9, noise_multiplier=1e-9, _normals=silent), client)
    expected = [*(np.sqrt(10) * r), 10 * Q[0, 0], np.sqrt(2) * 10 * Q[0, 1], 10 * Q[1, 1]]
    np.testing.assert_allclose(reply["site"], expected, rtol=1e-9)


def test_the_noise_has_the_variance_that_is_accounted_for() -> None:
    """300 releases of 5 numbers, (z C)² each; the limits are passed once in 10⁸ runs."""
    algorithm = private(local=FAILING["ValueError"], clip=0.5, noise_multiplier=3.0)
    numbers = np.concatenate([asked(algorithm, one())[1]["site"] for _ in range(300)])
    statistic = np.sum((numbers / 1.5) ** 2)
    assert chi2.ppf(5e-9, 1500) < statistic < chi2.isf(5e-9, 1500)


def test_equal_seeds_do_not_give_equal_noise() -> None:
    """A server that chose the seed could subtract noise that came from it."""
    algorithm, client = private(local=exact()), one()
    first, second = asked(algorithm, client, seed=4)[1]["site"], asked(algorithm, client, seed=4)[1]["site"]
    assert np.all(first != second)


def test_a_server_that_lies_about_q_gets_no_release() -> None:
    """What is refused is seen before the data are looked at."""
    client, algorithm = one(), private(local=raises(AssertionError))
    state = algorithm.init(client.layout, (client.client_id,), np.random.default_rng(0))
    message = dict(algorithm.broadcast(state, client.client_id))
    for name, value in (
        ("global_precision", -message["global_precision"]),
        ("global_linear", np.full(2, np.nan)),
        ("precision_weight", np.array(-1.0)),
        ("precision_weight", np.array(np.nan)),
    ):
        with pytest.raises(LocalFailure, match="not positive"):
            algorithm.update_client(client, None, message | {name: value}, np.random.default_rng(0))


def test_a_client_stops_when_its_releases_are_used_up() -> None:
    algorithm, client, personal = private(local=exact(), releases=3), one(), None
    for count in (1, 2, 3):
        personal, _, _ = asked(algorithm, client, personal)
        assert personal.releases == count
    with pytest.raises(LocalFailure, match="releases=3"):
        asked(algorithm, client, personal)


# --- the server -----------------------------------------------------------------------------------------------


def test_an_absurd_norm_is_refused_and_an_honest_one_is_not() -> None:
    algorithm, client = private(local=exact(), clip=0.5, noise_multiplier=2.0), one()
    state = algorithm.init(client.layout, (client.client_id,), np.random.default_rng(0))
    assert algorithm.replies.shapes(state) == {"site": (5,)}
    assert algorithm.replies.reject(state, asked(algorithm, client)[1]) is None
    limit = 1e3 * (0.5 + 12 * 1.0 * np.sqrt(5))
    assert algorithm.replies.reject(state, {"site": np.array([0.999 * limit, 0, 0, 0, 0])}) is None
    reason = algorithm.replies.reject(state, {"site": np.array([1.001 * limit, 0, 0, 0, 0])})
    assert reason is not None
    assert "'site' has norm" in reason


def test_the_predicted_noise_is_the_error_of_the_mean() -> None:
    """40 runs: error' N⁻¹ error of the mean, N the predicted covariance, is χ² with 2 degrees of freedom a run."""
    total = 0.0
    for run in range(40):
        rng = np.random.default_rng(run)
        clients = factors(20, 2, rng)
        algorithm = private(local=exact(), clip=1.2, noise_multiplier=0.1, releases=6, _normals=rng.standard_normal)
        state, _ = drive(algorithm, clients, 6)
        q, widened = state.q, algorithm.result.shared.gaussian(state)
        error = gaussian.mean(q) - gaussian.mean(posterior(clients))
        added = gaussian.covariance(widened) - gaussian.covariance(q)
        total += error @ np.linalg.solve(added, error)
        np.testing.assert_allclose(gaussian.mean(widened), gaussian.mean(q), rtol=1e-8)
        np.testing.assert_allclose(np.sqrt(np.diag(added)), algorithm.result.details(state)["noise_sd"][1], rtol=1e-6)
    assert chi2.ppf(1e-3, 80) < total < chi2.isf(1e-3, 80)


def test_averaging_takes_noise_out() -> None:
    """Half of 20 rounds averaged: 11 replies a site, so √11 times less noise than in one round."""
    clients = factors(40, 2, np.random.default_rng(2))
    algorithm = private(local=exact(), clip=1.2, noise_multiplier=0.1, releases=20)
    _, last = drive(algorithm, clients, 20)
    assert last.info.noise == pytest.approx(0.12 * np.sqrt(40 / 11), rel=0.2)


def test_clients_that_are_not_asked_keep_their_sites_and_the_noise_is_still_predicted() -> None:
    total = 0.0
    for run in range(20):
        rng = np.random.default_rng(100 + run)
        clients = factors(20, 2, rng)
        algorithm = private(local=exact(), clip=1.2, noise_multiplier=0.1, releases=9, _normals=rng.standard_normal)
        state, _ = drive(algorithm, clients, 9, share=0.7)
        error = gaussian.mean(state.q) - gaussian.mean(posterior(clients))
        total += error @ np.linalg.solve(
            gaussian.covariance(algorithm.result.shared.gaussian(state)) - gaussian.covariance(state.q), error
        )
    assert chi2.ppf(1e-3, 40) < total < chi2.isf(1e-3, 40)


def test_too_much_noise_is_said_and_not_called_converged() -> None:
    clients = factors(2, 2, np.random.default_rng(4))
    algorithm = private(local=exact(), clip=1.0, noise_multiplier=50.0, releases=3)
    _, last = drive(algorithm, clients, 3)
    assert last.status is Status.STALLED
    assert "lower clip=" in last.message
    assert last.info.damping == 0


def test_noise_that_hides_whether_q_arrived_is_not_called_converged() -> None:
    """Three releases from a wide prior: q is far too wide still, and moves no more than the noise."""
    rng = np.random.default_rng(6)
    clients = factors(20, 2, rng)
    wide = layout(2, prior_precision=1e-6)
    for client in clients.values():
        client.layout = wide
    algorithm = private(local=exact(), clip=1.0, noise_multiplier=3.0, releases=3, _normals=rng.standard_normal)
    state, last = drive(algorithm, clients, 3)
    assert np.all(gaussian.standard_deviations(state.q) > 10 * gaussian.standard_deviations(posterior(clients)))
    assert last.info.noise > 1
    assert last.status is Status.STALLED
    assert "hides whether q arrived" in last.message


def test_a_round_without_replies_counts_and_changes_nothing_else() -> None:
    clients = factors(3, 2, np.random.default_rng(5))
    algorithm = private(local=exact(), clip=2.0, noise_multiplier=0.01)
    state, _ = drive(algorithm, clients, 1)
    after, report = algorithm.update_server(state, received({}, summed=True))
    assert after.rounds == 2
    assert after.q is state.q
    assert report.info.epsilon == privacy.epsilon(0.01, 2)
    assert report.message is None


# --- whole runs -----------------------------------------------------------------------------------------------


def test_without_much_noise_it_is_the_exact_posterior() -> None:
    model, clients = normal_means(4)
    algorithm = private(clip=1e3, noise_multiplier=1e-13, releases=12)
    fit = fedppl.fit(model, clients, algorithm, progressbar=False, random_seed=1)
    mean, variance = problems.normal_means_posterior(clients)
    assert fit.status is Status.CONVERGED
    assert gaussian.mean(fit.posterior)[0] == pytest.approx(mean, abs=1e-6)
    assert gaussian.covariance(fit.posterior)[0, 0] == pytest.approx(variance, rel=1e-6)


@pytest.mark.parametrize("form", ["full", "diagonal", [["mu"], ["a"]]])
def test_without_much_noise_it_is_eps_fixed_point(form: Any) -> None:
    """The exact posterior only where the family holds it: three correlated coordinates."""
    model, clients = problems.regression()
    settings = {"progressbar": False, "random_seed": 1, "rounds": 40}
    plain = fedppl.fit(model, clients, fedppl.EP(structure=form, tolerance=1e-5), **settings)
    algorithm = private(clip=5.0, noise_multiplier=1e-13, releases=20, structure=form, tolerance=1e-3)
    noised = fedppl.fit(model, clients, algorithm, **settings)
    assert plain.status is noised.status is Status.CONVERGED
    sd = gaussian.standard_deviations(plain.posterior)
    distance = (gaussian.mean(noised.posterior) - gaussian.mean(plain.posterior)) / sd
    assert np.max(np.abs(distance)) < 1e-3
    np.testing.assert_allclose(gaussian.standard_deviations(noised.posterior), sd, rtol=1e-3)
    assert bool(np.all(noised.posterior.precision != 0)) is (form == "full")


def test_sites_of_a_diagonal_family_are_exact_beside_a_correlated_prior() -> None:
    """Q = prior's + n I, r = Σ y: the likelihood is in the family and the prior is not. Many releases for 3 clients."""
    model = problems.declared(problems.correlated_builder, ("mu",))
    rng = np.random.default_rng(0)
    clients = {f"site {k}": {"y": np.array([3.0, -1.0]) + rng.normal(size=(3, 2))} for k in range(3)}
    algorithm = private(clip=5.0, noise_multiplier=1e-13, releases=30, structure="diagonal", tolerance=1e-3)
    fit = fedppl.fit(model, clients, algorithm, rounds=30, progressbar=False, random_seed=1)
    precision = np.linalg.inv([[1.0, 0.9], [0.9, 1.0]]) + 9 * np.eye(2)
    mean = np.linalg.solve(precision, np.sum([data["y"].sum(axis=0) for data in clients.values()], axis=0))
    assert fit.status is Status.CONVERGED
    np.testing.assert_allclose(gaussian.mean(fit.posterior), mean, atol=1e-5)
    np.testing.assert_allclose(fit.posterior.precision, precision, rtol=1e-5)


@problems.few_rounds
@pytest.mark.slow
def test_many_clients_with_real_noise_come_within_the_predicted_error() -> None:
    """No seed: six sds are passed once in 10⁸ runs."""
    model, clients = normal_means(300, rows=5)
    algorithm = private(clip=0.17, noise_multiplier=2.0, releases=20, local=fedppl.local.Laplace())  # exact here
    fit = fedppl.fit(model, clients, algorithm, rounds=25, progressbar=False, random_seed=1)
    mean, variance = problems.normal_means_posterior(clients)
    noise_sd = float(fit.idata["fit"]["noise_sd"][0])
    assert len(fit.records) == 20
    assert abs(gaussian.mean(fit.posterior)[0] - mean) < 6 * noise_sd
    assert gaussian.covariance(fit.posterior)[0, 0] > noise_sd**2
    # the noise of K z C on the mean, averaged over 11 rounds: z C √(K / 11) posterior sds
    assert noise_sd / np.sqrt(variance) == pytest.approx(0.34 * np.sqrt(300 / 11), rel=0.35)
    assert f"ε = {privacy.epsilon(2.0, 20):.3g}" in fit.message


@problems.few_rounds
def test_epsilon_of_every_round_is_reported() -> None:
    model, clients = normal_means(3)
    algorithm = private(clip=2.0, noise_multiplier=0.05, releases=4)
    fit = fedppl.fit(model, clients, algorithm, rounds=9, progressbar=False, random_seed=1)
    found = fit.idata["rounds"]["epsilon"].values
    assert list(found) == [privacy.epsilon(0.05, count) for count in (1, 2, 3, 4)]
    assert list(fit.idata["rounds"]["released"].values) == ["site (2)"] * 4


def test_no_client_releases_more_than_it_may_when_replies_are_lost() -> None:
    """The server sees fewer replies than there were releases; the clients count themselves."""
    model, clients = normal_means(2)
    algorithm = private(clip=2.0, noise_multiplier=0.05, releases=3)
    released: dict[str, int] = dict.fromkeys(clients, 0)

    def counted(client: Any, *arguments: Any) -> Any:
        result = algorithm.update_client(client, *arguments)
        released[client.client_id] += 1
        return result

    def lossy(state: Any, all_: Received) -> Any:
        return algorithm.update_server(state, all_ if state.rounds else received({}, summed=True))

    steps = list(
        fedppl.rounds(
            model, clients, algorithm._replace(update_client=counted, update_server=lossy), rounds=6, random_seed=1
        )
    )
    assert released == {"client 0": 3, "client 1": 3}
    assert all("releases=3" in reason for step in steps[3:] for reason in step.failures.values())
    assert {len(step.failures) for step in steps[3:]} == {2}
    assert steps[-1].info.epsilon == privacy.epsilon(0.05, 3)


def test_a_resumed_run_goes_on_counting(tmp_path: Any) -> None:
    model, clients = normal_means(2)
    algorithm = private(clip=2.0, noise_multiplier=0.05, releases=3)
    settings: dict[str, Any] = {"checkpoint": tmp_path / "run.ckpt", "random_seed": 1}
    first = list(fedppl.rounds(model, clients, algorithm, rounds=2, **settings))
    rest = list(fedppl.rounds(model, clients, algorithm, rounds=9, **settings))
    assert [len(first), len(rest)] == [2, 1]
    assert list(rest[-1].state.taken.replies) == [3, 3]


def test_a_request_without_noise_in_its_stream_is_answered_by_the_engine_too() -> None:
    """Through `answer`, as every engine calls it."""
    from fedppl.engine.answer import answer

    algorithm, client = private(local=exact()), one()
    state = algorithm.init(client.layout, (client.client_id,), np.random.default_rng(0))
    request = Request(client.client_id, 1, 1, (0, 1, 2), algorithm.broadcast(state, client.client_id))
    personal, reply = answer(algorithm, client, None, request)
    again, other = answer(algorithm, client, personal, request)
    assert (personal.releases, again.releases) == (1, 2)
    assert np.all(reply.message["site"] != other.message["site"])  # type: ignore[union-attr]
