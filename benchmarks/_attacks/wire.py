"""Malformed messages, and a site that says what everybody's prior is; with Flower also through its engine."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["run"]

_FLOWER = importlib.util.find_spec("flwr") is not None


def run(quick: bool = False) -> dict[str, Any]:
    """Send malformed introductions and replies, and a prior of another site's; figures for one JSON line."""
    if quick:
        figures = _hostile(200) | (_prior(1) if _FLOWER else {})
    else:
        # Each in a process of its own, whose peak memory is that of what it did.
        honest, hostile = (_in_process(name, 5_000) for name in ("honest", "hostile"))
        figures = hostile | {"peak_memory_ratio": round(hostile["rss_mb"] / honest["rss_mb"], 3)}
        figures |= _in_process("prior", 3) if _FLOWER else {}
    figures["refusals_met"] = not figures["taken"] and not figures["refused_without_client_field_or_rule"]
    if "peak_memory_ratio" in figures:
        figures["memory_met"] = figures["peak_memory_ratio"] < 1.5
    if _FLOWER:
        shift = figures["largest_shift_by_a_false_prior_sds"]
        figures["false_prior_met"] = not figures["false_priors_believed"] and shift < 1e-3
    return {f"wire_{name}": value for name, value in {**figures, "through_flower": _FLOWER}.items()}


def _in_process(what: str, count: int) -> dict[str, Any]:
    code = f"from benchmarks._attacks import wire; wire._told({what!r}, {count})"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"the attack {what!r} ended: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _told(what: str, count: int) -> None:
    """In the process of its own: do it and say the figures."""
    logging.disable(logging.CRITICAL)
    figures = {"honest": _honest, "hostile": _hostile, "prior": _prior}[what](count)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
    if what != "prior":
        figures["rss_mb"] = round(rss, 1)
    print(json.dumps(figures))


def _honest(count: int) -> dict[str, Any]:
    """Two sites enrol and answer as often as the hostile one is asked."""
    from tests.support import malformed

    read = _reader()
    cases = {kind: malformed.Case("", "", *make()) for kind, make in _parcels().items()}
    for number in range(count):
        kind = "introduction" if number % 2 else "reply"
        assert read(kind, cases[kind]) is None, kind
    return {}


def _hostile(count: int) -> dict[str, Any]:
    """Malformed introductions and replies in turns: how many are refused, and by a text that says why."""
    from tests.support import malformed

    read, rng = _reader(), np.random.default_rng(1)
    sources = {"introduction": malformed.introductions, "reply": malformed.replies}
    changes = {"introduction": {"client_id": "bad", "settings": _settings()}, "reply": {}}
    streams = [((kind, case) for case in make(rng, **changes[kind])) for kind, make in sources.items()]
    taken, slowest, unnamed = 0, 0.0, []
    for kind, case in itertools.islice(itertools.chain.from_iterable(zip(*streams, strict=False)), count):
        started = time.process_time()
        reason = read(kind, case)
        slowest = max(slowest, time.process_time() - started)
        taken += reason is None
        if reason is not None and not ("bad" in reason and malformed.named_in(reason, case)):
            unnamed.append(case.name)
    return {
        "messages": count,
        "taken": taken,
        "refused_without_client_field_or_rule": len(unnamed),
        "slowest_refusal_cpu_seconds": round(slowest, 3),
    }


def _settings() -> dict[str, str]:
    if not _FLOWER:
        return {}
    from tests.support.hostile import SETTINGS

    return dict(SETTINGS)


def _parcels() -> dict[str, Any]:
    from tests.support import malformed

    return {"introduction": lambda: malformed.hello("bad", _settings()), "reply": malformed.reply}


def _reader() -> Any:
    """A function (kind, case) -> why it was refused, with the client's name, or None."""
    return _through_flower() if _FLOWER else _bare


def _bare(kind: str, case: Any) -> str | None:
    """The decoding alone."""
    from fedppl.run.one_round import why_not
    from fedppl.sites import decode as _decode
    from fedppl.sites import wire as _wire
    from tests.support import malformed

    try:
        texts = _decode.texts(case.texts)
        if kind == "introduction":
            terms = malformed.terms(_settings())
            arrays = _decode.arrays(case.arrays, _wire.shapes_of_hello(terms.layout))
            other = _wire.other_version(texts) or _wire.other_terms(terms, texts)
            other = other or _wire.other_model(terms, arrays, texts)
            return other and f"bad: {other}"
        shapes = {} if "failure" in texts else malformed.SHAPES
        reply = _wire.unpack_reply(_decode.arrays(case.arrays, shapes), texts)
    except _wire.Malformed as error:
        return f"bad: {error}"
    reason = why_not(reply, malformed.request(), malformed.layout(), malformed.SHAPES)
    return None if reason is None else f"bad: {reason}"


def _through_flower() -> Any:
    """The same on the fake grid: the run goes on beside an honest site, whatever the other sends."""
    from fedppl import DeclarationError
    from fedppl.contracts import Reply
    from fedppl.run.one_round import why_not
    from fedppl.sites import HELLO
    from tests.support import malformed
    from tests.support.fake_grid import FakeGrid
    from tests.support.hostile import SETTINGS, engine, plain, site

    now = malformed.Case("", "", *malformed.reply())

    def answer(message: Any) -> malformed.Raw:
        if message.metadata.message_type == HELLO:
            return malformed.hello("bad", SETTINGS)
        return now.arrays, now.texts

    grid = FakeGrid({1: site(1, answer, "bad"), 2: site(2, plain("good"))})
    moving = engine({}, ("bad", "good"), grid=grid)
    requests = {name: malformed.request(name) for name in ("bad", "good")}

    def read(kind: str, case: malformed.Case) -> str | None:
        nonlocal now
        if kind == "introduction":
            nodes = {1: site(1, lambda message: (case.arrays, case.texts), "bad"), 2: site(2, plain("good"))}
            try:
                engine(nodes, ("bad", "good"), wait=1e-9)
            except DeclarationError as error:
                return str(error).partition("refused: ")[2] and str(error)
            return None
        now = case
        answers = moving.exchange(requests, 5.0)
        grid.replies.clear()  # which the fake grid keeps, and Flower does not
        grid.sent.clear()
        if not isinstance(answers["good"], Reply):
            raise RuntimeError(f"the honest site was refused beside {case.name}: {answers['good']}")
        reason = why_not(answers["bad"], requests["bad"], malformed.layout(), malformed.SHAPES)
        return None if reason is None else f"bad: {reason}"

    return read


def _prior(count: int) -> dict[str, Any]:
    """N(100, 0.01²) under an honest fingerprint, by the site that enrols first, second and last, or the first alone."""
    import fedppl
    from fedppl import gaussian
    from fedppl.engine.policy import NO_RULES
    from fedppl.sites import HELLO
    from fedppl.testing import normal_means
    from tests.support import malformed
    from tests.support.fake_grid import FakeGrid, node

    def absurd(reply: Any) -> Any:
        arrays = reply.content.array_records["arrays"]
        arrays["prior_linear"].data, arrays["prior_precision"].data = malformed.npy([1e6]), malformed.npy([1e4])
        return reply

    model, clients = normal_means(4)
    names, far, believed = list(clients), 0.0, 0
    for place in (0, 1, 3)[:count]:
        site = fedppl.Flower.client_app(
            model, fedppl.EP(), lambda config: clients[config["client-id"]], policy=NO_RULES
        )
        nodes = {10 + i: node(site, 10 + i, **{"client-id": name}) for i, name in enumerate(names)}

        def lie(message: Any, to: int, place: int = place) -> Any:
            return absurd if message.metadata.message_type == HELLO and to == 10 + place else None

        declared: dict[str, Any] = {"model": model, "example_data": {"y": np.ones(2)}}
        settings = {"wait": 60.0, "deadline": 60.0, "poll": 0.001, "grace": 0.01}  # both end when all have answered
        engine = fedppl.Flower.grid(FakeGrid(nodes, lie), clients=3, **settings, **declared)
        fit = fedppl.fit(model, None, fedppl.EP(), engine=engine, progressbar=False, random_seed=1)
        honest = {name: data for name, data in clients.items() if name != names[place]}
        alone = fedppl.fit(model, honest, fedppl.EP(), progressbar=False, random_seed=1)
        q, reference = fit.posterior, alone.posterior
        apart = np.abs(gaussian.mean(q) - gaussian.mean(reference)) / gaussian.standard_deviations(reference)
        far = max(far, float(apart.max()))
        believed += names[place] in fit.client_ids
    return {
        "false_priors": count,
        "false_priors_believed": believed,
        "largest_shift_by_a_false_prior_sds": round(far, 6),
    }
