r"""Declared priors of what is local to a client's network: independent normals by themselves, others by their density.

.. math:: \log p(\theta) = -\tfrac12 \sum_i p_i (\theta_i - m_i)^2 + \log p_{\mathrm{others}}(\theta) + c
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
import torch
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.nn.calls import kind_of
from fedppl.nn.devices import host, tensor
from fedppl.nn.outcome import CONTRACT
from fedppl.types import Array, DeclarationError, Variable


class LocalPrior(NamedTuple):
    """The prior of θ, (d_k,), on the unconstrained space."""

    mean: Array  # of independent normals, (d_k,)
    precision: Array  # likewise; 0 where the prior is another one
    others: Callable[[Array], tuple[Array, Array]] | None  # θ to the others' log density and its slopes (d_k,)

    def log_density(self, theta: Array) -> float:
        """log p(θ), constants included."""
        normal, told = self.precision > 0, np.log(np.maximum(self.precision, 1e-300) / (2 * np.pi))
        found = float(np.sum((0.5 * told - 0.5 * self.precision * (theta - self.mean) ** 2)[normal]))
        return found if self.others is None else found + float(self.others(theta)[0])

    def penalty(self, theta: torch.Tensor) -> torch.Tensor:
        """Minus the log density of what is not normal, which torch can follow."""
        found: torch.Tensor = _Density.apply(theta, self.others)  # type: ignore[no-untyped-call]
        return -found


class _Density(torch.autograd.Function):
    """A log density of θ (d_k,) by its function."""

    @staticmethod
    def forward(context: Any, theta: torch.Tensor, density: Any) -> torch.Tensor:
        """Compute the density, and the slopes that `backward` needs."""
        value, slopes = density(host(theta))
        context.save_for_backward(tensor(np.asarray(slopes), theta.dtype, theta.device))
        return tensor(np.asarray(value), theta.dtype, theta.device).reshape(())

    @staticmethod
    def backward(context: Any, upstream: torch.Tensor) -> Any:
        """Slopes of θ."""
        (slopes,) = context.saved_tensors
        return slopes * upstream, None


def local_prior(who: str, parts: _graph.Parts, local: Sequence[Variable]) -> LocalPrior:
    """Read the priors of local variables.

    Raises
    ------
    DeclarationError
        For a prior with a parameter that is no constant.
    """
    means, precisions, others = [np.zeros(0)], [np.zeros(0)], []
    for rv, variable in zip(parts.local, local, strict=True):
        _require_constants(who, parts, rv)
        if kind_of(rv) == "normal" and parts.model.rvs_to_transforms[rv] is None:
            mu, sd = (np.asarray(one.eval(), dtype=float) for one in rv.owner.op.dist_params(rv.owner))
            means.append(np.broadcast_to(mu, variable.shape).ravel())
            precisions.append(np.broadcast_to(sd, variable.shape).ravel() ** -2.0)
        else:
            others.append(rv)
            means.append(np.zeros(variable.size))
            precisions.append(np.zeros(variable.size))
    density = _density(parts, local, others) if others else None
    return LocalPrior(np.concatenate(means), np.concatenate(precisions), density)


def _density(
    parts: _graph.Parts, local: Sequence[Variable], others: Sequence[Any]
) -> Callable[[Array], tuple[Array, Array]]:
    theta = pt.vector("theta")
    values, first = {}, 0
    for rv, variable in zip(parts.local, local, strict=True):
        values[parts.model.rvs_to_values[rv]] = theta[first : first + variable.size].reshape(variable.shape)
        first += variable.size
    replace = {**_graph._constants(parts.model), **values}
    (value,) = clone_replace([parts.model.logp(vars=list(others), sum=True)], replace, rebuild_strict=False)
    return interpreted.python_function([theta], [value, pt.grad(value, theta)])


def _require_constants(who: str, parts: _graph.Parts, rv: Any) -> None:
    """A prior that is equal at all clients, and says nothing of other variables."""
    above = set(ancestors([rv])) - {rv}
    if not above.isdisjoint([*parts.model.basic_RVs, *parts.data]):
        raise DeclarationError(f"{who}: a parameter of the prior of {rv.name!r} is no constant; {CONTRACT}.")
