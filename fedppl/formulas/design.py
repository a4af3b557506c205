"""From a client's rows to the columns that coefficients belong to, the same at all clients."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special
from scipy.interpolate import BSpline

from fedppl.formulas import expressions
from fedppl.formulas.agreement import Agreement, Column, coded, is_text
from fedppl.formulas.expressions import unquoted
from fedppl.formulas.terms import Product, Terms, variable
from fedppl.types import Array, DataError, DeclarationError

# Values of a formula's factors at rows: its trees are walked, nothing is given to Python to run -----------------------

_CUBIC = 3
_SAME = 1e-9  # relative to the largest value


class Rows(NamedTuple):
    """Rows of a client, or those that stand for all clients' and may lie beyond the bounds of splines.

    Without a `what` to name in errors no row is refused, and there is no number where a function ends.
    """

    frame: pd.DataFrame
    agreement: Agreement
    constants: Mapping[str, Any]
    what: str | None
    stand_for_all: bool = False


def columns(tree: ast.expr, rows: Rows) -> Array:
    """Columns of a factor, (n, its own): one, but of splines, polynomials and a user's function that has more."""
    match expressions.calls(tree), tree:
        case (expressions.SPLINE, ast.Call()):
            found = _spline(tree, rows)
        case (expressions.POLYNOMIAL, ast.Call()):
            given = expressions.arguments(tree)
            degree = int(_literal(given.get("degree"), 1))
            found = np.vander(_vector(given["x"], rows), degree + 1, increasing=True)[:, 1:]
        case _:
            found = np.asarray(_number(tree, rows), dtype=float)
            found = np.broadcast_to(found, (len(rows.frame),)) if found.ndim == 0 else found
    if found.ndim > 2 or len(found) != len(rows.frame):
        raise DeclarationError(
            f"{expressions.written(tree)} has shape {found.shape} at {len(rows.frame)} rows; functions have one value, "
            "or a row of values, for each row."
        )
    return found.reshape(len(found), -1)


def require_rowwise(tree: ast.expr, rows: Rows) -> None:
    """Refuse a user's function that looks at other rows than its own: it would be of one client's rows alone."""
    if not {*map(expressions.calls, ast.walk(tree))} & {*rows.constants}:
        return
    whole, order = columns(tree, rows), np.random.default_rng(0).permutation(len(rows.frame))
    size = np.nanmax(np.abs(whole), initial=0.0, where=np.isfinite(whole))
    for some in (order, order[: len(order) // 3], order[len(order) // 3 :]):
        part = columns(tree, rows._replace(frame=rows.frame.iloc[some].reset_index(drop=True)))
        if part.shape != whole[some].shape or not np.allclose(
            part, whole[some], rtol=_SAME, atol=_SAME * size, equal_nan=True
        ):
            raise DeclarationError(
                f"{expressions.written(tree)} has another value at a row where other rows are beside it, and each "
                "client has its own rows alone: give a function that looks at one row at a time, write center(x) or "
                "scale(x), by the mean and sd of all clients' rows, or compute a column before."
            )


def _number(node: ast.expr, rows: Rows) -> Any:
    """A number, or one for each row."""
    match node:
        case ast.Constant(value=value):
            return np.float64(value)  # type: ignore[arg-type]
        case ast.Attribute(attr=name):
            return expressions.NUMBERS[name]
        case ast.Name(id=name):
            return _named(unquoted(name), rows)
        case ast.UnaryOp(op=op) | ast.BinOp(op=op) | ast.Compare(ops=[op]):
            values = (_number(one, rows) for one in expressions.operands(node))
            return np.asarray(expressions.SIGNS[type(op)](*values), dtype=float)
        case ast.Call():
            return _called(node, rows)
    raise DeclarationError(f"{ast.unparse(node)} is no number.")


def _called(call: ast.Call, rows: Rows) -> Any:
    name = expressions.calls(call)
    if isinstance(call.func, ast.Name) and name in rows.constants:
        return _of_user(call, rows)
    if name in expressions.CENTRED:
        (argument,) = call.args
        assert isinstance(argument, ast.Name)
        column = unquoted(argument.id)
        values, moments = _number(argument, rows), rows.agreement.columns[column]
        return (values - moments.mean) / (1.0 if name == "center" else moments.sd)
    if name == "I":
        return _number(call.args[0], rows)
    known = expressions.function(name)
    assert known is not None
    return np.asarray(known(*(_number(one, rows) for one in call.args)), dtype=float)


def _of_user(call: ast.Call, rows: Rows) -> Any:
    """A function among the constants: it is given columns as pandas has them."""
    given = rows.constants[expressions.calls(call)]
    if not callable(given):
        raise DeclarationError(f"{ast.unparse(call)} calls a constant that is no function.")
    values = [_argument(one, rows) for one in call.args]
    words = {str(one.arg): _argument(one.value, rows) for one in call.keywords}
    found = np.asarray(given(*values, **words))
    if found.dtype.kind == "c":
        raise DeclarationError(f"{expressions.written(call)} is complex; give a function of real values.")
    return found.astype(float)


def _argument(node: ast.expr, rows: Rows) -> Any:
    if isinstance(node, ast.Name):
        name = unquoted(node.id)
        return rows.constants[name] if name in rows.constants else rows.frame[name]
    found = _number(node, rows)
    return pd.Series(found, index=rows.frame.index) if np.ndim(found) == 1 else found


def _named(name: str, rows: Rows) -> Any:
    """A constant, or a column of numbers."""
    if name in rows.constants:
        try:
            return np.asarray(rows.constants[name], dtype=float)[()]
        except (TypeError, ValueError) as error:
            raise DeclarationError(f"the constant {name!r} is no number; functions are called, {name}(x).") from error
    column = rows.frame[name]
    if isinstance(column.dtype, pd.CategoricalDtype):
        raise DeclarationError(
            f"{name!r} has levels, and functions and offsets take columns of numbers; give a column of numbers."
        )
    return column.to_numpy(dtype=float)


def _vector(node: ast.expr, rows: Rows) -> Array:
    return np.broadcast_to(np.asarray(_number(node, rows), dtype=float), (len(rows.frame),))


def _literal(node: ast.expr | None, default: Any) -> Any:
    return default if not isinstance(node, ast.Constant) else node.value


def _spline(call: ast.Call, rows: Rows) -> Array:
    """A basis of B-splines with knots that all know, without its first column as in R, or whole."""
    given, text = expressions.arguments(call), expressions.written(call)
    low, high = (float(_number(given[name], rows)) for name in ("lower_bound", "upper_bound"))
    degree = int(_literal(given.get("degree"), _CUBIC))
    found = given["knots"]
    values = [_number(one, rows) for one in found.elts] if isinstance(found, ast.List | ast.Tuple) else None
    knots = np.sort(np.asarray(np.ravel(_number(found, rows)) if values is None else values, dtype=float))
    if not (low < high and np.all(np.isfinite(knots)) and np.all((knots > low) & (knots < high))):
        raise DeclarationError(
            f"{text} has the knots {knots.tolist()} and bounds {low:g}, {high:g}; knots lie between the bounds."
        )
    x = _vector(given["x"], rows)
    outside = (x < low) | (x > high)
    if np.any(outside) and rows.what is not None and not rows.stand_for_all:
        raise DataError(
            f"{rows.what}: row {int(np.argmax(outside))} lies outside of the bounds of {text!r}; widen lower_bound "
            "and upper_bound, the same at all clients."
        )
    places = np.concatenate([[low] * (degree + 1), knots, [high] * (degree + 1)])
    basis = np.asarray(BSpline.design_matrix(np.nan_to_num(x, nan=low).clip(low, high), places, degree).toarray())
    basis[np.isnan(x) | (outside & (rows.what is None))] = np.nan
    is_whole = _literal(given.get("include_intercept", given.get("intercept")), False)
    return basis if is_whole or not _literal(given.get("center"), True) else basis[:, 1:]


_AGREED = "the agreed columns"


class Coded(NamedTuple):
    """Columns of a term: products of those of its factors; none of an intercept."""

    term: tuple[str, ...]
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Design:
    """How rows become columns."""

    terms: Terms
    agreement: Agreement
    constants: Mapping[str, Any]  # what the formula names that is no column
    # terms of the common part, and of the effects of each group, with the products that their columns are
    coding: tuple[tuple[Coded, ...], ...]
    labels: Mapping[str, tuple[str, ...]]  # names of the columns of each common term, by term
    entries: Mapping[str, tuple[str, ...]]  # what tells them apart: levels and places alone where these do, by term
    group_labels: tuple[tuple[str, ...], ...]  # names of the effects of each group
    center: Array  # and scale: means and sds of the columns of the common terms over rows that stand for all, (p,)
    scale: Array
    group_scale: tuple[Array, ...]  # sizes of the effects' columns, by group
    offset_center: float  # mean of the sum of the offsets over these rows
    # what other columns leave of `scale` where columns in products are far from 0; elsewhere `scale`, (p,)
    left: Array = dataclasses.field(default_factory=lambda: np.ones(0))

    def common(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the common terms, (n, p)."""
        return self._columns([one for one in self.coding[0] if one.term], frame, what)

    def offset(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Sum of the offsets, (n,)."""
        found = [self._factor(name, frame, what)[:, 0] for name in self.terms.offsets]
        return np.asarray(np.sum(found, axis=0))

    def group(self, number: int, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the effects of a group, (n, q)."""
        return self._columns(self.coding[1 + number], frame, what)

    def side_by_side(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the common terms, the sum of the offsets, and columns of the effects of all groups, (n, all).

        Without a `what` nothing is refused, and they are no numbers where a function ends.
        """
        offset = [self.offset(frame, what)[:, None]] if self.terms.offsets else []
        groups = [self.group(number, frame, what) for number in range(len(self.terms.groups))]
        with np.errstate(all="ignore"):
            return np.concatenate([self.common(frame, what), *offset, *groups], axis=1)

    def _columns(self, terms: Sequence[Coded], frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of terms, (n, theirs)."""
        factors = {
            name: self._factor(name, frame, what) for name in dict.fromkeys(itertools.chain(*(t.term for t in terms)))
        }
        products = [_product(one, factors, len(frame)) for term in terms for one in term.products]
        return np.concatenate([np.zeros((len(frame), 0)), *products], axis=1)

    def _factor(self, name: str, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of a factor, (n, its own): of levels one for each."""
        column = self.agreement.columns.get(name)
        if column is not None and column.levels and isinstance(self.terms.trees[name], ast.Name):
            codes = frame[name].cat.codes.to_numpy()
            return np.asarray(codes[:, None] == np.arange(len(column.levels)), dtype=float)
        rows = Rows(frame, self.agreement, self.constants, what, what == _AGREED)
        return _evaluated(name, self.terms.trees[name], rows)


def build(terms: Terms, agreement: Agreement, constants: Mapping[str, Any]) -> Design:
    """The design that all clients share, from what they agreed on."""
    frame = standing_for_all(terms, agreement)
    levels = {name: column.levels for name, column in agreement.columns.items() if column.levels}
    coding = tuple(tuple(itertools.starmap(Coded, one.products(levels))) for one in terms.sums)
    design = Design(terms, agreement, constants, coding, {}, {}, (), np.zeros(0), np.ones(0), (), 0.0)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of functions at rows that nobody has
        widths = _require_rowwise(design, frame)
        common = [_moments(design, one) for one in coding[0] if one.term]
        groups = [[_moments(design, one) for one in part] for part in coding[1:]]
        offset = _mean_offset(design, frame) if terms.offsets else 0.0
    own = [tuple(label for one in part for label in _labels(one, levels, widths)) for part in coding[1:]]
    of_terms = [_labels(one, levels, widths) for one in coding[0] if one.term]
    for part in ([one for term in of_terms for one in term], *own):
        _require_distinct(part)
    labels = dict(zip(terms.common, of_terms, strict=True))
    parts = [_labels(one, levels, widths, whole=False) for one in coding[0] if one.term]
    apart = [own if all(own) and len(set(own)) == len(own) else long for own, long in zip(parts, of_terms, strict=True)]
    entries = dict(zip(terms.common, apart, strict=True))
    center, scale = (np.concatenate([np.zeros(0), *(one[k] for one in common)]) for k in range(2))
    sizes = tuple(np.concatenate([one.size for one in group]) for group in groups)
    offset = offset if np.isfinite(offset) else 0.0
    found = Design(terms, agreement, constants, coding, labels, entries, tuple(own), center, scale, sizes, offset)
    return dataclasses.replace(found, left=_left(found))


def _require_distinct(labels: Sequence[str]) -> None:
    """Refuse columns that are called alike, by a level of one and the name of another."""
    if twice := sorted({one for one in labels if labels.count(one) > 1}):
        raise DeclarationError(
            f"two coefficients of the formula are called {twice[0]!r}; rename the column, or a level of it."
        )


def _left(design: Design) -> Array:
    some = touched(design.terms, design.agreement)
    if not some:
        return design.scale
    names = [name for name in design.terms.common for _ in design.labels[name]]
    those = np.isin(names, some)
    with np.errstate(all="ignore"):
        found = left_by_others(
            some, design.terms, design.agreement, lambda frame: design.common(frame, _AGREED)[:, those]
        )
    left = np.array(design.scale)
    left[those] = np.where(np.isfinite(found), np.minimum(found, left[those]), left[those])
    return left


def _moments(design: Design, term: Coded) -> Moments:
    """Moments of a term's columns over rows that stand for all."""
    read = {name for one in term.term for name in expressions.columns(design.terms.trees[one], design.constants)}
    return moments(read, design.terms, design.agreement, lambda frame: design._columns([term], frame, _AGREED))


def _require_rowwise(design: Design, frame: pd.DataFrame) -> dict[str, int]:
    """Refuse factors that cannot be computed, or look at other rows than their own; the widths of the others."""
    widths = {}
    for name, tree in design.terms.trees.items():
        column = design.agreement.columns.get(name)
        if column is not None and column.levels and isinstance(tree, ast.Name):
            continue
        rows = Rows(frame, design.agreement, design.constants, _AGREED, stand_for_all=True)
        try:
            widths[name] = columns(tree, rows).shape[1]
            if name in design.terms.offsets and widths[name] != 1:
                raise DeclarationError(f"it has {widths[name]} columns, and an offset is one number a row")
            require_rowwise(tree, rows)
        except Exception as error:
            raise DeclarationError(
                f"{name} cannot be evaluated: {error}; functions take columns of numbers, what is no column is given "
                "by constants={...}, and what needs more is computed as a column before."
            ) from error
    return widths


def _mean_offset(design: Design, frame: pd.DataFrame) -> float:
    """Mean of the sum of the offsets, of log-normal columns where it is not known of uniform ones below 0."""
    values = design.offset(frame, _AGREED)
    if not np.all(np.isfinite(values)):
        values = design.offset(standing_for_all(design.terms, design.agreement, positive=True), _AGREED)
    return float(np.nanmean(values))


def table(data: Mapping[str, Any], terms: Terms, agreement: Agreement, what: str) -> pd.DataFrame:
    """The columns that a formula reads right of ~, texts as levels that were agreed on."""
    absent = [name for name in terms.columns if name not in data]
    if absent:
        raise DataError(f"{what} lacks the columns {absent} of the formula; it has {sorted(data)[:20]}.")
    held = {}
    for name in terms.columns:
        column, values = agreement.columns[name], np.asarray(data[name])
        if column.levels:
            levels = coded(column, values, agreement, f"{what}: column {name!r}")
            held[name] = pd.Categorical(levels, categories=list(column.levels), ordered=True)
        elif is_text(values):
            raise DataError(f"{what}: column {name!r} has texts, and clients agreed on numbers; recode its rows.")
        else:
            held[name] = values.astype(float)
    rows = len(next(iter(data.values())))
    return pd.DataFrame(held, index=np.arange(rows))


def plain(column: pd.Series) -> Array:
    """A column of the table as numbers: of levels their places."""
    return np.asarray(column.cat.codes if isinstance(column.dtype, pd.CategoricalDtype) else column, dtype=float)


def from_plain(name: str, values: Array, agreement: Agreement) -> pd.Series:
    """The column of the table that has these numbers."""
    levels = agreement.columns[name].levels
    if not levels:
        return pd.Series(values)
    return pd.Series(pd.Categorical.from_codes(values.astype(int), list(levels), ordered=True))


def _product(product: Product, factors: Mapping[str, Array], rows: int) -> Array:
    """Products of the columns of factors, the first factor's running fastest."""
    found = None
    for name, is_short in zip(*product, strict=True):
        own = factors[name][:, int(is_short) :]
        found = own if found is None else (own[:, :, None] * found[:, None, :]).reshape(rows, -1)
    return np.ones((rows, 1)) if found is None else found


def _labels(
    term: Coded, levels: Mapping[str, Sequence[str]], widths: Mapping[str, int], *, whole: bool = True
) -> tuple[str, ...]:
    """Names of a term's columns; levels and places alone where it is not the `whole`."""

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
    """Columns of a factor, (n, its own), that are finite."""
    try:
        with np.errstate(all="ignore"):  # what is not finite is told below
            found = columns(tree, rows)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{rows.what or _AGREED}: {name!r} cannot be computed: {error}") from error
    if rows.what is not None and not rows.stand_for_all and np.any(wrong := ~np.isfinite(found).all(axis=1)):
        where = int(np.argmax(wrong))
        frame = rows.frame
        value = found[where][~np.isfinite(found[where])][0]
        if isinstance(tree, ast.Name):
            raise DataError(f"{rows.what}: {name!r} is {value} in row {where}; correct or drop such rows.")
        read = [f"{one} is {frame[one].iloc[where]}" for one in sorted(expressions.columns(tree, rows.constants))]
        raise DataError(
            f"{rows.what}: {name!r} is {value} in row {where}, where {', '.join(read)}; correct such rows, or change "
            "the function."
        )
    return found


# Rows that stand for all clients' and are nobody's, and moments of columns over them, from what was agreed on ---------


_ROWS = 256  # of the rows that stand for all
_MOST = 4096  # of those on a grid, where its levels alone are not more


class Moments(NamedTuple):
    """Of the columns of a term, (p,) each."""

    mean: Array
    sd: Array
    size: Array  # root mean square


def moments(
    read: Collection[str], terms: Terms, agreement: Agreement, columns: Callable[[pd.DataFrame], Array]
) -> Moments:
    """Moments of what `columns` computes from the columns `read` of a formula, (rows, p), these being independent.

    On a grid of all their levels, however rare, and of numbers with their mean and sd, each row with the product of
    its levels' shares for a weight: exact of levels, of numbers, and of products of them. Rows at which a function is
    no number count for nothing.
    """
    frame, weight = grid(read, terms, agreement)
    values = columns(frame)
    counted = np.isfinite(values)
    weights = np.where(counted, weight[:, None], 0.0)
    total = weights.sum(axis=0)
    weights = weights / np.where(total > 0, total, 1.0)
    values = np.where(counted, values, 0.0)
    mean = np.sum(weights * values, axis=0)
    sd, size = (np.sqrt(np.sum(weights * of**2, axis=0)) for of in (values - mean, values))
    # What is left of a constant is rounding, and says nothing of a scale.
    return Moments(mean, np.where(sd > 1e-12 * size, sd, 1.0), np.where(size > 0, size, 1.0))


def standing_for_all(terms: Terms, agreement: Agreement, positive: bool = False) -> pd.DataFrame:
    """Rows with the means, sds, levels and shares that clients agreed on, their columns independent of each other.

    Numbers are uniform, or log-normal where the mean is above 0 and they shall be `positive`.
    """
    rng, held = np.random.default_rng(0), {}
    for name in terms.columns:
        column = agreement.columns[name]
        if column.levels:
            ends = np.cumsum(column.shares) * _ROWS
            codes = rng.permutation(np.searchsorted(ends, np.arange(_ROWS) + 0.5).clip(max=len(ends) - 1))
            held[name] = _categories(column, codes)
        else:
            z = rng.permutation(np.linspace(-1.0, 1.0, _ROWS))
            if positive and column.mean > 0:
                spread = np.log1p((column.sd / column.mean) ** 2)
                quantiles = special.ndtri(np.argsort(np.argsort(z)) / _ROWS + 0.5 / _ROWS)
                held[name] = np.exp(np.log(column.mean) - 0.5 * spread + np.sqrt(spread) * quantiles)
            else:
                held[name] = column.mean + column.sd * z / np.std(z)  # so that center and scale find what was agreed
    return _with_factors(held, _ROWS, terms)


def grid(read: Collection[str], terms: Terms, agreement: Agreement) -> tuple[pd.DataFrame, Array]:
    """Rows with all combinations of the columns that are read, others as they may be, and their weights."""
    of_levels = [name for name in terms.columns if name in read and agreement.columns[name].levels]
    of_numbers = [name for name in terms.columns if name in read and not agreement.columns[name].levels]
    combined = np.prod([len(agreement.columns[name].levels) for name in of_levels], initial=1)
    width = int(np.clip((_MOST / combined) ** (1 / max(len(of_numbers), 1)), 2, _ROWS))
    z = np.linspace(-1.0, 1.0, width)
    z = z / np.std(z)
    ranges = [*(range(len(agreement.columns[name].levels)) for name in of_levels), *(range(width) for _ in of_numbers)]
    places = dict(zip([*of_levels, *of_numbers], np.array(list(itertools.product(*ranges)), dtype=int).T, strict=True))
    rows = int(np.prod([len(one) for one in ranges], initial=1))
    held, weight = {}, np.ones(rows)
    for name in terms.columns:
        column, place = agreement.columns[name], places.get(name)
        if column.levels:
            codes = np.zeros(rows, dtype=int) if place is None else place
            held[name] = _categories(column, codes)
            weight = weight if place is None else weight * np.array(column.shares)[codes]
        else:
            held[name] = column.mean + column.sd * (np.zeros(rows) if place is None else z[place])
    return _with_factors(held, rows, terms), weight


def _categories(column: Column, codes: Array) -> pd.Categorical:
    return pd.Categorical.from_codes(codes, list(column.levels), ordered=True)


def _with_factors(held: dict[str, object], rows: int, terms: Terms) -> pd.DataFrame:
    for name in {name for group in terms.groups for name in group.factor} - set(held):
        held[name] = np.full(rows, "all", dtype=object)
    return pd.DataFrame(held, index=np.arange(rows))


# Columns so far from 0 that what they are multiplied with cannot be told from what stands alone -----------------------

SAID = 8.0  # means, in sds, that are said before a fit, and with which priors reckon
SUSPECT = 3.0  # and where it did not arrive
_POWERS = (expressions.POLYNOMIAL, "np.square", "np.power")
_ALL_BUT_NOTHING = 1e-7  # of a column, which the others determine


def far_from_zero(terms: Terms, agreement: Agreement, left: Array, scale: Array, least: float) -> list[str]:
    """Numeric columns with a mean of more than `least` sds, in effects or in products without `center`, in words.

    Effects (1 + x | site) of such a column have an intercept at x = 0, far from all rows, which see but the sum of it
    and of the slope's part: two sds and a correlation are all but one number. So it is with coefficients of x and of
    x² or x:z, of which others leave `left` of the sd `scale` of a column.
    """
    found = []
    for name in _far(terms, agreement, least):
        column = agreement.columns[name]
        far = f"{name!r} is far from 0, {column.mean:.6g} on average with an sd of {column.sd:.3g}"
        for group, own in zip(terms.groups, terms.sums[1:], strict=True):
            if any(_stands_in(name, one, terms) for one in own.terms):
                of = "/".join(group.factor)
                found.append(
                    f"{far}, and has effects by {of!r}, which cannot be told from those of the intercept there: write "
                    f"(1 + center({name}) | {of})"
                )
        products = _products(name, terms)
        if products and np.any(scale > least * left):
            found.append(
                f"{far}, and stands in {products[:4]}, whose coefficients cannot be told from others' there: write "
                f"center({name}) in its place"
            )
    return found


def touched(terms: Terms, agreement: Agreement) -> list[str]:
    """Common terms of columns that stand in powers or products far from 0."""
    products = {one for name in _far(terms, agreement, SAID) for one in _products(name, terms)}
    read = {name for one in products for name in _read(terms, terms.factors[one])}
    return [one for one in terms.common if products and _read(terms, terms.factors[one]) <= read]


def left_by_others(
    some: list[str], terms: Terms, agreement: Agreement, columns: Callable[[pd.DataFrame], Array]
) -> Array:
    """Sds of what others and a constant leave of each column of `some` terms, (p,); NaN of what they determine."""
    read = {name for one in some for name in _read(terms, terms.factors[one])}
    frame, weight = grid(read, terms, agreement)
    values = columns(frame)
    usable = np.isfinite(values).all(axis=1)
    values, weight = values[usable], weight[usable] / max(weight[usable].sum(), 1e-300)
    apart = values - weight @ values
    sd = np.sqrt(weight @ apart**2)
    found = np.full(len(sd), np.nan)
    if len(values) > len(sd) and np.all(sd > 0):
        root = np.linalg.qr(np.sqrt(weight)[:, None] * apart / sd, mode="r")
        if np.min(np.abs(np.diag(root))) > _ALL_BUT_NOTHING:
            found = sd / np.linalg.norm(np.linalg.inv(root), axis=1)
    return found


def _far(terms: Terms, agreement: Agreement, least: float) -> list[str]:
    columns = {name: agreement.columns[name] for name in terms.columns}
    return [name for name, one in columns.items() if not one.levels and abs(one.mean) > least * one.sd]


def _products(name: str, terms: Terms) -> list[str]:
    """Common terms with a column as it is, where it stands in powers or with others."""
    those = [one for one, factors in terms.factors.items() if _stands_in(name, factors, terms)]
    return those if any(_is_product(terms.factors[one], terms) for one in those) else []


def _read(terms: Terms, factors: Sequence[str]) -> set[str]:
    return {name for one in factors for name in expressions.columns(terms.trees[one], ())} & {*terms.columns}


def _stands_in(name: str, factors: Sequence[str], terms: Terms) -> bool:
    """Whether a term reads a column as it is, and not its distance from the mean."""
    return any(name in expressions.columns(terms.trees[one], (), without=expressions.CENTRED) for one in factors)


def _is_product(factors: Sequence[str], terms: Terms) -> bool:
    """Whether a term is a power of a column, or a product with others."""
    nodes = [node for one in factors for node in ast.walk(terms.trees[one])]
    powers = any(isinstance(node, ast.Pow) or expressions.calls(node) in _POWERS for node in nodes)
    return powers or len(_read(terms, factors)) > 1
