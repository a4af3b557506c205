"""Columns so far from 0 that what they are multiplied with cannot be told from what stands alone."""

from __future__ import annotations

import re

from fedppl.formulas.agreement import Agreement
from fedppl.formulas.terms import Terms

SAID = 10.0  # means, in sds, that are said before a fit
SUSPECT = 3.0  # and where it did not arrive


def far_from_zero(terms: Terms, agreement: Agreement, least: float) -> list[str]:
    """Numeric columns with a mean of more than `least` sds, in effects or in products without `center`, in words.

    Effects (1 + x | site) of such a column have an intercept at x = 0, far from all rows, which see but the sum of it
    and of the slope's part: two sds and a correlation are all but one number. So it is with coefficients of x and of
    x² or x:z.
    """
    found = []
    for name in terms.columns:
        column = agreement.columns[name]
        if column.levels or not abs(column.mean) > least * column.sd:
            continue
        far = f"{name!r} is far from 0, {column.mean:.6g} on average with an sd of {column.sd:.3g}"
        for group in terms.groups:
            if any(_stands_in(name, one) for one in group.expressions):
                of = "/".join(group.factor)
                found.append(
                    f"{far}, and has effects by {of!r}, which cannot be told from those of the intercept there: write "
                    f"(1 + center({name}) | {of})"
                )
        those = [one for one in terms.common if _stands_in(name, one)]
        products = [one for one in those if _is_product(name, one, terms.columns) or len(those) > 1]
        if any(_is_product(name, one, terms.columns) for one in products):
            found.append(
                f"{far}, and stands in {products[:4]}, whose coefficients cannot be told from each other there: write "
                f"center({name}) in its place"
            )
    return found


def _stands_in(name: str, term: str) -> bool:
    """Whether a term reads a column as it is, and not its distance from the mean."""
    column = rf"`?{re.escape(name)}`?"
    left = re.sub(rf"\b(center|scale|standardize)\(\s*{column}\s*\)", "", term)
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", left) is not None


def _is_product(name: str, term: str, columns: tuple[str, ...]) -> bool:
    """Whether a term is a power of a column, or a product with others."""
    others = [one for one in columns if one != name and re.search(rf"(?<![\w.]){re.escape(one)}(?!\w)", term)]
    return bool(others) or "**" in term or re.search(r"\b(poly|np\.(square|power))\(", term) is not None
