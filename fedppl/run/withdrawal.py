"""Clients that leave: the posterior of the others, and how far it is from one that never saw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, Engine, EngineFactory, Posterior
from fedppl.gaussian import Gaussian
from fedppl.results import departure
from fedppl.results.fit import Fit
from fedppl.run.choice import Options
from fedppl.run.loop import fit as fit_clients
from fedppl.settings import chosen, flag, shown
from fedppl.types import DeclarationError

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
        if all(departure.matched(one.status, one.message) for one in (after, never)):
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
