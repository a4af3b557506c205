"""Servers, and members beside them, that are after a single site's numbers where sites answer in sums under masks.

Four sites are driven through their own functions (`fedppl.sites.node`), each with a folder, an account and a policy.
Each run does one thing that a server can do, on points, a victim and a run's name of its own. Whatever words leave is
held against what the sites have computed: words alone, each sum and difference of two, sums over all who answered, and
differences of those. Found is a site's numbers, or their difference between two questions, where words agree with it;
of noise one word in 2^64 would.

Besides, what is known to tell, and how often it does: sums over two sets of sites that differ by one, where policies
allow two sets, and all other members together, who know the last one's part; and whether one site's value shows where
its policy alone leaves a point out, which is not to be.

    python -m benchmarks._attacks.sums --runs 1000
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import logging
import sqlite3
import tempfile
import time
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedppl
from fedppl import audit, site
from fedppl.contracts import Reply, Request
from fedppl.engine import secure
from fedppl.numerics.streams import client_seed
from fedppl.sites import masks, node, wire
from fedppl.sites.decode import Parcel
from fedppl.storage import store
from fedppl.testing import normal_means
from fedppl.types import Message

__all__ = ["run"]

_NAMES = ("east", "north", "süd", "west")
_POINTS = 8
_AGREEING = 4  # words other than 0 that agree
_A_WORLD = 25  # runs, before sites with new folders and identities take their place
_POLICY = fedppl.Policy(
    cohorts=1, rows=40, parameters_per_row=np.inf, events=0, requests=np.inf, points=2**30, few_rows=0, cavity=np.inf
)


class World(NamedTuple):
    """Sites with their folders, and all that they have computed."""

    folder: Path
    nodes: dict[str, node.Node]
    computed: dict[str, list[Message]]  # replies by site, before masks


class Words(NamedTuple):
    """Words that a server has."""

    name: str
    run: str
    round: int
    words: secure.Words


class Tried(NamedTuple):
    """An attack: words, and rules by which sites refused."""

    words: list[Words]
    rules: list[str]


@functools.cache
def _declared() -> tuple[fedppl.FederatedModel, dict[str, Any]]:
    model, clients = normal_means(len(_NAMES))
    return model, dict(zip(_NAMES, clients.values(), strict=True))


def world(folder: Path, policy: fedppl.Policy = _POLICY) -> World:
    """Sites with new identities, all on all rosters."""
    model, data = _declared()
    lines = [site.make(folder / name, name) for name in _NAMES]
    computed: dict[str, list[Message]] = {name: [] for name in _NAMES}
    sums = fedppl.Sums()

    def heard(client: Any, *arguments: Any) -> Any:
        update = sums.update_client(client, *arguments)
        computed[client.client_id].append(update.reply)
        return update

    nodes = {}
    for name in _NAMES:
        for line in lines:
            if not line.startswith(f"{name} "):
                site.add(folder / name, line)
        at = folder / f"at {name}"
        at.mkdir()
        nodes[name] = node.Node(
            token="sums",
            model=model,
            algorithm=sums._replace(update_client=heard),
            load_data=lambda config: data[config["client-id"]],
            client_id=lambda config: str(config["client-id"]),
            folder=at,
            draws=10,
            chains=1,
            policy=policy,
            secure=folder / name,
        )
    return World(folder, nodes, computed)


# What a server sends --------------------------------------------------------------------------------------------------


def _rule(here: World, name: str, lines: int) -> str:
    """The rule by which a site has refused, which its log has."""
    entries = _log(here, name)[lines:]
    rules = [entry["refused"].partition(":")[0] for entry in entries if entry.get("refused")]
    return rules[-1] if rules else "not in the log"


def _log(here: World, name: str) -> list[dict[str, Any]]:
    folder = here.folder / f"at {name}"
    return list(audit.lines(folder)) if (folder / store.FILE).exists() else []


def greeted(here: World, run: str, name: str) -> secure.Greeting:
    """A site's greeting."""
    _, texts = node.greet(here.nodes[name], {"client-id": name}, masks.ask(name, run))
    return masks.unpack_greeting(texts, name)


def joined(here: World, run: str, name: str, cohort: Sequence[secure.Greeting]) -> secure.Part | str:
    """A site's part of the counts, or the rule by which it stays out."""
    lines, one = len(_log(here, name)), here.nodes[name]
    assert one.folder is not None
    texts = {**masks.ask(name, run), **masks.pack_cohort(cohort)}
    _, told = node.join(one, {"client-id": name}, None, texts)
    return _rule(here, name, lines) if "refused" in told else masks.unpack_part(told, name)


def cohort(here: World, run: str, names: Sequence[str] = _NAMES) -> tuple[list[secure.Part], list[str]]:
    """Parts of the counts of the sites that join, and rules of those that do not."""
    greetings = [greeted(here, run, name) for name in names]
    answers = [joined(here, run, name, greetings) for name in names]
    return [one for one in answers if not isinstance(one, str)], [one for one in answers if isinstance(one, str)]


def asked(
    here: World,
    run: str,
    name: str,
    message: Message,
    counts: Sequence[secure.Part],
    number: int = 1,
    seed: tuple[int, ...] | None = None,
    **more: Any,
) -> Words | str:
    """The words of a site, or the rule by which there are none."""
    lines, one = len(_log(here, name)), here.nodes[name]
    assert one.folder is not None
    seed = (1, 1, client_seed(name)) if seed is None else seed
    arrays, texts = wire.pack_request(Request(name, 7, number, seed, message, run)._replace(**more))
    parcel: Parcel = arrays, {**texts, **masks.pack_parts(counts)}
    reply = wire.unpack_reply(*node.answer_request(one, {"client-id": name}, None, parcel))
    if not isinstance(reply, Reply):
        return _rule(here, name, lines)
    assert set(reply.message) == {masks.WORDS} and not reply.info and not reply.reason
    return Words(name, run, number, np.asarray(reply.message[masks.WORDS]).view(np.uint64))


def message_at(points: Any) -> dict[str, Any]:
    """A question of `Sums` about points."""
    return {
        "points": np.asarray(points, dtype=float),
        "known": np.arange(2.0),
        "center": np.asarray(points, dtype=float)[0],
        **{name: np.array(0.0) for name in ("prior_share", "alone", "look", "roughly")},
        "some": np.array(1.0),
    }


def _sorted(answers: Sequence[Words | str]) -> Tried:
    return Tried([one for one in answers if isinstance(one, Words)], [one for one in answers if isinstance(one, str)])


# What can be read off -------------------------------------------------------------------------------------------------


def _encoded(reply: Message) -> secure.Words:
    return secure.encoded(reply, len(_NAMES))


def found(here: World, words: Sequence[Words]) -> int:
    """How many sites' numbers, or differences of them between two questions, words tell."""
    if not words:
        return 0
    size = len(words[0].words)
    read = [one.words for one in words]
    rounds: dict[tuple[str, int], list[secure.Words]] = {}
    for one in words:
        rounds.setdefault((one.run, one.round), []).append(one.words)
    totals = [secure.added(parts) for parts in rounds.values()]
    totals += [secure.added(parts[:k]) for parts in rounds.values() for k in range(2, len(parts))]
    pairs = [*itertools.combinations(read, 2), *itertools.combinations(totals, 2)]
    read += totals + [one - other for one, other in pairs] + [other - one for one, other in pairs]
    read += [one + other for one, other in pairs]
    candidates = np.stack(read)
    told = 0
    for computed in here.computed.values():
        own = list({one.tobytes(): one for one in map(_encoded, computed) if len(one) == size}.values())
        targets = own + [one - other for one, other in itertools.permutations(own, 2)]
        for target in targets:
            numbers = target != 0
            told += bool(np.any(np.sum(candidates[:, numbers] == target[numbers], axis=1) >= _AGREEING))
    return told


# Attacks. Each has a world, a run that nobody has begun, a message, its victim, and a stream --------------------------

Attack = Callable[[World, str, dict[str, Any], str, np.random.Generator], Tried]


def _after(change: Callable[..., Any]) -> Attack:
    """An honest round; then one that is `change`."""

    def attack(here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator) -> Tried:
        counts, rules = cohort(here, run)
        words = [asked(here, run, name, message, counts) for name in _NAMES]
        more = change(here, run, message, victim, counts)
        tried = _sorted([*words, *more])
        return Tried(tried.words, rules + tried.rules)

    return attack


def _at_join(change: Callable[..., list[secure.Greeting]]) -> Attack:
    """A cohort that is changed for the victim alone, which is then asked all the same."""

    def attack(here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator) -> Tried:
        greetings = {name: greeted(here, run, name) for name in _NAMES}
        others = [name for name in _NAMES if name != victim]
        answer = joined(here, run, victim, change(here, run, greetings, victim, others))
        parts = [] if isinstance(answer, str) else [answer]
        tried = _sorted([asked(here, run, victim, message, parts)])
        return Tried(tried.words, [answer, *tried.rules] if isinstance(answer, str) else tried.rules)

    return attack


def _stranger(name: str, run: str) -> secure.Greeting:
    return secure.greeting(secure.derived_key(secure.Identity.generate(), name, run))


def _copied(here: World, run: str, name: str, public: bytes) -> secure.Greeting:
    """A greeting by which a member passes another's key for its own."""
    signature = site.read(here.folder / name).identity.sign(secure._signed(name, run, public))
    return secure.Greeting(name, public, signature)


def _moved(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "points": message["points"] + 0.1}


def _one_apart(**other: Any) -> Attack:
    """All are asked in one round, the victim something else than the others; `moved` has other points."""

    def attack(here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator) -> Tried:
        counts, rules = cohort(here, run)
        own = {**message, **other.get("message", {})}
        if "dtype" in other:
            own = {name: np.asarray(value, other["dtype"]) for name, value in own.items()}
        own = _moved(own) if "moved" in other else own
        answers = []
        for number in (1, 2):  # the second round is honest: a difference of the two would be the victim's
            for name in _NAMES:
                odd = name == victim and number == 1
                seed = (other["seed"] if odd and "seed" in other else 1, 1, client_seed(name))
                answers.append(asked(here, run, name, own if odd else message, counts, number, seed))
        tried = _sorted(answers)
        return Tried(tried.words, rules + tried.rules)

    return attack


def _another_set(here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator) -> Tried:
    """The same question to all, and in two more runs to all but the victim and to all but another."""
    tried = Tried([], [])
    gone = next(name for name in _NAMES if name != victim)
    for number, left_out in enumerate(("", victim, gone)):
        names = [name for name in _NAMES if name != left_out]
        counts, rules = cohort(here, f"{run} {number}", names)
        more = _sorted([asked(here, f"{run} {number}", name, message, counts) for name in names if not rules])
        tried = Tried(tried.words + more.words, tried.rules + rules + more.rules)
    return tried


def _another_declaration(
    here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator
) -> Tried:
    """A second run without the victim, by a declaration with another constant."""
    changed = {name: one._replace(token="other", model=_other_model()) for name, one in here.nodes.items()}
    counts, rules = cohort(here, run)
    first = _sorted([asked(here, run, name, message, counts) for name in _NAMES])
    others, second = [name for name in _NAMES if name != victim], here._replace(nodes=changed)
    more, refused = cohort(second, f"{run} 2", others)
    answers = _sorted([asked(second, f"{run} 2", name, message, more) for name in others])
    return Tried(first.words + answers.words, rules + refused + first.rules + answers.rules)


@functools.cache
def _other_model() -> fedppl.FederatedModel:
    import pymc as pm

    def unit(y: Any) -> Any:
        with pm.Model() as model:
            values = pm.Data("y", y)
            mu = pm.Normal("mu", 0, 10)
            theta = pm.Normal("theta", mu, 0.5)
            pm.Normal("obs", theta, 1.0000001, observed=values)
        return model

    return fedppl.FederatedModel(unit, shared=["mu"])


def _in_parallel(here: World, run: str, message: dict[str, Any], victim: str, counts: Any) -> list[Words | str]:
    def one(points: dict[str, Any]) -> Words | str:
        return asked(here, run, victim, points, counts, 2)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, [message, _moved(message)]))


def _a_part_of_the_sites(here: World, run: str, message: dict[str, Any], victim: str, counts: Any) -> list[Words | str]:
    """All are asked the same, for the numbers of those sites whose names have the least checksums: of one, and more."""
    checksums = sorted(zlib.crc32(name.encode()) / 2**32 for name in _NAMES)
    return [
        asked(here, run, name, {**message, "some": np.array(part + 1e-9)}, counts, number)
        for number, part in enumerate(checksums, start=2)
        for name in _NAMES
    ]


def _restarted(here: World, run: str, message: dict[str, Any], victim: str, counts: Any) -> list[Words | str]:
    """Somebody deletes the last answer, and the account is as it was."""
    with closing(sqlite3.connect(here.folder / f"at {victim}" / store.FILE)) as connection, connection:
        connection.execute("DELETE FROM state WHERE name LIKE '%.personal'")
    return [asked(here, run, victim, message, counts), asked(here, run, victim, _moved(message), counts)]


def _forged(here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator) -> Tried:
    """Counts with a thousand rows more, a part twice, of another run, and none."""
    counts, rules = cohort(here, run)
    others, _ = cohort(here, f"{run} 2")
    words = np.frombuffer(counts[0].words, dtype="<u8").astype(np.uint64)
    words[0] += np.uint64(1000 * 2**20)
    wrong = [[counts[0]._replace(words=words.tobytes()), *counts[1:]], [counts[0], *counts[:-1]], []]
    wrong += [counts[:-1], [*counts[:-1], others[-1]], [*counts, counts[0]]]
    tried = _sorted([asked(here, run, victim, message, parts) for parts in wrong])
    return Tried(tried.words, rules + tried.rules)


def _of_server(here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator) -> Tried:
    """Requests for another's name or seed, for no reply, of a run without a cohort, and of a round beyond 128 bits."""
    counts, rules = cohort(here, run)
    other = next(name for name in _NAMES if name != victim)
    tried = _sorted(
        [
            asked(here, f"{run} unknown", victim, message, counts),
            asked(here, run, victim, message, counts, client_id=other),
            asked(here, run, victim, message, counts, report=False),
            asked(here, run, victim, message, counts, seed=(1, 1, 2)),
            asked(here, run, victim, message, counts, seed=()),
            asked(here, run, victim, message, counts, 2**130),
        ]
    )
    return Tried(tried.words, rules + tried.rules)


def _far(here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator) -> Tried:
    """Points of which half are beyond every site's distance, and then all are."""
    counts, rules = cohort(here, run)
    points = message["points"].copy()
    answers: list[Words | str] = []
    for number, far in ((1, slice(_POINTS // 2)), (2, slice(None))):
        points[far] = 1e4 * (1 + rng.random(points[far].shape))
        answers += [asked(here, run, name, message_at(points), counts, number) for name in _NAMES]
    tried = _sorted(answers)
    return Tried(tried.words, rules + tried.rules)


def _copied_key(here: World, run: str, message: dict[str, Any], victim: str, rng: np.random.Generator) -> Tried:
    """A member beside the server passes another's key for its own, and makes the counts of three add up."""
    small = world(here.folder / run)
    first, between, liar = _NAMES[0], _NAMES[1], _NAMES[-1]
    greetings = [greeted(small, run, name) for name in (first, between)]
    greetings.append(_copied(small, run, liar, greetings[0].public))
    parts = [joined(small, run, name, greetings) for name in (first, between)]
    signed = [one for one in parts if isinstance(one, secure.Part)]
    read = [np.frombuffer(part.words, dtype="<u8").astype(np.uint64) for part in signed]
    words = secure.encoded({"": np.array([1000.0, 0.0])}, 3) - secure.added(read)
    about = masks.COUNTS + secure.digest(greetings)
    signed.append(secure.published(site.read(small.folder / liar).identity, liar, about, words))
    tried = _sorted([asked(small, run, name, message, signed) for name in (first, between)])
    for name, computed in small.computed.items():
        here.computed[name].extend(computed)
    return tried


def _same_name(greetings: dict[str, secure.Greeting], victim: str) -> list[secure.Greeting]:
    """The name that is not of ASCII alone, written in another way."""
    return [one._replace(name=unicodedata.normalize("NFD", one.name)) for one in greetings.values()]


ATTACKS: dict[str, tuple[Attack, set[str]]] = {  # and the rules, one of which refuses; none where words are noise
    "honest": (_after(lambda *_: []), set()),
    "key in between": (
        _at_join(lambda here, run, all, victim, others: [*(all | {others[0]: _stranger(others[0], run)}).values()]),
        {"sums"},
    ),
    "key of another run": (
        _at_join(
            lambda here, run, all, victim, others: [*(all | {others[0]: greeted(here, f"{run} 2", others[0])}).values()]
        ),
        {"sums"},
    ),
    "another's signature": (
        _at_join(
            lambda here, run, all, victim, others: [
                *(all | {others[0]: all[others[0]]._replace(signature=all[others[1]].signature)}).values()
            ]
        ),
        {"sums"},
    ),
    "stranger": (
        _at_join(lambda here, run, all, victim, others: [*all.values(), _stranger("stranger", run)]),
        {"sums"},
    ),
    "cohort of two": (_at_join(lambda here, run, all, victim, others: [all[victim], all[others[0]]]), {"sums"}),
    "one site thrice": (
        _at_join(lambda here, run, all, victim, others: [all[victim], *[all[others[0]]] * 3]),
        {"sums"},
    ),
    "without itself": (
        _at_join(lambda here, run, all, victim, others: [*(all[name] for name in others), _stranger("x", run)]),
        {"sums"},
    ),
    "names in another form": (_at_join(lambda here, run, all, victim, others: _same_name(all, victim)), {"sums"}),
    "no point of the curve": (
        _at_join(
            lambda here, run, all, victim, others: [
                *(all | {others[0]: _copied(here, run, others[0], bytes(32))}).values()
            ]
        ),
        {"sums"},
    ),
    "shrunken in the run": (
        _after(lambda here, run, message, victim, counts: cohort(here, run, [n for n in _NAMES if n != victim])[1]),
        {"cohort"},
    ),
    "another set of sites": (_another_set, {"cohorts"}),
    "another declaration": (_another_declaration, {"cohorts", "sums"}),
    "replayed": (
        _after(
            lambda here, run, message, victim, counts: [
                *(asked(here, run, name, _moved(message), counts, 2) for name in _NAMES),
                asked(here, run, victim, message, counts),
            ]
        ),
        {"round"},
    ),
    "other points in a round": (
        _after(lambda here, run, message, victim, counts: [asked(here, run, victim, _moved(message), counts)]),
        {"round"},
    ),
    "asked again": (
        _after(lambda here, run, message, victim, counts: [asked(here, run, victim, message, counts)] * 2),
        set(),
    ),
    "asked again as another round": (
        _after(
            lambda here, run, message, victim, counts: [
                asked(here, run, victim, message, counts, number) for number in (2, 3)
            ]
        ),
        set(),
    ),
    "a seed for one": (_one_apart(seed=2), set()),
    "a type for one": (_one_apart(dtype="<f4"), set()),
    "points for one": (_one_apart(moved=True), set()),
    "points to leave out for one": (_one_apart(message={"inside": np.arange(_POINTS) > 2}), set()),
    "a part of the sites": (_after(_a_part_of_the_sites), set()),
    "far out": (_far, {"distance"}),
    "forged counts": (_forged, {"sums"}),
    "restarted": (_after(_restarted), {"round"}),
    "two at once": (_after(_in_parallel), {"round"}),
    "requests of no member": (_of_server, {"sums"}),
    "copied key": (_copied_key, set()),
}


# What is known to tell, and how much ----------------------------------------------------------------------------------

_NARROW = 5.0  # prior sds: the distance of one site's policy, and half that of the others'
_SHIFT = 1e-6  # of two points beside it


def _members(here: World, run: str, message: dict[str, Any], victim: str) -> tuple[bool, bool]:
    """Whether the sum tells the victim's part to all others, and a part to all but two sites."""
    counts, _ = cohort(here, run)
    total = secure.added([_words(asked(here, run, name, message, counts)) for name in _NAMES])
    others = [_encoded(here.computed[name][-1]) for name in _NAMES if name != victim]
    rest, of_two = total - secure.added(others), total - secure.added(others[:-1])
    return bool(np.array_equal(rest, _encoded(here.computed[victim][-1]))), found(here, [Words("", run, 1, of_two)]) > 0


def _forged_by_a_member(here: World, run: str, message: dict[str, Any], victim: str) -> bool:
    """Whether a site answers on counts to which a member has added a million rows."""
    greetings = [greeted(here, run, name) for name in _NAMES]
    parts = [joined(here, run, name, greetings) for name in _NAMES]
    signed = [part for part in parts if isinstance(part, secure.Part)]
    place = next(k for k, name in enumerate(_NAMES) if name != victim)
    words = np.frombuffer(signed[place].words, dtype="<u8").astype(np.uint64)
    words[0] += np.uint64(10**6 * 2**20)
    identity, about = site.read(here.folder / _NAMES[place]).identity, masks.COUNTS + secure.digest(greetings)
    signed[place] = secure.published(identity, _NAMES[place], about, words)
    return isinstance(asked(here, run, victim, message, signed), Words)


def _beside_an_edge(here: World, run: str, victim: str) -> bool:
    """Whether sums at two near points tell the victim's value, where its policy alone leaves one of them out."""
    sd = 10.0  # of the prior of `normal_means`
    counts, _ = cohort(here, run)
    message = message_at(_NARROW * sd + _SHIFT * np.array([[-1.0], [1.0]]))
    answers = [asked(here, run, name, message, counts) for name in _NAMES]
    if not all(isinstance(answer, Words) for answer in answers):
        return False
    reply = here.computed[victim][-1]
    total, _, _ = secure.decoded(secure.added(list(map(_words, answers))), {k: np.shape(v) for k, v in reply.items()})
    value = float(np.asarray(reply["values"])[0])
    return bool(abs(total["values"][0] - total["values"][1] - value) < 1e-3 * abs(value))


def _words(answer: Words | str) -> secure.Words:
    assert isinstance(answer, Words), answer
    return answer.words


def known(base: Path, runs: int, rng: np.random.Generator) -> dict[str, int]:
    """In how many runs a single site's numbers are told in ways that the pages name, or by a member that lies."""
    told = Counter[str]()
    for number in range(runs):
        folder, run, victim = base / f"known {number}", "run", str(rng.choice(_NAMES))
        message = message_at(rng.normal(0, 5, size=(_POINTS, 1)))
        two = world(folder / "two sets", dataclasses.replace(_POLICY, cohorts=2))
        outcome = _another_set(two, run, message, victim, rng)
        told["by_two_sets"] += found(two, outcome.words) > 0
        told["third_sets_refused"] += "cohorts" in outcome.rules
        usual = world(folder / "usual")
        last, other = _members(usual, run, message, victim)
        told["the_last_by_all_others"] += last
        told["by_all_but_two"] += other
        many = world(folder / "many", dataclasses.replace(_POLICY, rows=1000))
        told["rows_forged_by_a_member"] += _forged_by_a_member(many, run, message, victim)
        edge = world(folder / "edge")
        narrow = dataclasses.replace(_POLICY, distance=_NARROW)
        edge.nodes[victim] = edge.nodes[victim]._replace(policy=narrow)
        told["beside_an_edge_of_one"] += _beside_an_edge(edge, run, victim)
    return dict(told)


def run(quick: bool = False, runs: int = 1000) -> dict[str, Any]:
    """Counts of runs, of what was found and of rules; `quick` tries each attack once."""
    rng, started = np.random.default_rng(1), time.process_time()
    runs, few = (len(ATTACKS), 1) if quick else (runs, max(1, runs // 50))
    refused, told, otherwise = Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as base:
        for number in range(runs):
            if number % _A_WORLD == 0:
                here = world(Path(base) / str(number))
            name = list(ATTACKS)[number % len(ATTACKS)]
            attack, rules = ATTACKS[name]
            for computed in here.computed.values():
                computed.clear()
            points = rng.normal(0, 5, size=(_POINTS, 1))
            outcome = attack(here, f"run {number}", message_at(points), str(rng.choice(_NAMES)), rng)
            told[name] += found(here, outcome.words)
            refused.update(f"{name}: {rule}" for rule in set(outcome.rules))
            if bool(rules) != bool(outcome.rules) or not set(outcome.rules) <= rules:
                otherwise[name] += 1
        those = known(Path(base), few, rng)
    figures: dict[str, Any] = {
        "runs": runs,
        "found": {name: count for name, count in told.items() if count},
        "refused": dict(sorted(refused.items())),
        "not_by_the_rule": dict(otherwise),
        "known_of": few,
        "known": those,
        "ms_a_run": 1e3 * (time.process_time() - started) / runs,
        "held_met": not sum(told.values()) and not otherwise and not those["beside_an_edge_of_one"],
        # Otherwise nothing would be found where there is something.
        "finds_met": those["by_two_sets"] == those["the_last_by_all_others"] == few and not those["by_all_but_two"],
    }
    return {f"sums_{name}": value for name, value in figures.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    logging.getLogger("fedppl").setLevel(logging.CRITICAL)
    print(json.dumps(run(runs=parser.parse_args().runs), ensure_ascii=False))
