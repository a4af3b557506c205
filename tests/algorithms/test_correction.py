"""EP's correction: closed forms, quadrature, who does not answer, what is resumed, and what sites allow."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

import fedppl
from fedppl import DeclarationError, FederatedModel, NotConvergedError, gaussian
from fedppl.algorithms.ep import correction as _correction
from fedppl.contracts import ClientView, Factor, LocalInference
from fedppl.numerics.reweighting import apart
from fedppl.results import diagnostics
from fedppl.testing import normal_means
from fedppl.types import Array, LocalFailure, Status
from tests.support import problems


def fit(model: FederatedModel, clients: Any, algorithm: Any = None, **settings: Any) -> fedppl.Fit:
    return fedppl.fit(model, clients, algorithm or fedppl.EP(), progressbar=False, **{"random_seed": 1, **settings})


def test_of_a_gaussian_model_the_evidence_is_exact_and_q_stays() -> None:
    model, clients = normal_means(4)
    found = fit(model, clients)
    y = np.concatenate([data["y"] for data in clients.values()])
    same = np.concatenate([np.full(len(data["y"]), k) for k, data in enumerate(clients.values())])
    covariance = np.eye(len(y)) + 0.25 * (same[:, None] == same) + 100.0
    assert found.log_evidence.value == pytest.approx(
        stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y), abs=1e-6
    )
    assert found.log_evidence.error < 1e-6
    assert found.status is Status.CONVERGED
    assert_allclose(found.idata["fit"]["corrected_mean"], gaussian.mean(found.posterior))  # the posterior is q
    table, sd = found.summary(), gaussian.standard_deviations(found.posterior)
    assert_allclose(table["sd"], sd, rtol=1e-3)  # of quasi-random points
    assert np.max(np.abs(table["mean"] - gaussian.mean(found.posterior)) / sd) < 1e-3
    assert found.records[-1].info["phase"] == "correction" and found.records[-1].preliminary


def test_schools_are_those_of_quadrature() -> None:
    model, clients = problems.schools()
    found, exact = fit(model, clients), problems.schools_quadrature()
    corrected = found.idata["fit"]
    at = found.layout.labels.index("tau_log__")
    sd = float(np.sqrt(corrected["corrected_covariance"][at, at]))
    assert abs(float(corrected["corrected_mean"][at]) - exact["log_tau_mean"]) < 0.05 * exact["log_tau_sd"]
    assert sd / exact["log_tau_sd"] == pytest.approx(1, abs=0.03)
    by_q = gaussian.standard_deviations(found.posterior)[at]
    assert by_q < 0.9 * sd  # the Gaussian does not have it
    assert found.message == ""
    table = found.summary()
    draws = found.idata["posterior"]
    assert table.loc["tau", "mean"] == pytest.approx(float(draws["tau"].mean()), rel=0.05)
    assert table.loc["tau", "ci_high"] == pytest.approx(float(draws["tau"].quantile(0.975)), rel=0.1)
    assert draws.attrs["unique"] > 500 and draws.attrs["pareto_k"] < 0.7


def scales(y: Any) -> pm.Model:
    """Two small values of unknown sd: what q says of tau² has no end."""
    with pm.Model() as model:
        tau = pm.HalfNormal("tau", 5)
        pm.Deterministic("variance", tau**2)
        pm.Normal("obs", 0, tau, observed=pm.Data("y", y))
    return model


@pytest.mark.parametrize("y", [[0.3, -0.5], [2.0]])
def test_what_has_heavy_tails_under_q_is_that_of_quadrature(y: list[float]) -> None:
    found = fit(FederatedModel(scales, ["tau"]), {"a": {"y": np.array(y)}})
    log_tau = np.linspace(-8, 5, 20001)
    tau = np.exp(log_tau)
    weights = np.exp(log_tau - tau**2 / 50 - len(y) * log_tau - 0.5 * np.sum(np.square(y)) / tau**2)
    weights /= weights.sum()
    table = found.summary()
    for name, values in (("tau", tau), ("variance", tau**2)):
        mean = weights @ values
        sd = np.sqrt(weights @ (values - mean) ** 2)
        row = table.loc[name]
        assert abs(row["mean"] - mean) < max(4 * row["mcse_mean"], 0.01 * sd) < 0.2 * sd
        assert abs(row["sd"] - sd) < max(4 * row["mcse_sd"], 0.01 * sd) < 0.4 * sd
        assert found.estimate[name] == row["mean"]


def test_the_evidence_of_schools_is_that_of_quadrature() -> None:
    from benchmarks._exactness import eight_schools

    _, _, evidence = eight_schools.quadrature(5.0, lambda x: stats.halfcauchy(scale=5).logpdf(np.exp(x)) + x)
    clients = {f"school{k}": {"y": eight_schools.EFFECTS[[k]], "s": eight_schools.ERRORS[[k]]} for k in range(8)}
    found = fit(FederatedModel(eight_schools.wide, ["mu", "tau"]), clients)
    assert found.log_evidence.value == pytest.approx(evidence, abs=0.01)


def test_a_clients_own_variables_are_those_of_the_corrected_posterior() -> None:
    """theta of a school given tau and mu is Gaussian, so its moments are known from the points."""
    model, clients = problems.schools()
    found = fit(model, clients)
    client_id = next(iter(clients))
    effect, error = (float(np.ravel(clients[client_id][name])[0]) for name in ("effect", "error"))
    state = found.state.correction
    names = found.layout.labels
    mu = state.reweighted.points[:, names.index("mu")]
    tau = np.exp(state.reweighted.points[:, names.index("tau_log__")])
    precision = 1 / tau**2 + 1 / error**2
    mean = (mu / tau**2 + effect / error**2) / precision
    exact = float(state.reweighted.weights @ mean)
    spread = float(np.sqrt(state.reweighted.weights @ (1 / precision + mean**2) - exact**2))
    theta = found.client(client_id)["posterior"]["theta"]
    assert abs(float(theta.mean()) - exact) < 4 * spread / np.sqrt(4000)
    assert float(theta.std()) == pytest.approx(spread, rel=4 / np.sqrt(2 * 1000))


def quiet(who: str) -> LocalInference:
    """Nested Laplace that has no log factor at one client."""
    inner = fedppl.local.NestedLaplace()
    assert inner.factor is not None
    answer = inner.factor

    def factor(client: ClientView, points: Array, center: Array, share: float) -> Factor:
        if client.client_id == who:
            raise LocalFailure("out of order")
        return answer(client, points, center, share)

    return inner._replace(factor=factor)


def test_who_does_not_answer_is_named_and_evidence_is_withheld() -> None:
    model, clients = problems.schools()
    silent = list(clients)[2]
    with pytest.warns(fedppl.ConvergenceWarning, match=f"{silent}.*did not answer"):
        found = fit(model, clients, fedppl.EP(local=quiet(silent)))
    assert found.status is Status.STALLED
    assert "corrected_mean" not in found.idata["fit"]
    with pytest.raises(NotConvergedError, match="not to be trusted"):
        _ = found.log_evidence


def answering(change: Callable[[Factor, Array, Array], Factor]) -> LocalInference:
    """Nested Laplace with other answers, of its own, the points and the center."""
    inner = fedppl.local.NestedLaplace()
    answer = inner.factor
    assert answer is not None

    def factor(client: ClientView, points: Array, center: Array, prior_share: float) -> Factor:
        return change(answer(client, points, center, prior_share), points, center)

    return inner._replace(factor=factor)


def lost(share: float) -> LocalInference:
    """The search fails at a share of the points."""
    return answering(lambda found, points, _: without(found, np.arange(len(points)) % round(1 / share) == 7))


def without(found: Factor, where: Any) -> Factor:
    return found._replace(values=np.where(where, np.nan, found.values))


def test_few_points_without_a_value_do_no_harm_and_many_are_said() -> None:
    model, clients = problems.schools()
    few = fit(model, clients, fedppl.EP(local=lost(1 / 200)))
    assert few.status is Status.CONVERGED
    found = few.state.correction.reweighted
    assert 1 - found.told / len(found.points) == pytest.approx(1 / 200, rel=0.25)
    with pytest.warns(fedppl.ConvergenceWarning, match="no log density"):
        assert fit(model, clients, fedppl.EP(local=lost(1 / 20))).status is Status.STALLED


def lost_below(bound: float) -> LocalInference:
    """The search fails where the second coordinate is small."""
    return answering(lambda found, points, _: without(found, points[:, 1] < bound))


def test_points_without_a_value_are_said_by_what_they_may_move_however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_correction, "_LOST", 0.5)  # points are many in such a tail: the share alone would say it
    model, clients = problems.schools()
    whole = fit(model, clients, fedppl.EP())
    with pytest.warns(fedppl.ConvergenceWarning, match="no log density"):
        cut = fit(model, clients, fedppl.EP(local=lost_below(-2.0)))
    one, other = whole.state.correction.reweighted, cut.state.correction.reweighted
    moved = apart(one, other, gaussian.standard_deviations(whole.posterior))
    assert moved > 0.05
    assert cut.status is Status.STALLED
    assert fit(model, clients, fedppl.EP(local=lost(1 / 20))).status is Status.CONVERGED  # spread evenly


def unsure(size: float) -> LocalInference:
    """Log factors are said to be uncertain along the first coordinate."""
    return answering(lambda found, points, center: found._replace(errors=size * (points[:, 0] - center[0])))


def test_log_factors_that_are_not_known_well_enough_are_not_called_converged() -> None:
    model, clients = problems.schools()
    assert fit(model, clients, fedppl.EP(local=unsure(1e-4))).status is Status.CONVERGED
    with pytest.warns(fedppl.ConvergenceWarning, match="uncertain"):
        fit(model, clients, fedppl.EP(local=unsure(0.1)))


def wrong_in_the_tail(size: float, where: float) -> LocalInference:
    """So much is added where the log of tau is low, and said."""

    def change(found: Factor, points: Array, center: Array) -> Factor:
        added = size * (points[:, 1] < center[1] - where)
        return found._replace(values=found.values + added, errors=found.errors + added)

    return answering(change)


@pytest.mark.parametrize(("size", "where"), [(0.1, 1.4), (0.12, 1.7), (0.2, 1.85)])
def test_errors_are_weighed_by_the_posterior_not_by_q(size: float, where: float) -> None:
    """They lie in the tail that q lacks."""
    model, clients = problems.schools()
    with pytest.warns(fedppl.ConvergenceWarning, match="uncertain"):
        assert fit(model, clients, fedppl.EP(local=wrong_in_the_tail(size, where))).status is Status.STALLED


def test_answers_are_gathered_over_rounds_where_few_are_asked() -> None:
    model, clients = problems.schools()
    all_at_once, few = fit(model, clients), fit(model, clients, participation=3, rounds=200)
    assert few.status is Status.CONVERGED
    last = [record for record in few.records if record.info["phase"] == "correction"]
    assert len(last) > 3 and all(record.preliminary for record in last)
    ours, theirs = (one.idata["fit"]["corrected_mean"].values for one in (few, all_at_once))
    sd = np.sqrt(np.diag(all_at_once.idata["fit"]["corrected_covariance"].values))
    assert np.abs((ours - theirs) / sd).max() < 0.05


def test_rounds_that_ran_out_near_the_end_leave_the_same_posterior(tmp_path: Any) -> None:
    """It is saved as it was before, so that more rounds go on from there."""
    model, clients = problems.schools()
    whole, path = fit(model, clients), tmp_path / "run"
    early = fit(model, clients, rounds=4, checkpoint=path)
    assert early.status is Status.CONVERGED and "ran out" in early.message and whole.message == ""
    sd = np.sqrt(np.diag(whole.idata["fit"]["corrected_covariance"].values))
    shift = early.idata["fit"]["corrected_mean"].values - whole.idata["fit"]["corrected_mean"].values
    assert np.abs(shift / sd).max() < 0.02 and early.log_evidence.value == pytest.approx(
        whole.log_evidence.value, abs=0.01
    )
    again = fit(model, clients, checkpoint=path)
    assert again.message == ""
    assert_allclose(again.posterior.linear, whole.posterior.linear, rtol=0, atol=0)
    with pytest.warns(fedppl.ConvergenceWarning, match="raise rounds="):
        assert fit(model, clients, rounds=1).status is Status.MAX_ROUNDS


def test_a_correction_is_resumed_to_the_same_numbers(tmp_path: Any) -> None:
    model, clients = problems.schools()
    whole = fit(model, clients, participation=3, rounds=200)
    first = next(r.number for r in whole.records if r.info["phase"] == "correction")
    path = tmp_path / "run"

    def stop(step: fedppl.Round) -> bool:
        return step.number == first + 1

    with pytest.warns(fedppl.ConvergenceWarning):
        fit(model, clients, participation=3, rounds=200, checkpoint=path, callback=stop)
    again = fit(model, clients, participation=3, rounds=200, checkpoint=path)
    assert again.log_evidence == whole.log_evidence
    assert len(again.records) == len(whole.records)


def test_rounds_do_not_count_and_are_there_when_rounds_run_out_on_convergence() -> None:
    model, clients = problems.schools()
    plenty = fit(model, clients)
    counted = sum(not record.preliminary for record in plenty.records)
    assert fit(model, clients, rounds=counted).status is Status.CONVERGED


def test_sites_are_not_asked_by_default_and_their_policy_decides(caplog: pytest.LogCaptureFixture) -> None:
    model, clients = problems.schools()
    lenient = {
        "rows": 0,
        "few_rows": 0,
        "parameters_per_row": np.inf,
        "events": 0,
        "cavity": np.inf,
        "distance": np.inf,
    }
    with pytest.warns(fedppl.ConvergenceWarning, match="heavier tails"):  # of few clients, without a correction
        plain = fit(model, clients, engine=fedppl.InProcess(policy=fedppl.Policy(**lenient)))
    assert diagnostics.matched(plain.status, plain.message)
    assert all(record.info["phase"] != "correction" for record in plain.records)
    asked = fedppl.EP(correction=fedppl.Correction())
    allowing = fedppl.Policy(**lenient, correction=16 * 1024)
    assert fit(model, clients, asked, engine=fedppl.InProcess(policy=allowing)).idata["fit"]["corrected_mean"].size == 2
    with caplog.at_level(logging.WARNING), pytest.warns(fedppl.ConvergenceWarning, match="did not answer"):
        fit(model, clients, asked, engine=fedppl.InProcess(policy=fedppl.Policy(**lenient)))
    assert any("correction:" in record.getMessage() for record in caplog.records)


def flat_local(y: Any) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 2)
        theta = pm.Flat("theta")
        pm.Normal("obs", pm.math.stack([mu + theta, theta]), 1, observed=y)
    return model


def test_improper_priors_have_no_evidence() -> None:
    rng = np.random.default_rng(1)
    found = fit(FederatedModel(flat_local, ["mu"]), {k: {"y": rng.normal(size=(9, 2))} for k in "abc"})
    with pytest.raises(DeclarationError, match="normalising constant"):
        _ = found.log_evidence


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"points": 100}, "points=100 must be a whole number, at least 512"),
        ({"points": 1001}, "take 1008"),
        ({"points": 2**40}, "at most 1048576"),
        ({"exchanges": 0}, "exchanges=0"),
        ({"exchanges": 9}, "exchanges=9: at most 8"),
        ({"points": True}, "points=True"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, told: str) -> None:
    with pytest.raises(DeclarationError, match=told):
        fedppl.Correction(**settings)


@pytest.mark.parametrize("value", [True, "yes", 1024, fedppl.Correction])
def test_what_is_no_correction_is_refused(value: Any) -> None:
    with pytest.raises(DeclarationError, match="correction="):
        fedppl.EP(correction=value)


def test_a_local_inference_without_log_factors_cannot_be_corrected() -> None:
    with pytest.raises(DeclarationError, match="NestedLaplace"):
        fedppl.EP(local=fedppl.local.ADVI(), correction=fedppl.Correction())


def fixed_tau(effect: Any, error: Any) -> pm.Model:
    with pm.Model() as model:
        effect, error = pm.Data("effect", effect), pm.Data("error", error)
        mu = pm.Normal("mu", 0, 5)
        theta = pm.Normal("theta", mu, 0.1)
        pm.Normal("obs", theta, error, observed=effect)
    return model


def test_models_are_compared_by_their_evidence() -> None:
    model, clients = problems.schools()
    pooled = fit(FederatedModel(fixed_tau, ["mu"]), clients)
    hierarchical = fit(model, clients)
    y, s = (np.array([float(np.ravel(data[name])[0]) for data in clients.values()]) for name in ("effect", "error"))
    exact = stats.multivariate_normal(np.zeros(8), np.diag(s**2 + 0.01) + 25.0).logpdf(y)
    table = fedppl.compare({"hierarchical": hierarchical, "pooled": pooled})
    assert table.loc["pooled", "log_evidence"] == pytest.approx(exact, abs=1e-6)
    assert list(table["rank"]) == [0, 1] and table["probability"].sum() == pytest.approx(1)
    assert table.loc["hierarchical", "probability"] / table.loc["pooled", "probability"] == pytest.approx(
        np.exp(hierarchical.log_evidence.value - exact)
    )


def test_other_data_are_not_compared() -> None:
    model, clients = normal_means(3)
    ours = fit(model, clients)
    fewer = fit(model, {k: v for k, v in list(clients.items())[:2]})
    with pytest.raises(fedppl.DataError, match="not of the same clients"):
        fedppl.compare({"a": ours, "b": fewer})
    shorter = fit(model, {k: {"y": v["y"][:5]} for k, v in clients.items()})
    with pytest.raises(fedppl.DataError, match="20 observations in fit"):
        fedppl.compare({"a": ours, "b": shorter})
    moved = fit(model, {k: {"y": v["y"] + 3.0} for k, v in clients.items()})
    for table in (fedppl.compare, fedppl.loo_compare):
        with pytest.raises(fedppl.DataError, match="same units"):
            table({"a": ours, "b": moved})
    turned = fit(model, {k: {"y": v["y"][::-1]} for k, v in clients.items()})
    assert fedppl.compare({"a": ours, "b": turned})["probability"].tolist() == pytest.approx([0.5, 0.5])
    with pytest.raises(fedppl.DataError, match="in this order"):
        fedppl.loo_compare({"a": ours, "b": turned})
    with pytest.raises(DeclarationError, match="two or more fits"):
        fedppl.compare({"a": ours})
    with pytest.raises(DeclarationError, match="no texts"):  # of 1 and "1" one would be lost
        fedppl.compare({1: ours, "1": turned})  # type: ignore[dict-item]


def test_a_newcomer_is_weighed_by_its_own_data() -> None:
    """A ninth school drawn from the corrected posterior of eight: by quadrature over the weighted points."""
    model, clients = problems.schools()
    found = fit(model, clients)
    effect, error = 40.0, 8.0
    state, names = found.state.correction.reweighted, found.layout.labels
    mu, tau = state.points[:, names.index("mu")], np.exp(state.points[:, names.index("tau_log__")])
    weights = state.weights * stats.norm(mu, np.hypot(tau, error)).pdf(effect)
    weights /= weights.sum()
    precision = 1 / tau**2 + 1 / error**2
    exact = float(weights @ ((mu / tau**2 + effect / error**2) / precision))
    theta = found.new_client({"effect": np.array([effect]), "error": np.array([error])})["posterior"]["theta"]
    assert_allclose(float(theta.mean()), exact, atol=4 * float(theta.std()) / np.sqrt(1 / np.sum(weights**2)))


def test_a_newcomer_beyond_the_points_is_drawn_from_q_and_told_so(caplog: pytest.LogCaptureFixture) -> None:
    model, clients = problems.schools()
    found = fit(model, clients)
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        drawn = found.new_client({"effect": np.array(300.0), "error": np.array(1.0)})
    assert "from the Gaussian q" in caplog.text and drawn["posterior"].attrs["fedppl_from_q"] == 1


# --- what each client does ---------------------------------------------------------------------------------------


def test_influence_is_the_posterior_of_the_other_clients() -> None:
    """Schools' tau has a prior that is no Gaussian, of which each client carries a share."""
    model, clients = problems.schools()
    found = fit(model, clients).influence()
    assert bool(found["exact"].all())
    for left_out in ("school A", "school G"):
        rest = fit(model, {name: data for name, data in clients.items() if name != left_out}).idata["fit"]
        sd = np.sqrt(np.diag(rest["corrected_covariance"]))
        ours = found.sel(client=left_out)
        assert_allclose((ours["mean"] - rest["corrected_mean"].values) / sd, 0, atol=0.03)
        assert_allclose(ours["sd"] / sd, 1, atol=0.03)
    whole = fit(model, clients)
    unknown = dataclasses.replace(whole, clients={})  # of sites of their own the prior is not known here
    assert not bool(unknown.influence()["exact"].any())
    assert list(fit(model, clients).influence("school B")["client"].values) == ["school B"]
    with pytest.raises(DeclarationError, match="school Z"):
        fit(model, clients).influence(["school Z"])


def test_influence_without_a_correction_is_of_the_gaussian() -> None:
    model, clients = normal_means(4)
    found = fit(model, clients, fedppl.EP(correction=None)).influence()
    corrected = fit(model, clients).influence()
    assert not bool(found["exact"].any()) and bool(corrected["exact"].all())
    assert_allclose(found["mean"], corrected["mean"], rtol=1e-6)
    assert_allclose(found["sd_ratio"], corrected["sd_ratio"], rtol=1e-6)
    with pytest.raises(DeclarationError, match="has no posterior of parameters that all clients share"):
        fit(model, clients, fedppl.one_shot.SeparateSGD(learning_rate=0.01), rounds=1).influence()


def test_a_client_that_lies_at_the_points_is_named_where_trust_is_set() -> None:
    """It sends honest moments, and then log factors that lean to one side."""
    model, clients = problems.schools()
    honest = fedppl.EP(trust=3.0)

    def lying(client: ClientView, personal: Any, message: Any, rng: Any) -> Any:
        update = honest.update_client(client, personal, message, rng)
        if client.client_id != "school C" or "points" not in message:
            return update
        steep = 4.0 * np.asarray(message["points"])[:, 0] if len(message["points"]) else 0.0
        return update._replace(reply={**update.reply, "values": update.reply["values"] + steep})

    with pytest.warns(fedppl.ConvergenceWarning, match="school C.*trust=3"):
        found = fit(model, clients, honest._replace(update_client=lying))
    assert found.status is Status.STALLED
    assert fit(model, clients, honest).status is Status.CONVERGED


# --- several modes -----------------------------------------------------------------------------------------------


def two_groups(y: Any) -> pm.Model:
    """A mixture of which the labels can be exchanged."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        center = pm.Normal("center", 0, 5, shape=2)
        pm.NormalMixture("obs", w=np.array([0.5, 0.5]), mu=center, sigma=1.0, observed=y)
    return model


@pytest.mark.slow
def test_several_modes_are_named_and_never_averaged_over() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": np.where(rng.random(30) < 0.4, -2, 3) + rng.normal(size=30)} for k in range(3)}
    model = FederatedModel(two_groups, ["center"])
    with pytest.warns(fedppl.ConvergenceWarning, match=r"several modes: along center\[.\], .*[45].% at .*[45].% at"):
        found = fit(model, clients, fedppl.EP(starts=6))
    assert found.status is Status.STALLED
    assert np.abs(gaussian.mean(found.posterior)).min() > 1  # one labelling, and not what lies between
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):  # who begins there is still in one of them
        assert fit(model, clients, fedppl.EP(starts=6), start=found).status is Status.STALLED
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):
        assert fedppl.without(found, "0", progressbar=False).fit.status is Status.STALLED


def far_apart(y: Any) -> pm.Model:
    """Modes many sds of the prior's Gaussian away from its middle."""
    with pm.Model() as model:
        pm.StudentT("obs", nu=2, mu=pm.Cauchy("mu", 0, 1), sigma=1, observed=pm.Data("y", y))
    return model


def test_modes_in_the_tails_of_the_prior_are_found() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": (8.0 if k % 2 else -8.0) + rng.normal(size=2)} for k in range(4)}
    steps = fedppl.rounds(FederatedModel(far_apart, ["mu"]), clients, fedppl.EP(starts=4), rounds=1, random_seed=1)
    *_, last = steps
    modes = np.array([mode.point[0] for mode in last.state.starts.modes])
    mass = np.exp([mode.log_mass for mode in last.state.starts.modes])
    at = np.linspace(-20, 20, 20001)
    logs = stats.cauchy.logpdf(at) + sum(stats.t(2).logpdf(y - at) for data in clients.values() for y in data["y"])
    exact = np.sum(np.exp(logs[at < 0])) / np.sum(np.exp(logs))
    left, right = (mass[np.abs(modes - sign * 7.5) < 1].max() for sign in (-1, 1))
    assert left / (left + right) == pytest.approx(exact, abs=0.05)


def searches(fit: fedppl.Fit) -> int:
    """Rounds of warm starts."""
    return sum(record.info["phase"] == "warm start" for record in fit.records)


def test_several_starts_change_nothing_where_there_is_one_mode() -> None:
    """The first search that came to the mode is gone on from, to the last digit."""
    model, clients = problems.regression()
    one, several = fit(model, clients, fedppl.EP(starts=1)), fit(model, clients)
    assert several.status is Status.CONVERGED
    assert searches(several) > searches(one)
    assert_array_equal(gaussian.mean(several.posterior), gaussian.mean(one.posterior))
    assert_array_equal(several.posterior.precision, one.posterior.precision)
    assert searches(fit(model, clients, fedppl.EP(starts=6))) > searches(several)


def test_the_default_finds_a_second_mode_and_does_not_converge() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": (8.0 if k % 2 else -8.0) + rng.normal(size=2)} for k in range(4)}
    model = FederatedModel(far_apart, ["mu"])
    one = fit(model, clients, fedppl.EP(starts=1))  # the correction has both modes: 74 % below 0, by quadrature
    assert one.status is Status.CONVERGED
    assert abs(np.mean(one.idata["posterior"]["mu"].values < 0) - 0.741) < 0.03
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes: along mu"):
        assert fit(model, clients).status is Status.STALLED


def shared_out(y: Any) -> pm.Model:
    """Two levels, and the share of the first: both may be exchanged, and the middle of the prior is no saddle."""
    with pm.Model() as model:
        y, share = pm.Data("y", y), pm.Beta("share", 2, 2)
        level, sd = pm.Normal("level", 0, 2, shape=2), pm.HalfNormal("sd", 1)
        pm.NormalMixture("obs", pm.math.stack([share, 1 - share]), level, sd, observed=y)
    return model


def test_the_default_finds_labels_that_may_be_exchanged() -> None:
    rng = np.random.default_rng(3)
    clients = {str(k): {"y": np.where(rng.random(60) < 0.6, -0.5, 2.0) + 0.6 * rng.normal(size=60)} for k in range(5)}
    model = FederatedModel(shared_out, ["level", "sd", "share"])
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes: along level"):
        found = fit(model, clients)
    modes = found.state.starts.modes
    assert any(np.max(np.abs(mode.point[:2] - modes[0].point[1::-1]) / mode.sd[:2]) < 1 for mode in modes)


def scalars(y: Any) -> pm.Model:
    """The same, whose levels are two variables, far from the middle of their prior."""
    with pm.Model() as model:
        y, share = pm.Data("y", y), pm.Beta("share", 2, 2)
        first, second, sd = pm.Normal("first", 0, 10), pm.Normal("second", 0, 10), pm.HalfNormal("sd", 1)
        pm.NormalMixture("obs", pm.math.stack([share, 1 - share]), pm.math.stack([first, second]), sd, observed=y)
    return model


def test_a_better_mode_that_is_found_late_has_images_of_its_own() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": np.where(rng.random(40) < 0.5, 9.5, 12.5) + 0.6 * rng.normal(size=40)} for k in range(4)}
    model = FederatedModel(scalars, ["first", "second", "sd", "share"])
    with pytest.warns(fedppl.ConvergenceWarning, match=r"several modes: along (first|second), .*[45].% at .*[45].% at"):
        assert fit(model, clients, fedppl.EP(starts=8)).status is Status.STALLED


@pytest.mark.parametrize("missed", range(6, 24))
def test_a_reply_that_is_missed_in_a_search_does_not_choose_the_mode(missed: int) -> None:
    """Three clients of five are at 8: the mode there has all the mass."""
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": (8.0 if k < 3 else -8.0) + rng.normal(size=3)} for k in range(5)}
    model, rounds = FederatedModel(far_apart, ["mu"]), iter(range(10**6))

    def broken(client: Any, personal: None, message: Any, rng: Any) -> Any:
        if client.client_id == "0" and next(rounds) == missed:
            raise LocalFailure("away")
        return whole.update_client(client, personal, message, rng)

    whole = fedppl.EP(starts="auto")
    found = fit(model, clients, whole._replace(update_client=broken))
    assert gaussian.mean(found.posterior)[0] > 5


def test_modes_of_clients_that_left_are_forgotten() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": (8.0 if k < 2 else -8.0) + rng.normal(size=2)} for k in range(4)}
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):
        found = fit(FederatedModel(far_apart, ["mu"]), clients)
    assert fedppl.without(found, ["2", "3"], progressbar=False).fit.status is Status.CONVERGED


def unequal_shares(y: Any) -> pm.Model:
    """Shares that are known tell labels apart where there are many rows."""
    with pm.Model() as model:
        first, second = pm.Normal("first", 0.3, 5), pm.Normal("second", -0.3, 5)
        pm.NormalMixture("obs", [0.3, 0.7], pm.math.stack([first, second]), 0.8, observed=pm.Data("y", y))
    return model


def test_a_mode_without_mass_may_have_some_when_a_client_has_left() -> None:
    rng = np.random.default_rng(3)
    rows = {"K": (12, 40), "A": (5, 5), "B": (4, 5), "C": (5, 5)}  # at 6, and at 2
    clients = {
        name: {"y": np.repeat([6.0, 2.0], each) + 0.8 * rng.normal(size=sum(each))} for name, each in rows.items()
    }
    found = fit(FederatedModel(unequal_shares, ["first", "second"]), clients)
    assert found.status is Status.CONVERGED
    with pytest.warns(fedppl.ConvergenceWarning, match="several modes"):
        left = fedppl.without(found, "K", certificate=False, progressbar=False)
    assert left.fit.status is Status.STALLED


def test_a_run_that_was_cut_off_between_searches_goes_on_as_it_would_have(tmp_path: Path) -> None:
    model, clients = problems.regression()
    whole, path = fit(model, clients), tmp_path / "run.ckpt"
    assert searches(whole) > 7
    begun = itertools.islice(fedppl.rounds(model, clients, fedppl.EP(), checkpoint=path, random_seed=1), 7)
    assert [step.record.info["phase"] for step in begun] == 7 * ["warm start"]
    resumed = fit(model, clients, checkpoint=path)
    assert len(resumed.records) == len(whole.records)
    assert_array_equal(gaussian.mean(resumed.posterior), gaussian.mean(whole.posterior))


def test_searches_that_nobody_asked_for_are_left_out_where_rounds_are_of_few_clients() -> None:
    model, clients = problems.regression()
    found = fit(model, clients, participation=1)
    assert searches(found) == searches(fit(model, clients, fedppl.EP(starts=1), participation=1))


def exploding(y: Any) -> pm.Model:
    """Rates without bound: at many points of the prior there is no expansion."""
    with pm.Model() as model:
        pm.Poisson("obs", pm.math.exp(pm.Normal("mu", 0, 100)), observed=pm.Data("y", y))
    return model


def test_a_search_begins_nearer_where_clients_have_no_expansion() -> None:
    rng = np.random.default_rng(1)
    clients = {str(k): {"y": rng.poisson(7.0, size=20)} for k in range(3)}
    found = fit(FederatedModel(exploding, ["mu"]), clients)
    assert found.status is Status.CONVERGED
    assert not any(record.failures for record in found.records)


def test_what_several_starts_do_not_go_with_is_refused() -> None:
    for settings in ({"trust": 3.0}, {"warm_start": False}, {}):
        with pytest.raises(DeclarationError, match="starts="):
            fedppl.EP(starts=2 if settings else 0, **settings)
