"""Files that something broke, or with bytes of another kind in the state's place: none may be taken for a fit."""

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

from tests.support.crafted import _Reduced, body_of

Change = Callable[[h5py.File], Any]


def bytes_instead(raw: Callable[[Path], bytes]) -> Change:
    """Other bytes in the place of the server's state, with their right digest."""

    def within(file: h5py.File) -> None:
        new = raw(Path(file.filename).with_name("trace"))
        del file["fedppl/state"], file["fedppl/byte"]
        state = file["fedppl"].create_dataset("state", data=np.frombuffer(new, dtype=np.uint8))
        scale = file["fedppl"].create_dataset("byte", (len(new),), ">f4")
        scale.make_scale(f"This is a netCDF dimension but not a netCDF variable.{len(new):10d}")
        state.dims[0].attach_scale(scale)
        file["fedppl"].attrs["digest"] = hashlib.sha256(new).hexdigest()

    return within


def poke(name: str, value: Any) -> Change:
    def within(file: h5py.File) -> None:
        file[name][(0,) * file[name].ndim] = value

    return within


def flip(file: h5py.File) -> None:
    file["fedppl/state"][0] = file["fedppl/state"][0] ^ 1


def without(name: str) -> Change:
    def within(file: h5py.File) -> None:
        del file[name]

    return within


# By name: what is done to the file, and words of the error.
CHANGES: dict[str, tuple[Change, str]] = {
    "no state": (without("fedppl/state"), "KeyError"),
    "no group of ours": (without("fedppl"), "KeyError"),
    "no posterior": (without("posterior"), "KeyError"),
    "no digest": (lambda file: file["fedppl"].attrs.__delitem__("digest"), "KeyError"),
    "another format": (lambda file: file["fedppl"].attrs.__setitem__("format", 99), "format 99"),
    "a bit of the state": (flip, "state"),
    "a draw": (poke("posterior/mu", 3.0), r"\['posterior'\]"),
    "a NaN among draws": (poke("posterior/mu", np.nan), r"\['posterior'\]"),
    "a number of a round": (poke("rounds/seconds", 1e9), r"\['rounds'\]"),
    "a pickle": (bytes_instead(lambda trace: pickle.dumps(_Reduced(trace))), "damaged"),
    "arrays of a petabyte": (
        bytes_instead(lambda trace: body_of({"arrays": [["<f8", "C", [2**47]]], "content": {"array": 0}})),
        "shapes",
    ),
    "a function by name": (
        bytes_instead(
            lambda trace: body_of({"arrays": [], "content": {"named": ["os", "system", {"command": f"touch {trace}"}]}})
        ),
        "named tuple",
    ),
    "JSON of 2**63 bytes": (bytes_instead(lambda trace: struct.pack("<QQ", 2**63, 0)), "bytes of JSON"),
    "something else": (bytes_instead(lambda trace: body_of(json.dumps({"arrays": [], "content": [1]}))), "damaged"),
}


def crafted(honest: Path, name: str, folder: Path) -> Path:
    """The honest file with one change."""
    path = folder / "crafted.nc"
    shutil.copyfile(honest, path)
    with h5py.File(path, "r+") as file:
        CHANGES[name][0](file)
    return path
