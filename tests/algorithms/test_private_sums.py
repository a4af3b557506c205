"""Private EP by sums: what clients keep of a run, noise that is shared under masks, and who refuses without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

import fedppl
from fedppl import gaussian, privacy
from fedppl.algorithms.ep.private import _in_q, site_of
from fedppl.contracts import LocalInference, Moments
from fedppl.engine.policy import refuse_sharing
from fedppl.gaussian import Gaussian
from fedppl.testing import normal_means
from fedppl.types import DeclarationError, LocalFailure, Status
from tests.algorithms.test_private_ep import driven, exact, factors, inference, one, posterior, private, raises
from tests.support import problems

MASKED: Any = {"engine": fedppl.InProcess(secure=True), "progressbar": False, "random_seed": 1}
FAINT = {"clip": 20.0, "noise_multiplier": 1e-7}


def curved() -> LocalInference:
    """A factor whose site depends on the cavity: precision 1 / (1 + ‖mean of the cavity‖²)."""

    def tilted(target: Any, rng: Any) -> Moments:
        mean = gaussian.mean(target.cavity)
        precision = target.cavity.precision + np.eye(len(mean)) / (1 + mean @ mean)
        return Moments(mean + 0.3, precision, precision, np.zeros(len(mean)), {})

    return inference(tilted)


# --- what a client keeps of a run -----------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "lost"), [(1.0, 0.0), (0.7, 0.0), (1.0, 0.3), (0.6, 0.3)])
def test_q_is_the_prior_and_what_clients_have_told_whoever_replies(share: float, lost: float) -> None:
    """A client that is not asked, or whose reply is lost, takes no step; after many rounds q is the posterior."""
    clients = factors(6, 2, np.random.default_rng(3))
    algorithm = private(local=exact(), clip=20.0, noise_multiplier=1e-12, releases=80)
    state, _, kept = driven(algorithm, clients, 40, share=share, lost=lost)
    told = sum(
        _in_q(kept[name], algorithm.broadcast(state, name), state.problem.structure)[1]
        for name in clients
        if name in kept
    )
    total = gaussian.product(state.problem.prior, site_of(told, state.problem.structure))
    np.testing.assert_allclose(state.q.linear, total.linear, rtol=1e-9)
    np.testing.assert_allclose(state.q.precision, total.precision, rtol=1e-9)
    np.testing.assert_allclose(gaussian.mean(state.q), gaussian.mean(posterior(clients)), rtol=1e-6)
    np.testing.assert_allclose(state.q.precision, posterior(clients).precision, rtol=1e-6)


def test_a_client_that_lost_its_state_is_refused_in_this_run_and_not_in_another() -> None:
    """q holds its old site: with a new one beside it, its data would count twice."""
    clients = factors(3, 2, np.random.default_rng(5))
    algorithm = private(local=exact(), releases=9)
    state, _, kept = driven(algorithm, clients, 2)
    message, rng = algorithm.broadcast(state, "client 0"), np.random.default_rng(0)
    earlier = driven(algorithm, clients, 1)[2]["client 0"]
    for lost in (None, earlier._replace(run=earlier.run + 1)):
        with pytest.raises(LocalFailure, match="new run"):
            algorithm.update_client(clients["client 0"], lost, message, rng)
    fresh = algorithm.init(clients["client 0"].layout, tuple(clients), np.random.default_rng(8))
    after, _, _ = algorithm.update_client(
        clients["client 0"], kept["client 0"], algorithm.broadcast(fresh, "client 0"), rng
    )
    assert after.releases == 3 and not np.any(after.held)


@pytest.mark.parametrize("name", ["step", "counted", "round", "run"])
def test_numbers_of_no_round_get_no_release(name: str) -> None:
    """Seen before the data are: `raises` is not reached."""
    client, algorithm = one(), private(local=raises(AssertionError))
    message = dict(
        algorithm.broadcast(algorithm.init(client.layout, ("client 0",), np.random.default_rng(0)), "client 0")
    )
    for value in (-1.0, 1.5, np.nan) if name == "step" else (np.nan, np.inf) if name != "round" else (0.0, np.nan):
        with pytest.raises(LocalFailure, match="is none"):
            algorithm.update_client(client, None, message | {name: np.array(value)}, np.random.default_rng(0))


@pytest.mark.parametrize("shared_by", [1, 3])
def test_what_a_client_computes_holds_none_of_its_earlier_noise(shared_by: int) -> None:
    """Two histories with other noise, and the same request: replies differ by what was told before alone.

    The others' vectors would else move with noise of which a sum tells something, and ε would not hold.
    """
    clients = factors(3, 2, np.random.default_rng(7))
    algorithm = private(local=curved(), clip=2.0, noise_multiplier=0.5, releases=9, shared_by=shared_by)
    state, _, kept = driven(algorithm, clients, 2)
    message, mine = algorithm.broadcast(state, "client 0"), kept["client 0"]
    other = mine._replace(held=mine.held + [[0.0], [1.0]], sent=mine.sent + [[0.0], [1.0]])
    silent = private(local=curved(), clip=2.0, noise_multiplier=0.5, releases=9, shared_by=shared_by, _normals=np.zeros)
    first, second = (
        silent.update_client(clients["client 0"], personal, message, np.random.default_rng(0))[0]
        for personal in (mine, other)
    )
    np.testing.assert_array_equal(first.sent[0], second.sent[0])
    assert np.any(mine.sent[1]) == (shared_by == 1)  # under shared noise nothing of a reply is kept


def test_a_client_draws_from_its_own_cavity() -> None:
    """q over the site that the client keeps, in closed form: prior x the others' factors."""
    clients = factors(4, 2, np.random.default_rng(9))
    seen: list[Any] = []
    local = exact()._replace(draw=lambda target, *numbers: seen.append(target))
    algorithm = private(local=local, clip=50.0, noise_multiplier=1e-13, releases=40)
    state, _, kept = driven(algorithm, clients, 30)
    others = posterior({name: client for name, client in clients.items() if name != "client 1"})
    for name, personal, cavity in (("client 1", kept["client 1"], others), ("new", None, state.q)):
        algorithm.result.draw(
            clients["client 1"], personal, algorithm.result.final_message(state, name), 1, 1, np.random.default_rng(0)
        )
        np.testing.assert_allclose(seen[-1].cavity.precision, cavity.precision, rtol=1e-6)
        np.testing.assert_allclose(seen[-1].cavity.linear, cavity.linear, rtol=1e-6)
    assert seen[0].prior_share == seen[1].prior_share == 0


# --- sums under masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["full", "diagonal"])
@pytest.mark.parametrize("shared_by", [1, 3])
def test_under_masks_without_much_noise_it_is_eps_fixed_point(form: str, shared_by: int) -> None:
    model, clients = problems.regression()
    plain = fedppl.fit(model, clients, fedppl.EP(structure=form, tolerance=1e-5), progressbar=False, random_seed=1)
    algorithm = private(**FAINT, releases=20, structure=form, shared_by=shared_by, tolerance=1e-3)
    masked = fedppl.fit(model, clients, algorithm, rounds=40, **MASKED)
    assert plain.status is masked.status is Status.CONVERGED
    sd = gaussian.standard_deviations(plain.posterior)
    assert np.max(np.abs(gaussian.mean(masked.posterior) - gaussian.mean(plain.posterior)) / sd) < 1e-3
    np.testing.assert_allclose(gaussian.standard_deviations(masked.posterior), sd, rtol=1e-3)
    assert not any(record.infos for record in masked.records)


@problems.few_rounds
def test_the_noise_of_a_sum_has_the_sd_that_is_accounted_for() -> None:
    """Sites of zero: sums of four under masks are noise of variance (z C)² 4 / 3; passed once in 10⁸ runs."""
    model, clients = normal_means(4)
    algorithm = private(local=raises(ValueError), clip=0.1, noise_multiplier=1.5, releases=100, shared_by=3)
    sums: list[Any] = []

    def step(state: Any, received: Any) -> Any:
        sums.append(received.total["site"])
        return algorithm.update_server(state, received)

    fit = fedppl.fit(model, clients, algorithm._replace(update_server=step), rounds=100, **MASKED)
    assert len(sums) == 100
    statistic = np.sum((np.concatenate(sums) / 0.15) ** 2) / (4 / 3)
    assert chi2.ppf(5e-9, 200) < statistic < chi2.isf(5e-9, 200)
    rounds = fit.idata["rounds"]
    assert list(rounds["epsilon"].values[:2]) == [privacy.epsilon(1.5, 1), privacy.epsilon(1.5, 2)]
    assert rounds["epsilon_alone"].values[0] == privacy.epsilon(1.5 * np.sqrt(4 / 3), 1)


def test_the_predicted_noise_of_a_sum_is_the_error_of_the_mean() -> None:
    """As for single replies, with noise that ten of twenty share: χ² with 2 degrees of freedom a run."""
    total, narrow = 0.0, 0.0
    for run in range(30):
        rng = np.random.default_rng(run)
        clients = factors(20, 2, rng)
        algorithm = private(
            local=exact(), clip=1.2, noise_multiplier=0.3, releases=6, shared_by=10, _normals=rng.standard_normal
        )
        state, report, _ = driven(algorithm, clients, 6)
        error = gaussian.mean(state.q) - gaussian.mean(posterior(clients))
        added = gaussian.covariance(algorithm.result.shared.gaussian(state)) - gaussian.covariance(state.q)
        total, narrow = total + error @ np.linalg.solve(added, error), narrow + report.info.noise / 30
    assert chi2.ppf(1e-3, 60) < total < chi2.isf(1e-3, 60)
    assert narrow == pytest.approx(0.36 * np.sqrt(20 / 10 / 4), rel=0.25)  # z C √(K / n), of four rounds averaged


def test_a_reply_that_shares_its_noise_is_no_change() -> None:
    """It is the site alone: what another step would leave of an earlier release, a difference would show."""
    clients = factors(3, 2, np.random.default_rng(2))
    silent = private(local=exact(), clip=50.0, shared_by=3, noise_multiplier=1e-6, releases=9, _normals=np.zeros)
    state, _, kept = driven(silent, clients, 1)
    replies = [
        silent.update_client(clients["client 0"], kept["client 0"], message, np.random.default_rng(0))[1]["site"]
        for step in (0.0, 1.0)
        for message in [silent.broadcast(state, "client 0") | {"step": np.array(step)}]
    ]
    np.testing.assert_allclose(*replies, rtol=1e-9)  # of a Gaussian factor, whose site is one at any cavity


# --- who refuses ----------------------------------------------------------------------------------------------


def test_shared_noise_is_refused_in_the_clear_and_in_a_small_cohort() -> None:
    model, clients = normal_means(4)
    with pytest.raises(DeclarationError, match=r"seen singly.*InProcess\(secure=True\)"):
        fedppl.fit(model, clients, private(shared_by=3), progressbar=False)
    with pytest.raises(DeclarationError, match="the cohort has 4"):
        fedppl.fit(model, clients, private(shared_by=5), **MASKED)
    assert refuse_sharing(private(shared_by=4), 4) is refuse_sharing(private(), None) is None


@pytest.mark.parametrize("secure", [False, True])
def test_shared_noise_is_refused_by_a_grid_without_masks_or_sites(secure: bool) -> None:
    pytest.importorskip("flwr")
    model, _ = normal_means(4)
    factory = fedppl.Flower.grid(object(), clients=4, model=model, example_data={"y": [0.0, 1.0]}, secure=secure)
    with pytest.raises(DeclarationError, match="the cohort has 4" if secure else "secure=True"):
        factory(private(shared_by=5 if secure else 4), {})


@pytest.mark.parametrize("wrong", [{"clip": 1e7}, {"clip": 1e-7}, {"noise_multiplier": 1e-7}])
def test_numbers_that_masks_cannot_carry_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DeclarationError, match="under masks both must be between"):
        private(shared_by=2, **wrong)
    private(**wrong)


def test_a_prior_that_is_correlated_stays_outside_a_diagonal_family() -> None:
    """The server takes the sum of sites in q for q over the prior, whatever the prior's form."""
    model = problems.declared(problems.correlated_builder, ("mu",))
    rng = np.random.default_rng(0)
    clients = {f"site {k}": {"y": np.array([3.0, -1.0]) + rng.normal(size=(3, 2))} for k in range(3)}
    algorithm = private(clip=20.0, noise_multiplier=1e-7, releases=30, structure="diagonal", shared_by=3)
    fit = fedppl.fit(model, clients, algorithm, rounds=30, **MASKED)
    precision = np.linalg.inv([[1.0, 0.9], [0.9, 1.0]]) + 9 * np.eye(2)
    linear = np.sum([data["y"].sum(axis=0) for data in clients.values()], axis=0)
    expected = Gaussian(linear, precision)
    np.testing.assert_allclose(gaussian.mean(fit.posterior), gaussian.mean(expected), atol=1e-4)
    np.testing.assert_allclose(fit.posterior.precision, precision, rtol=1e-4)
