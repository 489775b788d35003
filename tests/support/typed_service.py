"""A user's service and its readers, for the type checkers alone: `make types` reads it, nothing runs it."""

from dataclasses import dataclass

from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import StringSerializer
from sqlalchemy import MetaData
from sqlalchemy.orm import Session

from filtering import NotDeserialized
from filtering.consumers.aiokafka import ReplayFilteredConsumer as AsyncConsumer
from filtering.consumers.confluent import ReplayFilteredConsumer
from pushrep import AsyncOutbox, Outbox
from pushrep.tables import OutboxTable
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
    avro = AvroSerializer(client, "{}")
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
    async with AsyncConsumer("orders", group_id="g", deserializer=AvroDeserializer(client)) as consumer:
        order = (await consumer.getone()).value
    async with AsyncOutbox.open("a", "orders", 4, "shop", serializer=to_json) as outbox:
        return await (await outbox.append(0, order))


def report(client: SchemaRegistryClient) -> list[object]:
    """A reader."""
    with ReplayFilteredConsumer({"group.id": "g"}, carrier="header", deserializer=AvroDeserializer(client)) as consumer:
        try:
            return [message.value() for message in consumer.consume(5)]
        except NotDeserialized as refused:
            return [*refused.records, *(message for message, _ in refused.failed)]
