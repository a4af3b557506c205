"""Whether declared priors integrate to one, as an evidence needs, and the constants that PyMC's densities leave out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.transforms import _default_transform
from pymc.logprob.abstract import _logprob
from pytensor.graph.traversal import ancestors
from scipy.special import gammaln

_WITHOUT_CONSTANT = {"CARRV", "ICARRV", "CustomDistRV"}  # PyMC leaves it out, or nobody knows it


def unnormalised(model: Any) -> list[str]:
    """Names of free variables whose density is not known to integrate to one."""
    return [rv.name for rv in model.free_RVs if not _is_density(model, rv)]


def left_out(model: Any, variables: Iterable[Any]) -> float:
    """Log of what the densities of these have to be multiplied by.

    Of K independent values of one distribution, in order, PyMC has the density of any order, K! times too small.
    """
    return sum(_of_order(rv) for rv in variables if rv in model.free_RVs and _is_in_order(model, rv))


def _of_order(rv: Any) -> float:
    *rows, length = rv.type.shape
    return float(np.prod(rows) * gammaln(length + 1.0))


def _is_in_order(model: Any, rv: Any) -> bool:
    """Whether values are put into an order, of which all orders are equally probable, and are of a known number."""
    if [type(one).__name__ for one in parts_of_transform(model.rvs_to_transforms[rv])] != ["Ordered"]:
        return False
    if None in rv.type.shape or not hasattr(rv.owner.op, "dist_params") or rv.owner.op.ndim_supp:
        return False
    return all(all(one.type.broadcastable) for one in rv.owner.op.dist_params(rv.owner))


def _is_density(model: Any, rv: Any) -> bool:
    above = [v.owner.op for v in ancestors([rv]) if v.owner is not None]
    if any(isinstance(op, FlatRV | HalfFlatRV) for op in above):
        return False
    op = rv.owner.op
    kinds = {kind.__name__ for kind in type(op).__mro__}
    if kinds & _WITHOUT_CONSTANT or ("CustomSymbolicDistRV" in kinds and type(op) in _logprob.registry):
        return False
    return _is_usual(model, rv) or _is_in_order(model, rv)


def _is_usual(model: Any, rv: Any) -> bool:
    """Whether the transform is that of the distribution's support: another one may cut a part of it off."""
    transform = model.rvs_to_transforms[rv]
    if transform is None:
        return True
    try:
        usual = _default_transform(rv.owner.op, rv)
    except NotImplementedError:
        return False
    if type(transform) is not type(usual):
        return False
    # Bounds of one's own may be narrower than those of the distribution, whose transform reads them off its parameters.
    reads = [getattr(getattr(one, "args_fn", None), "__code__", None) for one in (transform, usual)]
    return reads[0] is reads[1]


def parts_of_transform(transform: Any) -> list[Any]:
    """A transform, or those that it is a chain of."""
    return list(getattr(transform, "transform_list", [transform]))
