"""Consensus Monte Carlo: clients draw from their own posteriors, the server averages the draws one by one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian, settings
from fedppl.algorithms.one_shot.separate import near_posterior
from fedppl.contracts import Algorithm, Draws, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, pack_target, unpack_target
from fedppl.numerics.importance import skewness
from fedppl.run.replies import sum_replies
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, Status

__all__ = ["ConsensusInfo", "ConsensusMonteCarlo", "ConsensusState", "Subposterior"]


class ConsensusState(NamedTuple):
    """What the server knows: sums over the clients heard."""

    prior: Gaussian
    prior_share: float
    clients: tuple[str, ...]
    heard: tuple[str, ...]  # whose replies are in the sums
    included: float  # clients in the sums
    weighted: Array  # (S, m) Σ W_k φ_ks
    weight: Array  # packed Σ W_k
    status: str
    message: str

    @property
    def draws(self) -> Array:
        """The combined draws (S, m) on the unconstrained space; none while nobody has been heard."""
        if not self.included:
            return np.zeros((0, self.weighted.shape[1]))
        return np.asarray(np.linalg.solve(gaussian.unpack_triangle(self.weight), self.weighted.T).T)


class ConsensusInfo(NamedTuple):
    """Diagnostics of this round."""

    heard: float  # clients in the sums so far


class Subposterior(NamedTuple):
    """What a client keeps to itself: what it has sent, to send the same when it is asked again."""

    weighted: Array  # (S, m)
    weight: Array  # packed W_k


def ConsensusMonteCarlo(*, local: LocalInference | None = None, draws: int = 1000) -> Algorithm:
    r"""Average the clients' draws, weighted by their precisions.

    .. math:: \phi_s = \Big(\sum_k W_k\Big)^{-1} \sum_k W_k\, \phi_{k,s}, \qquad
              \phi_{k,s} \sim f_k(\phi)\, p(\phi)^{1/K}, \qquad W_k = \widehat{\mathrm{Cov}}(\phi_{k,\cdot})^{-1}

    Exact up to Monte Carlo error where every f_k is Gaussian. The server reads sums of replies only. Draws of clients
    are independent, so the covariance of the φ_s is (Σ W_k)⁻¹: ``fit.posterior`` has it, with the draws' mean, and
    leaves out the products of clients' errors, which are noise. The φ_s themselves are ``fit.state.draws``, and their
    skewness is ``fit.idata["fit"]["skewness"]``.

    Parameters
    ----------
    local
        How clients draw; by default `NestedLaplace`.
    draws
        S, of every client; more than the number of shared coordinates plus two.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        If `draws` are too few, or, in a fit, where `local` is wrong for the declared model.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.ConsensusMonteCarlo(draws=500).name
    'ConsensusMonteCarlo'

    Notes
    -----
    A client counts once and sends the same draws again when it is asked again. While clients are missing, ``posterior``
    has p(φ)^(1/K) in the place of each; the combined draws lack it.

    *When this fails.* An average of draws is a draw of the product only for Gaussians: skewed or bounded posteriors of
    single clients (a scale τ, a rare event) are averaged to something too symmetric and in the wrong place, and modes
    are averaged away. Clients with few rows leave p(φ)^(1/K) alone, which may be very wide. Compare with `EP`.

    References
    ----------
    .. [1] Scott et al. (2016), Bayes and big data: the consensus Monte Carlo algorithm, section 3, eqs. 2 to 5.
    """
    draws = settings.whole("draws", draws, 4, "better 1000")
    inference = settings.inference("local", local, NestedLaplace())
    return Algorithm(
        name="ConsensusMonteCarlo",
        check=inference.check,
        init_server=functools.partial(_init_server, draws=int(draws)),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, local=inference, draws=int(draws)),
        reply_shapes=lambda state: {"weighted": state.weighted.shape, "weight": state.weight.shape, "count": ()},
        refuse=_refuse,
        update_server=_update_server,
        outcome=_outcome,
        draw=functools.partial(_draw, local=inference, wanted=int(draws)),
        details=lambda state: {"skewness": (("rows",), _skewness(state.draws))},
        posterior=_posterior,
        settings={"local": inference.describe(), "draws": repr(int(draws))},
        tests_convergence=True,
        asks=at_target,
    )


def _init_server(layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, draws: int) -> ConsensusState:
    """Nothing but the prior."""
    del rng
    m = layout.size
    if draws <= m + 2:
        raise DeclarationError(f"draws={draws} of {m} shared coordinates have no precision; use more than {m + 2}.")
    return ConsensusState(
        prior=layout.prior,
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / len(clients),
        clients=clients,
        heard=(),
        included=0.0,
        weighted=np.zeros((draws, m)),
        weight=np.zeros(m * (m + 1) // 2),
        status=Status.RUNNING.value,
        message="",
    )


def _part(state: ConsensusState) -> Gaussian:
    """p(φ)^(1/K), or its Gaussian part."""
    return gaussian.power(state.prior, 1.0 / len(state.clients))


def _broadcast(state: ConsensusState, client_id: str) -> Message:
    """A client's part of the prior."""
    del client_id
    return pack_target(_part(state), _part(state), state.prior_share)


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, local: LocalInference, draws: int
) -> tuple[Subposterior, Message, Mapping[str, float]]:
    """Weighted draws of the client's posterior under its part of the prior, ready to be added up."""
    info: Mapping[str, float] = {}
    if personal is None or personal.weighted.shape != (draws, client.shared_size):
        personal, info = _drawn(client, message, rng, local=local, draws=draws)
    return personal, {"weighted": personal.weighted, "weight": personal.weight, "count": np.array(1.0)}, info


def _drawn(
    client: Any, message: Message, rng: np.random.Generator, *, local: LocalInference, draws: int
) -> tuple[Subposterior, Mapping[str, float]]:
    """Draws, their precision, and what the local inference says of them."""
    sample = local.draw(near_posterior(unpack_target(client, message), local), draws, 1, rng)
    try:
        weight = gaussian.precision_from_draws(sample.shared[0])
    except ValueError as error:
        raise LocalFailure("its draws are constant, collinear or not finite; raise draws=") from error
    return Subposterior(sample.shared[0] @ weight, gaussian.pack_triangle(weight)), sample.diagnostics


def _refuse(state: ConsensusState, reply: Message) -> str | None:
    """A weight is a positive definite matrix, and somebody's."""
    weight = Gaussian(np.zeros(state.weighted.shape[1]), gaussian.unpack_triangle(np.asarray(reply["weight"], float)))
    if not gaussian.is_proper(weight):
        return f"'weight' is not positive definite (smallest eigenvalue {np.linalg.eigvalsh(weight.precision)[0]:.3g})"
    count = float(reply["count"])
    return None if count >= 1 else f"'count' is {count:.3g}, and must be at least 1"


def _update_server(state: ConsensusState, replies: Mapping[str, Message]) -> tuple[ConsensusState, ConsensusInfo]:
    """Add up what was not heard before."""
    new = {name: reply for name, reply in replies.items() if name not in state.heard}
    if not new:
        return state, ConsensusInfo(state.included)
    total, expected = sum_replies(new), len(state.clients)
    count = state.included + float(total["count"])
    done = count >= expected
    state = state._replace(
        heard=tuple(sorted((*state.heard, *new))),
        included=count,
        weighted=state.weighted + total["weighted"],
        weight=state.weight + total["weight"],
        status=(Status.CONVERGED if done else Status.RUNNING).value,
        message="" if done else f"the draws are of {count:g} of {expected} clients; raise rounds=",
    )
    return state, ConsensusInfo(count)


def _posterior(state: ConsensusState) -> Gaussian:
    """The combined draws' mean and the covariance of their average, with the prior's part of clients not heard."""
    said = Gaussian(state.weighted.mean(axis=0), gaussian.unpack_triangle(state.weight))
    return gaussian.product(gaussian.power(state.prior, max(0.0, 1.0 - state.included / len(state.clients))), said)


def _skewness(draws: Array) -> Array:
    count = len(draws)
    return skewness(draws, np.full(count, 1.0 / count)) if count else np.zeros(draws.shape[1])


def _outcome(state: ConsensusState, client_id: str) -> Message:
    """q, the client's part of the prior, and whether its draws are in q."""
    q, known = _posterior(state), client_id in state.clients
    took_part = np.array(1.0 if client_id in state.heard else 0.0)
    return {**pack_target(q, _part(state), state.prior_share if known else 0.0), "took_part": took_part}


def _draw(
    client: Any,
    personal: Any,
    message: Message,
    draws: int,
    chains: int,
    rng: np.random.Generator,
    *,
    local: LocalInference,
    wanted: int,
) -> Draws:
    """Draws of (φ, θ_k) from f_k and what q has of the others: q without what this client said.

    The client knows that; where it has lost it, it draws again, which is right up to Monte Carlo error.
    """
    target = unpack_target(client, message)
    q, part = target.global_, target.cavity
    cavity = q
    if float(message["took_part"]):
        if personal is None or personal.weighted.shape != (wanted, client.shared_size):
            alone = pack_target(part, part, target.prior_share)
            personal, _ = _drawn(client, alone, rng, local=local, draws=wanted)
        said = Gaussian(personal.weighted.mean(axis=0), gaussian.unpack_triangle(personal.weight))
        cavity = gaussian.product(gaussian.quotient(q, said), part)
    return local.draw(target._replace(cavity=cavity), draws, chains, rng)
