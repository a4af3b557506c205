"""Builders that people write by mistake: refused by name, most of them before anything is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.graph.op import Op

from fedppl import DeclarationError, FederatedModel
from tests.support.mistakes import Mistake, refused, row

Y = np.array([0.5, 1.5, 1.0])


def of(declare: Callable[[Any], Any], shared: Any = ("mu",), **more: Any) -> Callable[[], Any]:
    """A builder that declares this of a container with a client's y; clients that enrol with it."""

    def builder(y: Any) -> pm.Model:
        with pm.Model(**more) as model:
            declare(pm.Data("y", y))
        return model

    return lambda: FederatedModel(builder, shared).enrol({"a": {"y": Y}, "b": {"y": Y + 1}}, kernel=False)


def raw(builder: Any, shared: Any = ("mu",)) -> Callable[[], Any]:
    return lambda: FederatedModel(builder, shared).enrol({"a": {"y": Y}, "b": {"y": Y + 1}}, kernel=False)


def normal(y: Any, mu: Any = None, sigma: Any = 1.0, **more: Any) -> Any:
    return pm.Normal("obs", pm.Normal("mu") if mu is None else mu, sigma, observed=y, **more)


def whole(y: Any) -> pm.Model:
    with pm.Model() as model:
        normal(pm.Data("y", y))
    return model


def variable(y: Any) -> Any:
    with pm.Model():
        return normal(pm.Data("y", y))


def standardised(y: Any) -> pm.Model:
    """What is observed is lost when another client's data are put in."""
    with pm.Model() as model:
        normal(pm.Data("y", (y - y.mean()) / y.std()))
    return model


def in_place(y: Any) -> pm.Model:
    """A builder is called several times, and a constant of its graph would be doubled by each call."""
    y *= 2
    with pm.Model() as model:
        normal(pm.Data("y", y))
    return model


def sorted_in_place(y: Any) -> pm.Model:
    y.sort()
    return whole(y)


def in_batches(y: Any) -> pm.Model:
    with pm.Model() as model:
        normal(pm.Minibatch(y, batch_size=2), total_size=len(y))
    return model


def of_two_names(y: Any) -> pm.Model:
    with pm.Model() as model:
        normal(pm.Data("outcome", y))
    return model


def named(y: Any) -> pm.Model:
    with pm.Model(name="clinic") as model:
        normal(pm.Data("y", y))
    return model


def depending(y: Any) -> Any:
    return normal(y, mu=pm.Normal("mu", y.mean(), 1))


def below(y: Any) -> Any:
    return normal(y, mu=pm.Normal("mu", pm.Normal("theta"), 1))


def simulated(y: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyMC 6 uses PyTensor's old way there
        return pm.Simulator("obs", lambda rng, mu, size: mu, pm.Normal("mu"), observed=y)


ROWS: dict[str, Mistake] = {
    # --- no builder
    "a model": row(lambda: FederatedModel(whole(Y), ["mu"]), "Model", "function"),
    "a name": row(lambda: FederatedModel("whole", ["mu"]), "str", "function"),  # type: ignore[arg-type]
    "no argument for the data": row(raw(lambda: whole(Y)), "'y'", "add it to the builder's arguments"),
    "nothing returned": row(raw(lambda y: None), "'a'", "NoneType", "return model"),
    "a pair returned": row(raw(lambda y: (whole(y), 1)), "tuple", "return model"),
    "a variable returned": row(raw(variable), "TensorVariable", "return model"),
    "no model opened": row(raw(lambda y: normal(y)), "'a'", "with model"),
    "an error of its own": row(raw(lambda y: {}["beta"]), "'a'", "KeyError: 'beta'"),
    "a parameter that is missing": row(of(lambda y: pm.Poisson("mu")), "'a'", "'mu'"),
    "a name twice": row(of(lambda y: [pm.Normal("mu"), pm.Normal("mu")]), "mu already exists"),
    "a dim without coords": row(of(lambda y: pm.Normal("mu", dims="k")), "'k'", "unknown"),
    # --- shared=
    "nothing shared": row(lambda: FederatedModel(whole, []), "shared=[]", "name at least one"),
    "None shared": row(lambda: FederatedModel(whole, None), "shared=None", "list of names"),  # type: ignore[arg-type]
    "priors for names": row(lambda: FederatedModel(whole, {"mu": 1}), "shared={'mu': 1}", "list of names"),
    "bytes for a name": row(lambda: FederatedModel(whole, b"mu"), "list of names"),  # type: ignore[arg-type]
    "a name twice in shared": row(lambda: FederatedModel(whole, ["mu", "mu"]), "'mu'", "list it once"),
    "a reader that is none": row(lambda: FederatedModel(whole, ["mu"], reads="csv"), "reads='csv'", "function"),  # type: ignore[arg-type]
    "a reader of new rows that is none": row(
        lambda: FederatedModel(whole, ["mu"], reads_new="csv"),  # type: ignore[arg-type]
        "reads_new='csv'",
        "function",
    ),
    "another case": row(of(normal, ["Mu"]), "'Mu'", "'mu'"),
    "a transformed name": row(of(lambda y: normal(y, 0.0, pm.HalfNormal("s")), ["s_log__"]), "'s_log__'", "'s'"),
    "an outcome shared": row(of(normal, ["mu", "obs"]), "'obs'", "free random variables"),
    "data shared": row(of(normal, ["mu", "y"]), "'y'", "free random variables"),
    "a model with a prefix": row(raw(named), "'mu'", "'clinic::mu'"),
    "a prior of many that is not normal": row(
        of(lambda y: normal(y, pm.Normal("mu", shape=399)[0], pm.HalfNormal("s")), ["mu", "s"]),
        "400 numbers are shared",
        "['s'] is not normal",
        "pm.LogNormal",
    ),
    # --- what is observed
    "nothing observed": row(of(lambda y: pm.Normal("obs", pm.Normal("mu"))), "observed="),
    "a container of another name": row(raw(of_two_names), "['y']", "['outcome']", "Name each container"),
    "other values in a container": row(raw(standardised), "pm.Data('y')", "compute from that", "before the fit"),
    "data that it doubles": row(raw(in_place), "'a'", "read-only", "new arrays"),
    "data that it sorts": row(raw(sorted_in_place), "'a'", "read-only", "new arrays"),
    "batches": row(raw(in_batches), "pm.Minibatch", "batch_size="),
    "rows counted several times": row(of(lambda y: normal(y, total_size=300)), "'obs'", "Remove total_size="),
    "a simulator": row(of(simulated), "'obs'", "density"),
    "a distribution without a density": row(of(lambda y: pm.CustomDist("obs", pm.Normal("mu"), observed=y)), "logp="),
    # --- what is no posterior of continuous variables
    "a shared angle": row(of(lambda y: normal(y, pm.VonMises("mu", 0, 1))), "'mu'", "angle", "Interval(-np.pi"),
    "a local angle": row(of(lambda y: normal(y, pm.Normal("mu") + pm.VonMises("a", 0, 1))), "'a'", "Interval(-np.pi"),
    "a discrete local": row(of(lambda y: normal(y, pm.Normal("mu") + pm.Poisson("z", 3))), "'z'", "pm.Mixture"),
    "a discrete shared": row(of(lambda y: normal(y, pm.Poisson("mu", 3))), "'mu'", "pm.Mixture"),
    "a flat prior": row(of(lambda y: normal(y, pm.Flat("mu"))), "'mu'", "pm.Normal(0, 10)"),
    "a prior of data": row(of(depending), "'mu'", "'y'", "constant"),
    "a prior of a local": row(of(below), "'mu'", "Share 'theta' too"),
    "a prior sd below zero": row(of(lambda y: normal(y, pm.Normal("mu", 0, -1))), "['mu']", "Correct the prior"),
    "a potential of NaN": row(
        of(lambda y: [pm.Potential("p", np.nan * pm.Normal("mu")), pm.Normal("obs", 0, 1, observed=y)]),
        "['p']", "Correct the prior",
    ),
    "coords of another length": row(
        of(lambda y: normal(y, pm.Normal("mu", np.zeros(3), dims="k").sum()), coords={"k": [1, 2]}),
        "['mu']", "coords fit together",
    ),
    "fractions of yes and no": row(
        of(lambda y: pm.Bernoulli("obs", logit_p=pm.Normal("mu"), observed=y)), "'y' holds 0.5", "round"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_builders_that_cannot_be_meant_are_refused_in_words(name: str) -> None:
    refused(ROWS[name])


def test_a_density_without_a_gradient_is_refused_beforehand() -> None:
    class Twice(Op):  # type: ignore[misc]
        itypes = (pt.dscalar,)
        otypes = (pt.dscalar,)

        def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
            outputs[0][0] = np.array(2.0 * inputs[0])

    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            normal(pm.Data("y", y), Twice()(pm.Normal("mu")))
        return model

    with pytest.raises(DeclarationError, match="no gradient"):
        FederatedModel(builder, ["mu"]).enrol({"a": {"y": Y}})


def test_a_container_may_hold_the_same_values_in_another_type() -> None:
    """An index that came as reals is made whole by the builder: nothing is lost."""

    def indexed(group: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            group, y = pm.Data("group", group.astype(int)), pm.Data("y", y)
            pm.Normal("obs", pm.Normal("mu", shape=3)[group], 1, observed=y)
        return model

    enrolled = FederatedModel(indexed, ["mu"]).enrol({"a": {"group": np.array([0.0, 1.0, 2.0]), "y": Y}}, kernel=False)
    assert enrolled["a"].shared_size == 3


class _Odd(DeclarationError):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


@pytest.mark.parametrize("error", [_Odd("ages", "below 0"), DeclarationError("client ages are below 0")])
def test_a_builders_own_error_gets_the_clients_name(error: Exception) -> None:
    def builder(y: Any) -> pm.Model:
        raise error

    with pytest.raises(DeclarationError, match=r"^client 'a': .*ages"):
        FederatedModel(builder, ["mu"]).enrol({"a": {"y": np.zeros(3)}})
