"""What others say of themselves, held back while they are called from here."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator

import pytensor

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
