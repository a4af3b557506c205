"""What algorithms ask of a client with a network: training, and a subnetwork's posterior."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fedppl.nn.algorithms._common import Training
from fedppl.nn.functional import parameter_slices
from fedppl.nn.head import Head, features, find_head
from fedppl.nn.head_steps import HeadSteps, head_posterior, train_below
from fedppl.nn.langevin import Chain, langevin_steps
from fedppl.nn.personal import bayes_steps, loss_at, meta_steps, moreau_steps
from fedppl.nn.subnet import Subnetwork, curvature_diagonal, infer, select
from fedppl.nn.train import train
from fedppl.nn.unit import NetworkUnit, read_network
from fedppl.types import Array, DeclarationError

if TYPE_CHECKING:
    from fedppl.model.declaration import ClientModel

__all__ = ["NetworkClient", "network_client"]


class NetworkClient:
    """A client's network: arrays in, arrays out.

    Attributes
    ----------
    unit
        The network, rows and likelihood.
    start
        θ (d_k,) where all clients start: PyMC's initial point, the mean of the prior unless it has an `initval`.
    """

    def __init__(self, unit: NetworkUnit, start: Array) -> None:
        self.unit, self.start = unit, start
        self._heads: dict[tuple[str, ...], Head] = {}

    def places(self, which: str | tuple[str, ...]) -> Array:
        """Positions in w of "shared", "local" or "all" weights, or of those named as in torch.

        Raises
        ------
        DeclarationError
            For a name that the network does not have, or where there are no such weights.
        """
        unit = self.unit
        if isinstance(which, str):
            groups = {"shared": unit.shared_at, "local": unit.local_at, "all": np.arange(unit.size)}
            if which not in groups:
                raise DeclarationError(
                    f'{which!r} must be "shared", "local", "all" or a tuple of names: {list(unit.names)}.'
                )
            found = groups[which]
        else:
            unknown = sorted(set(which) - set(unit.names))
            if unknown:
                raise DeclarationError(f"{unknown} are no parameters of the network; it has {list(unit.names)}.")
            everything = np.arange(unit.size)
            parts = [everything[where] for name, where in parameter_slices(unit.net).items() if name in which]
            found = np.concatenate([everything[:0], *parts])
        if not len(found):
            raise DeclarationError(
                f"{which!r} names no weights: share others in FederatedModel(shared=...), or name some."
            )
        return np.asarray(found, dtype=np.int64)

    def trained(
        self,
        w: Array,
        free: Array,
        settings: Training,
        rng: np.random.Generator,
        *,
        prior: tuple[Array, Array] | None = None,
        linear: Array | None = None,
    ) -> Array:
        """Weights after training those at `free`, with means and precisions `prior`; see `fedppl.nn.train`."""
        return train(self.unit, w, free, prior, settings, rng, linear=linear)

    def head(self, names: tuple[str, ...]) -> Head:
        """The last layer, which has these parameters and no others; checked once a network."""
        known = self._heads.get(names)
        if known is None:
            known = self._heads[names] = find_head(self.unit, names, self.places(names), self.unit.held)
        return known

    def head_posterior(
        self,
        head: Head,
        w: Array,
        start: tuple[Array, Array],
        centre: Array,
        confidence: float,
        steps: tuple[float, int, int],
        rng: np.random.Generator,
    ) -> tuple[Array, Array]:
        """Mean and sd of the head's posterior on the features of w; see `fedppl.nn.head_steps`."""
        z = features(self.unit, head, w)
        return head_posterior(self.unit, head, z, start, centre, confidence, HeadSteps(*steps), rng)

    def train_below(
        self,
        head: Head,
        w: Array,
        below: Array,
        q: tuple[Array, Array],
        settings: Training,
        draws: int,
        rng: np.random.Generator,
    ) -> Array:
        """Weights after training those at `below` under draws of the head; see `fedppl.nn.head_steps`."""
        return train_below(self.unit, head, w, below, q, settings, draws, rng)

    def loss(self, w: Array) -> float:
        """Mean negative log likelihood of the client's rows."""
        return loss_at(self.unit, w)

    def meta_steps(self, w: Array, settings: Training, inner_rate: float, rng: np.random.Generator) -> Array:
        """Steps of Per-FedAvg; see `fedppl.nn.personal`."""
        return meta_steps(self.unit, w, settings, inner_rate, rng)

    def moreau_steps(
        self, w: Array, settings: Training, lam: float, inner: tuple[float, int], rng: np.random.Generator
    ) -> tuple[Array, Array]:
        """Steps of pFedMe: w and θ; see `fedppl.nn.personal`."""
        return moreau_steps(self.unit, w, settings, lam, inner, rng)

    def bayes_steps(
        self,
        mean: Array,
        sd: Array,
        settings: Training,
        zeta: float,
        draws: int,
        rng: np.random.Generator,
        *,
        start: tuple[Array, Array] | None = None,
        follow: bool = True,
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Steps of pFedBayes and BPFed: q and p; see `fedppl.nn.personal`."""
        return bayes_steps(self.unit, mean, sd, settings, zeta, draws, rng, start=start, follow=follow)

    def langevin_steps(
        self,
        head: Head,
        w: Array,
        below: Array,
        start: Array,
        prior: tuple[Array, float],
        settings: Training,
        head_rate: float,
        rng: np.random.Generator,
    ) -> tuple[Array, Chain]:
        """Steps of FedPop: all weights and the head's chain; see `fedppl.nn.langevin`."""
        return langevin_steps(self.unit, head, w, below, start, prior, settings, head_rate, rng)

    def independent(self, w: Array, places: Array, variance: Array) -> Subnetwork:
        """Independent normal weights at `places`, and points elsewhere."""
        return Subnetwork(w, places, variance)

    def subnetwork(
        self, w: Array, variance: Array, count: int, *, rule: str, diagonal: bool, dtype: str = "float32"
    ) -> Subnetwork:
        """Choose `count` of the shared weights, whose prior variances (m,) are given, and infer their posterior at w.

        With `diagonal`, all shared weights, with the diagonal of the curvature alone.
        """
        kind, shared = getattr(torch, dtype), self.unit.shared_at
        if diagonal:
            return infer(self.unit, w, shared, variance, dtype=kind, diagonal=True)
        bent = curvature_diagonal(self.unit, w, shared, dtype=kind)
        chosen = select(variance, bent, count, rule=rule)
        return infer(self.unit, w, shared[chosen], variance[chosen], dtype=kind)


def network_client(client: ClientModel) -> NetworkClient:
    """Read a client's declared network.

    Raises
    ------
    DeclarationError
        Where the model is no network's.
    """
    return NetworkClient(read_network(client), client.initial)
