"""Rows of tables of mistakes: a call, and the words that its error must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from fedppl import DataError, DeclarationError

Kinds = type[Exception] | tuple[type[Exception], ...]


class Mistake(NamedTuple):
    """What somebody writes, and what the error names: the value, and the remedy."""

    call: Callable[[], Any]
    words: tuple[str, ...]
    kinds: Kinds = (DataError, DeclarationError)


def row(call: Callable[[], Any], *words: str, kinds: Kinds = (DataError, DeclarationError)) -> Mistake:
    return Mistake(call, words, kinds)


def refused(mistake: Mistake) -> None:
    """The call raises, and its message has all words."""
    assert mistake.words
    with pytest.raises(mistake.kinds) as error:
        mistake.call()
    text = str(error.value)
    assert not [word for word in mistake.words if word not in text], text
