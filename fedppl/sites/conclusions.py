"""A site's answers; at the end its own posterior and what its policy lets out, for `loo`, `reliability`, `conflict`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from fedppl.contracts import LogEvidence, Request
from fedppl.contracts.algorithm import WithoutClient
from fedppl.engine import guard as _guard
from fedppl.model.client import ClientModel
from fedppl.numerics.streams import stream
from fedppl.results import idata, loo, reliability
from fedppl.results.at_client import client_posterior, pymc_groups, require_rows
from fedppl.run.conflicts import FEWEST, knows_cavities, tested
from fedppl.sites import AGREE, ASK, CONCLUDE, GATE, GREET, HELLO, JOIN, KINDS
from fedppl.sites import masks as _masks
from fedppl.sites import node as _node
from fedppl.sites import wire as _wire
from fedppl.sites.decode import Malformed, Parcel, require
from fedppl.sites.node import Enrolled, Node
from fedppl.sites.wire import Over
from fedppl.storage import signed as _signed
from fedppl.storage.signed import Memory
from fedppl.types import Array, DeclarationError, Message

logger = logging.getLogger(__name__)

SUMS = {"loo": len(loo.SUMS), "calibration": reliability.LENGTH}  # lengths of those that are sums over rows
_LENGTHS = {**SUMS, "conflict": 2}
MOST_BYTES = 4096  # of all summaries of a site


def answer(kind: str, here: Node, config: Mapping[str, Any], memory: Memory | None, parcel: Parcel) -> Parcel:
    """Answer a message of type `kind`; `memory` is of a node without a folder."""
    by_texts = {HELLO: _node.introduce, AGREE: _node.agree, JOIN: _node.join}
    by_parcel = {GATE: _node.gate, ASK: _node.answer_request, CONCLUDE: conclude}
    if kind == GREET:
        return _node.greet(here, config, parcel[1])
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no type of message; a site answers {', '.join(KINDS)}")
    if kind in by_texts:
        return by_texts[kind](here, config, memory, parcel[1])
    return by_parcel[kind](here, config, memory, parcel)


def conclude(node: Node, config: Mapping[str, Any], memory: Memory | None, parcel: Parcel) -> Parcel:
    """Draw this client's own posterior and write it to the site's folder, once a run. It does not travel.

    The answer holds only what the policy lets out by name. It does not show whether the data are those of the run or
    whether drawing failed, since both depend on the data and the server may ask any number of times.
    """
    name = str(parcel[1].get("client_id", ""))[:200]
    summaries: Message = {}
    try:
        with _node.account_of(node, config, memory) as (guard, kept):
            if guard is not None:
                summaries = _conclude(node, config, kept, parcel, guard)
    except Exception:
        summaries = {}  # what is not kept does not leave
        extra = {"run": str(parcel[1].get("run", ""))[:200], "client": name, "status": "failed"}
        logger.exception("client %s drew no posterior", name, extra=extra)
    return summaries, {"client_id": name}


def _conclude(node: Node, config: Mapping[str, Any], memory: Memory, parcel: Parcel, guard: _guard.Guard) -> Message:
    try:
        over = _wire.unpack_conclusion(*parcel)
    except Malformed as error:
        _node.refuse(guard, {"event": "conclusion"}, f"malformed: {error}"[:200])
        return {}
    about = {"event": "conclusion", "run": over.run, "client": over.client_id}
    at = None
    try:
        if node.secure is not None:
            at, _ = _node.member_of(node, config, memory, over.run)
            if over.client_id != at.member.name:
                raise DeclarationError(f"client {over.client_id!r} was told of its end, and this is {at.member.name!r}")
    except DeclarationError as error:
        _node.refuse(guard, about, f"sums: {error}")
        return {}
    asked, file = _masks.asked_at_end(over.run, over.seed, over.message, over.status), f"{over.run}.conclusion"
    # What was told is kept, and is the same whenever it is asked the same: a question that comes again after another
    # would be drawn anew, and under masks the difference of the two would be bare.
    *earlier, digest, told = _signed.recalled(memory, file) or ("", {})
    if digest == asked.hex():
        _guard.note(guard, None, **about, repeated=True)
        return dict(told)
    if asked.hex() in earlier:
        _node.refuse(guard, about, "conclusion: it was answered, and another has been since")
        return {}
    if not _guard.concluded(guard, over.run):
        return {}
    told = _told_at_end(node, config, memory, over, guard, at, asked)
    _signed.keep(memory, file, (*earlier, digest, asked.hex(), told))
    return told


def _told_at_end(
    node: Node,
    config: Mapping[str, Any],
    memory: Memory,
    over: Over,
    guard: _guard.Guard,
    at: _masks.Place | None,
    asked: bytes,
) -> Message:
    """What the site tells: under masks words, of which some may be noise, since whether it can tell depends on rows."""
    if at is None:
        return _drawn(node, config, memory, over, guard)
    told: Message = {}
    try:
        told = _drawn(node, config, memory, over, guard, at)
    except Exception:
        extra = {"run": over.run, "client": over.client_id, "status": "failed"}
        logger.exception("client %s drew no posterior", over.client_id, extra=extra)
    return _masks.concluded(at, asked, told, SUMS)


def _drawn(
    node: Node,
    config: Mapping[str, Any],
    memory: Memory,
    over: Over,
    guard: _guard.Guard,
    at: _masks.Place | None = None,
) -> Message:
    """Draw and write the client's own posterior; return what its policy lets out, of a cohort or of itself alone."""
    client_id, run, seed, status, message = over
    here = _node.enrolled(node, config, memory, client_id)
    for file, raw in _node.same_data(memory, here.client, run).items():
        memory.keep(file, raw)
    name = _node.name_of_kept(node.algorithm, node.client_id(config), run, client_id)
    personal = _node.recalled(node.algorithm, memory, name, client_id).personal
    request = Request(client_id, 0, 0, (seed,), message, run)
    drawing = node.draws, node.chains, seed
    result = idata.from_groups(client_posterior(node.algorithm, here.client, personal, message, drawing, status))
    assert node.folder is not None
    path = node.folder / f"{quote(client_id, safe='')}.nc"
    partial = path.with_name(path.name + ".partial")
    _signed.replace(partial, b"")  # sets the file's mode before it holds rows
    idata.write(result, partial)
    partial.chmod(0o600)  # a library may make the file anew
    partial.replace(path)
    logger.info("client %s: posterior written to %s", client_id, path, extra={"run": run, "client": client_id})
    if at is not None and at.counts.size:
        guard = guard._replace(cohort=_guard.summed(here.client.view(_guard.tally), at.counts, len(at.names)))
    names = _guard.tells(guard, node.algorithm, here.client, request)
    if not names:
        return {}
    return _guard.let_out(guard, here.client, request, _told(names, node, here, over, result))


def _told(names: Sequence[str], node: Node, here: Enrolled, over: Over, drawn: Any) -> Message:
    """Compute the summaries that the policy names; one that fails is left out, and the site's log says why."""
    results: dict[str, Array] = {}
    computed: dict[str, Callable[[], Array]] = {
        "loo": lambda: _loo(here.client, drawn),
        "calibration": lambda: reliability.counts_of(here.client, idata.as_dataset(drawn["posterior"])),
        "conflict": lambda: _conflict(node, here, over),
    }
    for name in names:
        try:
            value = computed[name]()
            if not np.all(np.isfinite(value)):
                raise ValueError("it is not finite")
            results[name] = value
        except Exception as error:  # any part of a user's model may fail; the other summaries are sent all the same
            extra, trace = {"run": over.run, "client": over.client_id}, not isinstance(error, DeclarationError)
            logger.warning("client %s has no %r: %s", over.client_id, name, error, exc_info=trace, extra=extra)
    return results


def _loo(client: ClientModel, drawn: Any) -> Array:
    """Sums of leave-one-out log densities over rows."""
    require_rows(client, "leaving rows out")
    if drawn["posterior"].attrs.get("fedppl_point_estimate") or client.pymc_model().potentials:
        raise ValueError("no rows are left out of point estimates or potentials")
    densities = pymc_groups(client, idata.as_dataset(drawn["posterior"]), ("log_likelihood",), 0)
    return np.array(loo.sums_of(loo.rows_of(densities)))


def _conflict(node: Node, here: Enrolled, over: Over) -> Array:
    """P-value and statistic, of q without the client, which the final message must hold."""
    name, concludes = node.algorithm.name, node.algorithm.disclosure.concludes
    if concludes is None or knows_cavities(node.algorithm) is None:
        raise ValueError(f"{name} has no posterior of the shared variables without each client")
    ((q, cavity),) = concludes(here.client.layout, over.message).targets
    if all(np.array_equal(*parts) for parts in zip(q, cavity, strict=True)):
        raise ValueError(f"the final message of {name} has no posterior without this client")
    rng = stream((over.seed, 4, *over.client_id.encode()))
    others = WithoutClient(cavity, None, LogEvidence(np.nan, np.nan))
    return np.array(tested(here.declaration, here.client, others, FEWEST, rng))


def read_told(arrays: Message) -> Message:
    """Check the summaries of a site, or sums of them over a cohort, or raise `Malformed`."""
    checks: Mapping[str, Callable[[Array], str | None]] = {
        "loo": loo.implausible,
        "calibration": reliability.implausible,
        "conflict": lambda pair: None if 0 < pair[0] <= 1 else f"has the p-value {pair[0]}",
    }
    told: dict[str, Array] = {}
    for name, value in arrays.items():
        require(name in _LENGTHS, f"{name!r}, expected one of {sorted(_LENGTHS)}")
        require(value.shape == (_LENGTHS[name],), f"{name!r} has shape {value.shape}, expected {(_LENGTHS[name],)}")
        require(bool(np.all(np.isfinite(value))), f"{name!r} is not finite")
        told[name] = np.asarray(value, dtype=float)
        reason = checks[name](told[name])
        require(reason is None, f"{name!r}: {reason}")
    return told
