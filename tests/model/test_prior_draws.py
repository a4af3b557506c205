"""Draws of the shared prior: all at once, they are what PyMC draws one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from fedppl import gaussian
from fedppl.model import client, interpreted
from fedppl.model.graph import Parts
from tests.support import problems
from tests.support.markers import slow_but

_COUNT = 2000


def _plain():
    pm.Normal("a", 0, 1, shape=4)
    pm.HalfCauchy("b", 2)
    pm.Gamma("c", 2, 1, shape=3)
    pm.Uniform("d", -2, 3)
    pm.Bernoulli("e", 0.3, shape=2)
    pm.MvNormal("f", np.zeros(3), 2 * np.eye(3))


def _one_on_the_other():
    slope = pm.Normal("slope", 0, 1, shape=2)
    pm.Normal("intercept", 3 - pm.math.sum(slope), 2)
    pm.Uniform("between", slope[0] - 1, slope[0] + 1)


def _of_many_parts():
    pm.LKJCholeskyCov("L", n=3, eta=2, sd_dist=pm.HalfNormal.dist(1, shape=3))
    pm.LKJCorr("C", n=3, eta=2)
    pm.NormalMixture("mixed", [0.3, 0.7], [0, 4], [1, 2])
    pm.GaussianRandomWalk("walk", 0, 0.1, init_dist=pm.Normal.dist(0, 1), steps=3)
    pm.ZeroSumNormal("balanced", 1, shape=4)
    pm.TruncatedNormal("cut", 0, 1, lower=0)


def _sized_by_hand():
    tau = pm.HalfNormal("tau", 1)
    pm.Normal("beta", 0, tau, shape=3)


def _ones_own():
    pm.CustomDist("own", 0.0, logp=lambda v, m: -((v - m) ** 2), random=lambda m, rng=None, size=None: rng.normal(m, 1))


def _built(declare):
    with pm.Model() as model:
        declare()
    values = []
    for rv in model.free_RVs:
        transform = model.rvs_to_transforms[rv]
        values.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
    return tuple(model.free_RVs), values


@pytest.mark.parametrize("declare", slow_but([_plain, _one_on_the_other, _of_many_parts], _plain, _one_on_the_other))
def test_draws_at_once_are_spread_as_those_one_by_one(declare):
    rvs, values = _built(declare)
    at_once = client._at_once(values, rvs, _COUNT, 1)
    assert at_once is not None
    one_by_one = pm.draw(values, draws=_COUNT, random_seed=2, mode=interpreted.PYTHON_MODE)
    ours, theirs = (np.concatenate([np.reshape(v, (_COUNT, -1)) for v in d], axis=1) for d in (at_once, one_by_one))
    assert ours.shape == theirs.shape
    p = [stats.ks_2samp(a, b).pvalue for a, b in zip(ours.T, theirs.T, strict=True)]
    assert min(p) * len(p) > 0.01
    ranks = [stats.rankdata(d, axis=0) / _COUNT for d in (ours, theirs)]
    apart = np.abs(np.corrcoef(ranks[0].T) - np.corrcoef(ranks[1].T))  # how variables hang together too
    assert apart.max() < 5 * np.sqrt(2 / _COUNT)


def test_plain_variables_are_drawn_to_the_bit_as_pymc_does():
    rvs, values = _built(_plain)
    at_once = client._at_once(values, rvs, _COUNT, 3)
    one_by_one = pm.draw(values, draws=_COUNT, random_seed=3, mode=interpreted.PYTHON_MODE)
    assert all(np.array_equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))


@pytest.mark.parametrize("declare", [_sized_by_hand, _ones_own])
def test_what_cannot_be_drawn_at_once_is_not(declare):
    rvs, values = _built(declare)
    assert client._at_once(values, rvs, _COUNT, 1) is None


@pytest.mark.parametrize("problem", [problems.schools, problems.noise, problems.transforms, problems.lasso])
def test_a_priors_density_is_one_at_few_points_and_at_many(problem: Any) -> None:
    """Few points go through the graph as it was written, many through PyTensor's rewrites."""
    model, clients = problem()
    prior = next(iter(model.enrol(clients, kernel=False).values())).prior
    points = gaussian.mean(prior.gaussian) + 3.0 * np.random.default_rng(2).normal(
        size=(200, len(prior.gaussian.linear))
    )
    few = np.concatenate([prior.log_density(points[i : i + 10]) for i in range(0, 200, 10)])
    assert_allclose(few, prior.log_density(points), rtol=1e-10, atol=1e-10)


def test_ordered_entries_of_one_distribution_are_all_drawn() -> None:
    """Their draws are order statistics: of as many as one likes, where only 1 in 8! draws happens to be in order."""
    with pm.Model() as model:
        pm.Normal("a", 0, 2.5, shape=8, transform=pm.distributions.transforms.ordered, initval=np.arange(8.0))
        spread = pm.HalfNormal("spread", 1)
        pm.Normal("b", 1, spread, shape=2, transform=pm.distributions.transforms.ordered, initval=np.arange(2.0))
    rvs = tuple(model.free_RVs)
    found = client.unconstrained(Parts(model, rvs, (), (), rvs, ()), 4000, 1)
    assert len(found) == 4000
    first = stats.norm(0, 2.5).ppf(stats.beta(1, 8).ppf((np.arange(4000) + 0.5) / 4000))  # the lowest of eight
    assert_allclose(found[:, 0].mean(), first.mean(), atol=5 * first.std() / np.sqrt(4000))
    assert_allclose(found[:, 0].std(), first.std(), rtol=5 / np.sqrt(2 * 4000))


def test_an_ordered_vector_that_others_depend_on_is_drawn_with_them() -> None:
    """What is near its first entry is near the lowest one, and not near the first that was drawn."""
    with pm.Model() as model:
        a = pm.Normal("a", 0, 1, shape=2, transform=pm.distributions.transforms.ordered, initval=np.arange(2.0))
        pm.Normal("b", a[0], 1e-3)
    rvs = tuple(model.free_RVs)
    found = client.unconstrained(Parts(model, rvs, (), (), rvs, ()), 4000, 1)
    assert_allclose(found[:, 2], found[:, 0], atol=0.01)


def test_few_draws_of_many_numbers_are_given() -> None:
    """They were taken for too few to take moments of, which nobody does here."""
    with pm.Model() as model:
        rv = pm.HalfNormal("tau", 1, shape=5)
    parts = Parts(model, (rv,), (), (), (rv,), ())
    assert client.unconstrained(parts, 3, 1).shape == (3, 5)
