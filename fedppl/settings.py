"""Checks of keyword arguments: each function takes a name and a value, and returns the value in Python's own type.

A value that breaks the rule raises a DeclarationError with the keyword, the value, the rule and, if given, a remedy.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedppl.types import DeclarationError

_LONGEST = 500  # characters of a foreign text, so that nobody can flood a log


def between(name: str, value: Any, low: float, high: float, ends: str = "()", hint: str = "") -> float:
    """A finite number in an interval; `ends` are its brackets: "(]" is low < x <= high.

    Examples
    --------
    >>> between("damping", 1, 0, 1, "(]")
    1.0
    """
    number = _number(value)
    at_an_end = (number == low and ends[0] == "[") or (number == high and ends[1] == "]")
    if not (low < number < high or at_an_end) or not np.isfinite(number):
        raise DeclarationError(f"{name}={shown(value)} must {_interval(low, high, ends)}{_remedy(hint)}.")
    return number


def positive(name: str, value: Any, hint: str = "") -> float:
    """A number above zero."""
    return between(name, value, 0, np.inf, hint=hint)


def whole(name: str, value: Any, least: int = 1, hint: str = "", most: int | None = None) -> int:
    """A whole number that is neither too small nor too large.

    Examples
    --------
    >>> whole("rounds", 20)
    20
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        rule = f", at least {least}" if most is None else f" from {least} to {most}"
        raise DeclarationError(f"{name}={shown(value)} must be a whole number{rule}{_remedy(hint)}.")
    return int(value)


def a_fit(value: Any) -> None:
    """What `fedppl.fit` returned, by its methods: its class stands above."""
    if not all(callable(getattr(type(value), name, None)) for name in ("client", "influence", "summary")):
        raise DeclarationError(f"fit is {type(value).__name__}; pass what fedppl.fit returned.")


def one_of(name: str, value: Any, choices: Sequence[str], hint: str = "") -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in choices:
        words = [f'"{choice}"' for choice in choices]
        listed = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
        raise DeclarationError(f"{name}={shown(value)} must be {listed}{_remedy(hint)}.")
    return str(value)


def text(name: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise DeclarationError(f"{name}={shown(value)} must be a text.")
    return value


def file_to_write(value: Any, example: str) -> Path:
    """The path of a file in a folder that is there."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise DeclarationError(f"path={shown(value)} must be the path of a file, such as {example!r}.")
    target = Path(os.fsdecode(value))
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else "lies in a folder that does not exist"
        raise DeclarationError(f"path={str(target)!r} {why}; name a file, such as {example!r}.")
    return target


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise DeclarationError(f"{name}={shown(value)} must be True or False.")
    return bool(value)


def form(name: str, value: Any) -> None:
    """A form of a precision matrix: "full", "diagonal", or a partition of the shared names into blocks."""
    blocks = isinstance(value, tuple | list) and all(
        isinstance(block, tuple | list) and all(isinstance(shared, str) for shared in block) for block in value
    )
    if not blocks and not (isinstance(value, str) and value in ("full", "diagonal")):
        example = '[["mu", "tau"], ["beta"]]'
        raise DeclarationError(f'{name}={shown(value)} must be "full", "diagonal" or lists of names, as {example}.')


def chosen(keyword: str, value: Any, known: Sequence[str], what: str) -> list[str]:
    """Known names, each once, from one name or a list of them; None stands for all.

    Clients may be given by numbers or tuples, which stand for their texts.

    >>> chosen("clients", "a", ["a", "b"], "the fit's clients")
    ['a']
    """
    if value is None:
        return list(known)
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    given = [str(k) if isinstance(k, int | np.integer | tuple) else k for k in (value if several else [value])]
    listed = f"name some of {what}, each once: {some_of(known)}"
    if not all(isinstance(name, str) for name in given):
        raise DeclarationError(f"{keyword}={shown(value)} is no list of names; {listed}.")
    if not given or len(set(given)) < len(given) or (set(given) - set(known)):
        wrong = sorted(set(given) - set(known)) or ("some twice" if given else "none")
        raise DeclarationError(f"{keyword}={shown(value)}: {wrong}; {listed}.")
    return given


def not_called(value: Any) -> str:
    """The remedy for a builder that was passed without being called; empty for anything else."""
    if not inspect.isfunction(value) or not value.__module__.startswith("fedppl.") or "<" in value.__qualname__:
        return ""
    required = [p.name for p in inspect.signature(value).parameters.values() if p.default is p.empty]
    arguments = ", ".join(f"{argument}=..." for argument in required)
    return f" but the function that builds one; call it: {_public(value)}({arguments})."


def plain(value: Any) -> Any:
    """A NumPy scalar as a Python scalar, so that equal settings are written alike."""
    return value.item() if isinstance(value, np.generic) else value


def described(settings: Mapping[str, Any] | NamedTuple, **more: Any) -> dict[str, str]:
    """Settings of an algorithm, each in one line of text.

    >>> described({"steps": 20}, weights="rows")
    {'steps': '20', 'weights': "'rows'"}
    """
    first = settings if isinstance(settings, Mapping) else settings._asdict()
    return {name: repr(plain(value)) for name, value in {**first, **more}.items()}


def named(value: Any) -> str:
    """A setting as text, to compare it with another: a function by its name, without its address."""
    if callable(value):
        return str(getattr(value, "__qualname__", None) or type(value).__qualname__)
    return repr(plain(value))


def takes(function: Any, count: int) -> bool:
    """Whether a function can be called with `count` positional arguments; True if its signature cannot be read."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*(None,) * count)
    except TypeError:
        return False
    return True


def some_of(names: Collection[Any]) -> str:
    """The first ten names, and how many more there are."""
    first = list(names)[:10]
    return f"{first}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def shown(value: Any) -> str:
    """A value as text of at most 80 characters; functions by name, arrays by shape."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return _public(value)
    if isinstance(value, np.ndarray) and value.ndim:
        return f"array of shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _public(function: Any) -> str:
    name = str(function.__name__)
    package = function.__module__.partition(".")[0]
    root = sys.modules.get("fedppl")
    if package != "fedppl" or root is None:
        return name
    if vars(root).get(name) is function:
        return f"fedppl.{name}"
    spaces = (space for space in (*root.__all__, *vars(root)) if getattr(vars(root).get(space), name, None) is function)
    return ".".join(filter(None, ("fedppl", next(spaces, ""), name)))


def _number(value: Any) -> float:
    """A real number as a float; NaN for anything else, too large integers included."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        return float(value) if is_number else np.nan
    except OverflowError:
        return np.nan


def _interval(low: float, high: float, ends: str) -> str:
    if (low, high) == (-np.inf, np.inf):
        return "be a finite number"
    if (low, high) == (0, np.inf):
        return "be finite and not negative" if ends[0] == "[" else "be positive and finite"
    if ends == "()" and high < np.inf:
        return f"lie between {low:g} and {high:g}"
    above = f"be {'at least' if ends[0] == '[' else 'above'} {low:g} and "
    return above + (f"{'at most' if ends[1] == ']' else 'below'} {high:g}" if high < np.inf else "finite")


def _remedy(hint: str) -> str:
    return f"; {hint}" if hint else ""


def one_line(text: object, longest: int = _LONGEST) -> str:
    """A foreign text in one printable line that is not too long."""
    cut = str(text)[: 4 * longest]
    line = " ".join("".join(c if c.isprintable() else " " for c in cut).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"
