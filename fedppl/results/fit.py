"""What a fit returns: the shared posterior, clients' posteriors, predictions, and a record of every round."""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import xarray as xr

from fedppl import gaussian
from fedppl.contracts import LogEvidence, Point, Posterior
from fedppl.contracts.printed import escaped, number, table
from fedppl.gaussian import Gaussian
from fedppl.model.client import dims_and_coords
from fedppl.model.stack import ClientsOf
from fedppl.numerics.importance import resample, skewness
from fedppl.numerics.streams import stream
from fedppl.results import idata, predicting, saved, tables
from fedppl.results import shared as of_shared
from fedppl.results.records import Ended, require_arrived, unarrived
from fedppl.settings import chosen, some_of
from fedppl.types import Array, DeclarationError, NotConvergedError

# Means and sds of all clients' own variables, as one dataset ----------------------------------------------------------

_TOLERANCE, _DRAWN = 0.01, 256  # error of q's moments, in sds, beyond which so many weighted points are drawn
_SKEWED = 0.1  # skewness of a coordinate beyond which a few points of q are not enough for a client's sd


def clients_summary(fit: Any, var_names: Sequence[str] | str | None = None) -> xr.Dataset:
    """Posterior means and sds of all clients' own variables.

    Of many clients side by side all at once; else from draws of each, as `client` gives them.

    Parameters
    ----------
    var_names
        Local variables and deterministics; by default all but those with an entry for each row of a client.

    Returns
    -------
    xarray.Dataset
        Dims ``statistic`` ("mean", "sd"), ``client``, and those of the variable. A point estimate has no sd.

    Raises
    ------
    DeclarationError
        If clients are sites of their own, or a name is unknown.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> fit.clients_summary()["theta"].sel(statistic="mean").dims
    ('client',)

    Notes
    -----
    *When this fails.* Sds of many dependent, transformed local variables are by one node on each side of an axis.
    """
    require_arrived(fit, "fit.clients_summary()")
    if not fit.clients:
        raise DeclarationError("no client's data are here; use fedppl.load(..., clients=).")
    posterior = fit.algorithm.result.shared
    at_once = isinstance(fit.clients, ClientsOf) and isinstance(posterior, Posterior)
    moments: Mapping[str, Any] = _at_once(fit, fit.clients, posterior) if at_once else _one_by_one(fit)
    if not moments:
        raise DeclarationError("clients have no variables of their own with one shape for all; see fit.client(...).")
    names = chosen("var_names", var_names, list(moments), "clients' variables")
    values = {name: np.stack(moments[name]) for name in names}
    attrs = {"status": fit.status.value, "algorithm": fit.algorithm.name}
    model = next(iter(fit.clients.values())).pymc_model()
    group = idata.posterior_dataset(values, *dims_and_coords(model), attrs)
    places = {"statistic": ["mean", "sd"], "client": np.array(list(fit.clients))}
    return group.rename(chain="statistic", draw="client").assign_coords(places)


def _at_once(fit: Ended, clients: ClientsOf, posterior: Posterior[Any]) -> dict[str, tuple[Array, Array]]:
    """Over points with the moments of q, or over weighted points of the posterior that is skewed or differs from q."""
    q, weighted = posterior.gaussian(fit.state), posterior.weighted(fit.state)
    mean, root = gaussian.affine(q)
    if weighted is not None:
        sd = gaussian.standard_deviations(q)
        shifts, log_ratios = (weighted.mean - mean) / sd, np.log(np.sqrt(np.diag(weighted.covariance)) / sd)
        skewed = np.abs(skewness(weighted.points, weighted.weights)).max() > _SKEWED
        if skewed or np.abs([shifts, log_ratios]).max() > _TOLERANCE:
            drawn = resample(weighted.weights, _DRAWN, stream((fit.seed, 3)))
            return clients.moments(weighted.points[drawn], mean)
    # On both sides of each axis: they have q's mean, variances and third moments.
    axes = np.sqrt(len(mean)) * np.eye(len(mean))
    return clients.moments(mean + np.concatenate([axes, -axes]) @ root.T, mean)


def _one_by_one(fit: Any) -> dict[str, Array]:
    """From draws of each client's posterior; of variables that have the same shape at all clients."""
    each: list[dict[str, Array]] = []
    for client_id in fit.clients:
        drawn = fit.client(client_id)["posterior"].data_vars.items()
        each.append({str(name): _moments(values) for name, values in drawn if name not in fit.layout.slices})
    same = [name for name in each[0] if len({own[name].shape if name in own else None for own in each}) == 1]
    return {name: np.stack([own[name] for own in each], axis=1) for name in same}


def _moments(values: xr.DataArray) -> Array:
    """Mean and sd of draws; a point estimate has no sd."""
    mean, sd = values.mean(("chain", "draw")).values, values.std(("chain", "draw")).values
    return np.stack([mean, np.full_like(sd, np.nan) if values.attrs.get("point_estimate") else sd])


# A fit in a notebook, and on a page of its own ------------------------------------------------------------------------

_ROWS = 20
_MOST = 200  # shared coordinates of which a summary is shown


def of_fit(fit: Any) -> str:
    """Status and message, and the first rows of the summary."""
    color = "#2a7f3f" if fit.status.ok else "#b3261e"
    status = f'<span style="color: {color}">{escaped(fit.status)}</span>'
    facts = f"{len(fit.records)} rounds, {len(fit.client_ids)} clients, {number(fit.seconds)} s, seed {fit.seed}"
    message = f"<p>{escaped(fit.message, 1000)}</p>" if fit.message else ""
    return f"<div><strong>{escaped(fit.algorithm.name)}</strong>: {status}, {facts}{message}{_summary(fit)}</div>"


def _summary(fit: Any) -> str:
    if fit.algorithm.result.shared is None or unarrived(fit):
        return ""
    if fit.layout.size > _MOST:
        return f"<p>{fit.layout.size} shared coordinates: see <code>fit.summary()</code></p>"
    summary = fit.summary()
    rows = [[name, *map(number, values)] for name, values in zip(summary.index, summary.values, strict=True)]
    more = f"<p>and {len(rows) - _ROWS} more rows: <code>fit.summary()</code></p>" if len(rows) > _ROWS else ""
    return table(["", *summary.columns], rows[:_ROWS]) + more


def report(fit: Any, path: str | os.PathLike[str], **settings: Any) -> Path:
    """Write one HTML page about this fit: status, tables, pictures, settings, versions and seed.

    Parameters
    ----------
    path, **settings
        As in `fedppl.plots.report`, which says what is on the page, and when this fails.

    Returns
    -------
    pathlib.Path
        The file.
    """
    from fedppl import plots  # at its first use: importing it takes a while

    return plots.report(fit, path, **settings)


def _itself(fit: Any, memo: Any = None) -> Any:
    """A fit is not changed, and is its own copy: compiled models and functions cannot be copied."""
    return fit


def _refuse(fit: Any) -> NoReturn:
    """Refuse to be pickled, with the remedy."""
    raise TypeError("a Fit cannot be pickled: use fit.save('run.nc'), and elsewhere fedppl.load('run.nc', model)")


@dataclass(frozen=True, eq=False)
class Fit(Ended):
    """Result of `fedppl.fit`.

    What needs a posterior raises NotConvergedError where the fit was broken off before there was one.

    Attributes
    ----------
    algorithm
        The algorithm that ran.
    state
        The server's last state.
    layout
        The shared parameters.
    declaration
        The FederatedModel that was fitted.
    client_ids
        All clients that could be asked.
    clients
        Compiled models of the clients in this process. Their data stay there; posteriors of θ_k are drawn there.
        Empty where the clients are sites of their own.
    reader
        How draws of φ are read.
    records
        One Record a round.
    status, message
        Whether the run converged, and if not, which setting to change.
    personal
        Personal states of clients in this process: Ditto's personal parameters, for example.
    seed
        Seed of the run.
    seconds
        Wall time of all rounds.
    told
        Numbers that sites of their own sent at the end, by client, for `fedppl.loo`, `fedppl.reliability` and
        `fedppl.conflict`; under an empty name sums over all of them, which were under masks.
    drawn
        Draws of clients' posteriors from the file of a fit that was loaded.
    """

    __copy__, __deepcopy__, __reduce__ = _itself, _itself, _refuse

    def __repr__(self) -> str:
        """One line; some states would fill pages."""
        size = f"{len(self.client_ids)} clients, {self.layout.size} shared coordinates"
        return f"Fit({self.algorithm.name}, {self.status.value}, {len(self.records)} rounds, {size})"

    _repr_html_, report, clients_summary, summary = of_fit, report, clients_summary, tables.summary
    predict, new_client = predicting.predict, predicting.new_client
    shared, influence, save = of_shared.shared, of_shared.influence, saved.save

    @property
    def posterior(self) -> Gaussian:
        """q(φ) on the unconstrained space, in natural parameters: a Gaussian.

        Raises
        ------
        NotConvergedError
            Where the fit was broken off before there was one.
        """
        result = self.algorithm.result.shared
        if not isinstance(result, Posterior):
            places = ["fit.estimate"] if isinstance(result, Point) else []
            places += ['fit.idata["fit"]'] if self.algorithm.result.details(self.state) else []
            lacks = f"{self.algorithm.name} has no posterior of parameters that all clients share"
            raise DeclarationError(f"{lacks}: use fedppl.EP(), or see {', '.join([*places, 'fit.client(...)'])}.")
        require_arrived(self, "fit.posterior")
        return result.gaussian(self.state)

    @property
    def estimate(self) -> dict[str, Array]:
        """The shared variables and their deterministics at one point: the estimate, or the posterior mean."""
        return of_shared.estimate(self)

    @functools.cached_property
    def idata(self) -> Any:
        """ArviZ object with groups posterior (4 x 1000 draws of φ), fit and rounds."""
        return self.shared()

    @functools.cached_property
    def log_evidence(self) -> LogEvidence:
        r"""Log marginal likelihood of all clients' data, with its standard error, by `Sums` or by `EP`.

        .. math:: \log \int p(\phi) \prod_k \int p(y_k, \theta_k \mid \phi)\, d\theta_k\, d\phi

        Its ``method`` is "sums"; or "EP", with clients here: an approximation, whose ``error`` is that of computing it.

        Raises
        ------
        DeclarationError
            Where a fit by EP has its clients elsewhere, or priors have no known constant (pm.Potential, pm.Flat).
        NotConvergedError
            Where weights are not to be trusted, or the run did not converge.

        Notes
        -----
        *When this fails.* The points lie around the mode that was found. The mass of another mode, apart from it, is
        missing without a warning: ``Sums(starts=...)`` and ``EP(starts=...)`` look for others first. A client that adds
        a constant to its log densities changes no moment, but the evidence: `trust=` does not protect from it.
        """
        posterior = self.algorithm.result.shared
        if not isinstance(posterior, Posterior):
            raise DeclarationError(f"{self.algorithm.name} gives no evidence; use fedppl.Sums().")
        require_arrived(self, "fit.log_evidence")
        evidence = posterior.evidence(self.state, self.clients)
        if evidence.method == "EP" and not self.status.ok:
            raise NotConvergedError(f"EP's evidence is of a q that has converged, and this fit is {self.status.value}.")
        return evidence

    def client(
        self,
        client_id: Hashable,
        *,
        predict: Any = None,
        groups: Sequence[str] | str = (),
        draws: int = 1000,
        chains: int = 4,
        random_seed: int | None = None,
    ) -> Any:
        """Posterior of one client's θ_k, drawn at the client: by `EP` from cavity x local likelihood (FedLin eq. 8).

        Where the shared posterior is weighted points, as by `Sums`, φ is one of them, and θ_k is drawn given it.

        Parameters
        ----------
        client_id
            Id of a client that took part, as it was given.
        predict
            New inputs by name, ``{"X": X_new}``, or a data frame, to draw predictions for. The client's own variables
            stay as in the posterior; those with an entry for each row, such as residuals, are drawn for new rows.
        groups
            More groups of ArviZ: "log_likelihood" of every observation (for ``az.loo``), "posterior_predictive" of the
            client's own rows (for ``az.plot_ppc``), and "prior", 500 draws, which brings "prior_predictive".
        draws, chains, random_seed
            As in `shared`.

        Returns
        -------
        arviz.InferenceData or xarray.DataTree
            Groups ``posterior`` (local and shared variables, with diagnostics in ``attrs``), ``observed_data``,
            ``constant_data``, and ``predictions`` and others if asked for.
        """
        client_id = str(client_id)
        if client_id not in self.client_ids:
            remedy = "Of others use fit.new_client(data), or without rows fit.predict(None, new_data)."
            known = some_of(self.client_ids)
            raise DeclarationError(f"client {client_id!r} did not take part; clients are {known}. {remedy}")
        drawing = of_shared.drawing_of(self, draws, chains, random_seed)
        if client_id not in self.clients:
            return saved.stored_draws(self, client_id, drawing, predict=predict, groups=groups)
        return predicting.at_client(self, self.clients[client_id], predict, drawing, groups=groups)
