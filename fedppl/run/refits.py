"""Repeated fits: of data sets from the prior, to calibrate, and of the clients that stay where others leave."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import xarray as xr
from scipy import stats

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, Engine, EngineFactory, Posterior, coordinate_names
from fedppl.gaussian import Gaussian
from fedppl.model.declaration import FederatedModel
from fedppl.model.interpreted import at_level
from fedppl.results import diagnostics, idata
from fedppl.results.at_client import outcomes, truths
from fedppl.results.fit import Fit
from fedppl.results.records import require_single, unarrived
from fedppl.run.loop import Options, require_declared, seed_of
from fedppl.run.loop import fit as fit_clients
from fedppl.run.progress import Progress
from fedppl.settings import a_fit, chosen, flag, shown, takes, whole
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

    Truths are drawn from the declared prior, then clients' own variables and outcomes for the clients' inputs and
    numbers of rows. Where posteriors are right, the probability integral transforms u are uniform.

    Parameters
    ----------
    model, algorithm, rounds, engine, progressbar
        As in `fedppl.fit`.
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
        of every fit. All data sets with a posterior count; ``pit`` is NaN for others.

    Raises
    ------
    DeclarationError
        If the algorithm has no Gaussian and no weighted points of the shared variables, outcomes cannot be drawn, or
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
    For fits at sites of their own, make up clients with inputs and numbers of rows like theirs, and pass the algorithm
    as they run it.

    *When this fails.* Where a prior is so wide that its data break fits, look at ``status``, and at the prior. Uniform
    transforms do not prove a posterior right: the prior has them too.

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
        raise DeclarationError("clients=None: data of sites are not used; pass made-up clients like them.")
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
            # The result has the status of each fit.
            quiet = warnings.catch_warnings(action="ignore", category=ConvergenceWarning)
            with at_level("fedppl.run", logging.ERROR), quiet:
                try:
                    options = Options(rounds, engine, random_seed=seed + t)
                    fit = fit_clients(model, data, algorithm, options, progressbar=False)
                except (DataError, DeclarationError) as error:
                    raise type(error)(f"data set {t + 1} of {data_sets}: {error}") from error
            status.append(fit.status.value)
            if not unarrived(fit):
                pit[t] = _transform(fit, truth)
            logger.info("data set %d of %d: %s", t + 1, data_sets, fit.status.value)
            progress.update(t + 1, fit.status.value)
    finite = [column[np.isfinite(column)] for column in pit.T]
    p_value = np.array([stats.kstest(u, "uniform").pvalue if len(u) > 1 else np.nan for u in finite])
    values = {"pit": pit, "truth": drawn.phi, "status": np.array(status)}
    values |= {"p_value": p_value, "p_adjusted": _holm(p_value)}
    dims = {"pit": ("data_set", "rows"), "truth": ("data_set", "rows"), "status": ("data_set",)}
    dims |= {"p_value": ("rows",), "p_adjusted": ("rows",)}
    coords = {"data_set": np.arange(data_sets), "rows": np.array(coordinate_names(first.layout, first.reader()))}
    return idata.dataset(values, dims, coords, {"algorithm": repr(algorithm), "space": "unconstrained"})


def _simulated(
    simulate: Simulate, shared: Mapping[str, Any], name: str, data: Any, rng: Any, number: int
) -> dict[str, Any]:
    who = f"simulate= for client {name!r} in data set {number}"
    try:
        simulated: Any = simulate(shared, name, {key: np.array(value) for key, value in data.items()}, rng)
    except Exception as error:
        raise DeclarationError(f"{who} failed with {type(error).__name__}: {error}") from error
    if not isinstance(simulated, Mapping):
        raise DeclarationError(f"{who} returned {shown(simulated)}; return its data, a mapping from name to array.")
    for key in [key for key in data if key in simulated]:
        try:
            shape, wanted = np.shape(simulated[key]), np.shape(data[key])
        except ValueError as error:
            raise DeclarationError(f"{who} returned {key!r} that is no array: {error}") from error
        if shape != wanted:
            raise DeclarationError(f"{who} returned {key!r} with shape {shape}; return the client's, {wanted}.")
    return dict(simulated)


def _transform(fit: Fit, truth: Array) -> Array:
    """P(φ_i < truth_i) of every coordinate, by weighted points or by q."""
    shared = fit.algorithm.result.shared
    assert isinstance(shared, Posterior)
    q, points = shared.gaussian(fit.state), shared.weighted(fit.state)
    if points is not None:
        return np.asarray(np.clip(points.weights @ (points.points < truth), 0.0, 1.0))
    return np.asarray(stats.norm.cdf((truth - gaussian.mean(q)) / gaussian.standard_deviations(q)))


def _holm(p: Array) -> Array:
    order = np.argsort(p)
    steps = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p))))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


# Clients that leave: the posterior of the others, and its distance to one that never saw them -------------------------

_STILL_HELD = (
    "the fit that they took part in: its state, draws and idata, and what was computed from them",
    "checkpoints of that fit, and the files with .records beside them",
    "logs and ledgers of what was asked and sent, at the server and at the sites",
    "posteriors that other clients drew from that fit and keep",
)


class Withdrawal(NamedTuple):
    """A fit without some clients, and its distance to one that never saw them."""

    fit: Fit
    left: tuple[str, ...]
    distance: float  # of q from that of a fit that never saw them, largest in sds of a mean or in log sd; NaN: unknown
    still_held: tuple[str, ...]  # places with numbers that depend on their data, which are not deleted here

    def __repr__(self) -> str:
        """A line for the distance, and one for each place that still has numbers of theirs."""
        how_far = "not measured" if np.isnan(self.distance) else f"{self.distance:.2g} sds"
        head = f"Withdrawal of {', '.join(self.left)}; distance to a fit that never saw them {how_far}"
        held = [f"still holds numbers of theirs: {one}" for one in self.still_held]
        return "\n".join([head, f"the others: {self.fit!r}", *held])


def without(
    fit: Fit, clients: Sequence[str] | str, *, certificate: bool = True, random_seed: int | None = None, **settings: Any
) -> Withdrawal:
    r"""Take clients out of a fit: their sites leave the ledger, without their help, and the others' fit goes on.

    .. math:: q_{-k}(\phi) \propto q(\phi) / q_k(\phi), \qquad \text{then EP among the others}

    Parameters
    ----------
    fit
        Fit by `EP`; or by `Sums`, which has no ledger: its search begins anew at the posterior of all.
    clients
        Ids of those that leave.
    certificate
        Whether to fit the others a second time from the prior, and measure the distance: NaN where one of the two did
        not converge.
    random_seed
        Seed; by default the fit's.
    **settings
        More settings of `fedppl.fit`: rounds, engine, progressbar and others. Where clients are sites of their own,
        engine is needed, and finds only those that stay.

    Returns
    -------
    Withdrawal

    Raises
    ------
    DeclarationError
        If a client did not take part, nobody is left, the algorithm keeps no ledger, or clients are sites of their own
        and no engine asks them.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(tolerance=1e-3), progressbar=False, random_seed=1)
    >>> found = fedppl.without(fit, "client 0", progressbar=False)
    >>> found.fit.client_ids, found.distance < 0.01
    (('client 1', 'client 2'), True)

    Notes
    -----
    *When this fails.* What was published stays published: `Withdrawal.still_held` lists what has to be deleted by hand,
    or cannot be. By draws (``local=fedppl.local.NUTS()``) or sums the distance is as large as their Monte Carlo error.
    Sites count the requests of both fits (``certificate=False`` has one), and are not asked to delete what they have.
    """
    a_fit(fit)
    names = tuple(chosen("clients", () if clients is None else clients, fit.client_ids, "the fit's clients"))
    rest = [name for name in fit.client_ids if name not in names]
    if not rest:
        raise DeclarationError(f"clients={shown(clients)}: nobody is left; let at least one client stay.")
    if taken := {"start", "model", "clients", "algorithm"} & settings.keys():
        raise DeclarationError(f"{sorted(taken)} are those of the fit; leave them out.")
    here = all(name in fit.clients for name in rest)
    if not here and settings.get("engine") is None:
        require_single(fit, "fedppl.without")
        remedy = f"an engine for them alone: fedppl.Flower.grid(grid, clients={shown(rest)}, ...)"
        raise DeclarationError(
            f"data of those that stay are not here; fedppl.load(..., clients=...) them, or pass {remedy}."
        )
    certificate = flag("certificate", certificate)
    shared = fit.algorithm.result.shared
    if not isinstance(shared, Posterior) or fit.algorithm.result.resume is None:
        raise DeclarationError(f"{fit.algorithm.name} keeps no ledger of each client's part; fit the others anew.")
    data = {name: fit.clients[name].arrays for name in rest} if here else None
    if settings.get("engine") is not None:
        settings["engine"] = _apart_from(settings["engine"], names)
    seed = fit.seed if random_seed is None else random_seed
    display = {name: settings.pop(name) for name in ("callback", "progressbar") if name in settings}
    options = Options(**settings, random_seed=seed, start=fit)
    after = fit_clients(fit.declaration, data, fit.algorithm, options, **display)
    distance = np.nan
    if certificate:
        again = options._replace(checkpoint=None, start=None)
        never = fit_clients(fit.declaration, data, fit.algorithm, again, progressbar=display.get("progressbar", True))
        if all(diagnostics.matched(one.status, one.message) for one in (after, never)):
            distance = _apart(shared.gaussian(after.state), shared.gaussian(never.state))
    return Withdrawal(after, names, distance, _STILL_HELD)


def _apart_from(engine: Any, names: tuple[str, ...]) -> EngineFactory:
    """The same engine, with an error before any client is asked where it finds one of those that left."""
    if not callable(engine):
        return cast(EngineFactory, engine)  # `fit` raises the error

    def factory(algorithm: AnyAlgorithm, clients: Mapping[str, Any], /) -> Engine:
        built: Engine = engine(algorithm, clients)
        if back := sorted({*names} & {*built.clients()}):
            built.close()
            raise DeclarationError(f"the engine finds {back}, who leave; give it the ids of those that stay.")
        return built

    return factory


def _apart(one: Gaussian, other: Gaussian) -> float:
    """Largest difference of means in sds of the second, and of log sds."""
    sd = gaussian.standard_deviations(other)
    shift = np.abs(gaussian.mean(one) - gaussian.mean(other)) / sd
    return float(max(np.max(shift), np.max(np.abs(np.log(gaussian.standard_deviations(one) / sd)))))
