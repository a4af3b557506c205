"""Whether a network's weights are the model's variables and nothing beside them, read off the declared graph.

What the numbers of a density show disappears beside the rounding of a large one; this does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.nn.outcome import CONTRACT
from fedppl.types import DeclarationError

_SIZES = (1.0, 1e3)  # of weights that are tried


def require_no_potential(parts: _graph.Parts, who: str) -> None:
    """Refuse a ``pm.Potential`` that is a client's own: neither rows nor priors would have it.

    Raises
    ------
    DeclarationError
        Naming it.
    """
    if beside := [term.name for term in parts.model.potentials if term in parts.site_terms]:
        raise DeclarationError(
            f"{who}: {beside} {'is' if len(beside) == 1 else 'are'} pm.Potential of the client's own weights or data, "
            "and an algorithm for networks has the outcome and priors of variables alone. Put such a term into the "
            f"outcome's distribution, pm.CustomDist for example, or into the weights' priors; {CONTRACT}."
        )


def require_own_weights(
    parts: _graph.Parts, flat: Any, slices: Mapping[str, slice], shapes: Mapping[str, tuple[int, ...]], who: str
) -> None:
    """Refuse weights that are computed from the variables of their names, or from other ones.

    Parameters
    ----------
    parts
        The client's model.
    flat
        What the network is given for weights, (d,).
    slices
        Where the weights of each name lie in it.
    shapes
        Shapes of the variables of these names.
    who
        The client, in an error's words.

    Raises
    ------
    DeclarationError
        Naming the weights.
    """
    (flat,) = parts.model.replace_rvs_by_values([flat])
    if read := [v.name for v in parts.data if v in set(ancestors([flat]))]:
        raise DeclarationError(f"{who}: the network's weights are computed from the data {read}; {CONTRACT}.")
    values = {rv.name: parts.model.rvs_to_values[rv] for rv in (*parts.shared, *parts.local)}
    rng, wrong = np.random.default_rng(0), set[str]()
    for size in _SIZES:
        # Numbers that single precision has too.
        given = {name: (size * rng.normal(size=shapes[name])).astype(np.float32) for name in slices}
        replace = {values[name]: pt.constant(one.astype(values[name].type.dtype)) for name, one in given.items()}
        (told,) = clone_replace([flat], replace, rebuild_strict=False)
        found = np.asarray(told.eval(mode=interpreted.PYTHON_MODE))
        wrong |= {name for name, one in given.items() if not np.array_equal(found[slices[name]], one.ravel())}
    if wrong:
        raise DeclarationError(
            f"{who}: the network is given other weights for {[name for name in slices if name in wrong]} than the "
            "variables of these names, and algorithms train those. Pass the variables as they are, and put what is "
            f"computed from them into the module, torch.nn.utils.parametrize for example; {CONTRACT}."
        )
