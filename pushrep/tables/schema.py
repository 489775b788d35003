"""The tables of an outbox in the service's own database, for SQLAlchemy's MetaData.

    <name>            id, xid, topic, partition, key, value, headers, timestamp_ms, created   a row an event that waits
    <name>_kept       the same; rows that were relayed, with keep_rows
    <name>_parked     the same, and why each could not be appended
    <name>_relay      a row a topic: how far its one relay is

`id` is drawn when the row is inserted, so of two rows of one transaction the first has the lower one. `xid` is the
transaction that inserted it, by which PostgreSQL tells whether a snapshot shows the row. Only `adopt` ever changes a
row. SQLite has one writer at a time, so there `id` alone is the order of commits.
"""

from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Column, Identity, Index, Integer, LargeBinary, MetaData, Table, Text
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import UserDefinedType

VERSION = 1
"""Of these tables; it stands in each row of `<name>_relay`."""


CURRENT_XID, NO_XID = "pg_current_xact_id()", "0"
NOW_POSTGRESQL = """to_char(statement_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""
NOW_SQLITE = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')"


class Xid8(UserDefinedType[int]):
    """PostgreSQL's number of a transaction that never wraps; 0 in SQLite, which needs none."""

    cache_ok = True

    def get_col_spec(self, **_options: Any) -> str:
        return "xid8"


ischema_names.setdefault("xid8", Xid8)  # as Alembic finds it in a database; else SQLAlchemy warns of each such column


class CurrentXid(FunctionElement[int]):
    """The number of the transaction that inserts."""

    inherit_cache = True


class Now(FunctionElement[str]):
    """The time of the insert, UTC, as ISO 8601 with milliseconds."""

    inherit_cache = True


@compiles(CurrentXid, "postgresql")
def _current_xid(_element: CurrentXid, _compiler: Any, **_options: Any) -> str:
    return CURRENT_XID


@compiles(CurrentXid)
def _no_xid(_element: CurrentXid, _compiler: Any, **_options: Any) -> str:
    return NO_XID


@compiles(Now, "postgresql")
def _now(_element: Now, _compiler: Any, **_options: Any) -> str:
    return NOW_POSTGRESQL


@compiles(Now)
def _now_elsewhere(_element: Now, _compiler: Any, **_options: Any) -> str:
    return f"({NOW_SQLITE})"


class Tables(NamedTuple):
    """The tables of one outbox; see the file's map."""

    rows: Table
    kept: Table | None
    parked: Table
    relay: Table


def tables_in(metadata: MetaData, name: str, *, keep_rows: bool) -> Tables:
    """Put the tables of outbox `name` into `metadata`."""
    number = BigInteger().with_variant(Integer(), "sqlite")  # only INTEGER PRIMARY KEY counts by itself there

    def event(*more: Column[Any]) -> list[Column[Any]]:
        return [
            Column("topic", Text, nullable=False),
            Column("partition", Integer, nullable=False),
            Column("key", LargeBinary),
            Column("value", LargeBinary),
            Column("headers", Text),
            Column("timestamp_ms", BigInteger),
            *more,
        ]

    xid = Xid8().with_variant(Integer(), "sqlite")
    rows = Table(
        name,
        metadata,
        Column("id", number, Identity(always=True, cache=1), primary_key=True),
        Column("xid", xid, nullable=False, server_default=CurrentXid()),
        *event(Column("created", Text, nullable=False, server_default=Now())),
        sqlite_autoincrement=True,
    )

    def aside(suffix: str, *more: Column[Any]) -> Table:
        return Table(
            f"{name}_{suffix}",
            metadata,
            Column("id", number, primary_key=True, autoincrement=False),
            Column("xid", xid, nullable=False),
            *event(Column("created", Text, nullable=False), *more),
        )

    kept = None
    if keep_rows:
        kept = aside("kept", Column("relayed", Text, nullable=False, server_default=Now()))
        Index(f"{name}_kept_order", kept.c.xid, kept.c.id)
    parked = aside("parked", Column("why", Text, nullable=False))
    relay = Table(
        f"{name}_relay",
        metadata,
        Column("topic", Text, primary_key=True),
        Column("version", Integer, nullable=False),
        Column("outbox_id", Text, nullable=False),
        Column("directory_id", Text, nullable=False),
        Column("generation", BigInteger, nullable=False),
        Column("leader_epoch", BigInteger, nullable=False),
        Column("system_id", Text, nullable=False),
        Column("epoch", Integer, nullable=False),
        Column("batch", BigInteger, nullable=False),
        Column("is_open", Integer, nullable=False),
        Column("snapshot", Text),
        Column("previous", Text),
        Column("ends", Text, nullable=False),
        Column("relayed", BigInteger, nullable=False),
    )
    return Tables(rows, kept, parked, relay)
