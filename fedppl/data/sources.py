"""Rows from databases and files, for `load_data` of a site: a query that somebody can read, known by its digest.

The digest is of what is asked and not of the rows, so that a policy can list the queries that somebody at the site has
read (`Policy(allowed_queries=)`). The same rows give the same arrays, whatever holds them.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import importlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pandas as pd

from fedppl.settings import one_line, shown
from fedppl.types import DataError, DeclarationError

__all__ = ["Source", "duckdb", "parquet", "sql"]  # of a namespace that users have

Place = str | Callable[[Mapping[str, Any]], Any]

_SHOWN = 200  # characters of a database's own error; it may quote values, and stays in the site's log
_EXACT = 2**53  # whole numbers below are exact as float64
_SECRET = re.compile(r"//[^/@]*:.*@|(passw\w*|pwd|token|secret)=", re.IGNORECASE)  # of an address that holds one
_MASK = "***"  # in place of every word of an address that may hold a secret
_KINDS: dict[type, str] = {
    **dict.fromkeys((bool, int, float, decimal.Decimal), "numbers"),
    **dict.fromkeys((str, uuid.UUID), "texts"),
    **dict.fromkeys((datetime.date, datetime.datetime), "dates"),
}


class Source(NamedTuple):
    """A query, and where it is asked. Pass it as ``load_data`` of a site; called, it reads the rows."""

    kind: str  # "sql" or "duckdb"
    place: Place  # address or file, or a function from the node config to it; not in the digest
    query: str
    dates: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of kind, query and dates, 32 hexadecimal digits: the same at all sites of a study.

        >>> sql("sqlite://", "SELECT 1 AS y").digest == sql("postgresql://clinic", "SELECT 1 AS y").digest
        True
        """
        return hashlib.sha256(json.dumps([self.kind, self.query, self.dates]).encode()).hexdigest()[:32]

    def __call__(self, config: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Ask, and return the rows, sorted; `config` is for a place that is a function of a site's node config."""
        place = self.place({} if config is None else config) if callable(self.place) else self.place
        if not isinstance(place, str | Path) or not str(place).strip():
            raise DataError(
                f"the place of a {self.kind} source is a {type(place).__name__}; give a text that is not empty."
            )
        ask = _by_sqlalchemy if self.kind == "sql" else _by_duckdb
        try:
            names, rows = ask(str(place), self.query)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # of any driver
            own = getattr(error, "orig", None) or error  # the driver's, without the query
            text = one_line(_without_words(str(own), str(place) if callable(self.place) else ""), _SHOWN)
            why = f"the {self.kind} source {self.digest} cannot be read: {type(own).__name__}: {text}"
            raise DataError(why) from None  # a driver's own text may hold the address with its password
        return _table(names, rows, self.dates)


def sql(url: Place, query: str, *, dates: Sequence[str] = ()) -> Source:
    """Rows of a SQL database, by SQLAlchemy.

    Numbers, decimals and truths become float64, and int64 where all are whole; NULL is NaN, or None among texts; dates
    and times become datetimes in UTC without a zone. Types are judged by a column's values. Rows are sorted by the
    first column, then by the next ones.

    Parameters
    ----------
    url
        Address of the database, such as ``postgresql://reader@localhost/clinic`` or ``sqlite:////srv/clinic.db``, or a
        function from the node config to it. An address with a password must be such a function, as in
        ``lambda config: os.environ["CLINIC"]``; PostgreSQL reads a password file, ``~/.pgpass``, by itself.
    query
        One SELECT, with columns named as the formula or the builder names them, sent as it is.
    dates
        Columns that hold dates as texts (ISO 8601), as in SQLite.

    Returns
    -------
    Source

    Raises
    ------
    DeclarationError
        For settings out of range. Called, the source raises a DataError where the database, the query or a column
        cannot be read.

    Examples
    --------
    >>> import fedppl
    >>> source = fedppl.sources.sql("sqlite://", "SELECT 2.5 AS y UNION ALL SELECT NULL UNION ALL SELECT 1")
    >>> source()["y"].tolist()
    [1.0, 2.5, nan]

    Notes
    -----
    *When this fails.* The query is asked anew at each request. Where its rows change during a run, by ``now()``, a
    sample or a table that grows, the site refuses, as they are not those with which the run began: ask a copy, or as of
    a date. PostgreSQL makes names small unless they are quoted: ``AS "Age"``. Whole numbers beyond 2⁵³, bytes, lists
    and durations are refused, to be cast in the query. Give the site a user that can only read.
    """
    return _source("sql", url, "url", query, dates)


def duckdb(path: Place | Path, query: str, *, dates: Sequence[str] = ()) -> Source:
    """Rows of a DuckDB file, which is opened for reading alone; columns as in `sql`.

    Parameters
    ----------
    path
        The file, or a function from the node config to it; ``":memory:"`` for queries that name files themselves.
    query, dates
        As in `sql`.

    Returns
    -------
    Source

    Raises
    ------
    DeclarationError
        For settings out of range.

    Examples
    --------
    >>> import fedppl
    >>> source = fedppl.sources.duckdb("clinic.duckdb", "SELECT age, died FROM stays WHERE year = 2025")
    >>> len(source.digest)
    32

    Notes
    -----
    *When this fails.* As in `sql`. A file that another process has open for writing cannot be read.
    """
    return _source("duckdb", str(path) if isinstance(path, Path) else path, "path", query, dates)


def parquet(pattern: str | Path, *, columns: Sequence[str] | None = None, dates: Sequence[str] = ()) -> Source:
    """Rows of parquet files, by DuckDB; columns as in `sql`.

    Parameters
    ----------
    pattern
        A file, or a pattern such as ``"stays/*.parquet"``. It is part of the query, and so of the digest.
    columns
        Columns to read; all by default.
    dates
        As in `sql`.

    Returns
    -------
    Source

    Raises
    ------
    DeclarationError
        For settings out of range.

    Examples
    --------
    >>> import fedppl
    >>> print(fedppl.sources.parquet("stays/*.parquet", columns=["age", "died"]).query)
    SELECT "age", "died" FROM read_parquet('stays/*.parquet')

    Notes
    -----
    *When this fails.* Files whose columns differ are refused by DuckDB, in words.
    """
    if not isinstance(pattern, str | Path) or not str(pattern).strip():
        raise DeclarationError(f"pattern={shown(pattern)} must be the path of a file, or a pattern of paths.")
    names = "*"
    if columns is not None:
        if isinstance(columns, str) or not columns or not all(isinstance(name, str) and name for name in columns):
            raise DeclarationError(f"columns={shown(columns)} must be a list of names, or None for all.")
        names = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
    path = str(pattern).replace("'", "''")
    return _source("duckdb", ":memory:", "path", f"SELECT {names} FROM read_parquet('{path}')", dates)


def _source(kind: str, place: Any, name: str, query: Any, dates: Any) -> Source:
    if not callable(place) and (
        not isinstance(place, str) or (name == "url" and "://" not in place) or not place.strip()
    ):
        rule = "an address such as sqlite:////srv/clinic.db" if name == "url" else "the path of a file"
        raise DeclarationError(f"{name}= is {type(place).__name__} and must be {rule}, or a function to it.")
    if not callable(place) and _SECRET.search(unquote(place)):
        remedy = 'take the address from the environment, lambda config: os.environ["CLINIC"], or use a password file'
        raise DeclarationError(f"{name}= holds a password, which would travel with the code; {remedy}.")
    if not isinstance(query, str) or not query.strip():
        raise DeclarationError(f"query={shown(query)} must be a SELECT, as a text.")
    if isinstance(dates, str) or not all(isinstance(column, str) for column in dates):
        raise DeclarationError(f"dates={shown(dates)} must be a list of column names.")
    return Source(kind, place, query.replace("\r\n", "\n").strip(), tuple(dates))


def _without_words(text: str, address: str) -> str:
    """A driver's text without any word of an address: it quotes parts of addresses that it splits in a wrong place."""
    words = {word for form in (address, unquote(address)) for word in re.findall(r"\w+", form)}
    return re.sub(r"\w+", lambda found: _MASK if found[0] in words else found[0], text)


def _by_sqlalchemy(url: str, query: str) -> tuple[list[str], list[Any]]:
    sqlalchemy = _imported("sqlalchemy", "sql")
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.pool.NullPool, hide_parameters=True)
    with engine.connect() as connection:  # without parameters no sign of the query has another meaning
        result = connection.execution_options(no_parameters=True).exec_driver_sql(query)
        return list(result.keys()), [tuple(row) for row in result]


def _by_duckdb(path: str, query: str) -> tuple[list[str], list[Any]]:
    with _imported("duckdb", "duckdb").connect(path, read_only=path != ":memory:") as connection:
        result = connection.execute(query)
        short = [str(column[1]) == "FLOAT" for column in result.description]
        names, rows = [column[0] for column in result.description], result.fetchall()
    if any(short):  # four bytes: the number that they are printed as, which is what PostgreSQL sends
        rows = [
            tuple(_printed(cell) if is_short else cell for cell, is_short in zip(row, short, strict=True))
            for row in rows
        ]
    return names, rows


def _printed(cell: float | None) -> float | None:
    return None if cell is None else float(str(np.float32(cell)))


def _imported(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        remedy = f"pip install 'fedppl[{extra}]'"
        raise ModuleNotFoundError(f"this source needs {name}, which is not installed: {remedy}", name=name) from None


# One rule for the values of all ---------------------------------------------------------------------------------------


def _table(names: Sequence[str], rows: Sequence[Any], dates: Sequence[str]) -> pd.DataFrame:
    if len(set(names)) < len(names):
        raise DataError(f"the query gives the columns {list(names)}, two of them of one name; rename one.")
    if absent := [name for name in dates if name not in names]:
        raise DataError(f"dates={absent} are no columns of the query, which gives {list(names)}.")
    if not rows:
        raise DataError("the query gives no rows; look at its conditions.")
    by_column = zip(names, zip(*rows, strict=True), strict=True)
    columns = {name: _column(name, cells, as_date=name in dates) for name, cells in by_column}
    return pd.DataFrame(columns).sort_values(list(names), ignore_index=True)


def _column(name: str, cells: Sequence[Any], *, as_date: bool) -> pd.Series[Any]:
    types = set(map(type, cells)) - {type(None)}
    kinds = {_KINDS.get(kind, kind.__name__) for kind in types}
    kind = next(iter(kinds), "dates" if as_date else "numbers")
    if len(kinds) > 1 or kind not in _KINDS.values() or (as_date and kind == "numbers"):
        wanted = "dates" if as_date else "numbers, texts or dates"
        raise DataError(f"column {name!r} holds {' and '.join(sorted(kinds))}; cast it to {wanted} in the query.")
    if as_date or kind == "dates":
        return pd.Series(_times(name, cells))
    if kind == "texts":
        return pd.Series([None if cell is None else str(cell) for cell in cells], dtype=object)
    numbers = np.array(cells, dtype=float)  # None becomes NaN
    beyond = np.abs(numbers) >= _EXACT
    if any(not isinstance(cells[row], float) for row in np.flatnonzero(beyond & np.isfinite(numbers)).tolist()):
        remedy = "cast it to text where it names something, or to double precision, in the query"
        raise DataError(f"column {name!r} holds numbers beyond 2⁵³, which would lose digits; {remedy}.")
    is_whole = bool(np.all(numbers == np.floor(numbers))) and not np.any(beyond)
    return pd.Series(numbers.astype(np.int64) if is_whole else numbers)


def _times(name: str, cells: Sequence[Any]) -> Any:
    try:
        times = pd.to_datetime(pd.Series(cells, dtype=object), utc=True, format="ISO8601")
    except (ValueError, TypeError):
        raise DataError(f"column {name!r} is no column of dates in ISO 8601; cast it in the query.") from None
    return times.dt.tz_localize(None).to_numpy(dtype="datetime64[us]")
