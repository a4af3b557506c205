"""A fit in a file: the same numbers in a fresh process, nothing of a client's rows, and what is no such file."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import DataError, DeclarationError
from fedppl.results import idata
from fedppl.testing import normal_means
from tests import cases
from tests.support import problems, saving
from tests.support.markers import slow_but
from tests.support.saving import QUIET


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Any:
    model, clients = problems.noise()
    fit = fedppl.fit(model, clients, **QUIET)
    fit.save(folder / "run.nc")
    return model, clients, fit


def test_what_all_share_is_as_it_was(fitted: Any, folder: Path) -> None:
    model, clients, fit = fitted
    found = fedppl.load(folder / "run.nc", model)
    pd.testing.assert_frame_equal(found.summary(), fit.summary())
    assert (found.status, found.message, found.client_ids) == (fit.status, fit.message, fit.client_ids)
    assert_array_equal(found.posterior.linear, fit.posterior.linear)
    assert found.log_evidence == fit.log_evidence
    with pytest.raises(fedppl.DeclarationError, match="clients="):  # sums keep nothing of single clients
        found.influence()
    for name in fit.idata["posterior"].data_vars:
        assert_array_equal(found.idata["posterior"][name], fit.idata["posterior"][name])
    new = {name: value[:5] for name, value in next(iter(clients.values())).items()}
    assert_array_equal(*(one.new_client(new, draws=20)["posterior"]["theta"] for one in (fit, found)))
    with pytest.raises(DeclarationError, match=r"no draws of it were saved.*clients=\.\.\."):
        found.client(fit.client_ids[0])
    with pytest.raises(DataError, match="clients=..."):
        found.shared(random_seed=5)


def test_clients_come_back_with_their_data(fitted: Any, folder: Path) -> None:
    model, clients, fit = fitted
    found = fedppl.load(folder / "run.nc", model, clients=clients)
    name = fit.client_ids[1]
    assert_array_equal(*(one.client(name, draws=50)["posterior"]["theta"] for one in (fit, found)))
    with pytest.raises(DataError, match=r"\['elsewhere'\] did not take part"):
        fedppl.load(folder / "run.nc", model, clients={"elsewhere": clients[name]})


QUICK = ("formula",)
OTHERS = tuple(name for name in saving.RUNS if name not in QUICK)


@pytest.mark.parametrize("names", slow_but([QUICK, OTHERS]), ids=["one", "all others"])
def test_fresh_processes_predict_the_same_to_the_bit(names: tuple[str, ...], tmp_path: Path) -> None:
    """The one that compiled may differ in last digits: LLVM merges what is compiled beside each other."""
    here = {}
    for name in names:
        run = saving.RUNS[name]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fedppl.ConvergenceWarning)  # six rounds are not meant to do
            fit = run.fit()
        fit.save(tmp_path / f"{name}.nc", include=run.include)
        here[name] = saving.told(run, fit)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.saving", str(tmp_path), *names]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
        for _ in range(2)
    )
    assert first.splitlines()[-1] == second.splitlines()[-1]
    there = json.loads(first.splitlines()[-1])
    assert there.keys() == here.keys()
    for name, ours in here.items():
        assert there[name].keys() == ours.keys()
        for key, value in ours.items():
            if key in ("message", "ids"):
                assert there[name][key] == value
            else:
                assert_allclose(there[name][key], value, rtol=1e-8, atol=1e-10, err_msg=f"{name}: {key}")


@pytest.mark.parametrize(
    "algorithm",
    [
        fedppl.averaging.FedAvg(learning_rate=0.05, steps=2),
        fedppl.HM1(),
        fedppl.one_shot.Separate(),
        fedppl.one_shot.PrecisionWeighted(),
    ],
    ids=lambda one: str(one.name),
)
def test_every_kind_of_result_can_be_saved(algorithm: Any, tmp_path: Path) -> None:
    model, clients = normal_means(4)
    fit = fedppl.fit(model, clients, algorithm, rounds=5, **QUIET)
    fit.save(tmp_path / "run.nc")
    found = fedppl.load(tmp_path / "run.nc", model, algorithm)
    assert set(found.idata) == set(fit.idata) and found.status is fit.status
    with pytest.raises(DeclarationError, match="pass the one that ran"):
        fedppl.load(tmp_path / "run.nc", model)


def test_nothing_of_a_row_is_in_the_file(folder: Path) -> None:
    model, clients = normal_means(3)
    secret = 31.41592653589793
    clients["client 1"]["y"][3] = secret
    fedppl.fit(model, clients, **QUIET).save(folder / "secret.nc")
    raw = (folder / "secret.nc").read_bytes()
    assert np.float64(secret).tobytes() not in raw and b"31.4159" not in raw
    assert b"theta" not in raw  # the local variable


def test_others_can_read_the_posterior(fitted: Any, folder: Path) -> None:
    _, _, fit = fitted
    with xr.open_dataset(folder / "run.nc", group="posterior", engine="h5netcdf") as group:
        assert_array_equal(group["mu"], fit.idata["posterior"]["mu"])


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", None])
def test_what_is_no_fit_is_said(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "run.nc"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="is no file|no fit that fedppl saved"):
        fedppl.load(path, normal_means()[0])


def test_another_declaration_is_refused(fitted: Any, folder: Path) -> None:
    other, clients = normal_means(2)
    with pytest.raises(DeclarationError, match="this model shares"):
        fedppl.load(folder / "run.nc", other)
    fit = fedppl.fit(other, clients, **QUIET)
    for path, words in ((3, "the path of a file"), ("", "the path of a file"), (folder, "is a folder")):
        with pytest.raises(DeclarationError, match=words):
            fit.save(path)
    with pytest.raises(DeclarationError, match="folder that does not exist"):
        fit.save(folder / "nowhere" / "run.nc")
    with pytest.raises(DeclarationError, match="include='all' must be"):
        fit.save(folder / "other.nc", include="all")
    assert not (folder / "other.nc").exists()


# --- what is a client's own -----------------------------------------------------------------------------------


def test_clients_draws_are_given_back_without_data(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model, clients = normal_means(3)
    fit = fedppl.fit(model, clients, **QUIET)
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        fit.save(tmp_path / "run.nc", include="clients")
    assert "draws of clients' local variables: it is confidential" in caplog.text
    assert stat.S_IMODE((tmp_path / "run.nc").stat().st_mode) == 0o600
    found = fedppl.load(tmp_path / "run.nc", model)
    theirs, ours = (one.client("client 2")["posterior"] for one in (fit, found))
    for name in theirs.variables:
        assert_array_equal(ours[name], theirs[name])
    assert dict(ours.attrs) == dict(theirs.attrs)
    ours["theta"][:] = 0.0  # a copy
    assert np.any(found.client("client 2", random_seed=fit.seed)["posterior"]["theta"] != 0.0)
    others: list[tuple[dict[str, Any], str]] = [
        ({"draws": 10}, "4 chains of 1000 by the fit's seed"),
        ({"chains": 1}, "only the saved draws are here"),
        ({"random_seed": 9}, "only the saved draws are here"),
        ({"predict": {"y": np.zeros(3)}}, "predictions need them"),
        ({"groups": "log_likelihood"}, "log_likelihood.* need them"),
    ]
    for keywords, words in others:
        with pytest.raises(DeclarationError, match=rf"{words}.*clients=\.\.\.") as caught:
            found.client("client 2", **keywords)
        assert "'client 2'" in str(caught.value)
    found.save(tmp_path / "again.nc", include="clients")
    again = fedppl.load(tmp_path / "again.nc", model)
    assert_array_equal(again.client("client 0")["posterior"]["theta"], fit.client("client 0")["posterior"]["theta"])
    others_read = idata.read(tmp_path / "run.nc")
    assert others_read["client_1"].attrs["client"] == "client 1" and "theta" in others_read["client_1"]
    assert others_read["fedppl"].attrs["confidential"].startswith("yes")
    raw = (tmp_path / "run.nc").read_bytes()
    assert not any(np.float64(value).tobytes() in raw for value in clients["client 0"]["y"])  # rows are not in it


def test_others_can_read_all_groups(fitted: Any, folder: Path) -> None:
    """ArviZ's own reader."""
    model, clients, fit = fitted
    fit.save(folder / "all.nc", include="clients")
    read = az.from_netcdf(folder / "all.nc")
    assert_array_equal(read["posterior"]["mu"], fit.idata["posterior"]["mu"])
    name = fit.client_ids[0]
    assert_array_equal(read["client_0"]["theta"], fit.client(name)["posterior"]["theta"])
    again = folder / "written again.nc"
    read.to_netcdf(str(again))  # packed, by ArviZ 0.x
    assert_array_equal(fedppl.load(again, model).posterior.linear, fit.posterior.linear)


def test_what_clients_keep_is_never_left_out_in_silence(tmp_path: Path) -> None:
    """A personal parameter that is not there would be replaced by another one."""
    model, clients = normal_means(3)
    algorithm = fedppl.averaging.Ditto(learning_rate=0.05, lam=0.1, steps=2)
    fit = fedppl.fit(model, clients, algorithm, rounds=3, **QUIET)
    fit.save(tmp_path / "without.nc")
    fit.save(tmp_path / "with.nc", include="personal")
    without, kept = (
        fedppl.load(tmp_path / f"{name}.nc", model, algorithm, clients=clients) for name in ("without", "with")
    )
    theirs, ours = (one.client("client 0", draws=2)["posterior"]["mu"] for one in (fit, kept))
    assert_array_equal(ours, theirs)
    assert without.estimate == fit.estimate
    for use in (lambda: without.client("client 0"), lambda: without.save(tmp_path / "c.nc", include="personal")):
        with pytest.raises(DeclarationError, match=r"personal state .* is not in the file.*include=\"personal\""):
            use()
    without.save(tmp_path / "without again.nc")
    again = fedppl.load(tmp_path / "without again.nc", model, algorithm, clients=clients)
    with pytest.raises(DeclarationError, match="personal state .* is not in the file"):
        again.client("client 0")


# --- copies ---------------------------------------------------------------------------------------------------


def test_a_fit_is_its_own_copy_and_pickles_say_what_to_do() -> None:
    fit = fedppl.fit(*normal_means(3), fedppl.EP(), **QUIET)
    assert copy.copy(fit) is fit and copy.deepcopy(fit) is fit
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"fit\.save\('run\.nc'\).*fedppl\.load"):
            pickle.dumps(fit, protocol)


# --- networks and curves --------------------------------------------------------------------------------------


def _round_trip(row: cases.Case, read: Any, tmp_path: Path) -> None:
    """With what clients keep the numbers are the same; without, they are the same or refused, and never others."""
    (model, clients), algorithm = row.problem(), row.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
        fit = fedppl.fit(model, clients, algorithm, rounds=2, **QUIET)
    fit.save(tmp_path / "with.nc", include="personal")
    fit.save(tmp_path / "without.nc")
    name = fit.client_ids[1]
    expected = read(fit, name, clients[name])
    loaded = fedppl.load(tmp_path / "with.nc", model, algorithm, clients=clients)
    assert_array_equal(read(loaded, name, clients[name]), expected)
    loaded = fedppl.load(tmp_path / "without.nc", model, algorithm, clients=clients)
    if fit.personal.get(name) is None:
        assert_array_equal(read(loaded, name, clients[name]), expected)
    else:
        with pytest.raises(DeclarationError, match="personal state .* is not in the file"):
            read(loaded, name, clients[name])


@pytest.mark.parametrize("name", ["FedSI", "NetworkAveraging", "NetworkConfidence"])
def test_networks_predict_the_same_or_say_what_is_missing(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    _round_trip(
        cases.CASES[name],
        lambda fit, client, data: fedppl.nn.predict(fit, client, {"X": data["X"]})["probability"],
        tmp_path,
    )


def test_curves_predict_the_same_or_say_what_is_missing(tmp_path: Path) -> None:
    _round_trip(
        cases.CASES["LMCAscent"],
        lambda fit, client, data: fedppl.curves.predict(fit, client, {"X": np.linspace(0, 1, 5)})["mean"],
        tmp_path,
    )


def test_draws_of_large_networks_are_refused_before_a_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedppl.results.saved._MOST", 100)
    fit = fedppl.fit(*normal_means(2), **QUIET)
    with pytest.raises(DeclarationError, match=r'draws of 1 of 2 clients take .* include="personal"'):
        fit.save(tmp_path / "run.nc", include="clients")
    assert not list(tmp_path.iterdir())


@problems.of_q
@pytest.mark.parametrize(
    ("text", "family"),
    [
        pytest.param("prop(s, n) ~ arm + (1 + arm | site)", "binomial", marks=pytest.mark.slow),
        ("Surv(t, d) ~ arm + x", "weibull"),
    ],
)
def test_a_file_of_a_formula_predicts_at_new_sites_without_any_rows_of_others(
    text: str, family: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"site": np.repeat(list("abc"), 40), "arm": rng.choice(["p", "q"], 120)})
    frame = frame.assign(x=rng.normal(size=120), n=rng.integers(5, 9, 120), t=rng.exponential(3.0, 120), d=1)
    frame["s"] = rng.binomial(frame["n"], 0.4)
    model = fedppl.formula(text, family=family)
    fit = fedppl.fit(model, frame, fedppl.EP(), by="site", **QUIET)
    fit.save(tmp_path / "risk.nc")
    again = fedppl.load(tmp_path / "risk.nc", model, fedppl.EP())
    assert not again.clients
    rows = frame.loc[:3, ["arm", "x", "n"]]
    ours, theirs = (one.predict(None, rows, kind="mean", random_seed=2)["predictions"] for one in (fit, again))
    for name in ours.data_vars:
        assert_array_equal(ours[name].values, theirs[name].values)


@problems.of_q
def test_rows_in_another_order_agree_on_the_same_but_for_rounding(tmp_path: Path) -> None:
    """Of a column about 0 the mean is rounding alone."""
    x = np.random.default_rng(0).normal(size=40)
    frame = pd.DataFrame({"site": list("aabb") * 10, "x": x - x.mean(), "y": x})
    model, algorithm = fedppl.formula("y ~ x", family="gaussian"), fedppl.EP()
    agreed, again = (fedppl.agree(model, rows, by="site").model for rows in (frame, frame.iloc[::-1]))
    assert agreed.agreement != again.agreement
    fedppl.fit(agreed, frame, algorithm, by="site", progressbar=False, random_seed=1).save(tmp_path / "fit.nc")
    assert not fedppl.load(tmp_path / "fit.nc", again, algorithm).clients


@problems.of_q
def test_a_formula_of_other_columns_is_another_declaration(tmp_path: Path) -> None:
    frame = pd.DataFrame({"site": list("aabbcc"), "x": np.arange(6.0), "y": [0.1, 1.2, 1.9, 3.2, 4.1, 4.8], "t": 1.0})
    model = fedppl.formula("y ~ x", family="gaussian")
    fedppl.fit(model, frame, fedppl.EP(), by="site", progressbar=False, random_seed=1).save(tmp_path / "fit.nc")
    far = fedppl.agree(model, frame.assign(x=frame["x"] + 10.0), by="site").model
    with pytest.raises(DeclarationError, match="agreed"):
        fedppl.load(tmp_path / "fit.nc", far, fedppl.EP())
    again = fedppl.agree(model, frame, by="site").model
    assert not fedppl.load(tmp_path / "fit.nc", again, fedppl.EP()).clients
    with pytest.raises(DeclarationError, match=r"another declaration.*\['t'\].*\['x', 'y'\]"):
        fedppl.load(tmp_path / "fit.nc", fedppl.formula("t ~ x", family="gaussian"), fedppl.EP())
    by_builder, clients = normal_means(3)
    fedppl.fit(by_builder, clients, fedppl.EP(), progressbar=False, random_seed=1).save(tmp_path / "other.nc")
    with pytest.raises(DeclarationError, match="another declaration"):
        fedppl.load(tmp_path / "other.nc", model, fedppl.EP())


@problems.of_q
def test_a_formula_with_another_prior_is_another_declaration(tmp_path: Path) -> None:
    """Without clients nothing is compiled that would tell; parameters are compared to the last digit."""
    frame = pd.DataFrame({"site": list("aabbcc"), "x": np.arange(6.0), "y": [0.1, 1.2, 1.9, 3.2, 4.1, 4.8]})
    own = {"x": fedppl.Prior("Normal", mu=0, sigma=np.array([1 / 3]))}
    how = fedppl.EP()
    fit = fedppl.fit(fedppl.formula("y ~ x", priors=own), frame, how, by="site", progressbar=False, random_seed=1)
    fit.save(tmp_path / "fit.nc")
    again = fedppl.load(tmp_path / "fit.nc", fedppl.formula("y ~ x", priors=own), how)
    pd.testing.assert_frame_equal(again.summary(), fit.summary())
    for other in ({}, {"x": fedppl.Prior("Normal", mu=0, sigma=0.333)}):
        with pytest.raises(DeclarationError, match="priors"):
            fedppl.load(tmp_path / "fit.nc", fedppl.formula("y ~ x", priors=other), how)


@pytest.mark.slow
@problems.of_q
def test_another_order_of_levels_is_another_declaration(tmp_path: Path) -> None:
    """By levels=, or by the categories of the data."""
    frame = pd.DataFrame({"site": list("aabbcc"), "arm": list("uvuvvu"), "y": [0.1, 1.2, 0.3, 1.1, 1.4, 0.2]})
    frame["arm"] = frame["arm"].astype("category")
    how = fedppl.EP()
    fit = fedppl.fit(fedppl.formula("y ~ arm"), frame, how, by="site", progressbar=False, random_seed=1)
    fit.save(tmp_path / "fit.nc")
    for same in ({}, {"levels": {"arm": ["u", "v"]}}):
        assert fedppl.load(tmp_path / "fit.nc", fedppl.formula("y ~ arm", **same), how).client_ids == ("a", "b", "c")
    with pytest.raises(DeclarationError, match=r"\['u', 'v'\] there.*\['v', 'u'\] here"):
        fedppl.load(tmp_path / "fit.nc", fedppl.formula("y ~ arm", levels={"arm": ["v", "u"]}), how)


@pytest.mark.slow
@problems.of_q
def test_an_ordinal_outcome_in_another_order_is_another_declaration(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(
        {"site": list("abcd") * 15, "x": rng.normal(size=60), "o": rng.choice(["lo", "mid", "hi"], 60)}
    )
    up, down = (
        (pd.Categorical(frame["o"], order, ordered=True)) for order in (["lo", "mid", "hi"], ["hi", "mid", "lo"])
    )
    model, how = fedppl.formula("o ~ x", "ordinal"), fedppl.EP()
    fit = fedppl.fit(model, frame.assign(o=up), how, by="site", progressbar=False, random_seed=1)
    fit.save(tmp_path / "fit.nc")
    fedppl.load(tmp_path / "fit.nc", model, how, clients=frame.assign(o=up), by="site")
    with pytest.raises(DeclarationError, match="has the levels .* pass what was fitted"):
        fedppl.load(tmp_path / "fit.nc", model, how, clients=frame.assign(o=down), by="site")
