"""Files that somebody made or something broke, out of a fit that was saved: none may be taken for one."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedppl.gaussian import Gaussian
from fedppl.results.saved import _LEAST
from fedppl.storage import codec
from tests.support.crafted import _Reduced, body_of

Change = Callable[[h5py.File], Any]


def reworked(change: Callable[[dict[str, Any]], Any]) -> Change:
    """What the server knows, changed by somebody who puts the right digest beside it."""

    def within(file: h5py.File) -> None:
        content = codec.decode(file["fedppl/state"][:].tobytes())
        put(file, codec.encode(change(content) or content))

    return within


def put(file: h5py.File, raw: bytes) -> None:
    del file["fedppl/state"], file["fedppl/byte"]
    state = file["fedppl"].create_dataset("state", data=np.frombuffer(raw, dtype=np.uint8))
    scale = file["fedppl"].create_dataset("byte", (len(raw),), ">f4")
    scale.make_scale(f"This is a netCDF dimension but not a netCDF variable.{len(raw):10d}")
    state.dims[0].attach_scale(scale)
    file["fedppl"].attrs["digest"] = hashlib.sha256(raw).hexdigest()


def bytes_instead(raw: Callable[[Path], bytes]) -> Callable[[h5py.File], Any]:
    return lambda file: put(file, raw(Path(file.filename).with_name("trace")))


def poke(name: str, value: Any) -> Change:
    def within(file: h5py.File) -> None:
        file[name][(0,) * file[name].ndim] = value

    return within


def flip(name: str) -> Change:
    """One bit is another, whatever it was."""

    def within(file: h5py.File) -> None:
        file[name][0] = file[name][0] ^ 1

    return within


def without(name: str) -> Change:
    def within(file: h5py.File) -> None:
        del file[name]

    return within


def _state(content: dict[str, Any], **fields: Any) -> None:
    content["state"] = content["state"]._replace(**fields)


def _sites(content: dict[str, Any], **fields: Any) -> None:
    _state(content, sites=content["state"].sites._replace(**fields))


def _layout(content: dict[str, Any], place: int, value: Any) -> None:
    content["layout"] = [value if k == place else one for k, one in enumerate(content["layout"])]


def _variable(content: dict[str, Any], **fields: Any) -> None:
    variables = content["layout"][0]
    _layout(content, 0, (variables[0]._replace(**fields), *variables[1:]))


def _records(content: dict[str, Any], **fields: Any) -> None:
    content["records"] = [one._replace(**fields) for one in content["records"]]


def external_link(file: h5py.File) -> None:
    del file["posterior/mu"]
    file["posterior/mu"] = h5py.ExternalLink("/etc/passwd", "/mu")


def external_values(file: h5py.File) -> None:
    del file["posterior/mu"]
    file["posterior"].create_dataset("mu", (4, 10), "f8", external=[("/etc/passwd", 0, 320)])


def virtual_values(file: h5py.File) -> None:
    del file["posterior/mu"]
    layout = h5py.VirtualLayout((4, 10), "f8")
    layout[:] = h5py.VirtualSource("/etc/passwd", "mu", (4, 10))
    file["posterior"].create_virtual_dataset("mu", layout)


def soft_link(file: h5py.File) -> None:
    file["posterior/other"] = h5py.SoftLink("/fit")


def circle(file: h5py.File) -> None:
    file["posterior/again"] = file["/"]


def many_names(file: h5py.File) -> None:
    for k in range(50):
        file[f"more_{k}"] = file["posterior"]


def huge(file: h5py.File) -> None:
    file.create_dataset("posterior/large", (2**40,), "f8", chunks=(2**20,))


def huge_packed(file: h5py.File) -> None:
    file.create_dataset("posterior/large", data=np.zeros(_LEAST // 8 + 1), compression="gzip", chunks=(2**20,))


def huge_fixed_text(file: h5py.File) -> None:
    file.create_dataset("posterior/large", (2**20,), "S4096", chunks=(2**10,))


def one_text_often(file: h5py.File) -> None:
    """Many places that point to one long text: short in the file, long in memory."""
    text = file.create_dataset("posterior/texts", (1,), h5py.string_dtype())
    text[0] = "x" * 2**20
    place = np.frombuffer(_raw(file, text), dtype="V16")
    often = file.create_dataset("posterior/often", (4096,), h5py.string_dtype())
    file.flush()
    _overwrite(file, often, np.repeat(place, 4096).tobytes())


def _raw(file: h5py.File, one: h5py.Dataset) -> bytes:
    file.flush()
    with open(file.filename, "rb") as raw:
        raw.seek(one.id.get_offset())
        return raw.read(16)


def _overwrite(file: h5py.File, one: h5py.Dataset, raw: bytes) -> None:
    one[:] = "y"
    file.flush()
    offset, name = one.id.get_offset(), file.filename
    file.close()
    with open(name, "r+b") as written:
        written.seek(offset)
        written.write(raw)


def other_filter(file: h5py.File) -> None:
    file.create_dataset("posterior/odd", data=np.zeros(10), compression="lzf", chunks=(10,))


def compound(file: h5py.File) -> None:
    file.create_dataset("posterior/odd", data=np.zeros(3, dtype=[("a", "f8"), ("b", "i4")]))


def deep(file: h5py.File) -> None:
    file.create_group("/".join("g" * 40))


def objects(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "extra": 1}


NAN = np.array([[np.nan]])
# By name: what is done to the file, and words of the error.
CHANGES: dict[str, tuple[Change, str]] = {
    "a link to another file": (external_link, "is a link to elsewhere"),
    "values in another file": (external_values, "has its values in another file"),
    "a virtual dataset": (virtual_values, "has its values in another file"),
    "a link within": (soft_link, "is a link to elsewhere"),
    "a circle": (circle, "stands in it twice"),
    "one group by many names": (many_names, "stands in it twice"),
    "more than memory": (huge, "declares"),
    "packed zeros": (huge_packed, "declares"),
    "long texts that are not there": (huge_fixed_text, "declares"),
    "one long text in many places": (one_text_often, "has texts of more than"),
    "an unusual filter": (other_filter, "packed by a filter"),
    "a compound": (compound, "neither numbers nor texts"),
    "deep groups": (deep, "nested more than"),
    "no state": (without("fedppl/state"), "KeyError"),
    "no group of ours": (without("fedppl"), "KeyError"),
    "no posterior": (without("posterior"), "KeyError"),
    "no digest": (lambda file: file["fedppl"].attrs.__delitem__("digest"), "KeyError"),
    "another format": (lambda file: file["fedppl"].attrs.__setitem__("format", 99), "has format 99"),
    "a bit of the state": (flip("fedppl/state"), "not what was saved"),
    "a draw": (poke("posterior/mu", 3.0), r"\['posterior'\] are not what was saved"),
    "a NaN among draws": (poke("posterior/mu", np.nan), r"\['posterior'\] are not what was saved"),
    "a number of a round": (poke("rounds/seconds", 1e9), r"\['rounds'\] are not what was saved"),
    "a pickle": (bytes_instead(lambda trace: pickle.dumps(_Reduced(trace))), "damaged"),
    "arrays of a petabyte": (
        bytes_instead(lambda trace: body_of({"arrays": [["<f8", "C", [2**47]]], "content": {"array": 0}})),
        "not as long as their shapes say",
    ),
    "a function by name": (
        bytes_instead(
            lambda trace: body_of({"arrays": [], "content": {"named": ["os", "system", {"command": f"touch {trace}"}]}})
        ),
        "is no named tuple",
    ),
    "JSON of 2**63 bytes": (bytes_instead(lambda trace: struct.pack("<QQ", 2**63, 0)), "bytes of JSON"),
    "something else": (bytes_instead(lambda trace: body_of(json.dumps({"arrays": [], "content": [1]}))), "else"),
    "a name more": (reworked(objects), "holds something else"),
    "a state of another class": (reworked(lambda c: c.update(state=Gaussian(*c["layout"][1]))), "its state is Gauss"),
    "no state at all": (reworked(lambda c: c.update(state=None)), "its state is NoneType"),
    "NaNs in q": (reworked(lambda c: _sites(c, q=Gaussian(NAN[0], NAN))), "missing or infinite"),
    "q of other coordinates": (reworked(lambda c: _sites(c, q=Gaussian(np.zeros(2), np.eye(2)))), "missing|read"),
    "sites that are none": (reworked(lambda c: _state(c, sites=None)), "its state cannot be read"),
    "a shape beyond memory": (reworked(lambda c: _variable(c, shape=(10**12, 10**12))), "its prior is none"),
    "a shape that overflows": (reworked(lambda c: _variable(c, shape=(2**63, 2))), "its prior is none"),
    "a negative shape": (reworked(lambda c: _variable(c, shape=(-1,))), "the shape of a variable"),
    "a prior of NaNs": (reworked(lambda c: _layout(c, 1, Gaussian(NAN[0], NAN))), "its prior is none"),
    "variables that are none": (reworked(lambda c: _layout(c, 0, ("mu",))), "a variable is none"),
    "points of other coordinates": (reworked(lambda c: c.update(points=np.zeros((3, 7)))), "its points have not"),
    "values of other points": (reworked(lambda c: c["values"].update(mu=np.zeros(2))), "are none of its points"),
    "records that are none": (reworked(lambda c: c.update(records=[1, 2])), "its records are none"),
    "records of strangers": (reworked(lambda c: _records(c, asked=("stranger",))), "its state cannot be read"),
    "records of texts": (reworked(lambda c: _records(c, bytes_down="many")), "its state cannot be read"),
    "a status of text": (reworked(lambda c: c.update(status="converged")), "'status' is of type str"),
    "a negative seed": (reworked(lambda c: c.update(seed=-1)), "its seed is negative"),
    "clients twice": (reworked(lambda c: c.update(clients=("a", "a"))), "not distinct"),
    "draws of strangers": (reworked(lambda c: c.update(drawn=["stranger"])), "names clients that are none"),
    "draws that are not there": (reworked(lambda c: c.update(drawn=[c["clients"][0]])), "client_0"),
}


LARGE = (
    "more than memory",
    "long texts that are not there",
    "one long text in many places",
    "arrays of a petabyte",
    "JSON of 2**63 bytes",
    "a shape beyond memory",
    "a shape that overflows",
)


def crafted(honest: Path, name: str, folder: Path) -> Path:
    """The honest file with one change."""
    path = folder / "crafted.nc"
    shutil.copyfile(honest, path)
    with h5py.File(path, "r+") as file:
        CHANGES[name][0](file)
    return path
