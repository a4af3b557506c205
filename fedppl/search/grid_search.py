"""Choose settings on validation data that the clients hold."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedppl.contracts import AnyAlgorithm, EngineFactory, LocalInference
from fedppl.engine.answer import require_fit
from fedppl.model.declaration import FederatedModel
from fedppl.numerics.covariance import Covariance
from fedppl.results import departure
from fedppl.results.fit import Fit
from fedppl.results.records import ever_used
from fedppl.run.choice import Options
from fedppl.run.loop import fit
from fedppl.run.participation import Participation
from fedppl.run.start import require_declared, seed_of
from fedppl.search.loss import Clients, Loss, require_held_out, require_loss, validation_loss
from fedppl.settings import shown
from fedppl.types import ConvergenceWarning, DeclarationError, LocalFailure, NotConvergedError, Status

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Search:
    """Result of `fedppl.grid_search`."""

    # A row per candidate: validation ``loss`` per row (inf where it is of no use), ``status``, ``rounds``, ``seconds``
    # and ``message``
    table: pd.DataFrame
    best: str  # name of the candidate with the smallest loss
    fit: Fit  # its fit, on the training rows
    algorithm: AnyAlgorithm  # the candidate itself, to fit again with


def grid(build: Callable[..., AnyAlgorithm], **values: Sequence[Any]) -> dict[str, AnyAlgorithm]:
    """Every combination of settings, by name.

    Parameters
    ----------
    build
        Function that builds an algorithm, such as `fedppl.FedAvg` or a ``functools.partial`` of it with what is common.
    **values
        A list of values for each setting that varies.

    Returns
    -------
    dict
        Name to algorithm, the last setting varying fastest.

    Raises
    ------
    DeclarationError
        If a setting has no list of values, or two candidates would have one name.

    Examples
    --------
    >>> import fedppl
    >>> list(fedppl.grid(fedppl.FedAvg, learning_rate=[0.01, 0.1], steps=[20]))
    ['learning_rate=0.01, steps=20', 'learning_rate=0.1, steps=20']

    Notes
    -----
    *When this fails.* Every candidate is a fit: three settings of five values each are 125 of them.
    """
    if not callable(build):
        raise DeclarationError(
            f"build={shown(build)} is no function; pass one that builds, as in grid(fedppl.EP, ...)."
        )
    if not values:
        raise DeclarationError("no settings: name one or more with a list of values each, as in learning_rate=[...].")
    for name, choices in values.items():
        if isinstance(choices, str) or not isinstance(choices, Sequence | np.ndarray) or len(choices) == 0:
            raise DeclarationError(f"{name}={choices!r} is no list of values; pass one or more, as in {name}=[...].")
    _require_keywords(build, values)
    candidates: dict[str, AnyAlgorithm] = {}
    for combination in itertools.product(*values.values()):
        settings = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in zip(values, combination, strict=True)
        }
        label = ", ".join(f"{name}={_text(value)}" for name, value in settings.items())
        if label in candidates:
            raise DeclarationError(f"two candidates are called {label!r}; list every value once.")
        candidates[label] = build(**settings)
    return candidates


def grid_search(
    model: FederatedModel,
    clients: Clients,
    algorithms: Mapping[str, AnyAlgorithm],
    validation: Clients,
    *,
    loss: Loss | None = None,
    rounds: int = 20,
    engine: EngineFactory | None = None,
    participation: Participation | int | float | None = None,
    progressbar: bool = True,
    random_seed: int | np.random.Generator | None = None,
) -> Search:
    """Fit every candidate on training rows and choose the one with the smallest loss on held-out rows.

    Parameters
    ----------
    model
        The declaration.
    clients
        Training data by client id, for example the first part of `fedppl.holdout`.
    algorithms
        Candidates by name, for example of `fedppl.grid`.
    validation
        Held-out data of the same clients, with the same keys. Test data have no place here.
    loss
        As in `fedppl.validation_loss`.
    rounds, engine, participation, progressbar
        As in `fedppl.fit`.
    random_seed
        Seed of every fit: candidates differ by their settings and not by chance.

    Returns
    -------
    Search
        Table of all candidates, the best one and its fit.

    Raises
    ------
    DeclarationError
        If no candidate is of use (it says why), or clients and validation data do not belong together.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> training, validation = fedppl.holdout(clients, random_seed=1)
    >>> candidates = fedppl.grid(fedppl.FedAvg, learning_rate=[1e-6, 0.1])
    >>> found = fedppl.grid_search(model, training, candidates, validation, progressbar=False, random_seed=1)
    >>> found.best
    'learning_rate=0.1'

    Notes
    -----
    A candidate has the loss inf, and is never chosen, when a client that was asked never sent a usable reply, no client
    did in the last round (steps that diverge end so), the fit is stalled or has no posterior yet, or its loss is not
    finite. Of equal losses
    the first in the order given wins. Afterwards ``fedppl.fit(model, all_rows, found.algorithm)`` uses the
    held-out rows too.

    *When this fails.* The winner's validation loss is the smallest of several and so too good: judge the chosen fit on
    test rows that no candidate saw. A winner at the end of its list asks for a longer list. Fits that ran out of rounds
    are compared as they are: with more `rounds` another may win.
    """
    if not algorithms or not isinstance(algorithms, Mapping):
        raise DeclarationError("no candidates: pass a mapping from name to algorithm, such as fedppl.grid(...).")
    require_loss(loss)
    for what, data in (("clients", clients), ("validation", validation)):
        if not isinstance(data, Mapping):
            raise DeclarationError(
                f"{what} is {type(data).__name__}; pass a mapping from client id to its data, as fedppl.holdout gives."
            )
    taking_part, holding = set(map(str, clients)), set(map(str, validation))
    if taking_part != holding:
        alone, without = sorted(holding - taking_part), sorted(taking_part - holding)
        raise DeclarationError(
            f"clients and validation data do not belong together: {alone[:5]} have validation data and take no part, "
            f"{without[:5]} take part and have none. Split with fedppl.holdout."
        )
    seed, table = seed_of(random_seed), {}
    _require_usable(model, clients, algorithms, validation, loss)
    best: tuple[float, str, Fit] | None = None
    for name, algorithm in algorithms.items():
        with _named(name), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the table has every status; the best one's is said
            options = Options(rounds, engine, participation, random_seed=seed)
            fitted = fit(model, clients, algorithm, options, progressbar=progressbar)
        found, message = _judged(fitted, validation, loss)
        logger.info("candidate %s: validation loss %.6g", name, found, extra={"candidate": name, "loss": found})
        table[name] = (found, fitted.status.value, len(fitted.records), fitted.seconds, message)
        if found < (best[0] if best else np.inf):
            best = found, name, fitted
    if best is None:
        reasons = "; ".join(f"{name}: {row[-1]}" for name, row in table.items())
        raise DeclarationError(f"no candidate is of use: {reasons}. Widen the grid.")
    if best[2].algorithm.result.tests_convergence and not best[2].status.ok:
        told = f"the best candidate, {best[1]!r}, ended with status {best[2].status.value}: {best[2].message}"
        warnings.warn(ConvergenceWarning(told, best[2]), stacklevel=2)
    frame = pd.DataFrame.from_dict(table, orient="index", columns=["loss", "status", "rounds", "seconds", "message"])
    return Search(frame.rename_axis("candidate"), best[1], best[2], algorithms[best[1]])


def _judged(fitted: Fit, validation: Clients, loss: Loss | None) -> tuple[float, str]:
    """Loss per row of a candidate and its fit's message, or inf and why it is of no use."""
    answered = ever_used(fitted.records, fitted.client_ids)
    for record in fitted.records:
        for client_id, reason in record.failures.items():
            if client_id not in answered:
                return np.inf, f"client {client_id!r} never sent a usable reply: {reason}"
    last = fitted.records[-1]
    if not last.infos and not last.used:
        return np.inf, f"no client sent a usable reply in the last round: {next(iter(last.failures.values()))}"
    if fitted.status is Status.STALLED and not departure.matched(fitted.status, fitted.message):
        return np.inf, fitted.message
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            found = validation_loss(fitted, validation, loss=loss).mean
    except (LocalFailure, NotConvergedError, ArithmeticError, np.linalg.LinAlgError) as error:
        return np.inf, f"no validation loss: {error}"
    return (found, fitted.message) if np.isfinite(found) else (np.inf, f"the validation loss is {found}")


def _text(value: Any) -> str:
    """A setting in a candidate's name."""
    if isinstance(value, LocalInference | Covariance):
        return value.describe()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _require_keywords(build: Callable[..., AnyAlgorithm], values: Mapping[str, Any]) -> None:
    """Refuse settings that a function does not have, and too few of them, where its signature can be read."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**values)
    except TypeError as error:
        raise DeclarationError(
            f"{shown(build)} cannot be called with the settings {list(values)}: {error}; it takes "
            f"{', '.join(signature.parameters)}. Fix what is common by functools.partial."
        ) from error


def _require_usable(
    model: FederatedModel,
    clients: Clients,
    algorithms: Mapping[str, AnyAlgorithm],
    validation: Clients,
    loss: Loss | None,
) -> None:
    """Refuse before the first fit what would else be refused after some of them: candidates, and validation data."""
    for name, algorithm in algorithms.items():
        with _named(name):
            require_declared(model, algorithm)
    kernel = any(algorithm.needs.kernel for algorithm in algorithms.values())
    models = model.enrol(clients, kernel=kernel)
    for name, algorithm in algorithms.items():
        with _named(name):
            for client in models.values():
                require_fit(algorithm, client)
    for client_id, data in validation.items():
        require_held_out(model, models[str(client_id)], data, loss, kernel=kernel)


@contextlib.contextmanager
def _named(candidate: str) -> Iterator[None]:
    """Say which candidate an error is about."""
    try:
        yield
    except DeclarationError as error:
        raise DeclarationError(f"candidate {candidate!r}: {error}") from error
