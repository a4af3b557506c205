r"""How outputs of a network meet outcomes: losses of rows, their slopes, and their curvatures.

.. math:: \ell_n = -\log p(y_n \mid f_n), \qquad \Lambda_n = \partial^2 \ell_n / \partial f_n\, \partial f_n^\top

Classes by logits, and normal outcomes of one known sd, are in closed form. What else is declared is computed from the
declaration: `fedppl.nn.declared`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch

from fedppl.types import Array


class Likelihood(Protocol):
    """Losses by rows. Constants of a row may be left out of them, but for `log_density`."""

    @property
    def kind(self) -> str:
        """The distribution, as PyTensor names it."""

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Outcomes (n, ...) as the functions below take them, beside outputs of this type on this device."""

    def mean(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean loss of outputs (n, C) at outcomes (n, ...)."""

    def each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Losses (n,)."""

    def each_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Losses (K, n) of outputs (K, C, n), whose rows come last, at outcomes (K, n, ...)."""

    def slopes_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """∂ℓ/∂f of outputs (K, C, n), at outcomes (K, n, ...); what is given may be written over."""

    @property
    def may_bend(self) -> bool:
        """Whether Λ may be other than positive semi-definite."""

    def bends(self, output: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether it is so at one of a client's rows: then Λ is expected at all of them."""

    def root(self, output: torch.Tensor, y: torch.Tensor, *, expected: bool = False) -> torch.Tensor:
        """R (n, C, r) with R Rᵀ = Λ, of outputs (n, C), or of its expectation over outcomes."""

    def log_density(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """log p(y | f) of all rows with its constants."""


@dataclass(frozen=True)
class Categorical:
    """Classes 0 to C − 1, by logits."""

    kind: ClassVar[str] = "categorical"
    may_bend: ClassVar[bool] = False

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Whole numbers."""
        return torch.from_numpy(np.array(y)).long().to(device)

    def mean(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        return torch.nn.functional.cross_entropy(output, y)

    def each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        return torch.nn.functional.cross_entropy(output, y, reduction="none")

    def each_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        return torch.nn.functional.cross_entropy(output, y, reduction="none")

    def slopes_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """p less 1 at the class."""
        slopes = torch.softmax(output, 1)
        told = y[:, None]
        return slopes.scatter_add_(1, told, -torch.ones_like(told, dtype=output.dtype))

    def bends(self, output: torch.Tensor, y: torch.Tensor) -> bool:
        """It is concave in its outputs."""
        return False

    def root(self, output: torch.Tensor, y: torch.Tensor, *, expected: bool = False) -> torch.Tensor:
        """diag(√p) − p √pᵀ."""
        p = torch.softmax(output, dim=1)
        root = p.sqrt()
        return torch.diag_embed(root) - p[:, :, None] * root[:, None, :]

    def log_density(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """See `Likelihood`."""
        return -float(torch.nn.functional.cross_entropy(output, y, reduction="sum"))


@dataclass(frozen=True)
class Normal:
    """Real outcomes (n, C) about the outputs, of one sd."""

    sd: float
    kind: ClassVar[str] = "normal"
    may_bend: ClassVar[bool] = False

    def outcomes(self, y: Array, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A row (C,) for each row of inputs."""
        return torch.from_numpy(np.array(y)).to(dtype).to(device).reshape(len(y), -1)

    def mean(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        square = (y.view(output.shape) - output) ** 2
        return 0.5 * square.sum() / (len(y) * self.sd**2)

    def each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        square = (y.reshape(output.shape) - output) ** 2
        return square.reshape(len(square), -1).sum(1) * (0.5 / self.sd**2)

    def each_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        square = (y.mT - output) ** 2
        return square.sum(1) * (0.5 / self.sd**2)

    def slopes_last(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Residuals over the variance."""
        return (output - y.mT) / self.sd**2

    def bends(self, output: torch.Tensor, y: torch.Tensor) -> bool:
        """It is concave in its outputs."""
        return False

    def root(self, output: torch.Tensor, y: torch.Tensor, *, expected: bool = False) -> torch.Tensor:
        """I / σ."""
        eye = torch.eye(output.shape[1], dtype=output.dtype, device=output.device)
        return eye.expand(len(output), -1, -1) / self.sd

    def log_density(self, output: torch.Tensor, y: torch.Tensor) -> float:
        """See `Likelihood`."""
        square = float(((y.view(output.shape) - output) ** 2).sum())
        return -0.5 * square / self.sd**2 - y.numel() * float(np.log(self.sd) + 0.5 * np.log(2 * np.pi))
