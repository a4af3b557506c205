"""The functions that users call: `fit`, `rounds` and `load`, with an algorithm by default, and `warm_up` for these."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from fedppl import given, settings
from fedppl.algorithms.ep.ep import EP
from fedppl.algorithms.sums.sums import Sums
from fedppl.contracts import AnyAlgorithm, EngineFactory
from fedppl.data import frames
from fedppl.data import missing as gaps
from fedppl.model.client import reader_of
from fedppl.model.declaration import FederatedModel
from fedppl.results import idata, saved
from fedppl.results.fit import Fit
from fedppl.run import loop
from fedppl.run.loop import Choice, Options, by_call, lies_side_by_side, require_declared
from fedppl.run.one_round import Round
from fedppl.run.progress import Participation
from fedppl.types import DataError, DeclarationError


def rounds(
    model: FederatedModel,
    data: Any,
    algorithm: AnyAlgorithm | None = None,
    *,
    by: Hashable | Sequence[Hashable] | None = None,
    missing: str = "error",
    rounds: int | None = None,
    engine: EngineFactory | None = None,
    participation: Participation | int | float | None = None,
    reporting: Participation | int | float | None = None,
    checkpoint: str | Path | None = None,
    deadline: float | None = None,
    random_seed: int | np.random.Generator | None = None,
    start: Fit | None = None,
) -> Iterator[Round]:
    """Run a federated algorithm a round at a time, for scripts that look in between.

    Parameters
    ----------
    model, data, algorithm, by, missing, engine, participation, reporting, checkpoint, deadline, random_seed, start
        As in `fit`.
    rounds
        Number of rounds in all after which it stops; None runs until converged or the caller stops. Rounds of a start
        that has a budget of its own, as the searches of `Sums` and `EP` have, do not count.

    Yields
    ------
    Round

    Raises
    ------
    DeclarationError, DataError
        Before the first round.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> [step.number for step in fedppl.rounds(model, clients, fedppl.EP(warm_start=False), rounds=2)]
    [1, 2]

    Notes
    -----
    *When this fails.* A client that fails keeps its old site; `Round.failures` says why. A run that does not
    converge ends with status "max_rounds" and a message that names the setting to change.
    """
    options = Options(rounds, engine, participation, reporting, checkpoint, deadline, random_seed, start)
    model, clients, chosen = _read(model, data, algorithm, by, missing, options)
    return loop.rounds(model, clients, chosen, options)


def fit(
    model: FederatedModel,
    data: Any,
    algorithm: AnyAlgorithm | None = None,
    *,
    by: Hashable | Sequence[Hashable] | None = None,
    missing: str = "error",
    rounds: int = 20,
    engine: EngineFactory | None = None,
    participation: Participation | int | float | None = None,
    reporting: Participation | int | float | None = None,
    checkpoint: str | Path | None = None,
    callback: Callable[[Round], bool | None] | None = None,
    deadline: float | None = None,
    progressbar: bool = True,
    random_seed: int | np.random.Generator | None = None,
    start: Fit | None = None,
) -> Fit:
    """Fit a hierarchy across clients whose data stay where they are.

    Parameters
    ----------
    model
        The declaration.
    data
        Client id to that client's data: a mapping from the builder's arguments to arrays, a data frame with columns of
        these names (pandas, polars, pyarrow, xarray), or a tuple of arrays in the builder's order. Or one data frame of
        all clients with `by`, or its groups (``frame.groupby("site")``). None where the data are at sites and the
        engine finds them, as Flower's does. Of a frame's columns categories become their numbers, in one order at all
        clients, dates and times days since 1970, durations days; texts are refused. Ids are texts, whole numbers, dates
        or tuples of them.
    algorithm
        The algorithm; by default ``fedppl.Sums()`` where all clients are asked, in this process, 20 coordinates are
        shared at most and log densities are smooth, or the engine's sums are secure; else ``fedppl.EP()``.
        `Fit.algorithm` has it, and the log says why.
    by
        Column, or columns, of one data frame that tell clients apart. Their values are the clients' ids.
    missing
        What to do where values are missing (NaN, None, NA): "error" says how many of which column at which client,
        "drop" leaves out those rows and says how many, "drop_outcomes" those alone whose outcome is missing, which is
        exact where its being missing depends on no outcome (missing at random); `Fit.predict` gives it afterwards.
        Missing predictors are refused then, and rows that do not stand for themselves.
    rounds
        Largest number of rounds, those of a search for the mode not counted.
    engine
        The engine that moves the messages; by default ``fedppl.InProcess()``.
    participation
        None for all clients, an int for that many a round, drawn without replacement, a float for the probability of
        each, given that one at least is asked, or a function ``(clients, rng) -> clients``.
    reporting
        Clients among those asked that send a reply, given in the same ways; None for all. The others hear the
        broadcast, update personal state where the algorithm has some, such as a personal head, and send only a notice.
    checkpoint
        File to write the state to after every round, and to resume from when it exists, with the same numbers as an
        uninterrupted run. Data that a salted digest shows to be changed are refused, also of a finished run; a site
        keeps its own digest, and with changed data takes no part. Another algorithm, settings, `participation` or
        `reporting` are refused, functions by their names; `rounds` and `deadline` may change. A second file, with
        ``.records`` added to its name, has the records of all rounds. Both are signed with the owner's key (the file at
        ``FEDPPL_KEY_FILE``, else ``fedppl/key`` in the user's configuration folder, made on first use), and as
        confidential as what clients send and keep.
    callback
        Function of a Round, called with each; it returns True to stop.
    deadline
        Seconds to wait for replies in a round.
    progressbar
        Whether to show progress, in a terminal or a notebook: clients that have answered, and the change against the
        tolerance. The logger ``fedppl`` always logs the same at level INFO.
    random_seed
        Seed of every random stream.
    start
        A fit of the same declaration by the same algorithm, from whose state this one begins; its clients and their
        rows may differ. For `Sums`, whose one search begins at that posterior, and `EP`, which then has no warm start,
        whatever `starts`. A checkpoint that is resumed takes precedence.

    Returns
    -------
    Fit
        Posterior of the shared parameters, per-client posteriors, diagnostics and status.

    Raises
    ------
    DeclarationError, DataError
        Before the first round.

    Warns
    -----
    ConvergenceWarning
        Once at the end, where the algorithm tests for convergence and did not see it; the text names the remedy, and
        the warning's attribute ``fit`` is the fit, for those to whom warnings are errors.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> fit = fedppl.fit(model, clients, progressbar=False, random_seed=1)
    >>> fit.status
    <Status.CONVERGED: 'converged'>

    One data frame, with a column that says whose each row is:

    >>> import pandas as pd
    >>> frame = pd.concat(pd.DataFrame({"hospital": name, **data}) for name, data in clients.items())
    >>> fedppl.fit(model, frame, by="hospital", progressbar=False, random_seed=1).client_ids == fit.client_ids
    True

    Notes
    -----
    Ctrl-C ends a run at once: the fit of its whole rounds is returned with status "interrupted", and with a checkpoint
    the same call goes on. Clients that are computing finish in the background, and their replies are dropped. Before
    the first round is over, and the second time, KeyboardInterrupt is raised.

    *When this fails.* Look at `Fit.message`, `Fit.summary` and ``fit.idata["rounds"]``: not converging is a status and
    a warning. A fit that was interrupted before there was a posterior refuses to give one.
    """
    options = Options(rounds, engine, participation, reporting, checkpoint, deadline, random_seed, start)
    model, clients, chosen = _read(model, data, algorithm, by, missing, options)
    return loop.fit(model, clients, chosen, options, callback=callback, progressbar=progressbar)


def _read(
    model: Any, data: Any, algorithm: AnyAlgorithm | None, by: Any, missing: str, options: Options
) -> tuple[Any, Any, AnyAlgorithm | Choice]:
    """The declaration, clients' data as the algorithm takes them, and the algorithm, or a choice that models decide."""
    chosen = by_call(Sums(), EP(), data, options) if algorithm is None else algorithm
    first = chosen.first if isinstance(chosen, Choice) else chosen
    model, clients = given.clients(model, data, by, missing, one_table=lies_side_by_side(first, options.engine))
    return model, clients, chosen


def load(
    path: str | os.PathLike[str],
    model: FederatedModel,
    algorithm: AnyAlgorithm | None = None,
    *,
    clients: Any = None,
    by: Hashable | Sequence[Hashable] | None = None,
    missing: str = "error",
) -> Fit:
    """Read a fit that `Fit.save` wrote.

    Parameters
    ----------
    path
        The file.
    model, algorithm
        What was fitted, and how; by default one of the two that `fit` takes by itself, the file's.
    clients, by, missing
        Data of clients that took part, as for `fit`: then their posteriors and predictions can be drawn again, with the
        same numbers. Without them the fit has the shared posterior, `Fit.new_client`, and the clients' draws that
        ``fit.save(path, include="clients")`` wrote. Personal state that clients' posteriors depend on, such as a
        personal head, has to be in the file (``include="personal"``).

    Returns
    -------
    Fit

    Raises
    ------
    DataError
        If the file holds no fit, or clients are not those that took part.
    DeclarationError
        If it is of another declaration or algorithm.

    Examples
    --------
    >>> import fedppl, pathlib, tempfile
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> fit = fedppl.fit(model, clients, progressbar=False, random_seed=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fit.save(pathlib.Path(folder) / "run.nc")
    ...     again = fedppl.load(pathlib.Path(folder) / "run.nc", model)
    >>> bool(again.summary().equals(fit.summary()))
    True

    Notes
    -----
    *When this fails.* Changed data of clients are not detected, nor is another likelihood of a builder: their ids, the
    shared variables and their prior are compared, and of a formula its text. Without `clients` a builder is compared by
    the names of its shared variables alone, so that another prior is not detected. A file that is truncated, damaged or
    of another kind is refused, and no code in it is run; but anyone who can write the file can write another result
    into it, or have HDF5 fill the memory: read files that you trust.
    """
    gaps.required(missing)
    require_declared(model, EP() if algorithm is None else algorithm)
    stored = saved.read(path)
    if algorithm is None:
        algorithm = Sums() if stored.algorithm == Sums().name else EP()
    from fedppl.formulas.formula import is_formula, reader_of_formula, remembering  # slow to import

    clients = frames.opened(clients, by, of_formula=is_formula(model))
    if is_formula(model):
        model = remembering(model, stored.agreement, clients)
    saved.require_same(stored, algorithm, model)
    models: dict[str, Any] = {}
    if clients is not None:
        model, found_data = given.clients(model, clients, by, missing)
        models = model.enrol(found_data, kernel=algorithm.needs.kernel)
        model = model.knowing({name: client.kind for name, client in models.items()})
        if unknown := sorted(set(models) - set(stored.fields["client_ids"])):
            known = settings.some_of(stored.fields["client_ids"])
            raise DataError(f"clients {unknown[:5]} did not take part; those that did are {known}.")
        if next(iter(models.values())).layout.fingerprint != stored.fields["layout"].fingerprint:
            raise DeclarationError("the file is of another declaration: the shared prior or its shapes differ.")
    reader = {"reader": reader_of(models.values())} if models else {}
    if not models and is_formula(model):  # it says all that draws need
        rebuild = functools.partial(reader_of_formula, model)
        reader = {"reader": saved.or_rebuilt(stored.fields["reader"], rebuild)}
    loaded = Fit(**{**stored.fields, **reader, "algorithm": algorithm, "declaration": model, "clients": models})
    loaded.__dict__["idata"] = idata.from_groups(stored.groups)  # the saved draws
    return loaded


def warm_up() -> float:
    """Compile what fits by `Sums` and `EP` need, so that the first one on this machine does not wait for it.

    Loops over clients, points and nodes are compiled once and kept in Numba's cache (``NUMBA_CACHE_DIR``), PyTensor's
    functions in its own (``PYTENSOR_FLAGS=base_compiledir=...``). Run this when an image is built or a server starts; a
    fit then compiles its model's density alone. Calls after the first take a few seconds.

    Returns
    -------
    float
        Seconds that it took.

    Raises
    ------
    OSError
        Where the directory of PyTensor's cache cannot be made or written.
    NotConvergedError
        Where the fits of a few rows find no posterior, as where installed packages do not work together.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.warm_up() > 0  # doctest: +SKIP
    True

    Notes
    -----
    *When this fails.* In a container whose file system is not kept, and for another user or kind of machine than those
    of the caches, everything is compiled again. A ``NUMBA_CACHE_DIR`` that cannot be written gives no error: look
    whether it holds files afterwards.
    """
    started = time.perf_counter()
    rng = np.random.default_rng(0)
    clients = {f"{k}": {"x": rng.normal(size=6), "y": rng.normal(size=6)} for k in range(4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few rows tell nothing
        for model in (FederatedModel(builder, ["mu", "tau"]) for builder in (_line, _logistic)):
            for algorithm in (Sums(), EP()):
                fit(model, clients, algorithm, progressbar=False, random_seed=0).client("0", draws=10)
    return time.perf_counter() - started


def _line(x: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        slope = pm.Normal("slope", pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1), shape=2)
        pm.Normal("obs", slope[0] + slope[1] * x, pm.HalfNormal("sigma", 1), observed=y)
    return model


def _logistic(x: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        slope = pm.Normal("slope", pm.Normal("mu", 0, 1), pm.HalfNormal("tau", 1))
        pm.Bernoulli("obs", logit_p=slope * x, observed=y > 0)
    return model
