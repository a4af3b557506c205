"""The functions that users call: declare a model by a formula, and have clients agree on its columns."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedppl.contracts import SharedReader
from fedppl.data import frames, tables
from fedppl.data import missing as gaps
from fedppl.data.tables import Table
from fedppl.formulas import checks, families
from fedppl.formulas.agreement import Agreement, Told, agreed, strange, strange_levels, strange_sizes, tell
from fedppl.formulas.declare import Formula
from fedppl.formulas.design import SAID, far_from_zero
from fedppl.formulas.exchange import KINDS, EstimateOf, as_rows, asked, check_rows, kind_of, sized
from fedppl.formulas.families import Family
from fedppl.formulas.families import family as family_of
from fedppl.formulas.predictor import spreads, tag
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Terms, parse, variable
from fedppl.model.declaration import FederatedModel
from fedppl.model.summaries import Estimate
from fedppl.settings import flag, one_of, shown, whole
from fedppl.types import Array, DataError, DeclarationError

logger = logging.getLogger(__name__)

_ALL_ROWS = "all rows"  # in error messages


def formula(
    formula: str,
    family: str = "gaussian",
    *,
    priors: Mapping[str, Prior] | None = None,
    levels: Mapping[str, Sequence[Any]] | None = None,
    constants: Mapping[str, Any] | None = None,
    weights: str | None = None,
    correlated: bool = True,
) -> FederatedModel:
    r"""Declare one client's model by a formula, as in lme4, brms and Bambi.

    .. math:: g(\mathrm E[y_{ki}]) = x_{ki}^\top \beta + z_{ki}^\top u_k + \dots, \qquad
              u_k \sim \mathrm N(0, D R D)

    Coefficients β of the common terms, sds D and correlations R are shared by all clients; a client's own effects u_k
    are local.

    Parameters
    ----------
    formula
        Such as ``"y ~ age * arm + (1 + arm | site)"``. The response is a column, ``prop(successes, trials)``, or for
        survival ``Surv(time, event)``, event being 1, or 0 where there was none until then, or
        ``Surv(lower, upper, "interval")``: an event after lower and not after upper. Upper is ``inf`` where there was
        none yet, lower is 0 where it had happened at the first look, and both are equal where the time is known. Right
        of ~ are terms as in R, patsy and formulaic, ``offset(x)``, functions of NumPy (``np.log(x)``), ``center(x)``
        and ``scale(x)`` by the mean and sd of all clients' rows, ``C(x)`` for numbers that are levels, and
        ``bs(x, knots=knots, lower_bound=0, upper_bound=90)`` with `constants`. Effects ``(... | site)`` vary by client,
        and ``(1 | site/ward)`` also by groups within a client.
    family
        How the outcome is distributed, such as "gaussian", "bernoulli", "poisson", "ordinal", or "weibull" for times.
        All families, with their links, other parameters and priors, are in the table of ``docs/formulas.md``, and an
        unknown name is answered by their list. The hazard of "piecewise" is constant between the times
        ``constants={"cuts": [30, 90]}``.
    priors
        Priors by the names that `FederatedModel.describe` shows, ``{"age": fedppl.Prior("Normal", mu=0, sigma=1)}``.
        By default they are wide on the scales that clients agreed on.
    levels
        Orders of levels, by column: the first is the reference, also of a categorical response. By default levels are
        in the order of the tables' categories if these are equal at all clients, else in numerical or alphabetical
        order. An ordinal response of texts needs an order, unless tables have ordered categories (pandas'
        ``ordered=True``, polars' ``Enum``). Sites that agree in sums under masks have no levels but
        those that stand here.
    constants
        Names in the formula that are not columns, ``{"knots": [30, 50, 70]}``: numbers, and functions of single rows.
    weights
        A column of weights above 0, which multiply the log likelihood of each row: the number of rows it stands for.
    correlated
        Whether several effects of one factor have a correlation.

    Returns
    -------
    FederatedModel
        Its data are frames, or columns by name; some clients may have a `fedppl.summaries.Estimate` of coefficients, or
        a `fedppl.summaries.Table` of events.

    Raises
    ------
    DeclarationError
        If the formula cannot be read, or has another meaning at each client.

    Examples
    --------
    >>> import fedppl
    >>> model = fedppl.formula("y ~ age + (1 | site)", family="bernoulli")
    >>> model.shared
    ('Intercept', 'age', 'site_sd')

    Notes
    -----
    *When this fails.* Clients agree on levels and scales by `agree`, which `fedppl.fit` calls if the data are in this
    process: a level that no client has cannot be learnt, and a client that comes later may not have a new one.

    With weights that are not whole numbers the product of powers of likelihoods is not a probability of data: the width
    of the posterior follows from their sum, and evidence and leave-one-out results are of these powers. A row that is
    left out is left out with its weight. Survey weights, inverse to the probability of being sampled, give intervals
    that are too narrow; scale them to their effective number of rows.
    """
    known = checks.mapping("constants", constants, '{"knots": [30, 50, 70]}')
    outcomes = family_of(family)
    checks.constants({name: value for name, value in known.items() if name != "cuts" or not outcomes.has_cuts})
    declared = parse(formula, tuple(known))
    flag("correlated", correlated)
    require_family(outcomes, declared, formula, known)
    if weights is not None and (not isinstance(weights, str) or not weights):
        raise DeclarationError(f'weights={shown(weights)} is no name of a column; give one, such as "n".')
    by_name = checks.mapping("priors", priors, '{"age": fedppl.Prior("Normal", mu=0, sigma=1)}')
    given = {variable(str(name)): prior for name, prior in by_name.items()}
    by_column = checks.mapping("levels", levels, '{"dose": ["low", "high"]}')
    order = {name: checks.order_of(name, listed) for name, listed in by_column.items()}
    built = Formula(formula, declared, outcomes, given, correlated, order, known, weights)
    require_names(built)
    for name, prior in given.items():
        checks.prior(name, prior, built.positive.get(name))
    return _model(built)


@dataclass(frozen=True)
class Agreed:
    """The agreement of clients.

    Attributes
    ----------
    model
        The declaration, with the same meaning at all clients.
    columns
        A row for each column: its levels, or its mean and sd.
    strange
        Messages on columns with another scale or location at one client than at most others, and on levels that look
        like a mistake.
    clients
        Ids of the clients that agreed.
    """

    model: FederatedModel
    columns: pd.DataFrame
    strange: tuple[str, ...]
    clients: tuple[str, ...]


def agree(
    model: FederatedModel,
    data: Any,
    *,
    by: Hashable | Sequence[Hashable] | None = None,
    missing: str = "error",
    min_count: int = 1,
    withheld: str = "error",
) -> Agreed:
    """Have clients agree on levels, reference levels and scales, so that coefficients mean the same at all.

    Each client sends, for each column of the formula, its number of rows; for numbers their sum and sum of squares; for
    texts the levels of at least `min_count` rows, and whether there are others. With a `min_count` above 1 numbers of
    rows, means and sds are rounded, extreme values of fewer rows are clipped, and a client with fewer rows takes the
    constants of the others. `fedppl.Flower.agree` asks sites under their own policies, and does not disclose whether
    some rows, but fewer than `min_count`, have a level.

    Parameters
    ----------
    model
        The declaration by `formula`.
    data, by, missing
        As for `fedppl.fit`. Clients with estimates take no part.
    min_count
        Rows that a client needs to send a level, or anything.
    withheld
        What to do with rows of levels that were not sent: "error", or "other" for a level of that name.

    Returns
    -------
    Agreed

    Raises
    ------
    DataError
        If columns do not fit together.

    Examples
    --------
    >>> import fedppl, pandas as pd
    >>> frame = pd.DataFrame({"site": [1, 1, 2, 2], "arm": ["b", "a", "a", "c"], "y": [1.0, 2.0, 0.5, 0.7]})
    >>> fedppl.agree(fedppl.formula("y ~ arm + (1 | site)"), frame, by="site").columns.loc["arm", "levels"]
    ('a', 'b', 'c')

    Notes
    -----
    *When this fails.* Counts of levels and sums disclose much of a client with few rows.
    """
    whole("min_count", min_count)
    one_of("withheld", withheld, ("error", "other"))
    gaps.required(missing)
    data = frames.opened(data, by, of_formula=True)
    model = with_order(model, data)
    return _agreed(model, clients_of(_formula(model), data, by, missing), min_count, withheld)


def _agreed(model: FederatedModel, clients: Mapping[Any, Any], min_count: int, withheld: str) -> Agreed:
    """The agreement of clients by their rows."""
    built = _formula(model)
    what, summaries = asked(built), {}
    with_rows = {str(k): given for k, given in clients.items() if not isinstance(given, Estimate)}
    for k, given in with_rows.items():
        checks.columns(built.columns, given, f"client {k!r}")
        check_rows(built, given, k)
        summaries[k] = tell(sized(built, given), what.names, what.levels, min_count, here=True)
    if not summaries:
        raise DataError("all clients gave estimates, and levels and scales need rows; give those of one client.")
    if built.lacks_order:
        checks.ordered(built.terms.response.columns[0], with_rows)
    return of_told(model, summaries, withheld)


def of_told(
    model: FederatedModel,
    summaries: Mapping[str, Mapping[str, Told]],
    withheld: str,
    *,
    believed: bool = True,
    fixed: Mapping[str, Sequence[str]] | None = None,
) -> Agreed:
    """The agreement from clients' summaries, whose numbers of rows are bounded unless `believed`.

    Columns in `fixed`, by default all of formula(levels=), have all their levels, whether or not rows have them.
    """
    declared = _formula(model)
    terms, outcomes, what = declared.terms, declared.terms.response.columns, asked(declared)
    agreement = agreed(
        summaries,
        declared.levels if fixed is None else fixed,
        others=withheld == "other",
        unscaled=what.unscaled,
        closed=outcomes,
        constant={*terms.columns, *outcomes[1:]} - terms.varying,  # offsets, trials
        listed={**declared.orders, **declared.levels},
        believed=believed,
    )
    for name, order in declared.orders.items():
        if order is None and (levels := agreement.columns[name].levels):
            said = "categories of %r have different orders, or none, at clients: levels are %s; pass levels={%r: ...}"
            logger.warning(said, name, list(levels), name)
    checks.require_two(declared.family, outcomes[0], agreement)
    design = (built := declared.agreed(agreement)).spec.design
    mistaken = [*strange_levels(summaries), *checks.odd_levels(agreement, what.levels)]
    units = strange(summaries)
    sizes = [] if believed else strange_sizes(summaries)
    for said, odd_ones in (
        ("columns may be swapped, or units differ; bring all clients to one unit: %s", units),
        ("numbers of rows are out of proportion, and count for less: %s", sizes),
        ("%s", far_from_zero(design, SAID)),
        ("levels may be mistaken: %s", mistaken),
    ):
        if odd_ones:
            logger.warning(said, "; ".join(odd_ones[:5]))
    odd = (*units, *sizes, *mistaken)
    return Agreed(_model(built), _table(agreement), odd, tuple(sorted(summaries)))


def clients_of(built: Formula, data: Any, by: Any, missing: str) -> Mapping[Any, Any]:
    """Clients' columns by id: one table of a data frame, else a mapping."""
    data, factor = as_rows(built, data), built.terms.client
    by = factor if by is None and isinstance(data, frames.Opened) else by
    checks.tables(built, data, by)
    clients = frames.given(data) if by is None else tables.of_frame(data, by, built.columns, texts=True)
    if not isinstance(clients, Mapping) or not clients:
        what = f"{'an empty ' if isinstance(data, Mapping) else ''}{type(data).__name__}"
        raise DataError(f"data are {what}; pass a data frame with by=, or a mapping from client id to rows.")
    if isinstance(clients, Table):
        checks.limits(built, clients.columns, "the table")
    else:
        wanted = built.columns if factor is None else (*built.columns, factor)
        frames.require_by_client(clients, wanted)
        rows = {k: one for k, one in clients.items() if not isinstance(one, Estimate)}
        rows = {k: frames.raw(one, wanted, f"client {str(k)!r}") for k, one in rows.items()}
        checks.one_factor_a_client(built, rows)
        for k, columns in rows.items():
            columns.pop(factor or "", None)
            checks.limits(built, columns, f"client {str(k)!r}")
        clients = {**clients, **rows}
    if missing != gaps.OUTCOMES:
        complete: Mapping[Any, Any] = tables.complete(clients, missing)
        return complete
    with_rows = {k: rows for k, rows in clients.items() if not isinstance(rows, Estimate)}
    parts = gaps.without_outcomes(with_rows, built.terms.response.columns[:1])
    return {**clients, **{k: part.data for k, part in parts.items() if part is not None}}


def ready(
    model: FederatedModel, data: Any, by: Any, missing: str, *, one_table: bool = False
) -> tuple[FederatedModel, Any]:
    """The agreed model of a formula, and its builder's arrays by client, with `one_table` of many clients as one."""
    data = frames.opened(data, by, of_formula=True)
    model = with_order(model, data)
    built = _formula(model)
    clients = clients_of(built, data, by, missing)
    if one_table and isinstance(clients, Table) and len(clients) >= tables.FEWEST and not built.terms.nested:
        read = None if built.design is None and built.lacks_order else _read_at_once(model, clients)
        if read is not None:
            return read
    with_rows = {k: rows for k, rows in clients.items() if not isinstance(rows, Estimate)}
    model, arrays = _arrays(model, with_rows, with_rows, len(with_rows))
    return model, {**clients, **arrays}


def _arrays(
    model: FederatedModel, told: Mapping[Any, Any], rows: Mapping[Any, Any], count: int
) -> tuple[FederatedModel, dict[Any, dict[str, Array]]]:
    """The agreed model, and its builder's arrays; clients agree by the rows `told`, unless they did before."""
    agreed_here = _formula(model).design is None
    model = _agreed(model, told, 1, "error").model if agreed_here else model
    built = _formula(model)
    arrays = {k: built.of_columns(str(k), one) for k, one in rows.items()}
    if agreed_here:
        checks.say_what_cannot_be_told(built, list(arrays.values()), count)
    return model, arrays


def _read_at_once(model: FederatedModel, table: Table) -> tuple[FederatedModel, Table] | None:
    """The agreed model and the table's arrays; None where clients have to be read one by one."""
    try:
        check_rows(_formula(model), table.columns, _ALL_ROWS)
        told = table if len(table) < tables.MANY else {_ALL_ROWS: table.columns}
        model, arrays = _arrays(model, told, {_ALL_ROWS: table.columns}, len(table))
    except DataError:  # client by client, errors name the client and its row
        return None
    is_whole = all(len(array) == table.begins[-1] for array in arrays[_ALL_ROWS].values())
    return (model, replace(table, columns=arrays[_ALL_ROWS])) if is_whole else None


def with_order(model: FederatedModel, data: Any) -> FederatedModel:
    """The model with orders of categories from tables, for columns whose order the formula does not give.

    An ordinal outcome has all categories; another column has those that occur in rows, the first as the reference.
    """
    built = _formula(model)
    if built.design is not None or built.orders:
        return model
    outcome = built.terms.response.columns[0]
    order = frames.order(data, outcome) if built.lacks_order else None
    levels = built.levels if order is None else {**built.levels, outcome: order}
    unsaid = [name for name in asked(built).names if name not in levels]
    orders = frames.orders(data, unsaid)
    return model if order is None and not orders else _model(replace(built, levels=levels, orders=orders))


def remembering(model: FederatedModel, agreement: Any, data: Any = None) -> FederatedModel:
    """A formula's model with the agreement of a file; data may have an order of levels."""
    built = _formula(model)
    if built.design is not None:
        return model
    known = () if agreement is None else agreement.columns
    other = "the file is of another declaration"
    if unknown := [name for name in asked(built).names if name not in known]:
        raise DeclarationError(f"{other}: {unknown} are not among its {sorted(known)}; pass what was fitted.")
    ordered = built if data is None else _formula(with_order(model, data))
    for name, order in ordered.levels.items():
        agreed = agreement.columns[name].levels
        if [level for level in order if level in agreed] != [level for level in agreed if level in order]:
            what = f"{name!r} has the levels {list(agreed)} there and {list(order)} here"
            raise DeclarationError(f"{other}: {what}; pass what was fitted.")
    return _model(built.agreed(agreement))


def reader_of_formula(model: FederatedModel) -> SharedReader:
    """How draws of φ are read, by a client with one row at the agreed means and first levels; no data are needed."""
    built = _formula(model)
    assert built.design is not None
    columns = built.design.agreement.columns
    row = {name: [column.levels[0] if column.levels else column.mean] for name, column in columns.items()}
    arrays = built.read_unseen("file", {name: row.get(name, [1]) for name in built.columns})
    outcome = built.containers["outcome"]
    if arrays[outcome].dtype.kind == "f":
        arrays[outcome] = np.full(1, 0.5)  # in the support of positive outcomes and of shares, too
    (client,) = model.reading(lambda _, given: given).enrol({"file": arrays}, kernel=False).values()
    return client.reader()


def is_formula(model: Any) -> bool:
    """Whether a declaration is by a formula."""
    return isinstance(model, FederatedModel) and isinstance(model.builder, Formula)


def _formula(model: Any) -> Formula:
    if not is_formula(model):
        raise DeclarationError(f"model is {type(model).__name__} without a formula; pass what fedppl.formula returned.")
    built: Formula = model.builder
    return built


def _model(built: Formula) -> FederatedModel:
    agreement = None if built.design is None else built.design.agreement
    builders: dict[str, Any] = dict(zip(KINDS, (built, EstimateOf(built)), strict=True))
    return FederatedModel(builders, built.shared, kind=kind_of, agreement=agreement)


def _table(agreement: Agreement) -> pd.DataFrame:
    rows = {
        name: (column.levels, None, None) if column.levels else (None, column.mean, column.sd)
        for name, column in agreement.columns.items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["levels", "mean", "sd"])
    return table.astype({"mean": float, "sd": float})


# Checks of a formula, its family and names before any data are seen ---------------------------------------------------

_RESPONSES = {
    "plain": "a column",
    "proportion": "prop(successes, trials)",
    "survival": "Surv(time, event)",
    "interval": 'Surv(lower, upper, "interval")',
}


def require_family(family: Family, terms: Terms, text: str, constants: Mapping[str, Any]) -> None:
    """Refuse a response, cut points or offsets that do not fit the family."""
    if terms.response.kind not in family.responses:
        wanted = " or ".join(_RESPONSES[kind] for kind in family.responses)
        others = [one.name for one in families.FAMILIES.values() if terms.response.kind in one.responses][:6]
        raise DeclarationError(f"family={family.name!r} has {wanted} for a response; {text!r} has that of {others}.")
    if family.has_cuts:
        cuts = constants.get("cuts")
        values = np.asarray(cuts if isinstance(cuts, Sequence | np.ndarray) else [], dtype=object).tolist()
        times = [float(one) if isinstance(one, int | float | np.integer | np.floating) else np.nan for one in values]
        if not times or not np.all(np.diff([0.0, *times, np.inf]) > 0):
            what = f"family={family.name!r} needs cut points, and constants={{'cuts': {shown(cuts)}}} are none"
            raise DeclarationError(f"{what}; give increasing times above 0, constants={{'cuts': [30, 90]}}.")
    if family.several and terms.offsets:
        raise DeclarationError(f"offset() needs one linear predictor, and family={family.name!r} has several.")


def require_names(built: Formula) -> None:
    """Refuse ambiguous names, and priors, constants and levels of unknown names."""
    terms, groups = built.terms, built.terms.groups
    right = {*terms.columns, *terms.common, *(one for group in groups for one in group.factor)}
    if both := sorted({*terms.response.columns} & right):
        raise DeclarationError(f"{both} are on both sides of {built.text!r}; leave them out of one.")
    # One column may be several effects, once its levels are known.
    several = [one for one in groups if built.correlated and set(one.expressions) - {"1"}]
    later = {name for one in several for name in spreads(one, 2, correlated=True)}
    alone = [one for one in several if len(one.expressions) + built.family.several == 1]  # as far as is known
    of_groups = [f"{tag(one)}_{what}" for one in groups for what in ("effects", "z")]
    of_groups += [*(f"{tag(one)}_corr" for one in several), *(f"{tag(one)}_partial" for one in alone)]
    names = [*built.shared, terms.response.variable, *of_groups]
    where = f"columns of {built.text!r} and of"
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DeclarationError(f"{twice} are names of {where} variables of the model; rename these columns.")
    dims = {f"{tag(group)}_{what}" for group in groups for what in ("effect", "pair")} | {"chain", "draw", "sample"}
    dims |= {f"{name}_dim{axis}" for name in names for axis in ("", "_0", "_1")}
    dims |= {f"{terms.response.variable}_level"} if built.family.several else set()
    if both := sorted(set(names) & dims):
        raise DeclarationError(f"{both} are names of {where} dims of its results; rename these columns.")
    for name, prior in built.priors.items():
        if not isinstance(prior, Prior):
            raise DeclarationError(f'priors[{name!r}]={shown(prior)} is no prior; pass fedppl.Prior("Normal", mu=0).')
    if unknown := sorted(set(built.priors) - set(built.shared) - later):
        spelled = {name.replace(" ", ""): name for name in built.shared}
        meant = [spelled[name.replace(" ", "")] for name in unknown if name.replace(" ", "") in spelled]
        hint = f"; write {', '.join(map(repr, meant))}" if meant else ""
        raise DeclarationError(f"priors of {unknown}: the shared variables are {list(built.shared)}; name some{hint}.")
    if both := sorted(set(built.constants) & set(built.columns)):
        raise DeclarationError(f"constants {both} are columns of {built.text!r} too; rename one of the two.")
    words = {*re.findall(r"[^\W\d]\w*", built.text), *re.findall("`([^`]*)`", built.text)}
    words |= {"cuts"} if built.family.has_cuts else set()
    if unused := sorted(set(built.constants) - words):
        raise DeclarationError(f"constants {unused} are not in {built.text!r}; use them there, or leave them out.")
    if unknown := sorted(set(built.levels) - set(built.columns)):
        raise DeclarationError(f"levels of {unknown}: the formula's columns are {list(built.columns)}; name some.")
