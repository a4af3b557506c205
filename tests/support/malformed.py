"""Parcels that a site must not get away with: each with the field that is wrong, from an honest one. No Flower."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import Reply, Request, SharedReader
from fedppl.gaussian import Gaussian
from fedppl.model.checks import PROBES, fingerprint, probes
from fedppl.sites import wire as _wire
from fedppl.types import Layout, Variable

Raw = tuple[dict[Any, Any], dict[str, Any]]  # bytes of arrays, and texts


class Case(NamedTuple):
    """A parcel, and what its refusal has to name."""

    name: str
    field: str
    arrays: dict[Any, Any]
    texts: dict[str, Any]


def layout(mean: float = 0.0, sd: float = 10.0, dims: bool = True) -> Layout:
    """Two means with labels and a scale, normal priors."""
    variables = (Variable("mu", (2,), "", ("predictor",) if dims else None), Variable("tau", (), "log", None))
    precision = np.diag([sd**-2, sd**-2, 4.0])
    prior = Gaussian(precision @ [mean, mean, 0.0], precision)
    density = (*(float(np.sum(point)) for point in probes(variables, prior)), *(0.0,) * PROBES)
    return Layout(variables, prior, True, fingerprint(variables, prior, True, density), density)


def reader(labels: tuple[str, ...] = ("dose", "age")) -> SharedReader:
    """How draws of `layout` are read."""
    return SharedReader(
        lambda phi: {"mu": phi[:, :2], "tau": np.exp(phi[:, 2])}, {"mu": ("predictor",)}, {"predictor": list(labels)}
    )


def npy(value: Any) -> bytes:
    """An array as it travels."""
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(value), allow_pickle=False)
    return buffer.getvalue()


def raw(parcel: tuple[Mapping[str, Any], Mapping[str, str]]) -> Raw:
    """A parcel as it travels."""
    return {name: npy(value) for name, value in parcel[0].items()}, dict(parcel[1])


def hello(client_id: str = "bad", settings: Mapping[str, str] | None = None, **changes: Any) -> Raw:
    """An honest introduction."""
    return raw(_wire.pack_hello(client_id, terms(settings, **changes)))


def terms(settings: Mapping[str, str] | None = None, **changes: Any) -> _wire.Terms:
    """What a server expects of an introduction."""
    return _wire.Terms(settings or {}, changes.get("layout", layout()), changes.get("reader", reader()).coords)


SHAPES: dict[str, tuple[int, ...]] = {"mean": (3,), "precision": (6,), "count": ()}


def request(client_id: str = "bad", nonce: int = 7) -> Request:
    """A request whose reply has `SHAPES`."""
    return Request(client_id, nonce, 1, (1, 2), {"point": np.zeros(3)}, "run", True, SHAPES)


def reply(client_id: str = "bad", nonce: int = 7) -> Raw:
    """An honest reply."""
    message = {"mean": np.arange(3.0), "precision": np.arange(6.0), "count": np.array(4.0)}
    return raw(_wire.pack_reply(Reply(client_id, nonce, layout().fingerprint, message, {"ess": 400.0}, "")))


def header(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """A file in NumPy's format with any header."""
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text.encode("latin-1") + body


def _described(descr: str, order: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mean.npy", b"\x00" * 10_000_000)
    return buffer.getvalue()


_ONE = b"\x00" * 8
ARRAYS: dict[str, Callable[[np.random.Generator], Any]] = {
    "empty bytes": lambda rng: b"",
    "magic alone": lambda rng: b"\x93NUMPY\x01\x00",
    "shape of 10^13": lambda rng: header(_described("'<f8'", "False", "(10000000000000,)"), _ONE),
    "shape of 10^4 each way": lambda rng: header(_described("'<f8'", "False", f"({'10000, ' * 7}10000)"), _ONE),
    "shape of 10^400": lambda rng: header(_described("'<f8'", "False", f"({'9' * 400},)"), _ONE),
    "negative shape": lambda rng: header(_described("'<f8'", "False", "(-1,)"), _ONE),
    "bool shape": lambda rng: header(_described("'<f8'", "False", "(True,)"), _ONE),
    "3,000 parentheses": lambda rng: header("(" * 3_000),
    "65,000 brackets": lambda rng: header("[" * 65_000),
    "a header that is longer than the bytes": lambda rng: b"\x93NUMPY\x01\x00\xff\xff{",
    "a zip": lambda rng: _zip(),
    "the head of a zip": lambda rng: b"PK\x03\x04" + rng.bytes(200),
    "a pickle": lambda rng: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93.",
    "objects": lambda rng: header(_described("'|O'", "False", "(3,)"), b"\x80\x04N."),
    "a structure": lambda rng: header(_described("[('a', '<f8')]", "False", "(3,)"), _ONE * 3),
    "big endian": lambda rng: npy(np.zeros(3, ">f8")),
    "complex": lambda rng: npy(np.zeros(3, complex)),
    "texts": lambda rng: npy(np.array(["a", "b"])),
    "times": lambda rng: npy(np.zeros(3, "M8[s]")),
    "long doubles": lambda rng: npy(np.zeros(3, np.longdouble)),
    "Fortran order": lambda rng: npy(np.asfortranarray(np.ones((2, 3)))),
    "format 2.0": lambda rng: header(_described("'<f8'", "False", "(3,)"), _ONE * 3, b"\x02\x00"),
    "cut off": lambda rng: npy(np.zeros(6))[:-3],
    "bytes beyond the end": lambda rng: npy(np.zeros(3)) + b"\x00",
    "another shape": lambda rng: npy(np.zeros((2, 2))),
    "nine dimensions": lambda rng: npy(np.zeros((1,) * 9)),
    "nothing, of many dimensions": lambda rng: header(_described("'<f8'", "False", f"(0, {'99999999999, ' * 4}1)")),
    "not bytes": lambda rng: None,
    "noise": lambda rng: rng.bytes(int(rng.integers(1, 400))),
    "noise behind the magic": lambda rng: b"\x93NUMPY\x01\x00" + rng.bytes(int(rng.integers(1, 400))),
}
DEEP = ["[" * 100_000, '{"a":' * 50_000, "[" * 20 + "]" * 20, '{"a": ' + "[" * 900 + "]" * 900 + "}"]
JSON: dict[str, Callable[[np.random.Generator], Any]] = {
    "deep": lambda rng: DEEP[int(rng.integers(len(DEEP)))],
    "an integer of 400 digits": lambda rng: "9" * 400,
    "an integer of 5,000 digits": lambda rng: f'{{"a": {"9" * 5_000}}}',
    "a list of an integer of 400 digits": lambda rng: f"[{'9' * 400}]",
    "not JSON": lambda rng: "{",
    "empty": lambda rng: "",
    "long": lambda rng: '"' + "a" * 2_000_000 + '"',
    "too long for all": lambda rng: "a" * 3_000_000,
    "many values": lambda rng: "[" + "1," * 120_000 + "1]",
    "many brackets": lambda rng: "[" + "{}," * 30_000 + "{}]",
    "backslashes": lambda rng: '"' + "\\" * 200_001,
    "a number": lambda rng: "1.5",
    "a text": lambda rng: '"x"',
    "null": lambda rng: "null",
    "NaN": lambda rng: "NaN",
    "[1]": lambda rng: "[1]",
    "[[1]]": lambda rng: "[[1]]",
    "[null]": lambda rng: "[null]",
    "noise": lambda rng: rng.bytes(int(rng.integers(1, 60))).decode("latin-1") + "}",
}
DIGITS = ["", "-1", "1.5", "9" * 400, "9" * 5_000, "٣", "0x7", "1_0", " 7", "7\n", "1e3", "nan"]
HELLO_TEXTS: dict[str, list[Any]] = {
    "variables": [
        "[]",
        '[["mu", [2], "", null]]',
        '[["mu", [-1], "", null, false], ["tau", [], "log", null, false]]',
        '[["mu", [10000000000000], "", null, false]]',
        '[["mu", [true], "", null, false]]',
        '[["mu", [1.5], "", null, false]]',
        '[["mu", [2], "", ["a", "b"], false]]',
        '[["mu", [2], 3, null, false]]',
        '[["mu", [2], "", null, 1]]',
        '[["mu\\n", [2], "", null, false]]',
        '[["\\ud800", [2], "", null, false]]',
        '[["mu", [1], "", null, false], ["mu", [1], "", null, false]]',
        json.dumps([["mu", [1] * 60, "", None, False]]),
        json.dumps([[f"v{i}", [], "", None, False] for i in range(5_000)]),
    ],
    "coords": [
        '{"predictor": 1}',
        '{"predictor": "ab"}',
        '{"predictor": [[1], [2]]}',
        '{"predictor": [null, null]}',
        '{"predictor": ["a"]}',
        '{"predictor": ["a", "b", "c", "d"]}',
        '{"predictor": [NaN, 1]}',
        '{"predictor": ["\\ud800", "b"]}',
        '{"draw": [1, 2]}',
        '{"chain": [1]}',
        '{"predictor": [99999999999999999999, 1]}',
    ],
    "settings": ['{"a": 1}', '{"a": null}', json.dumps({"a": "x" * 100_000})],
    "prior_is_gaussian": ["1", "{}"],
    "fingerprint": ["", "beef", "x" * 10_000],
    "version": ["x" * 10_000],
}
PRIORS: dict[str, dict[str, Any]] = {
    "NaN in the prior": {"prior_linear": [np.nan, 0.0, 0.0]},
    "infinite prior": {"prior_linear": [np.inf, 0.0, 0.0]},
    "NaN in the precision": {"prior_precision": [np.nan, 0.0, 0.0, 1.0, 0.0, 1.0]},
    "indefinite": {"prior_precision": [1.0, 2.0, 0.0, 1.0, 0.0, 1.0]},
    "negative": {"prior_precision": [-1.0, 0.0, 0.0, -1.0, 0.0, -1.0]},
    "zero": {"prior_precision": [0.0] * 6},
    "singular": {"prior_precision": [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]},
    "absurd scale": {"prior_precision": [1e300, 0.0, 0.0, 1e300, 0.0, 1e300]},
    "tiny precision": {"prior_precision": [1e-300, 0.0, 0.0, 1e-300, 0.0, 1e-300]},
    "absurd mean": {"prior_linear": [1e200, 0.0, 0.0]},
    "integers": {"prior_linear": np.zeros(3, np.int64)},
    "NaN in the density": {"prior_density": [np.nan] * 2 * PROBES},
}
REPLY_TEXTS: dict[str, list[Any]] = {
    "nonce": DIGITS,
    "info": [
        "[]",
        '{"a": "x"}',
        '{"a": true}',
        '{"a": null}',
        '{"a": [1]}',
        '{"a": ' + "9" * 400 + "}",
        '{"round": 1.0}',
        '{"client": 1.0}',
        '{"seconds": 1.0}',
        '{"a/b": 1.0}',
        '{"": 1.0}',
        '{"a\\nb": 1.0}',
        '{"\\ud800": 1.0}',
        json.dumps({"x" * 5_000: 1.0}),
        json.dumps({f"d{i}": 1.0 for i in range(65)}),
        json.dumps({f"d{i}": 1.0 for i in range(100_000)}),
    ],
    "fingerprint": ["beef", "", "x" * 100_000],
    "client_id": ["", "other", "x" * 10_000, "a\nb"],
    "reason": ["x" * 100_000],
    "failure": ["x" * 100_000],
}


def _with_array(honest: Raw, kind: str, rng: np.random.Generator) -> Case:
    arrays, texts = dict(honest[0]), dict(honest[1])
    field = str(rng.choice(sorted(arrays)))
    if kind in ARRAYS:
        arrays[field] = ARRAYS[kind](rng)
        return Case(f"{kind} in {field}", field, arrays, texts)
    if kind == "a missing array":
        del arrays[field]
        return Case(f"{kind}: {field}", field, arrays, texts)
    if kind == "one array more":
        arrays["rows"] = npy(np.zeros(100))
        return Case(kind, "rows", arrays, texts)
    if kind == "2,000 arrays":
        return Case(kind, "array", {f"a{i}": npy(0.0) for i in range(2_000)} | arrays, texts)
    return Case(kind, field, {"a\nb" if name == field else name: value for name, value in arrays.items()}, texts)


def _with_text(honest: Raw, field: str, value: Any, told: str) -> Case:
    """A text replaced; without a value it is missing."""
    texts = dict(honest[1])
    texts.pop(field, None)
    if value is not None:
        texts[field] = value
    named = "texts" if len(str(value)) > 2_500_000 else field
    return Case(f"{told} as {field}", named, {} if field == "failure" else dict(honest[0]), texts)


def _cases(honest: Raw, fields: Mapping[str, list[Any]], parsed: list[str], rng: np.random.Generator) -> Iterator[Case]:
    others = ["a missing array", "one array more", "2,000 arrays", "a name that cannot be printed"]
    for kind in [*ARRAYS, *others]:
        yield _with_array(honest, kind, rng)
    for field in parsed:
        for kind, make in JSON.items():
            yield _with_text(honest, field, make(rng), kind)
    for field, values in fields.items():
        if field != "failure" and field != "reason":
            yield _with_text(honest, field, None, "nothing")
            yield _with_text(honest, field, 7, "a number")
        for value in values:
            yield _with_text(honest, field, value, str(value)[:30])


def introductions(rng: np.random.Generator, **changes: Any) -> Iterator[Case]:
    """Malformed introductions, every kind once; the same kinds again for as long as somebody asks."""
    honest = hello(**changes)
    while True:
        yield from _cases(honest, HELLO_TEXTS, ["variables", "coords", "settings", "prior_is_gaussian"], rng)
        for kind, values in PRIORS.items():
            arrays = honest[0] | {name: npy(value) for name, value in values.items()}
            yield Case(kind, "prior_", arrays, dict(honest[1]))
        # An absurd prior that has the fingerprint of the honest one, and the honest prior with another's.
        false = hello(**changes | {"layout": layout(100.0, 0.01)})
        yield Case("another's prior", "fingerprint", false[0], honest[1] | {"coords": false[1]["coords"]})
        yield Case(
            "another's fingerprint", "fingerprint", honest[0], honest[1] | {"fingerprint": false[1]["fingerprint"]}
        )


def replies(rng: np.random.Generator, nonce: int = 7) -> Iterator[Case]:
    """Malformed replies, every kind once; the same kinds again for as long as somebody asks."""
    honest = reply(nonce=nonce)
    while True:
        yield from _cases(honest, REPLY_TEXTS, ["info"], rng)
        for field, shape in SHAPES.items():
            for value in (np.nan, np.inf):
                yield Case(f"{value} in {field}", field, honest[0] | {field: npy(np.full(shape, value))}, honest[1])
            yield Case(f"integers in {field}", field, honest[0] | {field: npy(np.ones(shape, int))}, honest[1])


def named_in(reason: str, case: Case) -> bool:
    """Whether a refusal says what is wrong: the field, or that the names of all arrays are not those expected."""
    return case.field.removesuffix("_id") in reason or "holds" in reason or "array's name" in reason
