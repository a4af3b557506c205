"""What a fit returns: the shared posterior, clients' posteriors, predictions, and a record of every round."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedppl import gaussian, idata
from fedppl.at_client import client_posterior
from fedppl.engine.answer import stream
from fedppl.gaussian import Gaussian
from fedppl.model import ClientModel, FederatedModel
from fedppl.settings import whole
from fedppl.types import Algorithm, Array, DeclarationError, Layout, SharedReader, Status

__all__ = ["Fit", "Record"]

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """What happened in one round."""

    number: int
    asked: tuple[str, ...]
    failures: Mapping[str, str]
    infos: Mapping[str, Mapping[str, float]]
    info: Mapping[str, float | str]
    bytes_down: Mapping[str, int]
    bytes_up: Mapping[str, int]
    released: str  # names and sizes of what a client's reply held
    seconds: float
    status: Status
    silent: tuple[str, ...] = ()  # asked, but for no reply
    preliminary: bool = False  # of a start with a budget of its own


@dataclass(frozen=True, eq=False)
class Fit:
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
    """

    algorithm: Algorithm
    state: Any
    layout: Layout
    declaration: FederatedModel
    client_ids: tuple[str, ...]
    clients: Mapping[str, ClientModel]
    reader: SharedReader
    records: tuple[Record, ...]
    status: Status
    message: str
    personal: Mapping[str, Any]
    seed: int
    seconds: float

    def __repr__(self) -> str:
        """One line; the state of a network or of curves would fill pages."""
        return (
            f"Fit({self.algorithm.name}, {self.status.value}, {len(self.records)} rounds, {len(self.client_ids)} "
            f"clients, {self.layout.size} shared coordinates)"
        )

    @property
    def posterior(self) -> Gaussian:
        """q(φ) on the unconstrained space, in natural parameters."""
        if self.algorithm.posterior is None:
            raise DeclarationError(
                f"{self.algorithm.name} has no posterior of parameters that all clients share: see "
                + ("fit.estimate, " if self.algorithm.estimate else "")
                + ('fit.idata["fit"] and ' if self.algorithm.details(self.state) else "")
                + "fit.client(...). For a posterior use fedppl.EP()."
            )
        q = self.algorithm.posterior(self.state)
        if gaussian.is_proper(q):
            return q
        repaired, report = gaussian.repair(q, 1e-6)
        logger.warning(
            "q is not positive definite (smallest eigenvalue %.3g) and was repaired; the fit is %s: %s",
            report.smallest_before,
            self.status.value,
            self.message,
        )
        return repaired

    @property
    def estimate(self) -> dict[str, Array]:
        """The shared variables and their deterministics at one point: the estimate, or the mean of the draws of q."""
        if self.algorithm.estimate is not None:
            values = self.reader.constrain(self.algorithm.estimate(self.state)[None])
            return {name: value[0] for name, value in values.items()}
        if self.algorithm.posterior is None and self.algorithm.sample is None:
            raise DeclarationError(
                f"{self.algorithm.name} has no parameters that all clients share; see fit.client(...) for a client's."
            )
        posterior = self.idata["posterior"]
        return {str(name): values.mean(("chain", "draw")).values for name, values in posterior.data_vars.items()}

    @functools.cached_property
    def idata(self) -> Any:
        """ArviZ object with groups posterior (4 x 1000 draws of φ), fit and rounds."""
        return self.shared()

    def shared(self, *, draws: int = 1000, chains: int = 4, random_seed: int | None = None) -> Any:
        """Posterior of the shared parameters as an ArviZ object.

        Parameters
        ----------
        draws, chains
            Independent draws of q(φ).
        random_seed
            Seed; by default the fit's.

        Returns
        -------
        arviz.InferenceData or xarray.DataTree
            Groups ``posterior`` (constrained space), ``fit`` (mean_vector and covariance_matrix of q on the
            unconstrained space, and what else the algorithm's state knows) and ``rounds``. Where the algorithm
            estimates a point, there is a group ``point_estimate`` instead of ``posterior``.
        """
        _check_draws(draws, chains)
        groups = {"rounds": rounds_dataset(self.records, self.client_ids)}
        rng = stream((self._seed(random_seed), 1))
        if self.algorithm.sample is not None:
            phi = self.algorithm.sample(self.state, draws * chains, rng)
            groups = {"posterior": self._shared_dataset(phi.reshape(chains, draws, -1)), **groups}
        elif self.algorithm.posterior is not None:
            phi = gaussian.draw(self.posterior, rng, draws * chains)
            groups = {"posterior": self._shared_dataset(phi.reshape(chains, draws, -1)), **groups}
        elif self.algorithm.estimate is not None:
            groups = {"point_estimate": self._point_dataset(), **groups}
        return idata.from_groups({**groups, "fit": self._fit_dataset()})

    def client(
        self,
        client_id: str,
        *,
        predict: Mapping[str, Any] | None = None,
        draws: int = 1000,
        chains: int = 4,
        random_seed: int | None = None,
    ) -> Any:
        """Posterior of one client's θ_k, drawn at the client from cavity x local likelihood (FedLin eq. 8).

        Parameters
        ----------
        client_id
            Which client.
        predict
            New inputs by name, for example ``{"X": X_new}``, to draw predictions for.
        draws, chains
            Number of draws.
        random_seed
            Seed; by default the fit's.

        Returns
        -------
        arviz.InferenceData or xarray.DataTree
            Groups ``posterior`` (local and shared variables), ``sample_stats`` attributes with diagnostics,
            ``observed_data``, ``constant_data``, and ``predictions`` if asked for.
        """
        if client_id not in self.client_ids:
            raise DeclarationError(
                f"client {client_id!r} did not take part; clients are {list(self.client_ids)[:10]}. For data of a "
                "client that did not, use fit.new_client(data)."
            )
        if client_id not in self.clients:
            raise DeclarationError(
                f"client {client_id!r} is a site of its own and its data are not here: its posterior is drawn there. "
                "Give the site's client_app a folder=, and find it in that folder when the run is over."
            )
        return self._at_client(self.clients[client_id], client_id, predict, draws, chains, random_seed)

    def predict(
        self,
        client_id: str,
        new_data: Mapping[str, Any],
        *,
        draws: int = 1000,
        chains: int = 4,
        random_seed: int | None = None,
    ) -> Any:
        """Predictive draws on a client's new inputs: `client` with ``predict=new_data``."""
        return self.client(client_id, predict=new_data, draws=draws, chains=chains, random_seed=random_seed)

    def new_client(
        self,
        data: Mapping[str, Any],
        *,
        predict: Mapping[str, Any] | None = None,
        draws: int = 1000,
        chains: int = 4,
        random_seed: int | None = None,
        name: str = "new client",
    ) -> Any:
        """Posterior of θ at a client that never took part, from q(φ) and its own data alone.

        Parameters
        ----------
        data
            The new client's data, by the builder's argument names.
        predict, draws, chains, random_seed
            As in `client`.
        name
            What to call it in results and errors.

        Returns
        -------
        arviz.InferenceData or xarray.DataTree
        """
        model = self.declaration.enrol({name: data})[name]
        if model.layout.fingerprint != self.layout.fingerprint:
            raise DeclarationError(
                f"{name!r} has shared layout {model.layout.variables}, the fit has {self.layout.variables}; "
                "give the new client the same columns."
            )
        return self._at_client(model, name, predict, draws, chains, random_seed)

    def _seed(self, random_seed: int | None) -> int:
        return self.seed if random_seed is None else whole("random_seed", random_seed, 0)

    def _at_client(
        self,
        model: ClientModel,
        client_id: str,
        predict: Mapping[str, Any] | None,
        draws: int,
        chains: int,
        random_seed: int | None,
    ) -> Any:
        _check_draws(draws, chains)
        if predict is not None and not isinstance(predict, Mapping):
            raise DeclarationError(
                f'new data are {type(predict).__name__}; pass a mapping from name to array: {{"X": ...}}.'
            )
        seed = self._seed(random_seed)
        message, personal = self.algorithm.outcome(self.state, client_id), self.personal.get(client_id)
        return client_posterior(self.algorithm, model, personal, message, seed, draws, chains, predict)

    def _shared_dataset(self, phi: Array) -> xr.Dataset:
        chains, draws = phi.shape[:2]
        values = self.reader.constrain(phi.reshape(chains * draws, -1))
        shaped = {name: value.reshape(chains, draws, *value.shape[1:]) for name, value in values.items()}
        attrs = {"status": self.status.value, "message": self.message, "algorithm": self.algorithm.name}
        return idata.posterior_dataset(shaped, self.reader.dims, self.reader.coords, attrs)

    def _point_dataset(self) -> xr.Dataset:
        values = self.estimate
        dims = {
            name: self.reader.dims.get(name) or tuple(f"{name}_dim_{axis}" for axis in range(np.ndim(value)))
            for name, value in values.items()
        }
        return idata.dataset(values, dims, self.reader.coords, {"algorithm": self.algorithm.name})

    def _fit_dataset(self) -> xr.Dataset:
        labels, clients = np.array(self.layout.labels), np.array(self.client_ids)
        known: dict[str, tuple[tuple[str, ...], Array]] = {}
        if self.algorithm.posterior is not None:
            q = self.posterior
            known["mean_vector"] = ("rows",), gaussian.mean(q)
            known["covariance_matrix"] = ("rows", "columns"), gaussian.covariance(q)
        elif self.algorithm.estimate is not None:
            known["mean_vector"] = ("rows",), self.algorithm.estimate(self.state)
        known.update(self.algorithm.details(self.state))
        return idata.dataset(
            {name: values for name, (_, values) in known.items()},
            {name: dims for name, (dims, _) in known.items()},
            {**self.reader.coords, "rows": labels, "columns": labels, "client": clients, "other_client": clients},
            {"space": "unconstrained", "status": self.status.value, "message": self.message},
        )


def _check_draws(draws: int, chains: int) -> None:
    whole("draws", draws)
    whole("chains", chains)


def rounds_dataset(records: tuple[Record, ...], clients: tuple[str, ...]) -> xr.Dataset:
    """Diagnostics of every round, dims (round,), and of every client in it, dims (round, client)."""
    where = {client_id: k for k, client_id in enumerate(clients)}
    shape = (len(records), len(clients))
    outcome = np.full(shape, "not asked", dtype="U9")
    reason = np.full(shape, "", dtype=object)
    traffic = {name: np.zeros(shape, dtype=np.int64) for name in ("bytes_down", "bytes_up")}
    values: dict[str, Array] = {}
    per_round: dict[str, Any] = {
        "seconds": np.array([record.seconds for record in records]),
        "released": np.array([record.released for record in records], dtype=str),
    }
    for name in {name for record in records for name in record.info}:
        column = [record.info.get(name, np.nan) for record in records]
        per_round[name] = np.array(column, dtype=str if any(isinstance(v, str) for v in column) else float)
    for t, record in enumerate(records):
        for client_id in record.asked:
            k = where[client_id]
            silent = client_id in record.silent
            outcome[t, k] = "skipped" if client_id in record.failures else "silent" if silent else "used"
            reason[t, k] = record.failures.get(client_id, "")
            traffic["bytes_down"][t, k] = record.bytes_down[client_id]
            traffic["bytes_up"][t, k] = record.bytes_up.get(client_id, 0)
            for name, value in record.infos.get(client_id, {}).items():
                values.setdefault(name, np.full(shape, np.nan))[t, k] = value
    both = {"outcome": outcome, "reason": reason.astype(str), **traffic, **values}
    return idata.dataset(
        {**per_round, **both},
        {**dict.fromkeys(per_round, ("round",)), **dict.fromkeys(both, ("round", "client"))},
        {"round": [record.number for record in records], "client": list(clients)},
    )
