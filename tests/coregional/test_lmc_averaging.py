"""Averaged Adam for FedLMC-SS: with one unit it is Adam, with several the average by rows; where r_m comes from."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl.contracts import AnyAlgorithm
from fedppl.coregional.algorithms._common import adam_step, fresh
from fedppl.coregional.bound import UnitClientState, flatten_unit, unflatten
from fedppl.coregional.unit import slopes
from fedppl.numerics.streams import stream
from fedppl.types import DeclarationError, LocalFailure
from tests.coregional.test_lmc_ascent import play, total_bound, views_of
from tests.coregional.test_lmc_bound import LATENTS, POINTS
from tests.support import problems


class Adam:
    """Kingma and Ba's Algorithm 1, uphill, written out."""

    def __init__(self, rate: float) -> None:
        self.rate, self.m, self.v, self.t = rate, 0.0, 0.0, 0

    def __call__(self, x: Any, slope: Any) -> Any:
        self.t += 1
        self.m = 0.9 * self.m + (1 - 0.9) * slope
        self.v = 0.999 * self.v + (1 - 0.999) * slope**2
        first, second = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return x + self.rate * first / (np.sqrt(second) + 1e-8)


def test_adam_is_the_papers() -> None:
    rng, ours, theirs = np.random.default_rng(1), np.ones(4), np.ones(4)
    adam, state = Adam(0.03), fresh(4)
    for _ in range(20):
        slope = rng.normal(size=4) * [1e-3, 1.0, 1e3, 0.0]
        ours, state = adam_step(ours, slope, state, 0.03)
        theirs = adam(theirs, slope)
        assert_allclose(ours, theirs, rtol=1e-12)
    assert ours[3] == 1.0


def steps_of(view: Any, x: Any, own: Any, share: float, steps: int, rate: float) -> tuple[Any, Any]:
    """Adam on V_m from (x, own), all parameters together."""
    adam, point = Adam(rate), np.concatenate([x, own])
    for _ in range(steps):
        point = adam(point, np.concatenate(slopes(view, point[: len(x)], point[len(x) :], share)))
    return point[: len(x)], point[len(x) :]


def test_with_one_unit_it_is_adam_with_new_moments_every_round() -> None:
    clients = {"unit 1": problems.coregional()[1]["unit 1"]}
    (view,) = views_of(clients)
    played = play(fedppl.curves.Averaging(steps=4, learning_rate=0.03), clients, 6)
    x, own = played.states[1].x, flatten_unit(played.personal[1]["unit 1"])
    for state, personal in zip(played.states[2:], played.personal[2:], strict=True):
        x, own = steps_of(view, x, own, 1.0, 4, 0.03)
        assert_allclose(state.x, x, rtol=1e-9, atol=1e-9)
        assert_allclose(flatten_unit(personal["unit 1"]), own, rtol=1e-9, atol=1e-9)


def test_the_server_averages_by_rows_and_units_keep_their_own() -> None:
    """Three units with r_m = n_m / Σ n of what is counted once, from the second round on."""
    clients = problems.coregional()[1]
    rows = np.array([len(data["y"]) for data in clients.values()])
    assert len(set(rows)) == 3
    played = play(fedppl.curves.Averaging(steps=3, learning_rate=0.02), clients, 3)
    for number in (1, 2):
        ends = [
            steps_of(view, played.states[number].x, flatten_unit(kept), n / rows.sum(), 3, 0.02)
            for view, kept, n in zip(views_of(clients), played.personal[number].values(), rows, strict=True)
        ]
        average = np.average([x for x, _ in ends], axis=0, weights=rows)
        assert_allclose(played.states[number + 1].x, average, rtol=1e-9, atol=1e-9)
        for (_, own), kept in zip(ends, played.personal[number + 1].values(), strict=True):
            assert_allclose(flatten_unit(kept), own, rtol=1e-9, atol=1e-9)
    assert np.max(np.abs(ends[0][0] - ends[1][0])) > 1e-3
    assert_array_equal(played.states[1].rows, rows)


def test_the_kernels_start_at_the_median_of_the_units_own_by_rows() -> None:
    """Ten rows in all below, twenty and more above: the third unit's kernel, which has more rows than both others."""
    clients = dict(problems.coregional()[1])
    clients["unit 0"], clients["unit 1"] = (
        {k: v[:10] for k, v in clients["unit 0"].items()},
        {k: v[:9] for k, v in clients["unit 1"].items()},
    )
    played = play(fedppl.curves.Averaging(), clients, 1)
    kernels = {name: reply["kernel"] for name, reply in played.replies[1].items()}
    assert np.ptp([kernel[0] for kernel in kernels.values()]) > 0.01
    role = played.states[1].roles
    assert_allclose(unflatten(played.states[1].x, role).kernel, kernels["unit 2"])
    alone = play(fedppl.curves.Averaging(initial_kernel="prior"), clients, 1).states[1]
    assert_allclose(unflatten(alone.x, role).kernel, np.log(0.3))


def test_the_bound_that_is_told_is_that_of_what_the_units_were_sent() -> None:
    clients = problems.coregional()[1]
    played = play(fedppl.curves.Averaging(steps=3), clients, 3)
    role = played.states[1].roles
    for number in (1, 2):
        shared = unflatten(played.states[number].x, role)
        found = total_bound(views_of(clients), shared, list(played.personal[number].values()), role.log_odds)
        assert_allclose(played.states[number + 1].bound, found, rtol=1e-10)
    assert np.isnan(played.states[1].bound)


@pytest.mark.parametrize("batch_size", [None, 8])
def test_the_bound_rises(batch_size: int | None) -> None:
    clients = problems.coregional()[1]
    fit = fedppl.fit(
        problems.coregional()[0],
        clients,
        fedppl.curves.Averaging(steps=10, batch_size=batch_size),
        rounds=80,
        progressbar=False,
        random_seed=4,
    )
    bounds = fit.idata["rounds"]["bound"].values[1:]
    assert np.all(np.isfinite(bounds))
    assert bounds[-1] > bounds[0] + 100
    assert np.mean(bounds[-10:]) > np.mean(bounds[10:20]) + 10
    own = [UnitClientState(*kept) for kept in fit.personal.values()]
    role = fit.state.roles
    assert total_bound(views_of(clients), unflatten(fit.state.x, role), own, role.log_odds) > bounds[0] + 100


def test_a_unit_that_forgot_starts_from_the_curves() -> None:
    """It says so, and does better than with random coefficients; in the first rounds there is nothing to go by."""
    clients = problems.coregional()[1]
    algorithm = fedppl.curves.Averaging(steps=5)
    played = play(algorithm, clients, 30)
    client = problems.coregional()[0].enrol(clients, kernel=False)["unit 2"]
    message = algorithm.broadcast(played.states[-1], "unit 2")
    _, kept, info = algorithm.update_client(client, played.personal[-1]["unit 2"], message, stream((1,)))
    _, blank, told = algorithm.update_client(client, None, message, stream((1,)))
    assert "blank" not in info and told["blank"] == 1.0
    assert blank["bound"] > kept["bound"] - 1.0  # at its own maximum given the curves
    _, early, told = algorithm.update_client(
        client, None, algorithm.broadcast(played.states[1], "unit 2"), stream((1,))
    )
    assert "blank" not in told and np.isfinite(early["bound"])


def test_a_late_joiner_is_counted_when_it_is_heard() -> None:
    clients, calls = problems.coregional()[1], iter(range(100))
    fit = fedppl.fit(
        problems.coregional()[0],
        clients,
        fedppl.curves.Averaging(steps=3),
        rounds=10,
        participation=lambda ids, rng: tuple(ids) if next(calls) >= 5 else tuple(k for k in ids if k != "unit 1"),
        progressbar=False,
        random_seed=4,
    )
    assert_array_equal(fit.state.rows, [len(data["y"]) for data in clients.values()])
    assert fit.records[5].infos["unit 1"]["blank"] == 1.0
    assert np.all(np.isfinite(fit.state.x))


def test_a_learning_rate_that_is_far_too_large_fails_at_the_unit_and_says_so() -> None:
    clients = problems.coregional()[1]
    algorithm = fedppl.curves.Averaging(learning_rate=1e3, steps=20)
    played = play(fedppl.curves.Averaging(), clients, 1)
    client = problems.coregional()[0].enrol(clients, kernel=False)["unit 0"]
    message = algorithm.broadcast(played.states[1], "unit 0")
    with np.errstate(all="ignore"), pytest.raises(LocalFailure, match="no finite gradient; lower learning_rate="):
        algorithm.update_client(client, played.personal[1]["unit 0"], message, stream((1,)))


def test_what_is_sent_are_all_shared_parameters() -> None:
    played = play(fedppl.curves.Averaging(), problems.coregional()[1], 2)
    assert {key: np.shape(value) for key, value in played.replies[2]["unit 0"].items()} == {
        "x": (LATENTS * (POINTS + POINTS * (POINTS + 1) // 2 + 2) + 1,),
        "rows": (),
        "bound": (),
    }


@pytest.mark.parametrize("build", [fedppl.curves.Averaging, fedppl.curves.Gradient])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": np.nan}, "learning_rate=nan"),
        ({"learning_rate": np.inf}, "learning_rate=inf"),
        ({"learning_rate": ()}, "learning_rate=()"),
        ({"learning_rate": (0.1, -0.1), "milestones": (5,)}, "learning_rate=(0.1, -0.1)"),
        ({"learning_rate": 0.1, "milestones": (5,)}, "milestones=(5,) must be one less than the rates"),
        ({"learning_rate": 0.1, "milestones": "never"}, "milestones='never'"),
        ({"learning_rate": (0.1, 0.01), "milestones": ()}, "milestones=()"),
        ({"learning_rate": (0.1, 0.01), "milestones": (0,)}, "milestones=(0,)"),
        ({"learning_rate": (0.3, 0.2, 0.1), "milestones": (5, 5)}, "milestones=(5, 5)"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"initial_kernel": "mean"}, "initial_kernel='mean'"),
        ({"tolerance": 2.0}, "tolerance=2.0"),
    ],
)
def test_settings_out_of_range_are_refused_by_their_value(build: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=re.escape(message)):
        build(**settings)


@pytest.mark.parametrize("steps", [0, 2.5, True])
def test_steps_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(DeclarationError, match=f"steps={steps}"):
        fedppl.curves.Averaging(steps=steps)


@pytest.mark.parametrize("build", [fedppl.curves.Averaging, fedppl.curves.Gradient])
def test_a_negative_number_of_rows_is_refused(build: Any) -> None:
    algorithm: AnyAlgorithm = build()
    played = play(algorithm, problems.coregional()[1], 2)
    reply = played.replies[2]["unit 0"]
    assert algorithm.replies.reject(played.states[1], reply) is None
    assert "'rows' holds -3" in str(algorithm.replies.reject(played.states[1], {**reply, "rows": np.array(-3.0)}))
