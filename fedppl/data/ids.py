"""Clients' ids: what may be one, which columns of a table have them, and what rows they belong to."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedppl.settings import shown
from fedppl.types import DataError


def require_clients(clients: Any, of_a_table: str) -> None:
    """Refuse what is no mapping from ids to data, or has none; `of_a_table` says what to do with a data frame."""
    if not isinstance(clients, Mapping):
        raise DataError(
            f"clients are {type(clients).__name__}; pass a mapping from client id to its data, {of_a_table}."
        )
    if not clients:
        raise DataError("no clients: pass a mapping from client id to that client's data.")
    require_ids(clients)


def require_ids(clients: Mapping[Any, Any]) -> None:
    """Refuse ids that are none, and those that are told apart by nothing that their texts have.

    >>> require_ids({"a": {}, 1: {}})
    """
    for client_id in clients:
        _require_id(client_id)
    texts = [str(client_id) for client_id in clients]
    if len(set(texts)) < len(texts):
        raise DataError(f"client ids {list(clients)[:20]} are not distinct as strings; rename them.")
    stripped: dict[str, str] = {}
    for text in texts:
        other = stripped.setdefault(text.strip(), text)
        if other != text:
            raise DataError(
                f"client ids {other!r} and {text!r} differ by blanks alone; strip them, such as "
                "frame[column].str.strip(), or rename one."
            )


def _require_id(client_id: Any) -> None:
    parts = client_id if isinstance(client_id, tuple) else (client_id,)
    for part in parts:
        if is_missing(part):
            raise DataError(f"a client's id is {client_id!r}; name the client, or drop its rows.")
        if isinstance(part, bytes):
            raise DataError(f"client id {client_id!r} is of bytes, and ids are texts; decode them: {part!r}.decode().")
        if isinstance(part, frozenset):
            raise DataError(f"client id {client_id!r} is a set, which has no order; pass a text or a tuple.")
    if odd := [sign for sign in str(client_id) if unicodedata.category(sign) in ("Cc", "Cs")]:
        raise DataError(f"client id {client_id!r} has {odd[0]!r}, which is no letter or sign; leave it out.")
    if not str(client_id).strip():
        raise DataError(f"a client's id is {client_id!r}, an empty text; name the client, or drop its rows.")


def is_missing(value: Any) -> bool:
    """None, NaN, NaT and NA: the last has no truth."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # as of an array, which is no single value
        return False


def keys_of(by: Any, found: Sequence[Any], index: Iterable[Any] = ()) -> list[Any]:
    """The columns that by= names, out of those that were found."""
    if isinstance(by, tuple) and by in found:  # of a pandas table with several levels of names
        return [by]
    keys = [by] if isinstance(by, str) or not isinstance(by, Sequence) else list(by)
    if not keys:
        raise DataError("by=[] names no column; name the column, or columns, that tell clients apart.")
    for key in keys:
        if not _is_name(key):
            raise DataError(
                f"by= is of type {type(key).__name__}, which is no name of a column; put the values into a column of "
                "the table, and pass its name."
            )
    absent = [key for key in keys if key not in found]
    if absent:
        levels = [name for name in absent if name in list(index)]
        close = difflib.get_close_matches(str(absent[0]).casefold(), [str(name).casefold() for name in found], n=1)
        meant = [name for name in found if close and str(name).casefold() == close[0]]
        remedy = f"name one of them{f', such as {meant[0]!r}' if meant else ''}"
        if levels:
            remedy = f"{levels} is in its index: pass frame.reset_index()"
        raise DataError(f"by={shown(absent)} is no column of the table; its columns are {list(found)[:20]}; {remedy}.")
    if len(set(keys)) < len(keys):
        raise DataError(f"by={keys} names a column twice; name each once.")
    return keys


def _is_name(key: Any) -> bool:
    """What can be looked up: no array or Series, which have a hash of no use or none."""
    if getattr(key, "ndim", 0) != 0:
        return False
    try:
        hash(key)
    except TypeError:
        return False
    return True


def id_of(key: tuple[Any, ...], by: Sequence[Any]) -> Any:
    """A group's values as a client's id: whole numbers without a fraction, one value alone without its tuple."""
    plain = tuple(int(one) if isinstance(one, float) and one == int(one) else one for one in key)
    if any(isinstance(one, float) for one in plain):
        raise DataError(
            f"by={list(by)} holds the number {next(one for one in plain if isinstance(one, float))!r}, and clients are "
            "told apart by texts, whole numbers or dates; name a column of these."
        )
    return plain[0] if len(plain) == 1 else plain
