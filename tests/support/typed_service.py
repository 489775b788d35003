"""A user's service and its readers, for the type checkers alone: `make types` reads it, nothing runs it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import StringSerializer
from fastapi import Depends, FastAPI, Request
from opentelemetry import trace
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from filtering import NotDeserialized, tracing
from filtering.consumers.aiokafka import ReplayFilteredConsumer as AsyncConsumer
from filtering.consumers.confluent import ReplayFilteredConsumer
from pushrep import AsyncOutbox, Outbox
from pushrep.django import emit
from pushrep.tables import EVENT_ID, EventId, OutboxTable, PendingRow, TableRelay
from pushrep.testing import FakeOutbox
from pushrep.values import NotWarm, to_json


@dataclass
class Order:
    """An event."""

    id: int
    customer: str


def _order_bytes(order: Order) -> bytes:
    return to_json(order)


def _partition_of(order: Order) -> int:
    return order.id % 4


def service(session: Session, client: SchemaRegistryClient) -> int:
    """Rows, outboxes, slots."""
    avro = AvroSerializer(client, "{}")  # pyright: ignore[reportCallIssue]
    orders = OutboxTable(MetaData()).topic(
        "orders", Order, partitions=4, key=lambda order: order.customer, serializer=avro
    )
    orders.warm()
    try:
        orders.add(session, Order(1, "ada"))
    except NotWarm as cold:
        raise SystemExit(cold.topic) from cold
    with Outbox.open(
        "o", "orders", 4, "shop", carrier="header", serializer=_order_bytes, key_serializer=StringSerializer(),
        partition_by=_partition_of,
    ) as outbox:  # fmt: skip
        outbox.append(value=Order(1, "ada"), key="ada")
        outbox.append_many(0, [Order(1, "ada")], keys=["ada"])
    with Outbox.open_slot("s", "orders", 4, "shop", carrier="header", serializer=avro, partition_by="key") as slot:
        return slot.append(value={"id": 1}, key=b"ada").result(timeout=5)


async def in_a_loop(client: SchemaRegistryClient) -> int:
    """The asynchronous ones."""
    avro = AvroDeserializer(client)  # pyright: ignore[reportCallIssue]
    async with AsyncConsumer("orders", group_id="g", deserializer=avro) as consumer:
        order = (await consumer.getone()).value
    async with AsyncOutbox.open("a", "orders", 4, "shop", serializer=to_json) as outbox:
        return await (await outbox.append(0, order))


def report(client: SchemaRegistryClient) -> list[object]:
    """A reader."""
    avro = AvroDeserializer(client)  # pyright: ignore[reportCallIssue]
    with ReplayFilteredConsumer({"group.id": "g"}, carrier="header", deserializer=avro) as consumer:
        try:
            return [message.value() for message in consumer.consume(5)]
        except NotDeserialized as refused:
            return [*refused.records, *(message for message, _ in refused.failed)]


TABLE = OutboxTable(MetaData())
ORDERS = TABLE.topic("orders", Order, partitions=4, key=lambda order: order.customer)
new_session = async_sessionmaker(create_async_engine("postgresql+psycopg://shop@db/shop"))


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    tracing.instrument(trace.get_tracer_provider())
    async with AsyncOutbox.open_slot("api", "orders", 4, "shop", slots=8, serializer=to_json) as outbox:
        app.state.outbox = outbox
        yield


async def _session() -> AsyncIterator[AsyncSession]:
    async with new_session() as session:
        yield session


app = FastAPI(lifespan=_lifespan)


@app.post("/orders", status_code=201)
async def place(session: Annotated[AsyncSession, Depends(_session)], request: Request) -> int:
    """An event in the transaction of a request, and one beside it."""
    async with session.begin():
        await ORDERS.add_async(session, Order(1, "ada"), headers=[("who", b"me")])
    outbox: AsyncOutbox = request.app.state.outbox
    return await (await outbox.append(0, Order(1, "ada")))


def relay(outbox: Outbox) -> EventId | None:
    """A relay as a thread of the service."""
    with TableRelay(outbox, "sqlite:///shop.db", table=TABLE, on_refused="park") as running:
        assert running.status().trouble is None
    [record] = outbox.log(0).records(0)
    return EventId.parse(dict(record.headers)[EVENT_ID])


def pending(session: Session) -> list[PendingRow]:
    """What mypy and pyright refuse: another type of event than the topic's. An unused `ignore` is an error."""
    ORDERS.add(session, "an order")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    emit(ORDERS, "an order")  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
    return ORDERS.pending(session)


def fake(pushrep_outbox: FakeOutbox) -> int:
    """A test's outbox is what the service takes."""
    service_outbox: Outbox = pushrep_outbox
    pushrep_outbox.fail("full", times=1)
    return service_outbox.append(0, b"v").result(timeout=5)
