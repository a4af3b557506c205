"""Expectation propagation: the server holds the sites, clients answer with tilted moments.

Two phases. Warm start (federated Newton): each client expands log f_k at the current point; the expansions are
the sites. Refinement (EP): each client matches moments of its tilted distribution. Always q = prior x Π sites.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedppl import gaussian, settings
from fedppl.algorithms.ep import _moves, _sites, _trust, _warm_start
from fedppl.algorithms.ep._damping import damped_step, hold_back, named, targets
from fedppl.algorithms.ep._state import EPInfo, EPState
from fedppl.algorithms.ep._warm_start import WarmStart
from fedppl.contracts import Algorithm, Asked, LocalInference
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, draw_target, pack_target, unpack_target
from fedppl.types import Layout, Message, Status

__all__ = ["EP", "EPInfo", "EPState"]

# Expansions a client: a dozen do even from a prior a million times too wide.
_BUDGET = 25.0
# What a client may say of its Monte Carlo error, in posterior sds: NUTS gives no moments of fewer than m + 4 draws.
_MOST_ERROR = 0.5


def EP(
    *,
    local: LocalInference | None = None,
    tolerance: float = 0.01,
    damping: float = 1.0,
    warm_start: bool = True,
    structure: str | Sequence[Sequence[str]] = "full",
    trust: float | None = None,
) -> Algorithm:
    r"""Federated expectation propagation with server-held sites (FedLin, Algorithms 2 and 3).

    .. math:: q(\phi) = p(\phi) \prod_k q_k(\phi), \qquad
              q_k \leftarrow q_k \left(\frac{\mathrm{proj}[f_k\, q_{-k}]}{q}\right)^{\delta}

    Parameters
    ----------
    local
        How clients compute tilted moments; by default `NestedLaplace`.
    tolerance
        Converged when a sweep over all clients moves no mean by more than `tolerance` posterior sds and no sd
        by more than that fraction. Where clients report a larger Monte Carlo error, rounds are averaged until that
        error is at most 0.2 posterior sds over the whole of q, and until the clients' moves, averaged with their
        signs, are below three times it; the word of the client that claims most counts there only as far as its
        replies scatter.
    damping
        Largest δ that is tried; it is halved until the global precision and every cavity are positive definite.
    warm_start
        Start with federated Newton rounds where the local inference offers expansions. They have a budget of their
        own, 25 expansions a client, and do not count towards ``rounds=``. A point is left when every client has
        answered there: where few are asked in a round, that takes many rounds.
    structure
        Form of the precision: "full", "diagonal", or a partition of the shared names into blocks.
    trust
        None, or how far one client may pull the shared mean over the whole run, c sds of what the others know: see
        Notes. Without others, for one client, it does nothing.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        For settings out of range or a partition that is none.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.EP(tolerance=0.02).name
    'EP'

    Notes
    -----
    *When this fails.* The Gaussian family cannot follow a skewed posterior. The skewness that the clients' factors
    add up to is reported (``fit.idata["fit"]["skewness"]``); above about 1, distrust sd and tails of that margin.
    Nor can it follow the heavy tails of a mean of few clients: how much too small the sds may be is estimated
    (``fit.summary().attrs["sd_shortfall"]``) and said in the message from 5 % on.
    Sites of rough local moments (few NUTS draws) can oscillate: the status then says so; raise `draws` or lower
    `damping`.

    *With* `trust` *= c*, clients' sites are drawn in, where need be, so that in every round of both phases

    .. math:: |\mu - \mu_{-k}|_i \le c\, \mathrm{sd}_{-k,i}, \qquad
              \Vert \mu - \mu_{-k} \Vert_{Q_{-k}} \le \chi_m(c)

    for every client k and coordinate i, where -k is q without the client's whole site (its cavity) and χ_m(c) is the
    quantile of χ with m degrees of freedom that has the two-sided tail of c sds (c for m = 1). Under the model honest
    clients stay within that with the probability of c sds or better, however many of the rows they have. Whose site is
    drawn in is named, with where it pulls, and while one is, nothing is called converged: look at that client's data.
    A client that truly is an outlier is held back too, and rightly; so is one with nearly all rows, where the prior is
    far off. ``fit.idata["fit"]["pull"]`` has every client's pull, with or without `trust`, and the largest of a round
    stands in ``fit.idata["rounds"]``. In the warm start the clients' log densities, which nothing bounds, are not
    compared.

    Who is held back stays so until later replies have replaced what was drawn in, and while a run goes on, who pulls by
    nearly c is named, too.

    Not protected from: a client that pulls by less than c; q's variances, since what one client says of precision is
    cut only at 10¹⁰ times that of all others and the prior (and no client takes more than half of the others' away, or
    it has no say); clients that lie together; of two clients, the one whose data disagree with the prior less; and a
    client that keeps q from converging. Below c, a client that moves q on and on is named only where rounds are
    averaged.

    References
    ----------
    .. [1] FedLin, section 4.2, eqs. 3 to 8 and Algorithms 2 and 3.
    .. [2] Vehtari et al. (2020), Expectation propagation as a way of life, JMLR 21.
    """
    tolerance = settings.between("tolerance", tolerance, 0, 1, hint="it is in posterior sds")
    damping = settings.between("damping", damping, 0, 1, "(]", "1 is the undamped step")
    if trust is not None:
        trust = settings.between(
            "trust", trust, 0, 1e6, "(]", "it is in posterior sds, such as 3, or None for no bound"
        )
    settings.form("structure", structure)
    inference = settings.inference("local", local, NestedLaplace())
    warm = settings.flag("warm_start", warm_start) and inference.expand is not None
    return Algorithm(
        name="EP",
        check=inference.check,
        init_server=functools.partial(_init_server, form=structure, damping=damping, warm=warm),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, local=inference),
        reply_shapes=_reply_shapes,
        refuse=_refuse,
        update_server=functools.partial(_update_server, tolerance=tolerance, largest=damping, trust=trust),
        outcome=outcome,
        draw=functools.partial(draw_target, local=inference),
        details=lambda state: {
            "last_change": (("rows",), state.last_change),
            "skewness": (("rows",), state.skewness),
            "pull": (("client", "rows"), _trust.pulls(state.sites)),
        },
        posterior=lambda state: state.sites.q,
        preliminary=lambda state: state.warm_start is not None,
        settings={
            "local": inference.describe(),
            "tolerance": repr(tolerance),
            "damping": repr(damping),
            "warm_start": repr(warm),
            "structure": repr(structure),
            "trust": repr(trust),
        },
        tests_convergence=True,
        asks=functools.partial(_asks, local=inference),
    )


def _init_server(
    layout: Layout,
    clients: tuple[str, ...],
    rng: np.random.Generator,
    *,
    form: str | Sequence[Sequence[str]],
    damping: float,
    warm: bool,
) -> EPState:
    del rng
    return EPState(
        sites=_sites.empty(layout, clients, _sites.structure_of(form, layout)),
        warm_start=_warm_start.start(layout, len(clients)) if warm else None,
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / len(clients),
        damping=damping,
        change=np.inf,
        averaging=0,
        heard=np.zeros(len(clients), dtype=bool),
        sweep_change=0.0,
        last_change=np.full(layout.size, np.nan),
        skewness=np.zeros(layout.size),
        skewed_by=np.zeros(layout.size, dtype=np.int64),
        skewness_without=np.zeros(layout.size),
        held=np.zeros(len(clients)),
        held_back=np.zeros(len(clients), dtype=np.int64),
        pull=np.zeros((len(clients), layout.size)),
        errors=np.zeros(len(clients)),
        noise=np.zeros(len(clients)),
        moves=_moves.start(len(clients), layout.size),
        heading=np.zeros(2 * layout.size),
        falls=0,
        status=Status.RUNNING.value,
        message="",
    )


def _broadcast(state: EPState, client_id: str) -> Message:
    """The point to expand at, or q and the client's cavity."""
    if state.warm_start is not None:
        search = state.warm_start
        return {"point": search.point, "move": search.move, "prior_share": np.array(state.prior_share)}
    return pack_target(state.sites.q, _sites.cavity(state.sites, client_id), state.prior_share)


def _expands(message: Message, local: LocalInference) -> bool:
    return "point" in message and local.expand is not None


def _asks(layout: Layout, message: Message, *, local: LocalInference) -> Asked:
    """The point, which a client can leave out where a step led to it, and those along that step; or the target."""
    if not _expands(message, local):
        return at_target(layout, message)
    point, move = (np.asarray(message[name], dtype=float) for name in ("point", "move"))
    if not np.any(move):
        return Asked(point[None], np.zeros((0, layout.size)))
    return Asked(np.zeros((0, layout.size)), np.vstack([point, _warm_start.along(point, move)]))


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, local: LocalInference
) -> tuple[Any, Message, Mapping[str, float | str]]:
    """Expand log f_k at the point, or match moments of the tilted distribution. Clients keep no state."""
    if _expands(message, local):
        point, move = (np.asarray(message[name], dtype=float) for name in ("point", "move"))
        share, inside = float(message["prior_share"]), message.get("inside")
        reply, info = _warm_start.expand_along(client, local, point, move, share, inside)
        return personal, reply, info
    moments = local.tilted(unpack_target(client, message), rng)
    reply = {
        "mean": moments.mean,
        "precision": gaussian.pack_triangle(moments.precision),
        "skewness": moments.skewness,
        "mc_error": np.array(moments.diagnostics.get("mc_error", 0.0)),
    }
    return personal, reply, moments.diagnostics


def outcome(state: EPState, client_id: str) -> Message:
    """q and everything in it but this client's site; for a client that had no part in it, q twice."""
    q = state.sites.q
    if client_id not in state.sites.where:
        return pack_target(q, q, 0.0)
    return pack_target(q, _sites.cavity(state.sites, client_id), state.prior_share)


def _reply_shapes(state: EPState) -> dict[str, tuple[int, ...]]:
    m = state.sites.structure.size
    triangle = (m * (m + 1) // 2,)
    if state.warm_start is not None:
        return {"value": (), "gradient": (m,), "hessian": triangle, "ray": _warm_start.LENGTHS.shape}
    return {"mean": (m,), "precision": triangle, "skewness": (m,), "mc_error": ()}


def _refuse(state: EPState, reply: Message) -> str | None:
    """Moments must be those of a distribution, an expansion may have any curvature; neither beyond all measure."""
    if state.warm_start is None:
        return _sites.absurd_moments(state.sites, reply)
    # A step may lead anywhere: an expansion there that is beyond measure only says that it was too long.
    stepped = bool(np.any(state.warm_start.move))
    return _sites.absurd_values(reply) if stepped else _sites.absurd_expansion(state.sites, reply)


def _update_server(
    state: EPState, replies: Mapping[str, Message], *, tolerance: float, largest: float, trust: float | None
) -> tuple[EPState, EPInfo]:
    if state.warm_start is not None:
        return _newton_round(state, state.warm_start, replies, trust)
    return _ep_round(state, replies, tolerance, largest, trust)


def _newton_round(
    state: EPState, before: WarmStart, replies: Mapping[str, Message], trust: float | None
) -> tuple[EPState, EPInfo]:
    """One round of the warm start; on arrival, sites and q stay and refinement begins."""
    sites, after, bounded = state.sites, before._replace(spent=before.spent + 1.0), None
    if replies:
        sites, after, bounded = _warm_start.step(sites, before, replies, trust)
    info = EPInfo("warm start", after.change, np.inf, 1.0, after.objective, 0.0, np.nan)
    over = not after.arrived and after.spent >= _BUDGET
    state = state._replace(
        sites=sites,
        warm_start=None if after.arrived else after,
        message="" if after.arrived else _warm_start.why_not_arrived(sites, after),
        status=(Status.STALLED if over else Status.RUNNING).value,
    )
    if bounded is not None and trust is not None:
        state, info = hold_back(state, info, _sites.indices(sites, replies), bounded, trust, 1.0)
        if not after.arrived and np.all(np.isnan(bounded.pull)):
            alone = _warm_start.pulls_alone(sites, before.point)
            state = state._replace(message="; ".join(filter(None, (alone, state.message))))
    return named(state, trust), info


def _ep_round(
    state: EPState, replies: Mapping[str, Message], tolerance: float, largest: float, trust: float | None
) -> tuple[EPState, EPInfo]:
    """Moment matching: the clients' tilted natural parameters against q's."""
    if not replies:
        return state, EPInfo("EP", 0.0, 0.0, state.damping, np.nan, 0.0, np.nan)
    sites, q, form = state.sites, state.sites.q, state.sites.structure
    target_linear, target_packed = targets(sites, replies)
    # A prior with correlations puts q outside a smaller family: moments are matched with what the family holds of it.
    whole = form.blocks is not None and len(form.blocks) == 1
    inside = q if whole else _sites.in_family(gaussian.mean(q), gaussian.covariance(q), form)
    # Cumulants of log factors add, so the small skewnesses of K tilted distributions make the posterior's.
    skewness = np.stack([reply["skewness"] for reply in replies.values()]) * len(sites.where) / len(replies)
    return damped_step(
        state,
        _sites.indices(sites, replies),
        target_linear - inside.linear,
        target_packed - _sites.in_structure(inside.precision, form),
        mc_errors=np.minimum([float(reply["mc_error"]) for reply in replies.values()], _MOST_ERROR),
        skewness=skewness,
        tolerance=tolerance,
        largest=largest,
        trust=trust,
    )
