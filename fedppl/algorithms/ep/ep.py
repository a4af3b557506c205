"""Expectation propagation: the server holds the sites, clients answer with tilted moments.

Two phases. Warm start (federated Newton): each client expands log f_k at the current point; the expansions are
the sites. Refinement (EP): each client matches moments of its tilted distribution. Always q = prior x Π sites.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from fedppl import contracts, gaussian, settings
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.ep import _rounds, _trust
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep._rounds import EPState, Look
from fedppl.algorithms.ep.sites import Sites, say_if_large
from fedppl.contracts import Asked, ClientUpdate, ClientView, LocalInference, LogEvidence, Received, Report
from fedppl.contracts.algorithm import WithoutClient
from fedppl.local.log_factors import factor
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, draw_target, local_inference, pack_target, unpack_target
from fedppl.numerics import importance
from fedppl.numerics import tolerances as common
from fedppl.numerics.importance import normalise
from fedppl.numerics.streams import standard_normal, stream_of
from fedppl.settings import some_of
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, NotConvergedError, Rng


class Matching(NamedTuple):
    """How moments are matched, at the clients and at the server."""

    local: LocalInference
    tolerance: float
    damping: float  # the largest that is tried
    structure: str | Sequence[Sequence[str]]


def EP(
    *,
    local: LocalInference | None = None,
    tolerance: float = 0.01,
    damping: float = 1.0,
    warm_start: bool = True,
    starts: int | str = "auto",
    structure: str | Sequence[Sequence[str]] = "full",
    trust: float | None = None,
) -> contracts.Algorithm[EPState, None]:
    r"""Federated expectation propagation with server-held sites (FedLin, Algorithms 2 and 3).

    .. math:: q(\phi) = p(\phi) \prod_k q_k(\phi), \qquad
              q_k \leftarrow q_k \left(\frac{\mathrm{proj}[f_k\, q_{-k}]}{q}\right)^{\delta}

    Parameters
    ----------
    local
        Local inference that gives tilted moments; by default `NestedLaplace`.
    tolerance
        Largest move of a mean in posterior sds, and of an sd as a fraction, over a sweep of all clients with which
        the fit has converged. Where clients report a larger Monte Carlo error, rounds are averaged until that error
        is at most 0.2 posterior sds over the whole of q, and the clients' moves, averaged with their signs, are below
        three times it; the largest of the clients' errors counts no more than that client's replies scatter.
    damping
        Largest δ; halved in a round until the global precision and every cavity are positive definite.
    warm_start
        Whether federated Newton rounds come first, where the local inference offers expansions. They have a budget of
        their own, 25 expansions a client, and do not count towards ``rounds=``. The point moves when every client has
        answered there.
    starts
        Number of warm starts, at most 1000: the first from the prior mean, two from images of its mode (about the
        prior mean, and with variables of equal priors, or the elements of a vector, in reversed order), the others
        from quasi-random points of the prior. EP goes on from the mode with the most mass; where others have more than
        a thousandth of the mass, they are named, and the fit is not called converged. "auto" is 4 where clients are in
        this process and all answer in a round, with `warm_start` and without `trust`, and else 1; where the first
        search does not arrive, there are no others.
    structure
        Form of the precision: "full", "diagonal", or a partition of the shared names into blocks.
    trust
        Bound c on how far one client may pull the shared mean over the whole run, in sds of what the others know (see
        Notes), or None.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        For settings out of range or a partition that is none.

    Notes
    -----
    *When this fails.* The Gaussian family cannot follow a skewed posterior. The skewness that the clients' factors
    add up to is reported (``fit.idata["fit"]["skewness"]``); above about 1, distrust sd and tails of that margin.
    Nor can it follow the heavy tails of a mean of few clients: by how much sds may be too small is estimated
    (``fit.summary().attrs["sd_shortfall"]``) and reported from 5 % on. From 10 % on, or with a skewness of 0.3 that
    several clients make, the fit is not called converged: `Sums` gives the posterior itself. Sites of rough local
    moments (few NUTS draws) can oscillate: raise `draws` or lower `damping`.

    Where a client's rows are not in this process, as at a site of its own or with a summary, and it pulls a mean by
    more than 20 sds of what all others know, the fit is not called converged without `trust`.

    *With* `trust` *= c*, clients' sites are drawn in, where need be, so that in every round of both phases

    .. math:: |\mu - \mu_{-k}|_i \le c\, \mathrm{sd}_{-k,i}, \qquad
              \Vert \mu - \mu_{-k} \Vert_{Q_{-k}} \le \chi_m(c)

    for every client k and coordinate i, where -k is q without the client's site (its cavity) and χ_m(c) is the quantile
    of χ with m degrees of freedom that has the two-sided tail of c sds. Under the model honest clients stay within that
    with the probability of c sds or better, however many of the rows they have. A client whose site is drawn in stays
    held back until later replies have replaced what was drawn in; it is named, and meanwhile nothing is called
    converged: look at its data. Clients that pull by nearly c are named, too. An outlier is held back as well, and so
    is a client with nearly all rows, where the prior is far off. ``fit.idata["fit"]["pull"]`` has every client's pull,
    and ``fit.idata["rounds"]`` the largest of each round. In the warm start the clients' log densities, which have no
    bound, are not compared.

    `trust` does not protect from a client that pulls by less than c, from clients that lie together, or from one that
    keeps q from converging. It does not bound a client alone; of two, it holds back the one whose data disagree with
    the prior more. It does not protect q's variances: a client's precision is cut only at 10¹⁰ times that of all others
    and the prior, and ignored where it takes away more than half of theirs. Nor does it protect `Fit.log_evidence`.

    References
    ----------
    .. [1] FedLin, section 4.2, eqs. 3 to 8 and Algorithms 2 and 3.
    .. [2] Vehtari et al. (2020), Expectation propagation as a way of life, JMLR 21.
    """
    matching = checked(local, tolerance, damping, structure)
    inference = matching.local
    if trust is not None:
        trust = settings.between(
            "trust", trust, 0, tol.MOST_TRUST, "(]", "it is in posterior sds, such as 3, or None for no bound"
        )
    warm = settings.flag("warm_start", warm_start) and inference.expand is not None
    by_number, alone = not isinstance(starts, str), trust is not None or not warm
    searches = _warm_start.number_of(starts, 1 if alone else tol.AUTO_STARTS)
    if searches > 1 and alone:
        why = f"which trust={trust:g} does not bound" if warm else "and there is no warm start that has them"
        raise DeclarationError(f"starts={starts} compares clients' log densities, {why}; leave one of the two out.")
    return contracts.Algorithm[EPState, None](
        name="EP",
        settings=settings.described(matching, warm_start=warm, starts=starts, trust=trust),
        init=functools.partial(init, matching=matching, warm=warm, starts=searches, asked_for=by_number),
        broadcast=broadcast,
        update_client=functools.partial(_update_client, local=inference),
        update_server=functools.partial(_update_server, matching=matching, trust=trust),
        replies=contracts.Replies(_shapes, _reject),
        result=contracts.Result(
            lambda state, client_id: _sites.conclusion(state.sites, client_id, state.prior_share),
            functools.partial(draw_target, local=inference),
            contracts.Posterior(lambda state: state.sites.q, evidence=evidence, without=_without),
            _details,
            preliminary=lambda state: state.warm_start is not None,
            tests_convergence=True,
            resume=_resume,
        ),
        needs=contracts.Needs(inference.check),
        disclosure=contracts.Disclosure(
            functools.partial(_asks, local=inference),
            at_sites=functools.partial(_at_sites, searches=by_number),
            unseen=_rounds.mark_unseen,
            concludes=at_target,
        ),
    )


def checked(
    local: LocalInference | None, tolerance: float, damping: float, structure: str | Sequence[Sequence[str]]
) -> Matching:
    """Settings of `EP` and `PrivateEP`, checked."""
    tolerance = settings.between("tolerance", tolerance, 0, 1, hint="it is in posterior sds")
    damping = settings.between("damping", damping, 0, 1, "(]", "1 is the undamped step")
    settings.form("structure", structure)
    return Matching(local_inference("local", local, NestedLaplace()), tolerance, damping, structure)


def _at_sites(state: EPState, *, searches: bool) -> EPState:
    """Where clients are at sites of their own, several warm starts have to be asked for by their number."""
    return state._replace(starts=state.starts if searches else None)


def init(
    layout: Layout,
    clients: tuple[str, ...],
    rng: Rng,
    *,
    matching: Matching,
    warm: bool,
    starts: int = 1,
    asked_for: bool = True,
) -> EPState:
    """Flat sites."""
    stream = int(rng.integers(2**31))
    say_if_large(layout, "EP")
    count, m = len(clients), layout.size
    none, nobody = np.zeros(count), np.zeros(count, dtype=bool)
    return EPState(
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / count,
        sites=_sites.empty(layout, clients, _sites.structure_of(matching.structure, layout)),
        warm_start=_warm_start.start(layout, count) if warm else None,
        starts=_warm_start.begin_several(layout, starts, stream, asked_for) if starts > 1 else None,
        steps=_rounds.Steps(matching.damping, 0, np.inf, np.zeros(2 * m), np.full(m, np.nan), 0, nobody, 0.0),
        skewed=_rounds.Skewed(np.zeros(m), np.zeros(m, dtype=np.int64), np.zeros(m)),
        clients=_rounds.OfClients(none, np.zeros((count, m)), none, none, _trust.no_moves(count, m), nobody),
        look=int(Look.NOW if warm else Look.LATER if matching.local.look is not None else Look.DONE),
    )


def broadcast(state: EPState, client_id: str) -> Message:
    """The point to expand at, or q and the client's cavity."""
    if state.warm_start is not None:
        trial = state.warm_start.trial
        return {"point": trial.point, "move": trial.move, "prior_share": np.array(state.prior_share)}
    target = pack_target(state.sites.q, _sites.cavity(state.sites, client_id), state.prior_share)
    return {**target, "look": np.array(float(state.look == Look.NOW))}


def _update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, local: LocalInference
) -> ClientUpdate[None]:
    """Expand log f_k at the point, or match moments of the tilted distribution. Clients keep no state."""
    if _expands(message, local):
        point, move = (np.asarray(message[name], dtype=float) for name in ("point", "move"))
        share, inside = float(message["prior_share"]), message.get("inside")
        return ClientUpdate(None, *_warm_start.expand_along(client, local, point, move, share, inside))
    target = unpack_target(client, message)
    if float(message.get("look", 0.0)) > 0 and local.look is not None:
        mean, root = gaussian.affine(target.global_)
        away = tol.LOOK_AWAY * root.T[: tol.LOOK_AXES]
        local.look(client, np.concatenate([mean[None], mean + away, mean - away]))
    moments = local.tilted(target, rng)
    reply = {
        "mean": moments.mean,
        "precision": gaussian.pack_triangle(moments.precision),
        "skewness": moments.skewness,
        "mc_error": np.array(moments.diagnostics.get("mc_error", 0.0)),
    }
    return ClientUpdate(None, reply, moments.diagnostics)


def _update_server(
    state: EPState, received: Received, *, matching: Matching, trust: float | None
) -> tuple[EPState, Report]:
    """A round of the warm start, or of matching moments."""
    if state.warm_start is not None:
        return _rounds.reported(_rounds.newton_round(state, state.warm_start, received.each, trust))
    return _rounds.reported(_rounds.ep_round(state, received.each, matching.tolerance, matching.damping, trust))


def _shapes(state: EPState) -> dict[str, tuple[int, ...]]:
    """An expansion with values along the step, or moments."""
    m = state.sites.structure.size
    triangle = (m * (m + 1) // 2,)
    if state.warm_start is not None:
        return {"value": (), "gradient": (m,), "hessian": triangle, "ray": tol.LENGTHS.shape}
    return {"mean": (m,), "precision": triangle, "skewness": (m,), "mc_error": ()}


def _reject(state: EPState, reply: Message) -> str | None:
    """Moments must be those of a distribution, an expansion may have any curvature; neither is implausibly large."""
    if state.warm_start is None:
        return _sites.implausible_moments(state.sites, reply)
    # An implausible expansion after a step only shows that the step was too long.
    stepped = bool(np.any(state.warm_start.trial.move))
    return _sites.implausible_values(reply) if stepped else _sites.implausible_expansion(state.sites, reply)


def _expands(message: Message, local: LocalInference) -> bool:
    return "point" in message and local.expand is not None


def _asks(layout: Layout, message: Message, *, local: LocalInference) -> Asked:
    """The points of the warm start, or the target."""
    return _warm_start.asks(layout, message) if _expands(message, local) else at_target(layout, message)


def _details(state: EPState) -> contracts.Details:
    return {
        "last_change": (("rows",), state.steps.last_change),
        "skewness": (("rows",), state.skewed.total),
        "pull": (("client", "rows"), _trust.pulls(state.sites)),
    }


def _resume(first: EPState, last: EPState) -> EPState:
    """Begin with the sites of the clients that the other fit had too; from the prior where q would be improper."""
    old, new = last.sites, first.sites
    if old.structure != new.structure:
        raise DeclarationError("start= is a fit with another structure=; give both the same.")
    if last.warm_start is not None:
        return first
    linear, precision = new.linear.copy(), new.precision.copy()
    both = [client_id for client_id in new.where if client_id in old.where]
    rows, before = _sites.indices(new, both), _sites.indices(old, both)
    linear[rows], precision[rows] = old.linear[before], old.precision[before]
    sites = _sites.update(new, linear, precision)
    if not gaussian.is_proper(sites.q):
        return first
    modes = () if last.starts is None else last.starts.modes
    several = any(_warm_start.are_apart(modes[0], mode) for mode in modes)  # the mode may be another now
    return first if several else first._replace(sites=sites, warm_start=None)


def _without(state: EPState, client_ids: Sequence[str], clients: Mapping[str, ClientView]) -> list[WithoutClient]:
    """The posterior without each of some clients: q over its site."""
    unknown = LogEvidence(np.nan, np.nan)
    return [WithoutClient(_sites.cavity(state.sites, client_id), None, unknown) for client_id in client_ids]


# Log evidence: EP's approximation -------------------------------------------------------------------------------------

# .. math:: Z \approx \frac{\int \tilde p(\varphi) \prod_k \tilde q_k(\varphi)\, d\varphi}
#                             {\int \tilde p(\varphi)\, d\varphi}
#           \prod_k \mathrm E_q\left[\frac{f_k(\varphi)}{\tilde q_k(\varphi)}\right]
#
# (tildes: kernels, without constants). A client's factor is compared with its own site, as if the others' were
# Gaussian.


def evidence(state: EPState, clients: Mapping[str, ClientView]) -> LogEvidence:
    """From the clients that are in this process."""
    sites = state.sites
    if absent := [name for name in sites.where if name not in clients]:
        remedy = "give them to fedppl.load(..., clients=), or, of sites of their own, use fedppl.Sums()"
        raise DeclarationError(f"EP's evidence needs the data of {some_of(absent)}, which are not here: {remedy}.")
    require_known(all(client.has_proper_prior for client in clients.values()))
    ratios = [_log_ratio(clients[client_id], sites, state.prior_share) for client_id in sorted(clients)]
    # Errors that clients have alike add up with their signs, others by their squares.
    log_ratio, variance, shift, unknown = np.sum(ratios, axis=0)
    worst = max(float(np.sqrt(unknown)), abs(shift))
    if worst > common.MOST_NOISE:
        off = f"clients' log densities are uncertain by {worst:.2g} in sum, and EP's evidence would be"
        raise NotConvergedError(f"{off}: declare fewer local variables that depend on each other, or lighter tails.")
    # A prior that is not Gaussian is in the clients' shares, with its constant.
    of_prior = 0.0 if state.prior_share else gaussian.log_integral(sites.prior)
    value = gaussian.log_integral(sites.q) - of_prior + float(log_ratio)
    return LogEvidence(value, float(np.sqrt(variance + max(shift**2, unknown))), "EP")


def require_known(is_proper: bool, off: float = 0.0) -> None:
    """Refuse priors without a normalising constant, and constants that may be off by too much."""
    if not is_proper:
        raise DeclarationError(
            "a prior has no known normalising constant, and so there is no evidence: a pm.Potential, pm.Flat, pm.CAR, "
            "pm.CustomDist with logp=, or a transform that cuts off density. Declare priors that integrate to one."
        )
    if off > common.MOST_NOISE:
        left_out = f"tails of clients' own variables may leave {off:.2g} out of the log evidence"
        raise NotConvergedError(f"{left_out}: declare priors with lighter tails (pm.Normal, or pm.StudentT with nu=4).")


def _log_ratio(client: ClientView, sites: Sites, prior_share: float) -> tuple[float, float, float, float]:
    """log E_q[f_k / site], its variance by the points, its shift by errors of log f_k, and their mean square.

    By points of independent scrambles, not whitened: whitening narrows the spread of distances.
    """
    site = _sites.site(sites, sites.where[client.client_id])
    mean, root = gaussian.affine(sites.q)
    points = (
        mean + standard_normal(len(mean), tol.EVIDENCE_POINTS, stream_of(client.client_id), common.SCRAMBLES) @ root.T
    )
    try:
        of_client = factor(client, points, mean, prior_share)
    except LocalFailure as error:
        raise NotConvergedError(f"client {client.client_id!r} has no EP evidence: {error}") from error
    ratio: Array = of_client.values - gaussian.log_kernel(site, points)
    lost = float(np.mean(~np.isfinite(ratio)))
    k = importance.pareto_k(ratio) if lost <= common.MOST_LOST else np.inf
    if not k <= importance.limit(len(ratio)):
        why = f"Pareto k {k:.2f}" if lost <= common.MOST_LOST else f"{lost:.0%} of the points of q are without a value"
        far = f"client {client.client_id!r} is too far from its Gaussian site for EP's evidence"
        raise NotConvergedError(f"{far} ({why}); use fedppl.Sums().")
    ratio = np.where(np.isfinite(ratio), ratio, -np.inf)
    each = logsumexp(ratio.reshape(common.SCRAMBLES, -1), axis=1)
    value = float(logsumexp(each) - np.log(len(ratio)))
    ratios = np.exp(each - np.log(len(ratio) / common.SCRAMBLES) - value)
    weights, errors = normalise(ratio), np.nan_to_num(of_client.errors)
    shift = float(weights @ errors) + abs(of_client.constant.alike)
    unknown = float(weights @ errors**2) + of_client.constant.by_chance**2
    return value, float(np.var(ratios, ddof=1) / common.SCRAMBLES), shift, unknown
