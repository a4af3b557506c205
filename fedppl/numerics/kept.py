"""Arrays that are made from a few numbers and used again: kept, the least recently used given up for new ones."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable

from fedppl.types import Array


def kept(most_bytes: int) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Keep a function's arrays, read-only, up to `most_bytes` in all: their number says nothing of their size.

    >>> import numpy as np
    >>> @kept(most_bytes=800)
    ... def ones(size):
    ...     return np.ones(size)
    >>> ones(60) is ones(60), ones(200) is ones(200)  # the second is larger than all that may be kept
    (True, False)
    """

    def decorate(make: Callable[..., Array]) -> Callable[..., Array]:
        arrays: OrderedDict[tuple[int, ...], Array] = OrderedDict()
        lock = threading.Lock()

        @functools.wraps(make)
        def find(*key: int) -> Array:
            with lock:
                if key in arrays:
                    arrays.move_to_end(key)
                    return arrays[key]
            made = make(*key)
            made.flags.writeable = False
            with lock:
                made = arrays.setdefault(key, made)
                total = sum(array.nbytes for array in arrays.values())
                while total > most_bytes:
                    total -= arrays.popitem(last=False)[1].nbytes
            return made

        return find

    return decorate
