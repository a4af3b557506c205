"""Clients that give a summary of their rows: builders for them, likelihoods for your own, and summaries for formulas.

A builder here is made of one function of yours, which declares in an open PyMC model what all clients share and what is
this client's own, and returns the quantity that the summary is of. The builder for clients with rows calls it too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pymc as pm

from fedppl.data import frames
from fedppl.model._summary_data import Estimate, Table, checked_estimate, checked_grid, checked_table, numbers
from fedppl.model.enrolment import builder_name
from fedppl.model.summary import binomials, interpolated, normal
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError

__all__ = ["Estimate", "Table", "binomials", "estimate", "grid", "interpolated", "normal", "two_by_two"]

Effects = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class _Builder:
    """A builder by what it calls its data, how these are checked, and the likelihood of what `effects` returns."""

    kind: str
    effects: Effects
    coords: Mapping[str, Sequence[Any]] | None
    names: tuple[str, ...]
    check: Callable[[Mapping[str, Any], str], dict[str, Array]]
    likelihood: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """How messages call it."""
        return f"summaries.{self.kind}({builder_name(self.effects)})"

    @property
    def __signature__(self) -> Any:
        """The names of its data."""
        return inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in self.names])

    def read(self, client_id: str, data: Any) -> Any:
        """A client's summary, checked; what is none is refused where clients are."""
        what = f"client {client_id!r}"
        named = frames.named(data, self.names, what)
        if not isinstance(named, Mapping) or set(named) != set(self.names):
            return named
        return self.check({name: numbers(named[name], name, what) for name in self.names}, what)

    def __call__(self, **data: Any) -> pm.Model:
        """One client's model."""
        with pm.Model(coords=None if self.coords is None else dict(self.coords)) as model:
            held = [pm.Data(name, data[name]) for name in self.names]
            self.likelihood(self.effects(), *held)
        return model


def estimate(effects: Effects, *, coords: Mapping[str, Sequence[Any]] | None = None) -> Callable[..., pm.Model]:
    """Builder for clients that give an estimate and its covariance.

    Their data are ``estimate``, a number or (p,), and ``covariance``, a variance, the variances (p,) of independent
    estimates, or (p, p). A standard error is squared before.

    Parameters
    ----------
    effects
        Function without arguments: it declares what all share and a client's own variables in the open model, and
        returns what is estimated, a scalar, (p,), or a list of scalars.
    coords
        Coords of the model.

    Returns
    -------
    Callable
        Builder for `fedppl.FederatedModel`.

    Raises
    ------
    DeclarationError
        For `effects` that are no function.
    DataError
        When clients enrol: covariances that are not symmetric or not positive definite.

    Examples
    --------
    >>> import fedppl, pymc as pm
    >>> def effect():
    ...     return pm.Normal("theta", pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 1))
    >>> def trial(y):
    ...     with pm.Model() as model:
    ...         pm.Normal("obs", effect(), 1, observed=pm.Data("y", y))
    ...     return model
    >>> builders = {"rows": trial, "estimate": fedppl.summaries.estimate(effect)}
    >>> fedppl.FederatedModel(builders, shared=["mu", "tau"])
    FederatedModel({'rows': trial, 'estimate': summaries.estimate(effect)}, shared=['mu', 'tau'])

    Notes
    -----
    *When this fails.* An estimate that was shrunk, by a prior or a penalty, has had that prior already: give maximum
    likelihood estimates, or a posterior's divided by its prior.
    """
    return _Builder("estimate", _function(effects), coords, ("estimate", "covariance"), checked_estimate, normal)


def grid(effects: Effects, *, coords: Mapping[str, Sequence[Any]] | None = None) -> Callable[..., pm.Model]:
    """Builder for clients that give the log-likelihood of one quantity on a grid.

    Their data are ``grid``, increasing values of the quantity (n,), at least five, and ``log_likelihood``, (n,), up to
    a constant; `interpolated` says what it is between and beyond them. A profile or partial likelihood may stand there.

    Parameters
    ----------
    effects
        As in `estimate`; it returns a scalar.
    coords
        Coords of the model.

    Returns
    -------
    Callable
        Builder for `fedppl.FederatedModel`.

    Raises
    ------
    DeclarationError
        For `effects` that are no function.
    DataError
        When clients enrol: grids that do not increase, or do not cover where the likelihood is largest.

    Examples
    --------
    >>> import fedppl, numpy as np, pymc as pm
    >>> def effect():
    ...     return pm.Normal("theta", pm.Normal("mu", 0, 2), 0.5)
    >>> model = fedppl.FederatedModel(fedppl.summaries.grid(effect), shared=["mu"])
    >>> theta = np.linspace(-3, 3, 50)
    >>> log_likelihood = 2 * theta - 9 * np.exp(theta)  # two events where nine were expected
    >>> clients = {"A": {"grid": theta, "log_likelihood": log_likelihood}}
    >>> fit = fedppl.fit(model, clients, progressbar=False, random_seed=1)

    Notes
    -----
    *When this fails.* A client without events has a likelihood that rises to a plateau: its grid covers it where the
    log-likelihood rises by less than 0.1 beyond the end. Other grids that end before the maximum are refused.

    References
    ----------
    .. [1] Schuemie et al. (2022), Combining Cox regressions across a heterogeneous distributed research network facing
       small and zero counts, Statistical Methods in Medical Research 31.
    """
    return _Builder("grid", _function(effects), coords, ("grid", "log_likelihood"), checked_grid, interpolated)


def two_by_two(
    effects: Effects, *, baseline: Effects | None = None, coords: Mapping[str, Sequence[Any]] | None = None
) -> Callable[..., pm.Model]:
    """Builder for clients that give a 2 x 2 table.

    Their data are ``events`` and ``totals``, (2,): numbers of events and of subjects, the reference arm first. The
    likelihood is exact, `binomials`, with a local intercept.

    Parameters
    ----------
    effects
        As in `estimate`; it returns the log odds ratio, a scalar.
    baseline
        Function without arguments that declares the log odds of the reference arm, where the builder for rows gives
        it another prior than N(0, 2.5²), or shares something about it.
    coords
        Coords of the model.

    Returns
    -------
    Callable
        Builder for `fedppl.FederatedModel`.

    Raises
    ------
    DeclarationError
        For `effects` or `baseline` that are no functions.
    DataError
        When clients enrol: counts that are no whole numbers, or more events than subjects.

    Examples
    --------
    >>> import fedppl, pymc as pm
    >>> def effect():
    ...     return pm.Normal("theta", pm.Normal("mu", 0, 2), 0.5)
    >>> model = fedppl.FederatedModel(fedppl.summaries.two_by_two(effect), shared=["mu"])
    >>> clients = {"A": {"events": [4, 9], "totals": [40, 41]}, "B": {"events": [0, 3], "totals": [12, 13]}}
    >>> fedppl.fit(model, clients, progressbar=False, random_seed=1).client_ids
    ('A', 'B')

    Notes
    -----
    *When this fails.* A table is not adjusted: where other clients bring rows, and their effect is adjusted for what
    the arms differ in, the two log odds ratios are not the same quantity. With few events the prior of the reference
    arm has a say, N(0, 2.5²) by default. Small counts may tell who is meant: a client's rules on disclosure hold for
    tables, too.
    """
    start = None if baseline is None else _function(baseline)
    arms = functools.partial(_arms, baseline=start)
    return _Builder("two_by_two", _function(effects), coords, ("events", "totals"), checked_table, arms)


def _arms(effect: Any, events: Any, totals: Any, baseline: Effects | None) -> Any:
    return binomials(effect, events, totals, baseline=None if baseline is None else baseline())


def _function(effects: Any) -> Effects:
    if not callable(effects):
        raise DeclarationError(
            f"{shown(effects)} is no function; pass one without arguments that declares the variables and returns the "
            "quantity that the summary is of."
        )
    found: Effects = effects
    return found
