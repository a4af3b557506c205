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
from fedppl.engine.answer import stream
from fedppl.gaussian import Gaussian
from fedppl.model import ClientModel
from fedppl.predict import predictions
from fedppl.types import Algorithm, Array, DeclarationError, Layout, Status, Target

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
    seconds: float
    status: Status


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
    clients
        The clients' compiled models. Their data never left them; posteriors of θ_k are drawn there.
    records
        One Record a round.
    status, message
        Whether it converged, and if not, which setting to change.
    seed
        Seed of the run.
    seconds
        Wall time of all rounds.
    """

    algorithm: Algorithm
    state: Any
    layout: Layout
    clients: Mapping[str, ClientModel]
    records: tuple[Record, ...]
    status: Status
    message: str
    seed: int
    seconds: float

    @property
    def posterior(self) -> Gaussian:
        """q(φ) on the unconstrained space, in natural parameters."""
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
            unconstrained space) and ``rounds``.
        """
        _check_draws(draws, chains)
        q = self.posterior
        phi = gaussian.draw(q, stream((self._seed(random_seed), 1)), draws * chains)
        anyone = next(iter(self.clients.values()))
        groups = {
            "posterior": self._shared_dataset(anyone, phi.reshape(chains, draws, -1)),
            "fit": self._fit_dataset(q),
            "rounds": rounds_dataset(self.records, tuple(self.clients)),
        }
        return idata.from_groups(groups)

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
        if client_id not in self.clients:
            raise DeclarationError(
                f"client {client_id!r} did not take part; clients are {list(self.clients)[:10]}. For data of a client "
                "that did not, use fit.new_client(data)."
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
        anyone = next(iter(self.clients.values()))
        model = anyone.declaration.enrol({name: data})[name]
        if model.layout.fingerprint != self.layout.fingerprint:
            raise DeclarationError(
                f"{name!r} has shared layout {model.layout.variables}, the fit has {self.layout.variables}; "
                "give the new client the same columns."
            )
        return self._at_client(model, name, predict, draws, chains, random_seed)

    def _seed(self, random_seed: int | None) -> int:
        return self.seed if random_seed is None else random_seed

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
        seed = self._seed(random_seed)
        q = self.posterior
        known = client_id in self.clients
        cavity = self.algorithm.cavity(self.state, client_id) if known else q
        global_ = q
        share = 0.0
        if known and not self.layout.prior_is_gaussian:
            share = 1.0 / len(self.clients)
        target = Target(model, global_, cavity, share)
        rng = stream((seed, 2, *client_id.encode()))
        sample = self.algorithm.local.draw(target, draws, chains, rng)
        k = sample.diagnostics.get("pareto_k", -np.inf)
        if k > 0.7:
            logger.warning("client %s: Pareto k %.2f of the draws of θ; use local=fedppl.NUTS()", client_id, k)
        local = sample.local.reshape(chains * draws, -1)
        phi = sample.shared.reshape(chains * draws, -1)
        values = model.constrain(phi, local)
        pymc_model = model.pymc_model()
        dims, coords = _dims_and_coords(pymc_model)
        everything = {
            name: value.reshape(chains, draws, *value.shape[1:])
            for name, value in (values | model.constrain_shared(phi)).items()
        }
        attrs = {f"fedppl_{name}": value for name, value in sample.diagnostics.items()}
        posterior = idata.posterior_dataset(everything, dims, coords, {"client": client_id, **attrs})
        groups = {"posterior": posterior, **_data_groups(pymc_model, model, dims, coords)}
        if predict is not None:
            groups["predictions"], groups["predictions_constant_data"] = predictions(
                model, posterior, predict, seed, coords
            )
        return idata.from_groups(groups)

    def _shared_dataset(self, model: ClientModel, phi: Array) -> xr.Dataset:
        chains, draws = phi.shape[:2]
        pymc_model = model.pymc_model()
        dims, coords = _dims_and_coords(pymc_model)
        values = model.constrain_shared(phi.reshape(chains * draws, -1))
        shaped = {name: value.reshape(chains, draws, *value.shape[1:]) for name, value in values.items()}
        attrs = {"status": self.status.value, "message": self.message, "algorithm": self.algorithm.name}
        return idata.posterior_dataset(shaped, dims, coords, attrs)

    def _fit_dataset(self, q: Gaussian) -> xr.Dataset:
        labels = np.array(self.layout.labels)
        details = self.algorithm.details(self.state)
        return idata.dataset(
            {"mean_vector": gaussian.mean(q), "covariance_matrix": gaussian.covariance(q), **details},
            {"mean_vector": ("rows",), "covariance_matrix": ("rows", "columns"), **dict.fromkeys(details, ("rows",))},
            {"rows": labels, "columns": labels},
            {"space": "unconstrained", "status": self.status.value, "message": self.message},
        )


def _check_draws(draws: int, chains: int) -> None:
    if draws < 1 or chains < 1:
        raise DeclarationError(f"draws={draws}, chains={chains} must be at least 1.")


def _dims_and_coords(pymc_model: Any) -> tuple[dict[str, tuple[str, ...] | None], dict[str, Any]]:
    dims: dict[str, tuple[str, ...] | None] = {k: tuple(v) for k, v in pymc_model.named_vars_to_dims.items()}
    coords: dict[str, Any] = {name: list(values) for name, values in pymc_model.coords.items() if values is not None}
    return dims, coords


def _data_groups(
    pymc_model: Any, model: ClientModel, dims: Mapping[str, tuple[str, ...] | None], coords: Mapping[str, Any]
) -> dict[str, xr.Dataset]:
    """Observed and constant data, which stay in the client's own result."""
    observed = {}
    for rv in pymc_model.observed_RVs:
        value = pymc_model.rvs_to_values[rv]
        observed[rv.name] = np.asarray(value.get_value() if hasattr(value, "get_value") else value.eval())
    held = {v.name for v in map(pymc_model.rvs_to_values.get, pymc_model.observed_RVs)}
    constant = {name: np.asarray(value) for name, value in model.arrays.items() if name not in held}
    return {
        "observed_data": _plain(observed, dims, coords),
        "constant_data": _plain(constant, dims, coords),
    }


def _plain(
    values: Mapping[str, Any], dims: Mapping[str, tuple[str, ...] | None], coords: Mapping[str, Any]
) -> xr.Dataset:
    names = {k: dims.get(k) or tuple(f"{k}_dim_{i}" for i in range(np.ndim(v))) for k, v in values.items()}
    lengths = {dim: np.shape(v)[i] for k, v in values.items() for i, dim in enumerate(names[k])}
    own = {dim: coords[dim] if len(coords.get(dim, ())) == n else np.arange(n) for dim, n in lengths.items()}
    return idata.dataset(values, names, own)


def rounds_dataset(records: tuple[Record, ...], clients: tuple[str, ...]) -> xr.Dataset:
    """Diagnostics of every round, dims (round,), and of every client in it, dims (round, client)."""
    where = {client_id: k for k, client_id in enumerate(clients)}
    shape = (len(records), len(clients))
    outcome = np.full(shape, "not asked", dtype="U9")
    reason = np.full(shape, "", dtype=object)
    traffic = {name: np.zeros(shape, dtype=np.int64) for name in ("bytes_down", "bytes_up")}
    values: dict[str, Array] = {}
    per_round: dict[str, Any] = {"seconds": np.array([record.seconds for record in records])}
    for name in {name for record in records for name in record.info}:
        column = [record.info.get(name, np.nan) for record in records]
        per_round[name] = np.array(column, dtype=str if any(isinstance(v, str) for v in column) else float)
    for t, record in enumerate(records):
        for client_id in record.asked:
            k = where[client_id]
            outcome[t, k] = "skipped" if client_id in record.failures else "used"
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
