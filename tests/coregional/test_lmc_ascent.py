"""Federated coordinate ascent for FedLMC-SS: each update is a maximum, the whole is the central fit; what sums hide."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import norm

import fedppl
from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, sum_replies
from fedppl.coregional.algorithms.ascent import AscentState, Climbing, Collecting
from fedppl.coregional.algorithms.ending import Left, Rest, report
from fedppl.coregional.bound import (
    Design,
    Globals,
    Roles,
    UnitClientState,
    best_slab,
    bound_of_sums,
    inducing,
    joint_covariance,
    rescale,
    selection,
    selection_terms,
    size_factor,
    unit_bound,
)
from fedppl.coregional.unit import best_unit, statistics
from fedppl.coregional.view import unit_of
from fedppl.numerics.streams import stream
from fedppl.types import DataError, DeclarationError, LocalFailure
from tests.coregional.test_lmc_bound import (
    GRID,
    LATENTS,
    NOISE_PRIOR,
    POINTS,
    RANDOM,
    Parameters,
    dense_bound,
    dense_matrices,
    difference,
    shares,
    units,
)
from tests.support import problems
from tests.support.states import updated


class Played(NamedTuple):
    """The state before any round and after each, what the units keep, and what they replied."""

    states: list[Any]
    personal: list[dict[str, UnitClientState]]
    replies: list[dict[str, Any]]


def play(algorithm: AnyAlgorithm, clients: Any, rounds: int, seed: int = 1) -> Played:
    """Rounds by hand, all units in each."""
    models = problems.coregional()[0].enrol(clients)
    layout, ids = next(iter(models.values())).layout, tuple(models)
    played = Played([algorithm.init(layout, ids, stream((seed,)))], [{}], [{}])
    for number in range(1, rounds + 1):
        personal, replies = {}, {}
        for k, client_id in enumerate(ids):
            personal[client_id], replies[client_id], _ = algorithm.update_client(
                models[client_id],
                played.personal[-1].get(client_id),
                algorithm.broadcast(played.states[-1], client_id),
                stream((seed, number, k)),
            )
        played.states.append(updated(algorithm, played.states[-1], replies)[0])
        played.personal.append(personal)
        played.replies.append(replies)
    return played


def views_of(clients: Any) -> list[Any]:
    return [client.view(unit_of) for client in problems.coregional()[0].enrol(clients).values()]


def total_bound(views: Sequence[Any], shared: Globals, own: Sequence[UnitClientState] | None, log_odds: Any) -> float:
    """Σ V_m; with the best that each unit has, where `own` is None."""
    designs = [view.design(shared.kernel) for view in views]
    rows = sum(len(view.response) for view in views)
    own = own or [best_unit(d, shared, v.noise, v.noise.mean)[0] for d, v in zip(designs, views, strict=True)]
    return sum(
        unit_bound(design, shared, one, view.noise, log_odds, len(view.response) / rows)
        for design, view, one in zip(designs, views, own, strict=True)
    )


def totals_of(at: Parameters) -> dict[str, Any]:
    """Sums of statistics of the small units, as the server has them."""
    totals: dict[str, Any] = {}
    for client, own in zip(units().values(), at.units, strict=True):
        view = client.view(unit_of)
        for key, value in statistics(view.design(at.shared.kernel), own, view.noise).items():
            totals[key] = totals.get(key, 0.0) + value
    return totals


ROLES: Callable[[], Roles] = lambda: next(iter(units().values())).view(unit_of).roles  # noqa: E731
AT = {"random": RANDOM, "little noise": RANDOM._replace(units=[u._replace(log_noise_sd=-1.0) for u in RANDOM.units])}
every_point = pytest.mark.parametrize("name", AT)


def bound_at(totals: Any, shared: Globals) -> float:
    return bound_of_sums(totals, shared, ROLES().log_odds)


def assert_highest(value: Callable[[Any], float], at: Any, step: float = 1e-3) -> None:
    """No lower along any coordinate, and flat there: the slope is small beside the curvature."""
    best = value(at)
    for e in step * np.eye(len(at)):
        up, down = value(at + e), value(at - e)
        assert up <= best + 1e-9 and down <= best + 1e-9
        assert abs(up - down) < 0.05 * abs(2 * best - up - down) + 1e-9


# --- each update is the bound's own maximum -----------------------------------------------------------------------


@every_point
def test_the_selection_is_at_the_bounds_maximum(name: str) -> None:
    at, totals = AT[name], totals_of(AT[name])
    # Far from 0 and 1, where the bound's slope could be seen: few rows count.
    weak = {key: value * (1.0 if key == "units" else 0.1) for key, value in totals.items()}
    for sums in (totals, weak):
        terms = selection_terms(sums, at.shared)
        gamma = selection(*terms, at.shared.inclusion, ROLES().log_odds)
        assert bound_at(sums, at.shared._replace(inclusion=gamma)) >= bound_at(sums, at.shared)
        one = selection(*terms, at.shared.inclusion, ROLES().log_odds, sweeps=1)
        assert bound_at(sums, at.shared._replace(inclusion=one)) >= bound_at(sums, at.shared)
    odds = logit(np.clip(gamma, 1e-12, 1 - 1e-12))
    assert_highest(lambda z: bound_at(weak, at.shared._replace(inclusion=expit(z))), odds)


@every_point
def test_the_inducing_variables_are_at_the_bounds_maximum(name: str) -> None:
    at, totals = AT[name], totals_of(AT[name])
    mean, covariance = inducing(totals, at.shared.inclusion)
    best = at.shared._replace(mean=mean, covariance=covariance)
    assert bound_at(totals, best) > bound_at(totals, at.shared)
    shape = (LATENTS, POINTS)
    assert_highest(lambda z: bound_at(totals, best._replace(mean=z.reshape(shape))), mean.ravel())
    root = np.linalg.cholesky(covariance)

    def widened(z: Any) -> float:
        wide = root * np.exp(z.reshape(shape))[:, None, :]
        return bound_at(totals, best._replace(covariance=wide @ np.swapaxes(wide, 1, 2)))

    assert_highest(widened, np.zeros(LATENTS * POINTS))


@every_point
def test_the_covariance_across_latent_functions_is_that_of_the_means(name: str) -> None:
    """The bound is quadratic in the means: minus the inverse of its curvature, by differences that are exact."""
    at, totals = AT[name], totals_of(AT[name])
    size = LATENTS * POINTS
    e = np.eye(size)

    def value(z: Any) -> float:
        return bound_at(totals, at.shared._replace(mean=z.reshape(LATENTS, POINTS)))

    alone, zero = [value(one) for one in e], value(np.zeros(size))
    curvature = np.array([[value(e[i] + e[j]) - alone[i] - alone[j] + zero for j in range(size)] for i in range(size)])
    joint = joint_covariance(totals, at.shared.inclusion)
    assert_allclose(joint @ -curvature, np.eye(size), atol=1e-6)
    # The mean field's own is narrower.
    own = np.einsum("lqlp->lqp", joint.reshape(LATENTS, POINTS, LATENTS, POINTS))
    assert np.all(np.linalg.eigvalsh(own - inducing(totals, at.shared.inclusion)[1]) > -1e-12)


@every_point
def test_the_slab_is_at_the_maximum_of_the_bound_with_its_prior(name: str) -> None:
    at, totals, prior = AT[name], totals_of(AT[name]), ROLES().slab_prior
    best = best_slab(totals, at.shared.inclusion, prior)

    def value(z: Any) -> float:
        return bound_at(totals, at.shared._replace(log_slab_sd=float(z[0]))) + prior.log_density(float(z[0]))

    assert value([best]) > value([at.shared.log_slab_sd])
    assert_highest(value, np.array([best]))


@every_point
def test_sizes_are_traded_for_the_best_bound(name: str) -> None:
    """v by c and every w by 1 / c: at the units' own parameters, not only in the sums, no other c is better."""
    at, views = AT[name], [client.view(unit_of) for client in units().values()]

    def sized(factor: Any) -> Parameters:
        shared = at.shared._replace(
            mean=at.shared.mean * factor[:, None], covariance=at.shared.covariance * factor[:, None, None] ** 2
        )
        own = [u._replace(mean=u.mean / factor, variance=u.variance / factor**2) for u in at.units]
        return Parameters(shared, own)

    def value(log_factor: Any) -> float:
        there = sized(np.exp(log_factor))
        return sum(
            unit_bound(v.design(at.shared.kernel), there.shared, own, v.noise, v.roles.log_odds, share)
            for v, own, share in zip(views, there.units, shares(), strict=True)
        )

    totals = totals_of(at)
    factor = size_factor(totals, at.shared)
    changed, shared = rescale(totals, at.shared)
    assert np.max(np.abs(np.log(factor))) > 0.05
    assert_highest(value, np.log(factor))
    assert_allclose(bound_at(changed, shared), value(np.log(factor)), rtol=1e-10)
    for key, sums in totals_of(sized(factor)).items():
        assert_allclose(changed[key], sums, rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("gamma", [None, [0.0, 1.0, 0.5]])
def test_a_units_own_parameters_are_at_its_bounds_maximum(gamma: list[float] | None) -> None:
    """Coefficients, their variances and the noise; no sweep lowers the bound."""
    shared = RANDOM.shared if gamma is None else RANDOM.shared._replace(inclusion=np.array(gamma))
    for client, start in zip(units().values(), RANDOM.units, strict=True):
        view = client.view(unit_of)
        design = view.design(shared.kernel)

        def value(x: Any, design: Design = design, view: Any = view) -> float:
            own = UnitClientState(x[:LATENTS], np.exp(x[LATENTS:-1]), float(x[-1]))
            return unit_bound(design, shared, own, view.noise, view.roles.log_odds, 0.3)

        flat = [np.concatenate([u.mean, np.log(u.variance), [u.log_noise_sd]]) for u in [start]]
        for sweeps in (1, 2, 3, 200):
            own, _ = best_unit(design, shared, view.noise, start.log_noise_sd, sweeps)
            flat.append(np.concatenate([own.mean, np.log(own.variance), [own.log_noise_sd]]))
        path = [value(x) for x in flat]
        assert np.all(np.diff(path) > -1e-9)
        assert path[-1] > path[0] + 0.1
        assert_highest(value, flat[-1])


def test_rows_that_are_none_add_nothing() -> None:
    """A unit without rows goes back to the prior, and its statistics of v are zero."""
    view, shared = units()["5 rows"].view(unit_of), RANDOM.shared
    design = Design(np.zeros((LATENTS, 0, POINTS)), np.zeros((LATENTS, 0)), np.zeros(0), 1.0)
    own, _ = best_unit(design, shared, view.noise, 0.7)
    assert_allclose(own.mean, 0.0)
    assert_allclose(own.variance, np.exp(2 * shared.log_slab_sd))
    assert_allclose(own.log_noise_sd, view.noise.mean)
    reply = statistics(design, own, view.noise)
    assert all(np.all(reply[key] == 0.0) for key in ("precision", "linear", "penalty"))
    mode = view.noise.log_density(view.noise.mean)
    assert_allclose(unit_bound(design, shared, own, view.noise, view.roles.log_odds, 0.0), mode)
    totals = totals_of(RANDOM)
    more = {key: totals[key] + reply[key] for key in totals}
    assert_allclose(bound_at(more, shared), bound_at(totals, shared) + mode, rtol=1e-12)


# --- the ascent ---------------------------------------------------------------------------------------------------

WARMUP = 5


def phases(states: list[Any]) -> list[tuple[Any, list[tuple[int, Any]]]]:
    """Log odds and numbered states before and after the selection begins: what is maximised differs by its divergence.

    Where the kernels start from the prior, the first round is one of statistics already.
    """
    running = list(enumerate(states))[1:]
    return [(np.full(LATENTS, np.inf), running[:WARMUP]), (ROLES().log_odds, running[WARMUP:])]


def rest_of(state: AscentState) -> Rest | None:
    """Its end phase, once it is in it."""
    path = state.phase.path if isinstance(state.phase, Climbing) else None
    return path if isinstance(path, Rest) else None


@pytest.mark.parametrize("seed", [0, 6, 19])
@pytest.mark.slow
def test_no_round_lowers_the_bound_while_the_kernels_are_fixed(seed: int) -> None:
    """With the prior of σ_w, which is estimated: at the server after each round, and at the units in between."""
    clients, prior = noisy(seed), ROLES().slab_prior
    views = views_of(clients)
    played = play(fedppl.curves.Ascent(kernel_rate=0, warmup=WARMUP, initial_kernel="prior"), clients, 30, seed)
    for log_odds, states in phases(played.states):
        path: list[float] = []
        for number, state in states:
            rest, before = rest_of(played.states[number - 1]), played.states[number - 1].shared
            if path and (
                rest is None or rest.cycle.trial is None
            ):  # else units answer a trial, which may be taken back
                own = list(played.personal[number].values())
                path.append(total_bound(views, before, own, log_odds) + prior.log_density(before.log_slab_sd))
            value = bound_of_sums(state.phase.totals, state.shared, log_odds)
            path.append(value + prior.log_density(state.shared.log_slab_sd))
        assert path[-1] > path[0]
        assert np.min(np.diff(path)) > -1e-9


@pytest.mark.parametrize("seed", [0, 6, 19])
def test_the_bound_that_is_reported_does_not_fall(seed: int) -> None:
    """As the docstring has it, in each phase."""
    algorithm = fedppl.curves.Ascent(kernel_rate=0, warmup=WARMUP, initial_kernel="prior")
    for _, states in phases(play(algorithm, noisy(seed), 30, seed).states):
        assert np.min(np.diff([state.bound for _, state in states])) > -1e-9


def noisy(seed: int) -> dict[str, Any]:
    """A few rows with much noise, where the prior of σ_w matters."""
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(int(rng.integers(2, 5))):
        x = rng.uniform(-0.3, 1.3, size=int(rng.integers(2, 15)))
        y = rng.normal() * np.sin(6 * x) + rng.normal() * np.cos(9 * x)
        data[f"u{k}"] = {"X": x, "y": y + rng.choice([0.01, 0.1, 1.0]) * rng.normal(size=len(x))}
    return data


def log_scale(square: float, count: float, prior: Any) -> float:
    """Where −count log σ − square / 2σ² + log p(log σ) is highest."""
    mean, variance = prior.mean(), prior.var()
    return float(brentq(lambda z: square * np.exp(-2 * z) - count - (z - mean) / variance, -20, 20, xtol=1e-13))


class Central:
    """The same updates in one place, on all rows at once: no statistics, no messages; every update from the bound."""

    def __init__(self, clients: Any, own: Sequence[UnitClientState], kernel: Any) -> None:
        self.clients = clients
        self.y = np.concatenate([data["y"] for data in clients.values()])
        self.unit = np.repeat(np.arange(len(clients)), [len(data["y"]) for data in clients.values()])
        self.x = np.concatenate([data["X"] for data in clients.values()])
        self.mu, self.tau2 = np.array([u.mean for u in own]), np.array([u.variance for u in own])
        self.log_noise = np.array([u.log_noise_sd for u in own])
        self.m, self.S = np.zeros((LATENTS, POINTS)), np.stack([np.eye(POINTS)] * LATENTS)
        self.gamma, self.kernel, self.log_slab = np.ones(LATENTS), np.array(kernel), 0.0
        self.moments, self.steps = np.zeros((2, LATENTS)), 0

    def fit_to_rows(self, gamma: Any, kernel: Any) -> float:
        """E log p(y | f)."""
        B, k = dense_matrices(self.x, GRID, kernel)
        a = np.einsum("lnq,lq->ln", B, self.m)
        s = k + np.einsum("lnq,lqp,lnp->ln", B, self.S, B)
        mu, second = self.mu[self.unit].T, (self.mu**2 + self.tau2)[self.unit].T
        first = np.sum(gamma[:, None] * mu * a, axis=0)
        spread = np.sum(gamma[:, None] * second * (a**2 + s) - (gamma[:, None] * mu * a) ** 2, axis=0)
        log_noise = self.log_noise[self.unit]
        square = (self.y - first) ** 2 + spread
        return float(np.sum(-0.5 * np.log(2 * np.pi) - log_noise - 0.5 * np.exp(-2 * log_noise) * square))

    def units_step(self) -> None:
        """Coefficients and noise in turn, of all units."""
        B, k = dense_matrices(self.x, GRID, self.kernel)
        a = np.einsum("lnq,lq->ln", B, self.m)
        s = k + np.einsum("lnq,lqp,lnp->ln", B, self.S, B)
        for unit in range(len(self.clients)):
            rows = self.unit == unit
            for _ in range(20):
                rate, before = np.exp(-2 * self.log_noise[unit]), self.log_noise[unit]
                own = rate * np.sum(a[:, rows] ** 2 + s[:, rows], axis=1) + np.exp(-2 * self.log_slab)
                cross = rate * a[:, rows] @ a[:, rows].T * self.gamma
                np.fill_diagonal(cross, own)
                self.mu[unit] = np.linalg.solve(cross, rate * a[:, rows] @ self.y[rows])
                self.tau2[unit] = 1 / own
                weight, second = self.gamma * self.mu[unit], self.gamma * (self.mu[unit] ** 2 + self.tau2[unit])
                error = self.y[rows] - weight @ a[:, rows]
                left = second @ (a[:, rows] ** 2 + s[:, rows]) - weight**2 @ a[:, rows] ** 2
                square, count = np.sum(error**2 + left), rows.sum()
                self.log_noise[unit] = log_scale(square, count, NOISE_PRIOR)
                if abs(self.log_noise[unit] - before) < 1e-6:
                    break

    def shared_step(self, *, select: bool) -> None:
        for _ in range(3):
            if select:
                self.select()
            B, _ = dense_matrices(self.x, GRID, self.kernel)
            rate = np.exp(-2 * self.log_noise)[self.unit]
            wide = np.einsum("l,nl,lnq->nlq", self.gamma, self.mu[self.unit], B).reshape(len(self.y), -1)
            system = wide.T @ (rate[:, None] * wide) + np.eye(wide.shape[1])
            blocks = system.reshape(LATENTS, POINTS, LATENTS, POINTS)
            for j in range(LATENTS):
                second = (self.mu**2 + self.tau2)[self.unit, j]
                blocks[j, :, j, :] = B[j].T @ ((self.gamma[j] * rate * second)[:, None] * B[j]) + np.eye(POINTS)
                self.S[j] = np.linalg.inv(blocks[j, :, j, :])
            self.m = np.linalg.solve(system, wide.T @ (rate * self.y)).reshape(LATENTS, POINTS)
            self.trade_sizes()
            second = float(self.gamma @ np.sum(self.mu**2 + self.tau2, axis=0))
            self.log_slab = log_scale(second, len(self.mu) * self.gamma.sum(), norm(0, 1))

    def select(self) -> None:
        """The bound is linear in each γ_l, but for its own divergence: differences between used and not are all."""
        for _ in range(50):
            before = self.gamma.copy()
            for j in range(LATENTS):
                gain = [self.fit_to_rows(np.where(np.arange(LATENTS) == j, g, self.gamma), self.kernel) for g in (0, 1)]
                ratio = (self.mu[:, j] ** 2 + self.tau2[:, j]) * np.exp(-2 * self.log_slab)
                cost = 0.5 * np.sum(ratio - 1 - np.log(self.tau2[:, j])) + len(self.mu) * self.log_slab
                self.gamma[j] = expit(gain[1] - gain[0] - cost)  # π = 1/2
            if np.max(np.abs(self.gamma - before)) < 1e-10:
                break

    def trade_sizes(self) -> None:
        """The factor between curves and coefficients at which the divergences are least, by a root."""
        _, k = dense_matrices(self.x, GRID, self.kernel)
        rate = np.exp(-2 * self.log_noise)[self.unit]
        for j in range(LATENTS):
            size = np.trace(self.S[j]) + self.m[j] @ self.m[j]
            second = self.mu[:, j] ** 2 + self.tau2[:, j]
            cost = self.gamma[j] * (np.exp(-2 * self.log_slab) * second.sum() + np.sum(rate * second[self.unit] * k[j]))
            free = POINTS - self.gamma[j] * len(self.mu)

            def slope(log_c: float, size: float = size, cost: float = cost, free: float = free) -> float:
                return float(-size * np.exp(2 * log_c) + free + cost * np.exp(-2 * log_c))

            c = np.exp(brentq(slope, -30, 30, xtol=1e-14)) if cost > 0 else 1.0
            self.m[j], self.S[j] = c * self.m[j], c**2 * self.S[j]
            self.mu[:, j], self.tau2[:, j] = self.mu[:, j] / c, self.tau2[:, j] / c**2

    def kernel_slope(self) -> Any:
        """Of the likelihood, by central differences, with the prior N(log 0.3, 0.5²) of each log ℓ."""
        likelihood = difference(lambda z: self.fit_to_rows(self.gamma, z), self.kernel, step=3e-5)
        return likelihood - (self.kernel - np.log(0.3)) / 0.5**2

    def adam(self, slope: Any, rate: float) -> None:
        self.steps += 1
        self.moments = np.array([0.9 * self.moments[0] + 0.1 * slope, 0.999 * self.moments[1] + 0.001 * slope**2])
        first, second = self.moments[0] / (1 - 0.9**self.steps), self.moments[1] / (1 - 0.999**self.steps)
        self.kernel = self.kernel + rate * first / (np.sqrt(second) + 1e-8)

    def bound(self, *, select: bool) -> float:
        own = [UnitClientState(*u) for u in zip(self.mu, self.tau2, self.log_noise, strict=True)]
        shared = Globals(self.m, self.S, self.gamma, self.kernel, self.log_slab)
        # While all functions are in use there is no divergence of the selection, which at γ = 1 is L log 2.
        return dense_bound(self.clients, Parameters(shared, own)) + (0.0 if select else LATENTS * np.log(2))


@pytest.mark.parametrize("kernel_rate", [0.0, 0.05])
def test_the_federated_ascent_is_the_central_one(kernel_rate: float) -> None:
    """To 1e-6 in the bound until the end phase begins, and in all that is shared; selection begins on the way."""
    clients = problems.coregional()[1]
    played = play(fedppl.curves.Ascent(kernel_rate=kernel_rate, warmup=WARMUP, initial_kernel="prior"), clients, 30)
    central = Central(clients, list(played.personal[1].values()), np.full(LATENTS, np.log(0.3)))
    states = list(itertools.takewhile(lambda state: rest_of(state) is None, played.states[1:]))
    assert len(states) > WARMUP + 5
    for number, state in enumerate(states, start=1):
        if number > 1:
            central.units_step()
        slope, select = central.kernel_slope(), number > WARMUP
        central.shared_step(select=select)
        expected = central.bound(select=select)
        central.adam(slope, kernel_rate)
        found = bound_of_sums(
            state.phase.totals, state.shared, ROLES().log_odds if select else np.full(LATENTS, np.inf)
        )
        assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=str(number))
        assert_allclose(state.shared.kernel, central.kernel, atol=1e-6)
    assert_allclose(state.shared.inclusion, central.gamma, atol=1e-6)
    assert_allclose(state.shared.mean, central.m, atol=1e-4)
    assert_allclose(state.shared.covariance, central.S, atol=1e-5)
    assert_allclose(state.shared.log_slab_sd, central.log_slab, atol=1e-5)
    assert np.any(state.shared.inclusion < 0.01) and np.any(state.shared.inclusion > 0.99)


def test_batches_end_near_the_ascent_on_all_rows() -> None:
    """The bound of all rows at what was found, each unit at its best: a few nats off, of the many that were gained."""
    clients = problems.coregional()[1]
    views, log_odds = views_of(clients), ROLES().log_odds
    whole = play(fedppl.curves.Ascent(warmup=WARMUP), clients, 40).states
    batches = play(fedppl.curves.Ascent(warmup=WARMUP, batch_size=10, kernel_rate=0.02), clients, 250).states[-1]
    best, start = (total_bound(views, state.shared, None, log_odds) for state in (whole[-1], whole[1]))
    found = total_bound(views, batches.shared, None, log_odds)
    assert best - start > 50
    assert best - found < 3
    assert_array_equal(np.sum(batches.shared.inclusion > 0.5), np.sum(whole[-1].shared.inclusion > 0.5))


# --- who takes part -----------------------------------------------------------------------------------------------


def assert_finite(fit: fedppl.Fit) -> None:
    """The fit, and predictions of every unit inside the grid and out of it."""
    for value in (*fit.state.shared, *fit.state.phase.totals.values()):
        assert np.all(np.isfinite(value))
    for client_id in fit.clients:
        found = fedppl.curves.predict(fit, client_id, {"X": np.array([-3.0, 0.2, 0.9, 5.0])})
        assert all(np.all(np.isfinite(values)) for values in found.values())
        assert np.all(found["sd"] > 0)


def fitted(clients: Any, rounds: int = 12, algorithm: AnyAlgorithm | None = None, **settings: Any) -> fedppl.Fit:
    model = problems.coregional()[0]
    algorithm = algorithm or fedppl.curves.Ascent(warmup=4)
    settings = {"random_seed": 3} | settings
    return problems.fit_some_rounds(model, clients, algorithm, rounds=rounds, progressbar=False, **settings)


def test_a_late_joiner_counts_in_full_from_its_first_reply() -> None:
    """Out of the first five rounds: its first reply finds curves to fit."""
    numbers = itertools.count(1)

    def late(ids: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
        return tuple(ids) if next(numbers) > 5 else tuple(k for k in ids if k != "unit 1")

    algorithm = fedppl.curves.Ascent(warmup=2)
    fit = fitted(problems.coregional()[1], 40, algorithm, participation=late)
    assert_finite(fit)
    assert [("unit 1" in record.infos) for record in fit.records[:7]] == [False] * 5 + [True] * 2
    assert fit.records[5].infos["unit 1"]["blank"] == 1.0
    assert all("blank" not in info for record in fit.records[6:] for info in record.infos.values())
    assert_allclose(fit.state.phase.totals["units"], 3.0)
    together = fitted(problems.coregional()[1], 40, algorithm)
    assert fit.state.bound > together.state.bound - 1.0


@pytest.mark.parametrize("seed", range(3))
def test_one_unit_a_round_finds_more_than_one_curve(seed: int) -> None:
    """The sums wait for every unit's random start: from one unit's alone, all latent functions are one curve."""
    clients = problems.coregional()[1]
    algorithm = fedppl.curves.Ascent(warmup=20)
    starts: list[set[str]] = []
    for step in fedppl.rounds(problems.coregional()[0], clients, algorithm, participation=1, random_seed=seed):
        starts.append(set(step.record.infos))
        if step.number > 1 and not isinstance(step.state.phase, Collecting):
            break
        assert np.all(step.state.shared.mean == 0)
    assert set.union(*starts[1:]) == set(clients)
    assert_allclose(step.state.phase.totals["units"], len(clients))
    assert np.linalg.matrix_rank(step.state.shared.mean, tol=1e-3) > 1


def test_some_units_a_round_end_near_the_ascent_with_all() -> None:
    """The bound of all rows at what was found, each unit at its best."""
    clients = problems.coregional()[1]
    some = fitted(clients, 60, participation=2, random_seed=2)
    together = fitted(clients, 60, random_seed=2)
    assert_finite(some)
    # Of the round in which two were all that had been heard, little is left.
    assert_allclose(some.state.phase.totals["units"], 3.0, rtol=1e-4)
    views = views_of(clients)
    ours, theirs = (total_bound(views, one.state.shared, None, ROLES().log_odds) for one in (some, together))
    assert abs(ours - theirs) < 3


def test_the_bound_of_those_heard_is_scaled_to_all() -> None:
    """Two units with the same rows and the same coefficients, of which one replies: the sums are those of both."""
    data = problems.coregional()[1]["unit 1"]
    model, algorithm = problems.coregional()[0], fedppl.curves.Ascent(warmup=0, initial_kernel="prior")
    models = model.enrol({"a": data, "b": data})
    state = algorithm.init(models["a"].layout, tuple(models), stream((1,)))
    personal = None
    for _ in range(3):
        personal, reply, _ = algorithm.update_client(
            models["a"], personal, algorithm.broadcast(state, "a"), stream((1,))
        )
        state, _ = updated(algorithm, state, {"a": reply, "b": reply})
    _, reply, _ = algorithm.update_client(models["a"], personal, algorithm.broadcast(state, "a"), stream((1,)))
    both, _ = updated(algorithm, state, {"a": reply, "b": reply})
    # The first noisy round counts in part: here the sums before are those of units that have not moved.
    before = sum_replies({"a": reply, "b": reply})
    del before["kernel_gradient"]
    before["precision"] = gaussian.unpack_triangle(before["precision"])
    one, _ = updated(algorithm, state._replace(phase=state.phase._replace(totals=before)), {"a": reply})
    for key, value in one.phase.totals.items():
        assert_allclose(value, both.phase.totals[key], rtol=1e-9, err_msg=key)
    assert_allclose(one.bound, both.bound, rtol=1e-9)


def test_a_unit_that_fails_in_some_rounds_is_skipped_in_those() -> None:
    algorithm, calls = fedppl.curves.Ascent(warmup=4), itertools.count(1)

    def update_client(client: Any, *arguments: Any) -> Any:
        if client.client_id == "unit 2" and next(calls) in (1, 2, 5, 6):
            raise LocalFailure("out of paper")
        return algorithm.update_client(client, *arguments)

    fit = fitted(problems.coregional()[1], 30, algorithm._replace(update_client=update_client))
    assert [record.number for record in fit.records if record.failures] == [1, 2, 5, 6]
    assert_finite(fit)
    assert_allclose(fit.state.phase.totals["units"], 3.0)


def test_lost_personal_state_is_found_again_from_the_curves() -> None:
    """A unit keeps its noise only for a start: without it the reply is the same, and it says so."""
    clients = problems.coregional()[1]
    algorithm = fedppl.curves.Ascent(warmup=4)
    played = play(algorithm, clients, 10)
    client = problems.coregional()[0].enrol(clients)["unit 2"]
    message = algorithm.broadcast(played.states[-1], "unit 2")
    kept, with_it, info = algorithm.update_client(client, played.personal[-1]["unit 2"], message, stream((1,)))
    found, without, blank = algorithm.update_client(client, None, message, stream((2,)))
    assert "blank" not in info and blank["blank"] == 1.0
    for one, other in zip(kept, found, strict=True):
        assert_allclose(one, other, rtol=1e-4)
    assert_allclose(with_it["linear"], without["linear"], rtol=1e-3, atol=1e-6)


X = np.linspace(0.05, 0.95, 15)
WAVE = np.sin(5 * X)
ODD = {
    "one row": {"X": X[:1], "y": WAVE[:1]},
    "two equal rows": {"X": X[[3, 3]], "y": WAVE[[3, 3]]},
    "two equal outputs": {"X": X[:2], "y": np.zeros(2)},
    "duplicate inputs": {"X": np.full(15, 0.4), "y": WAVE},
    "some rows outside the grid": {"X": 4 * X - 2, "y": WAVE},
    "a corner of the grid": {"X": 0.05 * X, "y": WAVE},
    "large outputs": {"X": X, "y": 100 * WAVE},
    "small outputs": {"X": X, "y": 1e-2 * WAVE},
}


SCALES = {
    "constant": (np.full(15, 0.7), "the 15 outputs vary by sd .*Leave a dead sensor out"),
    "zero": (np.zeros(15), "the 15 outputs vary by sd 0, .*dead sensor"),
    "tiny": (1e-8 * WAVE, "vary by sd .*bring outputs to mean 0 and unit scale"),
    "huge": (1e8 * WAVE, "root mean square is .*bring outputs to mean 0 and unit scale"),
    "far from 0": (WAVE + 1000, "root mean square is 1e\\+03, and latent functions reach 148"),
}


@functools.cache
def odd() -> dict[str, Any]:
    """Odd units by name, and each once more: enrolled in one call, since every call takes as long."""
    data = {**ODD, **{f"{name} again": one for name, one in ODD.items()}}
    data |= {name: {"X": X, "y": y} for name, (y, _) in SCALES.items()}
    problems.coregional()[0].enrol({**problems.coregional()[1], **data})
    return data


@pytest.mark.parametrize("name", ODD)
def test_odd_data_give_a_finite_fit(name: str) -> None:
    fit = fitted({**problems.coregional()[1], name: odd()[name]})
    assert all(record.failures == {} for record in fit.records)
    assert_finite(fit)


@pytest.mark.parametrize("name", ["one row", "small outputs", "duplicate inputs"])
def test_odd_data_alone_give_a_finite_fit(name: str) -> None:
    assert_finite(fitted({one: odd()[one] for one in (name, f"{name} again")}))


@pytest.mark.parametrize("name", SCALES)
def test_outputs_of_another_scale_are_refused_before_any_round(name: str) -> None:
    """One unit without any noise would have a bound beyond all others' without latent functions, and drop them all."""
    with pytest.raises(DataError, match=f"client '{name}': .*{SCALES[name][1]}"):
        fitted({**problems.coregional()[1], name: odd()[name]})


def test_the_kernels_do_not_go_back_and_forth_for_ever() -> None:
    """With steps of one length these fits went on for 1,500 rounds and more, 0.005 up and down in the bound."""
    fit = fitted(problems.coregional()[1], rounds=600)
    assert fit.status is fedppl.Status.CONVERGED, fit.message
    bounds = np.array([record.info["bound"] for record in fit.records])[-20:]
    assert np.ptp(bounds[-9:]) < 1e-3


def test_a_fit_that_ends_without_any_latent_function_says_so() -> None:
    for inclusion, what in (([0.0, 0, 0], "no latent function is selected: bring outputs"), ([0.0, 1, 0], "")):
        shared = RANDOM.shared._replace(inclusion=np.array(inclusion))
        said = report(1.0, shared, 0.0, Left(0.0, 0.0, 0.5), arrived=True, noisy=False)
        assert said.status is fedppl.Status.CONVERGED
        assert str(said.message).startswith(what) and bool(said.message) == bool(what)


def test_rows_that_no_inducing_point_sees_are_refused_before_any_round() -> None:
    """All of a unit's rows beyond the grid, or a grid that lies elsewhere altogether."""
    good = problems.coregional()[1]
    with pytest.raises(DataError, match="client 'far': 15 of 15 rows .*spread inducing="):
        fitted({**good, "far": {"X": X + 30, "y": WAVE}})


def test_rows_of_which_some_are_not_seen_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Three of ten lie beyond the grid on [0, 1], more than four length-scales away."""
    X = np.concatenate([np.linspace(0.05, 0.95, 7), [9.0, 9.1, 9.2]])
    with caplog.at_level("WARNING", logger="fedppl"):
        fitted({**problems.coregional()[1], "far": {"X": X, "y": np.sin(X)}})
    assert "client far: 3 of 10 rows lie where the inducing points say next to nothing" in caplog.text


def test_missing_values_and_empty_units_are_refused_at_enrolment() -> None:
    good = problems.coregional()[1]
    with pytest.raises(DataError, match="'y' in [0-9]+ rows at client 'bad'; drop or impute"):
        fitted({**good, "bad": {"X": X, "y": np.where(X > 0.5, np.nan, WAVE)}})
    with pytest.raises(DataError, match="client 'empty': 'X' has shape .0,., that is zero rows; leave the client out"):
        fitted({**good, "empty": {"X": np.zeros(0), "y": np.zeros(0)}})


def test_equal_seeds_give_equal_fits_and_others_do_not() -> None:
    one, again = (fitted(problems.coregional()[1]) for _ in range(2))
    for ours, theirs in zip(one.state.shared, again.state.shared, strict=True):
        assert_array_equal(ours, theirs)
    other = play(fedppl.curves.Ascent(warmup=4), problems.coregional()[1], 12, seed=8).states[-1]
    assert np.any(other.shared.mean != one.state.shared.mean)


# --- what the sum hides -------------------------------------------------------------------------------------------


def replies_of(coefficients: Sequence[Any], inputs: Any = X, outputs: Any = None) -> list[dict[str, Any]]:
    """Statistics of units with known coefficients and equal kernels, as the server reads them."""
    client = problems.coregional()[0].enrol({"a": {"X": inputs, "y": inputs if outputs is None else outputs}})["a"]
    design = client.view(unit_of).design(np.full(LATENTS, np.log(0.3)))
    replies = []
    for k, w in enumerate(coefficients):
        own = UnitClientState(np.asarray(w), np.full(LATENTS, 1e-4), -1.0 + 0.1 * k)
        replies.append(statistics(design, own, client.view(unit_of).noise))
    return replies


def ratios(reply: dict[str, Any]) -> Any:
    """μ_k / μ_1, from products of v_1 with the others beside products of v_1 with itself."""
    blocks = reply["precision"].reshape(LATENTS, POINTS, LATENTS, POINTS)
    return [np.sum(blocks[0, :, j, :]) / np.sum(blocks[0, :, 0, :]) for j in range(1, LATENTS)]


COEFFICIENTS = [np.array([0.9, -1.8, 0.45]), np.array([-0.6, 0.3, 1.2]), np.array([1.1, 0.7, -0.2])]


def test_one_units_reply_tells_the_ratios_of_its_coefficients() -> None:
    """Twice over: from the precision up to τ², and from the linear terms exactly, where kernels are equal."""
    for w, reply in zip(COEFFICIENTS, replies_of(COEFFICIENTS), strict=True):
        assert_allclose(ratios(reply), w[1:] / w[0], rtol=1e-3)
        linear = reply["linear"]
        assert_allclose(linear[1:, 2] / linear[0, 2], w[1:] / w[0], rtol=1e-9)


def test_the_sum_over_units_tells_the_ratios_of_none() -> None:
    replies = replies_of(COEFFICIENTS)
    sums = {key: sum(reply[key] for reply in replies) for key in replies[0]}
    for w in COEFFICIENTS:
        assert np.max(np.abs(np.array(ratios(sums)) / (w[1:] / w[0]) - 1)) > 0.5
        assert np.max(np.abs(sums["linear"][1:, 2] / sums["linear"][0, 2] / (w[1:] / w[0]) - 1)) > 0.5


def test_the_sum_does_not_tell_which_of_two_units_is_which() -> None:
    """Units with equal inputs and noise that swap their coefficients: replies differ, products in the sum do not.

    The linear terms stay the same where outputs swap with them.
    """
    view = units()["5 rows"].view(unit_of)
    design = view.design(np.full(LATENTS, np.log(0.3)))
    outputs = [design.response, np.cos(3 * design.response)]
    own = [UnitClientState(w, np.full(LATENTS, 1e-2), -1.0) for w in COEFFICIENTS[:2]]
    there, back = (
        [statistics(design._replace(response=outputs[k]), own[k], view.noise) for k in order]
        for order in ((0, 1), (1, 0))
    )
    assert np.max(np.abs(there[0]["precision"] - back[0]["precision"])) > 0.1
    for key in there[0]:
        assert_array_equal(there[0][key] + there[1][key], back[0][key] + back[1][key], err_msg=key)


def test_replies_hold_no_more_than_what_is_documented() -> None:
    played = play(fedppl.curves.Ascent(initial_kernel="prior"), problems.coregional()[1], 1)
    for reply in played.replies[1].values():
        sizes = {key: np.size(value) for key, value in reply.items()}
        total = LATENTS * POINTS
        assert sizes == {
            "precision": total * (total + 1) // 2,
            "linear": total,
            "penalty": LATENTS,
            "second": LATENTS,
            "log_variance": LATENTS,
            "constant": 1,
            "units": 1,
            "kernel_gradient": LATENTS,
        }


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel_rate": -0.1}, "kernel_rate=-0.1"),
        ({"kernel_rate": np.nan}, "kernel_rate=nan"),
        ({"warmup": -1}, "warmup=-1"),
        ({"warmup": 2.5}, "warmup=2.5"),
        ({"sweeps": 0}, "sweeps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 3.0}, "batch_size=3.0"),
        ({"forgetting": 0.5}, "forgetting=0.5"),
        ({"forgetting": 1.5}, "forgetting=1.5"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"initial_kernel": "mean"}, "initial_kernel='mean'"),
    ],
)
def test_settings_out_of_range_are_refused_by_their_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=re.escape(message)):
        fedppl.curves.Ascent(**settings)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("second", -1.0, "'second' holds -1"), ("units", -1.0, "'units' holds -1"), ("precision", -50.0, "'precision'")],
)
def test_statistics_that_no_data_give_are_refused(name: str, value: float, message: str) -> None:
    played = play(fedppl.curves.Ascent(initial_kernel="prior"), problems.coregional()[1], 2)
    algorithm, reply = fedppl.curves.Ascent(), played.replies[2]["unit 0"]
    assert algorithm.replies.reject(played.states[1], reply) is None
    changed = np.array(reply[name], dtype=float)
    changed.flat[0] = value
    assert message in str(algorithm.replies.reject(played.states[1], {**reply, name: changed}))
