"""A formula taken apart: the response by us, what stands right of ~ by formulae."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from formulae.model_description import model_description
from formulae.transforms import TRANSFORMS

from fedppl.types import DeclarationError

_RESPONSE = re.compile(r"^\s*(?:(?P<call>\w+)\((?P<arguments>[^()]*)\)|(?P<name>[^\W\d]\w*)|`(?P<quoted>[^`]+)`)\s*$")
_LEVELS = re.compile(r"\bC\(\s*([^\W\d]\w*)\s*\)")
_CALLS = {"prop": "proportion", "p": "proportion", "Surv": "survival"}
# What formulae would compute from the rows of one client, so that coefficients would mean another thing at each.
_CENTRED = {"center": 1, "scale": 1, "standardize": 1}
_SPLINES = {"bs", "cr", "cc", "tp"}
_FUNCTIONS = {*TRANSFORMS, "I"}
_NESTED = re.compile(r"[\w.]+\([^()]*\)|\{[^{}]*\}")  # calls and computations, which have rules of their own


class Response(NamedTuple):
    """What is modelled: its kind ("plain", "proportion", "survival" or "interval") and its columns."""

    kind: str
    columns: tuple[str, ...]


class Group(NamedTuple):
    """Effects that vary by a factor."""

    factor: tuple[str, ...]  # columns of it: a client's own first
    expressions: tuple[str, ...]  # "1" and names of terms, in the order of the formula


class Terms(NamedTuple):
    """A formula."""

    response: Response
    right: str  # what stands right of ~, for formulae
    common: tuple[str, ...]  # names of terms whose coefficients all clients share, without intercept and offset
    intercept: bool
    offsets: tuple[str, ...]
    client: str | None  # the column that tells clients apart, where effects vary by it
    groups: tuple[Group, ...]
    columns: tuple[str, ...]  # read right of ~, without those that are factors alone
    levels: tuple[str, ...]  # of these, those that are levels though they be written as numbers: C(x)


def parse(formula: str, constants: Collection[str] = ()) -> Terms:
    """Take a formula apart, and refuse what would mean another thing at each client; constants are no columns.

    >>> parse("y ~ age * arm + (1 + arm | site) + (1 | site:ward)").groups
    (Group(factor=('site',), expressions=('1', 'arm')), Group(factor=('site', 'ward'), expressions=('1',)))
    """
    if not isinstance(formula, str) or formula.count("~") != 1:
        raise DeclarationError(f"formula={formula!r} is no formula; write one like 'y ~ age + arm + (1 | site)'.")
    left, right = formula.split("~")
    response = _response(left)
    _require_syntax(formula, right)
    levels = tuple(dict.fromkeys(_LEVELS.findall(right)))
    right = _LEVELS.sub(r"\1", right)
    try:
        described: Any = model_description(right)
    except Exception as error:  # of formulae's own kinds, which are not exported
        raise DeclarationError(
            f"formula={formula!r} cannot be read: {error}; write it like 'y ~ age + arm + (1 | site)'."
        ) from error
    common: list[str] = []
    offsets: list[str] = []
    intercept = False
    for term in described.common_terms:
        components = getattr(term, "components", None)
        if components is None:
            intercept = True
            continue
        for component in components:
            _require_column(formula, component)
            _require_known(component, constants)
            _require_stateless(component)
        is_offset = len(components) == 1 and term.name.startswith("offset(")
        (offsets if is_offset else common).append(term.name)
    _require_one_parenthesis(right)
    groups = _groups(described.group_terms)
    client = _client(groups, formula)
    factors = {name for group in groups for name in group.factor}
    read = {name for term in described.common_terms for name in getattr(term, "var_names", ())}
    for term in described.group_terms:
        read |= set(getattr(term.expr, "var_names", ()))
        for component in getattr(term.expr, "components", ()):
            _require_column(formula, component)
            _require_known(component, constants)
            _require_stateless(component)
    read -= {*constants, "np", ""}  # formulae takes False for a variable without a name
    if clash := factors & read:
        raise DeclarationError(
            f"{sorted(clash)} are factors of effects and have coefficients of their own too; clients' differences are "
            "in one or the other, leave one out."
        )
    return Terms(
        response, right.strip(), tuple(common), intercept, tuple(offsets), client, groups, tuple(sorted(read)), levels
    )


def _require_syntax(formula: str, right: str) -> None:
    """Refuse what other packages read, and what formulae would read as something else without a word."""
    bare = re.sub(r"`[^`]*`|'[^']*'", "_", right)
    while (shorter := _NESTED.sub("_", bare)) != bare:
        bare = shorter
    # Parentheses that are no call's: of effects, and of sums.
    outside = re.sub(r"\([^()]*\)", "", bare)
    wrong = {
        "it has nothing right of ~; write 'y ~ 1' for an intercept alone": not right.strip(),
        "write (... | site), with correlated=False, for ||": "||" in right,
        "write I(x**2) for a power, a * b or (a + b)**2 for interactions": "^" in right,
        "write a:b, or a/b for nested factors": "%" in right,
        "put an operator between two terms, and a name of several words into backquotes, `a b`": re.search(
            r"[\w)]\s+[\w(]", bare
        )
        is not None,
        "its parentheses do not match": bare.count("(") < bare.count(")"),
        "it has signs that no formula has; there are + - * / : | ** and functions": re.search(
            r"[^\w\s.+\-*/:|()^%]", bare
        )
        is not None,
        "name the columns that . stands for": re.search(r"(^|[+*:\s(])\.($|[+*:\s)])", right) is not None,
        "write effects in parentheses, + (1 | site)": "|" in outside,
        "write I(x**2) for a power of a column": re.search(r"[\w`]\s*\*\*", bare) is not None,
        "write C(column) alone, and the order of its levels as levels={'column': [...]}": re.search(
            r"\bC\(\s*\w+\s*,", right
        )
        is not None,
    }
    for remedy, found in wrong.items():
        if found:
            raise DeclarationError(f"formula={formula!r} cannot be read: {remedy}.")


def _require_column(formula: str, component: Any) -> None:
    """Refuse a number where a column is named."""
    if not isinstance(component.name, str) or component.name.replace(".", "").isdigit():
        raise DeclarationError(
            f"formula={formula!r} has the number {component.name} where a column is named; write I(5*x) for a "
            "multiple, 0 or 1 for the intercept."
        )


def _require_known(component: Any, constants: Collection[str]) -> None:
    """Refuse functions that nobody knows."""
    call = getattr(component, "call", None)
    if call is None:
        return
    name = str(getattr(call, "callee", component.name.partition("(")[0]))
    root, _, rest = name.partition(".")
    found: Any = np
    for part in rest.split("."):
        found = getattr(found, part, None)
    if name in _FUNCTIONS or root in constants or (root == "np" and callable(found)):
        return
    numpy = f"np.{name}" if not rest and callable(getattr(np, name, None)) else "np.log"
    raise DeclarationError(
        f"{component.name} calls {name!r}, which formulas do not know; there are {numpy}(x) and others of NumPy, "
        "I(x**2), center(x), scale(x), offset(x), C(x), bs(x, knots=...), poly(x, 2, raw=True), and functions that you "
        f"give, constants={{{root!r}: function}}; or compute a column before."
    )


def _response(left: str) -> Response:
    match = _RESPONSE.match(left)
    if match is None:
        raise DeclarationError(
            f"the response {left.strip()!r} is none; give the name of a column, prop(successes, trials), "
            'Surv(time, event) or Surv(lower, upper, "interval"). What has to be computed first, such as a logarithm, '
            "is a column of its own."
        )
    if match["call"] is None:
        return Response("plain", (match["name"] or match["quoted"],))
    if match["call"] not in _CALLS:
        raise DeclarationError(
            f"the response calls {match['call']!r}; known are {sorted(_CALLS)}. Compute a column of its own before."
        )
    kind = _CALLS[match["call"]]
    columns = tuple(part.strip() for part in match["arguments"].split(","))
    if kind == "survival" and len(columns) == 3 and columns[2] in ('"interval"', "'interval'"):
        kind, columns = "interval", columns[:2]
    if len(columns) != 2 or not all(re.fullmatch(r"[^\W\d]\w*", name) for name in columns):
        raise DeclarationError(
            f"{match['call']}({match['arguments']}) takes the names of 2 columns"
            + (': Surv(time, event), or Surv(lower, upper, "interval").' if kind == "survival" else ".")
        )
    return Response(kind, columns)


def _require_one_parenthesis(right: str) -> None:
    """Refuse effects of one factor in two places: elsewhere that says that they are independent of each other."""
    factors = [found.replace(" ", "") for found in re.findall(r"\|([^|()]+)\)", right)]
    if twice := sorted({name for name in factors if factors.count(name) > 1}):
        raise DeclarationError(
            f"effects vary by {twice} in two parentheses; write (1 + x | {twice[0]}), and "
            "formula(..., correlated=False) where they are independent."
        )


def _groups(described: Any) -> tuple[Group, ...]:
    found: dict[tuple[str, ...], list[str]] = {}
    for term in described:
        names = tuple(str(component.name) for component in term.factor.components)
        if not all(re.fullmatch(r"\w+", name) for name in names):
            raise DeclarationError(f"effects vary by {':'.join(names)!r}; name columns: (1 | site), (1 | site/ward).")
        found.setdefault(names, []).append(str(getattr(term.expr, "name", "1")).replace("Intercept", "1"))
    return tuple(Group(factor, tuple(expressions)) for factor, expressions in found.items())


def _client(groups: tuple[Group, ...], formula: str) -> str | None:
    """The factor that all others are within."""
    if not groups:
        return None
    outer = {group.factor[0] for group in groups}
    if len(outer) > 1:
        raise DeclarationError(
            f"effects of {formula!r} vary by {sorted(outer)}, and one of them has to be within the other: clients "
            "share no group but themselves. Write nested groups as (1 | site/ward)."
        )
    return outer.pop()


def _require_stateless(component: Any) -> None:
    """Refuse transformations whose constants would come from the rows of one client."""
    call = getattr(component, "call", None)
    if call is None:
        return
    name = str(getattr(call, "callee", component.name.partition("(")[0]))
    text = str(component.name)
    inner = text[text.index("(") + 1 : text.rindex(")")]
    if name in _CENTRED and not re.fullmatch(r"\s*\w+\s*", inner):
        raise DeclarationError(
            f"{text} needs the mean of something that is computed at each client; give that a column of its own."
        )
    if name in _SPLINES and not (
        name == "bs" and "knots" in inner and "lower_bound" in inner and "upper_bound" in inner
    ):
        raise DeclarationError(
            f"{text} would take its knots and bounds from the rows of each client, and a coefficient would mean "
            "another thing at each; use bs(x, knots=knots, lower_bound=0, upper_bound=90), and say knots that all know "
            "in formula(..., constants=...)."
        )
    if re.search(r"\bbs\s*\(", inner):
        raise DeclarationError(
            f"{text} calls bs() within another function, where rows outside of its bounds cannot be told; write the "
            "spline as a term of its own, or compute the column before."
        )
    if name == "poly" and "raw=True" not in inner.replace(" ", ""):
        raise DeclarationError(f"{text} would be orthogonal on the rows of each client alone; use raw=True.")
    if name in ("C", "S", "T", "binary"):
        raise DeclarationError(f"{text}: all clients agree on levels and their reference; write C(column) alone.")
