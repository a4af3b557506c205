"""A site's warm worker: a process that keeps the app imported and its model compiled, and answers as the app would.

`warm_app` starts it and writes its options to its standard input. Threads accept connections and send a sign of life
every second; the main thread computes one request after the other.
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
from fedppl.flower.warm import ALIVE, DONE, FAILED, STALE
from fedppl.settings import shown
from fedppl.storage import codec
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

_PROOFS = 10.0  # seconds in all, until the other end has proved that it knows the key
_PATIENCE = 60.0  # seconds for which a read or write of a proved connection may stall
_TICK = 1.0
_CONNECTIONS = 16  # at once
_LOG = 2  # standard error, a file that `warm_app` has opened
_LOG_BYTES = 2**20  # of one request, that go to the app's own log


class _Job:
    """A request, its connection, and its answer."""

    def __init__(self, request: Mapping[str, Any], connection: socket.socket) -> None:
        self.request = request
        self.connection = connection
        self.done = threading.Event()
        self.sent = threading.Event()  # also set where the connection has failed
        self.answer: bytes = b""

    def end(self, answer: bytes) -> None:
        """Answer it."""
        self.answer = answer
        self.done.set()


class _Desk(NamedTuple):
    """Jobs that wait, and the one that is being computed."""

    jobs: queue.Queue[_Job]
    computing: list[_Job]


class _App(NamedTuple):
    """The worker's options, and the app that it has loaded."""

    options: Mapping[str, Any]
    folder: Path
    site_app: Any  # None where it could not be loaded
    trouble: str  # why not
    marks: list[str]  # the digest of the data that it has used, if any


def main(options: Mapping[str, Any]) -> None:
    """Serve the app that `options` names: app, folder, idle (seconds) and identity. Standard error is the open log."""
    site = Path(options["folder"])
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
    _serve(options, site, folder, key, desk)
    os._exit(0)  # without waiting for threads and pools of libraries


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
    """Serve one connection: proofs, a request, signs of life, the answer."""
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
                # The job before this one may never end, and nobody waits for it.
                behind = any(other is not job and warm.is_closed(other.connection) for other in tuple(desk.computing))
                warm.send(connection, _packed(ALIVE, behind=behind))
            warm.send(connection, job.answer)
    except Exception as error:  # no connection may end the worker
        logger.warning("a connection to the warm worker is given up: %s: %s", type(error).__name__, error)
    finally:
        if job is not None:
            job.sent.set()
        free.release()


def _serve(options: Mapping[str, Any], site: Path, folder: int, key: bytes, desk: _Desk) -> None:
    """Answer jobs until the worker is idle, stale or replaced, or the run is concluded."""
    app = _loaded_app(options, site)
    taken: list[_Job] = []
    last = time.monotonic()
    while warm.is_there(folder, site, key) and time.monotonic() - last < options["idle"]:
        try:
            job = desk.jobs.get(timeout=_TICK)
        except queue.Empty:
            continue
        desk.computing.append(job)
        answer, goes_on = _do(job, app)
        desk.computing.clear()
        if not goes_on:  # before the answer: the next message must not find a worker that is about to end
            _leave(site, folder, key)
        job.end(answer)
        taken = [served for served in (*taken, job) if not served.sent.is_set()]
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


def _loaded_app(options: Mapping[str, Any], site: Path) -> _App:
    try:
        module, _, name = options["app"].partition(":")
        from fedppl.flower.client_app import declared  # after the socket is there: it takes seconds

        site_app = getattr(importlib.import_module(module), name)
        if site_app not in declared:
            raise DeclarationError(
                f"app={options['app']!r} is {shown(site_app)}; name what fedppl.Flower.client_app returned."
            )
        return _App(options, site, declared[site_app], "", [])
    except BaseException:
        logger.exception("the warm worker cannot load %s", options["app"])
        return _App(options, site, None, traceback.format_exc(), [])


def _do(job: _Job, app: _App) -> tuple[bytes, bool]:
    """Answer a job; return the answer, and whether the worker goes on after it."""
    start = os.fstat(_LOG).st_size
    try:
        request = job.request
        if request["identity"] != app.options["identity"]:
            return _packed(STALE, why=warm.changed(app.options["identity"], request["identity"])), False
        if app.site_app is None:  # the next message starts another one: what was missing may be there then
            return _packed(FAILED, log=app.trouble), False
        from fedppl.flower.client_app import answer
        from fedppl.flower.messages import CONCLUDE
        from fedppl.storage.signed import file_memory

        config, kind = request["config"], request["kind"]
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
        if warm.is_closed(job.connection):  # loading may take long; the next step counts the request
            return _given_up(kind), True
        here = here._replace(load_data=load)  # the data that were digested are those that are used
        arrays, texts = answer(kind, here, config, file_memory(here.folder), (request["arrays"], request["texts"]))
        plain = {name: np.asarray(value) for name, value in arrays.items()}
        return _packed(DONE, arrays=plain, texts=dict(texts), log=_logged(start)), kind != CONCLUDE
    except Exception:  # the app then answers by itself, and may fail in the same way
        logger.exception("the warm worker does not answer")
        return _packed(FAILED, log=_logged(start) or traceback.format_exc()), True  # the app's logging may go elsewhere


def _logged(start: int) -> str:
    return os.pread(_LOG, _LOG_BYTES, start).decode(errors="replace")


def _packed(status: str, **more: Any) -> bytes:
    return codec.encode({"status": status, **more})


def _given_up(kind: str) -> bytes:
    """The answer to a request whose connection is closed. It counts against no limit of the policy."""
    logger.warning("the connection of a request (%s) is closed; it is neither computed nor counted", kind)
    return _packed(FAILED, log="")


def _leave(site: Path, folder: int, key: bytes) -> None:
    """Delete key and socket, unless they are another worker's by now."""
    if warm.is_there(folder, site, key):
        warm.remove(folder)


def _loaded(here: Any, config: Mapping[str, Any]) -> tuple[Callable[[Mapping[str, Any]], Any], str]:
    """Load the data; return a function that gives them, or raises the error of loading, and their digest.

    The policy is not part of the digest: it is read anew for each message, and nothing compiled depends on it.
    """
    try:
        data = here.load_data(config)
    except Exception as error:
        return functools.partial(_raise, error), "loading fails"
    data = settled(data)
    return lambda _: data, digest(data)


def _raise(error: Exception, config: Mapping[str, Any]) -> Any:
    raise error


# A digest of what `load_data` has returned, by its values. A lazy frame has none, since it pickles to a plan ----------

_PLAIN = (str, bytes, bool, int, float, complex, type(None), decimal.Decimal, np.generic)
_TIMES = (datetime.date, datetime.time, datetime.timedelta, pd.Period, type(pd.NA))  # with their subclasses of pandas


def settled(loaded: Any) -> Any:
    """Read lazy data from their file now, so that the values digested are those used."""
    if isinstance(loaded, NpzFile):
        return dict(loaded)
    return loaded.load() if isinstance(loaded, xr.Dataset) else loaded


def digest(loaded: Any) -> str:
    """Digest of data: of names, dtypes, shapes and values.

    Raises `TypeError` for data whose values cannot be seen.
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
        for name, part in value.items():
            _head(state, name)
            _add(state, part, f"{where}[{name!r}]")
    elif isinstance(value, tuple | list) and any(not isinstance(part, _PLAIN) for part in value):
        _head(state, len(value))
        for i, part in enumerate(value):
            _add(state, part, f"{where}[{i}]")
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
    for cell in array.ravel().tolist():
        if not isinstance(cell, _PLAIN + _TIMES):
            raise TypeError(
                f"{where} hold {type(cell).__name__}, and a worker has to see values; return arrays of numbers or texts"
            )
        _head(state, type(cell).__qualname__, cell)


def _head(state: Any, *parts: Any) -> None:
    """Add short parts in an encoding that no other parts have."""
    text = repr(parts).encode(errors="surrogatepass")
    state.update(len(text).to_bytes(8, "little") + text)


class _Writer:
    """A file for `pickle` whose bytes go to a digest: large data are not copied."""

    def __init__(self, state: Any) -> None:
        self.write = state.update
