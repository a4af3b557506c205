"""A client's data against what all others say: calibrated where they agree, small where signs are flipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats

import fedppl
from fedppl import DeclarationError, FederatedModel
from fedppl.testing import normal_means


def line(X: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        slope = pm.Normal("slope", pm.Normal("mu", 0, 2), pm.LogNormal("tau", -1, 0.5))
        pm.Normal("obs", slope * X, 1, observed=y)
    return model


LINE = FederatedModel(line, ["mu", "tau"])


def clinics(rng: np.random.Generator, count: int, *, flipped: int | None = None) -> dict[str, dict[str, Any]]:
    """Clinics with slopes about 2, of which one has its signs flipped."""
    found = {}
    for k in range(count):
        X = rng.normal(size=20)
        y = (2 + 0.4 * rng.normal()) * X + rng.normal(size=20)
        found[f"clinic {k:02d}"] = {"X": X, "y": -y if k == flipped else y}
    return found


def fit(model: Any, clients: Any) -> fedppl.Fit:
    return fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)


def test_flipped_signs_have_the_smallest_p() -> None:
    found = fedppl.conflict(fit(LINE, clinics(np.random.default_rng(1), 6, flipped=4)))["p_value"]
    assert str(found.idxmin().values) == "clinic 04"
    assert float(found.min()) < 0.01
    assert float(found.sortby(found)[1]) > 0.01


@pytest.mark.slow
def test_p_is_uniform_where_the_model_is_right() -> None:
    """Of one client named beforehand, with 3 rows; Gaussian models, so that the cavity is exact."""
    rng, found = np.random.default_rng(2), []
    for _ in range(60):
        mu = rng.normal()
        clients = {f"c{k}": {"y": mu + 0.5 * rng.normal() + rng.normal(size=3 if k == 0 else 8)} for k in range(4)}
        model, _ = normal_means(4)
        found.append(float(fedppl.conflict(fit(model, clients), "c0")["p_value"][0]))
    assert stats.kstest(found, "uniform").pvalue > 0.01


@pytest.mark.slow
def test_where_points_tell_the_others_posterior_replicates_are_of_it() -> None:
    model, clients = normal_means(4)
    found = fedppl.conflict(fedppl.fit(model, clients, fedppl.Sums(), progressbar=False, random_seed=1))
    assert bool(found["exact"].all()) and np.all((found["p_value"] > 0) & (found["p_value"] <= 1))
    gaussian = fedppl.conflict(fit(model, clients))
    assert not bool(gaussian["exact"].any())
    # the posterior is Gaussian: both are of the same distribution, up to 199 replicates
    assert np.max(np.abs(found["p_value"] - gaussian["p_value"])) < 0.15


@pytest.mark.slow
def test_without_others_there_is_no_p_and_strangers_are_refused() -> None:
    model, clients = normal_means(3)
    found = fit(model, clients)
    assert fedppl.conflict(found, random_seed=1).equals(fedppl.conflict(found, random_seed=1))
    for settings, message in (
        ({"clients": ["client 0", "client 0"]}, "some twice"),
        ({"clients": "z"}, "z"),
        ({"clients": []}, "none"),
        ({"replicates": 20}, "replicates=20"),
    ):
        with pytest.raises(DeclarationError, match=message):
            fedppl.conflict(found, **settings)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="no posterior of the shared variables"):
        fedppl.conflict(
            fedppl.fit(model, clients, fedppl.averaging.FedAvg(learning_rate=0.1), rounds=1, progressbar=False)
        )
