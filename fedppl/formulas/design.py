"""From a client's rows to the columns of coefficients, with the same meaning at all clients."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special
from scipy.interpolate import BSpline

from fedppl.data.frames import is_text
from fedppl.formulas import expressions
from fedppl.formulas.agreement import Agreement, Column, coded
from fedppl.formulas.expressions import unquoted
from fedppl.formulas.terms import Coded, Product, Terms, variable
from fedppl.types import Array, DataError, DeclarationError

# Values of a formula's factors at rows, by walking syntax trees: no text is executed as Python ------------------------

_CUBIC = 3
_SAME = 1e-9  # relative to the largest value
_AGREED = "the agreed columns"  # for error messages at made-up rows


class Rows(NamedTuple):
    """Rows of a client, or made-up rows that stand for all clients'.

    Without a `what` for error messages no row is refused, and values outside of a function's domain are NaN.
    """

    frame: pd.DataFrame
    agreement: Agreement
    constants: Mapping[str, Any]
    what: str | None

    @property
    def are_a_clients(self) -> bool:
        """Whether rows may be refused: made-up ones may lie outside of a function's domain."""
        return self.what not in (None, _AGREED)


def columns(tree: ast.expr, rows: Rows) -> Array:
    """Columns of a factor, (n, width): one, or several of a spline, a polynomial or a user's function."""
    match expressions.calls(tree), tree:
        case (expressions.SPLINE, ast.Call()):
            values = _spline(tree, rows)
        case (expressions.POLYNOMIAL, ast.Call()):
            given = expressions.arguments(tree)
            values = np.vander(_vector(given["x"], rows), _literal(given, "degree", 1) + 1, increasing=True)[:, 1:]
        case _:
            values = np.asarray(_number(tree, rows), dtype=float)
            values = np.broadcast_to(values, (len(rows.frame),)) if values.ndim == 0 else values
    if values.ndim > 2 or len(values) != len(rows.frame) or values.shape[1:] == (0,):
        what = f"shape {values.shape} at {len(rows.frame)} rows"
        raise DeclarationError(f"{expressions.written(tree)} has {what}; return a value for each.")
    return values.reshape(len(values), -1)


def require_rowwise(tree: ast.expr, rows: Rows) -> None:
    """Refuse a user's function whose value at a row depends on other rows, since these differ between clients."""
    if not {*map(expressions.calls, ast.walk(tree))} & {*rows.constants}:
        return
    whole, order = columns(tree, rows), np.random.default_rng(0).permutation(len(rows.frame))
    atol = _SAME * np.nanmax(np.abs(whole), initial=0.0, where=np.isfinite(whole))
    for some in (order, order[: len(order) // 3], order[len(order) // 3 :]):
        part = columns(tree, rows._replace(frame=rows.frame.iloc[some].reset_index(drop=True)))
        if part.shape != whole[some].shape or not np.allclose(part, whole[some], _SAME, atol, equal_nan=True):
            remedy = "give a function of single rows, write center(x) or scale(x), or compute a column before"
            raise DeclarationError(f"{expressions.written(tree)} depends on other rows; {remedy}.")


def _number(node: ast.expr, rows: Rows) -> Any:
    """A number, or one per row."""
    match node:
        case ast.Constant(value=value):
            return np.float64(value)  # type: ignore[arg-type]
        case ast.Attribute(attr=name):
            return expressions.NUMBERS[name]
        case ast.Name(id=name):
            return _named(unquoted(name), rows)
        case ast.UnaryOp(op=op) | ast.BinOp(op=op) | ast.Compare(ops=[op]):
            values = [_number(one, rows) for one in expressions.operands(node)]
            if isinstance(op, ast.BitAnd | ast.BitOr) and rows.are_a_clients:
                _require_truths(node, values, rows.what)
            return np.asarray(expressions.SIGNS[type(op)](*values), dtype=float)
        case ast.Call():
            return _called(node, rows)
    raise DeclarationError(f"{ast.unparse(node)} is no number.")


def _require_truths(node: ast.expr, values: Sequence[Array], what: str | None) -> None:
    """Refuse & and | of numbers, which are bits to Python and truths to R, in clients' rows."""
    for one, value in zip(expressions.operands(node), values, strict=True):
        if np.any(wrong := (value != 0) & (value != 1)):
            number = np.atleast_1d(value)[np.atleast_1d(wrong)][0]
            place = f"{expressions.written(one)!r} is {number:g} in {expressions.written(node)!r}"
            raise DataError(f"{what}: {place}, and & and | are of truths; compare it, (x > 0) & (z < 2).")


def _called(call: ast.Call, rows: Rows) -> Any:
    name = expressions.calls(call)
    if isinstance(call.func, ast.Name) and name in rows.constants:
        return _of_user(call, rows)
    values = [_number(one, rows) for one in call.args]
    if name in expressions.CENTRED:
        moments = rows.agreement.columns[expressions.written(call.args[0])]
        return (values[0] - moments.mean) / (1.0 if name == "center" else moments.sd)
    known = expressions.function(name)
    return values[0] if known is None else np.asarray(known(*values), dtype=float)  # I() is its argument


def _of_user(call: ast.Call, rows: Rows) -> Any:
    """Call a function among the constants with pandas' columns."""
    given = rows.constants[expressions.calls(call)]
    if not callable(given):
        raise DeclarationError(f"{ast.unparse(call)} calls a constant that is not a function.")
    words = {str(argument.arg): _argument(argument.value, rows) for argument in call.keywords}
    result = np.asarray(given(*(_argument(argument, rows) for argument in call.args), **words))
    if result.dtype.kind == "c":
        raise DeclarationError(f"{expressions.written(call)} is complex; give a function of real values.")
    return result.astype(float)


def _argument(node: ast.expr, rows: Rows) -> Any:
    if isinstance(node, ast.Name):
        name = unquoted(node.id)
        return rows.constants[name] if name in rows.constants else rows.frame[name]
    value = _number(node, rows)
    return pd.Series(value, index=rows.frame.index) if np.ndim(value) == 1 else value


def _named(name: str, rows: Rows) -> Any:
    """A constant, or a column of numbers."""
    if name in rows.constants:
        try:
            return np.asarray(rows.constants[name], dtype=float)[()]
        except (TypeError, ValueError) as error:
            raise DeclarationError(f"the constant {name!r} is not a number; call functions, {name}(x).") from error
    column = rows.frame[name]
    if isinstance(column.dtype, pd.CategoricalDtype):
        raise DeclarationError(f"{name!r} has levels; give it as numbers, since functions take columns of numbers.")
    return column.to_numpy(dtype=float)


def _vector(node: ast.expr, rows: Rows) -> Array:
    return np.broadcast_to(np.asarray(_number(node, rows), dtype=float), (len(rows.frame),))


def _literal(given: Mapping[str, ast.expr], name: str, default: int) -> int:
    """A literal argument of a function of several columns."""
    return int(getattr(given.get(name), "value", default))


def _spline(call: ast.Call, rows: Rows) -> Array:
    """A basis of B-splines with constant knots, without its first column as in R, or whole."""
    given, text = expressions.arguments(call), expressions.written(call)
    low, high = (float(_number(given[name], rows)) for name in ("lower_bound", "upper_bound"))
    degree, listed = _literal(given, "degree", _CUBIC), given["knots"]
    elements = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [listed]
    knots = np.sort(np.concatenate([np.zeros(0), *(np.ravel(_number(one, rows)) for one in elements)]))
    if not (low < high and np.all(np.isfinite(knots)) and np.all((knots > low) & (knots < high))):
        bounds = f"{low:g}, {high:g}"
        raise DeclarationError(f"{text} has knots {knots.tolist()} and bounds {bounds}; give knots between the bounds.")
    x = _vector(given["x"], rows)
    outside = (x < low) | (x > high)
    if np.any(outside) and rows.are_a_clients:
        where, remedy = int(np.argmax(outside)), "widen lower_bound and upper_bound, the same at all clients"
        raise DataError(f"{rows.what}: row {where} lies outside of the bounds of {text!r}; {remedy}.")
    places = np.concatenate([[low] * (degree + 1), knots, [high] * (degree + 1)])
    basis = np.asarray(BSpline.design_matrix(np.nan_to_num(x, nan=low).clip(low, high), places, degree).toarray())
    basis[np.isnan(x) | (outside & (rows.what is None))] = np.nan
    is_whole = _literal(given, "include_intercept", _literal(given, "intercept", False))
    return basis if is_whole or not _literal(given, "center", True) else basis[:, 1:]


@dataclass(frozen=True)
class Design:
    """Computes columns of terms from rows."""

    terms: Terms
    agreement: Agreement
    constants: Mapping[str, Any]  # names in the formula that are not columns
    # terms of the common part, and of the effects of each group, as products of columns
    coding: tuple[tuple[Coded, ...], ...]
    labels: Mapping[str, tuple[str, ...]]  # names of the columns of each common term, by term
    entries: Mapping[str, tuple[str, ...]]  # short names: levels and places alone if these are distinct, by term
    group_labels: tuple[tuple[str, ...], ...]  # names of the effects of each group
    center: Array  # and scale: means and sds of the columns of common terms over `standing_for_all`, (p,)
    scale: Array
    group_scale: tuple[Array, ...]  # sizes of the effects' columns, by group
    offset_center: float  # mean of the sum of the offsets over these rows
    left: Array  # residual sds given the other columns where columns in products are far from 0; else `scale`, (p,)

    def common(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the common terms, (n, p)."""
        return self._columns([one for one in self.coding[0] if one.term], frame, what)

    def offset(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Sum of the offsets, (n,)."""
        parts = [self._factor(name, frame, what)[:, 0] for name in self.terms.offsets]
        return np.asarray(np.sum(parts, axis=0))

    def group(self, number: int, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the effects of a group, (n, q)."""
        return self._columns(self.coding[1 + number], frame, what)

    def side_by_side(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the common terms, the sum of the offsets, and columns of the effects of all groups, (n, all).

        Without a `what` nothing is refused, and values outside of a function's domain are NaN.
        """
        offset = [self.offset(frame, what)[:, None]] if self.terms.offsets else []
        groups = [self.group(number, frame, what) for number in range(len(self.terms.groups))]
        with np.errstate(all="ignore"):
            return np.concatenate([self.common(frame, what), *offset, *groups], axis=1)

    def _columns(self, terms: Sequence[Coded], frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of terms, (n, width)."""
        names = dict.fromkeys(name for term in terms for name in term.term)
        factors = {name: self._factor(name, frame, what) for name in names}
        products = [_product(one, factors, len(frame)) for term in terms for one in term.products]
        return np.concatenate([np.zeros((len(frame), 0)), *products], axis=1)

    def _factor(self, name: str, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of a factor, (n, width): one per level of a column with levels."""
        if self.has_levels(name):
            codes = frame[name].cat.codes.to_numpy()
            return np.asarray(codes[:, None] == np.arange(len(self.agreement.columns[name].levels)), dtype=float)
        return _evaluated(name, self.terms.trees[name], Rows(frame, self.agreement, self.constants, what))

    def has_levels(self, name: str) -> bool:
        """Whether a factor is a column with levels, not a computation."""
        column = self.agreement.columns.get(name)
        return column is not None and bool(column.levels) and isinstance(self.terms.trees[name], ast.Name)


def build(terms: Terms, agreement: Agreement, constants: Mapping[str, Any]) -> Design:
    """The design that all clients share, from their agreement."""
    frame = standing_for_all(terms, agreement)
    levels = {name: column.levels for name, column in agreement.columns.items() if column.levels}
    coding = tuple(tuple(part.products(levels)) for part in terms.sums)
    design = Design(terms, agreement, constants, coding, {}, {}, (), np.zeros(0), np.ones(0), (), 0.0, np.ones(0))
    common = [term for term in coding[0] if term.term]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of functions at made-up rows
        widths = _require_rowwise(design, frame)
        moments = [[_moments(design, term) for term in part] for part in (common, *coding[1:])]
        offset = design.offset(frame, _AGREED) if terms.offsets else np.zeros(1)
        if not np.all(np.isfinite(offset)):
            offset = design.offset(standing_for_all(terms, agreement, positive=True), _AGREED)
        offset_center = np.nanmean(offset)
    group_labels = tuple(
        tuple(label for term in group for label in _labels(term, levels, widths)) for group in coding[1:]
    )
    long = [_labels(term, levels, widths) for term in common]
    for part in ([label for labels in long for label in labels], *group_labels):
        if twice := sorted(label for label, n in Counter(part).items() if n > 1):
            raise DeclarationError(f"two coefficients are called {twice[0]!r}; rename the column, or a level of it.")
    short = [_labels(term, levels, widths, whole=False) for term in common]
    short = [s if all(s) and len(set(s)) == len(s) else whole for s, whole in zip(short, long, strict=True)]
    built = dataclasses.replace(
        design,
        labels=dict(zip(terms.common, long, strict=True)),
        entries=dict(zip(terms.common, short, strict=True)),
        group_labels=group_labels,
        center=np.concatenate([np.zeros(0), *(one.mean for one in moments[0])]),
        scale=np.concatenate([np.zeros(0), *(one.sd for one in moments[0])]),
        group_scale=tuple(np.concatenate([one.size for one in part]) for part in moments[1:]),
        offset_center=float(offset_center) if np.isfinite(offset_center) else 0.0,
    )
    return dataclasses.replace(built, left=_left(built))


def _require_rowwise(design: Design, frame: pd.DataFrame) -> dict[str, int]:
    """Refuse factors that cannot be computed, or depend on other rows; return the widths of the others."""
    widths = {}
    for name, tree in design.terms.trees.items():
        if design.has_levels(name):
            continue
        rows = Rows(frame, design.agreement, design.constants, _AGREED)
        try:
            widths[name] = columns(tree, rows).shape[1]
            if name in design.terms.offsets and widths[name] != 1:
                raise DeclarationError(f"an offset is one number a row, not {widths[name]}; compute a column before")
            require_rowwise(tree, rows)
        except Exception as error:
            remedy = "; give functions columns of numbers and constants={...}, or compute a column before"
            remedy = "" if isinstance(error, DeclarationError) else remedy  # has its own
            raise DeclarationError(f"{name} cannot be evaluated: {str(error).rstrip('.')}{remedy}.") from error
    return widths


def table(data: Mapping[str, Any], terms: Terms, agreement: Agreement, what: str) -> pd.DataFrame:
    """The columns that a formula reads right of ~, texts as agreed levels."""
    columns_of_table = {}
    for name in terms.columns:
        column, values = agreement.columns[name], np.asarray(data[name])
        if column.levels:
            levels = coded(column, values, agreement, f"{what}: column {name!r}")
            columns_of_table[name] = pd.Categorical(levels, categories=list(column.levels), ordered=True)
        elif is_text(values):
            raise DataError(f"{what}: column {name!r} has texts, and clients agreed on numbers; recode its rows.")
        else:
            columns_of_table[name] = values.astype(float)
    rows = len(next(iter(data.values())))
    return pd.DataFrame(columns_of_table, index=np.arange(rows))


def plain(column: pd.Series) -> Array:
    """A column of the table as numbers; levels become their places."""
    return np.asarray(column.cat.codes if isinstance(column.dtype, pd.CategoricalDtype) else column, dtype=float)


def categories(column: Column, codes: Any) -> pd.Categorical:
    """Levels at their places."""
    return pd.Categorical.from_codes(codes, list(column.levels), ordered=True)


def _product(product: Product, factors: Mapping[str, Array], rows: int) -> Array:
    """Products of the columns of factors, the first factor's running fastest."""
    product_columns = np.ones((rows, 1))
    for name, is_short in zip(*product, strict=True):
        factor = factors[name][:, int(is_short) :]
        product_columns = (factor[:, :, None] * product_columns[:, None, :]).reshape(rows, -1)
    return product_columns


def _labels(
    term: Coded, levels: Mapping[str, Sequence[str]], widths: Mapping[str, int], *, whole: bool = True
) -> tuple[str, ...]:
    """Names of a term's columns; without `whole` levels and places alone."""

    def own(name: str, is_short: bool) -> Iterable[str]:
        several = widths.get(name, 2) > 1
        places = levels[name][int(is_short) :] if name not in widths else [str(place) for place in range(widths[name])]
        if not whole:
            return places if several else [""]
        return [f"{variable(name)}[{place}]" for place in places] if several else [variable(name)]

    if not term.term:
        return ("Intercept",)
    return tuple(
        (":" if whole else ", ").join(part for part in reversed(parts) if part)
        for product in term.products
        for parts in itertools.product(*(own(*one) for one in reversed(list(zip(*product, strict=True)))))
    )


def _evaluated(name: str, tree: ast.expr, rows: Rows) -> Array:
    """Columns of a factor, (n, width); refuse values that are not finite."""
    try:
        with np.errstate(all="ignore"):  # values that are not finite are refused below
            values = columns(tree, rows)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{rows.what or _AGREED}: {name!r} cannot be computed: {error}") from error
    wrong = ~np.isfinite(values)
    if rows.are_a_clients and np.any(wrong):
        where = int(np.argmax(wrong.any(axis=1)))
        row, said = rows.frame.iloc[where], f"{rows.what}: {name!r} is {values[where][wrong[where]][0]} in row {where}"
        if isinstance(tree, ast.Name):
            raise DataError(f"{said}; correct or drop such rows.")
        inputs = [f"{one} is {row[one]}" for one in sorted(expressions.columns(tree, rows.constants))]
        raise DataError(f"{said}, where {', '.join(inputs)}; correct rows or function.")
    return values


# Made-up rows that stand for all clients', and moments of columns over them, from the agreement -----------------------


_ROWS = 256  # that stand for all clients'
_MOST = 4096  # rows of a grid, unless its levels alone need more


class Moments(NamedTuple):
    """Moments of the columns of a term, (p,) each."""

    mean: Array
    sd: Array
    size: Array  # root mean square


def _moments(design: Design, term: Coded) -> Moments:
    """Moments of a term's columns, as if the columns that it reads were independent.

    They are computed on a grid of all levels, and of numbers with the agreed mean and sd: exact for levels, numbers and
    products of these. Rows where a function is NaN are left out.
    """
    read = {name for one in term.term for name in expressions.columns(design.terms.trees[one], design.constants)}
    frame, weight = grid(read, design.terms, design.agreement)
    values = design._columns([term], frame, _AGREED)
    weights = np.where(np.isfinite(values), weight[:, None], 0.0)
    total = weights.sum(axis=0)
    weights = weights / np.where(total > 0, total, 1.0)
    values = np.where(np.isfinite(values), values, 0.0)
    mean = np.sum(weights * values, axis=0)
    sd, size = (np.sqrt(np.sum(weights * of**2, axis=0)) for of in (values - mean, values))
    # The sd of a constant is rounding.
    return Moments(mean, np.where(sd > 1e-12 * size, sd, 1.0), np.where(size > 0, size, 1.0))


def standing_for_all(terms: Terms, agreement: Agreement, positive: bool = False) -> pd.DataFrame:
    """Rows with independent columns and the agreed means, sds, levels and shares.

    Numbers are uniform; with `positive` they are log-normal if the mean is above 0.
    """
    rng, data = np.random.default_rng(0), {}
    for name in terms.columns:
        column = agreement.columns[name]
        if column.levels:
            ends = np.cumsum(column.shares) * _ROWS
            codes = rng.permutation(np.searchsorted(ends, np.arange(_ROWS) + 0.5).clip(max=len(ends) - 1))
            data[name] = categories(column, codes)
        else:
            z = rng.permutation(np.linspace(-1.0, 1.0, _ROWS))
            if positive and column.mean > 0:
                spread = np.log1p((column.sd / column.mean) ** 2)
                quantiles = special.ndtri(np.argsort(np.argsort(z)) / _ROWS + 0.5 / _ROWS)
                data[name] = np.exp(np.log(column.mean) - 0.5 * spread + np.sqrt(spread) * quantiles)
            else:
                data[name] = column.mean + column.sd * z / np.std(z)  # with exactly the agreed mean and sd
    return pd.DataFrame(data, index=np.arange(_ROWS))


def grid(read: Collection[str], terms: Terms, agreement: Agreement) -> tuple[pd.DataFrame, Array]:
    """Rows with all combinations of the columns that are read, and their weights."""
    counts = {name: len(agreement.columns[name].levels) for name in terms.columns if name in read}
    numeric = sum(not count for count in counts.values())
    combined = np.prod([max(count, 1) for count in counts.values()])
    width = int(np.clip((_MOST / combined) ** (1 / max(numeric, 1)), 2, _ROWS))
    z = np.linspace(-1.0, 1.0, width)
    sizes = [count or width for count in counts.values()]
    rows = int(np.prod(sizes))
    places = dict(zip(counts, np.indices(sizes).reshape(len(sizes), rows), strict=True))
    data, weight = {}, np.ones(rows)
    for name in terms.columns:
        column, place = agreement.columns[name], places.get(name, np.zeros(rows, dtype=int))
        if column.levels:
            data[name] = categories(column, place)
            weight = weight * np.array(column.shares)[place] if name in read else weight
        else:
            data[name] = column.mean + column.sd * (z / np.std(z))[place] * (name in read)
    return pd.DataFrame(data, index=np.arange(rows)), weight


# Columns so far from 0 that their products are nearly collinear with other terms --------------------------------------

SAID = 8.0  # means in sds of which users are warned before a fit, and from which on priors take account of them
SUSPECT = 3.0  # means in sds that are named if a fit did not converge
_POWERS = (expressions.POLYNOMIAL, "np.square", "np.power")
_COLLINEAR = 1e-7  # relative residual of a column that the others determine


def far_from_zero(design: Design, least: float) -> list[str]:
    """Messages on numeric columns with a mean above `least` sds in effects, or in products without `center`.

    Effects (1 + x | site) of such a column have their intercept at x = 0, far from all rows, so that two sds and a
    correlation are nearly one number. So it is for coefficients of x and of x² or x:z.
    """
    messages, terms = [], design.terms
    for name in _far(terms, design.agreement, least):
        column = design.agreement.columns[name]
        far = f"{name!r} is far from 0, {column.mean:.6g} on average with an sd of {column.sd:.3g}"
        for group, group_sum in zip(terms.groups, terms.sums[1:], strict=True):
            if any(_stands_in(name, term, terms) for term in group_sum.terms):
                of = "/".join(group.factor)
                why = f"its effects by {of!r} are collinear with the intercept's, and their default prior too narrow"
                messages.append(f"{far}, so that {why}: write (1 + center({name}) | {of})")
        products = _products(name, terms)
        if products and np.any(design.scale > least * design.left):
            messages.append(f"{far}, so that {products[:4]} are collinear with other terms: write center({name})")
    return messages


def _left(design: Design) -> Array:
    """Residual sds of common columns, (p,), given a constant and the others if they are far from 0; at most their sds.

    Of terms with columns that are far from 0 and stand in powers or products.
    """
    terms, left = design.terms, np.array(design.scale)
    products = {term for name in _far(terms, design.agreement, SAID) for term in _products(name, terms)}
    read = {name for term in products for name in _read(terms, terms.factors[term])}
    some = [term for term, factors in terms.factors.items() if products and _read(terms, factors) <= read]
    if not some:
        return left
    those = np.isin([name for name in terms.common for _ in design.labels[name]], some)
    frame, weight = grid(read, terms, design.agreement)
    with np.errstate(all="ignore"):
        values = design.common(frame, _AGREED)[:, those]
        usable = np.isfinite(values).all(axis=1)
        values, weight = values[usable], weight[usable] / max(weight[usable].sum(), 1e-300)
        apart = values - weight @ values
        sd = np.sqrt(weight @ apart**2)
        if len(values) > len(sd) and np.all(sd > 0):
            root = np.linalg.qr(np.sqrt(weight)[:, None] * apart / sd, mode="r")
            if np.min(np.abs(np.diag(root))) > _COLLINEAR:
                left[those] = np.fmin(sd / np.linalg.norm(np.linalg.inv(root), axis=1), left[those])
    return left


def _far(terms: Terms, agreement: Agreement, least: float) -> list[str]:
    columns = [(name, agreement.columns[name]) for name in terms.columns]
    return [name for name, column in columns if not column.levels and abs(column.mean) > least * column.sd]


def _products(name: str, terms: Terms) -> list[str]:
    """Common terms that read a column uncentred, if one of them is a power or a product of columns."""
    those = {term: factors for term, factors in terms.factors.items() if _stands_in(name, factors, terms)}
    nodes = [node for factors in those.values() for one in factors for node in ast.walk(terms.trees[one])]
    powers = any(isinstance(node, ast.Pow) or expressions.calls(node) in _POWERS for node in nodes)
    return list(those) if powers or any(len(_read(terms, factors)) > 1 for factors in those.values()) else []


def _read(terms: Terms, factors: Sequence[str]) -> set[str]:
    return {name for one in factors for name in expressions.columns(terms.trees[one], ())} & {*terms.columns}


def _stands_in(name: str, factors: Sequence[str], terms: Terms) -> bool:
    """Whether a term reads a column uncentred."""
    return any(name in expressions.columns(terms.trees[one], (), without=expressions.CENTRED) for one in factors)
