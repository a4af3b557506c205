"""Parcels as Flower's records: the only place that knows how arrays and texts lie in a Flower message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedppl.types import Message

__all__ = ["ASK", "CONCLUDE", "CONSTRAIN", "HELLO", "from_content", "to_content"]

# Message types: category and action.
HELLO, ASK, CONSTRAIN, CONCLUDE = "query.fedppl_hello", "train.fedppl", "query.fedppl_constrain", "evaluate.fedppl"


def to_content(arrays: Message, texts: Mapping[str, str]) -> RecordDict:
    """Content of a Flower message: one record of arrays and one of texts."""
    record = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    return RecordDict({"arrays": record, "texts": ConfigRecord(dict(texts))})


def from_content(content: RecordDict) -> tuple[dict[str, Any], dict[str, str]]:
    """Arrays and texts of a Flower message; arrays are loaded without pickle."""
    arrays = {name: value.numpy() for name, value in content.array_records["arrays"].items()}
    return arrays, {name: str(value) for name, value in content.config_records["texts"].items()}
