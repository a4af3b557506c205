"""One client's posterior, declared as a PyMC model and compiled once for every client."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fedppl.contracts.html import facts
from fedppl.data import frames
from fedppl.model._data import as_arrays, group_by_columns, needs_same_keys, one_type
from fedppl.model._declared import Declared, parts_of
from fedppl.model._describe import describe
from fedppl.model._enrolment import argument_names, builder_name
from fedppl.model._group import client_of, enrol_group, of_another_type
from fedppl.model._start import require_same_layout
from fedppl.model._template import Template
from fedppl.model.client import ClientModel
from fedppl.types import DataError, DeclarationError


@dataclass(frozen=True, eq=False)
class FederatedModel:
    r"""One client's posterior, declared once; the same for all clients.

    .. math:: p(\phi) \prod_k \int p(y_k, \theta_k \mid \phi)\, d\theta_k

    Parameters
    ----------
    builder
        Function from one client's data, as keyword arguments, to a ``pm.Model``. Put the data into ``pm.Data``
        containers named like the keywords: then one compiled function serves clients of every size.
    shared
        Names of the free random variables that all clients share, φ. Every other free variable is local, θ_k.
    reads
        ``reads(client_id, data) -> arrays``: what the builder takes from a client's data as they are given. By default
        arrays by name, columns of a data frame that are named like the builder's arguments, or a tuple in their order.
    reads_new
        ``reads_new(client_id, data, arrays) -> arrays``: what it takes from new rows of a client that has these arrays,
        outcomes not among them. By default as `reads` has it.
    agreement
        What clients agreed on before they were declared so, in arrays, texts and named tuples; saved with a fit.

    Raises
    ------
    DeclarationError
        When clients enrol: a shared name that is not a free variable, a discrete variable, a shared prior
        that depends on local variables or on data, data keys without a container, differing layouts.

    Examples
    --------
    >>> import pymc as pm, fedppl
    >>> def clinic(y):
    ...     with pm.Model() as model:
    ...         y = pm.Data("y", y)
    ...         mu = pm.Normal("mu", 0, 10)
    ...         theta = pm.Normal("theta", mu, 1)
    ...         pm.Normal("obs", theta, 1, observed=y)
    ...     return model
    >>> fedppl.FederatedModel(clinic, shared=["mu"]).shared
    ('mu',)

    Notes
    -----
    *When this fails.* A builder that turns data into Python numbers (``float(y.mean())``) bakes one client's
    data into the model. The first clients are built and compared to find that, and it is compiled per
    client with a warning; wrap such numbers in ``pm.Data`` or compute them from the container. Where the first two
    models are the same the builder is not called for further clients: checks of data inside it do not see those.
    """

    builder: Callable[..., Any]
    shared: tuple[str, ...]
    reads: Callable[[str, Any], Mapping[str, Any]] | None
    reads_new: Callable[[str, Any, Mapping[str, Any]], Mapping[str, Any]] | None
    agreement: Any
    # Templates by columns, for which two clients' builds were found equal: later fits need not build again.
    _compared: dict[Any, Template] = field(init=False, repr=False)

    def __init__(
        self,
        builder: Callable[..., Any],
        shared: Iterable[str],
        *,
        reads: Callable[[str, Any], Mapping[str, Any]] | None = None,
        reads_new: Callable[[str, Any, Mapping[str, Any]], Mapping[str, Any]] | None = None,
        agreement: Any = None,
    ) -> None:
        if not callable(builder):
            raise DeclarationError(
                f"builder is {type(builder).__name__}, not a function; pass a function from one client's data to a "
                "pm.Model, not the model itself."
            )
        names = (shared,) if isinstance(shared, str) else tuple(shared) if isinstance(shared, Iterable) else (shared,)
        if not all(isinstance(name, str) for name in names) or isinstance(
            shared, set | frozenset
        ):  # sets are unordered
            raise DeclarationError(f'shared={shared!r} must be a list of names of variables, such as ["mu", "tau"].')
        if not names:
            raise DeclarationError("shared=[] names no variable; name at least one free random variable to share.")
        for name in names:
            if names.count(name) > 1:
                raise DeclarationError(f"shared name {name!r} is listed {names.count(name)} times; list it once.")
        object.__setattr__(self, "builder", builder)
        object.__setattr__(self, "shared", names)
        object.__setattr__(self, "reads", reads)
        object.__setattr__(self, "reads_new", reads_new)
        object.__setattr__(self, "agreement", agreement)
        object.__setattr__(self, "_compared", {})

    def __repr__(self) -> str:
        """The builder by name, and what is shared."""
        return f"FederatedModel({builder_name(self.builder)}, shared={list(self.shared)})"

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        takes = ", ".join(self.names) if self.names else "any names"
        return facts(
            "FederatedModel", {"builder": builder_name(self.builder), "data": takes, "shared": list(self.shared)}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the declaration alone; what was compiled stays in its process."""
        keywords = {"reads": self.reads, "reads_new": self.reads_new, "agreement": self.agreement}
        return functools.partial(FederatedModel, **keywords), (self.builder, self.shared)

    @property
    def declared(self) -> Declared:
        """The builder, and what is shared."""
        return Declared(self.builder, self.shared)

    @property
    def names(self) -> tuple[str, ...] | None:
        """What the builder calls its data, in order; None where it takes any name."""
        return argument_names(self.builder)

    def read(self, client_id: str, data: Any) -> Any:
        """A client's data by the builder's arguments; what is no data is handed on, and refused where it is checked."""
        if self.reads is not None:
            return self.reads(client_id, data)
        return frames.named(data, self.names, f"client {client_id!r}")

    def read_new(self, client_id: str, data: Any, arrays: Mapping[str, Any]) -> Any:
        """New rows of a client that has these arrays, by the builder's arguments; of which outcomes are predicted."""
        if self.reads_new is not None:
            return self.reads_new(client_id, data, arrays)
        return self.read(client_id, data)

    def describe(self, data: Any = None) -> pd.DataFrame:
        """Say what all clients share: names, priors and entries, by which ``priors=`` of a formula are given.

        Parameters
        ----------
        data
            Any one client's data, from which the builder makes a model. A formula needs none: once clients agreed, as
            in ``fit.declaration``, priors are shown on the scales that they agreed on.

        Returns
        -------
        pandas.DataFrame
            A row for each shared variable: ``prior``, and ``entries``, labels or a shape, None of a scalar. Of a
            formula also ``reference``, the level that others are against, and ``meaning``.

        Raises
        ------
        DeclarationError
            If a builder that is no formula is described without data.

        Examples
        --------
        >>> from fedppl.testing import normal_means
        >>> model, clients = normal_means()
        >>> list(model.describe(clients["a"]).columns)
        ['prior', 'entries']
        """
        if hasattr(self.builder, "describe"):
            return pd.DataFrame(self.builder.describe())
        if data is None:
            raise DeclarationError(
                f"what {builder_name(self.builder)} declares is known once it is called; pass one client's data: "
                "model.describe(data)."
            )
        arrays = as_arrays("described", self.read("described", data))
        return describe(parts_of(self.declared, "described", arrays))

    def enrol(self, clients: Mapping[str, Any], *, kernel: bool = True) -> dict[str, ClientModel]:
        """Check every client's data against the declaration and compile what is not compiled yet.

        Parameters
        ----------
        clients
            Client id to that client's data: name to array, a data frame, or a tuple in the order of the builder.
        kernel
            Whether the compiled log density and its gradient are checked at the start. Without, as for algorithms that
            never call them, the value alone is, and no log density is compiled.

        Returns
        -------
        dict
            Client id to ClientModel, in the order given.

        Raises
        ------
        DeclarationError, DataError
            Naming the client, the value and the remedy, before anything is compiled where possible.
        """
        if not isinstance(clients, Mapping):
            raise DataError(f"clients are {type(clients).__name__}; pass a mapping from client id to its data.")
        if not clients:
            raise DataError("no clients: pass a mapping from client id to that client's data.")
        checked = {
            str(client_id): as_arrays(str(client_id), self.read(str(client_id), data))
            for client_id, data in clients.items()
        }
        if len(checked) < len(clients):
            raise DataError(f"client ids {list(clients)} are not distinct as strings; rename them.")
        needs_same_keys(checked)
        typed = one_type(checked)
        enrolled: dict[str, ClientModel] = {}
        reference: ClientModel | None = None
        try:
            for group in group_by_columns(typed):
                chosen = {k: typed[k] for k in group}
                for client in enrol_group(self.declared, chosen, self._compared, reference, kernel=kernel):
                    enrolled[client.client_id] = client
                    reference = reference or client
        except DataError as error:
            if other := of_another_type(self.declared, checked, typed):
                raise DataError(f"{other} On reals: {error}") from error
            raise
        return {client_id: enrolled[client_id] for client_id in checked}

    def with_data(self, like: ClientModel, client_id: str, arrays: Any, *, kernel: bool = True) -> ClientModel:
        """Another client's model by way of an enrolled one's: same compiled functions, other data."""
        if like.template.functions.get("own"):  # data stand in the graph: nothing can be exchanged
            return self.enrol({client_id: arrays}, kernel=kernel)[client_id]
        checked = as_arrays(client_id, self.read(client_id, arrays))
        needs_same_keys({f"{like.client_id} as enrolled": like.arrays, client_id: checked})
        client = client_of(self.declared, client_id, like.template, checked, like, kernel=kernel)
        require_same_layout(like, client)
        return client
