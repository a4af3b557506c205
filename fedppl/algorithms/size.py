"""A word where there are more shared variables than an algorithm is made for."""

from __future__ import annotations

import logging

from fedppl.types import Layout

logger = logging.getLogger(__name__)

# Numbers from which a round may take minutes where the density is not concave.
LARGE = 300


def say_if_large(layout: Layout, algorithm: str) -> None:
    """One line of the log, before the first round."""
    if layout.size >= LARGE:
        logger.warning(
            "%s infers all %d shared numbers together, and a round may take minutes. It is made for tens of them: "
            "share fewer, or, for the weights of a network, pass one of the algorithms of fedppl.nn",
            algorithm,
            layout.size,
        )
