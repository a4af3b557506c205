"""Random streams that depend on names and numbers alone, and quasi-random points of them."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from scipy.special import ndtri
from scipy.stats import qmc

from fedppl.numerics import tolerances as tol
from fedppl.types import Array


def stream(seed: tuple[int, ...]) -> np.random.Generator:
    """Random stream of a (seed, round, client) triple."""
    return np.random.default_rng(np.random.SeedSequence(seed))


def stream_of(client_id: str) -> int:
    """One of few streams of points for a client: errors of clients hardly add up, and the points are cached."""
    return hashlib.blake2b(client_id.encode(), digest_size=1).digest()[0]


def client_seed(client_id: str) -> int:
    """The last part of a client's seeds."""
    return int.from_bytes(hashlib.blake2b(client_id.encode(), digest_size=8).digest(), "little")


def nonce_of(run: str, number: int, client_id: str) -> int:
    """Of a request, 63 bits: another in each round, and the same in a run that begins anew under its name."""
    about = f"{run}\0{number}\0{client_id}".encode()
    return int.from_bytes(hashlib.blake2b(about, digest_size=8).digest(), "little") >> 1


def cached(most_bytes: int) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Cache a function's arrays, read-only, up to `most_bytes` in total.

    >>> import numpy as np
    >>> @cached(most_bytes=800)
    ... def ones(size):
    ...     return np.ones(size)
    >>> ones(60) is ones(60), ones(200) is ones(200)  # the second exceeds the cache
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


def fresh_points(size: int, points: int, stream: int) -> Array:
    """Antithetic scrambled Sobol normals (points, size): sample mean exactly 0, sample covariance exactly I.

    Constant weights give the proposal's own moments exactly, so that a site that is already right has no Monte Carlo
    error. Each `stream` is another scramble.
    """
    z = ndtri(_sobol(size, max((points + 1) // 2, size + 1), stream))
    z = np.concatenate([z, -z])  # whitening restores the balance that the first of a power of two of points lack
    factor = np.linalg.cholesky(z.T @ z / len(z))
    whitened: Array = np.ascontiguousarray(np.linalg.solve(factor, z.T).T)
    return whitened


whitened_points = cached(most_bytes=tol.POINTS_BYTES)(fresh_points)  # a client needs the same ones in every round


def uniform(size: int, count: int, stream: int, scrambles: int) -> Array:
    """Sobol points, `count` of each independent scramble one after the other: (scrambles x count, size)."""
    return np.concatenate([_sobol(size, count, (stream, scramble)) for scramble in range(scrambles)])


def _sobol(size: int, count: int, seed: int | tuple[int, int]) -> Array:
    """Scrambled Sobol points (count, size), off 0 and 1; balanced where their number is a power of 2."""
    points = qmc.Sobol(size, seed=np.random.default_rng(seed)).random_base2(int(np.ceil(np.log2(count))))[:count]
    return np.asarray(np.clip(points, tol.UNIFORM_END, 1.0 - tol.UNIFORM_END))


def standard_normal(size: int, count: int, stream: int, scrambles: int) -> Array:
    """Scrambled Sobol normals, `count` of each independent scramble one after the other: (scrambles x count, size)."""
    return np.asarray(ndtri(uniform(size, count, stream, scrambles)))
