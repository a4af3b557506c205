"""What travels between a site and the server: named arrays, and a few texts. NumPy and the standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.types import Failure, Layout, Message, Reply, Request, SharedReader, Variable

__all__ = ["Hello", "difference", "pack_hello", "pack_reply", "pack_request", "unpack_hello", "unpack_reply"]

Parcel = tuple[Message, dict[str, str]]  # arrays, and texts by name


class Hello(NamedTuple):
    """How a site introduces itself: what it runs, never what it holds."""

    client_id: str
    version: str
    settings: Mapping[str, str]
    layout: Layout
    dims: Mapping[str, tuple[str, ...] | None]
    coords: Mapping[str, Sequence[Any]]


def pack_hello(
    client_id: str, version: str, settings: Mapping[str, str], layout: Layout, reader: SharedReader
) -> Parcel:
    """Describe a site's shared parameters."""
    precision = layout.prior.precision
    arrays = {
        "prior_linear": layout.prior.linear,
        "prior_precision": precision if precision.ndim == 1 else gaussian.pack_triangle(precision),
    }
    texts = {
        "client_id": client_id,
        "version": version,
        "settings": json.dumps(dict(settings)),
        "variables": json.dumps([tuple(variable) for variable in layout.variables]),
        "prior_is_gaussian": json.dumps(layout.prior_is_gaussian),
        "fingerprint": layout.fingerprint,
        "dims": json.dumps(dict(reader.dims)),
        "coords": json.dumps({name: list(values) for name, values in reader.coords.items()}, default=_plain),
    }
    return arrays, texts


def unpack_hello(arrays: Message, texts: Mapping[str, str]) -> Hello:
    """Read a site's introduction."""
    variables = tuple(
        Variable(name, tuple(shape), transform, None if dims is None else tuple(dims), bool(binary))
        for name, shape, transform, dims, binary in json.loads(texts["variables"])
    )
    linear, precision = (np.asarray(arrays[name], dtype=float) for name in ("prior_linear", "prior_precision"))
    if len(precision) > len(linear) or len(linear) == 1:  # else by coordinate, as large blocks have it
        precision = gaussian.unpack_triangle(precision)
    prior = Gaussian(linear, precision)
    dims = {k: None if v is None else tuple(v) for k, v in json.loads(texts["dims"]).items()}
    return Hello(
        client_id=texts["client_id"],
        version=texts["version"],
        settings=json.loads(texts["settings"]),
        layout=Layout(variables, prior, bool(json.loads(texts["prior_is_gaussian"])), texts["fingerprint"]),
        dims=dims,
        coords=json.loads(texts["coords"]),
    )


def difference(ours: Hello, theirs: Hello) -> str | None:
    """What two sites do not agree on, or None."""
    if theirs.version != ours.version:
        return (
            f"it runs fedppl {theirs.version}, {ours.client_id!r} runs {ours.version}; install one version everywhere"
        )
    if other := _changed(ours.settings, theirs.settings):
        return f"its algorithm has {other}"
    names, others = ([v.name for v in hello.layout.variables] for hello in (ours, theirs))
    if names != others:
        return f"it shares {others}, {ours.client_id!r} shares {names}"
    for a, b in zip(ours.layout.variables, theirs.layout.variables, strict=True):
        for field in a._fields:
            if getattr(a, field) != getattr(b, field):
                return (
                    f"its shared variable {b.name!r} has {field} {getattr(b, field)}, at {ours.client_id!r} it has "
                    f"{getattr(a, field)}"
                )
    if ours.layout.fingerprint != theirs.layout.fingerprint:
        return (
            f"its shared prior is another than at {ours.client_id!r} (constants of the prior must not depend on data)"
        )
    return None


def _changed(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} {theirs.get(name)} instead of {ours.get(name)}" for name in names)


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
    return Request(
        client_id=texts["client_id"],
        nonce=int(texts["nonce"]),
        round=int(texts["round"]),
        seed=tuple(json.loads(texts["seed"])),
        message=arrays,
        run=texts["run"],
        report=texts.get("report", "1") == "1",
    )


def pack_reply(reply: Reply | Failure) -> Parcel:
    """Write a reply; of a failure only what may travel."""
    if isinstance(reply, Failure):
        return {}, {"client_id": reply.client_id, "nonce": str(reply.nonce), "failure": reply.reason}
    texts = {
        "client_id": reply.client_id,
        "nonce": str(reply.nonce),
        "fingerprint": reply.fingerprint,
        "info": json.dumps(dict(reply.info)),
        "reason": reply.reason,
    }
    return reply.message, texts


def unpack_reply(arrays: Message, texts: Mapping[str, str]) -> Reply | Failure:
    """Read a reply."""
    client_id, nonce = texts["client_id"], int(texts["nonce"])
    if "failure" in texts:
        return Failure(client_id, nonce, texts["failure"])
    info = {name: float(value) for name, value in json.loads(texts["info"]).items()}
    return Reply(client_id, nonce, texts["fingerprint"], arrays, info, texts.get("reason", ""))


def _plain(value: Any) -> Any:
    """A coordinate's label as JSON can hold it."""
    return value.item() if isinstance(value, np.generic) else str(value)
