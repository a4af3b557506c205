"""Clients that leave: the posterior of the others, and how far it is from one that never saw them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, ClientView, Engine, EngineFactory, Posterior
from fedppl.contracts.algorithm import WithoutClient
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.model.summaries import tells_grid
from fedppl.numerics.streams import stream
from fedppl.results import diagnostics, idata
from fedppl.results.at_client import NO_DRAWS, outcomes
from fedppl.results.fit import Fit
from fedppl.results.records import require_arrived
from fedppl.results.shared import is_exact
from fedppl.run.loop import fit as fit_clients
from fedppl.run.start import Options
from fedppl.settings import chosen, flag, shown, whole
from fedppl.types import Array, DeclarationError, LocalFailure

_STILL_HELD = (
    "the fit that they took part in: its state, draws and idata, and what was computed from them",
    "checkpoints of that fit, and the files with .records beside them",
    "logs and ledgers of what was asked and sent, at the server and at the sites",
    "posteriors that other clients drew from that fit and keep",
)


class Withdrawal(NamedTuple):
    """A fit without some clients, and what is known of it."""

    fit: Fit
    left: tuple[str, ...]
    distance: float  # of q from that of a fit that never saw them, largest in sds of a mean or in log sd; NaN: unknown
    still_held: tuple[str, ...]  # what holds numbers that depend on their data, and is not undone here

    def __repr__(self) -> str:
        """A line for what came of it, and one for each thing that is left to do."""
        how_far = "not measured" if np.isnan(self.distance) else f"{self.distance:.2g} sds"
        head = f"Withdrawal of {', '.join(self.left)}; distance to a fit that never saw them {how_far}"
        held = [f"still holds numbers of theirs: {one}" for one in self.still_held]
        return "\n".join([head, f"the others: {self.fit!r}", *held])


def without(
    fit: Fit, clients: Sequence[str] | str, *, certificate: bool = True, random_seed: int | None = None, **settings: Any
) -> Withdrawal:
    r"""Take clients out of a fit: from the ledger, with no word from them, and on until the others agree again.

    .. math:: q_{-k}(\phi) \propto q(\phi) / q_k(\phi), \qquad \text{then EP among the others}

    Parameters
    ----------
    fit
        Fit by `EP`; or by `Sums`, which has no ledger: its search begins anew where all had their posterior.
    clients
        Ids of those that leave.
    certificate
        Whether to fit the others a second time from the prior, and measure the distance: NaN where one of the two did
        not converge.
    random_seed
        Seed; by default the fit's.
    **settings
        More settings of `fedppl.fit`: rounds, engine, progressbar and others. Where clients are sites of their own,
        engine is needed, and has to find no others than those that stay.

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
    or cannot be. The distance is of two approximations of the same kind; with few draws (``local=fedppl.NUTS()``), or
    by sums, it is as large as their Monte Carlo error. Sites of their own count the requests of both fits:
    ``certificate=False`` has one, and of what they hold from before they are told nothing.
    """
    if not isinstance(fit, Fit):
        raise DeclarationError(f"fit is {type(fit).__name__}; pass what fedppl.fit returned, then who leaves.")
    names = tuple(chosen("clients", () if clients is None else clients, fit.client_ids, "the fit's clients"))
    rest = [name for name in fit.client_ids if name not in names]
    if not rest:
        raise DeclarationError(f"clients={shown(clients)}: nobody is left; let at least one client stay.")
    if taken := {"start", "model", "clients", "algorithm"} & settings.keys():
        raise DeclarationError(f"{sorted(taken)} are those of the fit; leave them out.")
    here = all(name in fit.clients for name in rest)
    if not here and settings.get("engine") is None:
        raise DeclarationError(
            "the data of those that stay are not here. Of a fit from a file, give them: fedppl.load(path, model, "
            "clients=...). Of sites of their own, pass an engine that asks them, and does not find those that left: "
            f"engine=fedppl.Flower.grid(grid, clients={shown(rest)})."
        )
    certificate = flag("certificate", certificate)
    shared = fit.algorithm.result.shared
    if not isinstance(shared, Posterior) or fit.algorithm.result.resume is None:
        raise DeclarationError(f"{fit.algorithm.name} keeps no ledger of what each client said; fit the others anew.")
    data = {name: fit.clients[name].arrays for name in rest} if here else None
    if settings.get("engine") is not None:
        settings["engine"] = _apart_from(settings["engine"], names)
    seed = fit.seed if random_seed is None else random_seed
    saying = {name: settings.pop(name) for name in ("callback", "progressbar") if name in settings}
    options = Options(**settings, random_seed=seed, start=fit)
    after = fit_clients(fit.declaration, data, fit.algorithm, options, **saying)
    distance = np.nan
    if certificate:
        again = options._replace(checkpoint=None, start=None)
        never = fit_clients(fit.declaration, data, fit.algorithm, again, progressbar=saying.get("progressbar", True))
        if all(diagnostics.matched(one.status, one.message) for one in (after, never)):
            distance = _apart(shared.gaussian(after.state), shared.gaussian(never.state))
    return Withdrawal(after, names, distance, _STILL_HELD)


def _apart_from(engine: Any, names: tuple[str, ...]) -> EngineFactory:
    """The same engine, which ends before anybody is asked where it finds one of those that left."""
    if not callable(engine):
        return cast(EngineFactory, engine)  # and `fit` says what is wrong with it

    def factory(algorithm: AnyAlgorithm, clients: Mapping[str, Any], /) -> Engine:
        found: Engine = engine(algorithm, clients)
        if back := sorted({*names} & {*found.clients()}):
            found.close()
            raise DeclarationError(
                f"the engine finds {back}, who leave; give it the ids of those that stay: "
                "fedppl.Flower.grid(grid, clients=[...])."
            )
        return found

    return factory


def _apart(one: Gaussian, other: Gaussian) -> float:
    """Largest difference of means in sds of the second, and of log sds."""
    sd = gaussian.standard_deviations(other)
    shift = np.abs(gaussian.mean(one) - gaussian.mean(other)) / sd
    return float(max(np.max(shift), np.max(np.abs(np.log(gaussian.standard_deviations(one) / sd)))))


# Whether a client's data agree with what all others say: a p-value, computed where the data are -----------------------

logger = logging.getLogger(__name__)

FEWEST = 199  # replicates
_EXPAND = NestedLaplace().expand


def conflict(
    fit: Fit, clients: Sequence[str] | str | None = None, *, replicates: int = 199, random_seed: int | None = None
) -> xr.Dataset:
    r"""Test whether each client's data agree with the others' posterior.

    .. math:: T(y) = g^\top (I + I \Sigma I)^{-1} g, \qquad
              p = \frac{1 + \#\{r : T(y^{(r)}) \ge T(y)\}}{R + 1}

    with the cavity N(μ, Σ), which is q over the client's site, g = ∇ log f_k(μ), and I the mean of −∇² log f_k(μ) over
    replicates y^(r) ~ p(y | φ), φ ~ the others' posterior, for the client's inputs and number of rows. A score test:
    under the model p is uniform, up to its steps of 1 / (R + 1).

    Parameters
    ----------
    fit
        Fit by `EP`, `Sums` or another algorithm that knows its posterior without each client, with clients in this
        process; or at sites whose policies let p-values out (`conclusions`): those they gave when the run was over.
    clients
        Ids; by default all.
    replicates
        Number R of replicates, at least 199, and 199 at sites.
    random_seed
        Seed; by default the fit's, at sites always.

    Returns
    -------
    xarray.Dataset
        ``p_value``, ``statistic`` and ``exact``, dim client; NaN for clients without whom the others' Gaussian is no
        posterior, or of whose replicates more than one in twenty have no expansion, and for sites that gave none.
        ``exact`` says whether φ of the replicates is of the others' posterior itself, from the points of the correction
        as in `Fit.influence`, or of its Gaussian.

    Raises
    ------
    DeclarationError
        If data are not here and sites gave nothing, outcomes cannot be drawn, or the algorithm knows no such posterior.
    NotConvergedError
        Where the fit was broken off before there was a posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(4), fedppl.EP(), progressbar=False, random_seed=1)
    >>> fedppl.conflict(fit)["p_value"].dims
    ('client',)

    Notes
    -----
    *When this fails.* Of many clients some have a small p by chance: adjust for their number. Where others are few, the
    cavity is wide and little can be told. Where ``exact`` is False and the others are few, so that their posterior is
    far from Gaussian, p is too small, as of two clients with four rows each and an unknown noise sd. NaN under a prior
    that is not smooth, such as Laplace's: there is no expansion then. NaN too for clients that brought a likelihood on
    a grid, from which nothing can be drawn, and which are refused where named; other summaries are drawn like rows.
    """
    if not isinstance(fit, Fit):
        raise DeclarationError(f"fit is {type(fit).__name__}; pass what fedppl.fit returned.")
    replicates = whole("replicates", replicates, FEWEST)
    without = knows_cavities(fit.algorithm)
    if without is None:
        raise DeclarationError(
            f"{fit.algorithm.name} has no posterior of the shared variables without each client; use fedppl.EP()."
        )
    if not fit.clients:
        return _as_told(fit, clients, replicates)
    names = chosen("clients", clients, list(fit.clients), "the clients whose data are here")
    if not fit.algorithm.needs.kernel:
        raise DeclarationError(f"{fit.algorithm.name} compiles no log density of a client; use fedppl.EP().")
    require_arrived(fit, "fedppl.conflict")
    seed = fit.seed if random_seed is None else whole("random_seed", random_seed, 0)
    values, exact = np.full((2, len(names)), np.nan), np.zeros(len(names), dtype=bool)
    silent = [name for name in names if clients is None and tells_grid(fit.clients[name].pymc_model())]
    for name in silent:
        logger.warning("client %s has no p-value: %s", name, NO_DRAWS)
    columns = [column for column, name in enumerate(names) if name not in silent]
    each = without(fit.state, [names[column] for column in columns], fit.clients)
    for column, others in zip(columns, each, strict=True):
        name = names[column]
        rng = stream((seed, 4, *name.encode()))
        values[:, column] = tested(fit.declaration, fit.clients[name], others, replicates, rng)
        exact[column] = is_exact(others)
    return _table(names, values, exact, replicates)


def knows_cavities(
    algorithm: AnyAlgorithm,
) -> Callable[[Any, Sequence[str], Mapping[str, ClientView]], list[WithoutClient]] | None:
    """How an algorithm tells its posterior without each of some clients; None if not."""
    shared = algorithm.result.shared
    return shared.without if isinstance(shared, Posterior) else None


def _as_told(fit: Fit, clients: Sequence[str] | str | None, replicates: int) -> xr.Dataset:
    """What sites gave when the run was over."""
    names = chosen("clients", clients, list(fit.client_ids), "the clients that took part")
    if replicates != FEWEST:
        raise DeclarationError(f"replicates={replicates}: sites have {FEWEST}, drawn when the run was over.")
    if not any("conflict" in fit.told.get(name, {}) for name in names):
        raise DeclarationError(
            "no client's data are here, and none gave a p-value when the run was over. Of a fit from a file, give the "
            "data: fedppl.load(path, model, clients=...). Sites of their own let it out where their policy has "
            'conclusions=["conflict"].'
        )
    told = [fit.told.get(name, {}).get("conflict", np.full(2, np.nan)) for name in names]
    return _table(names, np.transpose(told), np.zeros(len(names), dtype=bool), FEWEST)


def _table(names: Sequence[str], values: Array, exact: NDArray[np.bool_], replicates: int) -> xr.Dataset:
    return idata.dataset(
        {"p_value": values[0], "statistic": values[1], "exact": exact},
        {"p_value": ("client",), "statistic": ("client",), "exact": ("client",)},
        {"client": np.array(names)},
        {"replicates": replicates},
    )


def tested(
    declaration: FederatedModel, client: ClientModel, others: WithoutClient, replicates: int, rng: np.random.Generator
) -> tuple[float, float]:
    """P-value and statistic of one client; NaN where there is none."""
    cavity, corrected = others.gaussian, others.corrected
    if not gaussian.is_proper(cavity):
        return np.nan, np.nan
    center = gaussian.mean(cavity)
    if corrected is not None and is_exact(others):
        phi = corrected.points[rng.choice(len(corrected.points), size=replicates, p=corrected.weights)]
    else:
        phi = gaussian.draw(cavity, rng, replicates)
    values = client.constrain_shared(phi)
    drawn = outcomes(client, {variable.name: values[variable.name] for variable in client.layout.variables}, rng)
    found = []
    for r in range(replicates):
        arrays = {**client.arrays, **{name: value[r] for name, value in drawn.items()}}
        found.append(_slope(declaration.with_data(client, client.client_id, arrays), center))
    known = [one for one in found if one is not None]
    own = _slope(client, center)
    if own is None or len(known) < 0.95 * replicates:
        return np.nan, np.nan
    information = _positive(-np.mean([hessian for _, hessian in known], axis=0))
    covariance = information + information @ gaussian.covariance(cavity) @ information
    inverse = np.linalg.pinv((covariance + covariance.T) / 2, hermitian=True)
    statistics = np.array([gradient @ inverse @ gradient for gradient, _ in known])
    ours = float(own[0] @ inverse @ own[0])
    near = np.isclose(statistics, ours, rtol=1e-9, atol=0)
    above = np.sum((statistics > ours) & ~near) + rng.integers(np.sum(near) + 1)  # ties in random order
    return (1.0 + float(above)) / (len(known) + 1.0), ours


def _slope(client: ClientModel, center: Array) -> tuple[Array, Array] | None:
    """Gradient and Hessian of log f_k; None where it cannot be expanded."""
    assert _EXPAND is not None
    try:
        found: Any = _EXPAND(client, center, 0.0)
    except LocalFailure:
        return None
    return found.gradient, found.hessian


def _positive(matrix: Array) -> Array:
    """The nearest matrix that is positive semidefinite."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T)
