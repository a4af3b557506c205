"""Draws of θ given φ and a client's rows: by the distribution that quadrature has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats
from scipy.special import expit

import fedppl
from fedppl.contracts import ClientView
from fedppl.local import _given

_DRAWS = 20_000


def client_of(successes: list[int], rows: list[int]) -> ClientView:
    """Log odds of its own for each of a client's wards, which binomial counts tell."""

    def wards(y: Any, n: Any) -> pm.Model:
        with pm.Model() as model:
            y, n = pm.Data("y", y), pm.Data("n", n)
            mu, tau = pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 2)
            pm.Binomial("obs", n=n, logit_p=pm.Normal("theta", mu, tau, shape=len(successes)), observed=y)
        return model

    declared = fedppl.FederatedModel(wards, ["mu", "tau"])
    return declared.enrol({"A": {"y": np.array(successes), "n": np.array(rows)}})["A"]


def below(x: Any, phi: Any, successes: int, rows: int) -> Any:
    """Distribution function of a ward's log odds at x, by the trapezium rule."""
    mu, tau = phi[0], np.exp(phi[1])
    grid = mu + tau * np.linspace(-9, 9, 20_001)
    log_density = successes * np.log(expit(grid)) + (rows - successes) * np.log(expit(-grid))
    log_density += stats.norm.logpdf(grid, mu, tau)
    density = np.exp(log_density - log_density.max())
    total = np.cumsum(density) - 0.5 * density
    return np.interp(x, grid, total / density.sum())


@pytest.mark.parametrize(
    ("successes", "rows"),
    [
        ([0], [2]),
        ([1], [40]),
        ([30], [70]),
        ([90, 700], [400, 1000]),
        ([3, 0, 2, 9], [4, 5, 9, 9]),
        ([40, 35, 52, 61, 70, 20], [100, 100, 100, 100, 100, 50]),
    ],
)
def test_given_phi_wards_are_drawn_from_their_own_posterior(successes: list[int], rows: list[int]) -> None:
    phi = np.array([0.3, np.log(1.4)])
    client = client_of(successes, rows)
    theta = _given.draw_given(client, np.tile(phi, (_DRAWS, 1)), phi, np.random.default_rng(1))
    least = 0.01 / len(successes)
    for i, (y, n) in enumerate(zip(successes, rows, strict=True)):
        u = below(theta[:, i], phi, y, n)
        assert stats.kstest(u, "uniform").pvalue > least
        # the ends too, which a test of distributions hardly looks at
        assert stats.binomtest(int(np.sum((u < 0.01) | (u > 0.99))), _DRAWS, 0.02).pvalue > least


def test_where_laplaces_approximation_holds_fewer_candidates_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    phi = np.tile([0.3, 1.5], (50, 1))
    asked = []
    values = _given._values
    monkeypatch.setattr(_given, "_values", lambda *a: asked.append(1) or values(*a))  # type: ignore[func-returns-value]
    for successes, rows, times in ((300, 700, 2), (0, 5, 5)):
        asked.clear()
        _given.draw_given(client_of([successes], [rows]), phi, phi[0], np.random.default_rng(2))
        assert len(asked) == times
