"""The declaration: one client's posterior as a PyMC model, compiled once for all clients."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from pymc.printing import str_for_dist
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors

from fedppl import gaussian
from fedppl.contracts.printed import facts
from fedppl.data import frames
from fedppl.data.frames import require_clients
from fedppl.model import checks
from fedppl.model._group import client_of, enrol_group, of_another_type, require_same_layout
from fedppl.model.client import ClientModel
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.model.template import Declared, Template, parts_of
from fedppl.settings import shown, takes
from fedppl.types import DataError, DeclarationError, Layout


@dataclass(frozen=True, eq=False)
class FederatedModel:
    r"""One client's posterior, declared once; the same for all clients.

    .. math:: p(\phi) \prod_k \int p(y_k, \theta_k \mid \phi)\, d\theta_k

    Parameters
    ----------
    builder
        Function from one client's data, as keyword arguments, to a ``pm.Model``. Put the data into ``pm.Data``
        containers named like the keywords: then one compiled function serves clients of every size. For clients of
        several kinds, functions by kind, ``{"full": ..., "summary": ...}``, that declare the same shared variables;
        `fedppl.summaries` has some.
    shared
        Names of the free random variables that all clients share, φ. Every other free variable is local, θ_k.
    kind
        The kind of each client where there are several: client id to kind, or a function ``kind(client_id, data)``. A
        client without a kind (None) has the builder whose arguments are its data, if exactly one fits.
    reads
        ``reads(client_id, data) -> arrays``: the builder's arguments from a client's data. By default arrays by name,
        columns of a data frame that are named like the builder's arguments, or a tuple in their order.
    reads_new
        ``reads_new(client_id, data, arrays) -> arrays``: the same, without outcomes, from new rows of a client with
        these arrays. By default as `reads`.
    agreement
        What clients agreed on before the declaration, in arrays, texts and named tuples; saved with a fit.

    Raises
    ------
    DeclarationError
        When clients enrol: a shared name that is not a free variable, a discrete variable, a shared prior that depends
        on local variables or data or differs between kinds, data keys without a container.

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
    *When this fails.* A builder that turns data into Python numbers (``float(y.mean())``) makes one client's data
    constants of the model. Two clients' models are compared to find that; then each client is compiled by itself, with
    a warning. Compute such numbers from the container. Where the two models are equal the builder is not called for
    further clients, so that its own checks do not see their data.
    """

    builders: Builders
    shared: tuple[str, ...]
    kind: Kind
    reads: Callable[[str, Any], Mapping[str, Any]] | None
    reads_new: Callable[[str, Any, Mapping[str, Any]], Mapping[str, Any]] | None
    agreement: Any
    # Templates by kind and columns for which two clients' builds were equal, so that later fits need not build again.
    _compared: dict[str, dict[Any, Template]] = field(init=False, repr=False)

    def __init__(
        self,
        builder: Callable[..., Any] | Builders,
        shared: Iterable[str],
        *,
        kind: Kind = None,
        reads: Callable[[str, Any], Mapping[str, Any]] | None = None,
        reads_new: Callable[[str, Any, Mapping[str, Any]], Mapping[str, Any]] | None = None,
        agreement: Any = None,
    ) -> None:
        builders = _as_builders(builder)
        names = tuple(shared) if isinstance(shared, Iterable) and not isinstance(shared, str) else (shared,)
        if isinstance(shared, set | frozenset | Mapping) or not all(isinstance(name, str) for name in names):
            raise DeclarationError(f'shared={shared!r} must be a list of names of variables, such as ["mu", "tau"].')
        if not names:
            raise DeclarationError("shared=[] names no variable; name at least one free random variable to share.")
        for name in names:
            if names.count(name) > 1:
                raise DeclarationError(f"shared name {name!r} is listed {names.count(name)} times; list it once.")
        takes = {"reads": (reads, "(client_id, data)"), "reads_new": (reads_new, "(client_id, data, arrays)")}
        for keyword, (reader, of) in takes.items():
            if reader is not None and not callable(reader):
                raise DeclarationError(f"{keyword}={shown(reader)} must be a function of {of}, or None.")
        values = {"builders": builders, "kind": _as_kind(kind, builders), "shared": names, "_compared": {}}
        for field_name, value in {**values, "reads": reads, "reads_new": reads_new, "agreement": agreement}.items():
            object.__setattr__(self, field_name, value)

    def __repr__(self) -> str:
        """The name of the builder, and the shared variables."""
        names = {kind: checks.builder_name(builder) for kind, builder in self.builders.items()}
        several = "{" + ", ".join(f"{kind!r}: {name}" for kind, name in names.items()) + "}"
        builder = several if len(set(names.values())) > 1 else next(iter(names.values()))
        return f"FederatedModel({builder}, shared={list(self.shared)})"

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        takes = ", ".join(self.names) if self.names else "any names"
        return facts(
            "FederatedModel", {"builder": checks.builder_name(self.builder), "data": takes, "shared": list(self.shared)}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the declaration without compiled functions."""
        return functools.partial(FederatedModel, **self._settings), (self._builder, self.shared)

    @property
    def _builder(self) -> Any:
        return self.builder if list(self.builders) == [ONLY] else self.builders

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "reads", "reads_new", "agreement")}

    def _with(self, **changed: Any) -> FederatedModel:
        """The same declaration with other settings; compiled functions are kept."""
        declaration = FederatedModel(self._builder, self.shared, **{**self._settings, **changed})
        object.__setattr__(declaration, "_compared", self._compared)
        return declaration

    @property
    def advice(self) -> str:
        """The builder's advice on what may be wrong in a fit, if any."""
        return str(getattr(self.builder, "advice", ""))

    @property
    def builder(self) -> Callable[..., Any]:
        """The builder of the kind that is declared first."""
        return next(iter(self.builders.values()))

    @property
    def declared(self) -> Declared:
        """The builder and the shared variables."""
        return self.declared_as(next(iter(self.builders)))

    def declared_as(self, kind: str) -> Declared:
        """The builder of a kind and the shared variables."""
        return Declared(self.builders[kind], self.shared, kind)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the builders' arguments in order; None where one takes any name."""
        names_by_builder = [checks.argument_names(builder) for builder in self.builders.values()]
        if any(names is None for names in names_by_builder):
            return None
        return tuple(dict.fromkeys(name for names in names_by_builder for name in names or ()))

    def kind_of(self, client_id: str, data: Any, said: str | None = None) -> str:
        """The kind of a client: `said`, else by `kind`, else by the names of its data."""
        builders = self.builders
        if said is None and len(builders) > 1 and self.kind is not None:
            given = data.native if isinstance(data, frames.Opened) else data
            said = self.kind.get(client_id) if isinstance(self.kind, Mapping) else self.kind(client_id, given)
        if said is not None:
            return _known(said, builders, f"client {client_id!r}: kind")
        fitting = [kind for kind, builder in builders.items() if len(builders) == 1 or _fits(data, builder)]
        if len(fitting) == 1:
            return fitting[0]
        takes = [f"{kind!r} takes {list(checks.argument_names(b) or ['any'])}" for kind, b in builders.items()]
        has = sorted(_names(data) or ()) or type(data).__name__
        what = f"{f'builders of kinds {fitting} fit' if fitting else 'no builder fits'} its data, which are {has}"
        raise DataError(f"client {client_id!r}: {what} ({'; '.join(takes)}); pass arrays of one, or kind= by client.")

    def knowing(self, kinds: Mapping[str, str]) -> FederatedModel:
        """The same declaration with the kinds of these clients; compiled functions are kept."""
        if len(self.builders) == 1:
            return self
        if callable(self.kind):
            return self._with(kind=functools.partial(_remembered, kinds, self.kind))
        return self._with(kind={**(self.kind or {}), **kinds})

    def by_kind(self, clients: Mapping[Any, Any], *, one_table: bool) -> tuple[FederatedModel, dict[Any, Any]]:
        """The declaration with clients' kinds, and their data by the names of each one's builder.

        In one table of all kinds a column without values at a client is not read there.
        """
        given = {k: _without_empty(data) if one_table else data for k, data in clients.items()}
        kinds = {str(k): self.kind_of(str(k), data) for k, data in given.items()}
        return self.knowing(kinds), {k: self._named(str(k), data, kinds[str(k)]) for k, data in given.items()}

    def _named(self, client_id: str, data: Any, kind: str) -> Any:
        return frames.named(data, checks.argument_names(self.builders[kind]), f"client {client_id!r}")

    def read(self, client_id: str, data: Any, kind: str | None = None) -> Any:
        """A client's data by the builder's arguments; invalid data are returned as they are, and refused later."""
        if self.reads is not None:
            return self.reads(client_id, data)
        kind = self.kind_of(client_id, data, kind)
        read_by_builder = getattr(self.builders[kind], "read", None)  # of builders in fedppl.summaries and formulas
        return self._named(client_id, data, kind) if read_by_builder is None else read_by_builder(client_id, data)

    def read_new(self, client_id: str, data: Any, arrays: Mapping[str, Any], kind: str) -> Any:
        """New rows of a client with these arrays, by the builder's arguments, for predictions."""
        read_by_builder = self.reads_new or getattr(self.builders[kind], "read_new", None)
        return self.read(client_id, data, kind) if read_by_builder is None else read_by_builder(client_id, data, arrays)

    def describe(self, data: Any = None) -> pd.DataFrame:
        """List the shared variables: their names, priors and entries, as ``priors=`` of a formula takes them.

        Parameters
        ----------
        data
            Any client's data, from which the builder makes a model. A formula needs none: once clients agreed, as in
            ``fit.declaration``, priors are on the agreed scales.

        Returns
        -------
        pandas.DataFrame
            A row for each shared variable: ``prior``, and ``entries`` (labels or a shape, None for a scalar). For a
            formula also ``reference``, the level that others are compared with, and ``meaning``.

        Raises
        ------
        DeclarationError
            If a builder other than a formula is described without data.

        Examples
        --------
        >>> from fedppl.testing import normal_means
        >>> model, clients = normal_means()
        >>> list(model.describe(next(iter(clients.values()))).columns)
        ['prior', 'entries']
        """
        if hasattr(self.builder, "describe"):
            return pd.DataFrame(self.builder.describe())
        if data is None:
            name = checks.builder_name(self.builder)
            raise DeclarationError(f"{name} has to be called; pass one client's data: model.describe(data).")
        arrays = checks.as_arrays("described", self.read("described", data))
        parts = parts_of(self.declared, "described", arrays)
        rows = {rv.name: (_prior(rv), _entries(parts.model, rv)) for rv in parts.shared}
        return pd.DataFrame.from_dict(rows, orient="index", columns=["prior", "entries"])

    def reading(self, reads: Callable[[str, Any], Mapping[str, Any]]) -> FederatedModel:
        """The same declaration with another `reads`; compiled functions are kept."""
        return self._with(reads=reads)

    def enrol(
        self, clients: Mapping[str, Any], *, kernel: bool = True, kinds: Mapping[str, str | None] | None = None
    ) -> dict[str, ClientModel]:
        """Check every client's data against the declaration, and compile it if needed.

        Parameters
        ----------
        clients
            Client id to that client's data: name to array, a data frame, or a tuple in the order of the builder.
        kernel
            Whether the compiled log density and its gradient are checked at the start. Without, as for algorithms that
            never call them, only the value is checked, and nothing is compiled.
        kinds
            Kinds of some of the clients, whatever `kind` says.

        Returns
        -------
        dict
            Client id to ClientModel, in the order given.

        Raises
        ------
        DeclarationError, DataError
            Naming the client, the value and the remedy, before anything is compiled where possible.
        """
        require_clients(clients, "or to fedppl.fit one data frame and by=, the column that tells clients apart")
        given = {str(client_id): data for client_id, data in clients.items()}
        kind_of_client = {name: self.kind_of(name, data, (kinds or {}).get(name)) for name, data in given.items()}
        checked = {
            name: checks.as_arrays(name, self.read(name, data, kind_of_client[name])) for name, data in given.items()
        }
        enrolled: dict[str, ClientModel] = {}
        for kind in self.builders:
            before = len(enrolled)
            of_this_kind = {name: checked[name] for name in checked if kind_of_client[name] == kind}
            try:
                enrolled |= self._of_kind(kind, of_this_kind, kernel)
            except DeclarationError as error:
                if len(of_this_kind) == len(kind_of_client):
                    raise
                raise DeclarationError(f"kind {kind!r}: {error}") from error
            if 0 < before < len(enrolled):
                require_one_layout(*(list(enrolled.values())[place] for place in (0, before)))
        return {client_id: enrolled[client_id] for client_id in checked}

    def _of_kind(self, kind: str, checked: Mapping[str, Any], kernel: bool) -> dict[str, ClientModel]:
        """Enrol clients of one kind; kinds are compared afterwards."""
        if not checked:
            return {}
        declared, compared = self.declared_as(kind), self._compared.setdefault(kind, {})
        checks.needs_same_keys(checked)
        typed = checks.one_type(checked)
        enrolled: dict[str, ClientModel] = {}
        try:
            for group in checks.group_by_columns(typed):
                chosen, reference = {k: typed[k] for k in group}, next(iter(enrolled.values()), None)
                models = list(enrol_group(declared, chosen, compared, reference, kernel=kernel))  # warns at depth 4
                enrolled |= {client.client_id: client for client in models}
        except DataError as error:
            if other := of_another_type(declared, checked, typed):
                raise DataError(f"{other} On reals: {error}") from error
            raise
        return enrolled

    def with_data(self, like: ClientModel, client_id: str, arrays: Any, *, kernel: bool = True) -> ClientModel:
        """Another client's model from an enrolled one: same compiled functions, other data."""
        kind = like.declared.kind
        if like.template.functions.get("own"):  # data are constants of the graph
            return self.enrol({client_id: arrays}, kernel=kernel, kinds={client_id: kind})[client_id]
        checked = checks.as_arrays(client_id, self.read(client_id, arrays, kind))
        checks.needs_same_keys({f"{like.client_id} as enrolled": like.arrays, client_id: checked})
        client = client_of(like.declared, client_id, like.template, checked, like, kernel=kernel)
        require_same_layout(like, client)
        return client


def _prior(rv: Any) -> str:
    """A variable's prior as declared: PyMC's text, with the numbers of constants, for which that has none."""
    text = str(str_for_dist(rv, formatting="plain", include_params=True)).partition("~")[2].strip()
    name, _, arguments = text.partition("(")
    outside = r",\s*(?![^(]*\))"  # commas that are not between parentheses
    texts, parameters = re.split(outside, arguments.removesuffix(")")), rv.owner.op.dist_params(rv.owner)
    if len(texts) != len(parameters):
        return text
    return f"{name}({', '.join(map(_shown, texts, parameters))})"


def _shown(text: str, parameter: Any) -> str:
    """A constant's single number where all are equal; else all numbers, or the first and last of many."""
    if not all(root.owner is not None or isinstance(root, Constant) for root in ancestors([parameter])):
        return text
    array = np.asarray(parameter.eval(mode=PYTHON_MODE))
    if np.all(array == array.flat[0]):
        return f"{array.flat[0]:.4g}"
    return " ".join(np.array2string(array, precision=4, separator=", ", threshold=8, edgeitems=2).split())


def _entries(model: Any, rv: Any) -> Any:
    """Labels of a variable's entries, or its shape; None for a scalar."""
    dims = model.named_vars_to_dims.get(rv.name)
    labels = [model.coords.get(dim) for dim in dims or ()]
    if labels and all(values is not None for values in labels):
        grid = np.stack(np.meshgrid(*(np.asarray(values).astype(str) for values in labels), indexing="ij"), axis=-1)
        return tuple(", ".join(row) for row in grid.reshape(-1, len(labels)).tolist())
    shape = tuple(int(n) for n in rv.shape.eval(mode=PYTHON_MODE))
    return shape or None


# Builders of several kinds of clients: choose a client's builder, and require one shared layout -----------------------

Builders = Mapping[str, Callable[..., Any]]
Kind = Mapping[str, str] | Callable[[str, Any], str | None] | None

ONLY = ""  # the kind of clients where there is one


def _as_builders(builder: Any) -> dict[str, Callable[..., Any]]:
    """Builders by kind; a single one has the kind `ONLY`."""
    builders = dict(builder) if isinstance(builder, Mapping) else {ONLY: builder}
    if not builders or not all(isinstance(kind, str) for kind in builders):
        raise DeclarationError(f'builder={shown(builder)} must be a function, or functions by kind: {{"full": ...}}.')
    for kind, function in builders.items():
        if not callable(function):
            what = f"builder of kind {kind!r}" if isinstance(builder, Mapping) else "builder"
            raise DeclarationError(f"{what} is {type(function).__name__}; pass a function of one client's data.")
    return builders


def _as_kind(kind: Any, builders: Builders) -> Kind:
    """Check the keyword `kind`."""
    if kind is None:
        return None
    if len(builders) == 1:
        raise DeclarationError('kind= is for several builders: FederatedModel({"full": ..., "summary": ...}, ...).')
    if isinstance(kind, Mapping):
        by_client = {str(client_id): kind_of_client for client_id, kind_of_client in kind.items()}
        for client_id, kind_of_client in by_client.items():
            _known(kind_of_client, builders, f"kind of client {client_id!r}")
        return by_client
    if not (callable(kind) and takes(kind, 2)):
        raise DeclarationError(f"kind={shown(kind)} is neither kinds by client id nor a function of (client_id, data).")
    rule: Callable[[str, Any], str | None] = kind
    return rule


def _known(kind: Any, builders: Builders, what: str) -> str:
    if not isinstance(kind, str) or kind not in builders:
        raise DeclarationError(f"{what} is {shown(kind)}; the kinds that are declared are {list(builders)}.")
    return kind


def _fits(data: Any, builder: Callable[..., Any]) -> bool:
    """Whether data have a builder's arguments; a frame may have other columns."""
    if (known := checks.parameters(builder)) is None:
        return True
    named = {p.name: p.default is p.empty for p in known if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    needed = {name for name, needs in named.items() if needs}
    if isinstance(data, tuple):
        return len(needed) <= len(data) <= len(named)
    if (keys := _names(data)) is None:
        return False
    of_any = any(p.kind is p.VAR_KEYWORD for p in known)
    return needed <= keys and (frames.is_frame(data) or of_any or keys <= set(named))


def _names(data: Any) -> set[str] | None:
    if isinstance(data, Mapping):
        return set(map(str, data))
    if isinstance(data, frames.Opened):
        return set(map(str, data.names))
    return set(frames.read(data).collect_schema().names()) if frames.is_frame(data) else None


def _remembered(kinds: Mapping[str, str], kind: Callable[[str, Any], str | None], client_id: str, data: Any) -> Any:
    return kinds[client_id] if client_id in kinds else kind(client_id, data)


def _without_empty(data: Any) -> Any:
    """A client's part of one table of all kinds, without columns that have no value there."""
    if not isinstance(data, Mapping):
        return data
    columns = {name: np.asarray(values) for name, values in data.items()}
    empty = {k for k, v in columns.items() if v.dtype.kind == "f" and v.size and np.all(np.isnan(v))}
    return {name: values for name, values in data.items() if name not in empty}


def require_one_layout(first: ClientModel, other: ClientModel) -> None:
    """Refuse kinds that declare the shared variables differently, naming the kinds and the difference."""
    if first.layout.fingerprint == other.layout.fingerprint:
        return
    for variable, second in zip(first.layout.variables, other.layout.variables, strict=True):
        if variable != second:
            field, a, b = checks.difference(variable, second)
            what = f"shared variable {variable.name!r} has {field} {a} in the first and {b} in the second"
            break
    else:
        what = _kinds_apart(first.layout, other.layout)
    kinds = f"kinds {first.declared.kind!r} and {other.declared.kind!r}"
    raise DeclarationError(f"{kinds} differ: {what}; declare shared variables by one function that all builders call.")


def _kinds_apart(first: Layout, second: Layout) -> str:
    """The coordinate in which two priors of one shape differ most."""
    mean, sd = gaussian.mean(first.prior), gaussian.standard_deviations(first.prior)
    second_mean, second_sd = gaussian.mean(second.prior), gaussian.standard_deviations(second.prior)
    apart = np.abs(second_mean - mean) / sd + np.abs(np.log(second_sd / sd))
    place = int(np.argmax(apart))
    if not apart[place] > 1e-5:
        return "the shared prior's correlations, or its density about one mean and covariance"
    moments = f"{first.labels[place]} has mean {mean[place]:.6g} and sd {sd[place]:.6g} in the first"
    return f"{moments}, {second_mean[place]:.6g} and {second_sd[place]:.6g} in the second"
