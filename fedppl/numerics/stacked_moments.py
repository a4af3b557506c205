r"""Means and sds of clients' own variables, of many clients by one jitted loop.

.. math:: E[t(\varphi, \theta)] = E_q\Big[\int t(\varphi, \theta)\, p(\theta \mid y_k, \varphi)\, d\theta\Big]

What is inside is integrated by nodes about θ's mode: by few where these tell the same as many, which each client is
asked for, since a rule that does for most of them is off where one has a tail.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.numerics.integral import node_terms, place_node
from fedppl.numerics.marginal import _marginal_near, _origin, _third
from fedppl.numerics.newton import INTEGERS, KERNEL, MATRIX, OK, VECTOR, assign, entry, jit
from fedppl.numerics.stacked import PACKS, _given_terms, _log_sum, _others, _own

_NOTHING = 1e-13  # share of a node that adds nothing to a mean, nor at 200 sds to a variance
_MEANS_SHOW, _VARIANCES_SHOW = 0.002, 0.004  # of a sd, and of a variance, that a few nodes may be off by


@jit
def _add_moments(
    kernel: Any,
    tell: Any,
    x: Any,
    m: int,
    mode: Any,
    factor: Any,
    data: Any,
    nodes: Any,
    log_weights: Any,
    which: Any,
    middle: Any,
    weight: float,
    one: Any,
    two: Any,
) -> bool:
    """Add what θ given φ gives to the mean of `tell` and of its squares, about `middle`; False where that is unknown.

    The rest of θ, which is Gaussian given `which`, is at two points of each axis.
    """
    d, count = mode.shape[0], len(nodes)
    r = d - len(which)
    terms, middles, roots = np.zeros(count), np.zeros((count, d)), np.zeros((count, r, r))
    rest, away = _others(which, d), np.zeros(r)
    if r == 0:
        node_terms(kernel, x, m, mode, factor, data, nodes, log_weights, terms)
    elif not _given_terms(kernel, x, m, mode, factor, data, nodes, log_weights, which, terms, middles, roots):
        return False
    total = _log_sum(terms)
    if not np.isfinite(total):
        return False
    for node in range(count):
        share = np.exp(terms[node] - total)
        if not share > _NOTHING:
            continue
        share *= weight
        if r == 0:
            place_node(x, m, mode, factor, nodes, node)
            apart = tell(x, *data)
            for i in range(len(one)):
                one[i] += share * (apart[i] - middle[i])
                two[i] += share * (apart[i] - middle[i]) ** 2
            continue
        for axis in range(r):  # ± √r L⁻ᵀ e: these have the mean and the covariance of the rest
            for i in range(r - 1, -1, -1):
                total_i = np.sqrt(r) if i == axis else 0.0
                for j in range(i + 1, r):
                    total_i -= roots[node, j, i] * away[j]
                away[i] = total_i / roots[node, i, i]
            for sign in (1.0, -1.0):
                assign(x, m, middles[node])
                for i in range(r):
                    x[m + rest[i]] += sign * away[i]
                apart = tell(x, *data)
                for i in range(len(one)):
                    one[i] += share / (2.0 * r) * (apart[i] - middle[i])
                    two[i] += share / (2.0 * r) * (apart[i] - middle[i]) ** 2
    return True


@jit
def _few_do(
    kernel: Any,
    tell: Any,
    x: Any,
    m: int,
    mode: Any,
    factor: Any,
    data: Any,
    few: Any,
    few_log_weights: Any,
    nodes: Any,
    log_weights: Any,
    which: Any,
    middle: Any,
) -> bool:
    """Whether few nodes tell the same means and variances given φ as all do, to what shows."""
    n = len(middle)
    one, two, other, other_two = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n)
    if not _add_moments(kernel, tell, x, m, mode, factor, data, nodes, log_weights, which, middle, 1.0, one, two):
        return False
    if not _add_moments(
        kernel, tell, x, m, mode, factor, data, few, few_log_weights, which, middle, 1.0, other, other_two
    ):
        return False
    for i in range(n):
        variance = two[i] - one[i] ** 2
        if not abs(other[i] - one[i]) <= _MEANS_SHOW * np.sqrt(max(variance, 0.0)):  # nor where one is no number
            return False
        if not abs(other_two[i] - other[i] ** 2 - variance) <= _VARIANCES_SHOW * variance:
            return False
    return True


@entry(
    KERNEL, KERNEL, MATRIX, VECTOR, MATRIX, PACKS, INTEGERS, MATRIX, VECTOR, MATRIX, VECTOR, INTEGERS, MATRIX, MATRIX
)
def moments_of_many(
    kernel: Any,
    tell: Any,
    draws: Any,
    phi: Any,
    starts: Any,
    packs: Any,
    places: Any,
    few: Any,
    few_log_weights: Any,
    nodes: Any,
    log_weights: Any,
    which: Any,
    means: Any,
    sds: Any,
) -> None:
    """Means and sds of what `tell` makes of (φ, θ), into rows of both (C, r): over draws of φ (S, m), and θ given φ.

    By way of an expansion at φ, with nodes as in `factors_of_many`: a few for clients at which these tell the same at φ
    as all do, and all for the others. What is far from φ weighs little: with many clients q is narrow beside what φ
    does to one of them. NaN where θ has no mode.
    """
    count, m = draws.shape
    d, entries = starts.shape[1], means.shape[1]
    x, A, factor, mode = np.zeros(m + d), np.zeros((d, d)), np.zeros((d, d)), np.zeros(d)
    third, one, two = np.zeros(m + d), np.zeros(entries), np.zeros(entries)
    for row in range(len(places)):
        data = _own(packs, places[row])
        status, origin, output, slope, center, _, scale = _origin(kernel, phi, starts[places[row]], data)
        one[:], two[:] = 0.0, 0.0
        middle = tell(origin, *data)  # about which squares lose no digits
        known, rule, log_rule = status == OK, nodes, log_weights
        if known:
            _third(kernel, origin, m, output, center, data, third)
        if known and len(few):
            assign(x, 0, phi)
            there, _ = _marginal_near(kernel, x, m, origin, slope, third, scale, data, A, factor)
            assign(mode, 0, x[m:])
            if there == OK and _few_do(
                kernel, tell, x, m, mode, factor, data, few, few_log_weights, nodes, log_weights, which, middle
            ):
                rule, log_rule = few, few_log_weights
        for s in range(count):
            if not known:
                break
            assign(x, 0, draws[s])
            there, _ = _marginal_near(kernel, x, m, origin, slope, third, scale, data, A, factor)
            assign(mode, 0, x[m:])
            known = there == OK and _add_moments(
                kernel, tell, x, m, mode, factor, data, rule, log_rule, which, middle, 1.0 / count, one, two
            )
        for i in range(entries):
            means[row, i] = middle[i] + one[i] if known else np.nan
            sds[row, i] = np.sqrt(max(two[i] - one[i] ** 2, 0.0)) if known else np.nan
