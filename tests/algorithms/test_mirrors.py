"""Modes at mirror images, which no search came to: signs that the data hardly tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy.stats import norm

import fedppl
from fedppl.run import conflicts


def signed(y: Any) -> Any:
    """Effects a θ of clients, θ ~ N(0, 1): a and −a are as likely, and the prior alone tells them apart."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        c, a = pm.Normal("c", 0, 5), pm.Normal("a", 1, 0.8)
        pm.Normal("obs", c + a * pm.Normal("theta", 0, 1), 1, observed=y)
    return model


def data(clients: int) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(51)
    return {f"client {k}": {"y": 8 + 0.8 * rng.normal() + rng.normal(size=6)} for k in range(clients)}


def exact(clients: dict[str, dict[str, np.ndarray]]) -> tuple[float, float]:
    """Mean and sd of a, by quadrature."""
    c, a = np.linspace(6.5, 9.5, 201)[:, None], np.linspace(-3, 4, 1401)[None, :]
    value = norm.logpdf(c, 0, 5) + norm.logpdf(a, 1, 0.8)
    for rows in clients.values():
        value = value + norm.logpdf(rows["y"].mean(), c, np.sqrt(a**2 + 1 / 6))
    weight = np.exp(value - value.max()).sum(axis=0)
    weight /= weight.sum()
    mean = float(weight @ a[0])
    return mean, float(np.sqrt(weight @ (a[0] - mean) ** 2))


@pytest.mark.filterwarnings("ignore::fedppl.ConvergenceWarning")
@pytest.mark.parametrize(
    ("clients", "seed"),
    [(51, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(12, 1), (12, 2), (51, 1)])],
)
def test_a_sign_that_the_prior_alone_tells_is_not_converged_at_one(clients: int, seed: int) -> None:
    rows = data(clients)
    frame = pd.concat([pd.DataFrame({"client": name, **part}) for name, part in rows.items()])
    model = fedppl.FederatedModel(signed, shared=["c", "a"])
    fit = fedppl.fit(model, frame, by="client", progressbar=False, random_seed=seed)
    if fit.status is fedppl.Status.CONVERGED:
        mean, sd = exact(rows)
        found = fit.idata["posterior"]["a"].values
        assert abs(found.mean() - mean) < 0.2 * sd and 0.8 < found.std() / sd < 1.25
    else:
        assert fit.status is fedppl.Status.STALLED and "several modes" in fit.message


def mixture(points: np.ndarray) -> np.ndarray:
    """Two modes at ±3 in the first coordinate, one in the second."""
    x = points[:, 0]
    return np.logaddexp(-0.5 * ((x - 3) / 0.2) ** 2, -2 - 0.5 * ((x + 3) / 0.2) ** 2) - 0.5 * (points[:, 1] - 5) ** 2


def test_an_image_is_named_with_its_share_unless_the_posterior_has_seen_it() -> None:
    center, patterns = np.array([3.0, 5.0]), np.array([[1.0, -1.0], [-1.0, 1.0]])
    places, share = conflicts.unseen_image(mixture, center, np.array([0.2, 1.0]), patterns) or ([], np.nan)
    assert places == [0] and share == pytest.approx(1 / (1 + np.exp(2)), rel=1e-6)
    assert conflicts.unseen_image(mixture, center, np.array([1.9, 1.0]), patterns) is None


def test_points_of_what_was_found_tell_what_it_has_seen() -> None:
    """One point in fifty on the other side is a sixth of the image's share; one in a thousand is not a tenth of it."""
    center, sd, patterns = np.array([3.0, 5.0]), np.array([0.3, 1.0]), np.array([[-1.0, 1.0]])
    points = np.array([[3.0, 5.0], [-3.0, 5.0]])
    assert conflicts.unseen_image(mixture, center, sd, patterns, (points, np.array([0.98, 0.02]))) is None
    assert conflicts.unseen_image(mixture, center, sd, patterns, (points, np.array([0.999, 0.001]))) is not None


def test_a_posterior_of_both_signs_stays_converged() -> None:
    """The weighted points have the other sign, of which no search knew."""

    def squared(y: Any) -> Any:
        with pm.Model() as model:
            pm.Normal("obs", pm.Normal("mu", 1, 0.8) ** 2, 0.75, observed=pm.Data("y", y))
        return model

    model = fedppl.FederatedModel(squared, shared=["mu"])
    clients = {str(k): {"y": np.ones(1)} for k in range(4)}
    fit = fedppl.fit(model, clients, fedppl.Sums(starts=1), progressbar=False, random_seed=1)
    mu = np.linspace(-4, 4, 4001)
    weight = np.exp(norm.logpdf(mu, 1, 0.8) + 4 * norm.logpdf(1, mu**2, 0.75))
    below = weight[mu < 0].sum() / weight.sum()
    assert fit.status is fedppl.Status.CONVERGED
    assert abs(np.mean(fit.idata["posterior"]["mu"].values < 0) - below) < 0.03


def test_a_wide_density_without_a_dip_is_one_mode() -> None:
    """A Student t, at 5 sds of a normal that is too narrow for it."""
    wide = lambda points: -1.5 * np.log1p((points[:, 0] - 1.0) ** 2 / 2)  # noqa: E731
    assert conflicts.unseen_image(wide, np.array([1.0]), np.array([0.3]), np.array([[-1.0]])) is None


def test_clients_with_most_rows_are_among_those_that_are_searched_first() -> None:
    """Of 600 a few have most of the rows, and the others have a mode of their own."""

    def robust(y: Any) -> Any:
        with pm.Model() as model:
            pm.StudentT("obs", nu=2, mu=pm.Normal("mu", 0, 10), sigma=0.5, observed=pm.Data("y", y))
        return model

    rng = np.random.default_rng(5)
    at_random = set(np.random.default_rng((1, 0)).choice(600, 128, replace=False).tolist())  # with random_seed=1
    large = {k for k in (17, 18, 333, 334, 501, 502, 503) if k not in at_random}
    rows = [15 + 0.5 * rng.normal(size=1500) if k in large else 0.5 * rng.normal(size=4) for k in range(600)]
    names = np.repeat([f"client {k}" for k in range(600)], [len(part) for part in rows])
    frame = pd.DataFrame({"client": names, "y": np.concatenate(rows)})
    model = fedppl.FederatedModel(robust, shared=["mu"])
    fit = fedppl.fit(model, frame, by="client", progressbar=False, random_seed=1)
    assert fit.status is not fedppl.Status.CONVERGED or abs(fit.estimate["mu"] - 15) < 0.1
