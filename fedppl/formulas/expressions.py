"""Factors of a formula: names, numbers, operators and calls of known functions.

Factors are never executed as Python: they are parsed to a syntax tree whose nodes all have to be on a list, and values
are computed by walking the tree.
"""

from __future__ import annotations

import ast
import functools
import itertools
import keyword
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.types import DeclarationError

# The text right of ~, cut into names, calls, numbers, signs and effects in parentheses --------------------------------

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`[^`]*`)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)|(?P<brace>\{)|(?P<sign>%in%|\*\*|\|\||[-+*/:|()^%.])|(?P<other>\S))"
)
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_SKIPPED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"")
_NAME = re.compile(r"[^\W\d]\w*")
_MARK = "quoted__"
_NOT_CLOSED = "its parentheses do not match; write it like 'y ~ age + arm + (1 | site)'"
OF_ROWS = "offset"


class Token(NamedTuple):
    """A token of a formula: a factor (a name or a call in Python), a number, or a sign."""

    kind: str
    text: str


class Effects(NamedTuple):
    """The two sides of ``(effects | factor)``."""

    effects: tuple[Token, ...]
    factor: tuple[Token, ...]


class Pieces(NamedTuple):
    """A formula's right-hand side: common terms, offsets, and effects in parentheses."""

    common: tuple[Token, ...]
    offsets: tuple[str, ...]
    effects: tuple[Effects, ...]


def quoted(name: str) -> str:
    """A valid Python name for any column's name."""
    plain = name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return name if plain and not name.startswith(_MARK) else _MARK + name.encode().hex()


def unquoted(name: str) -> str:
    """The column's name of a `quoted` one."""
    return bytes.fromhex(name.removeprefix(_MARK)).decode() if name.startswith(_MARK) else name


def cut(formula: str, right: str) -> Pieces:
    """Cut the text right of ~ into its pieces; refuse syntax that formulas do not have."""
    tokens = _tokens(formula, right)
    _require_syntax(formula, tokens)
    common: list[Token] = []
    offsets: list[str] = []
    effects: list[Effects] = []
    at = 0
    while at < len(tokens):
        end = at + 1 + (_depths(tokens[at:]).index(0) if tokens[at].text == "(" else 0)
        inside = tokens[at + 1 : end - 1]
        bars = _bars(inside)
        if bars or _is_offset(tokens[at]):
            before, after = tokens[at - 1].text if at else "+", tokens[end].text if end < len(tokens) else "+"
            if before != "+" or after not in ("+", "-"):
                example = "(1 | site)" if bars else "offset(x)"
                raise _unreadable(formula, f"{example} is a summand of its own; write + {example}")
            if bars:
                effects.append(Effects(tuple(inside[: bars[0]]), tuple(inside[bars[0] + 1 :])))
            else:
                offsets.append(tokens[at].text)
            if common and common[-1].text == "+":
                common.pop()
            elif end < len(tokens) and tokens[end].text == "+":
                end += 1
        elif any(token.text == "|" for token in tokens[at:end]):
            raise _unreadable(formula, "write effects in parentheses of their own, + (1 | site)")
        else:
            common += tokens[at:end]
        at = end
    if any(map(_is_offset, [*common, *(token for part in effects for token in part.effects)])):
        raise _unreadable(formula, "offset(...) is a summand of its own; write + offset(x)")
    return Pieces(tuple(common), tuple(offsets), tuple(effects))


def _is_offset(token: Token) -> bool:
    return token.kind == "factor" and token.text.startswith(f"{OF_ROWS}(")


def _tokens(formula: str, text: str) -> list[Token]:
    tokens: list[Token] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None
        at = match.end()
        if match["quoted"]:
            tokens.append(Token("factor", quoted(_named(formula, match["quoted"][1:-1]))))
        elif match["number"]:
            tokens.append(Token("number", match["number"]))
        elif match["name"] and (end := _called(formula, text, at)):
            begin, at = match.start("name"), end
            tokens.append(Token("factor", _python(formula, text[begin:at])))
        elif match["name"] and "." in match["name"]:
            raise _unreadable(formula, f"a name with a full stop is one in backquotes, `{match['name']}`")
        elif match["name"]:
            tokens.append(Token("factor", quoted(match["name"])))
        elif match["brace"]:
            begin, at = match.start("brace"), _closed(formula, text, match.start("brace"))
            tokens.append(Token("factor", f"I({_python(formula, text[begin + 1 : at - 1])})"))
        else:
            tokens.append(Token("sign" if match["sign"] else "other", match["sign"] or match["other"]))
    return tokens


def _named(formula: str, name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise _unreadable(formula, f"{name!r} in backquotes is no name of a column")
    return name


def _called(formula: str, text: str, at: int) -> int:
    """End of the parenthesis of a call after a name; 0 if there is none, or effects follow after a blank."""
    match = re.compile(r"(\s*)\(").match(text, at)
    end = 0 if match is None else _closed(formula, text, match.end() - 1)
    return 0 if match is not None and match[1] and "|" in text[at:end] else end


def _closed(formula: str, text: str, begin: int) -> int:
    """Place after the parenthesis that closes the one at `begin`."""
    open_: list[str] = []
    at = begin
    while at < len(text):
        if skipped := _SKIPPED.match(text, at):
            at = skipped.end()
            continue
        sign = text[at]
        at += 1
        if sign in _CLOSES:
            open_.append(_CLOSES[sign])
        elif sign in _CLOSES.values():
            if open_.pop() != sign:
                break
            if not open_:
                return at
    raise _unreadable(formula, _NOT_CLOSED)


def _python(formula: str, text: str) -> str:
    """A call with valid Python names for columns."""

    def written_as(match: re.Match[str]) -> str:  # quoted, if Python would normalise it, or it begins like a quoted one
        is_same = unicodedata.normalize("NFKC", match[0]) == match[0] and not match[0].startswith(_MARK)
        return match[0] if is_same else quoted(match[0])

    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        quoted(_named(formula, part[1:-1])) if part.startswith("`") else _NAME.sub(written_as, part) for part in parts
    )


def _require_syntax(formula: str, tokens: Sequence[Token]) -> None:
    """Refuse syntax of other packages, and syntax that would silently mean something else."""
    texts, depths = [token.text for token in tokens], [0, *_depths(tokens)]
    pairs = list(itertools.pairwise(tokens))
    wrong = {
        "it has nothing right of ~; write 'y ~ 1' for an intercept alone": not tokens,
        "write (... | site), with correlated=False, for ||": "||" in texts,
        "write I(x**2) for a power, a * b or (a + b)**2 for interactions": "^" in texts,
        "write a:b, or a/b for nested factors": "%in%" in texts or "%" in texts,
        "name the columns that . stands for": "." in texts,
        "it has signs that no formula has; there are + - * / : | ** and functions": "other" in {t.kind for t in tokens},
        "put an operator between two terms, and a name of several words into backquotes, `a b`": any(
            (token.kind != "sign" or token.text == ")") and (after.kind != "sign" or after.text == "(")
            for token, after in pairs
        ),
        _NOT_CLOSED: min(depths) < 0 or depths[-1] != 0,
        "write I(x**2) for a power of a column": any(two.text == "**" and one.kind == "factor" for one, two in pairs),
        "write effects in parentheses, + (1 | site)": bool(_bars(tokens)),
    }
    if remedies := [remedy for remedy, is_so in wrong.items() if is_so]:
        raise _unreadable(formula, remedies[0])


def _depths(tokens: Sequence[Token]) -> list[int]:
    """Number of open parentheses after each token."""
    return list(itertools.accumulate((token.text == "(") - (token.text == ")") for token in tokens))


def _bars(tokens: Sequence[Token]) -> list[int]:
    """Places of bars outside of parentheses."""
    return [place for place, depth in enumerate(_depths(tokens)) if tokens[place].text == "|" and depth == 0]


def _unreadable(formula: str, remedy: str) -> DeclarationError:
    return DeclarationError(f"formula={formula!r} cannot be read: {remedy}.")


# Functions of NumPy with one value per row that depends on this row alone.
FUNCTIONS: dict[str, np.ufunc] = {
    name: getattr(np, name)
    for name in (
        "abs absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh cbrt ceil cos cosh deg2rad degrees "
        "divide equal exp exp2 expm1 fabs float_power floor floor_divide fmax fmin fmod greater greater_equal "
        "heaviside hypot less less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or "
        "logical_xor maximum minimum mod multiply negative not_equal positive power rad2deg radians reciprocal "
        "remainder rint sign sin sinh sqrt square subtract tan tanh true_divide trunc"
    ).split()
}
NUMBERS = {"pi": float(np.pi), "e": float(np.e)}
CENTRED = ("center", "scale", "standardize")
OF_SEVERAL = SPLINE, POLYNOMIAL, LEVELS = "bs", "poly", "C"
RESERVED = ("I", OF_ROWS, *CENTRED, *OF_SEVERAL)  # names that constants may not have
_OTHERS: dict[str, Callable[..., Any]] = {"where": np.where, "clip": np.clip}  # with three arguments
_AGREED = ("knots", "lower_bound", "upper_bound")  # of a spline, equal at all clients
_FLAGS = ("include_intercept", "intercept", "center")
_KEYWORDS = {SPLINE: (*_AGREED, "degree", *_FLAGS), POLYNOMIAL: ("degree", "raw")}
SIGNS: dict[type, Callable[..., Any]] = {
    **{ast.Add: np.add, ast.Sub: np.subtract, ast.UAdd: np.positive, ast.USub: np.negative, ast.Pow: np.power},
    **{ast.Mult: np.multiply, ast.Div: np.divide, ast.FloorDiv: np.floor_divide, ast.Mod: np.mod},
    **{ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal},
    **{ast.Eq: np.equal, ast.NotEq: np.not_equal, ast.BitAnd: np.logical_and, ast.BitOr: np.logical_or},
}
_DEEPEST = 40  # nested nodes


def read(source: str, constants: Collection[str]) -> ast.expr:
    """The syntax tree of a factor; refuse all but names, numbers, operators and calls of known functions."""
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = getattr(error, "msg", error)
        raise DeclarationError(f"{_shown(source)} cannot be read: {why}; write np.log(x), or `odd name`.") from error
    try:
        _require(tree, tree, tuple(constants), 0)
    except RecursionError as error:  # below, or where the tree is written
        raise DeclarationError(f"{_shown(source)[:80]} is nested too deeply; compute a column before.") from error
    return tree


def written(tree: ast.expr) -> str:
    """Name of a factor: a column's name, or a call."""
    return unquoted(tree.id) if isinstance(tree, ast.Name) else _shown(ast.unparse(tree))


def columns(tree: ast.expr, constants: Collection[str], without: Collection[str] = ()) -> tuple[str, ...]:
    """Names of the columns that a factor reads in order, except in calls of the functions `without`."""
    return tuple(dict.fromkeys(name for name in map(unquoted, _names(tree, without)) if name not in constants))


def calls(tree: ast.AST) -> str:
    """The function that a factor calls; "" for a name."""
    return ast.unparse(tree.func) if isinstance(tree, ast.Call) else ""


def arguments(call: ast.Call) -> dict[str, ast.expr]:
    """Arguments of a spline or a polynomial by name; the first is "x"."""
    second = {SPLINE: "df", POLYNOMIAL: "degree"}[calls(call)]
    by_name = dict(zip(("x", second), call.args, strict=False))
    return by_name | {str(keyword_argument.arg): keyword_argument.value for keyword_argument in call.keywords}


def level_column(tree: ast.expr) -> str | None:
    """The column of ``C(column)``; None for another factor."""
    match tree:
        case ast.Call(args=[ast.Name(id=name), *_]) if calls(tree) == LEVELS:
            return unquoted(name)
    return None


def operands(node: ast.AST) -> list[ast.expr]:
    """Operands of an operator."""
    return [below for below in ast.iter_child_nodes(node) if isinstance(below, ast.expr)]


def function(callee: str) -> Callable[..., Any] | None:
    """A function of NumPy that formulas know; None for another name."""
    name = callee.removeprefix("np.")
    known: Callable[..., Any] | None = FUNCTIONS.get(name) or _OTHERS.get(name)
    return known if callee.startswith("np.") else None


def _names(tree: ast.AST, without: Collection[str]) -> Iterator[str]:
    match tree:
        case ast.Name():
            yield tree.id
        case ast.Attribute():
            return
        case ast.Call() if calls(tree) in without:
            return
        case _:
            below = (*tree.args, *tree.keywords) if isinstance(tree, ast.Call) else ast.iter_child_nodes(tree)
            for node in below:
                yield from _names(node, without)


def is_truth(tree: ast.expr) -> bool:
    """Whether an expression is boolean, by itself or in I().

    >>> is_truth(ast.parse("I((x > 1) & (z < 2))", mode="eval").body)
    True
    """
    match tree:
        case ast.Compare():
            return True
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr()):
            return all(map(is_truth, operands(tree)))
        case ast.Call(args=[inner]) if calls(tree) == "I":
            return is_truth(inner)
    return False


def _require(node: ast.AST, whole: ast.expr, constants: tuple[str, ...], depth: int) -> None:
    """Refuse a node, or one below it, that is not on the list."""
    if depth > _DEEPEST:
        raise RecursionError
    below = functools.partial(_require, whole=whole, constants=constants, depth=depth + 1)
    match node:
        case ast.Constant(value=bool() | int() | float()) | ast.Name():
            return  # of strings there are none
        case ast.Attribute(value=ast.Name(id="np"), attr=name) if name in NUMBERS:
            return
        case ast.UnaryOp(op=op) | ast.BinOp(op=op) | ast.Compare(ops=[op]) if type(op) in SIGNS:
            for one in operands(node):
                below(one)
        case ast.Call():
            _require_call(node, node is whole, constants)
            for one in (*node.args, *(word.value for word in node.keywords)):
                if calls(node) == SPLINE and isinstance(one, ast.List | ast.Tuple):  # knots
                    for knot in one.elts:
                        below(knot)
                else:
                    below(one)
        case _:
            what = f"{_shown(ast.unparse(whole))} has {_shown(ast.unparse(node))}"
            rule = "no name, number, sign of arithmetic or comparison, or known function"
            raise DeclarationError(f"{what}, which is {rule}; compute a column before.")


def _require_call(call: ast.Call, outermost: bool, constants: tuple[str, ...]) -> None:
    """Refuse unknown functions, and functions whose constants would come from one client's rows."""
    name, text, count = calls(call), _shown(ast.unparse(call)), len(call.args)
    words = [one.arg for one in call.keywords]
    if isinstance(call.func, ast.Name) and call.func.id in constants:
        if None in words or any(isinstance(one, ast.Starred) for one in call.args):
            raise DeclarationError(f"{text} has arguments in * or **; write each by itself.")
        return
    if name in OF_SEVERAL:
        _require_several(call, name, text, outermost, constants)
        return
    known = function(name)
    if known is None and name not in ("I", *CENTRED) and not (outermost and name == OF_ROWS):
        raise _unknown(name, text)
    if name in CENTRED and (words or count != 1 or not isinstance(call.args[0], ast.Name)):
        raise DeclarationError(f"{text} needs a mean over all clients; compute a column, or write {name}(column).")
    wanted = 1 if known is None else getattr(known, "nin", 3)
    if words or count != wanted:
        raise DeclarationError(f"{text}: {name} takes {wanted} argument{'s' * (wanted > 1)} here, and no keywords.")


def _require_several(call: ast.Call, name: str, text: str, outermost: bool, constants: Collection[str]) -> None:
    """Check functions with several columns: levels, splines and polynomials."""
    if name == LEVELS and (call.keywords or len(call.args) != 1 or not isinstance(call.args[0], ast.Name)):
        raise DeclarationError(f"{text}: write C(column) alone, and an order as levels={{'column': [...]}}.")
    if not outermost:
        raise DeclarationError(
            f"{text} calls {name}(), of several columns; write it as a term of its own, or compute a column."
        )
    if name == LEVELS:
        return
    given = arguments(call)
    strange = sorted(set(given) - {"x", *_KEYWORDS[name]})
    if "x" not in given or len(given) < len(call.args) + len(call.keywords):
        raise DeclarationError(f"{text} has no column, or too many arguments; write {name}(x, ...), each once.")
    if name == SPLINE:
        of_rows = sorted({column for one in _AGREED if one in given for column in columns(given[one], constants)})
        if of_rows:
            remedy = f"pass constants={{{of_rows[0]!r}: ...}}"
            raise DeclarationError(f"{text} has knots or bounds from {of_rows}, columns of each client; {remedy}.")
        if strange or not set(_AGREED) <= set(given):
            example = "write bs(x, knots=knots, lower_bound=0, upper_bound=90), constants={'knots': [...]}"
            raise DeclarationError(f"{text} would take its knots and bounds from the rows of each client; {example}.")
    flags = [given[one] for one in _FLAGS if one in given]
    if not all(isinstance(one, ast.Constant) and isinstance(one.value, bool) for one in flags):
        raise DeclarationError(f"{text}: {' and '.join(_FLAGS)} are True or False.")
    raw, degree = given.get("raw"), given.get("degree")
    if name == POLYNOMIAL and not (isinstance(raw, ast.Constant) and raw.value is True and not strange):
        raise DeclarationError(f"{text} would be orthogonal on the rows of each client alone; use raw=True.")
    if degree is not None and not (isinstance(degree, ast.Constant) and degree.value in range(1, 21)):
        raise DeclarationError(f"{text}: the degree is a whole number from 1 to 20.")


def _unknown(name: str, text: str) -> DeclarationError:
    numpy, root = f"np.{name}" if name in FUNCTIONS else "np.log", unquoted(name.partition(".")[0])
    if name.startswith("np."):
        what = "no function of single values; write center(x) or scale(x) for means and sds over all clients"
    else:
        what = f"not known; write {numpy}(x), I(x**2) or bs(x, knots=...), pass constants={{{root!r}: function}}"
    return DeclarationError(f"{text} calls {_shown(name)!r}, which is {what}, or compute a column before.")


def _shown(text: str) -> str:
    """Python with columns' names in backquotes where they were quoted."""
    return re.sub(r"quoted__[0-9a-f]+", lambda match: f"`{unquoted(match[0])}`", text)
