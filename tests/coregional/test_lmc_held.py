"""σ_w held at a given value, as the paper has it: no algorithm moves it, and data of unit scale are not refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl import curves
from fedppl.coregional.bound import LogScale
from fedppl.coregional.view import unit_of
from fedppl.models import fedlmc_ss
from fedppl.types import DataError
from tests.support import problems


@functools.cache
def held(slab_sd: float) -> fedppl.FederatedModel:
    builder = functools.partial(problems.coregional_builder, slab_sd=slab_sd, slab_spread=None)
    return problems.Remembering(builder, fedlmc_ss.SHARED)


ALGORITHMS = {"ascent": curves.Ascent(warmup=2), "averaging": curves.Averaging(steps=3), "gradient": curves.Gradient()}


@problems.few_rounds
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_moves_it(name: str) -> None:
    data = problems.coregional()[1]
    for model, moves in ((held(2.0), False), (problems.coregional()[0], True)):
        fit = fedppl.fit(model, data, ALGORITHMS[name], rounds=8, progressbar=False, random_seed=1)
        found, start = float(curves.selection(fit)["slab_sd"]), 1.0 if moves else 2.0
        assert np.isfinite(fit.records[-1].info["bound"])
        assert (abs(found / start - 1) > 1e-3) == moves


def test_its_prior_is_the_declared_one() -> None:
    """The median as it is given; only a spread below 1e-3 counts as none."""
    view = held(2.0).enrol(problems.coregional()[1])["unit 0"].view(unit_of)
    assert_allclose(np.exp(view.roles.slab_prior.mean), 2.0)
    assert_allclose(view.roles.slab_prior.precision, 1e8, rtol=1e-4)
    assert view.roles.slab_prior.is_fixed and not LogScale(0.0, 1.0 / 2e-3**2).is_fixed


def refused(model: fedppl.FederatedModel, size: float) -> bool:
    data = {k: {"X": one["X"], "y": size * one["y"]} for k, one in problems.coregional()[1].items()}
    try:
        fedppl.fit(model, data, curves.Ascent(), rounds=1, progressbar=False)
    except DataError as error:
        assert "latent functions reach" in str(error)
        return True
    return False


@problems.few_rounds
def test_a_curve_may_be_some_prior_sds_large() -> None:
    y: Any = np.concatenate([one["y"] for one in problems.coregional()[1].values()])
    assert not refused(held(2.0), 5.0 / float(np.std(y)))
    assert refused(held(2.0), 500.0 / float(np.std(y)))
