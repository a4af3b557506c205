"""What sums under masks cost a site, and what they change: one line of JSON, whose bars end in `_met`.

- models: fits by `fedppl.Sums` of models of `benchmarks/_exactness`, and of radon in houses of 85 counties
  (``FEDPPL_DATA``), plain and with ``InProcess(secure=True)``. Differences of means in sds, of log sds and of the log
  evidence, rounds that were void since a number did not fit, and CPU seconds of both, with clients one by one.
- sites: a site of 200 rows in a cohort, by its own functions (`fedppl.sites.node`) with account and log: CPU seconds
  until it has joined, CPU milliseconds of a round beside those of the same requests in the clear, and bytes of
  messages that it gets and sends, beside those in the clear.

    OMP_NUM_THREADS=1 python benchmarks/secure.py --models 10 --cohorts 3 20 100
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from benchmarks._exactness import models, more_models
from fedppl import gaussian, site
from fedppl.contracts import Reply, Request
from fedppl.engine import secure
from fedppl.numerics.streams import client_seed
from fedppl.sites import masks, node, wire
from fedppl.sites.decode import Parcel

_REPEATS = 5  # of the requests of a fit, each time in a run of its own
_HEADER = 128  # bytes before an array's numbers in NumPy's format


def one_model(model: fedppl.FederatedModel, data: Any, **how: Any) -> dict[str, Any]:
    """A fit beside the same under masks."""
    algorithm = fedppl.Sums()._replace(batch=None)  # as sites are: each alone
    fits, cpu = [], []
    for engine in (fedppl.InProcess(workers=1), fedppl.InProcess(workers=1), fedppl.InProcess(workers=1, secure=True)):
        started = time.process_time()
        fits.append(fedppl.fit(model, data, algorithm, engine=engine, progressbar=False, random_seed=1, **how))
        cpu.append(round(time.process_time() - started, 2))
    fits, cpu = fits[1:], cpu[1:]  # the first compiles
    plain, hidden = fits
    sd, other = gaussian.standard_deviations(plain.posterior), gaussian.standard_deviations(hidden.posterior)
    row: dict[str, Any] = {
        "status": [one.status.value for one in fits],
        "rounds": [len(one.records) for one in fits],
        "z": float(np.max(np.abs(gaussian.mean(hidden.posterior) - gaussian.mean(plain.posterior)) / sd)),
        "log_sd": float(np.max(np.abs(np.log(other / sd)))),
        "void": sum(bool(record.failures) for record in hidden.records),
    }
    if all(one.status is fedppl.Status.CONVERGED for one in fits):
        row["log_evidence"] = abs(hidden.log_evidence.value - plain.log_evidence.value)
    return {**row, "cpu_s": cpu}


def radon() -> dict[str, Any] | str:
    """Log radon of 919 houses by floor, with an intercept of each county's own; or why there is none."""
    path = Path(os.environ.get("FEDPPL_DATA", "")) / "radon_mn" / "radon_mn.csv"
    if not path.is_file():
        return "skipped: set FEDPPL_DATA to the folder of real data sets"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    frame: dict[str, Any] = {"county": [row["county"] for row in rows]}
    frame |= {name: [float(row[name]) for row in rows] for name in ("log_radon", "floor")}
    import pandas as pd

    return one_model(fedppl.formula("log_radon ~ floor + (1 | county)"), pd.DataFrame(frame), by="county")


# A site's costs -------------------------------------------------------------------------------------------------------


def clinic(x: Any, y: Any) -> Any:
    """A logistic regression whose intercept varies over clinics."""
    import pymc as pm

    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        line, tau = pm.Normal("line", 0, 2, shape=3), pm.HalfNormal("tau", 1)
        own = pm.Normal("own", 0, tau)
        pm.Bernoulli("obs", logit_p=own + x @ line, observed=y)
    return model


MODEL = fedppl.FederatedModel(clinic, ["line", "tau"])


def clinics(count: int) -> dict[str, Any]:
    """Data of some clinics, of 200 rows each."""
    rng, data = np.random.default_rng(1), {}
    for k in range(count):
        x = rng.normal(size=(200, 3))
        chance = 1 / (1 + np.exp(-(rng.normal(0, 0.5) + x @ [0.8, -0.5, 0.2])))
        data[f"site {k}"] = {"x": x, "y": (rng.random(200) < chance).astype(int)}
    return data


def questions() -> list[Any]:
    """The messages that sites get in a fit."""
    asked: list[Any] = []
    algorithm = fedppl.Sums()

    def listening(client: Any, personal: Any, message: Any, rng: Any) -> Any:
        if client.client_id == "site 0":
            asked.append({name: np.array(value) for name, value in message.items()})
        return algorithm.update_client(client, personal, message, rng)

    heard = algorithm._replace(update_client=listening, batch=None)
    fedppl.fit(MODEL, clinics(5), heard, engine=fedppl.InProcess(workers=1), progressbar=False, random_seed=1)
    return [message for message in asked if len(message["points"])]


def size_of(parcel: Parcel) -> int:
    """Bytes of a message's arrays, in NumPy's format, and of its texts."""
    arrays, texts = parcel
    of_texts = sum(len(name.encode()) + len(text.encode()) for name, text in texts.items())
    return of_texts + sum(_HEADER + len(name) + np.asarray(value).nbytes for name, value in arrays.items())


def made(folder: Path, *, masked: bool) -> node.Node:
    """A site with account and log, which answers all that it is asked."""
    (folder / "own").mkdir(parents=True)
    rules = fedppl.policy.NO_RULES
    own = clinics(1)["site 0"]
    files = folder / "identity" if masked else None
    token = "masked" if masked else "plain"
    return node.Node(
        token, MODEL, fedppl.Sums(), lambda _: own, lambda _: "site 0", folder / "own", 10, 1, rules, None, files
    )


def others_of(folder: Path, size: int) -> dict[str, secure.Identity]:
    """Identities of the other sites, all of them on the roster of the one that is measured."""
    site.make(folder / "identity", "site 0")
    others = {f"site {k}": secure.Identity.generate() for k in range(1, size)}
    lines = [secure.line_of(name, secure.public(one)) for name, one in others.items()]
    (folder / "identity" / site.ROSTER).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return others


def set_up(here: node.Node, others: dict[str, secure.Identity], run: str) -> tuple[dict[str, str], float, list[int]]:
    """Texts with the cohort's counts, CPU seconds of the site until it has joined, and bytes that it got and sent."""
    assert here.secure is not None and here.folder is not None
    keys = {name: secure.derived_key(one, name, run) for name, one in others.items()}
    started = time.process_time()
    asked = masks.ask("site 0", run)
    greets = node.greet(here, {}, asked)
    cpu = time.process_time() - started
    greetings = [masks.unpack_greeting(greets[1], "site 0"), *map(secure.greeting, keys.values())]
    texts = {**asked, **masks.pack_cohort(greetings)}
    started = time.process_time()
    joins = node.join(here, {}, None, texts)
    cpu += time.process_time() - started
    part = masks.unpack_part(joins[1], "site 0")
    roster = site.read(here.secure).roster
    about, sent = masks.COUNTS + secure.digest(greetings), secure.encoded({"": np.array([200.0, 90, 110, 0, 0])}, 5)
    parts = [part]
    for name, key in keys.items():
        words = secure.masked(secure.joined(key, greetings, roster), sent, 1, masks.COUNTS)
        parts.append(secure.published(others[name], name, about, words))
    traffic = [size_of(({}, asked)) + size_of(({}, texts)), size_of(greets) + size_of(joins)]
    return masks.pack_parts(parts), cpu, traffic


def rounds(here: node.Node, run: str, messages: Sequence[Any], counts: dict[str, str]) -> tuple[float, list[int]]:
    """CPU seconds of the answers to a fit's requests, and bytes that the site got and sent."""
    assert here.folder is not None
    traffic, cpu = [0, 0], 0.0
    for number, message in enumerate(messages, start=1):
        request = Request("site 0", number, number, (1, number, client_seed("site 0")), message, run)
        arrays, texts = wire.pack_request(request)
        parcel: Parcel = arrays, {**texts, **(counts if number == 1 else {})}
        started = time.process_time()
        told = node.answer_request(here, {}, None, parcel)
        cpu += time.process_time() - started
        if not isinstance(reply := wire.unpack_reply(*told), Reply):
            raise RuntimeError(f"the site does not answer: {reply}")
        traffic = [traffic[0] + size_of(parcel), traffic[1] + size_of(told)]
    return cpu, traffic


def one_cohort(size: int, messages: Sequence[Any]) -> dict[str, Any]:
    """Costs of a site in a cohort of this size, beside one that answers in the clear."""
    with tempfile.TemporaryDirectory() as base:
        others = others_of(Path(base), size)
        masked, plain = made(Path(base), masked=True), made(Path(base) / "plain", masked=False)
        for here in (masked, plain):  # so that all is compiled
            set_up_of = set_up(masked, others, "first")[0] if here is masked else {}
            rounds(here, "first", messages, set_up_of)
        setups, of_masked, of_plain, traffic = [], [], [], [0, 0]
        for repeat in range(_REPEATS):
            counts, cpu, first = set_up(masked, others, f"run {repeat}")
            setups.append(cpu)
            seconds, sent = rounds(masked, f"run {repeat}", messages, counts)
            of_masked.append(seconds)
            traffic = [a + b for a, b in zip(first, sent, strict=True)]
            seconds, clear = rounds(plain, f"run {repeat}", messages, {})
            of_plain.append(seconds)
    each = 1e3 / len(messages)
    return {
        "set_up_s": float(np.median(setups)),
        "round_ms": [each * float(np.median(of_plain)), each * float(np.median(of_masked))],
        "round_ratio": float(np.median(of_masked) / np.median(of_plain)),
        "bytes_got": [clear[0], traffic[0]],
        "bytes_sent": [clear[1], traffic[1]],
        "bytes_ratio": [traffic[0] / clear[0], traffic[1] / clear[1]],
    }


def bars(fits: dict[str, Any], sites: dict[int, Any]) -> dict[str, bool]:
    """What has to hold."""
    rows = [row for row in fits.values() if not isinstance(row, str)]
    met: dict[str, bool] = {}
    if rows:
        met["posterior_met"] = all(max(row["z"], row["log_sd"]) < 1e-6 for row in rows)
        met["evidence_met"] = all(row.get("log_evidence", 0.0) < 1e-5 for row in rows)
        met["clipped_met"] = not any(row["void"] for row in rows)
    if sites:
        met["cpu_met"] = all(row["round_ratio"] < 1.3 for row in sites.values())
        met["bytes_met"] = all(max(row["bytes_ratio"]) < 2.0 for row in sites.values())
        met["set_up_met"] = all(row["set_up_s"] < 1.0 for row in sites.values())
    return met


def main(argv: list[str] | None = None) -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", type=int, default=10, help="how many models, in the order of exactness'; 0 no radon"
    )
    parser.add_argument("--cohorts", type=int, nargs="*", default=[3, 20, 100])
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
    fits: dict[str, Any] = {}
    for make in (*models.PROBLEMS, *more_models.PROBLEMS)[: options.models]:
        problem = make()
        declared = fedppl.FederatedModel(problem.builder(), problem.shared_names())
        fits[problem.name] = one_model(declared, problem.clients)
        print(problem.name, fits[problem.name], file=sys.stderr, flush=True)
    if options.models:
        fits["radon"] = radon()
    messages = questions() if options.cohorts else []
    sites = {size: one_cohort(size, messages) for size in options.cohorts}
    print(json.dumps({"benchmark": "secure", "models": fits, "sites": sites, **bars(fits, sites)}))


if __name__ == "__main__":
    main()
