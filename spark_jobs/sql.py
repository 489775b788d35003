"""SqlTable: a handler for ReplayFilteredBatches and its marks store, so that rows and marks are one transaction.

    handler(rows, N)   tasks ─▶ <table>_staging, keyed (attempt, topic, partition, offset): a task may run twice
    write(marks N)     one transaction: marks row (query, N) │ staging ─▶ <table> │ staging emptied
                       a second driver finds the marks row there, and none of its rows gets in

    <table>         the rows' columns, pushrep_query, pushrep_batch       key (query, batch, topic, partition, offset)
    <table>_marks   seq, query_id, batch_id, marks                        key (query, batch)

After a kill at any moment the table holds exactly the batches whose marks are there. The next batch that is committed
removes the rows that an attempt left in staging.

A URL is `postgresql://...` (libpq's, so a password may stay in PGPASSWORD or ~/.pgpass of the driver and the workers)
or `sqlite:<path>`, which only a Spark on this one machine can use. Each of the two has a class for what
differs; everything else is SQL that both understand.
"""

import json
import logging
import sqlite3
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
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
    StructType,
    TimestampNTZType,
    TimestampType,
)

from filtering.retry import Backoff, RetryPolicy
from filtering.stream_metadata import OFFSET_MAX
from spark_jobs.batch_marks import BatchMarks, LogRange, MarksFenced, parsed_marks
from spark_jobs.sinks.idempotent_sink import NOT_TOLD, BadSink
from spark_jobs.spark_internals import map_in_arrow

_KEY = ("topic", "partition", "offset")
_QUERY, _BATCH, _ATTEMPT = "pushrep_query", "pushrep_batch", "pushrep_attempt"
_WITHIN = '"topic" = ? AND "partition" = ? AND "offset" >= ? AND "offset" < ?'
_ATTEMPTS, _BACKOFF = 5, Backoff(first_s=0.2, longest_s=2.0)

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
_LOCK_TIMEOUT_S = 30


class TypeNames(NamedTuple):
    """What Spark's types are called, but for decimals."""

    types: dict[type[DataType], str]
    decimal: str
    identity: str
    """The column that counts rows up."""


class PostgreSQL:
    """By psycopg. `mark` is the placeholder of a value in a statement."""

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
        """A connection that begins a transaction with its first statement."""
        import psycopg  # noqa: PLC0415 - pip install pushrep[sql]

        return psycopg.connect(self._url)

    def location(self) -> str:
        """The database without secrets, for messages."""
        from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415

        settings = conninfo_to_dict(self._url)
        return f"postgresql://{settings.get('host', '')}/{settings.get('dbname', '')}"

    def lost(self) -> tuple[type[Exception], ...]:
        """Errors after which the same transaction may be tried again, on a new connection."""
        import psycopg  # noqa: PLC0415

        return (psycopg.OperationalError, psycopg.errors.SerializationFailure)

    def insert(self, connection: Any, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add the rows that are not there yet by the table's key.

        By COPY into a table of this transaction, since COPY itself can't skip conflicts, and from there.
        """
        names = ", ".join(map(quoted, columns))
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS pushrep_copy (LIKE {table}) ON COMMIT DROP")
            with cursor.copy(f"COPY pushrep_copy ({names}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row([_without_nul(value) for value in row])
            cursor.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM pushrep_copy ON CONFLICT DO NOTHING")
            cursor.execute("TRUNCATE pushrep_copy")


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

    def insert(self, connection: Any, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        names, marks = ", ".join(map(quoted, columns)), ", ".join("?" * len(columns))
        taken = ([_plain(value) for value in row] for row in rows)
        connection.executemany(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", taken)


Dialect: TypeAlias = PostgreSQL | SQLite


def dialect_of(url: str) -> Dialect:
    """By the URL's scheme. Raises BadSink."""
    if url.startswith(("postgresql://", "postgres://")):
        return PostgreSQL(url)
    if url.startswith("sqlite:"):
        return SQLite(url.removeprefix("sqlite:"))
    scheme = url.partition(":")[0]
    raise BadSink("url", scheme, "give postgresql://HOST/DATABASE or sqlite:PATH")


def column_type(dialect: Dialect, name: str, kind: DataType) -> str:
    """What a column is declared as. Raises BadSink."""
    names = dialect.names
    if isinstance(kind, DecimalType):
        return names.decimal.format(kind.precision, kind.scale)
    found = names.types.get(type(kind))
    if found is None:
        why = f"{kind.simpleString()} has no column type: cast it, to_json makes text of what is nested"
        raise BadSink("column", name, why)
    return found


def quoted(name: str) -> str:
    """An identifier, in quotes. Raises BadSink for one in which a placeholder of a value could be seen."""
    if not name or set(name) & {"?", "%", "\0"}:
        raise BadSink("name", name, "a table or column has a name without ? and %: give it another")
    return '"' + name.replace('"', '""') + '"'


def _plain(value: Any) -> Any:
    """What SQLite has no type for, as text."""
    return value if value is None or isinstance(value, int | float | str | bytes) else str(value)


def _without_nul(value: Any) -> Any:
    """PostgreSQL's text can't hold a zero character. Raises BadSink."""
    if isinstance(value, str) and "\0" in value:
        raise BadSink("value", json.dumps(value[:40]), "PostgreSQL's text holds no zero character: cast it to binary")
    return value


class _Staged(NamedTuple):
    query_id: str
    batch_id: int
    attempt: str
    columns: tuple[str, ...]
    replaced: tuple[LogRange, ...] = ()


class SqlTable:
    """`table = SqlTable(url, "orders"); ReplayFilteredBatches(table, marks=table)`.

    table: made at the first batch if there is none; `SCHEMA.TABLE` works where there are schemas. The rows need the
    columns topic, partition and offset, by which records that are read again replace them (replacing.py). adopt: as for
    ReplayFilteredBatches; batches of that query after the adopted one are removed.
    Raises BadSink, MarksFenced, and the database's own errors.
    """

    commits_marks = True

    def __init__(self, url: str, table: str, *, adopt: tuple[str, int] | None = None) -> None:
        if not table or any(not part for part in table.split(".")):
            raise BadSink("table", table, "name a table")
        self._dialect: Dialect = dialect_of(url)
        self._adopt = adopt
        self._table, self._staging, self._marks = (_qualified(table, end) for end in ("", "_staging", "_marks"))
        self.location = f"{self._dialect.location()} table {table}"
        self._expected: tuple[str, int] | None = None
        self._staged: _Staged | None = None
        self._has_marks_table = False
        self._has_tables_of: tuple[str, ...] = ()

    def expect(self, query_id: str, batch_id: int, ranges: tuple[LogRange, ...]) -> None:  # noqa: ARG002 - a sink's
        """The batch that comes next, as ReplayFilteredBatches tells handler and store: its query and its number."""
        self._expected = query_id, batch_id

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Write the batch's rows into the staging table; `write` of its marks moves them into the table."""
        self._staged = None
        self.check_columns(rows.schema)
        columns = tuple(rows.columns)
        if self._has_tables_of != columns:
            self._transaction(lambda connection: self._make_tables(connection, rows.schema))
            self._has_tables_of = columns
        query_id, attempt = self._query_of(batch_id), uuid.uuid4().hex
        dialect, staging = self._dialect, self._staging

        def stage(batches: Iterator[Any]) -> Iterator[Any]:
            yield from stage_rows(dialect, staging, (query_id, batch_id, attempt), batches)

        map_in_arrow(rows, stage, "rows bigint").agg(F.sum("rows")).collect()
        self._staged = _Staged(query_id, batch_id, attempt, columns)

    def replace(self, rows: DataFrame, batch_id: int, ranges: Sequence[LogRange]) -> None:
        """As the handler itself; rows that other batches have in these log ranges go in the same transaction."""
        self(rows, batch_id)
        assert self._staged is not None
        self._staged = self._staged._replace(replaced=tuple(ranges))

    def held_until(self, session: SparkSession, where: LogRange, batch_id: int) -> int:  # noqa: ARG002 - a table's
        """The log offset behind a partition's last row of other batches; 0 without any."""
        found = self._others("max({})", where._replace(start=0, end=OFFSET_MAX), batch_id)
        return 0 if not found or found[0][0] is None else int(found[0][0]) + 1

    def held(self, session: SparkSession, where: LogRange, batch_id: int) -> DataFrame:
        """The column `offset` of such rows in a log range; they come through the driver."""
        found = self._others("{}", where, batch_id)
        return session.createDataFrame([(int(row[0]),) for row in found], "`offset` bigint")

    def offsets_from(self, topic: str, starts: Mapping[int, int]) -> "dict[int, array[int]]":
        """The offsets of the rows in each partition from its start on, ascending."""
        select = f'SELECT "offset" FROM {self._table} WHERE {_WITHIN} ORDER BY "offset"'
        where = ((one, (topic, one, start, OFFSET_MAX)) for one, start in starts.items())
        return {one: array("q", (int(row[0]) for row in self._select(self._table, select, *of))) for one, of in where}

    def check_columns(self, columns: StructType) -> None:
        """Raise BadSink if rows of these columns can't be kept."""
        for name in _KEY:
            if name not in columns.names:
                raise BadSink("column", name, "the rows need topic, partition and offset, their key")
        for field in columns.fields:
            quoted(field.name)
            if field.name in {_QUERY, _BATCH, _ATTEMPT}:
                raise BadSink("column", field.name, "the table has a column of this name: rename the rows' own")
            column_type(self._dialect, field.name, field.dataType)

    def check(self, session: SparkSession, columns: StructType, query_id: str | None) -> None:  # noqa: ARG002 - a sink's
        """Raise what the first batch would: the columns, and whether the database answers."""
        self.check_columns(columns)
        self.owner()

    def owner(self) -> str | None:
        """The query that wrote last; None while the store is empty."""
        found = self._select(self._marks, f"SELECT query_id FROM {self._marks} ORDER BY seq DESC LIMIT 1")
        return found[0][0] if found else None

    def batches(self, query_id: str) -> list[int]:
        """The batches kept of this query, ascending."""
        found = self._select(
            self._marks, f"SELECT batch_id FROM {self._marks} WHERE query_id = ? ORDER BY batch_id", query_id
        )
        return [int(row[0]) for row in found]

    def read(self, query_id: str, batch_id: int) -> BatchMarks | None:
        """The marks of a batch, None if there are none. Raises MarksStoreDamaged."""
        where = "WHERE query_id = ? AND batch_id = ?"
        found = self._select(self._marks, f"SELECT marks FROM {self._marks} {where}", query_id, batch_id)
        return parsed_marks(bytes(found[0][0]), self.location, (query_id, batch_id)) if found else None

    def write(self, marks: BatchMarks, *, keep: int) -> None:
        """Commit the marks and the rows that were staged for them. Raises MarksFenced, BadSink."""
        staged = self._staged
        if not marks.is_adopted and (
            staged is None or (staged.query_id, staged.batch_id) != (marks.query_id, marks.batch_id)
        ):
            why = "marks came without rows: give ReplayFilteredBatches the table as handler and as marks"
            raise BadSink("batch", marks.batch_id, why)
        self._ready()
        self._transaction(lambda connection: self._commit(connection, marks, staged, keep))
        self._staged = None

    def drop_from(self, query_id: str, batch_id: int) -> None:
        """Forget this query's batches >= batch_id, marks and rows together."""
        self._ready()

        def drop(connection: Any) -> None:
            self._execute(
                connection, f"DELETE FROM {self._marks} WHERE query_id = ? AND batch_id >= ?", query_id, batch_id
            )
            self._drop_rows(connection, query_id, batch_id)

        self._transaction(drop)

    def _query_of(self, batch_id: int) -> str:
        if self._expected is None or self._expected[1] != batch_id:
            raise BadSink("batch_id", str(batch_id), NOT_TOLD)
        return self._expected[0]

    def _others(self, what: str, where: LogRange, batch_id: int) -> list[tuple[Any, ...]]:
        """`what` of the offsets of rows in a log range, without those that this very batch wrote."""
        offset = what.format(quoted("offset"))
        select = f"SELECT {offset} FROM {self._table} WHERE {_WITHIN} AND NOT ({_QUERY} = ? AND {_BATCH} = ?)"
        return self._select(self._table, select, *where[:4], self._query_of(batch_id), batch_id)

    def _commit(self, connection: Any, marks: BatchMarks, staged: _Staged | None, keep: int) -> None:
        query_id, batch_id, data = marks.query_id, marks.batch_id, marks.to_bytes()
        where = "WHERE query_id = ? AND batch_id = ?"
        insert = f"INSERT INTO {self._marks} (query_id, batch_id, marks) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        if self._execute(connection, insert, query_id, batch_id, data).rowcount == 0:
            select = f"SELECT marks FROM {self._marks} {where}"
            [(known,)] = self._execute(connection, select, query_id, batch_id).fetchall()
            if bytes(known) != data:
                raise MarksFenced(self.location, query_id, batch_id)
            return  # the commit before this one had succeeded, and its answer was lost
        if marks.is_adopted and self._adopt is not None:
            self._drop_rows(connection, self._adopt[0], marks.first)
        if staged is not None and not marks.is_adopted:
            for one in staged.replaced:
                rows = self._execute(connection, f"DELETE FROM {self._table} WHERE {_WITHIN}", *one[:4]).rowcount
                _LOG.info("batch %d replaces %d rows of %s", batch_id, rows, one)
        if staged is not None and staged.columns and not marks.is_adopted:
            names = ", ".join(map(quoted, (*staged.columns, _QUERY, _BATCH)))
            self._execute(
                connection,
                f"INSERT INTO {self._table} ({names}) SELECT {names} FROM {self._staging} "
                f"WHERE {_QUERY} = ? AND {_ATTEMPT} = ?",
                query_id, staged.attempt,
            )  # fmt: skip
            self._execute(
                connection, f"DELETE FROM {self._staging} WHERE {_QUERY} = ? AND {_BATCH} <= ?", query_id, batch_id
            )
        for query, batch in self._execute(connection, f"SELECT query_id, batch_id FROM {self._marks}").fetchall():
            if marks.drops(query, batch, keep):
                self._execute(connection, f"DELETE FROM {self._marks} {where}", query, batch)

    def _drop_rows(self, connection: Any, query_id: str, batch_id: int) -> None:
        if self._exists(connection, self._table):
            where = f"WHERE {_QUERY} = ? AND {_BATCH} >= ?"
            self._execute(connection, f"DELETE FROM {self._table} {where}", query_id, batch_id)

    def _make_tables(self, connection: Any, columns: StructType) -> None:
        declared = [
            f"{quoted(f.name)} {column_type(self._dialect, f.name, f.dataType)}{' NOT NULL' if f.name in _KEY else ''}"
            for f in columns.fields
        ]
        declared += [f"{_QUERY} text NOT NULL", f"{_BATCH} bigint NOT NULL"]
        key = ", ".join(map(quoted, _KEY))
        for table, more, first in (
            (self._table, [], f"{_QUERY}, {_BATCH}"),
            (self._staging, [f"{_ATTEMPT} text NOT NULL"], _ATTEMPT),
        ):
            definition = ", ".join([*declared, *more, f"PRIMARY KEY ({first}, {key})"])
            connection.cursor().execute(f"CREATE TABLE IF NOT EXISTS {table} ({definition})")

    def _ready(self) -> None:
        if not self._has_marks_table:
            blob = "bytea" if self._dialect.mark == "%s" else "BLOB"
            definition = (
                f"seq {self._dialect.names.identity} PRIMARY KEY, query_id text NOT NULL, batch_id bigint NOT NULL, "
                f"marks {blob} NOT NULL, UNIQUE (query_id, batch_id)"
            )
            make = f"CREATE TABLE IF NOT EXISTS {self._marks} ({definition})"
            self._transaction(lambda connection: connection.cursor().execute(make))
            self._has_marks_table = True

    def _select(self, table: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows that a statement selects from this table; none while there is no such table."""

        def look(connection: Any) -> list[tuple[Any, ...]]:
            return self._execute(connection, statement, *values).fetchall() if self._exists(connection, table) else []

        return self._transaction(look)

    def _exists(self, connection: Any, table: str) -> bool:
        if self._dialect.mark == "%s":
            return self._execute(connection, "SELECT to_regclass(?)", table).fetchone()[0] is not None
        name = table.rsplit(".", 1)[-1][1:-1].replace('""', '"')
        # SQLite itself takes Orders and orders for one table.
        find = "SELECT 1 FROM sqlite_master WHERE name = ? COLLATE NOCASE"
        return self._execute(connection, find, name).fetchone() is not None

    def _transaction(self, work: Callable[[Any], T]) -> T:
        """Run `work` in one transaction; again after a lost connection or a conflict, since each is safe to repeat."""
        lost = self._dialect.lost()

        def attempt() -> T:
            with closing(self._dialect.connect()) as connection:
                result = work(connection)
                connection.commit()
                return result

        policy = RetryPolicy(is_retriable=lambda error: isinstance(error, lost), backoff=_BACKOFF, attempts=_ATTEMPTS)
        return policy.call(attempt)

    def _execute(self, connection: Any, statement: str, *values: Any) -> Any:
        """The cursor, which has run the statement; a value is a `?` in it."""
        cursor = connection.cursor()
        cursor.execute(statement.replace("?", self._dialect.mark), values)
        return cursor


def _qualified(table: str, end: str) -> str:
    *schemas, name = table.split(".")
    return ".".join(map(quoted, [*schemas, name + end]))


def stage_rows(dialect: Dialect, staging: str, of: tuple[str, int, str], batches: Iterator[Any]) -> Iterator[Any]:
    """A task's rows, in one transaction: a task that dies leaves none, one that runs twice changes nothing."""
    import pyarrow as pa  # noqa: PLC0415 - on a worker, where pyspark brings it

    count = 0
    with ExitStack() as resources:
        connection = None
        for batch in batches:
            connection = connection or resources.enter_context(closing(dialect.connect()))
            columns = [*batch.schema.names, _QUERY, _BATCH, _ATTEMPT]
            values = [column.to_pylist() for column in batch.columns]
            count += len(batch)
            dialect.insert(connection, staging, columns, ((*row, *of) for row in zip(*values, strict=True)))
        if connection is not None:
            connection.commit()
    yield pa.RecordBatch.from_pydict({"rows": pa.array([count], pa.int64())})
