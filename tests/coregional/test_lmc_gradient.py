"""Summed gradients for FedLMC-SS: Adam on the whole bound in one place, whatever place its terms come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import norm

import fedppl
from fedppl.coregional.bound import unflatten, unflatten_unit
from fedppl.coregional.unit import slopes
from tests.coregional.test_lmc_ascent import play, total_bound, views_of
from tests.coregional.test_lmc_averaging import Adam
from tests.coregional.test_lmc_bound import Parameters, dense_bound, difference
from tests.support import problems
from tests.support.states import updated


def central_value(clients: Any, role: Any, x: Any, own: Any) -> float:
    """The bound in one place by loops, with the priors of log ℓ, N(log 0.3, 0.5²), and of log σ_w, N(0, 1)."""
    shared = unflatten(x, role)
    value = dense_bound(clients, Parameters(shared, [unflatten_unit(one) for one in own]))
    return float(value + norm.logpdf(shared.kernel, np.log(0.3), 0.5).sum() + norm.logpdf(shared.log_slab_sd))


def test_the_sum_of_replies_is_the_gradient_of_the_central_bound() -> None:
    """By central differences of the loops; each unit brings r_m of what is counted once."""
    clients = problems.coregional()[1]
    played = play(fedppl.curves.Gradient(initial_kernel="prior"), clients, 3)
    state, own = played.states[2], [kept.own for kept in played.personal[2].values()]
    found = sum(reply["slope"] for reply in played.replies[3].values())
    # Every fifth coordinate: loops are slow.
    places = np.arange(0, len(found), 5)

    def moved(z: Any) -> float:
        x = state.x.copy()
        x[places] = z
        return central_value(clients, state.roles, x, own)

    expected = difference(moved, state.x[places])
    assert np.max(np.abs(expected)) > 10
    assert_allclose(found[places], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rates", [{"learning_rate": 0.04}, {"learning_rate": (0.04, 0.01), "milestones": (4,)}])
def test_rounds_with_all_units_are_steps_of_one_adam_on_the_whole_bound(rates: dict[str, Any]) -> None:
    """Shared and own parameters of all units in one vector; Adam works coordinate by coordinate."""
    clients = problems.coregional()[1]
    views, rows = views_of(clients), np.array([len(data["y"]) for data in clients.values()])
    algorithm = fedppl.curves.Gradient(**rates)
    played = play(algorithm, clients, 8)
    told = [float(algorithm.broadcast(state, "unit 0")["rate"]) for state in played.states[1:-1]]
    assert (told[0], told[-1]) == (0.04, 0.01 if "milestones" in rates else 0.04)
    x, own = played.states[1].x, [kept.own for kept in played.personal[1].values()]
    adam, size = Adam(0.04), len(x)
    for state, personal, rate in zip(played.states[2:], played.personal[2:], told, strict=True):
        adam.rate = rate
        terms = [slopes(v, x, one, n / rows.sum()) for v, one, n in zip(views, own, rows, strict=True)]
        gradient = np.concatenate([sum(shared for shared, _ in terms), *(mine for _, mine in terms)])
        point = adam(np.concatenate([x, *own]), gradient)
        x, own = point[:size], np.split(point[size:], len(own))
        assert_allclose(state.x, x, rtol=1e-9, atol=1e-9)
        for kept, one in zip(personal.values(), own, strict=True):
            assert_allclose(kept.own, one, rtol=1e-9, atol=1e-9)


def test_the_bound_that_is_told_is_that_of_what_the_units_were_sent() -> None:
    clients = problems.coregional()[1]
    played = play(fedppl.curves.Gradient(), clients, 4)
    role = played.states[1].roles
    for number in (1, 2, 3):
        own = [unflatten_unit(kept.own) for kept in played.personal[number].values()]
        found = total_bound(views_of(clients), unflatten(played.states[number].x, role), own, role.log_odds)
        assert_allclose(played.states[number + 1].bound, found, rtol=1e-10)


def test_a_sum_of_some_units_is_scaled_up_to_all() -> None:
    """One of three equal units replies: the step is that with all of them."""
    data = problems.coregional()[1]["unit 1"]
    algorithm = fedppl.curves.Gradient()
    played = play(algorithm, {"a": data, "b": data, "c": data}, 3)
    reply = played.replies[3]["a"]
    one, report = updated(algorithm, played.states[2], {"a": reply})
    all_, other = updated(algorithm, played.states[2], {"a": reply, "b": reply, "c": reply})
    assert_allclose(one.x, all_.x, rtol=1e-12)
    assert_allclose(report.info.bound, other.info.bound, rtol=1e-12)


@problems.few_rounds
@pytest.mark.parametrize("batch_size", [None, 8])
def test_the_bound_rises(batch_size: int | None) -> None:
    fit = fedppl.fit(
        *problems.coregional(),
        fedppl.curves.Gradient(batch_size=batch_size),
        rounds=250,
        progressbar=False,
        random_seed=4,
    )
    bounds = fit.idata["rounds"]["bound"].values[1:]
    assert bounds[-1] > bounds[0] + 1000
    smooth = bounds.reshape(-1)[: 8 * 30].reshape(8, 30).mean(axis=1)
    assert np.all(np.diff(smooth) > 0)
    ascent = fedppl.fit(
        *problems.coregional(), fedppl.curves.Ascent(warmup=5), rounds=40, progressbar=False, random_seed=4
    )
    assert np.max(bounds) < ascent.state.bound + 1.0  # it is the same bound that rises


def test_a_unit_that_forgot_starts_from_the_curves_and_says_so() -> None:
    clients = problems.coregional()[1]
    algorithm = fedppl.curves.Gradient()
    played = play(algorithm, clients, 5)
    client = problems.coregional()[0].enrol(clients, kernel=False)["unit 2"]
    message = algorithm.broadcast(played.states[-1], "unit 2")
    rng = np.random.default_rng(1)
    _, kept, info = algorithm.update_client(client, played.personal[-1]["unit 2"], message, rng)
    after, blank, told = algorithm.update_client(client, None, message, rng)
    assert "blank" not in info and told["blank"] == 1.0
    assert blank["bound"] > kept["bound"]
    assert after.adam.steps == 1


def test_replies_hold_the_gradient_of_what_is_shared_and_no_more() -> None:
    played = play(fedppl.curves.Gradient(), problems.coregional()[1], 2)
    for reply in played.replies[2].values():
        assert {key: np.shape(value) for key, value in reply.items()} == {
            "slope": played.states[1].x.shape,
            "rows": (),
            "bound": (),
        }
    assert_array_equal(played.states[1].rows, [len(data["y"]) for data in problems.coregional()[1].values()])
