"""A salted digest of a client's data: enough to see that they have changed, and not to compare two runs' data."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SALT = 16
LENGTH = _SALT + 32  # of a seal in bytes


def seal(arrays: Mapping[str, Any], salt: bytes | None = None) -> bytes:
    """Salt and keyed digest of named arrays: of names, shapes and values, whatever their order and width.

    >>> matches(seal({"y": [1, 2], "x": [0.5]}), {"x": [0.5], "y": [1.0, 2.0]})
    True
    >>> matches(seal({"y": [1.0, 2.0]}), {"y": [[1.0, 2.0]]})
    False
    """
    key = secrets.token_bytes(_SALT) if salt is None else salt
    state = hashlib.blake2b(key=key, digest_size=32)
    for name in sorted(arrays):
        array = plain(np.asarray(arrays[name]))
        head = repr((str(name), array.dtype.str, array.shape)).encode()
        state.update(len(head).to_bytes(8, "little") + head)
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return key + state.digest()


def matches(sealed: bytes, arrays: Mapping[str, Any]) -> bool:
    """Whether the arrays are those that were sealed."""
    return hmac.compare_digest(sealed, seal(arrays, sealed[:_SALT]))


def plain(array: NDArray[Any]) -> NDArray[Any]:
    """Real numbers as float64 where those hold them: whether a column is of integers can depend on other clients."""
    whole = array.dtype.kind in "iu"
    if whole and array.size and max(-int(array.min()), int(array.max())) > 2**53:
        return array.astype(array.dtype.newbyteorder("<"))
    return array.astype("<f8", copy=False) if whole or array.dtype.kind in "bf" else array
