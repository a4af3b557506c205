"""The battery example's own functions, and a quick run of it on the real cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

import fedppl
from examples import battery
from examples.battery import Cell, Row, Scale, Task
from tests.support import problems

ROOT = Path(__file__).parents[2]


def cells(count: int = 30) -> dict[str, Cell]:
    """Capacities that fall faster after a knee, whose place is seen in the slope before it."""
    rng = np.random.default_rng(6)
    found = {}
    for number in range(count):
        cycles = np.arange(0.0, 2401.0, 160.0)
        fast = rng.uniform(0.9, 1.1)
        capacity = 1.85 - fast * (0.2 * cycles / 1000 + 0.6 * np.maximum(cycles / 1000 - 1, 0))
        found[f"cell {number:03}"] = Cell(cycles, capacity + 0.003 * rng.normal(size=len(cycles)))
    return found


def task(*options: str, seed: int = 0) -> Task:
    return battery.drawn(cells(), seed, battery.arguments(list(options)))


def with_other_ends(held_out: dict[str, Cell]) -> dict[str, Cell]:
    """The same cells, and nonsense after mid-life in those named."""
    changed = cells()
    for name in held_out:
        cycles, capacity = changed[name]
        changed[name] = Cell(cycles, np.where(cycles > battery.MIDLIFE, 1e3, capacity))
    return changed


def test_twenty_clients_are_drawn_the_target_known_to_midlife_and_three_new_cells() -> None:
    found, own = task(), cells()
    target = next(iter(found.clients))
    assert len(found.clients) == 20 and len(found.new) == 3 and not set(found.new) & set(found.clients)
    np.testing.assert_array_equal(found.clients[target].cycles, np.arange(0, 1121, 160))
    np.testing.assert_array_equal(found.target, own[target])
    for name in list(found.clients)[1:]:
        np.testing.assert_array_equal(found.clients[name], own[name])
    assert list(task(seed=1).clients) != list(found.clients) == list(task().clients)


def test_level_and_unit_from_sums_are_those_of_the_training_rows_in_one_place() -> None:
    clients = task().clients
    level = np.mean([cell.capacity[0] for cell in clients.values()])
    pooled = np.concatenate([cell.capacity for cell in clients.values()])
    np.testing.assert_allclose(battery.agreed(clients), [level, np.sqrt(np.mean((pooled - level) ** 2))], rtol=1e-9)
    scaled = battery.rows(Cell(np.array([500.0]), np.array([1.6])), Scale(1.8, 0.4))
    np.testing.assert_allclose([scaled["X"], scaled["y"]], [[0.5], [-0.5]])


def test_what_comes_after_midlife_changes_nothing_that_goes_into_a_fit_or_a_new_cell() -> None:
    before = task()
    target = next(iter(before.clients))
    options = battery.arguments([])
    after = battery.drawn(with_other_ends({target: before.target, **before.new}), 0, options)
    assert list(before.clients) == list(after.clients) and list(before.new) == list(after.new)
    for name, cell in before.clients.items():
        np.testing.assert_array_equal(cell, after.clients[name])
    for name, cell in before.new.items():
        np.testing.assert_array_equal(battery.until_midlife(cell), battery.until_midlife(after.new[name]))
        assert not np.array_equal(cell, after.new[name])
    assert battery.agreed(before.clients) == battery.agreed(after.clients)
    assert before.target.capacity[-1] != after.target.capacity[-1]


def test_checks_without_a_value_are_left_out_and_two_at_one_cycle_are_two_rows(tmp_path: Path) -> None:
    folder = tmp_path / "sanyo48_battery"
    folder.mkdir()
    one = {"cyc": np.array([0.0, 160.0, 160.0, 320.0]), "cap": np.array([np.nan, 1.8, 1.79, 1.7])}
    savemat(folder / "baumhofer.mat", {"lifetime": {"ep_sanyo_002": one, "ep_sanyo_003": one}})
    found = battery.load(battery.find_data(tmp_path))
    assert list(found) == ["cell 002", "cell 003"]
    np.testing.assert_array_equal(found["cell 003"].cycles, [160, 160, 320])
    np.testing.assert_array_equal(found["cell 003"].capacity, [1.8, 1.79, 1.7])


def test_what_is_scored_is_the_other_half_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def forecast(found: object, unit: object, cycles: np.ndarray, *rest: object, **which: object) -> np.ndarray:
        np.testing.assert_array_equal(cycles, [1300.0, 1400.0])
        return np.array([[0.9, 0.9], [1.0, 1.0], [1.1, 1.1]])

    monkeypatch.setattr(battery, "forecast", forecast)
    cell = Cell(np.array([0.0, 1200.0, 1300.0, 1400.0]), np.array([9.0, 9.0, 1.05, 1.2]))
    found = battery.score(cell, None, None, Scale(0.0, 1.0))  # type: ignore[arg-type]
    np.testing.assert_allclose(found, ((0.05**2 + 0.2**2) / 2, 0.5))


def test_the_mean_of_the_others_leaves_the_target_out() -> None:
    found = task()
    late = found.target.cycles > battery.MIDLIFE
    others = np.mean([cell.capacity for cell in list(found.clients.values())[1:]], axis=0)
    mse, _ = battery.mean_curve(found, found.target)
    np.testing.assert_allclose(mse, np.mean((others - found.target.capacity)[late] ** 2))


def test_the_factor_is_of_mean_errors() -> None:
    repeats = [{"IGP": Row(mse, 0.9), battery.MAIN: Row(0.01, 0.9)} for mse in (0.1, 0.3)]
    assert battery.ratio(repeats, battery.MAIN) == pytest.approx(20)


@pytest.mark.parametrize("options", [("--repeats", "0"), ("--rounds", "0"), ("--averaging", "-1"), ("--seed", "-1")])
def test_options_out_of_range_are_refused(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        battery.arguments(list(options))
    assert options[0] in capsys.readouterr().err


@pytest.fixture
def batteries(data_dir: Path) -> Path:
    if not (data_dir / "sanyo48_battery").is_dir():
        pytest.skip("cells not found: put baumhofer.mat into sanyo48_battery in the folder that FEDPPL_DATA names")
    return data_dir


def test_the_real_file_has_48_cells(batteries: Path) -> None:
    found = battery.load(battery.find_data(batteries))
    counts = [len(cell.cycles) for cell in found.values()]
    assert (len(counts), min(counts), max(counts), sum(counts)) == (48, 11, 17, 694)
    assert max(cell.cycles.max() for cell in found.values()) == 2 * battery.MIDLIFE
    assert all(np.any(cell.cycles > battery.MIDLIFE) and cell.cycles.min() <= 160 for cell in found.values())
    assert all(0.28 < cell.capacity.min() and cell.capacity.max() < 1.86 for cell in found.values())


@problems.few_rounds
@pytest.mark.slow
def test_a_quick_fit_learns_the_fall_from_the_others_and_sees_nothing_of_it() -> None:
    options = battery.arguments(["--quick"])
    before = battery.drawn(cells(), 0, options)
    target = next(iter(before.clients))
    after = battery.drawn(with_other_ends({target: before.target, **before.new}), 0, options)
    found = []
    for one in (before, after):
        scale = battery.agreed(one.clients)
        units = {name: battery.rows(cell, scale) for name, cell in one.clients.items()}
        fit, _, _ = battery.fit(one, units, 2, True, fedppl.curves.Ascent(kernel_rate=0.2), 60)
        found.append(battery.forecast(fit, target, before.target.cycles, scale))
    np.testing.assert_array_equal(found[0], found[1])
    late = before.target.cycles > battery.MIDLIFE
    error = np.sqrt(np.mean((found[0][1] - before.target.capacity)[late] ** 2))
    assert error < 0.05  # the fall is by 0.9 Ah and more
