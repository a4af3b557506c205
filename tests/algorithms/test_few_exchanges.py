"""Sums in few exchanges: own posteriors in place of a search, against closed forms, quadrature and other fits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import ConvergenceWarning, DeclarationError, gaussian
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.sums import phases, search
from fedppl.contracts import OnlySums, Received
from fedppl.testing import normal_means
from tests.algorithms.test_few_means import PRIORS, data_of, sd_of_mean
from tests.algorithms.test_sums import WARDS, by_quadrature, hospitals
from tests.support import problems
from tests.support.states import updated

fit = functools.partial(fedppl.fit, progressbar=False, random_seed=1)


@pytest.mark.parametrize("problem", [normal_means, problems.regression])
def test_a_gaussian_posterior_is_exact_after_two_exchanges(problem: Any) -> None:
    """A quadratic goes through the pilot's values, whatever the proposal."""
    model, clients = problem()
    found, expected = fit(model, clients, fedppl.Sums(exchanges=4)), fit(model, clients, fedppl.EP())
    assert found.status.value == "converged" and len(found.records) == 2
    for name in ("precision", "linear"):
        assert_allclose(getattr(found.posterior, name), getattr(expected.posterior, name), rtol=1e-6, atol=1e-6)


def test_own_posteriors_of_gaussian_models_make_the_posterior() -> None:
    """They are known by weighted points: to some hundredths of an sd."""
    model, clients = problems.regression()
    views = model.enrol(clients)
    prior = next(iter(views.values())).layout.prior
    assert_allclose(search.together(prior, np.zeros(9)).precision, prior.precision)
    q, expected = search.together(prior, sum(search.alone(view, 0.0) for view in views.values())), fit(model, clients)
    sd = gaussian.standard_deviations(expected.posterior)
    assert_allclose((gaussian.mean(q) - gaussian.mean(expected.posterior)) / sd, 0.0, atol=0.05)
    assert_allclose(gaussian.standard_deviations(q) / sd, 1.0, atol=0.05)


def test_a_random_intercept_is_that_of_quadrature() -> None:
    clients = hospitals(12)
    mean, sd, evidence = by_quadrature(clients)
    found = fit(WARDS, clients, fedppl.Sums(exchanges=4))
    assert found.status.value == "converged" and len(found.records) <= 4
    assert found.records[-1].info["points"] <= 20_000
    table = found.summary()
    for place, name in enumerate(("mu", "log_tau")):
        row = table.loc[name]
        assert abs(row["mean"] - mean[place]) < 4 * row["mcse_mean"] + 0.005 * sd[place]
        assert abs(row["sd"] / sd[place] - 1) < 4 * row["mcse_sd"] / sd[place] + 0.005
    assert abs(found.log_evidence.value - evidence) < 4 * found.log_evidence.error + 0.005


def test_sums_under_masks_are_the_same() -> None:
    clients = hospitals(3)
    plain = fit(WARDS, clients, fedppl.Sums(exchanges=4))
    masked = fit(WARDS, clients, fedppl.Sums(exchanges=4), engine=fedppl.InProcess(secure=True))
    assert len(masked.records) == len(plain.records)
    # Masked sums are rounded to 2^-60 a client; that is amplified by the fits of surrogates.
    for one, other in zip(masked.posterior, plain.posterior, strict=True):
        assert_allclose(one, other, rtol=1e-6)


def test_all_clients_get_the_same_message_and_only_a_sum_is_read() -> None:
    algorithm, views = fedppl.Sums(exchanges=4), WARDS.enrol(hospitals(3))
    layout, rng = next(iter(views.values())).layout, np.random.default_rng(1)
    state = algorithm.init(layout, tuple(views), rng)
    while isinstance(state.phase, phases.Alone | phases.Weighing):
        messages = [algorithm.broadcast(state, name) for name in views]
        for message in messages[1:]:
            for name in messages[0]:
                assert_array_equal(message[name], messages[0][name])
        assert algorithm.replies.summed(state)
        updates = [algorithm.update_client(view, None, messages[0], rng) for view in views.values()]
        assert {k: np.shape(v) for k, v in updates[0].reply.items()} == algorithm.replies.shapes(state)
        state, report = updated(algorithm, state, {name: one.reply for name, one in zip(views, updates, strict=True)})
    assert report.status.value == "converged" and state.left >= 0


def test_a_round_without_a_client_is_not_one_of_them() -> None:
    algorithm, views = fedppl.Sums(exchanges=4), WARDS.enrol(hospitals(3))
    state = algorithm.init(next(iter(views.values())).layout, tuple(views), np.random.default_rng(1))
    after, report = algorithm.update_server(state, Received(OnlySums(), {}, 2))
    assert after.left == 4 and after.void == 1 and "all 3 clients" in str(report.message)


def test_a_fit_goes_on_from_another_without_own_posteriors() -> None:
    clients = hospitals(12)
    first = fit(WARDS, {k: clients[k] for k in list(clients)[:11]}, fedppl.Sums(exchanges=4))
    again = fit(WARDS, clients, fedppl.Sums(exchanges=4), start=first)
    assert again.status.value == "converged" and len(again.records) <= 3
    assert "alone" not in str(again.idata["rounds"]["released"].values)


def few_means(prior: str) -> fedppl.FederatedModel:
    """Rows about a client's level, levels about a mean, whose sd hardly anything tells."""

    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            mu, tau, sigma = pm.Normal("mu", 0, 1000), PRIORS[prior][0](), pm.HalfCauchy("sigma", 5)
            pm.Normal("obs", pm.Normal("level", mu, tau), sigma, observed=pm.Data("y", y))
        return model

    return fedppl.FederatedModel(builder, ["mu", "tau", "sigma"])


def test_a_mean_of_three_clients_has_its_sd() -> None:
    data = data_of([3, 4, 5])
    found = fit(few_means("half-Cauchy"), data, fedppl.Sums(exchanges=4))
    assert found.status.value == "converged" and len(found.records) <= 4
    exact = sd_of_mean(data, PRIORS["half-Cauchy"][1], np.exp(np.linspace(-16, 14, 1200)))
    assert_allclose(found.summary().loc["mu", "sd"] / exact, 1.0, atol=0.05)


@pytest.mark.parametrize(("prior", "sizes", "most"), [("uniform", [3, 4, 5, 6], 6), ("half-Cauchy", [3, 4, 5], 3)])
def test_a_fit_that_would_need_more_is_stalled_and_says_so(prior: str, sizes: list[int], most: int) -> None:
    with pytest.warns(ConvergenceWarning, match="exchanges="):
        found = fit(few_means(prior), data_of(sizes), fedppl.Sums(exchanges=most))
    assert found.status.value == "stalled" and len(found.records) == most
    assert f"exchanges={most}" in found.message


def test_a_fit_that_ends_in_its_pilot_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the pilot has to be asked for again."""
    monkeypatch.setattr(tol, "FEWEST_EXCHANGES", 2)
    with pytest.warns(ConvergenceWarning, match="exchanges="):
        found = fit(WARDS, hospitals(3), fedppl.Sums(exchanges=2))
    assert found.status.value == "stalled" and len(found.records) == 2
    assert np.all(np.isfinite(gaussian.mean(found.posterior)))


def test_a_largest_number_of_exchanges_keeps_to_the_points_that_policies_allow() -> None:
    pilot, stage = (tol.HURRIED_POINTS * points for points in (256, 512))
    assert pilot + (tol.MOST_EXCHANGES - 2) * (stage + tol.PROBES) <= 20_000


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"exchanges": 2}, "exchanges"),
        ({"exchanges": 10}, "exchanges"),
        ({"exchanges": 4.0}, "exchanges"),
        ({"exchanges": 4, "starts": 2}, "starts"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(DeclarationError, match=named):
        fedppl.Sums(**settings)
