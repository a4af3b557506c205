"""Parse a formula: its response, common terms, offsets, and effects by groups."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from formulaic import Formula
from formulaic.parser import DefaultFormulaParser

from fedppl.formulas import expressions
from fedppl.formulas.expressions import Effects, Token, cut, quoted, unquoted
from fedppl.types import DeclarationError

_COLUMN = r"(?:[^\W\d]\w*|`[^`]+`)"
_RESPONSE = re.compile(rf"^\s*(?:(?P<call>\w+)\((?P<arguments>(?:[^()`]|`[^`]*`)*)\)|(?P<name>{_COLUMN}))\s*$")
_CALLS = {"prop": "proportion", "p": "proportion", "Surv": "survival"}
_TILDE = re.compile(r"~(?=(?:[^`]*`[^`]*`)*[^`]*$)")  # in no backquotes


class Response(NamedTuple):
    """The response: its kind ("plain", "proportion", "survival" or "interval") and its columns."""

    kind: str
    columns: tuple[str, ...]

    @property
    def variable(self) -> str:
        """Name of the variable that is observed."""
        return variable(self.columns[0])

    @property
    def trials(self) -> tuple[str, ...]:
        """The column of numbers of trials, if there is one."""
        return self.columns[1:] if self.kind == "proportion" else ()


class Group(NamedTuple):
    """Effects that vary by a factor."""

    factor: tuple[str, ...]  # its columns, that of clients first
    expressions: tuple[str, ...]  # "1" and names of terms, in the order of the formula


class Terms(NamedTuple):
    """A parsed formula."""

    response: Response
    common: tuple[str, ...]  # names of terms with shared coefficients, without intercept and offset
    intercept: bool
    offsets: tuple[str, ...]
    client: str | None  # the factor of clients, if effects vary by it
    groups: tuple[Group, ...]
    columns: tuple[str, ...]  # read right of ~, without those that are only factors of groups
    levels: tuple[str, ...]  # columns of these that are levels even if they hold numbers: C(x)
    sums: tuple[Sum, ...]  # of the common terms, and of the effects of each group
    trees: Mapping[str, ast.expr]  # syntax trees of factors and offsets, by name
    varying: frozenset[str]  # columns that are read by more than offsets

    @property
    def nested(self) -> tuple[str, ...]:
        """Factors of groups within clients."""
        return tuple(name for group in self.groups for name in group.factor[1:])

    @property
    def factors(self) -> dict[str, tuple[str, ...]]:
        """Factors of the common terms, by name of the term."""
        return dict(zip(self.common, filter(None, self.sums[0].terms), strict=True))


def variable(name: str) -> str:
    """Name of a term or a column as a variable of a model, where names have no slash.

    >>> variable("I(x / 100)")
    'I(x ∕ 100)'
    """
    return name.replace("/", "∕")


def parse(formula: str, constants: Collection[str] = ()) -> Terms:
    """Parse a formula; refuse terms whose meaning would differ between clients. `constants` are not columns.

    >>> parse("y ~ age * arm + (1 + arm | site) + (1 | site:ward)").groups
    (Group(factor=('site',), expressions=('1', 'arm')), Group(factor=('site', 'ward'), expressions=('1',)))
    """
    sides = _TILDE.split(formula) if isinstance(formula, str) else []
    if len(sides) != 2:
        raise DeclarationError(f"formula={formula!r} is no formula; write one like 'y ~ age + arm + (1 | site)'.")
    if taken := sorted({*map(str, constants)} & {*expressions.RESERVED}):
        raise DeclarationError(f"constants {taken} have names that formulas reserve; give them other names.")
    response = _response(sides[0])
    pieces = cut(formula, sides[1])
    tokens = [*pieces.common, *(one for part in pieces.effects for one in part.effects)]
    trees, names, levels = _factors(tokens, constants)
    common = sum_of(formula, pieces.common or [Token("number", "1")], names)
    groups, sums = _groups(formula, pieces.effects, names)
    calls = [expressions.read(text, constants) for text in pieces.offsets]
    offsets = {expressions.written(call): call.args[0] for call in calls if isinstance(call, ast.Call)}
    terms = [term for one in (common, *sums) for term in one.terms]
    used = {name for term in terms for name in term}
    by_name = {name: {*expressions.columns(tree, constants)} for name, tree in trees.items()}
    varying = {column for name in used for column in by_name[name]}
    read = varying.union(*(expressions.columns(tree, constants) for tree in offsets.values()))
    clients = sorted({group.factor[0] for group in groups})
    if len(clients) > 1:
        raise DeclarationError(f"effects of {formula!r} vary by {clients}; put one within the other, (1 | site/ward).")
    client = clients[0] if clients else None
    if client in read:
        raise DeclarationError(f"{[client]} are factors of effects with coefficients of their own too; leave one out.")
    for group, own in zip(groups, sums, strict=True):
        _require_apart(group, {column for term in own.terms for name in term for column in by_name[name]})
    return Terms(
        response,
        tuple(variable(":".join(term)) for term in common.terms if term),
        () in common.terms,
        tuple(offsets),
        client,
        groups,
        tuple(sorted(read)),
        tuple(name for name in levels if name in read),
        (common, *sums),
        {name: tree for name, tree in trees.items() if name in used} | offsets,
        frozenset(varying),
    )


def _factors(
    tokens: Sequence[Token], constants: Collection[str]
) -> tuple[dict[str, ast.expr], dict[str, str], tuple[str, ...]]:
    """Syntax trees of factors by name, names by text, and the columns that are written as levels."""
    trees: dict[str, ast.expr] = {}
    names: dict[str, str] = {}
    levels: list[str] = []
    for text in dict.fromkeys(one.text for one in tokens if one.kind == "factor"):
        tree = ast.Name(id=text) if "(" not in text else expressions.read(text, constants)
        if (column := expressions.level_column(tree)) is not None:
            levels.append(column)
            names[text] = column
            continue
        name = names[text] = expressions.written(tree)
        if isinstance(tree, ast.Name) and name in constants:
            raise DeclarationError(f"{name!r} stands as a term and is a constant; compute with it, I({name} * x).")
        if ast.dump(trees.setdefault(name, tree)) != ast.dump(tree):
            raise DeclarationError(f"{name!r} is a column and a computation of the same name; rename the column.")
    computed = {column for tree in trees.values() for column in expressions.columns(tree, constants)}
    if both := sorted(computed & {*levels}):
        raise DeclarationError(f"{both} are levels in one place and numbers in another; write C({both[0]}) everywhere.")
    return trees | {column: ast.Name(id=quoted(column)) for column in levels}, names, tuple(levels)


def _response(left: str) -> Response:
    match = _RESPONSE.match(left)
    if match is not None and match["call"] is None:
        return Response("plain", (match["name"].strip("`"),))
    call, arguments = match.group("call", "arguments") if match is not None else ("", "")
    kind = _CALLS.get(call, "")
    columns = tuple(part.strip() for part in re.findall(r"(?:[^,`]|`[^`]*`)+", arguments))
    if kind == "survival" and len(columns) == 3 and columns[2] in ('"interval"', "'interval'"):
        kind, columns = "interval", columns[:2]
    if not kind or len(columns) != 2 or not all(re.fullmatch(_COLUMN, name) for name in columns):
        forms = 'prop(successes, trials), Surv(time, event) or Surv(lower, upper, "interval")'
        rule = f"write the name of a column of its own, or names of 2 columns in {forms}"
        raise DeclarationError(f"the response {left.strip()!r} is not valid; {rule}.")
    return Response(kind, tuple(name.strip("`") for name in columns))


def _groups(
    formula: str, pieces: Sequence[Effects], names: Mapping[str, str]
) -> tuple[tuple[Group, ...], tuple[Sum, ...]]:
    """Groups and the effects of each; with a/b effects vary by a, and by b within a."""
    written: set[tuple[str, ...]] = set()
    by_factor: dict[tuple[str, ...], Sum] = {}
    for piece in pieces:
        inner = _nested(piece.factor)
        effects = sum_of(formula, piece.effects, names) if piece.effects else None
        if effects is None or not effects.terms:
            raise DeclarationError(f"formula={formula!r} has parentheses without effects; write (1 | {inner[0][0]}).")
        for factor in inner:
            before = by_factor.get(factor)
            kept, new = ({*map(frozenset, one.terms)} for one in (before or effects, effects))
            if factor in written & {inner[-1]} or not (kept <= new or new <= kept):
                shown = ":".join(factor)
                remedy = f"(1 + x | {shown}), with correlated=False for independent ones, or (1 | {shown}:group)"
                raise DeclarationError(f"effects vary by [{shown!r}] in two parentheses; write {remedy}.")
            by_factor[factor] = effects if before is None or len(effects.terms) > len(before.terms) else before
        written.add(inner[-1])
    groups = tuple(
        Group(factor, tuple(variable(":".join(term)) if term else "1" for term in one.terms))
        for factor, one in by_factor.items()
    )
    return groups, tuple(by_factor.values())


def _nested(tokens: Sequence[Token]) -> list[tuple[str, ...]]:
    """Factors of ``a/b``: a, and b within a."""
    kinds = [token.kind == "factor" and "(" not in token.text for token in tokens]
    signs = {token.text for token in tokens[1::2]}
    if not tokens or len(tokens) % 2 == 0 or not all(kinds[::2]) or not signs <= {"/", ":"}:
        shown = " ".join(unquoted(token.text) for token in tokens)
        raise DeclarationError(f"effects vary by {shown!r}; name columns: (1 | site), (1 | site/ward).")
    factors: list[tuple[str, ...]] = []
    names: tuple[str, ...] = ()
    for place in range(0, len(tokens), 2):
        names = (*names, unquoted(tokens[place].text))
        if place + 1 == len(tokens) or tokens[place + 1].text == "/":
            factors.append(names)
    return factors


def _require_apart(group: Group, columns: Collection[str]) -> None:
    """Refuse effects of `columns` that vary by themselves."""
    of = ":".join(group.factor)
    if both := sorted({*columns} & {*group.factor}):
        raise DeclarationError(f"{both} vary by {of}, within which each is the same; leave it out of (... | {of}).")
    if len(set(group.factor)) < len(group.factor):
        raise DeclarationError(f"effects vary by {of}, which names a column twice.")


# The algebra of formulas and the coding of factors, by formulaic: terms and their columns -----------------------------

# The edge to formulaic. It is given placeholders for factors, never the user's text, and computes nothing from rows.

_MOST = 10_000  # products of terms before duplicates are dropped
_ALIAS = "v{}"


class Product(NamedTuple):
    """Products of factors' columns, some of them without their reference level."""

    factors: tuple[str, ...]
    without_reference: tuple[bool, ...]


class Coded(NamedTuple):
    """A term, without factors for the intercept, and its columns as products of its factors' columns."""

    term: tuple[str, ...]
    products: tuple[Product, ...]


class Sum(NamedTuple):
    """A sum of terms."""

    text: str  # for formulaic, with placeholders
    factors: tuple[str, ...]  # in the order of the placeholders
    terms: tuple[tuple[str, ...], ...]  # factors of the terms in order; none for the intercept

    def products(self, levels: Mapping[str, Sequence[str]]) -> list[Coded]:
        """Terms with the products of their columns, from the levels of factors that have some."""
        table: dict[str, Any] = {}
        rows = max([1, *map(len, levels.values())])
        for number, name in enumerate(self.factors):
            own = levels.get(name, ())
            codes = [place % max(len(own), 1) for place in range(rows)]
            table[_ALIAS.format(number)] = pd.Categorical.from_codes(codes, list(own)) if own else [1.0] * rows
        matrix: Any = Formula(self.text).get_model_matrix(
            pd.DataFrame(table, index=range(rows)), ensure_full_rank=True, na_action="ignore", context={}
        )

        def product(scoped: Any) -> Product:
            factors = tuple(self.factors[int(one.factor.expr[1:])] for one in scoped.factors)
            return Product(factors, tuple(bool(one.reduced) for one in scoped.factors))

        structure = matrix.model_spec.structure
        return [Coded(_named(part.term, self.factors), tuple(map(product, part.scoped_terms))) for part in structure]


def sum_of(formula: str, tokens: Sequence[Token], names: Mapping[str, str]) -> Sum:
    """Terms of a formula's tokens; `names` are names of factors by text."""
    factors = tuple(dict.fromkeys(names[token.text] for token in tokens if token.kind == "factor"))
    _require_numbers(formula, tokens)
    alias = {name: _ALIAS.format(number) for number, name in enumerate(factors)}
    text = " ".join(alias[names[token.text]] if token.kind == "factor" else token.text for token in tokens)
    text = text.removeprefix("+ ").strip() or "1"
    try:
        _require_few(formula, text, len(factors))
        return Sum(text, factors, tuple(_named(term, factors) for term in Formula(text)))
    except DeclarationError:
        raise
    except Exception as error:  # of any kind, from formulaic
        remedy = "write it like 'y ~ age + arm + (1 | site)'"
        raise DeclarationError(f"formula={formula!r} cannot be read: a term is missing; {remedy}.") from error


def _named(term: Any, factors: Sequence[str]) -> tuple[str, ...]:
    return tuple(factors[int(one.expr[1:])] for one in term.factors if one.expr != "1")


def _require_numbers(formula: str, tokens: Sequence[Token]) -> None:
    """Refuse numbers in place of columns."""
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token.text == "(") - (token.text == ")")
        if token.kind != "number":
            continue
        before = tokens[place - 1].text if place else "+"
        after = tokens[place + 1].text if place + 1 < len(tokens) else "+"
        if before == "**":
            if not (token.text.isdigit() and int(token.text) >= 1):
                raise DeclarationError(f"formula={formula!r} has the power {token.text}; it is a whole number from 1.")
        elif token.text not in ("0", "1") or not {before, after} <= {"+", "-"}:
            within = " outside of parentheses" if depth else ""
            remedy = f"write I(5*x) for a multiple, 0 or 1 for the intercept{within}"
            raise DeclarationError(f"formula={formula!r} has the number {token.text} in place of a column; {remedy}.")


def _require_few(formula: str, text: str, factors: int) -> None:
    """Refuse products of too many terms."""
    nodes: list[Any] = [DefaultFormulaParser().get_ast(text)]
    for node in nodes:  # grows: a node comes before those below it
        nodes += getattr(node, "args", ())
    sizes: dict[int, float] = {}
    for node in reversed(nodes):
        below = [sizes[id(one)] for one in getattr(node, "args", ())]
        match getattr(getattr(node, "operator", None), "symbol", None), below:
            case ("**", [one, _]):
                made = one ** min(int(node.args[1].token), 99)
            case ("*" | ":", [one, other]):
                made = one * other + one + other
            case _:
                made = sum(below) or 1.0
        if made > _MOST:
            raise DeclarationError(f"formula={formula!r} has products of more than {_MOST} terms; write fewer.")
        sizes[id(node)] = min(made, 2.0 ** min(factors, 60))
