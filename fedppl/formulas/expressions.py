"""What a factor of a formula may be: names, numbers, signs and calls of known functions, and nothing that runs code.

Factors are never given to Python to run: they are read into a tree, whose every node has to be on a list, and values
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

# The text right of ~ cut into names, calls, numbers and signs; what stands in parentheses with a bar, by itself -------

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`[^`]*`)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)|(?P<brace>\{)|(?P<sign>%in%|\*\*|\|\||[-+*/:|()^%.])|(?P<other>\S))"
)
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_SKIPPED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"")
_NAME = re.compile(r"[^\W\d]\w*")
_MARK = "quoted__"
OF_ROWS = "offset"


class Token(NamedTuple):
    """A piece of a formula: a factor, that is a name or a call in Python, a number, or a sign."""

    kind: str
    text: str


class Effects(NamedTuple):
    """What stands in ``(effects | factor)``."""

    effects: tuple[Token, ...]
    factor: tuple[Token, ...]


class Pieces(NamedTuple):
    """A formula's right-hand side: the common terms, the offsets' arguments and the effects in parentheses."""

    common: tuple[Token, ...]
    offsets: tuple[str, ...]
    effects: tuple[Effects, ...]


def quoted(name: str) -> str:
    """A name that Python reads as it is, for any column's name."""
    plain = name.isidentifier() and not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return name if plain and not name.startswith(_MARK) else _MARK + name.encode().hex()


def unquoted(name: str) -> str:
    """The column's name again."""
    return bytes.fromhex(name.removeprefix(_MARK)).decode() if name.startswith(_MARK) else name


def cut(formula: str, right: str) -> Pieces:
    """Cut what stands right of ~ into its pieces.

    Raises `DeclarationError` if it has signs or an order of signs that formulas do not have.
    """
    found = _tokens(formula, right)
    _require_syntax(formula, found)
    common: list[Token] = []
    offsets: list[str] = []
    effects: list[Effects] = []
    at = 0
    while at < len(found):
        end = at + 1 + (_depths(found[at:]).index(0) if found[at].text == "(" else 0)
        inside = found[at + 1 : end - 1]
        bars = _bars(inside)
        is_offset = found[at].kind == "factor" and found[at].text.startswith(f"{OF_ROWS}(")
        if bars or is_offset:
            _require_summand(formula, found, at, end, "(1 | site)" if bars else "offset(x)")
            if bars:
                effects.append(Effects(tuple(inside[: bars[0]]), tuple(inside[bars[0] + 1 :])))
            else:
                offsets.append(found[at].text.removeprefix(OF_ROWS))
            if common and common[-1].text == "+":
                common.pop()
            elif end < len(found) and found[end].text == "+":
                end += 1
            at = end
            continue
        if any(one.text == "|" for one in found[at:end]):
            raise _unreadable(formula, "write effects in parentheses of their own, + (1 | site)")
        common += found[at:end]
        at = end
    rest = [*common, *(one for part in effects for one in part.effects)]
    if any(one.kind == "factor" and one.text.startswith(f"{OF_ROWS}(") for one in rest):
        raise _unreadable(formula, "offset(...) is a summand of its own; write + offset(x)")
    return Pieces(tuple(common), tuple(offsets), tuple(effects))


def _tokens(formula: str, text: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None
        at = match.end()
        if match["quoted"]:
            found.append(Token("factor", quoted(_named(formula, match["quoted"][1:-1]))))
        elif match["number"]:
            found.append(Token("number", match["number"]))
        elif match["name"] and (end := _called(formula, text, at)):
            begin, at = match.start("name"), end
            found.append(Token("factor", _python(formula, text[begin:at])))
        elif match["name"] and "." in match["name"]:
            raise _unreadable(formula, f"a name with a full stop is one in backquotes, `{match['name']}`")
        elif match["name"]:
            found.append(Token("factor", quoted(match["name"])))
        elif match["brace"]:
            begin, at = match.start("brace"), _closed(formula, text, match.start("brace"))
            found.append(Token("factor", f"I({_python(formula, text[begin + 1 : at - 1])})"))
        else:
            found.append(Token("sign" if match["sign"] else "other", match["sign"] or match["other"]))
    return found


def _named(formula: str, name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise _unreadable(formula, f"{name!r} in backquotes is no name of a column")
    return name


def _called(formula: str, text: str, at: int) -> int:
    """Where the parenthesis of a call ends that follows a name; 0 where none does, but blanks and effects may."""
    match = re.compile(r"(\s*)\(").match(text, at)
    end = 0 if match is None else _closed(formula, text, match.end() - 1)
    return 0 if match is not None and match[1] and "|" in text[at:end] else end


def _closed(formula: str, text: str, begin: int) -> int:
    """Where the parenthesis that opens at `begin` is closed, and one more."""
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
    raise _unreadable(formula, "its parentheses do not match; write it like 'y ~ age + arm + (1 | site)'")


def _python(formula: str, text: str) -> str:
    """A call with columns' names as Python reads them."""
    parts = re.split(r"(`[^`]*`)", text)
    names = [
        quoted(_named(formula, part[1:-1])) if part.startswith("`") else _NAME.sub(_as_written, part) for part in parts
    ]
    return "".join(names)


def _as_written(match: re.Match[str]) -> str:
    """A name that would be read as another one: a unit with a Greek letter by Python, one with our mark by us."""
    name = match[0]
    is_same = unicodedata.normalize("NFKC", name) == name and not name.startswith(_MARK)
    return name if is_same else quoted(name)


def _require_syntax(formula: str, found: Sequence[Token]) -> None:
    """Refuse what other packages read, and what would be read as something else without a word."""
    texts, depths = [one.text for one in found], [0, *_depths(found)]
    not_closed = min(depths) < 0 or depths[-1] != 0
    pairs = list(zip(found, found[1:], strict=False))
    wrong = {
        "it has nothing right of ~; write 'y ~ 1' for an intercept alone": not found,
        "write (... | site), with correlated=False, for ||": "||" in texts,
        "write I(x**2) for a power, a * b or (a + b)**2 for interactions": "^" in texts,
        "write a:b, or a/b for nested factors": "%in%" in texts or "%" in texts,
        "name the columns that . stands for": "." in texts,
        "it has signs that no formula has; there are + - * / : | ** and functions": any(
            one.kind == "other" for one in found
        ),
        "put an operator between two terms, and a name of several words into backquotes, `a b`": any(
            (one.kind != "sign" or one.text == ")") and (other.kind != "sign" or other.text == "(")
            for one, other in pairs
        ),
        "its parentheses do not match; write it like 'y ~ age + arm + (1 | site)'": not_closed,
        "write I(x**2) for a power of a column": any(
            other.text == "**" and one.kind == "factor" for one, other in pairs
        ),
        "write effects in parentheses, + (1 | site)": bool(_bars(found)),
    }
    for remedy, is_so in wrong.items():
        if is_so:
            raise _unreadable(formula, remedy)


def _depths(found: Sequence[Token]) -> list[int]:
    """How many parentheses are open after each of some tokens."""
    return list(itertools.accumulate((one.text == "(") - (one.text == ")") for one in found))


def _bars(found: Sequence[Token]) -> list[int]:
    """Places of bars in no parentheses."""
    return [place for place, depth in enumerate(_depths(found)) if found[place].text == "|" and depth == 0]


def _require_summand(formula: str, found: Sequence[Token], at: int, end: int, example: str) -> None:
    before, after = found[at - 1].text if at else "+", found[end].text if end < len(found) else "+"
    if before != "+" or after not in ("+", "-"):
        raise _unreadable(formula, f"{example} is a summand of its own; write + {example}")


def _unreadable(formula: str, remedy: str) -> DeclarationError:
    return DeclarationError(f"formula={formula!r} cannot be read: {remedy}.")


# Of NumPy, what has one value for each row and reads that row alone.
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
RESERVED = ("I", OF_ROWS, *CENTRED, *OF_SEVERAL)  # what no constant may be called
_OTHERS: dict[str, Callable[..., Any]] = {"where": np.where, "clip": np.clip}  # with three arguments
_AGREED = ("knots", "lower_bound", "upper_bound")  # of a spline, the same at all clients
_FLAGS = ("include_intercept", "intercept", "center")
_KEYWORDS = {SPLINE: (*_AGREED, "degree", *_FLAGS), POLYNOMIAL: ("degree", "raw")}
SIGNS: dict[type, Callable[..., Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
    ast.Pow: np.power,
    ast.BitAnd: np.logical_and,
    ast.BitOr: np.logical_or,
    ast.UAdd: np.positive,
    ast.USub: np.negative,
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
_DEEPEST = 40  # nodes within nodes


def read(source: str, constants: Collection[str]) -> ast.expr:
    """The tree of a factor, each of whose nodes is on a list.

    Raises `DeclarationError` if it has anything else than names, numbers, signs and calls of known functions.
    """
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DeclarationError(
            f"{_shown(source)} cannot be read: {getattr(error, 'msg', error)}; write functions like np.log(x), and a "
            "column's name that is no word into backquotes."
        ) from error
    _require(tree, tree, tuple(constants), 0)
    return tree


def written(tree: ast.expr) -> str:
    """A factor as it is called: a column's name, or a call."""
    return unquoted(tree.id) if isinstance(tree, ast.Name) else _shown(ast.unparse(tree))


def columns(tree: ast.expr, constants: Collection[str], without: Collection[str] = ()) -> tuple[str, ...]:
    """Names of the columns that a factor reads, in their order; but those in calls of functions `without`."""
    return tuple(dict.fromkeys(name for name in map(unquoted, _names(tree, without)) if name not in constants))


def calls(tree: ast.AST) -> str:
    """The function that a factor calls; "" of a name."""
    return ast.unparse(tree.func) if isinstance(tree, ast.Call) else ""


def arguments(call: ast.Call) -> dict[str, ast.expr]:
    """What a spline or a polynomial is called with, by name; the first is "x"."""
    second = {SPLINE: "df", POLYNOMIAL: "degree"}[calls(call)]
    found = dict(zip(("x", second), call.args, strict=False))
    return found | {str(one.arg): one.value for one in call.keywords}


def level_column(tree: ast.expr) -> str | None:
    """The column of ``C(column)``; None of another factor."""
    if calls(tree) != LEVELS or not isinstance(tree, ast.Call) or not isinstance(column := tree.args[0], ast.Name):
        return None
    return unquoted(column.id)


def operands(node: ast.AST) -> list[ast.expr]:
    """What a sign stands before, or between."""
    return [below for below in ast.iter_child_nodes(node) if isinstance(below, ast.expr)]


def function(callee: str) -> Callable[..., Any] | None:
    """A function of NumPy that formulas know; None where it is none of them."""
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
    """Whether an expression is True or False at a row, by itself or in I().

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
    """Refuse a node that is not on the list, and all below it that are not."""
    if depth > _DEEPEST:
        raise DeclarationError(f"{_shown(ast.unparse(whole))[:80]} is nested too deeply; compute a column before.")
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
            raise DeclarationError(
                f"{_shown(ast.unparse(whole))} has {_shown(ast.unparse(node))}, and formulas compute with names, "
                "numbers, + - * / // % ** < <= > >= == != & |, np.pi and functions of single values alone, such as "
                "np.log(x); compute a column before."
            )


def _require_call(call: ast.Call, outermost: bool, constants: tuple[str, ...]) -> None:
    """Refuse functions that nobody knows, and those whose constants would come from one client's rows."""
    name, text, count = calls(call), _shown(ast.unparse(call)), len(call.args)
    words = [one.arg for one in call.keywords]
    if isinstance(call.func, ast.Name) and call.func.id in constants:
        if None in words or any(isinstance(one, ast.Starred) for one in call.args):
            raise DeclarationError(f"{text} has arguments in * or **; write each by itself.")
        return
    known = function(name)
    if known is not None:
        wanted = getattr(known, "nin", 3)
        if words or count != wanted:
            raise DeclarationError(f"{text}: {name} takes {wanted} argument{'s' * (wanted > 1)} here, and no keywords.")
    elif name in CENTRED:
        if words or count != 1 or not isinstance(call.args[0], ast.Name):
            raise DeclarationError(
                f"{text} needs the mean of something that is computed at each client; give that a column of its own, "
                f"or write {name}(column)."
            )
    elif name == "I":
        if words or count != 1:
            raise DeclarationError(f"{text}: I() takes one computation, I(x**2).")
    elif name in OF_SEVERAL:
        _require_several(call, name, text, outermost, constants)
    else:
        raise _unknown(name, text)


def _require_several(call: ast.Call, name: str, text: str, outermost: bool, constants: Collection[str]) -> None:
    """The rules of what has several columns: levels, splines and polynomials."""
    if name == LEVELS and (call.keywords or len(call.args) != 1 or not isinstance(call.args[0], ast.Name)):
        raise DeclarationError(
            f"{text}: all clients agree on levels and their reference; write C(column) alone, and the order of its "
            "levels as levels={'column': [...]}."
        )
    if not outermost:
        raise DeclarationError(
            f"{text} calls {name}() within another function, and it has several columns; write it as a term of its "
            "own, or compute the column before."
        )
    if name == LEVELS:
        return
    given = arguments(call)
    strange = sorted(set(given) - {"x", *_KEYWORDS[name]})
    if "x" not in given or len(given) < len(call.args) + len(call.keywords):
        raise DeclarationError(
            f"{text} has no column, or too many arguments; write {name}(x, ...), each argument once."
        )
    of_rows = sorted({column for one in _AGREED if one in given for column in columns(given[one], constants)})
    if of_rows and name == SPLINE:
        raise DeclarationError(
            f"{text} reads knots or bounds from {of_rows}, and as columns they would be of the rows of each client "
            f"alone; say what all know, formula(..., constants={{{of_rows[0]!r}: ...}})."
        )
    if name == SPLINE and (strange or not set(_AGREED) <= set(given)):
        raise DeclarationError(
            f"{text} would take its knots and bounds from the rows of each client, and a coefficient would mean "
            "another thing at each; use bs(x, knots=knots, lower_bound=0, upper_bound=90), and say knots that all know "
            "in formula(..., constants=...)."
        )
    flags = [given[one] for one in _FLAGS if one in given]
    if not all(isinstance(one, ast.Constant) and isinstance(one.value, bool) for one in flags):
        raise DeclarationError(f"{text}: {' and '.join(_FLAGS)} are True or False.")
    raw, degree = given.get("raw"), given.get("degree")
    if name == POLYNOMIAL and not (isinstance(raw, ast.Constant) and raw.value is True and not strange):
        raise DeclarationError(f"{text} would be orthogonal on the rows of each client alone; use raw=True.")
    if degree is not None and not (isinstance(degree, ast.Constant) and degree.value in range(1, 21)):
        raise DeclarationError(f"{text}: the degree is a whole number from 1 to 20.")


def _unknown(name: str, text: str) -> DeclarationError:
    if name in ("S", "T", "binary"):
        return DeclarationError(f"{text}: all clients agree on levels and their reference; write C(column) alone.")
    if name.startswith("np."):
        return DeclarationError(
            f"{text} calls {name!r}, which is none of NumPy's functions of single values that formulas know. What "
            "looks at several rows would be of one client's rows alone: compute a column before, or write center(x) or "
            "scale(x), by the mean and sd of all clients' rows."
        )
    numpy = f"np.{name}" if name in FUNCTIONS else "np.log"
    root = unquoted(name.partition(".")[0])
    return DeclarationError(
        f"{text} calls {_shown(name)!r}, which formulas do not know; there are {numpy}(x) and others of NumPy, "
        "I(x**2), center(x), scale(x), offset(x), C(x), bs(x, knots=...), poly(x, 2, raw=True), and functions that you "
        f"give, constants={{{root!r}: function}}; or compute a column before."
    )


def _shown(text: str) -> str:
    """Python with columns' names in backquotes where they are no words."""
    return re.sub(r"quoted__[0-9a-f]+", lambda match: f"`{unquoted(match[0])}`", text)
