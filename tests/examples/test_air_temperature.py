"""The air temperature example's own functions, and a quick run of it on the real stations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

import fedppl
from examples import air_temperature
from examples.air_temperature import Row, Station, Task
from tests.support import problems

ROOT = Path(__file__).parents[2]


def stations() -> dict[str, Station]:
    """Four noisy copies of one daily course, every five minutes for 15 days."""
    rng = np.random.default_rng(5)
    days = np.arange(1, 15 * 288 + 1) / 288
    course = 17 - 4 * np.cos(2 * np.pi * days)
    return {
        name: Station(days, course + level + 0.3 * rng.normal(size=len(days)))
        for level, name in enumerate(air_temperature.FILES)
    }


def task(*options: str, new: str = "Cambermet", missing: float | None = None) -> Task:
    """The task with these options, and perhaps another value in all of the missing hours."""
    own, chosen = stations(), air_temperature.arguments(list(options))
    found = air_temperature.divide(own, new, 0, chosen)
    if missing is None:
        return found
    gone = np.isin(own[new].days, found.missing.days)
    own[new] = own[new]._replace(celsius=np.where(gone, missing, own[new].celsius))
    return air_temperature.divide(own, new, 0, chosen)


@pytest.mark.parametrize(("new", "ends"), [("Cambermet", (10.2, 10.8)), ("Chimet", (13.5, 14.2))])
def test_the_missing_hours_are_those_of_the_literature_and_no_training_row_lies_within(
    new: str, ends: tuple[float, float]
) -> None:
    found = task("--every", "10", new=new)
    assert list(found.clients) == [name for name in air_temperature.FILES if name != new]
    assert found.missing.days.min() >= ends[0] - 1e-6 and found.missing.days.max() <= ends[1] + 1e-6
    np.testing.assert_allclose(np.diff(found.missing.days), 1 / 288)  # all of them are scored
    assert not np.any((found.known.days >= ends[0]) & (found.known.days <= ends[1]))
    for station in (found.known, *found.clients.values()):
        assert station.days.min() >= 10 and station.days.max() <= 15
        np.testing.assert_allclose(np.diff(station.days).min(), 2 / 288)


def test_one_day_has_five_missing_hours() -> None:
    found = task("--day", "3")
    assert found.span == (2.0, 3.0)
    np.testing.assert_allclose(24 * (np.array([found.missing.days.min(), found.missing.days.max()]) - 2), [12, 17])
    assert all(len(station.days) == 289 for station in found.clients.values())


def test_the_scale_from_sums_is_that_of_the_clients_rows_in_one_place() -> None:
    found = task()
    pooled = np.concatenate([station.celsius for station in found.clients.values()])
    np.testing.assert_allclose(air_temperature.agreed(found.clients), [pooled.mean(), pooled.std()], rtol=1e-9)
    y = air_temperature.rows(found.known, air_temperature.agreed(found.clients))["y"]
    np.testing.assert_allclose(y * pooled.std() + pooled.mean(), found.known.celsius)


@pytest.mark.parametrize("new", ["Cambermet", "Chimet"])
def test_missing_values_change_nothing_that_goes_into_a_fit_or_a_new_unit(new: str) -> None:
    before, after = task(new=new), task(new=new, missing=1e3)
    assert before.clients.keys() == after.clients.keys()
    for name, station in before.clients.items():
        np.testing.assert_array_equal(station, after.clients[name])
    np.testing.assert_array_equal(before.known, after.known)
    assert air_temperature.agreed(before.clients) == air_temperature.agreed(after.clients)
    assert air_temperature.agreed({new: before.known}) == air_temperature.agreed({new: after.known})  # IGP's
    assert not np.allclose(before.missing.celsius, after.missing.celsius)


def test_rows_without_a_value_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "south_coast_air_temp"
    folder.mkdir()
    table = np.array([[5.0, 180.0, 7.0, 16.5], [5.0, 180.0, 7.0, -1.0], [5.0, 180.0, 7.0, 17.5]])
    for file in air_temperature.FILES.values():
        savemat(folder / file, {"x": np.array([[1.0], [2.0], [3.0]]) / 288, "y": table})
    found = air_temperature.load(air_temperature.find_data(tmp_path))
    assert list(found) == ["Bramblemet", "Cambermet", "Chimet", "Sotonmet"]
    np.testing.assert_allclose(found["Chimet"].days * 288, [1, 3])
    np.testing.assert_array_equal(found["Chimet"].celsius, [16.5, 17.5])


def test_errors_are_in_degrees_and_intervals_hold_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    found = task()._replace(missing=Station(np.array([1.0, 2.0]), np.array([15.0, 20.0])))
    bands = np.array([[14.0, 14.0], [16.0, 18.0], [18.0, 19.0]])
    monkeypatch.setattr(air_temperature, "forecast", lambda *args, **kwargs: bands)
    scale = air_temperature.agreed(found.clients)
    assert air_temperature.score(found, None, None, scale) == (2.5, 0.5)  # type: ignore[arg-type]


def test_the_table_says_whether_the_selection_helps(capsys: pytest.CaptureFixture[str]) -> None:
    seeds = [
        {air_temperature.OURS: Row(ours, 0.9, 3, 1.0, 1.0), air_temperature.THEIRS: Row(theirs, 0.8, 3, 1.0, 1.0)}
        for ours, theirs in ((1.0, 4.0), (9.0, 8.0))
    ]
    found = air_temperature.means(seeds)[air_temperature.OURS]
    assert (found["rmse"], found["mse"], found["mse_sd"]) == (2.0, 5.0, 4.0)
    air_temperature.show("Cambermet", seeds)
    printed = capsys.readouterr().out
    assert "FedLMC-SS is below FedLMC-selected: -1.0000 °C², lower in 1 of 2 seeds" in printed
    air_temperature.show("Cambermet", seeds[1:])
    assert "is NOT below" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [("--day", "0"), ("--day", "16"), ("--every", "7"), ("--seeds", "0"), ("--averaging", "-1")]
)
def test_options_out_of_range_are_refused(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        air_temperature.arguments(list(options))
    assert options[0] in capsys.readouterr().err


@pytest.fixture
def weather(data_dir: Path) -> Path:
    if not (data_dir / "south_coast_air_temp").is_dir():
        pytest.skip(
            "south-coast stations not found: put bra.mat, ... into south_coast_air_temp in FEDPPL_DATA's folder"
        )
    return data_dir


def test_the_real_files_have_four_stations(weather: Path) -> None:
    found = air_temperature.load(air_temperature.find_data(weather))
    assert {name: len(station.days) for name, station in found.items()} == {
        "Bramblemet": 4220,
        "Cambermet": 4320,
        "Chimet": 4305,
        "Sotonmet": 3318,
    }
    values = np.concatenate([station.celsius for station in found.values()])
    assert 10 < values.min() and values.max() == 33.8


@problems.few_rounds
@pytest.mark.slow
def test_a_quick_fit_follows_the_others_where_the_new_station_is_silent() -> None:
    """The same course at all stations, so that the others know what is missing; and nothing of it is seen."""
    found = []
    for missing in (None, 1e3):
        one = task("--quick", missing=missing)
        scale = air_temperature.agreed(one.clients)
        units = {name: air_temperature.rows(station, scale) for name, station in one.clients.items()}
        fit, _, _ = air_temperature.fit(one, units, 2, True, fedppl.curves.Ascent(kernel_rate=0.1), 30)
        new = air_temperature.rows(one.known, scale)
        found.append(air_temperature.forecast(fit, new, one.missing.days, scale))
        if missing is None:
            truth = one.missing.celsius
            assert np.sqrt(np.mean((found[0][1] - truth) ** 2)) < 1.0  # the noise of a row is 0.3, the course's sd 2.8
    np.testing.assert_array_equal(found[0], found[1])
