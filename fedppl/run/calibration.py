"""Whether posteriors are calibrated: many data sets from the prior, and where their truths lie in what is found."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr
from scipy import stats

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, EngineFactory, Posterior, coordinate_names
from fedppl.model.declaration import FederatedModel
from fedppl.model.interpreted import at_level
from fedppl.results import idata
from fedppl.results.at_client import outcomes, truths
from fedppl.results.fit import Fit
from fedppl.results.records import unarrived
from fedppl.run.loop import fit
from fedppl.run.progress import Progress
from fedppl.run.start import Options, require_declared, seed_of
from fedppl.settings import shown, takes, whole
from fedppl.types import Array, ConvergenceWarning, DataError, DeclarationError

logger = logging.getLogger(__name__)

Simulate = Callable[[Mapping[str, Any], str, Mapping[str, Any], np.random.Generator], Mapping[str, Any]]


def calibrate(
    model: FederatedModel,
    clients: Mapping[str, Mapping[str, Any]],
    algorithm: AnyAlgorithm,
    *,
    data_sets: int = 100,
    simulate: Simulate | None = None,
    rounds: int = 20,
    engine: EngineFactory | None = None,
    progressbar: bool = True,
    random_seed: int | np.random.Generator | None = None,
) -> xr.Dataset:
    r"""Simulation-based calibration of a declared model under an algorithm.

    .. math:: \phi^* \sim p(\phi), \quad y \sim p(y \mid \phi^*), \quad
              u_i = P(\phi_i < \phi^*_i \mid y) \sim \mathrm{Uniform}(0, 1)

    Truths are drawn from the declared prior, then clients' own variables and outcomes for the inputs and numbers of
    rows that the clients have. Where posteriors are right, the probability integral transforms u are uniform.

    Parameters
    ----------
    model, algorithm, rounds, engine
        As in `fedppl.fit`.
    progressbar
        Whether to show which data set is being fitted.
    clients
        Client id to data: inputs as they are used, outcomes as an example that is replaced.
    data_sets
        Number of data sets.
    simulate
        Function of (shared, client_id, data, rng) that returns one client's data; by default PyMC draws the observed
        variables.
    random_seed
        Seed of truths, data and fits.

    Returns
    -------
    xarray.Dataset
        ``pit`` and ``truth``, dims data_set and rows, which are the coordinates of φ on the unconstrained space;
        ``p_value`` of a Kolmogorov-Smirnov test of uniformity for each, ``p_adjusted`` by Holm, dims rows; ``status``
        of every fit. All data sets count that have a posterior at all; ``pit`` is NaN for others.

    Raises
    ------
    DeclarationError
        If the algorithm has no Gaussian or corrected posterior of the shared variables, outcomes cannot be drawn, or
        `simulate` fails or returns no data of the client's shapes.
    DataError
        If what `simulate` returns cannot be data.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> found = fedppl.calibrate(*normal_means(), fedppl.EP(), data_sets=20, progressbar=False, random_seed=1)
    >>> bool(found["p_adjusted"].min() > 0.001)
    True

    Notes
    -----
    Data of sites of their own are not asked for: what they run is calibrated with made-up clients, whose inputs and
    numbers of rows are like theirs, and the algorithm as they run it (``EP()`` corrects clients in this process, and
    sites only where `correction` is given by name).

    *When this fails.* A prior so wide that its data break a fit says more of the prior than of the fit: look at
    ``status``. Uniform transforms do not prove a posterior right: the prior has them too.

    References
    ----------
    .. [1] Talts et al. (2018), Validating Bayesian inference algorithms with simulation-based calibration.
    """
    require_declared(model, algorithm)
    if not isinstance(algorithm.result.shared, Posterior):
        raise DeclarationError(f"{algorithm.name} has no posterior of the shared variables; use fedppl.EP().")
    data_sets, rounds = whole("data_sets", data_sets, 2), whole("rounds", rounds)
    if simulate is not None and not (callable(simulate) and takes(simulate, 4)):
        raise DeclarationError(f"simulate={shown(simulate)} is not a function of (shared, client_id, data, rng).")
    seed = seed_of(random_seed)
    rng = np.random.default_rng((seed, 0))
    if clients is None:
        raise DeclarationError(
            "clients=None: data sets are simulated here, and data of sites of their own are not; pass made-up clients "
            "with inputs like the sites' and their numbers of rows, and the algorithm as the sites run it, such as "
            "fedppl.EP(correction=None)."
        )
    enrolled = model.enrol(clients, kernel=False)
    model = model.knowing({name: client.kind for name, client in enrolled.items()})
    first = next(iter(enrolled.values()))
    drawn = truths(first, data_sets, rng)
    inputs = {name: client.arrays for name, client in enrolled.items()}
    replaced = {} if simulate else {name: outcomes(client, drawn.values, rng) for name, client in enrolled.items()}
    pit, status = np.full(drawn.phi.shape, np.nan), []
    with Progress(data_sets, show=progressbar, what="Data set") as progress:
        for t, truth in enumerate(drawn.phi):
            if simulate is None:
                data = {name: {**inputs[name], **{k: v[t] for k, v in replaced[name].items()}} for name in inputs}
            else:
                shared = {name: value[t] for name, value in drawn.values.items()}
                data = {name: _simulated(simulate, shared, name, inputs[name], rng, t + 1) for name in inputs}
            with _silence():
                try:
                    options = Options(rounds, engine, random_seed=seed + t)
                    found = fit(model, data, algorithm, options, progressbar=False)
                except (DataError, DeclarationError) as error:
                    raise type(error)(f"data set {t + 1} of {data_sets}: {error}") from error
            status.append(found.status.value)
            if not unarrived(found):
                pit[t] = _transform(found, truth)
            logger.info("data set %d of %d: %s", t + 1, data_sets, found.status.value)
            progress.update(t + 1, found.status.value)
    p_value = np.array([_uniform(column) for column in pit.T])
    values = {"pit": pit, "truth": drawn.phi, "status": np.array(status)}
    values |= {"p_value": p_value, "p_adjusted": _holm(p_value)}
    dims = {"pit": ("data_set", "rows"), "truth": ("data_set", "rows"), "status": ("data_set",)}
    dims |= {"p_value": ("rows",), "p_adjusted": ("rows",)}
    coords = {"data_set": np.arange(data_sets), "rows": np.array(coordinate_names(first.layout, first.reader()))}
    return idata.dataset(values, dims, coords, {"algorithm": repr(algorithm), "space": "unconstrained"})


def _simulated(
    simulate: Simulate, shared: Mapping[str, Any], name: str, data: Any, rng: Any, number: int
) -> dict[str, Any]:
    """One client's data by a user's function, held against the shapes of those that it was given."""
    who = f"simulate= for client {name!r} in data set {number}"
    try:
        found: Any = simulate(shared, name, {key: np.array(value) for key, value in data.items()}, rng)
    except Exception as error:
        raise DeclarationError(f"{who} failed with {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise DeclarationError(f"{who} returned {shown(found)}; return its data, a mapping from name to array.")
    for key in [key for key in data if key in found]:
        try:
            given, wanted = np.shape(found[key]), np.shape(data[key])
        except ValueError as error:
            raise DeclarationError(f"{who} returned {key!r} that is no array: {error}") from error
        if given != wanted:
            raise DeclarationError(
                f"{who} returned {key!r} with shape {given}, and the client's has {wanted}: what is "
                "calibrated are numbers of rows like the clients'. Return that shape, or pass other clients=."
            )
    return dict(found)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hold back what each fit says of how it ended: the result has it, and there are many."""
    with at_level("fedppl.run", logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _transform(found: Fit, truth: Array) -> Array:
    """P(φ_i < truth_i) of every coordinate, by q and what the weighted points add to it."""
    shared = found.algorithm.result.shared
    assert isinstance(shared, Posterior)
    q, points = shared.gaussian(found.state), shared.corrected(found.state)
    below = stats.norm.cdf((truth - gaussian.mean(q)) / gaussian.standard_deviations(q))
    if points is not None:
        below = below + (points.weights - points.of_q) @ (points.points < truth)
    return np.asarray(np.clip(below, 0.0, 1.0))


def _uniform(column: Array) -> float:
    known = column[np.isfinite(column)]
    return float(stats.kstest(known, "uniform").pvalue) if len(known) > 1 else np.nan


def _holm(p: Array) -> Array:
    """Holm's adjustment for as many tests as there are."""
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted
