"""The text right of ~ cut into names, calls, numbers and signs; what stands in parentheses with a bar, by itself."""

from __future__ import annotations

import itertools
import keyword
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from fedppl.types import DeclarationError

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
