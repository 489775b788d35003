"""What the relay does in the database, each a transaction of its own, on the condition that its state is still there.

    begin_batch    state row: batch n + 1, its snapshot          committed before any of its rows is read
    page           rows that this snapshot shows, and the one before did not, by id
    close_batch    those rows deleted, state row: closed

A snapshot is PostgreSQL's own (pg_current_snapshot): it says of each transaction whether it was committed. A
transaction that was open for long is not waited for, since a later snapshot shows its rows. In SQLite, where writers
take turns, it is the highest id. `synchronous_commit` is at least `on` in what the relay commits: the commit of batch
n + 1 flushes every commit that its snapshot shows, so no row that was read can vanish in a crash. No lock is held
between two transactions, and none by a session, so a pooler may stand between.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import accumulate
from typing import Any, NamedTuple

from sqlalchemy import (
    ClauseElement,
    ColumnElement,
    Connection,
    Engine,
    MetaData,
    Text,
    and_,
    case,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    literal,
    literal_column,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from pushrep.env.checked_json import parse_json
from pushrep.errors import BadArgument
from pushrep.outbox.status import OldestSnapshot, TableRows
from pushrep.tables.decide import BatchState
from pushrep.tables.errors import AnotherRelay, DatabaseFailed, StateChanged, TablesDiffer, UnfitDatabase
from pushrep.tables.schema import VERSION, tables_in

_POSTGRESQL_MIN = 14
_BUSY_S = 30.0
LOCKED_ROWS = 10_000
"""Of a batch in SQLite, which no service writes to while they are deleted."""
SQLITE = "sqlite"
_WRITES = "pushrep_writes"  # an execution option: this transaction will


@dataclass(frozen=True, slots=True)
class Holder:
    """Who relays: an outbox, and the directory (without replicas) or grant by which it leads."""

    outbox_id: str
    directory_id: str
    generation: int
    leader_epoch: int

    def may_follow(self, other: "Holder") -> bool:
        """Whether it is a newer grant of the same outbox, or the first one."""
        mine, theirs = (self.generation, self.leader_epoch), (other.generation, other.leader_epoch)
        return self.outbox_id == other.outbox_id and mine > theirs


@dataclass(frozen=True, slots=True)
class RelayState:
    """The state row of a topic."""

    holder: Holder
    system_id: str
    batch: BatchState
    snapshot: str | None
    previous: str | None
    relayed: int


class Page(NamedTuple):
    """Rows that wait, by id: a column each. size_bytes: about what their records take."""

    id: Sequence[int] = ()
    partition: Sequence[int] = ()
    key: Sequence[bytes | None] = ()
    value: Sequence[bytes | None] = ()
    headers: Sequence[str | None] = ()
    timestamp_ms: Sequence[int | None] = ()
    created: Sequence[str] = ()
    size_bytes: Sequence[int] = ()

    def rows(self, at: Sequence[int]) -> "Page":
        """Some of them, by their places."""
        return Page(*([column[n] for n in at] for column in self))  # type: ignore[arg-type] # each of its own type


class RelayDatabase:
    """The database behind `dsn`; it connects when it is asked. Raises BadArgument."""

    def __init__(self, dsn: str, table: str, topic: str) -> None:
        self._topic, self._name = topic, table
        self._engine = _engine_of(dsn)
        self.is_sqlite = self._engine.dialect.name == SQLITE
        # A statement alone is its own transaction, in one exchange with the server instead of three.
        self._at_once = self._engine if self.is_sqlite else self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._tables = tables_in(MetaData(), table, keep_rows=True)
        self._keeps, self._system_id = False, SQLITE

    def close(self) -> None:
        """Close its connections."""
        self._engine.dispose()

    def check(self) -> str:
        """Whether a relay can work here; returns the id of the database: its system's and its own. Raises
        UnfitDatabase, TablesDiffer.
        """
        with self._engine.connect() as connection:
            self._system_id = SQLITE if self.is_sqlite else _fit_postgresql(connection)
            names = set(inspect(connection).get_table_names())
            for one in (self._tables.rows, self._tables.parked, self._tables.relay):
                if one.name not in names:
                    raise TablesDiffer(
                        f"there is no table {one.name}: create what OutboxTable put into the service's MetaData, by "
                        "create_all or a migration"
                    )
            self._keeps = f"{self._name}_kept" in names
        return self._system_id

    def state(self) -> RelayState | None:
        """None before the topic's first relay. Raises TablesDiffer for a row of another version."""
        relay = self._tables.relay
        with self._engine.connect() as connection:
            found = connection.execute(select(relay).where(relay.c.topic == self._topic)).one_or_none()
        if found is None:
            return None
        if found.version != VERSION:
            raise TablesDiffer(f"{relay.name} holds version {found.version} of the state, this pushrep reads {VERSION}")
        return RelayState(
            _holder_of(found),
            found.system_id,
            BatchState(found.epoch, found.batch, bool(found.is_open), _ends_of(found.ends)),
            found.snapshot,
            found.previous,
            found.relayed,
        )

    def create(self, state: RelayState) -> None:
        """Write the topic's first state row. Raises AnotherRelay if there is one by now."""
        relay = self._tables.relay
        with self._writing() as connection:
            taken = connection.execute(select(relay.c.outbox_id).where(relay.c.topic == self._topic)).scalar()
            if taken is not None:
                raise AnotherRelay(self._topic, taken, "since a moment ago")
            connection.execute(insert(relay), {"topic": self._topic, "version": VERSION, **_columns(state)})

    def change(self, state: RelayState, new: RelayState) -> None:
        """Replace the state row. Raises AnotherRelay if it is not `state` any more."""
        with self._writing() as connection:
            self._change(connection, state, new)

    def begin_batch(self, state: RelayState) -> tuple[RelayState, int] | None:
        """Commit the next batch, with a snapshot of now; None if no row waits. Returns also an id that all of its rows
        lie behind. Raises AnotherRelay.
        """
        batch = state.batch._replace(batch=state.batch.batch + 1, is_open=True)
        new = replace(state, batch=batch, previous=state.snapshot)
        return self._begin_by_id(state, new) if self.is_sqlite else self._begin_by_snapshot(state, new)

    def _begin_by_id(self, state: RelayState, new: RelayState) -> tuple[RelayState, int] | None:
        """SQLite writes one transaction after another, so no row comes later with an id below one that is there."""
        rows = self._tables.rows
        some = select(rows.c.id).where(rows.c.topic == self._topic).order_by(rows.c.id).limit(LOCKED_ROWS)
        with self._engine.connect() as connection:
            newest = connection.execute(select(func.max(some.subquery().c.id))).scalar()
        if newest is None:
            return None
        new = replace(new, snapshot=str(newest))
        self.change(state, new)
        return new, int(state.snapshot or 0)

    def _begin_by_snapshot(self, state: RelayState, new: RelayState) -> tuple[RelayState, int] | None:
        """By one statement, which writes only if a row waits."""
        rows, relay = self._tables.rows, self._tables.relay
        # By the index of ids, whose dead entries are marked: `exists` would look at each row that was deleted and not
        # vacuumed yet.
        lowest = select(rows.c.id).where(rows.c.topic == self._topic).order_by(rows.c.id).limit(1)
        waiting = select(lowest.cte("waiting").c.id).scalar_subquery()
        is_mine = literal(self._system_id) == _DATABASE_ID
        changed = update(relay).where(*self._is_still(state), is_mine, waiting.is_not(None))
        changed = changed.values({**_columns(new), "snapshot": _SNAPSHOT}).returning(relay.c.snapshot)
        begun = select(changed.cte("changed").c.snapshot).scalar_subquery()
        with self._at_once.connect() as connection:
            _, first_id, snapshot = connection.execute(select(_AT_LEAST_ON, waiting, begun)).one()
            if first_id is None:
                return None
            if snapshot is None:
                raise self._other_state(connection, state)
        return replace(new, snapshot=snapshot), first_id - 1

    @contextmanager
    def reading(
        self, state: RelayState, *, rows_max: int, bytes_max: int
    ) -> Iterator[Callable[[int], tuple[Page, bool]]]:
        """Yield a function that reads a page of the state's batch, all over one connection: given an id it returns the
        rows behind it, by id, no more once they have `bytes_max`; and whether none follows, as far as it is known.
        """
        each = bytes_max // rows_max
        with self._at_once.connect() as connection:

            def page(after_id: int) -> tuple[Page, bool]:
                found = self._page(connection, state, after_id, rows_max, each)
                if max(found.size_bytes, default=0) > each:  # then some came without their bytes
                    fit = bisect_left(list(accumulate(found.size_bytes)), bytes_max) + 1
                    return self._page(connection, state, after_id, min(fit, len(found.id)), None), False
                return found, len(found.id) < rows_max

            yield page

    def _page(
        self, connection: Connection, state: RelayState, after_id: int, rows_max: int, bytes_of_one: int | None
    ) -> Page:
        """bytes_of_one: larger rows come without key, value and headers, so that no more is sent than is kept."""
        rows = self._tables.rows
        lengths = [func.coalesce(func.length(column), 0) for column in (rows.c.key, rows.c.value, rows.c.headers)]
        size = lengths[0] + lengths[1] + 4 * lengths[2] + 100
        columns: list[ColumnElement[Any]] = [rows.c[name] for name in Page._fields[:-1]]
        if bytes_of_one is not None:
            columns[2:5] = [case((size <= bytes_of_one, column)).label(column.name) for column in columns[2:5]]
        wanted = select(*columns, size.label("size_bytes")).where(self._in_batch(state), rows.c.id > after_id)
        wanted = wanted.order_by(rows.c.id).limit(rows_max)
        if self.is_sqlite:
            with connection.begin():  # the driver's own rows: SQLAlchemy's would cost as much again
                return Page(*zip(*connection.execute(wanted).cursor.fetchall(), strict=True))
        # A column is an array: the server puts it together, while this process encodes the page before.
        found = _in_one_exchange(connection, select(*(func.array_agg(column) for column in wanted.subquery().c)))
        return Page() if found[0] is None else Page(*found)

    def close_batch(
        self, state: RelayState, ids: tuple[int, int], ends: Mapping[int, int], refused: Mapping[int, str]
    ) -> RelayState:
        """Delete the batch's rows and say that it is closed, in one transaction. ids: its lowest and highest, which the
        index finds sooner than the snapshot does. refused: why, by id; these are parked.

        Raises AnotherRelay.
        """
        rows, parked, kept = self._tables.rows, self._tables.parked, self._tables.kept
        with self._writing() as connection:
            for row_id, why in refused.items():
                moved = select(*rows.c, literal(why)).where(rows.c.id == row_id)
                connection.execute(insert(parked).from_select([*(c.name for c in rows.c), "why"], moved))
            if refused:
                connection.execute(delete(rows).where(rows.c.id.in_(list(refused))))
            mine = and_(self._in_batch(state), rows.c.id.between(*ids))
            if self._keeps and kept is not None:
                moved = select(*rows.c).where(mine)
                connection.execute(insert(kept).from_select([c.name for c in rows.c], moved))
            gone = connection.execute(delete(rows).where(mine)).rowcount
            batch = state.batch._replace(is_open=False, ends=dict(ends))
            new = replace(state, batch=batch, relayed=state.relayed + gone)
            self._change(connection, state, new)
        return new

    def adopt(self, old: RelayState | None, new: RelayState) -> int:
        """Write the state `new`, of another epoch, over whatever is there, and give the rows that wait another
        transaction, so that its first snapshot shows them. Returns how many wait.
        """
        rows, relay = self._tables.rows, self._tables.relay
        with self._writing() as connection:
            if old is None:
                connection.execute(insert(relay), {"topic": self._topic, "version": VERSION, **_columns(new)})
            else:
                self._change(connection, old, new)
            waiting = rows.c.topic == self._topic
            if not self.is_sqlite:
                connection.execute(update(rows).where(waiting).values(xid=text("pg_current_xact_id()")))
            return int(connection.execute(select(func.count()).select_from(rows).where(waiting)).scalar_one())

    def rows(self) -> TableRows:
        """What waits now, what is parked, and what is in vacuum's way. It counts the rows, so it is for status, not for
        each poll.
        """
        rows, parked = self._tables.rows, self._tables.parked
        counted = select(func.count(), func.min(rows.c.created)).where(rows.c.topic == self._topic)
        aside = select(func.count()).select_from(parked).where(parked.c.topic == self._topic)
        snapshot, sees_all = None, True
        with self._engine.connect() as connection:
            waiting, oldest = connection.execute(counted).one()
            count = connection.execute(aside).scalar_one()
            if not self.is_sqlite:
                if (found := connection.execute(_OLDEST_SNAPSHOT).one_or_none()) is not None:
                    snapshot = OldestSnapshot(*found)
                sees_all = bool(connection.execute(_SEES_ALL).scalar_one())
        oldest_ms = None if oldest is None else int(1000 * datetime.fromisoformat(oldest).timestamp())
        return TableRows(waiting, oldest_ms, count, snapshot, sees_all)

    def waiting_ids(self, most: int) -> set[int]:
        """The ids of rows that wait, the lowest ones."""
        rows = self._tables.rows
        wanted = select(rows.c.id).where(rows.c.topic == self._topic).order_by(rows.c.id).limit(most)
        with self._engine.connect() as connection:
            return set(connection.execute(wanted).scalars())

    def parked(self) -> list[tuple[int, str]]:
        """The rows that were parked, with why."""
        parked = self._tables.parked
        wanted = select(parked.c.id, parked.c.why).where(parked.c.topic == self._topic).order_by(parked.c.id)
        with self._engine.connect() as connection:
            return [(row_id, why) for row_id, why in connection.execute(wanted)]

    def end_parked(self, ids: Sequence[int], *, again: bool) -> list[int]:
        """Delete these parked rows; `again`: after they were inserted as new rows. Returns those that were there."""
        rows, parked = self._tables.rows, self._tables.parked
        names = ("topic", "partition", "key", "value", "headers", "timestamp_ms")
        chosen = and_(parked.c.topic == self._topic, parked.c.id.in_(list(ids)))
        with self._writing() as connection:
            found = list(connection.execute(select(parked.c.id).where(chosen).order_by(parked.c.id)).scalars())
            if again:
                moved = select(*(parked.c[name] for name in names)).where(chosen).order_by(parked.c.id)
                connection.execute(insert(rows).from_select(names, moved))
            connection.execute(delete(parked).where(chosen))
        return found

    def _change(self, connection: Connection, state: RelayState, new: RelayState) -> None:
        changed = connection.execute(update(self._tables.relay).where(*self._is_still(state)).values(**_columns(new)))
        if changed.rowcount != 1:
            raise self._other_state(connection, state)

    def _is_still(self, state: RelayState) -> list[ColumnElement[bool]]:
        relay = self._tables.relay
        same = [relay.c[name] == value for name, value in _columns(state).items() if name in _CONDITION]
        return [relay.c.topic == self._topic, *same]

    def _other_state(self, connection: Connection, state: RelayState) -> AnotherRelay:
        """The error for a state that is not `state` any more."""
        relay = self._tables.relay
        found = connection.execute(select(relay).where(relay.c.topic == self._topic)).one_or_none()
        if found is None:
            return AnotherRelay(self._topic, "of nobody", "as its state was removed")
        why = f"at batch {found.epoch}-{found.batch}, under grant {found.generation}.{found.leader_epoch}"
        error = StateChanged if _holder_of(found) == state.holder else AnotherRelay
        return error(self._topic, found.outbox_id, why)

    def _in_batch(self, state: RelayState) -> ColumnElement[bool]:
        rows = self._tables.rows
        mine = rows.c.topic == self._topic
        if self.is_sqlite:
            return and_(mine, rows.c.id <= int(state.snapshot or 0), rows.c.id > int(state.previous or 0))
        shown = text("pg_visible_in_snapshot(xid, cast(:shown as pg_snapshot))").bindparams(shown=state.snapshot)
        if state.previous is None:
            return and_(mine, shown)
        before = text("NOT pg_visible_in_snapshot(xid, cast(:before as pg_snapshot))")
        return and_(mine, shown, before.bindparams(before=state.previous))

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that is on disk once it is committed. Raises StateChanged in another database than `check` saw:
        a pooler may have been led elsewhere, where another row has this snapshot's numbers.
        """
        with self._engine.connect().execution_options(**{_WRITES: True}) as connection, connection.begin():
            if not self.is_sqlite:
                _, found = connection.execute(select(_AT_LEAST_ON, _DATABASE_ID)).one()
                if found != self._system_id:
                    raise StateChanged(self._topic, "of nobody", f"as this is database {found} by now")
            yield connection


_AT_LEAST_ON: ColumnElement[str] = literal_column(
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') "
    "WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)"
)
_SYSTEM_ID = "system_identifier || '/' || oid FROM pg_control_system(), pg_database WHERE datname = current_database()"
_DATABASE_ID: ColumnElement[str] = literal_column(f"(SELECT {_SYSTEM_ID})", Text)
_SNAPSHOT = text("CAST(pg_current_snapshot() AS text)")
# PostgreSQL can't tell how many rows a snapshot shows, takes them for few, and would sort all that wait for each page.
_BY_ID = ("BEGIN READ ONLY", "SET LOCAL enable_sort = off")
_OLDEST_SNAPSHOT = text("""
SELECT who, transactions, CAST(1000 * extract(epoch FROM since) AS bigint) FROM (
    SELECT 'process ' || pid || coalesce(' of ' || usename, '') AS who,
        greatest(age(backend_xmin), age(backend_xid)) AS transactions, xact_start AS since
    FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND (datname = current_database() OR datname IS NULL)
        AND backend_type <> 'autovacuum worker'  -- its own snapshot keeps nothing
    UNION ALL SELECT 'prepared transaction ' || gid, age(transaction), prepared
    FROM pg_prepared_xacts WHERE database = current_database()
    UNION ALL SELECT 'replication slot ' || slot_name, age(xmin), NULL FROM pg_replication_slots
) AS held WHERE transactions IS NOT NULL ORDER BY transactions DESC LIMIT 1
""")
_SEES_ALL = text("SELECT pg_has_role('pg_read_all_stats', 'USAGE')")
_CONDITION = {"outbox_id", "directory_id", "generation", "leader_epoch", "epoch", "batch", "is_open"}


@contextmanager
def database_errors() -> Iterator[None]:
    """Raise DatabaseFailed, in one line, for what the driver raises."""
    try:
        yield
    except SQLAlchemyError as error:
        raise DatabaseFailed(f"the database: {first_line(error)}") from error


def _in_one_exchange(connection: Connection, wanted: ClauseElement) -> Any:
    """The one row of a query by id. A thread that encodes keeps the one that reads waiting at each further exchange.
    Bytes come as they are: half the size of their text, and nothing to parse.
    """
    compiled = wanted.compile(connection.engine)
    driver: Any = connection.connection.driver_connection
    psycopg: Any = connection.dialect.dbapi
    try:
        with driver.pipeline(), driver.cursor(binary=True) as cursor:
            for statement in _BY_ID:
                driver.execute(statement)
            cursor.execute(str(compiled), compiled.params)
            driver.execute("COMMIT")
            return cursor.fetchone()
    except psycopg.Error as error:
        connection.invalidate(error)  # what is left unread in it is of no use
        raise DBAPIError.instance(str(compiled), None, error, psycopg.Error) from error


def first_line(error: Exception) -> str:
    """What the driver said, without the statement."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def is_away(error: DBAPIError) -> bool:
    """Whether it says of the database that it is away, busy or going, and not of the statement that it is wrong."""
    return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)


def _holder_of(found: Any) -> Holder:
    """Of a state row."""
    return Holder(found.outbox_id, found.directory_id, found.generation, found.leader_epoch)


def _columns(state: RelayState) -> dict[str, Any]:
    return {
        **asdict(state.holder),
        "system_id": state.system_id,
        "epoch": state.batch.epoch,
        "batch": state.batch.batch,
        "is_open": int(state.batch.is_open),
        "ends": json.dumps({str(partition): end for partition, end in state.batch.ends.items()}),
        "snapshot": state.snapshot,
        "previous": state.previous,
        "relayed": state.relayed,
    }


def _ends_of(written: str) -> dict[int, int]:
    try:
        return {int(partition): int(end) for partition, end in parse_json(written).items()}
    except (ValueError, TypeError, AttributeError):
        raise TablesDiffer("the state's column `ends` holds no JSON of partitions and offsets") from None


def _engine_of(dsn: str) -> Engine:
    try:
        url = make_url(dsn)
    except ArgumentError:
        raise BadArgument("dsn", "give a URL: postgresql://USER@HOST/DATABASE, or sqlite:///FILE") from None
    if url.get_backend_name() not in {"postgresql", SQLITE}:
        raise BadArgument("dsn", f"{url.get_backend_name()} is neither postgresql nor sqlite")
    if url.drivername == "postgresql" or "async" in url.drivername:
        url = url.set(drivername="postgresql+psycopg")
    elif url.get_backend_name() == SQLITE:
        if not url.database or url.database == ":memory:":
            raise BadArgument("dsn", "a database in memory is seen by its own connection alone: name a file")
        url = url.set(drivername=SQLITE)
    try:
        # A pooler that gives each transaction another session knows no statement that was prepared in one before.
        arguments = {} if url.get_backend_name() == SQLITE else {"prepare_threshold": None}
        engine = create_engine(url, pool_size=2, max_overflow=0, pool_pre_ping=True, connect_args=arguments)
    except (ImportError, NoSuchModuleError) as error:
        raise BadArgument("dsn", f"{error}: pip install 'pushrep[tables]'") from None
    if url.get_backend_name() == SQLITE:
        _write_safely(engine)
    return engine


def _write_safely(engine: Engine) -> None:
    """A transaction that writes takes SQLite's one lock at its begin, and is on disk at its end."""

    @event.listens_for(engine, "connect")
    def connected(driver: Any, _record: Any) -> None:
        driver.isolation_level = None  # SQLAlchemy's begin is ours
        driver.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
        driver.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(_WRITES) else "BEGIN")


def _fit_postgresql(connection: Connection) -> str:
    version = int(connection.execute(text("SHOW server_version_num")).scalar_one()) // 10_000
    if version < _POSTGRESQL_MIN:
        raise UnfitDatabase(f"this is PostgreSQL {version}; the relay needs {_POSTGRESQL_MIN} or newer")
    if connection.execute(text("SELECT pg_is_in_recovery()")).scalar_one():
        raise UnfitDatabase(
            "this server is a standby, which takes no write: target_session_attrs=read-write finds the other one"
        )
    return str(connection.execute(text(f"SELECT {_SYSTEM_ID}")).scalar_one())
