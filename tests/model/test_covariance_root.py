"""Coordinates of `pm.LKJCholeskyCov`: they are turned back, change a density by their slope, and have no edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl.model.graph import SdsAndPartials
from fedppl.types import Array


def slopes(n: int) -> fedppl.FederatedModel:
    """Coefficients of a client, which are correlated: of the first `n` columns."""

    def builder(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            sds = pm.HalfNormal.dist(1.0, shape=n)
            chol, _, _ = pm.LKJCholeskyCov("chol", n=n, eta=2.0, sd_dist=sds, compute_corr=True)
            beta = pm.MvNormal("beta", pm.Normal("mu", 0, 1.5, shape=n), chol=chol)
            pm.Normal("obs", X[:, :n] @ beta, 0.5, observed=y)
        return model

    return fedppl.FederatedModel(builder, ["mu", "chol"])


def clients(count: int, rows: int) -> dict[str, dict[str, Array]]:
    rng = np.random.default_rng(3)
    found = {}
    for k in range(count):
        X = np.column_stack([np.ones(rows), rng.normal(size=(rows, 2))])
        eta = X @ (np.array([-0.5, 0.8, 0.3]) + 0.5 * rng.normal(size=3))
        found[f"client {k:02d}"] = {"X": X, "y": eta + 0.5 * rng.normal(size=rows)}
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_coordinates_are_turned_back_and_have_their_slope(n: int) -> None:
    transform, x = SdsAndPartials(n), pt.vector("x")
    root = transform.backward(x)
    function = pytensor.function([x], [root, transform.forward(root), transform.log_jac_det(x)], mode="FAST_COMPILE")
    at = np.random.default_rng(n).normal(size=n * (n + 1) // 2)
    packed, again, slope = function(at)
    assert_allclose(again, at, rtol=1e-9)
    step = 1e-5 * np.eye(len(at))
    jacobian = np.stack([(function(at + one)[0] - function(at - one)[0]) / 2e-5 for one in step])
    assert slope == pytest.approx(np.linalg.slogdet(jacobian)[1], abs=1e-6)
    full = np.zeros((n, n))
    full[np.tril_indices(n)] = packed
    sds = np.exp(at[np.arange(1, n + 1).cumsum() - 1])
    assert_allclose(np.sqrt(np.diag(full @ full.T)), sds, rtol=1e-9)


@pytest.mark.slow
def test_a_density_is_that_of_pymc_by_the_slope() -> None:
    client = slopes(3).enrol(clients(1, 5), kernel=False)["client 00"]
    kinds = ("log", "partial", "log", "partial", "partial", "log")
    assert client.layout.labels[3:] == tuple(f"chol_{kind}__[{k}]" for k, kind in enumerate(kinds))
    with pm.Model() as model:
        sds = pm.HalfNormal.dist(1.0, shape=3)
        pm.LKJCholeskyCov("chol", n=3, eta=2.0, sd_dist=sds, compute_corr=True)
    transform, x = SdsAndPartials(3), pt.vector("x")
    turned = pytensor.function([x], [transform.backward(x), transform.log_jac_det(x)], mode="FAST_COMPILE")
    theirs, diagonal = model.compile_logp(mode="FAST_COMPILE"), [0, 2, 5]
    points = np.random.default_rng(4).normal(size=(5, 9))
    expected = []
    for row in points:
        packed, slope = turned(row[3:])
        packed = packed.copy()
        packed[diagonal] = np.log(packed[diagonal])
        # theirs has the slope of logarithms
        own = theirs({"chol_cholesky-cov-packed__": packed}) - packed[diagonal].sum() + slope
        expected.append(float(own) - 0.5 * np.sum((row[:3] / 1.5) ** 2))
    ours = client.prior.log_density(points)
    assert_allclose(ours - ours[0], np.array(expected) - expected[0], atol=1e-8)
    far = np.tile(points[0], (3, 1))
    far[:, 8] = [-2.0, -5.0, -9.0]  # an sd near 0, whatever its correlations
    assert np.all(np.diff(client.prior.log_density(far)) < -2.0)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_correlated_effects_converge(n: int) -> None:
    fit = fedppl.fit(slopes(n), clients(10, 12), progressbar=False, random_seed=1)
    assert fit.status.value == "converged"
    assert fit.algorithm.name == "Sums"
    correlations = fit.summary("chol_corr")["mean"].to_numpy().reshape(n, n)
    assert_allclose(np.diag(correlations), 1.0)
    assert_allclose(correlations, correlations.T)
