"""What a fit returns: the shared posterior, clients' posteriors, predictions, and a record of every round."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pandas as pd
import xarray as xr

from fedppl import gaussian
from fedppl.contracts import LogEvidence, Point, Posterior
from fedppl.contracts.client import escaped, number, table
from fedppl.contracts.update import CI_PROB
from fedppl.gaussian import Gaussian
from fedppl.model.client import ClientModel, dims_and_coords
from fedppl.model.stack import ClientsOf
from fedppl.numerics.importance import resample, skewness
from fedppl.numerics.reweighting import Reweighted
from fedppl.numerics.streams import stream
from fedppl.results import groups, predicting, saved, summary
from fedppl.results.records import Ended, require_arrived, unarrived
from fedppl.results.shared import at_mean, at_point, estimates, shared_posterior
from fedppl.settings import chosen as among
from fedppl.settings import some_of
from fedppl.types import Array, DeclarationError, NotConvergedError

# Means and sds of all clients' own variables, as one dataset ----------------------------------------------------------

_SHOWS, _DRAWN = 0.01, 256  # sds that q's moments may be off, beyond which so many points are drawn
_SKEWED = 0.1  # of a coordinate: of more, a few points of q tell no client's spread


def clients_summary(fit: Any, var_names: Sequence[str] | str | None = None) -> xr.Dataset:
    """Posterior means and sds of all clients' own variables.

    Where clients lie side by side, as many do, all at once; else from draws of each, as `client` gives them.

    Parameters
    ----------
    var_names
        Local variables and deterministics; by default all. Those with an entry for each row of a client are not
        among them.

    Returns
    -------
    xarray.Dataset
        Dims ``statistic`` ("mean", "sd"), ``client``, and those of the variable. A point estimate has no sd.

    Raises
    ------
    DeclarationError
        If clients are sites of their own, or a name is unknown.
    NotConvergedError
        Where the fit was broken off before there was a posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> fit.clients_summary()["theta"].sel(statistic="mean").dims
    ('client',)

    Notes
    -----
    *When this fails.* Of many local variables that depend on each other, and are transformed, sds are those of an
    approximation with one node on each side of an axis.
    """
    require_arrived(fit, "fit.clients_summary()")
    if isinstance(fit.clients, ClientsOf) and isinstance(fit.algorithm.result.shared, Posterior):
        found = _at_once(fit, fit.clients)
        one = fit.clients[fit.client_ids[0]]
    else:
        if not fit.clients:
            raise DeclarationError(
                "no client's data are here, so that its own variables cannot be told; of a fit that was loaded give "
                "them, fedppl.load(..., clients=). Sites have their own posteriors."
            )
        one = next(iter(fit.clients.values()))
        found = _one_by_one(fit)
    if not found:
        raise DeclarationError("clients have no variables of their own that all have alike: there is nothing to tell.")
    kept = {name: found[name] for name in among("var_names", var_names, list(found), "clients' variables")}
    return _dataset(fit, one, kept)


def _at_once(fit: Ended, clients: ClientsOf) -> dict[str, tuple[Array, Array]]:
    """Over points that have the moments of the posterior, or where q is another, over weighted points of that."""
    shared = fit.algorithm.result.shared
    assert isinstance(shared, Posterior)
    q, found = shared.gaussian(fit.state), shared.corrected(fit.state)
    mean, root = gaussian.affine(q)
    if found is not None and _differs(q, found):
        chosen = resample(found.weights, _DRAWN, stream((fit.seed, 3)))
        return clients.moments(found.points[chosen], mean)
    # On both sides of each axis: they have q's mean, variances and third moments.
    axes = np.sqrt(len(mean)) * np.eye(len(mean))
    return clients.moments(mean + np.concatenate([axes, -axes]) @ root.T, mean)


def _differs(q: Gaussian, found: Reweighted) -> bool:
    """Whether weighted points have other moments than q, or are skewed, to what shows in a client's own."""
    if np.abs(skewness(found.points, found.weights)).max() > _SKEWED:
        return True
    sd = gaussian.standard_deviations(q)
    means = np.abs(found.mean - gaussian.mean(q)) / sd
    return bool(max(np.max(means), np.max(np.abs(np.log(np.sqrt(np.diag(found.covariance)) / sd)))) > _SHOWS)


def _one_by_one(fit: Any) -> dict[str, tuple[Array, Array]]:
    """From draws of each client's posterior; of variables that have one shape at all."""
    each: list[dict[str, tuple[Array, Array]]] = []
    shared = {variable.name for variable in fit.layout.variables}
    for client_id in fit.clients:
        drawn = fit.client(client_id)["posterior"]
        each.append(
            {
                str(name): (values.mean(("chain", "draw")).values, _sd(values))
                for name, values in drawn.data_vars.items()
                if str(name) not in shared
            }
        )
    names = [name for name in each[0] if len({one[name][0].shape if name in one else None for one in each}) == 1]
    return {
        name: (np.stack([one[name][0] for one in each]), np.stack([one[name][1] for one in each])) for name in names
    }


def _sd(values: xr.DataArray) -> Array:
    """Standard deviation of draws; of a point estimate nothing is known."""
    found: Array = np.asarray(values.std(("chain", "draw")).values, dtype=float)
    return np.full_like(found, np.nan) if values.attrs.get("point_estimate") else found


def _dataset(fit: Ended, one: ClientModel, found: dict[str, tuple[Array, Array]]) -> xr.Dataset:
    dims, coords = dims_and_coords(one.pymc_model())
    variables: dict[str, tuple[tuple[str, ...], Array]] = {}
    used: dict[str, Any] = {}
    for name, (mean, sd) in found.items():
        of = dims.get(name) or tuple(f"{name}_dim_{axis}" for axis in range(mean.ndim - 1))
        variables[name] = ("statistic", "client", *of), np.stack([mean, sd])
        used |= {dim: coords[dim] for axis, dim in enumerate(of) if len(coords.get(dim, ())) == mean.shape[1 + axis]}
    places = {"statistic": ["mean", "sd"], "client": np.array(list(fit.clients)), **used}
    return xr.Dataset(variables, places, {"status": fit.status.value, "algorithm": fit.algorithm.name})


# How a fit looks in a notebook, and on a page of its own --------------------------------------------------------------

_ROWS = 20
_MOST = 200  # coordinates, beyond which nothing is drawn for a look


def of_fit(fit: Any) -> str:
    """Status and message, and the first rows of the summary."""
    color = "#2a7f3f" if fit.status.ok else "#b3261e"
    message = f"<p>{escaped(fit.message, 1000)}</p>" if fit.message else ""
    facts = f"{len(fit.records)} rounds, {len(fit.client_ids)} clients, {number(fit.seconds)} s, seed {fit.seed}"
    return (
        f"<div><strong>{escaped(fit.algorithm.name)}</strong>: "
        f'<span style="color: {color}">{escaped(fit.status)}</span>, {escaped(facts)}{message}{_summary(fit)}</div>'
    )


def _summary(fit: Any) -> str:
    ended: Ended = fit
    if ended.algorithm.result.shared is None or unarrived(ended):
        return ""
    if ended.layout.size > _MOST:
        return f"<p>{ended.layout.size} shared coordinates: see <code>fit.summary()</code></p>"
    found = fit.summary()
    rows = [[name, *map(number, values)] for name, values in zip(found.index, found.values, strict=True)]
    more = f"<p>and {len(rows) - _ROWS} more rows: <code>fit.summary()</code></p>" if len(rows) > _ROWS else ""
    return table(["", *found.columns], rows[:_ROWS]) + more


def report(
    fit: Any,
    path: str | os.PathLike[str],
    *,
    var_names: Sequence[str] | str | None = None,
    population: str | float | Mapping[str, str | float] | None = None,
    conflict: Any = None,
    title: str = "Federated fit",
) -> Path:
    """Write one HTML page about this fit: status, tables, pictures, settings, versions and seed.

    Parameters
    ----------
    path, var_names, population, conflict, title
        As in `fedppl.plots.report`.

    Returns
    -------
    pathlib.Path
        The file. What is on the page, and when this fails: `fedppl.plots.report`.
    """
    from fedppl import plots  # at its first use: it takes a while

    return plots.report(fit, path, var_names=var_names, population=population, conflict=conflict, title=title)


F = TypeVar("F")

# The declaration, compiled models and pure functions are the same for all copies.
_SHARED = ("algorithm", "declaration", "clients", "reader")


def _shallow(fit: F) -> F:
    """Another fit of the same parts."""
    made = object.__new__(type(fit))
    made.__dict__.update(fit.__dict__)
    return made


def _deep(fit: F, memo: dict[int, Any]) -> F:
    """Another fit whose state, records and draws are its own."""
    made = memo[id(fit)] = _shallow(fit)
    made.__dict__.update({name: copy.deepcopy(v, memo) for name, v in vars(fit).items() if name not in _SHARED})
    return made


def _refuse(fit: Any) -> NoReturn:
    """Say how a fit gets to another process."""
    raise TypeError(
        "a Fit holds compiled functions and cannot be pickled: write it by fit.save('run.nc'), and read it in another "
        "process by fedppl.load('run.nc', model)"
    )


@dataclass(frozen=True, eq=False)
class Fit(Ended):
    """Result of `fedppl.fit`.

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
        Compiled models of the clients in this process. Their data never left them; posteriors of θ_k are drawn
        there. Empty where the clients are sites of their own.
    reader
        How draws of φ are read.
    records
        One Record a round.
    status, message
        Whether it converged, and if not, which setting to change.
    personal
        What clients in this process keep to themselves: Ditto's personal parameters, for example.
    seed
        Seed of the run.
    seconds
        Wall time of all rounds.
    told
        What sites of their own let out when the run was over, by client: `fedppl.loo` and `fedppl.conflict` read it.
    drawn
        Of a fit that was loaded, draws of clients' posteriors that its file had.
    """

    __copy__, __deepcopy__, __reduce__ = _shallow, _deep, _refuse

    def __repr__(self) -> str:
        """One line; some states would fill pages."""
        return (
            f"Fit({self.algorithm.name}, {self.status.value}, {len(self.records)} rounds, {len(self.client_ids)} "
            f"clients, {self.layout.size} shared coordinates)"
        )

    _repr_html_, report, clients_summary = of_fit, report, clients_summary
    predict, new_client = predicting.predict, predicting.new_client

    @property
    def posterior(self) -> Gaussian:
        """q(φ) on the unconstrained space, in natural parameters: a Gaussian, also where a correction knows better.

        Raises
        ------
        NotConvergedError
            Where the fit was broken off before there was one.
        """
        shared = self.algorithm.result.shared
        if not isinstance(shared, Posterior):
            raise DeclarationError(
                f"{self.algorithm.name} has no posterior of parameters that all clients share: see "
                + ("fit.estimate, " if isinstance(shared, Point) else "")
                + ('fit.idata["fit"] and ' if self.algorithm.result.details(self.state) else "")
                + "fit.client(...). For a posterior use fedppl.EP()."
            )
        require_arrived(self, "fit.posterior")
        return shared.gaussian(self.state)

    @property
    def estimate(self) -> dict[str, Array]:
        """The shared variables and their deterministics at one point: the estimate, or the posterior mean."""
        shared = self.algorithm.result.shared
        if shared is None:
            raise DeclarationError(
                f"{self.algorithm.name} has no parameters that all clients share; see fit.client(...) for a client's."
            )
        require_arrived(self, "fit.estimate")
        return at_point(self, shared) if isinstance(shared, Point) else at_mean(self, self.idata["posterior"])

    @functools.cached_property
    def idata(self) -> Any:
        """ArviZ object with groups posterior (4 x 1000 draws of φ), fit and rounds."""
        return self.shared()

    def summary(
        self, var_names: Sequence[str] | str | None = None, *, ci_prob: float = CI_PROB, round_to: int | None = None
    ) -> pd.DataFrame:
        """Table of the shared variables with the algorithm's own diagnostics: the one to look at after a fit.

        Draws of q are independent, so that their R̂ and ESS are perfect whatever q is worth. What tells is here instead.

        Parameters
        ----------
        var_names
            Variables, deterministics among them, or their entries as they are printed, ``"arm[drug]"``. By default
            all, but partial correlations of a formula, of which it shows the correlations.
        ci_prob
            Probability of the equal-tailed interval.
        round_to
            Decimals; None keeps all.

        Returns
        -------
        pandas.DataFrame
            A row for every entry: ``mean``, ``sd``, the interval ``ci_low`` to ``ci_high``, the standard errors
            ``mcse_mean`` and ``mcse_sd``, which are of the points that moments come from and not of q (NaN unless
            converged), and what the algorithm knows of the coordinate on the unconstrained space; for `EP`
            ``last_change``, what the last round moved its mean or log sd by, in posterior sds, and ``skewness``, which
            a Gaussian q cannot have. Where
            the algorithm estimates a point, ``mean`` is that, and where it estimates some variables so, they have no
            more than that and are named in ``attrs["point_estimates"]``. ``attrs`` has the ``status`` and its
            ``message``, the share of the clients that ``answered`` when they were last asked, and what clients fell
            back to (``fallbacks``).

        Raises
        ------
        DeclarationError
            If the clients share nothing in this algorithm, or a name is unknown.
        NotConvergedError
            Where the fit was broken off before there was a posterior.

        Examples
        --------
        >>> import fedppl
        >>> from fedppl.testing import normal_means
        >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
        >>> list(fit.summary().columns)
        ['mean', 'sd', 'ci_low', 'ci_high', 'mcse_mean', 'mcse_sd', 'last_change', 'skewness']
        >>> fit.summary().attrs["status"], fit.summary().attrs["answered"]
        ('converged', 1.0)
        """
        return summary.summary(
            self, lambda: self.idata, lambda tails: estimates(self, tails), var_names, ci_prob, round_to
        )

    @functools.cached_property
    def log_evidence(self) -> LogEvidence:
        r"""Log marginal likelihood of all clients' data, with its standard error, by `Sums` or by `EP`'s correction.

        .. math:: \log \int p(\phi) \prod_k \int p(y_k, \theta_k \mid \phi)\, d\theta_k\, d\phi

        ``method`` says which: "sums", "correction", or where no correction was asked for, and the clients are in this
        process, "EP": its own approximation, with an ``error`` only of computing it, not of approximating.

        Raises
        ------
        DeclarationError
            Where sites of their own had no correction, or the priors have no normalising constant that is known
            (pm.Potential, pm.Flat).
        NotConvergedError
            Where weights or the correction are not to be trusted, or the run ended before or did not converge.

        Notes
        -----
        *When this fails.* The points lie around the mode that was found. Another one, apart from it, is not seen, and
        its mass is missing without a word: ``Sums(starts=...)`` and ``EP(starts=...)`` look for others first. A client
        that adds a constant to its log densities moves no moment, but this: `trust=` does not protect from it.
        """
        shared = self.algorithm.result.shared
        if not isinstance(shared, Posterior):
            raise DeclarationError(f"{self.algorithm.name} gives no evidence; use fedppl.EP().")
        require_arrived(self, "fit.log_evidence")
        found = shared.evidence(self.state, self.clients)
        if found.method == "EP" and not self.status.ok:
            raise NotConvergedError(
                f"EP's own evidence is of a q that has converged, and this fit is {self.status.value}."
            )
        return found

    def influence(self, clients: Sequence[str] | str | None = None) -> xr.Dataset:
        r"""What each client does to the shared posterior: the posterior as if it had not been there.

        .. math:: p(\phi \mid y_{-k}) \propto p(\phi \mid y) / f_k(\phi)

        Parameters
        ----------
        clients
            Ids of clients; by default all.

        Returns
        -------
        xarray.Dataset
            Dims client and rows, which are the coordinates of φ on the unconstrained space. ``mean`` and ``sd`` are
            those without the client; ``shift`` is what the client moves the mean by, in sds of the posterior with it,
            and ``sd_ratio`` is the sd with it over the sd without it. ``exact`` says of every client whether they are
            of the posterior itself, from reweighting its points with Pareto k ``pareto_k``, or of the Gaussian q
            without the client's site; NaN where the others determine no posterior. They are exact where
            the correction would be trusted without the client: ``error``, of a mean or an sd in sds, is at most .05,
            100 points or more are effective, and few points make no second moment. Tails that no point lies in are not
            seen. Then ``log_predictive`` is the log density of the client's data given
            all others', log p(y_k | y_{-k}), with its standard error ``log_predictive_error``; NaN where a prior has no
            normalising constant that is known (pm.Potential, pm.Flat).

        Raises
        ------
        DeclarationError
            If the algorithm does not know its posterior without each client, a client is unknown, or its data are
            needed and not here.
        NotConvergedError
            Where the fit was broken off before there was a posterior.

        Examples
        --------
        >>> import fedppl
        >>> from fedppl.testing import normal_means
        >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
        >>> fit.influence()["shift"].dims
        ('client', 'rows')

        Notes
        -----
        *When this fails.* Of a fit by `EP` no client is asked again; by `Sums` each client's log f_k is computed at all
        points, and its data have to be in this process. Where one alone determines much of the posterior, few points
        lie where the others see it: `exact` is then False, and the figures are those of the Gaussian, from which, by
        `EP`, a prior that is not Gaussian lacks the client's share of 1/K.
        """
        return groups.influence(self, clients)

    def shared(
        self, *, unconverged: bool = False, draws: int = 1000, chains: int = 4, random_seed: int | None = None
    ) -> Any:
        """Posterior of the shared parameters as an ArviZ object.

        Parameters
        ----------
        unconverged
            Whether to draw even where the fit was broken off before q arrived: such draws can be very far off, and are
            labelled so in ``attrs``.
        draws, chains
            Independent draws of q(φ): all in one chain where the fit has not converged, so that R̂ is NaN.
        random_seed
            Seed; by default the fit's.

        Returns
        -------
        arviz.InferenceData or xarray.DataTree
            Groups ``posterior`` (constrained space), ``fit`` (mean_vector and covariance_matrix of q on the
            unconstrained space, and what else the algorithm's state knows) and ``rounds``. Where the algorithm
            estimates a point, there is a group ``point_estimate`` instead of ``posterior``. Where the fit was broken
            off before there was either, neither is there, unless `unconverged` asks for it.
        """
        predicting.check_draws(draws, chains)
        seed = predicting.seed_of(self, random_seed)
        return shared_posterior(self, seed, draws, chains, unconverged=unconverged)

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

        Where the shared posterior is weighted points, by `Sums` or corrected, φ is one of these, and θ_k is drawn given
        it and the client's rows.

        Parameters
        ----------
        client_id
            Id of a client that took part, as it was given.
        predict
            New inputs by name, ``{"X": X_new}``, or a data frame, to draw predictions for. What is the client's own
            stays as the posterior has it; what has an entry for each row, as a residual has, is drawn for new rows.
        groups
            More groups of ArviZ to compute, by PyMC: "log_likelihood" of every observation (for ``az.loo``),
            "posterior_predictive" of the client's own rows (for ``az.plot_ppc``), and "prior", 500 draws, which brings
            "prior_predictive".
        draws, chains
            Number of draws; in one chain as in `shared`, where the fit has not converged.
        random_seed
            Seed; by default the fit's.

        Returns
        -------
        arviz.InferenceData or xarray.DataTree
            Groups ``posterior`` (local and shared variables, with diagnostics in ``attrs``), ``observed_data``,
            ``constant_data``, and ``predictions`` and others if asked for.
        """
        client_id = str(client_id)
        if client_id not in self.client_ids:
            raise DeclarationError(
                f"client {client_id!r} did not take part; clients are {some_of(self.client_ids)}. For data of a "
                "client that did not, use fit.new_client(data); where it has no rows yet, fit.predict(None, new_data)."
            )
        if client_id not in self.clients:
            asked: dict[str, Any] = {"predict": predict, "groups": groups, "draws": draws, "chains": chains}
            return saved.stored_draws(self, client_id, **asked, random_seed=random_seed)
        asked = {"draws": draws, "chains": chains, "random_seed": random_seed, "groups": groups}
        return predicting.at_client(self, self.clients[client_id], predict, **asked)

    def save(self, path: str | os.PathLike[str], *, include: str | None = None) -> None:
        """Write the fit to a NetCDF file: what all clients share, the rounds and the server's last state.

        `fedppl.load` reads it, and so does ``az.from_netcdf``. Clients' rows are never in it.

        Parameters
        ----------
        path
            The file, such as ``"run.nc"``; one that is there is replaced.
        include
            What is written of clients' own, which is confidential: None for nothing, "personal" for what they keep to
            themselves where the algorithm has such a thing, "clients" for draws of their posteriors too.

        Raises
        ------
        DeclarationError
            If the path is none, or what is asked for is not here.
        """
        saved.save(self, self.idata, path, include, self.client)
