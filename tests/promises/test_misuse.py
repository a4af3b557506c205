"""What people write by mistake, through the public names: each error names the value, the rule and the remedy."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytest

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel
from fedppl.testing import normal_means
from tests.support import problems

Y = np.array([0.5, 1.5, 1.0])
G = np.array([0, 1, 2])
MODEL, CLIENTS = normal_means(2)


def line(X: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        pm.Normal("obs", X * pm.Normal("mu"), 1, observed=y)
    return model


def anything(y: Any, **more: Any) -> pm.Model:
    return line(y, y)


def by_position(y: Any, /) -> pm.Model:
    return line(y, y)


def counts(y: Any) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        pm.Poisson("count", pm.math.exp(pm.Normal("mu")), observed=y)
    return model


def exposed(exposure: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        exposure, y = pm.Data("exposure", exposure), pm.Data("y", y)
        pm.Poisson("count", exposure * pm.math.exp(pm.Normal("mu")), observed=y)
    return model


def same_name(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("y", pm.Normal("mu"), 1, observed=pm.Data("y", y))
    return model


def grouped(group: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        group, y = pm.Data("group", group), pm.Data("y", y)
        pm.Normal("obs", pm.Normal("mu", 0, 5, shape=3)[group], 1, observed=y)
    return model


def grouped_from_one(group: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        group, y = pm.Data("group", group), pm.Data("y", y)
        pm.Normal("obs", pm.Normal("mu", 0, 5, shape=3)[group - 1], 1, observed=y)
    return model


def grouped_straight(group: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Normal("mu", 0, 5, shape=3)[group], 1, observed=y)
    return model


def told_apart(group: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        group, y = pm.Data("group", group), pm.Data("y", y)
        mu = pm.Normal("mu", 0, 5, shape=3)
        pm.Deterministic("of_row", mu[group])
        pm.Normal("obs", mu[0], 1, observed=y)
    return model


class Built:
    def __call__(self, X: Any, y: Any) -> pm.Model:
        return line(X, y)


def start(model: Any = MODEL, clients: Any = CLIENTS, algorithm: Any = None, **more: Any) -> Any:
    return fedppl.fit(model, clients, algorithm or fedppl.EP(), progressbar=False, random_seed=1, **more)


def declared(builder: Any, **data: Any) -> Callable[[], Any]:
    return lambda: FederatedModel(builder, ["mu"]).enrol({"a": data}, kernel=False)


@functools.cache
def fitted() -> fedppl.Fit:
    fit: fedppl.Fit = start()
    return fit


@functools.cache
def grouped_fit() -> fedppl.Fit:
    fit: fedppl.Fit = start(FederatedModel(grouped, ["mu"]), {"a": {"group": G, "y": Y}})
    return fit


CASES: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    # --- calls
    "engine not called": (lambda: start(engine=fedppl.InProcess), DeclarationError, ["call it: fedppl.InProcess()"]),
    "algorithm not called": (
        lambda: start(algorithm=fedppl.averaging.FedAvg),
        DeclarationError,
        ["call it: fedppl.averaging.FedAvg(learning_rate=...)"]
    ),
    "algorithm by name": (lambda: start(algorithm="EP"), DeclarationError, ["algorithm='EP'", "fedppl.EP()"]),
    "local for algorithm": (lambda: start(algorithm=fedppl.local.NUTS()), DeclarationError, ["no algorithm"]),
    "builder for model": (lambda: start(model=line), DeclarationError, ["FederatedModel(builder"]),
    "text for rounds": (lambda: start(rounds="20"), DeclarationError, ["rounds='20'", "whole number"]),
    "more than there are": (lambda: start(participation=5), DeclarationError, ["participation=5", "clients, 2"]),
    "more reports": (lambda: start(reporting=3), DeclarationError, ["reporting=3", "clients, 2"]),
    "reporting 2.0": (lambda: start(reporting=2.0), DeclarationError, ["reporting=2.0", "at most 1", "probability"]),
    "names for participation": (lambda: start(participation=["client 0"]), DeclarationError, ["number of clients"]),
    "text for deadline": (lambda: start(deadline="5"), DeclarationError, ["deadline='5'", "seconds"]),
    "number for checkpoint": (lambda: start(checkpoint=3), DeclarationError, ["checkpoint=3", "path"]),
    "structure of names": (lambda: fedppl.EP(structure=["mu"]), DeclarationError, ["structure=['mu']", "lists of"]),
    "number for shared": (lambda: FederatedModel(line, 3), DeclarationError, ["shared=3", "list of names"]),
    "names in a set": (lambda: FederatedModel(line, {"mu"}), DeclarationError, ["shared={'mu'}", "list of names"]),
    "names twice": (
        lambda: start(algorithm=fedppl.EP(structure=[["mu"], ["mu"]])), DeclarationError, ["['mu'] once"]
    ),
    "coords in a list": (
        lambda: fedppl.contrast(fitted(), fitted(), "mu", coords=["a"]), DeclarationError, ["coords=['a']", "dict"]
    ),
    "clients in a list": (
        lambda: fedppl.search.holdout([{"y": Y}], 0.2, random_seed=1), DataError, ["clients are list", "mapping"]
    ),
    "a loss by name": (
        lambda: fedppl.search.validation_loss(fitted(), CLIENTS, loss="mse"),
        DeclarationError,
        ["loss='mse'", "function"],
    ),
    "nested names": (lambda: FederatedModel(line, [["mu"]]), DeclarationError, ["shared=[['mu']]", "list of names"]),
    # --- data
    "complex": (lambda: start(clients={"a": {"y": Y + 1j}}), DataError, ["'a'", "'y'", "complex128", "real"]),
    "durations": (lambda: start(clients={"a": {"y": Y.astype("m8[D]")}}), DataError, ["'y'", "timedelta64"]),
    "generator": (lambda: start(clients={"a": {"y": (v for v in Y)}}), DataError, ["generator", "array"]),
    "set": (lambda: start(clients={"a": {"y": {1, 2}}}), DataError, ["a set", "array"]),
    "a negative exposure": (declared(exposed, exposure=Y - 9, y=G), DataError, ["mu >= 0", "sign and size of"]),
    "a name twice": (declared(same_name, y=Y), DataError, ["pm.Data('y') has that name", "rename the other variable"]),
    "fractions of counts": (declared(counts, y=Y), DataError, ["'y' holds 0.5", "'count'", "round"]),
    "a negative group": (declared(grouped, group=G - 1, y=Y), DataError, ["'a': 'group' holds -1 at", "0 to n - 1"]),
    "groups from one": (declared(grouped_from_one, group=G, y=Y), DataError, ["index -1 from 'group', at (0,)"]),
    "a negative constant": (declared(grouped_straight, group=G - 1, y=Y), DataError, ["'group' holds -1", "(0,)"]),
    "negative beside y": (declared(told_apart, group=G - 1, y=Y), DataError, ["'group' holds -1", "0 to n - 1"]),
    "groups of reals": (declared(grouped, group=G * 1.0, y=Y), DataError, ["'group', 'y' are real", "as integers"]),
    "a mask": (declared(grouped, group=np.ones(4, bool), y=np.ones(4)), DataError, ["for an index give integers"]),
    "inexact": (declared(line, X=np.full(3, 2**53 + 1), y=Y), DataError, ["'X' holds 9007199254740993", "2**53"]),
    # --- columns against the builder's arguments
    "unexpected": (declared(line, X=Y, y=Y, z=Y), DataError, ["line(X, y)", "no argument for 'z'", "drop 'z'"]),
    "missing": (declared(line, y=Y), DataError, ["line(X, y)", "needs 'X'", "add 'X' to the data"]),
    "misspelt": (declared(line, Xs=Y, y=Y), DataError, ["rename 'Xs' to 'X'"]),
    "another case": (declared(line, x=Y, y=Y), DataError, ["rename 'x' to 'X'"]),
    "of a partial": (declared(functools.partial(line, X=Y), y=Y, z=Y), DataError, ["line(X, y)", "drop 'z'"]),
    "of an object": (declared(Built(), X=Y, z=Y), DataError, ["Built(X, y)", "no argument for 'z'", "needs 'y'"]),
    "beside **more": (declared(anything, z=Y), DataError, ["needs 'y'"]),
    "by position": (declared(by_position, y=Y), DeclarationError, ["remove the /"]),
    # --- checkpoints and callbacks
    "a folder": (lambda: start(checkpoint="."), DeclarationError, ["checkpoint='.'", "a folder", "name a file"]),
    "a long name": (lambda: start(checkpoint="n" * 250), DeclarationError, ["'nnn", ".partial'", "choose a path"]),
    "a device": (lambda: start(checkpoint="/dev/null"), DeclarationError, ["checkpoint='/dev/null'", "name a file"]),
    "a null": (lambda: start(checkpoint="a\0b"), DeclarationError, ["checkpoint='a\\x00b'", "choose a path"]),
    "a callback's array": (
        lambda: start(callback=lambda step: np.array([True, False])),
        DeclarationError,
        ["array of shape (2,) in round 1", "True to stop"],
    ),
    "a callback's text": (lambda: start(callback=lambda step: "no"), DeclarationError, ["'no' in round 1", "or None"]),
    "a callback of nothing": (lambda: start(callback=lambda: None), DeclarationError, ["function of one Round"]),
    # --- results
    "a new group of -1": (
        lambda: grouped_fit().predict("a", {"group": [0, -1]}), DataError, ["'group' holds -1 at index (1,)"]
    ),
    "half a new group": (
        lambda: grouped_fit().predict("a", {"group": [0, 0.5]}), DataError, ["'group' holds 0.5 at index (1,)", "int32"]
    ),
    "a large new group": (
        lambda: grouped_fit().predict("a", {"group": [0, 2**40]}), DataError, ["'group' holds 1099511627776", "int32"]
    ),
    "a masked new group": (
        lambda: grouped_fit().predict("a", {"group": np.ma.array(G, mask=G > 1)}), DataError, ["'group'", "masked"]
    ),
    "half a region": (lambda: fedppl.hypotheses(fitted(), rope=0.1), DeclarationError, ["rope=0.1", "(low, high)"]),
    "an empty region": (lambda: fedppl.hypotheses(fitted(), rope=(1, 0)), DeclarationError, ["low < high"]),
    "a list of draws": (lambda: fedppl.hypotheses([1.0]), DeclarationError, ["list has no posterior", "fit.idata"]),
    "text for null": (lambda: fedppl.hypotheses(fitted(), null="0"), DeclarationError, ["null='0'", "number"]),
    "half a draw": (lambda: fitted().shared(draws=2.5), DeclarationError, ["draws=2.5", "whole number"]),
    "text for a seed": (lambda: fitted().shared(random_seed="a"), DeclarationError, ["random_seed='a'"]),
    "validation in a list": (lambda: fedppl.search.validation_loss(fitted(), [Y]),
        DataError, ["mapping from client id"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_misuse_is_refused_in_words(case: str) -> None:
    call, kind, fragments = CASES[case]
    with pytest.raises(kind) as error:
        call()
    for fragment in fragments:
        assert fragment in str(error.value)


def test_arguments_with_defaults_and_open_ones_need_no_data() -> None:
    FederatedModel(functools.partial(line, X=Y), ["mu"])
    assert FederatedModel(Built(), ["mu"]).enrol({"a": {"X": Y, "y": Y}}, kernel=False)["a"].shared_size == 1


def test_hypotheses_takes_a_fit_and_one_name() -> None:
    fit = fitted()
    table = fedppl.hypotheses(fit, rope=(-np.inf, 0), var_names="mu")
    of_draws = fedppl.hypotheses(fit.idata, rope=(-np.inf, 0))
    assert table.columns.equals(of_draws.columns) and table.index.equals(of_draws.index)
    assert table["probability_of_direction"].equals(of_draws["probability_of_direction"])


# --- the message of a fit -------------------------------------------------------------------------------------


@problems.few_rounds
def test_a_round_without_replies_says_why_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The warm start arrives, and then q and the factors hardly overlap: the algorithm itself never hears why."""

    def scattered(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            mu, log_sd = pm.Normal("mu", 0, 3), pm.Normal("log_sd", 0, 2)
            effect = pm.Normal("effect", 0, 1, shape=y.shape)
            pm.Poisson("count", pm.math.exp(mu + pm.math.exp(log_sd) * effect), observed=y)
        return model

    model = FederatedModel(scattered, ["mu", "log_sd"])
    clients = {name: {"y": np.array([0, 1, 0, 0, 2, 0])} for name in ("a", "b")}
    local = fedppl.local.NestedLaplace(fallback=False, pareto_limit=0.0)
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        fit = start(model, clients, fedppl.EP(local=local), rounds=9)
    assert not fit.status.ok and "fallback=True" in fit.message
    skipped = [record for record in caplog.records if "skipped" in record.getMessage()]
    assert len(fit.records[-1].failures) == 2 and len(skipped) <= 2
    assert "fallback=True" in fit.idata["rounds"]["reason"].values[-1, 0]


@problems.few_rounds
def test_without_a_warm_start_a_vague_prior_is_no_singular_matrix() -> None:
    """One point has all the weight under a prior sd of 1000; with fallbacks the fit is the warm one."""
    rng = np.random.default_rng(0)
    X = [np.column_stack([np.ones(40), rng.normal(100, 15, 40)]) for _ in range(3)]
    clients = {f"c{k}": {"X": x, "y": x @ [25.0, 0.6] + rng.normal(0, 18, 40)} for k, x in enumerate(X)}

    def regression(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            X, y = pm.Data("X", X), pm.Data("y", y)
            beta = pm.Normal("beta", 0, 1000, shape=2)
            pm.Normal("obs", X @ beta, pm.math.exp(pm.Normal("log_sigma", 0, 2)), observed=y)
        return model

    model = FederatedModel(regression, ["beta", "log_sigma"])
    cold = start(model, clients, fedppl.EP(warm_start=False), rounds=40)
    warm = start(model, clients, fedppl.EP(), rounds=40)
    assert cold.status.ok and warm.status.ok
    sd = warm.idata["fit"]["covariance_matrix"].values.diagonal() ** 0.5
    gap = cold.idata["fit"]["mean_vector"].values - warm.idata["fit"]["mean_vector"].values
    assert np.all(np.abs(gap) < 0.05 * sd)
    alone = start(model, clients, fedppl.EP(warm_start=False, local=fedppl.local.NestedLaplace(fallback=False)))
    assert "warm_start=True" in alone.message and "LinAlgError" not in alone.message


def test_a_skewed_margin_is_named_with_a_remedy_and_mild_ones_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    from fedppl.algorithms.ep import _rounds
    from fedppl.algorithms.ep import sites as _sites

    layout = MODEL.enrol(CLIENTS, kernel=False)["client 0"].layout
    sites = _sites.empty(layout, ("client 0",), _sites.structure_of("full", layout))
    state = fedppl.EP().init(layout, ("client 0",), np.random.default_rng(0))
    assert _rounds._skewed(state, 0.5) == ""
    info = _rounds.EPInfo("EP", 0.0, 0.0, 1.0, np.nan, 0.0, 0.0)
    for skewness, mild in ((-0.6, True), (1.4, False)):
        skewed = state._replace(sites=sites, skewed=state.skewed._replace(total=np.array([skewness])))
        text = _rounds._skewed(skewed, 0.5)
        assert f"mu {skewness}" in text and "closer to normal" in text
        assert _rounds.reported(_rounds.Outcome(skewed, info))[1].mild is mild
    held = skewed._replace(skewed=state.skewed, clients=state.clients._replace(held=np.array([True])))
    assert not _rounds.reported(_rounds.Outcome(held, info))[1].mild


# --- builders that are no function of their arguments --------------------------------------------------------------


_SCALE = {"sd": 1.0}


def drawn(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Normal("mu") + np.random.default_rng().normal(), 1, observed=pm.Data("y", y))
    return model


def of_a_global(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Normal("mu"), _SCALE["sd"], observed=pm.Data("y", y))
    return model


@pytest.mark.parametrize("ids", ["a", "ab"])
def test_a_builder_that_draws_random_numbers_is_refused(ids: str) -> None:
    with pytest.raises(DeclarationError, match="'a': the builder, called twice on the same data, gives two models"):
        FederatedModel(drawn, ["mu"]).enrol({client_id: {"y": Y} for client_id in ids}, kernel=False)


def test_what_a_builder_reads_elsewhere_is_read_anew_at_every_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FederatedModel(of_a_global, ["mu"])
    clients = {"a": {"y": Y}, "b": {"y": Y + 1}}
    precise = start(model, clients)
    monkeypatch.setitem(_SCALE, "sd", 10.0)
    vague = start(model, clients)
    assert np.isclose(precise.posterior.precision[0, 0], 1 + 6, rtol=1e-3)
    assert np.isclose(vague.posterior.precision[0, 0], 1 + 6 / 100, rtol=1e-3)


# --- builders that make no use of their data -----------------------------------------------------------------------


def of_zeros(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Normal("mu"), 1, observed=np.zeros(3))
    return model


def left_in_a_container(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Data("y", y)
        pm.Normal("obs", pm.Normal("mu"), 1, observed=np.zeros(3))
    return model


def not_observed(y: Any) -> pm.Model:
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu")
        pm.Normal("outcome", mu * y, 1)
        pm.Normal("obs", mu, 1, observed=np.zeros(3))
    return model


def straight(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Normal("mu"), 1, observed=y)
    return model


def straight_beside_a_container(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Data("y", y)
        pm.Normal("obs", pm.Normal("mu"), 1, observed=y)
    return model


def far_off(y: Any) -> pm.Model:
    """Nobody's data pass the threshold, and yet they are what is observed."""
    with pm.Model() as model:
        pm.Bernoulli("obs", logit_p=pm.Normal("mu"), observed=(y > 1e6).astype(int))
    return model


def through_a_local(y: Any) -> pm.Model:
    with pm.Model() as model:
        theta = pm.Normal("theta", pm.Normal("mu") * pm.Data("y", y), 1, shape=3)
        pm.Normal("obs", theta, 1, observed=np.zeros(3))
    return model


def in_the_mean(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Data("y", y) - pm.Normal("mu"), 1, observed=np.zeros(3))
    return model


def as_potential(y: Any) -> pm.Model:
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu")
        pm.Potential("fit", -0.5 * ((y - mu) ** 2).sum())
    return model


def one_argument_of_two(y: Any, row: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Data("row", row)
        pm.Normal("obs", pm.Normal("mu"), 1, observed=pm.Data("y", y))
    return model


@pytest.mark.parametrize("ids", ["a", "ab"])
@pytest.mark.parametrize("builder", [of_zeros, left_in_a_container, not_observed])
def test_a_builder_that_ignores_its_data_is_refused(builder: Any, ids: str) -> None:
    model = FederatedModel(builder, ["mu"])
    for _ in range(2):  # what was refused once is not taken for known
        with pytest.raises(
            DeclarationError, match="makes no use of its data: none of 'y' reaches .*observed=y"
        ) as error:
            model.enrol({client_id: {"y": Y + k} for k, client_id in enumerate(ids)}, kernel=False)
        assert ("'outcome' has no observed=" in str(error.value)) == (builder is not_observed)


@pytest.mark.parametrize("ids", ["a", "ab"])
@pytest.mark.parametrize(
    "builder", [straight, straight_beside_a_container, far_off, through_a_local, in_the_mean, as_potential]
)
@pytest.mark.filterwarnings("ignore:the builder .* clients is compiled on its own")
def test_a_builder_that_uses_its_data_somewhere_is_not_refused(builder: Any, ids: str) -> None:
    FederatedModel(builder, ["mu"]).enrol({client_id: {"y": Y} for client_id in ids}, kernel=False)


def test_a_warning_of_a_builder_points_to_who_enrols() -> None:
    with pytest.warns(UserWarning, match="compiled on its own") as seen:
        FederatedModel(straight, ["mu"]).enrol({client_id: {"y": Y} for client_id in "ab"}, kernel=False)
    assert seen[0].filename == __file__


def test_one_argument_of_several_may_go_unused() -> None:
    FederatedModel(one_argument_of_two, ["mu"]).enrol({k: {"y": Y, "row": G} for k in "ab"}, kernel=False)


# --- indices and integers that are meant ---------------------------------------------------------------------------


def meant(group: Any, y: Any) -> pm.Model:
    """Constant indices from the end, lengths in a slice, and -1 for no group."""
    with pm.Model() as model:
        group, y = pm.Data("group", group), pm.Data("y", y)
        mu = pm.Normal("mu", 0, 5, shape=3)
        known = pm.math.where(group >= 0, mu[pm.math.maximum(group, 0)], 0.0)
        pm.Normal("obs", known + mu[-1] + mu[[-1, -2]].sum() + group[-y.shape[0] :], 1, observed=y)
    return model


def test_negative_indices_of_the_models_own_are_left_alone() -> None:
    for group in (G, np.array([0, -1, 2])):
        FederatedModel(meant, ["mu"]).enrol({"a": {"group": group, "y": Y}}, kernel=False)


@pytest.mark.parametrize("builder", [counts, straight])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.filterwarnings("ignore:the builder .* clients is compiled on its own")
def test_integers_of_more_than_32_bits_keep_their_value(builder: Any, dtype: Any) -> None:
    """PyMC keeps the last 32 bits, without a word: of 2³³ nothing is left."""
    large = np.array([2**33, 2**33 + 1], dtype=dtype)
    clients = FederatedModel(builder, ["mu"]).enrol({"a": {"y": np.array([3, 4])}, "b": {"y": large}}, kernel=False)
    mu = 22.0
    by_mu = np.sum(large - np.exp(mu)) if builder is counts else np.sum(large - mu)
    assert clients["b"].log_site(np.array([mu]), np.zeros(0))[1] == pytest.approx([by_mu], rel=1e-12)


# --- whom a message names ------------------------------------------------------------------------------------------


def test_infinite_inputs_are_named_once_and_with_their_own_remedy() -> None:
    with pytest.raises(DataError, match="'X' holds inf at index .1,.") as error:
        declared(line, X=np.array([1.0, np.inf, 2.0]), y=Y)()
    assert str(error.value).count("client 'a'") == 1 and "same columns" not in str(error.value)


@problems.few_rounds
def test_hypotheses_of_a_search_that_has_not_arrived_say_so() -> None:
    fit = start(callback=lambda step: True)
    with pytest.raises(fedppl.NotConvergedError, match="not at an end"):
        fedppl.hypotheses(fit)


@problems.few_rounds
def test_who_stops_the_warm_start_is_told_to_let_it_go_on() -> None:
    message = start(callback=lambda step: True).message
    assert "stopped by the callback" in message and "let it go on" in message and "proper priors" not in message


@problems.few_rounds
def test_clients_that_nobody_asked_are_not_told_to_have_failed() -> None:
    fit = start(participation=lambda clients, rng: clients[:1])
    assert "['client 1'] were never asked, see participation=" in fit.message and "usable reply" not in fit.message


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("value", [0.5, 2**33])
def test_the_client_whose_value_makes_reals_of_all_is_named(odd: int, value: Any) -> None:
    clients = {name: {"group": G, "y": Y} for name in "abc"}
    name = "abc"[odd]
    clients[name] = {"group": np.array([0, value, 2]), "y": Y}
    with pytest.raises(DataError, match=rf"^client '{name}': 'group' holds {value} at index \(1,\).*Correct"):
        FederatedModel(grouped, ["mu"]).enrol(clients, kernel=False)


def test_names_are_texts() -> None:
    """The names 1 and "1" were one array, the last."""
    with pytest.raises(DataError, match="pass '1'"):
        MODEL.enrol({"a": {1: Y, "1": Y}}, kernel=False)  # type: ignore[dict-item]


def test_a_point_of_another_length_is_refused() -> None:
    """The compiled density read what lies behind the array."""
    client = MODEL.enrol(CLIENTS, kernel=False)["client 0"]
    with pytest.raises(DeclarationError, match=r"phi of shape \(7,\)"):
        client.log_site(np.zeros(7), np.zeros(client.local_size))


@problems.few_rounds
def test_var_names_are_names() -> None:
    fit = fedppl.fit(MODEL, CLIENTS, fedppl.EP(), rounds=1, progressbar=False, random_seed=1)
    with pytest.raises(DeclarationError, match="var_names=3.*some of the shared variables"):
        fit.summary(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [299, 300])
@pytest.mark.parametrize("algorithm", [fedppl.EP(), fedppl.Confidence()], ids=["EP", "Confidence"])
def test_algorithms_for_few_shared_numbers_say_so_before_the_first_round(
    size: int, algorithm: fedppl.Algorithm, caplog: pytest.LogCaptureFixture
) -> None:
    def build(y: np.ndarray) -> pm.Model:
        with pm.Model() as model:
            pm.Normal("obs", pm.Normal("w", 0, 1, shape=size).sum(), 1, observed=pm.Data("y", y))
        return model

    model = fedppl.FederatedModel(build, ["w"])
    layout = model.enrol({"a": {"y": np.zeros(3)}}, kernel=False)["a"].layout
    algorithm.init(layout, ("a",), np.random.default_rng(0))
    assert (f"with all {size}" in caplog.text) == (size >= 300)
