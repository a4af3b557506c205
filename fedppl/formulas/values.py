"""Values of a formula's factors at rows: its trees are walked, nothing is given to Python to run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.interpolate import BSpline

from fedppl.formulas import expressions
from fedppl.formulas.agreement import Agreement
from fedppl.formulas.tokens import unquoted
from fedppl.types import Array, DataError, DeclarationError

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
