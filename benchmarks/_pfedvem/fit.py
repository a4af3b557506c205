"""One fit: a method on one seed's partition, from its declaration to the accuracies that are kept."""

from __future__ import annotations

import argparse
import copy
import functools
import json
import logging
import math
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedppl
from benchmarks import kept as kept_fits
from benchmarks._pfedvem.data import Images, divide, find_data, held_rows, hold_out, load
from benchmarks._pfedvem.network import network, normal_head, zero_head
from benchmarks._pfedvem.scores import ends_of, is_scored
from fedppl.models import pfedvem
from fedppl.types import LocalFailure

REPORTING = 0.1
KEPT = 0.9  # of an average of the global model's weights over rounds


class Setting(NamedTuple):
    """One seed's data and network, ready to fit."""

    scored: Images
    everyone: np.ndarray  # rows of it that the global model is scored on
    own: dict[str, np.ndarray]  # and the clients' own models
    net: Any  # what holds the common start, and afterwards whatever is evaluated
    clients: dict[str, dict[str, np.ndarray]]
    method: pfedvem.Method
    model: fedppl.FederatedModel
    algorithm: fedppl.Algorithm


def prepare(name: str, seed: int, options: argparse.Namespace) -> Setting:
    """Divide the rows and declare the model."""
    train, test = load(find_data(options.data, options.dataset), options.dataset)
    if options.total is not None and options.total < len(train.labels):
        few = np.sort(np.random.default_rng((seed, 2)).choice(len(train.labels), options.total, replace=False))
        train = Images(*(values[few] for values in train))
    parts, method = divide(train, options, seed), pfedvem.METHODS[name]
    net = network(options.dataset, seed)
    head = tuple(pfedvem.shared_names(net, "head"))
    if "authors" in name:
        normal_head(net, head)
    elif "pFedVEM" in name or name.endswith("only"):
        zero_head(net, head)
    mean, sd = float(train.pixels.mean()), float(train.pixels.std())
    for images in (train, test):
        images.pixels[...] = (images.pixels - mean) / sd
    own, kept = {k: held_rows(test, kinds) for k, kinds in parts.kinds.items()}, parts.rows
    everyone = np.arange(len(test.labels))
    if options.validation:
        kept, own = hold_out(parts.rows, options.validation, seed)
        test, everyone = train, np.concatenate([*own.values()])
    clients = {k: {"X": train.pixels[rows], "y": train.labels[rows]} for k, rows in kept.items()}
    model = fedppl.FederatedModel(
        functools.partial(pfedvem.classifier, net=net), pfedvem.shared_names(net, method.shares)
    )
    algorithm = method.algorithm(head, **options.settings)
    return Setting(test, everyone, own, copy.deepcopy(net), clients, method, model, algorithm)


def accuracy_of(setting: Setting, weights: np.ndarray, rows: np.ndarray) -> float:
    """Per cent of these rows whose label the network with these weights names."""
    import torch

    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(torch.from_numpy(weights).float(), setting.net.parameters())
        pixels, order = setting.scored.pixels, torch.contiguous_format
        order = torch.channels_last if pixels.ndim == 4 else order  # pools are faster so
        parts = np.array_split(rows, math.ceil(len(rows) / 1000))
        inputs = (torch.from_numpy(pixels[part]).contiguous(memory_format=order) for part in parts)
        said = [setting.net(one).numpy().argmax(1) for one in inputs]
    return 100 * float(np.mean(np.concatenate(said) == setting.scored.labels[rows]))


def personal_accuracies(setting: Setting, fits: dict[str, fedppl.Fit]) -> dict[str, float]:
    """Accuracy of each client's own model on test rows of the kinds that it holds; a guess's, where there is none."""
    found = {}
    for name, rows in setting.own.items():
        try:
            found[name] = accuracy_of(setting, fedppl.nn.personalise(fits[name], name).weights, rows)
        except LocalFailure as error:
            print(error, file=sys.stderr)
            found[name] = 100.0 / len(np.unique(setting.scored.labels[rows]))
    return found


class Files(NamedTuple):
    """What is kept of a fit: when it is done, and meanwhile."""

    done: Path
    notes: Path
    checkpoint: Path
    averaged: Path


def files_of(name: str, seed: int, options: argparse.Namespace, folder: Path) -> Files:
    """A fit's files, named by all that decides its numbers."""
    stem = f"{options.dataset}-{options.clients}-{options.cuts}-{options.rounds}-{name.replace(' ', '-')}-{seed}"
    if options.total is not None:
        stem += f"-total{options.total}"
    if options.validation or options.settings:
        stem += f"-{options.validation:g}-{'-'.join(options.set)}"
    done = folder / f"{stem}.json"
    return Files(done, *(done.with_suffix(suffix) for suffix in (".part", ".ckpt", ".npy")))


def one_fit(job: tuple[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Fit one method on one seed's partition, and go on where an interrupted run stopped."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # stopping at a set number of rounds is what was asked for
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    name, seed = job
    with tempfile.TemporaryDirectory() as spare:
        files = files_of(name, seed, options, options.folder or Path(spare))
        head = tuple(pfedvem.shared_names(network(options.dataset, seed), "head"))
        algorithm = pfedvem.METHODS[name].algorithm(head, **options.settings)
        if (earlier := kept_fits.read(files.done, algorithm)) is not None:
            return dict(earlier)
        setting = prepare(name, seed, options)
        found: dict[str, Any] = {"method": name, "seed": seed, "seconds": 0.0, "PM": {}, "GM": {}, "GM averaged": {}}
        if files.notes.exists() and files.checkpoint.exists():
            found = json.loads(files.notes.read_text())
        if setting.method.alone:
            found["PM"][str(options.rounds)] = personal_accuracies(setting, _alone(setting, seed))
        else:
            fit = _together(setting, found, files, seed, options)
            found |= last_told(fit, ("confidence", "deviation", "cluster"))
        found["sizes"] = {k: len(rows["y"]) for k, rows in setting.clients.items()}
        if options.folder is not None:
            kept_fits.write(files.done, found, algorithm)
            records = files.checkpoint.with_name(files.checkpoint.name + ".records")
            for part in (files.notes, files.averaged, files.checkpoint, records):
                part.unlink(missing_ok=True)
    return found


def _alone(setting: Setting, seed: int) -> dict[str, fedppl.Fit]:
    """Every client by itself."""
    engine = fedppl.InProcess(workers=1)
    settings: dict[str, Any] = {"rounds": 1, "engine": engine, "random_seed": seed, "progressbar": False}
    clients = setting.clients.items()
    return {k: fedppl.fit(setting.model, {k: rows}, setting.algorithm, **settings) for k, rows in clients}


def _together(
    setting: Setting, found: dict[str, Any], files: Files, seed: int, options: argparse.Namespace
) -> fedppl.Fit:
    """All rounds that are left; what each brought is written into `found` and into the notes."""
    is_new = "rounds" not in found or not files.averaged.exists()
    before, averaged = time.process_time(), None if is_new else np.load(files.averaged)

    def note(step: fedppl.Round) -> None:
        nonlocal before, averaged
        found["seconds"] += time.process_time() - before
        if setting.method.shared:
            phi = setting.algorithm.result.shared.estimate(step.state)
            averaged = phi if averaged is None else KEPT * averaged + (1 - KEPT) * phi
            np.save(files.averaged, averaged)
            columns = (("GM", phi), ("GM averaged", averaged)) if is_scored(step.number, options) else ()
            for column, weights in columns:
                found[column][str(step.number)] = accuracy_of(setting, weights, setting.everyone)
        found["rounds"] = step.number
        found["failed"] = found.get("failed", 0) + len(step.record.failures)
        files.notes.write_text(json.dumps(found))
        before = time.process_time()

    settings: dict[str, Any] = {
        "engine": fedppl.InProcess(workers=1),
        "random_seed": seed,
        "progressbar": options.processes == 1,
        "reporting": REPORTING,
        "checkpoint": files.checkpoint,
        "callback": note,
    }
    for end in [end for end in ends_of(options) if end >= found.get("rounds", 0)]:
        fit = fedppl.fit(setting.model, setting.clients, setting.algorithm, rounds=end, **settings)
        if setting.method.personal:
            found["PM"][str(end)] = personal_accuracies(setting, dict.fromkeys(setting.clients, fit))
            files.notes.write_text(json.dumps(found))
        before = time.process_time()
    return fit


def last_told(fit: fedppl.Fit, names: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
    """What clients told of these names, where some did: each one's last, or nothing."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        told: dict[str, list[float]] = {k: [] for k in fit.client_ids}
        for record in fit.records:
            values = {k: float(info[name]) for k, info in record.infos.items() if name in info}
            told |= {k: [value] for k, value in values.items() if math.isfinite(value)}
        if any(told.values()):
            found[name] = told
    return found


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a round, with all clients trained and reporting, and what clients that do not report may leave out."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    found: dict[str, Any] = {}
    for name, reporting in (("FedAvg", None), ("pFedVEM", None), ("pFedVEM", REPORTING)):
        setting, times = prepare(name, options.seed, options), []
        settings: dict[str, Any] = {"engine": fedppl.InProcess(workers=1), "random_seed": options.seed}
        rounds = fedppl.rounds(
            setting.model, setting.clients, setting.algorithm, reporting=reporting, rounds=4, **settings
        )
        started = time.process_time()
        sizes: dict[str, int] = {}
        for step in rounds:
            times.append(time.process_time() - started)
            started, sizes = time.process_time(), dict(step.record.bytes_up)
        label = name if reporting is None else f"{name}, layers below only where they are reported"
        found[label] = float(np.median(times[1:]))
        found[f"bytes up, {label}"] = next(iter(sizes.values()))
    found["ratio"] = found["pFedVEM"] / found["FedAvg"]
    return found
