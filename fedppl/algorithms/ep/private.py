"""EP under differential privacy: each client clips its site and adds Gaussian noise before anything leaves it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedppl import contracts, gaussian, privacy, settings
from fedppl.algorithms.ep import ep
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._private_step import (
    Mechanism,
    PrivateEPState,
    noise_sd,
    precision_weight,
    private_step,
    widened,
)
from fedppl.algorithms.ep._whitening import Frame, frame_of, length, whiten
from fedppl.contracts import ClientUpdate, ClientView, LocalInference, Target
from fedppl.local.target import at_target, draw_target, pack_target, unpack_target
from fedppl.types import Array, Layout, LocalFailure, Message, Rng

logger = logging.getLogger(__name__)


class PrivateEPClientState(NamedTuple):
    """A client's personal state: how often it has released something."""

    releases: int


class _Settings(NamedTuple):
    local: LocalInference
    mechanism: Mechanism
    structure: str | Sequence[Sequence[str]]
    normals: Callable[[int], Array]


def PrivateEP(
    *,
    clip: float,
    noise_multiplier: float,
    releases: int,
    delta: float = 1e-5,
    local: LocalInference | None = None,
    tolerance: float = 0.01,
    damping: float = 1.0,
    structure: str | Sequence[Sequence[str]] = "full",
    _normals: Callable[[int], Array] = privacy.system_normals,
) -> contracts.Algorithm[PrivateEPState, PrivateEPClientState]:
    r"""Federated EP whose clients release nothing but their sites, clipped and with Gaussian noise.

    .. math:: s_k = \min\!\left(1, \frac{C}{\lVert v_k \rVert}\right) v_k + \mathcal N(0, z^2 C^2 I), \qquad
              v_k = \left(L^{-1} (r_k - Q_k \mu),\; w L^{-1} Q_k L^{-\top}\right)

    with q = N(μ, (L Lᵀ)⁻¹), and r_k, Q_k the natural parameters of the client's new site: its tilted distribution
    over its cavity. Off-diagonals count √2-fold, so that the norm is the Frobenius norm. The server knows q, turns s_k
    back into a site and takes EP's step: in the first half of the releases it replaces sites, then it averages them.

    Parameters
    ----------
    clip
        Bound C on the norm of a site, in posterior sds. With K clients and m shared parameters a site ends with a norm
        of about √(2m / K); a few times that is right. Less makes q too wide, more only adds noise: z C √K posterior
        sds a round.
    noise_multiplier
        Sd z of the noise over C; choose it so that ``fedppl.privacy.epsilon(noise_multiplier, releases, delta)`` is
        what you may spend.
    releases
        Largest number of replies of a client in a run; beyond it refuses. A run wants as many rounds, if all take part.
    delta
        Probability δ of the guarantee.
    local
        Local inference that gives tilted moments; by default `NestedLaplace`.
    tolerance, damping, structure
        Settings of `EP`. A diagonal or block structure releases fewer numbers, and so adds less noise.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        For settings out of range.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.PrivateEP(clip=0.1, noise_multiplier=20.0, releases=10).name
    'PrivateEP'

    Notes
    -----
    The guarantee is local and for everything that one client holds: whatever a server asks in a run, and even if it
    lies about q, the replies of a client are (ε, δ)-differentially private under replacing all of its data. Where the
    local computation fails, the old site is released with noise, since failing depends on the data too. The noise comes
    from the operating system and not from the request's seed, which the server chose and could use to subtract it:
    **equal seeds do not give equal numbers here**.

    The count of releases is the client's personal state. At a site of Flower's it lies in the site's folder and counts
    over all runs; who deletes it grants the budget anew, and budgets on the same data add up. In one process it counts
    one run, and lies in that run's checkpoint: an earlier checkpoint that is put back grants again, with fresh noise,
    what was released since, and nothing notices. A reply that is lost on the way was a release.
    ``fit.idata["rounds"]["epsilon"]`` takes every client to have released once in every round so far, and never more
    than `releases` times.

    The noise widens the posterior: its variance in the means, ``fit.idata["fit"]["noise_sd"]`` squared, is part of
    q's. What the noise does to q's precision is not, and stays below half of it in a round.

    *When this fails.* With few clients the noise swamps the data. Where ``clip`` binds to the end, sites are too weak:
    q is then too wide. It begins at the prior without a warm start, and a prior that is very wide costs releases.

    References
    ----------
    .. [1] Dwork, Roth (2014), The algorithmic foundations of differential privacy, appendix A.
    .. [2] Vehtari et al. (2020), Expectation propagation as a way of life, JMLR 21.
    """
    clip = settings.between("clip", clip, 1e-50, 1e50, "[]", "it is in posterior sds")
    noise_multiplier = settings.between("noise_multiplier", noise_multiplier, 1e-50, 1e50, "[]")
    releases = settings.whole("releases", releases)
    delta = settings.between("delta", delta, 0, 1, hint="take it well below 1 / number of clients")
    matching = ep.checked(local, tolerance, damping, structure)
    inference, mechanism = matching.local, Mechanism(clip, noise_multiplier, releases, delta)
    return contracts.Algorithm[PrivateEPState, PrivateEPClientState](
        name="PrivateEP",
        settings=settings.described(matching, **mechanism._asdict()),
        init=functools.partial(_init, matching=matching),
        broadcast=functools.partial(_broadcast, mechanism=mechanism),
        update_client=functools.partial(_update_client, private=_Settings(inference, mechanism, structure, _normals)),
        update_server=functools.partial(
            private_step, mechanism=mechanism, tolerance=matching.tolerance, largest=matching.damping
        ),
        replies=contracts.Replies(
            lambda state: {"site": (length(state.sites.structure),)}, functools.partial(_reject, mechanism=mechanism)
        ),
        result=contracts.Result(
            _final_message,
            functools.partial(draw_target, local=inference),
            contracts.Posterior(lambda state: widened(state.sites.q, state)),
            lambda state: {"last_change": (("rows",), state.ep.last_change), "noise_sd": (("rows",), noise_sd(state))},
            tests_convergence=True,
            reads_personal=False,  # a count of releases
        ),
        needs=contracts.Needs(inference.check),
        disclosure=contracts.Disclosure(at_target, noise_multiplier, concludes=at_target),
        persistent=True,
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, matching: ep.Matching) -> PrivateEPState:
    """Sites that say nothing, and no noise yet."""
    start = ep.init(layout, clients, rng, matching=matching, warm=False)
    return PrivateEPState(start, 0, np.zeros(len(clients)), np.zeros((layout.size, layout.size)))


def _broadcast(state: PrivateEPState, client_id: str, *, mechanism: Mechanism) -> Message:
    """EP's message, and how much more a site's precision counts than its linear when it is clipped."""
    weight = precision_weight(state.sites, mechanism)
    return {**ep.broadcast(state.ep, client_id), "precision_weight": np.array(weight)}


def _update_client(
    client: ClientView, personal: PrivateEPClientState | None, message: Message, rng: Rng, *, private: _Settings
) -> ClientUpdate[PrivateEPClientState]:
    """Release one noised vector, whatever the data are."""
    local, mechanism, structure, normals = private
    spent = 0 if personal is None else personal.releases
    if spent >= mechanism.releases:
        raise LocalFailure(
            f"all releases={mechanism.releases} of this client are used up; a larger number would cost more privacy"
        )
    target = unpack_target(client, message)
    form = _sites.structure_of(structure, client.layout)
    weight = float(message["precision_weight"])
    if not (gaussian.is_proper(target.global_) and 0 < weight < np.inf):  # the server's fault: saying so tells nothing
        raise LocalFailure("the q that came is not positive definite, or its 'precision_weight' is not positive")
    site = privacy.clipped(_site(target, frame_of(target.global_, form, weight), local, rng), mechanism.clip)
    return ClientUpdate(PrivateEPClientState(spent + 1), {"site": site + mechanism.sd * normals(len(site))})


def _final_message(state: PrivateEPState, client_id: str) -> Message:
    """As in EP, widened by the noise."""
    sites, share = state.sites, state.ep.prior_share
    q, cavity = (widened(g, state) for g in (sites.q, _sites.cavity(sites, client_id)))
    return pack_target(q, cavity, share if client_id in sites.where else 0.0)


def _site(target: Target, frame: Frame, local: LocalInference, rng: Rng) -> Array:
    """The client's new site as a vector; the old one, which the server knows, where a new one cannot be had."""
    old = whiten(frame, *gaussian.quotient(target.global_, target.cavity))
    try:
        moments = local.tilted(target, rng)
        covariance = np.asarray(np.linalg.inv(moments.precision), dtype=np.float64)
        tilted = _sites.in_family(moments.mean, covariance, frame.form)
        return old + whiten(frame, tilted.linear - frame.q.linear, tilted.precision - frame.q.precision)
    except Exception:  # any at all: which one it is depends on the data, and a refusal would give that away
        logger.warning("client %s: local computation failed, its old site is sent with noise", target.client.client_id)
        logger.debug("client %s failed", target.client.client_id, exc_info=True)
        return old


def _reject(state: PrivateEPState, reply: Message, *, mechanism: Mechanism) -> str | None:
    """A clipped vector with noise has a bounded norm, but for less than one time in 10²⁰."""
    norm = float(np.linalg.norm(reply["site"]))
    limit = mechanism.clip + 12 * mechanism.sd * np.sqrt(length(state.sites.structure))
    if norm > limit:
        return f"'site' has norm {norm:.3g}, above clip + 12 noise sds √length = {limit:.3g}: it was not clipped"
    return None
