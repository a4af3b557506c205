"""EP's warm starts: modes that several searches find, how they are told apart, and what searches go without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_array_equal
from scipy import stats

import fedppl
from fedppl import DeclarationError, FederatedModel, gaussian
from fedppl.types import LocalFailure, Status
from tests.support import problems


def fit(model: FederatedModel, clients: Any, algorithm: Any = None, **settings: Any) -> fedppl.Fit:
    return fedppl.fit(model, clients, algorithm or fedppl.EP(), progressbar=False, random_seed=1, **settings)


def two_groups(y: Any) -> pm.Model:
    """A mixture of which the labels can be exchanged."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        center = pm.Normal("center", 0, 5, shape=2)
        pm.NormalMixture("obs", w=np.array([0.5, 0.5]), mu=center, sigma=1.0, observed=y)
    return model


@pytest.mark.slow
def test_several_modes_are_named_and_never_averaged_over() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": np.where(rng.random(30) < 0.4, -2, 3) + rng.normal(size=30)} for k in range(3)}
    model = FederatedModel(two_groups, ["center"])
    with pytest.warns(fedppl.ConvergenceWarning, match=r"several modes: along center\[.\], .*[45].% at .*[45].% at"):
        found = fit(model, clients, fedppl.EP(starts=6))
    assert found.status is Status.STALLED
    assert np.abs(gaussian.mean(found.posterior)).min() > 1  # one labelling, and not what lies between
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):  # who begins there is still in one of them
        assert fit(model, clients, fedppl.EP(starts=6), start=found).status is Status.STALLED
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):
        assert fedppl.without(found, "0", progressbar=False).fit.status is Status.STALLED


def far_apart(y: Any) -> pm.Model:
    """Modes many sds of the prior's Gaussian away from its middle."""
    with pm.Model() as model:
        pm.StudentT("obs", nu=2, mu=pm.Cauchy("mu", 0, 1), sigma=1, observed=pm.Data("y", y))
    return model


def test_modes_in_the_tails_of_the_prior_are_found() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": (8.0 if k % 2 else -8.0) + rng.normal(size=2)} for k in range(4)}
    steps = fedppl.rounds(FederatedModel(far_apart, ["mu"]), clients, fedppl.EP(starts=4), rounds=1, random_seed=1)
    *_, last = steps
    modes = np.array([mode.point[0] for mode in last.state.starts.modes])
    mass = np.exp([mode.log_mass for mode in last.state.starts.modes])
    at = np.linspace(-20, 20, 20001)
    logs = stats.cauchy.logpdf(at) + sum(stats.t(2).logpdf(y - at) for data in clients.values() for y in data["y"])
    exact = np.sum(np.exp(logs[at < 0])) / np.sum(np.exp(logs))
    left, right = (mass[np.abs(modes - sign * 7.5) < 1].max() for sign in (-1, 1))
    assert left / (left + right) == pytest.approx(exact, abs=0.05)


def searches(fit: fedppl.Fit) -> int:
    """Rounds of warm starts."""
    return sum(record.info["phase"] == "warm start" for record in fit.records)


def test_several_starts_change_nothing_where_there_is_one_mode() -> None:
    """The first search that came to the mode is gone on from, to the last digit."""
    model, clients = problems.regression()
    one, several = fit(model, clients, fedppl.EP(starts=1)), fit(model, clients)
    assert several.status is Status.CONVERGED
    assert searches(several) > searches(one)
    assert_array_equal(gaussian.mean(several.posterior), gaussian.mean(one.posterior))
    assert_array_equal(several.posterior.precision, one.posterior.precision)
    assert searches(fit(model, clients, fedppl.EP(starts=6))) > searches(several)


def test_the_default_finds_a_second_mode_and_does_not_converge() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": (8.0 if k % 2 else -8.0) + rng.normal(size=2)} for k in range(4)}
    model = FederatedModel(far_apart, ["mu"])
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes: along mu"):
        assert fit(model, clients).status is Status.STALLED
    both = fit(model, clients, fedppl.Sums(starts=1))  # its points are in both modes: 74 % below 0, by quadrature
    assert both.status is Status.CONVERGED
    assert abs(np.mean(both.idata["posterior"]["mu"].values < 0) - 0.741) < 0.03


def shared_out(y: Any) -> pm.Model:
    """Two levels, and the share of the first: both may be exchanged, and the middle of the prior is no saddle."""
    with pm.Model() as model:
        y, share = pm.Data("y", y), pm.Beta("share", 2, 2)
        level, sd = pm.Normal("level", 0, 2, shape=2), pm.HalfNormal("sd", 1)
        pm.NormalMixture("obs", pm.math.stack([share, 1 - share]), level, sd, observed=y)
    return model


@pytest.mark.slow
def test_the_default_finds_labels_that_may_be_exchanged() -> None:
    rng = np.random.default_rng(3)
    clients = {str(k): {"y": np.where(rng.random(60) < 0.6, -0.5, 2.0) + 0.6 * rng.normal(size=60)} for k in range(5)}
    model = FederatedModel(shared_out, ["level", "sd", "share"])
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes: along level"):
        found = fit(model, clients)
    modes = found.state.starts.modes
    assert any(np.max(np.abs(mode.point[:2] - modes[0].point[1::-1]) / mode.sd[:2]) < 1 for mode in modes)


def scalars(y: Any) -> pm.Model:
    """The same, whose levels are two variables, far from the middle of their prior."""
    with pm.Model() as model:
        y, share = pm.Data("y", y), pm.Beta("share", 2, 2)
        first, second, sd = pm.Normal("first", 0, 10), pm.Normal("second", 0, 10), pm.HalfNormal("sd", 1)
        pm.NormalMixture("obs", pm.math.stack([share, 1 - share]), pm.math.stack([first, second]), sd, observed=y)
    return model


@pytest.mark.slow
def test_a_better_mode_that_is_found_late_has_images_of_its_own() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": np.where(rng.random(40) < 0.5, 9.5, 12.5) + 0.6 * rng.normal(size=40)} for k in range(4)}
    model = FederatedModel(scalars, ["first", "second", "sd", "share"])
    with pytest.warns(fedppl.ConvergenceWarning, match=r"several modes: along (first|second), .*[45].% at .*[45].% at"):
        assert fit(model, clients, fedppl.EP(starts=8)).status is Status.STALLED


@pytest.mark.parametrize("missed", range(6, 24))
def test_a_reply_that_is_missed_in_a_search_does_not_choose_the_mode(missed: int) -> None:
    """Three clients of five are at 8: the mode there has all the mass."""
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": (8.0 if k < 3 else -8.0) + rng.normal(size=3)} for k in range(5)}
    model, rounds = FederatedModel(far_apart, ["mu"]), iter(range(10**6))

    def broken(client: Any, personal: None, message: Any, rng: Any) -> Any:
        if client.client_id == "0" and next(rounds) == missed:
            raise LocalFailure("away")
        return whole.update_client(client, personal, message, rng)

    whole = fedppl.EP(starts="auto")
    found = fit(model, clients, whole._replace(update_client=broken))
    assert gaussian.mean(found.posterior)[0] > 5


def test_modes_of_clients_that_left_are_forgotten() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": (8.0 if k < 2 else -8.0) + rng.normal(size=2)} for k in range(4)}
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):
        found = fit(FederatedModel(far_apart, ["mu"]), clients)
    assert fedppl.without(found, ["2", "3"], progressbar=False).fit.status is Status.CONVERGED


def unequal_shares(y: Any) -> pm.Model:
    """Shares that are known tell labels apart where there are many rows."""
    with pm.Model() as model:
        first, second = pm.Normal("first", 0.3, 5), pm.Normal("second", -0.3, 5)
        pm.NormalMixture("obs", [0.3, 0.7], pm.math.stack([first, second]), 0.8, observed=pm.Data("y", y))
    return model


def test_a_mode_without_mass_may_have_some_when_a_client_has_left() -> None:
    rng = np.random.default_rng(3)
    rows = {"K": (12, 40), "A": (5, 5), "B": (4, 5), "C": (5, 5)}  # at 6, and at 2
    clients = {
        name: {"y": np.repeat([6.0, 2.0], each) + 0.8 * rng.normal(size=sum(each))} for name, each in rows.items()
    }
    found = fit(FederatedModel(unequal_shares, ["first", "second"]), clients)
    assert found.status is Status.CONVERGED
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):
        left = fedppl.without(found, "K", certificate=False, progressbar=False)
    assert left.fit.status is Status.STALLED


def test_a_run_that_was_cut_off_between_searches_goes_on_as_it_would_have(tmp_path: Path) -> None:
    model, clients = problems.regression()
    whole, path = fit(model, clients), tmp_path / "run.ckpt"
    assert searches(whole) > 7
    begun = itertools.islice(fedppl.rounds(model, clients, fedppl.EP(), checkpoint=path, random_seed=1), 7)
    assert [step.record.info["phase"] for step in begun] == 7 * ["warm start"]
    resumed = fit(model, clients, checkpoint=path)
    assert len(resumed.records) == len(whole.records)
    assert_array_equal(gaussian.mean(resumed.posterior), gaussian.mean(whole.posterior))


def test_searches_that_nobody_asked_for_are_left_out_where_rounds_are_of_few_clients() -> None:
    model, clients = problems.regression()
    found = fit(model, clients, participation=1)
    assert searches(found) == searches(fit(model, clients, fedppl.EP(starts=1), participation=1))


def exploding(y: Any) -> pm.Model:
    """Rates without bound: at many points of the prior there is no expansion."""
    with pm.Model() as model:
        pm.Poisson("obs", pm.math.exp(pm.Normal("mu", 0, 100)), observed=pm.Data("y", y))
    return model


def test_a_search_begins_nearer_where_clients_have_no_expansion() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": rng.poisson(7.0, size=20)} for k in range(3)}
    found = fit(FederatedModel(exploding, ["mu"]), clients)
    assert found.status is Status.CONVERGED
    assert not any(record.failures for record in found.records)


def test_what_several_starts_do_not_go_with_is_refused() -> None:
    for settings in ({"trust": 3.0}, {"warm_start": False}, {}):
        with pytest.raises(DeclarationError, match="starts="):
            fedppl.EP(starts=2 if settings else 0, **settings)
