"""Checkpoints that somebody made to run code, to change a class or to take all memory; some with the owner's own key.

Those of an owner try what stands behind the signature.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedppl.algorithms.ep.private import Mechanism
from fedppl.gaussian import Gaussian
from fedppl.results.records import Record
from fedppl.storage import checkpoint
from fedppl.storage import signed as _key
from fedppl.storage import signed as _signed
from fedppl.types import Layout, Status

WATCHED = (Mechanism, Status, Gaussian, Record, Layout, checkpoint.Kept)
MAGIC = b"fedppl checkpoint %d\n" % _signed.FORMAT
RECORD = Record(1, ("a", "b"), {}, {"a": {"ess": 10.0}}, {"change": 0.5}, {}, {}, "linear 2", 0.25, Status.RUNNING)
CONTENT: dict[str, Any] = {
    "fingerprint": "abc",
    "algorithm": "EP",
    "settings": {"damping": "1.0"},
    "clients": ("a", "b"),
    "data": {"a": b"salt and digest"},
    "seed": 2**63,
    "name": "c0ffee",
    "state": Gaussian(np.arange(2.0), np.eye(2)),
    "records": [RECORD, RECORD._replace(number=2, infos={"a": {"ess": np.float64(0.5)}})],
    "personal": {"a": {"mechanism": Mechanism(1.0, 2.0, 3, 1e-5)}},
    "told": {},
}


class Crafted(NamedTuple):
    """A state, and its records: None where they are left as an honest run wrote them, empty where there are none."""

    name: str
    state: bytes
    records: bytes | None = None


def classes() -> list[dict[str, Any]]:
    """All that classes hold which a pickle could name."""
    return [dict(vars(watched)) for watched in WATCHED]


def signed(body: bytes, about: str = "run", key: bytes | None = None) -> bytes:
    """A file with a right header and signature."""
    key = key or _key.owner_key(make=True)
    whose = _signed._whose(key)
    return MAGIC + struct.pack("<8sQ32s", whose, len(body), _signed._signature(key, about, whose, body)) + body


def body_of(tree: Any, arrays: bytes = b"") -> bytes:
    """JSON and arrays as the codec joins them; a str is taken as JSON already."""
    text = (tree if isinstance(tree, str) else json.dumps(tree)).encode()
    return struct.pack("<QQ", len(text), len(arrays)) + text + arrays


def holding(node: Any, kinds: Any = (), arrays: bytes = b"", **others: Any) -> bytes:
    """A signed state of which everything is right but for the state's node, given as JSON."""
    honest = json.loads(plain_tree())
    entries = honest["content"]["dict"] | {"state": "@", "records": {"tuple": [0, 0, {"bytes": encoded(bytes(32))}]}}
    text = json.dumps({"arrays": list(kinds), "content": {"dict": entries | others}})
    return signed(body_of(text.replace('"@"', node if isinstance(node, str) else json.dumps(node)), arrays))


def plain_tree() -> str:
    packed = _signed.pack({**CONTENT, "state": None, "records": (0, 0, bytes(32))}, "run")
    return packed[len(MAGIC) + 48 + 16 :].decode()


def encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


# --- pickles --------------------------------------------------------------------------------------------------


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _named(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def pickles(trace: Path) -> dict[str, bytes]:
    """By name: calls, and BUILD on what the reader of format 3 let through."""
    dtype = _named("numpy", "dtype") + _text("O8") + b"\x89\x88\x87R"
    slots = b"N}" + b"%b" + b"s\x86b"  # (None, {name: value}) is set by setattr
    return {
        "os.system": b"\x80\x04" + _named("os", "system") + _text(f"touch {trace}") + b"\x85R.",
        "os.system in protocol 0": f"cos\nsystem\n(S'touch {trace}'\ntR.".encode(),
        "eval": b"\x80\x04" + _named("builtins", "eval") + _text(f"open({str(trace)!r}, 'w')") + b"\x85R.",
        "dtype with BUILD": b"\x80\x04"
        + dtype
        + b"(K\x03"
        + _text("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb.",
        "scalar of an object": b"\x80\x04"
        + _named("numpy._core.multiarray", "scalar")
        + dtype
        + b"C\x08AAAAAAAA\x86R.",
        "BUILD on Mechanism": b"\x80\x04"
        + _named("fedppl.algorithms.ep.private", "Mechanism")
        + slots % (_text("sd") + b"G" + struct.pack(">d", 0.0))
        + b".",
        "BUILD on Status": b"\x80\x04" + _named("fedppl.types", "Status") + slots % (_text("ok") + b"\x88") + b".",
    }


class _Reduced:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def _foreign(trace: Path) -> Iterator[Crafted]:
    """Files without a signature, or with one that does not fit."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield Crafted(f"pickle, protocol {protocol}", pickle.dumps(_Reduced(trace), protocol))
    checksum = {name: hashlib.sha256(raw).digest() + raw for name, raw in pickles(trace).items()}
    for name, raw in pickles(trace).items():
        yield Crafted(name, raw)
        yield Crafted(f"{name}, format 3", b"fedppl checkpoint 3\n" + checksum[name])
        yield Crafted(f"{name}, a checksum for a signature", MAGIC + checksum[name])
        yield Crafted(f"{name}, signed", signed(raw))
        yield Crafted(f"{name}, as signed JSON", signed(struct.pack("<QQ", len(raw), 0) + raw))
        yield Crafted(f"{name}, as signed arrays", signed(body_of({"arrays": [], "content": None}, raw)))
    for number in (0, 1, 2, 4, _signed.FORMAT + 100, 999999999):
        yield Crafted(f"format {number}", b"fedppl checkpoint %d\n" % number + bytes(100))
    objects, file = np.empty(1, dtype=object), io.BytesIO()
    objects[0] = _Reduced(trace)
    np.savez(file, state=objects)
    yield Crafted("npz with a pickle", file.getvalue())
    file = io.BytesIO()
    np.save(file, objects, allow_pickle=True)
    yield Crafted("npy with a pickle", file.getvalue())
    yield Crafted("gzip with a pickle", gzip.compress(pickles(trace)["os.system"]))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("data.pkl", pickles(trace)["os.system"])
    yield Crafted("zip with a pickle", file.getvalue())
    for name, raw in {
        "empty": b"",
        "text": b"hello",
        "magic alone": MAGIC,
        "no number": b"fedppl checkpoint x\n",
    }.items():
        yield Crafted(name, raw)


def _altered(honest: Crafted) -> Iterator[Crafted]:
    """An honest file, changed."""
    start, records = len(MAGIC), honest.records or b""
    places = {"magic": 3, "version": 18, "whose key": start + 2, "length": start + 9, "signature": start + 20}
    places |= {"length of JSON": start + 49, "length of arrays": start + 57, "JSON": start + 80, "arrays": -3}
    for name, place in places.items():
        raw = bytearray(honest.state)
        raw[place] ^= 1
        yield Crafted(f"a bit of its {name}", bytes(raw))
    for kept in (1, start - 1, start, start + 20, start + 47, start + 48, start + 60, -20, -1):
        yield Crafted(f"cut at {kept}", honest.state[:kept])
    yield Crafted("more at its end", honest.state + b"x")
    body = honest.state[start + 48 :]
    yield Crafted("another's key", signed(body, key=b"k" * 32))
    whose, mine = _signed._whose(_key.owner_key(make=True)), signed(body, key=b"k" * 32)
    yield Crafted("another's key, said to be mine", mine[:start] + whose + mine[start + 8 :])
    yield Crafted("no signature", honest.state[: start + 16] + bytes(32) + body)
    yield Crafted("a plain digest", honest.state[: start + 16] + hashlib.sha256(body).digest() + body)
    yield Crafted("a MAC of the body alone", honest.state[: start + 16] + hmac.digest(whose, body, "sha256") + body)
    yield Crafted("a personal state", signed(body, about="lasting-a.personal"))
    for name, length in {"huge": 2**63, "all": 2**64 - 1, "zero": 0, "one more": len(body) + 1}.items():
        yield Crafted(
            f"length {name}", honest.state[: start + 8] + struct.pack("<Q", length) + honest.state[start + 16 :]
        )
    yield Crafted("records missing", honest.state, b"")
    yield Crafted("records cut", honest.state, records[:-1])
    for place in (3, 20, 40, len(records) // 2, len(records) - 1):
        raw = bytearray(records)
        raw[place] ^= 1
        yield Crafted(f"a bit of the records at {place}", honest.state, bytes(raw))
    begin = len(b"fedppl records %d\n" % _signed.FORMAT)
    first = struct.unpack_from("<Q", records, begin)[0] + 8
    yield Crafted(
        "records in another order",
        honest.state,
        records[:begin] + records[begin + first :] + records[begin : begin + first],
    )
    yield Crafted("a record left out", honest.state, records[: begin + first])
    for name, raw in pickles(Path("trace")).items():
        frame = struct.pack("<Q", len(raw)) + raw
        yield Crafted(f"records: {name}", honest.state, (records[:begin] + frame).ljust(len(records), b"\0"))
    for name, length in {"huge": 2**63, "all": 2**64 - 1}.items():
        yield Crafted(
            f"a record of length {name}",
            honest.state,
            records[:begin] + struct.pack("<Q", length) + records[begin + 8 :],
        )


def _by_the_owner(trace: Path) -> Iterator[Crafted]:
    """Signed with the owner's key: what decodes them has to hold by itself."""
    for name, module, attribute, fields in (
        ("a function", "os", "system", {"command": f"touch {trace}"}),
        ("a function by its own module", os.system.__module__, "system", {"command": f"touch {trace}"}),
        ("a builtin", "builtins", "eval", {"source": "1"}),
        ("a builtin class", "builtins", "tuple", {}),
        ("type", "builtins", "type", {}),
        ("a dotted name", "fedppl.storage.checkpoint", "os.system", {"command": f"touch {trace}"}),
        ("a dotted attribute", "fedppl.gaussian", "Gaussian.__class__", {}),
        ("a path", "fedppl.storage.checkpoint", "Path", {}),
        ("a model", "fedppl.model.declaration", "FederatedModel", {}),
        ("a dataclass", "fedppl.types", "Layout", {}),
        ("a struct sequence", "os", "stat_result", {}),
        ("a module that is not there", "this", "s", {}),
        ("a module in a module", "fedppl", "gaussian.Gaussian", {"linear": 1, "precision": 2}),
        ("a class from where it is imported", "fedppl.types", "Gaussian", {"linear": 1, "precision": 2}),
        ("dunder", "fedppl.gaussian", "__builtins__", {}),
        ("no name", "fedppl.gaussian", "", {}),
        ("no module", "", "Gaussian", {"linear": 1, "precision": 2}),
        ("a field missing", "fedppl.gaussian", "Gaussian", {"linear": 1}),
        ("a field more", "fedppl.gaussian", "Gaussian", {"linear": 1, "precision": 2, "__class__": 3}),
        ("fields in another order", "fedppl.gaussian", "Gaussian", {"precision": 1, "linear": 2}),
        ("a property", "fedppl.algorithms.ep.private", "Mechanism", {"sd": 0.0}),
        ("an enumeration", "fedppl.types", "Status", {"ok": True}),
        ("an exception", "fedppl.types", "DataError", {}),
    ):
        yield Crafted(f"named: {name}", holding({"named": [module, attribute, fields]}))
    for member in ("ok", "mro", "__class__", "_value_", "running", "RUNNING.value", ""):
        yield Crafted(f"member {member!r}", holding({"enum": ["fedppl.types", "Status", member]}))
    yield Crafted("member of a tuple", holding({"enum": ["fedppl.gaussian", "Gaussian", "linear"]}))
    yield Crafted("member of a function", holding({"enum": ["os", "system", "RUNNING"]}))
    for dtype in (
        "|O",
        "O",
        "|O8",
        "<U4",
        "|S8",
        "|V8",
        "<M8[s]",
        "f8,f8",
        "<f16",
        "float64",
        "f8",
        "",
        ["<f8"],
        None,
        8,
    ):
        yield Crafted(f"dtype {dtype!r}", holding({"array": 0}, [[dtype, "C", [1]]], bytes(8)))
        yield Crafted(f"scalar of {dtype!r}", holding({"scalar": [dtype, "00" * 8]}))
    yield Crafted("a structured dtype", holding({"array": 0}, [[[["a", "<f8"]], "C", [1]]], bytes(8)))
    for shape in (
        [10**13], [-1], [2], [0], [True], [1.0], ["1"], [2**48, 2**48], [0, 2**62], [2**64 + 1], [1] * 100, None, 1,
    ):  # fmt: skip
        yield Crafted(f"shape {shape!s:.30}", holding({"array": 0}, [["<f8", "C", shape]], bytes(8)))
    yield Crafted("no such array", holding({"array": 1}, [["<f8", "C", [1]]], bytes(8)))
    for index in (-1, True, 0.0, "0", None, 10**30):
        yield Crafted(f"array {index!r}", holding({"array": index}, [["<f8", "C", [1]]], bytes(8)))
    yield Crafted("an order", holding({"array": 0}, [["<f8", "K", [1]]], bytes(8)))
    yield Crafted("a bool of 2", holding({"array": 0}, [["|b1", "C", [1]]], b"\2"))
    yield Crafted("a bool scalar of 2", holding({"scalar": ["|b1", "02"]}))
    yield Crafted("100,000 arrays that are not there", holding(None, [["<f8", "C", [1]]] * 10**5))
    for name, node in {
        "reduce": {"reduce": ["os", "system", f"touch {trace}"]},
        "an empty kind": {},
        "two kinds": {"tuple": [], "dict": {}},
        "a tuple of a number": {"tuple": 3},
        "a dict of a list": {"dict": []},
        "int in words": {"int": "1_0"},
        "int with a call": {"int": "__import__('os')"},
        "int of nothing": {"int": "0x"},
        "float in decimals": {"float": "1.5"},
        "float cut": {"float": "00"},
        "bytes": {"bytes": "%%%"},
        "a long scalar": {"scalar": ["<f8", "00" * 9]},
        "a scalar in words": {"scalar": ["<f8", "zz" * 8]},
    }.items():
        yield Crafted(name, holding(node))
    for name, text in {
        "NaN": "NaN",
        "Infinity": "-Infinity",
        "a long number": "9" * 100_000,
        "a key twice": '{"dict": {"a": 1, "a": 2}}',
        "a kind twice": '{"tuple": [1], "tuple": [2]}',
        "a field twice": '{"named": ["fedppl.gaussian", "Gaussian", {"linear": 1, "linear": 2, "precision": 3}]}',
        "100 deep": "[" * 100 + "]" * 100,
        "100,000 deep": "[" * 100_000 + "]" * 100_000,
        "100,000 dicts deep": '{"tuple":[' * 100_000 + "]}" * 100_000,
        "open": "[" * 1000,
        "no JSON": "state",
    }.items():
        yield Crafted(f"JSON: {name}", holding(text))
    for name, body in {
        "no body": b"",
        "half a prefix": bytes(10),
        "JSON of 2**63 bytes": struct.pack("<QQ", 2**63, 0) + b"{}",
        "JSON of all bytes": struct.pack("<QQ", 2**64 - 1, 3) + b"{}",
        "arrays of 2**62 bytes": struct.pack("<QQ", 2, 2**62) + b"{}",
        "no UTF-8": struct.pack("<QQ", 2, 0) + b"\xff\xfe",
        "UTF-32": struct.pack("<QQ", 8, 0) + "[]".encode("utf-32-le"),
        "a list": body_of([]),
        "a number": body_of(1),
        "no arrays": body_of({"content": None}),
        "more": body_of({"arrays": [], "content": None, "code": "1"}),
        "arrays in a dict": body_of({"arrays": {}, "content": None}),
        "an array in words": body_of({"arrays": ["<f8"], "content": None}),
        "nothing": body_of({"arrays": [], "content": None}),
        "other names": body_of({"arrays": [], "content": {"dict": {"seed": 1}}}),
    }.items():
        yield Crafted(f"body: {name}", signed(body))
    for name, wrong in {
        "fingerprint": 1,
        "settings": [],
        "clients": "ab",
        "data": 0,
        "seed": "1",
        "name": None,
    }.items():
        yield Crafted(f"{name} of another type", holding("null", **{name: wrong}))
    for name, kept in {
        "no tuple": None,
        "negative": {"tuple": [-1, -1, {"bytes": encoded(bytes(32))}]},
        "negative length": {"tuple": [1, -5, {"bytes": encoded(bytes(32))}]},
        "huge": {"tuple": [2**62, 2**62, {"bytes": encoded(bytes(32))}]},
        "of bool": {"tuple": [True, 20, {"bytes": encoded(bytes(32))}]},
        "without a digest": {"tuple": [1, 20, {"bytes": ""}]},
        "of all that is there": {"tuple": [2, 10**3, {"bytes": encoded(bytes(32))}]},
    }.items():
        yield Crafted(f"records {name}", holding("null", records=kept))


def honest_files(folder: Path) -> Crafted:
    """What a run writes."""
    path = folder / "honest.ckpt"
    checkpoint.write(path, CONTENT)
    return Crafted("honest", path.read_bytes(), path.with_name("honest.ckpt.records").read_bytes())


def all_of(folder: Path, trace: Path) -> list[Crafted]:
    """Every crafted file; `trace` is what their code would leave."""
    honest = honest_files(folder)
    every = [*_foreign(trace), *_altered(honest), *_by_the_owner(trace)]
    return [one if one.records is not None else one._replace(records=honest.records) for one in every]


def put(crafted: Crafted, path: Path) -> None:
    """Lay the files where a run would look for them."""
    path.write_bytes(crafted.state)
    records = path.with_name(path.name + ".records")
    records.unlink(missing_ok=True)
    if crafted.records:
        records.write_bytes(crafted.records)


def imported() -> bool:
    """Whether a file had a module imported that nobody imports."""
    return "this" in sys.modules
