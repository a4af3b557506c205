"""What travels between a site and the server in a run: named arrays, and a few texts. NumPy only.

What is read raises `Malformed` and nothing else, whatever was sent; its text names the field and the rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from fedppl.contracts import Failure, Reply, Request
from fedppl.flower.decode import LINE_LENGTH, NAME_LENGTH, Malformed, brief, parsed, require
from fedppl.flower.decode import name as checked_name
from fedppl.flower.decode import text as one_text
from fedppl.flower.decode import whole as whole_number
from fedppl.run.one_round import MOST_INFOS, why_no_info
from fedppl.settings import one_line
from fedppl.types import Message, Status

Parcel = tuple[Message, dict[str, str]]  # arrays, and texts by name


def pack_request(request: Request) -> Parcel:
    """Write a request; integers as text, for they may need more than 63 bits."""
    texts = {
        "client_id": request.client_id,
        "nonce": str(request.nonce),
        "round": str(request.round),
        "seed": json.dumps(list(request.seed)),
        "run": request.run,
        "report": str(int(request.report)),
    }
    return request.message, texts


def unpack_request(arrays: Message, texts: Mapping[str, str]) -> Request:
    """Read a request."""
    seed = parsed(texts, "seed")
    whole = type(seed) is list and len(seed) <= 8 and all(type(number) is int and number >= 0 for number in seed)
    require(whole, f"'seed' is {brief(seed)}, expected whole numbers")
    report = one_text(texts, "report", default="1")
    require(report in ("0", "1"), f"'report' is {brief(report)!r}, expected 0 or 1")
    return Request(
        client_id=checked_name(one_text(texts, "client_id"), "'client_id'"),
        nonce=whole_number(texts, "nonce"),
        round=whole_number(texts, "round"),
        seed=tuple(seed),
        message=arrays,
        run=checked_name(one_text(texts, "run"), "'run'"),
        report=report == "1",
    )


def unpack_conclusion(texts: Mapping[str, str]) -> tuple[str, str, int, Status]:
    """Read which client is told that which run is over, the seed of its draws, and how the run ended."""
    status = one_text(texts, "status", NAME_LENGTH)
    require(status in {one.value for one in Status}, f"'status' is {brief(status)!r}, expected one of a run's")
    client_id, run = (checked_name(one_text(texts, field), f"{field!r}") for field in ("client_id", "run"))
    return client_id, run, whole_number(texts, "seed"), Status(status)


def pack_reply(reply: Reply | Failure) -> Parcel:
    """Write a reply; of a failure only what may travel."""
    if isinstance(reply, Failure):
        reason = one_line(reply.reason, LINE_LENGTH)
        return {}, {"client_id": reply.client_id, "nonce": str(reply.nonce), "failure": reason}
    texts = {
        "client_id": reply.client_id,
        "nonce": str(reply.nonce),
        "fingerprint": reply.fingerprint,
        "info": json.dumps(dict(reply.info)),
        "reason": one_line(reply.reason, LINE_LENGTH),
    }
    return reply.message, texts


def unpack_reply(arrays: Message, texts: Mapping[str, str]) -> Reply | Failure:
    """Read a reply."""
    client_id, nonce = one_text(texts, "client_id", NAME_LENGTH), whole_number(texts, "nonce")
    if "failure" in texts:
        return Failure(client_id, nonce, one_line(one_text(texts, "failure"), LINE_LENGTH))
    told = parsed(texts, "info", finite=False)
    require(type(told) is dict and len(told) <= MOST_INFOS, f"'info' is no mapping of {MOST_INFOS} names at most")
    numbers = all(type(value) in (int, float) for value in told.values())
    require(numbers, "'info' is not numbers by name")
    info = {name: float(value) for name, value in told.items()}
    if reason := why_no_info(info):
        raise Malformed(reason)
    reason = one_line(one_text(texts, "reason", default=""), LINE_LENGTH)
    return Reply(client_id, nonce, one_text(texts, "fingerprint", NAME_LENGTH), arrays, info, reason)
