"""Parcels as Flower's records: the only place that knows how arrays and texts lie in a Flower message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedppl.flower import decode as _decode
from fedppl.types import Message

# Message types: category and action.
HELLO, ASK, CONSTRAIN, CONCLUDE = "query.fedppl_hello", "train.fedppl", "query.fedppl_constrain", "evaluate.fedppl"
AGREE = "query.fedppl_agree"


def register(app: ClientApp, reply: Callable[[FlowerMessage, Context], FlowerMessage]) -> None:
    """Have a site's app answer all types of messages by one function."""
    for kind in (HELLO, ASK, CONSTRAIN, CONCLUDE, AGREE):
        category, action = kind.split(".")
        {"query": app.query, "train": app.train, "evaluate": app.evaluate}[category](action)(reply)


def read_message(message: FlowerMessage) -> tuple[Mapping[str, Any], dict[str, str]]:
    """What came; nothing where it cannot be read, which the site refuses like anything else that is malformed."""
    try:
        return from_content(message.content)
    except Exception:
        return {}, {}


def to_content(arrays: Message, texts: Mapping[str, str]) -> RecordDict:
    """Content of a Flower message: one record of arrays and one of texts."""
    record = ArrayRecord({name: Array(np.asarray(value, order="C")) for name, value in arrays.items()})
    return RecordDict({"arrays": record, "texts": ConfigRecord(dict(texts))})


def texts_of(content: RecordDict) -> dict[str, str]:
    """Texts of a Flower message, or `Malformed`."""
    return _decode.texts(_record(content, "texts", ConfigRecord))


def from_content(
    content: RecordDict,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    what: str = "message",
    most: int = _decode.ARRAYS_BYTES,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arrays and texts of a Flower message, or `Malformed`; with `shapes`, arrays of these names and shapes alone,
    else of `most` bytes in all.

    The bytes are read here and not by Flower, which believes what an array declares of itself.
    """
    texts = texts_of(content)
    with _decode.reading("'arrays'"):
        record = _record(content, "arrays", ArrayRecord)
        plain = {name: value.data if value.stype == "numpy.ndarray" else None for name, value in record.items()}
    return _decode.arrays(plain, shapes, what, most), texts


def _record(content: RecordDict, name: str, kind: type) -> Mapping[str, Any]:
    """One of the two records that a message has."""
    with _decode.reading(f"the message's record {name!r}"):
        _decode.require(len(content) == 2, f"a message of {len(content)} records, expected 'arrays' and 'texts'")
        record = content.get(name)
        _decode.require(type(record) is kind, f"the message has no record {name!r}")
        return dict(record or {})
