"""Default fits against NUTS on all rows: 22 models of different kinds, and eight schools by quadrature.

A client's posterior is declared once, and the same functions declare the pooled model that nutpie samples, so that the
two differ in nothing but where the rows are. Compared are mean and sd of every shared variable on the unconstrained
space, and of five clients' own variables: z = (ours − theirs) / their sd, r = our sd / theirs. EP, a Gaussian, stands
beside. CPU seconds are of the second fit in the process, with searches for other modes. With ``--peers`` those
of ``fedppl.EP()`` stand beside them, and of nutpie until the smallest bulk ESS of what is shared is 1,000: compiling
left out, 400 steps of tuning in, and as many draws of four chains as that takes by what 500 of each come to. The part
``exchanges`` holds ``fedppl.Sums(exchanges=4)`` against ``fedppl.Sums()``, with 5 and 6 where 4 do not do, of the same
models and of both outcomes of ``examples/trial.py``.

    python benchmarks/exactness.py
    python benchmarks/exactness.py --parts models more_models --peers
    python benchmarks/exactness.py --parts intercepts
    python benchmarks/exactness.py --parts evidence leave_one_out withdrawal conflict
    python benchmarks/exactness.py --parts exchanges
    python benchmarks/exactness.py --parts models --models emax horseshoe --draws 20000 --references kept
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from benchmarks._exactness import eight_schools, models, more_models, tools
from benchmarks._exactness.models import Problem
from benchmarks._exactness.reference import found_again, of_clients
from benchmarks._exactness.reference import reference as of_pooled
from examples import trial
from fedppl.types import Array

_ESS = 10_000  # of the reference
_SD_ERROR = 0.01  # of the reference, as a share of the sd
_MOST_DRAWS = 40_000  # of a chain
_PROBLEMS = {"models": models.PROBLEMS, "more_models": more_models.PROBLEMS}


def main(argv: list[str] | None = None) -> None:
    """Run the models, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = [make.__name__ for made in _PROBLEMS.values() for make in made]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parts = [*_PROBLEMS, "eight_schools", "exchanges", *tools.PARTS]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--draws", type=int, default=10_000, help="of each of four chains of the reference")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", action="store_true", help="CPU seconds of EP and of nutpie, too")
    parser.add_argument("--references", type=Path, help="folder that keeps them by name; empty it when a model changes")
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # the table says what converged
    warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
    line: dict[str, Any] = {"benchmark": "exactness"}
    if "eight_schools" in options.parts:
        line["eight_schools"] = eight_schools.compared(options.seed)
    for name in tools.PARTS:
        if name in options.parts:
            line[name] = tools.PARTS[name]()
            print(f"{name}: {line[name]}", flush=True)
    for part in [part for part in _PROBLEMS if part in options.parts]:
        chosen = [make for make in _PROBLEMS[part] if make.__name__ in options.models]
        line[part] = [_compared(make(), options) for make in chosen]
    if "exchanges" in options.parts:
        made = (make() for makes in _PROBLEMS.values() for make in makes if make.__name__ in options.models)
        every = ((p.name, fedppl.FederatedModel(p.builder(), p.shared_names()), p.clients) for p in made)
        line["exchanges"] = [_in_few(*one, options.seed, options.draws // 2) for one in _trials()]
        line["exchanges"] += [_in_few(*one, options.seed) for one in every]
    print(json.dumps(line))


def _trials() -> Iterator[tuple[str, fedppl.FederatedModel, dict[str, Any]]]:
    """Both outcomes of the example, with one site that tells estimates."""
    for outcome in trial.FORMULAS:
        of = trial.simulate(np.random.default_rng(3))
        clients: dict[str, Any] = {str(name): rows for name, rows in of.table.groupby("site")}
        clients |= {trial.TELLS_ESTIMATES: trial.told(of.elsewhere, outcome)}
        yield f"trial, {outcome}", fedppl.agree(trial.declared(outcome), clients).model, clients


def _in_few(
    name: str, model: fedppl.FederatedModel, clients: dict[str, Any], seed: int, draws: int = 0
) -> dict[str, Any]:
    """Largest z and r of shared coordinates, in at most 4 exchanges, and in 5 and 6 where these do not do.

    Against a fit in as many as it takes, and against so many draws of each chain of nutpie.
    """
    seconds, whole = _timed(lambda: fedppl.fit(model, clients, fedppl.Sums(), progressbar=False, random_seed=seed))
    mean, sd = _moments(whole)
    rows = []
    for most in (4, 5, 6):
        algorithm = fedppl.Sums(exchanges=most)
        took, fit = _timed(
            functools.partial(fedppl.fit, model, clients, algorithm, progressbar=False, random_seed=seed)
        )
        own, spread = _moments(fit)
        z, r, points = np.abs(own - mean) / sd, spread / sd, int(fit.records[-1].info["points"])
        rows.append((most, fit.status.value, len(fit.records), points, z.max(), r.min(), r.max(), took))
        if fit.status.value == "converged":
            break
    print(f"{name:24s} {whole.status.value} in {len(whole.records)} exchanges, {seconds:.0f} CPU-s", flush=True)
    for most, status, taken, points, far, low, high, took in rows:
        text = f"{status} in {taken}, {points} points, |z| {far:.3f} r {low:.3f} to {high:.3f}, {took:.0f} CPU-s"
        print(f"  at most {most}: {text}", flush=True)
    if draws:
        theirs, ess = of_clients(list(model.enrol(clients).values()), whole.posterior, draws, seed)
        told = _told(own, spread[:, None] * np.eye(len(spread)) * spread, theirs)
        print(f"  against nutpie (ESS {ess:.0f}): {dict(zip(fit.layout.labels, told, strict=True))}", flush=True)
    return {"model": name, "status": whole.status.value, "exchanges": len(whole.records), "in_few": rows}


def _moments(fit: fedppl.Fit) -> tuple[Array, Array]:
    found = fit.idata["fit"]
    return found["mean_vector"].values, np.sqrt(np.diag(found["covariance_matrix"].values))


def _compared(problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    draws, seed, kept = options.draws, options.seed, options.references
    declared = fedppl.FederatedModel(problem.builder(), problem.shared_names())
    again = functools.partial(fedppl.fit, declared, problem.clients, progressbar=False, random_seed=seed)
    plain = again(fedppl.EP())
    first, _ = _timed(again)
    seconds, fit = _timed(again)
    short = again(fedppl.Sums(starts=1))
    peers: dict[str, float] = {}
    if options.peers:
        _timed(lambda: again(fedppl.EP()))
        peers = {"ep": round(_timed(lambda: again(fedppl.EP()))[0], 2), "nutpie": round(_by_nutpie(problem, seed), 2)}
    enough: dict[str, Any] = {"ess": _ESS, "ess_of_squares": _ESS, "most": _MOST_DRAWS}
    enough |= {"transforms": dict(problem.unconstrained()), "sd_error": _SD_ERROR}
    sample = functools.partial(of_pooled, problem.pooled(), None, draws, seed, **enough)
    reference, quality = sample() if kept is None else found_again(sample, kept / f"{problem.name} {draws} {seed}.npz")
    labels = fit.layout.labels
    theirs = np.concatenate([_flat(reference, name) for name in problem.unconstrained()], axis=1)
    alone = plain.idata["fit"]
    told = _told(alone["mean_vector"].values, alone["covariance_matrix"].values, theirs)
    exact = fit.idata["fit"]
    ours = _told(exact["mean_vector"].values, exact["covariance_matrix"].values, theirs)
    local = [_local(fit, reference, client_id, problem.local) for client_id in list(problem.clients)[:5]]
    row = {
        "model": problem.name,
        "status": fit.status.value,
        "algorithm": fit.algorithm.name,
        "shared": dict(zip(labels, ours, strict=True)),
        "by_ep": dict(zip(labels, told, strict=True)),
        "max_z": max(abs(z) for z, _ in [*ours, *local]),
        "r": [min(r for _, r in [*ours, *local]), max(r for _, r in [*ours, *local])],
        "local": local,
        "cpu_seconds": round(seconds, 2),
        "cpu_seconds_of_the_first": round(first, 2),
        "cpu_seconds_of_peers": peers,
        "exchanges_with_one_start": len(short.records),
        "reference": quality,
        "message": fit.message,
    }
    ep = max(abs(z) for z, _ in told), min(r for _, r in told), max(r for _, r in told)
    print(
        f"{problem.name:22s} {fit.status.value:10s} |z| {row['max_z']:.3f} r {row['r'][0]:.3f} to {row['r'][1]:.3f}"
        f" (EP {ep[0]:.3f}, {ep[1]:.3f} to {ep[2]:.3f})  {fit.algorithm.name} {seconds:.1f} CPU-s {peers}, "
        f"{len(short.records)} exchanges  reference: {quality}",
        flush=True,
    )
    return row


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    found = call()
    return time.process_time() - started, found


def _by_nutpie(problem: Problem, seed: int, tune: int = 400, draws: int = 500, ess: float = 1000.0) -> float:
    """CPU seconds of sampling the pooled rows until the smallest bulk ESS of what is shared is so large."""
    import nutpie

    compiled = nutpie.compile_pymc_model(problem.pooled())
    options: dict[str, Any] = {"chains": 4, "cores": 1, "seed": seed, "progress_bar": False, "store_divergences": False}
    nutpie.sample(compiled, draws=1, tune=10, **options)  # what is compiled when it is called first
    seconds, found = _timed(lambda: nutpie.sample(compiled, draws=draws, tune=tune, **options))
    shared = found["posterior"][[name for name, _ in problem.unconstrained()]]
    smallest = min(float(one.min()) for one in az.ess(shared, method="bulk").values())
    return seconds / (tune + draws) * (tune + draws * ess / smallest)


def _flat(posterior: Any, unconstrained: tuple[str, Any]) -> Array:
    name, transform = unconstrained
    values = np.asarray(posterior[name].values, dtype=float)
    return np.asarray(transform(values.reshape(values.shape[0] * values.shape[1], -1)))


def _told(mean: Array, covariance: Array, theirs: Array) -> list[tuple[float, float]]:
    z = (mean - theirs.mean(axis=0)) / theirs.std(axis=0)
    r = np.sqrt(np.diag(covariance)) / theirs.std(axis=0)
    return [(round(float(a), 4), round(float(b), 4)) for a, b in zip(z, r, strict=True)]


def _local(fit: Any, reference: Any, client_id: str, name: str) -> tuple[float, float]:
    """The worst z and r of the entries of one client's variable."""
    ours = np.asarray(fit.client(client_id, draws=10_000)["posterior"][name].values)
    theirs = np.asarray(reference[f"{client_id}_{name}"].values)
    ours, theirs = (x.reshape(x.shape[0] * x.shape[1], -1) for x in (ours, theirs))
    z = (ours.mean(axis=0) - theirs.mean(axis=0)) / theirs.std(axis=0)
    r = ours.std(axis=0) / theirs.std(axis=0)
    worst = int(np.argmax(np.abs(np.log(r))))
    return round(float(z[np.argmax(np.abs(z))]), 4), round(float(r[worst]), 4)


if __name__ == "__main__":
    main()
