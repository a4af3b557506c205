"""Settings, runs and results that people ask for by mistake. One model is compiled, and fitted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import pytest

import fedppl
from fedppl import ConvergenceWarning
from fedppl.testing import normal_means
from tests.support.mistakes import Mistake, refused, row

Y = np.array([0.5, 1.5, 1.0])
MODEL, CLIENTS = normal_means(2)
FRAME = pd.DataFrame({"site": list("aabb"), "y": [1.0, 2.0, 3.0, 4.0]})


@functools.cache
def fitted() -> fedppl.Fit:
    fit: fedppl.Fit = fedppl.fit(MODEL, CLIENTS, progressbar=False, random_seed=1)
    return fit


def of_fit(call: Callable[[fedppl.Fit], Any]) -> Callable[[], Any]:
    return lambda: call(fitted())


def start(**more: Any) -> Callable[[], Any]:
    return lambda: fedppl.rounds(MODEL, CLIENTS, **more)


def setting(build: Callable[..., Any], **more: Any) -> Callable[[], Any]:
    return lambda: build(**more)


# What an outside look at the library found confusing, in its order.
CONFUSING: dict[str, Mistake] = {
    "EP(local=fedppl.local.NUTS)": row(
        setting(fedppl.EP, local=fedppl.local.NUTS), "local=fedppl.local.NUTS", "call it: fedppl.local.NUTS()"
    ),
    "EP(local='nuts')": row(setting(fedppl.EP, local="nuts"), "local='nuts'", "fedppl.local.NUTS()"),
    "engine=fedppl.InProcess": row(start(engine=fedppl.InProcess), "call it: fedppl.InProcess()"),
    "complex data": row(lambda: fedppl.rounds(MODEL, {"a": {"y": Y + 1j}}), "'y'", "complex128", "real"),
    "NUTS(target_accept=1.2)": row(setting(fedppl.local.NUTS, target_accept=1.2), "target_accept=1.2", "0.99"),
    "hypotheses(rope=0.1)": row(of_fit(lambda fit: fedppl.hypotheses(fit, rope=0.1)), "rope=0.1", "(low, high)"),
    "az.summary(fit)": row(of_fit(lambda fit: az.summary(fit)), "fit.idata"),
    "az.loo(fit)": row(of_fit(lambda fit: az.loo(fit)), "fit.idata"),
    "an unexpected column": row(
        lambda: fedppl.rounds(MODEL, {"a": {"y": Y, "z": Y}}), "no argument for 'z'", "drop 'z'"
    ),
    "participation=5": row(start(participation=5), "participation=5", "clients, 2", "at most 2"),
}
ROWS: dict[str, Mistake] = {
    # --- arguments of a fit
    "a fit without a model": row(lambda: fedppl.rounds(CLIENTS, MODEL), "dict", "model comes first"),
    "a builder for a model": row(lambda: fedppl.rounds(lambda y: None, CLIENTS), "FederatedModel(builder"),
    "a model of PyMC": row(lambda: fedppl.rounds(pm.Model(), CLIENTS), "Model", "FederatedModel(builder"),
    "an algorithm's class": row(start(algorithm=fedppl.EP), "call it: fedppl.EP()"),
    "an algorithm's name": row(start(algorithm="ep"), "'ep'", "fedppl.EP()"),
    "a local inference for it": row(start(algorithm=fedppl.local.NUTS()), "EP(local=...)"),
    "algorithms in a list": row(start(algorithm=[fedppl.EP()]), "no algorithm", "fedppl.EP()"),
    "an engine's name": row(start(engine="ray"), "engine='ray'", "fedppl.InProcess()"),
    "an engine of nothing": row(start(engine=lambda algorithm, models: None), "gave None", "fedppl.InProcess()"),
    "no rounds": row(start(rounds=0), "rounds=0", "at least 1"),
    "half a round": row(start(rounds=1.5), "rounds=1.5", "whole number"),
    "ids for participation": row(start(participation={"client 0"}), "participation={'client 0'}", "number of clients"),
    "a share above one": row(start(participation=1.5), "participation=1.5", "probability"),
    "no report": row(start(reporting=0), "reporting=0", "at least 1"),
    "a deadline of the past": row(start(deadline=-1), "deadline=-1", "seconds"),
    "an endless deadline": row(start(deadline=np.inf), "deadline=inf", "None waits"),
    "a checkpoint of bytes": row(start(checkpoint=b"x"), "checkpoint=b'x'", "path"),
    "a checkpoint nowhere": row(start(checkpoint="/no/such/folder/run.ckpt"), "folder", "create it first"),
    "a negative seed": row(start(random_seed=-1), "random_seed=-1", "non-negative int"),
    "a seed of NumPy before 1.17": row(start(random_seed=np.random.RandomState(1)), "random_seed=", "Generator"),
    "draws to start from": row(start(start={"mu": 1.0}), "start={'mu': 1.0}", "must be a fit"),
    "draws of a fit to start from": row(of_fit(lambda fit: fedppl.rounds(MODEL, CLIENTS, start=fit.idata)), "be a fit"),
    "another algorithm's fit": row(
        of_fit(lambda fit: fedppl.rounds(MODEL, CLIENTS, fedppl.averaging.FedAvg(learning_rate=0.1), start=fit)),
        "leave start="
    ),
    # --- settings
    "a tolerance of one": row(setting(fedppl.EP, tolerance=1), "tolerance=1", "posterior sds"),
    "too long a step": row(setting(fedppl.EP, damping=2), "damping=2", "undamped"),
    "a text for a switch": row(setting(fedppl.EP, warm_start="yes"), "warm_start='yes'", "True or False"),
    "a billion starts": row(setting(fedppl.EP, starts=10**9), "starts=1000000000", "from 1 to 1000"),
    "half a start": row(setting(fedppl.EP, starts=1.5), "starts=1.5", "whole number"),
    "a form of one word": row(setting(fedppl.EP, structure="diag"), "structure='diag'", '"diagonal"'),
    "a block of another name": row(start(algorithm=fedppl.EP(structure=[["mu"], ["tau"]])), "'tau'", "['mu']"),
    "a trust of nothing": row(setting(fedppl.EP, trust=0), "trust=0", "None for no bound"),
    "a sampler of another": row(setting(fedppl.local.NUTS, nuts_sampler="stan"), "nuts_sampler='stan'", '"nutpie"'),
    "too few points": row(setting(fedppl.local.NestedLaplace, points=4), "points=4", "64 or 256"),
    "a structure by name": row(setting(fedppl.HM1, structure="full"), "structure='full'", "fedppl.covariance"),
    "no noise": row(
        setting(fedppl.PrivateEP, clip=1.0, noise_multiplier=0, releases=3), "noise_multiplier=0", "at least"
    ),
    "weights by name": row(setting(fedppl.averaging.FedAvg, learning_rate=0.1, weights="n"), "weights='n'", '"rows"'),
    "conclusions of a flag": row(setting(fedppl.Policy, conclusions=True), "conclusions=True", "'loo'"),
    "too few points to weigh": row(setting(fedppl.Sums, points=10), "points=10", "from 64"),
    # --- clients and predictions
    "another client": row(of_fit(lambda fit: fit.client("client 9")), "'client 9'", "['client 0'", "fit.new_client"),
    "a list of clients": row(of_fit(lambda fit: fit.client(["client 0"])), "did not take part"),
    "another group": row(of_fit(lambda fit: fit.client("client 0", groups="loglik")), "loglik", "log_likelihood"),
    "no draws": row(of_fit(lambda fit: fit.client("client 0", draws=0)), "draws=0", "from 1"),
    "chains as a text": row(of_fit(lambda fit: fit.client("client 0", chains="4")), "chains='4'", "whole number"),
    "nothing to predict": row(of_fit(lambda fit: fit.predict("client 0", None)), "new_data=None", "by name"),
    "an array to predict": row(of_fit(lambda fit: fit.predict("client 0", Y)), "ndarray", "mapping"),
    "no rows to predict": row(of_fit(lambda fit: fit.predict("client 0", {"y": []})), "'y'", "a row or more"),
    "complex inputs": row(of_fit(lambda fit: fit.predict("client 0", {"y": Y + 1j})), "'y'", "real"),
    "inputs of another name": row(of_fit(lambda fit: fit.predict("client 0", {"z": Y})), "['z']", "['y']"),
    "inputs of another shape": row(of_fit(lambda fit: fit.predict("client 0", {"y": Y[:, None]})), "(3, 1)", "columns"),
    "a gap in inputs": row(of_fit(lambda fit: fit.predict("client 0", {"y": [np.nan]})), "'y'", "drop or impute"),
    "a new client by id": row(of_fit(lambda fit: fit.new_client("client 0")), "str", "mapping"),
    "all clients as a new one": row(of_fit(lambda fit: fit.new_client(CLIENTS)), "'client 0'", "array"),
    "a new client's number": row(of_fit(lambda fit: fit.new_client({"y": Y}, name=3)), "name=3", "text"),
    # --- summaries
    "a local in the summary": row(of_fit(lambda fit: fit.summary("theta")), "['theta']", "['mu']"),
    "no variable": row(of_fit(lambda fit: fit.summary([])), "var_names=[]", "['mu']"),
    "a percentage": row(of_fit(lambda fit: fit.summary(ci_prob=94)), "ci_prob=94", "between 0 and 1"),
    "decimals as a text": row(of_fit(lambda fit: fit.summary(round_to="2")), "round_to='2'", "whole number"),
    "negative decimals": row(of_fit(lambda fit: fit.summary(round_to=-1)), "round_to=-1", "at least 0"),
    "the influence of another": row(of_fit(lambda fit: fit.influence("zz")), "'zz'", "['client 0'"),
    "the influence of bytes": row(of_fit(lambda fit: fit.influence(b"a")), "b'a'", "['client 0'"),
    "an array of a fit": row(of_fit(np.asarray), "fit.idata"),
    # --- files
    "no path": row(of_fit(lambda fit: fit.save(None)), "path=None", "run.nc"),
    "a folder": row(of_fit(lambda fit: fit.save("/")), "a folder", "run.nc"),
    "a folder that is not there": row(of_fit(lambda fit: fit.save("/no/such/run.nc")), "folder", "run.nc"),
    "another file": row(lambda: fedppl.load(__file__, MODEL), "no fit", kinds=Exception),
    "no file": row(lambda: fedppl.load("no such.nc", MODEL), "'no such.nc'", "fit.save"),
    "path and model swapped": row(lambda: fedppl.load(MODEL, "run.nc"), "str", "FederatedModel"),  # type: ignore[arg-type]
    # --- comparisons and tests
    "loo of draws": row(of_fit(lambda fit: fedppl.loo(fit.idata)), "fit is ", "fedppl.fit", kinds=Exception),
    "loo of a list": row(of_fit(lambda fit: fedppl.loo([fit])), "list", "fedppl.fit"),
    "one fit to compare": row(of_fit(lambda fit: fedppl.compare({"a": fit})), "two or more"),
    "fits in a list": row(of_fit(lambda fit: fedppl.loo_compare([fit, fit])), "two or more", "by name"),
    "fits by number": row(of_fit(lambda fit: fedppl.loo_compare({"a": fit, 2: fit})), "[2]", "'2'"),
    "conflict with another": row(of_fit(lambda fit: fedppl.conflict(fit, "zz")), "'zz'", "['client 0'"),
    "everybody leaves": row(of_fit(lambda fit: fedppl.without(fit, list(CLIENTS))), "nobody is left", "stay"),
    "nobody leaves": row(of_fit(lambda fit: fedppl.without(fit, [])), "clients=[]", "name some"),
    "a contrast of another": row(of_fit(lambda fit: fedppl.contrast(fit, fit, "zz")), "'zz'", "['mu']"),
    "a contrast of fits and numbers": row(of_fit(lambda fit: fedppl.contrast(fit, 3, "mu")), "int", "fit.idata"),
    "a table for draws": row(lambda: fedppl.hypotheses(pd.DataFrame({"mu": [1.0]})), "DataFrame", "fit.idata"),
    "a number for names": row(of_fit(lambda fit: fedppl.hypotheses(fit, var_names=3)), "var_names=3", "['mu']"),
    "no name": row(of_fit(lambda fit: fedppl.hypotheses(fit, var_names=[])), "var_names=[]", "['mu']"),
    "calibration of a point": row(
        lambda: fedppl.calibrate(MODEL, CLIENTS, fedppl.averaging.FedAvg(learning_rate=0.1)), "FedAvg", "fedppl.EP()"
    ),
    "a fit for a calibration": row(of_fit(fedppl.plots.calibration), "fedppl.calibrate"),
    # --- searches
    "a frame to divide": row(lambda: fedppl.search.holdout(FRAME, 0.2, random_seed=1), "DataFrame", 'groupby("site")'),
    "all rows held out": row(lambda: fedppl.search.holdout(CLIENTS, 1, random_seed=1), "fraction=1", "between 0 and 1"),
    "one row to divide": row(lambda: fedppl.search.holdout({"a": {"y": [1.0]}}, random_seed=1),
        "'a'", "leave the client"),
    "a frame to validate on": row(of_fit(lambda fit: fedppl.search.validation_loss(fit, FRAME)), "mapping"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFUSING)
def test_what_was_confusing_is_refused_in_words(name: str) -> None:
    refused(CONFUSING[name])


@pytest.mark.parametrize("name", ROWS)
def test_settings_and_questions_that_cannot_be_meant_are_refused_in_words(name: str) -> None:
    refused(ROWS[name])


def test_an_algorithm_and_a_test_of_a_fit_are_short() -> None:
    assert len(repr(fedppl.EP())) < 400
    assert list(fedppl.hypotheses(fitted()).index) == ["mu"]


def test_outcomes_out_of_all_proportion_to_the_prior_are_told_to_be_rescaled() -> None:
    far = {name: {"y": data["y"] * 1e9} for name, data in CLIENTS.items()}
    with pytest.warns(ConvergenceWarning, match="prior sds from its prior mean.*[Rr]escale"):
        fedppl.fit(MODEL, far, progressbar=False, random_seed=1)


def test_a_loaded_fit_says_whose_data_it_wants(tmp_path: Path) -> None:
    fitted().save(tmp_path / "run.nc")
    again = fedppl.load(tmp_path / "run.nc", MODEL)
    refused(row(lambda: again.client("client 0"), "'client 0'", "clients=..."))


def test_a_fit_may_stand_in_a_table() -> None:
    """It is no array where one is wanted, and an entry like any other where objects are."""
    fit = fitted()
    assert pd.Series([fit, fit]).iloc[1] is fit
    assert pd.DataFrame({"k": [1, 2], "fit": [fit, fit]})["fit"].iloc[0] is fit
    assert np.array([fit, fit], dtype=object)[0] is fit
