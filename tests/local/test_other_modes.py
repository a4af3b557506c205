"""Clients whose local variables have several modes given the shared ones are refused: one mode is not the integral."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest

import fedppl
from fedppl import FederatedModel, gaussian
from fedppl.contracts import Factor
from fedppl.local import log_factors
from fedppl.numerics.integral import smooth_over
from fedppl.types import LocalFailure
from tests.support import problems


def squared(y: Any) -> pm.Model:
    """The sign of θ is told by the prior alone."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.5, 2)
        pm.Normal("obs", pm.Normal("theta", mu, 1) ** 2, 0.5, observed=pm.Data("y", y))
    return model


def two_groups(y: Any) -> pm.Model:
    """Each row is of one of two groups, whose means may be exchanged."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 5)
        means = pm.Normal("means", mu, 3, shape=2)
        pm.Mixture("obs", [0.5, 0.5], pm.Normal.dist(means, 0.3, shape=(2,)), observed=y)
    return model


def outlying(y: Any) -> pm.Model:
    """Rows with long tails, all of them near each other: one mode."""
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0, 5), pm.HalfNormal("tau", 1)
        pm.StudentT("obs", nu=4, mu=pm.Normal("theta", mu, tau), sigma=1, observed=pm.Data("y", y))
    return model


def factor(model: FederatedModel, clients: Any, at: Any) -> Factor:
    client = next(iter(model.enrol(clients).values()))
    points = at + 0.5 * np.random.default_rng(1).normal(size=(64, len(at)))
    compute = log_factors.factor
    return compute(client, points, at, 0.0)


@pytest.mark.parametrize("mean", [0.0, 1.0, 2.0])
def test_mirror_images_are_found_wherever_the_prior_lies(mean: float) -> None:
    clients = {"a": {"y": np.array([3.3, 2.9, 3.6])}}
    with pytest.raises(LocalFailure, match="more than one mode.*theta"):
        factor(FederatedModel(squared, ["mu"]), clients, np.array([mean]))


def test_groups_that_may_be_exchanged_are_found(rng: np.random.Generator) -> None:
    y = np.concatenate([rng.normal(-2, 0.3, 6), rng.normal(2, 0.3, 4)])
    with pytest.raises(LocalFailure, match="more than one mode.*means"):
        factor(FederatedModel(two_groups, ["mu"]), {"a": {"y": y}}, np.array([0.1]))


@pytest.mark.parametrize("algorithm", [fedppl.Sums(), fedppl.EP(), fedppl.EP(local=fedppl.local.Laplace())])
def test_a_fit_names_who_has_them_and_is_not_converged(algorithm: Any, rng: np.random.Generator) -> None:
    clients = {f"c{k}": {"y": rng.normal(3.0, 0.5, 3)} for k in range(3)}
    with pytest.warns(fedppl.ConvergenceWarning, match="more than one mode"):
        fit = fedppl.fit(
            FederatedModel(squared, ["mu"]), clients, algorithm, rounds=3, progressbar=False, random_seed=1
        )
    assert not fit.status.ok and "theta" in fit.message
    assert all(f"'{name}'" in fit.message for name in clients)


def test_where_the_prior_decides_there_is_one_mode() -> None:
    """Far from 0 the mirror image has e^-160 of the mass."""
    found = factor(FederatedModel(squared, ["mu"]), {"a": {"y": np.array([81.0, 80.6])}}, np.array([9.0]))
    assert np.all(np.isfinite(found.values))


@pytest.mark.parametrize("problem", [problems.schools, problems.noise, problems.logistic, problems.counts])
def test_clients_with_one_mode_are_not_accused(problem: Any) -> None:
    model, clients = problem()
    for client_id, data in clients.items():
        prior = model.enrol({client_id: data})[client_id].layout.prior
        assert np.all(np.isfinite(factor(model, {client_id: data}, gaussian.mean(prior)).values))


def test_no_points_have_no_values() -> None:
    model, clients = problems.logistic()
    client = next(iter(model.enrol(clients).values()))
    compute = log_factors.factor
    found = compute(client, np.zeros((0, client.shared_size)), np.zeros(client.shared_size), 0.0)
    assert len(found.values) == len(found.errors) == 0


def test_long_tails_alone_are_no_second_mode(rng: np.random.Generator) -> None:
    model = FederatedModel(outlying, ["mu", "tau"])
    assert np.all(np.isfinite(factor(model, {"a": {"y": rng.normal(1, 1, 6)}}, np.array([1.0, -1.0])).values))


@pytest.mark.parametrize("rough", [0.0, 0.002])
def test_what_a_spline_misses_is_among_the_errors(rough: float) -> None:
    """A function with a ripple that the few points do not resolve: misses and errors are of one size."""
    rng = np.random.default_rng(5)
    points = rng.normal(size=(800, 2))
    true = 0.3 * np.tanh(points[:, 0]) * points[:, 1] + rough * np.sin(25 * points.sum(axis=1))
    few = np.arange(0, 800, 3)
    found = smooth_over(points, few, true[few], np.zeros(len(few)))
    rest = np.setdiff1d(np.arange(800), few)
    missed, told = (np.sqrt(np.mean(one[rest] ** 2)) for one in (found[0] - true, found[2]))
    assert 0.3 * missed < told < 10 * missed + 1e-6


def spiked(y: Any) -> pm.Model:
    """A prior of θ with a spike beside its bulk, within what a quadrature about the bulk reaches and cannot resolve."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 2)
        bulk, spike = pm.Normal.dist(mu, 1), pm.Normal.dist(4.0, 0.02)
        theta = pm.Mixture("theta", [0.5, 0.5], [bulk, spike])
        pm.Normal("obs", theta, 10, observed=pm.Data("y", y))
    return model


def test_a_narrow_mode_near_by_is_found_by_its_own_width() -> None:
    with pytest.raises(LocalFailure, match="more than one mode"):
        factor(FederatedModel(spiked, ["mu"]), {"a": {"y": np.array([1.0, 2.0])}}, np.array([0.0]))
