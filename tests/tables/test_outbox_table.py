"""An event is a row in the caller's transaction, decided and checked in `add`."""

import asyncio
import contextlib
import datetime as dt
import decimal
import enum
import json
import sqlite3
import uuid
from dataclasses import dataclass

import msgspec
import psycopg
import pydantic
import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Column, Integer, MetaData, Table, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import pushrep
from filtering import METADATA_HEADER
from pushrep.errors import BadArgument
from pushrep.outbox import RecordRefused
from pushrep.tables import EVENT_ID, NotInTransaction, OutboxTable
from pushrep.tables.outbox_table import headers_of, headers_text
from pushrep.values import to_json
from tests.tables.conftest import OrderPlaced


@pytest.fixture
def metadata():
    return MetaData()


@pytest.fixture
def table(metadata):
    return OutboxTable(metadata)


@pytest.fixture
def orders(table, metadata, engine):
    metadata.create_all(engine)
    return table.topic("orders", OrderPlaced, partitions=4, key=lambda one: one.customer)


def test_the_row_shares_the_fate_of_the_transaction(orders, engine):
    with Session(engine) as session:
        orders.add(session, OrderPlaced(1, "ann"))
        [row] = orders.pending(session)
        session.rollback()
        assert orders.pending(session) == []
    assert json.loads(row.value) == {"order": 1, "customer": "ann"}
    assert row.key == b"ann"


def test_a_changed_aggregate_is_written_before_the_event(engine, metadata, table):
    """Its row is locked then, so events of one row are in the order of commits."""
    from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

    class Base(DeclarativeBase):
        pass

    Base.metadata = metadata

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]

    metadata.create_all(engine)
    topic = table.topic("orders", OrderPlaced, partitions=1)
    statements = []
    from sqlalchemy import event

    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2].split()[0]))
    with Session(engine) as session, session.begin():
        session.add(Order(id=1, state="new"))
    statements.clear()
    with Session(engine) as session, session.begin():
        session.get_one(Order, 1).state = "paid"
        topic.add(session, OrderPlaced(1, "ann"))
    assert [one for one in statements if one in {"UPDATE", "INSERT"}] == ["UPDATE", "INSERT"]


@pytest.mark.parametrize("way", ["session", "scoped", "connection", "driver"])
def test_each_kind_of_connection_adds_in_its_own_transaction(way, orders, dsn, engine):
    if way == "session":
        with Session(engine) as session, session.begin():
            orders.add(session, OrderPlaced(1, "ann"))
    elif way == "scoped":
        session = scoped_session(sessionmaker(engine))
        orders.add(session, OrderPlaced(1, "ann"))
        session.commit()
        session.remove()
    elif way == "connection":
        with engine.begin() as connection:
            orders.add(connection, OrderPlaced(1, "ann"))
    else:
        connect = sqlite3.connect if dsn.startswith("sqlite") else psycopg.connect
        connection = connect(dsn.removeprefix("sqlite:///"))
        orders.add(connection, OrderPlaced(1, "ann"), headers=[("trace", b"1"), ("raw", b"\xff")], timestamp_ms=5)
        connection.commit()
        connection.close()
    with Session(engine) as session:
        [row] = orders.pending(session)
    assert row.key == b"ann"
    if way == "driver":
        assert (row.headers, row.timestamp_ms) == ([("trace", b"1"), ("raw", b"\xff")], 5)


def test_a_connection_that_commits_by_itself_is_refused(orders, dsn, engine):
    alone = engine.execution_options(isolation_level="AUTOCOMMIT")
    with alone.connect() as connection, pytest.raises(NotInTransaction):
        orders.add(connection, OrderPlaced(1, "ann"))
    with Session(alone) as session, pytest.raises(NotInTransaction):
        orders.add(session, OrderPlaced(1, "ann"))
    if dsn.startswith("sqlite"):
        driver = sqlite3.connect(dsn.removeprefix("sqlite:///"), isolation_level=None)
        begin = "BEGIN"
    else:
        driver = psycopg.connect(dsn, autocommit=True)
        begin = "BEGIN"
    with pytest.raises(NotInTransaction):
        orders.add(driver, OrderPlaced(1, "ann"))
    driver.execute(begin)
    orders.add(driver, OrderPlaced(2, "ann"))
    driver.execute("COMMIT")
    driver.close()
    with Session(engine) as session:
        assert [json.loads(row.value)["order"] for row in orders.pending(session)] == [2]


def test_asynchronous_kinds_add_by_add_async(orders, dsn, engine):
    async def add():
        url = dsn.replace("sqlite:", "sqlite+aiosqlite:").replace("postgresql:", "postgresql+psycopg:")
        made = create_async_engine(url)
        async with AsyncSession(made) as session, session.begin():
            await orders.add_async(session, OrderPlaced(1, "ann"))
            with pytest.raises(TypeError, match="add_async"):
                orders.add(session, OrderPlaced(1, "ann"))
            with pytest.raises(TypeError, match=r"await session\.run_sync\(topic\.pending\)"):
                orders.pending(session)
            assert [row.key for row in await session.run_sync(orders.pending)] == [b"ann"]
        async with made.begin() as connection:
            await orders.add_async(connection, OrderPlaced(2, "bob"))
        alone = made.execution_options(isolation_level="AUTOCOMMIT")
        async with alone.connect() as connection:
            with pytest.raises(NotInTransaction):
                await orders.add_async(connection, OrderPlaced(3, "bob"))
        await made.dispose()
        if not dsn.startswith("sqlite"):
            async with await psycopg.AsyncConnection.connect(dsn) as connection:
                await orders.add_async(connection, OrderPlaced(4, "bob"))

    asyncio.run(add())
    with Session(engine) as session:
        found = [json.loads(row.value)["order"] for row in orders.pending(session)]
    assert found == ([1, 2] if dsn.startswith("sqlite") else [1, 2, 4])


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
class TestRefusals:
    """What no outbox takes is refused while the service can still roll back."""

    @pytest.fixture(autouse=True)
    def session(self, engine):
        with Session(engine) as session:
            self.session = session
            yield

    def test_another_type_of_event(self, orders):
        with pytest.raises(TypeError, match="events of topic orders are OrderPlaced, not dict"):
            orders.add(self.session, {"order": 1})

    def test_a_value_that_no_record_holds(self, table):
        topic = table.topic("blobs", bytes, partitions=1)
        with pytest.raises(RecordRefused, match="value"):
            topic.add(self.session, bytes(1 << 20))

    @pytest.mark.parametrize("name", [EVENT_ID, "created", METADATA_HEADER])
    def test_a_header_of_the_relay(self, orders, name):
        with pytest.raises((BadArgument, RecordRefused), match=name):
            orders.add(self.session, OrderPlaced(1, "ann"), headers=[(name, b"")])

    @pytest.mark.parametrize("headers", [{"who": b"me"}, 5, "ab", [("who", "me")]])
    def test_headers_that_are_none(self, orders, headers):
        with pytest.raises(RecordRefused, match=r"headers: (give|a header is)"):
            orders.add(self.session, OrderPlaced(1, "ann"), headers=headers)

    def test_a_connection_that_is_not_asynchronous(self, orders, dsn):
        with contextlib.closing(sqlite3.connect(dsn.removeprefix("sqlite:///"))) as driver:
            for session in (self.session, driver):
                with pytest.raises(TypeError, match=r"is not asynchronous: add\("):
                    asyncio.run(orders.add_async(session, OrderPlaced(1, "ann")))
            assert not driver.in_transaction

    def test_a_partition_outside(self, table):
        topic = table.topic("orders", OrderPlaced, partitions=2, partition=lambda one: one.order)
        with pytest.raises(BadArgument, match="partition"):
            topic.add(self.session, OrderPlaced(2, "ann"))

    @pytest.mark.parametrize(
        ("argument", "given"),
        [
            ("partitions", 0),
            ("key", b"k"),
            ("serializer", "json"),
            ("serializer", None),
            ("event_type", "OrderPlaced"),
            ("name", "a/b"),
        ],
    )
    def test_a_topic_that_can_not_be(self, table, argument, given):
        settings = {"name": "orders", "event_type": OrderPlaced, "partitions": 1} | {argument: given}
        with pytest.raises(BadArgument, match=argument):
            table.topic(settings.pop("name"), settings.pop("event_type"), **settings)

    def test_a_table_name_that_is_none(self, metadata):
        with pytest.raises(BadArgument, match="name"):
            OutboxTable(metadata, 'x"; DROP TABLE orders')

    def test_a_key_that_is_no_text(self, table):
        topic = table.topic("orders", OrderPlaced, partitions=2, key=lambda one: one.order)
        with pytest.raises(RecordRefused, match=r"key: give text"):
            topic.add(self.session, OrderPlaced(2, "ann"))

    def test_a_connection_of_another_database(self, orders):
        with pytest.raises(TypeError, match="psycopg's or sqlite3's"):
            orders.add(object(), OrderPlaced(1, "ann"))


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_keys_go_where_kafkas_own_partitioner_puts_them(orders, engine):
    from aiokafka.partitioner import DefaultPartitioner

    kafka = DefaultPartitioner()
    with Session(engine) as session:
        for n in range(50):
            orders.add(session, OrderPlaced(n, f"customer-{n}"))
        for row in orders.pending(session):
            assert row.partition == kafka(row.key, [0, 1, 2, 3], [0, 1, 2, 3])
        session.rollback()


@pytest.mark.parametrize("dsn", ["sqlite"], indirect=True)
def test_without_a_key_rows_go_to_the_partitions_in_turn(table, orders, engine):
    topic = table.topic("turns", OrderPlaced, partitions=3)
    with Session(engine) as session:
        for n in range(6):
            topic.add(session, OrderPlaced(n, "ann"))
        assert [row.partition for row in topic.pending(session)] == [0, 1, 2, 0, 1, 2]


@given(st.lists(st.tuples(st.text(), st.none() | st.binary())))
def test_headers_come_back_from_their_column(headers):
    assert headers_of(headers_text(headers)) == headers


JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(st.text() | JSON.map(json.dumps))
def test_whatever_stands_in_the_headers_column_is_headers_or_one_error(written):
    with contextlib.suppress(ValueError):
        assert all(isinstance(name, str) for name, _ in headers_of(written))


class Color(enum.Enum):
    RED = "red"


@dataclass
class Line:
    sku: str
    price: decimal.Decimal


@dataclass
class Everything:
    at: dt.datetime
    day: dt.date
    id: uuid.UUID
    color: Color
    lines: list[Line]
    tags: frozenset[str]


class Model(pydantic.BaseModel):
    at: dt.datetime
    price: decimal.Decimal


class Struct(msgspec.Struct):
    order: int


def test_the_default_serializer_takes_what_services_have():
    at = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    event = Everything(at, at.date(), uuid.UUID(int=1), Color.RED, [Line("a", decimal.Decimal("1.10"))], frozenset("a"))
    assert json.loads(to_json(event)) == {
        "at": "2026-01-02T03:04:05+00:00", "day": "2026-01-02", "id": str(uuid.UUID(int=1)), "color": "red",
        "lines": [{"sku": "a", "price": "1.10"}], "tags": ["a"],
    }  # fmt: skip
    assert json.loads(to_json(Model(at=at, price=decimal.Decimal("1.10")))) == {
        "at": "2026-01-02T03:04:05Z", "price": "1.10",
    }  # fmt: skip
    assert to_json(Struct(1)) == b'{"order":1}'
    assert json.loads(to_json([Line("a", Model(at=at, price=decimal.Decimal(1))), Struct(1)])) == [
        {"sku": "a", "price": {"at": "2026-01-02T03:04:05Z", "price": "1"}}, {"order": 1},
    ]  # fmt: skip
    assert to_json({"ü": "é"}) == '{"ü":"é"}'.encode()
    assert to_json(b"\xff") == b"\xff"
    with pytest.raises(TypeError, match="serializer="):
        to_json(object())
    with pytest.raises(ValueError, match="JSON"):
        to_json(float("nan"))


def test_both_databases_have_the_columns_that_the_page_names(engine, metadata, orders):
    with Session(engine) as session, session.begin():
        orders.add(session, OrderPlaced(1, "ann"))
    with engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM pushrep_outbox")).mappings().one()
    assert set(row) == {"id", "xid", "topic", "partition", "key", "value", "headers", "timestamp_ms", "created"}
    assert dt.datetime.fromisoformat(row["created"]).tzinfo is not None


def test_alembic_makes_and_keeps_the_tables(engine, dsn, metadata):
    """From nothing by what it generates; then it finds no difference, and none to what create_all makes."""
    alembic = pytest.importorskip("alembic", reason="Alembic is not installed")
    from alembic.autogenerate import compare_metadata, produce_migrations
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    Table("mine", metadata, Column("id", Integer, primary_key=True))
    OutboxTable(metadata, keep_rows=True)
    # SQLite has no identities, and Alembic calls each a difference: docs/tables.md.
    options = {"include_object": without_identities} if dsn.startswith("sqlite") else {}
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts=options)
        made = produce_migrations(context, metadata).upgrade_ops
        script = alembic.autogenerate.render_python_code(made, migration_context=context)
        with Operations.context(context):
            exec(f"def upgrade():\n    {script}\nupgrade()", {"op": alembic.op, "sa": sqlalchemy, "pushrep": pushrep})
    for again in (True, False):
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=options | {"compare_server_default": again})
            assert compare_metadata(context, metadata) == []
        metadata.drop_all(engine)
        metadata.create_all(engine)


def without_identities(item, _name, kind, *_):
    return kind != "column" or item.identity is None


def test_each_transaction_of_a_session_wakes_the_relays_of_its_topic_once(table, metadata):
    woken = []
    table.when_committed("orders", lambda: woken.append("orders"))
    table.when_committed("parcels", lambda: woken.append("parcels"))
    with Session() as session:
        for count in range(1, 4):
            session.begin()
            for _ in range(2):
                table.wake_after_commit("orders", session)
                table.wake_after_commit("letters", session)  # no relay of it runs here
            assert len(woken) == count - 1, "not before the commit"
            session.commit()
            assert woken == ["orders"] * count
        session.begin()
        session.commit()
    assert woken == ["orders"] * 3, "a transaction without an event wakes nobody"
