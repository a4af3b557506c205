"""What Laplace's approximation over the local variables leaves out: against quadrature, and what it does to a fit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.optimize import minimize
from scipy.special import expit, gammaln, log_expit, logsumexp
from scipy.stats import norm

import fedppl
from fedppl import FederatedModel, gaussian
from fedppl.local import _conditional, _marginal, log_factors
from fedppl.local.log_factors import is_separable, require_one_mode
from fedppl.types import Array, LocalFailure
from tests.support.markers import slow_but


def intercepts(y: Any) -> pm.Model:
    """A few binary rows and an intercept of the client's own."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu, tau = pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 2)
        pm.Bernoulli("obs", logit_p=pm.Normal("theta", mu, tau), observed=y)
    return model


def several(y: Any) -> pm.Model:
    """Binary rows in columns, each with an intercept of its own: one kernel whatever their number."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu, tau = pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 2)
        pm.Bernoulli("obs", logit_p=pm.Normal("theta", mu, tau, shape=y.shape[1]), observed=y)
    return model


def exact(phi: Array, successes: int, rows: int) -> Array:
    """log f at rows (mu, log tau), by the trapezium rule, which is exact to rounding for smooth densities."""
    u = np.linspace(-9, 9, 4001)
    theta = phi[:, :1] + np.exp(phi[:, 1:2]) * u
    terms = successes * np.log(expit(theta)) + (rows - successes) * np.log(expit(-theta)) + norm.logpdf(u)
    return np.asarray(logsumexp(terms, axis=1) + np.log(u[1] - u[0]))


def around(mean: list[float], sd: float, count: int = 20) -> Array:
    return np.array(mean) + sd * np.random.default_rng(0).normal(size=(count, 2))


@pytest.mark.parametrize("successes", [0, 1, 3])
def test_nine_nodes_leave_little_of_laplaces_error(successes: int) -> None:
    y = np.arange(3) < successes
    client = FederatedModel(intercepts, ["mu", "tau"]).enrol({"a": {"y": y.astype(int)}})["a"]
    phi = around([0.3, 0.5], 0.3)
    laplace = _marginal.values(client, phi, phi.mean(axis=0), 0.0)
    known = _marginal.difference(client, phi, phi.mean(axis=0))  # about the same point
    assert known is not None and known[1] == 1.0
    left = known[0]
    truth = exact(phi, successes, 3)
    error = laplace - truth
    assert np.ptp(error) > 0.01
    assert np.ptp(laplace + left - truth) < 0.05 * np.ptp(error)


# Random points, for five coordinates, leave some noise: independent of one another in clients, and little in a mean.
@pytest.mark.slow
@pytest.mark.parametrize(
    "size, noise",
    [pytest.param(2, 0.15, marks=pytest.mark.slow), pytest.param(3, 0.15, marks=pytest.mark.slow), (5, 0.4)],
)
def test_independent_coordinates_leave_the_sum_of_what_each_leaves(size: int, noise: float) -> None:
    y = np.random.default_rng(1).integers(0, 2, (3, size))
    one, all_ = FederatedModel(intercepts, ["mu", "tau"]), FederatedModel(several, ["mu", "tau"])
    clients = one.enrol({str(i): {"y": y[:, i]} for i in range(size)})
    phi = around([0.3, 0.2], 0.2)
    together, *parts = (
        _marginal.difference(client, phi, phi[0]) for client in (all_.enrol({"a": {"y": y}})["a"], *clients.values())
    )
    assert together is not None and together[1] == 1.0
    together, expected = together[0], np.sum([part[0] for part in parts if part is not None], axis=0)
    error = together - together.mean() - (expected - expected.mean())
    assert np.abs(error).max() < noise * np.ptp(expected)  # a constant moves no moment


def test_nothing_is_left_out_where_theta_is_gaussian() -> None:
    def normal(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            mu, tau = pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 2)
            pm.Normal("obs", pm.Normal("theta", mu, tau), 1.0, observed=y)
        return model

    client = FederatedModel(normal, ["mu", "tau"]).enrol({"a": {"y": np.array([0.3, 1.2])}})["a"]
    assert _conditional.is_gaussian(client)
    assert _conditional.left_out(client, np.zeros(2), np.eye(2)) == (None, 1.0)
    binary = FederatedModel(intercepts, ["mu", "tau"]).enrol({"a": {"y": np.array([0, 1])}})["a"]
    assert not _conditional.is_gaussian(binary)


def test_a_quadratic_difference_comes_back() -> None:
    """In units of q: linear terms, cross terms and squares, up to a constant."""
    root = np.array([[2.0, 0.0], [0.5, 0.3]])

    def difference(points: Array) -> tuple[Array, float]:
        z = (points - 1.0) @ np.linalg.inv(root).T
        return 3.0 + 0.2 * z[:, 0] - 0.1 * z[:, 0] * z[:, 1] + 0.05 * z[:, 1] ** 2, 1.0

    points = np.random.default_rng(2).normal(size=(10, 2))
    found, trust = _marginal.left_out(difference, np.ones(2), root, 0)
    assert found is not None and trust == 1.0
    assert_allclose(np.diff(found(points)), np.diff(difference(points)[0]), atol=1e-10)
    assert _marginal.left_out(lambda points: (np.ones(len(points)), 1.0), np.ones(2), root, 0) == (None, 1.0)
    assert _marginal.left_out(lambda points: None, np.ones(2), root, 0) == (None, 0.0)


def test_a_difference_that_is_even_about_q_is_not_taken_for_none() -> None:
    even = _marginal.left_out(lambda points: (0.5 * points[:, 0] ** 2, 1.0), np.zeros(2), np.eye(2), 0).difference
    assert even is not None
    assert_allclose(even(np.array([[1.0, 0.0], [-2.0, 3.0]])) - even(np.zeros((1, 2))), [0.5, 2.0], atol=1e-10)


def test_what_is_half_trusted_counts_by_half() -> None:
    """So that it comes and goes without a jump; where only the second look fails, the first stands."""

    def difference(points: Array) -> tuple[Array, float] | None:
        return (points[:, 0] + 0.0, 0.5) if len(points) == 6 else None

    found, trust = _marginal.left_out(difference, np.zeros(2), np.eye(2), 0)
    assert found is not None and trust == 0.5
    assert_allclose(found(np.array([[2.0, 1.0]])), [1.0])


@pytest.mark.parametrize(
    "size, least, beyond, trust",
    [
        (9, 0.05, 1.0, None),
        (9, 0.2, 1.0, 0.5),
        (9, 0.9, 1.0, 1.0),
        (2, 0.0, 0.4, 0.0),
        (2, 0.0, 0.225, 0.5),
        (2, 0.0, 0.1, 1.0),
    ],
)
def test_trust_follows_what_weights_have_left_or_what_lies_at_the_edge(
    size: int, least: float, beyond: float, trust: float | None
) -> None:
    relative, shares = np.array([0.9, least]), np.array([[0.99, 0.01], [1 - beyond, beyond]])
    known = _marginal.trusted(np.ones(2), relative, shares, size)
    assert known is None if trust is None else known is not None and known[1] == pytest.approx(trust)


def test_a_prior_that_pins_theta_is_no_proof_of_a_gaussian() -> None:
    """Under Gamma(.1, .1) the prior mean of log tau is −10, where θ is all but fixed."""

    def pinned(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            mu, tau = pm.Normal("mu", 0, 2), pm.Gamma("tau", 0.1, 0.1)
            pm.Bernoulli("obs", logit_p=pm.Normal("theta", mu, tau), observed=y)
        return model

    client = FederatedModel(pinned, ["mu", "tau"]).enrol({"a": {"y": np.array([0, 1, 1])}})["a"]
    assert not _conditional.is_gaussian(client)


def test_a_fit_says_whose_integrals_are_not_known() -> None:
    """Thirty local coordinates of two equal binary rows each: importance weights have nothing left."""
    rng = np.random.default_rng(3)
    clients = {str(k): {"y": np.repeat(rng.integers(0, 2, (1, 30)), 2, axis=0)} for k in range(3)}
    model = FederatedModel(several, ["mu", "tau"])
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=0)
    assert {info["inner_trust"] < 1.0 for info in fit.records[-1].infos.values()} == {True}
    assert "local=fedppl.local.NUTS()" in fit.message
    fewer = {name: {"y": data["y"][:, :10]} for name, data in clients.items()}
    fit = fedppl.fit(FederatedModel(several, ["mu", "tau"]), fewer, fedppl.Sums(), progressbar=False, random_seed=0)
    assert fit.status.ok and fit.message == ""  # independent given what is shared, so that each is integrated alone


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_small_errors_of_many_clients_do_not_add_up(seed: int) -> None:
    """Sixty clients of two to four binary rows, against quadrature over θ and both shared variables.

    Laplace alone moved log tau by .47 and .54 of its sd.
    """
    rng = np.random.default_rng(seed)
    clients = {}
    for k in range(60):
        rows = int(rng.integers(2, 5))
        clients[str(k)] = {"y": (rng.normal(0, 2.5) + rng.logistic(size=rows) > 0).astype(int)}
    model = FederatedModel(intercepts, ["mu", "tau"])
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=0)
    assert fit.status.ok
    q_mean, q_sd = gaussian.mean(fit.posterior), gaussian.standard_deviations(fit.posterior)
    axes = [m + s * np.linspace(-7, 7, 57) for m, s in zip(q_mean, q_sd, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    tau = np.exp(grid[:, 1])
    log_density = norm.logpdf(grid[:, 0], 0, 2) - 0.5 * (tau / 2) ** 2 + grid[:, 1]
    kinds = {(int(d["y"].sum()), len(d["y"])) for d in clients.values()}
    for successes, rows in kinds:
        count = sum((int(d["y"].sum()), len(d["y"])) == (successes, rows) for d in clients.values())
        log_density += count * exact(grid, successes, rows)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ grid
    sd = np.sqrt(weights @ (grid - mean) ** 2)
    assert np.abs((q_mean - mean) / sd).max() < 0.1
    assert np.abs(q_sd / sd - 1).max() < 0.1


@pytest.mark.parametrize("size", [1, 4])
def test_independent_coordinates_are_integrated_alone_and_exactly(size: int) -> None:
    """Two binary rows of each local coordinate, near and far, against quadrature."""
    client = FederatedModel(several, ["mu", "tau"]).enrol({"a": {"y": np.tile([[0], [1]], (1, size))}})["a"]
    points = np.array([[0.0, 0.0], [1.0, -2.0], [-2.0, 1.5], [0.5, 2.5]])
    found = log_factors.factor
    values, errors, _ = found(client, points, np.zeros(2), 0.0)
    assert_allclose(values, size * exact(points, 1, 2), rtol=1e-5)
    assert_allclose(errors, 0.0, atol=1e-3)


def coupled(share: float) -> Any:
    """Two local coordinates of which the second has a share in the likelihood."""

    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            theta = pm.Normal("theta", pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 2), shape=2)
            pm.Bernoulli("obs", logit_p=theta[0] + share * theta[1], observed=y)
        return model

    return builder


def of_one(builder: Any, y: Any) -> Any:
    return FederatedModel(builder, ["mu", "tau"]).enrol({"a": {"y": y}})["a"]


def test_coordinates_that_depend_on_each_other_are_not_separable() -> None:
    """By the likelihood alone; and where they do not, they are."""
    assert not of_one(coupled(0.01), np.array([0, 1, 1])).view(is_separable)
    assert of_one(several, np.tile([[0], [1]], (1, 3))).view(is_separable)


@pytest.mark.parametrize("count", [100, 300, 3000])
def test_however_many_points_there_are_log_factors_are_those_of_quadrature(count: int) -> None:
    """The sum of two normals is normal: one integral. A constant of all points moves nothing."""
    y = np.array([0, 1, 1, 1])
    rng = np.random.default_rng(2)
    points = np.stack([rng.standard_t(5, size=count), rng.standard_t(5, size=count) * 0.7 - 0.3], axis=1)
    found = log_factors.factor
    values, errors, _ = found(of_one(coupled(0.8), y), points, np.zeros(2), 0.0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(81)
    level = 1.8 * points[:, 0, None] + np.exp(points[:, 1, None]) * np.sqrt(1.64) * nodes
    logs = 3 * log_expit(level) + log_expit(-level) + np.log(weights / weights.sum())
    missed = values - logsumexp(logs, axis=1)
    missed -= np.median(missed)
    assert np.quantile(np.abs(missed), 0.9) < 0.02 and np.median(np.abs(missed)) < 0.002
    assert np.all(np.isfinite(errors))


@pytest.mark.slow
def test_many_coordinates_that_depend_on_each_other_are_integrated_with_as_many_nodes_as_it_takes() -> None:
    """A level and an effect of each of fifteen counts: given the level, one integral for each count."""

    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            level = pm.Normal("level", pm.Normal("mu", 0, 1), 0.5)
            effect = pm.Normal("effect", 0, pm.HalfNormal("tau", 1), shape=y.shape)
            pm.Poisson("obs", pm.math.exp(level + effect), observed=y)
        return model

    y = np.array([2, 4, 5, 2, 5, 2, 4, 6, 2, 5, 4, 6, 1, 6, 2])
    rng = np.random.default_rng(4)
    points = np.stack([1.1 + 0.25 * rng.normal(size=150), -0.55 + 0.2 * rng.normal(size=150)], axis=1)
    found = log_factors.factor
    values, errors, _ = found(of_one(builder, y), points, np.array([1.1, -0.55]), 0.0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(61)
    logs = np.log(weights / weights.sum())
    level = points[:, 0, None] + 0.5 * nodes  # (S, level)
    rate = level[:, :, None] + np.exp(points[:, 1, None, None]) * nodes  # (S, level, effect)
    of_rows = [logsumexp(n * rate - np.exp(rate) - gammaln(n + 1) + logs, axis=2) for n in y]
    missed = values - logsumexp(sum(of_rows) + logs, axis=1)
    # along log tau, in log units a unit; of few nodes it was -0.083, with an error of 0.0008
    assert abs(np.polyfit(points[:, 1], missed - np.median(missed), 1)[0]) < 0.03
    assert abs(np.polyfit(points[:, 1], errors, 1)[0]) > 0.003


@pytest.mark.parametrize("unit", [1.0, 1e4])
def test_thousands_and_logarithms_stand_side_by_side(unit: float) -> None:
    """Far from where a search begins, the curvature of a level and the logarithm of an sd has a negative direction."""
    y = unit * (4.9 + np.random.default_rng(1).normal(size=60))

    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            level = pm.Normal("level", pm.Normal("mu", 2 * unit, 2 * unit), 0.6 * unit)
            log_sd = pm.Normal("log_sd", np.log(0.8 * unit), 0.27)
            pm.Normal("obs", level, pm.math.exp(log_sd), observed=y)
        return model

    client = FederatedModel(builder, ["mu"]).enrol({"a": {"y": y}})["a"]
    log_factors, modes, _ = _marginal.near(client, np.array([[2.0 * unit]]), np.array([2.0 * unit]))

    def against(x: Any) -> float:
        level, log_sd = x[0] * unit, x[1] + np.log(unit)
        rows = norm.logpdf(y, level, np.exp(log_sd)).sum()
        return -float(rows + norm.logpdf(x[0], 2, 0.6) + norm.logpdf(x[1], np.log(0.8), 0.27))

    found = minimize(against, [2.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-9})
    assert np.isfinite(log_factors[0])
    assert_allclose([modes[0, 0] / unit, modes[0, 1] - np.log(unit)], found.x, atol=1e-5)


def contaminated(X: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        w = pm.Beta("w", 1, 3)
        mu = X @ pm.Normal("beta", 0, 1.5, shape=6)
        kinds = [pm.Normal.dist(mu, 1), pm.Normal.dist(mu, 10)]
        pm.Mixture("obs", w=pm.math.stack([1 - w, w]), comp_dists=kinds, observed=y)
    return model


@pytest.mark.parametrize("seed", slow_but([4, 6, 12]))
def test_shoulders_beside_the_mode_are_integrated_within_what_is_told(seed: int) -> None:
    """Six coefficients of a regression with outliers: exactly, a sum over which rows are.

    From t's that were fitted once log f_k was too small, at every such client alike.
    """
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(10), rng.normal(size=(10, 5))])
    y = X @ rng.normal(size=6) * 1.5 + rng.normal(size=10) * np.where(rng.random(10) < 0.2, 10.0, 1.0)
    (client,) = FederatedModel(contaminated, ["w"]).enrol({"a": {"X": X, "y": y}}).values()
    points = np.linspace(-3, -0.5, 9)
    w = 1 / (1 + np.exp(-points))
    outliers = np.array(list(itertools.product([0, 1], repeat=10)))
    logs = [
        stats.multivariate_normal(np.zeros(10), np.diag(np.where(one, 100.0, 1.0)) + 2.25 * X @ X.T).logpdf(y)
        for one in outliers
    ]
    count = outliers.sum(axis=1)
    exact = logsumexp(np.array(logs) + count * np.log(w[:, None]) + (10 - count) * np.log1p(-w[:, None]), axis=1)
    compute = log_factors.factor
    found = compute(client, points[:, None], points[4:5], 0.0)
    wrong = found.values - exact
    told = np.hypot(found.constant.alike, found.constant.by_chance) + np.abs(found.errors)
    assert np.all(np.abs(wrong) < 0.003 + 3 * told) and np.max(np.abs(wrong)) < 0.03


HUMPS = [
    (10, 0.3),
    (7.3, 0.3),
    (-3, 0.1),
    *(pytest.param(*hump, marks=pytest.mark.slow) for hump in [(-6, 0.5), (12, 0.1)]),
]


@pytest.mark.parametrize(("place", "width"), HUMPS)
def test_a_second_hump_of_a_prior_is_no_gaussian(place: float, width: float) -> None:
    """Wherever it stands: points at a few distances do not see it."""
    client = enrolled_alone(functools.partial(hump, place=place, width=width), y=np.array([3.5]))
    assert not client.view(_conditional.is_gaussian)


def test_a_second_hump_of_a_prior_is_another_mode() -> None:
    """Of a density that would be taken for a Gaussian's too: the search comes in any case."""
    with pytest.raises(LocalFailure, match="more than one mode"):
        require_one_mode(enrolled_alone(hump, y=np.array([3.5])), np.zeros((1, 1)))


def hump(y: Any, place: float = 7.0, width: float = 0.5) -> pm.Model:
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 3)
        th = pm.NormalMixture("th", [0.7, 0.3], pt.stack([mu, mu + place]), [1.0, width])
        pm.Normal("obs", th, 5.0, observed=y)
    return model


def test_a_gaussian_with_an_edge_is_no_gaussian() -> None:
    """The edge of a rate that a likelihood has by its domain."""

    def build(y: Any) -> pm.Model:
        with pm.Model() as model:
            y, mu = pm.Data("y", y), pm.Normal("mu", 1, 1)
            pm.Poisson("obs", np.e * pm.Normal("th", mu, 1.5), observed=y)
        return model

    assert not enrolled_alone(build, y=np.zeros(3, dtype=int)).view(_conditional.is_gaussian)


def enrolled_alone(build: Any, **data: Any) -> Any:
    return FederatedModel(build, ["mu"]).enrol({"a": data})["a"]
