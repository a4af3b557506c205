"""What others say of themselves, held back while they are called from here, and what they set, set back."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytensor

# What PyTensor sets while it compiles or builds a graph, and sets back.
_SET = ("mode", "cxx", "optdb__max_use_ratio", "compute_test_value", "traceback__limit")
_NO_BLAS = "PyTensor could not link to a BLAS"


@contextlib.contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """Hold back what a logger says below a level."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(max(before, level))
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back which variables PyMC draws, which the caller asked for, and that PyTensor's C code would find no BLAS.

    Nothing is compiled to C here; errors and other warnings pass.
    """
    with at_level("pymc.sampling.forward", logging.WARNING), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NO_BLAS, UserWarning)
        yield


@functools.cache
def look_for_blas() -> None:
    """Have PyTensor look for a BLAS now, without a word, and remember what it found; that takes half a second."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NO_BLAS, UserWarning)
        _ = pytensor.config.blas__ldflags


def settings() -> dict[str, Any]:
    """What PyTensor sets while it compiles or builds a graph, as it is now."""
    return {name: getattr(pytensor.config, name) for name in _SET if hasattr(pytensor.config, name)}


def set_back(before: Mapping[str, Any]) -> None:
    """Set PyTensor's settings back, in a thread whose work is over.

    Of two threads that compile, the one that ends last sets back what the other had set: without this a user's own
    models might be interpreted from then on.
    """
    for name, value in before.items():
        if getattr(pytensor.config, name) is not value:
            setattr(pytensor.config, name, value)
