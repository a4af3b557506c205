"""Fits of one partition: every method at every rate."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
from typing import Any

import fedppl
from benchmarks import kept
from benchmarks._fedsi.data import OTHER, Problem, divide, find_data, load
from benchmarks._fedsi.scores import scores
from fedppl.models import fedsi

RATIO = {"mnist": 0.05, "fmnist": 0.05, "cifar10": 0.07}
WIDTHS = ("alpha", "variance", "diagonal_variance", "head_sd")


def network(dataset: str, seed: int) -> Any:
    """The common random start."""
    import torch

    torch.manual_seed(seed)
    layers = torch.nn
    if dataset != "cifar10":
        return layers.Sequential(layers.Linear(784, 100), layers.ReLU(), layers.Linear(100, 10))
    convolutions = (layers.Conv2d(3, 6, 5), layers.ReLU(), layers.MaxPool2d(2), layers.Conv2d(6, 16, 5), layers.ReLU())
    linear = (layers.Linear(400, 120), layers.ReLU(), layers.Linear(120, 84), layers.ReLU(), layers.Linear(84, 10))
    return layers.Sequential(*convolutions, layers.MaxPool2d(2), layers.Flatten(), *linear)


def algorithm_of(name: str, rate: float, head: tuple[str, ...], options: argparse.Namespace) -> fedppl.Algorithm:
    """A method's algorithm; FedSI's two have settings of their own."""
    epochs = fedsi.EPOCHS if options.epochs is None else options.epochs
    settings: dict[str, Any]
    if not name.startswith("FedSI"):
        return fedsi.METHODS[name].algorithm(rate, head, epochs)
    if name == "FedSI-Fac":
        settings = {"epochs": epochs, "diagonal": True, "prior_variance": options.diagonal_variance}
        return fedppl.nn.FedSI(learning_rate=rate, **settings)
    settings = {"epochs": epochs, "alpha": options.alpha, "prior_variance": options.variance}
    return fedppl.nn.FedSI(learning_rate=rate, ratio=options.ratio or RATIO[options.dataset], **settings)


def named(name: str, rate: float, seed: int, options: argparse.Namespace) -> str:
    """A fit's file, less its number of rounds: what decides the numbers, and no more."""
    of_data = [options.dataset, options.size, f"seed{seed}"]
    of_data += [
        f"{what}{getattr(options, what)}"
        for what in ("rows", "validation", "unused", "novel", "blocks")
        if getattr(options, what)
    ]
    of_method = ["ratio", "epochs", *WIDTHS] if name.startswith("FedSI") else ["epochs", "head_sd"]
    settings = [f"{what}{getattr(options, what):g}" for what in of_method if getattr(options, what) is not None]
    return "-".join([*of_data, name, f"{rate:g}", *settings])


def fitted(
    name: str, rate: float, net: Any, problem: Problem, seed: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One method at one rate: its row, and that of its weights as a point."""
    method, head = fedsi.METHODS[name], tuple(fedsi.shared_names(net, "head"))
    sigma = {weight: options.head_sd if weight in head else 1.0 for weight in fedsi.shared_names(net, "all")}
    model = fedppl.FederatedModel(
        functools.partial(fedsi.classifier, net=net, sigma=sigma), fedsi.shared_names(net, method.shares)
    )
    takes_part = {k: data for k, data in problem.train.items() if k not in problem.novel}
    algorithm, started = algorithm_of(name, rate, head, options), time.process_time()
    settings: dict[str, Any] = {"rounds": options.rounds, "progressbar": False, "random_seed": seed}
    if options.folder is not None and not method.alone:
        settings["checkpoint"] = options.folder / f"{named(name, rate, seed, options)}.ckpt"
    fits: dict[str, fedppl.Fit] = {}
    failed = 0  # replies of all rounds
    trained = 0  # rounds of clients in this process: what a checkpoint brought is not in them

    def count(step: fedppl.Round) -> None:
        nonlocal trained
        trained += len(step.record.asked)

    for group in [{k: v} for k, v in takes_part.items()] if method.alone else [takes_part]:
        fit = fedppl.fit(model, group, algorithm, engine=fedppl.InProcess(workers=1), callback=count, **settings)
        if len(fit.records) > options.rounds:
            raise ValueError(
                f"{settings['checkpoint']} has {len(fit.records)} rounds, which do not go back to {options.rounds}; "
                "ask for as many --rounds at least, or take another --folder."
            )
        fits |= dict.fromkeys(group, fit)
        failed += sum(len(record.failures) for record in fit.records)
    extra: dict[str, float] = {"failed": failed}
    if trained:
        extra["seconds"] = (time.process_time() - started) / trained
    own = {k: fedppl.nn.personalise(fit, k) for k, fit in fits.items()}
    if problem.novel and not method.alone:
        fit = next(iter(fits.values()))
        new = {k: fedppl.nn.personalise(fit, problem.train[k]) for k in problem.novel}
        extra["novel"] = scores(problem, new, dict.fromkeys(new, fit), "scaled")["accuracy"]
    label = f"{name} {rate:g}"
    records = [{"seed": seed, "row": label, **scores(problem, own, fits, "scaled"), **extra}]
    if name.startswith("FedSI"):
        records.append({"seed": seed, "row": f"{label}, map", **scores(problem, own, fits, "map")})
    print(f"seed {seed}: {label} {records[0]['accuracy']:.2f}", file=sys.stderr, flush=True)
    return records


def one_seed(seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every method at every rate on one partition; a record for each row."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # stopping at a set number of rounds is what was asked for
    images = load(find_data(options.data, options.dataset))
    other = OTHER.get(options.dataset)
    problem = divide(images, None if other is None else load(find_data(options.data, other)), options, seed)
    net = network(options.dataset, seed)
    records = []
    for name in options.methods:
        usual = options.fedsi_rates if name.startswith("FedSI") else options.rates
        for rate in options.bayes_rates if name == "pFedBayes" else usual:
            done, algorithm = None, algorithm_of(name, rate, tuple(fedsi.shared_names(net, "head")), options)
            if options.folder is not None:
                done = options.folder / f"{named(name, rate, seed, options)}-rounds{options.rounds}.json"
                if (earlier := kept.read(done, algorithm)) is not None:
                    records += earlier
                    continue
            found = fitted(name, rate, net, problem, seed, options)
            if done is not None:
                kept.write(done, found, algorithm)
            records += found
    return records
