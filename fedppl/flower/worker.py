"""A site's warm worker: a process that keeps the app imported and its model compiled, and answers as the app would.

Started by `warm_app`, which tells it what to do by its standard input. Threads take connections and say every second
that it lives; the main thread computes, one request after the other.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import hashlib
import importlib
import logging
import os
import pickle
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from numpy.lib.npyio import NpzFile

from fedppl.data import frames
from fedppl.flower import warm
from fedppl.settings import shown
from fedppl.storage import codec
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

ALIVE, STALE, FAILED, DONE = "alive", "stale", "failed", "done"
_PROOFS = 10.0  # seconds in all, until the other end has shown that it knows the key
_PATIENCE = 60.0  # seconds in which a known end has to say more, or to take what it is sent
_TICK = 1.0
_CONNECTIONS = 16  # at once
_LOG = 2  # standard error, which whoever started it has opened
_LOG_BYTES = 2**20  # of one request, to the app's own log


class _Job:
    """A request, who asks, and the answer when there is one."""

    def __init__(self, asked: Mapping[str, Any], connection: socket.socket) -> None:
        self.asked = asked
        self.connection = connection
        self.done = threading.Event()
        self.sent = threading.Event()  # or nobody takes it
        self.answer: bytes = b""

    def end(self, answer: bytes) -> None:
        """Answer it."""
        self.answer = answer
        self.done.set()


class _Desk(NamedTuple):
    """Jobs that wait, and the one that is computed."""

    jobs: queue.Queue[_Job]
    now: list[_Job]


class _App(NamedTuple):
    """What the worker was told, and the app that it has loaded."""

    told: Mapping[str, Any]
    folder: Path
    site_app: Any  # None where it could not be loaded
    trouble: str  # why not
    marks: list[str]  # of the data that it has worked with, when it has


def main(told: Mapping[str, Any]) -> None:
    """Serve until told otherwise: `told` has the app's reference, the site's folder, seconds of idleness, identity.

    Standard output and error are the open log.
    """
    site = Path(told["folder"])
    folder = warm.opened(site)
    key = warm.make_key(folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.unlink(warm.SOCKET, dir_fd=folder)
    except FileNotFoundError:
        pass
    before = os.umask(0o177)
    listener.bind(warm.address(folder, site))
    os.umask(before)
    listener.listen(_CONNECTIONS)
    desk = _Desk(queue.Queue(), [])
    threading.Thread(target=_accept, args=(listener, key, desk), daemon=True).start()
    _serve(told, site, folder, key, desk)
    os._exit(0)  # threads and pools of libraries hold nobody up


def _accept(listener: socket.socket, key: bytes, desk: _Desk) -> None:
    free = threading.BoundedSemaphore(_CONNECTIONS)
    while True:
        free.acquire()
        try:
            connection, _ = listener.accept()
        except OSError:
            free.release()
            time.sleep(_TICK)
            continue
        threading.Thread(target=_talk, args=(connection, key, desk, free), daemon=True).start()


def _talk(connection: socket.socket, key: bytes, desk: _Desk, free: threading.BoundedSemaphore) -> None:
    """One connection: proofs, a request, signs of life, the answer."""
    job = None
    try:
        with connection:
            connection.settimeout(_PROOFS)
            warm.peer(connection)
            warm.prove(connection, key, first=False, limit=_PROOFS)
            connection.settimeout(_PATIENCE)
            job = _Job(codec.decode(warm.receive(connection)), connection)
            desk.jobs.put(job)
            while not job.done.wait(_TICK):
                # What may have no end, and who waits for this one has to know.
                behind = any(one is not job and warm.is_closed(one.connection) for one in tuple(desk.now))
                warm.send(connection, _packed(ALIVE, behind=behind))
            warm.send(connection, job.answer)
    except Exception as error:  # whatever comes from elsewhere is no reason to end
        logger.warning("a connection to the warm worker is given up: %s: %s", type(error).__name__, error)
    finally:
        if job is not None:
            job.sent.set()
        free.release()


def _serve(told: Mapping[str, Any], site: Path, folder: int, key: bytes, desk: _Desk) -> None:
    """Answer jobs until idle, concluded, stale, or no longer there."""
    app = _loaded_app(told, site)
    taken: list[_Job] = []
    last = time.monotonic()
    while warm.is_there(folder, site, key) and time.monotonic() - last < told["idle"]:
        try:
            job = desk.jobs.get(timeout=_TICK)
        except queue.Empty:
            continue
        desk.now.append(job)
        answer, goes_on = _do(job, app)
        desk.now.clear()
        if not goes_on:  # before the answer: whoever asks next finds no worker, rather than one that ends
            _leave(site, folder, key)
        job.end(answer)
        taken = [one for one in (*taken, job) if not one.sent.is_set()]
        last = time.monotonic()
        if not goes_on:
            break
    _leave(site, folder, key)
    while not desk.jobs.empty():
        taken.append(desk.jobs.get())
        taken[-1].end(_packed(STALE, why="the one before it was its last"))
    end = time.monotonic() + _PATIENCE
    for job in taken:  # their threads die with this process
        job.sent.wait(max(0.0, end - time.monotonic()))


def _loaded_app(told: Mapping[str, Any], site: Path) -> _App:
    try:
        module, _, name = told["app"].partition(":")
        from fedppl.flower.client_app import declared  # after the socket is there: it takes seconds

        found = getattr(importlib.import_module(module), name)
        if found not in declared:
            raise DeclarationError(
                f"app={told['app']!r} is {shown(found)}; name what fedppl.Flower.client_app returned."
            )
        return _App(told, site, declared[found], "", [])
    except BaseException:
        logger.exception("the warm worker cannot load %s", told["app"])
        return _App(told, site, None, traceback.format_exc(), [])


def _do(job: _Job, app: _App) -> tuple[bytes, bool]:
    """The answer to a job, and whether the worker goes on after it."""
    start = os.fstat(_LOG).st_size
    try:
        asked = job.asked
        if asked["identity"] != app.told["identity"]:
            return _packed(STALE, why=warm.changed(app.told["identity"], asked["identity"])), False
        if app.site_app is None:  # the next message has another try: what was missing may be there by then
            return _packed(FAILED, log=app.trouble), False
        from fedppl.flower.client_app import answer
        from fedppl.flower.messages import CONCLUDE
        from fedppl.storage.signed import file_memory

        config, kind = asked["config"], asked["kind"]
        here = app.site_app.node(config)
        if here.folder is None or not os.path.samefile(here.folder, app.folder):
            raise ValueError(
                f"client_app keeps its files in {here.folder}, warm_app in {app.folder}; name one folder in both"
            )
        if warm.is_closed(job.connection):
            return _given_up(kind), True
        load, mark = _loaded(here, config)
        if app.marks and mark != app.marks[0]:
            return _packed(STALE, why="the data that load_data returns changed"), False
        app.marks[:] = [mark]
        if warm.is_closed(job.connection):  # loading may take long; the next thing is to admit it
            return _given_up(kind), True
        here = here._replace(load_data=load)  # what was looked at is what is used
        arrays, texts = answer(kind, here, config, file_memory(here.folder), (asked["arrays"], asked["texts"]))
        plain = {name: np.asarray(value) for name, value in arrays.items()}
        return _packed(DONE, arrays=plain, texts=dict(texts), log=_logged(start)), kind != CONCLUDE
    except Exception:  # the app answers by itself then, and fails in the same way where it does
        logger.exception("the warm worker does not answer")
        return _packed(FAILED, log=_logged(start) or traceback.format_exc()), True  # the app's logging may go elsewhere


def _logged(start: int) -> str:
    return os.pread(_LOG, _LOG_BYTES, start).decode(errors="replace")


def _packed(status: str, **more: Any) -> bytes:
    return codec.encode({"status": status, **more})


def _given_up(kind: str) -> bytes:
    """Of a request whose asker has gone: nobody reads it, and it counts against no limit of the policy."""
    logger.warning("who asked for %s has gone; it is neither computed nor counted", kind)
    return _packed(FAILED, log="")


def _leave(site: Path, folder: int, key: bytes) -> None:
    """Take key and socket away, unless they are another worker's by now."""
    if warm.is_there(folder, site, key):
        warm.remove(folder)


def _loaded(here: Any, config: Mapping[str, Any]) -> tuple[Callable[[Mapping[str, Any]], Any], str]:
    """Data as loaded now, or that loading fails, behind a function; and a digest, by which a change is seen.

    The policy is not part of it: it is read anew for each message, and nothing that is kept depends on it.
    """
    try:
        found = here.load_data(config)
    except Exception as error:
        return functools.partial(_raise, error), "loading fails"
    found = settled(found)
    return lambda _: found, digest(found)


def _raise(error: Exception, config: Mapping[str, Any]) -> Any:
    raise error


# What a site's `load_data` has returned, and a digest that is another where the data are others -----------------------

# What can be told of no content, such as a lazy frame, which pickles to a plan, has no digest.

_PLAIN = (str, bytes, bool, int, float, complex, type(None), decimal.Decimal, np.generic)
_TIMES = (datetime.date, datetime.time, datetime.timedelta, pd.Period, type(pd.NA))  # with their subclasses of pandas


def settled(loaded: Any) -> Any:
    """Data that are read from their file when they are asked for, read now: what is looked at is what is used."""
    if isinstance(loaded, NpzFile):
        return dict(loaded)
    return loaded.load() if isinstance(loaded, xr.Dataset) else loaded


def digest(loaded: Any) -> str:
    """Digest of data: of names, dtypes, shapes and values.

    Raises `TypeError` if it is not known what the data are made of.
    """
    state = hashlib.sha256()
    _add(state, loaded, "the data")
    return state.hexdigest()


def _add(state: Any, value: Any, where: str) -> None:
    _head(state, type(value).__qualname__)
    if isinstance(value, xr.Dataset):  # a mapping too, but not to its coordinates
        for name, variable in value.variables.items():
            _head(state, name, variable.dims)
            _add_array(state, variable.to_numpy(), f"{where}[{name!r}]")
    elif isinstance(value, Mapping):
        _head(state, len(value))
        for name, one in value.items():
            _head(state, name)
            _add(state, one, f"{where}[{name!r}]")
    elif isinstance(value, tuple | list) and any(not isinstance(one, _PLAIN) for one in value):
        _head(state, len(value))
        for i, one in enumerate(value):
            _add(state, one, f"{where}[{i}]")
    elif isinstance(value, pd.Series | pd.Index) or frames.is_frame(value):
        if isinstance(frames.read(value), frames.narwhals().LazyFrame):
            raise TypeError(f"{where} are a lazy frame, and a worker has to see values; collect it in load_data")
        pickle.Pickler(_Writer(state), protocol=5).dump(value)
    elif isinstance(value, np.ma.MaskedArray):
        _add_array(state, np.ma.getmaskarray(value), where)
        _add_array(state, np.ma.getdata(value), where)
    else:
        _add_array(state, np.asarray(value), where)  # as models see it


def _add_array(state: Any, array: Any, where: str) -> None:
    _head(state, array.dtype.descr, array.shape)
    if not array.dtype.hasobject:
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b"")
        return
    for one in array.ravel().tolist():
        if not isinstance(one, _PLAIN + _TIMES):
            raise TypeError(
                f"{where} hold {type(one).__name__}, and a worker has to see values; return arrays of numbers, or texts"
            )
        _head(state, type(one).__qualname__, one)


def _head(state: Any, *parts: Any) -> None:
    """Add short parts, so that no other parts have the same bytes."""
    text = repr(parts).encode(errors="surrogatepass")
    state.update(len(text).to_bytes(8, "little") + text)


class _Writer:
    """A file for `pickle` whose bytes go to a digest: large data are not copied."""

    def __init__(self, state: Any) -> None:
        self.write = state.update
