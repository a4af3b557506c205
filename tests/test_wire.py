"""How a site introduces itself: what is packed comes out again."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_array_equal

from fedppl import FederatedModel
from fedppl.engine._wire import pack_hello, unpack_hello
from tests import problems


def wide_builder(y: Any) -> Any:
    """2,100 independent means, beyond what has a matrix."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.5, 2.0, shape=2100)
        pm.Normal("outcome", mu.sum(), 1.0, observed=pm.Data("y", y))
    return model


@functools.cache
def wide() -> tuple[FederatedModel, problems.Clients]:
    return FederatedModel(wide_builder, ["mu"]), {"a": {"y": np.arange(3.0)}}


def alone() -> tuple[FederatedModel, problems.Clients]:
    import fedppl.testing

    model, clients = fedppl.testing.normal_means()
    return model, dict(clients)


@pytest.mark.parametrize("problem", [problems.regression, alone, wide])
def test_a_layout_survives_the_wire(problem: Any) -> None:
    model, clients = problem()
    client = next(iter(model.enrol(clients).values()))
    arrays, texts = pack_hello("a", "1", {"x": "1"}, client.layout, client.reader())
    found = unpack_hello(arrays, texts).layout
    assert found.variables == client.layout.variables and found.fingerprint == client.layout.fingerprint
    assert_array_equal(found.prior.linear, client.layout.prior.linear)
    assert_array_equal(found.prior.precision, client.layout.prior.precision)


def test_a_large_prior_is_kept_by_coordinate_and_others_are_refused() -> None:
    model, clients = wide()
    prior = next(iter(model.enrol(clients).values())).layout.prior
    np.testing.assert_allclose(prior.precision, 0.25, rtol=1e-9)
    np.testing.assert_allclose(prior.linear, 0.125, rtol=1e-9)

    def chained(y: Any) -> Any:
        with pm.Model() as built:
            mu = pm.GaussianRandomWalk("mu", sigma=1.0, init_dist=pm.Normal.dist(), shape=2100)
            pm.Normal("outcome", mu.sum(), 1.0, observed=pm.Data("y", y))
        return built

    from fedppl import DeclarationError

    with pytest.raises(DeclarationError, match="2100 coordinates; beyond 2000 their prior is kept by coordinate"):
        FederatedModel(chained, ["mu"]).enrol(clients)
