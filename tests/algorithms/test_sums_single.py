"""What one client does to a posterior by sums: against closed forms, and fits without the client."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy.special import expit

import fedppl
from fedppl import DeclarationError, plots
from fedppl.algorithms.sums import sums
from fedppl.testing import normal_means
from tests.algorithms.test_sums import WARDS, hospitals
from tests.support import problems
from tests.support.markers import slow_but

fit = functools.partial(fedppl.fit, progressbar=False, random_seed=1)


def clinics(X: Any, y: Any) -> pm.Model:
    """Two variables of a clinic's own, and an sd with a prior that is not Gaussian."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu, slope, tau = pm.Normal("mu", 0, 2), pm.Normal("slope", 0, 2), pm.HalfNormal("tau", 1)
        level, own = pm.Normal("level", mu, tau), pm.Normal("own", slope, 0.5)
        pm.Bernoulli("obs", logit_p=level + own * X, observed=y)
    return model


def two_variables() -> tuple[fedppl.FederatedModel, dict[str, dict[str, Any]]]:
    rng, clients = np.random.default_rng(4), {}
    for k in range(6):
        X = rng.normal(size=30)
        p = expit(0.3 + 0.7 * rng.normal() + (1 + 0.5 * rng.normal()) * X)
        clients[f"clinic {k}"] = {"X": X, "y": (rng.random(30) < p).astype(int)}
    return problems.declared(clinics, ("mu", "slope", "tau")), clients


PROBLEMS: dict[str, Callable[[], Any]] = {
    "three random intercepts": lambda: (WARDS, hospitals(3)),
    "twelve random intercepts": lambda: (WARDS, hospitals(12)),
    "counts": problems.counts,
    "a prior that is not Gaussian": problems.schools,
    "two local variables": two_variables,
}
QUICK = ("three random intercepts", "a prior that is not Gaussian")


@functools.cache
def fitted(name: str) -> fedppl.Fit:
    model, clients = PROBLEMS[name]()
    return fit(model, clients, fedppl.Sums())


def test_of_normal_means_it_is_the_closed_form() -> None:
    model, clients = normal_means(4)
    found = fit(model, clients, fedppl.Sums())
    table = found.influence()
    assert bool(table["exact"].all())
    for name in clients:
        rest = {k: data for k, data in clients.items() if k != name}
        mean, variance = problems.normal_means_posterior(rest)
        one = table.sel(client=name)
        assert_allclose([float(one["mean"][0]), float(one["sd"][0])], [mean, np.sqrt(variance)], rtol=1e-6)
        predictive = found.log_evidence.value - fit(model, rest, fedppl.Sums()).log_evidence.value
        assert float(one["log_predictive"]) == pytest.approx(predictive, abs=1e-6)


@pytest.mark.parametrize("name", slow_but(PROBLEMS, *QUICK))
def test_it_is_a_fit_without_the_client(name: str) -> None:
    model, clients = PROBLEMS[name]()
    found = fitted(name)
    table = found.influence()
    assert bool(table["exact"].all())
    for left_out in list(clients)[::6]:
        one = table.sel(client=left_out)
        rest = fit(model, {k: data for k, data in clients.items() if k != left_out}, fedppl.Sums())
        known, error = rest.idata["fit"], 3 * float(one["error"]) + 0.015
        sd = np.sqrt(np.diag(known["covariance_matrix"]))
        assert_allclose((one["mean"] - known["mean_vector"].values) / sd, 0, atol=error)
        assert_allclose(one["sd"] / sd, 1, atol=error)
        predictive = found.log_evidence.value - rest.log_evidence.value
        errors = float(one["log_predictive_error"]), found.log_evidence.error, rest.log_evidence.error
        assert abs(float(one["log_predictive"]) - predictive) < 3 * np.linalg.norm(errors) + 0.003


def test_by_ep_it_is_of_the_gaussian() -> None:
    model, clients = normal_means(4)
    theirs, ours = fit(model, clients, fedppl.EP()).influence(), fit(model, clients, fedppl.Sums()).influence()
    assert not bool(theirs["exact"].any()) and bool(ours["exact"].all())
    assert_allclose(theirs["mean"], ours["mean"], rtol=1e-6)
    assert_allclose(theirs["sd_ratio"], ours["sd_ratio"], rtol=1e-6)


@pytest.mark.slow
def test_p_values_of_conflict_are_those_of_ep() -> None:
    """Whose Gaussian is near the posterior here."""
    model, clients = problems.counts()
    theirs, ours = fedppl.conflict(fit(model, clients, fedppl.EP())), fedppl.conflict(fitted("counts"))
    assert bool(ours["exact"].all())
    chance = np.sqrt(2 * 0.25 / 199)  # of both, at most
    assert np.all(np.abs(theirs["p_value"] - ours["p_value"]) < 4 * chance)


def test_a_client_far_from_the_others_has_the_largest_shift_and_a_small_p() -> None:
    model, clients = normal_means(6)
    clients = {**clients, "client 3": {"y": clients["client 3"]["y"] + 8.0}}
    found = fit(model, clients, fedppl.Sums())
    assert int(np.argmax(np.abs(found.influence()["shift"].values[:, 0]))) == list(clients).index("client 3")
    p = fedppl.conflict(found)["p_value"]
    assert float(p.sel(client="client 3")) == float(p.min()) == 1 / 200


def test_of_a_fit_whose_points_are_not_trusted_it_is_of_the_gaussian() -> None:
    found = fitted("counts")
    phase = found.state.phase._replace(trusted=False)
    rough = dataclasses.replace(found, state=found.state._replace(phase=phase))
    one, two = rough.influence(), found.influence()
    assert not bool(one["exact"].any()) and bool(two["exact"].all())
    assert np.all(np.isfinite(one["shift"])) and np.all(np.isnan(one["log_predictive"]))
    assert_allclose(one["sd"], two["sd"], rtol=0.3)


def test_what_has_no_value_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sums.factor

    def lost(*arguments: Any) -> Any:
        found = whole(*arguments)
        return found._replace(values=np.where(np.arange(len(found.values)) % 20, found.values, np.nan))

    monkeypatch.setattr(sums, "factor", lost)
    table = fit(*normal_means(4), fedppl.Sums()).influence()
    assert not bool(table["exact"].any()) and bool(np.isnan(table["shift"]).all())


def test_it_needs_the_clients_and_draws_them() -> None:
    model, clients = normal_means(4)
    found = fit(model, clients, fedppl.Sums())
    assert list(found.influence("client 2")["client"].values) == ["client 2"]
    with pytest.raises(DeclarationError, match="client 9"):
        found.influence(["client 9"])
    with pytest.raises(DeclarationError, match="has no posterior without each client"):
        fit(model, clients, fedppl.one_shot.SeparateSGD(learning_rate=0.01), rounds=1).influence()
    far = dataclasses.replace(found, clients={})
    with pytest.raises(DeclarationError, match="fedppl.load"):
        far.influence()
    with pytest.raises(DeclarationError, match="no client's data are here"):
        fedppl.conflict(far)
    assert [panel.get_xlabel() for panel in plots.influence(found)][0].startswith("shift")
    left = fedppl.without(found, "client 1", progressbar=False)
    assert left.fit.client_ids == ("client 0", "client 2", "client 3") and left.distance < 1e-6


@pytest.mark.slow
def test_points_move_to_the_posterior_without_a_client_that_tells_much() -> None:
    """Correlated effects of eight clinics: some leave few of all points to the others."""
    rng, parts = np.random.default_rng(1), []
    for k in range(8):
        x = rng.normal(size=int(rng.integers(15, 60)))
        eta = 1.2 + rng.normal(0, 0.7) + (0.6 + rng.normal(0, 0.4)) * x
        parts.append(pd.DataFrame({"clinic": f"c{k}", "x": x, "y": rng.poisson(np.exp(eta))}))
    model, frame = fedppl.formula("y ~ x + (1 + x | clinic)", "poisson"), pd.concat(parts, ignore_index=True)
    found = fit(model, frame, by="clinic")
    table = found.influence()
    assert bool(table["exact"].all())
    for name in ("c4", "c7"):
        others = fedppl.without(found, name, certificate=False, progressbar=False).fit
        mean, covariance = (others.idata["fit"][key].values for key in ("mean_vector", "covariance_matrix"))
        sd = np.sqrt(np.diag(covariance))
        one = table.sel(client=name)
        assert np.max(np.abs(one["mean"].values - mean) / sd) < 0.1
        assert_allclose(one["sd"].values, sd, rtol=0.07)
        predictive = found.log_evidence.value - others.log_evidence.value
        assert float(one["log_predictive"]) == pytest.approx(predictive, abs=0.06)
