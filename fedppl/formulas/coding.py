"""The algebra of formulas and the coding of factors, by formulaic: which terms there are, and which columns each has.

The edge to formulaic. It is given names of ours for factors, never the user's text, and computes nothing from rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from formulaic import Formula
from formulaic.parser import DefaultFormulaParser

from fedppl.formulas.tokens import Token
from fedppl.types import DeclarationError

_MOST = 10_000  # products of terms before duplicates are dropped
_ALIAS = "v{}"


class Product(NamedTuple):
    """Columns that are products of those of factors, of which some are without their reference."""

    factors: tuple[str, ...]
    without_reference: tuple[bool, ...]


class Sum(NamedTuple):
    """Terms that are added."""

    text: str  # what formulaic reads, with names of ours
    factors: tuple[str, ...]  # that these names stand for
    terms: tuple[tuple[str, ...], ...]  # factors of the terms, in their order; none of the intercept

    def products(self, levels: Mapping[str, Sequence[str]]) -> list[tuple[tuple[str, ...], tuple[Product, ...]]]:
        """Terms with the products that their columns are, by the levels of the factors that have some."""
        table: dict[str, Any] = {}
        rows = max([1, *map(len, levels.values())])
        for number, name in enumerate(self.factors):
            own = levels.get(name, ())
            codes = [place % max(len(own), 1) for place in range(rows)]
            table[_ALIAS.format(number)] = pd.Categorical.from_codes(codes, list(own)) if own else [1.0] * rows
        matrix: Any = Formula(self.text).get_model_matrix(
            pd.DataFrame(table, index=range(rows)), ensure_full_rank=True, na_action="ignore", context={}
        )
        return [
            (
                _named(part.term, self.factors),
                tuple(
                    Product(
                        tuple(self.factors[int(one.factor.expr[1:])] for one in scoped.factors),
                        tuple(bool(one.reduced) for one in scoped.factors),
                    )
                    for scoped in part.scoped_terms
                ),
            )
            for part in matrix.model_spec.structure
        ]


def sum_of(formula: str, tokens: Sequence[Token], names: Mapping[str, str]) -> Sum:
    """Terms of a formula's tokens; `names` are those of factors, by their text."""
    factors = tuple(dict.fromkeys(names[one.text] for one in tokens if one.kind == "factor"))
    _require_numbers(formula, tokens)
    alias = {name: _ALIAS.format(number) for number, name in enumerate(factors)}
    text = " ".join(alias[names[one.text]] if one.kind == "factor" else one.text for one in tokens)
    text = text.removeprefix("+ ").strip() or "1"
    try:
        _require_few(formula, text, len(factors))
        return Sum(text, factors, tuple(_named(term, factors) for term in Formula(text)))
    except DeclarationError:
        raise
    except Exception as error:  # of formulaic's own kinds, and what it did not think of
        raise DeclarationError(
            f"formula={formula!r} cannot be read: a sign stands where a term is expected, or none is left; write it "
            "like 'y ~ age + arm + (1 | site)'."
        ) from error


def _named(term: Any, factors: Sequence[str]) -> tuple[str, ...]:
    return tuple(factors[int(one.expr[1:])] for one in term.factors if one.expr != "1")


def _require_numbers(formula: str, tokens: Sequence[Token]) -> None:
    """Refuse a number where a column is named."""
    depth = 0
    for place, one in enumerate(tokens):
        depth += (one.text == "(") - (one.text == ")")
        if one.kind != "number":
            continue
        before = tokens[place - 1].text if place else "+"
        after = tokens[place + 1].text if place + 1 < len(tokens) else "+"
        if before == "**":
            if not (one.text.isdigit() and int(one.text) >= 1):
                raise DeclarationError(
                    f"formula={formula!r} has the power {one.text}; powers of sums are whole numbers from 1."
                )
        elif one.text not in ("0", "1") or not {before, after} <= {"+", "-"}:
            within = "; 0 and 1 stand outside of parentheses" if depth else ""
            raise DeclarationError(
                f"formula={formula!r} has the number {one.text} where a column is named; write I(5*x) for a multiple, "
                f"0 or 1 for the intercept{within}."
            )


def _require_few(formula: str, text: str, factors: int) -> None:
    """Refuse products of so many terms that writing them out takes long."""
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
            raise DeclarationError(
                f"formula={formula!r} has products of more terms than can be written out; write the interactions that "
                "are meant."
            )
        sizes[id(node)] = min(made, 2.0 ** min(factors, 60))
