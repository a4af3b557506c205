"""Columns of data frames as arrays of numbers, or what is wrong with them."""

from __future__ import annotations

import datetime
import decimal
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedppl.data.ids import is_missing
from fedppl.types import Array, DataError

if TYPE_CHECKING:
    import narwhals.stable.v2 as nw

_EPOCH = np.datetime64("1970-01-01", "us")
_EXACT = 2**53  # from where on a real is no longer every whole number
_DAY = np.timedelta64(1, "D")

Categories = Mapping[str, tuple[Any, ...]]


@functools.cache
def narwhals() -> Any:
    """Loaded when the first table comes: it takes a tenth of what importing all of fedppl does."""
    import narwhals.stable.v2 as nw

    return nw


def read(data: Any) -> Any:
    """A frame as narwhals has it, what is none as it is; names that stand twice are refused."""
    from narwhals.exceptions import DuplicateError

    try:
        return narwhals().from_native(data, pass_through=True)
    except DuplicateError as error:
        raise DataError(f"two columns of the table have one name; rename or drop one. {error}") from error


def eager(data: Any) -> Any:
    """A frame as narwhals has it, collected where it is a lazy one."""
    found = read(data)
    return found.collect() if isinstance(found, narwhals().LazyFrame) else found


def is_text(column: Any) -> bool:
    """Whether a column holds texts, categories among them."""
    nw = narwhals()
    if not isinstance(column, nw.Series):
        return np.asarray(column).dtype.kind in "OUS"
    if isinstance(column.dtype, nw.Categorical | nw.Enum | nw.String):
        return True
    return column.dtype == nw.Object and any(isinstance(value, str) for value in column.to_list())


def texts(column: Any) -> Array:
    """Texts, None where one is missing."""
    nw = narwhals()
    values = column.to_list() if isinstance(column, nw.Series) else np.asarray(column).tolist()
    found = np.empty(len(values), dtype=object)
    found[:] = [None if is_missing(value) else level(value) for value in values]
    return found


def level(value: Any) -> str:
    """A level as a text: whole numbers and truths as whole numbers, as those of columns of numbers are."""
    number = float(value) if isinstance(value, numbers.Real | np.bool_) else np.nan
    return str(int(number)) if number.is_integer() and abs(number) < _EXACT else str(value)


def categories(column: Any) -> tuple[Any, ...] | None:
    """The categories of a column in their order; None where it has none."""
    nw = narwhals()
    if isinstance(column, nw.Series) and isinstance(column.dtype, nw.Categorical | nw.Enum):
        return tuple(column.cat.get_categories().to_list())
    return None


def order(column: Any, *, chosen: bool = True) -> tuple[str, ...] | None:
    """The categories of a column in their order, such as pandas' ordered ones; None where nobody chose it.

    Where it need not be `chosen`, pandas' categories without an order have one too: that in which they are listed.
    """
    nw = narwhals()
    if not isinstance(column, nw.Series):
        return None
    listed = not chosen and isinstance(column.dtype, nw.Categorical) and column.implementation.is_pandas_like()
    ordered = isinstance(column.dtype, nw.Enum) or listed
    return tuple(map(level, categories(column) or ())) if ordered else None


def numeric(column: Any, what: str, known: Sequence[Any] | None = None) -> Array:
    """Numbers of a column; `known` are categories in the order that all clients have."""
    nw = narwhals()
    if not isinstance(column, nw.Series):
        return _of_numpy(np.asarray(column), what)
    kind = column.dtype
    if isinstance(kind, nw.Categorical | nw.Enum) or (known is not None and kind == nw.String):
        return _codes(column, known or categories(column) or (), what)
    if kind == nw.Decimal:
        return _of_numpy(column.cast(nw.Float64).to_numpy(), what)
    if kind.is_numeric() or kind == nw.Boolean:
        if not column.null_count():
            return _of_numpy(column.to_numpy(), what)
        return _of_numpy(column.cast(nw.Float64).to_numpy(), what)
    if kind.is_temporal() and kind != nw.Time:
        return _of_numpy(column.to_numpy(), what)
    values = column.to_list()
    if all(map(is_missing, values)):
        return np.full(len(values), np.nan)
    if kind == nw.Unknown and (found := np.asarray(column.to_native())).dtype.kind in "biufc":  # sparse, complex
        return found
    plain = [np.nan if is_missing(value) else value for value in values]
    if kind == nw.Object and all(isinstance(value, numbers.Real | decimal.Decimal | np.generic) for value in plain):
        return _of_numpy(np.array(plain, dtype=float), what)
    raise _not_numeric(what, str(kind), values)


def _of_numpy(values: Array, what: str) -> Array:
    if values.dtype.kind in "biufc":
        return values
    if values.dtype.kind == "M":
        return np.asarray(_days(values.astype("datetime64[us]") - _EPOCH))
    if values.dtype.kind == "m":
        return np.asarray(_days(values))
    raise _not_numeric(what, str(values.dtype), values.ravel()[:20].tolist())


def _days(spans: Any) -> Array:
    days: Array = spans / _DAY
    return np.where(np.isnat(spans), np.nan, days)


def _codes(column: nw.Series[Any], order: Sequence[Any], what: str) -> Array:
    """Places among the categories, in their order."""
    places = {value: float(place) for place, value in enumerate(order)}
    values = column.to_list()
    unknown = sorted({repr(v) for v in values if v is not None and v == v and v not in places})
    if unknown:
        raise DataError(
            f"{what} has the categories {', '.join(unknown[:4])}, and clients were given with {list(order)[:10]}; give "
            "it those, or fit again with all of them."
        )
    codes = np.array([places.get(value, np.nan) for value in values])  # what is missing is no category
    return codes if np.any(np.isnan(codes)) else codes.astype(np.int64)


def _not_numeric(what: str, kind: str, values: Sequence[Any]) -> DataError:
    present = [value for value in values if not is_missing(value)]
    shown = sorted({repr(value) for value in present})[:4]
    return DataError(
        f"{what} has the type {kind} ({', '.join(shown)}), and a model computes with numbers: {_remedy(present)}."
    )


def _remedy(values: Sequence[Any]) -> str:
    odd = [value for value in values if not is_number(value)]
    if values and not odd:
        return "its texts are numbers; convert the column, .astype(float) in pandas"
    if len(odd) < len(values) and all(isinstance(value, str) for value in odd):
        return (
            f"{sorted(set(odd))[:4]} are none; correct them, or have pandas.to_numeric(column, errors='coerce') take "
            "them for missing"
        )
    if any(isinstance(value, datetime.date) for value in values):
        return "make times of one zone of it, pandas.to_datetime(column, utc=True)"
    if any(isinstance(value, list | tuple | np.ndarray | dict) or hasattr(value, "to_list") for value in values):
        return "give one number a row, in as many columns as there are numbers, or an array of them by name"
    if any(hasattr(value, "to_timestamp") for value in values):
        return "make times of its periods, column.dt.to_timestamp()"
    return "declare the model by fedppl.formula, which agrees on levels, or number its values alike at all clients"


def is_number(value: Any) -> bool:
    """Whether a value, or what a text says, is a number."""
    try:
        float(value if not isinstance(value, bytes) else "")
    except (TypeError, ValueError):
        return False
    return True
