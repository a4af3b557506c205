"""The digits example and FedSI's benchmark: who holds what, that no test row has a say, and short runs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("torch")

from benchmarks import fedsi as benchmark  # noqa: E402
from benchmarks._fedsi.data import Images, divide, find_data, load  # noqa: E402
from benchmarks._fedsi.fit import fitted  # noqa: E402
from examples import digits  # noqa: E402
from fedppl.models import fedsi  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("clients", "each"), [(10, 5), (20, 5), (1, 10), (4, 5)])
def test_every_label_is_held_equally_often(clients: int, each: int) -> None:
    for seed in range(5):
        held = fedsi.labels_of_clients(clients, 10, each, np.random.default_rng(seed))
        assert_array_equal(np.bincount(held.ravel(), minlength=10), clients * each // 10)
        assert all(len(set(labels)) == each for labels in held.tolist())
    with pytest.raises(ValueError, match="3 clients of 5 labels do not hold 10 labels equally often"):
        fedsi.labels_of_clients(3, 10, 5, np.random.default_rng(0))


def test_rows_of_the_example_are_disjoint_and_scaled_by_training_rows_alone() -> None:
    clients = digits.divide(digits.arguments([]))
    train = np.concatenate([client.train["X"] for client in clients.values()])
    assert_allclose([train.mean(), train.std()], [0, 1], atol=1e-5)
    for client in clients.values():
        assert len(client.y) == 75 and len(client.train["y"]) == 75
        assert set(client.y) == set(client.train["y"]) and len(set(client.y)) == 5
        assert len(client.unseen) == 375
    everything = np.concatenate([train, *(client.X for client in clients.values())])
    assert len(np.unique(everything, axis=0)) == len(everything)  # no image twice


def images(seed: int = 0) -> Images:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(10), 5100)
    return Images(rng.uniform(size=(len(labels), 4)).astype(np.float32), labels.astype(np.int64))


def problem(*options: str, own: Images | None = None) -> Any:
    """A partition of generated images."""
    return divide(own or images(), images(1), benchmark.arguments(["--size", "small", *options]), 0)


def test_test_rows_change_nothing_that_clients_train_on() -> None:
    """Nonsense in every row that no client trains on. The second and third pixel, 0 and 1, say how it was scaled."""
    own = images()
    number = np.arange(len(own.labels)) / len(own.labels)
    own = own._replace(pixels=np.column_stack([number, 0 * number, 0 * number + 1, number**2]).astype(np.float32))
    before = problem(own=own)
    train = np.concatenate([data["X"] for data in before.train.values()]).astype(float)
    found = (train[:, 0] - train[:, 1]) / (train[:, 2] - train[:, 1]) * len(number)
    assert_allclose(found, np.round(found), atol=0.1)
    spoiled = np.setdiff1d(np.arange(len(number)), np.round(found).astype(int))
    assert len(spoiled) == len(number) - len(train)
    pixels = own.pixels.copy()
    pixels[spoiled] = 9.0
    after = problem(own=own._replace(pixels=pixels))
    for name, data in before.train.items():
        assert_array_equal(data["X"], after.train[name]["X"])
        assert_array_equal(data["y"], after.train[name]["y"])
    assert not np.allclose(before.test["client 0"].pixels, after.test["client 0"].pixels)


def test_rows_of_the_benchmark_are_disjoint_and_of_the_clients_labels() -> None:
    found = problem()
    assert list(found.train) == [f"client {k}" for k in range(10)]
    for name, data in found.train.items():
        labels = set(data["y"])
        assert len(labels) == 5 and np.bincount(data["y"], minlength=10).max() == 50
        assert set(found.test[name].labels) == labels and len(found.test[name].labels) == 5 * 950
    rows = np.concatenate([*(d["X"] for d in found.train.values()), *(t.pixels for t in found.test.values())])
    assert len(np.unique(rows, axis=0)) == len(rows) == 50_000
    train = np.concatenate([data["X"] for data in found.train.values()])
    assert_allclose([train.mean(), train.std()], [0, 1], atol=1e-4)
    assert found.strange.shape == (500, 4)


def test_fewer_rows_leave_the_test_rows_as_they_are() -> None:
    few, many = problem("--rows", "5"), problem()
    assert {len(data["y"]) for data in few.train.values()} == {25}
    for name in few.test:
        assert_array_equal(few.test[name].labels, many.test[name].labels)


def test_settings_are_chosen_on_training_rows() -> None:
    """The rows that are scored are those that the client would have trained on."""
    whole, held_out = problem(), problem("--validation", "10")
    for name, data in held_out.train.items():
        assert len(data["y"]) == 200 and len(held_out.test[name].labels) == 50
        together = np.concatenate([data["y"], held_out.test[name].labels])
        assert_array_equal(np.sort(together), np.sort(whole.train[name]["y"]))
    mean = lambda found: np.concatenate([d["X"] for d in found.train.values()]).mean()  # noqa: E731
    assert_allclose([mean(whole), mean(held_out)], 0, atol=1e-4)


def test_clients_left_out_have_no_say_in_the_scale() -> None:
    found = problem("--novel", "2")
    assert found.novel == ("client 8", "client 9")
    taking_part = np.concatenate([data["X"] for name, data in found.train.items() if name not in found.novel])
    assert_allclose([taking_part.mean(), taking_part.std()], [0, 1], atol=1e-4)


def test_idx_files_are_read_as_published(tmp_path: Path) -> None:
    pixels = np.arange(2 * 784, dtype=np.uint8).reshape(2, 784)
    for part, rows in (("train", pixels[:1]), ("t10k", pixels[1:])):
        with gzip.open(tmp_path / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + rows.tobytes())
        with gzip.open(tmp_path / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes([7]))
    found = load(tmp_path)
    assert_allclose(found.pixels, pixels / 255, rtol=1e-6)
    assert_array_equal(found.labels, [7, 7])


def test_bars_are_judged_by_means_and_pairs() -> None:
    seeds = pd.DataFrame(
        [
            {"seed": seed, "row": row, "accuracy": accuracy + seed, "ECE": ece, "seconds": 1.0}
            for seed in range(2)
            for row, accuracy, ece in (
                ("FedSI 0.01", 94.0, 0.02),
                ("FedAvg-FT 0.001", 94.1, 0.1),
                ("FedSI-Fac 0.01", 93, 0.01),
            )
        ]
    )
    table = seeds.drop(columns="seed").groupby("row", sort=False).mean()
    judged = dict(benchmark.bars(table, seeds, benchmark.arguments([])))
    assert judged == {
        "accuracy 94.50, at least 93.98": True,
        "-0.10 against FedAvg-FT 0.001, paired, at least -0.2": True,
        "ECE 0.020, at most 0.04": True,
        "ECE 0.020, below 0.010 of FedSI-Fac": False,
        "a client's round 1.0 s, at most 10": True,
    }


@pytest.mark.parametrize("options", [("--rows", "0"), ("--rows", "21"), ("--rounds", "0")])
def test_options_of_the_example_out_of_range_are_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        digits.arguments(list(options))


@pytest.mark.parametrize("options", [("--seeds", "0"), ("--rows", "0"), ("--novel", "10"), ("--dataset", "letters")])
def test_options_of_the_benchmark_out_of_range_are_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        benchmark.arguments(list(options))


def test_absent_data_end_in_a_message_that_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--data or FEDPPL_DATA"):
        find_data(tmp_path, "mnist")


def run(*command: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def tiny_fit(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A method on four pixels, with a checkpoint."""
    import torch

    options = benchmark.arguments(["--folder", str(folder), "--rounds", str(rounds), "--rows", "2"])
    found = divide(images(), None, options, 0)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 10))
    return fitted("FedAvg", 1e-3, net, found, 0, options)


def test_a_checkpoint_of_more_rounds_is_not_taken_for_fewer(tmp_path: Path) -> None:
    """It was, and kept under the name of the fewer rounds."""
    tiny_fit(tmp_path, 2)
    with pytest.raises(ValueError, match="has 2 rounds, which do not go back to 1"):
        tiny_fit(tmp_path, 1)


def test_seconds_of_a_round_are_of_the_rounds_of_this_process(tmp_path: Path) -> None:
    assert tiny_fit(tmp_path, 2)[0]["seconds"] > 0
    assert "seconds" not in tiny_fit(tmp_path, 2)[0]  # from the checkpoint


def test_more_unused_images_than_there_are_end_in_a_message() -> None:
    options = benchmark.arguments(["--dataset", "cifar10", "--unused", "9999"])
    with pytest.raises(SystemExit, match="--unused 9999: nobody holds"):
        divide(images(), None, options, 0)


@pytest.mark.slow
def test_a_short_run_of_the_benchmark(data_dir: Path) -> None:
    if not (data_dir / "mnist").is_dir() or not (data_dir / "fashion_mnist").is_dir():
        pytest.skip("MNIST or Fashion-MNIST not found: put them into the folder that FEDPPL_DATA names")
    options = ("--rows", "10", "--seeds", "1", "--rounds", "2", "--methods", "FedBABU", "FedSI", "--novel", "2")
    rows = run("benchmarks/fedsi.py", "--data", str(data_dir), *options)["rows of the table"]
    assert {"FedBABU 0.001", "FedBABU 0.01", "FedSI 0.01", "FedSI 0.01, map"} <= set(rows)
    assert rows["FedSI 0.01"]["accuracy"] > 75 and rows["FedSI 0.01"]["novel"] > 75
