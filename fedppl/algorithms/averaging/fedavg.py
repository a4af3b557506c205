"""Federated averaging: plain, with a proximal term, and with personal parameters; and what else averages shares.

A client's reply holds ``weighted``, its weight times what is averaged, and ``weight``, so that sums over the clients
are all that the server needs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedppl import contracts, gaussian
from fedppl.algorithms import tolerances as tol
from fedppl.contracts import ClientUpdate, ClientView, Draws, Received, Report
from fedppl.contracts.client import ClientFn
from fedppl.local.gradient_steps import Descent, Objective, check_batches, checked, descend
from fedppl.local.target import at_points, local_mode
from fedppl.settings import between, described, one_of, positive, whole
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, Rng, Status

P = TypeVar("P")


def weighted(value: Array, weight: float) -> dict[str, Array]:
    """A client's contribution to an average."""
    return {"weighted": weight * value, "weight": np.array(weight)}


def average(total: Message) -> Array:
    """Weighted average over the clients, from the sums of their contributions.

    >>> average({"weighted": np.array([2.0, 6.0]), "weight": np.array(2.0)})
    array([1., 3.])
    """
    return np.asarray(total["weighted"] / total["weight"])


def not_positive(reply: Message, name: str) -> str | None:
    """Why a reply is rejected, where a number is not positive, or None."""
    return None if float(reply[name]) > 0 else f"{name!r} is {float(reply[name]):.3g}, and must be positive"


def not_counted(reply: Message, *names: str) -> str | None:
    """Why a reply is rejected, where a number of rows, clients or steps is implausible, or None."""
    for name in names:
        value = float(reply[name])
        if not 1.0 <= value <= tol.MOST_COUNTED or value != np.round(value):
            return f"{name!r} is {value:.3g}, and must be a whole number from 1 to {tol.MOST_COUNTED:.0e}"
    return None


def negative(reply: Message, name: str) -> str | None:
    """Why a reply is rejected, where a distance is negative, or None."""
    return None if float(reply[name]) >= 0 else f"{name!r} is {float(reply[name]):.3g}, and must not be negative"


def relative_change(before: Array, after: Array) -> float:
    """Largest |Δφ| / (1 + |φ|) over coordinates; 0 where there are none.

    >>> relative_change(np.array([0.0, 1.0]), np.array([1.0, 1.0]))
    0.5
    """
    return float(np.max(np.abs(after - before) / (1.0 + np.abs(after)), initial=0.0))


def root_mean_square_change(before: Array, after: Array) -> float:
    """Root mean square of Δφ over coordinates."""
    return float(np.sqrt(np.mean((after - before) ** 2)))


def report(info: NamedTuple, done: bool, message: str) -> Report:
    """Converged, or running with a message of what still moves and which setting helps."""
    return Report(info, Status.CONVERGED if done else Status.RUNNING, "" if done else message)


# Points: a client's loss with its part of the prior, local variables, and draws of a point ----------------------------


class LocalClientState(NamedTuple):
    """What a client keeps to itself: its local parameters."""

    local: Array  # (d_k,)


KeptLocal = LocalClientState | None  # none in its first round, or where it lost it


def client_loss(client: ClientView, prior_share: float) -> Objective:
    """F_k(φ, θ) = −[log p(y_k, θ | φ) + share · log p(φ)] / n_k: averaged over clients by n_k, the log posterior."""
    scale, prior = 1.0 / client.rows, client.layout.prior
    factor = scale * prior_share
    share = 0.0 if client.layout.prior_is_gaussian else prior_share
    return Objective(scale, factor * prior.precision, factor * prior.linear, share)


def pulled(objective: Objective, strength: float, centre: Array) -> Objective:
    """The objective with ½ · strength · ‖φ − centre‖² added."""
    return objective._replace(
        quadratic=objective.quadratic + strength * np.eye(len(centre)), linear=objective.linear + strength * centre
    )


def fitting_local(client: ClientView, local: Array | None) -> Array | None:
    """A client's local variables, if it has any that fit its model."""
    return None if local is None or len(local) != client.local_size else local


def kept_local(client: ClientView, local: Array | None) -> tuple[Array, dict[str, float]]:
    """Local variables to go on from, and a diagnostic when a client with local variables starts blank."""
    fitting = fitting_local(client, local)
    if fitting is not None:
        return fitting, {}
    return client.initial, {"blank": 1.0} if client.local_size else {}


def descended(
    client: ClientView, local: Array | None, phi: Array, objective: Objective, descent: Descent, rng: Rng
) -> tuple[Array, LocalClientState, float, dict[str, float]]:
    """φ and local variables after T steps from φ, how far the local ones moved, and diagnostics."""
    before, info = kept_local(client, local)
    x = descend(client, np.concatenate([phi, before]), objective, descent, rng)
    after = x[len(phi) :]
    return x[: len(phi)], LocalClientState(after), relative_change(before, after), info


def fitting_point(client: ClientView, point: Array | None) -> Array | None:
    """A client's own point (φ, θ_k) to go on from, if it has one that fits its model."""
    return None if point is None or len(point) != client.shared_size + client.local_size else np.asarray(point)


def weights_rule(weights: str) -> str:
    """Check the keyword `weights`."""
    return one_of("weights", weights, ("rows", "equal"), "by number of rows, or all alike")


def tolerance_rule(tolerance: float) -> float:
    """Check the keyword `tolerance`."""
    return between("tolerance", tolerance, 0, 1)


def weight_of(client: ClientView, weights: str) -> float:
    """n_k, or 1."""
    return float(client.rows) if weights == "rows" else 1.0


def draw_point(client: ClientView, phi: Array, local: Array | None, draws: int, chains: int) -> Draws:
    """Equal draws of one point; θ is the mode of p(θ | y, φ) if it is not given."""
    local = local_mode_at(client, phi) if local is None else local
    shared, own = (np.tile(point, (chains, draws, 1)) for point in (phi, local))
    return Draws(shared, own, {"point_estimate": 1.0})


def local_mode_at(client: ClientView, phi: Array) -> Array:
    """The mode of p(θ | y, φ)."""
    arrived, theta = local_mode(client, phi)
    if not arrived:
        raise LocalFailure("no mode of the local variables was found at the shared estimate; look at the data")
    return theta


# FedAvg and FedProx ---------------------------------------------------------------------------------------------------


class AverageState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)
    prior_share: float  # of log p(φ) in each client's loss, 1 / K


class AverageInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # largest |Δφ| / (1 + |φ|)
    local_change: float  # the same of clients' local variables, averaged over clients


def FedAvg(
    *,
    learning_rate: float,
    steps: int = 20,
    batch_size: int | None = None,
    weights: str = "rows",
    tolerance: float = 1e-6,
) -> contracts.Algorithm[AverageState, LocalClientState]:
    r"""Federated averaging of local gradient steps.

    .. math:: \phi_k = \phi \text{ after } T \text{ steps } \phi \leftarrow \phi - \eta \nabla F_k(\phi), \qquad
              \phi \leftarrow \frac{\sum_k n_k \phi_k}{\sum_k n_k}, \qquad
              F_k = -\frac{\log p(y_k \mid \phi) + \frac1K \log p(\phi)}{n_k}

    With one full-gradient step (``steps=1``) this is gradient descent on the log posterior, and its fixed point the
    mode. Local variables take their steps along with φ, and stay at the client.

    Parameters
    ----------
    learning_rate
        Learning rate η for the *mean* loss over a client's rows, below 2 / λ_max of its curvature. Choose it by
        `fedppl.search.validation_loss`.
    steps
        Number T of local gradient steps a round.
    batch_size
        Number of rows a step; None for all of them. Batches come from shuffled data, without replacement in an epoch;
        the log density has to be a sum over rows.
    weights
        Clients' weights in the average: "rows" (n_k) or "equal".
    tolerance
        Bound on the change of a coordinate in a round, relative to ``1 + |φ|``, below which a fit has converged. The
        clients' local variables, on average over clients, are held to it too: φ may stand still while they still move.

    Returns
    -------
    Algorithm
        Its fit has a point estimate (``fit.estimate``) and no posterior.

    Notes
    -----
    *When this fails.* With T > 1 and clients that differ, the fixed point is not the posterior's mode: clients drift
    to their own modes between averages. A learning rate above 2 / λ_max diverges, and the client says so.

    References
    ----------
    .. [1] McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized data.
    .. [2] FedLin, section 6.2.
    """
    return _fedavg("FedAvg", checked(learning_rate, steps, batch_size), weights, tolerance)


def FedProx(
    *,
    learning_rate: float,
    mu: float,
    steps: int = 20,
    batch_size: int | None = None,
    weights: str = "rows",
    tolerance: float = 1e-6,
) -> contracts.Algorithm[AverageState, LocalClientState]:
    r"""Federated averaging with a proximal term in each client's loss.

    .. math:: \phi_k = T \text{ gradient steps from } \phi \text{ on } F_k(\cdot) + \frac{\mu}{2} \Vert \cdot - \phi
              \Vert^2, \qquad \phi \leftarrow \frac{\sum_k n_k \phi_k}{\sum_k n_k}

    F_k is the client's mean loss with its share of the prior, as in `FedAvg`. The term holds shared parameters alone.

    Parameters
    ----------
    learning_rate
        Learning rate η for the mean loss, below 2 / (λ_max + μ).
    mu
        Strength μ of the proximal term, in units of the mean loss. 0 is `FedAvg`.
    steps, batch_size, weights, tolerance
        As in `FedAvg`.

    Returns
    -------
    Algorithm
        Its fit has a point estimate (``fit.estimate``) and no posterior.

    Notes
    -----
    *When this fails.* μ makes the clients' drift smaller, not zero (`SCAFFOLD` does), and a large μ is slow.

    References
    ----------
    .. [1] Li et al. (2020), Federated optimization in heterogeneous networks, eq. 2 and Algorithm 2.
    """
    mu = between("mu", mu, 0, np.inf, "[)", "0 is FedAvg")
    descent = checked(learning_rate, steps, batch_size)
    if descent.learning_rate * mu >= 2:
        raise DeclarationError(f"learning_rate={learning_rate} times mu={mu} must be below 2, or steps diverge.")
    return _fedavg("FedProx", descent, weights, tolerance, mu=mu)


def _fedavg(
    name: str, descent: Descent, weights: str, tolerance: float, mu: float | None = None
) -> contracts.Algorithm[AverageState, LocalClientState]:
    """FedAvg, or FedProx with `mu`."""
    proximal = {} if mu is None else {"mu": mu}
    settings = described(descent, **proximal, weights=weights, tolerance=tolerance)
    update = functools.partial(_update_client, descent=descent, weights=weights_rule(weights), mu=mu)
    return averaging(name, settings, descent, tolerance, update, contracts.Result(final_message, draw, POINT))


def averaging(
    name: str,
    settings: dict[str, str],
    descent: Descent,
    tolerance: float,
    update_client: ClientFn[P],
    result: contracts.Result[AverageState, P],
) -> contracts.Algorithm[AverageState, P]:
    """An algorithm whose server averages φ over the clients that replied."""
    return contracts.Algorithm[AverageState, P](
        name=name,
        settings=settings,
        init=_init,
        broadcast=broadcast,
        update_client=update_client,
        update_server=functools.partial(_update_server, tolerance=tolerance_rule(tolerance)),
        replies=contracts.Replies(
            lambda state: {"weighted": state.phi.shape, "weight": (), "local_change": ()}, reject, contracts.always
        ),
        result=result,
        needs=contracts.Needs(functools.partial(check_batches, batch_size=descent.batch_size)),
        disclosure=contracts.Disclosure(functools.partial(at_points, name="phi")),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> AverageState:
    """Start at the mean of the prior."""
    return AverageState(gaussian.mean(layout.prior), 1.0 / len(clients))


def broadcast(state: AverageState, client_id: str) -> Message:
    """φ, and the client's share of its prior."""
    return {"phi": state.phi, "prior_share": np.array(state.prior_share)}


def _update_client(
    client: ClientView,
    personal: KeptLocal,
    message: Message,
    rng: Rng,
    *,
    descent: Descent,
    weights: str,
    mu: float | None,
) -> ClientUpdate[LocalClientState]:
    """T steps from φ on the client's own loss, with the proximal term if there is one."""
    phi, objective = np.asarray(message["phi"], dtype=float), client_loss(client, float(message["prior_share"]))
    if mu is not None:
        objective = pulled(objective, mu, phi)
    return ClientUpdate(*stepped(client, personal and personal.local, phi, objective, rng, descent, weights))


def stepped(
    client: ClientView, local: Array | None, phi: Array, objective: Objective, rng: Rng, descent: Descent, weights: str
) -> tuple[LocalClientState, Message, dict[str, float]]:
    """Local variables after T steps from φ, a reply that is ready to be added up, and diagnostics."""
    after, kept, moved, info = descended(client, local, phi, objective, descent, rng)
    weight = weight_of(client, weights)
    return kept, {**weighted(after, weight), "local_change": np.array(weight * moved)}, info


def reject(state: Any, reply: Message) -> str | None:
    """A weight must be a number of rows, and a distance not negative."""
    return not_counted(reply, "weight") or negative(reply, "local_change")


def _update_server(state: AverageState, received: Received, *, tolerance: float) -> tuple[AverageState, Report]:
    """φ is the weighted average of the replies."""
    if not received.clients:
        return state, Report(AverageInfo(np.nan, np.nan))
    total, phi = received.total, average(received.total)
    info = AverageInfo(relative_change(state.phi, phi), float(total["local_change"] / total["weight"]))
    moved = f"φ moved by {info.change:.2g}, local variables by {info.local_change:.2g} in the last round"
    done = info.change < tolerance and info.local_change < tolerance
    return state._replace(phi=phi), report(info, done, f"{moved}; raise rounds=, or change learning_rate=")


def final_message(state: Any, client_id: str) -> Message:
    """φ."""
    return {"phi": state.phi}


def draw(
    client: ClientView, personal: KeptLocal, message: Message, draws: int, chains: int, rng: Rng, *, name: str = "phi"
) -> Draws:
    """The client's point: the shared parameters, by their name in the message, and its own local ones."""
    phi = np.asarray(message[name], dtype=float)
    return draw_point(client, phi, fitting_local(client, personal and personal.local), draws, chains)


POINT = contracts.Point[Any](lambda state: state.phi)


# Ditto: φ as in FedAvg, and each client's own parameters pulled towards it -------------------------------------------


class DittoClientState(NamedTuple):
    """What a client keeps to itself."""

    local: Array  # (d_k,) its local variables beside φ
    point: Array  # (m + d_k,) v_k: its copy of the shared and of the local variables


_KeptPersonal = DittoClientState | None  # none in its first round, or where it lost it


class _DittoSettings(NamedTuple):
    descent: Descent
    personal: Descent  # of the steps on v_k
    lam: float
    weights: str


def Ditto(
    *,
    learning_rate: float,
    lam: float,
    steps: int = 20,
    personal_steps: int | None = None,
    personal_rate: float | None = None,
    batch_size: int | None = None,
    weights: str = "rows",
    tolerance: float = 1e-6,
) -> contracts.Algorithm[AverageState, DittoClientState]:
    r"""Personal parameters near the shared ones of federated averaging.

    .. math:: v_k \leftarrow v_k - \eta_v \left(\nabla F_k(v_k) + \lambda (v_k - \phi)\right), \qquad
              \phi \text{ as in FedAvg}

    v_k stays at the client and never travels; φ does not depend on it. λ pulls the shared coordinates of v_k only.
    λ = 0 leaves every client to itself (with its share, p(φ)^(1/K), of the prior), λ → ∞ gives φ to all.
    ``fit.client(k)`` has v_k, ``fit.estimate`` has φ.

    Parameters
    ----------
    learning_rate, steps
        Learning rate and number of the steps on φ, as in `FedAvg`.
    lam
        Strength λ of the pull towards φ, in units of the mean loss over a client's rows. Choose it by
        `fedppl.search.validation_loss`.
    personal_steps
        Number of steps on v_k a round; by default as many as on φ.
    personal_rate
        Learning rate η_v of the steps on v_k, below 2 / (λ_max + λ); by default `learning_rate`.
    batch_size, weights, tolerance
        As in `FedAvg`; batches hold for both.

    Returns
    -------
    Algorithm
        Its fit has a point estimate (``fit.estimate``) and no posterior.

    Notes
    -----
    A client that has no v_k, in its first round or because it lost it, starts from φ and reports ``blank``. A new
    client takes `personal_steps` steps from φ when its posterior is asked for.

    *When this fails.* The fit has converged when φ has; v_k may lag behind where a client was asked in few rounds, or
    `personal_steps` or `personal_rate` are small. One λ for all clients is too much for large ones or too little for
    small ones; `EP` weighs each by its data.

    References
    ----------
    .. [1] Li et al. (2021), Ditto: fair and robust federated learning through personalization, Algorithm 1.
    .. [2] FedLin, section 6.2.
    """
    lam = between("lam", lam, 0, np.inf, "[)")
    descent = checked(learning_rate, steps, batch_size)
    personal = descent._replace(
        learning_rate=descent.learning_rate if personal_rate is None else positive("personal_rate", personal_rate),
        steps=descent.steps if personal_steps is None else whole("personal_steps", personal_steps),
    )
    if personal.learning_rate * lam >= 2:
        name = "learning_rate" if personal_rate is None else "personal_rate"
        raise DeclarationError(f"{name}={personal.learning_rate} times lam={lam} must be below 2, or steps diverge.")
    settings = _DittoSettings(descent, personal, lam, weights_rule(weights))
    rates = {"lam": lam, "personal_steps": personal.steps, "personal_rate": personal.learning_rate}
    return averaging(
        "Ditto",
        described(descent, **rates, weights=weights, tolerance=tolerance),
        descent,
        tolerance,
        functools.partial(_update_ditto, settings=settings),
        contracts.Result(broadcast, functools.partial(_draw_personal, settings=settings), POINT),
    )


def _update_ditto(
    client: ClientView, personal: _KeptPersonal, message: Message, rng: Rng, *, settings: _DittoSettings
) -> ClientUpdate[DittoClientState]:
    """FedAvg's reply, and steps on v_k with this round's φ."""
    phi, objective = np.asarray(message["phi"], dtype=float), client_loss(client, float(message["prior_share"]))
    before = personal and personal.local
    kept, reply, info = stepped(client, before, phi, objective, rng, settings.descent, settings.weights)
    v = fitting_point(client, personal and personal.point)
    if v is None:
        v, info = np.concatenate([phi, kept_local(client, before)[0]]), {**info, "blank": 1.0}
    v = _personal_steps(client, v, message, rng, settings)
    return ClientUpdate(DittoClientState(kept.local, v), reply, info)


def _personal_steps(client: ClientView, v: Array, message: Message, rng: Rng, settings: _DittoSettings) -> Array:
    """v_k after its steps on F_k + λ/2 ‖v − φ‖²."""
    objective = client_loss(client, float(message["prior_share"]))
    objective = pulled(objective, settings.lam, np.asarray(message["phi"], dtype=float))
    try:
        return descend(client, v, objective, settings.personal, rng)
    except LocalFailure as failure:
        rates = f"personal_rate={settings.personal.learning_rate:g} or lam={settings.lam:g}"
        raise LocalFailure(f"personal gradient steps diverged; lower {rates}") from failure


def _draw_personal(
    client: ClientView,
    personal: _KeptPersonal,
    message: Message,
    draws: int,
    chains: int,
    rng: Rng,
    *,
    settings: _DittoSettings,
) -> Draws:
    """v_k; a client that has none takes its steps from φ and the mode of its local variables there."""
    v, m = fitting_point(client, personal and personal.point), client.shared_size
    if v is None:
        phi = np.asarray(message["phi"], dtype=float)
        arrived, local = local_mode(client, phi)
        start = np.concatenate([phi, local if arrived else client.initial])
        v = _personal_steps(client, start, message, rng, settings)
    return draw_point(client, v[:m], v[m:], draws, chains)
