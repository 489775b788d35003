"""What differs between the databases: how to connect, how Spark's types are called, how to write many rows.

Everything else is SQL that both understand. A URL is `postgresql://...` (libpq's, so a password may stay in PGPASSWORD
or ~/.pgpass of the driver and the workers) or `sqlite:<path>`, which only a Spark on this one machine can use.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from spark_jobs.errors import SparkJobError


class BadSqlTable(SparkJobError):
    """A setting of the table, or a column of the rows, can't be used; the message names it."""

    def __init__(self, setting: str, value: object, why: str) -> None:
        super().__init__(f"{setting}={value!r}: {why}")
        self.setting, self.value, self.why = setting, value, why


_LOCK_TIMEOUT_S = 30


class TypeNames(NamedTuple):
    """What Spark's types are called, but for decimals."""

    types: dict[type[DataType], str]
    decimal: str
    identity: str
    """The column that counts rows up."""


class Dialect(Protocol):
    """One kind of database."""

    names: TypeNames
    mark: str
    """The placeholder of a value in a statement."""

    def connect(self) -> Any:
        """A connection that begins a transaction with its first statement."""
        ...

    def location(self) -> str:
        """The database without secrets, for messages."""
        ...

    def lost(self) -> tuple[type[Exception], ...]:
        """Errors after which the same transaction may be tried again, on a new connection."""
        ...

    def insert(self, connection: Any, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
        """Add the rows that are not there yet by the table's key; how many were given."""
        ...


def dialect_of(url: str) -> "Dialect":
    """By the URL's scheme. Raises BadSqlTable."""
    if url.startswith(("postgresql://", "postgres://")):
        return PostgreSQL(url)
    if url.startswith("sqlite:"):
        return SQLite(url.removeprefix("sqlite:"))
    scheme = url.partition(":")[0]
    raise BadSqlTable("url", scheme, "give postgresql://HOST/DATABASE or sqlite:PATH")


def column_type(dialect: Dialect, name: str, kind: DataType) -> str:
    """What a column is declared as. Raises BadSqlTable."""
    names = dialect.names
    if isinstance(kind, DecimalType):
        return names.decimal.format(kind.precision, kind.scale)
    found = names.types.get(type(kind))
    if found is None:
        why = f"{kind.simpleString()} has no column type: cast it, to_json makes text of what is nested"
        raise BadSqlTable("column", name, why)
    return found


def quoted(name: str) -> str:
    """An identifier, in quotes. Raises BadSqlTable for one in which a placeholder of a value could be seen."""
    if not name or set(name) & {"?", "%", "\0"}:
        raise BadSqlTable("name", name, "a table or column has a name without ? and %: give it another")
    return '"' + name.replace('"', '""') + '"'


class PostgreSQL:
    """By psycopg."""

    mark = "%s"
    names = TypeNames(
        {
            BooleanType: "boolean", ByteType: "smallint", ShortType: "smallint", IntegerType: "integer",
            LongType: "bigint", FloatType: "real", DoubleType: "double precision", StringType: "text",
            BinaryType: "bytea", DateType: "date", TimestampType: "timestamptz", TimestampNTZType: "timestamp",
        },
        "numeric({}, {})",
        "bigint generated always as identity",
    )  # fmt: skip

    def __init__(self, url: str) -> None:
        self._url = url

    def connect(self) -> Any:
        import psycopg  # noqa: PLC0415 - pip install pushrep[sql]

        return psycopg.connect(self._url)

    def location(self) -> str:
        from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415

        settings = conninfo_to_dict(self._url)
        return f"postgresql://{settings.get('host', '')}/{settings.get('dbname', '')}"

    def lost(self) -> tuple[type[Exception], ...]:
        import psycopg  # noqa: PLC0415

        return (psycopg.OperationalError, psycopg.errors.SerializationFailure)

    def insert(self, connection: Any, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
        """By COPY into a table of this transaction, since COPY itself can't skip conflicts, and from there."""
        names = ", ".join(map(quoted, columns))
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS pushrep_copy (LIKE {table}) ON COMMIT DROP")
            count = 0
            with cursor.copy(f"COPY pushrep_copy ({names}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row([_without_nul(value) for value in row])
                    count += 1
            cursor.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM pushrep_copy ON CONFLICT DO NOTHING")
            cursor.execute("TRUNCATE pushrep_copy")
        return count


class SQLite:
    """By Python's own module."""

    mark = "?"
    names = TypeNames(
        {
            BooleanType: "INTEGER", ByteType: "INTEGER", ShortType: "INTEGER", IntegerType: "INTEGER",
            LongType: "INTEGER", FloatType: "REAL", DoubleType: "REAL", StringType: "TEXT", BinaryType: "BLOB",
            DateType: "TEXT", TimestampType: "TEXT", TimestampNTZType: "TEXT",
        },
        "TEXT",
        "INTEGER",
    )  # fmt: skip

    def __init__(self, path: str) -> None:
        self._path = path

    def connect(self) -> Any:
        return sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT_S)

    def location(self) -> str:
        return f"sqlite:{self._path}"

    def lost(self) -> tuple[type[Exception], ...]:
        return (sqlite3.OperationalError,)

    def insert(self, connection: Any, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
        names, marks = ", ".join(map(quoted, columns)), ", ".join("?" * len(columns))
        taken = [[_plain(value) for value in row] for row in rows]
        connection.executemany(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", taken)
        return len(taken)


def _plain(value: Any) -> Any:
    """What SQLite has no type for, as text."""
    return value if value is None or isinstance(value, int | float | str | bytes) else str(value)


def _without_nul(value: Any) -> Any:
    """PostgreSQL's text can't hold a zero character. Raises BadSqlTable."""
    if isinstance(value, str) and "\0" in value:
        raise BadSqlTable(
            "value", json.dumps(value[:40]), "PostgreSQL's text holds no zero character: cast it to binary"
        )
    return value
