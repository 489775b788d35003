"""OutboxTable: an event is a row in the service's own transaction.

    with session.begin():
        session.add(order)              the change
        orders.add(session, event)      and what tells of it: both are there, or neither

Everything that could be refused is refused in `add`, where the service can still roll back: the partition, the bytes,
their size. What the relay reads later needs no code of the service. `add` takes SQLAlchemy's Session and Connection,
their async kinds through `add_async`, and the connections of psycopg and of sqlite3.
"""

import base64
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from sqlalchemy import Connection, MetaData, insert, select
from sqlalchemy import event as events
from sqlalchemy.orm import Session, scoped_session

from filtering import METADATA_HEADER
from pushrep.env.checked_json import parse_json
from pushrep.errors import BadArgument
from pushrep.outbox.columns import RecordRules
from pushrep.outbox.errors import RecordRefused
from pushrep.outbox.identity import PARTITIONS_MAX
from pushrep.outbox.settings import DEFAULT_CONFIG
from pushrep.settings import whole_number
from pushrep.tables.decide import EVENT_ID
from pushrep.tables.errors import NotInTransaction
from pushrep.tables.schema import Tables, tables_in
from pushrep.topic_id_partition import check_topic
from pushrep.values import NotWarm, Partitioner, Serializer, to_json

Headers = Sequence[tuple[str, bytes | None]]
Event = TypeVar("Event")

CREATED = "created"
"""The header that says when the row was inserted."""
_OWN_HEADERS = {EVENT_ID, CREATED, METADATA_HEADER}
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_RESERVED_BYTES = 200
"""What the relay's own headers take, above."""
_LOG = logging.getLogger("pushrep.tables")


class PendingRow(NamedTuple):
    """An event that no relay has taken yet, as its record will be."""

    id: int
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None


class OutboxTable:
    """The tables of an outbox in `metadata`, the service's own, so that create_all and Alembic make and keep them.

    name: of the table of rows; the others have it as a prefix. Lower-case letters, digits and underscores.
    keep_rows: a row that was relayed goes to the table `<name>_kept` instead of being deleted; cleaning it is yours.
    """

    def __init__(self, metadata: MetaData, name: str = "pushrep_outbox", *, keep_rows: bool = False) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadArgument("name", f"{name!r} is no name of 1 to 40 lower-case letters, digits and underscores")
        self.name, self.keep_rows = name, keep_rows
        self.tables: Tables = tables_in(metadata, name, keep_rows=keep_rows)
        self._waking = threading.Lock()
        self._wake: dict[str, list[Callable[[], None]]] = {}

    def topic(  # noqa: PLR0913 - what an event becomes
        self,
        name: str,
        event_type: type[Event],
        *,
        partitions: int,
        key: Callable[[Event], bytes | str | None] | None = None,
        partition: Callable[[Event], int] | None = None,
        serializer: Callable[[Event], bytes | None] = to_json,
        kafka_topic: str | None = None,
    ) -> "TableTopic[Event]":
        """The events of one topic.

        name: of the topic, and of the outbox's logs. event_type: what `add` takes; any other type is refused.
        partitions: of the outbox that the relay writes to. key: an event's key; events of one key are in order, in the
        partition that Kafka's own partitioner gives the key. partition: an event's partition, instead. Without either,
        rows go to the partitions in turn. serializer: an event's value; one of confluent-kafka's that asks a registry
        is warmed by `warm`. kafka_topic: what such a one is told, if the relay's outbox ships to another topic.
        """
        made = (
            Serializer("serializer", serializer, kafka_topic or name, "value") if callable(serializer) else serializer
        )
        return TableTopic(self, name, event_type, partitions, key, partition, made)

    def when_committed(self, topic: str, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a Session of this process committed a row of the topic. It must not wait."""
        with self._waking:
            self._wake.setdefault(topic, []).append(wake)

    def stop_waking(self, topic: str, wake: Callable[[], None]) -> None:
        """The reverse of `when_committed`."""
        with self._waking:
            self._wake[topic].remove(wake)

    def is_woken(self, topic: str) -> bool:
        """Whether a relay of the topic runs in this process."""
        with self._waking:
            return bool(self._wake.get(topic))

    def wake(self, topic: str) -> None:
        """Wake the relays of the topic that run in this process: a row of it was committed."""
        with self._waking:
            every = list(self._wake.get(topic, ()))
        for one in every:
            one()

    def wake_after_commit(self, topic: str, session: Session) -> None:
        """Wake the relays of the topic that run in this process when the session commits: once, whatever it adds."""
        key = (self, topic)
        if key in session.info or not self.is_woken(topic):
            return

        def wake(committed: Session) -> None:
            del committed.info[key]
            self.wake(topic)

        session.info[key] = wake
        events.listen(session, "after_commit", wake, once=True)


class TableTopic(Generic[Event]):
    """Made by `OutboxTable.topic`. Thread-safe."""

    def __init__(  # noqa: PLR0913, PLR0917 - what an event becomes
        self,
        outbox: OutboxTable,
        name: str,
        event_type: type[Event],
        partitions: int,
        key: Callable[[Event], bytes | str | None] | None,
        partition: Callable[[Event], int] | None,
        serializer: Serializer,
    ) -> None:
        check_topic("name", name)
        if not isinstance(event_type, type):
            raise BadArgument("event_type", f"give the class of the topic's events, not {event_type!r}")
        for argument, given in (("key", key), ("partition", partition), ("serializer", serializer)):
            if not callable(given) and (given is not None or argument == "serializer"):
                raise BadArgument(argument, f"give a function of an event, not {given!r}")
        whole_number("partitions", partitions, 1, PARTITIONS_MAX)
        self.name, self.partitions, self.outbox = name, partitions, outbox
        self._type, self._key, self._serializer = event_type, key, serializer
        self._partition_of = Partitioner(partitions, partition or "key")
        self._rules = RecordRules("header", DEFAULT_CONFIG.record_bytes_max - _RESERVED_BYTES)

    def warm(self) -> None:
        """Ask the registry for the schema of the serializer, if it has one: when the service starts, in no event loop
        and no transaction. Raises what the serializer raises; then call it again.
        """
        self._serializer.warm()

    def add(
        self,
        session: Any,
        event: Event,
        *,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """Insert the event's row in the transaction of `session`; its commit is the event's.

        session: SQLAlchemy's Session or Connection, psycopg's or sqlite3's connection, in a transaction. A Session is
        flushed first, so that a row that was changed is locked before the event's id is drawn: events of a row that
        each transaction changes, or locks, before its `add` are then in the order of their commits.
        timestamp_ms: the record's time; by default that of its append by the relay.
        Raises `NotInTransaction`, `RecordRefused` for what no outbox takes, TypeError for another type of event,
        `NotWarm`, and what the serializer and the database raise.
        """
        row = self._row(event, headers, timestamp_ms)
        if isinstance(session, scoped_session):
            session = session()
        if isinstance(session, Session):
            session.flush()
            rows = self.outbox.tables.rows
            _refuse_autocommit(session.connection(bind_arguments={"clause": rows}))
            session.execute(insert(rows).inline(), row)  # without RETURNING, which takes the right to read
            self.outbox.wake_after_commit(self.name, session)
        elif isinstance(session, Connection):
            _refuse_autocommit(session)
            session.execute(insert(self.outbox.tables.rows).inline(), row)
        elif is_async(session):
            raise TypeError(f"{type(session).__name__} is asynchronous: await add_async(...)")
        else:
            mark = _mark_of(session)
            _refuse_autocommit_of(session)
            session.execute(self._statement(mark), tuple(row.values()))

    async def add_async(
        self,
        session: Any,
        event: Event,
        *,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """As `add`, for SQLAlchemy's AsyncSession and AsyncConnection, and psycopg's AsyncConnection."""
        if not is_async(session):
            raise TypeError(f"{type(session).__name__} is not asynchronous: add(...)")
        if (run_sync := getattr(session, "run_sync", None)) is not None:

            def add(inner: Any) -> None:
                self.add(inner, event, headers=headers, timestamp_ms=timestamp_ms)

            await run_sync(add)
            return
        row = self._row(event, headers, timestamp_ms)
        mark = _mark_of(session)
        _refuse_autocommit_of(session)
        await session.execute(self._statement(mark), tuple(row.values()))

    def insertion(
        self, event: Event, headers: Iterable[tuple[str, bytes | None]], timestamp_ms: int | None, *, mark: str
    ) -> tuple[str, tuple[Any, ...]]:
        """The INSERT of an event and its values, for whoever has a connection of his own. mark: of a value."""
        return self._statement(mark), tuple(self._row(event, headers, timestamp_ms).values())

    def pending(self, session: Any) -> list[PendingRow]:
        """The topic's rows that the transaction of `session` sees, by id: for tests that roll back.

        session: SQLAlchemy's Session or Connection; of an AsyncSession `await session.run_sync(topic.pending)`.
        """
        if is_async(session):
            raise TypeError(f"{type(session).__name__} is asynchronous: await session.run_sync(topic.pending)")
        rows = self.outbox.tables.rows
        if isinstance(session, Session):
            session.flush()
        wanted = (rows.c.id, rows.c.partition, rows.c.key, rows.c.value, rows.c.headers, rows.c.timestamp_ms)
        found = session.execute(select(*wanted).where(rows.c.topic == self.name).order_by(rows.c.id))
        return [
            PendingRow(one.id, one.partition, one.key, one.value, headers_of(one.headers), one.timestamp_ms)
            for one in found
        ]

    def _row(
        self, event: Event, headers: Iterable[tuple[str, bytes | None]], timestamp_ms: int | None
    ) -> dict[str, Any]:
        if not isinstance(event, self._type):
            raise TypeError(f"events of topic {self.name} are {self._type.__name__}, not {type(event).__name__}")
        if not self._serializer.is_warm:
            raise NotWarm(self.name)
        key = None if self._key is None else self._key(event)
        if isinstance(key, str):
            key = key.encode()
        elif key is not None and not isinstance(key, bytes):
            raise RecordRefused(
                "key", f"give text, bytes or None, not {type(key).__name__}: key=lambda event: str(...)"
            )
        value, listed = self._serializer(event), tuple(headers) if isinstance(headers, Iterator) else headers
        checked = self._rules.one(value, key, listed, timestamp_ms, None)
        if own := _OWN_HEADERS.intersection(name for name, _ in listed):
            raise BadArgument("headers", f"{own.pop()} is written by the relay: name yours otherwise")
        return {
            "topic": self.name,
            "partition": self._partition_of(event, key),
            "key": key,
            "value": value,
            "headers": headers_text(checked.headers[0] if checked.headers else ()),  # type: ignore[arg-type] # no columns
            "timestamp_ms": timestamp_ms,
        }

    def _statement(self, mark: str) -> str:
        names = "topic, partition, key, value, headers, timestamp_ms"
        marked = ", ".join([mark] * 6)
        return f"INSERT INTO {self.outbox.name} ({names}) VALUES ({marked})"  # noqa: S608 - a checked name


def _mark_of(connection: Any) -> str:
    """The mark of a value in a statement for a connection that is not SQLAlchemy's."""
    marks = {"sqlite3": "?", "psycopg": "%s"}
    module = type(connection).__module__.partition(".")[0]
    if module not in marks:
        raise TypeError(f"give SQLAlchemy's, psycopg's or sqlite3's connection, not {type(connection).__name__}")
    return marks[module]


def is_async(session: Any) -> bool:
    """Whether it is one of SQLAlchemy's asynchronous kinds, or psycopg's."""
    return hasattr(session, "run_sync") or type(session).__name__ == "AsyncConnection"


def headers_text(headers: Headers) -> str | None:
    """Headers as the column holds them: JSON, [[name, text | null | {"base64": ...}], ...]; None for none."""
    if not headers:
        return None
    listed: list[list[Any]] = []
    for name, value in headers:
        try:
            text: Any = None if value is None else value.decode()
        except UnicodeDecodeError:
            text = {"base64": base64.b64encode(value or b"").decode()}
        listed.append([name, text])
    return json.dumps(listed, ensure_ascii=False)


def headers_of(text: str | None) -> list[tuple[str, bytes | None]]:
    """The reverse. Raises ValueError for anything else."""
    if text is None:
        return []
    try:
        listed = parse_json(text)
        return [(_text(name), _header_value(value)) for name, value in listed]
    except (ValueError, TypeError, KeyError) as error:  # also base64's
        raise ValueError(f"headers are no JSON of [[name, value], ...]: {error}") from None


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name")
    return name


def _header_value(value: Any) -> bytes | None:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"], validate=True)
    return None if value is None else _text(value).encode()


def _refuse_autocommit(connection: Connection) -> None:
    """Raise NotInTransaction for a Connection that commits each statement."""
    fairy = connection.connection
    _refuse_autocommit_of(fairy.driver_connection, fairy.dbapi_connection)


def _refuse_autocommit_of(driver: Any, adapter: Any = None) -> None:
    """The same for a driver's own connection. adapter: what SQLAlchemy put around an asynchronous one.

    psycopg's says whether it is in a transaction, also one that a statement began. sqlite3's begins one at an INSERT,
    unless it was told not to. Any other driver begins one, unless its adapter commits each statement.
    """
    status = getattr(getattr(driver, "info", None), "transaction_status", None)
    if status is not None:
        is_refused = bool(driver.autocommit) and int(status) == 0
    elif (in_transaction := getattr(driver, "in_transaction", None)) is not None:
        mode = getattr(driver, "autocommit", -1)  # since Python 3.12; -1: isolation_level decides
        is_refused = not in_transaction and (mode is True or (mode == -1 and driver.isolation_level is None))
    else:
        is_refused = getattr(adapter, "autocommit", False) is True
    if is_refused:
        raise NotInTransaction
